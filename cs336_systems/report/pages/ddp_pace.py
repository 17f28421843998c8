"""Which steps of chapter `ddp` can be compared, and what is exposed where they can.

A step that waits for the host is as uneven as the host. So rows are judged by place (machine, ranks, precision,
context): places whose steps are even come first, and the others are read with their ranges.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import ddp as page
from cs336_systems.report.pages import ddp_predictions as predictions
from cs336_systems.report.tables import EMPTY, distance, fmt, listed, overlap, percent

EVEN = 0.05  # of the median step: a p20–p80 range up to this is that of an even step
PRECISIONS = {"tf32": "TF32", "fp32": "fp32", "bf16": "bf16"}
MEET = "p20–p80 ranges meet"
_BUSY = 0.9  # of a step: where kernels fill less, the GPU waits for the host
_ALIKE = ("alone", "none", "naive", "flat")  # the same until the backward pass has ended

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """The measured rows, not repeated, of one machine, number of ranks, precision and context."""

    machine: str
    world_size: int
    dtype: str
    context: int
    rows: list[dict[str, Any]] = field(compare=False)

    @property
    def spread(self) -> float:
        """In the median of the ways, the p20–p80 range of a step over its median."""
        return statistics.median(spread(row) for row in self.rows)

    @property
    def even(self) -> bool:
        return self.spread <= EVEN

    @property
    def name(self) -> str:
        return f"context {self.context} in {PRECISIONS.get(self.dtype, self.dtype)}"

    @property
    def head(self) -> str:
        """How a sentence about it begins."""
        return f"`{self.machine}`, {self.name}{'' if self.even else ', uneven steps'}"

    def one(self, wrapper: str, bucket_mb: float = 0.0) -> dict[str, Any] | None:
        return next((r for r in self.rows if (r["wrapper"], r["bucket_mb"]) == (wrapper, bucket_mb)), None)

    @property
    def same_work(self) -> float | None:
        """How far forward and backward pass of ways that do the same in them lie from those without communication."""
        base = self.one("none")
        others = [r for w in _ALIKE if w != "none" and (r := self.one(w)) is not None]
        if base is None or not others:
            return None
        return max(abs(_passes(row) / _passes(base) - 1) for row in others)

    @property
    def same_work_ms(self) -> float | None:
        """`same_work` in ms."""
        share, base = self.same_work, self.one("none")
        return None if share is None or base is None else share * _passes(base)


def _passes(row: Row) -> float:
    return float(row["forward_ms_p50"] + row["backward_ms_p50"])


def spread(row: Row) -> float:
    """The p20–p80 range of a step over its median."""
    return float((row["step_ms_p80"] - row["step_ms_p20"]) / row["step_ms_p50"])


def meet(a: Row, b: Row) -> bool:
    """Whether the p20–p80 ranges of two steps meet: then these rows do not tell them apart."""
    return overlap(a, b, "step_ms")


def places(chapter: Chapter, world_size: int | str | None = None) -> list[Place]:
    """The places of the main number of ranks (or of this one, or of "all"), those with even steps first."""
    where = {"dtype": "all"} | ({} if world_size is None else {"world_size": world_size})
    found: dict[tuple[str, int, str, int], list[dict[str, Any]]] = {}
    for row in page.timed(chapter, **where):
        if page.ok(row):
            key = str(row["machine"]), int(row["world_size"]), str(row["dtype"]), int(row["context_length"])
            found.setdefault(key, []).append(row)
    return sorted((Place(*key, rows) for key, rows in found.items()), key=lambda place: not place.even)


def leading(chapter: Chapter) -> list[Place]:
    """The places that conclusions are drawn from: those with even steps, or all where there is none."""
    found = places(chapter)
    return [place for place in found if place.even] or found


def again(chapter: Chapter) -> pd.DataFrame:
    """The pairs of rows of the same case in one run (A/A): its fields, and how far the medians lie apart (`apart`)."""
    rows = chapter.measured(kind="time")
    keys = [
        "machine",
        "run",
        "size",
        "context_length",
        "wrapper",
        "bucket_mb",
        "dtype",
        "world_size",
        "batch",
    ]
    both = rows[rows["repeat"] == 0].merge(rows[rows["repeat"] == 1], on=keys, suffixes=("", "_again"))
    ratio = both["step_ms_p50_again"].astype(float) / both["step_ms_p50"].astype(float)
    return both[keys].assign(apart=distance(ratio))


def traced(chapter: Chapter, machine: str, context: int, wrapper: str) -> dict[str, Any] | None:
    """The trace's row of a way without a size of buckets; None unless it was measured."""
    rows = chapter.rows(kind="trace", machine=machine, context_length=context, wrapper=wrapper)
    return next((r for r in rows.to_dict("records") if page.ok(r)), None)


def measured_copy_ms(chapter: Chapter, machine: str) -> float | None:
    """What a copy of all gradients takes by the traces: kernels of *flat* that compute, less those of *naive*."""
    rows = chapter.rows(kind="trace", machine=machine).to_dict("records")
    found = {r["wrapper"]: r["compute_ms"] for r in rows if page.ok(r)}
    return found["flat"] - found["naive"] if {"flat", "naive"} <= set(found) else None


# ------------------------------------------------------------------------------------------------------ tables
def pace_table(chapter: Chapter) -> pd.DataFrame:
    """The step without communication at each place, and three measures of how even steps are there."""
    pairs, out = again(chapter), []
    for place in places(chapter, "all"):
        base = place.one("none")
        if base is None:
            continue
        chosen = (pairs["machine"] == place.machine) & (pairs["world_size"] == place.world_size)
        chosen &= (pairs["dtype"] == place.dtype) & (pairs["context_length"] == place.context)
        out.append({
            "machine": place.machine, "ranks": place.world_size, "dtype": place.dtype, "context": place.context,
            "no communication": fmt(base["step_ms_p50"]),
            "p20–p80": f"{fmt(base['step_ms_p20'])}–{fmt(base['step_ms_p80'])}",
            "range": percent(place.spread), "same work": percent(place.same_work),
            "A/A": percent(pairs[chosen]["apart"].max()), "steps": "even" if place.even else "uneven",
        })  # fmt: skip
    return pd.DataFrame(out)


def parts(chapter: Chapter, row: Row) -> dict[str, float] | None:
    """What is exposed of a way's communication, in ms: the step, the backward pass longer, the wait after it.

    None without the step without communication in the same run.
    """
    base = page.mate(chapter, row, "none")
    if base is None:
        return None
    return {
        "exposed": float(row["step_ms_p50"] - base["step_ms_p50"]),
        "longer": float(row["backward_ms_p50"] - base["backward_ms_p50"]),
        "wait": float(row["synchronization_ms_p50"]),
    }


def exposed_table(chapter: Chapter) -> pd.DataFrame:
    """Where the exposed time of each way is, at the leading places: beside the backward pass, or after it."""
    out = []
    for place in leading(chapter):
        naive = place.one("naive")
        whole = None if naive is None else page.exposed_ms(chapter, naive)
        for row in place.rows:
            found = parts(chapter, row) if row["wrapper"] not in ("alone", "none") else None
            if found is None:
                continue
            line = {
                "machine": place.machine,
                "dtype": place.dtype,
                "context": place.context,
                "way": page.way(row),
            }
            line |= {"range": percent(spread(row)), "exposed": fmt(found["exposed"])}
            line |= {"of naive's": percent(found["exposed"] / whole if whole else None)}
            line |= {"longer": fmt(found["longer"])}
            if row["wrapper"] not in ("torch", "torch_view"):
                due = predictions.after_ms(
                    chapter, place.machine, place.world_size, row["wrapper"], row["bucket_mb"]
                )
                line |= {"wait": fmt(found["wait"]), "predicted": fmt(due)}
            out.append(line)
    columns = [
        "machine",
        "dtype",
        "context",
        "way",
        "range",
        "exposed",
        "of naive's",
        "longer",
        "wait",
        "predicted",
    ]
    return pd.DataFrame([[line.get(c, EMPTY) for c in columns] for line in out], columns=columns)


# ------------------------------------------------------------------------------------------------------ sentences
def tokens_words(chapter: Chapter) -> str:
    """Whether the step without communication grows with the tokens."""
    lines = []
    for machine in chapter.machines:
        rows = {r["context_length"]: r for r in page.timed(chapter, ("none",), machine=machine) if page.ok(r)}
        parts = [
            f"context {b} has {fmt(b / a, 2)} times the tokens of context {a}, and the step takes"
            f" {rows[b]['step_ms_p50'] / rows[a]['step_ms_p50']:.2f} times as long"
            for a, b in itertools.pairwise(sorted(rows))
        ]
        if parts:
            lines.append(f"`{machine}`, without communication: {'; '.join(parts)}.")
    return "\n\n".join(lines) or f"How the step grows with the tokens: {NOT_MEASURED}."


def host_words(chapter: Chapter) -> str:
    """Whether the GPU or the host sets the pace: kernels that compute, by a trace without overlap, against the step."""
    lines = []
    main = page.settings(chapter)["dtype"]
    for place in places(chapter):
        row = traced(chapter, place.machine, place.context, "naive") if place.dtype == main else None
        step = place.one("none")
        if row is None or step is None:
            continue
        busy, whole = row["compute_ms"], step["step_ms_p50"]
        text = (
            f"`{place.machine}`, {place.name}: kernels that compute take {fmt(busy)} ms of a step (by the trace of"
            f" *naive*, where nothing runs beside them), and a step without communication takes {fmt(whole)} ms."
        )
        if busy < _BUSY * whole:
            text += f" For {percent(1 - busy / whole)} of it the GPU has no work: the host sets the pace."
        else:
            text += " So the GPU sets the pace, and the host's work for hooks and calls hides behind it."
        lines.append(text)
    return "\n\n".join(lines) or f"Who sets the pace: {NOT_MEASURED}."


def _evenness(found: Sequence[Place]) -> list[tuple[bool, str, str]]:
    """Of the even and of the uneven places, if there are any: which, where, and how far the same work lies apart."""
    out = []
    for even in (True, False):
        part = [place for place in found if place.even == even]
        alike = max((share for place in part if (share := place.same_work) is not None), default=None)
        apart = "" if alike is None else f", where the same work lies up to {percent(alike)} apart"
        if part:
            out.append((even, listed([place.name for place in part]), apart))
    return out


def noise_words(chapter: Chapter) -> str:
    """Where differences mean something, and how far the same thing measured twice lies apart."""
    found = places(chapter)
    if not found:
        return f"How even steps are: {NOT_MEASURED}."
    said = []
    main = page.settings(chapter)
    others = [(m, n) for m, n in page.teams(chapter) if n != main["world_size"]]
    for even, where, apart in _evenness(found):
        ranks = f" of {main['world_size']} ranks" if others else ""
        text = f"Steps{ranks} are {'even' if even else 'uneven'} at {where}{apart}: "
        if even:
            text += "conclusions are drawn there."
        else:
            text += "a smaller difference, or one between steps whose p20–p80 ranges meet, says nothing."
        said.append(text)
    pairs = again(chapter)
    if len(pairs):
        said.append(
            f"{len(pairs)} case{'s were' if len(pairs) > 1 else ' was'} measured twice in one run (A/A), in turns with"
            f" the others: the medians lie {percent(pairs['apart'].max())} apart at most. No"
            " difference smaller than that means anything here."
        )
    for machine, ranks in others:
        there = [p for p in places(chapter, ranks) if (p.machine, p.dtype) == (machine, main["dtype"])]
        parts = [
            f"{'even' if even else 'uneven'} at {where}{apart}" for even, where, apart in _evenness(there)
        ]
        text = f"Steps of {ranks} ranks (`{machine}`) are {'; '.join(parts)}."
        if pairs.empty or ranks not in set(pairs["world_size"]):
            text += " No case was measured twice there."
        said.append(text)
    return " ".join(said)
