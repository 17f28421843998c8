"""The training system's commands: `cs336 data`, `tokenize`, `train`, `speedrun`, `generate`. Importing this needs no
torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cs336_systems.training.config import TrainingConfig, describe, load

File = Annotated[
    Path | None, typer.Option("--config", help="A .toml or .json file; `--keys` lists what it may hold.")
]
Change = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, any key; repeatable.")]
Out = Annotated[str | None, typer.Option(help="Folder of the run: all that it writes.")]
Source = Annotated[
    str | None, typer.Option(help="stories, tinystories, random, or a file or folder of text.")
]
TrainMb = Annotated[float | None, typer.Option(help="Megabytes of training text.")]
Vocab = Annotated[int | None, typer.Option(help="Tokens of the vocabulary.")]


def _config(file: Path | None, changes: list[str] | None, **flags: Any) -> TrainingConfig:
    """The configuration of a command line; flags by key (`model__size` is model.size) where they are given."""
    told = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    for text in changes or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {text}: expected section.key=value")
        told[key.strip()] = value.strip()
    return load(file, told)


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
    """Wrong input ends with exit code 2, a run that failed with 1; either in a sentence."""
    from cs336_systems.launch.outcome import LaunchError

    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except (LaunchError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except RuntimeError as error:
        if type(error).__name__ not in ("TrainingError", "CheckpointError"):
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        typer.echo(line)
        sys.stdout.flush()


def data(
    config: File = None,
    change: Change = None,
    out: Out = None,
    source: Source = None,
    train_mb: TrainMb = None,
) -> None:
    """Get the text that `train` would learn from."""
    with _told_in_a_line():
        from cs336_systems.training import text

        made = _config(config, change, out=out, text__source=source, text__train_mb=train_mb)
        text.prepare(made.text, Path(made.text.cache or Path(made.out) / "text"), log=_say)


def tokenize(
    config: File = None, change: Change = None, out: Out = None, source: Source = None, train_mb: TrainMb = None,
    vocab_size: Vocab = None,
) -> None:  # fmt: skip
    """Train the tokenizer on the text and turn the text into tokens."""
    with _told_in_a_line():
        from cs336_systems.training import pipeline

        made = _config(
            config,
            change,
            out=out,
            text__source=source,
            text__train_mb=train_mb,
            tokenizer__vocab_size=vocab_size,
        )
        pipeline.prepare(made, _say)


def train(
    config: File = None, change: Change = None, out: Out = None, source: Source = None, train_mb: TrainMb = None,
    vocab_size: Vocab = None,
    size: Annotated[str | None, typer.Option(help="Of the model: mini, tiny, small, medium, large, xl, 2.7B.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, or an implementation that `cs336 doctor` lists.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, all ranks together.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length in steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Length in tokens.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Length in minutes.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, fp32, tf32, bf16, fp16.")] = None,
    compile: Annotated[str | None, typer.Option(help="off, attention, blocks, whole, graphs.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes to start, a GPU each where there are enough.")] = None,
    wrapper: Annotated[str | None, typer.Option(help="naive, flat, overlapped, bucketed, in_place, torch.")] = None,
    sharded: Annotated[bool | None, typer.Option("--sharded", help="Spread the optimizer's state over ranks.")] = None,
    resume: Annotated[str | None, typer.Option(help="no, auto, or a checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and what it takes.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every key of a configuration.")] = False,
) -> None:  # fmt: skip
    """Train a language model, from raw text to samples; without arguments a small one, in minutes on a laptop.

    A second call skips what is there. `torchrun --nproc-per-node N -m cs336_systems train ...` works too.
    """
    if keys:
        for key, default, about in describe():
            typer.echo(f"{key:26} {default:20} {about}")
        return
    with _told_in_a_line():
        from cs336_systems.training import pipeline

        lengths = {"schedule__steps": steps, "schedule__tokens": tokens, "schedule__minutes": minutes}
        made = _config(
            config, change, out=out, text__source=source, text__train_mb=train_mb,
            tokenizer__vocab_size=vocab_size, model__size=size, model__context_length=context_length,
            model__attention=attention, batch__sequences=batch, optimizer__learning_rate=learning_rate,
            run__dtype=dtype, run__compile=compile, run__device=device, parallel__nproc=nproc,
            parallel__wrapper=wrapper, optimizer__sharded=sharded, checkpoints__resume=resume, **lengths,
        )  # fmt: skip
        if dry_run:
            from cs336_systems.training.forecast import forecast

            for line in forecast(made):
                typer.echo(line)
            return
        pipeline.train(made, _say)


def speedrun(
    minutes: Annotated[float, typer.Option(help="Time of its steps.")] = 20.0,
    out: Annotated[str, typer.Option(help="Folder of the run: all that it writes.")] = "runs/speedrun",
    size: Annotated[str, typer.Option(help="Of the model; auto: small on a GPU, mini on a CPU.")] = "auto",
    gib: Annotated[float, typer.Option(help="Memory of a GPU; 0: this machine's.")] = 0.0,
    ranks: Annotated[int, typer.Option(help="GPUs; 0: all there are.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, fp32, tf32, bf16, fp16.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what fits, write the configuration, and stop.")
    ] = False,
) -> None:
    """Train for some minutes on small or old GPUs, with what fits them, and let the model write."""
    with _told_in_a_line():
        from cs336_systems.training import speedrun as room

        plan = room.choose(minutes, out, size, gib, ranks, dtype)
        room.write(plan)
        for line in room.told(plan):
            _say(line)
        if not dry_run:
            room.run(plan, _say)


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Where the texts begin.")] = None,
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run's folder.")] = Path("runs/stories"),
    tokens: Annotated[int, typer.Option(min=1, help="The longest text.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that make up so much.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the choices.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Let a trained model go on with some texts."""
    with _told_in_a_line():
        from cs336_systems.training.pipeline import Speaker

        speaker = Speaker(checkpoint, device)
        for prompt in prompts or ["Once upon a time"]:
            typer.echo(prompt, nl=False)
            pieces = speaker.speak(
                prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
            )
            for piece in pieces:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
            typer.echo("\n")
