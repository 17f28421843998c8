"""A function called in a fresh Python process: nothing that ran before has left caches, contexts or memory behind.

What the process is to do lies in a folder as a *task*, JSON with the function, its arguments and the search path of
modules; its answer will lie beside it: its result, or its error. It holds on to its starter, and ends with it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from cs336_systems.store import files
from cs336_systems.store.lifeline import Held, end_at_once, ending, hold_to_lifeline, leave_threads

# Says that ranks which torchrun started are this process's to use (`launch.team`). A child that starts ranks starts
# its own, so that a profiler around it sees them.
TEAM_VARIABLE = "CS336_TEAM"
# It finds the modules that the caller finds.
_CHILD = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/task.json'))['path']; "
    "from cs336_systems.store.process import work; work(sys.argv[1])"
)


class ChildError(RuntimeError):
    """The child process ended without a result; its traceback has been printed."""


def call(
    function: str, arguments: Mapping[str, Any], *, timeout_s: float, prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """`module:function(**arguments)` in a fresh process of this interpreter; returns what it returns.

    Arguments and results are JSON. The child's output goes where this process's goes, so that its progress is seen.

    prefix:       a command to run it under, such as `["nsys", "profile", ...]`.
    environment:  variables to set for it.
    timeout_s:    after this time the child and what it started are killed.

    Raises ChildError, which says what the child said last, if it fails, is killed or runs out of time. However this
    process ends, the child ends with it.
    """
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        variables = {**os.environ, **(environment or {})}
        with started(Path(folder), function, arguments, variables, prefix) as child:
            try:
                code = child.process.wait(timeout_s)
            except TimeoutExpired:
                raise ChildError(f"{function} took longer than {timeout_s:g} s and was ended") from None
        said = answer(Path(folder))
    if "result" in said:
        return said["result"]
    print(said.get("traceback", ""), file=sys.stderr, end="", flush=True)
    raise ChildError(said.get("error") or f"{function} ended with {ending(code)}")


def started(
    folder: Path, function: str, arguments: Mapping[str, Any], environment: Mapping[str, str],
    prefix: Sequence[str] = (), **options: Any,
) -> Held:  # fmt: skip
    """`module:function(**arguments)` in a fresh process, whose `answer` will be in `folder`; options as for `Held`."""
    path = [entry or os.getcwd() for entry in sys.path]
    task = json.dumps({"function": function, "arguments": dict(arguments), "path": path})
    (folder / "task.json").write_text(task, encoding="utf-8")
    environment = {name: value for name, value in environment.items() if name != TEAM_VARIABLE}
    command = [*prefix, sys.executable, "-u", "-c", _CHILD, str(folder)]
    return Held(command, folder / "lifeline", env=environment, **options)


def answer(folder: Path) -> dict[str, Any]:
    """What a process that has ended has left: `result`, or `error`, `kind`, `traceback` and `time_ns`; or nothing."""
    return files.read_json(folder / "answer.json")


def work(folder: str) -> None:
    """What the process does."""
    hold_to_lifeline(Path(folder, "lifeline"))
    task = json.loads(Path(folder, "task.json").read_text(encoding="utf-8"))
    module, _, name = task["function"].partition(":")
    try:
        said = json.dumps({"result": getattr(importlib.import_module(module), name)(**task["arguments"])})
    except BaseException as error:  # sys.exit and Ctrl-C are its end as well
        # the starter may have seen another process of a run fail: this one has its say
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        words = "".join(traceback.format_exception_only(error))  # also of one that cannot be printed
        what = {
            "error": words.splitlines()[0],
            "kind": f"{type(error).__module__}.{type(error).__qualname__}",
            "traceback": traceback.format_exc(),
            "time_ns": time.time_ns(),
        }
        files.replace({Path(folder, "answer.json"): json.dumps(what)})
        end_at_once(1)
    files.replace({Path(folder, "answer.json"): said})
    leave_threads()
