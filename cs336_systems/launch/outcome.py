"""How the ranks of a run ended: files that they leave, what is read from them, and the error that is made of it.

An *outcome* is what is known of one rank afterwards, as JSON: `result`, or `error` with `traceback`, `time_ns` and
`of_communication` (whether it may be the consequence of another rank's failure); `exit_code` (negative for a signal,
None where nobody could tell), `stack` (where it was when it was ended), `stderr` (its last lines) and `watchdog` (what
NCCL's watchdog said).
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LaunchError(RuntimeError):
    """A run ended without results. The first line says which rank failed and how; what it and the others said follows.

    rank: the one that failed first; None if the run as a whole did (out of time, no launcher).
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


# ---- files of a run


def answer_file(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def log_files(folder: Path, rank: int | str) -> list[Path]:
    """What a rank prints, by the names that torchrun gives: stdout.log and stderr.log."""
    return sorted(folder.glob(f"ranks/*/attempt_0/{rank}/std*.log"))


def write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def last_lines(file: Path, count: int = 20) -> list[str]:
    return file.read_text("utf-8", "replace").strip().splitlines()[-count:] if file.is_file() else []


# ---- outcomes

# What NCCL's watchdog writes before it aborts the process.
_NCCL_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: .*")


def outcome(folder: Path, rank: int, exit_code: int | None) -> dict[str, Any]:
    """What is known of a rank that has ended."""
    answer = answer_file(folder, rank)
    said = next((file for file in log_files(folder, rank) if file.name == "stderr.log"), None)
    timeout = _NCCL_TIMEOUT.search(said.read_text("utf-8", "replace")) if said else None
    return {
        **read(answer),
        "exit_code": exit_code,
        "stack": _main_stack(answer.with_suffix(".stack")),
        "stderr": last_lines(said) if said else [],
        "watchdog": timeout[0] if timeout else "",
    }


def has_failed(found: dict[str, Any]) -> bool:
    """An error, an exit code, or the end without a result; where nobody could tell the exit code, an error only."""
    ended = found.get("exit_code") is not None
    return "error" in found or bool(found.get("exit_code")) or (ended and "result" not in found)


def failure(outcomes: Sequence[dict[str, Any]]) -> LaunchError | None:
    """The error of the rank that failed first, and what became of the others; None if none has failed."""
    failed = [rank for rank, found in enumerate(outcomes) if has_failed(found)]
    if not failed:
        return None

    def order(rank: int) -> tuple[int, int]:
        """A cause comes before what it may have caused: a broken collective, an end from outside."""
        if "error" in outcomes[rank]:
            return int(outcomes[rank]["of_communication"]), outcomes[rank]["time_ns"]
        return {-signal.SIGABRT: 1, -signal.SIGTERM: 2}.get(outcomes[rank]["exit_code"], 0), 0

    first = min(failed, key=order)
    found = outcomes[first]
    if "error" in found:
        how, said = found["error"], found["traceback"].splitlines()[-40:]
    else:
        how = ending(found["exit_code"]) + (f": {found['watchdog']}" if found["watchdog"] else "")
        said = found["stderr"]
    lines = [f"rank {first} of {len(outcomes)}: {how}", *said, *others(outcomes, first)]
    return LaunchError("\n".join(lines), first)


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
    return lines


def _main_stack(file: Path) -> list[str]:
    """The calls of the main thread, which comes last in what faulthandler writes."""
    lines = last_lines(file, 10_000)
    headers = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    return lines[headers[-1] + 1 :] if headers else []


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code} and no result"
    killed = " (by the system, for want of memory, if nobody sent it)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{killed}"
