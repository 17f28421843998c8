"""Chapter memory: its grid, what is recorded on a GPU and on a CPU, the frames of its page, and its notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pandas as pd
import pytest
from test_unit_memory import FakeAllocator, training_step

from cs336_systems import accounting, chapters
from cs336_systems.chapters.memory import figure
from cs336_systems.chapters.memory import measure as memory
from cs336_systems.chapters.memory import show as page
from cs336_systems.measure.memory import tensors
from cs336_systems.measure.memory.timeline import Stage, State, Timeline, timeline
from cs336_systems.report.claims import execute
from cs336_systems.sizes import SIZES, size
from cs336_systems.store import rows as store
from cs336_systems.store import selection
from cs336_systems.store.machine import machine_name
from cs336_systems.store.process import ChildError

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
pytestmark = pytest.mark.usefixtures("forked")

GIB = 2**30
MACHINE = "h100-x1"
BYTES = list(memory.CATEGORY_COLUMNS.values())


# --------------------------------------------------------------------------------- grids and places


def test_timelines_lie_beside_the_csv_and_have_names_of_their_own(tmp_path):
    drawn = [c for preset in selection.PRESETS for c in memory.grid(preset) if memory.drawn(c)]
    paths = {store.file_beside(memory.TABLE, c, MACHINE, tmp_path) for c in drawn}
    assert len(paths) == len(drawn) < 35
    assert {p.parent for p in paths} == {store.csv_path("memory", MACHINE, tmp_path).with_suffix("")}
    assert tmp_path / MACHINE / "memory" / "2.7B_512_train_step_fp32_fused.json" in paths
    # not among results
    assert store.recordings_folder("memory", tmp_path / "results") == tmp_path / "_build" / "memory"


# --------------------------------------------------------------------------------- tensors, on a CPU
def test_tensors_are_watched_from_their_making_to_their_end():
    with tensors.watching_tensors() as (mark, snapshot):
        mark("model")
        kept = torch.zeros(100)
        view = kept[:50].view(5, 10)  # no memory of its own
        mark("forward")
        for _ in range(2):
            kept = kept + 1  # the old one is still the view's, the first time
        empty = torch.empty(0)
        found = snapshot()
        del view
        after = snapshot()
    assert list(found.active()) == [0, 400, 800, 1200, 800]
    assert list(after.active())[-1] == 400 and empty.numel() == 0
    assert [(m.name, m.index) for m in found.marks] == [("model", 0), ("forward", 1)]
    condensed = timeline(found)  # a stage's first allocation is its own, and none of the one before
    assert [(s.peak.bytes, s.peak.by_category) for s in condensed.stages] == [
        (400, {"weights": 400}), (1200, {"weights": 400, "activations": 400, "temporaries": 400}),
    ]  # fmt: skip
    [line] = {g.code.split(":")[0] for g in condensed.largest}
    assert line == Path(__file__).name  # torch's own frames are not taken for the caller
    del kept  # nothing is written down any more
    assert list(after.active())[-1] == 400


def test_what_was_there_before_is_so_however_it_is_used():
    read, viewed, written, gone = (torch.zeros(n, 4) for n in (1, 2, 3, 5))
    with tensors.watching_tensors() as (mark, snapshot):
        mark("forward")
        product = read @ viewed.mT
        written += 1
        product += gone.sum()
        del gone
        copied = torch.tensor([1.0, 2.0, 3.0])  # made here
        found = snapshot()
    states = {
        (a.size, a.begin < 0, a.end < found.num_events) for a in found.allocations if a.size != 4
    }  # but the sum
    assert states == {
        (16, True, False), (32, True, False), (48, True, False), (80, True, True),
        (product.nbytes, False, False), (copied.nbytes, False, False),
    }  # fmt: skip
    assert timeline(found).bytes["before recording"][0] == found.active()[0] == 16 * (1 + 2 + 3 + 5)
    del read, viewed, written  # nothing is written down any more
    assert snapshot().active()[-1] == found.active()[-1]


def test_a_tensor_that_another_thread_lets_go_meanwhile(monkeypatch):
    kept, replay = [torch.empty(0)], tensors.replay

    def meanwhile(*args, **kwargs):
        kept.clear()
        return replay(*args, **kwargs)

    monkeypatch.setattr(tensors, "replay", meanwhile)
    with tensors.watching_tensors() as (_, snapshot):
        kept[0] = torch.zeros(100)
        found, after = snapshot(), snapshot()
    assert list(found.active()) == [0, 400] and list(after.active()) == [0, 400, 0]


@without_gpu
def test_smoke_agrees_with_the_closed_form(smoke):
    frame, _ = smoke
    assert set(frame["status"]) == {"ok"} and set(frame["source"]) == {"tensors"}
    for row in frame.to_dict("records"):
        case = memory.Case(**{f: row[f] for f in store.case_fields(memory.TABLE)})
        expected = accounting.peak_bytes(
            size(case.size), case.batch, case.context_length, case.mode, case.dtype, "reference", "cpu",
            case.optimizer,
        )  # fmt: skip
        assert row["requested_bytes"] == pytest.approx(sum(expected.values()), rel=5e-3)
        assert row["peak_bytes"] == row["requested_bytes"] == pytest.approx(row["peak_gib"] * GIB, rel=1e-5)
        assert sum(row[column] for column in BYTES) == row["requested_bytes"]
        assert row["weights_bytes"] == pytest.approx(expected["weights"], rel=5e-3)
        assert row["optimizer_state_bytes"] == pytest.approx(expected["optimizer_state"], rel=1e-3)
        assert row["peak_stage"] == ("backward 2" if case.mode == "train_step" else "forward")


@without_gpu
def test_timelines_of_the_smoke_preset_are_those_of_their_rows(smoke):
    frame, root = smoke
    for row in frame[frame["repeat"] == 0].to_dict("records"):
        case = memory.Case(**{f: row[f] for f in store.case_fields(memory.TABLE)})
        path = store.file_beside(memory.TABLE, case, machine_name(), root)
        found = Timeline.from_json(path)
        assert path.stat().st_size < 60_000
        names = [stage.name for stage in found.stages]
        if case.mode == "train_step":
            step = ["forward", "loss", "backward", "optimizer"]
            assert names == ["model", *step, *(f"{name} 2" for name in step)]
        else:
            assert names == ["model", "forward"]
        stage = memory.peak_stage(found)
        assert (stage.name, stage.peak.bytes) == (row["peak_stage"], row["requested_bytes"])
    again = frame[frame["repeat"] == 1].iloc[0]
    alike = [f for f in store.case_fields(memory.TABLE) if f != "repeat"]
    [first] = frame[(frame[alike] == again[alike]).all(axis=1) & (frame["repeat"] == 0)].to_dict("records")
    assert first["peak_bytes"] == again["peak_bytes"] and first["allocations"] == again["allocations"]


# --------------------------------------------------------------------------------- a GPU, made up
@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(memory, "machine_name", lambda: MACHINE)


def test_each_case_is_a_process_and_a_failure_is_a_row(fake_gpu, monkeypatch, results_root, capsys):
    calls = []

    def fake_call(function, arguments, timeout_s):
        calls.append((function, json.loads(json.dumps(arguments))))  # what goes to the child is JSON
        if len(calls) == 1:
            raise ChildError("ended with signal SIGSEGV and no result")
        return {"peak_gib": 1.5} if len(calls) == 2 else {"status": "oom", "asked_bytes": 7}

    monkeypatch.setattr(memory, "call", fake_call)
    cases = [memory.Case("2.7B", 128, "train_step"), memory.Case("2.7B", 512, "forward", "bf16")]
    cases += [memory.Case("2.7B", 256, "train_step")]
    found = list(memory.run_group(cases))
    assert found[0]["status"] == "error: ChildError: ended with signal SIGSEGV and no result"
    assert found[1:] == [{"peak_gib": 1.5}, {"status": "oom", "asked_bytes": 7}]
    assert {function for function, _ in calls} == {"cs336_systems.chapters.memory.measure:alone"}
    assert [memory.Case(**arguments["case"]) for _, arguments in calls] == cases
    name = "2.7B_512_forward_bf16_fused"
    assert calls[1][1]["raw"] == str(store.recordings_folder("memory") / f"{name}.pickle")
    assert calls[1][1]["file"] == str(results_root / MACHINE / "memory" / f"{name}.json")
    assert calls[2][1]["raw"] is None and calls[2][1]["file"] is None  # no figure shows this one
    assert "SIGSEGV" in capsys.readouterr().err


def recorded(monkeypatch, gpu, failure=None):
    """`alone` sees this allocator's history, and the steps raise `failure`; returns where it is to be written."""
    asked = []

    @contextlib.contextmanager
    def recording(path):
        peaks = {"peak_allocated_bytes": 2048, "peak_requested_bytes": 1304, "peak_reserved_bytes": 4096}
        try:
            yield lambda name: None, lambda: gpu.replayed(peaks)
        finally:
            asked.append(path)

    def steps(case, device, mark):
        if failure is not None:
            raise failure
        return "what lives"

    monkeypatch.setattr(memory, "recording", recording)
    monkeypatch.setattr(memory, "take_steps", steps)
    return asked


def test_a_history_becomes_a_row_and_a_timeline(fake_gpu, monkeypatch, tmp_path):
    asked = recorded(monkeypatch, training_step())
    case = dataclasses.asdict(memory.Case("2.7B", 128, "train_step"))
    raw, file = tmp_path / "raw" / "s.pickle", tmp_path / "deep" / "t.json"
    metrics = memory.alone(case, str(raw), str(file))
    assert set(metrics) == set(memory.TABLE.metrics)
    assert metrics["source"] == "allocator" and metrics["device_bytes"] == 80 * GIB
    # known from the unit test of the same history
    assert metrics["requested_bytes"] == 1304 and metrics["peak_stage"] == "backward 2"
    assert (metrics["peak_bytes"], metrics["reserved_bytes"]) == (2048, 4096)
    assert metrics["weights_bytes"] == 300 and metrics["optimizer_state_bytes"] == 600
    assert metrics["gradients_bytes"] == 300 and sum(metrics[c] for c in BYTES) == 1304
    assert (metrics["largest_bytes"], metrics["largest_count"]) == (70, 3)
    assert metrics["largest_code"] == "cs336_systems/model.py:81 forward"
    assert metrics["allocations"] == 4 + 2 * (2 * 3 + 1 + 2 * 3 + 1) + 3
    assert asked == [raw] and [p.name for p in file.parent.iterdir()] == ["t.json"]
    assert Timeline.from_json(file).stages[0].name == "model"
    assert "status" not in memory.alone(case, None, None)  # nothing is kept, and nothing is missing


def test_running_out_of_memory_is_a_row_that_tells_what_there_was(fake_gpu, monkeypatch, tmp_path):
    gpu = FakeAllocator()
    gpu.mark("model")
    gpu.alloc(100)
    gpu.mark("forward")
    gpu.free(gpu.alloc(900))  # the peak, which is over
    gpu.alloc(40)
    gpu.event("oom", size=5000, device_free=77)
    recorded(monkeypatch, gpu, torch.OutOfMemoryError("CUDA out of memory."))
    file = tmp_path / "t.json"
    metrics = memory.alone(dataclasses.asdict(memory.Case("2.7B", 128, "forward_graph")), None, str(file))
    assert metrics["status"] == "oom" and metrics["asked_bytes"] == 5000
    assert metrics["requested_bytes"] == 1000 and metrics["peak_stage"] == "forward"
    there = {c: metrics[c] for c in BYTES if metrics[c]}
    assert there == {"weights_bytes": 100, "activations_bytes": 40}
    assert Timeline.from_json(file).out_of_memory[0][1:] == (5000, 77)


def test_an_error_is_a_row_without_numbers(fake_gpu, monkeypatch, capsys):
    recorded(monkeypatch, training_step(), RuntimeError("no such kernel"))
    metrics = memory.alone(dataclasses.asdict(memory.Case("2.7B", 128, "forward")), None, None)
    assert metrics == {"status": "error: RuntimeError: no such kernel"}
    assert "no such kernel" in capsys.readouterr().err


# --------------------------------------------------------------------------------- frames
@pytest.fixture
def reference(project_root, monkeypatch):
    """The chapter on the reference rows."""
    monkeypatch.setenv("CS336_RESULTS", str(project_root / "results"))
    return chapters.read("memory")


def changed(chapter, column, value, **case):
    """The chapter's rows with one cell changed."""
    rows = chapter.rows()
    chosen = (rows[list(case)] == pd.Series(case)).all(axis=1)
    assert chosen.any()
    return rows.assign(**{column: rows[column].mask(chosen, value)})


STEP = {"size": "2.7B", "context_length": 512, "mode": "train_step", "dtype": "fp32", "optimizer": "fused"}


def test_peaks_stand_beside_the_closed_form(reference):
    rows = changed(reference, "peak_gib", 77.0, **STEP)
    table = page.peaks(page.largest_model(rows))
    assert list(table)[1:] == [
        "context", "pass", "fp32 predicted", "fp32, GiB", "bf16 predicted", "bf16, GiB",
    ]  # fmt: skip
    assert len(page.beside(reference, "h100-x1")) == 25 and page.beside(reference, "no-such-machine").empty
    assert len(table) == 12 and list(table["pass"][:3]) == list(page.PASSES.values())
    expected = accounting.peak_bytes(SIZES["2.7B"], 4, 512, "train_step", optimizer="fused")
    last = table[table["context"] == 512].iloc[-1]
    assert last["fp32, GiB"] == 77.0
    assert last["fp32 predicted"] == pytest.approx(sum(expected.values()) / GIB)
    everything = page.peaks(rows)
    assert list(everything)[:3] == ["machine", "size", "optimizer"] and len(everything) == 17
    assert everything["bf16, GiB"].isna().sum() == 6  # the other sizes, and two that ran out of memory


@without_gpu
def test_errors_tell_tensors_from_what_the_allocator_adds(reference, smoke):
    rows = changed(reference, "peak_bytes", 100 * GIB, **STEP)
    found = page.errors(rows)[rows["peak_bytes"] == 100 * GIB].iloc[0]
    expected = sum(accounting.peak_bytes(SIZES["2.7B"], 4, 512, "train_step", optimizer="fused").values())
    assert found["peak above"] == pytest.approx(100 * GIB / expected - 1)
    assert found["tensors off"] < 1e-4 and found["workspaces, MiB"] == 64
    cpu = chapters.read("memory", machine=machine_name(), root=smoke[1])
    assert (page.errors(cpu.rows())[["workspaces, MiB", "rounding, MiB"]] == 0).all(axis=None)


def test_the_largest_allocations_are_named_by_their_size(reference):
    found = page.largest(reference, mode="forward_graph", dtype="fp32", context_length=512)
    assert list(found["MiB each"]) == [128, 128, 128, 80, 78.125] and found["count"].sum() == 257
    assert list(found["tensor"]) == [*["(B, H, S, S)"] * 3, "(B, S, F)", "(B, S, V)"]
    assert list(found["afterwards"]) == ["freed", "freed", "saved", "saved", "saved"]
    assert found["allocated in"][0].startswith("`attention/reference.py:")
    assert page.largest(reference, mode="forward_graph", dtype="fp32", context_length=256).empty  # not drawn


def test_a_timeline_of_another_run_is_refused(reference):
    case = {"mode": "forward", "dtype": "fp32", "context_length": 128}
    row, found = page.recording(reference, **case)
    assert found.stages[0].name == "model" and row["size"] == "2.7B"
    reference._frame["requested_bytes"] += 1
    with pytest.raises(
        ValueError, match=r"2.7B_128_forward_fp32_fused.json has a peak of .* not of the same"
    ):
        page.recording(reference, **case)


def test_the_committed_rows_have_their_timelines(reference):
    """Rows and timelines travel apart; a figure that lacks its own would only say so on the page."""
    for row in page.largest_model(reference.measured()).to_dict("records"):
        case = {name: row[name] for name in ("context_length", "mode", "dtype", "machine")}
        drawn = memory.drawn(memory.TABLE.case_of(row))
        assert (page.recording(reference, **case)[1] is not None) == drawn


def test_the_figure_shows_a_forward_pass_and_two_steps(reference, results_root):
    figure = page.timelines_figure(reference)
    texts = [{text.get_text() for text in ax.texts} for ax in figure.axes]
    assert {"forward", "loss", "backward", "optimizer", "59.0 GiB"} <= texts[2]  # as in the table of peaks
    assert {"51.3 GiB", "gradients"} <= texts[1] and "model" not in texts[0] | texts[1]
    assert figure.axes[0].get_ylim()[1] < 1 < figure.axes[1].get_ylim()[1] == figure.axes[2].get_ylim()[1]
    nothing = page.timelines_figure(chapters.read("memory", root=results_root))
    assert [ax.texts[0].get_text() for ax in nothing.axes] == ["not measured"] * 3


# --------------------------------------------------------------------------------- what the page derives
def test_what_a_block_saves_is_what_the_page_says():
    config = SIZES["2.7B"]
    for dtype, linear, square in (("fp32", 26, 4), ("bf16", 15, 6)):
        residual = accounting.residual_bytes(config, 4, 512)
        told = linear * residual + square * 4 * config.num_heads * 512**2
        small = 512**2 + 2 * 4 * 4 * 512  # the mask, and 1 / rms of two norms
        assert page.saved_mib(512, dtype) * 2**20 == told + small
    assert page.block_parameters() == 16 * config.d_model**2


@pytest.mark.parametrize(("batch", "pays"), [(4, False), (5, True)])
def test_autocast_pays_from_a_batch_of_five_on(batch, pays):
    def lower(context):
        shape = (SIZES["2.7B"], batch, context, "forward_graph")
        bf16, fp32 = (sum(accounting.peak_bytes(*shape, dtype).values()) for dtype in ("bf16", "fp32"))
        return bf16 < fp32

    assert lower(11 * SIZES["2.7B"].d_head) == any(map(lower, range(16, 2048, 48))) == pays


# --------------------------------------------------------------------------------- notebook


@without_gpu
def test_the_notebook_on_a_laptop(project_root, smoke, monkeypatch):
    monkeypatch.setenv("CS336_RESULTS", str(smoke[1]))
    sentences, _ = execute(project_root / "book" / "memory.ipynb", machine=machine_name())
    parts = {s.part: s.outcome for s in sentences if s.part}
    assert parts.pop("memory_profiling (d)") is True and set(parts.values()) == {None}  # (d) is derived


# --------------------------------------------------------------------------------- the real thing
ON_GPU = [(mode, dtype) for mode in memory.MODES for dtype in memory.DTYPES]


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "dtype"), ON_GPU, ids=["-".join(choice) for choice in ON_GPU])
def test_on_a_gpu(mode, dtype):
    case = memory.Case("small", 512, mode, dtype)
    [metrics] = memory.run_group([case])
    assert "status" not in metrics, metrics
    expected = sum(max(memory.predicted(case).values(), key=lambda items: sum(items.values())).values())
    own = metrics["requested_bytes"] - metrics["before_recording_bytes"] - metrics["other_bytes"]
    assert own == pytest.approx(expected, rel=0.02)
    assert sum(metrics[c] for c in BYTES) == metrics["requested_bytes"] <= metrics["peak_bytes"]
    assert metrics["peak_bytes"] < 1.05 * metrics["requested_bytes"] + 2**20
    assert metrics["peak_bytes"] <= metrics["reserved_bytes"] < metrics["device_bytes"]
    assert metrics["largest_code"].startswith("cs336_systems/")


@pytest.mark.gpu
def test_a_timeline_on_a_gpu(results_root):
    case = memory.Case("tiny", 128, "train_step")
    [metrics] = memory.run_group([case])
    assert "status" not in metrics, metrics
    path = store.file_beside(memory.TABLE, case, machine_name())
    found = Timeline.from_json(path)
    step = ["forward", "loss", "backward", "optimizer"]
    assert [s.name for s in found.stages] == ["model", *step, *(f"{name} 2" for name in step)]
    assert path.stat().st_size < 60_000
    assert (store.recordings_folder("memory") / path.with_suffix(".pickle").name).is_file()


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu():
    [metrics] = memory.run_group([memory.Case("xl", 1024, "train_step", batch=64)])
    assert metrics["status"] == "oom" and metrics["asked_bytes"] > 0
    assert metrics["weights_bytes"] > 7 * GIB and metrics["activations_bytes"] > metrics["weights_bytes"]


def test_hovering_over_a_timeline_tells_what_lives_there():
    bytes = {"weights": [GIB, GIB, GIB], "activations": [0, 2 * GIB, 0]}
    stages = (Stage("forward", 0, State(1, 3 * GIB, {})), Stage("backward", 2, State(2, GIB, {})))
    drawn = ElementTree.fromstring(figure.hover(Timeline(3, (0, 1, 2), bytes, stages), "it rises"))
    titles = [title.text.splitlines() for title in drawn.iter("title")]
    assert titles == [
        ["forward", "weights 1.00", "together 1.00 GiB"],
        ["forward", "weights 1.00", "activations 2.00", "together 3.00 GiB"],
        ["backward", "weights 1.00", "together 1.00 GiB"],
    ]
    assert len(list(drawn.iter("polygon"))) == 2 and drawn.find("svg").get("aria-label") == "it rises"
    told = "".join(drawn.find("p").itertext())
    assert all(word in told for word in ("weights", "activations", "3.00 GiB")) and "gradients" not in told
