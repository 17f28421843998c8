"""The table that the README and the book's first page open with, computed from the reference rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, reference_machines
from cs336_systems.report.figures import label
from cs336_systems.report.roofs import roofs
from cs336_systems.report.tables import fmt

CASE = {"heads": 16, "seq_len": 16384, "head_dim": 64, "dtype": "bf16", "repeat": 0}
CAPTION = "Causal attention, batch 1, 16 heads, 16,384 tokens, head dimension 64, bf16 (medians)"


def table(root: Path | None = None) -> pd.DataFrame:
    """One row for each machine and implementation: milliseconds, TFLOP/s of both passes, and the time over
    ours. The column of machines is left out where there is one machine.

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
        "TFLOP/s",
        "time over ours",
    ]
    frame = pd.DataFrame(out, columns=heads)
    return frame.drop(columns="machine") if frame["machine"].nunique() == 1 else frame


def sentence(root: Path | None = None) -> str:
    """The provenance of the table, as Markdown."""
    machines = reference_machines("flash_bench", root)
    if not machines or table(root).empty:
        return "The attention chapter has not been measured on a GPU yet."
    return Chapter("flash_bench", measure="no", preset="full", root=root).provenance()


FIGURE_CAPTION = (
    "Causal attention, 16 heads, bf16, forward and backward: TFLOP/s by sequence length, for head dimensions "
    "64 and 128, below the best matrix product of the same machine"
)


def _drawn(root: Path | None = None) -> tuple[pd.DataFrame, float | None]:
    """The rows of the README's figure and its roof: those of the first reference machine."""
    machines = reference_machines("flash_bench", root)
    if not machines:
        return pd.DataFrame(), None
    chapter = Chapter("flash_bench", measure="no", preset="full", root=root)
    rows = chapter.measured(machine=machines[0], heads=CASE["heads"], dtype=CASE["dtype"], repeat=0)
    return rows, roofs(machines[0], root).tflops.get(CASE["dtype"])


def figure_digest(root: Path | None = None) -> str:
    """Eight hexadecimal digits of what the figure shows; empty where there is nothing to draw."""
    rows, roof = _drawn(root)
    if rows.empty:
        return ""
    shown = rows[["machine", "head_dim", "seq_len", "impl", "end_to_end_tflops"]]
    lines = [f"{roof}", *(" ".join(str(value) for value in row) for row in shown.itertuples(index=False))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def figure(root: Path | None = None) -> Figure:
    """The README's figure: a panel for each head dimension, a line for each implementation, the roof above."""
    rows, roof = _drawn(root)
    with figures.styled():
        dims = sorted(rows["head_dim"].unique())
        drawn, axes = figures.panels(columns=len(dims), height=3.0, sharey=True)
        for ax, d in zip(axes[0], dims, strict=True):
            figures.lines(ax, rows[rows["head_dim"] == d], "seq_len", "end_to_end_tflops", "impl")
            figures.roof(ax, roof, "best matrix product of this machine")
            ax.set_title(f"head dimension {d}")
            ax.set_xlabel("sequence length")
        axes[0, 0].set_ylabel("TFLOP/s, forward + backward")
        handles, names = axes[0, 0].get_legend_handles_labels()
        drawn.legend(handles, names, loc="outside lower center", ncols=len(names))
    return drawn
