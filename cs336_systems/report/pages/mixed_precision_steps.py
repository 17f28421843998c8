"""What bf16 does to whole models, for the chapter on mixed precision: times, their trend with the size, and memory.

Rows are of kind `step`. Ratios are of rows of one run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.experiments import steps as measured_steps
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.tables import EMPTY, fmt
from cs336_systems.sizes import HANDOUT_SIZES, size

GIB = 2**30
OVER = ("fp32", "tf32")
PARTS = {
    "forward": ("forward_backward", "forward_ms_p50"),
    "backward": ("forward_backward", "backward_ms_p50"),
    "step": ("train_step", "step_ms_p50"),
}
"""Part of a step → the mode whose row has it, and the column."""


def rows(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """The chapter's steps without the A/A repetitions."""
    return chapter.rows(kind="step", repeat=0, **where)


def sizes(chapter: Chapter) -> list[str]:
    """The sizes among the chosen cases, smallest first."""
    return steps.in_order(rows(chapter)["size"])


def speedup(chapter: Chapter, machine: str, name: str, over: str, part: str) -> float | None:
    """How many times faster bf16 is than another dtype in a part of the step; None unless one run has both."""
    mode, column = PARTS[part]
    at = {"machine": machine, "kind": "step", "repeat": 0, "size": name, "mode": mode}
    return chapter.ratio(column, at | {"dtype": over}, at | {"dtype": "bf16"})


# ------------------------------------------------------------------------------------------------ times
def speed_table(chapter: Chapter) -> pd.DataFrame:
    """Times of fp32, TF32 and bf16 over each other: a line for each size."""
    out = []
    for machine in chapter.machines or [""]:
        for name in sizes(chapter):
            line = {"machine": machine, "size": name}
            for over in OVER:
                for part in PARTS:
                    ratio = speedup(chapter, machine, name, over, part)
                    line[f"{figures.label(over)}: {part}"] = EMPTY if ratio is None else f"{fmt(ratio)} ×"
            out.append(line)
    return pd.DataFrame(out)


def product_bounds(chapter: Chapter) -> dict[str, dict[str, float]]:
    """Machine → dtype → how many times faster its best measured product is in bf16."""
    found = {}
    for machine, roofs in steps.found_roofs(chapter).items():
        if "bf16" in roofs.tflops:
            bound = {over: roofs.tflops["bf16"] / roofs.tflops[over] for over in OVER if over in roofs.tflops}
            found[machine] = bound
    return found


def bound_words(chapter: Chapter) -> str:
    """The most that faster products alone can give, from the machine's roofs."""
    said = [
        f"On `{machine}` the best measured product is "
        + " and ".join(
            f"{fmt(x)} times as fast in bf16 as in {figures.label(over)}" for over, x in bound.items()
        )
        for machine, bound in product_bounds(chapter).items()
        if bound
    ]
    if not said:
        return f"How much faster products are in bf16 here: {NOT_MEASURED}."
    return "; ".join(said) + ". A step that were all products would gain as much."


def amdahl(chapter: Chapter, machine: str, name: str, over: str) -> tuple[float, float, float] | None:
    """Share of forward and backward that products need at `over`'s measured roof; the speedup if bf16 shortened these
    products to its own roof and nothing else; the measured speedup. None where a row or a roof is missing.
    """
    roofs = steps.found_roofs(chapter).get(machine)
    by_dtype = {
        dtype: steps.one(
            rows(chapter, machine=machine, size=name, mode="forward_backward", dtype=dtype, status="ok")
        )
        for dtype in (over, "bf16")
    }
    if roofs is None or None in by_dtype.values():
        return None
    slow, fast = by_dtype[over], by_dtype["bf16"]
    floors = [steps.floor_ms(roofs, row) for row in (slow, fast)]
    if slow["run"] != fast["run"] or None in floors:
        return None
    times = [row["forward_ms_p50"] + row["backward_ms_p50"] for row in (slow, fast)]
    return floors[0] / times[0], times[0] / (times[0] - floors[0] + floors[1]), times[0] / times[1]


def trend_table(chapter: Chapter) -> pd.DataFrame:
    """Forward and backward: the share of products, what bf16 products alone would gain, and what was measured."""
    out = []
    for machine in chapter.machines or [""]:
        for name in sizes(chapter):
            line = {"machine": machine, "size": name}
            for over in OVER:
                found = amdahl(chapter, machine, name, over)
                cells = [EMPTY] * 3
                if found is not None:
                    cells = [f"{100 * found[0]:.0f} %", f"{fmt(found[1])} ×", f"{fmt(found[2])} ×"]
                heads = ("products", "products alone", "measured")
                line |= {f"{figures.label(over)}: {head}": c for head, c in zip(heads, cells, strict=True)}
            out.append(line)
    return pd.DataFrame(out)


def speed_figure(chapter: Chapter, machine: str) -> Figure:
    """Speedup of bf16 over fp32 and over TF32 by size; dashed: that of the machine's products."""
    figure, axes = figures.panels(columns=2, height=2.9)
    bounds = product_bounds(chapter).get(machine, {})
    names = sizes(chapter)
    for ax, over in zip(axes[0], OVER, strict=True):
        drawn = False
        for place, part in enumerate(PARTS):
            ratios = [speedup(chapter, machine, name, over, part) for name in names]
            if any(ratios):
                _, color, marker = figures.look(part, place)
                ax.plot(range(len(names)), [np.nan if r is None else r for r in ratios], color=color, marker=marker,
                        label=part, zorder=3)  # fmt: skip
                drawn = True
        if not drawn:
            figures.nothing(ax)
            continue
        ax.set_ylim(bottom=0)
        ax.axhline(1, color="#6b6b6b", lw=0.8)
        figures.roof(ax, bounds.get(over), "products alone")
        ax.set_xticks(range(len(names)), names)
        ax.set_title(f"bf16 over {figures.label(over)}")
    axes[0, 0].set_ylabel("times faster")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def speed_words(chapter: Chapter) -> str:
    """From the smallest to the largest size that was measured: what bf16 gains, if ever more, and where it loses. A
    difference no larger than that of the largest pair of the same case (A/A) counts as none."""
    said = []
    for machine in chapter.machines:
        apart = steps.noise(chapter.measured(machine=machine, kind="step"))
        limit = 1 + (0 if apart.empty else apart.max())
        for over in OVER:
            found = {
                part: {
                    n: x
                    for n in sizes(chapter)
                    if (x := speedup(chapter, machine, n, over, part)) is not None
                }
                for part in PARTS
            }
            found = {part: by_size for part, by_size in found.items() if by_size}
            if not found:
                continue
            grows = [p for p, by_size in found.items() if _grows(list(by_size.values()), limit)]
            less = {(p, n): x for p, by_size in found.items() for n, x in by_size.items() if x < 1}
            slower = [f"{p} of `{n}`" for (p, n), x in less.items() if x * limit < 1]
            even = [f"{p} of `{n}`" for (p, n), x in less.items() if x * limit >= 1]
            words = ", ".join(f"{part} {_path(by_size)}" for part, by_size in found.items())
            words = f"- over {figures.label(over)} on `{machine}`: {words}."
            for text, those in (
                (
                    "It rises from the smallest size to the largest and never falls, beyond what a pair differs by",
                    grows,
                ),
                (f"Slower than {figures.label(over)}", slower),
                ("Slower by no more than a pair differs", even),
            ):
                words += f" {text}: {', '.join(those)}." if those else ""
            said.append(words)
    return "\n".join(said) or f"The speedups of bf16: {NOT_MEASURED}."


def _path(by_size: Mapping[str, float]) -> str:
    """`"1.10 × (small) to 3.20 × (2.7B)"`."""
    names = list(by_size)
    return " to ".join(f"{fmt(by_size[n])} × (`{n}`)" for n in dict.fromkeys((names[0], names[-1])))


def _grows(found: list[float], limit: float) -> bool:
    """Whether the last is more than the first, and none less than the one before, by more than `limit`, a ratio."""
    return found[-1] > found[0] * limit and all(a < b * limit for a, b in itertools.pairwise(found))


def cast_words(chapter: Chapter) -> str:
    """What converting the weights costs the smallest model that was measured, by its launches and by its bytes."""
    said = []
    for machine, roofs in steps.found_roofs(chapter).items():
        found = rows(chapter, machine=machine, mode="forward", dtype="bf16", status="ok")
        if found.empty or roofs.launch_us is None or roofs.tb_per_s is None:
            continue
        row = steps.one(found, size=steps.in_order(found["size"])[0])
        config = size(row["size"])
        weights = 7 * config.num_layers + 1  # q, k, v, output, w1, w2, w3 of each block, and the head
        launches = weights * roofs.launch_us / 1e3
        copies = 3 * accounting.autocast_copy_bytes(config) / roofs.tb_per_s / 1e9  # 4 bytes read, 2 written
        said.append(
            f"On `{machine}`, `{row['size']}`: the {weights} weights need as many launches, {fmt(launches)} ms of the"
            f" host's time at {fmt(roofs.launch_us)} µs each, and {fmt(copies)} ms of the memory's; forward alone takes"
            f" {fmt(row['forward_ms_p50'])} ms in bf16."
        )
    return " ".join(said) or f"What converting the weights costs: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ memory
def memory_prediction_table(batch: int = 4, context_length: int = 512) -> pd.DataFrame:
    """What mixed precision narrows and what it does not, in GiB by the closed forms, for a training step."""
    out = []
    for name in HANDOUT_SIZES:
        config = size(name)
        saved = {
            d: sum(accounting.saved_activation_bytes(config, batch, context_length, d).values())
            for d in ("fp32", "bf16")
        }
        peak = {
            d: measured_steps.predicted_bytes(
                measured_steps.Case(name, context_length, "train_step", d, batch=batch)
            )
            for d in ("fp32", "bf16")
        }
        out.append({
            "size": name,
            "weights, gradients, AdamW": fmt(16 * accounting.num_parameters(config) / GIB),
            "saved, fp32": fmt(saved["fp32"] / GIB),
            "saved, bf16": fmt(saved["bf16"] / GIB),
            "bf16 copies of weights": fmt(accounting.autocast_copy_bytes(config) / GIB),
            "peak, fp32": fmt(peak["fp32"] / GIB),
            "peak, bf16": fmt(peak["bf16"] / GIB),
            "bf16 / fp32": f"{100 * peak['bf16'] / peak['fp32']:.0f} %",
        })  # fmt: skip
    return pd.DataFrame(out)


def memory_table(chapter: Chapter) -> pd.DataFrame:
    """Measured peaks in GiB beside the closed form's, fp32 and bf16, for every size and mode."""
    found, out = rows(chapter), []
    for machine in chapter.machines or [""]:
        for name in sizes(chapter):
            for mode in accounting.MODES:
                line = {"machine": machine, "size": name, "mode": f"`{mode}`"}
                peaks = {}
                for dtype in ("fp32", "bf16"):
                    row = steps.one(found, machine=machine, size=name, mode=mode, dtype=dtype)
                    peaks[dtype] = _peak(row)
                    line[dtype] = _cell(row, peaks[dtype])
                    line[f"{dtype}, closed form"] = fmt(_predicted(row) / GIB) if row is not None else EMPTY
                both = None not in peaks.values()
                line["bf16 / fp32"] = f"{100 * peaks['bf16'] / peaks['fp32']:.0f} %" if both else EMPTY
                out.append(line)
    return pd.DataFrame(out)


def _peak(row: Mapping[str, Any] | None) -> float | None:
    if row is None or row["status"] != "ok" or pd.isna(row["peak_gib"]):
        return None
    return float(row["peak_gib"])


def _cell(row: Mapping[str, Any] | None, peak: float | None) -> str:
    if peak is not None:
        return fmt(peak)
    return EMPTY if row is None or row["status"] == "ok" else steps.word(row["status"])


def _predicted(row: Mapping[str, Any]) -> int:
    """The closed form of the row's peak, in bytes, by the rules of autocast on its machine's device."""
    fields = [field.name for field in dataclasses.fields(measured_steps.Case)]
    case = measured_steps.Case(**{name: row[name] for name in fields})
    return measured_steps.predicted_bytes(case, "cpu" if row["machine"].startswith("cpu-") else "cuda")


def memory_words(chapter: Chapter) -> str:
    """How bf16 changes the peak of each mode, from the smallest to the largest size where both dtypes fit."""
    said = []
    found = chapter.measured(kind="step", repeat=0)
    for machine in chapter.machines:
        for mode in accounting.MODES:
            ratios = {}
            for name in sizes(chapter):
                at = {"machine": machine, "size": name, "mode": mode}
                peaks = [_peak(steps.one(found, **at, dtype=dtype)) for dtype in ("bf16", "fp32")]
                if None not in peaks:
                    ratios[name] = peaks[0] / peaks[1]
            if ratios:
                names = list(dict.fromkeys((next(iter(ratios)), list(ratios)[-1])))
                parts = [f"{100 * ratios[n]:.0f} % (`{n}`)" for n in names]
                said.append(f"- `{mode}` on `{machine}`: {' to '.join(parts)} of fp32's peak.")
    return "\n".join(said) or f"The peaks of memory: {NOT_MEASURED} (they need a CUDA device)."
