"""What chapter `torch_compile` shows: eager against compiled for every size, and the fastest step."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.torch_compile import SPEED_CONTEXT
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.tables import EMPTY, fmt
from cs336_systems.sizes import SIZES

ATTENTION = {"reference": "plain", "sdpa": "SDPA", "flash_triton": "ours, Triton"}
COMPILE = {"off": "eager", "default": "compiled", "reduce-overhead": "compiled, CUDA graphs"}
TARGET = 1.1  # tokens/s of ours, compiled, over those of plain attention, compiled
MERE_NOISE = "no more than the same case twice"
VARIANTS = [(a, c) for c in COMPILE for a in ATTENTION]


def _pairs(chapter: Chapter, **where: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Eager and compiled row of each case of the grid of sizes, in the order of sizes."""
    rows = chapter.rows(attention="reference", repeat=0, **where)
    rows = rows[rows["context_length"] != SPEED_CONTEXT]
    keys = ["machine", "size", "context_length", "mode", "dtype"]
    eager = rows[rows["compile"] == "off"].set_index(keys)
    compiled = rows[rows["compile"] == "default"].set_index(keys)
    both = [key for key in eager.index if key in compiled.index]
    order = list(SIZES)
    both.sort(key=lambda key: (key[0], key[4], order.index(key[1]), key[3]))
    whole = {
        "eager": eager.reset_index().to_dict("records"),
        "compiled": compiled.reset_index().to_dict("records"),
    }
    by_key = {name: {tuple(row[k] for k in keys): row for row in found} for name, found in whole.items()}
    return [(by_key["eager"][key], by_key["compiled"][key]) for key in both]


def _ok(*rows: dict[str, Any]) -> bool:
    """Whether the rows were measured, in one run."""
    return all(row["status"] == "ok" for row in rows) and len({row["run"] for row in rows}) == 1


def _ms(row: dict[str, Any]) -> str:
    return fmt(row["step_ms_p50"]) if row["status"] == "ok" else steps.word(row["status"])


def sizes_table(chapter: Chapter) -> pd.DataFrame:
    """Eager and compiled, the gain, the most that it could be, and what compiling costs."""
    roofs = steps.found_roofs(chapter)
    out = []
    for eager, compiled in _pairs(chapter):
        line = {
            "machine": eager["machine"], "size": eager["size"], "mode": eager["mode"], "dtype": eager["dtype"],
            "eager, ms": _ms(eager), "compiled, ms": _ms(compiled),
        }  # fmt: skip
        if _ok(eager, compiled):
            floor = steps.floor_ms(roofs[eager["machine"]], eager)
            gained = eager["step_ms_p50"] - compiled["step_ms_p50"]
            line |= {
                "gain": f"{fmt(eager['step_ms_p50'] / compiled['step_ms_p50'])} ×",
                "at most": EMPTY if floor is None else f"{fmt(eager['step_ms_p50'] / floor)} ×",
                "compiling, s": fmt(compiled["compile_s"]),
                "pays after, steps": f"{compiled['compile_s'] * 1e3 / gained:,.0f}" if gained > 0 else "never",
                "peak eager, GiB": fmt(eager["peak_gib"]),
                "peak compiled, GiB": fmt(compiled["peak_gib"]),
            }  # fmt: skip
        out.append(line)
    columns = [
        "machine", "size", "mode", "dtype", "eager, ms", "compiled, ms", "gain", "at most", "compiling, s",
        "pays after, steps", "peak eager, GiB", "peak compiled, GiB",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


def sizes_figure(chapter: Chapter, machine: str) -> Figure:
    """The gain of compiling over the sizes, a line for each mode."""
    figure, axes = figures.panels(height=2.6)
    ax = axes[0, 0]
    gains: dict[str, dict[str, float]] = {}
    for eager, compiled in _pairs(chapter, machine=machine):
        if _ok(eager, compiled):
            series = f"{eager['mode'].replace('_', ' ')}, {eager['dtype']}"
            gains.setdefault(series, {})[eager["size"]] = eager["step_ms_p50"] / compiled["step_ms_p50"]
    names = steps.in_order(name for of_mode in gains.values() for name in of_mode)
    if not names:
        figures.nothing(ax)
    for place, (series, of_mode) in enumerate(sorted(gains.items())):
        label, color, marker = figures.look(series, place)
        there = [name for name in names if name in of_mode]
        ax.plot(
            [names.index(n) for n in there],
            [of_mode[n] for n in there],
            marker=marker,
            color=color,
            label=label,
        )
    if names:
        ax.axhline(1, color="#6b6b6b", lw=0.8)
        ax.set_xticks(range(len(names)), names)
        ax.legend()
    ax.set(ylabel="eager / compiled, time")
    return figure


def graphs_words(chapter: Chapter) -> str:
    """That the compiled code is what ran: one graph for each case, and nothing compiled again while it was timed."""
    rows = chapter.measured()
    compiled = rows[rows["compile"] != "off"]
    if compiled.empty:
        return f"Compiled steps: {NOT_MEASURED}."
    graphs = sorted({int(g) for g in compiled["graphs"]})
    words = (
        f"In each of the {len(compiled)} compiled cases Dynamo made {' or '.join(map(str, graphs))} graph"
        f"{'s' * (graphs != [1])}, and a recompilation during the timed steps would have been an error."
    )
    replayed = compiled[compiled["compile"] == "reduce-overhead"]
    if len(replayed):
        skipped = int((replayed["cuda_graph_skips"] > 0).sum())
        words += f" CUDA graphs were used in {len(replayed) - skipped} of the {len(replayed)} cases that asked for it."
    return words


def sizes_words(chapter: Chapter) -> str:
    """The range of the gain for forward and for the step, and how it goes with size."""
    said = []
    for machine in chapter.machines:
        for mode in ("forward", "train_step"):
            found = {
                (e["size"], e["dtype"]): e["step_ms_p50"] / c["step_ms_p50"]
                for e, c in _pairs(chapter, machine=machine, mode=mode)
                if _ok(e, c)
            }
            if not found:
                continue
            (small, small_dtype), (large, large_dtype) = max(found, key=found.get), min(found, key=found.get)
            said.append(
                f"- `{machine}`, {mode.replace('_', ' ')}: compiling gains between {fmt(min(found.values()))} ×"
                f" (`{large}`, {large_dtype}) and {fmt(max(found.values()))} × (`{small}`, {small_dtype})."
            )
    return "\n".join(said) or f"What compiling gains: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ the fastest step
def speed_table(chapter: Chapter) -> pd.DataFrame:
    """Training steps at context 1,024 by attention and compilation: time, throughput, and ratios within the run."""
    rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT, repeat=0)
    roofs = steps.found_roofs(chapter)
    out = []
    for key, group in rows.groupby(["machine", "size", "batch"], sort=False):
        machine, size, batch = key
        base = steps.one(group, attention="reference", compile="default")
        for attention, compile in VARIANTS:
            row = steps.one(group, attention=attention, compile=compile)
            if row is None:
                continue
            line = {
                "machine": machine, "size": size, "batch": batch, "attention": ATTENTION[attention],
                "as": COMPILE[compile], "step, ms": _ms(row),
            }  # fmt: skip
            if row["status"] == "ok":
                floor = steps.floor_ms(roofs[machine], row) if machine in roofs else None
                line |= {
                    "tokens/s": fmt(row["tokens_per_s"]),
                    "MFU": EMPTY if pd.isna(row["mfu"]) else f"{100 * row['mfu']:.1f} %",
                    "floor, ms": fmt(floor),
                    "peak, GiB": fmt(row["peak_gib"]),
                    "over plain compiled": EMPTY
                    if base is None or not _ok(row, base)
                    else f"{fmt(base['step_ms_p50'] / row['step_ms_p50'])} ×",
                }
            out.append(line)
    columns = [
        "machine", "size", "batch", "attention", "as", "step, ms", "tokens/s", "MFU", "floor, ms", "peak, GiB",
        "over plain compiled",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


def speed_figure(chapter: Chapter, machine: str) -> Figure:
    """Tokens a second of each variant: a panel for each size and batch."""
    rows = chapter.measured(mode="train_step", context_length=SPEED_CONTEXT, repeat=0, machine=machine)
    shapes = list(rows[["size", "batch"]].drop_duplicates().itertuples(index=False, name=None))
    shapes.sort(key=lambda shape: (list(SIZES).index(shape[0]), shape[1]))
    count = max(1, len(shapes))
    figure, axes = figures.panels(columns=2 if count > 1 else 1, rows=-(-count // 2), height=2.4)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    if not shapes:
        figures.nothing(axes[0, 0])
    colors = {"reference": "reference", "sdpa": "sdpa", "flash_triton": "flash_triton"}
    for ax, (size, batch) in zip(axes.flat, shapes, strict=False):
        part = rows[(rows["size"] == size) & (rows["batch"] == batch)]
        values, series = {}, []
        for attention, compile in VARIANTS:
            row = steps.one(part, attention=attention, compile=compile)
            if row is not None:
                values[f"{ATTENTION[attention]}, {COMPILE[compile].replace('compiled, ', '')}"] = (
                    row["tokens_per_s"] / 1e3
                )
                series.append(colors[attention])
        figures.bars(ax, values, series=series)
        ax.set(title=f"{size}, batch {batch}", xlabel="thousand tokens/s")
    return figure


def target_words(chapter: Chapter) -> str:
    """Ours compiled against plain and SDPA compiled alike, for each shape; which aim is met."""
    said = []
    all_rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT)
    for (machine, size, batch), both in all_rows.groupby(["machine", "size", "batch"], sort=False):
        group, apart = both[both["repeat"] == 0], _apart(both)
        for compile in ("default", "reduce-overhead"):
            ours, plain, sdpa = (
                steps.one(group, attention=a, compile=compile) for a in ("flash_triton", "reference", "sdpa")
            )
            if ours is None or ours["status"] != "ok":
                continue
            words = f"- `{machine}`, `{size}`, batch {batch}: ours {COMPILE[compile]}"
            words += f" {fmt(ours['tokens_per_s'])} tokens/s"
            if plain is not None and _ok(ours, plain):
                ratio = plain["step_ms_p50"] / ours["step_ms_p50"]
                words += f", {fmt(ratio)} × plain alike ({'above' if ratio >= TARGET else 'below'} the aim of {TARGET}"
                words += f"{f'; {MERE_NOISE}' if abs(ratio - 1) <= apart else ''})"
            elif plain is not None and plain["status"] != NOT_MEASURED:
                words += f"; plain alike: {steps.word(plain['status'])}"
            if sdpa is not None and _ok(ours, sdpa):
                ratio = sdpa["step_ms_p50"] / ours["step_ms_p50"]
                words += f", {fmt(ratio)} × SDPA alike"
                words += f" ({MERE_NOISE})" if abs(ratio - 1) <= apart else ""
            said.append(words + ".")
    if not said:
        return f"Ours against the others: {NOT_MEASURED}."
    return "\n".join(said)


def _apart(rows: pd.DataFrame) -> float:
    """How far the case that was measured twice differs from itself, as a share; 0 where there is none."""
    return max(steps.noise(rows[rows["status"] == "ok"]), default=0.0)


def graph_gain_words(chapter: Chapter) -> str:
    """What CUDA graphs give at batch 4, beside the floor of the arithmetic."""
    said = []
    rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT, repeat=0, batch=4)
    roofs = steps.found_roofs(chapter)
    for (machine, size, attention), group in rows.groupby(["machine", "size", "attention"], sort=False):
        plain, graphs = (steps.one(group, compile=c) for c in ("default", "reduce-overhead"))
        if plain is None or graphs is None or not _ok(plain, graphs):
            continue
        floor = steps.floor_ms(roofs[machine], plain)
        said.append(
            f"- `{machine}`, `{size}`, {ATTENTION[attention]}: {fmt(plain['step_ms_p50'])} ms compiled,"
            f" {fmt(graphs['step_ms_p50'])} ms with CUDA graphs"
            f" ({fmt(plain['step_ms_p50'] / graphs['step_ms_p50'])} ×)"
            + ("" if floor is None else f"; the products alone need {fmt(floor)} ms")
            + f"; peak {fmt(plain['peak_gib'])} and {fmt(graphs['peak_gib'])} GiB."
        )
    return "\n".join(said) or f"CUDA graphs: {NOT_MEASURED}."
