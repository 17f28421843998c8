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
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cs336_systems.measure.trace.events import NEVER, Kernel, Range, Trace, innermost

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


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


def record_torch(function: Callable[[], Any], *, keep: Path | None = None) -> Trace:
    """Runs `function()` once under torch's profiler and returns the trace, with all that its ranges asked of the GPU.

    keep:  where the profiler's own file is kept (`.json.gz`, Chrome's format); by default nowhere.

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
        path = keep or Path(folder) / "trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        return read_torch(path)


def read_torch(path: Path) -> Trace:
    """Reads a Chrome trace of torch's profiler (`.json.gz`)."""
    events: dict[str, list[Mapping[str, Any]]] = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event["ph"] == "X":
            events.setdefault(event.get("cat"), []).append(event)
    ranges = [Range(e["name"], *_interval(e), e["pid"], e["tid"]) for e in events.get("user_annotation", ())]
    if any(category in events for category in DEVICE):
        return Trace("torch", tuple(_kernels(events)), tuple(ranges))
    return Trace("torch-cpu", tuple(_operators(events.get("cpu_op", ()))), tuple(ranges))


def _kernels(events: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Kernel]:
    launches: dict[int, tuple[int, int, int]] = {}  # correlation → start, process, thread
    for event in (event for category in LAUNCH for event in events.get(category, ())):
        call, launch = event["args"].get("correlation"), (_interval(event)[0], event["pid"], event["tid"])
        # of the runtime's call and the driver's in it the outer one launches
        launches[call] = min(launches.get(call, launch), launch)
    for event in (event for category in DEVICE for event in events.get(category, ())):
        args = event["args"]
        launch = launches.get(args.get("correlation"), (NEVER, -1, -1))
        yield Kernel(event["name"], *_interval(event), args.get("device", 0), args.get("stream", 0), *launch)


def _operators(events: Sequence[Mapping[str, Any]]) -> Iterator[Kernel]:
    """Operators of the CPU with the time of their own; each thread is a stream."""
    threads: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in events:
        threads.setdefault((event["pid"], event["tid"]), []).append((*_interval(event), event["name"]))
    for stream, ((process, thread), calls) in enumerate(threads.items()):
        calls.sort(key=lambda call: (call[0], -call[1]))
        own = [0] * len(calls)
        for i, start, end in innermost([(start, end) for start, end, _ in calls]):
            own[i] += end - start
        for (start, end, name), ns in zip(calls, own, strict=True):
            yield Kernel(name, start, end, 0, stream, start, process, thread, ns)


def _interval(event: Mapping[str, Any]) -> tuple[int, int]:
    """Start and end in ns. Times count from some months ago at most: a float of µs holds them to the nanosecond."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)
