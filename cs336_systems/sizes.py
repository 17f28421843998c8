"""Transformer hyperparameters: `ModelConfig`, and the sizes that the handout names. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """The hyperparameters of one Transformer language model.

    d_model: width of the residual stream; d_ff: inner width of the SwiGLU; num_layers: blocks; num_heads: attention
    heads of one block, each d_model / num_heads wide; vocab_size: tokens; context_length: the longest sequence, in
    tokens; rope_theta: base of the rotary frequencies; num_kv_heads: heads of keys and values, each for a group of
    num_heads / num_kv_heads (Ainslie et al., arXiv 2305.13245), None for one each.

    `dataclasses.replace(config, context_length=...)` gives a changed copy, checked again. Errors: ValueError that names
    the value and what is allowed, for sizes that are not positive integers, heads that do not divide d_model,
    num_kv_heads that do not divide num_heads, an odd head dimension (rotary positions rotate pairs), or a rope_theta
    that is not positive and finite.
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    context_length: int = 512
    rope_theta: float = 10_000.0
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        names = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length")
        for name in names if self.num_kv_heads is None else (*names, "num_kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; it must be a positive integer")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ValueError(f"rope_theta={self.rope_theta!r}; it must be positive and finite")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} must be a multiple of num_heads={self.num_heads}")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.d_head % 2:
            raise ValueError(
                f"d_model={self.d_model} and num_heads={self.num_heads} give head dimension {self.d_head}; "
                "it must be even, because rotary positions turn pairs"
            )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def d_kv(self) -> int:
        """Width of all of them together."""
        return self.kv_heads * self.d_head


HANDOUT_SIZES = ("small", "medium", "large", "xl", "2.7B")
"""The sizes of the handout's table (section 1.1.2), smallest first; vocabulary 10,000. In spring 2026 2.7B is called
xl, this xl is gone, and there is 10B."""

SIZES = {
    # ours, not the handout's: for tests and laptops. Its head dimension is the narrowest that all kernels take.
    "tiny": ModelConfig(d_model=64, d_ff=192, num_layers=2, num_heads=4),
    "small": ModelConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": ModelConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": ModelConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": ModelConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7B": ModelConfig(d_model=2560, d_ff=10_240, num_layers=32, num_heads=32),
    "10B": ModelConfig(d_model=4608, d_ff=12_288, num_layers=50, num_heads=36),
}


def size(name: str) -> ModelConfig:
    """The configuration with this name. ValueError for an unknown one, naming the known ones."""
    if name not in SIZES:
        raise ValueError(f"unknown model size {name!r}; allowed: {', '.join(SIZES)}")
    return SIZES[name]
