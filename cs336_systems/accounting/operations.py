"""What single operations must compute and move, at the least.

FLOPs count matmuls only (a multiplication and an addition are two); bytes are the fewest that reach
memory: each input read once, each output written once.
"""

from __future__ import annotations

PARTS = ("forward", "backward", "end_to_end")
_FP32_BYTES = 4


def check_sizes(part: str = "forward", **sizes: float) -> None:
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; allowed: {', '.join(PARTS)}")
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{name}={size}; it must be positive")


def matmul_flops(m: int, n: int, k: int) -> int:
    """FLOPs of (m, k) @ (k, n)."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def _pairs(num_queries: int, num_keys: int, is_causal: bool) -> float:
    """Pairs of a query and a key that it sees. A causal mask, from the top left, counts half of a square, as is usual,
    although the diagonal makes it a little more; queries beyond the last key see all keys, and none sees keys beyond
    the last query."""
    square = min(num_queries, num_keys) if is_causal else 0
    return (num_queries - square) * num_keys + square**2 / 2


def attention_flops(
    batch_heads: int, num_queries: int, num_keys: int, head_dim: int, is_causal: bool, part: str
) -> float:
    """FLOPs of attention's matmuls, over all batch elements and heads.

    The forward pass has two matmuls (QK^T and PV), 4·Nq·Nk·d; the backward pass five (QK^T again, dO V^T,
    P^T dO, dS K, dS^T Q), 2.5 times as many. A causal mask leaves the pairs that `_pairs` counts, half of a square.
    Source: the FlashAttention-2 paper (arXiv 2307.08691), section 4.1. ValueError for an unknown `part` or a size
    that is not positive.
    """
    check_sizes(part, batch_heads=batch_heads, num_queries=num_queries, num_keys=num_keys, head_dim=head_dim)
    products = {"forward": 2, "backward": 5, "end_to_end": 7}[part]
    return products * 2.0 * batch_heads * _pairs(num_queries, num_keys, is_causal) * head_dim


def attention_exps(batch_heads: int, num_queries: int, num_keys: int, is_causal: bool, part: str) -> float:
    """Exponentials of the softmax: one for each pair of query and key, and one more in backward.

    They matter beside the matmuls, and backward recomputes them: a streaming multiprocessor of Ampere or Hopper
    computes 16 per clock, against thousands of FMAs on its tensor cores (see `exps_ms`).
    """
    check_sizes(part, batch_heads=batch_heads, num_queries=num_queries, num_keys=num_keys)
    passes = {"forward": 1, "backward": 1, "end_to_end": 2}[part]
    return passes * batch_heads * float(_pairs(num_queries, num_keys, is_causal))


def attention_bytes(
    batch_heads: int, num_queries: int, num_keys: int, head_dim: int, bytes_per_element: int, part: str
) -> int:
    """The fewest bytes that attention moves to and from memory when no score is ever written there.

    Forward reads Q, K, V and writes O and the logsumexp L (fp32, one per query). Backward reads Q, K, V, O, dO
    and L and writes dQ, dK, dV. `bytes_per_element` is that of all these tensors but L.
    """
    check_sizes(part, batch_heads=batch_heads, num_queries=num_queries, num_keys=num_keys, head_dim=head_dim,
           bytes_per_element=bytes_per_element)  # fmt: skip
    query_like = batch_heads * num_queries * head_dim * bytes_per_element  # Q, O, dO, dQ
    key_like = batch_heads * num_keys * head_dim * bytes_per_element  # K, V, dK, dV
    logsumexp = batch_heads * num_queries * _FP32_BYTES
    forward = 2 * query_like + 2 * key_like + logsumexp
    backward = 4 * query_like + 4 * key_like + logsumexp
    return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[part]
