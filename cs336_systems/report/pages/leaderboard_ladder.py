"""What chapter `leaderboard` shows of its ladders: steps with their rows, tables, the figure."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.ladder import steps
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages.leaderboard import PARTS
from cs336_systems.report.tables import EMPTY, fmt

_COLORS = {"own": "#0072B2", "production": "#004a75", "hopper": "#7a3fb5"}
_OF_A_STEP = (
    "ms_p20", "ms_p50", "ms_p80", "tflops", "registers", "spill_bytes", "shared_kib", "sm_mhz", "run",
)  # fmt: skip


def measured(chapter: Chapter, machine: str, part: str) -> pd.DataFrame:
    """The steps of one pass in their order with their rows: `name`, `base`, `title`, `predicted_ms`, `ms`, `tflops`,
    `gain` (time of the base over that of the step; NaN unless both ran in one run), `gain_low` and `gain_high` (the
    same of the ends of what lies between their 20th and 80th percentiles), and the row's other columns."""
    rows = chapter.rows(machine=machine, kind="ladder", part=part, repeat=0).set_index("impl")
    out = []
    for step in steps.of_part(part):
        row = rows.loc[step.name] if step.name in rows.index else None
        line: dict[str, Any] = {"name": step.name, "base": step.base, "title": step.title, "why": step.why}
        line["predicted_ms"] = steps.predicted_ms(step)
        line["status"] = NOT_MEASURED if row is None else row["status"]
        ok = line["status"] == "ok"
        for column in _OF_A_STEP:
            line[column] = row[column] if ok else math.nan
        out.append(line)
    frame = pd.DataFrame(out).set_index("name", drop=False)
    gains = []
    for line in out:
        base = frame.loc[line["base"]] if line["base"] else None
        both = base is not None and base["status"] == line["status"] == "ok" and base["run"] == line["run"]
        ends = (("ms_p50", "ms_p50"), ("ms_p20", "ms_p80"), ("ms_p80", "ms_p20"))
        gains.append([base[over] / line[under] if both else math.nan for over, under in ends])
    frame[["gain", "gain_low", "gain_high"]] = gains
    return frame


def table(chapter: Chapter, machine: str, part: str) -> pd.DataFrame:
    """The ladder of one pass as it is printed."""
    found = measured(chapter, machine, part)
    number = {name: place for place, name in enumerate(found["name"], 1)}
    out = []
    for row in found.itertuples():
        ok = row.status == "ok"
        out.append({
            "#": number[row.name], "step": _in_a_table(row.title),
            "expected, ms": fmt(row.predicted_ms),
            "ms": fmt(row.ms_p50) if ok else page.short_status(row.status),
            "TFLOP/s": fmt(row.tflops) if ok else EMPTY,
            "gain": EMPTY if math.isnan(row.gain) else f"{fmt(row.gain)} ×",
            "regs": EMPTY if not ok or math.isnan(row.registers) else int(row.registers),
            "spill": EMPTY if not ok or math.isnan(row.spill_bytes) else int(row.spill_bytes),
            "shared": fmt(row.shared_kib) if ok else EMPTY,
        })  # fmt: skip
    return pd.DataFrame(out)


def _in_a_table(title: str) -> str:
    """A step's title without names of code, which do not break into lines."""
    return re.sub(r" \(`\w+`\)", "", title)


def expectations(part: str) -> pd.DataFrame:
    """Why each step of a pass was expected to cost what it was: no rows needed."""
    found = steps.of_part(part)
    number = {step.name: place for place, step in enumerate(found, 1)}
    return pd.DataFrame([
        {
            "#": number[s.name], "step": _in_a_table(s.title), "from": number.get(s.base, EMPTY),
            "expected, ms": fmt(steps.predicted_ms(s)), "because": s.why,
        }
        for s in found
    ])  # fmt: skip


def figure(chapter: Chapter, machine: str) -> Figure:
    """Both ladders: a bar for each step's time with its rate beside it, a mark where it was expected, the floor as a
    line."""
    found = {part: measured(chapter, machine, part) for part in PARTS}
    longest = max(len(frame) for frame in found.values())
    drawn, axes = figures.panels(rows=2, height=0.8 + 0.235 * longest)
    for ax, (part, frame) in zip(axes[:, 0], found.items(), strict=True):
        ax.set_title(part)
        shown = frame[["ms_p50", "predicted_ms"]].max().max()
        for place, row in enumerate(frame.itertuples()):
            kind = "hopper" if "hopper" in row.name else "production" if "production" in row.name else "own"
            ok = row.status == "ok"
            text = f" {fmt(row.ms_p50)} ms, {fmt(row.tflops)} TFLOP/s" if ok else f" {_why(row.status)}"
            if ok:
                ax.barh(place, row.ms_p50, color=_COLORS[kind], height=0.62, zorder=2)
            expected = ax.plot(
                [row.predicted_ms] * 2, [place - 0.4, place + 0.4], color="#D55E00", lw=2, zorder=3
            )
            end = max(row.ms_p50 if ok else 0, row.predicted_ms)
            ax.annotate(
                text, (end, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
            )
        floor = max(page.limits(part, steps.SMS, steps.SM_MHZ).values())
        line = ax.axvline(floor, color=figures.ROOF, ls=(0, (5, 3)), lw=1.1, zorder=1)
        titles = [f"{place}  {title}".replace("`", "") for place, title in enumerate(frame["title"], 1)]
        ax.set_yticks(range(len(frame)), titles, fontsize=8)
        ax.set_xlim(0, shown * 1.65)  # room for the text beside the longest bar
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    axes[1, 0].set_xlabel("ms")
    names = ["expected", "least time of the slowest unit"]
    drawn.legend([expected[0], line], names, loc="outside lower center", ncols=2)
    return drawn


def _why(status: str) -> str:
    if status.startswith("skipped"):
        return "skipped"
    return page.status_word(status).split(":")[0]
