"""Attention by its definition: scores, softmax and output materialized. The specification of all the others."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from cs336_systems.attention.inputs import check_inputs, repeated_heads


def _range(name: str, device: torch.device) -> AbstractContextManager[object]:
    """A range for torch's profiler where it records, else, on a GPU, an NVTX range for Nsight Systems; nothing
    elsewhere, and nothing inside torch.compile's graph."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None,
    cu_seqlens: torch.Tensor | None = None, first_query: int = 0,
) -> torch.Tensor:  # fmt: skip
    """(n_queries, n_keys), True where a query may see a key: query i, counted from `first_query`, sees key j ≤ i, both
    from the top left; with a window only j > i − window, and of packed documents only those of its own."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(first_query)
    if window is not None:
        seen = seen.triu(first_query - window + 1)
    if cu_seqlens is not None:
        tokens = torch.arange(max(first_query + num_queries, num_keys), device=device)
        document = torch.searchsorted(cu_seqlens, tokens, right=True)
        seen = seen & (document[first_query : first_query + num_queries, None] == document[:num_keys])
    return seen


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(q kᵀ / sqrt(d)) v in plain PyTorch, in the inputs' dtype (fp64 included).

    q: (..., n_queries, d); k, v: (..., n_keys, d) → (..., n_queries, d); window and cu_seqlens: see `attention`, which
    checks them. Stores (..., n_queries, n_keys) several times. NVTX ranges: `attention scores`, `attention softmax`,
    `attention output`. Errors: ValueError that names the mismatch.
    """
    check_inputs(
        q, k, v, dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16), head_dims=(1, 2**31)
    )
    with _range("attention scores", q.device):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if is_causal:
            shape = q.shape[-2], k.shape[-2]
            # without a name, so that only autograd keeps it
            scores = scores.masked_fill(~causal_mask(*shape, q.device, window, cu_seqlens), float("-inf"))
    with _range("attention softmax", q.device):
        probabilities = torch.softmax(scores, dim=-1)
    with _range("attention output", q.device):
        return probabilities.to(v.dtype) @ v


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_o: torch.Tensor, is_causal: bool = False,
    max_scores: int = 2**26, window: int | None = None, cu_seqlens: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """[O, dQ, dK, dV] in fp64, by chunks of queries of at most `max_scores` scores: the reference for errors.

    q: (..., n_queries, d); k, v: (..., n_keys, d), of as many heads or fewer (grouped queries); grad_o: as q; window
    and cu_seqlens: see `attention`. Memory linear in the sequence, for any length.
    """
    q, k, v, grad_o = (x.detach().double() for x in (q, k, v, grad_o))
    if q.shape[:-2] != k.shape[:-2]:
        heads = k.shape[-3]
        repeated = repeated_heads(q, k, v, True)
        o, dq, *of_each = exact_attention(*repeated, grad_o, is_causal, max_scores, window, cu_seqlens)
        return [o, dq, *(x.unflatten(-3, (heads, -1)).sum(-3) for x in of_each)]
    scale = 1 / math.sqrt(q.shape[-1])
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    heads = q.numel() // (q.shape[-1] * q.shape[-2])
    rows = max(1, max_scores // (heads * k.shape[-2]))
    for i in range(0, q.shape[-2], rows):
        chunk = slice(i, i + rows)
        q_i, do_i = q[..., chunk, :], grad_o[..., chunk, :]
        end = min(i + q_i.shape[-2], k.shape[-2]) if is_causal else k.shape[-2]
        k_i, v_i = k[..., :end, :], v[..., :end, :]
        s = q_i @ k_i.transpose(-2, -1) * scale
        if is_causal:
            seen = causal_mask(q_i.shape[-2], end, q.device, window, cu_seqlens, first_query=i)
            s = s.masked_fill(~seen, float("-inf"))
        p = torch.softmax(s, -1)
        o[..., chunk, :] = p @ v_i
        dv[..., :end, :] += p.transpose(-2, -1) @ do_i
        dp = do_i @ v_i.transpose(-2, -1)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[..., chunk, :] = ds @ k_i
        dk[..., :end, :] += ds.transpose(-2, -1) @ q_i
    return [o, dq, dk, dv]
