"""How the Hopper kernels can be configured, and the rule that chooses: tiles, groups and programs of a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton

from cs336_systems.attention.hopper.backward_dq import DQ_COLUMNS, DQ_ROWS
from cs336_systems.attention.triton.tiles import CROSS

GROUP = 64  # queries or keys of a warpgroup


def padded(head_dim: int) -> int:
    """The head dimension that the kernels compute with."""
    return next(d for d in (64, 128, 192, 256) if head_dim <= d)


def piece_of(d: int) -> int:
    """The columns of a block in shared memory, by the padded head dimension: a power of two."""
    return 64 if d == 192 else d


def rest_of(head_dim: int) -> int:
    """Columns past the first 64 that the kernels compute with; 0 where that is all of them (see `common`)."""
    return next((rest for rest in (16, 32) if 64 < head_dim <= 64 + rest), 0)


def columns_of(head_dim: int) -> int:
    """The columns that matmuls compute with: 64, 80, 96, 128, 160, 192 or 256."""
    rest = rest_of(head_dim)
    return 64 + rest if rest else 160 if 128 < head_dim <= 160 else padded(head_dim)


def dq_tile(rest: int, few: bool) -> tuple[int, ...]:
    """What TMA adds to a head's dQ at once: 64 rows of 64 columns, in other order, or of a part's rest; of few queries
    a warp's 16 rows of them."""
    if few:
        return 1, (rest or 64) // 8, 128
    return DQ_ROWS.value * (rest or 64) // 64, DQ_COLUMNS.value


@dataclass(frozen=True)
class Forward:
    """Groups of 64 queries of a program, keys of a tile, tiles in flight (pairs of K and V; past 128 columns single
    ones), and whether the softmax of a tile overlaps the matmul of the previous one within a group. programs: how many
    programs of one group a multiprocessor is to hold. alone: one group loads its tiles itself, without a producer's
    warps beside it: the kernel of `forward_alone`."""

    groups: int
    block_n: int
    stages: int
    overlap: bool
    programs: int = 2
    alone: bool = False

    def __post_init__(self) -> None:
        chosen = self.groups, self.block_n, self.stages, self.overlap
        if self.alone and chosen != (1, GROUP, 1, False):
            text = "groups={}, block_n={}, stages={}, overlap={}".format
            raise ValueError(f"alone=True with {text(*chosen)}; allowed: {text(1, GROUP, 1, False)}")
        if self.groups not in (1, 2, 3):
            raise ValueError(f"groups={self.groups}; allowed: 1, 2, 3")
        # one tile alone is masked, and a row that saw no key of it would divide by zero: tiles begin where groups do
        if self.block_n not in (GROUP, 2 * GROUP):
            raise ValueError(f"block_n={self.block_n}; allowed: {GROUP}, {2 * GROUP}")

    @property
    def registers(self) -> int | None:
        """Registers per thread on average, where several programs are to fit a multiprocessor."""
        if self.groups > 1:
            return None
        threads = 128 if self.alone else 256
        return min(248, 65536 // (threads * self.programs) // 8 * 8)

    @property
    def halves(self) -> bool:
        """Whether a tile of keys that meets the diagonal is as long as one of queries, so that the first of two groups
        sees only half of it."""
        return self.groups == 2 and self.block_n == 2 * GROUP

    def can_persist(self, head_dim: int) -> bool:
        """Whether a program to a multiprocessor can take tiles of queries one after another: those of several groups
        can, except three with 128 columns, which leave no registers for it, and those with more, which leave no room
        for a second tile of queries."""
        columns = columns_of(head_dim)
        return columns <= 128 and (self.groups == 2 or (self.groups == 3 and columns < 128))


# By the columns that matmuls compute with. Which is for which shape say `causal_rule` and `full_rule`.
#   FORWARD           a program has a multiprocessor to itself
#   FORWARD_OF_SHORT  three or four share one
#   FORWARD_LARGE     64 columns: two share one; more: a program of two groups has one to itself
#                     (past 128 columns these are all there are: others lack room or registers)
#   FORWARD_OF_LONG   a program of three groups has one to itself
_ONE, _TWO = Forward(1, 64, 2, True), Forward(2, 128, 2, False)
_ALONE = Forward(1, 64, 1, False, programs=3, alone=True)
_WIDE, _TWO_WIDE = Forward(1, 64, 5, True, programs=1), Forward(2, 128, 3, False)
FORWARD = {64: Forward(1, 128, 2, True), 80: _ONE, 96: _ONE, 128: _ONE} | dict.fromkeys(
    (160, 192, 256), _WIDE
)
FORWARD_OF_SHORT = {
    64: Forward(1, 64, 1, False, programs=4, alone=True), 80: _ALONE, 96: _ALONE, 128: _ALONE
}  # fmt: skip
FORWARD_LARGE = {
    64: Forward(1, 128, 2, False), 80: _TWO, 96: _TWO, 128: Forward(2, 128, 2, True),
    160: _TWO_WIDE, 192: _TWO_WIDE, 256: Forward(2, 64, 5, True),
}  # fmt: skip
FORWARD_OF_LONG = dict.fromkeys((64, 80, 96, 128), Forward(3, 128, 2, False))
FORWARD_TABLES = FORWARD, FORWARD_OF_SHORT, FORWARD_LARGE, FORWARD_OF_LONG
# with a causal mask persistent programs pay if multiprocessors wait for the last one at most WAITING of their time, and
# per tile no longer than BEGINNING keys take: the time to begin and end a program
BEGINNING, WAITING = 100, 0.15
# time of a tile of 64 queries, for one group, over that of a full one
SMALL = 0.5
# a program of one group alone takes CHAIN tiles of queries that see so few keys each that beginning and ending a
# program weighs more, if every place for such a program gets enough chains: (keys at most, chains of a place).
# The fewer keys are seen, the less it matters that the last ones do not end together. Numbers are from times
CHAIN, CHAINS = 2, ((128, 0.9), (256, 4))

# of the backward kernel for few queries, a program of which holds them all: registers of a thread, with which four to
# two programs share a multiprocessor, by the padded head dimension, for one tile of 64 queries, two, ...
FEW_REGISTERS = {64: (128, 168), 128: (168,)}


def seen_keys(num_queries: int, num_keys: int, is_causal: bool) -> int:
    """How many keys a query sees, as the rule counts them: all, or with a causal mask half of the smaller length."""
    return min(num_queries, num_keys) // 2 if is_causal else num_keys


def even_pairs(
    config: Forward, batch_heads: int, num_queries: int, num_keys: int, multiprocessors: int
) -> bool:
    """Whether persistent programs are worth it with a causal mask. Every pair of tiles has the same work (of three
    groups: to within a tile of keys or two), but a multiprocessor with a pair fewer than another waits: for no longer,
    then, than beginning and ending a program for each tile takes."""
    if num_keys < num_queries:  # tiles past the last key have the same work each
        return False
    tiles = triton.cdiv(num_queries, config.groups * GROUP)
    most = triton.cdiv(tiles * triton.cdiv(batch_heads, 2), multiprocessors)
    waiting = 2 * most * multiprocessors / (tiles * batch_heads) - 1
    return waiting <= WAITING and waiting * seen_keys(num_queries, num_keys, True) <= BEGINNING


def load_of(config: Forward, batch_heads: int, groups: int, full: int, multiprocessors: int) -> float:
    """What the busiest multiprocessor gets, in full tiles, if `full` tiles of each head are full. These are shared in
    turns, and the turns go on with the small ones."""
    small = max(groups - full * config.groups, 0) * batch_heads
    turns, more = divmod(full * batch_heads, multiprocessors)
    load = turns + SMALL * triton.cdiv(small, multiprocessors)
    if more:
        left = max(small - (multiprocessors - more), 0)
        load = max(load, turns + 1 + SMALL * triton.cdiv(left, multiprocessors))
    return load


def full_tiles(
    config: Forward, columns: int, batch_heads: int, num_queries: int, multiprocessors: int
) -> int:
    """How many of a head's tiles of queries are full without a mask, for all groups; the rest are of 64 queries, for
    one. All tiles (the last may lack some queries), all that lack none, or as many as multiprocessors have even shares
    of: whichever is done first."""
    groups = triton.cdiv(num_queries, GROUP)
    every, most = triton.cdiv(groups, config.groups), groups // config.groups
    if config.groups < 3 or columns >= 128:  # two groups gain nothing by it, three with 128 columns lose
        return every
    even = most * batch_heads // multiprocessors * multiprocessors // batch_heads
    load = lambda full: load_of(config, batch_heads, groups, full, multiprocessors)
    return min(filter(None, (every, most, even)), key=load)


def chain_of(
    config: Forward, batch_heads: int, num_queries: int, num_keys: int, is_causal: bool, multiprocessors: int
) -> int:
    """How many tiles of queries a program of one group alone takes, of `batch_heads` heads in all."""
    seen = seen_keys(num_queries, num_keys, is_causal)
    enough = next((chains for most, chains in CHAINS if seen <= most), math.inf)
    places = config.programs * multiprocessors
    return CHAIN if triton.cdiv(num_queries, GROUP) * batch_heads >= CHAIN * enough * places else 1


@dataclass(frozen=True)
class Shape:
    """What the rule looks at: heads of all sequences, lengths, the columns that matmuls compute with, the GPU's
    multiprocessors, the keys that a query sees at most, where a window or documents leave fewer."""

    batch_heads: int
    num_queries: int
    num_keys: int
    columns: int
    is_causal: bool
    multiprocessors: int
    window: int | None = None

    @property
    def groups(self) -> int:
        """Of queries of a head."""
        return triton.cdiv(self.num_queries, GROUP)

    @property
    def seen(self) -> int:
        seen = seen_keys(self.num_queries, self.num_keys, self.is_causal)
        return min(seen, self.window or seen)

    def programs(self, groups: int) -> float:
        """Programs of so many groups for each multiprocessor."""
        return self.batch_heads * triton.cdiv(self.groups, groups) / self.multiprocessors

    def first_done(self, *timed: tuple[Forward, float]) -> Forward:
        """The configuration with which the busiest multiprocessor would finish first, by the time of each per row; the
        first of several."""
        of_shape = self.columns, self.batch_heads, self.num_queries, self.multiprocessors

        def cost(config: Forward, per_row: float) -> float:
            full = full_tiles(config, *of_shape)
            load = load_of(config, self.batch_heads, self.groups, full, self.multiprocessors)
            return per_row * config.groups * load

        return min(timed, key=lambda x: cost(*x))[0]


# The rule. The more keys are seen, the more groups: programs of several read keys and values less often, and persistent
# ones load a tile while another ends. Small programs, several of which share a multiprocessor, begin and end beside the
# matmuls of others. Lines are tried from the first to the last; their numbers are from times of an H200.
MANY_KEYS = 49152  # at 128 columns: K and V of a head take half of the L2 cache


def one_group_of_64_columns(shape: Shape) -> Forward:
    """The better one of two and of four programs to a multiprocessor, where matmuls compute with 64 columns."""
    if shape.seen >= 1536 and shape.programs(3) < 3:  # beginning and ending a program hardly weighs
        return FORWARD_LARGE[64]
    if shape.seen > 768 and shape.programs(1) <= 4:  # few: the places of small ones would be empty
        return FORWARD_LARGE[64]
    return FORWARD_OF_SHORT[64]  # beginning and ending weighs


def causal_rule(shape: Shape) -> Forward:
    """With a causal mask, where small programs are more than the multiprocessors."""
    columns, seen, large = shape.columns, shape.seen, FORWARD_LARGE[shape.columns]
    of_shape = shape.batch_heads, shape.num_queries, shape.num_keys, shape.multiprocessors
    # reading keys is what takes time, and even shares leave no multiprocessor idle for long; with 128 columns three
    # groups lack registers, and pay later
    if seen >= (1536 if columns < 128 else MANY_KEYS // 2) and shape.programs(3) >= 3:
        return FORWARD_OF_LONG[columns]
    if columns == 64:
        return one_group_of_64_columns(shape)
    # the last program of two groups would be half empty
    if triton.cdiv(shape.groups, 2) * 2 > 1.06 * shape.groups:
        return FORWARD_OF_SHORT[columns]
    # enough matmuls for what begins and ends
    if seen > (256 if shape.num_keys >= shape.num_queries else 768):
        return large
    if 2 * seen >= 256 and even_pairs(large, *of_shape):  # for a persistent program half as many are enough
        return large
    return FORWARD_OF_SHORT[columns]


def full_rule(shape: Shape) -> Forward:
    """Without a mask, where small programs are more than the multiprocessors: all programs have the same work, and how
    evenly they are shared decides. The numbers are times of a row: that of three groups is longer with few keys, and
    shorter with many, which they read less often."""
    columns, long = shape.columns, FORWARD_OF_LONG[shape.columns]
    if columns == 64:
        return shape.first_done(
            (one_group_of_64_columns(shape), 1.0),
            (long, 1.2 if shape.seen < 384 else 0.9),
        )
    some_keys, enough = (1.05, 768) if columns < 128 else (1.1, MANY_KEYS)
    return shape.first_done(
        (FORWARD_OF_SHORT[columns], 1.25),
        (FORWARD_LARGE[columns], 1.0),
        (long, 1.25 if shape.seen < 512 else some_keys if shape.seen < enough else 0.95),
    )


def forward_config(
    batch_heads: int, num_queries: int, num_keys: int, head_dim: int, is_causal: bool, multiprocessors: int,
    window: int | None = None,
) -> Forward:  # fmt: skip
    """The configuration for a shape. `batch_heads`: heads of all sequences; `multiprocessors`: the GPU's."""
    shape = Shape(
        batch_heads, num_queries, num_keys, columns_of(head_dim), is_causal, multiprocessors, window
    )
    if shape.programs(1) <= 1:  # a multiprocessor has one program at most, and nothing to overlap it with
        return FORWARD[shape.columns]
    if shape.columns > 128:
        return FORWARD_LARGE[shape.columns]
    return causal_rule(shape) if is_causal else full_rule(shape)


def few_queries(num_queries: int, num_keys: int, d: int) -> bool:
    """Whether the backward pass of a padded head dimension d takes the kernel for few queries."""
    held = GROUP * len(FEW_REGISTERS[d]) if num_keys >= CROSS * num_queries else GROUP
    return num_queries <= held
