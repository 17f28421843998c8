"""A table of chapter `training`: what trains in fp16 under a cap on memory, and whether the forecast knew.

For each size and context length the most sequences that the forecast lets a small GPU take, and twice as many. Each
makes some steps of `training.loop` with loss scaling, in a process that takes no more than the cap and launches the
portable kernels, as a GPU before Hopper does. Chapter `speedrun` rests on these rows: they are of no small GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.memory_cap import capped
from cs336_systems.chapters.speedrun.plan import T4_GIB, largest_batch
from cs336_systems.chapters.training.run import CAP_GIB
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import take_turns
from cs336_systems.measure.device import default_device, give_back
from cs336_systems.store import machine, process
from cs336_systems.store.status import Skip, failure_is_a_row
from cs336_systems.store.table import Table
from cs336_systems.training import forecast
from cs336_systems.training.config import TrainingConfig, load

DEPENDS = (
    *depends.TRAINING, *depends.FORECAST, *depends.TRITON, "chapters/shared/memory_cap.py",
    "chapters/training/run.py", *depends.STEP_CLOCK,
)  # fmt: skip
GROUP = ("cap_gib", "dtype", "steps")
METRICS = (
    "step_ms_p50", "tokens_per_s", "predicted_gib", "peak_gib", "reserved_gib", "skipped_steps", "loss_scale",
    "loss_first", "loss_last", "losses",
)  # fmt: skip
"""predicted_gib: by the forecast; peak_gib: of tensors; reserved_gib: what the allocator took for them."""
SIZES, CONTEXTS = ("small", "medium"), (256, 512, 1024)


@dataclass(frozen=True)
class Case:
    """`steps` steps of so many sequences. `repeat` 1 measures the same thing again."""

    size: str
    context_length: int
    sequences: int
    cap_gib: int = CAP_GIB
    dtype: str = "fp16"
    steps: int = 10
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The forecast's choices for a T4 and twice as much, the first one twice (A/A); a tiny model without a cap on a
    CPU."""
    if preset == "smoke":
        return [Case("tiny", 32, 4, cap_gib=0, steps=4), Case("tiny", 32, 4, cap_gib=0, steps=4, repeat=1)]
    chosen = [(s, n, largest_batch(s, n, T4_GIB)) for s in SIZES for n in CONTEXTS]
    cases = [Case(s, n, times * most) for s, n, most in chosen for times in (1, 2)]
    return [*cases, Case(*chosen[0], repeat=1)]


def configuration(case: Case, folder: str) -> TrainingConfig:
    """The training configuration of a case."""
    tiny = case.size == "tiny"
    return load(None, {
        "out": folder, "text.train_mb": 0.2 if tiny else 8, "text.valid_mb": 0.05, "model.size": case.size,
        "tokenizer.vocab_size": 512 if tiny else 2048, "model.context_length": case.context_length,
        "batch.sequences": case.sequences, "schedule.steps": case.steps + 1, "run.dtype": case.dtype,
    })  # fmt: skip


def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Tries the cases one after another in a fresh process."""
    if cases[0].cap_gib and not machine.gpu_names():
        raise Skip("needs a CUDA device")
    return process.call(
        f"{__name__}:on_their_own", {"cases": [asdict(case) for case in cases]}, timeout_s=900,
        environment={"CS336_HOPPER": "0"},
    )  # fmt: skip


def on_their_own(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the cases, tried in this process."""
    device, found = default_device(), []
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        for told in cases:
            case, metrics = Case(**told), {}
            with failure_is_a_row(metrics), capped(case.cap_gib, device):
                _try(case, folder, device, metrics)
            give_back(device)  # a failure's frames may hold tensors
            print(f"    {case.size}, {case.context_length} tokens, {case.sequences} sequences: "
                  f"{metrics.get('status', 'ok')}", flush=True)  # fmt: skip
            found.append(metrics)
    return found


def _try(case: Case, folder: str, device: str, metrics: dict[str, Any]) -> None:
    import torch

    from cs336_systems.training import pipeline
    from cs336_systems.training.loop import Trainer

    config = configuration(case, folder)
    metrics["predicted_gib"] = forecast.memory_bytes(config, case.dtype, device, 1) / 2**30
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    trainer, losses = Trainer(config, pipeline.prepare(config, lambda line: None)), []

    def step() -> None:
        trainer.train_step()
        losses.append(trainer.loss)

    step_ms = take_turns({"": {"step": step}}, Steps(device, warmup=1, steps=case.steps))[""].p50("step")
    seen = [loss.item() for loss in losses]
    metrics |= {
        "step_ms_p50": step_ms, "tokens_per_s": case.sequences * case.context_length / step_ms * 1e3,
        "skipped_steps": trainer.skipped_steps(), "loss_scale": trainer.scaler.get_scale(), "loss_first": seen[0],
        "loss_last": seen[-1], "losses": " ".join(f"{x:.5g}" for x in seen),
    }  # fmt: skip
    if device != "cpu":
        metrics["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
