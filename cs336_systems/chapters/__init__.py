"""The chapters of the book. Each is a folder, of the name of its notebook in `book/`:

    chapters/hardware/measure.py    its table: cases, grid, how a group is measured
    chapters/hardware/show.py       numeric frames and figures of the rows

and more modules where it has more tables, which `TABLES` names, or parts that run on ranks. What chapters share stands
in `shared`. `index` is the book's first page; `parallelism` and `speedrun` measure nothing of their own.

Each of these modules ends with its `TABLE` (`store.table.Table`). A table that is timed writes down how one case is
prepared, its phases and the columns that only it has; turns, clocks and statistics are `measure.clocks`'.

A chapter of several processes has a field `world_size` in `Case`, and measures by `shared.on_ranks`. That starts
processes on this machine, or uses those that torchrun has started, when the chapter is run under it:

    torchrun --nproc-per-node 2 -m cs336_systems run allreduce
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.store import selection
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    from cs336_systems.report.chapter import Chapter

TABLES = {
    "leaderboard": (
        "leaderboard", "leaderboard_kernels", "leaderboard_shapes", "leaderboard_models", "leaderboard_ladder",
        "leaderboard_counters", "leaderboard_first_calls",
    ),
    "training": ("training", "training_ladder", "training_run", "training_fits", "training_sweep"),
}  # fmt: skip
RECORDS = ("gpu_tests",)  # rows that are written by other means than a chapter's measurement
CHAPTERS = tuple(
    module.name for module in pkgutil.iter_modules(__path__)
    if module.name not in RECORDS and (Path(__path__[0]) / module.name / "measure.py").is_file()
)  # fmt: skip


def tables(*chapters: str) -> tuple[str, ...]:
    """The tables of some chapters (of all, where none is named), the one of the chapter's name first."""
    return tuple(table for chapter in chapters or CHAPTERS for table in TABLES.get(chapter, (chapter,)))


def chapter_of(table: str) -> str:
    """The chapter that a table belongs to."""
    return next((chapter for chapter, names in TABLES.items() if table in names), table)


def load(table: str) -> Table:
    """A table by its name; ValueError with the known names for any other."""
    if table not in tables() + RECORDS:
        raise ValueError(f"unknown chapter or table {table!r}; the measured ones are {', '.join(tables())}")
    chapter = chapter_of(table)
    module = f"{__name__}.{chapter}.{table.removeprefix(chapter).strip('_') or 'measure'}"
    return importlib.import_module(module).TABLE


def tables_of(chapter: str) -> list[Table]:
    """A chapter's tables; ValueError for a name that is none of `CHAPTERS`."""
    if chapter not in CHAPTERS:
        raise ValueError(f"unknown chapter {chapter!r}; allowed: {', '.join(CHAPTERS)}")
    return [load(table) for table in tables(chapter)]


# ------------------------------------------------------------------------------------------------ for notebooks
def read(name: str, **parameters: Any) -> Chapter:
    """A chapter's rows, as far as there are any; `parameters` are those of `report.Chapter`."""
    from cs336_systems.report.chapter import Chapter

    return Chapter(tables_of(name), **{"measure": "no"} | parameters)


def opened(name: str, namespace: Mapping[str, Any]) -> Chapter:
    """The chapter with the parameters that its notebook's globals hold."""
    from cs336_systems.report.chapter import Chapter

    return Chapter.from_parameters(tables_of(name), namespace)


# ------------------------------------------------------------------------------------------------ which cases
def cases_beyond(experiment: Table, preset: str, **given: Any) -> list[Any]:
    """The cases of a table, in its grid and beyond, by `selection.cases_beyond`; filters may be fields of its chapter's
    other tables."""
    return selection.cases_beyond(tables_of(chapter_of(experiment.name)), experiment, preset, **given)
