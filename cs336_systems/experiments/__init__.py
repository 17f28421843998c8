"""The measured chapters, each a notebook in `book/` and its tables. A table is a module here, and the CSV of its name
in `results/`. Most chapters have one, of their own name; `TABLES` names those of the others.

`_zero_ranks` is no table: it is what `zero` runs on its ranks. What tables share stands in `shared`. So a module
without an underscore is a chapter, if `TABLES` and `RECORDS` do not say otherwise.

What an experiment module offers (none of it needs torch before `run_group` is called):

`Case`
    A frozen dataclass of plain values (str, int, float, bool): one row of the table's CSV.
`METRICS`
    The columns that a measurement adds, units in their names (`forward_ms_p50`, `peak_gib`, `tflops`).
`GROUP`
    The fields of `Case` that are equal within a group: what is measured, resumed and refreshed together.
`PER_CASE` (optional)
    Modules of which the numbers of a case depend only on what `also_measures` names; on everything else that
    `run_group` reaches they all do: changing it makes rows "measured with earlier code" (`store.code`).
`also_measures(case) -> tuple[str, ...]` (optional)
    What the numbers of a case depend on beside that: `"module"`, `"package.*"` or `"module:definition"`.
`grid(preset) -> list[Case]`
    Every case of `"full"` (the handout's grid) or `"smoke"` (two CPU cores, at most 20 s).
`CHOICES` (optional)
    Field → what may be asked for, in the grid or not: words, a range, or a function that makes the value of a text
    (ValueError where it is none). Those of all fields make cases beyond the grid (`cases_beyond`).
`run_group(cases) -> Iterable[dict]`
    Measures the cases of one group in one process, interleaved; one dict of metrics for each, in order. A
    dict may carry `status` (see `store.status`).

A chapter of several processes has a field `world_size` in `Case`, and measures by `launch.start.launch`. That call
starts processes on this machine, or uses those that torchrun has started, when the chapter is run under it:

    torchrun --nproc-per-node 2 -m cs336_systems run allreduce
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from cs336_systems.launch.group import team_size
from cs336_systems.store import numbers, rows
from cs336_systems.store.files import naming

TABLES = {
    "leaderboard": (
        "leaderboard", "leaderboard_kernels", "leaderboard_shapes", "leaderboard_ladder", "leaderboard_counters",
        "leaderboard_first_calls",
    ),
    "training": ("training", "training_ladder", "training_run", "training_fits", "training_sweep"),
}  # fmt: skip
RECORDS = ("gpu_tests",)  # rows that are written by other means than a chapter's measurement
_MODULES = [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg and not m.name.startswith("_")]
_OF_OTHERS = {table for chapter, tables in TABLES.items() for table in tables if table != chapter}
CHAPTERS = tuple(name for name in _MODULES if name not in _OF_OTHERS | set(RECORDS))
PRESETS = ("full", "smoke")


def tables(*chapters: str) -> tuple[str, ...]:
    """The tables of some chapters (of all, where none is named), the one of the chapter's name first."""
    return tuple(table for chapter in chapters or CHAPTERS for table in TABLES.get(chapter, (chapter,)))


def chapter_of(table: str) -> str:
    """The chapter that a table belongs to."""
    return next((chapter for chapter, names in TABLES.items() if table in names), table)


def load(table: str) -> ModuleType:
    """The experiment module of a table; ValueError with the known names for any other."""
    if table not in tables() + RECORDS:
        raise ValueError(f"unknown chapter or table {table!r}; the measured ones are {', '.join(tables())}")
    return importlib.import_module(f"{__name__}.{table}")


def of_chapter(experiment: ModuleType) -> list[ModuleType]:
    """The tables of an experiment's chapter, itself among them."""
    name = rows.table_name(experiment)
    return [experiment if table == name else load(table) for table in tables(chapter_of(name))]


def fields(experiment: ModuleType) -> list[str]:
    """The fields of the cases of an experiment's chapter: what its notebook can choose by."""
    return list(dict.fromkeys(f for table in of_chapter(experiment) for f in rows.case_fields(table)))


# ---------------------------------------------------------------------------------------------- which cases
def choice(what: str, value: Any, allowed: Sequence[str]) -> str:
    """The word among the allowed ones, however it is capitalized; ValueError with those for any other value."""
    word = str(value).strip().lower()
    if word not in allowed:
        raise ValueError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")
    return word


def resolve_preset(preset: str, machine: str) -> str:
    """`"auto"` becomes `"smoke"` on a machine without a GPU and `"full"` on any other."""
    preset = choice("preset", preset, ("auto", *PRESETS))
    if preset == "auto":
        return "smoke" if machine.startswith("cpu-") else "full"
    return preset


def values(experiment: ModuleType, preset: str, field: str) -> list[Any]:
    """The values that a field of `Case` takes in a preset's grid, in the grid's order."""
    return list(dict.fromkeys(getattr(case, field) for case in experiment.grid(preset)))


def _words(wanted: Any) -> list[str] | None:
    """The values that are meant, as text; None for all."""
    if isinstance(wanted, str):
        wanted = wanted.split(",")
    words = [str(word).strip() for word in (wanted if isinstance(wanted, Iterable) else [wanted])]
    return None if words == ["all"] else words


def cases(experiment: ModuleType, preset: str, **filters: Any) -> list[Any]:
    """The cases of a preset whose fields have the given values.

    A filter is `"all"`, one value, several separated by commas, or a sequence. It chooses among all tables of the
    chapter: those without the field keep their cases, those without the value have none. ValueError, with what is
    allowed, for a name that is a field of no table and a value that no grid has; and where no table has a case left.
    """
    known = {rows.table_name(table): table for table in of_chapter(experiment)}
    left = {table: list(known[table].grid(preset)) for table in known}
    for field, wanted in filters.items():
        having = [table for table in known if field in rows.case_fields(known[table])]
        if not having:
            raise ValueError(f"unknown parameter {field!r}; the cases have {', '.join(fields(experiment))}")
        if (words := _words(wanted)) is None:
            continue
        allowed = dict.fromkeys(str(v) for table in having for v in values(known[table], preset, field))
        if unknown := [word for word in words if word not in allowed]:
            raise ValueError(
                f"{field}={', '.join(unknown)} is not in the {preset} preset; allowed: all, {', '.join(allowed)}"
            )
        for table in having:
            left[table] = [case for case in left[table] if str(getattr(case, field)) in words]
    if filters and not any(left.values()):
        chosen = [f"{field}={wanted}" for field, wanted in filters.items() if _words(wanted) is not None]
        raise ValueError(f"the {preset} preset has no case with {', '.join(chosen)}")
    return left[rows.table_name(experiment)]


def named(experiment: ModuleType, **given: Any) -> dict[str, list[Any]]:
    """Field → values, each once, of the fields for which others than `"all"` are given.

    ValueError for what the experiment's `CHOICES` do not allow.
    """
    found = {field: words for field, wanted in given.items() if (words := _words(wanted)) is not None}
    return {
        field: list(dict.fromkeys(_chosen(field, word, experiment.CHOICES[field]) for word in words))
        for field, words in found.items()
    }


def _chosen(field: str, word: str, allowed: Any) -> Any:
    if callable(allowed):
        return allowed(word)
    if not isinstance(allowed, range):
        if word not in allowed:
            raise ValueError(f"unknown {field} {word!r}; allowed: {', '.join(allowed)}")
        return word
    with suppress(ValueError):
        if (number := numbers.whole(word)) in allowed:
            return number
    raise ValueError(f"{field}={word}; allowed: all, whole numbers from {allowed[0]} to {allowed[-1]}")


def cases_beyond(experiment: ModuleType, preset: str, **given: Any) -> list[Any]:
    """As `cases`, and beyond the grid what the experiment's `CHOICES` allow.

    That is the product of the values of all fields, where one is not in the grid, or where every field has been given
    values. A field that has not takes the grid's values there, and `repeat` is 0.
    """
    if not hasattr(experiment, "CHOICES"):
        return cases(experiment, preset, **given)
    lists = {field: values(experiment, preset, field) for field in rows.case_fields(experiment)}
    chosen = named(experiment, **given)
    in_grid = all(set(chosen[field]) <= set(lists[field]) for field in chosen)
    if in_grid and len(chosen) < len(lists):
        return cases(experiment, preset, **given | chosen)
    lists |= {"repeat": [0]} | chosen
    return [experiment.Case(*combination) for combination in itertools.product(*lists.values())]


def check_environment() -> None:
    """ValueError for what a variable of the environment cannot be: on any machine, before it is first read.
    FileNotFoundError without a current folder."""
    hopper = os.environ.get("CS336_HOPPER", "1")
    if hopper not in ("0", "1"):
        raise ValueError(f"CS336_HOPPER={hopper!r}; allowed: 0, 1")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current folder has been removed; change to another one") from None
    nodes = os.environ.get("CS336_NODES") or "1"
    if not re.fullmatch("[1-9][0-9]{0,5}", nodes):
        raise ValueError(f"CS336_NODES={nodes!r}; allowed: a whole number from 1")
    results = rows.results_root() if os.environ.get("CS336_RESULTS") else Path(".")
    with naming("read CS336_RESULTS,", results):
        there = next((path for path in (results, *results.parents) if path.exists()), results)
        if not there.is_dir():
            raise ValueError(f"CS336_RESULTS={results}: {there} is not a folder")


def of_this_team(
    experiment: ModuleType, cases: Sequence[Any], log: Callable[[str], None] = print
) -> list[Any]:
    """The cases that can be measured here: all, or under torchrun those for as many processes as it has started.

    A group needs as many as the largest `world_size` of its cases; one without that field needs no others. What is
    left out gets no rows, and `log` a line about it.
    """
    team, groups = team_size(), rows.groups(experiment, cases)
    if team is None:
        return list(cases)
    here = [g for g in groups if max(getattr(case, "world_size", team) for case in g) == team]
    if len(here) < len(groups):
        log(
            f"{rows.table_name(experiment)}: {len(groups) - len(here)} of {len(groups)} groups are left out: "
            f"they need another number of processes than the {team} that torchrun has started"
        )
    return [case for group in here for case in group]
