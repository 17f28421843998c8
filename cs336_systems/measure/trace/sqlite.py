"""Reads the SQLite file that Nsight Systems exports (`nsys export --type=sqlite`) into an `events.Trace`.

The tables, as its manual describes them (https://docs.nvidia.com/nsight-systems/AnalysisGuide, "SQLite Schema
Reference"), compared with the schemas of exports from 2023 to 2025. Only those exist whose events were captured:

    CUPTI_ACTIVITY_KIND_KERNEL        start, end (ns), deviceId, streamId, correlationId, globalPid, demangledName
    CUPTI_ACTIVITY_KIND_MEMCPY        the same with copyKind instead of the name
    CUPTI_ACTIVITY_KIND_MEMSET        the same without either
    CUPTI_ACTIVITY_KIND_GRAPH_TRACE   likewise: launches of CUDA graphs as a whole, with --cuda-graph-trace=graph
    CUPTI_ACTIVITY_KIND_RUNTIME       calls of the CUDA runtime and driver: start, correlationId, globalTid
    NVTX_EVENTS                       start, end, eventType, text or textId, globalTid, domainId
    StringIds                         id, value

A name may have a version behind it (`NVTX_EVENTS_V2`), and may be that of a view. Times count from the start of the
capture, or from 1970 (`nsys export --ts-normalize=true`).

A global thread id holds the process in the bits from 24 on, and the thread in those below. Within a process a
correlation id ties what the device did to the call that launched it; all kernels of a CUDA graph carry the one of
their cudaGraphLaunch.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

from cs336_systems.measure.trace.events import Kernel, Range, Trace

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
NVTX, STRINGS = "NVTX_EVENTS", "StringIds"
GPU = "TARGET_INFO_GPU"
# the columns without which a table is of no use here (a kernel's name, one of NAME_COLUMNS, comes last), and others
_PLACE = ("deviceId", "correlationId", "globalPid")
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    KERNEL: (("start", "end", "streamId"), _PLACE),
    MEMCPY: (("start", "end", "streamId", "copyKind"), _PLACE),
    MEMSET: (("start", "end", "streamId"), _PLACE),
    GRAPH: (("start", "end", "streamId"), _PLACE),
    RUNTIME: (("start",), ("correlationId", "globalTid")),
    NVTX: (("start", "eventType"), ("end", "globalTid", "textId", "domainId", "text")),
    STRINGS: (("id", "value"), ()),
    GPU: ((), ()),
}
NAME_COLUMNS = ("demangledName", "shortName", "mangledName")
TEXTS, TIMES = ("text", "value"), ("start", "end")
THREAD_BITS = 24
RANGE_EVENTS = (59, 60, 70, 71)  # push/pop and start/end, of NVTX and imported from a text
DOMAIN_EVENT = 75  # a library declares a domain of its own
MAX_NS, MAX_LENGTH_NS = 2**62, 2**53  # from 1970 to 2116; a hundred days
# CUpti_ActivityMemcpyKind, spelled as torch's profiler does
COPIES = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")


def read_nsys(path: str | Path) -> Trace:
    """Reads an export of Nsight Systems; never writes to it.

    Ranges in a library's own NVTX domain are named `domain:name`. A range that is still open when the capture ends is
    closed with the last event. What was not captured is said in the trace's notes.

    Raises ValueError, which says why, for a file that is no SQLite database, that is truncated or damaged, or that is
    no export of Nsight Systems; FileNotFoundError where there is none.
    """
    path = Path(path)
    _check_header(path)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _Export(path, database).read()
    except (sqlite3.Error, UnicodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _check_header(path: Path) -> None:
    """The file begins as SQLite's do, and is as long as it says (https://sqlite.org/fileformat2.html, section 1.3)."""
    with open(path, "rb") as file:
        header = file.read(100)
    if header[:16] != b"SQLite format 3\0":
        report = path.suffix in (".nsys-rep", ".qdrep")
        hint = "; `nsys export --type=sqlite` makes one of it" if report else ""
        raise ValueError(f"{path} is {'no SQLite database' if header else 'empty'}{hint}")
    page = int.from_bytes(header[16:18], "big")
    said = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    kept = header[24:28] == header[92:96]  # whether the last writer has kept the number of pages
    size = path.stat().st_size
    if size < 100 or (kept and size < said):
        raise ValueError(f"{path} is truncated: {size:,} of {max(said, 100):,} bytes are there")


class _Export:
    """An open export, and what has been read of it."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        found = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.names = sorted(str(row[0]) for row in found)
        self.tables = {kind: name for kind in COLUMNS if (name := self.resolve(kind)) is not None}
        self.strings: dict[int, str | None] = {}
        self.notes: list[str] = []

    def resolve(self, kind: str) -> str | None:
        """The name of the table or view that holds this kind: with all that is needed, with rows, with most of the
        other columns, without a version or with the latest; None if there is none of this name."""

        def rank(name: str) -> tuple[bool, bool, int, float]:
            known = set(self.columns(name))
            empty = self.database.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone() is None
            lacks = bool(set(self.needed(kind, known)) - known)
            return lacks, empty, len(set(COLUMNS[kind][1]) - known), -float(name[len(kind) + 2 :] or "inf")

        pattern = re.compile(rf"{kind}(_V\d{{1,9}})?", re.IGNORECASE)
        return min(filter(pattern.fullmatch, self.names), key=rank, default=None)

    def needed(self, kind: str, known: Collection[str]) -> list[str]:
        name = next((name for name in NAME_COLUMNS if name in known), NAME_COLUMNS[0])
        return [*COLUMNS[kind][0], *([name] if kind == KERNEL else [])]

    def read(self) -> Trace:
        if STRINGS not in self.tables or not {KERNEL, RUNTIME, NVTX, GPU} & set(self.tables):
            there = f"its tables are {', '.join(self.names[:8])}" if self.names else "it has no tables"
            if self.tables.keys() - {STRINGS}:
                there = f"there is no table {STRINGS}; {there}"
            raise ValueError(f"{self.path} is no export of Nsight Systems: {there}")
        self.strings = dict(self.rows(STRINGS))
        launches = self.launches()
        kernels = [
            kernel for kind in (KERNEL, MEMCPY, MEMSET, GRAPH) for kernel in self.kernels(kind, launches)
        ]
        ranges = self.ranges(max((kernel.end_ns for kernel in kernels), default=0))
        for kind, what in ((KERNEL, "kernels"), (RUNTIME, "launches"), (NVTX, "ranges")):
            if kind not in self.tables:
                self.notes.append(f"no {what} were captured: there is no table {kind}")
        if GRAPH in self.tables:
            self.notes.append(
                "CUDA graphs were captured as a whole; --cuda-graph-trace=node shows their kernels"
            )
        if lost := sum(kernel.launched_ns is None for kernel in kernels):
            self.notes.append(
                f"{lost} of {len(kernels)} operations have no launch in the capture, and so no range"
            )
        return Trace("nsys", tuple(kernels), tuple(ranges), tuple(self.notes))

    def columns(self, table: str) -> list[str]:
        return [str(row[1]) for row in self.database.execute(f'PRAGMA table_info("{table}")')]

    def rows(self, kind: str) -> list[tuple[Any, ...]]:
        """The columns of `COLUMNS`. All but those needed may hold NULL or not be there; texts may hold NULL."""
        table = self.tables[kind]
        known = self.columns(table)
        needed = self.needed(kind, known)
        if missing := [name for name in needed if name not in known]:
            raise ValueError(
                f"{self.path}: table {table} lacks {', '.join(missing)}; it has {', '.join(known)}"
            )
        names = [*needed, *COLUMNS[kind][1]]
        chosen = ", ".join(f'"{name}"' if name in known else "NULL" for name in names)
        rows = self.database.execute(f'SELECT {chosen} FROM "{table}"').fetchall()
        for place, name in enumerate(names):
            type_, empty = str if name in TEXTS else int, () if {name} & set(needed) - set(TEXTS) else (None,)
            bound = MAX_NS if name in TIMES else 2**63
            for row in rows:
                value = row[place]
                wrong = type(value) is not type_ or (type_ is int and abs(value) > bound)
                if (wrong and value not in empty) or (
                    name == "end" and (value or 0) - row[0] > MAX_LENGTH_NS
                ):
                    raise ValueError(f"{self.path} is damaged: {table}.{name} holds {str(value)[:40]!r}")
        return rows

    def text(self, number: int) -> str:
        value = self.strings.get(number)
        if value is None:
            raise ValueError(f"{self.path} is damaged: {STRINGS} has no text {number}")
        return value

    def launches(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Process and correlation id → start and thread of the call; where calls are nested, of the outer one."""
        out: dict[tuple[int, int], tuple[int, int]] = {}
        if RUNTIME in self.tables:
            for start, call, thread in self.rows(RUNTIME):
                if call is not None and thread is not None:
                    key = (thread >> THREAD_BITS, call)
                    out[key] = min(out.get(key, (start, thread)), (start, thread))
        return out

    def kernels(self, kind: str, launches: dict[tuple[int, int], tuple[int, int]]) -> list[Kernel]:
        """The operations of the device that one table holds; none if there is no such table."""
        out = []
        rows = self.rows(kind) if kind in self.tables else []
        for start, end, stream, *number, device, call, process in rows:
            if end < start:
                raise ValueError(f"{self.path} is damaged: an event of {kind} ends before it begins")
            name = {MEMSET: "Memset", GRAPH: "[CUDA graph]"}.get(kind)
            if name is None:
                name = self.text(number[0]) if kind == KERNEL else _copy_name(number[0])
            process = -1 if process is None else process >> THREAD_BITS
            launched, thread = launches.get((process, call), (None, None))
            out.append(Kernel(name, start, end, device or 0, stream, launched, process, thread))
        return out

    def ranges(self, last: int) -> list[Range]:
        """The ranges of NVTX. One that is still open ends with the last event, not before `last`."""
        if NVTX not in self.tables:
            return []
        rows = self.rows(NVTX)
        libraries = {}
        for start, event, end, thread, text_id, domain, text in rows:
            last = max(last, start, start if end is None else end)
            if event == DOMAIN_EVENT and thread is not None:
                libraries[thread >> THREAD_BITS, domain] = self.label(text, text_id)
        out, still_open = [], 0
        for start, event, end, thread, text_id, domain, text in rows:
            if event not in RANGE_EVENTS or thread is None:
                continue
            if end is None or end < start:
                still_open += 1
                end = last
            process, name = thread >> THREAD_BITS, self.label(text, text_id)
            library = libraries.get((process, domain))
            out.append(Range(f"{library}:{name}" if library else name, start, end, process, thread))
        if still_open:
            self.notes.append(
                f"{still_open} ranges were open when the capture ended, and end with its last event"
            )
        return out

    def label(self, text: str | None, text_id: int | None) -> str:
        if text is None and text_id is not None:
            text = self.text(text_id)
        return text or "(no name)"


def _copy_name(kind: int) -> str:
    return f"Memcpy {COPIES[kind]}" if 0 < kind < len(COPIES) else f"Memcpy of kind {kind}"
