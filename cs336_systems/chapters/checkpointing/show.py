"""What chapter `checkpointing` shows: numeric frames and figures from its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.chapters.checkpointing import measure as experiment
from cs336_systems.chapters.checkpointing.measure import XL
from cs336_systems.chapters.memory.show import tensors
from cs336_systems.measure.clocks.turns import each
from cs336_systems.report import figures, tables
from cs336_systems.sizes import size

GIB, MIB = 2**30, 2**20
LARGEST = 8  # of a block's saved tensors: those that are shown
NAMES = {
    "none": "none", "halves": "half a block", "blocks": "{} blocks", "nested": "nested halves",
    "chained": "chained", "selective": "selective",
}  # fmt: skip


def told(kept: Any) -> list[tuple[str, int, int]]:
    """Column `kept` as (operation, how many tensors, bytes of each)."""
    parts = [part.rpartition(":") for part in (kept.split() if isinstance(kept, str) else ())]
    return [(name, *map(int, numbers.split("x"))) for name, _, numbers in parts]


def with_predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `name`, the strategy in words; GiB of activations at the peak, `predicted` and `measured`; and MiB
    of a block: `kept_mib`, `change_mib` (median over blocks) of memory in its backward pass, `gradients_mib`, the sum.
    """
    columns = ["name", "predicted", "measured", "kept_mib", "change_mib", "gradients_mib"]
    lines = []
    for row in rows.to_dict("records"):
        case = experiment.TABLE.case_of(row)
        kept = float(sum(count * num_bytes for _, count, num_bytes in told(row["kept"])))
        device = "cpu" if row["machine"].startswith("cpu-") else "cuda"
        changes = each(row["backward_bytes_each"])
        predicted = experiment.predicted_bytes(case, device, kept)
        if case.strategy == "selective" and not kept:  # no plan is known
            predicted = np.nan
        name = NAMES[case.strategy].format(case.block_size).replace("1 blocks", "each block")
        measured, change = float(row["activations_bytes"]), float(np.median(changes)) if changes else np.nan
        of_block = kept / MIB if kept else np.nan, change / MIB, (kept + change) / MIB
        lines.append((name, predicted / GIB, measured / GIB, *of_block))
    found = pd.DataFrame(lines, rows.index, columns)
    return pd.concat([rows.drop(columns=columns, errors="ignore"), found], axis=1)


def strategies(rows: pd.DataFrame, attention: str = "") -> pd.DataFrame:
    """Whole models, by how attention is computed (all, if empty): activations at the peak by the closed form and
    measured, a step's time, and forward passes."""
    rows = rows[((rows["num_layers"] == 0) | (rows["size"] == "tiny")) & (rows["repeat"] == 0)]
    rows = with_predictions(rows[rows["attention"] == attention] if attention else rows)
    rows = tables.in_order(rows, ["machine", "strategy", "block_size"], experiment.STRATEGIES)
    table = pd.DataFrame({
        "machine": rows["machine"], "checkpoints": rows["name"],
        "predicted, GiB": rows["predicted"], "measured, GiB": rows["measured"],
        "step, ms": rows["step_ms_p50"], "forward passes": rows["forwards"],
    })  # fmt: skip
    words = {line: tables.word(status) for line, status in rows["status"].items()}
    table.attrs["words"] = dict.fromkeys(("measured, GiB", "step, ms", "forward passes"), words)
    return table


def depth_figure(rows: pd.DataFrame) -> Figure:
    """Over the number of blocks: activations at the peak, measured (markers) and by the closed form (lines); forward
    passes of a block. Of the first machine."""
    rows = with_predictions(tables.first_machine(tables.chosen(rows, size="small", repeat=0)))
    drawn, axes = figures.panels(columns=2, height=2.6)
    one = (rows["strategy"] == "blocks") & (rows["block_size"] == 1)
    kinds = {
        "none": rows["strategy"] == "none", "√N blocks": (rows["strategy"] == "blocks") & ~one, "each block": one,
        "nested halves": rows["strategy"] == "nested", "chained": rows["strategy"] == "chained",
    }  # fmt: skip
    titles = {"measured": "activations at the peak, GiB", "forwards": "forward passes of a block"}
    for ax, (column, title) in zip(axes[0], titles.items(), strict=True):
        ax.set_title(title)
        if rows[column].isna().all():
            figures.nothing(ax)
            continue
        for place, (name, chosen) in enumerate(kinds.items()):
            some = rows[chosen].sort_values("num_layers")
            _, color, marker = figures.look(name, place)
            line = "predicted" if column == "measured" else column
            ax.plot(some["num_layers"], some[line].astype(float), color=color, lw=1, zorder=2)
            ax.plot(some["num_layers"], some[column].astype(float), marker, color=color, label=name, zorder=3)
        ax.set(xscale="log", yscale="log", xlabel="blocks")
        depths = sorted(set(rows["num_layers"]))
        ax.set_xticks(depths, [str(n) for n in depths])
        ax.minorticks_off()
        figures.plain_ticks(ax.yaxis, 1, 3)
    figures.legend_below(drawn, *axes[0])
    return drawn


def residuals(rows: pd.DataFrame, context_length: int) -> pd.DataFrame:
    """What a block of the handout's model saves, by the operation that saves it, the largest first; of the first
    machine that has the row. `share` is of all that the block saves."""
    found = tables.chosen(rows, size=XL, context_length=context_length, strategy="none", repeat=0)
    found = found[(found["num_layers"] > 0) & found["kept"].notna()]
    parts = told(found["kept"].iloc[0]) if len(found) else []
    names = tensors(size(XL), int(found["batch"].iloc[0]), context_length) if parts else {}
    all_bytes = sum(count * num_bytes for _, count, num_bytes in parts)
    lines = []
    for name, count, num_bytes in parts[:LARGEST]:
        whole = count * num_bytes
        each = names.get(num_bytes), num_bytes / MIB
        lines.append((f"`{name}`", count, *each, whole / MIB, whole / all_bytes))
    return pd.DataFrame(lines, columns=["operation", "tensors", "shape", "MiB each", "MiB", "share"])


def block_bytes() -> dict[str, float]:
    """GiB of the handout's model in fp32, context 2,048, batch 4: `saved` by a block, its `input`, the `gradients`
    of its weights; `held`, weights and gradients of all."""
    config = size(XL)
    counts = accounting.parameter_counts(config)
    weights = (counts["attention"] + counts["ffn"]) / config.num_layers + 2 * config.d_model
    found = {
        "saved": sum(accounting.saved_layer_bytes(config, 4, 2048).values()),
        "input": accounting.residual_bytes(config, 4, 2048), "gradients": 4 * weights,
        "held": 8 * accounting.num_parameters(config),
    }  # fmt: skip
    return {name: num_bytes / GIB for name, num_bytes in found.items()}
