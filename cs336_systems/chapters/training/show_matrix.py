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
    alone = tables.chosen(rows, wrapper=experiment.ALONE, repeat=0)
    keys = ["run", *(f for f in case_fields(experiment.TABLE) if f not in ("wrapper", "sharded", "repeat"))]
    one = tables.looked_up(alone.drop_duplicates(keys), "tokens_per_s", rows, keys)
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


def throughput(rows: pd.DataFrame) -> pd.DataFrame:
    """1,000 tokens/s without the sharded optimizer: ranks and wrapper down, attention across. Of cells that were
    measured, with or without success."""
    there = (rows["repeat"] == 0) & ~rows["sharded"] & (rows["status"] != NOT_MEASURED)
    rows = scaled(rows[there])
    rows = rows.assign(thousands=rows["tokens_per_s"].astype(float) / 1e3, ranks=rows["world_size"])
    rows = rows.assign(wrapper=rows["wrapper"].map(WRAPPERS), attention=rows["attention"].map(figures.label))
    return tables.pivot(rows, ["machine", "ranks", "wrapper"], "attention", "thousands")


DRAWN = {  # column → title, scale
    "tokens_per_s": ("throughput, 1,000 tokens/s", 1e-3),
    "peak_gib": ("peak memory of a rank, GiB", 1.0),
    "efficiency": ("scaling efficiency, %", 100.0),
    "epoch_s": ("time of an epoch, minutes", 1 / 60),
}


def dots(ax: Axes, rows: pd.DataFrame, column: str, wrappers: list[str]) -> None:
    """One number of ranks of one machine: a line for each wrapper from above, a color and marker for each attention,
    hollow with the sharded optimizer; what was measured twice is joined."""
    title, scale = DRAWN[column]
    ax.set_title(title)
    rows = rows[pd.to_numeric(rows[column], errors="coerce").notna()]
    if rows.empty:
        figures.nothing(ax)
        return
    for place, (attention, part) in enumerate(rows.groupby("attention", sort=False)):
        label, color, marker = figures.look(str(attention), place)
        for sharded, cells in part.groupby("sharded"):
            shift = -0.15 if sharded else 0.15
            fill = {"markerfacecolor": "white" if sharded else color, "label": None if sharded else label}
            for wrapper, twice in cells.groupby("wrapper", sort=False):
                values = twice[column].astype(float) * scale
                at = [shift - wrappers.index(str(wrapper))] * len(twice)
                ax.plot(values, at, marker=marker, color=color, lw=1.2, zorder=3, **fill)
                fill["label"] = None
    ax.set_yticks([-place for place in range(len(wrappers))], [WRAPPERS[name] for name in wrappers])
    ax.margins(y=0.08)


def matrix_figure(rows: pd.DataFrame, columns: Sequence[str] = tuple(DRAWN)) -> Figure:
    """A panel of dots for each column that was measured, of the most ranks that were, on the first machine."""
    rows = scaled(rows)
    there = rows[rows["tokens_per_s"].notna()]
    most = (rows if there.empty else there)["world_size"].max()
    rows = tables.first_machine(rows[rows["world_size"] == most])
    columns = [column for column in columns if rows[column].notna().any()] or columns[:1]
    drawn, axes = figures.panels(len(columns), height=2.8, sharey=True)
    for ax, column in zip(axes[0], columns, strict=True):
        dots(ax, rows, column, list(dict.fromkeys(rows["wrapper"])))
    figures.legend_below(drawn, *axes[0])
    return drawn


def folder(rows: pd.DataFrame, out: Path) -> list[Path]:
    """Writes the matrix of one machine into a folder: CSV, pictures, a report in Markdown; what was written."""
    found = matrix(rows).drop(columns="machine")
    each = " or ".join(map(str, sorted(set(rows["batch"]))))
    notes = [
        f"A step takes {each} sequences on each rank.",
        "*One rank* is alone with its share of a step; the efficiency of a cell is its throughput over that of "
        f"as many single ranks. An epoch is a pass over {EPOCH_MB:g} MB of stories. Losses are means over the last "
        "steps, in nats a token. Hollow: with the sharded optimizer.",
    ]
    names = {"tokens_per_s": "throughput", "peak_gib": "memory", "efficiency": "scaling", "epoch_s": "epoch"}
    pictures = {name: matrix_figure(rows, (c,)) for c, name in names.items() if scaled(rows)[c].notna().any()}
    return write(out, "matrix", "Attention and data parallelism, in training", rows, found, pictures, notes)
