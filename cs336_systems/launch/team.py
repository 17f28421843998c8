"""The ranks that torchrun started, on one node or several, as a team on which `launch` calls functions.

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m cs336_systems run allreduce

Rank 0 leads: it goes through the chapters, and whatever calls `launch` there (a notebook's kernel is a process of its
own) finds by the environment that there is a team. The others follow: they wait for the next *task*, take part, and
wait again, until rank 0 says that there are no more. A task has a number, and what is said of it lies in the store at
which torchrun's ranks meet:

    count               tasks so far
    task N              function, arguments, backend, ...: as `launch` got them
    stop N              the task is over: a rank has failed, or the time is up
    outcome N R         how rank R of it ended
    end, left           there are no more tasks; how many followers have seen that

Each rank calls the function in a fresh process of its own, as where `launch` starts them all: so one task leaves
neither memory nor a broken process group to the next, and a rank that crashes is a failed task. What rank 0 prints is
logged by `launch`, what the others print by themselves. If one of torchrun's own processes dies, torchrun ends all of
them, and what they started ends with them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any

from cs336_systems.launch.group import TEAM_VARIABLE, rendezvous
from cs336_systems.launch.outcome import has_failed, outcome
from cs336_systems.launch.processes import Held, Log, command
from cs336_systems.launch.worker import work

if TYPE_CHECKING:
    from torch.distributed import Store

NODES_VARIABLE = "CS336_NODES"  # read by `store.machine`
_TIMEOUT = timedelta(minutes=3)  # to meet, and to read what is there
_GRACE_S = 60.0  # for the ranks of a task to end when they have been told to


def rank_here() -> int | None:
    """The rank of this process among those that a torchrun started; None where none did."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ else None


def _store() -> Store:
    from torch import distributed as dist

    store = rendezvous(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _TIMEOUT)
    return dist.PrefixStore("cs336 team", store)


# ---- rank 0


@contextmanager
def leading() -> Iterator[None]:
    """Inside, `launch` in this process and in those that it starts calls functions on the team; then the team ends."""
    size = int(os.environ["WORLD_SIZE"])
    store = _store()
    variables = {
        TEAM_VARIABLE: str(size),
        NODES_VARIABLE: os.environ.get("GROUP_WORLD_SIZE", "1"),
        # Whoever serves the store, torchrun's agent or this process, it is there now: all others are its clients.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        store.set("end", "")
        deadline = time.monotonic() + _GRACE_S  # the store may go with this process
        while store.add("left", 0) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)


def lead(
    task: Mapping[str, Any], timeout_s: float, log: Callable[[str], None], log_ranks: Collection[int]
) -> tuple[list[dict[str, Any]], bool]:
    """Has the team's first `world_size` ranks run a task, this process as rank 0; their outcomes, and whether in time.

    What went wrong is in the outcomes (see `outcome`): a rank of which nothing was heard has neither result nor error.
    """
    store = _store()
    number, size = store.add("count", 1), task["world_size"]
    task = {**task, "meeting": f"task {number}", "log_ranks": list(log_ranks)}
    outcomes: dict[int, dict[str, Any]] = {}
    deadline, in_time = time.monotonic() + timeout_s, True
    stopped: float | None = None  # when
    store.set(f"task {number}", json.dumps(task))
    with ExitStack() as stack:
        stack.callback(store.set, f"stop {number}", "")  # also where this is interrupted
        own = stack.enter_context(_Member(task, 0, log))
        while len(outcomes) < size and (stopped is None or time.monotonic() < stopped + _GRACE_S):
            if 0 in outcomes:
                time.sleep(0.1)
            elif ended := own.wait(0.1):
                outcomes[0] = ended
            for rank in range(1, size):
                if rank not in outcomes and store.check([f"outcome {number} {rank}"]):
                    outcomes[rank] = json.loads(store.get(f"outcome {number} {rank}"))
            if stopped is None:
                in_time = time.monotonic() < deadline
                if not in_time or any(map(has_failed, outcomes.values())):
                    stopped = time.monotonic()
                    store.set(f"stop {number}", "")
                    own.stop()
    return [outcomes.get(rank, {}) for rank in range(size)], in_time


# ---- the other ranks


def follow() -> None:
    """Takes part in the tasks, one after the other, until rank 0 has no more."""
    rank, store = int(os.environ["RANK"]), _store()
    number = 1
    while True:
        if store.check([f"task {number}"]):
            task = json.loads(store.get(f"task {number}"))
            if rank < task["world_size"]:
                store.set(f"outcome {number} {rank}", json.dumps(_take_part(store, number, task, rank)))
            number += 1
        elif store.check(["end"]):
            store.add("left", 1)
            return
        else:
            time.sleep(0.1)


def _take_part(store: Store, number: int, task: Mapping[str, Any], rank: int) -> dict[str, Any]:
    with _Member(task, rank, lambda line: print(line, flush=True)) as own:
        stopped = False
        while (ended := own.wait(0.1)) is None:
            if not stopped and store.check([f"stop {number}"]):
                own.stop()
                stopped = True
        return ended


class _Member:
    """One rank's part in a task: a context around its process."""

    def __init__(self, task: Mapping[str, Any], rank: int, log: Callable[[str], None]) -> None:
        self._task, self._rank, self._log_line = task, rank, log
        self._killed_at: float | None = None

    def __enter__(self) -> _Member:
        local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        size = self._task["world_size"]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cs336-")))
            path = [entry or os.getcwd() for entry in sys.path]
            (folder / "task.json").write_text(json.dumps({**self._task, "path": path}), encoding="utf-8")
            printed = folder / f"ranks/own/attempt_0/{self._rank}"
            printed.mkdir(parents=True)
            environment = {
                **os.environ, "RANK": str(self._rank), "WORLD_SIZE": str(size),
                # of this node's ranks, those that the task needs
                "LOCAL_WORLD_SIZE": str(min(local_size, size - (self._rank - local_rank))),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            environment.pop(TEAM_VARIABLE, None)  # this process leads nobody
            outputs = [stack.enter_context(open(printed / f"std{name}.log", "wb")) for name in ("out", "err")]
            arguments = ["-u", *command(work, folder / "task.json")]
            self._held = stack.enter_context(Held(arguments, environment, *outputs))
            ranks = [rank for rank in self._task["log_ranks"] if rank == self._rank]
            self._log = Log(folder, self._log_line, ranks)
            self._folder = folder
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The rank's outcome if it ends in this time, else None."""
        process = self._held.process
        if self._killed_at is not None and time.monotonic() > self._killed_at:
            process.kill()
        with suppress(TimeoutExpired):
            process.wait(seconds)
        self._log.new_lines(last=process.returncode is not None)
        if process.returncode is None:
            return None
        code = process.returncode
        if self._killed_at is not None and code < 0:  # however hard it was to end
            code = -signal.SIGTERM
        return outcome(self._folder, self._rank, code)

    def stop(self) -> None:
        """Asks the process to end; in ten seconds it must."""
        if self._held.process.poll() is None:
            self._held.process.terminate()
            self._killed_at = time.monotonic() + 10
