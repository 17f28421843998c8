"""Times of a step's phases, one step after another: the host's clock, and the device synchronized after each phase.

This is how the handout asks for whole models to be timed. (Kernels are timed by CUDA events: `timing`.) Every
step's time is kept, the warm-up's too, so that a table can say how they vary and a figure can draw them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Phases = Mapping[str, Callable[[], Any]]


@dataclass
class Series:
    """The times in ms of one phase, in order: of the warm-up steps, and of the measured ones."""

    warmup_ms: list[float]
    steps_ms: list[float]

    @property
    def mean(self) -> float:
        """Of the measured steps, in ms."""
        return statistics.fmean(self.steps_ms)

    @property
    def std(self) -> float:
        """The sample standard deviation of the measured steps, in ms; 0 for a single one."""
        return statistics.stdev(self.steps_ms) if len(self.steps_ms) > 1 else 0.0

    @property
    def p50(self) -> float:
        """The median of the measured steps, in ms."""
        return statistics.median(self.steps_ms)

    def metrics(self, prefix: str) -> dict[str, float | str]:
        """The columns of a row: `{prefix}_ms_mean`, `_std`, `_p50`, and `_each`: all measured steps, as one text."""
        each = " ".join(f"{ms:.5g}" for ms in self.steps_ms)
        values = {"mean": self.mean, "std": self.std, "p50": self.p50, "each": each}
        return {f"{prefix}_ms_{name}": value for name, value in values.items()}


def columns(prefix: str) -> tuple[str, ...]:
    """The names of the columns that `Series.metrics` gives."""
    return tuple(f"{prefix}_ms_{name}" for name in ("mean", "std", "p50", "each"))


def each(text: Any) -> list[float]:
    """The numbers of an `_each` column of a row; empty where it is."""
    return (
        [float(part) for part in str(text).split()] if isinstance(text, str | float) and text == text else []
    )


def synchronizer(device: str) -> Callable[[], None]:
    """A function that synchronizes a device (`"cpu"`, `"cuda"`)."""
    if device == "cpu":
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def time_phases(
    candidates: Mapping[str, Phases], *, device: str, warmup: int = 5, steps: int = 10, rounds: int = 2,
    before: Callable[[str], Any] | None = None,
    ranges: Callable[[str], AbstractContextManager[Any]] | None = None,
    watches: Mapping[str, AbstractContextManager[Any]] | None = None,
) -> dict[str, dict[str, Series]]:  # fmt: skip
    """Times the phases of several candidates, which take turns; returns candidate → phase → its times.

    candidates: name → phase → a function of no arguments; a candidate's phases run in their order, once a step.
    warmup:     warm-up steps of each candidate before its first turn; their times are kept apart.
    steps:      measured steps of each, spread over `rounds` turns. Each later turn begins with one step that is not
                kept: it brings back the caches that the other candidates have used meanwhile.
    before:     called with the candidate's name at the beginning of each of its turns.
    ranges:     makes the contexts `warm-up` and `step` around each step, and one with a phase's name around each phase:
                `trace.profiler.span`, for a trace.
    watches:    candidate → what is entered for each of its turns and left after it: `timing.Watch`, for its clocks.

    The device is synchronized before the first phase and after each one. Exceptions of a phase propagate. Raises
    ValueError for counts that are negative, and for `steps` or `rounds` below 1.
    """
    if warmup < 0 or steps < 1 or rounds < 1:
        raise ValueError(f"warmup={warmup}, steps={steps}, rounds={rounds}; at least 0, 1 and 1 are needed")
    wait, ranges = synchronizer(device), ranges or nullcontext
    series = {name: {phase: Series([], []) for phase in phases} for name, phases in candidates.items()}
    rounds = min(rounds, steps) if len(candidates) > 1 else 1
    names = list(candidates)
    for turn in range(rounds):
        share = steps * (turn + 1) // rounds - steps * turn // rounds
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            with (watches or {}).get(name, nullcontext()):
                if before is not None:
                    before(name)
                for step in range(-(warmup if turn == 0 else 1), share):
                    with ranges("step" if step >= 0 else "warm-up"):
                        times = _one_step(candidates[name], wait, ranges)
                    for phase, ms in times.items():
                        if step >= 0:
                            series[name][phase].steps_ms.append(ms)
                        elif turn == 0:
                            series[name][phase].warmup_ms.append(ms)
    return series


def _one_step(
    phases: Phases, wait: Callable[[], None], ranges: Callable[[str], AbstractContextManager[Any]]
) -> dict[str, float]:
    times = {}
    wait()
    for phase, fn in phases.items():
        with ranges(phase):
            start = time.perf_counter()
            fn()
            wait()
        times[phase] = (time.perf_counter() - start) * 1e3
    return times


def pooled(series: Sequence[Series]) -> Series:
    """The sum of several phases' times, step by step: the time of the whole step."""
    return Series(
        [sum(times) for times in zip(*(s.warmup_ms for s in series), strict=True)],
        [sum(times) for times in zip(*(s.steps_ms for s in series), strict=True)],
    )
