"""The sentences of chapter `memory` about how far its closed forms, the allocator and a second run agree."""

from __future__ import annotations

from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages.memory import (
    MIB,
    alive,
    case_of,
    closed_form,
    expected_categories,
    left_out_bytes,
    primary,
    rounded_off_bytes,
    what,
)  # fmt: skip
from cs336_systems.report.pages.memory_words import amount
from cs336_systems.report.tables import fmt
from cs336_systems.sizes import size


def accuracy(chapter: Chapter) -> str:
    """How far the closed form is from what was measured, over all rows, and what is left when all is counted."""
    rows = chapter.measured().to_dict("records")
    if not rows:
        return f"The closed form against the measured peaks: {NOT_MEASURED}."
    apart, rest = [], []
    for row in rows:
        moment, items = closed_form(chapter, row)
        expected = sum(items.values())
        counted = expected + row["before_recording_bytes"] + left_out_bytes(case_of(chapter, row), moment)
        apart.append(100 * (row["peak_bytes"] / expected - 1))
        rest.append(row["requested_bytes"] - counted)
    return (
        f"Over all {len(rows)} measured cases, the peak is {fmt(min(apart), 2)} % to {fmt(max(apart), 2)} % above the"
        " closed form. Closed form, workspaces, tables and ids add up to what was requested, to within"
        f" {max(map(abs, rest)):,.0f} bytes in every case."
    )


def rounding(chapter: Chapter) -> str:
    """What the allocator's rounding comes to in passes and steps of the largest model, beside that of its weights."""
    rows = chapter.measured(size=primary(chapter), source="allocator").to_dict("records")
    if not rows:
        return f"What the allocator rounds up: {NOT_MEASURED}."
    parameters = rounded_off_bytes(size(primary(chapter)))
    words = []
    for what_kind, step in (("forward passes", False), ("training steps", True)):
        found = [r["peak_bytes"] - r["requested_bytes"] for r in rows if (r["mode"] == "train_step") == step]
        if found:
            words.append(
                f"the {what_kind} were rounded up by {fmt(min(found) / MIB)} to {fmt(max(found) / MIB)} MiB"
            )
    return (
        f"By these rules the weights of `{primary(chapter)}` keep {fmt(parameters / MIB)} MiB that they do not need,"
        f" and weights, gradients and two moments at most {fmt(4 * parameters / MIB)} MiB. Measured,"
        f" {', and '.join(words)}."
    )


def categories(chapter: Chapter) -> str:
    """How far any category of any case is from its closed form, the workspaces aside."""
    found = []
    for row in chapter.measured().to_dict("records"):
        there = alive(chapter, row)
        for name, expected in expected_categories(chapter, row).items():
            if name != "before recording":
                found.append((abs(there.get(name, 0) - expected), name))
    if not found:
        return f"Categories against their closed forms: {NOT_MEASURED}."
    apart, name = max(found)
    return (
        "Before rounding to the digits shown, the largest difference in any category of any case, of whatever size and"
        f" precision, is {fmt(apart / MIB)} MiB, of *{name}*."
    )


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
        same = "the same peak to the byte" if apart == 0 else f"peaks that are {amount(apart)} apart"
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
