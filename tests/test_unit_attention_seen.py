"""Attention whose queries see some of the keys: sliding windows and packed sequences, on the CPU (the Triton kernels in
triton's interpreter) and, the same with more tokens, on a GPU."""

import pytest
import torch
from attention_checks import captured, check, fresh, run

from cs336_systems.attention import IMPLEMENTATIONS, attention, availability, registry
from cs336_systems.attention.triton import again

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Triton's tiles have up to 128 rows, the interpreter's 32; lengths below are multiplied with this
MANY = 8 if ON_GPU else 1
kernels = pytest.mark.skipif(
    availability()["flash_triton"] is not None, reason="needs triton, and a GPU or its interpreter"
)
KERNELS = pytest.param("flash_triton", marks=kernels)
SERVING = [KERNELS, "reference", "sdpa"]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
pytestmark = [pytest.mark.gpu] * ON_GPU

# (n_queries, n_keys, window): one key, few, a tile's, of all lengths around that of the sequence
WINDOWS = [(70, 70, 1), (70, 70, 7), (96, 96, 16), (97, 97, 33), (64, 64, 63), (40, 40, 40), (30, 30, 99), (40, 90, 5),
           (90, 60, 31), (1, 9, 1)]  # fmt: skip
# where documents end: of one token, empty ones, only one, ends within tiles and between them
DOCUMENTS = [(64,), (1, 2, 3, 70), (0, 0, 33, 33, 71, 71, 71), (32, 64, 96), (16, 45), (1,)]


def packed(ends, times=MANY):
    return torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE) * times


def inputs(heads, of_keys, num_queries, num_keys, d, **options):
    return [
        fresh(1, h, n * MANY, d, device=DEVICE, **options)
        for h, n in ((heads, num_queries), (of_keys, num_keys), (of_keys, num_keys))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_queries", "num_keys", "window"), WINDOWS)
@pytest.mark.parametrize("impl", SERVING)
def test_windows(impl, num_queries, num_keys, window, dtype):
    for w in {window * MANY, window + max(0, num_queries - num_keys) * (MANY - 1)}:
        check(impl, *inputs(2, 2, num_queries, num_keys, 24, dtype=dtype), True, window=w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", DOCUMENTS, ids=str)
@pytest.mark.parametrize("impl", SERVING)
def test_packed_sequences(impl, ends, dtype):
    for times in {1, MANY}:
        q, k, v = (fresh(1, 2, ends[-1] * times, 24, device=DEVICE, dtype=dtype) for _ in range(3))
        check(impl, q, k, v, True, cu_seqlens=packed(ends, times))


@kernels
def test_the_function_itself_sees_documents_without_an_axis_of_batches():
    from cs336_systems.attention.flash_triton import FlashAttentionTriton

    ends = packed((5, 33, 70))
    x = [fresh(2, 70 * MANY, 24, device=DEVICE) for _ in range(3)]
    grad_o = torch.randn_like(x[0])
    found = FlashAttentionTriton.apply(*x, True, False, None, ends)
    four = [y.detach()[None].requires_grad_() for y in x]
    expected = attention(*four, True, "flash_triton", cu_seqlens=ends)
    torch.testing.assert_close(found, expected[0])
    grads = torch.autograd.grad(found, x, grad_o), torch.autograd.grad(expected, four, grad_o[None])
    for y, z in zip(*grads, strict=True):
        torch.testing.assert_close(y, z[0])


@pytest.mark.parametrize("impl", SERVING)
def test_both_with_grouped_queries_in_layouts_of_all_kinds(impl):
    n = 40 * MANY
    for heads, of_keys in ((4, 2), (3, 1)):
        q = fresh(1, n, heads, 32, device=DEVICE).transpose(1, 2)
        k = fresh(1, 1, n, 64, device=DEVICE)[..., ::2].expand(1, of_keys, n, 32)
        v = fresh(1, of_keys, 32, n, device=DEVICE).transpose(2, 3)
        for seen in ({}, {"cu_seqlens": packed((3, 20, 20, 40))}):
            for axes in ((1, 1, 1, 1), (1, heads, n, 1), q.shape):
                grad_o = fresh(*axes, device=DEVICE, requires_grad=False).expand(q.shape)
                check(impl, q, k, v, True, grad_o, **seen, window=11)


@pytest.mark.parametrize("impl", SERVING)
def test_documents_are_as_on_their_own(impl):
    ends = (5, 38, 64, 64, 71)
    q, k, v = inputs(2, 1, 71, 71, 16)
    cu_seqlens = packed(ends)
    grad_o = torch.randn_like(q)
    for window in (None, 9):
        found = run(impl, q, k, v, grad_o, True, cu_seqlens=cu_seqlens, window=window)
        for begin, end in zip((0, *ends), ends, strict=False):
            rows = slice(begin * MANY, end * MANY)
            if begin == end:
                continue
            alone = (x[:, :, rows].detach().requires_grad_() for x in (q, k, v))
            for x, y in zip(
                found, run("reference", *alone, grad_o[:, :, rows], True, window=window), strict=True
            ):
                torch.testing.assert_close(x[:, :, rows], y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", SERVING)
def test_empty_documents_at_the_end_change_nothing(impl):
    q, k, v = inputs(2, 2, 50, 50, 16)
    each = [
        run(impl, q, k, v, torch.ones_like(q), True, cu_seqlens=packed((20, 50, *[50] * more)))
        for more in (0, 1, 30)
    ]
    exact = {"rtol": 0, "atol": 0} if impl == "flash_triton" else {}
    for found in each[1:]:
        for x, y in zip(found, each[0], strict=True):
            torch.testing.assert_close(x, y, **exact)


@kernels
@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1])
@pytest.mark.parametrize("packs", [False, True], ids=["window", "packed"])
def test_tiles_that_no_query_sees_are_not_loaded(packs, dtype):
    """Numbers that are none would come through a mask: 0 · NaN. Rows so far away that no tile reaches them."""
    n, far = 256 * MANY, 64 * MANY
    seen = {"cu_seqlens": packed((64, 192, 256))} if packs else {"window": 10}
    q, k, v, grad_o = (fresh(1, 2, n, 16, device=DEVICE, dtype=dtype) for _ in range(4))
    expected = run("flash_triton", q, k, v, grad_o, True, **seen)
    with torch.no_grad():
        for x in (k, v):
            x[:, :, :far] = float("nan")  # the keys of a first document, or behind all windows of the last
        for x in (q, grad_o):
            x[:, :, 3 * far :] = float("nan")  # the queries of a last document
    middle = slice(far, 3 * far) if packs else slice(2 * far, 2 * far + far // 2)
    for x, y in zip(run("flash_triton", q, k, v, grad_o, True, **seen), expected, strict=True):
        assert torch.equal(x[:, :, middle], y[:, :, middle])


@kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("values", [(7, 40), (0, 0), (-900, 70), (70, 900), (50, 20), (900, -900), (0, 60)])
def test_ends_that_make_no_sense_reach_no_other_memory(values):
    """What comes of them is undefined; tokens outside of the tensors are never read (the GPU would say so)."""
    from cs336_systems.attention.flash_triton import flash_attention

    q, k, v = inputs(1, 1, 70, 70, 16)
    # not by `attention`, which looks at them on a CPU
    o = flash_attention(q, k, v, True, False, None, packed((*values, 70))[1:])
    torch.autograd.grad(o, (q, k, v), torch.ones_like(q))


# ------------------------------------------------------------------------------------------------ operators
@kernels
def test_operators_pass_opcheck():
    import cs336_systems.attention.flash_triton  # noqa: F401

    alike, other = (inputs(4, 2, 33, n, 16, requires_grad=False) for n in (33, 21))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in other]
    tests = ("test_schema", "test_faketensor")
    for how, (q, k, v) in (((True, 5), alike), ((True, None, packed((3, 33))), alike), ((True,), strided)):
        o, logsumexp = torch.ops.cs336.flash_forward(q, k, v, *how)
        torch.library.opcheck(torch.ops.cs336.flash_forward, (q, k, v, *how), test_utils=tests)
        torch.library.opcheck(
            torch.ops.cs336.flash_backward, (q, k, v, o, logsumexp, o, *how), test_utils=tests
        )


@kernels
@pytest.mark.parametrize("of_keys", [2, 1])
def test_flops_are_counted(of_keys):
    """Seven products, of two heads of queries; with a window of the keys that a query sees."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs(2, of_keys, 48, 64, 16)
    for seen, keys in (({"window": 20}, 20), ({"window": 64 * MANY}, 64 * MANY), ({}, 64 * MANY)):
        with FlopCounterMode(display=False) as counter:
            attention(q, k, v, True, "flash_triton", enable_gqa=True, **seen).sum().backward()
        assert counter.get_total_flops() == 7 * 2 * 2 * 48 * MANY * keys * 16


@pytest.mark.parametrize("impl", SERVING)
def test_torch_compile_takes_it_whole(impl):
    torch._dynamo.reset()
    q, k, v = inputs(2, 1, 40, 40, 16)
    registry.check_machine()

    def twice(q, k, v, window, cu_seqlens, max_seqlen):
        seen = {"window": window, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return attention(q, k, v, True, impl, enable_gqa=True, **seen) * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    grad_o = torch.randn_like(q)
    for window, ends, longest in (
        (7, None, None),
        (9, None, None),
        (None, (3, 40), None),
        (None, (20, 40), 40),
        (7, (30, 30, 40), 33),
    ):
        seen = {"window": window, "cu_seqlens": None if ends is None else packed(ends)}
        seen["max_seqlen"] = None if longest is None else longest * MANY
        o = compiled(q, k, v, *seen.values())
        found = o, *torch.autograd.grad(o, (q, k, v), grad_o)
        expected = run(impl, q, k, v, 2 * grad_o, True, **seen)
        for x, y in zip(found, (2 * expected[0], *expected[1:]), strict=True):
            torch.testing.assert_close(x, y)


def test_what_passes_are_remembered_by(monkeypatch):
    """All that changes the code of a launch, and nothing that does not: not where documents end."""
    monkeypatch.setattr(again, "_passes", {})
    launched, addresses = [], []
    monkeypatch.setattr(again.Pass, "again", lambda self, device, *at: addresses.append(at))
    x = torch.zeros(1, 1, 8, 16, device=DEVICE)

    def first(*given):
        launched.append(given[7:])
        return again.Pass([None], ())

    call = lambda *seen: again.forward(first, x, x, x, True, None, seen)
    of_two, of_three = packed((3, 8), 1), packed((3, 5, 8), 1)
    for seen in (
        (),
        (3, None),
        (4, None),
        (None, of_two),
        (4, of_two),
        (None, of_three),
        (None, of_three[1:]),
        (None, of_two, 8),
    ):
        for _ in range(2):
            call(*seen)
    assert [len(more) for more in launched] == [0, 2, 2, 2, 2, 2, 2, 3]
    assert len(addresses) == 8 and addresses[3][-1] == of_two.data_ptr() and len(addresses[1]) == 5
    call(None, of_two.clone())
    assert len(launched) == 8


@kernels
def test_ends_are_read_anew_each_time():
    """Also by a launch that is remembered, where documents end differently at the same address."""
    q, k, v = inputs(2, 2, 40, 40, 16)
    cu_seqlens = packed((10, 40))
    for ends in ((10, 40), (25, 40), (0, 40)):
        cu_seqlens.copy_(packed(ends))
        check("flash_triton", q, k, v, True, cu_seqlens=cu_seqlens)
        check("flash_triton", q, k, v, True, cu_seqlens=torch.stack([cu_seqlens] * 2, 1)[:, 0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o = attention(q, k, v, True, "flash_triton", cu_seqlens=cu_seqlens)
        cu_seqlens.zero_()
        o.sum().backward()


@kernels
@pytest.mark.gpu
def test_a_graph_reads_where_documents_end():
    q, k, v = inputs(2, 2, 70, 70, 64, dtype=torch.bfloat16, requires_grad=False)
    cu_seqlens = packed((20, 70))
    call = lambda: attention(q, k, v, True, "flash_triton", cu_seqlens=cu_seqlens, window=100)
    graph, o = captured(call)
    for ends in ((40, 70), (1, 70)):
        cu_seqlens.copy_(packed(ends))
        graph.replay()
        torch.testing.assert_close(o, call(), rtol=0, atol=0)


@kernels
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 40, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dimensions(dtype, head_dim):
    """Also twice the same, bit by bit, where torch's flag for determinism asks for it."""
    for seen in ({"window": 100}, {"cu_seqlens": packed((1, 70, 71, 200), 3)}):
        q, k, v = (fresh(1, h, 600, head_dim, device=DEVICE, dtype=dtype) for h in (4, 2, 2))
        grad_o = torch.randn_like(q)
        check("flash_triton", q, k, v, True, grad_o, **seen)
        torch.use_deterministic_algorithms(True)
        try:
            first, second = (run("flash_triton", q, k, v, grad_o, True, **seen) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize(
    ("seen", "message"),
    [
        *(({"window": x}, f"window is {x!r}; allowed: whole numbers from 1 on") for x in (0, -3, 2.0, True, "4")),
        ({"window": 4, "is_causal": False}, "window is given, and is_causal=False"),
        ({"cu_seqlens": [0, 8], "is_causal": False}, "cu_seqlens is given, and is_causal=False"),
        ({"cu_seqlens": [0.0, 8.0]}, "cu_seqlens is torch.float32; expected a tensor of torch.int32"),
        ({"cu_seqlens": 8}, r"cu_seqlens has shape \(\); expected \(documents \+ 1,\)"),
        ({"cu_seqlens": [0]}, r"cu_seqlens has shape \(1,\)"),
        ({"cu_seqlens": [[0, 8]]}, r"cu_seqlens has shape \(1, 2\)"),
        ({"cu_seqlens": [0, 8], "shape": (2, 1, 8, 16)}, r"q has shape \(2, 1, 8, 16\).*must be \(1, heads, "),
        ({"cu_seqlens": [0, 8], "shape": (1, 8, 16)}, r"must be \(1, heads, total, d\)"),
        ({"cu_seqlens": [0, 8], "keys": 9}, r"k \(1, 1, 9, 16\); with cu_seqlens both must be"),
        ({"window": 3, "keys": 5}, "k .1, 1, 5, 16.; with window=3 the last queries see no key"),
        *(
            ({"cu_seqlens": [0, 8], "max_seqlen": x}, f"max_seqlen is {x!r}; allowed: whole numbers from 1 on")
            for x in (0, -1, 8.0, True)
        ),
        ({"max_seqlen": 8}, "max_seqlen is 8, and cu_seqlens is not given"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(impl, seen, message):
    seen = dict(seen)
    shape, is_causal = seen.pop("shape", (1, 1, 8, 16)), seen.pop("is_causal", True)
    q = torch.zeros(shape, device=DEVICE)
    k = torch.zeros(*shape[:-2], seen.pop("keys", shape[-2]), shape[-1], device=DEVICE)
    if "cu_seqlens" in seen:
        given = torch.tensor(seen["cu_seqlens"], device=DEVICE)
        seen["cu_seqlens"] = given if given.is_floating_point() else given.int()
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, is_causal, impl, **seen)


@pytest.mark.parametrize("impl", SERVING)
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 7], "begins with 0 and ends with 7; expected 0 and total=8"),
        ([0, 9], "begins with 0 and ends with 9; expected 0 and total=8"),
        ([1, 8], "begins with 1"),
        ([0, 5, 3, 8], "falls from 5 to 3; it must never fall"),
    ],
)
def test_ends_that_make_no_sense_are_named_on_a_cpu(impl, ends, message):
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
        attention(q, q, q, True, impl, cu_seqlens=torch.tensor(ends, dtype=torch.int32))


def test_a_document_longer_than_the_longest_is_named_on_a_cpu():
    q, ends = torch.zeros(1, 1, 8, 16), torch.tensor([0, 2, 7, 8], dtype=torch.int32)
    attention(q, q, q, True, cu_seqlens=ends, max_seqlen=5)
    with pytest.raises(ValueError, match="max_seqlen is 4; a document has 5 tokens"):
        attention(q, q, q, True, cu_seqlens=ends, max_seqlen=4)


def test_ends_that_the_host_cannot_look_at():
    """Of many under vmap, and in a trace."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, ends = torch.randn(2, 1, 1, 8, 16, device=DEVICE), torch.stack([packed((3, 8), 1), packed((5, 8), 1)])
    call = lambda q, ends: attention(q, q, q, True, "reference", cu_seqlens=ends)
    each = torch.stack([call(*pair) for pair in zip(q, ends, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(q, ends), each)
    torch.testing.assert_close(make_fx(call)(q[0], ends[0])(q[1], ends[1]), each[1])


def test_tensors_of_one_axis_are_named():
    q = torch.zeros(16, device=DEVICE)
    with pytest.raises(ValueError, match=r"q has shape \(16,\), k \(16,\); expected \(\.\.\., n, d\)"):
        attention(q, q, q, True, window=3)


def test_ends_that_are_elsewhere_or_no_tensor_are_named():
    q = torch.zeros(1, 1, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match=f"cu_seqlens is on meta, q on {DEVICE}"):
        attention(q, q, q, True, cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 8\]; expected a tensor of torch.int32"):
        attention(q, q, q, True, cu_seqlens=[0, 8])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_who_does_not_serve_it_names_who_does(impl):
    q = torch.zeros(1, 4, 8, 16, device=DEVICE)
    given = {"enable_gqa": True, "window": 3, "cu_seqlens": packed((8,), 1)}
    assert set(given) == set(registry.FEATURES)
    for key, what in registry.FEATURES.items():
        k = q[:, :2] if key == "enable_gqa" else q
        able = registry.serving(key)
        if impl not in able:
            with pytest.raises(ValueError) as refused:
                attention(q, k, k, True, impl, **{key: given[key]})
            for word in (impl, what, key, *able):
                assert word in str(refused.value)
        elif availability()[impl] is None and "compiled" not in impl:
            assert attention(q, k, k, True, impl, **{key: given[key]}).isfinite().all()
        assert attention(q, k, k, True, **{key: given[key]}).isfinite().all()  # auto


def test_the_table_in_the_docstring_is_the_registry_s():
    lines = [line.split() for line in attention.__doc__.splitlines()]
    for row in registry.features():
        assert [word for value in row.values() for word in value.split()] in lines
    assert [word for key in registry.features()[0] for word in key.split()] in lines
