"""Chapter `allreduce`, on a rank: what `chapters.allreduce` launches, on GPUs with NCCL or on a CPU with Gloo."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed as dist

from cs336_systems.accounting import bus_factor
from cs336_systems.chapters.allreduce.measure import (
    CALLS,
    MB,
    PIECES,
    ROUNDS,
    SLOW_MS,
    TURN_MS,
    WARMUPS,
    Case,
)
from cs336_systems.launch.group import Rank
from cs336_systems.measure.clocks.turns import Phases, Samples, Times, take_turns
from cs336_systems.measure.device import Watch, give_back
from cs336_systems.parallel.buckets import Bucket
from cs336_systems.parallel.ddp import average
from cs336_systems.store.status import oom_is_a_row

_PERIOD = 65_521  # elements after which a tensor's content repeats; a prime


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
        self._rank, self._case = rank, case
        self._patterns = torch.stack([_pattern(r) for r in range(rank.world_size)]).to(rank.device)
        numel = case.num_bytes // 4
        if case.how == "all_reduce":
            self._tensor = torch.empty(numel, device=rank.device)
            self.call: Callable[[], Any] = lambda: dist.all_reduce(self._tensor)
        else:
            pieces = [torch.empty(numel // PIECES, device=rank.device) for _ in range(PIECES)]
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
        if estimate > SLOW_MS:
            self.turns = (3, 1)
        else:
            self.turns = (ROUNDS, max(1, min(CALLS, int(TURN_MS / estimate))))
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
        for part, pattern in _tiles(self._tensor, self._patterns[self._rank.rank]):
            part.copy_(pattern)
        if self._rank.device == "cpu":
            dist.barrier()
        else:
            torch.cuda.synchronize()
            dist.barrier(device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()  # the barrier is work for the device, too

    def _deviation(self) -> float:
        exact = self._patterns.sum(0)
        if self._case.how == "bucket":
            exact = exact / self._case.world_size
        worst = [(part - pattern).abs().max() for part, pattern in _tiles(self._tensor, exact)]
        return float(torch.stack(worst).max() / exact.max())


def _pattern(rank: int) -> torch.Tensor:
    """What a rank's tensor holds, again and again: integers of its own from 1 to 255, as fp32."""
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
    return _slowest(rank, [number])[0]


def _slowest(rank: Rank, times: list[float]) -> list[float]:
    """For each call the largest of the ranks' times."""
    value = torch.tensor(times, dtype=torch.float64, device=rank.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.tolist()


def _library(backend: str) -> str:
    """The library that communicates, with its version where it tells."""
    if backend != "nccl":
        return backend
    return "nccl " + ".".join(map(str, torch.cuda.nccl.version()))
