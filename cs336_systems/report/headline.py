"""The table that the README and the book's first page open with, computed from the reference rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from cs336_systems.report.chapter import NOT_MEASURED, Chapter, reference_machines
from cs336_systems.report.figures import label
from cs336_systems.report.tables import fmt

CASE = {"heads": 16, "seq_len": 16384, "head_dim": 64, "dtype": "bf16", "repeat": 0}
CAPTION = "Causal attention, batch 1, 16 heads, 16,384 tokens, head dimension 64, bf16 (medians)"


def table(root: Path | None = None) -> pd.DataFrame:
    """One row for each machine and implementation: milliseconds, TFLOP/s of both passes, and the time over
    ours.

    Times over ours compare rows of one run only. Empty where the reference machines have no such row.
    """
    machines = reference_machines("flash_bench", root)
    if not machines:
        return pd.DataFrame()
    chapter = Chapter("flash_bench", measure="no", preset="full", root=root)
    rows = chapter.rows(**CASE)
    if (rows["status"] == NOT_MEASURED).all():
        return pd.DataFrame()
    out = []
    for _, row in rows.iterrows():
        same = {**CASE, "machine": row["machine"]}
        ratio = chapter.ratio(
            "end_to_end_ms_p50", {**same, "impl": row["impl"]}, {**same, "impl": "flash_triton"}
        )
        metrics = ("forward_ms_p50", "backward_ms_p50", "end_to_end_ms_p50", "end_to_end_tflops")
        cells = [fmt(row[m]) if row["status"] == "ok" else "" for m in metrics]
        if row["status"] != "ok":
            cells[0] = str(row["status"])
        name = label(row["impl"])
        out.append([row["machine"], name, *cells, "" if ratio is None else f"{fmt(ratio)} ×"])
    heads = [
        "machine",
        "implementation",
        "forward, ms",
        "backward, ms",
        "both, ms",
        "both, TFLOP/s",
        "time over ours",
    ]
    return pd.DataFrame(out, columns=heads)


def sentence(root: Path | None = None) -> str:
    """The provenance of the table, as Markdown."""
    machines = reference_machines("flash_bench", root)
    if not machines or table(root).empty:
        return "The attention chapter has not been measured on a GPU yet."
    return Chapter("flash_bench", measure="no", preset="full", root=root).provenance()
