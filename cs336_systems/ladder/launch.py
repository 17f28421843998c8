"""Runs a step of the ladder on tensors, or says what it needs where it cannot."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.available import hopper_unable
from cs336_systems.attention.triton.launch import FUSED, options_of
from cs336_systems.attention.triton.tiles import Tiles
from cs336_systems.ladder import kernels
from cs336_systems.ladder.steps import EARLIER, HOPPER, Step, Switches

_MAX_ELEMENTS = 2**31  # addresses are 32-bit offsets
_ROWS = 64  # of a program of the small kernels


def _check(tensors: Sequence[torch.Tensor], *tiles: Tiles) -> tuple[int, int, int]:
    """(batch · heads, n, d) of tensors (batch, heads, n, d) that the ladder's kernels take; ValueError otherwise."""
    batch, heads, n, d = shape = tensors[0].shape
    for x in tensors:
        if x.shape != shape or not x.is_contiguous() or x.numel() >= _MAX_ELEMENTS:
            raise ValueError(
                f"strides {x.stride()} of shape {tuple(x.shape)}; expected contiguous tensors below 2^31, all of shape "
                f"{tuple(shape)}"
            )
    if d & (d - 1) or d < 16:
        raise ValueError(f"head dimension {d}; allowed: powers of two from 16 on")
    for size in (_ROWS, *(size for t in tiles for size in (t.block_m, t.block_n))):
        if n % size:
            raise ValueError(f"length {n}; it must be a multiple of {size}, the size of a tile")
    return batch * heads, n, d


def _options(tiles: Tiles) -> dict[str, Any]:
    return {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n} | options_of(tiles)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, config: Switches
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, heads, n, d) and L (batch, heads, n) fp32 of contiguous tensors (batch, heads, n, d), n a multiple
    of the tiles, d a power of two. ValueError for others, and without a causal mask."""
    _only_causal(is_causal)
    tiles = config.tiles
    batch_heads, n, d = _check((q, k, v), tiles)
    o, logsumexp = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    operands = [q, k, v, o]
    if config.tma:
        rows = (tiles.block_m, tiles.block_n, tiles.block_n, tiles.block_m)
        operands = [
            TensorDescriptor.from_tensor(x.view(-1, d), [r, d]) for x, r in zip(operands, rows, strict=True)
        ]
    programs = n // tiles.block_m * batch_heads
    if config.persistent:
        programs = min(programs, config.persistent * _multiprocessors(q))
    kernels.forward_kernel[(programs,)](
        *operands, logsumexp, batch_heads, n, d**-0.5,
        SKIP=config.skip, SPLIT=config.split, EXP2=config.exp2, HEAVY_FIRST=config.heavy_first, TMA=config.tma,
        PERSISTENT=config.persistent > 0, D=d, **_options(tiles),
    )  # fmt: skip
    return o, logsumexp


def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool, config: Switches,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV of contiguous tensors (batch, heads, n, d); L (batch, heads, n) as forward returns it. Errors as
    there."""
    _only_causal(is_causal)
    tiles, key_tiles = config.tiles, config.key_tiles
    if key_tiles is None:
        raise ValueError("key_tiles=None; the backward pass needs tiles for the keys")
    batch_heads, n, d = _check((q, k, v, o, do), tiles, key_tiles)
    dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, logsumexp))
    scale, all_rows = d**-0.5, batch_heads * n // _ROWS
    switches = dict(
        SKIP=config.skip, SPLIT=config.split, EXP2=config.exp2, HEAVY_FIRST=config.heavy_first, D=d
    )
    if not config.fuse_d:
        kernels.delta_kernel[(all_rows,)](o, do, delta, BLOCK_M=_ROWS, D=d, **FUSED)
    dq_sum = torch.zeros(q.shape, device=q.device, dtype=torch.float32) if config.one_pass else dq
    if not config.one_pass:
        kernels.queries_kernel[(n // tiles.block_m * batch_heads,)](
            q, k, v, o, do, logsumexp, delta, dq, batch_heads, n, scale, FUSE_D=config.fuse_d, **switches,
            **_options(tiles),
        )  # fmt: skip
    kernels.keys_kernel[(n // key_tiles.block_n * batch_heads,)](
        q, k, v, do, logsumexp, delta, dk, dv, dq_sum, batch_heads, n, scale, ONE_PASS=config.one_pass, **switches,
        **_options(key_tiles),
    )  # fmt: skip
    if config.one_pass:
        kernels.scale_kernel[(all_rows,)](dq_sum, dq, scale, BLOCK_M=_ROWS, D=d, **FUSED)
    return dq, dk, dv


def _only_causal(is_causal: bool) -> None:
    if not is_causal:
        raise ValueError(f"is_causal={is_causal}; the ladder's kernels are causal only")


def _multiprocessors(x: torch.Tensor) -> int:
    # on a CPU, for the interpreter: few enough that a program has several tiles
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


# ------------------------------------------------------------------------------------------------ any step
def missing(step: Step) -> str | None:
    """Why this machine cannot run a step: what it needs, or None."""
    on_gpu = torch.cuda.is_available() and not torch.version.hip
    if not step.own and not on_gpu:
        return "an NVIDIA GPU"
    major = torch.cuda.get_device_capability()[0] if on_gpu else 9
    hopper = step.launcher.startswith((HOPPER, EARLIER))
    if (step.own and step.config.tma and major < 9) or (hopper and major != 9):
        return "a GPU of compute capability 9.0"
    if hopper and (reason := hopper_unable()):
        return f"the kernels for Hopper, which cannot run here: {reason}"
    return None


def configured(step: Step) -> tuple[Callable[..., Any], Any]:
    """The step's launcher, and its configuration for it; None where the launcher chooses."""
    module_name, function_name = step.launcher.split(":")
    module = importlib.import_module(module_name)
    config = step.config
    if config is not None and not step.own:
        name, arguments = config
        config = getattr(module, name)(**arguments)
    return getattr(module, function_name), config


def launcher(step: Step) -> Callable[..., Any]:
    """The step's launcher with its configuration: takes (q, k, v, is_causal) or (q, k, v, o, logsumexp, do,
    is_causal), each tensor (batch, heads, n, d). RuntimeError with the reason where this machine cannot run it."""
    if reason := missing(step):
        raise RuntimeError(f"step {step.name!r} needs {reason}")
    function, config = configured(step)
    return function if config is None else functools.partial(function, config=config)
