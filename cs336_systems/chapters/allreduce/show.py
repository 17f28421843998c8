"""What chapter `allreduce` shows: numeric frames and figures from its rows, and a ring all-reduce, step by step."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cs336_systems import accounting
from cs336_systems.chapters.allreduce.measure import HANDOUT, MB
from cs336_systems.chapters.hardware.roofs import roofs
from cs336_systems.report import figures
from cs336_systems.report.tables import chosen, looked_up, pivot

NAMES = {"gloo": "Gloo", "nccl": "NCCL"}
PROCESSES = (2, 4, 6)  # the handout's
_LOOKS = {  # color and marker, one for each number of processes of the grid: warm for Gloo, cold for NCCL
    "gloo": (("#D55E00", "s"), ("#E69F00", "D"), ("#CC79A7", "v")),
    "nccl": (("#0072B2", "o"), ("#222222", "^"), ("#009E73", "P"), ("#56B4E9", "X")),
}
_SHADES = ("#ffffff", "#cfe3f2", "#86b8dd", "#3f88c5", "#0b4f8a")


def size_name(num_bytes: float) -> str:
    """A size in powers of two, as the handout names them: 2^20 → `1 MB`."""
    short = figures.short(num_bytes)
    return f"{short[:-1]} {short[-1].upper()}B" if short[-1].isalpha() else f"{short} B"


def link_gb_per_s(rows: pd.DataFrame) -> float:
    """What the data sheet gives the first machine's GPUs over NVLink in one direction; NaN where it is not known."""
    sheets = (roofs(machine).sheet for machine in rows["machine"].unique())
    return next((s.nvlink_one_way_gb_per_s for s in sheets if s and s.nvlink_one_way_gb_per_s), math.nan)


# ------------------------------------------------------------------------------------------------------------- tables
def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `all_reduce`, each case once, smallest first, with the backend's name."""
    rows = chosen(rows, how="all_reduce", repeat=0)
    rows = rows.sort_values(["backend", "world_size", "num_bytes"], kind="stable")
    return rows.assign(backend=rows["backend"].map(NAMES)).rename(columns={"world_size": "processes"})


def handout(rows: pd.DataFrame, metric: str, unit: str) -> pd.DataFrame:
    """The handout's table: a metric by backend and processes, a column for each of its sizes; where rows have fewer
    than two of these, all sizes from 1 MB on."""
    rows = plain(rows)
    asked = rows["num_bytes"].isin(HANDOUT)
    sizes = asked if rows[asked]["num_bytes"].nunique() > 1 else rows["num_bytes"] >= MB
    rows = rows[sizes & rows["processes"].isin(PROCESSES)]
    rows = rows.assign(head=[f"{size_name(s)}, {unit}" for s in rows["num_bytes"]])
    return pivot(rows, ["machine", "backend", "processes"], "head", metric)


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """Time over that of two processes, at the smallest and at the largest size, beside the growth of a ring's steps and
    of the bytes through each link. A machine without a time of two has that of another one with the same GPUs."""
    rows = plain(rows)
    rows = rows[rows["ms_p50"].notna()]
    small, large = rows["num_bytes"].min(), rows["num_bytes"].max()
    keys = ["machine", "backend", "processes", "num_bytes"]
    ms = rows.set_index(keys)["ms_p50"].astype(float)
    gpu = lambda machine: machine.rpartition("-x")[0]

    def time(machine: str, *case: object) -> float:
        names = [machine, *(name for name in rows["machine"].unique() if gpu(name) == gpu(machine))]
        return next((ms[name, *case] for name in names if (name, *case) in ms.index), math.nan)

    out = []
    for (machine, backend, n), _ in rows.groupby(["machine", "backend", "processes"], sort=False):
        if n > 2:
            by = [
                time(machine, backend, n, size) / time(machine, backend, 2, size) for size in (small, large)
            ]
            out.append({
                "machine": machine, "backend": backend, "processes": n,
                "steps, ×": accounting.all_reduce_steps(n) / accounting.all_reduce_steps(2),
                f"{size_name(small)}, ×": by[0],
                "bytes, ×": accounting.bus_factor(n) / accounting.bus_factor(2),
                f"{size_name(large)}, ×": by[1],
            })  # fmt: skip
    return pd.DataFrame(out)


def fits(rows: pd.DataFrame) -> pd.DataFrame:
    """Latency and bandwidth of the line through each set of processes, and how far it misses."""
    out = []
    rows = plain(rows)
    for (machine, backend, n), part in rows.groupby(["machine", "backend", "processes"], sort=False):
        if n > 1 and (line := _line(part)):
            out.append([
                machine, backend, n, 1e6 * line.latency_s, 1e6 * line.latency_s / accounting.all_reduce_steps(n),
                line.bytes_per_s / 1e9 * accounting.bus_factor(n), line.half_bytes / MB,
                100 * np.abs(line.residuals).max(),
            ])  # fmt: skip
    heads = ["latency, µs", "α, µs", "β, GB/s", "half at, MB", "miss, %"]
    return pd.DataFrame(out, columns=["machine", "backend", "processes", *heads])


def _line(part: pd.DataFrame) -> accounting.Line | None:
    known = part[part["ms_p50"].notna()]
    if known["num_bytes"].nunique() < 2:
        return None
    seconds = known["ms_p50"].astype(float) / 1e3
    return accounting.fit_line(list(zip(known["num_bytes"].astype(float), seconds, strict=True)))


def buckets(rows: pd.DataFrame) -> pd.DataFrame:
    """A bucket's averaging all-reduce over `dist.all_reduce` of as many bytes in the same run, by size."""
    keys = ["machine", "backend", "world_size", "num_bytes"]
    first, bucket = (chosen(rows, how=how, repeat=0, status="ok") for how in ("all_reduce", "bucket"))
    base = looked_up(first, "ms_p50", bucket, [*keys, "run"])
    both = bucket.assign(ratio=bucket["ms_p50"].astype(float) / base).dropna(subset="ratio")
    both = both.sort_values(keys[1:]).rename(columns={"world_size": "processes"})
    both = both.assign(
        backend=both["backend"].map(NAMES), head=[f"{size_name(s)}, ×" for s in both["num_bytes"]]
    )
    heads = [f"{size_name(s)}, ×" for s in sorted(both["num_bytes"].unique())]
    table = pivot(both, ["machine", "backend", "processes"], "head", "ratio")
    return table.reindex(columns=["machine", "backend", "processes", *heads])


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """All measured cases: quantiles of the time, the host's time of a call, both bandwidths."""
    rows = rows[rows["ms_p50"].notna()].sort_values(["backend", "world_size", "num_bytes", "how", "repeat"])
    return pd.DataFrame({
        "machine": rows["machine"], "backend": rows["backend"].map(NAMES), "processes": rows["world_size"],
        "size": rows["num_bytes"].map(size_name), "what": rows["how"], "repeat": rows["repeat"],
        "ms, 20 %": rows["ms_p20"], "ms, median": rows["ms_p50"], "ms, 80 %": rows["ms_p80"],
        "host, ms": rows["host_ms"], "algorithm, GB/s": rows["algorithm_gb_per_s"], "bus, GB/s": rows["bus_gb_per_s"],
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ figures
def time_figure(rows: pd.DataFrame) -> Figure:
    """Time over size with the fitted lines, and bus bandwidth over size below the data sheet's."""
    figure, axes = figures.panels(columns=2, height=2.9)
    sets = plain(rows)
    sets = sets[sets["ms_p50"].notna() & (sets["processes"] > 1)]
    for ax, title in zip(axes[0], ("time, ms", "bus bandwidth, GB/s"), strict=True):
        ax.set(title=title, xlabel="bytes of the tensor", xscale="log", yscale="log")
        ticks = [2**k for k in range(12, 31, 4)]
        ax.set_xticks(ticks, [size_name(t) for t in ticks])
        ax.minorticks_off()
        if sets.empty:
            figures.nothing(ax)
    seen: dict[str, int] = {}
    for (machine, backend, n), part in sets.groupby(["machine", "backend", "processes"], sort=False):
        looks = _LOOKS[backend.lower()]
        color, marker = looks[seen.get(backend, 0) % len(looks)]
        seen[backend] = seen.get(backend, 0) + 1
        xs = part["num_bytes"].to_numpy(float)
        same = chosen(sets, backend=backend, processes=n)
        label = f"{backend}, {n}" + f" ({machine})" * (same["machine"].nunique() > 1)
        axes[0, 0].plot(xs, part["ms_p50"].to_numpy(float), marker, color=color, label=label, zorder=3)
        axes[0, 1].plot(xs, part["bus_gb_per_s"].to_numpy(float), marker + "-", lw=1, color=color, zorder=3)
        if line := _line(part):
            fine = np.geomspace(xs.min(), xs.max(), 100)
            axes[0, 0].plot(fine, [1e3 * line.seconds(x) for x in fine], color=color, lw=0.9, zorder=2)
    link = link_gb_per_s(rows)
    if "NCCL" in seen and link == link:
        figures.roof(axes[0, 1], link, "NVLink's data sheet, one direction")
        axes[0, 1].set_ylim(top=2.5 * link)
    figures.legend_below(figure, axes[0, 0])
    return figure


def ring(n: int = 4) -> list[np.ndarray]:
    """A ring's states, first to last: how many ranks' shares each rank (row) holds of each chunk (column)."""
    now = np.ones((n, n), dtype=int)
    states = [now]
    for step in range(2 * (n - 1)):
        before, now = now, now.copy()
        for rank in range(n):
            chunk, to = (rank - step) % n, (rank + 1) % n
            now[to, chunk] = before[rank, chunk] + (before[to, chunk] if step < n - 1 else 0)
        states.append(now)
    return states


def ring_figure(n: int = 4) -> Figure:
    """The ring and what each rank holds after every step; what arrived in a step is framed."""
    states = ring(n)
    figure, axes = figures.panels(columns=len(states) + 1, height=1.15)
    _circle(axes[0, 0], n)
    for step, (ax, state) in enumerate(zip(axes[0, 1:], states, strict=True)):
        phase = "start" if step == 0 else f"scatter {step}" if step < n else f"gather {step - n + 1}"
        ax.set_title(phase, fontsize=8.5, loc="center")
        arrived = state != states[max(step - 1, 0)]
        for rank in range(n):
            for chunk in range(n):
                shares = int(state[rank, chunk])
                color = _SHADES[round(shares / n * (len(_SHADES) - 1))]
                new = arrived[rank, chunk]
                ax.add_patch(Rectangle((chunk, rank), 1, 1, fc=color, ec="#D55E00" if new else "#b0b0b0",
                                       lw=1.8 if new else 0.6, zorder=3 + new))  # fmt: skip
                ax.text(chunk + 0.5, rank + 0.5, str(shares), ha="center", va="center", fontsize=8,
                        color="white" if shares > n / 2 else "#222222", zorder=5)  # fmt: skip
        ax.set(xlim=(-0.1, n + 0.1), ylim=(n + 0.1, -0.1), aspect="equal")
        ax.set_axis_off()
    return figure


def _circle(ax: Axes, n: int) -> None:
    at = [(math.sin(2 * math.pi * k / n), math.cos(2 * math.pi * k / n)) for k in range(n)]
    for k, (x, y) in enumerate(at):
        ax.text(x, y, str(k), ha="center", va="center", fontsize=8.5, zorder=3,
                bbox={"boxstyle": "circle", "fc": "white", "ec": figures.ROOF})  # fmt: skip
        ax.add_patch(FancyArrowPatch((x, y), at[(k + 1) % n], arrowstyle="-|>", mutation_scale=8, shrinkA=9, shrinkB=9,
                                     connectionstyle="arc3,rad=-0.25", color="#D55E00", lw=1.1))  # fmt: skip
    ax.text(0, 0, f"S/{n}\na step", ha="center", va="center", fontsize=8)
    ax.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
    ax.set_axis_off()
