"""The overlap of communication and compute in a trace, and a small picture of one step.

    step = overlap(trace, "rank 0/bucketed/step")[0]      # one occurrence of the range, of one rank
    step.overlap_ms / step.communication_ms

Two sets of intervals are compared: those in which a communication kernel ran, and those in which any other kernel of
the same step did. Where the work is that of a CPU (source `torch-cpu`), operators stand for kernels, and the ranges
that the threads of Gloo report (`gloo:all_reduce`) for communication.

A communication kernel spins while it waits for the other ranks: that time is part of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.measure.trace.events import Trace, union_ns
from cs336_systems.measure.trace.kernels import COMMUNICATION, class_of
from cs336_systems.store.files import content

FORMAT, VERSION = "cs336_systems overlap of a step", 1
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

    @property
    def share(self) -> float | None:
        """The share of communication that is overlapped; None if there was none."""
        return self.overlap_ms / self.communication_ms if self.communication_ms else None


def overlap(trace: Trace, range_name: str, phases: Sequence[str] = ()) -> list[Overlap]:
    """Every occurrence of a range, in order; `phases` name ranges inside it. ValueError for an unknown range."""
    return [_one(trace, index, phases) for index in trace.find(range_name)]


def _one(trace: Trace, index: int, phases: Sequence[str]) -> Overlap:
    whole = trace.ranges[index]
    owned = trace.owned(index)
    communicates = {i for i in owned if _communicates(trace, i)}
    sent = [(trace.kernels[i].start_ns, trace.kernels[i].end_ns) for i in communicates]
    if trace.source == "torch-cpu":  # there, operators only issue communication
        sent = [
            (r.start_ns, r.end_ns) for r in trace.ranges
            if r.process == whole.process and r.name.startswith(_CPU_COMMUNICATION)
            and whole.start_ns <= r.start_ns < whole.end_ns
        ]  # fmt: skip
    computed = {i for i in owned if i not in communicates}
    found: list[tuple[str, int, int]] = []
    backward: set[int] = set()
    for i, inner in enumerate(trace.ranges):
        if trace.parents[i] != index or inner.name not in phases:
            continue
        mine = [k for k in trace.owned(i) if k in computed]
        if inner.name == "backward":
            backward |= set(mine)
        if mine:
            start = min(trace.kernels[k].start_ns for k in mine)
            end = max(trace.kernels[k].end_ns for k in mine)
            found.append((inner.name, start - whole.start_ns, end - start))
    spans = [(trace.kernels[i].start_ns, trace.kernels[i].end_ns) for i in sorted(computed)]
    end = max([whole.end_ns, *(e for _, e in spans), *(e for _, e in sent)])
    closed = (end - whole.start_ns) // PIECES
    return Overlap(
        source=trace.source,
        length_ms=(end - whole.start_ns) / 1e6,
        communication_ms=_ms(sent),
        compute_ms=_ms(spans),
        overlap_ms=_both_ms(sent, spans),
        backward_overlap_ms=_both_ms(
            sent, [(trace.kernels[i].start_ns, trace.kernels[i].end_ns) for i in sorted(backward)]
        ),
        collectives=len(sent),
        phases=tuple(found),
        compute=merged(spans, whole.start_ns, closed),
        communication=merged(sent, whole.start_ns, closed),
    )


def _communicates(trace: Trace, index: int) -> bool:
    name = trace.kernels[index].name
    return name.startswith(("c10d::", "gloo:", "nccl")) or class_of(name) == COMMUNICATION


def _union(spans: Sequence[tuple[int, int]]) -> int:
    return union_ns([s for s, _ in spans], [e for _, e in spans])


def _ms(spans: Sequence[tuple[int, int]]) -> float:
    return _union(spans) / 1e6


def _both_ms(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> float:
    """The time in which an interval of both is running: |A| + |B| - |A ∪ B|."""
    return (_union(a) + _union(b) - _union([*a, *b])) / 1e6


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
def to_json(steps: Sequence[Overlap], path: str | Path) -> None:
    """Writes one step of each rank, in the order of ranks: some kilobytes, a line for each part."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(value)}"
        for name, value in (("format", FORMAT), ("version", VERSION))
    ]
    ranks = [
        ",\n  ".join(
            f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in asdict(step).items()
        )
        for step in steps
    ]
    lines.append('"ranks": [\n {' + "},\n {".join(ranks) + "}\n]")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def from_json(path: str | Path) -> list[Overlap]:
    """Reads what `to_json` has written; ValueError, which says why, for anything else."""
    try:
        parts = json.loads(content(Path(path)))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(parts, dict) or (parts.get("format"), parts.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is no overlap of a step, version {VERSION}")
    try:
        return [from_dict(rank) for rank in parts["ranks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no valid overlap of a step: {error}") from error


def from_dict(parts: dict[str, Any]) -> Overlap:
    """What `dataclasses.asdict` has made of one, also by way of JSON."""
    pairs = {name: tuple((int(s), int(n)) for s, n in parts[name]) for name in ("compute", "communication")}
    phases = tuple((str(name), int(start), int(length)) for name, start, length in parts["phases"])
    return Overlap(**parts | pairs | {"phases": phases})
