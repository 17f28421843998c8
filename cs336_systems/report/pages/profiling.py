"""What chapter `profiling` shows: the kernels of a step, by range, class and name. Its sentences are in
`profiling_words`."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.experiments.profiling import CLASS_COLUMNS, DRAWN, step_path
from cs336_systems.experiments.steps import WARM
from cs336_systems.measure.kernels import CLASSES, PRODUCT, SOFTMAX
from cs336_systems.measure.trace_step import Step
from cs336_systems.report import figures
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.tables import EMPTY, fmt
from cs336_systems.report.trace_figure import COLORS, step_figure
from cs336_systems.sizes import SIZES, size

PRIMARY = 512
PASSES = ("forward", "backward", "optimizer")
SOFTMAX_FLOPS = 5  # for each score: compare, subtract, exponentiate, add, divide
SHAPE = ["machine", "size", "context_length", "dtype"]
_SUMS = ("python_ms", "host_ms", "busy_ms", "idle_ms", "kernel_ms", "kernels", *CLASS_COLUMNS.values())


def rows(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """The chapter's rows, Nsight Systems' (or its stand-in's) where the tool was not chosen, in the order of sizes."""
    frame = chapter.rows(**({"tool": "auto"} | where))
    order = frame["size"].map(list(SIZES).index)
    return frame.assign(order=order).sort_values(
        ["machine", "dtype", "order", "context_length"], kind="stable"
    )


def primary(chapter: Chapter) -> int:
    """The context that single-context tables show: 512, or the longest there is."""
    lengths = set(chapter.rows()["context_length"])
    return PRIMARY if PRIMARY in lengths or not lengths else max(lengths)


def by_range(group: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The rows of one shape as range → row."""
    return {row["range"]: row for row in group.to_dict("records")}


def shapes(chapter: Chapter, **where: Any) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Every shape (machine, size, context, dtype) with its rows by range."""
    found = rows(chapter, **where)
    return [
        (dict(zip(SHAPE, key, strict=True)), by_range(group))
        for key, group in found.groupby(SHAPE, sort=False)
    ]


def ok(*found: dict[str, Any] | None) -> bool:
    """Whether all these rows were measured."""
    return all(row is not None and row["status"] == "ok" for row in found)


def together(*found: dict[str, Any]) -> dict[str, float]:
    """The sums of several ranges' rows."""
    return {column: sum(float(row[column]) for row in found if not pd.isna(row[column])) for column in _SUMS}


def longest(*found: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(name, class, calls, ms) of the kernels of these ranges taken together, the longest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row in found:
        for name, kind, calls, ms in json.loads(row["longest"]):
            entry = sums.setdefault((name, kind), [0.0, 0.0])
            entry[0] += calls
            entry[1] += ms
    return sorted(((*key, *value) for key, value in sums.items()), key=lambda use: -use[3])


def _head(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": shape["machine"], "size": shape["size"], "context": shape["context_length"], "dtype": shape["dtype"],
    }  # fmt: skip


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else EMPTY


def _word(row: dict[str, Any] | None) -> str:
    return EMPTY if row is None else steps.word(row["status"])


# ------------------------------------------------------------------------------------------------ (a)
def benchmarked(chapter: Chapter) -> dict[tuple[str, str, int, str], float]:
    """The forward pass of training steps by chapter `benchmarking` on the same machines, ms: shape → median."""
    if not chapter.machines:
        return {}
    other = Chapter("benchmarking", measure="no", machine=",".join(chapter.machines), root=chapter.root)
    found = other.measured(repeat=0, attention="reference", compile="off", batch=4)
    found = steps.passes(found[found["warmup"] >= WARM])
    return {tuple(row[field] for field in SHAPE): row["forward_ms_p50"] for row in found.to_dict("records")}


def timer_table(chapter: Chapter) -> pd.DataFrame:
    """Forward by the host's clock, here and in chapter `benchmarking`, by the trace's range, and the GPU's part."""
    out = []
    clocks = benchmarked(chapter)
    for shape, found in shapes(chapter):
        forward = found.get("forward")
        before = clocks.get(tuple(shape.values()))
        line = _head(shape) | {"benchmarking, ms": fmt(before), "clock, ms": _word(forward)}
        if ok(forward):
            line |= {
                "clock, ms": fmt(forward["python_ms"]),
                "range, ms": fmt(forward["host_ms"]),
                "range / clock": fmt(forward["host_ms"] / forward["python_ms"]),
                "GPU busy, ms": fmt(forward["busy_ms"]),
                "idle": f"{fmt(100 * forward['idle_ms'] / (forward['busy_ms'] + forward['idle_ms']))} %",
                "kernels": fmt(round(forward["kernels"])),
            }
        out.append(line)
    columns = [
        "machine", "dtype", "size", "context", "benchmarking, ms", "clock, ms", "range, ms", "range / clock",
        "GPU busy, ms", "idle", "kernels",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


# ------------------------------------------------------------------------------------------------ (b), (c)
def top_table(chapter: Chapter) -> pd.DataFrame:
    """The kernel with the most GPU time in forward, and in forward and backward together."""
    out = []
    for shape, found in shapes(chapter):
        forward, backward = found.get("forward"), found.get("backward")
        line = _head(shape) | {"first in forward": _word(forward)}
        if ok(forward):
            name, _, calls, ms = longest(forward)[0]
            line |= {
                "first in forward": f"`{name}`", "calls": fmt(round(calls)), "ms": fmt(ms),
                "share": _share(ms, forward["kernel_ms"]), "with backward": _word(backward),
            }  # fmt: skip
            if ok(forward, backward):
                both = longest(forward, backward)
                line |= {
                    "with backward": "the same" if both[0][0] == name else f"`{both[0][0]}`",
                    "its calls": fmt(round(both[0][2])),
                    "its share": _share(both[0][3], forward["kernel_ms"] + backward["kernel_ms"]),
                }
        out.append(line)
    columns = [
        "machine", "dtype", "size", "context", "first in forward", "calls", "ms", "share", "with backward", "its calls",
        "its share",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


def kernel_table(chapter: Chapter, name: str, where: str, top: int = 12, dtype: str = "fp32") -> pd.DataFrame:
    """The longest kernels of one range of one size at the primary context."""
    out = []
    for shape, found in shapes(chapter, size=name, context_length=primary(chapter), dtype=dtype):
        row = found.get(where)
        if not ok(row):
            continue
        for kernel, kind, calls, ms in longest(row)[:top]:
            out.append({
                "machine": shape["machine"], "kernel": f"`{kernel}`", "class": kind, "calls": fmt(round(calls)),
                "ms": fmt(ms), "share": _share(ms, row["kernel_ms"]),
            })  # fmt: skip
    return pd.DataFrame(out, columns=["machine", "kernel", "class", "calls", "ms", "share"])


# ------------------------------------------------------------------------------------------------ (d)
def share_table(chapter: Chapter) -> pd.DataFrame:
    """The share of matrix products: inference, forward and backward, the whole step with AdamW."""
    out = []
    for shape, found in shapes(chapter):
        inference = found.get("inference")
        line = _head(shape) | {"inference": _word(inference)}
        if ok(inference):
            line["inference"] = _share(inference[CLASS_COLUMNS[PRODUCT]], inference["kernel_ms"])
        for head, names in (
            ("forward", PASSES[:1]), ("backward", PASSES[1:2]), ("forward + backward", PASSES[:2]), ("step", PASSES),
        ):  # fmt: skip
            parts = [found.get(name) for name in names]
            if ok(*parts):
                sums = together(*parts)
                line[head] = _share(sums[CLASS_COLUMNS[PRODUCT]], sums["kernel_ms"])
            else:
                line[head] = next(_word(part) for part in parts if not ok(part))
        if ok(*(found.get(name) for name in PASSES)):
            whole = together(*(found[name] for name in PASSES))
            line["optimizer's share"] = _share(found["optimizer"]["kernel_ms"], whole["kernel_ms"])
        out.append(line)
    columns = [
        "machine", "dtype", "size", "context", "inference", "forward", "backward", "forward + backward", "step",
        "optimizer's share",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


def class_figure(chapter: Chapter, machine: str, dtype: str = "fp32") -> Figure:
    """For each size the kernels' time of inference and of the step by class, as shares."""
    drawn = []
    for shape, found in shapes(chapter, machine=machine, context_length=primary(chapter), dtype=dtype):
        for title, names in (("inference", ("inference",)), ("step", PASSES)):
            parts = [found.get(name) for name in names]
            if ok(*parts):
                sums = together(*parts)
                drawn.append(
                    (
                        f"{shape['size']}, {title}",
                        {k: sums[c] / sums["kernel_ms"] for k, c in CLASS_COLUMNS.items()},
                    )
                )
    figure, axes = figures.panels(height=max(2.0, 0.26 * len(drawn) + 1.0))
    ax = axes[0, 0]
    if not drawn:
        figures.nothing(ax)
        return figure
    left = [0.0] * len(drawn)
    for kind in CLASSES:
        widths = [100 * shares[kind] for _, shares in drawn]
        if max(widths) > 0.05:
            ax.barh(
                range(len(drawn)), widths, left=left, color=COLORS[kind], label=kind, height=0.72, zorder=3
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(drawn)), [name for name, _ in drawn])
    ax.invert_yaxis()
    ax.set(xlabel="share of the kernels' time, %", xlim=(0, 100))
    ax.grid(axis="y", visible=False)
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(5, len(names)))
    return figure


# ------------------------------------------------------------------------------------------------ (e)
def attention_flops(row: dict[str, Any]) -> tuple[int, int]:
    """FLOPs of one of attention's two products, and of its softmax, in one forward pass; every score, masked or not."""
    config = size(row["size"])
    scores = config.num_layers * row["batch"] * config.num_heads * row["context_length"] ** 2
    flops = accounting.forward_matmul_flops(config, row["batch"], row["context_length"])
    return flops["attention_scores"], SOFTMAX_FLOPS * scores


def attention_times(found: dict[str, dict[str, Any]]) -> tuple[float, float, float] | None:
    """ms of attention's products, its softmax and all its other kernels in one forward pass; None if not measured."""
    parts = [found.get(name) for name in ("scores", "softmax", "output")]
    if not ok(*parts):
        return None
    products = parts[0][CLASS_COLUMNS[PRODUCT]] + parts[2][CLASS_COLUMNS[PRODUCT]]
    inside = parts[1][CLASS_COLUMNS[SOFTMAX]]
    return products, inside, sum(row["kernel_ms"] for row in parts) - products - inside


def attention_table(chapter: Chapter) -> pd.DataFrame:
    """Softmax against the two products of attention in forward: time, FLOPs, and both ratios."""
    out = []
    for shape, found in shapes(chapter):
        softmax = found.get("softmax")
        line = _head(shape) | {"products, ms": _word(softmax)}
        if times := attention_times(found):
            products, inside, rest = times
            one, of_softmax = attention_flops(softmax)
            line |= {
                "products, ms": fmt(products), "softmax, ms": fmt(inside), "rest, ms": fmt(rest),
                "time ÷": fmt(inside / products) if products else EMPTY,
                "FLOPs ÷": fmt(of_softmax / (2 * one)),
                "product TFLOP/s": fmt(2 * one / products / 1e9) if products else EMPTY,
                "softmax TFLOP/s": fmt(of_softmax / inside / 1e9) if inside else EMPTY,
            }  # fmt: skip
        out.append(line)
    columns = [
        "machine", "dtype", "size", "context", "products, ms", "softmax, ms", "rest, ms",
        "time ÷", "FLOPs ÷", "product TFLOP/s", "softmax TFLOP/s",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


# ------------------------------------------------------------------------------------------------ tools, timeline
def tools_table(chapter: Chapter) -> pd.DataFrame:
    """The shape that both tools have recorded: kernels, their time, and what recording does to the host's."""
    frame = chapter.rows(status="ok")
    both = frame[frame["tool"] == "torch"]
    out = []
    for other in both.to_dict("records"):
        same = frame[(frame["tool"] == "auto") & (frame["source"] != other["source"])]
        for field in (*SHAPE, "batch", "range"):
            same = same[same[field] == other[field]]
        for row in same.to_dict("records"):
            out.append({
                "machine": row["machine"], "range": row["range"],
                f"kernels, {row['source']}": fmt(round(row["kernels"])),
                f"kernels, {other['source']}": fmt(round(other["kernels"])),
                f"kernel time, {row['source']}, ms": fmt(row["kernel_ms"]),
                f"kernel time, {other['source']}, ms": fmt(other["kernel_ms"]),
                f"range, {row['source']}, ms": fmt(row["host_ms"]),
                f"range, {other['source']}, ms": fmt(other["host_ms"]),
            })  # fmt: skip
    return pd.DataFrame(out)


def read_step(chapter: Chapter, machine: str, name: str, dtype: str = "fp32") -> Step | None:
    """The timeline that was kept of one step of a size at the primary context; None where there is none."""
    path = step_path(name, primary(chapter), dtype, machine, chapter.root)
    return Step.from_json(path) if machine and path.is_file() else None


def timeline_figure(chapter: Chapter, machine: str, name: str, dtype: str = "fp32") -> Figure:
    """The timeline of one step of a size at the primary context; says so where there is none."""
    if found := read_step(chapter, machine, name, dtype):
        return step_figure(found, f"{name}, context {primary(chapter)}, {dtype}")
    figure, axes = figures.panels(height=1.2)
    figures.nothing(axes[0, 0])
    axes[0, 0].set_axis_off()
    return figure


def drawn(chapter: Chapter) -> list[tuple[str, str]]:
    """The sizes and dtypes whose timelines the chapter keeps, among the chosen ones; fp32 first."""
    there = set(zip(chapter.rows()["size"], chapter.rows()["dtype"], strict=True))
    return [(name, dtype) for name, _, dtype in DRAWN if (name, dtype) in there]
