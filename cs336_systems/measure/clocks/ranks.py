"""Times of a step of several ranks, and of its phases: measured on each rank, the slowest counts.

Before each step the ranks wait for one another and for their devices, so that all begin at once. The step's time is the
host's, from there until its device has finished; a step takes as long as on the rank that took longest. Phases are
separated without synchronizing the device between them, which would keep communication from overlapping what follows:
CUDA events in the compute stream, one at each boundary. So a phase lasts from the end of its predecessor's work in
that stream to the end of its own; what runs in other streams counts where the compute stream waits for it. On a CPU
the host's clock at the boundaries does the same.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cs336_systems.launch.group import Rank

Phases = Mapping[str, Callable[[], Any]]
Times = dict[str, list[float]]
"""Phase, or "step" for the whole → ms of each measured step in order."""


def time_steps(
    phases: Phases, *, rank: Rank, warmup: int, steps: int,
    ranges: Callable[[str], AbstractContextManager[Any]] | None = None,
) -> Times:  # fmt: skip
    """Runs `warmup + steps` steps on this rank, and returns the times of the latter, the same on all ranks.

    phases: name → function, called in order once a step, by all ranks alike. ranges: makes the contexts `warm-up` and
    `step` around each step and one with a phase's name around each phase (`trace.profiler.span`).

    Of each step those times are returned that the slowest rank measured: so its phases add up to (nearly) the step.
    Exceptions of a phase propagate; other ranks then wait for this one until the group's timeout. ValueError for
    negative counts or no step.
    """
    if warmup < 0 or steps < 1:
        raise ValueError(f"warmup={warmup}, steps={steps}; at least 0 and 1 are needed")
    clock = _events if rank.device != "cpu" else _host
    ranges = ranges or nullcontext
    mine: list[dict[str, float]] = []
    for number in range(-warmup, steps):
        meet(rank)
        with ranges("step" if number >= 0 else "warm-up"):
            times = clock(phases, ranges)
        if number >= 0:
            mine.append(times)
    return slowest(gathered(mine, rank))


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


def pooled(turns: list[Times]) -> Times:
    """The steps of several turns of one candidate, one after the other."""
    return {phase: [ms for turn in turns for ms in turn[phase]] for phase in turns[0]}


def in_turns(names: list[str], steps: int, rounds: int) -> Iterator[tuple[int, str, int]]:
    """(turn, name, num_steps to measure): `rounds` turns of each, the order rotating from turn to turn.

    A name alone has all its steps in one turn; no turn is without a step. ValueError for no step or no round.
    """
    if steps < 1 or rounds < 1:
        raise ValueError(f"steps={steps}, rounds={rounds}; both must be at least 1")
    rounds = min(rounds, steps) if len(names) > 1 else 1
    for turn in range(rounds):
        share = steps * (turn + 1) // rounds - steps * turn // rounds
        for place in range(len(names)):
            yield turn, names[(place + turn) % len(names)], share


def columns(prefix: str) -> tuple[str, ...]:
    """The columns that `metrics` gives for one phase."""
    return tuple(f"{prefix}_ms_{name}" for name in ("p20", "p50", "p80"))


def metrics(times: Times) -> dict[str, float]:
    """`{phase}_ms_p20`, `_p50`, `_p80` of each phase and of the step."""
    from cs336_systems.measure.clocks.timing import Timing

    return {k: v for phase, ms in times.items() for k, v in Timing(tuple(ms)).metrics(phase).items()}


def median(times: Times, phase: str = "step") -> float:
    """The median of a phase, or of the step, in ms."""
    return statistics.median(times[phase])


def _host(phases: Phases, ranges: Callable[[str], AbstractContextManager[Any]]) -> dict[str, float]:
    times, begin = {}, time.perf_counter()
    last = begin
    for phase, function in phases.items():
        with ranges(phase):
            function()
        now = time.perf_counter()
        times[phase], last = (now - last) * 1e3, now
    return times | {"step": (last - begin) * 1e3}


def _events(phases: Phases, ranges: Callable[[str], AbstractContextManager[Any]]) -> dict[str, float]:
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
