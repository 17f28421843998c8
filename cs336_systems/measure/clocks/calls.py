"""The clock of single calls: `triton.testing.do_bench`, the tool that the handout names; and times without the host's.

CUDA events around each call, the L2 cache flushed before it. Where triton is missing, and for functions so slow that
do_bench's six preparatory calls cost more than they are worth, a loop here does the same. On a CPU: the host's clock.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cs336_systems.measure.clocks.turns import Phases, Samples, Times
from cs336_systems.measure.device import Watch
from cs336_systems.store.machine import has_module
from cs336_systems.store.status import Skip

if TYPE_CHECKING:
    import torch

L2_BUFFER_BYTES = 256 * 2**20  # what do_bench writes between calls: larger than any L2 there is
SLOW_MS = 100.0  # from here on do_bench's 1 + 5 preparatory calls cost more than the samples
SLOW_SAMPLES = 2  # timed calls of a slow function in each round
SLOW_BUDGET_MS = 6000.0  # what all rounds of one slow function may take, unless two rounds take longer
MAX_CALLS = 1000  # of a turn


class Calls:
    """The clock (`turns.Clock`) of candidates with one phase each.

    device:      `"cpu"`, or `"cuda"` for the current device: where the functions do their work.
    num_rounds:  turns of each candidate; slow ones (a call above SLOW_MS) have fewer: two at least, as many as fit in
                 SLOW_BUDGET_MS.
    warmup_ms:   calls before the timed ones of each turn, at least one.
    rep_ms:      timed calls of each turn, at least one.
    settle_ms:   calls before each turn on a GPU, which then runs at the clock to which the candidate's own power draw
                 brings it, not that of the one before.
    grads:       tensors whose `grad` is dropped before each timed call, so that a backward pass writes its gradients
                 instead of adding to them.
    watched:     whether clock and power are read meanwhile.

    Before its first turn each function is called twice: the first call may compile, the second one says how long it
    takes. Raises `Skip` for `"cuda"` where there is none, ValueError for another device or no round.
    """

    def __init__(
        self, device: str, *, num_rounds: int = 5, warmup_ms: float = 25, rep_ms: float = 100, settle_ms: float = 0,
        grads: Sequence[torch.Tensor] = (), watched: bool = True,
    ) -> None:  # fmt: skip
        if device not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {device!r}; allowed: cpu, cuda")
        if num_rounds < 1:
            raise ValueError(f"num_rounds={num_rounds}; it must be at least 1")
        if device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise Skip("needs a CUDA device")
        self.device, self.num_rounds, self.watched = device, num_rounds, watched
        self.warmup_ms, self.rep_ms, self.settle_ms = warmup_ms, rep_ms, settle_ms
        self.grads = list(grads)

    def rounds(self, num_candidates: int) -> int:
        """As `turns.Clock`."""
        return self.num_rounds

    def turn(self, phases: Phases, turn: int, rounds: int, so_far: Samples) -> tuple[Times, Watch] | None:
        """As `turns.Clock`; what settles the GPU is not watched."""
        [(phase, fn)] = phases.items()
        if turn == 0:
            self._sample(fn, 1)
            estimate_ms = self._sample(fn, 1)[0]
        else:
            estimate_ms = so_far.p50(phase)
            if turn >= turns_of(estimate_ms, rounds):
                return None
        if self.device == "cuda":
            self._settle(fn)
        with Watch(0.02 if self.watched else None) as watch:
            return {phase: self._timed(fn, estimate_ms)}, watch

    def _timed(self, fn: Callable[[], Any], estimate_ms: float) -> list[float]:
        if estimate_ms > SLOW_MS:
            self._sample(fn, 1)
            return self._sample(fn, SLOW_SAMPLES)
        if self.device == "cuda" and has_module("triton"):
            from triton.testing import do_bench

            # no limit of calls here: do_bench counts the flush of the cache (0.1 ms) as part of a call
            return do_bench(
                fn, warmup=self.warmup_ms, rep=self.rep_ms, grad_to_none=self.grads or None, return_mode="all"
            )
        self._sample(fn, max(1, _count(estimate_ms, self.warmup_ms)))
        return self._sample(fn, max(1, _count(estimate_ms, self.rep_ms)))

    def _settle(self, fn: Callable[[], Any]) -> None:
        """Calls for `settle_ms`, many at a time, so that the GPU seldom waits for the host."""
        import torch

        end, calls = time.perf_counter() + self.settle_ms / 1e3, 1
        while time.perf_counter() < end:
            for _ in range(calls):
                self._drop_grads()
                fn()
            torch.cuda.synchronize()
            calls = min(2 * calls, 16)

    def _sample(self, fn: Callable[[], Any], calls: int) -> list[float]:
        if self.device == "cpu":
            return [self._on_host(fn) for _ in range(calls)]
        import torch

        l2 = torch.empty(L2_BUFFER_BYTES // 4, dtype=torch.int32, device="cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for start, end in events:
            self._drop_grads()
            l2.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def _on_host(self, fn: Callable[[], Any]) -> float:
        self._drop_grads()
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3

    def _drop_grads(self) -> None:
        for tensor in self.grads:
            tensor.grad = None


def turns_of(estimate_ms: float, rounds: int) -> int:
    """In how many rounds a function takes part: all of them, unless it is slow."""
    if estimate_ms <= SLOW_MS:
        return rounds
    fit = int(SLOW_BUDGET_MS / (estimate_ms * (1 + SLOW_SAMPLES)))
    return min(rounds, max(2, fit))


def _count(estimate_ms: float, in_ms: float) -> int:
    return min(MAX_CALLS, int(in_ms / max(estimate_ms, 1e-6)))


# ----------------------------------------------------------------------------------- without launch overhead
def captured(fn: Callable[[], Any], calls: int = 20) -> Callable[[], None]:
    """`calls` calls of `fn` captured in a CUDA graph: a function that replays them, with next to no launch overhead.

    The calls follow each other at once, so their operands stay in the L2 cache where they fit. `fn` must be
    capturable: no synchronization, no new shapes, no compilation after its first three calls, which are made before
    capture and on the capturing stream (where autograd's nodes must come from, too). Raises `Skip` without a CUDA
    device, ValueError for `calls` below 1.
    """
    import torch

    if calls < 1:
        raise ValueError(f"calls={calls}; it must be at least 1")
    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        graph.capture_begin()  # torch.cuda.graph() would collect garbage first, which takes longer than all the rest
        try:
            for _ in range(calls):
                fn()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which would stand for what went wrong
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> None:
        graph.replay()

    replay.of = fn  # the graph reads the tensors that `fn` holds, but does not keep them alive
    return replay


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """That of all captures: for each stream cuBLAS keeps workspaces of its own, 64 MiB on Hopper, to the end."""
    import torch

    return torch.cuda.Stream(device)


def host_us(fn: Callable[[], Any], *, calls: int = 20, grads: Sequence[torch.Tensor] = ()) -> float:
    """The median time in µs after which a call of `fn` returns to the host, without waiting for the GPU's work.

    The GPU's queue is empty at first and takes `calls` calls without making the host wait. `grads` as for `Calls`.
    Raises `Skip` without a CUDA device, ValueError for `calls` below 1.
    """
    import torch

    if calls < 1:
        raise ValueError(f"calls={calls}; it must be at least 1")
    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        for tensor in grads:
            tensor.grad = None
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
