"""The sentences of chapter `zero` that have numbers in them; those about times are in `zero_speed_words`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.accounting.data_parallel import bucket_bytes
from cs336_systems.accounting.zero import COMPONENTS
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import zero as page
from cs336_systems.report.pages import zero_speed as speed
from cs336_systems.report.pages.zero import GIB, LABELS, LATER_STEP, MIB, TIMED
from cs336_systems.report.tables import fmt, listed, percent
from cs336_systems.sizes import size

EXACT = 5e-7  # less than that is no difference between a component and its closed form


def amount(num_bytes: float) -> str:
    """`"7.44 GiB"`, or MiB or KiB where that would be less than one."""
    unit, scale = next(((u, n) for u, n in (("GiB", GIB), ("MiB", MIB)) if num_bytes >= n), ("KiB", 1024))
    return f"{fmt(num_bytes / scale)} {unit}"


# ------------------------------------------------------------------------------------------------ predictions
def model_words(name: str = "xl") -> str:
    """How much of the memory is optimizer state, and what half of it is."""
    config = size(name)
    parameters = accounting.num_parameters(config)
    tensors = len(accounting.zero.tensor_sizes(config))
    state = accounting.zero_memory(config, 1)["after_step"]
    half = accounting.zero_memory(config, 2)["after_step"]
    return (
        f"For `{name}`, $\\Psi$ = {parameters:,} in {tensors} tensors: parameters and gradients take"
        f" {fmt(state['parameters'] / GIB)} GiB each, AdamW's state {fmt(state['optimizer_state'] / GIB)} GiB. Of"
        f" {fmt(sum(state.values()) / GIB)} GiB two ranks need {fmt(sum(half.values()) / GIB)} GiB each, a quarter"
        f" less; no number of ranks saves more than one half."
    )


def break_even_words(chapter: Chapter, name: str = "xl") -> str:
    """The least times of the optimizer's step on the machine that is shown, and what they say about sharding."""
    machine = (chapter.machines or [""])[0]
    speeds = speed.bandwidths(chapter, machine) if machine else None
    if speeds is None:
        return (
            "What this comes to on a machine needs the bandwidths of its memory and of its links; for"
            f" {f'`{machine}`' if machine else 'no machine'} neither is known."
        )
    memory, link, source = speeds
    parameters = accounting.num_parameters(size(name))
    least = {
        r: accounting.zero_optimizer_ms(parameters, 2, memory, link, rounds=r) for r in (1, speed.ROUNDS)
    }
    plain, one = least[1]["plain"], least[1]
    verdict = "shorter" if one["sharded"] < plain else "longer"
    return (
        f"On `{machine}` ({source}): $\\beta$ = {fmt(memory)} TB/s and $w$ = {fmt(link)} GB/s. $\\beta / 7$ is"
        f" {fmt(1e3 * memory / 7)} GB/s, so without overlap the optimizer's step is {verdict} with"
        f" sharding. For `{name}` on two ranks AdamW over everything takes {fmt(plain)} ms at the least; over half of"
        f" it {fmt(one['update'])} ms, and the broadcasts {fmt(one['broadcast'])} ms: {fmt(one['sharded'])} ms one"
        f" after the other, {fmt(least[speed.ROUNDS]['sharded'])} ms in {speed.ROUNDS} rounds, and only the"
        f" {fmt(one['update'])} ms of the update where a forward pass hides the rest."
    )


# ------------------------------------------------------------------------------------------------ memory
def source(chapter: Chapter) -> str:
    """What the bytes are counts of."""
    found = set(chapter.measured(moment="later_after")["source"])
    words = {
        "allocator": "Totals and peaks are the CUDA allocator's.",
        "tensors": "This machine has too few CUDA devices: a tiny model runs on the CPU, and totals and peaks are those"
        " of the tensors that torch's dispatcher sees. Rounding, cached and outside memory do not exist here.",
    }
    return " ".join(text for name, text in words.items() if name in found) or f"Memory: {NOT_MEASURED}."


def _pair(chapter: Chapter, moment: str, context: int) -> list[dict[str, Any]] | None:
    """The rows without and with sharding; None unless both were measured."""
    where = {"context_length": context, "world_size": page.world_size(chapter), "moment": moment}
    rows = [page.one(chapter, variant=v, **where) for v in ("plain", "sharded")]
    return None if None in rows else rows


def first_step(chapter: Chapter) -> str:
    """The handout's three moments, without and with sharding, and how much higher the peak was on the way."""
    context, said, above = page.contexts(chapter)[0], [], []
    for moment, words in {
        "initialized": "after initialization", "first_before": "before the optimizer's step", "first_after": "after it",
    }.items():  # fmt: skip
        rows = _pair(chapter, moment, context)
        if rows is not None:
            plain, sharded = rows
            said.append(f"{words} {amount(plain['live_bytes'])} and {amount(sharded['live_bytes'])}")
            above += [float(row["peak_bytes"] - row["live_bytes"]) for row in rows]
    if not said:
        return f"The moments of the first step: {NOT_MEASURED}."
    return (
        f"Without and with sharding (*plain*, *sharded*) a rank holds {', '.join(said)}. On the way to a moment the"
        f" peak was {f'at most {amount(max(above))}' if max(above) > 0 else 'nowhere'} above that."
    )


def rounding(chapter: Chapter) -> str:
    """Why one rank and plain data parallelism differ before the first optimizer's step; empty where they do not."""
    where = {"moment": "first_before", "context_length": page.contexts(chapter)[0]}
    alone = page.one(chapter, variant="alone", **where)
    plain = page.one(chapter, variant="plain", world_size=page.world_size(chapter), **where)
    if alone is None or plain is None:
        return ""
    single, buckets = (float(row["live_bytes"] - row["requested_bytes"]) for row in (alone, plain))
    if single <= buckets:
        return ""
    return (
        f"One rank holds a little more than *plain*, since its gradients are blocks of their own, each rounded up:"
        f" rounding takes {amount(single)} there, and {amount(buckets)} where gradients lie in buckets."
    )


def saved(chapter: Chapter) -> str:
    """What sharding saved, at the end of a step and at its peak, by measurement and closed form."""
    said = []
    for context in page.contexts(chapter):
        rows = _pair(chapter, "later_after", context)
        if rows is None:
            continue
        peaks = [page.peak(chapter, row) for row in rows]
        if None in peaks:
            continue
        live = [float(row["live_bytes"]) for row in rows]
        expected = [sum(page.predicted(chapter, row).values()) for row in rows]
        most = [found[0] for found in peaks]
        said.append(
            f"- Context {context}: after a step {amount(live[0])} without and {amount(live[1])} with sharding,"
            f" {amount(live[0] - live[1])} saved (closed form: {amount(expected[0] - expected[1])}); at the peak"
            f" {amount(most[0])} and {amount(most[1])}, {fmt(100 * (1 - most[1] / most[0]))} % less."
        )
    return "\n".join(said) or f"What sharding saves: {NOT_MEASURED}."


def crossover(chapter: Chapter) -> str:
    """Where in the backward pass the peak of a step lies: next to what is alive after it, or before it; and what was
    copied last.
    """
    said = []
    for context in page.contexts(chapter):
        where = {"context_length": context, "world_size": page.world_size(chapter), "variant": "sharded"}
        ends = [page.one(chapter, moment=m, **where) for m in ("later_forward", "later_before")]
        found = None if None in ends else page.peak(chapter, ends[1])
        if found is None or found[1] != "backward":
            continue
        before, after = (found[0] - float(row["live_bytes"]) for row in ends)
        if after <= before:
            config, limit = size(ends[1]["size"]), ends[1]["bucket_mb"] * MIB
            last = bucket_bytes(config, limit)[-1]
            text = f"at its end, {amount(after)} above what is alive after it (the last bucket has {amount(last)})"
        else:
            text = f"at its beginning, {amount(before)} above what is alive before it"
        said.append(f"at context {context} {text}")
    return f"The peak of *sharded* lies in the backward pass: {'; '.join(said)}." if said else ""


def accuracy(chapter: Chapter) -> str:
    """How far measured memory is from the closed form, over all moments and variants, and what the difference is."""
    rows = chapter.measured(moment=[*page.FIRST_STEP, *LATER_STEP]).to_dict("records")
    if not rows:
        return f"How far the closed form is from the measurement: {NOT_MEASURED}."
    forms = [page.predicted(chapter, row) for row in rows]
    both = [(page.measured(chapter, row), form) for row, form in zip(rows, forms, strict=True)]
    apart = {
        n: max(abs(m[n] / f[n] - 1) for m, f in both if f[n]) for n in COMPONENTS if any(f[n] for f in forms)
    }
    exact = [n.replace("_", " ") for n, share in apart.items() if share < EXACT]
    inexact = [f"{n.replace('_', ' ')} {percent(share)}" for n, share in apart.items() if share >= EXACT]
    parts = [f"{listed(exact)} are exactly what the closed form says"] if exact else []
    parts += [f"{listed(inexact)} from it at most"] if inexact else []
    asked = max(abs(r["requested_bytes"] / sum(f.values()) - 1) for r, f in zip(rows, forms, strict=True))
    live = [float(row["live_bytes"]) / sum(form.values()) - 1 for row, form in zip(rows, forms, strict=True)]
    where = max(range(len(rows)), key=lambda i: abs(live[i]))
    worst, other = rows[where], rows[where]["requested_bytes"] - sum(forms[where].values())
    text = (
        f"Over {len(rows)} moments, {'; '.join(parts)}. What all tensors have asked for is at most {percent(asked)}"
        f" from it, and what is alive {percent(abs(live[where]))} (*{LABELS[worst['variant']]}*, context"
        f" {int(worst['context_length'])}, `{worst['moment']}`: {amount(other)} of other tensors,"
        f" {amount(worst['live_bytes'] - worst['requested_bytes'])} of rounding)."
    )
    peaks = []
    for row in rows:
        found = page.peak(chapter, row) if row["moment"] == "later_before" else None
        if found is not None:
            form = chapter.experiment.predicted_peak(
                page.case_of(chapter, row), page.device_of(row["machine"])
            )
            peaks.append(abs(found[0] / sum(form.values()) - 1))
    return text + (f" Peaks are at most {percent(max(peaks))} apart." if peaks else "")


def spread(chapter: Chapter) -> str:
    """How far ranks are apart, and how far their shares would set them."""
    rows = chapter.measured(moment=[*page.FIRST_STEP, *LATER_STEP]).to_dict("records")
    rows = [row for row in rows if row["world_size"] > 1]
    if not rows:
        return f"How far ranks are apart: {NOT_MEASURED}."
    widest = max(rows, key=lambda row: row["rank_spread_bytes"])
    shares = {int(row["world_size"]): _state_spread(row) for row in rows}
    by_number = [f"{amount(num_bytes)} on {n} ranks" for n, num_bytes in sorted(shares.items())]
    text = (
        f"Whole parameters as shares let the ranks' states differ by {listed(by_number)}. What is alive differs by"
        f" {amount(float(widest['rank_spread_bytes']))} at most, in *{LABELS[widest['variant']]}* on"
        f" {int(widest['world_size'])} ranks"
    )
    if widest["source"] == "allocator" and widest["rank_spread_bytes"] > shares[int(widest["world_size"])]:
        text += ": what their tensors do not explain is rounding"
    return f"{text}."


def _state_spread(row: dict[str, Any]) -> int:
    states = [
        accounting.zero.adamw_state_bytes(own)
        for own in accounting.zero.shards(size(row["size"]), row["world_size"])
    ]
    return max(states) - min(states)


def on_device(chapter: Chapter) -> str:
    """What sharding frees on the device, where it differs from what it frees in tensors, and what NCCL takes."""
    found = page.contexts(chapter, moment="later_after")
    rows = _pair(chapter, "later_after", found[-1]) if found else None
    if rows is None or pd.isna(rows[0]["reserved_bytes"]):
        return ""
    plain, sharded = rows
    live, device = (
        float(sum(plain[c] for c in columns) - sum(sharded[c] for c in columns))
        for columns in (("live_bytes",), ("reserved_bytes", "outside_bytes"))
    )
    text = f"At context {found[-1]} sharding frees {amount(device)} of the device, and {amount(live)} of what is alive"
    if live > device:
        text += f": with it the allocator keeps {amount(live - device)} more in reserve"
    alone = page.one(chapter, variant="alone", moment="later_after", context_length=found[-1])
    more = 0.0 if alone is None else float(plain["outside_bytes"] - alone["outside_bytes"])
    if more > 0:
        text += f". Outside of the allocator there are {amount(more)} more on {plain['world_size']} ranks than on one"
    return f"{text}."


# ------------------------------------------------------------------------------------------------ what is sent
def counted(chapter: Chapter) -> str:
    """Whether the counted payload is what the formula assumes: all gradients once, all parameters once."""
    said = []
    for variant in ("plain", "sharded", "torch_zero"):
        row = page.one(
            chapter, variant=variant, moment=TIMED, context_length=page.contexts(chapter)[0],
            world_size=page.world_size(chapter),
        )  # fmt: skip
        if row is None or pd.isna(row["all_reduce_bytes"]):
            continue
        whole = 4 * accounting.num_parameters(size(row["size"]))
        text = f"- *{LABELS[variant].capitalize()}*: {_whole(row['all_reduce_bytes'], whole)} of gradients"
        if row["broadcast_calls"]:
            text += f", {_whole(row['broadcast_bytes'], whole)} of parameters"
        text += f"; in rings a rank sends {fmt(speed.sent_bytes(row) / whole)} · 4Ψ bytes"
        if row["link_sent_bytes"] > 0:
            text += f", and by its link's counter {fmt(row['link_sent_bytes'] / whole, 4)} · 4Ψ"
        said.append(f"{text}.")
    if not said:
        return f"What a step sends: {NOT_MEASURED}."
    head = f"On {page.world_size(chapter)} ranks of `{(chapter.machines or [''])[0]}`:\n"
    return "\n".join([head, *said, *(f"\n{text}" for text in _in_switch(chapter))])


def _in_switch(chapter: Chapter) -> list[str]:
    """Of each number of ranks above two: whether the link's counter shows that the switch has added up."""
    said = []
    for machine, ranks in speed.teams(chapter):
        row = speed.profiled(chapter, "plain", (machine, ranks))
        if ranks < 3 or row is None or not row["link_sent_bytes"] > 0:
            continue
        whole = 4 * accounting.num_parameters(size(row["size"]))
        sent, ring = row["link_sent_bytes"] / whole, accounting.bus_factor(ranks)
        verdict = (
            "nothing was reduced inside the switch"
            if sent > (1 + ring) / 2
            else "NCCL has reduced inside the switch"
        )
        said.append(
            f"On {ranks} ranks of `{machine}` *plain* has sent {fmt(sent, 4)} · 4Ψ bytes by the counter, where a ring"
            f" sends {fmt(ring)} · 4Ψ: {verdict}."
        )
    return said


def _whole(num_bytes: float, whole: int) -> str:
    """`"4Ψ bytes and 21 more"`, or less"""
    more = int(num_bytes) - whole
    return "4Ψ bytes" + (f" and {more:,} more" if more > 0 else f" less {-more:,}" if more < 0 else "")


def skipped(chapter: Chapter) -> str:
    """Which numbers of ranks the machines could not run; empty where they ran all."""
    rows = chapter.rows()
    lacking = rows[rows["status"].str.startswith("skipped")]
    said = []
    for machine, part in lacking.groupby("machine"):
        why = sorted({status.removeprefix("skipped: ") for status in part["status"]})
        said.append(f"{len(part)} of these were left out on `{machine}`: what {', what '.join(why)}.")
    return " ".join(said)
