"""One training step, split into its phases: what every chapter about whole models runs and measures.

    workload = Workload(size("small"), batch=4, context_length=512, device="cuda")
    step = workload.step("train_step", dtype="bf16", attention="flash_triton", compile="default")
    step.prepare()
    for phase in step.phases.values():
        phase()

A `Workload` is what the variants of a step share: weights, optimizer state, a random batch. Steps of one workload may
take turns; `prepare` sets what is global (fp32 precision, the model's attention) before each turn.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from cs336_systems.accounting import MODES
from cs336_systems.model import OWN_CLASS, build, choose_attention
from cs336_systems.sizes import ModelConfig

DTYPES = ("fp32", "tf32", "bf16")
"""fp32; fp32 whose matmuls may use TF32; bf16 autocast over fp32 weights."""
COMPILE_MODES = ("off", "default", "reduce-overhead", "max-autotune")
OPTIMIZERS = ("fused", "foreach")


def check(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError, naming the allowed values, unless `value` is one of them."""
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")


class Workload:
    """A model on a device, a random batch for it, and AdamW: shared by the steps that are compared.

    config: sizes; batch, context_length: the token ids' shape; model: `"module:Class"` (see `model.build`); optimizer:
    `"fused"` (one kernel for many tensors) or `"foreach"` (torch's default on GPUs, with temporaries as large as the
    weights). The optimizer's state is made by the first step that updates weights, as torch does.
    """

    def __init__(
        self, config: ModelConfig, batch: int, context_length: int, device: str, *,
        model: str = OWN_CLASS, optimizer: str = "fused", seed: int = 0,
    ) -> None:  # fmt: skip
        check("optimizer", optimizer, OPTIMIZERS)
        self.config = dataclasses.replace(config, context_length=context_length)
        self.device, self.own_model = device, model == OWN_CLASS
        torch.manual_seed(seed)
        self.model = build(self.config, model=model, device=device)
        self.parameters = tuple(self.model.parameters())
        ids = torch.randint(0, config.vocab_size, (batch, context_length + 1), device=device)
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self._optimizer = optimizer
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters, lr=1e-4, **{self._optimizer: True})

    def step(self, mode: str, dtype: str = "fp32", attention: str = "auto", compile: str = "off") -> Step:
        """One variant of this workload's step. ValueError for an unknown choice, or attention of a model not ours."""
        return Step(self, mode, dtype, attention, compile)

    def drop_gradients(self) -> None:
        """`model.zero_grad()` without traversing the modules, which would be timed with a step."""
        for parameter in self.parameters:
            parameter.grad = None

    def forget(self, optimizer: bool = False) -> None:
        """Drops the gradients, and with `optimizer` its state too: what a step that ran out of memory leaves behind."""
        self.drop_gradients()
        if optimizer:
            self.optimizer = self._new_optimizer()


class Step:
    """One variant of a workload's step. `phases` maps forward, backward, optimizer (as far as `mode` goes) to
    functions of no arguments, to be called in this order.

    mode: `"forward"`: the logits, without a graph (`torch.no_grad`); `"forward_backward"`: with cross entropy and
    gradients; `"train_step"`: AdamW as well. dtype: see DTYPES. attention: a key of `attention.IMPLEMENTATIONS` or
    "auto". compile: `"off"`, or a mode of torch.compile for model and loss together; `"reduce-overhead"` replays CUDA
    graphs.
    """

    def __init__(self, workload: Workload, mode: str, dtype: str, attention: str, compile: str) -> None:
        check("mode", mode, MODES)
        check("dtype", dtype, DTYPES)
        check("compile", compile, COMPILE_MODES)
        if attention != "auto" and not workload.own_model:
            raise ValueError(f"attention={attention} can be chosen for TransformerLM only")
        self.workload, self.mode, self.dtype = workload, mode, dtype
        self.attention, self.compile = attention, compile
        self.loss: torch.Tensor | None = None
        function = _logits if mode == "forward" else _loss
        self._function: Callable[..., torch.Tensor] = function
        if compile != "off":
            # Dynamo caches compiled code by code object, at most eight entries each: every step gets its own
            self._function = torch.compile(_copy(function), mode=compile, fullgraph=True, dynamic=False)

    @property
    def matmul_precision(self) -> str:
        """torch's setting for fp32 matmuls: "highest" computes in fp32, "high" in TF32."""
        return "highest" if self.dtype == "fp32" else "high"

    def prepare(self) -> None:
        """Sets what is global for this step: the precision of fp32 matmuls, and the model's attention."""
        torch.set_float32_matmul_precision(self.matmul_precision)
        if self.workload.own_model:
            choose_attention(self.workload.model, self.attention)

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 autocast for dtype "bf16", nothing else otherwise."""
        if self.dtype != "bf16":
            return nullcontext()
        return torch.autocast(self.workload.device.split(":")[0], torch.bfloat16)

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of this mode in their order."""
        phases = {"forward": self.forward}
        if self.mode != "forward":
            phases["backward"] = self.backward
        if self.mode == "train_step":
            phases["optimizer"] = self.optimizer_step
        return phases

    def run(self) -> None:
        """The whole step: all phases."""
        for phase in self.phases.values():
            phase()

    def forward(self) -> None:
        """Logits, or, where a backward pass follows, the loss (kept until that)."""
        work = self.workload
        if self.compile != "off":
            torch.compiler.cudagraph_mark_step_begin()  # what the last step's graph returned may be overwritten
        if self.mode == "forward":
            with torch.no_grad(), self.autocast():
                self._function(work.model, work.ids)
            return
        self.loss = None
        if self.mode == "forward_backward":
            work.drop_gradients()
        with self.autocast():
            self.loss = self._function(work.model, work.ids, work.targets)

    def backward(self) -> None:
        """Gradients of all parameters. The previous step's gradients have been dropped by then."""
        if self.loss is None:
            raise RuntimeError(
                "backward needs the loss of a forward pass in mode forward_backward or train_step"
            )
        self.loss.backward()
        self.loss = None

    def optimizer_step(self) -> None:
        """AdamW's update, after which the gradients are dropped."""
        self.workload.optimizer.step()
        self.workload.drop_gradients()


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def _loss(model: torch.nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _copy(function: types.FunctionType) -> types.FunctionType:
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
