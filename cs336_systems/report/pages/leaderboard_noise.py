"""What the noise of chapter `leaderboard` is, from its rows, and which differences are larger than it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from cs336_systems.experiments.leaderboard import OFFICIAL_MS
from cs336_systems.ladder import steps
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.tables import distance, fmt, listed, overlap, percent, span

KINDS = {
    "harness": "the harness",
    "kernel": "kernels alone",
    "ladder": "the ladder",
    "counters": "the counters",
    "first": "first calls",
}
_COMPARED = {"counters": "tensor_pct", "first": "first_call_s"}  # for the other kinds: their medians
VERDICTS = {
    "slower": "slower",
    "even": "even within the spread",
    "unsettled": "not settled",
    "faster": "faster",
}


def pairs(chapter: Chapter, machine: str) -> pd.DataFrame:
    """The cases measured twice in one run, a row each: that of the first, `again` with what was `compared` for the
    second, `mhz_again`, and `apart`, how far the two lie apart (`tables.distance`)."""
    rows = chapter.measured(machine=machine)
    kinds = {kind: _COMPARED.get(kind, "ms_p50") for kind in KINDS}
    columns = rows["kind"].map(kinds)
    values = [row[column] if isinstance(column, str) else None for (_, row), column in
              zip(rows.iterrows(), columns, strict=True)]  # fmt: skip
    rows = rows.assign(compared=pd.to_numeric(pd.Series(values, index=rows.index, dtype=object)))
    second = rows[rows["repeat"] == 1][["run", "kind", "impl", "part", "compared", "sm_mhz"]]
    second = second.rename(columns={"compared": "again", "sm_mhz": "mhz_again"})
    both = rows[rows["repeat"] == 0].merge(second, on=["run", "kind", "impl", "part"])
    both["apart"] = distance(both["again"] / both["compared"])
    return both.dropna(subset="apart")


def noise(chapter: Chapter, machine: str, run: Any) -> float | None:
    """By which share the case that a run measured twice differs; None where there is none."""
    found = pairs(chapter, machine)
    found = found[found["run"] == run]
    return float(found["apart"].max()) if len(found) else None


def largest(chapter: Chapter, machine: str, kind: str, wide: bool | None = None) -> float | None:
    """The most by which a case of this kind differs from its repetition; None without repetitions. wide: of the cases
    in fp32 alone, or of those in 16 bits."""
    found = pairs(chapter, machine)
    found = found[found["kind"] == kind]
    if wide is not None:
        found = found[(found["dtype"] == "fp32") == wide]
    return float(found["apart"].max()) if len(found) else None


def each_width(chapter: Chapter, machine: str, kind: str) -> str:
    """`largest` in words, for 16 bits and fp32 apart where both are there: `5.0 % in 16 bits, 0.38 % in fp32`."""
    found = {
        name: largest(chapter, machine, kind, wide) for name, wide in (("16 bits", False), ("fp32", True))
    }
    known = {name: share for name, share in found.items() if share is not None}
    if len(known) < 2:
        return percent(next(iter(known.values()), None))
    return ", ".join(f"{percent(share)} in {name}" for name, share in known.items())


def verdict(ratio: float, own: float | None, most: float | None, overlap: bool = False) -> str:
    """A key of VERDICTS for a ratio of times. own: what the repetition of that run differs by; most: the largest of the
    kind. Where only one is known it stands for both; where none is, any difference counts. overlap: whether the two
    cases' times do (`tables.overlap`)."""
    known = [share for share in (own, most) if share is not None]
    away = distance(ratio)
    if away <= min(known, default=0.0):
        return "even"
    if overlap or away <= max(known, default=0.0):
        return "unsettled"
    return "slower" if ratio > 1 else "faster"


def rule(chapter: Chapter, machine: str, kind: str) -> str:
    """How differences of a kind of rows are judged, in words."""
    if largest(chapter, machine, kind) is None:
        return "Nothing here was measured twice, so the noise is not known."
    return (
        f"A difference counts where it is larger than any between a case and its repetition in {KINDS[kind]} "
        f"({each_width(chapter, machine, kind)}) and where the peer's times, from the 20th to the 80th percentile, "
        f"overlap neither with ours nor with ours measured again; any other that is larger than that of its own run "
        f"is not settled."
    )


def spread(chapter: Chapter, machine: str) -> str:
    """What the A/A rows say of each kind, the clocks of the largest, and the spread over turns."""
    found = pairs(chapter, machine)
    if found.empty:
        return f"The repetition of the same case (A/A): {NOT_MEASURED}."
    said = []
    for kind, name in KINDS.items():
        if (found["kind"] == kind).any():
            said.append(f"in {name} {each_width(chapter, machine, kind)}")
    text = f"The same case measured twice in one run differs at most by: {'; '.join(said)}."
    timed = found[found["kind"].isin(["kernel", "ladder"])].dropna(subset=["sm_mhz", "mhz_again"])
    examples = []
    for _, part in timed.groupby("kind", sort=False):
        row = part.loc[part["apart"].idxmax()]
        examples.append(
            f"{case_words(row)} took {fmt(row['compared'])} ms, seen at {fmt(row['sm_mhz'], 4)} MHz, and "
            f"{fmt(row['again'])} ms, seen at {fmt(row['mhz_again'], 4)} MHz"
        )
    if examples:
        text += f" The largest: {'; '.join(examples)}."
    rows = chapter.measured(machine=machine, kind="harness")
    ranges = []
    for row in rows[rows["rep_ms"] < OFFICIAL_MS].itertuples():
        turns = page.numbers(row.turns_ms)
        if len(turns) > 1:
            ranges.append((max(turns) / min(turns) - 1, row.impl))
    if ranges:
        widest = max(ranges)
        ours = max((share for share, impl in ranges if impl in page.OURS), default=None)
        also = "" if ours is None or widest[1] in page.OURS else f"; of ours by up to {percent(ours)}"
        text += (
            f" From turn to turn the median of one case in the harness moves by up to {percent(widest[0])} "
            f"({figures.label(widest[1])}{also})."
        )
    return text + first_turns(chapter, machine)


def first_turns(chapter: Chapter, machine: str) -> str:
    """Whether the first turns of kernels alone are further from their case's median than chance would have it."""
    away = []
    for row in chapter.measured(machine=machine, kind="kernel").itertuples():
        turns = page.numbers(row.turns_ms)
        if len(turns) > 1:
            away.append([ms / row.ms_p50 - 1 for ms in turns])
    first = [found[0] for found in away if abs(found[0]) == max(map(abs, found))]
    chance = [1 / len(found) for found in away]
    if len(first) <= sum(chance) + 2 * math.sqrt(sum(p * (1 - p) for p in chance)):
        return ""
    shorter = sum(share < 0 for share in first)
    return (
        f" Of kernels alone, the turn that is furthest from the case's median is the first in {len(first)} of "
        f"{len(away)} cases, by up to {percent(max(map(abs, first)))}; chance would make it "
        f"{fmt(round(sum(chance)))}. It is shorter than the median in {shorter} of them and longer in "
        f"{len(first) - shorter}, in spite of the calls before it; why, these rows do not show. The median over all "
        f"turns feels little of it, the percentiles more."
    )


def case_words(row: Any) -> str:
    """A row of kernels or of the ladder by its name: `ours, Triton (forward, bf16, d = 64, causal)`."""
    if row["kind"] == "ladder":
        return f"*{steps.STEPS[row['impl']].title}* ({row['part']})"
    shape = page.shape_words(row["dtype"], row["head_dim"], row["is_causal"])
    number = ", one number for $dO$" if row["part"] == "backward" and row["grad_o"] == "number" else ""
    return f"{figures.label(row['impl'])} ({row['part']}, {shape}{number})"


def clocks(chapter: Chapter, machine: str) -> str:
    """What clock and power were seen in the harness, and how far such readings go."""
    rows = chapter.measured(machine=machine, **page.HARNESS, repeat=0).dropna(subset=["sm_mhz", "power_w"])
    rows = rows[rows["rep_ms"] < OFFICIAL_MS]
    if rows.empty:
        return f"Clocks and power: {NOT_MEASURED}."
    low, high = rows["sm_mhz"].min(), rows["sm_mhz"].max()
    text = (
        f"In the short turns of the harness with one leaf the median SM clock of a case was between {fmt(low, 4)} MHz "
        f"({_seen_at(rows, low)}) and {fmt(high, 4)} MHz ({_seen_at(rows, high)})."
    )
    top, rest = rows[rows["sm_mhz"] == high]["power_w"], rows[rows["sm_mhz"] < high]["power_w"]
    if len(rest) and rest.min() > top.max():
        text += (
            f" At the highest clock cases draw {span(top)} W in the median, all others {span(rest)}: a GPU at its "
            f"power limit lowers its clock."
        )
    text += " Milliseconds are compared here, not clocks."
    found = _clocks_apart(chapter, machine)
    if reading := clock_noise(chapter, machine):
        row = found.loc[found["mhz_apart"].idxmax()]
        text += (
            f" In turns as short as those of kernels alone and of the ladder, readings are rough: {case_words(row)} "
            f"was seen at {fmt(row['sm_mhz'], 4)} MHz and, measured again, at {fmt(row['mhz_again'], 4)}, "
            f"{percent(reading)} apart; its times are {percent(row['apart'])} apart."
        )
    return text


def clock_noise(chapter: Chapter, machine: str) -> float | None:
    """The most by which the clocks at which a case of kernels or of a ladder and its repetition were seen differ; None
    where none is known."""
    found = _clocks_apart(chapter, machine)
    return float(found["mhz_apart"].max()) if len(found) else None


def _clocks_apart(chapter: Chapter, machine: str) -> pd.DataFrame:
    found = pairs(chapter, machine)
    found = found[found["kind"].isin(["kernel", "ladder"])].dropna(subset=["sm_mhz", "mhz_again"])
    return found.assign(mhz_apart=distance(found["mhz_again"] / found["sm_mhz"]))


def _seen_at(rows: pd.DataFrame, mhz: float) -> str:
    """Who was seen at a clock, with the power: `SDPA (flash), 622 W; ...`."""
    found = [f"{figures.label(r.impl)}, {fmt(r.power_w)} W" for r in rows[rows["sm_mhz"] == mhz].itertuples()]
    return "; ".join(dict.fromkeys(found))


def sorted_out(
    chapter: Chapter, machine: str, kind: str, found: Iterable[tuple[str, Any, Any]]
) -> dict[str, list[tuple[str, float]]]:
    """Verdict → (name, ratio of times) of those given as (name, row, row of the same run whose time it is held
    against), in the order of VERDICTS."""
    out: dict[str, list[tuple[str, float]]] = {word: [] for word in VERDICTS}
    for name, row, base in found:
        ratio, own = row["ms_p50"] / base["ms_p50"], noise(chapter, machine, row["run"])
        most = largest(chapter, machine, kind, row["dtype"] == "fp32")
        shared = overlap(row, base) or any(
            overlap(row, again) for again in repetitions(chapter, machine, base)
        )
        out[verdict(ratio, own, most, shared)].append((name, ratio))
    return {word: those for word, those in out.items() if those}


def repetitions(chapter: Chapter, machine: str, row: Any) -> list[dict[str, Any]]:
    """The rows of the same case measured again in the same run."""
    where = {"run": row["run"], "kind": row["kind"], "impl": row["impl"], "part": row["part"], "repeat": 1}
    return chapter.measured(machine=machine, **where).to_dict("records")


def kernels(chapter: Chapter, machine: str) -> str:
    """The peers' kernels against ours in the same run, over all shapes that they take and both passes; in fp32 against
    the portable ones as well."""
    rows = chapter.measured(machine=machine, **page.KERNEL)
    text = []
    for impl, bases in (
        ("fa4", page.OURS), ("sdpa_cudnn", page.OURS), ("sdpa_efficient", page.OURS),
        ("sdpa_efficient", ("plain_triton",)),
    ):  # fmt: skip
        found, dtypes = [], []
        for row in rows[rows["impl"] == impl].to_dict("records"):
            ours = rows[rows["impl"].isin(bases) & (rows["run"] == row["run"])]
            if len(ours):
                shape = page.shape_words(row["dtype"], row["head_dim"], row["is_causal"])
                base = ours.loc[ours["ms_p50"].astype(float).idxmin()]
                found.append((f"{row['part']}, {shape}", row, base))
                dtypes.append(row["dtype"])
        words = []
        for word, those in sorted_out(chapter, machine, "kernel", found).items():
            if len(those) <= 2:
                words.append(
                    f"{VERDICTS[word]} in {listed([f'{name} ({fmt(r, 4)} ×)' for name, r in those])}"
                )
            else:
                ratios = span([r for _, r in those], 4, lambda r, digits: f"{fmt(r, digits)} ×")
                words.append(f"{VERDICTS[word]} in {len(those)} of {len(found)} cases ({ratios})")
        if words:
            name = "ours" if bases == page.OURS else figures.label(*bases)
            where = listed(list(dict.fromkeys(dtypes)))
            text.append(f"**{figures.label(impl)}** over {name}, in {where}: {'; '.join(words)}.")
    if not text:
        return f"Kernels of FlashAttention-4 and cuDNN against ours: {NOT_MEASURED}."
    return " ".join([*text, rule(chapter, machine, "kernel")])
