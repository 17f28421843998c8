"""What chapter `ddp` shows: numeric frames and figures from its rows, and what is expected of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.accounting import data_parallel as closed
from cs336_systems.experiments.ddp import ALONE, PHASES, Case, overlap_path
from cs336_systems.measure import trace_overlap
from cs336_systems.measure.trace_overlap import Overlap
from cs336_systems.report import Chapter, figures
from cs336_systems.sizes import size

NAMES = {
    ALONE: "one GPU alone", "none": "no communication", "naive": "naive", "flat": "flat", "overlapped": "overlapped",
    "bucketed": "bucketed", "in_place": "in place", "torch": "torch DDP", "torch_view": "torch DDP, views",
}  # fmt: skip
TORCH = ("torch", "torch_view")  # wait for the last all-reduce inside their backward pass
BESIDE = [*((w, 0.0) for w in ("none", "naive", "flat", "overlapped")), ("bucketed", 100.0), ("in_place", 100.0),
          ("torch", 0.0), ("torch", 100.0), ("torch_view", 0.0)]  # fmt: skip
MANY = [("none", 0.0), ("naive", 0.0), ("bucketed", 100.0), ("in_place", 100.0), ("torch", 0.0)]
COLORS = {"forward": "#9fd0ee", "backward": "#0072B2", "optimizer": "#8c6d31", "communication": "#D55E00"}
_SAME = ["machine", "run", "size", "context_length", "batch", "dtype", "world_size"]


# ------------------------------------------------------------------------------------------------ what is expected
def gradient_bytes(name: str = "xl") -> int:
    """Bytes of all fp32 gradients of a model size: s."""
    return sum(closed.bucket_bytes(size(name), 0))


def messages(name: str, wrapper: str, bucket_mb: float) -> list[int]:
    """Bytes of each all-reduce of a step by one of our variants, in the order in which they are sent."""
    if wrapper in ("none", ALONE):
        return []
    limit = math.inf if wrapper == "flat" else bucket_mb * closed.MB
    return closed.bucket_bytes(size(name), limit)


def all_reduces_ms(known: pd.DataFrame, sizes: Sequence[float]) -> float:
    """The time of all-reduces of these bytes, one after the other, by the measured times of tensors of other sizes.

    Between two of them on a line in logarithms, beyond the largest in proportion; NaN without any.
    """
    if known.empty or not sizes:
        return math.nan if known.empty else 0.0
    known = known.sort_values("num_bytes")
    num_bytes, ms = (known[c].to_numpy(float) for c in ("num_bytes", "ms_p50"))
    found = np.exp(np.interp(np.log(sizes), np.log(num_bytes), np.log(ms)))
    return float(np.sum(found * np.maximum(1, np.asarray(sizes) / num_bytes[-1])))


def _wait_ms(row: Any, reduces: pd.DataFrame, tb_per_s: float) -> float:
    """What a variant should wait for after its backward pass: all messages, or the last one where it overlaps."""
    if row.wrapper in TORCH or row.status != "ok":
        return math.nan
    same = (reduces["machine"] == row.machine) & (reduces["world_size"] == row.world_size)
    same &= (reduces["backend"] == row.backend) & (reduces["how"] == "all_reduce") & (reduces["repeat"] == 0)
    sent = messages(row.size, row.wrapper, row.bucket_mb)
    after = sent if row.wrapper in ("naive", "flat") else sent[-1:]
    copied = 2 * sum(sent) / tb_per_s / 1e9 if row.wrapper == "flat" else 0.0
    return all_reduces_ms(reduces[same & (reduces["status"] == "ok")], after) + copied


# ------------------------------------------------------------------------------------------------------ the rows
def beside(chapter: Chapter, name: str) -> pd.DataFrame:
    """The rows of another chapter on this chapter's machines."""
    other = Chapter(name, measure="no", root=chapter.root)
    return pd.concat([other.on(machine).rows() for machine in chapter.machines or [""]], ignore_index=True)


def steps(rows: pd.DataFrame, reduces: pd.DataFrame, tb_per_s: float | None = None) -> pd.DataFrame:
    """The timed rows with more columns: what a step and its backward pass take beyond those without communication in the
    same run, weak scaling (the step of one GPU alone over this one), the wait after the backward pass that the rows of
    chapter `allreduce` predict (`tb_per_s`: at which `flat` copies its gradients), and a name."""
    out = rows[rows["kind"] == "time"].reset_index(drop=True)
    there = out[(out["status"] == "ok") & (out["repeat"] == 0)]
    places = pd.MultiIndex.from_frame(out[_SAME])

    def base(wrapper: str, column: str) -> np.ndarray:
        found = there[there["wrapper"] == wrapper].set_index(_SAME)[column].astype(float)
        return found.reindex(places).to_numpy()

    step = out["step_ms_p50"].astype(float)
    sends = ~out["wrapper"].isin([ALONE, "none"])
    out["exposed_ms"] = (step - base("none", "step_ms_p50")).where(sends)
    out["longer_ms"] = (out["backward_ms_p50"].astype(float) - base("none", "backward_ms_p50")).where(sends)
    out["wait_ms"] = (
        out["synchronization_ms_p50"].astype(float).where(sends & ~out["wrapper"].isin(TORCH))
    )
    out["scaling"] = (base(ALONE, "step_ms_p50") / step).where(out["wrapper"] != ALONE)
    speed = math.nan if tb_per_s is None else tb_per_s
    out["predicted_ms"] = [
        _wait_ms(row, reduces, speed) if sent else math.nan
        for row, sent in zip(out.itertuples(), sends, strict=True)
    ]
    limits = [f", {mb:g} MB" if mb else "" for mb in out["bucket_mb"]]
    return out.assign(
        variant=[NAMES[w] + limit for w, limit in zip(out["wrapper"], limits, strict=True)]
    )


def main(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows that are shown in full: fewest GPUs above one, the first precision, the longest context."""
    for column, choose in (("world_size", min), ("dtype", lambda names: names.iloc[0]), ("context_length", max)):
        steps = steps[steps["world_size"] > 1]
        steps = steps[steps[column] == choose(steps[column])] if len(steps) else steps
    return steps[steps["repeat"] == 0]


# ------------------------------------------------------------------------------------------------------ tables
def pace(steps: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """How well a step is known at each context, on the fewest GPUs above one: without communication here and in the
    rows of chapter `zero`, its range, and how far one case measured twice lies apart."""
    rows = pd.concat([main(steps[steps["context_length"] == c]) for c in sorted(set(steps["context_length"]))] or [steps])
    none = rows[rows["wrapper"] == "none"]
    again = steps[steps["repeat"] == 1].set_index(["machine", "run", "context_length", "variant"])["step_ms_p50"]
    others = others[(others["variant"] == ALONE) & (others["moment"] == "timed") & (others["repeat"] == 0)]
    others = others.set_index(["machine", "context_length", "world_size"])["step_ms_p50"].astype(float)
    twice = rows.assign(again=again.astype(float).reindex(
        pd.MultiIndex.from_frame(rows[["machine", "run", "context_length", "variant"]])).to_numpy())  # fmt: skip
    apart = np.abs(np.log(twice["again"] / twice["step_ms_p50"].astype(float)))
    apart = np.expm1(apart.groupby([twice["machine"], twice["context_length"]]).max())
    at = pd.MultiIndex.from_frame(none[["machine", "context_length"]])
    middle = none["step_ms_p50"].astype(float)
    return pd.DataFrame({
        "machine": none["machine"], "context": none["context_length"], "no communication, ms": middle,
        "in chapter zero, ms": others.reindex(
            pd.MultiIndex.from_frame(none[["machine", "context_length", "world_size"]])).to_numpy(),
        "p20–p80, % of median": 100 * (none["step_ms_p80"] - none["step_ms_p20"]) / middle,
        "same case twice, % apart": 100 * apart.reindex(at).to_numpy(),
    })  # fmt: skip


def variants(steps: pd.DataFrame) -> pd.DataFrame:
    """The step of each variant: all-reduces, median, what is exposed, and where: beside or after the backward pass."""
    rows = main(steps)
    order = {key: place for place, key in enumerate(BESIDE)}
    keys = list(zip(rows["wrapper"], rows["bucket_mb"], strict=True))
    shown = [key in order or (bool(len(rows)) and rows["size"].iloc[0] == "tiny") for key in keys]
    rows = rows.assign(place=[order.get(key, len(order)) for key in keys])[shown]
    return _columns(rows.sort_values(["machine", "place"], kind="stable"), "variant")


def sweep(steps: pd.DataFrame) -> pd.DataFrame:
    """Buckets in their order of size, with the last message in MB, and the step of the in-place variant beside each."""
    rows = main(steps)
    keys = ["machine", "bucket_mb"]
    in_place = rows[rows["wrapper"] == "in_place"].set_index(keys)["step_ms_p50"].astype(float)
    rows = rows[rows["wrapper"] == "bucketed"].sort_values(keys)
    last = [messages(r.size, r.wrapper, r.bucket_mb)[-1] / closed.MB for r in rows.itertuples()]
    out = _columns(rows.rename(columns={"bucket_mb": "bucket, MB"}), "bucket, MB")
    out.insert(3, "last, MB", last)
    out["in place: step, ms"] = in_place.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
    return out


def _columns(rows: pd.DataFrame, first: str) -> pd.DataFrame:
    return pd.DataFrame({
        "machine": rows["machine"], first: rows[first], "all-reduces": rows["collectives"].astype("Float64").astype("Int64"),
        "step, ms": rows["step_ms_p50"].astype(float), "exposed, ms": rows["exposed_ms"],
        "backward longer, ms": rows["longer_ms"], "wait, ms": rows["wait_ms"],
        "wait predicted, ms": rows["predicted_ms"],
    }).reset_index(drop=True)  # fmt: skip


def scaling(steps: pd.DataFrame) -> pd.DataFrame:
    """Weak scaling: step, exposed time and efficiency of the variants that were measured on each number of GPUs."""
    longest = steps["context_length"].max()
    rows = steps[(steps["world_size"] > 1) & (steps["repeat"] == 0) & (steps["context_length"] == longest)]
    rows = rows[(rows["status"] == "ok") & (rows["dtype"] == rows["dtype"].iloc[:1].squeeze())] if len(rows) else rows
    rows = rows[[key in MANY for key in zip(rows["wrapper"], rows["bucket_mb"], strict=True)]]
    several = rows.groupby("world_size")["machine"].nunique().gt(1).any()
    out = {key: {"variant": name} for key, name in zip(MANY, _named(MANY), strict=True)}
    for head in ("step, ms", "exposed, ms", "scaling, %"):
        for (machine, gpus), part in rows.groupby(["machine", "world_size"], sort=False):
            where = f"{gpus} GPUs: {head}" + (f" ({machine})" if several else "")
            for row in part.itertuples():
                value = {"step, ms": row.step_ms_p50, "exposed, ms": row.exposed_ms}.get(head, 100 * row.scaling)
                out[row.wrapper, row.bucket_mb][where] = value
    return pd.DataFrame([line for line in out.values() if len(line) > 1])


def _named(keys: Sequence[tuple[str, float]]) -> list[str]:
    return [NAMES[wrapper] + (f", {mb:g} MB" if mb else "") for wrapper, mb in keys]


def everything(steps: pd.DataFrame) -> pd.DataFrame:
    """Every timed row, with its phases."""
    heads = {"machine": "machine", "world_size": "GPUs", "dtype": "dtype", "context_length": "context", "variant": "variant",
             "repeat": "repeat", "step_ms_p50": "step, ms", "step_ms_p20": "p20", "step_ms_p80": "p80",
             **{f"{p}_ms_p50": p for p in PHASES}, "exposed_ms": "exposed", "peak_gib": "peak, GiB"}  # fmt: skip
    return steps[steps["status"] == "ok"][list(heads)].rename(columns=heads)
