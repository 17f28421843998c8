"""Launches the CUDA kernels on torch tensors: macros from their layouts, arguments as the kernels' structs."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch

from cs336_systems.attention.cuda import compile as nvrtc
from cs336_systems.attention.cuda.tables import BACKWARD, FORWARD, Backward, Forward, chosen, padded
from cs336_systems.attention.inputs import check_made

LOG2_E = 1.4426950408889634
_L2_BYTES = 30 * 2**20  # of the L2 cache, for a section's tensors (an A100, H100 and H200 have 40 to 60 MiB)

# the structs that the kernels take, as `struct` spells them: pointers, strides, numbers
ARGUMENTS = {
    "forward_kernel": struct.Struct("5P16q5if0P"),
    "before_kernel": struct.Struct("6P8q2i0P"),
    "keys_kernel": struct.Struct("9P24q5iff0P"),
    "after_kernel": struct.Struct("2P4q2if0P"),
}


@functools.cache
def capability_of(device_index: int) -> int:
    """The compute capability of a GPU, 10 · major + minor."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def generation_of(device_index: int) -> int:
    """The capability whose tiles and path are used: the GPU's."""
    return capability_of(device_index)


# ------------------------------------------------------------------------------------------------ kernels
@functools.cache
def _context(device_index: int) -> Any:
    """The context that torch uses on a device. autograd's threads may not have it yet."""
    from cuda.bindings import driver

    device = _done(driver.cuDeviceGet(device_index))
    return _done(driver.cuDevicePrimaryCtxRetain(device))


def _done(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver returned; RuntimeError with its complaint."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the CUDA driver: {status.name}")
    return values[0] if values else None


@functools.cache
def _module(file: str, device_index: int, macros: tuple[tuple[str, int], ...]) -> Any:
    """A file's kernels on a device."""
    from cuda.bindings import driver

    code = nvrtc.cubin(file, capability_of(device_index), dict(macros))
    return _done(driver.cuModuleLoadData(code))


@functools.cache
def _kernel(
    file: str, name: str, shared_bytes: int, device_index: int, macros: tuple[tuple[str, int], ...]
) -> Any:
    from cuda.bindings import driver

    _done(driver.cuCtxSetCurrent(_context(device_index)))
    function = _done(driver.cuModuleGetFunction(_module(file, device_index, macros), name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _done(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function


def _launch(
    name: str, kernel: Any, blocks: int, threads: int, shared_bytes: int, device_index: int, values: tuple
) -> None:
    """On the device's current stream; `values`: the fields of the kernel's struct."""
    from cuda.bindings import driver

    _done(driver.cuCtxSetCurrent(_context(device_index)))
    argument = ctypes.create_string_buffer(ARGUMENTS[name].pack(*values))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    stream = torch.cuda.current_stream(device_index).cuda_stream
    _done(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0))


# ------------------------------------------------------------------------------------------------ what they are given
def _aligned(x: torch.Tensor) -> bool:
    """Whether rows of x (batch, heads, n, d) are contiguous and begin at multiples of 16 bytes; also of a single row,
    since a tile has more and their addresses are computed."""
    batch, head, row, column = x.stride()
    if x.data_ptr() % 16 or column != 1 or row % 8 or x.shape[3] % 8:
        return False
    return not any(stride % 8 for n, stride in zip(x.shape, (batch, head), strict=False) if n > 1)


def macros_for(
    config: Forward | Backward, capability: int, head_dim: int, is_causal: bool, dtype: torch.dtype, *,
    aligned: bool = True, **more: bool,
) -> dict[str, int]:  # fmt: skip
    """The macros that a file is compiled with, but for the capability of the GPU that runs it."""
    of = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, WARPS=config.warps, BLOCKS=config.blocks)
    if isinstance(config, Backward):
        of |= dict(STEP=config.step)
    of |= dict(BLOCK_D=padded(capability, head_dim), HEAD_DIM=head_dim, IS_CAUSAL=is_causal, VECTORS=aligned)
    return of | dict(BF16=dtype == torch.bfloat16, TURING=capability < 80) | more


def _section(batch_heads: int, bytes_of_head: int) -> int:
    """How many heads are computed at about the same time."""
    return max(1, min(batch_heads, _L2_BYTES // bytes_of_head))


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, heads, n_q, d) in q's layout and L (batch, heads, n_q) fp32, on the device's current stream."""
    index = q.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch_forward(q, k, v, is_causal)
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    o = torch.empty_like(q)
    logsumexp = torch.empty((batch, heads, num_queries), device=q.device, dtype=torch.float32)
    generation = generation_of(index)
    block_d = padded(generation, head_dim)
    config = chosen(FORWARD, generation, block_d)
    aligned = all(map(_aligned, (q, k, v, o)))
    macros = macros_for(config, generation, head_dim, is_causal, q.dtype, aligned=aligned)
    shared = config.shared_bytes(block_d)
    kernel = _kernel("forward.cu", "forward_kernel", shared, index, tuple(macros.items()))
    values = (
        *(x.data_ptr() for x in (q, k, v, o, logsumexp)), *q.stride(), *k.stride(), *v.stride(), *o.stride(),
        batch * heads, heads, _section(batch * heads, 4 * num_keys * head_dim), num_queries, num_keys,
        head_dim**-0.5 * LOG2_E,
    )  # fmt: skip
    blocks = -(-num_queries // config.block_m) * batch * heads
    _launch("forward_kernel", kernel, blocks, 32 * config.warps, shared, index, values)
    return o, logsumexp


def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, do: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV (batch, heads, n, d) in the layouts of q, k, v: three kernels on the device's current stream.

    logsumexp (batch, heads, n_q) as forward returns it. `do` may be expanded; it is not copied. dQ is summed in fp32 in
    the order of arrival or, with torch's flag for determinism, in the order of the keys.
    """
    check_made(q, o, do)
    logsumexp = logsumexp.contiguous()
    index = q.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch_backward(q, k, v, o, logsumexp, do, is_causal)
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    generation = generation_of(index)
    block_d = padded(generation, head_dim)
    config = chosen(BACKWARD, generation, block_d)
    tiles = -(-num_queries // config.block_m) * batch * heads
    sums = torch.empty(tiles * config.block_m * block_d, device=q.device, dtype=torch.float32)
    statistics = torch.empty((batch, heads, num_queries, 2), device=q.device, dtype=torch.float32)
    in_turns = torch.are_deterministic_algorithms_enabled()
    turns = torch.empty(tiles if in_turns else 1, device=q.device, dtype=torch.int32)
    macros = macros_for(
        config, generation, head_dim, is_causal, q.dtype, aligned=all(map(_aligned, (q, k, v, o, dq, dk, dv))),
        DO_VECTORS=_aligned(do), IN_TURNS=in_turns,
    )  # fmt: skip

    def launch(name: str, blocks: int, shared_bytes: int, *values: Any) -> None:
        kernel = _kernel("backward.cu", name, shared_bytes, index, tuple(macros.items()))
        _launch(name, kernel, blocks, 32 * config.warps, shared_bytes, index, values)

    statistics_at, sums_at, turns_at = statistics.data_ptr(), sums.data_ptr(), turns.data_ptr()
    launch(
        "before_kernel", tiles, 0, o.data_ptr(), do.data_ptr(), logsumexp.data_ptr(), statistics_at, sums_at,
        turns_at, *o.stride(), *do.stride(), heads, num_queries,
    )  # fmt: skip
    scale = head_dim**-0.5
    launch(
        "keys_kernel", -(-num_keys // config.block_n) * batch * heads, config.shared_bytes(block_d),
        *(x.data_ptr() for x in (q, k, v, do)), statistics_at, sums_at, turns_at, dk.data_ptr(), dv.data_ptr(),
        *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dk.stride(), *dv.stride(), batch * heads, heads,
        _section(batch * heads, num_queries * (4 * head_dim + 4 * block_d)), num_queries, num_keys, scale,
        scale * LOG2_E,
    )  # fmt: skip
    launch(
        "after_kernel", tiles, config.block_m * block_d * 2, sums_at, dq.data_ptr(), *dq.stride(), heads,
        num_queries, scale,
    )  # fmt: skip
    return dq, dk, dv
