"""What chapter `memory` shows: peaks beside their closed forms, what they consist of, timelines, the largest
allocations. Its sentences are in `memory_words`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.measure import rows as store
from cs336_systems.measure.memory_timeline import CATEGORIES, Timeline
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, status_words
from cs336_systems.report.memory_figure import GIB, MIB, largest_allocations, timeline_figure
from cs336_systems.report.tables import EMPTY, fmt
from cs336_systems.sizes import SIZES, ModelConfig, size

REFERENCE = "2.7B"  # the hyperparameters that the handout asks about
REFERENCE_CONTEXTS = (128, 256, 512)
MODES = {"forward": "forward, no graph", "forward_graph": "forward, graph kept", "train_step": "full step"}
DTYPES = ("fp32", "bf16")
KEYS = ("context_length", "mode", "dtype", "optimizer")
Row = Mapping[str, Any]


# --------------------------------------------------------------------------------------------- rows and closed forms
def primary(chapter: Chapter) -> str:
    """The largest model among the chosen cases."""
    chosen = {case.size for machine in chapter.machines or [""] for case in chapter.cases(machine)}
    return [name for name in SIZES if name in chosen][-1]


def contexts(chapter: Chapter) -> list[int]:
    """The context lengths of the largest model."""
    return sorted(set(chapter.rows(size=primary(chapter))["context_length"]))


def case_of(chapter: Chapter, row: Row) -> Any:
    """The case of a row, its numbers as Python's own."""
    texts = {field: row[field] for field in store.case_fields(chapter.experiment)}
    return chapter.experiment.Case(
        **{field: value if isinstance(value, str) else int(value) for field, value in texts.items()}
    )


def device_of(machine: str) -> str:
    """Where a machine's cases ran: autocast has other rules on a CPU."""
    return "cpu" if machine.startswith("cpu-") else "cuda"


def closed_form(chapter: Chapter, row: Row) -> tuple[str, dict[str, int]]:
    """The moment of a case's peak by the closed form, and what is alive then: item → bytes."""
    moments = chapter.experiment.predicted(case_of(chapter, row), device_of(row["machine"]))
    return max(moments.items(), key=lambda moment: sum(moment[1].values()))


def predicted_bytes(chapter: Chapter, row: Row) -> int:
    """A case's peak by the closed form."""
    return sum(closed_form(chapter, row)[1].values())


def unit(chapter: Chapter) -> tuple[str, int]:
    """In what the tables of the largest model count: GiB, or MiB for a tiny one."""
    return ("MiB", MIB) if accounting.num_parameters(size(primary(chapter))) < 16 * MIB else ("GiB", GIB)


def what(row: Row) -> str:
    """`"full step, foreach"`"""
    name = MODES[row["mode"]]
    return f"{name}, {row['optimizer']}" if row["optimizer"] != "fused" else name


def records(chapter: Chapter, **where: Any) -> list[dict[str, Any]]:
    """Rows as dicts, by machine, context, mode and optimizer; those that repeat another left out."""
    rows = chapter.rows(**{"size": primary(chapter), "repeat": 0} | where).to_dict("records")
    modes = list(MODES)
    return sorted(
        rows,
        key=lambda r: (r["machine"], r["context_length"], modes.index(r["mode"]), r["optimizer"] != "fused"),
    )


def one(chapter: Chapter, **where: Any) -> dict[str, Any] | None:
    """The one row of the first machine with these values; the optimizer is fused unless named."""
    machine = (chapter.machines or [""])[0]
    found = records(chapter, **{"machine": machine, "optimizer": "fused"} | where)
    assert len(found) < 2, where
    return found[0] if found else None


def measured(row: Row | None) -> bool:
    return row is not None and row["status"] == "ok"


def status_of(row: Row) -> str:
    return status_words(row["status"].split(":")[0])


def head_of(row: Row) -> dict[str, Any]:
    """The first columns of a table's line."""
    return {"machine": row["machine"] or EMPTY, "context": int(row["context_length"]), "what": what(row)}


def percent_above(measured_bytes: float, expected: float) -> str:
    return f"{fmt(100 * (measured_bytes / expected - 1), 2)} %"


# ------------------------------------------------------------------------------------------------ predictions
def prediction_table(chapter: Chapter) -> pd.DataFrame:
    """The closed form's peak of every case of the largest model, and the moment it falls in."""
    name, scale = unit(chapter)
    out: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in records(chapter, machine=(chapter.machines or [""])[0]):
        moment, items = closed_form(chapter, row)
        line = out.setdefault((row["context_length"], what(row)), head_of(row))
        line |= {
            f"{row['dtype']}, {name}": fmt(sum(items.values()) / scale),
            f"{row['dtype']}, moment": moment,
        }
    return pd.DataFrame(list(out.values())).drop(columns="machine")


# ------------------------------------------------------------------------------------------------ tables
def peak_table(chapter: Chapter, dtype: str, against: str | None = None) -> pd.DataFrame:
    """Measured peaks of the largest model in one dtype, beside the closed form; `against`: less another dtype's."""
    name, scale = unit(chapter)
    out = []
    for row in records(chapter, dtype=dtype):
        expected = predicted_bytes(chapter, row)
        line = head_of(row) | {f"peak, {name}": status_of(row), f"closed form, {name}": fmt(expected / scale)}
        line |= {"apart": EMPTY, "in stage": EMPTY}
        if measured(row):
            line[f"peak, {name}"] = fmt(row["peak_bytes"] / scale)
            line |= {"apart": percent_above(row["peak_bytes"], expected), "in stage": row["peak_stage"]}
        if against:
            other = one(
                chapter, **{key: row[key] for key in KEYS} | {"dtype": against, "machine": row["machine"]}
            )
            both = measured(row) and measured(other)
            more = (row["peak_bytes"] - other["peak_bytes"]) / scale if both else None
            line[f"minus {against}, {name}"] = fmt(more)
        out.append(line)
    return pd.DataFrame(out)


def expected_categories(chapter: Chapter, row: Row) -> dict[str, int]:
    """The closed form's items at the peak by the categories of a timeline: name → bytes.

    Autocast's copies of weights are let go with its cache where there is no graph, and with the graph where there is.
    The logits of a forward pass whose graph is kept are kept as well, and so no temporaries.
    """
    moment, items = closed_form(chapter, row)
    copies = "temporaries" if row["mode"] == "forward" else "activations"
    by_name = dict.fromkeys(CATEGORIES, 0) | {
        "weights": items["weights"], "optimizer state": items["optimizer_state"], "gradients": items["gradients"],
        "activations": items["saved_activations"], "temporaries": items["temporaries"],
    }  # fmt: skip
    by_name[copies] += items["autocast_copies"]
    if row["mode"] == "forward_graph" and moment == "logits":
        config, width = size(row["size"]), 2 if row["dtype"] == "bf16" else 4
        logits = width * int(row["batch"]) * int(row["context_length"]) * config.vocab_size
        by_name["temporaries"] -= logits
        by_name["activations"] += logits
    return by_name


def alive(chapter: Chapter, row: Row) -> dict[str, int]:
    """Category → bytes at the peak, or when memory ran out; without what is nothing."""
    there = {name: row[column] for name, column in chapter.experiment.CATEGORY_COLUMNS.items()}
    return {name: int(count) for name, count in there.items() if not pd.isna(count) and count > 0}


def alive_table(chapter: Chapter, dtype: str, **where: Any) -> pd.DataFrame:
    """What is alive at the peak: `measured / closed form` for each category that occurs, in `unit`."""
    _, scale = unit(chapter)
    rows = records(chapter, dtype=dtype, **where)
    found = [alive(chapter, row) if measured(row) else None for row in rows]
    expected = [expected_categories(chapter, row) for row in rows]
    shown = [n for n in CATEGORIES if any(e[n] for e in expected) or any(f and n in f for f in found)]

    def text(there: dict[str, int] | None, expected: int, name: str) -> str:
        counts = [None if there is None else there.get(name, 0), expected]
        texts = [EMPTY if n is None else fmt(n / scale) if n > scale / 2000 else "0" for n in counts]
        return EMPTY if texts == ["0", "0"] else " / ".join(texts)  # less than half a thousandth is nothing

    out = []
    for row, there, by_name in zip(rows, found, expected, strict=True):
        out.append(head_of(row) | {name: text(there, by_name[name], name) for name in shown})
    return pd.DataFrame(out)


def difference_table(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """From the closed form to the allocator's peak, MiB: what the closed form leaves out, by the code's own count."""
    out = []
    heads = ("workspaces", "tables, ids", "rest", "rounding", "peak", "reserved")
    for row in records(chapter, **where):
        moment, items = closed_form(chapter, row)
        expected = sum(items.values())
        line = head_of(row) | {"dtype": row["dtype"], "closed form": f"{expected / MIB:,.2f}"}
        line |= dict.fromkeys(heads, EMPTY) | {"peak": status_of(row)}
        if measured(row):
            workspaces, tables = row["before_recording_bytes"], left_out_bytes(case_of(chapter, row), moment)
            rest = row["requested_bytes"] - expected - workspaces - tables
            rounding = row["peak_bytes"] - row["requested_bytes"]
            numbers = (workspaces, tables, rest, rounding, row["peak_bytes"], row["reserved_bytes"])
            texts = (EMPTY if pd.isna(n) else f"{n / MIB:,.2f}".replace("-", "−") for n in numbers)
            line |= dict(zip(heads, texts, strict=True))
        out.append(line)
    return pd.DataFrame(out)


def left_out_bytes(case: Any, moment: str) -> int:
    """Tensors that the closed form leaves to the caller: rotary tables, and ids and targets outside of the graph."""
    tokens = 8 * case.batch * case.context_length  # int64
    in_graph = {"loss, backward": 2, "optimizer step": 0}.get(moment, 0 if case.mode == "forward" else 1)
    return 8 * case.context_length * size(case.size).d_head + (2 - in_graph) * tokens


def rounded_off_bytes(config: ModelConfig) -> int:
    """What fp32 weights keep of blocks of their own: the allocator asks the device for them in multiples of 2 MiB from
    10 MiB on, and splits nothing off that is no larger than 1 MiB."""
    d, layers = config.d_model, config.num_layers
    weights = ((4 * layers, d * d), (3 * layers, d * config.d_ff), (2, config.vocab_size * d))
    rest = [(count, -4 * n % (2 * MIB)) for count, n in weights if 4 * n >= 10 * MIB]
    return sum(count * left for count, left in rest if left <= MIB)


def tensor_names(config: ModelConfig, batch: int, sequence: int, dtype: str) -> dict[int, str]:
    """Bytes → the tensors of the forward pass that are as large: shape in the model's letters, and dtype."""
    elements = {
        "(B, S, D)": batch * sequence * config.d_model,
        "(B, S, F)": batch * sequence * config.d_ff,
        "(B, H, S, S)": batch * config.num_heads * sequence**2,
        "(B, S, V)": batch * sequence * config.vocab_size,
    }
    known = [(4 * n, f"{shape}, fp32") for shape, n in elements.items()]
    known += [(sequence**2, "(S, S), bool"), (4 * batch * sequence, "(B, S, 1), fp32")]
    if dtype == "bf16":
        weights = {"(D, D)": config.d_model**2, "(F, D)": config.d_ff * config.d_model}
        weights["(V, D)"] = config.vocab_size * config.d_model
        known += [(2 * n, f"{shape}, bf16") for shape, n in elements.items()]
        known += [(2 * n, f"{shape}, bf16 weight") for shape, n in weights.items()]
    out: dict[int, str] = {}
    for num_bytes, name in known:
        out[num_bytes] = f"{out[num_bytes]} or {name}" if num_bytes in out else name
    return out


def largest_table(
    chapter: Chapter, dtype: str, context_length: int, mode: str = "forward_graph"
) -> pd.DataFrame:
    """The largest allocations of a forward pass: size, how many, which tensors are as large, line, torch's function."""
    row = one(chapter, dtype=dtype, context_length=context_length, mode=mode)
    found = read_timeline(chapter, row)
    if found is None:
        return pd.DataFrame()
    stage = [s.name for s in found.stages if s.name.startswith("forward")][-1]
    table = largest_allocations(found, stage).drop(columns=["MiB", "allocated in"])
    case = case_of(chapter, row)
    names = tensor_names(size(case.size), case.batch, case.context_length, dtype)
    tensors = [names.get(round(mib * MIB), EMPTY) for mib in table["MiB each"]]
    table.insert(2, "tensor", tensors)
    table["line"] = [line.replace("cs336_systems/", "") for line in table["line"]]
    return table


def residual_table(chapter: Chapter, batch: int = 4) -> pd.DataFrame:
    """One tensor of the residual stream at the reference hyperparameters, and the largest allocation beside it."""
    config, out = SIZES[REFERENCE], []
    known = primary(chapter) == REFERENCE
    for context in REFERENCE_CONTEXTS:
        mib = accounting.residual_bytes(config, batch, context) / MIB
        row = one(chapter, context_length=context, mode="forward_graph", dtype="fp32") if known else None
        line = {
            "context": context,
            "derivation": f"{batch} · {context} · {config.d_model} · 4 / 2²⁰",
            "residual stream, MiB": fmt(mib),
        }
        line |= dict.fromkeys(("largest allocation, MiB", "in residual streams", "tensor"), EMPTY)
        if measured(row):
            names = tensor_names(config, batch, context, "fp32")
            largest = row["largest_bytes"] / MIB
            line |= {"largest allocation, MiB": fmt(largest), "in residual streams": fmt(largest / mib)}
            line["tensor"] = names.get(int(row["largest_bytes"]), EMPTY)
        elif row is not None:
            line["largest allocation, MiB"] = status_of(row)
        out.append(line)
    return pd.DataFrame(out)


def sizes_table(chapter: Chapter) -> pd.DataFrame:
    """Training steps of all sizes at the longest context: measured peak, closed form, bytes a parameter."""
    name, scale = unit(chapter)
    rows = chapter.rows(mode="train_step", context_length=contexts(chapter)[-1], optimizer="fused", repeat=0)
    heads = (name, "closed form", "B / parameter")
    empty = {f"{dtype}, {head}": EMPTY for dtype in DTYPES for head in heads}
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows.to_dict("records"), key=lambda r: (r["machine"], list(SIZES).index(r["size"]))):
        parameters = accounting.num_parameters(size(row["size"]))
        line = {
            "machine": row["machine"] or EMPTY,
            "size": row["size"],
            "parameters, M": fmt(parameters / 1e6),
        }
        line = out.setdefault((row["machine"], row["size"]), line | empty)
        texts = [status_of(row), fmt(predicted_bytes(chapter, row) / scale), EMPTY]
        if measured(row):
            texts[::2] = fmt(row["peak_bytes"] / scale), fmt(row["peak_bytes"] / parameters)
        line |= {f"{row['dtype']}, {head}": text for head, text in zip(heads, texts, strict=True)}
    return pd.DataFrame(list(out.values()))


# ------------------------------------------------------------------------------------------------ timelines
def read_timeline(chapter: Chapter, row: Row | None) -> Timeline | None:
    """The condensed timeline of a measured case; None without a row or a file.

    ValueError where the file is not of the row's recording: then one of the two comes from elsewhere.
    """
    if row is None or row["status"] not in ("ok", "oom"):
        return None
    path = chapter.experiment.timeline_path(case_of(chapter, row), row["machine"], chapter.root)
    if not path.is_file() or pd.isna(row["requested_bytes"]):
        return None
    found = Timeline.from_json(path)
    peak = chapter.experiment.peak_stage(found).peak.bytes
    if peak != row["requested_bytes"]:
        raise ValueError(
            f"{path} has a peak of {peak:,} bytes, the row of its case {row['requested_bytes']:,.0f}: they are not of"
            " the same run; take both from the same results, or measure the case again"
        )
    return found


def cropped(timeline: Timeline, first: str) -> Timeline:
    """The timeline from the beginning of a stage on."""
    names = [stage.name for stage in timeline.stages]
    if first not in names:
        raise ValueError(f"unknown stage {first!r}; allowed: {', '.join(names)}")
    stages = timeline.stages[names.index(first) :]
    place = timeline.events.index(stages[0].begin)
    return dataclasses.replace(
        timeline,
        events=timeline.events[place:],
        time_ms=timeline.time_ms[place:],
        bytes={name: values[place:] for name, values in timeline.bytes.items()},
        stages=stages,
        peak=max(stages, key=lambda stage: stage.peak.bytes).peak,
    )


def _why_not_drawn(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    return "its timeline was not kept" if row["status"] in ("ok", "oom") else status_of(row)


def case_figure(
    chapter: Chapter, mode: str, dtype: str, context_length: int, optimizer: str = "fused", zoom: bool = False
) -> Figure:
    """The timeline of one case of the largest model; with `zoom` the forward pass alone, from just below its least."""
    row = one(chapter, mode=mode, dtype=dtype, context_length=context_length, optimizer=optimizer)
    found = read_timeline(chapter, row)
    if found is None:
        figure, axes = figures.panels(height=1.4)
        figures.nothing(axes[0, 0], _why_not_drawn(row))
        return figure
    title = f"{row['size']}, context {context_length}, {what(row)}, {dtype}"
    if zoom:
        found = cropped(found, "forward")
    figure = timeline_figure(found, title)
    if zoom:
        low, high = found.total().min() / GIB, found.total().max() / GIB
        room = 0.12 * (high - low) or 0.01 * high
        figure.axes[0].set_ylim(low - room, high + room)
    return figure
