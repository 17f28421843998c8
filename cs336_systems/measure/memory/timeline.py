"""What the active memory consists of, over time: a replayed snapshot, categorized and condensed to a small JSON file.

Each allocation has a category, by the kind of the stage in which it was made and by whether it outlives that stage:

    stage                made there and freed there    outlives it
    model                temporaries                   weights (buffers of the model too)
    forward, loss        temporaries                   activations: saved for the backward pass, or the outputs
    backward             temporaries                   gradients
    optimizer            temporaries                   optimizer state
    any other, none yet  temporaries                   other

What was active before the recording is `before recording`. Rules:

- A stage begins at its mark and ends at the next one, so mark what follows: `with torch.no_grad()` a forward pass keeps
  its outputs at most, and a graph that is dropped before the next mark counts as temporaries.
- What is active at the end of the recording outlives the last stage. If memory ran out in the backward pass, the
  temporaries of that moment therefore count as gradients.
- Weights that autocast has cast for the forward pass are activations: they live until the graph releases them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from cs336_systems.measure.memory.replay import Frames, Snapshot
from cs336_systems.store import files

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
MAX_POINTS = 400
LARGEST = 10  # groups of allocations that are listed for each stage
PACKAGE = "cs336_systems/"


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
        bytes: category → active bytes at each point.
        stages: in order; a name that comes again is numbered.
        largest: the largest allocations of each stage, by the size of one.
        out_of_memory: (event, requested bytes, bytes left on the device) of requests that failed.
        allocator: `peak_allocated_bytes` and the like, as the allocator itself counted.
    """

    num_events: int
    events: tuple[int, ...]
    bytes: dict[str, tuple[int, ...]]
    stages: tuple[Stage, ...]
    largest: tuple[Group, ...] = ()
    out_of_memory: tuple[tuple[int, int, int], ...] = ()
    allocator: dict[str, int] = field(default_factory=dict)

    def to_json(self, path: Path) -> None:
        """Writes the timeline, under 60 KB, with one line for each of its parts."""
        files.replace({path: files.json_text(asdict(self))})

    @classmethod
    def from_json(cls, path: Path) -> Timeline:
        """Reads what `to_json` has written."""
        parts = files.read_json(path)
        return cls(
            num_events=parts["num_events"],
            events=tuple(parts["events"]),
            bytes={name: tuple(values) for name, values in parts["bytes"].items()},
            stages=tuple(Stage(**stage | {"peak": State(**stage["peak"])}) for stage in parts["stages"]),
            largest=tuple(Group(**group) for group in parts["largest"]),
            out_of_memory=tuple(map(tuple, parts["out_of_memory"])),
            allocator=parts["allocator"],
        )


# ----------------------------------------------------------------------------------------------- categories
def stages_of(snapshot: Snapshot) -> list[str]:
    """The names of the stages; those that come again are numbered."""
    seen: Counter[str] = Counter()
    out = []
    for mark in snapshot.marks:
        seen[mark.name] += 1
        out.append(mark.name if seen[mark.name] == 1 else f"{mark.name} {seen[mark.name]}")
    return out


def categories(snapshot: Snapshot, places: np.ndarray) -> list[str]:
    """The category of each allocation of a snapshot, by the rules above; `places` are those of their stages."""
    # the last of each is of place -1, before the first stage
    ends = [*(mark.index for mark in snapshot.marks[1:]), snapshot.num_events]
    ends.append(snapshot.marks[0].index if snapshot.marks else snapshot.num_events)
    survivors = [*(STAGE_KINDS.get(mark.name, "other") for mark in snapshot.marks), "other"]
    return [
        "before recording" if allocation.begin < 0
        else "temporaries" if allocation.end < ends[place]
        else survivors[place]
        for allocation, place in zip(snapshot.allocations, places, strict=True)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ condensing
def timeline(snapshot: Snapshot) -> Timeline:
    """Categorizes the allocations of a snapshot whose stages are marked, and condenses it."""
    allocations, names = snapshot.allocations, stages_of(snapshot)
    bounds = [*(mark.index for mark in snapshot.marks), snapshot.num_events]
    begin = np.array([a.begin + 1 for a in allocations], np.int64)
    end = np.array([a.end + 1 for a in allocations], np.int64)
    size = np.array([a.size for a in allocations], np.int64)
    places = np.searchsorted(bounds[:-1], begin - 1, side="right") - 1
    kinds = categories(snapshot, places)
    rows = np.array([CATEGORIES.index(name) for name in kinds], np.int64)
    change = np.zeros((len(CATEGORIES), snapshot.num_events + 2), np.int64)
    np.add.at(change, (rows, begin), size)
    np.subtract.at(change, (rows, end), size)
    active = np.cumsum(change, axis=1)[:, :-1]  # (categories, num_events + 1)
    total = active.sum(axis=0)

    def state(event: int) -> State:
        there = {name: int(n) for name, n in zip(CATEGORIES, active[:, event], strict=True) if n}
        return State(int(event), int(total[event]), there)

    stages = tuple(
        Stage(name, first, state(first + int(np.argmax(total[first : last + 1]))))
        for name, (first, last) in zip(names, itertools.pairwise(bounds), strict=True)
    )
    must = {
        *bounds,
        *(s.peak.event for s in stages),
        *map(int, np.argmax(active, axis=1)),
        int(np.argmax(total)),
    }
    points = _points(total, must | {event for event, *_ in snapshot.out_of_memory})
    code_of = _CodeOf()
    groups = Counter(
        (int(place), allocation.size, kind, *code_of(allocation.frames))
        for allocation, place, kind in zip(allocations, places, kinds, strict=True)
        if allocation.begin >= 0
    )
    largest = []
    for place, name in enumerate(names):
        mine = [Group(name, size, n, *rest) for (p, size, *rest), n in groups.items() if p == place]
        largest += sorted(mine, key=lambda group: (-group.bytes, -group.count))[:LARGEST]
    return Timeline(
        num_events=snapshot.num_events,
        events=tuple(points),
        bytes={n: tuple(map(int, v[points])) for n, v in zip(CATEGORIES, active, strict=True) if v.any()},
        stages=stages,
        largest=tuple(largest),
        out_of_memory=snapshot.out_of_memory,
        allocator=snapshot.allocator,
    )


def _points(total: np.ndarray, must: set[int]) -> list[int]:
    """The events to keep: all, or `must` and the highest and lowest of equal stretches."""
    if len(total) <= MAX_POINTS:
        return list(range(len(total)))
    must = must | {0, len(total) - 1}
    edges = np.linspace(0, len(total), 1 + max(1, (MAX_POINTS - len(must)) // 2)).astype(int)
    for first, last in itertools.pairwise(edges):
        must |= {int(first + f(total[first:last])) for f in (np.argmax, np.argmin)}
    return sorted(must)


class _CodeOf:
    """The code that a stack trace comes from: (line of this package, function of torch)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}  # of stack traces, which allocations share

    def __call__(self, frames: Frames) -> tuple[str, str]:
        if id(frames) not in self._known:
            self._known[id(frames)] = self._find(frames)
        return self._known[id(frames)]

    def _find(self, frames: Frames) -> tuple[str, str]:
        """The innermost line of the package, or else the innermost outside of torch."""
        paths = [frame["filename"].replace("\\", "/") for frame in frames]
        own = [i for i, path in enumerate(paths) if PACKAGE in path]
        own = own or [i for i, path in enumerate(paths) if "/torch/" not in path]
        function = ""
        for i, path in enumerate(paths[: own[0] if own else None]):
            if "/torch/" in path:
                module = path.rsplit("/torch/", 1)[1].removesuffix(".py").removesuffix("/__init__")
                function = f"{module.replace('/', '.')}.{frames[i]['name']}"
                break
        if not own:
            return "", function
        frame, path = frames[own[0]], paths[own[0]]
        shown = path[path.rfind(PACKAGE) :] if PACKAGE in path else path.rsplit("/", 1)[-1]
        return f"{shown}:{frame['line']} {frame['name']}", function
