"""The Transformer language model that the chapters measure and train.

Pre-norm blocks, rotary positions, SwiGLU, untied embeddings, no biases. The names of the parameters are those of the
course's staff model, so its checkpoints load: `model.load_state_dict(staff_state_dict(torch.load(path)))`.

Shapes: B batch, S sequence, D d_model, H heads, d = D / H, F d_ff, V vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.functional import silu

from cs336_systems.attention import IMPLEMENTATIONS, attention
from cs336_systems.attention.inputs import autocast_inputs, is_readable
from cs336_systems.attention.registry import check_machine
from cs336_systems.sizes import ModelConfig

OWN_CLASS = "cs336_systems.model:TransformerLM"
_CONSTRUCTOR = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff", "rope_theta")


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _truncated_normal(weight: torch.Tensor, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


# ---------------------------------------------------------------------------------------------------- layers
class Linear(nn.Linear):
    """y = x Wᵀ without bias; W (out_features, in_features), of initial variance 2 / (in + out), truncated at 3σ."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        _truncated_normal(self.weight, std=math.sqrt(2 / (self.in_features + self.out_features)))


class Embedding(nn.Embedding):
    """A table (num_embeddings, embedding_dim), of initial variance 1, truncated at 3σ."""

    def reset_parameters(self) -> None:
        _truncated_normal(self.weight, std=1.0)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich, arXiv 1910.07467).

    Computed in fp32 (in fp64 for fp64), returned in x's dtype: squares of half-precision values overflow or underflow.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(_at_least_fp32(x.dtype))
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


class RotaryTables(nn.Module):
    """Cosines and sines of the rotary positions (Su et al., arXiv 2104.09864), one pair of tables for all blocks.

    `forward(sequence)` returns `cos` and `sin`, each (sequence, d), for positions 0 … sequence − 1. Components 2i and
    2i + 1 of a head are rotated by the angle position · theta^(−2i/d); so both tables hold each value twice, and
    `sin` is negated in the even columns, which is what `rotate` needs.

    The tables are buffers outside the state dict, and in fp32 at least, whatever the model's dtype: in bf16,
    neighboring positions would round to the same values in the low-frequency columns. They are recomputed whenever
    the module is converted, moved or given memory (`to_empty`).
    """

    def __init__(self, d_head: int, context_length: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.context_length, self.theta = d_head, context_length, theta
        device = torch.empty(0).device  # that of a surrounding `with torch.device(...)`, as for parameters
        for name, table in zip(("cos", "sin"), self._tables(torch.float32, device), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _tables(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device.type == "meta":
            empty = torch.empty(self.context_length, self.d_head, dtype=dtype, device=device)
            return empty, torch.empty_like(empty)
        # Angles grow with the position and lose precision, hence fp64; on the CPU, because some accelerators have none.
        exact = {"dtype": torch.float64, "device": "cpu"}
        frequencies = self.theta ** (-torch.arange(0, self.d_head, 2, **exact) / self.d_head)  # (d / 2,)
        angles = torch.outer(torch.arange(self.context_length, **exact), frequencies)  # (context, d / 2)
        sin = angles.sin()
        cos, sin = angles.cos().repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        return cos.to(device, dtype), sin.to(device, dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryTables:
        super()._apply(fn, recurse)
        self.cos, self.sin = self._tables(_at_least_fp32(self.cos.dtype), self.cos.device)
        return self

    def forward(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[:sequence], self.sin[:sequence]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (x[2i], x[2i+1]) by its position's angle.

    x: (..., S, d); cos, sin: (S, d) from `RotaryTables` → (..., S, d) in x's dtype, computed in the tables'.
    """
    # Three kernels, plus two casts in half precision: pairs are swapped whole instead of being split.
    exchanged = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, exchanged, sin).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions; `impl` names the implementation of attention. Of
    `num_kv_heads` heads of keys and values each is for a group of the `num_heads`."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int, impl: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.impl = num_heads, num_kv_heads, impl
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model // num_heads * num_kv_heads)
        self.v_proj = Linear(d_model, d_model // num_heads * num_kv_heads)
        self.output_proj = Linear(d_model, d_model)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: (B, S, D); cos, sin: (S, d) → (B, S, D). cu_seqlens: see `TransformerLM.forward`."""
        (x,) = autocast_inputs(x)  # one cast for three matmuls, instead of one each
        q, k, v = self.projected(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cu_seqlens is not None:  # (1, H, B·S, d), not copied
            q, k, v = (y.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for y in (q, k, v))
        o = attention(
            q, k, v, is_causal=True, impl=self.impl, enable_gqa=self.num_kv_heads < self.num_heads,
            cu_seqlens=cu_seqlens, max_seqlen=None if cu_seqlens is None else x.shape[1],
        )  # fmt: skip
        return self.output_proj(o.transpose(1, 2).reshape(x.shape))

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (B, H, S, d), k and v (B, H_kv, S, d), not copied."""
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            p(x).unflatten(-1, (n, -1)).transpose(1, 2) for p, n in zip(projections, heads, strict=True)
        )
        return q, k, v


class SwiGLU(nn.Module):
    """w2(silu(w1 x) · w3 x) (Shazeer, arXiv 2002.05202): (..., D) → (..., D) through width F."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (x,) = autocast_inputs(x)  # one cast for two matmuls
        return self.w2(silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)): (B, S, D) → (B, S, D)."""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int, d_ff: int, impl: str) -> None:
        super().__init__()
        self.ln1 = RMSNorm(d_model)
        self.attn = CausalSelfAttention(d_model, num_heads, num_kv_heads, impl)
        self.ln2 = RMSNorm(d_model)
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attn(self.ln1(x), cos, sin, cu_seqlens)
        return x + self.ffn(self.ln2(x))


# ----------------------------------------------------------------------------------------------------- model
class TransformerLM(nn.Module):
    """A decoder-only Transformer: token ids (B, S), int64 → logits (B, S, V) of the next token at each position.

    The sizes are those of `sizes.ModelConfig`, which also checks them; `config` keeps them. `attention` names the
    implementation (a key of `attention.IMPLEMENTATIONS`, or "auto": the fastest for the device). Logits have the
    parameters' dtype, or autocast's.
    Errors: ValueError for sizes that do not fit together, an unknown `attention`, ids that are not (B, S), or a
    sequence longer than context_length.
    """

    def __init__(
        self, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int,
        rope_theta: float = 10_000.0, *, num_kv_heads: int | None = None, attention: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        _check_attention(attention)
        self.config = ModelConfig(
            d_model, d_ff, num_layers, num_heads, vocab_size=vocab_size, context_length=context_length,
            rope_theta=rope_theta, num_kv_heads=num_kv_heads,
        )  # fmt: skip
        self.token_embeddings = Embedding(vocab_size, d_model)
        self.positional_encoder = RotaryTables(self.config.d_head, context_length, rope_theta)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, self.config.kv_heads, d_ff, attention)
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model)
        self.lm_head = Linear(d_model, vocab_size)

    def forward(self, ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """ids: (B, S), each in 0 … V − 1, S ≤ context_length → logits (B, S, V).

        cu_seqlens: where documents begin among the B·S tokens, counted through, and last B·S, as `attention` has it;
        then no token sees another document's. Each sequence has to begin one (checked on a CPU). Positions go on
        through a sequence: rotary ones matter by their differences alone.
        """
        if ids.ndim != 2:
            raise ValueError(f"token ids have shape {tuple(ids.shape)}; expected (batch, sequence)")
        sequence = ids.shape[1]
        if sequence > self.config.context_length:
            raise ValueError(
                f"the sequence has {sequence} tokens; context_length={self.config.context_length} is the most"
            )
        if cu_seqlens is not None and is_readable(cu_seqlens):
            begins = torch.arange(0, ids.numel(), max(sequence, 1), dtype=cu_seqlens.dtype, device="cpu")
            lacking = begins[~torch.isin(begins, cu_seqlens)]
            if len(lacking):
                raise ValueError(
                    f"cu_seqlens has no {lacking[0]}, where a sequence begins; each begins a document"
                )
        cos, sin = self.positional_encoder(sequence)
        x = self.token_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, cu_seqlens)
        return self.lm_head(self.ln_final(x))


def _check_attention(name: str) -> None:
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown attention implementation {name!r}; allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )


def choose_attention(model: nn.Module, name: str) -> None:
    """Makes all blocks of a `TransformerLM` use this implementation of attention from now on.

    ValueError for an unknown name, or for a model without a `CausalSelfAttention`.
    """
    _check_attention(name)
    if name in ("auto", "flash_triton"):
        check_machine()  # here, where no step is timed or traced yet
    blocks = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no CausalSelfAttention whose implementation could be chosen"
        )
    for block in blocks:
        block.impl = name


def staff_state_dict(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, under the names that `TransformerLM.load_state_dict` expects.

    Strips `_orig_mod.` and `module.`, which torch.compile and DistributedDataParallel put into the names of a model
    and of its parts, and drops the rotary tables, which are computed, not learned.
    """
    parts = {name: [part for part in name.split(".") if part not in _WRAPPERS] for name in state}
    return {".".join(own): state[name] for name, own in parts.items() if "positional_encoder" not in own}


_WRAPPERS = ("_orig_mod", "module")


# -------------------------------------------------------------------------------------------------- choosing
def load_class(spec: str) -> type[nn.Module]:
    """The class that `"module:Class"` names, to be used in place of `TransformerLM`.

    Errors: ValueError that says which part of `spec` is wrong, or which parameters of `TransformerLM`'s constructor
    the class does not take. Errors raised while the module is imported propagate.
    """
    module_name, _, class_name = spec.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"model {spec!r} is not of the form module:Class, as in {OWN_CLASS}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its own imports does not
        raise ValueError(f"model {spec!r}: there is no module {error.name!r}") from error
    cls = getattr(module, class_name, None)
    if not _is_module_class(cls):
        known = sorted(name for name, value in vars(module).items() if _is_module_class(value))
        raise ValueError(
            f"model {spec!r}: {class_name!r} is no torch.nn.Module class of {module_name}; "
            f"there are: {', '.join(known) or 'none'}"
        )
    missing = [name for name in _CONSTRUCTOR if not _accepts(cls, name)]
    if missing:
        raise ValueError(
            f"model {spec!r}: the constructor does not take {', '.join(missing)}; "
            f"it must take {', '.join(_CONSTRUCTOR)}"
        )
    return cls


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _accepts(cls: type, name: str) -> bool:
    """Whether the constructor takes this keyword."""
    parameters = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True
    return name in parameters and parameters[name].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
    )


def build(
    config: ModelConfig, attention: str = "auto", model: str = OWN_CLASS,
    device: torch.device | str | None = None, dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    """A model of this configuration with fresh weights, allocated directly on `device`.

    `model`: `"module:Class"` with the constructor of `TransformerLM`; `attention`, and a `num_kv_heads` that is set,
    are passed on where the class has such parameters. `device`: None for torch's default; `dtype` of the parameters:
    None for torch's default; the weights are drawn in the default dtype and then rounded. Errors: those of `load_class`
    and of the class; ValueError if an implementation of attention, or num_kv_heads, is asked for and the class has no
    such parameter.
    """
    cls = load_class(model)
    sizes = {name: getattr(config, name) for name in _CONSTRUCTOR}
    if config.num_kv_heads is not None:
        if not _accepts(cls, "num_kv_heads"):
            raise ValueError(
                f"model {model!r} has no parameter num_kv_heads; it cannot be {config.num_kv_heads}"
            )
        sizes["num_kv_heads"] = config.num_kv_heads
    if _accepts(cls, "attention"):
        sizes["attention"] = attention
    elif attention != "auto":
        raise ValueError(f"model {model!r} has no parameter attention; {attention!r} cannot be chosen for it")
    with torch.device(torch.get_default_device() if device is None else device):
        made = cls(**sizes)
    return made if dtype is None else made.to(dtype)
