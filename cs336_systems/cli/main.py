"""One command line for everything: `cs336`, or `python -m cs336_systems`.

    cs336 doctor                       what this machine can run, and why not the rest
    cs336 run                          measure every chapter here: its notebook, by papermill
    cs336 run hardware -p dtype=bf16   one chapter, some of its cases
    cs336 bench attention --impl reference --json naive.json
    cs336 bench flash --seq-len 4096 --head-dim 64 128 --json -
    cs336 bench model --size small medium --mode forward train_step --dtype fp32 bf16
    cs336 bench matrix --attention sdpa flash_triton --wrapper none in_place torch
    cs336 bench sweep --tiers 128:64,256:128
    cs336 book --pdf                   build the book from the rows
    cs336 submit                       the course's hand-in: writeup.pdf and code.zip
    cs336 results merge DIR            take in the rows of another machine
    torchrun --nproc-per-node 2 -m cs336_systems run allreduce         on processes that torchrun starts

Exit codes: 0, 1 where something failed, 2 where the command line is wrong, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from cs336_systems.cli import bench_folders, terminal
from cs336_systems.cli import train as training
from cs336_systems.cli.bench_folders import Json, Refresh, Values

app = typer.Typer(
    cls=terminal.Interruptible, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
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

_say, _wrong_input, _fail = terminal.say, terminal.wrong_input, terminal.fail


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


# -------------------------------------------------------------------------------- doctor
@app.command()
def doctor(
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write it as JSON to this file; - is stdout.")
    ] = None,
) -> None:
    """Say what this machine can run, and why the rest is unavailable."""
    from tabulate import tabulate

    from cs336_systems.attention import registry
    from cs336_systems.cli import doctor as room

    with _wrong_input():
        checks, name, kernels = room.checks(), room.machine_name(), room.chosen_kernels()
    served = registry.features()
    found = {
        "machine": name,
        "checks": [dataclasses.asdict(c) for c in checks],
        "attention": served,
        "kernels": kernels,
    }
    if terminal.wrote_json(json_file, json.dumps(found, indent=1)):
        return
    typer.echo(f"machine: {name or 'unknown'}")
    for section, group in itertools.groupby(checks, key=lambda check: check.section):
        typer.echo(f"\n{section}")
        for check in group:
            typer.echo(f"  {'yes' if check.available else 'no ':3}  {check.name:24} {check.detail}")
    typer.echo("\nwhat implementations of attention serve, on any machine")
    typer.echo(tabulate(served, headers="keys", tablefmt="plain"))
    typer.echo("\nkernels that attention() launches (16 heads; forward, backward where it differs)")
    if kernels:
        typer.echo(tabulate(kernels, headers="keys", tablefmt="plain", disable_numparse=True))
    else:
        typer.echo("  none here: it computes in plain PyTorch (`reference`)")


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
    from cs336_systems.chapters import CHAPTERS, tables_of
    from cs336_systems.cli import notebooks
    from cs336_systems.store.rows import results_root

    with _wrong_input():  # matplotlib refuses a wrong MPLBACKEND
        from cs336_systems.report.chapter import Chapter
        from cs336_systems.report.coverage import project_root

        names = list(dict.fromkeys(chapters or CHAPTERS))
        tables = {name: tables_of(name) for name in names}
        options = {"preset": preset, "machine": machine, "refresh": refresh}
        given = _pairs([*(f"{k}={v}" for k, v in options.items() if v is not None), *(param or [])])
        root = project_root()
        with _team() as leads:
            for name in names if leads else []:
                # what its notebook would refuse, at once
                Chapter.from_parameters(tables[name], given, results_root(root))
            failed = notebooks.run(root, names, given, log=_say) if leads else []
    if failed:
        _fail(f"{len(failed)} of {len(names)} chapters failed: {', '.join(failed)}")


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise ValueError(f"-p {text}: expected name=value")
        if name in pairs:
            raise ValueError(f"{name} is given twice: {pairs[name]}, {value}")
        pairs[name] = value
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
    if claims:
        return _claims()
    with _wrong_input():
        from cs336_systems.chapters import tables_of
        from cs336_systems.report.build import BookError, build
    try:
        with _wrong_input():
            products = build(tables_of, pdf=pdf, strict=strict)
    except BookError as error:
        _fail(error)
    for product in products:
        typer.echo(product)


def _claims() -> None:
    with _wrong_input():
        from cs336_systems.report.claims import check
        from cs336_systems.report.coverage import project_root

        wrong, narrow = check(project_root())
    for line in narrow:
        typer.echo(f"narrow: {line}")
    for line in wrong:
        typer.echo(line)
    if wrong:
        _fail(f"{len(wrong)} sentences or answers to mend")
    typer.echo("every sentence is borne out by the rows, and every part has its answer")


@app.command()
def submit(
    out: Annotated[
        str | None, typer.Option(help="The folder to write to; submission/ in the checkout by default.")
    ] = None,
    skip_tests: Annotated[bool, typer.Option("--skip-tests", help="Run no test before packing.")] = False,
) -> None:
    """Make the course's hand-in: run the tests, build writeup.pdf, pack code.zip."""
    with _wrong_input():
        from cs336_systems.cli import submit as room
        from cs336_systems.report.build import BookError

    try:
        with _wrong_input():
            lines = room.submit(out, skip_tests)
    except (BookError, room.SubmitError) as error:
        _fail(error)
    for line in lines:
        typer.echo(line)


@results.command("merge")
def merge(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A results folder: <machine>/<table>.csv.")
    ],
) -> None:
    """Take in the rows of another results folder; the newest row of a case wins."""
    from cs336_systems import chapters
    from cs336_systems.store import rows

    with _wrong_input():
        merged = rows.merge([chapters.load(name) for name in chapters.tables() + chapters.RECORDS], folder)
    for machine, table, taken, there in merged:
        typer.echo(f"{machine}: {taken} of {there} rows of {table}")


@results.command("carry")
def carry(
    tables: Annotated[list[str], typer.Argument(help="Tables, as their CSV is named.")],
    because: Annotated[str, typer.Option(help="Why what is measured is the same.")],
    commit: Annotated[str, typer.Option("--from", help="With whose files the rows were measured.")] = "HEAD",
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="field=value,value of the rows that are meant; repeatable."),
    ] = None,
) -> None:
    """Files changed, what is measured did not: let rows count as measured with the files as they are."""
    from cs336_systems import chapters
    from cs336_systems.store import provenance

    with _wrong_input():
        modules = [chapters.load(name) for name in dict.fromkeys(tables)]
        counts = provenance.carry(modules, commit, _pairs(param or []), because)
    for table, count in counts:
        typer.echo(f"{table}: {count} rows")


# -------------------------------------------------------------------------------- training
for command in training.COMMANDS:
    app.command()(command)


# -------------------------------------------------------------------------------- benchmarks
Attention = Annotated[str | None, typer.Option(help="As the others; auto for another --model.")]
Preset = Annotated[str, typer.Option(help="auto, full (the handout's grid) or smoke.")]
Save = Annotated[bool, typer.Option(help="Keep the rows under results/.")]


def _bench(*asked: Any, **options: Any) -> None:
    from cs336_systems.cli import bench as room

    room.table(*asked, **options)


@bench.command("hardware", cls=terminal.Lists)
def bench_hardware(
    kind: Values = "all", dtype: Values = "all", size: Values = "all", preset: Preset = "auto",
    refresh: Refresh = "missing", save: Save = True, json_file: Json = None,
) -> None:  # fmt: skip
    """The roofs: matrix products, copies, launches."""
    given = {"kind": kind, "dtype": dtype, "size": size}
    _bench("hardware", given, preset, refresh, save, json_file)


@bench.command("attention", cls=terminal.Lists)
def bench_attention(
    seq_len: Values = "all", head_dim: Values = "all", dtype: Values = "all", impl: Values = "all",
    cap_gib: Values = "0", preset: Preset = "auto", refresh: Refresh = "missing", save: Save = True,
    json_file: Json = None,
) -> None:  # fmt: skip
    """Plain attention without heads or mask, eager and compiled: the handout's grid, until memory runs out."""
    given = {"seq_len": seq_len, "head_dim": head_dim, "dtype": dtype, "impl": impl, "cap_gib": cap_gib}
    _bench("attention", given, preset, refresh, save, json_file)


@bench.command("flash", cls=terminal.Lists)
def bench_flash(
    seq_len: Values = "all", head_dim: Values = "all", dtype: Values = "all", impl: Values = "all",
    heads: Values = "all", preset: Preset = "auto", refresh: Refresh = "missing", save: Save = True,
    json_file: Json = None,
    tune: Annotated[bool, typer.Option("--tune", help="Search tile sizes for one shape instead.")] = False,
) -> None:  # fmt: skip
    """Attention: forward, backward, both; every implementation. Shapes off the handout's grid work too."""
    given = {"seq_len": seq_len, "head_dim": head_dim, "dtype": dtype, "impl": impl, "heads": heads}
    if tune:
        with _wrong_input():
            if json_file is not None:
                raise ValueError(f"--json {json_file}: --tune prints the row to add, and writes no file")
        from cs336_systems.cli import bench as room

        typer.echo(room.tune(given))
    else:
        _bench("flash_bench", given, preset, refresh, save, json_file)


@bench.command("model", cls=terminal.Lists)
def bench_model(
    size: Values = "small", context_length: Values = "512", mode: Values = "all", dtype: Values = "fp32",
    attention: Attention = None, batch: Values = "4", warmup: Values = "5", steps: Values = "10",
    compiled: Annotated[bool, typer.Option("--compile", help="With torch.compile.")] = False,
    compile_mode: Annotated[str | None, typer.Option(help="off, default, reduce-overhead, max-autotune.")] = None,
    model: Annotated[str, typer.Option(help="Another class of the same constructor, module:Class.")] = "own",
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Ranges for Nsight Systems.")] = False,
    memory_snapshot: Annotated[
        Path | None, typer.Option(help="Record the allocator's history of two more steps into this file.")
    ] = None,
    refresh: Refresh = "missing", save: Save = True, json_file: Json = None,
) -> None:  # fmt: skip
    """Steps of a whole model: the product of the lists, each case predicted, measured and kept as a row."""
    from cs336_systems.chapters.shared.steps import CHOICES
    from cs336_systems.sizes import HANDOUT_SIZES

    given = {
        "size": size, "context_length": context_length, "mode": mode, "dtype": dtype,
        "attention": ("reference" if model.strip() == "own" else "auto") if attention is None else attention,
        "compile": ("default" if compiled else "off") if compile_mode is None else compile_mode, "batch": batch,
        "warmup": warmup, "steps": steps, "model": model, "repeat": "0",
    }  # fmt: skip
    for field, known in (CHOICES | {"size": HANDOUT_SIZES}).items():
        given[field] = ",".join(known) if given[field].strip() == "all" else given[field]
    with _wrong_input():
        if compiled and compile_mode is not None and "off" in given["compile"].split(","):
            raise ValueError(f"--compile and --compile-mode {compile_mode} contradict each other")
    options = {"nvtx": True} if nvtx else {}
    _bench("benchmarking", given, "full", refresh, save, json_file, memory_snapshot, **options)


bench.command("matrix", cls=terminal.Lists)(bench_folders.matrix)
bench.command("sweep", cls=terminal.Lists)(bench_folders.sweep)


@bench.command("run", cls=terminal.Lists)
def bench_run(
    minutes: Values = "4", size: Values = "small", context_length: Values = "512", sequences: Values = "64",
    dtype: Values = "bf16", compile: Values = "whole", cap_gib: Values = "0", train_mb: Values = "300",
    refresh: Refresh = "missing", save: Save = True, json_file: Json = None,
) -> None:  # fmt: skip
    """A real run of so many minutes on stories, from fresh weights to text, and kept as a row."""
    given = {
        "size": size, "context_length": context_length, "sequences": sequences, "dtype": dtype, "compile": compile,
        "cap_gib": cap_gib, "minutes": minutes, "train_mb": train_mb,
    }  # fmt: skip
    _bench("training_run", given, "full", refresh, save, json_file)


if __name__ == "__main__":
    app()
