"""Which tokens a rank sees at a step: a function of the step alone, so that a run resumes anywhere.

    batches = Batches(tokens, context_length=512, sequences=64, seed=0)
    ids, targets = batches.at(step, part=rank, parts=world_size)          # (16, 512) each, int64, for four ranks

The tokens are cut into windows of `context_length`, each with the token after it. An epoch visits every window once, in
an order drawn from the seed and the epoch's number; ranks and microbatches take disjoint parts of a step's windows.
"""

from __future__ import annotations

import functools

import numpy as np


def check_long_enough(count: int, context_length: int, name: str) -> None:
    """ValueError where a text of so many tokens, train or valid, has not one window."""
    if count <= context_length:
        what = {"train": "training", "valid": "held-out"}[name]
        raise ValueError(
            f"the {what} text has {count} tokens; model.context_length={context_length} needs {context_length + 1} or "
            f"more: a larger text.{name}_mb (or a longer text), or a shorter context"
        )


class Batches:
    """Windows over `tokens`, a 1-D array of token ids (a memory map, usually). `sequences`: of one optimizer step, all
    ranks and microbatches together. `name`: of the text, train or valid. ValueError as `check_long_enough`."""

    def __init__(
        self, tokens: np.ndarray, context_length: int, sequences: int, seed: int, name: str = "train"
    ) -> None:
        check_long_enough(len(tokens), context_length, name)
        self.windows = (len(tokens) - 1) // context_length
        self.tokens, self.context_length, self.sequences, self.seed = tokens, context_length, sequences, seed
        # a step may see the end of one epoch and the next
        self._order = functools.lru_cache(maxsize=2)(self._order_of_epoch)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that visit every window once."""
        return self.windows / self.sequences

    def at(self, step: int, part: int = 0, parts: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Ids and targets of one of `parts` equal parts of a step: (sequences / parts, context_length), int64."""
        share = self.sequences // parts
        first = step * self.sequences + part * share
        return self.windows_at([self._window(place) for place in range(first, first + share)])

    def windows_at(self, windows: list[int] | range) -> tuple[np.ndarray, np.ndarray]:
        """Ids and targets of windows by number, as they lie in the text."""
        n = self.context_length
        cut = np.stack([self.tokens[w * n : (w + 1) * n + 1] for w in windows]).astype(np.int64)
        return cut[:, :-1], cut[:, 1:]

    def _window(self, place: int) -> int:
        epoch, slot = divmod(place, self.windows)
        return int(self._order(epoch)[slot])

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.windows)
