"""A table of chapter `training`: attention alone on rectangular shapes, and on long ones under a cap on memory.

    cs336 bench sweep --tiers 128:64,256:128 --attention sdpa flash_triton

A tier is `queries:keys`, as between a decoder and what it looks at: not causal. Batch 4, 12 heads of dimension 64, as
in `small`. Of each case forward (with its graph) and both passes are timed; before that comes a trial of each, whose
memory is read. All tiers take turns in one process: small ones take the time of the host, which changes. Under
`cap_gib` a process takes no more GPU memory than a smaller GPU has: what runs out there is a row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.memory_cap import capped
from cs336_systems.measure.clocks.calls import Calls
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import Candidate, Phases, columns, prepared, time_together
from cs336_systems.measure.device import comparable, default_device, give_back, peak_gib, torch_dtype
from cs336_systems.store import numbers
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

DEPENDS = (
    *depends.PLAIN, *depends.TILED, *depends.TRITON, *depends.CALL_CLOCK, *depends.STEP_CLOCK,
    "chapters/shared/memory_cap.py",
)  # fmt: skip
GROUP = ("head_dim", "heads", "batch", "dtype", "cap_gib")
PARTS = ("forward", "both")
METRICS = (
    *(column for part in PARTS for column in columns(part)),
    "forward_peak_gib", "peak_gib",  # of the pass's own tensors: of forward alone, and of both passes
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


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case], warmup: int = 5, iters: int = 0) -> list[dict[str, Any]]:
    """Measures the cases of all shapes in turns. iters: calls to time of each, after `warmup` others and by the host's
    clock, instead of as many as a time holds: such rows are not to be kept."""
    import torch

    device = default_device()
    every_shape = torch._dynamo.config.patch(recompile_limit=len(cases) + 8)
    with comparable(), every_shape, capped(cases[0].cap_gib, device):
        candidates = prepared(cases, lambda candidate: _try_out(candidate, device), device)
        _time(candidates, device, warmup, iters)
        return [candidate.metrics for candidate in candidates]


def _tensors(case: Case, device: str) -> list[torch.Tensor]:
    """Q, K, V, which want gradients, and dO: (batch, heads, n, head_dim) each."""
    import torch

    generator = torch.Generator(device).manual_seed(case.num_queries + case.num_keys)
    lengths = (case.num_queries, case.num_keys, case.num_keys, case.num_queries)
    make = functools.partial(torch.randn, generator=generator, device=device, dtype=torch_dtype(case.dtype))
    *leaves, grad = (make((case.batch, case.heads, n, case.head_dim)) for n in lengths)
    return [*(leaf.requires_grad_() for leaf in leaves), grad]


def _phases(case: Case, device: str, tensors: list[torch.Tensor]) -> Phases:
    """PARTS."""
    import torch

    impl = peers.build(case.attention, False, device, case.num_keys)
    *leaves, grad = tensors
    forward = lambda: impl.apply(*leaves)
    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), leaves, grad)}


@contextmanager
def _turn(case: Case, device: str, part: str) -> Iterator[Phases]:
    """One of PARTS, on tensors that last as long as the block: so the shapes do not share memory."""
    phases = _phases(case, device, _tensors(case, device))
    yield {part: phases[part]}


def _try_out(candidate: Candidate, device: str) -> None:
    """Tries both passes; notes their memory, or where it was not enough."""
    metrics, tensors = candidate.metrics, _tensors(candidate.case, device)
    phases = _phases(candidate.case, device, tensors)
    metrics["failed_in"] = "forward"
    phases["forward"]()  # compiles
    metrics["forward_peak_gib"] = peak_gib(phases["forward"], tensors)
    metrics["failed_in"] = "backward"
    phases["both"]()
    metrics["peak_gib"] = peak_gib(phases["both"], tensors)
    del metrics["failed_in"], phases, tensors
    give_back(device)


def _time(candidates: Sequence[Candidate], device: str, warmup: int, iters: int) -> None:
    """Times forward of the cases, and then both passes, as far as they run."""
    for part, fails_in, runs in (("forward", "forward", ("backward", None)), ("both", "backward", (None,))):
        ready = [
            Candidate(candidate, phases=functools.partial(_turn, candidate.case, device, part))
            for candidate in candidates
            if candidate.metrics.get("failed_in") in runs and "forward_peak_gib" in candidate.metrics
        ]
        clock: Any = Calls(device, num_rounds=ROUNDS, warmup_ms=WARMUP_MS, rep_ms=REP_MS, watched=False)
        if iters:
            clock = Steps(device, warmup=warmup, steps=iters, num_rounds=ROUNDS)
        time_together(ready, clock, lambda: give_back(device))
        for one in ready:  # memory that sufficed before may not beside the buffer that flushes the cache
            one.case.metrics |= one.samples.row(part) if one.ok else one.metrics | {"failed_in": fails_in}


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS, choices=CHOICES)
