"""Two steps of the ladder as one differentiable attention, so that the leaderboard's harness can run any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cs336_systems.attention.inputs import check_inputs, first_order_only, to_four_axes
from cs336_systems.ladder.launch import launcher
from cs336_systems.ladder.steps import EARLIER, OWN, STEPS

# operators, so that torch.compile keeps them whole
_library = torch.library.Library("cs336_ladder", "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, bool is_causal, str step) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, Tensor grad_o, bool is_causal, str step)"
    " -> (Tensor, Tensor, Tensor)"
)


@functools.cache
def _launcher(step: str) -> Callable[..., Any]:
    return launcher(STEPS[step])


def _forward(q, k, v, is_causal, step):
    return _launcher(step)(q, k, v, is_causal)


def _backward(q, k, v, o, logsumexp, grad_o, is_causal, step):
    if STEPS[step].launcher.startswith((OWN, EARLIER)):
        # the ladder's kernels take a full tensor; a sum's gradient is a scalar expanded with strides of 0
        grad_o = grad_o.contiguous()
    return _launcher(step)(q, k, v, o, logsumexp, grad_o, is_causal)


for _device in ("CUDA", "CPU"):
    _library.impl("forward", _forward, _device)
    _library.impl("backward", _backward, _device)


@torch.library.register_fake("cs336_ladder::forward", lib=_library)
def _fake_forward(q, k, v, is_causal, step):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("cs336_ladder::backward", lib=_library)
def _fake_backward(q, k, v, o, logsumexp, grad_o, is_causal, step):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class LadderAttention(torch.autograd.Function):
    """Attention by two named steps, as `LadderAttention.apply(Q, K, V, is_causal, forward_step, backward_step)`.

    Q, K, V: (..., n, d) with up to four axes, of one dtype. Returns O like Q. ValueError for inputs that do not fit
    (the ladder's own kernels are causal only), KeyError for an unknown step, RuntimeError for one that this machine
    cannot run.
    """

    @staticmethod
    def forward(ctx, Q, K, V, is_causal, forward_step, backward_step):
        check_inputs(Q, K, V)
        q, k, v = (to_four_axes(x) for x in (Q, K, V))
        o, logsumexp = torch.ops.cs336_ladder.forward(q, k, v, is_causal, forward_step)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.is_causal, ctx.step, ctx.shape = is_causal, backward_step, Q.shape
        return o.view(Q.shape)

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("LadderAttention")
        q, k, v, o, logsumexp = ctx.saved_tensors
        grad_o = to_four_axes(grad_o)
        grads = torch.ops.cs336_ladder.backward(q, k, v, o, logsumexp, grad_o, ctx.is_causal, ctx.step)
        return *(grad.view(ctx.shape) for grad in grads), None, None, None
