"""Tables, figures and sentences of the chapter on mixed precision: formats, sums, the toy model's dtypes, layer norm.

What it says about whole models is in `mixed_precision_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.accounting.formats import FORMATS, Format, number_format, running_sums, stagnation
from cs336_systems.experiments.mixed_precision import (
    ADDEND,
    ADDITIONS,
    AUTOCAST,
    EPS,
    KEPT,
    NORM_WIDTH,
    PARAMETERS,
    PARTS,
    SUMS,
)  # fmt: skip
from cs336_systems.measure.phases import each
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.tables import EMPTY, fmt

HUNDREDTH = Fraction(ADDEND)
EXACT = HUNDREDTH * ADDITIONS


# ------------------------------------------------------------------------------------------------ formats
def format_table() -> pd.DataFrame:
    """Bits, range and resolution of the formats, and what is left of a hundredth."""
    return pd.DataFrame([
        {
            "format": name,
            "bits": f.bits,
            "exponent": f.exponent_bits,
            "fraction": f.fraction_bits,
            "largest": _digits(f.largest, 3 if f.largest > 10**6 else 10),
            "smallest normal": _digits(f.smallest_normal, 3),
            "smallest": _digits(f.smallest, 3),
            "ε": _digits(f.epsilon, 3),
            "0.01 becomes": _digits(f.round(HUNDREDTH)),
        }
        for name, f in FORMATS.items()
    ])  # fmt: skip


def _digits(x: Fraction | float, digits: int = 10) -> str:
    """A number by its first digits; ten tell all fp32 numbers apart. `1.2e−38` rather than `1.2e-38`."""
    return f"{float(x):.{digits}g}".replace("e-0", "e-").replace("e+", "e").replace("-", "−")


# ------------------------------------------------------------------------------------------------ accumulation
def addend(what: str) -> Fraction:
    """A hundredth as the addend's format holds it; casting it up changes nothing."""
    return number_format(what.partition(" as ")[0]).round(HUNDREDTH)


def predicted_sums(dtype: str, what: str, additions: int = ADDITIONS) -> list[Fraction]:
    """The running sum by exact arithmetic, after 0, 1, … additions."""
    return running_sums(number_format(dtype), addend(what), additions)


def increments(accumulator: Format, what: str, low: Fraction) -> tuple[Fraction, int]:
    """The ulp of sums from `low` (a power of two) to twice that, and how many ulps an addition moves them."""
    ulp = accumulator.ulp(low)
    return ulp, round(addend(what) / ulp)


def increment_table(first: int = -2) -> pd.DataFrame:
    """What an addition of a hundredth really adds to a 16-bit sum, binade by binade, up to where it adds nothing."""
    last = max(stagnation(number_format(name), addend(name)) for name in ("fp16", "bf16"))
    low, out = Fraction(2) ** first, []
    while low <= last:
        line = {"sum from": fmt(float(low), 2), "to": fmt(float(2 * low), 2)}
        for name in ("fp16", "bf16"):
            ulp, count = increments(number_format(name), name, low)
            line |= {
                f"{name}: ulp": _digits(ulp, 3),
                f"{name}: 0.01 is": f"{fmt(float(addend(name) / ulp))} ulps",
                f"{name} adds": f"{count} ulp{'s' * (count != 1)} = {_digits(ulp * count, 4)}"
                if count
                else "0",
            }
        out.append(line)
        low *= 2
    return pd.DataFrame(out)


def sums(row: Mapping[str, Any]) -> list[float]:
    """The measured running sum of a row after every 50 additions, exactly."""
    return each(row["sums"])


def as_predicted(row: Mapping[str, Any]) -> bool:
    """Whether every sum that a row keeps is the predicted one, bit by bit."""
    return sums(row) == [float(x) for x in predicted_sums(row["dtype"], row["what"])[KEPT::KEPT]]


def accumulation_table(chapter: Chapter) -> pd.DataFrame:
    """Predicted and measured sums, and where their errors come from: the addend's rounding, or the additions'."""
    out = []
    for row in chapter.rows(kind="accumulation").to_dict("records"):
        stored = addend(row["what"])
        predicted = predicted_sums(row["dtype"], row["what"])[-1]
        out.append({
            "order": SUMS.index((row["dtype"], row["what"])),
            "machine": row["machine"],
            "accumulator": row["dtype"],
            "addend": row["what"],
            "predicted": _digits(predicted),
            "measured": _digits(sums(row)[-1]) if row["status"] == "ok" else EMPTY,
            "error": fmt(float(predicted - EXACT)),
            "by the addend": fmt(float(ADDITIONS * (stored - HUNDREDTH))),
            "by the additions": fmt(float(predicted - ADDITIONS * stored)),
        })  # fmt: skip
    columns = [
        "machine", "accumulator", "addend", "predicted", "measured", "error", "by the addend", "by the additions",
    ]  # fmt: skip
    frame = pd.DataFrame(out, columns=["order", *columns])
    return frame.sort_values(["machine", "order"], ignore_index=True)[columns]


def accumulation_words(chapter: Chapter) -> str:
    """Whether the measured sums are the predicted ones."""
    rows = chapter.measured(kind="accumulation")
    if rows.empty:
        return f"The sums on a machine: {NOT_MEASURED}."
    said = []
    for machine, part in rows.groupby("machine"):
        records = part.to_dict("records")
        same = sum(as_predicted(row) for row in records)
        kept = sum(len(sums(row)) for row in records)
        said.append(
            f"On `{machine}` {'all' if same == len(records) else f'only {same} of'} {len(records)} running sums, at"
            f" the {kept} points that were kept, equal the predicted ones to the last bit."
        )
    return " ".join(said)


def stagnation_words() -> str:
    """Where 16-bit sums of hundredths stop, and after how many additions."""
    said = []
    for name in ("fp16", "bf16"):
        end = stagnation(number_format(name), addend(name))
        additions = ADDITIONS
        while (path := predicted_sums(name, name, additions))[-1] != end:
            additions *= 2
        steps = path.index(end)
        said.append(
            f"{name} at {fmt(int(end))}, after {steps:,} additions instead of {int(end / HUNDREDTH):,}"
        )
    return f"A sum of hundredths stops growing in {' and in '.join(said)}."


def accumulation_figure(chapter: Chapter, machine: str) -> Figure:
    """Left: 16-bit sums, far beyond a thousand additions; right: the error of every pair. Lines: predicted."""
    figure, axes = figures.panels(columns=2, height=3.0)
    left, right = axes[0]
    rows = {(r["dtype"], r["what"]): sums(r) for r in _of(chapter, machine, kind="accumulation")}
    counts, far = np.arange(KEPT, ADDITIONS + 1, KEPT), np.arange(4 * ADDITIONS + 1)
    exact = counts * float(HUNDREDTH)
    left.plot(far, far * float(HUNDREDTH), color=figures.ROOF, lw=1, ls=(0, (5, 3)), label="exact")
    for dtype, what in SUMS:
        if " as " in what:
            continue  # the same line as without the cast
        _, color, marker = figures.look(what)
        style, name = ("-", f"{dtype} + {what}") if dtype == what else ((0, (1.5, 1.5)), f"{dtype} + {what}")
        path = np.array(
            [float(x) for x in predicted_sums(dtype, what, far[-1] if dtype == what else ADDITIONS)]
        )
        seen = np.array(rows.get((dtype, what), [np.nan] * len(counts)))
        if dtype == what != "fp32":  # fp32 lies on the exact line
            left.plot(far, path, color=color)
            left.plot(counts[1::2], seen[1::2], marker, color=color, ms=3.5)
        right.plot(counts, _off(path[counts], exact), color=color, ls=style, label=name)
        right.plot(counts, _off(seen, exact), marker, color=color, ms=3)
    left.set(xlabel="additions of 0.01", ylabel="sum")
    right.set(xlabel="additions of 0.01", ylabel="|sum − exact|", yscale="log")
    figure.legend(loc="outside lower center", ncols=6, columnspacing=1.2, handlelength=1.6)
    return figure


def _off(path: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distances for a logarithmic axis: a sum that is just right has no place there."""
    return np.where(path == exact, np.nan, np.abs(path - exact))


def _of(chapter: Chapter, machine: str, **where: Any) -> list[dict[str, Any]]:
    return chapter.measured(machine=machine, **where).to_dict("records")


# ------------------------------------------------------------------------------------------------ dtypes
PLACES = {
    "input": (("input",), "as given"),
    "parameters, inside the context": (
        PARAMETERS,
        "autocast converts what an operation reads, not what a module holds",
    ),
    "fc1's weight as its product reads it": (("fc1 operand",), "a product: both operands are converted"),
    "output of fc1": (("fc1",), "the product's"),
    "output of ReLU": (("relu",), "on no list: the input's"),
    "statistics of layer norm (mean, 1/σ)": (("ln statistics",), "its kernel accumulates in fp32"),
    "output of layer norm": (("ln",), "CUDA: on the fp32 list; CPU: on no list"),
    "logits (output of fc2)": (("fc2",), "a product again"),
    "loss": (
        ("loss",),
        "its mean is on the fp32 list (on CUDA, the log-softmax before it stays in 16 bits)",
    ),
    "gradient of the logits": (("fc2 grad",), "a gradient has its tensor's dtype"),
    "gradient of layer norm's output": (("ln grad",), "the same"),
    "gradient of fc1's output": (("fc1 grad", "relu grad"), "the same"),
    "gradients of the parameters": (
        tuple(f"{name}.grad" for name in PARAMETERS),
        "the same; the parameters are fp32",
    ),
}
"""Line of the table → its tensors, and why they have the dtype that they have."""


def observed(chapter: Chapter, machine: str, autocast: str, names: tuple[str, ...]) -> str:
    """The dtype or dtypes that tensors were seen with; a dash without rows."""
    rows = chapter.measured(kind="dtypes", machine=machine, dtype=autocast)
    found = rows[rows["what"].isin(names)]["observed"].unique()
    return ", ".join(sorted(found)) or EMPTY


def dtype_table(chapter: Chapter) -> pd.DataFrame:
    """The dtypes seen in the toy model: a line for each place, a column for each autocast dtype."""
    out = []
    for machine in chapter.machines or [""]:
        for place, (names, why) in PLACES.items():
            seen = {f"{dtype} autocast": observed(chapter, machine, dtype, names) for dtype in AUTOCAST}
            out.append({"machine": machine, "tensor": place} | seen | {"because": why})
    return pd.DataFrame(out)


def dtype_words(chapter: Chapter) -> str:
    """The handout's six questions in one sentence a machine."""
    said = []
    for machine in chapter.machines:
        for autocast in AUTOCAST:
            parts = {
                "the parameters inside the context": PARAMETERS, "fc1's output": ("fc1",),
                "layer norm's output": ("ln",), "the logits": ("fc2",), "the loss": ("loss",),
                "the parameters' gradients": PLACES["gradients of the parameters"][0],
            }  # fmt: skip
            seen = {name: observed(chapter, machine, autocast, names) for name, names in parts.items()}
            if EMPTY not in seen.values():
                words = ", ".join(f"{name} {dtype}" for name, dtype in seen.items())
                said.append(f"- {autocast} autocast on `{machine}`: {words}.")
    return "\n".join(said) or f"The dtypes on a machine: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ layer norm
LOOKS = {
    "ends": ("input, output rounded only", "#222222", "s", (0, (4, 2))),
    "fp32_inside": ("the same, fp32 inside", "#009E73", "o", "-"),
    "mean": ("mean", "#56B4E9", "v", "-"),
    "variance": ("variance, by halves", "#0072B2", "^", "-"),
    "running": ("variance, one by one", "#D55E00", "D", "-"),
    "one_pass": ("variance, E[x²] − E[x]²", "#E69F00", "P", "-"),
    "normalize": ("(x − μ) / σ", "#CC79A7", "X", "-"),
}
"""Part → its name in figures, color, marker and line; `all` is in the table only."""
SWEEPS = {"scale": "spread σ", "offset": "offset of the mean", "width": "numbers in a row"}
_BASE = {"scale": 1.0, "offset": 0.0, "width": NORM_WIDTH}


def sweep(chapter: Chapter, field: str, **where: Any) -> pd.DataFrame:
    """The rows of layer norm in which only `field` (scale, offset or width) varies, sorted by it."""
    rows = chapter.measured(kind="layer_norm", **where)
    for other, value in _BASE.items():
        if other != field:
            rows = rows[rows[other] == value]
    return rows.sort_values(field, ignore_index=True)


def norm_table(chapter: Chapter) -> pd.DataFrame:
    """Relative error of layer norm's output for numbers of mean 0 and spread 1, a part at a time in each dtype."""
    rows = chapter.rows(kind="layer_norm", **_BASE)
    out = []
    for machine in chapter.machines or [""]:
        for part, words in PARTS.items():
            line = {"machine": machine, "in low precision": words}
            for dtype in ("fp16", "bf16", "fp32"):
                found = rows[(rows["machine"] == machine) & (rows["what"] == part) & (rows["dtype"] == dtype)]
                line[dtype] = fmt(found.iloc[0]["output_error"], 2) if len(found) else EMPTY
            out.append(line)
    return pd.DataFrame(out)


def norm_figure(chapter: Chapter, machine: str) -> Figure:
    """Error of layer norm's output over spread, offset and width of its input; a cross at the top: not finite."""
    figure, axes = figures.panels(columns=3, rows=2, height=2.6, sharey=True)
    for line, dtype in zip(axes, ("fp16", "bf16"), strict=True):
        for ax, field in zip(line, SWEEPS, strict=True):
            _norm_panel(ax, sweep(chapter, field, machine=machine, dtype=dtype), field)
            if dtype == "bf16":
                ax.set_xlabel(SWEEPS[field])
        line[0].set_title(dtype)
        line[0].set_ylabel("error of the output")
    handles, names = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def _norm_panel(ax: Axes, rows: pd.DataFrame, field: str) -> None:
    if rows.empty:
        figures.nothing(ax)
        return
    for place, (part, (name, color, marker, style)) in enumerate(LOOKS.items()):
        found = rows[rows["what"] == part]
        x, y = found[field].to_numpy(float), pd.to_numeric(found["output_error"]).to_numpy(float)
        ax.plot(x, y, color=color, marker=marker, ls=style, ms=3, lw=1.2, label=name)
        lost = np.isnan(y)
        height = np.full(lost.sum(), 0.97 - 0.025 * place)
        ax.plot(x[lost], height, "x", color=color, transform=ax.get_xaxis_transform())
    ax.set(yscale="log", ylim=(5e-6, 5e3))
    if field == "offset":
        ax.set_xscale("symlog", linthresh=1, linscale=0.5)
        ax.set_xlim(left=-0.2)
        ax.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
    elif field == "width":
        ticks = sorted(rows[field].unique())
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [figures.short(x) for x in ticks])
    else:
        ax.set_xscale("log")
        ax.set_xticks([1e-4, 1e-2, 1, 1e2, 1e4])
    ax.minorticks_off()


def _range(rows: pd.DataFrame, field: str, bad: pd.Series) -> tuple[float | None, float | None]:
    """The last value of `field` before rows go bad, and the first bad one; None where there is none."""
    first = rows[bad][field].min()
    before = rows[~bad & ~(rows[field] >= first)][field].max()
    return tuple(None if pd.isna(x) else float(x) for x in (before, first))


def range_words(chapter: Chapter) -> str:
    """What fp16's range does to the statistics, beside the bounds that its largest and smallest number give."""
    fp16 = number_format("fp16")
    root = float(fp16.largest) ** 0.5
    vanish = (float(fp16.smallest) / 2) ** 0.5
    said = []
    for machine in chapter.machines:
        spread = sweep(chapter, "scale", machine=machine, dtype="fp16", what="variance")
        shift = sweep(chapter, "offset", machine=machine, dtype="fp16", what="mean")
        if spread.empty or shift.empty:
            continue
        overflow = _range(spread, "scale", spread["not_finite"] > 0)
        mean = _range(shift, "offset", shift["not_finite"] > 0)
        bad = spread[spread["not_finite"] > 0]
        silent = int(bad["output_error"].notna().sum())
        small = spread.iloc[0]
        said.append(
            f"On `{machine}`, fp16: a row of {NORM_WIDTH:,} numbers still has a variance at σ = {fmt(overflow[0], 1)}"
            f" and none at {fmt(overflow[1], 1)}; the bound is {fmt(root)} for a single square and"
            f" {fmt(root / NORM_WIDTH**0.5)} for the sum. In {silent} of these {len(bad)} cases the output is finite"
            " all the same, namely 0, since 1/√∞ = 0. The sum for the mean overflows between offsets"
            f" {fmt(mean[0], 1)} and {fmt(mean[1], 1)} (bound {fmt(float(fp16.largest) / NORM_WIDTH)}). At"
            f" σ = {fmt(small['scale'], 1)} the variance is off by {fmt(100 * small['variance_error'], 2)} %, since"
            f" squares of numbers below {fmt(vanish)} vanish; the output is off by {fmt(small['output_error'], 2)}"
            f" only, because there layer norm's own {fmt(EPS, 1)} outweighs the variance."
        )
    return "\n\n".join(said) or f"Where fp16's range ends for layer norm: {NOT_MEASURED}."


def precision_words(chapter: Chapter) -> str:
    """What few fraction bits do: rounding at the ends, running sums, cancellation; and whether fp32 inside mends it."""
    said = []
    for machine in chapter.machines:
        for dtype in ("fp16", "bf16"):
            line = _precision(chapter, machine, dtype)
            if line:
                said.append(f"- {dtype} on `{machine}`: {line}")
    return "\n".join(said) or f"What few bits do to layer norm: {NOT_MEASURED}."


def _precision(chapter: Chapter, machine: str, dtype: str) -> str:
    at = {"machine": machine, "kind": "layer_norm", "dtype": dtype}
    rows = chapter.measured(**at)
    base = {part: chapter.number("output_error", **at, **_BASE, what=part) for part in PARTS}
    wide = sweep(chapter, "width", machine=machine, dtype=dtype, what="running")
    if rows.empty or None in base.values() or wide.empty:
        return ""
    keys = ["scale", "offset", "width"]
    both = rows[rows["what"] == "ends"].merge(
        rows[rows["what"] == "fp32_inside"], on=keys, suffixes=("", "_fp32")
    )
    more = (both["output_error_fp32"] / both["output_error"] - 1).abs().max()
    one_pass = sweep(chapter, "offset", machine=machine, dtype=dtype, what="one_pass")
    wrong = _range(one_pass, "offset", ~(one_pass["output_error"] < 0.5))
    last = wide.iloc[-1]
    slow = float(2 / number_format(dtype).epsilon)
    return (
        f"rounding input and output alone costs {fmt(base['ends'], 2)}, everything in {dtype} {fmt(base['all'], 2)}."
        f" Squares of average 1, added one by one, move a sum above {int(slow):,} by a wrong amount or not at all:"
        f" over {int(last['width']):,} numbers the variance is off by {fmt(100 * last['variance_error'], 2)} %. With"
        f" the variance as E[x²] − E[x]² the output's error passes one half at a mean of {fmt(wrong[1], 1)} σ. With"
        f" fp32 inside, the error is that of the rounded ends: over all {len(both)} inputs the two differ by"
        f" {fmt(100 * more, 2)} % at most."
    )
