"""The sentences of chapter `attention` that hold numbers: Markdown, computed from its rows and the closed forms.

Each says "not measured" where the rows for it are missing; none claims a difference below the A/A spread."""

from __future__ import annotations

import numpy as np
import pandas as pd

from cs336_systems import accounting
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import attention as page
from cs336_systems.report.pages.attention import COMPILED, GIB, MATRICES, OURS, PARTS, PLAIN
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, listed, percent

SIX_DIGITS = 5e-6  # the relative difference that rounding to six digits makes at the most
# PyTorch's allocator takes large blocks in multiples of this, and splits no small rest off (the chapter on memory)
BLOCK_BYTES = 2 << 20
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
    words, rounded, above = [], False, []
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
            rounded |= min(apart) <= SIX_DIGITS
            ok = ok.assign(more=GIB * (ok["peak_gib"] - ok["predicted_peak_gib"]))
            above.append(ok[ok["more"] > SIX_DIGITS * GIB * ok["peak_gib"]])
    if not words:
        return f"The closed forms against the measured memory: {NOT_MEASURED}."
    return (
        "The largest relative difference between measured memory and closed form over all shapes, before backward and "
        f"at the peak: {'; '.join(words)}."
        + (
            f" Rows are rounded to six digits, which alone makes up to {percent(SIX_DIGITS)}."
            if rounded
            else ""
        )
        + _blocks(pd.concat(above))
    )


def _blocks(above: pd.DataFrame) -> str:
    """What may make peaks lie `above` their closed form, by `more` bytes; nothing where one is further than a block."""
    if above.empty or above["more"].max() >= BLOCK_BYTES:
        return ""
    row, mib = above.loc[above["more"].idxmax()], BLOCK_BYTES >> 20
    return (
        f" Of the peaks {len(above)} {'is' if len(above) == 1 else 'are'} higher by more than that, by "
        f"{fmt(row['more'] / 2**20)} MiB at the most ({figures.label(row['impl'])} in {figures.label(row['dtype'])}, "
        f"$n = {row['seq_len']}$, $d = {row['head_dim']}$). PyTorch's allocator takes large blocks in multiples of "
        f"{mib} MiB, which tensors alone do not show."
    )


def what_fails(chapter: Chapter, machine: str) -> str:
    """Which cases ran out of memory, on the whole GPU and under the cap, as a Markdown list; and whether they are those
    that the closed forms name."""
    rows = chapter.rows(machine=machine, repeat=0) if machine else chapter.rows()
    known = rows[rows["status"].isin(["ok", "oom"])]
    out = []
    whole = "on the whole GPU" if page.device(machine) == "cuda" else "on the CPU"
    for cap in sorted(known["cap_gib"].unique()):
        where = f"under the cap of {cap} GiB" if cap else whole
        part = known[known["cap_gib"] == cap]
        failed = part[part["status"] == "oom"]
        if failed.empty:
            out.append(f"- {_capital(where)} none of {len(part)} cases runs out of memory{_most(part)}.")
            continue
        limit = float(cap) or page.gpu_memory_gib(chapter, machine)
        said = limit and ((_needs(chapter, part) > limit * GIB) == (part["status"] == "oom")).all()
        out.append(
            f"- {_capital(where)} {len(failed)} of {len(part)} cases run out: {_cases(failed)}"
            + ("; the closed forms named the same ones." if said else ".")
        )
    return "\n".join(out) or f"What runs out of memory: {NOT_MEASURED}."


def _most(rows: pd.DataFrame) -> str:
    """The greatest peak among rows, and whose it is; nothing where none is known."""
    known = rows.dropna(subset="peak_gib")
    if known.empty:
        return ""
    row = known.loc[known["peak_gib"].astype(float).idxmax()]
    return (
        f"; the highest peak is {fmt(row['peak_gib'])} GiB, {figures.label(row['impl'])} in "
        f"{figures.label(row['dtype'])} at $n = {row['seq_len']}$, $d = {row['head_dim']}$"
    )


def under_the_cap(chapter: Chapter, machine: str) -> str:
    """How far times under the cap are from those on the whole GPU."""
    rows = chapter.measured(machine=machine, repeat=0) if machine else chapter.measured()
    same = ["impl", "dtype", "head_dim", "seq_len"]
    both = rows[rows["cap_gib"] > 0].merge(rows[rows["cap_gib"] == 0], on=same, suffixes=("", "_whole"))
    if both.empty:
        return ""
    apart = max((both[f"{p}_ms_p50"] / both[f"{p}_ms_p50_whole"] - 1).abs().max() for p in PARTS)
    again = page.spread(chapter)
    again = again[again["machine"].isin(both["machine"]) & again["seq_len"].isin(both["seq_len"])]
    pairs = again[list(PARTS)].max().max()
    text = (
        f"The medians of the {len(both)} cases that fit under the cap differ from those on the whole GPU by at most "
        f"{percent(apart)} (in different runs"
    )
    if pd.notna(pairs):
        text += f"; within a run, A/A pairs of these lengths differ by up to {percent(pairs)}"
    return f"{text})."


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
        before = list(found)[: list(found).index(peak)]
        reached = [m for m in before if _same(sum(found[m].values()) / GIB, row)]
        held = f", what “{reached[-1]}” holds" if reached and row["failed_in"] == "backward" else ""
        text += (
            f" The most that was allocated is {fmt(row['peak_gib'], 4)} GiB{held}. Then the {row['failed_in']} pass "
            f"failed: {fmt(left)} GiB were left, and the next matrix needs {_gib(matrix_bytes)}."
        )
    return text


def _same(predicted_gib: float, row: pd.Series) -> bool:
    return abs(predicted_gib + row["workspace_gib"] - row["peak_gib"]) < 1e-3 * row["peak_gib"]


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
        f"{fmt(row['peak_gib'])} GiB (predicted {fmt(own / GIB + row['workspace_gib'])}), workspaces of "
        f"{fmt(row['workspace_gib'])} GiB included. Without them, that is {_gib(own)} where plain attention needs "
        f"{_gib(plain)}, {fmt(plain / own)} times as much."
    )


# ------------------------------------------------------------------------------------------------ answers
def answer(chapter: Chapter, machine: str, seq_len: int, head_dim: int, dtype: str) -> str:
    """`pytorch_attention` in a few sentences: one shape's times and memory, and what runs out."""
    shape = {"machine": machine, "cap_gib": 0, "dtype": dtype, "head_dim": head_dim, "seq_len": seq_len}
    rows = chapter.measured(**shape, impl=PLAIN, repeat=0)
    text = f"Plain attention at $n = {seq_len}$, $d = {head_dim}$ in {figures.label(dtype)}: "
    if rows.empty:
        return f"{text}{NOT_MEASURED}."
    row = rows.iloc[0]
    text += listed([f"{p} {fmt(row[f'{p}_ms_mean'])} ms" for p in PARTS]) + " (means)"
    if pd.notna(row["before_backward_gib"]):
        text += (
            f", {fmt(row['before_backward_gib'])} GiB before backward, {fmt(row['peak_gib'])} GiB at the peak"
        )
    return f"{text}. Out of memory:\n\n{what_fails(chapter, machine)}"
