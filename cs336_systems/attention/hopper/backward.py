"""Backward: 128 keys at a time, two groups of 64, and all queries that see them (algorithm 2 of FlashAttention-2, its
line in brackets). Scores are keys by queries, so that Pᵀ and dSᵀ, where dV and dK need them, stay in registers:

    sᵀ = K Qᵀ                                       (10) not scaled
    Pᵀ = exp2(scale_log2 · sᵀ − L · log2(e))        (11) scale_log2 = scale · log2(e)
    dV += Pᵀ dO                                     (12)
    dPᵀ = V dOᵀ                                     (13)
    dSᵀ = Pᵀ ∘ (dPᵀ − delta)                        (14) without its factor scale: dK gets that when written, dQ at last
    dQ += dS K                                      (15) dSᵀ of both groups, from shared memory
    dK += dSᵀ Q                                     (16)

dK and dV of 64 keys are in a group's registers until all queries have passed, and are written once. dQ of a tile of
queries is a sum over programs, to which TMA adds what each has, in fp32, in global memory. So all five matmuls run
once, against seven in the two passes of `attention.triton`; in exchange the order of additions, and dQ's last bits,
differ from run to run (`backward_dq` says how the sum begins): where torch wants deterministic algorithms the portable
kernels compute. Small kernels before and after this one make the statistics, and dQ of the sum (`backward_ends`).

dQ of a tile is computed at D = 64 by a third group (`_dq_group`), at D = 128, where registers do not suffice for one,
in halves of its columns by both groups, a tile later (`backward_steps.late_dq`). A warp adds it (`backward_dq.dq_warp`)
or, where there are zeros to add to (ZEROED), the third group.

There are at most as many programs as multiprocessors, and each takes tiles of keys, one after another, until none is
left. So the first queries of the next tile, and at D = 64, where shared memory has room for two, its K and V arrive
while the matmuls of this one run, and dK and dV leave while those of the next one run. Which tile comes next the
producer draws from a counter, and others learn of it with K: a program that shares its multiprocessor with another
kernel takes fewer. In all warps `item` is what was drawn, `turn` counts the program's tiles of keys, `t` those of
queries: slots and parities come from these.

At D = 64 queries come from the diagonal on. At D = 128 they come from the last to the diagonal: all keys of a head
begin with the same queries, so that those that begin later hardly wait for the first keys (`backward_dq`). Queries
before the diagonal are not loaded (`TileScheduler.first_of`), those on it are masked (`_group`: masked_end). So with a
limit: queries past the last one that sees a key are not loaded (`end_of`), and those that see some of a group's keys,
or none, are masked (unmasked_end).
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

from cs336_systems.attention.hopper.backward_dq import DQ_COLUMNS, DQ_ROWS, add_tile, dq_warp, put_dq
from cs336_systems.attention.hopper.backward_state import (
    BLOCK_M,
    GradientTiles,
    KVTiles,
    Program,
    QueryRing,
    TileScheduler,
)
from cs336_systems.attention.hopper.backward_steps import late_dq, late_step, no_key_seen, step, zero
from cs336_systems.attention.hopper.common import (
    WG,
    accumulator,
    accumulators,
    async_load,
    async_store,
    barriers,
    columns_in_registers,
    mma_layout,
    query_ends,
    reinterpreted,
    store_parts,
)


@gluon.jit
def _producer(program):
    """Draws tiles of keys, and loads them and the queries that see them."""
    kv, scheduler = program.kv, program.scheduler
    BUFFERS: gl.constexpr = kv.BUFFERS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    gdc_wait()  # for the kernel before this one; the one after it may take the place of programs that have ended
    gdc_launch_dependents()
    # not program_id: programs may begin in any order, or late
    item = gl.atomic_add(program.counters_ptr, 1, sem="relaxed")
    turn = 0
    t = 0
    while item < scheduler.items():
        slot = turn % BUFFERS
        free = ((turn // BUFFERS) & 1) ^ 1
        tile, head = scheduler.locate(item)
        b, h = head // scheduler.heads, head % scheduler.heads
        kv_h = h // scheduler.HEADS_PER_KV
        first_key = tile * 2 * WG
        first, end = scheduler.first_of(tile), scheduler.end_of(tile)
        if first < scheduler.query_tiles:  # before K and V, whose place may be taken for longer
            program.load_queries(b, h, head, scheduler.nth_of(first, end, 0), t)
        mbarrier.wait(kv.k_empty.index(slot), free)
        kv.drawn.index(slot).store(gl.full([1], item, gl.int32, layout))
        mbarrier.expect(kv.k_full.index(slot), 2 * WG * kv.D * 2)
        async_load(program.k_desc, [b, kv_h, first_key, 0], kv.k_full.index(slot), kv.k.index(slot))
        mbarrier.wait(kv.v_empty.index(slot), free)
        full = kv.v_full.index(slot)
        mbarrier.expect(full, 2 * WG * kv.D * 2)
        for g in gl.static_range(2):
            async_load(program.v_desc, [b, kv_h, first_key + g * WG, 0], full, kv.v.index(2 * slot + g))
        for n in range(1, end - first):
            program.load_queries(b, h, head, scheduler.nth_of(first, end, n), t + n)
        t += end - first
        turn += 1
        item = gl.atomic_add(program.counters_ptr, 1, sem="relaxed")
    # no tile is left: the number past the last tells the others, with no K
    slot = turn % BUFFERS
    mbarrier.wait(kv.k_empty.index(slot), ((turn // BUFFERS) & 1) ^ 1)
    kv.drawn.index(slot).store(gl.full([1], item, gl.int32, layout))
    mbarrier.arrive(kv.k_full.index(slot), count=1)


@gluon.jit
def _store_results(program, dk, dv, at, G: gl.constexpr):
    """At D = 64: a group's dV and dK, which leave from tiles of their own."""
    dk_tile = program.results.index(2 * G)
    dv_tile = program.results.index(2 * G + 1)
    tma.store_wait(0)  # the results before have left
    store_parts(dv, dv_tile.reshape([WG, 64]))
    store_parts([x * program.scale for x in dk], dk_tile.reshape([WG, 64]))
    fence_async_shared()
    async_store(program.dv_desc, at, dv_tile)
    async_store(program.dk_desc, at, dk_tile)


@gluon.jit
def _end(program, dk, dv, at, first, t, G: gl.constexpr):
    """At D = 128: a group's half of dQ of the last tile, the t-th, then its dV and dK, which leave from the places of V
    and of dQ."""
    kv, gradients = program.kv, program.gradients
    dq = late_dq(program, t, G)
    store_parts(dv, kv.v.index(G).reshape([WG, kv.D]))
    fence_async_shared()
    async_store(program.dv_desc, at, kv.v.index(G))
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(kv.k_empty.index(0), count=1)
    if first < program.scheduler.query_tiles:
        put_dq(dq, gradients, G, t)
        mbarrier.wait(gradients.dq_empty.index(G), t & 1)  # dQ has left
    tma.store_wait(0)
    mbarrier.arrive(kv.v_empty.index(0), count=1)
    store_parts([x * program.scale for x in dk], program.results.index(G).reshape([WG, kv.D]))
    fence_async_shared()
    async_store(program.dk_desc, at, program.results.index(G))


@gluon.jit
def _all_queries(program, slot, first_key, ends, keys_t, p, dk, dv, G: gl.constexpr):
    """At D = 64: what all tiles of queries, the program's from the keys_t-th on, add to dK and dV. ends: where tiles
    begin, then those that need no mask, then with a limit those that do, and where all end."""
    first, end = ends[0], ends[3]
    dk, dv = dk[0], dv[0]
    for part in gl.static_range(3 if program.scheduler.LIMITED else 2):
        for i in range(ends[part], ends[part + 1]):
            t = keys_t + i - first
            k = program.kv.k_of(slot + zero(t), G)
            v = program.kv.v.index(2 * slot + G + zero(t)).reshape([WG, program.kv.D])
            p, dk, dv = step(program, k, v, first_key, i, end, t, p, dk, dv, part != 1, G)
    return p, (dk,), (dv,)


@gluon.jit
def _all_queries_late(program, first_key, first, group_first, end, masked, unmasked, keys_t, s, v, dk, dv,
                      SKIPS: gl.constexpr, G: gl.constexpr):  # fmt: skip
    """The same at D = 128, from the last tile to the first: with a limit `masked` tiles, up to the unmasked-th without
    a mask, and the others."""
    begins = 0, masked, unmasked
    for part in gl.static_range(0 if program.scheduler.LIMITED else 1, 3):
        for n in range(begins[part], begins[part + 1] if part < 2 else end - group_first):
            i = end - 1 - n
            s, dk, dv = late_step(
                program, first_key, i, keys_t + n, keys_t, i > group_first, s, v, dk, dv, part != 1, G
            )
    if SKIPS:  # noqa: SIM102 (known at compile time, the next one is not)
        if first < end:
            no_key_seen(program, keys_t + end - 1 - first, keys_t, G)
    return s, dk, dv


@gluon.jit
def _begin(program, turn, t, SKIPS: gl.constexpr, G: gl.constexpr):
    """The turn-th tile of keys, once K is there: its number, (tile, head), the first tiles of queries that see any of
    its keys and any of this group's; and, issued, the scores of the t-th tile of queries."""
    scheduler = program.scheduler
    item = program.kv.wait_for_item(turn, 4)
    tile, head = scheduler.locate(gl.minimum(item, scheduler.items() - 1))
    first = scheduler.first_of(tile)
    group_first = first
    if SKIPS:
        group_first = gl.minimum(first + 1, scheduler.query_tiles)
    more = (item < scheduler.items()) & (group_first < scheduler.query_tiles)
    s = program.queries.scores(program.kv.k_of(turn % program.kv.BUFFERS, G), t, more)
    return item, tile, head, first, group_first, s


@gluon.jit
def _group(program, G: gl.constexpr):
    """dK and dV of 64 of the 128 keys of each tile."""
    kv, scheduler = program.kv, program.scheduler
    BUFFERS: gl.constexpr = kv.BUFFERS
    D: gl.constexpr = kv.D
    REST: gl.constexpr = program.REST
    IS_CAUSAL: gl.constexpr = scheduler.IS_CAUSAL
    # the first tile of queries sees no key of this group
    SKIPS: gl.constexpr = IS_CAUSAL and G == 1 and D == 128
    # queries that meet the diagonal of this group's keys, from the tile's first key on
    meeting: gl.constexpr = (G + 1 if D == 128 else 2) * WG
    turn = 0
    keys_t = 0  # tiles of queries before those of this tile of keys
    item, tile, head, first, group_first, s = _begin(program, turn, keys_t, SKIPS, G)
    s = warpgroup_mma_wait(0, deps=(s,))
    if D == 64:
        p = program.probabilities(s, tile * 2 * WG, first, keys_t, True, G)
    while item < scheduler.items():
        slot = turn % BUFFERS
        first_key = tile * 2 * WG
        end = scheduler.end_of(tile)
        # tiles of queries before this one need a mask
        masked_end = 0
        if IS_CAUSAL:
            masked_end = gl.minimum(first + meeting // BLOCK_M, end)
        if first_key + 2 * WG > scheduler.num_keys:  # P of a key that is not there, exp(−L), may be infinite
            masked_end = end
        unmasked_end = end
        if scheduler.LIMITED:
            unmasked_end = query_ends(first_key + G * WG, scheduler.num_keys, scheduler.limit) // BLOCK_M
            unmasked_end -= 1 if D == 64 else 0  # where it is P of the next tile that a step masks
            unmasked_end = gl.minimum(gl.maximum(unmasked_end, masked_end), end)
        dk = accumulators(D, REST)
        dv = accumulators(D, REST)
        mbarrier.wait(kv.v_full.index(slot), (turn // BUFFERS) & 1)
        if D == 128:
            tma.store_wait(0)  # dK has left the place of dQ
        unmasked = end - masked_end
        v = ()
        if D == 128 and (REST or not IS_CAUSAL):
            v = columns_in_registers(kv.v.index(G).reshape([WG, D]), mma_layout(BLOCK_M), REST)
        if D == 64:
            ends = first, masked_end, unmasked_end, end
            p, dk, dv = _all_queries(program, slot, first_key, ends, keys_t, p, dk, dv, G)
        else:
            s, dk, dv = _all_queries_late(program, first_key, first, group_first, end, end - unmasked_end, unmasked,
                                          keys_t, s, v, dk, dv, SKIPS, G)  # fmt: skip
        keys_t += end - first
        turn += 1
        at = [head // scheduler.heads, head % scheduler.heads, first_key + G * WG, 0]
        if D == 64:
            mbarrier.arrive(kv.k_empty.index(slot), count=1)
            mbarrier.arrive(kv.v_empty.index(slot), count=1)
        else:
            _end(program, dk, dv, at, first, keys_t - 1, G)
        item, tile, head, first, group_first, s = _begin(program, turn, keys_t, SKIPS, G)
        if D == 64:  # beside that matmul
            _store_results(program, dk, dv, at, G)
        s = warpgroup_mma_wait(0, deps=(s,))
        if D == 64:
            p = program.probabilities(s, tile * 2 * WG, first, keys_t, True, G)
    tma.store_wait(0)


@gluon.jit
def _dq_group(program):
    """dQᵀ = Kᵀ dSᵀ of each tile of queries, while the other groups go on. Kᵀ stays in registers. ZEROED: this group
    also adds it to the sum; otherwise `dq_warp` does."""
    kv, gradients, scheduler = program.kv, program.gradients, program.scheduler
    D: gl.constexpr = kv.D
    empty = accumulator(BLOCK_M)  # of D = 64 rows
    operand: gl.constexpr = gl.DotOperandLayout(0, empty.type.layout, 2)
    turn = 0
    t = 0
    item = kv.wait_for_item(turn, 4)
    while item < scheduler.items():
        tile, head = scheduler.locate(item)
        k = kv.k.index(turn % kv.BUFFERS).reshape([2 * WG, D]).permute((1, 0)).load(operand)
        mbarrier.arrive(kv.k_empty.index(turn % kv.BUFFERS), count=1)
        for i in range(scheduler.first_of(tile), scheduler.end_of(tile)):
            slot = t & 1
            mbarrier.wait(gradients.ds_full.index(slot), (t // 2) & 1)
            dq = warpgroup_mma(k, gradients.ds.index(slot), empty, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(gradients.ds_empty.index(slot), count=1)
            if program.ZEROED:
                tma.store_wait(1)  # the addition before the last one has read its tile
                add_tile(program.dq_desc, dq, gradients.dq.index(slot), head, i)
            else:
                put_dq(dq, gradients, slot, t // 2)
            t += 1
        turn += 1
        item = kv.wait_for_item(turn, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "key_tiles", "query_tiles", "num_keys",
                              "limit"])  # fmt: skip
def backward_keys_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, stats_desc, counters_ptr, limit,
                         heads, batch_heads, section, key_tiles, query_tiles, num_keys, scale_log2, scale,
                         IS_CAUSAL: gl.constexpr, D: gl.constexpr, DO_STEP: gl.constexpr, REST: gl.constexpr,
                         ZEROED: gl.constexpr, HEADS_PER_KV: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dK and dV of all `batch_heads` heads (see `TileScheduler`), and dQ's sum, by any number of programs: the grid.
    counters_ptr: int32, of drawn tiles, and of reports (see `backward_dq`) for each head; 0 at the start.
    ZEROED: so is dQ's sum."""
    dtype: gl.constexpr = q_desc.dtype
    STAGES: gl.constexpr = 2 if D == 128 else 3  # tiles of queries in flight
    DS_TILES: gl.constexpr = 3 if D == 128 else 2
    BUFFERS: gl.constexpr = 1 if D == 128 else 2  # of K and V
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 2 * WG, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2 * BUFFERS, 1, 1, WG, D], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_TILES, 2 * WG, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, DQ_ROWS, DQ_COLUMNS], dq_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BLOCK_M], stats_desc.layout)
    drawn_smem = gl.allocate_shared_memory(gl.int32, [BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if D == 64:
        results_smem = gl.allocate_shared_memory(dtype, [4, 1, 1, WG, D], dk_desc.layout)
    else:  # 64 rows in 16 bits take as much as 64 x 64 numbers in fp32
        results_smem = reinterpreted(dq_smem, dtype, [2, 1, 1, WG, D], dk_desc.layout)
    # `empty`: who lets go; of K all but the producer (see `KVTiles`)
    k_full, k_empty = barriers(BUFFERS, 1), barriers(BUFFERS, 3 if D == 128 or ZEROED else 4)
    v_full, v_empty = barriers(BUFFERS, 1), barriers(BUFFERS, 2)
    q_full, q_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    do_full, do_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    ds_full = barriers(DS_TILES, 2)
    # where nothing waits for a barrier it is not made (`machine_code.reused_barriers`): another lends its name
    ds_empty = ds_full if D == 128 else barriers(2, 1)
    dq_full, dq_empty = (ds_full, ds_full) if D == 64 and ZEROED else (barriers(2, 1), barriers(2, 1))
    fence_async_shared()
    queries = QueryRing(q_smem, do_smem, stats_smem, q_full, q_empty, do_full, do_empty, BLOCK_M, D, STAGES,
                        REST)  # fmt: skip
    kv = KVTiles(k_smem, v_smem, drawn_smem, k_full, k_empty, v_full, v_empty, D, BUFFERS)
    gradients = GradientTiles(ds_smem, ds_full, ds_empty, dq_smem, dq_full, dq_empty)
    LIMITED: gl.constexpr = limit is not None
    scheduler = TileScheduler(heads, batch_heads, section, key_tiles, query_tiles, num_keys,
                              limit if LIMITED else num_keys, LIMITED, IS_CAUSAL, D, HEADS_PER_KV)  # fmt: skip
    program = Program(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, stats_desc, counters_ptr,
                      counters_ptr + 1, queries, kv, gradients, results_smem, scheduler, scale_log2, scale, DO_STEP,
                      REST, ZEROED)  # fmt: skip
    # as in `forward`: functions, warps, registers
    if D == 128:
        gl.warp_specialize([(_group, (program, 0)), (_group, (program, 1)), (_producer, (program,)),
                            (dq_warp, (program,))], [4, 1, 1], [240, 24, 24])  # fmt: skip
    elif ZEROED:
        gl.warp_specialize([(_group, (program, 0)), (_group, (program, 1)), (_dq_group, (program,)),
                            (_producer, (program,))], [4, 4, 1], [192, 104, 24])  # fmt: skip
    else:
        gl.warp_specialize([(_group, (program, 0)), (_group, (program, 1)), (_dq_group, (program,)),
                            (_producer, (program,)), (dq_warp, (program,))],
                           [4, 4, 1, 1], [192, 104, 24, 24])  # fmt: skip
