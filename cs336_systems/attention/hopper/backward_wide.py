"""Backward of heads with 192 or 256 columns, by the equations of `backward`: what differs is who computes what.

dK and dV of 64 keys are all that registers hold: 64 x 256 numbers in fp32 are 128 registers of each thread of a group.
So one group has dV and one has dK, and a third one makes dQ; P and dS go from group to group through shared memory:

    values group    sᵀ = K Qᵀ, Pᵀ, dV += Pᵀ dO      (10, 11, 12)    scores of the next tile are issued beside dV
    keys group      dPᵀ = V dOᵀ, dSᵀ, dK += dSᵀ Q   (13, 14, 16)    dPᵀ of the next tile is issued beside dK
    queries group   dQ += dS K                      (15)            and loads all tiles: registers and threads of a
                                                                    producer's warps would be lacking elsewhere
None waits for more than what it computes from, so that the exponentials of one run beside matmuls of the others.

Registers of a thread: 128 of dV or dK, 32 of s or dP, 16 of P or dS as an operand: 176 of 208; 32 of 64 columns of dQ
and 16 of dS, of 88. Shared memory at 256 columns: K and V 64 KiB, two stages of Q and dO 128, P and dS 16. That leaves
no room for dQ in fp32, 64: threads add to its sum in global memory, 16 bytes each at a time, where TMA would read a
tile of shared memory, which is busy enough. For a step of 64 keys and 64 queries tensor cores need 2,560 clocks and
shared memory 2,500; L2 gives 64 KiB of Q and dO and takes 64 KiB of dQ, at 5.5 TB/s in 5,500 clocks: that should set
the rate, at 440 TFLOP/s on an H100 or H200 (5.5 TB/s are assumed). Larger tiles of keys would read and add less; at 256
columns they have no place.

Tried on an H200, without a mask and with one: dS as an operand from shared memory takes 3% and 2% more time at 256
columns, 5% and 5% at 192; dQ added by TMA 11% to 13% and 7% to 10% more at 256, 1% less and 5% more at 192; a third
stage of Q and dO, for which there is room at 192, 1% and 2% more.

Blocks are pieces of 64 columns (`forward_wide`); of the third of 160 matmuls leave out the second half, but for dQ's.

A program has one tile of keys, those with the most queries first. It begins with the tile of queries of the same
number: programs side by side add to different tiles of dQ.
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

from cs336_systems.attention.hopper.backward_dq import DQ_COLUMNS, DQ_ROWS
from cs336_systems.attention.hopper.backward_state import probabilities
from cs336_systems.attention.hopper.backward_steps import zero
from cs336_systems.attention.hopper.common import (
    WG,
    Ring,
    accumulator,
    aggregate,
    async_load,
    barriers,
    locate,
    rounded,
    wait_for_both,
    widened,
)
from cs336_systems.attention.hopper.forward_wide import (
    Pieces,
    mma_of_pieces,
    mma_over_pieces,
    piece_accumulators,
)

# the sum of dQ has as many columns, the next power of two: of fewer it is the first part of each tile's numbers
SUM_COLUMNS = gl.constexpr(256)
STAGES = gl.constexpr(2)  # tiles of queries in flight


@aggregate
class Exchange:
    """A tile of 64 keys by 64 queries that one group computes at every step and another one reads."""

    tile: gl.shared_memory_descriptor
    slot: Ring

    @gluon.jit
    def put(self, x, t):
        self.slot.acquire(t)
        self.tile.store(x)
        fence_async_shared()
        mbarrier.arrive(self.slot.full.index(0), count=1)


@aggregate
class QueryRing:
    """Tiles of queries: Q with the statistics of its rows, −L · log2(e) and −delta, and dO. The groups for values and
    for keys release them."""

    q: Pieces
    do: Pieces
    stats: gl.shared_memory_descriptor
    q_slots: Ring
    do_slots: Ring

    @gluon.jit
    def statistic(self, which: gl.constexpr, t, layout: gl.constexpr):
        """−L · log2(e), 0, or −delta, 1, of the t-th tile."""
        return self.stats.index(2 * (t % STAGES) + which).reshape([WG]).load(gl.SliceLayout(0, layout))


@aggregate
class Program:
    """What all warps of a program share. `head` is one of queries (`backward_state.TileScheduler`). DO_STEP: 0 where
    one tile of dO serves all queries."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    stats_desc: tma.tensor_descriptor
    sum_ptr: gl.tensor
    kv: Pieces
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    queries: QueryRing
    p: Exchange
    ds: Exchange
    heads: gl.tensor
    head: gl.tensor
    tile: gl.tensor
    query_tiles: gl.tensor
    num_keys: gl.tensor
    scale_log2: gl.tensor
    scale: gl.tensor
    IS_CAUSAL: gl.constexpr
    DO_STEP: gl.constexpr
    HEADS_PER_KV: gl.constexpr

    @gluon.jit
    def steps(self):
        """How many tiles of queries see a key of this program."""
        if self.IS_CAUSAL:
            return gl.maximum(self.query_tiles - self.tile, 0)
        else:
            return self.query_tiles

    @gluon.jit
    def step(self, t):
        """The tile of queries of the t-th step."""
        i = self.tile + t
        return i if self.IS_CAUSAL else i % self.query_tiles

    @gluon.jit
    def load_queries(self, t):
        """What the t-th step needs, when its place is free."""
        queries = self.queries
        i = self.step(t)
        b, h, slot = self.head // self.heads, self.head % self.heads, t % STAGES
        queries.q_slots.acquire(t)
        full = queries.q_slots.full.index(slot)
        queries.q.load(self.q_desc, b, h, i * WG, full, slot, 2 * WG * 4)
        for which in gl.static_range(2):
            stats = queries.stats.index(2 * slot + which)
            async_load(self.stats_desc, [2 * self.head + which, i * WG], full, stats)
        queries.do_slots.acquire(t)
        queries.do.load(self.do_desc, b, h, i * WG * self.DO_STEP, queries.do_slots.full.index(slot), slot)

    @gluon.jit
    def store(self, desc, parts, pieces, slot):
        """Results of 64 keys by way of a place in shared memory."""
        pieces.store(desc, self.head, self.heads, self.tile * WG, parts, slot)


@gluon.jit
def _values_group(program):
    """Pᵀ of each tile of queries, for the keys group, and dV."""
    queries = program.queries
    DTYPE: gl.constexpr = queries.q.smem.dtype
    empty = accumulator(WG)
    layout: gl.constexpr = empty.type.layout
    first_key = program.tile * WG
    steps = program.steps()
    k = program.kv.tile(0)
    dv = piece_accumulators(k)
    if steps > 0:
        mbarrier.wait(program.k_full.index(0), 0)
        queries.q_slots.wait(0)
        s = warpgroup_mma_wait(0, deps=(mma_over_pieces(k, queries.q.tile(0), empty),))
        for t in range(steps):
            i = program.step(t)
            minus_l = queries.statistic(0, t, layout)
            queries.q_slots.release(t)
            # of a key that is not there P, exp(−L), may be infinite
            masked = first_key + WG > program.num_keys
            if program.IS_CAUSAL:
                masked = masked | (i == program.tile)
            if masked:
                p = probabilities(s, minus_l, first_key, i, program.num_keys, program.scale_log2, True,
                                  program.IS_CAUSAL, 0, WG)  # fmt: skip
            else:
                p = probabilities(s, minus_l, first_key, i, program.num_keys, program.scale_log2, False,
                                  program.IS_CAUSAL, 0, WG)  # fmt: skip
            p16 = rounded(p, DTYPE)
            program.p.put(p16, t)
            # after the last tile it is computed again, and unused
            following = gl.minimum(t + 1, steps - 1)
            queries.q_slots.wait(following)
            s = mma_over_pieces(program.kv.tile(zero(t)), queries.q.tile(following % STAGES), empty)
            queries.do_slots.wait(t)
            dv = mma_of_pieces(dv, p16, queries.do.tile(t % STAGES))
            dv, s = wait_for_both(0, dv, s)
            queries.do_slots.release(t)
        queries.q_slots.acquire(steps - 1 + STAGES)  # the keys group needs no Q any more
    program.store(program.dv_desc, dv, queries.q, 0)


@gluon.jit
def _keys_group(program):
    """dSᵀ of each tile of queries, for the queries group, and dK."""
    queries = program.queries
    DTYPE: gl.constexpr = queries.q.smem.dtype
    empty = accumulator(WG)
    layout: gl.constexpr = empty.type.layout
    steps = program.steps()
    v = program.kv.tile(1)
    dk = piece_accumulators(v)
    if steps > 0:
        mbarrier.wait(program.v_full.index(0), 0)
        queries.do_slots.wait(0)
        dp = warpgroup_mma_wait(0, deps=(mma_over_pieces(v, queries.do.tile(0), empty),))
        for t in range(steps):
            queries.do_slots.release(t)
            queries.q_slots.wait(t)
            program.p.slot.wait(t)
            p16 = program.p.tile.load(layout)
            minus_delta = queries.statistic(1, t, layout)
            ds = rounded(widened(p16) * (dp + minus_delta[None, :]), DTYPE)
            program.ds.put(ds, t)
            program.p.slot.release(t)
            dk = mma_of_pieces(dk, ds, queries.q.tile(t % STAGES))
            following = gl.minimum(t + 1, steps - 1)
            queries.do_slots.wait(following)
            dp = mma_over_pieces(program.kv.tile(1 + zero(t)), queries.do.tile(following % STAGES), empty)
            dk, dp = wait_for_both(0, dk, dp)
            queries.q_slots.release(t)
    program.store(program.dk_desc, [x * program.scale for x in dk], program.kv, 1)


@gluon.jit
def _add(sum_ptr, dq):
    """Adds columns of dQ to their sum, in the order of `backward_dq.store_dq`: 16 bytes of a thread side by side."""
    parts = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([DQ_ROWS, DQ_COLUMNS])
    rows = gl.arange(0, DQ_ROWS, gl.SliceLayout(1, parts.type.layout))[:, None]
    columns = gl.arange(0, DQ_COLUMNS, gl.SliceLayout(0, parts.type.layout))[None, :]
    gl.atomic_add(sum_ptr + rows * DQ_COLUMNS + columns, parts, sem="relaxed")


@gluon.jit
def _queries_group(program):
    """Loads the keys and values and the queries that see them; dQ of each tile, a piece of its columns at a time."""
    empty = accumulator(WG)
    layout: gl.constexpr = empty.type.layout
    gdc_wait()  # for the kernel before this one; the one after it may take the place of programs that have ended
    gdc_launch_dependents()
    steps = program.steps()
    if steps > 0:  # else dK takes the place of V at once
        b, kv_h = program.head // program.heads, program.head % program.heads // program.HEADS_PER_KV
        program.kv.load(program.k_desc, b, kv_h, program.tile * WG, program.k_full.index(0), 0)
        program.load_queries(0)
        program.kv.load(program.v_desc, b, kv_h, program.tile * WG, program.v_full.index(0), 1)
        mbarrier.wait(program.k_full.index(0), 0)
    for t in range(steps):
        if t + 1 < steps:  # the step before this one has left its place
            program.load_queries(t + 1)
        i = program.step(t)
        program.ds.slot.wait(t)
        ds = program.ds.tile.permute((1, 0)).load(gl.DotOperandLayout(0, layout, 2))
        program.ds.slot.release(t)
        for piece in range(program.kv.PIECES):  # not unrolled: registers suffice for one
            k = program.kv.smem.index(piece).reshape([WG, WG])
            dq = warpgroup_mma(ds, k, empty, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            tiles = (program.head.to(gl.int64) * program.query_tiles + i) * (SUM_COLUMNS // WG) + piece
            _add(program.sum_ptr + tiles * (WG * WG), dq)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "key_tiles", "query_tiles", "num_keys"])
def backward_wide_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, sum_ptr, heads, batch_heads,
                         section, key_tiles, query_tiles, num_keys, scale_log2, scale, IS_CAUSAL: gl.constexpr,
                         D: gl.constexpr, COLUMNS: gl.constexpr, DO_STEP: gl.constexpr, HEADS_PER_KV: gl.constexpr,
                         num_warps: gl.constexpr):  # fmt: skip
    """dK and dV of 64 keys of one of `batch_heads` heads, and what they add to dQ's sum, which is zero at the start.
    Tiles have D columns, of which matmuls compute with the first COLUMNS. Grid: (key_tiles · batch_heads,)."""
    dtype: gl.constexpr = q_desc.dtype
    PIECES: gl.constexpr = D // WG
    LAST: gl.constexpr = WG - (D - COLUMNS)
    exchanged: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kv_smem = gl.allocate_shared_memory(dtype, [2 * PIECES, 1, 1, WG, WG], k_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, WG, WG], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, WG, WG], do_desc.layout)
    p_smem = gl.allocate_shared_memory(dtype, [WG, WG], exchanged)
    ds_smem = gl.allocate_shared_memory(dtype, [WG, WG], exchanged)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, WG], stats_desc.layout)
    k_full, v_full = barriers(1, 1), barriers(1, 1)
    q_slots = Ring(barriers(STAGES, 1), barriers(STAGES, 2), STAGES)
    do_slots = Ring(barriers(STAGES, 1), barriers(STAGES, 2), STAGES)
    p = Exchange(p_smem, Ring(barriers(1, 1), barriers(1, 1), 1))
    ds = Exchange(ds_smem, Ring(barriers(1, 1), barriers(1, 1), 1))
    fence_async_shared()
    queries = QueryRing(Pieces(q_smem, WG, WG, PIECES, LAST), Pieces(do_smem, WG, WG, PIECES, LAST), stats_smem,
                        q_slots, do_slots)  # fmt: skip
    tile, head = locate(gl.program_id(0), key_tiles, batch_heads, section)
    program = Program(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, sum_ptr,
                      Pieces(kv_smem, WG, WG, PIECES, LAST), k_full, v_full, queries, p, ds, heads, head, tile,
                      query_tiles, num_keys, scale_log2, scale, IS_CAUSAL, DO_STEP, HEADS_PER_KV)  # fmt: skip
    # as in `forward`: functions, warps, registers; the first group gets what the others leave of 504
    REGS: gl.constexpr = [200, 104] if D == 192 else [208, 88]
    gl.warp_specialize([(_values_group, (program,)), (_keys_group, (program,)), (_queries_group, (program,))],
                       [4, 4], REGS)  # fmt: skip
