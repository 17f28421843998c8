"""The sentences of chapter `flash_bench` about short calls, where the host may take longer than the GPU: Markdown,
computed from its rows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import flash_bench as page
from cs336_systems.report.pages.flash_bench import DTYPES, OURS
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import distance, fmt, listed, percent, span

L2_BUFFER_BYTES = 256 * 2**20  # what do_bench zeroes before each call
LATE_US = 10.0  # more than a launch and a cold cache add to the GPU's time
HOST = 0.5  # where the GPU works for less than this share of a time, the host sets it


def short(chapter: Chapter, roofs: Roofs, **where: Any) -> str:
    """What short sequences cost and why: `where` leaves one machine, dtype, head dimension, number of heads."""
    rows = chapter.measured(**where, repeat=0)
    ours = (
        rows[rows["impl"] == OURS].dropna(subset=["forward_gpu_ms", "backward_gpu_ms"]).sort_values("seq_len")
    )
    if ours.empty:
        return f"What short sequences cost: {NOT_MEASURED}."
    bound = ours[gpu_ms(ours) < HOST * ours["end_to_end_ms_p50"]]
    if bound.empty:
        return "At no length does the host take more than half of the time of both passes of ours."
    last = bound["seq_len"].max()
    text = (
        f"Up to {figures.short(last)} tokens both passes of ours together take {span(bound['end_to_end_ms_p50'])} ms, "
        f"of which the GPU works for {span(gpu_ms(bound))} ms (in CUDA graphs): the host sets the time."
    )
    peer = rows[rows["impl"] == "sdpa"].set_index("seq_len").reindex(bound["seq_len"])
    if not gpu_ms(peer).isna().any():
        table = page.ratios(chapter, "sdpa", "end_to_end", **where)
        text += _beside_sdpa(bound, peer, table[table["seq_len"].isin(bound["seq_len"])])
    if not roofs.tb_per_s:
        return text
    every = chapter.measured(impl=OURS, repeat=0, **{k: v for k, v in where.items() if k == "machine"})
    return text + _do_bench(bound, every, roofs.tb_per_s)


def gpu_ms(rows: pd.DataFrame) -> pd.Series:
    """The GPU's time for a forward and a backward pass, in CUDA graphs; missing where one of them has none."""
    return rows["forward_gpu_ms"] + rows["backward_gpu_ms"]


def _beside_sdpa(bound: pd.DataFrame, peer: pd.DataFrame, table: pd.DataFrame) -> str:
    """SDPA at the lengths where the host sets our time, and whose the difference is; `table`: `page.ratios` of them."""
    share = gpu_ms(bound).to_numpy() / gpu_ms(peer).to_numpy()
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


def _do_bench(bound: pd.DataFrame, every: pd.DataFrame, tb_per_s: float) -> str:
    """What of the host's time `do_bench` shows at these lengths, and in `every` row of ours."""
    clearing = L2_BUFFER_BYTES / (tb_per_s * 1e6)
    text = (
        f"\n\n`do_bench` hides part of the host's time: it zeroes 256 MiB before each call, about "
        f"{fmt(clearing, 2)} µs of the GPU's time at the measured bandwidth, in which the host can already prepare "
        "the launch."
    )
    more = 1e3 * (bound["forward_ms_p50"] - bound["forward_gpu_ms"])
    fits = bound["forward_host_us"] < clearing
    hidden = fits & (more < LATE_US)
    if hidden.any():
        text += (
            " Where the host needs less than that for one of these forward passes, "
            f"`do_bench` reads {span(more[hidden], 2)} µs more than the GPU takes in a CUDA graph, with a warm cache"
        )
        for where, those in (
            ("although the host needs less there too", fits & ~hidden),
            ("where the host needed more", ~fits),
        ):
            if those.any():
                lengths = listed([figures.short(n) for n in bound[those]["seq_len"]])
                text += f"; at {lengths} tokens, {where}, {span(more[those], 2)} µs more"
        text += "."
    if fits.any():
        text += _late(every, clearing)
    if bound["backward_host_us"].min() > clearing:
        text += f" A backward pass at these lengths takes {span(bound['backward_host_us'])} µs of the host's."
    return (
        f"{text} In a model, the launches before play that part, if the host is ahead; a CUDA graph removes the host "
        "altogether."
    )


def _late(every: pd.DataFrame, clearing: float) -> str:
    """Where `do_bench` reads more of a forward pass though the host's time, taken by itself, would have been hidden."""
    host, gpu = every["forward_host_us"], 1e3 * every["forward_gpu_ms"]
    fits = every[(host < clearing) & (gpu < host)]
    more = 1e3 * (fits["forward_ms_p50"] - fits["forward_gpu_ms"])
    late = more[more >= LATE_US]
    if late.empty:
        return ""
    row = fits.loc[late.idxmax()]
    return (
        f" In {len(late)} of all {len(fits)} forward passes of ours that need so little of the host, and less of the "
        f"GPU, it reads {span(late, 2)} µs more, the most at n = {figures.short(row['seq_len'])}, "
        f"d = {row['head_dim']}, heads: {row['heads']}, in {figures.label(row['dtype'])}. The host's time is taken at "
        "another moment; that the host was slower while `do_bench` ran is a guess."
    )


def _beside_peer(chapter: Chapter, peer: str, **where: Any) -> pd.DataFrame:
    """`page.ratios` of both passes, with the columns of ours and of the peer (`_peer`) and the GPU's time of both
    (`gpu_ms`; missing where a pass has no CUDA graph)."""
    rows = chapter.measured(**where, repeat=0)
    keys = [*page.SHAPE, "run"]
    rows = rows.assign(gpu_ms=gpu_ms(rows))
    both = page.ratios(chapter, peer, "end_to_end", **where).merge(rows[rows["impl"] == OURS], on=keys)
    return both.merge(rows[rows["impl"] == peer], on=keys, suffixes=("", "_peer"))


def _are(table: pd.DataFrame, word: str) -> pd.Series:
    """Which rows of a table with `ratio` and `noise` have this verdict."""
    said = [page.verdict(*x) == word for x in zip(table["ratio"], table["noise"], strict=True)]
    return pd.Series(said, index=table.index, dtype=bool) & table["ratio"].notna()


def losses(chapter: Chapter, machine: str, heads: int = 1, dtypes: tuple[str, ...] = DTYPES) -> str:
    """Whether the host or the GPU sets our time where `words.losses` has both passes of ours slower; nothing where it
    has none."""
    where = {"machine": machine, "heads": heads, "dtype": list(dtypes)}
    tables = [_beside_peer(chapter, p, **where) for p in page.implementations(chapter, **where) if p != OURS]
    lost = pd.concat([t[_are(t, "slower")] for t in tables]) if tables else pd.DataFrame()
    if lost.empty:
        return ""
    by_host = lost["gpu_ms"] < lost["gpu_ms_peer"]
    host, rest = lost[by_host], lost[~by_host]
    order = {t: i for i, t in enumerate(dtypes)}
    rest = rest.sort_values(["dtype", "head_dim"], key=lambda x: x.replace(order), kind="stable")
    shapes = zip(rest["dtype"], rest["head_dim"], strict=True)
    where_gpu = listed(list(dict.fromkeys(f"{figures.label(t)} at $d = {d}$" for t, d in shapes)))
    if host.empty:
        return f"In all {len(lost)} cases the loss is the GPU's: {where_gpu}."
    text = (
        f"In {len(host)} of these {len(lost)} cases ours needs less of the GPU's time than the other does (in CUDA "
        f"graphs), {span(host['gpu_ms'] / host['gpu_ms_peer'], 2)} of it: the loss is the host's."
    )
    if len(rest):
        text += f" In the other{f' {len(rest)}' if len(rest) > 1 else ''} it is the GPU's: {where_gpu}."
    return text + _least(chapter, **where)


def _least(chapter: Chapter, **where: Any) -> str:
    """The least time that a call of ours and of SDPA keeps the host, by the kernels that served."""
    rows = chapter.measured(**where, repeat=0).dropna(
        subset=["forward_host_us", "backward_host_us", "backend"]
    )
    ours = rows[rows["impl"] == OURS].groupby("backend", sort=False)
    kinds = [(f"`{name}`", part) for name, part in ours]
    sdpa = rows[rows["impl"] == "sdpa"]
    kinds += [(figures.label("sdpa"), sdpa)] if len(sdpa) else []
    said = [
        f"{fmt(part['forward_host_us'].min(), 2)} and {fmt(part['backward_host_us'].min(), 2)} µs with {name}"
        for name, part in kinds
    ]
    text = f" The least that a forward and a backward call keep the host is about {listed(said)}."
    if {"split kernels", "portable kernels"} <= set(ours.groups):
        text += " Those for fp32 in pieces launch one kernel more than the portable ones in either."
    return text


def by_gpu(chapter: Chapter, machine: str, heads: int = 1) -> str:
    """Where ours needs more of the GPU's time than a peer, whatever the host takes, as a Markdown list."""
    where = {"machine": machine, "heads": heads}
    again = chapter.measured(**where)
    again = again.assign(gpu_ms=gpu_ms(again))
    first, second = again[again["repeat"] == 0], again[again["repeat"] == 1]
    pairs = first.merge(second, on=[*page.SHAPE, "impl", "run"], suffixes=("", "_again"))
    pairs["noise"] = distance((pairs["gpu_ms_again"] / pairs["gpu_ms"]).astype(float))
    typical = pairs["noise"].median()
    if pd.isna(typical):
        return f"The GPU's time alone: {NOT_MEASURED}."
    of_run = pairs.set_index("run")["noise"].clip(lower=typical)
    tables = []
    for peer in (p for p in page.implementations(chapter, **where) if p != OURS):
        table = _beside_peer(chapter, peer, **where)
        noise = of_run.reindex(table["run"]).fillna(typical).to_numpy()
        alone = table.assign(ratio=table["gpu_ms_peer"] / table["gpu_ms"], noise=noise)
        lost, waits = _are(alone, "slower"), table["gpu_ms_peer"] < HOST * table["end_to_end_ms_p50_peer"]
        tables.append(alone.assign(lost=lost, hidden=lost & waits & _are(table, "faster")))
    found = pd.concat(tables).dropna(subset="ratio") if tables else pd.DataFrame(columns=["lost", "hidden"])
    if not found["lost"].any():
        return "By the GPU's time alone (in CUDA graphs) ours is slower nowhere beyond the noise."
    out = []
    for dtype in dict.fromkeys(chapter.rows(**where)["dtype"]):
        for d, shapes in found[found["dtype"] == dtype].groupby("head_dim"):
            words = [
                f"{figures.label(peer)} at {page.slower_at(part)} (at most {fmt(1 / part['ratio'].min())} ×)"
                for peer, part in shapes.groupby("impl_peer", sort=False)
                if part["lost"].any()
            ]
            if words:
                out.append(f"- {figures.label(dtype)}, $d = {d}$: {'; '.join(words)}")
    text = (
        "By the GPU's time alone (forward and backward in CUDA graphs, whose pairs differ by a median of "
        f"{percent(typical)}) ours takes longer, beyond the noise, than:\n\n" + "\n".join(out)
    )
    if hidden := found["hidden"].sum():
        text += (
            f"\n\nIn {hidden} of these {found['lost'].sum()} cases `do_bench` has ours ahead all the same: it times "
            "the other's host. In CUDA graphs, or where the host is ahead, those are losses."
        )
    return text


def without_host(chapter: Chapter, **where: Any) -> str:
    """Ours against each fused kernel of PyTorch by the GPU's time alone, and where `do_bench` tells something else."""
    rows = chapter.measured(**where, repeat=0)
    found = [against for peer in ("sdpa_flash", "sdpa_cudnn") if (against := _without_host(rows, peer))]
    if not found:
        return f"GPU time without the host: {NOT_MEASURED}."
    return f"{' '.join(found)}{_longer_graphs(rows)}"


def _without_host(rows: pd.DataFrame, peer: str) -> str:
    """The same against one peer; empty where the two share no row."""
    ours, other = rows[rows["impl"] == OURS], rows[rows["impl"] == peer]
    both = ours.merge(other, on=[*page.SHAPE, "run"], suffixes=("", "_peer")).sort_values("seq_len")
    found = []
    reversed_by_host = []
    for part in ("forward", "backward"):
        gpu = (both[f"{part}_gpu_ms"] / both[f"{part}_gpu_ms_peer"]).dropna()
        if gpu.empty:
            return ""
        found.append(f"{part} {gpu.min():.2f} to {gpu.max():.2f} ({len(gpu)} shapes)")
        seen = both[f"{part}_ms_p50"] / both[f"{part}_ms_p50_peer"]
        for i in gpu.index[(gpu < 1) & (seen[gpu.index] > 1)]:
            row = both.loc[i]
            overlap = row[f"{part}_ms_p20"] <= row[f"{part}_ms_p80_peer"]
            reversed_by_host.append(
                f"{part} at {row['seq_len']} tokens, $d = {row['head_dim']}$: the GPU needs "
                f"{1e3 * row[f'{part}_gpu_ms']:.0f} µs for ours and {1e3 * row[f'{part}_gpu_ms_peer']:.0f} µs for "
                f"the peer, the host {row[f'{part}_host_us']:.0f} and {row[f'{part}_host_us_peer']:.0f} µs, "
                f"and `do_bench` reads {1e3 * row[f'{part}_ms_p50']:.0f} and "
                f"{1e3 * row[f'{part}_ms_p50_peer']:.0f} µs{', within their spread' if overlap else ''}"
            )
    text = f"Over {figures.label(peer)}'s, our GPU time is: {'; '.join(found)}."
    if reversed_by_host:
        return (
            f"{text} The medians of `do_bench` have it the other way round for {'; '.join(reversed_by_host)}. There "
            "it times the host's work, not the kernels."
        )
    return f"{text} Where ours needs less of it, `do_bench` has ours ahead, too."


def _longer_graphs(rows: pd.DataFrame) -> str:
    """Where a call takes longer in a CUDA graph than `do_bench` reads, beyond the latter's 80th percentile."""
    more = []
    for part in ("forward", "backward"):
        over = rows[rows[f"{part}_gpu_ms"] > rows[f"{part}_ms_p80"]]
        more += list(over[f"{part}_gpu_ms"] / over[f"{part}_ms_p50"] - 1)
    if not more:
        return ""
    where = "one pass" if len(more) == 1 else f"{len(more)} passes"
    return (
        f" In {where} of all implementations the time in a CUDA graph is the longer, by up to {percent(max(more))}: "
        "there calls follow one another without a pause. That clocks are lower then is a guess."
    )
