"""The book's first page: the three results that it and the README open with, their rows and one figure of them; what
the GPU tests last said; and the table of all problems with their answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems import chapters
from cs336_systems.chapters.leaderboard.measure import OFFICIAL_MS
from cs336_systems.report import claims, coverage, figures, prose
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.tables import EMPTY, chosen, escaped, first_machine, in_order, looked_up
from cs336_systems.store import rows as store
from cs336_systems.store.provenance import current

YEARS = ("2025", "2026")
RUN = ["machine", "run"]
RUNGS = {  # of the training ladder → label
    ("fp32",): "plain, fp32",
    ("tf32",): "+ TF32",
    ("bf16",): "+ bf16",
    ("compiled",): "+ torch.compile",
    ("flash",): "+ FlashAttention",
    ("graphs",): "+ CUDA graphs",
}
WRAPPERS = {  # wrapper, bucket_mb → label
    ("none", 0): "no communication",
    ("in_place", 100): "100 MB buckets, in place",
    ("overlapped", 0): "one by one, overlapped",
    ("flat", 0): "one flat tensor",
    ("naive", 0): "naive",
}


def _chapter(name: str, root: Path | None) -> Chapter:
    return chapters.read(name, preset="full", root=root)


# Each of one machine, the first of those that the chapter quotes.
def attention(root: Path | None = None) -> pd.DataFrame:
    """The leaderboard's harness by implementation, without the slow baselines: the chapter's rows, fastest first, and
    `over_ours`, the time over that of ours in the same run."""
    rows = first_machine(_chapter("leaderboard", root).rows(leaves="stacked"))
    rows = rows[(rows["rep_ms"] < OFFICIAL_MS) & ~rows["impl"].isin(["reference", "sdpa_efficient"])]
    ours = chosen(rows, impl="flash_triton", repeat=0)
    rows = rows.assign(over_ours=rows["ms_p50"] / looked_up(ours, "ms_p50", rows, RUN))
    return rows.sort_values("ms_p50", ignore_index=True)


def training(root: Path | None = None) -> pd.DataFrame:
    """A training step of the small model on one GPU, optimization by optimization: the ladder's rows in that order."""
    rows = _chapter("training", root).table("ladder").rows(world_size=1, sequences=16, repeat=0)
    return _labeled(first_machine(rows), ["rung"], RUNGS)


def overlap(root: Path | None = None) -> pd.DataFrame:
    """Steps of data parallel training at context 1,024 on two GPUs: the chapter's rows, fastest first, and
    `exposed_ms`, what a step takes beyond one without communication in the same run."""
    rows = _chapter("ddp", root).rows(kind="time", context_length=1024, world_size=2, dtype="tf32", repeat=0)
    rows = _labeled(first_machine(rows), ["wrapper", "bucket_mb"], WRAPPERS)
    none = rows[rows["wrapper"] == "none"]
    return rows.assign(exposed_ms=rows["step_ms_p50"] - looked_up(none, "step_ms_p50", rows, RUN))


def _labeled(rows: pd.DataFrame, fields: list[str], labels: dict[tuple, str]) -> pd.DataFrame:
    """The rows whose fields have a label, in the labels' order, with a column `label`."""
    rows = rows.assign(label=[labels.get(tuple(row)) for row in rows[fields].itertuples(index=False)])
    return in_order(rows.dropna(subset="label"), ["label"], labels.values())


def figure(root: Path | None = None) -> Figure:
    """Three panels, one for each result."""
    harness, steps, ddp = attention(root), training(root), overlap(root)
    drawn, axes = figures.panels(columns=3, height=2.1)
    harness, ddp = harness[harness["repeat"] == 0], ddp[ddp["wrapper"] != "none"]
    if harness["over_ours"].notna().any():  # what was not measured takes no bar from the others
        harness = harness[harness["over_ours"].notna()]
    ours = harness["impl"].isin(["flash_triton", "plain_triton", "flash_cuda"])
    thousands, tuned = steps["tokens_per_s"] / 1000, steps["label"] != "plain, fp32"
    beside = ~ddp["label"].isin(["naive", "one flat tensor"])
    names = harness["impl"].map(figures.label)
    _bars(axes[0, 0], "1  Attention, time over ours", names, harness["over_ours"], ours)
    _bars(axes[0, 1], "2  Training, 1,000 tokens/s", steps["label"], thousands, tuned)
    _bars(axes[0, 2], "3  Exposed communication, ms", ddp["label"], ddp["exposed_ms"], beside)
    return drawn


def _bars(ax: Axes, title: str, names: pd.Series, values: pd.Series, strong: pd.Series) -> None:
    """Horizontal bars with their numbers; `strong` ones are dark."""
    ax.set_title(title, fontsize=9, loc="right")
    if values.isna().all():
        figures.nothing(ax)
        return
    colors = ["#0072B2" if s else "#b9c4cc" for s in strong]
    bars = ax.barh(range(len(values)), values.fillna(0), color=colors, height=0.7, zorder=3)
    digits = 2 if values.max() < 10 else 0
    ax.bar_label(bars, [f"{v:.{digits}f}" if v == v else "–" for v in values], padding=2, fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.grid(visible=False)
    ax.margins(x=0.16)
    ax.invert_yaxis()


def digest(root: Path | None = None) -> str:
    """Eight hexadecimal digits of what the figure shows."""
    shown = (attention(root)["over_ours"], training(root)["tokens_per_s"], overlap(root)["exposed_ms"])
    return hashlib.sha256("\n".join(numbers.to_csv() for numbers in shown).encode()).hexdigest()[:8]


def gpu_tests(machine: str, root: Path | None = None) -> pd.DataFrame:
    """A row for each version of triton that was tried on a machine: how many tests of the kernels passed, failed and
    were skipped, the last day (`day`), and of how many `files`, how many were of another code than this (`earlier`)."""
    experiment = chapters.load("gpu_tests")
    frame = store.read(experiment, machine, root)
    is_current, found = current(experiment, root), []
    for triton, part in frame.groupby("triton"):
        counts = {name: int(part[name].fillna(0).sum()) for name in ("passed", "failed", "skipped")}
        earlier = sum(not is_current((row.file, triton), row.code) for row in part.itertuples())
        about = {"machine": machine, "triton": triton, "day": escaped(max(part["time_utc"])[:10])}
        found.append(about | counts | {"files": len(part), "earlier": earlier})
    columns = ["machine", "triton", "passed", "failed", "skipped", "day", "files", "earlier"]
    return pd.DataFrame(found, columns=columns)


def briefs(root: Path | None = None) -> dict[str, str]:
    """Part of a problem → its answer in one line, from the chapters' notebooks.

    They are executed here, as far as their last answer; their sentences are not this page's.
    """
    root = root or coverage.project_root()
    before, found = len(prose.made), {}
    for page in filter(coverage.parts, coverage.chapters_in_toc(root)):
        sentences, _ = claims.execute(root / "book" / f"{page}.ipynb", until="answer(")
        found |= {sentence.part: sentence.brief for sentence in sentences if sentence.part}
    del prose.made[before:]
    return found


def problems(answers: dict[str, str]) -> pd.DataFrame:
    """The parts of both handouts with one line of answer each (a dash where `answers` has none): columns chapter,
    problem, points in each year (with the first part), answer; the problem is a link to the answer's box."""
    return pd.DataFrame(
        {
            "chapter": f"[{problem.chapter}]({problem.chapter}.ipynb)",
            "problem": f"[{part}](#{coverage.anchor(part)})",
            **{
                year: (EMPTY if points is None else str(points)) if number == 0 else ""
                for year, points in zip(YEARS, problem.points, strict=True)
            },
            "answer": answers.get(part, EMPTY),
        }
        for problem in coverage.PROBLEMS
        for number, part in enumerate(problem.by_part())
    )
