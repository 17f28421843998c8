"""What the attention tests share: fresh inputs, the fp64 truth, and the bound that plain PyTorch sets."""

from __future__ import annotations

import functools
import multiprocessing
import os
import types
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.inputs import repeated_heads
from cs336_systems.attention.reference import causal_mask, exact_attention

# What rounding alone may cost, relative to the norm of the whole: one unit in the last place of the result in 16 bits,
# several of fp32 and fp64, whose sums are rounded as well.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def fresh(*shape, dtype=torch.float32, device="cpu", requires_grad=True, scale=1.0):
    """A new random tensor; conftest seeds every test afresh."""
    return (
        (torch.randn(shape, device=device, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_(requires_grad)
    )


def gpu(*shape, **options):
    """A new random tensor on the GPU."""
    return fresh(*shape, **{"device": "cuda"} | options)


def captured(call):
    """A CUDA graph of a call, which runs once before on a stream of its own, and what the call returned in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def triton_launcher(calls, described, launch_pdl, monkeypatch):
    """What triton launches a kernel with, down to the launcher in C, which only lists its calls. described: which of
    the kernel's arguments are descriptors, by their place, and what triton knows of each."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    fill = lambda address, *layout: ("map", address, *map(str, layout))
    utils = types.SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    active = types.SimpleNamespace(utils=utils, get_current_stream=lambda index: 7)
    monkeypatch.setattr(type(nvidia.triton.runtime.driver), "active", active)
    run = object.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl, run.gsan_enabled = 1, False, launch_pdl, False
    for scratch in ("global", "profile"):
        vars(run).update({f"{scratch}_scratch_size": 0, f"{scratch}_scratch_align": 0})
    if hasattr(nvidia, "make_kernel_signature"):  # triton 3.7 and later
        run.arg_annotations, run.kernel_signature = "annotations", b"signature"
    kinds = {i: "tensordesc<bf16[1, 64],layout>" if x else "i32" for i, x in enumerate(described)}
    metas = [x for x in described if x]
    run.launch = nvidia.wrap_handle_tensordesc(lambda *args: calls.append(args), kinds, metas)
    return run


def tensor_meta(block_size):
    """What triton knows of a descriptor."""
    return {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": block_size, "fp4_padded": False}


def flat(call):
    """The arguments of triton's launcher in C, those of the kernel among them, which newer versions pass as one."""
    return [*call[:-1], *call[-1]] if isinstance(call[-1], (list, tuple)) else list(call)


def run(impl, q, k, v, grad_o, is_causal, **seen):
    """[O, dQ, dK, dV] of an implementation, with the gradients' memory poisoned beforehand; of grouped queries where k
    has fewer heads. seen: window and cu_seqlens, where given."""
    if q.is_cuda:
        poison = [torch.full_like(x, float("nan")) for x in (q, k, v, grad_o)]
        del poison  # the allocator hands these blocks out again: what a kernel leaves unwritten is NaN
    o = attention(q, k, v, is_causal, impl, enable_gqa=q.shape[:-2] != k.shape[:-2], **seen)
    return [o, *torch.autograd.grad(o, (q, k, v), grad_o)]


def relative(x, exact, size, least=0.0):
    """‖x − exact‖ / ‖exact‖, or over `least` where that is larger. A gradient that is zero in exact arithmetic (one
    key: P = 1) is held against `size`, the size of what it is the difference of."""
    norm = exact.norm().item()
    return ((x.double() - exact).norm() / max(norm if norm > 1e-3 * size else size, least)).item()


def sizes_of_sums(q, k, v, grad_o, is_causal, **seen):
    """The norms that O, dQ, dK and dV would have if the terms of their sums had random signs. With two or three queries
    or keys they may cancel almost wholly, and what rounding leaves is to be held against what was summed."""
    q, k, v, grad_o = (x.detach().double() for x in (*repeated_heads(q, k, v, q.ndim == 4), grad_o))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-2, -1) * scale
    if is_causal:
        scores = scores.masked_fill(~causal_mask(*scores.shape[-2:], q.device, **seen), float("-inf"))
    p = torch.softmax(scores, -1)
    dp = grad_o @ v.transpose(-2, -1)
    ds2 = (scale * p) ** 2 * (dp**2 + (p * dp).sum(-1, keepdim=True) ** 2)
    squares = p**2 @ v**2, ds2 @ k**2, ds2.transpose(-2, -1) @ q**2, (p**2).transpose(-2, -1) @ grad_o**2
    return [x.sum().sqrt().item() for x in squares]


def check(
    impl, q, k, v, is_causal, grad_o=None, largest_score=0.0, factor=2.0, floor=None, least=(0.0,) * 4, **seen
):
    """O and the gradients are as close to fp64 as plain PyTorch in the same dtype, up to a factor and a rounding
    (`floor`; FLOOR has what it is otherwise). `least`, for each of the four: see `relative`. seen: as for `run`.

    Scores of thousands add to that: P is recomputed as exp(S − L), and the fp32 rounding of L (2^−24 of it, a few
    times over) becomes the relative error of P. A softmax, which subtracts the same rounded maximum, is spared it.
    """
    grad_o = (
        fresh(*q.shape, dtype=q.dtype, device=q.device, requires_grad=False) if grad_o is None else grad_o
    )
    exact = exact_attention(q, k, v, grad_o, is_causal, **seen)
    plain = run("reference", q, k, v, grad_o, is_causal, **seen)
    ours = run(impl, q, k, v, grad_o, is_causal, **seen)
    size = max(x.norm().item() for x in exact)
    for name, x, y, z, like, held in zip(
        ("O", "dQ", "dK", "dV"), ours, plain, exact, (q, q, k, v), least, strict=True
    ):
        assert x.shape == like.shape and x.dtype == like.dtype and x.device == like.device, name
        assert torch.isfinite(x).all(), f"{name} has values that are not finite"
        error, allowed = relative(x, z, size, held), relative(y, z, size, held)
        bound = factor * allowed + (floor or FLOOR[q.dtype]) + 16 * 2**-24 * largest_score
        assert error <= bound, (
            f"{name}: error {error:.2e}, plain PyTorch's {allowed:.2e}, allowed {bound:.2e}"
        )
    return ours


def check_batched_gradients(impl, q, k, v, is_causal, grads, **near):
    """Gradients of many dO (first axis of `grads`) in one backward pass, by torch's two kinds of vmap, are those of
    one pass each; so is the Jacobian of a few results."""
    o = attention(q, k, v, is_causal, impl)
    each = [torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True) for grad_o in grads]
    expected = [torch.stack(of_one) for of_one in zip(*each, strict=True)]
    again = lambda grad_o, **options: torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True, **options)
    for found in (again(grads, is_grads_batched=True), torch.func.vmap(again)(grads)):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, **near)
    few = lambda *x: attention(*x, is_causal, impl)[..., -1, :2].flatten()[:2]
    loop, batched = (
        torch.autograd.functional.jacobian(few, (q, k, v), vectorize=at_once) for at_once in (False, True)
    )
    for x, y in zip(batched, loop, strict=True):
        torch.testing.assert_close(x, y, **near)


@functools.cache
def compiler():
    """One process in which triton compiles instead of interpreting, which is settled when it is imported."""
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # starts it
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret
    return pool


def more_spills():
    """Bytes that a kernel for Hopper may spill besides: the ptxas of triton 3.9 keeps on the stack some of what the
    steps of the backward kernels read, above all masked ones, and what persistent forward programs need once a tile."""
    import triton

    return 448 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 0
