"""Timing of phases: order, turns, warm-up apart; the clock is a fake one, so nothing depends on time."""

import contextlib

import pytest

from cs336_systems.measure.clocks import phases
from cs336_systems.measure.clocks.phases import Series, columns, each, pooled, time_phases


@pytest.fixture
def clock(monkeypatch):
    """A clock that only functions move: `clock.spend(ms)`."""

    class Clock:
        now = 0.0

        def spend(self, ms):
            self.now += ms / 1e3

    clock = Clock()
    monkeypatch.setattr(phases.time, "perf_counter", lambda: clock.now)
    return clock


def test_phases_run_in_order_and_keep_their_own_times(clock):
    ran = []

    def phase(name, ms):
        return lambda: (ran.append(name), clock.spend(ms))

    found = time_phases(
        {"a": {"forward": phase("f", 2), "backward": phase("b", 5)}}, device="cpu", warmup=1, steps=3
    )
    assert ran == ["f", "b"] * 4
    assert found["a"]["forward"].steps_ms == pytest.approx([2] * 3)
    assert found["a"]["backward"].warmup_ms == pytest.approx([5])


def test_candidates_take_turns_and_come_back_with_one_step_that_is_not_kept(clock):
    ran, turns = [], []
    step = lambda name, ms: {"step": lambda: (ran.append(name), clock.spend(ms))}
    candidates = {"a": step("a", 1), "b": step("b", 10)}
    found = time_phases(candidates, device="cpu", warmup=2, steps=5, rounds=2, before=turns.append)
    assert turns == ["a", "b", "b", "a"]  # the order rotates
    assert "".join(ran) == "aa" + "aa" + "bb" + "bb" + "b" + "bbb" + "a" + "aaa"
    for name, ms in (("a", 1), ("b", 10)):
        assert found[name]["step"].steps_ms == pytest.approx([ms] * 5)
        assert found[name]["step"].warmup_ms == pytest.approx([ms] * 2)
    ran.clear()  # a single one is not interrupted
    time_phases({"a": candidates["a"]}, device="cpu", warmup=0, steps=4, rounds=2)
    assert ran == ["a"] * 4


def test_a_watch_is_on_during_its_candidate_s_turns_only(clock):
    on, seen = [], []

    class Watch:  # entered again and again, as `timing.Watch` is
        def __enter__(self):
            on.append("a")

        def __exit__(self, *_):
            on.remove("a")

    candidates = {name: {"step": lambda name=name: seen.append((name, list(on)))} for name in "ab"}
    time_phases(
        candidates, device="cpu", warmup=1, steps=4, watches={"a": Watch()},
        before=lambda name: seen.append((name, list(on))),
    )  # fmt: skip
    assert len(seen) == 2 * (2 + 1 + 4 + 1)
    assert all(watched == (["a"] if name == "a" else []) for name, watched in seen)


def test_ranges_tell_warm_up_from_steps(clock):
    open_now, seen = [], []

    @contextlib.contextmanager
    def ranges(name):
        open_now.append(name)
        seen.append("/".join(open_now))
        yield
        open_now.pop()

    one = {"forward": lambda: None}
    time_phases({"a": one}, device="cpu", warmup=1, steps=1, ranges=ranges)
    assert seen == ["warm-up", "warm-up/forward", "step", "step/forward"]


def test_what_a_phase_raises_comes_through_and_counts_are_checked():
    def fail():
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        time_phases({"a": {"step": fail}}, device="cpu")
    for counts in ({"warmup": -1}, {"steps": 0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="at least 0, 1 and 1"):
            time_phases({}, device="cpu", **counts)


def test_columns_of_a_series():
    series = Series([100.0], [1.0, 2.0, 6.0])
    found = series.metrics("forward")
    assert tuple(found) == columns("forward")
    assert found["forward_ms_mean"] == 3 and found["forward_ms_p50"] == 2
    assert found["forward_ms_std"] == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert each(found["forward_ms_each"]) == [1, 2, 6]
    assert Series([], [4.0]).std == 0
    assert each(float("nan")) == [] and each(None) == [] and each(3.5) == [3.5]


def test_pooled_adds_step_by_step():
    whole = pooled([Series([1.0], [1.0, 2.0]), Series([10.0], [10.0, 20.0])])
    assert whole.warmup_ms == [11] and whole.steps_ms == [11, 22]
