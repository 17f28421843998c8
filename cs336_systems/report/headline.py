"""The table that the README and the book's first page open with, computed from the reference rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.leaderboard import OFFICIAL_MS
from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter, reference_machines
from cs336_systems.report.figures import label
from cs336_systems.report.roofs import roofs
from cs336_systems.report.tables import distance, fmt, listed

CASE = {"heads": 16, "seq_len": 16384, "head_dim": 64, "dtype": "bf16", "repeat": 0}  # the leaderboard's work
CAPTION = (
    "Causal attention, batch 1, 16 heads, 16,384 tokens, head dimension 64, bf16: GPU time of the kernels of either "
    "pass, and of both as the course's leaderboard times them (medians)"
)


def _leaderboard(root: Path | None) -> Chapter:
    return Chapter("leaderboard", measure="no", preset="full", root=root)


def table(root: Path | None = None) -> pd.DataFrame:
    """One row for each machine and implementation, fastest first: milliseconds of each pass and of both, TFLOP/s of
    both, and the time over ours. The column of machines is left out where there is one machine.

    Times over ours compare rows of one run only. Empty where the reference machines have no such row.
    """
    if not reference_machines("leaderboard", root):
        return pd.DataFrame()
    chapter = _leaderboard(root)
    shape = {**CASE, "is_causal": True, "machine": chapter.machines}
    both = chapter.measured(**shape, leaves="stacked")
    # only ours have the leaderboard's own, long run: the short one is everybody's
    both = both[both["rep_ms"] != OFFICIAL_MS].sort_values(["machine", "ms_p50"], kind="stable")
    alone = chapter.table("kernels").measured(**shape, grad_o="matrix")
    out = []
    for row in both.to_dict("records"):
        same = alone[(alone["machine"] == row["machine"]) & (alone["impl"] == row["impl"])]
        passes = [same.loc[same["part"] == part, "ms_p50"] for part in ("forward", "backward")]
        ours = both[(both["run"] == row["run"]) & (both["impl"] == "flash_triton")]
        ratio = "" if ours.empty else f"{fmt(row['ms_p50'] / ours.iloc[0]['ms_p50'])} ×"
        out.append([
            row["machine"], label(row["impl"]), *(fmt(found.iloc[0]) if len(found) else "" for found in passes),
            fmt(row["ms_p50"]), fmt(row["tflops"]), ratio,
        ])  # fmt: skip
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
    """The provenance of the table, as Markdown, and who is even with ours."""
    if table(root).empty:
        return "The leaderboard's work has not been measured on a GPU yet."
    chapter = _leaderboard(root)
    return f"{chapter.provenance(chapter.table('kernels'))}{_even(chapter)}"


def _even(chapter: Chapter) -> str:
    """Who is as far from ours as ours measured again in the same run, or less; nothing where nobody is."""
    said = []
    both = chapter.measured(**{**CASE, "repeat": [0, 1]}, is_causal=True, leaves="stacked")
    for _, rows in both[both["rep_ms"] != OFFICIAL_MS].groupby("run", sort=False):
        ms = {(row.impl, row.repeat): row.ms_p50 for row in rows.itertuples()}
        first, again = ms.get(("flash_triton", 0)), ms.get(("flash_triton", 1))
        if first is None or again is None:
            continue
        apart = distance(again / first)
        even = [
            label(i) for i, n in ms if n == 0 and i != "flash_triton" and distance(ms[i, n] / first) <= apart
        ]
        if even:
            said.append(
                f" Measured again in the same run, ours takes {fmt(again)} ms: {listed(even)} and ours are even."
            )
    return "".join(said)


FIGURE_CAPTION = (
    "Causal attention, 16 heads, bf16, forward and backward: TFLOP/s by sequence length, for head dimensions "
    "64 and 128, below the best matrix product of the same machine"
)


def figure_sentence(root: Path | None = None) -> str:
    """The provenance of the README's figure, as Markdown."""
    return Chapter("flash_bench", measure="no", preset="full", root=root).provenance()


def _drawn(root: Path | None = None) -> tuple[pd.DataFrame, float | None]:
    """The rows of the README's figure and its roof: those of the first reference machine. Rows of earlier code are left
    out: what a picture shows is taken for how things are, whatever stands below it."""
    machines = reference_machines("flash_bench", root)
    if not machines:
        return pd.DataFrame(), None
    chapter = Chapter("flash_bench", measure="no", preset="full", root=root)
    rows = chapter.measured(machine=machines[0], heads=CASE["heads"], dtype=CASE["dtype"], repeat=0)
    rows = rows[~rows["run"].isin(chapter.stale()["run"])]
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
