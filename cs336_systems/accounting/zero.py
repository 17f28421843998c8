"""Data-parallel training with AdamW in fp32, with and without a sharded optimizer state: memory and communication.

Symbols: N ranks, Ψ parameters. Sharded means what `parallel.zero` does: each rank updates whole parameters of
its own and broadcasts them; gradients are all-reduced before, so that all ranks hold all of them. Unsharded is the same
with one rank, since plain data parallelism repeats on every rank what one would hold.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054),
sections 3, 5 and 7. Nothing here needs torch.
"""

from __future__ import annotations

from cs336_systems.accounting.memory import peak_bytes, saved_activation_bytes
from cs336_systems.accounting.model import check_choice
from cs336_systems.accounting.operations import check_sizes
from cs336_systems.sizes import ModelConfig

SCHEMES = ("ddp", "sharded", "zero1")
"""Plain data parallelism; `ShardedOptimizer` after it; ZeRO stage 1, which reduces gradients to their owners alone."""
MOMENTS = ("initialized", "before_step", "after_step")
STEP_MOMENTS = ("initialized", "first_before", "first_after", "later_forward", "later_before", "later_after")
"""Before any step; in the first one directly before and after the optimizer's step; in a later one also after forward
and loss, when the graph is complete."""
COMPONENTS = ("parameters", "gradients", "optimizer_state", "buckets", "activations")
_FP32 = 4


# ------------------------------------------------------------------------------------------------------ shares
def tensor_sizes(config: ModelConfig) -> list[int]:
    """Elements of each parameter of `cs336_systems.model.TransformerLM`, in their order."""
    d, f = config.d_model, config.d_ff
    block = [d, d * d, *(2 * [d * config.d_kv]), d * d, d, *(3 * [d * f])]
    return [config.vocab_size * d, *(config.num_layers * block), d, config.vocab_size * d]


def shards(config: ModelConfig, num_ranks: int) -> list[list[int]]:
    """Elements of the parameters that each of N ranks owns, in the order of ranks.

    The rule of `parallel.shares.assign`: the largest parameter first, each to the rank that holds least so far (of
    equal ones the lowest). The order of equally large parameters changes whose they are, but not how many each
    rank gets. ValueError unless num_ranks is positive.
    """
    check_sizes(num_ranks=num_ranks)
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    held = [0] * num_ranks
    for size in sorted(tensor_sizes(config), reverse=True):
        rank = held.index(min(held))
        owned[rank].append(size)
        held[rank] += size
    return owned


def shard_imbalance(config: ModelConfig, num_ranks: int) -> float:
    """By how much the fullest rank exceeds an N-th of the parameters: max / mean - 1. ValueError as `shards`."""
    held = [sum(sizes) for sizes in shards(config, num_ranks)]
    return num_ranks * max(held) / sum(held) - 1


# ------------------------------------------------------------------------------------------------------ memory
def adamw_state_bytes(sizes: list[int]) -> int:
    """Two fp32 moments for each element of the parameters of these sizes, and one fp32 step counter a parameter.

    A fused AdamW keeps the counters on the GPU; otherwise they lie in main memory.
    """
    return 2 * _FP32 * sum(sizes) + _FP32 * len(sizes)


def zero_memory(
    config: ModelConfig, num_ranks: int, rank: int | None = None, first_step: bool = True
) -> dict[str, dict[str, int]]:
    """Bytes alive on one of N ranks between the phases of a training step: moment → component → bytes.

    Moments: initialized (the model), before_step (after backward, activations gone), after_step (gradients not yet
    dropped). Components: parameters and gradients, 4·Ψ each and whole on every rank; optimizer_state, 8 bytes for each
    parameter that the rank owns and 4 for each tensor, made by the first step: before it there is none if `first_step`.
    num_ranks=1 is unsharded. rank: None for the rank that holds most.

    Only tensors are counted. An allocator rounds each up to 512 bytes, a bucketed data-parallel container may hold
    gradients from initialization on, and within the step a foreach optimizer has temporaries as large as what it
    updates at once (a round of the share), a fused one none. ValueError for a rank that is not there or num_ranks that
    is not positive.
    """
    states = [adamw_state_bytes(sizes) for sizes in shards(config, num_ranks)]
    if rank is not None and not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank}; allowed: 0 ... {num_ranks - 1}, or None for the rank that holds most")
    state = max(states) if rank is None else states[rank]
    weights = _FP32 * sum(tensor_sizes(config))
    alive = {
        "initialized": (0, 0),
        "before_step": (weights, 0 if first_step else state),
        "after_step": (weights, state),
    }
    return {
        moment: {"parameters": weights, "gradients": gradients, "optimizer_state": held}
        for moment, (gradients, held) in alive.items()
    }


def zero_step_memory(
    config: ModelConfig, batch: int, sequence: int, num_ranks: int, rank: int | None = None, buckets: int = 0,
    device: str = "cuda",
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Bytes alive on one of N ranks at STEP_MOMENTS: moment → component (COMPONENTS) → bytes, B × S tokens per rank.

    As `zero_memory`, with what the graph has saved at `later_forward` (`accounting.saved_activation_bytes`, attention
    materialized), and `buckets` bytes that a data-parallel container holds all the time beside the gradients: none
    where gradients are views of buckets that live as long as they do; 4·Ψ where it keeps copies, as torch's DDP does
    by default. Errors as `zero_memory` and `saved_activation_bytes`.
    """
    first = zero_memory(config, num_ranks, rank)
    later = zero_memory(config, num_ranks, rank, first_step=False)
    activations = sum(saved_activation_bytes(config, batch, sequence, device=device).values())
    alive = {
        "initialized": first["initialized"],
        "first_before": first["before_step"],
        "first_after": first["after_step"],
        "later_forward": {**later["before_step"], "gradients": 0},
        "later_before": later["before_step"],
        "later_after": later["after_step"],
    }
    return {
        moment: {**parts, "buckets": buckets, "activations": activations if moment == "later_forward" else 0}
        for moment, parts in alive.items()
    }


def zero_peak_memory(
    config: ModelConfig, batch: int, sequence: int, num_ranks: int, rank: int | None = None, buckets: int = 0,
    device: str = "cuda",
) -> dict[str, int]:  # fmt: skip
    """Component → bytes at the peak of a step that is not the first, with a fused optimizer; arguments and errors as
    `zero_step_memory`.

    State and buckets are there throughout such a step, so the moment of the peak is that of training on one device
    (`accounting.peak_bytes`): where a block's activations outweigh its gradients, the beginning of backward, else its
    end. Temporaries count as activations. An optimizer that is not fused, and containers that copy gradients into
    buckets while backward runs, need up to a bucket or a round of the share more.
    """
    items = peak_bytes(config, batch, sequence, "train_step", device=device, optimizer="fused")
    return {
        "parameters": items["weights"],
        "gradients": items["gradients"],
        "optimizer_state": zero_memory(config, num_ranks, rank)["after_step"]["optimizer_state"],
        "buckets": buckets,
        "activations": items["saved_activations"] + items["temporaries"],
    }


# ----------------------------------------------------------------------------------------------- communication
def zero_step_bytes(
    scheme: str, num_ranks: int, parameter_bytes: float, gradient_bytes: float
) -> dict[str, float]:
    """Phase → bytes that a rank sends, and as many that it receives, in one step; on average over ranks.

    A ring's reduce-scatter or all-gather of b bytes passes (N - 1)/N · b through each rank, and an all-reduce is one
    after the other. A broadcast hands its b bytes from rank to rank N - 1 times; if every rank has an N-th of the
    parameters to broadcast, that is (N - 1)/N of them a rank, as in an all-gather.

        ddp      gradients 2·(N - 1)/N · G    all-reduce
        sharded  gradients 2·(N - 1)/N · G    all-reduce        parameters (N - 1)/N · P    broadcasts
        zero1    gradients   (N - 1)/N · G    reduce-scatter    parameters (N - 1)/N · P    all-gather

    With P = G, sharding costs half as much again as data parallelism, and ZeRO stage 1 no more than that (section 7).
    A rank whose share is s bytes receives P - s. ValueError for an unknown scheme or a size that is not positive.
    """
    check_choice("scheme", scheme, SCHEMES)
    check_sizes(num_ranks=num_ranks, parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)
    passes = {"ddp": (2, 0), "sharded": (2, 1), "zero1": (1, 1)}[scheme]
    return {
        "gradients": passes[0] * (num_ranks - 1) * gradient_bytes / num_ranks,
        "parameters": passes[1] * (num_ranks - 1) * parameter_bytes / num_ranks,
    }


# -------------------------------------------------------------------------------------------------------- time
ADAMW_BYTES = 28
"""Bytes that a fused AdamW in fp32 moves for one parameter: weight, gradient and two moments read, all but the gradient
written."""


def zero_optimizer_ms(
    num_parameters: int, num_ranks: int, tb_per_s: float, link_gb_per_s: float, rounds: int = 1
) -> dict[str, float]:
    """The least times in ms of the optimizer's step in fp32, with memory at `tb_per_s` and a link that sends
    `link_gb_per_s` (10^9 bytes/s, one direction) while it receives as much.

    plain: AdamW over all parameters, 28·Ψ / β. update: over a share, an N-th of it. broadcast: of all parameters,
    (N - 1)/N · 4·Ψ / w. sharded: both in R rounds of equal size, a round's broadcast overlapping the next one's update,
    u/R + (R - 1)/R · max(u, b) + b/R; with one round their sum. ValueError for what is not positive.

    Without overlap, sharding is the faster one if w > β / 7, whatever N is: it saves (N - 1)/N · 28·Ψ / β.
    """
    check_sizes(
        num_parameters=num_parameters,
        num_ranks=num_ranks,
        tb_per_s=tb_per_s,
        link_gb_per_s=link_gb_per_s,
        rounds=rounds,
    )
    plain = ADAMW_BYTES * num_parameters / (tb_per_s * 1e9)
    update = plain / num_ranks
    broadcast = (num_ranks - 1) / num_ranks * _FP32 * num_parameters / (link_gb_per_s * 1e6)
    both = update / rounds + (rounds - 1) / rounds * max(update, broadcast) + broadcast / rounds
    return {"plain": plain, "update": update, "broadcast": broadcast, "sharded": both}
