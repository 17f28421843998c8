"""Finds the row of `tiles.TABLE` for a GPU: compiles the candidates, drops what spills, times the rest on this machine.

    cs336 bench flash --tune --head-dim 64 --dtype bf16

This is the only place where configurations are searched for; nothing is tuned when attention is called. The kernels for
Hopper have no part in it: on such a GPU the table serves what they leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from triton.testing import do_bench

from cs336_systems.attention.checks import aot
from cs336_systems.attention.triton.launch import First, launch, launch_forward
from cs336_systems.attention.triton.tiles import KERNELS, SHARED_MEMORY_KIB, Tiles, generation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


def candidates(dtype: str) -> list[Tiles]:
    """The configurations worth compiling for a dtype."""
    if dtype in ("bf16", "fp16"):
        shapes = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    else:
        shapes = itertools.product((16, 32, 64, 128), (16, 32, 64), (4, 8), (1, 2))
    return [Tiles(*shape) for shape in shapes]


def fits(kernel: str, capability: int, head_dim: int, dtype: str, tiles: Tiles) -> str | None:
    """None where the configuration compiles for the target without spilling; else why not."""
    try:
        compiled = aot.compile_kernel(kernel, capability, head_dim, dtype, tiles)
    except Exception as error:  # the compiler has many ways to refuse a shape; each is a reason, and is shown
        return f"{type(error).__name__}: {str(error)[:80]}"
    if compiled.faults:
        return f"the assembler got it wrong: {compiled.faults[0]}"
    if compiled.spill_bytes:
        return f"spills {compiled.spill_bytes} bytes"
    if compiled.shared_bytes > SHARED_MEMORY_KIB[generation(capability)] * 1024:
        return f"needs {compiled.shared_bytes} bytes of shared memory"
    return None


def _fits(job: tuple[str, int, int, str, Tiles]) -> str | None:
    return fits(*job)


def _call(kernel: str, tensors: list[torch.Tensor], tiles: Tiles) -> Callable[[], object]:
    q, k, v, do = tensors
    o, logsumexp = launch_forward(q, k, v, True)
    scratch = {"delta": (tuple(logsumexp.shape), torch.float32)}
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    first = First(q, k, v, o, logsumexp, True, scratch=scratch, do=do, dq=dq, dk=dk, dv=dv)
    return lambda: launch(first, kernel, tiles)


def tune(
    head_dim: int, dtype: str, seq_len: int = 8192, heads: int = 16, log: Callable[[str], None] = print,
    each: Callable[..., Iterable[str | None]] = map,
) -> str:  # fmt: skip
    """Times each kernel's candidates at one causal shape and returns the lines to put into `tiles.TABLE`.

    each: compiles the candidates; a pool's `map` does so in processes.

    Errors: ValueError for an unknown dtype, RuntimeError without a CUDA device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs a CUDA device: it times the candidates")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, heads, seq_len, head_dim)
    tensors = [torch.randn(shape, generator=generator, device="cuda", dtype=DTYPES[dtype]) for _ in range(4)]
    lines = [
        f"# compute capability {major}.{minor}, head dimension {head_dim}, {dtype}, {heads} heads of {seq_len}"
    ]
    for kernel in KERNELS:
        jobs = [(kernel, capability, head_dim, dtype, tiles) for tiles in candidates(dtype)]
        good = [job[-1] for job, reason in zip(jobs, each(_fits, jobs), strict=True) if reason is None]
        timed = []
        for tiles in good:
            ms = do_bench(_call(kernel, tensors, tiles), warmup=10, rep=40, return_mode="median")
            timed.append((ms, tiles))
        timed.sort(key=lambda pair: pair[0])
        for ms, tiles in timed[:6]:
            log(f"{kernel:17s} {tiles} {ms:.3f} ms")
        ms, best = timed[0]
        lines.append(
            f"{kernel}: _T({best.block_m}, {best.block_n}, {best.num_warps}, {best.num_stages})"
            f"  # {ms:.3f} ms, the best of {len(timed)}; {len(jobs) - len(good)} did not fit"
        )
    return "\n".join(lines)
