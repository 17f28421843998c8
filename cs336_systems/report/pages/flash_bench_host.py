"""The sentences of chapter `flash_bench` about short calls, where the host may take longer than the GPU: Markdown,
computed from its rows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import flash_bench as page
from cs336_systems.report.pages.flash_bench import OURS
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, listed, span

L2_BUFFER_BYTES = 256 * 2**20  # what do_bench zeroes before each call
HOST = 0.5  # where the GPU works for less than this share of a time, the host sets it


def short(chapter: Chapter, roofs: Roofs, **where: Any) -> str:
    """What short sequences cost and why: `where` leaves one machine, dtype, head dimension, number of heads."""
    rows = chapter.measured(**where, repeat=0)
    ours = (
        rows[rows["impl"] == OURS].dropna(subset=["forward_gpu_ms", "backward_gpu_ms"]).sort_values("seq_len")
    )
    if ours.empty:
        return f"What short sequences cost: {NOT_MEASURED}."
    bound = ours[_gpu_ms(ours) < HOST * ours["end_to_end_ms_p50"]]
    if bound.empty:
        return "At no length does the host take more than half of the time of both passes of ours."
    last = bound["seq_len"].max()
    text = (
        f"Up to {figures.short(last)} tokens both passes of ours together take {span(bound['end_to_end_ms_p50'])} ms, "
        f"of which the GPU works for {span(_gpu_ms(bound))} ms (in CUDA graphs): the host sets the time."
    )
    peer = rows[rows["impl"] == "sdpa"].set_index("seq_len").reindex(bound["seq_len"])
    if not _gpu_ms(peer).isna().any():
        table = page.ratios(chapter, "sdpa", "end_to_end", **where)
        text += _beside_sdpa(bound, peer, table[table["seq_len"].isin(bound["seq_len"])])
    return text + (_do_bench(bound, roofs.tb_per_s) if roofs.tb_per_s else "")


def _gpu_ms(rows: pd.DataFrame) -> pd.Series:
    return rows["forward_gpu_ms"] + rows["backward_gpu_ms"]


def _beside_sdpa(bound: pd.DataFrame, peer: pd.DataFrame, table: pd.DataFrame) -> str:
    """SDPA at the lengths where the host sets our time, and whose the difference is; `table`: `page.ratios` of them."""
    share = _gpu_ms(bound).to_numpy() / _gpu_ms(peer).to_numpy()
    text = (
        f" SDPA takes {span(peer['end_to_end_ms_p50'])} ms there, and of the GPU's time ours takes "
        f"{span(share, 2)} of SDPA's."
    )
    host = bound["backward_host_us"].median(), peer["backward_host_us"].median()
    loses = any(page.verdict(r.ratio, r.noise) == "slower" for r in table.itertuples())
    if loses and share.max() < 1 and host[0] > host[1]:
        text += (
            " So what ours loses there is the host's: no faster kernel would change it. A call of the backward "
            f"pass keeps the host for {fmt(host[0])} µs with ours and {fmt(host[1])} µs with SDPA (medians over "
            "these lengths). SDPA's autograd node is written in C++, while ours is a Python `autograd.Function` "
            "that the engine calls back from a thread of its own."
        )
    return text


def _do_bench(bound: pd.DataFrame, tb_per_s: float) -> str:
    """What of the host's time `do_bench` shows at these lengths."""
    clearing = L2_BUFFER_BYTES / (tb_per_s * 1e6)
    text = (
        f"\n\n`do_bench` hides part of the host's time: it zeroes 256 MiB before each call, about "
        f"{fmt(clearing, 2)} µs of the GPU's time at the measured bandwidth, in which the host can already prepare "
        "the launch."
    )
    more = 1e3 * (bound["forward_ms_p50"] - bound["forward_gpu_ms"])
    fits = bound["forward_host_us"] < clearing
    if fits.any():
        text += (
            " Where the host needs less than that for a forward pass, "
            f"`do_bench` reads {span(more[fits], 2)} µs more than the GPU takes in a CUDA graph, with a warm cache"
        )
        if len(late := bound[~fits]):
            lengths = listed([figures.short(n) for n in late["seq_len"]])
            text += f"; where it needed more, at {lengths} tokens, {span(more[~fits], 2)} µs more"
        text += "."
    if bound["backward_host_us"].min() > clearing:
        text += f" A backward pass takes {fmt(bound['backward_host_us'].min())} µs of the host's or more."
    return (
        f"{text} In a model, the launches before play that part, if the host is ahead; a CUDA graph removes the host "
        "altogether."
    )


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
            f"{text} `do_bench` has it the other way round for {'; '.join(reversed_by_host)}. There it times "
            "the host's work, not the kernels."
        )
    return f"{text} `do_bench` agrees on who is faster in each of them."
