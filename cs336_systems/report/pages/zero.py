"""What chapter `zero` shows of memory: what is alive by component beside the closed form, peaks, differences. Times and
what is sent are in `zero_speed`, sentences in `zero_words`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems import accounting
from cs336_systems.accounting.zero import COMPONENTS
from cs336_systems.measure import rows as store
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, status_words
from cs336_systems.report.tables import EMPTY, fmt, percent
from cs336_systems.sizes import SIZES, size

GIB, MIB = 2**30, 2**20
LABELS = {
    "alone": "one rank",
    "plain": "plain",
    "sharded": "sharded",
    "overlapped": "overlapped",
    "torch": "torch",
    "torch_zero": "torch, sharded",
}
FIRST_STEP = {
    "initialized": "model initialized",
    "first_before": "before the optimizer's step",
    "first_after": "after it",
}
LATER_STEP = {
    "later_forward": "after forward",
    "later_before": "before the optimizer's step",
    "later_after": "after it",
}
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer_state": "#56B4E9",
    "buckets": "#CC79A7",
    "activations": "#009E73",
    "other": "#6b6b6b",
}
TIMED = "timed"
Row = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------ rows
def records(chapter: Chapter, **where: Any) -> list[dict[str, Any]]:
    """Rows as dicts in the order of machine, number of ranks, context, variant, moment; no repetitions."""
    moments = [*FIRST_STEP, *LATER_STEP, TIMED]
    rows = chapter.rows(**({"repeat": 0} | where)).to_dict("records")
    return sorted(
        rows,
        key=lambda r: (
            r["machine"], r["world_size"], r["context_length"],
            list(LABELS).index(r["variant"]), moments.index(r["moment"]),
        ),
    )  # fmt: skip


def there(rows: Sequence[Row]) -> list[Row]:
    """Without those that this machine was never able to run."""
    return [row for row in rows if not row["status"].startswith("skipped")]


def one(chapter: Chapter, **where: Any) -> dict[str, Any] | None:
    """The one measured row of the first machine with these values; None where there is none."""
    machine = (chapter.machines or [""])[0]
    found = [r for r in records(chapter, **({"machine": machine} | where)) if r["status"] == "ok"]
    assert len(found) < 2, where
    return found[0] if found else None


def contexts(chapter: Chapter, **where: Any) -> list[int]:
    """The context lengths of the chosen cases, or of those with these values."""
    return sorted({int(n) for n in chapter.rows(**where)["context_length"]})


def world_size(chapter: Chapter) -> int:
    """The number of ranks that most is measured with: the fewest above one."""
    return min((int(n) for n in chapter.rows()["world_size"] if n > 1), default=2)


def model(chapter: Chapter) -> str:
    """The model that was chosen, the largest of several."""
    chosen = set(chapter.rows()["size"])
    return [name for name in SIZES if name in chosen][-1]


def unit(chapter: Chapter) -> tuple[str, int]:
    """In what memory is counted: GiB, or MiB for a tiny model."""
    return ("MiB", MIB) if accounting.num_parameters(size(model(chapter))) < 16 * MIB else ("GiB", GIB)


def case_of(chapter: Chapter, row: Row) -> Any:
    """The case of a row, its numbers as Python's own."""
    kinds = {"bucket_mb": float}
    fields = store.case_fields(chapter.experiment)
    texts = {f: row[f] if isinstance(row[f], str) else kinds.get(f, int)(row[f]) for f in fields}
    return chapter.experiment.Case(**texts)


def device_of(machine: str) -> str:
    """Where a machine's cases ran."""
    return "cpu" if machine.startswith("cpu-") else "cuda"


def predicted(chapter: Chapter, row: Row) -> dict[str, int]:
    """Component → bytes at a row's moment by the closed form."""
    return chapter.experiment.predicted(case_of(chapter, row), device_of(row["machine"]))


def measured(chapter: Chapter, row: Row) -> dict[str, float]:
    """Component → bytes that a row has, the rest included."""
    return {name: float(row[column]) for name, column in chapter.experiment.COMPONENT_COLUMNS.items()}


def word(row: Row | None) -> str:
    """What stands in place of a number."""
    return NOT_MEASURED if row is None else status_words(row["status"].split(":")[0])


def head_of(row: Row) -> dict[str, Any]:
    """The first columns of a table's line."""
    ranks = 1 if row["variant"] == "alone" else int(row["world_size"])
    return {"machine": row["machine"] or EMPTY, "ranks": ranks, "variant": LABELS[row["variant"]]}


# ------------------------------------------------------------------------------------------------ predictions
def prediction_table(name: str = "xl", ranks: Sequence[int] = (1, 2, 4, 8, 64)) -> pd.DataFrame:
    """Memory of a rank after the first step by the closed form, GiB, and how evenly the shares fall."""
    config, out = size(name), []
    whole = sum(accounting.zero_memory(config, 1)["after_step"].values())
    for count in ranks:
        parts = accounting.zero_memory(config, count)["after_step"]
        total = sum(parts.values())
        out.append({
            "ranks": count,
            **{part.replace("_", " "): fmt(num_bytes / GIB) for part, num_bytes in parts.items()},
            "together, GiB": fmt(total / GIB),
            "saved": f"{fmt(100 * (1 - total / whole))} %" if count > 1 else EMPTY,
            "fullest above mean": f"{100 * accounting.shard_imbalance(config, count):.4f} %",
        })  # fmt: skip
    return pd.DataFrame(out)


# ------------------------------------------------------------------------------------------------ (a) memory
def moments_table(chapter: Chapter, context_length: int) -> pd.DataFrame:
    """The handout's three moments of the first step: what is alive, the closed form, the peak on the way there."""
    name, scale = unit(chapter)
    out = []
    for row in there(records(chapter, context_length=context_length, moment=list(FIRST_STEP))):
        expected = sum(predicted(chapter, row).values())
        line = head_of(row) | {"moment": FIRST_STEP[row["moment"]], f"alive, {name}": word(row)}
        line |= {"closed form": fmt(expected / scale), "apart": EMPTY, "peak before": EMPTY}
        if row["status"] == "ok":
            line[f"alive, {name}"] = fmt(row["live_bytes"] / scale, 4)
            line |= {
                "apart": percent(row["live_bytes"] / expected - 1),
                "peak before": fmt(row["peak_bytes"] / scale, 4),
            }
        out.append(line)
    return pd.DataFrame(out)


def components_table(chapter: Chapter, context_length: int, moment: str = "later_after") -> pd.DataFrame:
    """What is alive at a moment by component: `measured / closed form`."""
    _, scale = unit(chapter)
    rows = there(records(chapter, context_length=context_length, moment=moment))
    parts = [(predicted(chapter, r), measured(chapter, r) if r["status"] == "ok" else None) for r in rows]
    least = scale / 2000  # less than half a thousandth of the unit is nothing
    shown = [n for n in COMPONENTS if any(e[n] > least or (m and m[n] > least) for e, m in parts)]

    def text(expected: float, found: float | None) -> str:
        numbers = ["0" if n <= least else fmt(n / scale) for n in (found or 0, expected)]
        return (
            EMPTY
            if numbers == ["0", "0"]
            else f"{word(None) if found is None else numbers[0]} / {numbers[1]}"
        )

    out = []
    for row, (expected, found) in zip(rows, parts, strict=True):
        line = head_of(row) | {n.replace("_", " "): text(expected[n], found and found[n]) for n in shown}
        line["other"] = fmt(found["other"] / scale, 2) if found else EMPTY
        out.append(line)
    return pd.DataFrame(out)


def peak(chapter: Chapter, row: Row) -> tuple[float, str] | None:
    """(bytes, when) of the peak of a later step: that of the three stretches before its moments; None if one lacks."""
    keys = ("machine", "variant", "context_length", "size", "world_size", "batch", "bucket_mb")
    found = chapter.measured(**{key: row[key] for key in keys}, moment=list(LATER_STEP), repeat=0)
    if len(found) < len(LATER_STEP):
        return None
    phases = {"later_forward": "forward", "later_before": "backward", "later_after": "optimizer"}
    best = max(found.to_dict("records"), key=lambda r: (r["peak_bytes"], -list(phases).index(r["moment"])))
    return float(best["peak_bytes"]), phases[best["moment"]]


def peak_table(chapter: Chapter) -> pd.DataFrame:
    """The peak of a step that is not the first, beside the closed form, and what sharding takes off it."""
    name, scale = unit(chapter)
    out = []
    for row in there(records(chapter, moment="later_before")):
        expected = sum(
            chapter.experiment.predicted_peak(case_of(chapter, row), device_of(row["machine"])).values()
        )
        found = peak(chapter, row)
        line = head_of(row) | {"context": int(row["context_length"])}
        line |= {
            f"peak, {name}": word(row),
            "closed form": fmt(expected / scale),
            "apart": EMPTY,
            "in phase": EMPTY,
        }
        if found is not None:
            line |= {f"peak, {name}": fmt(found[0] / scale, 4), "apart": percent(found[0] / expected - 1)}
            line["in phase"] = found[1]
        out.append(line)
    return pd.DataFrame(out)


def difference_table(chapter: Chapter) -> pd.DataFrame:
    """From the closed form to what the device has lost, MiB, after a later step."""
    out = []
    heads = ("other tensors", "rounding", "cached", "outside", "device")
    where = {"moment": "later_after"}
    for row in there(records(chapter, **where, context_length=max(contexts(chapter, **where), default=0))):
        expected = sum(predicted(chapter, row).values())
        line = head_of(row) | {"closed form": f"{expected / MIB:,.1f}"} | dict.fromkeys(heads, EMPTY)
        if row["status"] == "ok" and not pd.isna(row["reserved_bytes"]):
            numbers = (
                row["requested_bytes"] - expected, row["live_bytes"] - row["requested_bytes"],
                row["reserved_bytes"] - row["live_bytes"], row["outside_bytes"],
                row["reserved_bytes"] + row["outside_bytes"],
            )  # fmt: skip
            line |= {h: f"{n / MIB:,.1f}".replace("-", "−") for h, n in zip(heads, numbers, strict=True)}
        out.append(line)
    return pd.DataFrame(out)


def memory_figure(chapter: Chapter, context_length: int) -> Figure:
    """Stacked bars by component at the three moments of the first step, none of which has activations: measured, and
    the closed form beside it."""
    name, scale = unit(chapter)
    machine = (chapter.machines or [""])[0]
    figure, axes = figures.panels(columns=3, height=3.3, sharey=True)
    rows = there(records(chapter, machine=machine, context_length=context_length))
    ranks = world_size(chapter)
    for ax, (moment, title) in zip(axes[0], FIRST_STEP.items(), strict=True):
        shown = [
            r for r in rows
            if r["moment"] == moment and r["status"] == "ok" and (r["variant"] == "alone" or r["world_size"] == ranks)
        ]  # fmt: skip
        ax.set_title(title)
        if not shown:
            figures.nothing(ax)
            continue
        for place, row in enumerate(shown):
            _stack(ax, place - 0.2, {n: b / scale for n, b in measured(chapter, row).items()})
            _stack(ax, place + 0.2, {n: b / scale for n, b in predicted(chapter, row).items()}, hatch="////")
        ax.set_xticks(range(len(shown)), [LABELS[r["variant"]].replace(" ", "\n") for r in shown], fontsize=7)
        ax.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel(f"memory of a rank, {name}")
    handles = [Patch(color=c, label=n.replace("_", " ")) for n, c in COLORS.items() if n != "activations"]
    handles += [Patch(facecolor="white", edgecolor="#222222", hatch="////", label="closed form")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _stack(ax: Axes, x: float, parts: Mapping[str, float], hatch: str | None = None) -> None:
    bottom = 0.0
    for part, color in COLORS.items():
        height = max(parts.get(part, 0.0), 0.0)
        face = (
            {"color": color}
            if hatch is None
            else {"facecolor": "white", "edgecolor": color, "hatch": hatch, "lw": 0.5}
        )
        ax.bar(x, height, 0.36, bottom=bottom, zorder=3, **face)
        bottom += height
