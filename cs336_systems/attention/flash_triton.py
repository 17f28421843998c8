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
from cs336_systems.attention.inputs import autocast_inputs, check_inputs, first_order_only, to_four_axes
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton import launch as portable
from cs336_systems.attention.triton.launch import INTERPRETED

_has_storage, _dispatch_modes = torch._C._has_storage, torch._C._len_torch_dispatch_stack

# Registered as torch operators, so that torch.compile keeps them whole in its graph and FLOP counters see them.
# The low-level registration costs less per call than torch.library.custom_op.
_library = torch.library.Library("cs336", "DEF")
_library.define("flash_forward(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor)")
_library.define(
    "flash_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, Tensor grad_o, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)"
)


@functools.cache
def _launchers(device_index: int) -> dict[str, ModuleType]:
    """The launchers of the kernels that only a Hopper GPU can run, by name: none on another device."""
    if hopper_reason(device_index) is not None:
        return {}
    from cs336_systems.attention.hopper import launch, split_launch

    return {"hopper": launch, "split": split_launch}


def _kernels(part: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Which of `_launchers` is for `part` of the attention of tensors (batch, heads, n, d) on a GPU; None: portable."""
    for name, launcher in _launchers(q.get_device()).items():
        if launcher.serves(part, q, k, v):
            # those for 16 bits accumulate dQ in the order of arrival
            random = part == "backward" and name == "hopper" and torch.are_deterministic_algorithms_enabled()
            return None if random else name
    return None


def kernels_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, str]:
    """Whose kernels compute the attention of tensors (..., n, d) in the dtype they have: `"hopper"`, `"split"` (fp32 on
    Hopper) or `"portable"`, for `"forward"` and `"backward"`."""
    four = [to_four_axes(x) for x in (q, k, v)]
    return {part: (q.is_cuda and _kernels(part, *four)) or "portable" for part in ("forward", "backward")}


def _first_forward(q, k, v, *others):
    name = _kernels("forward", q, k, v)
    return (_launchers(q.get_device())[name] if name else portable).first_forward(q, k, v, *others)


def _first_backward(q, k, v, *others):
    name = _kernels("backward", q, k, v)
    return (_launchers(q.get_device())[name] if name else portable).first_backward(q, k, v, *others)


_launch_forward_on_gpu = functools.partial(again.forward, _first_forward)
_launch_backward_on_gpu = functools.partial(again.backward, _first_backward)


def _launch_forward_on_cpu(q, k, v, is_causal):
    _require_interpreter(q.dtype)
    return portable.launch_forward(q, k, v, is_causal)


def _launch_backward_on_cpu(q, k, v, o, logsumexp, grad_o, is_causal):
    _require_interpreter(q.dtype)
    return portable.launch_backward(q, k, v, o, logsumexp, grad_o, is_causal)


def _plain(*tensors: torch.Tensor) -> bool:
    """Whether nothing intercepts a call on these tensors: no tracing, no FLOP counter or other dispatch mode, no
    subclass, no sign in a flag (`torch.Tensor.is_neg`), none that stands for many under vmap and has no memory itself.

    Then, on a GPU, the launchers are called directly: the round trip through the dispatcher takes longer than they do.
    """
    if is_compiling() or _dispatch_modes():  # compiling first: the compiler cannot trace the other
        return False
    return all([type(x) is torch.Tensor and _has_storage(x) and not x.is_neg() for x in tensors])


def _require_interpreter(dtype: torch.dtype) -> None:
    if not INTERPRETED:
        raise ValueError(
            "flash_triton got tensors on device 'cpu'; it runs on CUDA devices "
            "(or, slowly, on the CPU with TRITON_INTERPRET=1 set before the import)"
        )
    if dtype == torch.bfloat16:
        raise ValueError(
            "flash_triton got torch.bfloat16 on device 'cpu', and Triton's interpreter multiplies that wrongly; "
            "it takes torch.float32 and torch.float16 there"
        )


_library.impl("flash_forward", _launch_forward_on_gpu, "CUDA")
_library.impl("flash_backward", _launch_backward_on_gpu, "CUDA")
_library.impl("flash_forward", _launch_forward_on_cpu, "CPU")
_library.impl("flash_backward", _launch_backward_on_cpu, "CPU")


@torch.library.register_fake("cs336::flash_forward", lib=_library)
def _fake_forward(q, k, v, is_causal):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("cs336::flash_backward", lib=_library)
def _fake_backward(q, k, v, o, logsumexp, grad_o, is_causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def products(q_shape, k_shape, count):
        batch, heads, num_queries, head_dim = q_shape
        return count * 2 * batch * heads * num_queries * k_shape[2] * head_dim

    # as FlopCounterMode counts SDPA: matmuls over all pairs, causal or not
    @register_flop_formula(torch.ops.cs336.flash_forward)
    def _forward(q_shape, k_shape, *args, out_shape=None, **kwargs):
        return products(q_shape, k_shape, 2)

    @register_flop_formula(torch.ops.cs336.flash_backward)
    def _backward(q_shape, k_shape, *args, out_shape=None, **kwargs):
        return products(q_shape, k_shape, 5)


_register_flops()


# ------------------------------------------------------------------------------------------------ autograd
class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 by the Triton kernels, or those for Hopper where they serve, as
    `FlashAttentionTriton.apply(Q, K, V, is_causal, enable_gqa)`.

    Q: (..., n_q, d); K, V: (..., n_k, d); the same dtype (fp32, fp16 or bf16) and device, any strides; 16 ≤ d ≤ 256.
    enable_gqa: K and V may have fewer heads (see `attention`), which the operators tell by the shapes. Returns O
    (..., n_q, d) in Q's layout. Saves Q, K, V, O and the logsumexp L (..., n_q), fp32, natural logarithm.
    Errors: ValueError that names the mismatch.
    """

    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False, enable_gqa=False):
        Q, K, V = autocast_inputs(Q, K, V)
        check_inputs(Q, K, V, enable_gqa=enable_gqa)
        direct = Q.is_cuda and _plain(Q, K, V)
        forward = _launch_forward_on_gpu if direct else torch.ops.cs336.flash_forward
        if Q.ndim == 4:  # views, even no-ops, take as long on the host as the rest of this function
            o, logsumexp = forward(Q, K, V, is_causal)
        else:
            o, logsumexp = forward(to_four_axes(Q), to_four_axes(K), to_four_axes(V), is_causal)
            o, logsumexp = o.view(Q.shape), logsumexp.view(Q.shape[:-1])
        ctx.save_for_backward(Q, K, V, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("FlashAttentionTriton")
        q, k, v, o, logsumexp = ctx.saved_tensors
        direct = q.is_cuda and _plain(q, k, v, grad_o)
        backward = _launch_backward_on_gpu if direct else torch.ops.cs336.flash_backward
        if q.ndim == 4:
            return *backward(q, k, v, o, logsumexp, grad_o, ctx.is_causal), None, None
        four = [to_four_axes(x) for x in (q, k, v, o)]
        grads = backward(*four, logsumexp.view(four[0].shape[:3]), to_four_axes(grad_o), ctx.is_causal)
        return *(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), None, None


_apply_in_c = super(torch.autograd.Function, FlashAttentionTriton).apply


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> torch.Tensor:
    """`FlashAttentionTriton.apply` (shapes and errors there) for less of the host's time: past the layer in which torch
    finds out at each call that the class has no `setup_context`."""
    if (
        is_compiling()
        or torch._C._are_functorch_transforms_active()
        or not (_has_storage(q) and _has_storage(k) and _has_storage(v))  # one that has left its transform
    ):
        return FlashAttentionTriton.apply(q, k, v, is_causal, enable_gqa)
    return _apply_in_c(q, k, v, is_causal, enable_gqa)
