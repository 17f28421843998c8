"""The time of a run's steps, the same on all ranks, and what share of its length it is.

Rank 0's clock counts. Asking it costs a wait for the device and a broadcast, so after some steps only: of a start the
first, second, fourth, ..., half of those that seem to be left, those that a line of the log or a pause follows, and the
last. Between them time goes on at the last pace. On a CPU alone it is asked after every step.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

_FIRST = 1e-3  # of a run: what a step takes, until one has been timed


class Clock:
    """Seconds of steps, without the first one of a start, which compiles, and without pauses. limit_s: the run's
    length; inf: something else ends it."""

    def __init__(self, limit_s: float, device: str, world_size: int) -> None:
        self.limit_s, self.device, self.world_size = limit_s, device, world_size
        self.seconds = 0.0  # when it was asked last
        self.timed = 0  # steps of this start in them
        self.pace = _FIRST * limit_s if limit_s < math.inf else 0.0  # seconds of a step
        self._steps = self._since = 0  # of this start; of these, since it was asked
        self._next = 1.0  # the step after which it is asked
        self.start()

    def resume(self, seconds: float, steps: int) -> None:
        """Takes up the clock of a run that had made so many steps."""
        self.seconds, self.pace = seconds, seconds / max(steps, 1) or self.pace

    def start(self) -> None:
        """Begins, or goes on after a pause, before which `ask` was called."""
        self._from = time.perf_counter()

    def progress(self, ahead: int = 0) -> float:
        """The share of the length that is over, 0 to 1, or will be so many steps later."""
        return min(1.0, (self.seconds + (self._since + ahead) * self.pace) / self.limit_s)

    def stepped(self) -> None:
        """Counts a step; all ranks call it after each."""
        self._steps += 1
        self._since += 1
        alone = self.world_size == 1 and self.device == "cpu"
        if alone or self._steps >= self._next or self.progress() == 1:
            self.ask()

    def ask(self) -> None:
        """Has all ranks agree on the time of the steps so far."""
        if not self._since:
            return
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        elapsed = torch.tensor(now - self._from, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.broadcast(elapsed, src=0)
        if self._steps > 1:
            self.seconds += elapsed.item()
            self.timed += self._since
            self.pace = elapsed.item() / self._since
        self._from, self._since = now, 0
        left = (self.limit_s - self.seconds) / self.pace if self.pace else math.inf
        self._next = self._steps + min(self._steps, max(1.0, left / 2))
