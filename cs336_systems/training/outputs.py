"""What a stage of a run leaves: files that are there whole or not at all, taken again when made from the same.

    told = stage(folder, "text", made_from, make, log=print)

`<name>.json` beside the files is written last. It says what they were made from (settings, SHA-256 of inputs) and the
size and SHA-256 of each; what says otherwise, or has files of other sizes, is made anew. Files of the same size whose
content is another are refused. Dates play no part.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cs336_systems.store.files import StoreError, alone, content, making, naming, sha256, sync

Say = Callable[[str], None]  # is told a line
silent: Say = lambda line: None
ANEW = "; remove it to make anew what it tells of"  # of a stage's record that is damaged
_FORMAT = 1  # of the files that stages write: what has another is made anew


def stage(
    folder: Path, name: str, made_from: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]],
    log: Say, expected: Mapping[str, str] = {},
) -> dict[str, Any]:  # fmt: skip
    """What `<name>.json` in `folder` says, after the files it speaks of were found there, or made.

    make(new) writes files into the empty folder `new` and returns what else is to be said, JSON, with a line about it
    under "about". expected: SHA-256 of files by name, of those that must come out if they do at all. ValueError that
    names the folder where it cannot be written, and for files that are damaged or not those expected. What was there
    stays then.
    """
    started, record = time.perf_counter(), folder / f"{name}.json"
    made_from = json.loads(json.dumps({"format": _FORMAT, **made_from}))
    with alone(folder, log), naming("write", folder):
        taken = told = _taken(record, made_from)
        if not told:
            with making(folder) as new:
                told = recorded(new / record.name, {"from": made_from, **make(new)})
                _hold(told["files"], expected, folder)
                record.unlink(missing_ok=True)
                for file in told["files"]:
                    os.replace(new / file, folder / file)
                sync(folder)
                os.replace(new / record.name, record)
    if taken:
        if wrong := first_wrong(folder, told["files"]):
            raise StoreError(f"{wrong}; remove {record} to make it anew")
        _hold(told["files"], expected, folder)
    verb = "took" if taken else "made"
    log(f"{name}: {verb} {folder} in {time.perf_counter() - started:.1f} s: {told['about']}")
    return told


def first_wrong(folder: Path, files: Mapping[str, Any]) -> str:
    """Reads some files in full; what is wrong with the first that is not what `recorded` said of it, "" where all are
    sound."""
    for name, told in files.items():
        if not (path := folder / name).is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != told["bytes"]:
            return f"{path} has {size} bytes of {told['bytes']}"
        if sha256(path) != told["sha256"]:
            return f"{path} has been altered: its SHA-256 is not the one recorded"
    return ""


def _hold(files: Mapping[str, Any], expected: Mapping[str, str], folder: Path) -> None:
    for name, about in files.items():
        if about["sha256"] != expected.get(name, about["sha256"]):
            raise ValueError(
                f"{folder / name} would not be what the run's checkpoints have learned from: the text or its tokenizer "
                "is another (tokenizer.path keeps a tokenizer); choose another out for it"
            )


def _taken(record: Path, made_from: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        told = json.loads(content(record))
        same = all(record.with_name(f).stat().st_size == about["bytes"] for f, about in told["files"].items())
        return told if same and told["from"] == made_from else None
    # not there, or none of ours: to be made
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def recorded(record: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a JSON file beside the files of a folder: `about`, and the size and SHA-256 of each; all are on the disk
    when it returns what it wrote."""
    told: dict[str, Any] = {**about, "files": {}}
    for path in sorted(record.parent.iterdir()):
        sync(path)
        told["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    record.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    sync(record)
    return told
