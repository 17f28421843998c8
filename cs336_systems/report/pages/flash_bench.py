"""What chapter `flash_bench` shows: numeric frames and figures from its rows."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cs336_systems import accounting
from cs336_systems.experiments.flash_bench import PARTS
from cs336_systems.report import figures, tables
from cs336_systems.report.figures import label
from cs336_systems.report.roofs import Roofs

OURS = "flash_triton"
BASELINES = ("reference", "reference_compiled")
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "both"}
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
LONGEST_KERNEL = 8192  # tokens up to which speedups are of kernel times: all calls are short enough for a CUDA graph
_QUERY, _KEY, _KEPT = "#0072B2", "#D55E00", "#e8eef4"


def first_machine(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first machine, each case once: what a figure shows."""
    rows = rows[rows["repeat"] == 0]
    return rows[rows["machine"] == rows["machine"].iloc[0]] if len(rows) else rows


def kernel_ms(rows: pd.DataFrame) -> pd.Series:
    """Kernel time of forward and backward together; NaN where a pass is too long for a CUDA graph."""
    return (rows["forward_gpu_ms"] + rows["backward_gpu_ms"]).astype(float)


# ------------------------------------------------------------------------------------------------ tables
def times(rows: pd.DataFrame, impls: tuple[str, ...] = (), head_dim: int | None = None) -> pd.DataFrame:
    """The handout's table of one head: wall time in ms by dtype, d and length, a column for each pass and
    implementation (all of the rows', if none are named)."""
    rows = rows[(rows["repeat"] == 0) & (rows["heads"] == 1)]
    rows = rows[rows["impl"].isin(impls or list(rows["impl"])) & rows["head_dim"].isin([head_dim or rows["head_dim"]][0:1] if head_dim else list(rows["head_dim"]))]
    return rows
