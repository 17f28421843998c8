"""Attention on tensors whose rows or columns lie so far apart that offsets within one tile pass 2^31 elements."""

import importlib

import pytest
import torch
from attention_checks import relative, sizes_of_sums

pytest.importorskip("triton")

from cs336_systems.attention import attention, availability
from cs336_systems.attention.available import hopper_reason
from cs336_systems.attention.hopper import split_launch
from cs336_systems.attention.reference import exact_attention
from cs336_systems.attention.triton import launch as portable

SIXTEEN = torch.float16, torch.bfloat16
BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# rows, and the elements from one to the next: at 2^31 within a tile of 3, 32 or 128 rows; short of it, and past it
ROWS = [(3, 2**30 - 8), (3, 2**30 + 8), (40, 2**26), (130, 2**24 - 8), (130, 2**24 + 2**18)]


def far(count, n, d, row, column, dtype, device):
    """`count` tensors (1, 1, n, d) of NaN in one buffer, with these strides; the last begins furthest in."""
    last, apart = (n - 1) * row + (d - 1) * column, d if column == 1 else 8 * n
    try:
        buffer = torch.empty(last + count * apart, dtype=dtype, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        pytest.skip(f"there is no such memory: {error}")
    found = [buffer.as_strided((1, 1, n, d), (n * row, row, row, column), i * apart) for i in range(count)]
    return [x.fill_(float("nan")) for x in found]


def held_to_fp64(found, inputs, bound):
    exact, sizes = exact_attention(*inputs), sizes_of_sums(*inputs)
    for name, x, y, least in zip(("O", "dQ", "dK", "dV"), found, exact, sizes, strict=True):
        assert relative(x, y, 1, least) < bound, name


def launched(launcher, dtype, n, d, row, column, is_causal, expanded, device, bound=None):
    """Both passes of a launcher's kernels, inputs and outputs far apart, against fp64."""
    q, k, v, do, o, dq, dk, dv = far(8, n, d, row, column, dtype, device)
    for x in (q, k, v, do):
        x.copy_(torch.randn(n, d))
    if expanded:
        do = do[..., :1].expand(do.shape)
    logsumexp = torch.full((1, 1, n), float("nan"), device=device)
    launcher.first_forward(q, k, v, o, logsumexp, is_causal)
    launcher.first_backward(q, k, v, o, logsumexp, do, dq, dk, dv, is_causal)
    held_to_fp64((o, dq, dk, dv), (q, k, v, do, is_causal), bound or BOUNDS[dtype])


# ------------------------------------------------------------------------------------------------ in the interpreter
@pytest.mark.skipif(not portable.INTERPRETED, reason="needs triton's interpreter")
@pytest.mark.parametrize("expanded", [False, True], ids=["", "expanded"])
@pytest.mark.parametrize(
    ("n", "row", "column"), [(3, 2**30 + 8, 1), (3, 1, 2**27 + 8)], ids=["rows", "columns"]
)
@pytest.mark.parametrize(
    ("launcher", "dtype"),
    [(portable, torch.float16), (split_launch, torch.float32)],
    ids=["portable", "split"],
)
def test_far_apart_in_the_interpreter(launcher, dtype, n, row, column, expanded):
    launched(launcher, dtype, n, 17, row, column, True, expanded, "cpu")


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("expanded", [False, True], ids=["", "expanded"])
@pytest.mark.parametrize(("n", "row"), ROWS)
@pytest.mark.parametrize("d", [16, 32, 64, 96, 256])
@pytest.mark.parametrize("kernels", ["portable-fp16", "portable-fp32", "portable-tf32", "split", "hopper"])
def test_far_rows(kernels, d, n, row, expanded):
    name, dtype = (
        kernels.split("-")[0],
        torch.float16 if kernels in ("portable-fp16", "hopper") else torch.float32,
    )
    if name != "portable" and (reason := hopper_reason()):
        pytest.skip(reason)
    if (d > 128 and name != "portable") or (d < 33 and name == "hopper"):
        pytest.skip(f"head dimension {d} is not theirs")
    module = {"portable": "triton.launch", "split": "hopper.split_launch", "hopper": "hopper.launch"}[name]
    launcher = importlib.import_module(f"cs336_systems.attention.{module}")
    torch.set_float32_matmul_precision("high" if kernels == "portable-tf32" else "highest")
    bound = 3e-2 if kernels == "portable-tf32" else None
    launched(launcher, dtype, n, d, row, 1, n != 40, expanded, "cuda", bound)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "row", "column"), [*((n, row, 1) for n, row in ROWS), (40, 1, 2**26), (40, 1, 2**27 + 8)]
)
@pytest.mark.parametrize("impl", ["flash_triton", "flash_cuda", "Turing"])
def test_far_inputs(impl, n, row, column, dtype, monkeypatch):
    """What autograd sees: any kernels, outputs in layouts of their own."""
    if dtype not in {"flash_triton": BOUNDS, "flash_cuda": SIXTEEN, "Turing": SIXTEEN[:1]}[impl]:
        pytest.skip(f"{impl} does not take {dtype}")
    if impl == "Turing":
        from cs336_systems.attention.cuda import launch

        monkeypatch.setattr(launch, "generation_of", lambda index: 75)
        impl = "flash_cuda"
    if reason := availability()[impl]:
        pytest.skip(reason)
    torch.set_float32_matmul_precision("highest")
    q, k, v, do = (x.copy_(torch.randn(n, 32)) for x in far(4, n, 32, row, column, dtype, "cuda"))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, True, impl)
    held_to_fp64([o, *torch.autograd.grad(o, (q, k, v), do)], (q, k, v, do, True), BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("d", [32, 64, 256])
def test_far_outputs(d, dtype):
    """Sequence first, many heads: outputs have the layout of the inputs, with rows past 2^24 elements apart."""
    n, heads = 130, (2**24 + 2**18) // d
    needed = n * heads * d * (8 * dtype.itemsize + 8)  # inputs, outputs, gradients; a workspace
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    torch.set_float32_matmul_precision("highest")
    q, k, v, do = (
        torch.randn(n, 1, heads, d, dtype=dtype, device="cuda").permute(1, 2, 0, 3) for _ in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, True, "flash_triton")
    assert o.stride(2) == heads * d
    found = [o, *torch.autograd.grad(o, (q, k, v), do)]
    for heads in (slice(1), slice(-1, None)):
        held_to_fp64(
            [x[:, heads] for x in found], (*(x[:, heads] for x in (q, k, v, do)), True), BOUNDS[dtype]
        )
