"""What travels together in the forward kernels: `QueryTiles` and `KVRing` are tiles in shared memory and the barriers
that say when they are full and when they are free; `TileScheduler` says what a program works on; `Softmax` is what the
online softmax of 64 queries knows of its rows (algorithm 1, line 9).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from cs336_systems.attention.hopper.common import WG, Ring, aggregate, async_load, exp2, first_keys, locate

GROWTH = gl.constexpr(8.0)  # of a row's maximum, in powers of two; as in FlashAttention-4
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Keys:
    """The keys of a head, in tiles of BLOCK_N, and which of them queries see. LIMITED: there is a `limit`."""

    num_keys: gl.tensor
    limit: gl.tensor
    LIMITED: gl.constexpr
    IS_CAUSAL: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.jit
    def tiles(self, first_query, num_queries):
        """How many tiles the queries [first_query, first_query + num_queries) see, but for a limit."""
        tiles = (self.num_keys + self.BLOCK_N - 1) // self.BLOCK_N
        if self.IS_CAUSAL:
            tiles = gl.minimum(tiles, (first_query + num_queries - 1) // self.BLOCK_N + 1)
        return tiles

    @gluon.jit
    def first_tile(self, first_query):
        """The first tile that the queries from `first_query` on see."""
        first = 0
        if self.LIMITED:
            first = gl.maximum(first_keys(first_query, self.num_keys, self.limit), 0) // self.BLOCK_N
        return first

    @gluon.jit
    def unlimited(self, first_query):
        """The key from which on all of a group's queries, up to the diagonal, see all."""
        key = 0
        if self.LIMITED:
            key = first_keys(first_query + WG - 1, self.num_keys, self.limit)
        return key

    @gluon.jit
    def limited(self, s, first_query, first_key, unlimited):
        """s, −∞ where a key lies before the first one that its query sees: none does from key `unlimited` on."""
        if self.LIMITED:  # noqa: SIM102 (known at compile time, the next one is not)
            if first_key < unlimited:
                queries = first_query + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
                keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
                seen = first_keys(queries, self.num_keys, self.limit)[:, None] <= keys[None, :]
                s = gl.where(seen, s, float("-inf"))
        return s


@aggregate
class QueryTiles:
    """Tiles of 64 queries, one for each group, and the barriers that say when Q has arrived and when its place is free;
    and where the groups leave O. A persistent program has two places for Q of each group, by turns, the next one comes
    while one is read: `done` counts its tiles of queries before this one. Otherwise `done` is None.

    IN_PLACE: there is no room for O, which takes the place of Q."""

    q: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    GROUPS: gl.constexpr
    IN_PLACE: gl.constexpr
    D: gl.constexpr

    @gluon.jit
    def slot_and_parity(self, done, g):
        """Where Q of group g lies, and the parity of its barriers."""
        slot = g
        parity = 0
        if done is not None:
            slot += (done & 1) * self.GROUPS
            parity = (done >> 1) & 1
        return slot, parity

    @gluon.jit
    def load(self, q_desc, b, h, first_query, done, g):
        """Q of group g of the tile that begins with first_query, when its place is free."""
        slot, parity = self.slot_and_parity(done, g)
        if done is not None:
            mbarrier.wait(self.empty.index(slot), parity ^ 1)
        mbarrier.expect(self.full.index(slot), WG * self.D * 2)
        async_load(q_desc, [b, h, first_query + g * WG, 0], self.full.index(slot), self.q.index(slot))

    @gluon.jit
    def wait(self, slot, parity):
        mbarrier.wait(self.full.index(slot), parity)

    @gluon.jit
    def release(self, slot):
        """The group has read Q."""
        mbarrier.arrive(self.empty.index(slot), count=1)

    @gluon.jit
    def release_previous(self, done, g):
        """IN_PLACE: waits until O of the tile before has left, whose place is then free for the next Q."""
        last, _ = self.slot_and_parity(done - 1, g)
        tma.store_wait(0)
        mbarrier.arrive(self.empty.index(last), count=1, pred=done > 0)


@aggregate
class KVRing:
    """The ring of tiles of K and V. Its t-th use is for tile t of K and t − 1 of V (of a tile of queries), which are
    needed together. The producer waits until all groups have released a place, and loads; groups wait for the bytes,
    read, and release, also what they do not need."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    slots: Ring
    BLOCK_N: gl.constexpr
    D: gl.constexpr

    @gluon.jit
    def load(self, k_desc, v_desc, b, h, uses, t, steps, end):
        """Tile t of K and t − 1 of V, counted from the right, of the `steps` before tile `end`, where there are such;
        so many uses of the ring came before tile 0."""
        BYTES: gl.constexpr = self.BLOCK_N * self.D * 2
        slot = (uses + t) % self.slots.STAGES
        first_key = (end - 1 - t) * self.BLOCK_N
        both = (t > 0) & (t < steps)
        self.slots.acquire(uses + t)
        full = self.slots.full.index(slot)
        mbarrier.expect(full, 2 * BYTES, pred=both)
        mbarrier.expect(full, BYTES, pred=both ^ True)
        async_load(k_desc, [b, h, first_key, 0], full, self.k.index(slot), pred=t < steps)
        async_load(v_desc, [b, h, first_key + self.BLOCK_N, 0], full, self.v.index(slot), pred=t > 0)

    @gluon.jit
    def k_tile(self, slot):
        return self.k.index(slot).reshape([self.BLOCK_N, self.D])

    @gluon.jit
    def v_tile(self, slot):
        return self.v.index(slot).reshape([self.BLOCK_N, self.D])


@aggregate
class TileScheduler:
    """Which tiles of queries a program takes. Without a mask the first `full_tiles` of a
    head's `row_tiles` have queries for all groups; the others have 64, for one, and come last. PERSISTENT programs
    share items: tiles, or UNEVEN ones in pairs. HEADS_PER_KV heads of queries share one of keys; a section's programs
    are of neighbors among them, and the L2 cache serves all.

    UNEVEN: the later a tile, the more keys it sees, of its document if there are any: with
    a causal mask and no window. With one, tiles come in the order of those without a mask, all of them full."""

    heads: gl.tensor
    batch_heads: gl.tensor
    section: gl.tensor
    full_tiles: gl.tensor
    row_tiles: gl.tensor
    num_queries: gl.tensor
    UNEVEN: gl.constexpr
    GROUPS: gl.constexpr
    PERSISTENT: gl.constexpr
    HEADS_PER_KV: gl.constexpr

    @gluon.jit
    def items(self):
        return self.row_tiles * ((self.batch_heads + 1) // 2 if self.UNEVEN else self.batch_heads)

    @gluon.jit
    def tile(self, item, second):
        """A tile's first query, an end that its queries lie before, its head, and whether there is one. UNEVEN: the
        last queries are the heaviest and come first; in pairs (`second`: 0, 1) the i-th heaviest tile of a
        head and the i-th lightest of the next: all pairs have the same work. Of an odd number of heads the last has no
        next one."""
        there: gl.constexpr = True
        end = self.num_queries
        if self.UNEVEN:
            if self.PERSISTENT:
                tile, head = item % self.row_tiles, item // self.row_tiles * 2 + second
                tile += second * (self.row_tiles - 1 - 2 * tile)
                there = head < self.batch_heads
            else:
                tile, head = locate(item, self.row_tiles, self.batch_heads, self.section)
            first = (self.row_tiles - 1 - tile) * self.GROUPS * WG
        else:
            full = self.full_tiles * self.batch_heads
            if item < full:
                tile, head = locate(item, self.full_tiles, self.batch_heads, self.section)
                first = tile * self.GROUPS * WG
            else:
                item -= full
                tile, head = locate(item, self.row_tiles - self.full_tiles, self.batch_heads, self.section)
                first = (self.full_tiles * self.GROUPS + tile) * WG
                end = first + WG
        return first, end, head, there


@aggregate
class Softmax:
    """Of each row, over the tiles of keys so far: the maximum that P is relative to, in units of Q Kᵀ (not scaled, and
    not to base 2), and the sum of P. scale_log2, which the methods take, is scale · log2(e)."""

    row_max: gl.tensor
    row_sum: gl.tensor

    @gluon.jit
    def step(self, s, scale_log2, p_layout: gl.constexpr, DTYPE: gl.constexpr, LAZY: gl.constexpr):
        """One more tile of S = Q Kᵀ: the softmax after it, the factor that rescales older sums, P as an operand.

        LAZY: the maximum stays as it was while P is at most 2^GROWTH. Then older sums need no rescaling, and O and L
        are the same but for rounding."""
        row_max = self.row_max
        new_max = gl.maximum(row_max, gl.max(s, 1))
        if LAZY:
            larger = (new_max - row_max) * scale_log2 > GROWTH
            new_max = gl.where(larger, new_max, row_max)
        scaled = new_max * scale_log2
        alpha = exp2(row_max * scale_log2 - scaled)
        if LAZY:
            alpha = gl.where(larger, alpha, 1.0)
        p = exp2(s * scale_log2 - scaled[:, None])
        row_sum = self.row_sum * alpha + gl.sum(p, 1)
        operand = gl.convert_layout(p.to(DTYPE), p_layout, assert_trivial=True)
        return Softmax(new_max, row_sum), alpha, operand

    @gluon.jit
    def in_layout(self, layout: gl.constexpr):
        """The same, with rows in another layout that has them in the same registers."""
        row_max = gl.convert_layout(self.row_max, layout, assert_trivial=True)
        return Softmax(row_max, gl.convert_layout(self.row_sum, layout, assert_trivial=True))

    @gluon.jit
    def logsumexp(self, scale_log2):
        """L, natural logarithm."""
        return (self.row_max * scale_log2 + gl.log2(self.row_sum)) * LN_2


@gluon.jit
def first_softmax(keys, s, first_query, first_key, scale_log2):
    """The softmax, and P in fp32, of a group's first tile of keys, the only one that meets the diagonal or the end of
    the keys (see `forward`). Each row sees a key of it, so that its maximum is finite."""
    columns = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = (columns < keys.num_keys)[None, :]
    if keys.IS_CAUSAL:
        rows = first_query + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        seen = seen & (rows[:, None] >= columns[None, :])
    s = gl.where(seen, s, float("-inf"))
    row_max = gl.max(s, 1)
    p = exp2(s * scale_log2 - (row_max * scale_log2)[:, None])
    return Softmax(row_max, gl.sum(p, 1)), p
