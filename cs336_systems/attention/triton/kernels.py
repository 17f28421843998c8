"""FlashAttention-2 in Triton: forward and backward kernels for any NVIDIA GPU that Triton serves.

Symbols, with the equations of Dao, "FlashAttention-2" (2023), section 3:

    Q (n_q, d), K and V (n_k, d)     inputs of one head; `scale` = 1/sqrt(d)
    S = scale · Q Kᵀ                 scores; never stored (eq. 1)
    L_i = log Σ_j exp(S_ij)          logsumexp of a row, natural logarithm; the one statistic that forward saves
    P = exp(S − L)                   probabilities, recomputed in backward (algorithm 2, line 11)
    O = P V                          output (eq. 3)
    dP = dO Vᵀ
    delta = rowsum(dO ∘ O)           the paper's D
    dS = P ∘ (dP − delta)            (eq. 4)
    dQ = scale · dS K,  dK = scale · dSᵀ Q,  dV = Pᵀ dO

The hardware's instruction is exp2, so logarithms are to base 2 from the scores on, which are multiplied by scale_log2 =
scale · log2(e): names that end in _log2 hold such numbers. In memory L is a natural logarithm.

Names: `x_ptr` is where a tensor begins, `x_base` where the matrix of one (batch, head) does; `stride_x_batch`, `_head`,
`_row` and `_col` are in elements. BLOCK_M queries and BLOCK_N keys make a tile, of BLOCK_D columns (HEAD_DIM rounded up
to a power of two; the rest is masked). EVEN_M, EVEN_N: lengths are multiples of these, so that rows need no mask.
EXPANDED says which strides of dO are 0, as autograd passes the gradient of a sum: 0 none; 1 that of columns: a row is
one number; 2 that of rows as well: a head is one number. Such numbers are loaded as they are and spread on chip.
HEADS_PER_KV: heads of queries that share one of keys (grouped queries), those of a group next to each other; 1 if each
has its own.

Backward makes two passes, each writing its outputs once and in a fixed order, so gradients are deterministic: the first
gives a program a tile of queries (delta and dQ), the second a tile of keys (dK and dV). P is computed twice for that.
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
                   MASK_ROWS: tl.constexpr, ONE_COLUMN: tl.constexpr):  # fmt: skip
    """A tile of dO. ONE_COLUMN: its rows are one number each, which is loaded once and spread."""
    if ONE_COLUMN:
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
    """Where the index-th (batch, head) matrix begins; 64-bit, since all heads together may pass 2^31 elements."""
    batch = tl.cast(index // heads, tl.int64)
    head = tl.cast(index % heads, tl.int64)
    return pointer + batch * stride_batch + head * stride_head


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _forward_steps(q, k_base, v_base,
                   stride_k_row, stride_k_col,
                   stride_v_row, stride_v_col,
                   max_log2, row_sum, acc, first_query, first_key, end_key, num_keys, scale_log2,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr,
                   EVEN_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The online softmax over the key tiles in [first_key, end_key): algorithm 1, lines 6 to 11."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, end_key, BLOCK_N):
        k = _load_tile(k_base, stride_k_row, stride_k_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM,
                       MASKED and not EVEN_N)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
            if not EVEN_N:
                s = tl.where((keys < num_keys)[None, :], s, float("-inf"))
        new_max = tl.maximum(max_log2, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        alpha = tl.exp2(max_log2 - new_max)  # rescales the sums so far when the maximum grows
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = _load_tile(v_base, stride_v_row, stride_v_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM,
                       MASKED and not EVEN_N)  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
        max_log2 = new_max
    return max_log2, row_sum, acc


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr,
                   stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                   stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                   stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                   stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                   batch_heads, heads, num_queries, num_keys, scale, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                   HEADS_PER_KV: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """O and L of one tile of queries of one head (algorithm 1). Grid: (query tiles · batch · heads, SPLITS).

    With SPLITS > 1 (not causal) the programs along the second axis split the keys, as Flash-Decoding does (Dao et al.,
    2023). `o_ptr` and `l_ptr` are then (SPLITS, batch, heads, n_q, d) and (SPLITS, batch, heads, n_q), which
    `combine_kernel` combines.
    """
    index = tl.program_id(0) % batch_heads
    # with a causal mask the last queries see the most keys: heaviest tiles first, so that the light ones fill the end
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    first_query = tile * BLOCK_M
    q = _load_tile(_head(q_ptr, index, heads, stride_q_batch, stride_q_head), stride_q_row, stride_q_col,
                   first_query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)  # fmt: skip
    k_base = _head(k_ptr, index // HEADS_PER_KV, heads // HEADS_PER_KV, stride_k_batch, stride_k_head)
    v_base = _head(v_ptr, index // HEADS_PER_KV, heads // HEADS_PER_KV, stride_v_batch, stride_v_head)
    scale_log2 = scale * LOG2_E

    max_log2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # keys [start, unmasked_end) need no mask; [unmasked_end, end) meet the diagonal or the ragged end; no more are seen
    start = 0
    if IS_CAUSAL:
        unmasked_end = tl.minimum((first_query + 1) // BLOCK_N, num_keys // BLOCK_N) * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, num_keys)
    else:
        unmasked_end = (num_keys // BLOCK_N) * BLOCK_N
        end = num_keys
    if SPLITS > 1:
        split = tl.program_id(1)
        tiles = tl.cdiv(num_keys, BLOCK_N)
        start = (tiles * split // SPLITS) * BLOCK_N
        end = tl.minimum((tiles * (split + 1) // SPLITS) * BLOCK_N, num_keys)
        unmasked_end = tl.minimum(unmasked_end, end)
        o_ptr += tl.cast(split * batch_heads, tl.int64) * num_queries * HEAD_DIM
        l_ptr += tl.cast(split * batch_heads, tl.int64) * num_queries
    max_log2, row_sum, acc = _forward_steps(
        q, k_base, v_base, stride_k_row, stride_k_col, stride_v_row, stride_v_col, max_log2, row_sum, acc,
        first_query, start, unmasked_end, num_keys, scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, False,
        IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip
    if IS_CAUSAL or not EVEN_N:
        max_log2, row_sum, acc = _forward_steps(
            q, k_base, v_base, stride_k_row, stride_k_col, stride_v_row, stride_v_col, max_log2, row_sum, acc,
            first_query, unmasked_end, end, num_keys, scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, True,
            IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip

    acc = acc / row_sum[:, None]
    _store_tile(_head(o_ptr, index, heads, stride_o_batch, stride_o_head), stride_o_row, stride_o_col,
                first_query, num_queries, acc, BLOCK_M, BLOCK_D, HEAD_DIM)  # fmt: skip
    queries = first_query + tl.arange(0, BLOCK_M)
    logsumexp = (max_log2 + tl.log2(row_sum)) * LN_2
    tl.store(l_ptr + tl.cast(index, tl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)


@triton.jit(do_not_specialize=["num_queries"])
def combine_kernel(parts_ptr, l_parts_ptr, o_ptr, l_ptr,
                   stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                   batch_heads, heads, num_queries, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
                   HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
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
        part = _load_tile(parts_ptr + (split * all_rows + row) * HEAD_DIM, HEAD_DIM, 1, first_query,
                          num_queries, ROWS, BLOCK_D, HEAD_DIM, True)  # fmt: skip
        weight_sum += weight
        acc += weight[:, None] * part
    _store_tile(_head(o_ptr, index, heads, stride_o_batch, stride_o_head), stride_o_row, stride_o_col,
                first_query, num_queries, acc / weight_sum[:, None], ROWS, BLOCK_D, HEAD_DIM)  # fmt: skip
    tl.store(l_ptr + row + queries, largest + tl.log2(weight_sum) * LN_2, mask=inside)


# ------------------------------------------------------------------------------------------------ backward: queries
@triton.jit
def _query_steps(q, do, l_log2, delta, dq, k_base, v_base,
                 stride_k_row, stride_k_col,
                 stride_v_row, stride_v_col,
                 first_query, first_key, end_key, num_keys, scale_log2, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
                 IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dQ / scale summed over the key tiles in [first_key, end_key)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, end_key, BLOCK_N):
        k = _load_tile(k_base, stride_k_row, stride_k_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM,
                       MASKED and not EVEN_N)  # fmt: skip
        v = _load_tile(v_base, stride_v_row, stride_v_col, key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM,
                       MASKED and not EVEN_N)  # fmt: skip
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
                            stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                            stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                            stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                            stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                            stride_do_batch, stride_do_head, stride_do_row, stride_do_col,
                            stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col,
                            batch_heads, heads, num_queries, num_keys, scale, BLOCK_M: tl.constexpr,
                            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                            IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                            HEADS_PER_KV: tl.constexpr, EXPANDED: tl.constexpr,
                            PRECISION: tl.constexpr):  # fmt: skip
    """delta and dQ of one tile of queries of one head. Grid: (query tiles · batch · heads,)."""
    index = tl.program_id(0) % batch_heads
    # heaviest first, as in forward
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    rows = tl.cast(index, tl.int64) * num_queries + queries

    do = _load_gradient(_head(do_ptr, index, heads, stride_do_batch, stride_do_head), stride_do_row,
                        stride_do_col, first_query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M,
                        EXPANDED > 0)  # fmt: skip
    o = _load_tile(_head(o_ptr, index, heads, stride_o_batch, stride_o_head), stride_o_row, stride_o_col,
                   first_query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)  # fmt: skip
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=queries < num_queries)

    q = _load_tile(_head(q_ptr, index, heads, stride_q_batch, stride_q_head), stride_q_row, stride_q_col,
                   first_query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)  # fmt: skip
    l_log2 = tl.load(l_ptr + rows, mask=queries < num_queries, other=0.0) * LOG2_E
    k_base = _head(k_ptr, index // HEADS_PER_KV, heads // HEADS_PER_KV, stride_k_batch, stride_k_head)
    v_base = _head(v_ptr, index // HEADS_PER_KV, heads // HEADS_PER_KV, stride_v_batch, stride_v_head)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if IS_CAUSAL:
        unmasked_end = tl.minimum((first_query + 1) // BLOCK_N, num_keys // BLOCK_N) * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, num_keys)
    else:
        unmasked_end = (num_keys // BLOCK_N) * BLOCK_N
        end = num_keys
    dq = _query_steps(q, do, l_log2, delta, dq, k_base, v_base, stride_k_row, stride_k_col, stride_v_row,
                      stride_v_col, first_query, 0, unmasked_end, num_keys, scale * LOG2_E, BLOCK_M, BLOCK_N,
                      BLOCK_D, HEAD_DIM, False, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip
    if IS_CAUSAL or not EVEN_N:
        dq = _query_steps(q, do, l_log2, delta, dq, k_base, v_base, stride_k_row, stride_k_col, stride_v_row,
                          stride_v_col, first_query, unmasked_end, end, num_keys, scale * LOG2_E, BLOCK_M, BLOCK_N,
                          BLOCK_D, HEAD_DIM, True, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip
    _store_tile(_head(dq_ptr, index, heads, stride_dq_batch, stride_dq_head), stride_dq_row, stride_dq_col,
                first_query, num_queries, dq * scale, BLOCK_M, BLOCK_D, HEAD_DIM)  # fmt: skip


# ------------------------------------------------------------------------------------------------ backward: keys
@triton.jit
def _key_steps(k, v, dk, dv, q_base, do_base, l_base, delta_base,
               stride_q_row, stride_q_col,
               stride_do_row, stride_do_col,
               first_key, first_query, end_query, num_queries, scale_log2, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, DIAGONAL: tl.constexpr,
               EVEN_M: tl.constexpr, EXPANDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dK / scale and dV summed over the query tiles in [first_query, end_query); scores are transposed.

    Rows past the last query need no mask: q, dO, L and delta are zero there, and so is what they add.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    if EXPANDED == 2:  # the tile is the same in every step
        do = _load_gradient(do_base, stride_do_row, stride_do_col, 0, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM,
                            True, True)  # fmt: skip
    for query in tl.range(first_query, end_query, BLOCK_M):
        queries = query + tl.arange(0, BLOCK_M)
        q = _load_tile(q_base, stride_q_row, stride_q_col, query, num_queries, BLOCK_M, BLOCK_D, HEAD_DIM,
                       not EVEN_M)  # fmt: skip
        if EXPANDED < 2:
            do = _load_gradient(do_base, stride_do_row, stride_do_col, query, num_queries, BLOCK_M, BLOCK_D,
                                HEAD_DIM, not EVEN_M, EXPANDED == 1)  # fmt: skip
        if EVEN_M:
            l_log2 = tl.load(l_base + queries) * LOG2_E
            delta = tl.load(delta_base + queries)
        else:
            l_log2 = tl.load(l_base + queries, mask=queries < num_queries, other=0.0) * LOG2_E
            delta = tl.load(delta_base + queries, mask=queries < num_queries, other=0.0)
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
                         stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                         stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                         stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                         stride_do_batch, stride_do_head, stride_do_row, stride_do_col,
                         stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col,
                         stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col,
                         batch_heads, heads, num_queries, num_keys, scale, BLOCK_M: tl.constexpr,
                         BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                         IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                         HEADS_PER_KV: tl.constexpr, EXPANDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dK and dV of one tile of keys of one of the `batch_heads` heads of keys, summed over the heads of queries that
    share it. Grid: (key tiles · batch_heads,); the first keys, which the most queries see, come first."""
    index = tl.program_id(0) % batch_heads
    first_key = (tl.program_id(0) // batch_heads) * BLOCK_N
    k = _load_tile(_head(k_ptr, index, heads, stride_k_batch, stride_k_head), stride_k_row, stride_k_col,
                   first_key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, not EVEN_N)  # fmt: skip
    v = _load_tile(_head(v_ptr, index, heads, stride_v_batch, stride_v_head), stride_v_row, stride_v_col,
                   first_key, num_keys, BLOCK_N, BLOCK_D, HEAD_DIM, not EVEN_N)  # fmt: skip
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for i in range(HEADS_PER_KV):
        q_head = index * HEADS_PER_KV + i
        q_base = _head(q_ptr, q_head, heads * HEADS_PER_KV, stride_q_batch, stride_q_head)
        do_base = _head(do_ptr, q_head, heads * HEADS_PER_KV, stride_do_batch, stride_do_head)
        l_base = l_ptr + tl.cast(q_head, tl.int64) * num_queries
        delta_base = delta_ptr + tl.cast(q_head, tl.int64) * num_queries
        # with a causal mask queries [0, start) see none of these keys, [start, masked_end) some of them, the others all
        masked_end = 0
        if IS_CAUSAL:
            start = (first_key // BLOCK_M) * BLOCK_M
            masked_end = tl.minimum(tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M, num_queries)
            dk, dv = _key_steps(k, v, dk, dv, q_base, do_base, l_base, delta_base, stride_q_row, stride_q_col,
                                stride_do_row, stride_do_col, first_key, start, masked_end, num_queries,
                                scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, True, EVEN_M, EXPANDED,
                                PRECISION)  # fmt: skip
        dk, dv = _key_steps(k, v, dk, dv, q_base, do_base, l_base, delta_base, stride_q_row, stride_q_col,
                            stride_do_row, stride_do_col, first_key, masked_end, num_queries, num_queries,
                            scale * LOG2_E, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, False, EVEN_M, EXPANDED,
                            PRECISION)  # fmt: skip
    _store_tile(_head(dk_ptr, index, heads, stride_dk_batch, stride_dk_head), stride_dk_row, stride_dk_col,
                first_key, num_keys, dk * scale, BLOCK_N, BLOCK_D, HEAD_DIM)  # fmt: skip
    _store_tile(_head(dv_ptr, index, heads, stride_dv_batch, stride_dv_head), stride_dv_row, stride_dv_col,
                first_key, num_keys, dv, BLOCK_N, BLOCK_D, HEAD_DIM)  # fmt: skip


KERNELS = {
    "forward": forward_kernel,
    "backward_queries": backward_queries_kernel,
    "backward_keys": backward_keys_kernel,
}
