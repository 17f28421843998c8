"""Fully sharded data parallel training: every rank has a share of the batch, and a share of each large weight.

    model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16, units=model.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in share_of_this_rank:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        model.clip_grad_norm_(1.0)
        optimizer.step()

Of the weights of layers, of their gradients and of the optimizer's state a rank holds 1/N. A step goes like this:

1. While a unit (a layer, or a block of them) is computed, the weights of the next one are gathered from all ranks, in
   the dtype that they are computed with (`schedule.py`). They are freed when its call has ended.
2. Before the backward pass goes through the unit, they are gathered again. When all their gradients are there, they are
   freed, and a reduce-scatter starts that leaves each rank the mean over ranks for its shard (`shards.py`).
3. `finish_gradient_synchronization()` waits for the last of them, and averages the gradients of what is replicated.
4. The optimizer updates the shards, which are all that `parameters()` has of those weights.

Ranks must call the same units in one order; what their losses depend on may differ, unless they come to different
checkpoints, or backward has gone before through one of several forward passes. Ranks that gather different units wait
for one another until the group's timeout, which names the unit, or are told when the step is finished.

Sources: see `shards.py`; for the order of gathers, Zhao et al., section 3.3.2 (backward prefetching).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.parallel.buckets import assign
from cs336_systems.parallel.data_parallel import DuringBackward, inside_backward
from cs336_systems.parallel.ddp import average
from cs336_systems.parallel.schedule import Schedule
from cs336_systems.parallel.shards import FlatWeights, Weight, Wires
from cs336_systems.parallel.units import Fresh, Intercepted, Unit, derive, to_be_sharded


class FullyShardedDataParallel(DuringBackward):
    """A model whose weights are sharded over the ranks of a process group.

    compute_dtype: what weights travel in, and are computed with, and what a layer's floating-point inputs and bias are
        cast to, in a block, too; None for the weights' own. Shards, their gradients and updates keep that.
    reduce_dtype: what gradients travel in and are summed in; those of fp64 weights are summed in fp64.
    units: modules of the model, such as `model.layers`, none inside another; the weights in each are gathered together.
        A layer outside of them is a unit by itself; None: all are. A unit may be compiled, before or after; what holds
        one may not.
    reshard_after_forward: False keeps the weights from the forward pass to the backward pass.
    module, process_group: as for `DataParallel`; all parameters on one device, or on the meta device, whole or in part.
    device: where to make what is on the meta device, at the cost of a rank's shards and of one unit at a time. Rank 0
        initializes it: by `param_init_fn(part)` for each module `part` that has tensors of its own there, or, for None,
        by the module's `reset_parameters()`. (Buffers may be computed instead where the module is converted, in its
        `_apply`.) Tied weights are initialized by each module that has them, the last one counts. What is loaded next
        needs no values: `param_init_fn=lambda part: None`.

    Sharded is the 2-D `weight` of each module whose class is called Linear or Embedding, wherever else it is registered
    (tied weights); such a weight may be read only in calls of these modules, or of their units. Everything else is
    replicated, and its gradients are all-reduced. The parameters stay the model's own, under their names, but outside
    of calls a sharded one is this rank's elements of it, as a vector (n,), empty perhaps; so an optimizer must treat
    elements one by one, and may have been made before. What a unit returns to autograd must be tensors, in tuples,
    lists and dicts if there are several. What a checkpoint recomputes together is gathered together.

    Several backward passes make a step as with DDP: inside `no_sync()` each rank keeps whole gradients, and drops them
    when those of the shards, zeros meanwhile, are dropped (`zero_grad()`). Where memory is short, call
    `finish_gradient_synchronization()` after each instead, which adds to the shards' gradients.

    Errors: those of `DataParallel` and `DuringBackward`; ValueError for dtypes that are not floating-point, for units
    that are not in the model, never called or inside one another, for an Embedding with max_norm, on several devices,
    without a weight to shard, or with hooks on one, or on the meta device without `device` or a way to initialize;
    RuntimeError if parameters have been moved or converted after it was wrapped, if other ranks have not called the
    same units, or for gradients of gradients.
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype = torch.float32,
        units: Iterable[nn.Module] | None = None, reshard_after_forward: bool = True,
        process_group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
    ) -> None:  # fmt: skip
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            if not getattr(dtype, "is_floating_point", dtype is None and name == "compute_dtype"):
                raise ValueError(f"{name} is {dtype!r}; expected a floating-point torch.dtype")
        parts = {part: name for name, part in module.named_modules()} if isinstance(module, nn.Module) else {}
        units = list(units or ())
        for unit in units:
            if unit not in parts or getattr(unit.forward, "__func__", None) is nn.Module.forward:
                raise ValueError(
                    f"units holds {type(unit).__name__} ({parts.get(unit, 'not in the model')}); expected modules of "
                    "the model with a forward of their own, which are called"
                )
            if inner := [parts[part] for part in unit.modules() if part is not unit and part in units]:
                raise ValueError(
                    f"units holds {parts[unit] or type(unit).__name__!r} and, inside it, {', '.join(inner)}; expected "
                    "none inside another: a layer outside of all is a unit by itself"
                )
        fresh = Fresh(parts, device, param_init_fn)
        super().__init__(
            module, process_group, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype,
            units=[parts[unit] for unit in units], reshard_after_forward=bool(reshard_after_forward),
        )  # fmt: skip
        self._whole = False
        self._told: tuple[Tensor, torch.cuda.Event] | None = None
        self.weights = to_be_sharded(module, self._trained, units)
        wires = Wires(self.process_group, self.weights[0].parameter.device)
        alike: dict[Any, list[Weight]] = {}
        for weight in self.weights:
            kind = frozenset(weight.readers), weight.parameter.dtype, weight.number is None
            alike.setdefault(kind, []).append(weight)
        make = functools.partial(FlatWeights, compute_dtype, reduce_dtype, wires, fresh.fill)
        self.flats = list(map(make, alike.values()))  # as they are gathered together
        if self.process_group.rank() == 0:
            fresh.fill_rest()
        sharded = {weight.parameter for weight in self.weights}
        tensors = itertools.chain(module.parameters(), module.buffers())
        super()._copy_from_rank_0(t for t in tensors if t not in sharded)
        called = [
            Unit(name, part, flats)
            for part, name in parts.items()
            if (flats := [flat for flat in self.flats if part in flat.weights[0].readers])
        ]
        self._schedule = Schedule(called, self.flats, reshard_after_forward)
        self._trained_flats = [flat for flat in self.flats if flat.trained]
        self._flat_of = {w.number: (flat, w) for flat in self._trained_flats for w in flat.weights}
        replicated = [p for i, p in enumerate(self._trained) if i not in self._flat_of]
        self._buckets = assign(replicated, float("inf"))
        for number, (_, weight) in self._flat_of.items():
            weight.full.register_post_accumulate_grad_hook(self._gradient_hook(number))
        for unit in called:
            unit.module.__dict__["_called"] = functools.partial(self._call, unit)
            derive(unit.module, Intercepted)

    def _copy_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        """Not before weights are sharded."""

    # ----------------------------------------------------------------------------------------- forward
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if inside_backward():
            return super().forward(*inputs, **kwargs)
        self._schedule.begin_forward()
        outputs = super().forward(*inputs, **kwargs)
        self._schedule.end_forward()
        return outputs

    def _call(self, unit: Unit, call: Callable[..., Any], inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a unit's module with its weights gathered, and has autograd say when it comes back to it."""
        if self._whole:
            return call(*inputs, **kwargs)
        again, differentiable = inside_backward(), torch.is_grad_enabled()
        if again and differentiable:  # a checkpoint may be what backward comes to first
            self._begin_backward()
        self._schedule.enter(unit, again)
        try:
            outputs = call(*inputs, **kwargs)
        finally:
            self._schedule.leave(unit, again, differentiable)
        for tensor in tree_leaves(outputs) if differentiable else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._reached, unit))
        return outputs

    # ---------------------------------------------------------------------------------------- backward
    def _begin_backward(self) -> None:
        if not self._in_backward:
            super()._begin_backward()
            self._drop_dropped()
            self._schedule.begin_backward(reduces=not self._accumulating)

    def _end_backward(self) -> None:
        super()._end_backward()
        self._schedule.end_backward()

    def _drop_dropped(self) -> None:
        for flat in self._trained_flats:
            flat.drop_dropped()

    def _reached(self, unit: Unit, _: Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "gradients of gradients (create_graph=True) need whole weights, which are freed after each pass; "
                "expected backward passes without, or a wrapper that does not shard weights"
            )
        self._begin_backward()
        self._schedule.reach(unit)

    def _gradient_is_ready(self, number: int, parameter: nn.Parameter) -> None:
        """Called when backward has the whole gradient of what is replicated, or of a gathered weight, for this rank's
        batch; or of a shard, on which the loss depends itself: what that adds is this rank's own."""
        flat, weight = self._flat_of.get(number, (None, None))
        if weight is not None:
            if parameter is weight.parameter:
                if weight.token and weight.token[0] is parameter.grad:
                    weight.token = parameter.grad, weight.token[1] + 1
                return
            gradient, parameter.grad, parameter = parameter.grad, None, weight.parameter
        if number in self._arrived or (flat is not None and flat.mean is not None):
            self._refuse_second_pass(parameter)
        super()._gradient_is_ready(number, parameter)
        self._begin_backward()
        if weight is not None:
            if flat.gradient is None:
                self._schedule.settle()
            flat.take_gradient(weight, gradient, self._accumulating)
            if not flat.missing:
                self._schedule.done(flat)

    def _absent(self) -> list[int]:
        self._drop_dropped()
        seen = {weight.number for flat in self._trained_flats for weight in flat.written}
        return [i for i in super()._absent() if i not in seen]

    def _end_step(self, given_up: bool = False) -> None:
        for flat in self._trained_flats if given_up else ():
            flat.written.clear()  # zeros are reduced
        super()._end_step(given_up)

    def _average_gradients(self) -> None:
        if not self._in_backward:  # there was none here, or it has ended, and no call is left
            self._schedule.begin_backward(reduces=True)
        self._end_backward()
        for flat in self._trained_flats:
            if flat.mean is None:
                self._schedule.settle()
                self._schedule.reduce(flat)
        buckets = [average(bucket.gathered(), self.process_group, async_op=True) for bucket in self._buckets]
        self._schedule.settle(0)
        for flat in self._trained_flats:
            flat.deliver()
        for work in buckets:
            work.wait()
        self._compare_calls()

    def _compare_calls(self) -> None:
        """Has ranks tell each other what they have called and gathered; RuntimeError where that differed up to the last
        step.

        Collectives of equal sizes would match although they are of different units, and weights be mixed up. On a GPU
        the answer is read a step later, when it has been there for long, so that the host waits for nothing.
        """
        told = torch.full((2,), self._schedule.trace, device=self._trained[0].device)
        told[1].neg_()
        dist.all_reduce(told, dist.ReduceOp.MAX, self.process_group)
        if told.is_cuda:
            now = told.to("cpu", non_blocking=True), torch.cuda.Event()
            now[1].record()
            before, self._told = self._told or now, now
            if before is now:  # the first step's
                return
            told, arrived = before
            arrived.synchronize()
        if told[0] != -told[1]:
            raise RuntimeError(
                "ranks have called different units, or in another order, and gathered weights that were not of one "
                "unit: all ranks must call the same units of a sharded model in the same order; where several forward "
                "passes come before several backward passes, these must come to the same units, too"
            )

    # --------------------------------------------------------------------------------- whole parameters
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm is at most max_norm; the norm before, of the whole model's gradient.

        As torch's function for a model that is not sharded. All ranks call it; the host does not wait.
        """
        mine = [
            p.grad for i, p in enumerate(self._trained)
            # what is replicated counts once
            if p.grad is not None and p.numel() and (i in self._flat_of or self.process_group.rank() == 0)
        ]  # fmt: skip
        # in one dtype on all ranks, whatever shards each has
        dtype = functools.reduce(torch.promote_types, {p.dtype for p in self._trained}, torch.float32)
        norm = nn.utils.get_total_norm(mine, norm_type).to(self._trained[0].device, dtype)
        op, power = (dist.ReduceOp.SUM, norm_type) if norm_type < float("inf") else (dist.ReduceOp.MAX, 1.0)
        dist.all_reduce(norm := norm.pow(power), op, self.process_group)
        norm = norm.pow(1 / power)
        nn.utils.clip_grads_with_norm_(self._trained, max_norm, norm)
        return norm

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Inside, the module has its whole parameters, in their own dtype, and is called without gathering anything.

        Each rank needs memory for all of them. What is written to them stays written: each rank keeps its part, so all
        ranks must write the same. They have no gradients. All ranks enter it.
        """
        if self._whole or self._in_backward:
            raise RuntimeError("full_parameters() inside itself, or inside a backward pass")
        shown = [(weight, weight.assembled(weight.parameter, self.process_group)) for weight in self.weights]
        for weight, whole in shown:
            weight.show(nn.Parameter(whole, requires_grad=weight.parameter.requires_grad))
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            for weight, whole in shown:
                with torch.no_grad():
                    weight.parameter.copy_(weight.share_of(whole))
                weight.show(weight.parameter)


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler for shards: a step is skipped on all ranks where one has a gradient that is not finite.

    process_group: the ranks that share the model; None for all. Else as `torch.amp.GradScaler`.
    """

    def __init__(self, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process_group = process_group

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any
    ) -> dict[Any, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, *args)
        mine = found.setdefault(inv_scale.device, found_inf)  # of a rank without a gradient
        dist.all_reduce(mine, dist.ReduceOp.MAX, self._process_group)
        return found
