"""The trace of torch's CUDA allocator, replayed: which bytes were active when, and where stages begin.

What counts as active: an allocation is active from its `alloc` to its `free_completed`. `free_requested` is the moment
at which the last tensor releases it; the memory can be used again once every stream that used it has caught up
(`Tensor.record_stream`), which `free_completed` tells, most often in the next event. Sizes are those that were asked
for, so that the sum is what torch calls `requested_bytes`. `torch.cuda.memory_allocated` counts the blocks handed out
instead, up to 511 bytes per allocation more (up to 1 MiB for large ones), and ends at `free_requested`.

Memory that was active before the recording is a base under everything: blocks that are there at the end and that no
event allocated, and blocks that are freed and that no event allocated. With a cut-off history, what the lost events
allocated is counted there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MARK_BYTES = 343  # an odd number, which no tensor of numbers wider than a byte has
MARK_PREFIX = "_mark_"
MARK_FILE = "memory.py"  # the module whose functions make markers

Frames = Sequence[dict[str, Any]]  # the innermost first; each with filename, line, name


@dataclass(frozen=True)
class Mark:
    """The beginning of a stage: at a place in the trace (`index`), or at a time in µs since 1970 (`time_us`)."""

    name: str
    index: int | None = None
    time_us: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """`size` bytes, active from event `begin` (-1: since before the recording) up to event `end` (the number of events:
    still active when the snapshot was taken)."""

    size: int
    begin: int
    end: int
    frames: Frames = ()


@dataclass(frozen=True)
class OutOfMemory:
    """A request of `requested_bytes` that failed at event `index`, with `device_free_bytes` left on the device."""

    index: int
    requested_bytes: int
    device_free_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """The replayed history of one device.

    Attributes:
        allocations: all that were active at some time, markers left out.
        num_events: the length of the trace; events are counted from 0.
        times_us: (num_events,), or None where the trace has no times.
        marks: the stages in order, each with its index.
        marked_by: how the marks were found: `frames`, `size`, `given`, or empty without marks.
        out_of_memory: requests that failed.
        cut_off: whether the ring buffer was full: then earlier events are lost, what they allocated counts as active
            since before the recording if it is seen again, and peaks before the first event are unknown.
        peak_reserved_bytes: the most that the allocator held of the device, used or not.
        allocator: the allocator's own peaks, as `recording` has kept them; empty for other files.
        notes: what the reader had to assume.
    """

    allocations: list[Allocation]
    num_events: int
    times_us: np.ndarray | None
    marks: tuple[Mark, ...] = ()
    marked_by: str = ""
    out_of_memory: tuple[OutOfMemory, ...] = ()
    cut_off: bool = False
    peak_reserved_bytes: int = 0
    allocator: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def active(self) -> np.ndarray:
        """Active bytes before the first event and after each: (num_events + 1,) of int64."""
        change = np.zeros(self.num_events + 2, np.int64)
        for allocation in self.allocations:
            change[allocation.begin + 1] += allocation.size
            change[allocation.end + 1] -= allocation.size
        return np.cumsum(change[:-1])


def replay(
    trace: list[dict[str, Any]],
    segments: list[dict[str, Any]],
    *,
    max_entries: int,
    marks: Sequence[Mark] | None = None,
    names: Sequence[str] = (),
    allocator: dict[str, int] | None = None,
) -> Snapshot:
    """Replays the events of one device.

    segments:     those of the device at the end, with their blocks.
    max_entries:  the size of the ring buffer: a trace of that length is cut off.
    marks:        stages, instead of the trace's own markers.
    names:        the names of the trace's markers in order, needed where events have no stack traces.

    Raises KeyError or TypeError for events and segments that are not as torch writes them, ValueError for marks that
    have no place in the trace.
    """
    if not all(_is_size(event.get("size", 0)) for event in trace):
        raise TypeError("an event has a size that is no number of bytes")
    found, markers, marked_by = _find_marks(trace, marks, names)
    allocations, notes = _allocations(trace, _active_blocks(segments), markers)
    cut_off = len(trace) >= max_entries
    if cut_off:
        notes.insert(0, f"the history is cut off: only the last {len(trace):,} events were kept")
    failed = [(i, event) for i, event in enumerate(trace) if event["action"] == "oom"]
    return Snapshot(
        allocations=allocations,
        num_events=len(trace),
        times_us=_times(trace),
        marks=found,
        marked_by=marked_by,
        out_of_memory=tuple(OutOfMemory(i, e["size"], e.get("device_free", 0)) for i, e in failed),
        cut_off=cut_off,
        peak_reserved_bytes=_peak_reserved(trace, segments),
        allocator=dict(allocator or {}),
        notes=tuple(notes),
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**50


def _times(trace: list[dict[str, Any]]) -> np.ndarray | None:
    """The events' times in µs, never running backward; None if one has none."""
    if not all("time_us" in event for event in trace):
        return None
    return np.maximum.accumulate(np.array([event["time_us"] for event in trace], np.int64))


def _peak_reserved(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> int:
    """The most bytes in segments, counted back from those that are there at the end."""
    sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    now = peak = sum(segment["total_size"] for segment in segments)
    for event in reversed(trace):
        now -= sign.get(event["action"], 0) * event.get("size", 0)
        peak = max(peak, now)
    return peak


def _active_blocks(segments: list[dict[str, Any]]) -> dict[int, tuple[int, Frames]]:
    """Address → size and frames of the blocks that are active at the end, those that wait for a stream included."""
    active = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                size, frames = block.get("requested_size", block["size"]), block.get("frames", ())
                if not _is_size(size):
                    raise TypeError("a block has a size that is no number of bytes")
                _marked(frames)  # for its checks
                active[address] = (size, frames)
            address += block["size"]
    return active


def _find_marks(
    trace: list[dict[str, Any]], given: Sequence[Mark] | None, kept: Sequence[str]
) -> tuple[tuple[Mark, ...], set[int], str]:
    """The stages with their indices, the events that are markers, and how they were found."""
    names: dict[int, str] = {}  # of stack traces, which events share
    by_frames, by_size = [], []
    for i, event in enumerate(trace):
        if event["action"] != "alloc":
            continue
        frames = event.get("frames", ())
        if id(frames) not in names:
            names[id(frames)] = _marked(frames)
        if names[id(frames)]:
            by_frames.append(Mark(names[id(frames)], i))
        if event["size"] == MARK_BYTES:
            by_size.append(i)
    markers = {mark.index for mark in by_frames}
    if given is not None:
        return _placed(trace, given), markers, "given" if given else ""
    if by_frames:
        return tuple(by_frames), markers, "frames"
    if kept and len(kept) == len(by_size):
        return tuple(map(Mark, kept, by_size)), set(by_size), "size"
    return (), set(), ""


def _marked(frames: Frames) -> str:
    """The stage that a stack trace marks, or an empty string; KeyError or TypeError for other than frames."""
    for frame in frames:
        name, file, _ = frame["name"], frame["filename"], frame["line"]
        if not isinstance(name, str) or not isinstance(file, str):
            raise TypeError("a frame has a name that is no text")
        if name.startswith(MARK_PREFIX) and Path(file).name == MARK_FILE:
            return name.removeprefix(MARK_PREFIX)
    return ""


def _placed(trace: list[dict[str, Any]], marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Marks in the order of the trace, times turned into indices."""
    times = _times(trace)
    out = []
    for mark in marks:
        index = mark.index
        if index is None:
            if mark.time_us is None or times is None:
                raise ValueError(f"mark {mark.name!r} needs an index, or a time and a trace with times")
            index = int(np.searchsorted(times, mark.time_us))
        if not 0 <= index <= len(trace):
            raise ValueError(f"mark {mark.name!r} is at event {index}; the trace has {len(trace)}")
        out.append(Mark(mark.name, index, mark.time_us))
    return tuple(sorted(out, key=lambda mark: mark.index))


def _allocations(
    trace: list[dict[str, Any]], at_end: dict[int, tuple[int, Frames]], markers: set[int]
) -> tuple[list[Allocation], list[str]]:
    """All allocations of a trace, and what had to be assumed; `at_end` holds the blocks active at the end.

    Where the trace does not say that a free was completed, the blocks at the end decide, or the address's next use.
    """
    done: list[Allocation] = []
    live: dict[int, tuple[int, int, Frames]] = {}  # address → size, begin, frames
    asked: dict[int, int] = {}  # address → event of free_requested
    hidden: set[int] = set()  # addresses of markers
    lost = 0

    def close(address: int, end: int) -> None:
        size, begin, frames = live.pop(address)
        asked.pop(address, None)
        if address in hidden:
            hidden.remove(address)
        else:
            done.append(Allocation(size, begin, end, frames))

    for i, event in enumerate(trace):
        action = event["action"]
        if action == "alloc":
            address = event["addr"]
            if address in live:
                lost += address not in asked
                close(address, asked.get(address, i))
            live[address] = (event["size"], i, event.get("frames", ()))
            if i in markers:
                hidden.add(address)
        elif action in ("free_requested", "free_completed"):
            address = event["addr"]
            if address not in live:
                live[address] = (event["size"], -1, ())
            if action == "free_requested":
                asked[address] = i
            else:
                close(address, i)
    vanished = 0
    for address in list(live):
        if address in at_end:
            close(address, len(trace))
            del at_end[address]
        elif address in asked:
            close(address, asked[address])
        else:
            vanished += 1
            close(address, len(trace))
    done += [Allocation(size, -1, len(trace), frames) for size, frames in at_end.values()]
    notes = []
    if lost:
        notes.append(
            f"{lost} allocations end where their address is used again: their frees are not in the trace"
        )
    if vanished:
        notes.append(f"{vanished} allocations are active by the trace, but not among the blocks at the end")
    done.sort(key=lambda a: (a.begin, a.end))
    return done, notes
