"""From text to a model that writes: the stages of `cs336 train`, each skipped where its output is there already.

    <out>/text/       train.txt, valid.txt                     `text.prepare`
    <out>/tokens/     tokenizer.json, train.bin, valid.bin     `tokens.prepare`
    <out>/            config.json, log.csv, loss.svg, checkpoints/, result.json, samples.txt

Importing this needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.store import files
from cs336_systems.training import batches, forecast, resuming, text, tokens
from cs336_systems.training.config import Generation, TrainingConfig, load
from cs336_systems.training.outputs import Say, silent

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from cs336_systems.launch.group import Rank
    from cs336_systems.model import TransformerLM


def prepare(config: TrainingConfig, say: Say = print) -> batches.Data:
    """The text, its tokenizer and its tokens, made or found; ValueError where the run's checkpoints know others."""
    out, expected = Path(config.out), resuming.expected(config)
    found = text.prepare(config.text, out / "text", say, expected)
    return tokens.prepare(config.tokenizer, found, out / "tokens", say, expected)


def train(config: TrainingConfig, say: Say = print) -> dict[str, Any]:
    """All stages; what came of the training, and its samples. Under torchrun all ranks call this together.

    Errors: ValueError where the run's folder holds a run that is not this one, or not to be gone on with, or another
    process is writing into it; those of `loop.Trainer`; LaunchError where a rank fails.
    """
    from torch import distributed as dist

    from cs336_systems.launch.group import process_group
    from cs336_systems.parallel.agreement import agreement

    group, nproc = contextlib.nullcontext(), config.parallel.nproc
    if "RANK" in os.environ:
        group = process_group("auto", config.run.device, config.parallel.timeout_s)
    with contextlib.ExitStack() as held:
        with group as rank:
            told, leads = ["", None, {}], not rank or rank.rank == 0
            with agreement(dist.group.WORLD if rank else None):  # an error of rank 0 ends all
                if leads:
                    told = _begin(config, say, held)
            if rank:
                dist.broadcast_object_list(told, src=0)
            start, result, data = told
            arguments = {"config": config.to_dict(), "start": start, "data": data}
            if not result and not rank and nproc > 1:
                result = _on_ranks(config, arguments, say)
            elif not result:
                result = on_a_rank(rank, **arguments)
        return _finish(config, start, result, say) if leads else result


def _begin(config: TrainingConfig, say: Say, held: contextlib.ExitStack) -> list[Any]:
    """All that comes before the first step, from then on alone in the folder: the checkpoint to go on from, or "", the
    result where all is done already, or else what `batches.Data` is to be learned from.

    What the machine does not allow is refused before there is a folder; what a file does not, before hours of training.
    """
    from cs336_systems.training import checkpoints, loop, modes

    if not (result := _finished(config)):
        forecast.check_fits(config)
    held.enter_context(files.alone(Path(config.out)))
    if result:
        prepare(config, say)  # of a text that has changed since, this is no result
        say(f"training: {config.out} holds it already, {result['step']} steps")
        return ["", result, {}]
    start, at = _where_to_start(config, say), None
    if begun := "" if start else config.checkpoints.init_from:  # what goes on has its weights
        try:
            checkpoints.weights_of(place := Path(begun).expanduser())
        except files.StoreError as error:
            raise ValueError(f"checkpoints.init_from={begun!r}: {error}") from error
        if at := checkpoints.of(place):
            resuming.check(at, checkpoints.told(at), config, dtype=None)
    if start:
        dtype = modes.dtype_of(config.run.dtype, modes.device_of(config.run.device))
        resuming.check(Path(start), about := checkpoints.load(Path(start))[0], config, dtype)
    info = prepare(config, say)
    forecast.check_fits(config, info.vocab_size)  # of a tokenizer that is there now
    for name, ids in (("train", info.train), ("valid", info.valid)):
        batches.Batches(ids, config.model.context_length, 1, 0, name)  # refuses a text too short
    theirs, known = at and at / checkpoints.TOKENIZER, info.tokenizer
    if theirs and known and theirs.is_file() and files.sha256(theirs) != info.files[known.name]:
        raise ValueError(
            f"checkpoints.init_from={begun}: its weights know the tokens of {theirs}, not of this run's "
            f"tokenizer; tokenizer.path={theirs} takes it"
        )
    (Path(config.out) / loop.STOP).unlink(missing_ok=True)
    files.replace({Path(config.out) / "config.json": json.dumps(config.to_dict(), indent=1) + "\n"})
    first = about["data"].get("begun", "") if start else _first(config)  # of a start what it began from
    return [start, None, info.told() | {"files": {**info.files, "begun": first}}]


def _on_ranks(config: TrainingConfig, arguments: dict[str, Any], say: Say) -> dict[str, Any]:
    """Trains in `parallel.nproc` processes."""
    from cs336_systems.launch.start import launch
    from cs336_systems.training.loop import STOP, on_sigterm

    with on_sigterm((Path(config.out) / STOP).touch):
        return launch(
            f"{__name__}:on_a_rank", config.parallel.nproc, arguments, device=config.run.device,
            timeout_s=math.inf, collective_timeout_s=config.parallel.timeout_s, log=say,
        )[0]  # fmt: skip


def on_a_rank(rank: Rank | None, config: dict[str, Any], start: str, data: dict[str, Any]) -> dict[str, Any]:
    """Trains as one rank, or alone. start: a checkpoint to go on from, or ""; data: `Data.told` of what rank 0 has made
    and held against its digests. Another node makes its own, as it may have another disk."""
    from cs336_systems.training.loop import Trainer

    made = load(None, config)
    elsewhere = rank and rank.rank != rank.local_rank
    found = prepare(made, silent) if elsewhere else batches.Data.of(data)
    trainer = Trainer(made, found, rank, resumed=bool(start))
    if start:
        trainer.resume(Path(start))
    return trainer.run() | {"begun": data["files"]["begun"]}


# ------------------------------------------------------------------------------------------------ what is there already
def digest(config: TrainingConfig) -> str:
    """Of all settings that the trained weights depend on."""
    counts = {"checkpoints.init_from": config.checkpoints.init_from}
    counts |= resuming.settings(config, resuming.BESIDE)
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()[:16]


def _first(config: TrainingConfig) -> str:
    """SHA-256 of the weights that `checkpoints.init_from` leads to; "" where it names none, or they are gone."""
    from cs336_systems.training import checkpoints

    place = Path(config.checkpoints.init_from or os.devnull).expanduser()
    file = at / "model.safetensors" if (at := checkpoints.of(place)) else place
    return files.sha256(file) if file.is_file() else ""


def _finished(config: TrainingConfig) -> dict[str, Any] | None:
    """The result of this very run, if it has been trained to its end, from the weights that are there to begin from."""
    if not (path := Path(config.out) / "result.json").exists():
        return None
    with files.reading(path, advice="; remove it, or choose another out"):
        result = json.loads(files.content(path))
        same = result["digest"] == digest(config) and not result["stopped"]
        begun, now = result.get("begun"), _first(config)  # earlier versions did not know; weights may be gone
        return result if same and (begun == now or not begun or not now) else None


def _where_to_start(config: TrainingConfig, say: Say) -> str:
    """The checkpoint to go on from, or "" for the beginning; ValueError where a run would be overwritten."""
    from cs336_systems.training import checkpoints

    folder, asked = Path(config.out) / "checkpoints", config.checkpoints.resume
    if asked == "no":
        if there := checkpoints.found(folder):
            raise ValueError(
                f"{config.out} holds a run already, with {there[-1].name}: --resume auto goes on with it, "
                "and another --out begins a new one"
            )
        return ""
    if asked == "auto":
        if newest := checkpoints.newest_sound(folder, say=lambda why: say(f"left out: {why}")):
            say(f"going on from {newest}")
        return str(newest or "")
    if not (Path(asked) / "checkpoint.json").is_file():
        raise ValueError(f"checkpoints.resume={asked!r}; allowed: no, auto, the folder of a checkpoint")
    own = Path(asked).resolve().parent == folder.resolve()
    if there := [path for path in checkpoints.found(folder) if not own or path > folder / Path(asked).name]:
        raise ValueError(
            f"{config.out} holds {there[-1].name}, which {asked} leaves behind: move it away, or choose another --out"
        )
    return asked


# ------------------------------------------------------------------------------------------------------ after training
def _finish(config: TrainingConfig, start: str, result: dict[str, Any], say: Say) -> dict[str, Any]:
    """Keeps the result, draws the losses, writes the samples."""
    from cs336_systems.training.checkpoints import TOKENIZER
    from cs336_systems.training.log import picture

    out = Path(config.out)
    result = {**result, "digest": digest(config)}
    files.replace({out / "result.json": json.dumps(result, indent=1) + "\n"})
    if (out / "log.csv").is_file():
        picture(out, result["floor"])
    if result["stopped"]:
        say(f"stopped after step {result['step']}; --resume auto goes on from {result['checkpoint']}")
        return result
    kind, length = config.schedule.length
    if start and Path(start).name == Path(result["checkpoint"]).name:
        say(f"training: none, {start} has its {length:g} {kind} already")
    line = f"held out: {result['valid_loss']:.4f} nats a token"
    line += f", {result['bits_per_byte']:.4f} bits a byte" if result["bits_per_byte"] else ""
    say(line + (f"; the text's entropy is {result['floor']:.4f}" if result["floor"] else ""))
    # not the path that it was saved under: the folder may have been moved
    how, place = config.generation, out / "checkpoints" / Path(result["checkpoint"]).name
    if how.samples and (place / TOKENIZER).is_file():
        result["samples"] = written(*trained(place, config.run.device), [how.prompt] * how.samples, how)
        for sample in result["samples"]:
            say(f"\n{sample}")
        files.replace({out / "samples.txt": "\n\n".join(result["samples"]) + "\n"})
    return result


def trained(place: Path, device: str = "auto", say: Say = silent) -> tuple[TransformerLM, Tokenizer, int]:
    """A trained model, its tokenizer, and the token after each document. place, say: as of `checkpoints.of`.

    ValueError where there is none, or no tokenizer; StoreError for one that is not sound.
    """
    from cs336_systems.model import build
    from cs336_systems.training import checkpoints, modes

    why: list[str] = []
    if not (path := checkpoints.of(place, why.append)):
        none = f"{place} is neither a checkpoint nor the folder of a run that has one"
        raise ValueError("; ".join([none, *why]))
    for line in why:
        say(f"left out: {line}; taken: {path.name}")
    about, weights, *_ = checkpoints.load(path)
    if not (file := path / checkpoints.TOKENIZER).is_file():
        raise ValueError(f"no tokenizer for {path}: its tokens were drawn, or came without one")
    config = checkpoints.config_of(path, about)
    sizes = config.model.sizes(about["vocab_size"])
    model = build(sizes, "auto", device=modes.device_of(device)).requires_grad_(False)
    checkpoints.into(model, weights, f"what checkpoint.json in {path} describes")
    tokenizer = tokens.load_tokenizer(file, config.tokenizer.separator)
    return model, tokenizer, tokens.end_of_text(tokenizer, config.tokenizer.separator)


def spoken(
    model: TransformerLM, tokenizer: Tokenizer, end: int, prompts: Sequence[str], how: Generation
) -> Iterator[tuple[int, str]]:
    """What a model writes after some prompts, piece by piece, with the prompt's number: until each text ends or there
    are `how.tokens`. end: the token that ends a text; as in training it stands before each."""
    from cs336_systems.training.generate import generate

    texts = [[end, *found.ids] for found in tokens.encoded(tokenizer, prompts)]
    shown = [tokenizer.decode(text) for text in texts]  # by itself a first token may lose its space
    for tokens_of_all in generate(model, texts, how, stop=end):
        for n, token in enumerate(tokens_of_all):
            if token is not None:
                texts[n].append(token)
                known = tokenizer.decode(texts[n])
                if not known.endswith("\ufffd"):  # a character whose last bytes are still to come
                    yield n, known[len(shown[n]) :]
                    shown[n] = known
    for n, text_ids in enumerate(texts):
        if last := tokenizer.decode(text_ids)[len(shown[n]) :]:  # a character that was never ended
            yield n, last


def written(
    model: TransformerLM, tokenizer: Tokenizer, end: int, prompts: Sequence[str], how: Generation
) -> list[str]:
    """The texts of `spoken`, whole, with their prompts."""
    texts = list(prompts)
    for n, piece in spoken(model, tokenizer, end, prompts, how):
        texts[n] += piece
    return texts
