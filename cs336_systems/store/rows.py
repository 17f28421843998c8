"""Rows remember: the CSV files under `results/<machine>/`, how they are written, merged and read.

One CSV a table and machine. A row is a case, its metrics, a status, and where it comes from:

    status    `ok`, `oom`, `skipped: why`, `error: what`
    run       one id for the rows that a group was given at one time: measured in one process, interleaved; ratios stay
              within a run
    time_utc  when the group ended
    env       digest of the environment (`machine.json` beside the CSV spells it out)
    code      digest of the definitions that the number depends on (`store.code`)
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from cs336_systems.store.machine import environment, environment_digest

PROVENANCE = ("status", "run", "time_utc", "env", "code")


# -------------------------------------------------------------------------------------------- where rows live
def results_root(start: str | Path | None = None) -> Path:
    """The results folder: `$CS336_RESULTS`, else the nearest parent's `results/` with a `reference.json`."""
    if os.environ.get("CS336_RESULTS"):
        return Path(os.environ["CS336_RESULTS"])
    here = Path(start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "results" / "reference.json").is_file():
            return folder / "results"
    raise FileNotFoundError(
        f"no results/reference.json in {here} or above it: "
        "run inside a checkout, or set CS336_RESULTS to a folder"
    )


def csv_path(table: str, machine: str, root: Path | None = None) -> Path:
    """`<root>/<machine>/<table>.csv`."""
    return (root or results_root()) / machine / f"{table}.csv"


def table_name(experiment: ModuleType) -> str:
    """The table that an experiment module measures: the last part of its name."""
    return experiment.__name__.rsplit(".", 1)[-1]


def case_fields(experiment: ModuleType) -> list[str]:
    """The names of the fields of the experiment's `Case`, which are the key of a row."""
    return [field.name for field in dataclasses.fields(experiment.Case)]


def columns(experiment: ModuleType) -> list[str]:
    """The fixed columns of a table's CSV."""
    return [*case_fields(experiment), *experiment.METRICS, *PROVENANCE]


# ---------------------------------------------------------------------------------------- reading and writing
def case_key(experiment: ModuleType, row: Any) -> tuple[Any, ...]:
    """The typed case of a row (a dict of CSV strings, or a Case), as a sortable tuple."""
    types = typing.get_type_hints(experiment.Case)
    out = []
    for field in case_fields(experiment):
        value = getattr(row, field) if dataclasses.is_dataclass(row) else row[field]
        if types[field] is bool:
            out.append(str(value) in ("True", "true", "1"))
        elif types[field] is float:
            out.append(float(_text(float(value))))  # to the digits that the file keeps
        else:
            out.append(types[field](value))
    return tuple(out)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return str(value)


def load(experiment: ModuleType, path: Path) -> list[dict[str, str]]:
    """The rows of a CSV as strings; ValueError if it lacks a column without which its rows have no place."""
    if not path.is_file():
        return []
    rows = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8").to_dict("records")
    lacking = [c for c in (*case_fields(experiment), *PROVENANCE) if rows and c not in rows[0]]
    if lacking:
        raise ValueError(
            f"{path} lacks the columns {', '.join(lacking)}: an earlier version of the chapter measured it; "
            "move it away and measure again"
        )
    return rows


def read(experiment: ModuleType, machine: str, root: Path | None = None) -> pd.DataFrame:
    """All rows of a table on a machine: case fields in their types, metrics as numbers where they are."""
    raw = load(experiment, csv_path(table_name(experiment), machine, root))
    frame = pd.DataFrame(raw, columns=columns(experiment))
    types = typing.get_type_hints(experiment.Case)
    keys = [case_key(experiment, row) for row in raw]
    for place, field in enumerate(case_fields(experiment)):
        dtype = types[field] if types[field] in (int, float, bool) else object
        frame[field] = pd.Series([key[place] for key in keys], dtype=dtype, index=frame.index)
    for metric in experiment.METRICS:
        numbers = pd.to_numeric(frame[metric], errors="coerce")
        if numbers.notna().sum() == (frame[metric].fillna("") != "").sum():
            frame[metric] = numbers.astype(float)
    return frame


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps two processes from rewriting the same file at once, where the system has file locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: one writer at a time is the user's care
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)  # the folder itself is the lock: no file to leave behind
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _replaces(row: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether a row takes the place of another one of its case."""
    kinds = {x["status"].partition(":")[0] for x in (row, known)}
    if kinds in ({"skipped", "ok"}, {"skipped", "oom"}):
        return not row["status"].startswith("skipped")
    return row["time_utc"] >= known["time_utc"]


def write(
    experiment: ModuleType, machine: str, rows: Iterable[dict[str, Any]], root: Path | None = None
) -> Path:
    """Takes rows into the table's CSV: sorted by case, the newest row of each wins, swapped in whole.

    A skipped case does not take the place of a measured one: what this machine lacks, another run of it had. (Such a
    row stays of earlier code, so that `refresh="stale"` measures its group each time.)
    """
    path = csv_path(table_name(experiment), machine, root)
    with _locked(path):
        by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in [*load(experiment, path), *rows]:
            key = case_key(experiment, row)
            if key not in by_key or _replaces(row, by_key[key]):
                by_key[key] = row
        ordered = [by_key[key] for key in sorted(by_key)]
        table = [[_text(row.get(column)) for column in columns(experiment)] for row in ordered]
        frame = pd.DataFrame(table, columns=columns(experiment))
        _replace(path, frame.to_csv(index=False, lineterminator="\n"))
    return path


def write_environment(
    machine: str, root: Path | None = None, environments: dict[str, Any] | None = None
) -> Path:
    """Spells this environment's digest (or the given ones) out in `<machine>/machine.json`."""
    path = (root or results_root()) / machine / "machine.json"
    with _locked(path):
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known |= {environment_digest(): environment()} if environments is None else environments
        _replace(path, json.dumps(known, indent=1, sort_keys=True) + "\n")
    return path


def merge(
    experiments: Iterable[ModuleType], source: Path, root: Path | None = None
) -> list[tuple[str, str, int]]:
    """Takes in the rows of another results folder; returns (machine, table, number of rows) of each CSV.

    What lies beside a CSV in a folder of its name (timelines, as JSON) comes along, unless the rows that are
    here already are newer. Numbers that an earlier version did not measure stay empty. Nothing is taken in, and a
    ValueError names the file, where one has columns that this version does not know, lacks those that say what was
    measured, or is no table.
    """
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; expected one that holds <machine>/<table>.csv")
    by_name = {table_name(experiment): experiment for experiment in experiments}
    found = []
    for path in sorted(source.glob("*/*.csv")):
        if path.stem not in by_name:
            raise ValueError(f"{path} is no table of this version; those are {', '.join(by_name)}")
        experiment = by_name[path.stem]
        header = set(pd.read_csv(path, dtype=str, nrows=0, encoding="utf-8").columns)
        unknown = sorted(header - set(columns(experiment)))
        if unknown:
            raise ValueError(f"{path} has columns that this version does not know: {', '.join(unknown)}")
        found.append((path, experiment, load(experiment, path)))
    if not found:
        raise ValueError(f"{source} holds no <machine>/<table>.csv")
    for path, experiment, rows in found:
        target = csv_path(path.stem, path.parent.name, root)
        newest_here = max((row["time_utc"] for row in load(experiment, target)), default="")
        write(experiment, path.parent.name, rows, root)
        for beside in sorted(path.with_suffix("").glob("*.json")):
            copy = target.with_suffix("") / beside.name
            if not copy.is_file() or max(row["time_utc"] for row in rows) >= newest_here:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _replace(copy, beside.read_text(encoding="utf-8"))
        spelled_out = path.parent / "machine.json"
        if spelled_out.is_file():
            write_environment(path.parent.name, root, json.loads(spelled_out.read_text(encoding="utf-8")))
    return [(path.parent.name, path.stem, len(rows)) for path, _, rows in found]


def groups(experiment: ModuleType, cases: Sequence[Any]) -> list[list[Any]]:
    """The cases put together by the fields that the experiment names in `GROUP`, in their order."""
    out: dict[tuple[Any, ...], list[Any]] = {}
    for case in cases:
        out.setdefault(tuple(getattr(case, field) for field in experiment.GROUP), []).append(case)
    return list(out.values())
