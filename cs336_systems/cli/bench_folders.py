"""`cs336 bench matrix` and `cs336 bench sweep`: what a benchmark finds on one's own machine, as a folder to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336_systems.cli import terminal
from cs336_systems.store.table import Table

Values = Annotated[str, typer.Option(help="One value, several (separated by blanks or commas), or all.")]
Auto = Annotated[str, typer.Option(help="One value, or auto: what this machine is best at.")]
Batch = Annotated[
    str, typer.Option(help="Sequences of a step on each rank (`train` counts those of all); or several.")
]
Shape = Annotated[str, typer.Option(help="Of the model; 0: as the size has it.")]
Out = Annotated[str, typer.Option(help="The folder to write: CSV, pictures, report.md.")]
Refresh = Annotated[str, typer.Option(help="What to measure: missing, stale or all.")]
Save = Annotated[bool, typer.Option(help="Keep the rows under results/, too.")]
Json = Annotated[str | None, typer.Option("--json", help="Write the rows as JSON to this file; - is stdout.")]


def matrix(
    attention: Values = "flash_triton,reference,sdpa", wrapper: Values = "auto", sharded: Values = "all",
    size: Auto = "auto", d_model: Shape = "0", d_ff: Shape = "0", num_layers: Shape = "0", num_heads: Shape = "0",
    vocab_size: Annotated[str, typer.Option(help="Tokens; 0: 2,048, and 512 of sizes mini and tiny.")] = "0",
    context_length: Values = "256", batch: Batch = "8", dtype: Auto = "auto",
    compile: Values = "off", steps: Values = "12",
    ranks: Annotated[str, typer.Option(help="Processes, a GPU each; 0: one for each GPU, two on a CPU.")] = "0",
    out: Out = "runs/matrix", refresh: Refresh = "missing", save: Save = True,
    json_file: Json = None,
) -> None:  # fmt: skip
    """Attention × wrapper × sharded optimizer in short training runs: time, throughput, memory, scaling, losses."""
    from cs336_systems.chapters.training import measure as training
    from cs336_systems.chapters.training import trials
    from cs336_systems.store import numbers
    from cs336_systems.store.machine import gpu_names

    with terminal.wrong_input():  # matplotlib refuses a wrong MPLBACKEND
        from cs336_systems.chapters.training import show_matrix as report

        if (asked := numbers.whole(ranks, "ranks=")) < 0:
            raise ValueError(f"ranks={asked}; allowed: 0 or more")
        world_size = asked or len(gpu_names()) or 2
        given = {
            "attention": attention, "wrapper": wrapper, "sharded": sharded, "size": size, "dtype": dtype,
            "context_length": context_length, "batch": batch, "compile": compile, "steps": steps,
        }  # fmt: skip
        best = {"size": "small" if gpu_names() else "tiny", "dtype": _best_dtype}
        best |= {"wrapper": "all" if world_size > 1 else training.ALONE}
        chosen = _chosen(training.TABLE, given | {"world_size": str(world_size)}, best)
        own = {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}
        own = {
            name: numbers.whole(text, f"{name}=") for name, text in (own | {"vocab_size": vocab_size}).items()
        }
        chosen["size"] = [trials.shape(size, **own) for size in chosen["size"]]
        cases = [
            case
            for fields in _products(
                chosen, "size", "context_length", "batch", "dtype", "compile", "world_size", "steps"
            )
            for case in training.cells(chosen["attention"], chosen["wrapper"], chosen["sharded"], **fields)
        ]
        if not cases:
            raise ValueError(
                f"--sharded {sharded}: wrapper {training.ALONE} has no ranks to spread the state over"
            )
    _measure(training.TABLE, cases, out, refresh, save, json_file, report.folder)


def sweep(
    tiers: Annotated[
        str, typer.Option(help="queries:keys, several separated by blanks or commas; as in 128:64,256:128.")
    ] = "128:64,256:128,512:256,1024:512,2048:1024",
    attention: Values = "reference,reference_compiled,sdpa,flash_torch,flash_triton", dtype: Auto = "auto",
    head_dim: Values = "64", heads: Values = "12", batch: Values = "4",
    cap_gib: Annotated[str, typer.Option(help="GiB of GPU memory to use at most; 0: all.")] = "0",
    iters: Annotated[str, typer.Option(help="Calls to time, kept in no row; 0: as many as a time holds.")] = "0",
    warmup: Annotated[str, typer.Option(help="Calls before those of --iters.")] = "5",
    out: Out = "runs/sweep", refresh: Refresh = "missing", save: Save = True,
    json_file: Json = None,
) -> None:  # fmt: skip
    """Attention alone on rectangular shapes: forward and both passes of every implementation, and their memory."""
    from cs336_systems.chapters.training import sweep as training_sweep
    from cs336_systems.store import numbers

    with terminal.wrong_input():
        from cs336_systems.chapters.training import show_sweep as report

        counts = {
            name: numbers.whole(text, f"{name}=") for name, text in (("warmup", warmup), ("iters", iters))
        }
        if min(counts.values()) < 0:
            raise ValueError(f"warmup={warmup}, iters={iters}; allowed: 0 or more")
        shapes = list(dict.fromkeys(training_sweep.tier(text) for text in tiers.split(",")))
        given = {"attention": attention, "dtype": dtype, "head_dim": head_dim, "heads": heads, "batch": batch}
        chosen = _chosen(training_sweep.TABLE, given | {"cap_gib": cap_gib}, {"dtype": _best_dtype})
        cases = [
            case
            for fields in _products(chosen, "dtype", "head_dim", "heads", "batch", "cap_gib")
            for case in training_sweep.cases_of(shapes, chosen["attention"], **fields)
        ]
    options = counts if counts["iters"] else {}
    _measure(
        training_sweep.TABLE, cases, out, refresh, save and not options, json_file, report.folder, **options
    )


def _best_dtype() -> str:
    import torch

    from cs336_systems.training import modes

    return modes.dtype_of("auto", "cuda" if torch.cuda.is_available() else "cpu")


def _chosen(experiment: Table, given: dict[str, str], best: dict[str, Any]) -> dict[str, list[Any]]:
    """Field → values; "auto" is the best one, "all" every word that is allowed. ValueError as `selection.named`."""
    from cs336_systems.store import selection

    told = {}
    for field, text in given.items():
        if text.strip() == "auto" and field in best:
            text = best[field]() if callable(best[field]) else best[field]
        if text.strip() == "all":
            allowed = experiment.choices[field]
            if not callable(allowed) and isinstance(allowed, range):
                raise ValueError(f"{field}=all; allowed: whole numbers from {allowed[0]} to {allowed[-1]}")
            text = "no,yes" if callable(allowed) else ",".join(allowed)
        told[field] = text
    return selection.named(experiment, **told)


def _products(chosen: dict[str, list[Any]], *fields: str) -> list[dict[str, Any]]:
    import itertools

    return [
        dict(zip(fields, values, strict=True)) for values in itertools.product(*(chosen[f] for f in fields))
    ]


def _measure(
    experiment: Table, cases: Sequence[Any], out: str, refresh: str, save: bool, json_file: str | None,
    folder: Callable[[Any, Path], list[Path]], **options: Any,
) -> None:  # fmt: skip
    """Measures the cases and writes the folder; exit code 1 where some of them ended in an error. options: arguments of
    `run_group` beside the cases."""
    from matplotlib import rc_context

    from cs336_systems.cli import bench
    from cs336_systems.report import figures
    from cs336_systems.store import measuring, rows, selection
    from cs336_systems.store.files import alone, make_folder
    from cs336_systems.store.machine import machine_name

    with terminal.wrong_input():
        refresh = selection.choice("refresh", refresh, measuring.REFRESH)
        root = rows.results_root() if save else None
    with terminal.wrong_input(), alone(Path(out), terminal.say):
        place = make_folder(out)
        terminal.check_json(json_file)  # which may be in it
        frame, failure = bench.measure(experiment, cases, refresh, root, options)
        frame.insert(0, "machine", machine_name())
        with rc_context(figures.STYLE):
            paths = folder(frame.reset_index(drop=True), place)
        if not terminal.wrote_json(json_file, bench.as_json(frame)):
            typer.echo("\n".join(map(str, paths)))
    if failure:
        terminal.fail(failure)
