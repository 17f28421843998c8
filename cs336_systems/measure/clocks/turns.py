"""The one way in which this project times things that are compared: in turns, in one process.

    samples = take_turns({"ours": {"forward": f}, "theirs": {"forward": g}}, Calls("cuda"))
    samples["ours"].p50("forward")

Whatever drifts (temperature, clocks, a neighbor on the CPU) then affects all candidates alike. A candidate is its
phases (name → function of no arguments, run in order), or a context manager that makes them for each of its turns. A
*clock* says what a turn is: `calls.Calls` times single calls, `steps.Steps` a step's phases one after another,
`ranks.RankSteps` the same on several ranks.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cs336_systems.measure.device import Watch, give_back, medians
from cs336_systems.store.status import failure_is_a_row

Phases = Mapping[str, Callable[[], Any]]
Times = Mapping[str, Sequence[float]]
"""Phase → ms of each step or call, in order."""
QUANTILES = ("p20", "p50", "p80")
Name = TypeVar("Name")


# ------------------------------------------------------------------------------------------------ statistics
def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile, 0 ≤ q ≤ 1, by linear interpolation between samples; ValueError for none."""
    if not samples or not 0 <= q <= 1:
        raise ValueError(
            f"quantile {q} of {len(samples)} samples; it needs 0 ≤ q ≤ 1 and at least one sample"
        )
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


_STATISTICS: dict[str, Callable[[list[float]], Any]] = {
    **{f"p{percent}": lambda ms, q=percent / 100: quantile(ms, q) for percent in (20, 50, 80)},
    "mean": statistics.fmean,
    "std": lambda ms: statistics.stdev(ms) if len(ms) > 1 else 0.0,  # of the sample
    "min": min,
    "max": max,
    "each": lambda ms: " ".join(f"{x:.5g}" for x in ms),  # all of them, as one text
}


def columns(prefix: str = "", which: Sequence[str] = QUANTILES) -> tuple[str, ...]:
    """The names of the columns of a row that `Samples.row` gives: `forward_ms_p20`, or `ms_p20` without a prefix."""
    return tuple(f"{prefix}_ms_{name}" if prefix else f"ms_{name}" for name in which)


def each(text: Any) -> list[float]:
    """The numbers of an `_each` column of a row; empty where it is."""
    return (
        [float(part) for part in str(text).split()] if isinstance(text, str | float) and text == text else []
    )


@dataclass
class Samples:
    """What was measured of one candidate: its turns in order, and the device's clock and power meanwhile."""

    turns: list[Times] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    """Of each turn."""

    def ms(self, phase: str) -> list[float]:
        """A phase's times in ms, of all turns."""
        return [ms for turn in self.turns for ms in turn[phase]]

    def p50(self, phase: str) -> float:
        """The median of a phase, in ms."""
        return quantile(self.ms(phase), 0.5)

    def row(self, phase: str, which: Sequence[str] = QUANTILES, prefix: str | None = None) -> dict[str, Any]:
        """The columns of a phase: QUANTILES, or others of mean, std, min, max, each."""
        ms = self.ms(phase)
        values = (_STATISTICS[name](ms) for name in which)
        return dict(zip(columns(phase if prefix is None else prefix, which), values, strict=True))

    def summed(self, phase: str) -> Samples:
        """The sum of the phases, step by step: the whole step, as a phase of that name."""
        whole = [{phase: [sum(step) for step in zip(*turn.values(), strict=True)]} for turn in self.turns]
        return Samples(whole, self.watches)

    def clocks(self) -> dict[str, float | None]:
        """The columns `sm_mhz` and `power_w`: medians of all readings."""
        return medians(self.watches)


# ------------------------------------------------------------------------------------------------ in turns
class Clock(Protocol):
    """What a turn is: how often the phases run, and how their times are taken."""

    def rounds(self, num_candidates: int) -> int:
        """How many turns each candidate has."""
        ...

    def turn(self, phases: Phases, turn: int, rounds: int, so_far: Samples) -> tuple[Times, Watch] | None:
        """One turn of a candidate, and what read the device's clock and power meanwhile; None where it sits out."""
        ...


def order(count: int, turn: int) -> list[int]:
    """The order of a turn's candidates: to and fro (0, 1, −1, 2, −2, …), one further each time.

    An even number of candidates has every one after every other one once in as many turns, an odd number twice at most
    (Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949): what one
    leaves behind (heat, a full cache) is spread over the others.
    """
    to_and_fro = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
    return [(i + turn) % count for i in to_and_fro]


def take_turns(
    candidates: Mapping[Name, Phases | Callable[[], AbstractContextManager[Phases]]], clock: Clock
) -> dict[Name, Samples]:
    """Times the candidates' phases in turns, by a clock. Exceptions propagate at once, out of memory too."""
    samples: dict[Name, Samples] = {name: Samples() for name in candidates}
    names, rounds = list(candidates), clock.rounds(len(candidates))
    for turn in range(rounds):
        for place in order(len(names), turn):
            candidate, found = candidates[names[place]], samples[names[place]]
            entered = candidate() if callable(candidate) else contextlib.nullcontext(candidate)
            with entered as phases:
                if measured := clock.turn(phases, turn, rounds, found):
                    found.turns.append(measured[0])
                    found.watches.append(measured[1])
            del entered, phases  # or what they hold is there while the next candidate's is made
    return samples


# ------------------------------------------------------------------------------------------------ cases
@dataclass(eq=False)
class Candidate:
    """One case while it is measured: its row's columns so far, and what is timed."""

    case: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    phases: Phases | Callable[[], AbstractContextManager[Phases]] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)

    @property
    def ok(self) -> bool:
        """Whether nothing has kept it from being measured."""
        return "status" not in self.metrics


def prepared(
    cases: Iterable[Any], prepare: Callable[[Candidate], None], device: str = "cpu"
) -> list[Candidate]:
    """A candidate for each case. `prepare` tries it out and gives it its phases; what fails is the row's status, and
    gives back what it holds of the device."""
    candidates = [Candidate(case) for case in cases]
    for candidate in candidates:
        with failure_is_a_row(candidate.metrics):
            prepare(candidate)
        if not candidate.ok:
            give_back(device)  # the exception's frames may hold tensors
    return candidates


def time_together(
    candidates: Sequence[Candidate], clock: Clock, tidy: Callable[[], None] = lambda: None
) -> list[Candidate]:
    """Gives each candidate that is ok its `samples`, and returns those that have them.

    What fails together (all may be too large, though each one fits) is timed alone, after `tidy`; what fails alone has
    a status.
    """
    ready = [candidate for candidate in candidates if candidate.ok]
    failed: dict[str, Any] = {}
    if len(ready) > 1:
        with failure_is_a_row(failed):
            for candidate, samples in take_turns({c: c.phases for c in ready}, clock).items():
                candidate.samples = samples
            return ready
        tidy()
    for candidate in ready:
        if candidate.ok:  # its metrics may be another's, too, that has failed meanwhile
            with failure_is_a_row(candidate.metrics):
                candidate.samples = take_turns({"": candidate.phases}, clock)[""]
            tidy()
    return [candidate for candidate in ready if candidate.ok]
