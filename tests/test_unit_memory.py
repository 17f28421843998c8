"""Memory over time: snapshots made up here, with known answers; no GPU, and nothing of torch but its names."""

import dataclasses
import itertools
import pickle
import random
import sys
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest

from cs336_systems.measure.memory import memory
from cs336_systems.measure.memory import timeline as memory_timeline
from cs336_systems.measure.memory.memory import recording
from cs336_systems.measure.memory.timeline import Timeline, timeline
from cs336_systems.store.files import StoreError
from cs336_systems.store.status import Skip

GIB, MIB = 2**30, 2**20


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


MODEL = [
    frame("/usr/lib/python3/site-packages/torch/nn/modules/linear.py", 108, "__init__"),
    frame("/home/me/book/cs336_systems/model.py", 40, "__init__"),
    frame("/home/me/run.py", 3, "<module>"),
]
FORWARD = [
    frame("/usr/lib/python3/site-packages/torch/nn/functional.py", 2142, "softmax"),
    frame("/home/me/book/cs336_systems/model.py", 81, "forward"),
    frame("/usr/lib/python3/site-packages/torch/nn/modules/module.py", 1776, "_call_impl"),
    frame("/home/me/book/cs336_systems/training/step.py", 12, "step"),
]


class FakeAllocator:
    """As much of torch's allocator as a snapshot tells: one event after another, and the blocks at the end."""

    def __init__(self, clock=10**15):
        self.trace, self.active, self.next, self.clock = [], {}, 0x7F0000000000, clock

    def event(self, action, **more):
        self.clock += 10
        entry = {"action": action, "size": 0, "stream": 0, "time_us": self.clock, "frames": [], **more}
        self.trace.append(entry)

    def alloc(self, size, frames=(), record=True):
        address = self.next
        self.next += size + 512
        self.active[address] = [size, "active_allocated"]
        if record:
            self.event("alloc", addr=address, size=size, frames=list(frames))
        return address

    def free(self, address, requested=True, completed=True):
        size = self.active[address][0]
        if requested:
            self.event("free_requested", addr=address, size=size)
            self.active[address][1] = "active_pending_free"
        if completed:
            self.event("free_completed", addr=address, size=size)
        if completed or not requested:
            del self.active[address]

    def mark(self, name):
        self.event("segment_alloc", addr=1, size=0)
        stack = [frame("/home/me/book/cs336_systems/measure/memory/memory.py", 9, f"_mark_{name}"), *FORWARD]
        self.free(self.alloc(memory.MARK_BYTES, stack))

    def snapshot(self):
        segments = []
        for address, (size, state) in self.active.items():  # in a segment each, with room behind it
            block = {"address": address, "size": size + 12, "requested_size": size, "state": state}
            rest = {"address": address + size + 12, "size": 500, "requested_size": 0, "state": "inactive"}
            segment = {"device": 0, "address": address, "total_size": size + 512, "blocks": [block, rest]}
            segments.append(segment)
        other = {"device": 1, "blocks": [{"address": 1, "requested_size": 7, "state": "active_allocated"}]}
        return {"segments": [*segments, other], "device_traces": [self.trace, []]}

    def replayed(self, peaks=None):
        return memory._replayed(self.snapshot(), 0, peaks or {})


def training_step(layers=3, weight=100, activation=70):
    """A model, then two steps: what a layer holds is known, and when. Returns the allocator."""
    gpu = FakeAllocator()
    gpu.mark("model")
    gpu.free(gpu.alloc(weight))  # a weight initialized on another device, say
    for _ in range(layers):
        gpu.alloc(weight, MODEL)
    states = []
    for _ in range(2):
        gpu.mark("forward")
        saved = []
        for _ in range(layers):
            gpu.free(gpu.alloc(5, FORWARD))
            saved.append(gpu.alloc(activation, FORWARD))
        loss = gpu.alloc(4)
        gpu.mark("backward")
        gradients = []
        for address in reversed(saved):
            upstream = gpu.alloc(30)
            gradients.append(gpu.alloc(weight))
            gpu.free(upstream)
            gpu.free(address)
        gpu.mark("optimizer")
        states = states or [gpu.alloc(2 * weight) for _ in range(layers)]
        gpu.free(gpu.alloc(50))
        for address in gradients:
            gpu.free(address)
        gpu.free(loss)
    return gpu


def peak(found):
    return max((stage.peak for stage in found.stages), key=lambda state: state.bytes)


def total(found):
    return np.sum([np.zeros(len(found.events), int), *map(np.array, found.bytes.values())], axis=0)


# -------------------------------------------------------------------------------------------------- the replay
def test_a_training_step_has_the_known_peaks_and_categories():
    snapshot = training_step().replayed()
    assert 343 not in {a.size for a in snapshot.allocations}
    found = timeline(snapshot)
    assert [s.name for s in found.stages] == [
        "model", "forward", "backward", "optimizer", "forward 2", "backward 2", "optimizer 2",
    ]  # fmt: skip
    peaks = {s.name: s.peak.by_category for s in found.stages}
    weights = {"weights": 300}
    assert peaks["model"] == weights  # the temporary one was gone when the third came
    assert peaks["forward"] == weights | {"activations": 214}
    # the last layer's activation frees first: 514 + 30 + 100, then 70 and 30 go, 130 come
    assert [found.stages[i].peak.bytes for i in (2, 5)] == [644 + 2 * 30, 644 + 2 * 30 + 600]
    assert peaks["backward"] == weights | {"activations": 74, "gradients": 300, "temporaries": 30}
    assert peaks["optimizer"] == {
        "weights": 300, "optimizer state": 600, "gradients": 300, "activations": 4, "temporaries": 50,
    }  # fmt: skip
    assert peaks["forward 2"] == weights | {"optimizer state": 600, "activations": 214}
    assert peak(found).bytes == 1304 == snapshot.active().max()
    assert found.bytes.keys() == {"weights", "optimizer state", "gradients", "activations", "temporaries"}
    np.testing.assert_array_equal(total(found), snapshot.active()[list(found.events)])


def test_where_allocations_come_from():
    gpu = training_step()
    gpu.alloc(1, [frame("/usr/torch/x.py", 1, "f"), frame("/home/me/own.py", 7, "g"), *FORWARD[2:3]])
    found = timeline(gpu.replayed())
    groups = {(g.stage, g.bytes): g for g in found.largest}
    forward, backward, own = groups["forward", 70], groups["backward", 100], groups["optimizer 2", 1]
    assert (forward.count, forward.category) == (3, "activations")
    assert forward.code == "cs336_systems/model.py:81 forward" and forward.function == "nn.functional.softmax"
    assert (backward.count, backward.category) == (3, "gradients")
    assert backward.code == backward.function == ""  # its threads have no frames
    assert (own.code, own.function) == ("own.py:7 g", "x.f")  # the innermost outside of torch
    assert [g.bytes for g in found.largest if g.stage == "forward"] == [70, 5, 4]


def test_memory_from_before_the_recording_is_a_base():
    gpu = FakeAllocator()
    gpu.alloc(1000, record=False)
    freed = gpu.alloc(300, record=False)
    gpu.mark("forward")
    gpu.alloc(50)
    gpu.free(freed)
    gpu.alloc(70)
    snapshot = gpu.replayed()
    assert snapshot.active()[0] == 1300
    assert snapshot.active().max() == 1350 and snapshot.active()[-1] == 1120
    assert peak(timeline(snapshot)).by_category == {"before recording": 1300, "activations": 50}


def test_what_comes_before_the_first_stage_is_of_none():
    gpu = FakeAllocator()
    early, passing = gpu.alloc(60), gpu.alloc(20)
    gpu.free(passing)
    gpu.mark("optimizer")
    gpu.alloc(100)
    gpu.free(early)
    found = timeline(gpu.replayed())
    assert found.stages[0].peak.by_category == {"optimizer state": 100, "other": 60}
    assert found.bytes["temporaries"][found.events.index(2)] == 20
    assert timeline(FakeAllocator().replayed()).stages == ()  # nor of any where there is none


def test_a_full_ring_buffer_is_refused(monkeypatch):
    gpu = training_step()
    monkeypatch.setattr(memory, "MAX_ENTRIES", len(gpu.trace) + 1)
    gpu.replayed()
    monkeypatch.setattr(memory, "MAX_ENTRIES", len(gpu.trace))
    with pytest.raises(ValueError, match=f"cut off: the allocator has kept its last {len(gpu.trace)} events"):
        gpu.replayed()


def test_what_another_stream_still_uses_is_active():
    gpu = FakeAllocator()
    before, first = gpu.alloc(7, record=False), gpu.alloc(100)
    gpu.free(first, completed=False)
    gpu.free(gpu.alloc(10))
    gpu.free(first, requested=False)
    gpu.event("segment_map", addr=1, size=1000)
    gpu.free(gpu.alloc(40), completed=False)
    gpu.free(before, completed=False)
    base = [0, 100, 100, 110, 110, 100, 0, 0, 40, 40, 40]
    assert list(gpu.replayed().active()) == [7 + num_bytes for num_bytes in base]


def test_out_of_memory_is_an_event():
    gpu = FakeAllocator()
    gpu.mark("forward")
    gpu.alloc(900)
    del gpu.trace[-1]["frames"]
    gpu.event("oom", size=5000, device_free=77)
    found = timeline(gpu.replayed())
    assert found.out_of_memory == ((len(gpu.trace) - 1, 5000, 77),)
    assert peak(found).by_category == {"activations": 900}  # the request that failed counts nowhere


# ------------------------------------------------------------------------------------------------- the recording
@pytest.fixture
def fake_cuda(monkeypatch):
    """A CUDA device whose allocator is ours: `torch.empty` on it allocates, with the stack trace of the caller."""
    torch = pytest.importorskip("torch")
    gpu = FakeAllocator()
    gpu.history = []

    def empty(size, dtype, device):
        assert device == "cuda" and dtype is torch.uint8
        stack, caller = [], sys._getframe(1)
        while caller is not None:
            stack.append(frame(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name))
            caller = caller.f_back
        gpu.free(gpu.alloc(size, stack))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"requested_bytes.all.peak": 77})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: gpu.history.append(kw))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", gpu.snapshot)
    monkeypatch.setattr(memory, "_take_workspaces", lambda: gpu.alloc(1000, record=False))
    return gpu


def test_a_recording_is_replayed_and_written(fake_cuda, tmp_path):
    path = tmp_path / "deep" / "s.pickle"
    with recording(path) as (mark, snapshot):
        assert fake_cuda.history[-1]["enabled"] == "all"
        for name in ("model", "forward", "no-kind 7"):
            mark(name)
            fake_cuda.alloc(100)
    assert fake_cuda.history[-1] == {"enabled": None} and len(fake_cuda.history) == 2
    assert [f.name for f in path.parent.iterdir()] == ["s.pickle"]
    assert path.read_bytes()[1] == 4  # its protocol
    assert pickle.loads(path.read_bytes()) == fake_cuda.snapshot()
    assert [m.name for m in snapshot().marks] == ["model", "forward", "no-kind 7"]
    assert snapshot().allocator["peak_requested_bytes"] == 77
    assert peak(timeline(snapshot())).by_category == {
        "before recording": 1000, "weights": 100, "activations": 100, "other": 100,
    }  # fmt: skip


def test_torch_names_a_marker_after_its_stage(monkeypatch):
    """With the collector of stack traces that the allocator uses; frames begin with the innermost."""
    torch = pytest.importorskip("torch")
    from torch._C._profiler import gather_traceback, symbolize_tracebacks

    kept = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: kept.append(gather_traceback(True, False, False)))
    memory._marker("forward 2")()
    [frames] = symbolize_tracebacks(kept)
    assert frames[1]["name"] == "_mark_forward 2" and Path(frames[1]["filename"]).name == "memory.py"
    assert memory._marked({"action": "alloc", "size": memory.MARK_BYTES, "frames": frames}) == "forward 2"


def test_a_recording_that_fails_is_taken_and_ended(fake_cuda, tmp_path):
    with pytest.raises(MemoryError, match="no more"), recording() as (mark, snapshot):
        mark("forward")
        fake_cuda.alloc(5)
        fake_cuda.event("oom", size=99, device_free=3)
        raise MemoryError("no more")
    assert fake_cuda.history[-1] == {"enabled": None}
    assert timeline(snapshot()).out_of_memory[0][1:] == (99, 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError), recording(tmp_path / "file" / "s.pickle"):  # where it cannot be written
        assert fake_cuda.history[-1]["enabled"] == "all"
    assert fake_cuda.history[-1] == {"enabled": None}


def test_a_recording_needs_a_gpu(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Skip, match="needs a CUDA device"), recording(tmp_path / "s.pickle"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    import torch

    with recording(tmp_path / "s.pickle") as (mark, snapshot):
        mark("model")
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        x = torch.randn(64, 1024, device="cuda")
        mark("forward")
        y = layer(x)
        mark("backward")
        y.sum().backward()
        mark("optimizer")
        torch.optim.AdamW(layer.parameters()).step()
    found = timeline(snapshot())
    assert [s.name for s in found.stages] == ["model", "forward", "backward", "optimizer"]
    assert peak(found).bytes == found.allocator["peak_requested_bytes"]
    assert peak(found).by_category["gradients"] >= 4 * MIB
    assert found.stages[0].peak.by_category["weights"] >= 4 * MIB


# ----------------------------------------------------------------------------------------------------- condensing
def random_history(rng, events):
    """Random allocations and frees, some on other streams, some from before; sizes up to 80 GiB in all."""
    gpu = FakeAllocator()
    before = [gpu.alloc(rng.randrange(1, GIB), record=False) for _ in range(rng.randrange(4))]
    live, pending = before, []
    gpu.mark("model")
    stages = ["model", "forward", "backward", "optimizer", "data"]
    while len(gpu.trace) < events:
        dice = rng.random()
        if dice < 0.02:
            gpu.mark(rng.choice(stages))
        elif pending and dice < 0.2:
            gpu.free(pending.pop(rng.randrange(len(pending))), requested=False)
        elif live and dice < 0.55:
            address = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.8:
                gpu.free(address)
            else:
                gpu.free(address, completed=False)
                pending.append(address)
        else:
            live.append(gpu.alloc(rng.randrange(1, GIB), rng.choice([MODEL, FORWARD, []])))
    return gpu


def counted(gpu):
    """The highest number of active bytes, counted in the plainest way: backward from the blocks at the end."""
    active = sum(size for size, _ in gpu.active.values())
    sizes = [active]
    for event in reversed(gpu.trace):
        if event["size"] != memory.MARK_BYTES:
            active += {"alloc": -1, "free_completed": 1}.get(event["action"], 0) * event["size"]
        sizes.append(active)
    return sizes[::-1]


@pytest.mark.parametrize("seed", range(6))
def test_condensing_keeps_the_peaks(monkeypatch, seed):
    rng = random.Random(seed)
    gpu = random_history(rng, rng.choice([30, 50, 2000, 5000]))
    snapshot, sizes = gpu.replayed(), counted(gpu)
    assert list(snapshot.active()) == sizes
    monkeypatch.setattr(memory_timeline, "MAX_POINTS", rng.choice([2, 40, 400]))
    found = timeline(snapshot)
    assert total(found).max() == max(sizes)
    assert list(total(found)) == [sizes[event] for event in found.events]
    assert {s.begin for s in found.stages} | {0, len(gpu.trace)} <= set(found.events)
    bounds = [*(s.begin for s in found.stages), len(gpu.trace)]
    for stage, last in zip(found.stages, bounds[1:], strict=True):
        assert stage.peak.bytes == max(sizes[stage.begin : last + 1]) == sizes[stage.peak.event]
        assert stage.begin <= stage.peak.event <= last
    monkeypatch.setattr(memory_timeline, "MAX_POINTS", 10**6)
    full = timeline(snapshot)
    assert len(full.events) == len(sizes)
    for name, values in full.bytes.items():
        assert max(found.bytes[name]) == max(values)


def test_a_timeline_is_read_back_from_a_small_file(tmp_path):
    gpu = random_history(random.Random(1), 6_000)
    gpu.event("oom", size=5000, device_free=77)
    snapshot = gpu.replayed({"peak_requested_bytes": 9})
    found = timeline(dataclasses.replace(snapshot, marks=snapshot.marks[:10]))
    assert 200 < len(found.events) <= memory_timeline.MAX_POINTS
    found.to_json(tmp_path / "t.json")
    assert (tmp_path / "t.json").stat().st_size < 60_000
    assert Timeline.from_json(tmp_path / "t.json") == found and found.allocator == {"peak_requested_bytes": 9}


# ------------------------------------------------------------------------------------------- figure and table
@pytest.fixture
def drawn():
    matplotlib.use("Agg")
    from cs336_systems.chapters.memory import figure as memory_figure

    yield memory_figure
    matplotlib.pyplot.close("all")


def test_the_figure_shows_stages_bands_and_peak(tmp_path, drawn):
    gpu = training_step(weight=100 * MIB, activation=70 * MIB)
    gpu.event("oom", size=3 * GIB, device_free=77)
    found = timeline(gpu.replayed())
    for without, shown in (((), "1.24 GiB"), (("weights",), "0.947 GiB")):
        figure, axes = drawn.figures.panels()
        drawn.draw(axes[0, 0], found, without)
        texts = [text.get_text().strip() for text in axes[0, 0].texts]
        assert {"model", "forward", "backward", "optimizer", "activations", shown} <= set(texts)
        assert texts.count("forward") == 2 and ("weights" in texts) == (not without)
        assert "out of memory, 3.00 GiB asked for" in texts
        figure.savefig(tmp_path / "f.png")
    counted = dataclasses.replace(found, allocator={"peak_allocated_bytes": 2 * GIB})
    drawn.draw(axes[0, 0], counted)
    assert "2.00 GiB" in [text.get_text() for text in axes[0, 0].texts]  # the allocator's own
    gpu = FakeAllocator()  # nothing is active
    gpu.mark("model")
    drawn.draw(drawn.figures.panels()[1][0, 0], timeline(gpu.replayed()))


def test_names_of_short_stages_do_not_overlap(drawn):
    from matplotlib.text import Text

    figure, axes = drawn.figures.panels()
    stages = [("forward", 0.0, 0.5), ("loss", 0.5, 0.51), ("backward", 0.51, 0.52), ("optimizer", 0.52, 1.0)]
    drawn.label_stages(axes[0, 0], stages)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes[0, 0].texts]  # without the lines that lead to them
    assert [text.xyann[1] for text in axes[0, 0].texts] == [3, 14, 25, 3]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_timeline_is_cropped_to_its_later_stages(drawn):
    whole = timeline(training_step().replayed())
    part = drawn.cropped(whole, "forward 2")
    assert [s.name for s in part.stages] == ["forward 2", "backward 2", "optimizer 2"]
    assert part.events[0] == part.stages[0].begin and peak(part) == peak(whole)
    assert peak(drawn.cropped(whole, "optimizer 2")).bytes < peak(whole).bytes
    assert drawn.cropped(whole, "loss").stages == whole.stages  # a stage that this recording lacks


def test_the_table_of_largest_allocations(drawn):
    found = timeline(training_step(activation=70 * MIB).replayed())
    table = drawn.largest_allocations(found, "forward")
    assert list(table["MiB"]) == pytest.approx([70, 5 / MIB]) and list(table["count"]) == [3, 3]
    assert table["code"][0] == "cs336_systems/model.py:81 forward" and table["category"][0] == "activations"
