"""What the assignment asks, and where this project answers it: one table for all problem ids."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pandas as pd

from cs336_systems.report.prose import anchor
from cs336_systems.report.tables import EMPTY
from cs336_systems.store import rows as store


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of the handout. `chapter` is the notebook that answers it; `parts` are its letters, if it has any."""

    id: str
    chapter: str
    parts: str = ""


PROBLEMS = (
    Problem("benchmarking_script", "benchmarking", "abc"),
    Problem("nsys_profile", "profiling", "abcde"),
    Problem("mixed_precision_accumulation", "mixed_precision"),
    Problem("benchmarking_mixed_precision", "mixed_precision", "abc"),
    Problem("memory_profiling", "memory", "abcde"),
    Problem("pytorch_attention", "attention"),
    Problem("torch_compile", "torch_compile", "ab"),
    Problem("flash_forward", "flash_bench", "abc"),
    Problem("flash_backward", "flash_bench"),
    Problem("flash_benchmarking", "flash_bench"),
    Problem("leaderboard", "leaderboard"),
    Problem("flash_backward_triton", "flash_bench"),
    Problem("distributed_communication_single_node", "allreduce"),
    Problem("naive_ddp", "ddp"),
    Problem("naive_ddp_benchmarking", "ddp"),
    Problem("minimal_ddp_flat_benchmarking", "ddp"),
    Problem("ddp_overlap_individual_parameters", "ddp"),
    Problem("ddp_overlap_individual_parameters_benchmarking", "ddp", "ab"),
    Problem("ddp_overlap_bucketed", "ddp"),
    Problem("ddp_bucketed_benchmarking", "ddp", "ab"),
    Problem("communication_accounting", "parallelism", "abcd"),
    Problem("optimizer_state_sharding", "zero"),
    Problem("optimizer_state_sharding_accounting", "zero", "abc"),
)


def parts(chapter: str = "") -> list[str]:
    """What is to be answered, by one chapter or all, in the handout's order: `"nsys_profile (a)"`, or a problem's id
    where it has no parts."""
    return [
        part
        for problem in PROBLEMS
        if chapter in ("", problem.chapter)
        for part in ([f"{problem.id} ({letter})" for letter in problem.parts] or [problem.id])
    ]


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


def table(answers: dict[str, str]) -> pd.DataFrame:
    """The parts of the 2025 handout with one line of answer each (a dash where `answers` has none): columns chapter,
    problem, answer; the problem is a link to the answer's box."""
    out = []
    for problem in PROBLEMS:
        letters = [f" ({letter})" for letter in problem.parts] or [""]
        for letter in letters:
            part = problem.id + letter
            out.append({
                "chapter": f"[{problem.chapter}]({problem.chapter}.ipynb)",
                "problem": f"[{part}](#{anchor(part)})",
                "answer": answers.get(part, EMPTY),
            })  # fmt: skip
    return pd.DataFrame(out)
