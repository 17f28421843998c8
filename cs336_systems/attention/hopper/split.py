"""fp32 attention by bf16 matmuls: every number is split into three bf16 pieces, and six of the nine products of pieces
are computed, which is as accurate as fp32.

    x = x₀ + x₁ + x₂,  each of 8 significant bits:  x₀ = bf16(x),  x₁ = bf16(x − x₀),  x₂ = bf16(x − x₀ − x₁)
    a b ≈ a₀b₀ + (a₀b₁ + a₁b₀) + (a₀b₂ + a₁b₁ + a₂b₀)          what is left out is about 2⁻²⁴ of a b

On Hopper's tensor cores six bf16 matmuls take as long as three in TF32, the alternative with that accuracy
(`attention.triton`). But both operands may come from shared memory in either order, and Q, K, V and dO can be split
once, by a small kernel, instead of in every step of every program; P and dS are split on chip, where they are computed.

Pieces are stored as (3 · heads · rows, D) matrices, rows and columns padded with zeros to whole tiles. Symbols, names
and passes are those of `attention.triton`, but both backward passes are one launch; gradients are deterministic.

Source of the method: Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

from __future__ import annotations

import triton
import triton.language as tl

from cs336_systems.attention.triton.kernels import (
    LN_2,
    LOG2_E,
    _ends_of_keys,
    _load_gradient,
    _load_tile,
    _rows,
    _store_tile,
)

# TRITON_INTERPRET=1 multiplies tiles of bf16 wrongly; in fp32 their products are exact
_WIDE = tl.constexpr(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------------------------------------ splitting numbers
@triton.jit
def _pieces(x):
    """x₀, x₁, x₂ of fp32 numbers."""
    x0 = x.to(tl.bfloat16)
    rest = x - x0.to(tl.float32)
    x1 = rest.to(tl.bfloat16)
    return x0, x1, (rest - x1.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, acc):
    if _WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _product(a, b):
    """a b, of their pieces, the smallest products first.

    It starts at zero, and sums over tiles are computed outside: a tensor core truncates its accumulator, always toward
    zero, at every step, and in sums over thousands of keys or queries that error would accumulate.
    """
    product = _dot(a[2], b[0], tl.zeros((a[0].shape[0], b[0].shape[1]), tl.float32))
    product = _dot(a[0], b[2], product)
    product = _dot(a[1], b[1], product)
    product = _dot(a[1], b[0], product)
    product = _dot(a[0], b[1], product)
    return _dot(a[0], b[0], product)


@triton.jit
def _transposed(x):
    return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def _load(desc, row, piece_rows):
    """The three pieces of the tile at a row of the first piece."""
    return desc.load([row, 0]), desc.load([row + piece_rows, 0]), desc.load([row + 2 * piece_rows, 0])


@triton.jit
def _store_pieces(pieces_ptr, row, piece_rows, tile, ROWS: tl.constexpr, D: tl.constexpr):
    x0, x1, x2 = _pieces(tile)
    at = (tl.cast(row, tl.int64) + tl.arange(0, ROWS))[:, None] * D + tl.arange(0, D)[None, :]
    piece = tl.cast(piece_rows, tl.int64) * D
    tl.store(pieces_ptr + at, x0)
    tl.store(pieces_ptr + piece + at, x1)
    tl.store(pieces_ptr + 2 * piece + at, x2)


@triton.jit
def _split_rows(x_rows, pieces_ptr, index, first, batch_heads, padded_rows, ROWS: tl.constexpr, D: tl.constexpr,
                HEAD_DIM: tl.constexpr):  # fmt: skip
    """The pieces of ROWS rows of a head, if it has them."""
    if first < padded_rows:
        x = _load_tile(x_rows, first, ROWS, D, HEAD_DIM, True)
        _store_pieces(pieces_ptr, index * padded_rows + first, batch_heads * padded_rows, x, ROWS, D)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def split_kernel(q_ptr, k_ptr, v_ptr, q_pieces_ptr, k_pieces_ptr, v_pieces_ptr,
                 stride_q_batch, stride_q_head, stride_q_row, stride_q_col,
                 stride_k_batch, stride_k_head, stride_k_row, stride_k_col,
                 stride_v_batch, stride_v_head, stride_v_row, stride_v_col,
                 heads, batch_heads, num_queries, num_keys, padded_queries, padded_keys, ROWS: tl.constexpr,
                 D: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_KV: tl.constexpr):  # fmt: skip
    """The pieces of Q, K and V, (batch, heads, length, HEAD_DIM) with any strides. Grid: (tiles of the longer's rows
    · heads, 3)."""
    index = tl.program_id(0) % batch_heads
    first = tl.program_id(0) // batch_heads * ROWS
    batch_kv_heads, kv_heads = batch_heads // HEADS_PER_KV, heads // HEADS_PER_KV
    kv_index = tl.program_id(0) % batch_kv_heads
    place, kv_place = (index, heads), (kv_index, kv_heads)
    first_key = tl.program_id(0) // batch_kv_heads * ROWS
    if tl.program_id(1) == 0:
        q_rows = _rows(q_ptr, place, num_queries, stride_q_batch, stride_q_head, stride_q_row, stride_q_col)
        _split_rows(q_rows, q_pieces_ptr, index, first, batch_heads, padded_queries, ROWS, D, HEAD_DIM)
    elif tl.program_id(1) == 1:
        k_rows = _rows(k_ptr, kv_place, num_keys, stride_k_batch, stride_k_head, stride_k_row, stride_k_col)
        _split_rows(k_rows, k_pieces_ptr, kv_index, first_key, batch_kv_heads, padded_keys, ROWS, D, HEAD_DIM)
    else:
        v_rows = _rows(v_ptr, kv_place, num_keys, stride_v_batch, stride_v_head, stride_v_row, stride_v_col)
        _split_rows(v_rows, v_pieces_ptr, kv_index, first_key, batch_kv_heads, padded_keys, ROWS, D, HEAD_DIM)


@triton.jit(do_not_specialize=["num_queries"])
def split_gradient_kernel(o_ptr, do_ptr, do_pieces_ptr, delta_ptr,
                          stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                          stride_do_batch, stride_do_head, stride_do_row, stride_do_col,
                          heads, batch_heads, num_queries, padded_queries, ROWS: tl.constexpr,
                          D: tl.constexpr, HEAD_DIM: tl.constexpr, ONE_COLUMN: tl.constexpr):  # fmt: skip
    """The pieces of dO, and delta = rowsum(dO ∘ O), (heads, padded_queries). ONE_COLUMN: dO's columns are one, with a
    stride of 0. Grid: (row tiles · heads,)."""
    index = tl.program_id(0) % batch_heads
    place = index, heads
    first = tl.program_id(0) // batch_heads * ROWS
    do_rows = _rows(do_ptr, place, num_queries, stride_do_batch, stride_do_head, stride_do_row, stride_do_col)
    do = _load_gradient(do_rows, first, ROWS, D, HEAD_DIM, True, ONE_COLUMN)
    if ONE_COLUMN:  # one number for a row, or for all: in the padding it has to be zero as well
        columns = tl.arange(0, D)
        do = tl.where((columns < HEAD_DIM)[None, :], do, 0.0)
    o_rows = _rows(o_ptr, place, num_queries, stride_o_batch, stride_o_head, stride_o_row, stride_o_col)
    o = _load_tile(o_rows, first, ROWS, D, HEAD_DIM, True)
    rows = tl.cast(index, tl.int64) * padded_queries + first + tl.arange(0, ROWS)
    tl.store(delta_ptr + rows, tl.sum(o * do, 1))
    _store_pieces(do_pieces_ptr, index * padded_queries + first, batch_heads * padded_queries, do, ROWS, D)


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _forward_steps(q, k_desc, v_desc, key_row, key_piece, max_log2, row_sum, acc, first_query, first_key, end_key,
                   num_keys, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
                   IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr):  # fmt: skip
    """The online softmax over the key tiles in [first_key, end_key)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, end_key, BLOCK_N):
        s = _product(q, _transposed(_load(k_desc, key_row + key, key_piece)))
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
            if not EVEN_N:
                s = tl.where((keys < num_keys)[None, :], s, float("-inf"))
        new_max = tl.maximum(max_log2, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        alpha = tl.exp2(max_log2 - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = _load(v_desc, key_row + key, key_piece)
        acc += _product(_pieces(p), v)
        max_log2 = new_max
    return max_log2, row_sum, acc


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def forward_kernel(q_desc, k_desc, v_desc, o_ptr, l_ptr,
                   stride_o_batch, stride_o_head, stride_o_row, stride_o_col,
                   batch_heads, heads, num_queries, num_keys, padded_queries, padded_keys, scale_log2,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, HEADS_PER_KV: tl.constexpr):  # fmt: skip
    """O and L of one tile of queries of one head. Grid: (query tiles · heads,), heaviest first."""
    index = tl.program_id(0) % batch_heads
    place = index, heads
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(0) // batch_heads
    first_query = tile * BLOCK_M
    q = _load(q_desc, index * padded_queries + first_query, batch_heads * padded_queries)
    key_row, key_piece = index // HEADS_PER_KV * padded_keys, batch_heads // HEADS_PER_KV * padded_keys
    max_log2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    _, ends = _ends_of_keys(first_query, num_queries, num_keys, None, None, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for part in tl.static_range(1, 3 if IS_CAUSAL or not EVEN_N else 2):
        max_log2, row_sum, acc = _forward_steps(
            q, k_desc, v_desc, key_row, key_piece, max_log2, row_sum, acc, first_query, ends[part], ends[part + 1],
            num_keys, scale_log2, BLOCK_M, BLOCK_N, part != 1, IS_CAUSAL, EVEN_N)  # fmt: skip
    o_rows = _rows(o_ptr, place, num_queries, stride_o_batch, stride_o_head, stride_o_row, stride_o_col)
    _store_tile(o_rows, first_query, acc / row_sum[:, None], HEAD_DIM)
    queries = first_query + tl.arange(0, BLOCK_M)
    logsumexp = (max_log2 + tl.log2(row_sum)) * LN_2
    tl.store(l_ptr + tl.cast(index, tl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)


# ------------------------------------------------------------------------------------------------ backward: queries
@triton.jit
def _query_steps(q, do, l_log2, delta, dq, k_desc, v_desc, key_row, key_piece, first_query, first_key, end_key,
                 num_keys, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
                 IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr):  # fmt: skip
    """dQ / scale summed over the key tiles in [first_key, end_key)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, end_key, BLOCK_N):
        k = _load(k_desc, key_row + key, key_piece)
        v = _load(v_desc, key_row + key, key_piece)
        s = _product(q, _transposed(k))
        dp = _product(do, _transposed(v))
        p = tl.exp2(s * scale_log2 - l_log2[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            if IS_CAUSAL:
                p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
            if not EVEN_N:
                p = tl.where((keys < num_keys)[None, :], p, 0.0)
        dq += _product(_pieces(p * (dp - delta[:, None])), k)
    return dq


@triton.jit
def _query_program(program, q_desc, k_desc, v_desc, do_desc, l_ptr, delta_ptr, dq_ptr,
                   stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col,
                   batch_heads, heads, num_queries, num_keys, padded_queries, padded_keys, scale_log2, scale,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
                   IS_CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, HEADS_PER_KV: tl.constexpr):  # fmt: skip
    """dQ of one tile of queries of one head, heaviest first."""
    index = program % batch_heads
    place = index, heads
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - program // batch_heads
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    row, piece = index * padded_queries + first_query, batch_heads * padded_queries
    q = _load(q_desc, row, piece)
    do = _load(do_desc, row, piece)
    l_log2 = tl.load(l_ptr + tl.cast(index, tl.int64) * num_queries + queries, mask=queries < num_queries,
                     other=0.0) * LOG2_E  # fmt: skip
    delta = tl.load(delta_ptr + tl.cast(index, tl.int64) * padded_queries + queries)
    key_row, key_piece = index // HEADS_PER_KV * padded_keys, batch_heads // HEADS_PER_KV * padded_keys
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    _, ends = _ends_of_keys(first_query, num_queries, num_keys, None, None, BLOCK_M, BLOCK_N, IS_CAUSAL)
    for part in tl.static_range(1, 3 if IS_CAUSAL or not EVEN_N else 2):
        dq = _query_steps(q, do, l_log2, delta, dq, k_desc, v_desc, key_row, key_piece, first_query, ends[part],
                          ends[part + 1], num_keys, scale_log2, BLOCK_M, BLOCK_N, part != 1, IS_CAUSAL,
                          EVEN_N)  # fmt: skip
    dq_rows = _rows(dq_ptr, place, num_queries, stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col)
    _store_tile(dq_rows, first_query, dq * scale, HEAD_DIM)


# ------------------------------------------------------------------------------------------------ backward: keys
@triton.jit
def _key_steps(k, v, dk, dv, q_desc, do_desc, l_base, delta_base, query_row, query_piece, first_key, first_query,
               end_query, num_queries, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               DIAGONAL: tl.constexpr, EVEN_M: tl.constexpr):  # fmt: skip
    """dK / scale and dV summed over the query tiles in [first_query, end_query); scores are transposed.

    Rows past the last query need no mask: q, dO, L and delta are zero there, and so is what they add.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    for query in tl.range(first_query, end_query, BLOCK_M):
        queries = query + tl.arange(0, BLOCK_M)
        q = _load(q_desc, query_row + query, query_piece)
        do = _load(do_desc, query_row + query, query_piece)
        if EVEN_M:
            l_log2 = tl.load(l_base + queries) * LOG2_E
        else:
            l_log2 = tl.load(l_base + queries, mask=queries < num_queries, other=0.0) * LOG2_E
        delta = tl.load(delta_base + queries)
        s = _product(k, _transposed(q))
        p = tl.exp2(s * scale_log2 - l_log2[None, :])
        if DIAGONAL:
            p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
        dv += _product(_pieces(p), do)
        dp = _product(v, _transposed(do))
        dk += _product(_pieces(p * (dp - delta[None, :])), q)
    return dk, dv


@triton.jit
def _key_program(program, q_desc, k_desc, v_desc, do_desc, l_ptr, delta_ptr, dk_ptr, dv_ptr,
                 stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col,
                 stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col,
                 batch_heads, heads, num_queries, num_keys, padded_queries, padded_keys, scale_log2, scale,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
                 IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, HEADS_PER_KV: tl.constexpr):  # fmt: skip
    """dK and dV of one tile of keys of one head, over the heads of queries that share it; heaviest first."""
    batch_kv_heads, kv_heads = batch_heads // HEADS_PER_KV, heads // HEADS_PER_KV
    index = program % batch_kv_heads
    place = index, kv_heads
    first_key = (program // batch_kv_heads) * BLOCK_N
    row, piece = index * padded_keys + first_key, batch_kv_heads * padded_keys
    k = _load(k_desc, row, piece)
    v = _load(v_desc, row, piece)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for i in range(HEADS_PER_KV):
        q_head = index * HEADS_PER_KV + i
        l_base = l_ptr + tl.cast(q_head, tl.int64) * num_queries
        delta_base = delta_ptr + tl.cast(q_head, tl.int64) * padded_queries
        query_row, query_piece = q_head * padded_queries, batch_heads * padded_queries
        start, masked_end = 0, 0
        # at 128 columns a loop of its own for the diagonal would need more registers than there are
        OWN_LOOP: tl.constexpr = IS_CAUSAL and D < 128
        if IS_CAUSAL:
            start = (first_key // BLOCK_M) * BLOCK_M
            masked_end = start
            if OWN_LOOP:
                masked_end = tl.minimum(tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M, num_queries)
        ends = start, masked_end, num_queries
        for part in tl.static_range(0 if OWN_LOOP else 1, 2):
            dk, dv = _key_steps(k, v, dk, dv, q_desc, do_desc, l_base, delta_base, query_row, query_piece, first_key,
                                ends[part], ends[part + 1], num_queries, scale_log2, BLOCK_M, BLOCK_N,
                                part == 0 or (IS_CAUSAL and D >= 64), EVEN_M)  # fmt: skip
    dk_rows = _rows(dk_ptr, place, num_keys, stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col)
    _store_tile(dk_rows, first_key, dk * scale, HEAD_DIM)
    dv_rows = _rows(dv_ptr, place, num_keys, stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col)
    _store_tile(dv_rows, first_key, dv, HEAD_DIM)


# ------------------------------------------------------------------------------------------------ backward: both
@triton.jit(do_not_specialize=["num_queries", "num_keys", "query_programs", "key_programs"])
def backward_kernel(q_desc, k_step_desc, v_step_desc, do_desc, q_step_desc, k_desc, v_desc, do_step_desc,
                    l_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
                    stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col,
                    stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col,
                    stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col,
                    batch_heads, heads, num_queries, num_keys, padded_queries, padded_keys, query_programs,
                    key_programs, scale_log2, scale, QUERY_M: tl.constexpr, QUERY_N: tl.constexpr,
                    KEY_M: tl.constexpr, KEY_N: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
                    IS_CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
                    HEADS_PER_KV: tl.constexpr, IN_TURNS: tl.constexpr):  # fmt: skip
    """Both passes in one launch: they do not depend on one another, and few programs of one would leave multiprocessors
    idle. Those of keys come first, which have more work; IN_TURNS: one of each at a time, for few programs, which
    begin together (many of both read twice as much at a time as the L2 cache may hold).

    Grid: (all of them,); IN_TURNS: (twice the programs of the pass that has more,)."""
    index = tl.program_id(0)
    if IN_TURNS:
        of_keys = index % 2 == 0
        key_program = index // 2
        query_program = index // 2
    else:
        of_keys = index < key_programs
        key_program = index
        query_program = index - key_programs
    if of_keys:
        if key_program < key_programs:
            _key_program(key_program, q_step_desc, k_desc, v_desc, do_step_desc, l_ptr, delta_ptr, dk_ptr,
                         dv_ptr, stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_col,
                         stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_col, batch_heads, heads,
                         num_queries, num_keys, padded_queries, padded_keys, scale_log2, scale, KEY_M, KEY_N,
                         D, HEAD_DIM, IS_CAUSAL, EVEN_M, HEADS_PER_KV)  # fmt: skip
    else:
        if query_program < query_programs:
            _query_program(query_program, q_desc, k_step_desc, v_step_desc, do_desc, l_ptr, delta_ptr, dq_ptr,
                           stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_col, batch_heads, heads,
                           num_queries, num_keys, padded_queries, padded_keys, scale_log2, scale, QUERY_M,
                           QUERY_N, D, HEAD_DIM, IS_CAUSAL, EVEN_N, HEADS_PER_KV)  # fmt: skip
