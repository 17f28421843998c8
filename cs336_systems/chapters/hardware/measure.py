"""What this machine can do: the roofs that every other measured number is held against.

matmul        (size, size) @ (size, size) of random normal numbers, one matmul per call, output preallocated.
              `tf32` and `fp32` both multiply fp32 tensors, at matmul precision "high" and "highest".
copy          `size` bytes from one place of the device's memory to another; reads and writes both count.
launch        `size` launches of a one-element kernel, then one synchronization; `us_per_launch` is the time
              of all that divided by `size`. One shows the latency of a call, a thousand the rate.
launch_graph  the same launches captured in a CUDA graph, and replayed.

On a CPU `launch` is the overhead of a small torch operation. On a GPU the L2 cache is flushed before each
matmul and each copy, so that a small copy reads memory as well; but its writes may still be in flight
when it ends. Only copies much larger than the cache (256 MiB and above) show the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import matmul_flops
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.clocks.calls import Calls
from cs336_systems.measure.clocks.turns import Candidate, columns, prepared, time_together
from cs336_systems.measure.device import comparable, default_device, give_back, torch_dtype
from cs336_systems.store.status import Skip
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp64")

METRICS = (
    *columns(),
    "tflops",
    "tb_per_s",
    "us_per_launch",
    "error",  # of a matmul: relative Frobenius norm of the difference to fp64, over sampled rows
    "sm_mhz",
    "power_w",
)
DEPENDS = (*depends.CALL_CLOCK, "accounting/operations.py")
GROUP = ("kind", "size")

ERROR_ROWS = 64  # rows of a matmul that are compared with fp64
CPU_MATMUL = 4096  # a CPU is not asked for larger matmuls,
CPU_COPY = 2**30  # nor for larger copies


@dataclass(frozen=True)
class Case:
    """One measurement. `size`: matrix side, bytes, or launches; `repeat` 1 is the second of an A/A pair.

    `dtype` is one of DTYPES for `matmul`, `bytes` for `copy` and `fp32` for the launches.
    """

    kind: str
    dtype: str
    size: int
    repeat: int


# Side of the matmuls, bytes of the copies, launches; then the case of each kind that is measured twice.
_FULL = {
    "matmul": (1024, 2048, 4096, 8192, 16384),
    "copy": (2**20, 2**24, 2**28, 2**30, 2**32),
    "launch": (1, 10, 100, 1000),
    "launch_graph": (1, 10, 100, 1000),
}
_SMOKE = {"matmul": (256, 512), "copy": (2**20, 2**26), "launch": (1, 1000)}
_TWICE = {
    "full": {("matmul", "bf16", 8192), ("copy", "bytes", 2**30), ("launch", "fp32", 1000)}
    | {("launch_graph", "fp32", 1000)},
    "smoke": {("matmul", "fp32", 512), ("copy", "bytes", 2**26), ("launch", "fp32", 1000)},
}


def grid(preset: str) -> list[Case]:
    """Every case of `"full"` (meant for a GPU) or `"smoke"` (two CPU cores, a few seconds)."""
    sizes = {"full": _FULL, "smoke": _SMOKE}[preset]
    matmul_dtypes = DTYPES if preset == "full" else ("bf16", "fp32")
    cases = []
    for kind, kind_sizes in sizes.items():
        for size in kind_sizes:
            for dtype in {"matmul": matmul_dtypes, "copy": ("bytes",)}.get(kind, ("fp32",)):
                if dtype == "fp64" and size > 8192:
                    continue  # ten seconds per matmul on a GPU without fp64 units
                repeats = 2 if (kind, dtype, size) in _TWICE[preset] else 1
                cases += [Case(kind, dtype, size, repeat) for repeat in range(repeats)]
    return cases


def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one kind and size, in turns; one dict of metrics for each, in order."""
    device, kind = default_device(), cases[0].kind

    def prepare(candidate: Candidate) -> None:
        candidate.phases = {kind: _PREPARE[kind](candidate.case, device, candidate.metrics)}

    quick = {"num_rounds": 3, "warmup_ms": 5, "rep_ms": 50} if device == "cpu" else {}
    # launches are host work up to a synchronization: the wall clock counts, not the device's events
    clock = Calls("cpu" if kind.startswith("launch") else device, **quick)
    with comparable():
        candidates = prepared(cases, prepare, device)
        for candidate in time_together(candidates, clock):
            samples = candidate.samples
            rates = _rates(candidate.case, samples.p50(kind))
            candidate.metrics |= samples.row(kind, prefix="") | samples.clocks() | rates
    results = [candidate.metrics for candidate in candidates]
    candidates.clear()
    give_back(device)
    return results


def _rates(case: Case, ms: float) -> dict[str, float]:
    if case.kind == "matmul":
        return {"tflops": matmul_flops(case.size, case.size, case.size) / (ms * 1e9)}
    if case.kind == "copy":
        return {"tb_per_s": 2 * case.size / (ms * 1e9)}
    return {"us_per_launch": ms * 1e3 / case.size}


# ------------------------------------------------------------------------------------------ kinds
def _matmul(case: Case, device: str, metrics: dict[str, Any]) -> Callable[[], Any]:
    """Checks one matmul, notes its error, and returns the function that runs it."""
    import torch

    if why := _unsupported(case, device):
        raise Skip(why)
    n, dtype = case.size, torch_dtype(case.dtype)
    # the power of a matmul, hence its clock, depends on the data: zeros would look faster than anything real
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    precision = "high" if case.dtype == "tf32" else "highest"

    def multiply() -> torch.Tensor:
        torch.set_float32_matmul_precision(precision)
        return torch.mm(a, b, out=c)

    multiply()
    rows = torch.arange(0, n, max(1, n // ERROR_ROWS), device=device)
    exact = a[rows].double() @ b.double()
    metrics["error"] = float((c[rows].double() - exact).norm() / exact.norm())
    return multiply


def _unsupported(case: Case, device: str) -> str | None:
    """Why a matmul of this kind is not worth its time here, or None."""
    import torch

    if device == "cpu":
        if case.dtype in ("fp16", "tf32"):
            return f"needs a CUDA device for {case.dtype}"
        return f"needs a CUDA device above {CPU_MATMUL}" if case.size > CPU_MATMUL else None
    if case.dtype in ("bf16", "tf32") and torch.cuda.get_device_capability()[0] < 8:
        return f"needs compute capability 8.0 for {case.dtype}"
    return None


def _copy(case: Case, device: str, metrics: dict[str, Any]) -> Callable[[], Any]:
    import torch

    if device == "cpu" and case.size > CPU_COPY:
        raise Skip(f"needs a CUDA device above {CPU_COPY} bytes")
    source = torch.randint(0, 256, (case.size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _launch(case: Case, device: str, metrics: dict[str, Any]) -> Callable[[], Any]:
    import torch

    x = torch.randn(1, device=device)

    def launches() -> None:
        for _ in range(case.size):
            x.neg_()
        if device == "cuda":
            torch.cuda.synchronize()

    return launches


def _launch_graph(case: Case, device: str, metrics: dict[str, Any]) -> Callable[[], Any]:
    import torch

    if device != "cuda":
        raise Skip("needs a CUDA device")
    x = torch.randn(1, device=device)
    x.neg_()  # loads the kernel, which a capture may not do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(case.size):
            x.neg_()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


_PREPARE = {"matmul": _matmul, "copy": _copy, "launch": _launch, "launch_graph": _launch_graph}
"""Kind → what checks a case, notes what it finds in the metrics, and returns the function that is timed."""
TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
