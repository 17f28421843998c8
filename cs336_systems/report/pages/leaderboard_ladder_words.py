"""The sentences of chapter `leaderboard` about its ladders: what gained, what lost, where the expectation failed."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.ladder import steps
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages import leaderboard_ladder as ladder_page
from cs336_systems.report.pages.leaderboard_noise import clock_noise, largest
from cs336_systems.report.tables import distance, fmt, overlap, percent

# What is known of a step whose gain is not the expected one: (step, what was measured: as `judged`, or `less` or `more`
# than expected) → sentence
_SAME_SPEED = (
    "The model gives every program the same speed to the end; a guess is that the last ones of a grid run faster, "
    "having a multiprocessor to fewer."
)
_WAITING = (
    "So the programs beside one that waits do not fill its time, and waiting costs more than in the model."
)
_GLUON = "b_hopper_2"  # sums through TMA
_ADDITIONS = (
    "The additions to memory are the suspect: another step of one pass, whose sums leave through TMA "
    f"(*{steps.STEPS[_GLUON].title}*), takes less time than two passes did; no row takes them apart."
)
_NO_ORDER = "The model knows no order inside a tile and expects the same of all steps in Gluon."
EXPLAINED = {
    ("f_heavy_first", "less"): _SAME_SPEED,
    ("b_heavy_first", "less"): _SAME_SPEED,
    ("f_stages", "gain"): _WAITING,
    ("f_tiles", "loss"): "Less traffic from L2 does not pay here.",
    ("f_hopper_3", "gain"): "So a third group fills more than the overlap inside a group did.",
    ("b_one_pass", "loss"): _ADDITIONS,
    ("b_hopper_ahead", "gain"): _NO_ORDER,
}


def went(ratio: float, spread: float) -> str:
    """`gain`, `loss` or `even`: the time of a base over that of its step, held against a spread."""
    return "gain" if ratio > 1 + spread else "loss" if 1 / ratio > 1 + spread else "even"


def judged(row: Any, spread: float) -> str:
    """What a step's gain is: `went` by its medians, but `unsettled` where the times of base and step overlap."""
    found = went(row.gain, spread)
    return "unsettled" if found != "even" and row.gain_low <= 1 <= row.gain_high else found


def ladder(chapter: Chapter, machine: str, part: str) -> str:
    """What the ladder of one pass gained in all, the largest step, and what lost."""
    found = ladder_page.measured(chapter, machine, part)
    known = found[found["status"] == "ok"]
    if len(known) < 2:
        return f"The {part} ladder: {NOT_MEASURED}."
    first, best = known.iloc[0], known.loc[known["ms_p50"].astype(float).idxmin()]
    text = (
        f"{part[0].upper() + part[1:]}: from {fmt(first['ms_p50'])} ms (*{first['title']}*) to "
        f"{fmt(best['ms_p50'])} ms (*{best['title']}*), {fmt(first['ms_p50'] / best['ms_p50'])} times as fast."
    )
    gains = known["gain"].dropna().astype(float)
    if gains.empty:
        return text
    repeated = largest(chapter, machine, "ladder")
    spread = repeated or 0.0
    top = known.loc[gains.idxmax()]
    text += f" The largest gain of one step is {fmt(top['gain'])} × (*{top['title']}*)."
    found = {row.name: judged(row, spread) for row in known.loc[gains.index].itertuples()}
    title = known["title"].to_dict()

    def times(verdict: str) -> list[str]:
        return [f"*{title[n]}* ({fmt(1 / gains[n])} × the time)" for n in found if found[n] == verdict]

    even = [f"*{title[n]}*" for n in found if found[n] == "even"]
    lost, open_ = times("loss"), times("unsettled")
    text += f" Steps that lose: {'; '.join(lost)}." if lost else " No step loses."
    if open_:
        text += (
            f" Not settled, since from the 20th to the 80th percentile the times of step and base overlap: "
            f"{'; '.join(open_)}."
        )
    text += (
        " No step was measured twice, so the noise is not known."
        if repeated is None
        else f" Within the most that a step and its repetition differ, {percent(spread)}: {'; '.join(even)}."
        if even
        else ""
    )
    return text + _production(known, spread)


def _production(known: pd.DataFrame, spread: float) -> str:
    """What is to be said where one of the ladder's own kernels is faster than the production kernel."""
    name = next((n for n in known.index if n.endswith("production")), None)
    own = known[[steps.STEPS[n].own for n in known.index]]
    if name is None or own.empty:
        return ""
    best = own.loc[own["ms_p50"].astype(float).idxmin()]
    ratio = known.loc[name, "ms_p50"] / best["ms_p50"]
    if ratio <= 1 + spread or overlap(known.loc[name], best):
        return ""
    return (
        f" The fastest of the ladder's own kernels is *{best['title']}*; the production kernels take "
        f"{fmt(ratio)} times as long."
    )


def missed(chapter: Chapter, machine: str, part: str) -> str:
    """The steps whose gain is further from the expected one than the spread, and than percentiles of the times reach;
    and why as far as is known."""
    found = ladder_page.measured(chapter, machine, part)
    known = found[(found["status"] == "ok") & found["gain"].notna()]
    if known.empty:
        return f"Gains of the {part} ladder against what was expected: {NOT_MEASURED}."
    repeated = largest(chapter, machine, "ladder")
    spread, said, unexplained = repeated or 0.0, [], 0
    for row in known.itertuples():
        expected = found.loc[row.base, "predicted_ms"] / row.predicted_ms
        if went(row.gain / expected, spread) == "even" or row.gain_low <= expected <= row.gain_high:
            continue
        measured = (judged(row, spread), "less" if row.gain < expected else "more")
        why = next((EXPLAINED[row.name, word] for word in measured if (row.name, word) in EXPLAINED), "")
        if row.name == "b_one_pass" and not _cheaper(found, _GLUON, row.base):
            why = ""
        unexplained += not why
        gain = f"{fmt(row.gain)} × measured{_by_clocks(chapter, machine, found.loc[row.base], row)}"
        said.append(f"- *{row.title}*: {fmt(expected)} × expected, {gain}. {why}".strip())
    if not said:
        return f"No gain of the {part} ladder is further from the expected one than the noise."
    count = f"{len(said)} of {len(known)} steps"
    by = "; the noise is not known" if repeated is None else " by more than the noise"
    rest = "\n\nWhere no more is said, no row says why." if unexplained else ""
    return f"The expectation missed the gain of {count}{by}:\n\n" + "\n".join(said) + rest


def _by_clocks(chapter: Chapter, machine: str, base: Any, row: Any) -> str:
    """The gain in clocks, where step and base were seen at clocks further apart than a case and its repetition were:
    the expectation knows one clock only."""
    rough, apart = clock_noise(chapter, machine), distance(base["sm_mhz"] / row.sm_mhz)
    if rough is None or not apart > rough:
        return ""
    return (
        f", at {fmt(row.sm_mhz, 4)} MHz instead of {fmt(base['sm_mhz'], 4)}: in clocks "
        f"{fmt(row.gain * base['sm_mhz'] / row.sm_mhz)} ×"
    )


def _cheaper(found: pd.DataFrame, name: str, than: str) -> bool:
    both = found.loc[[name, than]]
    return bool((both["status"] == "ok").all() and both.loc[name, "ms_p50"] < both.loc[than, "ms_p50"])


def predictions(chapter: Chapter, machine: str) -> str:
    """How far measured times are from what was expected, and what the counters say of one reason."""
    frames = [ladder_page.measured(chapter, machine, part) for part in page.PARTS]
    known = pd.concat(
        [
            frame[frame["status"] == "ok"].assign(part=part)
            for part, frame in zip(page.PARTS, frames, strict=True)
            if len(frame)
        ]
    )
    if known.empty:
        return f"Expected against measured times: {NOT_MEASURED}."
    ratio = (known["ms_p50"] / known["predicted_ms"]).astype(float)
    low, high = known.loc[ratio.idxmin()], known.loc[ratio.idxmax()]
    below = int((ratio < 1).sum())
    text = (
        f"Measured over expected: a median of {fmt(ratio.median())} over {len(known)} steps, from {fmt(ratio.min())} "
        f"(*{low['title']}*, {low['part']}) to {fmt(ratio.max())} (*{high['title']}*, {high['part']}); "
        f"{'no step is' if not below else f'{below} are'} faster than expected."
    )
    if known["sm_mhz"].notna().all():
        slow, fast = (known.loc[known["sm_mhz"].astype(float).agg(end)] for end in ("idxmin", "idxmax"))
        clocks = (ratio * known["sm_mhz"] / steps.SM_MHZ).astype(float)
        text += (
            f" The expectation is for {fmt(float(steps.SM_MHZ), 4)} MHz; steps were seen at "
            f"{fmt(slow['sm_mhz'], 4)} MHz (*{slow['title']}*, {slow['part']}) to {fmt(fast['sm_mhz'], 4)}. In clocks, "
            f"measured over expected has a median of {fmt(clocks.median())}, from {fmt(clocks.min())} to "
            f"{fmt(clocks.max())}."
        )
    counted = []
    for part in page.PARTS:
        row = page.one(
            chapter, machine, kind="counters", impl="plain_triton", part=part, head_dim=page.HEAD_DIM
        )
        if row is not None:
            issued = fmt(page.instructions_a_pair(row))
            counted.append(
                f"{issued} instructions for a pair {part}, of which {fmt(page.by_hand(part))} were counted on"
            )
    if counted:
        text += f" One reason is known: the production kernels issue {', and '.join(counted)}."
    return text
