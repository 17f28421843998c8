"""What chapter `memory` shows: numeric frames and figures from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.memory import measure as memory
from cs336_systems.chapters.memory.figure import GIB, MIB, cropped, draw, hover, largest_allocations
from cs336_systems.measure.memory.timeline import Timeline
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.tables import chosen, in_order, spread
from cs336_systems.report.values import Number
from cs336_systems.sizes import SIZES, ModelConfig, size
from cs336_systems.store.rows import case_fields, file_beside

REFERENCE = SIZES["2.7B"]  # the hyperparameters that the handout asks about
BATCH = 4
PASSES = {"forward": "forward, no graph", "forward_graph": "forward, graph kept", "train_step": "full step"}


# ---------------------------------------------------------------------------------------------- closed forms
def predicted_bytes(row: Mapping[str, Any]) -> int:
    """A case's peak by the closed form."""
    device = "cpu" if row["machine"].startswith("cpu-") else "cuda"  # autocast has other rules on a CPU
    return max(sum(items.values()) for items in memory.predicted(memory.TABLE.case_of(row), device).values())


def saved_mib(context_length: int, dtype: str) -> float:
    """What one block of the reference model saves for the backward pass."""
    return sum(accounting.saved_layer_bytes(REFERENCE, BATCH, context_length, dtype).values()) / MIB


def block_parameters() -> int:
    """Of the linear layers of one block of the reference model: their gradients take 4 bytes each, their bf16 copies
    2."""
    counts = accounting.parameter_counts(REFERENCE)
    return (counts["attention"] + counts["ffn"]) // REFERENCE.num_layers


# ---------------------------------------------------------------------------------------------------- tables
def largest_model(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest model, without other optimizers and repetitions."""
    rows = chosen(rows, optimizer="fused", repeat=0)
    names = [name for name in SIZES if name in set(rows["size"])]
    return rows[rows["size"] == names[-1]] if names else rows


def peaks(rows: pd.DataFrame) -> pd.DataFrame:
    """Peak memory beside its closed form, GiB: a line for each machine, size, context, pass and optimizer, a pair of
    columns for each precision. Size and optimizer are left out where there is one."""
    rows = rows[rows["repeat"] == 0]
    predicted = [predicted_bytes(row) / GIB for row in rows.to_dict("records")]
    ended = rows["peak_gib"].where(rows["status"] == "ok")  # without what a case held when memory ran out
    by = ["machine", "size", "context_length", "mode", "optimizer", "dtype"]
    rows = in_order(rows.assign(predicted=predicted, peak_gib=ended), by, SIZES, PASSES, memory.DTYPES)
    rows = rows.rename(columns={"context_length": "context"}).assign(**{"pass": rows["mode"].map(PASSES)})
    several = [name for name in ("size", "optimizer") if rows[name].nunique() > 1]
    index = ["machine", *several, "context", "pass"]
    words = {"predicted": " predicted", "peak_gib": ", GiB"}
    table = spread(rows, index, {column: rows["dtype"] + word for column, word in words.items()})
    return table[[*index, *(dtype + word for dtype in rows["dtype"].unique() for word in words.values())]]


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each case: how far, as a share of the closed form, the peak is above it, and how far what tensors request is
    off (without cuBLAS's workspaces); and these workspaces and what the allocator's rounding adds, in MiB."""
    predicted = [float(predicted_bytes(row)) for row in rows.to_dict("records")]
    columns = ("peak_bytes", "requested_bytes", "before_recording_bytes")
    peak, requested, workspaces = (pd.to_numeric(rows[name]) for name in columns)
    return pd.DataFrame({
        "peak above": peak / predicted - 1,
        "tensors off": ((requested - workspaces) / predicted - 1).abs(),
        "workspaces, MiB": workspaces / MIB,
        "rounding, MiB": (peak - requested) / MIB,
    })  # fmt: skip


def beside(chapter: Chapter, machine: str) -> pd.DataFrame:
    """The peak bytes of the cases that both the chapter's first machine and another have measured: `here`, `there`."""
    first = chapter.measured(machine=chapter.machines[:1])
    other = chapter.on(machine).measured()
    both = first.merge(other, on=case_fields(memory.TABLE), suffixes=("", "_there"))
    return pd.DataFrame({"here": both["peak_bytes"], "there": both["peak_bytes_there"]})


def largest(chapter: Chapter, **case: Any) -> pd.DataFrame:
    """The largest allocations of a forward pass: MiB of one, how many, what tensor is as large, what became of it, and
    the line of code. No rows without a recording."""
    row, found = recording(chapter, **case)
    if found is None:
        return pd.DataFrame(columns=["MiB each", "count", "tensor", "afterwards", "allocated in"])
    table = largest_allocations(found, [s.name for s in found.stages if s.name.startswith("forward")][-1])
    names = tensors(size(row["size"]), int(row["batch"]), int(row["context_length"]))
    kept = table["category"].map({"activations": "saved", "temporaries": "freed"}).fillna(table["category"])
    return pd.DataFrame({
        "MiB each": table["MiB"], "count": table["count"],
        "tensor": [names.get(round(mib * MIB)) for mib in table["MiB"]], "afterwards": kept,
        "allocated in": [f"`{line.removeprefix('cs336_systems/').partition(' ')[0]}`" for line in table["code"]],
    })  # fmt: skip


def tensors(config: ModelConfig, batch: int, sequence: int) -> dict[int, str]:
    """Bytes → the fp32 tensor of the forward pass that is as large, by its shape in the chapter's letters."""
    tokens = 4 * batch * sequence
    return {
        tokens * config.d_model: "(B, S, D)",
        tokens * config.vocab_size: "(B, S, V)",
        tokens * config.d_ff: "(B, S, F)",
        tokens * config.num_heads * sequence: "(B, H, S, S)",
    }


# ------------------------------------------------------------------------------------------------- timelines
def recording(chapter: Chapter, **case: Any) -> tuple[dict[str, Any], Timeline | None]:
    """The row of a case of the largest model on the first machine that has it, and its timeline; None without a file.

    ValueError where the file is not of the row's recording: then one of the two comes from elsewhere.
    """
    rows = largest_model(chapter.rows(**case))
    rows = rows[rows["status"].isin(["ok", "oom"]) & rows["requested_bytes"].notna()]
    for row in rows.to_dict("records"):
        path = file_beside(memory.TABLE, memory.TABLE.case_of(row), row["machine"], chapter.root)
        if not path.is_file():
            continue
        found = Timeline.from_json(path)
        peak, asked = memory.peak_stage(found).peak.bytes, row["requested_bytes"]
        if peak != asked:
            raise ValueError(
                f"{path} has a peak of {peak:,} bytes, its case's row {asked:,.0f}: they are not of the same run;"
                " take both from the same results, or measure the case again"
            )
        return row, found
    return {}, None


def first_step_gib(chapter: Chapter, context: int) -> Number:
    """GiB: the most that was active in the first of two recorded steps of the largest model in fp32."""
    _, found = recording(chapter, mode="train_step", dtype="fp32", context_length=context, optimizer="fused")
    first = [stage.peak.bytes for stage in found.stages if not stage.name.endswith(" 2")] if found else []
    return Number(max(first) / GIB) if first else Number(0, NOT_MEASURED)


def _drawn(chapter: Chapter, status: str = "ok") -> list[int]:
    """The contexts of steps whose timelines are kept; one at least. status: `ok`, or `oom` of those that do not fit."""
    rows = largest_model(chapter.rows(mode="train_step", status=status)).to_dict("records")
    return sorted({row["context_length"] for row in rows if memory.drawn(memory.TABLE.case_of(row))}) or [0]


def explore(chapter: Chapter, label: str) -> None:
    """The second step at the longest context under the mouse, on web pages; label: as `figure.hover`."""
    _, found = recording(chapter, mode="train_step", dtype="fp32", context_length=_drawn(chapter)[-1])
    if found is not None:
        figures.only_html(hover(cropped(found, "forward 2"), label))


def timelines_figure(chapter: Chapter) -> Figure:
    """Active memory in fp32: the forward pass without a graph at the longest context, beyond the weights; the second of
    two steps at the shortest and at the longest."""
    contexts = _drawn(chapter)
    short, long = contexts[0], contexts[-1]
    figure, axes = figures.panels(columns=2, rows=2, height=1.85, height_ratios=(1, 1.8))
    axes[0, 1].remove()
    axes[0, 0].set_subplotspec(axes[0, 0].get_gridspec()[0, :])
    _forward(axes[0, 0], chapter, long, f"forward pass without a graph, context {long}, beyond the weights")
    for ax, context in ((axes[1, 0], short), (axes[1, 1], long)):
        ax.set_title(f"second step, context {context}", pad=26)  # the names of the stages stand between
        _timeline(ax, chapter, "train_step", context, "forward 2")
    axes[1, 0].sharey(axes[1, 1])
    return figure


def longest_figure(chapter: Chapter) -> Figure:
    """Active memory in fp32 at the longest context at which a step does not fit: the forward pass without a graph,
    beyond the weights, and the first step until memory runs out."""
    context = _drawn(chapter, "oom")[-1]
    figure, axes = figures.panels(columns=2, height=2.0)
    _forward(axes[0, 0], chapter, context, "forward, beyond the weights")
    axes[0, 1].set_title("first step")
    _timeline(axes[0, 1], chapter, "train_step", context, "forward")
    return figure


def _forward(ax: Axes, chapter: Chapter, context: int, title: str) -> None:
    ax.set_title(title)
    _timeline(ax, chapter, "forward", context, "forward", ("before recording", "weights"))


def _timeline(
    ax: Axes, chapter: Chapter, mode: str, context: int, first: str, without: Sequence[str] = ()
) -> None:
    """The timeline of a case in fp32 from its stage `first` on, without some categories."""
    _, found = recording(chapter, mode=mode, dtype="fp32", context_length=context)
    if found is None:
        figures.nothing(ax)
        return
    draw(ax, cropped(found, first), without)
    ax.set_ylabel("GiB")
