"""What chapter `leaderboard` shows: numeric frames and figures from its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.leaderboard import models, shapes
from cs336_systems.chapters.leaderboard.measure import OFFICIAL_MS
from cs336_systems.ladder import steps
from cs336_systems.report import figures
from cs336_systems.report.figures import label
from cs336_systems.report.prose import LEAST_NOISE, published
from cs336_systems.report.tables import chosen, first_machine, fmt, in_order, looked_up

HEADS, TOKENS, HEAD_DIM = steps.WORK.values()
BF16_BYTES = 2
UNITS = {
    "products": "tensor cores: GEMMs",
    "exps": "SFUs: exponentials",
    "instructions": "schedulers: instructions",
    "shared": "shared memory: operands of GEMMs",
}
ENTRY = "best verified"  # published for this work
COUNTED = {64: ("flash_triton", "plain_triton", "sdpa_cudnn"), 128: ("flash_triton",)}  # by head dimension
_COLORS = {"own": "#a6cee3", "production": "#4292c6", "hopper": "#08306b"}


def harness(rows: pd.DataFrame) -> pd.DataFrame:
    """The harness's rows by implementation, fastest first, with the published means between them: mean with the
    official parameters, median of short turns, that over ours in the same run, SM clock and power."""
    short = rows[(rows["rep_ms"] < OFFICIAL_MS) & (rows["leaves"] == "stacked") & (rows["repeat"] == 0)]
    ours = looked_up(short[short["impl"] == "flash_triton"], "ms_p50", short, ["machine", "run"])
    official = looked_up(rows[rows["rep_ms"] == OFFICIAL_MS], "ms_mean", short, ["machine", "impl"])
    frame = pd.DataFrame({
        "machine": short["machine"],
        "implementation": short["impl"].map(label),
        "official mean, ms": official,
        "median, ms": short["ms_p50"],
        "× ours": short["ms_p50"] / ours,
        "SM clock, MHz": short["sm_mhz"],
        "power, W": short["power_w"],
    })  # fmt: skip
    if (rows["seq_len"] == TOKENS).any():
        entry = published(ENTRY)
        name = f"[{ENTRY} entry]({entry.source})"
        other = {
            "machine": rows["machine"].iloc[0],
            "implementation": name,
            "official mean, ms": float(entry.value),
        }
        frame = pd.concat([frame, pd.DataFrame([other])], ignore_index=True)
    order = frame["median, ms"].fillna(frame["official mean, ms"]).sort_values().index
    return frame.loc[order].reset_index(drop=True)


# ------------------------------------------------------------------------------------------------ limits
def limits(part: str) -> dict[str, float]:
    """Unit → the least ms for the leaderboard's work on an H100 at its data sheet's clock; every pair visited once,
    five GEMMs backward."""
    count = accounting.forward_work if part == "forward" else accounting.backward_work
    pairs = accounting.attention_exps(HEADS, TOKENS, TOKENS, True, part)
    sm = accounting.MULTIPROCESSORS[90]
    return accounting.unit_ms(count(HEAD_DIM, 128), pairs, HEAD_DIM, steps.SMS, steps.SM_MHZ, sm)


def in_turn(part: str) -> float:
    """Least ms on the same GPU if GEMMs, exponentials and instructions never overlap."""
    return accounting.overlapped_ms(limits(part), 0)


def limits_table(kernels: pd.DataFrame, roof: Roofs) -> pd.DataFrame:
    """What each unit needs in ms, alone and in turn, what this machine's best copy and GEMM would take, then ours."""
    out = []
    for part in ("forward", "backward"):
        least = limits(part)
        flops = accounting.attention_flops(HEADS, TOKENS, TOKENS, HEAD_DIM, True, part)
        moved = accounting.attention_bytes(HEADS, TOKENS, TOKENS, HEAD_DIM, BF16_BYTES, part)
        ours = of_the_work(kernels, part)
        ours = ours.loc[ours["impl"] == "flash_triton", "ms_p50"]
        out.append({UNITS[unit]: least[unit] for unit in UNITS} | {
            "GEMMs, exponentials, instructions in turn": in_turn(part),
            "memory, at the best copy measured": roof.copy_ms(moved),
            "GEMMs, at the best rate measured": roof.gemm_ms(flops, "bf16"),
            "ours, measured": ours.iloc[0] if len(ours) else math.nan,
        })  # fmt: skip
    frame = pd.DataFrame(out, index=["forward, ms", "backward, ms"]).T
    return frame.rename_axis("limit").reset_index()


def of_the_work(kernels: pd.DataFrame, part: str) -> pd.DataFrame:
    """The rows of one pass at the leaderboard's shape, with a whole matrix for dO."""
    work = {"head_dim": HEAD_DIM, "dtype": "bf16", "is_causal": True}
    return chosen(kernels, part=part, grad_o="matrix", repeat=0, **work)


def harness_ms(roof: Roofs) -> float:
    """Least ms of what the harness moves beside the two passes, at the best copy measured; NaN without one."""
    moved = accounting.harness_bytes(HEADS, TOKENS, HEAD_DIM, BF16_BYTES, stacked=True)
    return roof.copy_ms(sum(moved.values()))


# ------------------------------------------------------------------------------------------------ ladder
def ladder(rows: pd.DataFrame, part: str) -> pd.DataFrame:
    """The steps of one pass in their order: what each cost and was expected to cost, its gain over the step that it
    changes (of one run), registers per thread, bytes spilled, shared memory, and why it was expected to cost that.
    Titles are without names of modules."""
    found = chosen(rows, part=part, repeat=0).drop_duplicates("impl").set_index("impl")
    lacking = pd.Series(math.nan, found.columns)
    number = {step.name: place for place, step in enumerate(steps.of_part(part), 1)}
    out = []
    for step in steps.of_part(part):
        row, base = (found.loc[name] if name in found.index else lacking for name in (step.name, step.base))
        out.append({
            "#": number[step.name], "step": re.sub(r" \(`[\w.]+`\)", "", step.title), "from": number.get(step.base),
            "expected, ms": steps.predicted_ms(step), "ms": row["ms_p50"],
            "gain": base["ms_p50"] / row["ms_p50"] if base["run"] == row["run"] else math.nan,
            "registers": row["registers"], "spill, B": row["spill_bytes"], "shared, KiB": row["shared_kib"],
            "because": step.why,
        })  # fmt: skip
    return pd.DataFrame(out).astype({"from": "Int64"})


def ladder_figure(rows: pd.DataFrame, part: str) -> Figure:
    """A bar for each step's time, with its gain (and over which step, unless it is the one above), a mark where it was
    expected, the least time of the slowest unit."""
    frame = ladder(rows, part)
    drawn, ax = figures.panel(height=0.7 + 0.165 * len(frame))
    for place, (step, (_, row)) in enumerate(zip(steps.of_part(part), frame.iterrows(), strict=True)):
        kind = "hopper" if "hopper" in step.name else "production" if "production" in step.name else "own"
        ms, expected, gain, base = row["ms"], row["expected, ms"], row["gain"], row["from"]
        known = not math.isnan(ms)
        ax.barh(place, ms if known else 0, color=_COLORS[kind], height=0.62, zorder=2)
        mark = ax.plot(expected, place, "D", color="#D55E00", mec="white", ms=5, zorder=4)
        over = "" if math.isnan(gain) else f"   {gain:.2f}×" + f" over {base}" * (base != place)
        ax.annotate(f"{ms:.2f}{over}" if known else "not measured", (max(ms if known else 0, expected), place),
                    xytext=(3, 0), va="center", fontsize=8, textcoords="offset points")  # fmt: skip
    line = ax.axvline(max(limits(part).values()), color=figures.ROOF, ls=(0, (5, 3)), lw=1.1, zorder=3)
    names = [f"{n}  {title}" for n, title in zip(frame["#"], frame["step"], strict=True)]
    ax.set_yticks(range(len(frame)), names, fontsize=8)
    ax.set_xlabel(f"{part}, ms")
    ax.margins(x=0.12, y=0.02)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    bars = [ax.barh(0, 0, color=color) for color in _COLORS.values()]
    names = ["Triton, the ladder's", "Triton, in use", "Gluon", "expected", "slowest unit alone"]
    drawn.legend([*bars, mark[0], line], names, loc="outside lower center", ncols=5)
    return drawn


def schedule_figure() -> Figure:
    """Warp specialization: a producer warp and two groups of a forward program, time to the right. While one group
    computes a softmax, the other one multiplies. A drawing: no numbers."""
    colors = {"load": "#b9c4cc", "matmuls": "#0072B2", "softmax": "#E69F00"}
    drawn, ax = figures.panel(height=1.25, phone=6)
    loads = [(0, "$Q, K_0$"), (0.6, "$K_1, V_0$"), (2.15, "$K_2, V_1$"), (4.15, "$K_3, V_2$")]
    bars = [(0, "load", start, 0.55, text) for start, text in loads]
    for lane in (1, 2):
        first = 0.6 + lane - 1
        bars.append((lane, "matmuls", first, 0.5, "$S_0$"))
        for tile in range(3):
            start = first + 0.5 + 2 * tile
            bars.append((lane, "softmax", start, 1, f"$P_{tile}$"))
            bars.append((lane, "matmuls", start + 1, 1, f"$P_{tile}V_{tile},\\ S_{tile + 1}$"))
    for lane, kind, start, length, text in bars:
        ax.barh(lane, length, 0.86, start, color=colors[kind], edgecolor="white", zorder=3)
        color = "white" if kind == "matmuls" else "#222222"
        ax.text(start + length / 2, lane, text, color=color, ha="center", va="center", fontsize=8, zorder=4)
    ax.set_yticks(range(3), ["producer warp", "group 1", "group 2"])
    ax.set(xlim=(-0.05, 8.2), ylim=(2.6, -0.6), xticks=[])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("time →", loc="right")
    legend = [ax.barh(0, 0, color=color) for color in colors.values()]
    names = ["load (TMA)", "matmuls (tensor cores)", "softmax (SFUs and fp32 units)"]
    drawn.legend(legend, names, loc="outside lower center", ncols=3)
    return drawn


# ------------------------------------------------------------------------------------------------ kernels
def kernels_table(rows: pd.DataFrame, impls: tuple[str, ...], fp32: bool = False) -> pd.DataFrame:
    """Kernel time by pass and shape, a column for each implementation: 16-bit shapes, or those in fp32."""
    rows = rows[(rows["repeat"] == 0) & (rows["grad_o"] == "matrix") & ((rows["dtype"] == "fp32") == fp32)]
    rows = rows[rows["impl"].isin(impls)].assign(
        mask=rows["is_causal"].map({True: "causal", False: "none"}), head=rows["impl"].map(label) + ", ms"
    )
    keys = ["machine", "part", *([] if fp32 else ["dtype"]), "head_dim", *([] if fp32 else ["mask"])]
    table = rows.set_index([*keys, "head"])["ms_p50"].unstack("head")
    table = table.reindex(columns=[f"{label(impl)}, ms" for impl in impls]).reset_index()
    order = table.sort_values("part", ascending=False, kind="stable").index
    names = {"part": "pass", "head_dim": "d"}
    return table.loc[order].reset_index(drop=True).rename(columns=names).rename_axis(columns=None)


def counters_table(rows: pd.DataFrame) -> pd.DataFrame:
    """How busy each unit was in percent of a pass's cycles, and instructions by lanes for each pair visited, of the
    implementations in COUNTED."""
    rows = rows[rows["repeat"] == 0]
    rows = pd.concat(rows[(rows["head_dim"] == d) & rows["impl"].isin(impls)] for d, impls in COUNTED.items())
    rows = rows.sort_values("part", ascending=False, kind="stable")
    pairs = [accounting.attention_exps(HEADS, TOKENS, TOKENS, True, part) for part in rows["part"]]
    return pd.DataFrame({
        "machine": rows["machine"], "pass": rows["part"], "d": rows["head_dim"],
        "implementation": rows["impl"].map(label),
        "tensor cores, %": rows["tensor_pct"], "SFUs, %": rows["exp_pct"], "schedulers, %": rows["issue_pct"],
        "shared memory, %": rows["shared_pct"], "instructions per pair": 32 * rows["instructions"] / pairs,
    })  # fmt: skip


def first_calls_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds of the first call of both passes in a fresh process, and in the next one; ms of the second, kernels that
    Triton compiled; the host's microseconds of later calls of forward."""
    rows = rows[rows["repeat"] == 0]
    return pd.DataFrame({
        "machine": rows["machine"], "implementation": rows["impl"].map(label), "first call, s": rows["first_call_s"],
        "in the next process, s": rows["next_process_s"],
        "second call, ms": rows["second_call_ms"], "kernels compiled": rows["compiled"].astype("Int64"),
        "for 7 other lengths": rows["compiled_later"].astype("Int64"),
        "later, host, µs": rows["host_us"], "launches forgotten, µs": rows["forgetful_us"],
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ shapes
LEAST_MS = 0.02  # below it a kernel's time is mostly its launch
OTHER_RESULTS = 0.1  # ‖x − y‖ / ‖y‖ that is more than rounding


def against_peers(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each machine, shape and pass that ours has a time for: `kind`, `shape` in words, our `tflops`, each
    implementation's time in ms in the same run, `best`, the fastest peer, and `over_best`, our time over its. A time is
    the mean of both where it was measured twice; one whose results are wrong has none."""
    return _against(rows, shapes, shapes.PEERS, _shape)


def _against(rows: pd.DataFrame, of: Any, impls: Sequence[str], words: Callable[[Any], str]) -> pd.DataFrame:
    """`against_peers` for the table of the module `of`, whose implementations these are, ours first."""
    index = ["machine", *of.TABLE.group]
    rows = rows[~(rows["apart"].astype(float) > OTHER_RESULTS)]
    numbers = rows.astype({"ms_p50": float, "tflops": float})
    means = numbers.groupby([*index, "run", "impl"], sort=False)[["ms_p50", "tflops"]].mean()
    ours = means[means.index.get_level_values("impl") == "flash_triton"].droplevel("impl")
    times = means["ms_p50"].unstack("impl").reindex(columns=list(impls))
    found = ours[["tflops"]].join(times)[ours["ms_p50"].notna()].reset_index().drop_duplicates(index)
    found = found.reset_index(drop=True)
    peers = found[list(impls[1:])]
    return found.assign(
        kind=[of.kind_of(row) for row in found.itertuples()],
        shape=[words(row) for row in found.itertuples()],
        best=peers[peers.notna().any(axis=1)].idxmin(axis=1).reindex(found.index),
        over_best=found["flash_triton"] / peers.min(axis=1),
    )


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of `against_peers` on the first machine whose best peer takes LEAST_MS or longer, by kind."""
    found = first_machine(against_peers(rows))
    return in_order(found[found[[*shapes.PEERS[1:]]].min(axis=1) >= LEAST_MS], ["kind"], shapes.KINDS)


def _shape(row: Any) -> str:
    tokens = f"{row.num_queries:,}" + (f" : {row.num_keys:,}" if row.num_keys != row.num_queries else "")
    more = ["" if row.is_causal else "no mask", "" if row.dtype == "bf16" else row.dtype]
    return ", ".join([f"{row.batch} × {row.heads} × {tokens}, d {row.head_dim}", *filter(None, more)])


def shapes_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Our time over the best peer's by pass and kind of shape, and of all: geometric mean, worst shape, how many; of
    those that are `counted`."""
    found = counted(rows)
    out = []
    for part in shapes.PARTS:
        for kind in (*shapes.KINDS, "all"):
            over = found["over_best"][(found["part"] == part) & ((found["kind"] == kind) | (kind == "all"))]
            if len(over):
                out.append((part, kind, len(over), math.exp(over.map(math.log).mean()), over.max()))
    return pd.DataFrame(out, columns=["pass", "shapes", "number", "mean", "worst"])


def shapes_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Every shape: our time in ms, the fastest peer, our time over its, for both passes, forward (F), backward (B)."""
    found = against_peers(rows)
    sides = []
    for part, letter in zip(shapes.PARTS, "FB", strict=True):
        one = found[found["part"] == part].set_index(["machine", "kind", "shape"])
        sides.append(pd.DataFrame({
            f"{letter}, ms": one["flash_triton"], f"best peer, {letter}": one["best"].map(label, na_action="ignore"),
            f"× best, {letter}": one["over_best"],
        }))  # fmt: skip
    return in_order(pd.concat(sides, axis=1).reset_index(), ["kind"], shapes.KINDS)


def shapes_figure(rows: pd.DataFrame) -> Figure:
    """Our time over the best peer's, a line for each shape, a dot for each pass; gray: within the least
    noise. Of shapes that are `counted`."""
    found = counted(rows)
    names = list(dict.fromkeys(found["shape"]))
    drawn, ax = figures.panel(height=0.8 + 0.155 * max(4, len(names)) if names else 0.6)
    if found.empty:
        figures.nothing(ax)
        return drawn
    ax.axvspan(1 / (1 + LEAST_NOISE), 1 + LEAST_NOISE, color="#eeeeee", zorder=1)
    ax.axvline(1, color=figures.ROOF, lw=1, zorder=2)
    for part, marker, face, off in (("forward", "o", "#0072B2", -0.14), ("backward", "D", "white", 0.14)):
        one = found[found["part"] == part]
        at = one["shape"].map(names.index) + off
        ax.plot(one["over_best"], at, marker, color="#0072B2", markerfacecolor=face, label=part, zorder=3)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xlabel("our time over the best peer's; left of 1 ours is faster")
    ax.invert_yaxis()
    ax.margins(y=0.02)
    ax.legend(loc="lower left")
    return drawn


# ------------------------------------------------------------------------------------------------ what models ask for
def against_models(rows: pd.DataFrame) -> pd.DataFrame:
    """As `against_peers`, of the shapes of `models`."""
    return _against(rows, models, models.IMPLS, _asked)


def models_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each machine, shape and pass: our time in ms, our TFLOP/s, and our time over each peer's."""
    found = against_models(rows)
    peers = {f"× {label(i)}": found["flash_triton"] / found[i].astype(float) for i in models.IMPLS[1:]}
    frame = found[["machine", "kind", "shape"]].assign(**{
        "pass": found["part"], "ms": found["flash_triton"], "TFLOP/s": found["tflops"], **peers
    })  # fmt: skip
    return in_order(frame, ["machine", "kind", "pass"], models.KINDS, shapes.PARTS)


def _asked(row: Any) -> str:
    heads = f"{row.heads}" + (f":{row.kv_heads}" if row.kv_heads < row.heads else "")
    more = [
        f"window {row.window:,}" if row.window else "",
        "" if row.documents == models.NO_DOCUMENTS else "packed",
        "" if row.is_causal else "no mask",
    ]
    return ", ".join([f"{row.batch} × {heads} × {row.num_tokens:,}, d {row.head_dim}", *filter(None, more)])


def models_figure(rows: pd.DataFrame) -> Figure:
    """Both passes as maps: shapes down; across our ms and TFLOP/s, then our time over each peer's that has one. Of the
    first machine."""
    frame = first_machine(models_table(rows))
    if frame.empty:
        drawn, ax = figures.panel(height=0.6)
        figures.nothing(ax)
        return drawn
    lines = frame[["kind", "shape"]].drop_duplicates()
    widths = {"width_ratios": (len(models.IMPLS) + 1, len(models.IMPLS))}  # FlashAttention-3 has no backward
    drawn, axes = figures.panels(2, height=1.3 + 0.2 * len(lines), phone=4.3, sharey=True, gridspec_kw=widths)
    for ax, part in zip(axes[0], shapes.PARTS, strict=True):
        cells = frame[frame["pass"] == part].set_index("shape").reindex(lines["shape"])
        peers = [head for head in cells if head.startswith("×") and cells[head].notna().any()]
        cells = cells[["ms", "TFLOP/s", *peers]].astype(float)
        words = cells.map(fmt)
        ratios = cells.assign(**{"ms": math.nan, "TFLOP/s": math.nan})
        figures.heat(ax, ratios.set_axis(range(cells.shape[1]), axis=1), 0.5, words, digits=3)
        ax.set_xticks(range(cells.shape[1]), cells.columns, rotation=90, fontsize=8)
        ax.tick_params(axis="y", labelsize=8, pad=7)  # numbers are wider than their cells
        ax.set_title(part)
        for at in range(1, len(lines)):
            if lines["kind"].iloc[at] != lines["kind"].iloc[at - 1]:
                ax.axhline(at - 0.5, color="white", lw=3)
    return drawn
