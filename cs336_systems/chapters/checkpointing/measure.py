"""Chapter `checkpointing`: what activation checkpointing saves in memory, and what it costs in time.

    papermill book/checkpointing.ipynb out.ipynb -p strategy blocks

Forward and backward of a model whose blocks run by a strategy: "none", without checkpoints; "halves", "blocks" and
"nested", in checkpoints of half a block, of so many blocks, of halves within halves; "chained", each block from the
first input again; "selective", which keeps what is dear to compute again. *Activations* are what is held beyond weights
and gradients at the peak. Three grids: the handout's (xl of 2026, context 2,048, batch 4); blocks of one size in
growing number, for the asymptotics; and few blocks at two contexts, for what one of them saves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems import accounting
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import columns, prepared, time_together
from cs336_systems.measure.device import comparable, default_device, give_back
from cs336_systems.sizes import ModelConfig, size
from cs336_systems.store.status import Skip
from cs336_systems.store.table import Table

STRATEGIES = ("none", "halves", "blocks", "nested", "chained", "selective")
DEPENDS = (
    *depends.STEP, *depends.ATTENTION, *depends.STEP_CLOCK, *depends.MEMORY, "measure/memory/tensors.py",
    "chapters/checkpointing/strategies.py", "training/checkpointing.py",
)  # fmt: skip
GROUP = ("size", "num_layers", "context_length", "batch", "dtype", "attention")
METRICS = (
    *columns("step"),
    "peak_bytes",  # of a step that adds to gradients, torch.cuda.max_memory_allocated
    "activations_bytes",  # what tensors ask for at the peak, beyond weights and gradients
    "forwards",  # forward passes of a block in a step
    "kept",  # of one block, as "softmax:1x2048": none: what it saves for backward; selective: what its plan keeps
    "backward_bytes_each",  # none: by how much memory changes over each block's backward, the last block first
    "sm_mhz", "power_w",
)  # fmt: skip
XL = "2.7B"  # of 2025 is the xl of 2026
BLOCK_SIZES = (1, 2, 4, 8, 16)
DEPTHS = (4, 8, 16, 32, 64)
CHAINED = 32  # blocks, above which a chain takes seconds a step
WARMUP, STEPS = 1, 2


@dataclass(frozen=True)
class Case:
    """One strategy. num_layers: 0 is the size's own number; block_size: of "blocks", else 0. `repeat` 1 measures the
    same thing again."""

    strategy: str
    block_size: int = 0
    size: str = XL
    num_layers: int = 0
    context_length: int = 2048
    batch: int = 4
    dtype: str = "tf32"
    attention: str = "reference"
    repeat: int = 0

    @property
    def config(self) -> ModelConfig:
        """Of the model, with its number of blocks."""
        own = size(self.size)
        layers = self.num_layers or own.num_layers
        return dataclasses.replace(own, num_layers=layers, context_length=self.context_length)


def grid(preset: str) -> list[Case]:
    """Every size of checkpoints in the handout's model, strategies by depth, and single blocks; or a tiny model."""
    if preset == "smoke":
        fields: dict[str, Any] = {"size": "tiny", "num_layers": 4, "context_length": 64, "dtype": "fp32"}
        others = [(strategy, 0) for strategy in STRATEGIES if strategy != "blocks"]
        return _cases([("blocks", 1), ("blocks", 2), *others], **fields)
    sizes = [("blocks", k) for k in BLOCK_SIZES]
    cases = _cases([*sizes, ("none", 0), ("halves", 0), ("nested", 0)])
    cases += _cases([("blocks", 1), ("none", 0), ("selective", 0)], dtype="bf16", attention="flash_triton")
    for depth in DEPTHS:
        roots = [("blocks", k) for k in dict.fromkeys((1, round(math.sqrt(depth))))]
        nests = [("none", 0), ("nested", 0), *([("chained", 0)] if depth <= CHAINED else [])]
        cases += _cases([*roots, *nests], size="small", num_layers=depth, context_length=512)
    for context in (128, 2048):
        cases += _cases([("none", 0)], num_layers=8, context_length=context)
    return cases


def _cases(chosen: Sequence[tuple[str, int]], **fields: Any) -> list[Case]:
    """The first of them twice."""
    return [*(Case(strategy, k, **fields) for strategy, k in chosen), Case(*chosen[0], **fields, repeat=1)]


# ------------------------------------------------------------------------------------------------ predictions
def predicted_bytes(case: Case, device: str, kept: float = 0.0) -> float:
    """Activations at the peak. kept: what a selective plan keeps of one block.

    Checkpoints hold their inputs, and `kept` of each block, until backward has passed them. So the peak is either at
    the head and the loss, where of the blocks nothing else is there, or in the last checkpoint, which holds what a
    model of its blocks alone would.
    """
    layers = case.config.num_layers
    last = {"none": layers, "blocks": min(max(1, case.block_size), layers)}.get(case.strategy, 1)
    checkpoints = {
        "none": 0, "halves": 2 * layers, "nested": 1 + math.ceil(math.log2(layers)), "chained": min(2, layers),
        "selective": layers,
    }.get(case.strategy, math.ceil(layers / last))  # fmt: skip
    dtype = "bf16" if case.dtype == "bf16" else "fp32"
    how = dtype, "reference" if case.attention == "reference" else "flash", device
    shape = case.batch, case.context_length
    inputs = accounting.residual_bytes(case.config, *shape)
    saved = accounting.saved_layer_bytes(case.config, *shape, *how)
    whole, part = (
        accounting.memory_moments(
            dataclasses.replace(case.config, num_layers=n), *shape, "forward_backward", *how
        )
        for n in (layers, last)
    )
    if case.strategy == "none":
        return max(map(_activations, whole.values()))
    found = []
    for moment, alive in whole.items():
        if "block" not in moment:  # copies of weights live as long as their graph: not beyond forward here
            copies = 0 if "backward" in moment else alive["autocast_copies"]
            blocks = layers * sum(saved.values())
            found.append(
                alive["saved_activations"] - blocks + alive["temporaries"] + copies + checkpoints * inputs
            )
    first_half = sum(saved[name] for name in ("qkv", "attention", "attention_output"))
    first_half += (saved["norms"] + saved["projection_inputs"]) // 2
    for moment, alive in part.items():
        if "block" in moment:
            apart = first_half if case.strategy == "halves" and "swiglu" in moment else 0
            found.append(_activations(alive) - apart + (checkpoints - 1) * inputs)
    return max(found) + (layers * kept if case.strategy == "selective" else 0.0)


def _activations(alive: dict[str, int]) -> int:
    return sum(alive[item] for item in ("autocast_copies", "saved_activations", "temporaries"))


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measures the strategies of one model in turns."""
    device, case = default_device(), cases[0]
    if device == "cpu" and (case.size != "tiny" or case.dtype == "tf32"):
        raise Skip("needs a CUDA device")
    found = _together(cases, device)
    give_back(device)
    return found


def _together(cases: Sequence[Case], device: str) -> list[dict[str, Any]]:
    from cs336_systems.chapters.checkpointing.strategies import prepare
    from cs336_systems.chapters.shared.step import Workload

    case = cases[0]
    work = Workload(case.config, case.batch, case.context_length, device)
    with comparable("highest" if case.dtype == "fp32" else "high"):
        candidates = prepared(cases, lambda candidate: prepare(candidate, work), device)
        clock = Steps(device, warmup=WARMUP, steps=STEPS, watched=True)
        for candidate in time_together(candidates, clock, lambda: give_back(device)):
            candidate.metrics |= candidate.samples.row("step") | candidate.samples.clocks()
    return [candidate.metrics for candidate in candidates]


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
