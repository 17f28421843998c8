"""What chapter `speedrun` shows: what fits a small GPU by the forecast, and what was measured under a cap instead."""

from __future__ import annotations

import math

import pandas as pd

from cs336_systems.chapters.speedrun import plan
from cs336_systems.chapters.training import fits as experiment
from cs336_systems.report import tables

SIZES = ("mini", "small", "medium", "large", "xl", "2.7B")


def fits(gib: float, dtype: str = "fp16") -> pd.DataFrame:
    """By size, for each context length: the most sequences of a step on one GPU, and the GiB that they need (those of
    one sequence where not one fits)."""
    found = pd.DataFrame({"size": SIZES})
    for n in experiment.CONTEXTS:
        fitting = [plan.what_fits(gib, size, n, dtype) for size in SIZES]
        found[f"{n} tokens"], found[f"GiB at {n}"] = zip(*fitting, strict=True)
    return found


def held_against(rows: pd.DataFrame) -> pd.DataFrame:
    """The forecast's choices, and twice as many sequences: memory by the forecast, of the tensors, and reserved by the
    allocator; throughput; steps that the loss scaling skipped."""
    rows = tables.in_order(rows, ["size", "context_length", "sequences", "repeat"], SIZES)
    found = pd.DataFrame({
        "machine": rows["machine"], "size": rows["size"], "tokens": rows["context_length"],
        "sequences": rows["sequences"],
        "forecast, GiB": rows["predicted_gib"], "peak, GiB": rows["peak_gib"], "reserved, GiB": rows["reserved_gib"],
        "1,000 tokens/s": rows["tokens_per_s"].astype(float) / 1e3,
        "skipped steps": rows["skipped_steps"].astype("Int64"),
    })  # fmt: skip
    found.attrs["words"] = {"peak, GiB": rows["status"].map(tables.word).to_dict()}
    return found


def foreseen(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each size and context length: whether the forecast's choice ran, and whether twice as many did; NaN
    where nothing was measured."""
    rows = rows[rows["repeat"] == 0].sort_values("sequences")
    lines = []
    for (machine, size, context), part in rows.groupby(["machine", "size", "context_length"], sort=False):
        ran = [{"ok": 1.0, "oom": 0.0}.get(str(s).partition(":")[0], math.nan) for s in part["status"]]
        if len(ran) == 2:
            lines.append([machine, size, context, *ran])
    return pd.DataFrame(lines, columns=["machine", "size", "context_length", "chosen", "twice"])
