"""What chapter `benchmarking` shows: numeric frames and figures from its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.benchmarking.measure import LATER, PRIMARY
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.shared.steps import WARM
from cs336_systems.measure.clocks.turns import each
from cs336_systems.report import figures
from cs336_systems.report.prose import Number, Row
from cs336_systems.report.tables import chosen, first_machine, spread
from cs336_systems.sizes import HANDOUT_SIZES, SIZES, size

BATCH = 4
ADAMW_BYTES = 28  # per parameter: reads weight, gradient and two moments, writes weight and moments, all fp32
PASSES = ("forward", "backward")
TIME_HEADS = {
    "forward_ms_mean": "F, ms", "forward_ms_std": "F std, ms", "backward_ms_mean": "B, ms",
    "backward_ms_std": "B std, ms", "optimizer_ms_mean": "AdamW, ms", "step_ms_mean": "step, ms",
    "step_ms_std": "step std, ms",
}  # fmt: skip
SPLIT_HEADS = {
    "predicted_ms": "predicted, ms", "wall_ms": "measured, ms", "gemm_ms": "GEMMs, ms", "rate_pct": "GEMM rate, %",
    "other_ms": "other kernels, ms", "no_kernel_ms": "idle, ms",
}  # fmt: skip


def primary(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows at the context that single-context tables show: 512, or the longest there is."""
    lengths = set(rows["context_length"])
    return rows[rows["context_length"] == (PRIMARY if PRIMARY in lengths else max(lengths, default=0))]


def steps(rows: pd.DataFrame, mode: str = "train_step", **where: object) -> pd.DataFrame:
    """The rows of a mode in fp32, each case once: after a full warm-up, or where these fields have these values. Spring
    2026's largest size is left out."""
    rows = chosen(rows, **{"mode": mode, "dtype": "fp32", "warmup": WARM, "repeat": 0} | where)
    return rows[rows["size"] != LATER]


# ------------------------------------------------------------------------------------------------ predictions
def gemm_ms(roof: Roofs, name: str, batch: int, context: int) -> float:
    """What the GEMMs of a step in fp32 take at the machine's best rate measured; NaN where that is not known."""
    return roof.gemm_ms(accounting.model_flops(size(name), batch, context, "train_step"), "fp32")


def forward_gemm_ms(roof: Roofs, name: str, batch: int, context: int, dtype: str = "fp32") -> float:
    """What the GEMMs of a forward pass take at that rate with plain attention, which also computes the scores that the
    mask hides; `gemm_ms` leaves them out."""
    return roof.gemm_ms(sum(accounting.forward_matmul_flops(size(name), batch, context).values()), dtype)


def models(roofs: Mapping[str, Roofs]) -> pd.DataFrame:
    """The handout's sizes: blocks, width, heads, parameters, FLOPs of a step at context 512, and the times that these
    come to at a machine's best GEMM and copy."""
    return pd.DataFrame([
        {
            "machine": machine, "size": name, "L": config.num_layers, "D": config.d_model, "heads": config.num_heads,
            "N, million": accounting.num_parameters(config) / 1e6,
            "TFLOP a step": accounting.model_flops(config, BATCH, PRIMARY, "train_step") / 1e12,
            "forward + backward, ms": gemm_ms(roof, name, BATCH, PRIMARY),
            "AdamW, ms": roof.copy_ms(ADAMW_BYTES * accounting.num_parameters(config)),
        }
        for machine, roof in roofs.items() for name, config in SIZES.items() if name in HANDOUT_SIZES
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------ times
def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of the phases of a training step, and backward over forward, a line for each size."""
    rows = steps(primary(rows))
    found = spread(rows, ["machine", "size"], TIME_HEADS)
    found.insert(found.columns.get_loc("AdamW, ms"), "B / F", found["B, ms"] / found["F, ms"])
    return found


def split(rows: pd.DataFrame, profile: pd.DataFrame, roofs: Mapping[str, Roofs]) -> pd.DataFrame:
    """Forward and backward together: predicted, measured, and where the time goes by Nsight Systems: GEMMs and their
    rate in percent of the best, other kernels, and the rest, in which no kernel ran."""
    rows, keys = steps(primary(rows)).reset_index(drop=True), ["machine", "size", "context_length", "dtype"]
    profile = profile[profile["range"].isin(PASSES)]
    sums = profile.astype({"matrix_product_ms": float, "kernel_ms": float}).groupby(keys)
    sums = sums[["matrix_product_ms", "kernel_ms"]].sum(min_count=len(PASSES))
    sums = sums.reindex(pd.MultiIndex.from_frame(rows[keys])).reset_index(drop=True)
    found = rows[["machine", "size", "status"]].copy()
    cases = [(roofs.get(r.machine, Roofs()), r.size, r.batch, r.context_length) for r in rows.itertuples()]
    found["predicted_ms"] = [gemm_ms(*case) for case in cases]
    found["wall_ms"] = rows["forward_ms_mean"].astype(float) + rows["backward_ms_mean"].astype(float)
    found["share_pct"] = 100 * found["predicted_ms"] / found["wall_ms"]
    found["gemm_ms"] = sums["matrix_product_ms"]
    found["rate_pct"] = 100 * 3 * np.array([forward_gemm_ms(*case) for case in cases]) / found["gemm_ms"]
    found["other_ms"] = sums["kernel_ms"] - sums["matrix_product_ms"]
    found["no_kernel_ms"] = found["wall_ms"] - sums["kernel_ms"]
    return found


def rates(profile: pd.DataFrame, roofs: Mapping[str, Roofs]) -> pd.DataFrame:
    """The rate of the GEMMs of forward and of backward, in percent of the machine's best."""
    found = profile[profile["range"].isin(PASSES)].reset_index(drop=True)
    forward_ms = lambda r: forward_gemm_ms(
        roofs.get(r.machine, Roofs()), r.size, r.batch, r.context_length, r.dtype
    )
    least = [forward_ms(r) * (1 + (r.range == "backward")) for r in found.itertuples()]
    found["rate_pct"] = 100 * np.array(least, float) / found["matrix_product_ms"].astype(float)
    return found[["machine", "size", "context_length", "dtype", "range", "status", "rate_pct"]]


def ranked(row: Row, phase: str, place: int) -> Number:
    """The measured step of a phase at this place by length: 0 is the shortest, -1 the longest; in ms."""
    found = sorted(each(getattr(row, f"{phase}_ms_each")))
    return Number(found[place]) if found else Number(math.nan, f"{row!r}: not measured")


def contexts_figure(rows: pd.DataFrame, roofs: Mapping[str, Roofs]) -> Figure:
    """A training step over the context length, a line for each size; dotted: its GEMMs at the best rate."""
    rows = first_machine(steps(rows))
    rows = rows.assign(ms=rows["step_ms_p50"].astype(float))
    figure, ax = figures.panel(height=2.6)
    figures.lines(ax, rows, "context_length", "ms", "size", log_y=True)
    for line, (name, part) in zip(
        ax.get_lines(), rows.dropna(subset="ms").groupby("size", sort=False), strict=True
    ):
        lengths = sorted(part["context_length"])
        roof = roofs.get(part["machine"].iloc[0], Roofs())
        least = [gemm_ms(roof, str(name), int(part["batch"].iloc[0]), int(n)) for n in lengths]
        ax.plot(lengths, least, ":", color=line.get_color(), lw=1.2)
    ax.set(xlabel="context length", ylabel="training step, ms")
    _legend(figure, ax)
    return figure


# ------------------------------------------------------------------------------------------------ warm-up
def passes(rows: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward of each measured step added up: first, second, median, mean and standard deviation, for each
    size and number of warm-up steps; and the first and the median forward pass alone."""
    out, keys = [], ["machine", "size", "warmup", "status"]
    found = steps(primary(rows), "forward_backward", warmup=sorted(set(rows["warmup"])))
    for row in found.to_dict("records"):
        forward, backward = (pd.Series(each(row[f"{name}_ms_each"]), dtype=float) for name in PASSES)
        both = forward + backward
        first, second = (both.get(place, math.nan) for place in range(2))
        case = [row[name] for name in keys]
        statistics = first, second, both.median(), both.mean(), both.std()
        out.append([*case, *statistics, forward.get(0, math.nan), forward.median()])
    heads = ["first_ms", "second_ms", "p50_ms", "mean_ms", "std_ms", "first_forward_ms", "forward_p50_ms"]
    return pd.DataFrame(out, columns=[*keys, *heads])


def warmups(found: pd.DataFrame) -> pd.DataFrame:
    """`passes` as a table: mean and standard deviation after each number of warm-up steps, a line for each size."""
    found = found.sort_values("warmup", kind="stable")
    heads = {"mean_ms": "mean {}, ms", "std_ms": "std {}, ms"}
    heads = {column: found["warmup"].map(head.format) for column, head in heads.items()}
    return spread(found, ["machine", "size"], heads)


def cold_figure(rows: pd.DataFrame) -> Figure:
    """Forward and backward of each step of a fresh process without warm-up, a line for each size."""
    rows = first_machine(steps(primary(rows), "forward_backward", warmup=0, status="ok"))
    frame = rows.assign(ms=rows["step_ms_each"].map(each)).explode("ms")
    frame = frame.assign(number=frame.groupby(level=0).cumcount() + 1)
    figure, ax = figures.panel(height=2.1)
    figures.lines(ax, frame, "number", "ms", "size", log_y=True, binary_x=False)
    ax.set(xlabel="step of a fresh process", ylabel="forward + backward, ms")
    if len(frame):
        ax.set_xticks(sorted(set(frame["number"])))
    _legend(figure, ax)
    return figure


def _legend(figure: Figure, ax: Axes) -> None:
    """At the right, the topmost line first."""
    handles, names = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles[::-1], names[::-1], loc="outside right center")


# ------------------------------------------------------------------------------------------------ the grid
def grid(rows: pd.DataFrame) -> pd.DataFrame:
    """Every case: medians of its phases and of the whole step, tokens/s, MFU, peak of memory."""
    heads = {
        "machine": "machine", "size": "size", "context_length": "context", "mode": "mode", "dtype": "dtype",
        "warmup": "warm-up", "repeat": "repeat", "forward_ms_p50": "forward, ms", "backward_ms_p50": "backward, ms",
        "optimizer_ms_p50": "AdamW, ms", "step_ms_p50": "step, ms", "tokens_per_s": "tokens/s", "mfu": "MFU",
        "peak_gib": "peak, GiB", "status": "status",
    }  # fmt: skip
    return rows[list(heads)].rename(columns=heads)
