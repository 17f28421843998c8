"""Closed forms of data parallelism: buckets against the code's, the model of their overhead, its fit, memory."""

import math
import random

import pytest

from cs336_systems import accounting
from cs336_systems.accounting import data_parallel as closed
from cs336_systems.accounting.data_parallel import Buckets, fit_overhead
from cs336_systems.sizes import SIZES, ModelConfig, size

TOY = ModelConfig(d_model=32, d_ff=64, num_layers=3, num_heads=2, vocab_size=50)


# ------------------------------------------------------------------------------------------------ buckets
@pytest.mark.parametrize("max_bytes", [0, 5_000, 20_000, 1e9, math.inf])
def test_buckets_are_those_of_the_code(max_bytes):
    pytest.importorskip("torch")
    from cs336_systems.model import build
    from cs336_systems.parallel.buckets import assign

    parameters = list(build(TOY, device="meta").parameters())
    assert closed.gradient_sizes(TOY) == [p.numel() for p in parameters]
    expected = [sum(4 * p.numel() for p in b.parameters) for b in assign(reversed(parameters), max_bytes)]
    assert closed.bucket_bytes(TOY, max_bytes) == expected


@pytest.mark.parametrize("name", SIZES)
def test_all_bytes_are_in_some_bucket(name):
    config = size(name)
    total = 4 * accounting.num_parameters(config)
    assert total == 4 * sum(closed.gradient_sizes(config))
    counts = [len(closed.bucket_bytes(config, mb * closed.MB)) for mb in (0, 1, 10, 25, 100, 1000)]
    assert counts == sorted(counts, reverse=True) and counts[0] == len(closed.gradient_sizes(config))
    for mb in (1, 25, 1000):
        buckets = closed.bucket_bytes(config, mb * closed.MB)
        assert sum(buckets) == total
        limit = max(mb * closed.MB, 4 * max(closed.gradient_sizes(config)))
        assert max(buckets) <= limit
    with pytest.raises(ValueError, match="max_bytes=-1"):
        closed.bucket_bytes(config, -1)


def test_an_all_reduce_sends_twice_what_is_others():
    assert [closed.sent_bytes(100, n) for n in (1, 2, 4)] == [0, 100, 150]
    assert closed.all_reduce_ms([1e9, 1e9], 2, 1e11, 1e-3) == pytest.approx(22)
    for bad in ({"bytes_per_s": 0}, {"bytes_per_s": 1e9, "overhead_s": -1}):
        with pytest.raises(ValueError, match="must"):
            closed.all_reduce_ms([1], 2, **bad)


# ------------------------------------------------------------------------------------------------ the model
def simulated_overhead(num_buckets, s, w, o):
    """Buckets computed and sent in turns, each in the time of the other: what sending ends later by, and the calls."""
    each = s / num_buckets / w
    computed = sent = 0.0
    for _ in range(num_buckets):
        computed += each
        sent = max(sent, computed) + each
    return sent - computed + num_buckets * o


@pytest.mark.parametrize("num_buckets", [1, 2, 7, 100])
def test_the_model_is_its_derivation(num_buckets):
    model = Buckets(total_bytes=8e9, bytes_per_s=3e11, call_s=3e-5)
    assert model.overhead_s(num_buckets) == pytest.approx(simulated_overhead(num_buckets, 8e9, 3e11, 3e-5))


def test_the_optimum_is_least():
    model = Buckets(total_bytes=8e9, bytes_per_s=3e11, call_s=3e-5)
    best = model.best_num_buckets
    assert model.best_bucket_bytes == pytest.approx(8e9 / best)
    assert model.overhead_s(best) == pytest.approx(model.least_overhead_s)
    assert all(model.overhead_s(best * x) > model.least_overhead_s for x in (0.5, 0.9, 1.1, 2))
    with pytest.raises(ValueError, match="call_s=0"):
        Buckets(1, 1, 0)
    with pytest.raises(ValueError, match="num_buckets=0"):
        model.overhead_s(0)


@pytest.mark.parametrize("constant", [False, True])
def test_the_fit_finds_the_parameters(constant):
    true, offset = Buckets(8e9, 3e11, 3e-5), 4e-3 if constant else 0.0
    points = [(n, true.overhead_s(n) + offset) for n in (8, 98, 243, 339, 435)]
    fit = fit_overhead(8e9, points, constant)
    assert fit.model.bytes_per_s == pytest.approx(3e11) and fit.call_s == pytest.approx(3e-5)
    assert fit.constant_s == pytest.approx(offset, abs=1e-9)
    assert max(map(abs, fit.residuals_s)) < 1e-9
    assert fit.overhead_s(50) == pytest.approx(true.overhead_s(50) + offset)


def test_the_fit_is_that_of_non_negative_least_squares():
    np = pytest.importorskip("numpy")
    draw = random.Random(0)
    for _ in range(30):
        points = [(n, max(0.0, draw.gauss(5e-3, 4e-3))) for n in (8, 98, 243, 435)]
        fit = fit_overhead(8e9, points, constant=True)
        terms = np.array([fit.seconds_per_byte, fit.call_s, fit.constant_s])
        matrix = np.array([[8e9 / n, n, 1.0] for n, _ in points])
        wanted = np.array([y for _, y in points])
        assert (terms >= 0).all()
        assert fit.residuals_s == pytest.approx(wanted - matrix @ terms)
        # the conditions of Karush, Kuhn and Tucker: no allowed change of any term makes the sum of squares smaller
        slope = matrix.T @ np.array(fit.residuals_s) / np.linalg.norm(matrix, axis=0)
        assert (slope <= 1e-9).all()
        assert np.abs(slope[terms > 0]).max(initial=0) < 1e-9


def test_a_term_may_vanish():
    falling = fit_overhead(8e9, [(n, 1 / n) for n in (1, 10, 100)])
    assert falling.call_s == pytest.approx(0, abs=1e-9) and falling.seconds_per_byte == pytest.approx(1 / 8e9)
    rising = fit_overhead(8e9, [(n, 1e-3 * n) for n in (1, 10, 100)])
    assert rising.call_s == pytest.approx(1e-3)
    negative = fit_overhead(8e9, [(n, -1e-3) for n in (1, 10, 100)])
    assert negative.model is None and negative.overhead_s(10) == 0
    assert negative.residuals_s == pytest.approx([-1e-3] * 3)


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="2 different numbers of buckets are needed"):
        fit_overhead(1e9, [(5, 1e-3), (5, 1.1e-3)])
    with pytest.raises(ValueError, match="3 different"):
        fit_overhead(1e9, [(5, 1e-3), (6, 1.1e-3)], constant=True)


# ------------------------------------------------------------------------------------------------ memory
def test_what_each_way_holds():
    config, total = size("xl"), 4 * accounting.num_parameters(size("xl"))
    peak = {w: closed.peak_bytes(config, 2, 512, "fp32", w) for w in closed.WRAPPERS}
    plain = sum(accounting.peak_bytes(config, 2, 512, "train_step", optimizer="fused").values())
    assert {peak[w] for w in ("none", "naive", "overlapped", "in_place")} == {plain}
    assert peak["torch"] == plain + total and peak["flat"] == 5 * total
    assert plain < peak["torch_view"] <= peak["torch"]
    bucketed = {
        mb: closed.peak_bytes(config, 2, 512, "fp32", "bucketed", mb * closed.MB) for mb in (100, 1000)
    }
    assert plain < bucketed[100] < plain + 100 * closed.MB < bucketed[1000] < plain + 1000 * closed.MB
    assert closed.peak_bytes(config, 2, 128, "fp32", "bucketed", float("inf")) == pytest.approx(
        5 * total, rel=1e-3
    )
    with pytest.raises(ValueError, match="allowed: none, naive"):
        closed.peak_bytes(config, 2, 512, "fp32", "fsdp")


def test_weak_scaling():
    assert closed.scaling_efficiency(190, 200) == 0.95
    with pytest.raises(ValueError, match="alone_ms=0"):
        closed.scaling_efficiency(0, 1)


def test_wrappers_are_those_of_the_step():
    pytest.importorskip("torch")
    from cs336_systems.training.parallel_step import WRAPPERS

    assert closed.WRAPPERS == WRAPPERS
