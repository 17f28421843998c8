"""Figures in one style: vectors, one fixed color (and marker) for each implementation, a white background
in dark mode too.

Colors are Okabe and Ito's, which color-blind readers tell apart; markers say the same a second time.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cs336_systems.report import narrow
from cs336_systems.report.tables import fmt

# implementation or series → (label, color, marker)
SERIES: dict[str, tuple[str, str, str]] = {
    "flash_triton": ("ours", "#0072B2", "o"),
    "flash_cuda": ("ours, CUDA C++", "#7f3fbf", "*"),
    "flash_torch": ("ours, tiled PyTorch", "#56B4E9", "X"),
    "flash_compiled_backward": ("ours, compiled backward", "#8c6d31", "*"),
    "reference": ("plain PyTorch", "#6b6b6b", "s"),
    "reference_compiled": ("compiled PyTorch", "#D55E00", "D"),
    "sdpa": ("PyTorch SDPA", "#009E73", "^"),
    "sdpa_flash": ("SDPA (flash)", "#009E73", "^"),
    "sdpa_cudnn": ("SDPA (cuDNN)", "#CC79A7", "v"),
    "sdpa_efficient": ("SDPA (efficient)", "#8c6d31", "<"),
    "flex_compiled": ("FlexAttention", "#E69F00", "P"),
    "plain_triton": ("ours, portable", "#004a75", "h"),
    "fa4": ("FlashAttention-4", "#222222", "p"),
    "fa3": ("FlashAttention-3", "#222222", "d"),
    "varlen": ("varlen_attn", "#56B4E9", ">"),
    "bf16": ("bf16", "#0072B2", "o"),
    "fp16": ("fp16", "#56B4E9", "v"),
    "tf32": ("TF32", "#D55E00", "D"),
    "fp32": ("fp32", "#6b6b6b", "s"),
}
_SPARE = [("#0072B2", "o"), ("#D55E00", "D"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "s"),
          ("#6b6b6b", "X")]  # fmt: skip
ROOF = "#222222"
WIDTH = 7.0  # inches; the text of the PDF is a little narrower, so figures are scaled down, never up

STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.pad_inches": 0.08,
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "pdf.fonttype": 42,
}


def use() -> None:
    """Sets the style, and what notebooks show of a figure (`narrow.shown`)."""
    from IPython import get_ipython

    plt.rcParams.update(STYLE)
    if (shell := get_ipython()) is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats()  # none of its own
        shell.display_formatter.mimebundle_formatter.for_type(Figure, narrow.shown)


def look(name: str, position: int = 0) -> tuple[str, str, str]:
    """Label, color and marker of a series: its own, or the spare ones at a position."""
    return SERIES.get(name, (name, *_SPARE[position % len(_SPARE)]))


def label(name: str) -> str:
    """How a series is called in figures and tables."""
    return look(name)[0]


def panels(
    columns: int = 1, rows: int = 1, height: float = 2.8, phone: float = narrow.PHONE, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of the text's width with `rows × columns` axes, returned as a 2-d array; `phone`: inches on a phone."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout="constrained", **options
    )
    narrow.widths[figure] = phone
    return figure, axes


def panel(height: float, **options: Any) -> tuple[Figure, Axes]:
    """A figure of one panel, as `panels` makes it."""
    figure, axes = panels(height=height, **options)
    return figure, axes[0, 0]


def nothing(ax: Axes) -> None:
    """Says in an empty plot why it is empty."""
    ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", va="center", color="#6b6b6b")
    ax.set(xticks=[], yticks=[])


def legend_below(figure: Figure, *axes: Axes) -> None:
    """One legend for all panels, below them: that of the first one that has any lines."""
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        if handles:
            across = -(-len(labels) // -(-len(labels) // 5))  # at most five, in lines of about equal length
            figure.legend(handles, labels, loc="outside lower center", ncols=across)
            return


def lines(
    ax: Axes, frame: pd.DataFrame, x: str, y: str, series: str, log_y: bool = False, binary_x: bool = True
) -> None:
    """One line for each value of `series`, over an axis of powers of two (`binary_x`) or a plain one. Rows without a
    number in `y` are left out: the line ends there."""
    frame = frame[pd.to_numeric(frame[y], errors="coerce").notna()]
    if frame.empty:
        nothing(ax)
        return
    for position, (name, part) in enumerate(frame.groupby(series, sort=False)):
        text, color, marker = look(str(name), position)
        part = part.sort_values(x).astype({x: float, y: float})
        ax.plot(part[x], part[y], color=color, marker=marker, label=text, zorder=3)
    if binary_x:
        ticks = sorted(frame[x].unique())
        ax.set_xscale("log", base=2)
        shown = ticks if len(ticks) <= 7 else ticks[:: -(-len(ticks) // 6)]
        ax.set_xticks(shown, [short(t) for t in shown])
        ax.minorticks_off()
    if log_y:
        ax.set_yscale("log")
        low_y, high_y = ax.get_ylim()
        plain_ticks(ax.yaxis, *((1, 2, 5) if high_y / low_y < 100 else ()))
    else:
        ax.set_ylim(bottom=0)


def plain_ticks(axis: Axis, *multiples: float) -> None:
    """Numbers instead of powers on a logarithmic axis, at these multiples of the powers of ten (if any are named)."""
    if multiples:
        axis.set_major_locator(LogLocator(subs=multiples))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: fmt(value, 1)))


def short(number: float) -> str:
    """A power of two as people say it: 16384 → `16k`, 2^30 → `1G`."""
    number = float(number)
    for unit, size in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{fmt(number / size)}{unit}" if number % size else f"{int(number // size)}{unit}"
    return fmt(int(number) if number.is_integer() else number)


def roof(ax: Axes, value: float | None, text: str) -> None:
    """A dashed line at the most that the machine can do; nothing where that is not measured."""
    if value is None:
        return
    ax.axhline(value, color=ROOF, ls=(0, (5, 3)), lw=1.1, zorder=2)
    ax.annotate(
        text, (0.0, value), xycoords=("axes fraction", "data"), xytext=(6, 2), textcoords="offset points",
        fontsize=8, color=ROOF,
    )  # fmt: skip
    if ax.get_yscale() == "linear":
        ax.set_ylim(0, max(ax.get_ylim()[1], value * 1.12))


def heat(
    ax: Axes, table: pd.DataFrame, limit: float = 8.0, words: pd.DataFrame | None = None, digits: int = 2
) -> None:
    """A map of ratios with the number in each cell: blue above 1, red below it, on a logarithmic scale up to `limit`;
    with a limit below 1 blue is below it, for ratios of which the small ones are good.

    `table` has one row for each y value and one column for each x value; `words` (of the same shape) says
    what stands in a cell without a number.
    """
    values = table.to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        strength = np.clip(np.log(values) / np.log(limit), -1, 1)
    colors = plt.get_cmap("RdBu")(0.5 + 0.42 * np.nan_to_num(strength))
    colors[np.isnan(values)] = (0.93, 0.93, 0.93, 1)
    ax.imshow(colors, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text = words.iloc[i, j] if np.isnan(value) and words is not None else fmt(float(value), digits)
        color = "white" if abs(strength[i, j]) > 0.62 else "#222222"
        ax.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
    ax.set_xticks(range(values.shape[1]), [short(c) for c in table.columns])
    ax.set_yticks(range(values.shape[0]), [str(r) for r in table.index])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def only_html(text: str) -> None:
    """Shows HTML on web pages and in JupyterLab; nothing in print."""
    from IPython.display import display

    display({"text/html": text, "text/latex": "", "text/plain": "(on the web page)"}, raw=True)
