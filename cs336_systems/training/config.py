"""Everything that a training run can be told: `TrainingConfig`, frozen dataclasses in sections. Needs no torch.

    config = load("run.toml", {"optimizer.learning_rate": "3e-4", "model.size": "small"})

A file is TOML or JSON with these sections and keys; what it leaves out has its default. A wrong key or value is a
ValueError that names both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs336_systems.attention.registry import IMPLEMENTATIONS, serving
from cs336_systems.sizes import SIZES, ModelConfig
from cs336_systems.store import numbers
from cs336_systems.store.files import read_json, read_text

WRAPPERS = ("none", "naive", "flat", "overlapped", "bucketed", "in_place", "torch")
"""That leave whole weights on every rank."""
ALL_WRAPPERS = (*WRAPPERS, "fsdp")
READY = (".npy", ".bin")  # of a text that is token ids already
DTYPES = ("auto", "fp32", "tf32", "bf16", "fp16")
COMPILE = ("off", "attention", "blocks", "whole", "graphs")
RECOMPUTE = ("none", "blocks", "selective")
# the handout's sizes, and one that learns to tell stories in minutes on two CPU cores
MODEL_SIZES = {"mini": ModelConfig(d_model=128, d_ff=384, num_layers=4, num_heads=4), **SIZES}
_LARGEST = 2**53  # what JSON and TOML readers agree on


def _key(default: Any, about: str, *allowed: str) -> Any:
    """Any value of the default's kind, or one of those allowed."""
    return field(default=default, metadata={"about": about} | ({"allowed": allowed} if allowed else {}))


def _number(default: float, least: float, about: str, most: float = _LARGEST, above: bool = False) -> Any:
    """A number from `least` (or `above` it) to `most`."""
    return field(default=default, metadata={"least": least, "most": most, "above": above, "about": about})


# --------------------------------------------------------------------------------------------------- sections
@dataclass(frozen=True)
class Text:
    """What is learned."""

    source: str = _key("stories", "stories, tinystories, random, or a path: text, .jsonl, folder, .npy, .bin")
    valid: str = _key("", "a path of the same kind to hold out; empty: some of the source")
    documents: str = _key("stream", "in a sequence; packed: none sees another", "stream", "packed")
    field: str = _key("text", "of a line of .jsonl, which holds the text")
    train_mb: float = _number(8.0, 0, "MB of stories or random tokens; of other texts the most (0: all)")
    valid_mb: float = _number(0.5, 0, "the same, held out for evaluation", above=True)
    seed: int = _number(0, 0, "of the stories, of random tokens, of which documents are held out")
    cache: str = _key("", "folder of texts that runs share; empty: text/ in the run's own")


@dataclass(frozen=True)
class Tokenizer:
    """Bytes to tokens."""

    vocab_size: int = _number(2048, 257, "tokens: 256 bytes, one end of text, the rest learned", most=2**32)
    path: str = _key("", "a tokenizer.json to use instead of training one")
    separator: str = _key("", "its token after each document; empty: <|endoftext|>, or what it has for that")
    dtype: str = _key("uint16", "of the ids in a ready .bin file", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True)
class Model:
    """The Transformer: a named size, and what differs from it (0: as the size has it)."""

    size: str = _key("mini", "what it is called", *MODEL_SIZES)
    context_length: int = _number(256, 1, "tokens of a sequence")
    d_model: int = _number(0, 0, "width of the residual stream")
    d_ff: int = _number(0, 0, "inner width of the SwiGLU")
    num_layers: int = _number(0, 0, "blocks")
    num_heads: int = _number(0, 0, "attention heads of a block")
    num_kv_heads: int = _number(0, 0, "heads of keys and values, for groups of the others; 0: as many")
    attention: str = _key("auto", "`cs336 doctor` says which are here", "auto", *IMPLEMENTATIONS)

    def sizes(self, vocab_size: int) -> ModelConfig:
        """The model's hyperparameters; ValueError where they do not fit together."""
        names = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads")
        changed = {name: value for name in names if (value := getattr(self, name))}
        return dataclasses.replace(
            MODEL_SIZES[self.size], vocab_size=vocab_size, context_length=self.context_length, **changed
        )


@dataclass(frozen=True)
class Optimizer:
    """torch's AdamW, fused, without weight decay on norms and embeddings."""

    learning_rate: float = _number(0.0, 0, "at its highest; 0: 6e-3 to width 128, less beyond it", most=10)
    beta1: float = _number(0.9, 0, "decay of the first moment", most=0.9999999)
    beta2: float = _number(0.95, 0, "decay of the second moment", most=0.9999999)
    eps: float = _number(1e-8, 0, "added to the root of the second moment", most=1)
    weight_decay: float = _number(0.1, 0, "decoupled, of matrices", most=10)
    clip: float = _number(1.0, 0, "largest norm of all gradients together; 0: any")
    sharded: bool = _key(False, "spread its state over the ranks (ZeRO stage 1)")


@dataclass(frozen=True)
class Schedule:
    """How long, and how the learning rate moves. One of steps, tokens, epochs and minutes is the length; 5 minutes,
    where none is given."""

    steps: int = _number(0, 0, "optimizer steps")
    tokens: int = _number(0, 0, "training tokens, all ranks together")
    epochs: float = _number(0.0, 0, "passes over the training text")
    minutes: float = _number(
        0.0, 0, "time of its steps; the first one, evaluation and checkpoints come on top"
    )
    kind: str = _key("cosine", "after the warm-up", "cosine", "constant")
    warmup: float = _number(0.05, 0, "share of the length in which the learning rate rises", most=1)
    floor: float = _number(0.1, 0, "share of the learning rate that a cosine ends at", most=1)

    @property
    def length(self) -> tuple[str, float]:
        """The name and value of the one that is set."""
        return next((name, getattr(self, name)) for name in LENGTHS if getattr(self, name))


LENGTHS = ("steps", "tokens", "epochs", "minutes")


@dataclass(frozen=True)
class Batch:
    """What one optimizer step sees. It does not depend on the number of ranks."""

    sequences: int = _number(8, 1, "sequences of a step, all ranks and microbatches together")
    accumulate: int = _number(1, 1, "microbatches a step")
    seed: int = _number(0, 0, "of the order of the sequences")


@dataclass(frozen=True)
class Run:
    """How it is computed."""

    device: str = _key("auto", "auto: a GPU where there is one", "auto", "cpu", "cuda")
    dtype: str = _key("auto", "auto: bf16 on GPUs that have it, fp16 on older ones, fp32 on a CPU", *DTYPES)
    compile: str = _key("off", "of attention, of each block, of all; of all with CUDA graphs", *COMPILE)
    recompute: str = _key("none", "what backward computes again: blocks, or their cheap parts", *RECOMPUTE)
    seed: int = _number(0, 0, "of the weights")
    deterministic: bool = _key(False, "the same bits in every run on a GPU")
    profile: int = _number(0, 0, "steps to record a trace of, after ten")


@dataclass(frozen=True)
class Parallel:
    """Several ranks."""

    nproc: int = _number(1, 1, "processes to start; under torchrun it is torchrun that says", most=1024)
    wrapper: str = _key(
        "in_place", "averages gradients; none of one rank; fsdp shards weights", *ALL_WRAPPERS
    )
    bucket_mb: float = _number(25.0, 0, "of bucketed, in_place and torch", most=10**6, above=True)
    timeout_s: float = _number(600.0, 1, "after which a collective that hangs ends the run", most=10**8)


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text."""

    every: int = _number(200, 0, "steps; 0: at the end only")
    tokens: int = _number(65536, 0, "of the held-out text each time; 0 and the last time: all", most=_LARGEST)


@dataclass(frozen=True)
class Checkpoints:
    """What is saved, beside the last step, which always is."""

    every: int = _number(0, -_LARGEST, "steps; 0: by time alone; less: the last only")
    minutes: float = _number(10.0, 0, "longest time between them, to a line of the log; 0: by steps alone")
    keep: int = _number(2, 1, "the newest so many")
    best: bool = _key(False, "keep the one of the lowest validation loss as well")
    resume: str = _key("no", "no, auto (the newest sound one of this run, if any), or a checkpoint's path")
    resume_changed: bool = _key(False, "go on though settings that change the run are others by now")
    init_from: str = _key("", "a checkpoint, run, .safetensors or .pt file whose weights are the first")


@dataclass(frozen=True)
class Logging:
    """What is written while it runs; log.csv always is."""

    every: int = _number(20, 1, "steps between lines")
    tensorboard: bool = _key(False, "also for TensorBoard, where it is installed")
    wandb: str = _key("", "project of Weights & Biases to log to, where wandb is installed")


@dataclass(frozen=True)
class Generation:
    """The samples at the end."""

    prompt: str = _key("Once upon a time", "where they begin")
    samples: int = _number(2, 0, "how many", most=1000)
    tokens: int = _number(160, 1, "the longest one")
    temperature: float = _number(0.8, 0, "0: always the likeliest token", most=100)
    top_k: int = _number(0, 0, "choose among so many; 0: all")
    top_p: float = _number(0.95, 0, "choose among the likeliest that make up so much", most=1, above=True)
    seed: int = _number(0, 0, "of the choices")


@dataclass(frozen=True)
class TrainingConfig:
    """A whole run, section by section."""

    out: str = _key("runs/stories", "folder of the run: everything that it writes")
    text: Text = field(default_factory=Text)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    batch: Batch = field(default_factory=Batch)
    run: Run = field(default_factory=Run)
    parallel: Parallel = field(default_factory=Parallel)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    logging: Logging = field(default_factory=Logging)
    generation: Generation = field(default_factory=Generation)

    def to_dict(self) -> dict[str, Any]:
        """As a file would have it, with every key."""
        return dataclasses.asdict(self)


# --------------------------------------------------------------------------------------------------- reading
def load(file: str | Path | None = None, changes: Mapping[str, Any] | None = None) -> TrainingConfig:
    """A file's configuration (the default one without a file), changed by `"section.key"` → value, and checked.

    Values of `changes` may be texts, as a command line has them. Errors: ValueError that names the file, key or value
    and what is allowed; FileNotFoundError that names the file.
    """
    told = _read(Path(file)) if file else {}
    for key, value in (changes or {}).items():
        section, dot, name = key.rpartition(".")
        place = told.setdefault(section, {}) if dot else told
        if not isinstance(place, dict):
            raise ValueError(f"{section}={place!r}; it must be a section")
        place[name] = value
    return checked(_section(TrainingConfig, told, ""))


def _read(file: Path) -> dict[str, Any]:
    if file.suffix not in (".toml", ".json"):
        raise ValueError(f"{file}: a configuration is a .toml or .json file")
    if (text := read_text(file)) is None:
        raise FileNotFoundError(f"no configuration {file}")
    if file.suffix == ".json":
        return read_json(file)
    try:
        return tomllib.loads(text, parse_float=numbers.kept)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None


_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_READ = {  # of a kind of values: what reads it from a text, and what it is called
    bool: (lambda text: _TRUTH.get(text.strip().lower()), "true or false"),
    int: (numbers.whole, numbers.WHOLE), float: (numbers.number, numbers.NUMBER), str: (str, "a text"),
}  # fmt: skip


def _section(cls: type, told: Mapping[str, Any], path: str) -> Any:
    kinds, values = typing.get_type_hints(cls), {}
    known = {f.name: f.metadata for f in dataclasses.fields(cls)}
    for name, value in told.items():
        if name not in known:
            raise ValueError(f"unknown key {path}{name}; allowed: {', '.join(path + k for k in known)}")
        if not dataclasses.is_dataclass(kind := kinds[name]):
            values[name] = _value(kind, known[name], value, f"{path}{name}")
        elif isinstance(value, Mapping):
            values[name] = _section(kind, value, f"{path}{name}.")
        else:
            raise ValueError(f"{path}{name}={value!r}; it must be a section with keys")
    return cls(**values)


def _value(kind: type, about: Mapping[str, Any], value: Any, key: str) -> Any:
    """The value of one key, made from text if need be; ValueError that says what is allowed."""
    read, wanted = _READ[kind]
    try:
        found = read(value) if isinstance(value, str) else value
        if kind in (int, float) and not isinstance(value, bool | str) and value == kind(value):
            found = kind(value)
        if type(found) is not kind or (kind is float and not math.isfinite(found)):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{key}={value!r}; it must be {wanted}") from None
    if "allowed" in about and found not in about["allowed"]:
        raise ValueError(f"{key}={found!r}; allowed: {', '.join(about['allowed'])}")
    if "least" in about:
        least = about["least"]
        wanted = f"above {least:g}" if about["above"] else f"{least:g} or more"
        if found > about["most"] or found < least or (about["above"] and found == least):
            most = f" and at most {about['most']}" * (about["most"] < _LARGEST or found > least)
            raise ValueError(f"{key}={found!r}; it must be {wanted}{most}")
    return found


# --------------------------------------------------------------------------------------------------- checking
def checked(config: TrainingConfig) -> TrainingConfig:
    """The configuration, its length and learning rate filled in; ValueError where keys contradict each other."""
    lengths = [name for name in LENGTHS if getattr(config.schedule, name)]
    if len(lengths) > 1:
        raise ValueError(f"schedule has {' and '.join(lengths)}; it must have one of {', '.join(LENGTHS)}")
    if config.run.compile == "graphs":  # they replay one backward pass a step
        _goes_with(config, "run.compile", "batch.accumulate", 1)
    if config.run.recompute != "none":
        allowed = COMPILE[:2] if config.run.recompute == "selective" else COMPILE[:3]
        _goes_with(config, "run.recompute", "run.compile", *allowed)
    if config.text.source in ("stories", "random") and not config.text.train_mb:
        raise ValueError(f"text.train_mb=0; for text.source={config.text.source!r} it must be above 0")
    if not config.out.strip():
        raise ValueError("out=''; it must name a folder")
    if 0 < (temperature := config.generation.temperature) < 1e-6:
        raise ValueError(f"generation.temperature={temperature}; it must be 0, or 1e-6 or more")
    try:
        config.generation.prompt.encode()
    except UnicodeEncodeError:  # a command line may hold any bytes
        raise ValueError(f"generation.prompt={config.generation.prompt!r} is not UTF-8") from None
    if (end := config.tokenizer.separator) not in ("", "<|endoftext|>") and not config.tokenizer.path:
        raise ValueError(
            f"tokenizer.separator={end!r} needs tokenizer.path, whose token it is; a tokenizer that is trained has "
            "<|endoftext|>"
        )
    sizes = config.model.sizes(config.tokenizer.vocab_size)
    if sizes.kv_heads < sizes.num_heads:
        _goes_with(config, "model.num_kv_heads", "model.attention", "auto", *serving("enable_gqa"))
    if config.text.documents == "packed":
        _goes_with(config, "text.documents", "model.attention", "auto", *serving("cu_seqlens"))
        ready = Path(config.text.source).suffix in READY
        if config.text.source == "random" or (ready and not config.tokenizer.path):
            raise ValueError(
                "text.documents='packed', and which token ends a document is not known: random tokens have none, and "
                "ready tokens need tokenizer.path; allowed for these: stream"
            )
    replace, rate = dataclasses.replace, float(f"{6e-3 * min(1, 128 / sizes.d_model):.2g}")
    schedule = config.schedule if lengths else replace(config.schedule, minutes=5.0)
    chosen = replace(config.optimizer, learning_rate=config.optimizer.learning_rate or rate)
    return replace(config, schedule=schedule, optimizer=chosen)


def _goes_with(config: TrainingConfig, other: str, key: str, *allowed: Any) -> None:
    """ValueError unless a key has one of the values that go with what another one has."""
    value, others = (functools.reduce(getattr, name.split("."), config) for name in (key, other))
    if value not in allowed:
        words = ", ".join(map(str, allowed)).lower()
        raise ValueError(f"{key}={value!r} with {other}={others!r}; allowed: {words}")


def for_ranks(config: TrainingConfig, world_size: int) -> int:
    """The sequences of a microbatch on each rank; ValueError where the step's do not go round, and for several ranks
    that nothing keeps alike."""
    if world_size > 1 and config.parallel.wrapper == "none":
        allowed = ", ".join(ALL_WRAPPERS[1:])
        raise ValueError(
            f"parallel.wrapper='none' on {world_size} ranks, which would diverge; allowed: {allowed}"
        )
    if config.parallel.wrapper == "fsdp":  # its optimizer works on shards
        _goes_with(config, "parallel.wrapper", "optimizer.sharded", False)
        if world_size > 1:
            _goes_with(config, "parallel.wrapper", "run.compile", *COMPILE[:3])
            _goes_with(config, "parallel.wrapper", "run.recompute", *RECOMPUTE[:2])
    mb, how = config.parallel.bucket_mb, config.run.compile
    # the first bucket that torch's compiler makes, whatever it compiles, holds 1 MB
    if world_size > 1 and config.parallel.wrapper == "torch" and how != "off" and mb < 1:
        raise ValueError(
            f"parallel.bucket_mb={mb} with parallel.wrapper='torch' and run.compile={how!r}; it must be 1 or more"
        )
    parts = world_size * config.batch.accumulate
    if config.batch.sequences % parts:
        raise ValueError(
            f"batch.sequences={config.batch.sequences}; it must be a multiple of {parts}: "
            f"{world_size} ranks times batch.accumulate={config.batch.accumulate}"
        )
    return config.batch.sequences // parts


def describe() -> Iterator[tuple[str, str, str]]:
    """Every key with its default and what it is: for flags and `cs336 train --keys`."""
    default = TrainingConfig()
    for section in dataclasses.fields(default):
        value = getattr(default, section.name)
        nested = dataclasses.is_dataclass(value)
        for key in dataclasses.fields(value) if nested else [section]:
            about, allowed = key.metadata["about"], ", ".join(key.metadata.get("allowed", ()))
            name = f"{section.name}.{key.name}" if nested else key.name
            told = json.dumps(getattr(value if nested else default, key.name))
            yield name, told, f"{allowed}: {about}" if allowed else about
