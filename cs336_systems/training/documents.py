"""Documents in files of text: found in anybody's, kept in ours, cut into blocks to tokenize.

In ours each document is ended by `END`: the line `<|endoftext|>`, with the line break before it. No document holds that
mark, so a file can be split at `END`. In other files a document ends at a `<|endoftext|>`, which takes a line break on
either side with it, or where the file ends; in a .jsonl file also with its line, of which one field is taken. A byte
order mark in front, as editors of Windows write it, is no text.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import mmap
import re
from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.store import files

END_OF_TEXT = "<|endoftext|>"
END = f"\n{END_OF_TEXT}\n".encode()
_MARK = END_OF_TEXT.encode()
_SEPARATOR = re.compile(rb"(\r?\n)?" + re.escape(_MARK) + rb"(\r?\n)?")
_BLOCK = 2**20  # bytes

Document = memoryview  # into a file, mostly


def opened(path: Path) -> mmap.mmap:
    """A file's content; ValueError that names it where it has none, cannot be read or is not UTF-8."""
    with files.naming("read", path), files.opened(path) as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
        try:
            for _ in codecs.iterdecode(iter(lambda: file.read(_BLOCK), b""), "utf-8"):
                pass
        except UnicodeDecodeError as error:
            at, byte = file.tell() - len(error.object) + error.start, error.object[error.start]
            raise ValueError(f"{path} is not UTF-8: byte {at} is 0x{byte:02x}") from None
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def found(data: mmap.mmap | bytes) -> Iterator[Document]:
    """The documents of a text; those of white space are left out."""
    start, view = len(codecs.BOM_UTF8) * (data[:3] == codecs.BOM_UTF8), memoryview(data)
    while start < len(data):
        mark, end, after = data.find(_MARK, start), len(data), len(data)
        if mark >= 0:
            end, after = _SEPARATOR.search(data, max(start, mark - 2)).span()
        if re.compile(rb"\S").search(data, start, end):
            yield view[start:end]
        start = after


class Corpus:
    """The documents of some files, in their order; they are read anew each time. field: of lines of a .jsonl file.

    ValueError as `opened`, and, once it is read, for a line that is no JSON object with a text under that name."""

    def __init__(self, paths: Iterable[Path], field: str) -> None:
        self.files, self.field = [(path, opened(path)) for path in paths], field

    def __iter__(self) -> Iterator[Document]:
        for path, data in self.files:
            yield from self._in_lines(path, data) if path.suffix.lower() == ".jsonl" else found(data)

    def _in_lines(self, path: Path, data: mmap.mmap) -> Iterator[Document]:
        data.seek(0)
        for number, line in enumerate(iter(data.readline, b""), 1):
            if line.strip():
                try:
                    text = json.loads(line)[self.field].encode()
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    raise ValueError(
                        f"{path}, line {number}: no JSON object with a text {self.field!r}"
                    ) from None
                yield from found(text)


def held_out(corpus: Corpus, limit: float, seed: int) -> tuple[Iterable[Document], Iterable[Document]]:
    """The documents to learn from, and some at random: as many as have `limit` bytes, and no more than a tenth of all,
    but one at least. Those that are alike stay together, so that what is held out is not learned from, unless every
    kind has more than that. One single document is cut in two."""
    digest = lambda document: int.from_bytes(hashlib.blake2b(document, digest_size=8).digest())
    about = np.fromiter(((len(one), digest(one)) for one in corpus), [("size", "i8"), ("digest", "u8")])
    limit = min(limit, about["size"].sum() / 10)
    if len(about) == 1:
        [whole] = corpus
        # characters have 4 bytes at most
        cut = _boundary(whole, 0, min(len(whole), len(whole) - int(limit) + 3))
        return [whole[:cut]], [whole[cut:]]
    _, first, kind = np.unique(about["digest"], return_index=True, return_inverse=True)
    kind = first.argsort().argsort()[kind]  # which documents are alike: numbers in the order of their first
    if (np.bincount(kind, about["size"]) > limit).all():
        kind = np.arange(len(about))
    sizes = np.bincount(kind, about["size"])
    order = np.random.default_rng(seed).permutation(len(sizes))
    order, out = order[sizes[order] <= limit], np.zeros(len(sizes), bool)
    count = np.searchsorted(sizes[order].cumsum(), limit, "right")
    out[order[:count] if count or not len(sizes) else sizes.argmin()] = True
    return compress(corpus, ~out[kind]), compress(corpus, out[kind])


def copy(documents: Iterable[Document], path: Path, limit: float) -> dict[str, Any]:
    """Writes documents into a file of ours, up to `limit` bytes (of one that is longer, what fits); counts of both."""
    count = size = 0
    with open(path, "wb") as out:
        for document in documents:
            left = limit - size
            if count and left < len(document) <= limit:
                break
            if not (kept := document[: _boundary(document, 0, int(min(left, len(document))))]):
                break
            out.write(kept)
            out.write(END)
            count, size = count + 1, size + len(kept)
    return {"documents": count, "bytes": size}


def blocks(path: Path) -> Iterator[bytes]:
    """A file of ours in pieces of about 1 MB, which end where a document does; `texts` reads them.

    A longer document is cut before a space that comes after a printable ASCII character: a BPE on top of GPT-2's
    splitting has a token begin there in any case. Where there is no such place, between two characters.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while start < len(data):
            place = start + _BLOCK
            ended = data.rfind(END, start, place + len(END) - 1)  # one that begins before `place`
            if ended >= 0:
                end = ended + len(END)
            elif spaces := list(re.compile(rb"[!-~](?= )").finditer(data, place - _BLOCK // 2, place)):
                end = spaces[-1].end()
            else:
                end = _boundary(data, start, place)
            yield data[start:end]
            start = end


def texts(block: bytes) -> list[str]:
    """The documents of a block; after each but the last one the text ends."""
    return [document.decode() for document in block.split(END)]


def _boundary(data: mmap.mmap | memoryview, start: int, place: int) -> int:
    """The last place up to this one, and not before `start`, at which a character begins."""
    while start < place < len(data) and data[place] & 0xC0 == 0x80:
        place -= 1
    return place
