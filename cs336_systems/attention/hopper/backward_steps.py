"""A tile of queries for the 64 keys of a group of the backward kernels: the matmuls, and what runs beside them. At
D = 64 that is `step`; at D = 128, where three groups would lack registers, `late_step`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper.backward_dq import put_dq
from cs336_systems.attention.hopper.backward_state import BLOCK_M
from cs336_systems.attention.hopper.common import (
    WG,
    accumulator,
    mma_layout,
    mma_of_columns,
    mma_of_part,
    mma_over_columns,
    rounded,
    wait_for_both,
    widened,
)


@gluon.jit
def step(program, k, v, first_key, i, end, t, p, dk, dv, MASKED: gl.constexpr, G: gl.constexpr):
    """Tile i of the queries before `end`, the t-th of this program. p has been computed already, and that of the next
    tile is computed here: its exponentials overlap dK's matmul. MASKED: the next one's are masked, which changes
    nothing after the last tile that needs it. dQ is left to a group of its own."""
    queries, gradients = program.queries, program.gradients
    D: gl.constexpr = queries.D
    STAGES: gl.constexpr = queries.STAGES
    s_layout: gl.constexpr = mma_layout(BLOCK_M)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_layout(D), 2)
    DTYPE: gl.constexpr = queries.q.dtype
    slot = t % STAGES
    parity = (t // STAGES) & 1
    q = queries.q.index(slot).reshape([BLOCK_M, D])
    do = queries.do.index(slot).reshape([BLOCK_M, D])

    dp = accumulator(BLOCK_M)
    mbarrier.wait(queries.do_full.index(slot), parity)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    p16 = rounded(p, DTYPE)
    dv = warpgroup_mma(gl.convert_layout(p16, operand, assert_trivial=True), do, dv, is_async=True)
    minus_delta = queries.statistic(1, t, s_layout)
    # at the end the scores are of this tile again, and unused
    following = gl.where(i + 1 < end, t + 1, t)
    s = queries.scores(k, following)
    dp = warpgroup_mma_wait(2, deps=(dp,))
    # from the rounded P, so that the fp32 one need not stay in registers
    ds = rounded(widened(p16) * (dp + minus_delta[None, :]), DTYPE)

    ds_slot = t & 1
    ds_tile = gradients.ds.index(ds_slot)
    mbarrier.wait(gradients.ds_empty.index(ds_slot), ((t // 2) & 1) ^ 1)
    ds_tile.slice(G * WG, WG).store(ds)
    fence_async_shared()
    mbarrier.arrive(gradients.ds_full.index(ds_slot), count=1)
    dk = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk, is_async=True)
    dv, s = warpgroup_mma_wait(1, deps=(dv, s))
    mbarrier.arrive(queries.do_empty.index(slot), count=1)
    p = program.probabilities(s, first_key, i + 1, following, MASKED, G)
    # complete long ago; keeps the next wait behind the exponentials
    mbarrier.wait(queries.do_full.index(slot), parity)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(queries.q_empty.index(slot), count=1)
    return p, dk, dv


@gluon.jit
def zero(t):
    """0, from the index of a tile so that the compiler cannot fold it: it would keep all descriptors of K and V, which
    stay the same for a tile of keys, in registers that the accumulators need."""
    return t >> 30


@gluon.jit
def late_dq(program, t, G: gl.constexpr):
    """Issues a group's half of dQ of tile t: of its columns, over the keys of both groups."""
    kv, gradients = program.kv, program.gradients
    REST: gl.constexpr = program.REST
    WIDTH: gl.constexpr = REST if REST and G else 64
    slot = (t + 3) % 3
    # before the first tile: a matmul whose result is unused
    mbarrier.wait(gradients.ds_full.index(slot), (t // 3) & 1, pred=t >= 0)
    empty = accumulator(WIDTH)
    k_half = kv.k.index(zero(t + 1)).reshape([2 * WG, kv.D]).slice(G * 64, WIDTH, 1)
    return warpgroup_mma(
        gradients.ds.index(slot).permute((1, 0)), k_half, empty, use_acc=False, is_async=True
    )


@gluon.jit
def late_step(program, first_key, i, t, keys_t, more, s, v, dk, dv, MASKED: gl.constexpr, G: gl.constexpr):
    """`step` in which the two groups need not run in lockstep: dQ of the previous tile is computed beside dV,
    not right after both have stored their dSᵀ, and the scores, s, of the next tile, if there are more, are issued
    before dK is done. The first tile of these keys was the program's keys_t-th. v (with REST): both parts of V in
    registers.

    Accumulators of 128 columns leave room for the first 64 of V only, and only where fewer matmuls are under way at
    once: dP is issued when P is computed, dQ when dSᵀ is stored, the scores when dK is done. That is faster without a
    mask.

    A group may be a tile ahead of the other, which still reads the dSᵀ of the previous tile: hence three buffers. It is
    not two ahead: with two stages, the Q of its next tile takes the place of one that both groups are done with."""
    queries, kv, gradients = program.queries, program.kv, program.gradients
    D: gl.constexpr = queries.D
    STAGES: gl.constexpr = queries.STAGES
    s_layout: gl.constexpr = mma_layout(BLOCK_M)
    REST: gl.constexpr = program.REST
    MMAS: gl.constexpr = 2 if REST else 1  # that a product of D columns takes
    DTYPE: gl.constexpr = queries.q.dtype
    slot = t % STAGES
    q = queries.q.index(slot).reshape([BLOCK_M, D])
    do = queries.do.index(slot).reshape([BLOCK_M, D])
    k = kv.k_of(zero(t), G)
    HALF_OF_V: gl.constexpr = not REST and not program.scheduler.IS_CAUSAL
    gl.static_assert(STAGES == 2)
    if not REST:
        v_tile = kv.v.index(G + zero(t)).reshape([WG, D])

    mbarrier.wait(queries.do_full.index(slot), (t // STAGES) & 1)
    dp = accumulator(BLOCK_M)
    if REST:
        dp = mma_of_columns(v, do, dp)
    elif not HALF_OF_V:
        dp = mma_over_columns(v_tile, do, dp, REST)
    p16 = rounded(program.probabilities(s, first_key, i, t, MASKED, G), DTYPE)
    if HALF_OF_V:
        dp = mma_of_columns((v[0], v_tile.slice(64, 64, 1)), do, dp)
    dv = [mma_of_part(p16, do, x) for x in dv]
    if not HALF_OF_V:
        dq = late_dq(program, t - 1, G)
    minus_delta = queries.statistic(1, t, s_layout)
    dp = warpgroup_mma_wait(MMAS if HALF_OF_V else MMAS + 1, deps=(dp,))
    # from the rounded P, so that the fp32 one need not stay in registers
    ds = rounded(widened(p16) * (dp + minus_delta[None, :]), DTYPE)
    ds_slot = t % 3
    gradients.ds.index(ds_slot).slice(G * WG, WG).store(ds)
    fence_async_shared()
    mbarrier.arrive(gradients.ds_full.index(ds_slot), count=1)
    if HALF_OF_V:
        dq = late_dq(program, t - 1, G)
    dk = [mma_of_part(ds, q, x) for x in dk]
    dv, dq = wait_for_both(MMAS, dv, dq)
    mbarrier.arrive(queries.do_empty.index(slot), count=1)
    if t > keys_t:  # while dK's matmul runs
        put_dq(dq, gradients, G, t - 1)
    if HALF_OF_V:
        dk = [warpgroup_mma_wait(0, deps=(x,)) for x in dk]
    s = queries.scores(k, gl.where(more, t + 1, t))
    dk, s = wait_for_both(0, dk, s)
    mbarrier.arrive(queries.q_empty.index(slot), count=1)
    return s, dk, dv


@gluon.jit
def no_key_seen(program, t, keys_t, G: gl.constexpr):
    """Passes over the last tile of queries, the program's t-th, of which none sees this group's keys: its dSᵀ is
    zero. What is left is dQ of the tile before, if that was for the same keys."""
    queries, gradients = program.queries, program.gradients
    STAGES: gl.constexpr = queries.STAGES
    if t > keys_t:
        dq = warpgroup_mma_wait(0, deps=(late_dq(program, t - 1, G),))
        put_dq(dq, gradients, G, t - 1)
    gradients.ds.index(t % 3).slice(G * WG, WG).store(
        gl.zeros([WG, BLOCK_M], queries.q.dtype, mma_layout(BLOCK_M))
    )
    fence_async_shared()
    mbarrier.arrive(gradients.ds_full.index(t % 3), count=1)
    # the next waits at these barriers are for their next phases
    slot = t % STAGES
    parity = (t // STAGES) & 1
    mbarrier.wait(queries.q_full.index(slot), parity)
    mbarrier.wait(queries.do_full.index(slot), parity)
    mbarrier.arrive(queries.q_empty.index(slot), count=1)
    mbarrier.arrive(queries.do_empty.index(slot), count=1)
