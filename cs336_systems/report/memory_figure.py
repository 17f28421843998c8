"""The active memory of a recording as stacked areas by category, and its largest allocations as a table."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.measure.memory_timeline import CATEGORIES, Timeline
from cs336_systems.report import figures
from cs336_systems.report.tables import EMPTY, fmt

GIB, MIB = 2**30, 2**20
COLORS = {
    "before recording": "#bdbdbd",
    "weights": "#0072B2",
    "optimizer state": "#56B4E9",
    "gradients": "#D55E00",
    "activations": "#009E73",
    "temporaries": "#E69F00",
    "other": "#CC79A7",
}
OVER = ("events", "time")


def timeline_figure(timeline: Timeline, title: str | None = None, *, over: str = "events") -> Figure:
    """Active memory in GiB, stacked by category, with the stages and the peak.

    over:  `"events"` (one step for each, as in torch's own viewer) or `"time"` (ms of the host).
    """
    if over not in OVER:
        raise ValueError(f"unknown axis {over!r}; allowed: {', '.join(OVER)}")
    if over == "time" and not timeline.time_ms:
        raise ValueError("this recording has no times; allowed: events")
    figure, axes = figures.panels(height=3.4)
    ax = axes[0, 0]
    events = np.array(timeline.events, float)
    x = events if over == "events" else np.array(timeline.time_ms)
    names = [name for name in CATEGORIES if any(timeline.bytes.get(name, ()))]
    total = timeline.total() / GIB
    if names:
        stack = [np.array(timeline.bytes[name]) / GIB for name in names]
        ax.stackplot(x, stack, labels=names, colors=[COLORS[n] for n in names], step="post", lw=0, zorder=2)
    ax.step(x, total, where="post", color=figures.ROOF, lw=0.6, zorder=3)
    ax.set_xlim(x[0], x[-1] if x[-1] > x[0] else x[0] + 1)
    ax.set_ylim(0, max(float(total.max()) * 1.12, 1e-9))
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("allocations and frees, in order" if over == "events" else "time on the host, ms")
    ax.set_ylabel("active memory, GiB")
    _stages(ax, [(stage.name, float(np.interp(stage.begin, events, x))) for stage in timeline.stages])
    for event, asked, _ in timeline.out_of_memory:
        at = float(np.interp(event, events, x))
        ax.axvline(at, color=COLORS["gradients"], ls=":", lw=1.2, zorder=4)
        text = f"out of memory, {fmt(asked / GIB)} GiB asked for "
        ax.annotate(
            text, (at, 0.5), xycoords=("data", "axes fraction"), fontsize=8, ha=_side(ax, at), zorder=5
        )
    states = [timeline.peak, *(stage.peak for stage in timeline.stages)]
    peak = max(reversed(states), key=lambda state: state.bytes)  # of equals the last, as in the rows
    at = float(np.interp(peak.event, events, x))
    ax.plot([at], [peak.bytes / GIB], "o", color=figures.ROOF, ms=3.5, zorder=5)
    ax.annotate(
        f"peak {fmt(peak.bytes / GIB)} GiB", (at, peak.bytes / GIB), xytext=(4 if _side(ax, at) == "left" else -4, 4),
        textcoords="offset points", fontsize=8.5, ha=_side(ax, at), zorder=5,
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
    )  # fmt: skip
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
    if names:
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 4))
    return figure


def _side(ax: Axes, at: float) -> str:
    """To which side of `at` a text goes so that it stays inside."""
    low, high = ax.get_xlim()
    return "left" if at < (low + high) / 2 else "right"


def _stages(ax: Axes, stages: list[tuple[str, float]]) -> None:
    """A line where each stage begins, its name above the plot; names that would overlap go one row up."""
    low, high = ax.get_xlim()
    free: list[float] = []  # where each row of names is free again, as a share of the width
    for name, begin in stages:
        if begin > low:
            ax.axvline(begin, color=figures.ROOF, ls=(0, (4, 3)), lw=0.8, zorder=4)
        share = (begin - low) / (high - low)
        width = 0.013 * (len(name) + 1)
        share = min(share, 1 - width)
        row = next((r for r, end in enumerate(free) if end <= share), len(free))
        free[row : row + 1] = [share + width]
        ax.annotate(
            name, (share, 1), xycoords="axes fraction", xytext=(1, 3 + 10 * row),
            textcoords="offset points", fontsize=8, color=figures.ROOF, annotation_clip=False,
        )  # fmt: skip


def largest_allocations(timeline: Timeline, stage: str | None = None, top: int | None = None) -> pd.DataFrame:
    """The largest allocations of a stage, by the size of one; without a stage what was active at the peak, by the sum.

    One row for each group of allocations of the same size that come from the same line of code.
    """
    names = [s.name for s in timeline.stages]
    if stage is not None and stage not in names:
        raise ValueError(f"unknown stage {stage!r}; allowed: {', '.join(names)}")
    found = timeline.at_peak if stage is None else [g for g in timeline.largest if g.stage == stage]
    rows = [
        {
            "MiB each": g.bytes / MIB,
            "count": g.count,
            "MiB": g.bytes * g.count / MIB,
            "category": g.category,
            "allocated in": g.stage or EMPTY,
            "line": f"`{g.code}`" if g.code else EMPTY,
            "calls": f"`{g.function}`" if g.function else EMPTY,
        }
        for g in found[:top]
    ]
    return pd.DataFrame(
        rows, columns=["MiB each", "count", "MiB", "category", "allocated in", "line", "calls"]
    )
