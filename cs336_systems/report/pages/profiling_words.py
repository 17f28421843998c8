"""The sentences of chapter `profiling`: what its rows say about clocks, kernels, shares and attention. See
`pages.profiling`."""

from __future__ import annotations

import itertools
from typing import Any

from cs336_systems import accounting
from cs336_systems.experiments.profiling import CLASS_COLUMNS, RANGES
from cs336_systems.measure.kernels import PRODUCT
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.pages.profiling import (
    PASSES,
    SHAPE,
    SOFTMAX_FLOPS,
    attention_flops,
    attention_times,
    benchmarked,
    drawn,
    longest,
    ok,
    primary,
    read_step,
    rows,
    shapes,
    together,
)  # fmt: skip
from cs336_systems.report.tables import fmt, span
from cs336_systems.sizes import size

IDLE = 0.05  # a GPU that is idle for less than this part of the time sets the pace
ADAMW_BYTES = 28  # for each parameter: p, g, m, v read; p, m, v written
SCORE_BYTES = 8  # of softmax, for each score: read and written, fp32 under autocast too
PRODUCTS = CLASS_COLUMNS[PRODUCT]
_TOOLS = {
    "nsys": "Nsight Systems", "torch": "torch's profiler", "torch-cpu": "torch's profiler (operators of the CPU)",
}  # fmt: skip
Shape = dict[str, Any]


def _name(shape: Shape) -> str:
    return f"`{shape['size']}` at context {shape['context_length']} ({shape['dtype']})"


def _share(row: dict[str, Any], column: str = PRODUCTS) -> float:
    return row[column] / row["kernel_ms"]


def _of(count: int, whole: int) -> str:
    return f"all {whole}" if count == whole > 1 else f"{count} of {whole}" if count else f"none of {whole}"


def _shapes(count: int) -> str:
    return "1 shape" if count == 1 else f"{count} shapes"


# ------------------------------------------------------------------------------------------------ what was recorded
def sources_words(chapter: Chapter) -> str:
    """Which tool the rows come from."""
    frame = rows(chapter, status="ok")
    if frame.empty:
        return f"Traces: {NOT_MEASURED}."
    said = [
        f"`{machine}`: {_TOOLS[source]} {', '.join(sorted(map(str, group['tool_version'].unique())))}"
        for (machine, source), group in frame.groupby(["machine", "source"])
    ]
    return f"Recorded with {'; '.join(said)}."


def out_of_memory(chapter: Chapter) -> str:
    """Which shapes could not be recorded whole, and what their steps need by the closed form."""
    frame = rows(chapter)
    failed = frame[frame["status"] == "oom"]
    if failed.empty:
        return (
            "No shape ran out of memory."
            if (frame["status"] == "ok").any()
            else f"Out of memory: {NOT_MEASURED}."
        )
    lines = []
    for key, group in failed.groupby(SHAPE, sort=False):
        machine, name, context, dtype = key
        precision = "bf16" if dtype == "bf16" else "fp32"
        batch = int(group["batch"].iloc[0])
        needed = accounting.peak_bytes(
            size(name), batch, int(context), "train_step", precision, optimizer="fused"
        )
        ranges = ", ".join(f"`{one}`" for one in dict.fromkeys(group["range"]))
        lines.append(
            f"- `{name}` at context {context} ({dtype}) on `{machine}`: {ranges}. By the closed form the whole step"
            f" needs {fmt(sum(needed.values()) / 2**30)} GiB; {len(RANGES) - len(group)} of its {len(RANGES)} ranges"
            " fit."
        )
    return "A step that does not fit is a row too. These ranges ran out of memory:\n\n" + "\n".join(lines)


# ------------------------------------------------------------------------------------------------ (a)
def _idle(row: dict[str, Any]) -> float:
    return row["idle_ms"] / (row["idle_ms"] + row["busy_ms"])


def timer_words(chapter: Chapter) -> str:
    """How the trace's forward compares with the host's clock, and where the GPU waits."""
    found = [(s, r["forward"]) for s, r in shapes(chapter) if ok(r.get("forward"))]
    if not found:
        return f"Forward by clock and trace: {NOT_MEASURED}."
    idle = [(_idle(row), shape) for shape, row in found]
    (most, at), (least, at_least) = max(idle, key=lambda x: x[0]), min(idle, key=lambda x: x[0])
    said = (
        f"The GPU is idle for {fmt(100 * least, 2)} % of the forward pass of {_name(at_least)}, and for"
        f" {fmt(100 * most, 2)} % of that of {_name(at)}."
    )
    parts = []
    for words, busy in ((f"less than {100 * IDLE:g} %", True), ("more", False)):
        ratios = [row["host_ms"] / row["python_ms"] for _, row in found if (_idle(row) < IDLE) == busy]
        if ratios:
            parts.append(
                f"{span(ratios)} times as long where the GPU is idle for {words} ({_shapes(len(ratios))})"
            )
    return f"{said} Beside the pass without recording, the range `forward` takes {', and '.join(parts)}."


def benchmark_words(chapter: Chapter) -> str:
    """How the forward pass compares with the times of chapter `benchmarking`."""
    clocks = benchmarked(chapter)
    found = [
        (row, clocks[tuple(shape.values())])
        for shape, by in shapes(chapter)
        if ok(row := by.get("forward")) and tuple(shape.values()) in clocks
    ]
    if not found:
        return f"The same passes in chapter `benchmarking`: {NOT_MEASURED}."
    said = []
    for words, busy in ((f"less than {100 * IDLE:g} %", True), ("more", False)):
        part = [(row, before) for row, before in found if (_idle(row) < IDLE) == busy]
        if part:
            ratios = [[row[column] / before for row, before in part] for column in ("host_ms", "python_ms")]
            said.append(
                f"where the GPU is idle for {words} ({_shapes(len(part))}), the range takes {span(ratios[0])} times"
                f" as long as there, and the pass without recording {span(ratios[1])} times"
            )
    return (
        "[The chapter on benchmarking](benchmarking.ipynb) timed the same passes in other processes:"
        f" {'; '.join(said)}."
    )


def timeline_words(chapter: Chapter, machine: str) -> str:
    """How far ahead of the GPU the host runs, in the steps that are drawn."""
    said = []
    for name, dtype in drawn(chapter):
        step = read_step(chapter, machine, name, dtype)
        own = [r for r in step.ranges if r.thread == 0] if step else []
        forward = next((r for r in own if r.name == "forward"), None)
        inside = [r.start_ns + r.length_ns for r in own if r.name.startswith("attention")]
        if step is None or forward is None or not inside:
            said.append(f"- `{name}`, {dtype}: {NOT_MEASURED}.")
            continue
        at = (max(inside) - forward.start_ns) / forward.length_ns
        busy = step.usage.busy_ms / step.usage.host_ms
        said.append(
            f"- `{name}`, {dtype}: the host leaves the last attention after {fmt(100 * at, 2)} % of `forward`; over the"
            f" whole step the GPU is busy for {fmt(100 * busy, 2)} % of the time."
        )
    return "\n".join(said)


# ------------------------------------------------------------------------------------------------ (b)
def top_words(chapter: Chapter) -> str:
    """What kind of kernel takes the most time in forward, and whether it is another one with backward."""
    said = []
    found = [
        (shape, longest(by["forward"])[0], longest(by["forward"], by["backward"])[0])
        for shape, by in shapes(chapter)
        if ok(by.get("forward"), by.get("backward"))
    ]
    for dtype in dict.fromkeys(shape["dtype"] for shape, _, _ in found):
        part = [(first, both) for shape, first, both in found if shape["dtype"] == dtype]
        products = [sum(pair[i][1] == PRODUCT for pair in part) for i in (0, 1)]
        same = sum(first[0] == both[0] for first, both in part)
        others = dict.fromkeys(pair[i][0] for pair in part for i in (0, 1) if pair[i][1] != PRODUCT)
        words = (
            f"- {dtype}: the first kernel of forward is a matrix product in {_of(products[0], len(part))} shapes, that"
            f" of forward and backward in {_of(products[1], len(part))}; it is the same kernel in"
            f" {_of(same, len(part))}."
        )
        if others:
            words += f" What else comes first: {', '.join(f'`{kernel}`' for kernel in others)}."
        said.append(words)
    return "\n".join(said) or f"The kernels with the most time: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ (c)
def others_words(chapter: Chapter) -> str:
    """The classes other than matrix products that take the most time in forward, for each size."""
    said = []
    for shape, found in shapes(chapter, context_length=primary(chapter)):
        row = found.get("forward")
        if not ok(row):
            continue
        shares = {kind: _share(row, column) for kind, column in CLASS_COLUMNS.items()}
        rest = [(share, kind) for kind, share in shares.items() if kind != PRODUCT and share > 0]
        words = ", ".join(f"{kind} {fmt(100 * share, 2)} %" for share, kind in sorted(rest, reverse=True)[:4])
        said.append(
            f"- `{shape['machine']}`, `{shape['size']}`, {shape['dtype']}: matrix products"
            f" {fmt(100 * shares[PRODUCT], 3)} % of the kernels' time; then {words}."
        )
    return "\n".join(said) or f"Kernels other than products: {NOT_MEASURED}."


def width_words(chapter: Chapter) -> str:
    """How the share of products in forward depends on the size, for each dtype."""
    said = []
    found = [
        (shape, by["forward"])
        for shape, by in shapes(chapter, context_length=primary(chapter))
        if ok(by.get("forward"))
    ]
    for machine, dtype in dict.fromkeys((shape["machine"], shape["dtype"]) for shape, _ in found):
        part = [
            (s["size"], _share(row)) for s, row in found if (s["machine"], s["dtype"]) == (machine, dtype)
        ]
        if len(part) < 2:
            continue
        shares = [share for _, share in part]
        grows = all(a < b for a, b in itertools.pairwise(shares))
        most = sum(share > 0.5 for share in shares)
        said.append(
            f"- {dtype}: products take {fmt(100 * shares[0])} % of the kernels' time in `{part[0][0]}` and"
            f" {fmt(100 * shares[-1])} % in `{part[-1][0]}`; the share {'grows' if grows else 'does not grow'} with"
            f" every size, and is more than half in {_of(most, len(shares))} sizes."
        )
    if not said:
        return f"The share of products by size: {NOT_MEASURED}."
    return "\n".join(said)


# ------------------------------------------------------------------------------------------------ (d)
def share_words(chapter: Chapter) -> str:
    """How the share of products changes from inference to a training step."""
    said = []
    for shape, found in shapes(chapter, context_length=primary(chapter)):
        parts = [found.get(name) for name in ("inference", *PASSES)]
        if not ok(*parts):
            continue
        inference, whole = parts[0], together(*parts[1:])
        said.append(
            f"- `{shape['machine']}`, `{shape['size']}`, {shape['dtype']}: products {fmt(100 * _share(inference))} % of"
            f" inference, {fmt(100 * _share(whole))} % of the step, of which AdamW takes"
            f" {fmt(100 * parts[3]['kernel_ms'] / whole['kernel_ms'], 2)} %."
        )
    return "\n".join(said) or f"The share of products: {NOT_MEASURED}."


def change_words(chapter: Chapter) -> str:
    """In how many shapes the share of products falls from inference to the step, and what pulls it up and down."""
    found = [
        (shape, by) for shape, by in shapes(chapter) if ok(*(by.get(name) for name in ("inference", *PASSES)))
    ]
    said = []
    for dtype in dict.fromkeys(shape["dtype"] for shape, _ in found):
        part = [(shape, by) for shape, by in found if shape["dtype"] == dtype]
        rises = [s for s, by in part if _share(together(*(by[n] for n in PASSES))) > _share(by["inference"])]
        backward = sum(_share(by["backward"]) > _share(by["forward"]) for _, by in part)
        adamw = [
            100 * by["optimizer"]["kernel_ms"] / together(*(by[n] for n in PASSES))["kernel_ms"]
            for _, by in part
        ]
        where = ", ".join(f"`{s['size']}` at {s['context_length']}" for s in rises)
        said.append(
            f"- {dtype}: the share of products falls in {_of(len(part) - len(rises), len(part))} shapes"
            + (f"; it rises in {where}" if rises else "")
            + f". Backward has a larger share of products than forward in {_of(backward, len(part))}, and AdamW takes"
            f" {span(adamw, 2)} % of the step."
        )
    return "\n".join(said) or f"From inference to a whole step: {NOT_MEASURED}."


def adamw_words(chapter: Chapter) -> str:
    """The rate at which AdamW moves its bytes, beside the machine's best copy, and what the host adds."""
    said = []
    roofs = steps.found_roofs(chapter)
    for machine, part in rows(chapter, range="optimizer", status="ok").groupby("machine"):
        part = part[part["kernel_ms"].astype(float) > 0]
        if part.empty:
            continue
        records = part.to_dict("records")
        rate = [
            ADAMW_BYTES * accounting.num_parameters(size(row["size"])) / row["kernel_ms"] / 1e9
            for row in records
        ]
        by_size = part.astype({"kernel_ms": float}).groupby("size")["kernel_ms"]
        spread = (by_size.max() / by_size.min() - 1).max()
        roof = roofs[machine].tb_per_s if machine in roofs else None
        of_roof = f", {span([100 * r / roof for r in rate], 2)} % of its best copy" if roof else ""
        said.append(
            f"On `{machine}` AdamW's kernels move {span(rate)} TB/s by this count{of_roof}, whatever the size; at one"
            f" size their times at all contexts and dtypes lie within {fmt(100 * spread, 2)} %. The range `optimizer`"
            f" takes {span([row['host_ms'] / row['kernel_ms'] for row in records])} times as long as its kernels."
        )
    return " ".join(said) or f"The rate of AdamW: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ (e)
def attention_words(chapter: Chapter) -> str:
    """The two ratios at the primary context."""
    said = []
    for shape, found in shapes(chapter, context_length=primary(chapter)):
        times = attention_times(found)
        if not times or not (times[0] and times[1]):
            continue
        products, inside, rest = times
        one, of_softmax = attention_flops(found["softmax"])
        said.append(
            f"- `{shape['machine']}`, `{shape['size']}`, {shape['dtype']}: softmax takes {fmt(inside / products)} times"
            f" as long as both products for {fmt(of_softmax / (2 * one), 2)} times their FLOPs: at"
            f" {fmt((inside / of_softmax) / (products / (2 * one)), 2)} times the time for each FLOP. All other kernels"
            f" take {fmt(rest / inside)} times as long as softmax."
        )
    return "\n".join(said) or f"Softmax against products: {NOT_MEASURED}."


def softmax_words(chapter: Chapter) -> str:
    """The rate at which softmax moves its scores at the primary context, beside the best copy; and what bf16 does."""
    roofs = steps.found_roofs(chapter)
    said = []
    found = [
        (shape, by["softmax"], times)
        for shape, by in shapes(chapter, context_length=primary(chapter))
        if (times := attention_times(by)) and times[0] and times[1]
    ]
    for machine in dict.fromkeys(shape["machine"] for shape, _, _ in found):
        here = [f for f in found if f[0]["machine"] == machine]
        rate = [
            SCORE_BYTES * attention_flops(row)[1] / SOFTMAX_FLOPS / times[1] / 1e9 for _, row, times in here
        ]
        roof = roofs[machine].tb_per_s if machine in roofs else None
        of_roof = f", {span([100 * r / roof for r in rate], 2)} % of the best copy" if roof else ""
        said.append(
            f"On `{machine}` at context {primary(chapter)} softmax moves {span(rate)} TB/s, {SCORE_BYTES} bytes for"
            f" each score{of_roof}."
        )
        times_of = {(shape["size"], shape["dtype"]): times for shape, _, times in here}
        pairs = [
            (times, times_of[name, "bf16"])
            for (name, dtype), times in times_of.items()
            if dtype == "fp32" and (name, "bf16") in times_of
        ]
        if pairs:
            faster = [span(a[i] / b[i] for a, b in pairs) for i in range(3)]
            said.append(
                f"In bf16 the products are {faster[0]} times as fast as in fp32, softmax {faster[1]} times, and the"
                f" other kernels together {faster[2]} times."
            )
    return " ".join(said) or f"The rate of softmax: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ two tools
def tools_words(chapter: Chapter) -> str:
    """How far the two tools' kernel times lie apart, and the ranges of the host."""
    frame = chapter.rows(status="ok")
    pairs = frame[frame["tool"] == "auto"].merge(
        frame[frame["tool"] == "torch"], on=[*SHAPE, "batch", "range"], suffixes=("", "_torch")
    )
    pairs = pairs[pairs["source"] != pairs["source_torch"]]
    if pairs.empty:
        return f"Both tools on one shape: {NOT_MEASURED}."
    kernel = pairs["kernel_ms_torch"].astype(float) / pairs["kernel_ms"].astype(float)
    host = pairs["host_ms_torch"].astype(float) / pairs["host_ms"].astype(float)
    counts = (pairs["kernels_torch"].astype(float).round() == pairs["kernels"].astype(float).round()).sum()
    off = max(abs(kernel.min() - 1), abs(kernel.max() - 1))
    return (
        f"By torch's profiler the kernels of a range take {fmt(kernel.min())} to {fmt(kernel.max())} times what they"
        f" take by {_TOOLS[pairs['source'].iloc[0]]}, and the range of the host {fmt(host.min())} to {fmt(host.max())}"
        f" times; they count the same number of kernels in {_of(int(counts), len(pairs))} ranges. For the time of"
        f" kernels the stand-in may be trusted to within {fmt(100 * off, 2)} %."
    )
