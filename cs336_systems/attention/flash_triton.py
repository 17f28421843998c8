"""FlashAttention-2 in Triton, as PyTorch sees it: two operators, and the autograd Function that calls them.

The kernels are in `attention.triton` and, for Hopper, in `hopper`; their launchers in `triton.launch`, and in
`hopper.launch` and `hopper.split_launch`, which say which tensors those take.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.compiler import is_compiling

from cs336_systems.attention.available import hopper_reason
from cs336_systems.attention.inputs import (
    autocast_inputs,
    check_inputs,
    check_made,
    first_order_only,
    is_plain,
    to_four_axes,
)
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton import launch as portable
from cs336_systems.attention.triton.launch import INTERPRETED

_has_storage = torch._C._has_storage

# Registered as torch operators, so that torch.compile keeps them whole in its graph and FLOP counters see them.
# The low-level registration costs less per call than torch.library.custom_op.
_library = torch.library.Library("cs336", "DEF")
_HOW = "bool is_causal, int? window=None, Tensor? cu_seqlens=None"
_library.define(
    f"flash_forward(Tensor q, Tensor k, Tensor v, {_HOW}, SymInt? max_seqlen=None) -> (Tensor, Tensor)"
)
_library.define(
    f"flash_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, Tensor grad_o, {_HOW})"
    " -> (Tensor, Tensor, Tensor)"
)


@functools.cache
def _launchers(device_index: int) -> dict[str, ModuleType]:
    """The launchers of the kernels that only a Hopper GPU can run, by name: none on another device."""
    if hopper_reason(device_index) is not None:
        return {}
    from cs336_systems.attention.hopper import launch, split_launch

    return {"hopper": launch, "split": split_launch}


def _kernels(
    part: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, packed: bool = False,
) -> str | None:  # fmt: skip
    """Which of `_launchers` is for `part` of the attention of tensors (batch, heads, n, d) on a GPU; None: portable."""
    for name, launcher in _launchers(q.get_device()).items():
        if launcher.serves(part, q, k, v, window, packed):
            # those for 16 bits accumulate dQ in the order of arrival
            random = part == "backward" and name == "hopper" and torch.are_deterministic_algorithms_enabled()
            return None if random else name
    return None


def kernels_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, packed: bool = False
) -> dict[str, str]:
    """Whose kernels compute the attention of tensors (..., n, d) in the dtype they have: `"hopper"`, `"split"` (fp32 on
    Hopper) or `"portable"`, for `"forward"` and `"backward"`."""
    four = [to_four_axes(x) for x in (q, k, v)]
    return {
        part: (q.is_cuda and _kernels(part, *four, window, packed)) or "portable"
        for part in ("forward", "backward")
    }


def _launcher(part, q, k, v, window=None, cu_seqlens=None):
    name = _kernels(part, q, k, v, window, cu_seqlens is not None) if q.is_cuda else None
    return _launchers(q.get_device())[name] if name else portable


def _first_forward(q, k, v, o, logsumexp, is_causal, config, *seen):
    first = _launcher("forward", q, k, v, *seen[:2]).first_forward
    return first(q, k, v, o, logsumexp, is_causal, config, *seen)


def _first_backward(q, k, v, o, logsumexp, do, dq, dk, dv, is_causal, config, *seen):
    first = _launcher("backward", q, k, v, *seen).first_backward
    return first(q, k, v, o, logsumexp, do, dq, dk, dv, is_causal, config, *seen)


def _launch_forward(q, k, v, is_causal, window=None, cu_seqlens=None, max_seqlen=None):
    if INTERPRETED or not q.is_cuda:
        _require_interpreter(q)
    seen = () if window is None and cu_seqlens is None else (window, cu_seqlens)
    if max_seqlen is not None:  # rounded up: a loop meets any number of longest documents
        seen += (1 << (max_seqlen - 1).bit_length(),)
    return again.forward(_first_forward, q, k, v, is_causal, None, seen)


def _launch_backward(q, k, v, o, logsumexp, grad_o, is_causal, window=None, cu_seqlens=None):
    if INTERPRETED or not q.is_cuda:
        _require_interpreter(q)
    seen = () if window is None and cu_seqlens is None else (window, cu_seqlens)
    return again.backward(_first_backward, q, k, v, o, logsumexp, grad_o, is_causal, None, seen)


def _backward_of_anyone(q, k, v, o, logsumexp, grad_o, *how):
    """The operator: nobody but autograd, which calls the launcher directly, has seen to it that O and its gradient fit
    q, and launches that are remembered, by strides, would read past the end of others."""
    check_made(q, o, grad_o)
    return _launch_backward(q, k, v, o, logsumexp, grad_o, *how)


def _require_interpreter(q: torch.Tensor) -> None:
    """ValueError where the interpreter is needed and off, or on (for a GPU's tensors, too) and would be wrong."""
    if not INTERPRETED:
        raise ValueError(
            "flash_triton got tensors on device 'cpu'; it runs on CUDA devices "
            "(or, slowly, on the CPU with TRITON_INTERPRET=1 set before the import)"
        )
    if q.dtype == torch.bfloat16:
        raise ValueError(
            f"flash_triton got torch.bfloat16 on device '{q.device.type}' with TRITON_INTERPRET=1, and Triton's "
            "interpreter multiplies that wrongly; it takes torch.float32 and torch.float16"
        )


for _device in ("CUDA", "CPU"):
    _library.impl("flash_forward", _launch_forward, _device)
    _library.impl("flash_backward", _backward_of_anyone, _device)


@torch.library.register_fake("cs336::flash_forward", lib=_library)
def _fake_forward(q, k, v, is_causal, window=None, cu_seqlens=None, max_seqlen=None):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("cs336::flash_backward", lib=_library)
def _fake_backward(q, k, v, o, logsumexp, grad_o, is_causal, window=None, cu_seqlens=None):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def products(count, q_shape, k_shape, window=None):
        batch, heads, num_queries, head_dim = q_shape
        return count * 2 * batch * heads * num_queries * min(k_shape[2], window or k_shape[2]) * head_dim

    # as FlopCounterMode counts SDPA: matmuls over all pairs, causal or not; those of a window, but not of documents,
    # whose lengths only the device knows
    @register_flop_formula(torch.ops.cs336.flash_forward)
    def _forward(q_shape, k_shape, v_shape, is_causal, window=None, *args, out_shape=None, **kwargs):
        return products(2, q_shape, k_shape, window)

    @register_flop_formula(torch.ops.cs336.flash_backward)
    def _backward(q_shape, k_shape, v_shape, o_shape, l_shape, do_shape, is_causal, window=None, *args,
                  out_shape=None, **kwargs):  # fmt: skip
        return products(5, q_shape, k_shape, window)


_register_flops()


# ------------------------------------------------------------------------------------------------ autograd
class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 by the Triton kernels, or those for Hopper where they serve, as
    `FlashAttentionTriton.apply(Q, K, V, is_causal, enable_gqa, window, cu_seqlens, max_seqlen)`.

    Q: (..., n_q, d); K, V: (..., n_k, d); the same dtype (fp32, fp16 or bf16) and device, any strides; 16 ≤ d ≤ 256.
    enable_gqa: K and V may have fewer heads (see `attention`), which the operators tell by the shapes. window,
    cu_seqlens, max_seqlen: see `attention`, which checks them. Returns O (..., n_q, d) in Q's layout. Saves Q, K, V, O,
    the logsumexp L (..., n_q), fp32, natural logarithm, and cu_seqlens. Errors: ValueError that names the mismatch.
    """

    @staticmethod
    def forward(
        ctx, Q, K, V, is_causal=False, enable_gqa=False, window=None, cu_seqlens=None, max_seqlen=None
    ):
        Q, K, V = autocast_inputs(Q, K, V)
        check_inputs(Q, K, V, enable_gqa=enable_gqa)
        documents = () if cu_seqlens is None else (cu_seqlens,)
        # on a GPU the round trip through the dispatcher takes longer than the launchers do
        direct = Q.is_cuda and is_plain(Q, K, V, *documents)
        forward = _launch_forward if direct else torch.ops.cs336.flash_forward
        if Q.ndim == 4:  # views, even no-ops, take as long on the host as the rest of this function
            o, logsumexp = forward(Q, K, V, is_causal, window, cu_seqlens, max_seqlen)
        else:
            four = [to_four_axes(x) for x in (Q, K, V)]
            o, logsumexp = forward(*four, is_causal, window, cu_seqlens, max_seqlen)
            o, logsumexp = o.view(Q.shape), logsumexp.view(Q.shape[:-1])
        ctx.save_for_backward(Q, K, V, o, logsumexp, *documents)
        ctx.is_causal, ctx.window = is_causal, window
        return o

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("FlashAttentionTriton")
        q, k, v, o, logsumexp, *documents = ctx.saved_tensors
        direct = q.is_cuda and is_plain(q, k, v, grad_o, *documents)
        backward = _launch_backward if direct else torch.ops.cs336.flash_backward
        how, none = (ctx.is_causal, ctx.window, *documents), (None,) * 5
        if q.ndim == 4:
            return *backward(q, k, v, o, logsumexp, grad_o, *how), *none
        four = [to_four_axes(x) for x in (q, k, v, o)]
        grads = backward(*four, logsumexp.view(four[0].shape[:3]), to_four_axes(grad_o), *how)
        return *(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), *none


_apply_in_c = super(torch.autograd.Function, FlashAttentionTriton).apply


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, enable_gqa: bool = False,
    window: int | None = None, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`FlashAttentionTriton.apply` (shapes and errors there) for less of the host's time: past the layer in which torch
    finds out at each call that the class has no `setup_context`."""
    if (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or not (_has_storage(q) and _has_storage(k) and _has_storage(v))  # one that has left its transform
    ):
        return FlashAttentionTriton.apply(q, k, v, is_causal, enable_gqa, window, cu_seqlens, max_seqlen)
    return _apply_in_c(q, k, v, is_causal, enable_gqa, window, cu_seqlens, max_seqlen)
