"""The sentences of chapter `ddp` about what was measured. What was expected is in `ddp_predictions`.

Sentences that conclude something begin with the places whose steps are even (`ddp_pace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from cs336_systems.accounting import data_parallel as closed
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.pages import ddp_pace as pace
from cs336_systems.report.pages import ddp_predictions as predictions
from cs336_systems.report.pages.ddp_pace import MEET, Place, leading, meet, places
from cs336_systems.report.tables import fmt, listed, percent

_LITTLE = 0.005  # of the peak: what is not worth a number of its own
OURS = ("naive", "flat", "overlapped", "bucketed", "in_place")


def _paragraphs(lines: Sequence[str], otherwise: str) -> str:
    return "\n\n".join(lines) or otherwise


def in_italics(row: Mapping[str, Any]) -> str:
    """What a case is called in sentences."""
    return f"*{page.way(row)}*"


# ---------------------------------------------------------------------------------------------- after the pass
def naive_words(chapter: Chapter) -> str:
    """`naive_ddp_benchmarking`: the step, and the share of it that communicates."""
    lines, sums = [], []
    first = leading(chapter)
    for place in places(chapter):
        row = place.one("naive")
        if row is None:
            continue
        step, sent = row["step_ms_p50"], row["synchronization_ms_p50"]
        share = percent(sent / step)
        text = (
            f"{place.head}: a step takes {fmt(step)} ms, of which {fmt(sent)} ms"
            f" ({f'**{share}**' if place in first else share}) are spent averaging gradients"
            f"{'' if place.even else ' and waiting for the slower rank'}, in {round(row['collectives'])} all-reduces."
        )
        exposed = page.exposed_ms(chapter, row)
        if exposed is not None:
            text += f" The same step without communication is {fmt(exposed)} ms shorter."
        due = predictions.after_ms(chapter, place.machine, place.world_size, "naive", 0.0)
        if due is not None and place in first:
            text += f" Predicted were {fmt(due)} ms."
        if place.even:
            sums.append(sent)
        lines.append(text)
    if len(sums) > 1 and max(sums) < 1.05 * min(sums):
        lines.append(
            f"Where steps are even, averaging takes {fmt(min(sums))} to {fmt(max(sums))} ms: neither the precision of"
            " the products nor the context changes what is sent."
        )
    return _paragraphs(lines, f"Naive data parallelism: {NOT_MEASURED}.")


def against_words(chapter: Chapter, wrapper: str, others: Sequence[str]) -> str:
    """One way against others: steps, and the part after the backward pass."""
    lines = []
    for place in places(chapter):
        row = place.one(wrapper)
        if row is None:
            continue
        parts = []
        for other in others:
            base = page.mate(chapter, row, other)
            if base is not None:
                parts.append(
                    f"{row['step_ms_p50'] / base['step_ms_p50']:.3f} times the step of *{page.NAMES[other]}*"
                    f" ({fmt(base['step_ms_p50'])} ms, {fmt(base['synchronization_ms_p50'])} ms of them after the"
                    f" backward pass{f'; {MEET}' if meet(row, base) else ''})"
                )
        text = f"{place.head}: *{page.NAMES[wrapper]}* takes {fmt(row['step_ms_p50'])} ms"
        after = f", {fmt(row['synchronization_ms_p50'])} ms of them after the backward pass"
        lines.append(f"{text}{after}. That is {' and '.join(parts)}." if parts else f"{text}{after}.")
    return _paragraphs(lines, f"*{page.NAMES[wrapper]}*: {NOT_MEASURED}.")


def flat_words(chapter: Chapter) -> str:
    """What one all-reduce saves, and what was expected of it."""
    lines = []
    for place in leading(chapter):
        flat, naive = place.one("flat"), place.one("naive")
        if flat is None or naive is None:
            continue
        took = [float(row["synchronization_ms_p50"]) for row in (flat, naive)]
        due = [
            predictions.after_ms(chapter, place.machine, place.world_size, w, 0.0) for w in ("flat", "naive")
        ]
        less = "less" if took[0] < took[1] else "more"
        text = (
            f"{place.head}: after the backward pass *flat* takes {fmt(abs(took[1] - took[0]))} ms {less} than *naive*,"
            f" {fmt(took[0])} ms instead of {fmt(took[1])} ms"
        )
        if None in due:
            lines.append(f"{text}.")
            continue
        text += f"; predicted were {fmt(due[0])} ms instead of {fmt(due[1])} ms."
        copied = pace.measured_copy_ms(chapter, place.machine)
        least = predictions.copy_ms(chapter, place.machine)
        if copied is not None and copied > 0 and least is not None:
            text += (
                f" By the traces, concatenating takes {fmt(copied)} ms (kernels of *flat* that compute, less those of"
                f" *naive*), where {fmt(least[0])} ms were predicted."
            )
        lines.append(text)
    apart = []
    for place in places(chapter):
        flat, naive = place.one("flat"), place.one("naive")
        if place.even or flat is None or naive is None:
            continue
        steps, after = (
            abs(naive[f"{phase}_ms_p50"] - flat[f"{phase}_ms_p50"]) for phase in ("step", "synchronization")
        )
        if abs(steps - after) > 0.5 * max(steps, after):
            apart.append(f"{fmt(steps)} ms and {fmt(after)} ms ({place.name})")
    if apart:
        lines.append(
            "Both ways do the same until the backward pass has ended, and yet, where steps are uneven, the steps and"
            f" what follows the backward pass differ by {listed(apart)}. So these steps do not compare the two."
        )
    return _paragraphs(lines, f"What *flat* saves: {NOT_MEASURED}.")


# --------------------------------------------------------------------------------------------------- beside it
def longer_words(chapter: Chapter, wrapper: str = "overlapped") -> str:
    """What a way that overlaps leaves exposed: a longer backward pass, and the wait after it."""
    lines = []
    for place in leading(chapter):
        row, base, naive = place.one(wrapper), place.one("none"), place.one("naive")
        found = pace.parts(chapter, row) if row is not None else None
        if found is None or base is None or naive is None:
            continue
        whole = page.exposed_ms(chapter, naive)
        due = predictions.after_ms(chapter, place.machine, place.world_size, wrapper, row["bucket_mb"])
        predicted = "" if due is None else f" (predicted: {fmt(due)} ms, for the last gradient)"
        text = (
            f"{place.head}: of the {fmt(whole)} ms that *naive* exposes, {in_italics(row)} exposes"
            f" {fmt(found['exposed'])} ms. The wait after the backward pass is {fmt(found['wait'])} ms{predicted};"
            f" the backward pass itself takes {fmt(row['backward_ms_p50'])} ms instead of"
            f" {fmt(base['backward_ms_p50'])} ms."
        )
        if found["longer"] > found["wait"]:
            text += " So what is left is not the end of the communication, but what it takes from the backward pass."
        lines.append(text)
    return _paragraphs(lines, f"What *{page.NAMES[wrapper]}* leaves exposed: {NOT_MEASURED}.")


def trace_words(chapter: Chapter) -> str:
    """With what the traces were made, and how much of the communication was hidden."""
    rows = [r for r in chapter.rows(kind="trace").to_dict("records") if page.ok(r)]
    if not rows:
        return f"Traces: {NOT_MEASURED}."
    tools = {
        "nsys": "Nsight Systems",
        "torch": "torch's profiler",
        "torch-cpu": "torch's profiler (of the CPU)",
    }
    sources = sorted({f"{tools[r['source']]} {r['tool_version']}" for r in rows})
    parts = [
        f"*{page.way(r)}* {percent(r['overlap_ms'] / r['communication_ms'])} of {fmt(r['communication_ms'])} ms"
        for r in rows
        if r["communication_ms"]
    ]
    text = f"Recorded by {', '.join(sources)}. Hidden behind computation: {'; '.join(parts)}."
    slower = []
    for row in rows:
        where = {f: row[f] for f in ("machine", "context_length", "bucket_mb", "dtype", "world_size")}
        found = [r for r in page.timed(chapter, (row["wrapper"],), **where) if page.ok(r)]
        slower += [row["traced_ms"] / r["step_ms_p50"] for r in found]
    if slower and max(slower) > 1.05:
        text += f" The recorded steps take {min(slower):.2f} to {max(slower):.2f} times as long as the timed ones."
    if any(r["source"] == "torch-cpu" for r in rows):
        text += (
            " Without a GPU there are no streams: operators of the CPU stand for kernels, and what Gloo's own threads"
            " report for communication, which competes with computation for the same cores."
        )
    return text


# ------------------------------------------------------------------------------------------------------ overall
def best_words(chapter: Chapter) -> str:
    """The fastest of ours against torch's DDP and against no communication at all, in one run."""
    lines = []
    for place in places(chapter):
        ours = [r for r in place.rows if r["wrapper"] in OURS]
        if not ours:
            continue
        best = min(ours, key=lambda r: r["step_ms_p50"])
        parts = []
        for wrapper, mb in (("torch", 0.0), ("torch", 100.0), ("torch_view", 0.0), ("none", 0.0)):
            base = page.mate(chapter, best, wrapper, mb)
            if base is not None:
                parts.append(f"{best['step_ms_p50'] / base['step_ms_p50']:.3f} × {in_italics(base)}")
        text = f"{place.head}: the fastest of ours is {in_italics(best)}, {fmt(best['step_ms_p50'])} ms"
        text = f"{text}: {', '.join(parts)}." if parts else f"{text}."
        near = [
            in_italics(r) for r in place.rows if r is not best and r["wrapper"] != "alone" and meet(r, best)
        ]
        if len(near) > 3:
            known = [n for n in ("*no communication*", "*torch DDP*") if n in near]
            among = f", {listed(known)} among them" if known else ""
            text += f" Its p20–p80 range meets those of {len(near)} others{among}."
        elif near:
            text += f" Its p20–p80 range meets that of {listed(near)}."
        lines.append(text)
    return _paragraphs(lines, f"The fastest way: {NOT_MEASURED}.")


def precision_words(chapter: Chapter) -> str:
    """The step without communication in each precision, and whether the fastest products make the shortest step."""
    lines = []
    by_context: dict[tuple[str, int], dict[str, Place]] = {}
    for place in places(chapter):
        if place.one("none") is not None:
            by_context.setdefault((place.machine, place.context), {})[place.dtype] = place
    for (machine, context), found in by_context.items():
        if len(found) < 2:
            continue
        order = [d for d in ("fp32", "tf32", "bf16") if d in found]
        parts = [
            f"{pace.PRECISIONS[d]} {fmt(found[d].one('none')['step_ms_p50'])} ms"
            f"{'' if found[d].even else ' (uneven)'}"
            for d in order
        ]
        text = f"`{machine}`, context {context}, without communication: {listed(parts)}."
        if {"tf32", "bf16"} <= set(found) and not found["bf16"].even:
            half, single = (found[d].one("none")["step_ms_p50"] for d in ("bf16", "tf32"))
            if half >= 0.95 * single:
                text += (
                    " bf16 has the fastest products, and its step is no shorter than TF32's: the host sets the pace,"
                    " and autocast gives it casts to launch besides. So these rows do not show what hides behind bf16."
                )
        lines.append(text)
    return _paragraphs(lines, f"Steps in other precisions: {NOT_MEASURED}.")


def skipped_words(chapter: Chapter) -> str:
    """What could not be measured, and why."""
    rows = chapter.rows()
    rows = rows[rows["status"].str.startswith("skipped")]
    lines = [
        f"- `{machine}`: {len(part)} cases of {ranks} rank{'s' * (ranks > 1)}: {status.split(': ', 1)[1]}."
        for (machine, ranks, status), part in rows.groupby(["machine", "world_size", "status"])
    ]
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def published_words(chapter: Chapter) -> str:
    """What others have published for data parallelism, from `results/published.csv`."""
    path = chapter.root / "published.csv"
    rows = pd.read_csv(path).query("chapter == @chapter.name").to_dict("records") if path.is_file() else []
    units = {"scaling_efficiency": " %", "over_naive": " %", "extra_memory": " %", "step_ms": " ms"}
    lines = [
        f"- {r['what']}, {r['hardware']}, {r['setting']}: {fmt(float(r['value']))}{units.get(r['metric'], '')}"
        f" ([source]({r['source']}))."
        for r in rows
    ]
    return "\n".join(lines) or "Nothing is published for this chapter."


def memory_words(chapter: Chapter) -> str:
    """Measured peaks against the closed form, and what each way costs over no communication."""
    config, batch = page.model_of(chapter)
    off, more = [], {}
    for row in page.timed(chapter):
        if not page.ok(row) or pd.isna(row["peak_gib"]):
            continue
        wrapper = "none" if row["wrapper"] == "alone" else row["wrapper"]
        dtype = "bf16" if row["dtype"] == "bf16" else "fp32"
        mb = row["bucket_mb"] * closed.MB
        needed = closed.peak_bytes(config, batch, row["context_length"], dtype, wrapper, mb)
        off.append(row["peak_gib"] * 2**30 / needed - 1)
        base = page.mate(chapter, row, "none")
        if base is not None and row["wrapper"] not in ("alone", "none"):
            more.setdefault(page.way(row), []).append(row["peak_gib"] / base["peak_gib"] - 1)
    if not off:
        return f"Peaks of memory: {NOT_MEASURED} (they need a CUDA device)."
    parts = [f"*{name}* {percent(most)}" for name, shares in more.items() if (most := max(shares)) >= _LITTLE]
    text = f"The allocator's peak lies {percent(min(off))} to {percent(max(off))} above the closed form."
    if more:
        rest = f"{'the others' if parts else 'all'} less than {percent(_LITTLE, 1)}"
        text += f" Over the step without communication, at most: {', '.join([*parts, rest])}."
    return text


def alone_words(chapter: Chapter) -> str:
    """What the wrappers cost where there is nobody to talk to."""
    rows = [r for r in page.timed(chapter, world_size=1) if r["wrapper"] not in ("none", "alone")]
    parts, told = [], []
    for row in rows:
        base = page.mate(chapter, row, "none")
        if base is not None:
            cost = row["step_ms_p50"] - base["step_ms_p50"]
            parts.append(f"{in_italics(row)} {fmt(cost)} ms at context {row['context_length']}")
            told.append(not meet(row, base))
    if not parts:
        return f"The wrappers on one rank: {NOT_MEASURED}."
    text = f"Steps with hooks take longer than the one without: {'; '.join(parts)}."
    if not any(told):
        text += (
            " All p20–p80 ranges meet that of the step without: these rows do not tell the cost from noise."
        )
    return text
