"""Fully sharded training in closed form: what a rank holds, what it sends, and what that should cost.

Symbols: N ranks; Ψ parameters, of which Ψ_w are weights of linear layers and embeddings, and the rest gains of norms,
(2L + 1)·D of them. A number of a master weight, gradient or moment has four bytes. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses

from cs336_systems.accounting.memory import autocast_copy_bytes, memory_moments, saved_layer_bytes
from cs336_systems.accounting.model import check_choice, num_parameters, parameter_counts, residual_bytes
from cs336_systems.accounting.operations import check_sizes
from cs336_systems.accounting.zero import adamw_state_bytes, shards, tensor_sizes
from cs336_systems.sizes import ModelConfig

KINDS = ("ddp", "sharded", "fsdp")
"""Everything on every rank; the optimizer's state sharded; weights, gradients and state sharded."""
_FP32 = 4


def sharded_parameters(config: ModelConfig) -> int:
    """Ψ_w: what `parallel.fsdp` shards."""
    return num_parameters(config) - parameter_counts(config)["norms"]


def held_bytes(config: ModelConfig, kind: str, num_ranks: int) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW's state on the rank that holds most, after a step: component → bytes.

    ddp: 4·Ψ, 4·Ψ, 8·Ψ; sharded: the state of the parameters that the rank owns; fsdp: of Ψ_w an N-th of all three (if
    N divides them: else the padding comes to it, some bytes a unit). The state has four bytes more for each tensor, a
    counter. ValueError for an unknown kind, or N that is not positive.
    """
    check_choice("kind", kind, KINDS)
    check_sizes(num_ranks=num_ranks)
    sizes = tensor_sizes(config)
    if kind == "fsdp":
        weights = sharded_parameters(config)
        own = -(-weights // num_ranks) + num_parameters(config) - weights
        state = 2 * _FP32 * own + _FP32 * len(sizes)
    else:
        own = num_parameters(config)
        state = max(
            adamw_state_bytes(s) for s in (shards(config, num_ranks) if kind == "sharded" else [sizes])
        )
    return {"parameters": _FP32 * own, "gradients": _FP32 * own, "optimizer_state": state}


def step_peak_bytes(
    config: ModelConfig, batch: int, sequence: int, kind: str, num_ranks: int, dtype: str = "fp32",
    attention: str = "reference", device: str = "cuda", recompute: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Component → bytes at the peak of a step that is not the first, with B × S tokens a rank and a fused optimizer.

    The moments are those of training on one device (`accounting.memory_moments`), each with this kind's share of
    weights, gradients and state. dtype "bf16" is autocast for ddp and sharded; fsdp computes with weights that have
    come in bf16, so that nothing is cast and no copies are kept, and saves the same activations. What is gathered, and
    gradients on their way (`lent_bytes`), are not counted, nor buckets. recompute: each block holds its input alone,
    and is computed again in backward. Errors as `held_bytes` and `memory_moments`.
    """
    held, whole = held_bytes(config, kind, num_ranks), num_parameters(config)
    alone = dataclasses.replace(config, num_layers=1) if recompute else config
    others, shape, how = whole - num_parameters(alone), (batch, sequence), (dtype, attention, device)
    residual, block = residual_bytes(config, *shape), sum(saved_layer_bytes(config, *shape, *how).values())
    copies = autocast_copy_bytes(config) - autocast_copy_bytes(alone) if dtype == "bf16" else 0
    found = []
    for moment, items in memory_moments(alone, *shape, "train_step", *how, "fused").items():
        passed = "first block" in moment or moment in ("embedding, backward", "optimizer step")
        here = items["saved_activations"] + items["temporaries"]
        # of the other blocks the inputs; at the head and the loss of this one, too
        if recompute and not passed:
            here += (config.num_layers - 1) * residual + (0 if "block" in moment else residual - block)
        if kind != "fsdp":
            here += items["autocast_copies"] + copies * ("backward" not in moment and not passed)
        gradients = items["gradients"] + _FP32 * others * passed
        found.append({
            "parameters": held["parameters"], "gradients": held["gradients"] * gradients // (_FP32 * whole),
            "optimizer_state": held["optimizer_state"], "activations": here,
        })  # fmt: skip
    return max(found, key=lambda alive: sum(alive.values()))


def unit_sizes(config: ModelConfig) -> list[int]:
    """Weights of each unit: embedding, blocks, head."""
    counts = parameter_counts(config)
    block = (counts["attention"] + counts["ffn"]) // config.num_layers
    return [counts["embedding"], *[block] * config.num_layers, counts["head"]]


def lent_bytes(config: ModelConfig, compute_bytes: int) -> int:
    """What the two largest units take while gathered, with so many bytes a number, and one's whole gradients."""
    *_, next_one, largest = sorted(unit_sizes(config))
    return compute_bytes * (next_one + largest) + _FP32 * largest


def sent_bytes(config: ModelConfig, kind: str, num_ranks: int, compute_bytes: int = 4) -> dict[str, float]:
    """Bytes that a rank sends in a step, and as many that it receives: phase (forward, backward, optimizer) → bytes.

    A ring's all-gather or reduce-scatter of b bytes sends (N - 1)/N · b, an all-reduce twice that. Gradients are in
    fp32, 4·Ψ; fsdp gathers weights of `compute_bytes` each, in forward and, but for the embedding's, in backward.

        ddp      backward 2 · 4·Ψ
        sharded  backward 2 · 4·Ψ            optimizer 4·Ψ     (broadcasts)
        fsdp     forward c·Ψ_w               backward c·(Ψ_w - V·D) + 4·Ψ_w + 2 · 4·(Ψ - Ψ_w)
    """
    check_choice("kind", kind, KINDS)
    check_sizes(num_ranks=num_ranks, compute_bytes=compute_bytes)
    total, weights = num_parameters(config), sharded_parameters(config)
    passes = (num_ranks - 1) / num_ranks
    if kind == "fsdp":
        again = weights - config.vocab_size * config.d_model
        backward = compute_bytes * again + _FP32 * weights + 2 * _FP32 * (total - weights)
        return {"forward": passes * compute_bytes * weights, "backward": passes * backward, "optimizer": 0.0}
    after = passes * _FP32 * total if kind == "sharded" else 0.0
    return {"forward": 0.0, "backward": passes * 2 * _FP32 * total, "optimizer": after}
