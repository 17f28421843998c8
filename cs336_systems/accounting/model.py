"""What a whole Transformer must compute and hold: parameters, FLOPs, bytes. For `cs336_systems.model.TransformerLM`.

Symbols in all derivations: B batch, S sequence, T = B·S tokens, D d_model, F d_ff, L num_layers, H num_heads, K the
width of all heads of keys (D, with grouped queries less), V vocab_size. FLOPs count matmuls, a multiplication and an
addition as two; what the norms, the activation and the softmax add is less than 1 % at the handout's sizes and
contexts. Nothing here needs torch.
"""

from __future__ import annotations

from cs336_systems.accounting.operations import check_sizes, matmul_flops
from cs336_systems.sizes import ModelConfig

MODES = ("forward", "forward_backward", "train_step")
_PASSES = {"forward": 1, "forward_backward": 3, "train_step": 3}


def check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")


# ------------------------------------------------------------------------------------------------ parameters
def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by component, over all blocks.

    embedding: the table, V·D. attention: in each block two projections D × D and two D × K,
    2·L·D·(D + K). ffn: w1, w2 and w3,
    3·L·D·F. norms: two in each block and the last one, (2L + 1)·D. head: V·D, not tied to the embedding. No biases.
    """
    d, layers = config.d_model, config.num_layers
    return {
        "embedding": config.vocab_size * d,
        "attention": 2 * layers * d * (d + config.d_kv),
        "ffn": 3 * layers * d * config.d_ff,
        "norms": (2 * layers + 1) * d,
        "head": config.vocab_size * d,
    }


def num_parameters(config: ModelConfig) -> int:
    """All parameters, the embedding and the head included."""
    return sum(parameter_counts(config).values())


# ----------------------------------------------------------------------------------------------------- FLOPs
def forward_matmul_flops(config: ModelConfig, batch: int, sequence: int) -> dict[str, int]:
    """FLOPs of one forward pass by component, every matmul in full: what `torch.utils.flop_counter` counts.

    qkv: a matmul (T, D) @ (D, D) and two (T, D) @ (D, K), 2·T·D·(D + 2K). attention_scores: QKᵀ, H matmuls
    (S, d) @ (d, S) for each sequence, 2·T·S·D, with the half that a causal mask hides. attention_output: PV, as many.
    output_projection: 2·T·D². ffn: three matmuls between widths D and F, 6·T·D·F. head: 2·T·D·V. The embedding is a
    look-up. ValueError for a size that is not positive.
    """
    check_sizes(batch=batch, sequence=sequence)
    tokens, d, layers = batch * sequence, config.d_model, config.num_layers
    heads = layers * batch * config.num_heads
    return {
        "qkv": layers * matmul_flops(tokens, d + 2 * config.d_kv, d),
        "attention_scores": heads * matmul_flops(sequence, sequence, config.d_head),
        "attention_output": heads * matmul_flops(sequence, config.d_head, sequence),
        "output_projection": layers * matmul_flops(tokens, d, d),
        "ffn": 3 * layers * matmul_flops(tokens, config.d_ff, d),
        "head": matmul_flops(tokens, config.vocab_size, d),
    }


def model_flops(config: ModelConfig, batch: int, sequence: int, mode: str) -> int:
    """The FLOPs that one step needs, however it is implemented: the numerator of `mfu`.

    The two matmuls of attention count half, because the mask hides half of the scores (the diagonal makes it a
    little more). Backward is twice forward: y = W x needs dW and dx, a matmul of the same size each. Scores that are
    recomputed in backward do not count here (`attention_flops` counts them, as the work of one kernel). So
    `"forward_backward"` is 3 × `"forward"`, and so is `"train_step"`: AdamW has no matmuls, and its ~15
    operations per parameter vanish beside 6·T. ValueError for an unknown mode or a size that is not positive.
    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B, with the causal half.
    """
    check_choice("mode", mode, MODES)
    flops = forward_matmul_flops(config, batch, sequence)
    hidden = (flops["attention_scores"] + flops["attention_output"]) // 2
    return _PASSES[mode] * (sum(flops.values()) - hidden)


def mfu(config: ModelConfig, batch: int, sequence: int, mode: str, ms: float, tflops: float) -> float:
    """Model FLOPs utilization: the share of `tflops` (TFLOP/s) at which a step of `ms` milliseconds does its work.

    `tflops` is the peak to compare with, by data sheet or measured; of several devices, the sum. ValueError for an
    unknown mode or a number that is not positive.
    """
    check_sizes(ms=ms, tflops=tflops)
    return model_flops(config, batch, sequence, mode) / (ms * tflops * 1e9)


def residual_bytes(config: ModelConfig, batch: int, sequence: int, bytes_per_element: int = 4) -> int:
    """Bytes of one tensor of the residual stream, (B, S, D)."""
    check_sizes(batch=batch, sequence=sequence, bytes_per_element=bytes_per_element)
    return batch * sequence * config.d_model * bytes_per_element
