"""FlashAttention-2 in Triton for any NVIDIA GPU that Triton serves: the forward kernels, and what those of `backward`
share with them.

Symbols, with the equations of Dao, "FlashAttention-2" (2023), section 3:

    Q (n_q, d), K and V (n_k, d)     inputs of one head; `scale` = 1/sqrt(d)
    S = scale · Q Kᵀ                 scores; never stored (eq. 1)
    L_i = log Σ_j exp(S_ij)          logsumexp of a row, natural logarithm; the one statistic that forward saves
    P = exp(S − L)                   probabilities, recomputed in backward (algorithm 2, line 11); in forward p and its
                                     sums, acc and row_sum, are relative to the row's maximum so far, max_log2
    O = P V                          output (eq. 3)
    dP = dO Vᵀ
    delta = rowsum(dO ∘ O)           the paper's D
    dS = P ∘ (dP − delta)            (eq. 4)
    dQ = scale · dS K,  dK = scale · dSᵀ Q,  dV = Pᵀ dO

The hardware's instruction is exp2, so logarithms are to base 2 from the scores on, which are multiplied by scale_log2 =
scale · log2(e): names that end in _log2 hold such numbers. In memory L is a natural logarithm.

Names: `x_ptr` is where a tensor begins, `x_rows` the matrix of one head (`_rows`); `stride_x_batch`, `_head`, `_row`
and `_col` are in elements. BLOCK_M queries and BLOCK_N keys make a tile, of BLOCK_D columns (HEAD_DIM rounded up
to a power of two; the rest is masked). EVEN_M, EVEN_N: lengths are multiples of these, so that rows need no mask.
EXPANDED says which strides of dO are 0, as autograd passes the gradient of a sum: 0 none; 1 that of columns: a row is
one number; 2 that of rows as well: a head is one number. Such numbers are loaded as they are and spread on chip.
HEADS_PER_KV: heads of queries that share one of keys (grouped queries), those of a group next to each other; 1 if each
has its own.

With a causal mask query i sees the keys up to i, from the first that `window` or `bounds_ptr` leaves it; without a
limit both are None. window: the keys that a query sees at most, itself among them; bounds (2, n), of packed documents
and their windows: the first key that each token sees, and where those that see it end. First keys never fall from one
query to the next. So of a tile of queries the first begins the loop over keys, and the last says from where on all its
queries see a key: between there and the diagonal nothing needs a mask. The loop of a tile of keys ends likewise. Tiles
that nobody sees are not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32
# Offsets within a tile have the type of the strides, which are 64 bits wide where rows lie far apart (`launch.wide`).
# The interpreter, which sees no types of arguments, has 64 bits everywhere.
_OFFSET = tl.constexpr(tl.int64 if triton.knobs.runtime.interpret else tl.int32)


# ------------------------------------------------------------------------------------------------ helpers
@triton.jit
def _rows(pointer, place, num_rows, stride_batch, stride_head, stride_row, stride_col):
    """Of a tensor the matrix of one head, place = (its index in all batches, heads of a batch): where it begins, in 64
    bits, since all heads together may pass 2^31 elements; its strides and length."""
    index, heads = place
    batch = tl.cast(index // heads, tl.int64)
    head = tl.cast(index % heads, tl.int64)
    return pointer + batch * stride_batch + head * stride_head, stride_row, stride_col, num_rows


@triton.jit
def _load_tile(matrix, first_row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
               MASK_ROWS: tl.constexpr):  # fmt: skip
    """Rows first_row… of a (num_rows, HEAD_DIM) matrix as a (ROWS, BLOCK_D) tile, zero outside the matrix."""
    base, stride_row, stride_col, num_rows = matrix
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
def _load_gradient(matrix, first_row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   MASK_ROWS: tl.constexpr, ONE_COLUMN: tl.constexpr):  # fmt: skip
    """A tile of dO. ONE_COLUMN: its rows are one number each, which is loaded once and spread."""
    if ONE_COLUMN:
        base, stride_row, _, num_rows = matrix
        rows = tl.arange(0, ROWS).to(_OFFSET)
        start = base + tl.cast(first_row, tl.int64) * stride_row
        column = tl.load(start + rows * stride_row, mask=first_row + rows < num_rows, other=0.0)
        return tl.broadcast_to(column[:, None], (ROWS, BLOCK_D))
    return _load_tile(matrix, first_row, ROWS, BLOCK_D, HEAD_DIM, MASK_ROWS)


@triton.jit
def _store_tile(matrix, first_row, tile, HEAD_DIM: tl.constexpr):
    """Writes a tile to the rows first_row… of a (num_rows, HEAD_DIM) matrix, the part inside it."""
    base, stride_row, stride_col, num_rows = matrix
    rows = tl.arange(0, tile.shape[0]).to(_OFFSET)
    columns = tl.arange(0, tile.shape[1]).to(_OFFSET)
    pointers = (base + tl.cast(first_row, tl.int64) * stride_row
                + rows[:, None] * stride_row + columns[None, :] * stride_col)  # fmt: skip
    mask = (first_row + rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------ which keys are seen
@triton.jit(do_not_specialize=["documents", "total", "window"])
def bounds_kernel(
    cu_seqlens_ptr, bounds_ptr, documents, total, window, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """The first key that each token sees, and where the tokens that see it end, (2, total): where its document begins
    and ends, by a binary search in cu_seqlens (documents + 1,) for the last one that begins at or before it, in STEPS
    steps; with a window closer to it. Grid: (cdiv(total, BLOCK),)."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    document = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(STEPS):
        probe = document + (1 << (STEPS - 1 - i))
        begin = tl.load(cu_seqlens_ptr + probe, mask=probe < documents, other=total)
        document = tl.where((probe < documents) & (begin <= tokens), probe, document)
    # whatever cu_seqlens holds: within the tensors, and a token sees itself
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + document), 0), tokens)
    end = tl.maximum(tl.minimum(tl.load(cu_seqlens_ptr + document + 1), total), tokens + 1)
    if window is not None:
        begin, end = tl.maximum(begin, tokens - window + 1), tl.minimum(end, tokens + window)
    tl.store(bounds_ptr + tokens, begin, mask=tokens < total)
    tl.store(bounds_ptr + total + tokens, end, mask=tokens < total)


@triton.jit
def _first_keys(queries, num_queries, window, bounds_ptr):
    """The first key that each query sees, by bounds or a window; of those past the last one, the last one's."""
    queries = tl.minimum(queries, num_queries - 1)
    if bounds_ptr is not None:
        return tl.load(bounds_ptr + queries)
    else:
        return tl.maximum(queries - window + 1, 0)


@triton.jit
def _query_ends(keys, num_queries, window, bounds_ptr):
    """Where the queries that see each key end; of keys past the last query, as for the key at the last one."""
    keys = tl.minimum(keys, num_queries - 1)
    if bounds_ptr is not None:
        return tl.load(bounds_ptr + num_queries + keys)
    else:
        return tl.minimum(keys + window, num_queries)


@triton.jit
def _ends_of_keys(first_query, num_queries, num_keys, window, bounds_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  IS_CAUSAL: tl.constexpr):  # fmt: skip
    """For a tile of queries: the first key that each sees, by a limit, else 0; and where keys begin, and end that need
    a mask (there windows or documents begin), none, or one again (the diagonal, the ragged end). No more are seen."""
    if IS_CAUSAL:
        unmasked_end = tl.minimum((first_query + 1) // BLOCK_N, num_keys // BLOCK_N) * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, num_keys)
    else:
        unmasked_end = (num_keys // BLOCK_N) * BLOCK_N
        end = num_keys
    start, masked_end, first_keys = 0, 0, 0
    if window is not None or bounds_ptr is not None:
        first_keys = _first_keys(first_query + tl.arange(0, BLOCK_M), num_queries, window, bounds_ptr)
        last_query = first_query + BLOCK_M - 1
        start = _first_keys(first_query, num_queries, window, bounds_ptr) // BLOCK_N * BLOCK_N
        masked_end = tl.cdiv(_first_keys(last_query, num_queries, window, bounds_ptr), BLOCK_N) * BLOCK_N
        masked_end = tl.minimum(masked_end, end)
        unmasked_end = tl.maximum(unmasked_end, masked_end)
    return first_keys, (start, masked_end, unmasked_end, end)


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _forward_steps(q, k_rows, v_rows, max_log2, row_sum, acc, first_query, first_keys, first_key, end_key, num_keys,
                   scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """The online softmax over the key tiles in [first_key, end_key): algorithm 1, lines 6 to 11."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, end_key, BLOCK_N):
        k = _load_tile(k_rows, key, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
            if first_keys is not None:
                s = tl.where(first_keys[:, None] <= keys[None, :], s, float("-inf"))
            if not EVEN_N:
                s = tl.where((keys < num_keys)[None, :], s, float("-inf"))
        new_max = tl.maximum(max_log2, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        alpha = tl.exp2(max_log2 - new_max)  # rescales the sums so far when the maximum grows
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = _load_tile(v_rows, key, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED and not EVEN_N)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
        max_log2 = new_max
    return max_log2, row_sum, acc


@triton.jit(do_not_specialize=["num_queries", "num_keys", "window"])
def forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, bounds_ptr,
                   stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                   stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                   stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                   stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                   batch_heads, heads, num_queries, num_keys, window, scale, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                   HEADS_PER_KV: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """O and L of one tile of queries of one head (algorithm 1). Grid: (query tiles · batch · heads, SPLITS).

    With SPLITS > 1 (not causal) the programs along the second axis split the keys, as Flash-Decoding does (Dao et al.,
    2023). `o_ptr` and `l_ptr` are then (SPLITS, batch, heads, n_q, d) and (SPLITS, batch, heads, n_q), which
    `combine_kernel` combines.
    """
    index = tl.program_id(0) % batch_heads
    place = index, heads
    # with a causal mask the last queries see the most keys: heaviest tiles first, so that the light ones fill the end
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    first_query = tile * BLOCK_M
    q_rows = _rows(q_ptr, place, num_queries, stride_q_batch, stride_q_head, stride_q_row, stride_q_col)
    q = _load_tile(q_rows, first_query, BLOCK_M, BLOCK_D, HEAD_DIM, not EVEN_M)
    kv_place = index // HEADS_PER_KV, heads // HEADS_PER_KV
    k_rows = _rows(k_ptr, kv_place, num_keys, stride_k_batch, stride_k_head, stride_k_row, stride_k_col)
    v_rows = _rows(v_ptr, kv_place, num_keys, stride_v_batch, stride_v_head, stride_v_row, stride_v_col)
    scale_log2 = scale * LOG2_E

    max_log2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first_keys, ends = _ends_of_keys(first_query, num_queries, num_keys, window, bounds_ptr, BLOCK_M, BLOCK_N,
                                     IS_CAUSAL)  # fmt: skip
    if window is None and bounds_ptr is None:
        first_keys = None
    else:  # −inf − −inf is no number, where the first tile is masked in a row
        max_log2 = tl.full((BLOCK_M,), LOWEST, tl.float32)
    if SPLITS > 1:
        split = tl.program_id(1)
        tiles = tl.cdiv(num_keys, BLOCK_N)
        start = (tiles * split // SPLITS) * BLOCK_N
        end = tl.minimum((tiles * (split + 1) // SPLITS) * BLOCK_N, num_keys)
        ends = start, start, tl.minimum(ends[2], end), end
        o_ptr += tl.cast(split * batch_heads, tl.int64) * num_queries * HEAD_DIM
        l_ptr += tl.cast(split * batch_heads, tl.int64) * num_queries
    for part in tl.static_range(1 if first_keys is None else 0, 3 if IS_CAUSAL or not EVEN_N else 2):
        max_log2, row_sum, acc = _forward_steps(
            q, k_rows, v_rows, max_log2, row_sum, acc, first_query, first_keys, ends[part], ends[part + 1], num_keys,
            scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, HEAD_DIM, part != 1, IS_CAUSAL, EVEN_N, PRECISION)  # fmt: skip

    acc = acc / row_sum[:, None]
    o_rows = _rows(o_ptr, place, num_queries, stride_o_batch, stride_o_head, stride_o_row, stride_o_col)
    _store_tile(o_rows, first_query, acc, HEAD_DIM)
    queries = first_query + tl.arange(0, BLOCK_M)
    logsumexp = (max_log2 + tl.log2(row_sum)) * LN_2
    tl.store(l_ptr + tl.cast(index, tl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)


@triton.jit(do_not_specialize=["num_queries"])
def combine_kernel(o_parts_ptr, l_parts_ptr, o_ptr, l_ptr,
                   stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                   batch_heads, heads, num_queries, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
                   HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """O and L of ROWS queries of one head from O_s and L_s of each split of its keys: O = Σ exp(L_s − L) O_s,
    L = log Σ exp(L_s). Grid: (cdiv(n_q, ROWS) · batch · heads,)."""
    index = tl.program_id(0) % batch_heads
    place = index, heads
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
        parts_rows = o_parts_ptr + (split * all_rows + row) * HEAD_DIM, HEAD_DIM, 1, num_queries
        part = _load_tile(parts_rows, first_query, ROWS, BLOCK_D, HEAD_DIM, True)
        weight_sum += weight
        acc += weight[:, None] * part
    o_rows = _rows(o_ptr, place, num_queries, stride_o_batch, stride_o_head, stride_o_row, stride_o_col)
    _store_tile(o_rows, first_query, acc / weight_sum[:, None], HEAD_DIM)
    tl.store(l_ptr + row + queries, largest + tl.log2(weight_sum) * LN_2, mask=inside)
