"""A table of chapter `leaderboard`: what Nsight Compute counts while the kernels of a pass run, which is how busy each
unit of the GPU is."""

from __future__ import annotations

import dataclasses
from typing import Any

from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.attention_peers import WORK, Case
from cs336_systems.measure.counters import ncu
from cs336_systems.measure.trace.nsys import capture
from cs336_systems.store.status import failure_is_a_row
from cs336_systems.store.table import Table

DEPENDS = (*depends.TRITON, *depends.LADDER, "measure/counters/ncu.py", "measure/trace/nsys.py")
GROUP = ("part", "heads", "seq_len", "head_dim", "is_causal", "dtype")
METRICS = (
    "tensor_pct", "exp_pct", "issue_pct", "shared_pct", "l2_pct", "conflict_pct", "instructions", "kernels",
)  # fmt: skip
COUNTED = ("flash_triton", "plain_triton", "sdpa_cudnn", "sdpa_flash")


def grid(preset: str) -> list[Case]:
    """The leaderboard's work, with head dimension 128 as well, or a small one."""
    shapes, impls = [WORK, (*WORK[:2], 128)], COUNTED
    if preset == "smoke":
        shapes, impls = [(2, 256, 64)], ("flash_triton",)
    out = []
    for shape in shapes:
        for part in ("forward", "backward"):
            out += peers.with_pair(Case, impls, part, *shape, True, "bf16")
    return out


def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Counts the cases of a group in a process under Nsight Compute."""
    blocked: dict[str, Any] = {}
    with failure_is_a_row(blocked):
        arguments = {"cases": [dataclasses.asdict(case) for case in cases]}
        target = f"{__name__}:counted_calls"
        statuses, parts = ncu.counted(target, arguments, timeout_s=300)
        remaining = iter(parts)
        return [{"status": status} if status else ncu.summed(next(remaining)) for status in statuses]
    return [dict(blocked) for _ in cases]


def counted_calls(cases: list[dict[str, Any]]) -> list[str]:
    """Runs one call of each case for `counters.ncu` to count; a status for each that cannot run, "" for the others."""
    import torch

    found, calls = [], []
    for case in (Case(**fields) for fields in cases):
        metrics: dict[str, Any] = {}
        with failure_is_a_row(metrics):
            impl = peers.build(case.impl, case.is_causal, "cuda", case.seq_len)
            call = peers.one_pass(impl, case.part, peers.data_of(case, "cuda"))
            call()
            calls.append(call)
        found.append(metrics.get("status", ""))
    torch.cuda.synchronize()
    with capture():
        for call in calls:
            ncu.mark()
            call()
    return found


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
