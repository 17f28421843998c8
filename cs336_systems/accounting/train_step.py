"""The least time of a training step of `model.TransformerLM`, part by part: what its kernels compute and move.

Symbols as in `accounting.model`; R = 4·T·D bytes, a tensor of the residual stream; h = a·T·D and f = a·T·F bytes, with
a the bytes of an activation (4, or 2 in bf16 and fp16). Launches, and what the host does between them, count nothing:
a step that takes much longer than this waits for the host.
"""

from __future__ import annotations

from cs336_systems.accounting.attention_memory import Kernel, attention_kernels, kernels_ms
from cs336_systems.accounting.model import check_choice, model_flops, num_parameters
from cs336_systems.accounting.operations import attention_bytes, attention_flops
from cs336_systems.accounting.zero import ADAMW_BYTES
from cs336_systems.sizes import ModelConfig

ATTENTIONS = ("reference", "compiled", "flash")
CLIPPING_BYTES = 12  # of one parameter: its gradient read for the norm, read and written to be scaled


def train_step_kernels(
    config: ModelConfig, sequences: int, dtype: str, attention: str, compiled: bool
) -> dict[str, tuple[Kernel, ...]]:
    """Part → its kernels, of a step on `sequences` sequences of `config.context_length`.

    What attention and the elementwise kernels move is as if each head had keys of its own: with `num_kv_heads` less.

    - matmuls: 6 FLOPs a parameter and token, as if none were memory-bound.
    - attention: `attention_kernels` of "reference", with the mask's reads and writes, or "compiled"; "flash" does half
      of the FLOPs. Under autocast the eager softmax computes in fp32: with the casts around it that is 20 more times a
      matrix of scores, both passes together.
    - elementwise: of a block's eager forward pass two norms, 14R; the rotation of q and k, 14h (under autocast
      10h + 8R, since it computes in fp32); heads put together, 2h; silu and product, 5f; two residual sums,
      2(2R + h); autocast's copies, 2(R + h). Compiled, each tensor once: 5R + 8h + 3f. Backward moves twice as much.
      Cross entropy moves its fp32 logits some five times.
    - optimizer: ADAMW_BYTES and CLIPPING_BYTES a parameter.

    ValueError for an unknown `dtype` or `attention`.
    """
    check_choice("attention", attention, ATTENTIONS)
    check_choice("dtype", dtype, ("fp32", "tf32", "bf16", "fp16"))
    narrow = dtype in ("bf16", "fp16")
    a = 2 if narrow else 4
    n, layers = config.context_length, config.num_layers
    tokens, heads = sequences * n, sequences * config.num_heads
    residual, hidden, inner = (
        4 * tokens * config.d_model,
        a * tokens * config.d_model,
        a * tokens * config.d_ff,
    )
    if compiled:
        block = 5 * residual + 8 * hidden + 3 * inner
    else:
        rotation, copies = (
            (10 * hidden + 8 * residual, 2 * (residual + hidden)) if narrow else (14 * hidden, 0)
        )
        block = 14 * residual + rotation + 2 * hidden + 5 * inner + 2 * (2 * residual + hidden) + copies
    shape = (heads, n, n, config.d_head)
    if attention == "flash":
        inside = [
            Kernel(part, attention_flops(*shape, True, part), attention_bytes(*shape, a, part))
            for part in ("forward", "backward")
        ]
    else:
        inside = [
            k for part in ("forward", "backward") for k in attention_kernels(*shape, a, attention, part)
        ]
        if attention == "reference":
            matrix = heads * n * n * a
            inside += [Kernel("mask", 0, 2 * matrix)] * 2
            inside += [Kernel("softmax in fp32", 0, 20 * matrix)] * narrow
    in_attention = layers * attention_flops(*shape, True, "forward") * 3
    matmuls = model_flops(config, sequences, n, "train_step") - in_attention
    parameters = num_parameters(config)
    return {
        "matmuls": (Kernel("matmuls", matmuls, 0),),
        "attention": tuple(inside) * layers,
        "elementwise": (Kernel("elementwise", 0, 3 * layers * block + 5 * 4 * tokens * config.vocab_size),),
        "optimizer": (Kernel("optimizer", 0, (ADAMW_BYTES + CLIPPING_BYTES) * parameters),),
    }


def train_step_ms(
    config: ModelConfig,
    sequences: int,
    dtype: str,
    attention: str,
    compiled: bool,
    tflops: float,
    tb_per_s: float,
) -> dict[str, float]:
    """Part → the least ms of its kernels, one after another, at a machine's best matmul (in `dtype`) and copy.
    Arguments and errors as `train_step_kernels` and `kernels_ms`."""
    parts = train_step_kernels(config, sequences, dtype, attention, compiled)
    return {part: kernels_ms(kernels, tflops, tb_per_s) for part, kernels in parts.items()}
