"""The device that is measured on: which it is, what is set on it, its memory's peak, its clock and power meanwhile."""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cs336_systems.store.machine import has_module

if TYPE_CHECKING:
    import torch


def default_device() -> str:
    """`"cuda"` where torch finds a GPU, else `"cpu"`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_dtype(name: str) -> torch.dtype:
    """The type of tensors that a case's `dtype` names; "tf32" are fp32 tensors."""
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    return (names | dict.fromkeys(("fp32", "tf32"), torch.float32))[name]


def synchronizer(device: str) -> Callable[[], None]:
    """A function that synchronizes a device (`"cpu"`, `"cuda"`)."""
    if device == "cpu":
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def give_back(device: str) -> None:
    """Gives back to the device what exceptions' frames, reference cycles and the allocator's cache still hold."""
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


@contextmanager
def comparable(precision: str = "highest") -> Iterator[str]:
    """What all candidates of a group shall find alike: torch's precision of fp32 matmuls, which is yielded and set back
    in the end, and a Dynamo that knows no shapes (past eight of one function it falls back to eager without a word)."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()
    try:
        yield torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)


def peak_gib(fn: Callable[[], Any], given: Iterable[torch.Tensor] | None = None) -> float | None:
    """The most memory (GiB) that torch's allocator held at any moment of one call of `fn`, not its first.

    given: the tensors, none of them overlapping another, that count of what was allocated before the call; None: all
        of it. What others hold, and cuBLAS's workspaces, would make the same call need more the later its turn comes.

    None without a CUDA device (`fn` is not called then).
    """
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    others = 0 if given is None else torch.cuda.memory_allocated() - sum(x.nbytes for x in given)
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**30


class Watch:
    """Reads the SM clock and the power of the current CUDA device while its block runs.

        with Watch() as watch:
            ...
        row = medians([watch])

    The first reading is taken at entry and the last at exit, so a short block has two. Where there is nothing to read,
    `why` says what is missing (a CUDA device, the package nvidia-ml-py, or a permission). `interval_s` None reads
    nothing.
    """

    def __init__(self, interval_s: float | None = 0.02) -> None:
        self.interval_s = interval_s
        self.why: str | None = "told to read nothing" if interval_s is None else None
        self.readings: list[tuple[float, float]] = []  # MHz, W
        self._nvml: Any = None  # the module, once it has found the device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self.why is None:
            self.why = self._find_device()
        if self.why is None:
            self._read()
        if self.why is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
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
            self.readings.append((float(clock), milliwatts / 1e3))

    def _loop(self) -> None:
        while self.why is None and not self._stop.wait(self.interval_s or 0):
            self._read()


def medians(watches: Iterable[Watch]) -> dict[str, float | None]:
    """The columns of a row, `sm_mhz` and `power_w`, over all readings; None where there are none."""
    readings = [reading for watch in watches for reading in watch.readings]
    names = ("sm_mhz", "power_w")
    if not readings:
        return dict.fromkeys(names)
    return dict(zip(names, map(statistics.median, zip(*readings, strict=True)), strict=True))
