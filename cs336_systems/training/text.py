"""Where the text comes from: a stage that leaves train.txt and valid.txt in a folder, and text.json beside them.

    info = prepare(config.text, Path("runs/stories/text"))

Both hold documents, each ended by a line `<|endoftext|>` (`training.documents`). Of sources (`text.source`) there are

    stories       our own (`training.stories`), whose entropy is known
    tinystories   `roneneldan/TinyStories` (V2, by GPT-4) from its hub, by the package huggingface_hub
    random        token ids drawn uniformly, to measure speed with: no text at all
    a path        a file of text, or .jsonl with one in each line; a folder, whose *.txt and *.jsonl, nested ones too,
                  are taken in the order of their names; or ready token ids, .npy or .bin (`training.tokens`)

`text.valid` names what is held out of a path, another one; without it documents are, drawn by the seed with all their
copies, a tenth of all at most, or one. Megabytes are 10^6 bytes of documents (of ids: of the file). Limits fall between
documents, except that a single one is cut in two, and one that is longer than its limit to it.

`tinystories` was tested against a stand-in for the hub on 127.0.0.1, connections that break included, not against the
hub itself. What arrives is held against its size, by the package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cs336_systems.store.files import in_a_line, naming, reading, sha256
from cs336_systems.store.machine import cpu_cores, has_module
from cs336_systems.store.pool import Pool
from cs336_systems.training import documents, outputs
from cs336_systems.training.config import READY, Text
from cs336_systems.training.outputs import Say

REPOSITORY = "roneneldan/TinyStories"
_HUB_FILES = {"train": "TinyStoriesV2-GPT4-train.txt", "valid": "TinyStoriesV2-GPT4-valid.txt"}
_VALID_FROM = 2**40  # index of the first story that is held out: no training text comes so far
_MB = 10**6
_TEXTS = (".txt", ".jsonl")


@dataclass(frozen=True)
class Split:
    """One of the two files. bytes: of its documents; sha256: of the file; nats: -log p of all documents, of stories."""

    path: Path
    documents: int
    bytes: int
    sha256: str
    nats: float | None = None


@dataclass(frozen=True)
class TextInfo:
    """What the text is. Of random tokens there are no files: `bytes` is then the size of the token ids to draw. Of
    ready ones (source "tokens") `path` and `sha256` are theirs, and `bytes` is how much to take."""

    source: str
    seed: int
    train: Split
    valid: Split


_Splits = dict[str, dict[str, Any]]  # of train and valid how many documents and bytes they are
# Of a source: the inputs that the text depends on, and what writes train.txt and valid.txt into a folder.
_Source = tuple[Any, Callable[[Path], _Splits]]


def prepare(config: Text, folder: Path, log: Say = print, expected: Mapping[str, str] = {}) -> TextInfo:
    """The text that `config` asks for: taken from `folder`, or from one of its own in `config.cache`, or made there.

    expected: as for `outputs.stage`. ValueError for a source that does not exist, is empty, cannot be read or fetched,
    or is not UTF-8, for a text that is damaged or not the one expected, and for a folder that cannot be written.
    """
    if config.source == "random":
        log("text: random tokens need none")
        sizes = [round(mb * _MB) for mb in (config.train_mb, config.valid_mb)]
        return TextInfo("random", config.seed, *(Split(folder, 0, size, "") for size in sizes))
    known = {"stories": _stories, "tinystories": _tinystories}
    if config.valid and config.source in known:
        raise ValueError(
            f"text.valid={config.valid!r}; text.source={config.source!r} has a held-out text of its own"
        )
    if Path(config.source).suffix in READY:
        log("text: ready tokens need none")
        return TextInfo("tokens", config.seed, *_ready(config))
    kind = config.source if config.source in known else "files"
    inputs, write = known.get(kind, _files)(config)
    sizes = {"train_mb": config.train_mb, "valid_mb": config.valid_mb}
    made_from = {"source": kind, **sizes, "inputs": inputs, "seed": config.seed}
    if config.cache:
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        folder = Path(config.cache) / f"{kind}-{digest[:12]}"
    for key, told in (("source", config.source), ("valid", config.valid)) if kind == "files" else ():
        path, place = Path(told).expanduser().resolve(), folder.resolve()
        if told and (path.parent == place or (path.is_dir() and place.is_relative_to(path))):
            raise ValueError(f"text.{key}={told!r} and {folder}, which is to be written, lie in one another")

    def make(new: Path) -> dict[str, Any]:
        splits = write(new)
        sizes = [f"{s['bytes'] / _MB:.3g} MB in {s['documents']:,} documents" for s in splits.values()]
        return {"splits": splits, "about": f"{sizes[0]}; {sizes[1]} held out"}

    told = outputs.stage(folder, "text", made_from, make, log, expected)
    with reading(folder / "text.json", outputs.ANEW):
        train, valid = (
            Split(folder / file, sha256=told["files"][file]["sha256"], **told["splits"][name])
            for name, file in (("train", "train.txt"), ("valid", "valid.txt"))
        )
    return TextInfo(kind, config.seed, train, valid)


def _stories(config: Text) -> _Source:
    from cs336_systems.training import stories

    def write(new: Path) -> _Splits:
        splits, workers = {}, cpu_cores()
        for name, start, mb in (("train", 0, config.train_mb), ("valid", _VALID_FROM, config.valid_mb)):
            count, size, nats, limit = 0, 0, 0.0, max(1, round(mb * _MB))
            with (
                open(new / f"{name}.txt", "wb") as out,
                tqdm(total=limit, unit="B", unit_scale=True, disable=None) as bar,
                Pool(workers if workers > 1 else 0) as pool,
            ):
                told = stories.stories(config.seed, start, pool.map if workers > 1 else map)
                while size + count < limit:  # as lines, of which each has an end
                    one = next(told)
                    written = out.write(one.text.encode() + documents.END) - len(documents.END)
                    count, size, nats = count + 1, size + written, nats + one.nats
                    bar.update(written + 1)
            splits[name] = {"documents": count, "bytes": size, "nats": nats}
        return splits

    code = Path(stories.__file__)
    return {file.name: sha256(file) for file in (code, code.with_suffix(".txt"))}, write


def _tinystories(config: Text) -> _Source:
    corpora = (documents.Corpus([_fetched(name)], config.field) for name in _HUB_FILES.values())
    return {"repository": REPOSITORY, **_HUB_FILES}, lambda new: _copied(config, corpora, new)


def _fetched(name: str) -> Path:
    """A file in the hub's own cache, downloaded if need be."""
    if not has_module("huggingface_hub"):
        raise ValueError("text.source='tinystories' needs huggingface_hub: pip install 'cs336-systems[hub]'")
    import huggingface_hub

    advice = "; --source FILE takes a text that is here"
    with in_a_line(f"text.source='tinystories': {name} cannot be fetched", advice):
        return Path(huggingface_hub.hf_hub_download(REPOSITORY, name, repo_type="dataset"))


def _files(config: Text) -> _Source:
    found = _named(config)
    inputs = {key: [[name, sha256] for name, _, sha256 in some] for key, some in found.items()}

    def write(new: Path) -> _Splits:
        corpora = [documents.Corpus([path for _, path, _ in some], config.field) for some in found.values()]
        if not config.valid:
            corpora = documents.held_out(*corpora, config.valid_mb * _MB, config.seed)
        return _copied(config, corpora, new)

    return inputs | {"field": config.field}, write


def _named(config: Text) -> dict[str, list[tuple[str, Path, str]]]:
    """What is `_found` of the source, and of what is held out if it is named; ValueError for a file that is both."""
    found = {"source": _found("text.source", config.source)}
    if config.valid:
        found["valid"] = _found("text.valid", config.valid)
    learned = {sha256 for _, _, sha256 in found["source"]}
    if both := [name for name, _, sha256 in found.get("valid", ()) if sha256 in learned]:
        raise ValueError(
            f"text.valid={config.valid!r} holds {both[0]}, which text.source={config.source!r} has, too: what is held "
            "out must not be learned from"
        )
    return found


def _copied(config: Text, corpora: Iterable[Iterable[documents.Document]], new: Path) -> _Splits:
    """Documents to learn from and held-out ones, up to the limits."""
    limits, splits = {"train": config.train_mb * _MB or float("inf"), "valid": config.valid_mb * _MB}, {}
    for (name, limit), told in zip(limits.items(), corpora, strict=True):
        splits[name] = documents.copy(told, new / f"{name}.txt", limit)
        if not splits[name]["bytes"]:
            raise ValueError(f"{config.source} has too little text to learn from some and hold some out")
    return splits


def _found(key: str, told: str) -> list[tuple[str, Path, str]]:
    """Name, place and SHA-256 of a file, or of the texts in a folder and in folders of it, without hidden ones."""
    source = Path(told).expanduser()
    with naming("read", source):
        if not told.strip() or not source.exists():
            named = "stories, tinystories, random, or " * (key == "text.source")
            raise ValueError(f"{key}={told!r}; allowed: {named}a file or folder of text")
        if not source.is_dir():
            return [(source.name, source, sha256(source))]
        paths = (path for path in sorted(source.rglob("*")) if path.suffix.lower() in _TEXTS)
        named = [(path.relative_to(source).as_posix(), path) for path in paths if not path.is_dir()]
        shown = [(name, path, sha256(path)) for name, path in named if "/." not in f"/{name}"]
        if not shown:
            raise ValueError(f"{key}={told!r} is a folder without {', '.join(f'*{kind}' for kind in _TEXTS)}")
        return shown


def _ready(config: Text) -> list[Split]:
    for key, told in (("source", config.source), ("valid", config.valid)):
        if (path := Path(told).expanduser()).suffix not in READY or not path.is_file():
            raise ValueError(
                f"text.{key}={told!r}; ready tokens are two files, text.source and text.valid: .npy or .bin"
            )
    limits = (mb * _MB or float("inf") for mb in (config.train_mb, config.valid_mb))
    return [
        Split(path, 0, int(min(path.stat().st_size, limit)), sha256)
        for [(_, path, sha256)], limit in zip(_named(config).values(), limits, strict=True)
    ]
