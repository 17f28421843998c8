"""dQ's sum in the backward kernel: groups leave their tiles in shared memory, and a warp of its own adds them to what
other programs have added.

Zeros to add to have to be written, and read again: for short rows that is a good part of all traffic. Without them (not
ZEROED) the program of a head's first keys, which all its queries see, stores its tiles. It reports how many it has
stored, and the others wait until it is ahead of them. Those keys are drawn before the head's others: a program never
waits for one that has not begun.
"""

# ruff: noqa: RUF059 (tuples of tiles and barriers are unpacked as they were packed, whole)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from cs336_systems.attention.hopper.backward_parts import DQ_ROWS, add_rows, drawn, first_of, nth_of, store_dq
from cs336_systems.attention.hopper.common import async_store, place


@gluon.jit
def put_dq(dq, tiles, dq_barriers, slot, turn):
    """Leaves a tile of dQ in one of two places of shared memory, where `turn` tiles were before."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    dq_full, dq_empty = dq_barriers
    mbarrier.wait(dq_empty.index(slot), (turn & 1) ^ 1)
    store_dq(dq, dq_smem.index(slot))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(slot), count=1)


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
def dq_warp(dq_desc, reports_ptr, tiles, dq_barriers, work, batch_heads, section, key_tiles, query_tiles,
            IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, REST: gl.constexpr,
            ZEROED: gl.constexpr):  # fmt: skip
    """Sends dQ of all tiles of this program's keys, at D = 128 in halves of its columns. reports_ptr: int32, a number
    for each head."""
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, stats_smem = tiles
    dq_full, dq_empty = dq_barriers
    drawn_smem, k_full, k_empty, v_full, v_empty = work
    BUFFERS: gl.constexpr = drawn_smem.shape[0]
    turn = 0
    t = 0
    item = drawn(work, turn, 1)
    while item < key_tiles * batch_heads:
        mbarrier.arrive(k_empty.index(turn % BUFFERS), count=1)  # this warp needs no K
        tile, head = place(item, key_tiles, batch_heads, section)
        first = first_of(tile, query_tiles, IS_CAUSAL, BLOCK_M)
        stores = (tile == 0) & (not ZEROED)
        reported = 0
        for n in range(query_tiles - first):
            i = nth_of(first, query_tiles, n, D)
            before = nth_of(0, query_tiles, i, D)  # tiles that the head's first keys have before this one
            if not ZEROED:
                if stores:
                    _report(reports_ptr + head, n)
                elif reported <= before:
                    reported = _wait_for_report(reports_ptr + head, before + 1)
            if D == 64:
                mbarrier.wait(dq_full.index(t & 1), (t // 2) & 1)
                _send(dq_desc, dq_smem.index(t & 1), head, i * DQ_ROWS, stores, 64)
                mbarrier.arrive(dq_empty.index(t & 1), count=1)
            else:
                for half in gl.static_range(2):
                    mbarrier.wait(dq_full.index(half), t & 1)
                    _send(dq_desc, dq_smem.index(half), head, (2 * i + half) * DQ_ROWS, stores,
                          REST if REST and half else 64)  # fmt: skip
                    mbarrier.arrive(dq_empty.index(half), count=1)
            t += 1
        if stores:
            _report(reports_ptr + head, query_tiles)
        turn += 1
        item = drawn(work, turn, 1)
