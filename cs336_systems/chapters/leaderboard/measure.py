"""Chapter `leaderboard`: forward and backward of causal attention as the course's leaderboard times it.

    papermill book/leaderboard.ipynb out.ipynb
    cs336 run leaderboard

This table is the leaderboard's own code: a compiled function, the sum of its output, its backward pass, under
`do_bench`; for ours also with the official ten seconds of repetitions, in one turn. The chapter's other tables:

    leaderboard_kernels      forward and backward alone, without the host: replays of a CUDA graph
    leaderboard_shapes       the same at the shapes that people train with
    leaderboard_models       the same with grouped queries, windows, packed documents, and head dimensions 192 and 256
    leaderboard_ladder       the steps that led to today's kernels
    leaderboard_counters     what Nsight Compute counts while the kernels run
    leaderboard_first_calls  the first call in a fresh process, and how many kernels it compiles

In each, one case of a group is there twice (A/A); `leaderboard_turns` measures those that are timed.

The handout's code unpacks q, k and v from one tensor with gradients (`leaves`: "stacked"), so autograd stacks the three
gradients and adds them to the one of the call before. "separate" has three leaves, whose gradients are dropped before
each call. The gradient of a sum is an expanded scalar, although compiled functions materialize it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cs336_systems.chapters.leaderboard import turns as leaderboard_turns
from cs336_systems.chapters.leaderboard.turns import TURNS, held_against, in_turns
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.attention_peers import OURS, WORK
from cs336_systems.measure.clocks.turns import Candidate
from cs336_systems.measure.device import peak_gib
from cs336_systems.store.table import Table

DEPENDS = (
    *depends.PLAIN, *depends.TRITON, *depends.CUDA, *depends.LADDER, *depends.CALL_CLOCK,
    "chapters/leaderboard/turns.py",
)  # fmt: skip
GROUP = ("heads", "seq_len", "head_dim", "is_causal", "dtype", "leaves", "rep_ms")
METRICS = (*leaderboard_turns.METRICS, "backend", "error_out", "error_grads", "peak_gib")
OFFICIAL_MS, SHORT_MS = 10_000, 200
PEERS = ("flash_cuda", "fa4", "sdpa_cudnn", "flex_compiled", "sdpa_flash", "sdpa_efficient", "reference")


@dataclass(frozen=True)
class Case:
    """Both passes of `impl`, one of OURS or PEERS, on `heads` × (seq_len, head_dim), batch 1. `rep_ms`: repetitions of
    a turn; `repeat` 1 measures the same thing again."""

    impl: str
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    dtype: str
    leaves: str
    rep_ms: int
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The leaderboard's work, or a small one for a CPU."""
    if preset == "smoke":
        few = ("flash_triton", "flash_torch", "sdpa_flash", "reference")
        return peers.with_pair(Case, few, 2, 256, 64, True, "bf16", "stacked", 20, again="reference")
    official = [Case(impl, *WORK, True, "bf16", "stacked", OFFICIAL_MS) for impl in OURS]
    return [
        *official,  # the A/A row is in the short run
        *peers.with_pair(Case, (*OURS, *PEERS), *WORK, True, "bf16", "stacked", SHORT_MS),
        *peers.with_pair(
            Case, ("flash_triton", "plain_triton", "fa4", "sdpa_cudnn"), *WORK, True, "bf16", "separate", SHORT_MS
        ),
    ]  # fmt: skip


def turns(case: Case) -> int:
    """How often a case has its turn: the official length once, everything else five times."""
    return 1 if case.rep_ms >= OFFICIAL_MS else TURNS


def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one group in turns."""
    first = cases[0]
    return in_turns(cases, prepare, rep_ms=first.rep_ms, turns=turns(first), grad_o="number", graphs=False)


def prepare(candidate: Candidate, data: list[Any], exact: Any) -> tuple[Callable[[], None], list[Any]]:
    """Compiles, holds the results against fp64, reads the peak; gives both passes."""
    import torch

    case = candidate.case
    impl = peers.build(case.impl, case.is_causal, data[0].device.type, case.seq_len)
    if case.impl in OURS:  # as the leaderboard asks
        impl = dataclasses.replace(impl, apply=torch.compile(impl.apply))
    candidate.metrics |= held_against(exact, impl, data, case.impl in OURS)
    matrices, dropped = [impl.laid_out(x) for x in data[:3]], []
    if case.leaves == "stacked":
        leaves = [torch.stack(matrices).requires_grad_()]
        q, k, v = leaves[0]  # as the handout's code unpacks it: three views of one leaf
    else:
        q, k, v = leaves = dropped = [x.requires_grad_() for x in matrices]

    def step() -> None:
        o = impl.apply(q, k, v)
        loss = o.sum()
        loss.backward()

    step()
    for leaf in dropped:
        leaf.grad = None
    candidate.metrics["peak_gib"] = peak_gib(
        step, [x for leaf in leaves for x in (leaf, leaf.grad) if x is not None]
    )
    return step, dropped


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
