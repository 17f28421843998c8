"""The training system's commands: `cs336 data`, `tokenize`, `train`, `speedrun`, `generate`, `export`. Importing this
needs no torch."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336_systems.cli.terminal import EXHAUSTED
from cs336_systems.store import numbers
from cs336_systems.store.files import alone
from cs336_systems.training.config import TrainingConfig, describe, load

# what is changed most, by its flag; all else by --set
FLAGS = {
    "out": "out", "source": "text.source", "train_mb": "text.train_mb", "vocab_size": "tokenizer.vocab_size",
    "size": "model.size", "context_length": "model.context_length", "num_kv_heads": "model.num_kv_heads",
    "attention": "model.attention",
    "batch": "batch.sequences", "steps": "schedule.steps", "tokens": "schedule.tokens", "epochs": "schedule.epochs",
    "minutes": "schedule.minutes",
    "learning_rate": "optimizer.learning_rate", "dtype": "run.dtype", "compile": "run.compile",
    "recompute": "run.recompute", "device": "run.device",
    "nproc": "parallel.nproc", "wrapper": "parallel.wrapper", "sharded": "optimizer.sharded",
    "resume": "checkpoints.resume", "resume_changed": "checkpoints.resume_changed",
}  # fmt: skip
File = Annotated[
    Path | None, typer.Option("--config", help="A .toml or .json file; `train --keys` lists its keys.")
]
Change = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, any key; repeatable.")]


def _flags(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command that takes the first so many of FLAGS as `**flags`, texts that `load` reads."""
    about = {key: (default in ("true", "false"), text) for key, default, text in describe()}

    def declared(command: Callable[..., None]) -> Callable[..., None]:
        *parameters, flags = inspect.signature(command, eval_str=True).parameters.values()
        for name, key in list(FLAGS.items())[:count]:
            switch, text = about[key]
            flag = name.replace("_", "-")
            opts = f"--{flag}/--no-{flag}" if switch else f"--{flag}"
            option = typer.Option(opts, help=text, metavar=None if switch else key)
            annotation = Annotated[(bool if switch else str) | None, option]
            parameters.append(
                flags.replace(name=name, kind=flags.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return declared


def _config(
    file: Path | None, changes: list[str] | None, flags: dict[str, Any], say: Callable[[str], None] = lambda line: None
) -> TrainingConfig:  # fmt: skip
    """A file's configuration; without one what `training.defaults` settles. Flags change either."""
    told = {FLAGS[name]: value for name, value in flags.items() if value is not None}
    for text in changes or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {text}: expected section.key=value")
        if key.strip() in told:
            raise ValueError(f"{key.strip()} is given twice: {told[key.strip()]}, {value.strip()}")
        told[key.strip()] = value.strip()
    if not file:
        from cs336_systems.training import defaults

        return defaults.settled(told, say)
    return load(file, told)


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
    """Wrong input ends with exit code 2, a run that failed with 1; either in a sentence."""
    from cs336_systems.store.status import oom_is_a_row

    ended: dict[str, str] = {}
    code = 1
    try:
        with oom_is_a_row(ended):
            yield
        why = "out of memory; `--dry-run` says what a run needs" if ended else ""
    except (ValueError, FileNotFoundError) as error:
        # a disk that is full is no wrong input
        code, why = 1 if getattr(error.__cause__, "errno", None) in EXHAUSTED else 2, str(error)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and not error.filename and error.errno in (errno.ENOSPC, errno.EPIPE):
            raise  # of the output, which `terminal` tells
        if isinstance(error, RuntimeError) and not type(error).__module__.startswith("cs336_systems."):
            raise
        why = str(error)
    if why:
        typer.echo(f"Error: {why}", err=True)
        raise typer.Exit(code)


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _warn(line: str) -> None:
    typer.echo(line, err=True)


@_flags(3)
def data(config: File = None, change: Change = None, **flags: Any) -> None:
    """Get the text that `train` would learn from."""
    with _told_in_a_line():
        from cs336_systems.training import resuming, text

        made = _config(config, change, flags)
        with alone(Path(made.text.cache or made.out), _say):
            text.prepare(made.text, Path(made.out) / "text", _say, resuming.expected(made))


@_flags(4)
def tokenize(config: File = None, change: Change = None, **flags: Any) -> None:
    """Train the tokenizer on the text and turn the text into tokens."""
    with _told_in_a_line():
        from cs336_systems.training import pipeline

        made = _config(config, change, flags)
        with alone(Path(made.out), _say):
            pipeline.prepare(made, _say)


@_flags(len(FLAGS))
def train(
    config: File = None,
    change: Change = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and what it takes.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every key of a configuration.")] = False,
    **flags: Any,
) -> None:
    """Train a language model, from raw text to samples; what no flag and no --config names, the device decides.

    A second call skips what is there. `torchrun --nproc-per-node N -m cs336_systems train ...` works too.
    """
    if keys:
        for key, default, about in describe():
            typer.echo(f"{key:26} {default:20} {about}")
        return
    with _told_in_a_line():
        from cs336_systems.training import forecast, pipeline

        made = _config(config, change, flags, _say)
        if dry_run:
            for line in forecast.forecast(made):
                _say(line)
        else:
            pipeline.train(made, _say)


def speedrun(
    minutes: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Time of its steps; 20 unless told.")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder of the run: all that it writes.")] = "runs/speedrun",
    size: Annotated[str, typer.Option(help="Of the model; auto: small on a GPU, mini on a CPU.")] = "auto",
    gib: Annotated[str, typer.Option(metavar="NUMBER", help="Memory of a GPU; 0: this machine's.")] = "0",
    ranks: Annotated[str, typer.Option(metavar="NUMBER", help="GPUs; 0: all there are.")] = "0",
    dtype: Annotated[str, typer.Option(help="auto, fp32, tf32, bf16, fp16.")] = "auto",
    source: Annotated[
        str, typer.Option(help="stories, tinystories, or a file or folder of text.")
    ] = "stories",
    full: Annotated[bool, typer.Option("--full", help="Read all of the text once instead.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try three learning rates first, shortly.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what fits, write the configuration, stop.")
    ] = False,
) -> None:
    """Train for some minutes on small or old GPUs, with what fits them, and let the model write."""
    with _told_in_a_line():
        from cs336_systems.chapters.speedrun import plan as room

        if full and minutes is not None:
            raise ValueError(f"--full and --minutes {minutes} contradict each other")
        length, memory = (
            numbers.number("20" if minutes is None else minutes, "minutes="),
            numbers.number(gib, "gib="),
        )
        plan = room.choose(length, out, size, memory, numbers.whole(ranks, "ranks="), dtype, source, full)
        for line in room.told(plan):
            _say(line)
        if dry_run:
            room.write(plan)
        else:
            room.run(plan, _say, sweep)


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Where the texts begin.")] = None,
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run's folder.")] = Path("runs/stories"),
    tokens: Annotated[str, typer.Option(metavar="NUMBER", help="The longest text.")] = "200",
    temperature: Annotated[
        str, typer.Option(metavar="NUMBER", help="0: always the likeliest token.")
    ] = "0.8",
    top_k: Annotated[str, typer.Option(metavar="NUMBER", help="Choose among so many; 0: all.")] = "0",
    top_p: Annotated[
        str, typer.Option(metavar="NUMBER", help="Of the likeliest that make up so much.")
    ] = "0.95",
    seed: Annotated[str, typer.Option(metavar="NUMBER", help="Of the choices.")] = "0",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Let a trained model go on with some texts, all at once; the second one's seed is one more, and so on."""
    with _told_in_a_line():
        from cs336_systems.training import pipeline

        asked = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        told = {f"generation.{key}": value for key, value in asked.items()}
        for prompt in (prompts := prompts or ["Once upon a time"]):
            read = load(None, {"run.device": device, "generation.prompt": prompt} | told).generation
        speaker, texts = pipeline.trained(checkpoint, device, _warn), list(prompts)
        typer.echo(prompts[0], nl=False)  # the first one appears as it is written
        for number, piece in pipeline.spoken(*speaker, prompts, read):
            texts[number] += piece
            if number == 0:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
        typer.echo("\n")
        for text in texts[1:]:
            typer.echo(f"{text}\n")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's folder.")] = Path(
        "runs/stories"
    ),
    hf: Annotated[str, typer.Option("--hf", metavar="DIR", help="The folder to write.")] = ...,
) -> None:
    """Write a trained model as Hugging Face's transformers load it: a LlamaForCausalLM with its tokenizer."""
    with _told_in_a_line():
        from cs336_systems.training import export as room

        for path in room.export(checkpoint, hf, _warn):
            typer.echo(path)


COMMANDS = (data, tokenize, train, speedrun, generate, export)
