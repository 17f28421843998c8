"""The sentences of chapter `leaderboard` that hold numbers: Markdown, computed from its rows. Those about the ladders
are in `leaderboard_ladder_words`, about what the harness adds in `leaderboard_harness_words`.

Each says "not measured" where the rows for it are missing; none claims a difference below the A/A spread."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.experiments.leaderboard import GRAD_O, OFFICIAL_MS
from cs336_systems.ladder import steps
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages.leaderboard import HARNESS, HEAD_DIM, HEADS, TOKENS
from cs336_systems.report.pages.leaderboard_noise import VERDICTS, repetitions, rule, sorted_out
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, listed, percent, span

H100 = "NVIDIA H100 80GB HBM3"  # the H100 SXM, by its full name


def work() -> str:
    """FLOPs, bytes, exponentials of the leaderboard's work."""
    flops = {part: page.work_flops(part) / 1e12 for part in ("forward", "backward", "end_to_end")}
    moved = accounting.attention_bytes(HEADS, TOKENS, TOKENS, HEAD_DIM, page.BYTES, "end_to_end")
    exps = accounting.attention_exps(HEADS, TOKENS, TOKENS, True, "forward")
    return (
        f"The products are {fmt(flops['forward'])} TFLOP forward and {fmt(flops['backward'])} backward, together "
        f"{fmt(flops['end_to_end'])}; {fmt(exps / 1e9)} · 10⁹ exponentials in each pass; and {fmt(moved / 1e9)} "
        f"GB that must be read or written in both, {fmt(flops['end_to_end'] * 1e12 / moved, 2)} FLOPs a byte."
    )


def limits(part: str) -> str:
    """Which unit is the slowest in a pass, and how far the others are behind."""
    found = page.limits(part, steps.SMS, steps.SM_MHZ)
    ordered = sorted(found, key=lambda unit: -found[unit])
    longest = found[ordered[0]]
    ties = [u for u in ordered if found[u] > 0.995 * longest]
    head = " and ".join(page.UNIT_NAMES[u].split(":")[0] for u in ties)
    rest = ", ".join(
        f"{page.UNIT_NAMES[u].split(':')[0]} {percent(found[u] / longest)}" for u in ordered if u not in ties
    )
    return (
        f"{part[0].upper() + part[1:]}: the {head} would be busy for {fmt(longest)} ms"
        f"{' each' if len(ties) > 1 else ''}; for shares of that time: {rest}. One after the other, they "
        f"would take {fmt(accounting.overlapped_ms(found, 0))} ms."
    )


def gpus(chapter: Chapter, machine: str) -> list[str]:
    """The GPUs that the machine's rows come from, by their full names."""
    found = (env.get("gpu") for env in chapter.environments(machine).values() if env.get("gpus"))
    return list(dict.fromkeys(name for name in found if name))


def hardware(chapter: Chapter, machine: str) -> str:
    """What the chapter was measured on, beside the H100 that the limits and the expectations are for."""
    names = gpus(chapter, machine)
    if not names:
        return f"The GPU that this chapter was measured on: {NOT_MEASURED}."
    text = f"Each measurement of this chapter ran on one {listed(names)}."
    ours, sheet = accounting.peaks(names[0]), accounting.peaks(H100)
    if len(names) == 1 and ours and sheet and ours.tflops == sheet.tflops and ours != sheet:
        text += (
            f" By the data sheets it multiplies as fast as an H100 SXM and has {fmt(ours.tb_per_s / sheet.tb_per_s)} "
            f"times the bandwidth, so the limits of its multiprocessors are those of an H100."
        )
    return text


def record(chapter: Chapter, machine: str) -> str:
    """Ours against the verified record, and on what either was measured."""
    ours = page.best_ours(chapter, machine, **HARNESS, rep_ms=OFFICIAL_MS)
    entries = [x for x in page.published(chapter) if "verified" in x["what"]]
    verified = [x for x in entries if "unverified" not in x["what"]]
    if not verified:
        return f"The published record: {NOT_MEASURED}."
    best = verified[0]
    theirs = float(best["value"])
    source = f"{fmt(theirs, 4)} ms on {best['hardware']} ([source]({best['source']}))"
    if ours is None:
        return f"The best verified entry is published as {source}; ours with the official ten seconds: {NOT_MEASURED}."
    mean = float(ours["ms_mean"])
    text = (
        f"With the official parameters, ten seconds of repetitions after one of warm-up, `do_bench` reports a mean of "
        f"**{fmt(mean, 4)} ms** for {figures.label(ours['impl'])} ({fmt(page.work_flops('end_to_end') / mean / 1e9)} "
        f"TFLOP/s), measured on one {listed(gpus(chapter, machine)) or 'machine'}. The best verified entry is "
        f"published as {source}: ours is {_times(theirs / mean)}."
    )
    for other in (x for x in entries if x not in verified):
        value = float(other["value"])
        text += f" An unverified one was given as {fmt(value, 4)} ms: ours is {_times(value / mean)}."
    return text + " Theirs and ours come from two machines."


def _times(ratio: float) -> str:
    return f"{fmt(ratio)} times as fast" if ratio > 1 else f"{fmt(1 / ratio)} times as long"


def backends(chapter: Chapter, machine: str) -> str:
    """What ran behind each name."""
    rows = chapter.measured(machine=machine, **HARNESS, repeat=0)
    rows = rows[rows["rep_ms"] < OFFICIAL_MS].dropna(subset="backend")
    if rows.empty:
        return f"What ran behind each name: {NOT_MEASURED}."
    found = []
    for row in rows.to_dict("records"):
        kernels = row["kernels"].split() if isinstance(row["kernels"], str) else []
        backend = row["backend"].removesuffix(" 0.0.0")
        plain = "one operation after the other" if backend == "eager" else f"`{backend}`"
        unknown = " (it tells no version)" if backend != row["backend"] else ""
        found.append(
            f"{figures.label(row['impl'])}: {', '.join(f'`{k}`' for k in kernels) or plain}{unknown}"
        )
    return f"What ran behind each name: {'; '.join(found)}."


def peers(chapter: Chapter, machine: str) -> str:
    """Who is faster and slower than our best in the short harness, with one leaf and with three."""
    text = []
    for leaves, words in (("stacked", ""), ("separate", "With three leaves: ")):
        rows = chapter.measured(machine=machine, kind="harness", leaves=leaves, repeat=0)
        rows = rows[rows["rep_ms"] < OFFICIAL_MS]
        ours = rows[rows["impl"].isin(page.OURS)]
        if ours.empty:
            continue
        best = ours.loc[ours["ms_p50"].astype(float).idxmin()]
        others = rows[(rows["run"] == best["run"]) & ~rows["impl"].isin(page.OURS)].sort_values("ms_p50")
        rivals = ((figures.label(row["impl"]), row, best) for row in others.to_dict("records"))
        found = [
            f"{VERDICTS[word]}: {', '.join(f'{name} ({fmt(ratio)} ×)' for name, ratio in those)}"
            for word, those in sorted_out(chapter, machine, "harness", rivals).items()
        ]
        text.append(
            f"{words}{'our' if words else 'Our'} fastest is {figures.label(best['impl'])} with "
            f"{fmt(best['ms_p50'], 4)} ms"
            + (f". By time over it, {'; '.join(found)}." if found else ".")
            + _closest(rows, best, repetitions(chapter, machine, best))
        )
    if not text:
        return f"Ours against its peers: {NOT_MEASURED}."
    return " ".join([*text, *_long_run(chapter, machine), rule(chapter, machine, "harness")])


def _long_run(chapter: Chapter, machine: str) -> list[str]:
    """How far the official ten seconds of our best are from its short turns: nothing where one is not measured."""
    long = page.best_ours(chapter, machine, **HARNESS, rep_ms=OFFICIAL_MS)
    short = long is not None and page.one(
        chapter, machine, **HARNESS, impl=long["impl"], rep_ms=page.short_ms(chapter)
    )
    if long is None or short is None:
        return []
    again = page.one(chapter, machine, **HARNESS, impl=long["impl"], rep_ms=page.short_ms(chapter), repeat=1)
    twice = "" if again is None else f" and, measured again, {fmt(again['ms_p50'], 4)}"
    return [
        f"Over the official ten seconds, in a run of its own, the median of {figures.label(long['impl'])} is "
        f"{fmt(long['ms_p50'], 4)} ms; in short turns it is {fmt(short['ms_p50'], 4)}{twice}. Peers were not run so "
        f"long."
    ]


def gap(chapter: Chapter, roofs: Roofs, machine: str, impl: str) -> str:
    """What the harness adds to the kernels, how far these are from their slowest unit, and what a remainder below zero
    says."""
    parts = page.gap(chapter, roofs, machine, impl)
    if parts is None:
        return f"What the time of {figures.label(impl)} is made of: {NOT_MEASURED}."
    total = sum(parts.values())
    floor = sum(ms for name, ms in parts.items() if "slowest unit" in name)
    beyond = sum(ms for name, ms in parts.items() if "kernels beyond" in name)
    harness = sum(ms for name, ms in parts.items() if name.startswith("harness"))
    rest = total - floor - beyond - harness
    text = (
        f"Of the {fmt(total)} ms of {figures.label(impl)}, {percent(floor / total)} are what the slowest unit of each "
        f"pass needs for the work counted by hand; {percent(beyond / total)} are what the kernels take beyond that; "
        f"{percent(harness / total)} are the harness's own sums and copies at the best copy; "
        f"{'−' if rest < 0 else ''}{percent(abs(rest) / total)} is neither."
    )
    return (
        text
        + _clocks_of_parts(chapter, machine, impl)
        + (_below_zero(chapter, machine, impl, -rest) if rest < 0 else "")
    )


def _clocks_of_parts(chapter: Chapter, machine: str, impl: str) -> str:
    """The clocks by which the slowest unit was reckoned, where a repetition shows how well they are known."""
    said = []
    for part in page.PARTS:
        first, again = (
            page.one(chapter, machine, **page.headline(part), impl=impl, repeat=n) for n in (0, 1)
        )
        if first is not None and again is not None and again["sm_mhz"] != first["sm_mhz"]:
            said.append(f"{part} {fmt(again['sm_mhz'], 4)} MHz instead of {fmt(first['sm_mhz'], 4)}")
    if not said:
        return ""
    return (
        f" Measured again, the kernels were seen at other clocks ({', '.join(said)}), so the share of the slowest unit "
        f"is uncertain by as much."
    )


def _below_zero(chapter: Chapter, machine: str, impl: str, missing: float) -> str:
    """Why parts can add up to more than the whole, as far as rows say."""
    text = (
        " Less than nothing can remain, since the parts were measured in other runs than the whole and under other "
        "conditions: kernels alone are replayed from graphs and get random numbers for $dO$; under the harness "
        "they get ones."
    )
    whole = page.one(chapter, machine, **HARNESS, impl=impl, rep_ms=page.short_ms(chapter))
    alone = [page.one(chapter, machine, **page.headline(part), impl=impl) for part in page.PARTS]
    clocks = [math.nan if row is None else float(row["sm_mhz"]) for row in (whole, *alone)]
    if all(clocks[0] > mhz for mhz in clocks[1:]):
        text += (
            f" The clock seen there is higher, too: {fmt(clocks[0], 4)} MHz; here "
            f"{listed([f'{fmt(mhz, 4)} {part}' for mhz, part in zip(clocks[1:], page.PARTS, strict=True)])}."
        )
    number, matrix = (page.one(chapter, machine, **page.headline("backward", g), impl=impl) for g in GRAD_O)
    if number is None or matrix is None:
        return text
    less = matrix["ms_p50"] - number["ms_p50"]
    if less <= missing:
        return text
    return text + (
        f" With ones, as one number, the backward kernels alone take {fmt(less)} ms less, more than the {fmt(missing)} "
        f"that are missing."
    )


def counters(chapter: Chapter, machine: str) -> str:
    """Which unit is the busiest in our kernels and in the fastest peer's, and what is issued for a pair."""
    rows = chapter.measured(machine=machine, kind="counters", repeat=0)
    text = []
    for part in page.PARTS:
        found = {
            r["impl"]: r
            for r in rows[(rows["part"] == part) & (rows["head_dim"] == HEAD_DIM)].to_dict("records")
        }
        ours = found.get("flash_triton")
        if ours is None:
            continue
        by_hand = page.work_of_a_pair(part).instructions
        text.append(
            f"{part[0].upper() + part[1:]} at d = {HEAD_DIM}: in ours {_busiest(ours)}; for a pair "
            f"{fmt(page.instructions_a_pair(ours))} instructions are issued, of which the count by hand knows "
            f"{fmt(by_hand)}"
        )  # fmt: skip
        if "sdpa_cudnn" in found:
            peer = found["sdpa_cudnn"]
            text[-1] += (
                f". In {figures.label('sdpa_cudnn')}'s {_busiest(peer)}, and it issues "
                f"{fmt(page.instructions_a_pair(peer))}"
            )
    if not text:
        return f"How busy the units are: {NOT_MEASURED}."
    return ". ".join(text) + "."


def _busiest(row: dict[str, Any]) -> str:
    """The two busiest units of a row, with those that read the same as the second."""
    known = {unit: float(row[unit]) for unit in page.COUNTED_UNITS if not pd.isna(row[unit])}
    first, *rest = sorted(known, key=lambda unit: -known[unit])
    shown = {unit: percent(known[unit] / 100) for unit in known}
    second = [unit for unit in rest if shown[unit] == shown[rest[0]]]
    name = page.COUNTED_UNITS
    return (
        f"the busiest are {name[first]} ({shown[first]} of the cycles) and {listed([name[u] for u in second])} "
        f"({shown[rest[0]]}{' each' if len(second) > 1 else ''})"
    )


def first_calls(chapter: Chapter, machine: str) -> str:
    """Whether more kernels are compiled than launched, and what the first call takes."""
    text = []
    for name in page.OURS:
        row = page.one(chapter, machine, kind="first", impl=name)
        if row is None or pd.isna(row["compiled"]):
            continue
        launched, compiled = len(str(row["kernels"]).split()), int(row["compiled"])
        said = (
            "as many as it compiles: no configuration is tried out"
            if launched == compiled
            else f"of {compiled} compiled"
        )
        again = chapter.measured(machine=machine, kind="first", impl=name, repeat=1)
        twice = "" if again.empty else f" (and {fmt(again.iloc[0]['first_call_s'])} s in another process)"
        text.append(
            f"{figures.label(name)} takes {fmt(row['first_call_s'])} s{twice} for its first call and"
            f" {fmt(row['second_call_ms'])} ms for the second; it launches {launched} kernels, {said}"
        )
    return ". ".join(text) + "." if text else f"The first call: {NOT_MEASURED}."


def _closest(rows: pd.DataFrame, best: pd.Series, again: list[dict[str, Any]]) -> str:
    """The turns of the peer whose time is closest to our best, beside those of ours, and of ours measured again."""
    others = rows[(rows["run"] == best["run"]) & ~rows["impl"].isin(page.OURS)]
    if others.empty:
        return ""
    away = (others["ms_p50"].astype(float) / best["ms_p50"]).map(lambda ratio: max(ratio, 1 / ratio))
    peer = others.loc[away.idxmin()]
    theirs, ours = page.numbers(peer["turns_ms"]), page.numbers(best["turns_ms"])
    if len(theirs) < 2 or len(ours) < 2:
        return ""
    twice = "".join(f" and, measured again, {span(page.numbers(row['turns_ms']))}" for row in again)
    return (
        f" Closest is {figures.label(peer['impl'])}: the medians of its turns are {span(theirs)} ms, those of ours "
        f"{span(ours)}{twice}."
    )


def accuracy(chapter: Chapter, machine: str) -> str:
    """The largest errors against fp64 of ours and of plain PyTorch on the leaderboard's inputs."""
    rows = chapter.measured(machine=machine, **HARNESS, repeat=0).dropna(subset="error_grads")
    plain, ours = rows[rows["impl"] == "reference"], rows[rows["impl"].isin(page.OURS)]
    if ours.empty:
        return f"Errors against fp64: {NOT_MEASURED}."
    text = (
        f"Against fp64 the output of ours in the harness has a relative error of {fmt(ours['error_out'].max(), 2)} and "
        f"its gradients {fmt(ours['error_grads'].max(), 2)} at most"
    )
    if len(plain):
        row = plain.iloc[0]
        text += f"; plain PyTorch in bf16 has {fmt(row['error_out'], 2)} and {fmt(row['error_grads'], 2)}"
    fused = rows[~rows["impl"].isin([*page.OURS, "reference"])]
    if len(fused):
        text += f", the other peers {span(fused['error_out'], 2)} and {span(fused['error_grads'], 2)}"
    worst = (
        chapter.measured(machine=machine, kind="ladder", repeat=0)[["error_out", "error_grads"]].max().max()
    )
    if not math.isnan(worst):
        text += f". No step of the ladder is off by more than {fmt(worst, 2)}"
    return text + "."
