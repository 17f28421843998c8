"""A table of chapter `leaderboard`: the first call of both passes in a fresh process with empty caches, and how many
kernels Triton compiles for it; then the first call of a second process, which finds on disk what the first one left.
Beside them what a call that was made before takes the host, with launches remembered and without."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.chapters.shared.attention_peers import OURS, WORK
from cs336_systems.measure.device import default_device, torch_dtype
from cs336_systems.store import process
from cs336_systems.store.status import failure_is_a_row
from cs336_systems.store.table import Table

if TYPE_CHECKING:
    import torch

DEPENDS = (*depends.TRITON, *depends.CUDA, *depends.LADDER)
GROUP = ("heads", "seq_len", "head_dim", "is_causal", "dtype")
METRICS = (
    "first_call_s", "second_call_ms", "next_process_s", "compiled", "compiled_later", "backend", "kernels",
    "host_us", "forgetful_us",
)  # fmt: skip
IMPLS = ("flash_triton", "plain_triton", "flash_cuda", "flex_compiled", "fa4", "sdpa_cudnn")
IN_TRITON = ("flash_triton", "plain_triton")  # whose launches are remembered
CACHES = {  # variable → folder of what a compiler keeps
    "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "cuda",
}  # fmt: skip
OTHER_LENGTHS = (64, 200, 256, 777, 1024, 4096, 5000)  # of sequences, in calls after the first two
# tokens and number of the calls that the host is timed for: it waits for none of them
SHORT, CALLS = 256, 200


@dataclasses.dataclass(frozen=True)
class Case:
    """Both passes of `impl` (`attention_peers.MAKERS`) on `heads` × (seq_len, head_dim), batch 1. `repeat` 1 is another
    process."""

    impl: str
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    dtype: str
    repeat: int = 0


def grid(preset: str) -> list[Case]:
    """The leaderboard's work, or a small one for a CPU."""
    if preset == "smoke":
        return peers.with_pair(Case, ("flash_torch",), 2, 256, 64, True, "bf16", again="flash_torch")
    return peers.with_pair(Case, IMPLS, *WORK, True, "bf16")


def run_group(cases: list[Case]) -> list[dict[str, Any]]:
    """Measures each case in a process of its own."""
    return [_in_a_process(case) for case in cases]


def _in_a_process(case: Case) -> dict[str, Any]:
    """A case in a process whose compilers find nothing that others have compiled, and in one that comes after it."""
    metrics: dict[str, Any] = {}
    with failure_is_a_row(metrics), tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        caches = {variable: f"{folder}/{name}" for variable, name in CACHES.items()}
        in_a_process = partial(
            process.call, f"{__name__}:first_call", {"case": dataclasses.asdict(case)}, timeout_s=300,
            environment=caches,
        )  # fmt: skip
        metrics |= in_a_process()
        if "status" not in metrics:
            metrics["next_process_s"] = in_a_process()["first_call_s"]
    return metrics


def first_call(case: dict[str, Any]) -> dict[str, Any]:
    """Both passes for the first time in this process, and again: seconds, milliseconds, and how many kernels Triton has
    compiled for the first call (`compiled`), and in calls with OTHER_LENGTHS (`compiled_later`, ours only). Of calls of
    forward alone with SHORT tokens the host's microseconds (`host_us`), and of ours in Triton those where launches are
    forgotten before each (`forgetful_us`).

    For a fresh process with empty caches, where `TRITON_CACHE_DIR` says.
    """
    import torch

    metrics: dict[str, Any] = {}
    with failure_is_a_row(metrics):
        which = Case(**case)
        device = default_device()
        impl = peers.build(which.impl, which.is_causal, device, which.seq_len)
        x = torch.ones(64, 64, device=device)
        (x @ x).sum().item()  # the context and cuBLAS are not the implementation's to start

        def drawn(n: int) -> list[torch.Tensor]:
            shape = (
                (n, which.heads, which.head_dim) if impl.tokens_first else (which.heads, n, which.head_dim)
            )
            return [torch.randn(shape, device=device, dtype=torch_dtype(which.dtype)) for _ in range(4)]

        def both(n: int) -> None:
            *inputs, grad_o = drawn(n)
            leaves = [x.requires_grad_() for x in inputs]
            torch.autograd.grad(impl.apply(*leaves), leaves, grad_o)

        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            both(which.seq_len)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        metrics |= {"first_call_s": seconds[0], "second_call_ms": 1e3 * seconds[1], "backend": impl.backend}
        if device == "cuda" and which.impl in (*OURS, "flex_compiled"):
            metrics["compiled"] = _compiled_kernels()
        if device == "cuda" and which.impl in OURS:
            for n in OTHER_LENGTHS:
                both(n)
            metrics["compiled_later"] = _compiled_kernels() - metrics["compiled"]
            metrics["kernels"] = " ".join(peers.own_kernels(lambda: both(which.seq_len)))
        if device == "cuda":
            q, k, v, _ = drawn(SHORT)
            # A mask that FlexAttention makes beforehand is of one length.
            impl = peers.build(which.impl, which.is_causal, device, SHORT)
            metrics["host_us"] = _host_us(lambda: impl.apply(q, k, v))
            if which.impl in IN_TRITON:
                from cs336_systems.attention.triton import again

                metrics["forgetful_us"] = _host_us(lambda: impl.apply(q, k, v), again.forget)
    return metrics


def _host_us(call: Callable[[], Any], before: Callable[[], None] = lambda: None) -> float:
    """The median of what CALLS calls take the host, each when the GPU is idle, after the first ones."""
    import torch

    found = []
    for _ in range(CALLS):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found[CALLS // 4 :])


def _compiled_kernels() -> int:
    """How many binaries of kernels there are in Triton's cache."""
    return len({path.parent.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")})


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
