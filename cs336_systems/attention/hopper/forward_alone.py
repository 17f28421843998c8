"""Forward in small programs: one group, 64 queries at a time, that loads its own tiles. Three or four of them share a
multiprocessor, and while one waits for memory or begins or ends, others compute.

A program takes a chain of tiles of queries of a head, one after another: Q and the first keys of the next one arrive
while the last matmul of this one runs, and O leaves while the next one begins. The hardware deals out chains as others
end, the heaviest ones of a section of heads first, so that light ones fill the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper.common import (
    WG,
    accumulators,
    async_load,
    async_store,
    mma_of_part,
    mma_over_columns,
    place,
    store_parts,
    times_rows,
    wait_for_both,
)
from cs336_systems.attention.hopper.forward import LN_2, first_softmax, key_tiles, softmax_step


@gluon.jit
def _load_keys(k_desc, k_smem, k_full, b, h, begun, t, steps):
    """Tile t of K, where there is one, after `begun` tiles for other queries."""
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    if t < steps:
        slot = (begun + t) % k_smem.shape[0]
        mbarrier.expect(k_full.index(slot), BLOCK_N * D * 2)
        async_load(k_desc, [b, h, (steps - 1 - t) * BLOCK_N, 0], k_full.index(slot), k_smem.index(slot))


@gluon.jit
def _load_values(v_desc, v_smem, v_full, b, h, t, steps):
    """Tile t of V, in the one place for such tiles."""
    BLOCK_N: gl.constexpr = v_smem.shape[3]
    D: gl.constexpr = v_smem.shape[4]
    mbarrier.expect(v_full.index(0), BLOCK_N * D * 2)
    async_load(v_desc, [b, h, (steps - 1 - t) * BLOCK_N, 0], v_full.index(0), v_smem.index(0))


@gluon.jit
def _load_queries(q_desc, q_smem, q_full, b, h, first_query):
    D: gl.constexpr = q_smem.shape[4]
    mbarrier.expect(q_full.index(0), WG * D * 2)
    async_load(q_desc, [b, h, first_query, 0], q_full.index(0), q_smem.index(0))


@gluon.jit(
    do_not_specialize=["heads", "batch_heads", "section", "row_tiles", "num_queries", "num_keys", "chain"]
)
def alone_kernel(q_desc, k_desc, v_desc, o_desc, l_ptr, heads, batch_heads, section, row_tiles, num_queries, num_keys,
                 c, chain, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                 OVERLAP: gl.constexpr, REST: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and L of up to `chain` tiles of 64 queries of one head. Grid: (⌈row_tiles / chain⌉ · batch_heads,)."""
    dtype: gl.constexpr = q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    PARTS: gl.constexpr = 2 if REST else 1
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, WG, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    fence_async_shared()  # the TMA unit sees them initialized

    which, head = place(gl.program_id(0), (row_tiles + chain - 1) // chain, batch_heads, section)
    b, h = head // heads, head % heads
    first_query = (row_tiles - 1 - which * chain) * WG  # with a causal mask the last tiles are the heaviest
    tiles = gl.minimum(row_tiles - which * chain, chain)
    begun = 0
    steps = key_tiles(first_query, WG, num_keys, IS_CAUSAL, BLOCK_N)
    _load_queries(q_desc, q_smem, q_full, b, h, first_query)
    for i in gl.static_range(STAGES):
        _load_keys(k_desc, k_smem, k_full, b, h, 0, i, steps)

    q = q_smem.index(0).reshape([WG, D])
    v = v_smem.index(0).reshape([BLOCK_N, D])
    zeros = gl.zeros([WG, BLOCK_N], gl.float32, s_layout)
    for done in range(tiles):
        queries = first_query + gl.arange(0, WG, s_rows)
        acc = accumulators(D, REST)
        p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)

        slot = begun % STAGES
        mbarrier.wait(q_full.index(0), done & 1)
        parity = (begun // STAGES) & 1
        mbarrier.wait(k_full.index(slot), parity)
        s = mma_over_columns(q, k_smem.index(slot).reshape([BLOCK_N, D]), zeros, REST)
        # complete long ago; a wait ends the basic block, without which ptxas would move the next line up
        mbarrier.wait(k_full.index(slot), parity)
        tma.store_wait(0)  # O of the tile before has left the place of V
        fence_async_shared()  # without this one triton 3.6 sets a fence in the loop over keys
        _load_values(v_desc, v_smem, v_full, b, h, 0, steps)
        s = warpgroup_mma_wait(0, deps=(s,))
        _load_keys(k_desc, k_smem, k_full, b, h, begun, STAGES, steps)
        row_max, row_sum, p32 = first_softmax(s, first_query, (steps - 1) * BLOCK_N, num_keys, c, IS_CAUSAL)
        p = gl.convert_layout(p32.to(dtype), p_layout, assert_trivial=True)

        for t in range(1, steps):
            slot = (begun + t) % STAGES
            parity = ((begun + t) // STAGES) & 1
            k = k_smem.index(slot).reshape([BLOCK_N, D])
            mbarrier.wait(k_full.index(slot), parity)
            mbarrier.wait(v_full.index(0), (begun + t - 1) & 1)
            if OVERLAP:  # the softmax of this tile overlaps the matmul of the last one
                s = mma_over_columns(q, k, zeros, REST)
                acc = [mma_of_part(p, v, x) for x in acc]
                s = warpgroup_mma_wait(PARTS, deps=(s,))
                row_max, row_sum, alpha, new_p = softmax_step(s, row_max, row_sum, c, p_layout, dtype)
                # complete long ago; a wait ends the basic block, without which ptxas would move the next line up
                mbarrier.wait(k_full.index(slot), parity)
                acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
                _load_values(v_desc, v_smem, v_full, b, h, t, steps)
                _load_keys(k_desc, k_smem, k_full, b, h, begun, t + STAGES, steps)
                p = new_p
            else:
                acc = [mma_of_part(p, v, x) for x in acc]
                s = mma_over_columns(q, k, zeros, REST)
                acc, s = wait_for_both(0, acc, s)
                _load_values(v_desc, v_smem, v_full, b, h, t, steps)
                _load_keys(k_desc, k_smem, k_full, b, h, begun, t + STAGES, steps)
                row_max, row_sum, alpha, p = softmax_step(s, row_max, row_sum, c, p_layout, dtype)
            acc = [times_rows(x, alpha) for x in acc]

        # Q and K have been read
        this_query = first_query
        first_query -= WG
        begun += steps
        next_steps = 0
        if done + 1 < tiles:
            next_steps = key_tiles(first_query, WG, num_keys, IS_CAUSAL, BLOCK_N)
            _load_queries(q_desc, q_smem, q_full, b, h, first_query)
            for i in gl.static_range(STAGES):
                _load_keys(k_desc, k_smem, k_full, b, h, begun, i, next_steps)
        mbarrier.wait(v_full.index(0), (begun - 1) & 1)
        acc = [mma_of_part(p, v, x) for x in acc]
        logsumexp = (row_max * c + gl.log2(row_sum)) * LN_2
        gl.store(l_ptr + head.to(gl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)
        share = 1.0 / row_sum
        acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
        acc = [times_rows(x, share) for x in acc]
        store_parts(acc, v)  # the last V has been read
        fence_async_shared()
        async_store(o_desc, [b, h, this_query, 0], v_smem.index(0))
        steps = next_steps
    tma.store_wait(0)
