"""A run's weights and moments as its checkpoints have them, whole, and its gradients' norm; whatever shards the model.

whole = of(wrapped, model)     # Whole, or Sharded where a FullyShardedDataParallel wraps the model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from cs336_systems.parallel import sharded_state
from cs336_systems.parallel.fsdp import FullyShardedDataParallel, ShardedGradScaler
from cs336_systems.training import checkpoints

_INSIDE = "model."  # a wrapper's module is `modes.WithLoss`


class Whole:
    """Every rank has all of the model. wrapped: what a step calls; model: the model inside of it."""

    reduces_each = False
    """Whether each microbatch's gradients are reduced at once."""
    scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler

    def __init__(self, wrapped: Callable[..., Any], model: nn.Module) -> None:
        self.wrapped, self.model = wrapped, model

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The model's state by name, on rank 0; all ranks call it."""
        return self.model.state_dict()

    def take_weights(self, state: Mapping[str, torch.Tensor], whose: str) -> None:
        """Has the model take weights, or of them this rank's shards; ValueError in a line where they do not fit."""
        checkpoints.into(self.model, state, whose)

    def moments(self, made: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state as a plain one has it, on rank 0; all ranks call it."""
        return made.state_dict()

    def take_moments(self, made: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Has the optimizer go on from such a state."""
        made.load_state_dict(state)

    def keeping_gradients(self) -> AbstractContextManager[Any]:
        """What a microbatch but the last runs in."""
        return self.wrapped.no_sync() if hasattr(self.wrapped, "no_sync") else nullcontext()

    def clip(self, largest: float) -> torch.Tensor:
        """Scales the gradients down to this norm; the norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest)


class Sharded(Whole):
    """A rank has shards of the weights, and never keeps whole gradients. Scaled shards' ranks skip a step together."""

    reduces_each = True
    scaler = ShardedGradScaler
    wrapped: FullyShardedDataParallel

    def weights(self) -> Mapping[str, torch.Tensor]:
        state = sharded_state.full_state_dict(self.wrapped)
        return {name.removeprefix(_INSIDE): tensor for name, tensor in state.items()}

    def take_weights(self, state: Mapping[str, torch.Tensor], whose: str) -> None:
        inside = {_INSIDE + name: tensor for name, tensor in state.items()}
        try:
            sharded_state.load_full_state_dict(self.wrapped, inside)
        except ValueError as error:
            raise ValueError(f"the weights do not fit {whose}: {error}") from None

    def moments(self, made: torch.optim.Optimizer) -> dict[str, Any]:
        return sharded_state.full_optimizer_state_dict(self.wrapped, made)

    def take_moments(self, made: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        sharded_state.load_full_optimizer_state_dict(self.wrapped, made, state)

    def keeping_gradients(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def clip(self, largest: float) -> torch.Tensor:
        return self.wrapped.clip_grad_norm_(largest)


def of(wrapped: Callable[..., Any], model: nn.Module) -> Whole:
    """What a run's wrapper needs."""
    return (Sharded if isinstance(wrapped, FullyShardedDataParallel) else Whole)(wrapped, model)
