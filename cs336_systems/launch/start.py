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

torchrun's engine (`elastic_launch`) runs in a process of its own, the *agent*: it takes over the signal handlers and
the environment of the process it runs in, which a notebook's kernel cannot give away, and it knows no time limit. The
agent and the ranks hold one end of a socket, the *lifeline*, and the caller the other: ranks end when the caller
lets go or dies, however it dies, and the caller knows that all are gone when nobody holds the other end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from cs336_systems.launch.group import BACKENDS, DEVICES, backend_and_device, process_group, team_size
from cs336_systems.launch.outcome import (
    LaunchError,
    ending,
    failure,
    last_lines,
    others,
    outcome,
    read,
    write,
)
from cs336_systems.launch.processes import Held, Log, command
from cs336_systems.launch.worker import as_json, end_at_once, found, work

__all__ = ["LaunchError", "launch"]


def launch(
    function: str, world_size: int, arguments: Mapping[str, Any] | None = None, *, backend: str = "auto",
    device: str = "auto", timeout_s: float = 1800.0, collective_timeout_s: float = 180.0,
    log: Callable[[str], None] = print, log_ranks: Collection[int] = (0,),
) -> list[Any]:  # fmt: skip
    """`module:function(rank=..., **arguments)` in `world_size` fresh processes; results in rank order.

    They run on this machine, or, where this process leads a team, one for each of the team's first ranks.

    timeout_s:             after this time the run is ended, whatever it is doing.
    collective_timeout_s:  a collective that takes longer fails; as `process_group`'s timeout.
    log:                   is called, in this thread, with each line that the ranks in `log_ranks` print.

    Ranks import what the caller could import. OMP_NUM_THREADS shares the cores among them, unless it is set.

    LaunchError if a rank raises, is killed or ends without a result, and after `timeout_s`; ValueError as
    `backend_and_device`, and for more ranks than the team has. However it ends, also by KeyboardInterrupt, no process
    is left.
    """
    if not re.fullmatch(r"[\w.]+:\w+", function) or function.startswith("__main__:"):
        raise ValueError(f"function {function!r}: expected 'module:function', a module that ranks can import")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1")
    if "rank" in (arguments or {}):
        raise ValueError("argument 'rank' is what launch itself gives to the function")
    team = team_size()
    if team and world_size > team:
        raise ValueError(
            f"world_size={world_size}: torchrun started {team} ranks here; allowed: 1 ... {team}"
        )
    local = min(world_size, int(os.environ["LOCAL_WORLD_SIZE"])) if team else world_size
    backend, device = backend_and_device(backend, device, local)
    task = {
        "function": function, "arguments": dict(arguments or {}), "world_size": world_size, "backend": backend,
        "device": device, "collective_timeout_s": collective_timeout_s,
    }  # fmt: skip
    if team:
        from cs336_systems.launch.team import lead

        outcomes, in_time = lead(task, timeout_s, log, log_ranks)
        trouble = "" if all("result" in one for one in outcomes) else "the team ended without saying why"
    else:
        outcomes, in_time, trouble = _on_this_machine(task, timeout_s, log, log_ranks)
    if not in_time:
        first_line = f"{function} on {world_size} ranks took longer than {timeout_s:g} s and was ended"
        raise LaunchError("\n".join([first_line, *others(outcomes, None)]))
    if error := failure(outcomes):
        raise error
    if trouble:
        raise LaunchError(trouble)
    return [one["result"] for one in outcomes]


def _on_this_machine(
    task: Mapping[str, Any], timeout_s: float, log: Callable[[str], None], log_ranks: Collection[int]
) -> tuple[list[dict[str, Any]], bool, str]:
    """The outcomes of the ranks, whether they ended in time, and what torch's launcher said if it failed."""
    world_size = task["world_size"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // world_size)), **os.environ}
    with tempfile.TemporaryDirectory(prefix="cs336-") as name:
        folder = Path(name)
        path = [entry or os.getcwd() for entry in sys.path]
        (folder / "task.json").write_text(json.dumps({**task, "path": path}), encoding="utf-8")
        code = _watch(folder, environment, timeout_s, Log(folder, log, log_ranks))
        codes: dict[int, int | None] = dict.fromkeys(range(world_size))  # None: the agent could not tell
        if code == 0 or (folder / "exit_codes.json").is_file():
            failed = {int(rank): c for rank, c in read(folder / "exit_codes.json").items()}
            codes = dict.fromkeys(range(world_size), 0) | failed
        outcomes = [outcome(folder, rank, codes[rank]) for rank in range(world_size)]
        said = [f"torch's launcher ended with {ending(code or 0)}", *last_lines(folder / "agent.log")]
        return outcomes, code is not None, "\n".join(said) if code else ""


def _watch(folder: Path, environment: Mapping[str, str], timeout_s: float, log: Log) -> int | None:
    """Runs the agent to its end and logs what ranks print; its exit code, or None if the time was over."""
    deadline = time.monotonic() + timeout_s
    arguments = command(_agent, folder / "task.json")
    with open(folder / "agent.log", "wb") as said, Held(arguments, environment, said, said) as held:
        while time.monotonic() < deadline:
            with suppress(TimeoutExpired):
                held.process.wait(0.1)
            log.new_lines(last=held.process.returncode is not None)
            if held.process.returncode is not None:
                return held.process.returncode
        return None


# ---- in the agent


def _agent(task_file: str) -> None:
    """torchrun without its command line: starts the ranks, and ends them all when one fails."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = Path(task_file).parent
    # NCCL's own default, which torchrun would change: a rank whose collective hangs is ended by the watchdog as it is.
    # With torchrun's, communicators are aborted before, and the rank goes on meanwhile with numbers that are wrong.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=read(Path(task_file))["world_size"], max_restarts=0,
        run_id=folder.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0", rdzv_configs={"is_host": True},
        local_addr="127.0.0.1", logs_specs=DefaultLogsSpecs(log_dir=str(folder / "ranks"), redirects=Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-u", *command(work, task_file))
    except ChildFailedError as error:
        write(folder / "exit_codes.json", json.dumps({r: f.exitcode for r, f in error.failures.items()}))
        sys.exit(1)


# ---- under a torchrun of the user's


def main() -> None:
    """A rank that torchrun started, on one node or several: rank 0 prints the results of all as a line of JSON."""
    from torch import distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    parser = argparse.ArgumentParser(prog="torchrun ... -m cs336_systems.launch.start")
    parser.add_argument("function", help="module:function")
    parser.add_argument("arguments", nargs="?", default={}, type=json.loads, help="its arguments, as JSON")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--collective-timeout-s", default=180.0, type=float)
    given = parser.parse_args()

    @record  # so that torchrun reports the traceback
    def run() -> None:
        function = found(given.function)
        with process_group(given.backend, given.device, given.collective_timeout_s) as rank:
            results = [""] * rank.world_size
            dist.all_gather_object(results, as_json(function(rank=rank, **given.arguments)))
        if rank.rank == 0:
            print(f"[{', '.join(results)}]", flush=True)

    try:
        run()
    except Exception:
        traceback.print_exc()
        end_at_once()


if __name__ == "__main__":
    # The functions import this module under its name: there should be one of it.
    from cs336_systems.launch.start import main as run

    run()
