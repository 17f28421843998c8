"""What the data parallel classes share: their surface, and all that is not the averaging itself. Protocol: `ddp.py`."""

from __future__ import annotations

import abc
import functools
import gc
import hashlib
import itertools
import reprlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from cs336_systems.parallel.buckets import gradient_dtype
from cs336_systems.parallel.state import bytes_of

FORGOTTEN = (
    "parameters have been updated since the last backward pass, without finish_gradient_synchronization(); "
    "call it after the backward pass of every step, before the optimizer's step"
)

_num_registered = 0
"""Counts what any module of this process is given, parameters and modules: while it stands still, none is new."""


def _count(*_: object) -> None:
    global _num_registered
    _num_registered += 1


register_module_module_registration_hook(_count)
register_module_parameter_registration_hook(_count)

_alive: weakref.WeakSet[DataParallel] = weakref.WeakSet()
"""The wrappers of this process: no two may average the same gradients."""


def _note_updates(optimizer: Optimizer, *_: object) -> None:
    """Called after the step of any optimizer: those that are fused, or write to `parameter.data`, count no version."""
    updated = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for wrapper in _alive:
        torch.autograd.graph.increment_version([p for p in wrapper._trained if p in updated])


register_optimizer_step_post_hook(_note_updates)


class DataParallel(nn.Module, abc.ABC):
    """What the five classes share; `_average_gradients` is what they differ in.

    module: the model, the same on all ranks in names, shapes, dtypes and what is frozen, converted and on its device
        already; it stays `self.module`, and its parameters remain those that optimizers get. Rank 0's parameters and
        buffers are copied to all ranks here; buffers that change in training (running statistics) are each rank's own
        afterwards.
    process_group: the ranks that share the batch; None for all. Two wrappers whose backward passes may come in another
        order on another rank need a group each.

    options: what else the class was given, the same on all ranks.

    Parameters that require no gradient here are left alone: freeze first, wrap then. The wrapper's hooks go when it
    does; a parameter has one wrapper at a time. torch.compile may be used inside the module, on it, or on the wrapper;
    a graph hands over its gradients when its whole backward pass has ended, so compile the blocks, not the model, where
    communication is to overlap.

    Errors: ValueError for a module without a parameter to train, with sparse gradients (in the backward pass, where
    that shows only there) or buffers, that is wrapped already, also in part, or for a group that this process is not
    in; on all ranks where they differ in class, options or module. RuntimeError where torch.distributed has not been
    initialized, and in a backward pass if parameters have been updated with gradients that were not averaged.
    """

    def __init__(
        self, module: nn.Module, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ValueError(f"module is {module!r}; expected a torch.nn.Module")
        self.module = module
        self.process_group = _checked(process_group)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        if not self._trained:
            raise ValueError(
                f"module {type(module).__name__} has no parameter that requires a gradient; expected one at least"
            )
        self._refuse_second_wrapper()
        self._refuse_sparse_gradients()
        self._num_registered = _num_registered
        self._accumulating = False
        # the class comes first: those that differ in it have no other collective in common
        self._check_same_on_all_ranks("wrappers and their options", (type(self).__name__, options))
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        layout = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
        self._check_same_on_all_ranks("the module's parameters and buffers", layout)
        self._copy_from_rank_0(itertools.chain(module.parameters(), module.buffers()))
        # by number: the version of each parameter whose gradient has arrived since gradients were averaged last
        self._arrived: dict[int, int] = {}

        handles = [
            p.register_post_accumulate_grad_hook(self._gradient_hook(i)) for i, p in enumerate(self._trained)
        ]
        weakref.finalize(self, _remove, handles).atexit = False
        _alive.add(self)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process group and can be neither copied nor pickled; copy its "
            "module, or save its state_dict()"
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's share of the batch."""
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Call after the backward pass and before gradients are used, once a step on every rank of the group.

        Afterwards each gradient is the mean over ranks, on every rank, bit for bit; on the GPU this is queued, not
        waited for. Errors: RuntimeError inside `no_sync()`, or if the module has other parameters to train by now: one
        that was frozen, or new ones, as when a layer has been replaced.
        """
        if self._accumulating:
            raise RuntimeError("finish_gradient_synchronization() inside no_sync(): leave that first")
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "a parameter that was frozen when the module was wrapped requires a gradient now"
            )
        if self._num_registered != _num_registered:
            self._refuse_new_parameters()
            self._num_registered = _num_registered
        self._end_step()

    def _gradient_hook(self, number: int) -> Callable[[nn.Parameter], None]:
        """What a backward pass is to call with a parameter of this number.

        Such a hook must not keep the wrapper alive: it hangs on the parameters, which it does keep. It runs in the
        middle of a backward pass that may be waiting for the host: it knows its number, so that nothing is looked up
        by tensor.
        """
        return functools.partial(_call_gradient_is_ready, weakref.ref(self), number)

    def _end_step(self, given_up: bool = False) -> None:
        """Averages the gradients, zeros in place of those that this rank lacks. given_up: see the protocol, 4."""
        absent = self._absent()
        for i in absent:
            p = self._trained[i]
            p.grad = torch.zeros_like(p, dtype=gradient_dtype(p), requires_grad=False)
        try:
            self._average_gradients()
        except RuntimeError as error:
            self._refuse_sparse_gradients(error)
            raise
        self._arrived.clear()
        self._drop_those_that_nobody_has(absent, given_up)

    def _absent(self) -> list[int]:
        """The numbers of the parameters of which this rank has no gradient."""
        return [i for i, p in enumerate(self._trained) if p.grad is None]

    def _gradient_is_ready(self, number: int, parameter: nn.Parameter) -> None:
        """What a backward pass calls when it has added to the gradient of a parameter, given with its number."""
        if self._arrived.get(number, parameter._version) != parameter._version:
            self._arrived.clear()  # what follows is another step
            raise RuntimeError(FORGOTTEN)
        if not self._accumulating:
            self._arrived[number] = parameter._version

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to this rank's gradients; the first one outside sends the sum.

        It is the backward pass that counts, not the forward pass. One backward pass outside, or none, and then
        `finish_gradient_synchronization()` end the accumulation.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @abc.abstractmethod
    def _average_gradients(self) -> None:
        """Averages all gradients of `_trained`, each of which exists by now."""

    def _drop_those_that_nobody_has(self, absent: list[int], given_up: bool) -> None:
        """Takes back the zeros in place of gradients (`absent`: this rank's) that no rank has computed.

        RuntimeError if this rank has given up its step (all gradients are absent then) and another one has not.
        """
        # of a step that is finished 2 where there is a gradient and 1 where there is none, of one that is given up 0
        present = torch.full((len(self._trained),), 2, dtype=torch.uint8, device=self._trained[0].device)
        if absent:
            present[absent] = 0 if given_up else 1
        dist.all_reduce(present, dist.ReduceOp.MAX, self.process_group)
        if absent:  # only now does the host wait for the device
            somewhere = present.tolist()
            if given_up and any(somewhere):
                raise RuntimeError(
                    "a backward pass raised, and this rank went on; others have finished that step, so that their "
                    "parameters are other ones by now: all ranks must give up a step, or none"
                )
            for i in absent:
                if somewhere[i] < 2:
                    self._trained[i].grad = None

    def _refuse_new_parameters(self) -> None:
        known = set(self._trained)
        named = self.module.named_parameters()
        if new := [name for name, p in named if p.requires_grad and p not in known]:
            raise RuntimeError(
                f"the module has got parameters since it was wrapped: {', '.join(new)}; change it first, wrap then"
            )

    def _refuse_second_wrapper(self) -> None:
        def shared() -> list[str]:
            averaged = {p for wrapper in _alive for p in wrapper._trained}
            return [name for name, p in self.module.named_parameters() if p.requires_grad and p in averaged]

        if shared():
            gc.collect()  # a wrapper that was deleted may wait for that
            if names := shared():
                raise ValueError(
                    f"module {type(self.module).__name__} is wrapped already, or a part of it: another wrapper "
                    f"averages the gradients of {', '.join(names)}; delete that one first"
                )

    def _refuse_sparse_gradients(self, cause: Exception | None = None) -> None:
        """ValueError for gradients that are sparse, or will be, by what is known of parameters and layers."""
        tensors = [(n, t) for n, p in self.module.named_parameters() for t in (p, p.grad) if t is not None]
        names = {name for name, tensor in tensors if tensor.layout != torch.strided}
        for name, part in self.module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
                names.add(f"{name}.weight".removeprefix("."))
        if names:
            found = ", ".join(sorted(names))
            raise ValueError(f"sparse gradients: {found}; expected dense ones only") from cause

    def _check_same_on_all_ranks(self, what: str, value: object) -> None:
        """ValueError on all ranks unless `value` has the same `repr` on all of them."""
        digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
        largest = torch.tensor([digest, -digest], device=self._trained[0].device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.process_group)
        highest, lowest = largest[0].item(), -largest[1].item()
        if highest != lowest:
            rank = dist.get_rank(self.process_group)
            raise ValueError(
                f"{what} differ between the ranks; expected the same on all; rank {rank} has {reprlib.repr(value)}"
            )

    @torch.no_grad()
    def _copy_from_rank_0(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            contiguous = tensor.contiguous()
            # as bytes, since no backend knows all dtypes that a buffer may have
            dist.broadcast(bytes_of(contiguous), group=self.process_group, group_src=0)
            tensor.copy_(contiguous)


class DuringBackward(DataParallel):
    """What those classes share that communicate in the middle of a backward pass.

    Between two calls of `finish_gradient_synchronization()` the backward pass outside `no_sync()` may reach each
    parameter once: RuntimeError in the second.
    """

    _in_backward = False
    """Set when a backward pass begins and cleared when it ends: if it raises it stays set."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's share of the batch; a step whose backward pass has raised ends here."""
        # inside a backward pass this is a checkpoint, computed again
        if self._in_backward and not inside_backward():
            for p in self._trained:
                p.grad = None
            self._end_step(given_up=True)
        return super().forward(*inputs, **kwargs)

    def _begin_backward(self) -> None:
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False

    def _refuse_second_pass(self, parameter: nn.Parameter) -> NoReturn:
        self._in_backward = True  # for good: this pass fails
        if any(self._trained[i]._version != version for i, version in tuple(self._arrived.items())):
            raise RuntimeError(FORGOTTEN)
        names = ", ".join(name for name, p in self.module.named_parameters() if p is parameter)
        # a reentrant checkpoint runs a backward pass of its own in the middle of the one that has reached it
        if any(f.f_code is CheckpointFunction.backward.__code__ for f, _ in traceback.walk_stack(None)):
            raise RuntimeError(
                f"checkpointing has reached {names} twice in a backward pass, and its gradient is on its way; "
                "checkpoint what is used several times with use_reentrant=False"
            )
        raise RuntimeError(
            f"a second backward pass has reached {names}, whose gradient is on its way; run all backward "
            "passes of a step but the last inside no_sync(), and call finish_gradient_synchronization() after that"
        )


def inside_backward() -> bool:
    """Whether autograd is running a backward pass, on this thread."""
    return torch._C._current_graph_task_id() != -1


def _call_gradient_is_ready(wrapper: weakref.ref[DataParallel], number: int, parameter: nn.Parameter) -> None:
    # None: of a function that has no gradient for it, so it is one that was not used
    if (alive := wrapper()) is not None and parameter.grad is not None:
        alive._gradient_is_ready(number, parameter)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _checked(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all ranks for None; see `DataParallel` for the errors."""
    if not dist.is_initialized():
        raise RuntimeError("data parallel training needs torch.distributed.init_process_group() first")
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"process_group is {group!r} on rank {dist.get_rank()}; expected a group that this rank is in, or None"
        )
    return group
