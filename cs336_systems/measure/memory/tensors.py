"""Memory over time where the allocator keeps no history, as on a CPU: the storages of tensors that torch makes."""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from cs336_systems.measure.memory.replay import Mark, Snapshot, replay


@contextlib.contextmanager
def watching_tensors() -> Iterator[tuple[Callable[[str], None], Callable[[], Snapshot]]]:
    """As `memory.recording`, of tensors instead of an allocator's blocks; `snapshot()` tells of the block so far.

    Every operation that torch's dispatcher sees is looked at for storages that it has made, and these for when they go.
    Those that it is given and nothing has made were there before. What a kernel allocates for itself is not seen.
    """
    from torch import Tensor, ops
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    trace: list[dict[str, Any]] = []
    marks: list[Mark] = []
    live: dict[int, dict[str, Any]] = {}  # storage → its `alloc` event
    before: dict[int, int] = {}  # storage → bytes
    running = True

    def freed(storage: int) -> None:
        event = live.pop(storage)
        if running:
            trace.append({**event, "action": "free_completed"})
            before.pop(storage, None)

    def unknown(values: Any) -> Iterator[dict[str, Any]]:
        for tensor in tree_leaves(values):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or storage._cdata in live or not storage.nbytes():
                continue
            live[storage._cdata] = {"action": "alloc", "addr": storage._cdata, "size": storage.nbytes()}
            weakref.finalize(storage, freed, storage._cdata).atexit = False
            yield live[storage._cdata]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is not ops.aten.lift_fresh.default:  # the first that sees what `torch.tensor` makes
                before.update((event["addr"], event["size"]) for event in unknown((args, kwargs)))
            made = operator(*args, **(kwargs or {}))
            for event in unknown(made):
                trace.append(event | {"frames": _frames(sys._getframe(1))})
            return made

    def mark(name: str) -> None:
        marks.append(Mark(name, len(trace)))

    def snapshot() -> Snapshot:
        return replay(list(trace), marks, before.copy())  # other threads let storages go, at any time

    try:
        with Watch():
            yield mark, snapshot
    finally:
        running = False


def _frames(frame: Any) -> list[dict[str, Any]]:
    """The Python stack from a frame outward, as an allocator's history has it; without what torch wraps a mode in."""
    while re.search(r"[/\\]torch[/\\]_(dynamo|compile)", frame.f_code.co_filename):
        frame = frame.f_back
    found = []
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found
