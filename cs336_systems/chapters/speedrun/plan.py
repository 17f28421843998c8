"""A timed run for small or old GPUs: what fits them, what is chosen, the command for torchrun, the run.

    plan = choose(minutes=20, out="runs/speedrun")      # for this machine
    print(plan.command)                                 # the same on torchrun's ranks
    run(plan)

The choice is that of `training.defaults`, on all GPUs there are. A GPU without bf16 trains in fp16 with loss scaling;
several GPUs share each step's sequences, and the optimizer's state where it does not fit otherwise. On a CPU it is a
run of minutes that shows that all parts work.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs336_systems.store import files
from cs336_systems.store.files import alone, make_folder
from cs336_systems.training import defaults
from cs336_systems.training.config import MODEL_SIZES, TrainingConfig, load
from cs336_systems.training.defaults import Machine
from cs336_systems.training.forecast import memory_bytes

T4_GIB = 14.7  # what a T4 of 16 GB calls its memory
SHOWN_CONTEXTS = (256, 512, 1024)
RATES = (0.5, 1.0, 2.0)  # times the default learning rate: what a sweep tries
_SHARE = 1 / 30  # of the run's minutes that each of them has
_SWEEP_MB = 64.0  # of the text's tokens that they have


@dataclass(frozen=True)
class Plan:
    """What is going to be trained, and on what."""

    config: TrainingConfig
    machine: Machine

    @property
    def file(self) -> Path:
        """Where `write` puts the configuration."""
        return Path(self.config.out) / "speedrun.json"

    @property
    def command(self) -> str:
        """What starts the same run under torchrun."""
        start = f"torchrun --standalone --nproc-per-node {self.config.parallel.nproc}"
        return f"{start} -m cs336_systems train --config {shlex.quote(str(self.file))}"


def choose(
    minutes: float, out: str, size: str = "auto", gib: float = 0.0, ranks: int = 0, dtype: str = "auto",
    source: str = "stories", full: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a run of so many minutes of steps on a text; full: of one pass over all of it instead. size "auto":
    as `training.defaults` chooses. gib, ranks, dtype: of other GPUs than this machine's, to know beforehand; 0 and
    "auto": its own, all of them. Without GPUs here others are taken for one old GPU, in fp16, unless told.

    ValueError for values that make no sense, and where not one sequence fits; it names what does.
    """
    if not 0 < minutes <= 1440:
        raise ValueError(f"minutes={minutes:g}; it must be above 0 and at most 1440")
    if not 0 <= gib <= 1e6 or not 0 <= ranks <= 1024:
        raise ValueError(f"gib={gib:g}, ranks={ranks}; allowed: gib from 0 to 1e6, ranks from 0 to 1024")
    if size not in ("auto", *MODEL_SIZES):
        raise ValueError(f"size={size!r}; allowed: auto, {', '.join(MODEL_SIZES)}")
    machine = Machine() if gib and ranks and dtype != "auto" else defaults.here()
    if gib and not machine.gib:
        machine = Machine(gib, "fp16", defaults.UNKNOWN_TFLOPS, 1)
    dtype = dtype if dtype != "auto" else machine.dtype
    machine = Machine(gib or machine.gib, dtype, machine.tflops, ranks or machine.gpus)
    length: dict[str, Any] = {"schedule.minutes": minutes}
    if full:
        length = {"schedule.epochs": 1, "text.train_mb": defaults.MOST_MB if source == "stories" else 0}
    told = {
        "out": out, "text.source": source, **length, "run.dtype": dtype, "parallel.nproc": max(1, machine.gpus),
        "checkpoints.resume": "auto", **({} if size == "auto" else {"model.size": size}),
    }  # fmt: skip
    return Plan(load(None, defaults.chosen(machine, told)), machine)


# ------------------------------------------------------------------------------------------------ what fits
def largest_batch(size: str, context_length: int, gib: float, dtype: str = "fp16") -> int:
    """The most sequences of `defaults.BATCHES` that a step holds on one GPU of so much memory; 0 where not one fits.
    Attention keeps no scores."""
    return defaults.most_sequences(_named(size, context_length), gib, dtype)


def gib_of(size: str, context_length: int, sequences: int, dtype: str = "fp16") -> float:
    """What the forecast says of so many sequences on a GPU, in GiB."""
    config = load(None, _named(size, context_length) | {"batch.sequences": sequences})
    return memory_bytes(config, dtype, "cuda", 1) / 2**30


def _named(size: str, context_length: int) -> dict[str, Any]:
    return {"model.size": size, "model.context_length": context_length}


def what_fits(gib: float, size: str, context_length: int, dtype: str = "fp16") -> tuple[int, float]:
    """The most sequences of a step on one GPU of so much memory, and the GiB that they (or one, where none fits)
    need."""
    most = largest_batch(size, context_length, gib, dtype)
    return most, gib_of(size, context_length, max(1, most), dtype)


def told(plan: Plan) -> Iterator[str]:
    """Lines: what fits by size, length and batch, what was chosen, and the command for torchrun."""
    gib, dtype = (plan.machine.gib, plan.config.run.dtype) if plan.machine.gib else (T4_GIB, "fp16")
    yield f"on a GPU with {gib:.1f} GiB, in {dtype}: the most sequences a step, and the GiB they need"
    yield f"  {'size':8}" + "".join(f"{n:>7} tokens" for n in SHOWN_CONTEXTS)
    for size in MODEL_SIZES:
        found = (what_fits(gib, size, context, dtype) for context in SHOWN_CONTEXTS)
        cells = [f"{most or '-'} ({need:.1f})" for most, need in found]
        yield f"  {size:8}" + "".join(f"{cell:>14}" for cell in cells)
    yield from list(defaults.about(plan.config, plan.machine))[:2]
    yield f"under torchrun: {plan.command}"


# ------------------------------------------------------------------------------------------------ the run
def run(plan: Plan, say: Any = print, sweep: bool = False) -> dict[str, Any]:
    """Trains, and writes what the model then writes; as `pipeline.train`, in `config.out`. sweep: with the
    learning rate that `swept` finds. ValueError for a GPU's plan where there is none."""
    from cs336_systems.training import pipeline

    if plan.machine.gib and not defaults.here().gib:
        raise ValueError(
            f"gib={plan.machine.gib:g}: this machine has no GPU; a dry run says what fits another's"
        )
    if sweep:
        plan = swept(plan, say)
    if os.environ.get("RANK", "0") == "0":  # under torchrun one writes
        write(plan)
    return pipeline.train(plan.config, say)


def swept(plan: Plan, say: Any = print) -> Plan:
    """The plan with the learning rate of RATES that has the lowest held-out loss after a short run, a whole schedule of
    _SHARE of the minutes; one that diverges has lost. These runs stay in `sweep/`: interrupted, a second call goes on
    with them. ValueError for a text without a tokenizer, and under torchrun."""
    from cs336_systems.launch.start import LaunchError
    from cs336_systems.training import pipeline
    from cs336_systems.training.loop import TrainingError

    if "RANK" in os.environ:
        raise ValueError("a sweep starts its own processes; allowed: without torchrun")
    out, own = Path(plan.config.out), plan.config
    with alone(out, say):
        info = pipeline.prepare(own, say)
    if not info.tokenizer:
        raise ValueError("a sweep of learning rates needs a text; text.source='random' has none")
    losses, diverged = {}, f"{TrainingError.__module__}.{TrainingError.__qualname__}"
    for rate in (float(f"{times * own.optimizer.learning_rate:.2g}") for times in RATES):
        short = load(None, {
            **own.to_dict(), "out": str(out / "sweep" / f"{rate:g}"), "text.source": str(out / "tokens" / "train.bin"),
            "text.valid": str(out / "tokens" / "valid.bin"), "text.train_mb": _SWEEP_MB,
            "tokenizer.path": str(info.tokenizer), "tokenizer.dtype": "uint16", "optimizer.learning_rate": rate,
            "schedule": _short(own), "generation.samples": 0, "checkpoints.keep": 1,
        })  # fmt: skip
        try:
            result = pipeline.train(short, lambda line: None)
        except (TrainingError, LaunchError) as error:
            if isinstance(error, LaunchError) and error.kind != diverged:
                raise
            losses[rate] = math.inf
            say(f"learning rate {rate:g}: {error}")
            continue
        if result["stopped"]:
            raise KeyboardInterrupt
        losses[rate] = result["valid_loss"]
        say(f"learning rate {rate:g}: held out {losses[rate]:.4f} nats a token after {_SHARE:.1%} of the run")
    best = min(losses, key=losses.__getitem__)
    return replace(plan, config=load(None, {**own.to_dict(), "optimizer.learning_rate": best}))


def _short(config: TrainingConfig) -> dict[str, Any]:
    kind, length = config.schedule.length
    return {"kind": config.schedule.kind, "minutes": _SHARE * (length if kind == "minutes" else 20.0)}


def write(plan: Plan) -> None:
    """The configuration as a file, which the plan's command reads. ValueError where a run is writing beside it."""
    make_folder(plan.file.parent)
    with alone(plan.file.parent):
        files.replace({plan.file: json.dumps(plan.config.to_dict(), indent=1) + "\n"})
