"""What the chapters about whole models share: one step of a model as a case, and how such cases are measured.

The cases of a group have one workload (weights, optimizer, batch) and take turns, mode by mode. Each phase is timed by
the host's clock with the device synchronized after it, as the handout asks; the step as a whole once more, synchronized
only at its end, which is what throughput and MFU are computed from.

    cs336 bench model --size small --mode train_step --dtype fp32 bf16
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems import accounting
from cs336_systems.attention import IMPLEMENTATIONS as ATTENTIONS
from cs336_systems.measure.clocks import phases
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
METRICS = (
    *(column for phase in (*PHASES, "step") for column in phases.columns(phase)),
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


def estimate_s(group: list[Case]) -> float:
    """Seconds that a group takes, roughly: building, compiling, and steps at a modest speed for each dtype."""
    total = 3.0
    for case in group:
        speed = {"fp32": 40, "tf32": 150, "bf16": 250}[case.dtype] * 1e12
        flops = accounting.model_flops(size(case.size), case.batch, case.context_length, case.mode)
        steps = (case.warmup + case.steps) * (1 if case.mode == "forward" else 2)
        total += steps * (flops / speed + 0.01)
        total += 0 if case.compile == "off" else size(case.size).num_layers * 2
    return total


# ------------------------------------------------------------------------------------------------ measuring
class _Candidate:
    """One case while it is measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.metrics: dict[str, Any] = {}
        self.step: Step | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.case.mode} {self.case.dtype} {self.case.attention} {self.case.compile} {self.case.repeat}"
        )

    @property
    def ok(self) -> bool:
        return "status" not in self.metrics


def refuse(case: Case, device: str) -> None:
    """Raises `Skip` where this machine cannot run the case, and says what it needs."""
    if device == "cpu":
        if case.dtype == "tf32":
            raise Skip("needs a CUDA device: TF32 is a format of its tensor cores")
        if case.attention == "flash_triton":
            raise Skip("needs a CUDA device")  # the interpreter is for tests; its time says nothing
        if case.compile != "off" and machine.cpp_compiler() is None:
            raise Skip("needs a C++ compiler")
        needed, free = predicted_bytes(case, device), machine.free_memory_bytes(device)
        if needed is not None and free is not None and needed > free:
            # a GPU says when its memory is full; here the system would end the process
            raise Skip(f"needs about {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free")


def run_group(
    cases: list[Case], nvtx: bool = False, snapshot: Path | None = None
) -> Iterator[dict[str, Any]]:
    """The metrics of the cases of one workload; see the package's docstring for the contract.

    Cases with fewer than five warm-up steps are measured each in a fresh process. nvtx: ranges for Nsight Systems
    around warm-up, steps and phases. snapshot: a file for the allocator's history of two more steps of each case (its
    name gets the case's where there are several).
    """
    if cases[0].warmup >= WARM:
        yield from measure(cases, nvtx=nvtx, snapshot=snapshot)
        return
    _give_back()
    for case in cases:
        arguments = {"case": dataclasses.asdict(case), "nvtx": nvtx, "snapshot": snapshot and str(snapshot)}
        metrics: dict[str, Any] = {}
        with failure_is_a_row(metrics):
            metrics = call(f"{__name__}:_alone", arguments, timeout_s=120 + 10 * estimate_s([case]))
        yield metrics


def _give_back() -> None:
    """Leaves the device's memory to other processes, as far as this one has any."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
    import torch

    from cs336_systems.chapters.shared.step import Workload
    from cs336_systems.model import OWN_CLASS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    candidates = [_Candidate(case) for case in cases]
    for candidate in candidates:
        with failure_is_a_row(candidate.metrics):
            refuse(candidate.case, device)
    before = torch.get_float32_matmul_precision()
    first = cases[0]
    torch._dynamo.reset()
    try:
        ready = [c for c in candidates if c.ok]
        built: dict[str, Any] = {}
        if ready:
            with failure_is_a_row(built):
                spec = OWN_CLASS if first.model == OWN else first.model
                workload = Workload(size(first.size), first.batch, first.context_length, device, model=spec)
        for candidate in ready:
            candidate.metrics |= built
        for (
            mode
        ) in accounting.MODES:  # the optimizer's state, once made, stays: so steps that update come last
            turn = [c for c in ready if c.ok and c.case.mode == mode]
            if turn:
                _measure(turn, workload, trial, nvtx)
        if snapshot is not None and device != "cpu":
            del workload
            _snapshots([c for c in candidates if c.ok], snapshot)
    finally:
        torch.set_float32_matmul_precision(before)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    return [candidate.metrics for candidate in candidates]


def _measure(candidates: list[_Candidate], workload: Workload, trial: bool, nvtx: bool) -> None:
    """Times the candidates of one mode in turns."""
    for candidate in candidates:
        with failure_is_a_row(candidate.metrics):
            case = candidate.case
            candidate.step = workload.step(case.mode, case.dtype, case.attention, case.compile)
            candidate.metrics["matmul_precision"] = candidate.step.matmul_precision
            if trial:
                _first_step(candidate)
        _tidy(candidate, workload)
    ready = [c for c in candidates if c.ok]
    if not ready:
        return
    together: dict[str, Any] = {}
    if len(ready) > 1:
        with failure_is_a_row(together):
            _time(ready, workload, trial, nvtx)
    if len(ready) == 1 or together:  # together too large, maybe, or one of them failed: then each alone
        for candidate in ready:
            _tidy(candidate, workload)  # all of them: the one that failed may still hold its graph
        _empty(workload)
        for candidate in ready:
            with failure_is_a_row(candidate.metrics):
                _time([candidate], workload, trial, nvtx)
            _tidy(candidate, workload)
    workload.forget()  # the next mode's first step must not add to these gradients
    for candidate in ready:
        candidate.step = None
    if any(c.case.compile != "off" for c in candidates):
        import torch

        torch._dynamo.reset()  # only this gives back what was compiled for this mode, and its graphs' memory


def _empty(workload: Workload) -> None:
    """Gives back to the device what exceptions' frames and the allocator still hold."""
    import torch

    gc.collect()
    if workload.device != "cpu":
        torch.cuda.empty_cache()


def _first_step(candidate: _Candidate) -> None:
    """One step before all others: compiles, finds out about missing parts and memory."""
    import torch
    from torch._dynamo.utils import counters

    from cs336_systems.measure.clocks.timing import peak_gib

    graphs, skips = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    step = candidate.step
    step.prepare()
    [whole] = phases.time_phases(
        {"": {"step": step.run}}, device=step.workload.device, warmup=0, steps=1
    ).values()
    candidate.metrics["first_step_ms"] = whole["step"].steps_ms[0]
    if step.compile != "off":
        candidate.metrics["graphs"] = counters["stats"]["unique_graphs"] - graphs
        if step.compile in GRAPHED:
            # the second step records and the third replays: what fails, fails here; only a recording allocates
            with torch.compiler.set_stance("fail_on_recompile"):
                candidate.metrics["peak_gib"] = peak_gib(step.run)
                step.run()
            candidate.metrics["cuda_graph_skips"] = counters["inductor"]["cudagraph_skips"] - skips
        if candidate.metrics["graphs"] < 1 or torch._dynamo.config.disable:
            raise RuntimeError(f"torch.compile made no graph for {candidate.name}")


def _tidy(candidate: _Candidate, workload: Workload) -> None:
    """Gives back what a candidate holds between its turns; after a failure the optimizer's state, half made, too."""
    if candidate.step is not None:
        candidate.step.loss = None
    if not candidate.ok:
        candidate.step = None
    workload.forget(optimizer=not candidate.ok)
    if not candidate.ok:
        _empty(workload)


def _time(ready: list[_Candidate], workload: Workload, trial: bool, nvtx: bool) -> None:
    import torch

    from cs336_systems.measure.clocks.timing import Watch, peak_gib
    from cs336_systems.measure.trace.profiler import span

    case, device = ready[0].case, workload.device
    by_name = {c.name: c for c in ready}
    functions: dict[str, dict[str, Any]] = {name: c.step.phases for name, c in by_name.items()}
    if case.mode != "forward" and trial:
        quick = [c for c in ready if c.metrics["first_step_ms"] < _SLOW_MS or c.case.compile != "off"]
        functions |= {f"{c.name} whole": {"step": c.step.run} for c in quick}
    ranges = span if nvtx else None
    # without a trial step the first timed ones compile
    stance = torch.compiler.set_stance("fail_on_recompile" if trial else "default")
    watches = {name: Watch() for name in by_name}
    with stance:
        series = phases.time_phases(
            functions, device=device, warmup=case.warmup - trial, steps=case.steps, ranges=ranges,
            before=lambda name: by_name[name.removesuffix(" whole")].step.prepare(),
            watches=watches | {f"{name} whole": watch for name, watch in watches.items()},
        )  # fmt: skip
        for name, candidate in by_name.items():
            by_phase = series[name]
            whole = series.get(f"{name} whole", {}).get("step") or phases.pooled(list(by_phase.values()))
            for phase, times in (by_phase | {"step": whole}).items():
                candidate.metrics |= times.metrics(phase)
            candidate.step.prepare()
            if "peak_gib" not in candidate.metrics:
                candidate.metrics["peak_gib"] = peak_gib(candidate.step.run)
            if trial and candidate.case.compile != "off":
                candidate.metrics["compile_s"] = (candidate.metrics["first_step_ms"] - whole.p50) / 1e3
            candidate.metrics |= _rates(candidate.case, whole.p50) | watches[name].metrics()


def _rates(case: Case, step_ms: float) -> dict[str, float | None]:
    """Tokens/s, and MFU against the data sheet where the GPU is listed there."""
    names = machine.gpu_names()
    peaks = accounting.peaks(names[0]) if names else None
    peak = peaks.tflops.get(case.dtype) if peaks else None
    mfu = None
    if peak is not None and case.model == OWN:
        mfu = accounting.mfu(size(case.size), case.batch, case.context_length, case.mode, step_ms, peak)
    return {"tokens_per_s": case.batch * case.context_length / step_ms * 1e3, "mfu": mfu}


def _snapshots(candidates: list[_Candidate], path: Path) -> None:
    """Records the allocator's history of two steps of each case, from before its model is built."""
    from cs336_systems.chapters.shared.step import Workload
    from cs336_systems.measure.memory.memory import recording
    from cs336_systems.model import OWN_CLASS

    for candidate in candidates:
        case = candidate.case
        spec = OWN_CLASS if case.model == OWN else case.model
        with (
            failure_is_a_row(candidate.metrics),
            recording(snapshot_path(path, case, len(candidates))) as mark,
        ):
            mark("model")
            work = Workload(size(case.size), case.batch, case.context_length, "cuda", model=spec)
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
