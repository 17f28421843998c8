"""Runs a function in several processes that form a group: `run(function, world_size, *args)`."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_TIMEOUT_S = 30  # a collective that waits longer for a rank raises on the others


def run(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(*args)` in `world_size` processes with a Gloo group of all; returns their results by rank.

    The function belongs to a module, and args and results can be pickled. The first rank that raises ends all, with its
    traceback in the error here (`torch.multiprocessing.ProcessRaisedException`); so does the timeout, in seconds, with
    a TimeoutError.
    """
    # Processes are forked from one that has imported what takes seconds, and done nothing else: a start costs little.
    multiprocessing.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _rank, (world_size, folder, function, args), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        try:
            while not processes.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=0.5):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} on {world_size} ranks took over {timeout} s")
        except mp.ProcessRaisedException as error:
            rank, trace = (Path(folder) / "first").read_text(encoding="utf-8").split("\n", 1)
            message = f"rank {rank} of {world_size}:\n{trace}"
            raise mp.ProcessRaisedException(message, int(rank), error.error_pid) from None
        finally:
            for process in processes.processes:
                process.kill()
        return [pickle.loads((Path(folder) / f"rank{rank}").read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        result = function(*args)
        dist.barrier()  # no rank goes while another may still be talking to it
        dist.destroy_process_group()
        (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(result))
    except Exception:
        # connections to this process break when it ends: what others raise then is not what has happened
        with contextlib.suppress(FileExistsError), open(f"{folder}/first", "x", encoding="utf-8") as file:
            file.write(f"{rank}\n{traceback.format_exc()}")
        raise
