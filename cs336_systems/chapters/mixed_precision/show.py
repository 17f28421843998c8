"""What chapter `mixed_precision` shows: numeric frames and figures from its rows."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.mixed_precision.formats import number_format, running_sums, stagnation
from cs336_systems.chapters.mixed_precision.measure import ADDEND, ADDITIONS, AUTOCAST, KEPT, NORM_WIDTH, SUMS
from cs336_systems.measure.clocks.turns import each
from cs336_systems.report import figures, tables
from cs336_systems.report.prose import Number
from cs336_systems.sizes import SIZES

HANDOUT_SUMS = SUMS[:4]
TENSORS = {
    "parameters": "fc1.weight",
    "fc1's weight as its GEMM reads it": "fc1 operand",
    "output of fc1": "fc1",
    "output of layer norm": "ln",
    "logits": "fc2",
    "loss": "loss",
    "gradients of the parameters": "fc1.weight.grad",
}
PARTS = {
    "ends": "input and output only",
    "fp32_inside": "the same, fp32 inside",
    "mean": "mean",
    "variance": "variance, pairwise sum",
    "running": "variance, running sum",
    "one_pass": "variance as E[x²] − E[x]²",
    "normalize": "(x − μ) / σ",
    "all": "everything",
}
INPUTS = {"σ 1": (1.0, 0.0), "σ 10": (10.0, 0.0), "mean 100": (1.0, 100.0)}  # spread and mean
PASSES = ("forward", "backward")
KERNEL_HEADS = {
    "launches": "kernels", "gemm_ms": "GEMMs, ms", "cast_ms": "casts, copies, ms", "other_ms": "other, ms",
    "kernel_ms": "all kernels, ms", "wall_ms": "wall, ms",
}  # fmt: skip
_HUNDREDTH = Fraction(ADDEND)
_FAR = 4 * ADDITIONS


# ------------------------------------------------------------------------------------------ accumulation
def _addend(what: str) -> Fraction:
    """A hundredth as the addend's format holds it; casting it up changes nothing."""
    return number_format(what.partition(" as ")[0]).round(_HUNDREDTH)


@functools.cache
def predicted_sums(dtype: str, what: str, additions: int = ADDITIONS) -> list[float]:
    """The running sum by exact arithmetic, after 0, 1, … additions."""
    return [float(x) for x in running_sums(number_format(dtype), _addend(what), additions)]


def mispredicted(rows: pd.DataFrame) -> Number:
    """How many of the running sums that were kept differ from exact arithmetic, in any bit."""
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return Number(math.nan, "the running sums: not measured")
    wrong = 0
    for row in rows.itertuples():
        pairs = zip(each(row.sums), predicted_sums(row.dtype, row.what)[KEPT::KEPT], strict=True)
        wrong += sum(measured != expected for measured, expected in pairs)
    return Number(wrong)


def stall(dtype: str) -> Number:
    """The power of two at which a running sum of hundredths stops for good."""
    return Number(stagnation(number_format(dtype), _addend(dtype)))


def accumulation(rows: pd.DataFrame) -> pd.DataFrame:
    """The handout's four sums: the result, its error, and how much of that is the rounding of 0.01, once, a thousand
    times over, and how much the rounding of the sums."""
    order = {pair: place for place, pair in enumerate(HANDOUT_SUMS)}
    rows = rows.assign(order=[order.get(pair) for pair in zip(rows["dtype"], rows["what"], strict=True)])
    rows = rows[rows["order"].notna()].sort_values(["machine", "order"])
    by_addend = np.array([float(ADDITIONS * (_addend(what) - _HUNDREDTH)) for what in rows["what"]])
    error = (rows["result"].astype(float) - float(ADDITIONS * _HUNDREDTH)).to_numpy()
    return pd.DataFrame({
        "machine": rows["machine"], "accumulator": rows["dtype"], "addend": rows["what"],
        "sum": rows["result"].astype(float), "error": error,
        "by rounding 0.01": by_addend, "by the additions": (error - by_addend).round(12),
    }).reset_index(drop=True)  # fmt: skip


def sums_figure(rows: pd.DataFrame) -> Figure:
    """Left: the fp16 sum of hundredths less the exact one; right: 16-bit sums far beyond a thousand additions. Lines:
    exact arithmetic; marks: measured."""
    figure, axes = figures.panels(columns=2, height=1.95)
    near, far = axes[0]
    counts = np.arange(_FAR + 1)
    far.plot(counts, counts / 100, color=figures.ROOF, lw=1, ls=(0, (5, 3)), label="exact")
    for dtype, style in (("fp16", "-"), ("bf16", (0, (4, 1)))):
        name, color, marker = figures.look(dtype)
        path = np.array(predicted_sums(dtype, dtype, _FAR))
        row = tables.chosen(rows, dtype=dtype, what=dtype, status="ok")
        seen = np.array(each(row["sums"].iloc[0]) if len(row) else [])
        at = KEPT * np.arange(1, len(seen) + 1)
        far.plot(counts, path, color=color, ls=style, lw=2, label=name)
        if dtype == "fp16":
            near.plot(counts[: ADDITIONS + 1], (path - counts / 100)[: ADDITIONS + 1], color=color)
            near.plot(at, seen - at / 100, marker, color=color)
    near.set(xlabel="additions of 0.01", ylabel="fp16 sum − exact", xlim=(0, ADDITIONS * 1.02))
    far.set(xlabel="additions of 0.01", ylabel="sum", xlim=(0, _FAR), ylim=(0, None))
    far.legend(loc="upper left")
    return figure


# ------------------------------------------------------------------------------------------------ dtypes
def dtypes(rows: pd.DataFrame) -> pd.DataFrame:
    """The dtypes that were observed in the toy model: a line for each tensor, a column for each autocast dtype."""
    place = {what: name for name, what in TENSORS.items()}
    rows = rows[rows["what"].isin(place)]
    wide = rows.pivot(index=["machine", "what"], columns="dtype", values="observed")
    wide = wide.reindex(columns=list(AUTOCAST)).rename(columns=lambda dtype: f"under {dtype} autocast")
    found = wide.reset_index().rename(columns={"what": "tensor"}).rename_axis(columns=None)
    return tables.in_order(found.assign(tensor=found["tensor"].map(place)), ["tensor"], TENSORS)


# ------------------------------------------------------------------------------------------ layer norm
def norm(rows: pd.DataFrame) -> pd.DataFrame:
    """Relative error of layer norm's output with one part at a time in 16 bits, for three kinds of input."""
    kinds = {given: name for name, given in INPUTS.items()}
    rows = tables.chosen(rows, dtype=AUTOCAST, width=NORM_WIDTH)
    rows = rows.assign(kind_of=[kinds.get(g) for g in zip(rows["scale"], rows["offset"], strict=True)])
    rows = rows[rows["kind_of"].notna()]
    infinite = (rows["status"] == "ok") & rows["output_error"].isna()
    rows = rows.assign(
        head=rows["dtype"] + ": " + rows["kind_of"].astype(str),
        part=rows["what"].map(PARTS),
        status=rows["status"].mask(infinite, "∞"),
    )
    rows = tables.in_order(rows, ["machine", "what"], PARTS)
    found = tables.pivot(rows, ["machine", "part"], "head", "output_error")
    heads = [head for dtype in AUTOCAST for name in INPUTS if (head := f"{dtype}: {name}") in found]
    return found[["machine", "part", *heads]].rename(columns={"part": "in 16 bits"})


# ------------------------------------------------------------------------------------------ whole models
def speed(rows: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward in fp32 and bf16, ms, and how many times faster bf16 is, also in a training step; where both
    are of one run."""
    rows, keys = tables.chosen(rows, repeat=0, dtype=("fp32", "bf16")), ["machine", "size"]
    both = rows[rows["mode"] == "forward_backward"]
    heads = {f"{p}_ms_p50": f"{p} " + both["dtype"] + ", ms" for p in PASSES}
    found = tables.spread(both, keys, heads)
    for name, mode in (*((name, "forward_backward") for name in PASSES), ("step", "train_step")):
        column = f"{name}_ms_p50"
        fp32, bf16 = (tables.chosen(rows, mode=mode, dtype=dtype) for dtype in ("fp32", "bf16"))
        base = tables.looked_up(fp32, column, bf16, [*keys, "run"])
        speedups = bf16.assign(speedup=base / bf16[column].astype(float))
        found[f"{name}, ×"] = tables.looked_up(speedups, "speedup", found, keys)
    return found


def all_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Every step that was timed: medians of its phases, MFU and peak of memory."""
    heads = {
        "machine": "machine", "size": "size", "mode": "mode", "dtype": "dtype", "forward_ms_p50": "forward, ms",
        "backward_ms_p50": "backward, ms", "optimizer_ms_p50": "optimizer, ms", "step_ms_p50": "step, ms",
        "step_ms_std": "std, ms", "peak_gib": "peak, GiB",
    }  # fmt: skip
    return rows[list(heads)].rename(columns=heads)


def blocks_figure(rows: pd.DataFrame) -> Figure:
    """Wall time of a training step for each block of the model, by size: flat where launches set the pace."""
    figure, ax = figures.panel(height=2.0)
    rows = tables.chosen(rows, mode="train_step", repeat=0, status="ok")
    rows = tables.first_machine(rows)
    names = [name for name in SIZES if name in set(rows["size"])]
    frame = rows.assign(
        at=rows["size"].map(names.index),
        ms=rows["step_ms_p50"].astype(float) / rows["size"].map(lambda n: SIZES[n].num_layers).astype(float),
    )
    figures.lines(ax, frame, "at", "ms", "dtype", log_y=True, binary_x=False)
    if names:
        ax.set_xticks(range(len(names)), [f"{n}\nwidth {SIZES[n].d_model}" for n in names])
        ax.set_ylabel("ms per block")
        ax.legend(loc="upper left")
    return figure


def kernels(profile: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward by Nsight Systems, fp32 and bf16: kernels launched, kernel time of GEMMs, of casts and
    copies, of all others, of all; the GEMMs' rate; and the wall time of the same passes without a profiler, on the
    same machine."""
    keys = ["machine", "size", "dtype"]
    found = tables.chosen(profile, range=PASSES, dtype=("fp32", "bf16"))
    sums = ["kernels", "matrix_product_ms", "copy_cast_ms", "kernel_ms"]
    shape = ["batch", "context_length"]
    found = found.astype(dict.fromkeys(sums, float)).groupby([*keys, *shape], sort=False)[sums]
    found = found.sum(min_count=len(PASSES)).reset_index(shape)
    flops = [  # plain attention also computes what the mask hides
        3 * sum(accounting.forward_matmul_flops(SIZES[index[1]], batch, context).values())
        for index, batch, context in zip(found.index, found["batch"], found["context_length"], strict=True)
    ]
    walls = tables.chosen(steps, mode="forward_backward", repeat=0)
    walls = walls.set_index(keys)["step_ms_p50"]
    frame = pd.DataFrame({
        "launches": found["kernels"].astype("Int64"), "gemm_ms": found["matrix_product_ms"],
        "cast_ms": found["copy_cast_ms"],
        "other_ms": found["kernel_ms"] - found["matrix_product_ms"] - found["copy_cast_ms"],
        "kernel_ms": found["kernel_ms"], "wall_ms": walls.reindex(found.index).astype(float),
        "gemm_tflops": np.array(flops, float) / found["matrix_product_ms"] / 1e9,
    }).reset_index()  # fmt: skip
    return tables.in_order(frame, ["size", "dtype"], SIZES, ("fp32", "bf16"))
