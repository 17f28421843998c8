"""A timed run for small or old GPUs: batch and length chosen from the memory forecast, ending in text.

    plan = choose(minutes=20, out="runs/speedrun")      # for this machine
    print(plan.command)                                 # the same on torchrun's ranks
    run(plan)

    install(root)                                       # what a notebook's machine lacks

On a GPU without bf16 it trains in fp16 with loss scaling; several GPUs share each step's sequences, and the optimizer's
state. On a CPU it is a run of seconds or minutes that shows that all parts work.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.store import files
from cs336_systems.store.files import alone, make_folder
from cs336_systems.training.config import MODEL_SIZES, TrainingConfig, load
from cs336_systems.training.forecast import largest_batch, what_fits

T4_GIB = 14.7  # what a T4 of 16 GB calls its memory
CONTEXTS = (512, 256, 128)  # the longest that fits is taken
SHOWN_CONTEXTS = (256, 512, 1024)
STEP_TOKENS = 2**15  # of all GPUs together
_MB_PER_MINUTE, _LEAST_MB, _MOST_MB = 15.0, 1.0, 400.0
_VOCAB = 2048
# of the package's dependencies those that training and its pages need; triton comes with torch where there is a GPU
NEEDED = ("torch", "numpy", "pandas", "matplotlib", "tabulate", "typer", "tqdm", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Plan:
    """What is going to be trained. gib: memory of a GPU, 0 on a CPU; fits: the most sequences that a GPU can take at
    once."""

    config: TrainingConfig
    gib: float
    ranks: int
    fits: int

    @property
    def file(self) -> Path:
        """Where `write` puts the configuration."""
        return Path(self.config.out) / "speedrun.json"

    @property
    def command(self) -> str:
        """What starts the same run under torchrun."""
        start = f"torchrun --standalone --nproc-per-node {self.ranks}"
        return f"{start} -m cs336_systems train --config {shlex.quote(str(self.file))}"


def here() -> tuple[float, int, str]:
    """Memory of this machine's smallest GPU in GiB, how many there are, and the dtype they train in; 0, 1 and fp32
    without one."""
    import torch

    from cs336_systems.training import modes

    if not torch.cuda.is_available():
        return 0.0, 1, "fp32"
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(memory) / 2**30, len(memory), modes.dtype_of("auto", "cuda")


def choose(
    minutes: float, out: str, size: str = "auto", gib: float = 0.0, ranks: int = 0, dtype: str = "auto"
) -> Plan:
    """The plan of a run of so many minutes of steps. size "auto": `small` on a GPU, `mini` on a CPU. gib, ranks, dtype:
    of other GPUs than this machine's, to know beforehand; 0 and "auto": as `here`.

    ValueError for values that make no sense, and where not one sequence fits; it names what does.
    """
    if not 0 < minutes <= 1440:
        raise ValueError(f"minutes={minutes:g}; it must be above 0 and at most 1440")
    if not 0 <= gib <= 1e6 or not 0 <= ranks <= 1024:
        raise ValueError(f"gib={gib:g}, ranks={ranks}; allowed: gib from 0 to 1e6, ranks from 0 to 1024")
    if size not in ("auto", *MODEL_SIZES):
        raise ValueError(f"size={size!r}; allowed: auto, {', '.join(MODEL_SIZES)}")
    if not (gib and ranks and dtype != "auto"):
        gib_here, ranks_here, dtype_here = here()
        gib, ranks, dtype = gib or gib_here, ranks or ranks_here, dtype_here if dtype == "auto" else dtype
    size = size if size != "auto" else "small" if gib else "mini"
    context, fits = _longest(size, gib, ranks, dtype) if gib else (128, 16)
    at_once = min(fits, max(1, STEP_TOKENS // (ranks * context))) if gib else max(1, fits // ranks)
    accumulate = max(1, STEP_TOKENS // (at_once * ranks * context)) if gib else 1
    config = load(None, {
        "out": out, "model.size": size, "model.context_length": context, "tokenizer.vocab_size": _VOCAB,
        "text.train_mb": min(max(_MB_PER_MINUTE * minutes, _LEAST_MB), _MOST_MB if gib else 8.0),
        "text.valid_mb": 0.5 if gib else 0.1, "schedule.minutes": minutes,
        "batch.sequences": at_once * ranks * accumulate, "batch.accumulate": accumulate, "run.dtype": dtype,
        "run.compile": "blocks" if gib else "off", "parallel.nproc": ranks, "optimizer.sharded": ranks > 1,
        "logging.every": 20 if gib else 5, "evaluation.every": 100, "checkpoints.every": 1000,
        "checkpoints.resume": "auto",
    })  # fmt: skip
    return Plan(config, gib, ranks, fits)


def _longest(size: str, gib: float, ranks: int, dtype: str) -> tuple[int, int]:
    for context in CONTEXTS:
        if most := largest_batch(size, context, gib, dtype, _VOCAB, ranks):
            return context, most
    able = [name for name in MODEL_SIZES if largest_batch(name, CONTEXTS[-1], gib, dtype, _VOCAB, ranks)]
    raise ValueError(f"size={size!r} does not fit {gib:.3g} GiB; allowed: {', '.join(able) or 'no size'}")


def told(plan: Plan) -> Iterator[str]:
    """Lines: what fits by size, length and batch, what was chosen, and the command for torchrun."""
    config, gib = plan.config, plan.gib or T4_GIB
    dtype = config.run.dtype if plan.gib else "fp16"
    yield f"on a GPU with {gib:.1f} GiB, in {dtype}: the most sequences a step, and the GiB they need"
    yield f"  {'size':8}" + "".join(f"{n:>7} tokens" for n in SHOWN_CONTEXTS)
    for size in MODEL_SIZES:
        lines = what_fits(gib, (size,), SHOWN_CONTEXTS, dtype)
        cells = [f"{line['sequences'] or '-'} ({line['gib']:.1f})" for line in lines]
        yield f"  {size:8}" + "".join(f"{cell:>14}" for cell in cells)
    where = f"{plan.ranks} GPU{'s' * (plan.ranks > 1)}" if plan.gib else "the CPU"
    yield (
        f"chosen: {config.model.size} on {where} in {config.run.dtype}, {config.batch.sequences} sequences of "
        f"{config.model.context_length} tokens a step in {config.batch.accumulate} part"
        f"{'s' * (config.batch.accumulate > 1)}, {config.schedule.minutes:g} minutes"
    )
    yield f"under torchrun: {plan.command}"


def run(plan: Plan, say: Any = print) -> dict[str, Any]:
    """Trains, and writes what the model then writes; as `pipeline.train`, in `config.out`."""
    from cs336_systems.training import pipeline

    return pipeline.train(plan.config, say, lambda: _write(plan))


def write(plan: Plan) -> None:
    """The configuration as a file, which the plan's command reads. ValueError where a run is writing beside it."""
    make_folder("--out", plan.file.parent)
    with alone(plan.file.parent):
        _write(plan)


def _write(plan: Plan) -> None:
    files.replace({plan.file: json.dumps(plan.config.to_dict(), indent=1) + "\n"})


# ------------------------------------------------------------------------------------------------ where it runs
def missing(root: Path) -> list[str]:
    """The requirements among NEEDED, by `pyproject.toml` of a checkout, that are not met: not there, or too old."""
    from packaging.requirements import Requirement  # a notebook's kernel needs it too

    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lacking = []
    for needed in map(Requirement, declared):
        if needed.name in NEEDED:
            there = [d.version for d in importlib.metadata.distributions(name=needed.name)]
            if not there or not needed.specifier.contains(there[0], prereleases=True):
                lacking.append(f"{needed.name}{needed.specifier}")
    return lacking


def install(root: Path, say: Any = print) -> None:
    """Installs by pip what is missing, and lets this process and its children import the checkout's package."""
    if lacking := missing(root):
        say(f"installing {', '.join(lacking)}")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *lacking], check=True)
    sys.path[:0] = [str(root)] * (str(root) not in sys.path)
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("CS336_RESULTS", str(root / "results"))


def asked(train: str) -> bool:
    """Whether a notebook is to train: "yes", "no", or "auto", which is no while the book is built. ValueError for other
    words."""
    # papermill makes booleans of some words
    answers = {"yes": True, "true": True, "no": False, "false": False}
    answers["auto"] = os.environ.get("CS336_BOOK_BUILD") != "1"
    if (word := str(train).lower()) not in answers:
        raise ValueError(f"train={train!r}; allowed: auto, yes, no")
    return answers[word]
