"""Runs each attention kernel once on small shapes with ragged ends, for a tool that watches memory accesses.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/attention_once.py hopper

A second argument says how many of the shapes are run, a third which head dimension alone: compiling takes most of the
time, and processes do it side by side. Without the caching allocator, tensors are allocations of their own, so that a
step past the end of one is seen. `turing` are the CUDA C++ kernels by the path of compute
capability 7.5; all are compiled in this process, where they are not on disk.
"""

from __future__ import annotations

import itertools
import sys

import torch

from cs336_systems.attention.reference import exact_attention

SHAPES = ((1, 2, 300, 130), (1, 1, 70, 70), (1, 1, 33, 1300))  # batch, heads, queries, keys
OF = {  # head dimensions and dtypes
    "portable": ((16, 64, 128), (torch.bfloat16, torch.float32, "tf32")),
    "hopper": ((40, 80, 96, 128, 160, 256), (torch.bfloat16,)),  # which 16 bits they are changes no address
    "split": ((16, 40, 128), (torch.float32,)),
    "cuda": ((20, 64, 128), (torch.bfloat16, torch.float16)),
    "turing": ((20, 64, 128), (torch.float16,)),
}


def main(kernels: str, shapes: int = len(SHAPES), head_dim: int | None = None) -> None:
    configs = lambda d: [()]
    if kernels in ("cuda", "turing"):
        from cs336_systems.attention.cuda import launch as launcher

        if kernels == "turing":
            launcher.generation_of = lambda index: 75
    elif kernels == "hopper":
        from cs336_systems.attention.hopper import configs as rule
        from cs336_systems.attention.hopper import launch as launcher

        launcher.multiprocessors_of = lambda index: 3  # fewer than there are tiles
        # but for one shape programs take many tiles, with a mask in pairs
        launcher.even_pairs = lambda config, batch_heads, queries, *sizes: queries != 70
        rule.CHAINS = ((2**30, 0.01),)  # chains of two tiles, and of one

        def configs(d):  # all that are in use: shapes as small as these get the first only
            columns = launcher.columns_of(d)
            return list(dict.fromkeys((table[columns],) for table in rule.FORWARD_TABLES if columns in table))

    elif kernels == "split":
        from cs336_systems.attention.hopper import split_launch as launcher
    else:
        from cs336_systems.attention.triton import launch as launcher

    dims, dtypes = OF[kernels]
    dims = dims if head_dim is None else (head_dim,)
    for many, d, dtype, shape, is_causal, whole in itertools.product(
        (False, True) if kernels != "hopper" else (False,),
        dims,
        dtypes,
        SHAPES[:shapes],
        (False, True),
        (True, False),
    ):
        in_cuda = kernels in ("cuda", "turing")
        if kernels != "hopper" and not in_cuda:
            # as if these programs were more than the GPU has multiprocessors, and as if they were fewer
            from cs336_systems.attention.triton import again, tiles

            of = tiles if kernels == "portable" else launcher
            of.multiprocessors_of = lambda index, many=many: 1 if many else 10**6
            again.forget()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        dtype = torch.float32 if dtype == "tf32" else dtype
        batch, heads, num_queries, num_keys = shape
        q, k, v, grad_o = (
            torch.randn(batch, heads, n, d, device="cuda", dtype=dtype)
            for n in (num_queries, num_keys, num_keys, num_queries)
        )
        if not whole:  # the gradient of a sum: one number, with strides of zero
            grad_o = grad_o[..., :1, :1].expand(q.shape)
        torch.use_deterministic_algorithms(in_cuda and many)  # dQ summed in order, or as its parts arrive
        if kernels == "hopper":
            launcher.UNZEROED = dict.fromkeys((64, 128), 2**30 if whole else 0)
        forward = [launcher.launch_forward(q, k, v, is_causal, *config) for config in configs(d)]
        found = [o for o, _ in forward], *launcher.launch_backward(q, k, v, *forward[0], grad_o, is_causal)
        torch.use_deterministic_algorithms(False)
        for xs, true in zip(found, exact_attention(q, k, v, grad_o, is_causal), strict=True):
            for x in xs if isinstance(xs, list) else [xs]:
                assert (x.double() - true).norm() < 0.02 * true.norm() + 0.02, (
                    d,
                    dtype,
                    shape,
                    is_causal,
                    whole,
                )
    torch.cuda.synchronize()
    print(f"{kernels}: all as in fp64")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
