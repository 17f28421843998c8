"""Chapter `memory`: what a model's forward pass and training step hold in memory, when they hold the most, and of what.

    papermill book/memory.ipynb out.ipynb -p size 2.7B -p mode train_step

Each case is a fresh process: the allocator starts empty, and its history is recorded from before the model is built.
The history is replayed and categorized there and then; what comes back is a row and, for the cases that the book draws,
a condensed timeline beside the CSV: `results/<machine>/memory/<size>_<context>_<mode>_<dtype>_<optimizer>.json`. The
raw history of those cases stays in `_build/memory`, for torch's own viewer.

A CPU has no such history. There the tiny model runs with torch's dispatcher watched instead: the same replay, stages
and categories, of tensors rather than of an allocator's blocks. The column `source` says which of the two a row is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems import accounting
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.device import comparable
from cs336_systems.measure.memory.memory import recording
from cs336_systems.measure.memory.replay import Snapshot
from cs336_systems.measure.memory.tensors import watching_tensors
from cs336_systems.measure.memory.timeline import CATEGORIES, Stage, Timeline, timeline
from cs336_systems.sizes import HANDOUT_SIZES, size
from cs336_systems.store import rows as store
from cs336_systems.store.machine import machine_name
from cs336_systems.store.process import call
from cs336_systems.store.status import Skip, failure_is_a_row
from cs336_systems.store.table import Table

MODES = ("forward", "forward_graph", "train_step")
DTYPES = ("fp32", "bf16")
ATTENTION = "reference"  # scores and probabilities materialized, as the handout's model has them
CATEGORY_COLUMNS = {name: f"{name.replace(' ', '_')}_bytes" for name in CATEGORIES}
METRICS = (  # bytes are whole, so that sums and differences are exact
    "source",  # allocator (of the CUDA device), or tensors (seen by torch's dispatcher, on a CPU)
    # From the first forward pass on, since building a model needs more than its weights for a moment:
    "peak_gib",  # the most in blocks handed out, torch.cuda.max_memory_allocated; the same in bytes:
    "peak_bytes",
    "requested_bytes",  # the most that was asked for; the categories below are of that moment
    "reserved_bytes",  # the most that the allocator held of the device
    "peak_stage",
    *CATEGORY_COLUMNS.values(),  # of a row that is out of memory: when the request failed
    "allocations",  # how many in the whole recording
    "largest_bytes",  # the largest allocation of the (last) forward pass,
    "largest_count",  # how many there were of that size from the same place,
    "largest_code",  # and the place
    "asked_bytes",  # what was asked for when memory ran out
    "device_bytes",  # what the device has
)
DEPENDS = (*depends.STEP, *depends.MEMORY, "measure/memory/tensors.py", "measure/memory/timeline.py")
GROUP = ("size", "context_length", "mode", "dtype", "optimizer", "batch", "repeat")  # a process for each case

LARGEST = "2.7B"
CONTEXTS = (128, 256, 512)
LONGEST = 2048  # that spring 2026 asks for: what a step needs there, one GPU has not
DRAWN = (128, 512, LONGEST)  # contexts whose timelines are kept
ON_CPU = "tiny"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One recording. `repeat` 1 records the same thing again.

    mode: `"forward"`: one pass under `torch.no_grad`; `"forward_graph"`: one pass whose graph and logits are kept;
    `"train_step"`: forward, loss, backward and AdamW, twice, so that the second step finds the optimizer's state.
    dtype: `"fp32"`, or `"bf16"` for autocast over fp32 weights. optimizer: AdamW's implementation, as in
    `shared.step.Workload`; without a meaning for the forward passes.
    """

    size: str
    context_length: int
    mode: str
    dtype: str = "fp32"
    optimizer: str = "fused"
    batch: int = 4
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The handout's model and contexts, and smaller models' training steps; or the tiny model on a CPU."""
    if preset == "smoke":
        return _cases(ON_CPU, (64, 128))
    smaller = [name for name in HANDOUT_SIZES if name != LARGEST]
    return [
        *_cases(LARGEST, CONTEXTS),
        *(Case(name, CONTEXTS[-1], "train_step") for name in smaller),
        *(Case(LARGEST, LONGEST, mode, dtype) for dtype in DTYPES for mode in MODES),
    ]


def _cases(name: str, contexts: Sequence[int]) -> list[Case]:
    last = contexts[-1]
    return [
        *(Case(name, context, mode, dtype) for context in contexts for dtype in DTYPES for mode in MODES),
        *(Case(name, last, "train_step", dtype, "foreach") for dtype in DTYPES),
        Case(name, last, "train_step", repeat=1),
    ]


# ------------------------------------------------------------------------------------------- predictions, places
def predicted(case: Case, device: str = "cuda") -> dict[str, dict[str, int]]:
    """The closed form of the case: `accounting.memory_moments`, bytes."""
    return accounting.memory_moments(
        size(case.size), case.batch, case.context_length, case.mode, case.dtype, "reference", device,
        case.optimizer,
    )  # fmt: skip


def drawn(case: Case) -> bool:
    """Whether the book draws the case, so that its timeline and its raw history are kept."""
    whole = case.size == ON_CPU or (case.size == LARGEST and case.context_length in DRAWN)
    return whole and case.repeat == 0


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> Iterable[dict[str, Any]]:
    """The metrics of each case."""
    import torch

    for case in cases:
        metrics: dict[str, Any] = {}
        with failure_is_a_row(metrics):
            file = store.file_beside(TABLE, case, machine_name()) if drawn(case) else None
            if torch.cuda.is_available():
                raw = store.recordings_folder("memory") / file.with_suffix(".pickle").name if file else None
                paths = {"raw": raw and str(raw), "file": file and str(file)}
                arguments = {"case": dataclasses.asdict(case)} | paths
                metrics = call(f"{__name__}:alone", arguments, timeout_s=240)
            elif case.size == ON_CPU:
                metrics = _on_cpu(case, file)
            else:
                raise Skip("needs a CUDA device")
        yield metrics


def alone(case: dict[str, Any], raw: str | None, file: str | None) -> dict[str, Any]:
    """One case on the CUDA device of this process, in which nothing has run before; returns its metrics.

    raw, file: where the allocator's history and the condensed timeline are to be kept, or None. Where memory runs out,
    the row says so, and the metrics tell what there was when it did.
    """
    import torch

    wanted, metrics = Case(**case), {}
    with failure_is_a_row(metrics), recording(Path(raw) if raw else None) as (mark, snapshot):
        alive = take_steps(wanted, "cuda", mark)
    alive = None  # noqa: F841  until the history had been taken
    if metrics.get("status") not in (None, "oom"):
        return metrics
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = {"source": "allocator", "device_bytes": properties.total_memory}
    return metrics | condense(snapshot(), file) | device


def take_steps(case: Case, device: str, mark: Callable[[str], None]) -> Any:
    """Builds the model and takes the case's steps, each stage marked; returns what lives until the recording ends.

    The peak statistics of a CUDA device are those of the steps: they are reset when the model has been built.
    """
    import torch

    from cs336_systems.chapters.shared.step import Workload

    mark("model")
    work = Workload(size(case.size), case.batch, case.context_length, device, optimizer=case.optimizer)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if case.mode == "forward_graph":
        step = work.step("forward_backward", case.dtype, ATTENTION)
        step.prepare()
        mark("forward")
        with step.autocast():
            return work, work.model(work.ids)
    step = work.step(case.mode, case.dtype, ATTENTION)
    step.prepare()
    if case.mode == "train_step":
        work.model.register_forward_hook(lambda *_: mark("loss"))  # its logits are there
    for _ in range(2 if case.mode == "train_step" else 1):
        for name, phase in step.phases.items():
            mark(name)
            phase()
    return work


def condense(snapshot: Snapshot, file: str | Path | None) -> dict[str, Any]:
    """The metrics of a recording; with `file` the condensed timeline is kept there."""
    found = timeline(snapshot)
    if file:
        found.to_json(Path(file))
    stage = peak_stage(found)
    alive, asked = stage.peak.by_category, None
    if found.out_of_memory:
        event, asked, _ = found.out_of_memory[-1]
        place = found.events.index(event)
        alive = {name: values[place] for name, values in found.bytes.items()}
    forward = [s.name for s in found.stages if s.name.startswith("forward")]
    largest = next((group for group in found.largest if forward and group.stage == forward[-1]), None)
    allocated = found.allocator.get("peak_allocated_bytes", stage.peak.bytes)
    return {
        "peak_gib": allocated / GIB,
        "peak_bytes": allocated,
        "requested_bytes": stage.peak.bytes,
        "reserved_bytes": found.allocator.get("peak_reserved_bytes"),
        "peak_stage": stage.name,
        **{column: alive.get(name, 0) for name, column in CATEGORY_COLUMNS.items()},
        "allocations": sum(a.begin >= 0 for a in snapshot.allocations),
        "largest_bytes": largest and largest.bytes,
        "largest_count": largest and largest.count,
        "largest_code": largest and largest.code,
        "asked_bytes": asked,
    }


def peak_stage(found: Timeline) -> Stage:
    """The stage in which the most memory was active, the last of equals; the model's only where nothing follows it."""
    steps = [stage for stage in found.stages if stage.name != "model"]
    return max(reversed(steps or found.stages), key=lambda stage: stage.peak.bytes)


# ------------------------------------------------------------------------------------------- on a CPU: tensors
def _on_cpu(case: Case, file: Path | None) -> dict[str, Any]:
    with comparable(), watching_tensors() as (mark, snapshot):
        alive = take_steps(case, "cpu", mark)
        taken = snapshot()
    del alive
    return condense(taken, file) | {"source": "tensors"}


TABLE = Table(
    __name__, Case, METRICS, GROUP, grid, run_group, DEPENDS,
    beside=("size", "context_length", "mode", "dtype", "optimizer"),
)  # fmt: skip
