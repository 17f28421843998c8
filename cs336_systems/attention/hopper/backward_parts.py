"""The parts of the backward kernels: loading queries, scores, weights, adding to dQ, and what comes next.

`tiles` are their tiles in shared memory, `barriers` those that say which are full and which are free again.
"""

# ruff: noqa: RUF059 (tuples of tiles and barriers are unpacked as they were packed, whole)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from cs336_systems.attention.hopper.common import (
    WG,
    async_atomic_add,
    async_load,
    exp2,
    mma_over_columns,
)

# a tile of dQ, 64 x 64 numbers in fp32 in the order of `store_dq`, as TMA sees it: in shared memory and in its sum
DQ_ROWS, DQ_COLUMNS = gl.constexpr(16), gl.constexpr(256)


@gluon.jit
def load_queries(q_desc, do_desc, stats_desc, tiles, barriers, b, h, head, i, t, BLOCK_M: gl.constexpr,
                 D: gl.constexpr, STAGES: gl.constexpr, DO_STEP: gl.constexpr):  # fmt: skip
    """Loads tile i of the queries, the t-th of this program: Q with the statistics, and dO."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    slot = t % STAGES
    parity = ((t // STAGES) & 1) ^ 1
    mbarrier.wait(q_empty.index(slot), parity)
    mbarrier.expect(q_full.index(slot), BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
    async_load(q_desc, [b, h, i * BLOCK_M, 0], q_full.index(slot), q_smem.index(slot))
    for which in gl.static_range(2):
        at = [2 * head + which, i * BLOCK_M]
        async_load(stats_desc, at, q_full.index(slot), stats_smem.index(2 * slot + which))
    mbarrier.wait(do_empty.index(slot), parity)
    mbarrier.expect(do_full.index(slot), BLOCK_M * D * 2)
    async_load(do_desc, [b, h, i * BLOCK_M * DO_STEP, 0], do_full.index(slot), do_smem.index(slot))


@gluon.jit
def scores(tiles, barriers, k, t, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REST: gl.constexpr,
           awaited=True):  # fmt: skip
    """Issues Sᵀ = K Qᵀ of tile t of the queries; of whatever lies there if it is not awaited."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    slot = t % STAGES
    mbarrier.wait(q_full.index(slot), (t // STAGES) & 1, pred=awaited)
    empty = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    q = q_smem.index(slot).reshape([BLOCK_M, D])
    return mma_over_columns(k, q, empty, REST)


@gluon.jit
def weights(s, tiles, first_key, i, t, num_keys, c, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr,
            G: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Pᵀ of tile i of the queries, the t-th of this program."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    of_query: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    minus_l = stats_smem.index(2 * (t % STAGES)).reshape([BLOCK_M]).load(of_query)
    p = exp2(s * c + minus_l[None, :])
    if MASKED:
        keys = first_key + G * WG + gl.arange(0, WG, gl.SliceLayout(1, s.type.layout))
        seen = (keys < num_keys)[:, None]
        if IS_CAUSAL:
            queries = i * BLOCK_M + gl.arange(0, BLOCK_M, of_query)
            seen = seen & (queries[None, :] >= keys[:, None])
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def store_dq(dq, tile):
    """A tile of 64 rows in the order in which threads hold it: 16 bytes each, side by side, so that a store has no
    bank conflicts. `finish_kernel` puts dQ in order. 32 or 16 columns take the first of its rows."""
    WIDTH: gl.constexpr = dq.shape[1]
    # rows: warp, half, thread of 8; columns: part, thread of 4, one of two
    parts = dq.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    tile.slice(0, WIDTH // 4, 1).store(parts.reshape([1, WIDTH // 4, DQ_COLUMNS]))


@gluon.jit
def add_rows(dq_desc, tile, head, row, WIDTH: gl.constexpr):
    """Adds a tile of WIDTH columns, in that order, to a head's sum, from `row` on."""
    ROWS: gl.constexpr = dq_desc.block_type.shape[1]
    for r in gl.static_range(0, WIDTH // 4, ROWS):
        async_atomic_add(dq_desc, [head, row + r, 0], tile.slice(r, ROWS, 1))


@gluon.jit
def add_tile(dq_desc, dq, tile, head, index):
    """Adds a tile of dQ, the head's index-th of 64 by 64 numbers, to what other programs have added, by way of `tile`
    in shared memory."""
    store_dq(dq, tile)
    fence_async_shared()
    add_rows(dq_desc, tile, head, index * DQ_ROWS, dq.shape[1])


@gluon.jit
def first_of(tile, query_tiles, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr):
    """The first tile of queries that sees a key of this tile of 128; `query_tiles` if none does."""
    first = 0
    if IS_CAUSAL:
        first = gl.minimum(tile * 2 * WG // BLOCK_M, query_tiles)
    return first


@gluon.jit
def nth_of(first, query_tiles, n, D: gl.constexpr):
    """The n-th tile of queries for a tile of keys: from the first one on, or, at D = 128, from the last one to it. With
    first = 0 it is its own inverse."""
    if D == 64:
        return first + n
    else:
        return query_tiles - 1 - n


@gluon.jit
def drawn(work, turn, WARPS: gl.constexpr):
    """Waits for K of this program's turn-th tile of keys and returns the tile's number among those of all heads; when
    none is left, a number past the last."""
    drawn_smem, k_full, k_empty, v_full, v_empty = work
    BUFFERS: gl.constexpr = drawn_smem.shape[0]
    slot = turn % BUFFERS
    mbarrier.wait(k_full.index(slot), (turn // BUFFERS) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(drawn_smem.index(slot).load(layout), 0)
