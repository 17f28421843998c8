"""Chapter profiling: its grid, what a recording becomes, its frames, its notebook on whatever rows there are."""

import json
import math
import types

import pandas as pd
import pytest

from cs336_systems.chapters.profiling import measure as profiling
from cs336_systems.chapters.profiling import show as page
from cs336_systems.chapters.profiling.measure import CLASS_COLUMNS, Case
from cs336_systems.measure.trace import kernels, nsys
from cs336_systems.measure.trace.events import Kernel, Range, Trace
from cs336_systems.report import tables
from cs336_systems.store import machine, rows
from cs336_systems.store.machine import machine_name
from cs336_systems.store.status import Skip

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

    def phase(name, body):
        nonlocal now
        begin = now
        body()
        now = max(now, found[-1].end_ns) + 1_000  # the device is synchronized
        ranges.append(Range(name, begin, now, 1, 1))

    def forward():
        nonlocal now
        for _ in range(layers):
            launch(0, 1)
            for part, kinds in PARTS.items():
                begin = now
                now += 100
                for kind in kinds:
                    launch(kind, 1)
                now += 100
                ranges.append(Range(part, begin, now, 1, 1))

    for outer in ("inference", "step"):
        for _ in range(steps):
            start = now
            now += 1_000
            phase("forward", forward)
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


def test_columns_of_the_classes_are_distinct():
    assert len(set(CLASS_COLUMNS.values())) == len(kernels.CLASSES)


# ------------------------------------------------------------------------------------------------ measuring
def test_a_trace_becomes_rows_for_one_step(under_nsys, results_root):
    cases = cases_of()
    found = by_range(profiling.run_group(cases), cases)
    [(function, arguments, _)] = under_nsys.calls
    assert function == "cs336_systems.chapters.profiling.measure:under_nsys"
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
        assert set(metrics) <= set(profiling.TABLE.metrics)
    assert rows.file_beside(profiling.TABLE, Case("small", 512, "step"), "h100-x1", results_root).is_file()


def test_what_does_not_fit_is_a_row_and_the_rest_is_measured(under_nsys):
    under_nsys.status = {"optimizer": "oom"}
    cases = cases_of("xl", 1024)
    found = by_range(profiling.run_group(cases), cases)
    assert found["optimizer"] == {"status": "oom"} and found["backward"]["kernels"] == 6


def test_out_of_memory_stops_at_its_mode_and_while_recording_loses_its_step(monkeypatch):
    from cs336_systems.chapters.shared.step import Step

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    fits = profiling._Shape("tiny", 16, 2, "fp32")
    assert list(fits.steps) == ["inference", "step"] and fits.said["status"] == {}
    monkeypatch.setattr(Step, "optimizer_step", full)
    shape = profiling._Shape("tiny", 16, 2, "fp32")
    assert shape.said["status"] == {"optimizer": "oom"}
    assert list(shape.steps) == ["inference", "step"] and shape.steps["step"].mode == "forward_backward"
    monkeypatch.setattr(Step, "backward", full)
    shape = profiling._Shape("tiny", 16, 2, "fp32")
    fits.run()
    assert set(shape.said["status"]) == set(fits.said["status"]) == set(profiling.RANGES) - {"inference"}
    assert list(shape.steps) == ["inference"]


@without_gpu
def test_too_large_for_this_machine(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**33)
    with pytest.raises(Skip, match=r"needs about 5.* 8\.0 GiB are free"):
        profiling.run_group(cases_of("2.7B"))


@without_gpu
def test_operators_of_a_cpu(smoke):
    frame, root = smoke[0].set_index("range"), smoke[1]
    assert set(frame["status"]) == {"ok"} and set(frame["source"]) == {"torch-cpu"}
    assert frame.loc["optimizer", "optimizer_ms"] > 0 and frame.loc["forward", "matrix_product_ms"] > 0
    assert frame.loc["softmax", "softmax_ms"] > 0 and frame.loc["scores", "matrix_product_ms"] > 0
    assert frame.loc["backward", "kernels"] > frame.loc["forward", "kernels"]
    assert rows.file_beside(profiling.TABLE, Case("tiny", 64, "step"), machine_name(), root).is_file()
    assert (rows.recordings_folder("profiling", root) / "tiny_64_fp32_auto" / "trace.json.gz").is_file()


# ------------------------------------------------------------------------------------------------ frames
def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    longest = json.dumps([["aten::mm", "matrix product", 40, 4.0]])
    return {
        "kernel_ms": 5.0,
        "host_ms": 6.0,
        "busy_ms": 5.0,
        "idle_ms": 1.0,
        "kernels": 40,
        "longest": longest,
    }


SHAPE = {"machine": "x", "size": "small", "context_length": 512, "dtype": "fp32", "batch": 4}
PASS = {
    "kernel_ms": 10.0, "matrix_product_ms": 8.0, "python_ms": 12.0, "host_ms": 15.0, "busy_ms": 10.0, "idle_ms": 2.5,
}  # fmt: skip
GEMM = [f"sm80_xmma_gemm_f32f32_f32f32_f32_tn_n {tile}x8" for tile in ("64x64", "128x128")]
COPY = "copy"


def row(name, longest=(), **more):
    lacking = dict.fromkeys(profiling.TABLE.metrics, math.nan)
    zeros = dict.fromkeys(("kernels", *CLASS_COLUMNS.values()), 0.0)
    return lacking | SHAPE | zeros | {"range": name, "status": "ok", "longest": json.dumps(longest)} | more


def test_ranges_add_up_and_one_that_is_missing_takes_the_sum_with_it():
    frame = pd.DataFrame([
        row("forward", **PASS), row("backward", **PASS), row("forward", size="xl", **PASS),
        row("backward", size="xl", kernel_ms=math.nan, status="oom"), row("forward", size="large", **PASS),
    ])  # fmt: skip
    found = page.sums(frame, "forward", "backward").set_index("size")
    assert found.loc["small", ["kernel_ms", "matrix_product_ms", "status"]].tolist() == [20.0, 16.0, "ok"]
    assert math.isnan(found.loc["xl", "kernel_ms"]) and found.loc["xl", "status"] == "oom"
    assert math.isnan(found.loc["large", "kernel_ms"])
    timer = page.timer(frame, "forward").iloc[0]
    assert timer["ratio"] == 1.25 and timer["idle_pct"] == 20


def test_two_tools_are_not_added_up():
    frame = pd.DataFrame([row("forward", tool=tool, **PASS) for tool in ("auto", "torch")])
    for shown in (page.timer_table, page.kinds_table, page.share_table, page.top_table, page.attention_table):
        with pytest.raises(ValueError, match="tools auto, torch"):
            shown(frame)


def test_the_top_kernel_is_that_of_the_ranges_together():
    small, large = GEMM
    frame = pd.DataFrame([
        row("forward", [[small, "matrix product", 5.0, 4.0], [COPY, "copy/cast", 2.0, 3.0]], kernel_ms=8.0),
        row("backward", [[large, "matrix product", 1.0, 6.0], [COPY, "copy/cast", 3.0, 5.0]], kernel_ms=12.0),
        row("forward", [[COPY, "copy/cast", 1.0, 1.0]], kernel_ms=2.0, size="xl"),
    ])  # fmt: skip
    first, both = page.top(frame, "forward"), page.top(frame, "forward", "backward")
    assert first[["kernel", "calls", "pct"]].values.tolist() == [[small, 5, 50.0], [COPY, 1, 50.0]]
    assert both[["kernel", "kind", "calls", "pct"]].values.tolist() == [[COPY, "copy/cast", 5, 40.0]]
    table = page.top_table(frame).set_index("size")
    assert table["forward"].tolist() == ["xmma_gemm_tn 64x64x8", "copy"]
    assert table["its calls"].isna().tolist() == [False, True]


def test_shares_of_gemms_with_a_step_that_ran_out_of_memory():
    frame = pd.DataFrame([
        row("inference", **PASS), row("forward", **PASS), row("backward", kernel_ms=20.0, matrix_product_ms=18.0),
        row("optimizer", kernel_ms=10.0, optimizer_ms=10.0), row("inference", size="xl", **PASS),
        row("forward", size="xl", **PASS), row("backward", size="xl", **PASS),
        row("optimizer", size="xl", kernel_ms=math.nan, status="oom"),
    ])  # fmt: skip
    table = page.share_table(frame).set_index("size")
    shares = table.loc["small"].drop(["machine", "context", "dtype"]).tolist()
    assert shares == [80, 80, 90, pytest.approx(86.7, abs=0.1), 65, 25]
    assert table.loc["xl", "forward + backward, %"] == 80 and math.isnan(table.loc["xl", "step, %"])
    assert tables.printed(page.share_table(frame))["step, %"].tolist() == ["65.0", "OOM"]
    kinds = page.kinds_table(frame).iloc[0]
    assert kinds["GEMMs, %"] == 80 and kinds["softmax, %"] == 0 and kinds["rest, %"] == 20


def test_softmax_stands_against_both_gemms():
    frame = pd.DataFrame([
        row("scores", kernel_ms=5.0, matrix_product_ms=1.0), row("softmax", kernel_ms=3.0, softmax_ms=1.0),
        row("output", kernel_ms=2.0, matrix_product_ms=1.0),
        row("scores", size="xl", kernel_ms=5.0, matrix_product_ms=1.0),
    ])  # fmt: skip
    small, xl = page.attention(frame).to_dict("records")
    scores = 12 * 4 * 12 * 512**2
    assert small["gemm_ms"] == 2 and small["rest_ms"] == 7 and small["time_ratio"] == 0.5
    assert small["flops_pct"] == pytest.approx(100 * 5 / (4 * 64))
    assert small["softmax_tb_s"] == pytest.approx(8 * scores / 1e9)
    assert math.isnan(xl["time_ratio"])


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["auto", "torch"])
def test_on_a_gpu(tool, results_root):
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
