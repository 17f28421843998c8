"""The processes of a run: each rank's is started, watched and ended; all of a run together."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

from cs336_systems.launch.outcome import has_failed, outcome
from cs336_systems.store import process

_SAY_S = 5.0  # what a rank has to end by itself, when it has been told to
_GRACE_S = 60.0  # what is waited for ranks that have been told to end, and cannot be killed or heard of


class Member(Protocol):
    """A rank of a run, wherever its process is."""

    def poll(self) -> dict[str, Any] | None:
        """Its outcome, if it has ended."""

    def stop(self) -> None:
        """Has it end, if it has not; soon it will."""


def watch(members: Sequence[Member], timeout_s: float) -> tuple[list[dict[str, Any]], bool]:
    """The outcomes of a run's ranks, and whether it ended in time. When one has failed, the others are stopped."""
    outcomes: dict[int, dict[str, Any]] = {}
    deadline, in_time = time.monotonic() + timeout_s, True
    stopped: float | None = None  # when
    while len(outcomes) < len(members) and (stopped is None or time.monotonic() < stopped + _GRACE_S):
        time.sleep(0.05)
        for rank, member in enumerate(members):
            if rank not in outcomes and (ended := member.poll()):
                outcomes[rank] = ended
        if stopped is None and len(outcomes) < len(members):
            in_time = time.monotonic() < deadline
            if not in_time or any(map(has_failed, outcomes.values())):
                stopped = time.monotonic()
                for member in members:
                    member.stop()
    return [outcomes.get(rank, {}) for rank in range(len(members))], in_time


@contextmanager
def started(
    task: Mapping[str, Any], rank: int, environment: Mapping[str, str], log: Callable[[str], None]
) -> Iterator[Member]:
    """A rank as a process of this one's, which is gone afterwards. `log` is called with each line that it prints, if it
    is one of the task's `log_ranks`."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(task["world_size"])}
    own["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 serves no store
    with (
        tempfile.TemporaryDirectory(prefix="cs336-") as name,
        open(f"{name}/stdout.log", "wb") as stdout,
        open(f"{name}/stderr.log", "wb") as stderr,
        process.started(
            Path(name), "cs336_systems.launch.worker:work", {**task["call"], "stack": f"{name}/stack.log"},
            {**environment, **own}, stdout=stdout, stderr=stderr,
        ) as held,
    ):  # fmt: skip
        files = [stdout.name, stderr.name] if rank in task["log_ranks"] else []
        yield _Process(held.process, Path(name), Log(files, lambda line: log(f"[rank {rank}] {line}")))


class _Process:
    """A rank's process, which leaves its outcome in a folder."""

    def __init__(self, process: Popen[bytes], folder: Path, log: Log) -> None:
        self._process, self._folder, self._log = process, folder, log
        self._stopped_ns = self._kill_at = None

    def poll(self) -> dict[str, Any] | None:
        late = self._kill_at is not None and time.monotonic() > self._kill_at
        if late:
            self._process.kill()
        code = self._process.poll()
        self._log.new_lines(last=code is not None)
        if code is None:
            return None
        found = outcome(self._folder, code)
        if self._stopped_ns is not None:  # it may have ended by itself just before
            asked = code == -signal.SIGTERM or (late and code == -signal.SIGKILL)
            found["stopped"] = found["time_ns"] > self._stopped_ns if "error" in found else asked
        return found

    def stop(self) -> None:
        """Asks it to end, so that it says where it was; then it must."""
        if self._stopped_ns is None and self._process.poll() is None:
            self._stopped_ns, self._kill_at = time.time_ns(), time.monotonic() + _SAY_S
            self._process.terminate()


class Log:
    """Calls `log` with the lines that have been completed in some files since the last time."""

    def __init__(self, files: Sequence[str], log: Callable[[str], None]) -> None:
        self._log, self._read = log, dict.fromkeys(files, 0)

    def new_lines(self, *, last: bool) -> None:
        """last: the end of a file ends a line, too."""
        for file, start in self._read.items():
            with open(file, "rb") as f:
                f.seek(start)
                text = f.read()
            if not last:
                text = text[: text.rfind(b"\n") + 1]
            self._read[file] = start + len(text)
            for line in text.decode(errors="replace").removesuffix("\n").split("\n") if text else ():
                if not line.startswith("[Gloo] Rank "):  # it tells of its connections
                    self._log(line.rstrip().rpartition(chr(13))[2])  # a progress bar's last state
