"""The active memory of a recording as stacked areas by category with its stages, and its largest allocations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from cs336_systems.measure.memory.timeline import CATEGORIES, Timeline
from cs336_systems.report import figures
from cs336_systems.report.tables import fmt

GIB, MIB = 2**30, 2**20
COLORS = {  # neighbors differ in lightness
    "before recording": "#4d4d4d",
    "weights": "#0072B2",
    "optimizer state": "#9ed4f2",
    "gradients": "#D55E00",
    "activations": "#8fdcc0",
    "temporaries": "#E69F00",
    "other": "#CC79A7",
}
FONT = 8  # in points; printed pages scale a figure to nine tenths


def cropped(timeline: Timeline, first: str) -> Timeline:
    """The timeline from the beginning of a stage on; from its first stage where it has none of this name."""
    names = [stage.name for stage in timeline.stages]
    stages = timeline.stages[names.index(first) if first in names else 0 :]
    place = timeline.events.index(stages[0].begin)
    return dataclasses.replace(
        timeline,
        events=timeline.events[place:],
        bytes={name: values[place:] for name, values in timeline.bytes.items()},
        stages=stages,
    )


def draw(ax: Axes, timeline: Timeline, without: Sequence[str] = ()) -> None:
    """Active memory in GiB over the order of events, stacked by category, with the stages above and the peak.

    The peak's number is the allocator's own (`torch.cuda.max_memory_allocated`), of all categories; where some are left
    out (`without`), or no allocator counted, it is the highest point drawn.
    """
    events = np.array(timeline.events, float)
    names = [name for name in CATEGORIES if name not in without and any(timeline.bytes.get(name, ()))]
    stack = np.array([timeline.bytes[name] for name in names]).reshape(len(names), len(events)) / GIB
    total = stack.sum(axis=0)
    top = max(float(total.max()) * 1.15, 1e-9)
    if names:
        lw = 0.3 if len(names) > 1 else 0
        colors = [COLORS[name] for name in names]
        ax.stackplot(events, stack, colors=colors, step="post", edgecolor="white", lw=lw, zorder=2)
        _label_bands(ax, events, names, stack, [stage.begin for stage in timeline.stages], top)
    ax.set_xlim(events[0], max(events[-1], events[0] + 1))
    ax.set_ylim(0, top)
    ax.set_xticks([])
    ax.set_xlabel("allocations and frees, in order")
    at = len(total) - 1 - int(np.argmax(total[::-1]))  # of equals the last, as in the rows
    counted = None if without else timeline.allocator.get("peak_allocated_bytes")
    shown = counted / GIB if counted else float(total[at])
    left = events[at] < sum(ax.get_xlim()) / 2
    ax.plot([events[at]], [total[at]], "o", color=figures.ROOF, ms=3.5, zorder=5)
    ax.annotate(
        f"{fmt(shown)} GiB", (events[at], total[at]), xytext=(3 if left else -3, 4), textcoords="offset points",
        ha="left" if left else "right", fontsize=FONT, zorder=5,
    )  # fmt: skip
    for event, asked, _ in timeline.out_of_memory:
        ax.axvline(event, color=COLORS["gradients"], ls=":", lw=1.2, zorder=4)
        ax.annotate(f"out of memory, {fmt(asked / GIB)} GiB asked for ", (event, 0.15), fontsize=FONT, zorder=5,
                    xycoords=("data", "axes fraction"), ha="right" if event > events.mean() else "left")  # fmt: skip
    ends = [*(stage.begin for stage in timeline.stages[1:]), timeline.num_events]
    kinds = [stage.name.split(" ")[0] for stage in timeline.stages]
    if len(kinds) > 1:
        label_stages(ax, list(zip(kinds, [s.begin for s in timeline.stages], ends, strict=True)))


def hover(timeline: Timeline, label: str, columns: int = 160) -> str:
    """The stacked areas as SVG (HTML): a column of events says, under the mouse, its stage and what lives in GiB.

    label: what screen readers say of it.
    """
    width, height = 720, 240
    names = [name for name in CATEGORIES if any(timeline.bytes.get(name, ()))]
    events = np.array(timeline.events, float)
    x = width * (events - events[0]) / max(1.0, events[-1] - events[0])
    stack = np.array([timeline.bytes[name] for name in names], float).reshape(len(names), len(events)) / GIB
    top = max(float(stack.sum(axis=0).max()) * 1.12, 1e-9)
    drawn, low = [], np.zeros(len(events))
    for name, band in zip(names, stack, strict=True):
        upper, lower = (height * (1 - level / top) for level in (low + band, low))
        there, back = (
            " ".join(f"{a:.0f},{b:.0f}" for a, b in points)
            for points in (zip(x, upper, strict=True), zip(x[::-1], lower[::-1], strict=True))
        )
        drawn.append(f'<polygon points="{there} {back}" fill="{COLORS[name]}"/>')
        low = low + band
    for level in MaxNLocator(4).tick_values(0, top)[1:-1]:
        y = height * (1 - level / top)
        drawn.append(f'<line x2="{width}" y1="{y:.0f}" y2="{y:.0f}" stroke="currentColor" opacity="0.25"/>')
        right = f'x="{width - 3}" y="{y - 3:.0f}" text-anchor="end" class="level"'
        drawn.append(f'<text {right} font-size="12" fill="currentColor">{level:g} GiB</text>')
    begins = sorted({int(i) for i in np.searchsorted(x, np.linspace(0, width, columns))})
    for at, end in zip(begins, [*x[begins[1:]], width], strict=True):
        stage = [s.name for s in timeline.stages if s.begin <= events[at]][-1:] or ["before"]
        alive = [f"{name} {fmt(band[at])}" for name, band in zip(names, stack, strict=True) if band[at] > 0]
        told = "\n".join([*stage, *alive, f"together {fmt(float(stack[:, at].sum()))} GiB"])
        drawn.append(
            f'<rect x="{x[at]:.1f}" width="{end - x[at]:.1f}" height="{height}" class="hover">'
            f"<title>{told}</title></rect>"
        )
    begins_at = np.interp([*(stage.begin for stage in timeline.stages), events[-1]], events, x)
    for stage, left, right in zip(timeline.stages, begins_at, begins_at[1:], strict=False):
        if right - left > 6 * len(stage.name):  # else the mouse tells
            drawn.append(
                f'<text x="{left + 3:.0f}" y="12" font-size="12" fill="currentColor">{stage.name}</text>'
            )
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{COLORS[name]}">■</span> {name}</span>'
        for name in names
    )
    return (
        f'<div class="timeline"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}" style="width:100%">'
        "<style>.hover{fill:transparent}.hover:hover{fill:#0003}</style>" + "".join(drawn) + "</svg>"
        f"<p>{legend}. All together peak at {fmt(float(stack.sum(axis=0).max()))} GiB, as tensors request it.</p></div>"
    )


def _label_bands(
    ax: Axes, events: np.ndarray, names: Sequence[str], stack: np.ndarray, begins: Sequence[float], top: float
) -> None:
    """The name of each category, within one stage of the longest stretch where its band is thick: in the band, or above
    it with a line to it where the band is thinner than the name."""
    line = {"arrowstyle": "-", "lw": 0.7, "shrinkA": 0, "relpos": (0.85, 0)}
    for name, band, upper in zip(names, stack, stack.cumsum(axis=0), strict=True):
        if len(names) < 2 or band.max() < 0.04 * top:
            continue
        thick = np.flatnonzero(band >= 0.4 * band.max())
        stretch = max(np.split(thick, np.flatnonzero(np.diff(thick) > 1) + 1), key=len)
        pieces = [p for p in np.split(stretch, np.searchsorted(events[stretch], begins)) if len(p)]
        inside = band.max() >= 0.08 * top
        piece = max(pieces, key=lambda p: events[p[-1]] - events[p[0]]) if inside else pieces[0]
        at = int(np.searchsorted(events, (events[piece[0]] + events[piece[-1]]) / 2))
        dark = inside and name in ("weights", "gradients", "before recording")
        ax.annotate(
            name, (events[at], upper[at] - band[at] / 2), xytext=(0, 0) if inside else (5, 24), va="center",
            ha="center" if inside else "right", textcoords="offset points", arrowprops=None if inside else line,
            color="white" if dark else "black", fontsize=FONT, zorder=5,
        )  # fmt: skip


def label_stages(ax: Axes, stages: Sequence[tuple[str, float, float]]) -> None:
    """A line where each stage (name, begin, end) begins, and its name above the plot: over its span where it fits,
    else in a row above with a line that leads to it. No name overlaps another."""
    low, high = ax.get_xlim()
    ax.figure.draw_without_rendering()  # lays the panels out
    inches = ax.get_window_extent().width / ax.figure.dpi
    free: list[float] = [low]  # where each row is free again; the lowest holds what fits
    for name, begin, end in stages:
        if begin > low:
            ax.axvline(begin, color=figures.ROOF, ls=(0, (4, 3)), lw=0.8, zorder=4)
        middle, width = (begin + end) / 2, 0.55 * FONT / 72 * (len(name) + 0.5) / inches * (high - low)
        at, row = middle, 0
        if width > end - begin:
            at = min(max(middle, low + width / 2), high - width / 2)
            row = next((r for r in range(1, len(free)) if free[r] <= at - width / 2), len(free))
            free[row : row + 1] = [at + width / 2]
        leads = {"arrowstyle": "-", "lw": 0.7, "shrinkA": 0, "shrinkB": 0} if row else None
        ax.annotate(
            name, (middle, 1), xycoords=("data", "axes fraction"), xytext=(at, 3 + 11 * row), ha="center",
            textcoords=("data", "offset points"), fontsize=FONT, annotation_clip=False, arrowprops=leads,
        )  # fmt: skip


def largest_allocations(timeline: Timeline, stage: str) -> pd.DataFrame:
    """The largest allocations of a stage: MiB of one, how many of this size from the same line of code, their category,
    and the line. The smallest size that the recording lists is left out: it need not list all of it."""
    groups = [(g.bytes / MIB, g.count, g.category, g.code) for g in timeline.largest if g.stage == stage]
    found = pd.DataFrame(groups, columns=["MiB", "count", "category", "code"])
    found = found[found["MiB"] > found["MiB"].min()] if found["MiB"].nunique() > 1 else found
    keys = ["MiB", "code", "category"]
    found = found.groupby(keys, sort=False, as_index=False)["count"].sum()
    return found.sort_values("MiB", ascending=False, kind="stable", ignore_index=True)
