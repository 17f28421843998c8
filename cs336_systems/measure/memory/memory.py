"""Memory over time: records the history of torch's CUDA allocator, and reads such a snapshot back without torch.

    with recording("step.pickle") as mark:
        mark("model")
        ...
        mark("forward")
        ...
    snapshot = read_snapshot("step.pickle")
    timeline.timeline(snapshot).to_json("step.json")

`replay` says what counts as active, `timeline` how allocations are categorized.

How stages are marked: `mark(name)` makes an allocation of 343 bytes that is freed at once, from a function named
`_mark_<name>`. The allocator writes all events of a device under one lock, from whichever thread they come, so the
marker lies between the events before and after it: their order, no clock, says to which stage an event belongs. (The
`time_us` of an event is a cycle counter scaled to the wall clock when the snapshot is taken: good for an axis, but no
order of neighboring events. The metadata that newer versions of torch attach are kept for each thread, and the
backward pass runs in another.) The reader knows a marker by the function's name in its stack trace, or, where a file
has no stack traces, by its size. Markers are left out of all sums.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.measure.memory.replay import MARK_BYTES, MARK_PREFIX, Mark, Snapshot, replay
from cs336_systems.store.files import opened
from cs336_systems.store.status import Skip

MAX_ENTRIES = 1_000_000  # events that the allocator's ring buffer holds, as in the handout
EXTRA = "cs336_systems"  # the key under which `recording` adds its own facts to a snapshot


# -------------------------------------------------------------------------------------------------- recording
@contextlib.contextmanager
def recording(
    path: str | Path, *, max_entries: int = MAX_ENTRIES, stacks: str = "python"
) -> Iterator[Callable[[str], None]]:
    """Records what the allocator of the current CUDA device does, and writes the snapshot to `path` at the end.

    Gives `mark(name)`, which begins a stage; the categories of `timeline` know `model`, `forward`, `loss`,
    `backward` and `optimizer`. Enter the block before the model is built. Exceptions of the block propagate, out of
    memory too, after the snapshot has been written; the recording ends in any case.

    stacks:  `"python"`, or `"all"`: with C++ frames, which name the node of the backward pass that allocates, and whose
             symbols may take minutes to look up.

    Before it begins, a tiny matmul and its backward pass make cuBLAS allocate its workspaces, one for each of the
    two threads: they belong to no stage, and count as allocated before the recording. The peak statistics of the
    allocator are reset. The file is what `torch.cuda.memory._dump_snapshot` writes, with one more key, and opens in
    torch's viewer. Raises `Skip` without a CUDA device.
    """
    import torch

    if stacks not in ("python", "all"):
        raise ValueError(f"unknown stacks {stacks!r}; allowed: python, all")
    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    _take_workspaces()
    names: list[str] = []
    running = True

    def mark(name: str) -> None:
        if not running:
            raise ValueError(f"the recording has ended; mark({name!r}) comes too late")
        _marker(name)()
        names.append(name)

    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks=stacks, max_entries=max_entries
    )
    try:
        yield mark
    finally:
        running = False
        try:
            statistics = torch.cuda.memory_stats()
            extra: dict[str, Any] = {"marks": names, "max_entries": max_entries}
            for kind in ("allocated", "requested", "reserved"):
                extra[f"peak_{kind}_bytes"] = int(statistics.get(f"{kind}_bytes.all.peak", 0))
            _dump({**torch.cuda.memory._snapshot(), EXTRA: extra}, Path(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def _take_workspaces() -> None:
    import torch

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()


def _marker(name: str) -> Callable[[], None]:
    """A function called `_mark_<name>` that allocates `MARK_BYTES`; ValueError for a name that no stage can have."""
    if not re.fullmatch(r"[A-Za-z][\w -]*", name):
        raise ValueError(f"stage {name!r}; allowed: a letter, then letters, digits, spaces, '_' and '-'")
    code = _allocate_marker.__code__.replace(co_name=MARK_PREFIX + name, co_qualname=MARK_PREFIX + name)
    return types.FunctionType(code, globals())


def _allocate_marker() -> None:
    import torch

    torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda")


def _dump(snapshot: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            pickle.dump(snapshot, file, protocol=4)  # torch's own viewer reads no later one
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- reading
class _Import(pickle.UnpicklingError):
    """The pickle asks for a class or a function; a snapshot has none."""


class _Plain(pickle.Unpickler):
    """Loads dicts, lists, tuples, strings, numbers; nothing that would have to be imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Import(f"{module}.{name}")


def _load(path: Path) -> Any:
    with opened(path) as file:
        first = file.read(2)
        if first[:1] != b"\x80" or first[1:] > bytes([pickle.HIGHEST_PROTOCOL]):
            raise ValueError(f"{path} is empty" if not first else f"{path} is not a pickle")
        file.seek(0)
        try:
            return _Plain(file).load()
        except _Import as error:
            raise ValueError(
                f"{path} wants to import {error}, which a snapshot never does; nothing was run"
            ) from None
        except (EOFError, pickle.UnpicklingError) as error:
            short = isinstance(error, EOFError) or re.search("truncated|exhausted", str(error))
            raise ValueError(f"{path} is {'truncated' if short else 'damaged'}: {error}") from error
        except Exception as error:  # damaged bytes may end in any of Python's errors
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def read_snapshot(
    path: str | Path,
    *,
    marks: Sequence[Mark] | None = None,
    device: int | None = None,
    max_entries: int | None = None,
) -> Snapshot:
    """Reads and replays a snapshot that `recording` or `torch.cuda.memory._dump_snapshot` has written.

    marks:        stages, for a file without markers, or instead of its own.
    device:       whose trace; needed only if several devices have one.
    max_entries:  the size of the ring buffer; by default what `recording` has kept in the file, else one million.

    Runs nothing that the file contains. Raises ValueError, which says why, for a file that is truncated or no pickle,
    that wants to import something, that is no snapshot of the allocator, or that has no history.
    """
    path = Path(path)
    data = _load(path)
    if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
        raise ValueError(f"{path} is no snapshot of the allocator: it lacks 'segments' or 'device_traces'")
    try:
        extra = data.get(EXTRA, {})
        device, trace = _trace(path, data["device_traces"], device)
        return replay(
            trace,
            [s for s in data["segments"] if s.get("device", device) == device],
            max_entries=max_entries or extra.get("max_entries", MAX_ENTRIES),
            marks=marks,
            names=extra.get("marks", ()),
            allocator={name: int(value) for name, value in extra.items() if name.startswith("peak_")},
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"something lacks the key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is no snapshot of the allocator as this version knows it: {what}"
        ) from error


def _trace(
    path: Path, traces: list[list[dict[str, Any]]], device: int | None
) -> tuple[int, list[dict[str, Any]]]:
    """The device and its trace; ValueError if there is none, or if the choice is not clear."""
    memory = ("alloc", "free_requested", "free_completed")
    known = [d for d, trace in enumerate(traces) if any(event["action"] in memory for event in trace)]
    if not known:
        raise ValueError(
            f"{path} has no history: call torch.cuda.memory._record_memory_history before what is to be seen, "
            "and take the snapshot before it is switched off"
        )
    if device is None and len(known) == 1:
        device = known[0]
    if device not in known:
        raise ValueError(f"device {device} has no history in {path}; allowed: {', '.join(map(str, known))}")
    return device, traces[device]
