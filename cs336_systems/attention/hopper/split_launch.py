"""Launches the kernels of `split`: which tensors they serve, with what tiles, and the pieces that they read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.hopper import split
from cs336_systems.attention.hopper.launch import LOG2_E
from cs336_systems.attention.hopper.tma import first_launch
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.again import Launch, Pass
from cs336_systems.attention.triton.launch import INTERPRETED, options_of, strides, wide
from cs336_systems.attention.triton.tiles import Tiles, few_programs_of, multiprocessors_of

MAX_HEAD_DIM = 128
MIN_LENGTH = 512  # queries and keys from which on splitting pays in the backward pass
# up to so many programs per multiprocessor, in tiles for few, the portable forward kernel is faster
PORTABLE_FORWARD = 2
PADDING = 128  # lengths are padded to whole tiles of any of the kernels
_ROWS = 64  # of a program that splits
_MAX_ROWS = 2**31 - 1  # a descriptor's coordinates are 32-bit integers

# by padded head dimension: the fastest of four to seven each, measured on an H200 (4 heads of 16,384, causal; queries
# and keys apart). The backward kernels at 16 and 128 spill registers and are still faster than smaller tiles that
# do not.
FORWARD = {
    16: Tiles(64, 64, 4, 3),
    32: Tiles(128, 64, 8, 2),
    64: Tiles(128, 64, 8, 2),
    128: Tiles(128, 32, 8, 2),
}
QUERIES = {
    16: Tiles(64, 64, 4, 2),
    32: Tiles(64, 64, 4, 2),
    64: Tiles(128, 64, 8, 2),
    128: Tiles(64, 32, 4, 2),
}
KEYS = {
    16: Tiles(128, 64, 4, 2),
    32: Tiles(64, 64, 4, 2),
    64: Tiles(64, 128, 8, 2),
    128: Tiles(32, 64, 4, 2),
}

# from so many programs of FORWARD per multiprocessor on they are many (at 32, one head of 32,768 makes two)
MANY_FORWARD = {16: 1, 32: 3, 64: 1, 128: 1}
# where they are few: the time is that of the longest program then.
# The fastest of two to five each (one head of 256 to 8,192), though the backward kernels spill here, too.
FEW_FORWARD = {
    16: FORWARD[16],
    32: Tiles(64, 128, 4, 2),
    64: Tiles(64, 64, 4, 2),
    128: Tiles(64, 32, 4, 2),
}
FEW_QUERIES = {
    16: QUERIES[16],
    32: Tiles(64, 128, 4, 2),
    64: Tiles(64, 64, 4, 2),
    128: Tiles(64, 64, 4, 1),
}
FEW_KEYS = {
    16: KEYS[16],
    32: KEYS[32],
    64: Tiles(64, 64, 4, 2),
    128: Tiles(64, 64, 4, 1),
}


def padded(head_dim: int) -> int:
    """The head dimension that the kernels compute with."""
    return max(16, triton.next_power_of_2(head_dim))


def padded_rows(length: int) -> int:
    """The rows that a head's pieces have."""
    return triton.cdiv(length, PADDING) * PADDING


def forward_tiles(head_dim: int, batch_heads: int, num_queries: int, multiprocessors: int) -> Tiles:
    """The frozen configuration of the forward kernel."""
    d = padded(head_dim)
    programs = batch_heads * triton.cdiv(num_queries, FORWARD[d].block_m)
    return FORWARD[d] if programs >= MANY_FORWARD[d] * multiprocessors else FEW_FORWARD[d]


def few_backward(
    head_dim: int, batch_heads: int, num_queries: int, num_keys: int, multiprocessors: int
) -> bool:
    """Whether the backward pass has fewer programs, of queries and of keys, than the GPU has multiprocessors."""
    d = padded(head_dim)
    programs = max(triton.cdiv(num_queries, QUERIES[d].block_m), triton.cdiv(num_keys, KEYS[d].block_n))
    return batch_heads * programs < multiprocessors


def backward_tiles(head_dim: int, few: bool) -> tuple[Tiles, Tiles]:
    """Those of the queries' and of the keys' programs, which one launch runs with the same number of warps."""
    d = padded(head_dim)
    return (FEW_QUERIES[d], FEW_KEYS[d]) if few else (QUERIES[d], KEYS[d])


def _multiprocessors(device: torch.device) -> int:
    return multiprocessors_of(device.index) if device.type == "cuda" else 1


def serves(
    part: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, packed: bool = False,
) -> bool:  # fmt: skip
    """Whether on a Hopper GPU these kernels are for `part`, "forward" or "backward", of the attention of tensors
    (batch, heads, n, d), without a window or packed documents. Not where TF32 is allowed: with one TF32 matmul instead
    of six in bf16, both passes together take less time, or hardly more."""
    if window is not None or packed:
        return False
    if again.precision_of(q.dtype) != "fp32":
        return False
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    if head_dim > MAX_HEAD_DIM or min(num_queries, num_keys) < MIN_LENGTH:
        return False
    few = few_programs_of(batch * heads, num_queries) <= PORTABLE_FORWARD * _multiprocessors(q.device)
    if part == "forward" and few:
        return False
    return 3 * batch * heads * padded_rows(max(num_queries, num_keys)) <= _MAX_ROWS


def _descriptor(pieces: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(pieces, list(pieces.shape), list(pieces.stride()), [rows, pieces.shape[1]])


def _launch(
    kernel: Any, grid: tuple[int, int, int], descriptors: tuple[TensorDescriptor, ...], pointers: int,
    arguments: dict[str, Any], tiles: Tiles | None = None,
) -> list[Launch]:  # fmt: skip
    """Launches a kernel; how to do so again, or nothing in Triton's interpreter."""
    options = {} if tiles is None else options_of(tiles)
    if INTERPRETED:
        kernel[grid](*descriptors, **arguments)
        return []
    return [first_launch(wide(kernel, arguments), grid, descriptors, pointers, arguments, **options)]


@dataclass(frozen=True)
class Room:
    """The layout of the pieces of Q, K, V and, for gradients, dO, concatenated in one tensor: the rows of each, the
    tensor's shape, and the bytes before each."""

    rows: tuple[int, ...]
    shape: tuple[int, int]
    before: tuple[int, ...]

    def addresses(self, start: int) -> tuple[int, ...]:
        """Where the pieces of each lie in a tensor at `start`."""
        return tuple([start + n for n in self.before])


def room(q_shape: torch.Size, k_shape: torch.Size, gradient: bool) -> Room:
    """The room for tensors of these shapes (batch, heads, n, d)."""
    d = padded(q_shape[3])
    queries, keys = (3 * batch * heads * padded_rows(n) for batch, heads, n, _ in (q_shape, k_shape))
    rows = (queries, keys, keys, queries) if gradient else (queries, keys, keys)
    before = tuple(itertools.accumulate((2 * d * n for n in rows[:-1]), initial=0))
    return Room(rows, (sum(rows), d), before)


def _split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: torch.Tensor) -> list[Launch]:
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    queries, keys = padded_rows(num_queries), padded_rows(num_keys)
    arguments = dict(q_ptr=q, k_ptr=k, v_ptr=v, pieces_ptr=pieces)
    arguments |= strides("q", q) | strides("k", k) | strides("v", v)
    arguments |= dict(
        heads=heads, batch_heads=batch * heads, num_queries=num_queries, num_keys=num_keys, padded_queries=queries,
        padded_keys=keys, ROWS=_ROWS, D=pieces.shape[1], HEAD_DIM=head_dim, HEADS_PER_KV=heads // k.shape[1],
    )  # fmt: skip
    grid = (batch * heads * max(queries, keys) // _ROWS, 3, 1)
    return _launch(split.split_kernel, grid, (), 4, arguments)


# ------------------------------------------------------------------------------------------------ forward
def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tiles: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L as `again.forward` describes them."""
    return again.forward(first_forward, q, k, v, is_causal, tiles)


def first_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool,
    tiles: Tiles | None = None,
) -> Pass:  # fmt: skip
    """Launches the forward pass into `o` and `logsumexp`, as `again.forward` asks for it."""
    batch, heads, num_queries, head_dim = q.shape
    own = room(q.shape, k.shape, False)
    scratch = ((own.shape, torch.bfloat16),)
    (pieces,) = again.empty(scratch, q.device)
    num_keys, d = k.shape[2], pieces.shape[1]
    tiles = tiles or forward_tiles(head_dim, batch * heads, num_queries, _multiprocessors(q.device))
    launches = _split(q, k, v, pieces)
    arguments = dict(o_ptr=o, l_ptr=logsumexp) | strides("o", o)
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, num_keys=num_keys,
        padded_queries=padded_rows(num_queries), padded_keys=padded_rows(num_keys), scale_log2=head_dim**-0.5 * LOG2_E,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, D=d, HEAD_DIM=head_dim, IS_CAUSAL=is_causal,
        EVEN_N=num_keys % tiles.block_n == 0, HEADS_PER_KV=heads // k.shape[1],
    )  # fmt: skip
    rows = (tiles.block_m, tiles.block_n, tiles.block_n)
    described = tuple(_descriptor(x, n) for x, n in zip(pieces.split(own.rows), rows, strict=True))
    grid = (triton.cdiv(num_queries, tiles.block_m) * batch * heads, 1, 1)
    launches += _launch(split.forward_kernel, grid, described, 2, arguments, tiles)

    def addresses(q_at, k_at, v_at, o_at, l_at, pieces_at):
        return (q_at, k_at, v_at, pieces_at), (*own.addresses(pieces_at), o_at, l_at)

    return Pass(launches, addresses, scratch)


# ------------------------------------------------------------------------------------------------ backward
def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV as `again.backward` describes them."""
    return again.backward(first_backward, q, k, v, o, logsumexp, do, is_causal, tiles)


def first_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, is_causal: bool, tiles: tuple[Tiles, Tiles] | None = None,
) -> Pass:  # fmt: skip
    """Launches the three kernels of the backward pass into `dq`, `dk` and `dv`, as `again.backward` asks for it."""
    batch, heads, num_queries, head_dim = q.shape
    num_keys, batch_heads = k.shape[2], batch * heads
    padded_queries, padded_keys = padded_rows(num_queries), padded_rows(num_keys)
    own = room(q.shape, k.shape, True)
    scratch = (own.shape, torch.bfloat16), ((batch_heads, padded_queries), torch.float32)
    pieces, delta = again.empty(scratch, q.device)
    d, scale = pieces.shape[1], head_dim**-0.5
    launches = _split(q, k, v, pieces)
    of_each = pieces.split(own.rows)
    arguments = dict(o_ptr=o, do_ptr=do, pieces_ptr=of_each[3], delta_ptr=delta)
    arguments |= strides("o", o) | strides("do", do)
    arguments |= dict(
        heads=heads, batch_heads=batch_heads, num_queries=num_queries, padded_queries=padded_queries, ROWS=_ROWS, D=d,
        HEAD_DIM=head_dim, ONE_COLUMN=do.stride(3) == 0,
    )  # fmt: skip
    grid = (batch_heads * padded_queries // _ROWS, 1, 1)
    launches += _launch(split.split_gradient_kernel, grid, (), 4, arguments)
    few = few_backward(head_dim, batch_heads, num_queries, num_keys, _multiprocessors(q.device))
    by_query, by_key = tiles or backward_tiles(head_dim, few)
    arguments = dict(l_ptr=logsumexp, delta_ptr=delta, dq_ptr=dq, dk_ptr=dk, dv_ptr=dv)
    arguments |= strides("dq", dq) | strides("dk", dk) | strides("dv", dv)
    query_programs = triton.cdiv(num_queries, by_query.block_m) * batch_heads
    key_programs = triton.cdiv(num_keys, by_key.block_n) * batch * k.shape[1]
    arguments |= dict(
        batch_heads=batch_heads, heads=heads, num_queries=num_queries, num_keys=num_keys,
        padded_queries=padded_queries, padded_keys=padded_keys, query_programs=query_programs,
        key_programs=key_programs, scale_log2=scale * LOG2_E, scale=scale, QUERY_M=by_query.block_m,
        QUERY_N=by_query.block_n, KEY_M=by_key.block_m, KEY_N=by_key.block_n, D=d, HEAD_DIM=head_dim,
        IS_CAUSAL=is_causal, EVEN_M=num_queries % by_key.block_m == 0, EVEN_N=num_keys % by_query.block_n == 0,
        HEADS_PER_KV=heads // k.shape[1], IN_TURNS=few,
    )  # fmt: skip
    rows = (by_query.block_m, by_query.block_n, by_query.block_n, by_query.block_m)
    rows += (by_key.block_m, by_key.block_n, by_key.block_n, by_key.block_m)
    described = tuple(_descriptor(x, n) for x, n in zip(of_each * 2, rows, strict=True))
    grid = (2 * max(query_programs, key_programs) if few else query_programs + key_programs, 1, 1)
    launches += _launch(split.backward_kernel, grid, described, 5, arguments, by_key)

    def addresses(q_at, k_at, v_at, o_at, l_at, do_at, dq_at, dk_at, dv_at, pieces_at, delta_at):
        of_each = own.addresses(pieces_at)
        gradient = o_at, do_at, of_each[3], delta_at
        both = *of_each, *of_each, l_at, delta_at, dq_at, dk_at, dv_at
        return (q_at, k_at, v_at, pieces_at), gradient, both

    return Pass(launches, addresses, scratch)
