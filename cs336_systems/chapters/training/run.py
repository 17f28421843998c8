"""A table of chapter `training`: real runs of some minutes, from fresh weights to text.

    cs336 bench run --minutes 8 --size small

Stories are made and turned into tokens, a model trains for so many minutes of steps (`training.pipeline`,
`training.loop`, as `cs336 train` does), and writes before and after. The loss on held-out stories stands beside their
entropy. With `cap_gib` the process takes no more of the GPU's memory and launches the portable kernels: fp16 under the
cap of a small GPU is one GPU's share of chapter `speedrun`'s run, where there is no such GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.memory_cap import capped
from cs336_systems.chapters.training import trials
from cs336_systems.store import machine, numbers, process
from cs336_systems.store.status import Skip, failure_is_a_row
from cs336_systems.store.table import Table
from cs336_systems.training.config import COMPILE, DTYPES, MODEL_SIZES, Generation, TrainingConfig, load

DEPENDS = (
    *depends.TRAINING, *depends.TRITON, "chapters/shared/memory_cap.py", "chapters/training/trials.py",
    "training/generate.py",
)  # fmt: skip
GROUP = ("size", "context_length", "sequences", "dtype", "compile", "cap_gib", "minutes", "train_mb")
METRICS = (
    "steps", "tokens", "seconds", "tokens_per_s", "mfu", "peak_gib", "skipped_steps", "vocab_size",
    "valid_loss", "bits_per_byte",  # of all held-out stories in the end
    "floor", "floor_bits_per_byte",  # their entropy, in the same units
    "loss_tokens", "losses",  # of the training loss: tokens before, mean over some steps
    "valid_tokens", "valid_seconds", "valid_losses",  # of the held-out loss: tokens and seconds before
    "prompt", "before", "after",  # what the model writes with its first and its last weights
)  # fmt: skip
"""Losses in nats a token. Seconds are those of steps. tokens_per_s: the median over the lines of the log."""
PROMPT = "Once upon a time"
POINTS = 100  # of the training loss that are kept
CAP_GIB = 14  # what a process can take of the 14.7 GiB of a T4, its context left out


def _number(name: str, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := numbers.number(text)) <= most:
                return value
        raise ValueError(
            f"{name}={text}; allowed: a number above 0 and at most {most:g}, in digits from 0 to 9"
        )

    return number


CHOICES = {
    "size": tuple(MODEL_SIZES), "context_length": range(2, 2**20), "sequences": range(1, 2**16), "dtype": DTYPES[1:],
    "compile": COMPILE, "cap_gib": range(1025), "minutes": _number("minutes", 1440),
    "train_mb": _number("train_mb", 1e6),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run of `minutes` of steps, on `train_mb` megabytes of stories. cap_gib: 0: all of the GPU's memory. `repeat` 1
    makes the same run again."""

    size: str = "small"
    context_length: int = 2048
    sequences: int = 16
    dtype: str = "bf16"
    compile: str = "whole"
    cap_gib: int = 0
    minutes: float = 8.0
    train_mb: float = 1260.0
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """`small` on a GPU, and again in fp16 under the cap of a small one; or seconds of a tiny model."""
    if preset == "smoke":
        return [Case("tiny", 64, 16, "fp32", "off", minutes=0.05, train_mb=0.2)]
    return [Case(), Case("small", 512, 32, "fp16", "blocks", cap_gib=CAP_GIB, minutes=1.0, train_mb=60.0)]


def configuration(case: Case, folder: str) -> TrainingConfig:
    """The training configuration of a case."""
    small = case.size in ("mini", "tiny")
    return load(None, {
        "out": folder, "text.train_mb": case.train_mb, "tokenizer.vocab_size": 512 if case.size == "tiny" else 2048,
        "text.valid_mb": 0.05 if small else 0.5, "model.size": case.size, "model.context_length": case.context_length,
        "batch.sequences": case.sequences, "schedule.minutes": case.minutes, "run.dtype": case.dtype,
        "run.compile": case.compile, "evaluation.every": 100, "logging.every": 10,
    })  # fmt: skip


def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Makes the run of each case in a fresh process."""
    found = []
    for case in cases:
        metrics: dict[str, Any] = {}
        with failure_is_a_row(metrics):
            refuse(case)
            portable = {"CS336_HOPPER": "0"} if case.cap_gib else {}
            metrics = process.call(
                f"{__name__}:on_its_own", {"case": asdict(case)}, timeout_s=600 + 120 * case.minutes + case.train_mb,
                environment=portable,
            )  # fmt: skip
        found.append(metrics)
    return found


def refuse(case: Case) -> None:
    """Raises `Skip` where this machine cannot make the run."""
    if not machine.gpu_names() and (case.cap_gib or case.dtype == "tf32" or case.compile == "graphs"):
        raise Skip("needs a CUDA device")
    if case.compile != "off" and not machine.gpu_names() and machine.cpp_compiler() is None:
        raise Skip("needs a C++ compiler")


def on_its_own(case: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a run, made in this process."""
    import torch

    from cs336_systems.training import pipeline
    from cs336_systems.training.loop import Trainer
    from cs336_systems.training.tokens import end_of_text, load_tokenizer

    wanted, metrics = Case(**case), {}
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder, failure_is_a_row(metrics):
        config = configuration(wanted, folder)
        with capped(wanted.cap_gib, "cuda" if torch.cuda.is_available() else "cpu"):
            trainer = Trainer(config, pipeline.prepare(config, lambda line: None))
            tokenizer = load_tokenizer(Path(folder) / "tokens" / "tokenizer.json")

            def written() -> str:
                how = Generation(temperature=0.8, top_p=0.95, tokens=120)
                return plain(
                    *pipeline.written(trainer.model, tokenizer, end_of_text(tokenizer), [PROMPT], how)
                )

            before = written()
            result = trainer.run()
            metrics |= {"prompt": PROMPT, "before": before, "after": written(), **_told(trainer, result)}
    return metrics


def plain(text: str) -> str:
    """A text on one line, with a question mark for what is no ASCII character: of untrained models bytes at random."""
    words = " ".join(text.encode("ascii", "replace").decode().split())
    return "".join(c if c.isprintable() else "?" for c in words)


def _told(trainer: Any, result: dict[str, Any]) -> dict[str, Any]:
    from cs336_systems.training.log import read

    lines = read(trainer.out / "log.csv")
    steps = [line for line in lines if line["loss"]]
    valid = [line for line in lines if line["valid_loss"]]
    kept = steps[:: -(-len(steps) // POINTS)]
    speed = sorted(float(line["tokens_per_s"]) for line in steps)[len(steps) // 2]
    told = {
        "steps": result["step"], "tokens": result["tokens"], "seconds": result["seconds"], "tokens_per_s": speed,
        "mfu": trials.mfu(trainer.sizes, trainer.dtype, speed) if trainer.device != "cpu" else None,
        "peak_gib": max((float(line["peak_gib"]) for line in steps if line["peak_gib"]), default=None),
        "skipped_steps": trainer.skipped_steps() if trainer.dtype == "fp16" else None,
        "vocab_size": trainer.data.vocab_size, "valid_loss": result["valid_loss"],
        "bits_per_byte": result["bits_per_byte"], "floor": result["floor"],
        "floor_bits_per_byte": trainer.bits_per_byte(result["floor"]),
    }  # fmt: skip
    for name, chosen, column in (
        ("loss_tokens", kept, "tokens"), ("losses", kept, "loss"), ("valid_tokens", valid, "tokens"),
        ("valid_losses", valid, "valid_loss"),
    ):  # fmt: skip
        told[name] = " ".join(f"{float(line[column]):.6g}" for line in chosen)
    by_step = {line["step"]: line["seconds"] for line in lines if line["seconds"]}
    told["valid_seconds"] = " ".join(f"{float(by_step.get(line['step'], 'nan')):.5g}" for line in valid)
    return told


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS, choices=CHOICES)
