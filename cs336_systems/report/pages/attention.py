"""What chapter `attention` shows: tables from its rows, with the closed forms beside them."""

from __future__ import annotations

import bisect
import math
from typing import Any

import pandas as pd

from cs336_systems import accounting, experiments
from cs336_systems.measure import rows as store
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages.flash_bench import verdict
from cs336_systems.report.roofs import Roofs, machine_environment
from cs336_systems.report.tables import EMPTY, distance, fmt, percent

PARTS = ("forward", "backward")
PLAIN, COMPILED, OURS = "reference", "reference_compiled", "flash_triton"
_CLOSED_FORM = {PLAIN: "reference", COMPILED: "compiled", OURS: "flash"}  # what `accounting` calls them
BYTES = {"fp32": 4, "bf16": 2}
SHAPE = ["machine", "cap_gib", "dtype", "head_dim", "seq_len"]
GIB = 2**30
MATRICES = (
    "A",
    "S",
    "P",
    "dP",
    "P∘dP",
    "dS",
    "dA",
)  # the tensors of `accounting` with a number for each score
_PREDICTED = [
    "matrix_gib", "predicted_before_gib", "before_matrices", "predicted_peak_gib", "peak_matrices",
    "forward_floor_ms", "backward_floor_ms",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------- closed forms
def sizes(chapter: Chapter, seq_len: int, head_dim: int, dtype: str) -> tuple[int, int, int, int, int]:
    """The arguments of the closed forms: batch, queries, keys, head dimension, bytes of an element."""
    return chapter.experiment.BATCH, seq_len, seq_len, head_dim, BYTES[dtype]


def closed_form(
    chapter: Chapter, impl: str, dtype: str, seq_len: int, head_dim: int, machine: str = ""
) -> str:
    """What `accounting` calls an implementation: ours by the kernels whose backward pass served such tensors on the
    machine, or on the first one of the chapter, where rows tell; at the nearest length that was measured."""
    if impl == OURS:
        where = {"impl": impl, "dtype": dtype, "head_dim": head_dim}
        ours = chapter.measured(**where, machine=machine or next(iter(chapter.machines), ""))
        ours = ours[ours["backward_kernels"].notna()]
        if len(ours):
            nearest = (ours["seq_len"] / seq_len).map(math.log).abs().idxmin()
            return _form(impl, ours.loc[nearest, "backward_kernels"])
    return _form(impl)


def _form(impl: str, kernels: Any = "portable") -> str:
    return f"flash_{kernels}" if kernels in ("hopper", "split") else _CLOSED_FORM[impl]


def longest(chapter: Chapter) -> int:
    """The longest sequence of the handout's grid, whatever was measured."""
    return max(case.seq_len for case in chapter.experiment.grid("full"))


def device(machine: str) -> str:
    """Whose closed form a machine needs: `cpu` or `cuda`."""
    return "cpu" if machine.startswith("cpu-") else "cuda"


def moments(chapter: Chapter, seq_len: int, head_dim: int, dtype: str, impl: str = PLAIN) -> pd.DataFrame:
    """The closed form of what is alive on a GPU at each moment of both passes: matrices by name, the rest as a sum."""
    form = closed_form(chapter, impl, dtype, seq_len, head_dim)
    found = accounting.attention_moments(*sizes(chapter, seq_len, head_dim, dtype), form)
    return pd.DataFrame([{"moment": moment} | _weights(tensors) for moment, tensors in found.items()])


def kept_and_peak(chapter: Chapter, seq_len: int, head_dim: int, dtype: str) -> pd.DataFrame:
    """The closed forms of all implementations on a GPU: what is alive before backward, and at the heaviest moment."""
    out = []
    for impl in _CLOSED_FORM:
        form = closed_form(chapter, impl, dtype, seq_len, head_dim)
        found = accounting.attention_moments(*sizes(chapter, seq_len, head_dim, dtype), form)
        for moment in (accounting.BEFORE_BACKWARD, heaviest(found)):
            line = {"implementation": figures.label(impl), "moment": moment}
            out.append(line | _weights(found[moment]))
    return pd.DataFrame(out)


def heaviest(found: dict[str, dict[str, int]]) -> str:
    """The moment at which most bytes are alive."""
    return max(found, key=lambda moment: sum(found[moment].values()))


def _weights(tensors: dict[str, int]) -> dict[str, str]:
    names = [name for name in tensors if name in MATRICES]
    quadratic, total = sum(tensors[name] for name in names), sum(tensors.values())
    return {
        "matrices of scores": ", ".join(names) or EMPTY, "GiB": fmt(quadratic / GIB),
        "rest, GiB": fmt((total - quadratic) / GIB), "sum, GiB": fmt(total / GIB),
    }  # fmt: skip


def longest_that_fits(chapter: Chapter, memory_gib: float, head_dim: int, dtype: str, impl: str) -> int:
    """The greatest length whose peak, by the closed form, is not above `memory_gib`."""
    form = closed_form(chapter, impl, dtype, longest(chapter), head_dim)

    def peak(n: int) -> int:
        return accounting.attention_peak_bytes(*sizes(chapter, n, head_dim, dtype), form)

    return bisect.bisect_right(range(1, 2**26), memory_gib * GIB, key=peak)


def gpu_memory_gib(chapter: Chapter, machine: str) -> float | None:
    """What the machine's GPU has, by `machine.json`; None where it does not say."""
    return machine_environment(machine, chapter.root).get("gpu_memory_gib") if machine else None


def best_clock_mhz(chapter: Chapter, machine: str) -> float | None:
    """The highest clock of the multiprocessors that the machine's roofs were measured at; None if no row says so."""
    frame = store.read(experiments.load("hardware"), machine, chapter.root) if machine else pd.DataFrame()
    clocks = pd.to_numeric(frame["sm_mhz"], errors="coerce").dropna() if len(frame) else frame
    return float(clocks.max()) if len(clocks) else None


def limits(chapter: Chapter, machine: str, head_dim: int) -> pd.DataFrame:
    """The longest sequences that fit under each cap, by the closed form."""
    memory = {f"{cap} GiB": float(cap) for cap in sorted(chapter.rows()["cap_gib"].unique()) if cap}
    if whole := gpu_memory_gib(chapter, machine):
        memory[f"whole GPU, {fmt(whole)} GiB"] = whole
    out = []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        for impl in dict.fromkeys(chapter.rows(dtype=dtype)["impl"]):
            line = {"dtype": dtype, "implementation": figures.label(impl)}
            for name, gib in memory.items():
                line[name] = f"{longest_that_fits(chapter, gib, head_dim, dtype, impl):,}"
            out.append(line)
    return pd.DataFrame(out)


def product_tflops(roofs: Roofs, dtype: str, impl: str) -> float | None:
    """The best product that an implementation could use, in TFLOP/s; None if it is not measured.

    Our kernels may make an fp32-accurate product of three TF32 ones or of six in bf16, on tensor cores.
    """
    known = [roofs.tflops.get(dtype)]
    if impl == OURS and dtype == "fp32":
        known += [roofs.tflops[of] / count for of, count in (("tf32", 3), ("bf16", 6)) if of in roofs.tflops]
    return max(filter(None, known), default=None)


def kernels(
    chapter: Chapter, roofs: Roofs, seq_len: int, head_dim: int, dtype: str, impl: str, on: str = "cuda"
) -> pd.DataFrame:
    """The kernels of both passes: FLOPs, bytes, and the least time of each at the machine's roofs."""
    pi, beta = product_tflops(roofs, dtype, impl), roofs.tb_per_s
    out = []
    for part in PARTS:
        form = closed_form(chapter, impl, dtype, seq_len, head_dim)
        for kernel in accounting.attention_kernels(*sizes(chapter, seq_len, head_dim, dtype), form, part, on):
            line = {"pass": part, "kernel": kernel.name}
            line["GFLOP"] = fmt(kernel.flops / 1e9) if kernel.flops else EMPTY
            line["GB"] = fmt(kernel.num_bytes / 1e9)
            product = kernel.flops / (pi * 1e9) if pi else math.nan
            line["product, ms"] = fmt(product) if kernel.flops else EMPTY
            line["bytes, ms"] = fmt(kernel.num_bytes / (beta * 1e9) if beta else None)
            line["floor, ms"] = fmt(accounting.kernels_ms([kernel], pi, beta) if pi and beta else None)
            out.append(line)
    return pd.DataFrame(out)


def with_predictions(chapter: Chapter, roofs: Roofs, **where: Any) -> pd.DataFrame:
    """The chosen rows (the A/A rows left out) with the closed forms beside them.

    Added columns: `matrix_gib`, one matrix of scores; `predicted_before_gib` and `predicted_peak_gib`, with the
    measured workspaces where they are known; `before_matrices` and `peak_matrices`, how many matrices the measured
    memory amounts to; `forward_floor_ms` and `backward_floor_ms`, NaN without roofs.
    """
    rows = chapter.rows(**where, repeat=0)
    added = [_predictions(chapter, roofs, row) for row in rows.to_dict("records")]
    return pd.concat([rows, pd.DataFrame(added, index=rows.index, columns=_PREDICTED)], axis=1)


def _predictions(chapter: Chapter, roofs: Roofs, row: dict[str, Any]) -> dict[str, float]:
    shape = sizes(chapter, row["seq_len"], row["head_dim"], row["dtype"])
    impl, on = _form(row["impl"], row["backward_kernels"]), device(row["machine"])
    workspace = row["workspace_gib"] if pd.notna(row["workspace_gib"]) else 0.0
    matrix = math.prod(shape[:3]) * shape[4] / GIB
    found = accounting.attention_moments(*shape, impl, on)
    out = {"matrix_gib": matrix}
    for name, tensors in (
        ("before", found[accounting.BEFORE_BACKWARD]),
        ("peak", found[heaviest(found)]),
    ):
        total = sum(tensors.values()) / GIB + workspace
        others = total - sum(size for tensor, size in tensors.items() if tensor in MATRICES) / GIB
        measured = row["before_backward_gib" if name == "before" else "peak_gib"]
        out[f"predicted_{name}_gib"] = total
        out[f"{name}_matrices"] = (measured - others) / matrix if pd.notna(measured) else math.nan
    pi, beta = product_tflops(roofs, row["dtype"], row["impl"]), roofs.tb_per_s
    for part in PARTS:
        steps = accounting.attention_kernels(*shape, _form(row["impl"], row[f"{part}_kernels"]), part, on)
        out[f"{part}_floor_ms"] = accounting.kernels_ms(steps, pi, beta) if pi and beta else math.nan
    return out


# ------------------------------------------------------------------------------------------------ tables
def word(status: str) -> str:
    """A cell for a row without numbers: `OOM`, `skipped`, `error`, or a dash for one that is not there."""
    return {"oom": "OOM", NOT_MEASURED: EMPTY}.get(status, status.split(":")[0])


def time_table(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """Mean and standard deviation in ms of forward (F) and backward (B): a row a shape, two columns an implementation.

    `where` leaves one machine, dtype and cap.
    """
    rows = chapter.rows(**where, repeat=0)
    impls = list(dict.fromkeys(rows["impl"]))
    heads = [f"{figures.label(impl)} {letter}" for impl in impls for letter in "FB"]
    out = []
    for (head_dim, seq_len), part in rows.groupby(["head_dim", "seq_len"]):
        line = [int(head_dim), int(seq_len)]
        by_impl = part.set_index("impl")
        for impl in impls:
            row = by_impl.loc[impl] if impl in by_impl.index else None
            if row is None or row["status"] != "ok":
                line += [word(NOT_MEASURED if row is None else row["status"])] * 2
            else:
                line += [f"{fmt(row[f'{p}_ms_mean'])} ± {fmt(row[f'{p}_ms_std'], 2)}" for p in PARTS]
        out.append(line)
    return pd.DataFrame(out, columns=["d", "n", *heads])


def shares(chapter: Chapter, roofs: Roofs, machine: str) -> pd.DataFrame:
    """Floors over medians on the whole GPU: the shape, `impl`, `part` and `share`; empty without roofs."""
    rows = with_predictions(chapter, roofs, machine=machine, cap_gib=0)
    rows = rows[rows["status"] == "ok"].dropna(subset="forward_floor_ms")
    parts = [
        rows.assign(part=p, share=(rows[f"{p}_floor_ms"] / rows[f"{p}_ms_p50"]).astype(float)) for p in PARTS
    ]
    return pd.concat(parts, ignore_index=True)[[*SHAPE, "impl", "part", "share"]]


def floor_table(chapter: Chapter, roofs: Roofs, machine: str, seq_len: int) -> pd.DataFrame:
    """Floors over medians at one length, in percent: a row for each dtype and head dimension, for each implementation
    forward (F) and backward (B)."""
    found = shares(chapter, roofs, machine)
    found = found[found["seq_len"] == seq_len]
    out = []
    for (dtype, head_dim), part in found.groupby(["dtype", "head_dim"], sort=False):
        line: dict[str, Any] = {"dtype": figures.label(str(dtype)), "d": int(head_dim)}
        for impl in dict.fromkeys(found["impl"]):
            for p, letter in zip(PARTS, "FB", strict=True):
                one = part[(part["impl"] == impl) & (part["part"] == p)]["share"]
                line[f"{figures.label(impl)} {letter}"] = percent(one.iloc[0] if len(one) else None)
        out.append(line)
    return pd.DataFrame(out)


def memory_table(chapter: Chapter, roofs: Roofs, **where: Any) -> pd.DataFrame:
    """Memory in GiB before backward and at the peak, each beside its prediction (pred.), and the number of matrices of
    scores that both amount to; `where` leaves one machine, dtype, cap and d.

    Empty where no row has a measured memory.
    """
    rows = with_predictions(chapter, roofs, **where)
    rows = rows.dropna(subset="before_backward_gib").sort_values(["seq_len"], kind="stable")
    out = []
    for row in rows.to_dict("records"):
        ok = row["status"] == "ok"
        cells = [
            fmt(row["before_backward_gib"], 4), fmt(row["predicted_before_gib"], 4),
            fmt(row["peak_gib"], 4) if ok else word(row["status"]), fmt(row["predicted_peak_gib"], 4),
            _count(row["before_matrices"]), _count(row["peak_matrices"]) if ok else word(row["status"]),
        ]  # fmt: skip
        out.append([row["seq_len"], figures.label(row["impl"]), *cells])
    heads = ["n", "implementation", "before", "pred.", "peak", "pred.", "before ÷ N", "peak ÷ N"]
    return pd.DataFrame(out, columns=heads)


def _count(matrices: float) -> str:
    return f"{round(matrices, 2) + 0.0:.2f}"  # no minus before a zero


def failures(chapter: Chapter, machine: str) -> pd.DataFrame:
    """The rows of all implementations and caps for each shape at which something ran out of memory."""
    rows = chapter.rows(machine=machine, repeat=0)
    shapes = rows[rows["status"] == "oom"][["dtype", "head_dim", "seq_len"]].drop_duplicates()
    return rows.merge(shapes, on=["dtype", "head_dim", "seq_len"])


def out_of_memory(chapter: Chapter, machine: str) -> pd.DataFrame:
    """For each shape that ran out of memory somewhere: every implementation, its predicted peak in GiB (with the
    measured workspaces), and what happened on the whole GPU and under the cap: the measured peak, or where it failed.
    """
    rows = failures(chapter, machine)
    caps = sorted(rows["cap_gib"].unique())
    out = []
    for (dtype, seq_len, head_dim, impl), part in rows.groupby(
        ["dtype", "seq_len", "head_dim", "impl"], sort=False
    ):
        shape = sizes(chapter, seq_len, head_dim, dtype)
        form = closed_form(chapter, impl, dtype, seq_len, head_dim, machine)
        known = part["workspace_gib"].dropna()
        peak = accounting.attention_peak_bytes(*shape, form) / GIB + (known.iloc[0] if len(known) else 0.0)
        line = {
            "dtype": dtype, "n": int(seq_len), "d": int(head_dim), "implementation": figures.label(impl),
            "predicted": fmt(peak),
        }  # fmt: skip
        for cap in caps:
            row = part[part["cap_gib"] == cap]
            line[f"{cap} GiB" if cap else "whole GPU"] = _what_happened(row.iloc[0]) if len(row) else EMPTY
        out.append(line)
    return pd.DataFrame(out)


def _what_happened(row: pd.Series) -> str:
    if row["status"] == "ok":
        return fmt(row["peak_gib"])
    return f"OOM in {row['failed_in']}" if row["status"] == "oom" else word(row["status"])


# ------------------------------------------------------------------------------------------------ comparisons
def spread(chapter: Chapter) -> pd.DataFrame:
    """How far the medians of the same case measured twice in one run lie apart: SHAPE, `run`, and for each pass the
    larger over the smaller, less one (0.01 is one percent): a ratio either way counts as beyond the noise alike.
    """
    rows = chapter.measured()
    first, second = rows[rows["repeat"] == 0], rows[rows["repeat"] == 1]
    both = first.merge(second, on=[*SHAPE, "impl", "run"], suffixes=("", "_again"))
    for part in PARTS:
        both[part] = distance((both[f"{part}_ms_p50_again"] / both[f"{part}_ms_p50"]).astype(float))
    return both[[*SHAPE, "run", *PARTS]]


def noise(chapter: Chapter, machine: str) -> pd.DataFrame:
    """For each length (the index), the largest difference between two measurements of the same case at this length or
    a longer one, over all dtypes, head dimensions and caps: columns `forward` and `backward`. The shorter a sequence,
    the more the host sets its time; a length whose few pairs happen to agree is no quieter than longer ones."""
    return apart(chapter, machine)[::-1].cummax()[::-1]


def apart(chapter: Chapter, machine: str) -> pd.DataFrame:
    """The same of each length alone."""
    again = spread(chapter)
    return again[again["machine"] == machine].groupby("seq_len")[list(PARTS)].max()


def speedups(chapter: Chapter, roofs: Roofs, impl: str, part: str, **where: Any) -> pd.DataFrame:
    """Median time of plain attention over that of `impl`, where both ran in the same run.

    SHAPE columns, `ratio`, `predicted` (the ratio of their floors), `ms`, `share` (the floor over it), both of plain
    attention as well (`ms_base`, `share_base`), `noise` (see there) and `word`: `faster`, `even` or `slower`.
    """
    metric, floor = f"{part}_ms_p50", f"{part}_floor_ms"
    rows = with_predictions(chapter, roofs, **where)
    rows = rows[rows["status"] == "ok"]
    both = rows[rows["impl"] == impl].merge(
        rows[rows["impl"] == PLAIN], on=[*SHAPE, "run"], suffixes=("", "_base")
    )
    for end in ("", "_base"):
        both[f"ms{end}"] = both[f"{metric}{end}"].astype(float)
        both[f"share{end}"] = both[f"{floor}{end}"].astype(float) / both[f"ms{end}"]
    both["ratio"] = both["ms_base"] / both["ms"]
    both["predicted"] = both[f"{floor}_base"].astype(float) / both[floor].astype(float)
    known = {machine: noise(chapter, machine)[part] for machine in both["machine"].unique()}
    both["noise"] = [known[m].get(n, math.nan) for m, n in zip(both["machine"], both["seq_len"], strict=True)]
    both["word"] = [verdict(r, n) for r, n in zip(both["ratio"], both["noise"], strict=True)]
    return both[
        [*SHAPE, "ratio", "predicted", "share", "share_base", "ms", "ms_base", "noise", "word"]
    ].astype({"noise": float})


def speedup_table(chapter: Chapter, roofs: Roofs, **where: Any) -> pd.DataFrame:
    """Plain attention's time over compiled and over ours, forward (F) and backward (B), each beside its prediction
    (pred.); `where` leaves one machine, dtype, cap and d. A difference within the noise is marked as even.
    """
    lines: dict[int, dict[str, str]] = {}
    for impl, short in ((COMPILED, "comp."), (OURS, "ours")):
        for part, letter in zip(PARTS, "FB", strict=True):
            for row in speedups(chapter, roofs, impl, part, **where).itertuples():
                line = lines.setdefault(row.seq_len, {"n": row.seq_len})
                line[f"{short} {letter}"] = f"{fmt(row.ratio)} ×" + " (even)" * (row.word == "even")
                line[f"{short} {letter} pred."] = (
                    EMPTY if math.isnan(row.predicted) else f"{fmt(row.predicted)} ×"
                )
    table = pd.DataFrame([lines[n] for n in sorted(lines)]).fillna(EMPTY)
    table.columns = ["pred." if name.endswith("pred.") else name for name in table.columns]
    return table
