"""What one attention holds and moves: closed forms against what PyTorch saves, keeps alive and computes."""

from __future__ import annotations

import pytest

from cs336_systems import accounting

torch = pytest.importorskip("torch")
from alive_bytes import AliveBytes, saved_storages  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from cs336_systems.attention import attention, availability  # noqa: E402

# batch, queries, keys, d: square, both kinds of rectangles, and a head that is longer than the sequence
SHAPES = [(3, 64, 64, 16), (3, 48, 96, 32), (2, 96, 32, 16), (2, 16, 16, 64)]
DTYPES = [torch.float32, torch.float16]  # two bytes as bf16, whose products triton's interpreter gets wrong
IMPLS = {"reference": "reference", "flash": "flash_triton"}


def tensors(shape, dtype):
    """Q, K, V that want gradients, and dO."""
    batch, n, m, d = shape
    q, k, v, grad_o = (torch.randn(batch, length, d, dtype=dtype) for length in (n, m, m, n))
    return [x.requires_grad_() for x in (q, k, v)], grad_o


def sizes(shape, dtype):
    return (*shape, dtype.itemsize)


def skip_without(impl):
    if impl == "flash" and torch.cuda.is_available():
        pytest.skip("in triton's interpreter only")
    if impl == "flash" and availability()["flash_triton"]:
        pytest.skip("needs triton")


# ------------------------------------------------------------------------------------------------- saved
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_saved_is_what_the_graph_saves(shape, dtype, impl):
    skip_without(impl)
    inputs, _ = tensors(shape, dtype)
    noting, found = saved_storages()
    with noting:
        attention(*inputs, impl=IMPLS[impl])
    between = accounting.attention_moments(*sizes(shape, dtype), impl)[accounting.BEFORE_BACKWARD]
    others = {"dO"} if "L" in between else {"dO", "O"}
    saved = sorted(size for name, size in between.items() if name not in others)
    assert sorted(storage.nbytes() for storage in found.values()) == saved


# ------------------------------------------------------------------------------------------------- alive
def alive(shape, dtype, impl):
    """(bytes alive after each operation of the forward pass, between the passes, after each of the backward pass)."""
    with AliveBytes() as mode:
        inputs, grad_o = tensors(shape, dtype)
        mode.after.clear()
        o = attention(*inputs, impl=impl)
        forward, between = [*mode.after], mode.now
        mode.after.clear()
        o.backward(grad_o)
    return forward, between, mode.after


def heaviest(after, operators):
    """Bytes alive after each of the operations of these names."""
    return [number for op, number in after if op.overloadpacket.__name__.split(".")[-1] in operators]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_moment_of_plain_attention_is_that_of_the_tensors_alive(shape, dtype):
    moments = accounting.attention_moments(*sizes(shape, dtype), "reference", "cpu")
    expected = {name: sum(found.values()) for name, found in moments.items()}
    forward, between, backward = alive(shape, dtype, "reference")
    kernels = ("bmm", "div", "_softmax", "_softmax_backward_data", "copy_")
    steps = list(expected.values())
    split = list(expected).index(accounting.BEFORE_BACKWARD)
    assert heaviest(forward, kernels) == steps[:split]
    assert between == steps[split]
    # dV is made before dP and dQ before dK (or the other way round): the moments name both together
    found = heaviest(backward, kernels)
    first, last = found[:2], found[-3:]
    assert max(first) == expected["dP = dO Vᵀ"]
    assert found[2:-3] == [expected["dS from P, dP"], expected["dA = dS/√d"]]
    assert max(last[:2]) == expected["dQ = dA K, dK = dAᵀ Q"]
    assert last[2] == expected["dK in K's layout"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_peak_is_that_of_the_tensors_alive(shape, dtype, impl):
    skip_without(impl)
    moments = accounting.attention_moments(*sizes(shape, dtype), impl)
    forward, between, backward = alive(shape, dtype, IMPLS[impl])
    peak = max(number for _, number in forward + backward)
    if impl == "flash":  # D is made and freed within one operator, which this mode sees from outside
        peak += moments["backward"]["D"]
    assert accounting.attention_peak_bytes(*sizes(shape, dtype), impl, "cpu") == peak
    assert sum(moments[accounting.BEFORE_BACKWARD].values()) == between


def test_the_gpu_multiplies_once_more():
    """torch's CUDA kernel for softmax's gradient takes P∘dP as an input, which is made beforehand."""
    shape = (8, 4096, 4096, 64, 4)
    matrix = 8 * 4096 * 4096 * 4
    gpu, cpu = (accounting.attention_peak_bytes(*shape, "reference", device) for device in ("cuda", "cpu"))
    assert gpu - cpu == matrix
    small = 6 * 8 * 4096 * 64 * 4  # Q, K, V, dO, O, dV
    assert gpu == 4 * matrix + small
    assert accounting.attention_peak_bytes(*shape, "compiled") == 2 * matrix + small


def test_hopper_adds_up_dq_in_fp32():
    for head_dim, padded in ((40, 64), (64, 64), (80, 128), (136, 256), (192, 256)):
        for queries in (4096, 4033):  # in tiles of 64
            shape = (8, queries, 1024, head_dim, 2)
            hopper, flash = (
                sum(accounting.attention_moments(*shape, impl)["backward"].values())
                for impl in ("flash_hopper", "flash")
            )
            assert hopper - flash == 8 * (4096 * (4 * padded + 2 * 4) - queries * 4)
            before, main, after = accounting.attention_kernels(*shape, "flash_hopper", "backward")
            assert [main] == list(accounting.attention_kernels(*shape, "flash", "backward"))
            assert after.num_bytes == 8 * (4096 * 4 * padded + queries * 2 * head_dim)
            assert before.num_bytes == 8 * (queries * (2 * 2 * head_dim + 4) + 4096 * (2 * 4 + 4 * padded))


def test_pieces_are_three_of_two_bytes():
    for head_dim, padded in ((16, 16), (40, 64), (128, 128)):
        shape = (8, 4096, 1000, head_dim, 4)
        split, flash = (accounting.attention_moments(*shape, impl) for impl in ("flash_split", "flash"))
        forward, backward = (sum(split[m].values()) - sum(flash[m].values()) for m in ("forward", "backward"))
        assert forward == 8 * padded * 6 * (4096 + 2 * 1024)
        assert backward == 8 * padded * 6 * (2 * 4096 + 2 * 1024)
        assert split[accounting.BEFORE_BACKWARD] == flash[accounting.BEFORE_BACKWARD]
        (of_flash,) = accounting.attention_kernels(*shape, "flash", "forward")
        before, main = accounting.attention_kernels(*shape, "flash_split", "forward")
        assert main.flops == of_flash.flops and not before.flops
        pieces = 6 * padded * (4096 + 2 * 1024)
        assert before.num_bytes == 8 * (4 * head_dim * (4096 + 2 * 1000) + pieces)
        assert main.num_bytes == 8 * (pieces + 4 * head_dim * 4096 + 4 * 4096)
        before, main = accounting.attention_kernels(*shape, "flash_split", "backward")
        pieces = 6 * padded * (2 * 4096 + 2 * 1024)
        assert before.num_bytes == 8 * (4 * head_dim * (3 * 4096 + 2 * 1000) + pieces + 4 * 4096)
        assert main.num_bytes == 8 * (pieces + 4 * head_dim * (4096 + 2 * 1000) + 2 * 4 * 4096)


# ------------------------------------------------------------------------------------------------- traffic
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_that_torch_counts(shape):
    inputs, grad_o = tensors(shape, torch.float32)
    for part in ("forward", "backward"):
        with FlopCounterMode(display=False) as counter:
            if part == "forward":
                o = attention(*inputs, impl="reference")
            else:
                o.backward(grad_o)
        kernels = accounting.attention_kernels(*sizes(shape, torch.float32), "reference", part)
        assert sum(kernel.flops for kernel in kernels) == counter.get_total_flops()


def test_matrices_moved():
    """n much larger than d: all that counts is how often a matrix of scores is read or written."""
    shape = (1, 2**16, 2**16, 1, 1)
    expected = {
        ("reference", "forward", "cuda"): 6,  # written three times, read three times
        ("reference", "backward", "cuda"): 12,
        ("reference", "backward", "cpu"): 9,
        ("compiled", "forward", "cuda"): 4,
        ("compiled", "backward", "cuda"): 7,
        ("flash", "forward", "cuda"): 0,
        ("flash", "backward", "cuda"): 0,
    }
    for (impl, part, device), matrices in expected.items():
        moved = sum(k.num_bytes for k in accounting.attention_kernels(*shape, impl, part, device))
        assert moved / 2**32 == pytest.approx(matrices, abs=1e-3)


def test_time_is_that_of_kernels_one_after_another():
    kernels = [accounting.Kernel("a", 2e12, 10**9), accounting.Kernel("b", 0, 3 * 10**9)]
    # at 1 TFLOP/s and 1 TB/s: 2 s for the product, 3 ms for the copy
    assert accounting.kernels_ms(kernels, 1, 1) == pytest.approx(2003)
    assert accounting.kernels_ms([], 1, 1) == 0
    with pytest.raises(ValueError, match="tb_per_s=0"):
        accounting.kernels_ms(kernels, 1, 0)


def test_unknown_values_are_named():
    shape = (1, 2, 2, 2, 4)
    with pytest.raises(ValueError, match=r"impl 'sdpa'; allowed: reference, compiled, flash"):
        accounting.attention_moments(*shape, "sdpa")
    with pytest.raises(ValueError, match=r"device 'tpu'; allowed: cuda, cpu"):
        accounting.attention_peak_bytes(*shape, "reference", "tpu")
    with pytest.raises(ValueError, match=r"part 'end_to_end'; allowed: forward, backward"):
        accounting.attention_kernels(*shape, "reference", "end_to_end")
    with pytest.raises(ValueError, match="num_keys=0"):
        accounting.attention_moments(1, 2, 0, 2, 4)
