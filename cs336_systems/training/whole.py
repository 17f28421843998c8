"""A run's weights and moments as its checkpoints have them, whole; whatever shards the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cs336_systems.parallel import sharded_state
from cs336_systems.parallel.fsdp import FullyShardedDataParallel
from cs336_systems.training import checkpoints

_INSIDE = "model."  # a wrapper's module is `modes.WithLoss`


def of(
    wrapped: Callable[..., Any], model: nn.Module, made: torch.optim.Optimizer
) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """The model's state by name, and the optimizer's as a plain one has it, on rank 0; all ranks call it. wrapped: what
    a step calls; model: the model inside of it."""
    if not isinstance(wrapped, FullyShardedDataParallel):
        return model.state_dict(), made.state_dict()
    state = sharded_state.full_state_dict(wrapped)
    weights = {name.removeprefix(_INSIDE): tensor for name, tensor in state.items()}
    return weights, sharded_state.full_optimizer_state_dict(wrapped, made)


def take(
    wrapped: Callable[..., Any], model: nn.Module, made: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor], moments: dict[str, Any], whose: str,
) -> None:  # fmt: skip
    """Has model and optimizer go on from such states, or from this rank's shards of them; ValueError in a line where
    the weights do not fit."""
    if not isinstance(wrapped, FullyShardedDataParallel):
        checkpoints.into(model, weights, whose)
        made.load_state_dict(moments)
        return
    try:
        sharded_state.load_full_state_dict(wrapped, {_INSIDE + name: x for name, x in weights.items()})
    except ValueError as error:
        raise ValueError(f"the weights do not fit {whose}: {error}") from None
    sharded_state.load_full_optimizer_state_dict(wrapped, made, moments)
