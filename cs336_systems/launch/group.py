"""Several processes, each with a device, that work together: which of them a process is, and their process group.

`start` starts them. Importing this module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from cs336_systems.store.process import TEAM_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import Store

# What NCCL's watchdog reads when a group is made. By default it writes a dump when a collective takes too long, and
# sleeps for four times this limit, a minute, before it ends the process. Other ranks would have given up by then, and
# be taken for the cause. The request for a dump also stays in the store, where the next task of a team would find it.
_WATCHDOG = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
BACKENDS = ("auto", "nccl", "gloo")
DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class Rank:
    """One process among those that work together."""

    rank: int  # 0 ... world_size - 1, over all nodes
    local_rank: int  # on its node
    world_size: int
    local_world_size: int
    device: str  # "cuda:1", "cpu": where its tensors belong
    backend: str  # "nccl", "gloo": what its process group communicates through


def team_size() -> int | None:
    """How many ranks of torchrun's `launch` runs functions on; None where it starts processes of its own."""
    return int(os.environ[TEAM_VARIABLE]) if os.environ.get(TEAM_VARIABLE) else None


def backend_and_device(backend: str, device: str, local_world_size: int) -> tuple[str, str]:
    """What "auto" means on this machine for a number of ranks: NCCL with a GPU each if there are enough, else Gloo.

    Returns ("nccl", "cuda"), ("gloo", "cpu") or ("gloo", "cuda"); with the last, ranks may share a GPU.
    ValueError for unknown names, for pairs that do not go together, and where GPUs are missing; ImportError
    without torch.
    """
    for what, name, allowed in (("backend", backend, BACKENDS), ("device", device, DEVICES)):
        if name not in allowed:
            raise ValueError(f"unknown {what} {name!r}; allowed: {', '.join(allowed)}")
    try:
        import torch
        from torch import distributed as dist
    except ImportError as error:
        raise ImportError(f"processes that work together need torch ({error})") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = dist.is_available() and dist.is_nccl_available()
    if backend == "auto":
        backend = (
            "nccl" if device == "cuda" or (device == "auto" and nccl and gpus >= local_world_size) else "gloo"
        )
    if device == "auto":
        device = "cuda" if backend == "nccl" else "cpu"
    if (backend, device) == ("nccl", "cpu"):
        raise ValueError("backend 'nccl' works between GPUs only; allowed with device 'cpu': 'gloo'")
    if backend == "nccl" and not nccl:
        raise ValueError("backend 'nccl' is not in this torch; allowed here: 'gloo'")
    needed = local_world_size if backend == "nccl" else int(device == "cuda")
    if gpus < needed:
        raise ValueError(
            f"{local_world_size} ranks with backend {backend!r} on device 'cuda' need {needed} GPUs, "
            f"and this machine has {gpus}"
        )
    return backend, device


@contextmanager
def process_group(
    backend: str = "auto", device: str = "auto", timeout_s: float = 180.0, meeting: str = ""
) -> Iterator[Rank]:
    """This process as a rank of the default process group, as torchrun's environment says; without it, alone.

    A rank gets a GPU of its own as the current device. A collective that takes longer than `timeout_s` fails (NCCL's
    watchdog then ends the process within seconds, unless its variables are set to something else). Ranks
    wait for one another at the start (at most a minute longer) and at the end (at most twice as long), and leave
    together. Once a process; where processes with the same environment follow one another, as in a team, each set of
    them needs a name of its own for its `meeting`.

    ValueError as `backend_and_device`, for half an environment, and for a MASTER_PORT that is taken.
    """
    rank, local_rank, world_size, local_world_size = _torchrun_environment()
    backend, device = backend_and_device(backend, device, local_world_size)
    import torch
    from torch import distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        for name, value in _WATCHDOG.items():
            os.environ.setdefault(name, value)
    if device == "cuda":
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        store = rendezvous(rank, world_size, timeout)
        if meeting:
            store = dist.PrefixStore(meeting, store)
        # A rank that imports for longer than the others is no collective that hangs.
        _wait_for_all_ranks(store, "ready", world_size, timeout + timedelta(minutes=1))
    else:
        store = dist.HashStore()
    dist.init_process_group(
        backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size, timeout=timeout,
        device_id=torch.device(device) if backend == "nccl" else None,
    )  # fmt: skip
    complete = False
    try:
        yield Rank(rank, local_rank, world_size, local_world_size, device, backend)
        if device != "cpu":
            torch.cuda.synchronize()
        # One that left early would look like a crash to those that are still in its last collective.
        _wait_for_all_ranks(store, "done", world_size, 2 * timeout)
        complete = True
    finally:
        # Where something went wrong, leaving may wait for collectives that never end: the process's own end does not.
        if complete or world_size == 1:
            dist.destroy_process_group()


def rendezvous(rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, where ranks find one another; ValueError where the port is taken."""
    from torch import distributed as dist

    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        place = f"MASTER_PORT={os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']}"
        raise ValueError(
            f"{place} is taken by another program; allowed: any free port (torchrun --standalone finds one)"
        ) from error
    store.set_timeout(timeout)
    return store


def _wait_for_all_ranks(store: Store, state: str, world_size: int, timeout: timedelta) -> None:
    if store.add(f"ranks {state}", 1) == world_size:
        store.set(f"all ranks {state}", "")
    store.wait([f"all ranks {state}"], timeout)


def _torchrun_environment() -> list[int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if "RANK" not in os.environ:
        return [0, 0, 1, 1]
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"RANK is set, but not {', '.join(missing)}, which torchrun sets as well")
    return [int(os.environ[name]) for name in names]
