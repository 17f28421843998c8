"""A table of chapter `leaderboard`: the steps of `cs336_systems.ladder`, launched without autograd, from CUDA graphs;
their registers, spills and shared memory, and what was predicted for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cs336_systems.chapters.leaderboard import turns as leaderboard_turns
from cs336_systems.chapters.leaderboard.turns import KERNEL_MS, TURNS, in_turns
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.attention_peers import WORK, Case
from cs336_systems.ladder import steps
from cs336_systems.measure.clocks.turns import Candidate
from cs336_systems.store.status import Skip
from cs336_systems.store.table import Table

DEPENDS = (
    *depends.PLAIN, *depends.TRITON, *depends.LADDER, "ladder/hopper_kernels.py", "ladder/hopper_launch.py",
    *depends.CALL_CLOCK, "chapters/leaderboard/turns.py",
)  # fmt: skip
GROUP = ("part", "heads", "seq_len", "head_dim", "is_causal", "dtype")
METRICS = (*leaderboard_turns.METRICS, "error", "predicted_ms", "registers", "spill_bytes", "shared_kib")


def grid(preset: str) -> list[Case]:
    """Every step at the leaderboard's work, or the production kernels at a small one; `impl` is a step's name."""
    out, shape = [], (2, 256, 64) if preset == "smoke" else WORK
    for part in steps.PARTS:
        names = [step.name for step in steps.of_part(part)]
        again = next(name for name in names if name.endswith("production"))
        chosen = [again] if preset == "smoke" else names
        out += peers.with_pair(Case, chosen, part, *shape, True, "bf16", again=again)
    return out


def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one group in turns."""
    return in_turns(cases, prepare, rep_ms=KERNEL_MS, turns=TURNS)


def prepare(candidate: Candidate, data: list[Any], exact: Any) -> tuple[Callable[[], Any], list[Any]]:
    """Compiles, holds the results against fp64, reads what the kernels use; gives the step."""
    from cs336_systems.ladder import launch

    case, step = candidate.case, steps.STEPS[candidate.case.impl]
    if (case.heads, case.seq_len, case.head_dim) == WORK:
        candidate.metrics["predicted_ms"] = steps.predicted_ms(step)
    if not data[0].is_cuda:
        raise Skip("needs a CUDA device")
    if reason := launch.missing(step):
        raise Skip(f"needs {reason}")
    from cs336_systems.ladder import resources

    q, k, v, grad_o = (x[None] for x in data)
    tensors = (q, k, v)
    if step.part == "backward":
        o, logsumexp = launch.launcher(steps.STEPS["f_production"])(q, k, v, True)
        tensors = (q, k, v, o, logsumexp, grad_o)
    run = launch.launcher(step)
    found = [x[0] for x in run(*tensors, True)]
    forward = step.part == "forward"
    candidate.metrics["error"] = max(
        peers.errors(found[:1], exact()[:1]) if forward else peers.errors(found, exact()[1:])
    )
    call = lambda: run(*tensors, True)
    used = resources.of_call(call)
    candidate.metrics |= {
        "kernels": " ".join(r.kernel for r in used),
        "registers": max((r.registers for r in used), default=None),
        "spill_bytes": max((r.spill_bytes for r in used), default=None),
        "shared_kib": max((r.shared_bytes / 1024 for r in used), default=None),
    }
    return call, []


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
