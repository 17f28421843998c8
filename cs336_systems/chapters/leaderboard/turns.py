"""No table: measures the cases of chapter `leaderboard`'s tables of times, in turns.

The cases of a group have five turns each, in changing order. A turn begins with a quarter of a second of calls that are
not timed, so that the GPU runs at the clock to which the case's own power draw brings it, not that of the one before.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import attention_flops
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.measure.clocks.calls import Calls, captured
from cs336_systems.measure.clocks.turns import QUANTILES, Candidate, Samples, columns, prepared, time_together
from cs336_systems.measure.device import default_device, give_back, medians

if TYPE_CHECKING:
    import torch

PART = "call"
STATISTICS = (*QUANTILES, "mean", "min", "max")
METRICS = (
    *columns("", STATISTICS),  # of single calls, all turns together
    "turns_ms", "turns_mhz", "turns_w",  # a number for each turn: median ms, SM clock, power
    "tflops", "timed", "sm_mhz", "power_w", "kernels",
)  # fmt: skip
TURNS = 5
KERNEL_MS = 40  # of repetitions in a turn of kernels alone
WARM_MS = 1500  # of the calls that go before a group's turns: a GPU that rested may run at another clock
SETTLE_MS = 250  # of a turn's calls that are not timed, on a GPU


def held_against(
    exact: Callable[[], list[torch.Tensor]], impl: peers.Attention, data: list[torch.Tensor], ours: bool
) -> dict[str, Any]:
    """The columns of errors of one call on leaves of its own, and the kernels of `ours`; compiles both passes, too."""
    import torch

    *leaves, grad_o = (impl.laid_out(x) for x in data)
    leaves = [x.requires_grad_() for x in leaves]
    o = impl.apply(*leaves)
    found = [o.detach(), *(torch.autograd.grad(o, leaves, grad_o) if impl.backward else ())]
    if impl.tokens_first:
        found = [x.transpose(0, 1) for x in found]
    error_out, *rest = peers.errors(found, exact()[: len(found)])
    columns = {"backend": impl.backend, "error_out": error_out, "error_grads": max(rest, default=None)}
    if ours and o.is_cuda:
        own = peers.own_kernels(lambda: torch.autograd.grad(impl.apply(*leaves), leaves, grad_o))
        columns["kernels"] = " ".join(own)
    return columns


def in_turns(
    cases: list[Any], prepare: Callable[..., tuple[Callable[[], Any], list[torch.Tensor]]], *, rep_ms: float,
    turns: int, grad_o: str = "matrix", graphs: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """The metrics of a group's cases.

    `prepare(candidate, data, exact)` adds what it measures beside the times to the candidate's metrics, and gives what
    is timed, with the tensors whose gradients are dropped before each call; `data` are q, k, v and dO
    (`attention_peers.data_of`), `exact()` what fp64 makes of them: o, dQ, dK and dV. `graphs`: on a GPU, times replays
    of a CUDA graph.
    """
    device = default_device()
    data, grads = peers.data_of(cases[0], device, grad_o), []

    @functools.cache
    def exact() -> list[torch.Tensor]:
        from cs336_systems.attention.reference import exact_attention

        return list(exact_attention(*data, cases[0].is_causal))

    def try_out(candidate: Candidate) -> None:
        call, leaves = prepare(candidate, data, exact)
        candidate.metrics["timed"] = "clock" if device == "cpu" else "graph" if graphs else "events"
        candidate.phases = {PART: captured(call, 1) if candidate.metrics["timed"] == "graph" else call}
        grads.extend(leaves)
        for leaf in leaves:
            leaf.grad = None

    candidates = prepared(cases, try_out, device)
    exact.cache_clear()
    give_back(device)
    few = max(1, sum(candidate.ok for candidate in candidates))
    warm = Calls(device, num_rounds=1, warmup_ms=0, rep_ms=1, settle_ms=WARM_MS / few, grads=grads)
    time_together(candidates, warm)  # a GPU that rested may run at another clock
    clock = Calls(
        device, num_rounds=turns, warmup_ms=rep_ms / 10, rep_ms=rep_ms, settle_ms=SETTLE_MS, grads=grads
    )
    for candidate in time_together(candidates, clock):
        candidate.metrics |= summary(candidate.case, candidate.samples)
    return [candidate.metrics for candidate in candidates]


def summary(case: Any, samples: Samples) -> dict[str, Any]:
    """The columns of all turns."""
    part = getattr(case, "part", "end_to_end")
    flops = attention_flops(case.heads, case.seq_len, case.seq_len, case.head_dim, case.is_causal, part)
    clocks = [medians([watch]) for watch in samples.watches]
    return samples.row(PART, STATISTICS, prefix="") | samples.clocks() | {
        "turns_ms": _numbers(statistics.median(turn[PART]) for turn in samples.turns),
        "turns_mhz": _numbers(clock["sm_mhz"] for clock in clocks),
        "turns_w": _numbers(clock["power_w"] for clock in clocks),
        "tflops": flops / samples.p50(PART) / 1e9,
    }  # fmt: skip


def _numbers(values: Any) -> str:
    """Numbers in one cell, `;` between them; what is not known is left empty."""
    return ";".join("" if value is None else f"{value:.6g}" for value in values)
