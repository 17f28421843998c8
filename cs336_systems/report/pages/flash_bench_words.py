"""The sentences of chapter `flash_bench` that hold numbers: Markdown, computed from its rows.

Each says "not measured" where the rows for it are missing; none claims a difference below the A/A spread."""

from __future__ import annotations

import math
from typing import Any

from cs336_systems import accounting
from cs336_systems.report import figures, headline
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import flash_bench as page
from cs336_systems.report.pages.flash_bench import OURS, PARTS
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, percent

L2_BUFFER_BYTES = 256 * 2**20  # what do_bench zeroes before each call
FP32_ACCURATE = 1e-5  # an error below this cannot come from TF32 products
FLAT = 1.5  # a time counts as constant up to this multiple of its least value


def balance(roofs: Roofs, dtype: str = "bf16") -> str:
    """From what length on the forward pass is bound by compute, at the machine's roofs."""
    if dtype not in roofs.tflops or roofs.tb_per_s is None:
        return f"Where the two meet on a machine: {NOT_MEASURED}."
    ridge = accounting.ridge_flops_per_byte(roofs.tflops[dtype], roofs.tb_per_s)
    length = 2 * page.BYTES[dtype] * ridge
    return (
        f"At the measured roofs of this machine $\\pi/\\beta$ is {fmt(ridge)} FLOPs a byte in {dtype}, so the forward "
        f"pass is bound by compute from about $n = 2b\\,\\pi/\\beta$ = {fmt(length, 2)} tokens on."
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
    return (
        "The same function on the same tensors, measured twice in one run, differs by a median of "
        f"{', '.join(words)} over {len(again)} runs; the most is {percent(row[worst])}, {PARTS[worst]} at "
        f"n = {row['seq_len']}.{tail} A difference smaller than that of its own "
        "run, or than this median, is called *even*."
    )


def backends(chapter: Chapter) -> str:
    """Which of its kernels PyTorch's attention really ran, where it was left to choose."""
    rows = chapter.measured(repeat=0, impl="sdpa")
    rows = rows[rows["backend"].notna()]
    if rows.empty:
        return f"Which kernel PyTorch's attention chose by itself: {NOT_MEASURED}."
    found = rows.groupby("dtype", sort=False)["backend"].agg(
        lambda b: ", ".join(f"`{x}`" for x in sorted(set(b)))
    )
    words = [f"{backend} in {figures.label(dtype)}" for dtype, backend in found.items()]
    return f"Left to choose, PyTorch's `scaled_dot_product_attention` (SDPA) ran {'; '.join(words)}."


def longest(chapter: Chapter, heads: int, part: str = "end_to_end") -> str:
    """The longest bf16 shape that both ran, against each peer, as a Markdown list."""
    out = []
    for peer in page.implementations(chapter, heads=heads):
        if peer == OURS:
            continue
        table = page.ratios(chapter, peer, part, heads=heads, dtype="bf16")
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
    return "\n".join(out) or f"The longest shapes, heads: {heads}: {NOT_MEASURED}."


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
        f"{word} {' and '.join(names)}"
        for word, names in zip(("faster than", "even with", "slower than"), words.values(), strict=True)
        if names
    ]
    text = f"Both passes take ours {fmt(ours)} ms" + (f": {', '.join(said)}." if said else ".")
    for one in page.published(chapter):
        ratio = float(one["value"]) / ours
        times = f"{fmt(ratio)} times"
        text += (
            f" The {one['what'].split(' of ')[0]} of {one['what'].split(' of ', 1)[1]} is published as "
            f"{fmt(float(one['value']))} ms on {one['hardware'].replace(' x ', ' × ')} "
            f"([source]({one['source']})), {times} our time."
        )
    return text


def short(chapter: Chapter, roofs: Roofs, **where: Any) -> str:
    """What short sequences cost and why: `where` leaves one machine, dtype, head dimension, number of heads."""
    rows = chapter.measured(**where, repeat=0)
    ours = rows[rows["impl"] == OURS].sort_values("seq_len")
    if ours.empty:
        return f"What short sequences cost: {NOT_MEASURED}."
    both = ours["end_to_end_ms_p50"]
    flat = ours.loc[both <= FLAT * both.min(), "seq_len"].max()
    first = ours.iloc[0]
    top = both[ours["seq_len"] <= flat].max()
    work = (flat / first["seq_len"]) ** 2
    text = (
        f"Up to {flat} tokens both passes of ours together take {fmt(both.min())} to {fmt(top)} ms, "
        f"while the work grows {work:,.0f}-fold: this is the host's time, not the GPU's."
    )
    peer = rows[(rows["impl"] == "sdpa") & (rows["seq_len"] <= flat)]["end_to_end_ms_p50"]
    if len(peer):
        less = peer.min() < both.min()
        text += f" SDPA needs {fmt(peer.min())} ms at its least" + (
            ": its autograd node is written in C++, while ours is a Python `autograd.Function` that the engine "
            "calls back from a thread of its own. That is where ours loses at short lengths, and no faster "
            "kernel would change it."
            if less
            else "."
        )
    if roofs.tb_per_s:
        clearing = L2_BUFFER_BYTES / (roofs.tb_per_s * 1e6)
        text += (
            f" `do_bench` hides part of it: it zeroes 256 MB before each call, about {fmt(clearing, 2)} µs of the "
            "GPU's time at the measured bandwidth, in which the host can already prepare the launch. A forward "
            f"pass fits into that, so at {first['seq_len']} tokens it reads {fmt(1e3 * first['forward_ms_p50'])} µs, "
            "the time of the kernel alone; a backward pass does not. In a model, the launches before play that "
            "part, if the host is ahead; a CUDA graph removes the host altogether."
        )
    return text


def without_host(chapter: Chapter, peer: str = "sdpa_flash", **where: Any) -> str:
    """Ours against a peer by the GPU's time alone, and where `do_bench` tells something else."""
    rows = chapter.measured(**where, repeat=0)
    ours, other = rows[rows["impl"] == OURS], rows[rows["impl"] == peer]
    both = ours.merge(other, on=[*page.SHAPE, "run"], suffixes=("", "_peer")).sort_values("seq_len")
    found = []
    reversed_by_host = []
    for part in ("forward", "backward"):
        gpu = (both[f"{part}_gpu_ms"] / both[f"{part}_gpu_ms_peer"]).dropna()
        if gpu.empty:
            return f"GPU time without the host: {NOT_MEASURED}."
        found.append(f"{part} {gpu.min():.2f} to {gpu.max():.2f} ({len(gpu)} shapes)")
        seen = both[f"{part}_ms_p50"] / both[f"{part}_ms_p50_peer"]
        for i in gpu.index[(gpu < 1) & (seen[gpu.index] > 1)]:
            row = both.loc[i]
            reversed_by_host.append(
                f"{part} at {row['seq_len']} tokens, $d = {row['head_dim']}$: the GPU needs "
                f"{1e3 * row[f'{part}_gpu_ms']:.0f} µs for ours and {1e3 * row[f'{part}_gpu_ms_peer']:.0f} µs for "
                f"the peer, the host {row[f'{part}_host_us']:.0f} and {row[f'{part}_host_us_peer']:.0f} µs, "
                f"and `do_bench` reads {1e3 * row[f'{part}_ms_p50']:.0f} and "
                f"{1e3 * row[f'{part}_ms_p50_peer']:.0f} µs"
            )
    text = f"Over {figures.label(peer)}'s, our GPU time is: {'; '.join(found)}."
    if reversed_by_host:
        return (
            f"{text} `do_bench` has it the other way round for {'; '.join(reversed_by_host)}. There it does not time "
            "the kernels, but what emptying the cache leaves to be seen of the host's work."
        )
    return f"{text} `do_bench` agrees on who is faster in each of them."


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
    base = rows["peak_gib"].min()
    text = (
        f"At {n} tokens ours peaks at {fmt(row['peak_gib'])} GiB. Inputs, output and gradients, eight matrices of "
        f"$n \\times d$, and $L$ and $D$ are {fmt(keep)} GiB of it, and where the kernels for Hopper serve, $dQ$ in "
        f"fp32 comes on top; the curves start at {fmt(base)} GiB, most of which is workspace that cuBLAS holds in this "
        "process for plain attention."
    )
    for impl in ("reference", "reference_compiled"):
        other = rows[(rows["impl"] == impl) & (rows["seq_len"] == n)]
        if len(other):
            peak = other["peak_gib"].iloc[0]
            matrices = (peak - keep - base) * 2**30 / (heads * size * n * n)
            text += (
                f" {figures.label(impl)[0].upper() + figures.label(impl)[1:]} peaks at {fmt(peak)} GiB, "
                f"{fmt(peak / row['peak_gib'])} times as much: {fmt(matrices, 2)} matrices of $n \\times n$."
            )
    return text


def accuracy(chapter: Chapter) -> str:
    """The largest error of ours over that of plain PyTorch on the same inputs, by dtype."""
    rows = chapter.measured(repeat=0)
    keys = [*page.SHAPE, "run"]
    ours, plain = rows[rows["impl"] == OURS], rows[rows["impl"] == "reference"]
    both = ours.merge(plain, on=keys, suffixes=("", "_plain"))
    if both.empty:
        return f"Errors of ours over those of plain PyTorch: {NOT_MEASURED}."
    words = []
    for dtype, part in both.groupby("dtype", sort=False):
        o = (part["error_out"] / part["error_out_plain"]).max()
        g = (part["error_grads"] / part["error_grads_plain"]).max()
        words.append(f"{figures.label(dtype)}: output {fmt(o, 2)}, gradients {fmt(g, 2)}")
    text = (
        "The error of ours over that of plain PyTorch on the same inputs is at most, in "
        + "; in ".join(words)
        + ". The tests allow twice plain PyTorch's error and one rounding of the result."
    )
    tf32 = rows[rows["dtype"] == "tf32"]
    if len(tf32[tf32["impl"] == OURS]):
        text += (
            " In TF32 they allow more: cuBLAS rounds fp32 numbers to TF32 before a product, while Triton hands them to "
            "the tensor cores as they are, which drop the last bits, all in one direction."
        )
    sdpa = tf32[tf32["impl"] == "sdpa"]["error_grads"].max()
    if sdpa < FP32_ACCURATE:
        text += (
            f" SDPA's kernel does not use TF32 even where it may: its gradients have an error of {fmt(sdpa, 2)} at "
            "most, so in the TF32 rows SDPA is slower but more accurate wherever ours is faster."
        )
    return text


def findings(chapter: Chapter, machine: str) -> str:
    """The answer to `flash_benchmarking` in a few lines: one head, bf16, every peer and pass."""
    out = []
    for peer in page.implementations(chapter, heads=1):
        if peer == OURS:
            continue
        for dtype in dict.fromkeys(chapter.rows(heads=1, impl=peer)["dtype"]):
            table = page.ratios(chapter, peer, "end_to_end", machine=machine, heads=1, dtype=dtype)
            if table.empty:
                continue
            said = [page.verdict(r.ratio, r.noise) for r in table.itertuples()]
            top, low = table.loc[table["ratio"].idxmax()], table.loc[table["ratio"].idxmin()]
            out.append(
                f"- {figures.label(peer)}, {figures.label(dtype)}: ours is faster in {said.count('faster')} of "
                f"{len(said)} shapes and slower in {said.count('slower')}; time over ours from {fmt(low['ratio'])} "
                f"(n = {figures.short(low['seq_len'])}, d = {low['head_dim']}) to {fmt(top['ratio'])} "
                f"(n = {figures.short(top['seq_len'])}, d = {top['head_dim']})."
            )
    return "\n".join(out) or f"Ours against its peers on the handout's grid: {NOT_MEASURED}."


def losses(chapter: Chapter, machine: str, heads: int = 1, dtypes: tuple[str, ...] = ("fp32", "tf32")) -> str:
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
                at = [lengths for word, lengths in page.stretches(table) if word == "slower"]
                if at:
                    worst = 1 / table["ratio"].min()
                    words.append(f"{figures.label(peer)} at {', '.join(at)} (at most {fmt(worst)} ×)")
            if words:
                out.append(f"- {figures.label(dtype)}, $d = {d}$: {'; '.join(words)}")
    if not out:
        known = len(chapter.measured(machine=machine, heads=heads, dtype=list(dtypes), impl=OURS))
        return "Ours is slower nowhere." if known else f"Where ours is slower: {NOT_MEASURED}."
    return "With fp32 tensors, both passes of ours take longer than those of:\n\n" + "\n".join(out)


def rates(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """The best rate of each pass with many heads, in TFLOP/s and as shares of both roofs."""
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
