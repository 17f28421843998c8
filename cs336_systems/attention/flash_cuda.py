"""FlashAttention-2 in CUDA C++, as PyTorch sees it: two operators, and the autograd Function that calls them.

The kernels are in `attention.cuda`; `cuda.launch` launches them.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from cs336_systems.attention.cuda import launch
from cs336_systems.attention.cuda.tables import MAX_HEAD_DIM
from cs336_systems.attention.inputs import (
    MIN_HEAD_DIM,
    autocast_inputs,
    check_inputs,
    first_order_only,
    to_four_axes,
)

# Registered as torch operators, so that torch.compile keeps them whole in its graph and FLOP counters see them.
_library = torch.library.Library("cs336", "FRAGMENT")
_library.define("flash_cuda_forward(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor)")
_library.define(
    "flash_cuda_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, Tensor grad_o, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("flash_cuda_forward", launch.launch_forward, "CUDA")
_library.impl("flash_cuda_backward", launch.launch_backward, "CUDA")


@torch.library.register_fake("cs336::flash_cuda_forward", lib=_library)
def _fake_forward(q, k, v, is_causal):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("cs336::flash_cuda_backward", lib=_library)
def _fake_backward(q, k, v, o, logsumexp, grad_o, is_causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# as FlopCounterMode counts SDPA: matmuls over all pairs, causal or not
@register_flop_formula(torch.ops.cs336.flash_cuda_forward)
def _forward_flops(q_shape, k_shape, *args, out_shape=None, **kwargs):
    batch, heads, num_queries, head_dim = q_shape
    return 2 * 2 * batch * heads * num_queries * k_shape[2] * head_dim


@register_flop_formula(torch.ops.cs336.flash_cuda_backward)
def _backward_flops(q_shape, k_shape, *args, out_shape=None, **kwargs):
    batch, heads, num_queries, head_dim = q_shape
    return 5 * 2 * batch * heads * num_queries * k_shape[2] * head_dim


@torch.compiler.assume_constant_result
def dtypes_on(device_index: int) -> tuple[torch.dtype, ...]:
    """What the tensor cores of a GPU take in 16 bits."""
    return (torch.float16, torch.bfloat16) if launch.generation_of(device_index) >= 80 else (torch.float16,)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.device.type != "cuda":
        raise ValueError(f"flash_cuda got tensors on device '{q.device}'; it runs on CUDA devices")
    allowed = dtypes_on(q.get_device())
    if q.dtype not in allowed:
        raise ValueError(
            f"flash_cuda got {q.dtype}; it takes {' and '.join(map(str, allowed))} on this GPU; "
            f"flash_triton, flash_torch, reference and sdpa take {q.dtype}"
        )
    check_inputs(q, k, v, allowed, (MIN_HEAD_DIM, MAX_HEAD_DIM))


def serves(q: torch.Tensor) -> bool:
    """Whether these kernels take tensors like q, under autocast those that it makes of them."""
    if not q.is_cuda or not MIN_HEAD_DIM <= q.shape[-1] <= MAX_HEAD_DIM:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype
    return dtype in dtypes_on(q.get_device())


# ------------------------------------------------------------------------------------------------ autograd
class FlashAttentionCuda(torch.autograd.Function):
    """FlashAttention-2 by the CUDA C++ kernels, as `FlashAttentionCuda.apply(Q, K, V, is_causal)`.

    Q: (..., n_q, d); K, V: (..., n_k, d); the same dtype (fp16, or from compute capability 8.0 on bf16) and CUDA
    device, any strides; 16 ≤ d ≤ 128. Rows that are contiguous and aligned to 16 bytes are read fastest. Returns O
    (..., n_q, d) in Q's layout. Saves Q, K, V, O and the logsumexp L (..., n_q), fp32, natural logarithm.
    Errors: ValueError that names the mismatch.
    """

    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        Q, K, V = autocast_inputs(Q, K, V)
        _check(Q, K, V)
        o, logsumexp = torch.ops.cs336.flash_cuda_forward(*map(to_four_axes, (Q, K, V)), is_causal)
        o, logsumexp = o.view(Q.shape), logsumexp.view(Q.shape[:-1])
        ctx.save_for_backward(Q, K, V, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("FlashAttentionCuda")
        q, k, v, o, logsumexp = ctx.saved_tensors
        four = [to_four_axes(x) for x in (q, k, v, o)]
        grads = torch.ops.cs336.flash_cuda_backward(
            *four, logsumexp.view(four[0].shape[:3]), to_four_axes(grad_o), ctx.is_causal
        )
        return *(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), None
