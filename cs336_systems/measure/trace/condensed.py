"""One occurrence of a range, condensed to a small JSON file from which its timeline can be drawn.

Kept are the ranges of the host, the streams of the device with what ran on them and when, and sums by class. A kernel
keeps its start, its length and its class; which kernels they were, `events.kernel_table` says. Where there are too many
of them, short ones are pooled: of those that begin in the same slot of time on the same stream, all of one class become
one piece, of the same total length. Kernels longer than a slot stay as they are, and slots are only as wide as needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.measure.trace.events import Kernel, Trace, Usage, union_ns, usage_of
from cs336_systems.measure.trace.kernels import CLASSES, class_of
from cs336_systems.store.files import content

FORMAT, VERSION = "cs336_systems trace of a step", 1
MAX_KERNELS, MAX_RANGES = 10_000, 1_000


@dataclass(frozen=True)
class Stream:
    """What ran on one stream of a device (or thread of the CPU): pieces, by start; times from the step's start on.

    `kinds` are indices into `CLASSES`. `kernels` ran there, in `busy_ms`; pooled, they may be fewer pieces.
    """

    label: str
    kernels: int
    busy_ms: float
    starts_ns: tuple[int, ...]
    lengths_ns: tuple[int, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class HostRange:
    """A range of the host: `level` 0 is the step itself, `thread` 0 the one that runs it; from the step's start on."""

    name: str
    level: int
    thread: int
    start_ns: int
    length_ns: int


@dataclass(frozen=True)
class KindUse:
    """The kernels of one class within the step."""

    kind: str
    calls: int
    ms: float


@dataclass(frozen=True)
class Step:
    """One occurrence of a range.

    Attributes:
        source: of the trace: `nsys`, `torch` or `torch-cpu`.
        path: the range's names from the outermost on.
        occurrence, occurrences: which of them it is, from 0, and how many there are.
        length_ns: from the start of the range to its end or that of its last kernel.
        usage: how it used the device.
        kinds: its kernels by class, the longest sum first.
        ranges: those of the host within it, by start.
        streams: the busiest first.
        slot_ns: the width of the slots in which short kernels were pooled; 0: none were.
        notes: of the trace, and what was left out.
    """

    source: str
    path: str
    occurrence: int
    occurrences: int
    length_ns: int
    usage: Usage
    kinds: tuple[KindUse, ...]
    ranges: tuple[HostRange, ...]
    streams: tuple[Stream, ...]
    slot_ns: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError where the parts are not what they should be."""
        numbers = [self.length_ns, self.slot_ns, self.occurrence, self.occurrences]
        numbers += [*asdict(self.usage).values(), *(n for use in self.kinds for n in (use.calls, use.ms))]
        numbers += [n for found in self.ranges for n in (found.level, found.thread, found.length_ns)]
        numbers += [n for stream in self.streams for n in (stream.kernels, stream.busy_ms)]
        if not all(type(number) in (int, float) and 0 <= number < float("inf") for number in numbers):
            raise ValueError("a length, a number of calls or a level is no number, or below 0")
        texts = [self.source, self.path, *(found.name for found in self.ranges), *self.notes]
        if not all(isinstance(text, str) for text in [*texts, *(stream.label for stream in self.streams)]):
            raise TypeError("a name is no text")
        if not all(type(found.start_ns) is int for found in self.ranges):
            raise TypeError("a range has no start")
        if unknown := {use.kind for use in self.kinds} - set(CLASSES):
            raise ValueError(f"unknown classes {', '.join(sorted(unknown))}; allowed: {', '.join(CLASSES)}")
        for stream in self.streams:
            if not len(stream.starts_ns) == len(stream.lengths_ns) == len(stream.kinds):
                raise ValueError(f"{stream.label} has different numbers of starts, lengths and classes")
            if any(length < 0 for length in stream.lengths_ns):
                raise ValueError(f"{stream.label} has a kernel that ends before it begins")
            if not all(0 <= kind < len(CLASSES) for kind in stream.kinds):
                raise ValueError(f"{stream.label} has a kernel of no known class")

    def to_json(self, path: str | Path) -> None:
        """Writes the step, under 300 KB, with one line for each of its parts."""
        parts = {"format": FORMAT, "version": VERSION, "classes": CLASSES} | asdict(self)
        lines = [f"{json.dumps(name)}: {_compact(value)}" for name, value in parts.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Step:
        """Reads what `to_json` has written; ValueError, which says why, for anything else."""
        try:
            parts = json.loads(content(Path(path)))
        except (ValueError, RecursionError) as error:  # of decoding, too
            raise ValueError(f"{path} is no JSON file: {error}") from error
        if not isinstance(parts, dict) or parts.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no trace of a step")
        if (version := parts.pop("version", None)) != VERSION:
            raise ValueError(f"{path} has version {version}; this code reads {VERSION}")
        try:
            places = tuple(CLASSES.index(name) for name in parts.pop("classes"))
            return cls(
                **parts
                | {
                    "usage": Usage(**parts["usage"]),
                    "kinds": tuple(KindUse(**use) for use in parts["kinds"]),
                    "ranges": tuple(HostRange(**found) for found in parts["ranges"]),
                    "streams": tuple(_stream(stream, places) for stream in parts["streams"]),
                    "notes": tuple(parts["notes"]),
                }
            )
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is no valid trace of a step: {what}") from error


def _stream(parts: dict[str, Any], places: Sequence[int]) -> Stream:
    starts, lengths, kinds = (_integers(parts[name]) for name in ("starts_ns", "lengths_ns", "kinds"))
    if any(kind < 0 for kind in kinds):
        raise ValueError("a class has a number below 0")
    kinds = tuple(places[kind] for kind in kinds)  # of the classes as they were when it was written
    return Stream(**parts | {"starts_ns": starts, "lengths_ns": lengths, "kinds": kinds})


def _compact(value: Any) -> str:
    """JSON in one line, or in one line an entry of a list of objects."""
    if isinstance(value, list | tuple) and any(isinstance(entry, dict) for entry in value):
        return "[\n " + ",\n ".join(map(_compact, value)) + "\n]"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError(f"{str(values)[:60]} is no list of integers")
    return tuple(values)


# ------------------------------------------------------------------------------------------------ condensing
def condense(
    trace: Trace,
    range_name: str,
    *,
    occurrence: int | None = None,
    max_kernels: int = MAX_KERNELS,
    max_ranges: int = MAX_RANGES,
) -> Step:
    """Condenses one occurrence of a range.

    occurrence:   which one, from 0 on; by default the one of median length on the host.
    max_kernels:  the most pieces that are kept, of all streams together; at least 100.
    max_ranges:   the most ranges that are kept; where there are more, the innermost levels are left out.

    Raises ValueError for an unknown range, an occurrence that there is not, or limits that are too low.
    """
    if max_kernels < 100 or max_ranges < 1:
        raise ValueError(f"max_kernels={max_kernels}, max_ranges={max_ranges}; at least 100 and 1 are needed")
    indices = trace.find(range_name)
    if occurrence is None:
        lengths = [trace.ranges[i].end_ns - trace.ranges[i].start_ns for i in indices]
        occurrence = int(np.argsort(lengths, kind="stable")[(len(indices) - 1) // 2])
    if not 0 <= occurrence < len(indices):
        raise ValueError(f"occurrence={occurrence}; allowed: 0 to {len(indices) - 1}")
    index = indices[occurrence]
    whole = trace.ranges[index]
    kernels = [trace.kernels[i] for i in trace.owned(index)]
    end = max([whole.end_ns, *(kernel.end_ns for kernel in kernels)])
    ranges, left_out = _host_ranges(trace, index, max_ranges)
    streams, slot = _streams(trace.source, kernels, whole.start_ns, max_kernels)
    sums: dict[str, list[int]] = {}
    for kernel in kernels:
        entry = sums.setdefault(class_of(kernel.name), [0, 0])
        entry[0] += 1
        entry[1] += kernel.work_ns
    kinds = [KindUse(kind, calls, ns / 1e6) for kind, (calls, ns) in sums.items()]
    return Step(
        source=trace.source,
        path=trace.paths[index],
        occurrence=occurrence,
        occurrences=len(indices),
        length_ns=end - whole.start_ns,
        usage=usage_of(trace, index),
        kinds=tuple(sorted(kinds, key=lambda use: (-use.ms, use.kind))),
        ranges=ranges,
        streams=streams,
        slot_ns=slot,
        notes=(*trace.notes, *left_out),
    )


def _host_ranges(trace: Trace, index: int, most: int) -> tuple[tuple[HostRange, ...], list[str]]:
    """The range itself, those in it on its thread, and those of other threads that lie wholly in its time."""
    whole = trace.ranges[index]
    levels: dict[int, int] = {index: 0}
    threads = {whole.thread: 0}
    for i, found in enumerate(trace.ranges):
        if i == index or found.process != whole.process:
            continue
        parent = trace.parents[i]
        if parent in levels:
            levels[i] = levels[parent] + 1
        elif (
            found.thread != whole.thread and whole.start_ns <= found.start_ns and found.end_ns <= whole.end_ns
        ):
            levels[i] = 0
            threads.setdefault(found.thread, len(threads))
    notes = []
    deepest = max(levels.values())
    chosen = list(levels)
    while len(chosen) > most and deepest > 0:
        chosen = [i for i in chosen if levels[i] < deepest]
        deepest -= 1
    if len(chosen) < len(levels):
        notes.append(f"{len(levels) - len(chosen)} ranges of inner levels are left out")
    return tuple(
        HostRange(
            found.name, levels[i], threads[found.thread], found.start_ns - whole.start_ns, found.end_ns - found.start_ns
        )
        for i in sorted(chosen)[:most]
        for found in [trace.ranges[i]]
    ), notes  # fmt: skip


def _streams(source: str, kernels: Sequence[Kernel], zero: int, most: int) -> tuple[tuple[Stream, ...], int]:
    """The streams, the busiest first, and the width of the slots, in ns, in which short kernels are pooled."""
    groups: dict[tuple[int, int], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.device, kernel.stream), []).append(kernel)
    several = len({device for device, _ in groups}) > 1
    raw = []
    for (device, stream), mine in sorted(groups.items()):
        label = "CPU thread" if source == "torch-cpu" else "stream"
        label = f"device {device}, {label} {stream}" if several else f"{label} {stream}"
        busy = union_ns([k.start_ns for k in mine], [k.end_ns for k in mine])
        raw.append((label, len(mine), busy, _pieces(mine, zero)))
    raw.sort(key=lambda entry: -entry[2])
    total = sum(len(pieces) for *_, pieces in raw)
    length = max((int(pieces[:, :2].sum(axis=1).max()) for *_, pieces in raw if len(pieces)), default=0)
    slot, pooled = 0, [pieces for *_, pieces in raw]
    while sum(map(len, pooled)) > most and slot <= length:
        slot = 2 * slot or max(1, length // (4 * total))
        pooled = [_pool(pieces, slot) for *_, pieces in raw]
    return tuple(
        Stream(label, count, busy / 1e6, *(tuple(map(int, column)) for column in pieces.T))
        for (label, count, busy, _), pieces in zip(raw, pooled, strict=True)
    ), slot


def _pieces(kernels: Sequence[Kernel], zero: int) -> np.ndarray:
    """(n, 3): start, length and class. Where operators call others, the innermost one has the time."""
    rows: list[tuple[int, int, int]] = []
    stack: list[Kernel] = []
    cursor = 0

    def until(time: int) -> None:
        nonlocal cursor
        if stack and time > cursor:
            rows.append((cursor - zero, time - cursor, CLASSES.index(class_of(stack[-1].name))))
        cursor = max(cursor, time)

    for kernel in sorted(kernels, key=lambda k: (k.start_ns, -k.end_ns)):
        if kernel.own_ns is None:
            place = CLASSES.index(class_of(kernel.name))
            rows.append((kernel.start_ns - zero, kernel.end_ns - kernel.start_ns, place))
            continue
        while stack and stack[-1].end_ns <= kernel.start_ns:
            until(stack[-1].end_ns)
            stack.pop()
        until(kernel.start_ns)
        cursor = kernel.start_ns
        stack.append(kernel)
    while stack:
        until(stack[-1].end_ns)
        stack.pop()
    return np.array(rows, np.int64).reshape(-1, 3)


def _pool(pieces: np.ndarray, slot: int) -> np.ndarray:
    """Pieces shorter than a slot made one for each class and slot, one behind the other from the first one's start."""
    short = pieces[:, 1] < slot
    if not short.any():
        return pieces
    starts, lengths, kinds = pieces[short].T
    slots, which = np.unique(starts // slot, return_inverse=True)
    first = np.full(len(slots), np.iinfo(np.int64).max)
    np.minimum.at(first, which, starts)
    sums = np.zeros((len(slots), len(CLASSES)), np.int64)
    np.add.at(sums, (which, kinds), lengths)
    begins = first[:, None] + np.cumsum(sums, axis=1) - sums
    there = sums > 0
    kind = np.broadcast_to(np.arange(len(CLASSES)), sums.shape)
    out = np.concatenate([pieces[~short], np.stack([begins[there], sums[there], kind[there]], axis=1)])
    return out[np.argsort(out[:, 0], kind="stable")]
