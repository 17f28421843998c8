"""Forward of heads with 192 or 256 columns, by the algorithm of `forward`: what differs is how tiles are kept.

A tile of K or V takes up to 64 KiB, and a ring of pairs of them, as `forward` has it, would be no ring. Here each tile
has a slot of its own: K of the next step arrives while this one's is read, and V as soon as a slot is free, which that
of K is after the first matmul. O takes the place of Q. A program has a multiprocessor to itself and one tile of
queries; the heaviest come first.

Blocks are powers of two: 192 columns come as three pieces of 64, one after another in shared memory, with a matmul for
each; 256 as one. Of the third of 160 columns matmuls leave out the second half.

Tried on an H200, without a mask and with one: at 192 columns three groups take 10% and 4% more time than two, and two
whose softmax overlaps matmuls within a group 15% to 26% and 10% to 15% more; at 256 two without that overlap take 13%
and 10% more.
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

from cs336_systems.attention.hopper.common import (
    WG,
    Ring,
    accumulator,
    aggregate,
    async_load,
    async_store,
    barriers,
    plus_product,
    times_rows,
)
from cs336_systems.attention.hopper.forward_state import Keys, TileScheduler, first_softmax


@aggregate
class Pieces:
    """Places in shared memory for tiles, each as PIECES blocks of PIECE columns; matmuls need LAST of the last one."""

    smem: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    PIECE: gl.constexpr
    PIECES: gl.constexpr
    LAST: gl.constexpr

    @gluon.jit
    def load(self, desc, b, h, first_row, full, slot, MORE_BYTES: gl.constexpr = 0):
        """A tile; MORE_BYTES: what else `full` is to wait for."""
        mbarrier.expect(full, self.ROWS * self.PIECE * self.PIECES * 2 + MORE_BYTES)
        for i in gl.static_range(self.PIECES):
            async_load(desc, [b, h, first_row, i * self.PIECE], full, self.smem.index(slot * self.PIECES + i))

    @gluon.jit
    def tile(self, slot):
        """A tuple of blocks (ROWS, PIECE), the last one (ROWS, LAST)."""
        blocks = ()
        for i in gl.static_range(self.PIECES):
            block = self.smem.index(slot * self.PIECES + i).reshape([self.ROWS, self.PIECE])
            if i == self.PIECES - 1 and self.LAST < self.PIECE:
                blocks = blocks + (block.slice(0, self.LAST, 1),)  # noqa: RUF005 (triton has no stars)
            else:
                blocks = blocks + (block,)  # noqa: RUF005
        return blocks

    @gluon.jit
    def store(self, desc, head, heads, first_row, parts, slot):
        """fp32 numbers of a head as a tile, by way of a slot; waits until they have left it."""
        tile = self.tile(slot)
        for i in gl.static_range(self.PIECES):
            tile[i].store(parts[i].to(self.smem.dtype))
        fence_async_shared()
        b, h = head // heads, head % heads
        for i in gl.static_range(self.PIECES):
            async_store(desc, [b, h, first_row, i * self.PIECE], self.smem.index(slot * self.PIECES + i))
        tma.store_wait(0)


@aggregate
class TileRing:
    """The ring of tiles of K and V, a slot for each, in the order in which matmuls read them: K₀ V₀ K₁ V₁ …, or with
    OVERLAP K₀ K₁ V₀ K₂ V₁ … The tiles of a program are counted from the right, `steps` of each."""

    tiles: Pieces
    slots: Ring
    OVERLAP: gl.constexpr

    @gluon.jit
    def use_of_k(self, t):
        return gl.maximum(2 * t - 1, 0) if self.OVERLAP else 2 * t

    @gluon.jit
    def use_of_v(self, t, steps):
        return gl.minimum(2 * t + 2, 2 * steps - 1) if self.OVERLAP else 2 * t + 1

    @gluon.jit
    def load(self, desc, b, h, first_row, use):
        """A tile for a use of the ring, when its slot is free."""
        slot = use % self.slots.STAGES
        self.slots.acquire(use)
        self.tiles.load(desc, b, h, first_row, self.slots.full.index(slot), slot)

    @gluon.jit
    def tile(self, use):
        return self.tiles.tile(use % self.slots.STAGES)


@aggregate
class Program:
    """What all warps of a program share."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    l_ptr: gl.tensor
    queries: Pieces
    q_full: gl.shared_memory_descriptor
    ring: TileRing
    scheduler: TileScheduler
    keys: Keys
    scale_log2: gl.tensor


@gluon.jit
def mma_over_pieces(a, b, empty):
    """Issues a bᵀ, a matmul for each piece of the columns that it sums over."""
    s = warpgroup_mma(a[0], b[0].permute((1, 0)), empty, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        s = warpgroup_mma(a[i], b[i].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def piece_accumulators(tile):
    """fp32 zeros, 64 rows of each piece's columns."""
    return [accumulator(x.shape[1]) for x in tile]


@gluon.jit
def mma_of_pieces(acc, a, b):
    """Issues acc + a b, a in registers, a matmul for each piece of the columns."""
    parts = ()
    for i in gl.static_range(len(b)):
        parts = parts + (plus_product(acc[i], a, b[i]),)  # noqa: RUF005
    return parts


@gluon.jit
def _producer(program):
    scheduler, ring = program.scheduler, program.ring
    first_query, _, head, _ = scheduler.tile(gl.program_id(0), 0)
    b, h = head // scheduler.heads, head % scheduler.heads
    kv_head = h // scheduler.HEADS_PER_KV
    for g in gl.static_range(scheduler.GROUPS):
        program.queries.load(program.q_desc, b, h, first_query + g * WG, program.q_full.index(g), g)
    steps = program.keys.tiles(first_query, scheduler.GROUPS * WG)
    BLOCK_N: gl.constexpr = ring.tiles.ROWS
    V_LATER: gl.constexpr = 1 if ring.OVERLAP else 0  # step t reads K of t and V of t − 1
    for t in range(steps + V_LATER):
        first_key = (steps - 1 - t) * BLOCK_N
        if t < steps:
            ring.load(program.k_desc, b, kv_head, first_key, ring.use_of_k(t))
        if t >= V_LATER:
            use = ring.use_of_v(t - V_LATER, steps)
            ring.load(program.v_desc, b, kv_head, first_key + V_LATER * BLOCK_N, use)


@gluon.jit
def _attend(program, first_of_tile, head, G: gl.constexpr):
    """64 queries of the tile, those of group G: the online softmax over their keys, then O and L."""
    ring, scheduler, scale_log2 = program.ring, program.scheduler, program.scale_log2
    slots = ring.slots
    BLOCK_N: gl.constexpr = ring.tiles.ROWS
    PIECES: gl.constexpr = ring.tiles.PIECES
    DTYPE: gl.constexpr = ring.tiles.smem.dtype

    first_query = first_of_tile + G * WG
    steps = program.keys.tiles(first_of_tile, scheduler.GROUPS * WG)
    first = steps - program.keys.tiles(first_query, WG)
    for t in range(first):  # tiles to the right of this group's diagonal are for the other groups
        slots.skip(ring.use_of_k(t))
        slots.skip(ring.use_of_v(t, steps))

    zeros = accumulator(BLOCK_N)
    q = program.queries.tile(G)
    acc = piece_accumulators(q)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    use = ring.use_of_k(first)
    mbarrier.wait(program.q_full.index(G), 0)
    slots.wait(use)
    s = warpgroup_mma_wait(0, deps=(mma_over_pieces(q, ring.tile(use), zeros),))
    slots.release(use)
    first_key = (steps - 1 - first) * BLOCK_N
    softmax, p32 = first_softmax(program.keys, s, first_query, first_key, scale_log2)
    p = gl.convert_layout(p32.to(DTYPE), p_layout, assert_trivial=True)

    for t in range(first + 1, steps):
        k_use, v_use = ring.use_of_k(t), ring.use_of_v(t - 1, steps)
        if ring.OVERLAP:  # the softmax of this tile overlaps the matmul of the last one
            slots.wait(k_use)
            slots.wait(v_use)
            s = mma_over_pieces(q, ring.tile(k_use), zeros)
            acc = mma_of_pieces(acc, p, ring.tile(v_use))
            s = warpgroup_mma_wait(PIECES, deps=(s,))
            slots.release(k_use)
            softmax, alpha, new_p = softmax.step(s, scale_log2, p_layout, DTYPE, True)
            slots.wait(v_use)  # complete long ago: see `forward`
            acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
            slots.release(v_use)
            p = new_p
        else:  # in turn: registers do not suffice for both at once
            slots.wait(v_use)
            acc = mma_of_pieces(acc, p, ring.tile(v_use))
            acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
            slots.release(v_use)
            slots.wait(k_use)
            s = warpgroup_mma_wait(0, deps=(mma_over_pieces(q, ring.tile(k_use), zeros),))
            slots.release(k_use)
            softmax, alpha, p = softmax.step(s, scale_log2, p_layout, DTYPE, True)
        acc = [times_rows(x, alpha, True) for x in acc]

    use = ring.use_of_v(steps - 1, steps)
    slots.wait(use)
    acc = mma_of_pieces(acc, p, ring.tile(use))
    num_queries = scheduler.num_queries
    rows = first_query + gl.arange(0, WG, gl.SliceLayout(1, s.type.layout))
    logsumexp = softmax.logsumexp(scale_log2)
    gl.store(program.l_ptr + head.to(gl.int64) * num_queries + rows, logsumexp, mask=rows < num_queries)
    share = 1.0 / softmax.row_sum
    acc = [warpgroup_mma_wait(0, deps=(x,)) for x in acc]
    acc = [times_rows(x, share) for x in acc]
    program.queries.store(program.o_desc, head, scheduler.heads, first_query, acc, G)


@gluon.jit
def _group(program, G: gl.constexpr):
    """64 queries of this program's tile, if there are any for this group; otherwise it lets the others go on."""
    scheduler = program.scheduler
    first, end, head, _ = scheduler.tile(gl.program_id(0), 0)
    if first + G * WG < end:
        _attend(program, first, head, G)
    else:
        mbarrier.wait(program.q_full.index(G), 0)
        for use in range(2 * program.keys.tiles(first, scheduler.GROUPS * WG)):
            program.ring.slots.skip(use)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "section", "full_tiles", "row_tiles", "num_queries",
                              "num_keys"])  # fmt: skip
def wide_kernel(q_desc, k_desc, v_desc, o_desc, l_ptr, heads, batch_heads, section, full_tiles, row_tiles, num_queries,
                num_keys, scale_log2, IS_CAUSAL: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
                D: gl.constexpr, PIECE: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
                OVERLAP: gl.constexpr, HEADS_PER_KV: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and L of a tile of queries of one head. Grid: (row_tiles · batch_heads,). Tiles have D columns, of which
    matmuls compute with the first COLUMNS."""
    dtype: gl.constexpr = q_desc.dtype
    PIECES: gl.constexpr = D // PIECE
    LAST: gl.constexpr = PIECE - (D - COLUMNS)
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS * PIECES, 1, 1, WG, PIECE], q_desc.layout)
    kv_smem = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, PIECE], k_desc.layout)
    q_full, full, empty = barriers(GROUPS, 1), barriers(STAGES, 1), barriers(STAGES, GROUPS)
    fence_async_shared()  # the TMA unit sees them initialized
    ring = TileRing(Pieces(kv_smem, BLOCK_N, PIECE, PIECES, LAST), Ring(full, empty, STAGES), OVERLAP)
    scheduler = TileScheduler(heads, batch_heads, section, full_tiles, row_tiles, num_queries, IS_CAUSAL, GROUPS,
                              False, HEADS_PER_KV)  # fmt: skip
    keys = Keys(num_keys, num_keys, False, IS_CAUSAL, BLOCK_N)
    queries = Pieces(q_smem, WG, PIECE, PIECES, LAST)
    program = Program(
        q_desc, k_desc, v_desc, o_desc, l_ptr, queries, q_full, ring, scheduler, keys, scale_log2
    )
    # as in `forward_kernel`
    if GROUPS == 2:
        gl.warp_specialize([(_group, (program, 0)), (_group, (program, 1)), (_producer, (program,))],
                           [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([(_group, (program, 0)), (_producer, (program,))], [1], [24])
