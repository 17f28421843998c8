"""Tensors as the TMA unit sees them: their descriptors, and how tiles lie in shared memory."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype, swizzled: bool = True) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory: as wgmma reads it, or, not swizzled, as rows."""
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])
    return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, len(block))


def _strides(x: torch.Tensor) -> list[int]:
    """x's strides, with a valid one for axes of length 1, whose stride is unused but must be a multiple of 16 bytes."""
    return [stride if n > 1 else 8 for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]


def descriptor(x: torch.Tensor, *block: int, swizzled: bool = True) -> TensorDescriptor:
    """Of a tensor that TMA copies in such blocks."""
    return TensorDescriptor(
        x, list(x.shape), _strides(x), list(block), shared_layout(block, x.dtype, swizzled)
    )
