"""Records with torch's profiler into the same `events.Trace` that Nsight Systems gives; names ranges for both.

    def step():
        with span("forward"):
            loss = model(x).mean()
        with span("backward"):
            loss.backward()

    trace = record_torch(step)

A stand-in where there is no Nsight Systems: the kernels are the same, since both ask CUPTI, but the profiler's work on
the host for every operator makes launches slower, so gaps between kernels grow. Without a GPU the operators of the CPU
take the place of kernels, each with the time of its own, without the operators that it calls (source `torch-cpu`).

The events read here are those of the profiler's Chrome trace (`export_chrome_trace`): complete events (`ph: X`) with
times in µs, by category (`ActivityType` in pytorch/kineto, libkineto/include/ActivityType.h):

    kernel, gpu_memcpy, gpu_memset   args: device, stream, correlation
    cuda_runtime, cuda_driver        the launching calls, on their threads; args: correlation
    user_annotation                  torch.profiler.record_function
    cpu_op                           operators

Older versions of torch have other names for categories (`OLDER`), threads as numbers in quotes, and times from 1970 on.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from cs336_systems.measure.trace.events import Kernel, Range, Trace

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
OLDER = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}
MAX_US, MAX_LENGTH_US = 2**62 / 1000, 2**53 / 1000  # from 1970 to 2116; a hundred days


@contextmanager
def span(name: str) -> Iterator[None]:
    """Names what runs inside: an NVTX range for Nsight Systems, and one of torch's profiler; both cost about 1 µs."""
    import torch

    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def record_torch(function: Callable[[], Any], *, keep: str | Path | None = None) -> Trace:
    """Runs `function()` once under torch's profiler and returns the trace, with all that its ranges asked of the GPU.

    keep:  where the profiler's own file is kept (Chrome's format; `.gz` packs it); by default nowhere.

    Warm up before. The GPU is synchronized at both ends. Exceptions of the function propagate.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    wait: Callable[[], None] = lambda: None
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        wait = torch.cuda.synchronize
    wait()
    with profile(activities=activities) as profiler:
        function()
        wait()
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        path = Path(keep or Path(folder) / "trace.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        return read_torch(path)


def read_torch(source: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Trace:
    """Reads a Chrome trace of torch's profiler: a file (`.json`, or packed `.gz`), its contents, or its events.

    Raises ValueError, which says why, for anything else and for damaged files; FileNotFoundError where there is none.
    """
    where = str(source) if isinstance(source, str | Path) else "the trace"
    contents = _load(Path(source)) if isinstance(source, str | Path) else source
    events = contents.get("traceEvents") if isinstance(contents, Mapping) else contents
    if not isinstance(events, Sequence) or isinstance(events, str | bytes):
        raise ValueError(f"{where} is no trace of torch's profiler: it has no list of traceEvents")
    try:
        return _read([event for event in events if event.get("ph") == "X" and "cat" in event])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"an event lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{where} is no trace of torch's profiler as this version knows it: {what}"
        ) from error


def _load(path: Path) -> Any:
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data, parse_float=Decimal)  # µs since 1970 have more digits than a float
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except (ValueError, RecursionError, ArithmeticError) as error:  # of decoding, too; of an endless exponent
        raise ValueError(f"{path} is no JSON file: {error}") from error


def _read(events: Sequence[Mapping[str, Any]]) -> Trace:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        found.setdefault(OLDER.get(event["cat"], event["cat"]), []).append(event)
    ranges = [
        Range(_text(e["name"]), *_interval(e), _integer(e["pid"]), _thread(e))
        for e in found.get("user_annotation", ())
    ]
    notes = []
    if any(category in found for category in DEVICE):
        source, kernels = "torch", _kernels(found)
        if lost := sum(kernel.launched_ns is None for kernel in kernels):
            notes.append(
                f"{lost} of {len(kernels)} operations have no launch in the recording, and so no range"
            )
    else:
        source, kernels = "torch-cpu", _operators(found.get("cpu_op", ()))
        notes.append("no work of a GPU was recorded: the operators of the CPU stand for kernels")
        if any(category in found for category in LAUNCH):
            notes.append("the program has called CUDA, but what it launched was not recorded")
    return Trace(source, tuple(kernels), tuple(ranges), tuple(notes))


def _kernels(found: Mapping[str, list[Mapping[str, Any]]]) -> list[Kernel]:
    launches: dict[int, tuple[int, int, int]] = {}  # correlation → start, process, thread
    for category in LAUNCH:
        for event in found.get(category, ()):
            if (call := event.get("args", {}).get("correlation")) is not None:
                launch = (_interval(event)[0], _integer(event["pid"]), _thread(event))
                launches[call] = min(launches.get(_integer(call), launch), launch)
    out = []
    for category in DEVICE:
        for event in found.get(category, ()):
            args = event["args"]
            launched, process, thread = launches.get(args.get("correlation"), (None, -1, None))
            place = (_integer(args.get("device", 0)), _integer(args.get("stream", 0)))
            out.append(Kernel(_text(event["name"]), *_interval(event), *place, launched, process, thread))
    return out


def _operators(events: Sequence[Mapping[str, Any]]) -> list[Kernel]:
    """Operators of the CPU with the time of their own; each thread is a stream."""
    threads: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in events:
        start, end = _interval(event)
        key = (_integer(event["pid"]), _thread(event))
        threads.setdefault(key, []).append((start, end, _text(event["name"])))
    out = []
    for stream, ((process, thread), calls) in enumerate(threads.items()):
        calls.sort(key=lambda call: (call[0], -call[1]))
        own = [end - start for start, end, _ in calls]
        open_calls: list[int] = []
        for i, (start, end, _) in enumerate(calls):
            while open_calls and calls[open_calls[-1]][1] <= start:
                open_calls.pop()
            if open_calls:  # rounded times may let a call end after its caller
                own[open_calls[-1]] -= min(end, calls[open_calls[-1]][1]) - start
            open_calls.append(i)
        out += [
            Kernel(name, start, end, 0, stream, start, process, thread, max(0, ns))
            for (start, end, name), ns in zip(calls, own, strict=True)
        ]
    return out


def _interval(event: Mapping[str, Any]) -> tuple[int, int]:
    """Start and end in ns."""
    start, length = event["ts"], event["dur"]
    for value, most in ((start, MAX_US), (length, MAX_LENGTH_US)):
        if type(value) not in (int, float, Decimal) or not math.isfinite(value) or abs(value) > most:
            raise ValueError(f"{str(value)[:40]!r} is no time in µs")
    if length < 0:
        raise ValueError(f"a duration of {length} µs")
    first = round(start * 1000)
    return first, first + round(length * 1000)


def _thread(event: Mapping[str, Any]) -> int:
    value = event["tid"]
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else _integer(value)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no name")
    return value
