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
from cs336_systems.report import figures, headline
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import EMPTY, distance, fmt

PARTS = {"forward": "forward", "backward": "backward", "end_to_end": "forward + backward"}
OURS = "flash_triton"
STEADY = 0.1  # a run is quoted for an extreme only if its pair lies closer together than this
_SHORT = {
    "flash_triton": "ours",
    "flash_torch": "tiled",
    "reference": "plain",
    "reference_compiled": "comp.",
    "sdpa": "SDPA",
    "sdpa_flash": "flash",
    "sdpa_cudnn": "cuDNN",
    "sdpa_efficient": "eff.",
    "flex_compiled": "Flex",
}
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
DTYPES = ("bf16", "fp32", "tf32")
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
def ms_text(value: float) -> str:
    """Milliseconds with three digits, at most four of them decimals: CUDA events do not resolve more."""
    return fmt(value) if value >= 0.1 else f"{value:.4f}"


def time_table(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """Median ms of one dtype, head dimension and number of heads: a row for each sequence length, and for
    each implementation three columns: forward (F), backward (B), both (F+B).
    """
    rows = chapter.rows(**where, repeat=0)
    impls = implementations(chapter, **where)
    heads = ["n"]
    for impl in impls:
        heads += [f"{_SHORT.get(impl, impl)} F", "B", "F+B"]
    out = []
    for seq_len, part in rows.groupby("seq_len"):
        by_impl = part.set_index("impl")
        line: list[Any] = [int(seq_len)]
        for impl in impls:
            row = by_impl.loc[impl] if impl in by_impl.index else None
            if row is not None and row["status"] == "ok":
                line += [ms_text(row[f"{key}_ms_p50"]) for key in PARTS]
            else:
                line += [_word(NOT_MEASURED if row is None else row["status"])] * len(PARTS)
        out.append(line)
    return pd.DataFrame(out, columns=heads)


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
            "machine": machine, "implementation": figures.label(impl), "dtype": figures.label(dtype), "heads": heads,
            "OOM from n": int(first["seq_len"]), "at d": int(first["head_dim"]),
            "longest that fits": EMPTY if last is None else int(last["seq_len"]),
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
    out["dtype"] = [figures.label(t) for t in out["dtype"]]
    for metric, head in (("error_out", "O"), ("error_grads", "g")):
        for impl in impls:
            out[f"{head} {_SHORT.get(impl, impl)}"] = [fmt(v, 2) for v in worst[metric][impl]]
    return out.sort_values(["machine", "dtype", "d"]).reset_index(drop=True)


def floors(chapter: Chapter, roofs: Roofs, part: str, **where: Any) -> pd.DataFrame:
    """FLOPs, bytes and exponentials of one pass with the least times they imply, beside ours.

    Products are held against the machine's best product and against its data sheet, bytes against its best
    copy. `where` must leave one machine, dtype and number of heads. Columns end with the share of the floor
    that ours reaches: with what was measured of the machine, and with its data sheet.
    """
    out = []
    chosen = chapter.rows(**where, impl=OURS, repeat=0).sort_values(["head_dim", "seq_len"])
    for _, row in chosen.iterrows():
        n, d, heads, dtype = int(row["seq_len"]), int(row["head_dim"]), int(row["heads"]), row["dtype"]
        flops = accounting.attention_flops(heads, n, n, d, True, part)
        moved = accounting.attention_bytes(heads, n, n, d, BYTES[dtype], part)
        compute = flops / (roofs.tflops[dtype] * 1e9) if dtype in roofs.tflops else math.nan
        memory = moved / (roofs.tb_per_s * 1e9) if roofs.tb_per_s else math.nan
        promised = roofs.sheet.tflops.get(dtype) if roofs.sheet else None
        sheet = flops / (promised * 1e9) if promised else math.nan
        best = roofs.sheet.roofline_ms(flops, moved, dtype) if roofs.sheet else None
        exps = math.nan
        if roofs.sms and pd.notna(row["sm_mhz"]):
            pairs = accounting.attention_exps(heads, n, n, True, part)
            exps = accounting.exps_ms(pairs, roofs.sms, row["sm_mhz"])
        ok = row["status"] == "ok"
        measured = row[f"{part}_ms_p50"] if ok else math.nan
        floor = math.nan if math.isnan(compute) and math.isnan(memory) else np.nanmax([compute, memory])
        out.append({
            "d": d, "n": n, "GFLOP": flops / 1e9, "MB": moved / 1e6, "FLOP/B": flops / moved,
            "products, µs": 1e3 * compute, "sheet, µs": 1e3 * sheet, "bytes, µs": 1e3 * memory,
            "exps, µs": 1e3 * exps,
            "ours, µs": fmt(1e3 * measured) if ok else _word(row["status"]),
            "of floor": _share(floor, measured), "of sheet": _share(best, measured),
        })  # fmt: skip
    return pd.DataFrame(out)


def _share(floor: float | None, measured: float) -> str:
    return EMPTY if floor is None or math.isnan(floor + measured) else f"{fmt(100 * floor / measured, 2)} %"


def leaderboard(chapter: Chapter, roofs: Roofs, machine: str) -> pd.DataFrame:
    """The work of the course's leaderboard: what was measured, then what others have published for it.

    Shares are those of both passes together, of the best product measured and of the data sheet.
    """
    rows = chapter.rows(**{k: v for k, v in headline.CASE.items()}, machine=machine)
    dtype = headline.CASE["dtype"]
    roof, sheet = roofs.tflops.get(dtype), roofs.sheet.tflops.get(dtype) if roofs.sheet else None
    out = []
    for _, row in rows.iterrows():
        ok = row["status"] == "ok"
        rate = row["end_to_end_tflops"] if ok else math.nan
        same = {**headline.CASE, "machine": machine}
        ratio = chapter.ratio("end_to_end_ms_p50", {**same, "impl": row["impl"]}, {**same, "impl": OURS})
        out.append({
            "implementation": figures.label(row["impl"]),
            **{f"{word}, ms": fmt(row[f"{part}_ms_p50"]) if ok else EMPTY
               for part, word in (("forward", "forward"), ("backward", "backward"), ("end_to_end", "both"))},
            "TFLOP/s": fmt(rate),
            "of roof": EMPTY if not roof or not ok else f"{fmt(100 * rate / roof, 2)} %",
            "of sheet": EMPTY if not sheet or not ok else f"{fmt(100 * rate / sheet, 2)} %",
            "over ours": EMPTY if ratio is None else f"{fmt(ratio)} ×",
            "source": "measured here" if ok else _word(row["status"]) if row["status"] == "oom" else row["status"],
        })  # fmt: skip
    shape = {k: v for k, v in headline.CASE.items() if k != "dtype"} | {"part": "end_to_end"}
    flops = accounting.attention_flops(
        shape["heads"], shape["seq_len"], shape["seq_len"], shape["head_dim"], True, shape["part"]
    )
    for one in published(chapter):
        out.append({
            "implementation": one["what"].split(" of the ")[0], "forward, ms": EMPTY, "backward, ms": EMPTY,
            "both, ms": fmt(float(one["value"])), "TFLOP/s": fmt(flops / float(one["value"]) / 1e9),
            "of roof": EMPTY, "of sheet": EMPTY, "over ours": EMPTY, "source": f"[published]({one['source']})",
        })  # fmt: skip
    return pd.DataFrame(out)


def published(chapter: Chapter) -> list[dict[str, Any]]:
    """What others have published for the chapter (`results/published.csv`)."""
    path = chapter.root / "published.csv"
    return pd.read_csv(path).query("chapter == @chapter.name").to_dict("records") if path.is_file() else []


# ------------------------------------------------------------------------------------------------ comparisons
def spread(chapter: Chapter) -> pd.DataFrame:
    """How far the same case measured twice in one run lies apart: one row for each run, with a relative
    difference for each pass (0.01 is one percent).
    """
    rows = chapter.measured()
    first, second = rows[rows["repeat"] == 0], rows[rows["repeat"] == 1]
    both = first.merge(second, on=[*SHAPE, "impl", "run"], suffixes=("", "_again"))
    for part in PARTS:
        both[part] = distance((both[f"{part}_ms_p50_again"] / both[f"{part}_ms_p50"]).astype(float))
    return both[[*SHAPE, "run", *PARTS]]


def ratios(chapter: Chapter, peer: str, part: str, **where: Any) -> pd.DataFrame:
    """Time of a peer over ours, for shapes where both ran in the same run: SHAPE columns, `run`, `ratio`,
    and `noise`.

    `noise` is the difference up to which nothing is claimed: the A/A difference of the run itself, or the
    median of all runs where it happens to be larger; infinite where the bands of the two, from the 20th to
    the 80th percentile, overlap.
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
    ends = {name: (f"{part}_ms_p20{name}", f"{part}_ms_p80{name}") for name in ("", "_peer")}
    apart = (both[ends[""][1]] < both[ends["_peer"][0]]) | (both[ends["_peer"][1]] < both[ends[""][0]])
    both["noise"] = both["noise"].where(apart, math.inf)
    return both[[*SHAPE, "run", "ratio", "noise"]]


def steady(chapter: Chapter, table: pd.DataFrame) -> pd.Series:
    """Which rows of a table with `run` are of runs whose pair of both passes lies closer together than STEADY."""
    again = spread(chapter).set_index("run")["end_to_end"]
    return pd.Series(again.reindex(table["run"]).to_numpy() <= STEADY, index=table.index, dtype=bool)


def gpu_and_host(chapter: Chapter, longest: int, **where: Any) -> pd.DataFrame:
    """Of short calls, up to `longest` tokens: the GPU's time (by a CUDA graph), `do_bench`'s, and the host's."""
    rows = chapter.measured(**where, repeat=0)
    rows = rows[rows["seq_len"] <= longest].sort_values(["head_dim", "seq_len"], kind="stable")
    out = []
    for row in rows.to_dict("records"):
        line: dict[str, Any] = {
            "d": row["head_dim"],
            "n": row["seq_len"],
            "kernel": figures.label(row["impl"]),
        }
        for part, letter in (("forward", "F"), ("backward", "B")):
            line[f"{letter}: GPU µs"] = _microseconds(1e3 * row[f"{part}_gpu_ms"])
            line[f"{letter}: `do_bench` µs"] = _microseconds(1e3 * row[f"{part}_ms_p50"])
            line[f"{letter}: host µs"] = _microseconds(row[f"{part}_host_us"])
        out.append(line)
    return pd.DataFrame(out)


def _microseconds(value: float) -> str:
    return EMPTY if math.isnan(value) else f"{value:.0f}"


def verdict(ratio: float, noise: float) -> str:
    """`faster`, `even` or `slower`: a peer's time over ours, where less than `noise` apart says nothing."""
    if distance(ratio) <= (0.0 if math.isnan(noise) else noise):
        return "even"
    return "faster" if ratio > 1 else "slower"


def slower_at(table: pd.DataFrame) -> str:
    """`512–2k, 8k`: the lengths at which ours is slower, of a table with `seq_len`, `ratio` and `noise`."""
    return ", ".join(lengths for word, lengths in stretches(table) if word == "slower")


def courses(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """Against each peer and head dimension, for each pass: at what lengths ours is slower, even, faster."""
    out = []
    for peer in implementations(chapter, **where):
        for d in values(chapter, "head_dim", **where, impl=peer) if peer != OURS else ():
            line = {"peer": figures.label(peer), "d": d}
            for part, name in PARTS.items():
                found = stretches(ratios(chapter, peer, part, **where, head_dim=d))
                if found:
                    line[name] = ", ".join(f"{word} at {lengths}" for word, lengths in found)
            if len(line) > 2:
                out.append(line)
    return pd.DataFrame(out)


def stretches(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Verdicts by length, neighbours put together: `[("slower", "1k"), ("even", "2k–4k")]`. Lengths more than a
    doubling apart are no neighbours.
    """
    found: list[tuple[str, list[int]]] = []
    for row in table.sort_values("seq_len").itertuples():
        word = verdict(row.ratio, row.noise)
        if not found or found[-1][0] != word or row.seq_len > 2 * found[-1][1][-1]:
            found.append((word, []))
        found[-1][1].append(row.seq_len)
    short = figures.short
    return [(w, short(ns[0]) + (f"–{short(ns[-1])}" if len(ns) > 1 else "")) for w, ns in found]


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
    figures.legend_below(figure, axes[0, 0])
    return figure


def ratio_figure(chapter: Chapter, peers: list[str], part: str = "end_to_end", **where: Any) -> Figure:
    """One map for each peer: its time over ours, sequence length across, head dimension down.

    Cells whose verdict is `even` keep their number and lose their colour.
    """
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
        even = np.array([verdict(row.ratio, row.noise) == "even" for row in table.itertuples()], dtype=bool)
        for row in table[even].itertuples():
            words.loc[row.head_dim, row.seq_len] = fmt(row.ratio, 2)
        table = table[~even]
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
    figures.legend_below(figure, ax)
    return figure
