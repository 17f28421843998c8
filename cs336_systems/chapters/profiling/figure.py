"""Steps of traces as timelines on one scale of time: the host's phases above, what ran on the device below."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.measure.trace import kernels
from cs336_systems.measure.trace.condensed import Step
from cs336_systems.measure.trace.kernels import CLASSES
from cs336_systems.report import figures

# group of classes → its color and classes; neighbors differ in lightness, for readers in gray
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "GEMMs": ("#0072B2", (kernels.PRODUCT,)),
    "elementwise, softmax, reductions": (
        "#E69F00", (kernels.ELEMENTWISE, kernels.SOFTMAX, kernels.REDUCTION, kernels.INDEX)
    ),
    "copies, casts": ("#bfe3f7", (kernels.CAST, kernels.MEMORY)),
    "optimizer": ("#222222", (kernels.OPTIMIZER,)),
    "other": ("#9a9a9a", (kernels.ATTENTION, kernels.FUSED, kernels.COMMUNICATION, kernels.OTHER)),
}  # fmt: skip
COLUMNS = 640  # of the device's row: finer than the eye, coarse enough for a small file
PLOT_POINTS, LETTER_POINTS = 430, 5.5  # about the width of the plot, and of a letter in a bar
_HOST, _DEVICE = (0.0, 0.28), (0.4, 1.0)  # the rows, from top to bottom
_BAR, _EDGE = "#eef1f4", "#9aa5b1"


def steps_figure(steps: Mapping[str, Step]) -> Figure:
    """The timelines of some steps, title → step, below one another over the same time in ms.

    The host's phases are bars. The device's row is cut into columns, and each column is filled, from below, in
    proportion to the time that each group of kernels took of it: full height is a busy device, white is idle time, and
    areas are time, also where thousands of kernels are shorter than a column.
    """
    figure, axes = figures.panels(rows=max(1, len(steps)), height=1.15, sharex=True)
    if not steps:
        figures.nothing(axes[0, 0])
        axes[0, 0].set_axis_off()
        return figure
    length = max(max(step.length_ns for step in steps.values()) / 1e6, 1e-6)
    drawn: set[str] = set()
    for ax, (title, step) in zip(axes[:, 0], steps.items(), strict=True):
        ax.set_title(title)
        _draw_phases(ax, step, length)
        drawn |= _draw_device(ax, step, length)
        ax.set(xlim=(0, length), ylim=(_DEVICE[1] + 0.02, 0))
        ax.set_yticks([sum(_HOST) / 2, sum(_DEVICE) / 2], ["host", "GPU"])
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.spines["left"].set_visible(False)
    axes[-1, 0].set_xlabel("time since the start of the step, ms")
    patches = [Patch(color=color, label=name) for name, (color, _) in GROUPS.items() if name in drawn]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def _draw_phases(ax: Axes, step: Step, length: float) -> None:
    """The ranges right inside the step; those with room for their name have it."""
    top, bottom = _HOST
    for found in step.ranges:
        if found.level != 1:
            continue
        start, width = found.start_ns / 1e6, found.length_ns / 1e6
        bar = [(start, width)], (top, bottom - top)
        ax.broken_barh(*bar, facecolor=_BAR, edgecolor=_EDGE, lw=0.5, zorder=2)
        if PLOT_POINTS * width / length > LETTER_POINTS * len(found.name):
            middle = start + width / 2, (top + bottom) / 2
            ax.text(*middle, found.name, ha="center", va="center", fontsize=8.5, zorder=3)


def _draw_device(ax: Axes, step: Step, length: float) -> set[str]:
    """Fills the device's row; returns the groups that it holds."""
    edges = np.linspace(0, length, COLUMNS + 1)
    heights = _fill(step, edges)
    top, bottom = _DEVICE
    ax.axhline(bottom, color="#d5d5d5", lw=0.5, zorder=1)
    tops = np.cumsum(heights, axis=0)
    drawn = set()
    for (name, (color, _)), *levels in zip(GROUPS.items(), tops - heights, tops, strict=True):
        lower, upper = (np.round(bottom - (bottom - top) * np.append(x, x[-1]), 4) for x in levels)
        there = lower - upper > 1e-3
        if there.any():
            drawn.add(name)
            filled = there | np.roll(there, 1)  # with each column's right edge
            ax.fill_between(edges, lower, upper, filled, step="post", facecolor=color, lw=0, zorder=2)
    return drawn


def _fill(step: Step, edges: np.ndarray) -> np.ndarray:
    """(groups, columns): which part of each column each group takes; where kernels overlap, the parts add up to 1."""
    starts, lengths, kinds = (
        np.array(list(itertools.chain.from_iterable(getattr(stream, name) for stream in step.streams)), float)
        for name in ("starts_ns", "lengths_ns", "kinds")
    )
    out = np.zeros((len(GROUPS), len(edges) - 1))
    for place, (_, classes) in enumerate(GROUPS.values()):
        mine = np.isin(kinds, [CLASSES.index(name) for name in classes])
        begins, ends = starts[mine] / 1e6, (starts[mine] + lengths[mine]) / 1e6
        out[place] = np.diff(_time_before(edges, begins) - _time_before(edges, ends)) / np.diff(edges)
    out = np.clip(out, 0, None)
    return out / np.maximum(out.sum(axis=0), 1)


def _time_before(edges: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """For each edge the sum of the times since those moments that lie before it."""
    moments = np.sort(moments)
    count = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(moments)])
    return count * edges - sums[count]
