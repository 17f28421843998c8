"""Launches the Triton kernels: their grids and arguments, and the room that they share."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from typing import Any

import torch
import triton

from cs336_systems.attention.inputs import check_made
from cs336_systems.attention.machine_code import faulty
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton.again import Described, Launch, Pass, Shape, precision_of
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

LOG2_E = math.log2(math.e)
_AXES = ("batch", "head", "row", "col")
_ALIGNED = 128  # bytes: where tensors in a buffer begin

FAR = 2**22  # a stride from which on offsets within a tile, of at most 256 rows and columns, may pass 2^31


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


def options_of(tiles: Tiles) -> dict[str, Any]:
    """What a kernel in these tiles asks of the compiler."""
    return FUSED | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


class First:
    """A pass of attention that is launched for the first time, on tensors (batch, heads, n, d).

    tensors, by name: those that it is given, and the scratch that its launches share, (shape, dtype) each, in one
    buffer. values: of the arguments that kernels have in common. Of packed documents the tokens' bounds are found at
    once; they hold the window, too. `limit` is what kernels for Hopper call either.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor,
        is_causal: bool, window: int | None = None, cu_seqlens: torch.Tensor | None = None,
        scratch: dict[str, tuple[Shape, torch.dtype]] | None = None, **gradients: torch.Tensor,
    ) -> None:  # fmt: skip
        given = dict(q=q, k=k, v=v, o=o, l=logsumexp) | gradients  # the order of `Pass.again`
        check_made(q, o, gradients.get("do", o))
        scratch = scratch or {}
        if cu_seqlens is not None:
            given["cu_seqlens"] = cu_seqlens
            scratch = scratch | {"bounds": ((2, q.shape[2]), torch.int32)}
        offsets, size = {}, 0
        for name, (shape, dtype) in scratch.items():
            offsets[name] = size
            size += triton.cdiv(math.prod(shape) * dtype.itemsize, _ALIGNED) * _ALIGNED
        buffer = torch.empty(size, device=q.device, dtype=torch.uint8)
        views = {
            name: buffer[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (name, at), (shape, dtype) in zip(offsets.items(), scratch.values(), strict=True)
        }
        self.tensors, self.done = given | views, Pass([], tuple(given), size, offsets)
        batch, heads, num_queries, head_dim = q.shape
        scale, bounds = head_dim**-0.5, None if cu_seqlens is None else "bounds"
        self.values: dict[str, Any] = dict(
            batch_heads=batch * heads, heads=heads, num_queries=num_queries, num_keys=k.shape[2], HEAD_DIM=head_dim,
            HEADS_PER_KV=heads // k.shape[1], IS_CAUSAL=is_causal, scale=scale, scale_log2=scale * LOG2_E,
            window=window, bounds_ptr=bounds, limit=bounds or window,
        )  # fmt: skip
        if cu_seqlens is not None:
            documents = len(cu_seqlens) - 1
            self.launch(
                bounds_kernel, (triton.cdiv(num_queries, BOUNDED), 1, 1), documents=documents, total=num_queries,
                STEPS=(documents - 1).bit_length(), BLOCK=BOUNDED,
            )  # fmt: skip
            self.values["window"] = None

    def arguments(self, kernel: Any, **values: Any) -> tuple[dict[str, Any], tuple[str | None, ...]]:
        """What a kernel takes after its descriptors, by name: of `x_ptr` tensor x, or that whose name is given, of
        `stride_x_row` and the like its strides; and the names of the tensors, which come first."""
        values, found, names = self.values | values, {}, []
        for name in kernel.arg_names:
            x, _, axis = name.removeprefix("stride_").rpartition("_")
            if name.startswith("stride_"):
                found[name] = self.tensors[values.get(f"{x}_ptr") or x].stride(_AXES.index(axis) - 4)
            elif axis == "ptr" or values.get(name) in self.tensors:
                names.append(values.get(name, x))
                found[name] = self.tensors.get(names[-1])
            elif axis != "desc":
                found[name] = values[name]
        return found, tuple(names)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], descriptors: Sequence[tuple[str, Any]] = (),
        options: dict[str, Any] | None = None, **values: Any,
    ) -> None:  # fmt: skip
        """Compiles a kernel where needed, launches it, and remembers how to do so again (not when interpreted).

        descriptors: its first arguments, and the names of their tensors. options: the compiler's, besides FUSED.
        values: see `arguments`."""
        arguments, names = self.arguments(kernel, **values)
        made = [x for _, x in descriptors]
        compiled = wide(kernel, arguments)[grid](*made, **arguments, **FUSED | (options or {}))
        if INTERPRETED:
            return
        metas = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(made)
        described = tuple(Described(x.shape, x.strides, meta) for x, meta in zip(made, metas, strict=True))
        rest = tuple(arguments.values())[len(names) :]
        names = *(name for name, _ in descriptors), *names
        self.done.launches.append(Launch(compiled, grid, names, rest, described))


def values_of(first: First, kernel: str, tiles: Tiles, **values: Any) -> dict[str, Any]:
    """What one of KERNELS in these tiles takes besides `First.values`; `values` go before."""
    q, k = first.tensors["q"], first.tensors["k"]
    if kernel == "backward_keys":  # a program is for a head of these
        values |= dict(heads=k.shape[1], batch_heads=k.shape[0] * k.shape[1])
    if "do" in first.tensors:
        do = first.tensors["do"]
        values["EXPANDED"] = 0 if do.stride(3) else 1 if do.stride(2) else 2
    return dict(
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=triton.next_power_of_2(q.shape[3]),
        EVEN_M=q.shape[2] % tiles.block_m == 0, EVEN_N=k.shape[2] % tiles.block_n == 0,
        PRECISION=INPUT_PRECISION[precision_of(q.dtype)], SPLITS=1,
    ) | values  # fmt: skip


def _mistrusted(kernel: Any, arguments: dict[str, Any], tiles: Tiles, device: torch.device) -> bool:
    """Whether the assembler may have got a kernel wrong (see `machine_code`): on Hopper, where columns are not
    contiguous, which needs a register for the address of each element, and where its code shows the fault."""
    if INTERPRETED or device.type != "cuda" or capability_of(device.index) != 90:
        return False
    if any(x > 1 for name, x in arguments.items() if name.endswith("_col")):
        return True
    return faulty(wide(kernel, arguments).warmup(grid=(1,), **arguments, **options_of(tiles)))


def launch(first: First, kernel: str, tiles: Tiles | None, table: Tiles | None = None, **values: Any) -> None:
    """Launches one of KERNELS. Without `tiles`, those of the tables (`table`, or `tiles_for`), or others where the
    machine code they lead to is not to be trusted. values: see `First.arguments`."""
    q, k, function = first.tensors["q"], first.tensors["k"], KERNELS[kernel]
    chosen = tiles or table or tiles_for(kernel, q, k, precision_of(q.dtype))
    arguments, _ = first.arguments(function, **values_of(first, kernel, chosen, **values))
    if not tiles and _mistrusted(function, arguments, chosen, q.device):
        chosen = tiles_without_wgmma(q.shape[3], precision_of(q.dtype))
    batch, heads, length, _ = (k if kernel == "backward_keys" else q).shape
    grid = (triton.cdiv(length, rows_of(kernel, chosen)) * batch * heads, values.get("SPLITS", 1), 1)
    first.launch(function, grid, (), options_of(chosen), **values_of(first, kernel, chosen, **values))


# ------------------------------------------------------------------------------------------------ forward
def first_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool,
    config: tuple[Tiles | None, int | None] | None = None, window: int | None = None,
    cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,
) -> Pass:  # fmt: skip
    """Launches the forward pass into `o` and `logsumexp`, as `again.forward` asks for it, whatever `max_seqlen`.

    config: tiles, and among how many programs the keys are split, without a mask only, at most as many as there are
    tiles of keys; None: those of `tiles`."""
    tiles, splits = config or (None, None)
    splits = splits or (1 if is_causal else splits_for(q, k))
    if splits == 1:
        first = First(q, k, v, o, logsumexp, is_causal, window, cu_seqlens)
        launch(first, "forward", tiles)
        return first.done
    # O and L of each split
    parts = {"o_parts": (splits, *q.shape), "l_parts": (splits, *logsumexp.shape)}
    scratch = {name: (shape, torch.float32) for name, shape in parts.items()}
    first = First(q, k, v, o, logsumexp, is_causal, scratch=scratch)
    launch(first, "forward", tiles, o_ptr="o_parts", l_ptr="l_parts", SPLITS=splits)
    batch, heads, num_queries, head_dim = q.shape
    first.launch(
        combine_kernel, (triton.cdiv(num_queries, COMBINED_ROWS) * batch * heads, 1, 1), ROWS=COMBINED_ROWS,
        BLOCK_D=triton.next_power_of_2(head_dim), SPLITS=splits,
    )  # fmt: skip
    return first.done


# ------------------------------------------------------------------------------------------------ backward
def first_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, is_causal: bool,
    config: tuple[Tiles | None, Tiles | None] | None = None, window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Pass:  # fmt: skip
    """Launches the two kernels of the backward pass into `dq`, `dk` and `dv`, as `again.backward` asks for it; that for
    keys once for both of these, or once for each (`tiles.APART`). An expanded `do` is not copied."""
    query_tiles, key_tiles = config or (None, None)
    scratch = {"delta": (tuple(logsumexp.shape), torch.float32)}
    gradients = dict(do=do, dq=dq, dk=dk, dv=dv)
    first = First(q, k, v, o, logsumexp, is_causal, window, cu_seqlens, scratch, **gradients)
    launch(first, "backward_queries", query_tiles)
    apart = None if key_tiles else apart_for(q, k, precision_of(q.dtype))
    if apart:
        launch(first, "backward_keys", None, apart[0], dv_ptr=None)
        launch(first, "backward_keys", None, apart[1], dk_ptr=None)
    else:
        launch(first, "backward_keys", key_tiles)
    return first.done


# O and L, and dQ, dK and dV, as `again.forward` and `again.backward` describe them
launch_forward = functools.partial(again.forward, first_forward)
launch_backward = functools.partial(again.backward, first_backward)
