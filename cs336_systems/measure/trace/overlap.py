"""The overlap of communication and compute in a trace, and a small picture of one step.

    step = overlap(trace, "rank 0/bucketed/step")[0]      # one occurrence of the range, of one rank
    step.overlap_ms / step.communication_ms

Two sets of intervals are compared: those in which a communication kernel ran, and those in which any other kernel of
the same step did. Where the work is that of a CPU (source `torch-cpu`), operators stand for kernels, and the ranges
that the threads of Gloo report (`gloo:all_reduce`) for communication.

A communication kernel spins while it waits for the other ranks: that time is part of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.measure.trace.events import Kernel, Range, Trace, union_ns
from cs336_systems.measure.trace.kernels import COMMUNICATION, class_of
from cs336_systems.store import files

PIECES = 1500  # what a lane's gaps are measured by: shorter ones than this part of the step are closed
_CPU_COMMUNICATION = ("gloo:", "nccl:")

Intervals = tuple[tuple[int, int], ...]
"""(start, length) in ns from the start of the step, by start, without overlaps."""


@dataclass(frozen=True)
class Overlap:
    """One step of one rank.

    Attributes:
        source: of the trace: `nsys`, `torch`, `torch-cpu`.
        length_ms: from the start of the range to the end of the last of its kernels.
        communication_ms: the time in which communication ran.
        compute_ms: the time in which anything else ran.
        overlap_ms: the time in which both did.
        backward_overlap_ms: the part of it that overlaps kernels of the backward pass.
        collectives: how many kernels (or ranges of Gloo) communicated.
        phases: name, start and length in ns of what each phase launched, on the device.
        compute, communication: the two sets, with gaps too short to see closed.
    """

    source: str
    length_ms: float
    communication_ms: float
    compute_ms: float
    overlap_ms: float
    backward_overlap_ms: float
    collectives: int
    phases: tuple[tuple[str, int, int], ...]
    compute: Intervals
    communication: Intervals


def overlap(trace: Trace, range_name: str, phases: Sequence[str] = ()) -> list[Overlap]:
    """Every occurrence of a range, in order; `phases` name ranges inside it. ValueError for an unknown range."""
    return [_one(trace, index, phases) for index in trace.find(range_name)]


def _one(trace: Trace, index: int, phases: Sequence[str]) -> Overlap:
    whole = trace.ranges[index]
    owned = [trace.kernels[i] for i in trace.owned(index)]
    sent = spans_of(kernel for kernel in owned if communicates(kernel))
    if trace.source == "torch-cpu":  # there, operators only issue communication
        sent = spans_of(
            r for r in trace.ranges
            if r.process == whole.process and r.name.startswith(_CPU_COMMUNICATION)
            and whole.start_ns <= r.start_ns < whole.end_ns
        )  # fmt: skip
    computed = spans_of(kernel for kernel in owned if not communicates(kernel))
    of_phases: dict[str, list[Kernel]] = {}
    for i, inner in enumerate(trace.ranges):
        if trace.parents[i] == index and inner.name in phases:  # perhaps again, where gradients add up
            mine = (trace.kernels[k] for k in trace.owned(i))
            of_phases.setdefault(inner.name, []).extend(k for k in mine if not communicates(k))
    end = max([whole.end_ns, *(end for _, end in computed), *(end for _, end in sent)])
    closed = (end - whole.start_ns) // PIECES
    return Overlap(
        source=trace.source,
        length_ms=(end - whole.start_ns) / 1e6,
        communication_ms=union_of_ns(sent) / 1e6,
        compute_ms=union_of_ns(computed) / 1e6,
        overlap_ms=_both_ms(sent, computed),
        backward_overlap_ms=_both_ms(sent, spans_of(of_phases.get("backward", ()))),
        collectives=len(sent),
        phases=tuple(
            (name, spans[0][0] - whole.start_ns, max(end for _, end in spans) - spans[0][0])
            for name, spans in ((name, spans_of(mine)) for name, mine in of_phases.items() if mine)
        ),
        compute=merged(computed, whole.start_ns, closed),
        communication=merged(sent, whole.start_ns, closed),
    )


def communicates(kernel: Kernel) -> bool:
    """Whether a kernel, or on a CPU an operator, sends or receives."""
    return kernel.name.startswith(("c10d::", "gloo:", "nccl")) or class_of(kernel.name) == COMMUNICATION


def spans_of(found: Iterable[Kernel | Range]) -> list[tuple[int, int]]:
    """Start and end of each, by start."""
    return sorted((one.start_ns, one.end_ns) for one in found)


def union_of_ns(spans: Sequence[tuple[int, int]]) -> int:
    """The time in which any of them is running."""
    return union_ns([start for start, _ in spans], [end for _, end in spans])


def _both_ms(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> float:
    """The time in which an interval of both is running: |A| + |B| - |A ∪ B|."""
    return (union_of_ns(a) + union_of_ns(b) - union_of_ns([*a, *b])) / 1e6


def merged(spans: Sequence[tuple[int, int]], zero: int, gap: int) -> Intervals:
    """The union of intervals (start, end), those made one that lie at most `gap` apart; starts count from `zero`."""
    if not spans:
        return ()
    starts, ends = np.array(sorted(spans), np.int64).T
    reach = np.maximum.accumulate(ends)
    begins = np.concatenate([[True], starts[1:] > reach[:-1] + gap])
    first = starts[begins]
    last = reach[np.concatenate([begins[1:], [True]])]
    return tuple((int(s) - zero, int(e - s)) for s, e in zip(first, last, strict=True))


# ------------------------------------------------------------------------------------------------------------- files
def to_json(steps: Sequence[Overlap], path: Path) -> None:
    """Writes one step of each rank, in the order of ranks: some kilobytes, a line for each rank."""
    files.replace({path: files.json_text({"ranks": [asdict(step) for step in steps]})})


def from_json(path: Path) -> list[Overlap]:
    """Reads what `to_json` has written."""
    return [from_dict(rank) for rank in files.read_json(path)["ranks"]]


def from_dict(parts: dict[str, Any]) -> Overlap:
    """What `dataclasses.asdict` has made of one, also by way of JSON."""
    pairs = {name: tuple((int(s), int(n)) for s, n in parts[name]) for name in ("compute", "communication")}
    phases = tuple((str(name), int(start), int(length)) for name, start, length in parts["phases"])
    return Overlap(**parts | pairs | {"phases": phases})
