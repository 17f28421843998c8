"""Taking turns, and the clocks: how often functions are called, and in what order; never how long they took."""

import contextlib
import functools
import itertools
import time
import weakref
from collections import Counter

import pytest

from cs336_systems.measure import device
from cs336_systems.measure.clocks import calls, steps
from cs336_systems.measure.clocks.calls import Calls, captured, host_us, turns_of
from cs336_systems.measure.clocks.steps import Steps
from cs336_systems.measure.clocks.turns import (
    Candidate,
    Samples,
    columns,
    each,
    order,
    prepared,
    quantile,
    take_turns,
    time_together,
)
from cs336_systems.measure.device import Watch, comparable, medians, peak_gib
from cs336_systems.store.status import Skip

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only functions move: `clock.spend(ms)`."""

    class Clock:
        now = 0.0

        def spend(self, ms):
            self.now += ms / 1e3

    clock = Clock()
    for module in (calls, steps):
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


# ------------------------------------------------------------------------------------------------ statistics
def test_quantiles_interpolate():
    with pytest.raises(ValueError, match="of 0 samples"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="quantile 20 of 1"):
        quantile([1.0], 20)
    some = [4.0, 1.0, 3.0, 2.0, 5.0, 6.0]
    assert [quantile(some, q) for q in (0, 0.2, 0.5, 0.8, 1)] == [1, 2, 3.5, 5, 6]


def test_a_row_has_the_statistics_that_it_names_over_all_turns():
    samples = Samples(
        [{"forward": [1.0], "backward": [10.0]}, {"forward": [2.0, 6.0], "backward": [20.0, 60.0]}]
    )
    assert samples.row("forward") == {
        "forward_ms_p20": 1.4,
        "forward_ms_p50": 2,
        "forward_ms_p80": pytest.approx(4.4),
    }
    which = ("mean", "std", "min", "max", "each")
    found = samples.row("forward", which, prefix="")
    assert tuple(found) == columns("", which) == ("ms_mean", "ms_std", "ms_min", "ms_max", "ms_each")
    assert (found["ms_mean"], found["ms_min"], found["ms_max"]) == (3, 1, 6)
    assert found["ms_std"] == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert each(found["ms_each"]) == [1, 2, 6]
    assert Samples([{"a": [4.0]}]).row("a", ("std",)) == {"a_ms_std": 0}
    assert each(float("nan")) == [] and each(None) == [] and each(3.5) == [3.5]
    assert samples.summed("step").ms("step") == [11, 22, 66]  # step by step


# ------------------------------------------------------------------------------------------------ in turns
def test_every_candidate_comes_after_every_other():
    assert [order(4, turn) for turn in range(4)] == [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    for count in range(1, 9):
        rounds = [order(count, turn) for turn in range(count)]
        assert all(sorted(one) == list(range(count)) for one in rounds)
        assert all(sorted(place) == list(range(count)) for place in zip(*rounds, strict=True))
        follows = Counter(pair for one in rounds for pair in itertools.pairwise(one))
        assert all(times <= 1 + count % 2 for times in follows.values())


def test_functions_take_turns():
    ran = []
    functions = {name: {"call": lambda name=name: ran.append(name)} for name in "abc"}
    # one timed call and one warm-up call a turn, after two calls before the first
    found = take_turns(functions, Calls("cpu", num_rounds=3, warmup_ms=0, rep_ms=0))
    assert {name: len(samples.ms("call")) for name, samples in found.items()} == dict.fromkeys("abc", 3)
    assert "".join(ran) == "aaaa" + "bbbb" + "cccc" + "bbccaa" + "ccaabb"


def test_phases_run_in_order_and_keep_their_own_times(clock):
    ran = []
    phase = lambda name, ms: lambda: (ran.append(name), clock.spend(ms))
    one = {"forward": phase("f", 2), "backward": phase("b", 5)}
    found = take_turns({"a": one}, Steps("cpu", warmup=1, steps=3, num_rounds=2))
    assert ran == ["f", "b"] * 4  # a single one is not interrupted
    assert found["a"].ms("forward") == pytest.approx([2] * 3) and found["a"].ms("backward") == pytest.approx(
        [5] * 3
    )


def test_a_candidate_is_made_for_each_turn_which_begins_with_a_step_that_is_not_kept(clock):
    ran, alive = [], []

    def candidate(name, ms):
        @contextlib.contextmanager
        def turn():
            alive.append(name)
            yield {"step": lambda: (ran.append(name), clock.spend(ms))}
            alive.remove(name)

        return turn

    found = take_turns({"a": candidate("a", 1), "b": candidate("b", 10)}, Steps("cpu", warmup=2, steps=5))
    assert "".join(ran) == "aa" + "aa" + "bb" + "bb" + "b" + "bbb" + "a" + "aaa" and not alive
    assert found["a"].ms("step") == pytest.approx([1] * 5) and found["b"].ms("step") == pytest.approx(
        [10] * 5
    )


def test_the_device_has_finished_before_a_step_and_after_each_of_its_phases(monkeypatch):
    done = []
    monkeypatch.setattr(steps, "synchronizer", lambda device: lambda: done.append("wait"))
    phases = {name: functools.partial(done.append, name) for name in ("forward", "backward")}
    take_turns({"a": phases}, Steps("cpu", warmup=1, steps=2))
    assert done == 3 * ["wait", "forward", "wait", "backward", "wait"]


def test_ranges_tell_warm_up_from_steps():
    open_now, seen = [], []

    @contextlib.contextmanager
    def ranges(name):
        open_now.append(name)
        seen.append("/".join(open_now))
        yield
        open_now.pop()

    take_turns({"a": {"forward": int}}, Steps("cpu", warmup=1, steps=1, ranges=ranges))
    assert seen == ["warm-up", "warm-up/forward", "step", "step/forward"]


def test_slow_functions_are_called_seldom(monkeypatch, clock):
    assert [turns_of(ms, 5) for ms in (1, 100, 400, 700, 10_000)] == [5, 5, 5, 2, 2]
    assert turns_of(700, 1) == 1
    ran = []
    slow, fast = lambda: (ran.append("slow"), clock.spend(700)), lambda: (ran.append("fast"), clock.spend(1))
    found = take_turns({"slow": {"": slow}, "fast": {"": fast}}, Calls("cpu", warmup_ms=0, rep_ms=0))
    assert len(found["slow"].ms("")) == 2 * calls.SLOW_SAMPLES  # two rounds
    assert ran.count("slow") == 2 + 2 * (1 + calls.SLOW_SAMPLES)
    assert len(found["fast"].ms("")) == 5
    found = take_turns({"fast": {"": fast}}, Calls("cpu", num_rounds=1, warmup_ms=0, rep_ms=10**6))
    assert len(found["fast"].ms("")) == calls.MAX_CALLS
    before = ran.count("fast")
    found = take_turns({"fast": {"": fast}}, Calls("cpu", num_rounds=2, warmup_ms=3.5, rep_ms=7.5))
    assert len(found["fast"].ms("")) == 2 * 7 and ran.count("fast") - before == 2 + 2 * (3 + 7)


def test_what_a_turn_holds_is_gone_when_the_next_one_is_made():
    alive = weakref.WeakSet()

    @contextlib.contextmanager
    def turn():
        assert not alive
        alive.add(held := Candidate("something large"))
        yield {"step": lambda: held}

    take_turns({"a": turn, "b": turn}, Steps("cpu", warmup=0, steps=2))


def test_gradients_are_dropped_before_each_call():
    x, seen = torch.ones(3, requires_grad=True), []

    def backward():
        seen.append(x.grad)
        (x * x).sum().backward()

    take_turns({"b": {"": backward}}, Calls("cpu", num_rounds=2, warmup_ms=0, rep_ms=0, grads=[x]))
    assert len(seen) > 2 and all(grad is None for grad in seen)


def test_wrong_arguments_are_named():
    for said, make in (
        ("num_rounds=0", lambda: Calls("cpu", num_rounds=0)),
        ("'tpu'; allowed: cpu, cuda", lambda: Calls("tpu")),
        ("at least 0, 1 and 1", lambda: Steps("cpu", warmup=-1)),
        ("at least 0, 1 and 1", lambda: Steps("cpu", steps=0)),
        ("at least 0, 1 and 1", lambda: Steps("cpu", num_rounds=0)),
        ("calls=0", lambda: captured(int, calls=0)),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    for one in (Calls("cpu"), Steps("cpu")):
        with pytest.raises(ZeroDivisionError):  # what a function raises comes through
            take_turns({"a": {"": lambda: 1 / 0}}, one)


# ------------------------------------------------------------------------------------------------ cases
def test_what_fails_is_a_status_and_leaves_the_others(capsys):
    def prepare(candidate):
        if candidate.case == "missing":
            raise Skip("needs a CUDA device")
        candidate.phases = {"step": (lambda: 1 / 0) if candidate.case == "broken" else int}

    candidates = prepared(["missing", "broken", "fine", "fine too"], prepare)
    tidied = []
    timed = time_together(candidates, Steps("cpu", steps=3), lambda: tidied.append(1))
    assert [c.case for c in timed] == ["fine", "fine too"]
    assert all(len(c.samples.ms("step")) == 3 for c in timed)
    assert [c.metrics.get("status", "")[:28] for c in candidates] == [
        "skipped: needs a CUDA device", "error: ZeroDivisionError: di", "", "",
    ]  # fmt: skip
    assert len(tidied) == 4 and capsys.readouterr().err.count("Traceback") == 2  # together, and each alone


def test_two_candidates_take_turns():
    ran = []
    pair = [Candidate(name, phases={"step": lambda name=name: ran.append(name)}) for name in "ab"]
    assert time_together(pair, Steps("cpu", warmup=1, steps=2)) == pair
    assert "".join(ran) == "aa" + "bb" + "bb" + "aa"


def test_two_candidates_of_one_row_share_its_failure():
    metrics = {}
    failing, other = (Candidate("case", metrics, {"step": step}) for step in (lambda: 1 / 0, int))
    assert time_together([failing, other], Steps("cpu")) == [] and not other.samples.turns


# ------------------------------------------------------------------------------------------------ the device
def test_precision_and_shapes_are_as_they_were(monkeypatch):
    before, resets = torch.get_float32_matmul_precision(), []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    with contextlib.suppress(MemoryError), comparable("high") as precision:
        assert precision == torch.get_float32_matmul_precision() == "high" and resets
        raise MemoryError
    assert torch.get_float32_matmul_precision() == before


@without_gpu
def test_without_a_gpu():
    for make in (lambda: Calls("cuda"), lambda: captured(int), lambda: host_us(int)):
        with pytest.raises(Skip, match="needs a CUDA device"):
            make()
    assert peak_gib(lambda: 1 / 0) is None  # not called
    with Watch() as watch:
        pass
    assert medians([watch]) == {"sm_mhz": None, "power_w": None} == Samples().clocks()
    assert watch.why == "needs a CUDA device"


def test_a_peak_is_that_of_the_call_and_of_what_it_is_given(monkeypatch):
    now, peak = [10_000], [99_999]  # bytes: what others hold, too

    def call():
        peak[0] = max(peak[0], now[0] + 300)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, now[0]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    x, y = torch.empty(2, 25)  # of one storage
    for more in (0, 64 * 2**20):  # workspaces of cuBLAS that came meanwhile
        now[0] += more
        assert peak_gib(call) * 2**30 == now[0] + 300
        assert peak_gib(call, [x, y]) * 2**30 == 200 + 300


class FakeGraph:
    """As much of a CUDA graph as `captured` uses, of calls that wait for nothing."""

    def capture_begin(self):
        pass

    def capture_end(self):
        raise RuntimeError("operation failed due to a previous error during capture")


def test_captures_share_a_stream_and_say_what_went_wrong(monkeypatch):
    class Stream:
        def wait_stream(self, other):
            pass

    streams, called = [], []

    def fn():
        called.append(1)
        if len(called) % 4 == 0:  # the first one that is captured
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: streams.append(Stream()) or streams[-1])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(calls, "_side_stream", functools.cache(calls._side_stream.__wrapped__))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            captured(fn)
    assert len(streams) == 1 and len(called) == 8


class FakeNvml:
    """As much of pynvml as Watch uses."""

    NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = 1, 186, 0

    class NVMLError(Exception):
        pass

    def __init__(self, instant=True, fail_after=10**9):
        self.instant, self.left = instant, fail_after

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self.left -= 1
        if self.left < 0:
            raise self.NVMLError("lost")
        return 1500

    def nvmlDeviceGetFieldValues(self, handle, fields):
        from types import SimpleNamespace as Bag

        return [Bag(nvmlReturn=0 if self.instant else 3, value=Bag(uiVal=400_000))]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 300_000


@pytest.fixture
def nvml(monkeypatch):
    """Makes watches read from a FakeNvml."""

    def use(fake):
        found = lambda watch: setattr(watch, "_handle", 0) or setattr(watch, "_nvml", fake)
        monkeypatch.setattr(device.Watch, "_find_device", found)

    return use


@pytest.mark.parametrize(("instant", "power"), [(True, 400.0), (False, 300.0)])
def test_clock_and_power_are_read_during_a_candidate_s_turns(nvml, instant, power):
    nvml(FakeNvml(instant))
    few = {"num_rounds": 2, "rep_ms": 0, "warmup_ms": 0}
    found = take_turns({"a": {"": int}, "b": {"": int}}, Calls("cpu", **few))["a"]
    assert found.clocks() == {"sm_mhz": 1500.0, "power_w": power}
    assert len(found.watches) == 2 and all(
        len(watch.readings) >= 2 for watch in found.watches
    )  # at entry and exit
    assert not any(watch._thread.is_alive() for watch in found.watches)
    told = [
        take_turns({"a": {"": int}}, Steps("cpu", watched=watched))["a"].clocks() for watched in (True, False)
    ]
    assert told == [{"sm_mhz": 1500.0, "power_w": power}, {"sm_mhz": None, "power_w": None}]
    unwatched = take_turns({"a": {"": int}}, Calls("cpu", **few, watched=False))["a"]
    assert unwatched.clocks() == told[1]


def test_a_watch_that_fails_says_why(nvml):
    nvml(FakeNvml(fail_after=1))
    with Watch(interval_s=0.001) as watch:
        time.sleep(0.02)
    assert watch.why == "NVML: lost" and medians([watch])["sm_mhz"] == 1500.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    a = torch.randn(512, 512, device="cuda", requires_grad=True)

    def square():
        return a.detach() @ a.detach()

    found = take_turns({"mm": {"": square}}, Calls("cuda", num_rounds=2, rep_ms=5, warmup_ms=1, settle_ms=5))[
        "mm"
    ]
    assert len(found.ms("")) >= 2 and found.p50("") > 0
    watch = found.watches[0]
    assert watch.why is None or not watch.readings
    result = torch.zeros((), device="cuda")
    captured(lambda: result.add_(1), calls=5)()
    torch.cuda.synchronize()
    assert result.item() == 3 + 5  # before capture, and in the replay
    assert host_us(square, calls=5) > 0
    kept = torch.ones(4096, 4096, device="cuda")
    replay, known = captured(lambda x=kept: x.add_(1), calls=1), weakref.ref(kept)
    del kept
    assert known() is not None  # the graph reads it
    del replay
    assert known() is None
    assert peak_gib(square) >= 2 * 512 * 512 * 4 / 2**30
    alone, before = peak_gib(square, [a]), torch.cuda.memory_allocated()
    assert alone == 2 * 512 * 512 * 4 / 2**30
    captured(square, calls=1)  # whose stream has no workspaces of cuBLAS yet, perhaps
    held = torch.cuda.memory_allocated()
    captured(square, calls=1)
    assert peak_gib(square, [a]) == alone and torch.cuda.memory_allocated() == held >= before
