"""Launches the kernels of `split`: which tensors they serve, with what tiles, and the pieces that they read."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.hopper import split
from cs336_systems.attention.hopper.launch import LOG2_E
from cs336_systems.attention.hopper.tma import Plan, first_launch
from cs336_systems.attention.triton.launch import (
    INTERPRETED,
    MAX_REMEMBERED,
    elsewhere,
    options_of,
    remember,
    remembered,
    strides,
    watched,
)
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


def serves(part: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether on a Hopper GPU these kernels are for `part`, "forward" or "backward", of the attention of tensors
    (batch, heads, n, d). Not where TF32 is allowed: with one TF32 matmul instead of six in bf16, both passes together
    take less time, or hardly more."""
    if q.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
        return False
    return _served(part, q.shape, k.shape, _multiprocessors(q.device))


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _served(part: str, q_shape: torch.Size, k_shape: torch.Size, multiprocessors: int) -> bool:
    batch, heads, num_queries, head_dim = q_shape
    num_keys = k_shape[2]
    if head_dim > MAX_HEAD_DIM or min(num_queries, num_keys) < MIN_LENGTH:
        return False
    few = few_programs_of(batch * heads, num_queries) <= PORTABLE_FORWARD * multiprocessors
    if part == "forward" and few:
        return False
    return 3 * batch * heads * padded_rows(max(num_queries, num_keys)) <= _MAX_ROWS


def _descriptor(pieces: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(pieces, list(pieces.shape), list(pieces.stride()), [rows, pieces.shape[1]])


def _launch(
    kernel: Any, grid: tuple[int, int, int], descriptors: tuple[TensorDescriptor, ...], pointers: int,
    arguments: dict[str, Any], tiles: Tiles | None = None,
) -> list[Plan]:  # fmt: skip
    """Launches a kernel; how to do so again, or nothing in Triton's interpreter."""
    options = {} if tiles is None else options_of(tiles)
    if INTERPRETED:
        kernel[grid](*descriptors, **arguments)
        return []
    return [first_launch(kernel, grid, descriptors, pointers, arguments, **options)]


@dataclass(frozen=True)
class Room:
    """The layout of the pieces of Q, K, V and, for gradients, dO, concatenated in one tensor: the rows of each, the
    tensor's shape, and the bytes before each."""

    rows: tuple[int, ...]
    shape: tuple[int, int]
    before: tuple[int, ...]

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, device=device, dtype=torch.bfloat16)

    def addresses(self, start: int) -> tuple[int, ...]:
        """Where the pieces of each lie in a tensor at `start`."""
        return tuple([start + n for n in self.before])


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def room(q_shape: torch.Size, k_shape: torch.Size, gradient: bool) -> Room:
    """The room for tensors of these shapes (batch, heads, n, d)."""
    heads, d = q_shape[0] * q_shape[1], padded(q_shape[3])
    queries, keys = 3 * heads * padded_rows(q_shape[2]), 3 * heads * padded_rows(k_shape[2])
    rows = (queries, keys, keys, queries) if gradient else (queries, keys, keys)
    before = tuple(itertools.accumulate((2 * d * n for n in rows[:-1]), initial=0))
    return Room(rows, (sum(rows), d), before)


def _split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: torch.Tensor) -> list[Plan]:
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    queries, keys = padded_rows(num_queries), padded_rows(num_keys)
    arguments = dict(q_ptr=q, k_ptr=k, v_ptr=v, pieces_ptr=pieces)
    arguments |= strides("q", q) | strides("k", k) | strides("v", v)
    arguments |= dict(
        heads=heads, batch_heads=batch * heads, num_queries=num_queries, num_keys=num_keys, padded_queries=queries,
        padded_keys=keys, ROWS=_ROWS, D=pieces.shape[1], HEAD_DIM=head_dim,
    )  # fmt: skip
    grid = (batch * heads * max(queries, keys) // _ROWS, 3, 1)
    return _launch(split.split_kernel, grid, (), 4, arguments)


def _alignment(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() % 16 for x in tensors)


# ------------------------------------------------------------------------------------------------ forward
def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tiles: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, heads, n_q, d) in q's layout and L (batch, heads, n_q) fp32, on the device's current stream."""
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return launch_forward(q, k, v, is_causal, tiles)
    o = torch.empty_like(q)
    batch, heads, num_queries, head_dim = q.shape
    logsumexp = torch.empty((batch, heads, num_queries), device=q.device, dtype=torch.float32)
    own = room(q.shape, k.shape, False)
    pieces = own.empty(q.device)
    key = (
        "split", is_causal, tiles, q.device, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        _alignment(q, k, v),
    )  # fmt: skip
    if (plans := remembered(key)) and not watched():
        index, at = q.get_device(), own.addresses(pieces.data_ptr())
        plans[0].again(index, (), q.data_ptr(), k.data_ptr(), v.data_ptr(), at[0])
        plans[1].again(index, at, o.data_ptr(), logsumexp.data_ptr())
        return o, logsumexp
    num_keys, d = k.shape[2], pieces.shape[1]
    tiles = tiles or forward_tiles(head_dim, batch * heads, num_queries, _multiprocessors(q.device))
    plans = _split(q, k, v, pieces)
    arguments = dict(o_ptr=o, l_ptr=logsumexp) | strides("o", o)
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, num_keys=num_keys,
        padded_queries=padded_rows(num_queries), padded_keys=padded_rows(num_keys), c=head_dim**-0.5 * LOG2_E,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, D=d, HEAD_DIM=head_dim, IS_CAUSAL=is_causal,
        EVEN_N=num_keys % tiles.block_n == 0,
    )  # fmt: skip
    rows = (tiles.block_m, tiles.block_n, tiles.block_n)
    described = tuple(_descriptor(x, n) for x, n in zip(pieces.split(own.rows), rows, strict=True))
    grid = (triton.cdiv(num_queries, tiles.block_m) * batch * heads, 1, 1)
    plans += _launch(split.forward_kernel, grid, described, 2, arguments, tiles)
    remember(key, plans)
    return o, logsumexp


# ------------------------------------------------------------------------------------------------ backward
def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV (batch, heads, n, d) in the layouts of q, k, v, on the device's current stream.

    logsumexp (batch, heads, n_q) is contiguous, as forward returns it. `do` may be expanded.
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return launch_backward(q, k, v, o, logsumexp, do, is_causal, tiles)
    batch, heads, num_queries, head_dim = q.shape
    num_keys, batch_heads = k.shape[2], batch * heads
    padded_queries, padded_keys = padded_rows(num_queries), padded_rows(num_keys)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    own = room(q.shape, k.shape, True)
    pieces = own.empty(q.device)
    delta = torch.empty((batch_heads, padded_queries), device=q.device, dtype=torch.float32)
    key = (
        "split backward", is_causal, tiles, q.device, q.shape, k.shape, q.stride(), k.stride(),
        v.stride(), o.stride(), do.stride(), _alignment(q, k, v, o, do, logsumexp),
    )  # fmt: skip
    if (plans := remembered(key)) and not watched():
        index, at = q.get_device(), own.addresses(pieces.data_ptr())
        plans[0].again(index, (), q.data_ptr(), k.data_ptr(), v.data_ptr(), at[0])
        l_at, delta_at = logsumexp.data_ptr(), delta.data_ptr()
        plans[1].again(index, (), o.data_ptr(), do.data_ptr(), at[3], delta_at)
        plans[2].again(index, at + at, l_at, delta_at, dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
        return dq, dk, dv
    d, scale = pieces.shape[1], head_dim**-0.5
    plans = _split(q, k, v, pieces)
    of_each = pieces.split(own.rows)
    arguments = dict(o_ptr=o, do_ptr=do, pieces_ptr=of_each[3], delta_ptr=delta)
    arguments |= strides("o", o) | strides("do", do)
    arguments |= dict(
        heads=heads, batch_heads=batch_heads, num_queries=num_queries, padded_queries=padded_queries, ROWS=_ROWS, D=d,
        HEAD_DIM=head_dim, EXPANDED=do.stride(3) == 0,
    )  # fmt: skip
    grid = (batch_heads * padded_queries // _ROWS, 1, 1)
    plans += _launch(split.split_gradient_kernel, grid, (), 4, arguments)
    few = few_backward(head_dim, batch_heads, num_queries, num_keys, _multiprocessors(q.device))
    by_query, by_key = tiles or backward_tiles(head_dim, few)
    arguments = dict(l_ptr=logsumexp, delta_ptr=delta, dq_ptr=dq, dk_ptr=dk, dv_ptr=dv)
    arguments |= strides("dq", dq) | strides("dk", dk) | strides("dv", dv)
    query_programs = triton.cdiv(num_queries, by_query.block_m) * batch_heads
    key_programs = triton.cdiv(num_keys, by_key.block_n) * batch_heads
    arguments |= dict(
        batch_heads=batch_heads, heads=heads, num_queries=num_queries, num_keys=num_keys,
        padded_queries=padded_queries, padded_keys=padded_keys, query_programs=query_programs,
        key_programs=key_programs, c=scale * LOG2_E, scale=scale, QUERY_M=by_query.block_m, QUERY_N=by_query.block_n,
        KEY_M=by_key.block_m, KEY_N=by_key.block_n, D=d, HEAD_DIM=head_dim, IS_CAUSAL=is_causal,
        EVEN_M=num_queries % by_key.block_m == 0, EVEN_N=num_keys % by_query.block_n == 0, IN_TURNS=few,
    )  # fmt: skip
    rows = (by_query.block_m, by_query.block_n, by_query.block_n, by_query.block_m)
    rows += (by_key.block_m, by_key.block_n, by_key.block_n, by_key.block_m)
    described = tuple(_descriptor(x, n) for x, n in zip(of_each * 2, rows, strict=True))
    grid = (2 * max(query_programs, key_programs) if few else query_programs + key_programs, 1, 1)
    plans += _launch(split.backward_kernel, grid, described, 5, arguments, by_key)
    remember(key, plans)
    return dq, dk, dv
