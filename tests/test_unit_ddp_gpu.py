"""Data parallelism between GPUs, through NCCL: the same weights as on one, and the step that is measured."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import ranks_agree

from cs336_systems.chapters.shared.parallel_step import (
    OPTIMIZERS,
    WITH_BUCKETS,
    WRAPPERS,
    ParallelWorkload,
)
from cs336_systems.launch.start import launch
from cs336_systems.measure.clocks.ranks import RankSteps
from cs336_systems.measure.clocks.turns import take_turns
from cs336_systems.parallel.ddp import average
from cs336_systems.sizes import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = ModelConfig(d_model=256, d_ff=1024, num_layers=4, num_heads=4, vocab_size=1000)


def enter(work, wrapper, **settings):
    return work.step(wrapper, bucket_mb=2 if wrapper in WITH_BUCKETS else None, **settings)


def average_by_every_wrapper(rank):
    """Wrapper → the largest deviation of any gradient from the mean of the ranks' own, relative to its largest element.

    In the second of two steps, in which the hooks know the order.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    work = ParallelWorkload(CONFIG, 2, 128, rank)
    with enter(work, "none") as step:
        step.forward()
        step.backward()
        expected = [p.grad.clone() for p in work.parameters]
    for gradient in expected:
        average(gradient, dist.group.WORLD)
    found = {}
    for wrapper in WRAPPERS[1:]:
        with enter(work, wrapper) as step:
            for _ in range(2):
                work.drop_gradients()
                step.forward()
                step.backward()
                step.synchronize()
            off = [
                ((p.grad - wanted).abs().max() / wanted.abs().max()).item()
                for p, wanted in zip(work.parameters, expected, strict=True)
            ]
            sums = sum(p.grad.double().sum().item() for p in work.parameters)
        found[wrapper] = [max(off), ranks_agree(sums)]
    return found


def test_every_wrapper_averages_gradients():
    for found in launch(f"{__name__}:average_by_every_wrapper", 2):
        for wrapper, (off, agree) in found.items():
            assert agree, wrapper
            assert off < 1e-4, wrapper


def step_by_every_wrapper_and_optimizer(rank):
    """(wrapper, optimizer, dtype) → median times by phase, bytes held after the turn."""
    work = ParallelWorkload(CONFIG, 2, 128, rank)
    found = {}
    for dtype in ("fp32", "tf32", "bf16"):
        for wrapper in WRAPPERS:
            for optimizer in OPTIMIZERS if dtype == "bf16" else OPTIMIZERS[:1]:
                with enter(work, wrapper, dtype=dtype, optimizer=optimizer) as step:
                    samples = take_turns({"": step.phases}, RankSteps(rank, warmup=2, steps=3))[""]
                medians = {phase: samples.p50(phase) for phase in samples.turns[0]}
                found[f"{wrapper} {optimizer} {dtype}"] = [medians, torch.cuda.memory_allocated()]
    return found


def test_steps_are_timed_and_give_their_memory_back():
    for found in launch(f"{__name__}:step_by_every_wrapper_and_optimizer", 2):
        for name, (times, _) in found.items():
            phases = sum(ms for phase, ms in times.items() if phase != "step")
            assert 0 < phases < 1.2 * times["step"], name
        after = [held for name, (_, held) in found.items() if "adamw bf16" in name]
        assert max(after) - min(after) < 64 * 2**20
