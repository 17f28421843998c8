"""fp32 attention by products of bf16 (`hopper.split`): in Triton's interpreter, ahead of time, and on a Hopper GPU."""

import pytest
import torch
from attention_checks import FLOOR, captured, check, compiler, fresh, gpu, relative

from cs336_systems.attention.available import hopper_reason
from cs336_systems.attention.reference import exact_attention
from cs336_systems.attention.triton.tiles import SHARED_MEMORY_KIB, Tiles

pytest.importorskip("triton")

from cs336_systems.attention import flash_triton
from cs336_systems.attention.checks import aot
from cs336_systems.attention.hopper import split_launch as launch
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton import launch as portable

needs_interpreter = pytest.mark.skipif(not portable.INTERPRETED, reason="needs triton's interpreter")
SMALL = (
    Tiles(32, 32, 4, 1),
    (Tiles(32, 16, 4, 1), Tiles(16, 64, 4, 1)),
)  # forward; queries and keys of backward
FORWARD = [(d, tiles[0], False) for table in (launch.MANY, launch.FEW) for d, tiles in table.items()]
BACKWARD = [(d, launch.backward_tiles(d, few), few) for few in (False, True) for d in launch.MANY]
SHIPPED = list(dict.fromkeys(FORWARD + BACKWARD))  # padded head dimension, tiles, whether passes take turns
SPILLS = {  # bytes, at most
    (16, launch.MANY[16][1:]): 512,
    (32, launch.FEW[32][1:]): 128,
    (64, launch.FEW[64][1:]): 512,
    (128, launch.MANY[128][1:]): 1536,
    (128, launch.FEW[128][1:]): 6144,
}


@pytest.fixture(autouse=True)
def nothing_decided_before(monkeypatch):
    """What a test changes decides, and only there."""
    monkeypatch.setattr(again, "_passes", {})


# ------------------------------------------------------------------------------------------------ pieces
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_pieces_add_up_and_the_padding_is_zero(device):
    q = fresh(2, 70, 6, 24, requires_grad=False, scale=1e3, device=device).transpose(1, 2)
    k = fresh(2, 3, 130, 24, requires_grad=False, device=device)
    v = fresh(2, 3, 24, 130, requires_grad=False, scale=1e-3, device=device).transpose(2, 3)
    q[0, 0, 0, :4] = k[1, 2, 129, 20:] = torch.tensor([0.0, -1.0, 3e38, 1e-30])
    first = launch.split_all(q, k, v, torch.empty_like(q), torch.empty(q.shape[:3], device=device), True)
    for name, x in (("q", q), ("k", k), ("v", v)):
        n, part = x.shape[2], first.tensors[f"{name}_pieces"]
        three = part.double().view(3, *x.shape[:2], -1, 32)
        assert not three[..., n:, :].any() and not three[..., 24:].any()
        exact = x.double()
        found = three.sum(0)[..., :n, :24]
        assert ((found - exact).abs() <= 2.0**-24 * exact.abs()).all()
        assert three[1:].any()  # one piece would not do


def test_rows_are_padded_to_whole_tiles_of_every_kernel():
    assert [launch.padded_rows(n) for n in (1, 128, 129)] == [128, 128, 256]
    for _, shipped, _ in SHIPPED:
        for tiles in (shipped,) if isinstance(shipped, Tiles) else shipped:
            assert launch.PADDING % tiles.block_m == 0 and launch.PADDING % tiles.block_n == 0


@pytest.mark.parametrize("d", launch.MANY)
def test_few_programs_get_tiles_of_their_own(d):
    (many, of_queries, of_keys), (few, *_) = launch.MANY[d], launch.FEW[d]
    programs = 66 * launch.MANY_FORWARD[d]
    assert launch.forward_tiles(d, 2, programs * many.block_m, 132) == many
    assert launch.forward_tiles(d, 2, (programs - 1) * many.block_m, 132) == few
    assert launch.forward_tiles(d - 1, 2, (programs - 1) * many.block_m + 1, 132) == many
    queries, keys = 65 * of_queries.block_m, 65 * of_keys.block_n
    assert launch.few_backward(d, 2, queries, keys, 132)
    assert not launch.few_backward(d - 1, 2, queries + 1, keys, 132)
    assert not launch.few_backward(d, 2, queries, keys + 1, 132)
    for few, table in ((True, launch.FEW), (False, launch.MANY)):
        assert launch.backward_tiles(d - 1, few) == table[d][1:]


@pytest.mark.parametrize("table", [launch.MANY, launch.FEW])
def test_programs_of_one_launch_have_the_same_options(table):
    for _, queries, keys in table.values():
        assert (queries.num_warps, queries.num_stages) == (keys.num_warps, keys.num_stages)


# ------------------------------------------------------------------------------------------------ who is served
def test_who_is_served(monkeypatch):
    x = torch.zeros(1, 2, launch.MIN_LENGTH, 128)
    parts = "forward", "backward"

    def served(q, k):
        found = {launch.serves(part, q, k, k) for part in parts}
        assert len(found) == 1
        return found.pop()

    assert served(x, x)
    assert served(*[x[..., :17]] * 2) and served(*[x.transpose(1, 2).contiguous().transpose(1, 2)] * 2)
    assert not served(*[x.bfloat16()] * 2)
    assert not served(*[x.new_zeros(1, 1, launch.MIN_LENGTH, 129)] * 2)
    short = x[:, :, 1:]
    assert not served(short, x) and not served(x, short)
    huge = torch.zeros(1).expand(2**11, 2**10, launch.MIN_LENGTH, 16)
    assert not served(huge, huge)
    # as many portable programs of 16 rows as two for each multiprocessor
    for multiprocessors, forward in ((31, True), (32, False)):
        monkeypatch.setattr(launch, "_multiprocessors", lambda device, n=multiprocessors: n)
        assert [launch.serves(part, x, x, x) for part in parts] == [forward, True]
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 1)
    torch.set_float32_matmul_precision("high")
    assert not served(x, x)


def test_both_passes_are_deterministic(monkeypatch):
    monkeypatch.setattr(flash_triton, "_launchers", lambda device_index: {"split": launch})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    x = torch.zeros(1, 2, launch.MIN_LENGTH, 64)
    assert [flash_triton._kernels(part, x, x, x) for part in ("forward", "backward")] == ["split", "split"]


# ------------------------------------------------------------------------------------------------ interpreted
def both_passes(q, k, v, do, is_causal, tiles=SMALL):
    forward, backward = tiles
    o, logsumexp = launch.launch_forward(q, k, v, is_causal, forward)
    return [o, *launch.launch_backward(q, k, v, o, logsumexp, do, is_causal, backward)], logsumexp


SHAPES = [
    (2, 2, 70, 70, 16),
    (2, 1, 33, 65, 24),
    (3, 1, 65, 33, 40),
]  # heads of queries and keys; lengths; dimension
MULTIPROCESSORS = {"whole": 1, "columns": 132, "one number": 1}  # by gradient; with 132 the programs are few


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "kind", "is_causal"),
    [(s, g, (i + j) % 2 == 0) for i, s in enumerate(SHAPES) for j, g in enumerate(MULTIPROCESSORS)],
)
def test_interpreted(shape, kind, is_causal, monkeypatch):
    """Each two of shape, gradient and mask meet."""
    heads, of_keys, num_queries, num_keys, d = shape
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: MULTIPROCESSORS[kind])
    q = fresh(1, num_queries, heads, d, requires_grad=False).transpose(1, 2)
    k = fresh(1, of_keys, num_keys, d, requires_grad=False)
    v = fresh(1, of_keys, d, num_keys, requires_grad=False).transpose(2, 3)
    do = {"whole": q.shape, "columns": (1, heads, num_queries, 1), "one number": (1, 1, 1, 1)}[kind]
    do = fresh(*do, requires_grad=False).expand(1, heads, num_queries, d)
    found, _ = both_passes(q, k, v, do, is_causal)
    exact = exact_attention(q, k, v, do, is_causal)
    size = max(x.norm().item() for x in exact)
    for name, x, y, like in zip(("O", "dQ", "dK", "dV"), found, exact, (q, q, k, v), strict=True):
        assert relative(x, y, size) < FLOOR[torch.float32], name
        assert x.stride() == torch.empty_like(like).stride()


# ------------------------------------------------------------------------------------------------ ahead of time
@pytest.mark.table
@pytest.mark.parametrize("options", [{"is_causal": False, "even": False}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize(("d", "tiles", "in_turns"), SHIPPED)
def test_every_configuration_compiles(d, tiles, in_turns, options):
    if not isinstance(tiles, Tiles):
        options = options | {"in_turns": in_turns}
    check_compiled(d, tiles, SPILLS.get((d, tiles), 0), **options)


@pytest.mark.versions
def test_one_configuration_compiles():
    check_compiled(64, launch.MANY[64][0], 0)


def check_compiled(d, tiles, spills, **options):
    found = compiler().submit(aot.compile_split_kernel, d, tiles, **options).result()
    assert found.shared_bytes <= SHARED_MEMORY_KIB[90] * 1024
    assert "wgmma.mma_async" in found.ptx and "mma.sync" not in found.ptx
    assert not found.serialized and not found.faults
    assert found.spill_bytes <= spills


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.fixture
def always(monkeypatch):
    """Short sequences and few programs are served as well."""
    if reason := hopper_reason():
        pytest.skip(reason)
    monkeypatch.setattr(launch, "MIN_LENGTH", 1)
    monkeypatch.setattr(launch, "PORTABLE_FORWARD", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (1000, 200), (1024, 1024)]
)
@pytest.mark.parametrize("d", [16, 24, 32, 40, 64, 96, 128])
@pytest.mark.parametrize("few", [False, True], ids=["many programs", "few programs"])
def test_lengths_and_head_dimensions(d, lengths, is_causal, few, always, monkeypatch):
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 10**6 if few else 1)
    for heads in (2, 6):
        q, k, v = gpu(2, heads, lengths[0], d), gpu(2, 2, lengths[1], d), gpu(2, 2, lengths[1], d)
        assert flash_triton.kernels_for(q, k, v) == {"forward": "split", "backward": "split"}
        check("flash_triton", q, k, v, is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [(2, 3, 333, 64), (1, 3, 1, 64), (2, 1, 333, 1), (1, 1, 1, 1)])
def test_gradients_of_every_layout(axes, always):
    do = gpu(*axes, requires_grad=False).expand(2, 3, 333, 64)
    q, k, v = (gpu(2, 333, 3, 64).transpose(1, 2), gpu(2, 3, 333, 64), gpu(2, 3, 64, 333).transpose(2, 3))
    check("flash_triton", q, k, v, True, do)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_small_and_large_scores(scale, always):
    q, k, v = (gpu(1, 2, 500, 128, scale=scale) for _ in range(3))
    largest = (q.double() @ k.double().transpose(-1, -2)).abs().max().item() * 128**-0.5
    check("flash_triton", q, k, v, True, largest_score=largest)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 16])
def test_launching_again_takes_the_short_way_and_does_as_the_first(heads, always, monkeypatch):
    q, k, v, do = (gpu(1, heads, 1500, 128, requires_grad=False) for _ in range(4))
    first = both_passes(q, k, v, do, True, (None, None))
    launches = [x for found in again._passes.values() for x in found.launches]
    assert len(launches) == 2 + 3
    assert all(x.launcher is not None for x in launches)
    others = [x.clone() for x in (q, k, v, do)]  # at other addresses
    monkeypatch.setattr(portable.First, "launch", None)  # the long way
    second = both_passes(*others, True, (None, None))
    for x, y in zip((*first[0], first[1]), (*second[0], second[1]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_streams_keep_their_pieces_apart(always):
    inputs = [[gpu(1, 4, 2000, 64, requires_grad=False) for _ in range(4)] for _ in range(2)]
    alone = [both_passes(*x, True, (None, None))[0] for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(5):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(both_passes(*inputs[i], True, (None, None))[0])
    torch.cuda.synchronize()
    for i in range(2):
        for other in found[i]:
            assert all(torch.equal(x, y) for x, y in zip(other, alone[i], strict=True))


@pytest.mark.gpu
def test_long_sums_do_not_lean_to_one_side(always):
    """Sums over 16,384 keys of the same sign: what a tensor core cuts off must not add up.

    dP is a number of D's size here, whichever kernels compute it, so dQ has an error of several roundings: the
    portable kernels, whose sums are accurate, have the same.
    """
    q, k, do = (gpu(1, 1, 16384, 64, requires_grad=False) for _ in range(3))
    v = gpu(1, 1, 16384, 64, requires_grad=False) + 1
    found, _ = both_passes(q, k, v, do, False, (None, None))
    o, logsumexp = portable.launch_forward(q, k, v, False)
    others = (o, *portable.launch_backward(q, k, v, o, logsumexp, do, False))
    exact = exact_attention(q, k, v, do, False)
    size = max(x.norm().item() for x in exact)
    for name, x, other, y in zip(("O", "dQ", "dK", "dV"), found, others, exact, strict=True):
        bound = max(2 * FLOOR[torch.float32], 2 * relative(other, y, size))
        assert relative(x, y, size) < bound < 1e-5, name


@pytest.mark.gpu
def test_in_a_cuda_graph(always):
    q, k, v, do = (gpu(1, 2, 1200, 64, requires_grad=False) for _ in range(4))
    graph, (found, _) = captured(lambda: both_passes(q, k, v, do, True, (None, None)))
    for x in (q, k, v, do):
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(found, both_passes(q, k, v, do, True, (None, None))[0], strict=True):
        assert torch.equal(x, y)
