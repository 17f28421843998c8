"""The sentences of chapter `ddp` about buckets: their size, what a buffer costs, and the model of the overhead."""

from __future__ import annotations

from typing import Any

from cs336_systems.accounting import data_parallel as closed
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.pages import ddp_pace as pace
from cs336_systems.report.pages import ddp_predictions as predictions
from cs336_systems.report.pages.ddp_pace import MEET, Place, leading, meet, places, spread
from cs336_systems.report.pages.ddp_words import in_italics
from cs336_systems.report.tables import fmt, listed


def tail_words(chapter: Chapter) -> str:
    """Why buckets of this model cannot be equal."""
    config, _ = page.model_of(chapter)
    sizes = closed.bucket_bytes(config, 0)
    text = (
        f"The largest parameters of this model have {fmt(max(sizes) / closed.MB)} MB, and the one whose gradient comes"
        f" last, the token embedding, has {fmt(sizes[-1] / closed.MB)} MB. A smaller limit leaves each of them a"
        " bucket of its own."
    )
    limits = sorted({r["bucket_mb"] for r in page.timed(chapter, ("bucketed",))})
    if limits and len(closed.bucket_bytes(config, limits[0] * closed.MB)) == len(sizes):
        text += (
            f" With {limits[0]:g} MB every parameter is one: the messages are those of *overlapped*, and only the"
            " buffers are added."
        )
    return text


def _sweep(place: Place, wrapper: str = "bucketed") -> list[dict[str, Any]]:
    return sorted((r for r in place.rows if r["wrapper"] == wrapper), key=lambda r: r["bucket_mb"])


def bucket_words(chapter: Chapter) -> str:
    """`ddp_bucketed_benchmarking` (a): the best and the worst bucket, and what the largest one costs."""
    lines = []
    first = leading(chapter)
    config, _ = page.model_of(chapter)
    for place in places(chapter):
        rows = _sweep(place)
        if len(rows) < 2:
            continue
        best, worst = (f(rows, key=lambda r: r["step_ms_p50"]) for f in (min, max))
        near = [f"{r['bucket_mb']:g}" for r in rows if r is not best and meet(r, best)]
        text = (
            f"{place.head}: the step is shortest with buckets of {best['bucket_mb']:g} MB"
            f" ({fmt(best['step_ms_p50'])} ms, {round(best['collectives'])} all-reduces) and longest with"
            f" {worst['bucket_mb']:g} MB ({fmt(worst['step_ms_p50'])} ms, {round(worst['collectives'])}), a factor of"
            f" {worst['step_ms_p50'] / best['step_ms_p50']:.3f}."
        )
        text += f" The p20–p80 range of the best meets that of {listed(near)} MB." if near else ""
        if place in first:
            large = rows[-1]
            last = closed.bucket_bytes(config, large["bucket_mb"] * closed.MB)[-1]
            due = predictions.after_ms(
                chapter, place.machine, place.world_size, "bucketed", large["bucket_mb"]
            )
            text += (
                f" With {large['bucket_mb']:g} MB, the last bucket has {fmt(last / closed.MB)} MB, and the wait for it"
                f" is {fmt(large['synchronization_ms_p50'])} ms"
                f"{'' if due is None else f' (predicted: {fmt(due)} ms)'}."
            )
        lines.append(text)
    return "\n\n".join(lines) or (f"Sizes of buckets: {NOT_MEASURED}.")


def buffer_words(chapter: Chapter) -> str:
    """What bringing gradients into buffers costs: against the same messages without them."""
    lines = []
    for place in leading(chapter):
        alone, small = place.one("overlapped"), next(iter(_sweep(place)), None)
        if alone and small and alone["collectives"] == small["collectives"]:
            more = small["step_ms_p50"] - alone["step_ms_p50"]
            copied = pace.measured_copy_ms(chapter, place.machine)
            each = f", {fmt(more / small['collectives'] * 1e3)} µs a bucket" if more > 0 else ""
            text = (
                f"{place.head}: {in_italics(small)} sends the same {round(small['collectives'])} messages as"
                f" *overlapped*, and takes {fmt(abs(more))} ms {'more' if more > 0 else 'less'}{each}"
                f"{f' ({MEET})' if meet(small, alone) else ''}."
            )
            if copied is not None and 0 < copied < more / 2:
                text += f" The copies themselves are {fmt(copied)} ms of it."
                if spread(small) > pace.EVEN:
                    text += (
                        " The rest must be the host's work for each bucket, in the middle of the backward pass: these"
                        " steps are uneven again (p20–p80:"
                        f" {fmt(small['step_ms_p20'])}–{fmt(small['step_ms_p80'])} ms)."
                    )
            lines.append(text)
    pairs, near, machines = [], 0, []
    for place in leading(chapter):
        sides = [(r, place.one("bucketed", r["bucket_mb"])) for r in _sweep(place, "in_place")]
        sides.append((place.one("torch_view"), place.one("torch")))
        for without, beside in sides:
            if without is None or beside is None:
                continue
            if meet(without, beside):
                near += 1
                continue
            less = beside["step_ms_p50"] - without["step_ms_p50"]
            pairs.append(f"{in_italics(without)} {fmt(less)} ms ({place.name})")
            machines.append(place.machine)
    if pairs:
        least = {m: predictions.copy_ms(chapter, m) for m in machines}
        due = [f"{fmt(found[0])} ms on `{m}`" for m, found in least.items() if found is not None]
        lines.append(
            f"What a step takes less without the copy into a buffer: {', '.join(pairs)}"
            f"{f'; predicted were {listed(due)}' if due else ''}."
            f"{f' (Of {near} more such pairs the {MEET}.)' if near else ''}"
        )
    elif near:
        lines.append(f"With and without the copy into a buffer, the {MEET}.")
    return "\n\n".join(lines) or (f"What buffers cost: {NOT_MEASURED}.")


def fit_words(chapter: Chapter) -> str:
    """`ddp_bucketed_benchmarking` (b): the optimum by model and sweep, and what the fitted numbers are not."""
    lines = []
    config, _ = page.model_of(chapter)
    main = page.settings(chapter)["dtype"]
    for place in leading(chapter):
        rows = page.sweep(chapter, place.machine, place.context) if place.dtype == main else []
        found = [f for constant in (False, True) if (f := page.fit(chapter, rows, constant)) is not None]
        sizes = [fmt(f.model.best_bucket_bytes / closed.MB) for f in found if f.model is not None]
        if not sizes:
            continue
        best = min(rows, key=lambda r: r["exposed_ms"])
        text = (
            f"{place.head}: the best bucket of the sweep has {best['bucket_mb']:g} MB, that of the fits"
            f" {listed(sizes)} MB; the least overhead of the sweep is {fmt(best['exposed_ms'])} ms"
        )
        apart = predictions.optimum(chapter, place.machine, place.world_size)
        if apart is not None:
            text += (
                ". With the $w$ and $o$ of all-reduces alone the model has"
                f" {fmt(apart.best_bucket_bytes / closed.MB)} MB and {fmt(apart.least_overhead_s * 1e3)} ms"
            )
        text += "."
        sizes_sent = closed.bucket_bytes(config, best["bucket_mb"] * closed.MB)
        sending = predictions.messages_ms(chapter, place.machine, place.world_size, sizes_sent)
        base = place.one("none")
        if sending is not None and base is not None:
            text += (
                f" In buckets of {best['bucket_mb']:g} MB everything should be sent in {fmt(sending)} ms, and the"
                f" backward pass takes {fmt(base['backward_ms_p50'])} ms: computing a bucket takes"
                f" {fmt(base['backward_ms_p50'] / sending, 2)} times as long as sending it."
            )
        longer = pace.parts(chapter, best)["longer"]
        if longer > 0.5 * best["exposed_ms"]:
            text += f" What the model lacks is a backward pass that becomes {fmt(longer)} ms longer."
        large, last = rows[-1], closed.bucket_bytes(config, rows[-1]["bucket_mb"] * closed.MB)[-1]
        waited, fitted = large["synchronization_ms_p50"], found[0].model
        if fitted is not None and fitted.bytes_per_s * waited / 1e3 < 0.8 * last:
            text += (
                f" The fitted $w$ is no bandwidth: the last bucket of {fmt(last / closed.MB)} MB is waited for"
                f" {fmt(waited)} ms, which is {fmt(last / waited / 1e6)} GB/s."
            )
        alone = place.one("overlapped")
        exposed = page.exposed_ms(chapter, alone) if alone is not None else None
        if exposed is not None and exposed < 0.5 * (due := found[0].overhead_s(alone["collectives"]) * 1e3):
            text += (
                f" Nor is the fitted $o$ the price of a call: *overlapped* makes {round(alone['collectives'])} calls"
                f" and exposes {fmt(exposed)} ms, where the fit without constant has {fmt(due)} ms."
            )
        lines.append(text)
    return "\n\n".join(lines) or (
        f"The model's parameters: {NOT_MEASURED} (three sizes of buckets are needed)."
    )


def floor_words(chapter: Chapter) -> str:
    """What no size of buckets removes: a backward pass that shares the GPU, at several places."""
    found: dict[tuple[str, str], list[tuple[Place, float, float]]] = {}
    for place in leading(chapter):
        base = place.one("none")
        for row in _sweep(place, "in_place") if base is not None else ():
            longer = row["backward_ms_p50"] - base["backward_ms_p50"]
            found.setdefault((place.machine, page.way(row)), []).append(
                (place, longer, base["backward_ms_p50"])
            )
    if not found:
        return f"What no size of buckets removes: {NOT_MEASURED}."
    (machine, name), seen = max(found.items(), key=lambda item: len(item[1]))
    parts = [
        f"{fmt(abs(longer))} ms {'longer' if longer > 0 else 'shorter'} than {fmt(base)} ms ({place.name})"
        for place, longer, base in seen
    ]
    text = f"`{machine}`: with *{name}*, where nothing is copied, the backward pass is {listed(parts)}."
    amounts = [longer for _, longer, _ in seen]
    passes = [base for *_, base in seen]
    if min(amounts) > 0 and max(amounts) < 1.15 * min(amounts) and max(passes) > 1.3 * min(passes):
        text += " So it is a price of what is sent, not a share of what is computed."
    return text
