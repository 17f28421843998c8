"""What a run tells while it trains: log.csv, lines or a progress bar, other trackers if asked for, a loss curve."""

from __future__ import annotations

import contextlib
import csv
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cs336_systems.store import files
from cs336_systems.store.machine import has_module
from cs336_systems.training.config import Logging, TrainingConfig

COLUMNS = (
    "step", "tokens", "epoch", "seconds", "loss", "valid_loss", "bits_per_byte", "learning_rate", "grad_norm",
    "tokens_per_s", "mfu", "peak_gib", "skipped_steps",
)  # fmt: skip
"""loss and valid_loss in nats a token; seconds of training: evaluation, checkpoints and the first step, which compiles,
left out; skipped_steps: those that fp16's gradient scaling has skipped so far."""
_SAID = {
    "loss": "loss {:.4f}", "valid_loss": "valid {:.4f}", "bits_per_byte": "{:.4f} bits/byte",
    "grad_norm": "grad norm {:.2f}", "tokens_per_s": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}", "peak_gib": "{:.1f} GiB",
}  # fmt: skip


def check_trackers(told: Logging) -> None:
    """ValueError, in a line, for a tracker that is asked for and not installed, and for wandb without a login."""
    for name, asked in (("tensorboard", told.tensorboard), ("wandb", told.wandb)):
        if asked and not has_module(name):
            raise ValueError(f"logging.{name} needs a package: pip install 'cs336-systems[{name}]'")
    if told.wandb:
        advice = " (`wandb login` once, or WANDB_MODE=offline in the environment)"
        with files.in_a_line(f"logging.wandb={told.wandb!r}", advice):
            from wandb import login

            login()


class RunLog:
    """Writes the lines of one run. `step`: of the checkpoint that the run resumes from; later lines are dropped, and
    the trackers, of which `check_trackers` knows whether they can begin, go on with the run that they know: that of
    Weights & Biases is kept in wandb.txt. total: steps of the whole run, where they are known."""

    def __init__(self, config: TrainingConfig, step: int = 0, total: int | None = None) -> None:
        out, project = Path(config.out), config.logging.wandb
        self.file = out / "log.csv"
        lines = [row for row in read(self.file) if int(row["step"]) <= step]
        self._board = self._wandb = None
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
        if project:
            from wandb import init

            known = out / "wandb.txt"
            if not (step and known.is_file()):
                files.replace({known: secrets.token_hex(4)})
            told = {"project": project, "dir": str(out), "config": config.to_dict()}
            self._wandb = init(**told, id=known.read_text(encoding="utf-8").strip(), resume="allow")
            # offline, of several parts of a run the one that is sent last replaces the others: it tells all
            for row in lines if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled") else ():
                numbers = {name: float(text) for name, text in row.items() if text}
                self._wandb.log(numbers, step=int(numbers.pop("step")))
        cells = [COLUMNS, *(row.values() for row in lines)]
        files.replace({self.file: "".join(f"{','.join(row)}\n" for row in cells)})
        # None: on a terminal alone
        self._bar = tqdm(total=total, initial=step, unit="step", smoothing=0.05, disable=None)

    def row(self, values: Mapping[str, Any]) -> None:
        """Adds the line of a step: values by COLUMNS."""
        with files.naming("write", self.file), open(self.file, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(values)
        step = values["step"]
        known = {name: value for name, value in values.items() if value is not None and name != "step"}
        for name, value in known.items() if self._board else ():
            self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(known, step=step)
        said = ", ".join(form.format(known[name]) for name, form in _SAID.items() if name in known)
        if self._bar.disable:
            print(f"step {step}, {said}", flush=True)
        else:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(said)

    def close(self) -> None:
        """Ends the bar and the other writers."""
        self._bar.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


@contextlib.contextmanager
def recording(out: Path, count: int) -> Iterator[Callable[[], None]]:
    """What to call after each step, for a trace of `count` steps after the tenth: trace.json.gz in `out`."""
    from torch.profiler import profile, schedule

    plan = schedule(skip_first=10, wait=0, warmup=1, active=count, repeat=1)
    write = lambda found: found.export_chrome_trace(str(out / "trace.json.gz"))
    with profile(schedule=plan, on_trace_ready=write) as recorder:
        yield recorder.step
    if recorder.step_num <= 11:  # the eleventh warms up
        print(f"run.profile={count}: no trace of {recorder.step_num} steps; it needs 12", flush=True)


# ------------------------------------------------------------------------------------------------------------- reading
def read(file: Path) -> list[dict[str, str]]:
    """The lines of a log, as texts; none where there is no log. ValueError for a file that is none."""
    if not file.is_file():
        return []
    with files.reading(file), open(file, newline="", encoding="utf-8") as opened:
        reader = csv.DictReader(opened)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"its columns are {reader.fieldnames}")
        # without what a crash has cut off
        rows = [row for row in reader if None not in row.values() and row["step"].isdecimal()]
        for row in rows:
            list(map(float, filter(None, row.values())))
    return rows


def picture(out: Path, floor: float | None = None) -> None:
    """Draws loss.svg beside log.csv: training and validation loss by tokens, and the text's entropy if it is known."""
    from matplotlib.figure import Figure

    lines = read(out / "log.csv")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    ax = figure.add_subplot()
    for name, label, style in (("loss", "training", "-"), ("valid_loss", "held out", "o-")):
        told = [line for line in lines if line[name]]
        x, y = [int(line["tokens"]) for line in told], [float(line[name]) for line in told]
        ax.plot(x, y, style, markersize=4, linewidth=1.2, label=label)
    if floor is not None:
        ax.axhline(floor, color="#222222", linestyle="--", linewidth=1, label="entropy of the text")
    ax.set(xlabel="training tokens", ylabel="loss, nats a token")
    ax.legend(frameon=False)
    with files.naming("write", out / "loss.svg"):
        figure.savefig(out / "loss.svg", metadata={"Date": None})
