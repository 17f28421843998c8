"""Chapter `training`: what all of it is worth, end to end: attention, wrappers and the sharded optimizer in real steps.

    papermill book/training.ipynb out.ipynb -p attention flash_triton,sdpa
    cs336 bench matrix --attention sdpa flash_triton --wrapper none in_place torch --size small

This table is the matrix: implementations of attention × wrappers of data parallelism × with and without the sharded
optimizer, in short runs on stories (`shared.trials`). The number of sequences a rank is fixed, so ranks are compared by
weak scaling; wrapper "none" is one rank alone. All cells of a number of ranks are measured in one launch, in turns. The
chapter's other tables:

    training_ladder   the same model and text, optimization by optimization
    training_run      real runs of some minutes: losses against the text's entropy, and what the model writes
    training_fits     fp16 with loss scaling under a cap on memory, as on small GPUs: what fits, and the forecast of it
    training_sweep    attention alone on rectangular shapes, and long ones under a cap
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.training import trials
from cs336_systems.chapters.training.trials import ATTENTIONS, COMPILED_PLAIN
from cs336_systems.store.table import Table
from cs336_systems.training.config import COMPILE, DTYPES, MODEL_SIZES, WRAPPERS

DEPENDS = (
    *depends.TRAINING, *depends.FORECAST, *depends.ATTENTION,
    *depends.RANK_CLOCK, "chapters/training/trials.py",
)  # fmt: skip
GROUP = ("size", "context_length", "batch", "dtype", "compile", "world_size", "steps")
ROUNDS = 3  # turns of each cell
ALONE = "none"


def _sharded(text: str) -> bool:
    words = {"yes": True, "no": False, "true": True, "false": False}
    if text.lower() not in words:
        raise ValueError(f"unknown sharded {text!r}; allowed: all, yes, no")
    return words[text.lower()]


CHOICES = {
    "attention": ATTENTIONS, "wrapper": WRAPPERS, "sharded": _sharded, "size": tuple(MODEL_SIZES),
    "context_length": range(2, 2**20), "batch": range(1, 2**16), "dtype": DTYPES[1:], "compile": COMPILE,
    "world_size": range(1, 1025), "steps": range(2, 10**6),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One cell: `steps` timed steps, `batch` sequences a rank. `repeat` 1 measures the same thing again.

    attention: one of `trials.ATTENTIONS`. wrapper: "none" (one rank alone), or one of `training.config.WRAPPERS`.
    sharded: the optimizer's state. compile: of the rest of the model (`training.config.COMPILE`).
    """

    attention: str
    wrapper: str
    sharded: bool
    size: str = "small"
    context_length: int = 512
    batch: int = 16
    dtype: str = "bf16"
    compile: str = "off"
    world_size: int = 1
    steps: int = 24
    repeat: int = 0

    @property
    def sequences(self) -> int:
        """Of a step, all ranks together."""
        return self.batch * (1 if self.wrapper == ALONE else self.world_size)


def cells(
    attentions: Sequence[str], wrappers: Sequence[str], sharded: Sequence[bool], **fields: Any
) -> list[Case]:
    """The matrix, without the optimizer's state of one rank alone spread over ranks; its last cell twice (A/A)."""
    found = [
        (attention, wrapper, spread)
        for attention in attentions
        for wrapper in wrappers
        for spread in sharded
        if not (wrapper == ALONE and spread)
    ]
    return [Case(*cell, **fields) for cell in found] + [
        Case(*cell, **fields, repeat=1) for cell in found[-1:]
    ]


def grid(preset: str) -> list[Case]:
    """Attention on one GPU, the whole matrix on two; or a tiny model on two ranks of a CPU."""
    both, compared = (False, True), ("reference", COMPILED_PLAIN, "sdpa", "flash_triton")
    if preset == "smoke":
        fields = {
            "size": "tiny",
            "context_length": 32,
            "batch": 4,
            "dtype": "fp32",
            "world_size": 2,
            "steps": 6,
        }
        plain = Case("reference", ALONE, False, **fields)
        return [plain, *cells(("sdpa",), (ALONE, "naive", "in_place", "torch"), both, **fields)]
    others = tuple(name for name in ATTENTIONS if name not in compared)
    return [*cells((*others, *compared), (ALONE,), (False,)), *cells(compared, WRAPPERS, both, world_size=2)]


TABLE = Table(
    __name__, Case, trials.METRICS, GROUP, grid, partial(trials.measure, rounds=ROUNDS), DEPENDS, choices=CHOICES,
)  # fmt: skip
