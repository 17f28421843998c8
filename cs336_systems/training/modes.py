"""The variants of a step: device, precision, compiler, and how several ranks average their gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems.parallel import ddp, fsdp
from cs336_systems.training import checkpointing
from cs336_systems.training.config import COMPILE, Parallel, Run

Wrapped = tuple[Callable[..., Tensor], Callable[[], None]]
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class WithLoss(nn.Module):
    """A model and its cross entropy: ids and targets (B, S), of packed documents cu_seqlens → mean loss in nats. What
    wrappers and compilers get."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.model(ids, cu_seqlens).flatten(0, 1), targets.flatten())


def device_of(asked: str) -> str:
    """The device that a run without ranks takes; ValueError where a GPU is asked for and there is none."""
    gpu = torch.cuda.is_available()
    if asked == "cuda" and not gpu:
        raise ValueError("run.device='cuda'; this machine has no CUDA device: allowed are auto, cpu")
    return "cuda" if asked != "cpu" and gpu else "cpu"


def dtype_of(asked: str, device: str) -> str:
    """What "auto" means on a device: bf16 where a GPU multiplies it, fp16 on older ones, fp32 on a CPU."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"


def check_compile(how: str, device: str) -> None:
    """ValueError for CUDA graphs on a CPU."""
    if how == "graphs" and device == "cpu":
        raise ValueError(f"run.compile='graphs' on a CPU; allowed: {', '.join(COMPILE[:-1])}")


def settle(dtype: str, deterministic: bool) -> None:
    """What is global to a process: the precision of fp32 matmuls, and torch's flag for determinism."""
    torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def autocast(dtype: str, device: str) -> AbstractContextManager[Any]:
    """What forward passes run under."""
    return torch.autocast(device.split(":")[0], NARROW[dtype]) if dtype in NARROW else nullcontext()


def wrap(module: WithLoss, run: Run, parallel: Parallel, world_size: int, dtype: str) -> Wrapped:
    """The module as a step calls it, compiled and wrapped as asked, and what ends the averaging of its gradients.

    Blocks that are computed again come last: gathers and compiled code are within. dtype: what forward passes run in; a
    sharded model's weights travel in it.
    CUDA graphs are of forward and of backward: gradients are averaged after the latter, outside.
    ValueError for CUDA graphs on a CPU.
    """
    graphs = run.compile == "graphs"
    check_compile(run.compile, next(module.parameters()).device.type)
    if run.compile in ("attention", "blocks"):
        for layer in module.model.layers:
            (layer if run.compile == "blocks" else layer.attn).compile()
    elif run.compile in ("whole", "graphs"):
        module.compile(fullgraph=True, dynamic=False, mode="reduce-overhead" if graphs else None)
    wrapped, finish = _averaging(module, parallel, world_size, dtype)
    checkpointing.recompute(module.model.layers, run.recompute)
    return _replayed(wrapped) if graphs else wrapped, finish


def _averaging(module: WithLoss, parallel: Parallel, world_size: int, dtype: str) -> Wrapped:
    mb = parallel.bucket_mb
    wrappers = {
        "naive": lambda: ddp.NaiveDDP(module), "flat": lambda: ddp.FlatDDP(module),
        "overlapped": lambda: ddp.OverlappedDDP(module), "bucketed": lambda: ddp.BucketedDDP(module, mb),
        "in_place": lambda: ddp.InPlaceDDP(module, mb),
        "fsdp": lambda: fsdp.FullyShardedDataParallel(module, NARROW.get(dtype), units=module.model.layers),
        "torch": lambda: nn.parallel.DistributedDataParallel(module, bucket_cap_mb=mb),  # ends it in backward
    }  # fmt: skip
    wrapped = wrappers[parallel.wrapper]() if world_size > 1 else module
    return wrapped, getattr(wrapped, "finish_gradient_synchronization", lambda: None)


def _replayed(wrapped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def step(*batch: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # what the last step's graphs returned may be overwritten
        return wrapped(*batch)

    return step
