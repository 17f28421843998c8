"""One data-parallel training step, split into its phases: what the multi-GPU chapters run and measure.

    def on_a_rank(rank):                                       # launched by `launch.start.launch`
        work = ParallelWorkload(size("xl"), batch=2, context_length=512, rank=rank)
        for wrapper in ("none", "naive", "bucketed"):
            with work.step(wrapper, bucket_mb=25, dtype="tf32", optimizer="adamw") as step:
                times = ranks.time_steps(step.phases, rank=rank, warmup=2, steps=5)       # measure.clocks.ranks

A `ParallelWorkload` is what the variants of a step share on one rank: weights, optimizers, this rank's batch. A
`ParallelStep` is one variant, a context manager: the model is wrapped only inside it, so steps of one workload take
turns on one copy of the weights. All ranks do the same in the same order; entering and leaving communicate, and so does
the first use of some optimizers.

Wrappers, by name:

    none        no communication: compute alone. The ranks' weights diverge, until the next wrapper broadcasts rank 0's.
    naive, flat, overlapped, bucketed, in_place
                the five of `parallel.ddp`; `bucket_mb` is for the last two, None one bucket for all.
    torch       torch's DistributedDataParallel, `bucket_mb` its `bucket_cap_mb` (None: its default, 25);
    torch_view  the same with `gradient_as_bucket_view=True`.

Optimizers, by name: `adamw` (fused, the whole state on every rank), `sharded` (`parallel.zero.ShardedOptimizer` over
it), `zero_redundancy` (torch's ZeroRedundancyOptimizer over it). A workload makes each when it is first asked for and
keeps it, state and all.

Phases of a step, in order: `forward` (the loss), `backward` (with the communication that it overlaps; torch's DDP also
waits for it here), `synchronization` (`finish_gradient_synchronization`; nothing for `none` and torch's),
`optimizer` (the update, after which the gradients are dropped).
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.chapters.shared.step import DTYPES, Workload, check
from cs336_systems.launch.group import Rank
from cs336_systems.model import choose_attention
from cs336_systems.parallel.ddp import BucketedDDP, FlatDDP, InPlaceDDP, NaiveDDP, OverlappedDDP
from cs336_systems.parallel.zero import ShardedOptimizer
from cs336_systems.sizes import ModelConfig

WRAPPERS = ("none", "naive", "flat", "overlapped", "bucketed", "in_place", "torch", "torch_view")
WITH_BUCKETS = ("bucketed", "in_place", "torch", "torch_view")
OPTIMIZERS = ("adamw", "sharded", "zero_redundancy")
PHASES = ("forward", "backward", "synchronization", "optimizer")
_OWN = {
    "naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP, "in_place": InPlaceDDP,
}  # fmt: skip


class ParallelWorkload:
    """One rank's share of what the compared variants have in common: model, batch, optimizers.

    config: sizes; batch, context_length: the token ids' shape on each rank (`batch` may differ between ranks); rank: as
    the launcher gives it, inside its process group; attention: an implementation of `attention.IMPLEMENTATIONS`, or
    "auto". Weights are the same on all ranks, batches are not. ValueError as `Workload`'s and `choose_attention`'s.
    """

    def __init__(
        self, config: ModelConfig, batch: int, context_length: int, rank: Rank, *,
        attention: str = "reference", seed: int = 0,
    ) -> None:  # fmt: skip
        self.rank = rank
        whole = Workload(config, batch, context_length, rank.device, seed=seed)
        self.config, self.model, self.parameters = whole.config, whole.model, whole.parameters
        choose_attention(self.model, attention)
        self._random = torch.Generator(rank.device).manual_seed(seed + 1 + rank.rank)
        self.choose_batch(batch, context_length)
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def choose_batch(self, batch: int, context_length: int) -> None:
        """Another random batch for this rank, of this shape; ValueError beyond the context length of the model."""
        if context_length > self.config.context_length:
            raise ValueError(
                f"context_length={context_length}; the model takes at most {self.config.context_length}"
            )
        shape, vocabulary = (batch, context_length + 1), self.config.vocab_size
        ids = torch.randint(0, vocabulary, shape, device=self.rank.device, generator=self._random)
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        """The optimizer of this name (see OPTIMIZERS) over all parameters; made on first use, which communicates."""
        check("optimizer", name, OPTIMIZERS)
        if name not in self._optimizers:
            self._optimizers[name] = _new_optimizer(name, self.parameters)
        return self._optimizers[name]

    def drop_gradients(self) -> None:
        """`model.zero_grad()` without traversing the modules."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(
        self, wrapper: str, *, bucket_mb: float | None = None, dtype: str = "fp32", optimizer: str = "adamw"
    ) -> ParallelStep:
        """One variant, to be entered. ValueError for an unknown choice, or a bucket size where there are no buckets."""
        return ParallelStep(self, wrapper, bucket_mb, dtype, optimizer)


class ParallelStep:
    """One variant of a workload's step. `phases` maps PHASES to functions of no arguments, to be called in this order,
    inside the context."""

    def __init__(
        self, work: ParallelWorkload, wrapper: str, bucket_mb: float | None, dtype: str, optimizer: str
    ) -> None:
        check("wrapper", wrapper, WRAPPERS)
        check("dtype", dtype, DTYPES)
        check("optimizer", optimizer, OPTIMIZERS)
        if bucket_mb is not None and wrapper not in WITH_BUCKETS:
            raise ValueError(
                f"bucket_mb={bucket_mb} for wrapper {wrapper!r}; those with buckets are {', '.join(WITH_BUCKETS)}"
            )
        self.work, self.wrapper, self.bucket_mb = work, wrapper, bucket_mb
        self.dtype, self.optimizer_name = dtype, optimizer
        self.container: nn.Module | None = None
        self.loss: torch.Tensor | None = None
        self._finish: Callable[[], None] = _nothing

    def __enter__(self) -> ParallelStep:
        self.work.drop_gradients()
        torch.set_float32_matmul_precision(self.matmul_precision)
        self._optimizer = self.work.optimizer(self.optimizer_name)
        self.container = _wrapped(self.work.model, self.wrapper, self.bucket_mb)
        self._finish = getattr(self.container, "finish_gradient_synchronization", _nothing)
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Unwraps the model: removes the wrapper's hooks and frees its memory."""
        self.loss = self.container = self._optimizer = None
        self._finish = _nothing
        self.work.drop_gradients()
        if failed is None:  # else the device may be waiting for a rank that is gone
            _empty(self.work.rank.device, cycles=self.wrapper in ("torch", "torch_view"))

    @property
    def matmul_precision(self) -> str:
        """torch's setting for fp32 matmuls: "highest" computes in fp32, "high" in TF32."""
        return "highest" if self.dtype == "fp32" else "high"

    @property
    def num_buckets(self) -> int | None:
        """Gradient all-reduces per step; None for torch's DDP, which does not expose it."""
        if self.wrapper in ("torch", "torch_view"):
            return None
        if self.wrapper in ("naive", "overlapped"):
            return len(self.work.parameters)
        return len(getattr(self.container, "buckets", ())) or int(self.wrapper == "flat")

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of a step in their order."""
        functions = (self.forward, self.backward, self.synchronize, self.optimizer_step)
        return dict(zip(PHASES, functions, strict=True))

    def run(self) -> None:
        """The whole step: all phases."""
        for phase in self.phases.values():
            phase()

    def forward(self) -> None:
        """The loss of this rank's batch. The previous step's gradients have been dropped by then."""
        device = self.work.rank.device.split(":")[0]
        with torch.autocast(device, torch.bfloat16, enabled=self.dtype == "bf16"):
            logits = self._entered()(self.work.ids)
            self.loss = F.cross_entropy(logits.flatten(0, 1), self.work.targets.flatten())

    def backward(self) -> None:
        """Gradients of all parameters; wrappers that overlap communicate them meanwhile."""
        if self.loss is None:
            raise RuntimeError("backward needs the loss of a forward pass")
        self.loss.backward()
        self.loss = None

    def synchronize(self) -> None:
        """Finishes averaging the gradients."""
        self._finish()

    def optimizer_step(self) -> None:
        """The update, after which the gradients are dropped."""
        self._entered()
        self._optimizer.step()
        self.work.drop_gradients()

    def _entered(self) -> nn.Module:
        if self.container is None:
            raise RuntimeError("a ParallelStep runs inside its context: `with work.step(...) as step`")
        return self.container


def _nothing() -> None:
    pass


def _wrapped(model: nn.Module, wrapper: str, bucket_mb: float | None) -> nn.Module:
    if wrapper == "none":
        return model
    if wrapper in _OWN:
        return _OWN[wrapper](model, *[bucket_mb] * (wrapper in WITH_BUCKETS))
    # The model's buffers are constant tables: broadcasting them every step would be an overhead that ours do not have.
    # The option had another name before torch 2.13.
    names = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    settings: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": wrapper == "torch_view"}
    if bucket_mb is not None:
        settings["bucket_cap_mb"] = bucket_mb
    return DistributedDataParallel(model, **settings)


def _new_optimizer(name: str, parameters: tuple[nn.Parameter, ...]) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    if name == "sharded":
        return ShardedOptimizer(parameters, torch.optim.AdamW, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **settings)


def _empty(device: str, cycles: bool = True) -> None:
    """Frees unreferenced device memory; `cycles`: reference cycles too, such as torch's DDP."""
    if cycles:
        gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
