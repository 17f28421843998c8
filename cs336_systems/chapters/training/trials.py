"""No table: short real training runs on stories, one after another on the same ranks: what chapter `training` compares.

A trial is a `training.loop.Trainer` that makes some steps and writes nothing. All trials of a group begin with the same
weights and see the same tokens, so their losses can be held against each other. A time is that of a whole step: batch,
both passes, communication, clipping, update; begun by all ranks at once, ended when the slowest one's device has. Each
turn builds its trainer anew, so that no trial holds memory of another. Wrapper "none" is rank 0 alone while the other
ranks wait: what several ranks are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cs336_systems import accounting
from cs336_systems.attention.registry import IMPLEMENTATIONS, availability
from cs336_systems.chapters.shared import on_ranks
from cs336_systems.chapters.shared.needs import need_gpus, need_memory
from cs336_systems.measure.clocks import ranks
from cs336_systems.measure.clocks.ranks import RankSteps
from cs336_systems.measure.clocks.turns import Candidate, Phases, columns, take_turns, time_together
from cs336_systems.measure.device import give_back
from cs336_systems.sizes import ModelConfig
from cs336_systems.store import machine
from cs336_systems.store.status import Skip
from cs336_systems.training import forecast
from cs336_systems.training.config import MODEL_SIZES, TrainingConfig, load

if TYPE_CHECKING:
    from cs336_systems.launch.group import Rank
    from cs336_systems.training.batches import Data

METRICS = (
    *columns("step"), "first_step_s", "tokens_per_s", "mfu", "peak_gib", "epoch_s", "loss_last", "losses",
    "vocab_size", "backend", "sm_mhz", "power_w",
)  # fmt: skip
"""first_step_s: of the first step, which compiles; epoch_s: of one pass over EPOCH_MB of stories at this speed; losses:
of every step, in nats a token; loss_last: the mean of the last LAST of them; backend: what ranks communicate by."""
COMPILED_PLAIN = "reference_compiled"  # plain attention under torch.compile, the rest of the model eager
ATTENTIONS = (*IMPLEMENTATIONS, COMPILED_PLAIN)
WARMUP = 3
# the highest learning rate, and the share of the steps in which it rises: at the trainer's own, higher and reached in a
# few steps, training magnifies rounding until two runs of the same program part visibly
LEARNING_RATE, RISING = 6e-4, 0.5
EPOCH_MB = 1000.0
LAST = 5
_TEXT_MB, _SMALL_TEXT_MB = 8.0, 0.2
_SMALL = ("mini", "tiny")
_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
_TIMEOUT_S, _COLLECTIVE_TIMEOUT_S = 3600.0, 300.0  # a rank may wait for another one that compiles
_STEP_S = 2.0  # more for each step that is asked for


def shape(size: str, **own: int) -> str:
    """What `Case.size` calls a model: one of MODEL_SIZES, or, where some of d_model, d_ff, num_layers, num_heads and
    vocab_size are not 0, all of them in this order, as in 512x2048x8x8x10000. ValueError where they do not fit."""
    if not any(own.values()):
        return size
    sizes = dataclasses.replace(
        MODEL_SIZES[size],
        **{"vocab_size": _vocab_size(size)} | {name: value for name, value in own.items() if value},
    )
    return "x".join(str(getattr(sizes, name)) for name in _SHAPE)


def model(size: str) -> ModelConfig:
    """The model of a `Case.size`."""
    if size in MODEL_SIZES:
        return dataclasses.replace(MODEL_SIZES[size], vocab_size=_vocab_size(size))
    return ModelConfig(**dict(zip(_SHAPE, map(int, size.split("x")), strict=True)))


def _vocab_size(size: str) -> int:
    return 512 if size in _SMALL else 2048


def configuration(case: Any, folder: str, device: str = "auto") -> TrainingConfig:
    """The training configuration of a case, which has `size`, `context_length`, `sequences` (of a step, all ranks
    together), `attention` (one of ATTENTIONS, or "auto"), `dtype`, `compile`, `wrapper`, `sharded` and `steps`."""
    small, sizes = case.size in _SMALL, model(case.size)
    named = case.size if case.size in MODEL_SIZES else "tiny"
    alone = case.attention == COMPILED_PLAIN and case.compile == "off"
    return load(None, {
        "out": folder, "text.train_mb": _SMALL_TEXT_MB if small else _TEXT_MB, "text.valid_mb": 0.05,
        "tokenizer.vocab_size": sizes.vocab_size, "model.size": named,
        "model.d_model": sizes.d_model, "model.d_ff": sizes.d_ff, "model.num_layers": sizes.num_layers,
        "model.num_heads": sizes.num_heads,
        "model.context_length": case.context_length,
        "model.attention": "reference" if case.attention == COMPILED_PLAIN else case.attention,
        "batch.sequences": case.sequences, "schedule.steps": case.steps + WARMUP, "schedule.warmup": RISING,
        "optimizer.learning_rate": LEARNING_RATE, "run.device": device,
        "run.dtype": case.dtype, "run.compile": "attention" if alone else case.compile,
        "parallel.wrapper": case.wrapper, "optimizer.sharded": case.sharded,
    })  # fmt: skip


def predicted_gib(case: Any, device: str = "cuda") -> float | None:
    """The peak of a rank's tensors by the closed forms; None for compiled code, which they do not describe."""
    if case.compile != "off" or case.attention == COMPILED_PLAIN:
        return None
    config, size = configuration(case, "unused"), 1 if case.wrapper == "none" else case.world_size
    return forecast.memory_bytes(config, case.dtype, device, size) / 2**30


def refuse(case: Any) -> None:
    """Raises `Skip` where this machine cannot run the case, and says what it needs."""
    on_gpus = bool(machine.gpu_names())
    if on_gpus:
        need_gpus(case.world_size)
    if case.wrapper == "none" and case.sharded:
        raise Skip("needs several ranks to spread the optimizer's state over")
    name = "reference" if case.attention == COMPILED_PLAIN else case.attention
    if name != "auto" and (reason := availability()[name]):
        raise Skip(f"needs another machine: {reason}")
    if on_gpus:
        return
    if case.dtype == "tf32" or case.compile == "graphs" or name == "flash_triton":
        raise Skip("needs a CUDA device")
    if (case.compile != "off" or case.attention == COMPILED_PLAIN) and machine.cpp_compiler() is None:
        raise Skip("needs a C++ compiler")
    needed = predicted_gib(case, "cpu")
    need_memory(None if needed is None else case.world_size * needed * 2**30)


def measure(cases: Sequence[Any], rounds: int = 1) -> list[dict[str, Any]]:
    """The metrics of the cases of one number of ranks: in one launch, `rounds` turns of each."""
    names = [field.name for field in dataclasses.fields(Trial)]
    trials = [Trial(**{name: getattr(case, name) for name in names}) for case in cases]  # some are properties
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        return on_ranks.measured(
            f"{__name__}:on_a_rank", trials, refuse, arguments={"folder": folder, "rounds": rounds},
            timeout_s=_TIMEOUT_S + _STEP_S * rounds * sum(trial.steps for trial in trials),
            collective_timeout_s=_COLLECTIVE_TIMEOUT_S,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ on a rank
def on_a_rank(rank: Rank, cases: list[dict[str, Any]], folder: str, rounds: int) -> list[dict[str, Any]]:
    """The metrics of each case, the same on all ranks."""
    from cs336_systems.training import pipeline

    trials = [Trial(**case) for case in cases]
    data = pipeline.prepare(configuration(trials[0], folder), lambda line: None)
    candidates = [Candidate(trial) for trial in trials]
    for candidate in candidates:
        candidate.phases = functools.partial(_turn, candidate, rank, data, folder)
    clock = RankSteps(rank, warmup=WARMUP - 1, steps=trials[0].steps, num_rounds=rounds)
    if rank.world_size == 1:
        time_together(candidates, clock, lambda: give_back(rank.device))
    else:  # one that fails must not leave the others waiting: then all end
        for candidate, samples in take_turns({c: c.phases for c in candidates}, clock).items():
            candidate.samples = samples
    for candidate in candidates:
        if candidate.ok:
            candidate.metrics |= _metrics(candidate, rank, data)
            print(f"{candidate.case.turn}: {candidate.samples.p50('step'):.4g} ms", flush=True)
    return ranks.gathered([candidate.metrics for candidate in candidates], rank)[0]  # rank 0 reads the clocks


@dataclasses.dataclass(frozen=True)
class Trial:
    """A case as ranks are told of it."""

    attention: str
    dtype: str
    compile: str
    wrapper: str
    sharded: bool
    sequences: int
    size: str
    context_length: int
    world_size: int
    steps: int
    repeat: int

    @property
    def turn(self) -> str:
        """As for `on_ranks.begin_turn`."""
        parts = (self.attention, self.dtype, f"compile {self.compile}", self.wrapper)
        return ", ".join((*parts, *["sharded"] * self.sharded, *["again"] * self.repeat))


@contextlib.contextmanager
def _turn(candidate: Candidate, rank: Rank, data: Data, folder: str) -> Iterator[Phases]:
    """One turn of a trial: its trainer built and its first step made; then timed; its losses and memory noted."""
    import torch

    from cs336_systems.training.loop import Trainer

    on_ranks.begin_turn(rank, candidate.case)
    trial, metrics, on_gpu = candidate.case, candidate.metrics, rank.device != "cpu"
    alone = trial.wrapper == "none"
    config = configuration(trial, folder, rank.device.split(":")[0])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # while one works alone, the others have nothing to do
    trainers = [] if alone and rank.rank > 0 else [Trainer(config, data, None if alone else rank)]
    losses: list[torch.Tensor] = []

    def step() -> None:
        for trainer in trainers:
            trainer.train_step()
            losses.append(trainer.loss)

    phases = {"whole": step}
    first = take_turns({"": phases}, RankSteps(rank, warmup=0, steps=1, watched=False))[""]
    yield phases
    if on_gpu:
        peak = max(ranks.gathered(torch.cuda.max_memory_allocated(), rank)) / 2**30
        metrics["peak_gib"] = max(peak, metrics.get("peak_gib", 0))
    everyones = [told for told in ranks.gathered([loss.item() for loss in losses], rank) if told]
    if "losses" not in metrics:  # in its first turn
        means = [statistics.fmean(values) for values in zip(*everyones, strict=True)]
        metrics |= {
            "first_step_s": first.p50("step") / 1e3, "loss_last": statistics.fmean(means[-LAST:]),
            "losses": " ".join(f"{x:.5g}" for x in means),
        }  # fmt: skip
    trainers.clear()
    # only this gives back the memory of CUDA graphs; blocks of the next trainer take what was compiled for the last's
    if trial.compile in ("whole", "graphs"):
        torch._dynamo.reset()
    give_back(rank.device)


def mfu(config: ModelConfig, dtype: str, tokens_per_s: float, num_gpus: int = 1) -> float | None:
    """Model FLOPs utilization of training at a speed, by the data sheet; None on a CPU, or a GPU that is not known."""
    names = machine.gpu_names()
    known = accounting.peaks(names[0]) if names else None
    tflops = known.tflops.get(dtype) if known else None
    if not tflops:
        return None
    ms = config.context_length / tokens_per_s * 1e3  # of one sequence
    return accounting.mfu(config, 1, config.context_length, "train_step", ms, tflops * num_gpus)


def _metrics(candidate: Candidate, rank: Rank, data: Data) -> dict[str, Any]:
    trial, samples = candidate.case, candidate.samples
    tokens_per_s = trial.sequences * trial.context_length / samples.p50("step") * 1e3
    config = configuration(trial, "unused").model.sizes(data.vocab_size)
    epoch_tokens = EPOCH_MB * 1e6 * len(data.valid) / data.valid_bytes
    busy = 1 if trial.wrapper == "none" else rank.world_size
    return samples.row("step") | samples.clocks() | {
        "tokens_per_s": tokens_per_s,
        "mfu": None if rank.device == "cpu" else mfu(config, trial.dtype, tokens_per_s, busy),
        "epoch_s": epoch_tokens / tokens_per_s, "vocab_size": data.vocab_size, "backend": rank.backend,
    }  # fmt: skip
