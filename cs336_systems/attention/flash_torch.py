"""FlashAttention-2 in plain PyTorch: the tiled algorithm to read and to test the kernels against, on any device.

Symbols as in Dao, "FlashAttention-2" (2023): a tile of queries Q_i, a tile of keys K_j and values V_j, scores
S_ij = scale · Q_i K_jᵀ, running row maximum m and sum l, output accumulator, logsumexp L_i = m + log l.
Two Function classes share the tiled forward pass and differ in backward: `FlashAttentionTorch` loops over tiles again
(memory linear in the sequence), `FlashAttentionCompiledBackward` recomputes P whole in one function under
torch.compile, as the handout asks for (memory quadratic in backward).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from cs336_systems.attention.inputs import autocast_inputs, check_inputs, first_order_only
from cs336_systems.attention.reference import causal_mask

QUERY_TILE, KEY_TILE = 64, 64  # rows; the handout asks for at least 16 × 16
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tile_scores(
    q_i: torch.Tensor, k_j: torch.Tensor, i: int, j: int, scale: float, is_causal: bool
) -> torch.Tensor:
    """S_ij (..., rows, keys) of the tiles that begin at query i and key j, −∞ where the causal mask hides a key."""
    s = (q_i @ k_j.transpose(-2, -1)) * scale
    if is_causal and j + k_j.shape[-2] - 1 > i:
        queries = torch.arange(i, i + q_i.shape[-2], device=s.device)
        keys = torch.arange(j, j + k_j.shape[-2], device=s.device)
        s = s.masked_fill(queries[:, None] < keys[None, :], float("-inf"))
    return s


def _last_key(i: int, rows: int, num_keys: int, is_causal: bool) -> int:
    """One past the last key that queries i … i + rows − 1 see."""
    return min(i + rows, num_keys) if is_causal else num_keys


def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool,
    query_tile: int = QUERY_TILE, key_tile: int = KEY_TILE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Algorithm 1: O (..., n_q, d) in q's dtype and L (..., n_q) in fp32 (fp64 for fp64 inputs)."""
    wide, scale = _accumulator(q.dtype), 1 / math.sqrt(q.shape[-1])
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    o = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for i in range(0, num_queries, query_tile):
        q_i = q[..., i : i + query_tile, :].to(wide)
        m = torch.full(q_i.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        l = torch.zeros_like(m)
        acc = torch.zeros_like(q_i)
        end = _last_key(i, q_i.shape[-2], num_keys, is_causal)
        for j in range(0, end, key_tile):
            k_j = k[..., j : min(j + key_tile, end), :].to(wide)
            v_j = v[..., j : min(j + key_tile, end), :]
            s = _tile_scores(q_i, k_j, i, j, scale, is_causal)
            m_new = torch.maximum(m, s.amax(-1))
            p = torch.exp(s - m_new[..., None])
            alpha = torch.exp(m - m_new)  # rescales the sums so far when the maximum grows
            l = alpha * l + p.sum(-1)
            acc = alpha[..., None] * acc + p.to(v.dtype).to(wide) @ v_j.to(wide)
            m = m_new
        o[..., i : i + query_tile, :] = (acc / l[..., None]).to(o.dtype)
        logsumexp[..., i : i + query_tile] = m + torch.log(l)
    return o, logsumexp


def tiled_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, grad_o: torch.Tensor,
    is_causal: bool, query_tile: int = QUERY_TILE, key_tile: int = KEY_TILE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Algorithm 2: dQ, dK, dV, with P recomputed tile by tile from L."""
    wide, scale = _accumulator(q.dtype), 1 / math.sqrt(q.shape[-1])
    delta = (o.to(wide) * grad_o.to(wide)).sum(-1)  # D
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dk = torch.zeros(k.shape, dtype=wide, device=k.device)
    dv = torch.zeros_like(dk)
    for i in range(0, q.shape[-2], query_tile):
        rows = slice(i, min(i + query_tile, q.shape[-2]))
        q_i, do_i = q[..., rows, :].to(wide), grad_o[..., rows, :].to(wide)
        end = _last_key(i, q_i.shape[-2], k.shape[-2], is_causal)
        for j in range(0, end, key_tile):
            keys = slice(j, min(j + key_tile, end))
            k_j, v_j = k[..., keys, :].to(wide), v[..., keys, :].to(wide)
            p = torch.exp(_tile_scores(q_i, k_j, i, j, scale, is_causal) - logsumexp[..., rows, None])
            dv[..., keys, :] += p.transpose(-2, -1) @ do_i
            ds = p * (do_i @ v_j.transpose(-2, -1) - delta[..., rows, None])
            dq[..., rows, :] += scale * (ds @ k_j)
            dk[..., keys, :] += scale * (ds.transpose(-2, -1) @ q_i)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def whole_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, logsumexp: torch.Tensor, grad_o: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK, dV with P recomputed from L at once (handout, equations 13 to 19); meant for torch.compile."""
    wide, scale = _accumulator(q.dtype), 1 / math.sqrt(q.shape[-1])
    s = (q @ k.transpose(-2, -1)).to(wide) * scale
    if is_causal:
        s = s.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), float("-inf"))
    p = torch.exp(s - logsumexp[..., None])
    delta = (o.to(wide) * grad_o.to(wide)).sum(-1)
    dv = p.to(q.dtype).transpose(-2, -1) @ grad_o
    ds = (p * ((grad_o @ v.transpose(-2, -1)).to(wide) - delta[..., None]) * scale).to(q.dtype)
    return ds @ k, ds.transpose(-2, -1) @ q, dv


@functools.cache
def compiled_backward() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`whole_backward` under torch.compile, which compiles it at its first call."""
    return torch.compile(whole_backward, dynamic=False)


class FlashAttentionTorch(torch.autograd.Function):
    """FlashAttention-2 tiled in PyTorch, forward and backward: `FlashAttentionTorch.apply(Q, K, V, is_causal)`.

    Q: (..., n_q, d); K, V: (..., n_k, d); one dtype (fp64, fp32, fp16, bf16) and device. Returns O (..., n_q, d).
    Saves Q, K, V, O and L (..., n_q). Errors: ValueError that names the mismatch.
    """

    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        Q, K, V = autocast_inputs(Q, K, V)
        check_inputs(Q, K, V, dtypes=DTYPES)
        with torch.autocast(Q.device.type, enabled=False):  # the accumulators stay in fp32 or wider
            o, logsumexp = tiled_forward(Q, K, V, is_causal)
        ctx.save_for_backward(Q, K, V, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("FlashAttentionTorch")
        with torch.autocast(grad_o.device.type, enabled=False):
            return *tiled_backward(*ctx.saved_tensors, grad_o, ctx.is_causal), None


class FlashAttentionCompiledBackward(FlashAttentionTorch):
    """The tiled PyTorch forward with the handout's backward: recomputation in one function under torch.compile."""

    @staticmethod
    def backward(ctx, grad_o):
        first_order_only("FlashAttentionCompiledBackward")
        with torch.autocast(grad_o.device.type, enabled=False):
            return *compiled_backward()(*ctx.saved_tensors, grad_o, ctx.is_causal), None
