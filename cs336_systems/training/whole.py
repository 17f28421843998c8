"""Weights and moments of a run as a checkpoint has them, whole, and its gradients' norm; whatever shards the model.

wrapped: what a step calls, a `FullyShardedDataParallel` or any other; model: the model inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from cs336_systems.parallel import sharded_state
from cs336_systems.parallel.fsdp import FullyShardedDataParallel, ShardedGradScaler
from cs336_systems.training import checkpoints, optimizer

_INSIDE = "model."  # a wrapper's module is `modes.WithLoss`


def weights(wrapped: Callable[..., Any], model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state by name, on rank 0; a sharded model's ranks all call it, and others than rank 0 get {}."""
    if isinstance(wrapped, FullyShardedDataParallel):
        state = sharded_state.full_state_dict(wrapped)
        return {name.removeprefix(_INSIDE): tensor for name, tensor in state.items()}
    return model.state_dict()


def take_weights(
    wrapped: Callable[..., Any], model: nn.Module, state: Mapping[str, torch.Tensor], whose: str
) -> None:
    """Has the model take weights, or of them this rank's shards; ValueError in a line where they do not fit it."""
    if not isinstance(wrapped, FullyShardedDataParallel):
        checkpoints.into(model, state, whose)
        return
    try:
        sharded_state.load_full_state_dict(
            wrapped, {_INSIDE + name: tensor for name, tensor in state.items()}
        )
    except ValueError as error:
        raise ValueError(f"the weights do not fit {whose}: {error}") from None


def moments(wrapped: Callable[..., Any], made: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as a plain one has it, on rank 0; all ranks call it."""
    if isinstance(wrapped, FullyShardedDataParallel):
        return sharded_state.full_optimizer_state_dict(wrapped, made)
    return made.state_dict()


def take_moments(wrapped: Callable[..., Any], made: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Has an optimizer go on from such a state, with its own settings, which may be others by now."""
    optimizer.keep_settings(made, state)
    if isinstance(wrapped, FullyShardedDataParallel):
        sharded_state.load_full_optimizer_state_dict(wrapped, made, state)
    else:
        made.load_state_dict(state)


def reduces_each(wrapped: Callable[..., Any]) -> bool:
    """Whether each microbatch's gradients are reduced at once: of sharded weights no rank shall keep whole ones."""
    return isinstance(wrapped, FullyShardedDataParallel)


def keeping_gradients(wrapped: Callable[..., Any]) -> AbstractContextManager[Any]:
    """What a microbatch but the last runs in."""
    if reduces_each(wrapped) or not hasattr(wrapped, "no_sync"):
        return nullcontext()
    return wrapped.no_sync()


def clip(wrapped: Callable[..., Any], model: nn.Module, largest: float) -> torch.Tensor:
    """Scales the gradients down to this norm; the norm before."""
    if isinstance(wrapped, FullyShardedDataParallel):
        return wrapped.clip_grad_norm_(largest)
    return nn.utils.clip_grad_norm_(model.parameters(), largest)


def scaler(wrapped: Callable[..., Any], device: str, enabled: bool) -> torch.amp.GradScaler:
    """The gradient scaler of a run; where shards are scaled, ranks skip a step together."""
    cls = ShardedGradScaler if isinstance(wrapped, FullyShardedDataParallel) else torch.amp.GradScaler
    return cls(device, enabled=enabled, init_scale=2.0**16)
