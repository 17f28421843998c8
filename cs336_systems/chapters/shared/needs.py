"""No table: what a case needs of this machine; where it is missing, a `Skip` that says so."""

from __future__ import annotations

from cs336_systems.store import machine
from cs336_systems.store.status import Skip


def need_gpus(count: int) -> None:
    """Raises `Skip` unless there are so many GPUs, on all nodes together."""
    there = len(machine.gpu_names()) * machine.num_nodes()
    if there < count:
        gpus = f"{count} GPU{'s' * (count > 1)}"
        raise Skip(f"needs {gpus}; there {'is' if there == 1 else 'are'} {there}")


def need_memory(num_bytes: float | None) -> None:
    """Raises `Skip` unless so much of a CPU's memory is free; None: it is not known how much.

    A GPU says when its memory is full; here the system would end the process.
    """
    free = machine.free_memory_bytes("cpu")
    if num_bytes is not None and free is not None and num_bytes > free:
        raise Skip(f"needs about {num_bytes / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free")
