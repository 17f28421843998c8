"""Whether an implementation can run, as an answer that torch.compile takes without tracing the question."""

from __future__ import annotations

import torch

from cs336_systems.attention import registry


@torch.compiler.assume_constant_result
def usable(name: str) -> bool:
    """Whether an implementation of attention can run on this machine; asked once."""
    return registry.usable(name)
