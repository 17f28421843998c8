"""Processes that end with the one that started them, and what they print.

Starter and started hold the two ends of a socket, the *lifeline*: the started one ends when the starter lets go or
dies, however it dies, and the starter knows that all are gone when nobody holds the other end.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cs336_systems.launch.outcome import LaunchError, log_files


class Held:
    """A Python process at the other end of a lifeline, its standard input, in a session of its own.

    A context: at its end the process and those that it started are ended, if they have not ended by themselves, and
    all of them are gone.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self._lifeline, other_end = socket.socketpair()
        with other_end:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], env=environment, stdin=other_end, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lifeline:
            self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(OSError):  # macOS: nobody is there any more
            self._lifeline.shutdown(socket.SHUT_WR)
        self._lifeline.settimeout(30)
        try:
            self._lifeline.recv(1)  # nothing comes; it returns when nobody holds the other end
        except TimeoutError:
            raise LaunchError("a process of this run has not ended within 30 s of its end") from None


def hold_to_lifeline() -> None:
    """Has this process and what it started killed when the starter lets go of the lifeline, which is standard input.

    The process must lead a process group of its own.
    """
    assert stat.S_ISSOCK(os.fstat(0).st_mode), "an agent passes its standard input on"
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        try:
            os.read(lifeline, 1)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Log:
    """Calls `log` with the lines that some ranks have completed in their files since the last time."""

    def __init__(self, folder: Path, log: Callable[[str], None], ranks: Collection[int]) -> None:
        self._folder, self._log, self._ranks = folder, log, ranks
        self._read: dict[Path, int] = {}

    def new_lines(self, *, last: bool) -> None:
        """last: the end of a file ends a line, too."""
        for rank in self._ranks:
            for file in log_files(self._folder, rank):
                with file.open("rb") as f:
                    f.seek(self._read.get(file, 0))
                    text = f.read()
                if not last:
                    text = text[: text.rfind(b"\n") + 1]
                self._read[file] = self._read.get(file, 0) + len(text)
                for line in text.decode(errors="replace").removesuffix("\n").split("\n") if text else ():
                    if not line.startswith("[Gloo] Rank "):  # it tells of its connections
                        shown = line.rstrip().rpartition(chr(13))[2]  # a progress bar's last state
                        self._log(f"[rank {rank}] {shown}")


def command(function: Callable[[str], Any], task_file: Path | str) -> list[str]:
    """Arguments of a Python that calls a function of this room and finds the modules that the caller finds."""
    code = (
        "import json, sys; sys.path[:] = json.load(open(sys.argv[1]))['path']; "
        f"from {function.__module__} import {function.__name__} as call; call(sys.argv[1])"
    )
    return ["-c", code, str(task_file)]
