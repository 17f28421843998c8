"""What chapter `torch_compile` shows of the fastest training step: attention, compilation and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.torch_compile import SPEED_CONTEXT
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.pages.torch_compile import MERE_NOISE, noise, same_run, step_ms
from cs336_systems.report.tables import EMPTY, distance, fmt, listed
from cs336_systems.sizes import SIZES

ATTENTION = {"reference": "plain", "sdpa": "SDPA", "flash_triton": "ours, Triton"}
COMPILE = {"off": "eager", "default": "compiled", "reduce-overhead": "compiled, CUDA graphs"}
TARGET = 1.1  # tokens/s of ours, compiled, over those of plain attention, compiled
VARIANTS = [(a, c) for c in COMPILE for a in ATTENTION]


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
                "as": COMPILE[compile], "step, ms": step_ms(row),
            }  # fmt: skip
            if row["status"] == "ok":
                floor = steps.floor_ms(roofs[machine], row) if machine in roofs else None
                line |= {
                    "tokens/s": fmt(row["tokens_per_s"]),
                    "MFU": EMPTY if pd.isna(row["mfu"]) else f"{100 * row['mfu']:.1f} %",
                    "floor, ms": fmt(floor),
                    "peak, GiB": fmt(row["peak_gib"]),
                    "over plain compiled": EMPTY
                    if base is None or not same_run(row, base)
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
    for ax, (size, batch) in zip(axes.flat, shapes, strict=False):
        part = rows[(rows["size"] == size) & (rows["batch"] == batch)]
        values, series = {}, []
        for attention, compile in VARIANTS:
            row = steps.one(part, attention=attention, compile=compile)
            if row is not None:
                values[f"{ATTENTION[attention]}, {COMPILE[compile].replace('compiled, ', '')}"] = (
                    row["tokens_per_s"] / 1e3
                )
                series.append(attention)
        figures.bars(ax, values, series=series)
        ax.set(title=f"{size}, batch {batch}", xlabel="thousand tokens/s")
    return figure


def _alike(rows: pd.DataFrame, compile: str) -> list[dict[str, Any] | None]:
    """The training steps of a workload that are compiled alike, of plain attention, SDPA and ours (the order of
    ATTENTION); None where one has no row."""
    first = rows[rows["repeat"] == 0]
    return [steps.one(first, attention=attention, compile=compile) for attention in ATTENTION]


def target_words(chapter: Chapter) -> str:
    """Ours compiled against plain and SDPA compiled alike, for each shape; which aim is met."""
    said = []
    all_rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT)
    for (machine, size, batch), both in all_rows.groupby(["machine", "size", "batch"], sort=False):
        for compile in ("default", "reduce-overhead"):
            plain, sdpa, ours = _alike(both, compile)
            if ours is None or ours["status"] != "ok":
                continue
            words = f"- `{machine}`, `{size}`, batch {batch}: ours {COMPILE[compile]}"
            words += f" {fmt(ours['tokens_per_s'])} tokens/s"
            if plain is not None and same_run(ours, plain):
                ratio = plain["step_ms_p50"] / ours["step_ms_p50"]
                apart = noise(both, ours, plain)
                words += f", {fmt(ratio)} × plain alike ({'above' if ratio >= TARGET else 'below'} the aim of {TARGET}"
                words += f" by {MERE_NOISE}" if distance(ratio / TARGET) <= apart else ""
                words += f"; {MERE_NOISE})" if distance(ratio) <= apart else ")"
            elif plain is not None and plain["status"] != NOT_MEASURED:
                words += f"; plain alike: {steps.word(plain['status'])}"
            if sdpa is not None and same_run(ours, sdpa):
                ratio = sdpa["step_ms_p50"] / ours["step_ms_p50"]
                words += f", {fmt(ratio)} × SDPA alike"
                words += f" ({MERE_NOISE})" if distance(ratio) <= noise(both, ours, sdpa) else ""
            said.append(words + ".")
    if not said:
        return f"Ours against the others: {NOT_MEASURED}."
    return "\n".join(said)


def aims_words(chapter: Chapter) -> str:
    """Where the aims are met: at least TARGET over plain attention, and not behind SDPA by more than the noise. Not
    decided: the first differs from its aim by no more than the noise."""
    said = []
    all_rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT)
    for machine, of_machine in all_rows.groupby("machine", sort=False):
        met, missed, unclear, behind, sdpa_fast = [], [], [], [], set()
        for (size, batch), both in of_machine.groupby(["size", "batch"], sort=False):
            for compile in ("default", "reduce-overhead"):
                plain, sdpa, ours = _alike(both, compile)
                if None in (ours, plain, sdpa) or not same_run(ours, plain, sdpa):
                    continue
                case = f"`{size}`, batch {batch}, {COMPILE[compile]}"
                near = ours["step_ms_p50"] / sdpa["step_ms_p50"] <= 1 + noise(both, ours, sdpa)
                gain = plain["step_ms_p50"] / ours["step_ms_p50"]
                if near and distance(gain / TARGET) <= noise(both, ours, plain):
                    unclear.append(case)
                else:
                    (met if near and gain >= TARGET else missed).append(case)
                behind += [case] * (not near)
                sdpa_fast |= {case} if plain["step_ms_p50"] / sdpa["step_ms_p50"] >= TARGET else set()
        said += [f"- `{machine}`, met: {'; '.join(met)}."] * bool(met)
        said += [f"- `{machine}`, missed: {'; '.join(missed)}."] * bool(missed)
        said += [
            f"- `{machine}`, not decided, since the same case twice differs by as much: {'; '.join(unclear)}."
        ] * bool(unclear)
        with_graphs = [f"{case}, CUDA graphs" for case in missed]
        if missed and set(with_graphs) <= set(met):
            said.append(
                "\nThe same steps meet it as CUDA graphs. So it is the host that misses it: without a graph it calls"
                " every operator."
                + (
                    f" SDPA does not reach {TARGET} over plain attention there either."
                    * (not sdpa_fast & set(missed))
                )
                + (
                    f" Behind SDPA by more than the noise, where graphs are not: {'; '.join(behind)}. (Ours is called"
                    " through Python, SDPA through C++ alone; that this is the difference is a guess.)"
                    if behind
                    else ""
                )
            )
    return "\n".join(said)


def stale_words(chapter: Chapter) -> str:
    """Which rows of the training steps at context 1,024 are of earlier code; nothing where none is."""
    rows = chapter.stale()
    rows = rows[(rows["context_length"] == SPEED_CONTEXT) & (rows["mode"] == "train_step")]
    if rows.empty:
        return ""
    said = []
    for (machine, size, batch), part in rows.groupby(["machine", "size", "batch"], sort=False):
        kinds = listed([ATTENTION[a] for a in ATTENTION if a in set(part["attention"])])
        said.append(f"`{machine}`, `{size}`, batch {batch}, {kinds} ({len(part)} row{'s' * (len(part) > 1)})")
    return (
        f"Of this table, measured with earlier code: {'; '.join(said)}. Ratios are of one run all the same."
    )


def graph_gain_words(chapter: Chapter) -> str:
    """What CUDA graphs give at batch 4, beside the floor of the arithmetic, and whether the prediction held."""
    said = []
    all_rows = chapter.rows(mode="train_step", context_length=SPEED_CONTEXT, batch=4)
    rows = all_rows[all_rows["repeat"] == 0]
    roofs = steps.found_roofs(chapter)
    for (machine, size, attention), group in rows.groupby(["machine", "size", "attention"], sort=False):
        plain, graphs = (steps.one(group, compile=c) for c in ("default", "reduce-overhead"))
        if plain is None or graphs is None or not same_run(plain, graphs):
            continue
        floor = steps.floor_ms(roofs[machine], plain)
        ratio = plain["step_ms_p50"] / graphs["step_ms_p50"]
        of_size = all_rows[(all_rows["machine"] == machine) & (all_rows["size"] == size)]
        even = f"; {MERE_NOISE}" if distance(ratio) <= noise(of_size, plain, graphs) else ""
        said.append(
            f"- `{machine}`, `{size}`, {ATTENTION[attention]}: {fmt(plain['step_ms_p50'])} ms compiled,"
            f" {fmt(graphs['step_ms_p50'])} ms with CUDA graphs"
            f" ({fmt(ratio)} ×{even})"
            + ("" if floor is None else f"; the products alone need {fmt(floor)} ms")
            + f"; peak {fmt(plain['peak_gib'])} and {fmt(graphs['peak_gib'])} GiB."
        )
    said += [f"\n{words}" for words in _shows(all_rows)]
    return "\n".join(said) or f"CUDA graphs: {NOT_MEASURED}."


def _shows(rows: pd.DataFrame) -> list[str]:
    """For each machine, whether a faster attention shows in `small`, without CUDA graphs (predicted: no) and with them
    (predicted: yes). `rows`: training steps at batch 4."""
    said = []
    for machine, part in rows[rows["size"] == "small"].groupby("machine", sort=False):
        words = []
        for compile, predicted in (("default", 0), ("reduce-overhead", 2)):
            plain, *others = _alike(part, compile)
            if None in (plain, *others) or not same_run(plain, *others):
                break
            faster = sum(
                plain["step_ms_p50"] / other["step_ms_p50"] > 1 + noise(part, plain, other)
                for other in others
            )
            who = {0: "neither SDPA nor ours is", 1: "one of SDPA and ours is", 2: "both SDPA and ours are"}
            verdict = (
                "as predicted"
                if faster == predicted
                else f"predicted: {'neither' if not predicted else 'both'}"
            )
            words.append(f"{COMPILE[compile]}: {who[faster]} faster ({verdict})")
        if len(words) == 2:
            said.append(
                f"`{machine}`, `small`, batch 4, beyond the noise against plain attention; {'; '.join(words)}."
            )
    return said


def across_words(chapter: Chapter) -> str:
    """Where a step takes longer in the grid of sizes than here with more tokens: its run's host was slower."""
    rows = chapter.measured(mode="train_step", repeat=0, attention="reference")
    keys = ["machine", "size", "batch", "compile", "dtype"]
    here = rows[rows["context_length"] == SPEED_CONTEXT]
    both = rows[rows["context_length"] < SPEED_CONTEXT].merge(here, on=keys, suffixes=("_short", ""))
    longer = both[both["step_ms_p50_short"] > both["step_ms_p50"]]
    if longer.empty:
        return ""
    found = [
        f"{COMPILE[row['compile']]} `{row['size']}` {fmt(row['step_ms_p50'])} ms at context"
        f" {row['context_length']:,} and {fmt(row['step_ms_p50_short'])} ms at {row['context_length_short']:,}"
        for row in longer.to_dict("records")
    ]
    double = (longer["context_length"] == 2 * longer["context_length_short"]).all()
    return (
        f"With plain attention, {listed(found)}: {'twice the' if double else 'more'} tokens in less time, in another"
        " run. Where the host sets the time, runs differ by that much; so hold a time only against others of its table."
    )
