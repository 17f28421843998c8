"""Chapter `flash_bench`: FlashAttention-2 in Triton against plain, compiled and library attention.

    papermill book/flash_bench.ipynb out.ipynb -p dtype bf16
    cs336 bench flash --seq-len 4096 --head-dim 64 --dtype bf16

The handout's grid (batch 1, causal, one head) and a second one with 16 heads, the shape of the course's leaderboard,
which fills a GPU at every length; at LANGUAGES_TOKENS it has an implementation in each of our languages. Forward,
backward and end-to-end are timed with `triton.testing.do_bench`, all implementations of a shape in turns in one
process; one of them twice (the A/A row), which shows the noise of the method itself. Of calls up to 10 ms the GPU's
time (by a CUDA graph, L2 cache warm) and the host's are measured as well: where a call is short, `do_bench` may see the
host more than the GPU. `tf32` means fp32 tensors whose matmuls may use TF32: matmul precision "high".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import attention_flops
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.clocks.calls import Calls, captured, host_us
from cs336_systems.measure.clocks.turns import Candidate, columns, prepared, take_turns, time_together
from cs336_systems.measure.device import comparable, default_device, give_back, peak_gib
from cs336_systems.store.status import failure_is_a_row
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

DEPENDS = (
    *depends.ATTENTION, *depends.LADDER, *depends.CALL_CLOCK,
    "accounting/attention_limits.py", "accounting/model.py", "accounting/operations.py",
)  # fmt: skip
GROUP = ("heads", "seq_len", "head_dim", "dtype")
PARTS = ("forward", "backward", "end_to_end")
METRICS = (
    *(column for part in PARTS for column in columns(part)),
    *(f"{part}_tflops" for part in PARTS),
    *(f"{part}_{what}" for what in ("gpu_ms", "host_us") for part in ("forward", "backward")),
    "peak_gib",  # of both passes: what is allocated in a call, and q, k, v, dO
    "error_out", "error_grads", "backend", "matmul_precision", "sm_mhz", "power_w",
)  # fmt: skip
DTYPES = ("bf16", "fp16", "fp32", "tf32")
IMPLEMENTATIONS = tuple(name for name in peers.MAKERS if name not in peers.TOKENS_FIRST)
CHOICES = {
    "heads": range(1, 2**16 + 1), "seq_len": range(1, 2**24 + 1), "head_dim": range(16, 256 + 1), "dtype": DTYPES,
    "impl": IMPLEMENTATIONS, "repeat": range(2),
}  # fmt: skip
LANGUAGES = ("flash_torch", "plain_triton", "flash_triton", "flash_cuda")  # PyTorch, Triton, Gluon, CUDA C++
LANGUAGES_TOKENS = 4096  # of 16 heads
_QUADRATIC = ("reference", "reference_compiled")  # what they keep for backward grows with seq_len²
_SHORT_MS = 10.0  # up to this time GPU and host time are measured apart as well
_REPLAY_MS = 2.0  # of a CUDA graph's replay: it holds as many calls, at least 1 and at most 20
_INTERLEAVED_SCORES = 2**28  # up to this many scores the quadratic ones run in turns with the others


@dataclass(frozen=True)
class Case:
    """One causal attention of batch 1, `heads` × (seq_len, head_dim); `repeat` 1 measures the same thing again."""

    heads: int
    seq_len: int
    head_dim: int
    dtype: str
    impl: str
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The cases of a preset: the handout's whole grid and the many-heads grid, or a few small shapes for a CPU."""
    if preset == "smoke":
        return [
            Case(1, seq_len, 64, dtype, impl, repeat)
            # bf16 is slow on most CPUs
            for dtype, seq_lens in (("bf16", (128, 256)), ("fp32", (128, 256, 512)))
            for seq_len in seq_lens
            for impl, repeat in _twice(("flash_triton", "flash_torch", "reference", "sdpa"), "reference")
        ]
    one_head = ("flash_triton", "reference", "reference_compiled", "sdpa")
    many_heads = ("flash_triton", "flash_cuda", "sdpa_flash", "sdpa_cudnn", "flex_compiled")
    languages = tuple(dict.fromkeys((*many_heads, *LANGUAGES)))
    shapes = [
        (1, 2**n, head_dim, dtype, one_head)
        for dtype, head_dims in (
            ("bf16", (16, 32, 64, 128)),
            ("fp32", (16, 32, 64, 128)),
            ("tf32", (64, 128)),
        )
        for head_dim in head_dims
        for n in range(7, 17)
    ]
    shapes += [
        (16, 2**n, head_dim, "bf16", languages if 2**n == LANGUAGES_TOKENS else many_heads)
        for head_dim in (64, 128)
        for n in range(10, 16)
    ]
    return [
        Case(*shape, impl, repeat)
        for *shape, impls in shapes
        for impl, repeat in _twice(impls, "flash_triton")
    ]


def _twice(impls: tuple[str, ...], again: str) -> list[tuple[str, int]]:
    return [(impl, 0) for impl in impls] + [(again, 1)]


# ---------------------------------------------------------------------------------------------- implementations
def _sdpa_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Which of SDPA's backends torch picks for these inputs by itself."""
    import torch
    from torch.nn.attention import SDPBackend

    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name.lower()


class _Attention:
    """One implementation on the group's inputs: its three parts, as they are timed."""

    def __init__(self, case: Case, inputs: list[torch.Tensor], grad_o: torch.Tensor, device: str) -> None:
        self.inputs, self.grad_o = inputs, grad_o
        self.output: torch.Tensor | None = None
        found = peers.build(case.impl, True, device, case.seq_len)
        self.apply, self.backend = found.apply, found.backend
        if case.impl == "flash_triton":
            from cs336_systems.attention.flash_triton import kernels_for

            kernels = kernels_for(*inputs)
            names = [f"{kernels['forward']} forward", f"{kernels['backward']} backward"]
            alike = len(set(kernels.values())) == 1
            self.backend = f"{kernels['forward']} kernels" if alike else ", ".join(names)
        if case.impl == "sdpa":
            self.backend = _sdpa_backend(*inputs)

    def forward(self) -> Any:
        return self.apply(*self.inputs)

    def backward(self) -> None:
        if self.output is None:
            self.output = self.forward()
        self.output.backward(self.grad_o, retain_graph=True)

    def end_to_end(self) -> None:
        self.forward().backward(self.grad_o)

    def forget(self) -> None:
        self.output = None
        for x in self.inputs:
            x.grad = None

    def errors(self, exact: list[torch.Tensor]) -> dict[str, float]:
        """Relative errors ‖x − exact‖ / ‖exact‖ of O, and the largest of dQ, dK, dV."""
        self.forget()
        o = self.forward()
        o.backward(self.grad_o)
        error_out, *rest = peers.errors([o, *(x.grad for x in self.inputs)], exact)
        self.forget()
        return {"error_out": error_out, "error_grads": max(rest)}


# ---------------------------------------------------------------------------------------------- measuring a group
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one shape and dtype in turns."""
    import torch._functorch.config

    # the timed backward passes keep their graphs, which donated buffers do not allow
    keep_graphs = torch._functorch.config.patch(donated_buffer=False)
    with comparable("high" if cases[0].dtype == "tf32" else "highest") as precision, keep_graphs:
        return [{"matmul_precision": precision} | metrics for metrics in _measured(cases, default_device())]


def _measured(cases: list[Case], device: str) -> list[dict[str, Any]]:
    *inputs, grad_o = (x[None] for x in peers.data_of(cases[0], device))
    inputs = [x.requires_grad_() for x in inputs]
    made: dict[Case, _Attention] = {}

    def try_out(candidate: Candidate) -> None:
        """One call of everything: compiles, finds out about missing parts and memory, and reads the peak."""
        attention = made[candidate.case] = _Attention(candidate.case, inputs, grad_o, device)
        candidate.metrics["backend"] = attention.backend
        try:
            attention.backward()
            attention.backward()  # the timed backward pass keeps its graph: does this one allow it?
            attention.forget()
            candidate.metrics["peak_gib"] = peak_gib(attention.end_to_end, [*inputs, grad_o])
        finally:
            attention.forget()

    def tidy() -> None:
        for attention in made.values():
            attention.forget()
        give_back(device)  # cached blocks of other sizes do not serve the largest cases

    candidates = prepared(cases, try_out, device)
    together = [c for c in candidates if not _is_large(c.case)]
    for group in [together, *([c] for c in candidates if _is_large(c.case))]:
        tidy()
        for part in PARTS:
            _time_part(group, made, part, device, tidy)
    tidy()
    ready = [c for c in candidates if c.ok]
    if ready:
        from cs336_systems.attention.reference import exact_attention

        exact = exact_attention(*inputs, grad_o, True)
        for candidate in ready:
            with failure_is_a_row(candidate.metrics):
                candidate.metrics |= made[candidate.case].errors(exact)
    return [candidate.metrics for candidate in candidates]


def _is_large(case: Case) -> bool:
    """Whether a case is timed alone: side by side such graphs would not fit, though each one may."""
    return case.impl in _QUADRATIC and case.heads * case.seq_len**2 > _INTERLEAVED_SCORES


def _time_part(
    group: list[Candidate], made: dict[Case, _Attention], part: str, device: str, tidy: Callable[[], None]
) -> None:
    for candidate in filter(lambda c: c.ok, group):
        candidate.phases = {part: getattr(made[candidate.case], part)}
    on_gpu, inputs = device != "cpu", next(iter(made.values())).inputs if made else []
    clock = Calls(
        device,
        num_rounds=3,
        warmup_ms=10,
        rep_ms=40 if on_gpu else 10,
        grads=inputs,
        watched=part == "end_to_end",
    )
    timed = time_together(group, clock, tidy)
    for candidate in timed:
        case, samples = candidate.case, candidate.samples
        flops = attention_flops(case.heads, case.seq_len, case.seq_len, case.head_dim, True, part)
        candidate.metrics |= samples.row(part) | {f"{part}_tflops": flops / samples.p50(part) / 1e9}
        if part == "end_to_end":
            candidate.metrics |= samples.clocks()
    if part != "end_to_end" and on_gpu:
        _time_without_host([c for c in timed if c.samples.p50(part) <= _SHORT_MS], made, part)


def _time_without_host(short: list[Candidate], made: dict[Case, _Attention], part: str) -> None:
    """GPU time by CUDA graphs, replayed in turns, and the host's time for one call: short calls only.

    Where the GPU's work is long, it overlaps what a call costs the host; where it is short, `do_bench` measures the
    host.
    """
    replays, calls = {}, {}
    for candidate in short:
        case, attention = candidate.case, made[candidate.case]
        calls[case] = max(1, min(20, int(_REPLAY_MS / candidate.samples.p50(part))))
        host = host_us(getattr(attention, part), grads=attention.inputs)
        candidate.metrics[f"{part}_host_us"] = host
        attention.forget()
        data = [x.detach() for x in (*attention.inputs, attention.grad_o)]
        on_its_own = peers.one_pass(peers.Attention(attention.apply, ""), part, data)
        replays[case] = {part: captured(on_its_own, calls[case])}
    clock = Calls("cuda", num_rounds=3, warmup_ms=2, rep_ms=10, watched=False)
    times = take_turns(replays, clock)
    for candidate in short:
        candidate.metrics[f"{part}_gpu_ms"] = times[candidate.case].p50(part) / calls[candidate.case]


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS, choices=CHOICES)
