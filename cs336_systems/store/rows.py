"""Rows remember: the CSV files under `results/<machine>/`, how they are written, merged and read.

One CSV a table and machine. A row is a case, its metrics, a status, and where it comes from:

    status    `ok`, `oom`, `skipped: why`, `error: what` (`store.status`)
    run       one id for the rows that a group was given at one time, and when it began: measured in one process,
              interleaved; ratios stay within a run
    time_utc  when the group ended
    env       digest of the environment (`machine.json` beside the CSV spells it out)
    code      digest of the files that the number depends on (`store.provenance`)

Whatever reads a file refuses one that is damaged, or of a version with other columns (StoreError).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import math
import operator
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems.store import numbers
from cs336_systems.store.files import StoreError, changing, read_json, read_table, replace, visible
from cs336_systems.store.machine import environment, environment_digest
from cs336_systems.store.status import check_status, is_hindered, is_measured
from cs336_systems.store.table import Table

_MACHINE = re.compile(r"(\w[\w.+-]*)?")  # empty: none
TIME, RUN_TIME = "%Y-%m-%dT%H:%M:%SZ", "%Y%m%dT%H%M%S"  # of `time_utc`, and of what `run` begins with
PROVENANCE = ("status", "run", "time_utc", "env", "code")
_BOOLS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}


# -------------------------------------------------------------------------------------------- where rows live
def results_root(start: str | Path | None = None) -> Path:
    """The results folder: `$CS336_RESULTS`, else the nearest parent's `results/` with a `reference.json`."""
    if named := os.environ.get("CS336_RESULTS"):
        return Path(os.path.expanduser(named))
    here = Path(start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "results" / "reference.json").is_file():
            return folder / "results"
    raise FileNotFoundError(
        f"no results/reference.json in {here} or above it: "
        "run inside a checkout, or set CS336_RESULTS to a folder"
    )


def csv_path(table: str, machine: str, root: Path | None = None) -> Path:
    """`<root>/<machine>/<table>.csv`; ValueError for a machine's name that holds more than letters, digits, `._+-`."""
    if not _MACHINE.fullmatch(machine):
        raise ValueError(f"machine {machine!r}: allowed are letters, digits, and . _ + - within")
    return (root or results_root()) / machine / f"{table}.csv"


def file_beside(experiment: Table, case: Any, machine: str, root: Path | None = None) -> Path:
    """The JSON file of a case, a condensed recording: in a folder beside the table's CSV that has its name."""
    name = "_".join(_text(getattr(case, field)) for field in experiment.beside)
    return csv_path(experiment.name, machine, root).with_suffix("") / f"{name}.json"


def recordings_folder(table: str, root: Path | None = None) -> Path:
    """Where whole recordings stay, which are too large for results: `_build/<table>` beside their folder."""
    return (root or results_root()).resolve().parent / "_build" / table


def case_fields(experiment: Table) -> list[str]:
    """The names of the fields of the experiment's `Case`, which are the key of a row."""
    return [field.name for field in dataclasses.fields(experiment.Case)]


def columns(experiment: Table) -> list[str]:
    """The fixed columns of a table's CSV."""
    return [*case_fields(experiment), *experiment.metrics, *PROVENANCE]


# -------------------------------------------------------------------------------------------------- reading
@functools.cache
def _types(case_class: type) -> dict[str, type]:
    return typing.get_type_hints(case_class)


def case_key(experiment: Table, row: Any) -> tuple[Any, ...]:
    """The typed case of a row (a dict of CSV strings, or a Case), as a sortable tuple; ValueError for values that are
    not of their field's type, or that a file cannot give back."""
    types = _types(experiment.Case)
    get = getattr if dataclasses.is_dataclass(row) else operator.getitem
    return tuple(_typed(field, get(row, field), types[field]) for field in case_fields(experiment))


def _typed(field: str, value: Any, kind: type) -> Any:
    if kind is bool and str(value) in _BOOLS:
        return _BOOLS[str(value)]
    if kind is str:
        return _text(value)
    with suppress(ValueError, OverflowError):
        if isinstance(value, str):
            value = numbers.number(value) if kind is float else numbers.whole(value)
        # what a frame's column of numbers holds
        if kind is int and int(value) == value and abs(value) < 2**63:
            return int(value)
        if kind is float and math.isfinite(float(value)):
            return float(_text(float(value)))  # to the digits that the file keeps
    what = {bool: "True or False", int: "a whole number of 64 bits", float: "a finite number"}[kind]
    raise ValueError(f"{field}={value}: expected {what}")


def _text(value: Any) -> str:
    if value is None or value != value or value in (math.inf, -math.inf):
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(str(value))  # what `merge` takes


def load(experiment: Table, path: Path) -> dict[tuple[Any, ...], dict[str, str]]:
    """The rows of a CSV by their cases, as strings; none where there is no file.

    StoreError names the file, and the line and column where there is one, if it is no table, has columns that this
    version does not know or lacks those without which its rows have no place, or has a row that is none or a word in a
    column of numbers. Metrics may be lacking: an earlier version did not measure them.
    """
    header, found = read_table(path)
    known = columns(experiment)
    if unknown := [column for column in header if column not in known]:
        raise StoreError(f"{path} has columns that this version does not know: {', '.join(unknown)}")
    lacking = [c for c in (*case_fields(experiment), *PROVENANCE) if header and c not in header]
    if lacking:
        raise StoreError(
            f"{path} lacks the columns {', '.join(lacking)}: an earlier version of the chapter measured it; "
            "move it away and measure again"
        )
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for line, row in found:
        try:
            key = case_key(experiment, row)
            check_status(row["status"])
            datetime.strptime(row["time_utc"], TIME)  # which `merge` compares
        except ValueError as error:
            raise StoreError(f"{path}, line {line}: {error}") from error
        if key in rows:
            raise StoreError(f"{path}, line {line}: the same case as in an earlier line")
        rows[key] = row
    for metric in experiment.metrics:
        _refuse_words(path, metric, [(line, row[metric]) for line, row in found if row.get(metric)])
    return rows


def _refuse_words(path: Path, metric: str, cells: list[tuple[int, str]]) -> None:
    """No metric says which type it has: where at least half of the cells are numbers (or lists of such), all are."""
    words = [(line, cell) for line, cell in cells if not _is_number(cell)]
    if words and 2 * len(words) <= len(cells):
        line, cell = words[0]
        raise StoreError(f"{path}, line {line}: {metric}={cell}: expected a finite number")


def _is_number(cell: str) -> bool:
    parts = cell.replace(";", " ").split()
    try:  # of a list some may be nan: losses
        [float(part) for part in parts] if len(parts) > 1 else numbers.number(cell)
    except ValueError:
        return False
    return True


def read(experiment: Table, machine: str, root: Path | None = None) -> pd.DataFrame:
    """All rows of a table on a machine: case fields in their types, metrics as numbers where they are."""
    rows = load(experiment, csv_path(experiment.name, machine, root))
    frame = pd.DataFrame(list(rows.values()), columns=columns(experiment))
    types = _types(experiment.Case)
    for place, field in enumerate(case_fields(experiment)):
        dtype = types[field] if types[field] in (int, float, bool) else object
        frame[field] = pd.Series([key[place] for key in rows], dtype=dtype, index=frame.index)
    for metric in experiment.metrics:
        values = pd.to_numeric(frame[metric], errors="coerce")
        if values.notna().sum() == (frame[metric].notna() & (frame[metric] != "")).sum():
            frame[metric] = values.astype(float)
    return frame


def environments(machine: str, root: Path | None = None) -> dict[str, dict[str, Any]]:
    """What `<machine>/machine.json` spells out: digest → environment."""
    path = (root or results_root()) / machine / "machine.json"
    found = read_json(path)
    for digest, spelled_out in found.items():
        if not isinstance(spelled_out, dict):
            raise StoreError(f"{path}: {digest} is {spelled_out!r}; expected an object")
    return found


# -------------------------------------------------------------------------------------------------- writing
def _csv(experiment: Table, rows: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> str:
    header, fields = columns(experiment), len(case_fields(experiment))
    # the case as its key has it: a whole number may have come as 1e7, or as True, which no column of them has
    table = [
        list(map(_text, (*key, *(rows[key].get(column) for column in header[fields:]))))
        for key in sorted(rows)
    ]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *table])
    return out.getvalue()


def write(
    experiment: Table, machine: str, rows: Iterable[Mapping[str, Any]], root: Path | None = None
) -> Path:
    """Takes rows that were just measured into the table's CSV, sorted by case, swapped in whole.

    Each takes the place of the one that is there, whatever that one's time says, except that a case which could not be
    run does not take a measured one's: what this machine lacks, another run of it had. (Such a row stays of earlier
    code, so that `refresh="stale"` measures its group each time.)
    """
    path = csv_path(experiment.name, machine, root)
    with changing(path.parent):
        known = load(experiment, path)
        for row in rows:
            key = case_key(experiment, row)
            check_status(row["status"])
            if key not in known or not _stays(known[key], row):
                known[key] = row
        replace({path: _csv(experiment, known)})
    return path


def write_environment(machine: str, root: Path | None = None) -> None:
    """Spells this environment's digest out in `<machine>/machine.json`."""
    path = (root or results_root()) / machine / "machine.json"
    with changing(path.parent):
        known = environments(machine, root) | {environment_digest(): environment()}
        replace({path: _spelled_out(known)})


def _stays(known: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row keeps its place against another one that says nothing about the case."""
    return is_measured(known["status"]) and is_hindered(row["status"])


def _spelled_out(known: Mapping[str, dict[str, Any]]) -> str:
    return json.dumps(known, indent=1, sort_keys=True) + "\n"


# -------------------------------------------------------------------------------------------------- merging
def merge(
    experiments: Iterable[Table], source: Path, root: Path | None = None
) -> list[tuple[str, str, int, int]]:
    """Takes in the rows of another results folder; returns (machine, table, rows taken in, rows that it has) of each
    CSV.

    The newer row of a case wins, but one that could not be run does not take a measured one's place. What lies beside a
    CSV in a folder of its name (timelines, as JSON, named after their case) comes along with a row that is taken in,
    and where there is none here. Numbers that an earlier version did not measure stay empty. A CSV of which no row is
    taken in stays as it is.

    All is read before anything is written: ValueError, and nothing is taken in, where a file is no table of this
    version or is damaged, here or there.
    """
    root = root or results_root()
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; expected one that holds <machine>/<table>.csv")
    by_name = {experiment.name: experiment for experiment in experiments}
    found, beside = {}, {}
    for path in sorted(source.glob("*/*.csv")):
        if path.stem not in by_name:
            raise ValueError(f"{path} is no table of this version; those are {', '.join(by_name)}")
        found[path] = load(by_name[path.stem], path)
        for file in sorted(path.with_suffix("").glob("*.json")):
            read_json(file)  # refuses a damaged one
            beside.setdefault(path, {})[file.name] = file.read_text(encoding="utf-8")
    if not found:
        raise ValueError(f"{source} holds no <machine>/<table>.csv")
    spelled_out = {path.parent.name: environments(path.parent.name, source) for path in found}
    texts, merged = {}, []
    with ExitStack() as stack:
        for machine, more in sorted(spelled_out.items()):
            stack.enter_context(changing(root / machine))
            if more:
                texts[root / machine / "machine.json"] = _spelled_out(environments(machine, root) | more)
        for path, rows in found.items():
            experiment, target = by_name[path.stem], csv_path(path.stem, path.parent.name, root)
            here = load(experiment, target)
            newer = {key: row for key, row in rows.items() if key not in here or _wins(row, here[key])}
            taken = [key for key, row in newer.items() if row != here.get(key)]
            if taken:
                texts[target] = _csv(experiment, here | newer)
            merged.append((path.parent.name, path.stem, len(taken), len(rows)))
            cases = (experiment.Case(*key) for key in taken)
            theirs = {file_beside(experiment, case, path.parent.name, root) for case in cases}
            for name, text in beside.get(path, {}).items():
                copy = target.with_suffix("") / name
                if copy in theirs or not copy.is_file():
                    texts[copy] = text
        replace(texts)
    return merged


def _wins(row: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether a row of another folder takes the place of the one here."""
    return not _stays(here, row) and (_stays(row, here) or row["time_utc"] >= here["time_utc"])


def groups(experiment: Table, cases: Sequence[Any]) -> list[list[Any]]:
    """The cases put together by the fields that the experiment names in `GROUP`, in their order."""
    out: dict[tuple[Any, ...], list[Any]] = {}
    for case in cases:
        out.setdefault(group_key(experiment, case), []).append(case)
    return list(out.values())


def group_key(experiment: Table, case: Any) -> tuple[Any, ...]:
    """What the cases of a group have in common."""
    return tuple(getattr(case, field) for field in experiment.group)


def seconds_of_groups(
    experiment: Table, machine: str, root: Path | None = None
) -> dict[tuple[Any, ...], float]:
    """`group_key` → how long a group took when its rows were measured: on this machine, else on another one that has
    a GPU if this one has. Files that cannot be read are left out."""
    found: dict[tuple[Any, ...], float] = {}
    on_cpu = lambda name: name.startswith("cpu-")
    paths = sorted((root or results_root()).glob(f"*/{experiment.name}.csv"))
    for path in sorted(paths, key=lambda path: path.parent.name == machine):
        if on_cpu(path.parent.name) != on_cpu(machine):
            continue
        with suppress(ValueError):
            measured = {key: row for key, row in load(experiment, path).items() if is_measured(row["status"])}
            for key, row in measured.items():
                began = datetime.strptime(row["run"].partition("-")[0], RUN_TIME)
                took = datetime.strptime(row["time_utc"], TIME) - began
                found[group_key(experiment, experiment.Case(*key))] = took.total_seconds()
    return found
