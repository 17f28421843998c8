"""From text to token ids: a stage that leaves tokenizer.json, train.bin and valid.bin, and tokens.json beside them.

    info = prepare(config.tokenizer, text_info, Path("runs/stories/tokens"))
    info.train[:10]                                             # a memory map; `info.end_of_text` after each document

The tokenizer is a byte-level BPE by the package tokenizers, which encodes and decodes any text without loss: the end of
text, 256 bytes, and merges up to `vocab_size`, learned on the training text (of more than 100 MB, on blocks evenly
apart). A tokenizer.json of other making is used as it is. Blocks of about 1 MB are tokenized in processes. A .bin file
is an array of little-endian uint16, or uint32 where the vocabulary is larger than 65,536.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from cs336_systems.store.files import content
from cs336_systems.store.pool import Pool
from cs336_systems.training import documents, outputs
from cs336_systems.training.documents import END_OF_TEXT, Block
from cs336_systems.training.text import Split, TextInfo

if TYPE_CHECKING:
    from cs336_systems.training import config as configuration

_LEARN_FROM = 100 * 10**6  # bytes: BPE learns no better from more
_DRAW = 2**22  # random tokens at a time


@dataclass(frozen=True)
class TokensInfo:
    """Token ids to learn from and to be held against, as memory maps.

    valid_bytes: bytes of the text held out; of random tokens, of the array; None where the tokens are not all of the
    text. floor_nats_per_token: the entropy of the text held out, where it is known. tokenizer, end_of_text: None of
    random tokens. files: SHA-256 by name of what was learned from, text and tokenizer among it.
    """

    train: np.memmap
    valid: np.memmap
    vocab_size: int
    end_of_text: int | None
    tokenizer: Path | None
    valid_bytes: int | None
    floor_nats_per_token: float | None
    files: dict[str, str]


def prepare(
    config: configuration.Tokenizer, text: TextInfo, folder: Path, log: Callable[[str], None] = print,
    expected: Mapping[str, str] = {},
) -> TokensInfo:  # fmt: skip
    """The tokens of `text`: taken from `folder`, or made there. They do not depend on `config.workers`.

    expected: as for `outputs.stage`. Errors: ValueError where `config.path` is no tokenizer or has no end of text, or
    the text or the tokens are damaged or not those expected; OSError that names the folder where it cannot be written.
    """
    started = time.perf_counter()
    given = Path(config.path).expanduser() if config.path else None
    vocab_size = _vocab_size(load_tokenizer(given)) if given else config.vocab_size
    tokenizer = outputs.sha256(given) if given else None
    made_from: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer": tokenizer}
    random = text.source == "random"
    if random:
        made_from["random"] = {"seed": text.seed, "train": text.train.bytes, "valid": text.valid.bytes}
        make = lambda new: _draw(text, vocab_size, new)
    else:
        made_from["text"] = {"train": text.train.sha256, "valid": text.valid.sha256}
        make = lambda new: _tokenize(config, given, text, new, log)
    told = outputs.stage(folder, "tokens", made_from, make, started, log, expected)
    path, nats = None if random else folder / "tokenizer.json", text.valid.nats
    with outputs.told_by(folder / "tokens.json"):
        train, valid = (_array(folder / f"{name}.bin", told) for name in ("train", "valid"))
        names = ("train.bin", "valid.bin", "tokenizer.json")[: 2 if random else 3]
        files = {name: told["files"][name]["sha256"] for name in names}
        end_of_text = _agrees(path, told, vocab_size)
        if (lossless := random or told.get("lossless")) is None:  # made before this was looked at
            lossless = _lossless(valid, text.valid.path, path)
    if not random:
        files |= {split.path.name: split.sha256 for split in (text.train, text.valid)}
    if not lossless:
        log(f"tokens: {path} loses characters of the text; there are no bits a byte")
    floor = math.log(vocab_size) if random else nats / len(valid) if nats is not None and lossless else None
    return TokensInfo(
        train=train, valid=valid, vocab_size=told["vocab_size"], end_of_text=end_of_text, tokenizer=path,
        valid_bytes=valid.nbytes if random else text.valid.bytes if lossless else None,
        floor_nats_per_token=floor, files=files,
    )  # fmt: skip


def _array(path: Path, told: Mapping[str, Any]) -> np.memmap:
    """The ids in a file; ValueError where they are not of the width and number told, or not of the vocabulary."""
    vocab_size, count = told["vocab_size"], told["counts"][path.stem]
    if told["dtype"] != _dtype(vocab_size):
        raise ValueError(f"dtype {told['dtype']!r}; of {vocab_size} tokens it is {_dtype(vocab_size)!r}")
    ids = np.memmap(path, told["dtype"], mode="r")
    if len(ids) != count:
        raise ValueError(f"{path.name} holds {len(ids)} ids, not {count}")
    if (highest := max(int(ids[i : i + _DRAW].max()) for i in range(0, len(ids), _DRAW))) >= vocab_size:
        raise ValueError(f"{path.name} holds id {highest}; the vocabulary has {vocab_size}")
    return ids


def _agrees(path: Path | None, told: Mapping[str, Any], vocab_size: int) -> int | None:
    """The end of text; ValueError where the tokenizer (None: `vocab_size` ids without one) is not the one told of."""
    known = {"vocab_size": vocab_size, "end_of_text": None}
    if path:
        tokenizer = load_tokenizer(path)
        known = {"vocab_size": _vocab_size(tokenizer), "end_of_text": tokenizer.token_to_id(END_OF_TEXT)}
    for name, value in known.items():
        if told[name] != value:
            raise ValueError(f"{name} is {told[name]!r}, not {value}")
    return known["end_of_text"]


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json that encodes texts of any length, always the same way, and reads no special tokens out of them.

    `tokenizer.encode(text, add_special_tokens=False).ids`, `tokenizer.decode(ids)`. ValueError that names the file
    where it is none, or has no end of text.
    """
    try:
        tokenizer = Tokenizer.from_str(content(path).decode())
    except Exception as error:  # the package raises nothing more exact
        why = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ValueError(f"tokenizer.path={str(path)!r} is no tokenizer.json: {why}") from None
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"tokenizer.path={str(path)!r} has no token {END_OF_TEXT}")
    if hasattr(tokenizer.model, "dropout"):
        tokenizer.model.dropout = None  # would leave out merges at random
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text
    return tokenizer


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values()) + 1  # some leave ids out


def _dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 2**16 else "<u4"


# ------------------------------------------------------------------------------------------------------------ making
def _draw(text: TextInfo, vocab_size: int, new: Path) -> dict[str, Any]:
    """Tokens without a text, all as likely."""
    dtype, counts = np.dtype(_dtype(vocab_size)), {}
    for part, (name, split) in enumerate((("train", text.train), ("valid", text.valid))):
        random = np.random.Generator(np.random.PCG64([text.seed, part]))
        counts[name] = max(1, split.bytes // dtype.itemsize)
        with open(new / f"{name}.bin", "wb") as out:
            for start in range(0, counts[name], _DRAW):
                size = min(_DRAW, counts[name] - start)
                out.write(random.integers(vocab_size, size=size, dtype=dtype.newbyteorder("=")).astype(dtype))
    return {
        "vocab_size": vocab_size, "dtype": dtype.str, "end_of_text": None, "counts": counts,
        "about": f"{counts['train']:,} and {counts['valid']:,} random tokens of {vocab_size:,}",
    }  # fmt: skip


def _tokenize(
    config: configuration.Tokenizer, given: Path | None, text: TextInfo, new: Path, log: Callable[[str], None]
) -> dict[str, Any]:
    outputs.check(text.train.path.parent, "text")
    path = new / "tokenizer.json"
    if given:
        shutil.copyfile(given, path)
    else:
        log(f"tokens: learning {config.vocab_size:,} of them from the text")
        learned = _learn(text.train.path, config.vocab_size)
        path.write_text(learned.to_str(pretty=True), encoding="utf-8")  # `save` has errors of its own
    tokenizer = load_tokenizer(path)
    vocab_size = _vocab_size(tokenizer)
    splits = {"train": text.train, "valid": text.valid}
    counts = {
        name: _encode(split, path, config.workers, new / f"{name}.bin", _dtype(vocab_size))
        for name, split in splits.items()
    }
    ids = np.fromfile(new / "valid.bin", _dtype(vocab_size))
    short = "" if given or vocab_size == config.vocab_size else f" ({config.vocab_size:,} asked for)"
    return {
        "vocab_size": vocab_size, "dtype": _dtype(vocab_size), "end_of_text": tokenizer.token_to_id(END_OF_TEXT),
        "counts": counts, "bytes": {name: split.bytes for name, split in splits.items()},
        "lossless": _lossless(ids, text.valid.path, path),
        "about": f"{counts['train']:,} and {counts['valid']:,} tokens of {vocab_size:,}{short}, "
        f"{text.train.bytes / counts['train']:.2f} bytes each",
    }  # fmt: skip


def _lossless(ids: np.ndarray, text: Path, tokenizer: Path) -> bool:
    """Whether a text's tokens decode to that text. Else the loss of a token says nothing about the text's bytes."""
    own = load_tokenizer(tokenizer)
    ends = np.flatnonzero(ids == own.token_to_id(END_OF_TEXT))
    with open(text, "rb") as file:
        for start, end in itertools.pairwise([0, *(ends + 1).tolist()]):
            decoded = own.decode(ids[start : end - 1].tolist()).encode() + documents.END
            if file.read(len(decoded)) != decoded:
                return False
        return not file.read(1)


def _learn(path: Path, vocab_size: int) -> Tokenizer:
    blocks, size = list(documents.blocks(path)), path.stat().st_size
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # learning a word takes the square of its length, and memory is reserved for every token asked for
    short = pre_tokenizers.Split(Regex(r"\S{256}|\s{256}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([short, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 257 + size), min_frequency=2, special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=sys.stderr.isatty(),
    )  # fmt: skip
    tokenizer.train_from_iterator(map(documents.texts, blocks[:: math.ceil(size / _LEARN_FROM)]), trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer


def _encode(split: Split, tokenizer: Path, workers: int, out: Path, dtype: str) -> int:
    """Writes a split's tokens and counts them."""
    blocks, count = list(documents.blocks(split.path)), 0
    workers = min(workers or outputs.cores(), len(blocks))
    with (
        tqdm(total=blocks[-1][2], desc=out.stem, unit="B", unit_scale=True, disable=None) as bar,
        open(out, "wb") as file,
        _mapped(blocks, (tokenizer, dtype), workers) as arrays,
    ):
        for (_, start, end), ids in zip(blocks, arrays, strict=True):
            file.write(ids)
            count += len(ids)
            bar.update(end - start)
    return count


# --------------------------------------------------------------------------------------------------------- processes
@contextlib.contextmanager
def _mapped(blocks: list[Block], how: tuple[Path, str], workers: int) -> Iterator[Iterable[np.ndarray]]:
    """The tokens of each block, in order; left early, the processes end."""
    if workers == 1:
        _begin(*how)
        yield map(_ids, blocks)
        return
    with Pool(workers, _begin_process, how) as pool:
        yield pool.map(_ids, blocks)


def _begin_process(tokenizer: Path, dtype: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _begin(tokenizer, dtype)


def _begin(tokenizer: Path, dtype: str) -> None:
    global _worker
    _worker = load_tokenizer(tokenizer), dtype


_worker: tuple[Tokenizer, str]  # of this process


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _ids(block: Block) -> np.ndarray:
    tokenizer, dtype = _worker
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    try:
        with _silent_stderr():  # before it raises, a panic tells of itself
            found = tokenizer.encode_batch_fast(documents.texts(block), add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the package: no Exception, and of no module
            raise
        raise ValueError(f"the tokenizer fails at the text: {error}") from None
    for encoded in found:
        ids += encoded.ids
        ids.append(end_of_text)
    return np.array(ids[:-1], dtype)
