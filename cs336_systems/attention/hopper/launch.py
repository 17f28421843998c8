"""Launches the Hopper kernels: which tensors they serve, with how many programs, the buffers of the backward pass."""

from __future__ import annotations

import dataclasses
import functools

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
from cs336_systems.attention.hopper.tma import descriptor
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.again import Pass
from cs336_systems.attention.triton.launch import First
from cs336_systems.attention.triton.tiles import CROSS, few_programs_of, multiprocessors_of, splits_for

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
    """How many heads make a section (see `common.locate`): all, if they have their tensors in the L2 cache together,
    so that no head's heaviest tile begins late; else as many as do, or (not `exact`) the power of two below."""
    fit = max(1, _L2_BYTES // bytes_of_a_head)
    if batch_heads <= fit:
        return batch_heads
    return fit if exact else 1 << (fit.bit_length() - 1)


# ------------------------------------------------------------------------------------------------ forward
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
    row_tiles = full = triton.cdiv(num_queries, config.groups * GROUP)
    if not is_causal:
        full = full_tiles(config, columns_of(head_dim), batch * heads, num_queries, multiprocessors)
        row_tiles = full + max(triton.cdiv(num_queries, GROUP) - full * config.groups, 0)
    # tiles of documents have no pairs of the same work: a program takes one, when another program has ended
    persistent = config.can_persist(head_dim) and not packed and (
        not is_causal or window is not None or even_pairs(config, *sizes, multiprocessors)
    )  # fmt: skip
    rows, keys = (1, 1, GROUP, piece_of(d)), (1, 1, config.block_n, piece_of(d))
    descriptors = [
        (name, descriptor(x, *block)) for name, x, block in
        (("q", q, rows), ("k", k, keys), ("v", v, keys), ("o", o, rows))
    ]  # fmt: skip
    kernel = wide_kernel if d > 128 else alone_kernel if config.alone else forward_kernel
    chain = chain_of(config, *sizes, is_causal, multiprocessors) if config.alone else 1
    programs = triton.cdiv(row_tiles, chain) * batch * heads
    if persistent:
        programs = min(programs, multiprocessors)
    first = First(q, k, v, o, logsumexp, is_causal, window, cu_seqlens)
    first.launch(
        kernel, (programs, 1, 1), descriptors, {} if config.registers is None else {"maxnreg": config.registers},
        section=section_of(batch * heads, 4 * num_keys * d * k.shape[1] // heads), full_tiles=full, row_tiles=row_tiles,
        chain=chain, GROUPS=config.groups, BLOCK_N=config.block_n, D=d, PIECE=piece_of(d), COLUMNS=columns_of(head_dim),
        STAGES=config.stages, OVERLAP=config.overlap, REST=rest_of(head_dim), PERSISTENT=persistent,
        # with fewer keys than queries a first tile of keys need not lie on the diagonal
        HALVE=is_causal and config.halves and num_keys >= num_queries, num_warps=4,
    )  # fmt: skip
    return first.done


# ------------------------------------------------------------------------------------------------ backward
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
    limited = window is not None or cu_seqlens is not None
    wide, power = d > 128, triton.next_power_of_2(d)
    assert not wide or not limited, "`serves` leaves these to the portable kernels"
    few = not wide and few_queries(num_queries, num_keys, d) and not limited  # its kernel has no limits
    multiprocessors, keys = multiprocessors_of(q.get_device()), GROUP if few or wide else KEYS
    query_tiles, key_tiles = triton.cdiv(num_queries, GROUP), triton.cdiv(num_keys, keys)
    # with a limit not all queries see a head's first keys
    zeroed = few or wide or limited or num_queries > UNZEROED[d]
    assert o.stride(3) == 1, "o is what forward makes"
    batch_heads, rows, width = batch * heads, query_tiles * GROUP, d if wide else columns_of(head_dim)
    one_number = do.stride(2) == do.stride(3) == 0 and num_queries > 1
    copied = not one_number and not addressable(do)
    if copied:  # to the start of an allocation, which is aligned: a contiguous view may begin anywhere
        do = do.clone(memory_format=torch.contiguous_format)
    scratch = {
        "stats": ((batch_heads * 2, rows), torch.float32),
        "sum": ((batch_heads, rows * power // DQ_COLUMNS.value, DQ_COLUMNS.value), torch.float32),
        "counters": ((1 + batch_heads,), torch.int32),
    }
    # TMA cannot broadcast a scalar: the first kernel writes a tile of it, which serves all rows
    tile, dk_made, dv_made = "tile" if one_number else "do", "dk", "dv"
    if one_number:
        scratch["tile"] = (batch, heads, GROUP, power), q.dtype
    if heads > kv_heads:  # dK and dV of each head of queries
        dk_made, dv_made = "dk_parts", "dv_parts"
        scratch |= dict.fromkeys((dk_made, dv_made), ((batch, heads, num_keys, head_dim), q.dtype))
    gradients = dict(do=do, dq=dq, dk=dk, dv=dv)
    first = First(q, k, v, o, logsumexp, is_causal, window, cu_seqlens, scratch, **gradients)
    # the more heads in a section, the longer ago its heads' first keys began when the others wait for them
    first.values |= dict(
        section=section_of(batch_heads, 8 * num_queries * d, exact=not zeroed and d == 64), key_tiles=key_tiles,
        query_tiles=query_tiles, padded_queries=rows, ROWS=_ROWS, WIDTH=width, ZEROED=zeroed, TILES=query_tiles,
        COLUMNS=columns_of(head_dim), DO_STEP=0 if one_number else 1, REST=rest_of(head_dim),
        TILE_ROWS=GROUP if one_number else 0, TRANSPOSED=d == 64 and not few, num_warps=4,
    )  # fmt: skip
    warps = {"num_warps": 8 if wide else 4}
    grid = triton.cdiv(rows, _ROWS) * batch_heads, 1, 1
    first.launch(prepare_kernel, grid, (), warps, tile_ptr=tile, D=power)

    block = 1, 1, GROUP, GROUP if wide else d
    blocks = dict.fromkeys(("q", "k", "v", tile, dk_made, dv_made), block) | {"k": (1, 1, keys, block[3])}
    descriptors = [(name, descriptor(first.tensors[name], *x)) for name, x in blocks.items()]
    if not wide:  # of 64 queries and 8 columns four warps have 128 numbers each
        dq_sum = first.tensors["sum"]
        of_warps = dq_sum.view(batch_heads, -1, 4, 128).transpose(1, 2) if few else dq_sum
        blocks_of_sum = dq_tile(rest_of(head_dim), few)
        descriptors.append(("sum", descriptor(of_warps, 1, *blocks_of_sum, swizzled=False)))
    descriptors.append(("stats", descriptor(first.tensors["stats"], 1, GROUP, swizzled=False)))
    # a launch with launch_pdl does not wait for the end of the kernel before: the kernel does
    kernel, programs, options = few_queries_kernel, key_tiles * batch_heads, {"launch_pdl": True}
    if few:
        options["maxnreg"] = FEW_REGISTERS[d][query_tiles - 1]
    elif wide:
        kernel = backward_wide_kernel
    else:
        kernel, programs = backward_keys_kernel, min(programs, multiprocessors)
    first.launch(kernel, (programs, 1, 1), descriptors, options, D=d)
    grid = triton.cdiv(num_queries, _ROWS) * batch_heads, 1, 1
    first.launch(finish_kernel, grid, (), warps | {"launch_pdl": True}, D=power)
    if heads > kv_heads:
        grid = triton.cdiv(num_keys, _ROWS) * batch * kv_heads, 2, 1
        first.launch(sum_kernel, grid, heads=kv_heads, D=power)
    return dataclasses.replace(first.done, copies_do=copied)


# O and L, and dQ, dK and dV, as `again.forward` and `again.backward` describe them
launch_forward = functools.partial(again.forward, first_forward)
launch_backward = functools.partial(again.backward, first_backward)
