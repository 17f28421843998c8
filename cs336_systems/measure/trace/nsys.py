"""Nsight Systems on the command line: a function in a fresh process under `nsys profile`, its report as a trace.

    result, trace = record_nsys("cs336_systems.chapters.profiling.measure:child", {"size": "small"}, timeout_s=600)

The function warms up, and runs what is to be seen inside `capture()`: only that part is recorded.

What is read is the SQLite file that `nsys export --type=sqlite` makes of a report. Its tables, as the manual describes
them (https://docs.nvidia.com/nsight-systems/AnalysisGuide, "SQLite Schema Reference"); those without events are left
out:

    CUPTI_ACTIVITY_KIND_KERNEL        start, end (ns), deviceId, streamId, correlationId, globalPid, demangledName
    CUPTI_ACTIVITY_KIND_MEMCPY        the same with copyKind instead of the name
    CUPTI_ACTIVITY_KIND_MEMSET        the same without either
    CUPTI_ACTIVITY_KIND_RUNTIME       calls of the CUDA runtime and driver: start, correlationId, globalTid
    NVTX_EVENTS                       start, end, eventType, text or textId, globalTid
    StringIds                         id, value

A global thread id holds the process in the bits from 24 on, and the thread in those below. Within a process a
correlation id ties what the device did to the call that launched it; all kernels of a CUDA graph carry the one of
their cudaGraphLaunch.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from cs336_systems.measure.trace.events import NEVER, Kernel, Range, Trace
from cs336_systems.store import process
from cs336_systems.store.status import Skip

# Options of `nsys profile` (https://docs.nvidia.com/nsight-systems/UserGuide, "CLI Profile Command Switch Options").
OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",  # no samples of the CPU and no context switches: they need rights that containers do not have
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",  # the kernels of a CUDA graph one by one
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",  # the recording ends; the program goes on, and returns its result
    "--kill=none",
    "--stats=false",
    "--force-overwrite=true",
)


# CUpti_ActivityMemcpyKind, spelled as torch's profiler does
COPIES = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_KIND = "CUPTI_ACTIVITY_KIND"
# Of nested calls with one correlation id (the runtime's, and the driver's in it) the outer one launches: SQLite takes
# the other columns from the row that has the minimum.
_LAUNCHES = f"""SELECT globalTid >> 24, correlationId, MIN(start), globalTid FROM {_KIND}_RUNTIME
                GROUP BY globalTid >> 24, correlationId"""
_OPERATIONS = "SELECT {name}, start, end, deviceId, streamId, globalPid >> 24, correlationId FROM {table}"
_KERNEL_NAME = "(SELECT value FROM StringIds WHERE id = demangledName)"
# those of push and pop, and of start and end
_RANGES = """SELECT COALESCE(text, (SELECT value FROM StringIds WHERE id = textId), ''), start, end, globalTid >> 24,
             globalTid FROM NVTX_EVENTS WHERE eventType IN (59, 60) AND end IS NOT NULL"""


class NsysError(RuntimeError):
    """Nsight Systems failed; says what it wrote last."""


def find() -> str | None:
    """Where `nsys` is, by PATH; None if it is not installed."""
    return shutil.which("nsys")


def require() -> str:
    """Where `nsys` is; raises `Skip` if it is not installed."""
    path = find()
    if path is None:
        raise Skip("needs Nsight Systems: no `nsys` in PATH")
    return path


def version() -> str:
    """The version, such as `2025.3.1.90`. Raises `Skip` where there is no nsys, NsysError if it does not say."""
    said = _run([require(), "--version"], 60)
    match = re.search(r"\d{4}(?:\.\d+)+", said)
    if match is None:
        raise NsysError(f"nsys --version says {said.strip()[:200]!r}")
    return match[0]


def record_nsys(
    function: str, arguments: Mapping[str, Any], *, timeout_s: float, keep: Path | None = None
) -> tuple[Any, Trace]:
    """`module:function(**arguments)` in a fresh process under Nsight Systems; returns its result and the trace.

    timeout_s:  for the program and for the export, each.
    keep:       a folder for `report.nsys-rep` and `report.sqlite`; by default they are removed.

    Raises `Skip` where there is no nsys, `process.ChildError` if the program fails, and NsysError, with what nsys
    wrote, if nsys does, if its report is missing or its export cannot be read.
    """
    nsys = require()
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        report = (keep or Path(folder)) / "report.nsys-rep"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)  # or a run that records nothing would find an older one
        profile = [nsys, "profile", *OPTIONS, f"--output={report}"]
        result = process.call(function, arguments, timeout_s=timeout_s, prefix=profile)
        if not report.is_file():
            raise NsysError(
                f"there is no report {report}; nsys writes none if the program never calls cudaProfilerStart: "
                "run what is to be seen inside nsys.capture()"
            )
        database = report.with_suffix(".sqlite")
        export = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}"]
        _run([*export, str(report)], timeout_s)
        return result, read_nsys(database)


def read_nsys(path: Path) -> Trace:
    """Reads an export of Nsight Systems; NsysError where it lacks a table or a column that is needed."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            launches = {
                (process, call): (start, process, thread)
                for process, call, start, thread in database.execute(_LAUNCHES)
            }
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            kernels = []
            for kind, name in (("KERNEL", _KERNEL_NAME), ("MEMCPY", "copyKind"), ("MEMSET", "'Memset'")):
                if kind != "KERNEL" and f"{_KIND}_{kind}" not in tables:
                    continue
                for what, *place, process, call in database.execute(
                    _OPERATIONS.format(name=name, table=f"{_KIND}_{kind}")
                ):
                    what = f"Memcpy {COPIES[what]}" if kind == "MEMCPY" else what
                    kernels.append(Kernel(what, *place, *launches.get((process, call), (NEVER, process, -1))))
            return Trace("nsys", tuple(kernels), tuple(Range(*row) for row in database.execute(_RANGES)))
    except sqlite3.Error as error:
        raise NsysError(f"{path} is no export of kernels, launches and ranges: {error}") from error


@contextmanager
def capture() -> Iterator[None]:
    """Records what runs inside, if the program runs under `prefix`; the GPU is synchronized at both ends.

    Raises `Skip` without a CUDA device. Exceptions of the block propagate, after the recording has ended.
    """
    import torch

    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def _run(command: list[str], timeout_s: float) -> str:
    what = f"nsys {command[1]}"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NsysError(f"{what} took longer than {timeout_s:g} s and was ended") from error
    if done.returncode != 0:
        last = [line.strip() for line in done.stdout.splitlines() if line.strip()][-5:]
        raise NsysError(f"{what} failed with exit code {done.returncode}: {' | '.join(last)}")
    return done.stdout
