"""What chapter `training` shows: the ladder and its losses, time to a loss, real runs. (The matrix and the sweep, which
commands draw as well, are `show_matrix` and `show_sweep`.)"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.hardware.roofs import Roofs, roofs
from cs336_systems.chapters.training import ladder as ladder_experiment
from cs336_systems.chapters.training import trials
from cs336_systems.measure.clocks.turns import each
from cs336_systems.report import figures, tables
from cs336_systems.report.values import Number, Row

RUNGS = {
    "fp32": "plain, fp32", "tf32": "TF32", "bf16": "bf16", "compiled": "torch.compile", "flash": "FlashAttention",
    "graphs": "CUDA graphs", "ddp": "two GPUs, blocks", "ddp_whole": "two GPUs, whole",
    "ddp_graphs": "two GPUs, graphs", "sharded": "sharded AdamW",
}  # fmt: skip
DRAWN = ("fp32", "bf16", "compiled", "flash", "sharded")  # of all rungs: a plot can show five, and one again
WINDOW = 5  # steps over which losses are averaged


# ------------------------------------------------------------------------------------------------ the ladder
def roofs_of(machines: list[str], root: Path) -> dict[str, Roofs]:
    """The roofs of machines; one that has not measured its own has those of another one with the same GPU, if that is
    known by its data sheet."""
    found = {name: roofs(name, root) for name in machines}
    known = [roof for roof in found.values() if roof.tflops and roof.sheet]
    return {n: r if r.tflops else next((k for k in known if k.sheet == r.sheet), r) for n, r in found.items()}


def predicted_tokens_per_s(row: Any, roof: Roofs) -> float:
    """By the least time of the kernels at the machine's roofs (else the data sheet's), communication hidden; CUDA
    graphs and the sharded optimizer change nothing in it. NaN where no roof is known."""
    case = ladder_experiment.TABLE.case_of(row)
    ranks = row.world_size if case.wrapper != "none" else 1
    sheet = roof.sheet or accounting.Peaks(math.nan)
    tflops = roof.tflops.get(case.dtype, sheet.tflops.get(case.dtype, math.nan))
    if not (tflops > 0 and (roof.tb_per_s or sheet.tb_per_s) > 0 and row.vocab_size > 0):
        return math.nan
    config = trials.configuration(case, "unused").model.sizes(int(row.vocab_size))
    attention = "flash" if case.attention == "auto" else "reference" if case.compile == "off" else "compiled"
    ms = accounting.train_step_ms(
        config, case.sequences // ranks, case.dtype, attention, case.compile != "off", tflops,
        roof.tb_per_s or sheet.tb_per_s,
    )  # fmt: skip
    return case.sequences * case.context_length / sum(ms.values()) * 1e3


def climbed(rows: pd.DataFrame, roof: dict[str, Roofs]) -> pd.DataFrame:
    """The ladder's rows in order, without repetitions, with `predicted` tokens/s and `gain` over the rung before in the
    same run."""
    rows = tables.in_order(rows[rows["repeat"] == 0], ["world_size", "rung"], RUNGS)
    before = rows.groupby(["machine", "world_size"])["tokens_per_s"].shift()
    same = rows["run"] == rows.groupby(["machine", "world_size"])["run"].shift()
    return rows.assign(
        predicted=[predicted_tokens_per_s(row, roof.get(row.machine, Roofs())) for row in rows.itertuples()],
        gain=(rows["tokens_per_s"].astype(float) / before.astype(float)).where(same),
    )


def ladder(rows: pd.DataFrame, roof: dict[str, Roofs]) -> pd.DataFrame:
    """Each rung: throughput predicted and measured, gain, MFU, memory, seconds of the first step."""
    rows = climbed(rows, roof)
    return pd.DataFrame({
        "machine": rows["machine"], "GPUs": rows["world_size"], "rung": rows["rung"].map(RUNGS),
        "predicted, 1,000 tokens/s": rows["predicted"] / 1e3, "measured, 1,000 tokens/s": rows["tokens_per_s"] / 1e3,
        "gain, ×": rows["gain"], "MFU, %": 100 * rows["mfu"], "peak, GiB": rows["peak_gib"],
        "first step, s": rows["first_step_s"],
    })  # fmt: skip


def ladder_figure(rows: pd.DataFrame, roof: dict[str, Roofs]) -> Figure:
    """A bar of tokens/s for each rung, darker on two GPUs, and a tick at its prediction."""
    rows = climbed(rows, roof)
    rows = rows[rows["tokens_per_s"].notna() & ~((rows["rung"] == "flash") & (rows["world_size"] > 1))]
    rows = rows.drop_duplicates("rung")
    drawn, ax = figures.panel(height=2.6)
    if rows.empty:
        figures.nothing(ax)
        return drawn
    reached, predicted = (rows[name].to_numpy(float) / 1e3 for name in ("tokens_per_s", "predicted"))
    colors = ["#0072B2" if ranks == 1 else "#004a75" for ranks in rows["world_size"]]
    ax.barh(range(len(rows)), reached, color=colors, height=0.7, zorder=3, label="measured")
    ax.plot(predicted, range(len(rows)), "|", color=figures.ROOF, ms=13, mew=1.6, zorder=4, label="predicted")
    names = [f"{RUNGS[rung]}  {tables.fmt(value)}" for rung, value in zip(rows["rung"], reached, strict=True)]
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlabel("1,000 tokens/s")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper right")
    return drawn


def smooth(losses: Any) -> np.ndarray:
    """Means over WINDOW steps of a row's losses."""
    values = np.array(each(losses))
    if len(values) < WINDOW:
        return np.array([])
    return np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid")


def apart(rows: pd.DataFrame) -> pd.DataFrame:
    """How far each rung's losses, averaged over WINDOW steps, lie from those of its run's first rung, at most and in
    the end; of a rung measured again: from its own."""
    rows = tables.in_order(rows, ["world_size", "rung", "repeat"], RUNGS)
    lines = []
    for (machine, gpus), part in rows.groupby(["machine", "world_size"], sort=False):
        curves = {(row.rung, row.repeat): smooth(row.losses) for row in part.itertuples()}
        first = next((curve for curve in curves.values() if len(curve)), np.array([]))
        for (rung, repeat), curve in curves.items():
            base = curves.get((rung, 0), first) if repeat else first
            off = np.abs(curve - base) if 0 < len(curve) == len(base) else np.array([math.nan])
            last = curve[-1] if len(curve) else math.nan
            lines.append([machine, gpus, rung, repeat, off.max(), off[-1], last])
    return pd.DataFrame(lines, columns=["machine", "GPUs", "rung", "repeat", "largest", "last", "loss"])


def losses_figure(rows: pd.DataFrame) -> Figure:
    """The losses of the rungs of DRAWN over one another, how far each lies from the first one's, and of FlashAttention
    the second measurement."""
    again = (rows["repeat"] == 1) & (rows["rung"] == "flash")
    rows = rows[((rows["repeat"] == 0) | again) & rows["losses"].notna() & rows["rung"].isin(DRAWN)]
    rows = tables.in_order(rows, ["world_size", "rung", "repeat"], RUNGS).drop_duplicates(["rung", "repeat"])
    drawn, axes = figures.panels(2, height=2.6)
    above, below = axes[0]
    curves = [smooth(losses) for losses in rows["losses"]]
    first = next((curve for curve in curves if len(curve)), None)
    for row, curve in zip(rows.itertuples(), curves, strict=True):
        if first is not None and len(curve) == len(first):
            _, color, _ = figures.look(f"rung {row.rung}", DRAWN.index(row.rung))
            steps = np.arange(len(curve)) + WINDOW
            line = ":" if row.rung == "flash" else ("-", "--")[DRAWN.index(row.rung) % 2]
            style = {"color": color, "ls": line, "label": RUNGS[row.rung] + ", again" * row.repeat}
            style |= {"alpha": 0.6} if row.repeat else {}
            above.plot(steps, curve, **style)
            below.plot(steps, curve - first, **style)
    above.set(xlabel="step", title="loss, nats a token")
    below.set(xlabel="step", title="loss − that of plain fp32")
    if first is None:
        figures.nothing(above)
    figures.legend_below(drawn, above)
    return drawn


def reachable(rows: pd.DataFrame) -> float:
    """The lowest loss, in tenths of a nat, that all rungs of one GPU fall to; NaN without rungs."""
    ends = [smooth(losses)[-1:] for losses in rows[rows["world_size"] == 1]["losses"]]
    found = [end.item() for end in ends if len(end)]
    return math.ceil(10 * max(found)) / 10 if found else math.nan


def time_to(rows: pd.DataFrame, loss: float) -> pd.DataFrame:
    """Steps and seconds until a rung's losses, averaged over WINDOW steps, fall to `loss`; NaN where they do not."""
    rows = tables.in_order(rows[rows["repeat"] == 0], ["world_size", "rung"], RUNGS)
    steps = []
    for losses in rows["losses"]:
        reached = np.flatnonzero(smooth(losses) <= loss)
        steps.append(float(reached[0] + WINDOW) if len(reached) else math.nan)
    return pd.DataFrame({
        "machine": rows["machine"], "GPUs": rows["world_size"], "rung": rows["rung"], "steps": steps,
        "seconds": np.array(steps) * rows["step_ms_p50"].to_numpy(float) / 1e3,
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ real runs
def runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Each run: how long, how fast, what it reached beside the entropy of the text."""
    return pd.DataFrame({
        "machine": rows["machine"], "size": rows["size"], "dtype": rows["dtype"], "minutes": rows["minutes"],
        "million tokens": rows["tokens"] / 1e6, "1,000 tokens/s": rows["tokens_per_s"] / 1e3,
        "MFU, %": 100 * rows["mfu"],
        "peak, GiB": rows["peak_gib"], "loss": rows["valid_loss"], "entropy": rows["floor"],
        "bits a byte": rows["bits_per_byte"], "entropy, bits a byte": rows["floor_bits_per_byte"],
    })  # fmt: skip


def run_figure(rows: pd.DataFrame) -> Figure:
    """How far training and held-out loss of each run lie above the entropy of its text, over its tokens."""
    rows = rows[rows["valid_losses"].notna()]
    drawn, axes = figures.panels(max(1, len(rows)), height=2.6)
    several = rows["machine"].nunique() > 1
    if rows.empty:
        figures.nothing(axes[0, 0])
    for ax, row in zip(axes[0], rows.to_dict("records"), strict=False):
        ax.set_yscale("log")
        for name, label, style in (("loss", "training", "-"), ("valid", "held out", "o-")):
            losses = np.array(each(row["losses" if name == "loss" else "valid_losses"]))
            million = np.array(each(row[f"{name}_tokens"])) / 1e6
            ax.plot(million, losses - row["floor"], style, label=label, markersize=3)
        figures.plain_ticks(ax.yaxis, 1, 2, 5)
        title = f"{row['size']}, {row['dtype']}, {row['minutes']:g} min"
        ax.set(xlabel="million tokens", title=title + f" ({row['machine']})" * several)
    axes[0, 0].set_ylabel("loss − entropy,\nnats a token")
    figures.legend_below(drawn, axes[0, 0])
    return drawn


def seconds_to(row: Row, loss: Number) -> Number:
    """Seconds of steps until a run's held-out loss fell to `loss`, between two evaluations linear."""
    seconds, losses = (np.array(each(getattr(row, f"valid_{name}"))) for name in ("seconds", "losses"))
    below = np.flatnonzero(losses <= loss) if len(losses) == len(seconds) and not loss.missing else []
    if not len(below) or not below[0]:
        return Number(math.nan, loss.missing or f"{row!r}: no evaluation between which it fell so far")
    end = below[0] + 1
    return Number(np.interp(-float(loss), -losses[:end], seconds[:end]))
