"""One occurrence of a range, condensed to a small JSON file from which its timeline can be drawn.

Kept are the ranges of the host, and the streams of the device with what ran on them and when. A kernel keeps its start,
its length and its class; which kernels they were, `events.kernel_table` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.measure.trace.events import Kernel, Trace, innermost
from cs336_systems.measure.trace.kernels import CLASSES, class_of
from cs336_systems.store import files


@dataclass(frozen=True)
class Stream:
    """What ran on one stream of a device (or thread of the CPU): pieces, by start; times from the step's start on.

    `kinds` are indices into `CLASSES`.
    """

    label: str
    starts_ns: tuple[int, ...]
    lengths_ns: tuple[int, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class HostRange:
    """A range of the host: `level` 0 is the step itself; from the step's start on."""

    name: str
    level: int
    start_ns: int
    length_ns: int


@dataclass(frozen=True)
class Step:
    """One occurrence of a range.

    Attributes:
        source: of the trace: `nsys`, `torch` or `torch-cpu`.
        path: the range's names from the outermost on.
        length_ns: from the start of the range to its end or that of its last kernel.
        ranges: those in it on its thread, by start, itself the first.
        streams: by device and number.
    """

    source: str
    path: str
    length_ns: int
    ranges: tuple[HostRange, ...]
    streams: tuple[Stream, ...]

    def to_json(self, path: Path) -> None:
        """Writes the step, under 300 KB, with one line for each of its parts."""
        files.replace({path: files.json_text({"classes": CLASSES} | asdict(self))})

    def to_chrome(self) -> dict[str, Any]:
        """The step in Chrome's trace format, which ui.perfetto.dev opens: times in µs, a thread for the host's ranges
        and one for each stream, kernels by class."""
        lanes = [("host", [(r.name, r.start_ns, r.length_ns) for r in self.ranges])]
        for stream in self.streams:  # those of two devices may have one label
            names = [CLASSES[kind] for kind in stream.kinds]
            lanes.append((stream.label, list(zip(names, stream.starts_ns, stream.lengths_ns, strict=True))))
        events: list[dict[str, Any]] = []
        for thread, (label, pieces) in enumerate(lanes):
            place = {"pid": 0, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", "args": {"name": label}} | place)
            events += [
                {"ph": "X", "name": name, "ts": start / 1e3, "dur": length / 1e3} | place
                for name, start, length in pieces
            ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    @classmethod
    def from_json(cls, path: Path) -> Step:
        """Reads what `to_json` has written."""
        parts = files.read_json(path)
        places = [CLASSES.index(name) for name in parts["classes"]]  # as they were when it was written
        ranges = [HostRange(r["name"], r["level"], r["start_ns"], r["length_ns"]) for r in parts["ranges"]]
        streams = [
            Stream(
                s["label"], *map(tuple, (s["starts_ns"], s["lengths_ns"], [places[k] for k in s["kinds"]]))
            )
            for s in parts["streams"]
        ]
        return cls(parts["source"], parts["path"], parts["length_ns"], tuple(ranges), tuple(streams))


def condense(trace: Trace, range_name: str) -> Step:
    """Condenses the occurrence of a range that has the median length on the host; ValueError for an unknown range."""
    indices = trace.find(range_name)
    lengths = [trace.ranges[i].end_ns - trace.ranges[i].start_ns for i in indices]
    index = indices[int(np.argsort(lengths, kind="stable")[(len(indices) - 1) // 2])]
    whole = trace.ranges[index]
    kernels = [trace.kernels[i] for i in trace.owned(index)]
    streams: dict[tuple[int, int], list[Kernel]] = {}
    for kernel in kernels:
        streams.setdefault((kernel.device, kernel.stream), []).append(kernel)
    label = "CPU thread" if trace.source == "torch-cpu" else "stream"
    return Step(
        source=trace.source,
        path=trace.paths[index],
        length_ns=max([whole.end_ns, *(kernel.end_ns for kernel in kernels)]) - whole.start_ns,
        ranges=_host_ranges(trace, index),
        streams=tuple(
            _stream(f"{label} {key[1]}", mine, whole.start_ns) for key, mine in sorted(streams.items())
        ),
    )


def _host_ranges(trace: Trace, index: int) -> tuple[HostRange, ...]:
    zero, levels = trace.ranges[index].start_ns, {index: 0}
    for i, parent in enumerate(trace.parents):
        if parent in levels:
            levels[i] = levels[parent] + 1
    return tuple(
        HostRange(found.name, level, found.start_ns - zero, found.end_ns - found.start_ns)
        for i, level in levels.items()
        for found in [trace.ranges[i]]
    )


def _stream(label: str, kernels: Sequence[Kernel], zero: int) -> Stream:
    """Where operators call others, the innermost one has the time."""
    if kernels[0].own_ns is None:
        pieces = [(i, kernel.start_ns, kernel.end_ns) for i, kernel in enumerate(kernels)]
    else:
        kernels = sorted(kernels, key=lambda k: (k.start_ns, -k.end_ns))
        pieces = innermost([(kernel.start_ns, kernel.end_ns) for kernel in kernels])
    return Stream(
        label,
        tuple(start - zero for _, start, _ in pieces),
        tuple(end - start for _, start, end in pieces),
        tuple(CLASSES.index(class_of(kernels[i].name)) for i, *_ in pieces),
    )
