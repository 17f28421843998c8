"""Passes of attention: a pass that was launched before costs the host two lookups.

Working out some forty arguments, and triton's binding of them, takes longer than a small kernel runs. So the kernels of
a pass are remembered by all that they depend on (layouts, flags), and the complete arguments of triton's launcher by
the addresses of the tensors, which a loop meets again and again.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime import driver

from cs336_systems.attention.available import untried_triton

try:  # not part of triton's public API: without it, launches that take descriptors go the slow path
    from triton.backends.nvidia.driver import make_tensordesc_arg
except ImportError:
    make_tensordesc_arg = None
else:
    # from triton 3.8 on it takes a third argument, and makes no use of it
    _UNUSED = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)

# what launches a kernel, and all that it takes
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Shape = tuple[int, ...]
# window, cu_seqlens and, of a forward pass where given, max_seqlen of `attention`; () where it has none
Seen = tuple[()] | tuple[int | None, torch.Tensor | None] | tuple[int | None, torch.Tensor, int]


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
    """An argument of a launch that TMA knows by a descriptor: its layout, and what triton knows of it for the kernel.
    Triton rebuilds the arguments of a descriptor at each launch, in Python; here they are kept by address."""

    shape: list[int]
    strides: list[int]
    meta: Any


@functools.lru_cache(maxsize=20_000)  # some 10 MB
def _arguments(described: Described, address: int) -> list[Any]:
    """What the launcher in C takes for a tensor of this layout at an address."""
    return make_tensordesc_arg(_Again(address, described.shape, described.strides), described.meta, *_UNUSED)


@dataclass(frozen=True)
class Launch:
    """A kernel that was launched once: compiled, its grid, the names of its tensors (see `Pass`), which are its first
    arguments, its other arguments; and the layouts of the first of its tensors, which it takes by descriptors."""

    compiled: Any
    grid: tuple[int, int, int]
    names: tuple[str | None, ...]
    rest: tuple[Any, ...]
    described: tuple[Described, ...] = ()

    @functools.cached_property
    def launcher(self) -> Callable[..., Any] | None:
        """Triton's launcher in C. None where this version of triton was not tried, or where the layers above it have
        something to do at each launch: then launches go through these."""
        if untried_triton():
            return None
        run = self.compiled.run
        # memory to allocate, or arguments to add (triton 3.8's sanitizer)
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            return None
        if not self.described:
            return run.launch
        # that below triton's layer which makes arguments of descriptors
        code, cells = getattr(run.launch, "__code__", None), getattr(run.launch, "__closure__", None)
        unknown = make_tensordesc_arg is None or any(x.meta is None for x in self.described)
        if unknown or not code or not cells:
            return None
        return dict(zip(code.co_freevars, (x.cell_contents for x in cells), strict=True)).get("launcher")

    def call(self, stream: int, addresses: list[int | None]) -> Call:
        """How to launch the kernel on a stream, on tensors at these addresses."""
        compiled, run, launcher = self.compiled, self.compiled.run, self.launcher
        metadata = (compiled.packed_metadata, None, None, None)  # none of this launch, no hooks
        of_descriptors = []
        for x, address in zip(self.described, addresses, strict=False):
            if launcher is None:
                of_descriptors.append(_Again(address, x.shape, x.strides))
            else:
                of_descriptors += _arguments(x, address)
        arguments = (*of_descriptors, *addresses[len(self.described) :], *self.rest)
        if launcher is None:
            # addresses instead of tensors save triton's layers from asking the driver about each
            return run, (*self.grid, stream, compiled.function, *metadata, *arguments)
        how = (*self.grid, stream, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        if hasattr(run, "kernel_signature"):  # triton 3.7 and later
            of_kernel = run.arg_annotations, run.kernel_signature, arguments
            return launcher, (*how, *metadata, None, None, *of_kernel)
        return launcher, (*how, None, None, *metadata, *arguments)


_serials = itertools.count()


@dataclass(frozen=True)
class Pass:
    """The launches of one pass; none in triton's interpreter.

    names: of the tensors that it is given. size, offsets: what the launches share is one buffer of so many bytes, since
    allocating several costs the host more; and where in it each of its tensors begins, by name. copies_do: dO has a
    layout that they cannot read, and is copied first.
    """

    launches: list[Launch]
    names: tuple[str, ...]
    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    copies_do: bool = False
    serial: int = field(default_factory=_serials.__next__)

    def again(self, device: torch.device, *addresses: int) -> None:
        """Launches on tensors at these addresses, in the order of `names`, on the device's current stream."""
        if self.size:
            buffer = torch.empty(self.size, device=device, dtype=torch.uint8)
            addresses = (*addresses, buffer.data_ptr())
        key = (self.serial, driver.active.get_current_stream(device.index), addresses)
        for launcher, arguments in _calls.get(key) or self._prepare(key):
            launcher(*arguments)

    def _prepare(self, key: tuple[int, int, Shape]) -> list[Call]:
        """How to launch on a stream, on tensors at these addresses, kept for the next time."""
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _, stream, addresses = key
        given, buffer = addresses[: len(self.names)], addresses[-1]
        at = *given, *[buffer + offset for offset in self.offsets.values()], None
        calls = zip(self.launches, self._places, strict=True)
        found = _calls[key] = [x.call(stream, [at[i] for i in places]) for x, places in calls]
        return found

    @functools.cached_property
    def _places(self) -> list[list[int]]:
        """Where each launch's tensors stand among all of the pass."""
        order = {name: i for i, name in enumerate((*self.names, *self.offsets, None))}
        return [[order[name] for name in x.names] for x in self.launches]


_passes: dict[tuple[Any, ...], Pass] = {}
_calls: dict[tuple[int, int, Shape], list[Call]] = {}
_MAX_PASSES = 10_000  # the lengths are part of the key, and a program may meet any number of them
_MAX_CALLS = 3_000  # some 15 MB


def forget() -> None:
    """Forgets all passes: the next call of each works its launches out again."""
    _passes.clear()
    _calls.clear()


def _remember(key: tuple[Any, ...], found: Pass) -> None:
    if found.launches:
        if len(_passes) >= _MAX_PASSES:
            _passes.clear()
        _passes[key] = found


def watched() -> bool:
    """Whether a hook (of triton's profiler) wants to see each launch; triton's own launch path calls it."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # a chain of hooks, or in older versions a function
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _elsewhere(x: torch.Tensor) -> bool:
    """Whether triton would launch on another device than the tensor's."""
    return x.is_cuda and x.get_device() != torch._C._cuda_getDevice()


def precision_of(dtype: torch.dtype) -> str:
    """The precision of the matmuls, one of `tiles.PRECISIONS`: of fp32 tiles, that of torch's own on a GPU. It is asked
    for as torch's newer settings have it, which the older ones set too; the older question fails where they do not."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


def _of(seen: Seen) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """What a pass depends on of what queries see, and the address of cu_seqlens, where given."""
    window, cu_seqlens, *longest = seen
    if cu_seqlens is None:
        return (window,), ()
    cu_at = cu_seqlens.data_ptr()
    return (window, len(cu_seqlens), cu_at % 16, *longest), (cu_at,)


def forward(
    first: Callable[..., Pass], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool,
    config: Any = None, seen: Seen = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """O (batch, heads, n_q, d) in q's layout and L (batch, heads, n_q) fp32, on the device's current stream.

    first: launches the pass as `first(q, k, v, o, logsumexp, is_causal, config, *seen)`, and returns it. It may depend
    on `config` (hashable), torch's precision for fp32, of q, k, v on dtype, device, shapes, strides and alignment, and
    of `seen` on window, max_seqlen, and the length and alignment of cu_seqlens: the pass serves wherever these are the
    same. With a hook that watches launches it is asked each time.
    """
    if _elsewhere(q):
        with torch.cuda.device(q.device):
            return forward(first, q, k, v, is_causal, config, seen)
    device, dtype, shape = q.device, q.dtype, q.shape
    of_seen, cu_at = _of(seen) if seen else ((), ())
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    key = (
        first, is_causal, config, of_seen, dtype, precision_of(dtype), device, shape, k.shape, q.stride(), k.stride(),
        v.stride(), (q_at | k_at | v_at) % 16 and (q_at % 16, k_at % 16, v_at % 16),
    )  # fmt: skip
    batch, heads, num_queries, _ = shape  # a slice of a Size takes longer, here and as an argument
    o = torch.empty_like(q)
    logsumexp = torch.empty(batch, heads, num_queries, device=device, dtype=torch.float32)
    known = _passes.get(key)
    if known is None or watched():
        _remember(key, first(q, k, v, o, logsumexp, is_causal, config, *seen))
    else:
        known.again(device, q_at, k_at, v_at, o.data_ptr(), logsumexp.data_ptr(), *cu_at)
    return o, logsumexp


def backward(
    first: Callable[..., Pass], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    logsumexp: torch.Tensor, do: torch.Tensor, is_causal: bool, config: Any = None, seen: Seen = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV (batch, heads, n, d) in the layouts of q, k, v, on the device's current stream.

    o, logsumexp (batch, heads, n_q) and `do`, which may be expanded: as forward and autograd make them. first: launches
    the pass as `first(q, k, v, o, logsumexp, do, dq, dk, dv, is_causal, config, *seen)`; else as for `forward`, and it
    may depend on o, logsumexp, do and torch's flag for deterministic algorithms too.
    """
    if _elsewhere(q):
        with torch.cuda.device(q.device):
            return backward(first, q, k, v, o, logsumexp, do, is_causal, config, seen)
    if not logsumexp.is_contiguous():  # kernels know no strides of it
        logsumexp = logsumexp.contiguous()
    device, dtype = q.device, q.dtype
    q_at, k_at, v_at, o_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    l_at, do_at = logsumexp.data_ptr(), do.data_ptr()
    of_seen, cu_at = _of(seen) if seen else ((), ())
    key = (
        first, is_causal, config, of_seen, dtype, o.dtype, do.dtype, precision_of(dtype),
        torch.are_deterministic_algorithms_enabled(), device, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        o.stride(), do.stride(),
        (q_at | k_at | v_at | o_at | l_at | do_at) % 16
        and (q_at % 16, k_at % 16, v_at % 16, o_at % 16, l_at % 16, do_at % 16),
    )  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    known = _passes.get(key)
    if known is None or watched():
        _remember(key, first(q, k, v, o, logsumexp, do, dq, dk, dv, is_causal, config, *seen))
        return dq, dk, dv
    if known.copies_do:  # to the start of an allocation, which is aligned
        do = do.clone(memory_format=torch.contiguous_format)
        do_at = do.data_ptr()
    known.again(
        device, q_at, k_at, v_at, o_at, l_at, do_at, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), *cu_at
    )
    return dq, dk, dv
