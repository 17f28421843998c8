"""A table of chapter `training`: the same model and text, optimization by optimization, and the losses of each rung.

A rung keeps what the ones before it have. All make the same steps on the same tokens, so their losses should lie on one
another: speed that cost accuracy would show. Plain attention materializes its scores; "flash" is what "auto" means on
the device. Compiled are model and loss together; behind data parallelism first each block, so that gradients are
averaged while the blocks below are still computing, then all together, for fewer launches. On two GPUs each takes half
of a step's sequences (strong scaling), and the rung below is measured on one of them, in the same run. What half of the
sequences take on one GPU, launch by launch and as graphs, tells how much of that its kernels need.
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.training import trials
from cs336_systems.store.table import Table

DEPENDS = (
    *depends.TRAINING, *depends.FORECAST, *depends.PLAIN, *depends.TRITON, *depends.RANK_CLOCK,
    "chapters/training/trials.py",
)  # fmt: skip
GROUP = ("size", "context_length", "sequences", "world_size", "steps")
RUNGS = {  # rung → attention, dtype, compile, wrapper, sharded
    "fp32": ("reference", "fp32", "off", "none", False),
    "tf32": ("reference", "tf32", "off", "none", False),
    "bf16": ("reference", "bf16", "off", "none", False),
    "compiled": ("reference", "bf16", "whole", "none", False),
    "flash": ("auto", "bf16", "whole", "none", False),
    "graphs": ("auto", "bf16", "graphs", "none", False),
    "ddp": ("auto", "bf16", "blocks", "in_place", False),
    "ddp_whole": ("auto", "bf16", "whole", "in_place", False),
    "ddp_graphs": ("auto", "bf16", "graphs", "in_place", False),
    "sharded": ("auto", "bf16", "graphs", "in_place", True),
}
ON_ONE, ON_TWO = tuple(RUNGS)[:6], ("flash", "ddp", "ddp_whole", "ddp_graphs", "sharded")
STEPS = 60


@dataclass(frozen=True)
class Case:
    """A rung of RUNGS, `steps` timed steps of `sequences` sequences, all ranks together. `repeat` 1 measures the same
    thing again."""

    rung: str
    size: str = "small"
    context_length: int = 1024
    sequences: int = 16
    world_size: int = 1
    steps: int = STEPS
    repeat: int = 0

    attention = property(lambda self: RUNGS[self.rung][0])
    dtype = property(lambda self: RUNGS[self.rung][1])
    compile = property(lambda self: RUNGS[self.rung][2])
    wrapper = property(lambda self: RUNGS[self.rung][3])
    sharded = property(lambda self: RUNGS[self.rung][4])


def grid(preset: str) -> list[Case]:
    """All rungs, those of several ranks on two GPUs, and two at half of the batch; or two that a CPU can climb in
    seconds. The rung that the next ones are held against is there twice (A/A)."""
    if preset == "smoke":
        fields = {"size": "tiny", "context_length": 32, "sequences": 8, "steps": 10}
        return [Case("fp32", **fields), Case("bf16", **fields), Case("fp32", **fields, repeat=1)]
    return [
        *(Case(rung) for rung in ON_ONE), Case("flash", repeat=1),
        *(Case(rung, world_size=2) for rung in ON_TWO), Case("flash", world_size=2, repeat=1),
        Case("flash", sequences=8), Case("graphs", sequences=8), Case("flash", sequences=8, repeat=1),
    ]  # fmt: skip


TABLE = Table(__name__, Case, trials.METRICS, GROUP, grid, trials.measure, DEPENDS)
