"""No chapter: the implementations of attention that chapter `leaderboard` times, ours and others', alike; and what the
first call of one of them costs."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.ladder import steps
from cs336_systems.measure.rows import Skip, failure_is_a_row

OURS = ("flash_triton", "plain_triton")
PEERS = ("fa4", "sdpa_cudnn", "flex_compiled", "sdpa_flash", "sdpa_efficient", "reference", "flash_torch")
_SDPA = {
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
}
# implementations that are steps of the ladder, whatever kernels the package itself chooses for a GPU
_PAIRS = {"plain_triton": ("f_production", "b_production")}


_TRITON = (
    "cs336_systems.attention",
    "cs336_systems.attention.usable",
    "cs336_systems.attention.flash_triton",
)
_TORCH = ("cs336_systems.attention.flash_torch",)
_LADDER = ("cs336_systems.ladder.function", "cs336_systems.ladder.launch", "cs336_systems.ladder.steps")
# what chooses between implementations of attention, and the chosen: a row depends on its own alone (`measure.code`)
PER_CASE = _TRITON + _TORCH + _LADDER


def sources(impl: str) -> tuple[str, ...]:
    """What an implementation of attention (or a step of the ladder) is in this package: for `also_measures`."""
    if impl in ("flex_compiled", "fa4"):
        return ()
    inputs = "cs336_systems.attention.inputs:autocast_inputs"
    if impl in ("reference", "reference_compiled"):
        return inputs, "cs336_systems.attention.reference:reference_attention"
    if impl.startswith("sdpa"):
        return inputs, "cs336_systems.attention:attention"
    if impl in ("flash_torch", "flash_compiled_backward"):
        return "cs336_systems.attention:attention", *_TORCH
    return _TRITON if impl in ("flash_triton", "auto") else _TRITON + _LADDER


@dataclass(frozen=True)
class Implementation:
    """`apply`: (q, k, v) → o on three axes, (heads, tokens, d), or (tokens, heads, d) with `tokens_first`.
    `backend`: what runs behind it."""

    apply: Callable[..., Any]
    backend: str
    tokens_first: bool = False


@functools.cache
def build(impl: str, is_causal: bool, device: str, seq_len: int, compiled: bool) -> Implementation:
    """One of OURS or PEERS. `compiled`: under `torch.compile`, as the leaderboard runs ours; `seq_len` is for masks
    that are made beforehand. Raises `Skip` where this machine cannot run it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cs336_systems.attention import attention, availability

    if impl == "reference":
        return Implementation(lambda q, k, v: attention(q, k, v, is_causal, impl="reference"), "eager")
    if impl == "flash_torch":
        return Implementation(lambda q, k, v: attention(q, k, v, is_causal, impl="flash_torch"), "eager")
    if impl in _SDPA:
        if device == "cpu" and impl != "sdpa_flash":
            raise Skip(f"needs a CUDA device: torch has no {impl} on a CPU")
        backend = getattr(SDPBackend, _SDPA[impl])

        def forced(q, k, v):
            with sdpa_kernel(backend):  # an error where it cannot run, never another kernel
                return attention(q[None], k[None], v[None], is_causal, impl="sdpa")[0]

        return Implementation(forced, backend.name.lower())
    if device == "cpu":
        raise Skip("needs a CUDA device")
    if impl == "flash_triton":
        if reason := availability()["flash_triton"]:
            raise Skip(f"needs triton on an NVIDIA GPU: {reason}")
        from cs336_systems.attention.flash_triton import FlashAttentionTriton

        # compiled as the leaderboard asks; alone on the GPU it makes no difference, and shapes change there
        flash = torch.compile(FlashAttentionTriton.apply) if compiled else FlashAttentionTriton.apply
        return Implementation(lambda q, k, v: flash(q, k, v, is_causal), "package")
    if impl in _PAIRS:
        return _pair(impl, is_causal, compiled)
    if impl == "flex_compiled":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if is_causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq_len, seq_len, device=device)
        flex = torch.compile(flex_attention, dynamic=False)
        return Implementation(lambda q, k, v: flex(q[None], k[None], v[None], block_mask=mask)[0], "inductor")
    return _fa4(is_causal)


def _pair(impl: str, is_causal: bool, compiled: bool) -> Implementation:
    import torch

    from cs336_systems.ladder import function, launch

    for name in _PAIRS[impl]:
        if reason := launch.missing(steps.STEPS[name]):
            raise Skip(f"needs {reason}")

    def pair(q, k, v):
        return function.LadderAttention.apply(q, k, v, is_causal, *_PAIRS[impl])

    return Implementation(torch.compile(pair) if compiled else pair, "+".join(_PAIRS[impl]))


def _fa4(is_causal: bool) -> Implementation:
    try:
        import flash_attn.cute as fa4
    except ImportError as error:
        raise Skip(f"needs FlashAttention-4, the package flash-attn-4 ({error})") from None

    def forward(q, k, v):
        found = fa4.flash_attn_func(q[None], k[None], v[None], causal=is_causal)
        return (found[0] if isinstance(found, tuple) else found)[0]

    return Implementation(
        forward, f"flash_attn.cute {getattr(fa4, '__version__', '')}".strip(), tokens_first=True
    )


# ------------------------------------------------------------------------------------------------ what is launched
def own_kernels(call: Callable[[], Any]) -> list[str]:
    """The kernels of this package that a call launches, as `module.name`."""
    from cs336_systems.ladder.resources import of_call

    return [r.kernel for r in of_call(call) if r.kernel.split(".")[0] in ("triton_kernels", "hopper")]


OTHER_LENGTHS = (64, 200, 256, 777, 1024, 4096, 5000)  # of sequences, in calls after the first two


def first_call(
    impl: str, heads: int, seq_len: int, head_dim: int, is_causal: bool, dtype: str
) -> dict[str, Any]:
    """Both passes for the first time in this process, and again: seconds, milliseconds, and how many kernels Triton has
    compiled for the first call (`compiled`), and in calls with OTHER_LENGTHS (`compiled_later`, ours only).

    For a fresh process with empty caches, where `TRITON_CACHE_DIR` says.
    """
    import torch

    metrics: dict[str, Any] = {}
    with failure_is_a_row(metrics):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        implementation = build(impl, is_causal, device, seq_len, False)
        x = torch.ones(64, 64, device=device)
        (x @ x).sum().item()  # the context and cuBLAS are not the implementation's to start
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

        def both(n: int) -> None:
            shape = (n, heads, head_dim) if implementation.tokens_first else (heads, n, head_dim)
            q, k, v, grad_o = (torch.randn(shape, device=device, dtype=kind) for _ in range(4))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            torch.autograd.grad(implementation.apply(*leaves), leaves, grad_o)

        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            both(seq_len)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        metrics |= {
            "first_call_s": seconds[0],
            "second_call_ms": 1e3 * seconds[1],
            "backend": implementation.backend,
        }
        if device == "cuda" and impl in (*OURS, "flex_compiled"):
            metrics["compiled"] = _compiled_kernels()
        if device == "cuda" and impl in OURS:
            for n in OTHER_LENGTHS:
                both(n)
            metrics["compiled_later"] = _compiled_kernels() - metrics["compiled"]
            metrics["kernels"] = " ".join(own_kernels(lambda: both(seq_len)))
    return metrics


def _compiled_kernels() -> int:
    """How many binaries of kernels there are in Triton's cache."""
    return len({path.parent.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")})
