"""What a rank does: it works in a process group, and says where it is when it is stopped."""

from __future__ import annotations

import faulthandler
import importlib
import signal
from collections.abc import Mapping
from typing import Any

from cs336_systems.launch.group import process_group


def work(
    function: str, arguments: Mapping[str, Any], backend: str, device: str, collective_timeout_s: float, stack: str,
    meeting: str = "",
) -> Any:  # fmt: skip
    """`module:function(rank=..., **arguments)` inside a process group; called by `store.process`.

    stack: a file for where this rank was when it was stopped. meeting: as for `process_group`.
    """
    faulthandler.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGTERM, open(stack, "w"), chain=True)  # noqa: SIM115  open until then
    module, _, name = function.partition(":")
    with process_group(backend, device, collective_timeout_s, meeting) as rank:
        return getattr(importlib.import_module(module), name)(rank=rank, **arguments)
