"""Checkpoints: folders that are there whole or not at all.

    <out>/checkpoints/step-00000200/
        model.safetensors     the weights, as `TransformerLM.state_dict` names them
        optimizer.pt          the optimizer's state, as the plain optimizer would save it
        state.pt              the gradient scaler, and the random state of each rank
        tokenizer.json        what its ids mean, unless they are drawn at random
        checkpoint.json       step, seconds, the configuration, size and SHA-256 of the files above, and SHA-256 of the
                              files that were learned from ("data"; "begun": of the first weights, or "")

A checkpoint is written beside its place, synced to disk, and renamed. `load` holds it against the digests; whatever is
wrong is one StoreError. `best` is a file with the name of the one with the lowest validation loss.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from cs336_systems.model import staff_state_dict
from cs336_systems.store.files import StoreError, making, reading, sync
from cs336_systems.training import config, outputs
from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.outputs import Say, silent

_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "optimizer.pt", "state.pt")
TOKENIZER = "tokenizer.json"
# where files that torch has saved keep a model's state dict, from the outside in
_STATE = ("model", "model_state_dict", "state_dict", "module")
_FIRST = "token_embeddings.weight"


def save(
    folder: Path, step: int, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any],
    state: Mapping[str, Any], about: Mapping[str, Any], tokenizer: bytes = b"",
) -> None:  # fmt: skip
    """Writes a checkpoint of `step` into `folder`; one that is there already is replaced.

    weights: tensors by name; optimizer, state: what `torch.load(weights_only=True)` reads; about: JSON; tokenizer: the
    content of a tokenizer.json, if there is one. Nothing is copied that lies in main memory; of what lies on a GPU the
    weights, all at once, and the largest tensor of the rest.
    StoreError where the disk is full or cannot be written; what was saved before stays.
    """
    final = folder / f"step-{step:08d}"
    try:
        with making(folder) as new:
            plain = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            safetensors.torch.save_file(plain, new / _FILES[0])
            for name, value in zip(_FILES[1:], (optimizer, state), strict=True):
                with open(new / name, "wb") as file:  # of a name alone torch.save hides what a full disk says
                    torch.save(dict(value), file)
            shutil.copymode(new / _FILES[1], new / _FILES[0])  # safetensors lets nobody else read
            if tokenizer:
                (new / TOKENIZER).write_bytes(tokenizer)
            outputs.recorded(new / "checkpoint.json", {"step": step, **about})
            aside = folder / ".before"
            if final.exists():  # it goes when the new one has its place
                shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
                os.replace(final, aside)
            os.replace(new, final)
            shutil.rmtree(aside, ignore_errors=True)
        sync(folder)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch's own, on a full disk
        if code := re.search(r"os error (\d+)", str(cause)):  # as safetensors tells it
            cause = OSError(int(code[1]), os.strerror(int(code[1])))
        if not isinstance(cause, OSError):
            raise
        raise StoreError(f"cannot write {final}: {cause.strerror or cause}{_instead(folder)}") from cause


# ----------------------------------------------------------------------------------------------------- which there are
def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first, sound or not."""
    named = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of)


def newest_sound(folder: Path, but: Path | None = None, say: Say = silent) -> Path | None:
    """The newest sound checkpoint other than `but`; `say` gets why newer ones are none."""
    for path in (one for one in reversed(found(folder)) if one != but):
        try:
            told(path, sound=True)
            return path
        except StoreError as error:
            say(str(error))
    return None


def of(place: Path, say: Say = silent) -> Path | None:
    """The checkpoint that a path leads to: one itself, a file in it, or of a run's folder its best one, or else its
    newest sound one; `say` gets why newer ones are none. None where there is none."""
    path, folder = place.parent if place.is_file() else place, place / "checkpoints"
    if folder.is_dir() and not ((path := best_of(folder)) and path.is_dir()):
        path = newest_sound(folder, say=say)
    return path if path and (path / "checkpoint.json").is_file() else None


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.split("-")[1])


def keep(folder: Path, count: int, step: int) -> None:
    """Removes of those up to a step all but the newest `count`, and the best."""
    best = best_of(folder)
    for path in [path for path in found(folder) if step_of(path) <= step][:-count]:
        if path != best:
            shutil.rmtree(path)


def best_of(folder: Path) -> Path | None:
    """The best of a folder's checkpoints, if one was marked."""
    mark = folder / "best"
    with reading(mark):
        return folder / mark.read_text(encoding="utf-8").strip() if mark.is_file() else None


# ---------------------------------------------------------------------------------------------------------- reading
def told(path: Path, sound: bool = False) -> dict[str, Any]:
    """What `checkpoint.json` says of a checkpoint; StoreError where that cannot be. sound: after its files were
    held against it, else unread; the error then names the one that is missing, truncated or altered."""
    with reading(path / "checkpoint.json"):
        found = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        named = _NAME.fullmatch(path.name)
        if named and int(named[1]) != found["step"]:
            raise ValueError(f"step is {found['step']}, in a folder of that name")
        for key in ("config", "data", "vocab_size"):
            found[key]
        for name in _FILES:
            found["files"][name]["sha256"]
        if sound and (wrong := outputs.first_wrong(path, found["files"])):
            raise StoreError(wrong)
    return found


def config_of(path: Path, about: Mapping[str, Any]) -> TrainingConfig:
    """The configuration of a checkpoint of which `checkpoint.json` says `about`; StoreError where it is none."""
    with reading(path / "checkpoint.json"):
        return config.load(None, about["config"])


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """What `checkpoint.json` says, weights, optimizer and state of a checkpoint; tensors on the CPU.

    StoreError as `told`, and for a file that cannot be read, or is not safe to; it names the newest sound
    checkpoint beside it.
    """
    try:
        found = told(path, sound=True)
        weights, optimizer, state = (_tensors(path / name) for name in _FILES)
    except StoreError as error:
        raise StoreError(f"{error}{_instead(path.parent, path)}") from error
    return found, weights, optimizer, state


def _tensors(file: Path) -> Any:
    """What a file of safetensors or torch holds, on the CPU; StoreError where it cannot be read, or is not safe to."""
    with reading(file):
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # whose first line advises to run what the file holds
            other = re.search(r"GLOBAL (\S+)", str(error))
            what = f"has {other[1]}" if other else "is no file of torch.save"
            raise StoreError(
                f"{file} {what}; only tensors are unpickled: save the state dict alone"
            ) from error


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint of ours (see `of`), a safetensors file, or a file that torch has saved: a state dict,
    or one under a key of its own, with or without what wrappers put before the names. Nothing is unpickled but tensors.
    StoreError that says why there are none."""
    if path.is_dir():
        return load(of(path) or path)[1]
    found = _tensors(path)
    with reading(path):
        for key in _STATE:
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
                found = found[key]
        if not isinstance(found, Mapping) or not all(isinstance(x, torch.Tensor) for x in found.values()):
            there = [str(key) for key in found][:8] if isinstance(found, Mapping) else [type(found).__name__]
            allowed = ", ".join(_STATE)
            raise StoreError(f"{path} holds no state dict, nor one under {allowed}: {', '.join(there)}")
        own = staff_state_dict(found)
        # whatever held the model: `model.`, `transformer.` ... before all names are cut off
        before = next((name.removesuffix(_FIRST) for name in own if name.endswith(_FIRST)), "")
        return {name.removeprefix(before): tensor for name, tensor in own.items()}


def into(model: nn.Module, weights: Mapping[str, torch.Tensor], whose: str) -> None:
    """Has a model take weights; ValueError, in a line, that names those missing, unexpected, or of other shapes."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        told = " ".join(str(error).partition(":")[2].split())  # after the name of the model's class
        raise ValueError(f"the weights do not fit {whose}: {told[:400]}") from None


def _instead(folder: Path, path: Path | None = None) -> str:
    """What there is instead of `path`."""
    sound = newest_sound(folder, path)
    return f"; the newest sound checkpoint is {sound}" if sound else ""
