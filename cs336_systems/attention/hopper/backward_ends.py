"""What runs before and after the backward kernel: its statistics, dQ from its sum, and of grouped queries dK and dV
from those of each head. In Triton's own language. They are kernels of their own since every program of the backward
kernel needs the statistics, and a sum is complete, to be rounded to 16 bits, when all its programs have ended.

The first two go from the last head to the first, and the backward kernel from the first to the last, so that each
begins with what the one before has just written, which the L2 cache still holds. By programmatic dependent launch the
second and the third begin where programs of the one before have ended, and wait for its last ones before they read
anything.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.attention.triton.kernels import LOG2_E


@triton.jit(do_not_specialize=["num_queries", "padded_queries"])
def prepare_kernel(o_ptr, do_ptr, l_ptr, stats_ptr, sum_ptr, tile_ptr, counters_ptr,
                   stride_o_batch, stride_o_head, stride_o_row,
                   stride_do_batch, stride_do_head, stride_do_row, stride_do_col,
                   heads, num_queries, padded_queries, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                   D: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
                   ZEROED: tl.constexpr):  # fmt: skip
    """What the backward kernel starts from: −L · log2(e) and −delta of each query (−∞ and 0 past the last one), and, if
    ZEROED, the sum of dQ, 0.

    stats (batch_heads, 2, padded_queries), sum (batch_heads, padded_queries, D) in any order, both fp32. Of the numbers
    of 64 rows only the first 64 · WIDTH are zeroed: the backward kernel adds to no others. TILE_ROWS > 0:
    dO of a head is one scalar, expanded with strides of 0, which TMA cannot read: a tile of it is written to tile
    (batch_heads, TILE_ROWS, D). counters (1 + batch_heads,), int32, are zeroed.
    Grid: (padded_queries / ROWS · batch_heads,).
    """
    gdc_launch_dependents()
    tiles = tl.cdiv(padded_queries, ROWS)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program % tiles
    rows = tile * ROWS + tl.arange(0, ROWS)
    index = tl.cast(program // tiles, tl.int64)
    columns = tl.arange(0, D)
    inside = (rows < num_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    batch, head = index // heads, index % heads
    far = tl.cast(rows, tl.int64)[:, None]
    o = tl.load(o_ptr + batch * stride_o_batch + head * stride_o_head + far * stride_o_row + columns[None, :],
                mask=inside, other=0.0)  # fmt: skip
    do_at = (
        do_ptr
        + batch * stride_do_batch
        + head * stride_do_head
        + far * stride_do_row
        + columns[None, :] * stride_do_col
    )
    do = tl.load(do_at, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    logsumexp = tl.load(l_ptr + index * num_queries + rows, mask=rows < num_queries, other=float("inf"))
    stats = stats_ptr + index * 2 * padded_queries + rows
    tl.store(stats, logsumexp * -LOG2_E, mask=rows < padded_queries)
    tl.store(stats + padded_queries, -delta, mask=rows < padded_queries)
    if tile == 0:
        tl.store(counters_ptr + 1 + index, 0)
        if index == 0:
            tl.store(counters_ptr, 0)
    if ZEROED:
        sum_at = sum_ptr + (index * padded_queries + far) * D + columns[None, :]
        zeroed = (rows < padded_queries)[:, None] & (columns < D)[None, :]
        if WIDTH < D:
            zeroed = zeroed & (tl.arange(0, ROWS) * D < ROWS * WIDTH)[:, None]
        tl.store(sum_at, tl.zeros((ROWS, D), tl.float32), mask=zeroed)
    if TILE_ROWS:  # noqa: SIM102 (known at compile time, the next one is not)
        if tile == 0:
            value = tl.load(do_ptr + batch * stride_do_batch + head * stride_do_head)
            tile_rows = tl.arange(0, TILE_ROWS)
            spread = tl.where((columns < HEAD_DIM)[None, :], value, 0.0).to(tile_ptr.dtype.element_ty)
            tile_at = tile_ptr + (index * TILE_ROWS + tile_rows[:, None]) * D + columns[None, :]
            tl.store(tile_at, tl.broadcast_to(spread, (TILE_ROWS, D)))


@triton.jit(do_not_specialize=["num_queries", "padded_queries"])
def finish_kernel(sum_ptr, dq_ptr,
                  stride_dq_batch, stride_dq_head, stride_dq_row,
                  heads, num_queries, padded_queries, scale, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                  D: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """dQ = scale times its fp32 sum, in q's dtype and layout.

    The sum (batch_heads, padded_queries / 64, D / 64, 4096) is of tiles of 64 x 64 in the order of
    `backward_dq.store_dq`, of dQ or (TRANSPOSED, D = 64) of dQᵀ. Of 64 rows' numbers
    only the first 64 · WIDTH were written, and are read. Grid: (⌈num_queries / 64⌉ · batch_heads,).
    """
    gdc_wait()
    tiles = tl.cdiv(num_queries, 64)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program % tiles
    rows = tile * 64 + tl.arange(0, 64)
    index = tl.cast(program // tiles, tl.int64)
    columns = tl.arange(0, D)
    inside = (rows < num_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    far = tl.cast(rows, tl.int64)[:, None]
    numbers = tl.arange(0, 64 * D)
    sum_at = sum_ptr + (index * padded_queries + tile * 64) * D + numbers
    dq = tl.load(sum_at, mask=numbers < 64 * WIDTH, other=0.0) if WIDTH < D else tl.load(sum_at)
    # half of D, part, warp, thread of 8, thread of 4, half, one of two
    dq = dq.reshape(D // 64, 8, 4, 8, 4, 2, 2)
    dq = dq.permute(1, 4, 6, 0, 2, 5, 3) if TRANSPOSED else dq.permute(2, 5, 3, 0, 1, 4, 6)
    dq = dq.reshape(64, D) * scale
    dq_at = (
        dq_ptr
        + index // heads * stride_dq_batch
        + index % heads * stride_dq_head
        + far * stride_dq_row
        + columns[None, :]
    )
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_keys"])
def sum_kernel(dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr,
               stride_dk_batch, stride_dk_head, stride_dk_row,
               stride_dv_batch, stride_dv_head, stride_dv_row,
               heads, num_keys, HEAD_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
               HEADS_PER_KV: tl.constexpr):  # fmt: skip
    """dK and dV of a head of keys, from those that its heads of queries have made: (batch, heads · HEADS_PER_KV,
    num_keys, HEAD_DIM), contiguous. Grid: (⌈num_keys / ROWS⌉ · batch · heads, 2)."""
    tiles = tl.cdiv(num_keys, ROWS)
    index = tl.cast(tl.program_id(0) // tiles, tl.int64)
    rows = tl.cast(tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS), tl.int64)[:, None]
    columns = tl.arange(0, D)[None, :]
    inside = (rows < num_keys) & (columns < HEAD_DIM)
    batch, head = index // heads, index % heads
    if tl.program_id(1) == 0:
        parts_ptr = dk_parts_ptr
        out_at = dk_ptr + batch * stride_dk_batch + head * stride_dk_head + rows * stride_dk_row + columns
    else:
        parts_ptr = dv_parts_ptr
        out_at = dv_ptr + batch * stride_dv_batch + head * stride_dv_head + rows * stride_dv_row + columns
    total = tl.zeros((ROWS, D), tl.float32)
    for part in range(HEADS_PER_KV):
        at = ((index * HEADS_PER_KV + part) * num_keys + rows) * HEAD_DIM + columns
        total += tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(dk_ptr.dtype.element_ty), mask=inside)
