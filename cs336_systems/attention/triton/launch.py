"""Launches the Triton kernels: their grids and arguments, and the room that they share."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import triton

from cs336_systems.attention.machine_code import faulty
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.again import Launch, Pass, Shape, precision_of
from cs336_systems.attention.triton.backward import backward_keys_kernel, backward_queries_kernel
from cs336_systems.attention.triton.kernels import bounds_kernel, combine_kernel, forward_kernel
from cs336_systems.attention.triton.tiles import (
    Tiles,
    apart_for,
    capability_of,
    rows_of,
    splits_for,
    tiles_for,
    tiles_without_wgmma,
)

KERNELS = {
    "forward": forward_kernel,
    "backward_queries": backward_queries_kernel,
    "backward_keys": backward_keys_kernel,
}

# TRITON_INTERPRET=1 at the time of import: kernels run on the CPU
INTERPRETED = triton.knobs.runtime.interpret

# tf32x3: three TF32 matmuls make one that is accurate to fp32, on the tensor cores. For 16-bit tiles it has no effect.
INPUT_PRECISION = {"half": "tf32", "tf32": "tf32", "fp32": "tf32x3"}

# for the compiler of every kernel: a x + b in one instruction, which triton 3.10 is to do only where it is asked to
FUSED = {"enable_fp_fusion": True}

COMBINED_ROWS = 8  # queries of a program that combines
BOUNDED = 256  # tokens of a program that looks for their documents

FAR = 2**22  # a stride from which on offsets within a tile, of at most 256 rows and columns, may pass 2^31


def strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """The arguments of a kernel that are the strides of a tensor (batch, heads, n, d)."""
    return dict(
        zip((f"stride_{name}_{axis}" for axis in ("batch", "head", "row", "col")), x.stride(), strict=True)
    )


@functools.cache
def _with_wide(kernel: Any, names: tuple[str, ...]) -> Any:
    """The kernel with these arguments in 64 bits."""
    function = types.FunctionType(kernel.fn.__code__, kernel.fn.__globals__, kernel.fn.__name__)
    function.__annotations__ = kernel.fn.__annotations__ | dict.fromkeys(names, "tl.int64")
    return triton.jit(function, do_not_specialize=kernel.do_not_specialize)


def wide(kernel: Any, arguments: dict[str, Any]) -> Any:
    """The kernel for these arguments: itself or, with strides from FAR on, which triton would pass in 32 bits, the same
    with these strides in 64 bits, so that offsets within a tile do not overflow. All others keep their machine code,
    which would need more registers."""
    names = tuple(name for name, x in arguments.items() if name.endswith(("_row", "_col")) and x >= FAR)
    return _with_wide(kernel, names) if names and not INTERPRETED else kernel


def _arguments(
    kernel: str, tensors: dict[str, torch.Tensor | None], is_causal: bool, tiles: Tiles, window: int | None = None,
    splits: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """All arguments of a kernel, in the order of its signature: pointers, strides, sizes, constants. Of tensors that
    are not to be computed (None) it makes no use of the strides, either."""
    q, k = tensors["q"], tensors["k"]
    batch, q_heads, num_queries, head_dim = q.shape
    heads = (k if kernel == "backward_keys" else q).shape[1]  # a program is for one of these
    arguments: dict[str, Any] = {f"{name}_ptr": x for name, x in tensors.items()}
    arguments.setdefault("bounds_ptr", None)
    for name, x in tensors.items():
        x = k if x is None else x
        if x.ndim == 4:  # L, delta and bounds are contiguous and have no strides among the arguments
            arguments |= strides(name, x)
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, num_keys=k.shape[2], window=window,
        scale=head_dim**-0.5, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim, IS_CAUSAL=is_causal,
        EVEN_M=num_queries % tiles.block_m == 0, EVEN_N=k.shape[2] % tiles.block_n == 0,
        HEADS_PER_KV=q_heads // k.shape[1],
    )  # fmt: skip
    if "do" in tensors:
        do = tensors["do"]
        arguments["EXPANDED"] = 0 if do.stride(3) else 1 if do.stride(2) else 2
    arguments["PRECISION"] = INPUT_PRECISION[precision_of(q.dtype)]
    if kernel == "forward":
        arguments["SPLITS"] = splits
    assert tuple(arguments) == tuple(KERNELS[kernel].arg_names), (
        "a remembered kernel takes arguments by position"
    )
    return arguments


def options_of(tiles: Tiles) -> dict[str, Any]:
    """What a kernel in these tiles asks of the compiler."""
    return FUSED | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def _mistrusted(
    kernel: str, tensors: dict[str, torch.Tensor | None], arguments: dict[str, Any], tiles: Tiles
) -> bool:
    """Whether the assembler may have got a kernel wrong (see `machine_code`): on Hopper, where columns are not
    contiguous, which needs a register for the address of each element, and where its code shows the fault."""
    device = tensors["q"].device
    if INTERPRETED or device.type != "cuda" or capability_of(device.index) != 90:
        return False
    if any(x is not None and x.ndim == 4 and x.stride(3) > 1 for x in tensors.values()):
        return True
    return faulty(wide(KERNELS[kernel], arguments).warmup(grid=(1,), **arguments, **options_of(tiles)))


def first_launch(
    kernel: str, tensors: dict[str, torch.Tensor | None], is_causal: bool, tiles: Tiles | None,
    window: int | None = None, splits: int = 1, table: Tiles | None = None,
) -> list[Launch]:  # fmt: skip
    """Compiles one of KERNELS where needed, launches it, and returns how to do so again (nothing when interpreted).
    Without `tiles`, those of the tables (`table`, or `tiles_for`), or others where the machine code they lead to is
    not to be trusted."""
    q, k = tensors["q"], tensors["k"]
    given = tiles is not None
    tiles = tiles or table or tiles_for(kernel, q, k, precision_of(q.dtype))
    arguments = _arguments(kernel, tensors, is_causal, tiles, window, splits)
    if not given and _mistrusted(kernel, tensors, arguments, tiles):
        tiles = tiles_without_wgmma(q.shape[3], precision_of(q.dtype))
        arguments = _arguments(kernel, tensors, is_causal, tiles, window, splits)
    length = k.shape[2] if kernel == "backward_keys" else q.shape[2]
    grid = (triton.cdiv(length, rows_of(kernel, tiles)) * arguments["batch_heads"], splits, 1)
    return _launched(KERNELS[kernel], grid, arguments, len(tensors), options_of(tiles))


def _launched(
    kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], pointers: int, options: dict[str, Any]
) -> list[Launch]:
    """Launches a kernel whose arguments begin with so many pointers, and returns how to do so again."""
    compiled = wide(kernel, arguments)[grid](**arguments, **options)
    return [] if INTERPRETED else [Launch(compiled, grid, tuple(arguments.values())[pointers:])]


# ------------------------------------------------------------------------------------------------ forward
def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tiles: Tiles | None = None,
    splits: int | None = None, seen: again.Seen = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """O and L as `again.forward` describes them.

    splits: among how many programs the keys are split, without a mask only, at most as many as there are tiles of keys
    (None: `tiles.splits_for`).
    """
    return again.forward(first_forward, q, k, v, is_causal, (tiles, splits), seen)


def first_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool,
    config: tuple[Tiles | None, int | None] | None = None, window: int | None = None,
    cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,
) -> Pass:  # fmt: skip
    """Launches the forward pass into `o` and `logsumexp`, as `again.forward` asks for it, whatever `max_seqlen`."""
    tiles, splits = config or (None, None)
    splits = splits or (1 if is_causal else splits_for(q, k))
    if splits == 1:
        launches, scratch, bounds, window = first_bounds(cu_seqlens, q, window)
        tensors = dict(q=q, k=k, v=v, o=o, l=logsumexp) | bounds
        launches += first_launch("forward", tensors, is_causal, tiles, window)
        return Pass(launches, with_bounds, scratch)
    # O and L of each split
    parts = ((splits, *q.shape), torch.float32), ((splits, *logsumexp.shape), torch.float32)
    o_parts, l_parts = again.empty(parts, q.device)
    tensors = dict(q=q, k=k, v=v, o=o_parts[0], l=l_parts[0])
    launches = first_launch("forward", tensors, is_causal, tiles, splits=splits)
    launches += _first_combination(o_parts, l_parts, o, logsumexp)

    def addresses(q_at, k_at, v_at, o_at, l_at, *parts_at):
        return (q_at, k_at, v_at, *parts_at), (*parts_at, o_at, l_at)

    return Pass(launches, addresses, parts)


def first_bounds(
    cu_seqlens: torch.Tensor | None, q: torch.Tensor, window: int | None
) -> tuple[
    list[Launch], tuple[tuple[tuple[int, ...], torch.dtype], ...], dict[str, torch.Tensor], int | None
]:
    """Of packed documents: how to find their tokens' bounds (2, total) again, their scratch, and the bounds by name;
    and the window, where they do not say it already."""
    if cu_seqlens is None:
        return [], (), {}, window
    documents, total = len(cu_seqlens) - 1, q.shape[2]
    scratch = (((2, total), torch.int32),)
    (bounds,) = again.empty(scratch, q.device)
    arguments = dict(
        cu_seqlens_ptr=cu_seqlens, bounds_ptr=bounds, documents=documents, total=total, window=window,
        STEPS=(documents - 1).bit_length(), BLOCK=BOUNDED,
    )  # fmt: skip
    grid = (triton.cdiv(total, BOUNDED), 1, 1)
    return _launched(bounds_kernel, grid, arguments, 2, FUSED), scratch, {"bounds": bounds}, None


def with_bounds(q_at: int, k_at: int, v_at: int, o_at: int, l_at: int, *bounds_at: int) -> tuple[Shape, ...]:
    """`Pass.addresses` of a forward pass; bounds_at: those of cu_seqlens and bounds, where documents are packed."""
    tensors_at = q_at, k_at, v_at, o_at, l_at, *bounds_at[1:]
    return (bounds_at, tensors_at) if bounds_at else (tensors_at,)


def _first_combination(
    o_parts: torch.Tensor, l_parts: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor
) -> list[Launch]:
    """Combines O and L of all splits, and returns how to do so again."""
    batch, heads, num_queries, head_dim = o.shape
    arguments = dict(parts_ptr=o_parts, l_parts_ptr=l_parts, o_ptr=o, l_ptr=logsumexp) | strides("o", o)
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, ROWS=COMBINED_ROWS,
        BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim, SPLITS=len(o_parts),
    )  # fmt: skip
    grid = (triton.cdiv(num_queries, COMBINED_ROWS) * batch * heads, 1, 1)
    return _launched(combine_kernel, grid, arguments, 4, FUSED)


# ------------------------------------------------------------------------------------------------ backward
def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, query_tiles: Tiles | None = None, key_tiles: Tiles | None = None, seen: again.Seen = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV as `again.backward` describes them."""
    return again.backward(
        first_backward, q, k, v, o, logsumexp, do, is_causal, (query_tiles, key_tiles), seen
    )


def first_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, is_causal: bool,
    config: tuple[Tiles | None, Tiles | None] | None = None, window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Pass:  # fmt: skip
    """Launches the two kernels of the backward pass into `dq`, `dk` and `dv`, as `again.backward` asks for it; that for
    keys once for both of these, or once for each (`tiles.APART`). An expanded `do` is not copied."""
    query_tiles, key_tiles = config or (None, None)
    launches, scratch, bounds, window = first_bounds(cu_seqlens, q, window)
    scratch = (*scratch, (tuple(logsumexp.shape), torch.float32))
    (delta,) = again.empty(scratch[-1:], q.device)
    first = dict(q=q, k=k, v=v, o=o, do=do, l=logsumexp, delta=delta, dq=dq) | bounds
    launches += first_launch("backward_queries", first, is_causal, query_tiles, window)
    second = dict(q=q, k=k, v=v, do=do, l=logsumexp, delta=delta, dk=dk, dv=dv) | bounds
    apart = None if key_tiles else apart_for(q, k, precision_of(q.dtype))
    for tiles, other in zip(apart, ("dv", "dk"), strict=True) if apart else ((None, None),):
        without = {other: None} if other else {}
        launches += first_launch("backward_keys", second | without, is_causal, key_tiles, window, table=tiles)

    def addresses(q_at, k_at, v_at, o_at, l_at, do_at, dq_at, dk_at, dv_at, *more_at):
        *bounds_at, delta_at = more_at
        inputs, last = (q_at, k_at, v_at), bounds_at[1:]
        by_query = *inputs, o_at, do_at, l_at, delta_at, dq_at, *last
        made = ((dk_at, None), (None, dv_at)) if apart else ((dk_at, dv_at),)
        by_key = [(*inputs, do_at, l_at, delta_at, *of_each, *last) for of_each in made]
        return (tuple(bounds_at), by_query, *by_key) if bounds_at else (by_query, *by_key)

    return Pass(launches, addresses, scratch)
