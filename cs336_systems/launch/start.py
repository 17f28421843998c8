"""Functions in several processes that work together: started, watched and ended from a notebook, a test or a script.

    def mean_over_ranks(rank, size):                                   # in a module, say chapter.py
        x = torch.full((size,), float(rank.rank), device=rank.device)
        dist.all_reduce(x)
        return x.mean().item() / rank.world_size

    launch("chapter:mean_over_ranks", 4, {"size": 1000})               # [1.5, 1.5, 1.5, 1.5]

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m cs336_systems.launch.start chapter:mean_over_ranks '{"size": 1000}'

A *rank* is one of the processes. It calls the function with the keyword `rank` (a `group.Rank`) and the arguments,
inside an initialized process group. Arguments and results are JSON. Where the caller leads a team of torchrun's ranks
(see `team`), that team calls the function; for the caller nothing else changes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from cs336_systems.launch import team
from cs336_systems.launch.group import BACKENDS, DEVICES, backend_and_device, team_size
from cs336_systems.launch.outcome import LaunchError, failure, others
from cs336_systems.launch.processes import started, watch

__all__ = ["LaunchError", "launch"]


def launch(
    function: str, world_size: int, arguments: Mapping[str, Any] | None = None, *, backend: str = "auto",
    device: str = "auto", timeout_s: float = 1800.0, collective_timeout_s: float = 180.0,
    log: Callable[[str], None] = print, log_ranks: Collection[int] = (0,),
) -> list[Any]:  # fmt: skip
    """`module:function(rank=..., **arguments)` in `world_size` fresh processes; results in rank order.

    They run on this machine, or, where this process leads a team, one for each of the team's first ranks.

    timeout_s:             after this time the run is ended, whatever it is doing.
    collective_timeout_s:  a collective that takes longer fails; as `process_group`'s timeout. A run with a failure ends
                           within a second, or six where a rank ignores SIGTERM.
    log:                   is called, in this thread, with each line that the ranks in `log_ranks` print.

    Ranks import what the caller could import. OMP_NUM_THREADS shares the cores among them, unless it is set.

    LaunchError if a rank raises, calls sys.exit, is killed or ends without a result, and after `timeout_s`; it names
    the rank that did so first, and how. ValueError as `backend_and_device`, and for more ranks than the team has.
    However this ends, also by KeyboardInterrupt or by the caller's death, no process is left.
    """
    if not re.fullmatch(r"[\w.]+:\w+", function) or function.startswith("__main__:"):
        raise ValueError(f"function {function!r}: expected 'module:function', a module that ranks can import")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1")
    if "rank" in (arguments or {}):
        raise ValueError("argument 'rank' is what launch itself gives to the function")
    ranks = team_size()
    if ranks and world_size > ranks:
        raise ValueError(
            f"world_size={world_size}: torchrun started {ranks} ranks here; allowed: 1 ... {ranks}"
        )
    local = min(world_size, int(os.environ["LOCAL_WORLD_SIZE"])) if ranks else world_size
    backend, device = backend_and_device(backend, device, local)
    task = {
        "world_size": world_size,
        "log_ranks": list(log_ranks),
        "call": {
            "function": function, "arguments": dict(arguments or {}), "backend": backend, "device": device,
            "collective_timeout_s": collective_timeout_s,
        },
    }  # fmt: skip
    run = team.lead if ranks else _on_this_machine
    outcomes, in_time = run(task, timeout_s, log)
    if not in_time:
        first_line = f"{function} on {world_size} ranks took longer than {timeout_s:g} s and was ended"
        raise LaunchError("\n".join([first_line, *others(outcomes, None)]))
    if error := failure(outcomes):
        raise error
    if silent := [str(rank) for rank, one in enumerate(outcomes) if not one]:
        raise LaunchError(f"{function} on {world_size} ranks: nothing was heard of rank {', '.join(silent)}")
    return [one["result"] for one in outcomes]


def _on_this_machine(
    task: Mapping[str, Any], timeout_s: float, log: Callable[[str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """As `processes.watch`: the ranks are processes of this one's, which serves the store at which they meet."""
    from torch import distributed as dist

    size = task["world_size"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // size)), **os.environ, "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
    }  # fmt: skip
    with ExitStack() as stack:
        members = [
            stack.enter_context(started(task, rank, environment | {"LOCAL_RANK": str(rank)}, log))
            for rank in range(size)
        ]
        return watch(members, timeout_s)


# ---- under a torchrun of the user's


def main() -> None:
    """A rank that torchrun started, on one node or several: rank 0 prints the results of all as a line of JSON."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m cs336_systems.launch.start")
    parser.add_argument("function", help="module:function")
    parser.add_argument("arguments", nargs="?", default={}, type=json.loads, help="its arguments, as JSON")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--collective-timeout-s", default=180.0, type=float)
    given = vars(parser.parse_args())
    if rank := team.rank_here():
        team.follow()
        return
    with nullcontext() if rank is None else team.leading():
        results = launch(world_size=team_size() or 1, timeout_s=math.inf, **given)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
