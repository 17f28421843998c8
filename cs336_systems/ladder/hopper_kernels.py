"""Backward for Hopper GPUs at D = 64 with a program for each tile of keys, in the configurations that came before the
kernel in use, `attention.hopper.backward`, which has the formulas. Two groups of 64 keys share the work for dQ or leave
it to a third.
"""

# ruff: noqa: RUF059 (tuples of tiles and barriers are unpacked as they were packed, whole)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper.backward_dq import DQ_COLUMNS, DQ_ROWS, add_tile
from cs336_systems.attention.hopper.backward_state import QueryRing, probabilities
from cs336_systems.attention.hopper.common import WG, async_load, async_store, locate, rounded, widened


@gluon.jit
def _load_queries(q_desc, do_desc, stats_desc, tiles, barriers, b, h, head, i, t, BLOCK_M: gl.constexpr,
                  D: gl.constexpr, STAGES: gl.constexpr, with_do):  # fmt: skip
    """Loads tile i of the queries, the t-th of this program: Q with the statistics, and dO if asked to."""
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
    if with_do:
        mbarrier.wait(do_empty.index(slot), parity)
        mbarrier.expect(do_full.index(slot), BLOCK_M * D * 2)
        async_load(do_desc, [b, h, i * BLOCK_M, 0], do_full.index(slot), do_smem.index(slot))


@gluon.jit
def _producer(q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
              query_tiles, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              AHEAD: gl.constexpr):  # fmt: skip
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    tile, head = locate(gl.program_id(0), key_tiles, batch_heads, section)
    b, h = head // heads, head % heads
    first_key = tile * 2 * WG
    mbarrier.expect(kv_full.index(0), 2 * 2 * WG * D * 2)
    async_load(k_desc, [b, h, first_key, 0], kv_full.index(0), k_smem.index(0))
    for g in gl.static_range(2):
        async_load(v_desc, [b, h, first_key + g * WG, 0], kv_full.index(0), v_smem.index(g))
    first = 0
    if IS_CAUSAL:
        first = first_key // BLOCK_M
    last = query_tiles
    if AHEAD:  # the groups issue the scores of one tile more, of zeros, also where no query sees these keys
        last = gl.maximum(first, query_tiles) + 1
    for i in range(first, last):
        _load_queries(q_desc, do_desc, stats_desc, tiles, barriers, b, h, head, i, i - first, BLOCK_M, D, STAGES,
                      i < query_tiles)  # fmt: skip


@gluon.jit
def _step(dq_desc, tiles, barriers, k, v, head, first_key, i, t, num_keys, c, p, dk, dv, MASKED: gl.constexpr,
          IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
          DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """Tile i of the queries, the t-th of this program. With AHEAD, p has been computed already, and that of the next
    tile is computed here: its exponentials overlap dK's matmul. After the last one the producer loads one tile more."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    queries = QueryRing(
        q_smem, do_smem, stats_smem, q_full, q_empty, do_full, do_empty, BLOCK_M, D, STAGES, 0
    )
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    DTYPE: gl.constexpr = q_smem.dtype
    slot = t % STAGES
    parity = (t // STAGES) & 1
    q = q_smem.index(slot).reshape([BLOCK_M, D])
    do = do_smem.index(slot).reshape([BLOCK_M, D])

    if not AHEAD:
        s = queries.scores(k, t)
    dp = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    mbarrier.wait(do_full.index(slot), parity)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
        minus_l = queries.statistic(0, t, s_layout)
        p = probabilities(s, minus_l, first_key, i, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M)
    p16 = rounded(p, DTYPE)
    dv = warpgroup_mma(gl.convert_layout(p16, operand, assert_trivial=True), do, dv, is_async=True)
    minus_d = queries.statistic(1, t, s_layout)
    if AHEAD:
        s = queries.scores(k, t + 1)
        dp = warpgroup_mma_wait(2, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    # from the rounded P, so that the fp32 one need not stay in registers
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
        minus_l = queries.statistic(0, t + 1, s_layout)
        p = probabilities(s, minus_l, first_key, i + 1, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M)
        mbarrier.wait(do_full.index(slot), parity)  # complete; keeps the next wait behind the exponentials
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    elif DQ_GROUP:
        dk = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        mbarrier.arrive(do_empty.index(slot), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    else:  # each group computes half of dQ: of its rows
        half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        mbarrier.wait(ds_full.index(ds_slot), (t // 2) & 1)
        k_all = k_smem.index(0).reshape([2 * WG, D])
        ds_half = ds_tile.slice(G * WG, WG, 1).permute((1, 0))
        empty = gl.zeros([WG, D], gl.float32, half_layout)
        dq = warpgroup_mma(ds_half, k_all, empty, use_acc=False, is_async=True)
        # this matmul runs while dQ is stored
        dk = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        mbarrier.arrive(do_empty.index(slot), count=1)
        tma.store_wait(0)  # the addition before has read its tile
        add_tile(dq_desc, dq, dq_smem.index(G), head, 2 * i + G)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    return p, dk, dv


@gluon.jit
def _group(dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles, num_keys, c,
           scale, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
           STAGES: gl.constexpr, DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr, K_REGISTERS: gl.constexpr):  # fmt: skip
    """dK and dV of 64 keys."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    queries = QueryRing(
        q_smem, do_smem, stats_smem, q_full, q_empty, do_full, do_empty, BLOCK_M, D, STAGES, 0
    )
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    tile, head = locate(gl.program_id(0), key_tiles, batch_heads, section)
    first_key = tile * 2 * WG
    dk = gl.zeros([WG, D], gl.float32, d_layout)
    dv = gl.zeros([WG, D], gl.float32, d_layout)
    mbarrier.wait(kv_full.index(0), 0)
    k = k_smem.index(0).reshape([2 * WG, D]).slice(G * WG, WG)
    v = v_smem.index(G).reshape([WG, D])
    if K_REGISTERS:  # shared memory is busy enough
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
        s = queries.scores(k, 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        minus_l = queries.statistic(0, 0, s_layout)
        p = probabilities(s, minus_l, first_key, first, num_keys, c, True, IS_CAUSAL, G, BLOCK_M)
    # ahead, the last of these computes the first P that needs no mask; masking does not change it
    for i in range(first, masked):
        p, dk, dv = _step(dq_desc, tiles, barriers, k, v, head, first_key, i, i - first, num_keys, c, p, dk, dv,
                          True, IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD)  # fmt: skip
    for i in range(masked, query_tiles):
        p, dk, dv = _step(dq_desc, tiles, barriers, k, v, head, first_key, i, i - first, num_keys, c, p, dk, dv,
                          False, IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD)  # fmt: skip
    # no matmul reads this group's rows of V any more: the results are staged there
    at = [head // heads, head % heads, first_key + G * WG, 0]
    v.store(dv.to(v.dtype))
    fence_async_shared()
    async_store(dv_desc, at, v_smem.index(G))
    dk16 = (dk * scale).to(v.dtype)
    tma.store_wait(0)
    v.store(dk16)
    fence_async_shared()
    async_store(dk_desc, at, v_smem.index(G))
    tma.store_wait(0)


@gluon.jit
def _dq_group(dq_desc, tiles, barriers, batch_heads, section, key_tiles, query_tiles, IS_CAUSAL: gl.constexpr,
              BLOCK_M: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Adds dQᵀ = Kᵀ dSᵀ of each tile of queries to dQ, while the other groups go on. Kᵀ stays in registers."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    tile, head = locate(gl.program_id(0), key_tiles, batch_heads, section)
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
        add_tile(dq_desc, dq, dq_smem.index(slot), head, i)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "key_tiles", "query_tiles", "num_keys"])
def single_keys_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, stats_desc, heads, batch_heads,
                       section, key_tiles, query_tiles, num_keys, c, scale, IS_CAUSAL: gl.constexpr,
                       BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DQ_GROUP: gl.constexpr,
                       AHEAD: gl.constexpr, K_REGISTERS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
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
            (_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles,
                      num_keys, c, scale, IS_CAUSAL, 0, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD, K_REGISTERS)),
            (_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles,
                      num_keys, c, scale, IS_CAUSAL, 1, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD, K_REGISTERS)),
            (_dq_group, (dq_desc, tiles, barriers, batch_heads, section, key_tiles, query_tiles, IS_CAUSAL, BLOCK_M,
                         D)),
            (_producer, (q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads, section,
                         key_tiles, query_tiles, IS_CAUSAL, BLOCK_M, D, STAGES, AHEAD)),
        ], [4, 4, 1], [192, 104, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles,
                      num_keys, c, scale, IS_CAUSAL, 0, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD, K_REGISTERS)),
            (_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles,
                      num_keys, c, scale, IS_CAUSAL, 1, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD, K_REGISTERS)),
            (_producer, (q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads, section,
                         key_tiles, query_tiles, IS_CAUSAL, BLOCK_M, D, STAGES, AHEAD)),
        ], [4, 1], [240, 24])  # fmt: skip
