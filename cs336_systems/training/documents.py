"""Documents in files of text: found in anybody's, kept in ours, cut into blocks to tokenize.

In ours each document is ended by `END`: the line `<|endoftext|>`, with the line break before it. No document holds that
mark, so a file can be split at `END`. In other files a document ends at a `<|endoftext|>`, which takes a line break on
either side with it, or where the file ends.
"""

from __future__ import annotations

import codecs
import mmap
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cs336_systems.store.files import opened as regular

END_OF_TEXT = "<|endoftext|>"
END = f"\n{END_OF_TEXT}\n".encode()
_MARK = END_OF_TEXT.encode()
_BLOCK = 2**20  # bytes

Document = tuple[mmap.mmap, int, int]  # a file, and where in it the document begins and ends
Block = tuple[Path, int, int]  # the same of some documents, or a piece of a long one


def opened(path: Path) -> mmap.mmap:
    """A file's content; ValueError that names it where it has none, cannot be read or is not UTF-8."""
    try:
        with regular(path) as file:
            if not path.stat().st_size:
                raise ValueError(f"{path} is empty")
            decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
            while chunk := file.read(_BLOCK):
                read += len(chunk)
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except UnicodeDecodeError as error:
        place = read - len(error.object) + error.start
        raise ValueError(f"{path} is not UTF-8: byte {place} is 0x{error.object[error.start]:02x}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def found(data: mmap.mmap) -> Iterator[Document]:
    """Where the documents of a file lie; those of white space are left out."""
    start = 0
    while start < len(data):
        end, after = len(data), len(data)
        mark = data.find(_MARK, start)
        if mark >= 0:
            end = mark - len(re.search(rb"(\r?\n)?\Z", data[max(start, mark - 2) : mark])[0])
            after = mark + len(_MARK)
            after += len(re.match(rb"(\r?\n)?", data[after : after + 2])[0])
        if re.compile(rb"\S").search(data, start, end):
            yield data, start, end
        start = after


def held_out(files: list[mmap.mmap], limit: float) -> tuple[Iterable[Document], Iterable[Document]]:
    """The documents to learn from, and the last ones: as many as have `limit` bytes, and no more than a tenth of all,
    but one at least. One single document is cut in two."""
    limit = min(limit, sum(map(len, files)) / 10)
    tail: deque[Document] = deque()
    count = size = 0
    for data, start, end in chain.from_iterable(map(found, files)):
        tail.append((data, start, end))
        count, size = count + 1, size + end - start
        while len(tail) > 1 and size > limit:
            _, start, end = tail.popleft()
            size -= end - start
    if count == 1:
        [(data, start, end)] = tail
        cut = _boundary(data, start, min(end, end - int(limit) + 3))  # characters have four bytes at most
        return [(data, start, cut)], [(data, cut, end)]
    return islice(chain.from_iterable(map(found, files)), count - len(tail)), tail


def copy(documents: Iterable[Document], path: Path, limit: float) -> dict[str, Any]:
    """Writes documents into a file of ours, up to `limit` bytes (of a first longer one, so much); counts of both."""
    count = size = 0
    with open(path, "wb") as out:
        for data, start, end in documents:
            if count and size + end - start > limit:
                break
            end = _boundary(data, start, start + int(min(limit, end - start)))
            out.write(memoryview(data)[start:end])
            out.write(END)
            count, size = count + 1, size + end - start
    return {"documents": count, "bytes": size}


def blocks(path: Path) -> Iterator[Block]:
    """A file of ours in pieces of about 1 MB, which end where a document does.

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
            yield path, start, end
            start = end


def texts(block: Block) -> list[str]:
    """The documents of a block; after each but the last one the text ends."""
    path, start, end = block
    with open(path, "rb") as file:
        file.seek(start)
        return [document.decode() for document in file.read(end - start).split(END)]


def _boundary(data: mmap.mmap, start: int, place: int) -> int:
    """The last place up to this one, and not before `start`, at which a character begins."""
    while start < place < len(data) and data[place] & 0xC0 == 0x80:
        place -= 1
    return place
