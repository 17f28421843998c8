"""Chapter `benchmarking`: forward, backward and optimizer step of the handout's models, and what warming up does.

    papermill book/benchmarking.ipynb out.ipynb -p size small,medium
    cs336 bench model --size small medium --context-length 128 512 --mode forward train_step

Every size at contexts 128 to 1,024 in fp32, torch's default; at 512 with TF32 matmuls and with backward passes that no
update follows as well. Five warm-up steps and ten measured ones, as the handout asks. At context 512 all sizes
again with 0, 1 and 2 warm-up steps, each in a fresh process. AdamW; batch 4; attention in plain PyTorch.
"""

from __future__ import annotations

from cs336_systems.accounting import MODES
from cs336_systems.chapters.shared import depends, steps
from cs336_systems.chapters.shared.steps import GROUP, METRICS, Case, forecast, run_group
from cs336_systems.sizes import HANDOUT_SIZES
from cs336_systems.store.table import Table

DEPENDS = depends.STEPS
CHOICES = steps.CHOICES | {
    "context_length": range(1, 2**20 + 1), "batch": range(1, 2**16 + 1), "warmup": range(10**4 + 1),
    "steps": range(1, 10**4 + 1), "model": steps.model_class, "repeat": range(2),
}  # fmt: skip
CONTEXTS = (128, 256, 512, 1024)
COLD_SIZES = HANDOUT_SIZES
LATER = "10B"  # of spring 2026: a training step needs 205 GB
PRIMARY = 512  # the context length where the handout names none


def grid(preset: str) -> list[Case]:
    """The handout's sizes and contexts, or a small model on a CPU."""
    if preset == "smoke":
        return [
            *_shape("tiny", 64, ("fp32",)),
            *_shape("tiny", 128, ("fp32",), again=True),
            *_cold("tiny", 128, (0,)),
        ]
    cases = []
    for size in HANDOUT_SIZES:
        for context_length in CONTEXTS:
            if context_length == PRIMARY:
                cases += _shape(size, context_length, ("fp32", "tf32"), again=True)
            else:
                cases += _shape(size, context_length, ("fp32",), modes=("forward", "train_step"))
    # the one training step that 80 GB cannot hold, as far as they can
    cases.append(Case("2.7B", 1024, "forward_backward"))
    for size in COLD_SIZES:
        cases += _cold(size, PRIMARY, (0, 1, 2))
    cases += [Case(LATER, PRIMARY, mode) for mode in MODES]
    return cases


def _shape(
    size: str,
    context_length: int,
    dtypes: tuple[str, ...],
    modes: tuple[str, ...] = MODES,
    again: bool = False,
) -> list[Case]:
    """All modes and dtypes of a shape; `again`: one of them twice (A/A)."""
    cases = [Case(size, context_length, mode, dtype) for dtype in dtypes for mode in modes]
    return [*cases, Case(size, context_length, "forward_backward", dtypes[-1], repeat=1)] if again else cases


def _cold(size: str, context_length: int, warmups: tuple[int, ...]) -> list[Case]:
    return [Case(size, context_length, "forward_backward", warmup=warmup) for warmup in warmups]


TABLE = Table(
    __name__, Case, METRICS, GROUP, grid, run_group, DEPENDS, choices=CHOICES,
    forecast=forecast,
)  # fmt: skip
