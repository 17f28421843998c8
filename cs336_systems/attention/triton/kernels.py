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

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Offsets within a tile have the type of the strides, which are 64 bits wide where rows lie far apart (`launch.wide`).
# The interpreter, which sees no types of arguments, has 64 bits everywhere.
_OFFSET = tl.constexpr(tl.int64 if triton.knobs.runtime.interpret else tl.int32)


# ------------------------------------------------------------------------------------------------ helpers
@triton.jit
def _load_tile(base, stride_row, stride_col, first_row, num_rows,
               ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
               MASK_ROWS: tl.constexpr):  # fmt: skip
    """Rows first_row… of a (num_rows, HEAD_DIM) matrix as a (ROWS, BLOCK_D) tile, zero outside the matrix."""
    rows = tl.arange(0, ROWS).to(_OFFSET)
    columns = tl.arange(0, BLOCK_D).to(_OFFSET)
    # the first row is a 64-bit offset, so that a tensor may have more than 2^31 elements; those in the tile follow it
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
    """A tile of dO. EXPANDED: autograd passes the gradient of a sum as one scalar (or column) with strides of 0;
    it is loaded as such and broadcast on chip, instead of being materialized first."""
    if EXPANDED:
        rows = tl.arange(0, ROWS).to(_OFFSET)
        start = base + tl.cast(first_row, tl.int64) * stride_row
        column = tl.load(start + rows * stride_row, mask=first_row + rows < num_rows, other=0.0)
        return tl.broadcast_to(column[:, None], (ROWS, BLOCK_D))
    return _load_tile(base, stride_row, stride_col, first_row, num_rows, ROWS, BLOCK_D, HEAD_DIM, MASK_ROWS)


@triton.jit
def _store_tile(base, stride_row, stride_col, first_row, num_rows, tile,
                ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """Writes a (ROWS, BLOCK_D) tile to the rows first_row… of a (num_rows, HEAD_DIM) matrix, the part inside it."""
    rows = tl.arange(0, ROWS).to(_OFFSET)
    columns = tl.arange(0, BLOCK_D).to(_OFFSET)
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
        alpha = tl.exp2(row_max - new_max)  # rescales the sums so far when the maximum grows
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
                   PRECISION: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """O and L of one tile of queries of one head (algorithm 1). Grid: (query tiles · batch · heads, SPLITS).

    With SPLITS > 1 (not causal) the programs along the second axis split the keys, as Flash-Decoding does (Dao et al.,
    2023). `o_ptr` and `l_ptr` are then (SPLITS, batch, heads, n_q, d) and (SPLITS, batch, heads, n_q), which
    `combine_kernel` combines.
    """
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
    # keys [start, whole) need no mask; [whole, end) meet the diagonal or the ragged end; after that nothing is seen
    start = 0
    if IS_CAUSAL:
        whole = tl.minimum((first_query + 1) // BLOCK_N, num_keys // BLOCK_N) * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, num_keys)
    else:
        whole = (num_keys // BLOCK_N) * BLOCK_N
        end = num_keys
    if SPLITS > 1:
        split = tl.program_id(1)
        tiles = tl.cdiv(num_keys, BLOCK_N)
        start = (tiles * split // SPLITS) * BLOCK_N
        end = tl.minimum((tiles * (split + 1) // SPLITS) * BLOCK_N, num_keys)
        whole = tl.minimum(whole, end)
        o_ptr += tl.cast(split * batch_heads, tl.int64) * num_queries * HEAD_DIM
        l_ptr += tl.cast(split * batch_heads, tl.int64) * num_queries
    row_max, row_sum, acc = _forward_steps(
        q, k_base, v_base, k_row, k_col, v_row, v_col, row_max, row_sum, acc, first_query, start, whole, num_keys,
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


@triton.jit(do_not_specialize=["num_queries"])
def combine_kernel(parts_ptr, l_parts_ptr, o_ptr, l_ptr, o_batch, o_head, o_row, o_col,
                   batch_heads, heads, num_queries,
                   ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   SPLITS: tl.constexpr):  # fmt: skip
    """O and L of ROWS queries of one head from O_s and L_s of each split of its keys: O = Σ exp(L_s − L) O_s,
    L = log Σ exp(L_s). Grid: (cdiv(n_q, ROWS) · batch · heads,)."""
    index = tl.program_id(0) % batch_heads
    first_query = (tl.program_id(0) // batch_heads) * ROWS
    queries = first_query + tl.arange(0, ROWS)
    inside = queries < num_queries
    all_rows = tl.cast(batch_heads, tl.int64) * num_queries  # of one split
    row = tl.cast(index, tl.int64) * num_queries
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        l = tl.load(l_parts_ptr + split * all_rows + row + queries, mask=inside, other=0.0)
        largest = tl.maximum(largest, l)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        l = tl.load(l_parts_ptr + split * all_rows + row + queries, mask=inside, other=0.0)
        weight = tl.exp2((l - largest) * LOG2_E)
        part = _load_tile(parts_ptr + (split * all_rows + row) * HEAD_DIM, HEAD_DIM, 1, first_query, num_queries,
                          ROWS, BLOCK_D, HEAD_DIM, True)  # fmt: skip
        weight_sum += weight
        acc += weight[:, None] * part
    _store_tile(_head(o_ptr, index, heads, o_batch, o_head), o_row, o_col, first_query, num_queries,
                acc / weight_sum[:, None], ROWS, BLOCK_D, HEAD_DIM)  # fmt: skip
    tl.store(l_ptr + row + queries, largest + tl.log2(weight_sum) * LN_2, mask=inside)


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
    """dK / scale and dV summed over the query tiles in [first_query, last_query); scores are transposed.

    Rows past the last query need no mask: q, dO, L and D are zero there, and so is what they add.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    if EXPANDED == 2:  # one scalar for the whole head: the tile is the same in every step
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
        # both matmuls are issued before either is used: the tensor cores go on while the exponentials are computed
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


KERNELS = {
    "forward": forward_kernel,
    "backward_queries": backward_queries_kernel,
    "backward_keys": backward_keys_kernel,
}
