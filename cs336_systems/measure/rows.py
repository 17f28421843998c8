"""Rows remember: the CSV files under `results/<machine>/`, how they are measured, resumed, merged and read.

One CSV a chapter and machine. A row is a case, its metrics, a status, and where it comes from:

    status    `ok`, `oom`, `skipped: why`, `error: what`
    run       one id for the rows that a group was given at one time: measured in one process, interleaved; ratios stay
              within a run
    time_utc  when the group ended
    env       digest of the environment (`machine.json` beside the CSV spells it out)
    code      digest of the definitions that the number depends on (`measure.code`)

A file is replaced whole after every group: a killed run loses one group, and the next goes on from there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from cs336_systems.measure.code import code_digests
from cs336_systems.measure.machine import environment, environment_digest, machine_name

PROVENANCE = ("status", "run", "time_utc", "env", "code")
REFRESH = ("missing", "stale", "all")


class Skip(Exception):
    """Raised while measuring a case that this machine cannot run; the message says what it needs."""


class MeasurementError(RuntimeError):
    """Some cases ended in an error; their rows say which, and the tracebacks have been printed."""


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


def csv_path(chapter: str, machine: str, root: Path | None = None) -> Path:
    """`<root>/<machine>/<chapter>.csv`."""
    return (root or results_root()) / machine / f"{chapter}.csv"


def chapter_name(experiment: ModuleType) -> str:
    """The chapter that an experiment module measures: the last part of its name."""
    return experiment.__name__.rsplit(".", 1)[-1]


def case_fields(experiment: ModuleType) -> list[str]:
    """The names of the fields of the experiment's `Case`, which are the key of a row."""
    return [field.name for field in dataclasses.fields(experiment.Case)]


def columns(experiment: ModuleType) -> list[str]:
    """The fixed columns of a chapter's CSV."""
    return [*case_fields(experiment), *experiment.METRICS, *PROVENANCE]


# ---------------------------------------------------------------------------------------- reading and writing
def _key(experiment: ModuleType, row: Any) -> tuple[Any, ...]:
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


def _load(experiment: ModuleType, path: Path) -> list[dict[str, str]]:
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
    """All rows of a chapter on a machine: case fields in their types, metrics as numbers where they are."""
    raw = _load(experiment, csv_path(chapter_name(experiment), machine, root))
    frame = pd.DataFrame(raw, columns=columns(experiment))
    types = typing.get_type_hints(experiment.Case)
    keys = [_key(experiment, row) for row in raw]
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
    """Takes rows into the chapter's CSV: sorted by case, the newest row of each wins, swapped in whole.

    A skipped case does not take the place of a measured one: what this machine lacks, another run of it had. (Such a
    row stays of earlier code, so that `refresh="stale"` measures its group each time.)
    """
    path = csv_path(chapter_name(experiment), machine, root)
    with _locked(path):
        by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in [*_load(experiment, path), *rows]:
            key = _key(experiment, row)
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
    """Takes in the rows of another results folder; returns (machine, chapter, number of rows) of each CSV.

    What lies beside a CSV in a folder of its chapter's name (timelines, as JSON) comes along, unless the rows that are
    here already are newer. Numbers that an earlier version did not measure stay empty. Nothing is taken in, and a
    ValueError names the file, where one has columns that this version does not know, lacks those that say what was
    measured, or belongs to no chapter.
    """
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; expected one that holds <machine>/<chapter>.csv")
    by_name = {chapter_name(experiment): experiment for experiment in experiments}
    found = []
    for path in sorted(source.glob("*/*.csv")):
        if path.stem not in by_name:
            raise ValueError(f"{path} belongs to no chapter of this version; those are {', '.join(by_name)}")
        experiment = by_name[path.stem]
        header = set(pd.read_csv(path, dtype=str, nrows=0, encoding="utf-8").columns)
        unknown = sorted(header - set(columns(experiment)))
        if unknown:
            raise ValueError(f"{path} has columns that this version does not know: {', '.join(unknown)}")
        found.append((path, experiment, _load(experiment, path)))
    if not found:
        raise ValueError(f"{source} holds no <machine>/<chapter>.csv")
    for path, experiment, rows in found:
        target = csv_path(path.stem, path.parent.name, root)
        newest_here = max((row["time_utc"] for row in _load(experiment, target)), default="")
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


# -------------------------------------------------------------------------------------------------- measuring
def _out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the CPU; torch is not imported for it."""
    # cuBLAS, the CUDA runtime and the CPU allocator raise RuntimeErrors with only the text to tell them by
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _context_lost(error: Exception) -> bool:
    """Whether the CUDA context died with this exception: every later call in this process fails as well."""
    if type(error).__name__ in ("LaunchError", "ChildError"):  # that of other processes, which have ended
        return False
    words = ("illegal memory access", "misaligned address", "illegal instruction", "device-side assert")
    fatal = type(error).__name__ == "AcceleratorError" or any(word in str(error) for word in words)
    return fatal and not _out_of_memory(error)


@contextmanager
def oom_is_a_row(metrics: dict[str, Any]) -> Iterator[None]:
    """Turns running out of memory, or a `Skip`, into a status of the metrics, and goes on."""
    try:
        yield
    except Skip as skip:
        metrics["status"] = f"skipped: {skip}"
    except Exception as error:
        if not _out_of_memory(error):
            raise
        metrics["status"] = "oom"


@contextmanager
def failure_is_a_row(metrics: dict[str, Any]) -> Iterator[None]:
    """As `oom_is_a_row`, and an error (its traceback printed) becomes the status of one case, so that the others of its
    group are measured. A lost CUDA context comes through: nothing more can be measured in this process.
    """
    try:
        with oom_is_a_row(metrics):
            yield
    except Exception as error:
        if _context_lost(error):
            raise
        traceback.print_exc(file=sys.stderr)
        metrics["status"] = _error_status(error)


def _error_status(error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"error: {type(error).__name__}: {first_line}"[:300]


def groups(experiment: ModuleType, cases: Sequence[Any]) -> list[list[Any]]:
    """The cases put together by the fields that the experiment names in `GROUP`, in their order."""
    out: dict[tuple[Any, ...], list[Any]] = {}
    for case in cases:
        out.setdefault(tuple(getattr(case, field) for field in experiment.GROUP), []).append(case)
    return list(out.values())


def _failed_before(experiment: ModuleType, group: list[Any], known: dict[tuple, dict]) -> bool:
    rows = [known.get(_key(experiment, case)) for case in group]
    return any(row is not None and row["status"].startswith("error") for row in rows)


def _due(
    experiment: ModuleType,
    group: list[Any],
    known: dict[tuple, dict],
    refresh: str,
    code: Callable[[Any], str],
) -> bool:
    for case in group:
        row = known.get(_key(experiment, case))
        if refresh == "all" or row is None or row["status"].startswith("error"):
            return True
        elsewhere = row["env"] != environment_digest()
        # what was skipped may have become possible: a GPU, triton, a compiler
        if elsewhere and (row["status"].startswith("skipped") or refresh == "stale"):
            return True
        if refresh == "stale" and row["code"] != code(case):
            return True
    return False


def measure(
    experiment: ModuleType,
    cases: Sequence[Any],
    *,
    refresh: str = "missing",
    root: Path | None = None,
    log: Callable[[str], None] | None = None,
    progress: Callable[[list[list[Any]]], Iterable[list[Any]]] = iter,
) -> int:
    """Measures the groups that are due on this machine and keeps their rows; returns how many there were.

    `refresh`: `"missing"` measures what has no row yet (or ended in an error), `"stale"` also what was
    measured with earlier code or another environment, `"all"` everything. A case that fails becomes an
    `error` row with its traceback printed, the other groups still run, and at the end `MeasurementError`
    names them. Where the CUDA context is lost, the run ends after that group's rows are written. An interrupt
    loses one group. `log` takes each line of progress (`print`, flushed, by default); `progress` goes through the
    groups that are due, one after the other, and may draw a bar meanwhile.
    """
    log = log or functools.partial(print, flush=True)  # a run that is cut off shall have told how far it came
    if refresh not in REFRESH:
        raise ValueError(f"unknown refresh {refresh!r}; allowed: {', '.join(REFRESH)}")
    machine, chapter, code = machine_name(), chapter_name(experiment), code_digests(experiment)
    path = csv_path(chapter, machine, root)
    known = {_key(experiment, row): row for row in _load(experiment, path)}
    due = [g for g in groups(experiment, cases) if _due(experiment, g, known, refresh, code)]
    # what failed before comes last, so that it cannot keep the others from being measured
    due.sort(key=lambda group: _failed_before(experiment, group, known))
    total = len(groups(experiment, cases))
    if not due:
        log(f"{chapter} on {machine}: all {total} groups are measured")
        return 0
    codes = {case: code(case) for group in due for case in group}  # of the sources as they are now
    write_environment(machine, root)
    log(f"{chapter} on {machine}: {len(due)} of {total} groups to measure{_estimate(experiment, due)}")
    failed, begin = [], time.monotonic()
    for number, group in enumerate(progress(due), 1):
        start = time.monotonic()
        run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        results, context_lost = _run(experiment, group)
        stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        provenance = {"run": run, "time_utc": stamp, "env": environment_digest()}
        rows = [
            dataclasses.asdict(case) | {"status": "ok"} | metrics | provenance | {"code": codes[case]}
            for case, metrics in zip(group, results, strict=True)
        ]
        write(experiment, machine, rows, root)
        failed += [row for row in rows if str(row["status"]).startswith("error")]
        left = (time.monotonic() - begin) / number * (len(due) - number)
        what = ", ".join(f"{f}={getattr(group[0], f)}" for f in experiment.GROUP)
        tally = " ".join(sorted({str(row["status"]).split(":")[0] for row in rows}))
        took = f"{tally} in {time.monotonic() - start:.1f} s, about {left:.0f} s left"
        log(f"  [{number}/{len(due)}] {what}: {took}")
        if context_lost:
            raise MeasurementError(
                f"{chapter} lost its CUDA context at {what}; run again, in a fresh process, to go on"
            )
    if failed:
        raise MeasurementError(
            f"{len(failed)} cases of {chapter} ended in an error (their rows say so): {failed[0]['status']}"
        )
    return len(due)


def _estimate(experiment: ModuleType, due: list[list[Any]]) -> str:
    estimate = getattr(experiment, "estimate_s", None)
    return f", about {sum(estimate(group) for group in due):.0f} s" if estimate else ""


def _run(experiment: ModuleType, group: list[Any]) -> tuple[list[dict[str, Any]], bool]:
    """The metrics of a group's cases, and whether the CUDA context was lost.

    What was yielded before an exception stands, the cases after it are errors. The exception itself is not
    kept: its frames hold tensors, whose memory the next group needs.
    """
    results: list[dict[str, Any]] = []
    context_lost = False
    try:
        for metrics in experiment.run_group(group):
            results.append(metrics)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        results += [{"status": _error_status(error)} for _ in group[len(results) :]]
        context_lost = _context_lost(error)
    assert len(results) == len(group), f"run_group gave {len(results)} results for {len(group)} cases"
    for metrics in results:
        unknown = set(metrics) - {*experiment.METRICS, "status"}
        assert not unknown, f"run_group gave {', '.join(sorted(unknown))}, which METRICS does not name"
    return results, context_lost
