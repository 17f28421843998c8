"""What one all-reduce carries, which parameters share it, and when it goes: buckets, their assignment, launch order.

Nothing here communicates; `ddp.py` puts the three together with hooks and collectives.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors
from torch.utils.weak import TensorWeakRef

_ALIGNMENT = 16  # bytes: what vectorized loads want a tensor to start at


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of a parameter's gradient: its own, unless `parameter.grad_dtype` says otherwise."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


# ---------------------------------------------------------------------------------------------------- bucket
class Bucket:
    """The gradients of some parameters, one after the other in one flat buffer: each `parameter.grad` is a view of it.

    parameters: of one gradient dtype and one device. The buffer has room for them in their order, each starting at a
    multiple of 16 bytes.

    The gradients own the buffer, not the bucket: it is made when they are first gathered and goes with the last one
    that is dropped (`zero_grad(set_to_none=True)`). So buckets cost no memory while activations are at their peak, as
    gradients cost none without buckets.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        (self.dtype,) = {gradient_dtype(p) for p in self.parameters}
        (self.device,) = {p.device for p in self.parameters}
        step = _ALIGNMENT // self.dtype.itemsize
        # tensors of the shapes that follow one another in the buffer, padding among them
        self._sections: list[torch.Tensor] = []
        self._padding: list[bool] = []
        for p in self.parameters:
            self._sections.append(p)
            self._padding.append(False)
            if rest := -p.numel() % step:
                self._sections.append(torch.empty(rest, device="meta"))
                self._padding.append(True)
        self.numel = sum(section.numel() for section in self._sections)
        self._buffer: TensorWeakRef | None = None

    def gathered(self) -> torch.Tensor:
        """The buffer (numel,) with all gradients in it, each of which must exist: what is to be reduced.

        Gradients are there already while they accumulate, and after `zero_grad(set_to_none=False)`: autograd then adds
        in place. Otherwise autograd has left tensors of its own, and a copy is cheaper than the alternative, zeroed
        views attached before the backward pass, which autograd would have to read as well as write. What autograd
        leaves may be memory that the backward pass is yet to read (with `y = x + p[None]`, the gradients of p and of x
        are one), so it must not be reduced where it is, unless nothing else holds it: see `sole`.

        The views are made by one call and filled by another, which launches a kernel for many tensors: a backward pass
        of many small layers waits for the host, which would have to launch a copy for each parameter.
        """
        buffer = self._buffer() if self._buffer is not None else None
        places = self._places(buffer) if buffer is not None else []
        gradients = [parameter.grad for parameter in self.parameters]
        at_home = [g.data_ptr() == place.data_ptr() for g, place in zip(gradients, places, strict=False)]
        if buffer is None or not all(at_home):  # then a new one: somebody may have kept an old gradient
            buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self._buffer = TensorWeakRef(buffer)
            places = self._places(buffer)
            with torch.no_grad():
                torch._foreach_copy_(places, gradients)
            for parameter, place in zip(self.parameters, places, strict=True):
                parameter.grad = place
        return buffer

    def _places(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the buffer for the gradients, shaped like them."""
        with torch.no_grad():
            views = _unflatten_dense_tensors(buffer, self._sections)
        return [view for view, padding in zip(views, self._padding, strict=True) if not padding]


def sole(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself, if it is contiguous and nothing else holds its memory; a contiguous copy otherwise.

    Only memory that nobody else holds may be written to while a backward pass is under way. Autograd hands a tensor of
    its own to the parameter when no other *tensor* is the same; another one may still share the memory (with
    `y = x + p[None]`, a view of the gradient of x becomes that of p). The storage's count of its holders tells: two
    here, the gradient and the object that asks.
    """
    holders = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    if holders > 2 or not gradient.is_contiguous():
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient


# ------------------------------------------------------------------------------------------------ assignment
def assign(parameters: Iterable[nn.Parameter], max_bytes: float) -> list[Bucket]:
    """Fills buckets with the parameters in the order given, those of one gradient dtype and device together.

    A bucket is closed by the parameter that would take it over `max_bytes` of gradients, so only a parameter which is
    larger on its own makes a larger bucket. Buckets come in the order in which they were begun.
    """
    filled: list[list[nn.Parameter]] = []
    # of each kind, the bucket being filled and its bytes
    current: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = gradient_dtype(parameter), parameter.device
        num_bytes = parameter.numel() * kind[0].itemsize
        bucket, used = current.get(kind, (None, 0))
        if bucket is None or used + num_bytes > max_bytes:
            bucket, used = [], 0
            filled.append(bucket)
        bucket.append(parameter)
        current[kind] = bucket, used + num_bytes
    return [Bucket(bucket) for bucket in filled]


# ---------------------------------------------------------------------------------------------- launch order
class LaunchOrder:
    """Units 0 … n − 1 that are launched once a step in one order, each when it and all its predecessors are ready.

    `order` may be replaced by another permutation between two steps.
    """

    def __init__(self, num_units: int) -> None:
        self.order = list(range(num_units))
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is ready, nothing launched."""
        self._seen: dict[int, None] = {}  # the ready ones as they came: an ordered set
        self._num_launched = 0

    def ready(self, unit: int) -> list[int]:
        """Notes that a unit is ready; the units to launch now, in this order: none while a predecessor is not ready."""
        self._seen[unit] = None
        end = self._num_launched
        while end < len(self.order) and self.order[end] in self._seen:
            end += 1
        return self._advance(end)

    def rest(self) -> list[int]:
        """The units not launched yet, ready or not, in their order; all are launched with this."""
        return self._advance(len(self.order))

    def _advance(self, end: int) -> list[int]:
        begin, self._num_launched = self._num_launched, end
        return self.order[begin:end]

    def observed(self) -> list[int]:
        """The order in which units became ready in this step; those that did not follow in the order they had."""
        return [*self._seen, *(unit for unit in self.order if unit not in self._seen)]
