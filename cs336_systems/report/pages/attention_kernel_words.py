"""Chapter attention: which of our kernels ran, and what keeps them from their floors, as sentences."""

from __future__ import annotations

import pandas as pd

from cs336_systems import accounting
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import attention as page
from cs336_systems.report.pages.attention import OURS, PARTS, PLAIN
from cs336_systems.report.pages.attention_time_words import shapes, timed
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, listed, percent, span


def served(chapter: Chapter, machine: str) -> str:
    """Which of our kernels ran."""
    rows = timed(chapter, machine, impl=OURS)
    rows = rows[rows["backward_kernels"].notna()]
    if rows.empty:
        return f"Which of our kernels ran: {NOT_MEASURED}."
    said = []
    for kernels, name in (
        ("hopper", "Our kernels for Hopper"),
        ("split", "Those that take fp32 apart into bf16"),
    ):
        words = [
            f"{part} in {figures.label(str(dtype))} ({shapes(some, rows)})"
            for part in PARTS
            for dtype, some in rows[rows[f"{part}_kernels"] == kernels].groupby("dtype", sort=False)
        ]
        if words:
            said.append(f"{name} ran {listed(words)}.")
    if not said:
        return "All shapes ran our portable kernels."
    left = (rows[[f"{part}_kernels" for part in PARTS]] == "portable").any(axis=None)
    return " ".join(said) + " All other passes ran our portable ones." * bool(left)


def unexplained(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """How far ours stays from its floors at the longest sequence, and what of it can be told from the rows."""
    found = page.shares(chapter, roofs, machine)
    found = found[found["impl"] == OURS]
    if found.empty:
        return f"Ours against its floors: {NOT_MEASURED}."
    found = found[found["seq_len"] == found["seq_len"].max()]
    text = _exps(chapter, roofs, machine, found)
    worst = found.loc[found["share"].idxmin()]
    text += (
        f"Ours is the furthest from its floor {worst['part']} in {figures.label(worst['dtype'])} at "
        f"$d = {worst['head_dim']}$, where that is {percent(worst['share'])} of the median"
    )
    return f"{text}.{_twice(chapter, machine, found)}"


def _twice(chapter: Chapter, machine: str, found: pd.DataFrame) -> str:
    """What our backward passes that recompute every tile twice could reach of the floor, and what they reach; nothing
    where none ran. `found`: lines of `shares` at one length."""
    rows = timed(chapter, machine, impl=OURS, seq_len=int(found["seq_len"].max()))
    back = found[found["part"] == "backward"].merge(
        rows[["dtype", "head_dim", "backward_kernels"]], on=["dtype", "head_dim"]
    )
    twice = back[back["backward_kernels"].isin(("portable", "split"))]
    if twice.empty:
        return ""
    reached = [
        f"{span(part['share'], 2, percent)} in {figures.label(str(dtype))}"
        for dtype, part in twice.groupby("dtype", sort=False)
    ]
    text = (
        f" Our backward pass in {_dims(twice, back)} computes $S$, $P$ and $dP$ twice, once for $dQ$ and once for $dK$ "
        f"and $dV$: seven products where the floor counts five, so that {percent(5 / 7)} is the most that it could "
        f"reach. It reaches {listed(reached)}."
    )
    # the two products take 2/5 of the floor: less than half of the time above it where that is over 4/5 of the floor
    other = twice[twice["share"] < 1 / (1 + 4 / 5)]
    if len(other):
        where = "In each of these" if len(other) == len(twice) else f"In {_dims(other, back)}"
        text += (
            f" {where} the two more, at the roof, are less than half of the time above the floor; the rest, "
            "exponentials among it, these rows do not take apart."
        )
    return text


def _dims(some: pd.DataFrame, of: pd.DataFrame) -> str:
    """`fp32 at every $d$ and bf16 at $d$ = 16, 32`: head dimensions by dtype."""
    words = []
    for dtype, part in some.groupby("dtype", sort=False):
        dims = sorted(part["head_dim"])
        every = len(dims) > 1 and set(dims) == set(of[of["dtype"] == dtype]["head_dim"])
        at = "every $d$" if every else f"$d$ = {', '.join(map(str, dims))}"
        words.append(f"{figures.label(str(dtype))} at {at}")
    return listed(words)


def _exps(chapter: Chapter, roofs: Roofs, machine: str, found: pd.DataFrame) -> str:
    """Where exponentials, which the floor leaves out, take longer than it; nothing where they do not."""
    mhz = page.best_clock_mhz(chapter, machine)
    if not roofs.sms or not mhz:
        return ""
    n = int(found["seq_len"].max())
    words = []
    for row in found.to_dict("records"):
        exps = accounting.exps_ms(
            accounting.attention_exps(chapter.experiment.BATCH, n, n, False, row["part"]), roofs.sms, mhz
        )
        shape = {f: row[f] for f in page.SHAPE}
        ms = chapter.number(f"{row['part']}_ms_p50", **shape, impl=OURS, repeat=0)
        if ms and exps > row["share"] * ms:
            words.append(
                f"{row['part']} in {figures.label(row['dtype'])} at $d = {row['head_dim']}$ ({percent(exps / ms)} of "
                f"the median, the floor {percent(row['share'])})"
            )
            least = exps
    if not words:
        return ""
    return (
        "The floors leave out the exponentials. One for each score, 16 a clock and multiprocessor at the highest clock "
        f"seen on this machine ({mhz:.0f} MHz), takes {fmt(least)} ms. That is longer than the floor {listed(words)}. "
    )


def price(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """The worst loss of ours to plain attention beyond the noise, and the memory saved there; '' without."""
    tables = [
        page.speedups(chapter, roofs, OURS, part, machine=machine, cap_gib=0).assign(part=part)
        for part in PARTS
    ]
    lost = pd.concat(tables)
    lost = lost[lost["word"] == "slower"]
    if lost.empty:
        return ""
    row = lost.loc[lost["ratio"].idxmin()]
    shape = {f: row[f] for f in ("machine", "cap_gib", "dtype", "head_dim", "seq_len")}
    peaks = {i: chapter.number("peak_gib", **shape, impl=i, repeat=0) for i in (PLAIN, OURS)}
    text = (
        f"The worst beyond the noise is {row['part']} in {figures.label(row['dtype'])} at $n = {row['seq_len']}$, "
        f"$d = {row['head_dim']}$: ours takes {fmt(1 / row['ratio'])} times as long as plain attention"
    )
    if peaks[PLAIN] and peaks[OURS]:
        text += f", and peaks at {fmt(peaks[OURS])} GiB instead of {fmt(peaks[PLAIN])}. There it saves memory, not time"
    return text + "."
