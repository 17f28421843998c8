"""Backward: 128 keys a program, two groups of 64, queries from the diagonal on. Scores are keys by queries:

    Sᵀ = K Qᵀ                       dPᵀ = V dOᵀ
    Pᵀ = exp2(c Sᵀ − L · log2(e))   dSᵀ = Pᵀ ∘ (dPᵀ − D)     c = scale · log2(e)
    dV += Pᵀ dO                     dK += dSᵀ Q              Pᵀ and dSᵀ come from registers
    dQ += dS K        dSᵀ of both groups comes from shared memory; TMA adds to fp32 in memory

All five products are made once, against seven in the two passes of `attention.triton_kernels`; in exchange programs
add to dQ in any order, so that its last bits differ from run to run. A small kernel before this one makes the
statistics and zeroes the fp32 sum, one after it turns the sum into dQ; both are in Triton's own language.
"""

# ruff: noqa: RUF059 (tuples of tiles and barriers are unpacked as they were packed, whole)

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper.common import WG, exp2, place, rounded, widened
from cs336_systems.attention.triton_kernels import LOG2_E

# a tile of dQ, 64 x 64 numbers in fp32 in the order of `_store_dq`, as TMA sees it: in shared memory and in its sum
DQ_ROWS, DQ_COLUMNS = gl.constexpr(16), gl.constexpr(256)


@builtin
def _add_to_global(descriptor, coordinates, source, _semantic=None):
    """TMA adds a tile of shared memory to one in global memory. Gluon 3.6 has no word for what its compiler can do."""
    from triton._C.libtriton import ir

    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def _backward_producer(q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads, section,
                       key_tiles, query_tiles, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
                       STAGES: gl.constexpr, DO_STEP: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    tile, head = place(gl.program_id(0), key_tiles, batch_heads, section)
    b, h = head // heads, head % heads
    first_key = tile * 2 * WG
    mbarrier.expect(kv_full.index(0), 2 * 2 * WG * D * 2)
    tma.async_copy_global_to_shared(k_desc, [b, h, first_key, 0], kv_full.index(0), k_smem.index(0))
    for g in gl.static_range(2):
        tma.async_copy_global_to_shared(
            v_desc, [b, h, first_key + g * WG, 0], kv_full.index(0), v_smem.index(g)
        )
    first = 0
    if IS_CAUSAL:
        first = first_key // BLOCK_M
    last = query_tiles
    if AHEAD:  # the groups begin the scores of one tile more, of zeros, also where no query sees these keys
        last = gl.maximum(first, query_tiles) + 1
    for i in range(first, last):
        t = i - first
        slot = t % STAGES
        parity = ((t // STAGES) & 1) ^ 1
        mbarrier.wait(q_empty.index(slot), parity)
        mbarrier.expect(q_full.index(slot), BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
        tma.async_copy_global_to_shared(
            q_desc, [b, h, i * BLOCK_M, 0], q_full.index(slot), q_smem.index(slot)
        )
        for which in gl.static_range(2):
            tma.async_copy_global_to_shared(stats_desc, [2 * head + which, i * BLOCK_M], q_full.index(slot),
                                            stats_smem.index(2 * slot + which))  # fmt: skip
        if i < query_tiles:
            mbarrier.wait(do_empty.index(slot), parity)
            mbarrier.expect(do_full.index(slot), BLOCK_M * D * 2)
            tma.async_copy_global_to_shared(do_desc, [b, h, i * BLOCK_M * DO_STEP, 0], do_full.index(slot),
                                            do_smem.index(slot))  # fmt: skip


@gluon.jit
def _backward_scores(tiles, barriers, k, t, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Begins Sᵀ = K Qᵀ of tile t of the queries."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    slot = t % STAGES
    mbarrier.wait(q_full.index(slot), (t // STAGES) & 1)
    empty = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    q = q_smem.index(slot).reshape([BLOCK_M, D])
    return warpgroup_mma(k, q.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def _backward_weights(s, tiles, first_key, i, t, num_keys, c, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr,
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
def _store_dq(dq, tile):
    """A tile of 64 x 64 in the order in which threads hold it: 16 bytes each, side by side, so that a store takes no
    more of shared memory's time than its bytes do. `finish_kernel` puts dQ in order."""
    # rows: warp, half, thread of 8; columns: part, thread of 4, one of two
    parts = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    tile.store(parts.reshape([1, DQ_ROWS, DQ_COLUMNS]))


@gluon.jit
def _backward_step(dq_desc, tiles, barriers, k, v, head, first_key, i, t, num_keys, c, p, dk, dv,
                   MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr,
                   D: gl.constexpr, STAGES: gl.constexpr, DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """A tile of queries for a group's 64 keys. With AHEAD, p has been made already, and that of the next tile is made
    here: while dK's product runs, the next exponentials do."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    DTYPE: gl.constexpr = q_smem.dtype
    slot = t % STAGES
    parity = (t // STAGES) & 1
    q = q_smem.index(slot).reshape([BLOCK_M, D])
    do = do_smem.index(slot).reshape([BLOCK_M, D])

    if not AHEAD:
        s = _backward_scores(tiles, barriers, k, t, BLOCK_M, D, STAGES)
    dp = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    mbarrier.wait(do_full.index(slot), parity)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
        p = _backward_weights(s, tiles, first_key, i, t, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M, STAGES)
    p16 = rounded(p, DTYPE)
    dv = warpgroup_mma(gl.convert_layout(p16, operand, assert_trivial=True), do, dv, is_async=True)
    minus_d = stats_smem.index(2 * slot + 1).reshape([BLOCK_M]).load(gl.SliceLayout(0, s_layout))
    if AHEAD:
        s = _backward_scores(tiles, barriers, k, t + 1, BLOCK_M, D, STAGES)
        dp = warpgroup_mma_wait(2, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    # from the rounded P, so that the exact one need not be kept
    ds = rounded(widened(p16) * (dp + minus_d[None, :]), DTYPE)

    ds_slot = t & 1
    ds_tile = ds_smem.index(ds_slot)
    if DQ_GROUP:
        mbarrier.wait(ds_empty.index(ds_slot), ((t // 2) & 1) ^ 1)
    ds_tile.slice(G * WG, WG).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(ds_slot), count=1)
    if AHEAD:
        dk = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk, is_async=True)
        dv, s = warpgroup_mma_wait(1, deps=(dv, s))
        mbarrier.arrive(do_empty.index(slot), count=1)
        p = _backward_weights(
            s, tiles, first_key, i + 1, t + 1, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M, STAGES
        )
        mbarrier.wait(do_full.index(slot), parity)  # fulfilled; keeps the next wait behind the exponentials
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    elif DQ_GROUP:
        dk = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        mbarrier.arrive(do_empty.index(slot), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    else:  # each group makes half of dQ: of its rows, or of its columns
        half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        mbarrier.wait(ds_full.index(ds_slot), (t // 2) & 1)
        k_all = k_smem.index(0).reshape([2 * WG, D])
        empty = gl.zeros([WG, 64], gl.float32, half_layout)
        if D == 64:
            ds_half = ds_tile.slice(G * WG, WG, 1).permute((1, 0))
            dq = warpgroup_mma(ds_half, k_all, empty, use_acc=False, is_async=True)
        else:
            k_half = k_all.slice(G * 64, 64, 1)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_half, empty, use_acc=False, is_async=True)
        # this product runs while dQ is stored
        dk = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        tma.store_wait(0)
        mbarrier.arrive(do_empty.index(slot), count=1)
        _store_dq(dq, dq_smem.index(G))
        fence_async_shared()
        _add_to_global(dq_desc, [head, (2 * i + G) * DQ_ROWS, 0], dq_smem.index(G))
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    return p, dk, dv


@gluon.jit
def _backward_group(dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles,
                    num_keys, c, scale, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr,
                    D: gl.constexpr, STAGES: gl.constexpr, DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr,
                    K_REGISTERS: gl.constexpr):  # fmt: skip
    """dK and dV of 64 keys."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    tile, head = place(gl.program_id(0), key_tiles, batch_heads, section)
    first_key = tile * 2 * WG
    dk = gl.zeros([WG, D], gl.float32, d_layout)
    dv = gl.zeros([WG, D], gl.float32, d_layout)
    mbarrier.wait(kv_full.index(0), 0)
    k = k_smem.index(0).reshape([2 * WG, D]).slice(G * WG, WG)
    v = v_smem.index(G).reshape([WG, D])
    if K_REGISTERS:  # shared memory has enough to do
        k = k.load(gl.DotOperandLayout(0, s_layout, 2))
    first = 0
    masked = 0
    if IS_CAUSAL:
        first = first_key // BLOCK_M
        masked = gl.minimum(
            first + (2 * WG + BLOCK_M - 1) // BLOCK_M, query_tiles
        )  # until here they meet the diagonal
    if first_key + 2 * WG > num_keys:  # P of a key that is not there, exp(−L), may be infinite
        masked = query_tiles
    p = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    if AHEAD:
        s = _backward_scores(tiles, barriers, k, 0, BLOCK_M, D, STAGES)
        s = warpgroup_mma_wait(0, deps=(s,))
        p = _backward_weights(s, tiles, first_key, first, 0, num_keys, c, True, IS_CAUSAL, G, BLOCK_M, STAGES)
    # ahead, the last of these makes the first P that needs no mask, and is unharmed by it
    for i in range(first, masked):
        p, dk, dv = _backward_step(dq_desc, tiles, barriers, k, v, head, first_key, i, i - first, num_keys, c, p,
                                   dk, dv, True, IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD)  # fmt: skip
    for i in range(masked, query_tiles):
        p, dk, dv = _backward_step(dq_desc, tiles, barriers, k, v, head, first_key, i, i - first, num_keys, c, p,
                                   dk, dv, False, IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD)  # fmt: skip
    # no product needs this group's rows of V any more: the results leave through them
    at = [head // heads, head % heads, first_key + G * WG, 0]
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_desc, at, v_smem.index(G))
    dk16 = (dk * scale).to(v.dtype)
    tma.store_wait(0)
    v.store(dk16)
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, at, v_smem.index(G))
    tma.store_wait(0)


@gluon.jit
def _backward_dq_group(dq_desc, tiles, barriers, batch_heads, section, key_tiles, query_tiles, IS_CAUSAL: gl.constexpr,
                       BLOCK_M: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Adds dQᵀ = Kᵀ dSᵀ of each tile of queries to dQ, while the other groups go on. Kᵀ stays in registers."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    tile, head = place(gl.program_id(0), key_tiles, batch_heads, section)
    first = 0
    if IS_CAUSAL:
        first = tile * 2 * WG // BLOCK_M
    empty = gl.zeros([D, BLOCK_M], gl.float32, layout)
    mbarrier.wait(kv_full.index(0), 0)
    k = k_smem.index(0).reshape([2 * WG, D]).permute((1, 0)).load(operand)
    for i in range(first, query_tiles):
        t = i - first
        slot = t & 1
        mbarrier.wait(ds_full.index(slot), (t // 2) & 1)
        dq = warpgroup_mma(k, ds_smem.index(slot), empty, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(ds_empty.index(slot), count=1)
        tma.store_wait(1)  # the addition before the last one has read its tile
        _store_dq(dq, dq_smem.index(slot))
        fence_async_shared()
        _add_to_global(dq_desc, [head, i * DQ_ROWS, 0], dq_smem.index(slot))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "key_tiles", "query_tiles", "num_keys"])
def backward_keys_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, stats_desc, heads, batch_heads,
                         section, key_tiles, query_tiles, num_keys, c, scale, IS_CAUSAL: gl.constexpr,
                         BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DO_STEP: gl.constexpr,
                         DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr, K_REGISTERS: gl.constexpr,
                         num_warps: gl.constexpr):  # fmt: skip
    """dK and dV of 128 keys of one head, and their part of dQ. Grid: (key_tiles · batch_heads,)."""
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, 2 * WG, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, WG, D], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [2, 2 * WG, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, DQ_ROWS, DQ_COLUMNS], dq_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BLOCK_M], stats_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)
    fence_async_shared()
    tiles = (q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty)
    if DQ_GROUP:
        gl.warp_specialize([
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 0, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS)),
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 1, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS)),
            (_backward_dq_group, (dq_desc, tiles, barriers, batch_heads, section, key_tiles, query_tiles, IS_CAUSAL,
                                  BLOCK_M, D)),
            (_backward_producer, (q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads,
                                  section, key_tiles, query_tiles, IS_CAUSAL, BLOCK_M, D, STAGES, DO_STEP, AHEAD)),
        ], [4, 4, 1], [192, 104, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 0, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS)),
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 1, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS)),
            (_backward_producer, (q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads,
                                  section, key_tiles, query_tiles, IS_CAUSAL, BLOCK_M, D, STAGES, DO_STEP, AHEAD)),
        ], [4, 1], [240, 24])  # fmt: skip


# ------------------------------------------------------------------------------------------------ around backward
@triton.jit(do_not_specialize=["num_queries", "padded_queries"])
def prepare_kernel(o_ptr, do_ptr, l_ptr, stats_ptr, dq_ptr, tile_ptr, o_batch, o_head, o_row, do_batch, do_head, do_row,
                   do_col, heads, num_queries, padded_queries, HEAD_DIM: tl.constexpr, D: tl.constexpr,
                   ROWS: tl.constexpr, TILE_ROWS: tl.constexpr):  # fmt: skip
    """What the backward kernel starts from: −L · log2(e) and −D of each query (−∞ and 0 past the last one), dQ = 0.

    stats (batch_heads, 2, padded_queries), dq (batch_heads, padded_queries, D) in any order, both fp32. TILE_ROWS > 0:
    dO of a head is one number, with strides of 0, which TMA cannot read: a tile of it is written to tile
    (batch_heads, TILE_ROWS, D). Grid: (padded_queries / ROWS · batch_heads,).
    """
    tiles = tl.cdiv(padded_queries, ROWS)
    tile = tl.program_id(0) % tiles
    rows = tile * ROWS + tl.arange(0, ROWS)
    index = tl.cast(tl.program_id(0) // tiles, tl.int64)
    columns = tl.arange(0, D)
    inside = (rows < num_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    batch, head = index // heads, index % heads
    far = tl.cast(rows, tl.int64)[:, None]
    o = tl.load(
        o_ptr + batch * o_batch + head * o_head + far * o_row + columns[None, :], mask=inside, other=0.0
    )
    do_at = do_ptr + batch * do_batch + head * do_head + far * do_row + columns[None, :] * do_col
    do = tl.load(do_at, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    logsumexp = tl.load(l_ptr + index * num_queries + rows, mask=rows < num_queries, other=float("inf"))
    stats = stats_ptr + index * 2 * padded_queries + rows
    tl.store(stats, logsumexp * -LOG2_E, mask=rows < padded_queries)
    tl.store(stats + padded_queries, -delta, mask=rows < padded_queries)
    dq_at = dq_ptr + (index * padded_queries + far) * D + columns[None, :]
    tl.store(
        dq_at, tl.zeros((ROWS, D), tl.float32), mask=(rows < padded_queries)[:, None] & (columns < D)[None, :]
    )
    if TILE_ROWS:  # noqa: SIM102 (known when compiling, the next one not)
        if tile == 0:
            value = tl.load(do_ptr + batch * do_batch + head * do_head)
            tile_rows = tl.arange(0, TILE_ROWS)
            spread = tl.where((columns < HEAD_DIM)[None, :], value, 0.0).to(tile_ptr.dtype.element_ty)
            tile_at = tile_ptr + (index * TILE_ROWS + tile_rows[:, None]) * D + columns[None, :]
            tl.store(tile_at, tl.broadcast_to(spread, (TILE_ROWS, D)))


@triton.jit(do_not_specialize=["num_queries", "padded_queries"])
def finish_kernel(sum_ptr, dq_ptr, dq_batch, dq_head, dq_row, heads, num_queries, padded_queries, scale,
                  HEAD_DIM: tl.constexpr, D: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """dQ = scale times its fp32 sum, in q's dtype and layout.

    The sum (batch_heads, padded_queries / 64, D / 64, 4096) is of tiles of 64 x 64 in the order of `_store_dq`, of dQ
    or (TRANSPOSED, D = 64) of dQᵀ. Grid: (⌈num_queries / 64⌉ · batch_heads,).
    """
    tiles = tl.cdiv(num_queries, 64)
    tile = tl.program_id(0) % tiles
    rows = tile * 64 + tl.arange(0, 64)
    index = tl.cast(tl.program_id(0) // tiles, tl.int64)
    columns = tl.arange(0, D)
    inside = (rows < num_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    far = tl.cast(rows, tl.int64)[:, None]
    dq = tl.load(sum_ptr + (index * padded_queries + tile * 64) * D + tl.arange(0, 64 * D))
    # half of D, part, warp, thread of 8, thread of 4, half, one of two
    dq = dq.reshape(D // 64, 8, 4, 8, 4, 2, 2)
    dq = dq.permute(1, 4, 6, 0, 2, 5, 3) if TRANSPOSED else dq.permute(2, 5, 3, 0, 1, 4, 6)
    dq = dq.reshape(64, D) * scale
    dq_at = dq_ptr + index // heads * dq_batch + index % heads * dq_head + far * dq_row + columns[None, :]
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=inside)
