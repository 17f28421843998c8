"""Chapter mixed_precision: number formats, its four kinds of rows measured on this machine, and its page."""

import dataclasses
import functools
import math
from fractions import Fraction

import pandas as pd
import pytest
import step_rows

from cs336_systems import accounting, chapters
from cs336_systems.chapters.mixed_precision import measure as mixed_precision
from cs336_systems.chapters.mixed_precision import show as page
from cs336_systems.chapters.mixed_precision.formats import FORMATS, number_format, running_sums, stagnation
from cs336_systems.chapters.mixed_precision.measure import Case
from cs336_systems.chapters.shared import steps
from cs336_systems.report import tables
from cs336_systems.report.claims import execute
from cs336_systems.sizes import size
from cs336_systems.store import measuring

torch = pytest.importorskip("torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SMALL = [case for case in mixed_precision.grid("smoke") if case.kind != "step"]


def measured(**fields):
    """The metrics of one case."""
    [metrics] = mixed_precision.run_group([Case(**fields)])
    return metrics


def norm(part, dtype, scale=1.0, offset=0.0, width=1024):
    return measured(kind="layer_norm", what=part, dtype=dtype, scale=scale, offset=offset, width=width)


# ------------------------------------------------------------------------------------------------ formats
@pytest.mark.parametrize("name", TORCH)
def test_formats_are_torchs(name):
    f, info = FORMATS[name], torch.finfo(TORCH[name])
    assert (float(f.largest), float(f.epsilon)) == (info.max, info.eps)
    least = info.smallest_normal
    assert [float(f.ulp(x)) / info.eps for x in (0, least, 2 * least)] == [least, least, 2 * least]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_rounding_is_torchs(name):
    """Normal and subnormal numbers, ties, overflow. From fp32, since torch narrows a double in two steps."""
    x = torch.randn(2000, dtype=torch.float64) * 2.0 ** torch.randint(-150, 130, (2000,))
    x = x if name == "fp32" else x.float().double()
    ties = (2 * torch.arange(64, dtype=torch.float64) + 1) * float(FORMATS[name].ulp(0)) / 2
    x = torch.cat([x, ties, ties * 2.0**20, torch.tensor([0.0, -0.0, 65504.0, 65519.99, 65520.0, -1e30])])
    x = x if name == "fp32" else x.float().double()
    rounded = x.to(TORCH[name]).double().tolist()
    assert [FORMATS[name].round(number) for number in x.tolist()] == rounded


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("addend", [Fraction(1, 100), Fraction(1), Fraction(3, 7), Fraction(1, 8)])
def test_a_sum_stops_where_stagnation_says(name, addend):
    f = number_format(name)
    addend = f.round(addend)
    end = stagnation(f, addend)
    assert f.round(end + addend) == end
    below = end - f.ulp(end / 2)
    assert f.round(below + addend) > below  # an odd last bit: also a tie moves it
    assert running_sums(f, addend, 10_000)[-1] in (end, end / 2)


# ------------------------------------------------------------------------------------------------ measuring
@pytest.fixture
def one_thread():
    """Two threads on a busy machine wait for each other much longer than a tiny model takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_smoke_is_measured_and_read_back(results_root, one_thread, project_root, monkeypatch):
    """The whole smoke preset, of fewer steps, through the CSV: what the page reads is what was measured, and its
    notebook runs."""
    every, seen = mixed_precision._steps, functools.cache(mixed_precision.observe)
    fewer = lambda *a, **k: [dataclasses.replace(c, context_length=16, steps=2) for c in every(*a, **k)]
    monkeypatch.setattr(mixed_precision, "_steps", fewer)
    monkeypatch.setattr(mixed_precision, "observe", seen)
    assert measuring.measure(mixed_precision.TABLE, mixed_precision.grid("smoke"), root=results_root) == 4
    chapter = chapters.read("mixed_precision", machine="this", preset="smoke")
    assert set(chapter.rows()["status"]) == {"ok"}
    assert page.mispredicted(chapter.rows(kind="accumulation")) == 0
    assert list(page.dtypes(chapter.rows(kind="dtypes"))["tensor"]) == list(page.TENSORS)
    assert page.norm(chapter.rows(kind="layer_norm")).shape == (len(page.PARTS), 2 + 6)
    [line] = page.speed(chapter.rows(kind="step")).to_dict("records")
    assert line["size"] == "tiny" and line["step, ×"] > 0
    sentences, _ = execute(project_root / "book" / "mixed_precision.ipynb", machine="this", preset="smoke")
    outcomes = {s.part: s.outcome for s in sentences if s.part}
    assert outcomes["mixed_precision_accumulation"] is True
    assert outcomes["benchmarking_mixed_precision (c)"] is None  # no such sizes


@pytest.mark.parametrize(("dtype", "what"), mixed_precision.SUMS)
def test_sums_are_predicted_to_the_last_bit(dtype, what):
    found = measured(kind="accumulation", dtype=dtype, what=what)
    row = {"dtype": dtype, "what": what, "status": "ok"} | found
    assert page.mispredicted(pd.DataFrame([row])) == 0
    last = found["sums"].split()[-1]
    assert float(found["result"]) == float(last)
    row["sums"] = found["sums"].replace(last, repr(math.nextafter(float(last), 11)))
    assert page.mispredicted(pd.DataFrame([row])) > 0


@pytest.mark.parametrize("dtype", mixed_precision.AUTOCAST)
def test_dtypes_are_observed(dtype):
    seen = mixed_precision.observe(dtype, DEVICE)
    assert set(seen) == set(mixed_precision.TENSORS)
    parameters = [*mixed_precision.PARAMETERS, *(f"{name}.grad" for name in mixed_precision.PARAMETERS)]
    assert {seen[name] for name in (*parameters, "input", "loss", "ln statistics")} == {"fp32"}
    assert {seen[name] for name in ("fc1 operand", "fc1", "relu", "fc2", "fc1 grad", "fc2 grad")} == {dtype}
    assert seen["ln"] == seen["ln grad"] == ("fp32" if DEVICE == "cuda" else dtype)


def test_layer_norm_in_fp64_would_be_torchs():
    x = torch.randn(5, 256, dtype=torch.float64) * 3 + 2
    mean, variance, output = mixed_precision._norm(x)
    torch.testing.assert_close(output, torch.nn.functional.layer_norm(x, (256,), eps=mixed_precision.EPS))
    torch.testing.assert_close((mean[:, 0], variance[:, 0]), (x.mean(-1), x.var(-1, correction=0)))
    for formula in ("running", "one_pass"):
        torch.testing.assert_close(mixed_precision._norm(x, variance=formula)[2], output)


def test_layer_norms_range():
    """fp16 loses the variance where the sum of squares overflows, and says nothing; bf16 and fp32 do not."""
    bound = (float(number_format("fp16").largest) / 1024) ** 0.5
    inside, outside = norm("variance", "fp16", bound / 1.3), norm("variance", "fp16", bound * 1.3)
    assert inside["not_finite"] == 0 and inside["output_error"] < 1e-3
    assert outside["not_finite"] == 1 and outside["output_error"] == pytest.approx(1)
    assert "variance_error" not in outside
    for dtype in ("bf16", "fp32"):
        assert norm("variance", dtype, 1e4)["not_finite"] == 0
    lost = norm("mean", "fp16", offset=100.0)  # the sum: 102,400
    assert lost["not_finite"] == 1 and "output_error" not in lost
    assert norm("fp32_inside", "fp16", 1e4)["not_finite"] == 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_layer_norms_resolution(dtype):
    assert norm("running", dtype)["output_error"] > 5 * norm("variance", dtype)["output_error"]
    assert norm("fp32_inside", dtype)["output_error"] == pytest.approx(
        norm("ends", dtype)["output_error"], rel=0.01
    )
    assert norm("one_pass", dtype, offset=10.0)["output_error"] > 0.5


def test_autocast_converts_each_linear_weight_once():
    """Every forward pass casts all linear weights: 7 a block and the head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from cs336_systems.chapters.shared.step import Workload

    converted = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if (
                function is torch.ops.aten._to_copy.default
                and args[0].ndim == 2
                and output.dtype == torch.bfloat16
            ):
                converted.append(args[0].numel())
            return output

    config = size("tiny")
    step = Workload(config, 2, 16, DEVICE).step("forward_backward", "bf16", "reference")
    step.prepare()
    with Casts():
        step.forward()
    assert len(converted) == 7 * config.num_layers + 1
    assert 2 * sum(converted) == accounting.autocast_copy_bytes(config)


@pytest.mark.gpu
def test_on_a_gpu():
    """The small kinds on the device: sums as on a CPU, layer norm on autocast's fp32 list, a tiny step in turns."""
    for dtype, what in mixed_precision.SUMS:
        found = {"dtype": dtype, "what": what, "status": "ok"} | measured(
            kind="accumulation", dtype=dtype, what=what
        )
        assert page.mispredicted(pd.DataFrame([found])) == 0
    for dtype in mixed_precision.AUTOCAST:
        seen = mixed_precision.observe(dtype, "cuda")
        assert (seen["fc1"], seen["ln"], seen["fc2"], seen["loss"]) == (dtype, "fp32", dtype, "fp32")
    for case in SMALL:
        if case.kind == "layer_norm" and case.width == 1024:
            here, there = (mixed_precision._layer_norm(case, device) for device in ("cuda", "cpu"))
            assert here["not_finite"] == there["not_finite"]
    for found in mixed_precision.run_group(mixed_precision._steps("tiny", 64, steps.DTYPES)):
        assert "status" not in found and found["peak_gib"] > 0


# ------------------------------------------------------------------------------------------------ frames
frame = functools.partial(
    step_rows.frame, mixed_precision.TABLE, **{f.name: f.default for f in dataclasses.fields(Case)}
)


def test_errors_of_sums_are_taken_apart():
    sums = [mixed_precision._accumulation(Case("accumulation", *pair), "cpu") for pair in page.HANDOUT_SUMS]
    given = frame(
        *(dict(zip(("dtype", "what"), pair, strict=True)) | m for pair, m in zip(page.HANDOUT_SUMS, sums, strict=True)),
        {"dtype": "bf16", "what": "bf16", "result": 4.0}, kind="accumulation",
    )  # fmt: skip
    found = page.accumulation(given.iloc[::-1])
    assert list(zip(found["accumulator"], found["addend"], strict=True)) == list(page.HANDOUT_SUMS)
    parts = found["by rounding 0.01"] + found["by the additions"]
    assert list(found["error"]) == pytest.approx(list(parts), abs=1e-11)
    assert list(found["by the additions"][2:]) == [0, 0] and found["by the additions"][1] < -0.04
    assert found["by rounding 0.01"][1] == pytest.approx(1000 * (float(torch.tensor(0.01).half()) - 0.01))


def test_stalls():
    assert (page.stall("fp16"), page.stall("bf16")) == (32, 4)
    assert page.mispredicted(frame({"status": "not measured"})).missing


def test_a_norm_that_is_not_finite_says_so():
    given = frame(
        {"what": "mean", "dtype": "bf16", "output_error": 0.5}, {"what": "mean", "dtype": "fp16", "not_finite": 1.0},
        {"what": "ends", "dtype": "bf16", "output_error": 0.25},
        {"what": "ends", "dtype": "fp16", "status": "not measured"},
        {"what": "ends", "dtype": "bf16", "output_error": 9.0, "scale": 3.0}, {"what": "ends", "dtype": "fp32"},
        kind="layer_norm", scale=1.0, offset=0.0, width=1024,
    )  # fmt: skip
    found = page.norm(given)
    assert list(found["bf16: σ 1"]) == [0.25, 0.5] and found["in 16 bits"][1] == page.PARTS["mean"]
    assert list(tables.printed(found)["fp16: σ 1"]) == ["–", "∞"]


def step(size, dtype, mode, **metrics):
    return {"kind": "step", "size": size, "dtype": dtype, "mode": mode} | metrics


def test_speedups():
    given = frame(
        step("small", "fp32", "forward_backward", forward_ms_p50=10.0, backward_ms_p50=30.0),
        step("small", "bf16", "forward_backward", forward_ms_p50=20.0, backward_ms_p50=10.0),
        step("small", "bf16", "forward_backward", forward_ms_p50=99.0, backward_ms_p50=99.0, repeat=1),
        step("small", "fp32", "train_step", step_ms_p50=60.0), step("small", "bf16", "train_step", step_ms_p50=40.0),
        step("xl", "fp32", "forward_backward", status="oom"), step("xl", "tf32", "train_step", step_ms_p50=4.0),
    )  # fmt: skip
    found = page.speed(given)
    small, xl = found.to_dict("records")
    assert (small["forward, ×"], small["backward, ×"], small["step, ×"]) == (0.5, 3.0, 1.5)
    assert small["forward bf16, ms"] == 20.0 and xl["size"] == "xl"
    [two_runs, _] = page.speed(given.assign(run=given["dtype"])).to_dict("records")
    assert math.isnan(two_runs["forward, ×"]) and math.isnan(two_runs["step, ×"])
    assert math.isnan(xl["step, ×"]) and tables.printed(found)["forward fp32, ms"][1] == "OOM"


def test_kernels_of_both_passes_beside_their_wall_time():
    kernel = {"machine": "x", "size": "small", "dtype": "bf16", "batch": 4, "context_length": 512}
    both = {"matrix_product_ms": 2.0, "copy_cast_ms": 1.0, "kernel_ms": 4.0, "kernels": 10}
    profile = pd.DataFrame([
        *(kernel | {"range": name} | both for name in ("forward", "backward", "optimizer")),
        kernel | {"range": "forward", "dtype": "fp32"} | both,  # without its backward: no sum
    ])  # fmt: skip
    walls = frame(step("small", "bf16", "forward_backward", step_ms_p50=16.0))
    fp32, bf16 = page.kernels(profile, walls).to_dict("records")
    assert (bf16["launches"], bf16["gemm_ms"], bf16["cast_ms"], bf16["other_ms"]) == (20, 4.0, 2.0, 2.0)
    assert (bf16["kernel_ms"], bf16["wall_ms"]) == (8.0, 16.0)
    # plain attention computes all pairs, those that the mask hides, too
    flops = 3 * sum(accounting.forward_matmul_flops(size("small"), 4, 512).values())
    assert bf16["gemm_tflops"] == pytest.approx(flops / 4.0 / 1e9)
    assert math.isnan(fp32["kernel_ms"]) and math.isnan(fp32["wall_ms"])


# ------------------------------------------------------------------------------------------------ notebook


def test_a_bf16_that_gains_nothing_does_not_bear_the_answer_out(project_root, tmp_path, monkeypatch):
    (tmp_path / "reference.json").write_text('{"mixed_precision": ["h100-x1"], "profiling": ["h100-x1"]}')
    cases = [case for case in mixed_precision.grid("full") if case.kind == "step"]
    as_fp32 = lambda case: step_rows.metrics(dataclasses.replace(case.step, dtype="fp32"))
    step_rows.write(mixed_precision.TABLE, cases, tmp_path, make=as_fp32)
    profiling = chapters.load("profiling")
    kernels = {"kernels": 10, "matrix_product_ms": 2.0, "copy_cast_ms": 1.0, "kernel_ms": 4.0}
    step_rows.write(profiling, profiling.grid("full"), tmp_path, make=lambda case: kernels)
    monkeypatch.setenv("CS336_RESULTS", str(tmp_path))
    outcomes = {s.part: s.outcome for s in execute(project_root / "book" / "mixed_precision.ipynb")[0]}
    assert outcomes["benchmarking_mixed_precision (c)"] is False
    assert outcomes["benchmarking_mixed_precision (a)"] is None
