"""Processes that end with the one that started them, however that one ends.

Starter and started hold the two ends of a named pipe, the *lifeline*. The started one kills itself and its process
group when the starter lets go or dies; the starter knows that it is gone when nobody holds the other end. A name, since
a profiler between the two passes on neither standard input nor other open files.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Held:
    """A command at the other end of a lifeline, in a session of its own: there it calls `hold_to_lifeline`.

    A context: at its end the command and what it started in its process group are killed, if they have not ended by
    themselves. RuntimeError if one of them cannot be killed.

    lifeline:  a path where there is nothing yet.
    options:   of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], lifeline: Path, **options: Any) -> None:
        os.mkfifo(lifeline)
        reader = os.open(
            lifeline, os.O_RDONLY | os.O_NONBLOCK
        )  # without one, opening the other end would wait
        self._lifeline = open(lifeline, "wb", buffering=0)  # noqa: SIM115
        os.close(reader)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lifeline:
            with suppress(ProcessLookupError, PermissionError):  # nobody is there any more; macOS: a zombie
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            other_end = select.poll()
            other_end.register(self._lifeline, 0)
            if not other_end.poll(30_000):  # an error of the pipe: nobody holds it
                raise RuntimeError("a process has not ended within 30 s of being killed")


def hold_to_lifeline(lifeline: Path | str) -> None:
    """Has this process and its process group killed when the starter lets go of the lifeline, or has by now."""
    reader = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)  # it must not wait for a starter that is gone
    os.set_blocking(reader, True)

    def watch() -> None:
        try:
            os.read(reader, 1)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def leave_threads() -> None:
    """Ends this process here if threads are still running: an ordinary end would wait for them."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        end_at_once(0)


def end_at_once(code: int) -> None:
    """Ends this process, whatever its threads are waiting for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ending(code: int) -> str:
    """The exit code of a process without a result, in words; negative for a signal."""
    if code >= 0:
        return f"exit code {code} and no result"
    killed = " (by the system, for want of memory, if nobody sent it)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{killed}"
