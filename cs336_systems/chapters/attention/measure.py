"""Chapter `attention`: attention in plain PyTorch, eager and compiled, and the memory that it runs out of.

    papermill book/attention.ipynb out.ipynb -p dtype fp32

The handout's grid: batch 8, no axis of heads, tensors of (8, seq_len, head_dim), and no mask. Of each case 100 forward
and 100 backward passes are timed by the host's clock with the device synchronized after each; each backward pass frees
the graph of its forward pass, as in training. Before that come one step that compiles and one whose memory is read.

`cap_gib` 24 lets this process take 24 GiB of the GPU and no more, at the two longest sequences: there smaller GPUs run
out of memory; 0 is the whole GPU. A case that runs out is a row, with the pass in which it did. fp32 matmuls are
accurate to fp32 (matmul precision "highest").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.memory_cap import capped
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import Candidate, columns, prepared, time_together
from cs336_systems.measure.device import comparable, default_device, give_back, synchronizer, torch_dtype
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

DEPENDS = (*depends.PLAIN, *depends.TRITON, *depends.STEP_CLOCK, "chapters/shared/memory_cap.py")
GROUP = ("cap_gib", "dtype", "head_dim", "seq_len")
PARTS = ("forward", "backward")
STATISTICS = ("mean", "std", "p50")
METRICS = (
    *(column for part in PARTS for column in columns(part, STATISTICS)),
    "workspace_gib",  # allocated before the inputs were made: cuBLAS's workspaces
    "before_backward_gib",  # allocated between the passes, workspaces and inputs included
    "peak_gib",  # the most allocated in one step; of a case that fails, until it does
    "failed_in",  # the pass that failed
    "compile_s",  # of the first step of a compiled function
    "cache_hits",  # what of it the compiler found in its caches on disk
    "graphs",  # that Dynamo captured of it
    *(f"{part}_kernels" for part in PARTS),  # of ours: "portable", "hopper" or "split"
    "matmul_precision",
)
IMPLEMENTATIONS = ("reference", "reference_compiled", "flash_triton")
BATCH = 8
SEQ_LENS = (256, 1024, 4096, 8192, 16384)
WARMUP, STEPS, ROUNDS = 5, 100, 5
_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One attention of (8, seq_len, head_dim), not causal; `repeat` 1 measures the same thing again.

    cap_gib: GiB of GPU memory that the process may take; 0: all there is.
    """

    head_dim: int
    seq_len: int
    dtype: str
    cap_gib: int
    impl: str
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The cases of a preset: the handout's grid in fp32 (with and without the cap) and bf16, or a few small ones."""
    if preset == "smoke":
        # compiling takes ten seconds where the compiler's caches are empty: one shape is enough
        compiled = [(16, 128, "fp32", 0), (16, 128, "fp32", 24)]
        plain = [(16, 64, "fp32", 0), (64, 64, "fp32", 0), (64, 128, "fp32", 0)]
        plain += [(64, 64, "bf16", 0)]  # slow on most CPUs
        return [
            Case(*shape, impl, repeat)
            for shape in compiled + plain
            for impl, repeat in _with_a_pair(shape in compiled)
        ]
    return [
        Case(head_dim, seq_len, dtype, cap_gib, impl, repeat)
        for dtype, cap_gib in (("fp32", 0), ("fp32", 24), ("bf16", 0))
        for head_dim in (16, 32, 64, 128)
        for seq_len in (SEQ_LENS[-2:] if cap_gib else SEQ_LENS)  # shorter ones fit everywhere
        for impl, repeat in _with_a_pair()
    ]


def _with_a_pair(compiled: bool = True) -> list[tuple[str, int]]:
    """The implementations of a group, the plain one twice: it is what the others are compared with."""
    impls = [impl for impl in IMPLEMENTATIONS if compiled or impl != "reference_compiled"]
    return [(impl, 0) for impl in impls] + [("reference", 1)]


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one shape, dtype and cap in turns."""
    device = default_device()
    with comparable() as precision, capped(cases[0].cap_gib, device):
        return [metrics | {"matmul_precision": precision} for metrics in _measured(cases, device)]


def _measured(cases: list[Case], device: str) -> list[dict[str, Any]]:
    import torch

    workspace_gib = _workspace_gib() if device != "cpu" else None
    shape, dtype = (BATCH, cases[0].seq_len, cases[0].head_dim), torch_dtype(cases[0].dtype)
    generator = torch.Generator(device).manual_seed(cases[0].seq_len + cases[0].head_dim)
    q, k, v, grad_o = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def prepare(candidate: Candidate) -> None:
        candidate.metrics["workspace_gib"] = workspace_gib
        try:
            _try_out(candidate, inputs, grad_o, device)
        finally:
            for x in inputs:
                x.grad = None
            if device != "cpu":
                torch.cuda.empty_cache()

    candidates = prepared(cases, prepare, device)
    compiled = any(c.ok and c.case.impl == "reference_compiled" for c in candidates)
    clock = Steps(device, warmup=WARMUP, steps=STEPS, num_rounds=ROUNDS)
    with _no_recompiling() if compiled else nullcontext():
        for candidate in time_together(candidates, clock, lambda: give_back(device)):
            for part in PARTS:
                candidate.metrics |= candidate.samples.row(part, STATISTICS)
    return [candidate.metrics for candidate in candidates]


def _no_recompiling() -> AbstractContextManager[Any]:
    """Within its block, a compiled function that does not fit its inputs raises: it can't fall back to eager unseen."""
    import torch

    return torch.compiler.set_stance("fail_on_recompile")


def _try_out(candidate: Candidate, inputs: list[torch.Tensor], grad_o: torch.Tensor, device: str) -> None:
    """Two steps: one compiles, of the other the memory is read."""
    from torch._dynamo.utils import counters

    case, metrics = candidate.case, candidate.metrics
    compiled = case.impl == "reference_compiled"
    apply = peers.build(case.impl, False, device, case.seq_len).apply
    output: list[torch.Tensor] = []

    def forward() -> None:
        output[:] = [apply(*inputs)]

    def backward() -> None:
        output[0].backward(grad_o)

    def forget() -> None:
        """Drops the output and the gradients; the backward pass has freed the graph, if it was reached."""
        output.clear()
        for x in inputs:
            x.grad = None

    @contextmanager
    def turn() -> Iterator[dict[str, Callable[[], None]]]:
        """It finds the memory as the trial did: nothing kept, and no cached blocks of another's sizes."""
        if device != "cpu":
            import torch

            torch.cuda.empty_cache()
        # the third phase is not reported: it keeps the freeing of outputs and gradients out of the others' times
        yield {"forward": forward, "backward": backward, "forget": forget}

    candidate.phases = turn
    counters.clear()
    start = time.perf_counter()
    _one_step(forward, backward, metrics, device)
    forget()
    if compiled:
        metrics["compile_s"] = time.perf_counter() - start
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        metrics |= {"cache_hits": hits, "graphs": counters["stats"]["unique_graphs"]}
    with _no_recompiling():
        _one_step(forward, backward, metrics, device)
    forget()
    if case.impl == "flash_triton":
        from cs336_systems.attention.flash_triton import kernels_for

        metrics |= {f"{part}_kernels": name for part, name in kernels_for(*inputs).items()}


def _one_step(
    forward: Callable[[], None], backward: Callable[[], None], metrics: dict[str, Any], device: str
) -> None:
    """A forward and a backward pass; notes the memory between them, the most there was, and where it failed."""
    import torch

    wait, on_gpu = synchronizer(device), device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        metrics["failed_in"] = "forward"
        forward()
        wait()
        metrics["failed_in"] = "backward"
        if on_gpu:
            metrics["before_backward_gib"] = torch.cuda.memory_allocated() / _GIB
        backward()
        wait()
        del metrics["failed_in"]
    finally:
        if on_gpu:
            metrics["peak_gib"] = torch.cuda.max_memory_allocated() / _GIB


def _workspace_gib() -> float:
    """GiB that the process has allocated once cuBLAS has its workspaces, one for each of the two threads."""
    import torch

    x = torch.ones(1, 64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()
    del x
    return torch.cuda.memory_allocated() / _GIB


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
