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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, impl: str = "auto"
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(d)) v over any leading axes, differentiable.

    q: (..., n_queries, d); k, v: (..., n_keys, d) → (..., n_queries, d). With `is_causal`, query i sees keys j ≤ i,
    both counted from 0 (top left), as in torch's own attention. All implementations take fp32 (but `flash_cuda`), fp16
    and bf16 and follow autocast; fp32 matmuls follow `torch.get_float32_matmul_precision()`. Strided and expanded
    inputs are not copied. Gradients of `flash_triton` are deterministic, but for dQ of its 16-bit kernels for Hopper
    (see `available.hopper_reason`), whose last bits differ from run to run, as those of `flash_cuda` do; with torch's
    flag for determinism, both sum in a fixed order.

    `impl`: a key of IMPLEMENTATIONS, or `"auto"`, see `auto.chosen`. Errors: ValueError for shapes, dtypes or
    devices that do not fit, naming both; ValueError for an unknown `impl`, and for an `is_causal` that is no bool;
    RuntimeError with the reason for an implementation that this machine cannot run.
    """
    from cs336_systems.attention.auto import chosen
    from cs336_systems.attention.usable import usable

    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal is {is_causal!r}; allowed: True, False")
    if impl == "auto":
        impl = chosen(q)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown attention implementation {impl!r}; allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if not usable(impl):
        raise RuntimeError(f"attention implementation {impl!r} is unavailable: {availability()[impl]}")
    return IMPLEMENTATIONS[impl].call(q, k, v, is_causal)
