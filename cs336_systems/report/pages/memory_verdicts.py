"""What became of the predictions of chapter `memory`, and what other machines say of its cases. See `pages.memory`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cs336_systems import accounting, experiments
from cs336_systems.measure import rows as store
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages.memory import (
    DTYPES,
    GIB,
    MIB,
    Row,
    case_of,
    closed_form,
    contexts,
    left_out_bytes,
    measured,
    one,
    records,
)  # fmt: skip
from cs336_systems.report.pages.memory_words import amount, block_bytes
from cs336_systems.report.tables import fmt, listed
from cs336_systems.sizes import SIZES, size

HARDLY = 0.05  # what prediction 1 calls hardly more than the weights, as a share of them


def _span(counts: Iterable[float]) -> str:
    """`"5.00 to 42.9 MiB"`, or the one amount that the ends share."""
    found = sorted(counts)
    name, scale = ("MiB", MIB) if found[-1] < GIB / 4 else ("GiB", GIB)
    return f"{' to '.join(dict.fromkeys(fmt(count / scale) for count in (found[0], found[-1])))} {name}"


def _names(rows: Iterable[Row]) -> str:
    """``"`2.7B` at 128 and 256 in fp32 and bf16"``: the cases of rows; what has the same precisions, then the same
    contexts, is named together."""
    dtypes: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        dtypes.setdefault((row["size"], int(row["context_length"])), []).append(row["dtype"])
    lengths: dict[tuple[str, str], list[int]] = {}
    for (name, context), found in dtypes.items():
        lengths.setdefault((name, listed(found)), []).append(context)
    sizes: dict[tuple[str, str], list[str]] = {}
    for (name, precisions), at in lengths.items():
        sizes.setdefault((listed(list(map(str, at))), precisions), []).append(f"`{name}`")
    return "; ".join(f"{listed(names)} at {at} in {dtype}" for (at, dtype), names in sizes.items())


def _steps(chapter: Chapter) -> list[dict[str, Any]]:
    """The first machine's measured steps with the fused kernel, of all sizes; repeats left out."""
    rows = chapter.measured(mode="train_step", optimizer="fused", repeat=0).to_dict("records")
    first = [row for row in rows if row["machine"] == (chapter.machines or [""])[0]]
    return sorted(
        first, key=lambda r: (list(SIZES).index(r["size"]), r["context_length"], r["dtype"] != "fp32")
    )


def _above_floor(chapter: Chapter, row: Row) -> int:
    """What a step asks for beyond 16 N, without the workspaces and what the closed form leaves to the caller."""
    moment, _ = closed_form(chapter, row)
    floor = 16 * accounting.num_parameters(size(row["size"]))
    left = left_out_bytes(case_of(chapter, row), moment)
    return int(row["requested_bytes"] - row["before_recording_bytes"] - left - floor)


def growth(chapter: Chapter, dtype: str) -> str:
    """How far a forward pass without a graph goes beyond the weights, and what the graph holds, by context."""
    alone = [r for r in records(chapter, mode="forward", dtype=dtype) if measured(r)]
    kept = [r for r in records(chapter, mode="forward_graph", dtype=dtype) if measured(r)]
    kept = [r for r in kept if r["machine"] == kept[0]["machine"]]
    words = []
    if alone:
        more = [r["peak_bytes"] / r["weights_bytes"] - 1 for r in alone]
        words.append(
            f"Without a graph the forward pass peaks {fmt(100 * min(more), 2)} to {fmt(100 * max(more), 2)} % above the"
            f" weights alone: {'hardly more, as predicted (1)' if max(more) < HARDLY else 'prediction 1 misses'}."
        )
    else:
        words.append(f"The forward pass without a graph: {NOT_MEASURED}.")
    if len(kept) > 1:
        first, last = kept[0], kept[-1]
        ratio = last["activations_bytes"] / first["activations_bytes"]
        times = last["context_length"] / first["context_length"]
        words.append(
            f"With the graph there are {amount(first['activations_bytes'])} of activations at context"
            f" {first['context_length']} and {amount(last['activations_bytes'])} at {last['context_length']}:"
            f" {fmt(ratio)} times as much for {times:g} times the context,"
            f" {'as predicted (2)' if ratio > times else 'against prediction 2'}."
        )
    else:
        words.append(f"How activations grow: {NOT_MEASURED}.")
    return " ".join(words)


def step(chapter: Chapter) -> str:
    """Prediction 3, of where a step has its peak, beside the rows."""
    rows = _steps(chapter)
    if not rows:
        return f"Prediction 3: {NOT_MEASURED}."
    low, high = [], []
    for row in rows:
        saved, copies, gradients = block_bytes(row)
        (low if gradients > saved + copies else high).append(row)
    return f"*Prediction 3.*{_low_words(chapter, low)}{_high_words(high)}"


def _low_words(chapter: Chapter, rows: list[dict[str, Any]]) -> str:
    """Where gradients outweigh what a block gives up: how far from 16 N."""
    if not rows:
        return ""
    above = [_above_floor(chapter, row) for row in rows]
    shares = [n / (16 * accounting.num_parameters(size(r["size"]))) for r, n in zip(rows, above, strict=True)]
    within = max(map(abs, shares))
    text = (
        f" Where a block's gradients outweigh what it gives up ({_names(rows)}), the step asks for {_span(above)} more"
        f" than $16N$, workspaces and tables aside: the prediction {'holds, to' if within < 0.01 else 'misses, by'}"
        f" {fmt(100 * within, 2)} %"
    )
    if within < 0.01 and len(set(above)) > 1:
        temporaries = _span(row["temporaries_bytes"] for row in rows)
        text += (
            f". To the byte it misses, for these peaks differ: it did not count the temporaries, {temporaries} at that"
            " moment"
        )
    return f"{text}."


def _high_words(rows: list[dict[str, Any]]) -> str:
    """Where activations outweigh gradients: when the peak comes, and whether it grows with the context."""
    if not rows:
        return ""
    within = [row for row in rows if row["peak_stage"].startswith("backward")]
    begun = [row for row in within if row["gradients_bytes"] > 0]
    whole = [row for row in within if row not in begun]
    elsewhere = [row for row in rows if row not in within]
    parts = []
    if whole:
        parts.append(f"as predicted, before any gradient is there, with {_names(whole)}")
    if begun:
        share = max(
            row["gradients_bytes"] / (4 * accounting.num_parameters(size(row["size"]))) for row in begun
        )
        there = _span(row["gradients_bytes"] for row in begun)
        parts.append(
            f"{'a little ' if share < 0.05 else ''}later than predicted, when {there} of gradients are there already"
            f" (at most {fmt(100 * share, 2)} % of all), with {_names(begun)}"
        )
    if elsewhere:
        parts.append(f"not in the backward pass, against the prediction, with {_names(elsewhere)}")
    text = f" Where it gives up more, the peak comes {'; '.join(parts)}."
    lines: dict[tuple[str, str], list[float]] = {}
    for row in rows:  # in the order of contexts
        lines.setdefault((row["size"], row["dtype"]), []).append(row["requested_bytes"])
    several = [peaks for peaks in lines.values() if len(peaks) > 1]
    if not several:
        return (
            f"{text} Whether it grows with the context from there on, one context of each size does not show."
        )
    grows = all(peaks == sorted(set(peaks)) for peaks in several)
    return (
        f"{text} It {'grows' if grows else 'does not always grow, against the prediction,'} with the context."
    )


def autocast(chapter: Chapter) -> str:
    """Prediction 4, of what autocast does to the forward pass without a graph and to the step, beside the rows."""
    by_mode: dict[str, dict[int, bool]] = {"forward": {}, "train_step": {}}
    outweigh = set()
    for mode, lower in by_mode.items():
        for context in contexts(chapter):
            fp32, bf16 = (one(chapter, mode=mode, dtype=d, context_length=context) for d in DTYPES)
            if measured(fp32) and measured(bf16):
                more = bf16["requested_bytes"] - fp32["requested_bytes"]
                lower[context] = more < 0 or (mode == "forward" and more == 0)  # no more is a miss there
                (saved, _, _), (less, copies, _) = block_bytes(fp32), block_bytes(bf16)
                if saved - less > copies:
                    outweigh.add(context)
    if not all(by_mode.values()):
        return f"Prediction 4: {NOT_MEASURED}."

    def at(found: Iterable[int]) -> str:
        return ", ".join(map(str, sorted(found)))

    missed = [context for context, lower in by_mode["forward"].items() if lower]
    gains = {context for context, lower in by_mode["train_step"].items() if lower}
    text = "*Prediction 4.* The forward pass without a graph asks for more under autocast at every context measured"
    if missed:
        text = (
            f"*Prediction 4* misses at {at(missed)}: there the forward pass without a graph asks for no more"
        )
    where = f"at {at(gains)}" if gains else "at none of them"
    freed = f"at {at(outweigh)}" if outweigh else "at none of them"
    verdict = "as predicted" if gains <= outweigh else "against the prediction"
    return (
        f"{text}{'' if missed else ', as predicted'}. The step gains {where}; the activations that autocast frees in a"
        f" block outweigh its copies {freed}: {verdict}."
    )


def elsewhere(chapter: Chapter) -> str:
    """The same cases on GPUs that the page does not quote, by their peaks and what was reserved; empty without such."""
    here = chapter.measured(source="allocator")
    if not len(here):
        return ""
    first = here["machine"].iloc[0]
    here = here[here["machine"] == first]
    preset, fields = experiments.resolve_preset(chapter.preset, first), store.case_fields(chapter.experiment)
    words = []
    for folder in sorted(path.name for path in chapter.root.iterdir() if path.is_dir()):
        if folder in chapter.machines or not store.csv_path(chapter.name, folder, chapter.root).is_file():
            continue
        other = Chapter(
            chapter.name, measure="no", machine=folder, preset=preset, root=chapter.root, **chapter.filters
        )
        pairs = here.merge(other.measured(source="allocator"), on=fields, suffixes=("", "_there"))
        if pairs.empty:
            continue
        versions = dict.fromkeys(
            f"{env.get('gpu', 'unknown GPU')}, torch {env.get('torch')}"
            for env in other.environments(folder).values()
        )
        earlier = ", with earlier code" if len(other.stale()) else ""
        apart = (pairs["peak_bytes"].astype(float) - pairs["peak_bytes_there"].astype(float)).abs()
        reserved = int((pairs["reserved_bytes"].astype(float) == pairs["reserved_bytes_there"]).sum())
        most = f" (at most {amount(apart.max())} apart)" if apart.max() else ""
        words.append(
            f"The same cases on `{folder}` ({'; '.join(versions)}){earlier}: the same peak to the byte in"
            f" {int((apart == 0).sum())} of {len(pairs)}{most}, the same bytes reserved in {reserved}."
        )
    return " ".join(words)
