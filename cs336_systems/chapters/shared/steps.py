"""What the chapters about whole models share: one step of a model as a case, and how such cases are measured.

The cases of a group have one workload (weights, optimizer, batch) and take turns, mode by mode. Each phase is timed by
the host's clock with the device synchronized after it, as the handout asks; the step as a whole once more, synchronized
only at its end, which is what throughput and MFU are computed from.

    cs336 bench model --size small --mode train_step --dtype fp32 bf16
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems import accounting
from cs336_systems.attention import IMPLEMENTATIONS as ATTENTIONS
from cs336_systems.chapters.shared.needs import need_memory
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import (
    Candidate,
    Samples,
    columns,
    prepared,
    take_turns,
    time_together,
)
from cs336_systems.measure.device import comparable, default_device, give_back, peak_gib
from cs336_systems.sizes import SIZES, size
from cs336_systems.store import machine
from cs336_systems.store.process import call
from cs336_systems.store.status import Skip, failure_is_a_row

if TYPE_CHECKING:
    from cs336_systems.chapters.shared.step import Step, Workload

GROUP = ("model", "size", "context_length", "batch", "warmup", "steps")
PHASES = ("forward", "backward", "optimizer")
DTYPES = ("fp32", "tf32", "bf16")
GRAPHED = ("reduce-overhead", "max-autotune")  # these record CUDA graphs
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune")
OWN = "own"
STATISTICS = ("mean", "std", "p50", "each")
METRICS = (
    *(column for phase in (*PHASES, "step") for column in columns(phase, STATISTICS)),
    "first_step_ms", "compile_s", "graphs", "cuda_graph_skips", "tokens_per_s", "mfu", "peak_gib",
    "matmul_precision", "sm_mhz", "power_w",
)  # fmt: skip
CHOICES = {
    "size": tuple(SIZES), "mode": accounting.MODES, "dtype": DTYPES, "attention": ("auto", *ATTENTIONS),
    "compile": COMPILE_MODES,
}  # fmt: skip
WARM = 5  # warm-up steps from which on a process may serve many cases: with fewer, the cold start is what is measured
_SLOW_MS = 500.0  # a step this long is the sum of its phases: what synchronizing between them costs vanishes


@dataclass(frozen=True)
class Case:
    """One variant of a step. `model`: "own", or `module:Class`. `repeat` 1 measures the same thing again.

    Fields as in `shared.step.Step`; `warmup` steps come before the `steps` that are measured.
    """

    size: str
    context_length: int
    mode: str
    dtype: str = "fp32"
    attention: str = "reference"
    compile: str = "off"
    batch: int = 4
    warmup: int = 5
    steps: int = 10
    model: str = OWN
    repeat: int = 0


def model_class(spec: str) -> str:
    """`spec` again if it is "own", or names a class that can stand for our model; ValueError otherwise."""
    if spec != OWN:
        from cs336_systems.model import OWN_CLASS, load_class

        if spec.startswith("."):  # relative to what?
            raise ValueError(f"model {spec!r} is not of the form module:Class, as in {OWN_CLASS}")
        load_class(spec)
    return spec


# ------------------------------------------------------------------------------------------------ predictions
def predicted_bytes(case: Case, device: str = "cuda") -> int | None:
    """The peak of the case's tensors by the closed forms, in bytes; None for what they do not describe.

    They describe our model in eager mode; compiled code needs less, by as much as it fuses.
    """
    if case.model != OWN or case.compile != "off":
        return None
    attention = "reference" if case.attention == "reference" else "flash"
    dtype = "bf16" if case.dtype == "bf16" else "fp32"
    items = accounting.peak_bytes(
        size(case.size), case.batch, case.context_length, case.mode, dtype, attention, device, "fused"
    )
    return sum(items.values())


def forecast(cases: list[Case]) -> Iterator[str]:
    """A line for each case: the memory that it needs by the closed forms, and whether this machine has as much."""
    device = "cuda" if machine.gpu_names() else "cpu"
    free = machine.free_memory_bytes(device)
    for case in cases:
        needed = predicted_bytes(case, device)
        if needed is not None:
            verdict = "" if free is None else f", {free / 2**30:.1f} GiB are free"
            verdict += ": it will not fit" if free is not None and needed > free else ""
            what = (
                f"{case.size}, context {case.context_length}, batch {case.batch}, {case.mode}, {case.dtype}"
            )
            yield f"{what}: needs about {needed / 2**30:.2f} GiB{verdict}"


# ------------------------------------------------------------------------------------------------ measuring
def refuse(case: Case, device: str, ranks: int = 1) -> None:
    """Raises `Skip` where this machine cannot run the case, on each of so many ranks, and says what it needs."""
    if device == "cpu":
        if case.dtype == "tf32":
            raise Skip("needs a CUDA device: TF32 is a format of its tensor cores")
        if case.attention == "flash_triton":
            raise Skip("needs a CUDA device")  # the interpreter is for tests; its time says nothing
        if case.compile != "off" and machine.cpp_compiler() is None:
            raise Skip("needs a C++ compiler")
        needed = predicted_bytes(case, device)
        need_memory(None if needed is None else ranks * needed)


def run_group(
    cases: list[Case], nvtx: bool = False, snapshot: Path | None = None
) -> Iterator[dict[str, Any]]:
    """The metrics of the cases of one workload.

    Cases with fewer than five warm-up steps are measured each in a fresh process. nvtx: ranges for Nsight Systems
    around warm-up, steps and phases. snapshot: a file for the allocator's history of two more steps of each case (its
    name gets the case's where there are several).
    """
    if cases[0].warmup >= WARM:
        yield from measure(cases, nvtx=nvtx, snapshot=snapshot)
        return
    give_back(default_device())  # to the processes that follow
    for case in cases:
        arguments = {"case": dataclasses.asdict(case), "nvtx": nvtx, "snapshot": snapshot and str(snapshot)}
        metrics: dict[str, Any] = {}
        with failure_is_a_row(metrics):
            metrics = call(f"{__name__}:_alone", arguments, timeout_s=3600)
        yield metrics


def _alone(case: dict[str, Any], nvtx: bool, snapshot: str | None) -> dict[str, Any]:
    """One case in this process, in which nothing has run before: no library, allocator or kernel is warm."""
    return measure([Case(**case)], trial=False, nvtx=nvtx, snapshot=snapshot and Path(snapshot))[0]


def measure(
    cases: list[Case], *, trial: bool = True, nvtx: bool = False, snapshot: Path | None = None
) -> list[dict[str, Any]]:
    """The metrics of the cases of one workload, measured in this process.

    trial: the first warm-up step of each case is made before any case is timed, so that one that fails or compiles
    does not disturb the others.
    """
    device = default_device()
    built: dict[str, Any] = {}
    with comparable():
        candidates = prepared(cases, lambda candidate: refuse(candidate.case, device))
        ready = [c for c in candidates if c.ok]
        if ready:
            with failure_is_a_row(built):
                workload = _workload(cases[0], device)
        for candidate in ready:
            candidate.metrics |= built
        for mode in accounting.MODES:  # the optimizer's state, once made, stays: steps that update come last
            if turn := [c for c in ready if c.ok and c.case.mode == mode]:
                _measure_mode(turn, workload, trial, nvtx)
        workload = None
        if snapshot is not None and device != "cpu":
            _snapshots([c for c in candidates if c.ok], snapshot)
    give_back(device)
    return [candidate.metrics for candidate in candidates]


def _workload(case: Case, device: str) -> Workload:
    from cs336_systems.chapters.shared.step import Workload
    from cs336_systems.model import OWN_CLASS

    model = OWN_CLASS if case.model == OWN else case.model
    return Workload(size(case.size), case.batch, case.context_length, device, model=model)


def _measure_mode(candidates: list[Candidate], workload: Workload, trial: bool, nvtx: bool) -> None:
    """Times the candidates of one mode in turns."""
    import torch

    from cs336_systems.measure.trace.profiler import span

    steps: dict[Case, Step] = {}
    short: set[Case] = set()
    for candidate in candidates:
        with failure_is_a_row(candidate.metrics):
            case = candidate.case
            step = steps[case] = workload.step(case.mode, case.dtype, case.attention, case.compile)
            candidate.metrics["matmul_precision"] = step.matmul_precision
            candidate.phases = functools.partial(_turn, step)
            if trial and _first_step(candidate.metrics, step):
                short.add(case)
        _tidy(workload, steps, candidates)

    def tidy() -> None:
        _tidy(workload, steps, candidates)
        give_back(workload.device)

    def whole_turns(candidate: Candidate) -> Candidate:
        """The candidate's step once more, synchronized only at its end."""
        return Candidate(
            candidate.case, candidate.metrics, functools.partial(_turn, steps[candidate.case], True)
        )

    ready = [c for c in candidates if c.ok]
    wholes = {c.case: whole_turns(c) for c in ready if c.case in short}
    first = candidates[0].case
    clock = Steps(
        workload.device, warmup=first.warmup - trial, steps=first.steps, ranges=span if nvtx else nullcontext,
        watched=True,
    )  # fmt: skip
    # without a trial step the first timed ones compile
    with torch.compiler.set_stance("fail_on_recompile" if trial else "default"):
        timed = time_together([*ready, *wholes.values()], clock, tidy)
        for candidate in [c for c in ready if c in timed]:
            with failure_is_a_row(candidate.metrics):
                _summarize(candidate, wholes.get(candidate.case), steps[candidate.case], trial)
    _tidy(workload, steps, candidates)  # the next mode's first step must not add to these gradients
    steps.clear()
    for candidate in candidates:
        candidate.phases = {}
    if any(c.case.compile != "off" for c in candidates):
        torch._dynamo.reset()  # only this gives back what was compiled for this mode, and its graphs' memory


@contextmanager
def _turn(step: Step, whole: bool = False) -> Iterator[dict[str, Any]]:
    step.prepare()
    yield {"step": step.run} if whole else step.phases


def _whole_ms(step: Step) -> float:
    clock = Steps(step.workload.device, warmup=0, steps=1)
    return take_turns({"": functools.partial(_turn, step, True)}, clock)[""].p50("step")


def _first_step(metrics: dict[str, Any], step: Step) -> bool:
    """One step before all others: compiles, finds out about missing parts and memory. Returns whether synchronizing
    between its phases may cost a step time."""
    import torch
    from torch._dynamo.utils import counters

    graphs, skips = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    first_ms = metrics["first_step_ms"] = _whole_ms(step)
    if step.compile != "off":
        metrics["graphs"] = counters["stats"]["unique_graphs"] - graphs
        if step.compile in GRAPHED:
            # the second step records and the third replays: what fails, fails here; only a recording allocates
            with torch.compiler.set_stance("fail_on_recompile"):
                metrics["peak_gib"] = peak_gib(step.run)
                step.run()
            metrics["cuda_graph_skips"] = counters["inductor"]["cudagraph_skips"] - skips
        if metrics["graphs"] < 1 or torch._dynamo.config.disable:
            raise RuntimeError(f"torch.compile made no graph for {step.mode} with compile={step.compile}")
    # a first step of eager code may be long since it loads libraries, and compiles kernels of Triton: another one tells
    return step.mode != "forward" and (
        step.compile != "off" or first_ms < _SLOW_MS or _whole_ms(step) < _SLOW_MS
    )


def _tidy(workload: Workload, steps: dict[Case, Step], candidates: list[Candidate]) -> None:
    """Gives back what candidates hold between their turns; after a failure the optimizer's state, half made, too."""
    for step in steps.values():
        step.loss = None
    failed = [c for c in candidates if not c.ok and c.case in steps]
    for candidate in failed:
        del steps[candidate.case]
        candidate.phases = {}
    workload.forget(optimizer=bool(failed))
    if failed:
        give_back(workload.device)


def _summarize(candidate: Candidate, whole: Candidate | None, step: Step, trial: bool) -> None:
    """The columns of what was timed, and of one more step for its memory."""
    case, metrics, samples = candidate.case, candidate.metrics, candidate.samples
    watched = Samples(watches=[*samples.watches, *(whole.samples.watches if whole else [])])
    together = whole.samples if whole else samples.summed("step")
    for phase in step.phases:
        metrics |= samples.row(phase, STATISTICS)
    metrics |= together.row("step", STATISTICS)
    step.prepare()
    if "peak_gib" not in metrics:
        metrics["peak_gib"] = peak_gib(step.run)
    step_ms = together.p50("step")
    if trial and case.compile != "off":
        metrics["compile_s"] = (metrics["first_step_ms"] - step_ms) / 1e3
    metrics |= _rates(case, step_ms) | watched.clocks()


def _rates(case: Case, step_ms: float) -> dict[str, float | None]:
    """Tokens/s, and MFU against the data sheet where the GPU is listed there."""
    names = machine.gpu_names()
    peaks = accounting.peaks(names[0]) if names else None
    peak = peaks.tflops.get(case.dtype) if peaks else None
    mfu = None
    if peak is not None and case.model == OWN:
        mfu = accounting.mfu(size(case.size), case.batch, case.context_length, case.mode, step_ms, peak)
    return {"tokens_per_s": case.batch * case.context_length / step_ms * 1e3, "mfu": mfu}


def _snapshots(candidates: list[Candidate], path: Path) -> None:
    """Records the allocator's history of two steps of each case, from before its model is built."""
    from cs336_systems.measure.memory.memory import recording

    for candidate in candidates:
        case = candidate.case
        with (
            failure_is_a_row(candidate.metrics),
            recording(snapshot_path(path, case, len(candidates))) as (mark, _),
        ):
            mark("model")
            work = _workload(case, "cuda")
            step = work.step(case.mode, case.dtype, case.attention, case.compile)
            step.prepare()
            for _ in range(2):
                for phase, fn in step.phases.items():
                    mark(phase)
                    fn()
        work = step = None


def snapshot_path(path: Path, case: Case, count: int) -> Path:
    """The file for a case's snapshot: the given one, or, where there are several cases, with the case in its name."""
    if count == 1:
        return path
    parts = (case.size, case.context_length, case.mode, case.dtype, case.attention, case.compile, case.batch)
    return path.with_name("_".join([path.stem, *map(str, parts)]) + path.suffix)
