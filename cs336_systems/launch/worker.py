"""What a rank does: it holds on to its caller, works in a process group, and leaves an answer.

A rank is a process of its own, started with a *task file*: JSON with function, arguments, backend, device,
collective_timeout_s, the module search path and the name under which its ranks meet. Its answer, a file beside it, is
its result or its error.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import re
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.launch.group import process_group
from cs336_systems.launch.outcome import read, write
from cs336_systems.store.lifeline import end_at_once, hold_to_lifeline, leave_threads


def work(task_file: str) -> None:
    """What a rank does; its answer is its result, or its error."""
    folder = Path(task_file).parent
    hold_to_lifeline(folder / "lifeline")
    task, answer = read(Path(task_file)), folder / "answer.json"
    faulthandler.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stack = open(answer.with_suffix(".stack"), "w")  # noqa: SIM115  # to be written to when this rank is stopped
    faulthandler.register(signal.SIGTERM, stack, chain=True)
    try:
        function = found(task["function"])
        with process_group(
            task["backend"], task["device"], task["collective_timeout_s"], task.get("meeting", "")
        ) as rank:
            result = as_json(function(rank=rank, **task["arguments"]))
    except (
        BaseException
    ) as error:  # sys.exit and Ctrl-C end a rank as well: the others must not be taken for the cause
        # the caller may have seen another rank fail: this one has its say
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        said = {
            "error": _words(error).splitlines()[0],
            "traceback": traceback.format_exc(),
            "time_ns": time.time_ns(),
            "of_communication": _of_communication(error),
        }
        write(answer, json.dumps(said))
        end_at_once(1)
    write(answer, f'{{"result": {result}}}')
    leave_threads()


def found(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def as_json(result: Any) -> str:
    try:
        return json.dumps(result)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the result of a rank is not JSON: {error}") from error


def _words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error))  # also of one that cannot be printed


def _of_communication(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, may be the consequence of another rank's failure."""
    from torch import distributed as dist

    while error is not None:
        words = re.search(r"gloo/|NCCL|by peer", _words(error))
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and words is not None):
            return True
        error = error.__cause__ or error.__context__
    return False
