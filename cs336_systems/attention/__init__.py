"""One operation, several implementations: `attention(q, k, v, is_causal, impl=...)`.

Importing this package needs no torch; `availability()` says for each implementation why it cannot run here, if so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cs336_systems.attention.registry import IMPLEMENTATIONS, availability

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLEMENTATIONS", "attention", "availability"]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, impl: str = "auto", *,
    enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(q kᵀ / sqrt(d)) v over any leading axes, differentiable.

    q: (..., n_queries, d); k, v: (..., n_keys, d) → (..., n_queries, d). With `is_causal`, query i sees keys j ≤ i,
    both counted from 0 (top left), as in torch's own attention. All implementations take fp32 (but `flash_cuda`), fp16
    and bf16 and follow autocast; fp32 matmuls follow `torch.get_float32_matmul_precision()`. Strided and expanded
    inputs are not copied. Gradients of `flash_triton` are deterministic, but for dQ of its 16-bit kernels for Hopper
    (see `available.hopper_reason`), whose last bits differ from run to run, as those of `flash_cuda` do; with torch's
    flag for determinism, both sum in a fixed order.

    With `enable_gqa` (grouped queries; Ainslie et al., arXiv 2305.13245) q is (..., H_q, n_queries, d), k and v are
    (..., H_kv, n_keys, d), H_q a multiple of H_kv: query head h sees key head h // (H_q / H_kv), as in torch's own
    attention. K and V are not copied, but by the implementations in PyTorch. `flash_cuda` has no grouped queries.

    `impl`: a key of IMPLEMENTATIONS, or `"auto"`, see `auto.chosen`. Errors: ValueError for shapes, dtypes or
    devices that do not fit, naming both; ValueError for an unknown `impl`, for an `is_causal` or `enable_gqa` that
    is no bool, and for grouped queries where `impl` has none, naming those that have; RuntimeError with the reason for
    an implementation that this machine cannot run.
    """
    from cs336_systems.attention.auto import chosen
    from cs336_systems.attention.usable import usable

    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal is {is_causal!r}; allowed: True, False")
    if not isinstance(enable_gqa, bool):
        raise ValueError(f"enable_gqa is {enable_gqa!r}; allowed: True, False")
    grouped = enable_gqa and q.shape[:-2] != k.shape[:-2]
    if impl == "auto":
        impl = chosen(q, grouped)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown attention implementation {impl!r}; allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if grouped and not IMPLEMENTATIONS[impl].grouped_queries:
        able = ", ".join(name for name, found in IMPLEMENTATIONS.items() if found.grouped_queries)
        raise ValueError(f"{impl} has no grouped queries (enable_gqa=True); these have: {able}")
    if not usable(impl):
        raise RuntimeError(f"attention implementation {impl!r} is unavailable: {availability()[impl]}")
    return IMPLEMENTATIONS[impl].call(q, k, v, is_causal, grouped)
