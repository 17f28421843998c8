"""Which cases of a table are meant: by presets, filters, and words beyond the grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from cs336_systems.store import numbers, rows
from cs336_systems.store.table import Table

PRESETS = ("full", "smoke")


def fields(tables: Iterable[Table]) -> list[str]:
    """The fields of the cases of a chapter's tables: what its notebook can choose by."""
    return list(dict.fromkeys(field for table in tables for field in rows.case_fields(table)))


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


def values(experiment: Table, preset: str, field: str) -> list[Any]:
    """The values that a field of `Case` takes in a preset's grid, in the grid's order."""
    return list(dict.fromkeys(getattr(case, field) for case in experiment.grid(preset)))


def _words(wanted: Any) -> list[str] | None:
    """The values that are meant, as text; None for all."""
    if isinstance(wanted, str):
        wanted = wanted.split(",")
    words = [str(word).strip() for word in (wanted if isinstance(wanted, Iterable) else [wanted])]
    return None if words == ["all"] else words


def cases(tables: Sequence[Table], experiment: Table, preset: str, **filters: Any) -> list[Any]:
    """The cases of a preset whose fields have the given values; `tables` are those of the experiment's chapter.

    A filter is `"all"`, one value, several separated by commas, or a sequence. It chooses among all tables of the
    chapter: those without the field keep their cases, those without the value have none. ValueError, with what is
    allowed, for a name that is a field of no table and a value that no grid has; and where no table has a case left.
    """
    known = {table.name: table for table in tables}
    left = {table: list(known[table].grid(preset)) for table in known}
    for field, wanted in filters.items():
        having = [table for table in known if field in rows.case_fields(known[table])]
        if not having:
            raise ValueError(f"unknown parameter {field!r}; the cases have {', '.join(fields(tables))}")
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
    return left[experiment.name]


def named(experiment: Table, **given: Any) -> dict[str, list[Any]]:
    """Field → values, each once, of the fields for which others than `"all"` are given.

    ValueError for what the experiment's `CHOICES` do not allow.
    """
    found = {field: words for field, wanted in given.items() if (words := _words(wanted)) is not None}
    return {
        field: list(dict.fromkeys(_chosen(field, word, experiment.choices[field]) for word in words))
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


def cases_beyond(tables: Sequence[Table], experiment: Table, preset: str, **given: Any) -> list[Any]:
    """As `cases`, and beyond the grid what the experiment's `CHOICES` allow.

    Every combination of given values has cases: those of the grid where it has some; else a field that has been given
    no value takes the grid's, and `repeat` is 0.
    """
    if not experiment.choices:
        return cases(tables, experiment, preset, **given)
    chosen = named(experiment, **given)
    grid: dict[tuple[Any, ...], list[Any]] = {}
    for case in experiment.grid(preset):
        grid.setdefault(tuple(getattr(case, field) for field in chosen), []).append(case)
    lists = {field: values(experiment, preset, field) for field in rows.case_fields(experiment)}
    found = []
    for combination in itertools.product(*chosen.values()):
        beyond = lists | {"repeat": [0]} | {f: [value] for f, value in zip(chosen, combination, strict=True)}
        found += grid.get(combination) or itertools.starmap(
            experiment.Case, itertools.product(*beyond.values())
        )
    return found


def of_team(
    experiment: Table, cases: Sequence[Any], team: int | None, log: Callable[[str], None] = print
) -> list[Any]:
    """The cases that a team of so many processes can measure, which torchrun has started; without one, all.

    A group needs as many as the largest `world_size` of its cases; one without that field needs no others. What is
    left out gets no rows, and `log` a line about it.
    """
    groups = rows.groups(experiment, cases)
    if team is None:
        return list(cases)
    here = [g for g in groups if max(getattr(case, "world_size", team) for case in g) == team]
    if len(here) < len(groups):
        log(
            f"{experiment.name}: {len(groups) - len(here)} of {len(groups)} groups are left out: "
            f"they need another number of processes than the {team} that torchrun has started"
        )
    return [case for group in here for case in group]
