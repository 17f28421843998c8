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

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.memory_cap import capped
from cs336_systems.store.status import failure_is_a_row, oom_is_a_row

if TYPE_CHECKING:
    import torch

DEPENDS = (*depends.PLAIN, *depends.TRITON, *depends.PHASES, "chapters/shared/memory_cap.py")
GROUP = ("cap_gib", "dtype", "head_dim", "seq_len")
PARTS = ("forward", "backward")
METRICS = (
    *(f"{part}_ms_{what}" for part in PARTS for what in ("mean", "std", "p50")),
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
DTYPES = ("fp32", "bf16")
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


def estimate_s(group: list[Case]) -> float:
    """Seconds that a group takes on an H100, roughly: compiling, and all steps of what fits under the cap."""
    seconds = 0.0
    for case in group:
        matrices = {"reference": 4, "reference_compiled": 2}.get(case.impl, 0)  # at the peak
        scores, element = BATCH * case.seq_len**2, 2 if case.dtype == "bf16" else 4
        if case.impl == "reference_compiled":
            seconds += 4
        if not case.cap_gib or matrices * scores * element < case.cap_gib * _GIB:
            matmuls = (0.2e-12 if matrices else 0.5e-12) * case.head_dim / (10 if element == 2 else 1)
            between = {4: 10e-12, 2: 4e-12, 0: 0.0}[matrices] * element
            seconds += (WARMUP + STEPS + ROUNDS) * (300e-6 + scores * (matmuls + between))
    return seconds


# ------------------------------------------------------------------------------------------------ the settings
@contextmanager
def _accurate_matmuls() -> Iterator[str]:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)


def _no_recompiling() -> AbstractContextManager[Any]:
    """Within its block, a compiled function that does not fit its inputs raises: it can't fall back to eager unseen."""
    import torch

    return torch.compiler.set_stance("fail_on_recompile")


# --------------------------------------------------------------------------------------------- candidates
class _Candidate:
    """One case while it is measured. Between two of its steps it holds nothing but the inputs, which all share."""

    def __init__(
        self, case: Case, metrics: dict[str, Any], inputs: list[torch.Tensor], grad_o: torch.Tensor
    ) -> None:
        self.case, self.metrics, self.inputs, self.grad_o = case, metrics, inputs, grad_o
        self.device = grad_o.device.type
        self.output: torch.Tensor | None = None

    def forward(self) -> None:
        self.output = self.apply(*self.inputs)

    def backward(self) -> None:
        assert self.output is not None
        self.output.backward(self.grad_o)

    def forget(self) -> None:
        """Drops the output and the gradients; the backward pass has freed the graph, if it was reached."""
        self.output = None
        for x in self.inputs:
            x.grad = None

    def try_out(self) -> None:
        """Two steps: one compiles, of the other the memory is read. Whatever fails becomes the row's status."""
        from torch._dynamo.utils import counters

        compiled = self.case.impl == "reference_compiled"
        with failure_is_a_row(self.metrics):
            seq_len = self.case.seq_len
            self.apply = peers.build(self.case.impl, False, self.device, seq_len).apply
            counters.clear()
            start = time.perf_counter()
            self._one_step()
            if compiled:
                self.metrics["compile_s"] = time.perf_counter() - start
                hits = (
                    counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
                )
                self.metrics |= {"cache_hits": hits, "graphs": counters["stats"]["unique_graphs"]}
            with _no_recompiling():
                self._one_step()
        self.forget()
        if self.case.impl == "flash_triton" and "status" not in self.metrics:
            from cs336_systems.attention.flash_triton import kernels_for

            self.metrics |= {f"{part}_kernels": name for part, name in kernels_for(*self.inputs).items()}
        if "status" in self.metrics:
            gc.collect()  # frames of the exception may still hold tensors
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()

    def _one_step(self) -> None:
        """A forward and a backward pass; notes the memory between them, the most there was, and where it failed."""
        import torch

        from cs336_systems.measure.clocks.phases import synchronizer

        wait, on_gpu = synchronizer(self.device), self.device != "cpu"
        self.forget()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            self.metrics["failed_in"] = "forward"
            self.forward()
            wait()
            self.metrics["failed_in"] = "backward"
            if on_gpu:
                self.metrics["before_backward_gib"] = torch.cuda.memory_allocated() / _GIB
            self.backward()
            wait()
            del self.metrics["failed_in"]
        finally:
            if on_gpu:
                self.metrics["peak_gib"] = torch.cuda.max_memory_allocated() / _GIB


# ---------------------------------------------------------------------------------------------- measuring a group
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one shape, dtype and cap in turns; see the package's docstring for the contract."""
    import torch

    if cases[0].dtype not in DTYPES:
        raise ValueError(f"unknown dtype {cases[0].dtype!r}; allowed: {', '.join(DTYPES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = [{} for _ in cases]
    shared: dict[str, Any] = {}  # what keeps the whole group from being measured
    with oom_is_a_row(shared), capped(cases[0].cap_gib, device), _accurate_matmuls() as precision:
        torch._dynamo.reset()  # past eight shapes of one function, Dynamo would fall back to eager without a word
        _measure(cases, rows, device)
        for row in rows:
            row["matmul_precision"] = precision
    return [row if "status" in row else row | shared for row in rows]


def _measure(cases: list[Case], rows: list[dict[str, Any]], device: str) -> None:
    import torch

    from cs336_systems.measure.clocks.phases import time_phases

    workspace_gib = _workspace_gib() if device != "cpu" else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cases[0].dtype]
    shape = (BATCH, cases[0].seq_len, cases[0].head_dim)
    generator = torch.Generator(device).manual_seed(cases[0].seq_len + cases[0].head_dim)
    q, k, v, grad_o = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    candidates = [_Candidate(case, row, inputs, grad_o) for case, row in zip(cases, rows, strict=True)]
    for candidate in candidates:
        candidate.metrics["workspace_gib"] = workspace_gib
        candidate.try_out()
    ready = {f"{c.case.impl}/{c.case.repeat}": c for c in candidates if "status" not in c.metrics}
    if not ready:
        return
    # The third phase is not reported: it keeps the freeing of outputs and gradients out of the times of the others.
    phases = {
        name: {"forward": c.forward, "backward": c.backward, "forget": c.forget} for name, c in ready.items()
    }
    # Each turn finds the memory as the try-out did: nothing kept, and no cached blocks of another's sizes.
    before = (lambda name: torch.cuda.empty_cache()) if device != "cpu" else None
    compiled = any(c.case.impl == "reference_compiled" for c in ready.values())
    with _no_recompiling() if compiled else nullcontext():
        times = time_phases(phases, device=device, warmup=WARMUP, steps=STEPS, rounds=ROUNDS, before=before)
    for name, candidate in ready.items():
        for part in PARTS:
            series = times[name][part]
            found = {"mean": series.mean, "std": series.std, "p50": series.p50}
            candidate.metrics |= {f"{part}_ms_{what}": ms for what, ms in found.items()}


def _workspace_gib() -> float:
    """GiB that the process has allocated once cuBLAS has its workspaces, one for each of the two threads."""
    import torch

    x = torch.ones(1, 64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()
    del x
    return torch.cuda.memory_allocated() / _GIB
