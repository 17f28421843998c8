"""What chapter `flash_bench` shows: tables, figures and verdicts from its rows. No torch, nothing measured
here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import EMPTY, fmt

PARTS = {"forward": "forward", "backward": "backward", "end_to_end": "forward + backward"}
OURS = "flash_triton"
_HEADS = {"forward": "F", "backward": "B", "end_to_end": "F+B"}
_SHORT = {
    "flash_triton": "ours",
    "flash_torch": "tiled",
    "reference": "plain",
    "reference_compiled": "compiled",
    "sdpa": "SDPA",
    "sdpa_flash": "flash",
    "sdpa_cudnn": "cuDNN",
    "sdpa_efficient": "eff.",
    "flex_compiled": "Flex",
}
_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
SHAPE = ["machine", "dtype", "heads", "head_dim", "seq_len"]


def implementations(chapter: Chapter, **where: Any) -> list[str]:
    """The implementations among the chosen cases, in the grid's order."""
    return list(dict.fromkeys(chapter.rows(**where)["impl"]))


def values(chapter: Chapter, field: str, **where: Any) -> list[Any]:
    """The sorted values of a field among the chosen cases."""
    return sorted(chapter.rows(**where)[field].unique())


def _word(status: str) -> str:
    return {"oom": "OOM", NOT_MEASURED: EMPTY}.get(status, status.split(":")[0])


# ------------------------------------------------------------------------------------------------ tables
def time_table(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """Median ms of one dtype, head dimension and number of heads: a row for each sequence length, a column
    for each pass (F, B, F+B) and implementation.
    """
    rows = chapter.rows(**where, repeat=0)
    impls = implementations(chapter, **where)
    out = []
    for seq_len, part in rows.groupby("seq_len"):
        line: dict[str, Any] = {"n": int(seq_len)}
        by_impl = part.set_index("impl")
        for key, head in _HEADS.items():
            for impl in impls:
                row = by_impl.loc[impl] if impl in by_impl.index else None
                ok = row is not None and row["status"] == "ok"
                text = (
                    fmt(row[f"{key}_ms_p50"])
                    if ok
                    else _word(row["status"] if row is not None else NOT_MEASURED)
                )
                line[f"{head} {_SHORT.get(impl, impl)}"] = text
        out.append(line)
    return pd.DataFrame(out)


def out_of_memory(chapter: Chapter) -> pd.DataFrame:
    """For each implementation and dtype the shortest sequence that ran out of memory, and the memory of the
    longest that did not.
    """
    out = []
    for (machine, impl, dtype, heads), rows in chapter.rows(repeat=0).groupby(
        ["machine", "impl", "dtype", "heads"], sort=False
    ):
        failed = rows[rows["status"] == "oom"]
        if failed.empty:
            continue
        first = failed.sort_values(["seq_len", "head_dim"]).iloc[0]
        fine = rows[(rows["status"] == "ok") & (rows["head_dim"] == first["head_dim"])].sort_values("seq_len")
        last = fine.iloc[-1] if len(fine) else None
        out.append({
            "machine": machine, "implementation": figures.label(impl), "dtype": dtype, "heads": heads,
            "out of memory from n": int(first["seq_len"]), "at d": int(first["head_dim"]),
            "longest that ran": EMPTY if last is None else int(last["seq_len"]),
            "its peak, GiB": EMPTY if last is None else fmt(last["peak_gib"]),
        })  # fmt: skip
    return pd.DataFrame(out)


def errors(chapter: Chapter, heads: int) -> pd.DataFrame:
    """The largest error against fp64 over the sequence lengths, by dtype, head dimension and
    implementation.
    """
    rows = chapter.measured(repeat=0, heads=heads)
    if rows.empty or rows["error_out"].isna().all():
        return pd.DataFrame()
    keys = ["machine", "dtype", "head_dim"]
    worst = rows.groupby([*keys, "impl"], sort=False)[["error_out", "error_grads"]].max().unstack("impl")
    impls = [i for i in implementations(chapter, heads=heads) if i in worst["error_out"]]
    out = worst.index.to_frame(index=False).rename(columns={"head_dim": "d"})
    for metric, head in (("error_out", "O"), ("error_grads", "grads")):
        for impl in impls:
            out[f"{head} {_SHORT.get(impl, impl)}"] = [fmt(v, 2) for v in worst[metric][impl]]
    return out.sort_values(["machine", "dtype", "d"]).reset_index(drop=True)


def floors(chapter: Chapter, roofs: Roofs, part: str, **where: Any) -> pd.DataFrame:
    """FLOPs, bytes and exponentials of one pass with the least times they imply at the machine's roofs,
    beside ours.

    `where` must leave one machine, dtype, number of heads and head dimension.
    """
    out = []
    for _, row in chapter.rows(**where, impl=OURS, repeat=0).iterrows():
        n, d, heads, dtype = int(row["seq_len"]), int(row["head_dim"]), int(row["heads"]), row["dtype"]
        flops = accounting.attention_flops(heads, n, n, d, True, part)
        moved = accounting.attention_bytes(heads, n, n, d, _BYTES[dtype], part)
        compute = flops / (roofs.tflops[dtype] * 1e9) if dtype in roofs.tflops else math.nan
        memory = moved / (roofs.tb_per_s * 1e9) if roofs.tb_per_s else math.nan
        exps = math.nan
        if roofs.sms and pd.notna(row["sm_mhz"]):
            exps = accounting.exps_ms(
                accounting.attention_exps(heads, n, n, True, part), roofs.sms, row["sm_mhz"]
            )
        ok = row["status"] == "ok"
        measured = row[f"{part}_ms_p50"] if ok else math.nan
        floor = np.nanmax([compute, memory]) if not (math.isnan(compute) and math.isnan(memory)) else math.nan
        out.append({
            "machine": row["machine"], "n": n, "GFLOP": flops / 1e9, "MB": moved / 1e6,
            "FLOP/byte": flops / moved,
            "products, µs": 1e3 * compute, "bytes, µs": 1e3 * memory, "exps, µs": 1e3 * exps,
            "ours, µs": fmt(1e3 * measured) if ok else _word(row["status"]),
            "of floor": EMPTY if math.isnan(measured + floor) else f"{fmt(100 * floor / measured, 2)} %",
        })  # fmt: skip
    return pd.DataFrame(out)


# ------------------------------------------------------------------------------------------------ comparisons
def spread(chapter: Chapter) -> pd.DataFrame:
    """How far the same case measured twice in one run lies apart: one row for each run, with a relative
    difference for each pass (0.01 is one percent).
    """
    rows = chapter.measured()
    first, second = rows[rows["repeat"] == 0], rows[rows["repeat"] == 1]
    both = first.merge(second, on=[*SHAPE, "impl", "run"], suffixes=("", "_again"))
    for part in PARTS:
        both[part] = (both[f"{part}_ms_p50_again"] / both[f"{part}_ms_p50"] - 1).abs()
    return both[[*SHAPE, "run", *PARTS]]


def ratios(chapter: Chapter, peer: str, part: str, **where: Any) -> pd.DataFrame:
    """Time of a peer over ours, for shapes where both ran in the same run: SHAPE columns, `ratio`, and
    `noise`.

    `noise` is the A/A difference below which nothing is claimed: that of the run itself, or the median of
    all runs where it happens to be larger.
    """
    metric = f"{part}_ms_p50"
    rows = chapter.measured(**where, repeat=0)
    ours, other = rows[rows["impl"] == OURS], rows[rows["impl"] == peer]
    both = ours.merge(other, on=[*SHAPE, "run"], suffixes=("", "_peer"))
    both["ratio"] = both[f"{metric}_peer"] / both[metric]
    again = spread(chapter)
    both = both.merge(again[["run", part]], on="run", how="left")
    typical = again[part].median() if len(again) else math.nan
    both["noise"] = np.fmax(both[part], typical)
    return both[[*SHAPE, "ratio", "noise"]]


def verdicts(chapter: Chapter, part: str = "end_to_end") -> pd.DataFrame:
    """For each peer and dtype: in how many shapes ours is faster, even (within the A/A spread) or slower,
    and how much.
    """
    out = []
    for heads in values(chapter, "heads"):
        for peer in implementations(chapter, heads=heads):
            if peer == OURS:
                continue
            for dtype in dict.fromkeys(chapter.rows(heads=heads, impl=peer)["dtype"]):
                table = ratios(chapter, peer, part, heads=heads, dtype=dtype)
                if table.empty:
                    continue
                faster = table["ratio"] > 1 + table["noise"].fillna(0)
                slower = 1 / table["ratio"] > 1 + table["noise"].fillna(0)
                low, high = table.loc[table["ratio"].idxmin()], table.loc[table["ratio"].idxmax()]
                ends = [
                    f"{fmt(r['ratio'])} × ({figures.short(r['seq_len'])}, {r['head_dim']})"
                    for r in (low, high)
                ]
                out.append({
                    "peer": figures.label(peer), "heads": heads, "dtype": dtype, "shapes": len(table),
                    "faster": int(faster.sum()), "even": int((~faster & ~slower).sum()),
                    "slower": int(slower.sum()),
                    "median": f"{fmt(table['ratio'].median())} ×", "least": ends[0], "most": ends[1],
                })  # fmt: skip
    return pd.DataFrame(out)


def verdict_sentences(chapter: Chapter, part: str = "end_to_end") -> str:
    """The longest bf16 shape that both ran, against each peer, as a Markdown list."""
    out = []
    for heads in values(chapter, "heads"):
        for peer in implementations(chapter, heads=heads):
            table = ratios(chapter, peer, part, heads=heads, dtype="bf16") if peer != OURS else pd.DataFrame()
            if table.empty:
                continue
            row = table.sort_values(["seq_len", "head_dim"]).iloc[-1]
            noise = 0.0 if pd.isna(row["noise"]) else row["noise"]
            if row["ratio"] > 1 + noise:
                words = f"is {fmt(row['ratio'])} times as fast as"
            elif 1 / row["ratio"] > 1 + noise:
                words = f"takes {fmt(1 / row['ratio'])} times as long as"
            else:
                words = "is even with"
            out.append(
                f"- {figures.short(row['seq_len'])} tokens, heads: {heads}, $d = {row['head_dim']}$, bf16: "
                f"ours {words} {figures.label(peer)}."
            )
    return "\n".join(out) or f"The longest shapes: {NOT_MEASURED}."


def spread_sentence(chapter: Chapter) -> str:
    """What the A/A rows say, as Markdown."""
    again = spread(chapter)
    if again.empty:
        return f"The repetition of the same case (A/A): {NOT_MEASURED}."
    words = [
        f"{PARTS[p]} {fmt(100 * again[p].median(), 2)} % (largest {fmt(100 * again[p].max(), 2)} %)"
        for p in PARTS
    ]
    return (
        "The same function on the same tensors, measured twice in one run, differs by a median of "
        f"{', '.join(words)} over {len(again)} runs. A difference smaller than that of its own run, or than "
        "this median, is called *even*."
    )


def backends_sentence(chapter: Chapter) -> str:
    """Which of its kernels PyTorch's attention really ran, as Markdown."""
    rows = chapter.measured(repeat=0)
    rows = rows[rows["impl"].str.startswith("sdpa") & rows["backend"].notna()]
    if rows.empty:
        return f"Which backend PyTorch's attention chose: {NOT_MEASURED}."
    found = rows.groupby(["impl", "dtype"], sort=False)["backend"].agg(lambda b: ", ".join(sorted(set(b))))
    words = [f"{figures.label(impl)} in {dtype}: {backend}" for (impl, dtype), backend in found.items()]
    return "The kernels that PyTorch's attention ran: " + "; ".join(words) + "."


def published_sentence(chapter: Chapter) -> str:
    """What others have published for the shape of the headline (`results/published.csv`), as Markdown."""
    path = chapter.root / "published.csv"
    if not path.is_file():
        return ""
    rows = pd.read_csv(path).query("chapter == @chapter.name")
    words = [f"{r.what}, {r.hardware}: {r.value:g} ms ([source]({r.source}))" for r in rows.itertuples()]
    setting = f" ({rows.iloc[0]['setting']})" if len(rows) else ""
    return f"Published by others, not measured here{setting}: " + "; ".join(words) + "." if words else ""


# ------------------------------------------------------------------------------------------------ figures
def speed_figure(chapter: Chapter, roofs: Roofs, what: str, **where: Any) -> Figure:
    """Three panels over the sequence length: `what` is `"ms"` (with the 20 % to 80 % band) or `"tflops"`
    (with the roof).

    A ValueError for any other `what`.
    """
    if what not in ("ms", "tflops"):
        raise ValueError(f"unknown quantity {what!r}; allowed: ms, tflops")
    rows = chapter.measured(**where, repeat=0)
    dtype = where.get("dtype", "bf16")
    figure, axes = figures.panels(columns=3, height=3.0)
    for ax, (part, title) in zip(axes[0], PARTS.items(), strict=True):
        if what == "ms":
            figures.lines(
                ax, rows, "seq_len", f"{part}_ms_p50", "impl", f"{part}_ms_p20", f"{part}_ms_p80", log_y=True
            )
        else:
            figures.lines(ax, rows, "seq_len", f"{part}_tflops", "impl")
            if len(rows):
                figures.roof(ax, roofs.tflops.get(dtype), f"measured {dtype} product")
        ax.set_title(title)
        ax.set_xlabel("sequence length")
    axes[0, 0].set_ylabel("ms" if what == "ms" else "TFLOP/s")
    _legend_below(figure, axes[0, 0])
    return figure


def ratio_figure(chapter: Chapter, peers: list[str], part: str = "end_to_end", **where: Any) -> Figure:
    """One map for each peer: its time over ours, sequence length across, head dimension down."""
    figure, axes = figures.panels(rows=max(1, len(peers)), height=1.6)
    rows = chapter.rows(**where, repeat=0)
    for ax, peer in zip(axes[:, 0], peers, strict=False):
        table = ratios(chapter, peer, part, **where)
        grid = rows[rows["impl"] == peer]
        ax.set_title(f"time of {figures.label(peer)} over ours")
        if grid.empty:
            figures.nothing(ax)
            continue
        words = grid.assign(word=grid["status"].map(_word)).pivot_table(
            index="head_dim", columns="seq_len", values="word", aggfunc="first"
        )
        words = words.replace("ok", EMPTY)
        shown = table.pivot_table(index="head_dim", columns="seq_len", values="ratio", aggfunc="first")
        figures.heat(ax, shown.reindex(index=words.index, columns=words.columns), words=words)
        ax.set_ylabel("d")
    axes[-1, 0].set_xlabel("sequence length")
    return figure


def memory_figure(chapter: Chapter, **where: Any) -> Figure:
    """Peak memory of one forward and backward pass over the sequence length."""
    figure, axes = figures.panels(height=3.0)
    ax = axes[0, 0]
    figures.lines(ax, chapter.measured(**where, repeat=0), "seq_len", "peak_gib", "impl", log_y=True)
    ax.set_xlabel("sequence length")
    ax.set_ylabel("peak, GiB")
    _legend_below(figure, ax)
    return figure


def _legend_below(figure: Figure, ax: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
