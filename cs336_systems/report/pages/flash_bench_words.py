"""The sentences of chapter `flash_bench` that hold numbers: Markdown, computed from its rows.

Each says "not measured" where the rows for it are missing; none claims a difference within the noise
(`page.ratios`)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.report import figures, headline
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import flash_bench as page
from cs336_systems.report.pages.flash_bench import DTYPES, OURS, PARTS, STEADY
from cs336_systems.report.pages.flash_bench_host import HOST, gpu_ms
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import distance, fmt, listed, percent, span

FAR = 0.25  # of the roof: a rate below this share counts as far from it


def balance(roofs: Roofs, dtype: str = "bf16") -> str:
    """From what length on the forward pass is bound by compute, at the machine's roofs."""
    if dtype not in roofs.tflops or roofs.tb_per_s is None:
        return f"Where the two meet on a machine: {NOT_MEASURED}."
    ridge = accounting.ridge_flops_per_byte(roofs.tflops[dtype], roofs.tb_per_s)
    length = 2 * page.BYTES[dtype] * ridge
    return (
        f"At the measured roofs of this machine $\\pi/\\beta$ is {fmt(ridge)} FLOPs a byte in {dtype}, so the forward "
        f"pass can be bound by compute from about $n = 2b\\,\\pi/\\beta$ = {fmt(length, 2)} tokens on."
    )


def exponentials(chapter: Chapter, roofs: Roofs, machine: str, dtype: str = "bf16") -> str:
    """Below what head dimensions the exponentials take longer than the products, at the best product measured."""
    clock = chapter.measured(machine=machine, dtype=dtype, impl=OURS, repeat=0)["sm_mhz"].median()
    if dtype not in roofs.tflops or not roofs.sms or math.isnan(clock):
        return f"Where exponentials are the floor: {NOT_MEASURED}."
    flops = (
        roofs.tflops[dtype] * 1e9 * accounting.exps_ms(1, roofs.sms, clock)
    )  # in the time of one exponential
    return (
        f"For each exponential there are $4d$ FLOPs forward and $10d$ backward. At {fmt(clock, 4)} MHz, the median "
        f"clock of ours, and at the best product in {dtype}, exponentials take longer than products below "
        f"$d$ = {fmt(flops / 4, 2)} forward and below $d$ = {fmt(flops / 10, 2)} backward."
    )


def spread(chapter: Chapter) -> str:
    """What the A/A rows say."""
    again = page.spread(chapter)
    if again.empty:
        return f"The repetition of the same case (A/A): {NOT_MEASURED}."
    long = again[again["seq_len"] >= 16384]
    words = [f"{name} {percent(again[p].median())}" for p, name in PARTS.items()]
    worst = max(PARTS, key=lambda p: again[p].max())
    row = again.loc[again[worst].idxmax()]
    tail = (
        f" From 16,384 tokens on no pair differs by more than {percent(long[list(PARTS)].max().max())}."
        if len(long)
        else ""
    )
    wide = again[again["end_to_end"] > STEADY]
    if len(wide):
        where = f"{len(wide)} runs, all at {fmt(int(wide['seq_len'].max()))} tokens or fewer"
        if len(wide) == 1:
            where = f"one run, at {fmt(int(wide['seq_len'].max()))} tokens"
        tail += f" In {where}, the pair of both passes differs by more than {percent(STEADY)}: ratios there say little."
    return (
        "The same function on the same tensors, measured twice in one run, differs by a median of "
        f"{', '.join(words)} over {len(again)} runs; the most is {percent(row[worst])}, {PARTS[worst]} at "
        f"n = {row['seq_len']}.{tail} A difference smaller than that of its own "
        "run, or than this median, is called *even*, and so are two times whose bands from the 20th to the 80th "
        f"percentile overlap.{_hosts(chapter)}"
    )


def _hosts(chapter: Chapter) -> str:
    """How much the host's time for the same launches differs from run to run."""
    rows = chapter.measured(repeat=0, impl=OURS).dropna(subset=["forward_host_us", "backend"])
    if rows.empty:
        return ""
    kinds = [part for _, part in rows.groupby(["machine", "dtype", "backend"], sort=False)]
    widest = max(kinds, key=lambda part: part["forward_host_us"].max() / part["forward_host_us"].min())
    if distance(widest["forward_host_us"].max() / widest["forward_host_us"].min()) <= STEADY:
        return ""
    row = widest.iloc[0]
    return (
        " The host's own speed changes from run to run: one call of our forward pass, the same launches at any length "
        f"(`{row['backend']}`, {figures.label(row['dtype'])}), kept it for {span(widest['forward_host_us'], 2)} µs. "
        "Short times of different shapes are therefore not to be held against one another."
    )


def backends(chapter: Chapter) -> str:
    """Which kernels ours ran, and which PyTorch's attention, where it was left to choose."""
    return f"{_ours_ran(chapter)} {_sdpa_ran(chapter)}"


def _ours_ran(chapter: Chapter) -> str:
    rows = chapter.measured(repeat=0, impl=OURS)
    rows = rows[rows["backend"].notna()]
    if rows.empty:
        return f"Which kernels ours ran: {NOT_MEASURED}."
    words = []
    for dtype, part in rows.groupby("dtype", sort=False):
        counts = part["backend"].value_counts()
        words.append(
            f"in {figures.label(dtype)} {listed([f'`{name}` in {n}' for name, n in counts.items()])}"
            f" of {len(part)} shapes"
        )
    return f"Ours ran {'; '.join(words)}."


def _sdpa_ran(chapter: Chapter) -> str:
    rows = chapter.measured(repeat=0, impl="sdpa")
    rows = rows[rows["backend"].notna()]
    if rows.empty:
        return f"Which kernel PyTorch's attention chose by itself: {NOT_MEASURED}."
    found = rows.groupby("dtype", sort=False)["backend"].agg(
        lambda b: ", ".join(f"`{x}`" for x in sorted(set(b)))
    )
    words = [f"{backend} in {figures.label(dtype)}" for dtype, backend in found.items()]
    return f"Left to choose, PyTorch's `scaled_dot_product_attention` (SDPA) ran {'; '.join(words)}."


def longest(chapter: Chapter, part: str = "end_to_end", **where: Any) -> str:
    """The longest shape that both ran, against each peer, as a Markdown list: `where` leaves one machine, dtype and
    number of heads."""
    out = []
    for peer in page.implementations(chapter, **where):
        if peer == OURS:
            continue
        table = page.ratios(chapter, peer, part, **where)
        if table.empty:
            continue
        row = table.sort_values(["seq_len", "head_dim"]).iloc[-1]
        words = {
            "faster": f"is {fmt(row['ratio'])} times as fast as",
            "slower": f"takes {fmt(1 / row['ratio'])} times as long as",
            "even": "is even with",
        }[page.verdict(row["ratio"], row["noise"])]
        shape = f"{figures.short(row['seq_len'])} tokens, $d = {row['head_dim']}$"
        out.append(f"- {shape}, {PARTS[part]}: ours {words} {figures.label(peer)}.")
    return "\n".join(out) or f"The longest shapes: {NOT_MEASURED}."


def leaderboard(chapter: Chapter, machine: str) -> str:
    """Ours against its peers, and against what others have published, for the leaderboard's work."""
    ours = chapter.number("end_to_end_ms_p50", machine=machine, impl=OURS, **headline.CASE)
    if ours is None:
        return f"The work of the leaderboard: {NOT_MEASURED}."
    words: dict[str, list[str]] = {"faster": [], "even": [], "slower": []}
    shape = {k: v for k, v in headline.CASE.items() if k != "repeat"}
    for peer in page.implementations(chapter, heads=headline.CASE["heads"]):
        table = page.ratios(chapter, peer, "end_to_end", machine=machine, **shape) if peer != OURS else ()
        for row in table.itertuples() if len(table) else ():
            words[page.verdict(row.ratio, row.noise)].append(figures.label(peer))
    said = [
        f"{word} {listed(names)}"
        for word, names in zip(("faster than", "even with", "slower than"), words.values(), strict=True)
        if names
    ]
    row = chapter.measured(machine=machine, impl=OURS, **headline.CASE).iloc[0]
    gpu = chapter.environments(machine).get(row["env"], {}).get("gpu")
    text = f"Both passes take ours {fmt(ours)} ms" + (f" on one {gpu}" if gpu else "")
    text += f": {', '.join(said)}." if said else "."
    for one in page.published(chapter):
        ratio = float(one["value"]) / ours
        times = f"{fmt(ratio)} times"
        text += (
            f" The {one['what'].split(' of ')[0]} of {one['what'].split(' of ', 1)[1]} is published as "
            f"{fmt(float(one['value']))} ms on {one['hardware'].replace(' x ', ' × ')} "
            f"([source]({one['source']})), {times} our time."
        )
    return text


def growth(chapter: Chapter, **where: Any) -> str:
    """How the GPU's time of our forward pass grows when the length doubles; `where` leaves one shape but for the
    length."""
    rows = (
        chapter.measured(**where, repeat=0, impl=OURS).dropna(subset="forward_gpu_ms").sort_values("seq_len")
    )
    lengths, times = list(rows["seq_len"]), list(rows["forward_gpu_ms"])
    steps = [
        (n, b / a) for m, n, a, b in zip(lengths, lengths[1:], times, times[1:], strict=False) if n == 2 * m
    ]
    if not steps:
        return f"How the forward pass grows with the length: {NOT_MEASURED}."
    few = []
    for n, factor in steps:
        if factor >= 2:
            break
        few.append((n, factor))
    text = "Each doubling of $n$ multiplies the GPU's time of our forward pass (in a CUDA graph) by "
    said = [f"{span(f for _, f in few)} up to {figures.short(few[-1][0])} tokens"] if few else []
    if len(few) < len(steps):
        n, last = steps[-1]
        said.append(f"{fmt(last)} at the last one, to {figures.short(n)}")
    return f"{text}{' and by '.join(said)}; $n^2$ would be 4."


def plain(chapter: Chapter, roofs: Roofs, **where: Any) -> str:
    """What was predicted of plain attention, against its rows; `where` leaves one shape but for the length."""
    rows = chapter.measured(**where, repeat=0, impl="reference").sort_values("seq_len")
    if rows.empty or "bf16" not in roofs.tflops or not roofs.tb_per_s:
        return f"What was predicted of plain attention: {NOT_MEASURED}."
    dtype = rows["dtype"].iloc[0]
    share = rows[[f"{part}_tflops" for part in PARTS]].max().max() / roofs.tflops[dtype]
    row = rows.iloc[-1]
    moved = 4 * page.BYTES[dtype] * row["heads"] * row["seq_len"] ** 2
    times = row["forward_ms_p50"] / (moved / (roofs.tb_per_s * 1e9))
    text = (
        f"Plain PyTorch stays {'far ' if share < FAR else ''}below the roof{', as predicted' if share < FAR else ''}: "
        f"{percent(share)} of the best product at most. At {figures.short(row['seq_len'])} tokens its forward pass "
        f"takes {fmt(times, 2)} times as long as $4bn^2$ bytes at the best copy"
    )
    text += (
        ", a lower bound: it also scales and masks the scores in passes of their own." if times > 1 else "."
    )
    host = rows[rows["forward_gpu_ms"] < HOST * rows["forward_ms_p50"]]
    if len(host):
        last = figures.short(host["seq_len"].max())
        text += (
            f" That memory binds it at any length was wrong for short ones: up to {last} tokens the GPU works for less "
            "than half of the forward pass's time, and the host sets it."
        )
    return text


def memory(chapter: Chapter, **where: Any) -> str:
    """Peak memory at the longest length against what must be kept; `where` leaves one shape but for the length."""
    rows = chapter.measured(**where, repeat=0).dropna(subset="peak_gib")
    ours = rows[rows["impl"] == OURS].sort_values("seq_len")
    if ours.empty:
        return f"Peak memory: {NOT_MEASURED}."
    row = ours.iloc[-1]
    n, d, heads = int(row["seq_len"]), int(row["head_dim"]), int(row["heads"])
    size = page.BYTES[row["dtype"]]
    keep = heads * (8 * n * d * size + 2 * 4 * n) / 2**30  # Q, K, V, O and four gradients; L and D in fp32
    base, first = rows["peak_gib"].min(), ours.iloc[0]
    text = (
        f"At {fmt(n)} tokens ours peaks at {fmt(row['peak_gib'])} GiB. Inputs, output and gradients, eight matrices of "
        f"$n \\times d$, and $L$ and $D$ are {fmt(keep)} GiB of it, and where the kernels for Hopper serve, $dQ$ in "
        "fp32 comes on top. The rest is what the process held before, which may grow while lengths are measured: at "
        f"{fmt(int(first['seq_len']))} tokens, where all that is next to nothing, ours reads "
        f"{fmt(first['peak_gib'])} GiB, workspace for the most part, which cuBLAS needs for plain attention and "
        "PyTorch keeps, for each stream."
    )
    words = []
    for impl in ("reference", "reference_compiled"):
        other = rows[(rows["impl"] == impl) & (rows["seq_len"] == n)]
        if len(other):
            peak = other["peak_gib"].iloc[0]
            matrices = (peak - keep - base) * 2**30 / (heads * size * n * n)
            words.append(
                f"{figures.label(impl)}'s {fmt(peak)} GiB are {fmt(matrices, 2)} matrices of $n \\times n$"
            )
    return text + (f" Above the least of all peaks, {fmt(base)} GiB, {listed(words)}." if words else "")


def tf32_gain(chapter: Chapter, machine: str) -> str:
    """What TF32 products gain ours in time."""
    rows = chapter.measured(machine=machine, impl=OURS, repeat=0, heads=1)
    keys, rows = ["head_dim", "seq_len"], rows.assign(gpu_ms=gpu_ms(rows))
    both = rows[rows["dtype"] == "tf32"].merge(rows[rows["dtype"] == "fp32"], on=keys, suffixes=("", "_fp32"))
    if both.empty:
        return f"What TF32 gains ours: {NOT_MEASURED}."
    alone = both["gpu_ms"] / both["gpu_ms_fp32"]
    ratio = alone.fillna(both["end_to_end_ms_p50"] / both["end_to_end_ms_p50_fp32"])
    both = both.assign(ratio=1 / ratio, noise=STEADY)
    words = []
    for d, part in both.groupby("head_dim"):
        grouped = itertools.groupby(page.stretches(part), key=lambda stretch: stretch[0])
        courses = [f"{word} at {listed([lengths for _, lengths in found])}" for word, found in grouped]
        words.append(f"at $d = {d}$ {', '.join(courses)}")
    text = (
        "Ours with products in TF32 beside ours in fp32 (the GPU's time in CUDA graphs, or `do_bench`'s where one of "
        f"the two has none; even within {percent(STEADY)}): {'; '.join(words)}. It takes {span(ratio, 2)} times as "
        "long."
    )
    if both["backend"].astype(str).str.contains("portable").all():
        text += " Part of that may be tiles: each precision has its own, and its own for few programs."
    slower = both[ratio > 1 + STEADY]
    if len(slower):
        text += " Where TF32 is slower, it costs time and accuracy."
        split = slower["backend_fp32"].astype(str).str.contains("split")
        if split.all():
            text += " Only the kernels for fp32 in pieces make both backward passes in one launch, which is likely why."
    return text


def findings(chapter: Chapter, machine: str) -> str:
    """The answer to `flash_benchmarking` in a few lines: one head, both passes, every peer and dtype."""
    out = []
    for peer in page.implementations(chapter, heads=1):
        if peer == OURS:
            continue
        for dtype in dict.fromkeys(chapter.rows(heads=1, impl=peer)["dtype"]):
            table = page.ratios(chapter, peer, "end_to_end", machine=machine, heads=1, dtype=dtype)
            if table.empty:
                continue
            said = [page.verdict(r.ratio, r.noise) for r in table.itertuples()]
            text = (
                f"- {figures.label(peer)}, {figures.label(dtype)}: of {len(said)} shapes ours is faster in "
                f"{said.count('faster')}, even in {said.count('even')}, slower in {said.count('slower')}"
            )
            clear = table[page.steady(chapter, table) & (pd.Series(said, index=table.index) != "even")]
            if len(clear):
                low, top = (clear.loc[i] for i in (clear["ratio"].idxmin(), clear["ratio"].idxmax()))
                text += (
                    f"; time over ours from {fmt(low['ratio'])} (n = {figures.short(low['seq_len'])}, "
                    f"d = {low['head_dim']}) to {fmt(top['ratio'])} (n = {figures.short(top['seq_len'])}, "
                    f"d = {top['head_dim']})"
                )
            out.append(f"{text}.")
    if not out:
        return f"Ours against its peers on the handout's grid: {NOT_MEASURED}."
    return (
        f"Both passes together; the times over ours are the extremes where the two are not even, of runs whose pair "
        f"differs by at most {percent(STEADY)}.\n\n" + "\n".join(out)
    )


def losses(chapter: Chapter, machine: str, heads: int = 1, dtypes: tuple[str, ...] = DTYPES) -> str:
    """Where both passes of ours are slower than a peer's, by dtype and head dimension, as a Markdown list."""
    out = []
    for dtype in dtypes:
        where = {"machine": machine, "heads": heads, "dtype": dtype}
        for d in page.values(chapter, "head_dim", **where):
            words = []
            for peer in page.implementations(chapter, **where):
                table = page.ratios(chapter, peer, "end_to_end", **where, head_dim=d) if peer != OURS else ()
                if not len(table):
                    continue
                slower = table[[page.verdict(r.ratio, r.noise) == "slower" for r in table.itertuples()]]
                if len(slower):
                    worst = slower.loc[page.steady(chapter, slower), "ratio"].min()
                    much = "" if math.isnan(worst) else f" (at most {fmt(1 / worst)} ×)"
                    words.append(f"{figures.label(peer)} at {page.slower_at(table)}{much}")
            if words:
                out.append(f"- {figures.label(dtype)}, $d = {d}$: {'; '.join(words)}")
    if not out:
        known = len(chapter.measured(machine=machine, heads=heads, dtype=list(dtypes), impl=OURS))
        if not known:
            return f"Where ours is slower: {NOT_MEASURED}."
        return f"In {listed([figures.label(t) for t in dtypes])}, ours is slower nowhere beyond the noise."
    return (
        "Both passes of ours take longer, beyond the noise, than those of (factors only from runs whose pair differs "
        f"by at most {percent(STEADY)}):\n\n" + "\n".join(out)
    )


def rates(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """The best rate of each pass, in TFLOP/s and as shares of both roofs."""
    rows = chapter.measured(machine=machine, impl=OURS, repeat=0, dtype="bf16")
    if rows.empty or math.isnan(rows["forward_tflops"].max()):
        return f"The best rates: {NOT_MEASURED}."
    words = []
    for part, name in PARTS.items():
        row = rows.loc[rows[f"{part}_tflops"].idxmax()]
        rate = row[f"{part}_tflops"]
        shape = f"n = {figures.short(row['seq_len'])}, d = {row['head_dim']}, heads: {row['heads']}"
        text = f"{name} {fmt(rate)} TFLOP/s ({shape}"
        if "bf16" in roofs.tflops:
            text += f"; {percent(rate / roofs.tflops['bf16'])} of the best product"
        if roofs.sheet and "bf16" in roofs.sheet.tflops:
            text += f", {percent(rate / roofs.sheet.tflops['bf16'])} of the data sheet"
        words.append(text + ")")
    return f"The best rates of ours in bf16: {'; '.join(words)}."
