"""What the units of a multiprocessor must do for attention: counted by hand, and against simulations."""

import random

import pytest

from cs336_systems import accounting

H100 = accounting.MULTIPROCESSORS[90]


def test_a_tile_of_the_forward_pass_by_hand():
    """64 queries, 128 keys, d = 64: 512 clocks of the tensor cores, and 512 of the special function units."""
    clocks = accounting.forward_work(64, 128).clocks(64, H100)
    tile = 64 * 128
    assert clocks["products"] * tile == pytest.approx(2 * 2 * 64 * 128 * 64 / 4096) == pytest.approx(512)
    assert clocks["exps"] * tile == pytest.approx(512)
    assert clocks["instructions"] * tile == pytest.approx(4.5 * tile / 128)
    # Q (64 × 64), K (128 × 64) for the scores; V (128 × 64) for the output, whose P is in registers; 2 bytes each
    assert clocks["shared"] * tile == pytest.approx(2 * (64 * 64 + 128 * 64 + 128 * 64) / 128)


def test_a_tile_of_the_backward_pass_by_hand():
    tile = 64 * 128
    one, queries, keys = (accounting.backward_work(64, 128, passes) for passes in ("one", "queries", "keys"))
    assert (one.products, queries.products, keys.products) == (5, 3, 4)
    assert one.exps == queries.exps == keys.exps == 1  # each pass computes P again
    scores = 2 * 2 * (64 * 64 + 128 * 64)  # S and dP: both operands from shared memory
    sums = 2 * 128 * 64  # P or dS in registers, the other operand from shared memory
    assert queries.shared * tile == pytest.approx(scores + sums)
    assert keys.shared * tile == pytest.approx(scores + 2 * sums)
    # dS written, then read as the first operand of dQ (128 × 64) by two groups, which both read K (64 × 64)
    assert one.shared * tile == pytest.approx(scores + 2 * sums + 2 * tile + 2 * (128 * 64 + 2 * 64 * 64))
    masked = accounting.backward_work(64, 128, "keys", masked=True, folded=False)
    assert masked.instructions == keys.instructions + 4
    assert (queries + keys).products == 7
    with pytest.raises(ValueError, match=r"'three'.*one, queries, keys"):
        accounting.backward_work(64, 128, "three")


def test_units_agree_with_the_data_sheet():
    """All multiprocessors of an H100 at the clock that its peak implies: the products take what the sheet says."""
    sheet = accounting.peaks("NVIDIA H100 80GB HBM3").tflops["bf16"]
    mhz = sheet * 1e6 / (132 * H100.flops)
    assert 1700 < mhz < 2000
    pairs = 16 * 16384**2 / 2
    found = accounting.unit_ms(accounting.forward_work(64, 128), pairs, 64, 132, mhz, H100)
    flops = accounting.attention_flops(16, 16384, 16384, 64, True, "forward")
    assert found["products"] == pytest.approx(flops / (sheet * 1e9))
    assert set(found) == {"products", "exps", "instructions", "shared"}
    assert accounting.MULTIPROCESSORS[80].flops * 108 * 1410e6 == pytest.approx(312e12, rel=1e-3)  # A100


def test_visited_pairs_against_counting():
    for n, m, k in ((256, 64, 64), (256, 64, 32), (256, 32, 128), (128, 128, 64)):
        # a tile's first key is seen by its last query
        seen = [(i, j) for i in range(0, n, m) for j in range(0, n, k) if j <= i + m - 1]
        assert accounting.visited_pairs(n, m, k) == len(seen) * m * k
        assert accounting.visited_pairs(n, m, k, skip=False) == n * n
    # lengths that no tile divides: the last ones are whole
    assert (
        accounting.visited_pairs(100, 64, 64, skip=False) == 4 * 64**2 > accounting.visited_pairs(100, 64, 64)
    )
    assert accounting.visited_pairs(16384, 128, 64) / 16384**2 == pytest.approx(0.5, abs=0.01)


def test_overlap_lies_between_sum_and_slowest():
    times = {"products": 2.0, "exps": 3.0, "instructions": 1.0, "shared": 0.5}
    assert accounting.overlapped_ms(times, 0) == pytest.approx(6)
    assert accounting.overlapped_ms(times, 1) == pytest.approx(3)
    assert accounting.overlapped_ms(times, 0.5) == pytest.approx(4.5)
    slow = times | {"shared": 4.0}  # tensor cores wait for their operands
    assert accounting.overlapped_ms(slow, 0) == pytest.approx(8)
    assert accounting.overlapped_ms(slow, 1) == pytest.approx(4)
    with pytest.raises(ValueError, match=r"overlap=1\.5"):
        accounting.overlapped_ms(times, 1.5)


def test_idle_factor_of_orders():
    assert accounting.idle_factor([1.0] * 8, 4) == 1
    assert accounting.idle_factor([1.0] * 5, 4) == pytest.approx(8 / 5)
    costs = [float(i + 1) for i in range(100)]
    heavy, light = accounting.idle_factor(sorted(costs, reverse=True), 16), accounting.idle_factor(costs, 16)
    assert 1 <= heavy < light
    random.Random(0).shuffle(costs)
    assert heavy <= accounting.idle_factor(costs, 16)
    assert accounting.idle_factor(sorted(costs, reverse=True), 16, fixed=True) >= heavy
    assert accounting.idle_factor([3.0, 1.0, 1.0, 1.0], 2, fixed=True) == pytest.approx(4 / 3)
    assert accounting.idle_factor([3.0, 1.0, 1.0, 1.0], 2) == 1
    with pytest.raises(ValueError, match="0 programs and 4 slots"):
        accounting.idle_factor([], 4)


def test_the_harness_own_traffic():
    matrix = 16 * 16384 * 64 * 2
    assert sum(accounting.harness_bytes(16, 16384, 64, 2, stacked=False).values()) == 2 * matrix
    assert sum(accounting.harness_bytes(16, 16384, 64, 2, stacked=True).values()) == 17 * matrix


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="head_dim=0"):
        accounting.forward_work(0, 128)
    with pytest.raises(ValueError, match="pairs=0"):
        accounting.unit_ms(accounting.Work(2, 1, 4.5, 5), 0, 64, 132, 1800, accounting.Multiprocessor(4096))
    with pytest.raises(ValueError, match="block_n=-1"):
        accounting.visited_pairs(128, 64, -1)
