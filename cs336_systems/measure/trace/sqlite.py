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

A global thread id holds the process in the bits from 24 on, and the thread in those below. Within a process a
correlation id ties what the device did to the call that launched it; all kernels of a CUDA graph carry the one of
their cudaGraphLaunch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cs336_systems.measure.trace.events import Kernel, Range, Trace

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
NVTX, STRINGS = "NVTX_EVENTS", "StringIds"
NAME_COLUMNS = ("demangledName", "shortName", "mangledName")
THREAD_BITS = 24
RANGE_EVENTS = (59, 60, 70, 71)  # push/pop and start/end, of NVTX and imported from a text
DOMAIN_EVENT = 75  # a library declares a domain of its own
MAX_NS = 2**53  # a hundred days
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
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = sorted(str(row[0]) for row in found)
        self.strings: dict[int, str | None] = {}
        self.notes: list[str] = []

    def read(self) -> Trace:
        if STRINGS not in self.tables or not {KERNEL, RUNTIME, NVTX, "TARGET_INFO_GPU"} & set(self.tables):
            there = f"its tables are {', '.join(self.tables[:8])}" if self.tables else "it has no tables"
            raise ValueError(f"{self.path} is no export of Nsight Systems: {there}")
        self.strings = dict(self.rows(STRINGS, ["id"], texts=["value"]))
        launches = self.launches()
        kernels = [
            kernel for table in (KERNEL, MEMCPY, MEMSET, GRAPH) for kernel in self.kernels(table, launches)
        ]
        ranges = self.ranges(max((kernel.end_ns for kernel in kernels), default=0))
        for table, what in ((KERNEL, "kernels"), (RUNTIME, "launches"), (NVTX, "ranges")):
            if table not in self.tables:
                self.notes.append(f"no {what} were captured: there is no table {table}")
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
        return [str(row[1]) for row in self.database.execute(f"PRAGMA table_info({table})")]

    def rows(
        self, table: str, needed: Sequence[str], *, optional: Sequence[str] = (), texts: Sequence[str] = ()
    ) -> list[tuple[Any, ...]]:
        """A table's columns in this order: integers, integers and texts that may be NULL (or that it does not have)."""
        known = self.columns(table)
        if missing := [name for name in needed if name not in known]:
            raise ValueError(
                f"{self.path}: table {table} lacks {', '.join(missing)}; it has {', '.join(known)}"
            )
        names = [*needed, *optional, *texts]
        chosen = ", ".join(f'"{name}"' if name in known else "NULL" for name in names)
        rows = self.database.execute(f"SELECT {chosen} FROM {table}").fetchall()
        for place, name in enumerate(names):
            kind, empty = str if name in texts else int, () if name in needed else (None,)
            bound = MAX_NS if name in ("start", "end") else 2**63
            for row in rows:
                value = row[place]
                if (type(value) is not kind or (kind is int and abs(value) > bound)) and value not in empty:
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
            for start, call, thread in self.rows(RUNTIME, ["start"], optional=["correlationId", "globalTid"]):
                if call is not None and thread is not None:
                    key = (thread >> THREAD_BITS, call)
                    out[key] = min(out.get(key, (start, thread)), (start, thread))
        return out

    def kernels(self, table: str, launches: dict[tuple[int, int], tuple[int, int]]) -> list[Kernel]:
        """The operations of the device that one table holds; none if there is no such table."""
        if table not in self.tables:
            return []
        known = self.columns(table)
        kernel_name = next((name for name in NAME_COLUMNS if name in known), NAME_COLUMNS[0])
        what = {KERNEL: kernel_name, MEMCPY: "copyKind"}.get(table, "streamId")
        out = []
        for start, end, stream, number, device, call, process in self.rows(
            table, ["start", "end", "streamId", what], optional=["deviceId", "correlationId", "globalPid"]
        ):
            if end < start:
                raise ValueError(f"{self.path} is damaged: an event of {table} ends before it begins")
            name = {MEMSET: "Memset", GRAPH: "[CUDA graph]"}.get(table)
            if name is None:
                name = self.text(number) if table == KERNEL else _copy_name(number)
            process = -1 if process is None else process >> THREAD_BITS
            launched, thread = launches.get((process, call), (None, None))
            out.append(Kernel(name, start, end, device or 0, stream, launched, process, thread))
        return out

    def ranges(self, last: int) -> list[Range]:
        """The ranges of NVTX. One that is still open ends with the last event, not before `last`."""
        if NVTX not in self.tables:
            return []
        optional = ["end", "globalTid", "textId", "domainId"]
        rows = self.rows(NVTX, ["start", "eventType"], optional=optional, texts=["text"])
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
