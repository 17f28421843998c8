"""Processes that compute for one that waits, and are gone at the end of its `with`, however that ends.

    with Pool(4) as pool:
        for result in pool.map(work, items): ...

They are no children of `multiprocessing`: what called need not be a module that can be imported, there are no threads
here that an interrupt could leave waiting, and nothing is left to be ended by the collection of garbage.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TypeVar

from cs336_systems.store.lifeline import Held, ending, hold_to_lifeline

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")
_AHEAD = 4  # results for each process that may wait for an earlier one
# It finds the modules that the caller finds.
_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cs336_systems.store.pool import serve; serve(int(sys.argv[2]), sys.argv[3])"
)


class PoolError(RuntimeError):
    """A process of a pool ended before its work did; says how."""


class Pool:
    """So many processes. OSError where they cannot be started."""

    def __init__(self, workers: int) -> None:
        self._workers, self._all = workers, contextlib.ExitStack()
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Pool:
        try:
            with undisturbed():
                folder = Path(self._all.enter_context(tempfile.TemporaryDirectory(prefix="cs336-")))
                for number in range(self._workers):
                    self._start(folder / str(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, lifeline: Path) -> None:
        ours, theirs = Pipe()
        self._all.callback(ours.close)
        with theirs:
            path = json.dumps([entry or os.getcwd() for entry in sys.path])
            command = [sys.executable, "-c", _WORKER, path, str(theirs.fileno()), str(lifeline)]
            held = self._all.enter_context(Held(command, lifeline, pass_fds=[theirs.fileno()]))
        self._processes[ours] = held.process

    def __exit__(self, *raised: object) -> None:
        with undisturbed():
            self._all.close()

    def map(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """work(item) of each item, in their order; `work` is a module's function, and items are small (a pipe takes
        them without being read). They are taken as they are needed: there may be no end of them. Left early, it
        needs no closing. What `work` raises is raised here; PoolError where a process has ended."""
        tasks, idle = enumerate(items), list(self._processes)
        busy: dict[Connection, int] = {}
        done: dict[int, tuple[_Result, Exception | None]] = {}
        for expected in itertools.count():
            while expected not in done:
                while idle and len(done) < _AHEAD * self._workers and (task := next(tasks, None)):
                    connection = idle.pop()
                    with self._alive(connection):
                        connection.send((work, task[1]))
                    busy[connection] = task[0]
                if not busy:
                    return
                for connection in wait(list(busy)):
                    with self._alive(connection):
                        done[busy.pop(connection)] = connection.recv()
                    idle.append(connection)
            result, error = done.pop(expected)
            if error:
                raise error
            yield result

    @contextlib.contextmanager
    def _alive(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            raise PoolError(
                f"a process of {self._workers} ended: {ending(self._processes[connection].wait())}"
            ) from None


def serve(connection: int, lifeline: str) -> None:
    """What a process of a pool does, until nobody asks it any more."""
    hold_to_lifeline(lifeline)
    with contextlib.suppress(EOFError, ConnectionError), Connection(connection) as caller:
        while True:
            work, item = caller.recv()
            try:
                said = work(item), None
            except Exception as error:
                error.add_note("".join(traceback.format_tb(error.__traceback__)))  # where
                said = None, error
            caller.send(said)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Lets SIGINT and SIGTERM wait until its block has ended, whichever thread they reach."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears them
        yield
        return
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: heard.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(signal.getsignal(number))  # else it is ignored, or ends the process at once
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])
