"""Tensors as the TMA unit sees them: descriptors, and a fast path for every launch after the first of its kind.

Triton rebuilds the arguments of a descriptor at each launch, in Python. Here they are cached by address.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from cs336_systems.attention.triton.launch import FUSED, Launch, launch_again

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


_serials = itertools.count()
_made: dict[tuple[int, int], list[Any]] = {}  # by descriptor argument and address
_MAX_MADE = 20_000  # some 10 MB


@dataclass(frozen=True)
class _Described:
    """A descriptor argument of a launch that was made once: its layout, and what triton knows of it for the kernel.

    Building the arguments that it becomes takes longer than the rest of a launch, and a loop finds its tensors at the
    same addresses again and again: they are cached by address.
    """

    shape: list[int]
    strides: list[int]
    meta: Any
    serial: int = field(default_factory=_serials.__next__)

    def make(self, address: int) -> list[Any]:
        """What a launch takes for a tensor of this description at an address, kept in `_made` for the next one."""
        if len(_made) >= _MAX_MADE:
            _made.clear()
        made = make_tensordesc_arg(_Again(address, self.shape, self.strides), self.meta, *_UNUSED)
        _made[self.serial, address] = made
        return made


@dataclass(frozen=True)
class Plan:
    """A launch that was made once: the `Launch` of `attention.triton`, its descriptors, and triton's launcher of a
    kernel whose descriptors have become arguments. That is None for a kernel without descriptors, and where it is
    unavailable: then launches go through all of triton's layers."""

    launch: Launch
    described: tuple[_Described, ...]
    launcher: Any

    def again(self, device_index: int, addresses: tuple[int, ...], *pointers: int) -> None:
        """Launches the kernel on tensors at these addresses: those that it takes by descriptor, then the others."""
        if not self.described:
            launch_again(self.launch, device_index, *pointers)
            return
        run, grid, fixed, rest = self.launch
        if self.launcher is None:
            described = (
                _Again(x, y.shape, y.strides) for x, y in zip(addresses, self.described, strict=True)
            )
            launch_again(self.launch, device_index, *described, *pointers)
            return
        arguments: list[Any] = []
        for x, address in zip(self.described, addresses, strict=True):
            arguments += _made.get((x.serial, address)) or x.make(address)
        function, *metadata_and_hooks = fixed
        stream = driver.active.get_current_stream(device_index)
        how = (stream, function, run.launch_cooperative_grid, run.launch_pdl)
        if hasattr(run, "kernel_signature"):  # triton 3.7 and later
            signature = (run.arg_annotations, run.kernel_signature)
            arguments += (*pointers, *rest)
            self.launcher(*grid, *how, *metadata_and_hooks, None, None, *signature, arguments)
        else:
            self.launcher(*grid, *how, None, None, *metadata_and_hooks, *arguments, *pointers, *rest)


def _launcher_below(run: Any) -> Any:
    """Triton's launcher of a compiled kernel below the layer that makes arguments of descriptors, if it is there."""
    layer = getattr(run, "launch", None)
    code, cells = getattr(layer, "__code__", None), getattr(layer, "__closure__", None)
    needed = ["launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"]
    if hasattr(run, "kernel_signature"):
        needed.append("arg_annotations")
    if code is None or not cells or not all(hasattr(run, name) for name in needed):
        return None
    # memory to allocate, or arguments to add (triton 3.8's sanitizer), at each launch
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)).get("launcher")


def first_launch(
    kernel: Any, grid: tuple[int, int, int], descriptors: tuple[TensorDescriptor, ...], pointers: int,
    arguments: dict[str, Any], **options: Any,
) -> Plan:  # fmt: skip
    """Compiles a kernel where needed, launches it, and returns how to do so again.

    `arguments` are all of the kernel's after its descriptors, in their order; the first `pointers` of them are tensors.
    `options` are the compiler's, besides FUSED.
    """
    names = kernel.arg_names[len(descriptors) :]
    assert tuple(arguments) == tuple(names), "a remembered kernel takes arguments by position"
    if "num_warps" not in arguments:
        options.setdefault("num_warps", 4)
    compiled = kernel[grid](*descriptors, **arguments, **FUSED | options)
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    launch = (compiled.run, grid, fixed, tuple(arguments.values())[pointers:])
    if not descriptors:
        return Plan(launch, (), None)
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(descriptors)
    described = tuple(
        _Described(x.shape, x.strides, meta) for x, meta in zip(descriptors, metas, strict=True)
    )
    usable = make_tensordesc_arg is not None and None not in metas
    return Plan(launch, described, _launcher_below(compiled.run) if usable else None)
