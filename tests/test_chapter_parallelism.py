"""Chapter parallelism: closed forms against counts made another way, the page's numbers and frames, its notebook."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from cs336_systems.chapters.parallelism import accounting as model
from cs336_systems.chapters.parallelism import show as page
from cs336_systems.chapters.parallelism.accounting import (
    GB,
    GIB,
    HANDOUT,
    OVERLAPS,
    TPU_V5P,
    WIDE,
    XXL,
    Chip,
    Layout,
    Stack,
)
from cs336_systems.report.claims import execute
from cs336_systems.report.prose import Number

SMALL = Stack(d_model=8, d_ff=24, num_blocks=3)
COUNTING = Chip(1, axis_bytes_per_s=1, memory_bytes_per_s=1)  # times are FLOPs and bytes
LAYOUTS = [
    HANDOUT, Layout(fsdp=64, tensor=1, fsdp_axes=3), Layout(fsdp=8, tensor=8),
    Layout(fsdp=32, tensor=16, fsdp_axes=1, tensor_axes=2), Layout(fsdp=16, tensor=4, weight_bytes=1),
    Layout(fsdp=16, tensor=8, activation_bytes=1), Layout(fsdp=4, tensor=4, stages=4),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("nonlinearity", WIDE)
def test_saved_bytes_are_those_that_the_graph_saves(nonlinearity, residual):
    torch = pytest.importorskip("torch")
    from alive_bytes import saved_storages

    sizes, tokens = (SMALL.d_model, SMALL.d_ff), 5
    between = getattr(torch.nn.functional, nonlinearity, lambda x: x)
    blocks = [
        [torch.nn.Linear(*s, bias=False).bfloat16() for s in (sizes, sizes[::-1])]
        for _ in range(SMALL.num_blocks)
    ]
    noting, found = saved_storages(layer.weight for block in blocks for layer in block)
    x = torch.randn(tokens, SMALL.d_model, dtype=torch.bfloat16, requires_grad=True)
    with noting:
        for first, second in blocks:
            y = second(between(first(x)))
            x = x + y if residual else y
        saved = sum(storage.nbytes() for storage in found.values())
    assert saved == tokens * sum(model.saved_bytes_per_token(SMALL, nonlinearity).values())


def held(stack, devices, tokens, nonlinearity="relu", sharded=0.5):
    """Bytes on each device: its part of the fp32 state, and of activations that are spread and that are whole."""
    activations = tokens * sum(model.saved_bytes_per_token(stack, nonlinearity).values())
    spread = sum(model.state_bytes(stack).values()) + sharded * activations
    return spread / devices + (1 - sharded) * activations


@pytest.mark.parametrize("sharded", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("nonlinearity", ["relu", "gelu"])
@pytest.mark.parametrize("tokens", [0, 1, 100, 1024, 5000, 9000])
def test_fewest_devices_is_what_a_search_finds(tokens, nonlinearity, sharded):
    capacity = 95 * GB
    found = next((n for n in range(1, 3000) if held(XXL, n, tokens, nonlinearity, sharded) < capacity), None)
    assert model.fewest_devices(XXL, capacity, tokens, nonlinearity, sharded) == found


@pytest.mark.parametrize("sharded", [0, 0.5, 1])
@pytest.mark.parametrize("devices", [37, 38, 64, 1000])
def test_most_tokens_is_the_last_number_that_fits(devices, sharded):
    most = model.most_tokens(XXL, 95 * GB, devices, "relu", sharded)
    if most is None:
        assert held(XXL, devices, 0) >= 95 * GB
    else:
        assert (
            held(XXL, devices, most, "relu", sharded)
            < 95 * GB
            <= held(XXL, devices, most + 1, "relu", sharded)
        )


def test_the_limit_itself_is_not_below_the_limit():
    state = sum(model.state_bytes(SMALL).values())
    assert model.fewest_devices(SMALL, state / 4, 0) == 5  # "under", so a fourth each is not enough
    assert model.most_tokens(SMALL, state, 1, sharded=1) is None


# ---------------------------------------------------------------------------------------- computing and sending
class Mesh:
    """X × Y devices with numpy arrays, which count the bytes that each receives and the FLOPs that it does."""

    def __init__(self, x, y):
        self.shape = (x, y)
        self.received = {"weights": np.zeros((x, y)), "activations": np.zeros((x, y))}
        self.flops = np.zeros((x, y))

    def __iter__(self):
        return itertools.product(*map(range, self.shape))

    def gather(self, shards, over, axis, what, size):
        """The shards of each device's row (over X: 0) or column (over Y: 1), joined along an axis of the tensor."""
        out = {}
        for x, y in self:
            peers = [(i, y) if over == 0 else (x, i) for i in range(self.shape[over])]
            self.received[what][x, y] += size * sum(shards[p].size for p in peers if p != (x, y))
            out[x, y] = np.concatenate([shards[p] for p in peers], axis)
        return out

    def multiply(self, left, right):
        out = {}
        for at in self:
            out[at] = left[at] @ right[at]
            self.flops[at] += 2 * out[at].size * left[at].shape[1]
        return out

    def reduce_scatter(self, summands, axis, what, size):
        """Over Y: device y gets the sum of the y-th parts; it receives its part from every peer."""
        out = {}
        for x, y in self:
            parts = [np.split(summands[x, i], self.shape[1], axis)[y] for i in range(self.shape[1])]
            self.received[what][x, y] += size * sum(p.size for i, p in enumerate(parts) if i != y)
            out[x, y] = sum(parts)
        return out


@pytest.mark.parametrize(("x", "y"), [(4, 2), (2, 4), (1, 4), (4, 1), (8, 8)])
def test_block_times_are_the_flops_and_bytes_of_the_algorithm_and_its_result_is_right(x, y):
    rng = np.random.default_rng(x + y)
    tokens, d, f = 16, SMALL.d_model, SMALL.d_ff
    data, w_in, w_out = rng.normal(size=(tokens, d)), rng.normal(size=(d, f)), rng.normal(size=(f, d))
    mesh = Mesh(x, y)

    def split(array, over_rows, over_columns):
        """Device (i, j) → its shard, with the rows and columns split over X (0) or Y (1)."""
        return {
            at: np.split(
                np.split(array, mesh.shape[over_rows], 0)[at[over_rows]], mesh.shape[over_columns], 1
            )[at[over_columns]]
            for at in mesh
        }

    own = split(data, 0, 1)
    gathered = mesh.gather(own, 1, 1, "activations", 2)
    first = mesh.gather(split(w_in, 0, 1), 0, 0, "weights", 2)
    inner = mesh.multiply(gathered, first)
    second = mesh.gather(split(w_out, 1, 0), 0, 1, "weights", 2)
    out = mesh.reduce_scatter(mesh.multiply(inner, second), 1, "activations", 2)

    expected = split(data @ w_in @ w_out, 0, 1)
    assert all(np.allclose(out[at], expected[at]) for at in mesh)
    layout = Layout(fsdp=x, tensor=y, fsdp_axes=1, tensor_axes=1)
    times = model.block_times(SMALL, COUNTING, layout, tokens, exact=True)
    assert (mesh.flops == pytest.approx(times.compute)) and mesh.flops.min() == mesh.flops.max()
    assert mesh.received["weights"] == pytest.approx(np.full((x, y), times.weights))
    assert mesh.received["activations"] == pytest.approx(np.full((x, y), times.activations))


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 16])
def test_a_ring_in_both_directions_takes_the_exact_time(devices):
    """Each step moves half a shard to either side; after n - 1 of them every device has both halves of all shards."""
    halves = [{(i, "right"), (i, "left")} for i in range(devices)]
    moving = [{"right": i, "left": i} for i in range(devices)]
    steps = 0
    while any(len(found) < 2 * devices for found in halves):
        moving = [
            {"right": moving[i - 1]["right"], "left": moving[(i + 1) % devices]["left"]}
            for i in range(devices)
        ]
        for found, now in zip(halves, moving, strict=True):
            found |= {(now["right"], "right"), (now["left"], "left")}
        steps += 1
    num_bytes, both_directions = 1200.0, 10.0
    seconds = steps * (num_bytes / devices / 2) / (both_directions / 2)
    assert model.gather_seconds(num_bytes, devices, both_directions, exact=True) == pytest.approx(seconds)
    assert (
        model.gather_seconds(num_bytes, devices, both_directions, axes=3) == num_bytes / both_directions / 3
    )


def compute_bound(layout, tokens, overlap, exact=False):
    times = model.block_times(XXL, TPU_V5P, layout, tokens, exact)
    taken = {"together": max, "in turn": sum}[overlap]
    return times.compute >= taken((times.weights, times.activations))


@pytest.mark.parametrize("exact", [False, True], ids=["simple", "exact"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_threshold_is_where_bisection_finds_it(layout, overlap, exact):
    low, high = 1e-3, 1e12
    assert not compute_bound(layout, low, overlap, exact)
    assert compute_bound(layout, high, overlap, exact)
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if compute_bound(layout, middle, overlap, exact) else (middle, high)
    assert model.compute_bound_tokens(XXL, TPU_V5P, layout, overlap, exact) == pytest.approx(high, rel=1e-9)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_beyond_the_limit_of_tensor_parallelism_no_batch_is_compute_bound(overlap):
    for tensor_axes, size in ((1, 2), (2, 2), (1, 1)):
        limit = model.tensor_limit(XXL, TPU_V5P, tensor_axes, size)
        for share, bound in ((0.99, True), (1.01, False)):
            layout = Layout(16, share * limit, tensor_axes=tensor_axes, activation_bytes=size)
            assert math.isfinite(model.compute_bound_tokens(XXL, TPU_V5P, layout, overlap)) == bound
            assert compute_bound(layout, 1e15, overlap) == bound


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_split_is_compute_bound_with_fewer_tokens_per_device(layout, overlap):
    least, tensor = model.least_tokens_per_device(XXL, TPU_V5P, layout, overlap)

    def per_device(y):
        split = replace(layout, fsdp=1024, tensor=y)
        return model.compute_bound_tokens(XXL, TPU_V5P, split, overlap) / (
            split.fsdp * split.tensor * split.stages
        )

    grid = np.geomspace(tensor / 30, tensor * 3, 20_001)
    found = [per_device(y) for y in grid]
    assert min(found) == pytest.approx(least, rel=1e-3)
    assert grid[int(np.argmin(found))] == pytest.approx(tensor, rel=2e-2)
    assert min(found) >= least * (1 - 1e-9)


def test_the_answers_by_hand():
    assert XXL.num_parameters == 126 * 2 * 16_384 * 53_248
    state = 16 * XXL.num_parameters
    assert [math.ceil(state / (80 * unit)) for unit in (GB, GIB)] == [44, 41]
    assert model.devices_worth(state, 80 * GB) == 44
    assert sum(model.saved_bytes_per_token(XXL).values()) == 126 * 2 * (16_384 + 53_248)
    assert model.fewest_devices(XXL, 95 * GB, 0) == math.ceil(state / 95e9) == 38
    together = (4.6e14 / (2 * 9e10)) / (2 * 4)
    assert model.compute_bound_tokens(XXL, TPU_V5P, HANDOUT) / 64 == pytest.approx(together)
    assert (round(together, 1), math.ceil(64 * together)) == (319.4, 20_445)


# ---------------------------------------------------------------------------------------------------- pipeline
@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "group_size"),
    [(1, 4, 1, 1), (4, 4, 1, 4), (4, 7, 1, 4), (4, 8, 2, 4), (3, 6, 4, 3), (4, 8, 2, 8), (4, 7, 4, 7)],
)
def test_the_bubble_is_that_of_a_schedule_played_through(stages, microbatches, chunks, group_size):
    """Devices take a group of microbatches (or all of them) through their first chunk, then their second, and so on."""
    finished, free = {}, [0] * stages
    order = [
        (chunk, batch)
        for group in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for batch in range(group, min(group + group_size, microbatches))
    ]
    for chunk, batch in order:
        for device in range(stages):
            stage = chunk * stages + device
            start = max(free[device], finished.get((stage - 1, batch), 0))
            free[device] = finished[stage, batch] = start + 1
    busy = chunks * microbatches
    assert 1 - busy / max(free) == pytest.approx(model.bubble_share(stages, microbatches, chunks))


def test_handing_over_is_the_bytes_of_the_residual_stream():
    layout = Layout(fsdp=2, tensor=4, stages=3)
    tokens = 64
    sent = 2 * (tokens / 2) * SMALL.d_model / 4
    products = SMALL.num_blocks / 3 * 4 * tokens * SMALL.d_model * SMALL.d_ff / (2 * 4)
    assert model.stage_send_share(SMALL, COUNTING, layout, 1) == pytest.approx(sent / products)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: model.saved_bytes_per_token(XXL, "tanh"), "'tanh'; allowed: none, relu, gelu, silu"),
        (lambda: model.compute_bound_tokens(XXL, TPU_V5P, HANDOUT, "never"), "'never'; allowed: together, in turn"),
        (lambda: Stack(0, 1, 1), "d_model=0"),
        (lambda: model.fewest_devices(XXL, 1, -1), "tokens=-1"),
        (lambda: model.fewest_devices(XXL, 1, 1, sharded=1.5), "sharded=1.5"),
        (lambda: model.bubble_share(0, 1), "stages=0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        call()


# ---------------------------------------------------------------------------------------------------- the page
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"tokens_per_device": -1}, "tokens_per_device=-1; allowed: integers from 0 to"),
        ({"devices": "many"}, "devices='many'; allowed: integers from 2 to"),
        ({"capacity_gb": math.inf}, "capacity_gb=inf; allowed: positive numbers"),
        ({"capacity_gb": "95"}, "capacity_gb='95'; allowed: positive numbers"),
        ({"capacity_gb": [95]}, "capacity_gb=[95]; allowed: positive numbers"),
        ({"devices": 10**11, "tensor": 7}, "devices=100000000000; allowed: integers from 2 to"),
        ({"tensor": 64}, "tensor=64 of devices=64; allowed: 1, 2, 4, 8, 16, 32"),
        ({"nonlinearity": "tanh"}, "'tanh'; allowed: none, relu, gelu, silu"),
        ({"nonlinearity": ["relu"]}, "['relu']; allowed: none, relu, gelu, silu"),
        ({"In": ["# Parameters\ndevice = 128"]}, "device; allowed: tokens_per_device, capacity_gb"),
    ],
)
def test_bad_parameters_are_named_with_the_allowed_ones(parameters, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        page.Setting.from_parameters(parameters)


def test_numbers_of_the_prose_are_missing_where_there_are_none():
    assert float(page.batch(page.Setting())) == pytest.approx(64 * TPU_V5P.alpha / 8)
    assert page.batch(page.Setting(tensor=32)).missing == page.NEVER
    assert page.up(Number(2.1)) == 3 and page.up(page.batch(page.Setting(tensor=32))).missing == page.NEVER
    assert page.fewest(page.Setting(capacity_gb=3), 20_000).missing == page.NONE
    assert page.fewest(page.Setting(), 0, busy=10**12).missing == page.NONE
    microbatches, bubble, _ = page.pipeline(page.Setting())
    assert bubble == model.bubble_share(page.STAGES, int(microbatches), page.CHUNKS)
    assert all(number.missing for number in page.pipeline(page.Setting(devices=8)))


def test_frames_hold_the_closed_forms():
    setting = page.Setting()
    memory = page.memory_table(setting)
    assert memory["GB"][0] == pytest.approx(16 * XXL.num_parameters / GB)
    assert memory.iloc[0, 2:].tolist() == [44, 41] and memory["GB"][2] == memory["GB"][0] + memory["GB"][1]
    fewest = page.fewest_table(setting).set_index("tokens")
    assert fewest.loc[1024, "ReLU"] == model.fewest_devices(XXL, 95 * GB, 1024)
    assert fewest["ReLU, none sharded"].isna().tolist() == [False] * 5 + [True]
    times = page.times_table(setting).set_index("collectives")
    assert times["B"].tolist() == [20_445, 25_302]
    assert times.loc["together", "GEMMs, ms"] == pytest.approx(times.loc["together", "weights, ms"])
    in_turn = times.loc["in turn"]
    assert in_turn["GEMMs, ms"] == pytest.approx(in_turn["weights, ms"] + in_turn["activations, ms"])
    assert page.times_table(page.Setting(tensor=32)).empty


@pytest.mark.parametrize(("devices", "tensor"), [(64, 4), (64, 32), (2, 1), (4096, 16), (48, 3)])
def test_levers_keep_the_number_of_devices(devices, tensor):
    setting = page.Setting(devices=devices, tensor=tensor)
    table = page.lever_table(setting)
    assert (table["X"] * table["Y"] * table["Z"] == devices).all()
    assert (table["B together"].isna() == table["B/N together"].isna()).all()
    assert table["B together"].isna().iloc[0] == (tensor == 32)


# ------------------------------------------------------------------------------------------------ the notebook


@pytest.mark.parametrize(
    "parameters",
    [
        {"tensor": 32},
        {"devices": 2, "tensor": 1},
        {"devices": 4096, "tensor": 16},
        {"capacity_gb": 3, "tokens_per_device": 20_000, "nonlinearity": "gelu"},
    ],
)
def test_the_notebook_with_other_parameters(project_root, parameters):
    sentences, displayed = execute(project_root / "book" / "parallelism.ipynb", **parameters)
    assert len(sentences) >= 4
    texts = [d.data if hasattr(d, "data") else d["text/plain"] for d in displayed]
    assert not any(re.search(r"\b(inf|nan|None)\b|∞", text) for text in texts)
