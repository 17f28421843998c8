"""The implementations of attention: what each is, why it cannot run here, how it is called. Adding one is a module of
its own and an entry here. Importing this needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cs336_systems.attention.available import cuda_reason, torch_reason, triton_reason

if TYPE_CHECKING:
    import torch

    Call = Callable[..., torch.Tensor]

# parameters of `attention` that not every implementation serves, and what they ask for
FEATURES = {"enable_gqa": "grouped queries", "window": "sliding window", "cu_seqlens": "packed sequences"}


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention.

    what: in a few words. call: (q, k, v, is_causal, enable_gqa, window, cu_seqlens, max_seqlen) → o, for what
    `attention` has checked; imports what it needs. reason: why this machine cannot run it; None where it can. features:
    those of FEATURES that it serves.
    """

    what: str
    call: Call
    reason: Callable[[], str | None] = torch_reason
    features: tuple[str, ...] = tuple(FEATURES)


def _flash_triton(q, k, v, is_causal, enable_gqa=False, *seen):
    from cs336_systems.attention.flash_triton import flash_attention

    return flash_attention(q, k, v, is_causal, enable_gqa, *seen)


def _flash_cuda(q, k, v, is_causal, *_):
    from cs336_systems.attention.flash_cuda import FlashAttentionCuda

    return FlashAttentionCuda.apply(q, k, v, is_causal)


def _flash_torch(q, k, v, is_causal, enable_gqa=False, *_, function="FlashAttentionTorch"):
    from cs336_systems.attention import flash_torch
    from cs336_systems.attention.inputs import repeated_heads

    return getattr(flash_torch, function).apply(*repeated_heads(q, k, v, enable_gqa), is_causal)


def _reference(q, k, v, is_causal, enable_gqa=False, window=None, cu_seqlens=None, *_):
    from cs336_systems.attention.inputs import autocast_inputs, repeated_heads
    from cs336_systems.attention.reference import reference_attention

    q, k, v = autocast_inputs(*repeated_heads(q, k, v, enable_gqa))
    return reference_attention(q, k, v, is_causal, window, cu_seqlens)


def _sdpa(q, k, v, is_causal, enable_gqa=False, window=None, cu_seqlens=None, *_):
    from torch.nn.functional import scaled_dot_product_attention

    from cs336_systems.attention.inputs import autocast_inputs, check_inputs
    from cs336_systems.attention.reference import causal_mask

    q, k, v = autocast_inputs(q, k, v)
    check_inputs(q, k, v, head_dims=(1, 2**31), enable_gqa=enable_gqa)
    mask = None
    if window is not None or cu_seqlens is not None:
        mask, is_causal = causal_mask(q.shape[-2], k.shape[-2], q.device, window, cu_seqlens), False
    return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=enable_gqa)


IMPLEMENTATIONS = {
    "flash_triton": Implementation(
        "FlashAttention-2 in Triton, and for Hopper in Gluon: forward and backward kernels",
        _flash_triton, triton_reason,
    ),
    "flash_cuda": Implementation(
        "FlashAttention-2 in CUDA C++, for 16-bit tensors: forward and backward kernels",
        _flash_cuda, cuda_reason, features=(),
    ),
    "flash_torch": Implementation(
        "FlashAttention-2 tiled in PyTorch, forward and backward", _flash_torch, features=("enable_gqa",),
    ),
    "flash_compiled_backward": Implementation(
        "FlashAttention-2 tiled in PyTorch, its backward pass under torch.compile",
        functools.partial(_flash_torch, function="FlashAttentionCompiledBackward"), features=("enable_gqa",),
    ),
    "reference": Implementation(
        "plain PyTorch with materialized scores: the specification", _reference
    ),
    "sdpa": Implementation(
        "torch.nn.functional.scaled_dot_product_attention: the peer", _sdpa
    ),
}  # fmt: skip


def features() -> list[dict[str, str]]:
    """A table of the implementations and which of FEATURES each serves."""
    return [
        {"impl": name} | {what: "yes" if key in found.features else "no" for key, what in FEATURES.items()}
        for name, found in IMPLEMENTATIONS.items()
    ]


def serving(*asked: str) -> list[str]:
    """The implementations that serve all these of FEATURES."""
    return [name for name, found in IMPLEMENTATIONS.items() if set(asked) <= set(found.features)]


def check_features(impl: str, asked: tuple[str, ...]) -> None:
    """ValueError where an implementation does not serve all these of FEATURES, naming those that do."""
    lacking = [key for key in asked if key not in IMPLEMENTATIONS[impl].features]
    if lacking:
        what = ", ".join(f"{FEATURES[key]} ({key})" for key in lacking)
        raise ValueError(f"{impl} does not serve {what}; these do: {', '.join(serving(*asked))}")


def availability() -> dict[str, str | None]:
    """For each implementation None where it can run on this machine, else the reason why not. Imports what it needs."""
    missing = torch_reason()
    return {name: missing or found.reason() for name, found in IMPLEMENTATIONS.items()}


_usable: dict[str, bool] = {}


def usable(name: str) -> bool:
    """Whether an implementation can run on this machine; asked once."""
    check_machine()
    return _usable[name]


def check_machine() -> None:
    """Finds out once which implementations can run here: before a first call is timed or traced."""
    if not _usable:
        _usable.update((name, reason is None) for name, reason in availability().items())
