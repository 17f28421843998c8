"""The Triton kernels on random shapes, layouts, dtypes and gradients against fp64: on a GPU those of all sizes, on the
CPU small ones in triton's interpreter. CS336_FUZZ_CASES sets how many a test draws."""

import contextlib
import os
import random

import pytest
import torch
from attention_checks import FLOOR, check, fresh

from cs336_systems.attention import availability

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CASES = int(os.environ.get("CS336_FUZZ_CASES", "10" if ON_GPU else "3"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
HEAD_DIMS = [16, 20, 32, 40, 64, 80, 96, 128, 136, 256] if ON_GPU else [16, 20, 40]
TILE = 64 if ON_GPU else 16


def lengths(draw):
    """One of few tokens, one around a multiple of tiles, or any."""
    return draw.choice(
        [
            lambda: draw.randint(1, TILE // 2),
            lambda: max(1, TILE * draw.randint(1, 12) + draw.choice([-1, 0, 0, 1])),
            lambda: draw.randint(1, 18 * TILE),
        ]
    )()


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
GRADIENTS = LAYOUTS | {
    "one number": lambda new, b, h, n, d: new(1).expand(b, h, n, d),
    "a number for each head": lambda new, b, h, n, d: new(b, h, 1, 1).expand(b, h, n, d),
    "a column": lambda new, b, h, n, d: new(b, h, n, 1).expand(b, h, n, d),
    "a row": lambda new, b, h, n, d: new(b, h, 1, d).expand(b, h, n, d),
}


@contextlib.contextmanager
def fp32_products(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def one_case(draw):
    dtype, precision = draw.choice(DTYPES), draw.choice(["highest", "high"] if ON_GPU else ["highest"])
    batch, heads, d = draw.randint(1, 3), draw.randint(1, 5), draw.choice(HEAD_DIMS)
    num_queries, num_keys, is_causal = lengths(draw), lengths(draw), draw.random() < 0.6
    of = [draw.choice(list(LAYOUTS)) for _ in range(3)] + [draw.choice(list(GRADIENTS))]
    scale = draw.choice([0.1, 1.0])
    case = f"{batch}x{heads}x{num_queries}x{num_keys}x{d} {dtype} {precision} causal={is_causal} {of} scale={scale}"

    def new(*shape):
        return fresh(*shape, dtype=dtype, device=DEVICE, requires_grad=False, scale=scale)

    q, k, v = (
        LAYOUTS[name](new, batch, heads, n, d).requires_grad_()
        for name, n in zip(of, (num_queries, num_keys, num_keys), strict=False)
    )
    grad_o = GRADIENTS[of[3]](new, batch, heads, num_queries, d)
    tf32 = dtype == torch.float32 and precision == "high"
    try:
        with fp32_products(precision):
            # twice what single shapes are held to: among many, some are unlucky; a wrong mask or stride is far from it
            check(
                "flash_triton",
                q,
                k,
                v,
                is_causal,
                grad_o,
                factor=4,
                floor=2**-8 if tf32 else 2 * FLOOR[dtype],
            )
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("turn", [pytest.param(i, marks=pytest.mark.gpu if i else ()) for i in range(40)])
def test_random_cases(turn):
    if not ON_GPU and (reason := availability()["flash_triton"]):
        pytest.skip(reason)
    draw = random.Random(torch.initial_seed())
    for _ in range(CASES):
        one_case(draw)
