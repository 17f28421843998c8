"""From text to a model that writes: the stages of `cs336 train`, each skipped where its output is there already.

    <out>/text/       train.txt, valid.txt                     `text.prepare`
    <out>/tokens/     tokenizer.json, train.bin, valid.bin     `tokens.prepare`
    <out>/            config.json, log.csv, loss.svg, checkpoints/, result.json, samples.txt

Importing this needs no torch.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.training import text, tokens
from cs336_systems.training.config import TrainingConfig, for_ranks, load

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from cs336_systems.launch.group import Rank
    from cs336_systems.model import TransformerLM
    from cs336_systems.training.loop import Data

Say = Callable[[str], None]
_FOREVER_S = 1e8  # three years: a run ends by its schedule
# what changes nothing about the weights that come out
_BESIDE = ("out", "logging", "generation", "parallel.timeout_s", "parallel.nproc", "run.profile", "tokenizer.workers",
           "checkpoints", "text.cache")  # fmt: skip


def prepare(config: TrainingConfig, say: Say = print) -> tokens.TokensInfo:
    """The text, its tokenizer and its tokens, made or found."""
    out = Path(config.out)
    found = text.prepare(config.text, Path(config.text.cache or out / "text"), log=say)
    return tokens.prepare(config.tokenizer, found, out / "tokens", log=say)


def train(config: TrainingConfig, say: Say = print) -> dict[str, Any]:
    """All stages; what came of the training, and its samples. Under torchrun all ranks call this together.

    Errors: ValueError where the run's folder holds a run that is not this one, or not to be gone on with; those of
    `loop.Trainer`; LaunchError where a rank fails.
    """
    if "RANK" in os.environ:
        return _under_torchrun(config, say)
    for_ranks(config, config.parallel.nproc)
    result = _finished(config)
    if result:
        say(f"training: {config.out} holds it already, {result['step']} steps")
    else:
        start = _where_to_start(config, say)
        prepare(config, say)
        _write(Path(config.out) / "config.json", config.to_dict())
        result = _start(config, start, say)
    return _finish(config, result, say)


def _start(config: TrainingConfig, start: str, say: Say) -> dict[str, Any]:
    """Trains in this process, or in `parallel.nproc` that it starts."""
    if config.parallel.nproc == 1:
        return on_a_rank(None, config.to_dict(), start)
    from cs336_systems.launch.start import launch

    with _sigterm_asks_to_stop(Path(config.out)):
        result, *_ = launch(
            f"{__name__}:on_a_rank", config.parallel.nproc, {"config": config.to_dict(), "start": start},
            device=config.run.device, timeout_s=_FOREVER_S, collective_timeout_s=config.parallel.timeout_s, log=say,
        )  # fmt: skip
    return result


def _under_torchrun(config: TrainingConfig, say: Say) -> dict[str, Any]:
    from torch import distributed as dist

    from cs336_systems.launch.group import process_group

    with process_group("auto", config.run.device, config.parallel.timeout_s) as rank:
        for_ranks(config, rank.world_size)
        told: list[Any] = [None, ""]
        if rank.rank == 0:
            try:
                told = [_where_to_start(config, say), ""]
                prepare(config, say)
                _write(Path(config.out) / "config.json", config.to_dict())
            except Exception as error:
                told = [None, f"{type(error).__name__}: {error}"]
                raise
            finally:
                dist.broadcast_object_list(told, src=0)
        else:
            dist.broadcast_object_list(told, src=0)
            if told[1]:
                raise ValueError(f"rank 0 could not prepare the run: {told[1]}")
        result = on_a_rank(rank, config.to_dict(), told[0])
    return _finish(config, result, say) if rank.rank == 0 else result


def data_of(config: TrainingConfig) -> Data:
    """The tokens of a configuration, made or found."""
    from cs336_systems.training.loop import Data

    info = prepare(config, lambda line: None)
    return Data(info.train, info.valid, info.vocab_size, info.valid_bytes, info.floor_nats_per_token)


def on_a_rank(rank: Rank | None, config: dict[str, Any], start: str) -> dict[str, Any]:
    """Trains as one rank, or alone; `start` is a checkpoint to go on from, or ""."""
    from cs336_systems.training.loop import Trainer

    made = load(None, _flat(config))
    trainer = Trainer(made, data_of(made), rank)
    if start:
        trainer.resume(Path(start))
    return trainer.run()


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """`{"section": {"key": value}}` as `{"section.key": value}`."""
    flat = {}
    for name, value in config.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


# ------------------------------------------------------------------------------------------------ what is there already
def digest(config: TrainingConfig) -> str:
    """Of all settings that the trained weights depend on."""
    told = _flat(copy.deepcopy(config.to_dict()))
    counts = {k: v for k, v in told.items() if k not in _BESIDE and k.split(".")[0] not in _BESIDE}
    counts["checkpoints.init_from"] = config.checkpoints.init_from
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()[:16]


def _finished(config: TrainingConfig) -> dict[str, Any] | None:
    """The result of this very run, if it has been trained to its end."""
    path = Path(config.out) / "result.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it, or choose another out") from None
    return result if result.get("digest") == digest(config) and not result.get("stopped") else None


def _where_to_start(config: TrainingConfig, say: Say) -> str:
    """The checkpoint to go on from, or "" for the beginning; ValueError where a run would be overwritten."""
    from cs336_systems.training import checkpoints

    folder, asked = Path(config.out) / "checkpoints", config.checkpoints.resume
    there = checkpoints.found(folder)
    if asked == "no":
        if there:
            raise ValueError(
                f"{config.out} holds a run already, with {there[-1].name}: --resume auto goes on with it, "
                "and another --out begins a new one"
            )
        return ""
    if asked == "auto":
        newest, broken = checkpoints.newest_sound(folder)
        for line in broken:
            say(f"left out: {line}")
        if newest:
            say(f"going on from {newest}")
        return str(newest or "")
    if not Path(asked).is_dir():
        raise ValueError(f"checkpoints.resume={asked!r}; allowed: no, auto, the folder of a checkpoint")
    checkpoints.load(Path(asked))
    return asked


# ------------------------------------------------------------------------------------------------------ after training
def _finish(config: TrainingConfig, result: dict[str, Any], say: Say) -> dict[str, Any]:
    """Keeps the result, draws the losses, writes the samples."""
    from cs336_systems.training.log import picture

    out = Path(config.out)
    result = {**result, "digest": digest(config)}
    _write(out / "result.json", result)
    if (out / "log.csv").is_file():
        picture(out, result["floor"])
    if result["stopped"]:
        say(f"stopped after step {result['step']}; --resume auto goes on from {result['checkpoint']}")
        return result
    line = f"held out: {result['valid_loss']:.4f} nats a token, {result['bits_per_byte']:.4f} bits a byte"
    say(line + (f"; the text's entropy is {result['floor']:.4f}" if result["floor"] else ""))
    if config.generation.samples and config.text.source != "random":
        result["samples"] = _samples(config, Path(result["checkpoint"]), say)
    return result


def _samples(config: TrainingConfig, checkpoint: Path, say: Say) -> list[str]:
    asked, found = config.generation, []
    speaker = Speaker(checkpoint)
    for number in range(asked.samples):
        pieces = speaker.speak(
            asked.prompt, tokens=asked.tokens, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p,
            seed=asked.seed + number,
        )  # fmt: skip
        found.append(asked.prompt + "".join(pieces))
        say(f"\n{found[-1]}")
    _write_text(Path(config.out) / "samples.txt", "\n\n".join(found) + "\n")
    return found


class Speaker:
    """A trained model and its tokenizer. `place`: a checkpoint, or a run's folder (its best checkpoint, or its newest).

    ValueError where there is none, or no tokenizer; CheckpointError for one that is not sound.
    """

    def __init__(self, place: Path, device: str = "auto") -> None:
        from cs336_systems.model import build
        from cs336_systems.training import checkpoints, modes

        path = place
        if (place / "checkpoints").is_dir():
            path = (
                checkpoints.best_of(place / "checkpoints")
                or checkpoints.newest_sound(place / "checkpoints")[0]
            )
        if path is None or not (path / "checkpoint.json").is_file():
            raise ValueError(f"{place} is neither a checkpoint nor the folder of a run that has one")
        about, weights, *_ = checkpoints.load(path)
        self.path = path
        config = load(None, _flat(about["config"]))
        tokenizer = path.parent.parent / "tokens" / "tokenizer.json"
        if not tokenizer.is_file():
            raise ValueError(f"no tokenizer for {path}: there is no {tokenizer}")
        self.tokenizer = tokens.load_tokenizer(tokenizer)
        self.model = build(config.model.sizes(about["vocab_size"]), "auto", device=modes.device_of(device))
        self.model.load_state_dict(weights)
        self.model.requires_grad_(False)

    def speak(self, prompt: str, **asked: Any) -> Iterator[str]:
        """As `spoken`."""
        return spoken(self.model, self.tokenizer, prompt, **asked)


def spoken(
    model: TransformerLM, tokenizer: Tokenizer, prompt: str, tokens: int = 200, temperature: float = 0.8,
    top_k: int = 0, top_p: float = 0.95, seed: int = 0,
) -> Iterator[str]:  # fmt: skip
    """What a model writes after a prompt, piece by piece, until the text ends or there are `tokens` tokens."""
    from cs336_systems.training.generate import Sampling, generate
    from cs336_systems.training.tokens import END_OF_TEXT

    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    sampling = Sampling(temperature, top_k, top_p, seed)
    new: list[int] = []
    shown = ""
    for token in generate(model, ids, sampling, tokens, stop=end):
        new.append(token)
        known = tokenizer.decode(new)
        if not known.endswith("\ufffd"):  # a character whose last bytes are still to come
            yield known[len(shown) :]
            shown = known


# ------------------------------------------------------------------------------------------------------------- helpers
@contextlib.contextmanager
def _sigterm_asks_to_stop(out: Path) -> Iterator[None]:
    """Within its block SIGTERM has the ranks save and end, by the file that they look for."""
    from cs336_systems.training.loop import STOP

    try:
        before = signal.signal(signal.SIGTERM, lambda *_: (out / STOP).touch())
    except ValueError:  # not the main thread, which alone hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=1) + "\n")


def _write_text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(content, encoding="utf-8")
    os.replace(new, path)
