"""Forward: GROUPS · 64 queries at a time, keys from the right end to the left (algorithm 1 of FlashAttention-2):

    s = Q Kᵀ                             line 8, of a tile of keys; not scaled: S = scale · s
    m = max(m, rowmax(s))                line 9, in units of s
    P = exp2(scale_log2 · (s − m))       scale_log2 = scale · log2(e); P goes to 16 bits in registers
    ℓ = α ℓ + rowsum(P)                  α = exp2(scale_log2 · (m_before − m))
    O = α O + P V                        line 10
    O / ℓ, L = scale · m + log ℓ         lines 12 and 13, L by way of log2

Tiles of keys begin at multiples of 64, as groups of queries do, and are as long or longer: the diagonal of a group's
64 queries lies in one tile, its first, and this alone needs a mask (`first_softmax`). What lies to the right of the
last group's diagonal is not loaded (`Keys.tiles`); the other groups let what they do not see go by. So with a limit:
what lies to the left of the first group's is not loaded (`Keys.first_tile`), and a group masks the tiles in which its
queries' windows, or the document of its last query, begin, and those before (`Keys.limited`); a row may see nothing of
these, but has seen a key before.

The groups of a program read the same tiles of K and V: the more there are, the less often a tile is loaded, and the
fewer registers a thread has. They do not synchronize with each other, and that is the point: while one waits for a
matmul, the softmax of another keeps the arithmetic units busy, and vice versa. With OVERLAP a group also does so by
itself. A producer's warp loads their tiles (`forward_alone` has programs without a producer).

A PERSISTENT program takes tiles of queries one after another: the producer runs ahead as far as the rings have room, so
that Q and the first K of the next one arrive during the last matmuls of this one. With a causal mask it takes them in
pairs that have the same work. Without one, small tiles even out what multiprocessors get: 64 queries, for one group,
which take about half as long.
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
    Ring,
    accumulator,
    accumulators,
    aggregate,
    async_store,
    barriers,
    mma_layout,
    mma_of_part,
    mma_over_columns,
    store_parts,
    times_rows,
    wait_for_both,
)
from cs336_systems.attention.hopper.forward_state import (
    Keys,
    KVRing,
    QueryTiles,
    TileScheduler,
    first_softmax,
)


@aggregate
class Program:
    """What all warps of a program share. OVERLAP: see `configs.Forward`; REST: `common`; HALVE: `forward_kernel`."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    l_ptr: gl.tensor
    queries: QueryTiles
    kv: KVRing
    scheduler: TileScheduler
    keys: Keys
    scale_log2: gl.tensor
    OVERLAP: gl.constexpr
    REST: gl.constexpr
    HALVE: gl.constexpr


@gluon.jit
def _load_tile(program, first_query, head, done, uses):
    """Q of a tile of queries, and all its tiles of K and V. A persistent program has had `done` tiles of queries
    before, with `uses` uses of the ring; the new number of these is returned."""
    scheduler, keys = program.scheduler, program.keys
    b, h = head // scheduler.heads, head % scheduler.heads
    kv_head = h // scheduler.HEADS_PER_KV
    for g in gl.static_range(scheduler.GROUPS):
        program.queries.load(program.q_desc, b, h, first_query, done, g)
    end = keys.tiles(first_query, scheduler.GROUPS * WG)
    BEGUN: gl.constexpr = 1 if keys.LIMITED else 0
    if BEGUN:  # the first K need not wait until bounds have been read
        program.kv.load(program.k_desc, program.v_desc, b, kv_head, uses, 0, 1, end)
    steps = end - keys.first_tile(first_query)
    for t in range(BEGUN, steps + 1):
        program.kv.load(program.k_desc, program.v_desc, b, kv_head, uses, t, steps, end)
    return uses + steps + 1


@gluon.jit
def _producer(program):
    scheduler = program.scheduler
    if scheduler.PERSISTENT:
        done = 0
        uses = 0
        for item in range(gl.program_id(0), scheduler.items(), gl.num_programs(0)):
            for second in range(2 if scheduler.UNEVEN else 1):
                first, _, head, there = scheduler.tile(item, second)
                if there:
                    uses = _load_tile(program, first, head, done, uses)
                    done += 1
    else:
        first, _, head, _ = scheduler.tile(gl.program_id(0), 0)
        _load_tile(program, first, head, None, 0)


@gluon.jit
def _attend(program, first_of_tile, head, done, uses, G: gl.constexpr):
    """64 queries of a tile, those of group G: the online softmax over their keys, then O and L. `done` and `uses` as
    for `_load_tile`."""
    queries, kv, scheduler, keys = program.queries, program.kv, program.scheduler, program.keys
    scale_log2 = program.scale_log2
    GROUPS: gl.constexpr = scheduler.GROUPS
    BLOCK_N: gl.constexpr = kv.BLOCK_N
    D: gl.constexpr = kv.D
    REST: gl.constexpr = program.REST
    s_rows: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK_N))
    MMAS: gl.constexpr = 2 if REST else 1  # that P V takes
    LAZY: gl.constexpr = D == 128 and not REST  # with fewer columns there is less to rescale than to decide
    DTYPE: gl.constexpr = queries.q.dtype

    first_query = first_of_tile + G * WG
    rows = first_query + gl.arange(0, WG, s_rows)
    end_of_tile = keys.tiles(first_of_tile, GROUPS * WG)
    end = keys.tiles(first_query, WG)
    # not before the tile's, also where cu_seqlens falls: groups and producer must count the same
    begin_of_tile = keys.first_tile(first_of_tile)
    begin = gl.maximum(keys.first_tile(first_query), begin_of_tile)
    unlimited = keys.unlimited(first_query)

    t = uses
    for _ in range(end_of_tile - end):  # tiles to the right of this group's diagonal are for the other groups
        kv.slots.skip(t)
        t += 1

    q_slot, q_parity = queries.slot_and_parity(done, G)
    q = queries.q.index(q_slot).reshape([WG, D])
    zeros = accumulator(BLOCK_N)
    # HALVE: the first half of the queries sees nothing of the diagonal's second half of the keys
    MET: gl.constexpr = WG if program.HALVE and G == 0 else BLOCK_N
    acc = accumulators(D, REST)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    slot = t % kv.slots.STAGES
    queries.wait(q_slot, q_parity)
    kv.slots.wait(t)
    met = mma_over_columns(q, kv.k_tile(slot).slice(0, MET, 0), accumulator(MET), REST)
    if queries.IN_PLACE:
        queries.release_previous(done, G)
    met = warpgroup_mma_wait(0, deps=(met,))
    kv.slots.release(t)
    first_key = (end - 1) * BLOCK_N
    met = keys.limited(met, first_query, first_key, unlimited)
    softmax, p32 = first_softmax(keys, met, first_query, first_key, scale_log2)
    if MET < BLOCK_N:
        # p32 * 0.0, not zeros: for constants the assembler would set registers while matmuls run, and serialize these
        p32 = gl.join(p32, p32 * 0.0).permute((0, 2, 1)).reshape([WG, BLOCK_N])
        softmax = softmax.in_layout(s_rows)
    p = gl.convert_layout(p32.to(DTYPE), p_layout, assert_trivial=True)

    for _ in range(end - 1 - begin):
        t += 1
        if keys.LIMITED:
            first_key -= BLOCK_N
        slot, parity = kv.slots.slot_and_parity(t)
        k = kv.k_tile(slot)
        v = kv.v_tile(slot)
        mbarrier.wait(kv.slots.full.index(slot), parity)
        if program.OVERLAP:  # the softmax of this tile overlaps the matmul of the last one
            s = mma_over_columns(q, k, zeros, REST)
            acc = [mma_of_part(p, v, x) for x in acc]
            s = warpgroup_mma_wait(MMAS, deps=(s,))
            s = keys.limited(s, first_query, first_key, unlimited)
            softmax, alpha, new_p = softmax.step(s, scale_log2, p_layout, DTYPE, LAZY)
            # complete long ago; a wait ends the basic block, without which ptxas would move the next line up
            mbarrier.wait(kv.slots.full.index(slot), parity)
            acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
            kv.slots.release(t)
            p = new_p
        else:
            acc = [mma_of_part(p, v, x) for x in acc]
            if GROUPS == 3 and D == 128:  # in turn: registers do not suffice for both at once
                acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
            s = mma_over_columns(q, k, zeros, REST)
            acc, s = wait_for_both(0, acc, s)
            kv.slots.release(t)
            s = keys.limited(s, first_query, first_key, unlimited)
            softmax, alpha, p = softmax.step(s, scale_log2, p_layout, DTYPE, LAZY)
        acc = [times_rows(x, alpha, LAZY) for x in acc]

    if done is not None and not queries.IN_PLACE:
        queries.release(q_slot)
    t += 1
    slot = t % kv.slots.STAGES
    kv.slots.wait(t)
    v = kv.v_tile(slot)
    acc = [mma_of_part(p, v, x) for x in acc]
    num_queries = scheduler.num_queries
    logsumexp = softmax.logsumexp(scale_log2)
    gl.store(program.l_ptr + head.to(gl.int64) * num_queries + rows, logsumexp, mask=rows < num_queries)
    share = 1.0 / softmax.row_sum
    acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
    if done is not None or keys.LIMITED:  # otherwise nothing is loaded any more
        kv.slots.release(t)
        if done is not None and not queries.IN_PLACE:
            tma.store_wait(0)  # O of the tile before has left
    acc = [times_rows(x, share) for x in acc]
    o = queries.o.index(q_slot if queries.IN_PLACE else G)
    store_parts(acc, o.reshape([WG, D]))
    fence_async_shared()
    async_store(program.o_desc, [head // scheduler.heads, head % scheduler.heads, first_query, 0], o)
    for _ in range(begin - begin_of_tile):  # those that its queries do not see any more, too
        t += 1
        kv.slots.skip(t)


@gluon.jit
def _share(program, first_of_tile, end, head, done, uses, G: gl.constexpr):
    """`_attend`, if the tile has queries for this group; otherwise the group lets the others go on. Returns the new
    number of uses of the ring."""
    queries, scheduler, keys = program.queries, program.scheduler, program.keys
    end_of_keys = keys.tiles(first_of_tile, scheduler.GROUPS * WG)
    steps = end_of_keys - keys.first_tile(first_of_tile)
    if first_of_tile + G * WG < end:
        _attend(program, first_of_tile, head, done, uses, G)
    else:
        q_slot, q_parity = queries.slot_and_parity(done, G)
        queries.wait(q_slot, q_parity)
        if queries.IN_PLACE:
            queries.release_previous(done, G)
        elif done is not None:
            queries.release(q_slot)
        for t in range(uses, uses + steps + 1):
            program.kv.slots.skip(t)
    return uses + steps + 1


@gluon.jit
def _group(program, G: gl.constexpr):
    """64 queries of this program's tile, or of all its tiles."""
    scheduler = program.scheduler
    if scheduler.PERSISTENT:
        done = 0
        uses = 0
        for item in range(gl.program_id(0), scheduler.items(), gl.num_programs(0)):
            for second in range(2 if scheduler.UNEVEN else 1):
                first, end, head, there = scheduler.tile(item, second)
                if there:
                    uses = _share(program, first, end, head, done, uses, G)
                    done += 1
    else:
        first, end, head, _ = scheduler.tile(gl.program_id(0), 0)
        _share(program, first, end, head, None, 0, G)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "full_tiles", "row_tiles", "num_queries",
                              "num_keys", "limit"])  # fmt: skip
def forward_kernel(q_desc, k_desc, v_desc, o_desc, l_ptr, limit, heads, batch_heads, section, full_tiles, row_tiles,
                   num_queries, num_keys, scale_log2, IS_CAUSAL: gl.constexpr, GROUPS: gl.constexpr,
                   BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
                   REST: gl.constexpr, PERSISTENT: gl.constexpr, HALVE: gl.constexpr,
                   HEADS_PER_KV: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and L of a tile of queries of one head, or, PERSISTENT, of many (see `TileScheduler`). Grid: (row_tiles ·
    batch_heads,) or, PERSISTENT, any. HALVE (BLOCK_N = 128, num_keys ≥ num_queries): of the tile of keys on the
    diagonal the first of two groups computes scores of the first half only; P of the other half is zero."""
    dtype: gl.constexpr = q_desc.dtype
    Q_TILES: gl.constexpr = 2 * GROUPS if PERSISTENT else GROUPS
    IN_PLACE: gl.constexpr = PERSISTENT and GROUPS == 3 and D == 128
    q_smem = gl.allocate_shared_memory(dtype, [Q_TILES, 1, 1, WG, D], q_desc.layout)
    o_smem = q_smem
    if not IN_PLACE:
        o_smem = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, WG, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    q_full, full, empty = barriers(Q_TILES, 1), barriers(STAGES, 1), barriers(STAGES, GROUPS)
    q_empty = barriers(Q_TILES, 1) if PERSISTENT else q_full
    fence_async_shared()  # the TMA unit sees them initialized
    queries = QueryTiles(q_smem, o_smem, q_full, q_empty, GROUPS, IN_PLACE, D)
    kv = KVRing(k_smem, v_smem, Ring(full, empty, STAGES), BLOCK_N, D)
    LIMITED: gl.constexpr = limit is not None
    UNEVEN: gl.constexpr = IS_CAUSAL and (limit is None or limit.dtype.is_ptr())
    scheduler = TileScheduler(heads, batch_heads, section, full_tiles, row_tiles, num_queries, UNEVEN, GROUPS,
                              PERSISTENT, HEADS_PER_KV)  # fmt: skip
    keys = Keys(num_keys, limit if LIMITED else num_keys, LIMITED, IS_CAUSAL, BLOCK_N)
    program = Program(q_desc, k_desc, v_desc, o_desc, l_ptr, queries, kv, scheduler, keys, scale_log2, OVERLAP, REST,
                      HALVE)  # fmt: skip
    # functions and their arguments; of all but the first, which has the four warps of the launch: warps, and registers
    if GROUPS == 3:
        gl.warp_specialize([(_group, (program, 0)), (_group, (program, 1)), (_group, (program, 2)),
                            (_producer, (program,))], [4, 4, 1], [160, 160, 32])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([(_group, (program, 0)), (_group, (program, 1)), (_producer, (program,))],
                           [4, 1], [240, 24])  # fmt: skip
    else:  # two programs fit a multiprocessor, if a thread has no more than 128 registers on average
        gl.warp_specialize([(_group, (program, 0)), (_producer, (program,))], [1], [24])
