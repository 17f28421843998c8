"""The sentences of chapter `attention` that hold numbers: Markdown, computed from its rows and the closed forms.

Each says "not measured" where the rows for it are missing; none claims a difference below the A/A spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from cs336_systems import accounting
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import attention as page
from cs336_systems.report.pages.attention import COMPILED, GIB, MATRICES, OURS, PARTS, PLAIN
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, percent

LONG = 4096  # from here on the matrices outweigh everything else, and slopes say something


def _gib(num_bytes: float) -> str:
    return f"{fmt(num_bytes / GIB)} GiB"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


# ------------------------------------------------------------------------------------------------ predictions
def matrix(chapter: Chapter, seq_len: int, head_dim: int, dtype: str) -> str:
    """What one matrix of scores weighs beside one tensor like Q, by the closed form."""
    batch, n, _, d, size = page.sizes(chapter, seq_len, head_dim, dtype)
    return (
        f"At $n = {n}$, $d = {d}$ in {figures.label(dtype)} one matrix of scores is ${batch} \\cdot {n}^2 \\cdot "
        f"{size}$ bytes, {_gib(batch * n * n * size)}; one tensor like $Q$ is {_gib(batch * n * d * size)}."
    )


def should_fail(chapter: Chapter, machine: str) -> str:
    """Which cases of the handout's grid need more than there is, by the closed form, whatever was measured."""
    grid = pd.DataFrame([case for case in chapter.experiment.grid("full") if not case.repeat])
    whole = page.gpu_memory_gib(chapter, machine)
    out = []
    for cap, part in grid.groupby("cap_gib"):
        limit = float(cap) or whole
        if limit:
            where = f"under the cap of {cap} GiB" if cap else f"on the whole GPU ({limit:g} GiB)"
            too_much = _needs(chapter, part) > limit * GIB
            out.append(f"{where} {_cases(part[too_much]) if too_much.any() else 'nothing'}")
    return f"Predicted to run out of memory: {'; '.join(out)}."


def _needs(chapter: Chapter, cases: pd.DataFrame) -> np.ndarray:
    """Bytes at the peak of each case, by the closed form."""
    columns = ["seq_len", "head_dim", "dtype", "impl"]
    return np.array([
        accounting.attention_peak_bytes(
            *page.sizes(chapter, n, d, dtype), page.closed_form(chapter, impl, dtype, n, d)
        )
        for n, d, dtype, impl in cases[columns].itertuples(index=False)
    ])  # fmt: skip


def _form(chapter: Chapter, row: pd.Series, impl: str | None = None) -> str:
    """What `accounting` calls the row's implementation, or another one at the row's shape."""
    return page.closed_form(
        chapter, impl or row["impl"], row["dtype"], int(row["seq_len"]), int(row["head_dim"]), row["machine"]
    )


def _cases(cases: pd.DataFrame) -> str:
    """`plain PyTorch in fp32 at n = 16384, d = 16, 32`: cases put together by all but the head dimension."""
    words = []
    for (impl, dtype, n), those in cases.groupby(["impl", "dtype", "seq_len"], sort=False):
        dims = ", ".join(str(d) for d in sorted(those["head_dim"]))
        passes = " or ".join(sorted(set(those["failed_in"].dropna()))) if "failed_in" in those else ""
        where = f"{figures.label(str(impl))} in {figures.label(str(dtype))} at $n = {n}$, $d$ = {dims}"
        words.append(where + (f" (in {passes})" if passes else ""))
    return "; ".join(words)


def expected_speedup(chapter: Chapter, roofs: Roofs, machine: str, seq_len: int, head_dim: int) -> str:
    """What fusing between the products should gain at the machine's roofs, for each dtype and pass."""
    words = []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        pi, beta = roofs.tflops.get(dtype), roofs.tb_per_s
        if not pi or not beta:
            continue
        shape, on = page.sizes(chapter, seq_len, head_dim, dtype), page.device(machine)
        ratios = []
        for part in PARTS:
            plain, fused = (
                accounting.kernels_ms(accounting.attention_kernels(*shape, form, part, on), pi, beta)
                for form in ("reference", "compiled")
            )
            ratios.append(f"{part} {fmt(plain / fused)} times as fast")
        words.append(f"{' and '.join(ratios)} in {figures.label(dtype)}")
    if not words:
        return f"What compiling should gain at the machine's roofs: {NOT_MEASURED}."
    return (
        f"At the measured roofs of this machine, $n = {seq_len}$ and $d = {head_dim}$, compiling should make "
        f"{'; '.join(words)}."
    )


# ------------------------------------------------------------------------------------------------ how good it is
def spread(chapter: Chapter) -> str:
    """What the A/A rows say."""
    again = page.spread(chapter)
    if again.empty:
        return f"The repetition of the same case (A/A): {NOT_MEASURED}."
    typical = " and ".join(f"{part} {percent(again[part].median())}" for part in PARTS)
    worst = max(PARTS, key=lambda part: again[part].max())
    row = again.loc[again[worst].idxmax()]
    return (
        f"Plain attention measured twice in one run differs by a median of {typical} over {len(again)} runs; the most "
        f"is {percent(row[worst])}, {worst} at $n = {row['seq_len']}$, $d = {row['head_dim']}$ in "
        f"{figures.label(row['dtype'])}. A difference smaller than that of its own run, or than this median, is called "
        "*even*."
    )


def really_compiled(chapter: Chapter) -> str:
    """How many graphs each compiled case captured, and what compiling took where no cache helped."""
    rows = chapter.measured(impl=COMPILED)
    if rows.empty:
        return f"How many graphs were compiled: {NOT_MEASURED}."
    counts = sorted({int(count) for count in rows["graphs"]})
    text = (
        f"Compiled cases: {len(rows)}, each of them exactly one graph."
        if counts == [1]
        else f"The compiled cases captured {' or '.join(map(str, counts))} graphs each, where one was expected."
    )
    fresh = rows[rows["cache_hits"] == 0]["compile_s"]
    if len(fresh):
        text += (
            f" The first step, which compiles, took {fmt(fresh.min())} to {fmt(fresh.max())} s (median "
            f"{fmt(fresh.median())}); cases whose code the compiler found in its cache on disk are not counted."
        )
    return text


# ------------------------------------------------------------------------------------------------ time
def speedup(chapter: Chapter, roofs: Roofs, impl: str, machine: str) -> str:
    """Plain attention's time over that of `impl`, by dtype and pass, as a Markdown list."""
    out = []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        for part in PARTS:
            table = page.speedups(chapter, roofs, impl, part, machine=machine, dtype=dtype, cap_gib=0)
            if table.empty:
                continue
            said = table["word"].value_counts()
            low, high = table.loc[table["ratio"].idxmin()], table.loc[table["ratio"].idxmax()]
            ends = [f"{fmt(row['ratio'])} ({_shape(row)})" for row in (low, high)]
            out.append(
                f"- {part}, {figures.label(dtype)}: faster in {said.get('faster', 0)} of {len(table)} shapes, slower "
                f"in {said.get('slower', 0)}; plain time over {_its(impl)} from {ends[0]} to {ends[1]}."
            )
    return "\n".join(out) or f"Plain attention against {figures.label(impl)}: {NOT_MEASURED}."


def _its(impl: str) -> str:
    return {COMPILED: "compiled", OURS: "ours"}.get(impl, figures.label(impl))


def _shape(row: Any) -> str:
    return f"n = {figures.short(row['seq_len'])}, d = {row['head_dim']}"


def at_length(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """At the longest sequence: the speedup of compiling, predicted and measured, over the head dimensions."""
    words = []
    for dtype in dict.fromkeys(chapter.rows()["dtype"]):
        for part in PARTS:
            table = page.speedups(chapter, roofs, COMPILED, part, machine=machine, dtype=dtype, cap_gib=0)
            table = table[table["seq_len"] == table["seq_len"].max()].dropna(subset="predicted")
            if len(table):
                words.append(
                    f"{part} in {figures.label(dtype)} {_range(table['ratio'])} "
                    f"(predicted {_range(table['predicted'])})"
                )
                longest = table["seq_len"].max()
    if not words:
        return f"Compiling at the longest sequence against its prediction: {NOT_MEASURED}."
    return (
        f"At $n = {longest}$, over the head dimensions, plain time over compiled time is: {'; '.join(words)}."
    )


def _range(numbers: pd.Series) -> str:
    low, high = fmt(numbers.min()), fmt(numbers.max())
    return low if low == high else f"{low} to {high}"


def floors(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """What share of the measured time the floors explain at the longest sequence, by implementation."""
    rows = page.with_predictions(chapter, roofs, machine=machine, cap_gib=0)
    rows = rows[rows["status"] == "ok"].dropna(subset="forward_floor_ms")
    if rows.empty:
        return f"The floors against the measured times: {NOT_MEASURED}."
    rows = rows[rows["seq_len"] == rows["seq_len"].max()]
    words = []
    for impl, part in rows.groupby("impl", sort=False):
        shares = pd.concat([part[f"{p}_floor_ms"] / part[f"{p}_ms_p50"] for p in PARTS]).astype(float)
        words.append(f"{figures.label(str(impl))} {percent(shares.min())} to {percent(shares.max())}")
    return (
        f"At $n = {rows['seq_len'].max()}$ the floors are this share of the measured times, over passes, dtypes and "
        f"head dimensions: {'; '.join(words)}."
    )


# ------------------------------------------------------------------------------------------------ memory
def exponents(chapter: Chapter, machine: str, head_dim: int, dtype: str) -> str:
    """The exponents with which what is saved beyond inputs and output grows with the sequence, fitted from the rows."""
    words = []
    for impl in (PLAIN, COMPILED, OURS):
        rows = chapter.measured(
            machine=machine, impl=impl, cap_gib=0, dtype=dtype, head_dim=head_dim, repeat=0
        )
        rows = rows[rows["seq_len"] >= LONG].dropna(subset="before_backward_gib")
        if len(rows) < 2:
            continue
        lengths = [int(n) for n in rows["seq_len"]]
        # less the five tensors that every implementation holds: Q, K, V, dO, O
        given = [5 * np.prod(page.sizes(chapter, n, head_dim, dtype)) / n / GIB for n in lengths]
        saved = (rows["before_backward_gib"] - rows["workspace_gib"]).to_numpy(float) - given
        if (saved > 0).all():
            slope = np.polyfit(np.log2(lengths), np.log2(saved), 1)[0]
            words.append(f"$n^{{{slope:.2f}}}$ for {figures.label(impl)}")
            ends = f"{min(lengths)} to {max(lengths)}"
    if not words:
        return f"The exponent of what is saved for backward: {NOT_MEASURED}."
    return (
        f"Fitted from $n$ = {ends} ($d = {head_dim}$, {figures.label(dtype)}), the memory held before backward, less "
        f"workspaces, $Q$, $K$, $V$, $dO$ and $O$, grows as {', '.join(words)}."
    )


def accuracy(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """How far the closed forms are from the measured memory, by implementation."""
    rows = page.with_predictions(chapter, roofs, machine=machine)
    words = []
    for impl, part in rows.groupby("impl", sort=False):
        ok = part[part["status"] == "ok"]
        apart = [
            (whole[column] / whole[predicted] - 1).abs().max()
            for whole, column, predicted in (
                (part, "before_backward_gib", "predicted_before_gib"), (ok, "peak_gib", "predicted_peak_gib")
            )
        ]  # fmt: skip
        if pd.notna(apart[0]) and pd.notna(apart[1]):
            words.append(f"{figures.label(str(impl))} {percent(apart[0])} and {percent(apart[1])}")
    if not words:
        return f"The closed forms against the measured memory: {NOT_MEASURED}."
    return (
        "The largest relative difference between measured memory and closed form over all shapes, before backward and "
        f"at the peak: {'; '.join(words)}."
    )


def what_fails(chapter: Chapter, machine: str) -> str:
    """Which cases ran out of memory, on the whole GPU and under the cap, as a Markdown list."""
    rows = chapter.rows(machine=machine, repeat=0) if machine else chapter.rows()
    known = rows[rows["status"].isin(["ok", "oom"])]
    out = []
    whole = "on the whole GPU" if page.device(machine) == "cuda" else "on the CPU"
    for cap in sorted(known["cap_gib"].unique()):
        where = f"under the cap of {cap} GiB" if cap else whole
        part = known[known["cap_gib"] == cap]
        failed = part[part["status"] == "oom"]
        if failed.empty:
            out.append(f"- {_capital(where)} none of {len(part)} cases runs out of memory.")
            continue
        out.append(f"- {_capital(where)} {len(failed)} of {len(part)} cases run out: {_cases(failed)}.")
    return "\n".join(out) or f"What runs out of memory: {NOT_MEASURED}."


def smallest_failure(chapter: Chapter, machine: str) -> pd.Series | None:
    """The row of the case that ran out of memory with the fewest bytes predicted: on the whole GPU if there is one,
    else under the cap; None where nothing failed.
    """
    rows = chapter.rows(machine=machine, repeat=0, status="oom") if machine else chapter.rows(status="oom")
    if rows.empty:
        return None
    whole = rows[rows["cap_gib"] == 0]
    rows = whole if len(whole) else rows
    return rows.iloc[int(_needs(chapter, rows).argmin())]


def accounting_of(chapter: Chapter, machine: str) -> str:
    """The memory of the smallest case that ran out, derived step by step and evaluated, beside what was measured."""
    row = smallest_failure(chapter, machine)
    if row is None:
        known = len(chapter.measured(machine=machine)) if machine else 0
        return "Nothing ran out of memory." if known else f"The smallest case that runs out: {NOT_MEASURED}."
    batch, n, _, d, size = shape = page.sizes(
        chapter, int(row["seq_len"]), int(row["head_dim"]), row["dtype"]
    )
    found = accounting.attention_moments(*shape, _form(chapter, row))
    peak = page.heaviest(found)
    tensors = found[peak]
    alive = [name for name in tensors if name in MATRICES]
    others = [name for name in tensors if name not in MATRICES]
    matrix_bytes, total = batch * n * n * size, sum(tensors.values())
    in_full = f"{total:,}".replace(",", "{,}")
    limit = float(row["cap_gib"]) or page.gpu_memory_gib(chapter, machine)
    room = f", more than the {limit:g} GiB there are" if limit and total > limit * GIB else ""
    text = (
        f"The smallest case that runs out is {figures.label(row['impl'])} at $n = {n}$, $d = {d}$ in "
        f"{figures.label(row['dtype'])}, "
        + (f"under the cap of {row['cap_gib']} GiB" if row["cap_gib"] else "on the whole GPU")
        + f". Its heaviest moment is “{peak}”: {len(alive)} matrices of scores ({', '.join(alive)}) and "
        f"{len(others)} tensors like $Q$ ({', '.join(others)}),\n\n"
        f"$$\n\\begin{{aligned}}\n"
        f"{len(alive)} \\cdot B n^2 b + {len(others)} \\cdot B n d b\n"
        f"&= {len(alive)} \\cdot {batch} \\cdot {n}^2 \\cdot {size} + {len(others)} \\cdot {batch} \\cdot {n} \\cdot "
        f"{d} \\cdot {size} \\\\\n"
        f"&= {in_full} \\text{{ bytes}} = {fmt(total / GIB, 4)} \\text{{ GiB}}.\n\\end{{aligned}}\n$$\n\n"
        f"One matrix is {_gib(matrix_bytes)}; all of it is {fmt(total / GIB, 4)} GiB{room}."
    )
    if row["failed_in"] == "backward" and pd.notna(row["before_backward_gib"]):
        predicted = accounting.attention_before_backward_bytes(*shape, _form(chapter, row))
        text += (
            f" Measured: the forward pass fits, {fmt(row['before_backward_gib'], 4)} GiB are allocated after it "
            f"(predicted {fmt(predicted / GIB + row['workspace_gib'], 4)}, with {fmt(row['workspace_gib'])} GiB of "
            "workspaces)."
        )
    if pd.notna(row["peak_gib"]) and pd.notna(row["failed_in"]) and limit:
        left = limit - row["peak_gib"]
        text += (
            f" The most that was allocated is {fmt(row['peak_gib'], 4)} GiB, when the {row['failed_in']} pass failed: "
            f"{fmt(left)} GiB were left, and the next matrix needs {_gib(matrix_bytes)}."
        )
    return text


def without_scores(chapter: Chapter, machine: str) -> str:
    """What ours holds where plain attention needs the most: before backward and at the peak."""
    rows = chapter.rows(machine=machine, repeat=0) if machine else chapter.rows()
    ours = rows[(rows["impl"] == OURS) & (rows["status"] == "ok")].dropna(subset="peak_gib")
    failed = smallest_failure(chapter, machine)
    if failed is not None:
        same = ["dtype", "cap_gib", "head_dim", "seq_len"]
        ours = ours[(ours[same] == failed[same]).all(axis=1)]
    if ours.empty:
        return f"What is left without the scores: {NOT_MEASURED}."
    row = ours.loc[ours["seq_len"].astype(int).idxmax()]
    shape = page.sizes(chapter, int(row["seq_len"]), int(row["head_dim"]), row["dtype"])
    plain = accounting.attention_peak_bytes(*shape, _form(chapter, row, PLAIN))
    own = accounting.attention_peak_bytes(*shape, _form(chapter, row, OURS))
    return (
        f"At $n = {row['seq_len']}$, $d = {row['head_dim']}$ in {figures.label(row['dtype'])}"
        + (f" and under the cap of {row['cap_gib']} GiB" if row["cap_gib"] else "")
        + f", {figures.label(OURS)} holds {fmt(row['before_backward_gib'])} GiB before backward and peaks at "
        f"{fmt(row['peak_gib'])} GiB, workspaces of {fmt(row['workspace_gib'])} GiB included; the closed forms are "
        f"{_gib(own)} for it and {_gib(plain)}, {fmt(plain / own)} times as much, for plain attention."
    )
