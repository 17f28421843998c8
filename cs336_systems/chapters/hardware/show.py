"""What chapter `hardware` shows: the machine's roofs beside its data sheet, as numeric frames and figures."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting, chapters
from cs336_systems.chapters.hardware.roofs import Roofs, roofs
from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.tables import chosen


def roof_table(chapter: Chapter) -> pd.DataFrame:
    """One row for each roof: data sheet, best measured, its share of the data sheet, the size it was reached at, and
    the intensity above which GEMMs in that dtype are compute-bound."""
    out = []
    for machine in chapter.machines or [""]:
        rows, found = chapter.rows(machine=machine), roofs(machine, chapter.root)
        sheet = found.sheet.tflops | {"bytes": found.sheet.tb_per_s} if found.sheet else {}
        for kind, metric, unit in (("matmul", "tflops", "TFLOP/s"), ("copy", "tb_per_s", "TB/s")):
            for dtype, part in rows[rows["kind"] == kind].groupby("dtype", sort=False):
                fine = part.dropna(subset=metric)
                best = fine.loc[fine[metric].astype(float).idxmax()] if len(fine) else None
                measured = math.nan if best is None else float(best[metric])
                promised, square = sheet.get(dtype, math.nan), kind == "matmul"
                out.append([
                    machine, f"GEMM, {figures.label(dtype)}" if square else "copy", unit, promised, measured,
                    100 * measured / promised,
                    math.nan if best is None else best["size"] / (1 if square else 2**20),
                    measured / (found.tb_per_s or math.nan) if square else math.nan,
                ])  # fmt: skip
    heads = ["machine", "roof", "unit", "data sheet", "measured", "of data sheet, %", "at side, or MiB"]
    return pd.DataFrame(out, columns=[*heads, "ridge, FLOP/byte"]).astype({"at side, or MiB": "Int64"})


def launch_table(chapter: Chapter) -> pd.DataFrame:
    """Microseconds per launch of a tiny kernel: one by one, and inside a CUDA graph, by how many follow each other."""
    rows = chapter.rows(kind=["launch", "launch_graph"], repeat=0)
    wide = rows.set_index(["machine", "size", "kind"])["us_per_launch"].unstack("kind").reset_index()
    names = {"launch": "one by one, µs each", "launch_graph": "CUDA graph, µs each"}
    return wide.rename(columns=names | {"size": "launches in a row"}).rename_axis(columns=None)


def links_table(chapter: Chapter) -> pd.DataFrame:
    """The best bus bandwidth of NCCL's all-reduce by number of GPUs, of chapter `allreduce`'s machines, beside the data
    sheet's NVLink in one direction."""
    rows = chapters.read("allreduce", preset="full", root=chapter.root).measured(backend="nccl")
    out = []
    for (machine, size), part in rows.groupby(["machine", "world_size"], sort=False):
        best = part.loc[part["bus_gb_per_s"].astype(float).idxmax()]
        sheet = roofs(machine, chapter.root).sheet
        link = sheet.nvlink_one_way_gb_per_s if sheet else None
        out.append({
            "machine": machine, "GPUs": size, "at MiB": best["num_bytes"] // 2**20, "bus, GB/s": best["bus_gb_per_s"],
            "NVLink, GB/s": link or math.nan, "of NVLink, %": 100 * best["bus_gb_per_s"] / (link or math.nan),
        })  # fmt: skip
    return pd.DataFrame(out)


def roof_figure(rows: pd.DataFrame, roof: Roofs) -> Figure:
    """GEMMs on the left (TFLOP/s by the side of the matrices), copies on the right (TB/s by bytes)."""
    figure, axes = figures.panels(columns=2, height=2.5)
    left, right = axes[0]
    gemms = chosen(rows, kind="matmul", dtype=["bf16", "tf32", "fp32"], repeat=0)
    figures.lines(left, gemms, "size", "tflops", "dtype", log_y=True)
    left.set(title="square GEMM", xlabel="side of the matrices", ylabel="TFLOP/s")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    copies = chosen(rows, kind="copy", repeat=0).assign(dtype="copy")
    figures.lines(right, copies, "size", "tb_per_s", "dtype")
    figures.roof(right, roof.sheet.tb_per_s if roof.sheet and len(copies) else None, "data sheet")
    right.set(title="copy in device memory", xlabel="bytes copied", ylabel="TB/s read and written")
    return figure


def roofline_points(chapter: Chapter) -> pd.DataFrame:
    """bf16 kernels of this book by arithmetic intensity (FLOP/byte) and rate (TFLOP/s), on the chapter's first machine:
    square GEMMs by side; causal attention, forward, one head of dimension 64, by sequence length."""
    machine = next(iter(chapter.machines), "")
    gemms = chapter.on(machine).measured(kind="matmul", dtype="bf16", repeat=0)
    out = [
        {"kernel": "GEMM", "size": r.size, "intensity": r.size / 3, "tflops": float(r.tflops)}
        for r in gemms.itertuples(index=False)
    ]
    flash = chapters.read("flash_bench", preset="full", machine=machine or "auto", root=chapter.root)
    case = {"heads": 1, "head_dim": 64, "dtype": "bf16", "repeat": 0}
    for impl, name in (("flash_triton", "attention, ours"), ("reference", "attention, plain PyTorch")):
        for r in flash.measured(impl=impl, **case).itertuples(index=False):
            flops = accounting.attention_flops(1, r.seq_len, r.seq_len, 64, True, "forward")
            moved = accounting.attention_bytes(1, r.seq_len, r.seq_len, 64, 2, "forward")
            rate = flops / float(r.forward_gpu_ms) / 1e9
            out.append({"kernel": name, "size": r.seq_len, "intensity": flops / moved, "tflops": rate})
    return pd.DataFrame(out, columns=["kernel", "size", "intensity", "tflops"]).dropna()


def roofline_figure(points: pd.DataFrame, roof: Roofs) -> Figure:
    """The roofline of the machine in bf16, and the kernels of `roofline_points` below it."""
    figure, ax = figures.panel(height=2.6)
    peak, memory = roof.tflops.get("bf16"), roof.tb_per_s
    if points.empty or not peak or not memory:
        figures.nothing(ax)
        return figure
    intensity = np.logspace(0, 4.4, 200)
    roofline = np.minimum(peak, memory * intensity)
    ax.plot(intensity, roofline, color=figures.ROOF, lw=1.4, label="roofline, measured")
    for place, (name, part) in enumerate(points.groupby("kernel", sort=False)):
        color, marker = ("#0072B2", "#D55E00", "#6b6b6b")[place], "osD"[place]
        ax.plot(part["intensity"], part["tflops"], marker, color=color, ms=5, label=name, ls=":", lw=0.8)
        ends = part.sort_values("size").iloc[[0, -1]]
        for x, y, size in zip(ends["intensity"], ends["tflops"], ends["size"], strict=True):
            # GEMMs stand above attention, ours above plain attention
            offset = (-4, 6) if name == "GEMM" else (-21, -3) if size == ends["size"].min() else (6, -7)
            ax.annotate(figures.short(size), (x, y), xytext=offset, textcoords="offset points", fontsize=8)
    ax.margins(y=0.12)
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    for axis in (ax.xaxis, ax.yaxis):  # exponents would be too small in print
        figures.plain_ticks(axis)
    ax.legend(loc="lower right")
    return figure
