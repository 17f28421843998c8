"""The Hopper kernels: what their launchers take, what the compiler says of them, and on a GPU their results."""

import ast
import functools
import math
import random
import types
from pathlib import Path

import pytest
import torch
from attention_checks import (
    captured,
    compiler,
    flat,
    fresh,
    more_spills,
    relative,
    tensor_meta,
    triton_launcher,
)

pytest.importorskip("triton")
import triton

from cs336_systems.attention import attention, available, flash_triton
from cs336_systems.attention.available import hopper_reason
from cs336_systems.attention.hopper import backward_ends, configs, split_launch
from cs336_systems.attention.hopper import launch as hopper
from cs336_systems.attention.reference import exact_attention
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton import launch as portable
from cs336_systems.attention.triton.tiles import SHARED_MEMORY_KIB

DTYPES = [torch.float16, torch.bfloat16]
zeros = functools.partial(torch.zeros, dtype=torch.bfloat16)


def gpu(*shape, dtype=torch.bfloat16, requires_grad=False):
    return fresh(*shape, dtype=dtype, device="cuda", requires_grad=requires_grad)


def name(value):
    return str(value).removeprefix("torch.").replace(", ", "x")


TABLES = configs.FORWARD_TABLES


# --------------------------------------------------------------------------------- what they take
def test_layouts_that_tma_reads():
    x = zeros(2, 3, 100, 64)
    idle_strides = x[:1, :1].as_strided((1, 1, 100, 64), (0, 3, 64, 1))
    for read in (x, zeros(2, 100, 3, 64).transpose(1, 2), zeros(2, 3, 100, 192)[..., 64:128], idle_strides):
        assert hopper.addressable(read)
    for other in (
        x.transpose(2, 3), x[..., ::2], x[:, :1].expand(2, 3, 100, 64), x[:, :, :1].expand(2, 3, 100, 64),
        zeros(2, 3, 100, 65)[..., :64], zeros(2, 3, 100, 72)[..., 1:65],
    ):  # fmt: skip
        assert not hopper.addressable(other)


def test_reasons():
    x, wide = zeros(1, 2, 100, 64), zeros(1, 2, 100, 264)
    for tensors, reason in (
        ([x] * 3, None),
        ([x.float()] * 3, "torch.float32: they compute in 16 bits"),
        ([wide] * 3, "head dimension 264: 33 to 256"),
        ([x[..., :32]] * 3, "head dimension 32: 33 to 256"),
        ([x[..., :36]] * 3, "head dimension 36: multiples of 8"),
        ([x, x, x[..., :1].expand(x.shape)], "v: TMA cannot read strides"),
    ):
        assert str(hopper.reason_against(*tensors)).startswith(str(reason))


def test_configurations_that_would_hang_or_be_wrong_are_refused():
    groups, blocks = "1, 2, 3", "64, 128"
    for wrong, allowed in (
        (dict(groups=0), groups), (dict(groups=4), groups), (dict(block_n=32), blocks), (dict(block_n=96), blocks),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"allowed: {allowed}$"):
            hopper.Forward(**dict(groups=2, block_n=128, stages=2, overlap=False) | wrong)
    with pytest.raises(
        ValueError, match=r"alone=True with groups=2, .*; allowed: groups=1, block_n=64, stages=1"
    ):
        hopper.Forward(2, 64, 1, False, alone=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_they_are_not_used():
    assert hopper_reason() in (
        "interpreted",
        "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)",
    )


@pytest.mark.parametrize(("version", "tried"), [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1a2b3c", True),
                                                ("3.10.0", False), ("4.0.0", False)])  # fmt: skip
def test_the_switch_and_a_triton_that_they_were_not_tried_with(version, tried, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(available, "triton_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CS336_HOPPER", raising=False)
    assert (available.untried_triton() is None) == tried
    for asked, unable, used in ((None, not tried, tried), ("0", not tried, False), ("1", False, True)):
        if asked:
            monkeypatch.setenv("CS336_HOPPER", asked)
        assert (available.hopper_unable() is not None) == unable
        assert (hopper_reason() is None) == used
        if asked == "0" and tried:
            assert hopper_reason() == "CS336_HOPPER=0 turns them off"
    monkeypatch.setenv("CS336_HOPPER", "yes")
    with pytest.raises(ValueError, match=r"'yes'; allowed: 0, 1"):
        hopper_reason()


def on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index: 132)


def test_who_is_served(monkeypatch):
    on_a_hopper_gpu(monkeypatch)
    x = zeros(1, 40, 1024, 128)
    spread = zeros(1, 1, 1024, 128).expand(1, 40, 1024, 128)
    unaligned = zeros(x.numel() + 8)[1 : x.numel() + 1].view(x.shape)
    for part in ("forward", "backward"):
        assert hopper.serves(part, x, x, x)
        assert hopper.serves(part, *[x.half()] * 3)
        assert not hopper.serves(part, *[x.float()] * 3)
        for other in (spread, unaligned):
            assert not hopper.serves(part, other, x, x)
            assert not hopper.serves(part, x, other, other)
        for other in (spread, unaligned):
            assert not hopper.serves(part, x, x, other)
        shortest = x[:, :, :64]
        assert hopper.serves(part, shortest, x, x) and hopper.serves(part, x, shortest, shortest)
        short = x[:, :, :63]
        assert not hopper.serves(part, x, short, short) and not hopper.serves(part, short, shortest, shortest)
        assert hopper.serves(part, short, x, x) is (part == "backward")  # four keys and more for each query
        fewer = x[:, :, :251]
        assert not hopper.serves(part, short, fewer, fewer)


@pytest.mark.parametrize("d", [136, 192, 200, 256])
def test_wide_heads_are_served_without_limits(d, monkeypatch):
    on_a_hopper_gpu(monkeypatch)
    q, k = zeros(1, 40, 1024, d), zeros(1, 8, 1024, d)
    for of_keys in (q, k):
        for part in ("forward", "backward"):
            assert hopper.serves(part, q, of_keys, of_keys)
            assert not hopper.serves(part, q, of_keys, of_keys, window=100)
            assert not hopper.serves(part, q, of_keys, of_keys, packed=True)
    columns = 160 if d == 136 else 192 if d == 192 else 256
    for heads, table in ((8, configs.FORWARD), (9, configs.FORWARD_LARGE), (500, configs.FORWARD_LARGE)):
        for is_causal in (False, True):
            assert hopper.forward_config(heads, 1024, 1024, d, is_causal, 132) == table[columns]


def test_short_backward_passes_are_left_to_the_portable_kernels(monkeypatch):
    """132 programs of 16 rows are the most that a GPU of 132 multiprocessors runs at once, one each."""
    on_a_hopper_gpu(monkeypatch)
    for heads, queries, keys, few in (
        (1, 2112, 2112, True), (1, 2113, 2113, False), (4, 528, 528, True), (4, 529, 529, False),
        (8, 256, 256, True), (1, 2112, 600, True), (1, 256, 257, False), (1, 2113, 600, False),
        # of few keys for many queries up to 33 programs of 128 keys
        (33, 512, 128, True), (34, 512, 128, False), (16, 2113, 129, True), (17, 2113, 129, False),
        (33, 512, 129, False),
    ):  # fmt: skip
        q, k = (zeros(1, heads, n, 64) for n in (queries, keys))
        assert hopper.serves("forward", q, k, k)
        assert hopper.serves("backward", q, k, k) is not few


def test_what_grouped_queries_are_launched_with(launched):
    """Each head of queries has programs of its own, and dK and dV of a group are summed."""
    keys, launches = launched
    for heads, key_heads, n in ((2, 2, 60), (8, 2, 60), (8, 2, 200)):
        q, k = zeros(3, heads, n, 128), zeros(3, key_heads, 1000, 128)
        o, logsumexp = hopper.launch_forward(q, k, k, False)
        hopper.launch_backward(q, k, k, o, logsumexp, o, False)
        _, prepare, main, finish, *more = launches
        few = "few_queries_kernel", (16 * 3 * heads, 1, 1)
        assert main[:2] == (few if n == 60 else ("backward_keys_kernel", (132, 1, 1)))
        assert [x[0] for x in (prepare, finish)] == ["prepare_kernel", "finish_kernel"]
        assert prepare[1] == finish[1] == (triton.cdiv(n, 64) * 3 * heads, 1, 1)
        made = (3, heads, 1000, 128)
        assert [tuple(shape) for shape, *_ in main[2][:6]] == [*(x.shape for x in (q, k, k, q)), made, made]
        assert [x[:2] for x in more] == [("sum_kernel", (16 * 6, 2, 1))] * (heads > key_heads)
        launches.clear()
    assert len(set(keys)) == 6


def test_what_wide_heads_are_launched_with(launched):
    """Backward: a program for each 64 keys, of heads in pieces of 64 columns; the sum has 256."""
    _, launches = launched
    for d, heads, n, m in ((136, 6, 100, 200), (256, 6, 60, 1000), (192, 12, 100, 200)):
        q, k = zeros(3, heads, n, d), zeros(3, 6, m, d)
        o, logsumexp = hopper.launch_forward(q, k, k, True)
        hopper.launch_backward(q, k, k, o, logsumexp, o, True)
        _, prepare, main, finish, *more = launches
        assert main[:2] == (
            "backward_wide_kernel",
            (triton.cdiv(m, 64) * 3 * heads, 1, 1),
        )
        assert {tuple(block) for _, _, block, *_ in main[2][:6]} == {(1, 1, 64, 64)}
        assert list(main[2][6][0]) == [2 * 3 * heads, triton.cdiv(n, 64) * 64]
        assert prepare[-1][-5] == 256
        assert prepare[1] == finish[1] == (triton.cdiv(n, 64) * 3 * heads, 1, 1)
        assert [x[0] for x in more] == ["sum_kernel"] * (heads == 12)
        launches.clear()


def test_what_windows_are_launched_with(launched):
    """Tiles without pairs, as many programs as multiprocessors, zeros to add dQ to, and no program for few queries."""
    keys, launches = launched
    for n, window, programs, backward, zeroed in (
        (1000, None, 96, "backward_keys_kernel", False), (1000, 100, 96, "backward_keys_kernel", True),
        (3000, None, 288, "backward_keys_kernel", True), (3000, 500, 132, "backward_keys_kernel", True),
        (3000, 700, 132, "backward_keys_kernel", True), (60, None, 12, "few_queries_kernel", True),
        (60, 10, 12, "backward_keys_kernel", True),
    ):  # fmt: skip
        x, seen = zeros(1, 12, n, 128), () if window is None else (window, None)
        o, logsumexp = hopper.launch_forward(x, x, x, True, hopper.Forward(2, 128, 2, True), seen)
        hopper.launch_backward(x, x, x, o, logsumexp, o, True, seen=seen)
        (_, grid, *_, forward), (*_, prepare), (name, *_, main), _ = launches
        assert grid == (programs, 1, 1) and name == backward and prepare[-2] is zeroed
        assert window in forward and (window in main or backward == "few_queries_kernel")
        launches.clear()
    assert len(set(keys)) == 14


def test_what_documents_are_launched_with(launched):
    """A program for each tile, in configurations by the longest, or their mean length, and zeros to add dQ to."""
    keys, launches = launched
    x = zeros(1, 12, 30_000, 64)
    for documents, window, longest, programs in (
        (1, None, (), 1884),
        (10, None, (), 5628),
        (10, 100, (), 5628),
        (1, 20_000, (), 1884),
        (30_000, None, (), 5628),  # filled up
        (30_000, None, (1024,), 5628),
        (30_000, None, (32_768,), 1884),
        (30_000, 100, (32_768,), 5628),
        (10, None, (1000,), 5628),
    ):
        seen = window, zeros(documents + 1, dtype=torch.int32)
        o, logsumexp = hopper.launch_forward(x, x, x, True, seen=seen + longest)
        hopper.launch_backward(x, x, x, o, logsumexp, o, True, seen=seen)
        bounds, (_, grid, _, pointers, _), again_bounds, (*_, prepare), (name, _, _, of_main, _), _ = launches
        assert grid == (programs, 1, 1) and pointers[1:] == of_main[1:] == [(torch.int32, True)]
        assert name == "backward_keys_kernel" and prepare[-2] is True
        assert bounds == again_bounds and bounds[0] == "bounds_kernel" and bounds[-1][2] == window
        launches.clear()
    assert len(set(keys)) == 15


def test_whose_kernels_windows_and_documents_are_for(monkeypatch):
    on_a_hopper_gpu(monkeypatch)
    launchers = {"hopper": hopper, "split": split_launch}
    monkeypatch.setattr(flash_triton, "_launchers", lambda device_index: launchers)
    for dtype, d, without, limited in (
        (torch.bfloat16, 128, hopper, hopper), (torch.bfloat16, 136, hopper, portable),
        (torch.float32, 128, split_launch, portable),
    ):  # fmt: skip
        x = zeros(1, 40, 1024, d, dtype=dtype)
        monkeypatch.setattr(type(x), "is_cuda", True)
        for part in ("forward", "backward"):
            assert flash_triton._launcher(part, x, x, x) is without
            for window, cu_seqlens in ((100, None), (100, zeros(2)), (None, zeros(2))):
                assert flash_triton._launcher(part, x, x, x, window, cu_seqlens) is limited


def test_the_flag_for_determinism_turns_off_backward_only(monkeypatch):
    on_a_hopper_gpu(monkeypatch)
    monkeypatch.setattr(flash_triton, "_launchers", lambda device_index: {"hopper": hopper})
    x = zeros(1, 3, 1024, 64)

    def served():
        return [flash_triton._kernels(part, x, x, x) for part in ("forward", "backward")]

    assert served() == ["hopper", "hopper"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert served() == ["hopper", None]


class Firsts:
    """Counts how often a pass is launched first, and again."""

    def __init__(self, monkeypatch):
        self.first, self.again = 0, 0
        monkeypatch.setattr(again, "_passes", {})
        monkeypatch.setattr(again, "driver", of_one_stream())

    def __call__(self, *tensors):
        self.first += 1
        launch = types.SimpleNamespace(call=lambda stream, at: (self.once_more, ()), names=())
        return again.Pass([launch], ())

    def once_more(self):
        self.again += 1


def shifted(x):
    """The same numbers in the same layout, 2 bytes behind an aligned address."""
    return torch.empty(x.numel() + 8, dtype=x.dtype)[1 : x.numel() + 1].as_strided(x.shape, x.stride(), 1)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_what_a_pass_is_remembered_by(part, monkeypatch):
    """Whatever of a call changes what is launched makes it a first one, once."""
    firsts, x = Firsts(monkeypatch), zeros(2, 3, 64, 64)
    names = ("q", "k", "v") if part == "forward" else ("q", "k", "v", "o", "do")
    given = dict.fromkeys(names, x) | (
        {} if part == "forward" else {"logsumexp": zeros(2, 3, 64, dtype=torch.float32)}
    )
    given |= {"is_causal": True, "config": None}

    def call(**changed):
        getattr(again, part)(firsts, **given | changed)

    transposed = zeros(2, 64, 3, 64).transpose(1, 2)
    changes = [
        {},
        {"is_causal": False},
        {"config": "small"},
        {"k": zeros(2, 3, 70, 64), "v": zeros(2, 3, 70, 64)},
    ]
    changes += [{name: change} for name in names for change in (transposed, shifted(x))]
    changes += [{name: x.half()} for name in names[3:]]  # which are refused, not taken for bf16
    changes += [dict.fromkeys(names, x.half()), dict.fromkeys(names, x.float())]
    for change in changes * 2:
        call(**change)
    assert (firsts.first, firsts.again) == (len(changes), len(changes))
    torch.set_float32_matmul_precision("high")
    call(**changes[-1])
    call()
    assert firsts.first == len(changes) + 1
    if part == "backward":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        call()
        assert firsts.first == len(changes) + 2
    before = firsts.again
    monkeypatch.setattr(again, "watched", lambda: True)
    call()
    assert firsts.again == before


def test_calls_are_kept_by_stream_and_addresses(monkeypatch):
    made, current = [], [1]
    active = types.SimpleNamespace(get_current_stream=lambda index: current[0])
    monkeypatch.setattr(again, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(again, "_calls", {})
    launched = []

    def call(stream, at):
        made.append((stream, at))
        return launched.append, ((stream, at),)

    launch = types.SimpleNamespace(call=call, names=("q",))
    known, other = (again.Pass([launch], ("q",)) for _ in range(2))
    cpu = torch.device("cpu")
    for stream, of, address in ((1, known, 5), (1, known, 6), (2, known, 5), (1, other, 5)) * 2:
        current[0] = stream
        of.again(cpu, address)
    assert len(made) == 4 and launched == made * 2


def of_one_stream():
    return types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=lambda index: 7))


@pytest.fixture
def launched(monkeypatch):
    """Lists of the keys that launches are remembered by, and of what they would be made with."""
    keys, launches = [], []

    class Forgetful(dict):
        def get(self, key):
            keys.append(key)

        def __setitem__(self, key, found):
            pass

    def launch(first, kernel, grid, descriptors=(), options=None, **values):
        arguments, names = first.arguments(kernel, **values)
        values = [*arguments.values(), options or {}]
        seen = [(x.shape, x.strides, x.block_shape, repr(x.layout), x.base.dtype) for _, x in descriptors]
        of_pointers = [(x.dtype, x.data_ptr() % 16 == 0) for x in values[: len(names)]]
        launches.append((kernel.__name__, grid, seen, of_pointers, values[len(names) :]))

    monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index: 132)
    monkeypatch.setattr(portable.First, "launch", launch)
    monkeypatch.setattr(again, "_passes", Forgetful())
    return keys, launches


def test_what_launches_share_lies_where_launches_look_for_it(monkeypatch):
    """One behind the other in one buffer, each where TMA can read it."""
    shapes = {"stats": (6, 64), "counters": (7,), "tile": (1, 3, 64, 40)}
    dtypes = dict(zip(shapes, (torch.float32, torch.int32, torch.float16), strict=True))
    scratch = {name: (shapes[name], dtypes[name]) for name in shapes}
    x = zeros(1, 3, 10, 40)
    first = portable.First(x, x, x, x, zeros(1, 3, 10), True, scratch=scratch)
    views = [first.tensors[name] for name in shapes]
    start, end = views[0].data_ptr(), 0
    for view, (name, at) in zip(views, first.done.offsets.items(), strict=True):
        assert (tuple(view.shape), view.dtype) == (shapes[name], dtypes[name])
        assert view.data_ptr() == start + at and at % 16 == 0 and end <= at < end + 128
        end = at + view.nbytes
    assert end <= first.done.size < end + 128
    seen = []
    monkeypatch.setattr(again, "_calls", {})
    monkeypatch.setattr(again, "driver", of_one_stream())
    monkeypatch.setattr(torch, "empty", lambda size, **_: seen.append(size) or views[0])
    names = "tile", None, "v", "stats", "counters"
    launch = types.SimpleNamespace(call=lambda stream, at: (seen.append, (at,)), names=names)
    first.done.launches.append(launch)
    first.done.again(x.device, 1, 2, 3, 4, 5)
    stats, counters, tile = (x.data_ptr() for x in views)
    assert seen == [first.done.size, [tile, None, 3, stats, counters]]


def test_larger_programs_for_many_queries_that_see_many_keys():
    few, small, large, long = TABLES
    for batch_heads, queries, keys, d, is_causal, expected in (
        (1, 4096, 4096, 64, False, few), (16, 512, 512, 64, False, few), (16, 512, 512, 80, True, few),
        # without a mask: enough keys for three groups, or not
        (512, 384, 384, 64, False, long), (512, 384, 383, 64, False, small), (768, 1024, 768, 96, False, long),
        (768, 1024, 767, 96, False, large), (4, 65536, 49152, 128, False, long), (4, 65536, 49151, 128, False, large),
        (768, 128, 128, 80, False, large), (768, 128, 128, 128, False, large),
        # shares are even, or not: of the multiprocessor that has most
        (18, 4096, 1535, 64, False, long), (51, 640, 640, 64, False, small), (9, 1984, 1984, 128, False, long),
        (20, 1024, 1024, 128, False, long), (17, 2048, 2048, 128, False, large), (23, 1024, 1024, 128, False, small),
        (12, 2048, 2048, 64, False, long), (33, 640, 640, 96, False, long), (38, 640, 640, 96, False, small),
        # rows past the last query
        (768, 320, 4096, 64, False, small), (768, 192, 192, 96, False, small), (150, 300, 300, 128, False, small),
        # few programs of one group share a multiprocessor in twos
        (32, 1024, 1024, 64, False, large), (32, 1024, 768, 64, False, small), (33, 2048, 1024, 64, False, small),
        (1, 16384, 16384, 64, True, large), (16, 4096, 4096, 64, True, large), (22, 1537, 1537, 64, True, small),
        # with a mask: keys seen, pairs that are even or not, rows past the last query, and how many there are
        (768, 1024, 1024, 64, True, small), (768, 3072, 3072, 64, True, long), (768, 3071, 3071, 64, True, small),
        (67, 512, 512, 96, True, small), (768, 512, 512, 96, True, large), (768, 256, 256, 96, True, large),
        (768, 255, 255, 128, True, small), (51, 640, 640, 128, True, large), (768, 777, 777, 128, True, small),
        (768, 2048, 1024, 96, True, small), (768, 2048, 1538, 96, True, large), (768, 3072, 3072, 96, True, long),
        (16, 3072, 3072, 96, True, large), (768, 4096, 4096, 128, True, large), (4, 49152, 49152, 128, True, long),
    ):  # fmt: skip
        config = hopper.forward_config(batch_heads, queries, keys, d, is_causal, 132)
        assert config == expected[hopper.columns_of(d)], (batch_heads, queries, keys, d, is_causal)
    assert all(len({table[d] for table in TABLES}) == 4 for d in (64, 80, 96, 128))


def test_full_tiles_of_queries():
    one, two, three = (hopper.Forward(n, 128, 2, False) for n in (1, 2, 3))
    for config, columns, batch_heads, queries, full in (
        (one, 64, 4, 6528, 102), (three, 64, 4, 64, 1), (three, 80, 48, 2048, 11), (three, 96, 64, 3001, 16),
        (three, 64, 768, 1152, 6), (three, 64, 768, 1024, 5), (three, 96, 4, 6528, 33), (three, 64, 4, 32768, 165),
        (three, 128, 768, 1024, 6), (two, 64, 4, 32768, 256),
    ):  # fmt: skip
        found = configs.full_tiles(config, columns, batch_heads, queries, 132)
        assert found == full, (batch_heads, queries)


def test_chains_of_tiles_of_queries():
    for batch_heads, queries, keys, is_causal, chain in (
        (2000, 128, 128, False, 2), (476, 128, 128, False, 2), (475, 128, 128, False, 1), (476, 128, 129, False, 1),
        (1056, 256, 256, False, 2), (1055, 256, 256, False, 1), (5000, 128, 257, False, 1), (60, 1024, 77, False, 2),
        (238, 256, 256, True, 2), (5000, 515, 514, True, 1), (5000, 512, 512, True, 2),
    ):  # fmt: skip
        found = configs.chain_of(configs.FORWARD_OF_SHORT[64], batch_heads, queries, keys, is_causal, 132)
        assert found == chain, (batch_heads, queries, keys)


def test_even_pairs():
    two = hopper.Forward(2, 128, 2, True)
    for batch_heads, queries, keys, even in (
        (132, 2048, 2048, True), (128, 2048, 2048, True), (132, 2048, 2000, False), (9, 2048, 2048, False),
        (16, 16384, 16384, False), (65, 1024, 1024, True), (65, 256, 256, False), (6, 1, 70, False),
    ):  # fmt: skip
        assert hopper.even_pairs(two, batch_heads, queries, keys, 132) is even, (batch_heads, queries, keys)


def test_few_queries_and_many_keys():
    for queries, keys, d, few in (
        (1, 1, 64, True), (64, 64, 128, True), (65, 10_000, 128, False), (65, 260, 64, True), (65, 259, 64, False),
        (128, 512, 64, True), (129, 10_000, 64, False),
    ):  # fmt: skip
        assert hopper.few_queries(queries, keys, d) is few


def test_a_section_is_what_the_cache_holds():
    assert hopper.section_of(16, 4 * 16384 * 64) == 4
    assert hopper.section_of(3, 10 * 2**20) == 3 and hopper.section_of(4, 10 * 2**20) == 2
    assert hopper.section_of(100, 2**40) == 1
    assert hopper.section_of(3, 1, exact=True) == 3 and hopper.section_of(3, 2**40, exact=True) == 1


# --------------------------------------------------------------------------------- launching again
@pytest.fixture
def recorded(monkeypatch):
    """Triton's launcher of a compiled kernel with two descriptors among its arguments, and the calls that reach C."""
    calls, meta = [], tensor_meta([1, 64])
    run = triton_launcher(calls, [meta, meta, None, None, None], True, monkeypatch)
    compiled = types.SimpleNamespace(run=run, function="function", packed_metadata="packed")
    described = tuple(again.Described([n, 64], [64, 1], meta) for n in (100, 200))
    return again.Launch(compiled, (7, 1, 1), ("q", "k", "l"), (5, 64), described), calls


def maps(call):
    return [x for x in flat(call) if isinstance(x, tuple) and x[0] == "map"]


def calls_by_both_ways(launch, addresses, monkeypatch):
    """The launcher in C of a launch, and the long way."""
    monkeypatch.setattr(again, "untried_triton", lambda: None)
    assert launch.launcher is not None, "this version keeps it elsewhere: launches take the long way"
    short = launch.call("stream", addresses)
    vars(launch)["launcher"] = None
    return short, launch.call("stream", addresses)


@pytest.mark.versions
def test_a_launch_made_again_is_triton_s_own(recorded, monkeypatch):
    launch, calls = recorded
    for launcher, arguments in calls_by_both_ways(launch, [0x100, 0x200, 0x300], monkeypatch):
        launcher(*arguments)
    short, long = map(flat, calls)
    assert short == long and 0x300 in short
    assert maps(calls[0]) == [
        ("map", address, "3", "2", "9", "[1, 64]", f"[{n}, 64]", "[64, 1]", "0")
        for address, n in ((0x100, 100), (0x200, 200))
    ]


@pytest.mark.versions
def test_so_is_one_without_descriptors(recorded, monkeypatch):
    described, calls = recorded
    launch = again.Launch(described.compiled, described.grid, ("l",), described.rest)
    launch.compiled.run.launch = lambda *args: calls.append(args)  # which nothing wraps
    for launcher, arguments in calls_by_both_ways(launch, [0x300], monkeypatch):
        launcher(*arguments)
    assert flat(calls[0]) == flat(calls[1])


@pytest.mark.versions
@pytest.mark.parametrize("needs", [{"global_scratch_size": 128}, {"gsan_enabled": True}])
def test_a_launcher_that_adds_arguments_takes_the_long_way(recorded, needs, monkeypatch):
    monkeypatch.setattr(again, "untried_triton", lambda: None)
    launch, _ = recorded
    vars(launch.compiled.run).update(needs)
    assert launch.launcher is None
    assert again.Launch(launch.compiled, launch.grid, ("l",), launch.rest).launcher is None


@pytest.mark.versions
def test_a_triton_that_was_not_tried_takes_the_long_way(recorded, monkeypatch):
    monkeypatch.setattr(again, "untried_triton", lambda: "triton 9.0: tried with 3.6 to 3.9")
    launch, _ = recorded
    assert launch.launcher is None
    assert again.Launch(launch.compiled, launch.grid, ("l",), launch.rest).launcher is None


def test_few_calls_and_passes_are_kept(monkeypatch):
    monkeypatch.setattr(again, "driver", of_one_stream())
    for name, most in (("_calls", "_MAX_CALLS"), ("_passes", "_MAX_PASSES")):
        monkeypatch.setattr(again, name, {})
        monkeypatch.setattr(again, most, 10)
    launch = types.SimpleNamespace(call=lambda stream, at: (len, (at,)), names=("q",))
    found = again.Pass([launch], ("q",))
    for n in range(1, 100):
        x = zeros(1, 1, n, 8)
        again.forward(lambda *tensors: found, x, x, x, True)
        found.again(x.device, n)
    assert len(again._passes) <= 10 and len(again._calls) <= 10


# --------------------------------------------------------------------------------- around the backward kernel
needs_interpreter = pytest.mark.skipif(
    not (portable.INTERPRETED or torch.cuda.is_available()), reason="needs triton's interpreter, or a GPU"
)


@pytest.fixture
def launched_alone(monkeypatch):
    """Interpreted kernels wait for no others: the instructions are the GPU's."""
    if portable.INTERPRETED:
        for waiting in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(backward_ends, waiting, lambda: None)


@needs_interpreter
@pytest.mark.usefixtures("launched_alone")
@pytest.mark.parametrize("zeroed", [False, True], ids=["nothing to add to", "zeros"])
@pytest.mark.parametrize("one_number", [False, True], ids=["whole", "one number"])
@pytest.mark.parametrize("d", [64, 40, 80, 192])
def test_what_backward_starts_from(d, one_number, zeroed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    padded_d, width = triton.next_power_of_2(hopper.padded(d)), hopper.columns_of(d)
    batch, heads, rows, padded_rows, tile_rows = 2, 3, 100, 128, 16

    def new(*shape):
        return fresh(*shape, dtype=torch.float16, device=device, requires_grad=False)

    o = new(batch, rows, heads, d).transpose(1, 2)
    do = new(batch, heads, 1, 1).expand(batch, heads, rows, d) if one_number else new(batch, heads, rows, d)
    logsumexp = fresh(batch, heads, rows, device=device, requires_grad=False)
    stats = torch.full((batch * heads, 2, padded_rows), float("nan"), device=device)
    counters = torch.full((batch * heads + 2,), 7, dtype=torch.int32, device=device)
    dq = torch.full((batch * heads, padded_rows // 64, 64 * padded_d), float("nan"), device=device)
    tile = torch.full((batch, heads, tile_rows, padded_d), float("nan"), dtype=torch.float16, device=device)
    backward_ends.prepare_kernel[(padded_rows // 64 * batch * heads,)](
        o, do, logsumexp, stats, dq, tile, counters, *o.stride()[:3], *do.stride(), heads, rows, padded_rows,
        HEAD_DIM=d, WIDTH=width, D=padded_d, ROWS=64, TILE_ROWS=tile_rows if one_number else 0, ZEROED=zeroed,
    )  # fmt: skip
    assert counters.tolist() == [0] * (1 + batch * heads) + [7]
    delta = (o.double() * do.double()).sum(-1).flatten(0, 1)
    torch.testing.assert_close(
        stats[:, 0, :rows].double(), -logsumexp.flatten(0, 1).double() * math.log2(math.e)
    )
    torch.testing.assert_close(stats[:, 1, :rows].double(), -delta, rtol=1e-5, atol=1e-5)
    assert (stats[:, 0, rows:] == float("-inf")).all() and (stats[:, 1, rows:] == 0).all()
    assert (dq[:, :, : 64 * width] == 0).all() if zeroed else dq.isnan().all()
    assert dq[:, :, 64 * width :].isnan().all()  # nothing is added there
    if one_number:
        assert torch.equal(tile[..., :d], do[:, :, :1].expand(batch, heads, tile_rows, d))
        assert (tile[..., d:] == 0).all()


@needs_interpreter
@pytest.mark.usefixtures("launched_alone")
@pytest.mark.parametrize(
    ("padded_d", "d", "transposed"),
    [
        (64, 40, False),
        (64, 40, True),
        (128, 104, False),
        (128, 88, False),
        (256, 232, False),
        (256, 184, False),
    ],
)
def test_the_sum_becomes_dq(padded_d, d, transposed):
    """A thread of a product's result has two columns next to each other, and the same two eight rows below; 32 threads
    hold 16 rows and eight columns. That is the order within each 64 x 64 numbers of the sum."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_heads, rows, padded_rows = 6, 100, 128
    total = fresh(of_heads, padded_rows, padded_d, device=device, requires_grad=False)
    ordered = torch.full((of_heads, padded_rows // 64, padded_d // 64, 4096), float("nan"), device=device)
    row, column = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    thread = (row % 8) * 4 + column % 8 // 2
    at = column // 8 * 512 + row // 16 * 128 + thread * 4 + row % 16 // 8 * 2 + column % 2
    for i in range(padded_rows // 64):
        for j in range(padded_d // 64):
            tile = total[:, i * 64 : i * 64 + 64, j * 64 : j * 64 + 64]
            ordered[:, i, j, at.flatten().to(device)] = (tile.mT if transposed else tile).flatten(1)
    width = hopper.columns_of(d)
    ordered.flatten(2)[:, :, 64 * width :] = float("nan")  # is not read
    dq = torch.full((2, rows, 3, d), float("nan"), dtype=torch.float16, device=device).transpose(1, 2)
    numbers = (*dq.stride()[:3], 3, rows, padded_rows, 0.25)
    backward_ends.finish_kernel[(2 * of_heads,)](
        ordered, dq, *numbers, HEAD_DIM=d, WIDTH=width, D=padded_d, TRANSPOSED=transposed
    )
    assert torch.equal(dq, (total[:, :rows, :d] * 0.25).half().view(2, 3, rows, d))


@needs_interpreter
@pytest.mark.parametrize(("d", "padded_d", "group"), [(64, 64, 4), (40, 64, 3), (104, 128, 2)])
def test_gradients_of_a_group_are_summed(d, padded_d, group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, heads, n = 2, 3, 70
    made = [
        fresh(batch, heads * group, n, d, dtype=torch.float16, device=device, requires_grad=False)
        for _ in range(2)
    ]
    dk = torch.full((batch, n, heads, d), float("nan"), dtype=torch.float16, device=device).transpose(1, 2)
    dv = torch.full((batch, heads, n, d), float("nan"), dtype=torch.float16, device=device)
    backward_ends.sum_kernel[(2 * batch * heads, 2)](
        *made, dk, dv, *dk.stride()[:3], *dv.stride()[:3], heads, n,
        HEAD_DIM=d, D=padded_d, ROWS=64, HEADS_PER_KV=group,
    )  # fmt: skip
    for found, x in zip((dk, dv), made, strict=True):
        assert torch.equal(found, x.float().view(batch, heads, group, n, d).sum(2).half())


# --------------------------------------------------------------------------------- what the compiler says
def _compile(kernel, head_dim, is_causal, config, dtype="bf16"):
    from cs336_systems.attention.checks import aot

    kernel, _, variant = kernel.partition(" ")
    return aot.compile_hopper_kernel(
        kernel, head_dim, dtype, config, is_causal=is_causal, zeroed=variant != "without zeros",
        persistent=variant != "of one tile", window=variant == "with a window", packed=variant == "of documents",
    )  # fmt: skip


FEW = [
    {d: tiles for d in (64, 96, 128) if tiles <= len(hopper.FEW_REGISTERS[hopper.padded(d)])}
    for tiles in (1, 2)
]
OF_BACKWARD, OF_WIDE = [dict.fromkeys((64, 96, 128))], [dict.fromkeys((160, 192, 256))]
PROGRAMS = list(dict.fromkeys(
    (kernel, d, config)
    for kernel, tables in (("forward", TABLES), ("forward of one tile", TABLES), ("forward with a window", TABLES),
                           ("forward of documents", TABLES), ("backward", OF_BACKWARD),
                           ("backward without zeros", OF_BACKWARD), ("backward with a window", OF_BACKWARD),
                           ("backward of documents", OF_BACKWARD), ("few", FEW), ("backward", OF_WIDE))
    for table in tables
    for d, config in table.items()
    if kernel != "forward of one tile" or config.can_persist(d)
    if d <= 128 or not kernel.endswith(("window", "documents"))  # which wide heads are not served with
))  # fmt: skip


def much_like_another(kernel, d, config):
    """Left to `make test-table`: 80, 96 and 160 columns, whose kernels are nearly those of more, and few programs."""
    return d in (80, 96, 160) or config is configs.FORWARD[d] or kernel == "forward of one tile"


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kernel", "head_dim", "config", "is_causal", "dtype"),
    [
        *((*program, True, "bf16") for program in PROGRAMS if not much_like_another(*program)),
        *(
            pytest.param(*program, True, "bf16", marks=pytest.mark.table)
            for program in PROGRAMS
            if much_like_another(*program)
        ),
        *(
            pytest.param(*program, False, dtype, marks=pytest.mark.table)
            for program in PROGRAMS
            if not program[0].endswith(("window", "documents", "one tile"))  # which are causal
            for dtype in ("bf16", "fp16")
        ),
    ],
    ids=str,
)
def test_products_overlap_and_nothing_worth_speaking_of_is_spilled(
    kernel, head_dim, config, is_causal, dtype
):
    if kernel.startswith("backward") and head_dim > 128 and more_spills():
        pytest.skip("the assembler of triton 3.9 wants more registers than three groups have")
    compiled = compiler().submit(_compile, kernel, head_dim, is_causal, config, dtype).result()
    assert not compiled.serialized and not compiled.faults and compiled.register_operands
    # where a persistent program ends a tile and begins the next registers are saved, not beside matmuls
    few = 0
    if kernel.startswith("backward"):
        few = (320 if head_dim == 128 else 128) + more_spills()  # most in fp16 with triton 3.7: 292
        few += more_spills() // 2 * kernel.endswith("documents") + 8 * kernel.endswith("window")  # 988, 772
    elif kernel.startswith("forward") and config.groups > 1:
        # triton 3.8 spills as much in fp16: two accesses in loops over keys
        few = max(more_spills(), 136 if config.groups == 3 and head_dim == 128 else 0)
        few += 160 * kernel.endswith(("window", "documents"))  # most with triton 3.9: 604
    assert compiled.spill_bytes <= few
    assert compiled.shared_bytes <= SHARED_MEMORY_KIB[90] * 1024
    assert "wgmma.mma_async" in compiled.ptx and "cp.async.bulk.tensor" in compiled.ptx
    by_threads = kernel.startswith("backward") and head_dim > 128
    addition = "add.v4.f32" if by_threads else "cp.reduce.async.bulk.tensor"
    assert (addition in compiled.ptx) != kernel.startswith("forward")
    programs = 1  # that are to fit a multiprocessor
    if kernel == "few":
        programs = {64: (4, 3), 128: (3,)}[hopper.padded(head_dim)][config - 1]
    elif kernel.startswith("forward") and config.registers:
        programs = config.programs
    if programs > 1:
        assert programs * compiled.registers * compiled.num_threads <= 65536
        assert programs * (compiled.shared_bytes / 1024 + 1) <= SHARED_MEMORY_KIB[90] + 1


# --------------------------------------------------------------------------------- on a GPU
SHAPES = [  # batch, heads, n_queries, n_keys, d
    (1, 1, 1, 1, 64), (1, 2, 1, 300, 64), (2, 2, 300, 1, 128), (1, 2, 100, 500, 64), (1, 2, 128, 128, 64),
    (2, 3, 333, 517, 64), (2, 3, 517, 333, 128), (1, 16, 1024, 1024, 64), (1, 5, 1000, 1000, 80), (2, 3, 500, 700, 32),
    (1, 2, 2048, 2048, 128), (1, 3, 1100, 1100, 40), (2, 2, 700, 700, 48), (1, 2, 1024, 1024, 96),
    (1, 2, 1030, 1024, 104),
]  # fmt: skip


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.delenv("CS336_HOPPER", raising=False)
    monkeypatch.setattr(again, "_passes", {})  # by which kernels is remembered, too
    flash_triton._launchers.cache_clear()
    if reason := hopper_reason():
        pytest.skip(reason)
    yield
    flash_triton._launchers.cache_clear()


def check_both_ways(q, k, v, grad_o, is_causal, largest=0.02, forward=None, window=None, cu_seqlens=None):
    """The error against fp64 is at most two and a half times that of the portable kernels, which round to 16 bits now
    and then (with one query, where few errors average, up to 2.1 times in thousands of draws); theirs is below
    `largest`. Of a group's parts dK and dV may be rounded before they are summed, by half a unit each.
    `forward`: another configuration than the tables'."""
    exact = exact_attention(q, k, v, grad_o, is_causal, window=window, cu_seqlens=cu_seqlens)
    group, parts = q.shape[1] // k.shape[1], [0.0] * 4
    if group > 1:
        copies = (x.repeat_interleave(group, 1) for x in (k, v))
        of_copies = exact_attention(q, *copies, grad_o, is_causal, window=window, cu_seqlens=cu_seqlens)
        parts[2:] = (x.abs().unflatten(1, (-1, group)).sum(2) for x in of_copies[2:])
    seen = () if window is None and cu_seqlens is None else (window, cu_seqlens)
    results = []
    for launcher, chosen in ((hopper, forward), (portable, None)):
        poison = [torch.full_like(x, float("nan")) for x in (q, k, v, q, k, v)]
        del poison  # the allocator hands these blocks out again: what a kernel leaves unwritten is NaN
        o, logsumexp = launcher.launch_forward(q, k, v, is_causal, chosen, seen=seen)
        grads = launcher.launch_backward(q, k, v, o, logsumexp, grad_o, is_causal, seen=seen)
        results.append((o, logsumexp, grads))
    (o, logsumexp, grads), (o2, logsumexp2, grads2) = results
    torch.testing.assert_close(logsumexp, logsumexp2, rtol=1e-4, atol=1e-4)
    for ours, other, summed, true in zip((o, *grads), (o2, *grads2), parts, exact, strict=True):
        assert ours.stride() == other.stride() and torch.isfinite(ours).all()
        error = relative(other, true, 1)
        assert error < largest
        rounding = torch.finfo(q.dtype).eps / 2 * relative(true + summed, true, 1)
        assert relative(ours, true, 1) <= 2.5 * error + rounding + 1e-4


def test_no_loop_sets_a_variable_to_another_constant():
    """Gluon's compiler (triton 3.6, 3.7) takes a variable that is a constant before a loop, and another one after its
    first pass, for the first one in all passes."""
    for path in Path(configs.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            constants = [
                (node.lineno, node.targets[0].id)
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                and isinstance(node.targets[0], ast.Name)
            ]  # fmt: skip
            for loop in ast.walk(function):
                if isinstance(loop, (ast.For, ast.While)):
                    inside = {name for line, name in constants if loop.lineno < line <= loop.end_lineno}
                    before = {name for line, name in constants if line < loop.lineno}
                    assert not inside & before, f"{path.name}, {function.name}, line {loop.lineno}"


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_results(on_hopper, shape, dtype, is_causal):
    batch, heads, num_queries, num_keys, d = shape
    lengths = (num_queries, num_keys, num_keys, num_queries)
    check_both_ways(*(gpu(batch, heads, n, d, dtype=dtype) for n in lengths), is_causal)


GROUPS = [(4, 2, d, torch.bfloat16) for d in (40, 64, 80, 96, 128)] + [
    (heads, of_keys, d, torch.float16) for heads, of_keys in ((9, 3), (8, 1)) for d in (64, 128)
]


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads", "of_keys", "d", "dtype"), GROUPS, ids=name)
def test_grouped_queries(on_hopper, heads, of_keys, d, dtype, is_causal, monkeypatch):
    """Forward in all configurations, backward with one program for all tiles of keys, with few and with many."""
    forward = list(dict.fromkeys(table[d if d > 64 else 64] for table in TABLES))
    monkeypatch.setattr(hopper, "even_pairs", lambda *sizes: True)
    for turn, multiprocessors in enumerate((1, 5, 132, 1, 132)):
        monkeypatch.setattr(hopper, "UNZEROED", dict.fromkeys((64, 128), 0 if turn < 3 else 2**30))
        monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index, n=multiprocessors: n)
        again._passes.clear()
        for n, m in ((333, 517), (517, 333), (1, 70), (64, 64), (50, 700), (193, 129), (200, 1)):
            q, do = (gpu(2, n, heads, d, dtype=dtype).transpose(1, 2) for _ in range(2))
            k, v = (gpu(2, of_keys, m, d, dtype=dtype) for _ in range(2))
            check_both_ways(q, k, v, do, is_causal, forward=forward[turn % len(forward)])
        for _ in range(2):  # launched again: another number
            check_both_ways(q, k, v, gpu(2, heads, 1, 1, dtype=dtype).expand(do.shape), is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize(
    ("d", "dtype"), [(40, DTYPES[0]), (80, DTYPES[0]), *((d, DTYPES[1]) for d in (64, 96, 128))], ids=name
)
def test_windows(on_hopper, d, dtype, window, monkeypatch):
    """In all configurations of the forward kernels, programs of one tile and of many, of one head of keys for each of
    queries and for three, backward also of what one program for few queries would hold."""
    forward = list(dict.fromkeys(table[hopper.columns_of(d)] for table in TABLES))
    for turn, multiprocessors in enumerate((132, 5, 132, 1)):
        monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index, n=multiprocessors: n)
        again._passes.clear()
        check = functools.partial(check_both_ways, is_causal=True, forward=forward[turn], window=window)
        for heads, of_keys, n, m in (
            (3, 3, 333, 517), (6, 2, 1100, 1100), (6, 2, 517, 517 - min(window, 200) // 2), (3, 3, 64, 64),
            (6, 2, 50, 700), (3, 3, 129, 129),
        ):  # fmt: skip
            q, do = (gpu(2, n, heads, d, dtype=dtype).transpose(1, 2) for _ in range(2))
            k, v = (gpu(2, of_keys, m, d, dtype=dtype) for _ in range(2))
            check(q, k, v, do)
        check(q, k, v, gpu(2, heads, 1, 1, dtype=dtype).expand(do.shape))


def packed(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32, device="cuda")


def some_documents(total):
    """Where documents end, of lengths around those of tiles or any, some of them empty."""
    ends = [0]
    while ends[-1] < total:
        ends.append(ends[-1] + random.choice((0, 1, 63, 64, 65, 128, 200, random.randint(1, total))))
    return packed(*ends[1:-1], total, *random.choice(([], [total] * 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize(
    ("d", "dtype"), [(40, DTYPES[0]), (80, DTYPES[0]), *((d, DTYPES[1]) for d in (64, 96, 128))], ids=name
)
def test_documents(on_hopper, d, dtype, window, monkeypatch):
    """As windows, and with them; the last documents are one, as without any."""
    forward = list(dict.fromkeys(table[hopper.columns_of(d)] for table in TABLES))
    for turn, multiprocessors in enumerate((132, 5, 132, 1)):
        monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index, n=multiprocessors: n)
        again._passes.clear()
        check = functools.partial(check_both_ways, is_causal=True, forward=forward[turn], window=window)
        for heads, of_keys, n in ((3, 3, 333), (6, 2, 1100), (6, 2, 517), (3, 3, 64), (3, 3, 1), (3, 3, 900)):
            q, do = (gpu(1, n, heads, d, dtype=dtype).transpose(1, 2) for _ in range(2))
            k, v = (gpu(1, of_keys, n, d, dtype=dtype) for _ in range(2))
            for _ in range(2):
                check(q, k, v, do, cu_seqlens=some_documents(n))
        one_number = gpu(1, heads, 1, 1, dtype=dtype).expand(do.shape)
        check(q, k, v, one_number, cu_seqlens=packed(n))
    o, logsumexp = hopper.launch_forward(q, k, v, True, forward[turn], (window, packed(n)))
    seen = () if window is None else (window, None)
    for x, y in zip((o, logsumexp), hopper.launch_forward(q, k, v, True, forward[turn], seen), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_a_graph_reads_where_documents_end(on_hopper, d):
    """And so does a launch that is remembered; whatever is there, also what makes no sense, it ends."""
    n = 1500
    q, k, v, grad_o = (gpu(1, 4, n, d) for _ in range(4))
    cu_seqlens = packed(700, n)

    def both():
        o, logsumexp = hopper.launch_forward(q, k, v, True, seen=(None, cu_seqlens))
        return o, *hopper.launch_backward(q, k, v, o, logsumexp, grad_o, True, seen=(None, cu_seqlens))

    graph, found = captured(both)
    for end in (700, 1, 1499, n, 64):
        cu_seqlens.copy_(packed(end, n))
        graph.replay()
        exact = exact_attention(q, k, v, grad_o, True, cu_seqlens=cu_seqlens)
        for ours in (found, both()):
            for x, true in zip(ours, exact, strict=True):
                assert relative(x, true, 1) < 0.02
    for values in ((-900, 70, n), (70, 9000, 9000), (1000, 50, 20), (900, -900, n)):
        cu_seqlens.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_windows_by_the_public_function(on_hopper, d):
    """Long rows, launched again with another window, in a graph, and beside numbers that no window reaches."""
    q, k, v, grad_o = leaves(1, 16, 3000, d)
    for window in (1024, 500, 1024):
        assert set(flash_triton.kernels_for(q, k, v, window).values()) == {"hopper"}
        assert_near(both_passes(q, k, v, grad_o, window), q, k, v, grad_o, window)
    graph, found = captured(lambda: both_passes(q, k, v, grad_o, 300))
    graph.replay()
    expected = both_passes(q, k, v, grad_o, 300)
    assert_near(found, q, k, v, grad_o, 300)
    assert all(torch.equal(found[i], expected[i]) for i in (0, 2, 3))  # but for dQ, sums of a fixed order
    with torch.no_grad():
        for x in (k, v):
            x[:, :, :1000] = float("nan")
        for x in (q, grad_o):
            x[:, :, 2500:] = float("nan")
    beside = both_passes(q, k, v, grad_o, 300)
    for i, seeing in enumerate((slice(1536, 2496), slice(1536, 2496), slice(1408, 2100), slice(1408, 2100))):
        torch.testing.assert_close(
            beside[i][:, :, seeing], expected[i][:, :, seeing], rtol=0, atol=0.01 * (i == 1)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_grouped_queries_by_the_public_function(on_hopper, d):
    """Long rows of many heads, again, in a graph, and with the flag for determinism."""
    q, k, v, grad_o = (gpu(2, heads, 3000, d, requires_grad=True) for heads in (16, 4, 4, 16))
    assert flash_triton.kernels_for(q, k, v) == {"forward": "hopper", "backward": "hopper"}

    def both():  # O without its graph, which the next capture would meet
        o = attention(q, k, v, True, "flash_triton", enable_gqa=True)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)

    first, second = both(), both()
    graph, captured_ones = captured(both)
    graph.replay()
    assert_near(first, q, k, v, grad_o)
    for other in (second, captured_ones):  # but for dQ, sums of a fixed order
        assert all(torch.equal(other[i], first[i]) for i in (0, 2, 3))
        assert_near(other, q, k, v, grad_o)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(x, y) for x, y in zip(both(), both(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [136, 160, 192, 200, 256])
def test_wide_heads(on_hopper, d, is_causal):
    """One group and two, which see one tile of keys or so many that the ring goes round; grouped and strided."""
    for forward in (table[hopper.columns_of(d)] for table in (configs.FORWARD, configs.FORWARD_LARGE)):
        for num_queries, num_keys in ((333, 517), (517, 333), (1, 70), (64, 64), (193, 129), (1100, 1400)):
            lengths = (num_queries, num_keys, num_keys, num_queries)
            check_both_ways(*(gpu(2, 3, n, d) for n in lengths), is_causal, forward=forward)
        for dtype in DTYPES:
            q, do = (gpu(2, 500, 6, d, dtype=dtype).transpose(1, 2) for _ in range(2))
            _, k, v = gpu(2, 700, 3, 2, d, dtype=dtype).transpose(1, 3).unbind(2)
            check_both_ways(q, k, v, do, is_causal, forward=forward)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [136, 160, 192, 200, 256])
def test_backward_of_wide_heads(on_hopper, d, is_causal, monkeypatch):
    """Groups of queries summed in a program and in parts; one number as gradient, launched again with another; few
    queries and few keys; rows of many tiles."""
    for multiprocessors in (1, 132):
        monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index, n=multiprocessors: n)
        again._passes.clear()
        for heads, of_keys, n, m in (
            (4, 2, 333, 517),
            (6, 1, 200, 130),
            (3, 3, 1, 300),
            (3, 3, 300, 1),
            (2, 1, 50, 700),
        ):
            q, do = (gpu(2, n, heads, d).transpose(1, 2) for _ in range(2))
            k, v = (gpu(2, of_keys, m, d) for _ in range(2))
            check_both_ways(q, k, v, do, is_causal)
        for _ in range(2):
            check_both_ways(q, k, v, gpu(2, heads, 1, 1).expand(do.shape), is_causal)
    check_both_ways(*(gpu(1, 20, 2000, d) for _ in range(4)), is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [160, 256])
def test_wide_heads_by_the_public_function(on_hopper, d):
    """Enough programs for two groups; again, at known addresses with other numbers, and in a graph."""
    q, k, v, grad_o = (gpu(2, heads, 1500, d, requires_grad=True) for heads in (16, 4, 4, 16))
    assert flash_triton.kernels_for(q, k, v) == {"forward": "hopper", "backward": "hopper"}

    def both():  # O without its graph, which the next capture would meet
        o = attention(q, k, v, True, "flash_triton", enable_gqa=True)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)

    graph, replayed = captured(both)
    for _ in range(2):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
        graph.replay()
        found = both()
        assert_near(found, q, k, v, grad_o)
        assert_near(replayed, q, k, v, grad_o)
        assert all(torch.equal(found[i], replayed[i]) for i in (0, 2, 3))  # but for dQ, sums of a fixed order


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("d", "forward"),
    [
        (64, hopper.Forward(1, 128, 2, False)),
        (64, hopper.Forward(3, 128, 2, False)),
        (64, hopper.Forward(1, 64, 3, True)),
        (64, hopper.Forward(1, 128, 2, True)),
        (128, hopper.Forward(1, 64, 2, True)),
        (128, hopper.Forward(2, 128, 2, True)),
    ],
)
def test_other_configurations(on_hopper, d, forward, is_causal):
    for num_queries, num_keys in ((333, 517), (517, 333), (1, 70)):
        # k and v as they lie in a projection of all three
        _, k, v = gpu(2, num_keys, 3, 2, d, dtype=torch.float16).transpose(1, 3).unbind(2)
        q, grad_o = (gpu(2, 2, num_queries, d, dtype=torch.float16) for _ in range(2))
        check_both_ways(q, k, v, grad_o, is_causal, forward=forward)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 80, 96, 128])
def test_configurations_in_use(on_hopper, d, is_causal):
    """Of shapes as small as these the rule would choose the first only."""
    for forward in dict.fromkeys(table[d] for table in TABLES):
        for num_queries, num_keys in ((333, 517), (517, 333), (1, 70), (64, 64), (193, 129)):
            lengths = (num_queries, num_keys, num_keys, num_queries)
            check_both_ways(*(gpu(2, 3, n, d) for n in lengths), is_causal, forward=forward)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [hopper.Forward(3, 128, 2, False), hopper.Forward(2, 128, 2, False)], ids=str
)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_tiles_of_one_group(on_hopper, d, config):
    """A last tile that lacks queries for a group or two, small ones that even out shares, more tiles than programs."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    even_out = 64 * config.groups * (programs // 2 + 2)
    for heads, queries, keys in (
        (6, 257, 100), (6, 321, 100), (6, 385, 200), (2 * programs, 257, 130), (2 * programs, 321, 70),
        (2, even_out, 300), (2, even_out + 70, 65),
    ):  # fmt: skip
        q, k, v, do = (gpu(1, heads, n, d) for n in (queries, keys, keys, queries))
        check_both_ways(q, k, v, do, False, forward=config)
    for queries in (257, 321):  # pairs of tiles, the heaviest of which lacks queries for a group
        check_both_ways(*(gpu(1, 2 * programs, queries, d) for _ in range(4)), True, forward=config)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [1, 5, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("d", [64, 80, 128, 160, 256])
def test_scores_that_grow_from_tile_to_tile(on_hopper, d, dtype, growth):
    """They grow by `growth` powers of two every 64 keys, in the order in which tiles are read: a row's maximum follows
    now and then, or at every tile."""
    q, k, v, do = (gpu(2, 3, 1000, d, dtype=dtype) for _ in range(4))
    q[..., 0] = 1
    k[..., 0] = torch.arange(999, -1, -1, device="cuda") // 64 * growth * math.sqrt(d) / math.log2(math.e)
    for forward in dict.fromkeys(table[d] for table in TABLES if d in table):
        for is_causal in (False, True):
            # in dQ large keys cancel: the portable kernels lose 0.24 of it, too
            check_both_ways(q, k, v, do, is_causal, largest=0.3, forward=forward)


@pytest.mark.gpu
@pytest.mark.parametrize("zeroed", [False, True], ids=["nothing to add to", "zeros"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 80, 96, 128])
def test_a_program_that_takes_many_tiles(on_hopper, d, is_causal, zeroed, monkeypatch):
    """As if the GPU had one multiprocessor, a few, or all: shapes as small as these would leave a tile for each."""
    monkeypatch.setattr(hopper, "UNZEROED", dict.fromkeys((64, 128), 0 if zeroed else 2**30))
    monkeypatch.setattr(hopper, "even_pairs", lambda *sizes: True)
    monkeypatch.setattr(configs, "CHAIN", 3)
    monkeypatch.setattr(configs, "CHAINS", ((2**30, 0.01),))
    two, three = (hopper.Forward(n, 128, 2, False) for n in (2, 3))
    overlapping = hopper.Forward(2, 128, 2, True)
    alone = configs.FORWARD_OF_SHORT[d]  # chains of three tiles and of what is left, and single ones
    for multiprocessors, forward in ((1, two), (5, overlapping), (3, three), (3, alone), (100_000, alone)):
        monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index, n=multiprocessors: n)
        again._passes.clear()
        for batch, heads, num_queries, num_keys in (
            (2, 3, 333, 517), (1, 5, 517, 333), (1, 3, 1000, 70), (1, 2, 130, 700), (3, 7, 129, 129),
        ):  # fmt: skip
            lengths = (num_queries, num_keys, num_keys, num_queries)
            for _ in range(2):
                check_both_ways(*(gpu(batch, heads, n, d) for n in lengths), is_causal, forward=forward)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [40, 64, 80, 96, 104, 128])
def test_few_queries(on_hopper, d, is_causal):
    """The kernel that holds them all, of one tile and (d up to 64) of two: whole, ragged, in sections of heads."""
    for batch, heads, num_queries, num_keys in (
        (2, 3, 64, 64), (2, 3, 50, 700), (1, 2, 16, 3000), (2, 5, 128, 512), (1, 3, 70, 1001), (300, 9, 1, 130),
    ):  # fmt: skip
        lengths = (num_queries, num_keys, num_keys, num_queries)
        check_both_ways(*(gpu(batch, heads, n, d) for n in lengths), is_causal)
    q, do = (gpu(2, n, 3, d).transpose(1, 2) for n in (60, 60))
    k, v = (gpu(2, 300, 6, d)[:, :, ::2].transpose(1, 2) for _ in range(2))
    check_both_ways(q, k, v, do, is_causal)
    for _ in range(2):  # launched again: another number
        check_both_ways(q, k, v, gpu(2, 3, 1, 1).expand(do.shape), is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 80, 128])
def test_strided_tensors_and_gradients_of_one_number(on_hopper, d):
    q, k, v, do = (gpu(2, n, 3, d).transpose(1, 2) for n in (333, 517, 517, 333))
    check_both_ways(q, k, v, do, True)
    one = gpu(2, 3, 1, 1).expand(do.shape)
    check_both_ways(q, k, v, one, True)
    check_both_ways(q, k, v, one, False)
    for _ in range(2):  # launched again: another number
        check_both_ways(q, k, v, gpu(2, 3, 1, 1).expand(do.shape), True)
        check_both_ways(q, k, v, gpu(2 * 3 * 333 * d + 1)[1:].view(do.shape), True)
    check_both_ways(q, k, v, gpu(2, 3, 333, 1).expand(do.shape), True)
    for _ in range(2):
        check_both_ways(gpu(2, 3, 1, d), k, v, gpu(2, 3, 1, 1).expand(2, 3, 1, d), False)


@pytest.mark.gpu
def test_large_scores_and_keys_that_are_not_there(on_hopper):
    """Where all scores are far below zero, exp(−L) of a key past the end would be infinite."""
    # not so far apart that one key has all of the weight: dQ would be nothing but rounding
    q, k = gpu(1, 2, 200, 64).abs() + 20, -gpu(1, 2, 130, 64).abs() / 8 - 1
    v, grad_o = gpu(1, 2, 130, 64), gpu(1, 2, 200, 64)
    for is_causal in (False, True):
        # dQ sums keys that are nearly alike with weights dS whose sum is zero: the rounding of O, by way of D, is a
        # large part of it, up to 0.063 in 800 draws
        check_both_ways(q, k, v, grad_o, is_causal, largest=0.1)


def leaves(*shape, count=4):
    """Tensors that the kernels for Hopper serve, by the public function."""
    found = [gpu(*shape, requires_grad=True) for _ in range(count)]
    assert set(flash_triton.kernels_for(*found[:3]).values()) == {"hopper"}
    return found


def assert_near(found, q, k, v, grad_o, window=None):
    """O and the gradients, or the gradients alone."""
    exact = exact_attention(q, k, v, grad_o, True, window=window)
    for x, true in zip(found, exact[-len(found) :], strict=True):
        assert relative(x, true, 1) < 0.02


def both_passes(q, k, v, grad_o, window=None):
    o = attention(q, k, v, True, "flash_triton", window=window)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


@pytest.mark.gpu
def test_launched_again_with_other_tensors(on_hopper):
    """At new addresses and at known ones, beside tensors that take their place in memory."""
    kept = []
    for shape in ((1, 4, 1024, 64), (4, 1024, 64), (2, 1, 2, 1500, 128)):
        for turn in range(4):
            q, k, v, grad_o = leaves(*shape)
            if turn < 2:
                kept.append((q, k, v, grad_o))  # the next ones lie elsewhere
            assert_near(both_passes(q, k, v, grad_o), q, k, v, grad_o)
        with torch.no_grad():  # the same addresses, other numbers
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
        assert_near(both_passes(q, k, v, grad_o), q, k, v, grad_o)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_both_passes_in_a_graph(on_hopper, d):
    tensors = leaves(1, 4, 1024, d)
    graph, found = captured(lambda: both_passes(*tensors))
    for _ in range(2):
        with torch.no_grad():
            for x in tensors:
                x.copy_(torch.randn_like(x))
        graph.replay()
        assert_near(found, *tensors)


@pytest.mark.gpu
def test_in_a_compiled_function(on_hopper):
    q, k, v = leaves(1, 4, 1024, 64, count=3)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, True, "flash_triton").sum(), fullgraph=True)
    compiled(q, k, v).backward()
    assert_near((q.grad, k.grad, v.grad), q, k, v, torch.ones_like(q))


@pytest.mark.gpu
def test_more_heads_than_an_axis_of_a_grid_holds(on_hopper):
    check_both_ways(*(gpu(70_000, 1, 8, 64) for _ in range(4)), True)


@pytest.mark.gpu
def test_deterministic_gradients_where_they_are_asked_for(on_hopper):
    tensors = [gpu(2, 4, 1000, 64, requires_grad=True) for _ in range(4)]
    torch.use_deterministic_algorithms(True)
    try:
        _, *first = both_passes(*tensors)
        for _ in range(2):
            _, *again = both_passes(*tensors)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
