"""What chapter `torch_compile` shows: numeric frames and a figure from its rows, and from those of chapter
`attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.chapters.attention.measure import PARTS
from cs336_systems.chapters.attention.show import BYTES, COMPILED, OURS, PLAIN, kernel_floors
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.torch_compile.measure import SPEED_BATCHES, SPEED_CONTEXT
from cs336_systems.report import figures, tables
from cs336_systems.report.figures import label
from cs336_systems.report.prose import compare, one
from cs336_systems.sizes import SIZES

MODES = {"off": "eager", "default": "compiled", "reduce-overhead": "CUDA graphs"}
_SHAPE = attrgetter("machine", "dtype", "head_dim", "seq_len")


# ----------------------------------------------------------------------------- attention alone: part (a)
def attention_pairs(rows: pd.DataFrame) -> list[tuple[Any, Any]]:
    """The rows of attention on the whole GPU as named tuples, eager and compiled, by shape."""
    chosen = tables.in_order(tables.chosen(rows, cap_gib=0, repeat=0), ["head_dim", "seq_len"])
    compiled = {_SHAPE(row): row for row in chosen[chosen["impl"] == COMPILED].itertuples()}
    plain = chosen[chosen["impl"] == PLAIN].itertuples()
    return [(row, compiled[_SHAPE(row)]) for row in plain if _SHAPE(row) in compiled]


def attention_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms of eager and compiled attention, forward (F) and backward (B): a line for each dtype and shape."""
    out = []
    for dtype in BYTES:
        for pair in attention_pairs(rows[rows["dtype"] == dtype]):
            ms = (getattr(row, f"{part}_ms_p50") for part in PARTS for row in pair)
            out.append([*_SHAPE(pair[0]), *ms])
    heads = [f"{letter} {how}, ms" for letter in "FB" for how in ("eager", "compiled")]
    return pd.DataFrame(out, columns=["machine", "dtype", "d", "n", *heads])


def attention_speedups(rows: pd.DataFrame, found: Mapping[str, Roofs]) -> pd.DataFrame:
    """Eager over compiled time of attention: predicted by the least times of the kernels, and measured in one run."""
    out = []
    for pair in attention_pairs(rows):
        for part in PARTS:
            least = [kernel_floors(row, part, found).sum(skipna=False) for row in pair]
            ms = [float(getattr(row, f"{part}_ms_p50")) for row in pair]
            measured = ms[0] / ms[1] if pair[0].run == pair[1].run else math.nan
            out.append([*_SHAPE(pair[0]), part, least[0] / least[1], measured])
    return pd.DataFrame(out, columns=["machine", "dtype", "d", "n", "pass", "predicted, ×", "measured, ×"])


def speedup_figure(rows: pd.DataFrame) -> Figure:
    """Maps of eager over compiled time on the first machine: sequence length across, d down, a row of panels for each
    dtype. What lies within the noise of its run stands in parentheses."""
    rows = tables.first_machine(rows)
    dtypes = [dtype for dtype in BYTES if (rows["dtype"] == dtype).any()] or [""]
    figure, axes = figures.panels(columns=2, rows=len(dtypes), height=1.45, sharex=True, sharey=True)
    for line, dtype in zip(axes, dtypes, strict=True):
        pairs = attention_pairs(rows[rows["dtype"] == dtype])
        for ax, part in zip(line, PARTS, strict=True):
            cells = []
            for pair in pairs:
                place = {"head_dim": pair[0].head_dim, "seq_len": pair[0].seq_len}
                both = [one(rows, dtype=dtype, cap_gib=0, impl=row.impl, repeat=0, **place) for row in pair]
                found = compare(f"{part}_ms_p50", *both, rows)
                cells.append(place | {"ratio": float(found.ratio), "noise": found.noise})
            cells = pd.DataFrame(cells, columns=["head_dim", "seq_len", "ratio", "noise"])
            ax.set_title(f"{part}, {label(dtype)}")
            if cells["ratio"].isna().all():
                figures.nothing(ax)
                continue
            wide = cells.pivot(index="head_dim", columns="seq_len")
            figures.heat(ax, wide["ratio"], limit=4.0)
            within = np.maximum(wide["ratio"], 1 / wide["ratio"]) - 1 <= wide["noise"]
            for text, even in zip(ax.texts, within.to_numpy().flat, strict=True):
                text.set_text(f"({text.get_text()})" if even else text.get_text())
        line[0].set_ylabel("d")
    for ax in axes[-1]:
        ax.set_xlabel("sequence length n")
    return figure


# ------------------------------------------------------------------------------- whole model: part (b)
def sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Every size and context, eager and compiled: median ms of forward alone (F) and of the training step, the eager
    step measured again, and the speedups, of one run each."""
    rows = tables.chosen(rows, batch=4, attention="reference", compile=["off", "default"])
    keys = ["machine", "dtype", "context_length", "size"]
    out = rows[keys].drop_duplicates(ignore_index=True)
    told = lambda known, column="step_ms_p50": tables.looked_up(known, column, out, keys)
    for mode, head in (("forward", "F"), ("train_step", "step")):
        of_mode = tables.chosen(rows, mode=mode)
        eager, again = (tables.chosen(of_mode, compile="off", repeat=repeat) for repeat in (0, 1))
        compiled = tables.chosen(of_mode, compile="default", repeat=0)
        base = tables.looked_up(eager, "step_ms_p50", compiled, [*keys, "run"])
        compiled = compiled.assign(speedup=base / compiled["step_ms_p50"].astype(float))
        out[f"{head} eager, ms"] = told(eager)
        if mode == "train_step":
            out["again, ms"] = told(again)
        out[f"{head} compiled, ms"], out[f"{head}, ×"] = told(compiled), told(compiled, "speedup")
    found = out.rename(columns={"context_length": "context"})
    return tables.in_order(found, ["dtype", "context", "size"], ("bf16", "fp32"), SIZES)


# ---------------------------------------------------------------------------- the fastest training step
def speed(rows: pd.DataFrame) -> pd.DataFrame:
    """Thousands of tokens/s of a step at the longer context: mode and attention down, size and batch across."""
    rows = tables.chosen(rows, context_length=SPEED_CONTEXT, mode="train_step", repeat=0)
    rows = _ordered(tables.chosen(rows, size=[*SPEED_BATCHES]))
    rows = rows.assign(
        column=[f"{size}, batch {batch}" for size, batch in zip(rows["size"], rows["batch"], strict=True)],
        thousands=rows["tokens_per_s"].astype(float) / 1000,
    )
    rows = rows.assign(mode=rows["compile"].map(MODES), attention=rows["attention"].map(label))
    return tables.pivot(rows, ["machine", "mode", "attention"], "column", "thousands")


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """By mode, attention, size and batch, each in its own order."""
    return tables.in_order(
        rows, ["compile", "attention", "size", "batch"], MODES, (PLAIN, "sdpa", OURS), SIZES
    )


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """Every case: ms, tokens/s, MFU in percent, peak GiB, seconds to compile."""
    rows = _ordered(rows)
    return pd.DataFrame({
        "machine": rows["machine"], "size": rows["size"], "context": rows["context_length"], "batch": rows["batch"],
        "dtype": rows["dtype"], "mode": rows["mode"], "attention": rows["attention"].map(label),
        "as": rows["compile"].map(MODES),
        "repeat": rows["repeat"], "ms": rows["step_ms_p50"], "mean, ms": rows["step_ms_mean"],
        "std, ms": rows["step_ms_std"], "tokens/s": rows["tokens_per_s"], "MFU, %": 100 * rows["mfu"].astype(float),
        "peak, GiB": rows["peak_gib"], "compile, s": rows["compile_s"],
    })  # fmt: skip
