"""The backward kernels: symbols and names as in `kernels`.

Two passes, each writing its outputs once and in a fixed order, so gradients are deterministic: the first gives a
program a tile of queries (delta and dQ), the second, which reads delta, a tile of keys (dK and dV). Each has its share
of algorithm 2, lines 10 to 16; P and dP are computed twice for that, seven matmuls in all for the paper's five.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cs336_systems.attention.triton.kernels import (
    LOG2_E,
    _ends_of_keys,
    _load_gradient,
    _load_tile,
    _query_ends,
    _rows,
    _store_tile,
)


# ------------------------------------------------------------------------------------------------ backward: queries
@triton.jit
def _query_steps(q, do, l_log2, delta, dq, k_rows, v_rows, first_query, first_keys, first_key, end_key, num_keys,
                 scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                 HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """dQ / scale summed over the key tiles in [first_key, end_key)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, end_key, BLOCK_N):
        k = _load_tile(k_rows, key, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        v = _load_tile(v_rows, key, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - l_log2[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
            if first_keys is not None:
                p = tl.where(first_keys[:, None] <= keys[None, :], p, 0.0)
            if not EVEN_N:
                p = tl.where((keys < num_keys)[None, :], p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
    return dq


@triton.jit(do_not_specialize=["num_queries", "num_keys", "window"])
def backward_queries_kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr, bounds_ptr,
                            stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                            stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                            stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                            stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                            stride_do_batch, stride_do_head, stride_do_row, stride_do_col,
                            stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col,
                            batch_heads, heads, num_queries, num_keys, window, scale, BLOCK_M: tl.constexpr,
                            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                            IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                            HEADS_PER_KV: tl.constexpr, EXPANDED: tl.constexpr,
                            PRECISION: tl.constexpr):  # fmt: skip
    """delta and dQ of one tile of queries of one head. Grid: (query tiles · batch · heads,)."""
    index = tl.program_id(0) % batch_heads
    place = index, heads
    # heaviest first, as in forward
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    rows = tl.cast(index, tl.int64) * num_queries + queries

    do_rows = _rows(do_ptr, place, num_queries, stride_do_batch, stride_do_head, stride_do_row, stride_do_col)
    do = _load_gradient(do_rows, first_query, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M, EXPANDED > 0)
    o_rows = _rows(o_ptr, place, num_queries, stride_o_batch, stride_o_head, stride_o_row, stride_o_col)
    o = _load_tile(o_rows, first_query, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=queries < num_queries)

    q_rows = _rows(q_ptr, place, num_queries, stride_q_batch, stride_q_head, stride_q_row, stride_q_col)
    q = _load_tile(q_rows, first_query, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)
    l_log2 = tl.load(l_ptr + rows, mask=queries < num_queries, other=0.0) * LOG2_E
    kv_place = index // HEADS_PER_KV, heads // HEADS_PER_KV
    k_rows = _rows(k_ptr, kv_place, num_keys, stride_k_batch, stride_k_head, stride_k_row, stride_k_col)
    v_rows = _rows(v_ptr, kv_place, num_keys, stride_v_batch, stride_v_head, stride_v_row, stride_v_col)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first_keys, ends = _ends_of_keys(first_query, num_queries, num_keys, window, bounds_ptr, BLOCK_M, BLOCK_N,
                                     IS_CAUSAL)  # fmt: skip
    if window is None and bounds_ptr is None:
        first_keys = None
    for part in tl.static_range(1 if first_keys is None else 0, 3 if IS_CAUSAL or not EVEN_N else 2):
        dq = _query_steps(q, do, l_log2, delta, dq, k_rows, v_rows, first_query, first_keys, ends[part], ends[part + 1],
                          num_keys, scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, part != 1, IS_CAUSAL, EVEN_N,
                          PRECISION)  # fmt: skip
    dq_rows = _rows(dq_ptr, place, num_queries, stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col)
    _store_tile(dq_rows, first_query, dq * scale, HEAD_DIM)


# ------------------------------------------------------------------------------------------------ backward: keys
@triton.jit
def _key_steps(k, v, dk, dv, q_rows, do_rows, l_base, delta_base, first_key, query_ends, first_query, end_query,
               num_queries, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
               HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, EVEN_M: tl.constexpr, EXPANDED: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """dK / scale and dV summed over the query tiles in [first_query, end_query); scores are transposed. One of them can
    be of one number, which says that it is not wanted.

    Rows past the last query need no mask: q, dO, L and delta are zero there, and so is what they add.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    if EXPANDED == 2:  # the tile is the same in every step
        do = _load_gradient(do_rows, 0, BLOCK_M, BLOCK_D, HEAD_DIM, True, True)
    for query in tl.range(first_query, end_query, BLOCK_M):
        queries = query + tl.arange(0, BLOCK_M)
        q = _load_tile(q_rows, query, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)
        if EXPANDED < 2:
            do = _load_gradient(do_rows, query, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M, EXPANDED == 1)
        if EVEN_M:
            l_log2 = tl.load(l_base + queries) * LOG2_E
            delta = tl.load(delta_base + queries)
        else:
            l_log2 = tl.load(l_base + queries, mask=queries < num_queries, other=0.0) * LOG2_E
            delta = tl.load(delta_base + queries, mask=queries < num_queries, other=0.0)
        # both matmuls are issued before either is used: the tensor cores go on while the exponentials are computed
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        if dk.shape[0] == BLOCK_N:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - l_log2[None, :])
        if MASKED:
            p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
            if query_ends is not None:
                p = tl.where(queries[None, :] < query_ends[:, None], p, 0.0)
        if EXPANDED == 2 and not EVEN_M:
            p = tl.where((queries < num_queries)[None, :], p, 0.0)
        if dv.shape[0] == BLOCK_N:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)  # (BLOCK_N, BLOCK_D)
        if dk.shape[0] == BLOCK_N:
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # (BLOCK_N, BLOCK_D)
    return dk, dv


@triton.jit(do_not_specialize=["num_queries", "num_keys", "window"])
def backward_keys_kernel(q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr, bounds_ptr,
                         stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                         stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                         stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                         stride_do_batch, stride_do_head, stride_do_row, stride_do_col,
                         stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col,
                         stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col,
                         batch_heads, heads, num_queries, num_keys, window, scale, BLOCK_M: tl.constexpr,
                         BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                         IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                         HEADS_PER_KV: tl.constexpr, EXPANDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dK and dV of one tile of keys of one of the `batch_heads` heads of keys, summed over the heads of queries that
    share it; or one of both, where the other's pointer is None. Grid: (key tiles · batch_heads,); the first keys, which
    the most queries see, come first."""
    index = tl.program_id(0) % batch_heads
    place = index, heads
    first_key = (tl.program_id(0) // batch_heads) * BLOCK_N
    k_rows = _rows(k_ptr, place, num_keys, stride_k_batch, stride_k_head, stride_k_row, stride_k_col)
    k = _load_tile(k_rows, first_key, BLOCK_N, BLOCK_D, HEAD_DIM, not EVEN_N)
    v_rows = _rows(v_ptr, place, num_keys, stride_v_batch, stride_v_head, stride_v_row, stride_v_col)
    v = _load_tile(v_rows, first_key, BLOCK_N, BLOCK_D, HEAD_DIM, not EVEN_N)
    dk = tl.zeros((1, 1) if dk_ptr is None else (BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((1, 1) if dv_ptr is None else (BLOCK_N, BLOCK_D), tl.float32)
    for i in range(HEADS_PER_KV):
        q_head = index * HEADS_PER_KV + i
        q_place = q_head, heads * HEADS_PER_KV
        q_rows = _rows(q_ptr, q_place, num_queries, stride_q_batch, stride_q_head, stride_q_row, stride_q_col)
        do_rows = _rows(do_ptr, q_place, num_queries, stride_do_batch, stride_do_head, stride_do_row,
                        stride_do_col)  # fmt: skip
        l_base = l_ptr + tl.cast(q_head, tl.int64) * num_queries
        delta_base = delta_ptr + tl.cast(q_head, tl.int64) * num_queries
        # with a causal mask queries [0, start) see none of these keys, [start, masked_end) some of them, the others
        # all, up to where windows or documents end: [unmasked_end, end) see some again, and nobody after them
        start, masked_end, unmasked_end, end = 0, 0, num_queries, num_queries
        query_ends = None
        if IS_CAUSAL:
            start = (first_key // BLOCK_M) * BLOCK_M
            masked_end = tl.minimum(tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M, num_queries)
            if window is not None or bounds_ptr is not None:
                query_ends = _query_ends(first_key + tl.arange(0, BLOCK_N), num_queries, window, bounds_ptr)
                end = _query_ends(first_key + BLOCK_N - 1, num_queries, window, bounds_ptr)
                masked_end = tl.minimum(masked_end, end)
                unmasked_end = _query_ends(first_key, num_queries, window, bounds_ptr) // BLOCK_M * BLOCK_M
                unmasked_end = tl.maximum(unmasked_end, masked_end)
        ends = start, masked_end, unmasked_end, end
        for part in tl.static_range(0 if IS_CAUSAL else 1, 2 if query_ends is None else 3):
            dk, dv = _key_steps(k, v, dk, dv, q_rows, do_rows, l_base, delta_base, first_key, query_ends, ends[part],
                                ends[part + 1], num_queries, scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM,
                                part != 1, EVEN_M, EXPANDED, PRECISION)  # fmt: skip
    if dk_ptr is not None:
        dk_rows = _rows(
            dk_ptr, place, num_keys, stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col
        )
        _store_tile(dk_rows, first_key, dk * scale, HEAD_DIM)
    if dv_ptr is not None:
        dv_rows = _rows(
            dv_ptr, place, num_keys, stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col
        )
        _store_tile(dv_rows, first_key, dv, HEAD_DIM)
