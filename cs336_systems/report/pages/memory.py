"""What chapter `memory` shows: numeric frames and figures from its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.experiments import memory
from cs336_systems.measure import rows as store
from cs336_systems.measure.memory_timeline import Timeline
from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.memory_figure import GIB, MIB, cropped, draw, largest_allocations
from cs336_systems.report.tables import pivot
from cs336_systems.sizes import SIZES, ModelConfig, size

REFERENCE = SIZES["2.7B"]  # the hyperparameters that the handout asks about
BATCH = 4
PASSES = {"forward": "forward, no graph", "forward_graph": "forward, graph kept", "train_step": "full step"}
_FIELDS = ("size", "context_length", "mode", "dtype", "optimizer", "batch", "repeat")


# ---------------------------------------------------------------------------------------------- closed forms
def predicted_bytes(row: Mapping[str, Any]) -> int:
    """A case's peak by the closed form."""
    device = "cpu" if row["machine"].startswith("cpu-") else "cuda"  # autocast has other rules on a CPU
    return max(sum(items.values()) for items in memory.predicted(case_of(row), device).values())


def case_of(row: Mapping[str, Any]) -> memory.Case:
    """The case of a row, its numbers as Python's own."""
    return memory.Case(**{f: row[f] if isinstance(row[f], str) else int(row[f]) for f in _FIELDS})


def saved_mib(context_length: int, dtype: str) -> float:
    """What one block of the reference model saves for the backward pass."""
    return sum(accounting.saved_layer_bytes(REFERENCE, BATCH, context_length, dtype).values()) / MIB


def block_parameters() -> int:
    """Of the linear layers of one block of the reference model: their gradients take 4 bytes each, their bf16 copies
    2."""
    counts = accounting.parameter_counts(REFERENCE)
    return (counts["attention"] + counts["ffn"]) // REFERENCE.num_layers


# ---------------------------------------------------------------------------------------------------- tables
def largest_model(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest model, without other optimizers and repetitions, by context and pass."""
    chosen = rows[(rows["optimizer"] == "fused") & (rows["repeat"] == 0)]
    names = [name for name in SIZES if name in set(chosen["size"])]
    return chosen[chosen["size"] == names[-1]] if names else chosen


def peaks(rows: pd.DataFrame) -> pd.DataFrame:
    """Peak memory of each case beside its closed form, a pair of columns for each precision.

    Columns that say the same of all rows are left out, but for machine, context and pass.
    """
    rows = rows[rows["repeat"] == 0].assign(predicted=[predicted_bytes(r) / GIB for r in rows[rows["repeat"] == 0].to_dict("records")])
    order = {name: place for names in (SIZES, PASSES) for place, name in enumerate(names)}
    rows = rows.sort_values(
        ["machine", "size", "context_length", "mode", "optimizer"], key=lambda c: c.map(order).fillna(0) if c.name in ("size", "mode") else c,
        kind="stable",
    )
    ...
