"""The ranks that torchrun started, on one node or several, as a team on which `launch` calls functions.

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m cs336_systems run allreduce

Rank 0 leads: it goes through the chapters, and whatever calls `launch` there (a notebook's kernel is a process of its
own) finds by the environment that there is a team. The others follow: they wait for the next *task*, take part, and
wait again, until rank 0 says that there are no more. A task has a number, and what is said of it lies in the store at
which torchrun's ranks meet:

    count               tasks so far
    task N              what `launch` was asked to call, and for how many ranks
    stop N              the task is over: a rank has failed, or the time is up
    outcome N R         how rank R of it ended
    end, left           there are no more tasks; how many followers have gone

Each rank calls the function in a fresh process of its own, as where `launch` starts them all: so one task leaves
neither memory nor a broken process group to the next, and a rank that crashes is a failed task. What rank 0 prints is
logged by `launch`, what the others print by themselves. If one of torchrun's own processes dies, torchrun ends all of
them, and what they started ends with them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cs336_systems.launch.group import rendezvous
from cs336_systems.launch.processes import Member, started, watch
from cs336_systems.store.process import TEAM_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import Store

NODES_VARIABLE = "CS336_NODES"  # read by `store.machine`
_TIMEOUT = timedelta(minutes=3)  # to meet, and to read what is there
_GRACE_S = 60.0  # for the others to see that there are no more tasks


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
    task: Mapping[str, Any], timeout_s: float, log: Callable[[str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """Has the team's first `world_size` ranks run a task, this process as rank 0; as `processes.watch`."""
    store = _store()
    number = store.add("count", 1)
    task = {**task, "call": {**task["call"], "meeting": f"task {number}"}}
    store.set(f"task {number}", json.dumps(task))
    with ExitStack() as stack:
        stack.callback(store.set, f"stop {number}", "")  # also where this is interrupted
        own = stack.enter_context(_started(task, 0, log))
        return watch([own, *(_Far(store, number, rank) for rank in range(1, task["world_size"]))], timeout_s)


class _Far:
    """A member of a task whose process is another rank's."""

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store, self._number, self._rank = store, number, rank

    def poll(self) -> dict[str, Any] | None:
        key = f"outcome {self._number} {self._rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def stop(self) -> None:
        self._store.set(f"stop {self._number}", "")


# ---- the other ranks


def follow() -> None:
    """Takes part in the tasks, one after the other, until rank 0 has no more."""
    rank, store = int(os.environ["RANK"]), _store()
    number = 1
    try:
        while not store.check(["end"]):
            if store.check([f"task {number}"]):
                task = json.loads(store.get(f"task {number}"))
                if rank < task["world_size"]:
                    store.set(f"outcome {number} {rank}", json.dumps(_take_part(store, number, task, rank)))
                number += 1
            else:
                time.sleep(0.1)
    finally:  # also where this is interrupted: rank 0 waits for it
        store.add("left", 1)


def _take_part(store: Store, number: int, task: Mapping[str, Any], rank: int) -> dict[str, Any]:
    with _started(task, rank, lambda line: print(line, flush=True)) as own:
        while not (ended := own.poll()):
            if store.check([f"stop {number}"]):
                own.stop()
            time.sleep(0.1)
        return ended


def _started(
    task: Mapping[str, Any], rank: int, log: Callable[[str], None]
) -> AbstractContextManager[Member]:
    """This rank's part in a task."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # of this node's ranks, those that the task needs
    environment = {
        **os.environ,
        "LOCAL_WORLD_SIZE": str(min(local_size, task["world_size"] - (rank - local_rank))),
    }
    return started(task, rank, environment, log)
