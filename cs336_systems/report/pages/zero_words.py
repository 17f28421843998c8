"""The sentences of chapter `zero` that have numbers in them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import zero as page
from cs336_systems.report.pages import zero_speed as speed
from cs336_systems.report.pages.zero import GIB, LABELS, LATER_STEP, TIMED
from cs336_systems.report.tables import fmt
from cs336_systems.sizes import size


def _amount(num_bytes: float) -> str:
    return f"{fmt(num_bytes / GIB)} GiB" if num_bytes >= GIB / 10 else f"{fmt(num_bytes / 2**20)} MiB"


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
        f" {fmt(1e3 * memory / 7)} GB/s, so without overlap the sharded step is the {verdict} one. For `{name}` on two"
        f" ranks AdamW over everything takes {fmt(plain)} ms at the least; over half of it {fmt(one['update'])} ms, and"
        f" the broadcasts {fmt(one['broadcast'])} ms: {fmt(one['sharded'])} ms one after the other,"
        f" {fmt(least[speed.ROUNDS]['sharded'])} ms in {speed.ROUNDS} rounds, and only the {fmt(one['update'])} ms of"
        " the update where a forward pass hides the rest."
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


def saved(chapter: Chapter) -> str:
    """What sharding saved, at the end of a step and at its peak, by measurement and closed form."""
    said = []
    for context in page.contexts(chapter):
        where = {"context_length": context, "world_size": page.world_size(chapter)}
        rows = {v: page.one(chapter, variant=v, moment="later_after", **where) for v in ("plain", "sharded")}
        if None in rows.values():
            continue
        peaks = {variant: page.peak(chapter, row) for variant, row in rows.items()}
        if None in peaks.values():
            continue
        live = [float(rows[v]["live_bytes"]) for v in ("plain", "sharded")]
        expected = [sum(page.predicted(chapter, rows[v]).values()) for v in ("plain", "sharded")]
        most = [peaks[v][0] for v in ("plain", "sharded")]
        said.append(
            f"- Context {context}: after a step {_amount(live[0])} without and {_amount(live[1])} with sharding,"
            f" {_amount(live[0] - live[1])} saved (closed form: {_amount(expected[0] - expected[1])}); at the peak"
            f" {_amount(most[0])} and {_amount(most[1])}, {fmt(100 * (1 - most[1] / most[0]))} % less."
        )
    return "\n".join(said) or f"What sharding saves: {NOT_MEASURED}."


def accuracy(chapter: Chapter) -> str:
    """How far measured memory is from the closed form, over all moments and variants."""
    rows = chapter.measured(moment=[*page.FIRST_STEP, *LATER_STEP]).to_dict("records")
    if not rows:
        return f"How far the closed form is from the measurement: {NOT_MEASURED}."
    apart = {
        (LABELS[r["variant"]], r["moment"]): r["live_bytes"] / sum(page.predicted(chapter, r).values()) - 1
        for r in rows
    }
    worst = max(apart, key=lambda key: abs(apart[key]))
    spread = max(float(r["rank_spread_bytes"]) for r in rows)
    peaks = []
    for row in rows:
        found = page.peak(chapter, row) if row["moment"] == "later_after" else None
        if found is not None:
            form = chapter.experiment.predicted_peak(
                page.case_of(chapter, row), page.device_of(row["machine"])
            )
            peaks.append(abs(found[0] / sum(form.values()) - 1))
    of_peaks = f" Peaks are at most {fmt(100 * max(peaks), 2)} % apart." if peaks else ""
    return (
        f"Over {len(rows)} moments, what is alive is at most {fmt(100 * abs(apart[worst]), 2)} % from the closed form"
        f" (*{worst[0]}*, `{worst[1]}`).{of_peaks} Ranks differ by {_amount(spread)} at most: no tensor is cut in"
        " two."
    )


# ------------------------------------------------------------------------------------------------ times
def noise(chapter: Chapter) -> str:
    """A sentence about the A/A pairs."""
    apart = speed.noise(chapter)
    if not apart:
        return f"Pairs of the same case: {NOT_MEASURED}."
    return (
        f"The sharded variant was timed twice in one run (A/A): its medians lie {fmt(100 * max(apart), 2)} % apart at"
        " most. No difference smaller than that means anything here."
    )


def cost(chapter: Chapter) -> str:
    """What sharding costs in time, phase by phase."""
    said = []
    for context in page.contexts(chapter):
        where = {"context_length": context, "world_size": page.world_size(chapter), "moment": TIMED}
        plain, sharded, hidden = (
            page.one(chapter, variant=v, **where) for v in ("plain", "sharded", "overlapped")
        )
        if plain is None or sharded is None or plain["run"] != sharded["run"]:
            continue
        step, update = (
            [float(r[f"{phase}_ms_p50"]) for r in (plain, sharded)] for phase in ("step", "optimizer")
        )
        text = (
            f"- Context {context}: a step takes {fmt(step[0])} ms without and {fmt(step[1])} ms with sharding"
            f" ({_signed(step[1] - step[0])} ms, {fmt(step[1] / step[0])} times); the optimizer's part of it"
            f" {fmt(update[0])} and {fmt(update[1])} ms"
        )
        if hidden is not None and hidden["run"] == plain["run"]:
            last, part = float(hidden["step_ms_p50"]), float(hidden["optimizer_ms_p50"])
            text += (
                f". With the broadcasts beside the next forward pass it takes {fmt(last)} ms"
                f" ({_signed(last - step[0])} ms, {fmt(last / step[0])} times), the optimizer's part {fmt(part)} ms"
            )
        said.append(f"{text}.")
    return "\n".join(said) or f"What sharding costs in time: {NOT_MEASURED}."


def _signed(number: float) -> str:
    return f"{'+' if number > 0 else ''}{fmt(number)}"


def peer(chapter: Chapter) -> str:
    """Ours against torch's sharded optimizer: time and peak memory, and whether the aim is met."""
    said = []
    for context in page.contexts(chapter):
        where = {"context_length": context, "world_size": page.world_size(chapter)}
        ours, hidden = (
            page.one(chapter, variant=v, moment=TIMED, **where) for v in ("sharded", "overlapped")
        )
        ratio = None if ours is None else speed.against(chapter, ours, "torch_zero")
        hidden_ratio = None if hidden is None else speed.against(chapter, hidden, "torch_zero")
        ends = [
            page.one(chapter, variant=v, moment="later_after", **where) for v in ("sharded", "torch_zero")
        ]
        peaks = [None if row is None else page.peak(chapter, row) for row in ends]
        parts = []
        if ratio is not None:
            met = "no slower, as aimed" if ratio <= 1 else "slower than the aim, which is 1"
            also = "" if hidden_ratio is None else f", overlapped {fmt(hidden_ratio)} times"
            parts.append(f"a step of ours takes {fmt(ratio)} times as long ({met}){also}")
        if None not in peaks:
            both = peaks[0][0], peaks[1][0]
            parts.append(
                f"its peak is {_amount(both[0])} against {_amount(both[1])}, {fmt(both[0] / both[1])} times"
            )
        if parts:
            said.append(f"- Context {context}: {'; '.join(parts)}.")
    return "\n".join(said) or f"Against torch's own: {NOT_MEASURED}."


def overlap(chapter: Chapter) -> str:
    """How much of the update ran beside broadcasts, and how fast these were."""
    said = []
    for variant in ("sharded", "torch_zero"):
        row = page.one(
            chapter, variant=variant, moment=TIMED, context_length=page.contexts(chapter)[0],
            world_size=page.world_size(chapter),
        )  # fmt: skip
        if row is None or pd.isna(row["whole_ms"]) or not row["communication_ms"]:
            continue
        ranks = row["world_size"]
        rate = (ranks - 1) / ranks * row["broadcast_bytes"] / row["communication_ms"] / 1e6
        share = row["both_ms"] / row["update_ms"] if row["update_ms"] else 0.0
        calls, kernels = int(row["broadcast_calls"]), int(row["optimizer_launches"])
        said.append(
            f"- *{LABELS[variant].capitalize()}*: {calls} broadcasts in {kernels} kernels, {fmt(rate)} GB/s sent and as"
            f" much received; {fmt(100 * share)} % of the update's time lies beside them."
        )
    return "\n".join(said) or f"How updates and broadcasts share the time: {NOT_MEASURED}."


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
        said.append(f"{text}; a rank sends {fmt(speed.sent_bytes(row) / whole)} · 4Ψ bytes.")
    return "\n".join(said) or f"What a step sends: {NOT_MEASURED}."


def _whole(num_bytes: float, whole: int) -> str:
    """`"4Ψ bytes and 21 more"`"""
    more = int(num_bytes) - whole
    return "4Ψ bytes" + (f" and {more:,} more" if more > 0 else f" less {-more:,}" if more < 0 else "")


def skipped(chapter: Chapter) -> str:
    """Which numbers of ranks the machines could not run; empty where they ran all."""
    rows = chapter.rows()
    lacking = rows[rows["status"].str.startswith("skipped")]
    reasons: dict[str, Any] = {}
    for machine, part in lacking.groupby("machine"):
        reasons[str(machine)] = sorted({status.removeprefix("skipped: ") for status in part["status"]})
    said = [f"Left out on `{machine}`: what {', what '.join(why)}." for machine, why in reasons.items()]
    return " ".join(said)
