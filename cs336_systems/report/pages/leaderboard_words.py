"""The sentences of chapter `leaderboard` that hold numbers: Markdown, computed from its rows.

Each says "not measured" where the rows for it are missing; none claims a difference below the A/A spread."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.ladder import steps
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages.leaderboard import HARNESS, HEAD_DIM, HEADS, OFFICIAL_MS, TOKENS
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, percent


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


def record(chapter: Chapter, machine: str) -> str:
    """Ours against the verified record."""
    ours = page.best_ours(chapter, machine, **HARNESS, rep_ms=OFFICIAL_MS)
    verified = [
        x for x in page.published(chapter) if "verified entry" in x["what"] and "unverified" not in x["what"]
    ]
    if not verified:
        return f"The published record: {NOT_MEASURED}."
    best = verified[0]
    theirs = float(best["value"])
    source = f"{fmt(theirs, 4)} ms ([source]({best['source']}))"
    if ours is None:
        return f"The best verified entry is published as {source}; ours with the official ten seconds: {NOT_MEASURED}."
    mean = float(ours["ms_mean"])
    ratio = theirs / mean
    word = f"{fmt(ratio)} times as fast" if ratio > 1 else f"{fmt(1 / ratio)} times as long"
    return (
        f"With the official parameters, ten seconds of repetitions after one of warm-up, `do_bench` reports a mean of "
        f"**{fmt(mean, 4)} ms** for {figures.label(ours['impl'])} ({fmt(page.work_flops('end_to_end') / mean / 1e9)} "
        f"TFLOP/s). The best verified entry is published as {source}: ours is {word}, on another H100."
    )


def spread(chapter: Chapter, machine: str) -> str:
    """What the A/A rows say of each kind, and the spread over turns."""
    rows = chapter.measured(machine=machine)
    first, second = rows[rows["repeat"] == 0], rows[rows["repeat"] == 1]
    both = first.merge(second, on=["run", "kind", "impl", "part"], suffixes=("", "_again"))
    if both.empty:
        return f"The repetition of the same case (A/A): {NOT_MEASURED}."
    both["apart"] = (both["ms_p50_again"] / both["ms_p50"] - 1).abs()
    words = [f"{kind} {percent(part['apart'].max())}" for kind, part in both.groupby("kind", sort=False)]
    text = f"The same case measured twice in one run differs at most by, in rows of kind {', '.join(words)}."
    harness = rows[(rows["kind"] == "harness") & (rows["rep_ms"] < OFFICIAL_MS)]
    ranges = []
    for row in harness.itertuples():
        found = page.numbers(row.turns_ms)
        if len(found) > 1:
            ranges.append((max(found) / min(found) - 1, row.impl))
    if ranges:
        widest = max(ranges)
        text += (
            f" From turn to turn a median moves by up to {percent(widest[0])} ({figures.label(widest[1])})."
        )
    return text


def noise(chapter: Chapter, machine: str, run: Any) -> float:
    """The A/A difference of a run, 0 where it has none."""
    rows = chapter.measured(machine=machine, run=run)
    again = rows[rows["repeat"] == 1]
    if again.empty:
        return 0.0
    row = again.iloc[0]
    same = rows[(rows["repeat"] == 0) & (rows["impl"] == row["impl"])]
    return abs(row["ms_p50"] / same.iloc[0]["ms_p50"] - 1) if len(same) == 1 else 0.0


def backends(chapter: Chapter, machine: str) -> str:
    """What ran behind each name."""
    rows = chapter.measured(machine=machine, **HARNESS, repeat=0)
    rows = rows[rows["rep_ms"] < OFFICIAL_MS].dropna(subset="backend")
    if rows.empty:
        return f"What ran behind each name: {NOT_MEASURED}."
    found = []
    for row in rows.to_dict("records"):
        kernels = row["kernels"].split() if isinstance(row["kernels"], str) else []
        plain = "one operation after the other" if row["backend"] == "eager" else f"`{row['backend']}`"
        found.append(f"{figures.label(row['impl'])}: {', '.join(f'`{k}`' for k in kernels) or plain}")
    return f"What ran behind each name: {'; '.join(found)}."


def clocks(chapter: Chapter, machine: str) -> str:
    """What clock and power were seen in the harness."""
    rows = chapter.measured(machine=machine, **HARNESS, repeat=0).dropna(subset=["sm_mhz", "power_w"])
    if rows.empty:
        return f"Clocks and power: {NOT_MEASURED}."
    low, high = rows.loc[rows["sm_mhz"].idxmin()], rows.loc[rows["sm_mhz"].idxmax()]
    return (
        f"The SM clock was between {fmt(low['sm_mhz'], 4)} MHz ({figures.label(low['impl'])}, "
        f"{fmt(low['power_w'])} W) and {fmt(high['sm_mhz'], 4)} MHz ({figures.label(high['impl'])}, "
        f"{fmt(high['power_w'])} W). A GPU at its power limit lowers its clock, and the kernel that keeps more "
        f"units busy is slowed down more: milliseconds are compared here, not clocks."
    )


def peers(chapter: Chapter, machine: str) -> str:
    """Who is faster and slower than our best in the short harness."""
    rows = chapter.measured(machine=machine, **HARNESS, repeat=0)
    rows = rows[rows["rep_ms"] < OFFICIAL_MS]
    ours = page.best_ours(chapter, machine, **HARNESS, rep_ms=[int(r) for r in rows["rep_ms"].unique()])
    if ours is None:
        return f"Ours against its peers: {NOT_MEASURED}."
    allowed = 1 + noise(chapter, machine, ours["run"])
    said: dict[str, list[str]] = {"slower": [], "even": [], "faster": []}
    for row in rows[rows["run"] == ours["run"]].sort_values("ms_p50").itertuples():
        if row.impl in page.OURS:
            continue
        ratio = row.ms_p50 / ours["ms_p50"]
        word = "slower" if ratio > allowed else "faster" if 1 / ratio > allowed else "even"
        said[word].append(f"{figures.label(row.impl)} ({fmt(ratio)} ×)")
    words = {"slower": "slower", "even": "even within the spread", "faster": "faster"}
    found = [f"{words[word]}: {', '.join(names)}" for word, names in said.items() if names]
    return (
        f"Our fastest is {figures.label(ours['impl'])} with {fmt(ours['ms_p50'], 4)} ms"
        + (f". By time over it, {'; '.join(found)}." if found else ".")
    )  # fmt: skip


def ladder(chapter: Chapter, machine: str, part: str) -> str:
    """What the ladder of one pass gained in all, the largest step, and what lost."""
    found = page.ladder(chapter, machine, part)
    known = found[found["status"] == "ok"]
    if len(known) < 2:
        return f"The {part} ladder: {NOT_MEASURED}."
    first, best = known.iloc[0], known.loc[known["ms_p50"].astype(float).idxmin()]
    text = (
        f"{part[0].upper() + part[1:]}: from {fmt(first['ms_p50'])} ms (*{first['title']}*) to "
        f"{fmt(best['ms_p50'])} ms (*{best['title']}*), {fmt(first['ms_p50'] / best['ms_p50'])} times as fast."
    )
    gains = known["gain"].dropna().astype(float)
    if len(gains):
        allowed = 1 + noise(chapter, machine, first["run"])
        top = known.loc[gains.idxmax()]
        text += f" The largest gain of one step is {fmt(top['gain'])} × (*{top['title']}*)."
        lost = [
            f"*{known.loc[n]['title']}* ({fmt(1 / gains[n])} × the time)"
            for n in gains.index
            if 1 / gains[n] > allowed
        ]
        even = [f"*{known.loc[n]['title']}*" for n in gains.index if max(gains[n], 1 / gains[n]) <= allowed]
        text += f" Steps that lose: {'; '.join(lost)}." if lost else " No step loses."
        text += f" Within the spread: {'; '.join(even)}." if even else ""
    return text


def predictions(chapter: Chapter, machine: str) -> str:
    """How far measured times are from what was expected."""
    frames = [page.ladder(chapter, machine, part) for part in page.PARTS]
    known = pd.concat([frame[frame["status"] == "ok"] for frame in frames if len(frame)])
    if known.empty:
        return f"Expected against measured times: {NOT_MEASURED}."
    ratio = (known["ms_p50"] / known["predicted_ms"]).astype(float)
    low, high = known.loc[ratio.idxmin()], known.loc[ratio.idxmax()]
    return (
        f"Measured over expected: a median of {fmt(ratio.median())} over {len(known)} steps, from {fmt(ratio.min())} "
        f"(*{low['title']}*) to {fmt(ratio.max())} (*{high['title']}*)."
    )


def gap(chapter: Chapter, roofs: Roofs, machine: str, impl: str) -> str:
    """What the harness adds to the kernels, and how far these are from their slowest unit."""
    parts = page.gap(chapter, roofs, machine, impl)
    if parts is None:
        return f"What the time of {figures.label(impl)} is made of: {NOT_MEASURED}."
    total = sum(parts.values())
    floor = sum(ms for name, ms in parts.items() if "slowest unit" in name)
    beyond = sum(ms for name, ms in parts.items() if "kernels beyond" in name)
    harness = sum(ms for name, ms in parts.items() if name.startswith("harness"))
    rest = total - floor - beyond - harness
    return (
        f"Of the {fmt(total)} ms of {figures.label(impl)}, {percent(floor / total)} would be left if in each "
        f"pass the slowest unit never waited; {percent(beyond / total)} are what the kernels take beyond that; "
        f"{percent(harness / total)} must go into the harness's own sums and copies; "
        f"{'−' if rest < 0 else ''}{percent(abs(rest) / total)} is neither."
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
    """The two busiest units of a row."""
    known = {unit: float(row[unit]) for unit in page.COUNTED_UNITS if not pd.isna(row[unit])}
    first, second = sorted(known, key=lambda unit: -known[unit])[:2]
    name = page.COUNTED_UNITS
    return (
        f"the busiest are {name[first]} ({percent(known[first] / 100)} of the cycles) and {name[second]} "
        f"({percent(known[second] / 100)})"
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


def harness_cost(roofs: Roofs) -> str:
    """What the handout's way to make q, k and v costs."""
    moved = accounting.harness_bytes(HEADS, TOKENS, HEAD_DIM, page.BYTES, stacked=True)
    words = ", ".join(f"{name} {fmt(num / 1e6)} MB" for name, num in moved.items())
    text = f"Around the two passes the harness moves at least: {words}."
    if roofs.tb_per_s:
        text += f" At the best copy of this machine that is {fmt(sum(moved.values()) / (roofs.tb_per_s * 1e9))} ms."
    return text


def stacked_against_separate(chapter: Chapter, machine: str) -> str:
    """The measured difference between one leaf and three."""
    out = []
    for impl in page.OURS:
        one = page.one(chapter, machine, **HARNESS, impl=impl, rep_ms=page.short_ms(chapter))
        three = page.one(chapter, machine, kind="harness", leaves="separate", impl=impl)
        if one is not None and three is not None:
            out.append(f"{figures.label(impl)} {fmt(one['ms_p50'] - three['ms_p50'], 2)} ms")
    if not out:
        return f"What one leaf costs more than three: {NOT_MEASURED}."
    return f"Measured, with one leaf both passes take longer than with three by: {', '.join(out)}."


def number_against_matrix(chapter: Chapter, machine: str) -> str:
    """What the backward kernels save where dO may stay one number."""
    out = []
    for impl in page.OURS:
        one, matrix = (
            page.one(chapter, machine, **page.headline("backward", g), impl=impl)
            for g in ("number", "matrix")
        )
        if one is not None and matrix is not None:
            out.append(f"{figures.label(impl)} {fmt(one['ms_p50'])} ms instead of {fmt(matrix['ms_p50'])}")
    if not out:
        return f"The backward kernels with one number for $dO$: {NOT_MEASURED}."
    return f"The backward kernels alone, given one number instead of a matrix: {'; '.join(out)}."


def accuracy(chapter: Chapter, machine: str) -> str:
    """The largest errors against fp64 of ours and of plain PyTorch on the leaderboard's inputs."""
    rows = chapter.measured(machine=machine, **HARNESS, repeat=0).dropna(subset="error_grads")
    plain, ours = rows[rows["impl"] == "reference"], rows[rows["impl"].isin(page.OURS)]
    if ours.empty:
        return f"Errors against fp64: {NOT_MEASURED}."
    text = (
        f"Against fp64 the output of ours has a relative error of {fmt(ours['error_out'].max(), 2)} and its gradients "
        f"{fmt(ours['error_grads'].max(), 2)} at most"
    )
    if len(plain):
        row = plain.iloc[0]
        text += f"; plain PyTorch in bf16 has {fmt(row['error_out'], 2)} and {fmt(row['error_grads'], 2)}"
    worst = (
        chapter.measured(machine=machine, kind="ladder", repeat=0)[["error_out", "error_grads"]].max().max()
    )
    if not math.isnan(worst):
        text += f". No step of the ladder is off by more than {fmt(worst, 2)}"
    return text + "."
