"""The measured chapters, each a notebook in `book/` and its tables. A table is a module here, and the CSV of its name
in `results/`. Most chapters have one, of their own name; `TABLES` names those of the others.

`zero_ranks` is no table: it is what `zero` runs on its ranks. What tables share stands in `shared`.

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
`run_group(cases) -> Iterable[dict]`
    Measures the cases of one group in one process, interleaved; one dict of metrics for each, in order. A
    dict may carry `status` (see `store.status`).

A chapter of several processes has a field `world_size` in `Case`, and measures by `launch.start.launch`. That call
starts processes on this machine, or uses those that torchrun has started, when the chapter is run under it:

    torchrun --nproc-per-node 2 -m cs336_systems run allreduce
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from cs336_systems.launch.group import team_size
from cs336_systems.store import rows

CHAPTERS = (
    "hardware", "benchmarking", "mixed_precision", "attention", "torch_compile", "memory", "profiling", "flash_bench",
    "leaderboard", "allreduce", "ddp", "zero",
)  # fmt: skip
TABLES = {
    "leaderboard": (
        "leaderboard", "leaderboard_kernels", "leaderboard_ladder", "leaderboard_counters", "leaderboard_first_calls",
    ),
}  # fmt: skip
RECORDS = ("gpu_tests",)  # rows that are written by other means than a chapter's measurement
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


def resolve_preset(preset: str, machine: str) -> str:
    """`"auto"` becomes `"smoke"` on a machine without a GPU and `"full"` on any other."""
    if preset == "auto":
        return "smoke" if machine.startswith("cpu-") else "full"
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; allowed: auto, {', '.join(PRESETS)}")
    return preset


def values(experiment: ModuleType, preset: str, field: str) -> list[Any]:
    """The values that a field of `Case` takes in a preset's grid, in the grid's order."""
    return list(dict.fromkeys(getattr(case, field) for case in experiment.grid(preset)))


def cases(experiment: ModuleType, preset: str, **filters: Any) -> list[Any]:
    """The cases of a preset whose fields have the given values.

    A filter is `"all"`, one value, several separated by commas, or a sequence. It chooses among all tables of the
    chapter: those without the field keep their cases, those without the value have none. A name that is a field of no
    table, or a value that no grid has, is a ValueError that names what is allowed.
    """
    found = list(experiment.grid(preset))
    for field, wanted in filters.items():
        if field not in fields(experiment):
            raise ValueError(f"unknown parameter {field!r}; the cases have {', '.join(fields(experiment))}")
        having = [table for table in of_chapter(experiment) if field in rows.case_fields(table)]
        allowed = list(dict.fromkeys(v for table in having for v in values(table, preset, field)))
        keep = _parse(field, wanted, allowed, preset)
        if experiment in having:
            found = [case for case in found if getattr(case, field) in keep]
    return found


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


def _parse(field: str, wanted: Any, allowed: Sequence[Any], preset: str) -> list[Any]:
    if isinstance(wanted, str):
        if wanted.strip() == "all":
            return list(allowed)
        wanted = [w.strip() for w in wanted.split(",")]
    elif not isinstance(wanted, Iterable):
        wanted = [wanted]
    by_text = {str(a): a for a in allowed}
    unknown = [w for w in wanted if str(w) not in by_text]
    if unknown:
        raise ValueError(
            f"{field}={', '.join(map(str, unknown))} is not in the {preset} preset; "
            f"allowed: all, {', '.join(by_text)}"
        )
    return [by_text[str(w)] for w in wanted]
