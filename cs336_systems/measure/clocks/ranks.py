"""The clock of a step of several ranks, and of its phases: measured on each rank, the slowest counts.

Before each step the ranks wait for one another and for their devices, so that all begin at once. The step's time is the
host's, from there until its device has finished; a step takes as long as on the rank that took longest. Phases are
separated without synchronizing the device between them, which would keep communication from overlapping what follows:
CUDA events in the compute stream, one at each boundary. So a phase lasts from the end of its predecessor's work in
that stream to the end of its own; what runs in other streams counts where the compute stream waits for it. On a CPU
the host's clock at the boundaries does the same.
"""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from cs336_systems.measure.clocks.steps import Ranges, share
from cs336_systems.measure.clocks.turns import Phases, Samples, Times
from cs336_systems.measure.device import Watch

if TYPE_CHECKING:
    from cs336_systems.launch.group import Rank


class RankSteps:
    """The clock (`turns.Clock`) of steps that all ranks make alike; all of them take the same turns.

    warmup:      steps that do not count, before those of each turn.
    steps:       measured steps of each candidate, over all turns.
    num_rounds:  turns of each candidate; one that is alone has all its steps in one, and no turn is without a step.
    ranges, watched:  as for `steps.Steps`; rank 0 reads.

    Of each step those times are kept that the slowest rank measured, the same on all ranks: so its phases add up to
    (nearly) `step`, the whole. Exceptions of a phase propagate; other ranks then wait for this one until the group's
    timeout. ValueError for negative counts or no step or round.
    """

    def __init__(
        self, rank: Rank, *, warmup: int, steps: int, num_rounds: int = 1, ranges: Ranges = nullcontext,
        watched: bool = True,
    ) -> None:  # fmt: skip
        if warmup < 0 or steps < 1 or num_rounds < 1:
            raise ValueError(
                f"warmup={warmup}, steps={steps}, num_rounds={num_rounds}; at least 0, 1 and 1 are needed"
            )
        self.rank, self.warmup, self.steps, self.num_rounds = rank, warmup, steps, num_rounds
        self.ranges, self.watched = ranges, watched

    def rounds(self, num_candidates: int) -> int:
        """As `turns.Clock`."""
        return min(self.num_rounds, self.steps) if num_candidates > 1 else 1

    def turn(self, phases: Phases, turn: int, rounds: int, so_far: Samples) -> tuple[Times, Watch]:
        """As `turns.Clock`. One rank reads clock and power, seldom; a thread takes time from the one that launches."""
        one_step = _events if self.rank.device != "cpu" else _host
        mine: list[dict[str, float]] = []
        with Watch(0.1 if self.watched and self.rank.rank == 0 else None) as watch:
            for number in range(-self.warmup, share(self.steps, turn, rounds)):
                meet(self.rank)
                with self.ranges("step" if number >= 0 else "warm-up"):
                    times = one_step(phases, self.ranges)
                if number >= 0:
                    mine.append(times)
        return slowest(gathered(mine, self.rank)), watch


def slowest(by_rank: list[list[dict[str, float]]]) -> Times:
    """From rank → step → phase → ms to phase → ms of each step, as the rank with the longest "step" measured it."""
    chosen = [max(step, key=lambda times: times["step"]) for step in zip(*by_rank, strict=True)]
    return {phase: [times[phase] for times in chosen] for phase in chosen[0]}


def meet(rank: Rank) -> None:
    """Returns when all ranks have come here and their devices have finished."""
    import torch
    import torch.distributed as dist

    if rank.device != "cpu":
        torch.cuda.synchronize()
    flag = torch.zeros(1, device=rank.device)
    dist.all_reduce(flag)
    if rank.device != "cpu":
        torch.cuda.synchronize()


def gathered(value: Any, rank: Rank) -> list[Any]:
    """Each rank's value, by rank; it must be picklable."""
    import torch.distributed as dist

    everyones: list[Any] = [None] * rank.world_size
    dist.all_gather_object(everyones, value)
    return everyones


def _host(phases: Phases, ranges: Ranges) -> dict[str, float]:
    times, begin = {}, time.perf_counter()
    last = begin
    for phase, function in phases.items():
        with ranges(phase):
            function()
        now = time.perf_counter()
        times[phase], last = (now - last) * 1e3, now
    return times | {"step": (last - begin) * 1e3}


def _events(phases: Phases, ranges: Ranges) -> dict[str, float]:
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)]
    begin = time.perf_counter()
    marks[0].record()
    for mark, (phase, function) in zip(marks[1:], phases.items(), strict=True):
        with ranges(phase):
            function()
        mark.record()
    torch.cuda.synchronize()
    step = (time.perf_counter() - begin) * 1e3
    spans = itertools.pairwise(marks)
    return {p: a.elapsed_time(b) for p, (a, b) in zip(phases, spans, strict=True)} | {"step": step}
