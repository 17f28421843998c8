"""Weights that are sharded over ranks: how they lie in memory, and the two collectives that assemble and reduce them.

Some weights lie one after the other in a flat vector, padded to a multiple of the number of ranks N:

    flat    | w_0 ................. | w_1 ....... | w_2 .................... | padding |
    shards  |  rank 0         |  rank 1         |  rank 2         |  rank 3            |

Each rank keeps one slice of it, so of each weight a range of its elements, which may be empty. An all-gather of the
slices is the flat vector, of which the weights are views: one collective for all of them, and nothing is copied.
Gradients go the other way: they are written into a flat vector of their own, a reduce-scatter of which leaves each rank
the mean over ranks of its slice. An optimizer that treats elements one by one can work on the slices as they are.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277, section
3.2.1 (the flat parameter); Rajbhandari et al., arXiv 1910.02054, section 5.3 (ZeRO stage 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions

from cs336_systems.parallel.buckets import sole
from cs336_systems.parallel.state import bytes_of

LAYERS = ("Linear", "Embedding")
"""The classes whose 2-D weights are sharded, by name: so that anybody's are."""

_ALIGNMENT = 16  # bytes: what vectorized loads and tensor cores want a matrix, and a shard, to start at


# ----------------------------------------------------------------------------------------------- collectives
def reduce_scatter_mean(output: Tensor, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts putting this rank's slice of the mean over ranks of flat (N · n,) into output (n,); flat may be lost."""
    options = dist.ReduceScatterOptions()
    if dist.get_backend(group) == "nccl":
        options.reduceOp = dist.ReduceOp.AVG
    else:  # Gloo has no mean; divided before the sum, which might be too large for fp16
        flat.div_(group.size())
        options.reduceOp = dist.ReduceOp.SUM
    return group._reduce_scatter_base(output, flat, options)


class Wires:
    """What a model's collectives go over.

    Gathers have a group of their own: where only some ranks' backward comes to a checkpoint, which gathers early, they
    and the reductions are mixed otherwise there. (All ranks of a job make a group, so a model that only some of them
    share has one for both, and their checkpoints must be the same.) On a GPU gathers also have a stream of their own,
    for their casts and their memory; all else of the model runs on one stream.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.reductions = group
        self.gathers = _group_of_gathers(group, device) if group.size() == dist.get_world_size() else group
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def gathering(self) -> AbstractContextManager[object]:
        """Work from now on, and inside on the current stream, begins when what has been queued on this one is done; the
        host does not wait. So memory of gathers can be written again, or unmapped: who was to read it has."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)


@functools.cache
def _group_of_gathers(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A second group of the same ranks. NCCL's kernels in it come before those that compute: when a gather can start it
    has little time, and nothing that it waits for. One for all models, since a group of NCCL keeps memory of the GPU
    and is not given back."""
    timeout, options = group._get_backend(device).options._timeout, None
    if (backend := dist.get_backend(group)) == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    return dist.new_group(timeout=timeout, backend=backend, pg_options=options)


# --------------------------------------------------------------------------------------------------- weights
@dataclass(eq=False)
class Weight:
    """A sharded weight.

    name: in the model; parameter: the model's own, which keeps this rank's elements `start` to `stop` of the flattened
    weight, as a vector; number: which of the trained parameters it is, None if it is frozen. homes: the modules that
    have it, each with its name there; readers: those at whose calls it must be there. offset: where it begins in the
    flat vector; piece: where in this rank's slice of that its elements are. full: the gathered weight, in the dtype
    that it is computed with.
    """

    name: str
    number: int | None
    parameter: nn.Parameter
    shape: torch.Size
    homes: list[tuple[nn.Module, str]] = field(default_factory=list)
    readers: set[nn.Module] = field(default_factory=set)
    offset: int = 0
    start: int = 0
    stop: int = 0
    piece: slice = field(init=False)
    full: nn.Parameter = field(init=False)
    # the shard's gradient, and its version, with which what has been accumulated goes
    token: tuple[Tensor, int] | None = None

    def show(self, tensor: nn.Parameter | None) -> None:
        """Has the modules hold this tensor as their weight."""
        for module, name in self.homes:
            module._parameters[name] = tensor

    def within(self, flat: Tensor) -> Tensor:
        """The part of a flat vector that is this weight's, in its shape."""
        return flat[self.offset : self.offset + self.shape.numel()].view(self.shape)

    def share_of(self, whole: Tensor) -> Tensor:
        """This rank's elements (n,) of the weight, or of something else in its shape."""
        return whole.reshape(-1)[self.start : self.stop]

    @torch.no_grad()
    def assembled(self, piece: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The whole of what ranks have such shares of. All ranks call it."""
        whole = piece.new_zeros(self.shape)
        self.share_of(whole).copy_(piece)
        # the sum of the bytes is exact: each is zero on all ranks but one
        dist.all_reduce(bytes_of(whole), group=group)
        return whole


class FlatWeights:
    """Weights of one dtype and device, all trained or all frozen, that are gathered together and reduced together.

    compute_dtype: what they travel and are computed with, None for their own; reduce_dtype: what their gradients are
    summed in, unless they are fp64. fill: on rank 0 `fill(weight, place)` writes each weight to its place in the flat
    vector, of which each rank keeps its slice. All ranks make it.
    """

    def __init__(
        self, compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype, wires: Wires,
        fill: Callable[[Weight, Tensor], object], weights: list[Weight],
    ) -> None:  # fmt: skip
        self.weights, self.wires, model = weights, wires, weights[0].parameter
        self.compute_dtype = compute_dtype or model.dtype
        self.reduce_dtype = torch.float64 if model.dtype == torch.float64 else reduce_dtype
        self.trained = weights[0].number is not None
        # looking up rows leaves nothing that backward would read, but their numbers; a block may do more with them
        self.read_in_backward = any(
            kind.forward is not nn.Embedding.forward for kind in map(type, weights[0].readers)
        )
        self.users = 0  # calls of modules under way that read them
        self.missing = set(weights)  # those whose gradients the running backward pass has not reached
        self.gradient: Tensor | None = None  # (numel,), of this rank's batch, until it is reduced
        self.written: set[Weight] = set()  # the weights whose gradients are, or were, in there in this step
        self.mean: Tensor | None = None  # (n,), what a reduction writes, from its beginning to delivery
        self.reduction: dist.Work | None = None  # under way
        self._work: dist.Work | None = None
        self._sent: Tensor | None = None
        self._versions: list[int] = []  # of the shards, when they were gathered last

        group = wires.reductions
        step = _ALIGNMENT // min(d.itemsize for d in (model.dtype, self.compute_dtype, self.reduce_dtype))
        self.numel = 0
        for weight in weights:
            weight.offset = self.numel
            self.numel += -(-weight.shape.numel() // step) * step
        self.numel += -self.numel % (group.size() * step)
        self._length = self.numel // group.size()
        begin, end = group.rank() * self._length, (group.rank() + 1) * self._length
        self._shard = model.new_empty(self._length)
        # The gathered weights: memory that comes and goes beneath tensors that stay, since autograd keeps these.
        self._flat = torch.empty(self.numel, dtype=self.compute_dtype, device=model.device)
        for weight in weights:
            edges = begin - weight.offset, end - weight.offset
            weight.start, weight.stop = (min(max(edge, 0), weight.shape.numel()) for edge in edges)
            weight.piece = slice(weight.offset + weight.start - begin, weight.offset + weight.stop - begin)
            # .data: not a view for autograd, which would find the weights that it has kept overwritten
            weight.full = nn.Parameter(weight.within(self._flat).data, requires_grad=self.trained)
        self._flat.untyped_storage().resize_(0)
        with torch.no_grad():
            whole = self._shard.new_zeros(self.numel)
            for weight in weights if group.rank() == 0 else ():
                fill(weight, weight.within(whole))
            # as bytes, since no backend knows all dtypes
            dist.broadcast(bytes_of(whole), group=group, group_src=0)
            self._shard.copy_(whole[begin:end])
            whole.untyped_storage().resize_(0)  # Gloo's thread may hold it a little longer
        for weight in weights:
            weight.parameter.data, weight.parameter.grad = self._shard[weight.piece], None
            weight.parameter.shard = f"shard {group.rank()} of {group.size()}"  # no whole weight
        layers = {home for weight in weights for home, _ in weight.homes if type(home).__name__ in LAYERS}
        self._biases: dict[nn.Module, nn.Parameter] = {}  # that are cast in calls, as inputs are
        for layer in layers if compute_dtype is not None else ():
            layer.register_forward_pre_hook(_cast, with_kwargs=True)
            if layer._parameters.get("bias") is not None:
                self._biases[layer] = layer._parameters["bias"]

    def _finish(self, work: dist.Work, what: str) -> None:
        """Waits for a collective; RuntimeError that says what it was, where others did not join it."""
        try:
            work.wait()
        except RuntimeError as error:
            names = ", ".join(weight.name for weight in self.weights)
            raise RuntimeError(
                f"{what} of {names} failed or timed out: all ranks must call the same layers in the same order, with "
                "or without gradients alike, and be alive"
            ) from error

    # ----------------------------------------------------------------------------------------- gathering
    @property
    def gathered_bytes(self) -> int:
        """Bytes of memory for the whole weights; 0 unless they are here, or on their way."""
        return self._flat.untyped_storage().nbytes()

    @property
    def outdated(self) -> bool:
        """Whether shards have been written to since they were gathered."""
        return self._versions != [weight.parameter._version for weight in self.weights]

    @torch.no_grad()
    def gather(self) -> None:
        """Starts gathering weights that are not there, when the work queued so far is done.

        The memory is the gather stream's, which has waited for all that has read it before: it is reused without the
        host, or the allocator, having to know when a kernel ends.
        """
        memory = self._shard.untyped_storage().data_ptr()
        for weight in self.weights:
            (module, name), mine = weight.homes[0], weight.parameter
            if module._parameters.get(name) is not mine or mine.untyped_storage().data_ptr() != memory:
                raise RuntimeError(
                    f"{weight.name} has been converted, moved or replaced since the model was wrapped; do that first, "
                    "wrap then"
                )
        if self.outdated:  # then backward raises in a graph that has kept them as they were
            torch.autograd.graph.increment_version([weight.full for weight in self.weights])
            self._versions = [weight.parameter._version for weight in self.weights]
        with self.wires.gathering():
            self._flat.untyped_storage().resize_(self.numel * self.compute_dtype.itemsize)
            self._sent = self._shard.to(self.compute_dtype)  # kept until it has been sent
            # what torch's function ends in, called without its checks and logs
            self._work = self.wires.gathers._allgather_base(self._flat, self._sent, AllgatherOptions())

    def wait(self) -> None:
        """Waits for the weights to arrive: on a GPU the current stream does, not the host."""
        if self._work is not None:
            self._finish(self._work, "gathering")
            self._work = self._sent = None

    def free(self) -> None:
        """Lets go of the whole weights; what is queued to read them reads them first."""
        if self.gathered_bytes:
            self.wait()
            self.wires.gathering()
            self._flat.untyped_storage().resize_(0)

    def lend(self) -> None:
        """Has the modules hold the whole weights, for one call more."""
        self.users += 1
        if self.users == 1:
            for weight in self.weights:
                weight.full.requires_grad_(self.trained and weight.parameter.requires_grad)
                weight.show(weight.full)
            for layer, bias in self._biases.items():
                layer._parameters["bias"] = bias.to(self.compute_dtype)

    def take_back(self) -> None:
        """Has them hold the shards, when the last such call has ended."""
        self.users -= 1
        if not self.users:
            for weight in self.weights:
                weight.show(weight.parameter)
            for layer, bias in self._biases.items():
                layer._parameters["bias"] = bias

    # ----------------------------------------------------------------------------------------- reducing
    @torch.no_grad()
    def take_gradient(self, weight: Weight, gradient: Tensor, accumulates: bool) -> None:
        """Moves a weight's gradient, as autograd has left it, into the flat one, or adds it to what is there.
        accumulates: it stays there after this pass, unless the shard's gradient is dropped: `zero_grad` knows no other.
        """
        added = weight in self.written
        self.written.add(weight)
        weight.token = None
        if accumulates:
            shard = weight.parameter
            shard.grad = torch.zeros_like(shard) if shard.grad is None else shard.grad
            weight.token = shard.grad, shard.grad._version
        self.missing.discard(weight)
        if self.gradient is None:
            alone = weight.shape.numel() == self.numel and gradient.dtype == self.reduce_dtype
            if alone and sole(gradient) is gradient:  # it is what would be written
                self.gradient = gradient.view(-1)
                return
            self.gradient = self._shard.new_empty(self.numel, dtype=self.reduce_dtype)
        place = weight.within(self.gradient)
        place.add_(gradient) if added else place.copy_(gradient)

    def drop_dropped(self) -> None:
        """Lets go of what has been accumulated of weights whose shards' gradients have been dropped since."""
        for weight in [weight for weight in self.written if weight.token]:
            gradient, version = weight.token
            if weight.parameter.grad is not gradient:
                self.written.remove(weight)
            elif gradient._version != version:
                raise RuntimeError(
                    f"the gradient of {weight.name} has been changed while no_sync() accumulates it elsewhere; drop it "
                    "by zero_grad(set_to_none=True), or change it after finish_gradient_synchronization()"
                )

    @torch.no_grad()
    def reduce(self) -> None:
        """Starts reducing the flat gradient, zeros in place of those that this rank lacks."""
        if self.gradient is None:
            self.gradient = self._shard.new_empty(self.numel, dtype=self.reduce_dtype)
        for weight in self.weights:
            if weight not in self.written:
                weight.within(self.gradient).zero_()
        self.mean = self.gradient.new_empty(self._length)
        self.reduction = reduce_scatter_mean(self.mean, self.gradient, self.wires.reductions)

    def settle(self) -> None:
        """Waits until the mean is there: on a GPU the current stream does, not the host."""
        self._finish(self.reduction, "reducing the gradients")
        self.reduction = self.gradient = None

    def deliver(self) -> None:
        """Adds the mean to the gradients of the shards."""
        for weight in self.weights:
            shard, mean = weight.parameter, self.mean[weight.piece].to(weight.parameter.dtype)
            shard.grad = mean if shard.grad is None else shard.grad.add_(mean)
        self.mean = None
        self.written.clear()


def _cast(layer: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A layer's floating-point inputs in what its weight has, gathered or whole."""
    dtype = layer._parameters["weight"].dtype
    narrow = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
    return tuple(map(narrow, inputs)), {name: narrow(value) for name, value in kwargs.items()}
