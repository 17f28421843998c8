"""The measured chapters. A module here has the name of its notebook in `book/` and its CSV in `results/`.

`steps` is no chapter: it is what the chapters about whole models share. Neither are `attention_peers`,
`leaderboard_candidate` and `zero_ranks`: parts of chapters.

What an experiment module offers (none of it needs torch before `run_group` is called):

`Case`
    A frozen dataclass of plain values (str, int, float, bool): one row of the chapter's CSV.
`METRICS`
    The columns that a measurement adds, units in their names (`forward_ms_p50`, `peak_gib`, `tflops`).
`GROUP`
    The fields of `Case` that are equal within a group: what is measured, resumed and refreshed together.
`PER_CASE` (optional)
    Modules of which the numbers of a case depend only on what `also_measures` names; on everything else that
    `run_group` reaches they all do: changing it makes rows "measured with earlier code" (`measure.code`).
`also_measures(case) -> tuple[str, ...]` (optional)
    What the numbers of a case depend on beside that: `"module"`, `"package.*"` or `"module:definition"`.
`grid(preset) -> list[Case]`
    Every case of `"full"` (the handout's grid) or `"smoke"` (two CPU cores, at most 20 s).
`run_group(cases) -> Iterable[dict]`
    Measures the cases of one group in one process, interleaved; one dict of metrics for each, in order. A
    dict may carry `status` (see `measure.rows`).

A chapter of several processes has a field `world_size` in `Case`, and measures by `parallel.launch.launch`. That call
starts processes on this machine, or uses those that torchrun has started, when the chapter is run under it:

    torchrun --nproc-per-node 2 -m cs336_systems run allreduce
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from cs336_systems.measure import rows
from cs336_systems.parallel import team_size

CHAPTERS = (
    "hardware", "benchmarking", "mixed_precision", "attention", "torch_compile", "memory", "profiling", "flash_bench",
    "leaderboard", "allreduce", "ddp", "zero",
)  # fmt: skip
RECORDS = ("gpu_tests",)  # rows that are written by other means than a chapter's measurement
PRESETS = ("full", "smoke")


def load(chapter: str) -> ModuleType:
    """The experiment module of a chapter; ValueError with the known names for any other."""
    if chapter not in CHAPTERS + RECORDS:
        raise ValueError(f"unknown chapter {chapter!r}; the measured chapters are {', '.join(CHAPTERS)}")
    return importlib.import_module(f"{__name__}.{chapter}")


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

    A filter is `"all"`, one value, several separated by commas, or a sequence. A name that is no field, or a
    value that the preset's grid does not have, is a ValueError that names what is allowed.
    """
    fields = [f.name for f in dataclasses.fields(experiment.Case)]
    found = list(experiment.grid(preset))
    for field, wanted in filters.items():
        if field not in fields:
            raise ValueError(f"unknown parameter {field!r}; the cases have {', '.join(fields)}")
        allowed = values(experiment, preset, field)
        keep = _parse(field, wanted, allowed, preset)
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
            f"{rows.chapter_name(experiment)}: {len(groups) - len(here)} of {len(groups)} groups are left out: "
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
