"""One command line for everything: `cs336`, or `python -m cs336_systems`.

    cs336 doctor                       what this machine can run, and why not the rest
    cs336 run                          measure every chapter here: its notebook, by papermill
    cs336 run hardware -p dtype=bf16   one chapter, some of its cases
    cs336 bench flash --seq-len 4096 --head-dim 64 128 --json -
    cs336 bench model --size small medium --mode forward train_step --dtype fp32 bf16
    cs336 book --pdf                   build the book from the rows
    cs336 results merge DIR            take in the rows of another machine
    torchrun --nproc-per-node 2 -m cs336_systems run allreduce         on processes that torchrun starts

Exit codes: 0, 1 where something failed while running, 2 where the command line is wrong, 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.core
from tqdm import tqdm

if typing.TYPE_CHECKING:
    import pandas as pd


class Interruptible(typer.core.TyperGroup):
    """Commands that Ctrl-C ends with one line and exit code 130."""

    def invoke(self, ctx: typer.Context) -> Any:
        _open_closed_streams()
        before = signal.getsignal(signal.SIGINT)
        try:
            if before is signal.default_int_handler:  # a shell's background jobs ignore it
                signal.signal(signal.SIGINT, _interrupt)
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from cs336_systems.launch.team import rank_here

            if not rank_here():  # of torchrun's ranks the first speaks for all
                _say("Interrupted")
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: types.FrameType | None) -> typing.NoReturn:
    logging.disable()  # what libraries tell of the sockets and tasks that they leave behind
    raise KeyboardInterrupt


def _open_closed_streams() -> None:
    """Where stdout or stderr is closed, /dev/null takes its place: processes that are started here need both."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w"))  # noqa: SIM115


app = typer.Typer(
    cls=Interruptible, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        from cs336_systems import __version__

        typer.echo(f"cs336_systems {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Measure, benchmark and build the book of CS336's systems assignment."""


bench = typer.Typer(no_args_is_help=True, help="A chapter's experiment alone: a table, or JSON.")
results = typer.Typer(no_args_is_help=True, help="The rows under results/.")
app.add_typer(bench, name="bench")
app.add_typer(results, name="results")

_say = functools.partial(typer.echo, err=True)  # progress goes to stderr: stdout is for what was asked for


@contextmanager
def _wrong_input() -> Iterator[None]:
    """Shows what is wrong with the command line, or with where it was called, and ends with exit code 2."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        _say(f"Error: {error}")
        raise typer.Exit(2) from error


@contextmanager
def _team() -> Iterator[bool]:
    """Whether this process does the command: alone, or as the first of those that torchrun started.

    The others take part in what that one measures; for them this returns when it has ended.
    """
    from cs336_systems.launch import team

    rank = team.rank_here()
    if rank is None:
        yield True
    elif rank == 0:
        with team.leading():
            yield True
    else:
        team.follow()
        yield False


def _fail(message: object) -> typing.NoReturn:
    _say(f"Error: {message}")
    raise typer.Exit(1)


# -------------------------------------------------------------------------------- doctor
@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what this machine can run, and why the rest is unavailable."""
    from cs336_systems import doctor as room

    checks, name = room.checks(), room.machine_name()
    if as_json:
        typer.echo(json.dumps({"machine": name, "checks": [dataclasses.asdict(c) for c in checks]}, indent=1))
        return
    typer.echo(f"machine: {name or 'unknown'}")
    for section, group in itertools.groupby(checks, key=lambda check: check.section):
        typer.echo(f"\n{section}")
        for check in group:
            typer.echo(f"  {'yes' if check.available else 'no ':3}  {check.name:24} {check.detail}")


# -------------------------------------------------------------------------------- chapters and the book
@app.command()
def run(
    chapters: Annotated[
        list[str] | None, typer.Argument(help="Chapters; all measured ones by default.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="auto, full (the handout's grid) or smoke.")] = None,
    machine: Annotated[
        str | None, typer.Option(help="Whose rows to show; only this machine measures.")
    ] = None,
    refresh: Annotated[str | None, typer.Option(help="What to measure: missing, stale or all.")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="name=value, a parameter of the notebook; repeatable."),
    ] = None,
) -> None:
    """Run chapters' notebooks here: they measure what is missing, and show it. A second run resumes.

    Under torchrun, rank 0 runs them, and the chapters that need several processes use all ranks.
    """
    from cs336_systems import experiments, notebooks
    from cs336_systems.report.coverage import project_root
    from cs336_systems.store.measuring import REFRESH

    with _wrong_input():
        names = chapters or list(experiments.CHAPTERS)
        for name in names:
            if name not in experiments.CHAPTERS:
                raise ValueError(f"unknown chapter {name!r}; allowed: {', '.join(experiments.CHAPTERS)}")
        if preset is not None:
            experiments.resolve_preset(preset, "")
        if refresh is not None and refresh not in REFRESH:
            raise ValueError(f"unknown refresh {refresh!r}; allowed: {', '.join(REFRESH)}")
        given = {"preset": preset, "machine": machine, "refresh": refresh}
        given = {name: value for name, value in given.items() if value is not None} | _pairs(param or [])
        with _team() as leads:
            failed = notebooks.run(project_root(), names, given, log=_say) if leads else []
    if failed:
        _fail(f"{len(failed)} of {len(names)} chapters failed: {', '.join(failed)}")


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"-p {text}: expected name=value")
        pairs[name.strip()] = value.strip()
    return pairs


@app.command()
def book(
    pdf: Annotated[bool, typer.Option("--pdf", help="Build the PDF as well (needs XeLaTeX).")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where rows are missing or old.")] = False,
    claims: Annotated[
        bool,
        typer.Option("--claims", help="Build nothing: hold the sentences against the rows, list what fails."),
    ] = False,
) -> None:
    """Build the book from the rows, and print where it is."""
    from cs336_systems.report.build import BookError, build

    if claims:
        return _claims()
    try:
        with _wrong_input():
            products = build(pdf=pdf, strict=strict)
    except BookError as error:
        _fail(error)
    for product in products:
        typer.echo(product)


def _claims() -> None:
    from cs336_systems.report.claims import check
    from cs336_systems.report.coverage import project_root

    with _wrong_input():
        wrong, narrow = check(project_root())
    for line in narrow:
        typer.echo(f"narrow: {line}")
    for line in wrong:
        typer.echo(line)
    if wrong:
        _fail(f"{len(wrong)} sentences or answers to mend")
    typer.echo("every sentence is borne out by the rows, and every part has its answer")


@results.command("merge")
def merge(
    folder: Annotated[Path, typer.Argument(help="A results folder: <machine>/<table>.csv.")],
) -> None:
    """Take in the rows of another results folder; the newest row of a case wins."""
    from cs336_systems import experiments
    from cs336_systems.store import rows

    with _wrong_input():
        merged = rows.merge(
            [experiments.load(name) for name in experiments.tables() + experiments.RECORDS], folder
        )
    for machine, table, count in merged:
        typer.echo(f"{machine}: {count} rows of {table}")


# -------------------------------------------------------------------------------- benchmarks
class Lists(typer.core.TyperCommand):
    """A command whose options take several values with blanks between them too: `--size small medium`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        takes = {name for p in self.params for name in p.opts if not getattr(p, "is_flag", False)}
        joined: list[str] = []
        value_of = ""  # the option whose value the next word is, or adds to
        for arg in args:
            if arg.startswith("-") and arg != "-":
                value_of = arg if arg in takes else ""
                joined.append(arg)
            elif value_of and joined[-1] != value_of:
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


Values = Annotated[str, typer.Option(help="One value, several (separated by blanks or commas), or all.")]
Preset = Annotated[str, typer.Option(help="auto, full (the handout's grid) or smoke.")]
Refresh = Annotated[str, typer.Option(help="What to measure: missing, stale or all.")]
Save = Annotated[bool, typer.Option(help="Keep the rows under results/.")]
Json = Annotated[str | None, typer.Option("--json", help="Write the rows as JSON to this file; - is stdout.")]


@bench.command("hardware", cls=Lists)
def bench_hardware(
    kind: Values = "all", dtype: Values = "all", size: Values = "all", preset: Preset = "auto",
    refresh: Refresh = "missing", save: Save = True, json_file: Json = None,
) -> None:  # fmt: skip
    """The roofs: matrix products, copies, launches."""
    given = {"kind": kind, "dtype": dtype, "size": size}
    _bench("hardware", given, preset, refresh, save, json_file, off_grid=False)


@bench.command("flash", cls=Lists)
def bench_flash(
    seq_len: Values = "all", head_dim: Values = "all", dtype: Values = "all", impl: Values = "all",
    heads: Values = "all", preset: Preset = "auto", refresh: Refresh = "missing", save: Save = True,
    json_file: Json = None,
    tune: Annotated[bool, typer.Option("--tune", help="Search tile sizes for one shape instead.")] = False,
) -> None:  # fmt: skip
    """Attention: forward, backward, both; every implementation. Shapes off the handout's grid work too."""
    given = {"seq_len": seq_len, "head_dim": head_dim, "dtype": dtype, "impl": impl, "heads": heads}
    if tune:
        typer.echo(_tune(given))
    else:
        _bench("flash_bench", given, preset, refresh, save, json_file, off_grid=True)


@bench.command("model", cls=Lists)
def bench_model(
    size: Values = "small", context_length: Values = "512", mode: Values = "all", dtype: Values = "fp32",
    attention: Values = "reference", batch: Values = "4", warmup: Values = "5", steps: Values = "10",
    compiled: Annotated[bool, typer.Option("--compile", help="With torch.compile.")] = False,
    compile_mode: Annotated[
        str | None, typer.Option(help="off, default, reduce-overhead (CUDA graphs), max-autotune; one or several.")
    ] = None,
    model: Annotated[str, typer.Option(help="Another class of the same constructor, module:Class.")] = "own",
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Ranges for Nsight Systems.")] = False,
    memory_snapshot: Annotated[
        Path | None, typer.Option(help="Record the allocator's history of two more steps into this file.")
    ] = None,
    refresh: Refresh = "missing", save: Save = True, json_file: Json = None,
) -> None:  # fmt: skip
    """Steps of a whole model: the product of the lists, each case predicted, measured and kept as a row."""
    from cs336_systems.experiments import benchmarking
    from cs336_systems.sizes import HANDOUT_SIZES

    given = {
        "size": size, "context_length": context_length, "mode": mode, "dtype": dtype, "attention": attention,
        "compile": compile_mode or ("default" if compiled else "off"), "batch": batch, "warmup": warmup,
        "steps": steps, "model": model, "repeat": "0",
    }  # fmt: skip
    for field, known in (benchmarking.CHOICES | {"size": HANDOUT_SIZES}).items():
        given[field] = ",".join(known) if given[field].strip() == "all" else given[field]
    options = {"nvtx": nvtx, "snapshot": memory_snapshot}
    if any(options.values()):  # what is asked for beside the rows needs a run, whatever rows there are
        refresh = "all"
    _bench("benchmarking", given, "full", refresh, save, json_file, off_grid=True, options=options)


def _tune(given: dict[str, str]) -> str:
    with _wrong_input():
        if "," in given["dtype"] or given["dtype"] == "all":
            raise ValueError("--tune needs one --dtype")
        defaults = {"seq_len": "16384", "heads": "16"}
        sizes = {}
        for field in ("head_dim", "seq_len", "heads"):
            text = defaults.get(field, given[field]) if given[field] == "all" else given[field]
            if not text.isdecimal():
                raise ValueError(
                    f"--tune needs one --{field.replace('_', '-')}, a whole number; got {text!r}"
                )
            sizes[field] = int(text)
    from cs336_systems.attention.triton_kernels.tune import tune

    try:
        with _wrong_input():
            return tune(**sizes, dtype=given["dtype"])
    except RuntimeError as error:
        import torch

        if torch.cuda.is_available():
            raise
        _fail(error)  # nothing to time on


def _bench(
    chapter: str,
    given: dict[str, str],
    preset: str,
    refresh: str,
    save: bool,
    json_file: str | None,
    off_grid: bool,
    options: dict[str, Any] | None = None,
) -> None:
    from cs336_systems import experiments
    from cs336_systems.store import measuring, rows
    from cs336_systems.store.machine import machine_name

    machine = machine_name()
    with _wrong_input():
        experiment = experiments.load(chapter)
        cases = choose(experiment, experiments.resolve_preset(preset, machine), given, off_grid)
        if refresh not in measuring.REFRESH:
            raise ValueError(f"unknown refresh {refresh!r}; allowed: {', '.join(measuring.REFRESH)}")
        root = rows.results_root() if save else None
    if hasattr(experiment, "forecast"):
        for line in experiment.forecast(cases):
            _say(line)
    if options:  # a stand-in for the module, whose measuring takes the options
        wired = {"run_group": functools.partial(experiment.run_group, **options)}
        experiment = types.SimpleNamespace(**{**vars(experiment), **wired})
    failure = None
    with tempfile.TemporaryDirectory() as scratch:
        root = root or Path(scratch)
        try:
            measuring.measure(
                experiment,
                cases,
                refresh=refresh,
                root=root,
                log=functools.partial(tqdm.write, file=sys.stderr),
                progress=_bar,
            )
        except measuring.MeasurementError as error:
            failure = error
        frame = rows.read(experiment, machine, root)
    fields = rows.case_fields(experiment)
    wanted = {tuple(getattr(case, field) for field in fields) for case in cases}
    frame = frame[[key in wanted for key in zip(*(frame[field] for field in fields), strict=True)]]
    if json_file == "-":
        typer.echo(_as_json(frame))
    else:
        typer.echo(_as_table(frame, fields))
    if json_file not in (None, "-"):
        Path(json_file).write_text(_as_json(frame) + "\n", encoding="utf-8")
    if failure:
        _fail(failure)


def _bar(due: list[Any]) -> Iterable[Any]:
    """A progress bar over the groups to measure, on a terminal only."""
    return tqdm(due, unit="group", disable=None, leave=False)


def choose(experiment: ModuleType, preset: str, given: dict[str, str], off_grid: bool) -> list[Any]:
    """The cases that the given values of fields choose from a preset's grid, or, off it, their product.

    Off the grid is what has a value that the grid does not have, and what names values for every field. There every
    field that is not given (or is `all`) takes the grid's values; `repeat` is 0 there.
    ValueError for values that the grid does not have (or, off the grid, that are not of the field's type),
    and where no case is left.
    """
    from cs336_systems import experiments

    types = typing.get_type_hints(experiment.Case)
    lists: dict[str, list[Any]] = {}
    new = False
    for field in types:
        grid = experiments.values(experiment, preset, field)
        text = given.get(field, "all").strip()
        lists[field] = grid if text == "all" else [_typed(field, t, types[field]) for t in text.split(",")]
        new = new or not set(lists[field]) <= set(grid)
    filters = {field: text for field, text in given.items() if field in types}
    if refused := [field for field, text in given.items() if field not in types and text != "all"]:
        raise ValueError(f"{', '.join(refused)} cannot be chosen here; the cases have {', '.join(types)}")
    named = all(given.get(field, "all").strip() != "all" for field in types)
    if not (off_grid and (new or named)):
        cases = experiments.cases(experiment, preset, **filters)
    else:
        _refuse_unknown(experiment, lists)
        if "repeat" in lists and "repeat" not in given:
            lists["repeat"] = [0]
        cases = [experiment.Case(*values) for values in itertools.product(*lists.values())]
    if not cases:
        chosen = ", ".join(f"{field}={text}" for field, text in filters.items() if text != "all")
        raise ValueError(f"the {preset} preset has no case with {chosen}")
    return cases


def _refuse_unknown(experiment: ModuleType, lists: dict[str, list[Any]]) -> None:
    """Off the grid numbers are free, but words are those that the experiment knows."""
    words = {"dtype": getattr(experiment, "DTYPES", ()), "impl": getattr(experiment, "IMPLEMENTATIONS", ())}
    words |= getattr(experiment, "CHOICES", {})
    for field, values in lists.items():
        known = words.get(field)
        for value in values:
            if known and value not in known:
                raise ValueError(f"unknown {field} {value!r}; allowed: {', '.join(known)}")
            least = 0 if field in ("repeat", "warmup") else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{field}={value}; it must be {'positive' if least else 'at least 0'}")


def _typed(field: str, text: str, kind: type) -> Any:
    text = text.strip()
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{field}={text}: expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{field}={text}: expected {kind.__name__}") from error


def _as_json(frame: pd.DataFrame) -> str:
    records = frame.to_dict("records")  # an empty cell is NaN in a column of numbers, "" in one of words
    records = [{k: None if v != v or v == "" else v for k, v in row.items()} for row in records]
    return json.dumps(records, indent=1)


def _as_table(frame: pd.DataFrame, fields: list[str]) -> str:
    """The rows for a terminal: fields that are the same in all of them above, then the columns that say something."""
    same = [f for f in fields if len(frame) > 1 and frame[f].nunique() == 1]
    shown = frame.drop(columns=["run", "time_utc", "env", "code", *same])
    shown = shown.drop(columns=[c for c in shown if c.endswith("_each")])  # every step's time: for files
    silent = (shown.isna() | (shown == "")).all()
    empty = [c for c in shown if silent[c] and c not in (*fields, "status")]
    table = shown.drop(columns=empty).to_string(index=False, na_rep="", float_format=lambda x: f"{x:.4g}")
    return "\n".join([", ".join(f"{f}={frame[f].iloc[0]}" for f in same)] * bool(same) + [table])


if __name__ == "__main__":
    app()
