"""Launches the kernels of `split`: which tensors they serve, with what tiles, and the pieces that they read."""

from __future__ import annotations

import functools

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.hopper import split
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.again import Pass
from cs336_systems.attention.triton.launch import First, options_of
from cs336_systems.attention.triton.tiles import Tiles, few_programs_of, multiprocessors_of

MAX_HEAD_DIM = 128
MIN_LENGTH = 512  # queries and keys from which on splitting pays in the backward pass
# up to so many programs per multiprocessor, in tiles for few, the portable forward kernel is faster
PORTABLE_FORWARD = 2
PADDING = 128  # lengths are padded to whole tiles of any of the kernels
_ROWS = 64  # of a program that splits
_MAX_ROWS = 2**31 - 1  # a descriptor's coordinates are 32-bit integers

# By padded head dimension: tiles of forward, of the queries' programs and of the keys' in backward. The fastest of four
# to seven each, measured on an H200 (4 heads of 16,384, causal; queries and keys apart). The backward kernels at 16 and
# 128 spill registers and are still faster than smaller tiles that do not.
_T = Tiles
MANY = {
    16: (_T(64, 64, 4, 3), _T(64, 64, 4, 2), _T(128, 64, 4, 2)),
    32: (_T(128, 64, 8, 2), _T(64, 64, 4, 2), _T(64, 64, 4, 2)),
    64: (_T(128, 64, 8, 2), _T(128, 64, 8, 2), _T(64, 128, 8, 2)),
    128: (_T(128, 32, 8, 2), _T(64, 32, 4, 2), _T(32, 64, 4, 2)),
}
# Where programs are few: the time is that of the longest one then. The fastest of two to five each (one head of 256 to
# 8,192), though the backward kernels spill here, too.
FEW = {
    16: MANY[16],
    32: (_T(64, 128, 4, 2), _T(64, 128, 4, 2), _T(64, 64, 4, 2)),
    64: (_T(64, 64, 4, 2), _T(64, 64, 4, 2), _T(64, 64, 4, 2)),
    128: (_T(64, 32, 4, 2), _T(64, 64, 4, 1), _T(64, 64, 4, 1)),
}
# from so many forward programs per multiprocessor on they are many (at 32, one head of 32,768 makes two)
MANY_FORWARD = {16: 1, 32: 3, 64: 1, 128: 1}


def padded(head_dim: int) -> int:
    """The head dimension that the kernels compute with."""
    return max(16, triton.next_power_of_2(head_dim))


def padded_rows(length: int) -> int:
    """The rows that a head's pieces have."""
    return triton.cdiv(length, PADDING) * PADDING


def forward_tiles(head_dim: int, batch_heads: int, num_queries: int, multiprocessors: int) -> Tiles:
    """The frozen configuration of the forward kernel."""
    d = padded(head_dim)
    programs = batch_heads * triton.cdiv(num_queries, MANY[d][0].block_m)
    return (MANY if programs >= MANY_FORWARD[d] * multiprocessors else FEW)[d][0]


def few_backward(
    head_dim: int, batch_heads: int, num_queries: int, num_keys: int, multiprocessors: int
) -> bool:
    """Whether the backward pass has fewer programs, of queries and of keys, than the GPU has multiprocessors."""
    by_query, by_key = backward_tiles(head_dim, False)
    programs = max(triton.cdiv(num_queries, by_query.block_m), triton.cdiv(num_keys, by_key.block_n))
    return batch_heads * programs < multiprocessors


def backward_tiles(head_dim: int, few: bool) -> tuple[Tiles, Tiles]:
    """Those of the queries' and of the keys' programs, which one launch runs with the same number of warps."""
    return (FEW if few else MANY)[padded(head_dim)][1:]


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


def split_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool,
    **gradients: torch.Tensor,
) -> First:  # fmt: skip
    """A pass that begins with the pieces of Q, K and V, (3 · heads · rows, D): `q_pieces`, … Of gradients it has room
    for those of dO, and for delta."""
    batch, heads, num_queries, head_dim = q.shape
    num_keys, d = k.shape[2], padded(head_dim)
    queries, keys = padded_rows(num_queries), padded_rows(num_keys)
    lengths = dict(q=queries * heads, k=keys * k.shape[1], v=keys * k.shape[1])
    lengths |= {"do": queries * heads} if gradients else {}
    scratch = {f"{x}_pieces": ((3 * batch * n, d), torch.bfloat16) for x, n in lengths.items()}
    if gradients:
        scratch["delta"] = (batch * heads, queries), torch.float32
    first = First(q, k, v, o, logsumexp, is_causal, scratch=scratch, **gradients)
    first.values |= dict(padded_queries=queries, padded_keys=keys, ROWS=_ROWS, D=d)
    first.launch(split.split_kernel, (batch * heads * max(queries, keys) // _ROWS, 3, 1))
    return first


def _described(first: First, **rows: int) -> list[tuple[str, TensorDescriptor]]:
    """Descriptors of the pieces of tensors, in tiles of so many rows."""
    return [
        (name, TensorDescriptor(x, list(x.shape), list(x.stride()), [n, x.shape[1]]))
        for name, n in rows.items()
        for x in (first.tensors[name],)
    ]


# ------------------------------------------------------------------------------------------------ forward
def first_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool,
    tiles: Tiles | None = None,
) -> Pass:  # fmt: skip
    """Launches the forward pass into `o` and `logsumexp`, as `again.forward` asks for it."""
    batch, heads, num_queries, head_dim = q.shape
    tiles = tiles or forward_tiles(head_dim, batch * heads, num_queries, _multiprocessors(q.device))
    first = split_all(q, k, v, o, logsumexp, is_causal)
    described = _described(first, q_pieces=tiles.block_m, k_pieces=tiles.block_n, v_pieces=tiles.block_n)
    first.launch(
        split.forward_kernel, (triton.cdiv(num_queries, tiles.block_m) * batch * heads, 1, 1), described,
        options_of(tiles), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, EVEN_N=k.shape[2] % tiles.block_n == 0,
    )  # fmt: skip
    return first.done


# ------------------------------------------------------------------------------------------------ backward
def first_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, is_causal: bool, tiles: tuple[Tiles, Tiles] | None = None,
) -> Pass:  # fmt: skip
    """Launches the three kernels of the backward pass into `dq`, `dk` and `dv`, as `again.backward` asks for it."""
    batch, heads, num_queries, head_dim = q.shape
    num_keys, batch_heads = k.shape[2], batch * heads
    first = split_all(q, k, v, o, logsumexp, is_causal, do=do, dq=dq, dk=dk, dv=dv)
    grid = batch_heads * padded_rows(num_queries) // _ROWS, 1, 1
    first.launch(split.split_gradient_kernel, grid, ONE_COLUMN=do.stride(3) == 0)
    few = few_backward(head_dim, batch_heads, num_queries, num_keys, _multiprocessors(q.device))
    by_query, by_key = tiles or backward_tiles(head_dim, few)
    query_programs = triton.cdiv(num_queries, by_query.block_m) * batch_heads
    key_programs = triton.cdiv(num_keys, by_key.block_n) * batch * k.shape[1]
    described = []
    for t in (by_query, by_key):
        described += _described(
            first, q_pieces=t.block_m, k_pieces=t.block_n, v_pieces=t.block_n, do_pieces=t.block_m
        )
    first.launch(
        split.backward_kernel, (2 * max(query_programs, key_programs) if few else query_programs + key_programs, 1, 1),
        described, options_of(by_key), query_programs=query_programs, key_programs=key_programs,
        QUERY_M=by_query.block_m, QUERY_N=by_query.block_n, KEY_M=by_key.block_m, KEY_N=by_key.block_n,
        EVEN_M=num_queries % by_key.block_m == 0, EVEN_N=num_keys % by_query.block_n == 0, IN_TURNS=few,
    )  # fmt: skip
    return first.done


# O and L, and dQ, dK and dV, as `again.forward` and `again.backward` describe them
launch_forward = functools.partial(again.forward, first_forward)
launch_backward = functools.partial(again.backward, first_backward)
