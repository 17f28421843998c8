"""A figure's second layout, for a phone: panels below one another, a legend of more lines, names that break."""

from __future__ import annotations

import itertools
import os
import re
import textwrap
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from cs336_systems.report.chapter import BUILD_VARIABLE

PHONE = 3.4  # inches, 326 of CSS's pixels: less than the column of nearly every phone
# of figures by `figures.panels`; wider ones scroll
widths: WeakKeyDictionary[Figure, float] = WeakKeyDictionary()
_BEGIN, _END = '<metadata id="narrow">', "</metadata></svg>"


def shown(figure: Figure) -> dict[str, str]:
    """What a notebook shows of a figure, by MIME type: SVG for the screen, PDF for LaTeX. While the book is built,
    one of `figures.panels` is laid out anew after that, and the SVG carries its second layout."""
    from IPython.core.pylabtools import print_figure

    svg, pdf = print_figure(figure, "svg"), print_figure(figure, "pdf", base64=True)
    if os.environ.get(BUILD_VARIABLE) == "1" and figure in widths:
        narrow(figure)
        other = print_figure(figure, "svg", bbox_inches=None)
        svg = svg.removesuffix("</svg>\n") + _BEGIN + other[other.index("<svg") :] + _END
    return {"image/svg+xml": svg, "application/pdf": pdf}


def parted(svg: str) -> tuple[str, str]:
    """An SVG without the second layout that it carries, and that layout's; "" where it carries none."""
    first, _, other = svg.partition(_BEGIN)
    return (first + "</svg>", other.removesuffix(_END)) if other else (svg, "")


def narrow(figure: Figure) -> None:
    """Lays a figure of `figures.panels`, once drawn, out anew, in place: as wide as `widths` says, with as many
    of its panels side by side as then are about as wide as they were, one at least."""
    width = widths[figure]
    panels = [ax for ax in figure.axes if ax.get_subplotspec() is not None]
    across = panels[0].get_gridspec().ncols
    columns = max(1, round(across * width / figure.get_figwidth()))
    for at, ax in enumerate(panels):
        if across > 1:
            _own_labels(ax, at % columns == 0)
        if not any(name.get_rotation() for name in ax.get_xticklabels()):
            _break(ax.xaxis, 40 // max(1, len(ax.get_xticks())))
        _break(ax.yaxis, 24)
        for text in {*ax.get_children(), ax.xaxis.label} - {*ax.texts}:
            if isinstance(text, Text):  # a title, or the label
                text.set_wrap(True)
    heights = [_height(ax) for ax in panels]
    rows = [max(heights[at : at + columns]) for at in range(0, len(panels), columns)]
    cells = figure.add_gridspec(len(rows), columns, height_ratios=rows)
    for at, ax in enumerate(panels):
        ax.set_subplotspec(cells[at])
    figure.set_size_inches(width, sum(rows))
    inside = [panels[0].get_legend()] if len(panels) == 1 else []  # would cover more than it did
    for legend in filter(None, [*figure.legends, *inside]):
        _below(figure, legend)


def _own_labels(ax: Axes, leftmost: bool) -> None:
    """Shows below a panel, and beside the leftmost, what stood only at another one that shares its axis."""
    ax.tick_params(labelbottom=True)
    if not ax.get_xlabel():
        ax.set_xlabel(max(other.get_xlabel() for other in ax.get_shared_x_axes().get_siblings(ax)))
    if leftmost:
        ax.tick_params(labelleft=True)
        ax.set_ylabel(max(other.get_ylabel() for other in ax.get_shared_y_axes().get_siblings(ax)))


def _break(axis: Axis, letters: int) -> None:
    """Breaks the names beside an axis, if it has names, after so many letters at most: after commas where that does."""
    plain = axis.get_major_formatter()

    def broken(value: float, place: int | None) -> str:
        lines = plain(value, place).split("\n")
        for at, line in enumerate(lines):
            if max(map(len, line.split(", "))) < letters:
                line = re.sub("(?<!,) ", "\N{NO-BREAK SPACE}", line)
            lines[at] = textwrap.fill(line, letters, break_long_words=False)
        return "\n".join(lines)

    if isinstance(plain, FuncFormatter):
        axis.set_major_formatter(broken)


def _height(ax: Axes) -> float:
    """Inches of a panel and what is around it: as before, more where names in several lines need it."""
    figure, spec, names = ax.figure, ax.get_subplotspec(), ax.get_yticklabels()
    ratios = spec.get_gridspec().get_height_ratios()
    height = figure.get_figheight() * sum(ratios[row] for row in spec.rowspan) / sum(ratios)
    lines = [1 + name.get_text().count("\n") for name in names]
    if len(lines) < 2 or max(lines) == 1:
        return height
    apart = max(a + b for a, b in itertools.pairwise(lines)) / 2  # lines from one name to the next
    step = min(b - a for a, b in itertools.pairwise(sorted(ax.get_yticks())))
    needed = abs(np.diff(ax.get_ylim()).item()) / step * apart * 1.25 * names[0].get_fontsize() / 72
    return height + max(0.0, needed - ax.get_window_extent().height / figure.dpi)


def _below(figure: Figure, legend: Legend) -> None:
    """Moves a legend below the panels, in as few lines as there is room for."""
    handles, names = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
    legend.remove()
    for lines in range(1, len(names) + 1):
        legend = figure.legend(handles, names, loc="outside lower center", ncols=-(-len(names) // lines))
        box = legend.get_window_extent()
        if lines == len(names) or box.width < figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
            return
        legend.remove()
