"""What chapter `benchmarking` shows: times of the phases, how they spread, what warming up does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.experiments.steps import WARM
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import steps
from cs336_systems.report.tables import EMPTY, fmt
from cs336_systems.sizes import SIZES, size

PRIMARY = 512


def warm(chapter: Chapter, **where: Any) -> pd.DataFrame:
    """The measured rows after a full warm-up, without the A/A repetitions."""
    rows = chapter.measured(repeat=0, **where)
    return rows[rows["warmup"] >= WARM]


def primary(chapter: Chapter) -> int:
    """The context length that single-context tables show: 512, or the longest there is."""
    lengths = set(chapter.rows(repeat=0)["context_length"])
    return PRIMARY if PRIMARY in lengths or not lengths else max(lengths)


def prediction_table(batch: int = 4, context_length: int = PRIMARY) -> pd.DataFrame:
    """Parameters, FLOPs by component, and what they come to for a step, for every size of the handout."""
    out = []
    for name, config in SIZES.items():
        if name == "tiny":
            continue
        flops = accounting.forward_matmul_flops(config, batch, context_length)
        attention = flops["attention_scores"] + flops["attention_output"]
        out.append({
            "size": name,
            "parameters, M": fmt(accounting.num_parameters(config) / 1e6),
            "forward, TFLOP": fmt(accounting.model_flops(config, batch, context_length, "forward") / 1e12),
            "in attention's products": f"{100 * attention / 2 / (sum(flops.values()) - attention / 2):.1f} %",
            "step, TFLOP": fmt(accounting.model_flops(config, batch, context_length, "train_step") / 1e12),
            "AdamW, GB moved": fmt(28 * accounting.num_parameters(config) / 1e9),
        })  # fmt: skip
    return pd.DataFrame(out)


def floor_table(chapter: Chapter) -> pd.DataFrame:
    """Measured forward and backward beside the floor of their products, at the primary context."""
    out = []
    found = steps.found_roofs(chapter)
    rows = steps.passes(chapter.rows(repeat=0, context_length=primary(chapter)))
    rows = rows[rows["warmup"] >= WARM]
    for row in sorted(rows.to_dict("records"), key=lambda r: (r["dtype"], list(SIZES).index(r["size"]))):
        line = {"machine": row["machine"], "dtype": row["dtype"], "size": row["size"]}
        if row["status"] != "ok" or row["machine"] not in found:
            out.append(line | {"floor, ms": EMPTY, "forward + backward, ms": steps.word(row["status"])})
            continue
        floor = steps.floor_ms(found[row["machine"]], row)
        measured = row["forward_ms_p50"] + row["backward_ms_p50"]
        out.append(line | {
            "floor, ms": fmt(floor),
            "forward + backward, ms": fmt(measured),
            "floor / measured": EMPTY if floor is None else f"{100 * floor / measured:.0f} %",
            "backward / forward": fmt(row["backward_ms_p50"] / row["forward_ms_p50"]),
        })  # fmt: skip
    columns = [
        "machine", "dtype", "size", "floor, ms", "forward + backward, ms", "floor / measured",
        "backward / forward",
    ]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


def variation(chapter: Chapter) -> pd.DataFrame:
    """Standard deviation over mean of forward and backward, in percent, for each size: the least and the most."""
    rows = steps.passes(warm(chapter))
    out = []
    for machine, of_machine in rows.groupby("machine"):
        for name in steps.in_order(of_machine["size"]):
            part = of_machine[of_machine["size"] == name]
            line = {"machine": machine, "size": name, "cases": len(part)}
            for phase in ("forward", "backward"):
                share = 100 * part[f"{phase}_ms_std"].astype(float) / part[f"{phase}_ms_mean"].astype(float)
                line[f"{phase}, median"] = f"{fmt(share.median(), 2)} %"
                line[f"{phase}, most"] = f"{fmt(share.max(), 2)} %"
            out.append(line)
    return pd.DataFrame(out)


def spread_figure(chapter: Chapter, machine: str) -> Figure:
    """Every measured step of forward and of backward, over the median of its case: a column for each size."""
    rows = steps.passes(warm(chapter, machine=machine, context_length=primary(chapter)))
    rows = rows[rows["dtype"] == "fp32"]
    figure, axes = figures.panels(columns=2, height=2.6, sharey=True)
    for ax, phase in zip(axes[0], ("forward", "backward"), strict=True):
        names = steps.in_order(rows["size"])
        if not names:
            figures.nothing(ax)
        for place, name in enumerate(names):
            times = np.array(steps.series(rows[rows["size"] == name].iloc[0], phase))
            beside = np.linspace(-0.3, 0.3, len(times))
            _, color, marker = figures.look(name, place)
            ax.plot(place + beside, times / np.median(times), marker, color=color, ms=3.5, zorder=3)
        ax.axhline(1, color="#6b6b6b", lw=0.8)
        ax.set_xticks(range(len(names)), names)
        ax.set_title(phase)
    axes[0, 0].set_ylabel("time / median")
    return figure


def context_figure(chapter: Chapter, machine: str) -> Figure:
    """Forward and backward over the context length, a line for each size, with one standard deviation as a band."""
    rows = steps.passes(warm(chapter, machine=machine, dtype="fp32"))
    figure, axes = figures.panels(columns=2, height=3.0, sharey=True)
    for ax, phase in zip(axes[0], ("forward", "backward"), strict=True):
        mean, std = rows[f"{phase}_ms_mean"].astype(float), rows[f"{phase}_ms_std"].astype(float)
        drawn = rows.assign(low=mean - std, high=mean + std)
        drawn = drawn.sort_values("size", key=lambda column: column.map(list(SIZES).index), kind="stable")
        figures.lines(ax, drawn, "context_length", f"{phase}_ms_mean", "size", "low", "high", log_y=True)
        ax.set(title=phase, xlabel="context length")
    axes[0, 0].set_ylabel("ms")
    handles, names = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return figure


# ------------------------------------------------------------------------------------------------ warm-up
def warmup_table(chapter: Chapter) -> pd.DataFrame:
    """Forward and backward (mean ± std of the measured steps) after 0, 1, 2 and 5 warm-up steps."""
    rows = chapter.rows(mode="forward_backward", repeat=0, dtype="fp32", context_length=primary(chapter))
    cold = rows[rows["warmup"] < WARM]
    out = []
    for machine in chapter.machines or [""]:
        for name in steps.in_order(cold[cold["machine"] == machine]["size"]):
            part = rows[(rows["machine"] == machine) & (rows["size"] == name)].sort_values("warmup")
            for row in part.to_dict("records"):
                first = steps.series(row, "step")[:1] if row["status"] == "ok" else []
                out.append({
                    "machine": machine, "size": name, "warm-up steps": row["warmup"],
                    "forward": steps.spread(row, "forward"), "backward": steps.spread(row, "backward"),
                    "first measured step, ms": fmt(first[0]) if first else steps.word(row["status"]),
                    "median step, ms": fmt(row["step_ms_p50"]),
                })  # fmt: skip
    return pd.DataFrame(out)


def warmup_figure(chapter: Chapter, machine: str) -> Figure:
    """The steps of fresh processes, one after the other, beside the median of the steps after a full warm-up."""
    rows = chapter.measured(mode="forward_backward", repeat=0, dtype="fp32", machine=machine, warmup=0)
    figure, axes = figures.panels(height=2.8)
    ax = axes[0, 0]
    if rows.empty:
        figures.nothing(ax)
    for place, name in enumerate(steps.in_order(rows["size"])):
        times = np.array(steps.series(rows[rows["size"] == name].iloc[0], "step"))
        label, color, marker = figures.look(name, place)
        ax.plot(np.arange(1, len(times) + 1), times, marker=marker, color=color, label=label)
    if len(rows):
        ax.set_yscale("log")
        ax.legend()
    ax.set(xlabel="step of a fresh process", ylabel="forward + backward, ms")
    return figure


def warmup_words(chapter: Chapter) -> str:
    """What the first step of a process costs, what it does to a mean, and whether the second differs."""
    rows = chapter.measured(mode="forward_backward", repeat=0, dtype="fp32", context_length=primary(chapter))
    said = []
    for machine in chapter.machines:
        part = rows[rows["machine"] == machine]
        times = {
            (row["size"], row["warmup"]): np.array(steps.series(row, "step"))
            for row in part.to_dict("records")
        }
        for name in steps.in_order(part[part["warmup"] == 0]["size"]):
            cold = times[(name, 0)]
            if len(cold) < 3:
                continue
            settled = float(np.median(cold[len(cold) // 2 :]))
            words = (
                f"`{name}`: the first step of a fresh process takes {fmt(cold[0])} ms, {fmt(cold[0] / settled)} times"
                f" the median of the later half ({fmt(settled)} ms), and the second {fmt(cold[1] / settled)} times;"
                f" that makes the mean of {len(cold)} steps {fmt(cold.mean() / settled)} times and their standard"
                f" deviation {fmt(100 * cold.std(ddof=1) / cold.mean(), 2)} % of it"
            )
            for warmup in (1, 2):
                if (name, warmup) in times:
                    after = times[(name, warmup)]
                    words += (
                        f"; after {warmup} warm-up step{'s' * (warmup > 1)} the first measured one is"
                        f" {fmt(after[0] / np.median(after))} times the median"
                    )
            said.append(f"- {words}.")
    return "\n".join(said) or f"The steps of fresh processes: {NOT_MEASURED}."


# ------------------------------------------------------------------------------------------------ sentences
def times_words(chapter: Chapter) -> str:
    """Forward and backward of the smallest and the largest size that was measured, and how they vary."""
    rows = steps.passes(warm(chapter, context_length=primary(chapter), dtype="fp32"))
    if rows.empty:
        return f"Times of forward and backward: {NOT_MEASURED}."
    words = []
    for machine, part in rows.groupby("machine"):
        names = steps.in_order(part["size"])
        texts = []
        for name in dict.fromkeys((names[0], names[-1])):
            row = part[part["size"] == name].iloc[0]
            texts.append(
                f"`{name}` takes {steps.spread(row, 'forward')} ms forward and {steps.spread(row, 'backward')} ms"
                " backward"
            )
        ratio = part["backward_ms_p50"].astype(float) / part["forward_ms_p50"].astype(float)
        share = pd.concat([
            part[f"{p}_ms_std"].astype(float) / part[f"{p}_ms_mean"].astype(float) for p in ("forward", "backward")
        ])  # fmt: skip
        words.append(
            f"On `{machine}`, fp32, context {primary(chapter)}, after {WARM} warm-up steps: {', '.join(texts)}."
            f" Backward takes {fmt(ratio.min())} to {fmt(ratio.max())} times as long as forward. The standard deviation"
            f" is {fmt(100 * share.min(), 2)} to {fmt(100 * share.max(), 2)} % of the mean,"
            f" {fmt(100 * share.median(), 2)} % in the median."
        )
    return "\n\n".join(words)


def growth_words(chapter: Chapter) -> str:
    """How the time grows with the context: far less than the tokens where the host sets the pace."""
    rows = steps.passes(warm(chapter, dtype="fp32"))
    said = []
    for machine, of_machine in rows.groupby("machine"):
        for name in steps.in_order(of_machine["size"]):
            part = of_machine[of_machine["size"] == name].sort_values("context_length")
            if len(part) < 2:
                continue
            first, last = part.iloc[0], part.iloc[-1]
            tokens = last["context_length"] / first["context_length"]
            work = [
                accounting.model_flops(size(name), int(r["batch"]), int(r["context_length"]), "forward")
                for r in (first, last)
            ]
            times = [
                fmt(last[f"{phase}_ms_p50"] / first[f"{phase}_ms_p50"]) for phase in ("forward", "backward")
            ]
            said.append(
                f"- `{machine}`, `{name}`, from context {first['context_length']} to {last['context_length']}: tokens"
                f" {fmt(tokens)} times, FLOPs {fmt(work[1] / work[0])} times, forward {times[0]} times, backward"
                f" {times[1]} times."
            )
    return "\n".join(said) or f"How times grow with the context: {NOT_MEASURED}."


def out_of_memory(chapter: Chapter) -> str:
    """Which cases ran out of memory, beside what the closed form said they need."""
    rows = chapter.rows(repeat=0)
    failed = rows[rows["status"] == "oom"]
    measured = rows[rows["status"] == "ok"]
    if failed.empty:
        return (
            "No case ran out of memory."
            if len(measured)
            else f"Whether a case runs out of memory: {NOT_MEASURED}."
        )
    lines = []
    for row in failed.sort_values(["size", "context_length", "mode"]).to_dict("records"):
        needed = sum(
            accounting.peak_bytes(
                size(row["size"]), row["batch"], row["context_length"], row["mode"],
                "bf16" if row["dtype"] == "bf16" else "fp32", "reference", "cuda", "fused",
            ).values()
        )  # fmt: skip
        lines.append(
            f"- `{row['size']}`, context {row['context_length']}, `{row['mode']}`, {row['dtype']}: by the closed form"
            f" it needs {fmt(needed / 2**30)} GiB."
        )
    return f"{len(failed)} of {len(rows)} cases ran out of memory:\n\n" + "\n".join(lines)


def memory_words(chapter: Chapter) -> str:
    """How far the closed form of the peak is from the peak that the allocator saw."""
    rows = warm(chapter)
    rows = rows[rows["peak_gib"].notna()]
    if rows.empty:
        return f"Peaks of memory: {NOT_MEASURED} (they need a CUDA device)."
    off, more = [], []
    for row in rows.to_dict("records"):
        needed = sum(
            accounting.peak_bytes(
                size(row["size"]), row["batch"], row["context_length"], row["mode"],
                "bf16" if row["dtype"] == "bf16" else "fp32", "reference", "cuda", "fused",
            ).values()
        )  # fmt: skip
        off.append(row["peak_gib"] * 2**30 / needed - 1)
        more.append(row["peak_gib"] * 2**10 - needed / 2**20)
    off = np.array(off)
    return (
        f"The allocator's peak was {fmt(100 * off.min(), 2)} to {fmt(100 * off.max(), 2)} % above what the closed form"
        f" gives, over {len(off)} cases: by {fmt(min(more), 2)} to {fmt(max(more), 2)} MiB. The closed form leaves out"
        " cuBLAS's workspaces, the tables of the rotary positions, and what the allocator rounds up: a tensor may get a"
        " block that is up to 1 MiB larger than it asked for, because so small a rest is not split off, and a step of a"
        " large model holds four such tensors for each of its weights. [The chapter on memory](memory.ipynb) tells"
        " requested from allocated bytes."
    )
