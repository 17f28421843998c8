"""What a GPU did, and at whose request: kernels and named ranges of one recording, whichever tool has made it.

    trace = nsys.read_nsys("step.sqlite")            # or profiler.record_torch(step)
    kernel_table(trace, "forward")                   # which kernels, how often, how long
    usage(trace, "step")                             # busy and idle time
    condensed.condense(trace, "step").to_json("step.json")

Whose kernel it is: a kernel runs long after the host has launched it, so what counts is the time of the launch (the
call of the CUDA runtime or driver with the kernel's correlation id), not that of the execution. A kernel belongs to
all ranges that are open on the launching thread at that time. The backward pass launches from autograd's own thread,
while the thread that called it waits inside its `backward` range: so a kernel belongs to ranges open on other threads
of the process as well, unless its own thread has a range open that is not wholly inside of them.

Ranges nest, and are named by their paths, the names from the outermost on: `step/forward/attention softmax`. Where a
range is asked for, the end of its path does: `forward`, `forward/attention softmax`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cs336_systems.measure.trace.kernels import class_of, short_name

NEVER = -(2**63)  # the launch of an operation whose launch is not in the recording


class Kernel(NamedTuple):
    """One operation of a device: a kernel, a copy, a fill; where the source is `torch-cpu`, an operator of the CPU.

    `launched_ns` is NEVER, and `thread` -1, where the recording has no launch for it. `own_ns` is the time of an
    operator without that of the operators it calls; None for kernels, whose time is their own.
    """

    name: str
    start_ns: int
    end_ns: int
    device: int
    stream: int
    launched_ns: int
    process: int
    thread: int
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
    """

    source: str
    kernels: tuple[Kernel, ...]
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        kernels = sorted(self.kernels, key=lambda k: (k.start_ns, k.end_ns))
        object.__setattr__(self, "kernels", tuple(kernels))
        object.__setattr__(self, "ranges", tuple(sorted(self.ranges, key=lambda r: (r.start_ns, -r.end_ns))))

    # ------------------------------------------------------------------------------------------------- ranges
    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """For each range the index of the innermost one of its thread that it is in, or -1."""
        out = []
        stacks: dict[tuple[int, int], list[int]] = {}
        for i, inner in enumerate(self.ranges):
            stack = stacks.setdefault((inner.process, inner.thread), [-1])
            while stack[-1] >= 0 and self.ranges[stack[-1]].end_ns <= inner.start_ns:
                stack.pop()
            out.append(stack[-1])
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
        """The indices of the ranges whose path is `name` or ends in it, by start; ValueError if there is none."""
        found = [i for i, path in enumerate(self.paths) if f"/{path}".endswith(f"/{name}")]
        if not found:
            known = ", ".join(list(dict.fromkeys(self.paths))[:20])
            raise ValueError(f"no range {name!r}; allowed: {known or 'none was recorded'}")
        return found

    # ---------------------------------------------------------------------------------------------- ownership
    @functools.cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        kernels = ("start_ns", "end_ns", "work_ns", "device", "launched_ns", "process", "thread")
        columns = {name: np.array([getattr(k, name) for k in self.kernels], np.int64) for name in kernels}
        for name in ("start_ns", "end_ns"):
            columns[f"range_{name}"] = np.array([getattr(r, name) for r in self.ranges], np.int64)
        return columns

    @functools.cached_property
    def _by_launch(self) -> tuple[np.ndarray, np.ndarray]:
        """The kernels in the order of their launches, and the times of these."""
        launched = self._columns["launched_ns"]
        order = np.argsort(launched, kind="stable")
        return order, launched[order]

    @functools.cached_property
    def _roots(self) -> np.ndarray:
        """For each kernel the outermost range open on its own thread at its launch, or -1."""
        columns, roots = self._columns, np.full(len(self.kernels), -1)
        threads: dict[tuple[int, int], list[int]] = {}
        for i, found in enumerate(self.ranges):
            if self.parents[i] < 0:
                threads.setdefault((found.process, found.thread), []).append(i)
        for (process, thread), outermost in threads.items():
            mine = np.flatnonzero((columns["process"] == process) & (columns["thread"] == thread))
            launched = columns["launched_ns"][mine]
            place = np.searchsorted(columns["range_start_ns"][outermost], launched, side="right") - 1
            root = np.array(outermost)[place]
            roots[mine] = np.where((place >= 0) & (launched < columns["range_end_ns"][root]), root, -1)
        return roots

    def owned(self, index: int) -> np.ndarray:
        """The indices of the kernels that belong to a range, by the rule above, in the order of their starts."""
        mine, columns = self.ranges[index], self._columns
        order, times = self._by_launch
        found = order[slice(*np.searchsorted(times, [mine.start_ns, mine.end_ns]))]
        found = np.sort(found[columns["process"][found] == mine.process])
        root = self._roots[found]
        inside = columns["range_start_ns"][root] >= mine.start_ns
        inside &= columns["range_end_ns"][root] <= mine.end_ns
        return found[(columns["thread"][found] == mine.thread) | (root < 0) | inside]


# --------------------------------------------------------------------------------------------------- tables
@dataclass(frozen=True)
class KernelUse:
    """Kernels of one short name within all occurrences of a range: their class, how often, how long."""

    name: str
    kind: str
    calls: int
    total_ms: float


def kernel_table(trace: Trace, range_name: str) -> list[KernelUse]:
    """The kernels of all occurrences of a range by `kernels.short_name`, the longest total first.

    Copies and fills of the device's memory count as kernels here. Times are summed up, also where kernels overlap.
    Raises ValueError for an unknown range.
    """
    works: dict[tuple[str, str], list[int]] = {}
    for kernel in (trace.kernels[i] for i in _owned_by_all(trace, range_name)):
        key = short_name(kernel.name), class_of(kernel.name)
        works.setdefault(key, []).append(kernel.work_ns)
    table = [KernelUse(name, kind, len(ns), sum(ns) / 1e6) for (name, kind), ns in works.items()]
    return sorted(table, key=lambda use: (-use.total_ms, use.name))


@dataclass(frozen=True)
class Usage:
    """How all occurrences of a range together used the device.

    Attributes:
        host_ms: the sum of the ranges, on the host's clock.
        kernels: how many belong to them.
        kernel_ms: the sum of their times.
        busy_ms: the time in which at least one of them ran.
        idle_ms: the time in which nothing ran on their devices, of whatever range, although the kernels of an
            occurrence were due: between its first launch and the end of its last kernel. Where a range comes again
            before its kernels have run, these times overlap, and count once.
    """

    host_ms: float
    kernels: int = 0
    kernel_ms: float = 0.0
    busy_ms: float = 0.0
    idle_ms: float = 0.0


def usage(trace: Trace, range_name: str) -> Usage:
    """How the occurrences of a range, all of one process, used the device; ValueError for an unknown range."""
    columns, indices = trace._columns, trace.find(range_name)
    host_ms = sum(trace.ranges[i].end_ns - trace.ranges[i].start_ns for i in indices) / 1e6
    found = _owned_by_all(trace, range_name)
    if not len(found):
        return Usage(host_ms)
    start, end, launched = (columns[name] for name in ("start_ns", "end_ns", "launched_ns"))
    due = np.array([(launched[own].min(), end[own].max()) for i in indices if len(own := trace.owned(i))])
    there = np.isin(columns["device"], columns["device"][found])
    running = np.stack([start[there], end[there]], 1)
    return Usage(
        host_ms=host_ms,
        kernels=len(found),
        kernel_ms=int(columns["work_ns"][found].sum()) / 1e6,
        busy_ms=union_ns(start[found], end[found]) / 1e6,
        idle_ms=(union_ns(*np.concatenate([due, running]).T) - union_ns(*running.T)) / 1e6,
    )


def _owned_by_all(trace: Trace, range_name: str) -> np.ndarray:
    """The indices of the kernels that belong to any occurrence of a range, each once."""
    return np.unique(np.concatenate([trace.owned(i) for i in trace.find(range_name)]))


def union_ns(starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray) -> int:
    """The total length of the union of intervals, given in any order."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    covered = np.concatenate([starts[:1], np.maximum(starts[1:], reach[:-1])])
    return int(np.maximum(reach - covered, 0).sum())


def innermost(calls: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Of calls (start, end) that call one another, by start and the longer first, the innermost one at each time:
    (index, start, end) in the order of time."""
    out: list[tuple[int, int, int]] = []
    open_calls: list[int] = []
    now: float = 0
    for i, (start, _) in enumerate([*calls, (math.inf, math.inf)]):
        while open_calls and now < start:
            end = calls[open_calls[-1]][1]
            if min(end, start) > now:
                out.append((open_calls[-1], int(now), int(min(end, start))))
            now = max(now, min(end, start))
            if end <= now:  # rounded times may let a call end after its caller
                open_calls.pop()
        now = start
        open_calls.append(i)
    return out
