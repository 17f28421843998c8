"""Whether `flash_triton` can run, as an answer that torch.compile takes without tracing the question."""

from __future__ import annotations

import torch

from cs336_systems.attention import _triton_usable


@torch.compiler.assume_constant_result
def triton_usable() -> bool:
    """Whether `flash_triton` can run on this machine; asked once."""
    return _triton_usable()
