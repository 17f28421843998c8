"""What `cs336 bench` does: cases of an experiment, measured or read where there are rows, as a table or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from tqdm import tqdm

from cs336_systems.cli import terminal
from cs336_systems.store import machine, measuring, rows
from cs336_systems.store.table import Table


def table(
    chapter: str, given: dict[str, str], preset: str, refresh: str, save: bool, json_file: str | None,
    snapshot: Path | None = None, **options: Any,
) -> None:  # fmt: skip
    """Measures what is due of some cases of a table, and shows their rows: a table, or JSON where that is asked for."""
    from cs336_systems import chapters
    from cs336_systems.store import selection

    with terminal.wrong_input():
        name, experiment = machine.machine_name(), chapters.load(chapter)
        cases = chapters.cases_beyond(experiment, selection.resolve_preset(preset, name), **given)
        refresh = selection.choice("refresh", refresh, measuring.REFRESH)
        root = rows.results_root() if save else None
        terminal.check_json(json_file)
        if snapshot is not None:
            if name.startswith("cpu-"):
                raise ValueError(f"--memory-snapshot {snapshot}: it records a CUDA device, and there is none")
            terminal.check_writable("--memory-snapshot", snapshot)
            options["snapshot"] = snapshot
    if experiment.forecast:
        for line in experiment.forecast(cases):
            terminal.say(line)
    if options:  # what is asked for beside the rows needs a run, whatever rows there are
        refresh = "all"
    with terminal.wrong_input():
        frame, failure = measure(experiment, cases, refresh, root, options)
    if not terminal.wrote_json(json_file, as_json(frame)):
        typer.echo(as_table(frame, rows.case_fields(experiment)))
    if failure:
        terminal.fail(failure)


def measure(
    experiment: Table, cases: Sequence[Any], refresh: str, root: Path | None, options: dict[str, Any]
) -> tuple[pd.DataFrame, measuring.MeasurementError | None]:
    """The rows of some cases, measured where they are due, and what went wrong with some of them.

    root: the results folder; None keeps no rows. options: arguments of the experiment's `run_group` beside the cases.
    """
    measured = dataclasses.replace(experiment, run_group=functools.partial(experiment.run_group, **options))
    failure = None
    # what is printed meanwhile, by ranks for one, is progress: stdout is for the rows
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        try:
            measuring.measure(
                measured, cases, refresh=refresh, root=root or Path(scratch), progress=_bar,
                log=functools.partial(tqdm.write, file=sys.stderr),
            )  # fmt: skip
        except measuring.MeasurementError as error:
            failure = error
        frame = rows.read(experiment, machine.machine_name(), root or Path(scratch))
    fields = rows.case_fields(experiment)
    wanted = {rows.case_key(experiment, case) for case in cases}  # as the file keeps them
    return frame[[key in wanted for key in zip(*(frame[f] for f in fields), strict=True)]], failure


def _bar(due: list[Any]) -> Iterable[Any]:
    """A progress bar over the groups to measure, on a terminal only."""
    return tqdm(due, unit="group", disable=None, leave=False)


def as_json(frame: pd.DataFrame) -> str:
    """The rows as a JSON list; what was not measured is null."""
    records = frame.to_dict("records")  # an empty cell is NaN in a column of numbers, "" in one of words
    records = [{k: None if v != v or v == "" else v for k, v in row.items()} for row in records]
    return json.dumps(records, indent=1)


def as_table(frame: pd.DataFrame, fields: list[str]) -> str:
    """The rows for a terminal: fields that are the same in all of them above, then the columns that say something."""
    same = [f for f in fields if len(frame) > 1 and frame[f].nunique() == 1]
    shown = frame.drop(columns=["run", "time_utc", "env", "code", *same])
    shown = shown.drop(columns=[c for c in shown if c.endswith("_each")])  # every step's time: for files
    silent = (shown.isna() | (shown == "")).all()
    empty = [c for c in shown if silent[c] and c not in (*fields, "status")]
    table = shown.drop(columns=empty).to_string(index=False, na_rep="", float_format=lambda x: f"{x:.4g}")
    return "\n".join([", ".join(f"{f}={frame[f].iloc[0]}" for f in same)] * bool(same) + [table])


def tune(given: dict[str, str]) -> str:
    """The rows for `tiles.TABLE` that a search at one shape finds; exit code 1 without a GPU to time on."""
    from cs336_systems import chapters
    from cs336_systems.store import selection

    with terminal.wrong_input():
        shape = {"seq_len": [16384], "heads": [16]} | selection.named(chapters.load("flash_bench"), **given)
        for field in ("dtype", "head_dim", "seq_len", "heads"):
            if len(shape.get(field, ())) != 1:
                raise ValueError(f"--tune needs one --{field.replace('_', '-')}; got {given[field]!r}")
    from cs336_systems.attention.checks.tune import tune as search
    from cs336_systems.store.pool import Pool

    try:
        with terminal.wrong_input(), Pool(os.cpu_count() or 1) as pool:
            given = {field: values[0] for field, values in shape.items() if field != "impl"}
            return search(**given, each=pool.map)
    except RuntimeError as error:
        import torch

        if torch.cuda.is_available():
            raise
        terminal.fail(error)  # nothing to time on
