"""Chapter memory: its grid, what is recorded on a GPU and on a CPU, and its page with and without rows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_unit_memory import FakeAllocator, training_step

from cs336_systems import accounting, experiments, report
from cs336_systems.experiments import memory
from cs336_systems.measure import rows as store
from cs336_systems.measure.machine import machine_name
from cs336_systems.measure.memory import read_snapshot
from cs336_systems.measure.memory_timeline import CATEGORIES, Timeline, timeline
from cs336_systems.measure.process import ChildError, call
from cs336_systems.report.pages import memory as page
from cs336_systems.report.pages import memory_accuracy as accuracy
from cs336_systems.report.pages import memory_verdicts as verdicts
from cs336_systems.report.pages import memory_words as words
from cs336_systems.sizes import SIZES, size

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

GIB = 2**30
MACHINE = "h100-x1"
BYTES = list(memory.CATEGORY_COLUMNS.values())


# --------------------------------------------------------------------------------- grids and places
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_grid_is_a_grid(preset):
    cases = memory.grid(preset)
    assert len(set(cases)) == len(cases) == len(store.groups(memory, cases))  # a process for each case
    assert {c.mode for c in cases} == set(memory.MODES) and {c.dtype for c in cases} == set(memory.DTYPES)
    assert {c.optimizer for c in cases} == set(memory.OPTIMIZERS)
    [again] = [c for c in cases if c.repeat]
    assert dataclasses.replace(again, repeat=0) in cases
    assert all(memory.estimate_s([case]) > 0 for case in cases)


def test_full_covers_the_grid_of_the_handout():
    cases = memory.grid("full")
    for context, mode, dtype in itertools.product((128, 256, 512), memory.MODES, memory.DTYPES):
        assert memory.Case("2.7B", context, mode, dtype) in cases
    assert {c.size for c in cases if c.mode == "train_step"} == set(SIZES) - {"tiny"}
    assert sum(memory.estimate_s([case]) for case in cases) < 900


def test_timelines_lie_beside_the_csv_and_have_names_of_their_own(tmp_path):
    drawn = [c for preset in experiments.PRESETS for c in memory.grid(preset) if memory.drawn(c)]
    paths = {memory.timeline_path(c, MACHINE, tmp_path) for c in drawn}
    assert len(paths) == len(drawn) < 35
    assert {p.parent for p in paths} == {store.csv_path("memory", MACHINE, tmp_path).with_suffix("")}
    assert tmp_path / MACHINE / "memory" / "2.7B_512_train_step_fp32_fused.json" in paths


def test_raw_histories_stay_out_of_the_results(tmp_path, monkeypatch):
    assert memory.snapshot_folder(tmp_path / "results") == tmp_path / "_build" / "memory"
    monkeypatch.setenv(memory.SNAPSHOTS, str(tmp_path / "raw"))
    assert memory.snapshot_folder() == tmp_path / "raw"


def test_unknown_values_are_named():
    for field, value, allowed in (
        ("mode", "forward_backward", "forward, forward_graph, train_step"),
        ("dtype", "tf32", "fp32, bf16"),
        ("optimizer", "sgd", "fused, foreach"),
        ("size", "huge", "tiny, small, medium, large, xl, 2.7B"),
    ):
        case = dataclasses.replace(memory.Case("tiny", 64, "forward"), **{field: value})
        with pytest.raises(ValueError, match=rf"'{value}'; allowed: {allowed}"):
            list(memory.run_group([case]))


# --------------------------------------------------------------------------------- tensors, on a CPU
def test_tensors_are_watched_from_their_making_to_their_end():
    with memory.watching_tensors() as (mark, snapshot):
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
    assert [(m.name, m.index) for m in found.marks] == [("model", 0), ("forward", 1)] and not found.notes
    [line] = {g.code.split(":")[0] for g in timeline(found).largest}
    assert line == Path(__file__).name  # torch's own frames are not taken for the caller
    del kept  # nothing is written down any more
    assert list(after.active())[-1] == 400


def test_a_tensor_that_another_thread_lets_go_meanwhile(monkeypatch):
    kept, replay = [torch.empty(0)], memory.replay

    def meanwhile(*args, **kwargs):
        kept.clear()
        return replay(*args, **kwargs)

    monkeypatch.setattr(memory, "replay", meanwhile)
    with memory.watching_tensors() as (_, snapshot):
        kept[0] = torch.zeros(100)
        found, after = snapshot(), snapshot()
    assert list(found.active()) == [0, 400] and list(after.active()) == [0, 400, 0]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The rows of the smoke preset, measured once; and their root."""
    root = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CS336_RESULTS", str(root))
        store.measure(memory, memory.grid("smoke"))
    return store.read(memory, machine_name(), root), root


@without_gpu
def test_smoke_agrees_with_the_closed_form(smoke):
    frame, _ = smoke
    assert set(frame["status"]) == {"ok"} and set(frame["source"]) == {"tensors"}
    for row in frame.to_dict("records"):
        case = memory.Case(**{f: row[f] for f in store.case_fields(memory)})
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
        case = memory.Case(**{f: row[f] for f in store.case_fields(memory)})
        path = memory.timeline_path(case, machine_name(), root)
        found = Timeline.from_json(path)
        assert path.stat().st_size < 60_000 and not found.notes
        names = [stage.name for stage in found.stages]
        if case.mode == "train_step":
            step = ["forward", "loss", "backward", "optimizer"]
            assert names == ["model", *step, *(f"{name} 2" for name in step)]
        else:
            assert names == ["model", "forward"]
        stage = memory.peak_stage(found)
        assert (stage.name, stage.peak.bytes) == (row["peak_stage"], row["requested_bytes"])
    again = frame[frame["repeat"] == 1].iloc[0]
    alike = [f for f in store.case_fields(memory) if f != "repeat"]
    [first] = frame[(frame[alike] == again[alike]).all(axis=1) & (frame["repeat"] == 0)].to_dict("records")
    assert first["peak_bytes"] == again["peak_bytes"] and first["allocations"] == again["allocations"]


@without_gpu
def test_a_cpu_leaves_the_large_models_out():
    [metrics] = memory.run_group([memory.Case("small", 128, "forward")])
    assert metrics == {"status": "skipped: needs a CUDA device"}


# --------------------------------------------------------------------------------- a GPU, made up
@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(memory, "machine_name", lambda: MACHINE)


def test_each_case_is_a_process_and_a_failure_is_a_row(fake_gpu, monkeypatch, tmp_path, results_root, capsys):
    monkeypatch.setenv(memory.SNAPSHOTS, str(tmp_path / "raw"))
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
    assert {function for function, _ in calls} == {"cs336_systems.experiments.memory:alone"}
    assert [memory.Case(**arguments["case"]) for _, arguments in calls] == cases
    name = "2.7B_512_forward_bf16_fused"
    assert calls[1][1]["raw"] == str(tmp_path / "raw" / f"{name}.pickle")
    assert calls[1][1]["file"] == str(results_root / MACHINE / "memory" / f"{name}.json")
    assert calls[2][1]["raw"] is None and calls[2][1]["file"] is None  # no figure shows this one
    assert "SIGSEGV" in capsys.readouterr().err


def recorded(monkeypatch, gpu, failure=None):
    """`alone` sees this allocator's history, and the steps raise `failure`."""

    @contextlib.contextmanager
    def recording(path):
        try:
            yield lambda name: None
        finally:
            path.parent.mkdir(parents=True, exist_ok=True)
            peaks = {"peak_allocated_bytes": 2048, "peak_requested_bytes": 1304, "peak_reserved_bytes": 4096}
            gpu.write(path, cs336_systems=peaks)

    def steps(case, device, mark):
        if failure is not None:
            raise failure
        return "what lives"

    monkeypatch.setattr(memory, "recording", recording)
    monkeypatch.setattr(memory, "take_steps", steps)


def test_a_history_becomes_a_row_and_a_timeline(fake_gpu, monkeypatch, tmp_path):
    recorded(monkeypatch, training_step())
    case = dataclasses.asdict(memory.Case("2.7B", 128, "train_step"))
    raw, file = tmp_path / "raw" / "s.pickle", tmp_path / "deep" / "t.json"
    metrics = memory.alone(case, str(raw), str(file))
    assert set(metrics) == set(memory.METRICS)
    assert metrics["source"] == "allocator" and metrics["device_bytes"] == 80 * GIB
    # known from the unit test of the same history
    assert metrics["requested_bytes"] == 1304 and metrics["peak_stage"] == "backward 2"
    assert (metrics["peak_bytes"], metrics["reserved_bytes"]) == (2048, 4096)
    assert metrics["weights_bytes"] == 300 and metrics["optimizer_state_bytes"] == 600
    assert metrics["gradients_bytes"] == 300 and sum(metrics[c] for c in BYTES) == 1304
    assert (metrics["largest_bytes"], metrics["largest_count"]) == (70, 3)
    assert metrics["largest_code"] == "cs336_systems/model.py:81 forward"
    assert metrics["allocations"] == 4 + 2 * (2 * 3 + 1 + 2 * 3 + 1) + 3
    assert raw.is_file() and [p.name for p in file.parent.iterdir()] == ["t.json"]
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


def test_running_out_while_the_model_is_built(fake_gpu, monkeypatch):
    gpu = FakeAllocator()
    gpu.mark("model")
    gpu.alloc(100)
    gpu.event("oom", size=5000, device_free=77)
    recorded(monkeypatch, gpu, torch.OutOfMemoryError("CUDA out of memory."))
    metrics = memory.alone(dataclasses.asdict(memory.Case("2.7B", 128, "forward")), None, None)
    assert metrics["status"] == "oom" and metrics["peak_stage"] == "model" and metrics["weights_bytes"] == 100
    assert metrics["largest_bytes"] is None


def test_an_error_is_a_row_without_numbers(fake_gpu, monkeypatch, capsys):
    recorded(monkeypatch, training_step(), RuntimeError("no such kernel"))
    metrics = memory.alone(dataclasses.asdict(memory.Case("2.7B", 128, "forward")), None, None)
    assert metrics == {"status": "error: RuntimeError: no such kernel"}
    assert "no such kernel" in capsys.readouterr().err


@without_gpu
def test_a_fresh_process_without_a_gpu_says_what_it_needs():
    arguments = {"case": dataclasses.asdict(memory.Case("tiny", 64, "forward")), "raw": None, "file": None}
    found = call("cs336_systems.experiments.memory:alone", arguments, timeout_s=100)
    assert found == {"status": "skipped: needs a CUDA device"}


# --------------------------------------------------------------------------------- the page
def made_up(case, root, tmp_path):
    """A row of a case: the closed form's peak by its items, and 64 MiB of workspaces; or a small recording."""
    shape = (size(case.size), case.batch, case.context_length, case.mode, case.dtype)
    items = accounting.peak_bytes(*shape, optimizer=case.optimizer)
    copies = "temporaries" if case.mode == "forward" else "activations"
    row = dict.fromkeys(BYTES, 0) | {
        "before_recording_bytes": 64 * 2**20, "weights_bytes": items["weights"],
        "optimizer_state_bytes": items["optimizer_state"], "gradients_bytes": items["gradients"],
        "activations_bytes": items["saved_activations"], "temporaries_bytes": items["temporaries"],
    }  # fmt: skip
    row[f"{copies}_bytes"] += items["autocast_copies"]
    asked = sum(row[column] for column in BYTES)
    row |= {"largest_bytes": 4 * 4 * case.context_length * size(case.size).d_ff, "largest_count": 128}
    row |= {"largest_code": "cs336_systems/model.py:160 forward", "allocations": 4000 + case.context_length}
    row |= {
        "source": "allocator",
        "requested_bytes": asked,
        "peak_bytes": asked + 2**20,
        "peak_stage": "backward 2",
    }
    row |= {"reserved_bytes": asked + 2**30, "peak_gib": (asked + 2**20) / GIB, "device_bytes": 80 * GIB}
    if memory.drawn(case):
        snapshot = read_snapshot(
            training_step(weight=asked // 13, activation=70).write(tmp_path / "s.pickle")
        )
        file = memory.timeline_path(case, MACHINE, root)
        row["requested_bytes"] = memory.condense(snapshot, file)["requested_bytes"]
    return row


@pytest.fixture
def full(results_root, tmp_path):
    """Made-up rows and timelines of the full preset, quoted as the reference; gives a function that replaces rows."""
    (results_root / "reference.json").write_text(json.dumps({"memory": [MACHINE]}))

    def write(changes=None, leave_out=lambda case: False):
        given = changes or {}
        kept = [
            dataclasses.asdict(case)
            | {"status": "ok"}
            | made_up(case, results_root, tmp_path)
            | {"run": "r", "time_utc": "2026-01-01T00:00:00Z", "env": "e", "code": "c"}
            | given.get(case, {})
            for case in memory.grid("full")
            if not leave_out(case)
        ]
        store.write(memory, MACHINE, kept, results_root)
        return report.Chapter("memory", measure="no")

    return write


@pytest.fixture
def drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def run_notebook(project_root, monkeypatch, **parameters):
    """Everything that the notebook shows, as text; figures are drawn and closed."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *things, **_: shown.extend(things))
    cells = json.loads((project_root / "book" / "memory.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "memory.ipynb", "exec"), names)
            if "parameters" in cell["metadata"]["tags"]:
                names.update(parameters)
    return "\n".join(t["text/markdown"] if isinstance(t, dict) else t.data for t in shown)


def test_the_page_without_rows(project_root, monkeypatch, drawn):
    monkeypatch.setenv("CS336_BOOK_BUILD", "1")
    text = run_notebook(project_root, monkeypatch)
    assert text.count("not measured") > 20 and "nan" not in text.lower()
    assert "**50.8 GiB**" in text and "**20.0 MiB**" in text  # what is derived needs no rows


def test_the_page_with_rows(project_root, monkeypatch, drawn, full):
    full()
    monkeypatch.setenv("CS336_BOOK_BUILD", "1")
    text = run_notebook(project_root, monkeypatch)
    assert "not measured" not in text and "nan" not in text.lower()
    assert "the same peak to the byte" in text and "No measured case ran out of memory." in text
    assert "measured with earlier code" in text
    figures = [drawn.figure(number) for number in drawn.get_fignums()]
    titles = [figure.get_suptitle() for figure in figures]
    assert "2.7B, context 512, forward, no graph, fp32" in titles
    assert "2.7B, context 512, full step, foreach, fp32" in titles and len(figures) == 6


@without_gpu
def test_the_page_on_a_cpu(project_root, monkeypatch, drawn, smoke):
    monkeypatch.setenv("CS336_RESULTS", str(smoke[1]))
    text = run_notebook(project_root, monkeypatch, measure="no", machine=machine_name())
    chapter = report.Chapter("memory", measure="no", machine=machine_name(), root=smoke[1])
    assert words.room(chapter) == verdicts.elsewhere(chapter) == ""
    assert "as torch's dispatcher sees them" in text and "| tiny |" in text and "closed form, MiB" in text
    for value, allowed in (("mode", "forward, forward_graph, train_step"), ("size", "tiny")):
        with pytest.raises(
            ValueError, match=f"{value}=x is not in the smoke preset; allowed: all, {allowed}"
        ):
            run_notebook(project_root, monkeypatch, machine=machine_name(), **{value: "x"})


def cell(table, column, **where):
    for field, value in where.items():
        table = table[table[field] == value]
    [found] = table[column]
    return found


def test_peaks_stand_beside_the_closed_form(full):
    chapter = full()
    table = page.peak_table(chapter, "bf16", against="fp32")
    step = {"context": 512, "what": "full step"}
    assert cell(table, "closed form, GiB", **step) == "60.1" and cell(table, "peak, GiB", **step) == "60.1"
    assert cell(table, "apart", **step) == "0.11 %" and cell(table, "minus fp32, GiB", **step) == "1.33"
    assert "63.5 GiB (`2.7B`, context 512, full step, foreach" in words.room(chapter)
    assert (
        "79 % of the device's 80.0 GiB; the most that the allocator held of it in any case is 64.5 GiB"
        in (words.room(chapter))
    )
    assert len(table) == 10 and "full step, foreach" in set(table["what"])
    alive = page.alive_table(chapter, "fp32")
    assert cell(alive, "gradients", context=128, what="full step") == "12.7 / 12.7"
    assert cell(alive, "gradients", context=128, what="forward, no graph") == "–"
    assert list(alive.columns[3:]) == list(CATEGORIES[:-1])  # nothing is `other`


def test_what_the_closed_form_leaves_out_is_counted(smoke):
    """On a CPU nothing is rounded and there are no workspaces: tables, ids and a few counters are all there is."""
    if torch.cuda.is_available():
        pytest.skip("the smoke preset of a GPU has workspaces")
    chapter = report.Chapter("memory", measure="no", machine=machine_name(), root=smoke[1])
    table = page.difference_table(chapter)
    assert set(table["rest"]) == {"0.00"} and set(table["workspaces"]) == {"0.00"} == set(table["rounding"])
    for row in page.records(chapter):
        moment, items = page.closed_form(chapter, row)
        left = page.left_out_bytes(page.case_of(chapter, row), moment)
        assert 0 <= row["requested_bytes"] - sum(items.values()) - left <= 4 * 64  # AdamW's steps, sums


def test_logits_that_are_kept_are_no_temporaries(smoke):
    if torch.cuda.is_available():
        pytest.skip("the smoke preset of a GPU is another")
    chapter = report.Chapter("memory", measure="no", machine=machine_name(), root=smoke[1])
    for row in page.records(chapter, mode="forward_graph"):
        expected = page.expected_categories(chapter, row)
        assert expected["activations"] == pytest.approx(page.alive(chapter, row)["activations"], rel=1e-3)


def test_out_of_memory_is_shown_with_what_there_was(full):
    case = memory.Case("2.7B", 512, "train_step")
    metrics = {
        "status": "oom",
        "asked_bytes": 80 * 2**20,
        "weights_bytes": 12 * GIB,
        "activations_bytes": 20 * GIB,
    }
    nothing = {c: 0 for c in BYTES if c not in metrics}
    chapter = full({case: metrics | nothing})
    text = words.out_of_memory(chapter)
    assert "`2.7B`, context 512, full step, fp32 (closed form: 58.7 GiB) asked for 80.0 MiB" in text
    assert "when it held 12.0 GiB of weights, 20.0 GiB of activations" in text
    assert (
        cell(page.peak_table(chapter, "fp32"), "peak, GiB", context=512, what="full step") == "out of memory"
    )
    assert "The step at context 512: not measured" in words.step_peak(chapter, "fp32")
    assert page.read_timeline(chapter, page.one(chapter, mode="train_step", dtype="fp32", context_length=512))
    child = {case: dict.fromkeys(memory.METRICS) | {"status": "oom"}}  # the child could not even tell
    assert "(closed form: 58.7 GiB)." in words.out_of_memory(full(child))


def test_missing_rows_read_not_measured(full, drawn):
    chapter = full(leave_out=lambda case: case.context_length == 512 or case.dtype == "bf16")
    assert "*full step* not measured" in words.peaks(chapter, "bf16")
    assert "*full step*: not measured" in words.precision(chapter)
    assert words.optimizer(chapter).count("not measured") == 2
    assert accuracy.repeats(chapter) == "The same case a second time: not measured."
    assert "At context 512: not measured." in words.largest(chapter) and "20.0 MiB" in words.largest(chapter)
    assert page.largest_table(chapter, "fp32", 512).empty
    assert (
        cell(page.peak_table(chapter, "fp32"), "peak, GiB", context=512, what="full step") == "not measured"
    )
    assert cell(page.residual_table(chapter), "largest allocation, MiB", context=512) == "not measured"
    assert cell(page.sizes_table(chapter), "fp32, GiB", size="xl") == "not measured"
    figure = page.case_figure(chapter, "train_step", "fp32", 512)
    assert figure.axes[0].texts[0].get_text() == "not measured"
    figure = page.case_figure(chapter, "train_step", "fp32", 256)
    assert figure.axes[0].texts[0].get_text() == "its timeline was not kept"


def test_a_timeline_of_another_run_is_refused(full):
    chapter = full()
    row = page.one(chapter, mode="forward", dtype="fp32", context_length=128)
    assert page.read_timeline(chapter, row).stages
    with pytest.raises(
        ValueError, match=r"2.7B_128_forward_fp32_fused.json has a peak of .* not of the same run"
    ):
        page.read_timeline(chapter, row | {"requested_bytes": row["requested_bytes"] + 1})


def test_the_committed_rows_have_their_timelines(project_root):
    """Rows and timelines travel apart; a figure that lacks its own would only say so on the page."""
    root = project_root / "results"
    for machine in json.loads((root / "reference.json").read_text()).get("memory", []):
        chapter = report.Chapter("memory", measure="no", machine=machine, preset="full", root=root)
        for row in chapter.measured().to_dict("records"):
            if memory.drawn(page.case_of(chapter, row)):
                assert page.read_timeline(chapter, row) is not None, row


def test_a_timeline_is_cropped_to_its_later_stages(tmp_path):
    whole = timeline(read_snapshot(training_step().write(tmp_path / "s.pickle")))
    part = page.cropped(whole, "forward 2")
    assert [s.name for s in part.stages] == ["forward 2", "backward 2", "optimizer 2"]
    assert part.events[0] == part.stages[0].begin and part.peak == whole.peak
    assert page.cropped(whole, "optimizer 2").peak.bytes < whole.peak.bytes
    with pytest.raises(ValueError, match="unknown stage 'loss'; allowed: model, forward, backward"):
        page.cropped(whole, "loss")


def test_the_figure_begins_just_below_the_least(full, drawn):
    figure = page.case_figure(full(), "forward", "fp32", 512, zoom=True)
    low, high = figure.axes[0].get_ylim()
    assert 0 < low < high and "forward" in [text.get_text() for text in figure.axes[0].texts]


def test_tensors_are_known_by_their_size():
    config = SIZES["2.7B"]
    fp32, bf16 = (page.tensor_names(config, 4, 512, dtype) for dtype in memory.DTYPES)
    mib = {name: num_bytes / 2**20 for num_bytes, name in bf16.items()}
    assert mib["(B, H, S, S), fp32"] == 128 and mib["(B, H, S, S), bf16"] == 64
    assert mib["(F, D), bf16 weight"] == 50 and mib["(B, S, F), bf16"] == 40
    assert fp32[20 * 2**20] == bf16[20 * 2**20] == "(B, S, D), fp32"
    assert set(fp32) < set(bf16)
    same = page.tensor_names(dataclasses.replace(config, vocab_size=config.d_ff), 4, 512, "fp32")
    assert same[80 * 2**20] == "(B, S, F), fp32 or (B, S, V), fp32"


def test_what_weights_keep_of_their_blocks():
    """2.7B: 128 weights of 25 MiB in blocks of 26, and two of 97.66 in blocks of 98; tiny: cut from larger blocks."""
    assert page.rounded_off_bytes(SIZES["2.7B"]) == 128 * 2**20 + 2 * (-4 * 10_000 * 2560 % 2**21)
    assert page.rounded_off_bytes(SIZES["tiny"]) == 0


@pytest.mark.parametrize("batch", [4, 5])
def test_the_balance_of_autocast_is_that_of_the_closed_forms(batch):
    def lower(context):
        shape = (SIZES["2.7B"], batch, context, "forward_graph")
        bf16, fp32 = (sum(accounting.peak_bytes(*shape, dtype).values()) for dtype in ("bf16", "fp32"))
        return bf16 < fp32

    text = words.balance(batch=batch)
    assert "11d$ = 880 tokens" in text and "from batch 5 on" in text
    assert (f"at batch {batch}, autocast saves" in text) == lower(880) == any(map(lower, range(16, 2048, 48)))


def test_rounding_is_told_from_what_tensors_need(full):
    context = {"context_length": 256, "mode": "train_step"}
    row = page.one(full(), **context, dtype="bf16")
    case = memory.Case("2.7B", 256, "train_step", "bf16")
    fp32 = page.one(full(), **context, dtype="fp32")
    same = {
        "requested_bytes": int(fp32["requested_bytes"]),
        "peak_bytes": int(fp32["peak_bytes"]) - 3 * 2**20,
    }
    text = words.precision(full({case: same}))
    assert "*full step* at 256, −3.00 MiB" in text and "tensors do not need less" in text
    assert row["requested_bytes"] > fp32["requested_bytes"] and "*full step* at 256" not in words.precision(
        full()
    )
    assert "forward passes were rounded up by" in accuracy.rounding(full())


def test_without_rows_the_predictions_are_not_judged(full):
    chapter = full(leave_out=lambda case: case.mode == "train_step" or case.dtype == "bf16")
    assert verdicts.step(chapter) == "Prediction 3: not measured."
    assert verdicts.autocast(chapter) == "Prediction 4: not measured."


def test_a_step_beside_its_prediction(full):
    """The made-up rows are the closed form's: at 256 tokens a little above 16 N, at 512 with the head's gradients."""
    exact = {}
    for context, dtype in itertools.product((128, 256, 512), memory.DTYPES):
        case = memory.Case("2.7B", context, "train_step", dtype)
        moments = memory.predicted(case)
        moment, items = max(moments.items(), key=lambda moment: sum(moment[1].values()))
        asked = sum(items.values()) + 64 * 2**20 + page.left_out_bytes(case, moment)
        exact[case] = {"requested_bytes": asked}
    text = verdicts.step(full(exact))
    low = "(`2.7B` at 128 and 256 in fp32 and bf16), the step asks for 5.00 to 42.9 MiB more than $16N$,"
    assert low in text and "the prediction holds, to 0.083 %. To the byte it misses" in text
    assert "the temporaries, 5.00 to 116 MiB at that moment." in text
    assert (
        "before any gradient is there, with `small`, `medium`, `large` and `xl` at 512 in fp32; a little"
        in text
    )
    assert "0.413 GiB of gradients are there already (at most 3.3 % of all), with `2.7B` at 512" in text
    assert "one context of each size does not show" in text

    more = {memory.Case("2.7B", 256, "train_step"): {"requested_bytes": 53 * GIB}}
    later = {memory.Case("xl", 512, "train_step"): {"peak_stage": "optimizer 2"}}
    text = verdicts.step(full(exact | more | later))
    assert "the prediction misses, by 4.3 %. Where" in text
    assert "not in the backward pass, against the prediction, with `xl` at 512 in fp32." in text


def test_growth_with_the_context_is_judged(smoke):
    if torch.cuda.is_available():
        pytest.skip("the smoke preset of a GPU is another")
    chapter = report.Chapter("memory", measure="no", machine=machine_name(), root=smoke[1])
    text = verdicts.step(chapter)  # activations set the peak of the tiny model at both contexts
    assert "16N" not in text and text.endswith(" It grows with the context.")
    later = chapter.rows()["context_length"] == 128
    chapter._frame.loc[later, "requested_bytes"] = 1
    assert verdicts.step(chapter).endswith(
        "It does not always grow, against the prediction, with the context."
    )


def test_autocast_beside_its_prediction(full):
    as_predicted = (
        "*Prediction 4.* The forward pass without a graph asks for more under autocast at every context measured, as"
        " predicted. The step gains at none of them; the activations that autocast frees in a block outweigh its copies"
        " at none of them: as predicted."
    )
    assert verdicts.autocast(full()) == as_predicted
    forward, step = (memory.Case("2.7B", 256, mode, "bf16") for mode in ("forward", "train_step"))
    text = verdicts.autocast(full({forward: {"requested_bytes": 1}, step: {"requested_bytes": 1}}))
    assert "*Prediction 4* misses at 256" in text and "The step gains at 256;" in text
    assert text.endswith("at none of them: against the prediction.")


def test_the_forward_pass_beside_its_predictions(full):
    text = verdicts.growth(full(), "fp32")
    assert "above the weights alone: hardly more, as predicted (1)." in text and "as predicted (2)." in text
    more, less = memory.Case("2.7B", 512, "forward"), memory.Case("2.7B", 512, "forward_graph")
    text = verdicts.growth(
        full({more: {"peak_bytes": 20 * GIB}, less: {"activations_bytes": 5 * GIB}}), "fp32"
    )
    assert "above the weights alone: prediction 1 misses." in text and "against prediction 2." in text


def test_a_stair_is_what_a_block_saves(full):
    saved = sum(accounting.saved_layer_bytes(SIZES["2.7B"], 4, 512, "fp32").values())
    chapter = full()
    row = page.one(chapter, mode="forward_graph", dtype="fp32", context_length=512)
    expected = page.expected_categories(chapter, row)["activations"]
    kept = {memory.Case("2.7B", 512, "forward_graph"): {"activations_bytes": expected}}
    text = words.rhythm(full(kept), "fp32", 512)
    assert f"each of the 32 stairs {saved / GIB:.3f} GiB" in text and "0.633 GiB" in text


def test_the_same_cases_on_a_machine_that_is_not_quoted(full, results_root):
    chapter = full()
    assert verdicts.elsewhere(chapter) == ""
    rows = store.read(memory, MACHINE, results_root).to_dict("records")
    rows = [row | {c: int(row[c]) for c in ("peak_bytes", "reserved_bytes")} for row in rows]
    (results_root / "a100-x1").mkdir()
    (results_root / "a100-x1" / "machine.json").write_text('{"e": {"gpu": "NVIDIA A100", "torch": "2.9"}}')
    store.write(memory, "a100-x1", rows, results_root)
    text = verdicts.elsewhere(chapter)
    assert text == (
        "The same cases on `a100-x1` (NVIDIA A100, torch 2.9), with earlier code: the same peak to the byte in 25 of"
        " 25, the same bytes reserved in 25."
    )
    rows[3]["peak_bytes"] += 3 * 2**20
    rows[4]["reserved_bytes"] += 1
    rows[5]["status"] = "oom"
    store.write(memory, "a100-x1", rows, results_root)
    text = verdicts.elsewhere(chapter)
    assert "in 23 of 24 (at most 3.00 MiB apart), the same bytes reserved in 23." in text
    both = report.Chapter("memory", measure="no", machine=f"{MACHINE},a100-x1")
    assert verdicts.elsewhere(both) == ""  # both are quoted


def test_categories_are_those_of_all_sizes(full):
    assert "of *weights*" not in accuracy.categories(full())
    off = {memory.Case("xl", 512, "train_step"): {"weights_bytes": 8 * GIB}}
    assert "of *weights*" in accuracy.categories(full(off))


def test_the_residual_stream_is_derived():
    assert words.residual() == (
        "At batch $B$ = 4, context $S$ = 512 and $D$ = 2,560: $4BSD$ = 20,971,520 bytes; divided by $2^{20}$,"
        " **20.0 MiB**."
    )


def test_what_a_block_saves_is_what_the_page_says():
    config = SIZES["2.7B"]
    for dtype, linear, square in (("fp32", 26, 4), ("bf16", 15, 6)):
        saved = sum(accounting.saved_layer_bytes(config, 4, 512, dtype).values())
        residual = accounting.residual_bytes(config, 4, 512)
        told = linear * residual + square * 4 * config.num_heads * 512**2
        assert saved == told + 512**2 + 2 * 4 * 4 * 512  # the mask, and 1 / rms of two norms
    assert (
        "260 KiB for a token and 128 bytes for a pair" in words.holdings()
        and "2,080 tokens" in words.holdings()
    )


def test_crossovers_are_those_of_the_closed_forms():
    def peak(config, context, mode, dtype):
        return sum(accounting.peak_bytes(config, 4, context, mode, dtype, optimizer="fused").values())

    text = words.crossovers()
    floor = 16 * accounting.num_parameters(SIZES["2.7B"])
    first = int(text.split(" from ")[1].split()[0])
    assert peak(SIZES["2.7B"], first, "train_step", "fp32") > 1.001 * floor
    assert peak(SIZES["2.7B"], first - 16, "train_step", "fp32") <= 1.001 * floor
    assert "more than 0.1 % above $16N$ from" in text
    assert "At no context up to 2,048 tokens does autocast lower any of its peaks." in text
    small = words.crossovers(SIZES["small"], "small")
    assert "of *forward, no graph* nowhere" in small and "of *full step* from 160 to 1,264 tokens" in small


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
def test_a_timeline_on_a_gpu(results_root, monkeypatch, tmp_path):
    monkeypatch.setenv(memory.SNAPSHOTS, str(tmp_path))
    case = memory.Case("tiny", 128, "train_step")
    [metrics] = memory.run_group([case])
    assert "status" not in metrics, metrics
    path = memory.timeline_path(case, machine_name())
    found = Timeline.from_json(path)
    step = ["forward", "loss", "backward", "optimizer"]
    assert [s.name for s in found.stages] == ["model", *step, *(f"{name} 2" for name in step)]
    assert not found.notes and not found.cut_off and path.stat().st_size < 60_000
    assert (tmp_path / path.with_suffix(".pickle").name).is_file()


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu():
    [metrics] = memory.run_group([memory.Case("xl", 1024, "train_step", batch=64)])
    assert metrics["status"] == "oom" and metrics["asked_bytes"] > 0
    assert metrics["weights_bytes"] > 7 * GIB and metrics["activations_bytes"] > metrics["weights_bytes"]
