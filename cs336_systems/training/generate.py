"""Texts from a model: one token after the other, for several prompts at once, with a cache of keys and values.

    for tokens in generate(model, prompts, Generation(temperature=0.8, tokens=100), stop=end_of_text):
        ...                                             # a token for each prompt, None where the text has ended

The cache makes a token cost one position's matmuls instead of all positions'. Texts of different lengths are aligned
at their ends, and no query sees what fills them up in front. Where a text outgrows the context, the last half of it is
kept as the new context, and all are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cs336_systems.model import TransformerLM, rotate
from cs336_systems.training.config import Generation


def choose(how: Generation, logits: Tensor, random: torch.Generator) -> int:
    """A token by its logits (V,), on the CPU as `random` is, so that a seed means the same everywhere: of the `top_k`
    likeliest (0: all) and of the likeliest that make up `top_p`, by the probabilities at a temperature."""
    if how.temperature == 0:
        return int(logits.argmax())
    if how.top_k:
        kept = logits.topk(min(how.top_k, len(logits)))  # no more, of equals either, which bf16 has often
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    p = (logits / how.temperature).softmax(-1)
    if how.top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier ones make up
        p[order[1:][before[1:] >= how.top_p]] = 0  # the likeliest stays: a small `top_p` is 0 in fp32
    return int(torch.multinomial(p, 1, generator=random))


class Cache:
    """The keys and values that a `TransformerLM` has computed so far, for B texts. `before` (B,): how many positions of
    each are no text, but fill it up in front to the length of the longest."""

    def __init__(self, model: TransformerLM, before: Tensor) -> None:
        self.model, self.length, self.before = model, 0, before
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * len(model.layers)

    def logits(self, ids: Tensor) -> Tensor:
        """The next tokens' logits (B, V) after the tokens `ids` (B, n), which follow those seen before: all of the
        texts at first, then one at a time, up to the context."""
        model, n = self.model, ids.shape[1]
        assert n == 1 or not self.length
        places = torch.arange(self.length, self.length + n, device=ids.device)
        self.length += n
        own = (places - self.before[:, None]).clamp(min=0)  # (B, n): each text's own positions
        cos, sin = (table[own][:, None] for table in model.positional_encoder(model.config.context_length))
        x, mask = model.token_embeddings(ids), None
        if self.before.any():
            keys, queries = torch.arange(self.length, device=ids.device), places[:, None]
            seen = (keys >= self.before[:, None, None]) & (keys <= queries)  # (B, n, keys)
            # what fills up sees itself: of nothing there is no mean
            mask = (seen | (keys == queries))[:, None]
        causal = mask is None and n > 1  # a single query sees all keys
        for number, layer in enumerate(model.layers):
            q, k, v = layer.attn.projected(layer.ln1(x))  # (B, H, n, d); k and v of fewer heads where grouped
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            if (before := self._kept[number]) is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
            self._kept[number] = k, v
            grouped = k.shape[1] < q.shape[1]
            o = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
            x = x + layer.attn.output_proj(o.transpose(1, 2).flatten(-2))
            x = x + layer.ffn(layer.ln2(x))
        return model.lm_head(model.ln_final(x[:, -1]))


@torch.no_grad()
def generate(
    model: TransformerLM, prompts: Sequence[Sequence[int]], how: Generation, stop: int | None = None
) -> Iterator[list[int | None]]:  # fmt: skip
    """At most `how.tokens` tokens after each prompt, one for all at a time, until all texts have ended.

    `stop` ends a text and is not given out: there, and from then on, it gets None. Prompt n has the choices of
    `how.seed` + n: to rounding, what follows it does not depend on the others. ValueError for an empty prompt.
    """
    if not all(map(len, prompts)):
        raise ValueError("a prompt has no tokens; it needs one at least")
    context, device = model.config.context_length, next(model.parameters()).device
    randoms = [torch.Generator("cpu").manual_seed(how.seed + number) for number in range(len(prompts))]
    windows = [list(prompt)[-context:] for prompt in prompts]
    ended, cache = [False] * len(windows), None
    for _ in range(how.tokens if windows else 0):
        if cache is None:
            longest = max(map(len, windows))
            lacking = [longest - len(window) for window in windows]
            cache = Cache(model, torch.tensor(lacking, device=device))
            new = [[0] * lack + window for lack, window in zip(lacking, windows, strict=True)]
        else:
            new = [window[-1:] for window in windows]
        logits = cache.logits(torch.tensor(new, device=device)).float().cpu()
        chosen = [choose(how, row, random) for row, random in zip(logits, randoms, strict=True)]
        ended = [over or token == stop for over, token in zip(ended, chosen, strict=True)]
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, chosen, strict=True)]
        for n, window in enumerate(windows):
            window.append(chosen[n])
            if len(window) > context:
                windows[n], cache = window[-max(1, context // 2) :], None
