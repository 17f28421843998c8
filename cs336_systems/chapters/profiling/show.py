"""What chapter `profiling` shows: numeric frames and a figure from its rows.

`rows` are those of one tool. The frames have a row for each shape, named by the columns `SHAPE`; times are in ms, means
over the steps that were recorded; those of Python's timer are medians over as many steps before.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.benchmarking.show import primary as primary
from cs336_systems.chapters.profiling.figure import steps_figure
from cs336_systems.chapters.profiling.measure import CLASS_COLUMNS, DRAWN, TABLE, Case
from cs336_systems.measure.trace.condensed import Step
from cs336_systems.measure.trace.kernels import CAST, ELEMENTWISE, OPTIMIZER, PRODUCT, SOFTMAX
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.tables import escaped, pivot, spread
from cs336_systems.sizes import SIZES
from cs336_systems.store.rows import file_beside

SHAPE = ["machine", "size", "context_length", "dtype"]
PHASES = ("forward", "backward", "optimizer")
PARTS = {
    "inference": ("inference",), "forward": PHASES[:1], "backward": PHASES[1:2], "forward + backward": PHASES[:2],
    "step": PHASES,
}  # fmt: skip
SOFTMAX_FLOPS = 5  # for each score: compare, subtract, exponentiate, add, divide
SCORE_BYTES = 8  # read and written once, in fp32
KIND_HEADS = {
    PRODUCT: "GEMMs, %", ELEMENTWISE: "elementwise, %", CAST: "copies, casts, %", SOFTMAX: "softmax, %",
}  # fmt: skip
TIMER_HEADS = {
    "python_ms": "timer, ms", "host_ms": "nsys, ms", "ratio": "nsys / timer", "kernel_ms": "kernels, ms",
    "idle_pct": "GPU idle, %", "kernels": "launches",
}  # fmt: skip
ATTENTION_HEADS = {
    "gemm_ms": "GEMMs, ms", "softmax_ms": "softmax, ms", "rest_ms": "rest, ms", "time_ratio": "time, ×",
    "flops_pct": "FLOPs, %", "softmax_tb_s": "softmax, TB/s",
}  # fmt: skip
_SUMS = ["python_ms", "host_ms", "busy_ms", "idle_ms", "kernel_ms", "kernels", *CLASS_COLUMNS.values()]


def _within(rows: pd.DataFrame, *ranges: str) -> pd.DataFrame:
    """The rows of these ranges. ValueError for those of several tools: they count the same kernels."""
    if rows.duplicated([*SHAPE, "range"]).any():
        raise ValueError(f"rows of the tools {', '.join(sorted(set(rows['tool'])))}; expected those of one")
    return rows[rows["range"].isin(ranges)]


def sums(rows: pd.DataFrame, *ranges: str) -> pd.DataFrame:
    """The metrics of these ranges added up; missing where one of them is, with the status of that one."""
    found = _within(rows, *ranges).astype(dict.fromkeys(_SUMS, float))
    shapes = found.groupby(SHAPE, sort=False)
    out = shapes[_SUMS].sum(min_count=len(ranges))
    out["status"] = shapes["status"].agg(lambda each: next((word for word in each if word != "ok"), "ok"))
    return out.reset_index()


def _headed(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="status", errors="ignore").rename(columns={"context_length": "context"})


def timer(rows: pd.DataFrame, *ranges: str) -> pd.DataFrame:
    """The wall time of these ranges by Python's clock and in the trace, their ratio, kernel time, the share of the time
    from the first launch to the last kernel's end in which no kernel ran, and kernels launched."""
    found = sums(rows, *ranges)
    found = found.assign(
        ratio=found["host_ms"] / found["python_ms"],
        idle_pct=100 * found["idle_ms"] / (found["busy_ms"] + found["idle_ms"]),
    )
    return found[[*SHAPE, *TIMER_HEADS, "status"]]


def timer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`timer` of the forward pass, with heads."""
    found = timer(rows, "forward")
    found = found.assign(kernels=found["kernels"].round().astype("Int64"))
    return _headed(found).rename(columns=TIMER_HEADS)


def contexts_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The forward pass in fp32 over the contexts: wall time in the trace, and that over the timer's."""
    found = timer(rows, "forward")
    found = found[found["dtype"] == "fp32"]
    lengths = found["context_length"]
    heads = {"host_ms": lengths.map("{}, ms".format), "ratio": lengths.map("{}, ×".format)}
    return spread(found, ["machine", "size"], heads)


# ------------------------------------------------------------------------------------------------ kernels
def longest(rows: pd.DataFrame, *ranges: str) -> pd.DataFrame:
    """The longest kernels of these ranges taken together: name, class, calls per step, ms, percent of all kernel time;
    the longest first within a shape. Shapes that were not measured have none."""
    lines = []
    for key, found in _within(rows, *ranges).groupby(SHAPE, sort=False):
        if len(found) < len(ranges) or (found["status"] != "ok").any():
            continue
        uses: dict[tuple[str, str], list[float]] = {}
        for cell in found["longest"]:
            for name, kind, calls, ms in json.loads(html.unescape(cell)):
                use = uses.setdefault((escaped(name), escaped(kind)), [0.0, 0.0])
                use[0] += calls
                use[1] += ms
        total = found["kernel_ms"].sum()
        for (name, kind), (calls, ms) in sorted(uses.items(), key=lambda item: -item[1][1]):
            lines.append((*key, name, kind, round(calls), ms, 100 * ms / total))
    return pd.DataFrame(lines, columns=[*SHAPE, "kernel", "kind", "calls", "ms", "pct"])


def top(rows: pd.DataFrame, *ranges: str) -> pd.DataFrame:
    """The kernel with the most time in these ranges taken together."""
    return longest(rows, *ranges).drop_duplicates(SHAPE)


def top_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The kernel with the most time in forward, and in forward and backward together."""
    found = top(rows, "forward").merge(top(rows, *PHASES[:2]), on=SHAPE, how="left", suffixes=("", "_both"))
    return _headed(found[SHAPE]).assign(**{
        "forward": found["kernel"].map(short), "calls": found["calls"], "%": found["pct"],
        "with backward": found["kernel_both"].map(short), "its calls": found["calls_both"].astype("Int64"),
        "its %": found["pct_both"],
    })  # fmt: skip


def short(name: object) -> str:
    """A kernel's name without its architecture and types: `xmma_gemm_tn 128x128x8`."""
    left_out = r"^sm\d+_|_f32f32_f32f32_f32|_n(?= )|_80_simt|_align\d|_sm90_tst|_\dx\d_[hv]_bz(_coop[AB])?"
    return re.sub(left_out, "", str(name))


def kinds_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Kernel time of the forward pass, and the share of its classes in percent; the rest: memcpy, reductions, ..."""
    found = sums(rows, "forward")
    share = lambda kind: 100 * found[CLASS_COLUMNS[kind]] / found["kernel_ms"]
    table = found[SHAPE].assign(**{"kernels, ms": found["kernel_ms"]})
    table = table.assign(**{head: share(kind) for kind, head in KIND_HEADS.items()})
    return _headed(table.assign(**{"rest, %": 100 - table[[*KIND_HEADS.values()]].sum(axis=1, skipna=False)}))


def share_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The share of GEMMs in the kernel time of each part of a step, and AdamW's share of the step, in percent."""
    parts = [sums(rows, *ranges).assign(part=f"{name}, %", of=PRODUCT) for name, ranges in PARTS.items()]
    parts.append(sums(rows, *PHASES).assign(part="AdamW in step, %", of=OPTIMIZER))
    share = lambda part: 100 * part[CLASS_COLUMNS[part["of"].iloc[0]]] / part["kernel_ms"]
    parts = [part.assign(share=share) for part in parts if len(part)]
    return _headed(pivot(pd.concat(parts), SHAPE, "part", "share")) if parts else _headed(rows[SHAPE][:0])


# ------------------------------------------------------------------------------------------------ attention
def attention(rows: pd.DataFrame) -> pd.DataFrame:
    """Attention in the forward pass, all blocks: kernel time of its two GEMMs, its softmax, and the rest; softmax over
    GEMMs in time and in FLOPs (masked scores count); the rate at which softmax moves its scores."""
    of = lambda *ranges: sums(rows, *ranges).set_index(SHAPE)
    gemm = of("scores", "output")[CLASS_COLUMNS[PRODUCT]]
    softmax = of("softmax")[CLASS_COLUMNS[SOFTMAX]]
    batch = rows.groupby(SHAPE, sort=False)["batch"].first()
    scores, flops = (pd.Series(math.nan, gemm.index) for _ in range(2))
    for key in gemm.index:
        _, name, context, _ = key
        config = SIZES[name]
        scores[key] = config.num_layers * batch[key] * config.num_heads * context**2
        flops[key] = 2 * accounting.forward_matmul_flops(config, batch[key], context)["attention_scores"]
    return pd.DataFrame({
        "gemm_ms": gemm, "softmax_ms": softmax,
        "rest_ms": of("scores", "softmax", "output")["kernel_ms"] - gemm - softmax,
        "time_ratio": softmax / gemm, "flops_pct": 100 * SOFTMAX_FLOPS * scores / flops,
        "softmax_tb_s": SCORE_BYTES * scores / softmax / 1e9,
    }).reset_index()  # fmt: skip


def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`attention` with heads."""
    return _headed(attention(rows)).rename(columns=ATTENTION_HEADS)


# ------------------------------------------------------------------------------------------------ timeline
def timeline_figure(chapter: Chapter) -> Figure:
    """One step of the smallest size, in each dtype of which a timeline was kept; of the first machine."""
    there = set(chapter.rows()["size"])
    steps = {}
    for name, context, dtype in DRAWN:
        path = _kept(chapter, name, context, dtype)
        if name in there & {"small", "tiny"} and path.is_file():
            steps[f"{name}, context {context}, {dtype}"] = Step.from_json(path)
    return steps_figure(steps)


def trace_link(chapter: Chapter) -> str:
    """A link (HTML) that saves the kept step of the smallest size in bf16 as a trace for Perfetto."""
    name, context, dtype = DRAWN[2]
    path = _kept(chapter, name, context, dtype)
    if not path.is_file():
        return f"<em>{NOT_MEASURED}</em>"
    trace = json.dumps(Step.from_json(path).to_chrome(), separators=(",", ":")).encode()
    data = base64.b64encode(gzip.compress(trace, mtime=0)).decode()
    file = f"{path.stem}.trace.json.gz"
    return f'<a download="{file}" href="data:application/octet-stream;base64,{data}">{file}</a>'


def _kept(chapter: Chapter, name: str, context: int, dtype: str) -> Path:
    """Where the timeline of a step is, on the first machine."""
    case = Case(name, context, "step", dtype)
    return file_beside(TABLE, case, next(iter(chapter.machines), ""), chapter.root)
