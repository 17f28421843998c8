"""A function called in a fresh Python process: nothing that ran before has left caches, contexts or memory behind.

    python -m cs336_systems.store.process FILE       (the child; `call` starts it)

Arguments and results are JSON. The child's output goes where the parent's goes, so that its progress and tracebacks
are seen.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from cs336_systems.store.lifeline import Held, ending, hold_to_lifeline, leave_threads

_ROOT = Path(__file__).resolve().parents[2]
# Says that ranks which torchrun started are this process's to use (`launch.team`). A child that starts ranks starts
# its own, so that a profiler around it sees them.
_TEAM = "CS336_TEAM"


class ChildError(RuntimeError):
    """The child process ended without a result; its traceback has been printed."""


def call(
    function: str, arguments: Mapping[str, Any], *, timeout_s: float, prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """`module:function(**arguments)` in a fresh process of this interpreter; returns what it returns.

    prefix:       a command to run it under, such as `["nsys", "profile", ...]`.
    environment:  variables to set for it.
    timeout_s:    after this time the child and what it started are killed.

    Raises ChildError, which says what the child said last, if it fails, is killed or runs out of time. However this
    process ends, the child ends with it.
    """
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"function": function, "arguments": dict(arguments)}), encoding="utf-8")
        command = [*prefix, sys.executable, "-m", __name__, str(task)]
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]  # where the package is not installed, too
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
        inherited = {name: value for name, value in os.environ.items() if name != _TEAM}
        with Held(command, _lifeline(task), env={**inherited, **variables}) as child:
            try:
                code = child.process.wait(timeout_s)
            except TimeoutExpired:
                raise ChildError(f"{function} took longer than {timeout_s:g} s and was ended") from None
        answer = _read(task.with_suffix(".out"))
    if "result" in answer:
        return answer["result"]
    raise ChildError(answer.get("error") or f"{function} ended with {ending(code)}")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _lifeline(task: Path) -> Path:
    return task.with_suffix(".lifeline")


def _main(path: str) -> None:
    hold_to_lifeline(_lifeline(Path(path)))
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    module, _, name = task["function"].partition(":")
    try:
        answer = json.dumps({"result": getattr(importlib.import_module(module), name)(**task["arguments"])})
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        _answer(path, json.dumps({"error": f"{type(error).__name__}: {first_line}"}))
        raise
    _answer(path, answer)


def _answer(path: str, answer: str) -> None:
    out = Path(path).with_suffix(".out")
    temporary = out.with_suffix(".tmp")
    temporary.write_text(answer, encoding="utf-8")
    os.replace(temporary, out)


if __name__ == "__main__":
    _main(sys.argv[1])
    leave_threads()
