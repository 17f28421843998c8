"""FlashAttention-2 in Triton with a switch for each optimization: causal, and no more general than the lesson needs.

The symbols are those of `attention.triton`, the production kernels for any GPU, which are what remains when
every switch is set as it should be. Here tensors are contiguous (batch · heads, n, D), all heads stacked as the rows
of one matrix; n is a multiple of the tiles, so that the only mask is the causal one.

Switches, all known at compile time:

    SKIP         tiles of keys after the last query of a program are not visited
    SPLIT        a loop without a mask for tiles before the diagonal, a second one with it for those that meet it
    EXP2         exponentials in base two, log2(e) folded into the scale of the scores: one multiplication, not three
    HEAVY_FIRST  programs with the most keys start first, of all heads; else head by head, lightest first
    TMA          tiles are loaded and stored through tensor descriptors: hardware computes the addresses
    PERSISTENT   as many programs as fit the GPU at once, each of which works through several tiles
    FUSE_D       D = rowsum(dO ∘ O) is computed where dQ is, not by a kernel of its own
    ONE_PASS     the programs that own keys add their part of dQ to memory by atomics; else a second pass owns queries

An argument that TMA reads is a descriptor then, and a pointer otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(source, first_row, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """A tile (ROWS, D) of a matrix with rows of D numbers."""
    if TMA:
        tile = source.load([first_row, 0])
    else:
        start = source + tl.cast(first_row, tl.int64) * D
        tile = tl.load(start + tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :])
    return tile


@triton.jit
def _store(target, first_row, tile, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        target.store([first_row, 0], tile.to(target.dtype))
    else:
        start = target + tl.cast(first_row, tl.int64) * D
        offsets = tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(start + offsets, tile.to(target.dtype.element_ty))


@triton.jit
def _place(program, tiles, batch_heads, HEAVY_FIRST: tl.constexpr, LAST_IS_HEAVY: tl.constexpr):
    """(head, tile) of a program."""
    if HEAVY_FIRST:
        tile = program // batch_heads
        if LAST_IS_HEAVY:
            tile = tiles - 1 - tile
        return program % batch_heads, tile
    return program // tiles, program % tiles


@triton.jit
def _exp(x, EXP2: tl.constexpr):
    if EXP2:
        return tl.exp2(x)
    return tl.exp(x)


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _forward_steps(q, k, v, row_max, row_sum, acc, head_row, first_query, first_key, last_key, scale,
                   MASKED: tl.constexpr, EXP2: tl.constexpr, TMA: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The online softmax over the tiles of keys in [first_key, last_key). With EXP2, `scale` holds log2(e)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, last_key, BLOCK_N):
        s = tl.dot(q, tl.trans(_load(k, head_row + key, BLOCK_N, D, TMA)))  # (BLOCK_M, BLOCK_N)
        if not EXP2:
            s = s * scale
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
        if EXP2:  # scores are scaled where they are used, by one FMA
            new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            p = tl.exp(s - new_max[:, None])
        alpha = _exp(row_max - new_max, EXP2)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = _load(v, head_row + key, BLOCK_N, D, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])  # (BLOCK_M, D)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _forward_tile(program, q, k, v, o, logsumexp, batch_heads, n, scale,
                  SKIP: tl.constexpr, SPLIT: tl.constexpr, EXP2: tl.constexpr, HEAVY_FIRST: tl.constexpr,
                  TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, tile = _place(program, n // BLOCK_M, batch_heads, HEAVY_FIRST, True)
    head_row, first_query = head * n, tile * BLOCK_M
    q_tile = _load(q, head_row + first_query, BLOCK_M, D, TMA)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    if EXP2:
        scale = scale * LOG2_E
    whole = 0  # keys before it are seen by every query of the tile
    if SPLIT:
        whole = (first_query + 1) // BLOCK_N * BLOCK_N
        row_max, row_sum, acc = _forward_steps(
            q_tile, k, v, row_max, row_sum, acc, head_row, first_query, 0, whole, scale, False, EXP2, TMA,
            BLOCK_M, BLOCK_N, D)  # fmt: skip
    end = n
    if SKIP:
        end = first_query + BLOCK_M
    row_max, row_sum, acc = _forward_steps(
        q_tile, k, v, row_max, row_sum, acc, head_row, first_query, whole, end, scale, True, EXP2, TMA,
        BLOCK_M, BLOCK_N, D)  # fmt: skip
    _store(o, head_row + first_query, acc / row_sum[:, None], BLOCK_M, D, TMA)
    lse = (row_max + tl.log2(row_sum)) * LN_2 if EXP2 else row_max + tl.log(row_sum)
    tl.store(logsumexp + head_row + first_query + tl.arange(0, BLOCK_M), lse)


@triton.jit
def forward_kernel(q, k, v, o, logsumexp, batch_heads, n, scale,
                   SKIP: tl.constexpr, SPLIT: tl.constexpr, EXP2: tl.constexpr, HEAVY_FIRST: tl.constexpr,
                   TMA: tl.constexpr, PERSISTENT: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """O and L. Grid: a program for each tile of queries, or with PERSISTENT any number."""
    if PERSISTENT:
        for program in tl.range(tl.program_id(0), n // BLOCK_M * batch_heads, tl.num_programs(0)):
            _forward_tile(program, q, k, v, o, logsumexp, batch_heads, n, scale,
                          SKIP, SPLIT, EXP2, HEAVY_FIRST, TMA, BLOCK_M, BLOCK_N, D)  # fmt: skip
    else:
        _forward_tile(tl.program_id(0), q, k, v, o, logsumexp, batch_heads, n, scale,
                      SKIP, SPLIT, EXP2, HEAVY_FIRST, TMA, BLOCK_M, BLOCK_N, D)  # fmt: skip


# ------------------------------------------------------------------------------------------------ backward
@triton.jit
def delta_kernel(o, do, delta, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """D = rowsum(dO ∘ O). Grid: all rows of all heads / BLOCK_M."""
    first_row = tl.program_id(0) * BLOCK_M
    o_tile = _load(o, first_row, BLOCK_M, D, False).to(tl.float32)
    do_tile = _load(do, first_row, BLOCK_M, D, False).to(tl.float32)
    tl.store(delta + first_row + tl.arange(0, BLOCK_M), tl.sum(o_tile * do_tile, 1))


@triton.jit
def _query_steps(q, do, lse, d_row, dq, k, v, head_row, first_query, first_key, last_key, scale,
                 MASKED: tl.constexpr, EXP2: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """dQ / scale over the tiles of keys in [first_key, last_key)."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for key in tl.range(first_key, last_key, BLOCK_N):
        k_tile = _load(k, head_row + key, BLOCK_N, D, False)
        v_tile = _load(v, head_row + key, BLOCK_N, D, False)
        s = tl.dot(q, tl.trans(k_tile))  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do, tl.trans(v_tile))
        p = _exp(s * scale - lse[:, None], EXP2)
        if MASKED:
            p = tl.where(queries[:, None] >= (key + tl.arange(0, BLOCK_N))[None, :], p, 0.0)
        ds = p * (dp - d_row[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)  # (BLOCK_M, D)
    return dq


@triton.jit
def queries_kernel(q, k, v, o, do, logsumexp, delta, dq, batch_heads, n, scale,
                   SKIP: tl.constexpr, SPLIT: tl.constexpr, EXP2: tl.constexpr, HEAVY_FIRST: tl.constexpr,
                   FUSE_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """dQ, and D with FUSE_D. Grid: a program for each tile of queries."""
    head, tile = _place(tl.program_id(0), n // BLOCK_M, batch_heads, HEAVY_FIRST, True)
    head_row, first_query = head * n, tile * BLOCK_M
    rows = head_row + first_query + tl.arange(0, BLOCK_M)
    q_tile = _load(q, head_row + first_query, BLOCK_M, D, False)
    do_tile = _load(do, head_row + first_query, BLOCK_M, D, False)
    if FUSE_D:
        o_tile = _load(o, head_row + first_query, BLOCK_M, D, False)
        d_row = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
        tl.store(delta + rows, d_row)
    else:
        d_row = tl.load(delta + rows)
    lse = tl.load(logsumexp + rows)
    factor = scale
    if EXP2:
        lse = lse * LOG2_E
        factor = scale * LOG2_E
    dq_tile = tl.zeros((BLOCK_M, D), tl.float32)
    whole = 0
    if SPLIT:
        whole = (first_query + 1) // BLOCK_N * BLOCK_N
        dq_tile = _query_steps(q_tile, do_tile, lse, d_row, dq_tile, k, v, head_row, first_query, 0, whole, factor,
                               False, EXP2, BLOCK_M, BLOCK_N, D)  # fmt: skip
    end = n
    if SKIP:
        end = first_query + BLOCK_M
    dq_tile = _query_steps(q_tile, do_tile, lse, d_row, dq_tile, k, v, head_row, first_query, whole, end, factor,
                           True, EXP2, BLOCK_M, BLOCK_N, D)  # fmt: skip
    _store(dq, head_row + first_query, dq_tile * scale, BLOCK_M, D, False)


@triton.jit
def _key_steps(k, v, dk, dv, q, do, l_head, d_head, dq_sum, head_row, first_key, first_query, last_query, scale,
               MASKED: tl.constexpr, EXP2: tl.constexpr, ONE_PASS: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """dK / scale and dV over the tiles of queries in [first_query, last_query); scores are transposed."""
    keys = first_key + tl.arange(0, BLOCK_N)
    for query in tl.range(first_query, last_query, BLOCK_M):
        rows = query + tl.arange(0, BLOCK_M)
        q_tile = _load(q, head_row + query, BLOCK_M, D, False)
        do_tile = _load(do, head_row + query, BLOCK_M, D, False)
        lse = tl.load(l_head + rows)
        d_row = tl.load(d_head + rows)
        if EXP2:
            lse = lse * LOG2_E
        s = tl.dot(k, tl.trans(q_tile))  # (BLOCK_N, BLOCK_M)
        dp = tl.dot(v, tl.trans(do_tile))
        p = _exp(s * scale - lse[None, :], EXP2)
        if MASKED:
            p = tl.where((query + tl.arange(0, BLOCK_M))[None, :] >= keys[:, None], p, 0.0)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv)  # (BLOCK_N, D)
        ds = (p * (dp - d_row[None, :])).to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk)  # (BLOCK_N, D)
        if ONE_PASS:  # programs of other keys add to the same rows, in any order
            part = tl.dot(tl.trans(ds), k)  # (BLOCK_M, D)
            tl.atomic_add(
                dq_sum + (head_row + rows)[:, None] * D + tl.arange(0, D)[None, :], part, sem="relaxed"
            )
    return dk, dv


@triton.jit
def keys_kernel(q, k, v, do, logsumexp, delta, dk, dv, dq_sum, batch_heads, n, scale,
                SKIP: tl.constexpr, SPLIT: tl.constexpr, EXP2: tl.constexpr, HEAVY_FIRST: tl.constexpr,
                ONE_PASS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """dK and dV; with ONE_PASS also dQ / scale, added to `dq_sum` (fp32, zeroed before). Grid: a program for each
    tile of keys. The first keys are the heaviest, since the most queries see them."""
    head, tile = _place(tl.program_id(0), n // BLOCK_N, batch_heads, HEAVY_FIRST, False)
    head_row, first_key = head * n, tile * BLOCK_N
    k_tile = _load(k, head_row + first_key, BLOCK_N, D, False)
    v_tile = _load(v, head_row + first_key, BLOCK_N, D, False)
    dk_tile = tl.zeros((BLOCK_N, D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, D), tl.float32)
    factor = scale
    if EXP2:
        factor = scale * LOG2_E
    l_head, d_head = logsumexp + head_row, delta + head_row
    begin = 0
    if SKIP:
        begin = first_key // BLOCK_M * BLOCK_M
    diagonal_end = n
    if SPLIT:
        diagonal_end = tl.minimum(tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M, n)
    dk_tile, dv_tile = _key_steps(k_tile, v_tile, dk_tile, dv_tile, q, do, l_head, d_head, dq_sum, head_row, first_key,
                                  begin, diagonal_end, factor, True, EXP2, ONE_PASS, BLOCK_M, BLOCK_N, D)  # fmt: skip
    if SPLIT:
        dk_tile, dv_tile = _key_steps(k_tile, v_tile, dk_tile, dv_tile, q, do, l_head, d_head, dq_sum, head_row,
                                      first_key, diagonal_end, n, factor, False, EXP2, ONE_PASS, BLOCK_M, BLOCK_N,
                                      D)  # fmt: skip
    _store(dk, head_row + first_key, dk_tile * scale, BLOCK_N, D, False)
    _store(dv, head_row + first_key, dv_tile, BLOCK_N, D, False)


@triton.jit
def scale_kernel(dq_sum, dq, scale, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """dQ from the sums of a single pass. Grid: all rows of all heads / BLOCK_M."""
    first_row = tl.program_id(0) * BLOCK_M
    _store(dq, first_row, _load(dq_sum, first_row, BLOCK_M, D, False) * scale, BLOCK_M, D, False)
