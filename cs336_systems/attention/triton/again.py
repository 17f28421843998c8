"""Passes of attention: a pass that was launched before costs the host two lookups.

Working out some forty arguments, and triton's binding of them, takes longer than a small kernel runs. So the kernels of
a pass are remembered by all that they depend on (layouts, flags), and the complete arguments of triton's launcher by
the addresses of the tensors, which a loop meets again and again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime import driver

from cs336_systems.attention.available import untried_triton

# what launches a kernel, and all that it takes
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Shape = tuple[int, ...]
# window, cu_seqlens and, of a forward pass where given, max_seqlen of `attention`; () where it has none
Seen = tuple[()] | tuple[int | None, torch.Tensor | None] | tuple[int | None, torch.Tensor, int]


@dataclass(frozen=True)
class Launch:
    """A kernel that was launched once: compiled, its grid, and its arguments after the tensors."""

    compiled: Any
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]

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
        return run.launch

    def of_addresses(self, addresses: Shape) -> tuple[Any, ...]:
        """What the launcher in C takes for the tensors at these addresses."""
        return addresses

    def of_tensors(self, addresses: Shape) -> tuple[Any, ...]:
        """What triton's layers above the launcher take for them. Addresses instead of tensors save them from asking the
        driver about each."""
        return addresses

    def call(self, stream: int, addresses: Shape) -> Call:
        """How to launch the kernel on a stream, on tensors at these addresses."""
        compiled, run, launcher = self.compiled, self.compiled.run, self.launcher
        metadata = (compiled.packed_metadata, None, None, None)  # none of this launch, no hooks
        if launcher is None:
            of_tensors = self.of_tensors(addresses)
            return run, (*self.grid, stream, compiled.function, *metadata, *of_tensors, *self.rest)
        how = (*self.grid, stream, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        arguments = (*self.of_addresses(addresses), *self.rest)
        if hasattr(run, "kernel_signature"):  # triton 3.7 and later
            of_kernel = run.arg_annotations, run.kernel_signature, arguments
            return launcher, (*how, *metadata, None, None, *of_kernel)
        return launcher, (*how, None, None, *metadata, *arguments)


_serials = itertools.count()


@dataclass(frozen=True)
class Pass:
    """The launches of one pass; none in triton's interpreter.

    addresses: takes those of q, k, v, o and L, in a backward pass then of dO, dQ, dK and dV, of cu_seqlens where given,
    and last of scratch; returns for each launch those of its tensors. scratch: the shapes and dtypes of what the
    launches share. copies_do: dO has a layout that they cannot read, and is copied first.
    """

    launches: list[Launch]
    addresses: Callable[..., tuple[Shape, ...]]
    scratch: tuple[tuple[Shape, torch.dtype], ...] = ()
    copies_do: bool = False
    serial: int = field(default_factory=_serials.__next__)

    def again(self, device: torch.device, *addresses: int) -> None:
        """Launches on tensors at these addresses, on the device's current stream."""
        scratch = empty(self.scratch, device)
        addresses = (*addresses, *[x.data_ptr() for x in scratch])
        key = (self.serial, driver.active.get_current_stream(device.index), addresses)
        for launcher, arguments in _calls.get(key) or self._prepare(key):
            launcher(*arguments)

    def _prepare(self, key: tuple[int, int, Shape]) -> list[Call]:
        """How to launch on a stream, on tensors at these addresses, kept for the next time."""
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _, stream, addresses = key
        of_each = self.addresses(*addresses)
        found = [x.call(stream, at) for x, at in zip(self.launches, of_each, strict=True)]
        _calls[key] = found
        return found


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


def empty(scratch: tuple[tuple[Shape, torch.dtype], ...], device: torch.device) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes, not initialized."""
    return [torch.empty(*shape, device=device, dtype=dtype) for shape, dtype in scratch]


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

    logsumexp (batch, heads, n_q) is contiguous, as forward returns it. `do` may be expanded. first: launches the pass
    as `first(q, k, v, o, logsumexp, do, dq, dk, dv, is_causal, config, *seen)`; else as for `forward`, and it may
    depend on o, logsumexp, do and torch's flag for deterministic algorithms too.
    """
    if _elsewhere(q):
        with torch.cuda.device(q.device):
            return backward(first, q, k, v, o, logsumexp, do, is_causal, config, seen)
    device, dtype = q.device, q.dtype
    q_at, k_at, v_at, o_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    l_at, do_at = logsumexp.data_ptr(), do.data_ptr()
    of_seen, cu_at = _of(seen) if seen else ((), ())
    key = (
        first, is_causal, config, of_seen, dtype, precision_of(dtype), torch.are_deterministic_algorithms_enabled(),
        device, q.shape, k.shape, q.stride(), k.stride(), v.stride(), o.stride(), do.stride(),
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
