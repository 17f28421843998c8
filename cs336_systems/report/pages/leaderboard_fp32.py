"""Chapter leaderboard, kernels in fp32: what their products are made of, and how near those come to the best ones."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages.leaderboard_noise import largest
from cs336_systems.report.roofs import Roofs
from cs336_systems.report.tables import EMPTY, fmt, percent, span

# Whose kernels make a product that is accurate to fp32 out of how many products of what
MADE_OF = {"hopper.split.": (6, "bf16"), "triton_kernels.": (3, "tf32")}
TWO_PASSES = 7 / 5  # both compute S and dP


def parts(chapter: Chapter, roofs: Roofs, machine: str) -> pd.DataFrame:
    """The measured rows of kernels in fp32. For ours also `parts` and `part_dtype`, the products that each product is
    made of; `rate`, the TFLOP/s of these, two passes backward included; `share`, that of the best such product measured
    here; and `over_bf16`, the time over that of our best in bf16. NaN where not known."""
    rows = chapter.measured(machine=machine, **page.KERNEL, dtype="fp32")
    out = []
    for row in rows.to_dict("records"):
        line: dict[str, Any] = dict.fromkeys(("parts", "part_dtype", "rate", "share", "over_bf16"), math.nan)
        made = next((made for names, made in MADE_OF.items() if names in str(row["kernels"])), None)
        if made and row["impl"] in page.OURS:
            count, dtype = made
            rate = count * row["tflops"] * (TWO_PASSES if row["part"] == "backward" else 1)
            line |= {"parts": count, "part_dtype": dtype.replace("tf32", "TF32"), "rate": rate}
            line["share"] = rate / roofs.tflops.get(dtype, math.nan)
            bf16 = page.best_ours(
                chapter, machine, kind="kernel", grad_o="matrix", part=row["part"], dtype="bf16",
                head_dim=row["head_dim"], is_causal=row["is_causal"],
            )  # fmt: skip
            if bf16 is not None:
                line["over_bf16"] = row["ms_p50"] / bf16["ms_p50"]
        out.append(row | line)
    return pd.DataFrame(out)


def table(chapter: Chapter, roofs: Roofs, machine: str) -> pd.DataFrame:
    """`parts` as it is printed, with errors."""
    return pd.DataFrame([
        {
            "d": row.head_dim, "pass": row.part, "implementation": figures.label(row.impl),
            "a product": EMPTY if math.isnan(row.parts) else f"{row.parts:.0f} in {row.part_dtype}",
            "these, TFLOP/s": fmt(row.rate), "of the best": percent(row.share),
            "over bf16": EMPTY if math.isnan(row.over_bf16) else f"{fmt(row.over_bf16)} ×",
            "error": fmt(row.error_out if row.part == "forward" else row.error_grads, 2),
        }
        for row in parts(chapter, roofs, machine).itertuples()
    ])  # fmt: skip


def words(chapter: Chapter, roofs: Roofs, machine: str) -> str:
    """How near the products that ours are made of in fp32 come to the best ones measured, and which rates are above
    that of fp32 instructions by more than the noise."""
    found = parts(chapter, roofs, machine)
    found = found[found["share"].notna()] if len(found) else found
    if found.empty:
        return f"Products of ours in fp32: {NOT_MEASURED}."
    said = [
        f"{figures.label(impl)} computes its parts at {span(own['share'], 2, percent)} of the rate of the best product "
        f"in {part}"
        for (impl, part), own in found.groupby(["impl", "part_dtype"], sort=False)
    ]
    text = f"**In fp32**, {'; '.join(said)}."
    sheet = roofs.sheet.tflops.get("fp32") if roofs.sheet else None
    noise = largest(chapter, machine, "kernel", wide=True) or 0.0
    above = int((found["tflops"] > sheet * (1 + noise)).sum()) if sheet else 0
    if above:
        text += (
            f" In {above} of {len(found)} cases attention's own rate is above {fmt(sheet)} TFLOP/s, the data sheet's "
            f"for fp32 instructions, by more than a case and its repetition differ: tensor cores make these products."
        )
    return text
