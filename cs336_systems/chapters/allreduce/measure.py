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

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import bus_factor
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.clocks.turns import Phases, Samples, Times, columns, take_turns
from cs336_systems.measure.device import Watch, give_back
from cs336_systems.store import machine
from cs336_systems.store.status import Skip, oom_is_a_row
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

    from cs336_systems.launch.group import Rank

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # and the device that each is measured on
HOWS = ("all_reduce", "bucket")
CHOICES = {"backend": tuple(BACKENDS), "device": tuple(BACKENDS.values()), "how": HOWS}
DEPENDS = (
    *depends.CALL_CLOCK, "accounting/collectives.py", "accounting/operations.py", "parallel/buckets.py",
    "parallel/ddp.py",
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
_TURN_MS = 100.0  # a turn of slow calls has fewer of them;
_SLOW_MS = 100.0  # from here on there are three turns of one call
_PIECES = 8  # gradients in a bucket
_ALIGNMENT = 16  # bytes, of each of them
_PERIOD = 65_521  # elements after which a tensor's content repeats; a prime


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


def estimate_s(group: Sequence[Case]) -> float:
    """Seconds that a group takes, roughly: starting the processes, and calls at 1 GB/s or 200 GB/s."""
    case = group[0]
    if case.backend == "nccl" and len(machine.gpu_names()) * machine.num_nodes() < case.world_size:
        return 0.0
    rate, start = (1e9, 6.0) if case.backend == "gloo" else (200e9, 12.0)
    total = start
    for case in group:
        call = 1e-4 + max(bus_factor(case.world_size), 1) * case.num_bytes / rate
        timed = min(ROUNDS * CALLS, max(3, ROUNDS * _TURN_MS / 1e3 / call))
        total += call * (WARMUPS + timed) * (2 if case.backend == "nccl" else 1)
    return total


# ------------------------------------------------------------------------------------------------ what is refused
def check(case: Case) -> None:
    """ValueError for what is no case at all, on any machine."""
    if case.backend not in BACKENDS:
        raise ValueError(f"unknown backend {case.backend!r}; allowed: {', '.join(BACKENDS)}")
    if case.device != BACKENDS[case.backend]:
        raise ValueError(
            f"device {case.device!r} with backend {case.backend!r}; allowed: {BACKENDS[case.backend]}"
        )
    if case.how not in HOWS:
        raise ValueError(f"unknown how {case.how!r}; allowed: {', '.join(HOWS)}")
    if case.world_size < 1:
        raise ValueError(f"world_size={case.world_size}; it must be at least 1")
    unit = _PIECES * _ALIGNMENT
    if case.num_bytes < 1 or case.num_bytes % unit:
        raise ValueError(f"num_bytes={case.num_bytes}; it must be a positive multiple of {unit}")


def refuse(case: Case) -> None:
    """Raises `Skip` where this machine cannot run the case, and says what it needs."""
    if case.backend == "nccl":
        if len(machine.gpu_names()) * machine.num_nodes() < case.world_size:
            raise Skip(f"needs {case.world_size} GPU{'s' * (case.world_size > 1)}")
        from torch import distributed as dist

        if not dist.is_nccl_available():
            raise Skip("needs a torch with NCCL")
        return
    held = 4 if case.how == "bucket" else 2  # tensors of this size that a process has at once, at the most
    needed, free = case.world_size * held * case.num_bytes, machine.free_memory_bytes("cpu")
    if free is not None and needed > free:
        raise Skip(f"needs about {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free")


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> Iterable[dict[str, Any]]:
    """The metrics of the cases of one set of processes.

    ValueError as `check`; `launch.start.LaunchError` where a process fails.
    """
    from cs336_systems.launch.start import launch

    results: list[dict[str, Any]] = [{} for _ in cases]
    for case, metrics in zip(cases, results, strict=True):
        check(case)
        with oom_is_a_row(metrics):
            refuse(case)
    due = [i for i, metrics in enumerate(results) if "status" not in metrics]
    if due:
        first = cases[0]
        by_rank = launch(
            f"{__name__}:measure", first.world_size, {"cases": [dataclasses.asdict(cases[i]) for i in due]},
            backend=first.backend, device=first.device, timeout_s=120 + 10 * estimate_s(cases),
            log=functools.partial(print, flush=True),
        )  # fmt: skip
        for i, metrics in zip(due, by_rank[0], strict=True):
            results[i] = metrics
    return results


def measure(rank: Rank, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the cases, the same on all ranks; called on each of them by `launch`."""
    metrics: list[dict[str, Any]] = []
    for _, group in itertools.groupby((Case(**case) for case in cases), key=lambda c: c.num_bytes):
        of_this_size = list(group)
        for case, found in zip(of_this_size, _measure_size(rank, of_this_size), strict=True):
            if rank.rank == 0:
                print(_line(case, found))
            metrics.append(found)
    return metrics


def _line(case: Case, metrics: dict[str, Any]) -> str:
    said = metrics.get("status") or f"{metrics['ms_p50']:.4g} ms, {metrics['algorithm_gb_per_s']:.3g} GB/s"
    again = " again" if case.repeat else ""
    return f"{case.backend} {case.world_size} x {case.num_bytes / MB:g} MB, {case.how}{again}: {said}"


def _measure_size(rank: Rank, cases: list[Case]) -> list[dict[str, Any]]:
    """The cases of one size in turns; when this returns, their memory is free again."""
    trial: dict[str, Any] = {}
    with oom_is_a_row(trial):
        operations = {case: _Operation(rank, case) for case in cases}
    if _largest(rank, float("status" in trial)) > 0:  # on any rank: all give up, or they deadlock
        return [{"status": "oom"} for _ in cases]
    results = {case: operation.warm_up() for case, operation in operations.items()}
    phases = {case: {"call": operation.call} for case, operation in operations.items()}
    for case, samples in take_turns(phases, Queued(rank, operations)).items():
        metrics, rate = results[case], case.num_bytes / samples.p50("call") / 1e6
        metrics |= samples.row("call", prefix="") | {
            "host_ms": samples.p50("host"),
            "algorithm_gb_per_s": rate,
            "bus_gb_per_s": rate * bus_factor(case.world_size) or None,
            "warmups": WARMUPS,
            "calls": len(samples.ms("call")),
            "library": _library(case.backend),
        }
        tolerance = case.world_size * 2.0**-22
        if not metrics["error"] <= tolerance:
            metrics["status"] = (
                f"error: {case.how} is off by {metrics['error']:.2g}; allowed: {tolerance:.2g}"
            )
    del operations, phases
    give_back(rank.device)
    return [results[case] for case in cases]


class Queued:
    """The clock (`turns.Clock`) of operations of all ranks, whose turns begin when the host has queued their calls.
    `call`: ms of each call, `host`: of one on the host; of the slowest rank."""

    def __init__(self, rank: Rank, operations: Mapping[Case, _Operation]) -> None:
        self._rank, self._of = rank, {operation.call: operation for operation in operations.values()}

    def rounds(self, num_candidates: int) -> int:
        """As `turns.Clock`."""
        return ROUNDS

    def turn(self, phases: Phases, turn: int, rounds: int, so_far: Samples) -> tuple[Times, Watch] | None:
        """As `turns.Clock`; clock and power are not read."""
        operation = self._of[phases["call"]]
        if turn >= operation.turns[0]:
            return None
        spans, wall = operation.turn(operation.turns[1])
        return {"call": _slowest(self._rank, spans), "host": _slowest(self._rank, [wall])}, Watch(None)


class _Operation:
    """A tensor on this rank, and what all-reduces it."""

    def __init__(self, rank: Rank, case: Case) -> None:
        import torch
        from torch import distributed as dist

        from cs336_systems.parallel.buckets import Bucket
        from cs336_systems.parallel.ddp import average

        self._rank, self._case = rank, case
        self._patterns = torch.stack([_pattern(r) for r in range(rank.world_size)]).to(rank.device)
        numel = case.num_bytes // 4
        if case.how == "all_reduce":
            self._tensor = torch.empty(numel, device=rank.device)
            self.call: Callable[[], Any] = lambda: dist.all_reduce(self._tensor)
        else:
            pieces = [torch.empty(numel // _PIECES, device=rank.device) for _ in range(_PIECES)]
            parameters = [torch.nn.Parameter(piece) for piece in pieces]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            self._tensor = Bucket(parameters).gathered()
            assert self._tensor.nbytes == case.num_bytes, "pieces leave no gaps"
            self.call = lambda: average(self._tensor, dist.group.WORLD)
        self.turns = (ROUNDS, CALLS)  # and calls in each; `warm_up` says

    def warm_up(self) -> dict[str, Any]:
        """WARMUPS calls, of which the first is checked; sets `turns`."""
        self._begin()
        self.call()
        metrics = {"error": _largest(self._rank, self._deviation())}
        _, wall = self.turn(WARMUPS - 1, leave_out=False)
        estimate = _largest(self._rank, wall)
        if estimate > _SLOW_MS:
            self.turns = (3, 1)
        else:
            self.turns = (ROUNDS, max(1, min(CALLS, int(_TURN_MS / estimate))))
        return metrics

    def turn(self, calls: int, leave_out: bool = True) -> tuple[list[float], float]:
        """Times of `calls` calls in ms, and the host's time of a call, on this rank.

        leave_out: on a GPU one more call goes first, and does not count.
        """
        self._begin()
        if self._rank.device == "cpu":
            marks = [time.perf_counter()]
            for _ in range(calls):
                self.call()
                marks.append(time.perf_counter())
            spans = [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
            return spans, (marks[-1] - marks[0]) * 1e3 / calls
        import torch

        start = time.perf_counter()
        for _ in range(calls):
            self.call()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) * 1e3 / calls
        if not leave_out:
            return [], wall
        self._begin()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        torch.cuda._sleep(4_000_000)  # clock cycles: two milliseconds
        for event in events:
            self.call()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)], wall

    def _begin(self) -> None:
        """Writes the tensor anew, and waits for the other ranks and for the devices."""
        import torch
        from torch import distributed as dist

        for part, pattern in _tiles(self._tensor, self._patterns[self._rank.rank]):
            part.copy_(pattern)
        if self._rank.device == "cpu":
            dist.barrier()
        else:
            torch.cuda.synchronize()
            dist.barrier(device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()  # the barrier is work for the device, too

    def _deviation(self) -> float:
        import torch

        exact = self._patterns.sum(0)
        if self._case.how == "bucket":
            exact = exact / self._case.world_size
        worst = [(part - pattern).abs().max() for part, pattern in _tiles(self._tensor, exact)]
        return float(torch.stack(worst).max() / exact.max())


def _pattern(rank: int) -> torch.Tensor:
    """What a rank's tensor holds, again and again: integers of its own from 1 to 255, as fp32."""
    import torch

    generator = torch.Generator().manual_seed(336 + rank)
    return torch.randint(1, 256, (_PERIOD,), generator=generator).float()


def _tiles(tensor: torch.Tensor, pattern: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a tensor (numel,), some 64 MB each, with the pattern that belongs there."""
    rows = tensor.numel() // _PERIOD
    whole = tensor[: rows * _PERIOD].view(rows, _PERIOD)
    for start in range(0, rows, 256):
        yield whole[start : start + 256], pattern
    rest = tensor[rows * _PERIOD :]
    if rest.numel():
        yield rest, pattern[: rest.numel()]


def _largest(rank: Rank, number: float) -> float:
    """The largest of the ranks' numbers, on all of them."""
    import torch
    from torch import distributed as dist

    value = torch.tensor([number], dtype=torch.float64, device=rank.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _slowest(rank: Rank, times: list[float]) -> list[float]:
    """For each call the largest of the ranks' times."""
    import torch
    from torch import distributed as dist

    value = torch.tensor(times, dtype=torch.float64, device=rank.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.tolist()


def _library(backend: str) -> str:
    """The library that communicates, with its version where it tells."""
    if backend != "nccl":
        return backend
    import torch

    return "nccl " + ".".join(map(str, torch.cuda.nccl.version()))


TABLE = Table(
    __name__, Case, METRICS, GROUP, grid, run_group, DEPENDS, choices=CHOICES, estimate_s=estimate_s
)
