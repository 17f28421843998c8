"""What a GPU did, and at whose request: kernels and named ranges of one recording, whichever tool has made it.

    trace = sqlite.read_nsys("step.sqlite")          # or profiler.record_torch(step)
    kernel_table(trace, "forward")                   # which kernels, how often, how long
    usage(trace, "step")                             # busy, idle, share of matmuls: one entry per step
    condensed.condense(trace, "step").to_json("step.json")

Whose kernel it is: a kernel runs long after the host has launched it, so what counts is the time of the launch (the
call of the CUDA runtime or driver with the kernel's correlation id), not that of the execution. A kernel belongs to
all ranges that are open on the launching thread at that time. The backward pass launches from autograd's own thread,
while the thread that called it waits inside its `backward` range: so a kernel belongs to ranges open on other threads
of the process as well, unless its own thread has a range open that is not part of them: one that is not wholly inside,
or that bears the name of one of them, as threads do that run the same program side by side.

Ranges are named by their paths, the names from the outermost on: `step/forward/attention softmax`. Where a range is
asked for, the end of its path does: `forward`, `forward/attention softmax`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cs336_systems.measure.trace.kernels import PRODUCT, class_of, short_name

SOURCES = ("nsys", "torch", "torch-cpu")
BY = ("name", "short", "class")
NEVER = np.iinfo(np.int64).min


class Kernel(NamedTuple):
    """One operation of a device: a kernel, a copy, a fill; where the source is `torch-cpu`, an operator of the CPU.

    `launched_ns` and `thread` are None where the recording has no launch for it. `own_ns` is the time of an operator
    without that of the operators it calls; None for kernels, whose time is their own.
    """

    name: str
    start_ns: int
    end_ns: int
    device: int
    stream: int
    launched_ns: int | None
    process: int
    thread: int | None
    own_ns: int | None = None

    @property
    def work_ns(self) -> int:
        """Its own time."""
        return self.end_ns - self.start_ns if self.own_ns is None else self.own_ns


class Range(NamedTuple):
    """A named stretch of time of one thread on the host, from `start_ns` up to, but not including, `end_ns`."""

    name: str
    start_ns: int
    end_ns: int
    process: int
    thread: int


@dataclass(frozen=True)
class Trace:
    """One recording. Times are in ns on one clock, whose zero is the recording's own.

    Attributes:
        source: `nsys`, `torch` (torch's profiler), or `torch-cpu` (the same, without a GPU).
        kernels: by start.
        ranges: by start, the longer one first.
        notes: what is missing, and what the reader had to assume.
    """

    source: str
    kernels: tuple[Kernel, ...]
    ranges: tuple[Range, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"unknown source {self.source!r}; allowed: {', '.join(SOURCES)}")
        for what in (*self.kernels, *self.ranges):
            if what.end_ns < what.start_ns:
                raise ValueError(f"{what.name!r} ends before it begins")
        kernels = sorted(self.kernels, key=lambda k: (k.start_ns, k.end_ns))
        object.__setattr__(self, "kernels", tuple(kernels))
        object.__setattr__(self, "ranges", tuple(sorted(self.ranges, key=lambda r: (r.start_ns, -r.end_ns))))

    # ------------------------------------------------------------------------------------------------- ranges
    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """For each range the index of the innermost one of its thread that holds it wholly, or -1."""
        out = []
        stacks: dict[tuple[int, int], list[int]] = {}
        for i, inner in enumerate(self.ranges):
            stack = stacks.setdefault((inner.process, inner.thread), [])
            while stack and self.ranges[stack[-1]].end_ns <= inner.start_ns:
                stack.pop()
            holding = (j for j in reversed(stack) if self.ranges[j].end_ns >= inner.end_ns)
            out.append(next(holding, -1))
            stack.append(i)
        return tuple(out)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """For each range its own name after those of the ranges that it is in."""
        out: list[str] = []
        for found, parent in zip(self.ranges, self.parents, strict=True):
            out.append(found.name if parent < 0 else f"{out[parent]}/{found.name}")
        return tuple(out)

    def find(self, name: str) -> list[int]:
        """The indices of the ranges whose path is `name` or ends in it, by start; ValueError if there is none.

        A range inside another of them is left out, so that no kernel counts twice.
        """
        found: list[int] = []
        inside: set[int] = set()
        for i, (path, parent) in enumerate(zip(self.paths, self.parents, strict=True)):
            if parent in inside:
                inside.add(i)
            elif path == name or path.endswith(f"/{name}"):
                inside.add(i)
                found.append(i)
        if not found:
            known = list(dict.fromkeys(self.paths))
            more = f", … ({len(known)} in all)" if len(known) > 20 else ""
            raise ValueError(
                f"no range {name!r}; allowed: {', '.join(known[:20]) or 'none was recorded'}{more}"
            )
        return found

    # ---------------------------------------------------------------------------------------------- ownership
    @functools.cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        columns = {
            "start": [k.start_ns for k in self.kernels],
            "end": [k.end_ns for k in self.kernels],
            "work": [k.work_ns for k in self.kernels],
            "device": [k.device for k in self.kernels],
            "launched": [NEVER if k.launched_ns is None else k.launched_ns for k in self.kernels],
            "process": [k.process for k in self.kernels],
            "thread": [-1 if k.thread is None else k.thread for k in self.kernels],
            "range_start": [r.start_ns for r in self.ranges],
            "range_end": [r.end_ns for r in self.ranges],
        }
        arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
        return arrays | {"reach": np.maximum.accumulate(arrays["end"])}  # the latest end up to each kernel

    @functools.cached_property
    def _by_launch(self) -> tuple[np.ndarray, np.ndarray]:
        """The kernels that have a launch, in its order, and its times."""
        launched = self._columns["launched"]
        order = np.argsort(launched, kind="stable")
        order = order[launched[order] != NEVER]
        return order, launched[order]

    @functools.cached_property
    def _roots(self) -> np.ndarray:
        """For each kernel the earliest range open on its own thread at its launch, or -1."""
        roots = np.full(len(self.kernels), -1)
        threads: dict[tuple[int, int], list[int]] = {}
        for i, found in enumerate(self.ranges):
            threads.setdefault((found.process, found.thread), []).append(i)
        columns = self._columns
        for (process, thread), mine in threads.items():
            times, open_from = _earliest_open(columns["range_start"][mine], columns["range_end"][mine])
            here = (columns["process"] == process) & (columns["thread"] == thread)
            chosen = np.flatnonzero(here & (columns["launched"] != NEVER))
            place = open_from[np.searchsorted(times, columns["launched"][chosen], side="right")]
            roots[chosen] = np.where(place < 0, -1, np.array(mine)[place])
        return roots

    def owned(self, index: int) -> np.ndarray:
        """The indices of the kernels that belong to a range, by the rule above, in the order of their starts."""
        mine, columns = self.ranges[index], self._columns
        order, times = self._by_launch
        found = order[slice(*np.searchsorted(times, [mine.start_ns, mine.end_ns]))]
        found = np.sort(found[columns["process"][found] == mine.process])
        own = columns["thread"][found] == mine.thread
        if own.all():
            return found
        names, at = {mine.name}, index
        while (at := self.parents[at]) >= 0:
            names.add(self.ranges[at].name)
        strangers = [
            root for root in np.unique(self._roots[found[~own]]) if root >= 0
            and not (
                mine.start_ns <= self.ranges[root].start_ns
                and self.ranges[root].end_ns <= mine.end_ns
                and self.ranges[root].name not in names
            )
        ]  # fmt: skip
        return found[own | ~np.isin(self._roots[found], strangers)]


def _earliest_open(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of these ranges, sorted by start, is the earliest one open: (n,) times, (n + 1,) places between them."""
    times = np.unique(np.concatenate([starts, ends]))
    places = np.full(len(times) + 1, -1)
    for i in reversed(range(len(starts))):  # the earlier ones overwrite
        places[slice(*(np.searchsorted(times, [starts[i], ends[i]]) + 1))] = i
    return times, places


# --------------------------------------------------------------------------------------------------- tables
@dataclass(frozen=True)
class KernelUse:
    """Kernels of one name (or class) within all occurrences of a range: how often, how long, at which share of all."""

    name: str
    kind: str
    occurrences: int
    calls: int
    total_ms: float
    share: float


def kernel_table(trace: Trace, range_name: str, *, by: str = "name") -> list[KernelUse]:
    """The kernels of all occurrences of a range, the longest total first.

    by:  `"name"` (in full), `"short"` (`kernels.short_name`) or `"class"` (`kernels.CLASSES`).

    Copies and fills of the device's memory count as kernels here. Times are summed up, also where kernels overlap.
    Raises ValueError for an unknown range or `by`.
    """
    if by not in BY:
        raise ValueError(f"unknown grouping {by!r}; allowed: {', '.join(BY)}")
    ranges = trace.find(range_name)
    sums: dict[tuple[str, str], list[int]] = {}
    for index in ranges:
        for i in trace.owned(index):
            name = trace.kernels[i].name
            kind = class_of(name)
            key = ({"name": name, "class": kind}.get(by) or short_name(name), kind)
            entry = sums.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += trace.kernels[i].work_ns
    total = sum(ns for _, ns in sums.values())
    table = [
        KernelUse(name, kind, len(ranges), calls, ns / 1e6, ns / total if total else 0.0)
        for (name, kind), (calls, ns) in sums.items()
    ]
    return sorted(table, key=lambda use: (-use.total_ms, use.name))


@dataclass(frozen=True)
class Usage:
    """How one occurrence of a range used the device.

    Attributes:
        host_ms: the range itself, on the host's clock.
        span_ms: from its first launch to the end of its last kernel.
        kernels: how many belong to it.
        kernel_ms: the sum of their times.
        busy_ms: the time in which at least one of them ran.
        idle_ms: the part of `span_ms` in which nothing ran on their devices, of whatever range.
        product_ms: the sum of the times of matmuls.
    """

    host_ms: float
    span_ms: float
    kernels: int
    kernel_ms: float
    busy_ms: float
    idle_ms: float
    product_ms: float


def usage(trace: Trace, range_name: str) -> list[Usage]:
    """How each occurrence of a range used the device, in order; ValueError for an unknown range."""
    return [usage_of(trace, index) for index in trace.find(range_name)]


def usage_of(trace: Trace, index: int) -> Usage:
    """How one occurrence of a range used the device, by its index in `trace.ranges`."""
    mine, found, columns = trace.ranges[index], trace.owned(index), trace._columns
    host_ms = (mine.end_ns - mine.start_ns) / 1e6
    if not len(found):
        return Usage(host_ms, 0.0, 0, 0.0, 0.0, 0.0, 0.0)
    start, end, work = columns["start"], columns["end"], columns["work"]
    first = int(columns["launched"][found].min())
    last = max(first, int(end[found].max()))
    # what may have run then: from the first kernel up to which an end is late enough, to the last that began in time
    near = slice(np.searchsorted(columns["reach"], first), np.searchsorted(start, last))
    here = np.isin(columns["device"][near], np.unique(columns["device"][found]))
    running = union_ns(start[near][here].clip(first, last), end[near][here].clip(first, last))
    products = [i for i in found if class_of(trace.kernels[i].name) == PRODUCT]
    return Usage(
        host_ms=host_ms,
        span_ms=(last - first) / 1e6,
        kernels=len(found),
        kernel_ms=int(work[found].sum()) / 1e6,
        busy_ms=union_ns(start[found], end[found]) / 1e6,
        idle_ms=(last - first - running) / 1e6,
        product_ms=int(work[products].sum()) / 1e6,
    )


def union_ns(starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray) -> int:
    """The total length of the union of intervals, given in any order."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    covered = np.concatenate([starts[:1], np.maximum(starts[1:], reach[:-1])])
    return int(np.maximum(reach - covered, 0).sum())
