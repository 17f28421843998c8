"""Chapter flash_bench: what its rows say about errors, as sentences."""

from __future__ import annotations

import pandas as pd

from cs336_systems.report import figures
from cs336_systems.report.chapter import NOT_MEASURED, Chapter
from cs336_systems.report.pages import flash_bench as page
from cs336_systems.report.pages.flash_bench import OURS, STEADY
from cs336_systems.report.tables import fmt, listed, span

FP32_ACCURATE = 1e-5  # an error below this cannot come from TF32 products
PREDICTED_TF32 = 1000  # by how much the page expects TF32 products to make errors larger


def accuracy(chapter: Chapter) -> str:
    """The largest error of ours over that of plain PyTorch on the same inputs, by dtype."""
    rows = chapter.measured(repeat=0)
    keys = [*page.SHAPE, "run"]
    ours, plain = rows[rows["impl"] == OURS], rows[rows["impl"] == "reference"]
    both = ours.merge(plain, on=keys, suffixes=("", "_plain"))
    if both.empty:
        return f"Errors of ours over those of plain PyTorch: {NOT_MEASURED}."
    words = []
    for (dtype, backend), part in both.groupby(["dtype", "backend"], sort=False):
        said = []
        for name, what in (("out", "output"), ("grads", "gradients")):
            ratio = part[f"error_{name}"] / part[f"error_{name}_plain"]
            worst = part.loc[ratio.idxmax()]
            said.append(
                f"{what} {fmt(ratio.max(), 2)} ($n$ = {figures.short(worst['seq_len'])}, $d$ = {worst['head_dim']})"
            )
        several = both.loc[both["dtype"] == dtype, "backend"].nunique() > 1
        words.append(f"{figures.label(dtype)}{f' (`{backend}`)' if several else ''}: {', '.join(said)}")
    text = (
        "The error of ours over that of plain PyTorch on the same inputs is at most, in "
        + "; in ".join(words)
        + f".{_as_good_as_plain(both)} The tests allow twice plain PyTorch's error and some roundings of the result."
    )
    tf32 = rows[rows["dtype"] == "tf32"]
    if (tf32["impl"] == OURS).any():
        text += (
            " In TF32 they allow more: cuBLAS rounds fp32 numbers to TF32 before a product, while Triton hands them to "
            "the tensor cores as they are, which drop the last bits, all in one direction."
        )
    sdpa = tf32[tf32["impl"] == "sdpa"]["error_grads"].max()
    if sdpa < FP32_ACCURATE:
        text += (
            f" SDPA's kernel does not use TF32 even where it may: its gradients have an error of {fmt(sdpa, 2)} at "
            "most, so in the TF32 rows ours is compared with products that are more accurate."
        )
    return f"{text}{_beside_libraries(rows)}{_tf32_over_fp32(rows)}"


def _as_good_as_plain(both: pd.DataFrame) -> str:
    """Whether ours is as accurate as plain PyTorch, which was asked of bf16 and fp32."""
    words = []
    for dtype in ("bf16", "fp32"):
        part = both[both["dtype"] == dtype]
        worse = {
            what: part.loc[part[f"error_{name}"] > part[f"error_{name}_plain"], "seq_len"]
            for name, what in (("out", "output"), ("grads", "gradients"))
        }
        if part.empty:
            continue
        if not any(map(len, worse.values())):
            words.append(f"holds for {dtype}")
            continue
        last = max(lengths.max() for lengths in worse.values() if len(lengths))
        found = listed([f"the {what} in {len(lengths)}" for what, lengths in worse.items() if len(lengths)])
        words.append(
            f"does not for {dtype}: there the error of ours is the larger for {found} of {len(part)} shapes, at "
            f"{figures.short(last)} tokens or fewer"
        )
    return f" That ours is as good as plain PyTorch {listed(words)}." if words else ""


def _beside_libraries(rows: pd.DataFrame, dtype: str = "bf16") -> str:
    """How the gradients' error of ours compares with that of PyTorch's fused kernels."""
    rows = rows[rows["dtype"] == dtype]
    peers = rows[rows["impl"].str.startswith("sdpa")]
    both = rows[rows["impl"] == OURS].merge(peers, on=[*page.SHAPE, "run"], suffixes=("", "_peer"))
    if both.empty:
        return ""
    both["ratio"] = both["error_grads"] / both["error_grads_peer"]
    words = [
        f"{span(part['ratio'], 2)} where ours ran `{backend}`"
        for backend, part in both.groupby("backend", sort=False)
    ]
    text = f" Over SDPA's fused kernels, the gradients' error of ours in {dtype} is {listed(words)}"
    worse = both[both["ratio"] > 1 + STEADY]
    if worse.empty:
        return f"{text}."
    text += ": there ours is worse than PyTorch."
    if worse["backend"].str.contains("hopper (?:kernels|backward)").all():
        text += " Those kernels make $dS$ from a $P$ that is rounded already, which is likely why."
    return text


def _tf32_over_fp32(rows: pd.DataFrame) -> str:
    """How much larger errors are with TF32 products than with fp32-accurate ones."""
    words = []
    for impl, name in ((OURS, "ours"), ("reference", figures.label("reference"))):
        one = rows[(rows["impl"] == impl) & (rows["heads"] == 1)]
        keys = ["machine", "heads", "head_dim", "seq_len"]
        both = one[one["dtype"] == "tf32"].merge(one[one["dtype"] == "fp32"], on=keys, suffixes=("", "_fp32"))
        if len(both):
            ratio = pd.concat([both[f"error_{x}"] / both[f"error_{x}_fp32"] for x in ("out", "grads")])
            missed = " (more than predicted)" if ratio.min() > PREDICTED_TF32 else ""
            missed = " (less than predicted)" if ratio.max() < PREDICTED_TF32 else missed
            words.append(f"{span(ratio, 2)} times for {name}{missed}")
    if not words:
        return ""
    return (
        f" TF32 products were predicted to make errors {fmt(PREDICTED_TF32)} times those of fp32-accurate ones; shape "
        f"by shape they are {listed(words)}."
    )
