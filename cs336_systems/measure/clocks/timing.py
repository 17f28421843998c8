"""How long things take: functions timed in turns, GPU time without launch overhead, peak memory, clocks.

Functions that will be compared are timed in turns, in one process (`interleaved`): whatever drifts
(temperature, clocks, a neighbor on the CPU) then affects all of them alike. On a GPU each turn is
`triton.testing.do_bench`, the tool that the handout names: CUDA events around each call, the L2 cache flushed
before it. Where triton is missing, and for functions so slow that its six preparatory calls cost more than
they are worth, a loop here does the same.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.store.machine import has_module
from cs336_systems.store.status import Skip

if TYPE_CHECKING:
    import torch

L2_BUFFER_BYTES = 256 * 2**20  # what do_bench writes between calls: larger than any L2 there is
SLOW_MS = 100.0  # from here on do_bench's 1 + 5 preparatory calls cost more than the samples
SLOW_SAMPLES = 2  # timed calls of a slow function in each round
SLOW_BUDGET_MS = 6000.0  # what all rounds of one slow function may take, unless two rounds take longer


@dataclass(frozen=True)
class Timing:
    """The times of single calls, in ms, and their quantiles."""

    samples_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_ms:
            raise ValueError("a Timing needs at least one sample; got none")

    def quantile(self, q: float) -> float:
        """The q-quantile in ms, 0 ≤ q ≤ 1, by linear interpolation between samples."""
        if not 0 <= q <= 1:
            raise ValueError(f"quantile {q} is not between 0 and 1")
        ordered = sorted(self.samples_ms)
        place = q * (len(ordered) - 1)
        low, high = math.floor(place), math.ceil(place)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    @property
    def p20(self) -> float:
        return self.quantile(0.2)

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p80(self) -> float:
        return self.quantile(0.8)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The columns of a row: `{prefix}_ms_p20`, `_p50`, `_p80`; without a prefix `ms_p20`, ..."""
        name = f"{prefix}_ms" if prefix else "ms"
        return {f"{name}_p20": self.p20, f"{name}_p50": self.p50, f"{name}_p80": self.p80}


# --------------------------------------------------------------------------------------------------- in turns
def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    *,
    device: str,
    rounds: int = 5,
    warmup_ms: float = 25,
    rep_ms: float = 100,
    grad_to_none: Mapping[str, Sequence[torch.Tensor]] | None = None,
    max_calls: int = 1000,
    watches: Mapping[str, Watch] | None = None,
) -> dict[str, Timing]:
    """Times functions in turns, and pools each one's samples.

    functions:     name → function of no arguments.
    device:        `"cpu"`, `"cuda"` or `"cuda:1"`: where the functions do their work.
    rounds:        each function has one turn in each round; the order rotates from round to round. Slow
                   functions (a call above 100 ms) have fewer: two at least, as many as fit in six seconds.
    warmup_ms:     calls before the timed ones of each turn, at least one.
    rep_ms:        timed calls of each turn, at least one, at most `max_calls`.
    grad_to_none:  name → tensors whose `grad` is dropped before each timed call, so that a backward pass
                   writes its gradients instead of adding to them.
    watches:       name → `Watch` that runs during this function's turns, and thus sees no other function.

    Every function is called twice beforehand: the first call may compile, the second one says how long it
    takes. Exceptions propagate at once (out of memory too): try each function first
    if some may fail. Raises ValueError for `rounds` or `max_calls` below 1 and for names in `grad_to_none`
    or `watches` that no function has.
    """
    grads = dict(grad_to_none or {})
    if rounds < 1 or max_calls < 1:
        raise ValueError(f"rounds={rounds}, max_calls={max_calls}; both must be at least 1")
    watches = watches or {}
    if unknown := sorted({*grads, *watches} - set(functions)):
        raise ValueError(f"no function is named {', '.join(unknown)}; there are {', '.join(functions)}")
    clock = _CudaClock(device) if device.split(":")[0] == "cuda" else _CpuClock(device)
    with clock:
        estimates, turns = {}, {}
        for name, fn in functions.items():
            tensors = grads.get(name, ())
            clock.sample(fn, 1, tensors)
            estimates[name] = clock.sample(fn, 1, tensors)[0]
            turns[name] = _turns(estimates[name], rounds)
        samples: dict[str, list[float]] = {name: [] for name in functions}
        names = list(functions)
        for turn in range(max(turns.values(), default=0)):
            for i in range(len(names)):
                name = names[(i + turn) % len(names)]
                if turn >= turns[name]:
                    continue
                with watches.get(name) or contextlib.nullcontext():
                    samples[name] += clock.turn(
                        functions[name], estimates[name], warmup_ms, rep_ms, max_calls, grads.get(name, ())
                    )
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def _turns(estimate_ms: float, rounds: int) -> int:
    """In how many rounds a function takes part: all of them, unless it is slow."""
    if estimate_ms <= SLOW_MS:
        return rounds
    fit = int(SLOW_BUDGET_MS / (estimate_ms * (1 + SLOW_SAMPLES)))
    return min(rounds, max(2, fit))


def _calls(estimate_ms: float, rep_ms: float, max_calls: int) -> int:
    return max(1, min(max_calls, int(rep_ms / max(estimate_ms, 1e-6))))


def _drop_grads(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


class _CpuClock:
    """`time.perf_counter` around each call."""

    def __init__(self, device: str) -> None:
        if device != "cpu":
            raise ValueError(f"unknown device {device!r}; allowed: cpu, cuda, cuda:<index>")

    def __enter__(self) -> _CpuClock:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sample(self, fn: Callable[[], Any], calls: int, grads: Sequence[torch.Tensor]) -> list[float]:
        times = []
        for _ in range(calls):
            _drop_grads(grads)
            start = time.perf_counter()
            fn()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def turn(
        self, fn: Callable[[], Any], estimate_ms: float, warmup_ms: float, rep_ms: float, max_calls: int,
        grads: Sequence[torch.Tensor],
    ) -> list[float]:  # fmt: skip
        if estimate_ms > SLOW_MS:
            self.sample(fn, 1, grads)
            return self.sample(fn, min(SLOW_SAMPLES, max_calls), grads)
        self.sample(fn, _calls(estimate_ms, warmup_ms, max_calls), grads)
        return self.sample(fn, _calls(estimate_ms, rep_ms, max_calls), grads)


class _CudaClock(_CpuClock):
    """CUDA events around each call, the L2 cache flushed before it; `do_bench` where it is worth it."""

    def __init__(self, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise Skip("needs a CUDA device")
        self.device = torch.device(device)

    def __enter__(self) -> _CudaClock:
        import torch

        self.context = torch.cuda.device(self.device)
        self.context.__enter__()
        self.l2 = torch.empty(L2_BUFFER_BYTES // 4, dtype=torch.int32, device=self.device)
        return self

    def __exit__(self, *raised: Any) -> None:
        del self.l2
        self.context.__exit__(*raised)

    def sample(self, fn: Callable[[], Any], calls: int, grads: Sequence[torch.Tensor]) -> list[float]:
        import torch

        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for start, end in events:
            _drop_grads(grads)
            self.l2.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def turn(
        self, fn: Callable[[], Any], estimate_ms: float, warmup_ms: float, rep_ms: float, max_calls: int,
        grads: Sequence[torch.Tensor],
    ) -> list[float]:  # fmt: skip
        if estimate_ms > SLOW_MS or not has_module("triton"):
            return super().turn(fn, estimate_ms, warmup_ms, rep_ms, max_calls, grads)
        from triton.testing import do_bench

        # no limit of calls here: do_bench counts the flush of the cache (0.1 ms) as part of a call
        return do_bench(fn, warmup=warmup_ms, rep=rep_ms, grad_to_none=list(grads) or None, return_mode="all")


# ----------------------------------------------------------------------------------- without launch overhead
def captured(fn: Callable[[], Any], calls: int = 20) -> Callable[[], None]:
    """`calls` calls of `fn` captured in a CUDA graph: a function that replays them, with next to no launch overhead.

    The calls follow each other at once, so their operands stay in the L2 cache where they fit. `fn` must be
    capturable: no synchronization, no new shapes, no compilation after its first three calls, which are made before
    capture and on the capturing stream (where autograd's nodes must come from, too). Raises `Skip` without a CUDA
    device, ValueError for `calls` below 1.
    """
    import torch

    if calls < 1:
        raise ValueError(f"calls={calls}; it must be at least 1")
    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        graph.capture_begin()  # torch.cuda.graph() would collect garbage first, which takes longer than all the rest
        try:
            for _ in range(calls):
                fn()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> None:
        graph.replay()

    replay.of = fn  # the graph reads the tensors that `fn` holds, but does not keep them alive
    return replay


def host_us(fn: Callable[[], Any], *, calls: int = 20, grad_to_none: Sequence[torch.Tensor] = ()) -> float:
    """The median time in µs after which a call of `fn` returns to the host, without waiting for the GPU's work.

    The GPU's queue is empty at first and takes `calls` calls without making the host wait. `grad_to_none` as for
    `interleaved`. Raises `Skip` without a CUDA device, ValueError for `calls` below 1.
    """
    import torch

    if calls < 1:
        raise ValueError(f"calls={calls}; it must be at least 1")
    if not torch.cuda.is_available():
        raise Skip("needs a CUDA device")
    fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        _drop_grads(grad_to_none)
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


# ----------------------------------------------------------------------------------------------------- memory
def peak_gib(fn: Callable[[], Any]) -> float | None:
    """The most memory (GiB) that torch's allocator held in tensors at any moment of one call of `fn`.

    Absolute: what was allocated before the call counts. None without a CUDA device (`fn` is not called then).
    """
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


# ----------------------------------------------------------------------------------------------------- clocks
class Watch:
    """Reads the SM clock and the power of the current CUDA device while its block runs.

        with Watch() as watch:
            ...
        row = timing.metrics("forward") | watch.metrics()

    `sm_mhz` and `power_w` are medians over the samples; None where there is nothing to read, and then `why`
    says what is missing (a CUDA device, the package nvidia-ml-py, or a permission). The first reading is
    taken at entry and the last at exit, so a short block has two. Blocks of the same watch add to its
    samples.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self.interval_s = interval_s
        self.why: str | None = None
        self._samples: list[tuple[float, float]] = []
        self._nvml: Any = None  # the module, once it has found the device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._nvml is None and self.why is None:
            self.why = self._find_device()
        if self.why is None:
            self._stop.clear()
            self._read()
        if self.why is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._read()

    def _find_device(self) -> str | None:
        """Takes hold of the device through NVML; returns why it cannot."""
        import torch

        if not torch.cuda.is_available():
            return "needs a CUDA device"
        if not has_module("pynvml"):
            return "needs the package nvidia-ml-py"
        import pynvml

        # by UUID: NVML counts all devices of the machine, torch only those of CUDA_VISIBLE_DEVICES
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        self._nvml = pynvml
        return None

    def _read(self) -> None:
        nvml = self._nvml
        try:
            clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
            instant = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            # the other reading is an average over the last second on many devices
            known = instant.nvmlReturn == nvml.NVML_SUCCESS
            milliwatts = instant.value.uiVal if known else nvml.nvmlDeviceGetPowerUsage(self._handle)
        except nvml.NVMLError as error:
            self.why = f"NVML: {error}"
        else:
            self._samples.append((float(clock), milliwatts / 1e3))

    def _loop(self) -> None:
        while self.why is None and not self._stop.wait(self.interval_s):
            self._read()

    @property
    def sm_mhz(self) -> float | None:
        """Median SM clock, MHz."""
        return statistics.median(clock for clock, _ in self._samples) if self._samples else None

    @property
    def power_w(self) -> float | None:
        """Median power draw of the whole device, W."""
        return statistics.median(power for _, power in self._samples) if self._samples else None

    def metrics(self) -> dict[str, float | None]:
        """The columns of a row: `sm_mhz`, `power_w`."""
        return {"sm_mhz": self.sm_mhz, "power_w": self.power_w}
