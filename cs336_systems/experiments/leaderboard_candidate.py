"""No chapter: a case of chapter `leaderboard`, and what becomes of it, from its call to its row."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import attention_flops
from cs336_systems.experiments import attention_peers as peers
from cs336_systems.ladder import steps
from cs336_systems.measure.rows import Skip, failure_is_a_row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Case:
    """One thing timed on `heads` × (seq_len, head_dim), batch 1. `impl`: one of OURS or PEERS, for a ladder the name
    of a step; `rep_ms`: repetitions of a turn; `repeat` 1 measures the same thing again."""

    kind: str
    impl: str
    part: str
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    dtype: str
    leaves: str
    grad_o: str
    rep_ms: int
    repeat: int = 0


def implementation(case: Case, device: str) -> peers.Implementation:
    """Raises `Skip` where this machine cannot run it. What is compiled is compiled once in a process."""
    return peers.build(case.impl, case.is_causal, device, case.seq_len, case.kind == "harness")


def data_of(case: Case, device: str) -> list[torch.Tensor]:
    """q, k, v and dO of a case: (heads, n, d) each, the same for all that are compared."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
    generator = torch.Generator(device).manual_seed(case.seq_len + case.head_dim)
    shape = (4, case.heads, case.seq_len, case.head_dim)
    return list(torch.randn(shape, generator=generator, device=device, dtype=dtype))


class Candidate:
    """One case while it is measured. `call` is what is timed, `grads` the tensors whose gradients are dropped
    before."""

    def __init__(self, case: Case, data: list[torch.Tensor], device: str) -> None:
        self.case, self.device = case, device
        self.q, self.k, self.v, self.grad_o = data  # each (heads, n, d)
        self.metrics: dict[str, Any] = {}
        self.grads: list[torch.Tensor] = []
        self.turns: list[tuple[tuple[float, ...], float | None, float | None]] = []  # samples, MHz, W

    @property
    def ok(self) -> bool:
        return "status" not in self.metrics

    @property
    def name(self) -> str:
        return f"{self.case.impl}/{self.case.repeat}"

    def prepare(self, exact: Callable[[], list[torch.Tensor]]) -> None:
        """Compiles, holds the results against fp64, reads the peak, and makes `call`."""
        with failure_is_a_row(self.metrics):
            if self.case.kind == "ladder":
                self._prepare_step(exact)
            else:
                self._prepare_implementation(exact)
            if self.device == "cpu":
                self.metrics["timed"] = "clock"
            elif self.case.kind != "harness":
                self._capture()
            else:
                self.metrics["timed"] = "events"
        for tensor in self.grads:
            tensor.grad = None

    def _capture(self) -> None:
        """Replaces `call` by the replay of a CUDA graph; a peer whose calls cannot be captured is timed as it is."""
        from cs336_systems.measure.timing import captured

        try:
            self.call, self.metrics["timed"] = captured(self.call, 1), "graph"
        except Exception:
            if self.case.impl not in peers.PEERS:
                raise
            traceback.print_exc(file=sys.stderr)
            self.metrics["timed"] = "events"

    # ------------------------------------------------------------------------------------ autograd
    def _prepare_implementation(self, exact: Callable[[], list[torch.Tensor]]) -> None:
        import torch

        from cs336_systems.measure.timing import peak_gib

        case, impl = self.case, implementation(self.case, self.device)
        self.metrics["backend"] = impl.backend
        laid_out, grad_o = self._inputs(impl)
        self._hold_against(exact, impl, laid_out, grad_o)
        if case.kind == "harness":
            data = [laid_out(x) for x in (self.q, self.k, self.v)]
            if case.leaves == "stacked":
                stacked = torch.stack(data).requires_grad_()
                q, k, v = stacked  # as the handout's code unpacks it: three views of one leaf
            else:
                q, k, v = self.grads = [x.requires_grad_() for x in data]

            def step():
                o = impl.apply(q, k, v)
                loss = o.sum()
                loss.backward()

            step()
            self.metrics["peak_gib"] = peak_gib(step)
            self.call = step
            return
        self.prepare_call()

    def _inputs(self, impl: peers.Implementation) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        """What makes a tensor of (heads, n, d) one as this implementation wants it, and its dO."""
        import torch

        def laid_out(x):  # (heads, n, d) or (n, heads, d), contiguous
            return (x.transpose(0, 1) if impl.tokens_first else x).contiguous()

        grad_o = laid_out(self.grad_o)
        if self.case.grad_o == "number":
            grad_o = torch.ones((), device=self.device, dtype=self.q.dtype).expand(grad_o.shape)
        return laid_out, grad_o

    def prepare_call(self) -> None:
        """Makes `call` one pass of the implementation, or both."""
        import torch

        case, impl = self.case, implementation(self.case, self.device)
        laid_out, grad_o = self._inputs(impl)
        data = [laid_out(x) for x in (self.q, self.k, self.v)]
        made: list[Any] = []  # they belong to the stream of the first call, which a graph captures

        def leaves_and_output():
            if not made:
                leaves = [x.clone().requires_grad_() for x in data]
                made.extend([leaves, impl.apply(*leaves) if case.part == "backward" else None])
            return made

        def call():
            leaves, output = leaves_and_output()
            if case.part == "forward":
                return impl.apply(*leaves)
            if output is not None:
                return torch.autograd.grad(output, leaves, grad_o, retain_graph=True)
            return torch.autograd.grad(impl.apply(*leaves), leaves, grad_o)

        self.call = call

    def _hold_against(
        self, exact: Any, impl: peers.Implementation, laid_out: Any, grad_o: torch.Tensor
    ) -> None:
        """Errors of one call on leaves of its own; compiles both passes, too."""
        import torch

        leaves = [laid_out(x).requires_grad_() for x in (self.q.detach(), self.k.detach(), self.v.detach())]
        o = impl.apply(*leaves)
        found = [o.detach(), *torch.autograd.grad(o, leaves, grad_o)]
        if impl.tokens_first:
            found = [x.transpose(0, 1) for x in found]
        if self.case.impl in peers.OURS and self.device != "cpu":
            own = peers.own_kernels(lambda: torch.autograd.grad(impl.apply(*leaves), leaves, grad_o))
            self.metrics["kernels"] = " ".join(own)
        errors = _errors(found, exact())
        self.metrics |= {"error_out": errors[0], "error_grads": max(errors[1:])}

    # ------------------------------------------------------------------------------------ the ladder
    def _prepare_step(self, exact: Callable[[], list[torch.Tensor]]) -> None:
        from cs336_systems.ladder import launch

        step = steps.STEPS[self.case.impl]
        self.metrics["predicted_ms"] = steps.predicted_ms(step)
        if self.device == "cpu":
            raise Skip("needs a CUDA device")
        if reason := launch.missing(step):
            raise Skip(f"needs {reason}")
        from cs336_systems.ladder import resources

        q, k, v, grad_o = (x[None] for x in (self.q, self.k, self.v, self.grad_o))
        tensors: tuple[torch.Tensor, ...] = (q, k, v)
        if step.part == "backward":
            o, logsumexp = launch.launcher(steps.STEPS["f_production"])(q, k, v, True)
            tensors = (q, k, v, o, logsumexp, grad_o)
        run = launch.launcher(step)
        found = run(*tensors, True)
        if step.part == "forward":
            self.metrics["error_out"] = _errors([found[0][0]], exact()[:1])[0]
        else:
            self.metrics["error_grads"] = max(_errors([x[0] for x in found], exact()[1:]))
        self.call = lambda: run(*tensors, True)
        used = resources.of_call(self.call)
        self.metrics |= {
            "kernels": " ".join(r.kernel for r in used),
            "registers": max((r.registers for r in used), default=None),
            "spill_bytes": max((r.spill_bytes for r in used), default=None),
            "shared_kib": max((r.shared_bytes / 1024 for r in used), default=None),
        }

    # ------------------------------------------------------------------------------------ what comes of it
    def summarize(self) -> None:
        from cs336_systems.measure.timing import Timing

        case = self.case
        samples = sorted(ms for turn, _, _ in self.turns for ms in turn)
        timing = Timing(tuple(samples))
        flops = attention_flops(
            case.heads, case.seq_len, case.seq_len, case.head_dim, case.is_causal, case.part
        )
        self.metrics |= timing.metrics() | {
            "ms_mean": statistics.fmean(samples), "ms_min": samples[0], "ms_max": samples[-1],
            "turns_ms": _numbers(statistics.median(turn) for turn, _, _ in self.turns),
            "turns_mhz": _numbers(mhz for _, mhz, _ in self.turns),
            "turns_w": _numbers(watts for _, _, watts in self.turns),
            "tflops": flops / timing.p50 / 1e9,
            "sm_mhz": _median(mhz for _, mhz, _ in self.turns), "power_w": _median(w for _, _, w in self.turns),
        }  # fmt: skip


def _numbers(values: Any) -> str:
    """Numbers in one cell, `;` between them; what is not known is left empty."""
    return ";".join("" if value is None else f"{value:.6g}" for value in values)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """‖x − exact‖ / ‖exact‖ of each."""
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]
