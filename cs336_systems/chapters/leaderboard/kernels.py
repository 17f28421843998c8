"""A table of chapter `leaderboard`: forward and backward alone, without the host, as replays of a CUDA graph.

dO is a matrix of random numbers (`grad_o`: "matrix"), and at the leaderboard's shape also a scalar expanded with
strides of zero, as the gradient of a sum is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cs336_systems.chapters.leaderboard import turns as leaderboard_turns
from cs336_systems.chapters.leaderboard.turns import KERNEL_MS, TURNS, held_against, in_turns
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.attention_peers import WORK
from cs336_systems.measure.clocks.turns import Candidate
from cs336_systems.store.table import Table

DEPENDS = (
    *depends.PLAIN, *depends.TRITON, *depends.LADDER, *depends.CALL_CLOCK, "chapters/leaderboard/turns.py",
)  # fmt: skip
GROUP = ("part", "heads", "seq_len", "head_dim", "is_causal", "dtype", "grad_o")
METRICS = (*leaderboard_turns.METRICS, "backend", "error_out", "error_grads")


@dataclass(frozen=True)
class Case:
    """One pass of `impl` (`attention_peers.MAKERS`) or both, on `heads` × (seq_len, head_dim), batch 1. `repeat` 1
    measures the same thing again."""

    impl: str
    part: str
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    dtype: str
    grad_o: str
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The leaderboard's work and a few shapes beside it, or one small shape for a CPU."""
    out: list[Case] = []
    if preset == "smoke":
        few = ("flash_triton", "flash_torch", "sdpa_flash", "reference")
        for part in ("forward", "backward"):
            out += peers.with_pair(Case, few, part, 2, 256, 64, True, "bf16", "matrix", again="reference")
        return out
    few = ("flash_triton", "sdpa_cudnn", "sdpa_flash")
    for impls, head_dim, is_causal, dtype in (
        ((*few, "plain_triton", "fa4", "fa3"), 64, True, "bf16"),
        ((*few, "fa4", "fa3"), 128, True, "bf16"),
        ((*few, "fa4", "fa3"), 64, False, "bf16"),
        ((*few, "fa4"), 64, True, "fp16"),  # for which fa3-fwd has no kernel
        ((*few, "fa3"), 80, True, "bf16"),  # whose gradients FlashAttention-4 gets wrong
        (("flash_triton", "plain_triton", "sdpa_efficient"), 64, True, "fp32"),
        (("flash_triton", "plain_triton", "sdpa_efficient"), 128, True, "fp32"),
    ):
        both = tuple(impl for impl in impls if impl not in peers.FORWARD_ONLY)
        for part, some in (("forward", impls), ("backward", both)):
            out += peers.with_pair(Case, some, part, *WORK[:2], head_dim, is_causal, dtype, "matrix")
        if (head_dim, is_causal, dtype) == (64, True, "bf16"):
            out += peers.with_pair(Case, both, "backward", *WORK, True, "bf16", "number")
    return out


def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one group in turns."""
    import torch._functorch.config

    # the timed backward passes keep their graphs, which donated buffers do not allow
    with torch._functorch.config.patch(donated_buffer=False):
        return in_turns(cases, prepare, rep_ms=KERNEL_MS, turns=TURNS, grad_o=cases[0].grad_o)


def prepare(candidate: Candidate, data: list[Any], exact: Any) -> tuple[Callable[[], Any], list[Any]]:
    """Compiles, and holds the results against fp64; gives the pass."""
    case = candidate.case
    impl = peers.build(case.impl, case.is_causal, data[0].device.type, case.seq_len)
    candidate.metrics |= held_against(exact, impl, data, case.impl in peers.OURS)
    return peers.one_pass(impl, case.part, data), []


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
