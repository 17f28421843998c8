"""What the assignment asks, and where this project answers it: one table for all problem ids."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pandas as pd

from cs336_systems import experiments
from cs336_systems.measure import rows as store
from cs336_systems.report.chapter import Chapter, reference_machines


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of the handout. `chapter` is the notebook that answers it; `code` is a path in the
    package, `tests` one in `tests/`.
    """

    id: str
    points: int | None
    section: str
    chapter: str
    code: str = ""
    tests: str = ""
    year: int = 2025


_FLASH = "attention/"
_DDP = "parallel/ddp.py"
PROBLEMS = (
    Problem("benchmarking_script", 4, "1.1", "benchmarking", "experiments/steps.py", "test_chapter_benchmarking.py"),
    Problem("nsys_profile", 5, "1.1", "profiling", "experiments/profiling.py", "test_chapter_profiling.py"),
    Problem("mixed_precision_accumulation", 1, "1.1", "mixed_precision",
            "experiments/mixed_precision.py", "test_chapter_mixed_precision.py"),
    Problem("benchmarking_mixed_precision", 2, "1.1", "mixed_precision",
            "experiments/mixed_precision.py", "test_chapter_mixed_precision.py"),
    Problem("memory_profiling", 4, "1.1", "memory", "experiments/memory.py", "test_chapter_memory.py"),
    Problem("pytorch_attention", 2, "1.2", "attention", "experiments/attention.py", "test_chapter_attention.py"),
    Problem("torch_compile", 2, "1.3", "torch_compile",
            "experiments/torch_compile.py", "test_chapter_torch_compile.py"),
    Problem("flash_forward", 15, "1.3", "flash_bench", _FLASH, "test_unit_attention*.py"),
    Problem("flash_backward", 5, "1.3", "flash_bench", _FLASH, "test_unit_attention*.py"),
    Problem("flash_benchmarking", 5, "1.3", "flash_bench",
            "experiments/flash_bench.py", "test_chapter_flash_bench.py"),
    Problem("leaderboard", None, "1.3.3", "leaderboard",
            "experiments/leaderboard.py", "test_experiment_leaderboard.py"),
    Problem("flash_backward_triton", None, "1.3.4", "flash_bench",
            _FLASH + "flash_triton.py", "test_unit_attention*.py"),
    Problem("distributed_communication_single_node", 5, "2", "allreduce",
            "experiments/allreduce.py", "test_chapter_allreduce.py"),
    Problem("naive_ddp", 5, "2", "ddp", _DDP, "test_unit_ddp.py"),
    Problem("naive_ddp_benchmarking", 3, "2", "ddp", "experiments/ddp.py", "test_chapter_ddp.py"),
    Problem("minimal_ddp_flat_benchmarking", 2, "2", "ddp", "experiments/ddp.py", "test_chapter_ddp.py"),
    Problem("ddp_overlap_individual_parameters", 5, "2", "ddp", _DDP, "test_unit_ddp.py"),
    Problem("ddp_overlap_individual_parameters_benchmarking", 1, "2", "ddp",
            "experiments/ddp.py", "test_chapter_ddp.py"),
    Problem("ddp_overlap_bucketed", 8, "2", "ddp", _DDP, "test_unit_ddp.py"),
    Problem("ddp_bucketed_benchmarking", 3, "2", "ddp", "experiments/ddp.py", "test_chapter_ddp.py"),
    Problem("communication_accounting", 10, "2", "parallelism",
            "accounting/parallelism.py", "test_chapter_parallelism.py"),
    Problem("optimizer_state_sharding", 15, "3", "zero", "parallel/zero.py", "test_unit_zero.py"),
    Problem("optimizer_state_sharding_accounting", 5, "3", "zero", "experiments/zero.py", "test_chapter_zero.py"),
    Problem("gradient_checkpointing", None, "", "gradient_checkpointing", year=2026),
    Problem("fsdp", None, "", "fsdp", year=2026),
    Problem("fsdp_accounting", None, "", "fsdp", year=2026),
    Problem("alternate_ring_all_reduce", None, "", "parallelism_2026", year=2026),
    Problem("data_parallel_calcs", None, "", "parallelism_2026", year=2026),
    Problem("fsdp_calcs", None, "", "parallelism_2026", year=2026),
    Problem("tp_calcs", None, "", "parallelism_2026", year=2026),
    Problem("fsdp_tp_calcs", None, "", "parallelism_2026", year=2026),
    Problem("leaderboard (2026)", None, "", "leaderboard_2026", year=2026),
)  # fmt: skip


def project_root(root: Path | None = None) -> Path:
    """The checkout that holds the results folder; FileNotFoundError where there is none.

    With `$CS336_RESULTS` set, the checkout is the one around the working directory.
    """
    start = Path.cwd().resolve()
    for folder in (start, *start.parents):
        if (folder / "_toc.yml").is_file() and (folder / "book").is_dir():
            return folder
    results = root or store.results_root()
    if (results.parent / "_toc.yml").is_file():
        return results.parent
    raise FileNotFoundError(
        f"no _toc.yml and book/ in {start} or above it: run inside a checkout of cs336_systems"
    )


def chapters_in_toc(root: Path | None = None) -> list[str]:
    """The pages that `_toc.yml` lists, in order, without the index."""
    text = ((root or project_root()) / "_toc.yml").read_text()
    return re.findall(r"^\s*- file: *(\S+)", text, flags=re.M)


def status(problem: Problem, toc: list[str]) -> str:
    """`open` (no chapter), `in the book, not measured`, `n rows missing`, or `answered`."""
    if problem.chapter not in toc:
        return "open"
    if problem.chapter not in experiments.CHAPTERS:  # derivations: a page without rows
        return "answered"
    if not reference_machines(problem.chapter):
        return "in the book, not measured"
    statuses = pd.concat([table.rows()["status"] for table in Chapter(problem.chapter, measure="no").tables])
    missing = int((statuses == "not measured").sum())
    if missing == len(statuses):
        return "in the book, not measured"
    return f"{missing} rows missing" if missing else "answered"


def table(year: int | None = None) -> pd.DataFrame:
    """The problems (of one handout year, or all) with links to their chapters and a status computed from
    files.

    Columns: problem, points, chapter (a link relative to `book/`), code and tests, status.
    """
    toc = chapters_in_toc()
    out = []
    for p in PROBLEMS:
        if year is not None and p.year != year:
            continue
        there = p.chapter in toc
        row = {
            "problem": p.id,
            "points": "" if p.points is None else p.points,
            "chapter": f"[{p.chapter}]({p.chapter}.ipynb)" if there else "",
            "code, tests": ", ".join(filter(None, [p.code, p.tests])) if there else "",
            "status": status(p, toc),
        }
        out.append(row)
    return pd.DataFrame(out)


def later(year: int) -> str:
    """The problems that a later edition added, and how many of them are answered, as Markdown."""
    frame = table(year)
    done = int(frame["status"].str.startswith("answered").sum())
    names = ", ".join(f"`{name}`" for name in frame["problem"])
    return (
        f"The {year} edition of the course added {len(frame)} problems, of which {done or 'none'} "
        f"{'is' if done == 1 else 'are'} answered here so far: {names}."
    )
