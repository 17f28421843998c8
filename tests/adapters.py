"""What the course's test suites (Spring 2025 and 2026) ask a solution for, by their names.

The suites are dropped in beside this file (`make course-tests SUITE=path/to/their/tests`) and call these functions.
"""

from __future__ import annotations

from typing import Any

import torch


# ------------------------------------------------------------------------------------------------ attention
def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in plain PyTorch: a Function class with `forward(ctx, Q, K, V, is_causal=False)`."""
    from cs336_systems.attention.flash_torch import FlashAttentionTorch

    return FlashAttentionTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton: a Function class with `forward(ctx, Q, K, V, is_causal=False)`."""
    from cs336_systems.attention.flash_triton import FlashAttentionTriton

    return FlashAttentionTriton


get_flash_autograd_function_triton = get_flashattention_autograd_function_triton
get_flash_autograd_function_pytorch = get_flashattention_autograd_function_pytorch


# ------------------------------------------------------------------------------------------------ data parallel
def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Spring 2025: a container that all-reduces each gradient as it becomes ready; `.module` is the wrapped model."""
    from cs336_systems.parallel.ddp import OverlappedDDP

    return OverlappedDDP(module)


def ddp_individual_parameters_on_after_backward(
    ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Spring 2025: called after backward, before the optimizer step."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float | None) -> torch.nn.Module:
    """Spring 2025: a container that all-reduces buckets of gradients, `bucket_size_mb` · 2^20 bytes each."""
    from cs336_systems.parallel.ddp import BucketedDDP

    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Spring 2025: called after backward, before the optimizer step."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Spring 2025: called at the start of each training step. Buckets need nothing: a step ends ready for the next."""


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """Spring 2026: a data-parallel container; `.module` is the wrapped model."""
    from cs336_systems.parallel.ddp import OverlappedDDP

    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Spring 2026: called after backward, before the optimizer step."""
    ddp_model.finish_gradient_synchronization()


# ------------------------------------------------------------------------------------------------ sharded optimizer
def get_sharded_optimizer(params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any) -> Any:
    """Both years: an optimizer that keeps only this rank's share of the state."""
    from cs336_systems.parallel.zero import ShardedOptimizer

    return ShardedOptimizer(params, optimizer_cls, **kwargs)


# ------------------------------------------------------------------------------------------------ fully sharded
def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Spring 2026: a fully sharded container; `.module` is the wrapped model, whose layers hold shards.

    It serves the suite of version 26.1.4, and that of 26.1.1 but for `test_fsdp_correctness[fp32]`: there weights must
    equal those of one process bit for bit, which the mean of two half batches' gradients cannot, by rounding alone.
    """
    from cs336_systems.parallel.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Spring 2026: called after backward, before the optimizer step."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Spring 2026: the whole parameters by name, gathered from all ranks."""
    with fsdp_model.full_parameters():
        return {name: p.detach().clone() for name, p in fsdp_model.module.named_parameters()}
