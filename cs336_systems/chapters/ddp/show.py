"""What chapter `ddp` shows: numeric frames and figures from its rows, and what is expected of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import chapters
from cs336_systems.chapters.ddp import accounting as closed
from cs336_systems.chapters.ddp.measure import ALONE, PHASES
from cs336_systems.chapters.shared.timelines import COLORS, kept, timelines_figure
from cs336_systems.report import Chapter, figures
from cs336_systems.report.tables import chosen, first_machine, in_order, looked_up, pivot
from cs336_systems.sizes import size

NAMES = {
    ALONE: "one GPU alone", "none": "no communication", "naive": "naive", "flat": "flat", "overlapped": "overlapped",
    "bucketed": "bucketed", "in_place": "in place", "torch": "torch DDP", "torch_view": "torch DDP, views",
}  # fmt: skip
TORCH = ("torch", "torch_view")  # wait for the last all-reduce inside their backward pass
SHOWN_MB = (0, 0.1, 100)  # 0: without buckets, or torch's default; 0.1: of the tiny model
_RUN = ["machine", "run", "size", "context_length", "batch", "dtype", "world_size"]


# ------------------------------------------------------------------------------------------------ what is expected
def messages(name: str, wrapper: str, bucket_mb: float = 0) -> list[int]:
    """Bytes of each all-reduce that one of our variants makes in a step of a model size, in the order of sending."""
    limit = math.inf if wrapper == "flat" else bucket_mb * closed.MB
    return closed.bucket_bytes(size(name), limit)


def all_reduces_ms(known: pd.DataFrame, sizes: Sequence[float]) -> float:
    """The time of all-reduces of these bytes, one after the other, by the rows of chapter `allreduce`: on a line in
    logarithms between two sizes, beyond the largest in proportion; NaN without rows."""
    if known.empty:
        return math.nan
    num_bytes, ms = known.sort_values("num_bytes")[["num_bytes", "ms_p50"]].to_numpy(float).T
    found = np.exp(np.interp(np.log(sizes), np.log(num_bytes), np.log(ms)))
    return float(np.sum(found * np.maximum(1, np.asarray(sizes) / num_bytes[-1])))


def _wait_ms(row: Any, reduces: pd.DataFrame) -> float:
    """The all-reduces that a variant should wait for after its backward pass: all, or the last if it overlaps."""
    if row.wrapper in (ALONE, "none", *TORCH) or row.status != "ok":
        return math.nan
    same = {"machine": row.machine, "world_size": row.world_size, "backend": row.backend}
    known = chosen(reduces, **same, how="all_reduce", repeat=0, status="ok")
    sent = messages(row.size, row.wrapper, row.bucket_mb)
    after = sent if row.wrapper == "naive" else sent[-1:]
    return all_reduces_ms(known, after)


# ------------------------------------------------------------------------------------------------------ rows
def beside(chapter: Chapter, name: str) -> pd.DataFrame:
    """The rows of another chapter on this chapter's machines."""
    other = chapters.read(name, root=chapter.root)
    return pd.concat([other.on(machine).rows() for machine in chapter.machines or [""]], ignore_index=True)


def steps(rows: pd.DataFrame, reduces: pd.DataFrame) -> pd.DataFrame:
    """The timed rows with what follows from them: by how much a step, and its backward pass, exceed those without
    communication in the same run; weak scaling (a step of one GPU alone over this one); the wait after the backward
    pass, and what its all-reduces should take by the rows of chapter `allreduce`."""
    out = rows[rows["kind"] == "time"].reset_index(drop=True)
    there = chosen(out, status="ok", repeat=0)
    sends = ~out["wrapper"].isin([ALONE, "none"])
    base = lambda wrapper, column: looked_up(there[there["wrapper"] == wrapper], column, out, _RUN)
    limits = [f", {mb:g} MB" if mb else "" for mb in out["bucket_mb"]]
    step, backward, wait = (out[f"{p}_ms_p50"].astype(float) for p in ("step", "backward", "synchronization"))
    return out.assign(
        variant=out["wrapper"].map(NAMES) + pd.Series(limits, dtype=object),
        exposed_ms=(step - base("none", "step_ms_p50")).where(sends),
        longer_ms=(backward - base("none", "backward_ms_p50")).where(sends),
        wait_ms=wait.where(sends & ~out["wrapper"].isin(TORCH)), scaling=base(ALONE, "step_ms_p50") / step,
        predicted_ms=[_wait_ms(row, reduces) for row in out.itertuples()],
    )  # fmt: skip


def first(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows of the fewest GPUs above one, and of the first precision."""
    steps = steps[(steps["world_size"] > 1) & (steps["repeat"] == 0)]
    steps = steps[steps["world_size"] == steps["world_size"].min()]
    return steps[steps["dtype"] == steps["dtype"].head(1).squeeze()] if len(steps) else steps


def main(steps: pd.DataFrame) -> pd.DataFrame:
    """Of these the longest context: where the GPU sets the pace, if it does anywhere."""
    steps = first(steps)
    return steps[steps["context_length"] == steps["context_length"].max()]


# ------------------------------------------------------------------------------------------------------ tables
def pace(steps: pd.DataFrame, zero: pd.DataFrame) -> pd.DataFrame:
    """How well a step without communication is known at each context: here, and in the rows of chapter `zero`; and how
    far one case measured twice lies apart."""
    none = first(steps)
    none = none[none["wrapper"] == "none"]
    both = steps.merge(steps[steps["repeat"] == 1], on=[*_RUN, "variant"], suffixes=("", "_again"))
    ratio = (both["step_ms_p50_again"] / both["step_ms_p50"]).astype(float)
    both = both.assign(apart=np.expm1(np.abs(np.log(ratio))))[both["repeat"] == 0]
    zero = chosen(zero, variant=ALONE, moment="timed", repeat=0)
    place = ["machine", "context_length", "world_size"]
    middle = none["step_ms_p50"].astype(float)
    return pd.DataFrame({
        "machine": none["machine"], "context": none["context_length"], "this run, ms": middle,
        "another run, ms": looked_up(zero, "step_ms_p50", none, place),
        "p20 to p80, % of the median": 100 * (none["step_ms_p80"] - none["step_ms_p20"]).astype(float) / middle,
        "same case twice, % apart": 100 * looked_up(both, "apart", none, _RUN),
    })  # fmt: skip


def variants(steps: pd.DataFrame) -> pd.DataFrame:
    """The step of each variant, and its exposed communication: during the backward pass, or after it."""
    rows = main(steps)
    rows = rows[rows["bucket_mb"].isin(SHOWN_MB) & (rows["wrapper"] != ALONE)]
    rows = in_order(rows, ["machine", "wrapper"], NAMES)
    table = pivot(rows.assign(head="step, ms"), ["machine", "variant"], "head", "step_ms_p50")
    table.insert(2, "all-reduces", rows["collectives"].astype("Float64").astype("Int64").array)
    heads = ("exposed, ms", "backward longer by, ms", "wait after it, ms", "predicted wait, ms")
    table[list(heads)] = rows[["exposed_ms", "longer_ms", "wait_ms", "predicted_ms"]].to_numpy(float)
    return table


def sweep(steps: pd.DataFrame) -> pd.DataFrame:
    """The step by size of buckets, with a buffer and in place; how many there are, and the last message in MB."""
    rows = main(steps).sort_values("bucket_mb")
    rows = rows[rows["wrapper"].isin(["bucketed", "in_place"])]
    rows = rows.assign(head=rows["wrapper"].map(NAMES) + ": step, ms")
    table = pivot(rows, ["machine", "bucket_mb"], "head", "step_ms_p50")
    sent = [messages(name, "bucketed", mb) for name in rows["size"].unique() for mb in table["bucket_mb"]]
    table.insert(2, "all-reduces", [len(m) for m in sent])
    table.insert(3, "last message, MB", [m[-1] / closed.MB for m in sent])
    table["bucket_mb"] = pd.to_numeric(table["bucket_mb"], downcast="integer")
    return table.rename(columns={"bucket_mb": "limit, MB"})


def scaling(steps: pd.DataFrame) -> pd.DataFrame:
    """Weak scaling at the longest context: the variants that were measured on each number of GPUs."""
    rows = steps[(steps["world_size"] > 1) & (steps["repeat"] == 0) & (steps["status"] == "ok")]
    rows = rows[rows["dtype"].isin(first(rows)["dtype"]) & (rows["wrapper"] != ALONE)]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    if rows.empty:
        return pd.DataFrame()
    team = rows["world_size"].map("{} GPUs".format)
    if rows.groupby(team)["machine"].nunique().max() > 1:
        team += " of " + rows["machine"]
    rows = rows.assign(team=team, percent=100 * rows["scaling"])
    heads = {"step_ms_p50": "step", "exposed_ms": "exposed", "percent": "scaling"}
    table = rows.set_index(["variant", "team"])[list(heads)].unstack("team").dropna(how="all", axis=1)
    table = table[table["step_ms_p50"].notna().all(axis=1)].sort_values(table.columns[:1].tolist())
    table.columns = [f"{heads[metric]}, {team}" for metric, team in table.columns]
    return table.reset_index()


def everything(steps: pd.DataFrame) -> pd.DataFrame:
    """Every timed row, with its phases."""
    heads = {
        "machine": "machine", "world_size": "GPUs", "dtype": "dtype", "context_length": "context",
        "variant": "variant", "repeat": "repeat", "step_ms_p50": "step", "step_ms_p20": "p20", "step_ms_p80": "p80",
        **{f"{phase}_ms_p50": phase for phase in PHASES}, "exposed_ms": "exposed", "peak_gib": "peak, GiB",
    }  # fmt: skip
    return steps[steps["status"] == "ok"][list(heads)].rename(columns=heads)


# ------------------------------------------------------------------------------------------------------ figures
def schematic() -> Figure:
    """When the gradients of eight layers are communicated: after the backward pass, each when it is ready, or in
    buckets."""
    layers, width = range(8, 0, -1), 0.55  # of an all-reduce; the backward pass of a layer takes 1
    sent = {
        "naive": [(8 + width * i, width, str(n)) for i, n in enumerate(layers)],
        "overlapped": [(i + 1, width, str(n)) for i, n in enumerate(layers)],
        "bucketed": [(i + 2, 2 * width - 0.1, f"{n}, {n - 1}") for i, n in enumerate(layers) if i % 2 == 0],
    }
    figure, ax = figures.panel(height=1.65, phone=6)
    for place, blocks in enumerate(sent.values()):
        y, end = 2.4 * place, sum(blocks[-1][:2])
        bars = [(y, "backward", i, 1, str(n)) for i, n in enumerate(layers)]
        bars += [(y, "exposed", 8, end - 8, ""), (y, "optimizer", end, 1.1, "update")]
        for lane, kind, start, length, text in bars + [(y + 1, "communication", *block) for block in blocks]:
            ax.barh(lane, length, 0.9, start, color=COLORS.get(kind, "#d9d9d9"), edgecolor="white", zorder=3)
            ax.text(start + length / 2, lane, text, color="white", ha="center", va="center", fontsize=8)
    names = [text for name in sent for text in (f"{name}: backward", "all-reduce")]
    ax.set_yticks([2.4 * i + lane for i in range(len(sent)) for lane in (0, 1)], names)
    ax.set(ylim=(6.4, -0.6), xticks=[])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    return figure


def sweep_figure(steps: pd.DataFrame, total_bytes: float, bytes_per_ms: float, call_ms: float) -> Figure:
    """By the size of buckets: exposed time beside the handout's model of so many bytes of gradients, bytes all-reduced
    in a millisecond, and ms a call; the wait beside the last message's time."""
    rows = first_machine(main(steps))
    rows = rows.assign(series=rows["wrapper"].map(NAMES))
    rows = rows[rows["wrapper"].isin(["bucketed", "in_place"])]
    ours = rows[rows["wrapper"] == "bucketed"]
    overheads = [closed.overhead_ms(total_bytes, bytes_per_ms, call_ms, n) for n in ours["collectives"]]
    modeled = ours.assign(series="the handout's model", exposed_ms=overheads)
    last = ours.assign(series="the last message", wait_ms=ours["predicted_ms"])
    figure, (axes,) = figures.panels(columns=2, height=2.15)
    figures.lines(axes[0], pd.concat([rows, modeled]), "bucket_mb", "exposed_ms", "series")
    figures.lines(axes[1], pd.concat([rows, last]), "bucket_mb", "wait_ms", "series")
    for ax, what in zip(axes, ("exposed communication", "wait after the backward pass"), strict=True):
        ax.set(title=f"{what}, ms", xlabel="limit of a bucket, MB")
        ax.legend(*ax.get_legend_handles_labels())
    return figure


def trace_figure(chapter: Chapter, wrappers: Sequence[str]) -> Figure:
    """One step of each of these variants on one scale of time: for each rank what computes, by phases, and NCCL's
    kernels; of the first machine that has the traces."""
    return timelines_figure(kept(chapter, wrapper=list(wrappers)), NAMES)
