"""What turns gradients into weights: AdamW of our own, parameter groups, the learning rate's schedule.

Source of AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the form of the
course's first assignment: the bias corrections are folded into the learning rate, and decay comes after the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from cs336_systems.parallel.zero import ShardedOptimizer
from cs336_systems.training.config import Optimizer, Schedule


class AdamW(torch.optim.Optimizer):
    """AdamW as its formula reads, a few whole-list operations a step.

    params: parameters or groups; lr, betas, eps, weight_decay as torch's. State of each parameter: `step`, `m` and `v`,
    of the parameter's shape and dtype. Sparse gradients are a ValueError.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        by_step: dict[int, list[torch.Tensor]] = {}
        for p in params:
            if p.grad.is_sparse:
                raise ValueError("AdamW got a sparse gradient; it takes dense ones")
            state = self.state[p]
            if not state:
                state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            state["step"] += 1
            by_step.setdefault(state["step"], []).append(p)
        for t, some in by_step.items():
            grads = [p.grad for p in some]
            m, v = ([self.state[p][name] for p in some] for name in ("m", "v"))
            torch._foreach_lerp_(m, grads, 1 - beta1)  # m ← β₁ m + (1 − β₁) g
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, grads, grads, 1 - beta2)  # v ← β₂ v + (1 − β₂) g²
            root = torch._foreach_sqrt(v)
            torch._foreach_add_(root, eps)
            rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
            torch._foreach_addcdiv_(some, m, root, -rate)
            torch._foreach_mul_(some, 1 - lr * group["weight_decay"])


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The model's parameters in two groups: matrices, which decay, and norms and embeddings, which do not."""
    embedded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    params = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in params if p.ndim >= 2 and id(p) not in embedded]
    rest = [p for p in params if p.ndim < 2 or id(p) in embedded]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make(model: nn.Module, config: Optimizer, device: str) -> torch.optim.Optimizer:
    """The optimizer of a configuration over a model's parameters; with `sharded` all ranks make it together."""
    groups = parameter_groups(model, config.weight_decay)
    settings: dict[str, Any] = {
        "lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.eps,
    }  # fmt: skip
    cls: type[torch.optim.Optimizer] = AdamW
    if config.name == "adamw":
        cls, settings["fused"] = torch.optim.AdamW, True
    return ShardedOptimizer(groups, cls, **settings) if config.sharded else cls(groups, **settings)


def keep_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Puts an optimizer's own settings, which may be others by now, into the `state_dict` that it is to go on from."""
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        saved.update({name: value for name, value in own.items() if name != "params"})


def learning_rate(config: Schedule, highest: float, progress: float) -> float:
    """The learning rate when `progress`, 0 to 1, of the run is done: a linear warm-up, then a cosine or a constant."""
    if progress < config.warmup:
        return highest * max(progress, 0.0) / config.warmup
    if config.kind == "constant":
        return highest
    rest = min(1.0, (progress - config.warmup) / max(1 - config.warmup, 1e-12))
    return highest * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * rest)))
