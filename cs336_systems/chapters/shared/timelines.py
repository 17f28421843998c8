"""Recorded steps on one scale of time: what computes on each rank, by phases, and what communicates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.measure.trace import overlap
from cs336_systems.report import Chapter, figures
from cs336_systems.store import rows as store

COLORS = {"forward": "#9fd0ee", "backward": "#0072B2", "optimizer": "#8c6d31", "communication": "#D55E00"}


def kept(chapter: Chapter, **where: Any) -> dict[str, list[overlap.Overlap]]:
    """Wrapper → a step of every rank, of the traced rows that are chosen and whose file is there, of the first machine
    that has it."""
    found: dict[str, list[overlap.Overlap]] = {}
    for row in chapter.measured(kind="trace", **where).to_dict("records"):
        table = chapter.experiment
        path = store.file_beside(table, table.case_of(row), row["machine"], chapter.root)
        if path.is_file():
            found.setdefault(row["wrapper"], overlap.from_json(path))
    return found


def timelines_figure(found: Mapping[str, list[overlap.Overlap]], names: Mapping[str, str]) -> Figure:
    """A panel for each wrapper, called by its name, of what `kept` finds: on every rank the kernels by phases, and
    NCCL's."""
    figure, axes = figures.panels(rows=max(1, len(found)), height=1.25, sharex=True)
    if not found:
        figures.nothing(axes[0, 0])
    for ax, (wrapper, ranks) in zip(axes[:, 0], found.items(), strict=False):
        ax.set_title(names[wrapper])
        lanes = [f"rank {n}: {what}" for n in range(len(ranks)) for what in ("kernels", "NCCL")]
        ax.set_yticks([2.3 * n + lane for n in range(len(ranks)) for lane in (0, 1)], lanes, fontsize=8)
        for n, step in enumerate(ranks):
            bars = [("communication", 2.3 * n + 1, step.communication)]
            for name, begin, length in step.phases:
                cut = [(max(s, begin), min(s + w, begin + length)) for s, w in step.compute]
                bars.append((name, 2.3 * n, tuple((s, e - s) for s, e in cut if e > s)))
            for name, lane, spans in bars:
                spans = [(s / 1e6, w / 1e6) for s, w in spans] if name in COLORS else []
                ax.broken_barh(spans, (lane - 0.45, 0.9), facecolor=COLORS.get(name), lw=0, zorder=3)
        ax.set_ylim(2.3 * len(ranks) - 0.7, -0.7)
        ax.grid(axis="y", visible=False)
    length = max((step.length_ms for ranks in found.values() for step in ranks), default=1)
    axes[-1, 0].set(xlabel="time since the start of the step, ms", xlim=(0, length))
    patches = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure
