"""The CUDA C++ kernels on a GPU, by its own path and by Turing's: shapes, layouts, sizes past 2^31, torch.compile,
determinism. Random cases are in test_unit_attention_fuzz.py.

pytest -m gpu tests/test_unit_cuda_gpu.py --record-gpu-tests
"""

import pytest
import torch
from attention_checks import check, fresh, relative, run

from cs336_systems.attention import attention, availability
from cs336_systems.attention.cuda import launch
from cs336_systems.attention.reference import exact_attention

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16]
LENGTHS = [(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (200, 1000), (1000, 200), (1024, 1024)]


def name(value):
    return str(value).removeprefix("torch.").replace(", ", "x")


def gpu(*shape, dtype, **kwargs):
    return fresh(*shape, dtype=dtype, device="cuda", **kwargs)


@pytest.fixture(autouse=True)
def there():
    if reason := availability()["flash_cuda"]:
        pytest.skip(reason)


@pytest.fixture(params=["", "Turing"])
def path(request, monkeypatch):
    """Of the GPU at hand, and that of compute capability 7.5 with its tiles, which any GPU runs."""
    if request.param:
        monkeypatch.setattr(launch, "generation_of", lambda index: 75)
    return request.param


def dtypes(path):
    return DTYPES[:1] if path else DTYPES


@pytest.mark.parametrize("head_dim", [16, 17, 24, 32, 48, 64, 80, 96, 120, 128])
def test_head_dimensions(path, head_dim):
    for dtype in dtypes(path):
        for is_causal in (False, True):
            check("flash_cuda", *(gpu(2, 3, n, head_dim, dtype=dtype) for n in (333, 517, 517)), is_causal)


@pytest.mark.parametrize("lengths", LENGTHS, ids=name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(path, head_dim, lengths):
    num_queries, num_keys = lengths
    for dtype in dtypes(path):
        for is_causal in (False, True):
            inputs = (gpu(4, n, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys))
            check("flash_cuda", *inputs, is_causal)


@pytest.mark.parametrize("generation", [80, 86])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_tiles_of_other_generations(generation, head_dim, monkeypatch):
    monkeypatch.setattr(launch, "generation_of", lambda index: generation)
    for is_causal in (False, True):
        inputs = (gpu(2, n, head_dim, dtype=torch.bfloat16) for n in (333, 517, 517))
        check("flash_cuda", *inputs, is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_many_heads_and_long(dtype):
    check("flash_cuda", *(gpu(2, 5, 4000, 64, dtype=dtype) for _ in range(3)), True)


def test_strided_and_expanded_inputs(path):
    q = gpu(2, 300, 3, 64, dtype=torch.float16).transpose(1, 2)
    k = gpu(2, 1, 300, 128, dtype=torch.float16)[..., ::2].expand(2, 3, 300, 64)
    v = gpu(2, 3, 64, 300, dtype=torch.float16).transpose(2, 3)
    check("flash_cuda", q, k, v, True)


@pytest.mark.parametrize("num_queries", [512, 500], ids=["even", "ragged"])
def test_expanded_gradients(path, num_queries):
    q, k, v = (gpu(2, n, 64, dtype=torch.float16) for n in (num_queries, 512, 512))
    for axes in ((1, 1, 1), (2, 1, 1), (2, num_queries, 1), (2, 1, 64)):
        grad_o = gpu(*axes, dtype=torch.float16, requires_grad=False).expand(q.shape)
        check("flash_cuda", q, k, v, True, grad_o)


def test_nothing_is_copied():
    """Forward needs O and L; backward dQ, dK and dV, dQ's sums in fp32 and two numbers a query: strided inputs and an
    expanded dO add nothing to that."""
    q, k, v = (
        gpu(1, 4096, 8, 64, dtype=torch.bfloat16).transpose(1, 2).detach().requires_grad_() for _ in range(3)
    )
    attention(q, k, v, True, "flash_cuda").sum().backward()  # compiles
    q.grad = k.grad = v.grad = None
    size, rows = q.numel() * 2, 8 * 4096 * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, True, "flash_cuda").sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 6 * size + 3 * rows + 2**12


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_large_scores(dtype):
    q, k, v = (gpu(2, 300, 64, dtype=dtype, scale=scale) for scale in (20, 20, 1))
    largest = (q.detach().double() @ k.detach().double().transpose(-2, -1)).abs().max().item() / 8
    check("flash_cuda", q, k, v, True, largest_score=largest)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_the_same_every_time_under_the_flag(path, head_dim):
    q, k, v, grad_o = (gpu(4, 1000, head_dim, dtype=torch.float16) for _ in range(4))
    free = run("flash_cuda", q, k, v, grad_o, True)
    torch.use_deterministic_algorithms(True)
    try:
        first = run("flash_cuda", q, k, v, grad_o, True)
        for _ in range(3):
            for x, y in zip(run("flash_cuda", q, k, v, grad_o, True), first, strict=True):
                assert torch.equal(x, y)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(free[i], first[i]) for i in (0, 2, 3))
    torch.testing.assert_close(free[1], first[1], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("layout", ["many-heads", "one-huge-row-stride"])
def test_more_than_2_to_the_31_elements(layout):
    if torch.cuda.get_device_properties(0).total_memory < 80 * 2**30:
        pytest.skip("needs 80 GiB of GPU memory")
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
    o = attention(q, k, v, True, "flash_cuda")
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    exact = exact_attention(*(x[look] for x in (q, k, v)), torch.ones_like(o[look]), True)
    for x, y in zip((o, dq, dk, dv), exact, strict=True):
        assert relative(x[look], y, 1) < 1e-2


def test_torch_compile_takes_it_whole():
    torch._dynamo.reset()
    q, k, v = (gpu(2, 3, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    grad_o = torch.randn_like(q)
    compiled = torch.compile(lambda *x: attention(*x, True, "flash_cuda") * 2, fullgraph=True)
    o = compiled(q, k, v)
    expected = run("flash_cuda", q, k, v, 2 * grad_o, True)
    found = (o, *torch.autograd.grad(o, (q, k, v), grad_o))
    for x, y in zip(found, (2 * expected[0], *expected[1:]), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_autocast(dtype):
    q, k, v = (gpu(2, 3, 1100, 64, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cuda", dtype=dtype):
        o = attention(q, k, v, True, "flash_cuda")
        peer = attention(q, k, v, True, "sdpa")
    assert o.dtype == peer.dtype == dtype
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(o, peer, atol=2e-2, rtol=2e-2)


def test_operators_pass_opcheck():
    import cs336_systems.attention.flash_cuda  # noqa: F401

    q, k, v = (gpu(1, 2, n, 64, dtype=torch.bfloat16, requires_grad=False) for n in (133, 70, 70))
    o, logsumexp = torch.ops.cs336.flash_cuda_forward(q, k, v, True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cs336.flash_cuda_forward, (q, k, v, True), test_utils=tests)
    arguments = (q, k, v, o, logsumexp, o, True)
    torch.library.opcheck(torch.ops.cs336.flash_cuda_backward, arguments, test_utils=tests)


def test_what_it_does_not_take(path):
    q = gpu(1, 8, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"flash_cuda got torch\.float32; it takes .*flash_triton.* take"):
        attention(q, q, q, impl="flash_cuda")
    wide = gpu(1, 8, 136, dtype=torch.float16)
    with pytest.raises(ValueError, match="the head dimension is 136; allowed: 16 to 128"):
        attention(wide, wide, wide, impl="flash_cuda")
    if path:
        q = gpu(1, 8, 16, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"got torch\.bfloat16; it takes torch\.float16 on this GPU"):
            attention(q, q, q, impl="flash_cuda")


def test_auto_takes_it_where_triton_is_missing(monkeypatch):
    from cs336_systems.attention import registry

    q = gpu(1, 8, 16, dtype=torch.float16)
    registry.check_machine()
    monkeypatch.setitem(registry._usable, "flash_triton", False)
    assert type(attention(q, q, q).grad_fn).__name__.startswith("FlashAttentionCuda")
    wide = q.float()
    assert "Flash" not in type(attention(wide, wide, wide).grad_fn).__name__


def test_a_row_whose_neighbors_are_not_aligned(path):
    wide = gpu(2, 3, 4, 65, dtype=torch.float16, requires_grad=False)
    q, k, v = (wide[..., :1, :64].detach().requires_grad_() for _ in range(3))
    torch.testing.assert_close(attention(q, k, v, impl="flash_cuda"), v, rtol=1e-3, atol=1e-3)


def test_another_stream_and_a_cuda_graph():
    q, k, v = (gpu(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=False) for _ in range(3))
    expected = attention(q, k, v, True, "flash_cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention(q, k, v, True, "flash_cuda")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, True, "flash_cuda")
    o.zero_()
    graph.replay()
    torch.testing.assert_close(o, expected, rtol=0, atol=0)
