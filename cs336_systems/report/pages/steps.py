"""What the chapters about whole models show alike: times of phases, their spread, floors, throughput.

Rows are those of `experiments.steps.Case`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.measure.phases import each
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.roofs import Roofs, roofs
from cs336_systems.report.tables import EMPTY, distance, fmt
from cs336_systems.sizes import SIZES, size

PHASES = ("forward", "backward", "optimizer")
SHAPE = ["machine", "size", "context_length", "batch"]


def word(status: str) -> str:
    """What stands in a cell of a row without numbers."""
    return {"oom": "OOM", NOT_MEASURED: EMPTY}.get(status, status.split(":")[0])


def spread(row: Mapping[str, Any] | None, phase: str) -> str:
    """`"12.3 ± 0.1"`: mean and standard deviation of a phase in ms, or what the row's status says."""
    if row is None:
        return EMPTY
    if row["status"] != "ok":
        return word(row["status"])
    mean, std = row[f"{phase}_ms_mean"], row[f"{phase}_ms_std"]
    if pd.isna(mean):
        return EMPTY
    return f"{fmt(mean)} ± {fmt(std, 2)}"


def one(frame: pd.DataFrame, **where: Any) -> dict[str, Any] | None:
    """The row with these values as a dict; None where there is none. ValueError where there are several."""
    for field, value in where.items():
        frame = frame[frame[field] == value]
    if len(frame) > 1:
        raise ValueError(f"{where} is not one row but {len(frame)}; name more fields")
    return frame.iloc[0].to_dict() if len(frame) else None


def in_order(sizes: Any) -> list[str]:
    """Names of sizes, smallest first."""
    names = set(sizes)
    return [name for name in SIZES if name in names]


def flops(row: Mapping[str, Any]) -> float:
    """The FLOPs of all matrix products of the case."""
    return accounting.model_flops(size(row["size"]), row["batch"], row["context_length"], row["mode"])


def floor_ms(found: Roofs, row: Mapping[str, Any]) -> float | None:
    """What the matrix products of the case take at the machine's best measured rate for its dtype, in ms."""
    peak = found.tflops.get(row["dtype"])
    return None if peak is None else flops(row) / peak / 1e9


def phase_table(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """Forward without a graph, forward, backward, optimizer (mean ± std, ms), and what the whole step comes to.

    One line for each shape and dtype. Forward and backward are those of the training step, or, where that was not
    measured or did not fit, of mode forward_backward.
    """
    rows = chapter.rows(**where)
    keys = ["machine", "size", "context_length", "dtype"]
    out = []
    for key in rows[keys].drop_duplicates().itertuples(index=False):
        at = dict(zip(keys, key, strict=True))
        part = rows
        for field, value in at.items():
            part = part[part[field] == value]
        by_mode = {mode: one(part, mode=mode) for mode in accounting.MODES}
        both, whole = by_mode["forward_backward"], by_mode["train_step"]
        if both is None or (whole is not None and whole["status"] == "ok"):
            both = whole
        line = at | {
            "forward alone": spread(by_mode["forward"], "forward"),
            "forward": spread(both, "forward"),
            "backward": spread(both, "backward"),
            "optimizer": spread(whole, "optimizer"),
        }
        fine = whole is not None and whole["status"] == "ok"
        line["step"] = fmt(whole["step_ms_p50"]) if fine else word(whole["status"]) if whole else EMPTY
        line["tokens/s"] = fmt(whole["tokens_per_s"]) if fine else EMPTY
        mfu = whole["mfu"] if fine else None
        line["MFU"] = EMPTY if mfu is None or pd.isna(mfu) else f"{100 * mfu:.1f} %"
        line["context"] = line.pop("context_length")
        out.append(line)
    columns = [
        "machine", "size", "context", "dtype", "forward alone", "forward", "backward", "optimizer", "step", "tokens/s",
        "MFU",
    ]  # fmt: skip
    frame = pd.DataFrame(out, columns=columns)
    order = {name: place for place, name in enumerate(SIZES)}
    return frame.sort_values(
        ["machine", "context", "size", "dtype"], key=lambda c: c.map(order) if c.name == "size" else c,
        ignore_index=True, kind="stable",
    )  # fmt: skip


def passes(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each shape and dtype, with forward and backward: the training step's, else that of mode
    forward_backward."""
    found = rows[rows["mode"].isin(("train_step", "forward_backward"))]
    found = found.sort_values("mode", key=lambda mode: mode != "train_step", kind="stable")
    return found.drop_duplicates([*SHAPE, "dtype", "attention", "compile", "warmup", "repeat"]).sort_index()


def noise(rows: pd.DataFrame, metric: str = "step_ms_p50") -> pd.Series:
    """How far the two rows of each A/A pair lie apart (`tables.distance`)."""
    keys = [c for c in (*SHAPE, "mode", "dtype", "attention", "compile", "warmup", "run") if c in rows]
    both = rows[rows["repeat"] == 0].merge(rows[rows["repeat"] == 1], on=keys, suffixes=("", "_again"))
    return distance(both[f"{metric}_again"].astype(float) / both[metric].astype(float))


def noise_words(chapter: Chapter, metric: str = "step_ms_p50") -> str:
    """A sentence about the A/A pairs."""
    apart = noise(chapter.measured(), metric)
    if apart.empty:
        return f"Pairs of the same case: {NOT_MEASURED}."
    median, most = (f"{fmt(100 * x, 2)} %" for x in (apart.median(), apart.max()))
    if len(apart) == 1:
        what = f"One case was measured twice in one run (A/A): its medians lie {most} apart."
    else:
        what = (
            f"{len(apart)} cases were measured twice in one run (A/A): their medians lie {median} apart in the median,"
            f" and {most} at most."
        )
    return f"{what} No difference smaller than that means anything here."


def series(row: Mapping[str, Any], phase: str) -> list[float]:
    """Every measured step's time of a phase, in ms, in order."""
    return each(row[f"{phase}_ms_each"])


def turns_apart(*rows: Mapping[str, Any], phase: str = "step") -> float:
    """How far the medians of the two turns of a case lie apart (`tables.distance`), the most of some cases: the first
    half of its steps was measured before the other cases of its run, the second after them."""
    most = 0.0
    for row in rows:
        times = series(row, phase)
        first, second = times[: len(times) // 2], times[len(times) // 2 :]
        if first:
            most = max(most, distance(statistics.median(first) / statistics.median(second)))
    return most


def found_roofs(chapter: Chapter) -> dict[str, Roofs]:
    """Machine → its measured roofs."""
    return {machine: roofs(machine, chapter.root) for machine in chapter.machines}
