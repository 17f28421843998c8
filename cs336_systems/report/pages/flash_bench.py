"""What chapter `flash_bench` shows: numeric frames and figures from its rows."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cs336_systems import accounting
from cs336_systems.experiments.flash_bench import PARTS
from cs336_systems.report import figures, tables
from cs336_systems.report.roofs import Roofs

OURS = "flash_triton"
PASSES = dict(zip(PARTS, ("F", "B", "F+B"), strict=True))
SHORT = {"flash_triton": "ours", "flash_torch": "tiled", "reference": "plain", "reference_compiled": "compiled",
         "sdpa": "SDPA", "sdpa_flash": "SDPA flash", "sdpa_cudnn": "cuDNN", "flex_compiled": "Flex"}  # fmt: skip
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
SHAPE = ["machine", "heads", "dtype", "head_dim", "seq_len"]
KERNEL_TOKENS = 8192  # up to here every call is short enough for a CUDA graph, and speedups are of kernel times
_QUERY, _KEY, _LEFT_OUT = "#0072B2", "#D55E00", "#ffffff"


def first_machine(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first machine, each case once: what a figure shows."""
    rows = rows[rows["repeat"] == 0]
    return rows[rows["machine"] == rows["machine"].iloc[0]] if len(rows) else rows


def kernel_ms(rows: pd.DataFrame) -> pd.Series:
    """Kernel time of forward and backward together; NaN where a pass is too long for a CUDA graph."""
    return (rows["forward_gpu_ms"] + rows["backward_gpu_ms"]).astype(float)


# ------------------------------------------------------------------------------------------------ tables
def times(rows: pd.DataFrame, impls: tuple[str, ...] = (), index: tuple[str, ...] = tuple(SHAPE)) -> pd.DataFrame:
    """The handout's table: median wall time in ms, a line for each shape, a column for each pass and implementation
    (all that the rows have, if none are named)."""
    rows = rows[(rows["repeat"] == 0) & rows["impl"].isin(impls or list(rows["impl"]))]
    long = pd.concat([
        rows.assign(ms=rows[f"{part}_ms_p50"], column=[f"{short} {SHORT.get(i, i)}" for i in rows["impl"]])
        for part, short in PASSES.items()
    ])  # fmt: skip
    return tables.pivot(long, index, "column", "ms").rename(columns={"head_dim": "d", "seq_len": "n"})


def floors(rows: pd.DataFrame, roof: Roofs) -> pd.DataFrame:
    """Ours by pass and shape: the least times in µs that GEMMs (at the best rate measured), exponentials (at the clock
    seen) and memory traffic (at the best copy measured) imply, the kernel time, and the longest of the three in
    percent of it."""
    out = []
    for part in ("forward", "backward"):
        for row in first_machine(rows[rows["impl"] == OURS]).itertuples():
            n, d, heads = row.seq_len, row.head_dim, row.heads
            flops = accounting.attention_flops(heads, n, n, d, True, part)
            moved = accounting.attention_bytes(heads, n, n, d, BYTES[row.dtype], part)
            exps = accounting.attention_exps(heads, n, n, True, part)
            known = roof.sms and row.sm_mhz > 0
            least = {
                "GEMMs, µs": flops / (roof.tflops.get(row.dtype, math.nan) * 1e6),
                "exponentials, µs": 1e3 * accounting.exps_ms(exps, roof.sms, row.sm_mhz) if known else math.nan,
                "memory, µs": moved / ((roof.tb_per_s or math.nan) * 1e6),
            }
            kernel = 1e3 * getattr(row, f"{part}_gpu_ms")
            line = {"pass": part, "heads": heads, "n": n} | least | {"kernel time, µs": kernel}
            out.append(line | {"floor, %": 100 * max(least.values()) / kernel})
    return pd.DataFrame(out)


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of all but ours, each once, with `speedup`: its time of both passes over that of ours in the same run;
    kernel time up to KERNEL_TOKENS, wall time beyond."""
    rows = rows[rows["repeat"] == 0]
    wall = rows["end_to_end_ms_p50"].astype(float)
    rows = rows.assign(ms=kernel_ms(rows).where(rows["seq_len"] <= KERNEL_TOKENS, wall))
    ours = rows.loc[rows["impl"] == OURS, [*SHAPE, "run", "ms"]]
    found = rows[rows["impl"] != OURS].merge(ours, on=[*SHAPE, "run"], how="left", suffixes=("", "_ours"))
    return found.assign(speedup=found["ms"] / found["ms_ours"])


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest error against fp64 of the output (O) and the gradients (grads) over all shapes, a line for each
    dtype, a column for each implementation."""
    rows = rows[(rows["repeat"] == 0) & (rows["status"] == "ok")]
    worst = rows.groupby(["machine", "dtype", "impl"], sort=False)[["error_out", "error_grads"]].max()
    wide = worst.astype(float).unstack("impl").sort_index(level="machine", sort_remaining=False)
    wide = wide.reindex(columns=list(dict.fromkeys(rows["impl"])), level="impl")
    wide.columns = [f"{ {'error_out': 'O', 'error_grads': 'grads'}[m] } {SHORT.get(i, i)}" for m, i in wide.columns]
    return wide.reset_index()


# ------------------------------------------------------------------------------------------------ figures
def tiling_figure(tiles: int = 7, program: int = 4, keys: int = 2) -> Figure:
    """Left: the causal scores in tiles, the row that a program of the forward pass walks, the column of one of the
    backward pass. Right: where the tensors of a forward program live. A drawing: no numbers."""
    figure, axes = figures.panels(columns=2, height=3.1, gridspec_kw={"width_ratios": [1, 1.05]})
    left, right = axes[0]
    for ax in (left, right):
        ax.axis("off")
    for i in range(tiles):
        for j in range(tiles):
            kind = dict(facecolor=_LEFT_OUT, edgecolor="#bbbbbb", ls=":") if j > i else (
                dict(facecolor="#dce6ef", edgecolor="#555555", hatch="////" if i == j else "")
            )  # fmt: skip
            left.add_patch(Rectangle((j, i), 1, 1, lw=0.7, **kind))
    left.add_patch(Rectangle((0, program), program + 1, 1, fill=False, ec=_QUERY, lw=2.6, zorder=3))
    left.add_patch(Rectangle((keys, keys), 1, tiles - keys, fill=False, ec=_KEY, lw=2.6, ls="--", zorder=3))
    _arrow(left, (0.15, program + 0.5), (program + 0.85, program + 0.5), _QUERY)
    _arrow(left, (keys + 0.5, keys + 0.15), (keys + 0.5, tiles - 0.15), _KEY)
    left.add_patch(Rectangle((-1.2, program), 0.8, 1, fc=_QUERY, ec="none"))
    left.add_patch(Rectangle((keys, -1.2), 1, 0.8, fc=_KEY, ec="none"))
    left.text(-0.8, program + 0.5, "$Q_i$", color="white", ha="center", va="center")
    left.text(keys + 0.5, -0.8, "$K_j, V_j$", color="white", ha="center", va="center", fontsize=8)
    left.text(-0.8, program - 0.35, "queries", ha="center", va="center", rotation=90, fontsize=8)
    left.text(-0.8, 1.6, "queries", ha="center", va="center", rotation=90, fontsize=8) if False else None
    left.text(keys + 1.3, -0.8, "keys", va="center", fontsize=8)
    left.text(tiles - 0.15, 0.6, "never loaded", ha="right", va="center", fontsize=8, color="#555555")
    left.text(tiles + 0.15, program + 0.5, "forward\nprogram", color=_QUERY, va="center", fontsize=8)
    left.text(keys + 0.5, tiles + 0.45, "backward program", color=_KEY, ha="center", va="center", fontsize=8)
    left.set(xlim=(-1.4, tiles + 1.6), ylim=(tiles + 0.9, -1.4), aspect="equal")
    return figure


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.6}, zorder=4)
