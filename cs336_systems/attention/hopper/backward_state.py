"""What travels together in the backward kernels: tiles in shared memory and the barriers that say when they are full
and when they are free again; what a program works on; all of this (`Program`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from cs336_systems.attention.hopper.common import (
    WG,
    accumulator,
    aggregate,
    async_load,
    exp2,
    locate,
    mma_over_columns,
    query_ends,
)

BLOCK_M = gl.constexpr(64)  # queries of a tile


@gluon.jit
def probabilities(s, minus_l, first_key, i, num_keys, scale_log2, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr,
                  G: gl.constexpr, BLOCK_M: gl.constexpr, limit=None):  # fmt: skip
    """Pᵀ of tile i of the queries, of which minus_l is −L · log2(e), and the G-th 64 keys from `first_key` on."""
    of_query: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    p = exp2(s * scale_log2 + minus_l[None, :])
    if MASKED:
        keys = first_key + G * WG + gl.arange(0, WG, gl.SliceLayout(1, s.type.layout))
        seen = (keys < num_keys)[:, None]
        queries = i * BLOCK_M + gl.arange(0, BLOCK_M, of_query)
        if limit is not None:  # without its sign, a negative distance is a large one
            distance = (queries[None, :] - keys[:, None]).to(gl.uint32)
            queries_of = query_ends(keys, num_keys, limit) - keys
            if limit.dtype.is_ptr():  # a key that is not there has none
                seen = distance < gl.maximum(queries_of, 0).to(gl.uint32)[:, None]
            else:
                seen = seen & (distance < queries_of.to(gl.uint32)[:, None])
        elif IS_CAUSAL:
            seen = seen & (queries[None, :] >= keys[:, None])
        p = gl.where(seen, p, 0.0)
    return p


@aggregate
class QueryRing:
    """The ring of tiles of queries: Q with the statistics of its rows, −L · log2(e) and −delta, and dO, for which there
    are barriers of its own: it is needed later, and done with earlier. Both groups free them."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    BLOCK_M: gl.constexpr
    D: gl.constexpr
    STAGES: gl.constexpr
    REST: gl.constexpr

    @gluon.jit
    def scores(self, k, t, awaited=True):
        """Issues sᵀ = K Qᵀ of the t-th tile; of whatever lies there if it is not awaited."""
        slot = t % self.STAGES
        mbarrier.wait(self.q_full.index(slot), (t // self.STAGES) & 1, pred=awaited)
        q = self.q.index(slot).reshape([self.BLOCK_M, self.D])
        return mma_over_columns(k, q, accumulator(self.BLOCK_M), self.REST)

    @gluon.jit
    def statistic(self, which: gl.constexpr, t, s_layout: gl.constexpr):
        """−L · log2(e), 0, or −delta, 1, of the t-th tile."""
        tile = self.stats.index(2 * (t % self.STAGES) + which)
        return tile.reshape([self.BLOCK_M]).load(gl.SliceLayout(0, s_layout))


@aggregate
class KVTiles:
    """K and V of the program's tiles of 128 keys, a ring of BUFFERS places, and the number of the tile that was drawn,
    which arrives with K. The two groups read V, and K all warps but the producer: one that needs no K frees it, too,
    when it has read the number."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    drawn: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    D: gl.constexpr
    BUFFERS: gl.constexpr

    @gluon.jit
    def wait_for_item(self, turn, WARPS: gl.constexpr):
        """Waits for K of this program's turn-th tile of keys and returns the tile's number among those of all heads;
        when none is left, a number past the last."""
        slot = turn % self.BUFFERS
        mbarrier.wait(self.k_full.index(slot), (turn // self.BUFFERS) & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        return gl.sum(self.drawn.index(slot).load(layout), 0)

    @gluon.jit
    def k_of(self, slot, G: gl.constexpr):
        """K of group G."""
        return self.k.index(slot).reshape([2 * WG, self.D]).slice(G * WG, WG)


@aggregate
class GradientTiles:
    """dSᵀ of both groups, which dQ is made of, and two tiles of dQ on their way to its sum (`backward_dq`): at D = 64
    by turns, at D = 128 one for each group's half. There is no ds_empty there (see `backward_steps.late_step`), and no
    barriers of dQ where dQ's group itself adds."""

    ds: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor


@aggregate
class TileScheduler:
    """The tiles of 128 keys of all heads, which programs draw by their numbers, and the tiles of queries of each. Heads
    are those of queries, of which HEADS_PER_KV share one of keys: each makes its own dK and dV, and
    `backward_ends.sum_kernel` sums them. LIMITED: there is a `limit`."""

    heads: gl.tensor
    batch_heads: gl.tensor
    section: gl.tensor
    key_tiles: gl.tensor
    query_tiles: gl.tensor
    num_keys: gl.tensor
    limit: gl.tensor
    LIMITED: gl.constexpr
    IS_CAUSAL: gl.constexpr
    D: gl.constexpr
    HEADS_PER_KV: gl.constexpr

    @gluon.jit
    def items(self):
        return self.key_tiles * self.batch_heads

    @gluon.jit
    def locate(self, item):
        """The (tile, head) of a number."""
        return locate(item, self.key_tiles, self.batch_heads, self.section)

    @gluon.jit
    def first_of(self, tile):
        """The first tile of queries that sees a key of this tile; `query_tiles` if none does."""
        first = 0
        if self.IS_CAUSAL:
            first = gl.minimum(tile * 2 * WG // BLOCK_M, self.query_tiles)
        return first

    @gluon.jit
    def end_of(self, tile):
        """Past the last tile of queries that sees a key of this tile, if one does."""
        end = self.query_tiles
        if self.LIMITED:
            last_query = query_ends(tile * 2 * WG + 2 * WG - 1, self.num_keys, self.limit) - 1
            end = gl.minimum(last_query // BLOCK_M + 1, end)
        return end

    @gluon.jit
    def nth_of(self, first, end, n):
        """The n-th tile of queries for a tile of keys: from the first one on, or, at D = 128, from the last one to it.
        With first = 0 it is its own inverse."""
        if self.D == 64:
            return first + n
        else:
            return end - 1 - n


@aggregate
class Program:
    """What all warps of a program share. DO_STEP: 0 where one tile of dO serves all queries. ZEROED: `backward_dq`."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    dq_desc: tma.tensor_descriptor
    stats_desc: tma.tensor_descriptor
    counters_ptr: gl.tensor
    reports_ptr: gl.tensor
    queries: QueryRing
    kv: KVTiles
    gradients: GradientTiles
    results: gl.shared_memory_descriptor
    scheduler: TileScheduler
    scale_log2: gl.tensor
    scale: gl.tensor
    DO_STEP: gl.constexpr
    REST: gl.constexpr
    ZEROED: gl.constexpr

    @gluon.jit
    def load_queries(self, b, h, head, i, t):
        """The producer: tile i of the queries, the t-th of this program, when its place is free."""
        queries = self.queries
        BYTES: gl.constexpr = BLOCK_M * queries.D * 2
        slot = t % queries.STAGES
        parity = ((t // queries.STAGES) & 1) ^ 1
        mbarrier.wait(queries.q_empty.index(slot), parity)
        full = queries.q_full.index(slot)
        mbarrier.expect(full, BYTES + 2 * BLOCK_M * 4)
        row = i * BLOCK_M
        async_load(self.q_desc, [b, h, row, 0], full, queries.q.index(slot))
        for which in gl.static_range(2):
            async_load(self.stats_desc, [2 * head + which, row], full, queries.stats.index(2 * slot + which))
        mbarrier.wait(queries.do_empty.index(slot), parity)
        full = queries.do_full.index(slot)
        mbarrier.expect(full, BYTES)
        async_load(self.do_desc, [b, h, row * self.DO_STEP, 0], full, queries.do.index(slot))

    @gluon.jit
    def probabilities(self, s, first_key, i, t, MASKED: gl.constexpr, G: gl.constexpr):
        """Pᵀ of tile i of the queries, the t-th of this program, and of the keys of group G."""
        layout: gl.constexpr = s.type.layout
        minus_l = self.queries.statistic(0, t, layout)
        scheduler = self.scheduler
        return probabilities(s, minus_l, first_key, i, scheduler.num_keys, self.scale_log2, MASKED, scheduler.IS_CAUSAL,
                             G, BLOCK_M, scheduler.limit if scheduler.LIMITED else None)  # fmt: skip
