"""The attention kernels on a GPU, in Triton and in CUDA C++ (by the GPU's own path and by Turing's): shapes, dtypes,
layouts, sizes past 2^31, torch.compile, determinism. Random cases are in test_unit_attention_fuzz.py.

pytest -m gpu tests/test_unit_attention_gpu.py --record-gpu-tests
"""

import pytest
import torch
from attention_checks import FLOOR, captured, check, check_batched_gradients, fresh, gpu, relative, run

from cs336_systems.attention import attention, availability
from cs336_systems.attention.available import hopper_reason
from cs336_systems.attention.reference import exact_attention

pytestmark = pytest.mark.gpu
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HEAD_DIMS = [16, 17, 24, 32, 48, 64, 80, 96, 120, 128, 160, 192, 256]
LENGTHS = [(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (129, 127), (200, 1000), (1000, 200),
           (1024, 1024)]  # fmt: skip
# Turing: the path of compute capability 7.5 with its tiles, which any GPU runs
TURING = [("Turing", FP16)]
OWN = [*(("flash_triton", dtype) for dtype in (FP32, FP16, BF16)), ("flash_cuda", FP16), ("flash_cuda", BF16)]
ALL = [*OWN, *TURING]


def name(value):
    if isinstance(value, tuple):
        return "-".join(map(name, value))
    return str(value).removeprefix("torch.")


@pytest.fixture(autouse=True)
def fp32_products():
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def impl(request, monkeypatch):
    """An implementation that runs on this GPU."""
    impl = getattr(request, "param", "flash_triton")
    if impl == "Turing":
        from cs336_systems.attention.cuda import launch

        monkeypatch.setattr(launch, "generation_of", lambda index: 75)
        impl = "flash_cuda"
    if reason := availability()[impl]:
        pytest.skip(reason)
    return impl


@pytest.fixture
def portable(monkeypatch):
    """None of the kernels for Hopper, which serve most shapes there."""
    from cs336_systems.attention import flash_triton
    from cs336_systems.attention.triton import again

    monkeypatch.setattr(again, "_passes", {})
    monkeypatch.setattr(flash_triton, "_launchers", lambda device_index: {})


def kernels(cases):
    return pytest.mark.parametrize(("impl", "dtype"), cases, indirect=["impl"], ids=name)


def impls(*names):
    return pytest.mark.parametrize("impl", names, indirect=True)


# --------------------------------------------------------------------------------- all kernels
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("impl", "dtype", "head_dim"),
    [(*case, d) for case in ALL for d in HEAD_DIMS if case[0] == "flash_triton" or d <= 128],
    indirect=["impl"],
    ids=name,
)
def test_head_dimensions(impl, dtype, head_dim, is_causal):
    check(impl, *(gpu(2, 3, n, head_dim, dtype=dtype) for n in (333, 517, 517)), is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=name)
@pytest.mark.parametrize("head_dim", [64, 128])
@kernels(ALL)
def test_lengths(impl, dtype, head_dim, lengths, is_causal):
    num_queries, num_keys = lengths
    check(impl, *(gpu(4, n, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys)), is_causal)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("lengths", [(1, 5000), (16, 8192), (77, 3001), (300, 40000)], ids=name)
@kernels([case for case in OWN if case[0] == "flash_triton"])
def test_few_queries_and_many_keys(impl, dtype, head_dim, lengths):
    """Keys are split among programs, whose results a kernel combines; the second launch is remembered."""
    num_queries, num_keys = lengths
    for _ in range(2):
        q, k, v = (gpu(2, n, 2, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys))
        check(impl, *(x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)), False)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
@pytest.mark.parametrize(("heads", "of_keys"), [(6, 3), (7, 1)], ids=name)
@kernels([case for case in OWN if case[0] == "flash_triton"])
def test_grouped_queries(impl, dtype, heads, of_keys, head_dim, is_causal):
    # dK and dV are sums over a group's queries, and tensor cores cut off the last bits of what they add
    floor = 2 * FLOOR[dtype]
    for n, m in ((333, 517), (1100, 1100), (1, 3000), (600, 40)):
        q, k, v = (
            gpu(2, heads, n, head_dim, dtype=dtype),
            *(gpu(2, of_keys, m, head_dim, dtype=dtype) for _ in "kv"),
        )
        check(impl, q, k, v, is_causal, floor=floor)
    q = gpu(2, 300, heads, head_dim, dtype=dtype).transpose(1, 2)
    k = gpu(1, of_keys, 300, 2 * head_dim, dtype=dtype)[..., ::2].expand(2, of_keys, 300, head_dim)
    check(impl, q, k, gpu(2, of_keys, head_dim, 300, dtype=dtype).transpose(2, 3), is_causal, floor=floor)


@impls("flash_triton")
def test_keys_of_a_group_are_not_copied(impl):
    """Nor are dK and dV, but for Hopper, where each head of queries has its own, which are then added up."""
    q, k, v = (gpu(17, heads, 4096, 64, dtype=BF16) for heads in (8, 1, 1))
    attention(q, k, v, True, impl, enable_gqa=True).sum().backward()  # compiles
    q.grad = k.grad = v.grad = None
    size, rows = q.numel() * 2, 17 * 8 * 4096 * 4

    def allocated(call):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return call(), torch.cuda.max_memory_allocated() - before

    o, forward = allocated(lambda: attention(q, k, v, True, impl, enable_gqa=True))
    _, backward = allocated(o.sum().backward)
    # dQ, dK, dV and a number or two a query; for Hopper dQ in fp32, dK and dV of all heads and a tile of dO for each
    of_hopper = 4 * size + 17 * 8 * 64 * 64 * 2 if hopper_reason() is None else 0
    unused = 2**20  # up to which torch's allocator gives a large block whole
    assert forward <= size + rows + 2 * unused
    assert backward <= size + 2 * 2 * k.numel() + 2 * rows + of_hopper + 4 * unused


@kernels(OWN)
def test_many_heads_and_long(impl, dtype):
    check(impl, *(gpu(2, 5, 4000, 64, dtype=dtype) for _ in range(3)), True)


@kernels(ALL)
def test_strided_and_expanded_inputs(impl, dtype):
    q = gpu(2, 300, 3, 64, dtype=dtype).transpose(1, 2)
    k = gpu(2, 1, 300, 128, dtype=dtype)[..., ::2].expand(2, 3, 300, 64)
    v = gpu(2, 3, 64, 300, dtype=dtype).transpose(2, 3)
    check(impl, q, k, v, True)


@pytest.mark.parametrize("num_queries", [512, 500], ids=["even", "ragged"])
@kernels(ALL)
def test_expanded_gradients(impl, dtype, num_queries):
    q, k, v = (gpu(2, n, 64, dtype=dtype) for n in (num_queries, 512, 512))
    for axes in ((1, 1, 1), (2, 1, 1), (2, num_queries, 1), (2, 1, 64)):
        grad_o = gpu(*axes, dtype=dtype, requires_grad=False).expand(q.shape)
        check(impl, q, k, v, True, grad_o)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
@kernels(ALL)
def test_batched_gradients(impl, dtype, leading):
    """dO that stands for several under vmap has no memory to point a kernel at."""
    near = {"rtol": 2e-2, "atol": 2e-2}  # dQ is a sum in the order of arrival
    for num_queries, num_keys in ((200, 200), (70, 300)):
        q, k, v = (gpu(*leading, n, 64, dtype=dtype) for n in (num_queries, num_keys, num_keys))
        for axes in (q.shape, [1] * q.ndim, [*q.shape[:-1], 1]):  # ordinary, a number, a column
            grads = gpu(3, *axes, dtype=dtype, requires_grad=False).expand(3, *q.shape)
            check_batched_gradients(impl, q, k, v, True, grads, **near)
    wide = gpu(2, 100, 3, 64, dtype=dtype).transpose(1, 2).detach().requires_grad_()
    grads = gpu(3, 2, 100, 3, 64, dtype=dtype, requires_grad=False).transpose(2, 3)
    check_batched_gradients(impl, wide, wide, wide.detach().requires_grad_(), False, grads, **near)


@impls("flash_triton", "flash_cuda")
def test_functions_are_not_transformed(impl):
    for transform in (torch.func.jacrev, torch.func.vmap):
        with pytest.raises(RuntimeError, match="setup_context"):
            transform(lambda q: attention(q, q, q, True, impl))(gpu(2, 4, 16, dtype=FP16))


@impls("flash_triton", "flash_cuda")
def test_nothing_is_copied(impl):
    """Forward needs O and L, backward dQ, dK, dV and D: strided inputs and an expanded dO add nothing to that.

    The kernels for Hopper and those in CUDA C++ need dQ in fp32 and two numbers a query, those for Hopper a tile of dO
    for each head too.
    """
    q, k, v = (gpu(1, 4096, 8, 64, dtype=BF16).transpose(1, 2).detach().requires_grad_() for _ in range(3))
    attention(q, k, v, True, impl).sum().backward()  # compiles
    q.grad = k.grad = v.grad = None
    size, rows = q.numel() * 2, 8 * 4096 * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, True, impl).sum().backward()
    more = 0
    if impl == "flash_cuda":
        more = 2 * size + rows
    elif hopper_reason() is None:
        more = 2 * size + rows + 8 * 64 * 64 * 2
    assert torch.cuda.max_memory_allocated() - before <= 4 * size + 2 * rows + more + 2**12


@kernels(OWN)
def test_large_scores(impl, dtype):
    q, k, v = (gpu(2, 300, 64, dtype=dtype, scale=scale) for scale in (20, 20, 1))
    largest = (q.detach().double() @ k.detach().double().transpose(-2, -1)).abs().max().item() / 8
    check(impl, q, k, v, True, largest_score=largest)


@pytest.mark.parametrize("head_dim", [64, 128])
@kernels(ALL)
def test_gradients_are_the_same_every_time(impl, dtype, head_dim):
    q, k, v, grad_o = (gpu(4, 1000, head_dim, dtype=dtype) for _ in range(4))
    # dQ is a sum in the order of arrival
    as_they_arrive = impl == "flash_cuda" or (hopper_reason() is None and dtype != FP32)

    def same(found, expected, dq_too):
        assert all(torch.equal(found[i], expected[i]) for i in (0, 2, 3))
        if dq_too:
            assert torch.equal(found[1], expected[1])
        else:
            torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=1e-2)

    free = run(impl, q, k, v, grad_o, True)
    for _ in range(3):
        same(run(impl, q, k, v, grad_o, True), free, dq_too=not as_they_arrive)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(impl, q, k, v, grad_o, True)
        for _ in range(3):
            same(run(impl, q, k, v, grad_o, True), first, dq_too=True)
    finally:
        torch.use_deterministic_algorithms(False)
    if (
        impl == "flash_cuda"
    ):  # the flag leaves Hopper's backward pass to other kernels, and this one to the same
        same(free, first, dq_too=False)


@pytest.mark.parametrize("layout", ["many-heads", "one-huge-row-stride"])
@pytest.mark.parametrize(("impl", "gib"), [("flash_triton", 60), ("flash_cuda", 80)], indirect=["impl"])
def test_more_than_2_to_the_31_elements(impl, gib, layout):
    if torch.cuda.get_device_properties(0).total_memory < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory")
    like = {"device": "cuda", "dtype": BF16}
    generator = torch.Generator("cuda").manual_seed(1)
    if layout == "many-heads":  # 2^31 + 2^22 elements in each of q, k, v and o; the last head is looked at
        shape, look = (1, 2**15 + 64, 1024, 64), (slice(None), slice(-1, None))
        inputs = [torch.randn(shape, generator=generator, **like) for _ in range(3)]
    else:  # rows 2^22 elements apart: offsets within one head pass 2^31
        wide = torch.empty(1, 1, 600, 2**22, **like)
        wide[..., :192] = torch.randn(1, 1, 600, 192, generator=generator, **like)
        inputs, look = list(wide[..., :192].split(64, -1)), (slice(None), slice(None))
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    o = attention(q, k, v, True, impl)
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    exact = exact_attention(*(x[look] for x in (q, k, v)), torch.ones_like(o[look]), True)
    for x, y in zip((o, dq, dk, dv), exact, strict=True):
        assert relative(x[look], y, 1) < 1e-2


@kernels(OWN)
def test_torch_compile_takes_it_whole(impl, dtype):
    torch._dynamo.reset()
    q, k, v = (gpu(2, 3, 300, 64, dtype=dtype) for _ in range(3))
    grad_o = torch.randn_like(q)
    compiled = torch.compile(lambda *x: attention(*x, True, impl) * 2, fullgraph=True)
    o = compiled(q, k, v)
    expected = run(impl, q, k, v, 2 * grad_o, True)
    found = (o, *torch.autograd.grad(o, (q, k, v), grad_o))
    near = {"rtol": 2e-2, "atol": 1e-2} if impl == "flash_cuda" else {}
    for x, y in zip(found, (2 * expected[0], *expected[1:]), strict=True):
        torch.testing.assert_close(x, y, **near)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=name)
@impls("flash_triton", "flash_cuda")
def test_autocast(impl, dtype):
    q, k, v = (gpu(2, 3, 1100, 64, dtype=FP32) for _ in range(3))
    with torch.autocast("cuda", dtype=dtype):
        o = attention(q, k, v, True, impl)
        peer = attention(q, k, v, True, "sdpa")
    assert o.dtype == peer.dtype == dtype
    o.float().sum().backward()
    assert q.grad.dtype == FP32
    torch.testing.assert_close(o, peer, atol=2e-2, rtol=2e-2)


@impls("flash_triton", "flash_cuda")
def test_operators_pass_opcheck(impl):
    q, k, v = (gpu(1, 2, n, 64, dtype=BF16, requires_grad=False) for n in (133, 70, 70))
    attention(q, k, v, True, impl)  # imports them
    prefix = {"flash_triton": "flash", "flash_cuda": "flash_cuda"}[impl]
    forward, backward = (getattr(torch.ops.cs336, f"{prefix}_{part}") for part in ("forward", "backward"))
    tests = ("test_schema", "test_faketensor")
    o, logsumexp = forward(q, k, v, True)
    torch.library.opcheck(forward, (q, k, v, True), test_utils=tests)
    torch.library.opcheck(backward, (q, k, v, o, logsumexp, o, True), test_utils=tests)


@impls("flash_triton", "flash_cuda")
def test_another_stream_and_a_cuda_graph(impl):
    q, k, v = (gpu(1, 2, 256, 64, dtype=BF16, requires_grad=False) for _ in range(3))
    expected = attention(q, k, v, True, impl)
    graph, o = captured(lambda: attention(q, k, v, True, impl))
    o.zero_()
    graph.replay()
    torch.testing.assert_close(o, expected, rtol=0, atol=0)


# --------------------------------------------------------------------------------- Triton
@pytest.mark.parametrize("heads", [2, 64])
def test_tf32_products_follow_the_setting(impl, heads):
    x = [gpu(heads, 1000, 64, dtype=FP32) for _ in range(3)]
    grad_o = gpu(heads, 1000, 64, dtype=FP32, requires_grad=False)
    exact = exact_attention(*x, grad_o, True)
    accurate = relative(run(impl, *x, grad_o, True)[0], exact[0], 1)
    torch.set_float32_matmul_precision("high")
    rounded = relative(run(impl, *x, grad_o, True)[0], exact[0], 1)
    assert accurate < 2e-6 < 5e-5 < rounded < 2e-3
    # a tensor core drops the bits that TF32 lacks, all in one direction; cuBLAS rounds them to the nearest first
    check(impl, *x, True, grad_o, factor=8)


PRECISIONS = [(FP32, "highest"), (FP16, "highest"), (BF16, "highest"), (FP32, "high")]


def check_shapes(lengths, head_dim, dtype, precision):
    torch.set_float32_matmul_precision(precision)
    # cuBLAS makes products of narrow heads in fp32 all the same; ours cut what they take to the ten bits of TF32
    floor = 4 * 2**-10 if precision == "high" else None
    for num_queries, num_keys in lengths:
        x = (gpu(2, n, head_dim, dtype=dtype) for n in (num_queries, num_keys, num_keys))
        check("flash_triton", *x, True, floor=floor)


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS, ids=name)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("multiprocessors", [1, 10**6], ids=["many", "few"])
def test_tiles_of_many_and_of_few_programs(
    impl, portable, multiprocessors, head_dim, dtype, precision, monkeypatch
):
    """As if the GPU were so small that these programs are many, and so large that they are few."""
    from cs336_systems.attention.triton import tiles

    monkeypatch.setattr(tiles, "multiprocessors_of", lambda index: multiprocessors)
    check_shapes(((200, 130), (77, 300), (250, 250)), head_dim, dtype, precision)


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS, ids=name)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 128, 256])
def test_kernels_that_are_mistrusted_have_others_in_their_place(
    impl, portable, head_dim, dtype, precision, monkeypatch
):
    """As if the assembler had got them all wrong."""
    from cs336_systems.attention.triton import launch, tiles

    asked = []

    def without_wgmma(*arguments):
        asked.append(arguments)
        return tiles.tiles_without_wgmma(*arguments)

    monkeypatch.setattr(launch, "_mistrusted", lambda *arguments: True)
    monkeypatch.setattr(launch, "tiles_without_wgmma", without_wgmma)
    check_shapes(((200, 130), (77, 300)), head_dim, dtype, precision)
    assert len(asked) == 6  # three kernels for each of the shapes


def test_columns_that_lie_apart_and_odd_strides(impl):
    """Layouts that ptxas 12.8 has made a wrong kernel of (see `machine_code`)."""
    q, v = (gpu(4, n, 2, 20, dtype=BF16).permute(2, 0, 1, 3) for n in (13, 9))
    check(impl, q, gpu(2, 4, 20, 9, dtype=BF16).transpose(2, 3), v, True)
    q, k = gpu(2, 2, 20, 128, dtype=FP16).transpose(2, 3), gpu(2, 2, 10, 40, dtype=FP16)[..., ::2]
    check(impl, q, k, gpu(2, 10, 2, 20, dtype=FP16).transpose(1, 2), False)


@impls("flash_triton")
def test_signs_that_are_kept_in_a_flag(impl):
    q = torch.randn(1, 2, 70, 32, dtype=torch.complex64, device="cuda").conj().imag
    assert q.is_neg()
    torch.testing.assert_close(attention(q, q, q, True, impl), attention(*[q.resolve_neg()] * 3, True, impl))


def test_leaderboard_call(impl):
    from cs336_systems.attention.flash_triton import FlashAttentionTriton

    torch._dynamo.reset()
    flash = torch.compile(FlashAttentionTriton.apply)
    q, k, v = (gpu(16, 1024, 64, dtype=BF16) for _ in range(3))
    flash(q, k, v, True).sum().backward()
    exact = exact_attention(q, k, v, torch.ones_like(q), True)
    for x, y in zip((q.grad, k.grad, v.grad), exact[1:], strict=True):
        assert relative(x, y, 1) < 1e-2


def test_devices_must_match(impl):
    q, k = gpu(1, 8, 16, dtype=FP32), fresh(1, 8, 16)
    with pytest.raises(ValueError, match="q is on cuda:0, k on cpu"):
        attention(q, k, k, impl=impl)


def test_auto_is_the_triton_kernel():
    pytest.importorskip("triton")
    q = gpu(1, 8, 16, dtype=FP32)
    assert type(attention(q, q, q).grad_fn).__name__.startswith("FlashAttentionTriton")


def test_remembered_launches_are_shown_to_profilers(impl):
    import triton

    q, k, v = (gpu(1, 2, 256, 64, dtype=BF16, requires_grad=False) for _ in range(3))
    expected = attention(q, k, v, True, impl)
    seen = []
    hooks = triton.knobs.runtime.launch_enter_hook

    def watch(metadata):
        seen.append(metadata.get()["name"])

    hooks.add(watch)
    try:
        o = attention(q, k, v, True, impl)
    finally:
        hooks.remove(watch)
    assert seen == ["forward_kernel"]
    attention(q, k, v, True, impl)
    assert len(seen) == 1
    torch.testing.assert_close(o, expected, rtol=0, atol=0)


# --------------------------------------------------------------------------------- CUDA C++
@pytest.mark.parametrize("generation", [80, 86])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@impls("flash_cuda")
def test_tiles_of_other_generations(impl, generation, head_dim, monkeypatch):
    from cs336_systems.attention.cuda import launch

    monkeypatch.setattr(launch, "generation_of", lambda index: generation)
    for is_causal in (False, True):
        check(impl, *(gpu(2, n, head_dim, dtype=BF16) for n in (333, 517, 517)), is_causal)


@pytest.mark.parametrize(
    ("impl", "also", "taken"),
    [("flash_cuda", [], ".*"), ("Turing", [BF16], "torch.float16 on")],
    indirect=["impl"],
)
def test_what_it_does_not_take(impl, also, taken):
    for dtype in (FP32, *also):
        q = gpu(1, 8, 16, dtype=dtype)
        with pytest.raises(
            ValueError, match=rf"flash_cuda got {dtype}; it takes {taken}.*flash_triton.* take"
        ):
            attention(q, q, q, impl=impl)
    wide = gpu(1, 8, 136, dtype=FP16)
    with pytest.raises(ValueError, match="the head dimension is 136; allowed: 16 to 128"):
        attention(wide, wide, wide, impl=impl)


@impls("flash_cuda")
def test_auto_takes_it_where_triton_is_missing(impl, monkeypatch):
    from cs336_systems.attention import registry

    q = gpu(1, 8, 16, dtype=FP16)
    registry.check_machine()
    monkeypatch.setitem(registry._usable, "flash_triton", False)
    assert type(attention(q, q, q).grad_fn).__name__.startswith("FlashAttentionCuda")
    wide = q.float()
    assert "Flash" not in type(attention(wide, wide, wide).grad_fn).__name__


@impls("flash_cuda", "Turing")
def test_a_row_whose_neighbors_are_not_aligned(impl):
    wide = gpu(2, 3, 4, 65, dtype=FP16, requires_grad=False)
    q, k, v = (wide[..., :1, :64].detach().requires_grad_() for _ in range(3))
    torch.testing.assert_close(attention(q, k, v, impl=impl), v, rtol=1e-3, atol=1e-3)
