"""Which tokens a rank sees at a step: a function of the step alone, so that a run resumes anywhere.

    batches = Batches(tokens, context_length=512, sequences=64, seed=0)
    ids, targets = batches.at(step, part=rank, parts=world_size)          # (16, 512) each, int64, for four ranks

The tokens are cut into windows of `context_length`, each with the token after it. An epoch visits every window once, in
an order drawn from the seed and the epoch's number; ranks and microbatches take disjoint parts of a step's windows.

Where documents are packed, a third array tells where they begin (`cu_seqlens` of `TransformerLM.forward`). One begins
with each window, and with each end of text: that token stands before a document as before a prompt, and so what it
predicts does not depend on the document that it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_MAPS = ("train", "valid")


@dataclass(frozen=True)
class Data:
    """Token ids to learn from and to be held against, memory maps usually.

    valid_bytes: bytes of the text held out; of random tokens, of the array; None where the tokens are not all of the
    text. floor: the entropy of the text held out, in nats a token, where it is known. tokenizer: its tokenizer.json;
    files: SHA-256 by name of what was learned from, text and tokenizer among it; end_of_text: the token after each
    document. Random tokens have neither tokenizer nor end.
    """

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    valid_bytes: int | None
    floor: float | None = None
    tokenizer: Path | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    end_of_text: int | None = None

    def told(self) -> dict[str, Any]:
        """As JSON has it, to tell other processes; of the memory maps their files, which `of` maps again."""
        maps = {name: [str(ids.filename), ids.dtype.str] for name, ids in vars(self).items() if name in _MAPS}
        return {**vars(self), **maps, "tokenizer": str(self.tokenizer or "")}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Data:
        """What has been `told`."""
        maps = {name: np.memmap(*told[name], mode="r") for name in _MAPS}
        return cls(**{**told, **maps, "tokenizer": Path(told["tokenizer"]) if told["tokenizer"] else None})


class Batches:
    """Windows over `tokens`, a 1-D array of token ids (a memory map, usually). `sequences`: of one optimizer step, all
    ranks and microbatches together. `name`: of the text, train or valid. `begin`: the token that begins a document,
    where these are packed. ValueError where the text has not one window."""

    def __init__(
        self, tokens: np.ndarray, context_length: int, sequences: int, seed: int, name: str = "train",
        begin: int | None = None,
    ) -> None:  # fmt: skip
        if len(tokens) <= context_length:
            what = {"train": "training", "valid": "held-out"}[name]
            raise ValueError(
                f"the {what} text has {len(tokens)} tokens; model.context_length={context_length} needs "
                f"{context_length + 1} or more: a larger text.{name}_mb (or a longer text), or a shorter context"
            )
        self.begin = begin
        self.windows = (len(tokens) - 1) // context_length
        self.steps_per_epoch = self.windows / sequences  # they visit every window once
        self.tokens, self.context_length, self.sequences = tokens, context_length, sequences
        # a step may see the end of one epoch and the next
        order = lambda epoch: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(self.windows)
        self._order = functools.lru_cache(maxsize=2)(order)

    def at(self, step: int, part: int = 0, parts: int = 1) -> tuple[np.ndarray, ...]:
        """Ids and targets of one of `parts` equal parts of a step: (sequences / parts, context_length), int64. Of
        packed documents cu_seqlens as well (ids.size + 1,), int32, filled up at its end, so that all steps have one
        shape."""
        share = self.sequences // parts
        first = step * self.sequences + part * share
        places = (divmod(place, self.windows) for place in range(first, first + share))
        return self.windows_at([int(self._order(epoch)[slot]) for epoch, slot in places])

    def windows_at(self, windows: list[int] | range) -> tuple[np.ndarray, ...]:
        """As `at`, of windows by number, as they lie in the text."""
        n = self.context_length
        cut = np.stack([self.tokens[w * n : (w + 1) * n + 1] for w in windows]).astype(np.int64)
        ids, targets = cut[:, :-1], cut[:, 1:]
        if self.begin is None:
            return ids, targets
        begins = ids == self.begin
        begins[:, 0] = True
        places = np.flatnonzero(begins)
        fill = np.full(ids.size + 1 - len(places), ids.size)
        return ids, targets, np.concatenate([places, fill]).astype(np.int32)
