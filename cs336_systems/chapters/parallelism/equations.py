"""The equations of a gated feed-forward layer on ranks, as plain code, and the rings that they send around.

f is SiLU. On N ranks each function gives its rank's part of what one process computes: y, dx and the gradients of W₁,
W₂, W₃. `Ring.sent` counts the numbers that a rank has sent; `layer` has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Weights = Sequence[Tensor]  # W₁, W₂ (D, F) and W₃ (F, D), or parts of them


class Ring:
    """Ranks in a circle: each sends only to the next one."""

    def __init__(self, members: Sequence[int], rank: int) -> None:
        self.size, self.place = len(members), members.index(rank)
        self._next = members[(self.place + 1) % self.size]
        self._previous = members[self.place - 1]
        self.sent = 0

    def pass_on(self, tensor: Tensor) -> Tensor:
        """Sends a tensor to the next rank, and gives the one that came from the rank before."""
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        for work in (dist.isend(tensor, self._next), dist.irecv(received, self._previous)):
            work.wait()
        self.sent += tensor.numel()
        return received

    def all_gather(self, shard: Tensor) -> Tensor:
        """All shards along the first axis, in the order of the ranks: N - 1 steps, each passes on what came last."""
        shards = {self.place: shard}
        for step in range(1, self.size):
            shard = shards[(self.place - step) % self.size] = self.pass_on(shard)
        return torch.cat([shards[place] for place in range(self.size)])

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's chunk, along the first axis, of the sum over ranks: a chunk starts behind its owner, goes around,
        and each rank adds its own."""
        chunks = tensor.chunk(self.size)
        moving = chunks[self.place - 1]
        for step in range(2, self.size + 1):
            moving = self.pass_on(moving) + chunks[self.place - step]
        return moving

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks: a reduce-scatter, then an all-gather."""
        return self.all_gather(self.reduce_scatter(tensor))

    def alternate_all_reduce(self, tensor: Tensor) -> Tensor:
        """The same with whole tensors: each rank adds what comes by, and passes it on, N - 1 times."""
        total, moving = tensor, tensor
        for _ in range(self.size - 1):
            moving = self.pass_on(moving)
            total = total + moving
        return total


# -------------------------------------------------------------------------------------------------- one process
def forward(x: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """y, and what backward needs beside x."""
    w1, w2, w3 = weights
    h, g = x @ w1, x @ w2
    return (h * h.sigmoid() * g) @ w3, (h, g)


def backward(
    dy: Tensor, x: Tensor, saved: tuple[Tensor, Tensor], weights: Weights
) -> tuple[Tensor, list[Tensor]]:
    """dx, and dW₁, dW₂, dW₃: two matmuls for each of forward's."""
    (h, g), (w1, w2, w3) = saved, weights
    s = h.sigmoid()
    dz = dy @ w3.T
    dg = dz * h * s
    dh = dz * g * (s + h * s * (1 - s))
    return dh @ w1.T + dg @ w2.T, [x.T @ dh, x.T @ dg, (h * s * g).T @ dy]


# --------------------------------------------------------------------------------------------------- many ranks
def data_parallel(x: Tensor, dy: Tensor, weights: Weights, ring: Ring) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x, dy: this rank's tokens. Weights whole, gradients all-reduced."""
    y, saved = forward(x, weights)
    dx, gradients = backward(dy, x, saved, weights)
    return y, dx, [ring.all_reduce(gradient) for gradient in gradients]


def fsdp(x: Tensor, dy: Tensor, shards: Weights, ring: Ring) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x, dy: this rank's tokens. Weights sharded by rows: gathered for each pass, gradients reduce-scattered."""
    y, saved = forward(x, [ring.all_gather(shard) for shard in shards])
    dx, gradients = backward(dy, x, saved, [ring.all_gather(shard) for shard in shards])
    return y, dx, [ring.reduce_scatter(gradient) for gradient in gradients]


def tensor_parallel(
    x: Tensor, dy: Tensor, columns: Weights, ring: Ring
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x, dy: all tokens. Of W₁ and W₂ F/N columns, of W₃ as many rows: y and dx are sums over ranks."""
    part, saved = forward(x, columns)
    y = ring.all_reduce(part)
    part, gradients = backward(dy, x, saved, columns)
    return y, ring.all_reduce(part), gradients


def grid(
    x: Tensor, dy: Tensor, shards: Weights, over_fsdp: Ring, over_tensor: Ring
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x, dy: the tokens of this rank's row. Weights split by columns over one axis, and sharded by rows over the
    other."""
    part, saved = forward(x, [over_fsdp.all_gather(shard) for shard in shards])
    y = over_tensor.all_reduce(part)
    part, gradients = backward(dy, x, saved, [over_fsdp.all_gather(shard) for shard in shards])
    dx = over_tensor.all_reduce(part)
    return y, dx, [over_fsdp.reduce_scatter(gradient) for gradient in gradients]
