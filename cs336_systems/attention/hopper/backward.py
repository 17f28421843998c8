"""Backward: 128 keys per program, two groups of 64, queries from the diagonal on. Scores are keys by queries:

    Sᵀ = K Qᵀ                       dPᵀ = V dOᵀ
    Pᵀ = exp2(c Sᵀ − L · log2(e))   dSᵀ = Pᵀ ∘ (dPᵀ − D)     c = scale · log2(e)
    dV += Pᵀ dO                     dK += dSᵀ Q              Pᵀ and dSᵀ come from registers
    dQ += dS K        dSᵀ of both groups comes from shared memory; TMA adds to fp32 in memory

All five matmuls run once, against seven in the two passes of `attention.triton`; in exchange programs
accumulate dQ in any order, so that its last bits differ from run to run. A small kernel before this one computes the
statistics and zeroes the fp32 accumulator, one after it turns that into dQ (`backward_ends`).
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

from cs336_systems.attention.hopper.backward_parts import (
    DQ_COLUMNS,
    DQ_ROWS,
    add_half,
    producer,
    scores,
    store_dq,
    weights,
)
from cs336_systems.attention.hopper.common import (
    WG,
    accumulators,
    async_atomic_add,
    async_store,
    mma_of_part,
    mma_over_columns,
    place,
    rounded,
    store_parts,
    wait_for_both,
    widened,
)


@gluon.jit
def _backward_step(dq_desc, tiles, barriers, k, v, head, first_key, i, t, num_keys, c, p, dk, dv,
                   MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr,
                   D: gl.constexpr, STAGES: gl.constexpr, DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """A tile of queries for a group's 64 keys. With AHEAD, p has been computed already, and that of the next tile is
    computed here: its exponentials overlap dK's matmul."""
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
        s = scores(tiles, barriers, k, t, BLOCK_M, D, STAGES, 0)
    dp = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    mbarrier.wait(do_full.index(slot), parity)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
        p = weights(s, tiles, first_key, i, t, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M, STAGES)
    p16 = rounded(p, DTYPE)
    dv = warpgroup_mma(gl.convert_layout(p16, operand, assert_trivial=True), do, dv, is_async=True)
    minus_d = stats_smem.index(2 * slot + 1).reshape([BLOCK_M]).load(gl.SliceLayout(0, s_layout))
    if AHEAD:
        s = scores(tiles, barriers, k, t + 1, BLOCK_M, D, STAGES, 0)
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
        p = weights(s, tiles, first_key, i + 1, t + 1, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M, STAGES)
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
        add_half(dq_desc, dq, tiles, head, i, G)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    return p, dk, dv


@gluon.jit
def _no_key_seen(tiles, barriers, G: gl.constexpr):
    """Passes over the first tile of queries, of which none sees this group's keys: its dSᵀ is zero."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ds_smem.index(0).slice(G * WG, WG).store(gl.zeros([WG, BLOCK_M], q_smem.dtype, s_layout))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0), count=1)
    # the next waits at these barriers are for their next phases
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(do_full.index(0), 0)
    mbarrier.arrive(q_empty.index(0), count=1)
    mbarrier.arrive(do_empty.index(0), count=1)


@gluon.jit
def _backward_steps(dq_desc, tiles, barriers, k, v, head, first_key, first, start, masked, query_tiles, num_keys, c,
                    dk, dv, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
                    STAGES: gl.constexpr, DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """All tiles of queries from `start` on, the masked ones first, for a group's 64 keys. The program's first tile is
    `first`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    p = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    if AHEAD:
        s = scores(tiles, barriers, k, start - first, BLOCK_M, D, STAGES, 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        p = weights(
            s, tiles, first_key, start, start - first, num_keys, c, True, IS_CAUSAL, G, BLOCK_M, STAGES
        )
    # ahead, the last of these computes the first P that needs no mask; masking does not change it
    for i in range(start, masked):
        p, dk, dv = _backward_step(dq_desc, tiles, barriers, k, v, head, first_key, i, i - first, num_keys, c, p,
                                   dk, dv, True, IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD)  # fmt: skip
    for i in range(masked, query_tiles):
        p, dk, dv = _backward_step(dq_desc, tiles, barriers, k, v, head, first_key, i, i - first, num_keys, c, p,
                                   dk, dv, False, IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD)  # fmt: skip
    return dk, dv


@gluon.jit
def _zero(t):
    """0, from the index of a tile so that the compiler cannot fold it: it would keep all descriptors of K and V, which
    do not change, in registers that the accumulators need."""
    return t >> 30


@gluon.jit
def _late_dq(tiles, barriers, t, G: gl.constexpr, D: gl.constexpr, REST: gl.constexpr):
    """Issues a group's half of dQ of tile t: of its columns, over the keys of both groups."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    WIDTH: gl.constexpr = REST if REST and G else 64
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    slot = (t + 3) % 3
    # before the first tile: a matmul whose result is unused
    mbarrier.wait(ds_full.index(slot), (t // 3) & 1, pred=t >= 0)
    empty = gl.zeros([WG, WIDTH], gl.float32, half_layout)
    k_half = k_smem.index(_zero(t + 1)).reshape([2 * WG, D]).slice(G * 64, WIDTH, 1)
    return warpgroup_mma(ds_smem.index(slot).permute((1, 0)), k_half, empty, use_acc=False, is_async=True)


@gluon.jit
def _late_step(dq_desc, tiles, barriers, head, first_key, i, t, num_keys, c, s, dk, dv,
               MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
               STAGES: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """`_backward_step` in which the two groups need not run in lockstep: dQ of the previous tile is computed beside dV,
    not right after both have stored their dSᵀ, and the next tile's scores, s, are issued before dK is done.

    A group may be a tile ahead of the other, which still reads the dSᵀ of the previous tile: hence three buffers."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    PARTS: gl.constexpr = 2 if REST else 1
    DTYPE: gl.constexpr = q_smem.dtype
    slot = t % STAGES
    q = q_smem.index(slot).reshape([BLOCK_M, D])
    do = do_smem.index(slot).reshape([BLOCK_M, D])
    zero = _zero(t)
    k = k_smem.index(zero).reshape([2 * WG, D]).slice(G * WG, WG)
    v = v_smem.index(G + zero).reshape([WG, D])

    mbarrier.wait(do_full.index(slot), (t // STAGES) & 1)
    dp = gl.zeros([WG, BLOCK_M], gl.float32, s_layout)
    dp = mma_over_columns(v, do, dp, REST)
    p16 = rounded(
        weights(s, tiles, first_key, i, t, num_keys, c, MASKED, IS_CAUSAL, G, BLOCK_M, STAGES), DTYPE
    )
    dv = [mma_of_part(p16, do, x) for x in dv]
    dq = _late_dq(tiles, barriers, t - 1, G, D, REST)
    minus_d = stats_smem.index(2 * slot + 1).reshape([BLOCK_M]).load(gl.SliceLayout(0, s_layout))
    dp = warpgroup_mma_wait(PARTS + 1, deps=(dp,))
    # from the rounded P, so that the fp32 one need not stay in registers
    ds = rounded(widened(p16) * (dp + minus_d[None, :]), DTYPE)
    ds_slot = t % 3
    ds_smem.index(ds_slot).slice(G * WG, WG).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(ds_slot), count=1)
    dk = [mma_of_part(ds, q, x) for x in dk]
    dv, dq = wait_for_both(PARTS, dv, dq)
    mbarrier.arrive(do_empty.index(slot), count=1)
    if t > 0:  # while dK's matmul runs
        add_half(dq_desc, dq, tiles, head, i - 1, G)
    s = scores(tiles, barriers, k, t + 1, BLOCK_M, D, STAGES, REST)
    dk, s = wait_for_both(0, dk, s)
    mbarrier.arrive(q_empty.index(slot), count=1)
    return s, dk, dv


@gluon.jit
def _late_steps(dq_desc, tiles, barriers, head, first_key, first, start, masked, query_tiles, num_keys, c, dk, dv,
                IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
                STAGES: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """`_backward_steps` of `_late_step`, and dQ of the last tile."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    k = k_smem.index(0).reshape([2 * WG, D]).slice(G * WG, WG)
    s = scores(tiles, barriers, k, start - first, BLOCK_M, D, STAGES, REST)
    s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(start, masked):
        s, dk, dv = _late_step(dq_desc, tiles, barriers, head, first_key, i, i - first, num_keys, c, s, dk, dv,
                               True, IS_CAUSAL, G, BLOCK_M, D, STAGES, REST)  # fmt: skip
    for i in range(masked, query_tiles):
        s, dk, dv = _late_step(dq_desc, tiles, barriers, head, first_key, i, i - first, num_keys, c, s, dk, dv,
                               False, IS_CAUSAL, G, BLOCK_M, D, STAGES, REST)  # fmt: skip
    if first < query_tiles:
        dq = _late_dq(tiles, barriers, query_tiles - 1 - first, G, D, REST)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        add_half(dq_desc, dq, tiles, head, query_tiles - 1, G)
    return dk, dv


@gluon.jit
def _backward_group(dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles, query_tiles,
                    num_keys, c, scale, IS_CAUSAL: gl.constexpr, G: gl.constexpr, BLOCK_M: gl.constexpr,
                    D: gl.constexpr, STAGES: gl.constexpr, DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr,
                    K_REGISTERS: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """dK and dV of 64 keys."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    tile, head = place(gl.program_id(0), key_tiles, batch_heads, section)
    first_key = tile * 2 * WG
    dk = accumulators(D, REST)
    dv = accumulators(D, REST)
    mbarrier.wait(kv_full.index(0), 0)
    k = k_smem.index(0).reshape([2 * WG, D]).slice(G * WG, WG)
    v = v_smem.index(G).reshape([WG, D])
    if K_REGISTERS:  # shared memory is busy enough
        k = k.load(gl.DotOperandLayout(0, s_layout, 2))
    first = 0
    start = 0
    masked = 0
    if IS_CAUSAL:
        first = first_key // BLOCK_M
        start = first
        if G == 1 and BLOCK_M == WG:  # noqa: SIM102 (known at compile time, the next one is not)
            if first < query_tiles:
                _no_key_seen(tiles, barriers, G)
                start = first + 1
        masked = gl.minimum(
            first + ((G + 1) * WG + BLOCK_M - 1) // BLOCK_M, query_tiles
        )  # until here they meet the diagonal
    if first_key + 2 * WG > num_keys:  # P of a key that is not there, exp(−L), may be infinite
        masked = query_tiles
    if D == 128:
        dk, dv = _late_steps(dq_desc, tiles, barriers, head, first_key, first, start, masked, query_tiles, num_keys, c,
                             dk, dv, IS_CAUSAL, G, BLOCK_M, D, STAGES, REST)  # fmt: skip
    else:
        dk, dv = _backward_steps(dq_desc, tiles, barriers, k, v, head, first_key, first, start, masked, query_tiles,
                                 num_keys, c, dk[0], dv[0], IS_CAUSAL, G, BLOCK_M, D, STAGES, DQ_GROUP,
                                 AHEAD)  # fmt: skip
        dk, dv = (dk,), (dv,)
    # no matmul reads this group's rows of V any more: the results are staged there
    at = [head // heads, head % heads, first_key + G * WG, 0]
    store_parts(dv, v)
    fence_async_shared()
    async_store(dv_desc, at, v_smem.index(G))
    dk16 = [(x * scale).to(v.dtype) for x in dk]
    tma.store_wait(0)
    store_parts(dk16, v)
    fence_async_shared()
    async_store(dk_desc, at, v_smem.index(G))
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
        store_dq(dq, dq_smem.index(slot))
        fence_async_shared()
        async_atomic_add(dq_desc, [head, i * DQ_ROWS, 0], dq_smem.index(slot))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "key_tiles", "query_tiles", "num_keys"])
def backward_keys_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, stats_desc, heads, batch_heads,
                         section, key_tiles, query_tiles, num_keys, c, scale, IS_CAUSAL: gl.constexpr,
                         BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DO_STEP: gl.constexpr,
                         DQ_GROUP: gl.constexpr, AHEAD: gl.constexpr, K_REGISTERS: gl.constexpr,
                         REST: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dK and dV of 128 keys of one head, and their part of dQ. Grid: (key_tiles · batch_heads,)."""
    dtype: gl.constexpr = q_desc.dtype
    DS_TILES: gl.constexpr = 3 if D == 128 else 2
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, 2 * WG, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, WG, D], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_TILES, 2 * WG, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, DQ_ROWS, DQ_COLUMNS], dq_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BLOCK_M], stats_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_TILES, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(DS_TILES):
        mbarrier.init(ds_full.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_empty.index(i), count=1)
    fence_async_shared()
    tiles = (q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty)
    if DQ_GROUP:
        gl.warp_specialize([
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 0, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS, REST)),
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 1, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS, REST)),
            (_backward_dq_group, (dq_desc, tiles, barriers, batch_heads, section, key_tiles, query_tiles, IS_CAUSAL,
                                  BLOCK_M, D)),
            (producer, (q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads,
                                  section, key_tiles, query_tiles, IS_CAUSAL, BLOCK_M, D, STAGES, DO_STEP, AHEAD)),
        ], [4, 4, 1], [192, 104, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 0, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS, REST)),
            (_backward_group, (dk_desc, dv_desc, dq_desc, tiles, barriers, heads, batch_heads, section, key_tiles,
                               query_tiles, num_keys, c, scale, IS_CAUSAL, 1, BLOCK_M, D, STAGES, DQ_GROUP, AHEAD,
                               K_REGISTERS, REST)),
            (producer, (q_desc, k_desc, v_desc, do_desc, stats_desc, tiles, barriers, heads, batch_heads,
                                  section, key_tiles, query_tiles, IS_CAUSAL, BLOCK_M, D, STAGES, DO_STEP,
                                  D == 128)),
        ], [4, 1], [240, 24])  # fmt: skip
