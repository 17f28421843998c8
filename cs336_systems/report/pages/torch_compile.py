"""What chapter `torch_compile` shows: eager against compiled for every size, and the fastest step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.torch_compile import SPEED_CONTEXT
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.tables import EMPTY, distance, fmt, listed, percent, span
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


def _measured_pairs(chapter: Chapter, **where: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Those of `_pairs` that were measured, in one run."""
    return [pair for pair in _pairs(chapter, **where) if _ok(*pair)]


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
    for eager, compiled in _measured_pairs(chapter, machine=machine):
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


def _gains(chapter: Chapter, machine: str, mode: str) -> dict[str, float]:
    """Size → eager time over compiled time, smallest size first."""
    pairs = _measured_pairs(chapter, machine=machine, mode=mode)
    found = {e["size"]: e["step_ms_p50"] / c["step_ms_p50"] for e, c in pairs}
    return {name: found[name] for name in steps.in_order(found)}


def sizes_words(chapter: Chapter) -> str:
    """The range of the gain for forward and for the step, how it goes with size, and whether the predictions held."""
    said = []
    for machine in chapter.machines:
        both = {mode: _gains(chapter, machine, mode) for mode in ("forward", "train_step")}
        for mode, found in both.items():
            if found:
                large, small = min(found, key=found.get), max(found, key=found.get)
                said.append(
                    f"- `{machine}`, {mode.replace('_', ' ')}: compiling gains between {fmt(found[large])} ×"
                    f" (`{large}`) and {fmt(found[small])} × (`{small}`). {_with_size(found)}"
                )
        shared = [name for name in both["forward"] if name in both["train_step"]]
        if shared:
            more = [name for name in shared if both["forward"][name] > both["train_step"][name]]
            said.append(
                f"- `{machine}`: forward alone gains more than the whole step at {len(more)} of {len(shared)} sizes."
            )
    return "\n".join(said) or f"What compiling gains: {NOT_MEASURED}."


def _with_size(found: dict[str, float]) -> str:
    """Whether the gain falls from each size to the next."""
    names = list(found)
    up = [f"`{b}`" for a, b in itertools.pairwise(names) if found[b] >= found[a]]
    if len(names) < 2:
        return ""
    return f"It falls from size to size, but for {listed(up)}." if up else "It falls from size to size."


def host_words(chapter: Chapter) -> str:
    """How eager and compiled time grow from the smallest size to the largest, beside what could make them grow; and
    what follows where the eager time grows more like the launches than like the activations."""
    said, launches = [], []
    for machine in chapter.machines:
        for mode in ("forward", "train_step"):
            pairs = {e["size"]: (e, c) for e, c in _measured_pairs(chapter, machine=machine, mode=mode)}
            names = steps.in_order(pairs)
            if len(names) < 2:
                continue
            small, large = SIZES[names[0]], SIZES[names[-1]]
            first, last = pairs[names[0]], pairs[names[-1]]
            layers = large.num_layers / small.num_layers
            activations = layers * large.d_model / small.d_model
            eager, compiled = (b["step_ms_p50"] / a["step_ms_p50"] for a, b in zip(first, last, strict=True))
            launches.append(eager < math.sqrt(layers * activations) < compiled)
            said.append(
                f"- `{machine}`, {mode.replace('_', ' ')}: from `{names[0]}` to `{names[-1]}` the FLOPs grow"
                f" {fmt(steps.flops(last[0]) / steps.flops(first[0]), 2)}-fold, the activations (layers times width)"
                f" {fmt(activations, 2)}-fold, and the layers, with them the launches, {fmt(layers, 2)}-fold. The eager"
                f" time grows {fmt(eager, 2)}-fold, the compiled time {fmt(compiled, 2)}-fold."
            )
    if launches and all(launches):
        said.append(
            "\nA time that grows like the number of layers is that of their launches: an eager step of a small model"
            " takes as long as the host needs. Compiled, it has fewer of them, and its time grows more like the"
            " activations. So mostly it is the host's time that the compiler takes away here, and the gain depends on"
            " the size only from the one on whose kernels take longer than that."
        )
    return "\n".join(said)


def memory_words(chapter: Chapter) -> str:
    """What share of the eager peak the compiled one is."""
    said = []
    for machine in chapter.machines:
        for mode in ("forward", "train_step"):
            pairs = _measured_pairs(chapter, machine=machine, mode=mode)
            shares = [c["peak_gib"] / e["peak_gib"] for e, c in pairs]
            if shares:
                said.append(
                    f"{span(shares, show=percent)} of the eager one ({mode.replace('_', ' ')}, `{machine}`)"
                )
    return f"The compiled peak is {listed(said)}." if said else ""


def optimizer_words(chapter: Chapter) -> str:
    """How long the update takes after a compiled pass, beside the same code after an eager one."""
    said = []
    for machine in chapter.machines:
        pairs = _measured_pairs(chapter, machine=machine, mode="train_step")
        shares = [c["optimizer_ms_p50"] / e["optimizer_ms_p50"] for e, c in pairs]
        if shares:
            said.append(
                f"AdamW, the same code in both, takes {span(shares)} × as long after a compiled pass as after an eager"
                f" one (`{machine}`). Where the host is late, its launches are in that time."
            )
    return " ".join(said)


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
                words += f"{f'; {MERE_NOISE}' if distance(ratio) <= apart else ''})"
            elif plain is not None and plain["status"] != NOT_MEASURED:
                words += f"; plain alike: {steps.word(plain['status'])}"
            if sdpa is not None and _ok(ours, sdpa):
                ratio = sdpa["step_ms_p50"] / ours["step_ms_p50"]
                words += f", {fmt(ratio)} × SDPA alike"
                words += f" ({MERE_NOISE})" if distance(ratio) <= apart else ""
            said.append(words + ".")
    if not said:
        return f"Ours against the others: {NOT_MEASURED}."
    return "\n".join(said)


def aims_words(chapter: Chapter) -> str:
    """Where the aims are met: at least TARGET over plain attention, and not behind SDPA by more than the noise."""
    said = []
    all_rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT)
    for machine, of_machine in all_rows.groupby("machine", sort=False):
        met, missed = [], []
        for (size, batch), both in of_machine.groupby(["size", "batch"], sort=False):
            group, apart = both[both["repeat"] == 0], _apart(both)
            for compile in ("default", "reduce-overhead"):
                ours, plain, sdpa = (
                    steps.one(group, attention=a, compile=compile)
                    for a in ("flash_triton", "reference", "sdpa")
                )
                if None in (ours, plain, sdpa) or not _ok(ours, plain, sdpa):
                    continue
                fast = plain["step_ms_p50"] / ours["step_ms_p50"] >= TARGET
                fast &= ours["step_ms_p50"] / sdpa["step_ms_p50"] <= 1 + apart
                (met if fast else missed).append(f"`{size}`, batch {batch}, {COMPILE[compile]}")
        said += [f"- `{machine}`, met: {'; '.join(met)}."] * bool(met)
        said += [f"- `{machine}`, missed: {'; '.join(missed)}."] * bool(missed)
        with_graphs = [f"{case}, CUDA graphs" for case in missed]
        if missed and set(with_graphs) <= set(met):
            said.append(
                "\nThe same steps meet it as CUDA graphs. So it is the host that misses it: without a graph it calls"
                " every operator, ours through Python and SDPA through C++ alone."
            )
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
