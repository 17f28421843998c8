"""Tensors as the TMA unit sees them: descriptors, and launches that take them.

Triton rebuilds the arguments of a descriptor at each launch, in Python. Here they are kept by address.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.attention.triton.again import Launch
from cs336_systems.attention.triton.launch import FUSED

try:  # not part of triton's public API: without it, launches take the slow path
    from triton.backends.nvidia.driver import make_tensordesc_arg
except ImportError:
    make_tensordesc_arg = None
else:
    # from triton 3.8 on it takes a third argument, and makes no use of it
    _UNUSED = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)

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
    return TensorDescriptor(
        x, list(x.shape), _strides(x), list(block), shared_layout(block, x.dtype, swizzled)
    )


class _Again:
    """What triton needs of a descriptor, for a tensor at an address with the layout of an earlier one."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.address, self.shape, self.strides = address, shape, strides
        self.padding, self.round_f32_to_tf32 = "zero", False

    @property
    def base(self) -> _Again:
        return self

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, eq=False)
class Described:
    """A descriptor argument of a launch: its layout, and what triton knows of it for the kernel."""

    shape: list[int]
    strides: list[int]
    meta: Any


@functools.lru_cache(maxsize=20_000)  # some 10 MB
def _arguments(described: Described, address: int) -> list[Any]:
    """What the launcher in C takes for a tensor of this layout at an address."""
    return make_tensordesc_arg(_Again(address, described.shape, described.strides), described.meta, *_UNUSED)


@dataclass(frozen=True)
class DescribedLaunch(Launch):
    """A launch that takes the first of its tensors by descriptors."""

    described: tuple[Described, ...]

    @functools.cached_property
    def launcher(self) -> Callable[..., Any] | None:
        """That below triton's layer which makes arguments of descriptors; None where there is no such layer."""
        layer = super().launcher
        code, cells = getattr(layer, "__code__", None), getattr(layer, "__closure__", None)
        if (
            make_tensordesc_arg is None
            or any(x.meta is None for x in self.described)
            or not code
            or not cells
        ):
            return None
        return dict(zip(code.co_freevars, (x.cell_contents for x in cells), strict=True)).get("launcher")

    def of_addresses(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        made = (_arguments(x, address) for x, address in zip(self.described, addresses, strict=False))
        return (*itertools.chain.from_iterable(made), *addresses[len(self.described) :])

    def of_tensors(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        described = (_Again(at, x.shape, x.strides) for x, at in zip(self.described, addresses, strict=False))
        return (*described, *addresses[len(self.described) :])


def first_launch(
    kernel: Any, grid: tuple[int, int, int], descriptors: tuple[TensorDescriptor, ...], pointers: int,
    arguments: dict[str, Any], **options: Any,
) -> Launch:  # fmt: skip
    """Compiles a kernel where needed, launches it, and returns how to do so again.

    `arguments` are all of the kernel's after its descriptors, in their order; the first `pointers` of them are tensors.
    `options` are the compiler's, besides FUSED.
    """
    names = kernel.arg_names[len(descriptors) :]
    assert tuple(arguments) == tuple(names), "a remembered kernel takes arguments by position"
    if "num_warps" not in arguments:
        options.setdefault("num_warps", 4)
    compiled = kernel[grid](*descriptors, **arguments, **FUSED | options)
    launched = (compiled, grid, tuple(arguments.values())[pointers:])
    if not descriptors:
        return Launch(*launched)
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(descriptors)
    described = (Described(x.shape, x.strides, meta) for x, meta in zip(descriptors, metas, strict=True))
    return DescribedLaunch(*launched, tuple(described))
