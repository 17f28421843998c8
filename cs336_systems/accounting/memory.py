"""The memory of `cs336_systems.model.TransformerLM` in eager mode, tensor by tensor, in bytes.

Symbols: B batch, S sequence, T = B·S tokens, D d_model, F d_ff, H num_heads, V vocab_size; a: bytes of an activation
(4 in fp32, 2 under bf16 autocast); R = 4·T·D, a tensor of the residual stream, which stays fp32 under autocast.

Only tensors are counted. A process holds more: the context, the libraries' workspaces, the blocks that an allocator
rounds up, and the tables of rotary positions (8 · context_length · D / H, once).

dtype: "fp32", or "bf16" for fp32 weights under `torch.autocast` with bf16. attention: "reference" (scores and
probabilities materialized) or "flash" (kernels that keep one logsumexp a query; what they hold only while they run,
such as dQ in fp32, is not counted). device: autocast's rules differ for "cuda" and "cpu": on CUDA the softmax is
computed and kept in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.accounting.model import check_choice, num_parameters, parameter_counts
from cs336_systems.accounting.operations import check_sizes
from cs336_systems.sizes import ModelConfig

DTYPES = ("fp32", "bf16")
ATTENTIONS = ("reference", "flash")
DEVICES = ("cuda", "cpu")
OPTIMIZERS = ("foreach", "fused")
MEMORY_MODES = ("forward", "forward_graph", "forward_backward", "train_step")
_FP32, _BF16, _INT64 = 4, 2, 8


@dataclass(frozen=True)
class _Tensors:
    """Bytes of the tensors that the model makes, each under one name, for the sums below."""

    config: ModelConfig
    batch: int
    sequence: int
    dtype: str = "fp32"
    attention: str = "reference"
    device: str = "cuda"

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, sequence=self.sequence)
        for name, allowed in (("dtype", DTYPES), ("attention", ATTENTIONS), ("device", DEVICES)):
            check_choice(name, getattr(self, name), allowed)

    @property
    def autocast(self) -> bool:
        return self.dtype == "bf16"

    @property
    def flash(self) -> bool:
        return self.attention == "flash"

    @property
    def element(self) -> int:
        """a"""
        return _BF16 if self.autocast else _FP32

    @property
    def tokens(self) -> int:
        """T"""
        return self.batch * self.sequence

    @property
    def residual(self) -> int:
        """R"""
        return _FP32 * self.tokens * self.config.d_model

    @property
    def hidden(self) -> int:
        """(B, S, D) in the activations' dtype: what a projection reads or writes, all heads of q, k, v or o."""
        return self.element * self.tokens * self.config.d_model

    @property
    def kv(self) -> int:
        """All heads of k or v, as attention reads them: of grouped queries plain attention repeats them for each."""
        return self.element * self.tokens * (self.config.d_kv if self.flash else self.config.d_model)

    @property
    def inner(self) -> int:
        """(B, S, F) in the activations' dtype."""
        return self.element * self.tokens * self.config.d_ff

    @property
    def norm(self) -> int:
        """What one RMSNorm saves: its input and the normalized input before the weight, and 1 / rms of each token."""
        return 2 * self.residual + _FP32 * self.tokens

    @property
    def narrowed(self) -> int:
        """A norm's fp32 output, alive beside the bf16 copy that the projections read; without autocast there is one."""
        return self.residual if self.autocast else 0

    @property
    def scores(self) -> int:
        """(B, H, S, S) in the dtype of the matmul QKᵀ."""
        return self.element * self.batch * self.config.num_heads * self.sequence**2

    @property
    def widened_scores(self) -> int:
        """The fp32 copy of the scores that the softmax reads, where autocast makes it compute in fp32."""
        return 2 * self.scores if self.autocast and self.device == "cuda" else 0

    @property
    def softmax(self) -> int:
        """The softmax's output, which it saves."""
        return self.widened_scores or self.scores

    @property
    def probabilities(self) -> int:
        """All that is saved of the probabilities: with an fp32 softmax also the bf16 copy that the matmul PV reads."""
        return self.softmax + (self.scores if self.widened_scores else 0)

    @property
    def mask(self) -> int:
        """(S, S), bool."""
        return self.sequence**2

    @property
    def logsumexp(self) -> int:
        """(B, H, S), fp32."""
        return _FP32 * self.config.num_heads * self.tokens

    @property
    def copied(self) -> bool:
        """Whether plain matmul copies q, k and v: heads that lie between the tokens of several sequences."""
        return self.batch > 1 and self.config.num_heads > 1 and not self.flash

    @property
    def repeated(self) -> int:
        """k and v of grouped queries, as the projections make them, beside those that plain attention repeats."""
        grouped = self.config.d_kv < self.config.d_model and not self.flash
        return 2 * self.element * self.tokens * self.config.d_kv if grouped else 0

    def before_copies(self, number: int) -> int:
        """The first `number` of q, k and v where copies of them are what is saved. Repeated k and v are not copied."""
        return self.repeated + self.copied * (1 if self.repeated else number) * self.hidden

    @property
    def logits(self) -> int:
        return self.element * self.tokens * self.config.vocab_size

    @property
    def log_probabilities(self) -> int:
        """Cross entropy's log-softmax as the mean reads it, fp32 under autocast too."""
        return _FP32 * self.tokens * self.config.vocab_size

    @property
    def narrow_log_probabilities(self) -> int:
        """The bf16 log-softmax of which they are a copy: torch asks for bf16, so autocast on CUDA leaves it.

        See cross_entropy_loss in ATen/native/LossNLL.cpp and the policy of optional dtypes in ATen/autocast_mode.h. On
        a CPU, autocast widens the logits instead.
        """
        return self.log_probabilities // 2 if self.autocast and self.device == "cuda" else 0

    def saved_in_layer(self) -> dict[str, int]:
        return {
            "norms": 2 * self.norm,
            "projection_inputs": 2 * self.hidden,
            "qkv": self.hidden + 2 * self.kv,
            "attention": self.logsumexp if self.flash else self.probabilities + self.mask,
            "attention_output": self.hidden,
            "swiglu": 4 * self.inner,
        }

    def saved(self) -> dict[str, int]:
        return {
            "embedding": _INT64 * self.tokens,
            "layers": self.config.num_layers * sum(self.saved_in_layer().values()),
            "final_norm": self.norm,
            "head": self.hidden,
            "loss": self.log_probabilities + self.narrow_log_probabilities + _INT64 * self.tokens + _FP32,
        }


def saved_layer_bytes(
    config: ModelConfig, batch: int, sequence: int, dtype: str = "fp32", attention: str = "reference",
    device: str = "cuda",
) -> dict[str, int]:  # fmt: skip
    """What autograd keeps of one block between forward and backward, besides parameters and autocast's copies of them.

    - norms: two RMSNorms; each keeps its input (for the mean square), the normalized input (for the weight's gradient)
      and 1 / rms: 2·(2R + 4T).
    - projection_inputs: a linear layer keeps its input; q, k, v share one, w1 and w3 share one: 2·a·T·D.
    - qkv: rotated q and k, and v, as the matmuls QKᵀ and PV read them: 3·a·T·D, with grouped queries a·T·D and two of
      the width of k and v, unless these are repeated for plain attention. The rotation itself keeps its tables only.
    - attention: plain: the softmax's output, a·B·H·S² (on CUDA under autocast 4·B·H·S², and 2·B·H·S² for the bf16
      copy that PV reads), and the causal mask, S². Flash: the logsumexp, 4·B·H·S.
    - attention_output: o, kept by the output projection (and by flash, the same tensor): a·T·D.
    - swiglu: w1 x, silu(w1 x), w3 x and their product: 4·a·T·F.

    Errors: ValueError for a size that is not positive or an unknown dtype, attention or device.
    """
    return _Tensors(config, batch, sequence, dtype, attention, device).saved_in_layer()


def saved_activation_bytes(
    config: ModelConfig, batch: int, sequence: int, dtype: str = "fp32", attention: str = "reference",
    device: str = "cuda",
) -> dict[str, int]:  # fmt: skip
    """What autograd keeps of the whole model and cross entropy, besides parameters and autocast's copies of them.

    embedding: the token ids, 8·T. layers: L times the sum of `saved_layer_bytes`. final_norm: 2R + 4T. head: its
    input, a·T·D. loss: the log-probabilities, 4·T·V (6·T·V under autocast on CUDA, twice kept), the targets, 8·T,
    and the sum of the weights, 4. The logits are not kept. Errors as `saved_layer_bytes`.
    """
    return _Tensors(config, batch, sequence, dtype, attention, device).saved()


def autocast_copy_bytes(config: ModelConfig) -> int:
    """The bf16 copies of all linear weights that autocast caches while its context lasts: with K the width of k and v
    2·(L·(2D² + 2DK + 3DF) + V·D).

    The graph keeps them until backward has used them.
    """
    counts = parameter_counts(config)
    return _BF16 * (counts["attention"] + counts["ffn"] + counts["head"])


def memory_moments(
    config: ModelConfig, batch: int, sequence: int, mode: str, dtype: str = "fp32", attention: str = "reference",
    device: str = "cuda", optimizer: str = "foreach",
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Bytes alive at the moments of a step that can be its peak: moment → item → bytes, in the order of time.

    Items: weights (fp32), autocast_copies, gradients (fp32), optimizer_state (AdamW's two fp32 moments, in a step that
    is not the first), saved_activations, temporaries. Modes: "forward": under `torch.no_grad`, up to the logits.
    "forward_graph": the same with the graph. "forward_backward": with cross entropy and backward, gradients None
    before, backward outside the autocast context. The caller does not hold the logits meanwhile; one that does adds
    their a·T·V to all moments of backward. "train_step": the same and AdamW, of which `optimizer` "foreach" (torch's
    default on GPUs) holds a temporary as large as the weights, "fused" none.

    In forward, saved activations grow block by block. In backward they give way to gradients, each a fixed amount for
    a block, so the peak is in the last block (nothing released yet) or in the first (almost all gradients there), and
    both are listed, with those moments of a block that have the largest temporaries. At the handout's sizes, batch 4
    and contexts 128 to 1,024, the largest sum misses the tensors that are really alive by less than 0.1 %. It may miss
    more where F is hardly larger than D, or where a sequence is shorter than D and there are few blocks.
    Errors: ValueError for a size that is not positive or an unknown choice.
    """
    check_choice("mode", mode, MEMORY_MODES)
    check_choice("optimizer", optimizer, OPTIMIZERS)
    t = _Tensors(config, batch, sequence, dtype, attention, device)
    weights, trains = _FP32 * num_parameters(config), mode == "train_step"
    every_step = {"weights": weights, "optimizer_state": 2 * weights * trains}
    moments = _forward_without_graph(t) if mode == "forward" else _forward_with_graph(t)
    if mode in ("forward_backward", "train_step"):
        moments |= _backward(t)
    if trains:
        moments["optimizer step"] = {"gradients": weights, "temporaries": weights * (optimizer == "foreach")}
    items = ("weights", "autocast_copies", "gradients", "optimizer_state", "saved_activations", "temporaries")
    return {name: {x: (every_step | alive).get(x, 0) for x in items} for name, alive in moments.items()}


def peak_bytes(
    config: ModelConfig, batch: int, sequence: int, mode: str, dtype: str = "fp32", attention: str = "reference",
    device: str = "cuda", optimizer: str = "foreach",
) -> dict[str, int]:  # fmt: skip
    """The items of `memory_moments` at the moment with the largest sum: the peak. Arguments and errors as there."""
    moments = memory_moments(config, batch, sequence, mode, dtype, attention, device, optimizer)
    return max(moments.values(), key=lambda items: sum(items.values()))


# -------------------------------------------------------------------------------------- the moments of a step
# Each returns moment → items; an item that is left out is 0 (or the same in the whole step).


def _layer_parameters(t: _Tensors) -> dict[str, int]:
    """Parameters of one block by the order in which backward reaches them."""
    d, f = t.config.d_model, t.config.d_ff
    qkv = d * (d + 2 * t.config.d_kv)
    return {"w2": d * f, "w1_w3": 2 * d * f, "ln2": d, "output_proj": d * d, "qkv": qkv, "ln1": d}


def _copies(t: _Tensors, whole_layers: int, *also: str, head: bool = False) -> int:
    """Autocast's copies of the linear weights of this many blocks, of the named ones of another, and of the head."""
    if not t.autocast:
        return 0
    counts = _layer_parameters(t)
    linear = ("w2", "w1_w3", "output_proj", "qkv")
    elements = whole_layers * sum(counts[name] for name in linear) + sum(counts[name] for name in also)
    return _BF16 * (elements + (t.config.vocab_size * t.config.d_model if head else 0))


def _forward_without_graph(t: _Tensors) -> dict[str, dict[str, int]]:
    layers, moments = t.config.num_layers, {}
    converted = t.hidden if t.autocast else 0  # a norm's output in bf16
    if not t.flash:
        copies = {"autocast_copies": _copies(t, layers - 1, "qkv")}
        # the block's input, the norm's output, q, k, v
        held = 2 * t.residual + converted + 3 * t.hidden + t.repeated
        moments["masking, last block"] = {"temporaries": held + 2 * t.scores + t.mask, **copies}
        # masked scores, perhaps their fp32 copy, the result
        softmax = t.scores + t.widened_scores + t.softmax
        moments["softmax, last block"] = {"temporaries": held + softmax, **copies}
        # masked scores (still named), probabilities, v's copy, o
        output = t.scores + t.probabilities + (t.hidden if t.copied and not t.repeated else 0) + t.hidden
        moments["attention output, last block"] = {"temporaries": held + output, **copies}
    moments["swiglu, last block"] = {
        # the residual stream before and after attention, the norm's output; silu(w1 x), w3 x and their product
        "temporaries": 3 * t.residual + converted + 3 * t.inner,
        "autocast_copies": _copies(t, layers - 1, "qkv", "output_proj", "w1_w3"),
    }
    moments["logits"] = {
        "temporaries": 2 * t.residual + converted + t.logits,  # the last block's output, the norm's
        "autocast_copies": _copies(t, layers, head=True),
    }
    return moments


def _forward_with_graph(t: _Tensors) -> dict[str, dict[str, int]]:
    layers, layer, saved = t.config.num_layers, t.saved_in_layer(), t.saved()
    before = saved["embedding"] + (layers - 1) * sum(layer.values())  # of all blocks but the last
    into_attention = before + t.norm + t.hidden
    moments = {}
    if not t.flash:
        copies = {"autocast_copies": _copies(t, layers - 1, "qkv")}
        moments["softmax, last block"] = {
            "saved_activations": into_attention + 2 * t.hidden + t.mask + t.softmax,
            # masked scores and perhaps their fp32 copy; v, and q and k where their copies are what is saved
            "temporaries": t.narrowed + t.scores + t.widened_scores + t.hidden + t.before_copies(2),
            **copies,
        }
        moments["attention output, last block"] = {
            "saved_activations": into_attention + layer["qkv"] + layer["attention"],
            # masked scores (still named); q, k, v where their copies are what is saved; o before its heads are joined
            "temporaries": t.narrowed + t.scores + t.before_copies(3) + t.hidden,
            **copies,
        }
    moments["logits"] = {
        "saved_activations": sum(saved.values()) - saved["loss"],
        "temporaries": t.narrowed + t.logits,
        "autocast_copies": _copies(t, layers, head=True),
    }
    return moments


def _backward(t: _Tensors) -> dict[str, dict[str, int]]:
    """The loss, and all that follows."""
    layers, saved, counts = t.config.num_layers, t.saved(), parameter_counts(t.config)
    through_head = saved["embedding"] + saved["layers"] + saved["final_norm"]
    moments = {
        "loss, backward": {
            "saved_activations": sum(saved.values()),
            # gradients of the log-probabilities and, unless these are a copy that has been used by then, of the logits
            "temporaries": (1 if t.narrow_log_probabilities else 2) * t.log_probabilities,
            "autocast_copies": _copies(t, layers, head=True),
        },
        "final norm, backward": {
            "gradients": _FP32 * (counts["head"] + t.config.d_model),
            "saved_activations": through_head - t.residual,  # the normalized input has been used
            # gradients through the product with 1 / rms and through the mean; on the way there x, 2x, their product
            "temporaries": 5 * t.residual,
            "autocast_copies": _copies(t, layers),
        },
    }
    for name, below in {"last block": layers - 1, "first block": 0}.items():
        moments |= _backward_of_block(t, name, below)
    moments["embedding, backward"] = {
        "gradients": _FP32 * num_parameters(t.config),
        "saved_activations": saved["embedding"],
        "temporaries": t.residual,
    }
    return moments


def _backward_of_block(t: _Tensors, name: str, below: int) -> dict[str, dict[str, int]]:
    """The moments in the block that has `below` blocks before it."""
    layer, own = t.saved_in_layer(), _layer_parameters(t)
    earlier = t.saved()["embedding"] + below * sum(layer.values())
    later = t.config.num_layers - 1 - below
    done = t.config.vocab_size * t.config.d_model + t.config.d_model + later * sum(own.values())
    moments = {
        f"swiglu, backward, {name}": {
            "gradients": _FP32 * (done + own["w2"]),
            # the product of w1's and w3's branches has been used
            "saved_activations": earlier + sum(layer.values()) - t.inner,
            # gradients of the product and of both branches; of the residual stream
            "temporaries": 3 * t.inner + t.residual,
            "autocast_copies": _copies(t, below, "w1_w3", "output_proj", "qkv"),
        }
    }
    done += own["w2"] + own["w1_w3"] + own["ln2"] + own["output_proj"]
    saved = earlier + t.norm + t.hidden
    if t.flash:
        saved += layer["qkv"] + layer["attention"] + layer["attention_output"]
        temporaries = t.residual + 2 * t.hidden + 2 * t.kv  # gradients of the residual stream, o, q, k, v
    else:
        saved += 2 * t.hidden + t.softmax + t.mask  # q, k
        # gradients of the residual stream, v, the probabilities, the scores; and on CUDA the product of probabilities
        # and their gradient, which torch's kernel for the gradient of softmax reads (ATen/native/cuda/SoftMax.cu)
        temporaries = t.residual + t.hidden + (3 if t.device == "cuda" else 2) * t.softmax
    moments[f"attention, backward, {name}"] = {
        "gradients": _FP32 * done,
        "saved_activations": saved,
        "temporaries": temporaries,
        "autocast_copies": _copies(t, below, "qkv"),
    }
    return moments
