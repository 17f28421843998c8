"""The sentences of chapter `ddp` about other numbers of ranks than that of the main tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cs336_systems.accounting import data_parallel as closed
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.pages import ddp_pace as pace
from cs336_systems.report.pages import ddp_predictions as predictions
from cs336_systems.report.pages.ddp_pace import Place, places
from cs336_systems.report.pages.ddp_words import OURS, in_italics
from cs336_systems.report.roofs import machine_environment
from cs336_systems.report.tables import fmt, listed, percent, span


def scaling_words(chapter: Chapter) -> str:
    """Weak scaling where steps are even: our fastest of the ways that all numbers of ranks have, torch's, and naive."""
    lines, alone = [], []
    main = page.settings(chapter)["dtype"]
    found = [p for p in places(chapter, "all") if p.world_size > 1 and p.dtype == main]
    for place in found:
        one = place.one("alone")
        if not place.even and any(p.even for p in found):
            alone += [pace.spread(one)] if one is not None else []
            continue
        common = page.side_by_side(chapter, place.context)
        ours = [
            (share, r) for r in place.rows
            if r["wrapper"] in OURS and (r["wrapper"], r["bucket_mb"]) in common
            and (share := page.efficiency(chapter, r)) is not None
        ]  # fmt: skip
        if not ours:
            continue
        best, row = max(ours, key=lambda pair: pair[0])
        text = f"- {place.head}, {place.world_size} ranks: {in_italics(row)} {percent(best, 3)}"
        for wrapper in ("torch", "naive", "none"):
            other = place.one(wrapper)
            share = None if other is None else page.efficiency(chapter, other)
            text += f", *{page.NAMES[wrapper]}* {percent(share, 3)}" if share is not None else ""
        lines.append(f"{text}.")
    if lines and alone:
        lines.append(
            f"\nWhere steps are uneven, the p20–p80 range of *one rank alone* is {span(alone, 2, percent)} of its"
            " median: shares are rough there."
        )
    return "\n".join(lines) or f"Weak scaling: {NOT_MEASURED}."


def more_ranks_words(chapter: Chapter) -> str:
    """What averaging takes on other numbers of ranks than the main tables', where steps are even: beside what was due,
    and beside the main number of ranks on the same GPUs."""
    lines = []
    main = page.settings(chapter)
    for place in places(chapter, "all"):
        naive = place.one("naive")
        if place.world_size in (1, main["world_size"]) or place.dtype != main["dtype"] or not place.even:
            continue
        if naive is None:
            continue
        before = _on_fewer(chapter, place)
        then = before.one("naive") if before is not None else None
        sent = naive["synchronization_ms_p50"]
        due = predictions.after_ms(chapter, place.machine, place.world_size, "naive", 0.0)
        text = f"{place.head}, {place.world_size} ranks: *naive* averages for {fmt(sent)} ms after the backward pass"
        text += "" if due is None else f"; predicted were {fmt(due)} ms"
        if before is not None and then is not None:
            grown, sizes = sent / then["synchronization_ms_p50"], _bytes_grow(place, before)
            text += (
                f". That is {fmt(grown)} times as long as on {before.world_size} ranks of `{before.machine}`"
                f" ({fmt(then['synchronization_ms_p50'])} ms), for {fmt(sizes)} times the bytes through each link"
            )
            first = predictions.after_ms(chapter, before.machine, before.world_size, "naive", 0.0)
            if due is not None and first is not None:
                text += f"; by the predictions it should be {fmt(due / first)} times"
                if due / first < 0.95 * sizes:
                    text += ", since all-reduces of more ranks have more bandwidth"
            text += _longer_on_more(chapter, place, before)
        text += _left_over(chapter, place, naive)
        lines.append(f"{text}.")
    return "\n\n".join(lines)


def _on_fewer(chapter: Chapter, place: Place) -> Place | None:
    """The same context and precision with the main number of ranks, on the same GPUs, if steps are even there."""
    gpu = machine_environment(place.machine, chapter.root).get("gpu")
    for other in places(chapter):
        same = (other.context, other.dtype) == (place.context, place.dtype)
        if same and other.even and machine_environment(other.machine, chapter.root).get("gpu") == gpu:
            return other
    return None


def _bytes_grow(many: Place, few: Place) -> float:
    return closed.sent_bytes(1.0, many.world_size) / closed.sent_bytes(1.0, few.world_size)


def _longer_on_more(chapter: Chapter, many: Place, few: Place) -> str:
    """By how much what is sent beside the backward pass makes it longer, with more ranks and with fewer."""
    noise = max(many.same_work_ms or 0.0, few.same_work_ms or 0.0)
    parts, grown = [], []
    for row in many.rows:
        then = few.one(row["wrapper"], row["bucket_mb"])
        both = [pace.parts(chapter, r) for r in (row, then) if r is not None]
        if row["wrapper"] in ("alone", "none", "naive", "flat") or len(both) < 2 or None in both:
            continue
        now, before = (found["longer"] for found in both)
        if min(now, before) > noise:
            parts.append(f"{fmt(now)} instead of {fmt(before)} ms with {in_italics(row)}")
            grown.append(now / before)
    if not parts:
        return ""
    return f". The backward pass gets longer by {listed(parts)}: {span(grown)} times"


def _left_over(chapter: Chapter, place: Place, naive: Mapping[str, Any]) -> str:
    """Of what *naive* exposes, how much the best of the ways that overlap still does, and how sure that is."""
    whole = page.exposed_ms(chapter, naive)
    over = [
        (ms, row) for row in place.rows
        if row["wrapper"] in OURS and row["wrapper"] not in ("naive", "flat")
        and (ms := page.exposed_ms(chapter, row)) is not None
    ]  # fmt: skip
    if not over or whole is None:
        return ""
    ms, best = min(over, key=lambda pair: pair[0])
    text = f". Of the {fmt(whole)} ms that *naive* exposes, {in_italics(best)} exposes {fmt(ms)} ms"
    noise = place.same_work_ms
    return text + (f"; the same work lies up to {fmt(noise)} ms apart there" if noise else "")
