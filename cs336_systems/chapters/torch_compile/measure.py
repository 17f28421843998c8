"""Chapter `torch_compile`: the whole model, eager against compiled, and the fastest training step of this book.

    papermill book/torch_compile.ipynb out.ipynb -p size small
    cs336 bench model --size small --mode train_step --dtype bf16 --compile-mode off default reduce-overhead

Two grids. *Sizes*: every size of the handout at context 512, batch 4, bf16 autocast and fp32, and those up to `large`
at the other contexts, bf16: forward alone and the training step, eager and compiled: model and loss together, AdamW
eager, fused. *Speed*: training steps of `small` and `medium` at context 1,024, batch 4 and larger ones, for each
implementation of attention; at batch 4 with CUDA graphs as well. Compiled code comes from an empty cache, so that
`compile_s` is what a first compilation costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cs336_systems.chapters.shared import depends, steps
from cs336_systems.chapters.shared.steps import GROUP, METRICS, Case
from cs336_systems.measure.device import default_device
from cs336_systems.sizes import HANDOUT_SIZES
from cs336_systems.store import machine
from cs336_systems.store.table import Table

DEPENDS = depends.STEPS
SIZES_CONTEXT, SPEED_CONTEXT = 512, 1024
OTHER_CONTEXTS, OTHER_SIZES = (128, 256, 1024), ("small", "medium", "large")
SPEED_BATCHES = {"small": (4, 64), "medium": (4, 16)}
_LARGE = (("reference", "off"), ("reference", "default"), ("sdpa", "default"), ("flash_triton", "default"))
_BATCH_4 = (
    ("reference", "off"), ("sdpa", "off"), ("flash_triton", "off"), ("reference", "default"), ("sdpa", "default"),
    ("flash_triton", "default"), ("reference", "reduce-overhead"), ("sdpa", "reduce-overhead"),
    ("flash_triton", "reduce-overhead"),
)  # fmt: skip


def grid(preset: str) -> list[Case]:
    """Both grids, or a small model on a CPU."""
    if preset == "smoke":
        return [
            Case("tiny", 64, "forward", attention="reference"),
            Case("tiny", 64, "forward", attention="reference", repeat=1),
            Case("tiny", 64, "forward", attention="reference", compile="default"),
            Case("tiny", 64, "forward", attention="sdpa"),
        ]
    cases = [
        case
        for dtype in ("bf16", "fp32")
        for size in HANDOUT_SIZES
        for case in _sizes(size, SIZES_CONTEXT, dtype)
    ]
    cases += [case for n in OTHER_CONTEXTS for size in OTHER_SIZES for case in _sizes(size, n, "bf16")]
    for size, batches in SPEED_BATCHES.items():
        for batch in batches:
            variants = _BATCH_4 if batch == 4 else _LARGE
            cases += [_speed(size, batch, attention, compile) for attention, compile in variants]
            # the A/A pair; 64 sequences need more than 80 GB with eager attention
            cases.append(_speed(size, batch, "reference", "default" if batch > 16 else "off", repeat=1))
    return list(dict.fromkeys(cases))  # both grids have plain attention at batch 4


def _sizes(size: str, context_length: int, dtype: str) -> list[Case]:
    """Forward and training step of a size, eager and compiled; the eager step twice (A/A)."""
    cases = [
        Case(size, context_length, mode, dtype, compile=compile)
        for mode in ("forward", "train_step")
        for compile in ("off", "default")
    ]
    return [*cases, Case(size, context_length, "train_step", dtype, repeat=1)]


def _speed(size: str, batch: int, attention: str, compile: str, repeat: int = 0) -> Case:
    return Case(size, SPEED_CONTEXT, "train_step", "bf16", attention, compile, batch, repeat=repeat)


def run_group(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """As `steps.run_group`, without the caches that torch.compile keeps on disk."""
    import torch.compiler.config

    with torch.compiler.config.patch(force_disable_caches=True):
        if any(case.compile != "off" for case in cases):
            _start_compiler()
        yield from steps.run_group(cases)


def _start_compiler() -> None:
    """Compiles something small, so that no case pays for loading the compiler and starting its processes."""
    import torch

    device = default_device()
    if device == "cpu" and machine.cpp_compiler() is None:
        return  # the cases that compile will be skipped
    x = torch.ones(64, 64, device=device, requires_grad=True)
    torch.compile(lambda x: torch.softmax(x @ x, -1).exp().sum())(x).backward()


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
