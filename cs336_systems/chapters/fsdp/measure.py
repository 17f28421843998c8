"""Chapter `fsdp`: a training step whose weights, gradients and optimizer state are sharded: its time, its memory, and
what overlaps what.

    papermill book/fsdp.ipynb out.ipynb -p wrapper fsdp,fsdp2 -p context_length 2048

Two sequences per rank. The cases of a group take turns in one process group; each turn builds its model anew, from the
same weights, makes steps and gives everything back, so that a step's memory is its own. A step is zero_grad, forward
and loss, backward, what is left of averaging, and fused AdamW. Size `xl` is 2025's, in fp32 with TF32 matmuls and plain
attention; `2.7B` is what 2026 calls xl. There weights travel and compute in bf16 and gradients are summed in fp32;
the wrappers that do not shard weights compute under bf16 autocast, and all have the same fused attention.

Cases of kind `trace` are recorded with torch's profiler on each rank: which communication was exposed, and when. One
step of each is kept, condensed, in `results/<machine>/fsdp/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.chapters.shared import depends, on_ranks
from cs336_systems.chapters.shared.needs import need_gpus
from cs336_systems.measure.clocks.turns import columns
from cs336_systems.store import machine
from cs336_systems.store import rows as store
from cs336_systems.store.table import Table

WRAPPERS = ("ddp", "sharded", "fsdp", "fsdp_layers", "fsdp2", "fsdp2_two")
PHASES = ("forward", "backward", "synchronization", "optimizer")
HELD = ("parameters", "gradients", "optimizer_state")
METRICS = (
    *(column for phase in (*PHASES, "step") for column in columns(phase)), "tokens_per_s",
    # after the steps of a turn, equal for all wrappers but for rounding
    "loss",
    # of the rank that holds most: by the tensors themselves, between backward and the next step
    *(f"{name}_bytes" for name in HELD),
    # by the allocator: when all is wrapped, before and after the optimizer's step, at the peak; what it had reserved
    "initialized_bytes", "before_bytes", "after_bytes", "peak_bytes", "reserved_bytes",
    # of the rank with most exposed communication, means of traced steps; `least`: of the one with least. Of the gathers
    # in forward, how many there are, how long they take, and during how many compute waited
    "traced_ms", "communication_ms", "exposed_ms", "forward_exposed_ms", "backward_exposed_ms", "rest_exposed_ms",
    "least_exposed_ms", "forward_gathers", "forward_gather_ms", "forward_late", "source", "tool_version",
    "backend", "sm_mhz", "power_w",
)  # fmt: skip
DEPENDS = (
    *depends.MODEL, *depends.PLAIN, *depends.TRITON, *depends.PARALLEL, *depends.RANK_CLOCK,
    "measure/trace/events.py", "measure/trace/kernels.py", "measure/trace/overlap.py", "measure/trace/profiler.py",
    "chapters/fsdp/ranks.py", "parallel/fsdp.py", "parallel/schedule.py", "parallel/shards.py", "parallel/units.py",
)  # fmt: skip
GROUP = ("size", "context_length", "dtype", "world_size", "batch", "kind")


@dataclass(frozen=True)
class Case:
    """One way to train on `world_size` ranks, timed or traced. `repeat` 1 measures the same thing again.

    wrapper: "ddp": buckets that overlap backward, in place; "sharded": the same with `parallel.zero.ShardedOptimizer`;
    "fsdp": `FullyShardedDataParallel`, a block a unit; "fsdp_layers": a layer a unit; "fsdp2": torch's `fully_shard` of
    each block, which prefetches the next one explicitly; "fsdp2_two": the next two. dtype: "fp32", "tf32", or "bf16".
    batch: sequences of each rank. kind: "time" or "trace".
    """

    size: str
    context_length: int
    wrapper: str
    dtype: str = "tf32"
    world_size: int = 2
    batch: int = 2
    kind: str = "time"
    repeat: int = 0

    @property
    def turn(self) -> str:
        """As for `on_ranks.begin_turn`."""
        return self.wrapper


def grid(preset: str) -> list[Case]:
    """2025's xl in TF32 and 2026's in bf16, on two GPUs; or a tiny model on two ranks of a CPU."""
    if preset == "smoke":
        places = traced = [("tiny", 64, "fp32")]
    else:
        places = [("xl", 128, "tf32"), ("xl", 512, "tf32"), ("2.7B", 512, "bf16"), ("2.7B", 2048, "bf16")]
        traced = places[2:]
    wrappers = WRAPPERS[: -1 if preset == "smoke" else None]
    cases = [Case(name, context, w, dtype) for name, context, dtype in places for w in wrappers]
    cases += [Case(name, context, "fsdp", dtype, repeat=1) for name, context, dtype in places]
    return cases + [
        Case(name, context, w, dtype, kind="trace")
        for name, context, dtype in traced
        for w in ("fsdp", "fsdp2")
    ]


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The metrics of each case."""
    traced = cases[0].kind == "trace"
    return on_ranks.measured(
        f"cs336_systems.chapters.fsdp.ranks:{'trace' if traced else 'time'}_on_a_rank", cases, _refuse,
        collective_timeout_s=90, **({"read": _kept} if traced else {}),
    )  # fmt: skip


def _refuse(case: Case) -> None:
    """Raises `Skip` where this machine cannot run the case, and says what it needs."""
    if machine.gpu_names() or case.size != "tiny" or case.dtype == "tf32":
        need_gpus(case.world_size)


def _kept(cases: Sequence[Case], by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case the row, that of the rank with most exposed communication; its timeline is written, too."""
    from cs336_systems.measure.trace import overlap

    rows = []
    for case, *said in zip(cases, *by_rank, strict=True):
        timelines = [overlap.from_dict(one.pop("timeline")) for one in said]
        overlap.to_json(timelines, store.file_beside(TABLE, case, machine.machine_name()))
        least, *_, most = sorted(said, key=lambda row: row["exposed_ms"])
        rows.append(most | {"least_exposed_ms": least["exposed_ms"]})
    return rows


TABLE = Table(
    __name__, Case, METRICS, GROUP, grid, run_group, DEPENDS,
    beside=("size", "context_length", "dtype", "wrapper"),
)  # fmt: skip
