"""One operation, several implementations: `attention(q, k, v, is_causal, impl=...)`.

Importing this package needs no torch; `availability()` says for each implementation why it cannot run here, if so.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IMPLEMENTATIONS = {
    "flash_triton": "FlashAttention-2 in Triton, forward and backward kernels",
    "flash_torch": "FlashAttention-2 tiled in PyTorch, forward and backward",
    "flash_compiled_backward": "FlashAttention-2 tiled in PyTorch, its backward pass under torch.compile",
    "reference": "plain PyTorch with materialized scores: the specification",
    "sdpa": "torch.nn.functional.scaled_dot_product_attention: the peer",
}


def availability() -> dict[str, str | None]:
    """For each implementation None where it can run on this machine, else the reason why not. Imports what it needs."""
    if importlib.util.find_spec("torch") is None:
        return dict.fromkeys(IMPLEMENTATIONS, "torch is not installed")
    return {name: triton_reason() if name == "flash_triton" else None for name in IMPLEMENTATIONS}


def triton_reason() -> str | None:
    """Why `flash_triton` cannot run on this machine; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it has wheels for Linux)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    import torch

    from cs336_systems.attention.triton_kernels.tiles import OLDEST

    if not torch.cuda.is_available():
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    if torch.version.hip:
        return "the kernels are written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < OLDEST:
        return f"compute capability {major}.{minor} is older than {OLDEST / 10}"
    return None


_usable: bool | None = None


def _triton_usable() -> bool:
    global _usable
    if _usable is None:
        _usable = triton_reason() is None
    return _usable


def hopper_reason(device_index: int = 0) -> str | None:
    """Why the kernels of `flash_triton` that are written for Hopper do not serve a CUDA device; None where they do.

    Where they do, they take 16-bit tensors that TMA can read, with head dimensions of 40 to 128 that are multiples of 8
    and with 256 queries and keys or more (`hopper.launch`: `reason_against`, `serves`), and fp32 tensors with head
    dimensions up to 128 and 512 queries and keys or more whose products are to be accurate to fp32
    (`hopper.split_launch`: `serves`), unless so few programs of the portable kernels are needed that these are faster:
    in 16 bits backward, with no more keys than queries, and in fp32 forward. `CS336_HOPPER=0` in the environment, set
    before the first call, turns them off. ValueError for another value than 0 or 1.
    """
    asked = os.environ.get("CS336_HOPPER", "1")
    if asked not in ("0", "1"):
        raise ValueError(f"CS336_HOPPER={asked!r}; allowed: 0, 1")
    if reason := hopper_unable(device_index):
        return reason
    return "CS336_HOPPER=0 turns them off" if asked == "0" else None


def hopper_unable(device_index: int = 0) -> str | None:
    """Why a CUDA device cannot run the kernels for Hopper, asked for or not; None where it can."""
    if reason := triton_reason():
        return reason
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    import triton

    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) != (9, 0):
        return f"compute capability {major}.{minor}: they are written for 9.0"
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if not (3, 6) <= version <= (3, 7):  # they make one call that is not part of Gluon's public language
        return f"triton {triton.__version__}: tried with 3.6 and 3.7"
    try:
        for launcher in ("launch", "split_launch"):
            importlib.import_module(f"cs336_systems.attention.hopper.{launcher}")
    except ImportError as error:  # they need parts of triton that it does not promise
        return f"triton {triton.__version__}: {error}"
    return None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, impl: str = "auto"
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(d)) v over any leading axes, differentiable.

    q: (..., n_queries, d); k, v: (..., n_keys, d) → (..., n_queries, d). With `is_causal`, query i sees keys j ≤ i,
    both counted from 0 (top left), as in torch's own attention. All implementations take fp32, fp16 and bf16 and
    follow autocast; fp32 products follow `torch.get_float32_matmul_precision()`. Strided and expanded inputs are not
    copied. Gradients of `flash_triton` are deterministic, but for dQ of its 16-bit kernels for Hopper (see
    `hopper_reason`), whose last bits differ from run to run; with torch's flag for determinism, the portable kernels
    compute the backward pass.

    `impl`: a key of IMPLEMENTATIONS, or `"auto"`: `flash_triton` for CUDA tensors where it can run, else the plain
    PyTorch of `reference`. Errors: ValueError for shapes, dtypes or devices that do not fit, naming both;
    ValueError for an unknown `impl`; RuntimeError with the reason for one that this machine cannot run.
    """
    from cs336_systems.attention.usable import triton_usable

    if impl == "auto":
        impl = "flash_triton" if q.is_cuda and triton_usable() and 16 <= q.shape[-1] <= 256 else "reference"
    if impl == "flash_triton":
        if not triton_usable():
            raise RuntimeError(f"attention implementation 'flash_triton' is unavailable: {triton_reason()}")
        from cs336_systems.attention.flash_triton import FlashAttentionTriton

        return FlashAttentionTriton.apply(q, k, v, is_causal)
    if impl == "flash_torch":
        from cs336_systems.attention.flash_torch import FlashAttentionTorch

        return FlashAttentionTorch.apply(q, k, v, is_causal)
    if impl == "flash_compiled_backward":
        from cs336_systems.attention.flash_torch import FlashAttentionCompiledBackward

        return FlashAttentionCompiledBackward.apply(q, k, v, is_causal)
    from cs336_systems.attention.inputs import autocast_inputs, check_inputs

    if impl == "reference":
        from cs336_systems.attention.reference import reference_attention

        return reference_attention(*autocast_inputs(q, k, v), is_causal)
    if impl == "sdpa":
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = autocast_inputs(q, k, v)
        check_inputs(q, k, v, head_dims=(1, 2**31))
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    raise ValueError(
        f"unknown attention implementation {impl!r}; allowed: auto, {', '.join(IMPLEMENTATIONS)}"
    )
