"""The sentences of chapter `zero` about the optimizer's step: its kernels, and its phase beside the closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import zero_speed as speed
from cs336_systems.report.pages.zero import LABELS
from cs336_systems.report.pages.zero_speed_words import on
from cs336_systems.report.tables import fmt, percent


def kernels(chapter: Chapter) -> str:
    """At what rates the kernels of the optimizer's step update and send, and how much of it at once."""
    plain, said = speed.profiled(chapter, "plain"), []
    limits = speed.bandwidths(chapter, (chapter.machines or [""])[0])
    best = speed.all_reduce_gb_per_s(chapter, (chapter.machines or [""])[0])
    if plain is not None:
        text = f"- *Plain*: the update takes {fmt(plain['update_ms'])} ms, {fmt(speed.update_tb_per_s(plain))} TB/s"
        said.append(f"{text}{'' if limits is None else f' (β: {fmt(limits[0])})'}.")
    for variant in ("sharded", "torch_zero"):
        row = speed.profiled(chapter, variant)
        if row is None or not row["communication_ms"] or not row["update_ms"]:
            continue
        calls, launches = int(row["broadcast_calls"]), int(row["optimizer_launches"])
        text = f"- *{LABELS[variant].capitalize()}*: the update takes {fmt(row['update_ms'])} ms"
        if plain is not None:
            text += f", {fmt(row['update_ms'] / plain['update_ms'])} of that"
        text += f", and {percent(row['both_ms'] / row['update_ms'])} of it lies beside broadcasts"
        if variant == "sharded":
            text += f" (all rounds but the first: {percent(1 - 1 / speed.ROUNDS)})"
        said.append(
            f"{text}; {calls} broadcasts in {launches} kernels,"
            f" {fmt(speed.broadcast_gb_per_s(row))} GB/s sent and as much received."
        )
    if not said:
        return f"How updates and broadcasts share the time: {NOT_MEASURED}."
    said.insert(0, f"{on(chapter)}:\n")
    if limits is not None:
        text = f"The link could do {fmt(limits[1])} GB/s in each direction by the data sheet"
        if best is not None:
            text += f"; the best of the [chapter on all-reduce](allreduce.ipynb) is {fmt(best)} GB/s"
        said.append(f"\n{text}.")
    said += [f"\n{text}" for team in speed.other_teams(chapter) if (text := _rates(chapter, team))]
    return "\n".join(said)


def _rates(chapter: Chapter, team: tuple[str, int]) -> str:
    """What the update takes of *plain*'s on a team, and at what rates broadcasts are sent."""
    plain = speed.profiled(chapter, "plain", team)
    rows = [row for v in ("sharded", "torch_zero") if (row := speed.profiled(chapter, v, team)) is not None]
    rows = [row for row in rows if row["communication_ms"] and row["update_ms"]]
    if plain is None or not rows:
        return ""
    parts = [
        f"*{LABELS[row['variant']]}* updates in {fmt(row['update_ms'] / plain['update_ms'])} of the time of *plain* and"
        f" sends {fmt(speed.broadcast_gb_per_s(row))} GB/s"
        for row in rows
    ]
    return f"{on(chapter, team)} {'; '.join(parts)}."


def recorded(chapter: Chapter) -> str:
    """Whether the profiler has stretched what it recorded; empty where it has not."""
    rows = [speed.profiled(chapter, variant) for variant in LABELS]
    slow = [row for row in rows if row is not None and row["whole_ms"] > row["optimizer_ms_p50"]]
    said = [
        f"*{LABELS[row['variant']]}* spans {fmt(row['whole_ms'])} ms from the first kernel to the last when recorded,"
        f" though the phase takes {fmt(row['optimizer_ms_p50'])} ms otherwise"
        for row in slow
    ]
    if not said:
        return ""
    return (
        f"The profiler stretches what it records: {'; '.join(said)}. So of the recording only the times of the kernels"
        " count, not the gaps between them; and that of sending may be too long, never too short, since a kernel of"
        " NCCL waits where another rank is late."
    )


def parts(chapter: Chapter) -> str:
    """How the optimizer's phase differs from its closed form, and what the rates of the kernels explain of it."""
    found = {part["row"]["variant"]: part for part in speed.phases_in_parts(chapter)}
    recording = speed.profiled(chapter, "plain")
    if not found or recording is None:
        return f"The optimizer's phase beside the closed form: {NOT_MEASURED}."
    rests = [part["rest"] for part in found.values()]
    text = (
        f"With the rates of the kernels, the closed form leaves {_tenths(min(rests))} to {_tenths(max(rests))} ms of"
        " each phase, with sharding or without."
    )
    before = recording["optimizer_ms_p50"] - recording["whole_ms"]
    if before > 0:
        text += (
            f" The phase of *plain*, not recorded, is {_tenths(before)} ms longer than the time from its first kernel"
            " to its last, so such a rest belongs to the beginning: the ranks have met, the GPU is idle, and waits"
            " while the host goes over the tensors to launch the first kernel."
        )
    text += _hoped(found)
    return "\n\n".join(
        [text, *(t for team in speed.other_teams(chapter) if (t := _parts_of(chapter, team, found)))]
    )


def _hoped(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether sharding shortens the phase, by the rates of the machine and in fact."""
    plain, sharded = found.get("plain"), found.get("sharded")
    if not plain or not sharded or None in (plain["least"], sharded["least"]):
        return ""
    hoped, seen = sharded["least"] < plain["least"], sharded["phase"] < plain["phase"]
    word = {True: "shortens", False: "lengthens"}
    text = f" By the rates of the machine sharding in {speed.ROUNDS} rounds {word[hoped]} the phase; "
    return text + ("so it does." if hoped == seen else f"in fact it {word[seen]} it.")


def _parts_of(chapter: Chapter, team: tuple[str, int], main: Mapping[str, Mapping[str, Any]]) -> str:
    """What the closed form leaves on another team, and the variant whose phase it explains least, if one stands out."""
    found = {part["row"]["variant"]: part for part in speed.phases_in_parts(chapter, team)}
    if len(found) < 2:
        return ""
    *others, most = sorted(found, key=lambda variant: found[variant]["rest"])
    rest, below = found[most]["rest"], found[others[-1]]["rest"]
    low, high = (_tenths(found[variant]["rest"]) for variant in (others[0], others[-1]))
    if rest < 1.5 * below or rest - below < 1:
        return f"{on(chapter, team)} the closed form leaves {low} to {_tenths(rest)} ms.{_hoped(found)}"
    text = (
        f"{on(chapter, team)} the closed form leaves {low} to {high} ms, but {_tenths(rest)} ms of"
        f" *{LABELS[most]}*: its phase takes {fmt(found[most]['phase'])} ms where the closed form has"
        f" {fmt(found[most]['rates'])} ms"
    )
    if most in main:
        ranks = int(main[most]["row"]["world_size"])
        text += f" (on {ranks} ranks {fmt(main[most]['phase'])} and {fmt(main[most]['rates'])} ms)"
    return f"{text}. Why, these rows do not tell.{_hoped(found)}"


def _tenths(number: float) -> str:
    return f"{number:.1f}".replace("-", "−")
