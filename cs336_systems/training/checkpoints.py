"""Checkpoints: folders that are there whole or not at all.

    <out>/checkpoints/step-00000200/
        model.safetensors     the weights, as `TransformerLM.state_dict` names them
        optimizer.pt          the optimizer's state, as the plain optimizer would save it
        state.pt              the gradient scaler, and the random state of each rank
        checkpoint.json       step, tokens, losses, the configuration, and size and SHA-256 of the files above

A checkpoint is written beside its place, synced to disk, and renamed. `about` reads the digests: a truncated or foreign
one is refused by name. `best` is a file with the name of the one with the lowest validation loss.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from cs336_systems.training import outputs

_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "optimizer.pt", "state.pt")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; says which, why, and what there is instead."""


def save(
    folder: Path, step: int, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any],
    state: Mapping[str, Any], about: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Writes a checkpoint of `step` into `folder`, and returns its place; one that is there already is replaced.

    weights: tensors by name; optimizer, state: what `torch.load(weights_only=True)` reads; about: JSON.
    CheckpointError where the disk is full or cannot be written; what was saved before stays.
    """
    final = folder / f"step-{step:08d}"
    new = folder / f".{final.name}"
    try:
        for left in folder.glob(".step-*"):  # of writers that were killed
            shutil.rmtree(left)
        new.mkdir(parents=True)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        (new / _FILES[0]).write_bytes(safetensors.torch.save(plain))
        for name, value in zip(_FILES[1:], (optimizer, state), strict=True):
            buffer = io.BytesIO()  # into a file, torch.save hides what a full disk says
            torch.save(dict(value), buffer)
            (new / name).write_bytes(buffer.getbuffer())
        files = {name: outputs.synced(new / name) for name in _FILES}
        (new / "checkpoint.json").write_text(json.dumps({"step": step, **about, "files": files}, indent=1))
        outputs.synced(new / "checkpoint.json")
        if final.exists():
            shutil.rmtree(final)
        os.replace(new, final)
        outputs.sync_folder(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(f"cannot write {final}: {error.strerror or error}{_instead(folder)}") from error
    return final


# ----------------------------------------------------------------------------------------------------- which there are
def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first, sound or not."""
    named = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.split("-")[1]))


def newest_sound(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, and why newer ones are none."""
    why = []
    for path in reversed(found(folder)):
        try:
            about(path)
        except CheckpointError as error:
            why.append(str(error))
        else:
            return path, why
    return None, why


def keep(folder: Path, count: int) -> None:
    """Removes all but the newest `count`, and the best. What a start with another `count` was told to keep stays."""
    best = best_of(folder)
    alike = [path for path in found(folder) if _told_to_keep(path) in (count, None)]
    for path in alike[:-count]:
        if path != best:
            shutil.rmtree(path)


def _told_to_keep(path: Path) -> int | None:
    try:
        return json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))["config"]["checkpoints"][
            "keep"
        ]
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ):  # damaged: it is held to no number of its own
        return None


def mark_best(path: Path) -> None:
    """Remembers that a checkpoint is the best of its folder."""
    outputs.write(path.parent / "best", path.name)


def best_of(folder: Path) -> Path | None:
    """The best of a folder's checkpoints, if one was marked."""
    mark = folder / "best"
    try:
        return folder / mark.read_text(encoding="utf-8").strip() if mark.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{mark} is no name of a checkpoint: {error}") from error


# ---------------------------------------------------------------------------------------------------------- reading
def about(path: Path) -> dict[str, Any]:
    """What `checkpoint.json` says of a checkpoint, after its files were held against it; CheckpointError that names the
    file which is missing, truncated or altered."""
    try:
        told = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        files = {name: told["files"][name] for name in _FILES}
        for name, expected in files.items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{path / name} has {size} bytes of {expected['bytes']}")
            if outputs.sha256(path / name) != expected["sha256"]:
                raise CheckpointError(
                    f"{path / name} has been altered: its SHA-256 is not that in checkpoint.json"
                )
        int(told["step"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no checkpoint: checkpoint.json: {error!r}") from error
    return told


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """What `checkpoint.json` says, weights, optimizer and state of a checkpoint; tensors on the CPU.

    CheckpointError as `about`, which names the newest sound one beside it.
    """
    try:
        told = about(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_instead(path.parent)}") from error
    weights = safetensors.torch.load_file(path / _FILES[0])
    rest = [torch.load(path / name, map_location="cpu", weights_only=True) for name in _FILES[1:]]
    return told, weights, rest[0], rest[1]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or of a safetensors file."""
    if path.is_dir():
        return load(path)[1]
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} holds no weights: {error}") from error


def _instead(folder: Path) -> str:
    sound, _ = newest_sound(folder)
    return f"; the newest sound checkpoint is {sound}" if sound else ""
