"""What chapter `allreduce` shows: times and bandwidths, the latency–bandwidth line through them, what is left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems import accounting
from cs336_systems.accounting import Line
from cs336_systems.experiments.allreduce import HANDOUT, MB
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter, status_words
from cs336_systems.report.roofs import machine_environment, roofs
from cs336_systems.report.tables import EMPTY, fmt
from cs336_systems.sizes import size

BUCKETS = tuple(mb * MB for mb in (1, 10, 25, 100, 256, 1024))  # sizes that NCCL is measured at
NAMES = {"gloo": "Gloo", "nccl": "NCCL"}
_LOOKS = {"gloo": (("#6b6b6b", "#D55E00", "#E69F00", "#CC79A7"), "sDvX"),
          "nccl": (("#0072B2", "#009E73", "#56B4E9", "#222222"), "o^P<")}  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """One machine's rows of one set of processes. `rows`: measured, by size, `all_reduce` alone, each once."""

    machine: str
    backend: str
    world_size: int
    rows: pd.DataFrame

    @property
    def label(self) -> str:
        return f"{NAMES[self.backend]}, {self.world_size} process{'es' * (self.world_size > 1)}"

    @property
    def line(self) -> Line | None:
        """The line through all measured sizes; None with fewer than two of them."""
        if self.rows["num_bytes"].nunique() < 2:
            return None
        seconds = self.rows["ms_p50"].astype(float) / 1e3
        return accounting.fit_line(list(zip(self.rows["num_bytes"].astype(float), seconds, strict=True)))

    def ms(self, num_bytes: int) -> float | None:
        """The median at a size; None where it was not measured."""
        found = self.rows[self.rows["num_bytes"] == num_bytes]
        return float(found.iloc[0]["ms_p50"]) if len(found) else None

    @property
    def best(self) -> pd.Series:
        """The row with the highest bus bandwidth; the first row for one process, which sends nothing."""
        bus = self.rows["bus_gb_per_s"].astype(float).fillna(0)
        return self.rows.loc[bus.idxmax()]

    def link_gb_per_s(self, chapter: Chapter) -> float | None:
        """What the data sheet gives a GPU's links in one direction."""
        sheet = roofs(self.machine, chapter.root).sheet
        return sheet.nvlink_one_way_gb_per_s if sheet and self.backend == "nccl" else None

    def sheet_ms(self, chapter: Chapter, num_bytes: int) -> float | None:
        """The time of a ring at the data sheet's bandwidth, without latency."""
        link = self.link_gb_per_s(chapter)
        if link is None or self.world_size < 2:
            return None
        return 1e3 * accounting.ring_all_reduce_s(num_bytes, self.world_size, link * 1e9)


def measured(chapter: Chapter, machine: str | None = None) -> list[Ranks]:
    """All sets of processes that have rows with numbers, by machine, backend and number."""
    rows = chapter.measured(how="all_reduce", repeat=0)
    rows = rows if machine is None else rows[rows["machine"] == machine]
    groups = rows.sort_values("num_bytes").groupby(["machine", "backend", "world_size"], sort=True)
    return [Ranks(str(m), str(b), int(n), part) for (m, b, n), part in groups]


def place_of(chapter: Chapter, ranks: Ranks) -> str:
    """What a set of processes runs on: for NCCL the GPU, where it is known, for Gloo the machine."""
    gpu = machine_environment(ranks.machine, chapter.root).get("gpu") if ranks.backend == "nccl" else None
    return gpu or ranks.machine


def drawn(chapter: Chapter, machine: str) -> list[Ranks]:
    """What the figures show: a machine's sets of processes, and others of NCCL on more of the same GPUs elsewhere."""
    own = measured(chapter, machine)
    found = {(place_of(chapter, r), r.backend, r.world_size): r for r in own}
    places = {place for place, *_ in found}
    for ranks in measured(chapter):
        place = place_of(chapter, ranks)
        if ranks.backend == "nccl" and place in places:
            found.setdefault((place, ranks.backend, ranks.world_size), ranks)
    return list(found.values())


def bytes_words(num_bytes: float) -> str:
    """A size in powers of two, as the handout names them: 2^20 → `1 MB`."""
    for unit, scale in (("GB", 2**30), ("MB", MB), ("KB", 2**10)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{int(value) if float(value).is_integer() else fmt(value)} {unit}"
    return f"{fmt(float(num_bytes), 2)} bytes"


def percent(share: float, decimals: int = 1) -> str:
    """A difference with its sign: 0.02 → `+2.0 %`; without decimals from 100 % on."""
    rounded = round(100 * share, decimals if abs(share) < 1 else 0) + 0.0  # no −0.0
    return f"{rounded:+.{decimals if abs(share) < 1 else 0}f} %".replace("-", "−")


def shown_sizes(chapter: Chapter) -> list[int]:
    """The handout's sizes; where fewer than three of them were chosen, all from 1 MB on."""
    sizes = sorted(set(chapter.rows(how="all_reduce", repeat=0)["num_bytes"]))
    found = [s for s in sizes if s in HANDOUT]
    return found if len(found) > 2 else [s for s in sizes if s >= MB]


# ------------------------------------------------------------------------------------------------ tables
def time_table(chapter: Chapter) -> pd.DataFrame:
    """Time, both bandwidths and the data sheet's time, by backend, processes and size.

    Processes whose cases have one status that is not `ok` have one line.
    """
    rows = chapter.rows(how="all_reduce", repeat=0)
    rows = rows[rows["num_bytes"].isin(shown_sizes(chapter))]
    out = []
    for (machine, backend, n), part in rows.groupby(["machine", "backend", "world_size"], sort=True):
        ranks = Ranks(machine, backend, int(n), part)
        head = {"machine": machine, "backend": NAMES[backend], "ranks": int(n)}
        said = part["status"].unique()
        if len(said) == 1 and said[0] != "ok":
            words = EMPTY if said[0] == NOT_MEASURED else status_words(said[0]).removeprefix("skipped: ")
            out.append(head | {"size": "all", "ms": words})
            continue
        for row in part.sort_values("num_bytes").to_dict("records"):
            line = head | {"size": bytes_words(row["num_bytes"])}
            if row["status"] != "ok":
                out.append(line | {"ms": status_words(row["status"])})
                continue
            sheet = ranks.sheet_ms(chapter, row["num_bytes"])
            out.append(line | {
                "ms": fmt(row["ms_p50"]),
                "20 to 80 %": f"{fmt(row['ms_p20'])} to {fmt(row['ms_p80'])}",
                "algorithm": fmt(row["algorithm_gb_per_s"]),
                "bus": fmt(row["bus_gb_per_s"]),
                "sheet, ms": fmt(sheet),
                "over it": EMPTY if sheet is None else f"{fmt(row['ms_p50'] / sheet)} ×",
            })  # fmt: skip
    columns = [
        "machine",
        "backend",
        "ranks",
        "size",
        "ms",
        "20 to 80 %",
        "algorithm",
        "bus",
        "sheet, ms",
        "over it",
    ]
    return pd.DataFrame([[line.get(c, EMPTY) for c in columns] for line in out], columns=columns)


def fit_table(chapter: Chapter) -> pd.DataFrame:
    """Latency and bandwidth of each set of processes, the size where they meet, and how far the line misses."""
    out = []
    for ranks in measured(chapter):
        line = ranks.line
        if line is None or ranks.world_size < 2:
            continue
        residuals = np.array(line.residuals)
        worst = int(np.abs(residuals).argmax())
        out.append({
            "machine": ranks.machine, "backend": NAMES[ranks.backend], "ranks": ranks.world_size,
            "latency, µs": fmt(1e6 * line.latency_s),
            "α, µs": fmt(1e6 * line.latency_s / accounting.all_reduce_steps(ranks.world_size)),
            "B, GB/s": fmt(line.bytes_per_s / 1e9),
            "β, GB/s": fmt(line.bytes_per_s / 1e9 * accounting.bus_factor(ranks.world_size)),
            "half at": bytes_words(line.half_bytes),
            "residual": f"{fmt(100 * float(np.median(np.abs(residuals))), 2)} %",
            "largest": f"{percent(residuals[worst], 0)} at {bytes_words(ranks.rows['num_bytes'].iloc[worst])}",
        })  # fmt: skip
    return pd.DataFrame(out)


def bucket_table(chapter: Chapter) -> pd.DataFrame:
    """A bucket's averaging all-reduce over `dist.all_reduce` of as many bytes, beside the same case over itself."""
    out = []
    for pair in pairs(chapter):
        out.append({
            "machine": pair["machine"], "backend": NAMES[pair["backend"]], "ranks": pair["world_size"],
            "size": bytes_words(pair["num_bytes"]), "all_reduce, ms": fmt(pair["plain"]),
            "again, over it": percent(pair["again"] - 1),
            "bucket, over it": percent(pair["bucket"] - 1),
            "more, µs": fmt(1e3 * pair["more_ms"]),
        })  # fmt: skip
    return pd.DataFrame(out)


def pairs(chapter: Chapter) -> Iterator[dict[str, Any]]:
    """What was measured three ways in one run.

    ms of `all_reduce`, its repetition and the bucket over that, and how many ms the bucket takes more.
    """
    keys = ["machine", "backend", "world_size", "num_bytes", "run"]
    rows = chapter.measured().dropna(subset="ms_p50")
    plain = rows[(rows["how"] == "all_reduce") & (rows["repeat"] == 0)]
    again = rows[(rows["how"] == "all_reduce") & (rows["repeat"] == 1)]
    bucket = rows[(rows["how"] == "bucket") & (rows["repeat"] == 0)]
    both = plain.merge(again, on=keys, suffixes=("", "_again")).merge(
        bucket, on=keys, suffixes=("", "_bucket")
    )
    for row in both.sort_values(keys[:4]).to_dict("records"):
        yield {key: row[key] for key in keys} | {
            "plain": row["ms_p50"], "again": row["ms_p50_again"] / row["ms_p50"],
            "bucket": row["ms_p50_bucket"] / row["ms_p50"], "more_ms": row["ms_p50_bucket"] - row["ms_p50"],
        }  # fmt: skip


def host_table(chapter: Chapter) -> pd.DataFrame:
    """On GPUs: the GPU's time of a call, and what the host sees of many calls, for the small sizes."""
    rows = chapter.measured(backend="nccl", how="all_reduce", repeat=0)
    rows = rows[rows["num_bytes"] <= 4 * MB].sort_values(["machine", "world_size", "num_bytes"])
    out = [
        {
            "machine": row["machine"], "ranks": row["world_size"], "size": bytes_words(row["num_bytes"]),
            "GPU, µs": fmt(1e3 * row["ms_p50"]), "host, µs": fmt(1e3 * row["host_ms"]),
        }
        for row in rows.to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(out)


def gradient_bytes(model: str = "xl") -> int:
    """Bytes of a model's gradients: fp32, 4 a parameter."""
    return 4 * accounting.num_parameters(size(model))


def bucket_size_table(chapter: Chapter, model: str = "xl") -> pd.DataFrame:
    """For NCCL: a model's gradients in buckets of a size, one after the other, by the line and by one bucket's time.

    Beside each time stands the share of the bandwidth that a bucket reaches: of the line's, and of the best that was
    measured. The last bucket counts for as much as is in it.
    """
    total = gradient_bytes(model)
    out = []
    for ranks in measured(chapter):
        line = ranks.line
        if ranks.backend != "nccl" or ranks.world_size < 2 or line is None:
            continue
        best = float(ranks.best["algorithm_gb_per_s"])
        for num_bytes in BUCKETS:
            one = ranks.ms(num_bytes)
            reached = None if one is None else num_bytes / one / 1e6 / best
            out.append({
                "machine": ranks.machine, "ranks": ranks.world_size, "bucket": bytes_words(num_bytes),
                "buckets": -(-total // num_bytes),
                "by the line, ms": fmt(1e3 * total / num_bytes * line.seconds(num_bytes)),
                "of B": f"{100 * num_bytes / (num_bytes + line.half_bytes):.0f} %",
                "measured, ms": EMPTY if one is None else fmt(total / num_bytes * one),
                "of the best": EMPTY if reached is None else f"{100 * reached:.0f} %",
            })  # fmt: skip
    return pd.DataFrame(out)


# ------------------------------------------------------------------------------------------------ figures
def time_figure(chapter: Chapter, machine: str) -> Figure:
    """Time over size with the fitted lines (left), and bus bandwidth over size below the data sheet's (right)."""
    sets = drawn(chapter, machine)
    figure, axes = figures.panels(columns=2, height=3.4)
    left, right = axes[0]
    for ax, title, unit in ((left, "time of an all-reduce", "ms"), (right, "bus bandwidth", "GB/s")):
        ax.set(title=title, xlabel="bytes of the tensor", ylabel=unit)
        if not sets:
            figures.nothing(ax)
    for ranks, (color, marker) in zip(sets, _looks(sets), strict=True):
        xs = ranks.rows["num_bytes"].to_numpy(float)
        name = _name(ranks, machine)
        left.plot(xs, ranks.rows["ms_p50"].to_numpy(float), marker, color=color, label=name, zorder=3)
        low, high = (ranks.rows[f"ms_{q}"].to_numpy(float) for q in ("p20", "p80"))
        left.vlines(xs, low, high, color=color, lw=1, zorder=2)
        if ranks.line is not None:
            fine = np.geomspace(xs.min(), xs.max(), 100)
            left.plot(fine, [1e3 * ranks.line.seconds(x) for x in fine], color=color, lw=0.9, zorder=2)
        if ranks.world_size > 1:
            right.plot(xs, ranks.rows["bus_gb_per_s"].to_numpy(float), color=color, marker=marker, zorder=3)
    if sets:
        _log_axes(left, sets)
        _log_axes(right, sets)
        links = [link for ranks in sets if (link := ranks.link_gb_per_s(chapter))]
        figures.roof(right, links[0] if links else None, "data sheet, one direction")
        right.set_ylim(top=3 * right.get_ylim()[1])  # room for the words
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)))
    return figure


def residual_figure(chapter: Chapter, machine: str) -> Figure:
    """By how much the line misses each point."""
    sets = [ranks for ranks in drawn(chapter, machine) if ranks.line is not None]
    figure, axes = figures.panels(height=2.8)
    ax = axes[0, 0]
    ax.set(xlabel="bytes of the tensor", ylabel="line over measured − 1, %")
    for ranks, (color, marker) in zip(sets, _looks(sets), strict=True):
        residuals = 100 * np.array(ranks.line.residuals)
        xs, name = ranks.rows["num_bytes"].to_numpy(float), _name(ranks, machine)
        ax.plot(xs, residuals, color=color, marker=marker, label=name)
    if sets:
        ax.axhline(0, color="#6b6b6b", lw=0.8)
        _log_axes(ax, sets, both=False)
        figure.legend(loc="outside lower center", ncols=min(3, len(sets)))
    else:
        figures.nothing(ax)
    return figure


def _name(ranks: Ranks, machine: str) -> str:
    """A set of processes in a legend; the machine, where it is another one than the figure's."""
    return ranks.label if ranks.machine == machine else f"{ranks.label} ({ranks.machine})"


def _looks(sets: list[Ranks]) -> list[tuple[str, str]]:
    """Color and marker of each set: warm ones for Gloo, cold ones for NCCL."""
    seen: dict[str, int] = {}
    out = []
    for ranks in sets:
        place = seen.get(ranks.backend, 0) % 4
        seen[ranks.backend] = place + 1
        colors, markers = _LOOKS[ranks.backend]
        out.append((colors[place], markers[place]))
    return out


def _log_axes(ax: Any, sets: list[Ranks], both: bool = True) -> None:
    sizes = sorted({int(s) for ranks in sets for s in ranks.rows["num_bytes"]})
    powers = [s for s in sizes if s & (s - 1) == 0] or sizes
    ax.set_xscale("log", base=2)
    shown = powers[:: -(-len(powers) // 6)]
    ax.set_xticks(shown, [bytes_words(s) for s in shown])
    ax.minorticks_off()
    if both:
        ax.set_yscale("log")
