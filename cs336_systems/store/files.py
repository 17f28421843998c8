"""Files of results: read with a line on what is wrong with them, replaced whole, changed by one process at a time.

What is written stands beside its place first (`.<name>.<process>.tmp`): a full disk or a kill leaves the file as it
was, and the next writer sweeps what a killed one left.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from cs336_systems.store import numbers


class StoreError(ValueError):
    """What is wrong with a file of results, or with the place where it belongs, in one line that names it."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows: the line, without the calls that led to it."""
        return [f"{type(self).__name__}: {self}"]


@contextmanager
def naming(what: str, path: Path) -> Iterator[None]:
    """Says of the system's errors what could not be done, and where."""
    try:
        yield
    except OSError as error:
        why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise StoreError(f"cannot {what} {path}: {why}") from error


@contextmanager
def in_a_line(what: str, advice: str = "") -> Iterator[None]:
    """Turns whatever is raised within, of others' packages anything, into one error: what, why, advice."""
    try:
        yield
    except (StoreError, MemoryError):
        raise
    except Exception as error:
        why = next(filter(None, map(str.strip, str(error).splitlines())), "")
        raise StoreError(f"{what}: {type(error).__name__}: {why[:200]}{advice}") from error


@contextmanager
def reading(file: Path, advice: str = "") -> Iterator[None]:
    """The same of damaged or foreign content, whose error names the file; of a file that is not there, too."""
    with in_a_line(f"{file} is damaged", advice):
        try:
            yield
        except FileNotFoundError as error:
            raise StoreError(f"{error.filename or file} is missing{advice}") from error


# ------------------------------------------------------------------------------------------------- reading
def opened(path: Path) -> BufferedReader:
    """A regular file to read; OSError for what else may stand there: a pipe or a device need never end."""
    # without O_NONBLOCK a pipe waits for who writes
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def content(path: Path) -> bytes:
    """Of a regular file; OSError as `opened`."""
    with opened(path) as file:
        return file.read()


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal; StoreError where it cannot be read."""
    with naming("read", path), opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str | None:
    """The text of a file, with or without a byte order mark; None where there is no such file."""
    with naming("read", path):
        try:
            data = content(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise
            return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise StoreError(f"{path}, line {line}: no text in UTF-8") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if (text := read_text(path)) is None:
        return {}
    try:
        found = json.loads(text, object_pairs_hook=_each_once, parse_float=numbers.kept)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} holds {type(found).__name__}, not an object")
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} twice in one object")
        found[name] = value
    return found


def visible(text: str) -> str:
    """The text with a space for each control, format or half character and each end of a line."""
    if text.isprintable():
        return text
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def read_table(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a CSV, and its rows with their lines; nothing of either where there is no such file."""
    if (text := read_text(path)) is None:
        return [], []
    if text and text[-1] not in "\r\n":
        raise StoreError(f"{path}, line {len(text.splitlines())}: cut off, without the end of a line")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        if not (header := next(reader, [])):
            raise StoreError(f"{path} is empty; expected a line of columns")
        if twice := [name for place, name in enumerate(header) if name in header[:place]]:
            raise StoreError(f"{path} has columns twice: {', '.join(twice)}")
        for cells in filter(None, reader):  # without empty lines
            if len(cells) != len(header):
                raise StoreError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells for {len(header)} columns"
                )
            rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise StoreError(f"{path}, line {reader.line_num}: {error}") from error
    return header, rows


# ------------------------------------------------------------------------------------------------- writing
def replace(contents: Mapping[Path, str | bytes]) -> None:
    """Replaces files whole. All that is new is on the disk before the first of them takes its place: where that cannot
    be (StoreError), every file stays as it was."""
    written: dict[Path, Path] = {}
    try:
        for path, new in contents.items():
            place = path.resolve()  # of a link, what it leads to
            with naming("write into", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                written[place] = place.with_name(f".{place.name}.{os.getpid()}.tmp")
                # what an exception says may hold anything; a row is not lost for that
                if isinstance(new, str):
                    new = new.encode("utf-8", "backslashreplace")
                with open(written[place], "wb") as file:
                    file.write(new)
                    file.flush()
                    os.fsync(file.fileno())
        for place, temporary in written.items():
            with naming("write", place):
                os.replace(temporary, place)
    finally:
        for temporary in written.values():
            # it has taken its place; or could not be written, which is what is to be said
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """An empty folder in `folder` for what is to be renamed once it is finished; the rest is removed."""
    new = folder / ".making"
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    new.mkdir(parents=True)
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def sync(path: Path) -> None:
    """Has a file's content, or a folder's names, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(parts: Mapping[str, Any]) -> str:
    """An object as JSON with a line for each of its parts, and for each entry of a list of objects."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in parts.items()) + "\n}\n"
    )


def _lines(value: Any) -> str:
    if isinstance(value, list | tuple) and any(isinstance(entry, dict) for entry in value):
        return "[\n " + ",\n ".join(map(_lines, value)) + "\n]"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def make_folder(folder: str | Path) -> Path:
    """Makes a folder, and returns its path; ValueError, before the work whose results it is for, where nothing can be
    written into it, or where its name is blank."""
    if not str(folder).strip():
        raise ValueError(f"{str(folder)!r} is not the name of a folder")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder} is not a folder that can be written: {error.strerror}") from error
    return folder


@contextmanager
def lock(path: Path, busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a lock file, which the system releases when this process ends, however it does. Where another process holds
    it, calls `busy` and waits. The file stays: were it removed, two could hold one of the same name. Where the disk has
    no locks, that nobody else writes is the user's care."""
    with naming("open", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # for writing, unless it is another user's: NFS locks none that is open for reading only
        others = path.exists() and not os.access(path, os.W_OK)
        file = os.open(path, os.O_RDONLY if others else os.O_RDWR | os.O_CREAT, 0o666)
    with _held(file, path, busy):
        yield


@contextmanager
def _held(file: int, path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of an open file, which is closed afterwards."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            with naming("lock", path):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise StoreError(f"cannot lock {path}: {error.strerror}") from error
        yield
    finally:
        os.close(file)


@contextmanager
def alone(folder: Path, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Alone among the commands that write into a folder, which is made, and goes where it stays empty. Where another
    process is at it, `say` gets a line, and this one waits; without `say`, StoreError. The folder is locked itself, so
    that no file is left in it; it goes while it is, and who waited for it makes another."""

    def busy() -> None:
        line = f"{folder}: another process is writing into it; "
        if say is None:
            raise StoreError(line + "wait until it has ended, or choose another folder")
        say(line + "waiting until it has ended")

    while True:
        with naming("write into", folder):
            new = [place for place in (folder, *folder.parents) if not place.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with _held(file, folder, busy):
            if not (folder.exists() and os.path.samestat(os.fstat(file), folder.stat())):
                continue
            try:
                yield
            finally:
                with suppress(OSError):  # something stands in it
                    for place in new:
                        place.rmdir()
            return


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Alone in changing the files of a folder; what a killed process left half written is swept first."""
    with lock(folder / ".lock"):
        with naming("write into", folder):
            for leftover in folder.rglob(".*.tmp"):
                leftover.unlink()
        yield
