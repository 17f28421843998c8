"""No table: measures the cases of chapter `leaderboard`'s tables of times, in turns.

The cases of a group have five turns each, in changing order (`order`). A turn begins with calls that are not timed, so
that the GPU runs at the clock to which the case's own power draw brings it, not that of the one before; a group begins
with a second and a half of such calls of its cases.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import attention_flops
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.store.status import failure_is_a_row

if TYPE_CHECKING:
    import torch

METRICS = (
    "ms_p20", "ms_p50", "ms_p80", "ms_mean", "ms_min", "ms_max",  # of single calls, all turns together
    "turns_ms", "turns_mhz", "turns_w",  # a number for each turn: median ms, SM clock, power
    "tflops", "timed", "sm_mhz", "power_w", "kernels",
)  # fmt: skip
TURNS = 5
KERNEL_MS = 40  # of repetitions in a turn of kernels alone
SETTLE_MS = 250  # of a turn's calls that are not timed, on a GPU
WARM_MS = 1500  # of a group's calls before its first turn: a GPU that rested may run at another clock
COMPILE_S = {"flash_triton": 4.0, "plain_triton": 3.0, "fa4": 4.0, "flex_compiled": 10.0, "f_hopper": 3.0}


class Candidate:
    """One case while it is measured. `call` is what is timed, `grads` the tensors whose gradients are dropped
    before."""

    call: Callable[[], Any]

    def __init__(self, case: Any, device: str) -> None:
        self.case, self.device = case, device
        self.metrics: dict[str, Any] = {}
        self.grads: list[torch.Tensor] = []
        self.turns: list[tuple[tuple[float, ...], float | None, float | None]] = []  # samples, MHz, W

    def hold_against(
        self, exact: Callable[[], list[torch.Tensor]], impl: peers.Attention, data: list[torch.Tensor]
    ) -> None:
        """Errors of one call on leaves of its own, and the kernels of ours; compiles both passes, too."""
        import torch

        *leaves, grad_o = (impl.laid_out(x) for x in data)
        leaves = [x.requires_grad_() for x in leaves]
        o = impl.apply(*leaves)
        found = [o.detach(), *torch.autograd.grad(o, leaves, grad_o)]
        if impl.tokens_first:
            found = [x.transpose(0, 1) for x in found]
        if self.case.impl in peers.OURS and self.device != "cpu":
            own = peers.own_kernels(lambda: torch.autograd.grad(impl.apply(*leaves), leaves, grad_o))
            self.metrics["kernels"] = " ".join(own)
        error_out, *rest = errors(found, exact())
        self.metrics |= {"backend": impl.backend, "error_out": error_out, "error_grads": max(rest)}

    def settle(self, milliseconds: float) -> None:
        """Calls for that long, many at a time, so that the GPU seldom waits for the host."""
        import torch

        end, calls = time.perf_counter() + milliseconds / 1e3, 1
        while time.perf_counter() < end:
            for _ in range(calls):
                for tensor in self.grads:
                    tensor.grad = None
                self.call()
            torch.cuda.synchronize()
            calls = min(2 * calls, 16)

    def turn(self, rep_ms: float) -> None:
        """One turn, with a watch of its own over what is timed."""
        from cs336_systems.measure.clocks.timing import Watch, interleaved

        watch = None
        if self.device == "cuda":
            self.settle(SETTLE_MS)
            watch = Watch()
        name = self.case.impl
        found = interleaved(
            {name: self.call}, device=self.device, rounds=1, warmup_ms=rep_ms / 10, rep_ms=rep_ms,
            grad_to_none={name: self.grads}, watches={name: watch} if watch else {},
        )  # fmt: skip
        self.turns.append((found[name].samples_ms, watch and watch.sm_mhz, watch and watch.power_w))

    def summarize(self) -> None:
        """The metrics of all turns."""
        from cs336_systems.measure.clocks.timing import Timing

        case, part = self.case, getattr(self.case, "part", "end_to_end")
        samples = sorted(ms for turn, _, _ in self.turns for ms in turn)
        timing = Timing(tuple(samples))
        flops = attention_flops(case.heads, case.seq_len, case.seq_len, case.head_dim, case.is_causal, part)
        self.metrics |= timing.metrics() | {
            "ms_mean": statistics.fmean(samples), "ms_min": samples[0], "ms_max": samples[-1],
            "turns_ms": _numbers(statistics.median(turn) for turn, _, _ in self.turns),
            "turns_mhz": _numbers(mhz for _, mhz, _ in self.turns),
            "turns_w": _numbers(watts for _, _, watts in self.turns),
            "tflops": flops / timing.p50 / 1e9,
            "sm_mhz": _median(mhz for _, mhz, _ in self.turns), "power_w": _median(w for _, _, w in self.turns),
        }  # fmt: skip


def in_turns(
    cases: list[Any], prepare: Callable[..., None], *, rep_ms: float, turns: int, grad_o: str = "matrix",
    graphs: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """The metrics of a group's cases.

    `prepare(candidate, data, exact)` gives a candidate its `call` and what it measures beside the times; `data` are q,
    k, v and dO (`attention_peers.data_of`), `exact()` what fp64 makes of them: o, dQ, dK and dV. `graphs`: on a GPU,
    times replays of a CUDA graph.
    """
    import torch

    from cs336_systems.measure.clocks.timing import captured

    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = peers.data_of(cases[0], device, grad_o)

    @functools.cache
    def exact() -> list[torch.Tensor]:
        from cs336_systems.attention.reference import exact_attention

        return list(exact_attention(*data, cases[0].is_causal))

    candidates = [Candidate(case, device) for case in cases]
    for candidate in candidates:
        with failure_is_a_row(candidate.metrics):
            prepare(candidate, data, exact)
            candidate.metrics["timed"] = "clock" if device == "cpu" else "graph" if graphs else "events"
            if candidate.metrics["timed"] == "graph":
                candidate.call = captured(candidate.call, 1)
        for tensor in candidate.grads:
            tensor.grad = None
    exact.cache_clear()
    ready = [candidate for candidate in candidates if "status" not in candidate.metrics]
    if device == "cuda":
        torch.cuda.empty_cache()
        for candidate in ready:
            candidate.settle(WARM_MS / len(ready))
    for turn in range(turns if ready else 0):
        for place in order(len(ready), turn):
            ready[place].turn(rep_ms)
    for candidate in ready:
        candidate.summarize()
    return [candidate.metrics for candidate in candidates]


def order(count: int, turn: int) -> list[int]:
    """The order of a turn's cases: to and fro (0, 1, −1, 2, −2, …), one further each time.

    An even number of cases has every case after every other one once in as many turns, an odd number twice at most
    (Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949).
    """
    to_and_fro = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
    return [(i + turn) % count for i in to_and_fro]


def estimate_s(group: list[Any], rep_ms: float = KERNEL_MS, turns: int = TURNS) -> float:
    """Seconds of a group, roughly: compilation (less where another group had it done) and errors against fp64, then the
    turns."""
    if group[0].seq_len <= 4096:
        return 1 + 0.25 * len(group)
    once_s = sum(COMPILE_S.get(case.impl, 1.0) for case in group if not case.repeat)
    slow = sum(turns * 0.8 for case in group if case.impl == "reference")
    turn_s = (1.15 * rep_ms + SETTLE_MS) / 1e3 + 0.04
    return 1 + WARM_MS / 1e3 + once_s + slow + len(group) * turns * turn_s


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """‖x − exact‖ / ‖exact‖ of each."""
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]


def _numbers(values: Any) -> str:
    """Numbers in one cell, `;` between them; what is not known is left empty."""
    return ";".join("" if value is None else f"{value:.6g}" for value in values)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
