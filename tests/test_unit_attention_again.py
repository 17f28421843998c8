"""Kernels that are launched again get what their first launch got: random passes of all launchers, without a GPU."""

import functools
import inspect
import itertools
import random
import types

import pytest
import torch
from attention_checks import flat, tensor_meta, triton_launcher

pytest.importorskip("triton")

from cs336_systems.attention.hopper import launch as hopper
from cs336_systems.attention.hopper import split_launch
from cs336_systems.attention.triton import again
from cs336_systems.attention.triton import launch as portable
from cs336_systems.attention.triton.tiles import Tiles

AXES = ("batch", "head", "row", "col")
LEAST_ADDRESS = 2**32  # no other number here is as large


class Kernels:
    """In triton's place: binds the arguments of kernels to their names, and hands them to triton's own layers above the
    launcher in C, which only lists its calls."""

    def __init__(self, monkeypatch):
        self.calls, self.bound, self.buffers, self.monkeypatch = [], [], [], monkeypatch
        monkeypatch.setattr(again, "untried_triton", lambda: None)
        monkeypatch.setattr(portable, "INTERPRETED", False)
        monkeypatch.setattr(portable, "wide", lambda kernel, arguments: Launchable(self, kernel))
        monkeypatch.setattr(torch, "empty", functools.partial(self.empty, torch.empty))

    def empty(self, empty, *shape, **options):
        made = empty(*shape, **options)
        if options.get("dtype") == torch.uint8:
            self.buffers.append(made)
        return made

    def launch(self, kernel, grid, *args, **options):
        signature = inspect.signature(kernel.fn)
        named = {name: options.pop(name) for name in signature.parameters if name in options}
        bound = signature.bind(*args, **named).arguments
        assert list(bound) == list(signature.parameters)
        assert options.keys() <= {"num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion"}
        self.bound.append((kernel.__name__, bound))
        # compiled for pointers as aligned as these
        aligned = [x.data_ptr() % 16 == 0 for x in bound.values() if isinstance(x, torch.Tensor)]
        function = f"{kernel.__name__} {aligned}"
        described = [hasattr(x, "block_shape") and tensor_meta(x.block_shape) for x in bound.values()]
        run = triton_launcher(self.calls, described, options.get("launch_pdl", False), self.monkeypatch)
        run(*grid, 7, function, "packed", None, None, None, *bound.values())
        metadata = types.SimpleNamespace(tensordesc_meta=[x for x in described if x])
        return types.SimpleNamespace(run=run, function=function, packed_metadata="packed", metadata=metadata)

    def reached(self, known):
        """The calls of a pass, with the places of tensors instead of their addresses: their names in `known`, or where
        in the one buffer; and what the kernels of a first pass were bound to."""
        [buffer] = self.buffers or [torch.zeros(0)]
        start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        names = {x.data_ptr(): name for name, x in known.items()}

        def place(x):
            if isinstance(x, tuple):
                return tuple(map(place, x))
            if not isinstance(x, torch.Tensor) and not (isinstance(x, int) and x >= LEAST_ADDRESS):
                return x
            at = x.data_ptr() if isinstance(x, torch.Tensor) else x
            return names.get(at) or (f"buffer + {at - start}" if start <= at < end else "a copy")

        calls = [list(map(place, flat(call))) for call in self.calls]
        scratch = {}
        for kernel, bound in self.bound:
            check_numbers(kernel, bound, known)
            for name, x in tensors_of(bound).items():
                role, at = ROLES.get(name, name), x.data_ptr()
                if at in names:
                    assert names[at] == role, (kernel, name)
                elif start <= at < end or role != "do" or not x.is_contiguous():  # a copy
                    role, place_of = SCRATCH.get(role, role), (at, at + x.nbytes)
                    assert scratch.setdefault(role, place_of) == place_of, (kernel, name)
                    assert x.numel() >= room_for(bound, known)[role], (kernel, name)
        places = sorted(scratch.values())
        assert all(this[1] <= after[0] for this, after in itertools.pairwise(places))
        assert not places or (start <= places[0][0] and places[-1][1] <= end)
        first = bool(self.bound)
        for listed in (self.calls, self.bound, self.buffers):
            listed.clear()
        return calls, first


class Launchable:
    def __init__(self, kernels, kernel):
        self.kernels, self.kernel = kernels, kernel

    def __getitem__(self, grid):
        return functools.partial(self.kernels.launch, self.kernel, grid)


# what arguments are called in another kernel of the pass, and where they are in what a pass's launches share
ROLES = {f"{x}_step": x for x in ("q", "k", "v", "do")} | {"limit": "bounds", "tile": "do"}
SCRATCH = {f"{x}_pieces": x for x in ("q", "k", "v", "do")} | {
    f"{x}_parts": x for x in ("o", "l", "dk", "dv")
}
SCRATCH |= {"dq": "sum"}


def tensors_of(bound):
    found = {
        name.removesuffix("_ptr").removesuffix("_desc"): getattr(x, "base", x) for name, x in bound.items()
    }
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def room_for(bound, known):
    """The numbers that a kernel reads or writes of each tensor that is neither given nor returned, as it says itself;
    0 where it does not."""
    (batch, heads, n, d), (_, of_keys, m, _) = known["q"].shape, known["k"].shape
    all_heads, splits, width = batch * heads, bound.get("SPLITS", 0), bound.get("D", 0)
    queries, keys = bound.get("padded_queries", 0), bound.get("padded_keys", 0)
    of_tile = bound["TILE_ROWS"] if "TILE_ROWS" in bound else 3 * queries
    room = dict(
        bounds=2 * n, delta=all_heads * (queries or n), counters=1 + all_heads, stats=2 * all_heads * queries,
        sum=all_heads * queries * width, o=splits * all_heads * n * d, l=splits * all_heads * n,
        q=3 * all_heads * queries * width, do=all_heads * of_tile * width,
    )  # fmt: skip
    pieces, parts = 3 * batch * of_keys * keys * width, all_heads * m * d
    return room | dict(k=pieces, v=pieces, dk=parts, dv=parts)


def check_numbers(kernel, bound, known):
    """They are what their names say."""
    q, k, tensors = known["q"], known["k"], tensors_of(bound)
    # the others of the backward pass have a program for each head of queries
    heads = (k if kernel in ("backward_keys_kernel", "sum_kernel") and "dk_ptr" in bound else q).shape[1]
    expected = dict(
        num_queries=q.shape[2], num_keys=k.shape[2], HEAD_DIM=q.shape[3], heads=heads, batch_heads=len(q) * heads,
        HEADS_PER_KV=q.shape[1] // k.shape[1], scale=q.shape[3] ** -0.5, documents=len(known.get("cu_seqlens", ())) - 1,
    )  # fmt: skip
    for name, x in bound.items():
        assert name not in expected or x == expected[name], (kernel, name)
        if name.startswith("stride_"):
            role, axis = name.removeprefix("stride_").rsplit("_", 1)
            assert role not in tensors or x == tensors[role].stride(AXES.index(axis) - 4), (kernel, name)


# ------------------------------------------------------------------------------------------------ random passes
def layout(draw, batch, heads, n, d, for_tma):
    """Shape, strides and offset of a tensor."""
    matrix = n * d
    choices = [
        ((heads * matrix, matrix, d, 1), 0),
        ((heads * matrix, d, heads * d, 1), 0),
        ((2 * heads * matrix, 2 * matrix, 2 * d, 1), d),
        ((3 * heads * matrix, d, 3 * heads * d, 1), heads * d),
        ((matrix, batch * matrix, d, 1), 8),
    ]
    if not for_tma:
        choices += [
            ((heads * matrix, matrix, d, 1), 1),
            ((0, matrix, d, 1), 0),
            ((2 * heads * matrix, 2 * matrix, 2 * d, 2), 0),
            ((heads * matrix, matrix, 1, n), 0),
        ]
    return (batch, heads, n, d), *draw.choice(choices)


def gradient(draw, batch, heads, n, d):
    if draw.random() < 0.5:
        return layout(draw, batch, heads, n, d, False)
    kept = draw.choice(
        [(0, 0, 0, 0), (heads, 1, 0, 0), (heads * n, n, 1, 0), (heads * d, d, 0, 1), (0, n * d, d, 1)]
    )
    return (batch, heads, n, d), kept, 0


def made(shape, strides, offset, dtype):
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    return torch.zeros(offset + reach, dtype=dtype).as_strided(shape, strides, offset)


def case(draw):
    """A launcher, what it is asked for, and how its tensors are laid out."""
    launcher = draw.choice([portable, hopper, split_launch])
    batch, (heads, of_keys) = draw.choice((1, 2)), draw.choice(((2, 2), (6, 2)))
    d = draw.choice((40, 64, 128) if launcher is split_launch else (40, 128, 192))
    n, m = draw.choice(((70, 70), (100, 130), (60, 600), (300, 300)))
    is_causal, window, documents = draw.random() < 0.7, None, None
    if (
        is_causal
        and launcher is not split_launch
        and not (launcher is hopper and d > 128)
        and draw.random() < 0.7
    ):
        window, documents = draw.choice(((20, None), (None, 3), (20, 17)))
    if documents:
        batch, m = 1, n
    splits = draw.choice((1, 2, 4)) if launcher is portable and not is_causal else 1
    shapes = {"q": (batch, heads, n, d), "k": (batch, of_keys, m, d), "v": (batch, of_keys, m, d)}
    return dict(
        launcher=launcher, is_causal=is_causal, splits=splits, window=window, documents=documents, longest=(),
        o=None, cu_offset=0, do=gradient(draw, *shapes["q"]),
    ) | {name: layout(draw, *shape, launcher is hopper) for name, shape in shapes.items()}  # fmt: skip


def varied(draw, asked):
    """The same, but for one thing."""
    of_kind = ["documents", "cu_offset"] if asked["documents"] else ["length"]
    name = draw.choice(["q", "k", "v", "do", "do", "o", "o", *of_kind])
    for_tma = asked["launcher"] is hopper
    if name == "documents":
        changed = draw.choice([
            {"documents": draw.choice((3, 17))}, {"window": asked["window"] and draw.choice((20, 30))},
            {"longest": draw.choice(((), (16,), (64,)))},
        ])  # fmt: skip
    elif name == "length":  # rows more or fewer, in the same strides
        changed = {}
        for x in draw.choice((("k", "v"), ("q", "do", "o"))):
            if asked[x]:
                (batch, heads, n, d), *place = asked[x]
                changed[x] = ((batch, heads, n ^ 1, d), *place)
    elif name == "cu_offset":
        changed = {name: 1 - asked[name]}
    elif asked[name] and draw.random() < 0.5:
        shape, strides, offset = asked[name]
        changed = {name: (shape, strides, offset ^ (8 if name in "qkv" and for_tma else draw.choice((1, 4))))}
    elif name == "o":  # what hooks for saved tensors may make of it
        changed = {name: layout(draw, *asked["q"][0], True)}
    else:
        changed = {
            name: gradient(draw, *asked["q"][0]) if name == "do" else layout(draw, *asked[name][0], for_tma)
        }
    return asked | changed


def passes_of(kernels, asked):
    """What reaches the GPU of both passes over new tensors, and which were launched first."""
    launcher = asked["launcher"]
    dtype = torch.float32 if launcher is split_launch else torch.bfloat16
    known = {name: made(*asked[name], dtype) for name in "qkv"}
    q, k, v = known.values()
    seen = (asked["window"], None) if asked["window"] else ()
    if asked["documents"]:
        at = asked["cu_offset"]
        known["cu_seqlens"] = torch.zeros(at + asked["documents"] + 1, dtype=torch.int32)[at:]
        seen = asked["window"], known["cu_seqlens"]
    config = (None, asked["splits"]) if asked["splits"] > 1 else None
    o, logsumexp = launcher.launch_forward(q, k, v, asked["is_causal"], config, seen + asked["longest"])
    forward = kernels.reached(known | {"o": o, "l": logsumexp})
    o = made(*asked["o"], dtype) if asked["o"] else o
    known |= {"o": o, "l": logsumexp, "do": made(*asked["do"], dtype)}
    gradients = launcher.launch_backward(q, k, v, o, logsumexp, known["do"], asked["is_causal"], seen=seen)
    return forward, kernels.reached(known | dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.versions
def test_launched_again_is_as_launched_first(monkeypatch):
    """The same kernels, compiled for tensors as aligned, reach the launcher in C with the same numbers, and tensors in
    the same places: by what is remembered of the pass itself, and of any before whose key is equal."""
    kernels, draw = Kernels(monkeypatch), random.Random(0)
    monkeypatch.setattr(hopper, "multiprocessors_of", lambda device_index: 132)
    tiles = Tiles(16, 16, 4, 1)
    monkeypatch.setattr(portable, "apart_for", lambda q, k, _: (tiles, tiles) if q.shape[3] == 192 else None)
    monkeypatch.setattr(again, "_calls", {})
    remembered, asked, met = {}, {}, 0
    for i in range(800):
        asked = varied(draw, asked) if i % 16 else case(draw)
        monkeypatch.setattr(again, "_passes", {})
        first = passes_of(kernels, asked)
        assert all(is_first for _, is_first in first)
        monkeypatch.setattr(again, "_passes", remembered)
        for once_more in range(2):
            found = passes_of(kernels, asked)
            assert [calls for calls, _ in found] == [calls for calls, _ in first], asked
            assert not (once_more and any(is_first for _, is_first in found))
            met += 0 if once_more else sum(not is_first for _, is_first in found)
    assert met > 300
