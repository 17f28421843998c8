"""What chapter `zero` shows: memory beside its closed form, times of a step, the schedule of the optimizer's phase, and
what each rank sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.accounting.zero import ADAMW_BYTES, STEP_MOMENTS
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.zero import measure as experiment
from cs336_systems.report import figures, tables
from cs336_systems.sizes import size

GIB = 2**30
ROUNDS = 4  # of ShardedOptimizer
VARIANTS = {
    "alone": "no communication",
    "plain": "AdamW",
    "sharded": "sharded",
    "overlapped": "sharded, overlapped",
    "torch": "torch, AdamW",
    "torch_zero": "torch, sharded",
}
MOMENTS = {
    "initialized": "after initialization",
    "first_before": "before first update",
    "first_after": "after first update",
    "later_forward": "after a later forward",
    "later_before": "before a later update",
    "later_after": "after a later update",
}
PARTS = {
    "parameters_bytes": "parameters, GiB",
    "gradients_bytes": "gradients, GiB",
    "optimizer_state_bytes": "state, GiB",
    "buckets_bytes": "buckets, GiB",
    "activations_bytes": "activations, GiB",
    "other_bytes": "other, GiB",
    "live_bytes": "allocated, GiB",
    "peak_bytes": "peak, GiB",
}
SHARDED = ("sharded", "overlapped", "torch_zero")
_UPDATE = {"color": "#0072B2", "edgecolor": "white", "zorder": 2}
_BROADCAST = {"color": "#E69F00", "edgecolor": "white", "zorder": 2, "hatch": "////"}


# ------------------------------------------------------------------------------------------------ rows
def longest(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the longest context."""
    return rows[rows["context_length"] == rows["context_length"].max()].reset_index(drop=True)


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """No repetitions; in the order of context, GPUs, moment and variant."""
    by = ["context_length", "world_size", "machine", "moment", "variant"]
    return tables.in_order(rows[rows["repeat"] == 0], by, [*STEP_MOMENTS, experiment.TIMED], VARIANTS)


def _table(rows: pd.DataFrame, metrics: dict[str, str], scale: float = 1.0) -> pd.DataFrame:
    """A line for each row, which says what case it is of, and a column for each metric."""
    names = {"machine": "machine", "world_size": "GPUs", "context_length": "context", "moment": "moment"}
    keys = [k for k in names if k == "machine" or rows[k].nunique() > 1]
    heads = [names[k] for k in keys] + ["variant"]
    scaled = {column: scale * rows[column].astype(float) for column in metrics}
    words = {"moment": rows["moment"].map(MOMENTS), "variant": rows["variant"].map(VARIANTS)}
    return tables.spread(rows.rename(columns=names).assign(**scaled, **words), heads, metrics)


# ------------------------------------------------------------------------------------------------ memory
def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """What is allocated at each moment, by part, beside the closed form; and the peak since the moment before."""
    rows = _sorted(rows[rows["moment"] != experiment.TIMED])
    empty = [c for c in ("buckets_bytes", "activations_bytes") if not (rows[c] > 0).any()]
    out = _table(rows, {c: head for c, head in PARTS.items() if c not in empty}, 1 / GIB)
    forms = _closed_gib(rows, experiment.predicted)
    out.insert(out.columns.get_loc("peak, GiB"), "closed form, GiB", forms)
    return out


def peaks(rows: pd.DataFrame) -> pd.DataFrame:
    """The peak of a step that is not the first, beside the closed form."""
    rows = _sorted(rows[rows["moment"].isin(["later_forward", "later_before", "later_after"])])
    keys = ["machine", "world_size", "context_length", "variant"]
    most = rows.groupby(keys, sort=False)["peak_bytes"].transform(lambda x: x.max(skipna=False))
    rows = rows.assign(peak_bytes=most)[rows["moment"] == "later_before"]
    out = _table(rows, {"peak_bytes": "peak, GiB"}, 1 / GIB)
    return out.assign(**{"closed form, GiB": _closed_gib(rows, experiment.predicted_peak)})


def _closed_gib(rows: pd.DataFrame, form: Callable[..., dict[str, int]]) -> list[float]:
    devices = rows["source"].map({"tensors": "cpu"}).fillna("cuda")
    cases = map(experiment.TABLE.case_of, rows.itertuples())
    return [sum(form(*each).values()) / GIB for each in zip(cases, devices, strict=True)]


# ------------------------------------------------------------------------------------------------ times
def times(rows: pd.DataFrame, found: Mapping[str, Roofs]) -> pd.DataFrame:
    """Medians of a step and its phases; before them the optimizer's phase at the bandwidths of its machine's data
    sheet."""
    rows = _sorted(rows[rows["moment"] == experiment.TIMED])
    metrics = {f"{phase}_ms_p50": f"{phase}, ms" for phase in (*experiment.PHASES, "step")}
    out = _table(rows, metrics)
    roof = lambda row: found.get(row.machine, Roofs())
    expected = [expected_ms(r.variant, r.world_size, roof(r), r.size) for r in rows.itertuples()]
    out.insert(out.columns.get_loc("optimizer, ms"), "expected, ms", expected)
    return out


def expected_ms(variant: str, ranks: int, roof: Roofs, name: str = "xl") -> float:
    """The optimizer's phase by the closed form, at the data sheet's bandwidths."""
    return _phase_ms(variant, _parameters(name), ranks, *sheet(roof))


def _parameters(name: str) -> int:
    return accounting.num_parameters(size(name))


def sheet(roof: Roofs) -> tuple[float, float]:
    """Memory in TB/s and a link in GB/s in one direction; NaN where the GPU is not known."""
    link = roof.sheet and roof.sheet.nvlink_one_way_gb_per_s
    return (roof.sheet.tb_per_s, link) if link else (np.nan, np.nan)


def _phase_ms(variant: str, parameters: int, ranks: int, tb_per_s: float, link_gb_per_s: float) -> float:
    """The optimizer's phase by the closed form, at these bandwidths; overlapped, of the update alone."""
    if not (tb_per_s > 0 and link_gb_per_s > 0):
        return np.nan
    rounds = 1 if variant == "torch_zero" else ROUNDS
    ms = accounting.zero_optimizer_ms(parameters, ranks, tb_per_s, link_gb_per_s, rounds)
    return ms["update" if variant == "overlapped" else "sharded" if variant in SHARDED else "plain"]


# ------------------------------------------------------------------------------------------------ kernels
def kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """The optimizer's phase of each variant as a schedule of its profiled kernels: update and broadcasts, ms; what the
    closed form makes of them, and the phase measured at the longest context.

    A variant's update is its share of plain's. Overlapped, the kernels are those of `sharded`, which is profiled.
    """
    rows = _sorted(rows[rows["moment"] == experiment.TIMED])
    profiled = rows[rows["update_ms"] > 0].set_index(["machine", "world_size", "variant"])
    lines = []
    for row in longest(rows).itertuples():
        key = row.machine, row.world_size
        sends = "sharded" if row.variant == "overlapped" else row.variant
        if row.variant in ("alone", "torch") or not {(*key, "plain"), (*key, sends)} <= {*profiled.index}:
            continue
        plain, own = profiled.loc[(*key, "plain")], profiled.loc[(*key, sends)]
        moved = _parameters(row.size) * 1e-9
        update = plain["update_ms"] / (row.world_size if row.variant in SHARDED else 1)
        broadcast = float(own["communication_ms"])
        link = (row.world_size - 1) / row.world_size * 4e3 * moved / broadcast if broadcast else np.nan
        beta = ADAMW_BYTES * moved / plain["update_ms"]
        rates = beta, link if broadcast else np.inf
        schedule = _phase_ms(row.variant, _parameters(row.size), row.world_size, *rates)
        case = row.machine, row.world_size, row.variant
        lines.append([*case, update, broadcast, beta, link, schedule, row.optimizer_ms_p50])
    heads = ["machine", "GPUs", "variant", "update_ms", "broadcast_ms", "tb_per_s", "link_gb_per_s"]
    return pd.DataFrame(lines, columns=[*heads, "schedule_ms", "phase_ms"])


def schedule_figure(rows: pd.DataFrame) -> Figure:
    """`kernels` on a time axis: updates by round, the broadcasts under them, and the measured phase."""
    found = kernels(rows)
    teams = list(found.groupby(["GPUs", "machine"]))
    names = [name for name in VARIANTS if (found["variant"] == name).any()]  # the panels share their axis
    drawn, axes = figures.panels(max(1, len(teams)), height=2.3, sharex=True, sharey=True)
    if not teams:
        figures.nothing(axes[0, 0])
    for ax, ((gpus, machine), part) in zip(axes[0], teams, strict=False):
        for row in part.to_dict("records"):
            _schedule(ax, names.index(row["variant"]), row)
        ax.set_yticks(range(len(names)), [VARIANTS[name] for name in names], fontsize=8)
        several = found.loc[found["GPUs"] == gpus, "machine"].nunique() > 1
        ax.set_title(f"{gpus} GPUs" + f" ({machine})" * several)
        ax.set_xlabel("ms")
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1)
    if teams:
        axes[0, 0].invert_yaxis()
        bars = [axes[0, 0].barh(0, 0, **look) for look in (_UPDATE, _BROADCAST)]
        mark = axes[0, 0].plot([], [], "|", color="#222222", ms=11, mew=2)
        names = ["update", "broadcasts", "phase, measured"]
        drawn.legend([*bars, *mark], names, loc="outside lower center", ncols=3)
    return drawn


def _schedule(ax: Axes, place: int, row: dict[str, Any]) -> None:
    rounds = ROUNDS if row["variant"] in ("sharded", "overlapped") else 1
    update, broadcast, sent = row["update_ms"] / rounds, row["broadcast_ms"] / rounds, 0.0
    for turn in range(rounds):
        ax.barh(place - 0.18, update, 0.34, left=turn * update, **_UPDATE)
        sent = max(sent, (turn + 1) * update)
        ax.barh(place + 0.18, broadcast, 0.34, left=sent, **_BROADCAST)
        sent += broadcast
    ax.plot([row["phase_ms"]] * 2, [place - 0.42, place + 0.42], color="#222222", lw=2, zorder=3)


# ------------------------------------------------------------------------------------------------ what is sent
def traffic(rows: pd.DataFrame) -> pd.DataFrame:
    """What each rank sends in a step: by the closed form, for ZeRO stage 1 too, and by the GPU's own counter."""
    schemes = {"plain": "ddp", "sharded": "sharded", "": "zero1"}
    labels = {"plain": "data parallelism", "sharded": "ShardedOptimizer", "": "ZeRO stage 1"}
    counted = tables.chosen(rows, moment=experiment.TIMED, repeat=0)
    counted = counted[counted["all_reduce_calls"].notna() & counted["variant"].isin(schemes)]
    lines = []
    for (gpus, machine), part in counted.groupby(["world_size", "machine"]):
        whole = 4 * _parameters(part["size"].iloc[0])
        by_variant = part.set_index("variant")
        for variant, scheme in schemes.items():
            sent = accounting.zero_step_bytes(scheme, gpus, whole, whole)
            measured = by_variant["link_sent_bytes"].get(variant, np.nan)
            moved = sent["gradients"], sent["parameters"], sum(sent.values()), measured
            lines.append([machine, gpus, labels[variant], *(num_bytes / GIB for num_bytes in moved)])
    parts = ["gradients, GiB", "parameters, GiB", "together, GiB", "measured, GiB"]
    return pd.DataFrame(lines, columns=["machine", "GPUs", "scheme", *parts])


def imbalance(ranks: Sequence[int]) -> list[float]:
    """By how much the fullest rank's share of model xl exceeds the mean, for each number of ranks."""
    return [accounting.zero.shard_imbalance(size("xl"), n) for n in ranks]
