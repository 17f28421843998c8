"""Chapter `ddp`: a training step on several GPUs, by every variant of averaging gradients, and what overlaps what.

    papermill book/ddp.ipynb out.ipynb -p wrapper none,naive,bucketed -p world_size 2

XL, two sequences per rank. The cases of a group (one number of ranks, one precision, all contexts) are measured in one
process group, in turns, on one copy of the weights in each rank: so their ratios are of one run. `alone` is the step
of rank 0 while the other ranks wait; `none` is the step of all ranks without communication. Exposed
communication is the time of a step less that of `none`; weak scaling efficiency is that of `alone` over that of a step.

Cases of kind `trace` record some steps of some variants with Nsight Systems, all ranks in one report (where it is
missing, each rank with torch's profiler: column `source`), and say for how long communication and compute overlap. One
step of each is kept, condensed, in `results/<machine>/ddp/`; whole reports in `_build/ddp/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cs336_systems.chapters.shared import depends, on_ranks, steps
from cs336_systems.chapters.shared.needs import need_gpus
from cs336_systems.measure.clocks import ranks
from cs336_systems.measure.clocks.ranks import RankSteps
from cs336_systems.measure.clocks.turns import Phases, columns, take_turns
from cs336_systems.measure.trace import nsys, overlap, profiler
from cs336_systems.measure.trace.overlap import Overlap
from cs336_systems.sizes import size
from cs336_systems.store import machine, process
from cs336_systems.store import rows as store
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    from cs336_systems.chapters.shared.parallel_step import ParallelWorkload
    from cs336_systems.launch.group import Rank

DEPENDS = (*depends.PARALLEL_STEP, *depends.NSYS, "accounting/memory.py", "measure/trace/overlap.py")
GROUP = ("size", "batch", "dtype", "world_size", "kind")
PHASES = ("forward", "backward", "synchronization", "optimizer")
METRICS = (
    *(column for phase in (*PHASES, "step") for column in columns(phase)),
    "tokens_per_s", "peak_gib", "collectives", "backend", "matmul_precision", "sm_mhz", "power_w",
    "traced_ms", "communication_ms", "compute_ms", "overlap_ms", "backward_overlap_ms", "messages", "source",
    "tool_version",
)  # fmt: skip
ALONE = "alone"
CONTEXTS = (128, 512, 1024)  # the shorter ones are launch-bound on a fast GPU
XL_2026 = "2.7B"  # what spring 2026 calls xl
BUCKETS_MB = (1.0, 10.0, 25.0, 100.0, 250.0, 1000.0)
STEPS, WARMUP, ROUNDS = 9, 2, 3  # measured steps of a case, and unmeasured ones before each of its turns
TINY_STEPS = 4  # on a CPU there are no numbers to be precise about
TRACED_STEPS = 2
_TIMEOUT_S = 900.0  # of a recording


@dataclass(frozen=True)
class Case:
    """One variant of a step on `world_size` ranks. `wrapper`: "alone", or one of `shared.parallel_step.WRAPPERS`.

    bucket_mb: 0 is torch's default, or a wrapper without buckets. batch: sequences of each rank. kind: "time", "trace".
    repeat 1 measures the same thing again.
    """

    size: str
    context_length: int
    wrapper: str
    bucket_mb: float = 0.0
    dtype: str = "tf32"
    world_size: int = 2
    batch: int = 2
    kind: str = "time"
    repeat: int = 0

    @property
    def name(self) -> str:
        """What distinguishes the cases of one context of a group: "bucketed 25"."""
        again = " again" if self.repeat else ""
        return f"{self.wrapper}{f' {self.bucket_mb:g}' if self.bucket_mb else ''}{again}"

    @property
    def turn(self) -> str:
        """As for `on_ranks.begin_turn`."""
        return f"context {self.context_length}, {self.name}"


def grid(preset: str) -> list[Case]:
    """All variants on two GPUs, the main ones on one, four and eight; or a small model on two ranks of a CPU."""
    if preset == "smoke":
        variants = [
            (ALONE, 0), ("none", 0), ("naive", 0), ("flat", 0), ("overlapped", 0), ("bucketed", 0.1),
            ("bucketed", 10), ("in_place", 0.1), ("torch", 0),
        ]  # fmt: skip
        cases = [Case("tiny", 64, w, float(mb), "fp32") for w, mb in variants]
        cases.append(Case("tiny", 64, "bucketed", 0.1, "fp32", repeat=1))
        traced = (("naive", 0), ("bucketed", 0.1))
        return [*cases, *(Case("tiny", 64, w, float(mb), "fp32", kind="trace") for w, mb in traced)]
    main = [(ALONE, 0.0), ("none", 0.0), ("naive", 0.0), ("flat", 0.0), ("overlapped", 0.0)]
    ours = [*(("bucketed", mb) for mb in BUCKETS_MB), *(("in_place", mb) for mb in (25.0, 100.0, 250.0))]
    peers = [("torch", 0.0), ("torch", 100.0), ("torch_view", 0.0)]
    few = [("none", 0.0), ("naive", 0.0), ("bucketed", 100.0), ("in_place", 100.0), ("torch", 0.0)]
    cases = []
    for context in CONTEXTS:
        cases += [Case("xl", context, w, mb) for w, mb in (*main, *ours, *peers)]
        cases.append(Case("xl", context, "bucketed", 25.0, repeat=1))
    cases += [Case("xl", 512, w, mb, dtype) for dtype in ("fp32", "bf16") for w, mb in few]
    alone = (("none", 0.0), ("bucketed", 100.0), ("in_place", 100.0))
    cases += [Case("xl", 128, w, mb, world_size=1) for w, mb in alone]
    many = [(ALONE, 0.0), *few]
    cases += [Case("xl", c, w, mb, world_size=n) for n in (4, 8) for c in CONTEXTS for w, mb in many]
    more = [("bucketed", 100.0), ("in_place", 100.0), ("torch", 0.0)]
    cases += [Case(XL_2026, 512, w, mb) for w, mb in (*main, *more)]
    cases.append(Case(XL_2026, 512, "bucketed", 100.0, repeat=1))
    traced = (("naive", 0.0), ("flat", 0.0), ("overlapped", 0.0), ("bucketed", 100.0), ("torch", 0.0))
    return [*cases, *(Case("xl", CONTEXTS[-1], w, mb, kind="trace") for w, mb in traced)]


def steps_of(case: Case) -> int:
    """The measured steps of a timed case."""
    return TINY_STEPS if case.size == "tiny" else STEPS


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one number of ranks together."""
    if cases[0].kind == "time":
        return on_ranks.measured(f"{__name__}:time_on_rank", cases, _refuse)
    _refuse(cases[0])
    return _traced(cases)


def _refuse(case: Case) -> None:
    """Raises `Skip` where this machine cannot run the case, and says what it needs."""
    if machine.gpu_names():
        need_gpus(case.world_size)
        return
    step = steps.Case(case.size, case.context_length, "train_step", case.dtype, batch=case.batch)
    steps.refuse(step, "cpu", case.world_size)


def _launch(function: str, cases: list[Case], **arguments: Any) -> list[Any]:
    """A function of this module on the ranks of these cases; results in their order."""
    from cs336_systems.launch.start import launch

    arguments |= {"cases": [dataclasses.asdict(case) for case in cases]}
    return launch(
        f"{__name__}:{function}", cases[0].world_size, arguments,
        log=lambda line: print(f"    {line}", flush=True),
    )  # fmt: skip


def time_on_rank(rank: Rank, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank does: the cases, context by context, in turns; their metrics, the same on all ranks."""
    group = [Case(**case) for case in cases]
    found: dict[Case, dict[str, Any]] = {case: {"backend": rank.backend} for case in group}
    work = _workload(rank, group)
    clock = RankSteps(rank, warmup=0, steps=steps_of(group[0]), num_rounds=ROUNDS)
    for context in dict.fromkeys(case.context_length for case in group):
        work.choose_batch(group[0].batch, context)
        turns = {
            case: functools.partial(_turn, work, case, found[case])
            for case in group
            if case.context_length == context
        }
        for case, samples in take_turns(turns, clock).items():
            step_ms = samples.p50("step")
            tokens = case.batch * case.context_length * (1 if case.wrapper == ALONE else case.world_size)
            for phase in (*PHASES, "step"):
                found[case] |= samples.row(phase)
            found[case] |= samples.clocks() | {"tokens_per_s": tokens / step_ms * 1e3}
            print(f"{case.turn}: {step_ms:.1f} ms", flush=True)
    return ranks.gathered([found[case] for case in group], rank)[0]  # rank 0 reads the clocks


def _workload(rank: Rank, group: list[Case]) -> ParallelWorkload:
    from cs336_systems.chapters.shared.parallel_step import ParallelWorkload

    longest = max(case.context_length for case in group)
    return ParallelWorkload(size(group[0].size), group[0].batch, longest, rank)


@contextlib.contextmanager
def _turn(work: ParallelWorkload, case: Case, metrics: dict[str, Any]) -> Iterator[Phases]:
    """One turn of a case: wrapped, warmed up, timed, unwrapped; what it holds goes into the metrics."""
    import torch

    rank = work.rank
    on_ranks.begin_turn(rank, case)
    wrapper = "none" if case.wrapper == ALONE else case.wrapper
    with work.step(wrapper, bucket_mb=case.bucket_mb or None, dtype=case.dtype) as step:
        phases = step.phases
        if case.wrapper == ALONE and rank.rank > 0:
            phases = dict.fromkeys(phases, _wait)
        for _ in range(WARMUP):  # the first finds the order of the gradients, the second has it
            ranks.meet(rank)
            for phase in phases.values():
                phase()
        if rank.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        yield phases
        if rank.device != "cpu":
            peak = max(ranks.gathered(torch.cuda.max_memory_allocated(), rank)) / 2**30
            metrics["peak_gib"] = max(peak, metrics.get("peak_gib", 0))
        metrics |= {"collectives": step.num_buckets, "matmul_precision": step.matmul_precision}


def _wait() -> None:
    """What the other ranks do while one works alone."""


# -------------------------------------------------------------------------------------------------- tracing
def _traced(cases: list[Case]) -> list[dict[str, Any]]:
    """Records steps of the cases; the condensed timeline of each is written, too."""
    # it sees the processes of one node
    with_nsys = len(machine.gpu_names()) >= cases[0].world_size and nsys.find() is not None
    everyones, version = _with_nsys(cases) if with_nsys else (None, "")
    if everyones is None:
        everyones, version = _with_torch(cases)
    for case, by_rank in zip(cases, everyones, strict=True):
        path = store.file_beside(TABLE, case, machine.machine_name())
        overlap.to_json([steps[-1] for steps in by_rank], path)
    return [_trace_metrics(by_rank) | {"tool_version": version} for by_rank in everyones]


def _with_nsys(cases: list[Case]) -> tuple[list[list[list[Overlap]]] | None, str]:
    """Case → rank → step, and the version of Nsight Systems; None where it fails, or its report lacks a rank."""
    arguments = {"cases": [dataclasses.asdict(case) for case in cases]}
    function, count = f"{__name__}:under_nsys", cases[0].world_size
    try:
        version = nsys.version()
        _, trace = nsys.record_nsys(
            function, arguments, timeout_s=_TIMEOUT_S, keep=store.recordings_folder("ddp")
        )
        seen = {path.split("/")[0] for path in trace.paths}
        if lacking := [_rank_range(rank) for rank in range(count) if _rank_range(rank) not in seen]:
            raise nsys.NsysError(f"its report lacks {', '.join(lacking)}")
        return [
            [overlap.overlap(trace, f"{_rank_range(rank)}/{case.name}/step", PHASES) for rank in range(count)]
            for case in cases
        ], version
    except (nsys.NsysError, process.ChildError, ValueError) as error:
        print(f"    Nsight Systems: {error}: torch's profiler takes its place", flush=True)
        return None, ""


def _with_torch(cases: list[Case]) -> tuple[list[list[list[Overlap]]], str]:
    """The same by torch's profiler, which records each rank in itself."""
    import torch

    by_rank = _launch("record_on_rank", cases, keep=str(store.recordings_folder("ddp")))
    found = [
        [[overlap.from_dict(step) for step in said[place]] for said in by_rank] for place in range(len(cases))
    ]
    return found, torch.__version__.split("+")[0]


def _trace_metrics(by_rank: list[list[Overlap]]) -> dict[str, Any]:
    """Means over ranks and steps."""
    steps = [step for rank in by_rank for step in rank]
    fields = ("communication_ms", "compute_ms", "overlap_ms", "backward_overlap_ms")
    return {field: fmean(getattr(step, field) for step in steps) for field in fields} | {
        "traced_ms": fmean(step.length_ms for step in steps),
        "messages": fmean(step.collectives for step in steps),
        "source": steps[0].source,
    }


def _rank_range(rank: int) -> str:
    return f"rank {rank}"


def under_nsys(cases: list[dict[str, Any]]) -> None:
    """What the process under Nsight Systems does: it launches the ranks, which record themselves into its report."""
    _launch("capture_on_rank", [Case(**case) for case in cases])


def capture_on_rank(rank: Rank, cases: list[dict[str, Any]]) -> None:
    """Steps of all cases inside the capture of Nsight Systems, which begins and ends on all ranks together."""
    work = _workload(rank, [Case(**case) for case in cases])
    _run_traced(work, [Case(**cases[0])])  # what only a first step does
    ranks.meet(rank)
    with nsys.capture():
        time.sleep(1.0)  # recording begins in each process when it hears of it
        _run_traced(work, [Case(**case) for case in cases])
        ranks.meet(rank)  # the first rank that leaves ends the recording


def record_on_rank(rank: Rank, cases: list[dict[str, Any]], keep: str) -> list[list[dict[str, Any]]]:
    """As `capture_on_rank`, by torch's profiler in each rank: case → step → what overlapped."""
    group = [Case(**case) for case in cases]
    work = _workload(rank, group)
    _run_traced(work, group[:1])
    trace = profiler.record_torch(
        lambda: _run_traced(work, group), keep=Path(keep) / f"rank{rank.rank}.json.gz"
    )
    return [
        [
            dataclasses.asdict(step)
            for step in overlap.overlap(trace, f"{_rank_range(rank.rank)}/{case.name}/step", PHASES)
        ]
        for case in group
    ]


def _run_traced(work: ParallelWorkload, cases: list[Case]) -> None:
    """A few steps of each case with ranges for rank, case, step and phases; the steps before them are warm-up."""
    with profiler.span(_rank_range(work.rank.rank)):
        for case in cases:
            with (
                profiler.span(case.name),
                work.step(case.wrapper, bucket_mb=case.bucket_mb or None, dtype=case.dtype) as step,
            ):
                work.choose_batch(case.batch, case.context_length)
                clock = RankSteps(
                    work.rank, warmup=WARMUP, steps=TRACED_STEPS, ranges=profiler.span, watched=False
                )
                take_turns({case: step.phases}, clock)


TABLE = Table(
    __name__, Case, METRICS, GROUP, grid, run_group, DEPENDS,
    beside=("size", "context_length", "dtype", "wrapper", "bucket_mb"),
)  # fmt: skip
