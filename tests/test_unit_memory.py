"""Memory over time: snapshots made up here, with known answers; no GPU, and nothing of torch but its names."""

import contextlib
import dataclasses
import itertools
import json
import pickle
import random
import sys
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pytest
from damage import DROP, damage

from cs336_systems.measure.memory import memory, replay
from cs336_systems.measure.memory import timeline as memory_timeline
from cs336_systems.measure.memory.memory import Mark, read_snapshot, recording
from cs336_systems.measure.memory.timeline import Timeline, timeline
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
NODE = [
    frame("??", 0, "at::_ops::empty_memory_format::call(c10::ArrayRef<c10::SymInt>)"),
    frame("??", 0, "at::_ops::mm::redispatch(c10::DispatchKeySet, at::Tensor const&)"),
    frame("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
    frame("??", 0, "torch::autograd::Engine::thread_main"),
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

    def mark(self, name, frames=True):
        self.event("segment_alloc", addr=1, size=0)
        stack = [frame("/home/me/book/cs336_systems/measure/memory/memory.py", 9, f"_mark_{name}"), *FORWARD]
        self.free(self.alloc(replay.MARK_BYTES, stack if frames else []))

    def snapshot(self, **more):
        segments = []
        for address, (size, state) in self.active.items():  # in a segment each, with room behind it
            block = {"size": size + 12, "requested_size": size, "state": state, "frames": []}
            rest = {"size": 500, "requested_size": 0, "state": "inactive", "frames": []}
            segment = {"device": 0, "address": address, "total_size": size + 512, "blocks": [block, rest]}
            segments.append(segment)
        return {"segments": segments, "device_traces": [self.trace], "allocator_settings": {"x": 1.5}, **more}

    def write(self, path, **more):
        path.write_bytes(pickle.dumps(self.snapshot(**more)))
        return path


def training_step(layers=3, weight=100, activation=70, mark=FakeAllocator.mark):
    """A model, then two steps: what a layer holds is known, and when. Returns the allocator."""
    gpu = FakeAllocator()
    mark(gpu, "model")
    gpu.free(gpu.alloc(weight))  # a weight initialized on another device, say
    for _ in range(layers):
        gpu.alloc(weight, MODEL)
    states = []
    for _ in range(2):
        mark(gpu, "forward")
        saved = []
        for _ in range(layers):
            gpu.free(gpu.alloc(5, FORWARD))
            saved.append(gpu.alloc(activation, FORWARD))
        loss = gpu.alloc(4)
        mark(gpu, "backward")
        gradients = []
        for address in reversed(saved):
            upstream = gpu.alloc(30, NODE)
            gradients.append(gpu.alloc(weight, NODE))
            gpu.free(upstream)
            gpu.free(address)
        mark(gpu, "optimizer")
        states = states or [gpu.alloc(2 * weight) for _ in range(layers)]
        gpu.free(gpu.alloc(50))
        for address in gradients:
            gpu.free(address)
        gpu.free(loss)
    return gpu


@pytest.fixture
def read(tmp_path):
    """The snapshot of an allocator, and the file `s.pickle`."""
    return lambda gpu, **more: read_snapshot(gpu.write(tmp_path / "s.pickle", **more))


# -------------------------------------------------------------------------------------------------- the replay
def test_a_training_step_has_the_known_peaks_and_categories(read):
    snapshot = read(training_step())
    assert snapshot.marked_by == "frames" and not snapshot.notes and not snapshot.cut_off
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
    assert found.peak.bytes == 1304 == snapshot.active().max()
    assert found.bytes.keys() == {"weights", "optimizer state", "gradients", "activations", "temporaries"}
    np.testing.assert_array_equal(found.total(), snapshot.active()[list(found.events)])


def test_where_allocations_come_from(read, tmp_path):
    found = timeline(read(training_step()))
    groups = {(g.stage, g.bytes): g for g in found.largest}
    forward, backward = groups["forward", 70], groups["backward", 100]
    assert (forward.count, forward.category) == (3, "activations")
    assert forward.code == "cs336_systems/model.py:81 forward" and forward.function == "nn.functional.softmax"
    assert (backward.count, backward.category, backward.code) == (3, "gradients", "")
    assert backward.function == "MmBackward0"
    assert [g.bytes for g in found.largest if g.stage == "forward"] == [70, 5, 4]
    assert found.at_peak[0].category == "optimizer state" and found.at_peak[0].count == 3
    other = timeline(read_snapshot(tmp_path / "s.pickle"), code=("nowhere/",), top=1)
    assert other.largest[1].code == "model.py:81 forward"  # the innermost outside of torch
    assert len([g for g in other.largest if g.stage == "backward"]) == len(other.at_peak) == 1
    origin = memory_timeline._Origins(())
    assert origin(replay.Allocation(1, 0, 1, NODE[:2])) == ("", "mm")  # an operation without a node
    assert origin(replay.Allocation(1, 0, 1)) == ("", "")


def test_memory_from_before_the_recording_is_a_base(read):
    gpu = FakeAllocator()
    kept, freed = gpu.alloc(1000, record=False), gpu.alloc(300, record=False)
    gpu.mark("forward")
    gpu.alloc(50)
    gpu.free(freed)
    gpu.alloc(70)
    snapshot = read(gpu)
    assert snapshot.active()[0] == 1300 and kept in gpu.active
    assert snapshot.active().max() == 1350 and snapshot.active()[-1] == 1120
    found = timeline(snapshot)
    assert found.peak.by_category == {"before recording": 1300, "activations": 50}
    assert found.at_peak[0].stage == "" and found.at_peak[0].category == "before recording"


def test_a_full_ring_buffer_is_said(tmp_path):
    gpu = training_step()
    whole = read_snapshot(gpu.write(tmp_path / "whole.pickle"))
    keep = 30
    lost = len(gpu.trace) - keep
    gpu.trace = gpu.trace[-keep:]
    path = gpu.write(tmp_path / "cut.pickle", cs336_systems={"max_entries": keep})
    snapshot = read_snapshot(path)
    assert snapshot.cut_off and "only the last 30 events" in snapshot.notes[0]
    # markers left out, the rest of the history is the same
    np.testing.assert_array_equal(snapshot.active()[1:], whole.active()[lost + 1 :])
    assert timeline(snapshot).cut_off
    assert not read_snapshot(path, max_entries=31).cut_off and read_snapshot(path, max_entries=30).cut_off
    gpu.trace = gpu.trace * 2
    assert not read_snapshot(gpu.write(path)).cut_off  # one million, where nothing is said


A, FREE, FREED = "alloc", "free_requested", "free_completed"


@pytest.mark.parametrize(
    ("events", "left", "active", "notes"),
    [
        # another stream still uses what is freed: active until that is completed
        (
            [(A, 1, 100), (FREE, 1, 100), (A, 2, 10), (FREE, 2, 10), (FREED, 2, 10), (FREED, 1, 100), (A, 3, 1),
             (A, 4, 40), (FREE, 4, 40)],
            {3: (1, "active_allocated"), 4: (40, "active_pending_free")},
            [0, 100, 100, 110, 110, 100, 0, 1, 41, 41], [],
        ),
        # without completed frees it ends where they are requested; the address is used again
        ([(A, 1, 100), (FREE, 1, 100), (A, 1, 60), (FREE, 1, 60)], {}, [0, 100, 0, 60, 0], []),
        # the free of the first is missing, and the blocks of the others
        ([(A, 1, 100), (A, 1, 60), (A, 2, 20)], {}, [0, 100, 60, 80], ["1", "2"]),
    ],
)  # fmt: skip
def test_what_is_active(read, events, left, active, notes):
    gpu = FakeAllocator()
    for action, address, size in events:
        gpu.event(action, addr=address, size=size)
    gpu.active = left
    snapshot = read(gpu)
    assert list(snapshot.active()) == active and [note.split(" ")[0] for note in snapshot.notes] == notes
    assert timeline(snapshot).notes == snapshot.notes


def test_out_of_memory_is_an_event_and_workspaces_are_other(read):
    gpu = FakeAllocator()
    gpu.mark("forward")
    gpu.alloc(900)
    del gpu.trace[-1]["frames"]
    gpu.event("oom", size=5000, device_free=77)
    snapshot = read(gpu)
    found = timeline(snapshot)
    assert found.out_of_memory == ((len(gpu.trace) - 1, 5000, 77),)
    assert found.peak.by_category == {"activations": 900}  # the request that failed counts nowhere
    gpu.alloc(100, [frame("??", 0, "at::cuda::getCurrentCUDABlasHandle::getNewWorkspace()"), *NODE])
    assert timeline(read(gpu)).peak.by_category == {"activations": 900, "other": 100}  # a workspace


def test_other_events_change_nothing_but_what_is_reserved(read):
    gpu = FakeAllocator()
    gpu.event("segment_alloc", addr=1, size=4000)
    gpu.alloc(100)
    others = [
        ("segment_map", 1000), ("segment_free", 4000), ("segment_unmap", 600), ("snapshot", 0),
        ("annotate", 0),
    ]  # fmt: skip
    for action, size in [*others, ("something new", 0)]:
        gpu.event(action, addr=1, size=size)
    snapshot = read(gpu)
    assert list(snapshot.active()) == [0, 0, *[100] * 7]
    assert snapshot.peak_reserved_bytes == (100 + 512) + 600 + 4000  # counted back from the end


def test_devices_are_told_apart(tmp_path):
    one, two = FakeAllocator(), FakeAllocator()
    one.alloc(100)
    two.alloc(7)
    data = two.snapshot()
    for segment in data["segments"]:
        segment["device"] = 2
    data["segments"] += one.snapshot()["segments"]
    data["device_traces"] = [one.trace, [], two.trace]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(data))
    assert read_snapshot(path, device=0).active()[-1] == 100
    assert read_snapshot(path, device=2).active()[-1] == 7
    for wrong in (None, 1, 5):
        with pytest.raises(ValueError, match="allowed: 0, 2"):
            read_snapshot(path, device=wrong)


# ---------------------------------------------------------------------------------------------------- the marks
def test_marks_without_stack_traces_are_known_by_their_size(tmp_path):
    gpu = training_step(mark=lambda gpu, name: gpu.mark(name, frames=False))
    path = gpu.write(tmp_path / "s.pickle")
    unmarked = read_snapshot(path)
    assert unmarked.marks == () and unmarked.marked_by == "" and len(timeline(unmarked).stages) == 1
    assert timeline(unmarked).bytes.keys() == {"other"}
    names = ["model", *["forward", "backward", "optimizer"] * 2]
    snapshot = read_snapshot(gpu.write(path, cs336_systems={"marks": names}))
    assert snapshot.marked_by == "size" and [m.name for m in snapshot.marks] == names
    whole = read_snapshot(training_step().write(tmp_path / "whole.pickle"))
    assert timeline(snapshot).stages == timeline(whole).stages


def test_marks_can_be_given(tmp_path):
    gpu = FakeAllocator(clock=0)
    gpu.alloc(10)  # event 0, at 10 µs
    gpu.alloc(20)
    gpu.free(gpu.alloc(30))
    gpu.alloc(40)  # event 5
    path = gpu.write(tmp_path / "s.pickle")
    snapshot = read_snapshot(path, marks=[Mark("backward 1", time_us=55), Mark("model", index=1)])
    assert snapshot.marked_by == "given" and [(m.name, m.index) for m in snapshot.marks] == [
        ("model", 1), ("backward 1", 5),
    ]  # fmt: skip
    found = timeline(snapshot)
    assert [s.name for s in found.stages] == ["start", "model", "backward 1"]
    assert found.peak.by_category == {"other": 10, "weights": 20, "gradients": 40}
    other = timeline(snapshot, kinds={"backward 1": "activations"})
    assert other.peak.by_category == {"other": 30, "activations": 40}
    with pytest.raises(ValueError, match="unknown categories heap"):
        timeline(snapshot, kinds={"model": "heap"})
    for wrong in (Mark("x"), Mark("x", index=7)):
        with pytest.raises(ValueError, match="mark 'x'"):
            read_snapshot(path, marks=[wrong])
    for event in gpu.trace:
        del event["time_us"]
    path = gpu.write(path)
    assert timeline(read_snapshot(path)).time_ms == ()
    with pytest.raises(ValueError, match="a trace with times"):
        read_snapshot(path, marks=[Mark("x", time_us=3)])


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
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"requested_bytes.all.peak": 77})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: gpu.history.append(kw))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", gpu.snapshot)
    monkeypatch.setattr(memory, "_take_workspaces", lambda: gpu.alloc(1000, record=False))
    return gpu


def test_a_recording_is_read_back(fake_cuda, tmp_path):
    path = tmp_path / "deep" / "s.pickle"
    with recording(path, max_entries=500) as mark:
        assert fake_cuda.history[-1]["enabled"] == "all" and fake_cuda.history[-1]["max_entries"] == 500
        for name in ("model", "forward", "no-kind 7"):
            mark(name)
            fake_cuda.alloc(100)
        with pytest.raises(ValueError, match="stage '1st'"):
            mark("1st")
    assert fake_cuda.history[-1] == {"enabled": None} and len(fake_cuda.history) == 2
    assert [f.name for f in path.parent.iterdir()] == ["s.pickle"] and path.read_bytes()[
        1
    ] == 4  # its protocol
    snapshot = read_snapshot(path)
    assert [m.name for m in snapshot.marks] == ["model", "forward", "no-kind 7"]
    assert snapshot.marked_by == "frames" and snapshot.allocator["peak_requested_bytes"] == 77
    assert timeline(snapshot).peak.by_category == {
        "before recording": 1000, "weights": 100, "activations": 100, "other": 100,
    }  # fmt: skip
    with pytest.raises(ValueError, match="recording has ended"):
        mark("late")


def test_torch_names_a_marker_after_its_stage(monkeypatch):
    """With the collector of stack traces that the allocator uses; frames begin with the innermost."""
    torch = pytest.importorskip("torch")
    from torch._C._profiler import gather_traceback, symbolize_tracebacks

    kept = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: kept.append(gather_traceback(True, False, False)))
    memory._marker("forward 2")()
    [frames] = symbolize_tracebacks(kept)
    assert frames[1]["name"] == "_mark_forward 2" and Path(frames[1]["filename"]).name == "memory.py"
    assert replay._marked(frames) == "forward 2"


def test_a_recording_that_fails_is_written_and_ended(fake_cuda, tmp_path):
    with pytest.raises(MemoryError, match="no more"), recording(tmp_path / "s.pickle") as mark:
        mark("forward")
        fake_cuda.alloc(5)
        fake_cuda.event("oom", size=99, device_free=3)
        raise MemoryError("no more")
    assert fake_cuda.history[-1] == {"enabled": None}
    assert timeline(read_snapshot(tmp_path / "s.pickle")).out_of_memory[0][1:] == (99, 3)
    with pytest.raises(OSError), recording(tmp_path / "s.pickle" / "s.pickle"):  # where it cannot be written
        assert fake_cuda.history[-1]["enabled"] == "all"
    assert fake_cuda.history[-1] == {"enabled": None}


def test_a_recording_needs_a_gpu(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Skip, match="needs a CUDA device"), recording(tmp_path / "s.pickle"):
        pass
    with pytest.raises(ValueError, match="'c'; allowed: python, all"):
        recording(tmp_path / "s.pickle", stacks="c").__enter__()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    import torch

    with recording(tmp_path / "s.pickle") as mark:
        mark("model")
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        x = torch.randn(64, 1024, device="cuda")
        mark("forward")
        y = layer(x)
        mark("backward")
        y.sum().backward()
        mark("optimizer")
        torch.optim.AdamW(layer.parameters()).step()
    snapshot = read_snapshot(tmp_path / "s.pickle")
    assert snapshot.marked_by == "frames" and not snapshot.notes
    found = timeline(snapshot)
    assert [s.name for s in found.stages] == ["model", "forward", "backward", "optimizer"]
    assert found.peak.bytes == snapshot.allocator["peak_requested_bytes"]
    assert found.peak.by_category["gradients"] >= 4 * MIB
    assert found.stages[0].peak.by_category["weights"] >= 4 * MIB


# ------------------------------------------------------------------------------------------------------ bad files
ALLOCATED = {"action": "alloc", "size": 1, "addr": 2}


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_malicious_file_is_refused_and_does_nothing(tmp_path, protocol):
    target, path = tmp_path / "touched", tmp_path / "s.pickle"
    data = FakeAllocator().snapshot() | {"more": [Malicious(target)]}
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    with pytest.raises(ValueError, match=r"wants to import \w+.*nothing was run"):
        read_snapshot(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # while an ordinary reader would have run it
    assert target.exists()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    path = training_step().write(tmp_path / "s.pickle")
    whole = path.read_bytes()
    for length in [1, 2, 3, 11, 12, *range(20, len(whole) - 1, len(whole) // 50), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated|damaged"):
            read_snapshot(path)


def test_damaged_bytes_never_raise_anything_else(tmp_path):
    path = training_step(layers=1).write(tmp_path / "s.pickle")
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.randrange(2, len(whole))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            timeline(read_snapshot(path))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip", "is not a pickle"),
        (b"{'segments': []}", "is not a pickle"),
        ([1, 2], "lacks 'segments' or 'device_traces'"),
        ({"segments": []}, "lacks 'segments' or 'device_traces'"),
        ({"device_traces": []}, "has no history"),
        ({"device_traces": [[], [{"action": "snapshot", "size": 0}]]}, "no history"),
        ({"device_traces": [[{"size": 0}]]}, "lacks the key 'action'"),
        ({"device_traces": [[{"action": "alloc", "size": 1}]]}, "the key 'addr'"),
        ({"device_traces": [["alloc"]]}, "as this version knows it"),
        ({"device_traces": [[ALLOCATED]], "segments": [{}]}, "lacks the key 'address'"),
        ({"device_traces": [[ALLOCATED | {"size": "1"}]]}, "no number of bytes"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, why):
    if isinstance(content, dict) and "device_traces" in content:
        content = {"segments": []} | content
    (tmp_path / "s.pickle").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    with pytest.raises(ValueError, match=why):
        read_snapshot(tmp_path / "s.pickle")


# ----------------------------------------------------------------------------------------------------- condensing
def random_history(rng, events):
    """Random allocations and frees, some on other streams, some from before; sizes up to 80 GiB in all."""
    gpu = FakeAllocator()
    before = [gpu.alloc(rng.randrange(1, GIB), record=False) for _ in range(rng.randrange(4))]
    live, pending = before, []
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
            live.append(gpu.alloc(rng.randrange(1, GIB), rng.choice([MODEL, FORWARD, NODE])))
    return gpu


def counted(gpu):
    """The highest number of active bytes, counted in the plainest way: backward from the blocks at the end."""
    active = sum(size for size, _ in gpu.active.values())
    sizes = [active]
    for event in reversed(gpu.trace):
        if event["size"] != replay.MARK_BYTES:
            active += {"alloc": -1, "free_completed": 1}.get(event["action"], 0) * event["size"]
        sizes.append(active)
    return sizes[::-1]


@pytest.mark.parametrize("seed", range(6))
def test_condensing_keeps_the_peaks(read, seed):
    rng = random.Random(seed)
    gpu = random_history(rng, rng.choice([3, 50, 2000, 5000]))
    snapshot = read(gpu)
    sizes = counted(gpu)
    assert list(snapshot.active()) == sizes and not snapshot.notes
    found = timeline(snapshot, max_points=rng.choice([2, 40, 400]))
    assert found.peak.bytes == max(sizes) == found.total().max() == sizes[found.peak.event]
    assert list(found.total()) == [sizes[event] for event in found.events]
    assert {s.begin for s in found.stages} | {0, len(gpu.trace)} <= set(found.events)
    bounds = [*(s.begin for s in found.stages), len(gpu.trace)]
    for stage, last in zip(found.stages, bounds[1:], strict=True):
        assert stage.peak.bytes == max(sizes[stage.begin : last + 1]) == sizes[stage.peak.event]
        assert stage.begin <= stage.peak.event <= last
    full = timeline(snapshot, max_points=10**6)
    for name, values in full.bytes.items():
        assert max(found.bytes[name]) == max(values)
    assert len(full.events) == len(sizes) and sum(g.bytes * g.count for g in full.at_peak) <= max(sizes)


def test_points_are_few(read, tmp_path):
    snapshot = read(random_history(random.Random(1), 6_000))
    snapshot = replay.Snapshot(**{**vars(snapshot), "marks": snapshot.marks[:10]})
    found = timeline(snapshot)
    assert 200 < len(found.events) <= memory_timeline.MAX_POINTS
    found.to_json(tmp_path / "t.json")
    assert (tmp_path / "t.json").stat().st_size < 60_000
    with pytest.raises(ValueError, match="max_points=1"):
        timeline(snapshot, max_points=1)


# ------------------------------------------------------------------------------------------------------- the JSON
def test_json_round_trip(tmp_path, read):
    gpu = training_step()
    gpu.event("oom", size=5000, device_free=77)
    found = timeline(read(gpu, cs336_systems={"peak_requested_bytes": 9}))
    found.to_json(tmp_path / "t.json")
    assert Timeline.from_json(tmp_path / "t.json") == found and found.allocator == {"peak_requested_bytes": 9}
    text = (tmp_path / "t.json").read_text()
    parts = json.loads(text)
    assert parts["version"] == 1 and parts["peak"]["bytes"] == found.peak.bytes
    assert max(map(len, text.splitlines())) < 2000 and '\n "weights": [' in text


@pytest.mark.parametrize(("place", "value", "why"), [
    ("format", "x", "is no memory timeline"), ("version", 2, "version 2; this code reads 1"), ("color", "red", "color"),
    ("peak", DROP, "lacks 'peak'"), ("num_events", DROP, "num_events"), ("num_events", 7, "reach the last event"),
    ("events", lambda events: events[:-1], "different numbers"),
    ("events", lambda events: events[::-1], "order of events"),
    ("bytes", lambda found: found | {"heap": found["weights"]}, "unknown categories heap"),
    ("bytes.weights.3", 1.5, "no list of integers"), ("bytes.weights.3", -1, "fewer than 0 bytes"),
    ("bytes.weights.3", 10**6, "not the highest point"), ("peak.event", 0, "not the highest point"),
    ("peak.by_category.weights", 1, "not the highest point"), ("stages", [], "no stages"),
    ("stages.0.begin", 10**6, "begins outside"), ("stages.0.begin", "1", "no valid memory timeline"),
    ("largest.0.bytes", "1", "no size"), ("largest.0.category", "x", "no known category"),
    ("largest.0.code", DROP, "code"),
])  # fmt: skip
def test_invalid_json_is_refused(tmp_path, read, place, value, why):
    path = tmp_path / "t.json"
    timeline(read(training_step())).to_json(path)
    parts = json.loads(path.read_text())
    damage(parts, place, value)
    path.write_text(json.dumps(parts))
    with pytest.raises(ValueError, match=why):
        Timeline.from_json(path)


@pytest.mark.parametrize(("content", "why"), [(b"\xff\xfe", "no JSON"), (b"[1]", "no memory timeline")])
def test_files_that_are_no_timeline_are_refused(tmp_path, content, why):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        Timeline.from_json(tmp_path / "t.json")


# ------------------------------------------------------------------------------------------- figure and table
@pytest.fixture
def drawn():
    matplotlib.use("Agg")
    from cs336_systems.chapters.memory import figure as memory_figure

    yield memory_figure
    matplotlib.pyplot.close("all")


def test_the_figure_shows_stages_bands_and_peak(read, tmp_path, drawn):
    gpu = training_step(weight=100 * MIB, activation=70 * MIB)
    gpu.event("oom", size=3 * GIB, device_free=77)
    found = timeline(read(gpu))
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
    gpu.free(gpu.alloc(0))
    drawn.draw(drawn.figures.panels()[1][0, 0], timeline(read(gpu)))


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


def test_a_timeline_is_cropped_to_its_later_stages(read, drawn):
    whole = timeline(read(training_step()))
    part = drawn.cropped(whole, "forward 2")
    assert [s.name for s in part.stages] == ["forward 2", "backward 2", "optimizer 2"]
    assert part.events[0] == part.stages[0].begin and part.peak == whole.peak
    assert drawn.cropped(whole, "optimizer 2").peak.bytes < whole.peak.bytes
    assert drawn.cropped(whole, "loss").stages == whole.stages  # a stage that this recording lacks


def test_the_table_of_largest_allocations(read, drawn):
    found = timeline(read(training_step(activation=70 * MIB)))
    table = drawn.largest_allocations(found, "forward")
    assert list(table["MiB"]) == pytest.approx([70, 5 / MIB]) and list(table["count"]) == [3, 3]
    assert table["code"][0] == "cs336_systems/model.py:81 forward" and table["category"][0] == "activations"
