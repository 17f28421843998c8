"""The data-parallel training step: every wrapper with every optimizer, on one model, one after the other."""

from __future__ import annotations

import weakref

import distributed
import pytest
import torch.distributed as dist
from distributed import ranks_agree

from cs336_systems.chapters.shared.parallel_step import (
    OPTIMIZERS,
    PHASES,
    WITH_BUCKETS,
    WRAPPERS,
    ParallelWorkload,
)
from cs336_systems.launch.group import Rank
from cs336_systems.measure.clocks import ranks, turns
from cs336_systems.sizes import ModelConfig

TOY = ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=50)
COMMUNICATING = [w for w in WRAPPERS if w != "none"]


def this_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    return Rank(rank, rank, size, size, "cpu", "gloo")


def checksum(work):
    return sum(p.detach().double().abs().sum().item() for p in work.parameters)


def workload(batch=2):
    return ParallelWorkload(TOY, batch, 8, this_rank())


def enter(work, wrapper, **settings):
    return work.step(wrapper, bucket_mb=0.01 if wrapper in WITH_BUCKETS else None, **settings)


def all_wrappers_train_alike():
    """Losses and weights after three steps from the same ones, with each optimizer."""
    for optimizer in OPTIMIZERS:
        found = {}
        for wrapper in COMMUNICATING:
            work = workload()
            with enter(work, wrapper, optimizer=optimizer) as step:
                for _ in range(3):
                    step.forward()
                    loss = step.loss.item()
                    step.backward()
                    step.synchronize()
                    step.optimizer_step()
            assert ranks_agree(checksum(work)), wrapper
            found[wrapper] = loss, checksum(work)
        first, *others = found.items()
        for wrapper, other in others:
            assert other == pytest.approx(first[1], rel=1e-5), (optimizer, wrapper)


def take_turns():
    """On one workload: hooks and wrappers are gone after each turn; without a wrapper nothing is sent."""
    work = workload()
    batches = ranks.gathered(work.ids.tolist(), work.rank)
    assert batches[0] != batches[1], "each rank has a batch of its own"
    for turn in range(2):
        for wrapper in WRAPPERS:
            with enter(work, wrapper) as step:
                alive = weakref.ref(step.container)
                clock = ranks.RankSteps(work.rank, warmup=1, steps=2)
                times = turns.take_turns({"": step.phases}, clock)[""].turns[0]
                assert list(times) == [*PHASES, "step"] and all(len(ms) == 2 for ms in times.values())
                assert all(p.grad is None for p in work.parameters)
                buckets = step.num_buckets
            assert wrapper == "none" or alive() is None, f"{wrapper} is held in turn {turn}"
            assert not any(p._post_accumulate_grad_hooks for p in work.parameters)
            expected = {"none": 0, "flat": 1, "torch": None, "torch_view": None}
            if wrapper in expected:
                assert buckets == expected[wrapper]
            else:
                assert 1 < buckets <= len(work.parameters)
            assert ranks_agree(times)
    with enter(work, "torch") as step:
        step.forward()
    step = enter(work, "none")
    with step:
        gradients = []
        step.forward()
        step.backward()
        gradients = [p.grad.sum().item() for p in work.parameters]
    assert not ranks_agree(sum(gradients)), "the wrapper before has left a hook behind"


def alone():
    work = workload()
    for wrapper in WRAPPERS:
        with enter(work, wrapper, dtype="bf16") as step:
            assert step.matmul_precision == "high"
            step.run()


def unequal_batches():
    work = workload(batch=1 + dist.get_rank())
    for wrapper in COMMUNICATING:
        with enter(work, wrapper) as step:
            step.run()
    assert ranks_agree(checksum(work))


def refuse():
    work = workload()
    for settings, said in (
        ({"wrapper": "fsdp"}, "allowed: none, naive"),
        ({"wrapper": "naive", "bucket_mb": 1}, "those with buckets are bucketed"),
        ({"wrapper": "none", "dtype": "fp8"}, "allowed: fp32"),
        ({"wrapper": "none", "optimizer": "sgd"}, "allowed: adamw"),
    ):
        with pytest.raises(ValueError, match=said):
            work.step(**settings)
    step = work.step("naive")
    with pytest.raises(RuntimeError, match="inside its context"):
        step.forward()
    with step, pytest.raises(RuntimeError, match="needs the loss"):
        step.backward()


def run_checks():
    for check in {1: (alone, refuse), 2: (all_wrappers_train_alike, take_turns, unequal_batches)}[
        dist.get_world_size()
    ]:
        check()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_on_ranks(num_ranks):
    distributed.run(run_checks, num_ranks)


# -------------------------------------------------------------------------------------------- measure.clocks.ranks
def test_the_slowest_rank_counts_with_all_its_phases():
    first = [{"a": 1.0, "b": 5.0, "step": 6.0}, {"a": 1.0, "b": 1.0, "step": 2.0}]
    second = [{"a": 2.0, "b": 3.0, "step": 5.0}, {"a": 2.0, "b": 2.0, "step": 4.0}]
    times = ranks.slowest([first, second])
    assert times == {"a": [1.0, 2.0], "b": [5.0, 2.0], "step": [6.0, 4.0]}


def test_wrong_counts_of_steps_are_named():
    for wrong in ({"warmup": -1}, {"steps": 0}, {"num_rounds": 0}):
        with pytest.raises(ValueError, match="at least 0, 1 and 1 are needed"):
            ranks.RankSteps(None, **{"warmup": 0, "steps": 1} | wrong)
