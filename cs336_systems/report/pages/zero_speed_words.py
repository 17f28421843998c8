"""The sentences of chapter `zero` about times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import zero as page
from cs336_systems.report.pages import zero_speed as speed
from cs336_systems.report.pages.zero import TIMED, Row
from cs336_systems.report.pages.zero_words import amount
from cs336_systems.report.tables import fmt, listed


# ------------------------------------------------------------------------------------------------ what times mean
def pace(chapter: Chapter) -> str:
    """At which contexts the host sets the pace, by steps that do not grow with their work; empty where they all do."""
    steps, bound, wide = speed.steps_alone(chapter), speed.host_paced(chapter), speed.widths(chapter)
    if not bound:
        return ""
    first, last = bound[0], bound[-1]
    contexts, times, ranges = (
        listed([fmt(number, digits) for number in numbers])
        for numbers, digits in ((steps, 3), (steps.values(), 3), ([100 * wide[c] for c in steps], 2))
    )
    text = (
        f"{on(chapter)}, at contexts {contexts} a step without communication takes {times} ms. At context {last}"
        f" a rank has {fmt(last / first)} times the tokens of context {first}, and the step takes"
        f" {fmt(steps[last] / steps[first])} times as long: up to there it is the host that sets the pace,"
        " launching kernels."
    )
    text += f" From their 20 % to their 80 % quantile steps spread over up to {ranges} % of the median."
    longest = speed.decisive(chapter)
    if longest in bound:
        return f"{text} No context here is long enough to be free of the host."
    return (
        f"{text} At context {longest} the step grows with its work, and the GPU sets the pace. So conclusions about the"
        f" time of a step rest on context {longest}: where the host sets the pace, a step tells of the host, whose"
        " speed varies from moment to moment."
    )


def noise(chapter: Chapter) -> str:
    """A sentence about the A/A pairs."""
    found = {team: apart for team in speed.teams(chapter) if (apart := speed.noise(chapter, team))}
    if not found:
        return f"Pairs of the same case: {NOT_MEASURED}."
    pairs = [
        f"{on(chapter, team).replace('On', 'on')} by {listed([fmt(100 * a, 2) for a in apart.values()])} % at"
        f" {_contexts(list(apart))}"
        for team, apart in found.items()
    ]
    return (
        "The sharded variant was timed twice in one run (A/A). Its medians lie apart"
        f" {', '.join(pairs)}. A difference that is no"
        " larger means nothing (*no more than A/A*), and little where the ranges of the two, from 20 % to 80 %,"
        " overlap (*ranges overlap*)."
    )


def on(chapter: Chapter, team: tuple[str, int] | None = None) -> str:
    """ "On 2 ranks of `h200-x2`": the main team, or this one."""
    machine, ranks = team or ((chapter.machines or [""])[0], page.world_size(chapter))
    return f"On {ranks} ranks of `{machine}`"


def _contexts(lengths: Sequence[int]) -> str:
    """`"contexts 128 and 512"`"""
    return f"context{'s' * (len(lengths) > 1)} {listed([str(length) for length in lengths])}"


def _steps(
    chapter: Chapter,
    context: int,
    *variants: str,
    repeats: Sequence[int] | None = None,
    team: tuple[str, int] | None = None,
) -> list[dict[str, Any] | None]:
    """The timed rows of a context; those of another run than the first one's are None."""
    machine, ranks = team or ((chapter.machines or [""])[0], page.world_size(chapter))
    where = {"context_length": context, "machine": machine, "world_size": ranks, "moment": TIMED}
    repeats = repeats or [0] * len(variants)
    rows = [page.one(chapter, variant=v, repeat=r, **where) for v, r in zip(variants, repeats, strict=True)]
    return [row if row and rows[0] and row["run"] == rows[0]["run"] else None for row in rows]


def _over(chapter: Chapter, row: Row, base: Row) -> str:
    """`"+9.11 ms, 1.05 ×; ranges overlap"`"""
    more = _signed(row["step_ms_p50"] - base["step_ms_p50"])
    text = f"{more} ms, {fmt(row['step_ms_p50'] / base['step_ms_p50'])} ×"
    return "; ".join(filter(None, (text, speed.doubt(chapter, row, base))))


def _by_phase(chapter: Chapter, row: Row, base: Row) -> str:
    """`"optimizer −15.8 ms, forward −0.180 ms, backward −7.54 ms"`"""
    return ", ".join(
        f"{phase} {_signed(row[f'{phase}_ms_p50'] - base[f'{phase}_ms_p50'])} ms"
        for phase in chapter.experiment.PHASES
    )


def _signed(number: float) -> str:
    """`"+9.11"`; of what is less than one, two decimals."""
    return (
        f"{'+' if number > 0 else ''}{fmt(number) if abs(number) >= 1 else f'{number:.2f}'.replace('-', '−')}"
    )


def _head(chapter: Chapter, context: int) -> str:
    return f"- Context {context}{' (paced by the host)' if context in speed.host_paced(chapter) else ''}:"


# ------------------------------------------------------------------------------------------------ what sharding costs
def cost(chapter: Chapter) -> str:
    """What sharding costs in time."""
    said = []
    for context in page.contexts(chapter):
        plain, sharded, hidden = _steps(chapter, context, "plain", "sharded", "overlapped")
        if plain is None or sharded is None:
            continue
        text = (
            f"{_head(chapter, context)} a step takes {fmt(plain['step_ms_p50'])} ms without and"
            f" {fmt(sharded['step_ms_p50'])} ms with sharding ({_over(chapter, sharded, plain)}); the optimizer's part"
            f" of it {fmt(plain['optimizer_ms_p50'])} and {fmt(sharded['optimizer_ms_p50'])} ms"
        )
        if hidden is not None:
            text += (
                f". With the broadcasts beside the next forward pass it takes {fmt(hidden['step_ms_p50'])} ms"
                f" ({_over(chapter, hidden, plain)}), the optimizer's part {fmt(hidden['optimizer_ms_p50'])} ms"
            )
        said.append(f"{text}.")
    if not said:
        return f"What sharding costs in time: {NOT_MEASURED}."
    return f"{on(chapter)}:\n\n" + "\n".join(said)


def hidden(chapter: Chapter) -> str:
    """What becomes of a broadcast beside the next forward pass: phase by phase, against waiting for it."""
    context = speed.decisive(chapter)
    sharded, overlapped = _steps(chapter, context, "sharded", "overlapped")
    if sharded is None or overlapped is None:
        return f"What hiding the broadcasts changes: {NOT_MEASURED}."
    return (
        f"{on(chapter)}, at context {context}, hiding the broadcasts changes the phases by:"
        f" {_by_phase(chapter, overlapped, sharded)};"
        f" the step by {_over(chapter, overlapped, sharded)}."
    )


# ------------------------------------------------------------------------------------------------ against torch's own
def peer(chapter: Chapter) -> str:
    """Ours against torch's sharded optimizer: time and peak memory, and whether the aim is met."""
    said = []
    for context in page.contexts(chapter):
        said += [
            f"{_head(chapter, context)} {'; '.join(text)}." for text in [_peer(chapter, context)] if text
        ]
    if not said:
        return f"Against torch's own: {NOT_MEASURED}."
    return f"{_verdict(chapter)}\n\n" + "\n".join(said)


def _peer(chapter: Chapter, context: int) -> list[str]:
    theirs, ours, overlapped = _steps(chapter, context, "torch_zero", "sharded", "overlapped")
    again = _both(chapter, context)[1]
    text = []
    if theirs is not None and ours is not None:
        text.append(
            f"a step of ours over one of torch's is {_times(chapter, ours, theirs)}"
            + ("" if again is None else f", measured again {_times(chapter, again, theirs)}")
            + ("" if overlapped is None else f", overlapped {_times(chapter, overlapped, theirs)}")
            + f"; by phase, *sharded*: {_by_phase(chapter, ours, theirs)}"
        )
    peaks = _peaks(chapter, context)
    if peaks is not None:
        text.append(
            f"its peak is {amount(peaks[0])} against {amount(peaks[1])}, {fmt(peaks[0] / peaks[1])} ×"
            + (f" ({amount(peaks[2])} are copies of gradients in torch's buckets)" if peaks[2] else "")
        )
    return text


def _times(chapter: Chapter, row: Row, base: Row) -> str:
    """`"1.11 × (ranges overlap)"`"""
    text, doubt = f"{fmt(row['step_ms_p50'] / base['step_ms_p50'])} ×", speed.doubt(chapter, row, base)
    return f"{text} ({doubt})" if doubt else text


def _peaks(chapter: Chapter, context: int) -> tuple[float, float, float] | None:
    """Bytes at the peak of ours, of torch's, and in the buckets of torch's."""
    where = {"context_length": context, "world_size": page.world_size(chapter), "moment": "later_after"}
    rows = [page.one(chapter, variant=v, **where) for v in ("sharded", "torch_zero")]
    peaks = [None if row is None else page.peak(chapter, row) for row in rows]
    return None if None in peaks else (peaks[0][0], peaks[1][0], float(rows[1]["buckets_bytes"]))


def _verdict(chapter: Chapter) -> str:
    """Whether ours is no slower where it counts, and needs no more memory anywhere."""
    context, met = speed.decisive(chapter), {}
    theirs, *ours = _steps(chapter, context, "torch_zero", "sharded", "overlapped")
    if theirs is not None and ours[0] is not None:
        met[f"in time (context {context})"] = not any(_is_slower(chapter, row, theirs) for row in ours if row)
    peaks = {c: found for c in page.contexts(chapter) if (found := _peaks(chapter, c)) is not None}
    if peaks:
        met[f"in memory ({_contexts(list(peaks))})"] = all(
            ours <= theirs for ours, theirs, _ in peaks.values()
        )
    said = [
        f"{word} {listed([what for what, yes in met.items() if yes == wanted])}"
        for word, wanted in (("met", True), ("missed", False))
        if wanted in met.values()
    ]
    ranks = page.world_size(chapter)
    text = f"On {ranks} ranks the aim, a step no slower than torch's and a peak no higher, is {' and '.join(said)}."
    slow = [
        c
        for c in speed.host_paced(chapter)
        if c != context
        and all(_is_longer(chapter, row, _steps(chapter, c, "torch_zero")[0]) for row in _both(chapter, c))
    ]
    if slow:
        text += (
            f" At {_contexts(slow)}, paced by the host, *sharded* was slower both times that it was measured."
        )
    return text


def _both(chapter: Chapter, context: int) -> list[dict[str, Any] | None]:
    return _steps(chapter, context, "torch_zero", "sharded", "sharded", repeats=(0, 0, 1))[1:]


def _is_longer(chapter: Chapter, row: Row | None, base: Row | None) -> bool:
    """Whether a median is longer, and by more than those of the A/A pair."""
    if row is None or base is None or row["step_ms_p50"] <= base["step_ms_p50"]:
        return False
    return speed.doubt(chapter, row, base) != speed.NO_MORE


def _is_slower(chapter: Chapter, row: Row, base: Row) -> bool:
    return row["step_ms_p50"] > base["step_ms_p50"] and not speed.doubt(chapter, row, base)


def containers(chapter: Chapter) -> str:
    """The two containers with the plain optimizer: what of a difference is not the optimizers'."""
    said = []
    for context in page.contexts(chapter):
        theirs, ours = _steps(chapter, context, "torch", "plain")
        if theirs is not None and ours is not None:
            said.append(f"{_times(chapter, ours, theirs)} at context {context}")
    if not said:
        return f"The containers without sharding: {NOT_MEASURED}."
    return f"Without sharding, a step of *plain* over one of *torch* is {listed(said)}."


# ------------------------------------------------------------------------------------------------ more ranks
def more_ranks(chapter: Chapter) -> str:
    """Memory and time of every larger number of ranks than the main tables': what sharding saves, what a step takes."""
    teams = [team for team in speed.teams(chapter) if team[1] > page.world_size(chapter)]
    return "\n".join(
        f"- `{team[0]}`, {team[1]} ranks: {'; '.join(text)}."
        for team in teams
        if (text := [t for t in (_saved(chapter, *team), *_times_of(chapter, team)) if t])
    )


def _times_of(chapter: Chapter, team: tuple[str, int]) -> list[str]:
    """The step with sharding against the one without, against torch's, and with its broadcasts hidden."""
    context = speed.decisive(chapter)
    variants = ("sharded", "plain", "torch_zero", "overlapped")
    sharded, plain, theirs, overlapped = _steps(chapter, context, *variants, team=team)
    if sharded is None or plain is None:
        return []
    text = [
        f"at context {context} a step takes {fmt(plain['step_ms_p50'])} ms without and {fmt(sharded['step_ms_p50'])} ms"
        f" with sharding ({_over(chapter, sharded, plain)})"
    ]
    if theirs is not None:
        text[0] += f", {_times(chapter, sharded, theirs)} that of *torch, sharded*"
    if overlapped is not None:
        text.append(
            f"hiding the broadcasts changes the phases by {_by_phase(chapter, overlapped, sharded)}, and the step by"
            f" {_signed(overlapped['step_ms_p50'] - sharded['step_ms_p50'])} ms,"
            f" {_times(chapter, overlapped, sharded)}"
        )
        if speed.doubt(chapter, overlapped, sharded):
            text[-1] += ", so these rows show no gain from it"
    return text


def _saved(chapter: Chapter, machine: str, ranks: int) -> str:
    """What sharding takes off what is alive after a later step, beside the closed form, at the longest context."""
    where = {"machine": machine, "world_size": ranks, "moment": "later_after"}
    context = max(page.contexts(chapter, **where), default=0)
    pair = [page.one(chapter, variant=v, context_length=context, **where) for v in ("plain", "sharded")]
    if None in pair:
        return ""
    saved, due = (
        sum(of(chapter, pair[0]).values()) - sum(of(chapter, pair[1]).values())
        for of in (page.measured, page.predicted)
    )
    text = f"after a step sharding has saved {amount(saved)} (closed form: {amount(due)})"
    peaks = [page.peak(chapter, row) for row in pair]
    if None not in peaks:
        text += (
            f", and the peak is {amount(peaks[1][0])} instead of {amount(peaks[0][0])} (context {context})"
        )
    return text


def averaging(chapter: Chapter) -> str:
    """What averaging adds to the backward pass, and broadcasts to the optimizer's phase."""
    context = speed.decisive(chapter)
    alone, plain, sharded = _steps(chapter, context, "alone", "plain", "sharded")
    if alone is None or plain is None:
        return f"What averaging gradients adds to a step: {NOT_MEASURED}."
    added = plain["backward_ms_p50"] - alone["backward_ms_p50"]
    text = f"{on(chapter)}, at context {context}, averaging the gradients adds {fmt(added)} ms to the backward pass"
    text += " (*plain*)"
    if sharded is not None:
        more = sharded["optimizer_ms_p50"] - plain["optimizer_ms_p50"]
        text += f", and sharding {_signed(more)} ms to the optimizer's phase"
    return f"{text}."
