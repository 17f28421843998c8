"""The least time of a training step: its parts against closed forms, and what must not make it slower."""

from __future__ import annotations

import dataclasses

import pytest

from cs336_systems import accounting
from cs336_systems.sizes import size

SMALL = dataclasses.replace(size("small"), context_length=1024)


@pytest.mark.parametrize("attention", ["reference", "compiled", "flash"])
def test_matmuls_and_attention_do_the_models_flops(attention):
    parts = accounting.train_step_kernels(SMALL, 4, "bf16", attention, False)
    flops = {name: sum(kernel.flops for kernel in kernels) for name, kernels in parts.items()}
    forward = accounting.forward_matmul_flops(SMALL, 4, 1024)
    inside = forward.pop("attention_scores") + forward.pop("attention_output")
    assert flops["matmuls"] == pytest.approx(3 * sum(forward.values()))
    # backward of flash computes the scores again: 7 products of half a matrix instead of 6 of a whole one
    assert flops["attention"] == pytest.approx(inside * (3.5 / 2 if attention == "flash" else 3))
    assert flops["elementwise"] == flops["optimizer"] == 0


def test_bytes_of_a_block_are_counted_from_its_tensors():
    tokens, d, f, layers = 2 * 1024, SMALL.d_model, SMALL.d_ff, SMALL.num_layers
    logits = 5 * 4 * tokens * SMALL.vocab_size
    moved = lambda dtype, compiled: (
        accounting.train_step_kernels(SMALL, 2, dtype, "flash", compiled)["elementwise"][0].num_bytes - logits
    )
    wide, narrow = 4 * tokens * d, 2 * tokens * d
    assert moved("fp32", False) == 3 * layers * (
        36 * wide + 5 * 4 * tokens * f
    )  # 14 + 14 + 2 + 6 tensors of width D
    assert moved("bf16", True) == 3 * layers * (5 * wide + 8 * narrow + 3 * 2 * tokens * f)
    [update] = accounting.train_step_kernels(SMALL, 2, "bf16", "flash", True)["optimizer"]
    assert update.num_bytes == 40 * accounting.num_parameters(SMALL)


def test_no_optimization_is_predicted_to_cost_time():
    ms = lambda dtype, attention, compiled, tflops: sum(
        accounting.train_step_ms(SMALL, 16, dtype, attention, compiled, tflops, 4.3).values()
    )
    ladder = [
        ms("fp32", "reference", False, 53), ms("tf32", "reference", False, 356), ms("bf16", "reference", False, 712),
        ms("bf16", "compiled", True, 712), ms("bf16", "flash", True, 712),
    ]  # fmt: skip
    assert ladder == sorted(ladder, reverse=True)


def test_wrong_choices_are_named():
    with pytest.raises(ValueError, match="unknown dtype 'fp8'"):
        accounting.train_step_ms(SMALL, 1, "fp8", "flash", True, 1.0, 1.0)
    with pytest.raises(ValueError, match="unknown attention 'sdpa'"):
        accounting.train_step_ms(SMALL, 1, "bf16", "sdpa", True, 1.0, 1.0)
    with pytest.raises(ValueError, match="tflops=0"):
        accounting.train_step_ms(SMALL, 1, "bf16", "flash", True, 0, 1.0)
