"""The matrix of attention and data parallelism: as the chapter shows it, and as a folder for one's own machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.chapters.training import measure as experiment
from cs336_systems.chapters.training.folder import write
from cs336_systems.chapters.training.trials import ATTENTIONS, EPOCH_MB
from cs336_systems.report import figures, tables
from cs336_systems.report.chapter import NOT_MEASURED
from cs336_systems.store.rows import case_fields

WRAPPERS = {
    "none": "one rank", "naive": "naive", "flat": "flat", "overlapped": "overlapped", "bucketed": "bucketed",
    "in_place": "in place", "torch": "torch DDP",
}  # fmt: skip


def scaled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the matrix in order, with `efficiency`: tokens/s over those of as many single ranks, of one run."""
    rows = tables.in_order(rows, ["world_size", "attention", "wrapper", "sharded"], ATTENTIONS, WRAPPERS)
    alone = rows[(rows["wrapper"] == experiment.ALONE) & (rows["repeat"] == 0)]
    keys = ["run", *(f for f in case_fields(experiment.TABLE) if f not in ("wrapper", "sharded", "repeat"))]
    base = alone.set_index(keys)["tokens_per_s"]
    base = base[~base.index.duplicated()]
    one = base.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy(float) if len(rows) else []
    efficiency = rows["tokens_per_s"].astype(float) / (one * rows["world_size"])
    return rows.assign(efficiency=efficiency.where(rows["wrapper"] != experiment.ALONE))


def matrix(rows: pd.DataFrame) -> pd.DataFrame:
    """Every cell: step, throughput, memory, scaling efficiency, an epoch of EPOCH_MB of stories, the last losses."""
    rows = scaled(rows)
    return pd.DataFrame({
        "machine": rows["machine"], "ranks": rows["world_size"], "attention": rows["attention"].map(figures.label),
        "wrapper": rows["wrapper"].map(WRAPPERS), "sharded": rows["sharded"].map({True: "yes", False: "no"}),
        "repeat": rows["repeat"], "step, ms": rows["step_ms_p50"], "1,000 tokens/s": rows["tokens_per_s"] / 1e3,
        "peak, GiB": rows["peak_gib"], "efficiency, %": 100 * rows["efficiency"], "epoch, min": rows["epoch_s"] / 60,
        "loss": rows["loss_last"],
    })  # fmt: skip


def throughput(rows: pd.DataFrame, sharded: bool = False) -> pd.DataFrame:
    """1,000 tokens/s: ranks and wrapper down, attention across; without or with the sharded optimizer. Of cells that
    were measured, with or without success."""
    there = (rows["repeat"] == 0) & (rows["sharded"] == sharded) & (rows["status"] != NOT_MEASURED)
    rows = scaled(rows[there])
    rows = rows.assign(thousands=rows["tokens_per_s"].astype(float) / 1e3, ranks=rows["world_size"])
    rows = rows.assign(wrapper=rows["wrapper"].map(WRAPPERS), attention=rows["attention"].map(figures.label))
    return tables.pivot(rows, ["machine", "ranks", "wrapper"], "attention", "thousands")


BARS = {  # column → title, scale
    "tokens_per_s": ("throughput, 1,000 tokens/s", 1e-3),
    "peak_gib": ("peak memory of a rank, GiB", 1.0),
    "efficiency": ("scaling efficiency, %", 100.0),
}


def measured(rows: pd.DataFrame, column: str) -> bool:
    """Whether there is anything to draw."""
    return pd.to_numeric(scaled(rows)[column], errors="coerce").notna().any()


def bars(ax: Axes, rows: pd.DataFrame, column: str) -> None:
    """Grouped bars of one number of ranks: a group for each wrapper, a color for each attention, hatched with the
    sharded optimizer."""
    title, scale = BARS[column]
    ax.set_title(title)
    if not measured(rows, column):
        figures.nothing(ax)
        return
    rows = scaled(rows[rows["repeat"] == 0])
    rows = rows[pd.to_numeric(rows[column], errors="coerce").notna()]
    groups = list(dict.fromkeys(rows["wrapper"]))
    series = list(dict.fromkeys(zip(rows["attention"], rows["sharded"], strict=True)))
    colors = {name: figures.look(name, place) for place, name in enumerate(dict.fromkeys(rows["attention"]))}
    width = 0.84 / len(series)
    for place, (attention, sharded) in enumerate(series):
        part = rows[(rows["attention"] == attention) & (rows["sharded"] == sharded)]
        at = [groups.index(name) + (place - (len(series) - 1) / 2) * width for name in part["wrapper"]]
        label, color, _ = colors[attention]
        values = part[column].astype(float) * scale
        ax.bar(
            at, values, width, color=color, label=None if sharded else label, zorder=3,
            hatch="////" if sharded else None, edgecolor="white", linewidth=0.4,
        )  # fmt: skip
    ax.set_xticks(range(len(groups)), [WRAPPERS[name] for name in groups])
    ax.grid(axis="x", visible=False)


def matrix_figure(rows: pd.DataFrame, columns: Sequence[str] = tuple(BARS)) -> Figure:
    """A panel of bars for each column that was measured, of the most ranks that were."""
    there = rows[rows["tokens_per_s"].notna()] if "tokens_per_s" in rows else rows
    rows = rows[rows["world_size"] == (rows if there.empty else there)["world_size"].max()]
    columns = [column for column in columns if measured(rows, column)] or columns[:1]
    drawn, axes = figures.panels(rows=len(columns), height=2.2)
    for ax, column in zip(axes[:, 0], columns, strict=True):
        bars(ax, rows, column)
    figures.legend_below(drawn, *axes[:, 0])
    return drawn


def folder(rows: pd.DataFrame, out: Path) -> list[Path]:
    """Writes the matrix of one machine into a folder: CSV, pictures, a report in Markdown; what was written."""
    found = matrix(rows).drop(columns="machine")
    each = " or ".join(map(str, sorted(set(rows["batch"]))))
    notes = [
        f"A step takes {each} sequences on each rank.",
        "*One rank* is alone with its share of a step; the efficiency of a cell is its throughput over that of "
        f"as many single ranks. An epoch is a pass over {EPOCH_MB:g} MB of stories. Losses are means over the last "
        "steps, in nats a token. Hatched: with the sharded optimizer.",
    ]
    names = {"tokens_per_s": "throughput", "peak_gib": "memory", "efficiency": "scaling"}
    pictures = {name: matrix_figure(rows, (c,)) for c, name in names.items() if measured(rows, c)}
    return write(out, "matrix", "Attention and data parallelism, in training", rows, found, pictures, notes)
