"""Checkpoints: folders that are there whole or not at all.

    <out>/checkpoints/step-00000200/
        model.safetensors     the weights, as `TransformerLM.state_dict` names them
        optimizer.pt          the optimizer's state, as the plain optimizer would save it
        state.pt              the gradient scaler, and the random state of each rank
        checkpoint.json       step, tokens, losses, the configuration, and size and SHA-256 of the files above

A checkpoint is written beside its place, synced to disk, and renamed. `sound` reads the digests: a truncated or
foreign one is refused by name. `best` is a file with the name of the one with the lowest validation loss.
"""

from __future__ import annotations

import hashlib
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

from cs336_systems.training.outputs import sync_folder

_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "optimizer.pt", "state.pt")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; says which, why, and what there is instead."""


def save(
    folder: Path, step: int, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any],
    state: Mapping[str, Any], about: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Writes a checkpoint of `step` into `folder`, and returns its place; one that is there already is replaced.

    weights: contiguous tensors by name; optimizer, state: what `torch.load(weights_only=True)` reads; about: JSON.
    CheckpointError where the disk is full or cannot be written; what was saved before stays.
    """
    final = folder / f"step-{step:08d}"
    new = folder / f".{final.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        new.mkdir()
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        contents = (safetensors.torch.save(plain), _bytes_of(optimizer), _bytes_of(state))
        files = {}
        for name, content in zip(_FILES, contents, strict=True):
            _write(new / name, content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        text = json.dumps({"step": step, **about, "files": files}, indent=1)
        _write(new / "checkpoint.json", text.encode())
        if final.exists():
            shutil.rmtree(final)
        os.replace(new, final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(f"cannot write {final}: {error.strerror or error}{_instead(folder)}") from error
    return final


def _bytes_of(value: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(value), buffer)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sweep(folder: Path) -> None:
    """Removes what writers left that were killed."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


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
    """Removes all but the newest `count`, and the best."""
    best = best_of(folder)
    for path in found(folder)[:-count]:
        if path != best:
            shutil.rmtree(path)


def mark_best(path: Path) -> None:
    """Remembers that a checkpoint is the best of its folder."""
    new = path.parent / f".best.{os.getpid()}"
    new.write_text(path.name, encoding="utf-8")
    os.replace(new, path.parent / "best")


def best_of(folder: Path) -> Path | None:
    """The best of a folder's checkpoints, if one was marked."""
    mark = folder / "best"
    return folder / mark.read_text(encoding="utf-8").strip() if mark.is_file() else None


# ---------------------------------------------------------------------------------------------------------- reading
def about(path: Path) -> dict[str, Any]:
    """What `checkpoint.json` says of a checkpoint, after its files were held against it.

    CheckpointError that names the file which is missing, truncated or altered, and the newest sound one beside it.
    """
    try:
        told = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        files = {name: told["files"][name] for name in _FILES}
        int(told["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {_short(error)}") from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes of {expected['bytes']}")
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != expected["sha256"]:
            raise CheckpointError(f"{file} has been altered: its SHA-256 is not that in checkpoint.json")
    return told


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """What `checkpoint.json` says, weights, optimizer and state of a checkpoint; tensors on the CPU.

    CheckpointError as `about`, which offers another one where there is one.
    """
    try:
        told = about(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_instead(path.parent, path)}") from error
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
        raise CheckpointError(f"{path} holds no weights: {_short(error)}") from error


def _instead(folder: Path, but: Path | None = None) -> str:
    for path in reversed(found(folder)):
        if path != but:
            try:
                about(path)
            except CheckpointError:
                continue
            return f"; the newest sound checkpoint is {path}"
    return "; there is no sound checkpoint yet" if but is None else ""


def _short(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"checkpoint.json has no {error}"
    if isinstance(error, OSError):
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    return str(error).splitlines()[0]
