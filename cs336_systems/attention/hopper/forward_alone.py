"""Forward in small programs: one group, 64 queries at a time, that loads its own tiles. Three or four of them share a
multiprocessor, and while one waits for memory or begins or ends, others compute. So a program holds one tile of K and
one of V, loaded together when matmuls have read the last ones, and waits for every load: there are no `empty` barriers.

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
    accumulator,
    accumulators,
    async_load,
    async_store,
    barriers,
    locate,
    mma_layout,
    mma_of_part,
    mma_over_columns,
    store_parts,
    times_rows,
    wait_for_both,
)
from cs336_systems.attention.hopper.forward_state import Keys, first_softmax


@gluon.jit
def _load(desc, smem, full, b, h, first_row):
    """A tile of Q, or the first one of K."""
    mbarrier.expect(full, WG * smem.shape[4] * 2)
    async_load(desc, [b, h, first_row, 0], full, smem.index(0))


@gluon.jit
def _load_both(k_desc, v_desc, k_smem, v_smem, full, b, h, t, steps, end):
    """Tile t of K, counted from tile `end` to the left, if it is one of `steps`, and t − 1 of V: they are needed
    together, and there is one place for each."""
    BYTES: gl.constexpr = WG * k_smem.shape[4] * 2
    first_key = (end - 1 - t) * WG
    if t < steps:
        mbarrier.expect(full, 2 * BYTES)
        async_load(k_desc, [b, h, first_key, 0], full, k_smem.index(0))
    else:
        mbarrier.expect(full, BYTES)
    async_load(v_desc, [b, h, first_key + WG, 0], full, v_smem.index(0))


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "row_tiles", "num_queries", "num_keys", "limit",
                              "chain"])  # fmt: skip
def alone_kernel(q_desc, k_desc, v_desc, o_desc, l_ptr, limit, heads, batch_heads, section, row_tiles, num_queries,
                 num_keys, scale_log2, chain, IS_CAUSAL: gl.constexpr, D: gl.constexpr, REST: gl.constexpr,
                 HEADS_PER_KV: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and L of up to `chain` tiles of 64 queries of one head. Grid: (⌈row_tiles / chain⌉ · batch_heads,)."""
    dtype: gl.constexpr = q_desc.dtype
    s_rows: gl.constexpr = gl.SliceLayout(1, mma_layout(WG))
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, WG, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, WG, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, WG, D], v_desc.layout)
    both = barriers(2, 1)
    q_full, full = both.index(0), both.index(1)
    fence_async_shared()  # the TMA unit sees them initialized

    which, head = locate(gl.program_id(0), (row_tiles + chain - 1) // chain, batch_heads, section)
    b, h = head // heads, head % heads
    kv_head = h // HEADS_PER_KV  # of the heads of keys
    first_query = (row_tiles - 1 - which * chain) * WG  # with a causal mask the last tiles are the heaviest
    tiles = gl.minimum(row_tiles - which * chain, chain)
    LIMITED: gl.constexpr = limit is not None
    keys = Keys(num_keys, limit if LIMITED else num_keys, LIMITED, IS_CAUSAL, WG)
    phases = 0  # of `full`: steps + 1 for each tile of queries
    end = keys.tiles(first_query, WG)
    _load(q_desc, q_smem, q_full, b, h, first_query)
    _load(k_desc, k_smem, full, b, kv_head, (end - 1) * WG)

    q = q_smem.index(0).reshape([WG, D])
    k = k_smem.index(0).reshape([WG, D])
    v = v_smem.index(0).reshape([WG, D])
    zeros = accumulator(WG)
    for done in range(tiles):
        queries = first_query + gl.arange(0, WG, s_rows)
        steps = end - keys.first_tile(first_query)
        unlimited = keys.unlimited(first_query)
        acc = accumulators(D, REST)
        p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)

        mbarrier.wait(q_full, done & 1)
        mbarrier.wait(full, phases & 1)
        s = mma_over_columns(q, k, zeros, REST)
        s = warpgroup_mma_wait(0, deps=(s,))
        tma.store_wait(0)  # O of the tile before has left the place of V
        fence_async_shared()  # without this one triton 3.6 sets a fence in the loop over keys
        _load_both(k_desc, v_desc, k_smem, v_smem, full, b, kv_head, 1, steps, end)
        s = keys.limited(s, first_query, (end - 1) * WG, unlimited)
        softmax, p32 = first_softmax(keys, s, first_query, (end - 1) * WG, scale_log2)
        p = gl.convert_layout(p32.to(dtype), p_layout, assert_trivial=True)

        for t in range(1, steps):
            mbarrier.wait(full, (phases + t) & 1)
            acc = [mma_of_part(p, v, x) for x in acc]
            s = mma_over_columns(q, k, zeros, REST)
            acc, s = wait_for_both(0, acc, s)
            _load_both(k_desc, v_desc, k_smem, v_smem, full, b, kv_head, t + 1, steps, end)
            s = keys.limited(s, first_query, (end - 1 - t) * WG, unlimited)
            # not LAZY, by which these programs gain nothing
            softmax, alpha, p = softmax.step(s, scale_log2, p_layout, dtype, False)
            acc = [times_rows(x, alpha) for x in acc]

        mbarrier.wait(full, (phases + steps) & 1)
        phases += steps + 1
        this_query = first_query
        first_query -= WG
        if done + 1 < tiles:  # Q and K have been read
            end = keys.tiles(first_query, WG)
            _load(q_desc, q_smem, q_full, b, h, first_query)
            _load(k_desc, k_smem, full, b, kv_head, (end - 1) * WG)
        acc = [mma_of_part(p, v, x) for x in acc]
        logsumexp = softmax.logsumexp(scale_log2)
        gl.store(l_ptr + head.to(gl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)
        share = 1.0 / softmax.row_sum
        acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
        acc = [times_rows(x, share) for x in acc]
        store_parts(acc, v)  # the last V has been read
        fence_async_shared()
        async_store(o_desc, [b, h, this_query, 0], v_smem.index(0))
    tma.store_wait(0)
