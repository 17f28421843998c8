"""Memory over time: records the history of torch's CUDA allocator.

    with recording("step.pickle") as (mark, snapshot):
        mark("model")
        ...
        mark("forward")
        ...
    timeline.timeline(snapshot()).to_json("step.json")

`replay` says what counts as active, `timeline` how allocations are categorized.

How stages are marked: `mark(name)` makes an allocation of 343 bytes that is freed at once, from a function named
`_mark_<name>`. The allocator writes all events of a device under one lock, from whichever thread they come, so the
marker lies between the events before and after it: their order, no clock, says to which stage an event belongs. (The
`time_us` of an event is a cycle counter scaled to the wall clock when the snapshot is taken: good for an axis, but no
order of neighboring events. The metadata that newer versions of torch attach are kept for each thread, and the
backward pass runs in another.) The function's name in its stack trace tells a marker, to a reader of torch's viewer
as well. Markers are left out of all sums.
"""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cs336_systems.measure.memory.replay import Mark, Snapshot, replay
from cs336_systems.store import files
from cs336_systems.store.status import Skip

MAX_ENTRIES = 1_000_000  # events that the allocator's ring buffer holds, as in the handout
MARK_BYTES = 343  # an odd number, which no tensor of numbers wider than a byte has
MARK_PREFIX = "_mark_"


@contextlib.contextmanager
def recording(path: Path | None = None) -> Iterator[tuple[Callable[[str], None], Callable[[], Snapshot]]]:
    """Records what the allocator of the current CUDA device does, and writes its snapshot to `path` at the end.

    Gives `mark(name)`, which begins a stage, and `snapshot()`, for the time after the block; the categories of
    `timeline` know the stages `model`, `forward`, `loss`, `backward` and `optimizer`. Enter the block before the model
    is built. Exceptions of the block propagate, out of memory too, after the snapshot has been taken and written; the
    recording ends in any case.

    Before it begins, a tiny matmul and its backward pass make cuBLAS allocate its workspaces, one for each of the
    two threads: they belong to no stage, and count as allocated before the recording. The peak statistics of the
    allocator are reset. The file is what `torch.cuda.memory._dump_snapshot` writes, and opens in torch's viewer.
    Raises `Skip` without a CUDA device; `snapshot()` raises ValueError where the history was longer than the
    allocator keeps.
    """
    import torch

    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    device = torch.cuda.current_device()
    _take_workspaces()
    found: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
    )
    try:
        yield lambda name: _marker(name)(), lambda: _replayed(found, device, peaks)
    finally:
        try:
            for kind in ("allocated", "requested", "reserved"):
                peaks[f"peak_{kind}_bytes"] = int(torch.cuda.memory_stats().get(f"{kind}_bytes.all.peak", 0))
            found |= torch.cuda.memory._snapshot()
            if path is not None:
                files.replace(
                    {path: pickle.dumps(found, protocol=4)}
                )  # torch's own viewer reads no later one
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def _take_workspaces() -> None:
    import torch

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()


def _marker(name: str) -> Callable[[], None]:
    """A function called `_mark_<name>` that allocates `MARK_BYTES`."""
    code = _allocate_marker.__code__.replace(co_name=MARK_PREFIX + name, co_qualname=MARK_PREFIX + name)
    return types.FunctionType(code, globals())


def _allocate_marker() -> None:
    import torch

    torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda")


def _replayed(found: dict[str, Any], device: int, peaks: dict[str, int]) -> Snapshot:
    trace = found["device_traces"][device]
    if len(trace) >= MAX_ENTRIES:
        raise ValueError(
            f"the history is cut off: the allocator has kept its last {len(trace):,} events only"
        )
    marks = [Mark(stage, i) for i, event in enumerate(trace) if (stage := _marked(event))]
    at_end = {
        block["address"]: block["requested_size"]
        for segment in found["segments"]
        for block in segment["blocks"]
        if segment["device"] == device and block["state"] != "inactive"  # some wait for a stream
    }
    return replay(trace, marks, at_end, hidden={mark.index for mark in marks}, allocator=peaks)


def _marked(event: dict[str, Any]) -> str:
    """The stage that an event marks, or an empty string."""
    if event["action"] != "alloc" or event["size"] != MARK_BYTES:
        return ""
    names = (frame["name"] for frame in event.get("frames", ()))
    return next((name.removeprefix(MARK_PREFIX) for name in names if name.startswith(MARK_PREFIX)), "")
