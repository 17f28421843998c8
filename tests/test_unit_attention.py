"""Attention on the CPU: every implementation, the Triton kernels through triton's interpreter."""

import importlib

import pytest
import torch
from attention_checks import check, check_batched_gradients, compiler, fresh, run

from cs336_systems.attention import IMPLEMENTATIONS, attention, availability, registry
from cs336_systems.attention.available import torch_reason
from cs336_systems.attention.inputs import repeated_heads

INTERPRETED = availability()["flash_triton"] is None and not torch.cuda.is_available()
triton_on_cpu = pytest.mark.skipif(
    not INTERPRETED, reason="needs triton's interpreter: triton installed, no GPU"
)
OURS = [pytest.param("flash_triton", marks=triton_on_cpu), "flash_torch"]

# (n_queries, n_keys, d): below, at and above the tiles of 32 × 16, and everything ragged
SHAPES = [(64, 64, 16), (45, 70, 20), (70, 33, 80), (33, 47, 16), (16, 128, 64), (100, 16, 24), (1, 50, 16),
          (50, 1, 24)]  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("impl", OURS)
def test_matches_fp64(impl, shape, is_causal):
    num_queries, num_keys, d = shape
    check(impl, *(fresh(1, n, d) for n in (num_queries, num_keys, num_keys)), is_causal)


@pytest.mark.parametrize("impl", OURS)
@pytest.mark.parametrize("leading", [(), (2, 3), (1, 2, 1, 2)], ids=str)
def test_any_leading_axes(impl, leading):
    q, k, v = (fresh(*leading, n, 16) for n in (20, 36, 36))
    check(impl, q, k, v, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", OURS)
def test_half_precision(impl, dtype):
    if (impl, dtype) == ("flash_triton", torch.bfloat16):
        pytest.skip("triton's interpreter has no bf16 products")
    check(impl, *(fresh(2, 40, 32, dtype=dtype) for _ in range(3)), True)


@triton_on_cpu
@pytest.mark.parametrize("of_keys", [4, 2])
def test_dk_and_dv_by_a_launch_each(of_keys, monkeypatch):
    from cs336_systems.attention.triton import launch, tiles

    monkeypatch.setattr(
        launch, "apart_for", lambda *given: (tiles.Tiles(16, 32, 4, 1), tiles.Tiles(32, 16, 4, 1))
    )
    q, k, v = (fresh(1, heads, n, 24) for heads, n in ((4, 50), (of_keys, 40), (of_keys, 40)))
    for seen in ({}, {"window": 30}):
        check("flash_triton", q, k, v, True, **seen)


@triton_on_cpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bf16_in_the_interpreter_is_refused(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cs336_systems.attention.flash_triton import _launch_backward, _launch_forward

    with FakeTensorMode():
        x = torch.empty(1, 2, 40, 32, dtype=torch.bfloat16, device=device)
    refused = rf"torch.bfloat16 on device '{device}' with TRITON_INTERPRET=1.*torch.float32 and torch.float16"
    for call in (lambda: _launch_forward(x, x, x, True), lambda: _launch_backward(x, x, x, x, x, x, True)):
        with pytest.raises(ValueError, match=refused):
            call()


GROUPED = [name for name, found in IMPLEMENTATIONS.items() if "enable_gqa" in found.features]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("heads", "of_keys", "dtype"),
    [(6, 2, torch.float32), (6, 2, torch.float16), (4, 1, torch.float32), (3, 3, torch.float16)],
)
@pytest.mark.parametrize("impl", [*OURS, *(x for x in GROUPED if x not in ("flash_triton", "flash_torch"))])
def test_grouped_queries(impl, heads, of_keys, dtype, is_causal):
    """Each head of keys for a group of heads of queries: odd lengths of several tiles; and in layouts of all kinds."""
    if impl == "flash_compiled_backward" and (heads != 4 or not is_causal):
        pytest.skip("compiling takes a minute")
    check(
        impl,
        fresh(2, heads, 37, 24, dtype=dtype),
        *(fresh(2, of_keys, 51, 24, dtype=dtype) for _ in "kv"),
        is_causal,
    )
    if is_causal and "compiled" not in impl:
        q = fresh(2, 20, heads, 16, dtype=dtype).transpose(1, 2)
        k = fresh(1, of_keys, 12, 32, dtype=dtype)[..., ::2].expand(2, of_keys, 12, 16)
        v = fresh(2, 16, 12, dtype=dtype)[:, None].transpose(2, 3).expand(2, of_keys, 12, 16)
        for axes in ((1, 1, 1, 1), (2, heads, 1, 1), (2, heads, 20, 1), (1, heads, 20, 16)):
            check(impl, q, k, v, True, fresh(*axes, dtype=dtype, requires_grad=False).expand(q.shape))


@pytest.mark.parametrize("impl", [*OURS, "reference", "sdpa"])
def test_which_head_of_keys_a_head_of_queries_sees(impl):
    """As in torch's own attention; the axis of heads is the one before the last two, of three or five too."""
    from torch.nn.functional import scaled_dot_product_attention

    for leading in ((), (2,), (2, 3)):
        q, k, v = (fresh(*leading, n, 20, 16, requires_grad=False) for n in (6, 2, 2))
        expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(attention(q, k, v, impl=impl, enable_gqa=True), expected)


@pytest.mark.parametrize("impl", [*OURS, "reference", "sdpa"])
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "enable_gqa", "message"),
    [
        ((2, 4, 8, 16), (2, 2, 8, 16), False, r"q has shape \(2, 4, 8, 16\).*must be equal \(with enable_gqa=True"),
        ((2, 4, 8, 16), (2, 3, 8, 16), False, r"k has \(2, 3, 8, 16\); their leading axes must be equal$"),
        ((2, 4, 8, 16), (2, 3, 8, 16), True, r"k has \(2, 3, 8, 16\).*must be a multiple of those of k"),
        ((2, 2, 8, 16), (2, 4, 8, 16), True, r"must be a multiple"),
        ((2, 4, 8, 16), (1, 2, 8, 16), True, r"must be a multiple of those of k, and the axes before be equal"),
        ((4, 8, 16), (2, 4, 8, 16), True, r"must be a multiple"),
        ((2, 4, 8, 16), (2, 0, 8, 16), True, r"must be a multiple"),
        ((2, 4, 8, 16), (2, 2, 8, 24), True, r"q has head dimension 16 but k has 24"),
        ((2, 4, 8, 16), (2, 2, 8, 16), 1, r"enable_gqa is 1; allowed: True, False"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_named(impl, q_shape, k_shape, enable_gqa, message):
    q, k = torch.zeros(q_shape), torch.zeros(k_shape)
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, impl=impl, enable_gqa=enable_gqa)


@pytest.mark.parametrize("impl", OURS)
def test_strided_and_expanded_inputs(impl):
    q = fresh(2, 40, 3, 32).transpose(1, 2)  # as a model has it: (batch, n, heads, d)
    k = fresh(2, 1, 40, 64)[..., ::2].expand(2, 3, 40, 32)  # every second column; one head for all
    check(impl, q, k, fresh(2, 3, 32, 40).transpose(2, 3), True)


@pytest.mark.parametrize("shape", [(32, 32, 16), (37, 21, 24)], ids=["even", "ragged"])
@pytest.mark.parametrize("impl", OURS)
def test_expanded_gradients(impl, shape):
    num_queries, num_keys, d = shape
    q, k, v = (fresh(2, n, d) for n in (num_queries, num_keys, num_keys))
    # a number, a column, one a head, a row
    for axes in ((1, 1, 1), (2, num_queries, 1), (2, 1, 1), (2, 1, d)):
        grad_o = fresh(*axes, requires_grad=False).expand(q.shape)
        assert 0 in grad_o.stride()
        check(impl, q, k, v, True, grad_o)


@pytest.mark.parametrize("impl", OURS)
def test_large_scores(impl):
    q, k, v = fresh(1, 48, 16, scale=30), fresh(1, 48, 16, scale=30), fresh(1, 48, 16)
    check(impl, q, k, v, True, largest_score=(q @ k.transpose(-2, -1)).abs().max().item() / 4)
    q, k = q.detach() * 0 + 1e15, k.detach() * 0 - 1e15  # equal scores of −4e30: the softmax is uniform
    torch.testing.assert_close(attention(q, k, v, False, impl), v.mean(-2, keepdim=True).expand(v.shape))


@triton_on_cpu
@pytest.mark.parametrize("kernels", ["triton.launch", "hopper.split_launch"])
def test_what_a_backward_pass_is_given(kernels):
    """A logsumexp of any layout; what O and its gradient cannot be is refused by name."""
    launch = importlib.import_module(f"cs336_systems.attention.{kernels}")
    q, k, v, grad_o = (fresh(1, 2, 40, 16, requires_grad=False) for _ in range(4))
    o, logsumexp = launch.launch_forward(q, k, v, True)
    transposed = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    given = [launch.launch_backward(q, k, v, o, x, grad_o, True) for x in (logsumexp, transposed)]
    for x, y in zip(*given, strict=True):
        torch.testing.assert_close(x, y)
    for wrong, name in (
        ((o.half(), grad_o), r"o is torch.float16"),
        ((o, grad_o.half()), r"grad_o is torch.float16"),
        ((o, grad_o[:, :, 1:]), r"grad_o is torch.float32 \(1, 2, 39, 16\)"),
    ):
        with pytest.raises(
            ValueError, match=rf"{name}.*; expected what q is, torch.float32 \(1, 2, 40, 16\) on cpu"
        ):
            launch.launch_backward(q, k, v, wrong[0], logsumexp, wrong[1], True)


@triton_on_cpu
def test_the_operator_looks_at_what_a_remembered_pass_does_not(monkeypatch):
    """Rows more or fewer in the same strides: what is remembered would read past the end of the shorter."""
    from cs336_systems.attention import flash_triton

    monkeypatch.setattr(
        flash_triton.again, "backward", lambda first, q, k, v, *_: (q.clone(), k.clone(), v.clone())
    )
    q, k, v, o, grad_o = (fresh(1, 2, 40, 16, requires_grad=False) for _ in range(5))
    logsumexp, backward = fresh(1, 2, 40, requires_grad=False), torch.ops.cs336.flash_backward
    assert [x.shape for x in backward(q, k, v, o, logsumexp, grad_o, True)] == [q.shape] * 3
    for name, wrong in (("o", (o[:, :, 1:], grad_o)), ("grad_o", (o, grad_o[:, :, 1:]))):
        assert [x.stride() for x in wrong] == [q.stride()] * 2
        with pytest.raises(ValueError, match=rf"^{name} is torch.float32 \(1, 2, 39, 16\) on cpu; expected"):
            backward(q, k, v, wrong[0], logsumexp, wrong[1], True)


@triton_on_cpu
@pytest.mark.parametrize(
    ("heads", "shape", "splits"),
    [(3, (5, 100, 16), 2), (6, (33, 129, 24), 4), (12, (1, 64, 16), 4), (3, (17, 97, 40), 2)],
    ids=str,
)
def test_split_keys(heads, shape, splits):
    """O and L of the splits, combined, are those over all keys; O lies as q does."""
    from cs336_systems.attention.triton.launch import launch_forward

    num_queries, num_keys, d = shape
    q = fresh(2, num_queries, heads, d).detach().transpose(1, 2)
    k, v = (fresh(2, 3, num_keys, d, scale=3).detach() for _ in range(2))
    o, logsumexp = launch_forward(q, k, v, False, (None, splits))
    _, k, v = repeated_heads(q, k, v, True)
    scores = q.double() @ k.double().mT * d**-0.5
    torch.testing.assert_close(o.double(), scores.softmax(-1) @ v.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert o.stride() == q.stride()


@triton_on_cpu
@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_fp32_matmuls_follow_torch_s_older_and_newer_settings():
    from cs336_systems.attention.triton.again import precision_of

    for older, expected in (("high", "tf32"), ("medium", "tf32"), ("highest", "fp32")):
        torch.set_float32_matmul_precision(older)
        assert precision_of(torch.float32) == expected
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # then torch does not say which older one it is
    assert [precision_of(x) for x in (torch.float32, torch.bfloat16)] == ["tf32", "half"]
    check("flash_triton", *(fresh(1, 20, 16) for _ in range(3)), True, floor=2**-8)


@pytest.mark.parametrize("impl", OURS)
def test_saves_one_logsumexp(impl):
    q, k, v = (fresh(3, 40, 16) for _ in range(3))
    o = attention(q, k, v, True, impl)
    saved = [t for t in o.grad_fn.saved_tensors if t.shape == (3, 40)]
    assert len(saved) == 1
    seen = torch.ones(40, 40, dtype=torch.bool).tril()
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(saved[0], torch.logsumexp(scores, -1))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("impl", [i for i, found in IMPLEMENTATIONS.items() if found.reason is torch_reason])
def test_all_that_run_anywhere_are_the_same_operation(impl, is_causal):
    if impl == "flash_compiled_backward" and not is_causal:
        pytest.skip("compiling takes a minute")
    check(impl, *(fresh(2, 3, n, 16) for n in (20, 30, 30)), is_causal)


def test_gradcheck():
    from cs336_systems.attention.flash_torch import FlashAttentionTorch, tiled_backward, tiled_forward

    q, k, v = (fresh(1, n, 16, dtype=torch.float64) for n in (4, 5, 5))
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(lambda *x: FlashAttentionTorch.apply(*x, is_causal), (q, k, v))  # noqa: B023
    # tiles that do not divide the lengths, against the function's own
    q, k, v = (x.detach() for x in (q, k, v))
    for small, large in zip(tiled_forward(q, k, v, True, 2, 3), tiled_forward(q, k, v, True), strict=True):
        torch.testing.assert_close(small, large)
    o, logsumexp = tiled_forward(q, k, v, True)
    grad_o = torch.randn_like(o)
    small = tiled_backward(q, k, v, o, logsumexp, grad_o, True, 2, 3)
    for x, y in zip(small, tiled_backward(q, k, v, o, logsumexp, grad_o, True), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("impl", [*OURS, "flash_compiled_backward"])
def test_second_order_gradients_are_refused(impl):
    q, k, v = (fresh(1, 8, 16) for _ in range(3))
    with pytest.raises(RuntimeError, match="no second-order gradients"):
        torch.autograd.grad(attention(q, k, v, impl=impl).sum(), q, create_graph=True)


# ------------------------------------------------------------------------------------------------ vmap
@triton_on_cpu
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients():
    q, k, v = (fresh(2, 1, 1, n, 16) for n in (7, 9, 9))  # five axes: some views have no rule there
    check_batched_gradients("flash_triton", q, k, v, True, fresh(2, *q.shape, requires_grad=False))


@pytest.mark.parametrize("impl", OURS)
def test_functions_are_not_transformed(impl):
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jacrev(lambda q: attention(q, q, q, True, impl))(fresh(4, 16, requires_grad=False))


# ------------------------------------------------------------------------------------------------ operators


@triton_on_cpu
def test_autocast():
    q, k, v = (fresh(2, 32, 16) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.float16):
        o = attention(q, k, v, True, "flash_triton")
    assert o.dtype == torch.float16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.isfinite().all()


@triton_on_cpu
@pytest.mark.parametrize("of_keys", [2, 1])
def test_torch_compile_takes_it_whole(of_keys, monkeypatch):
    # on a GPU whether triton can run is a question that is not traced, and the first call may be a compiled one
    untraced = torch._dynamo.disable(lambda: dict.fromkeys(IMPLEMENTATIONS))
    monkeypatch.setattr(registry, "availability", untraced)
    monkeypatch.setattr(registry, "_usable", {})
    q, k, v = (fresh(heads, 32, 16) for heads in (2, of_keys, of_keys))
    grad_o = torch.randn_like(q)
    twice = lambda *x: attention(*x, True, "flash_triton", enable_gqa=of_keys < 2) * 2
    o = torch.compile(twice, fullgraph=True, backend="aot_eager")(q, k, v)
    expected = run("flash_triton", q, k, v, 2 * grad_o, True)
    torch.testing.assert_close(o, 2 * expected[0])
    for x, y in zip(torch.autograd.grad(o, (q, k, v), grad_o), expected[1:], strict=True):
        torch.testing.assert_close(x, y)


# ------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("impl", [*OURS, "reference", "sdpa"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :5], v), r"k has shape \(2, 5, 16\) but v has \(2, 8, 16\)"),
        (lambda q, k, v: (q[:1], k, v), r"q has shape \(1, 8, 16\) but k has \(2, 8, 16\)"),
        (lambda q, k, v: (q[0], k, v), r"q has shape \(8, 16\) but k has \(2, 8, 16\)"),
        (lambda q, k, v: (q[..., :8], k, v), r"head dimension 8 but k has 16"),
        (lambda q, k, v: (q.half(), k, v), r"q is torch.float16, k is torch.float32"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), r"q is torch.int32; allowed: .*float32"),
        (lambda q, k, v: (q.to("meta"), k, v), r"q is on meta, k on cpu"),
        (lambda q, k, v: (q[:, :0], k, v), r"q has shape \(2, 0, 16\).*at least 1"),
        (lambda q, k, v: (q[0, 0], k, v), r"q has shape \(16,\); expected \(\.\.\., n_queries, d\)"),
    ],
    ids=["k-v", "batch", "axes", "d", "dtype", "integers", "device", "empty", "one-axis"],
)
def test_mismatches_are_named(impl, change, message):
    with pytest.raises(ValueError, match=message):
        attention(*change(*(fresh(2, 8, 16, requires_grad=False) for _ in range(3))), impl=impl)


@pytest.mark.parametrize("d", [8, 15, 257])
@pytest.mark.parametrize("impl", OURS)
def test_head_dimensions_that_kernels_do_not_serve(impl, d):
    with pytest.raises(ValueError, match=f"the head dimension is {d}; allowed: 16 to 256"):
        attention(*(fresh(1, 4, d, requires_grad=False) for _ in range(3)), impl=impl)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"is_causal": x}, f"is_causal is {x!r}; allowed: True, False") for x in ("no", None, 1, 0.0)),
        ({"impl": "flash3"}, "'flash3'; allowed: auto, flash_triton, "),
    ],
)
def test_wrong_choices_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(*(fresh(1, 4, 16, requires_grad=False) for _ in range(3)), **wrong)


def test_auto_works_anywhere():
    q = fresh(1, 4, 16, requires_grad=False)
    torch.testing.assert_close(attention(q, q, q), attention(q, q, q, impl="reference"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("capability", "missing", "dtype", "d", "expected"),
    [
        (80, (), "bfloat16", 64, "flash_triton"),
        (80, ("flash_triton",), "bfloat16", 64, "flash_cuda"),
        (80, ("flash_triton",), "float32", 64, "reference"),
        (80, ("flash_triton", "flash_cuda"), "float16", 64, "reference"),
        (80, (), "float16", 300, "reference"),
        (80, (), "float64", 64, "reference"),
        (75, (), "float16", 64, "flash_cuda"),
        (75, (), "float32", 64, "flash_triton"),
        (75, (), "float16", 200, "flash_triton"),
        (75, (), "float32", 129, "reference"),  # its backward pass has no tiles there
        (80, (), "float32", 129, "flash_triton"),
        (75, ("flash_cuda",), "float16", 64, "flash_triton"),
    ],
)
def test_what_auto_means_on_a_gpu(capability, missing, dtype, d, expected, compiled, monkeypatch):
    """Of tensors that have no numbers, so that no GPU is needed; also as torch.compile reads the question."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode()
    from cs336_systems.attention import auto, flash_cuda, registry

    for name in registry.IMPLEMENTATIONS:
        monkeypatch.setitem(registry._usable, name, name not in missing)
    monkeypatch.setitem(auto._before_ampere, 0, capability < 80)
    monkeypatch.setattr(flash_cuda.launch, "generation_of", lambda index: capability)
    with fake:
        q = torch.empty(1, 8, d, dtype=getattr(torch, dtype), device="cuda:0")
        if not compiled:
            assert auto.chosen(q) == expected
            able = "reference" if expected == "reference" or "flash_triton" in missing else "flash_triton"
            assert auto.chosen(q, ("enable_gqa",)) == auto.chosen(q, ("window", "cu_seqlens")) == able
            return
        places = {name: float(place) for place, name in enumerate(registry.IMPLEMENTATIONS)}
        graphs = []
        torch._dynamo.reset()
        torch.compile(
            lambda x: x * places[auto.chosen(x)],
            fullgraph=True,
            backend=lambda g, _: graphs.append(g) or g.forward,
        )(q)
    [factor] = [node.args[1] for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert factor == places[expected]


def _ours_on_the_cpu():
    attention(*[torch.ones(1, 4, 16)] * 3, impl="flash_triton")


def test_kernels_refuse_the_cpu_without_the_interpreter():
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)cpu|triton is not installed"):
        compiler().submit(_ours_on_the_cpu).result()
