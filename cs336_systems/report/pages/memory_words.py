"""The sentences of chapter `memory`: predictions by the closed forms, and what its rows say. See `pages.memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages.memory import (
    DTYPES,
    GIB,
    MIB,
    MODES,
    REFERENCE,
    alive,
    case_of,
    closed_form,
    contexts,
    measured,
    one,
    predicted_bytes,
    primary,
    read_timeline,
    records,
    tensor_names,
    what,
)  # fmt: skip
from cs336_systems.report.tables import fmt
from cs336_systems.sizes import SIZES, ModelConfig, size

STEP = 16  # tokens: how finely contexts are searched


# ------------------------------------------------------------------------------------------------ predictions
def holdings(config: ModelConfig = SIZES[REFERENCE], name: str = REFERENCE) -> str:
    """What a step holds whatever the batch, and what a block saves, in numbers of one model with d_ff = 4 d_model."""
    parameters = accounting.num_parameters(config)
    gib = 4 * parameters / GIB
    for_token, for_pair = 26 * 4 * config.d_model, 4 * config.num_heads
    return (
        f"`{name}` as built here has $N$ = {fmt(parameters / 1e9)} billion parameters. Its weights are {fmt(gib)} GiB,"
        f" its gradients as much, AdamW's two moments twice that: $16N$ = **{fmt(4 * gib)} GiB**, whatever the batch,"
        f" the context and the precision of the activations. In fp32 each block saves {for_token // 1024} KiB for a"
        f" token and {for_pair} bytes for a pair of tokens of one sequence; the two come to the same at $S = 26\\,d$ ="
        f" {26 * config.d_head:,} tokens."
    )


def _where(condition: Callable[[int], bool], limit: int) -> tuple[int, int] | None:
    """The first and the last context, in steps of 16 tokens, for which something holds; None if for none."""
    found = [n for n in range(STEP, limit + 1, STEP) if condition(n)]
    return (found[0], found[-1]) if found else None


def crossovers(config: ModelConfig = SIZES[REFERENCE], name: str = REFERENCE, batch: int = 4) -> str:
    """From which context on activations set the peak of a step, and where autocast lowers the peaks."""
    limit = 2048

    def peak(context: int, mode: str, dtype: str) -> int:
        items = accounting.peak_bytes(config, batch, context, mode, dtype, optimizer="fused")
        return sum(items.values())

    floor = 16 * accounting.num_parameters(config)
    begins = []
    for dtype in DTYPES:
        above = _where(lambda n, dtype=dtype: peak(n, "train_step", dtype) > 1.001 * floor, limit)
        begins.append(f"{above[0]} tokens in {dtype}" if above else f"no context in {dtype}")
    words = [
        f"By the closed forms, a step of `{name}` peaks above $16N$ from {begins[0]}, and from {begins[1]}."
    ]
    lower = {}
    for mode in MODES:
        lower[mode] = _where(lambda n, mode=mode: peak(n, mode, "bf16") < peak(n, mode, "fp32"), limit)
    if not any(lower.values()):
        words.append(f"At no context up to {limit:,} tokens does autocast lower any of its peaks.")
    else:
        parts = [
            f"of *{MODES[mode]}* " + (f"from {where[0]} to {where[1]:,} tokens" if where else "nowhere")
            for mode, where in lower.items()
        ]
        words.append(f"Autocast lowers the peak {', '.join(parts)} (contexts up to {limit:,}).")
    return " ".join(words)


# ------------------------------------------------------------------------------------------------ what rows say
def peaks(chapter: Chapter, dtype: str) -> str:
    """The peaks of the largest model at its shortest and longest context, and how they grow."""
    name, lengths = primary(chapter), contexts(chapter)
    short, long = lengths[0], lengths[-1]
    parts = []
    for mode in MODES:
        at = {n: one(chapter, mode=mode, dtype=dtype, context_length=n) for n in (short, long)}
        if not all(map(measured, at.values())):
            parts.append(f"*{MODES[mode]}* {NOT_MEASURED}")
            continue
        a, b = (_amount(at[n]["peak_bytes"]) for n in (short, long))
        parts.append(f"*{MODES[mode]}* **{a}** at context {short} and **{b}** at {long}")
    return f"Peaks of `{name}` in {dtype}: {'; '.join(parts)}."


def _amount(count: float) -> str:
    """Bytes as GiB, or as MiB where they are few."""
    return f"{fmt(count / GIB)} GiB" if abs(count) >= GIB / 10 else f"{fmt(count / MIB)} MiB"


def step_peak(chapter: Chapter, dtype: str) -> str:
    """When the step has its peak, and of what it consists, at the shortest and the longest context."""
    words = []
    for context in dict.fromkeys((contexts(chapter)[0], contexts(chapter)[-1])):
        row = one(chapter, mode="train_step", dtype=dtype, context_length=context)
        if not measured(row):
            words.append(f"The step at context {context}: {NOT_MEASURED}.")
            continue
        there = sorted(alive(chapter, row).items(), key=lambda item: -item[1])
        share = 0.005 * row["requested_bytes"]
        parts = ", ".join(f"{_amount(count)} of {name}" for name, count in there if count > share)
        moment, _ = closed_form(chapter, row)
        words.append(
            f"At context {context} the step has its peak in stage *{row['peak_stage']}* (by the closed form:"
            f" *{moment}*): {parts}."
        )
    return " ".join(words)


def precision(chapter: Chapter) -> str:
    """What autocast does to the three peaks at each context, and to the activations that a graph keeps."""
    words = []
    for mode in MODES:
        changes = []
        for context in contexts(chapter):
            rows = [one(chapter, mode=mode, dtype=dtype, context_length=context) for dtype in DTYPES]
            if all(map(measured, rows)):
                change = rows[1]["peak_bytes"] - rows[0]["peak_bytes"]
                sign = "+" if change > 0 else "−"
                changes.append((f"{sign}{_amount(abs(change))}" if change else "nothing") + f" at {context}")
        words.append(f"*{MODES[mode]}*: {', '.join(changes) or NOT_MEASURED}")
    text = f"What bf16 autocast adds to the peak (or takes off). {'; '.join(words)}."
    row = one(chapter, mode="forward_graph", dtype="bf16", context_length=contexts(chapter)[-1])
    other = one(chapter, mode="forward_graph", dtype="fp32", context_length=contexts(chapter)[-1])
    if measured(row) and measured(other):
        config = size(row["size"])
        copies = accounting.autocast_copy_bytes(config)
        kept, saved = other["activations_bytes"], row["activations_bytes"] - copies
        context, less = row["context_length"], 100 * (1 - saved / kept)
        text += (
            f" The copies of the weights are {_amount(copies)} by the closed form. Without them, the activations (and"
            f" logits) that the graph keeps at context {context} go from {_amount(kept)} to {_amount(saved)}:"
            f" {fmt(less, 2)} % less."
        )
    return text


def room(chapter: Chapter) -> str:
    """How much of the device the largest peak takes; nothing to say where no device was recorded."""
    words = []
    for machine, rows in chapter.measured(source="allocator").groupby("machine"):
        top = rows.loc[rows["peak_bytes"].astype(float).idxmax()]
        share = f"{fmt(100 * top['peak_bytes'] / top['device_bytes'], 2)} %"
        words.append(
            f"The largest peak on `{machine}`, {_amount(top['peak_bytes'])} (`{top['size']}`, context"
            f" {top['context_length']}, {what(top)}, {top['dtype']}), takes {share} of the device's"
            f" {_amount(top['device_bytes'])}."
        )
    return " ".join(words)


def accuracy(chapter: Chapter) -> str:
    """How far the closed form is from what was measured, over all rows."""
    rows = chapter.measured()
    if rows.empty:
        return f"The closed form against the measured peaks: {NOT_MEASURED}."
    apart = [100 * (r["peak_bytes"] / predicted_bytes(chapter, r) - 1) for r in rows.to_dict("records")]
    return (
        f"Over all {len(rows)} measured cases, the peak is {fmt(min(apart), 2)} % to {fmt(max(apart), 2)} % above the"
        " closed form."
    )


def residual(batch: int = 4, context: int = 512) -> str:
    """The size of one tensor of the residual stream at the reference hyperparameters, derived."""
    config = SIZES[REFERENCE]
    mib = accounting.residual_bytes(config, batch, context) / 2**20
    return (
        f"At batch $B$ = {batch}, context $S$ = {context} and $D$ = {config.d_model:,}: $4BSD$ ="
        f" {4 * batch * context * config.d_model:,} bytes; divided by $2^{{20}}$, **{fmt(mib)} MiB**."
    )


def largest(chapter: Chapter, dtype: str = "fp32") -> str:
    """The largest allocation of the forward pass at each context, what it is, and where it comes from."""
    words = []
    for context in contexts(chapter):
        row = one(chapter, mode="forward_graph", dtype=dtype, context_length=context)
        if not measured(row):
            words.append(f"At context {context}: {NOT_MEASURED}.")
            continue
        case = case_of(chapter, row)
        names = tensor_names(size(case.size), case.batch, case.context_length, dtype)
        tensor, count = names.get(int(row["largest_bytes"])), int(row["largest_count"])
        words.append(
            f"At context {context} the largest allocation of the forward pass in {dtype} is"
            f" **{fmt(row['largest_bytes'] / MIB)} MiB**"
            + (f", a tensor {tensor}" if tensor else "")
            + f", made {'once' if count == 1 else f'{count} times'} by `{row['largest_code']}`."
        )
    return " ".join(words)


def optimizer(chapter: Chapter) -> str:
    """What AdamW over lists of tensors needs beyond the fused kernel."""
    words = []
    for row in records(chapter, mode="train_step", optimizer="foreach"):
        machine = {"machine": row["machine"]}
        fused = one(chapter, **{k: row[k] for k in ("context_length", "dtype")}, mode="train_step", **machine)
        where = f"context {row['context_length']}, {row['dtype']}"
        if measured(row) and measured(fused):
            amounts = fused["peak_bytes"], row["peak_bytes"], row["peak_bytes"] - fused["peak_bytes"]
            one_kernel, lists, more = map(_amount, amounts)
            words.append(
                f"{where}: {one_kernel} with the fused kernel, {lists} over lists (in stage *{row['peak_stage']}*),"
                f" {more} more"
            )
        else:
            words.append(f"{where}: {NOT_MEASURED}")
    return f"Peak of the step at {'; at '.join(words)}." if words else f"The two optimizers: {NOT_MEASURED}."


def out_of_memory(chapter: Chapter) -> str:
    """The cases that ran out of memory: what was alive, and what was asked for when it did."""
    rows = chapter.rows()
    failed = rows[rows["status"] == "oom"].to_dict("records")
    if not failed:
        left = int((rows["status"] == NOT_MEASURED).sum())
        also = f" ({left} of {len(rows)} cases: {NOT_MEASURED})" if left else ""
        return f"No measured case ran out of memory{also}."
    return "Out of memory: " + "; ".join(_failure(chapter, row) for row in failed) + "."


def _failure(chapter: Chapter, row: dict[str, Any]) -> str:
    case = f"`{row['size']}`, context {row['context_length']}, {what(row)}, {row['dtype']}"
    text = f"{case} (closed form: {_amount(predicted_bytes(chapter, row))})"
    there = alive(chapter, row)
    if there and not pd.isna(row["asked_bytes"]):
        parts = ", ".join(f"{_amount(count)} of {name}" for name, count in there.items())
        text += f" asked for {_amount(row['asked_bytes'])} when it held {parts}"
    return text


def repeats(chapter: Chapter) -> str:
    """Whether the same case in another process has the same peak."""
    rows = chapter.measured()
    keys = ["machine", "size", "context_length", "mode", "dtype", "optimizer", "batch"]
    pairs = rows[rows["repeat"] == 0].merge(rows[rows["repeat"] == 1], on=keys, suffixes=("", "_again"))
    if pairs.empty:
        return f"The same case a second time: {NOT_MEASURED}."
    words = []
    for pair in pairs.to_dict("records"):
        apart = abs(pair["peak_bytes_again"] - pair["peak_bytes"])
        same = "the same peak to the byte" if apart == 0 else f"peaks that are {_amount(apart)} apart"
        events = int(pair["allocations"]), int(pair["allocations_again"])
        count = (
            f"the same {events[0]:,} allocations"
            if events[0] == events[1]
            else f"{events[0]:,} and {events[1]:,}"
        )
        words.append(
            f"`{pair['size']}`, context {pair['context_length']}, {what(pair)}, {pair['dtype']}: {same}, and {count}"
        )
    apart = ", each time in a process of its own" if set(rows["source"]) == {"allocator"} else ""
    return f"Recorded twice{apart} (A/A): {'; '.join(words)}."


def source(chapter: Chapter) -> str:
    """What the rows are counts of: an allocator's blocks, or tensors."""
    sources = set(chapter.measured()["source"])
    words = {
        "allocator": "Recorded by the CUDA allocator.",
        "tensors": "This machine has no CUDA device, hence no allocator that keeps a history: what is shown are the"
        " tensors of a tiny model on the CPU, as torch's dispatcher sees them come and go. Workspaces, rounding and"
        " reserved memory do not exist here.",
    }
    return " ".join(text for name, text in words.items() if name in sources) or f"Recordings: {NOT_MEASURED}."


def notes(chapter: Chapter) -> str:
    """What the reader of the histories had to assume, for the timelines that are there; empty without such."""
    found = []
    for row in records(chapter):
        timeline = read_timeline(chapter, row)
        if timeline is not None and timeline.notes:
            found.append(
                f"context {row['context_length']}, {what(row)}, {row['dtype']}: {'; '.join(timeline.notes)}"
            )
    return f"Notes of the reader. {'. '.join(found)}." if found else ""
