"""Chapter `leaderboard`: forward and backward of causal attention as the course's leaderboard times it, and the
ladder to it.

    papermill book/leaderboard.ipynb out.ipynb
    cs336 run leaderboard

Five kinds of rows, one case in each group twice (A/A). The first three are measured in turns with what they are
compared with, five turns each, in changing order (`order`). A turn begins with calls that are not timed, so that the
GPU runs at the clock to which the case's own power draw brings it, not that of the one before; a group begins with a
second and a half of such calls of its cases:

    harness   the leaderboard's own code: a compiled function, the sum of its output, its backward pass, under
              `do_bench`; for ours also with the official ten seconds of repetitions, in one turn
    kernel    forward and backward alone, without the host: replays of a CUDA graph
    ladder    the steps of `cs336_systems.ladder`, launched without autograd, from CUDA graphs as well; their registers,
              spills and shared memory, and what was predicted for them
    counters  what Nsight Compute counts while the kernels run: how busy each unit of the GPU is
    first     the first call in a fresh process with empty caches, and how many kernels it compiles

The handout's code unpacks q, k and v from one tensor with gradients (`leaves`: "stacked"), so autograd stacks the three
gradients and adds them to the one of the call before. "separate" has three leaves, whose gradients are dropped before
each call. The gradient of a sum is one number (`grad_o`: "number"), although compiled functions have it written out
as a matrix; kernels are timed with a matrix of random numbers, and at the leaderboard's shape with one number as well.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from typing import TYPE_CHECKING, Any

from cs336_systems.experiments import attention_peers as peers
from cs336_systems.experiments.leaderboard_candidate import Candidate, Case, data_of
from cs336_systems.ladder import steps
from cs336_systems.measure import ncu, process
from cs336_systems.measure.nsys import capture
from cs336_systems.measure.rows import failure_is_a_row

if TYPE_CHECKING:
    import torch

PER_CASE = peers.PER_CASE
GROUP = ("kind", "part", "heads", "seq_len", "head_dim", "is_causal", "dtype", "leaves", "grad_o", "rep_ms")
METRICS = (
    "ms_p20", "ms_p50", "ms_p80", "ms_mean", "ms_min", "ms_max",  # of single calls, all turns together
    "turns_ms", "turns_mhz", "turns_w",  # a number for each turn: median ms, SM clock, power
    "tflops", "peak_gib", "error_out", "error_grads", "backend", "timed", "sm_mhz", "power_w",
    "kernels", "registers", "spill_bytes", "shared_kib", "predicted_ms",
    "tensor_pct", "exp_pct", "issue_pct", "shared_pct", "l2_pct", "conflict_pct", "instructions",  # counters
    "first_call_s", "second_call_ms", "compiled", "compiled_later",  # seconds of both passes; Triton's kernels
)  # fmt: skip
KINDS = ("harness", "kernel", "ladder", "counters", "first")
PARTS = ("forward", "backward", "end_to_end")
DTYPES = ("bf16", "fp16", "fp32")
LEAVES = ("stacked", "separate")
GRAD_O = ("number", "matrix")
OURS, PEERS = peers.OURS, peers.PEERS
COUNTED = ("flash_triton", "plain_triton", "sdpa_cudnn", "sdpa_flash")
FIRST_CALLS = ("flash_triton", "plain_triton", "flex_compiled", "fa4", "sdpa_cudnn")
TURNS = 5
OFFICIAL_MS, SHORT_MS, KERNEL_MS = 10_000, 200, 40
SETTLE_MS = 250  # of a turn's calls that are not timed, on a GPU
WARM_MS = 1500  # of a group's calls before its first turn: a GPU that rested may run at another clock
WORK = (16, 16384, 64)  # heads, tokens, head dimension


def grid(preset: str) -> list[Case]:
    """The leaderboard's work and a few shapes beside it, or one small shape for a CPU."""
    if preset == "smoke":
        few = ("flash_triton", "flash_torch", "sdpa_flash", "reference")
        out = _twice("harness", few, "end_to_end", (2, 256, 64), "stacked", "number", 20, again="reference")
        for part in ("forward", "backward"):
            out += _twice("kernel", few, part, (2, 256, 64), "separate", "matrix", 10, again="reference")
        few, again = ("flash_torch",), "flash_torch"
        return out + _twice("first", few, "end_to_end", (2, 256, 64), "separate", "matrix", 0, again=again)
    ours_and_peers = (*OURS, *PEERS[:-1])
    quick = ("flash_triton", "plain_triton", "fa4", "sdpa_cudnn")
    # the A/A row is in the short run
    official = ("end_to_end", *WORK, True, "bf16", "stacked", "number", OFFICIAL_MS)
    out = [Case("harness", impl, *official) for impl in OURS]
    out += _twice("harness", ours_and_peers, "end_to_end", WORK, "stacked", "number", SHORT_MS)
    out += _twice("harness", quick, "end_to_end", WORK, "separate", "number", SHORT_MS)
    few = ("flash_triton", "sdpa_cudnn", "sdpa_flash")
    for head_dim, is_causal, dtype in (
        (64, True, "bf16"), (128, True, "bf16"), (64, False, "bf16"), (64, True, "fp16"), (80, True, "bf16"),
    ):  # fmt: skip
        impls = few
        if (head_dim, is_causal, dtype) == (64, True, "bf16"):
            impls = (*few, "plain_triton", "fa4")
        elif head_dim != 80:  # which FlashAttention-4 does not take
            impls = (*few, "fa4")
        shape = (*WORK[:2], head_dim)
        for part in ("forward", "backward"):
            out += _twice("kernel", impls, part, shape, "separate", "matrix", KERNEL_MS, is_causal, dtype)
        if (head_dim, is_causal, dtype) == (64, True, "bf16"):
            out += _twice("kernel", impls, "backward", shape, "separate", "number", KERNEL_MS)
    for head_dim in (64, 128):
        for part in ("forward", "backward"):
            shape, impls = (*WORK[:2], head_dim), ("flash_triton", "plain_triton", "sdpa_efficient")
            out += _twice("kernel", impls, part, shape, "separate", "matrix", KERNEL_MS, True, "fp32")
    for head_dim in (64, 128):
        for part in ("forward", "backward"):
            shape = (*WORK[:2], head_dim)
            out += _twice("counters", COUNTED, part, shape, "separate", "matrix", 0)
    out += _twice("first", FIRST_CALLS, "end_to_end", WORK, "separate", "matrix", 0)
    for part in steps.PARTS:
        names = tuple(step.name for step in steps.of_part(part))
        again = next(name for name in names if name.endswith("production"))
        out += _twice("ladder", names, part, WORK, "separate", "matrix", KERNEL_MS, again=again)
    return out


def also_measures(case: Case) -> tuple[str, ...]:
    """The case's attention, or its step of the ladder."""
    return peers.sources(case.impl)


def _twice(
    kind: str, impls: tuple[str, ...], part: str, shape: tuple[int, int, int], leaves: str, grad_o: str, rep_ms: int,
    is_causal: bool = True, dtype: str = "bf16", again: str = "flash_triton",
) -> list[Case]:  # fmt: skip
    rest = (part, *shape, is_causal, dtype, leaves, grad_o, rep_ms)
    return [Case(kind, impl, *rest) for impl in impls] + [Case(kind, again, *rest, repeat=1)]


def check(case: Case) -> None:
    """ValueError that names the allowed values where a case has another one."""
    impls = tuple(steps.STEPS) if case.kind == "ladder" else (*OURS, *PEERS)
    for field, allowed in (
        ("kind", KINDS), ("part", PARTS), ("dtype", DTYPES), ("leaves", LEAVES), ("grad_o", GRAD_O), ("impl", impls),
    ):  # fmt: skip
        if getattr(case, field) not in allowed:
            raise ValueError(f"unknown {field} {getattr(case, field)!r}; allowed: {', '.join(allowed)}")


def turns(case: Case) -> int:
    """How often a case has its turn: the official length once, everything else five times."""
    return 1 if case.rep_ms >= OFFICIAL_MS else TURNS


def estimate_s(group: list[Case]) -> float:
    """Seconds that a group takes, roughly: compilation, errors against fp64, then the turns.

    Both passes are compiled for the group that meets a kind of inputs first: the leaderboard's by the harness, any
    other shape by its forward pass.
    """
    first = group[0]
    if first.kind == "counters":
        return 20.0  # a process of its own, and each kernel some ten times
    if first.kind == "first":
        return sum(20.0 if case.impl == "fa4" else 9.0 if first.seq_len > 4096 else 3.0 for case in group)
    here = {case.impl for case in group}
    small = first.seq_len <= 4096
    compiled = {"flash_triton": 6.0, "fa4": 10.0, "flex_compiled": 10.0, "plain_triton": 4.0}
    if first.kind == "ladder":
        once = sum(
            3.0 if "hopper" in case.impl else 1.5 if first.part == "backward" else 1.0 for case in group
        )
    elif first.kind == "harness" and first.leaves == "stacked" and not small:
        late = OURS if first.rep_ms < OFFICIAL_MS else ()  # compiled by the official run
        once = 5 + sum(compiled.get(impl, 0.3) for impl in here.difference(late))
    elif first.part == "forward" and (first.head_dim, first.is_causal, first.dtype) != (64, True, "bf16"):
        once = sum(compiled.get(impl, 0.3) for impl in here)
    else:
        once = 0.3 * len(group)
    slow = sum(turns(case) * 0.8 for case in group if case.impl == "reference" and not small)
    turn_s = 0.05 if small else (1.15 * first.rep_ms + SETTLE_MS) / 1e3 + 0.04
    warm = 0 if small else WARM_MS / 1e3
    return 1 + warm + once + slow + sum(turns(case) * turn_s for case in group)


# ---------------------------------------------------------------------------------------------- counters
def counted_calls(cases: list[dict[str, Any]]) -> list[str]:
    """Runs one call of each case for `measure.ncu` to count; a status for each that cannot run, "" for the others."""
    import torch

    found, calls = [], []
    for case in (Case(**fields) for fields in cases):
        metrics: dict[str, Any] = {}
        with failure_is_a_row(metrics):
            candidate = Candidate(case, data_of(case, "cuda"), "cuda")
            candidate.prepare_call()
            candidate.call()
            calls.append(candidate.call)
        found.append(metrics.get("status", ""))
    torch.cuda.synchronize()
    with capture():
        for call in calls:
            ncu.mark()
            call()
    return found


def _count(cases: list[Case]) -> list[dict[str, Any]]:
    """The counters of a group's cases, in a process under Nsight Compute."""
    blocked: dict[str, Any] = {}
    with failure_is_a_row(blocked):
        arguments = {"cases": [dataclasses.asdict(case) for case in cases]}
        target = f"{__name__}:counted_calls"
        statuses, parts = ncu.counted(target, arguments, timeout_s=60 + 10 * estimate_s(cases))
        remaining = iter(parts)
        return [{"status": status} if status else ncu.summed(next(remaining)) for status in statuses]
    return [dict(blocked) for _ in cases]


# ---------------------------------------------------------------------------------------------- first calls
def _first_call(case: Case) -> dict[str, Any]:
    """A case in a process of its own, whose compilers find nothing that others have compiled."""
    metrics: dict[str, Any] = {}
    fields = ("impl", "heads", "seq_len", "head_dim", "is_causal", "dtype")
    with failure_is_a_row(metrics), tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        metrics |= process.call(
            f"{peers.__name__}:first_call", {field: getattr(case, field) for field in fields}, timeout_s=300,
            environment={"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"},
        )  # fmt: skip
    return metrics


# ---------------------------------------------------------------------------------------------- a group
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one group in turns; see the package's docstring for the contract."""
    import torch
    import torch._functorch.config

    for case in cases:
        check(case)
    first = cases[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if first.kind == "counters":
        return _count(cases)
    if first.kind == "first":
        return [_first_call(case) for case in cases]
    data = data_of(first, device)

    @functools.cache
    def exact() -> list[torch.Tensor]:
        from cs336_systems.attention.reference import exact_attention

        grad_o = torch.ones_like(data[3]) if first.grad_o == "number" else data[3]
        return list(exact_attention(*data[:3], grad_o, first.is_causal))

    # the timed backward passes keep their graphs, which donated buffers do not allow
    with torch._functorch.config.patch(donated_buffer=first.kind == "harness"):
        candidates = [Candidate(case, data, device) for case in cases]
        for candidate in candidates:
            candidate.prepare(exact)
        exact.cache_clear()
        ready = [candidate for candidate in candidates if candidate.ok]
        if device == "cuda":
            torch.cuda.empty_cache()
            for candidate in ready:
                _settle(candidate, WARM_MS / len(ready))
        for turn in range(turns(first) if ready else 0):
            _turn([ready[i] for i in order(len(ready), turn)], device)
        for candidate in ready:
            candidate.summarize()
    return [candidate.metrics for candidate in candidates]


def order(count: int, turn: int) -> list[int]:
    """The order of a turn's cases: to and fro (0, 1, −1, 2, −2, …), one further each time.

    An even number of cases has every case after every other one once in as many turns, an odd number twice at most
    (Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949).
    """
    to_and_fro = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
    return [(i + turn) % count for i in to_and_fro]


def _turn(ready: list[Candidate], device: str) -> None:
    """Each candidate's turn, with a watch of its own over what is timed."""
    from cs336_systems.measure.timing import Watch, interleaved

    for candidate in ready:
        if device == "cuda":
            _settle(candidate, SETTLE_MS)
        watch = Watch() if device != "cpu" else None
        found = interleaved(
            {candidate.name: candidate.call},
            device=device,
            rounds=1,
            warmup_ms=candidate.case.rep_ms / 10,
            rep_ms=candidate.case.rep_ms,
            grad_to_none={candidate.name: candidate.grads},
            watches={candidate.name: watch} if watch else {},
        )
        candidate.turns.append(
            (found[candidate.name].samples_ms, watch and watch.sm_mhz, watch and watch.power_w)
        )


def _settle(candidate: Candidate, milliseconds: float) -> None:
    """Calls for that long, many at a time, so that the GPU seldom waits for the host."""
    import torch

    end, calls = time.perf_counter() + milliseconds / 1e3, 1
    while time.perf_counter() < end:
        for _ in range(calls):
            for tensor in candidate.grads:
                tensor.grad = None
            candidate.call()
        torch.cuda.synchronize()
        calls = min(2 * calls, 16)
