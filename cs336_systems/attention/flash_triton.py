"""FlashAttention-2 in Triton: forward and backward kernels for any NVIDIA GPU that Triton serves.

Symbols, with the equations of Dao, "FlashAttention-2" (2023), section 3:

    Q (n_q, d), K and V (n_k, d)     inputs of one head; `scale` = 1/sqrt(d)
    S = scale · Q Kᵀ                 scores; never stored (eq. 1)
    L_i = log Σ_j exp(S_ij)          logsumexp of a row, natural logarithm; the one statistic that forward saves
    P = exp(S − L)                   probabilities, recomputed in backward (algorithm 2, line 11)
    O = P V                          output (eq. 3)
    dP = dO Vᵀ,  D = rowsum(dO ∘ O)
    dS = P ∘ (dP − D)                (eq. 4)
    dQ = scale · dS K,  dK = scale · dSᵀ Q,  dV = Pᵀ dO

Tiles: BLOCK_M query rows, BLOCK_N keys, BLOCK_D columns (d rounded up to a power of two; the rest is masked).
exp is computed as exp2 with log2(e) folded into the scale: the hardware's instruction is exp2.

Backward makes two passes, each writing its outputs once and in a fixed order, so gradients are deterministic: the first
gives a program a tile of queries (D and dQ), the second a tile of keys (dK and dV). P is computed twice for that.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.compiler import is_compiling

from cs336_systems.attention.inputs import autocast_inputs, check_inputs, first_order_only, to_four_axes
from cs336_systems.attention.tiles import Tiles, tiles_for

# TRITON_INTERPRET=1 at the time of import: kernels run on the CPU
INTERPRETED = triton.knobs.runtime.interpret
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# ------------------------------------------------------------------------------------------------ pieces of kernels
@triton.jit
def _load_tile(base, stride_row, stride_col, first_row, num_rows,
               ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
               MASK_ROWS: tl.constexpr):  # fmt: skip
    """Rows first_row… of a (num_rows, HEAD_DIM) matrix as a (ROWS, BLOCK_D) tile, zero outside the matrix."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    # the first row is a 64-bit offset, so that a tensor may have more than 2^31 elements; offsets in the tile are small
    start = base + tl.cast(first_row, tl.int64) * stride_row
    pointers = start + rows[:, None] * stride_row + columns[None, :] * stride_col
    if MASK_ROWS:
        mask = (first_row + rows < num_rows)[:, None]
        if BLOCK_D != HEAD_DIM:
            mask = mask & (columns < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    if BLOCK_D != HEAD_DIM:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_gradient(base, stride_row, stride_col, first_row, num_rows,
                   ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   MASK_ROWS: tl.constexpr, EXPANDED: tl.constexpr):  # fmt: skip
    """A tile of dO. EXPANDED: autograd hands the gradient of a sum over as one number (or column) with strides of 0;
    it is read as what it is and spread out on the chip, instead of being copied to a full matrix first."""
    if EXPANDED:
        rows = tl.arange(0, ROWS)
        start = base + tl.cast(first_row, tl.int64) * stride_row
        column = tl.load(start + rows * stride_row, mask=first_row + rows < num_rows, other=0.0)
        return tl.broadcast_to(column[:, None], (ROWS, BLOCK_D))
    return _load_tile(base, stride_row, stride_col, first_row, num_rows, ROWS, BLOCK_D, HEAD_DIM, MASK_ROWS)


@triton.jit
def _store_tile(base, stride_row, stride_col, first_row, num_rows, tile,
                ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """Writes a (ROWS, BLOCK_D) tile to the rows first_row… of a (num_rows, HEAD_DIM) matrix, what lies inside of it."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = (base + tl.cast(first_row, tl.int64) * stride_row
                + rows[:, None] * stride_row + columns[None, :] * stride_col)  # fmt: skip
    mask = (first_row + rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _head(pointer, index, heads, stride_batch, stride_head):
    """The address of one (batch, head) matrix; 64-bit, since all heads together may pass 2^31 elements."""
    batch = tl.cast(index // heads, tl.int64)
    head = tl.cast(index % heads, tl.int64)
    return pointer + batch * stride_batch + head * stride_head


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _forward_steps(q, k_head, v_head, k_row, k_col, v_row, v_col, row_max, row_sum, acc,
                   first_query, first_key, last_key, num_keys, scale_log2,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """The online softmax over the key tiles in [first_key, last_key): algorithm 1, lines 6 to 11."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, last_key, BLOCK_N):
        k = _load_tile(k_head, k_row, k_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
            if not EVEN_N:
                s = tl.where((keys < num_keys)[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)  # what the sums so far shrink by when the maximum grows
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = _load_tile(v_head, v_row, v_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr,
                   q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
                   v_batch, v_head, v_row, v_col, o_batch, o_head, o_row, o_col,
                   batch_heads, heads, num_queries, num_keys, scale,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """O and L of one tile of queries of one head (algorithm 1). Grid: (query tiles · batch · heads,)."""
    index = tl.program_id(0) % batch_heads
    # with a causal mask the last queries see the most keys: heaviest tiles first, so that the light ones fill the end
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    first_query = tile * BLOCK_M
    q = _load_tile(_head(q_ptr, index, heads, q_batch, q_head), q_row, q_col, first_query, num_queries,
                   BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)  # fmt: skip
    k_base = _head(k_ptr, index, heads, k_batch, k_head)
    v_base = _head(v_ptr, index, heads, v_batch, v_head)
    scale_log2 = scale * LOG2_E

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # keys [0, whole) need no mask; [whole, end) meet the diagonal or the ragged end; after that nothing is seen
    if IS_CAUSAL:
        whole = tl.minimum((first_query + 1) // BLOCK_N, num_keys // BLOCK_N) * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, num_keys)
    else:
        whole = (num_keys // BLOCK_N) * BLOCK_N
        end = num_keys
    row_max, row_sum, acc = _forward_steps(
        q, k_base, v_base, k_row, k_col, v_row, v_col, row_max, row_sum, acc, first_query, 0, whole, num_keys,
        scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, False, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip
    if IS_CAUSAL or not EVEN_N:
        row_max, row_sum, acc = _forward_steps(
            q, k_base, v_base, k_row, k_col, v_row, v_col, row_max, row_sum, acc, first_query, whole, end, num_keys,
            scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, True, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip

    acc = acc / row_sum[:, None]
    _store_tile(_head(o_ptr, index, heads, o_batch, o_head), o_row, o_col, first_query, num_queries, acc,
                BLOCK_M, BLOCK_D, HEAD_DIM)  # fmt: skip
    queries = first_query + tl.arange(0, BLOCK_M)
    logsumexp = (row_max + tl.log2(row_sum)) * LN_2
    tl.store(l_ptr + tl.cast(index, tl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)


# ------------------------------------------------------------------------------------------------ backward: queries
@triton.jit
def _query_steps(q, do, l_log2, delta, dq, k_head, v_head, k_row, k_col, v_row, v_col,
                 first_query, first_key, last_key, num_keys, scale_log2,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                 MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """dQ / scale summed over the key tiles in [first_key, last_key)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, last_key, BLOCK_N):
        k = _load_tile(k_head, k_row, k_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        v = _load_tile(v_head, v_row, v_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - l_log2[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
            if not EVEN_N:
                p = tl.where((keys < num_keys)[None, :], p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
    return dq


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def backward_queries_kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr,
                            q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
                            v_batch, v_head, v_row, v_col, o_batch, o_head, o_row, o_col,
                            do_batch, do_head, do_row, do_col, dq_batch, dq_head, dq_row, dq_col,
                            batch_heads, heads, num_queries, num_keys, scale,
                            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                            HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr,
                            EVEN_N: tl.constexpr, EXPANDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """D and dQ of one tile of queries of one head. Grid: (query tiles · batch · heads,)."""
    index = tl.program_id(0) % batch_heads
    tile = (
        tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    )  # heaviest first, as in forward
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    statistics = tl.cast(index, tl.int64) * num_queries + queries

    do = _load_gradient(_head(do_ptr, index, heads, do_batch, do_head), do_row, do_col, first_query, num_queries,
                        BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M, EXPANDED > 0)  # fmt: skip
    o = _load_tile(_head(o_ptr, index, heads, o_batch, o_head), o_row, o_col, first_query, num_queries,
                   BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)  # fmt: skip
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + statistics, delta, mask=queries < num_queries)

    q = _load_tile(_head(q_ptr, index, heads, q_batch, q_head), q_row, q_col, first_query, num_queries,
                   BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)  # fmt: skip
    l_log2 = tl.load(l_ptr + statistics, mask=queries < num_queries, other=0.0) * LOG2_E
    k_base = _head(k_ptr, index, heads, k_batch, k_head)
    v_base = _head(v_ptr, index, heads, v_batch, v_head)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if IS_CAUSAL:
        whole = tl.minimum((first_query + 1) // BLOCK_N, num_keys // BLOCK_N) * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, num_keys)
    else:
        whole = (num_keys // BLOCK_N) * BLOCK_N
        end = num_keys
    dq = _query_steps(
        q, do, l_log2, delta, dq, k_base, v_base, k_row, k_col, v_row, v_col, first_query, 0, whole, num_keys,
        scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, False, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip
    if IS_CAUSAL or not EVEN_N:
        dq = _query_steps(
            q, do, l_log2, delta, dq, k_base, v_base, k_row, k_col, v_row, v_col, first_query, whole, end, num_keys,
            scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, True, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip
    _store_tile(_head(dq_ptr, index, heads, dq_batch, dq_head), dq_row, dq_col, first_query, num_queries, dq * scale,
                BLOCK_M, BLOCK_D, HEAD_DIM)  # fmt: skip


# ------------------------------------------------------------------------------------------------ backward: keys
@triton.jit
def _key_steps(k, v, dk, dv, q_head, do_head, l_row, delta_row, q_row, q_col, do_row, do_col,
               first_key, first_query, last_query, num_queries, scale_log2,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
               DIAGONAL: tl.constexpr, EVEN_M: tl.constexpr, EXPANDED: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """dK / scale and dV summed over the query tiles in [first_query, last_query); scores stand transposed.

    Rows past the last query need no mask: q, dO, L and D are zero there, and so is what they add.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    if EXPANDED == 2:  # one number for the whole head: the tile is the same in every step
        do = _load_gradient(do_head, do_row, do_col, 0, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, True, True)
    for query in tl.range(first_query, last_query, BLOCK_M):
        queries = query + tl.arange(0, BLOCK_M)
        q = _load_tile(q_head, q_row, q_col, query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)
        if EXPANDED < 2:
            do = _load_gradient(do_head, do_row, do_col, query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M,
                                EXPANDED == 1)  # fmt: skip
        if EVEN_M:
            l_log2 = tl.load(l_row + queries) * LOG2_E
            delta = tl.load(delta_row + queries)
        else:
            l_log2 = tl.load(l_row + queries, mask=queries < num_queries, other=0.0) * LOG2_E
            delta = tl.load(delta_row + queries, mask=queries < num_queries, other=0.0)
        # both products are issued before either is used: the tensor cores go on while the exponentials are computed
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - l_log2[None, :])
        if DIAGONAL:
            p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
        if EXPANDED == 2 and not EVEN_M:
            p = tl.where((queries < num_queries)[None, :], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)  # (BLOCK_N, BLOCK_D)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # (BLOCK_N, BLOCK_D)
    return dk, dv


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def backward_keys_kernel(q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr,
                         q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
                         v_batch, v_head, v_row, v_col, do_batch, do_head, do_row, do_col,
                         dk_batch, dk_head, dk_row, dk_col, dv_batch, dv_head, dv_row, dv_col,
                         batch_heads, heads, num_queries, num_keys, scale,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                         IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                         EXPANDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dK and dV of one tile of keys of one head. Grid: (key tiles · batch · heads,); the first keys, which the most
    queries see, come first."""
    index = tl.program_id(0) % batch_heads
    first_key = (tl.program_id(0) // batch_heads) * BLOCK_N
    k = _load_tile(_head(k_ptr, index, heads, k_batch, k_head), k_row, k_col, first_key, num_keys,
                   BLOCK_N, BLOCK_D, HEAD_DIM, not EVEN_N)  # fmt: skip
    v = _load_tile(_head(v_ptr, index, heads, v_batch, v_head), v_row, v_col, first_key, num_keys,
                   BLOCK_N, BLOCK_D, HEAD_DIM, not EVEN_N)  # fmt: skip
    q_base = _head(q_ptr, index, heads, q_batch, q_head)
    do_base = _head(do_ptr, index, heads, do_batch, do_head)
    l_row = l_ptr + tl.cast(index, tl.int64) * num_queries
    delta_row = delta_ptr + tl.cast(index, tl.int64) * num_queries
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # with a causal mask queries [0, begin) see none of these keys, [begin, whole) some of them, [whole, …) all of them
    whole = 0
    if IS_CAUSAL:
        begin = (first_key // BLOCK_M) * BLOCK_M
        whole = tl.minimum(tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M, num_queries)
        dk, dv = _key_steps(
            k, v, dk, dv, q_base, do_base, l_row, delta_row, q_row, q_col, do_row, do_col, first_key, begin, whole,
            num_queries, scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, True, EVEN_M, EXPANDED,
            PRECISION)  # fmt: skip
    dk, dv = _key_steps(
        k, v, dk, dv, q_base, do_base, l_row, delta_row, q_row, q_col, do_row, do_col, first_key, whole, num_queries,
        num_queries, scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, False, EVEN_M, EXPANDED,
        PRECISION)  # fmt: skip
    _store_tile(_head(dk_ptr, index, heads, dk_batch, dk_head), dk_row, dk_col, first_key, num_keys, dk * scale,
                BLOCK_N, BLOCK_D, HEAD_DIM)  # fmt: skip
    _store_tile(_head(dv_ptr, index, heads, dv_batch, dv_head), dv_row, dv_col, first_key, num_keys, dv,
                BLOCK_N, BLOCK_D, HEAD_DIM)  # fmt: skip


# ------------------------------------------------------------------------------------------------ launchers
def _precision(dtype: torch.dtype) -> str:
    """How products are computed, as the keys of the tile table name it: fp32 tiles as torch's own matrix products."""
    if dtype != torch.float32:
        return "half"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


# tf32x3: three TF32 products make one that is accurate to fp32, on the tensor cores. For 16-bit tiles it has no effect.
INPUT_PRECISION = {"half": "tf32", "tf32": "tf32", "fp32": "tf32x3"}


def _arguments(
    kernel: str, tensors: dict[str, torch.Tensor], is_causal: bool, tiles: Tiles
) -> dict[str, Any]:
    """All arguments of a kernel, in the order of its signature: pointers, strides, sizes, constants."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, num_queries, head_dim = q.shape
    arguments: dict[str, Any] = {f"{name}_ptr": x for name, x in tensors.items()}
    for name, x in tensors.items():
        if x.ndim == 4:  # L and D are contiguous and have no strides among the arguments
            axes = ("batch", "head", "row", "col")
            arguments |= {f"{name}_{axis}": stride for axis, stride in zip(axes, x.stride(), strict=True)}
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, num_keys=k.shape[2], scale=head_dim**-0.5,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim,
        IS_CAUSAL=is_causal, EVEN_M=num_queries % tiles.block_m == 0, EVEN_N=k.shape[2] % tiles.block_n == 0,
    )  # fmt: skip
    if "do" in tensors:
        do = tensors["do"]
        # 0: an ordinary dO; 1: its columns are one (stride 0); 2: a whole head is one number
        arguments["EXPANDED"] = 0 if do.stride(3) else 1 if do.stride(2) else 2
    arguments["PRECISION"] = INPUT_PRECISION[_precision(q.dtype)]
    assert tuple(arguments) == tuple(KERNELS[kernel].arg_names), (
        "a remembered kernel takes arguments by position"
    )
    return arguments


KERNELS = {
    "forward": forward_kernel,
    "backward_queries": backward_queries_kernel,
    "backward_keys": backward_keys_kernel,
}

# Working out some forty arguments, and triton's binding of them, takes longer than a small kernel runs. A launch is
# therefore remembered by the layouts it depends on: the compiled kernel, its grid, its arguments after the pointers.
_Launch = tuple[Any, tuple[int, int, int], tuple[Any, ...]]
_ready: dict[tuple[Any, ...], list[_Launch]] = {}
_MAX_READY = 10_000  # the lengths are part of the key, and a program may meet any number of them


def _key(name: str, is_causal: bool, tiles: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """What the launches of one call depend on, besides what follows from it (outputs are new and aligned)."""
    q = tensors[0]
    layouts = [
        (x.shape, x.stride(), x.data_ptr() % 16) for x in tensors
    ]  # triton compiles for alignments apart
    return (name, is_causal, tiles, q.dtype, _precision(q.dtype), q.device.index, *layouts)


def first_launch(
    kernel: str, tensors: dict[str, torch.Tensor], is_causal: bool, tiles: Tiles | None
) -> list[_Launch]:
    """Compiles one of KERNELS where needed, launches it, and returns what the next launch needs (nothing when
    interpreted)."""
    q, k = tensors["q"], tensors["k"]
    tiles = tiles or tiles_for(kernel, q, _precision(q.dtype))
    arguments = _arguments(kernel, tensors, is_causal, tiles)
    rows, block = (k.shape[2], tiles.block_n) if kernel == "backward_keys" else (q.shape[2], tiles.block_m)
    grid = (triton.cdiv(rows, block) * arguments["batch_heads"], 1, 1)
    compiled = KERNELS[kernel][grid](**arguments, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    return [] if INTERPRETED else [(compiled, grid, tuple(arguments.values())[len(tensors) :])]


def _remember(key: tuple[Any, ...], launches: list[_Launch]) -> None:
    if launches:
        if len(_ready) >= _MAX_READY:
            _ready.clear()
        _ready[key] = launches


def _elsewhere(device: torch.device) -> bool:
    """Whether triton would launch on another device than the tensors'."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tiles: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, heads, n_q, d) in q's layout and L (batch, heads, n_q) fp32, on the device's current stream."""
    if _elsewhere(q.device):
        with torch.cuda.device(q.device):
            return launch_forward(q, k, v, is_causal, tiles)
    o = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    key = _key("forward", is_causal, tiles, q, k, v)
    if launches := _ready.get(key):
        ((compiled, grid, rest),) = launches
        compiled[grid](q, k, v, o, logsumexp, *rest)
    else:
        tensors = dict(q=q, k=k, v=v, o=o, l=logsumexp)
        _remember(key, first_launch("forward", tensors, is_causal, tiles))
    return o, logsumexp


def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, query_tiles: Tiles | None = None, key_tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV (batch, heads, n, d) in the layouts of q, k, v: two kernels on the device's current stream.

    logsumexp (batch, heads, n_q) is contiguous, as forward returns it. `do` may be expanded; it is not copied.
    """
    if _elsewhere(q.device):
        with torch.cuda.device(q.device):
            return launch_backward(q, k, v, o, logsumexp, do, is_causal, query_tiles, key_tiles)
    dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, logsumexp))
    key = _key("backward", is_causal, (query_tiles, key_tiles), q, k, v, o, logsumexp, do)
    if launches := _ready.get(key):
        (queries, query_grid, query_rest), (keys, key_grid, key_rest) = launches
        queries[query_grid](q, k, v, o, do, logsumexp, delta, dq, *query_rest)
        keys[key_grid](q, k, v, do, logsumexp, delta, dk, dv, *key_rest)
    else:
        first = dict(q=q, k=k, v=v, o=o, do=do, l=logsumexp, delta=delta, dq=dq)
        second = dict(q=q, k=k, v=v, do=do, l=logsumexp, delta=delta, dk=dk, dv=dv)
        launches = first_launch("backward_queries", first, is_causal, query_tiles)
        _remember(key, launches + first_launch("backward_keys", second, is_causal, key_tiles))
    return dq, dk, dv


# ------------------------------------------------------------------------------------------------ operators
# Registered as torch operators, so that torch.compile keeps them whole in its graph and FLOP counters see them.
# The low-level registration has less to do at each call than torch.library.custom_op.
_library = torch.library.Library("cs336", "DEF")
_library.define("flash_forward(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor)")
_library.define(
    "flash_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, Tensor grad_o, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)"
)


def _launch_forward_on_cpu(q, k, v, is_causal):
    _require_interpreter()
    return launch_forward(q, k, v, is_causal)


def _launch_backward_on_cpu(q, k, v, o, logsumexp, grad_o, is_causal):
    _require_interpreter()
    return launch_backward(q, k, v, o, logsumexp, grad_o, is_causal)


def _plain(x: torch.Tensor) -> bool:
    """Whether nobody watches: a CUDA tensor of the plain kind, no tracing, no FLOP counter or other dispatch mode.

    Then the launchers are called as they are: the way through the dispatcher and back takes longer than they do.
    """
    if is_compiling():  # asked first: the compiler cannot trace the last question
        return False
    return x.is_cuda and type(x) is torch.Tensor and torch._C._len_torch_dispatch_stack() == 0


def _require_interpreter() -> None:
    if not INTERPRETED:
        raise ValueError(
            "flash_triton got tensors on device 'cpu'; it runs on CUDA devices "
            "(or, slowly, on the CPU with TRITON_INTERPRET=1 set before the import)"
        )


_library.impl("flash_forward", launch_forward, "CUDA")
_library.impl("flash_backward", launch_backward, "CUDA")
_library.impl("flash_forward", _launch_forward_on_cpu, "CPU")
_library.impl("flash_backward", _launch_backward_on_cpu, "CPU")


@torch.library.register_fake("cs336::flash_forward", lib=_library)
def _fake_forward(q, k, v, is_causal):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("cs336::flash_backward", lib=_library)
def _fake_backward(q, k, v, o, logsumexp, grad_o, is_causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def products(q_shape, k_shape, count):
        batch, heads, num_queries, head_dim = q_shape
        return count * 2 * batch * heads * num_queries * k_shape[2] * head_dim

    # as FlopCounterMode counts SDPA: matrix products of the whole square, causal or not
    @register_flop_formula(torch.ops.cs336.flash_forward)
    def _forward(q_shape, k_shape, *args, out_shape=None, **kwargs):
        return products(q_shape, k_shape, 2)

    @register_flop_formula(torch.ops.cs336.flash_backward)
    def _backward(q_shape, k_shape, *args, out_shape=None, **kwargs):
        return products(q_shape, k_shape, 5)


_register_flops()


# ------------------------------------------------------------------------------------------------ autograd
class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 by the Triton kernels above, as `FlashAttentionTriton.apply(Q, K, V, is_causal)`.

    Q: (..., n_q, d); K, V: (..., n_k, d); the same dtype (fp32, fp16 or bf16) and device, any strides; 16 ≤ d ≤ 256.
    Returns O (..., n_q, d) in Q's layout. Saves Q, K, V, O and the logsumexp L (..., n_q), fp32, natural logarithm.
    Errors: ValueError that names the mismatch.
    """

    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        Q, K, V = autocast_inputs(Q, K, V)
        check_inputs(Q, K, V)
        forward = launch_forward if _plain(Q) else torch.ops.cs336.flash_forward
        o, logsumexp = forward(to_four_axes(Q), to_four_axes(K), to_four_axes(V), is_causal)
        o, logsumexp = o.view(Q.shape), logsumexp.view(Q.shape[:-1])
        ctx.save_for_backward(Q, K, V, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("FlashAttentionTriton")
        q, k, v, o, logsumexp = ctx.saved_tensors
        backward = launch_backward if _plain(q) else torch.ops.cs336.flash_backward
        four = [to_four_axes(x) for x in (q, k, v, o)]
        grads = backward(*four, logsumexp.view(four[0].shape[:3]), to_four_axes(grad_o), ctx.is_causal)
        return *(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), None
