"""Attention alone on rectangular shapes: as chapter `training` shows it, and as a folder for one's own machine."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.chapters.training.folder import write
from cs336_systems.chapters.training.sweep import ATTENTIONS
from cs336_systems.report import figures, tables

PARTS = {"forward": "forward", "both": "forward + backward"}
PLAIN = "reference"


def ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by size and implementation, with `tier`, the text of a shape, and `plain`, the time of plain attention
    over that of the row, forward, in the same run."""
    rows = tables.in_order(rows, ["cap_gib", "num_queries", "num_keys", "attention", "repeat"], ATTENTIONS)
    shapes = [f"{q}:{k}" for q, k in zip(rows["num_queries"], rows["num_keys"], strict=True)]
    keys = ["run", "num_queries", "num_keys"]
    plain = tables.chosen(rows, attention=PLAIN, repeat=0).drop_duplicates(keys)
    base = tables.looked_up(plain, "forward_ms_p50", rows, keys)
    return rows.assign(tier=shapes, plain=base / rows["forward_ms_p50"].astype(float))


def table(rows: pd.DataFrame, part: str = "forward") -> pd.DataFrame:
    """ms of a pass: shapes down, implementations across. A dash or a word where there is no time."""
    rows = ordered(rows[rows["repeat"] == 0])
    rows = rows.assign(attention=rows["attention"].map(figures.label), shape=rows["tier"])
    return tables.pivot(rows, ["machine", "shape"], "attention", f"{part}_ms_p50")


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """Every case: times, memory, where it ran out, forward's speed over plain attention's."""
    rows = ordered(rows)
    found = pd.DataFrame({
        "machine": rows["machine"], "queries:keys": rows["tier"], "dtype": rows["dtype"], "cap, GiB": rows["cap_gib"],
        "attention": rows["attention"].map(figures.label), "repeat": rows["repeat"],
        "forward, ms": rows["forward_ms_p50"], "both, ms": rows["both_ms_p50"], "over plain, ×": rows["plain"],
        "forward peak, GiB": rows["forward_peak_gib"], "peak, GiB": rows["peak_gib"],
    })  # fmt: skip
    found.attrs["words"] = dict.fromkeys(found.columns[-5:], rows["status"].map(tables.word).to_dict())
    return found


def bars(rows: pd.DataFrame) -> Figure:
    """Forward and both passes: a group of bars for each shape, a color for each implementation; of one machine."""
    rows = tables.first_machine(ordered(rows[rows["repeat"] == 0]))
    drawn, axes = figures.panels(2, height=2.6)
    tiers, series = list(dict.fromkeys(rows["tier"])), list(dict.fromkeys(rows["attention"]))
    width = 0.8 / max(1, len(series))
    for ax, part in zip(axes[0], PARTS, strict=True):
        ax.set_title(f"{PARTS[part]}, ms")
        if rows[f"{part}_ms_p50"].isna().all():
            figures.nothing(ax)
            continue
        for place, attention in enumerate(series):
            of_one = rows[rows["attention"] == attention].set_index("tier")[f"{part}_ms_p50"].astype(float)
            at = [i + (place - (len(series) - 1) / 2) * width for i in range(len(tiers))]
            label, color, _ = figures.look(attention, place)
            ax.bar(at, of_one.reindex(tiers), width, color=color, label=label, zorder=3)
        ax.set_xticks(range(len(tiers)), tiers, fontsize=7.5)
        ax.set_yscale("log")
        figures.plain_ticks(ax.yaxis, 1, 2, 5)
        ax.grid(axis="x", visible=False)
    figures.legend_below(drawn, *axes[0])
    return drawn


def heat(rows: pd.DataFrame) -> Figure:
    """How many times as fast as plain attention each implementation is, forward, on each shape; of one machine."""
    rows = tables.first_machine(ordered(rows))
    rows = rows[(rows["repeat"] == 0) & (rows["attention"] != PLAIN)]
    drawn, ax = figures.panel(height=0.9 + 0.3 * rows["attention"].nunique())
    ax.set_title("forward, speed over plain attention's")
    if rows["plain"].isna().all():
        figures.nothing(ax)
        return drawn
    wide = rows.pivot_table(index="attention", columns="tier", values="plain", sort=False)
    wide.index = [figures.label(name) for name in wide.index]
    figures.heat(ax, wide.set_axis(range(wide.shape[1]), axis=1))
    ax.set_xticks(range(wide.shape[1]), wide.columns)
    return drawn


def scaling(rows: pd.DataFrame) -> Figure:
    """Forward and both passes over the number of scores, queries times keys. Of the first machine."""
    rows = tables.first_machine(ordered(rows[rows["repeat"] == 0]))
    rows = rows.assign(scores=rows["num_queries"] * rows["num_keys"])
    drawn, axes = figures.panels(2, height=2.6)
    for ax, part in zip(axes[0], PARTS, strict=True):
        figures.lines(ax, rows, "scores", f"{part}_ms_p50", "attention", log_y=True)
        ax.set(title=f"{PARTS[part]}, ms", xlabel="queries × keys")
    figures.legend_below(drawn, *axes[0])
    return drawn


def folder(rows: pd.DataFrame, out: Path) -> list[Path]:
    """Writes the sweep of one machine into a folder: CSV, pictures, a report in Markdown; what was written."""
    first = rows.iloc[0]
    notes = [
        f"Batch {first['batch']}, {first['heads']} heads of dimension {first['head_dim']}, {first['dtype']}, not "
        "causal. Speed over plain: the time of plain attention, forward, over that of the implementation, in the same "
        "run.",
    ]
    pictures = {"bars": bars(rows), "heatmap": heat(rows), "scaling": scaling(rows)}
    found = complete(rows).drop(columns=["machine", "dtype"])
    return write(out, "sweep", "Attention on rectangular shapes", rows, found, pictures, notes)
