"""What chapter `fsdp` shows: numeric frames and figures from its rows, beside the closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.accounting import fsdp as closed
from cs336_systems.chapters.fsdp.measure import HELD, WRAPPERS
from cs336_systems.chapters.shared.timelines import kept, timelines_figure
from cs336_systems.report import Chapter
from cs336_systems.report.tables import chosen, first_machine, in_order, looked_up, pivot
from cs336_systems.sizes import size

GIB = 2**30
NAMES = {
    "ddp": "DDP, in place", "sharded": "DDP, sharded optimizer", "fsdp": "FSDP by blocks",
    "fsdp_layers": "FSDP by layers", "fsdp2": "torch FSDP2", "fsdp2_two": "torch FSDP2, two ahead",
}  # fmt: skip
YEARS = {"xl": "2025's xl", "2.7B": "2026's xl"}
_PLACE = ["machine", "size", "context_length", "dtype"]


def peak_bytes(
    name: str, context: int, kind: str, dtype: str, ranks: int = 2, batch: int = 2
) -> dict[str, int]:
    """Component → bytes at the peak of a step, by the closed form for the chapter's attention."""
    kinds = ("bf16", "flash") if dtype == "bf16" else ("fp32", "reference")
    return closed.step_peak_bytes(size(name), batch, context, kind, ranks, *kinds)


def kind_of(wrapper: str) -> str:
    """What a wrapper shards, as the closed forms name it."""
    return wrapper if wrapper in closed.KINDS else "fsdp"


# ------------------------------------------------------------------------------------------------ rows
def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The timed rows in order, with `of_fsdp2`, the step over that of torch's FSDP2 at its better prefetch, and
    `off_ddp`, by how much of it the loss differs from DDP's, in the same run; and the closed form's peak."""
    out = in_order(rows[rows["kind"] == "time"], [*_PLACE, "wrapper", "repeat"], ["xl", "2.7B"], WRAPPERS)

    def least(wrappers: Sequence[str], column: str) -> np.ndarray:
        """Of these wrappers, in the run of each row."""
        found = out[out["wrapper"].isin(wrappers) & (out["repeat"] == 0)].astype({column: float})
        found = found.groupby([*_PLACE, "run"], as_index=False)[column].min()
        return looked_up(found, column, out, [*_PLACE, "run"])

    peaks = [
        sum(peak_bytes(r.size, r.context_length, kind_of(r.wrapper), r.dtype, r.world_size, r.batch).values())
        for r in out.itertuples()
    ]
    return out.assign(
        variant=out["wrapper"].map(NAMES), place=[_place(r) for r in out.itertuples()],
        of_fsdp2=out["step_ms_p50"].astype(float) / least(("fsdp2", "fsdp2_two"), "step_ms_p50"),
        off_ddp=(out["loss"].astype(float) / least(("ddp",), "loss") - 1).abs(),
        closed_bytes=pd.Series(peaks, dtype=float),
    )  # fmt: skip


def _place(row: Any) -> str:
    return f"{YEARS.get(row.size, row.size)}, {row.context_length}"


# ------------------------------------------------------------------------------------------------ tables
def times(steps: pd.DataFrame) -> pd.DataFrame:
    """The step of each wrapper, a column for each size and context."""
    return pivot(steps[steps["repeat"] == 0], ["machine", "variant"], "place", "step_ms_p50")


def memory(steps: pd.DataFrame) -> pd.DataFrame:
    """What a rank holds by its tensors; what is allocated at the update, and the peak beside its closed form."""
    rows = steps[steps["repeat"] == 0]
    columns = {f"{name}_bytes": name.removeprefix("optimizer_") for name in HELD}
    columns |= {"after_bytes": "allocated", "peak_bytes": "peak", "closed_bytes": "closed form"}
    return pd.DataFrame({
        **({"machine": rows["machine"]} if rows["machine"].nunique() > 1 else {}),
        "model, context": rows["place"], "variant": rows["variant"],
        **{f"{head}, GiB": rows[column].astype(float) / GIB for column, head in columns.items()},
    })  # fmt: skip


def expected(reduces: pd.DataFrame, tflops: float, contexts: Sequence[int]) -> pd.DataFrame:
    """For 2026's xl in bf16 with two sequences on each of two GPUs: the FLOPs of forward and backward at this rate, and
    what they send at the bandwidth of the largest all-reduce, in ms; NaN without either."""
    config, rate, lines = size("2.7B"), bytes_per_ms(reduces), []
    sent = closed.sent_bytes(config, "fsdp", 2, 2)
    for context in contexts:
        forward, both = (
            accounting.model_flops(config, 2, context, mode) / tflops / 1e9
            for mode in ("forward", "forward_backward")
        )
        lines.append({
            "context": context, "forward: compute, ms": forward, "forward: gathers, ms": sent["forward"] / rate,
            "backward: compute, ms": both - forward, "backward: communication, ms": sent["backward"] / rate,
        })  # fmt: skip
    return pd.DataFrame(lines)


def bytes_per_ms(reduces: pd.DataFrame) -> float:
    """What a GPU sends of the largest all-reduce of two, in bytes for a millisecond, on the first machine that has one;
    NaN without rows."""
    two = chosen(reduces, world_size=2, backend="nccl", how="all_reduce", repeat=0, status="ok")
    two = first_machine(two).sort_values("num_bytes")
    if two.empty:
        return math.nan
    return float(two["num_bytes"].iloc[-1]) / float(two["ms_p50"].iloc[-1])  # 2 · (N - 1)/N = 1


def traces(rows: pd.DataFrame) -> pd.DataFrame:
    """When communication was exposed in the traced steps, on the rank where most was."""
    rows = in_order(rows[rows["kind"] == "trace"], [*_PLACE, "wrapper"], ["xl", "2.7B"], WRAPPERS)
    columns = {
        "forward_gathers": "gathers", "forward_gather_ms": "they take, ms", "forward_late": "late",
        "traced_ms": "step, ms", "forward_exposed_ms": "exposed: forward, ms", "backward_exposed_ms": "backward, ms",
    }  # fmt: skip
    found = {head: rows[column].astype(float) for column, head in columns.items()}
    return pd.DataFrame({
        "machine": rows["machine"], "model, context": [_place(r) for r in rows.itertuples()],
        "variant": rows["wrapper"].map(NAMES), **found,
        "exposed, %": 100 * rows["exposed_ms"].astype(float) / rows["traced_ms"].astype(float),
    })  # fmt: skip


def everything(steps: pd.DataFrame) -> pd.DataFrame:
    """Every timed row, with its phases."""
    heads = {
        "machine": "machine", "place": "model, context", "variant": "variant", "repeat": "repeat",
        "step_ms_p50": "step", "step_ms_p20": "p20", "step_ms_p80": "p80", "forward_ms_p50": "forward",
        "backward_ms_p50": "backward", "synchronization_ms_p50": "synchronization", "optimizer_ms_p50": "optimizer",
        "tokens_per_s": "tokens/s", "of_fsdp2": "of FSDP2", "loss": "loss",
    }  # fmt: skip
    return steps[steps["status"] == "ok"][list(heads)].rename(columns=heads)


# ------------------------------------------------------------------------------------------------ figures
def trace_figure(chapter: Chapter, context: int) -> Figure:
    """One step of each traced wrapper at a context, of the first machine that has the traces."""
    return timelines_figure(kept(chapter, context_length=context), NAMES)


def drawn(chapter: Chapter, context: int, wrapper: str) -> pd.DataFrame:
    """A line for each rank in that figure: its step, and the communication in it during which nothing else ran."""
    ranks = kept(chapter, context_length=context).get(wrapper, [])
    return pd.DataFrame({
        "step_ms": [step.length_ms for step in ranks],
        "exposed_ms": [step.communication_ms - step.overlap_ms for step in ranks],
    })  # fmt: skip
