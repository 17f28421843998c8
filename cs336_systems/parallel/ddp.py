"""Data parallel training: every rank has the whole model and a share of the batch, and gradients are averaged.

    model = BucketedDDP(model, bucket_size_mb=25)
    for inputs, targets in share_of_this_rank:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

Five classes with one surface differ in when gradients travel, and in what company: `NaiveDDP` (after the backward pass,
one by one), `FlatDDP` (after it, all together), `OverlappedDDP` (during it, one by one), `BucketedDDP` (during it, some
together, from one buffer), `InPlaceDDP` (the same, from where they are). All follow one protocol.

1. Collectives match. In every step each rank launches the same collectives in the same order, whatever its backward
   pass has reached: a gradient that a rank lacks goes as zeros. So ranks may use different parts of the model, in some
   steps only, without a hang.
2. The order is fixed before the step begins: reverse parameter order in the first one, thereafter the order in which
   rank 0 saw the gradients become ready in the first, broadcast once. A unit that is ready early waits for its
   predecessors; what the backward pass has not made ready goes at `finish_gradient_synchronization()`.
3. A last all-reduce tells which gradients exist anywhere: one byte a parameter, the maximum over ranks. Only a rank
   that lacks a gradient must know, so only such a rank reads the answer (and waits for the GPU): a gradient that
   nobody has becomes None again, as in a single process. For everybody else the price is the latency of one small
   collective behind the last gradients, which have synchronized the ranks already: tens of microseconds a step, and
   the host does not wait.
4. A step is finished by all ranks, or given up by all. After a backward pass that raised and was caught, the next
   forward pass sends what other ranks may wait for, and learns from the last all-reduce whether they have given up the
   step as well. Then all start afresh, without gradients; otherwise this rank raises, for it lacks an update that the
   others have. (`NaiveDDP` and `FlatDDP` have sent nothing by then, and nothing is to be ended.)
   A rank that gives a step up before a gradient of it has arrived must tell the others: it would fall behind by one.

The mean over ranks of the gradients of their mean losses is that of the whole batch where the shares are of one size;
where they are not, each rank counts the same, so an example in a small share counts for more.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704,
sections 3.2 (gradient reduction) and 3.2.4 (gradient accumulation).
"""

from __future__ import annotations

import abc
import math
import numbers
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from cs336_systems.parallel.buckets import Bucket, LaunchOrder, assign, gradient_dtype, sole
from cs336_systems.parallel.data_parallel import DataParallel, DuringBackward


# ------------------------------------------------------------------------------------------------- averaging
def average(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Replaces a contiguous tensor by its mean over the ranks of the group, on all of them; `async_op` as in torch."""
    backend = dist.get_backend(group)
    if backend not in ("nccl", "gloo") or (backend == "gloo" and tensor.dtype == torch.float16):
        tensor.div_(group.size())  # Gloo divides after the sum, which may be too large for fp16
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, group, async_op)
    if not async_op:
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, group)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return group.allreduce(
        [tensor], options
    )  # what torch's function ends in, called without its checks and logs


def average_together(tensors: list[torch.Tensor], group: dist.ProcessGroup, grouped: bool) -> list[dist.Work]:
    """Starts replacing contiguous tensors of one dtype and device by their means over the ranks; what to wait for.

    grouped: whether the backend has group calls (`has_group_calls`). Then all are one: one launch, no copy. Otherwise
    each is started by itself.
    """
    if grouped:
        return [coalesced(tensors, group, dist.ReduceOp.AVG)]
    return [average(tensor, group, async_op=True) for tensor in tensors]


def has_group_calls(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether several tensors of this device can be all-reduced, and averaged, by one call: NCCL can, Gloo cannot."""
    return device.type == "cuda" and dist.get_backend(group) == "nccl"


def coalesced(
    tensors: list[torch.Tensor], group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType
) -> dist.Work:
    """One asynchronous all-reduce of several tensors: what torch's own manager of coalesced calls ends in.

    It is called directly because that manager takes the host some microseconds for every tensor.
    """
    options = distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = op
    return group.allreduce_coalesced(tensors, options)


# -------------------------------------------------------------------------------------------- after backward
class NaiveDDP(DataParallel):
    """One all-reduce a parameter, one after the other, when the backward pass has ended.

    Arguments, methods and errors: see `DataParallel`.
    """

    def _average_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = parameter.grad.contiguous()  # as a transposed parameter's is not
            average(parameter.grad, self.process_group)


class FlatDDP(DataParallel):
    """One all-reduce of all gradients, concatenated, when the backward pass has ended (one of each dtype and device).

    The gradients become views of what was reduced, so nothing is copied back; memory for all of them must be found a
    second time while they are concatenated. Arguments, methods and errors: see `DataParallel`.
    """

    def _average_gradients(self) -> None:
        for bucket in assign(self._trained, math.inf):
            average(bucket.gathered(), self.process_group)


# ------------------------------------------------------------------------------------------- during backward
class HookedDDP(DuringBackward):
    """Averages buckets of gradients while the backward pass computes the others: what three of the classes share.

    max_bytes: what fills a bucket (see `buckets.assign`). ValueError in a backward pass if parameters have got another
    dtype or device by then and do not fit into their bucket.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None, max_bytes: float) -> None:
        super().__init__(module, process_group, bucket_bytes=max_bytes)
        # the last layers' gradients come first
        self.buckets: list[Bucket] = assign(reversed(self._trained), max_bytes)
        bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        self._bucket_of = [bucket_of[p] for p in self._trained]
        self._grouped = has_group_calls(self.process_group, self._trained[0].device)
        self._order = LaunchOrder(len(self.buckets))
        self._order_is_rank_0s = False
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._begin_step()

    def _begin_step(self) -> None:
        self._order.begin_step()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._works: list[dist.Work] = []
        self._in_backward = False

    def _gradient_is_ready(self, number: int, parameter: nn.Parameter) -> None:
        if number in self._arrived:
            self._refuse_second_pass(parameter)
        if self._accumulating:
            return
        index = self._bucket_of[number]
        with self._lock:
            if not self._in_backward:
                self._begin_backward()
            self._arrived[number] = parameter._version
            self._missing[index] -= 1
            if not self._missing[index]:
                self._launch(self._order.ready(index))

    def _launch(self, indices: list[int]) -> None:
        for index in indices:
            bucket = self.buckets[index]
            try:
                self._works += self._start(bucket)
            except RuntimeError as error:
                self._refuse_sparse_gradients(error)
                then = f"{bucket.dtype} on {bucket.device}"
                now = {f"{gradient_dtype(p)} on {p.device}" for p in bucket.parameters}
                if now != {then}:
                    raise ValueError(
                        f"gradients of {', '.join(sorted(now))} in a bucket for {then}: the module was converted or "
                        "moved after it was wrapped; do that first, wrap then"
                    ) from error
                raise

    @abc.abstractmethod
    def _start(self, bucket: Bucket) -> list[dist.Work]:
        """Starts averaging a bucket, all of whose gradients exist; what to wait for."""

    def _average_gradients(self) -> None:
        self._launch(self._order.rest())
        for work in self._works:
            work.wait()  # on the GPU: the current stream waits, the host does not
        if not self._order_is_rank_0s:
            order = torch.tensor(self._order.observed(), device=self._trained[0].device)
            dist.broadcast(order, group=self.process_group, group_src=0)
            self._order.order, self._order_is_rank_0s = order.tolist(), True
        self._begin_step()


class _LeavesGradients(HookedDDP):
    """Gradients travel from where autograd has put them: a bucket has no buffer.

    A gradient is copied only where something else holds its memory, or where it is not contiguous: see `sole`.
    """

    def _start(self, bucket: Bucket) -> list[dist.Work]:
        gradients = []  # what shared its memory when it was made may have let go of it by now
        for parameter in bucket.parameters:
            gradient = parameter.grad
            own = sole(gradient)
            if own is not gradient:
                parameter.grad = own
            gradients.append(own)
        return average_together(gradients, self.process_group, self._grouped)


class OverlappedDDP(_LeavesGradients):
    """One all-reduce a parameter, as soon as the backward pass has its gradient, where autograd has put it.

    Arguments, methods and errors: see `DataParallel` and `HookedDDP`.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group, max_bytes=0)


class BucketedDDP(HookedDDP):
    """One all-reduce a bucket of gradients, in a buffer of its own (see `Bucket`), as soon as the backward pass has the
    last of them.

    bucket_size_mb: the most that a bucket holds, in MB of 2^20 bytes (a larger parameter has a bucket to itself); None
        for one bucket of each gradient dtype and device. Buckets are filled in reverse parameter order.

    Arguments, methods and errors: see `DataParallel` and `HookedDDP`; ValueError for a size that is not positive.
    """

    def __init__(
        self, module: nn.Module, bucket_size_mb: float | None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(module, process_group, _max_bytes(bucket_size_mb))

    def _start(self, bucket: Bucket) -> list[dist.Work]:
        return [average(bucket.gathered(), self.process_group, async_op=True)]


class InPlaceDDP(_LeavesGradients):
    """As `BucketedDDP`, but a bucket has no buffer: its gradients are averaged where autograd has put them.

    NCCL takes them in one group call, a launch as for a buffer, which reads and writes each tensor where it is. That
    saves reading and writing all gradients once a step, and on the host a copy for each bucket. With Gloo, which has
    no group calls, each gradient is a collective of its own. Arguments, methods and errors: see `BucketedDDP`.
    """

    def __init__(
        self, module: nn.Module, bucket_size_mb: float | None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(module, process_group, _max_bytes(bucket_size_mb))


def _max_bytes(bucket_size_mb: float | None) -> float:
    if bucket_size_mb is None:
        return math.inf
    if isinstance(bucket_size_mb, numbers.Real) and bucket_size_mb > 0:
        return bucket_size_mb * 2.0**20
    raise ValueError(
        f"bucket_size_mb is {bucket_size_mb!r}; expected a positive number, or None for one bucket"
    )
