"""Chapter `profiling`: which kernels a step is made of, by Nsight Systems, for every size and context of the handout.

    papermill book/profiling.ipynb out.ipynb -p size small -p context_length 512

Each shape is a process of its own under `nsys profile`: it warms up, times its phases with the host's clock, and then
runs a few steps inside the capture, with ranges for step, forward, backward, optimizer, and the three parts of
attention. What the trace says becomes a row for each range: sums by class of kernel, and the longest kernels by name.
Where there is no Nsight Systems, torch's profiler gives the same rows (column `source`); one shape is recorded with
both. Condensed timelines of the shapes in `DRAWN` go to `results/<machine>/profiling/`, whole reports to
`_build/profiling/`. A step that does not fit is a row, and what fits of it (forward and backward) is still recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.chapters.shared import depends, steps
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import take_turns
from cs336_systems.measure.device import default_device, give_back, synchronizer
from cs336_systems.measure.trace import condensed, events, kernels, nsys, profiler
from cs336_systems.sizes import HANDOUT_SIZES, SIZES
from cs336_systems.store import rows as store
from cs336_systems.store.machine import gpu_names, machine_name
from cs336_systems.store.status import failure_is_a_row
from cs336_systems.store.table import Table

CONTEXTS = (128, 256, 512, 1024)
PRIMARY = 512
RANGES = {
    "inference": "inference/forward",  # without a graph for backward
    "forward": "step/forward",
    "backward": "step/backward",
    "optimizer": "step/optimizer",
    "scores": "step/forward/attention scores",
    "softmax": "step/forward/attention softmax",
    "output": "step/forward/attention output",
}
DEPENDS = (
    *depends.STEP, *depends.NSYS, "accounting/memory.py", *depends.STEP_CLOCK,
    "measure/trace/condensed.py",
)  # fmt: skip
GROUP = ("size", "context_length", "batch", "dtype", "tool")
CLASS_COLUMNS = {kind: re.sub(r"\W+", "_", kind.lower()) + "_ms" for kind in kernels.CLASSES}
METRICS = (
    "python_ms", "host_ms", "busy_ms", "idle_ms", "kernel_ms", "kernels", *CLASS_COLUMNS.values(), "longest", "source",
    "tool_version",
)  # fmt: skip
DRAWN = (
    ("small", PRIMARY, "fp32"),
    ("xl", PRIMARY, "fp32"),
    ("small", PRIMARY, "bf16"),
    ("tiny", 64, "fp32"),
)
STEPS, WARMUP = 3, 5
LONGEST = 14  # kernels of a range that are kept by name; all the others are in the sums
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Case:
    """One range of the step of one shape; `tool`: "auto" is Nsight Systems where there is one, "torch" its stand-in."""

    size: str
    context_length: int
    range: str
    dtype: str = "fp32"
    tool: str = "auto"
    batch: int = 4


def grid(preset: str) -> list[Case]:
    """All sizes and contexts in fp32, context 512 in bf16 as well, and one shape with torch's profiler."""
    if preset == "smoke":
        shapes = [("tiny", 64, "fp32", "auto")]
    else:
        shapes = [(size, context, "fp32", "auto") for size in HANDOUT_SIZES for context in CONTEXTS]
        shapes += [(size, PRIMARY, "bf16", "auto") for size in HANDOUT_SIZES]
        shapes.append(("small", PRIMARY, "fp32", "torch"))
    return [
        Case(size, context, name, dtype, tool) for size, context, dtype, tool in shapes for name in RANGES
    ]


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Records one shape and reads its ranges."""
    case = cases[0]
    arguments = {
        "size": case.size, "context_length": case.context_length, "batch": case.batch, "dtype": case.dtype,
    }  # fmt: skip
    if not gpu_names():
        step = steps.Case(case.size, case.context_length, "train_step", case.dtype, batch=case.batch)
        steps.refuse(step, "cpu")
    keep = store.recordings_folder("profiling")
    keep /= f"{case.size}_{case.context_length}_{case.dtype}_{case.tool}"
    if gpu_names() and case.tool == "auto" and nsys.find() is not None:
        said, recorded = nsys.record_nsys(
            f"{__name__}:under_nsys", arguments, timeout_s=_TIMEOUT_S, keep=keep
        )
        said["tool_version"] = nsys.version()
    else:
        said, recorded = _with_torch(arguments, keep / "trace.json.gz")
    found = [_row(one, said, recorded) for one in cases]
    whole = not said["status"]
    if whole and (case.size, case.context_length, case.dtype) in DRAWN and case.tool == "auto":
        condensed.condense(recorded, "step").to_json(store.file_beside(TABLE, case, machine_name()))
    return found


class _Shape:
    """The steps of one shape that are recorded: warmed up, timed, and as far as memory allows."""

    def __init__(self, size: str, context_length: int, batch: int, dtype: str) -> None:

        from cs336_systems.chapters.shared.step import Workload

        self.device = default_device()
        self.said: dict[str, Any] = {"python_ms": {}, "status": {}, "steps": STEPS}
        self.steps: dict[str, Any] = {}
        full: dict[str, Any] = {}
        with failure_is_a_row(full):
            work = Workload(SIZES[size], batch, context_length, self.device)
        for mode, names in (
            ("forward", ("inference",)),
            ("train_step", ("optimizer",)),
            ("forward_backward", ("forward", "backward")),
        ):  # fmt: skip
            if mode == "forward_backward" and "step" in self.steps:
                continue  # the whole step has timed its phases
            failed = dict(full)
            if not failed:
                with failure_is_a_row(failed):
                    step = work.step(mode, dtype, "reference")
                    step.prepare()
                    with profiler.span("warm-up"):
                        clock = Steps(self.device, warmup=WARMUP, steps=STEPS)
                        samples = take_turns({"": step.phases}, clock)[""]
                    for phase in step.phases:
                        name = "inference" if mode == "forward" else phase
                        self.said["python_ms"][name] = samples.p50(phase)
                    self.steps["inference" if mode == "forward" else "step"] = step
                    step.loss = None
            if failed:
                self.said["status"] |= dict.fromkeys(names, failed["status"])
                if not full:
                    step.loss = None
                    work.forget(optimizer=True)
                give_back(self.device)
        for part in ("scores", "softmax", "output"):
            if "forward" in self.said["status"]:
                self.said["status"][part] = self.said["status"]["forward"]

    def run(self) -> None:
        """What is recorded: a few steps of each kind, the device synchronized after each phase."""
        wait = synchronizer(self.device)
        for outer, step in self.steps.items():
            failed: dict[str, Any] = {}
            with failure_is_a_row(failed):
                step.prepare()
                for number in range(-1, STEPS):  # the first belongs to no range: in it the recorder starts
                    with profiler.span(outer if number >= 0 else "warm-up"):
                        for name, phase in step.phases.items():
                            with profiler.span(name):
                                phase()
                                wait()
            if failed:  # the recorder needs memory of the device, too
                step.loss = None
                names = [name for name, path in RANGES.items() if path.startswith(f"{outer}/")]
                self.said["status"] |= dict.fromkeys(names, failed["status"])


def under_nsys(size: str, context_length: int, batch: int, dtype: str) -> dict[str, Any]:
    """What the process under Nsight Systems does; returns the host's times and what did not fit."""
    shape = _Shape(size, context_length, batch, dtype)
    with nsys.capture():
        shape.run()
    return shape.said


def _with_torch(arguments: dict[str, Any], keep: Path) -> tuple[dict[str, Any], events.Trace]:
    import torch

    shape = _Shape(**arguments)
    recorded = profiler.record_torch(shape.run, keep=keep)
    said = shape.said | {"tool_version": torch.__version__.split("+")[0]}
    del shape
    give_back(default_device())
    return said, recorded


def _row(case: Case, said: dict[str, Any], recorded: events.Trace) -> dict[str, Any]:
    """The metrics of one range, for one step: means over the steps that were recorded."""
    if status := said["status"].get(case.range):
        return {"status": status}
    count, path = said["steps"], RANGES[case.range]
    used = events.usage(recorded, path)
    each: Callable[[str], float] = lambda field: getattr(used, field) / count
    table = events.kernel_table(recorded, path)
    sums = dict.fromkeys(kernels.CLASSES, 0.0)
    for use in table:
        sums[use.kind] += use.total_ms / count
    longest = [
        [use.name, use.kind, use.calls / count, round(use.total_ms / count, 5)] for use in table[:LONGEST]
    ]
    return {
        "python_ms": said["python_ms"].get(case.range),
        **{f"{what}_ms": each(f"{what}_ms") for what in ("host", "busy", "idle", "kernel")},
        "kernels": each("kernels"),
        **{CLASS_COLUMNS[kind]: ms for kind, ms in sums.items()},
        "longest": json.dumps(longest, separators=(",", ":"), ensure_ascii=False),
        "source": recorded.source,
        "tool_version": said["tool_version"],
    }


TABLE = Table(
    __name__, Case, METRICS, GROUP, grid, run_group, DEPENDS, beside=("size", "context_length", "dtype")
)
