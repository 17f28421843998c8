"""What chapter `ddp` shows: steps by every way of averaging gradients, what is exposed, what overlaps.

What is expected is in `ddp_predictions`, how even steps are and what they can tell in `ddp_pace`, the figures are in
`ddp_figures`, the sentences in `ddp_words`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.accounting import data_parallel as closed
from cs336_systems.experiments.ddp import ALONE, PHASES, Case, overlap_path
from cs336_systems.measure import trace_overlap
from cs336_systems.measure.trace_overlap import Overlap
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages.steps import word
from cs336_systems.report.tables import EMPTY, fmt, percent, whole
from cs336_systems.sizes import size

NAMES = {
    ALONE: "one rank alone", "none": "no communication", "naive": "naive", "flat": "flat", "overlapped": "overlapped",
    "bucketed": "bucketed", "in_place": "in place", "torch": "torch DDP", "torch_view": "torch DDP, views",
}  # fmt: skip
HEADS = dict(zip(PHASES, ("forward", "backward", "sync", "update"), strict=True))


# ------------------------------------------------------------------------------------------------------ rows
def way(row: Mapping[str, Any]) -> str:
    """What a case is called in tables: "bucketed, 25 MB"."""
    name = NAMES[row["wrapper"]]
    return f"{name}, {row['bucket_mb']:g} MB" if row["bucket_mb"] else name


def settings(chapter: Chapter) -> dict[str, Any]:
    """The number of ranks and the precision that the main tables show: those of the grid's first case."""
    rows = chapter.rows(kind="time")
    if rows.empty:
        return {"world_size": 2, "dtype": "tf32"}
    return {"world_size": int(rows.iloc[0]["world_size"]), "dtype": str(rows.iloc[0]["dtype"])}


def timed(chapter: Chapter, wrappers: Sequence[str] = (), **where: Any) -> list[dict[str, Any]]:
    """The rows of whole steps, not repeated, in the grid's order; those of some wrappers only, if they are named.

    Number of ranks and precision are those of `settings`, unless `where` says otherwise ("all" for all).
    """
    chosen = {k: v for k, v in {**settings(chapter), **where}.items() if v != "all"}
    rows = chapter.rows(kind="time", repeat=0, **chosen)
    return [r for r in rows.to_dict("records") if not wrappers or r["wrapper"] in wrappers]


def teams(chapter: Chapter) -> list[tuple[str, int]]:
    """Machines and numbers of ranks, two and more, of the steps in the main tables' precision that were measured; those
    of the main tables where none was."""
    main = settings(chapter)
    rows = chapter.measured(kind="time", dtype=main["dtype"])
    found = rows[rows["world_size"] > 1][["machine", "world_size"]].drop_duplicates()
    return [(m, int(n)) for m, n in found.itertuples(index=False)] or [
        (m, main["world_size"]) for m in chapter.machines
    ]


def ok(row: Mapping[str, Any] | None) -> bool:
    """Whether a row was measured."""
    return row is not None and row["status"] == "ok"


def mate(
    chapter: Chapter, row: Mapping[str, Any], wrapper: str, bucket_mb: float = 0.0
) -> dict[str, Any] | None:
    """The row of another way with the same shape in the same run; None unless both were measured."""
    if not ok(row):
        return None
    same = {k: row[k] for k in ("machine", "run", "size", "context_length", "batch", "dtype", "world_size")}
    found = chapter.measured(kind="time", repeat=0, wrapper=wrapper, bucket_mb=bucket_mb, **same)
    return found.iloc[0].to_dict() if len(found) == 1 else None


def exposed_ms(chapter: Chapter, row: Mapping[str, Any]) -> float | None:
    """The step's time less that of the same step without communication, in the same run; None if one is missing."""
    base = mate(chapter, row, "none")
    return None if base is None else float(row["step_ms_p50"] - base["step_ms_p50"])


def efficiency(chapter: Chapter, row: Mapping[str, Any]) -> float | None:
    """Weak scaling: the step of one rank alone over this one, in the same run; None if one is missing."""
    alone = mate(chapter, row, ALONE)
    return None if alone is None else closed.scaling_efficiency(alone["step_ms_p50"], row["step_ms_p50"])


def side_by_side(chapter: Chapter, context: int) -> list[tuple[str, float]]:
    """The ways, with the size of their buckets, that were measured at a context on every number of ranks above one."""
    ways: dict[int, set[tuple[str, float]]] = {}
    for row in timed(chapter, world_size="all", context_length=context):
        if row["world_size"] > 1 and ok(row):
            ways.setdefault(int(row["world_size"]), set()).add((row["wrapper"], row["bucket_mb"]))
    return sorted(set.intersection(*ways.values())) if ways else []


def contexts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The context lengths of rows, in their order."""
    return list(dict.fromkeys(int(row["context_length"]) for row in rows))


def _table(lines: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """These columns of the lines, a dash where a line lacks one."""
    return pd.DataFrame([[line.get(c, EMPTY) for c in columns] for line in lines], columns=list(columns))


# ------------------------------------------------------------------------------------------------ predictions
def model_of(chapter: Chapter) -> tuple[Any, int]:
    """The configuration of the chapter's model, and sequences a rank."""
    rows = chapter.rows()
    first = rows.iloc[0] if len(rows) else {"size": "xl", "batch": 2}
    return size(str(first["size"])), int(first["batch"])


def prediction_table(chapter: Chapter) -> pd.DataFrame:
    """All-reduces of a step, how large they are, and what each way holds besides one set of gradients."""
    config, _ = model_of(chapter)
    total = sum(closed.bucket_bytes(config, 0))
    out = []
    for row in timed(chapter):
        wrapper, mb = row["wrapper"], row["bucket_mb"]
        if row["context_length"] != contexts(timed(chapter))[0] or wrapper in (
            ALONE,
            "none",
            "torch",
            "torch_view",
        ):
            continue
        limit = {"flat": np.inf, "naive": 0, "overlapped": 0}.get(wrapper, mb * closed.MB)
        buckets = closed.bucket_bytes(config, limit)
        extra = {
            "flat": "all gradients once more",
            "bucketed": "one bucket's, while they are brought into it",
        }
        out.append({
            "way": way(row),
            "all-reduces": len(buckets),
            "largest, MB": fmt(max(buckets) / closed.MB),
            "last, MB": fmt(buckets[-1] / closed.MB),
            "held besides": extra.get(wrapper, "nothing"),
        })  # fmt: skip
    assert total > 0
    return pd.DataFrame(out, columns=["way", "all-reduces", "largest, MB", "last, MB", "held besides"])


# ------------------------------------------------------------------------------------------------------ tables
def step_table(chapter: Chapter, wrappers: Sequence[str] = (), **where: Any) -> pd.DataFrame:
    """The step of each way in ms: its median with quantiles, its phases, what of it is exposed communication."""
    out = []
    for row in timed(chapter, wrappers, **where):
        line = {"machine": row["machine"], "context": row["context_length"], "way": way(row)}
        if not ok(row):
            out.append(line | {"step": word(row["status"])})
            continue
        exposed = exposed_ms(chapter, row)
        step = row["step_ms_p50"]
        line |= {"step": fmt(step), "p20–p80": f"{fmt(row['step_ms_p20'])}–{fmt(row['step_ms_p80'])}"}
        line |= {HEADS[phase]: fmt(row[f"{phase}_ms_p50"]) for phase in PHASES}
        line |= {"calls": whole(row["collectives"])}
        if row["wrapper"] not in (ALONE, "none"):
            line |= {
                "exposed": fmt(exposed),
                "share": percent(None if exposed is None else exposed / step, 3),
            }
        out.append(line)
    columns = [
        "machine", "context", "way", "step", "p20–p80", *HEADS.values(), "calls", "exposed", "share",
    ]  # fmt: skip
    return _table(out, columns)


def summary_table(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """Throughput, weak scaling, time against no communication and against torch's DDP, and memory, of each way."""
    out = []
    config, batch = model_of(chapter)
    for row in timed(chapter, **where):
        line = {"machine": row["machine"], "ranks": row["world_size"], "dtype": row["dtype"]}
        line |= {"context": row["context_length"], "way": way(row)}
        if not ok(row):
            out.append(line | {"step, ms": word(row["status"])})
            continue
        step = row["step_ms_p50"]
        against = {}
        for name in ("none", "torch"):
            base = mate(chapter, row, name) if row["wrapper"] != ALONE else None
            against[name] = None if base is None else step / base["step_ms_p50"]
        line |= {"step, ms": fmt(step), "p20–p80": f"{fmt(row['step_ms_p20'])}–{fmt(row['step_ms_p80'])}"}
        line |= {"tokens/s": fmt(row["tokens_per_s"])}
        line |= {"scaling": percent(efficiency(chapter, row), 3) if row["wrapper"] != ALONE else EMPTY}
        line |= {f"over {name}": EMPTY if r is None else f"{r:.3f} ×" for name, r in against.items()}
        if not pd.isna(row["peak_gib"]):
            wrapper = "none" if row["wrapper"] == ALONE else row["wrapper"]
            predicted = closed.peak_bytes(
                config, batch, row["context_length"], "bf16" if row["dtype"] == "bf16" else "fp32", wrapper,
                row["bucket_mb"] * closed.MB,
            )  # fmt: skip
            line |= {"peak, GiB": fmt(row["peak_gib"]), "predicted": fmt(predicted / 2**30)}
        out.append(line)
    columns = [
        "machine", "ranks", "dtype", "context", "way", "step, ms", "p20–p80", "tokens/s", "scaling", "over none",
        "over torch", "peak, GiB", "predicted",
    ]  # fmt: skip
    return _table(out, columns)


def other_table(chapter: Chapter) -> pd.DataFrame:
    """`summary_table` of the numbers of ranks and precisions that are not those of the main tables, where any way was
    measured with them."""
    frame = summary_table(chapter, world_size="all", dtype="all")
    main = settings(chapter)
    frame = frame[(frame["ranks"] != main["world_size"]) | (frame["dtype"] != main["dtype"])]
    there = ~frame["step, ms"].isin(["skipped", EMPTY])
    frame = frame[there.groupby([frame["ranks"], frame["dtype"]]).transform("any")]
    empty = [c for c in ("scaling", "over torch") if (frame[c] == EMPTY).all()]
    return frame.drop(columns=["predicted", *empty]).reset_index(drop=True)


def trace_table(chapter: Chapter) -> pd.DataFrame:
    """What ran at the same time, by the traces: means over ranks and steps, in ms; `all ranks` of the step kept."""
    out = []
    kept = {machine: recorded(chapter, machine) for machine in chapter.machines}
    for row in chapter.rows(kind="trace").to_dict("records"):
        line = {"machine": row["machine"], "context": row["context_length"], "way": way(row)}
        if not ok(row):
            out.append(line | {"step": word(row["status"])})
            continue
        out.append(line | {
            "step": fmt(row["traced_ms"]),
            "computing": fmt(row["compute_ms"]),
            "communicating": fmt(row["communication_ms"]),
            "all ranks": fmt(together_ms(kept.get(row["machine"], {}).get(way(row), ()))),
            "both": fmt(row["overlap_ms"]),
            "in backward": fmt(row["backward_overlap_ms"]),
            "hidden": percent(row["overlap_ms"] / row["communication_ms"] if row["communication_ms"] else None, 3),
            "messages": whole(row["messages"]),
        })  # fmt: skip
    columns = [
        "machine", "context", "way", "step", "computing", "communicating", "all ranks", "both", "in backward",
        "hidden", "messages",
    ]  # fmt: skip
    return _table(out, columns)


# ------------------------------------------------------------------------------------------------- bucket model
def sweep(chapter: Chapter, machine: str, context: int, wrapper: str = "bucketed") -> list[dict[str, Any]]:
    """The measured rows of all bucket sizes at one context, with `exposed_ms`, smallest buckets first."""
    rows = [r for r in timed(chapter, (wrapper,), machine=machine, context_length=context) if ok(r)]
    rows = [row | {"exposed_ms": exposed_ms(chapter, row)} for row in rows]
    return sorted((r for r in rows if r["exposed_ms"] is not None), key=lambda r: r["bucket_mb"])


def fit(chapter: Chapter, rows: Sequence[Mapping[str, Any]], constant: bool) -> closed.Fit | None:
    """The model of the overhead fitted to a sweep; None where there are too few points."""
    total = sum(closed.bucket_bytes(model_of(chapter)[0], 0))
    points = [(float(row["collectives"]), row["exposed_ms"] / 1e3) for row in rows]
    if len({n for n, _ in points}) < (4 if constant else 3):
        return None
    return closed.fit_overhead(total, points, constant)


def bucket_table(chapter: Chapter) -> pd.DataFrame:
    """Exposed communication by bucket size, beside the fitted model with and without a constant."""
    total = sum(closed.bucket_bytes(model_of(chapter)[0], 0))
    out = []
    for machine in chapter.machines:
        for context in contexts(timed(chapter, ("bucketed",))):
            rows = sweep(chapter, machine, context)
            fits = [fit(chapter, rows, constant) for constant in (False, True)]
            for row in rows:
                n = float(row["collectives"])
                buckets = closed.bucket_bytes(model_of(chapter)[0], row["bucket_mb"] * closed.MB)
                fitted = [EMPTY if f is None else fmt(f.overhead_s(n) * 1e3) for f in fits]
                out.append({
                    "machine": machine, "context": context, "bucket": fmt(row["bucket_mb"]), "calls": int(n),
                    "mean": fmt(total / n / closed.MB), "last": fmt(buckets[-1] / closed.MB),
                    "step": fmt(row["step_ms_p50"]), "exposed": fmt(row["exposed_ms"]),
                    "model": fitted[0], "with constant": fitted[1],
                })  # fmt: skip
    return pd.DataFrame(out)


def fit_table(chapter: Chapter) -> pd.DataFrame:
    """What least squares finds for the model's parameters in each sweep, the optimum, and how far the fit is off."""
    out = []
    for machine in chapter.machines:
        for context in contexts(timed(chapter, ("bucketed",))):
            rows = sweep(chapter, machine, context)
            for constant in (False, True):
                found = fit(chapter, rows, constant)
                if found is None:
                    continue
                line = {
                    "machine": machine,
                    "context": context,
                    "fit": "with constant" if constant else "model",
                }
                if found.model is not None:
                    line |= {
                        "w, GB/s": fmt(found.model.bytes_per_s / 1e9),
                        "best number": fmt(found.model.best_num_buckets),
                        "best MB": fmt(found.model.best_bucket_bytes / closed.MB),
                    }
                if found.call_s > 0:
                    line |= {"o, µs": fmt(found.call_s * 1e6)}
                if constant:
                    line |= {"constant": fmt(found.constant_s * 1e3)}
                off = np.sqrt(np.mean(np.square(found.residuals_s))) * 1e3
                out.append(line | {"off by": fmt(float(off))})
    return _table(
        out, ["machine", "context", "fit", "w, GB/s", "o, µs", "best number", "best MB", "constant", "off by"]
    )


def together_ms(ranks: Sequence[Overlap]) -> float | None:
    """The time in which communication ran on all ranks at once, in ms; None without two of them.

    About: gaps too short to see are closed in what is kept, and each rank's step begins at a zero of its own.
    """
    if len(ranks) < 2:
        return None
    common = list(ranks[0].communication)
    for step in ranks[1:]:
        both, i, j, other = [], 0, 0, step.communication
        while i < len(common) and j < len(other):
            ends = common[i][0] + common[i][1], other[j][0] + other[j][1]
            start = max(common[i][0], other[j][0])
            if min(ends) > start:
                both.append((start, min(ends) - start))
            i, j = (i + 1, j) if ends[0] <= ends[1] else (i, j + 1)
        common = both
    return sum(length for _, length in common) / 1e6


def recorded(chapter: Chapter, machine: str) -> dict[str, list[Overlap]]:
    """The condensed steps of the traced ways, all ranks of each, in the grid's order."""
    found = {}
    for row in chapter.rows(kind="trace", machine=machine).to_dict("records"):
        fields = {field: row[field] for field in Case.__dataclass_fields__}
        path = overlap_path(Case(**fields), machine, chapter.root)
        if ok(row) and path.is_file():
            found[way(row)] = trace_overlap.from_json(path)
    return found
