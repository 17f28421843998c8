"""Chapter `allreduce`: the time of an all-reduce, by backend, size and number of processes.

    cs336 run allreduce
    torchrun --nproc-per-node 2 -m cs336_systems run allreduce        # on processes that torchrun starts
    papermill book/allreduce.ipynb out.ipynb -p backend gloo -p world_size 2,4

fp32 tensors, summed in place over all processes: Gloo between CPU processes, NCCL between GPUs, one each. A group is
what one set of processes measures, all sizes from small to large.

all_reduce    `torch.distributed.all_reduce`
bucket        `parallel.ddp.average` of a `parallel.buckets.Bucket` with eight gradients in it: what data parallel
              training calls, without copying the gradients in

Those of one size take turns. Before each turn the tensor is written anew, since sums of sums grow, and the processes
wait for one another. Times of a call:

ms            On GPUs between CUDA events in the stream, one after each call. A kernel that spins for two milliseconds
              goes first, so that the host has queued all calls of the turn before the first begins: the GPU's own time.
              The first call of a turn does not count, because its processes do not begin at once. On CPUs by the host's
              clock, from the end of one call to the end of the next.
host_ms       By the host's clock, from the first call of a turn to the end of its last, over the number of calls: on
              GPUs with the launches, which bound small tensors.

Of each call the time of the slowest process counts; quantiles are over calls. `error` is the largest deviation of any
element on any process from the exact sum or mean, over the largest element; the tensors hold integers, which fp32 adds
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.chapters.shared import depends, on_ranks
from cs336_systems.chapters.shared.needs import need_gpus, need_memory
from cs336_systems.measure.clocks.turns import columns
from cs336_systems.store.status import Skip
from cs336_systems.store.table import Table

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # and the device that each is measured on
HOWS = ("all_reduce", "bucket")
DEPENDS = (
    *depends.CALL_CLOCK, "accounting/collectives.py", "accounting/operations.py",
    "chapters/allreduce/ranks.py", "parallel/buckets.py", "parallel/ddp.py",
)  # fmt: skip
GROUP = ("backend", "device", "world_size")
METRICS = (
    *columns(), "host_ms",
    "algorithm_gb_per_s",  # bytes of the tensor over the median, 10^9 bytes/s
    "bus_gb_per_s",  # 2(n - 1)/n times that; empty for one process
    "error", "warmups", "calls", "library",
)  # fmt: skip

MB = 2**20
HANDOUT = (MB, 10 * MB, 100 * MB, 1024 * MB)
_BETWEEN = {  # powers of four, for the latency and where it meets the bandwidth; a usual size of buckets
    "gloo": tuple(2**k for k in range(12, 28, 2)),
    "nccl": (*(2**k for k in range(12, 30, 2)), 25 * MB),
}
_WORLD_SIZES = {"gloo": (2, 4, 6), "nccl": (2, 4, 6, 8)}

WARMUPS = 5  # calls, the one that is checked among them
ROUNDS = 5
CALLS = 20  # a turn at the most: sums of sums stay far from fp32's largest number
TURN_MS = 100.0  # a turn of slow calls has fewer of them;
SLOW_MS = 100.0  # from here on there are three turns of one call
PIECES = 8  # gradients in a bucket


@dataclass(frozen=True)
class Case:
    """One measurement. `num_bytes`: of each process's tensor. `repeat` 1 measures the same thing again."""

    backend: str
    device: str
    world_size: int
    num_bytes: int
    how: str = "all_reduce"
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The handout's sizes and numbers of processes with sizes between them, or a few for two CPU cores."""
    if preset == "smoke":
        sizes = (2**12, 2**16, MB, 4 * MB, 16 * MB)
        return [case for n in (2, 4) for case in _cases("gloo", n, sizes, pairs=(MB,))]
    cases = []
    for backend, world_sizes in _WORLD_SIZES.items():
        sizes = sorted({*HANDOUT, *_BETWEEN[backend]})
        # of what takes Gloo seconds, once is enough
        pairs = HANDOUT if backend == "nccl" else HANDOUT[:2]
        for world_size in world_sizes:
            cases += _cases(backend, world_size, sizes, pairs)
    return cases


def _cases(backend: str, world_size: int, sizes: Sequence[int], pairs: Sequence[int]) -> list[Case]:
    """A case for each size; for those in `pairs` the same again (A/A), and a bucket."""
    device = BACKENDS[backend]
    cases = []
    for size in sizes:
        cases.append(Case(backend, device, world_size, size))
        if size in pairs:
            cases.append(Case(backend, device, world_size, size, repeat=1))
            cases.append(Case(backend, device, world_size, size, "bucket"))
    return cases


def refuse(case: Case) -> None:
    """Raises `Skip` where this machine cannot run the case, and says what it needs."""
    if case.backend == "nccl":
        need_gpus(case.world_size)
        from torch import distributed as dist

        if not dist.is_nccl_available():
            raise Skip("needs a torch with NCCL")
        return
    held = 4 if case.how == "bucket" else 2  # tensors of this size that a process has at once, at the most
    need_memory(case.world_size * held * case.num_bytes)


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The metrics of the cases of one set of processes."""
    where = {"backend": cases[0].backend, "device": cases[0].device}
    return on_ranks.measured("cs336_systems.chapters.allreduce.ranks:measure", cases, refuse, **where)


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
