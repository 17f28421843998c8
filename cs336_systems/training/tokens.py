"""From text to token ids: a stage that leaves tokenizer.json, train.bin and valid.bin, and tokens.json beside them.

    info = prepare(config.tokenizer, text_info, Path("runs/stories/tokens"))
    info.train[:10]                                             # a memory map; `info.end_of_text` after each document

The tokenizer is a byte-level BPE by the package tokenizers, which encodes and decodes any text without loss: the end of
text, 256 bytes, and merges up to `vocab_size`, learned on the training text (of more than 100 MB, on blocks evenly
apart). A tokenizer.json of other making is used as it is. The .bin files are arrays of little-endian uint16, or uint32
where the vocabulary is larger than 65,536.

Ids that are ready (`text.source=train.bin text.valid=valid.bin`) are taken as they are, up to `text.train_mb` and
`valid_mb` of the files: .npy of any integers, .bin of `tokenizer.dtype`. They are of the tokenizer in `tokenizer.path`,
without which the model cannot be asked to write, or at least below `tokenizer.vocab_size`.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from cs336_systems.store.files import content, in_a_line, reading, sha256
from cs336_systems.training import config as configuration
from cs336_systems.training import documents, outputs
from cs336_systems.training.batches import Data
from cs336_systems.training.documents import END_OF_TEXT
from cs336_systems.training.text import Split, TextInfo

_LEARN_FROM = 100 * 10**6  # bytes: BPE learns no better from more
_DRAW = 2**22  # tokens at a time
_AT_ONCE = 8  # blocks that the package spreads over its threads; 1 MB of text takes some 25 MB meanwhile
# what ends a text, by those who make tokenizers
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


def prepare(
    config: configuration.Tokenizer, text: TextInfo, folder: Path, log: Callable[[str], None] = print,
    expected: Mapping[str, str] = {},
) -> Data:  # fmt: skip
    """The tokens of `text`: taken from `folder`, or made there.

    expected: as for `outputs.stage`. ValueError where `config.path` is no tokenizer or has no end of text, where the
    text or the tokens are damaged or not those expected, and where the folder cannot be written.
    """
    given = Path(config.path).expanduser() if config.path else None
    known = load_tokenizer(given, config.separator) if given else None
    parts = {"train": text.train, "valid": text.valid}
    random, of_text = text.source == "random", text.train.documents > 0
    made_from: dict[str, Any] = {
        "vocab_size": _vocab_size(known) if known else config.vocab_size,
        "tokenizer": sha256(given) if given else None,
    }
    if random:
        made_from["random"] = {"seed": text.seed} | {name: split.bytes for name, split in parts.items()}
    elif of_text:
        made_from["text"] = {name: split.sha256 for name, split in parts.items()}
    else:
        made_from["ready"] = {name: [s.sha256, s.bytes, config.dtype] for name, s in parts.items()}
    made_from |= {"separator": config.separator} if config.separator else {}

    def make(new: Path) -> dict[str, Any]:
        tokenizer, path = None if random else known, new / "tokenizer.json"
        if tokenizer:
            shutil.copyfile(given, path)
        elif of_text:
            log(f"tokens: learning {config.vocab_size:,} of them from the text")
            learned = _learn(text.train.path, config.vocab_size)
            path.write_text(learned.to_str(pretty=True), encoding="utf-8")  # `save` has errors of its own
            tokenizer = load_tokenizer(path, config.separator)
        vocab_size = _vocab_size(tokenizer) if tokenizer else made_from["vocab_size"]
        end = end_of_text(tokenizer, config.separator) if tokenizer else None
        dtype, counts = np.dtype("<u2" if vocab_size <= 2**16 else "<u4"), {}
        for part, (name, split) in enumerate(parts.items()):
            if random:
                ids = _drawn([text.seed, part], max(1, split.bytes // dtype.itemsize), vocab_size, dtype)
            elif of_text:
                ids = _encoded(split.path, tokenizer, end, name)
            else:
                ids = _taken(split, config.dtype, vocab_size)
            with open(new / f"{name}.bin", "wb") as out:
                for some in ids:
                    out.write(some.astype(dtype))
                counts[name] = out.tell() // dtype.itemsize
        about = f"{counts['train']:,} and {counts['valid']:,} tokens of {vocab_size:,}"
        lossless = random
        if of_text:
            short = "" if given or vocab_size == config.vocab_size else f" ({config.vocab_size:,} asked for)"
            about += f"{short}, {text.train.bytes / counts['train']:.2f} bytes each"
            lossless = _lossless(np.fromfile(new / "valid.bin", dtype), text.valid.path, tokenizer, end)
        return {
            "vocab_size": vocab_size, "dtype": dtype.str, "end_of_text": end, "counts": counts,
            "lossless": lossless, "about": about,
        }  # fmt: skip

    told = outputs.stage(folder, "tokens", made_from, make, log, expected)
    with reading(folder / "tokens.json", outputs.ANEW):
        train, valid = (np.memmap(folder / f"{name}.bin", told["dtype"], mode="r") for name in parts)
        files = {name: about["sha256"] for name, about in told["files"].items()}
        lossless, vocab_size, end = told["lossless"], told["vocab_size"], told["end_of_text"]
    path = folder / "tokenizer.json" if "tokenizer.json" in files else None
    if of_text:
        files |= {split.path.name: split.sha256 for split in parts.values()}
        if not lossless:
            log(f"tokens: {path} loses characters of the text; there are no bits a byte")
    if random:
        return Data(train, valid, vocab_size, valid.nbytes, math.log(vocab_size), files=files)
    size, nats = text.valid.bytes if lossless else None, text.valid.nats
    floor = None if size is None or nats is None else nats / len(valid)
    return Data(train, valid, vocab_size, size, floor, path, files, end)


def load_tokenizer(path: Path, separator: str = "") -> Tokenizer:
    """A tokenizer.json that encodes texts of any length, always the same way, and reads no special tokens out of them.

    `tokenizer.encode(text, add_special_tokens=False).ids`, `tokenizer.decode(ids)`. separator: its token after each
    document; "": as `end_of_text` finds it. ValueError that names the file where it is none, or has no such token.
    """
    with in_a_line(f"tokenizer.path={str(path)!r} is no tokenizer.json"):
        tokenizer = Tokenizer.from_str(content(path).decode())
    if end_of_text(tokenizer, separator) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
        raise ValueError(
            f"tokenizer.path={str(path)!r} has no token {separator or END_OF_TEXT}; tokenizer.separator names the one "
            f"that stands after each document, such as {', '.join(special) or 'none'}"
        )
    if hasattr(tokenizer.model, "dropout"):
        tokenizer.model.dropout = None  # would leave out merges at random
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text
    return tokenizer


def end_of_text(tokenizer: Tokenizer, separator: str = "") -> int | None:
    """The token after each document: the one asked for, or the first that tokenizers have for it; None: not there."""
    ids = map(tokenizer.token_to_id, [separator] if separator else _ENDS)
    return next((token for token in ids if token is not None), None)


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """`ids` of each text, by as many threads as there are cores; ValueError, in a line, where the tokenizer fails."""
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:
        # what the package raises is no more exact, and its panics are no exceptions
        if type(error).__name__ not in ("Exception", "PanicException"):
            raise
        raise ValueError(f"the tokenizer fails at the text: {error}") from None


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values()) + 1  # some leave ids out


# ------------------------------------------------------------------------------------------------------------ making
def _drawn(seed: list[int], count: int, vocab_size: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Tokens without a text, all as likely."""
    random = np.random.Generator(np.random.PCG64(seed))
    for start in range(0, count, _DRAW):
        yield random.integers(vocab_size, size=min(_DRAW, count - start), dtype=dtype.newbyteorder("="))


def _taken(split: Split, dtype: str, vocab_size: int) -> Iterator[np.ndarray]:
    """Ids from another's file; ValueError that names it where it holds none, or such as are not of the vocabulary."""
    npy = split.path.suffix == ".npy"
    try:
        ids = np.load(split.path, mmap_mode="r") if npy else np.memmap(split.path, dtype, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{split.path} holds no array of {'' if npy else dtype + ' '}ids: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{split.path} holds {ids.dtype} of shape {ids.shape}; allowed: whole numbers in a row"
        )
    if not npy and ids.itemsize == 2 and len(ids) > 1 and not ids[1 : 2 * _DRAW : 2].any():
        raise ValueError(
            f"{split.path} holds 0 in every other place, as ids of 32 bits do; tokenizer.dtype says how many"
        )
    if not len(ids := ids[: split.bytes // ids.itemsize]):
        raise ValueError(f"{split.path} holds no ids")
    for start in range(0, len(ids), _DRAW):
        some = ids[start : start + _DRAW]
        if (low := some.min()) < 0 or (high := some.max()) >= vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"{split.path} holds id {wrong}; the vocabulary has {vocab_size}")
        yield some


def _lossless(ids: np.ndarray, text: Path, tokenizer: Tokenizer, end_of_text: int) -> bool:
    """Whether a text's tokens decode to that text. Else the loss of a token says nothing about the text's bytes."""
    ends = np.flatnonzero(ids == end_of_text)
    with open(text, "rb") as file:
        for start, end in itertools.pairwise([0, *(ends + 1).tolist()]):
            decoded = tokenizer.decode(ids[start : end - 1].tolist()).encode() + documents.END
            if file.read(len(decoded)) != decoded:
                return False
        return not file.read(1)


def _learn(path: Path, vocab_size: int) -> Tokenizer:
    size = path.stat().st_size
    blocks = itertools.islice(documents.blocks(path), 0, None, math.ceil(size / _LEARN_FROM))
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
    tokenizer.train_from_iterator(map(documents.texts, blocks), trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer


def _encoded(path: Path, tokenizer: Tokenizer, end_of_text: int, name: str) -> Iterator[np.ndarray]:
    """The tokens of a text, by blocks."""
    blocks = documents.blocks(path)
    with tqdm(total=path.stat().st_size, desc=name, unit="B", unit_scale=True, disable=None) as bar:
        while some := list(itertools.islice(blocks, _AT_ONCE)):
            told = [documents.texts(block) for block in some]
            ids_of = iter(encoded(tokenizer, [text for texts in told for text in texts]))
            for block, texts in zip(some, told, strict=True):
                ids = [token for _ in texts for token in (*next(ids_of).ids, end_of_text)]
                yield np.array(ids[:-1], np.uint32)
                bar.update(len(block))
