"""Launches the Hopper kernels: which tensors they serve, with how many programs, the buffers of the backward pass."""

from __future__ import annotations

import math

import torch
import triton

from cs336_systems.attention.hopper.backward import backward_keys_kernel
from cs336_systems.attention.hopper.backward_dq import DQ_COLUMNS
from cs336_systems.attention.hopper.backward_ends import finish_kernel, prepare_kernel, sum_kernel
from cs336_systems.attention.hopper.backward_few import few_queries_kernel
from cs336_systems.attention.hopper.backward_wide import backward_wide_kernel
from cs336_systems.attention.hopper.configs import (
    FEW_REGISTERS,
    GROUP,
    Forward,
    chain_of,
    columns_of,
    dq_tile,
    even_pairs,
    few_queries,
    forward_config,
    full_tiles,
    padded,
    piece_of,
    rest_of,
)
from cs336_systems.attention.hopper.forward import forward_kernel
from cs336_systems.attention.hopper.forward_alone import alone_kernel
from cs336_systems.attention.hopper.forward_wide import wide_kernel
from cs336_systems.attention.hopper.tma import descriptor, first_launch
from cs336_systems.attention.hopper.workspace import Workspace
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.again import Pass
from cs336_systems.attention.triton.launch import first_bounds, strides, with_bounds
from cs336_systems.attention.triton.tiles import CROSS, few_programs_of, multiprocessors_of, splits_for

LOG2_E = math.log2(math.e)
KEYS = 128  # of a tile of the backward kernel
MIN_HEAD_DIM, MAX_HEAD_DIM = 33, 256  # smaller ones would be padded to twice as much and more
MAX_LIMITED_HEAD_DIM = 128
MIN_LENGTH = 64  # queries and keys from which on the forward kernel is faster than the portable one
# up to so many programs per multiprocessor, in tiles for few, the portable backward kernels are faster than the three
# here: tiles as large as these make fewer programs, and the time is that of the longest one
PORTABLE_BACKWARD = 1
# the same of a few keys for many queries: up to so many programs here per multiprocessor
PORTABLE_BACKWARD_OF_KEYS = 0.25
_ROWS = 64  # of a program of the two small kernels
_L2_BYTES = 30 * 2**20  # that a section's tensors may take of the L2 cache (50 MiB on an H100)
# queries up to which the backward kernel does without zeros to add to: the longer the rows, the less of the time goes
# into zeros, and waiting for the programs of a head's first keys costs more
UNZEROED = {64: 1024, 128: 2048}  # by the padded head dimension
# the mean length of packed documents is at least the longest's over this: of lengths drawn at random most are far from
# it, and small programs, which short ones want, lose less with long ones than large programs do with short ones
OF_LONGEST = 8


# ------------------------------------------------------------------------------------------------ who is served
def addressable(x: torch.Tensor) -> bool:
    """Whether TMA can read x (batch, heads, n, d): 16-byte aligned, columns next to each other, no stride of zero."""
    batch, head, row, column = x.stride()
    if x.data_ptr() % 16 or column != 1 or row <= 0 or row % 8:
        return False
    return all(
        n == 1 or (stride > 0 and stride % 8 == 0) for n, stride in zip(x.shape, (batch, head), strict=False)
    )


def reason_against(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why tensors (batch, heads, n, d) on a Hopper GPU are not for these kernels; None if they are."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype}: they compute in 16 bits"
    if not MIN_HEAD_DIM <= q.shape[3] <= MAX_HEAD_DIM:
        return f"head dimension {q.shape[3]}: {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if q.shape[3] % 8:  # rows of O, which they allocate, would not begin where TMA can write
        return f"head dimension {q.shape[3]}: multiples of 8"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not addressable(x):
            return (
                f"{name}: TMA cannot read strides {x.stride()} at an address of {x.data_ptr() % 16} modulo 16"
            )
    return None


def serves(
    part: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, packed: bool = False,
) -> bool:  # fmt: skip
    """Whether on a Hopper GPU these kernels are for `part`, "forward" or "backward", of the attention of tensors
    (batch, heads, n, d), with or without a window, packed documents or not; if not, the portable ones are. Which kernel
    here then takes them `configs.forward_config` and `configs.few_queries` say."""
    if q.dtype == torch.float32 or k.shape[2] < MIN_LENGTH:
        return False
    # of few queries and many keys the portable kernel for dQ would walk along all keys in few programs
    if q.shape[2] < MIN_LENGTH and (part == "forward" or k.shape[2] < CROSS * q.shape[2]):
        return False
    limited = window is not None or packed
    if reason_against(q, k, v) is not None or (limited and q.shape[3] > MAX_LIMITED_HEAD_DIM):
        return False
    batch, heads, num_queries, _ = q.shape
    num_keys, multiprocessors = k.shape[2], multiprocessors_of(q.get_device())
    if part == "forward":
        # few queries against many keys: the portable forward kernel splits the keys among programs
        return num_keys < CROSS * num_queries or splits_for(q, k) < 4
    # with more keys than queries a portable program for queries has more to do than any here
    programs = few_programs_of(batch * heads, num_queries)
    if num_keys <= num_queries and programs <= PORTABLE_BACKWARD * multiprocessors:
        return False
    programs_of_keys = batch * k.shape[1] * triton.cdiv(num_keys, KEYS)
    return CROSS * num_keys > num_queries or programs_of_keys > PORTABLE_BACKWARD_OF_KEYS * multiprocessors


def section_of(batch_heads: int, bytes_of_a_head: int, exact: bool = False) -> int:
    """How many heads make a section (see `common.locate`): as many as have their tensors in the L2 cache
    together, or (not `exact`) the power of two below."""
    section = max(1, min(batch_heads, _L2_BYTES // bytes_of_a_head))
    return section if exact else 1 << (section.bit_length() - 1)


# ------------------------------------------------------------------------------------------------ forward
def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, config: Forward | None = None,
    seen: again.Seen = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """O and L as `again.forward` describes them."""
    return again.forward(first_forward, q, k, v, is_causal, config, seen)


def first_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool,
    config: Forward | None = None, window: int | None = None, cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Pass:  # fmt: skip
    """Launches the forward pass into `o` and `logsumexp`, as `again.forward` asks for it."""
    batch, heads, num_queries, head_dim = q.shape
    num_keys, d, multiprocessors = k.shape[2], padded(head_dim), multiprocessors_of(q.get_device())
    sizes = batch * heads, num_queries, num_keys
    most, packed = window or num_keys, cu_seqlens is not None
    if packed:  # only the device knows where documents end: as if all were as long, and half of each was seen
        mean = triton.cdiv(num_keys, len(cu_seqlens) - 1)
        if max_seqlen is not None:  # the entries may be filled up
            mean = max(mean, max_seqlen // OF_LONGEST)
        most = min(most, triton.cdiv(mean, 2))
    config = config or forward_config(*sizes, head_dim, is_causal, multiprocessors, most)
    launches, scratch, bounds, window = first_bounds(cu_seqlens, q, window)
    limit = bounds.get("bounds", window)
    row_tiles = full = triton.cdiv(num_queries, config.groups * GROUP)
    if not is_causal:
        full = full_tiles(config, columns_of(head_dim), batch * heads, num_queries, multiprocessors)
        row_tiles = full + max(triton.cdiv(num_queries, GROUP) - full * config.groups, 0)
    # tiles of documents have no pairs of the same work: a program takes one, when another program has ended
    persistent = config.can_persist(head_dim) and not packed and (
        not is_causal or window is not None or even_pairs(config, *sizes, multiprocessors)
    )  # fmt: skip
    rows, keys = (1, 1, GROUP, piece_of(d)), (1, 1, config.block_n, piece_of(d))
    descriptors = descriptor(q, *rows), descriptor(k, *keys), descriptor(v, *keys), descriptor(o, *rows)
    kernel = wide_kernel if d > 128 else alone_kernel if config.alone else forward_kernel
    chain = chain_of(config, *sizes, is_causal, multiprocessors) if config.alone else 1
    programs = triton.cdiv(row_tiles, chain) * batch * heads
    if persistent:
        programs = min(programs, multiprocessors)
    values = dict(
        l_ptr=logsumexp, limit=limit, heads=heads, batch_heads=batch * heads,
        section=section_of(batch * heads, 4 * num_keys * d * k.shape[1] // heads), full_tiles=full, row_tiles=row_tiles,
        num_queries=num_queries, num_keys=num_keys, scale_log2=head_dim**-0.5 * LOG2_E, chain=chain,
        IS_CAUSAL=is_causal, GROUPS=config.groups, BLOCK_N=config.block_n, D=d, PIECE=piece_of(d),
        COLUMNS=columns_of(head_dim), STAGES=config.stages, OVERLAP=config.overlap, REST=rest_of(head_dim),
        PERSISTENT=persistent,
        # with fewer keys than queries a first tile of keys need not lie on the diagonal
        HALVE=is_causal and config.halves and num_keys >= num_queries, HEADS_PER_KV=heads // k.shape[1], num_warps=4,
    )  # fmt: skip
    arguments = {name: values[name] for name in kernel.arg_names[len(descriptors) :]}
    options = {} if config.registers is None else {"maxnreg": config.registers}
    launches.append(
        first_launch(kernel, (programs, 1, 1), descriptors, 1 + len(bounds), arguments, **options)
    )
    return Pass(launches, with_bounds, scratch)


# ------------------------------------------------------------------------------------------------ backward
def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, seen: again.Seen = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV as `again.backward` describes them."""
    return again.backward(first_backward, q, k, v, o, logsumexp, do, is_causal, None, seen)


def first_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, is_causal: bool, config: None = None,
    window: int | None = None, cu_seqlens: torch.Tensor | None = None,
) -> Pass:  # fmt: skip
    """Launches the three kernels of the backward pass (of grouped queries four) into `dq`, `dk` and `dv`, as
    `again.backward` asks for it.

    dQ's last bits depend on the order of additions, which differs from run to run. `do` may be one scalar per head,
    expanded; it is copied otherwise where TMA cannot read it. There is no `config` to choose.
    """
    batch, heads, num_queries, head_dim = q.shape
    (_, kv_heads, num_keys, _), d = k.shape, padded(head_dim)
    heads_per_kv = heads // kv_heads
    launches, scratch, bounds, window = first_bounds(cu_seqlens, q, window)
    limit = bounds.get("bounds", window)
    wide, power = d > 128, triton.next_power_of_2(d)
    assert not wide or limit is None, "`serves` leaves these to the portable kernels"
    few = not wide and few_queries(num_queries, num_keys, d) and limit is None  # its kernel has no limits
    multiprocessors, keys = multiprocessors_of(q.get_device()), GROUP if few or wide else KEYS
    query_tiles, key_tiles = triton.cdiv(num_queries, GROUP), triton.cdiv(num_keys, keys)
    # with a limit not all queries see a head's first keys
    zeroed = few or wide or limit is not None or num_queries > UNZEROED[d]
    as_made = o.stride(3) == 1 and logsumexp.is_contiguous() and do.dtype == q.dtype
    assert as_made, "o, logsumexp and do are what forward and autograd make"
    scale, batch_heads = head_dim**-0.5, batch * heads
    rest, width, piece = rest_of(head_dim), d if wide else columns_of(head_dim), GROUP if wide else d
    rows = query_tiles * GROUP
    one_number = do.stride(2) == do.stride(3) == 0 and num_queries > 1
    copied = not one_number and not addressable(do)
    if copied:  # to the start of an allocation, which is aligned: a contiguous view may begin anywhere
        do = do.clone(memory_format=torch.contiguous_format)
    workspace = Workspace(
        (batch_heads * 2, rows),
        (batch_heads, rows * power // DQ_COLUMNS.value, DQ_COLUMNS.value),
        1 + batch_heads,
        # TMA cannot broadcast a scalar: the first kernel writes a tile of it, which serves all rows
        (batch, heads, GROUP, power) if one_number else None,
    )
    more = workspace.scratch
    if heads_per_kv > 1:  # dK and dV of each head of queries
        more += (((batch, heads, num_keys, head_dim), q.dtype),) * 2
    buffer, *parts = again.empty(more, q.device)
    dk_made, dv_made = parts or (dk, dv)
    stats, dq_sum, counters, do_tile = workspace.tensors(buffer, q.dtype)
    do_tile = do if do_tile is None else do_tile
    arguments = dict(o_ptr=o, do_ptr=do, l_ptr=logsumexp, stats_ptr=stats, dq_ptr=dq_sum, tile_ptr=do_tile,
                     counters_ptr=counters)  # fmt: skip
    arguments |= strides("o", o) | strides("do", do)
    del arguments["stride_o_col"]  # 1
    arguments |= dict(
        heads=heads, num_queries=num_queries, padded_queries=rows, HEAD_DIM=head_dim, WIDTH=width, D=power,
        ROWS=_ROWS, TILE_ROWS=GROUP if one_number else 0, ZEROED=zeroed,
    )  # fmt: skip
    warps = 8 if wide else 4
    grid = triton.cdiv(rows, _ROWS) * batch_heads, 1, 1
    prepare = first_launch(prepare_kernel, grid, (), 7, arguments, num_warps=warps)
    sums = ()
    if not wide:  # of 64 queries and 8 columns four warps have 128 numbers each
        of_warps = dq_sum.view(batch_heads, -1, 4, 128).transpose(1, 2) if few else dq_sum
        sums = (descriptor(of_warps, 1, *dq_tile(rest, few), swizzled=False),)
    descriptors = (
        descriptor(q, 1, 1, GROUP, piece), descriptor(k, 1, 1, keys, piece), descriptor(v, 1, 1, GROUP, piece),
        *(descriptor(x, 1, 1, GROUP, piece) for x in (do_tile, dk_made, dv_made)),
        *sums, descriptor(stats, 1, GROUP, swizzled=False),
    )  # fmt: skip
    # a launch with launch_pdl does not wait for the end of the kernel before: the kernel does
    kernel, programs, options = few_queries_kernel, key_tiles * batch_heads, {"launch_pdl": True}
    if few:
        options["maxnreg"] = FEW_REGISTERS[d][query_tiles - 1]
    elif wide:
        kernel = backward_wide_kernel
    else:
        kernel, programs = backward_keys_kernel, min(programs, multiprocessors)
    # the more heads in a section, the longer ago its heads' first keys began when the others wait for them
    section = section_of(batch_heads, 8 * num_queries * d, exact=not zeroed and d == 64)
    values = dict(
        counters_ptr=counters, sum_ptr=dq_sum, limit=limit, heads=heads, batch_heads=batch_heads, section=section,
        key_tiles=key_tiles, query_tiles=query_tiles, num_queries=num_queries, num_keys=num_keys,
        scale_log2=scale * LOG2_E, scale=scale, IS_CAUSAL=is_causal, TILES=query_tiles, D=d,
        COLUMNS=columns_of(head_dim), DO_STEP=0 if one_number else 1, REST=rest, ZEROED=zeroed,
        HEADS_PER_KV=heads_per_kv, num_warps=4,
    )  # fmt: skip
    arguments = {name: values[name] for name in kernel.arg_names[len(descriptors) :]}
    main = first_launch(
        kernel, (programs, 1, 1), descriptors, 0 if few else 1 + len(bounds), arguments, **options
    )
    arguments = dict(sum_ptr=dq_sum, dq_ptr=dq)
    arguments |= strides("dq", dq)
    del arguments["stride_dq_col"]  # 1
    arguments |= dict(heads=heads, num_queries=num_queries, padded_queries=rows, scale=scale,
                      HEAD_DIM=head_dim, WIDTH=width, D=power, TRANSPOSED=d == 64 and not few)  # fmt: skip
    programs = triton.cdiv(num_queries, _ROWS) * batch_heads
    finish = first_launch(finish_kernel, (programs, 1, 1), (), 2, arguments, num_warps=warps, launch_pdl=True)
    launches += [prepare, main, finish]
    if parts:
        arguments = dict(dk_parts_ptr=dk_made, dv_parts_ptr=dv_made, dk_ptr=dk, dv_ptr=dv)
        arguments |= strides("dk", dk) | strides("dv", dv)
        del arguments["stride_dk_col"], arguments["stride_dv_col"]  # 1
        arguments |= dict(
            heads=kv_heads,
            num_keys=num_keys,
            HEAD_DIM=head_dim,
            D=power,
            ROWS=_ROWS,
            HEADS_PER_KV=heads_per_kv,
        )
        grid = (triton.cdiv(num_keys, _ROWS) * batch * kv_heads, 2, 1)
        launches.append(first_launch(sum_kernel, grid, (), 4, arguments))

    def addresses(q_at, k_at, v_at, o_at, l_at, do_at, dq_at, dk_at, dv_at, *more_at):
        bounds_at, (buffer_at, *parts_at) = more_at[: 2 * len(bounds)], more_at[2 * len(bounds) :]
        stats_at, sum_at, counters_at, tile_at = workspace.addresses(buffer_at)
        tile_at = tile_at if one_number else do_at
        prepared = o_at, do_at, l_at, stats_at, sum_at, tile_at, counters_at
        described = q_at, k_at, v_at, tile_at, *(parts_at or (dk_at, dv_at))
        if wide:
            main_at = *described, stats_at, sum_at
        else:
            main_at = *described, sum_at, stats_at, *(() if few else (counters_at, *bounds_at[1:]))
        last_at = ((*parts_at, dk_at, dv_at),) if parts_at else ()
        return *((bounds_at,) if bounds else ()), prepared, main_at, (sum_at, dq_at), *last_at

    return Pass(launches, addresses, (*scratch, *more), copies_do=copied)
