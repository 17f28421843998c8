"""Chapter profiling: its grid, what a recording becomes, its page."""

import dataclasses
import json
import types

import pytest
from notebook_checks import shown_by

from cs336_systems import experiments
from cs336_systems.experiments import profiling
from cs336_systems.experiments.profiling import CLASS_COLUMNS, Case
from cs336_systems.measure import kernels, nsys, rows
from cs336_systems.measure.code import code_digest
from cs336_systems.measure.machine import machine_name
from cs336_systems.measure.trace import Kernel, Range, Trace
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages import profiling as page
from cs336_systems.report.pages import profiling_words as words

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

NAMES = {  # kernels of each class with their time in µs in one call
    "sm90_xmma_gemm_f32f32": 100, "vectorized_elementwise_kernel<4, MulFunctor>": 20,
    "cunn_SoftMaxForward<4>": 30, "multi_tensor_apply_kernel<FusedAdamMathFunctor>": 50,
}  # fmt: skip
PARTS = {"attention scores": [0, 1], "attention softmax": [2], "attention output": [0]}


def made_up_trace(steps=profiling.STEPS, layers=2):
    """Inference and steps of a model with `layers` blocks, as Nsight Systems would have recorded them."""
    names, found, ranges = list(NAMES), [], []
    now = 0

    def launch(number, thread):
        nonlocal now
        name = names[number]
        begin = max(now + 5_000, found[-1].end_ns if found else 0)
        found.append(Kernel(name, begin, begin + NAMES[name] * 1000, 0, 7, now, 1, thread))
        now += 2_000

    def phase(name, body, inner=None):
        nonlocal now
        begin = now
        body()
        now = max(now, found[-1].end_ns) + 1_000  # the device is synchronized
        ranges.append(Range(name, begin, now, 1, 1))

    def forward(attention):
        nonlocal now
        for _ in range(layers):
            launch(0, 1)
            for part, kinds in PARTS.items():
                begin = now
                now += 100
                for kind in kinds:
                    launch(kind, 1)
                now += 100
                if attention:
                    ranges.append(Range(part, begin, now, 1, 1))

    for outer in ("inference", "step"):
        for _ in range(steps):
            start = now
            now += 1_000
            phase("forward", lambda: forward(True))
            if outer == "step":
                phase("backward", lambda: [launch(k, 2) for k in (0, 0, 1) * layers])
                phase("optimizer", lambda: launch(3, 1))
            now += 1_000
            ranges.append(Range(outer, start, now, 1, 1))
    return Trace("nsys", tuple(found), tuple(ranges))


SAID = {
    "python_ms": {"inference": 1.0, "forward": 1.1, "backward": 2.0, "optimizer": 0.1},
    "status": {}, "steps": profiling.STEPS,
}  # fmt: skip


@pytest.fixture
def under_nsys(monkeypatch, results_root):
    """A machine with a GPU and Nsight Systems, both made up; gives the calls, and `fail` to say what did not fit."""

    fake = types.SimpleNamespace(calls=[], status={})

    def record(function, arguments, **options):
        fake.calls.append((function, arguments, options))
        return json.loads(json.dumps(SAID)) | {"status": fake.status}, made_up_trace()

    monkeypatch.setattr(profiling, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(profiling, "machine_name", lambda: "h100-x1")
    monkeypatch.setattr(nsys, "find", lambda: "/bin/nsys")
    monkeypatch.setattr(nsys, "version", lambda: "2025.3.1")
    monkeypatch.setattr(nsys, "record_nsys", record)
    return fake


def cases_of(size="small", context=512, dtype="fp32", tool="auto"):
    return [Case(size, context, name, dtype, tool) for name in profiling.RANGES]


def by_range(found, cases):
    return {case.range: metrics for case, metrics in zip(cases, found, strict=True)}


# ------------------------------------------------------------------------------------------------ grid
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_grid_is_a_grid(preset):
    cases = profiling.grid(preset)
    assert len(set(cases)) == len(cases)
    for c in cases:
        assert c.range in profiling.RANGES
        for field, allowed in profiling.CHOICES.items():
            assert getattr(c, field) in allowed
    for group in rows.groups(profiling, cases):
        assert [c.range for c in group] == list(profiling.RANGES) and profiling.estimate_s(group) > 0


def test_full_grid_is_the_handouts():
    shapes = {(c.size, c.context_length) for c in profiling.grid("full") if c.dtype == "fp32"}
    assert shapes == {
        (s, n) for s in ("small", "medium", "large", "xl", "2.7B") for n in (128, 256, 512, 1024)
    }


def test_columns_of_the_classes_are_distinct():
    assert len(set(CLASS_COLUMNS.values())) == len(kernels.CLASSES)
    assert CLASS_COLUMNS["matrix product"] == "matrix_product_ms"


# ------------------------------------------------------------------------------------------------ measuring
def test_a_trace_becomes_rows_for_one_step(under_nsys, results_root):
    cases = cases_of()
    found = by_range(profiling.run_group(cases), cases)
    [(function, arguments, _)] = under_nsys.calls
    assert function == "cs336_systems.experiments.profiling:under_nsys"
    assert arguments == {"size": "small", "context_length": 512, "batch": 4, "dtype": "fp32"}
    forward = found["forward"]
    assert (
        forward["kernels"] == 2 * 5 and forward["source"] == "nsys" and forward["tool_version"] == "2025.3.1"
    )
    assert forward["matrix_product_ms"] == pytest.approx(2 * 3 * 0.1)
    assert forward["softmax_ms"] == pytest.approx(2 * 0.03)
    assert forward["elementwise_ms"] == pytest.approx(2 * 0.02)
    assert forward["kernel_ms"] == pytest.approx(2 * 0.35) and forward["python_ms"] == 1.1
    assert found["backward"]["kernels"] == 6  # launched by another thread
    assert found["optimizer"]["optimizer_ms"] == pytest.approx(0.05)
    assert found["softmax"]["kernel_ms"] == found["softmax"]["softmax_ms"] == pytest.approx(2 * 0.03)
    assert found["scores"]["matrix_product_ms"] == pytest.approx(2 * 0.1)
    assert found["inference"]["kernel_ms"] == pytest.approx(forward["kernel_ms"])
    _, kind, calls, ms = json.loads(forward["longest"])[0]
    assert (kind, calls) == ("matrix product", 6) and ms == pytest.approx(0.6)
    for metrics in found.values():
        assert set(metrics) <= set(profiling.METRICS)
    assert profiling.step_path("small", 512, "fp32", "h100-x1", results_root).is_file()


def test_what_does_not_fit_is_a_row_and_the_rest_is_measured(under_nsys):
    under_nsys.status = {"optimizer": "oom"}
    cases = cases_of("xl", 1024)
    found = by_range(profiling.run_group(cases), cases)
    assert found["optimizer"] == {"status": "oom"} and found["backward"]["kernels"] == 6


def test_memory_that_runs_out_while_recording_loses_only_its_step(monkeypatch):
    from cs336_systems.training.step import Step

    shape = profiling._Shape("tiny", 16, 2, "fp32")
    assert list(shape.steps) == ["inference", "step"] and shape.said["status"] == {}

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Step, "backward", full)
    shape.run()
    assert set(shape.said["status"]) == set(profiling.RANGES) - {"inference"}


def test_a_process_that_fails_is_a_row_for_every_range(under_nsys, monkeypatch):
    def fail(*args, **kwargs):
        raise nsys.NsysError("nsys export failed with exit code 1: no such option")

    monkeypatch.setattr(nsys, "record_nsys", fail)
    found = profiling.run_group(cases_of())
    assert {metrics["status"] for metrics in found} == {
        "error: NsysError: nsys export failed with exit code 1: no such option"
    }


def test_out_of_memory_stops_at_its_mode(monkeypatch):
    from cs336_systems.training.step import Step

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Step, "optimizer_step", full)
    shape = profiling._Shape("tiny", 16, 2, "fp32")
    assert shape.said["status"] == {"optimizer": "oom"}
    assert list(shape.steps) == ["inference", "step"] and shape.steps["step"].mode == "forward_backward"
    monkeypatch.setattr(Step, "backward", full)
    shape = profiling._Shape("tiny", 16, 2, "fp32")
    assert set(shape.said["status"]) == {"forward", "backward", "optimizer", "scores", "softmax", "output"}
    assert list(shape.steps) == ["inference"]


@without_gpu
def test_too_large_for_this_machine(monkeypatch):
    monkeypatch.setattr(profiling, "free_memory_bytes", lambda device: 2**33)
    found = profiling.run_group(cases_of("2.7B"))
    assert all("needs about 5" in m["status"] and "8.0 GiB are free" in m["status"] for m in found)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke preset, measured once; its root."""
    root = tmp_path_factory.mktemp("smoke") / "results"
    root.mkdir()
    (root / "reference.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CS336_RESULTS", str(root))
        rows.measure(profiling, profiling.grid("smoke"), root=root)
    return root


@without_gpu
def test_operators_of_a_cpu(smoke):
    frame = rows.read(profiling, machine_name(), smoke).set_index("range")
    assert set(frame["status"]) == {"ok"} and set(frame["source"]) == {"torch-cpu"}
    assert frame.loc["optimizer", "optimizer_ms"] > 0 and frame.loc["forward", "matrix_product_ms"] > 0
    assert frame.loc["softmax", "softmax_ms"] > 0 and frame.loc["scores", "matrix_product_ms"] > 0
    assert frame.loc["backward", "kernels"] > frame.loc["forward", "kernels"]
    assert profiling.step_path("tiny", 64, "fp32", machine_name(), smoke).is_file()
    assert (profiling.report_folder(smoke) / "tiny_64_fp32_auto" / "trace.json.gz").is_file()


# ------------------------------------------------------------------------------------------------ page
@pytest.fixture
def made_up(under_nsys, results_root, monkeypatch):
    """Rows of the whole grid from the made-up trace; 2.7B has no optimizer step at context 1,024."""
    for number, group in enumerate(rows.groups(profiling, profiling.grid("full"))):
        case = group[0]
        under_nsys.status = {"optimizer": "oom"} if (case.size, case.context_length) == ("2.7B", 1024) else {}
        found = profiling.run_group([dataclasses.replace(c, tool="auto") for c in group])
        if case.tool == "torch":
            found = [m | {"source": "torch", "tool_version": "2.11"} for m in found]
        provenance = {
            "run": f"run-{number}", "time_utc": "2026-01-01T00:00:00Z", "env": "0",
            "code": code_digest(profiling),
        }  # fmt: skip
        rows.write(
            profiling, "h100-x1",
            [dataclasses.asdict(c) | {"status": "ok"} | m | provenance for c, m in zip(group, found, strict=True)],
            results_root,
        )  # fmt: skip
    return Chapter("profiling", measure="no", machine="h100-x1", preset="full")


def test_page_of_made_up_rows(made_up):
    assert len(page.timer_table(made_up)) == 25
    top = page.top_table(made_up)
    assert set(top["first in forward"]) == {"`sm90_xmma_gemm_f32f32`"} and set(top["with backward"]) == {
        "the same"
    }
    share = page.share_table(made_up)
    whole = share[(share["size"] == "small") & (share["context"] == 512) & (share["dtype"] == "fp32")].iloc[0]
    assert whole["forward"] == "85.7 %"  # 0.6 of 0.7 ms
    assert whole["step"] == f"{100 * 1.0 / (0.7 + 0.44 + 0.05):.1f} %"
    cut = share[(share["size"] == "2.7B") & (share["context"] == 1024)].iloc[0]
    assert cut["step"] == "OOM" and cut["forward + backward"] != "OOM"
    attention = page.attention_table(made_up)
    assert set(attention["time ÷"]) == {"0.150"}  # 0.03 of 0.2 ms
    small = attention[attention["size"] == "small"].iloc[0]
    assert small["FLOPs ÷"] == f"{5 / 256:.4f}"
    assert (
        "`2.7B` at context 1024 (fp32) on `h100-x1`: `optimizer`. By the closed form the whole step needs 87.8"
        in words.out_of_memory(made_up)
    )
    assert words.sources_words(made_up) == "Recorded with `h100-x1`: Nsight Systems 2025.3.1."
    assert len(page.tools_table(made_up)) == len(profiling.RANGES)
    assert "take 1.00 to 1.00 times what they take by Nsight Systems" in words.tools_words(made_up)
    assert (
        "matrix products 85.7 % of the kernels' time; then softmax 8.6 %, elementwise 5.7 %"
        in words.others_words(made_up)
    )
    for sentence in (
        words.timer_words, words.share_words, words.attention_words, words.top_words, words.width_words,
        words.change_words, words.adamw_words, words.softmax_words,
    ):  # fmt: skip
        assert "not measured" not in sentence(made_up)
    assert not page.kernel_table(made_up, "xl", "forward").empty
    assert page.class_figure(made_up, "h100-x1").axes[0].has_data()
    assert "- fp32: the first kernel of forward is a matrix product in all 20 shapes" in words.top_words(
        made_up
    )
    assert "the share does not grow with every size, and is more than half in all 5" in words.width_words(
        made_up
    )
    assert words.timeline_words(made_up, "h100-x1").count("after ") == 3
    assert page.drawn(made_up) == [("small", "fp32"), ("xl", "fp32"), ("small", "bf16")]
    assert page.timeline_figure(made_up, "h100-x1", "small").axes[0].has_data()


def test_forward_stands_beside_the_chapter_on_benchmarking(made_up, results_root):
    from cs336_systems.experiments import benchmarking

    cases = [
        c
        for c in benchmarking.grid("full")
        if c.mode == "train_step" and (c.size, c.context_length) == ("xl", 256)
    ]
    times = {"forward_ms_p50": 0.5, "status": "ok", "run": "r", "env": "0", "code": "c"}
    rows.write(benchmarking, "h100-x1", [dataclasses.asdict(c) | times for c in cases], results_root)
    chapter = Chapter("profiling", measure="no", machine="h100-x1", preset="full")
    assert page.benchmarked(chapter)["h100-x1", "xl", 256, "fp32"] == 0.5
    table = page.timer_table(chapter)
    beside = table[table["benchmarking, ms"] != "–"]
    assert set(zip(beside["size"], beside["context"], strict=True)) == {("xl", 256)}
    text = words.benchmark_words(chapter)
    assert "(1 shape)" in text and "the pass without recording 2.20 times" in text  # 1.1 of 0.5 ms


def test_the_page_with_some_of_its_rows(made_up, results_root, project_root, monkeypatch):
    """Two groups are still to be measured: no sentence may fail for that, or speak of what is not there."""
    frame = rows.read(profiling, "h100-x1", results_root)
    left_out = (frame["tool"] == "torch") | ((frame["size"] == "2.7B") & (frame["dtype"] == "bf16"))
    path = rows.csv_path("profiling", "h100-x1", results_root)
    frame[~left_out].to_csv(path, index=False)
    (results_root / "reference.json").write_text(json.dumps({"profiling": ["h100-x1"]}))
    text = shown_by("profiling", project_root, monkeypatch)
    assert "Both tools on one shape: not measured." in text and "nan" not in text.lower()
    assert "- bf16: the first kernel of forward is a matrix product in all 4 shapes" in text


def test_page_without_rows():
    chapter = Chapter("profiling", measure="no", preset="full")
    for sentence in (
        words.timer_words, words.others_words, words.share_words, words.attention_words, words.out_of_memory,
        words.sources_words, words.tools_words, words.benchmark_words, words.top_words, words.width_words,
        words.change_words, words.adamw_words, words.softmax_words,
    ):  # fmt: skip
        assert "not measured" in sentence(chapter)
    for table in (page.timer_table, page.top_table, page.share_table, page.attention_table):
        assert len(table(chapter)) == 25
    assert page.tools_table(chapter).empty
    assert page.class_figure(chapter, "").axes and page.timeline_figure(chapter, "", "small").axes


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["auto", "torch"])
def test_on_a_gpu(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_TRACES", str(tmp_path))
    cases = cases_of("tiny", 128, tool=tool)
    found = by_range(profiling.run_group(cases), cases)
    assert all("status" not in metrics for metrics in found.values()), found
    expected = "nsys" if tool == "auto" and nsys.find() else "torch"
    assert {metrics["source"] for metrics in found.values()} == {expected}
    assert found["optimizer"]["optimizer_ms"] > 0 and found["softmax"]["softmax_ms"] > 0
    assert found["forward"]["matrix_product_ms"] > 0
    assert found["backward"]["kernels"] > found["forward"]["kernels"]
    parts = sum(found[name]["kernel_ms"] for name in ("scores", "softmax", "output"))
    assert 0 < parts < found["forward"]["kernel_ms"]
