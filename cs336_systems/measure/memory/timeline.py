"""What the active memory consists of, over time: a replayed snapshot, categorized and condensed to a small JSON file.

Each allocation has a category, by the kind of the stage in which it was made and by whether it outlives that stage:

    stage                made there and freed there    outlives it
    model                temporaries                   weights (buffers of the model too)
    forward, loss        temporaries                   activations: saved for the backward pass, or the outputs
    backward             temporaries                   gradients
    optimizer            temporaries                   optimizer state
    any other            temporaries                   other

What was active before the recording is `before recording`. Without any marks everything else is `other`. Rules:

- A stage begins at its mark and ends at the next one, so mark what follows: `with torch.no_grad()` a forward pass keeps
  its outputs at most, and a graph that is dropped before the next mark counts as temporaries.
- What is active at the end of the recording outlives the last stage. If memory ran out in the backward pass, the
  temporaries of that moment therefore count as gradients.
- Weights that autocast has cast for the forward pass are activations: they live until the graph releases them.
- Workspaces of libraries belong to `other`, where the stack traces have C++ frames that say so.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.measure.memory.replay import Allocation, Frames, Snapshot
from cs336_systems.store.files import content

FORMAT, VERSION = "cs336_systems memory timeline", 1
CATEGORIES = (
    "before recording", "weights", "optimizer state", "gradients", "activations", "temporaries", "other",
)  # fmt: skip
STAGE_KINDS = {
    "model": "weights",
    "forward": "activations",
    "loss": "activations",
    "backward": "gradients",
    "optimizer": "optimizer state",
}
UNMARKED = "start"  # the stage before the first mark
MAX_POINTS = 400


@dataclass(frozen=True)
class State:
    """The active bytes after `event` events, in total and by category (those that are not 0)."""

    event: int
    bytes: int
    by_category: dict[str, int]


@dataclass(frozen=True)
class Stage:
    """A stage from event `begin` on, and the state in which the most memory was active during it."""

    name: str
    begin: int
    peak: State


@dataclass(frozen=True)
class Group:
    """`count` allocations of `bytes` each, alike in stage, category, and the code they come from.

    `code` is the innermost line of the user's code, such as `cs336_systems/model.py:81 forward`; `function` is what
    that line called in torch. Either may be empty: the threads of the backward pass have no Python frames.
    """

    stage: str
    bytes: int
    count: int
    category: str
    code: str
    function: str


@dataclass(frozen=True)
class Timeline:
    """The active memory of one recording.

    Attributes:
        num_events: how many events the recording has; `events` count from 0 (before the first) to this number.
        events: the points that were kept, at most about 400: first, last, all peaks, all beginnings of stages, and the
            highest and the lowest of each stretch between. A state lasts until the next event.
        time_ms: the host's time at each point, from the first event on; empty where the trace has no times.
        bytes: category → active bytes at each point.
        stages: in order; a name that comes again is numbered.
        peak: the state in which the most memory was active.
        at_peak: what was active then, the largest sums first.
        largest: the largest allocations of each stage, by the size of one.
        out_of_memory: (event, requested bytes, bytes left on the device) of requests that failed.
        cut_off: whether early events are missing.
        peak_reserved_bytes: the most that the allocator held of the device.
        allocator: `peak_allocated_bytes` and the like, as the allocator itself counted.
        notes: what had to be assumed.
    """

    num_events: int
    events: tuple[int, ...]
    time_ms: tuple[float, ...]
    bytes: dict[str, tuple[int, ...]]
    stages: tuple[Stage, ...]
    peak: State
    at_peak: tuple[Group, ...] = ()
    largest: tuple[Group, ...] = ()
    out_of_memory: tuple[tuple[int, int, int], ...] = ()
    cut_off: bool = False
    peak_reserved_bytes: int = 0
    allocator: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit together."""
        if unknown := set(self.bytes) - set(CATEGORIES):
            raise ValueError(f"unknown categories {', '.join(sorted(unknown))}")
        lengths = {len(values) for values in self.bytes.values()} | {len(self.events)}
        if self.time_ms:
            lengths.add(len(self.time_ms))
        if len(lengths) != 1 or not self.events:
            raise ValueError(f"the points have different numbers of values: {sorted(lengths)}")
        if list(self.events) != sorted(set(self.events)) or not 0 <= self.events[0] <= self.events[-1]:
            raise ValueError("the points are not in the order of events")
        if self.events[-1] != self.num_events or min(map(min, self.bytes.values()), default=0) < 0:
            raise ValueError("the points do not reach the last event, or have fewer than 0 bytes")
        if not self.stages or not all(0 <= stage.begin <= self.num_events for stage in self.stages):
            raise ValueError("there are no stages, or one begins outside of the recording")
        if any(
            type(g.bytes * g.count) is not int or g.category not in CATEGORIES
            for g in self.at_peak + self.largest
        ):
            raise ValueError("a group of allocations has no size or no known category")
        total = self.total()
        at_peak = dict(zip(self.events, total, strict=True)).get(self.peak.event)
        if not at_peak == total.max() == self.peak.bytes == sum(self.peak.by_category.values()):
            raise ValueError(f"the peak of {self.peak.bytes} bytes is not the highest point")

    def total(self) -> np.ndarray:
        """Active bytes at each point."""
        return np.sum([np.zeros(len(self.events), np.int64), *map(np.array, self.bytes.values())], axis=0)

    def to_json(self, path: str | Path) -> None:
        """Writes the timeline, under 60 KB, with one line for each of its parts."""
        parts = {"format": FORMAT, "version": VERSION} | asdict(self)
        lines = [f"{json.dumps(name)}: {_compact(value)}" for name, value in parts.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Timeline:
        """Reads what `to_json` has written; ValueError, which says why, for anything else."""
        try:
            parts = json.loads(content(Path(path)))
        except ValueError as error:  # of decoding, too
            raise ValueError(f"{path} is no JSON file: {error}") from error
        if not isinstance(parts, dict) or parts.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no memory timeline")
        if (version := parts.pop("version", None)) != VERSION:
            raise ValueError(f"{path} has version {version}; this code reads {VERSION}")
        try:
            return cls(
                **parts
                | {
                    "events": _integers(parts["events"]),
                    "time_ms": tuple(map(float, parts["time_ms"])),
                    "bytes": {name: _integers(values) for name, values in parts["bytes"].items()},
                    "stages": tuple(Stage(**s | {"peak": State(**s["peak"])}) for s in parts["stages"]),
                    "peak": State(**parts["peak"]),
                    "at_peak": tuple(Group(**group) for group in parts["at_peak"]),
                    "largest": tuple(Group(**group) for group in parts["largest"]),
                    "out_of_memory": tuple(map(_integers, parts["out_of_memory"])),
                    "notes": tuple(parts["notes"]),
                }
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is no valid memory timeline: {what}") from error


def _compact(value: Any) -> str:
    """JSON in one line, or in one line an entry where the entries are lists or objects."""
    if isinstance(value, dict) and any(isinstance(v, list | tuple) for v in value.values()):
        return "{\n " + ",\n ".join(f"{json.dumps(k)}: {_compact(v)}" for k, v in value.items()) + "\n}"
    if isinstance(value, list | tuple) and any(isinstance(v, dict) for v in value):
        return "[\n " + ",\n ".join(map(_compact, value)) + "\n]"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError(f"{str(values)[:60]} is no list of integers")
    return tuple(values)


# ----------------------------------------------------------------------------------------------- categories
def stages_of(snapshot: Snapshot) -> list[tuple[str, int]]:
    """The stages with the event at which each begins: those marked, and one before the first if it allocates."""
    marks = [(mark.name, mark.index) for mark in snapshot.marks]
    if not marks or any(0 <= a.begin < marks[0][1] for a in snapshot.allocations):
        marks.insert(0, (UNMARKED, 0))
    seen: Counter[str] = Counter()
    out = []
    for name, index in marks:
        seen[name] += 1
        out.append((name if seen[name] == 1 else f"{name} {seen[name]}", index))
    return out


def categories(snapshot: Snapshot, kinds: Mapping[str, str] = STAGE_KINDS) -> list[str]:
    """The category of each allocation of a snapshot, by the rules above.

    kinds:  name of a stage → category of what outlives it; the name as it was marked, or its first word.
    """
    if unknown := set(kinds.values()) - set(CATEGORIES):
        raise ValueError(f"unknown categories {', '.join(sorted(unknown))}; allowed: {', '.join(CATEGORIES)}")
    stages = stages_of(snapshot)
    begins = [begin for _, begin in stages]
    ends = [*begins[1:], snapshot.num_events]
    names = [name for name, _ in stages]
    survivors = [kinds.get(name, kinds.get(re.split("[ _-]", name)[0], "other")) for name in names]
    places = np.searchsorted(begins, [max(0, a.begin) for a in snapshot.allocations], side="right") - 1
    out = []
    for allocation, place in zip(snapshot.allocations, places, strict=True):
        if allocation.begin < 0:
            out.append("before recording")
        elif not snapshot.marks or any("Workspace" in frame["name"] for frame in allocation.frames):
            out.append("other")
        else:
            out.append("temporaries" if allocation.end < ends[place] else survivors[place])
    return out


# ------------------------------------------------------------------------------------------------ condensing
def timeline(
    snapshot: Snapshot,
    *,
    kinds: Mapping[str, str] = STAGE_KINDS,
    code: Sequence[str] = ("cs336_systems/",),
    max_points: int = MAX_POINTS,
    top: int = 10,
) -> Timeline:
    """Categorizes the allocations of a snapshot, and condenses it.

    kinds:       as for `categories`.
    code:        what a path of the user's code contains; the innermost such frame is named, or else the innermost
                 Python frame outside of torch.
    max_points:  how many points are kept, besides peaks and beginnings of stages, which always are.
    top:         how many groups of allocations are listed at the peak and for each stage.

    Raises ValueError for `max_points` below 2.
    """
    if max_points < 2:
        raise ValueError(f"max_points={max_points}; it must be at least 2")
    allocations, kind = snapshot.allocations, categories(snapshot, kinds)
    rows = np.array([CATEGORIES.index(name) for name in kind], np.int64)
    begin = np.array([a.begin + 1 for a in allocations], np.int64)
    end = np.array([a.end + 1 for a in allocations], np.int64)
    size = np.array([a.size for a in allocations], np.int64)
    change = np.zeros((len(CATEGORIES), snapshot.num_events + 2), np.int64)
    np.add.at(change, (rows, begin), size)
    np.subtract.at(change, (rows, end), size)
    active = np.cumsum(change, axis=1)[:, :-1]  # (categories, num_events + 1)
    total = active.sum(axis=0)

    def state(event: int) -> State:
        there = {name: int(n) for name, n in zip(CATEGORIES, active[:, event], strict=True) if n}
        return State(int(event), int(total[event]), there)

    marked = stages_of(snapshot)
    bounds = [*(index for _, index in marked), snapshot.num_events]
    stages = tuple(
        Stage(name, first, state(first + int(np.argmax(total[first : last + 1]))))
        for (name, first), last in zip(marked, bounds[1:], strict=True)
    )
    peak = state(int(np.argmax(total)))
    must = {*bounds, peak.event, *(s.peak.event for s in stages), *map(int, np.argmax(active, axis=1))}
    must |= {failed.index for failed in snapshot.out_of_memory}
    points = _points(total, must, max_points)
    times: tuple[float, ...] = ()
    if snapshot.times_us is not None:
        since = (snapshot.times_us - snapshot.times_us[0]) / 1e3
        times = tuple(round(float(since[max(0, point - 1)]), 3) for point in points)
    place = np.searchsorted(bounds[:-1], np.maximum(begin - 1, 0), side="right") - 1
    names = ["" if a.begin < 0 else marked[p][0] for a, p in zip(allocations, place, strict=True)]
    origin = _Origins(code)

    def groups(chosen: np.ndarray) -> list[Group]:
        found = Counter((names[i], allocations[i].size, kind[i], *origin(allocations[i])) for i in chosen)
        return [Group(s, size, count, *rest) for (s, size, *rest), count in found.items()]

    there = groups(np.flatnonzero((begin <= peak.event) & (peak.event < end)))
    largest: list[Group] = []
    for p in range(len(stages)):
        mine = groups(np.flatnonzero((place == p) & (begin > 0)))
        largest += sorted(mine, key=lambda g: (-g.bytes, -g.count))[:top]
    return Timeline(
        num_events=snapshot.num_events,
        events=tuple(points),
        time_ms=times,
        bytes={n: tuple(map(int, v[points])) for n, v in zip(CATEGORIES, active, strict=True) if v.any()},
        stages=stages,
        peak=peak,
        at_peak=tuple(sorted(there, key=lambda g: (-g.bytes * g.count, -g.bytes))[:top]),
        largest=tuple(largest),
        out_of_memory=tuple(
            (o.index, o.requested_bytes, o.device_free_bytes) for o in snapshot.out_of_memory
        ),
        cut_off=snapshot.cut_off,
        peak_reserved_bytes=snapshot.peak_reserved_bytes,
        allocator=dict(snapshot.allocator),
        notes=snapshot.notes,
    )


def _points(total: np.ndarray, must: set[int], max_points: int) -> list[int]:
    """The events to keep: all, or `must` and the highest and lowest of equal stretches."""
    if len(total) <= max_points:
        return list(range(len(total)))
    must = must | {0, len(total) - 1}
    edges = np.linspace(0, len(total), 1 + max(1, (max_points - len(must)) // 2)).astype(int)
    for first, last in itertools.pairwise(edges):
        must |= {int(first + f(total[first:last])) for f in (np.argmax, np.argmin)}
    return sorted(must)


class _Origins:
    """The code that allocations come from: (line of the user's code, function of torch)."""

    def __init__(self, code: Sequence[str]) -> None:
        self.code = tuple(code)
        self._known: dict[int, tuple[str, str]] = {}  # of stack traces, which allocations share

    def __call__(self, allocation: Allocation) -> tuple[str, str]:
        key = id(allocation.frames)
        if key not in self._known:
            self._known[key] = self._find(allocation.frames)
        return self._known[key]

    def _find(self, frames: Frames) -> tuple[str, str]:
        paths = [frame["filename"].replace("\\", "/") for frame in frames]
        python = [i for i, path in enumerate(paths) if path.endswith(".py") or path.startswith("<")]
        outside = [i for i in python if "/torch/" not in paths[i]]
        own = [i for i in python if any(part in paths[i] for part in self.code)] or outside
        function = _torch_function(frames, paths, [i for i in python if not own or i < own[0]])
        if not own:
            return "", function
        frame, path = frames[own[0]], paths[own[0]]
        starts = [path.rfind(part) for part in self.code if part in path]
        shown = path[min(starts) :] if starts else path.rsplit("/", 1)[-1]
        return f"{shown}:{frame['line']} {frame['name']}", function


def _torch_function(frames: Frames, paths: list[str], python: list[int]) -> str:
    """The innermost function of torch among these Python frames, else what C++ frames tell, else nothing."""
    for i in python:
        if "/torch/" in paths[i]:
            module = paths[i].rsplit("/torch/", 1)[1].removesuffix(".py").removesuffix("/__init__")
            return f"{module.replace('/', '.')}.{frames[i]['name']}"
    for pattern in (r"(\w+Backward\d+)::apply", r"\bat::_ops::(\w+)::"):
        found = [m[1] for frame in frames if (m := re.search(pattern, frame["name"]))]
        if found:
            return found[-1]  # the outermost: every operation ends in the one that makes an empty tensor
    return ""
