"""The sentences of chapter `attention` about times: Markdown, computed from its rows and the closed forms.

Each says "not measured" where the rows for it are missing; none claims a difference below the A/A spread."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import attention as page
from cs336_systems.report.pages.attention import COMPILED, OURS, PARTS, PLAIN
from cs336_systems.report.pages.attention_words import LONG
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, listed, percent, span

CLOSE = 0.01  # a prediction that holds to this share holds: its roofs are of another run than the times
FEW_SLOW = 0.05  # a mean that lies above its median by this share has slow steps in it


def timed(chapter: Chapter, machine: str, **where: Any) -> pd.DataFrame:
    """The rows with times, without those under a cap of memory and without repetitions."""
    return chapter.measured(machine=machine, cap_gib=0, repeat=0, **where)


# ------------------------------------------------------------------------------------------------ how good it is
def spread(chapter: Chapter, machine: str) -> str:
    """What the A/A rows say, by length."""
    apart = page.apart(chapter, machine).dropna()
    if apart.empty:
        return f"The repetition of the same case (A/A): {NOT_MEASURED}."
    count = (page.spread(chapter)["machine"] == machine).sum()
    words = [
        f"{percent(row.forward)} and {percent(row.backward)} at $n = {n}$" for n, row in apart.iterrows()
    ]
    return (
        f"The medians of plain attention measured twice in one run ({count} runs) differ, forward and backward, by at "
        f"most {', '.join(words)} (the larger over the smaller). A difference no larger than "
        "the largest of its pass, at its length or a longer one, is called *even*. (Of a faster implementation, whose "
        "time is nearer to what the host sets, such pairs say less.)"
    )


def means(chapter: Chapter, machine: str) -> str:
    """How far means lie above medians, by length."""
    rows = timed(chapter, machine)
    if rows.empty:
        return f"Means against medians: {NOT_MEASURED}."
    above = pd.concat([rows[f"{p}_ms_mean"] / rows[f"{p}_ms_p50"] - 1 for p in PARTS], axis=1)
    most = above.astype(float).max(axis=1).groupby(rows["seq_len"]).max()
    words = [f"{percent(share)} at $n = {n}$" for n, share in most.items()]
    text = f"Means lie above medians by up to {', '.join(words)}"
    if most.max() < FEW_SLOW:
        return f"{text}."
    return (
        f"{text}: some of the hundred steps are slow, which widens the standard deviation as well. That is why medians "
        "are compared."
    )


# ------------------------------------------------------------------------------------------------ floors
def growth(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """How times grow at both ends of the grid, and what launches alone would cost."""
    rows = timed(chapter, machine)
    lengths = sorted(rows["seq_len"].unique())
    if len(lengths) < 2:
        return f"How times grow with the length: {NOT_MEASURED}."
    text = ""
    if len(lengths) > 3:
        few = _factors(rows, lengths[0], lengths[1])
        work = (lengths[1] / lengths[0]) ** 2
        text += (
            f"From $n = {lengths[0]}$ to {lengths[1]} the work grows {work:.0f}-fold, the medians by factors "
            f"of {span(few['factor'], 2)}. "
        )
        if page.device(machine) == "cuda" and few["factor"].max() < work / 4:
            if few["factor"].min() < 1:
                text += "(Below 1: from run to run the time differs by more than the work adds.) "
            text += f"So at $n = {lengths[0]}$ most of the time does not come from the work. " + _launches(
                chapter, roofs, rows[rows["seq_len"] == lengths[0]]
            )
    last = _factors(rows, *lengths[-2:])
    by_impl = [
        f"{span(part['factor'])} ({figures.label(str(impl))})"
        for impl, part in last.groupby("impl", sort=False)
    ]
    work = (lengths[-1] / lengths[-2]) ** 2
    text += (
        f"From $n = {lengths[-2]}$ to {lengths[-1]} the work grows {work:.0f}-fold, the medians by factors "
        f"of {', '.join(by_impl)}."
    )
    if last["factor"].min() < 0.95 * work:
        text += f" Where a factor is well below {work:.0f}, the shorter length is the less efficient one."
    return text


def _factors(rows: pd.DataFrame, short: int, long: int) -> pd.DataFrame:
    """Time at a length over that at a shorter one, of each case and pass: columns `impl` and `factor`."""
    same = ["impl", "dtype", "head_dim"]
    both = rows[rows["seq_len"] == short].merge(
        rows[rows["seq_len"] == long], on=same, suffixes=("", "_long")
    )
    return pd.concat(
        [
            pd.DataFrame({"impl": both["impl"], "factor": both[f"{p}_ms_p50_long"] / both[f"{p}_ms_p50"]})
            for p in PARTS
        ]
    ).astype({"factor": float})


def _launches(chapter: Chapter, roofs: Roofs, rows: pd.DataFrame) -> str:
    """What launching the kernels of a plain forward pass costs, beside its time."""
    plain = rows[rows["impl"] == PLAIN]
    if plain.empty or not roofs.launch_us:
        return ""
    row = plain.iloc[0]
    shape = page.sizes(chapter, int(row["seq_len"]), int(row["head_dim"]), row["dtype"])
    count = len(accounting.attention_kernels(*shape, "reference", "forward"))
    launches = count * roofs.launch_us / 1e3
    times = plain["forward_ms_p50"].astype(float)
    text = (
        f"A plain forward pass takes {span(times)} ms at $n = {row['seq_len']}$; its {count} launches, at "
        f"{fmt(roofs.launch_us)} µs each, would be {fmt(launches)} ms"
    )
    if times.min() > 2 * launches:
        text += (
            ". The larger part is what surrounds them: Python, autograd, waiting for the device, which these rows do "
            "not take apart"
        )
    return text + ". "


def floors(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """What share of the measured time the floors explain at the longest sequence, by implementation and dtype; and
    whether any time lies below its floor."""
    found = page.shares(chapter, roofs, machine)
    if found.empty:
        return f"The floors against the measured times: {NOT_MEASURED}."
    long = found[found["seq_len"] == found["seq_len"].max()]
    words = []
    for impl, part in long.groupby("impl", sort=False):
        by_dtype = [
            f"{span(some['share'], 2, percent)} in {figures.label(str(dtype))}"
            for dtype, some in part.groupby("dtype", sort=False)
        ]
        words.append(f"{figures.label(str(impl))} {' and '.join(by_dtype)}")
    below = (found["share"] > 1).sum()
    text = (
        f"{below} of {len(found)} medians lie below their floors, which assume that each kernel reads its operands "
        "from memory: what still lies in a cache is read faster."
        if below
        else f"No median of the grid lies below its floor; the nearest floor is {percent(found['share'].max())} of its "
        "median."
    )
    return f"At $n = {long['seq_len'].max()}$ the floors are this share of the medians: {'; '.join(words)}. {text}"


# ------------------------------------------------------------------------------------------------ speedups
def speedup(chapter: Chapter, roofs: Roofs, impl: str, machine: str) -> str:
    """Plain attention's time over that of `impl`, by dtype and pass, as a Markdown list."""
    out = []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        for part in PARTS:
            table = page.speedups(chapter, roofs, impl, part, machine=machine, dtype=dtype, cap_gib=0)
            if table.empty:
                continue
            said = table["word"].value_counts()
            low, high = table.loc[table["ratio"].idxmin()], table.loc[table["ratio"].idxmax()]
            ends = [f"{fmt(row['ratio'])} ({_shape(row)})" for row in (low, high)]
            slower = table[table["word"] == "slower"]
            where = f" ({shapes(slower, table)})" if len(slower) else ""
            out.append(
                f"- {part}, {figures.label(dtype)}: faster in {said.get('faster', 0)} of {len(table)} shapes, even in "
                f"{said.get('even', 0)}, slower in {len(slower)}{where}; plain time over {_its(impl)} from {ends[0]} "
                f"to {ends[1]}."
            )
    return "\n".join(out) or f"Plain attention against {figures.label(impl)}: {NOT_MEASURED}."


def _its(impl: str) -> str:
    return {COMPILED: "compiled", OURS: "ours"}.get(impl, figures.label(impl))


def _shape(row: Any) -> str:
    return f"n = {figures.short(row['seq_len'])}, d = {row['head_dim']}"


def shapes(some: pd.DataFrame, of: pd.DataFrame) -> str:
    """`n = 256, 1k at every d; n = 4k at d = 64`: head dimensions with the same lengths put together."""
    dims: dict[tuple[int, ...], list[int]] = {}
    for d, part in some.groupby("head_dim"):
        dims.setdefault(tuple(sorted(part["seq_len"])), []).append(int(d))
    words = []
    for lengths, ds in dims.items():
        every = set(ds) == set(of["head_dim"]) and len(ds) > 1
        at = (
            "every n"
            if set(lengths) == set(of["seq_len"]) and len(lengths) > 1
            else f"n = {', '.join(map(figures.short, lengths))}"
        )
        words.append(f"{at} at " + ("every d" if every else f"d = {', '.join(map(str, ds))}"))
    return "; ".join(words)


def at_length(chapter: Chapter, roofs: Roofs, impl: str, machine: str) -> str:
    """At the longest sequence: the speedup of an implementation, predicted and measured, over the head dimensions; how
    many ratios hold to their prediction within the noise or CLOSE, and which is the furthest from it."""
    words, tables = [], []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        for part in PARTS:
            table = page.speedups(chapter, roofs, impl, part, machine=machine, dtype=dtype, cap_gib=0)
            table = table[table["seq_len"] == table["seq_len"].max()].dropna(subset="predicted")
            if len(table):
                words.append(
                    f"{part} in {figures.label(dtype)} {span(table['ratio'])} "
                    f"(predicted {span(table['predicted'])})"
                )
                tables.append(table.assign(part=part))
    if not words:
        return f"{figures.label(impl)} at the longest sequence against its prediction: {NOT_MEASURED}."
    found = pd.concat(tables)
    found["off"] = found["ratio"] / found["predicted"]
    known = found["noise"].fillna(0).clip(lower=CLOSE)
    said = [page.verdict(off, noise) for off, noise in zip(found["off"], known, strict=True)]
    less, more = said.count("slower"), said.count("faster")
    text = (
        f"At $n = {found['seq_len'].max()}$, over the head dimensions, plain time over {_its(impl)} is: "
        f"{'; '.join(words)}. "
    )
    if not less + more:
        return f"{text}Within the noise or to {percent(CLOSE, 1)} all {len(said)} ratios are as predicted."
    row = found.iloc[int((found["off"] - 1).abs().to_numpy().argmax())]
    text += (
        f"The prediction holds, within the noise or to {percent(CLOSE, 1)}, for {said.count('even')} of these "
        f"{len(said)} ratios ({less} smaller, {more} larger). It misses by the most {row['part']} in "
        f"{figures.label(row['dtype'])} at $d = {row['head_dim']}$: {fmt(row['ratio'])} instead of "
        f"{fmt(row['predicted'])}."
    )
    which = [
        words
        for count, words in (
            (
                less,
                f"smaller than predicted where plain attention comes nearer to its floor than {_its(impl)} to its own",
            ),
            (more, f"larger where {_its(impl)} comes nearer"),
        )
        if count
    ]
    return f"{text} A ratio is {listed(which)}; the shares above say how near."


def beyond(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """Where, from LONG on, compiling gains more than the floors allow, by more than the noise and CLOSE, and what the
    rows say about why; nothing where it does not."""
    words, lengths, between, at_longest = [], set(), [], []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        for part in PARTS:
            table = page.speedups(chapter, roofs, COMPILED, part, machine=machine, dtype=dtype, cap_gib=0)
            above = table["ratio"] > table["predicted"] * (1 + table["noise"].fillna(0).clip(lower=CLOSE))
            more = table[above & (table["seq_len"] >= LONG)]
            if more.empty:
                continue
            words.append(
                f"{part} in {figures.label(dtype)} {span(more['ratio'])} instead of {span(more['predicted'])} "
                f"({shapes(more, table)})"
            )
            last = table["seq_len"].max()
            shorter = more[more["seq_len"] < last]
            lengths |= set(shorter["seq_len"])
            between += _between(chapter, roofs, shorter, part)
            same = table["head_dim"].isin(shorter["head_dim"]) & (table["seq_len"] == last)
            at_longest += _between(chapter, roofs, table[same], part)
    if not words:
        return ""
    text = f"By more than the noise and {percent(CLOSE, 1)}, compiling gains more than predicted: {listed(words)}."
    if not between or not at_longest or min(between) <= max(at_longest):
        return text
    where = listed([figures.short(n) for n in sorted(lengths)])
    return (
        f"{text} If the products take as long in both, what plain attention does between them takes at least "
        f"{span(between, 2)} times its floor at n = {where}, and at least {span(at_longest, 2)} times at n = "
        f"{figures.short(last)}. (PyTorch chooses the kernel of its softmax by the length of a row; that this is the "
        "reason is a guess, since the rows time passes, not kernels.)"
    )


def _between(chapter: Chapter, roofs: Roofs, table: pd.DataFrame, part: str) -> list[float]:
    """The least that plain attention can take between its products, over the floor of that, for each line of
    `speedups` of the compiled one: the difference of both times, and the floor of what is between in the compiled one.
    """
    out = []
    for row in table.to_dict("records"):
        pi, beta = page.product_tflops(roofs, row["dtype"], PLAIN), roofs.tb_per_s
        shape = page.sizes(chapter, row["seq_len"], row["head_dim"], row["dtype"])
        plain, compiled = (
            accounting.kernels_ms([k for k in kernels if not k.flops], pi, beta)
            for kernels in (
                accounting.attention_kernels(*shape, form, part, page.device(row["machine"]))
                for form in ("reference", "compiled")
            )
        )
        out.append((row["ms_base"] - row["ms"] + compiled) / plain)
    return out


def surplus(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """What a compiled forward pass takes more than a plain one at the shortest length, where the host sets the time;
    nothing unless it is slower in most shapes and faster in none."""
    out = []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        table = page.speedups(chapter, roofs, COMPILED, "forward", machine=machine, dtype=dtype, cap_gib=0)
        out.append(table[table["seq_len"] == table["seq_len"].min()])
    shortest = pd.concat(out) if out else pd.DataFrame()
    if page.device(machine) == "cpu" or shortest.empty or "faster" in set(shortest["word"]):
        return ""
    slower = shortest[shortest["word"] == "slower"]
    if len(slower) <= len(shortest) / 2:
        return ""
    more, count = slower["ms"] - slower["ms_base"], len(shortest)
    where = "" if len(slower) == count else f" in the {len(slower)} of {count} shapes where it is slower"
    return (
        f"At $n = {shortest['seq_len'].min()}$ a compiled forward pass takes {span(more)} ms longer than a plain "
        f"one{where}, with one launch fewer: entering compiled code costs the host more than the launch that it saves. "
        "What of it the guards take, which the prediction names, these rows do not show."
    )


def fastest(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """Who is the fastest at the longest sequence, by dtype and pass, as a Markdown list."""
    rows = timed(chapter, machine)
    if rows["impl"].nunique() < 2:
        return f"Which implementation is the fastest: {NOT_MEASURED}."
    longest = rows["seq_len"].max()
    noise = page.noise(chapter, machine)
    out = []
    for dtype, some in rows[rows["seq_len"] == longest].groupby("dtype", sort=False):
        for part in PARTS:
            limit = noise[part].get(longest, math.nan)
            dims: dict[tuple[str, ...], list[int]] = {}
            for d, those in some.groupby("head_dim"):
                times = those.set_index("impl")[f"{part}_ms_p50"].astype(float)
                best = times.min() * (1 + (0 if math.isnan(limit) else limit))
                dims.setdefault(tuple(times.index[times <= best]), []).append(int(d))
            words = [
                f"{listed([figures.label(i) for i in impls])} at "
                + ("every $d$" if len(dims) == 1 else f"$d$ = {', '.join(map(str, ds))}")
                for impls, ds in dims.items()
            ]
            out.append(f"- {part}, {figures.label(str(dtype))}: {'; '.join(words)}.")
    return f"At $n = {longest}$ the fastest is:\n\n" + "\n".join(out)


# ------------------------------------------------------------------------------------------------ answers
def answer(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """`torch_compile` (a) in one sentence: plain time over compiled time, from LONG on and below, beside the noise."""
    words = []
    for long in (True, False):
        ranges, noise = [], []
        for part in PARTS:
            table = page.speedups(chapter, roofs, COMPILED, part, machine=machine, cap_gib=0)
            table = table[(table["seq_len"] >= LONG) == long]
            if len(table):
                ranges.append(f"{span(table['ratio'])} {part}")
                noise += list(table["noise"].dropna())
        if ranges:
            words.append(
                f"{' and '.join(ranges)} {'from' if long else 'below'} {figures.short(LONG)} tokens"
                + (" on" if long else "")
                + (f" (where A/A pairs differ by up to {percent(max(noise))})" if noise else "")
            )
    if not words:
        return f"Plain time over compiled time: {NOT_MEASURED}."
    return f"Over all dtypes and head dimensions plain time over compiled time is {'; '.join(words)}."
