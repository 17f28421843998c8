"""Text from a model: one token after the other, with a cache of keys and values.

    for token in generate(model, prompt_ids, Sampling(temperature=0.8), num_tokens=100, stop=end_of_text):
        ...

The cache makes a token cost one position's matmuls instead of all positions'. Where a text outgrows the context, the
last half of it is kept as the new context and computed again, with the cache and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336_systems.attention import attention
from cs336_systems.model import TransformerBlock, TransformerLM, rotate


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: of the `top_k` likeliest (0: all) and of the likeliest that make up `top_p`, by the
    probabilities at a temperature; at temperature 0 always the likeliest. ValueError for numbers that make no sense."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("temperature", self.temperature >= 0, "0 or more"), ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):  # fmt: skip
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be {allowed}")

    def choose(self, logits: Tensor, random: torch.Generator) -> int:
        """A token by its logits (V,); `random` is a generator on the CPU, so that a seed means the same everywhere."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        if self.top_k:
            least = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = (logits / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, order = p.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # what the likelier ones make up
            p[order[before >= self.top_p]] = 0
        return int(torch.multinomial(p, 1, generator=random))


class Cache:
    """The keys and values that a `TransformerLM` has computed so far, for one text."""

    def __init__(self, model: TransformerLM) -> None:
        self.model, self.length = model, 0
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * len(model.layers)

    def logits(self, ids: Tensor) -> Tensor:
        """The next token's logits (V,) after the tokens `ids` (n,), which follow those seen before: all of a text at
        first, then one at a time. ValueError where they outgrow the context."""
        model, context = self.model, self.model.config.context_length
        if self.length + len(ids) > context:
            raise ValueError(f"{self.length + len(ids)} tokens; context_length={context} is the most")
        if self.length and len(ids) != 1:
            raise ValueError(f"{len(ids)} tokens at once; after the first call it is one")
        cos, sin = (table[self.length :] for table in model.positional_encoder(self.length + len(ids)))
        x = model.token_embeddings(ids[None])
        for number, layer in enumerate(model.layers):
            x = x + self._attend(number, layer, layer.ln1(x), cos, sin)
            x = x + layer.ffn(layer.ln2(x))
        self.length += len(ids)
        return model.lm_head(model.ln_final(x[:, -1]))[0]

    def _attend(self, number: int, layer: TransformerBlock, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attn = layer.attn
        q, k, v = (
            projection(x).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (1, H, n, d)
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if (before := self._kept[number]) is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        self._kept[number] = k, v
        o = attention(q, k, v, is_causal=before is None, impl="sdpa")  # a single query sees all keys
        return attn.output_proj(o.transpose(1, 2).flatten(-2))


@torch.no_grad()
def generate(
    model: TransformerLM, prompt: Sequence[int], sampling: Sampling, num_tokens: int, stop: int | None = None,
    cached: bool = True,
) -> Iterator[int]:  # fmt: skip
    """At most `num_tokens` tokens after a prompt, one at a time; `stop` ends the text and is not given out.

    `cached` False computes every position anew for each token. ValueError for an empty prompt.
    """
    if not len(prompt):
        raise ValueError("the prompt has no tokens; it needs one at least")
    context, device = model.config.context_length, next(model.parameters()).device
    random = torch.Generator("cpu").manual_seed(sampling.seed)
    window, cache, new = list(prompt)[-context:], Cache(model), 0
    for _ in range(num_tokens):
        if new == 0 or not cached:  # the whole window
            cache, new = Cache(model), len(window)
        logits = cache.logits(torch.tensor(window[-new:], device=device))
        token = sampling.choose(logits, random)
        if token == stop:
            return
        yield token
        window.append(token)
        new = 1
        if len(window) > context:
            window, new = window[-max(1, context // 2) :], 0
