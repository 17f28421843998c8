"""How the ranks of a run ended: what is read from the files that they leave, and the error that is made of it.

An *outcome* is what is known of one rank afterwards, as JSON: `result`, or `error` with its `kind` and `traceback`;
`time_ns` of the error or the end, `of_communication` (whether that may be the consequence of another rank's failure),
`exit_code` (negative for a signal), `stopped` (whether it ended because it was told to), `stack` (where it was then),
`stderr` (its last lines) and `watchdog` (what NCCL's watchdog said). It is empty for a rank of which nothing was heard.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.store import process
from cs336_systems.store.lifeline import ending


class LaunchError(RuntimeError):
    """A run ended without results. The first line says which rank failed and how; what it said follows.

    rank: the one that failed first; None if the run as a whole did (out of time, nothing heard of a rank).
    kind: the class of what it raised, "module.Name"; empty where it was killed, say.
    """

    def __init__(self, message: str, rank: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.rank, self.kind = rank, kind


# ---- outcomes

# What NCCL's watchdog writes before it aborts the process.
_NCCL_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: .*")
# An error, or what it was raised from, that may be the consequence of another rank's failure: of a collective, or what
# `parallel.agreement` says where another rank has raised.
_OF_COMMUNICATION = re.compile(
    r"^torch\.distributed\.Dist\w*Error|^RuntimeError: .*(gloo/|NCCL|by peer)"
    r"|^ValueError: all ranks must be given .*; what was raised is ",
    re.MULTILINE,
)


def outcome(folder: Path, exit_code: int) -> dict[str, Any]:
    """What is known of a rank that has just ended by itself, from its folder."""
    answer, said = process.answer(folder), _lines(folder / "stderr.log")
    timeout = _NCCL_TIMEOUT.search("\n".join(said))
    aborted = exit_code == -signal.SIGABRT and any("NCCL" in line for line in said)
    return {
        "time_ns": time.time_ns(),
        **answer,
        "of_communication": aborted or bool(_OF_COMMUNICATION.search(answer.get("traceback", ""))),
        "exit_code": exit_code,
        "stopped": False,
        "stack": _main_stack(folder / "stack.log"),
        "stderr": said[-20:],
        "watchdog": timeout[0] if timeout else "",
    }


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8", "replace").strip().splitlines() if file.is_file() else []


def has_failed(found: dict[str, Any]) -> bool:
    return bool(found) and (found["exit_code"] != 0 or "result" not in found)


def failure(outcomes: Sequence[dict[str, Any]]) -> LaunchError | None:
    """The error of the rank that failed first; None if none has failed.

    It tells of the others only where that rank's own error may be their doing: a collective that they did not join.
    """
    failed = [rank for rank, found in enumerate(outcomes) if has_failed(found)]
    if not failed:
        return None

    def order(rank: int) -> tuple[bool, bool, int]:
        """A cause comes before what it may have caused: an end that was asked for, a broken collective."""
        found = outcomes[rank]
        return found["stopped"], found["of_communication"], found["time_ns"]

    first = min(failed, key=order)
    found = outcomes[first]
    module = (kind := found.get("kind", "")).rpartition(".")[0]
    if module.startswith("cs336_systems."):  # its own sentence says all that there is to do
        how, said = found["error"].removeprefix(f"{module}."), []
    elif "error" in found:
        how, said = found["error"], found["traceback"].splitlines()[-40:]
    else:
        how = ending(found["exit_code"]) + (f": {found['watchdog']}" if found["watchdog"] else "")
        said = found["stderr"]
    lines = [f"rank {first} of {len(outcomes)}: {how}", *said]
    if found["of_communication"]:
        lines += others(outcomes, first)
    return LaunchError("\n".join(lines), first, kind)


def others(outcomes: Sequence[dict[str, Any]], first: int | None) -> list[str]:
    """The errors of the other ranks, or where they were when they were ended."""
    lines = []
    for rank, found in enumerate(outcomes):
        if rank != first and "error" in found:
            lines.append(f"rank {rank} of {len(outcomes)} then: {found['error']}")
        elif rank != first and found.get("stack"):
            lines += [
                f"rank {rank} of {len(outcomes)} was ended here, the innermost call first:",
                *found["stack"][:4],
            ]
        elif rank != first and found.get("stopped"):
            lines.append(f"rank {rank} of {len(outcomes)} did not say where it was when it was ended")
    return lines


def _main_stack(file: Path) -> list[str]:
    """The calls of the main thread, which comes last in what faulthandler writes."""
    lines = _lines(file)
    headers = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    return lines[headers[-1] + 1 :] if headers else []
