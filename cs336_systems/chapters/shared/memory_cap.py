"""No table: a GPU that has less memory than it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cs336_systems.store.status import Skip

_GIB = 2**30


@contextmanager
def capped(cap_gib: int, device: str) -> Iterator[None]:
    """Within its block, this process can take `cap_gib` GiB of the GPU's memory, what its allocator caches included.

    0 is no cap. (The context and the code of the kernels do not count.) Raises `Skip` where there is nothing to
    cap, ValueError for a negative number.
    """
    if cap_gib < 0:
        raise ValueError(f"cap_gib={cap_gib}; allowed: 0 (the whole GPU) or a number of GiB above it")
    if cap_gib == 0:
        yield
        return
    if device == "cpu":
        raise Skip("needs a CUDA device")
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    if total <= cap_gib * _GIB:
        raise Skip(f"needs a GPU with more than {cap_gib} GiB")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap_gib * _GIB / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
