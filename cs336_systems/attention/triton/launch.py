"""Launches the Triton kernels: their arguments, and a fast path for every launch after the first of its kind.

Working out some forty arguments, and triton's binding of them, takes longer than a small kernel runs. A launch is
therefore remembered by the layouts it depends on: the compiled kernel, its grid, its arguments after the pointers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.runtime import driver

from cs336_systems.attention.machine_code import faulty
from cs336_systems.attention.triton.kernels import KERNELS, combine_kernel
from cs336_systems.attention.triton.tiles import (
    Tiles,
    capability_of,
    rows_of,
    splits_for,
    tiles_for,
    tiles_without_wgmma,
)

# TRITON_INTERPRET=1 at the time of import: kernels run on the CPU
INTERPRETED = triton.knobs.runtime.interpret

# tf32x3: three TF32 matmuls make one that is accurate to fp32, on the tensor cores. For 16-bit tiles it has no effect.
INPUT_PRECISION = {"half": "tf32", "tf32": "tf32", "fp32": "tf32x3"}

# for the compiler of every kernel: a x + b in one instruction, which triton 3.10 is to do only where it is asked to
FUSED = {"enable_fp_fusion": True}

COMBINED_ROWS = 8  # queries of a program that combines

# A compiled kernel's launcher, its grid, what it takes between the stream and the pointers, and after the pointers
Launch = tuple[Any, tuple[int, int, int], tuple[Any, ...], tuple[Any, ...]]
_remembered: dict[tuple[Any, ...], list[Any]] = {}
MAX_REMEMBERED = 10_000  # the lengths are part of the key, and a program may meet any number of them


def _precision(dtype: torch.dtype) -> str:
    """The precision of the matmuls, as the keys of the tile table name it: of fp32 tiles, that of torch's own
    matmuls."""
    if dtype != torch.float32:
        return "half"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """The arguments of a kernel that are the strides of a tensor (batch, heads, n, d)."""
    return dict(zip((f"{name}_{axis}" for axis in ("batch", "head", "row", "col")), x.stride(), strict=True))


def _arguments(
    kernel: str, tensors: dict[str, torch.Tensor], is_causal: bool, tiles: Tiles, splits: int = 1
) -> dict[str, Any]:
    """All arguments of a kernel, in the order of its signature: pointers, strides, sizes, constants."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, num_queries, head_dim = q.shape
    arguments: dict[str, Any] = {f"{name}_ptr": x for name, x in tensors.items()}
    for name, x in tensors.items():
        if x.ndim == 4:  # L and D are contiguous and have no strides among the arguments
            arguments |= strides(name, x)
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, num_keys=k.shape[2], scale=head_dim**-0.5,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim,
        IS_CAUSAL=is_causal, EVEN_M=num_queries % tiles.block_m == 0, EVEN_N=k.shape[2] % tiles.block_n == 0,
    )  # fmt: skip
    if "do" in tensors:
        do = tensors["do"]
        # 0: an ordinary dO; 1: its columns are one (stride 0); 2: a whole head is one scalar
        arguments["EXPANDED"] = 0 if do.stride(3) else 1 if do.stride(2) else 2
    arguments["PRECISION"] = INPUT_PRECISION[_precision(q.dtype)]
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
    kernel: str, tensors: dict[str, torch.Tensor], arguments: dict[str, Any], tiles: Tiles
) -> bool:
    """Whether the assembler may have got a kernel wrong (see `machine_code`): on Hopper, where columns are not
    contiguous, which needs a register for the address of each element, and where its code shows the fault."""
    if tensors["q"].device.type != "cuda" or capability_of(tensors["q"].device.index) != 90:
        return False
    if any(x.ndim == 4 and x.stride(3) > 1 for x in tensors.values()):
        return True
    return faulty(KERNELS[kernel].warmup(grid=(1,), **arguments, **options_of(tiles)))


def first_launch(
    kernel: str, tensors: dict[str, torch.Tensor], is_causal: bool, tiles: Tiles | None, splits: int = 1
) -> list[Launch]:
    """Compiles one of KERNELS where needed, launches it, and returns what the next launch needs (nothing when
    interpreted). Without `tiles`, those of the tables, or others where the machine code that they lead to is not to be
    trusted."""
    q, k = tensors["q"], tensors["k"]
    given = tiles is not None
    tiles = tiles or tiles_for(kernel, q, k, _precision(q.dtype))
    arguments = _arguments(kernel, tensors, is_causal, tiles, splits)
    if not given and _mistrusted(kernel, tensors, arguments, tiles):
        tiles = tiles_without_wgmma(q.shape[3], _precision(q.dtype))
        arguments = _arguments(kernel, tensors, is_causal, tiles, splits)
    length = k.shape[2] if kernel == "backward_keys" else q.shape[2]
    grid = (triton.cdiv(length, rows_of(kernel, tiles)) * arguments["batch_heads"], splits, 1)
    return _launched(KERNELS[kernel], grid, arguments, len(tensors), options_of(tiles))


def _launched(
    kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], pointers: int, options: dict[str, Any]
) -> list[Launch]:
    """Launches a kernel whose arguments begin with so many pointers, and returns what the next launch needs."""
    compiled = kernel[grid](**arguments, **options)
    if INTERPRETED:
        return []
    fixed = (
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
    )  # no metadata of the launch, no hooks
    return [(compiled.run, grid, fixed, tuple(arguments.values())[pointers:])]


def watched() -> bool:
    """Whether a hook (of triton's profiler) wants to see each launch; triton's own launch path calls it."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(
            hook, "calls", True
        ):  # a chain of hooks, or in older versions a function
            return True
    return False


def launch_again(launch: Launch, device_index: int, *pointers: int) -> None:
    """Launches a kernel as before on tensors of the same layouts at these addresses, on the device's current stream.

    This is triton's own call after it has bound the arguments. Addresses instead of tensors save it from asking the
    driver about each.
    """
    run, grid, fixed, rest = launch
    run(*grid, driver.active.get_current_stream(device_index), *fixed, *pointers, *rest)


def remembered(key: tuple[Any, ...]) -> list[Any] | None:
    """What `remember` was given for a key."""
    return _remembered.get(key)


def remember(key: tuple[Any, ...], launches: list[Any]) -> None:
    """Keeps what the next launches of a kind need, or who makes them, the kind being all that this depends on."""
    if launches:
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[key] = launches


def elsewhere(x: torch.Tensor) -> bool:
    """Whether triton would launch on another device than the tensor's."""
    return x.is_cuda and x.get_device() != driver.active.get_current_device()


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tiles: Tiles | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """O (batch, heads, n_q, d) in q's layout and L (batch, heads, n_q) fp32, on the device's current stream.

    splits: among how many programs the keys are split, without a mask only, at most as many as there are tiles of keys
    (None: `tiles.splits_for`).
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return launch_forward(q, k, v, is_causal, tiles, splits)
    o = torch.empty_like(q)
    shape, device, dtype = q.shape, q.device, q.dtype
    batch, heads, num_queries, _ = shape  # a slice of a Size takes longer, here and as an argument
    logsumexp = torch.empty((batch, heads, num_queries), device=device, dtype=torch.float32)
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    # what a launch depends on; outputs are new, and thus aligned
    key = (
        "forward", is_causal, tiles, splits, dtype, _precision(dtype), device, shape, k.shape, q.stride(), k.stride(),
        v.stride(), (q_at | k_at | v_at) % 16 and (q_at % 16, k_at % 16, v_at % 16),
    )  # fmt: skip
    if (launches := remembered(key)) and not watched():
        if len(launches) == 1:
            launch_again(launches[0], device.index, q_at, k_at, v_at, o.data_ptr(), logsumexp.data_ptr())
            return o, logsumexp
        forward, combine, splits = launches
        parts = _parts(q, splits)
        parts_at = parts[0].data_ptr(), parts[1].data_ptr()
        launch_again(forward, device.index, q_at, k_at, v_at, *parts_at)
        launch_again(combine, device.index, *parts_at, o.data_ptr(), logsumexp.data_ptr())
        return o, logsumexp
    splits = splits or (1 if is_causal else splits_for(q, k))
    if splits == 1:
        tensors = dict(q=q, k=k, v=v, o=o, l=logsumexp)
        remember(key, first_launch("forward", tensors, is_causal, tiles))
    else:
        o_parts, l_parts = _parts(q, splits)
        tensors = dict(q=q, k=k, v=v, o=o_parts[0], l=l_parts[0])
        launches = first_launch("forward", tensors, is_causal, tiles, splits)
        launches += _first_combination(o_parts, l_parts, o, logsumexp)
        remember(key, launches and [*launches, splits])
    return o, logsumexp


def _parts(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for O and L of each split, fp32: (splits, batch, heads, n_q, d) and (splits, batch, heads, n_q)."""
    make = functools.partial(torch.empty, device=q.device, dtype=torch.float32)
    return make((splits, *q.shape)), make((splits, *q.shape[:3]))


def _first_combination(
    o_parts: torch.Tensor, l_parts: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor
) -> list[Launch]:
    """Combines O and L of all splits, and returns what the next launch needs."""
    batch, heads, num_queries, head_dim = o.shape
    arguments = dict(parts_ptr=o_parts, l_parts_ptr=l_parts, o_ptr=o, l_ptr=logsumexp) | strides("o", o)
    arguments |= dict(
        batch_heads=batch * heads, heads=heads, num_queries=num_queries, ROWS=COMBINED_ROWS,
        BLOCK_D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim, SPLITS=len(o_parts),
    )  # fmt: skip
    grid = (triton.cdiv(num_queries, COMBINED_ROWS) * batch * heads, 1, 1)
    return _launched(combine_kernel, grid, arguments, 4, FUSED)


def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, query_tiles: Tiles | None = None, key_tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV (batch, heads, n, d) in the layouts of q, k, v: two kernels on the device's current stream.

    logsumexp (batch, heads, n_q) is contiguous, as forward returns it. `do` may be expanded; it is not copied.
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return launch_backward(q, k, v, o, logsumexp, do, is_causal, query_tiles, key_tiles)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(logsumexp)
    dtype, device = q.dtype, q.device
    at = [x.data_ptr() for x in (q, k, v, o, do, logsumexp)]
    q_at, k_at, v_at, o_at, do_at, l_at = at
    key = (
        "backward", is_causal, query_tiles, key_tiles, dtype, _precision(dtype), device, q.shape, k.shape,
        q.stride(), k.stride(), v.stride(), o.stride(), do.stride(),
        (q_at | k_at | v_at | o_at | do_at | l_at) % 16 and tuple(x % 16 for x in at),
    )  # fmt: skip
    if (launches := remembered(key)) and not watched():
        index, delta_at = device.index, delta.data_ptr()
        launch_again(launches[0], index, q_at, k_at, v_at, o_at, do_at, l_at, delta_at, dq.data_ptr())
        launch_again(
            launches[1], index, q_at, k_at, v_at, do_at, l_at, delta_at, dk.data_ptr(), dv.data_ptr()
        )
    else:
        first = dict(q=q, k=k, v=v, o=o, do=do, l=logsumexp, delta=delta, dq=dq)
        second = dict(q=q, k=k, v=v, do=do, l=logsumexp, delta=delta, dk=dk, dv=dv)
        launches = first_launch("backward_queries", first, is_causal, query_tiles)
        remember(key, launches + first_launch("backward_keys", second, is_causal, key_tiles))
    return dq, dk, dv
