"""The figures of chapter `attention`: times and memory over the length, and maps of speedups."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages.attention import PARTS, speedups, with_predictions, word
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import EMPTY, fmt


def time_figure(chapter: Chapter, roofs: Roofs, dtypes: tuple[str, ...], **where: Any) -> Figure:
    """Medians over the sequence length, a row of panels for each dtype; dashed: the floor of each implementation."""
    figure, axes = figures.panels(columns=2, rows=len(dtypes), height=2.6)
    for line, dtype in zip(axes, dtypes, strict=True):
        rows = with_predictions(chapter, roofs, **where, dtype=dtype)
        for ax, part in zip(line, PARTS, strict=True):
            ok = rows[rows["status"] == "ok"]
            figures.lines(ax, ok, "seq_len", f"{part}_ms_p50", "impl", log_y=True)
            _dashed(ax, rows[rows["seq_len"].isin(ok["seq_len"])], f"{part}_floor_ms")
            if len(ok):
                _powers_of_ten(ax)
            ax.set(title=f"{part}, {figures.label(dtype)}", xlabel="sequence length")
        line[0].set_ylabel("ms")
    figures.legend_below(figure, *axes.flat)
    return figure


def memory_figure(chapter: Chapter, roofs: Roofs, **where: Any) -> Figure:
    """Memory before backward and at the peak over the sequence length; dashed: the closed forms."""
    rows = with_predictions(chapter, roofs, **where)
    figure, axes = figures.panels(columns=2, height=3.0)
    for ax, measured, predicted, title in (
        (axes[0, 0], "before_backward_gib", "predicted_before_gib", "just before backward"),
        (axes[0, 1], "peak_gib", "predicted_peak_gib", "at the peak"),
    ):
        there = rows[rows[measured].notna() & ((measured != "peak_gib") | (rows["status"] == "ok"))]
        figures.lines(ax, there, "seq_len", measured, "impl", log_y=True)
        if len(there):
            _powers_of_ten(ax)
            _dashed(ax, rows, predicted, figures.ROOF)
            for cap in sorted(c for c in chapter.rows()["cap_gib"].unique() if c):
                figures.roof(ax, cap, f"{cap} GiB")
        ax.set(title=title, xlabel="sequence length")
    axes[0, 0].set_ylabel("GiB")
    figures.legend_below(figure, *axes.flat)
    return figure


def _powers_of_ten(ax: Axes) -> None:
    """Plain numbers at the powers of ten: floors and times are far apart, and panels are compared."""
    ax.yaxis.set_major_locator(LogLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fmt(value, 1)))
    ax.yaxis.set_minor_locator(LogLocator(subs="auto"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _dashed(ax: Axes, rows: pd.DataFrame, y: str, color: str | None = None) -> None:
    """A closed form: a dashed line for each implementation, in its color, or in one that is seen on top of others."""
    for impl, part in rows.dropna(subset=y).groupby("impl", sort=False):
        part = part.sort_values("seq_len")
        own, zorder = figures.look(str(impl))[1], 4 if color else 2
        ax.plot(part["seq_len"], part[y], color=color or own, ls=(0, (2, 2)), lw=1.0, zorder=zorder)


def speedup_figure(
    chapter: Chapter, roofs: Roofs, impl: str, dtypes: tuple[str, ...], **where: Any
) -> Figure:
    """Maps of plain attention's time over that of `impl`: sequence length across, head dimension down. What is called
    even stands in parentheses."""
    figure, axes = figures.panels(columns=2, rows=len(dtypes), height=1.7)
    for line, dtype in zip(axes, dtypes, strict=True):
        grid = chapter.rows(**where, dtype=dtype, impl=impl, repeat=0)
        for ax, part in zip(line, PARTS, strict=True):
            ax.set_title(f"{part}, {figures.label(dtype)}")
            table = speedups(chapter, roofs, impl, part, **where, dtype=dtype)
            if table.empty:
                figures.nothing(ax)
                continue
            words = grid.assign(word=grid["status"].map(word)).pivot_table(
                index="head_dim", columns="seq_len", values="word", aggfunc="first"
            )
            shown, said = (
                table.pivot_table(index="head_dim", columns="seq_len", values=value, aggfunc="first").reindex(
                    index=words.index, columns=words.columns
                )
                for value in ("ratio", "word")
            )
            figures.heat(ax, shown, limit=4.0, words=words.replace("ok", EMPTY))
            for cell, verdict in zip(ax.texts, said.to_numpy().flat, strict=True):
                if verdict == "even":
                    cell.set_text(f"({cell.get_text()})")
        line[0].set_ylabel("d")
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    return figure
