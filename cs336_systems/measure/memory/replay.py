"""The trace of torch's CUDA allocator, replayed: which bytes were active when, and where stages begin.

What counts as active: an allocation is active from its `alloc` to its `free_completed`. `free_requested` is the moment
at which the last tensor releases it; the memory can be used again once every stream that used it has caught up
(`Tensor.record_stream`), which `free_completed` tells, most often in the next event. Sizes are those that were asked
for, so that the sum is what torch calls `requested_bytes`. `torch.cuda.memory_allocated` counts the blocks handed out
instead, up to 511 bytes per allocation more (up to 1 MiB for large ones), and ends at `free_requested`.

Memory that was active before the recording is a base under everything: blocks that are there at the end and that no
event allocated, and blocks that are freed and that no event allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Frames = Sequence[dict[str, Any]]  # the innermost first; each with filename, line, name


@dataclass(frozen=True)
class Mark:
    """The beginning of a stage at a place in the trace."""

    name: str
    index: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """`size` bytes, active from event `begin` (-1: since before the recording) up to event `end` (the number of events:
    still active when the snapshot was taken)."""

    size: int
    begin: int
    end: int
    frames: Frames = ()


@dataclass(frozen=True)
class Snapshot:
    """The replayed history of one device.

    Attributes:
        allocations: all that were active at some time, markers left out, by their begin.
        num_events: the length of the trace; events are counted from 0.
        marks: the stages in order.
        out_of_memory: (event, requested bytes, bytes left on the device) of requests that failed.
        allocator: the allocator's own peaks; empty where there is none.
    """

    allocations: list[Allocation]
    num_events: int
    marks: tuple[Mark, ...]
    out_of_memory: tuple[tuple[int, int, int], ...] = ()
    allocator: dict[str, int] = field(default_factory=dict)

    def active(self) -> np.ndarray:
        """Active bytes before the first event and after each: (num_events + 1,) of int64."""
        change = np.zeros(self.num_events + 2, np.int64)
        for allocation in self.allocations:
            change[allocation.begin + 1] += allocation.size
            change[allocation.end + 1] -= allocation.size
        return np.cumsum(change[:-1])


def replay(
    trace: Sequence[dict[str, Any]], marks: Sequence[Mark], at_end: Mapping[int, int] | None = None, *,
    hidden: Collection[int] = (), allocator: Mapping[str, int] | None = None,
) -> Snapshot:  # fmt: skip
    """Replays the events of one device.

    at_end:  address → bytes of what is active at the end.
    hidden:  the events that allocate nothing but a marker.
    """
    done: list[Allocation] = []
    live: dict[int, tuple[int, int, Frames]] = {}  # address → size, begin, frames
    for i, event in enumerate(trace):
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], i, event.get("frames", ())
        elif event["action"] == "free_completed":
            size, begin, frames = live.pop(event["addr"], (event["size"], -1, ()))
            if begin not in hidden:
                done.append(Allocation(size, begin, i, frames))
    before = {address: (size, -1, ()) for address, size in (at_end or {}).items()}
    done += [Allocation(size, begin, len(trace), frames) for size, begin, frames in (before | live).values()]
    return Snapshot(
        allocations=sorted(done, key=lambda a: (a.begin, a.end)),
        num_events=len(trace),
        marks=tuple(marks),
        out_of_memory=tuple(
            (i, event["size"], event["device_free"])
            for i, event in enumerate(trace)
            if event["action"] == "oom"
        ),
        allocator=dict(allocator or {}),
    )
