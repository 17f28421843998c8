"""Forward: GROUPS · 64 queries at a time, keys from the right end to the left, so that only the first step needs a
mask. Groups do not synchronize with each other, and that is the point: while one waits for a matmul, the softmax of
another keeps the arithmetic units busy, and vice versa. A producer's warp loads their tiles (`forward_alone` has
programs without a producer).

A PERSISTENT program takes tiles of queries one after another: Q and the first K of the next one arrive during the last
matmuls of this one. With a causal mask it takes them in pairs that have the same work. Without one, small tiles even
out what multiprocessors get: 64 queries, for one group, which take about half as long.
"""

# ruff: noqa: RUF059 (tuples of tiles and barriers are unpacked as they were packed, whole)

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
    exp2,
    mma_of_part,
    mma_over_columns,
    place,
    store_parts,
    times_rows,
    wait_for_both,
)

GROWTH = gl.constexpr(8.0)  # of a row's maximum, in powers of two; as in FlashAttention-4
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def key_tiles(first_query, num_queries_seen, num_keys, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of keys the queries [first_query, first_query + num_queries_seen) need."""
    tiles = (num_keys + BLOCK_N - 1) // BLOCK_N
    if IS_CAUSAL:
        tiles = gl.minimum(tiles, (first_query + num_queries_seen - 1) // BLOCK_N + 1)
    return tiles


@gluon.jit
def first_softmax(s, first_query, first_key, num_keys, c, IS_CAUSAL: gl.constexpr):
    """Maximum, sum and P in fp32 of a group's first tile of keys, the only one that meets the diagonal or the end of
    the keys."""
    keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = (keys < num_keys)[None, :]
    if IS_CAUSAL:
        queries = first_query + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        seen = seen & (queries[:, None] >= keys[None, :])
    s = gl.where(seen, s, float("-inf"))
    row_max = gl.max(s, 1)
    p = exp2(s * c - (row_max * c)[:, None])
    return row_max, gl.sum(p, 1), p


@gluon.jit
def softmax_step(s, row_max, row_sum, c, p_layout: gl.constexpr, DTYPE: gl.constexpr, LAZY: gl.constexpr):
    """Algorithm 1, lines 8 to 9, of one tile: the maximum that P is relative to, factor that rescales older sums, new
    sum, P as an operand.

    LAZY: the maximum stays as it was while P is at most 2^GROWTH. Then older sums need no rescaling, and O and L are
    the same but for rounding."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    if LAZY:
        larger = (new_max - row_max) * c > GROWTH
        new_max = gl.where(larger, new_max, row_max)
    scaled = new_max * c
    alpha = exp2(row_max * c - scaled)
    if LAZY:
        alpha = gl.where(larger, alpha, 1.0)
    p = exp2(s * c - scaled[:, None])
    row_sum = row_sum * alpha + gl.sum(p, 1)
    operand = gl.convert_layout(p.to(DTYPE), p_layout, assert_trivial=True)
    return new_max, row_sum, alpha, operand


@gluon.jit
def _slot_of_q(done, g, GROUPS: gl.constexpr):
    """Where Q of group g lies, `done` tiles of queries after the first, and the parity of its barriers: a persistent
    program has two places, by turns."""
    slot = g
    parity = 0
    if done is not None:
        slot += (done & 1) * GROUPS
        parity = (done >> 1) & 1
    return slot, parity


@gluon.jit
def _free_last(q_empty, done, g, GROUPS: gl.constexpr):
    """Where O takes Q's place: waits until O of the tile before has left, whose place is then free for the next Q."""
    last, _ = _slot_of_q(done - 1, g, GROUPS)
    tma.store_wait(0)
    mbarrier.arrive(q_empty.index(last), count=1, pred=done > 0)


@gluon.jit
def _load_tile(q_desc, k_desc, v_desc, tiles, barriers, sizes, first_query, head, done, begun, IS_CAUSAL: gl.constexpr,
               GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Q of a tile of queries, and all its tiles of K and V. A persistent program has had `done` tiles of queries
    before, with `begun` tiles of keys; the new number of these is returned."""
    q_smem, k_smem, v_smem, o_smem = tiles
    q_full, full, empty, q_empty = barriers
    heads, batch_heads, section, full_tiles, row_tiles, num_queries, num_keys = sizes
    b, h = head // heads, head % heads
    for g in gl.static_range(GROUPS):
        slot, parity = _slot_of_q(done, g, GROUPS)
        if done is not None:
            mbarrier.wait(q_empty.index(slot), parity ^ 1)
        mbarrier.expect(q_full.index(slot), WG * D * 2)
        async_load(q_desc, [b, h, first_query + g * WG, 0], q_full.index(slot), q_smem.index(slot))
    steps = key_tiles(first_query, GROUPS * WG, num_keys, IS_CAUSAL, BLOCK_N)
    for t in range(steps + 1):  # tile t of K and t − 1 of V come together, since they are needed together
        slot = (begun + t) % STAGES
        first_key = (steps - 1 - t) * BLOCK_N
        both = (t > 0) & (t < steps)
        mbarrier.wait(empty.index(slot), (((begun + t) // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * BLOCK_N * D * 2, pred=both)
        mbarrier.expect(full.index(slot), BLOCK_N * D * 2, pred=both ^ True)
        async_load(k_desc, [b, h, first_key, 0], full.index(slot), k_smem.index(slot), pred=t < steps)
        async_load(v_desc, [b, h, first_key + BLOCK_N, 0], full.index(slot), v_smem.index(slot), pred=t > 0)
    return begun + steps + 1


@gluon.jit
def _items(sizes, IS_CAUSAL: gl.constexpr):
    """What persistent programs share: tiles of queries, or with a causal mask pairs of them."""
    heads, batch_heads, section, full_tiles, row_tiles, num_queries, num_keys = sizes
    return row_tiles * ((batch_heads + 1) // 2 if IS_CAUSAL else batch_heads)


@gluon.jit
def _tile_of(item, second, sizes, IS_CAUSAL: gl.constexpr, GROUPS: gl.constexpr, PAIRS: gl.constexpr):
    """A tile's first query, an end that its queries lie before, its head, and whether there is one. With a causal mask
    the last queries are the heaviest and come first; in PAIRS (`second`: 0, 1) the i-th heaviest tile of a head and the
    i-th lightest of the next: all pairs have the same work. Of an odd number of heads the last has no next one.

    Without a mask the first `full_tiles` of each head have queries for all groups. The others have 64 and come last."""
    heads, batch_heads, section, full_tiles, row_tiles, num_queries, num_keys = sizes
    there: gl.constexpr = True
    end = num_queries
    if IS_CAUSAL:
        if PAIRS:
            tile, head = item % row_tiles, item // row_tiles * 2 + second
            tile += second * (row_tiles - 1 - 2 * tile)
            there = head < batch_heads
        else:
            tile, head = place(item, row_tiles, batch_heads, section)
        first = (row_tiles - 1 - tile) * GROUPS * WG
    else:
        full = full_tiles * batch_heads
        if item < full:
            tile, head = place(item, full_tiles, batch_heads, section)
            first = tile * GROUPS * WG
        else:
            tile, head = place(item - full, row_tiles - full_tiles, batch_heads, section)
            first = (full_tiles * GROUPS + tile) * WG
            end = first + WG
    return first, end, head, there


@gluon.jit
def _forward_producer(q_desc, k_desc, v_desc, tiles, barriers, sizes, IS_CAUSAL: gl.constexpr, GROUPS: gl.constexpr,
                      BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                      PERSISTENT: gl.constexpr):  # fmt: skip
    if PERSISTENT:
        done = 0
        begun = 0
        for item in range(gl.program_id(0), _items(sizes, IS_CAUSAL), gl.num_programs(0)):
            for second in range(2 if IS_CAUSAL else 1):
                first, end, head, there = _tile_of(item, second, sizes, IS_CAUSAL, GROUPS, PERSISTENT)
                if there:
                    begun = _load_tile(q_desc, k_desc, v_desc, tiles, barriers, sizes, first, head, done, begun,
                                       IS_CAUSAL, GROUPS, BLOCK_N, D, STAGES)  # fmt: skip
                    done += 1
    else:
        first, end, head, there = _tile_of(gl.program_id(0), 0, sizes, IS_CAUSAL, GROUPS, PERSISTENT)
        _load_tile(q_desc, k_desc, v_desc, tiles, barriers, sizes, first, head, None, 0, IS_CAUSAL, GROUPS, BLOCK_N, D,
                   STAGES)  # fmt: skip


@gluon.jit
def _forward_tile(o_desc, l_ptr, tiles, barriers, sizes, c, first_of_tile, head, done, begun, IS_CAUSAL: gl.constexpr,
                  G: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                  OVERLAP: gl.constexpr, REST: gl.constexpr, HALVE: gl.constexpr):  # fmt: skip
    """64 queries of a tile: the online softmax over their keys, then O and L. A persistent program has had `done` tiles
    of queries before, with `begun` tiles of keys."""
    q_smem, k_smem, v_smem, o_smem = tiles
    q_full, full, empty, q_empty = barriers
    heads, batch_heads, section, full_tiles, row_tiles, num_queries, num_keys = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    PARTS: gl.constexpr = 2 if REST else 1
    LAZY: gl.constexpr = D == 128 and not REST  # with fewer columns there is less to rescale than to decide
    DTYPE: gl.constexpr = q_smem.dtype
    IN_PLACE: gl.constexpr = o_smem.shape[0] > GROUPS  # O takes the place of Q

    first_query = first_of_tile + G * WG
    queries = first_query + gl.arange(0, WG, s_rows)
    all_steps = key_tiles(first_of_tile, GROUPS * WG, num_keys, IS_CAUSAL, BLOCK_N)
    steps = key_tiles(first_query, WG, num_keys, IS_CAUSAL, BLOCK_N)

    t = begun
    for _ in range(all_steps - steps):  # tiles to the right of this group's diagonal are for the other groups
        mbarrier.wait(full.index(t % STAGES), (t // STAGES) & 1)
        mbarrier.arrive(empty.index(t % STAGES), count=1)
        t += 1

    q_slot, q_parity = _slot_of_q(done, G, GROUPS)
    q = q_smem.index(q_slot).reshape([WG, D])
    zeros = gl.zeros([WG, BLOCK_N], gl.float32, s_layout)
    # HALVE: the first half of the queries sees nothing of the diagonal's second half of the keys
    MET: gl.constexpr = WG if HALVE and G == 0 else BLOCK_N
    met_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MET, 16])
    acc = accumulators(D, REST)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    slot = t % STAGES
    mbarrier.wait(q_full.index(q_slot), q_parity)
    mbarrier.wait(full.index(slot), (t // STAGES) & 1)
    met_k = k_smem.index(slot).reshape([BLOCK_N, D]).slice(0, MET, 0)
    met = mma_over_columns(q, met_k, gl.zeros([WG, MET], gl.float32, met_layout), REST)
    if IN_PLACE:
        _free_last(q_empty, done, G, GROUPS)
    met = warpgroup_mma_wait(0, deps=(met,))
    mbarrier.arrive(empty.index(slot), count=1)
    row_max, row_sum, p32 = first_softmax(met, first_query, (steps - 1) * BLOCK_N, num_keys, c, IS_CAUSAL)
    if MET < BLOCK_N:
        # p32 * 0.0, not zeros: for constants the assembler would set registers while matmuls run, and serialize these
        p32 = gl.join(p32, p32 * 0.0).permute((0, 2, 1)).reshape([WG, BLOCK_N])
        row_max = gl.convert_layout(row_max, s_rows, assert_trivial=True)
        row_sum = gl.convert_layout(row_sum, s_rows, assert_trivial=True)
    p = gl.convert_layout(p32.to(DTYPE), p_layout, assert_trivial=True)

    for _ in range(steps - 1):
        t += 1
        slot = t % STAGES
        parity = (t // STAGES) & 1
        k = k_smem.index(slot).reshape([BLOCK_N, D])
        v = v_smem.index(t % STAGES).reshape([BLOCK_N, D])
        mbarrier.wait(full.index(slot), parity)
        if OVERLAP:  # the softmax of this tile overlaps the matmul of the last one
            s = mma_over_columns(q, k, zeros, REST)
            acc = [mma_of_part(p, v, x) for x in acc]
            s = warpgroup_mma_wait(PARTS, deps=(s,))
            row_max, row_sum, alpha, new_p = softmax_step(s, row_max, row_sum, c, p_layout, DTYPE, LAZY)
            # complete long ago; a wait ends the basic block, without which ptxas would move the next line up
            mbarrier.wait(full.index(slot), parity)
            acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
            mbarrier.arrive(empty.index(slot), count=1)
            p = new_p
        else:
            acc = [mma_of_part(p, v, x) for x in acc]
            if GROUPS == 3 and D == 128:  # in turn: registers do not suffice for both at once
                acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
            s = mma_over_columns(q, k, zeros, REST)
            acc, s = wait_for_both(0, acc, s)
            mbarrier.arrive(empty.index(slot), count=1)
            row_max, row_sum, alpha, p = softmax_step(s, row_max, row_sum, c, p_layout, DTYPE, LAZY)
        acc = [times_rows(x, alpha, LAZY) for x in acc]

    if done is not None and not IN_PLACE:
        mbarrier.arrive(q_empty.index(q_slot), count=1)
    t += 1
    slot = t % STAGES
    mbarrier.wait(full.index(slot), (t // STAGES) & 1)
    v = v_smem.index(t % STAGES).reshape([BLOCK_N, D])
    acc = [mma_of_part(p, v, x) for x in acc]
    logsumexp = (row_max * c + gl.log2(row_sum)) * LN_2
    gl.store(l_ptr + head.to(gl.int64) * num_queries + queries, logsumexp, mask=queries < num_queries)
    share = 1.0 / row_sum
    acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
    if done is not None:
        mbarrier.arrive(empty.index(slot), count=1)
        if not IN_PLACE:
            tma.store_wait(0)  # O of the tile before has left
    acc = [times_rows(x, share) for x in acc]
    o_slot = q_slot if IN_PLACE else G
    store_parts(acc, o_smem.index(o_slot).reshape([WG, D]))
    fence_async_shared()
    async_store(o_desc, [head // heads, head % heads, first_query, 0], o_smem.index(o_slot))


@gluon.jit
def _forward_share(o_desc, l_ptr, tiles, barriers, sizes, c, first_of_tile, end, head, done, begun,
                   IS_CAUSAL: gl.constexpr, G: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
                   D: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, REST: gl.constexpr,
                   HALVE: gl.constexpr):  # fmt: skip
    """`_forward_tile`, if the tile has queries for this group; otherwise the group lets the others go on. Returns how
    many tiles of keys have begun then."""
    q_full, full, empty, q_empty = barriers
    IN_PLACE: gl.constexpr = tiles[3].shape[0] > GROUPS
    steps = key_tiles(first_of_tile, GROUPS * WG, sizes[6], IS_CAUSAL, BLOCK_N)
    if first_of_tile + G * WG < end:
        _forward_tile(o_desc, l_ptr, tiles, barriers, sizes, c, first_of_tile, head, done, begun, IS_CAUSAL, G, GROUPS,
                      BLOCK_N, D, STAGES, OVERLAP, REST, HALVE)  # fmt: skip
    else:
        q_slot, q_parity = _slot_of_q(done, G, GROUPS)
        mbarrier.wait(q_full.index(q_slot), q_parity)
        if IN_PLACE:
            _free_last(q_empty, done, G, GROUPS)
        elif done is not None:
            mbarrier.arrive(q_empty.index(q_slot), count=1)
        for t in range(begun, begun + steps + 1):
            mbarrier.wait(full.index(t % STAGES), (t // STAGES) & 1)
            mbarrier.arrive(empty.index(t % STAGES), count=1)
    return begun + steps + 1


@gluon.jit
def _forward_group(o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL: gl.constexpr, G: gl.constexpr,
                   GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                   OVERLAP: gl.constexpr, REST: gl.constexpr, PERSISTENT: gl.constexpr,
                   HALVE: gl.constexpr):  # fmt: skip
    """64 queries of this program's tile, or of all its tiles."""
    if PERSISTENT:
        done = 0
        begun = 0
        for item in range(gl.program_id(0), _items(sizes, IS_CAUSAL), gl.num_programs(0)):
            for second in range(2 if IS_CAUSAL else 1):
                first, end, head, there = _tile_of(item, second, sizes, IS_CAUSAL, GROUPS, PERSISTENT)
                if there:
                    begun = _forward_share(o_desc, l_ptr, tiles, barriers, sizes, c, first, end, head, done, begun,
                                           IS_CAUSAL, G, GROUPS, BLOCK_N, D, STAGES, OVERLAP, REST, HALVE)  # fmt: skip
                    done += 1
    else:
        first, end, head, there = _tile_of(gl.program_id(0), 0, sizes, IS_CAUSAL, GROUPS, PERSISTENT)
        _forward_share(o_desc, l_ptr, tiles, barriers, sizes, c, first, end, head, None, 0, IS_CAUSAL, G, GROUPS,
                       BLOCK_N, D, STAGES, OVERLAP, REST, HALVE)  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "full_tiles", "row_tiles", "num_queries",
                              "num_keys"])  # fmt: skip
def forward_kernel(q_desc, k_desc, v_desc, o_desc, l_ptr, heads, batch_heads, section, full_tiles, row_tiles,
                   num_queries, num_keys, c, IS_CAUSAL: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
                   D: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, REST: gl.constexpr,
                   PERSISTENT: gl.constexpr, HALVE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and L of a tile of queries of one head, or, PERSISTENT, of many. Without a mask `full_tiles` of a head's
    `row_tiles` have GROUPS · 64 queries, the others 64; with a mask all have GROUPS · 64. Grid: (row_tiles ·
    batch_heads,) or, PERSISTENT, any. HALVE (BLOCK_N = 128, num_keys ≥ num_queries): of the tile of keys on the
    diagonal the first of two groups computes scores of the first half only; P of the other half is zero."""
    dtype: gl.constexpr = q_desc.dtype
    Q_TILES: gl.constexpr = 2 * GROUPS if PERSISTENT else GROUPS  # the next one comes while one is read
    q_smem = gl.allocate_shared_memory(dtype, [Q_TILES, 1, 1, WG, D], q_desc.layout)
    o_smem = q_smem
    if not (PERSISTENT and GROUPS == 3 and D == 128):  # otherwise there is no room
        o_smem = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, WG, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = q_full
    if PERSISTENT:
        q_empty = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], barrier)
    for i in gl.static_range(Q_TILES):
        mbarrier.init(q_full.index(i), count=1)
        if PERSISTENT:
            mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()  # the TMA unit sees them initialized
    tiles = (q_smem, k_smem, v_smem, o_smem)
    barriers = (q_full, full, empty, q_empty)
    sizes = (heads, batch_heads, section, full_tiles, row_tiles, num_queries, num_keys)
    # a tuple of arguments that is made before the call loses its constants
    if GROUPS == 3:
        gl.warp_specialize([
            (_forward_group, (o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL, 0, GROUPS, BLOCK_N, D, STAGES,
                              OVERLAP, REST, PERSISTENT, HALVE)),
            (_forward_group, (o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL, 1, GROUPS, BLOCK_N, D, STAGES,
                              OVERLAP, REST, PERSISTENT, HALVE)),
            (_forward_group, (o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL, 2, GROUPS, BLOCK_N, D, STAGES,
                              OVERLAP, REST, PERSISTENT, HALVE)),
            (_forward_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, IS_CAUSAL, GROUPS, BLOCK_N, D, STAGES,
                                 PERSISTENT)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    elif GROUPS == 1:
        # two programs fit a multiprocessor, if a thread has no more than 128 registers on average
        gl.warp_specialize([
            (_forward_group, (o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL, 0, GROUPS, BLOCK_N, D, STAGES,
                              OVERLAP, REST, PERSISTENT, HALVE)),
            (_forward_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, IS_CAUSAL, GROUPS, BLOCK_N, D, STAGES,
                                 PERSISTENT)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_forward_group, (o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL, 0, GROUPS, BLOCK_N, D, STAGES,
                              OVERLAP, REST, PERSISTENT, HALVE)),
            (_forward_group, (o_desc, l_ptr, tiles, barriers, sizes, c, IS_CAUSAL, 1, GROUPS, BLOCK_N, D, STAGES,
                              OVERLAP, REST, PERSISTENT, HALVE)),
            (_forward_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, IS_CAUSAL, GROUPS, BLOCK_N, D, STAGES,
                                 PERSISTENT)),
        ], [4, 1], [240, 24])  # fmt: skip
