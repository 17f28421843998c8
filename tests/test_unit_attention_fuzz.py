"""The Triton kernels, and on a GPU those in CUDA C++, on random shapes, layouts, dtypes and gradients against fp64: on
a GPU those of all sizes, on the CPU small ones in triton's interpreter. CS336_FUZZ_CASES sets how many a test draws."""

import os
import random

import pytest
import torch
from attention_checks import FLOOR, check, fresh, sizes_of_sums

from cs336_systems.attention import availability

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CASES = int(os.environ.get("CS336_FUZZ_CASES", "10" if ON_GPU else "4"))
MOST = {"batch": 3, "heads": 5, "tiles": 18} if ON_GPU else {"batch": 2, "heads": 2, "tiles": 8}
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
HEAD_DIMS = [16, 20, 32, 40, 64, 80, 96, 128, 136, 256] if ON_GPU else [16, 20, 40]
TILE = 64 if ON_GPU else 16


def lengths(draw):
    """Of queries and of keys: for half of the cases on a GPU so many that the kernels for Hopper serve. Else few, some
    tiles' rows or one more or less, or any."""
    if ON_GPU and draw.random() < 0.5:
        return draw.randint(512, MOST["tiles"] * TILE), draw.randint(512, MOST["tiles"] * TILE)
    some = (
        lambda: draw.randint(1, TILE // 2),
        lambda: max(1, TILE * draw.randint(1, MOST["tiles"] * 2 // 3) + draw.choice([-1, 0, 0, 1])),
        lambda: draw.randint(1, MOST["tiles"] * TILE),
    )
    return draw.choice(some)(), draw.choice(some)()


LAYOUTS = {
    "contiguous": lambda new, b, h, n, d: new(b, h, n, d),
    "heads inside": lambda new, b, h, n, d: new(b, n, h, d).transpose(1, 2),
    "one of three projections": lambda new, b, h, n, d: new(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    "half of the columns": lambda new, b, h, n, d: new(b, h, n, 2 * d)[..., d:],
    "every second column": lambda new, b, h, n, d: new(b, h, n, 2 * d)[..., ::2],
    "columns by rows": lambda new, b, h, n, d: new(b, h, d, n).transpose(2, 3),
    "every second row": lambda new, b, h, n, d: new(b, h, 2 * n, d)[:, :, ::2],
    "one head for all": lambda new, b, h, n, d: new(b, 1, n, d).expand(b, h, n, d),
    "batch inside": lambda new, b, h, n, d: new(h, n, b, d).permute(2, 0, 1, 3),
    "unaligned": lambda new, b, h, n, d: new(b * h * n * d + 1)[1:].view(b, h, n, d),
}
FOR_TMA = ["contiguous", "heads inside", "one of three projections", "half of the columns", "batch inside"]
GRADIENTS = LAYOUTS | {
    "one number": lambda new, b, h, n, d: new(1).expand(b, h, n, d),
    "a number for each head": lambda new, b, h, n, d: new(b, h, 1, 1).expand(b, h, n, d),
    "a column": lambda new, b, h, n, d: new(b, h, n, 1).expand(b, h, n, d),
    "a row": lambda new, b, h, n, d: new(b, h, 1, d).expand(b, h, n, d),
}


def one_case(draw, impl="flash_triton", dtypes=DTYPES):
    only_16 = impl == "flash_cuda"
    dtype, precision = draw.choice(dtypes), draw.choice(["highest", "high"] if ON_GPU else ["highest"])
    batch, heads, d = draw.randint(1, MOST["batch"]), draw.randint(1, MOST["heads"]), draw.choice(HEAD_DIMS)
    d = min(d, 128) if only_16 else d
    group = 1 if only_16 else draw.choice([1, 1, 2, 3, 4])  # heads of queries for one of keys
    (num_queries, num_keys), is_causal = lengths(draw), draw.random() < 0.6
    seen = {}
    if is_causal and not only_16 and draw.random() < 0.5:
        if draw.random() < 0.5:  # of packed documents, some of them empty
            batch, num_keys = 1, num_queries
            ends = sorted(draw.randint(0, num_keys) for _ in range(draw.randint(0, 5)))
            seen["cu_seqlens"] = torch.tensor([0, *ends, num_keys], dtype=torch.int32, device=DEVICE)
        if not seen or draw.random() < 0.5:
            seen["window"] = max(0, num_queries - num_keys) + draw.choice(
                [1, 2, TILE, draw.randint(1, num_keys)]
            )
    of = [draw.choice(list(LAYOUTS)) for _ in range(3)] + [draw.choice(list(GRADIENTS))]
    if min(num_queries, num_keys) >= 512 and dtype != torch.float32 and not only_16:
        # those for Hopper are choosy
        d, of[:3] = draw.choice([40, 64, 80, 96, 128]), [draw.choice(FOR_TMA) for _ in range(3)]
    scale = draw.choice([0.1, 1.0])
    case = f"{batch}x{group}·{heads}x{num_queries}x{num_keys}x{d} {dtype} {precision} {is_causal} {of} {scale} {seen}"

    def new(*shape):
        return fresh(*shape, dtype=dtype, device=DEVICE, requires_grad=False, scale=scale)

    q, k, v = (
        LAYOUTS[name](new, batch, h, n, d).requires_grad_()
        for name, h, n in zip(
            of, (group * heads, heads, heads), (num_queries, num_keys, num_keys), strict=False
        )
    )
    grad_o = GRADIENTS[of[3]](new, batch, group * heads, num_queries, d)
    # twice what single shapes are held to: among many some are unlucky, and a wrong mask or stride is far from it
    floor = 2**-8 if dtype == torch.float32 and precision == "high" else 2 * FLOOR[dtype]
    least = sizes_of_sums(q, k, v, grad_o, is_causal, **seen)
    try:
        torch.set_float32_matmul_precision(precision)  # conftest restores it
        check(impl, q, k, v, is_causal, grad_o, factor=4, floor=floor, least=least, **seen)
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("turn", [pytest.param(i, marks=pytest.mark.gpu if i else ()) for i in range(40)])
def test_random_cases(turn):
    if not ON_GPU and (reason := availability()["flash_triton"]):
        pytest.skip(reason)
    draw = random.Random(torch.initial_seed() + turn)  # other cases in each turn, though one seed is given
    for _ in range(CASES):
        one_case(draw)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["", "Turing"])
@pytest.mark.parametrize("turn", range(10))
def test_random_cases_in_cuda(turn, path, monkeypatch):
    if reason := availability()["flash_cuda"]:
        pytest.skip(reason)
    from cs336_systems.attention.cuda import launch

    if path:
        monkeypatch.setattr(launch, "generation_of", lambda index: 75)
    draw = random.Random(torch.initial_seed() + turn)
    for _ in range(CASES):
        one_case(draw, "flash_cuda", [torch.float16] if path else [torch.float16, torch.bfloat16])
