"""What chapter `attention` shows: numeric frames and figures from its rows, and the closed forms beside them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.attention.measure import BATCH, PARTS
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.report import figures, tables
from cs336_systems.report.figures import label

PLAIN, COMPILED, OURS = "reference", "reference_compiled", "flash_triton"
BYTES = {"fp32": 4, "bf16": 2}
GIB = 2**30
_FORMS = {PLAIN: "reference", COMPILED: "compiled"}  # what `accounting` calls them
_SCORES = ("A", "S", "P", "dP", "P∘dP", "dS", "dA")  # its tensors with a number for each pair of tokens
_GEMMS = ("A", "O", "dV", "dP", "dK", "dQ")  # what the GEMMs of both passes make


# -------------------------------------------------------------------------------------------- closed forms
def _shape(head_dim: int, seq_len: int, dtype: str) -> tuple[int, int, int, int, int]:
    return BATCH, int(seq_len), int(seq_len), int(head_dim), BYTES[dtype]


def _form(impl: str, kernels: Any = "portable") -> str:
    """What `accounting` calls an implementation: ours by the kernels that ran."""
    return _FORMS.get(impl) or (f"flash_{kernels}" if kernels in ("hopper", "split") else "flash")


def moments(head_dim: int, seq_len: int, dtype: str) -> pd.DataFrame:
    """What plain attention holds on a GPU when each operation ends, in GiB: matrices of scores (by name, and their
    number), everything else, the sum."""
    found = accounting.attention_moments(*_shape(head_dim, seq_len, dtype), "reference")
    matrix = BATCH * seq_len**2 * BYTES[dtype]
    out = []
    for moment, tensors in found.items():
        names = [name for name in tensors if name in _SCORES]
        linear, total = sum(tensors[n] for n in tensors if n not in names), sum(tensors.values())
        out.append({
            "when": moment, "scores alive": ", ".join(names) or tables.EMPTY, "matrices": (total - linear) // matrix,
            "all tensors, GiB": total / GIB,
        })  # fmt: skip
    return pd.DataFrame(out)


def predicted_gib(row: Any) -> dict[str, float]:
    """The closed forms for a row, in GiB, with its measured workspaces: `before` backward, and at the `peak`."""
    shape = _shape(row.head_dim, row.seq_len, row.dtype)
    found = accounting.attention_moments(*shape, _form(row.impl, row.backward_kernels))
    sums = {moment: sum(tensors.values()) / GIB + row.workspace_gib for moment, tensors in found.items()}
    return {"before": sums[accounting.BEFORE_BACKWARD], "peak": max(sums.values())}


def matrix_gib(seq_len: int, dtype: str) -> float:
    """One matrix of scores."""
    return BATCH * seq_len**2 * BYTES[dtype] / GIB


def longest(gib: float, head_dim: int, dtype: str, impl: str = PLAIN) -> int:
    """The longest sequence whose tensors, by the closed form, fit into so much memory."""
    peak = lambda n: accounting.attention_peak_bytes(*_shape(head_dim, n, dtype), _form(impl))
    return bisect.bisect_right(range(1, 2**22), gib * GIB, key=peak)


def kernel_floors(row: Any, part: str, found: Mapping[str, Roofs]) -> pd.Series:
    """Kernel → the least ms that it takes by its machine's roofs; NaN without them."""
    roof, form = found.get(row.machine, Roofs()), _form(row.impl, getattr(row, f"{part}_kernels"))
    kernels = accounting.attention_kernels(*_shape(row.head_dim, row.seq_len, row.dtype), form, part)
    rates = [roof.tflops.get(row.dtype, math.nan)]
    if row.impl == OURS and row.dtype == "fp32":  # three matmuls in TF32, or six in bf16, for one in fp32
        rates += [roof.tflops[t] / count for t, count in (("tf32", 3), ("bf16", 6)) if t in roof.tflops]
    least = lambda k: accounting.roofline_ms(k.flops, k.num_bytes, max(rates), roof.tb_per_s or math.nan)
    return pd.Series({kernel.name: least(kernel) for kernel in kernels}, dtype=float)


# ------------------------------------------------------------------------------------------------- frames
def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms of plain attention on the whole GPU: a line for each dtype, pass and d, a column for each length."""
    chosen = tables.chosen(rows, impl=PLAIN, cap_gib=0, repeat=0)
    both = [chosen.assign(**{"pass": part, "ms": chosen[f"{part}_ms_p50"]}) for part in PARTS]
    long = pd.concat(both).rename(columns={"head_dim": "d"})
    long = tables.in_order(long, ["dtype", "pass", "d", "seq_len"], BYTES, PARTS)
    return tables.pivot(long, ["machine", "dtype", "pass", "d"], "seq_len", "ms")


def before_backward(rows: pd.DataFrame) -> pd.DataFrame:
    """GiB in use before the backward pass of plain attention, or that a pass ran out of memory: a line for each dtype,
    cap and d, a column for each length."""
    chosen = tables.chosen(rows, impl=PLAIN, repeat=0)
    chosen = tables.in_order(chosen, ["dtype", "cap_gib", "head_dim", "seq_len"], BYTES)
    chosen = chosen.assign(
        d=chosen["head_dim"],
        GiB=chosen["before_backward_gib"].where(chosen["status"] == "ok"),
        **{"cap, GiB": chosen["cap_gib"].astype(object).replace(0, "none")},
    )
    return tables.pivot(chosen, ["machine", "dtype", "cap, GiB", "d"], "seq_len", "GiB")


def peaks(rows: pd.DataFrame, head_dim: int, seq_len: int, dtype: str, cap_gib: int) -> pd.DataFrame:
    """GiB before backward and at the peak, predicted and measured, of each implementation at one shape; and the peak
    under a cap, or that it ran out of memory."""
    shape = {"head_dim": head_dim, "seq_len": seq_len, "dtype": dtype}
    chosen = tables.chosen(rows, **shape, cap_gib=[0, cap_gib], repeat=0)
    names = {0: "peak", cap_gib: f"peak, cap {cap_gib} GiB"}
    chosen = chosen.assign(
        implementation=chosen["impl"].map(label),
        cap=chosen["cap_gib"].map(names),
        GiB=chosen["peak_gib"].where(chosen["status"] == "ok"),
    )
    frame = tables.pivot(chosen, ["machine", "implementation"], "cap", "GiB")
    free = chosen[chosen["cap_gib"] == 0].set_index(["machine", "implementation"])
    free = free.reindex(pd.MultiIndex.from_frame(frame[["machine", "implementation"]]))
    known = [predicted_gib(row) if pd.notna(row.impl) else {} for row in free.itertuples()]
    frame.insert(2, "before, predicted", [k.get("before", math.nan) for k in known])
    frame.insert(3, "before", free["before_backward_gib"].to_numpy(float))
    frame.insert(4, "peak, predicted", [k.get("peak", math.nan) for k in known])
    return frame


def misses(rows: pd.DataFrame) -> pd.Series:
    """Of every row that ran: how far the measured memory lies from the closed forms, as a share, the larger of the two
    moments."""
    found = rows[(rows["status"] == "ok") & rows["peak_gib"].notna()]
    forms = pd.DataFrame(
        [predicted_gib(row) for row in found.itertuples()], columns=["before", "peak"], index=found.index
    )
    measured = found[["before_backward_gib", "peak_gib"]].astype(float).set_axis(forms.columns, axis=1)
    return (measured / forms - 1).abs().max(axis=1)


def floors(rows: pd.DataFrame, found: Mapping[str, Roofs]) -> pd.DataFrame:
    """Every pass on the whole GPU: least ms of its GEMMs and of softmax and scaling by its machine's roofs, the sum,
    the measured median, and that over the sum. (For ours, GEMMs are not separated from the rest.)"""
    chosen = tables.chosen(rows, cap_gib=0, repeat=0)
    out = []
    for row in chosen.itertuples():
        for part in PARTS:
            least, ms = kernel_floors(row, part, found), getattr(row, f"{part}_ms_p50")
            gemms = least[[name.split(" = ")[0] in _GEMMS for name in least.index]].sum(skipna=False)
            total = least.sum(skipna=False)
            line = [row.machine, row.dtype, row.head_dim, row.seq_len, row.impl, part]
            out.append([*line, gemms, total - gemms, total, ms, ms / total])
    heads = ["GEMMs, ms", "softmax and scaling, ms", "predicted, ms", "measured, ms", "ratio"]
    return pd.DataFrame(out, columns=["machine", "dtype", "d", "n", "impl", "pass", *heads])


def without_scores(rows: pd.DataFrame, seq_len: int) -> pd.DataFrame:
    """Median ms of plain attention and of ours at one length, forward (F) and backward (B), and the speedup, of one
    run."""
    chosen = tables.chosen(rows, seq_len=seq_len, cap_gib=0, repeat=0)
    keys = ["machine", "dtype", "head_dim"]
    plain, ours = (chosen[chosen["impl"] == impl] for impl in (PLAIN, OURS))
    frame = plain[keys].rename(columns={"head_dim": "d"})
    for part, letter in zip(PARTS, "FB", strict=True):
        column, ms = f"{part}_ms_p50", plain[f"{part}_ms_p50"].astype(float)
        frame[f"plain {letter}, ms"] = ms
        frame[f"ours {letter}, ms"] = tables.looked_up(ours, column, plain, keys)
        frame[f"{letter}, ×"] = ms / tables.looked_up(ours, column, plain, [*keys, "run"])
    return tables.in_order(frame, ["dtype"], BYTES)


def handout(rows: pd.DataFrame, cap_gib: int) -> pd.DataFrame:
    """Plain attention by dtype and shape: mean ms of both passes, memory, and what becomes of it under a cap."""
    plain = tables.chosen(rows, impl="reference", repeat=0)
    shape = ["machine", "dtype", "head_dim", "seq_len"]
    capped = plain[plain["cap_gib"] == cap_gib].set_index(shape)
    whole = plain[plain["cap_gib"] == 0]
    under = capped.reindex(pd.MultiIndex.from_frame(whole[shape]))
    failed = [
        f"OOM in {part}" if status == "oom" else "fits" if status == "ok" else "not tried"
        for status, part in zip(under["status"], under["failed_in"], strict=True)
    ]
    return pd.DataFrame({
        "machine": whole["machine"], "dtype": whole["dtype"], "d": whole["head_dim"], "n": whole["seq_len"],
        **{f"{p}, ms": whole[f"{p}_ms_mean"] for p in PARTS},
        "before backward, GiB": whole["before_backward_gib"], "peak, GiB": whole["peak_gib"],
        f"with {cap_gib} GiB": failed,
    })  # fmt: skip


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """Every case: mean and standard deviation of both passes, memory, and the pass that failed."""
    return pd.DataFrame({
        "machine": rows["machine"], "dtype": rows["dtype"], "cap, GiB": rows["cap_gib"], "d": rows["head_dim"],
        "n": rows["seq_len"], "implementation": rows["impl"].map(label), "repeat": rows["repeat"],
        **{f"{p} {what}, ms": rows[f"{p}_ms_{what}"] for p in PARTS for what in ("mean", "std")},
        "before backward, GiB": rows["before_backward_gib"], "peak, GiB": rows["peak_gib"],
        "failed in": rows["failed_in"], "compiling, s": rows["compile_s"],
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------- figure
def memory_figure(rows: pd.DataFrame, cap_gib: int) -> Figure:
    """GiB before backward and at the peak over the length, by implementation; dashed: a GPU of `cap_gib`. Of the first
    machine."""
    rows = tables.first_machine(tables.chosen(rows, cap_gib=0, repeat=0, status="ok"))
    figure, axes = figures.panels(columns=2, height=2.4, sharey=True)
    titles = {"before_backward_gib": "in use before backward", "peak_gib": "at the peak"}
    for ax, (column, title) in zip(axes[0], titles.items(), strict=True):
        figures.lines(ax, rows, "seq_len", column, "impl", log_y=True)
        if rows[column].notna().any():
            figures.roof(ax, cap_gib, f"{cap_gib} GiB")
            figures.plain_ticks(ax.yaxis, 1)
        ax.set(title=title, xlabel="sequence length n")
    axes[0, 0].set_ylabel("GiB")
    figures.legend_below(figure, *axes.flat)
    return figure
