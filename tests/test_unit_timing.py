"""Timing: how often functions are called, and in what order; never how long they took."""

import time
import weakref

import pytest

from cs336_systems.measure.clocks import timing
from cs336_systems.measure.clocks.timing import Timing, Watch, captured, host_us, interleaved, peak_gib
from cs336_systems.store.status import Skip

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


def test_quantiles_interpolate():
    with pytest.raises(ValueError, match="at least one sample"):
        Timing(())
    with pytest.raises(ValueError, match="not between 0 and 1"):
        Timing((1.0,)).quantile(20)
    t = Timing((4.0, 1.0, 3.0, 2.0, 5.0, 6.0))
    assert (t.p20, t.p50, t.p80) == (2.0, 3.5, 5.0)
    assert t.quantile(0) == 1.0 and t.quantile(1) == 6.0
    assert Timing((7.0,)).p80 == 7.0
    assert t.metrics("forward") == {"forward_ms_p20": 2.0, "forward_ms_p50": 3.5, "forward_ms_p80": 5.0}
    assert list(t.metrics()) == ["ms_p20", "ms_p50", "ms_p80"]


def test_functions_take_turns_and_the_order_rotates():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    # one timed call and one warm-up call a turn
    out = interleaved(functions, device="cpu", rounds=3, warmup_ms=0, rep_ms=0)
    assert {name: len(t.samples_ms) for name, t in out.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(calls) == "aabbcc" + "aabbcc" + "bbccaa" + "ccaabb"


def test_calls_have_a_limit():
    out = interleaved({"a": lambda: None}, device="cpu", rounds=2, warmup_ms=1, rep_ms=1000, max_calls=7)
    assert len(out["a"].samples_ms) == 14


def test_slow_functions_are_called_seldom(monkeypatch):
    assert [timing._turns(ms, 5) for ms in (1, 100, 400, 700, 10_000)] == [5, 5, 5, 2, 2]
    assert timing._turns(700, 1) == 1
    monkeypatch.setattr(timing, "SLOW_MS", 1.0)
    monkeypatch.setattr(timing, "SLOW_BUDGET_MS", 1.0)
    calls = []
    slow, fast = lambda: (calls.append("slow"), time.sleep(0.01)), lambda: calls.append("fast")
    functions = {"slow": slow, "fast": fast}
    out = interleaved(functions, device="cpu", rounds=5, warmup_ms=0, rep_ms=0)
    assert len(out["slow"].samples_ms) == 2 * timing.SLOW_SAMPLES  # two rounds
    assert calls.count("slow") == 2 + 2 * (1 + timing.SLOW_SAMPLES)
    assert len(out["fast"].samples_ms) == 5


def test_gradients_are_dropped_before_each_call():
    x = torch.ones(3, requires_grad=True)
    seen = []

    def backward():
        seen.append(x.grad)
        (x * x).sum().backward()

    interleaved({"b": backward}, device="cpu", rounds=2, warmup_ms=0, rep_ms=0, grad_to_none={"b": [x]})
    assert len(seen) > 2 and all(grad is None for grad in seen)


def test_wrong_arguments_are_named():
    for said, given in (
        ("rounds=0", {"rounds": 0}),
        ("no function is named b; there are a", {"grad_to_none": {"b": []}}),
        ("'tpu'; allowed: cpu, cuda", {"device": "tpu"}),
    ):
        with pytest.raises(ValueError, match=said):
            interleaved({"a": int}, **{"device": "cpu"} | given)
    with pytest.raises(ValueError, match="calls=0"):
        captured(int, calls=0)
    with pytest.raises(ZeroDivisionError):  # what a function raises comes through
        interleaved({"a": lambda: 1 / 0}, device="cpu")


@without_gpu
def test_without_a_gpu():
    with pytest.raises(Skip, match="needs a CUDA device"):
        interleaved({"a": int}, device="cuda")
    with pytest.raises(Skip, match="needs a CUDA device"):
        captured(int)
    assert peak_gib(lambda: 1 / 0) is None  # not called
    with Watch() as watch, watch:
        pass
    assert watch.metrics() == {"sm_mhz": None, "power_w": None}
    assert watch.why == "needs a CUDA device"


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


def fake_watch(monkeypatch, nvml):
    watch = Watch(interval_s=0.001)
    monkeypatch.setattr(
        watch, "_find_device", lambda: setattr(watch, "_handle", 0) or setattr(watch, "_nvml", nvml)
    )
    return watch


@pytest.mark.parametrize(("instant", "power"), [(True, 400.0), (False, 300.0)])
def test_watch_reads_clock_and_power(monkeypatch, instant, power):
    watch = fake_watch(monkeypatch, FakeNvml(instant))
    interleaved({"a": int, "b": int}, device="cpu", rounds=2, rep_ms=0, warmup_ms=0, watches={"a": watch})
    assert watch.metrics() == {"sm_mhz": 1500.0, "power_w": power}
    assert len(watch._samples) >= 4  # at entry and exit of two turns
    assert watch._thread is None
    with fake_watch(monkeypatch, FakeNvml(instant, fail_after=1)) as watch:
        time.sleep(0.02)
    assert watch.why == "NVML: lost" and watch.sm_mhz == 1500.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    a = torch.randn(512, 512, device="cuda", requires_grad=True)

    def square():
        return a.detach() @ a.detach()

    with Watch() as watch:
        out = interleaved({"mm": square}, device="cuda", rounds=2, rep_ms=5, warmup_ms=1)
    assert len(out["mm"].samples_ms) >= 2 and out["mm"].p20 > 0
    assert watch.why is None or watch.sm_mhz is None
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
