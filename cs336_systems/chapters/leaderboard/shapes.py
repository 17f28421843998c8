"""A table of chapter `leaderboard`: kernels alone, ours beside the best peers, at shapes chosen by use.

    cs336 run leaderboard -p head_dim=96

Training shapes (hundreds of heads of 512 to 4,096 tokens), long ones with few heads, lengths that are no multiple of
anything, head dimensions between powers of two, and cross attention, without a mask. All implementations read the same
tensors, which lie as a model makes them: (batch, tokens, heads, d). Forward and backward are timed apart, as replays of
a CUDA graph, in turns, each round in an order of its own (`turns.order`): a kernel's clock depends on the one before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.accounting import attention_flops
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.clocks.calls import Calls, captured
from cs336_systems.measure.clocks.turns import Candidate, columns, prepared, time_together
from cs336_systems.measure.device import comparable, default_device, torch_dtype
from cs336_systems.store.status import Skip, loses_context
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

DEPENDS = (*depends.TRITON, *depends.CALL_CLOCK, "accounting/operations.py")
GROUP = ("part", "batch", "heads", "num_queries", "num_keys", "head_dim", "is_causal", "dtype")
METRICS = (*columns(), "tflops", "backend", "apart")
"""apart: ‖x − y‖ / ‖y‖ of the pass's results x and those of the group's first implementation, y; the worst tensor."""
PEERS = ("flash_triton", "fa4", "fa3", "sdpa_cudnn", "sdpa_flash")
PARTS = ("forward", "backward")
ROUNDS, WARMUP_MS, REP_MS = 4, 50, 20
KINDS = ("training", "d 80 and 96", "long", "ragged", "cross")
_SHAPES = (  # batch, heads, queries, keys, head dimension, masks (c causal, - none), dtype
    (8, 12, 1024, 1024, 64, "c", "bf16"),
    (64, 12, 1024, 1024, 64, "c-", "bf16"),
    (32, 16, 1024, 1024, 64, "c", "fp16"),
    (128, 16, 512, 512, 64, "c", "bf16"),
    (8, 12, 512, 512, 64, "-", "bf16"),  # BERT
    (16, 16, 2048, 2048, 64, "c", "bf16"),
    (4, 24, 4096, 4096, 64, "c", "bf16"),
    (32, 16, 1024, 1024, 128, "c-", "bf16"),
    (64, 16, 512, 512, 128, "c", "bf16"),
    (8, 16, 4096, 4096, 128, "c", "bf16"),
    (32, 16, 1024, 1024, 80, "c", "bf16"),
    (4, 16, 4096, 4096, 80, "-", "bf16"),
    (32, 16, 1024, 1024, 96, "c", "bf16"),
    (4, 16, 4096, 4096, 96, "c", "bf16"),
    (16, 12, 2048, 2048, 96, "-", "fp16"),
    (1, 4, 32768, 32768, 64, "c", "bf16"),
    (1, 4, 32768, 32768, 128, "-", "bf16"),
    (1, 4, 65536, 65536, 128, "c", "bf16"),
    (1, 2, 131072, 131072, 64, "c", "bf16"),
    (32, 12, 1000, 1000, 64, "c", "bf16"),
    (4, 16, 3001, 3001, 64, "-", "bf16"),
    (16, 16, 777, 777, 128, "c", "bf16"),
    (32, 12, 197, 197, 64, "-", "bf16"),  # a vision transformer
    (2, 16, 4097, 4097, 128, "c", "bf16"),
    (8, 16, 1531, 1531, 96, "c", "bf16"),
    (16, 16, 64, 4096, 128, "-", "bf16"),
    (1, 16, 128, 16384, 64, "-", "bf16"),
    (2, 32, 16, 8192, 128, "-", "bf16"),
    (4, 12, 2048, 1024, 64, "-", "bf16"),
    (8, 16, 4096, 256, 64, "-", "bf16"),
    (8, 10, 4096, 77, 64, "-", "bf16"),  # a picture's tokens and a caption's
    (256, 8, 128, 128, 64, "-", "fp16"),
    (3, 7, 1234, 1234, 112, "c", "bf16"),
)


@dataclass(frozen=True)
class Case:
    """One pass of `impl` (`attention_peers.MAKERS`) on `batch` × `heads` matrices of queries (num_queries, head_dim)
    and keys (num_keys, head_dim). `repeat` 1 measures the same thing again."""

    impl: str
    part: str
    batch: int
    heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    is_causal: bool
    dtype: str
    repeat: int = 0


def kind_of(case: Any) -> str:
    """What of KINDS a case's shape is."""
    if case.num_queries != case.num_keys:
        return "cross"
    if case.num_queries % 64:
        return "ragged"
    if case.head_dim not in (64, 128):
        return "d 80 and 96"
    return "long" if case.num_queries >= 32768 else "training"


def grid(preset: str) -> list[Case]:
    """Every shape, or a small one for a CPU."""
    if preset == "smoke":
        few, shapes = ("reference", "sdpa_flash"), [(1, 2, 33, 70, 16, False, "fp32")]
    else:
        few = PEERS
        shapes = [(*shape, mask == "c", dtype) for *shape, masks, dtype in _SHAPES for mask in masks]
    return [
        case
        for shape, part in itertools.product(shapes, PARTS)
        for case in peers.with_pair(Case, few, part, *shape, again=few[0])
        if case.part == "forward" or case.impl not in peers.FORWARD_ONLY
    ]


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one pass and shape in turns."""
    case, device = cases[0], default_device()
    queries, keys = (case.heads, case.num_queries), (case.heads, case.num_keys)
    data = data_of(
        case, case.num_queries + case.num_keys + case.head_dim, (queries, keys, keys, queries), device
    )
    build = lambda impl: peers.build(impl, case.is_causal, device, case.num_keys)
    flops = attention_flops(
        case.batch * case.heads, case.num_queries, case.num_keys, case.head_dim, case.is_causal, case.part
    )
    return in_turns(cases, data, build, flops, device)


def in_turns(
    cases: Sequence[Any], data: list[torch.Tensor], build: Callable[[str], peers.Attention], flops: float, device: str
) -> list[dict[str, Any]]:  # fmt: skip
    """The metrics of one pass of implementations, which `build` makes by name, on q, k, v and dO of `data_of`."""
    import torch._functorch.config

    first: list[torch.Tensor] = []

    def prepare(candidate: Candidate) -> None:
        case = candidate.case
        impl = build(case.impl)
        candidate.metrics["backend"] = impl.backend
        with _may_refuse(case.impl):
            found = _one_pass(impl, case.part, data)()
            results = [x.detach() for x in (found if isinstance(found, tuple) else (found,))]
            call = _one_pass(impl, case.part, data)
            candidate.phases = {case.part: call if device == "cpu" else captured(call, 1)}
        first.extend([] if first else results)
        candidate.metrics["apart"] = max(peers.errors(results, first))

    clock = Calls(device, num_rounds=ROUNDS, warmup_ms=WARMUP_MS, rep_ms=REP_MS, watched=False)
    # the timed backward passes keep their graphs, which donated buffers do not allow
    with comparable(), torch._functorch.config.patch(donated_buffer=False):
        candidates = prepared(cases, prepare, device)
        for candidate in time_together(candidates, clock):
            part, samples = candidate.case.part, candidate.samples
            candidate.metrics |= samples.row(part, prefix="")
            candidate.metrics["tflops"] = flops / samples.p50(part) / 1e9
    return [candidate.metrics for candidate in candidates]


def data_of(case: Any, seed: int, shapes: Sequence[tuple[int, int]], device: str) -> list[torch.Tensor]:
    """q, k, v and dO of these heads and lengths: (batch, heads, n, d) as views of (batch, n, heads, d)."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, device=device, dtype=torch_dtype(case.dtype))
    return [draw((case.batch, n, heads, case.head_dim)).transpose(1, 2) for heads, n in shapes]


def _one_pass(impl: peers.Attention, part: str, data: list[torch.Tensor]) -> Callable[[], Any]:
    """A call of one pass. What it differentiates is made in its first call, on the stream that a graph captures."""
    import torch

    *inputs, grad = data
    apply = impl.apply
    if impl.tokens_first:  # the layout in which the tensors lie

        def apply(q, k, v):
            return impl.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    made: list[Any] = []

    def call():
        if not made:
            leaves = [x.detach().requires_grad_() for x in inputs]
            made.extend([leaves, apply(*leaves) if part == "backward" else None])
        leaves, output = made
        if output is None:
            return apply(*leaves)
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    return call


@contextmanager
def _may_refuse(impl: str) -> Iterator[None]:
    """`Skip`, with its words, where another's implementation does not take a shape, or no CUDA graph does. Ours has to,
    and what memory or the CUDA context was lost for is no refusal."""
    import torch

    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        words = str(error)
        if impl in peers.OURS or loses_context(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise Skip(f"{type(error).__name__}: {words.splitlines()[0] if words else ''}") from error


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
