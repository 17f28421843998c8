"""One operation, several implementations: `attention(q, k, v, is_causal, impl=...)`.

Importing this package needs no torch; `availability()` says for each implementation why it cannot run here, if so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cs336_systems.attention.registry import IMPLEMENTATIONS, availability, check_features

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLEMENTATIONS", "attention", "availability"]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, impl: str = "auto", *,
    enable_gqa: bool = False, window: int | None = None, cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(q kᵀ / sqrt(d)) v over any leading axes, differentiable.

    q: (..., n_queries, d); k, v: (..., n_keys, d) → (..., n_queries, d). With `is_causal`, query i sees keys j ≤ i,
    both counted from 0 (top left), as in torch's own attention. All implementations take fp32 (but `flash_cuda`), fp16
    and bf16 and follow autocast; fp32 matmuls follow torch's setting for those on a GPU
    (`torch.set_float32_matmul_precision`, or `torch.backends.cuda.matmul.fp32_precision`). Strided and expanded inputs
    are not copied. Gradients of `flash_triton` are deterministic, but for dQ of its 16-bit kernels for Hopper
    (see `available.hopper_reason`), whose last bits differ from run to run, as those of `flash_cuda` do; with torch's
    flag for determinism, both sum in a fixed order.

    With `enable_gqa` (grouped queries; Ainslie et al., arXiv 2305.13245) q is (..., H_q, n_queries, d), k and v are
    (..., H_kv, n_keys, d), H_q a multiple of H_kv: query head h sees key head h // (H_q / H_kv), as in torch's own
    attention. K and V are not copied, but by the implementations in PyTorch.

    With `window` (sliding window; Beltagy et al., arXiv 2004.05150), from 1 on and causal only, query i sees the
    `window` keys i − window + 1 … i. With `cu_seqlens` (packed sequences), causal only, tensors are (1, heads, total,
    d), the tokens of several documents one after another, and a query sees keys of its own document: document m is
    tokens cu_seqlens[m] … cu_seqlens[m + 1] − 1, cu_seqlens (documents + 1,), int32, on the tensors' device. Documents
    may be empty, so that a fixed number of entries can be filled up with `total`. cu_seqlens has to begin with 0, never
    fall, and end with total. On a CPU this is checked; on a GPU, for which the host would have to wait, and under
    torch.compile what comes of other values is undefined. `flash_triton` never loads tiles of keys that none of a
    tile's queries sees; packed sequences and windows in fp32 or with d > 128 are for its portable kernels, on Hopper
    too. By the number of entries it guesses how long documents are, and chooses a kernel; where entries are filled up,
    `max_seqlen`, the longest document's tokens or a bound on them, says it better. `reference` and `sdpa` store a mask
    of all pairs.

    Who serves what (`registry.features`):

        impl                     grouped queries    sliding window    packed sequences
        flash_triton             yes                yes               yes
        flash_cuda               no                 no                no
        flash_torch              yes                no                no
        flash_compiled_backward  yes                no                no
        reference                yes                yes               yes
        sdpa                     yes                yes               yes

    `impl`: a key of IMPLEMENTATIONS, or `"auto"`, see `auto.chosen`. Errors: ValueError for shapes, dtypes or
    devices that do not fit, naming both; for an unknown `impl`, for an `is_causal` or `enable_gqa` that is no bool, and
    for what `impl` does not serve, naming those that do; RuntimeError with the reason for an implementation that this
    machine cannot run.
    """
    from cs336_systems.attention.auto import chosen, usable
    from cs336_systems.attention.inputs import check_seen

    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal is {is_causal!r}; allowed: True, False")
    if not isinstance(enable_gqa, bool):
        raise ValueError(f"enable_gqa is {enable_gqa!r}; allowed: True, False")
    grouped = enable_gqa and q.shape[:-2] != k.shape[:-2]
    asked: tuple[str, ...] = ("enable_gqa",) if grouped else ()
    if window is not None or cu_seqlens is not None or max_seqlen is not None:
        check_seen(q, k, is_causal, window, cu_seqlens, max_seqlen)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        asked += tuple(
            x for x, value in (("window", window), ("cu_seqlens", cu_seqlens)) if value is not None
        )
    if impl == "auto":
        impl = chosen(q, asked)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown attention implementation {impl!r}; allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if asked:
        check_features(impl, asked)
    if not usable(impl):
        raise RuntimeError(f"attention implementation {impl!r} is unavailable: {availability()[impl]}")
    if window is not None and window >= q.shape[-2]:  # every query sees all keys up to its own
        window = None
    return IMPLEMENTATIONS[impl].call(q, k, v, is_causal, grouped, window, cu_seqlens, max_seqlen)
