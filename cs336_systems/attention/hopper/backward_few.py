"""Backward of a few queries (`configs.few_queries`): 64 keys per program, which holds all the queries at once.

Almost all time goes into reading K and V and writing dK and dV. So there is no loop whose tiles one would load ahead,
hence no producer, no ring, and a barrier has one phase: several small programs share a multiprocessor, and while one
waits for memory others compute. The matmuls are those of `backward`, in one group, which masks every tile. All results
leave from where what they are made of lay: dQ's sum, to which TMA adds, from Q and dO, dK from K, dV from V.
"""

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.attention.hopper.backward_state import probabilities
from cs336_systems.attention.hopper.common import (
    WG,
    accumulator,
    accumulators,
    async_atomic_add,
    async_load,
    async_store,
    barriers,
    locate,
    mma_layout,
    mma_of_part,
    mma_over_columns,
    reinterpreted,
    rounded,
    store_parts,
    wait_for_both,
    widened,
)


@gluon.jit
def _part_of_dq(ds, k, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Issues dQ = dS K of 64 queries, of WIDTH columns from FIRST on."""
    empty = accumulator(WIDTH)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(FIRST, WIDTH, 1), empty, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(dq_desc, dq, tile, head, first_part, queries):
    """Adds the first `queries` of 64 rows of dQ, or some more, to a head's sum, by way of `tile` in shared memory. A
    warp holds 16 rows: its numbers lie together in the tile, and only if some of them are needed are they added. In
    global memory they come in the order of `backward_dq.store_dq`: parts of 8 columns, in each the four warps.
    """
    WIDTH: gl.constexpr = dq.shape[1]
    # rows: warp, half, thread of 8; columns: part, thread of 4, one of two
    of_warps = dq.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    tile.slice(0, WIDTH // 8, 2).store(of_warps.reshape([1, 4, WIDTH // 8, 128]))
    fence_async_shared()
    PARTS: gl.constexpr = dq_desc.block_type.shape[2]
    for warp in gl.static_range(4):
        if warp * 16 < queries:
            for part in gl.static_range(0, WIDTH // 8, PARTS):
                at = [head, warp, first_part + part, 0]
                async_atomic_add(dq_desc, at, tile.slice(warp, 1, 1).slice(part, PARTS, 2))


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "key_tiles", "num_queries", "num_keys"])
def few_queries_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, stats_desc, heads, batch_heads,
                       section, key_tiles, num_queries, num_keys, scale_log2, scale, IS_CAUSAL: gl.constexpr,
                       TILES: gl.constexpr, D: gl.constexpr, DO_STEP: gl.constexpr, REST: gl.constexpr,
                       HEADS_PER_KV: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dK and dV of 64 keys of one head, and their part of dQ of num_queries ≤ TILES · 64.
    Grid: (key_tiles · batch_heads,)."""
    dtype: gl.constexpr = q_desc.dtype
    of_rows: gl.constexpr = gl.SliceLayout(0, mma_layout(WG))
    MMAS: gl.constexpr = 2 if REST else 1  # that a product of D columns takes
    HALVES: gl.constexpr = D // 64
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, WG, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, WG, D], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [WG, WG], gl.NVMMASharedLayout(128, 16, 2))
    # 64 rows of Q and dO in 16 bits take as much as theirs of dQ in fp32
    dq_smem = gl.allocate_shared_memory(gl.float32, [TILES * HALVES, 1, 4, 8, 128], dq_desc.layout)
    rows_smem = reinterpreted(dq_smem, dtype, [2 * TILES, 1, 1, WG, D], q_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * TILES, 1, WG], stats_desc.layout)
    full = barriers(2 * TILES, 1)
    fence_async_shared()

    gdc_wait()
    gdc_launch_dependents()
    tile, head = locate(gl.program_id(0), key_tiles, batch_heads, section)
    b, h, first_key = head // heads, head % heads, tile * WG
    kv_h = h // HEADS_PER_KV
    # for each tile of queries what its scores need, then the rest; K and V come with the first
    of_tile: gl.constexpr = WG * D * 2
    for i in gl.static_range(TILES):
        mbarrier.expect(full.index(2 * i), (2 * of_tile if i == 0 else of_tile) + 2 * WG * 4)
        if i == 0:
            async_load(k_desc, [b, kv_h, first_key, 0], full.index(0), k_smem.index(0))
        async_load(q_desc, [b, h, i * WG, 0], full.index(2 * i), rows_smem.index(2 * i))
        for which in gl.static_range(2):
            async_load(
                stats_desc, [2 * head + which, i * WG], full.index(2 * i), stats_smem.index(2 * i + which)
            )
        mbarrier.expect(full.index(2 * i + 1), 2 * of_tile if i == 0 else of_tile)
        if i == 0:
            async_load(v_desc, [b, kv_h, first_key, 0], full.index(1), v_smem.index(0))
        async_load(do_desc, [b, h, i * WG * DO_STEP, 0], full.index(2 * i + 1), rows_smem.index(2 * i + 1))

    k = k_smem.index(0).reshape([WG, D])
    v = v_smem.index(0).reshape([WG, D])
    dk = accumulators(D, REST)
    dv = accumulators(D, REST)
    empty = accumulator(WG)
    for i in gl.static_range(TILES):
        q = rows_smem.index(2 * i).reshape([WG, D])
        do = rows_smem.index(2 * i + 1).reshape([WG, D])
        mbarrier.wait(full.index(2 * i), 0)
        s = mma_over_columns(k, q, empty, REST)
        mbarrier.wait(full.index(2 * i + 1), 0)
        dp = mma_over_columns(v, do, empty, REST)
        s = warpgroup_mma_wait(MMAS, deps=(s,))
        minus_l = stats_smem.index(2 * i).reshape([WG]).load(of_rows)
        p = probabilities(s, minus_l, first_key, i, num_keys, scale_log2, True, IS_CAUSAL, 0, WG)
        p16 = rounded(p, dtype)
        dv = [mma_of_part(p16, do, x) for x in dv]
        minus_delta = stats_smem.index(2 * i + 1).reshape([WG]).load(of_rows)
        dp = warpgroup_mma_wait(MMAS, deps=(dp,))
        ds = rounded(widened(p16) * (dp + minus_delta[None, :]), dtype)
        ds_smem.store(ds)
        fence_async_shared()
        dv = [warpgroup_mma_wait(0, deps=(x,)) for x in dv]
        if i == TILES - 1:  # dV is complete, and its registers are needed
            store_parts(dv, v)
            fence_async_shared()
            async_store(dv_desc, [b, h, first_key, 0], v_smem.index(0))
        dk = [mma_of_part(ds, q, x) for x in dk]
        dq = _part_of_dq(ds_smem, k, 0, 64)
        dk, dq = wait_for_both(0, dk, dq)
        queries = num_queries - i * WG
        _add_queries(dq_desc, dq, dq_smem.index(i * HALVES), head, i * HALVES * 8, queries)
        if HALVES == 2:
            dq = _part_of_dq(ds_smem, k, 64, REST if REST else 64)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            _add_queries(dq_desc, dq, dq_smem.index(i * HALVES + 1), head, (i * HALVES + 1) * 8, queries)

    store_parts([x * scale for x in dk], k)
    fence_async_shared()
    async_store(dk_desc, [b, h, first_key, 0], k_smem.index(0))
    tma.store_wait(0)
