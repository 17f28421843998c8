"""Chapter `zero`: what sharding the optimizer's state saves in memory, costs in time, and sends.

    papermill book/zero.ipynb out.ipynb -p variant plain,sharded -p context_length 512

Two kinds of cases. *Memory*: a variant has a launch to itself, fresh processes and a fresh process group, and what is
alive is read at six moments, by component from the tensors and as a whole from torch's allocator. *Times* (moment
`timed`): all variants take turns in one launch, on one copy of the weights; in the shortest context it is counted as
well what each of them sends. A timed step begins with the optimizer's step and ends with the backward pass, so that
communication that overlaps the next forward pass ends in the same step.

fp32 with TF32 matmuls, fused AdamW, plain attention. On a CPU a tiny model runs with Gloo; there the tensors that
torch's dispatcher sees take the place of the allocator (column `source`), and nothing is read from links or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems import accounting
from cs336_systems.accounting.zero import COMPONENTS, STEP_MOMENTS
from cs336_systems.chapters.shared import depends, on_ranks
from cs336_systems.chapters.shared.needs import need_gpus
from cs336_systems.measure.clocks.turns import columns
from cs336_systems.sizes import size
from cs336_systems.store import machine
from cs336_systems.store.table import Table

VARIANTS = {  # variant → names of `shared.parallel_step`: wrapper, optimizer
    "alone": ("none", "adamw"),
    "plain": ("bucketed", "adamw"),
    "sharded": ("bucketed", "sharded"),
    "overlapped": ("bucketed", "sharded"),  # the same, its broadcasts overlapping the next forward pass
    "torch": ("torch", "adamw"),
    "torch_zero": ("torch", "zero_redundancy"),
}
TIMED = "timed"
PHASES = ("optimizer", "forward", "backward")
COMPONENT_COLUMNS = {name: f"{name}_bytes" for name in (*COMPONENTS, "other")}
METRICS = (
    # memory: of the rank that holds most
    "source",  # allocator (of the CUDA device), or tensors (seen by torch's dispatcher, on a CPU)
    "live_bytes",  # in blocks that the allocator has handed out
    "peak_bytes",  # the most of that since the moment before in the step, or since its beginning
    "requested_bytes",  # what was asked for: without the rounding of blocks
    "reserved_bytes",  # what the allocator holds of the device
    "outside_bytes",  # what is used of the device beside that: context, kernels' code, NCCL's own memory
    *COMPONENT_COLUMNS.values(),  # from the tensors' storages; other: the rest of live_bytes
    "rank_spread_bytes",  # live_bytes of the rank that holds most, less that of the rank that holds least
    # times: of the slowest rank, step by step
    *(column for phase in (*PHASES, "step") for column in columns(phase)),
    "tokens_per_s",
    # what one step sends, by the dispatcher; counted in the shortest context
    "all_reduce_calls", "all_reduce_bytes", "broadcast_calls", "broadcast_bytes", "other_calls",
    "link_sent_bytes", "link_received_bytes",  # the GPU's NVLink counters, the largest of the ranks
    # the optimizer's step on rank 0's GPU, by torch's profiler
    "optimizer_launches", "communication_ms", "update_ms", "both_ms", "whole_ms",
    "sm_mhz", "power_w",
)  # fmt: skip
DEPENDS = (
    *depends.PARALLEL_STEP, "accounting/zero.py", "chapters/zero/ranks.py",
    "measure/counters/collectives.py", "measure/memory/replay.py", "measure/memory/tensors.py",
    "measure/trace/events.py", "measure/trace/kernels.py", "measure/trace/profiler.py",
)  # fmt: skip
GROUP = ("size", "world_size", "batch", "bucket_mb", "launch")

CONTEXTS = (128, 512)
TIMED_CONTEXTS = (*CONTEXTS, 1024)  # the shorter ones are launch-bound on a fast GPU
XL_2026 = "2.7B"  # what spring 2026 calls xl
WORLD_SIZES = (2, 4, 8)
ON_CPU = "tiny"
TURNS = 4  # of each variant
SETTLING = 1  # steps of each turn before it is timed, beside the one that makes the first gradients
STEPS, STEPS_ON_CPU = 12, 4  # timed steps of each variant, over all turns


@dataclass(frozen=True)
class Case:
    """One moment of one variant's step, or its times. `repeat` 1 times the same thing again.

    variant: a key of VARIANTS: `"alone"` trains without communication, `"plain"`, `"sharded"` and `"overlapped"` behind
    BucketedDDP, `"torch"` and `"torch_zero"` behind torch's DistributedDataParallel. moment: one of accounting's
    STEP_MOMENTS, or `"timed"`. batch: sequences per rank. bucket_mb: of either container.
    """

    variant: str
    context_length: int
    moment: str
    size: str = "xl"
    world_size: int = 2
    batch: int = 2
    bucket_mb: float = 100.0
    repeat: int = 0

    @property
    def launch(self) -> str:
        """What shares its processes with the case: its variant's other moments, or all that is timed."""
        return "in turns" if self.moment == TIMED else f"memory of {self.variant}"

    @property
    def turn(self) -> str:
        """As for `on_ranks.begin_turn`: the moments of a variant in one context are measured together."""
        return f"context {self.context_length}, {self.variant}"


def grid(preset: str) -> list[Case]:
    """XL on two GPUs, and the project's own on four and eight; or the tiny model on a CPU."""
    if preset == "smoke":
        two = {"size": ON_CPU, "bucket_mb": 0.25}
        return [*_memory(("plain", "sharded"), (64,), **two), *_times(tuple(VARIANTS), (64,), **two)]
    cases = [
        *_memory(("alone",), CONTEXTS, world_size=1),
        *_memory(("plain", "sharded", "torch", "torch_zero"), CONTEXTS),
        *_times(tuple(VARIANTS), TIMED_CONTEXTS),
    ]
    cases += _memory(("plain", "sharded"), CONTEXTS[-1:], size=XL_2026)
    cases += _times(("alone", "plain", "sharded", "overlapped"), CONTEXTS[-1:], size=XL_2026)
    for world_size in WORLD_SIZES[1:]:
        cases += _memory(("plain", "sharded"), CONTEXTS[-1:], world_size=world_size)
        some = ("alone", "plain", "sharded", "overlapped", "torch_zero")
        cases += _times(some, TIMED_CONTEXTS, world_size=world_size)
    return cases


def _memory(variants: Sequence[str], contexts: Sequence[int], **fields: Any) -> list[Case]:
    return [Case(v, context, m, **fields) for v in variants for context in contexts for m in STEP_MOMENTS]


def _times(variants: Sequence[str], contexts: Sequence[int], **fields: Any) -> list[Case]:
    """All variants, and the sharded one twice (A/A)."""
    return [
        *(Case(variant, context, TIMED, **fields) for context in contexts for variant in variants),
        *(Case("sharded", context, TIMED, repeat=1, **fields) for context in contexts),
    ]


# ------------------------------------------------------------------------------------------------ predictions
def persistent_bucket_bytes(case: Case) -> int:
    """What the variant's container holds beside the gradients: torch's DDP a copy of each, BucketedDDP nothing."""
    copies = VARIANTS[case.variant][0] == "torch"
    return 4 * accounting.num_parameters(size(case.size)) if copies else 0


def num_shards(case: Case) -> int:
    """Over how many ranks the variant shards the optimizer's state."""
    return case.world_size if VARIANTS[case.variant][1] in ("sharded", "zero_redundancy") else 1


def predicted(case: Case, device: str = "cuda") -> dict[str, int]:
    """Component → bytes alive at the case's moment on the rank that holds most, by the closed form."""
    arguments = (size(case.size), case.batch, case.context_length, num_shards(case))
    buckets = persistent_bucket_bytes(case)
    return accounting.zero_step_memory(*arguments, buckets=buckets, device=device)[case.moment]


def predicted_peak(case: Case, device: str = "cuda") -> dict[str, int]:
    """Component → bytes at the peak of a step that is not the first, by the closed form."""
    arguments = (size(case.size), case.batch, case.context_length, num_shards(case))
    return accounting.zero_peak_memory(*arguments, buckets=persistent_bucket_bytes(case), device=device)


# ------------------------------------------------------------------------------------------------ measuring
def refuse(case: Case) -> None:
    """Raises `Skip` where this machine cannot run the case."""
    if machine.gpu_names() or case.size != ON_CPU:
        need_gpus(case.world_size)


def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The metrics of each case, of all contexts in one launch."""
    timed = cases[0].moment == TIMED
    return on_ranks.measured(
        f"cs336_systems.chapters.zero.ranks:{'times' if timed else 'memory'}_on_a_rank", cases, refuse,
        collective_timeout_s=90, **({} if timed else {"read": _of_fullest}),
    )  # fmt: skip


def _of_fullest(cases: Sequence[Case], by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each case as measured on the rank that holds most in the end, with the spread between ranks."""
    ends = [place for place, case in enumerate(cases) if case.moment == STEP_MOMENTS[-1]] or [0]
    fullest = max(by_rank, key=lambda found: found[ends[-1]]["live_bytes"])
    apart = []
    for metrics, *everyones in zip(fullest, *by_rank, strict=True):
        live = [found["live_bytes"] for found in everyones]
        apart.append(metrics | {"rank_spread_bytes": max(live) - min(live)})
    return apart


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
