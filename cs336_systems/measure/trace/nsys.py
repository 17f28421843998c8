"""Nsight Systems on the command line: a function in a fresh process under `nsys profile`, its report as a trace.

    result, trace = record_nsys("cs336_systems.chapters.profiling.measure:child", {"size": "small"}, timeout_s=600)

The function warms up, and runs what is to be seen inside `capture()`: only that part is recorded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cs336_systems.measure.trace.events import Trace
from cs336_systems.measure.trace.sqlite import read_nsys
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


def version(nsys: str | None = None, *, timeout_s: float = 60) -> str:
    """The version, such as `2025.3.1.90`. Raises `Skip` where there is no nsys, NsysError if it does not say."""
    said = _run([nsys or require(), "--version"], timeout_s)
    match = re.search(r"\d{4}(?:\.\d+)+", said)
    if match is None:
        raise NsysError(f"nsys --version says {said.strip()[:200]!r}")
    return match[0]


def prefix(report: str | Path, *, nsys: str | None = None) -> list[str]:
    """The command before the program's own that records it to `report` (`….nsys-rep`); only what `capture` encloses."""
    return [nsys or require(), "profile", *OPTIONS, f"--output={_report(report)}"]


def export(
    report: str | Path, sqlite: str | Path | None = None, *, nsys: str | None = None, timeout_s: float = 600
) -> Path:
    """Turns a report into an SQLite file, by default beside it; returns its path. An older file is replaced.

    Raises NsysError, with what nsys wrote, if it fails, takes longer than `timeout_s`, or leaves no file.
    """
    report = _report(report)
    if not report.is_file():
        raise NsysError(
            f"there is no report {report}; nsys writes none if the program never calls cudaProfilerStart: "
            "run what is to be seen inside nsys.capture()"
        )
    target = Path(sqlite) if sqlite is not None else report.with_suffix(".sqlite")
    command = [nsys or require(), "export", "--type=sqlite", "--force-overwrite=true"]
    said = _run([*command, f"--output={target}", str(report)], timeout_s)
    if not target.is_file():
        raise NsysError(f"nsys export has not written {target}: {_end(said)}")
    return target


def record_nsys(
    function: str, arguments: Mapping[str, Any], *, timeout_s: float, keep: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Any, Trace]:  # fmt: skip
    """`module:function(**arguments)` in a fresh process under Nsight Systems; returns its result and the trace.

    timeout_s:    for the program and for the export, each.
    keep:         a folder for `report.nsys-rep` and `report.sqlite`; by default they are removed.
    environment:  variables to set for the program.

    Raises `Skip` where there is no nsys, `process.ChildError` if the program fails, NsysError if nsys does, and
    ValueError if its export cannot be read.
    """
    nsys = require()
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        report = Path(keep or folder) / "report.nsys-rep"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)  # or a run that records nothing would find an older one
        result = process.call(
            function,
            arguments,
            timeout_s=timeout_s,
            prefix=prefix(report, nsys=nsys),
            environment=environment,
        )
        return result, read_nsys(export(report, nsys=nsys, timeout_s=timeout_s))


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


def _report(path: str | Path) -> Path:
    """The report's path with the suffix that nsys adds where it is missing."""
    path = Path(path)
    return path if path.suffix == ".nsys-rep" else path.with_name(f"{path.name}.nsys-rep")


def _run(command: list[str], timeout_s: float) -> str:
    what = f"nsys {command[1]}"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NsysError(f"{what} took longer than {timeout_s:g} s and was ended") from error
    except OSError as error:
        raise NsysError(f"{what} does not start: {error}") from error
    if done.returncode != 0:
        raise NsysError(f"{what} failed with exit code {done.returncode}: {_end(done.stdout)}")
    return done.stdout


def _end(text: str) -> str:
    """The last lines of an output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-5:]) or "it wrote nothing"
