"""The calculations of spring 2026: closed forms against what the equations send on ranks, bounds against a search."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from distributed import run  # noqa: E402

from cs336_systems.chapters.parallelism import equations, layer  # noqa: E402
from cs336_systems.chapters.parallelism.accounting import OVERLAPS, Chip  # noqa: E402
from cs336_systems.chapters.parallelism.layer import DEVICES, Layer  # noqa: E402

B, D, F = 24, 12, 48
LAYER = Layer(B, D, F)
BYTES = 2  # of a number


def ring_bytes(num_bytes, size):
    """What a device sends in an all-gather or a reduce-scatter: all shards but one."""
    return num_bytes * (size - 1) / size


def forward_bytes(big, fsdp, tensor):
    """What it sends on a grid: a gather of its F/Y columns of weights, and an all-reduce of (B/X, D)."""
    weights, activations = 3 * BYTES * big.d_model * big.d_ff, BYTES * big.tokens * big.d_model
    return ring_bytes(weights / tensor, fsdp), 2 * ring_bytes(activations / fsdp, tensor)


def compute_s(big, device, part, size):
    passes = {"forward": 1, "backward": 2}[part]
    return passes * 6 * big.tokens * big.d_model * big.d_ff / size / device.flops


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    made = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    return made(B, D), made(B, D), [made(D, F), made(D, F), made(F, D)]


def whole(seed):
    x, dy, weights = tensors(seed)
    leaves = [t.requires_grad_() for t in (x, *weights)]
    y = (torch.nn.functional.silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def columns(weights, number, of):
    w1, w2, w3 = weights
    return [w1.chunk(of, 1)[number], w2.chunk(of, 1)[number], w3.chunk(of)[number]]


def on_a_rank(how, seed, fsdp, tensor):
    """What one rank computes, and how many numbers it has sent over each axis."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    x, dy, weights = tensors(seed)
    row, column = divmod(rank, tensor)
    over_tensor = equations.Ring([row * tensor + i for i in range(tensor)], rank)
    over_fsdp = equations.Ring([i * tensor + column for i in range(fsdp)], rank)
    mine = [t.chunk(fsdp)[row] for t in (x, dy)]
    rows = [w.chunk(size)[rank] for w in weights]
    if how == "data_parallel":
        found = equations.data_parallel(*mine, weights, over_fsdp)
    elif how == "fsdp":
        found = equations.fsdp(*mine, rows, over_fsdp)
    elif how == "tensor_parallel":
        found = equations.tensor_parallel(x, dy, columns(weights, rank, size), over_tensor)
    else:
        shards = [w.chunk(fsdp)[row] for w in columns(weights, column, tensor)]
        found = equations.grid(*mine, shards, over_fsdp, over_tensor)
    return found, over_fsdp.sent, over_tensor.sent


@pytest.mark.parametrize(
    ("how", "fsdp", "tensor"),
    [("data_parallel", 2, 1), ("data_parallel", 3, 1), ("fsdp", 2, 1), ("fsdp", 4, 1), ("tensor_parallel", 1, 2),
     ("tensor_parallel", 1, 3), ("grid", 2, 2), ("grid", 2, 1), ("grid", 1, 2)],
)  # fmt: skip
def test_ranks_compute_what_one_process_computes_and_send_what_the_formulas_say(how, fsdp, tensor):
    seed = int(torch.randint(2**31, ()))
    y, dx, *gradients = whole(seed)
    results = run(on_a_rank, fsdp * tensor, how, seed, fsdp, tensor)
    for rank, ((mine, into, of), over_fsdp, over_tensor) in enumerate(results):
        row, column = divmod(rank, tensor)
        torch.testing.assert_close(mine, y.chunk(fsdp)[row])
        torch.testing.assert_close(into, dx.chunk(fsdp)[row])
        wanted = columns(gradients, column, tensor)
        if how in ("fsdp", "grid"):
            wanted = [gradient.chunk(fsdp)[row] for gradient in wanted]
        for found, gradient in zip(of, wanted, strict=True):
            torch.testing.assert_close(found, gradient)
        weights, activations = forward_bytes(LAYER, fsdp, tensor)
        # data parallelism sends in backward alone: an all-reduce; FSDP gathers twice and reduce-scatters
        times = 2 if how == "data_parallel" else 3
        assert (BYTES * over_fsdp, BYTES * over_tensor) == (times * weights, 2 * activations)


def rings(seed, size):
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(seed + rank)
    tensor = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    found = {}
    for how in ("all_reduce", "alternate_all_reduce", "reduce_scatter", "all_gather"):
        ring = equations.Ring(range(size), rank)
        found[how] = getattr(ring, how)(tensor), ring.sent
    return tensor, found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rings_step_by_step(size):
    seed = int(torch.randint(2**31, ()))
    results = run(rings, size, seed, size)
    total = sum(tensor for tensor, _ in results)
    gathered = torch.cat([tensor for tensor, _ in results])
    num_bytes = total.numel()
    for rank, (_, found) in enumerate(results):
        for how in ("all_reduce", "alternate_all_reduce"):
            torch.testing.assert_close(found[how][0], total)
        torch.testing.assert_close(found["reduce_scatter"][0], total.chunk(size)[rank])
        assert torch.equal(found["all_gather"][0], gathered)
        assert found["all_reduce"][1] == 2 * ring_bytes(num_bytes, size)
        assert found["reduce_scatter"][1] == ring_bytes(num_bytes, size)
        assert found["all_gather"][1] == ring_bytes(num_bytes * size, size)
        assert found["alternate_all_reduce"][1] == num_bytes * (size - 1)


# ------------------------------------------------------------------------------------------------------ bounds
def test_bounds_are_where_the_times_are_equal():
    device, big = DEVICES["H100"], Layer(100_000, 4096, 11008)
    n = layer.data_parallel_limit(big, device)
    gathered, _ = forward_bytes(big, n, 1)
    for part, collectives in (("forward", 1), ("backward", 2)):
        seconds = collectives * gathered / device.axis_bytes_per_s
        assert seconds == pytest.approx(compute_s(big, device, part, n))
        most = layer.tensor_limit(big, device, part)
        seconds = forward_bytes(big, 1, most)[1] / device.axis_bytes_per_s
        assert seconds == pytest.approx(compute_s(big, device, part, most))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(
    "big", [Layer(65_536, 4096, 11008), Layer(3_000_000, 16384, 53248), Layer(64, 8, 64)]
)
def test_no_split_of_a_grid_has_more_devices_than_the_bound(device, big, overlap):
    most, fsdp, tensor = layer.grid_limit(big, device, overlap)
    assert most == pytest.approx(fsdp * tensor) and min(fsdp, tensor) >= 1
    taken = {"together": max, "in turn": sum}[overlap]
    sent = lambda x, y: taken(n / device.axis_bytes_per_s for n in forward_bytes(big, x, y))
    bound = lambda x, y: sent(x, y) <= compute_s(big, device, "forward", x * y) * (1 + 1e-9)
    assert bound(fsdp, tensor)
    for share in (0.3, 0.7, 0.9, 1.1, 1.5, 3):
        x, y = max(1.0, fsdp * share), max(1.0, tensor / share)
        if x * y >= most * (1 - 1e-9):
            assert not bound(1.001 * x, 1.001 * y)


def test_one_device_is_within_every_bound():
    slow = Chip(1e15, 1.0, 1.0)
    assert layer.data_parallel_limit(LAYER, slow) == pytest.approx(1)
    assert (
        layer.tensor_limit(LAYER, slow, "forward") >= 1 and layer.grid_limit(LAYER, slow, "in turn")[0] >= 1
    )


def test_wrong_words_and_sizes_are_refused():
    with pytest.raises(ValueError, match="unknown part 'sideways'; allowed: forward, backward"):
        layer.tensor_limit(LAYER, DEVICES["B200"], "sideways")
    with pytest.raises(ValueError, match="unknown overlap 'never'; allowed: together, in turn"):
        layer.grid_limit(LAYER, DEVICES["B200"], "never")
    with pytest.raises(ValueError, match="tokens=0"):
        replace(LAYER, tokens=0)
    assert math.isclose(DEVICES["H100"].alpha, 989.4e12 / 450e9)
