"""What turns gradients into weights: torch's AdamW, its parameter groups, the learning rate's schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from cs336_systems.parallel.zero import ShardedOptimizer
from cs336_systems.training.config import Optimizer, Schedule


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The model's parameters in two groups: matrices, which decay, and norms and embeddings, which do not."""
    decay = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    decays = set(map(id, decay))
    rest = [p for p in model.parameters() if id(p) not in decays]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def make(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a configuration over a model's parameters; with `sharded` all ranks make it together."""
    groups = parameter_groups(model, config.weight_decay)
    settings: dict[str, Any] = {
        "lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True,
    }  # fmt: skip
    if config.sharded:
        return ShardedOptimizer(groups, torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def learning_rate(config: Schedule, highest: float, progress: float) -> float:
    """The learning rate when `progress`, 0 to 1, of the run is done: a linear warm-up, then a cosine or a constant."""
    if progress < config.warmup:
        return highest * max(progress, 0.0) / config.warmup
    if config.kind == "constant":
        return highest
    rest = min(1.0, (progress - config.warmup) / max(1 - config.warmup, 1e-12))
    return highest * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * rest)))
