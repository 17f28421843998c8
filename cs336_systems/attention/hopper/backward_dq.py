"""dQ's sum in the backward kernel: groups leave their tiles in shared memory, and a warp of its own adds them to what
other programs have added, in fp32 and in no particular order.

Zeros to add to have to be written, and read again: for short rows that is a good part of all traffic. Without them (not
ZEROED) the program of a head's first keys, which all its queries see, stores its tiles. It reports how many it has
stored, and the others wait until it is ahead of them. Those keys are drawn before the head's others: a program never
waits for one that has not begun. All others are still added in any order. With a limit the first keys are not seen by
all queries: there it is ZEROED.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from cs336_systems.attention.hopper.common import async_atomic_add, async_store

# a tile of dQ, 64 x 64 numbers in fp32 in the order of `store_dq`, as TMA sees it: in shared memory and in its sum
DQ_ROWS, DQ_COLUMNS = gl.constexpr(16), gl.constexpr(256)


@gluon.jit
def store_dq(dq, tile):
    """A tile of 64 rows in the order in which threads hold it: 16 bytes each, side by side, so that a store has no
    bank conflicts. `finish_kernel` puts dQ in order. 32 or 16 columns take the first of its rows."""
    WIDTH: gl.constexpr = dq.shape[1]
    # rows: warp, half, thread of 8; columns: part, thread of 4, one of two
    parts = dq.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    tile.slice(0, WIDTH // 4, 1).store(parts.reshape([1, WIDTH // 4, DQ_COLUMNS]))


@gluon.jit
def add_rows(dq_desc, tile, head, row, WIDTH: gl.constexpr):
    """Adds a tile of WIDTH columns, in that order, to a head's sum, from `row` on."""
    ROWS: gl.constexpr = dq_desc.block_type.shape[1]
    for r in gl.static_range(0, WIDTH // 4, ROWS):
        async_atomic_add(dq_desc, [head, row + r, 0], tile.slice(r, ROWS, 1))


@gluon.jit
def add_tile(dq_desc, dq, tile, head, index):
    """Adds a tile of dQ, the head's index-th of 64 by 64 numbers, to what other programs have added, by way of `tile`
    in shared memory."""
    store_dq(dq, tile)
    fence_async_shared()
    add_rows(dq_desc, tile, head, index * DQ_ROWS, dq.shape[1])


@gluon.jit
def put_dq(dq, gradients, slot, use):
    """Leaves a tile of dQ in one of two places of shared memory, whose use-th it is."""
    mbarrier.wait(gradients.dq_empty.index(slot), (use & 1) ^ 1)
    store_dq(dq, gradients.dq.index(slot))
    fence_async_shared()
    mbarrier.arrive(gradients.dq_full.index(slot), count=1)


@gluon.jit
def _report(reported, count):
    """Says that `count` tiles can be added to: all that this warp has stored. `tma.store_wait` waits only until they
    have been read from shared memory, this until they are in global memory."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip
    gl.atomic_xchg(reported, count, sem="release")


@gluon.jit
def _wait_for_report(reported, count):
    """Waits until `count` tiles have been reported, and returns how many have."""
    address = gl.cast(reported, gl.int64)
    found = 0
    while found < count:
        found = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
        )
    # TMA, too, is to see what others have stored
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return found


@gluon.jit
def _send(dq_desc, tile, head, row, stores, WIDTH: gl.constexpr):
    """Stores a tile of WIDTH columns in a head's sum, from `row` on, or adds it."""
    if stores:
        ROWS: gl.constexpr = dq_desc.block_type.shape[1]
        for r in gl.static_range(0, WIDTH // 4, ROWS):
            async_store(dq_desc, [head, row + r, 0], tile.slice(r, ROWS, 1))
    else:
        add_rows(dq_desc, tile, head, row, WIDTH)
    tma.store_wait(0)


@gluon.jit
def dq_warp(program):
    """Sends dQ of all tiles of this program's keys, at D = 128 in halves of its columns."""
    kv, gradients, scheduler, dq_desc = program.kv, program.gradients, program.scheduler, program.dq_desc
    REST: gl.constexpr = program.REST
    turn = 0
    t = 0
    item = kv.wait_for_item(turn, 1)
    while item < scheduler.items():
        mbarrier.arrive(kv.k_empty.index(turn % kv.BUFFERS), count=1)  # this warp needs no K
        tile, head = scheduler.locate(item)
        first, end = scheduler.first_of(tile), scheduler.end_of(tile)
        stores = (tile == 0) & (not program.ZEROED)
        reported = 0
        for n in range(end - first):
            i = scheduler.nth_of(first, end, n)
            before = scheduler.nth_of(0, end, i)  # tiles that the head's first keys have before this one
            if not program.ZEROED:
                if stores:
                    _report(program.reports_ptr + head, n)
                elif reported <= before:
                    reported = _wait_for_report(program.reports_ptr + head, before + 1)
            if kv.D == 64:
                mbarrier.wait(gradients.dq_full.index(t & 1), (t // 2) & 1)
                _send(dq_desc, gradients.dq.index(t & 1), head, i * DQ_ROWS, stores, 64)
                mbarrier.arrive(gradients.dq_empty.index(t & 1), count=1)
            else:
                for half in gl.static_range(2):
                    mbarrier.wait(gradients.dq_full.index(half), t & 1)
                    _send(dq_desc, gradients.dq.index(half), head, (2 * i + half) * DQ_ROWS, stores,
                          REST if REST and half else 64)  # fmt: skip
                    mbarrier.arrive(gradients.dq_empty.index(half), count=1)
            t += 1
        if stores:
            _report(program.reports_ptr + head, scheduler.query_tiles)
        turn += 1
        item = kv.wait_for_item(turn, 1)
