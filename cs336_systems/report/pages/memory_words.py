"""The sentences of chapter `memory`: predictions by the closed forms, and what its rows say. See `pages.memory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    device_of,
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
        f"By the closed forms, a step of `{name}` peaks more than 0.1 % above $16N$ from {begins[0]}, and from"
        f" {begins[1]}."
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


def balance(config: ModelConfig = SIZES[REFERENCE], name: str = REFERENCE, batch: int = 4) -> str:
    """What autocast saves and costs a block at the best context, d_ff = 4 d_model; from which batch on it saves."""
    d, width = config.d_head, config.d_model
    best = 242 * batch * d * width - 32 * width**2
    enough = -(-32 * width // (242 * d))
    outcome = (
        f"saves {fmt(best / MIB)} MiB a block" if best > 0 else f"still costs {fmt(-best / MIB)} MiB a block"
    )
    return (
        f"In `{name}`, at batch {batch}, autocast {outcome} at the best context, $11d$ = {11 * d:,} tokens; there are"
        f" contexts at which it saves memory from batch {enough} on."
    )


# ------------------------------------------------------------------------------------------------ what rows say
def rhythm(chapter: Chapter, dtype: str, context: int) -> str:
    """How high the teeth of the forward pass are, and how high a stair."""
    alone, kept = (
        one(chapter, mode=m, dtype=dtype, context_length=context) for m in ("forward", "forward_graph")
    )
    if not (measured(alone) and measured(kept)):
        return f"Teeth and stairs at context {context}: {NOT_MEASURED}."
    tooth = alone["requested_bytes"] - alone["weights_bytes"] - alone["before_recording_bytes"]
    layers = size(kept["size"]).num_layers
    logits = kept["batch"] * context * size(kept["size"]).vocab_size * (2 if dtype == "bf16" else 4)
    shape = (size(kept["size"]), int(kept["batch"]), int(context), dtype)
    saved = accounting.saved_activation_bytes(*shape, device=device_of(kept["machine"]))
    around = sum(saved[name] for name in ("embedding", "final_norm", "head"))
    stair = (kept["activations_bytes"] - logits - around) / layers
    return (
        f"At context {context} in {dtype} the highest tooth is {amount(tooth)} high, and each of the {layers} stairs"
        f" {amount(stair)} (all activations but those of the last norm and the head, divided by the blocks)."
    )


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
        a, b = (amount(at[n]["peak_bytes"]) for n in (short, long))
        parts.append(f"*{MODES[mode]}* **{a}** at context {short} and **{b}** at {long}")
    return f"Peaks of `{name}` in {dtype}: {'; '.join(parts)}."


def amount(count: float) -> str:
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
        parts = ", ".join(f"{amount(count)} of {name}" for name, count in there if count > share)
        moment, _ = closed_form(chapter, row)
        words.append(
            f"At context {context} the step has its peak in stage *{row['peak_stage']}* (by the closed form:"
            f" *{moment}*): {parts}." + _backward_words(chapter, row)
        )
    return " ".join(words)


def _backward_words(chapter: Chapter, row: dict[str, Any]) -> str:
    """From where to where memory goes in the last backward pass, and what one block gives and takes."""
    found = read_timeline(chapter, row)
    begins = {stage.name: stage.begin for stage in found.stages} if found else {}
    passes = [name for name in begins if name.startswith(("backward", "optimizer"))][-2:]
    if len(passes) < 2:
        return ""
    total = found.total()
    first, last = (total[found.events.index(begins[name])] for name in passes)
    saved, copied, gradients = block_bytes(row)
    copies = f" and {amount(copied)} of weights' copies" if copied else ""
    return (
        f" Through that backward pass memory {'rises' if last > first else 'falls'} from {amount(first)} to"
        f" {amount(last)}: a block gives up {amount(saved)} of activations{copies} for {amount(gradients)} of"
        " gradients."
    )


def block_bytes(row: Mapping[str, Any]) -> tuple[int, int, int]:
    """What one block gives up in the backward pass, activations and autocast's copies of its weights, and the gradients
    that it gets; by the closed forms."""
    config, device = size(row["size"]), device_of(row["machine"])
    shape = (config, int(row["batch"]), int(row["context_length"]), row["dtype"])
    saved = sum(accounting.saved_layer_bytes(*shape, device=device).values())
    counts = accounting.parameter_counts(config)
    weights = (counts["attention"] + counts["ffn"]) // config.num_layers
    return saved, 2 * weights if row["dtype"] == "bf16" else 0, 4 * weights


def _change(count: float) -> str:
    """Bytes more (or less) with their sign; `nothing` for none."""
    return f"{'+' if count > 0 else '−'}{amount(abs(count))}" if count else "nothing"


def _lower_by_rounding(chapter: Chapter) -> list[str]:
    """The cases whose peak under autocast is lower than in fp32, though no less is requested."""
    found = []
    for row in records(chapter, dtype="bf16"):
        where = {key: row[key] for key in ("machine", "context_length", "mode", "optimizer")}
        other = one(chapter, **where, dtype="fp32")
        if measured(row) and measured(other):
            less = row["peak_bytes"] - other["peak_bytes"]
            if row["requested_bytes"] >= other["requested_bytes"] and less < 0:
                found.append(f"*{what(row)}* at {row['context_length']}, {_change(less)}")
    return found


def precision(chapter: Chapter) -> str:
    """What autocast does to the three peaks at each context, and to the activations that a graph keeps."""
    words = []
    for mode in MODES:
        changes = []
        for context in contexts(chapter):
            rows = [one(chapter, mode=mode, dtype=dtype, context_length=context) for dtype in DTYPES]
            if all(map(measured, rows)):
                change = rows[1]["requested_bytes"] - rows[0]["requested_bytes"]
                changes.append(f"{_change(change)} at {context}")
        words.append(f"*{MODES[mode]}*: {', '.join(changes) or NOT_MEASURED}")
    text = f"What bf16 autocast adds to the most that is *requested*. {'; '.join(words)}."
    if lower := _lower_by_rounding(chapter):
        text += (
            f" Where the table shows a lower peak all the same ({'; '.join(lower)}), tensors do not need less: the"
            " allocator has rounded less."
        )
    row = one(chapter, mode="forward_graph", dtype="bf16", context_length=contexts(chapter)[-1])
    other = one(chapter, mode="forward_graph", dtype="fp32", context_length=contexts(chapter)[-1])
    if measured(row) and measured(other):
        config = size(row["size"])
        copies = accounting.autocast_copy_bytes(config)
        kept, saved = other["activations_bytes"], row["activations_bytes"] - copies
        context, less = row["context_length"], 100 * (1 - saved / kept)
        text += (
            f" The copies of the weights are {amount(copies)} by the closed form. Without them, the activations (and"
            f" logits) that the graph keeps at context {context} go from {amount(kept)} to {amount(saved)}:"
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
            f"The largest peak on `{machine}`, {amount(top['peak_bytes'])} (`{top['size']}`, context"
            f" {top['context_length']}, {what(top)}, {top['dtype']}), takes {share} of the device's"
            f" {amount(top['device_bytes'])}; the most that the allocator held of it in any case is"
            f" {amount(rows['reserved_bytes'].astype(float).max())}."
        )
    return " ".join(words)


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
        tensor = names.get(int(row["largest_bytes"]))
        words.append(
            f"At context {context} the largest allocation of the forward pass in {dtype} is"
            f" **{fmt(row['largest_bytes'] / MIB)} MiB**"
            + (f", a tensor {tensor}" if tensor else "")
            + f", such as `{row['largest_code']}` makes."
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
            one_kernel, lists, more = map(amount, amounts)
            words.append(
                f"{where}: {one_kernel} with the fused kernel, {lists} over lists (in stage *{row['peak_stage']}*, with"
                f" {amount(row['temporaries_bytes'])} of temporaries), {more} more"
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
    text = f"{case} (closed form: {amount(predicted_bytes(chapter, row))})"
    there = alive(chapter, row)
    if there and not pd.isna(row["asked_bytes"]):
        parts = ", ".join(f"{amount(count)} of {name}" for name, count in there.items())
        text += f" asked for {amount(row['asked_bytes'])} when it held {parts}"
    return text


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
