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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import attention_flops
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.store.status import failure_is_a_row

if TYPE_CHECKING:
    import torch

DEPENDS = (
    *depends.ATTENTION, *depends.LADDER, *depends.EVENTS,
    "accounting/attention_limits.py", "accounting/model.py", "accounting/operations.py",
)  # fmt: skip
GROUP = ("heads", "seq_len", "head_dim", "dtype")
PARTS = ("forward", "backward", "end_to_end")
METRICS = (
    *(f"{part}_ms_{quantile}" for part in PARTS for quantile in ("p20", "p50", "p80")),
    *(f"{part}_tflops" for part in PARTS),
    *(f"{part}_{what}" for what in ("gpu_ms", "host_us") for part in ("forward", "backward")),
    "peak_gib",
    "error_out",
    "error_grads",
    "backend",
    "matmul_precision",
    "sm_mhz",
    "power_w",
)
DTYPES = ("bf16", "fp16", "fp32", "tf32")
IMPLEMENTATIONS = tuple(name for name in peers.MAKERS if name != "fa4")  # whose axes are in another order
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


def estimate_s(group: list[Case]) -> float:
    """Seconds that a group takes, roughly: compilation, and at least the minimum of calls of the slowest function."""
    scores = group[0].heads * group[0].seq_len ** 2
    return 1 + sum(5 if case.impl.endswith("compiled") else 0.5 for case in group) + scores * 2e-9


# ---------------------------------------------------------------------------------------------- implementations
@contextmanager
def _matmul_precision(dtype: str) -> Iterator[str]:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)


def _sdpa_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Which of SDPA's backends torch picks for these inputs by itself."""
    import torch
    from torch.nn.attention import SDPBackend

    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name.lower()


class _Candidate:
    """One case while it is measured: its three functions, and what is known of it so far."""

    def __init__(self, case: Case, inputs: list[torch.Tensor], grad_o: torch.Tensor, device: str) -> None:
        self.case, self.inputs, self.grad_o, self.device = case, inputs, grad_o, device
        self.metrics: dict[str, Any] = {}
        self.output: torch.Tensor | None = None

    @property
    def ok(self) -> bool:
        return "status" not in self.metrics

    def try_out(self) -> None:
        """One call of everything: compiles, finds out about missing parts and memory, and reads the peak."""
        import torch

        from cs336_systems.measure.clocks.timing import peak_gib

        with failure_is_a_row(self.metrics):
            found = peers.build(self.case.impl, True, self.device, self.case.seq_len)
            self.apply, self.metrics["backend"] = found.apply, found.backend
            if self.case.impl == "flash_triton":
                from cs336_systems.attention.flash_triton import kernels_for

                kernels = kernels_for(*self.inputs)
                names = [f"{kernels['forward']} forward", f"{kernels['backward']} backward"]
                self.metrics["backend"] = (
                    f"{kernels['forward']} kernels" if len(set(kernels.values())) == 1 else ", ".join(names)
                )
            if self.case.impl == "sdpa":
                self.metrics["backend"] = _sdpa_backend(*self.inputs)
            self.backward()
            self.backward()  # the timed backward pass keeps its graph: does this one allow it?
            self.forget()
            self.metrics["peak_gib"] = peak_gib(self.end_to_end)
        self.forget()
        if self.device != "cpu" and not self.ok:
            torch.cuda.empty_cache()

    def forward(self) -> Any:
        return self.apply(*self.inputs)

    def backward(self) -> None:
        if self.output is None:
            self.output = self.forward()
        self.output.backward(self.grad_o, retain_graph=True)

    def end_to_end(self) -> None:
        self.forward().backward(self.grad_o)

    def on_its_own(self, part: str) -> Callable[[], Any]:
        """Forward or backward on leaves of its own, for a CUDA graph: all runs on the stream of the first call."""
        import torch

        leaves: list[torch.Tensor] = []
        output: list[torch.Tensor] = []

        def call() -> Any:
            if not leaves:
                leaves.extend(x.detach().requires_grad_() for x in self.inputs)
            if part == "forward":
                return self.apply(*leaves)
            if not output:
                output.append(self.apply(*leaves))
            return torch.autograd.grad(output[0], leaves, self.grad_o, retain_graph=True)

        return call

    def forget(self) -> None:
        self.output = None
        for x in self.inputs:
            x.grad = None

    def errors(self, exact: list[torch.Tensor]) -> None:
        """Relative errors ‖x − exact‖ / ‖exact‖ of O, and the largest of dQ, dK, dV."""
        self.forget()
        o = self.forward()
        o.backward(self.grad_o)
        found = [
            (x.double() - y).norm() / y.norm()
            for x, y in zip((o, *(x.grad for x in self.inputs)), exact, strict=True)
        ]
        self.metrics |= {"error_out": found[0].item(), "error_grads": max(e.item() for e in found[1:])}
        self.forget()


# ---------------------------------------------------------------------------------------------- measuring a group
def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one shape and dtype in turns; see the package's docstring for the contract."""
    import torch
    import torch._functorch.config

    if cases[0].dtype not in DTYPES:
        raise ValueError(f"unknown dtype {cases[0].dtype!r}; allowed: {', '.join(DTYPES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(cases[0].dtype, torch.float32)
    shape = (1, cases[0].heads, cases[0].seq_len, cases[0].head_dim)
    generator = torch.Generator(device).manual_seed(cases[0].seq_len + cases[0].head_dim)
    q, k, v, grad_o = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    # the timed backward passes keep their graphs, which donated buffers do not allow
    keep_graphs = torch._functorch.config.patch(donated_buffer=False)
    torch._dynamo.reset()  # past eight shapes Dynamo would fall back to eager without a word
    with _matmul_precision(cases[0].dtype) as precision, keep_graphs:
        candidates = [_Candidate(case, inputs, grad_o, device) for case in cases]
        for candidate in candidates:
            candidate.metrics["matmul_precision"] = precision
            candidate.try_out()
        _time([c for c in candidates if c.ok], device)
        ready = [c for c in candidates if c.ok]
        if ready:
            from cs336_systems.attention.reference import exact_attention

            exact = exact_attention(q.detach(), k.detach(), v.detach(), grad_o, is_causal=True)
            for candidate in ready:
                with failure_is_a_row(candidate.metrics):
                    candidate.errors(exact)
    return [candidate.metrics for candidate in candidates]


def _time(ready: list[_Candidate], device: str) -> None:
    import torch

    scores = ready[0].case.heads * ready[0].case.seq_len ** 2 if ready else 0
    if scores <= _INTERLEAVED_SCORES:
        turns = [ready]
    else:  # side by side their graphs would not fit, though each one alone may
        turns = [[c for c in ready if c.case.impl not in _QUADRATIC]]
        turns += [[c] for c in ready if c.case.impl in _QUADRATIC]
    for group in filter(None, turns):
        for candidate in group:
            candidate.forget()
        if device != "cpu":
            torch.cuda.empty_cache()  # cached blocks of other sizes do not serve the largest cases
        # what runs alone fails alone; in turns with others every function has run before, with memory to spare
        with failure_is_a_row(group[0].metrics) if len(group) == 1 else nullcontext():
            for part in PARTS:
                _time_part(group, part, device)
        for candidate in group:
            candidate.forget()


def _time_part(group: list[_Candidate], part: str, device: str) -> None:
    from cs336_systems.measure.clocks.timing import Watch, interleaved

    names = {f"{c.case.impl}/{c.case.repeat}": c for c in group}
    watches = {name: Watch() for name in names} if device != "cpu" else {}
    timings = interleaved(
        {name: getattr(c, part) for name, c in names.items()},
        device=device,
        rounds=3,
        warmup_ms=10,
        rep_ms=40 if device != "cpu" else 10,
        grad_to_none={name: c.inputs for name, c in names.items()},
        watches=watches if part == "end_to_end" else None,
    )
    for name, candidate in names.items():
        case, timing = candidate.case, timings[name]
        flops = attention_flops(case.heads, case.seq_len, case.seq_len, case.head_dim, True, part)
        candidate.metrics |= timing.metrics(part) | {f"{part}_tflops": flops / timing.p50 / 1e9}
        if part == "end_to_end" and name in watches:
            candidate.metrics |= watches[name].metrics()
    if part != "end_to_end" and device != "cpu":
        _time_without_host(names, {name: timings[name].p50 for name in names}, part)


def _time_without_host(names: dict[str, _Candidate], ms: dict[str, float], part: str) -> None:
    """GPU time by CUDA graphs, replayed in turns, and the host's time for one call: short calls only.

    Where the GPU's work is long, it overlaps what a call costs the host; where it is short, `do_bench` measures the
    host.
    """
    from cs336_systems.measure.clocks.timing import captured, host_us, interleaved

    short = [name for name in names if ms[name] <= _SHORT_MS]
    calls = {name: max(1, min(20, int(_REPLAY_MS / ms[name]))) for name in short}
    for name in short:
        candidate = names[name]
        candidate.metrics[f"{part}_host_us"] = host_us(
            getattr(candidate, part), grad_to_none=candidate.inputs
        )
        candidate.forget()
    replays = {name: captured(names[name].on_its_own(part), calls[name]) for name in short}
    timings = interleaved(replays, device="cuda", rounds=3, warmup_ms=2, rep_ms=10)
    for name in short:
        names[name].metrics[f"{part}_gpu_ms"] = timings[name].p50 / calls[name]
