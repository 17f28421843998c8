"""The figures of chapter `ddp`: phases of a step, overhead by bucket size, communication beside computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.experiments.ddp import PHASES
from cs336_systems.measure.trace_overlap import Overlap
from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages.ddp import (
    NAMES,
    contexts,
    efficiency,
    fit,
    ok,
    recorded,
    settings,
    side_by_side,
    sweep,
    timed,
    way,
)
from cs336_systems.report.pages.ddp_pace import places
from cs336_systems.report.tables import fmt

COLORS = {"forward": "#56B4E9", "backward": "#0072B2", "synchronization": "#D55E00", "optimizer": "#8c6d31"}
_SCALING = ("none", "in_place", "bucketed", "torch", "naive")
_OTHER, _VISIBLE = "#9aa5b1", 0.005


def phase_figure(chapter: Chapter, machine: str) -> Figure:
    """The median step of each way, split into its phases, and its p20–p80 range: a panel for each context."""
    rows = timed(chapter, machine=machine)
    lengths = contexts(rows) or [512]
    ways = list(dict.fromkeys(way(row) for row in rows))
    figure, axes = figures.panels(columns=len(lengths), height=1.2 + 0.24 * max(6, len(ways)), sharey=True)
    for ax, context in zip(axes[0], lengths, strict=True):
        ax.set(title=f"context {context}", xlabel="ms")
        found = {way(r): r for r in rows if r["context_length"] == context and ok(r)}
        if not found:
            figures.nothing(ax)
            continue
        for place, name in enumerate(ways):
            if name not in found:
                ax.annotate("not measured", (0, place), va="center", fontsize=7.5)
                continue
            row, left = found[name], 0.0
            for phase in PHASES:
                width = float(row[f"{phase}_ms_p50"])
                ax.barh(place, width, left=left, color=COLORS[phase], height=0.7, zorder=3)
                left += width
            step = float(row["step_ms_p50"])
            low, high = float(row["step_ms_p20"]), float(row["step_ms_p80"])
            ax.plot([step, step], [place - 0.4, place + 0.4], color=figures.ROOF, lw=1.2, zorder=5)
            ax.plot([low, high], [place, place], color=figures.ROOF, lw=0.8, zorder=5)
            ax.annotate(
                fmt(step), (max(high, left), place), xytext=(3, 0), textcoords="offset points", va="center",
                fontsize=7.5, bbox={"facecolor": "white", "lw": 0, "pad": 0.6}, zorder=4,
            )  # fmt: skip
        base = found.get(NAMES["none"])
        if base is not None:
            ax.axvline(float(base["step_ms_p50"]), color=figures.ROOF, ls=(0, (5, 3)), lw=0.9, zorder=2)
        ax.margins(x=0.2)
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(range(len(ways)), ways)
    axes[0, 0].set_ylim(len(ways) - 0.4, -0.6)
    patches = [Patch(color=color, label=phase) for phase, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def scaling_figure(chapter: Chapter) -> Figure:
    """Weak scaling by the number of ranks, with the p20–p80 ranges of steps; a panel for each context.

    Of each way the best size of buckets that was measured with every number of ranks.
    """
    rows = [r for r in timed(chapter, _SCALING, world_size="all") if r["world_size"] > 1]
    lengths = contexts(rows) or [512]
    figure, axes = figures.panels(columns=len(lengths), height=2.6, sharey=True)
    numbers = sorted({int(r["world_size"]) for r in rows if ok(r)})
    dtype = settings(chapter)["dtype"]
    uneven = {
        p.context for p in places(chapter, "all") if p.dtype == dtype and p.world_size > 1 and not p.even
    }
    for ax, context in zip(axes[0], lengths, strict=True):
        common = side_by_side(chapter, context)
        found: dict[str, dict[int, tuple[float, dict[str, Any]]]] = {}
        for row in rows:
            if row["context_length"] != context or (row["wrapper"], row["bucket_mb"]) not in common:
                continue
            share = efficiency(chapter, row)
            if share is None:
                continue
            of_way, n = found.setdefault(row["wrapper"], {}), int(row["world_size"])
            of_way[n] = max(of_way.get(n, (0.0, row)), (share, row), key=lambda pair: pair[0])
        ax.set(title=f"context {context}{' (uneven)' if context in uneven else ''}")
        if not found:
            figures.nothing(ax)
            continue
        for place, wrapper in enumerate(_SCALING):
            _, color, marker = figures.look(wrapper, place)
            there = found.get(wrapper, {})
            xs = [numbers.index(n) + 0.07 * (place - 2) for n in sorted(there)]
            shares, steps = zip(*(there[n] for n in sorted(there)), strict=True) if there else ((), ())
            ax.plot(xs, [100 * s for s in shares], marker=marker, color=color, label=NAMES[wrapper])
            ends = [
                [100 * s * r["step_ms_p50"] / r[f"step_ms_{q}"] for s, r in zip(shares, steps, strict=True)]
                for q in ("p80", "p20")
            ]
            ax.vlines(xs, *ends, color=color, lw=0.9)
        ax.axhline(100, color=figures.ROOF, lw=0.8)
        ax.set_xticks(range(len(numbers)), [f"{n} ranks" for n in numbers])
        ax.set_xlim(-0.4, len(numbers) - 0.6)
    axes[0, 0].set_ylabel("of perfect scaling, %")
    figures.legend_below(figure, *axes[0])
    return figure


def overlap_figure(chapter: Chapter, machine: str, after: bool) -> Figure:
    """One step of some ways, all ranks: what computes and what communicates, on one axis of time.

    after: the ways that communicate after the backward pass; otherwise those that do so during it.
    """
    late = (NAMES["naive"], NAMES["flat"])
    steps = {
        name: ranks for name, ranks in recorded(chapter, machine).items()
        if (name in late) == after and name != NAMES["torch"] and not name.startswith(NAMES["in_place"])
    }  # fmt: skip
    rows = max(1, sum(len(ranks) for ranks in steps.values()))
    figure, axes = figures.panels(
        rows=max(1, len(steps)), height=max(1.6, (0.9 + 0.55 * rows) / max(1, len(steps))), sharex=True
    )
    if not steps:
        figures.nothing(axes[0, 0])
    for ax, (name, ranks) in zip(axes[:, 0], steps.items(), strict=False):
        _lanes(ax, ranks)
        ax.set_title(name)
    axes[-1, 0].set_xlabel("time since the start of the step, ms")
    named = {
        **{phase: COLORS[phase] for phase in PHASES if phase != "synchronization"},
        "communication": COLORS["synchronization"],
    }
    if any(_between(step) > _VISIBLE * step.length_ms for ranks in steps.values() for step in ranks):
        named["other kernels"] = _OTHER
    figure.legend(
        handles=[Patch(color=c, label=n) for n, c in named.items()],
        loc="outside lower center", ncols=len(named),
    )  # fmt: skip
    return figure


def _lanes(ax: Axes, ranks: Sequence[Overlap]) -> None:
    """Two lanes a rank: kernels that compute, in the color of the phase that launched them; and communication."""
    ticks = []
    for number, step in enumerate(ranks):
        y = 2.4 * number
        for name, start, length in _colored(step):
            ax.broken_barh(
                [(start / 1e6, length / 1e6)], (y, 0.9), facecolor=COLORS.get(name, _OTHER), lw=0, zorder=3
            )
        sent = [(start / 1e6, length / 1e6) for start, length in step.communication]
        ax.broken_barh(sent, (y + 1, 0.9), facecolor=COLORS["synchronization"], lw=0, zorder=3)
        ticks += [(y + 0.45, f"rank {number}, computing"), (y + 1.45, "communicating")]
    ax.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=7.5)
    ax.set_ylim(2.4 * len(ranks) - 0.3, -0.3)
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def _between(step: Overlap) -> float:
    """The time in ms that belongs to no phase with a color of its own, as of kernels that copy before sending."""
    return sum(length for name, _, length in _colored(step) if name not in COLORS) / 1e6


def _colored(step: Overlap) -> list[tuple[str, int, int]]:
    """The intervals of computing, cut where one phase's kernels end and another's begin."""
    out = []
    for start, length in step.compute:
        inside = [
            (n, s, s + w)
            for n, s, w in step.phases
            if n != "synchronization" and s < start + length and s + w > start
        ]
        out += [(n, max(s, start), min(e, start + length) - max(s, start)) for n, s, e in inside]
        if not inside:
            out.append(("", start, length))
    return out


def bucket_figure(chapter: Chapter, machine: str) -> Figure:
    """Exposed communication by the size of buckets, measured and fitted: a panel for each context."""
    lengths = contexts(timed(chapter, ("bucketed",))) or [512]
    figure, axes = figures.panels(columns=len(lengths), height=3.1)
    for ax, context in zip(axes[0], lengths, strict=True):
        rows = sweep(chapter, machine, context)[::-1]
        ax.set(title=f"context {context}", xlabel="limit of a bucket, MB\n(all-reduces of a step)")
        if not rows:
            figures.nothing(ax)
            continue
        place = {row["bucket_mb"]: x for x, row in enumerate(rows)}
        for constant, label, style in ((False, "model", ":"), (True, "with constant", "-")):
            found = fit(chapter, rows, constant)
            if found is not None:
                fitted = [found.overhead_s(row["collectives"]) * 1e3 for row in rows]
                ax.plot(list(place.values()), fitted, style, color="#6b6b6b", lw=1.2, label=label, zorder=2)
        _points(ax, rows, place, -0.08, "o", "#0072B2", "bucketed")
        other = [r for r in sweep(chapter, machine, context, "in_place") if r["bucket_mb"] in place]
        _points(ax, other, place, 0.08, "D", "#009E73", "in place")
        ax.axhline(0, color=figures.ROOF, lw=0.8, zorder=1)
        ax.set_xticks(
            list(place.values()),
            [f"{row['bucket_mb']:g}\n({round(row['collectives'])})" for row in rows], fontsize=7,
        )  # fmt: skip
        ax.margins(x=0.08)
    axes[0, 0].set_ylabel("exposed communication, ms")
    handles, names = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return figure


def _points(
    ax: Axes, rows: Sequence[Mapping[str, Any]], place: Mapping[float, int], aside: float, marker: str,
    color: str, label: str,
) -> None:  # fmt: skip
    """The exposed times of a sweep, each with the p20–p80 range of its step."""
    if not rows:
        return
    low, middle, high = (
        np.array([row[f"step_ms_{p}"] for row in rows], float) for p in ("p20", "p50", "p80")
    )
    ax.errorbar(
        [place[row["bucket_mb"]] + aside for row in rows], [row["exposed_ms"] for row in rows],
        yerr=[middle - low, high - middle], fmt=marker, color=color, capsize=2, lw=0.9, label=label, zorder=3,
    )  # fmt: skip
