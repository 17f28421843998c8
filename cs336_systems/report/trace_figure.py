"""One step of a trace as a timeline: the host's named ranges above, what ran on the streams of the device below."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from cs336_systems.measure import kernels
from cs336_systems.measure.kernels import CLASSES
from cs336_systems.measure.trace_step import HostRange, Step, Stream
from cs336_systems.report import figures
from cs336_systems.report.tables import fmt

# Okabe and Ito's colors, as in `figures`, a wine red of Tol's, and grays
COLORS = {
    kernels.PRODUCT: "#0072B2",
    kernels.ATTENTION: "#009E73",
    kernels.SOFTMAX: "#E69F00",
    kernels.ELEMENTWISE: "#D55E00",
    kernels.REDUCTION: "#CC79A7",
    kernels.CAST: "#56B4E9",
    kernels.FUSED: "#882255",
    kernels.OPTIMIZER: "#8c6d31",
    kernels.INDEX: "#F0E442",
    kernels.MEMORY: "#6b6b6b",
    kernels.COMMUNICATION: figures.ROOF,
    kernels.OTHER: "#bdbdbd",
}
COLUMNS = 640  # of a stream's row: finer than the eye, coarse enough for a small file
MAX_STREAMS, MAX_LEVELS = 5, 4
HOST_INCHES, STREAM_INCHES = 0.24, 0.5
NAME_POINTS, PLOT_POINTS = 7.5, 430  # the size of a range's name, and about the width of the plot
_BAR, _EDGE = "#eef1f4", "#9aa5b1"


def step_figure(step: Step, title: str | None = None) -> Figure:
    """The timeline of one step over its time in ms, at the width of the text.

    The host's ranges are bars, those inside others one row down; a bar that is too short for its name has none. Each
    stream is a row. It is cut into columns, and each column is filled, from below, in proportion to the time that each
    class of kernels took of it: full height is a busy stream, white is idle time, and areas are time, also where
    thousands of kernels are shorter than a column. The legend gives each class's share of all kernel time.
    """
    hosts = _host_rows(step.ranges)
    streams = _stream_rows(step.streams)
    inches = 1.25 + HOST_INCHES * len(hosts) + STREAM_INCHES * max(1, len(streams)) + (0.2 if title else 0)
    with figures.styled():
        figure, ax = plt.subplots(figsize=(figures.WIDTH, inches), layout="constrained")
        length = max(step.length_ns / 1e6, 1e-6)
        ticks: list[tuple[float, str]] = []
        y = 0.0
        for label, ranges in hosts:
            unnamed = [_bar(ax, found, y, length) for found in ranges]
            ticks.append((y + HOST_INCHES / 2, _common(unnamed) if all(unnamed) else label))
            y += HOST_INCHES
        y += 0.08
        for stream in streams:
            _draw_stream(ax, stream, y, length)
            ticks.append((y + STREAM_INCHES / 2, stream.label))
            y += STREAM_INCHES
        if not streams:
            ax.text(
                length / 2, y + STREAM_INCHES / 2, "no kernels", ha="center", va="center", color="#6b6b6b"
            )
            y += STREAM_INCHES
        ax.set_xlim(0, length)
        ax.set_ylim(y, 0)
        ax.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=NAME_POINTS)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel("time since the start of the step, ms")
        if title:
            ax.set_title(title)
        if step.kinds:
            _legend(figure, step)
    return figure


def _legend(figure: Figure, step: Step) -> None:
    total = sum(use.ms for use in step.kinds)
    patches = [Patch(color=COLORS[u.kind], label=f"{u.kind} {_percent(u.ms, total)}") for u in step.kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, handlelength=1.2, columnspacing=1.4)


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return "< 0.1 %" if share < 0.1 else f"{fmt(share, 2)} %"


# -------------------------------------------------------------------------------------------------------- the host
def _host_rows(ranges: Sequence[HostRange]) -> list[tuple[str, list[HostRange]]]:
    """The rows of bars: a thread's levels from the outermost on, the step's own thread first."""
    rows: dict[tuple[int, int], list[HostRange]] = {}
    for found in ranges:
        if found.level < MAX_LEVELS:
            rows.setdefault((found.thread, found.level), []).append(found)
    return [
        (("host" if thread == 0 else f"thread {thread + 1}") if level == 0 else "", row)
        for (thread, level), row in sorted(rows.items())
    ]


def _bar(ax: Axes, found: HostRange, y: float, length: float) -> str:
    """Draws a range; returns its name if there was no room for at least its beginning, else nothing."""
    start, width = found.start_ns / 1e6, found.length_ns / 1e6
    ax.broken_barh(
        [(start, width)], (y + 0.02, HOST_INCHES - 0.04), facecolor=_BAR, edgecolor=_EDGE, lw=0.5, zorder=2
    )
    left, right = max(0.0, start), min(length, start + width)
    if not (text := _fitting(found.name, PLOT_POINTS * (right - left) / length - 5)):
        return found.name
    ax.text(
        (left + right) / 2, y + HOST_INCHES / 2, text, ha="center", va="center", fontsize=NAME_POINTS,
        color=figures.ROOF, zorder=3,
    )  # fmt: skip
    return ""


def _fitting(name: str, points: float) -> str:
    """The name, or its beginning and `…`, as long as it fits; nothing where not even four letters do."""
    for text in (name, *(f"{name[:count]}…" for count in range(min(len(name) - 1, 40), 3, -1))):
        if points > 0 and TextPath((0, 0), text, size=NAME_POINTS).get_extents().width <= points:
            return text
    return ""


def _common(names: Sequence[str]) -> str:
    """What names have in common at their beginning: `attention …`; for a single name the name."""
    names = sorted(set(names))
    if len(names) == 1:
        return names[0] if len(names[0]) <= 20 else f"{names[0][:19]}…"
    columns = zip(*(name.split(" ") for name in names), strict=False)
    words = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    return " ".join([*words, "…"])


# ------------------------------------------------------------------------------------------------------ the device
def _stream_rows(streams: Sequence[Stream]) -> list[Stream]:
    """The busiest streams; where there are too many, the rest of them in one row."""
    if len(streams) <= MAX_STREAMS:
        return list(streams)
    rest = streams[MAX_STREAMS - 1 :]

    def joined(name: str) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(getattr(stream, name) for stream in rest))

    pieces = [joined(name) for name in ("starts_ns", "lengths_ns", "kinds")]
    number, busy = sum(stream.kernels for stream in rest), sum(stream.busy_ms for stream in rest)
    return [*streams[: MAX_STREAMS - 1], Stream(f"{len(rest)} more", number, busy, *pieces)]


def _draw_stream(ax: Axes, stream: Stream, y: float, length: float) -> None:
    edges = np.linspace(0, length, COLUMNS + 1)
    heights = _fill(stream, edges)
    bottom, room = y + STREAM_INCHES - 0.03, STREAM_INCHES - 0.06
    ax.axhline(bottom, color="#d5d5d5", lw=0.5, zorder=1)
    tops = np.cumsum(heights, axis=0)
    for kind, lower, upper in zip(CLASSES, tops - heights, tops, strict=True):
        outlines = _outlines(edges, bottom - room * lower, bottom - room * upper)
        if outlines:
            ax.add_collection(
                PolyCollection(outlines, facecolors=COLORS[kind], linewidths=0, zorder=2), autolim=False
            )


def _fill(stream: Stream, edges: np.ndarray) -> np.ndarray:
    """(classes, columns): which part of each column each class takes; where kernels overlap, the parts add up to 1."""
    starts, lengths = np.array(stream.starts_ns) / 1e6, np.array(stream.lengths_ns) / 1e6
    kinds = np.array(stream.kinds, int)
    out = np.zeros((len(CLASSES), len(edges) - 1))
    for kind in np.unique(kinds):
        mine = kinds == kind
        until = _time_before(edges, starts[mine]) - _time_before(edges, starts[mine] + lengths[mine])
        out[kind] = np.diff(until) / np.diff(edges)
    out = np.clip(out, 0, None)
    return out / np.maximum(out.sum(axis=0), 1)


def _time_before(edges: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """For each edge the sum of the times since those moments that lie before it."""
    moments = np.sort(moments)
    count = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(moments)])
    return count * edges - sums[count]


def _outlines(edges: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> list[np.ndarray]:
    """The outlines of the columns that are not empty; neighbors that are alike, or touch, are one."""
    lower, upper = np.round(lower, 4), np.round(upper, 4)
    there = lower - upper > 1e-3
    out: list[np.ndarray] = []
    changes = np.flatnonzero(np.diff(np.concatenate([[0], there.astype(int), [0]])))
    for first, last in changes.reshape(-1, 2):
        turn = (
            np.flatnonzero((np.diff(lower[first:last]) != 0) | (np.diff(upper[first:last]) != 0)) + 1 + first
        )
        begins = np.concatenate([[first], turn]).astype(int)
        x = np.repeat(edges[np.concatenate([begins, [last]])], 2)[1:-1]
        there_and_back = np.concatenate([np.repeat(upper[begins], 2), np.repeat(lower[begins], 2)[::-1]])
        out.append(np.column_stack([np.concatenate([x, x[::-1]]), there_and_back]))
    return out
