"""The sentences of chapter `leaderboard` about what its harness adds to the kernels: leaves, their gradients, and the
gradient of a sum."""

from __future__ import annotations

from typing import Any

from cs336_systems import accounting
from cs336_systems.experiments.leaderboard import GRAD_O, PEERS
from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages.leaderboard import HARNESS, HEAD_DIM, HEADS, TOKENS
from cs336_systems.report.pages.leaderboard_noise import largest
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import fmt, listed, percent, span


def harness_cost(roofs: Roofs) -> str:
    """What the handout's way to make q, k and v costs."""
    moved = accounting.harness_bytes(HEADS, TOKENS, HEAD_DIM, page.BYTES, stacked=True)
    words = ", ".join(f"{name} {fmt(num / 1e6)} MB" for name, num in moved.items())
    text = f"Around the two passes the harness moves at least: {words}."
    if roofs.tb_per_s:
        text += f" At the best copy of this machine that is {fmt(sum(moved.values()) / (roofs.tb_per_s * 1e9))} ms."
    return text


def stacked_against_separate(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """The measured difference between one leaf and three, beside the noise and what its bytes should take; and who is
    faster with one, though it moves more."""
    out, odd = [], []
    most = largest(chapter, machine, "harness")
    for impl in (*page.OURS, *PEERS):
        one = page.one(chapter, machine, **HARNESS, impl=impl, rep_ms=page.short_ms(chapter))
        three = page.one(chapter, machine, kind="harness", leaves="separate", impl=impl)
        if one is not None and three is not None:
            more = one["ms_p50"] - three["ms_p50"]
            within = most is not None and abs(more) <= most * one["ms_p50"]
            out.append(
                f"{figures.label(impl)} {fmt(more, 2)} ms" + (" (within the spread)" if within else "")
            )
            if more < 0 and not within:
                odd.append(figures.label(impl))
    if not out:
        return f"What one leaf costs more than three: {NOT_MEASURED}."
    text = f"Measured, the time of both passes with one leaf less that with three is: {', '.join(out)}"
    if roofs.tb_per_s:
        moved = accounting.harness_bytes(HEADS, TOKENS, HEAD_DIM, page.BYTES, stacked=True)
        few = accounting.harness_bytes(HEADS, TOKENS, HEAD_DIM, page.BYTES, stacked=False)
        more_ms = (sum(moved.values()) - sum(few.values())) / (roofs.tb_per_s * 1e9)
        text += f"; the bytes of stacking and adding would take {fmt(more_ms)} ms"
    text += ". The two were measured in runs of their own."
    return text + (f" Why {listed(odd)} should be faster with one leaf, no row says." if odd else "")


def number_against_matrix(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """What the backward kernels save where dO may stay one number, and how little of it the bytes explain."""
    rows = chapter.measured(machine=machine, **page.headline("backward", "number"), repeat=0)
    out, found = [], []
    for impl in rows["impl"]:
        one, matrix = (page.one(chapter, machine, **page.headline("backward", g), impl=impl) for g in GRAD_O)
        if one is None or matrix is None:
            continue
        found.append((1 - one["ms_p50"] / matrix["ms_p50"], one, matrix))
        if impl in page.OURS:
            out.append(f"{figures.label(impl)} {fmt(one['ms_p50'])} ms instead of {fmt(matrix['ms_p50'])}")
    if not out:
        return f"The backward kernels with one number for $dO$: {NOT_MEASURED}."
    text = f"The backward kernels alone, given one number instead of a matrix: {'; '.join(out)}."
    most = largest(chapter, machine, "kernel", wide=False)
    saved = [those for those in found if those[0] > (most or 0.0)]
    if len(found) > 1:
        text += f" Of all {len(found)} implementations measured so, in two runs, {len(saved)} take less time"
        if most is not None:
            text += f" by more than kernels and their repetitions differ in one run ({percent(most)})"
        text += f": {span([less for less, *_ in saved], 2, percent)}." if saved else "."
    if roofs.tb_per_s:
        matrix_ms = page.BYTES * HEADS * TOKENS * HEAD_DIM / (roofs.tb_per_s * 1e9)
        text += f" To read a matrix once takes {fmt(matrix_ms)} ms at the best copy."
    return text + (
        _saved(saved, [those for those in found if abs(those[0]) <= (most or 0.0)]) if saved else ""
    )


def _saved(saved: list[tuple[float, Any, Any]], even: list[tuple[float, Any, Any]]) -> str:
    """What clocks and power say of times that fell, and of those that did not: (share saved, one number, matrix)."""
    text = " What else is saved no row says"
    if all(one["sm_mhz"] > matrix["sm_mhz"] for _, one, matrix in saved):
        more = span([one["sm_mhz"] / matrix["sm_mhz"] - 1 for _, one, matrix in saved], 2, percent)
        text = f" Those that take less were seen at clocks higher by {more}"
        for _, one, matrix in even:
            if one["sm_mhz"] == matrix["sm_mhz"] and one["power_w"] < matrix["power_w"]:
                text += (
                    f"; {figures.label(one['impl'])}, as fast as before, at the same clock, but drawing "
                    f"{fmt(one['power_w'])} W instead of {fmt(matrix['power_w'])}"
                )
        text += ". Why, no row says"
    return (
        text
        + "; a guess is that equal numbers switch fewer bits in the multipliers, which draws less power, so that "
        "the clock falls less at its limit."
    )
