"""The Triton kernels on a GPU: wide shapes, all dtypes, layouts, sizes past 2^31, torch.compile, determinism.

pytest -m gpu tests/test_unit_attention_gpu.py --record-gpu-tests
"""

import pytest
import torch
from attention_checks import check, fresh, relative, run

pytest.importorskip("triton")
from cs336_systems.attention import attention
from cs336_systems.attention.available import hopper_reason
from cs336_systems.attention.reference import exact_attention
from cs336_systems.attention.triton import launch, tiles

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = [16, 17, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256]
LENGTHS = [
    (1, 1),
    (1, 300),
    (300, 1),
    (127, 129),
    (128, 128),
    (129, 127),
    (200, 1000),
    (1000, 200),
    (1024, 1024),
]


def name(value):
    return str(value).removeprefix("torch.").replace(", ", "x")


def gpu(*shape, dtype, **kwargs):
    return fresh(*shape, dtype=dtype, device="cuda", **kwargs)


@pytest.fixture(autouse=True)
def fp32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dimensions(head_dim, dtype, is_causal):
    check("flash_triton", *(gpu(2, 3, n, head_dim, dtype=dtype) for n in (333, 517, 517)), is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("lengths", LENGTHS, ids=name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim, lengths, dtype, is_causal):
    num_queries, num_keys = lengths
    check(
        "flash_triton",
        *(gpu(4, n, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys)),
        is_causal,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_many_heads_and_long(dtype):
    check("flash_triton", *(gpu(2, 5, 4000, 64, dtype=dtype) for _ in range(3)), True)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_strided_and_expanded_inputs(dtype):
    q = gpu(2, 300, 3, 64, dtype=dtype).transpose(1, 2)
    k = gpu(2, 1, 300, 128, dtype=dtype)[..., ::2].expand(2, 3, 300, 64)
    v = gpu(2, 3, 64, 300, dtype=dtype).transpose(2, 3)
    check("flash_triton", q, k, v, True)


@pytest.mark.parametrize("num_queries", [512, 500], ids=["even", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_expanded_gradients(dtype, num_queries):
    q, k, v = (gpu(2, n, 64, dtype=dtype) for n in (num_queries, 512, 512))
    for axes in ((1, 1, 1), (2, 1, 1), (2, num_queries, 1), (2, 1, 64)):
        grad_o = gpu(*axes, dtype=dtype, requires_grad=False).expand(q.shape)
        torch.cuda.synchronize()
        check("flash_triton", q, k, v, True, grad_o)


def test_nothing_is_copied():
    """Forward needs O and L, backward dQ, dK, dV and D: strided inputs and an expanded dO add nothing to that.

    The kernels for Hopper need dQ in fp32, two numbers a query, and a tile of dO for each head.
    """
    q, k, v = (
        gpu(1, 4096, 8, 64, dtype=torch.bfloat16).transpose(1, 2).detach().requires_grad_() for _ in range(3)
    )
    attention(q, k, v, True, "flash_triton").sum().backward()  # compiles
    q.grad = k.grad = v.grad = None
    size, rows = q.numel() * 2, 8 * 4096 * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, True, "flash_triton").sum().backward()
    hopper = 2 * size + rows + 8 * 64 * 64 * 2 if hopper_reason() is None else 0
    assert torch.cuda.max_memory_allocated() - before <= 4 * size + 2 * rows + hopper + 2**12


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_large_scores(dtype):
    q, k, v = (gpu(2, 300, 64, dtype=dtype, scale=scale) for scale in (20, 20, 1))
    largest = (q.detach().double() @ k.detach().double().transpose(-2, -1)).abs().max().item() / 8
    check("flash_triton", q, k, v, True, largest_score=largest)


@pytest.mark.parametrize("heads", [2, 64])
def test_tf32_products_follow_the_setting(heads):
    x = [gpu(heads, 1000, 64, dtype=torch.float32) for _ in range(3)]
    grad_o = gpu(heads, 1000, 64, dtype=torch.float32, requires_grad=False)
    exact = exact_attention(*x, grad_o, True)
    accurate = relative(run("flash_triton", *x, grad_o, True)[0], exact[0], 1)
    torch.set_float32_matmul_precision("high")
    rounded = relative(run("flash_triton", *x, grad_o, True)[0], exact[0], 1)
    assert accurate < 2e-6 < 5e-5 < rounded < 2e-3
    # a tensor core drops the bits that TF32 lacks, all in one direction; cuBLAS rounds them to the nearest first
    check("flash_triton", *x, True, grad_o, factor=8)


@pytest.mark.parametrize(
    ("dtype", "precision"), [*((x, "highest") for x in DTYPES), (torch.float32, "high")], ids=name
)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("multiprocessors", [1, 10**6], ids=["many", "few"])
def test_tiles_of_many_and_of_few_programs(multiprocessors, head_dim, dtype, precision, monkeypatch):
    """As if the GPU were so small that these programs are many, and so large that they are few."""
    monkeypatch.setattr(tiles, "multiprocessors_of", lambda index: multiprocessors)
    monkeypatch.setattr(launch, "_remembered", {})
    torch.set_float32_matmul_precision(precision)
    # cuBLAS makes products of narrow heads in fp32 all the same; ours cut what they take to the ten bits of TF32
    floor = 4 * 2**-10 if precision == "high" and dtype == torch.float32 else None
    for num_queries, num_keys in ((200, 130), (77, 411), (250, 250)):
        x = (gpu(2, n, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys))
        check("flash_triton", *x, True, floor=floor)


@pytest.mark.parametrize(
    ("dtype", "precision"), [*((x, "highest") for x in DTYPES), (torch.float32, "high")], ids=name
)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 128, 256])
def test_kernels_that_are_mistrusted_have_others_in_their_place(head_dim, dtype, precision, monkeypatch):
    """As if the assembler had got them all wrong."""
    asked = []

    def without_wgmma(*arguments):
        asked.append(arguments)
        return tiles.tiles_without_wgmma(*arguments)

    monkeypatch.setattr(launch, "_mistrusted", lambda *arguments: True)
    monkeypatch.setattr(launch, "tiles_without_wgmma", without_wgmma)
    monkeypatch.setattr(launch, "_remembered", {})
    torch.set_float32_matmul_precision(precision)
    floor = 4 * 2**-10 if precision == "high" and dtype == torch.float32 else None
    for num_queries, num_keys in ((200, 130), (77, 411)):
        x = (gpu(2, n, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys))
        check("flash_triton", *x, True, floor=floor)
    assert len(asked) == 6  # three kernels for each of the shapes


def test_columns_that_lie_apart_and_odd_strides():
    """Layouts that ptxas 12.8 has made a wrong kernel of (see `machine_code`)."""
    q, v = (gpu(4, n, 2, 20, dtype=torch.bfloat16).permute(2, 0, 1, 3) for n in (13, 9))
    k = gpu(2, 4, 20, 9, dtype=torch.bfloat16).transpose(2, 3)
    check("flash_triton", q, k, v, True)
    q, k = (
        gpu(2, 2, 20, 128, dtype=torch.float16).transpose(2, 3),
        gpu(2, 2, 10, 40, dtype=torch.float16)[..., ::2],
    )
    check("flash_triton", q, k, gpu(2, 10, 2, 20, dtype=torch.float16).transpose(1, 2), False)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_gradients_are_the_same_every_time(dtype):
    q, k, v, grad_o = (gpu(4, 1000, 64, dtype=dtype) for _ in range(4))
    first = run("flash_triton", q, k, v, grad_o, True)
    if hopper_reason() is None and dtype != torch.float32:  # dQ is a sum in the order of arrival
        again = run("flash_triton", q, k, v, grad_o, True)
        assert all(torch.equal(again[i], first[i]) for i in (0, 2, 3))
        torch.testing.assert_close(again[1], first[1], rtol=2e-2, atol=1e-2)
    else:
        for _ in range(3):
            for x, y in zip(run("flash_triton", q, k, v, grad_o, True), first, strict=True):
                assert torch.equal(x, y)
    torch.use_deterministic_algorithms(True)
    try:
        first = run("flash_triton", q, k, v, grad_o, True)
        for x, y in zip(run("flash_triton", q, k, v, grad_o, True), first, strict=True):
            assert torch.equal(x, y)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ["many-heads", "one-huge-row-stride"])
def test_more_than_2_to_the_31_elements(layout):
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(1)
    if layout == "many-heads":  # 2^31 + 2^22 elements in each of q, k, v and o; the last head is looked at
        shape, look = (1, 2**15 + 64, 1024, 64), (slice(None), slice(-1, None))
        inputs = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)
        ]
    else:  # rows 2^22 elements apart: offsets within one head pass 2^31
        rows = torch.randn(1, 1, 600, 192, device="cuda", dtype=torch.bfloat16, generator=generator)
        wide = torch.empty(1, 1, 600, 2**22, device="cuda", dtype=torch.bfloat16)
        wide[..., :192] = rows
        inputs, look = list(wide[..., :192].split(64, -1)), (slice(None), slice(None))
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    o = attention(q, k, v, True, "flash_triton")
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    exact = exact_attention(*(x[look] for x in (q, k, v)), torch.ones_like(o[look]), True)
    for x, y in zip((o, dq, dk, dv), exact, strict=True):
        assert relative(x[look], y, 1) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_torch_compile_takes_it_whole(dtype):
    torch._dynamo.reset()
    q, k, v = (gpu(2, 3, 300, 64, dtype=dtype) for _ in range(3))
    grad_o = torch.randn_like(q)
    compiled = torch.compile(lambda *x: attention(*x, True, "flash_triton") * 2, fullgraph=True)
    o = compiled(q, k, v)
    expected = run("flash_triton", q, k, v, 2 * grad_o, True)
    for x, y in zip(
        (o, *torch.autograd.grad(o, (q, k, v), grad_o)), (2 * expected[0], *expected[1:]), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_leaderboard_call():
    from cs336_systems.attention.flash_triton import FlashAttentionTriton

    torch._dynamo.reset()
    flash = torch.compile(FlashAttentionTriton.apply)
    q, k, v = (gpu(16, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    flash(q, k, v, True).sum().backward()
    exact = exact_attention(q, k, v, torch.ones_like(q), True)
    for x, y in zip((q.grad, k.grad, v.grad), exact[1:], strict=True):
        assert relative(x, y, 1) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_autocast(dtype):
    q, k, v = (gpu(2, 3, 1100, 64, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cuda", dtype=dtype):
        o = attention(q, k, v, True, "flash_triton")
        peer = attention(q, k, v, True, "sdpa")
    assert o.dtype == peer.dtype == dtype
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(o, peer, atol=2e-2, rtol=2e-2)


def test_operators_pass_opcheck():
    import cs336_systems.attention.flash_triton  # noqa: F401

    q, k, v = (gpu(1, 2, n, 64, dtype=torch.bfloat16, requires_grad=False) for n in (133, 70, 70))
    o, logsumexp = torch.ops.cs336.flash_forward(q, k, v, True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cs336.flash_forward, (q, k, v, True), test_utils=tests)
    torch.library.opcheck(torch.ops.cs336.flash_backward, (q, k, v, o, logsumexp, o, True), test_utils=tests)


def test_devices_must_match():
    q, k = gpu(1, 8, 16, dtype=torch.float32), fresh(1, 8, 16)
    with pytest.raises(ValueError, match="q is on cuda:0, k on cpu"):
        attention(q, k, k, impl="flash_triton")


def test_auto_is_the_triton_kernel():
    q = gpu(1, 8, 16, dtype=torch.float32)
    assert type(attention(q, q, q).grad_fn).__name__.startswith("FlashAttentionTriton")


def test_another_stream_and_a_cuda_graph():
    q, k, v = (gpu(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=False) for _ in range(3))
    expected = attention(q, k, v, True, "flash_triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention(q, k, v, True, "flash_triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, True, "flash_triton")
    o.zero_()
    graph.replay()
    torch.testing.assert_close(o, expected, rtol=0, atol=0)


def test_remembered_launches_are_shown_to_profilers():
    import triton

    q, k, v = (gpu(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=False) for _ in range(3))
    expected = attention(q, k, v, True, "flash_triton")
    seen = []
    hooks = triton.knobs.runtime.launch_enter_hook

    def watch(metadata):
        seen.append(metadata.get()["name"])

    hooks.add(watch)
    try:
        o = attention(q, k, v, True, "flash_triton")
    finally:
        hooks.remove(watch)
    assert seen == ["forward_kernel"]
    attention(q, k, v, True, "flash_triton")
    assert len(seen) == 1
    torch.testing.assert_close(o, expected, rtol=0, atol=0)
