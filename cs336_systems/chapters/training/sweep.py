"""A table of chapter `training`: attention alone on rectangular shapes, and on long ones under a cap on memory.

    cs336 bench sweep --tiers 128:64,256:128 --attention sdpa flash_triton

A tier is `queries:keys`, as between a decoder and what it looks at: not causal. Batch 4, 12 heads of dimension 64, as
in `small`. Of each case forward (with its graph) and both passes are timed in turns; before that comes a trial of each,
whose memory is read. Under `cap_gib` a process takes no more GPU memory than a smaller GPU has: what runs out there is
a row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.memory_cap import capped
from cs336_systems.measure.clocks import timing
from cs336_systems.store import numbers
from cs336_systems.store.status import failure_is_a_row, oom_is_a_row

if TYPE_CHECKING:
    import torch

DEPENDS = (*depends.PLAIN, *depends.TILED, *depends.TRITON, *depends.EVENTS, "chapters/shared/memory_cap.py")
GROUP = ("num_queries", "num_keys", "head_dim", "heads", "batch", "dtype", "cap_gib")
PARTS = ("forward", "both")
METRICS = (
    *(f"{part}_ms_{p}" for part in PARTS for p in ("p20", "p50", "p80")),
    "forward_peak_gib", "peak_gib",  # of tensors: of forward alone, and of both passes
    "failed_in",  # the pass that failed: of a case that runs out in backward, forward is timed all the same
)  # fmt: skip
TIERS = ((128, 64), (256, 128), (512, 256), (1024, 512), (2048, 1024))
LONG, CAP_GIB = (8192, 16384), 24
ATTENTIONS = ("reference", "reference_compiled", "sdpa", "flash_torch", "flash_triton")
DTYPES = ("fp32", "bf16", "fp16")
ROUNDS, WARMUP_MS, REP_MS = 3, 5, 20
CHOICES = {
    "attention": (
        *ATTENTIONS, "flash_cuda", "flash_compiled_backward", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient",
        "flex_compiled",
    ),
    "head_dim": range(16, 257), "heads": range(1, 2**16), "batch": range(1, 2**16), "dtype": DTYPES,
    "cap_gib": range(1025),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One attention of (batch, heads, num_queries, head_dim) on num_keys keys; cap_gib 0: all of the GPU's memory.
    `repeat` 1 measures the same thing again."""

    attention: str
    num_queries: int
    num_keys: int
    head_dim: int = 64
    heads: int = 12
    batch: int = 4
    dtype: str = "bf16"
    cap_gib: int = 0
    repeat: int = 0


def tier(text: str) -> tuple[int, int]:
    """Queries and keys of "128:64"; ValueError that names the text and what is allowed."""
    with suppress(ValueError):
        queries, keys = map(numbers.whole, text.split(":"))
        if 0 < queries < 2**24 and 0 < keys < 2**24:
            return queries, keys
    raise ValueError(f"tier {text!r}; allowed: queries:keys, two positive whole numbers, as in 128:64")


def cases_of(
    tiers: Sequence[tuple[int, int]], attentions: Sequence[str] = ATTENTIONS, **fields: Any
) -> list[Case]:
    """Every implementation on every tier, the last one of each twice (A/A)."""
    return [
        Case(attention, *shape, **fields, repeat=repeat)
        for shape in tiers
        for attention, repeat in [*((name, 0) for name in attentions), (attentions[-1], 1)]
    ]


def grid(preset: str) -> list[Case]:
    """The tiers, and squares of LONG under CAP_GIB; or a few small shapes. The longest square goes without the loop
    over tiles in Python, whose forward pass takes a quarter of a minute there."""
    if preset == "smoke":
        return cases_of(
            ((64, 32), (128, 64)), ("reference", "flash_torch", "sdpa"), heads=2, batch=1, dtype="fp32"
        )
    squares = cases_of([(n, n) for n in LONG], cap_gib=CAP_GIB)
    return [
        *cases_of(TIERS),
        *(case for case in squares if (case.attention, case.num_keys) != ("flash_torch", max(LONG))),
    ]


def estimate_s(group: Sequence[Case]) -> float:
    """Seconds that a group takes, roughly: compiling, and slow implementations of long sequences."""
    scores = group[0].batch * group[0].heads * group[0].num_queries * group[0].num_keys
    return 1.0 + sum(0.3 + (4.0 if "compiled" in c.attention else 0.0) + scores * 1.2e-10 for c in group)


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one shape in turns; see the package's docstring for the contract."""
    import torch

    if cases[0].dtype not in DTYPES:
        raise ValueError(f"unknown dtype {cases[0].dtype!r}; allowed: {', '.join(DTYPES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[dict[str, Any]] = [{} for _ in cases]
    shared: dict[str, Any] = {}
    before = torch.get_float32_matmul_precision()
    if any("compiled" in case.attention for case in cases):
        torch._dynamo.reset()  # past eight shapes of one function, Dynamo would fall back to eager without a word
    try:
        with oom_is_a_row(shared), capped(cases[0].cap_gib, device):
            torch.set_float32_matmul_precision("highest")
            inputs = _inputs(cases[0], device)
            for case, metrics in zip(cases, found, strict=True):
                _tried(case, inputs, device, metrics)
            _time(cases, found, inputs, device)
    finally:
        torch.set_float32_matmul_precision(before)
    return [metrics or dict(shared) for metrics in found]


def _inputs(case: Case, device: str) -> list[torch.Tensor]:
    """q, k, v and dO."""
    import torch

    generator = torch.Generator(device).manual_seed(case.num_queries + case.num_keys)
    shapes = [(case.batch, case.heads, n, case.head_dim) for n in (case.num_queries, case.num_keys)]
    make = lambda shape: torch.randn(
        shape, generator=generator, device=device, dtype=peers.torch_dtype(case.dtype)
    )
    q, k, v, grad = (make(shapes[place]) for place in (0, 1, 1, 0))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def _calls(
    case: Case, inputs: list[torch.Tensor], device: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward, and both passes."""
    import torch

    impl = peers.build(case.attention, False, device, case.num_keys)
    *leaves, grad = inputs
    forward = lambda: impl.apply(*leaves)
    return forward, lambda: torch.autograd.grad(forward(), leaves, grad)


def _tried(case: Case, inputs: list[torch.Tensor], device: str, metrics: dict[str, Any]) -> None:
    """Tries both passes; notes their memory, or where it was not enough."""
    import torch

    with failure_is_a_row(metrics):
        forward, both = _calls(case, inputs, device)
        metrics["failed_in"] = "forward"
        forward()  # compiles
        metrics["forward_peak_gib"] = timing.peak_gib(forward)
        metrics["failed_in"] = "backward"
        both()
        metrics["peak_gib"] = timing.peak_gib(both)
        del metrics["failed_in"]
    gc.collect()  # a failure's frames may hold tensors
    if device != "cpu":
        torch.cuda.empty_cache()


def _time(
    cases: Sequence[Case], found: Sequence[dict[str, Any]], inputs: list[torch.Tensor], device: str
) -> None:
    """Times forward of the cases, and then both passes, as far as they run."""
    for part, fatal in zip(PARTS, ("forward", "backward"), strict=True):
        ready = {
            str(place): _calls(case, inputs, device)[PARTS.index(part)]
            for place, (case, metrics) in enumerate(zip(cases, found, strict=True))
            if metrics.get("failed_in", "") not in ("forward", fatal)
            and "skipped" not in metrics.get("status", "")
        }
        if ready:
            times = timing.interleaved(
                ready, device=device, rounds=ROUNDS, warmup_ms=WARMUP_MS, rep_ms=REP_MS
            )
            for place, seen in times.items():
                found[int(place)] |= seen.metrics(part)
