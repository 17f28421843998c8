"""The clock of whole steps: the host's, and the device synchronized after each phase, as the handout asks.

(Kernels are timed by CUDA events: `calls`.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cs336_systems.measure.clocks.turns import Phases, Samples, Times
from cs336_systems.measure.device import Watch, synchronizer

Ranges = Callable[[str], AbstractContextManager[Any]]
"""Makes the contexts `warm-up` and `step` around each step, and one with a phase's name around each phase."""


def share(steps: int, turn: int, rounds: int) -> int:
    """How many of a candidate's steps belong to a turn."""
    return steps * (turn + 1) // rounds - steps * turn // rounds


class Steps:
    """The clock (`turns.Clock`) of steps whose phases run one after another.

    warmup:      steps of a candidate before its first turn. Each later turn begins with one step that does not count:
                 it brings back the caches that the other candidates have used meanwhile.
    steps:       measured steps of each candidate, over all turns.
    num_rounds:  turns of each candidate; one that is alone has all its steps in one.
    ranges:      `trace.profiler.span`, for a trace.
    watched:     whether clock and power are read meanwhile.

    ValueError for counts that are negative, and for `steps` or `num_rounds` below 1.
    """

    def __init__(
        self, device: str, *, warmup: int = 5, steps: int = 10, num_rounds: int = 2, ranges: Ranges = nullcontext,
        watched: bool = False,
    ) -> None:  # fmt: skip
        if warmup < 0 or steps < 1 or num_rounds < 1:
            raise ValueError(
                f"warmup={warmup}, steps={steps}, num_rounds={num_rounds}; at least 0, 1 and 1 are needed"
            )
        self.warmup, self.steps, self.num_rounds, self.ranges = warmup, steps, num_rounds, ranges
        self.watched, self._wait = watched, synchronizer(device)

    def rounds(self, num_candidates: int) -> int:
        """As `turns.Clock`."""
        return min(self.num_rounds, self.steps) if num_candidates > 1 else 1

    def turn(self, phases: Phases, turn: int, rounds: int, so_far: Samples) -> tuple[Times, Watch]:
        """As `turns.Clock`."""
        times: dict[str, list[float]] = {phase: [] for phase in phases}
        with Watch(0.02 if self.watched else None) as watch:
            for number in range(-(self.warmup if turn == 0 else 1), share(self.steps, turn, rounds)):
                with self.ranges("step" if number >= 0 else "warm-up"):
                    for phase, ms in self._one_step(phases).items():
                        if number >= 0:
                            times[phase].append(ms)
        return times, watch

    def _one_step(self, phases: Phases) -> dict[str, float]:
        times = {}
        self._wait()
        for phase, fn in phases.items():
            with self.ranges(phase):
                start = time.perf_counter()
                fn()
                self._wait()
            times[phase] = (time.perf_counter() - start) * 1e3
        return times
