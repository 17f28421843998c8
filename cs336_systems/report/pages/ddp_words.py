"""The sentences of chapter `ddp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.accounting import data_parallel as closed
from cs336_systems.measure import rows as store
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.roofs import machine_environment, roofs
from cs336_systems.report.tables import fmt, si

OURS = ("naive", "flat", "overlapped", "bucketed", "in_place")


_BUSY = 0.9  # of a step: where kernels fill less, the GPU waits for the host


def _percent(share: float, digits: int = 2) -> str:
    return f"{fmt(100 * share, digits)} %"


def _paragraphs(lines: Sequence[str], otherwise: str) -> str:
    return "\n\n".join(lines) or otherwise


def _one(rows: Sequence[Mapping[str, Any]], wrapper: str) -> Mapping[str, Any] | None:
    return next((r for r in rows if r["wrapper"] == wrapper and page.ok(r)), None)


def _places(chapter: Chapter) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """(machine, context, rows) of the main setting."""
    found = []
    for machine in chapter.machines:
        rows = page.timed(chapter, machine=machine)
        for context in page.contexts(rows):
            found.append((machine, context, [r for r in rows if r["context_length"] == context]))
    return found


# ------------------------------------------------------------------------------------------------- predictions
def size_words(chapter: Chapter) -> str:
    """What a step sends."""
    config, batch = page.model_of(chapter)
    ranks = page.settings(chapter)["world_size"]
    count = accounting.num_parameters(config)
    num_bytes = closed.FP32 * count
    return (
        f"The model has {fmt(count / 1e6)} M parameters, so its fp32 gradients are $s$ = {si(num_bytes, 'B')} in"
        f" {len(closed.gradient_sizes(config))} tensors. On {ranks} ranks each sends, and receives,"
        f" {si(closed.sent_bytes(num_bytes, ranks), 'B')} in a step, whatever its batch ({batch} sequences here)."
    )


def bandwidth(chapter: Chapter, machine: str, ranks: int) -> tuple[float, float, str] | None:
    """Bytes/s in one direction, seconds of a call, and where they come from; None if nothing is known.

    From the rows of chapter `allreduce`: its largest tensor, and the time of its smallest. Else half of what the data
    sheet gives for both directions, and no time for a call.
    """
    path = store.csv_path("allreduce", machine, chapter.root)
    backends = {r["backend"] for r in page.timed(chapter, machine=machine) if page.ok(r)}
    if path.is_file() and len(backends) == 1:
        rows = pd.read_csv(path)
        chosen = (rows["status"] == "ok") & (rows["world_size"] == ranks) & (rows["backend"] == min(backends))
        rows = rows[chosen & (rows["how"] == "all_reduce") & (rows["repeat"] == 0)].sort_values("num_bytes")
        if len(rows):
            rate = float(rows.iloc[-1]["bus_gb_per_s"]) * 1e9
            return (
                rate,
                float(rows.iloc[0]["ms_p50"]) / 1e3,
                "measured in the [chapter on all-reduce](allreduce.ipynb)",
            )
    sheet = accounting.peaks(machine_environment(machine, chapter.root).get("gpu", ""))
    if sheet is None or sheet.nvlink_gb_per_s is None:
        return None
    return sheet.nvlink_gb_per_s / 2 * 1e9, 0.0, "from the data sheet"


def time_words(chapter: Chapter) -> str:
    """How long sending should take, and whether the backward pass is long enough to hide it."""
    config, batch = page.model_of(chapter)
    said = page.settings(chapter)
    sizes = closed.bucket_bytes(config, 0)
    lines = []
    for machine in chapter.machines:
        known = bandwidth(chapter, machine, said["world_size"])
        if known is None:
            continue
        rate, call, source = known
        calls = f" and {fmt(call * 1e6)} µs a call" if call else ", were calls free"
        together = closed.all_reduce_ms([sum(sizes)], said["world_size"], rate, call)
        apart = closed.all_reduce_ms(sizes, said["world_size"], rate, call)
        text = (
            f"On `{machine}`, at {fmt(rate / 1e9)} GB/s in each direction{calls} ({source}),"
            f" one all-reduce of everything takes {fmt(together)} ms, and one a parameter {fmt(apart)} ms."
        )
        roof = roofs(machine, chapter.root).tflops.get(said["dtype"])
        for context in page.contexts(page.timed(chapter)) if roof else ():
            flops = accounting.model_flops(config, batch, context, "forward_backward") * 2 / 3
            floor = fmt(flops / roof / 1e9)
            text += f" The products of the backward pass take at least {floor} ms at context {context}."
        lines.append(text)
    return _paragraphs(lines, f"The bandwidth between the ranks: {NOT_MEASURED}.")


# ---------------------------------------------------------------------------------------------- after the pass
def naive_words(chapter: Chapter) -> str:
    """`naive_ddp_benchmarking`: the step, and the share of it that communicates."""
    lines = []
    for machine, context, rows in _places(chapter):
        row = _one(rows, "naive")
        if row is None:
            continue
        step, sent = row["step_ms_p50"], row["synchronization_ms_p50"]
        text = (
            f"`{machine}`, context {context}: a step takes {fmt(step)} ms, of which {fmt(sent)} ms"
            f" (**{_percent(sent / step)}**) are spent averaging gradients, in {round(row['collectives'])} all-reduces."
        )
        exposed = page.exposed_ms(chapter, row)
        if exposed is not None:
            text += f" The same step without communication is {fmt(exposed)} ms shorter."
        known = bandwidth(chapter, machine, int(row["world_size"]))
        if known is not None:
            sizes = closed.bucket_bytes(page.model_of(chapter)[0], 0)
            predicted = closed.all_reduce_ms(sizes, int(row["world_size"]), known[0], known[1])
            text += f" Predicted were {fmt(predicted)} ms."
        lines.append(text)
    return _paragraphs(lines, f"Naive data parallelism: {NOT_MEASURED}.")


def against_words(chapter: Chapter, wrapper: str, others: Sequence[str]) -> str:
    """One way against others: steps, and the part after the backward pass."""
    lines = []
    for machine, context, rows in _places(chapter):
        row = _one(rows, wrapper)
        if row is None:
            continue
        parts = []
        for other in others:
            base = page.mate(chapter, row, other)
            if base is not None:
                parts.append(
                    f"{row['step_ms_p50'] / base['step_ms_p50']:.3f} times the step of *{page.NAMES[other]}*"
                    f" ({fmt(base['step_ms_p50'])} ms, {fmt(base['synchronization_ms_p50'])} ms of them after the"
                    " backward pass)"
                )
        text = f"`{machine}`, context {context}: *{page.NAMES[wrapper]}* takes {fmt(row['step_ms_p50'])} ms"
        after = f", {fmt(row['synchronization_ms_p50'])} ms of them after the backward pass"
        lines.append(f"{text}{after}. That is {' and '.join(parts)}." if parts else f"{text}{after}.")
    return _paragraphs(lines, f"*{page.NAMES[wrapper]}*: {NOT_MEASURED}.")


# --------------------------------------------------------------------------------------------------- the traces
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
        f"*{page.way(r)}* {_percent(r['overlap_ms'] / r['communication_ms'])} of {fmt(r['communication_ms'])} ms"
        for r in rows
        if r["communication_ms"]
    ]
    text = f"Recorded by {', '.join(sources)}. Hidden behind computation: {'; '.join(parts)}."
    if any(r["source"] == "torch-cpu" for r in rows):
        text += (
            " Without a GPU there are no streams: operators of the CPU stand for kernels, and what Gloo's own threads"
            " report for communication, which competes with computation for the same cores."
        )
    return text


def host_words(chapter: Chapter) -> str:
    """Whether the GPU or the host sets the pace: kernels that compute, by a trace without overlap, against the step."""
    lines = []
    for machine, context, rows in _places(chapter):
        traced = _one(
            chapter.rows(kind="trace", machine=machine, context_length=context).to_dict("records"), "naive"
        )
        step = _one(rows, "none")
        if traced is None or step is None:
            continue
        busy, whole = traced["compute_ms"], step["step_ms_p50"]
        text = (
            f"`{machine}`, context {context}: kernels that compute take {fmt(busy)} ms of a step (by the trace of"
            f" *naive*, where nothing runs beside them), and a step without communication takes {fmt(whole)} ms."
        )
        if busy < _BUSY * whole:
            text += (
                f" For {_percent(1 - busy / whole)} of it the GPU has no work: the host launches kernels more slowly"
                " than they run. What a way costs the host, for hooks, copies and calls, then adds to the step as a"
                " whole, and how even the host's pace is decides how even the step is."
            )
        else:
            text += " So the GPU sets the pace, and the host's work for hooks and calls hides behind it."
        lines.append(text)
    return _paragraphs(lines, f"Who sets the pace: {NOT_MEASURED}.")


# -------------------------------------------------------------------------------------------------- the buckets
def bucket_words(chapter: Chapter) -> str:
    """`ddp_bucketed_benchmarking` (a): the best and the worst bucket."""
    lines = []
    for machine, context, _ in _places(chapter):
        rows = page.sweep(chapter, machine, context)
        if len(rows) < 2:
            continue
        best, worst = (f(rows, key=lambda r: r["step_ms_p50"]) for f in (min, max))
        lines.append(
            f"`{machine}`, context {context}: the step is shortest with buckets of {best['bucket_mb']:g} MB"
            f" ({fmt(best['step_ms_p50'])} ms, {round(best['collectives'])} all-reduces) and longest with"
            f" {worst['bucket_mb']:g} MB ({fmt(worst['step_ms_p50'])} ms, {round(worst['collectives'])}), a factor of"
            f" {worst['step_ms_p50'] / best['step_ms_p50']:.3f}."
        )
    return _paragraphs(lines, f"Sizes of buckets: {NOT_MEASURED}.")


def fit_words(chapter: Chapter) -> str:
    """`ddp_bucketed_benchmarking` (b): what the model's parameters are here, its optimum, and how far it is off."""
    lines = []
    for machine, context, _ in _places(chapter):
        rows = page.sweep(chapter, machine, context)
        for constant in (False, True):
            found = page.fit(chapter, rows, constant)
            if found is None:
                continue
            off = max(abs(r) for r in found.residuals_s) * 1e3
            name = "with a constant" if constant else "the model as it stands"
            text = f"- `{machine}`, context {context}, {name}: "
            if found.model is None:
                vanished = "$o$" if found.call_s == 0 else "$s/w$"
                text += f"least squares leaves no room for the term with {vanished}"
            else:
                text += (
                    f"$w$ = {fmt(found.model.bytes_per_s / 1e9)} GB/s, $o$ = {fmt(found.call_s * 1e6)} µs, so that the"
                    f" best number of buckets is {fmt(found.model.best_num_buckets)}, of"
                    f" {fmt(found.model.best_bucket_bytes / closed.MB)} MB"
                )
            if constant:
                text += f"; the constant is {fmt(found.constant_s * 1e3)} ms"
            lines.append(f"{text}. The fit is off by {fmt(off)} ms at most.")
    return "\n".join(lines) or f"The model's parameters: {NOT_MEASURED} (three sizes of buckets are needed)."


def tail_words(chapter: Chapter) -> str:
    """Why buckets of this model cannot be equal."""
    config, _ = page.model_of(chapter)
    sizes = closed.bucket_bytes(config, 0)
    return (
        f"The largest parameters of this model have {fmt(max(sizes) / closed.MB)} MB, and the one whose gradient comes"
        f" last, the token embedding, has {fmt(sizes[-1] / closed.MB)} MB. A smaller limit leaves each of them a"
        " bucket of its own."
    )


# ------------------------------------------------------------------------------------------------------ overall
def best_words(chapter: Chapter) -> str:
    """The fastest of ours against torch's DDP and against no communication at all, in one run."""
    lines = []
    for machine, context, rows in _places(chapter):
        ours = [r for r in rows if r["wrapper"] in OURS and page.ok(r)]
        if not ours:
            continue
        best = min(ours, key=lambda r: r["step_ms_p50"])
        parts = []
        for wrapper, mb in (("torch", 0.0), ("torch", 100.0), ("torch_view", 0.0), ("none", 0.0)):
            base = page.mate(chapter, best, wrapper, mb)
            if base is not None:
                parts.append(f"{best['step_ms_p50'] / base['step_ms_p50']:.3f} × *{page.way(base)}*")
        text = f"`{machine}`, context {context}: the fastest is *{page.way(best)}*, {fmt(best['step_ms_p50'])} ms"
        lines.append(f"{text}: {', '.join(parts)}." if parts else f"{text}.")
    return _paragraphs(lines, f"The fastest way: {NOT_MEASURED}.")


def scaling_words(chapter: Chapter) -> str:
    """Weak scaling of ours and of torch's, at every number of ranks, and what others have published."""
    lines = []
    for machine in chapter.machines:
        rows = page.timed(chapter, machine=machine, world_size="all")
        for ranks in sorted({r["world_size"] for r in rows if r["world_size"] > 1}):
            for context in page.contexts(rows):
                here = [r for r in rows if (r["world_size"], r["context_length"]) == (ranks, context)]
                found = [
                    (page.efficiency(chapter, r), r) for r in here if r["wrapper"] not in ("alone", "none")
                ]
                found = [(share, r) for share, r in found if share is not None]
                if not found:
                    continue
                best, row = max(found, key=lambda pair: pair[0])
                text = (
                    f"- `{machine}`, {ranks} ranks, context {context}: *{page.way(row)}* {_percent(best, 3)}"
                )
                other = next((s for s, r in found if (r["wrapper"], r["bucket_mb"]) == ("torch", 0)), None)
                naive = next((s for s, r in found if r["wrapper"] == "naive"), None)
                text += f", *torch DDP* {_percent(other, 3)}" if other is not None else ""
                text += f", *naive* {_percent(naive, 3)}" if naive is not None else ""
                lines.append(f"{text}.")
    return "\n".join(lines) or f"Weak scaling: {NOT_MEASURED}."


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
    parts = [f"*{name}* {_percent(max(shares))}" for name, shares in more.items()]
    return (
        f"The allocator's peak lies {_percent(min(off))} to {_percent(max(off))} above the closed form. Over the step"
        f" without communication, at most: {', '.join(parts)}."
    )


def alone_words(chapter: Chapter) -> str:
    """What the wrappers cost where there is nobody to talk to."""
    rows = [r for r in page.timed(chapter, world_size=1) if r["wrapper"] not in ("none", "alone")]
    parts = [
        f"*{page.way(r)}* {fmt(cost)} ms at context {r['context_length']}"
        for r in rows
        if (cost := page.exposed_ms(chapter, r)) is not None
    ]
    if not parts:
        return f"The wrappers on one rank: {NOT_MEASURED}."
    return f"On one rank, where an all-reduce sends nothing, hooks, copies and calls alone cost: {'; '.join(parts)}."


def noise_words(chapter: Chapter) -> str:
    """How far the same case measured twice lies apart."""
    rows = chapter.measured(kind="time")
    keys = [
        "machine",
        "run",
        "size",
        "context_length",
        "wrapper",
        "bucket_mb",
        "dtype",
        "world_size",
        "batch",
    ]
    both = rows[rows["repeat"] == 0].merge(rows[rows["repeat"] == 1], on=keys, suffixes=("", "_again"))
    if both.empty:
        return f"Pairs of the same case: {NOT_MEASURED}."
    apart = (both["step_ms_p50_again"].astype(float) / both["step_ms_p50"].astype(float) - 1).abs()
    return (
        f"{len(apart)} case{'s were' if len(apart) > 1 else ' was'} measured twice in one run (A/A): medians lie"
        f" {_percent(apart.max())} apart at most. No difference smaller than that means anything here."
    )
