"""Chapter mixed_precision: number formats, its four kinds of rows measured on this machine, and its page."""

import dataclasses
import math
from fractions import Fraction

import pytest
import step_rows

from cs336_systems import accounting, experiments
from cs336_systems.accounting.formats import FORMATS, Format, number_format, running_sums, stagnation
from cs336_systems.experiments import mixed_precision, steps
from cs336_systems.experiments.mixed_precision import Case
from cs336_systems.measure import rows
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages import mixed_precision as page
from cs336_systems.report.pages import mixed_precision_steps as models
from cs336_systems.sizes import size

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


def make(case):
    """The small kinds as they are, the steps made up."""
    return (
        step_rows.metrics(case.step) if case.kind == "step" else next(iter(mixed_precision.run_group([case])))
    )


@pytest.fixture(scope="module")
def full_root(tmp_path_factory):
    """A results folder with rows of the full grid on `h100-x1`, and two roofs made up."""
    root = tmp_path_factory.mktemp("full")
    step_rows.write(mixed_precision, mixed_precision.grid("full"), root, make=make)
    hardware = experiments.load("hardware")
    roofs = {"bf16": {"tflops": 800.0}, "tf32": {"tflops": 400.0}, "fp32": {"tflops": 50.0}}
    cases = [hardware.Case("matmul", dtype, 8192, 0) for dtype in roofs]
    cases += [hardware.Case("copy", "bytes", 2**30, 0), hardware.Case("launch", "fp32", 1000, 0)]
    others = {"copy": {"tb_per_s": 3.0}, "launch": {"us_per_launch": 4.0}}
    step_rows.write(hardware, cases, root, make=lambda c: roofs.get(c.dtype, {}) | others.get(c.kind, {}))
    return root


@pytest.fixture
def made_up(full_root):
    return Chapter("mixed_precision", measure="no", machine="h100-x1", preset="full", root=full_root)


# ------------------------------------------------------------------------------------------------ formats
@pytest.mark.parametrize("name", TORCH)
def test_formats_are_torchs(name):
    f, info = FORMATS[name], torch.finfo(TORCH[name])
    assert (f.bits, float(f.largest), float(f.epsilon)) == (info.bits, info.max, info.eps)
    assert float(f.smallest_normal) == info.smallest_normal
    assert float(f.smallest) == info.smallest_normal * info.eps


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_rounding_is_torchs(name):
    """Normal and subnormal numbers, ties, overflow. From fp32, since torch narrows a double in two steps."""
    x = torch.randn(2000, dtype=torch.float64) * 2.0 ** torch.randint(-150, 130, (2000,))
    x = x if name == "fp32" else x.float().double()
    ties = (2 * torch.arange(64, dtype=torch.float64) + 1) * float(FORMATS[name].smallest) / 2
    x = torch.cat([x, ties, ties * 2.0**20, torch.tensor([0.0, -0.0, 65504.0, 65519.99, 65520.0, -1e30])])
    x = x if name == "fp32" else x.float().double()
    rounded = x.to(TORCH[name]).double().tolist()
    assert [FORMATS[name].round(number) for number in x.tolist()] == rounded


def test_rounding_takes_infinity_and_fractions():
    fp16 = number_format("fp16")
    assert fp16.round(-math.inf) == -math.inf
    assert fp16.round(Fraction(1, 3)) == Fraction(1365, 4096)
    assert fp16.ulp(0) == fp16.smallest and fp16.ulp(1) == fp16.epsilon and fp16.ulp(-1.99) == fp16.epsilon


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


def test_formats_name_wrong_values():
    with pytest.raises(
        ValueError, match="unknown number format 'fp8'; allowed: fp64, fp32, tf32, fp16, bf16"
    ):
        number_format("fp8")
    with pytest.raises(ValueError, match="addend=0; it must be positive"):
        stagnation(number_format("fp16"), 0)
    assert Format("e4m3", 8, 4, 3).epsilon == Fraction(1, 8)


# ------------------------------------------------------------------------------------------------ grid
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_grid_is_a_grid(preset):
    cases = mixed_precision.grid(preset)
    assert len(set(cases)) == len(cases)
    for field in ("scale", "offset"):  # floats are keys of rows: they must survive six digits
        assert all(float(f"{getattr(c, field):.6g}") == getattr(c, field) for c in cases)
    for group in rows.groups(mixed_precision, cases):
        assert len({c.kind for c in group}) == 1 and mixed_precision.estimate_s(group) > 0
    for case in cases:
        if case.kind == "step":
            assert case.step == steps.Case(
                **{f.name: getattr(case, f.name) for f in dataclasses.fields(steps.Case)}
            )
            assert case.repeat == 0 or dataclasses.replace(case, repeat=0) in cases


def test_full_grid_is_the_handouts():
    cases = mixed_precision.grid("full")
    found = {(c.size, c.mode, c.dtype) for c in cases if c.kind == "step"}
    assert found == {
        (size, mode, dtype)
        for size in ("small", "medium", "large", "xl", "2.7B")
        for mode in ("forward", "forward_backward", "train_step")
        for dtype in ("fp32", "tf32", "bf16")
    }
    assert {(c.context_length, c.batch, c.warmup, c.steps) for c in cases if c.kind == "step"} == {
        (512, 4, 5, 10)
    }
    sums = {(c.dtype, c.what) for c in cases if c.kind == "accumulation"}
    assert sums >= {("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16"), ("fp32", "fp16 as fp32")}
    by_group = rows.groups(mixed_precision, cases)
    assert len(by_group) == 3 + 5  # a size's dtypes take turns in one process


def test_parameters_choose_kinds_and_sizes():
    def chosen(**filters):
        return experiments.cases(mixed_precision, "full", **filters)

    assert {c.kind for c in chosen(kind="accumulation,dtypes")} == {"accumulation", "dtypes"}
    assert {c.kind for c in chosen(size="small")} == {"step"}
    with pytest.raises(
        ValueError, match="kind=sums is not in the full preset; allowed: all, accumulation, dtypes"
    ):
        chosen(kind="sums")


# ------------------------------------------------------------------------------------------------ measuring
@pytest.fixture
def one_thread():
    """Two threads on a busy machine wait for each other much longer than a tiny model takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_smoke_is_measured_and_read_back(results_root, one_thread):
    """The whole smoke preset through the CSV: what the page reads is what was measured."""
    assert rows.measure(mixed_precision, mixed_precision.grid("smoke"), root=results_root) == 4
    chapter = Chapter("mixed_precision", measure="no", machine="this", preset="smoke")
    assert set(chapter.rows()["status"]) == {"ok"}
    assert all(page.as_predicted(row) for row in chapter.rows(kind="accumulation").to_dict("records"))
    assert "all 7 running sums, at the 140 points" in page.accumulation_words(chapter)
    assert len(page.sweep(chapter, "scale", dtype="fp16", what="ends")) == len(mixed_precision.SCALES)
    speedup = models.speedup(chapter, chapter.machines[0], "tiny", "fp32", "forward")
    assert speedup > 0


@pytest.mark.parametrize(("dtype", "what"), mixed_precision.SUMS)
def test_sums_are_predicted_to_the_last_bit(dtype, what):
    found = measured(kind="accumulation", dtype=dtype, what=what)
    assert page.as_predicted(found | {"dtype": dtype, "what": what})
    assert float(found["result"]) == page.sums(found)[-1] and len(page.sums(found)) == 20
    assert found["result_error"] == pytest.approx(float(found["result"]) - 10)


def test_a_sum_that_is_off_by_a_bit_is_told():
    found = measured(kind="accumulation", dtype="fp32", what="fp32")
    last = found["sums"].split()[-1]
    found["sums"] = found["sums"].replace(last, repr(math.nextafter(float(last), 11)))
    assert not page.as_predicted(found | {"dtype": "fp32", "what": "fp32"})


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
    assert norm("variance", "fp16", 1e-4)["variance_error"] == pytest.approx(1)  # squares vanish
    assert norm("fp32_inside", "fp16", 1e4)["not_finite"] == 0


def test_layer_norms_resolution():
    error = {
        (part, d): norm(part, d)["output_error"] for part in mixed_precision.PARTS for d in ("fp16", "bf16")
    }
    for part in ("ends", "variance", "normalize", "all"):
        assert 5 < error[part, "bf16"] / error[part, "fp16"] < 12, part  # three bits
    for dtype in ("fp16", "bf16"):
        assert error["running", dtype] > 5 * error["variance", dtype]
        assert error["fp32_inside", dtype] == pytest.approx(error["ends", dtype], rel=0.01)
        assert norm("one_pass", dtype, offset=10.0)["output_error"] > 0.5
        assert norm("variance", dtype, offset=10.0)["output_error"] < 0.01
    wide = norm("running", "bf16", width=16384)
    assert wide["variance_error"] > 0.5


def test_autocast_converts_each_linear_weight_once():
    """What the page says of launches: 7 weights a block and the head, in one forward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from cs336_systems.training.step import Workload

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


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            Case("accumulation", "fp16", "bf16"),
            "unknown sum 'fp16 [+] bf16'; allowed: fp32 [+] fp32, fp16 [+] fp16",
        ),
        (Case("dtypes", "fp32", "fc1"), "unknown dtype 'fp32'; allowed: fp16, bf16"),
        (Case("dtypes", "fp16", "fc3"), "unknown tensor 'fc3'; allowed: input, fc1.weight"),
        (Case("layer_norm", "fp8", "mean", 1.0, 0.0, 64), "unknown dtype 'fp8'; allowed: fp16, bf16, fp32"),
        (Case("layer_norm", "fp16", "median", 1.0, 0.0, 64), "unknown part 'median'; allowed: ends, mean"),
    ],
)
def test_wrong_values_are_named(case, words, capsys):
    good = next(c for c in SMALL if c.kind == case.kind)
    wrong, right = mixed_precision.run_group([case, good])
    assert wrong["status"].startswith("error: ValueError: unknown ")
    assert "status" not in right  # the others of the group are measured
    with pytest.raises(ValueError, match=words):
        getattr(mixed_precision, f"_{case.kind}")(case, DEVICE)


def test_an_unknown_kind_is_named():
    with pytest.raises(
        ValueError, match="unknown kind 'sums'; allowed: accumulation, dtypes, layer_norm, step"
    ):
        measured(kind="sums", dtype="fp16")


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    measured(kind="accumulation", dtype="fp16", what="fp16")
    assert torch.get_num_threads() == before


@pytest.mark.gpu
def test_on_a_gpu():
    """The small kinds on the device: sums as on a CPU, layer norm on autocast's fp32 list, a tiny step in turns."""
    for dtype, what in mixed_precision.SUMS:
        found = measured(kind="accumulation", dtype=dtype, what=what)
        assert page.as_predicted(found | {"dtype": dtype, "what": what})
    for dtype in mixed_precision.AUTOCAST:
        seen = mixed_precision.observe(dtype, "cuda")
        assert (seen["fc1"], seen["ln"], seen["fc2"], seen["loss"]) == (dtype, "fp32", dtype, "fp32")
    for case in SMALL:
        if case.kind == "layer_norm" and case.width == 1024:
            here, there = (mixed_precision._layer_norm(case, device) for device in ("cuda", "cpu"))
            assert here["not_finite"] == there["not_finite"]
    cases = mixed_precision._steps("tiny", 64, steps.DTYPES)
    for found in mixed_precision.run_group(cases):
        assert "status" not in found and found["peak_gib"] > 0


# ------------------------------------------------------------------------------------------------ page
def test_page_of_made_up_rows(made_up):
    table = page.accumulation_table(made_up)
    assert list(table["predicted"]) == list(table["measured"]) and len(table) == 7
    assert page.dtype_table(made_up).set_index("tensor").loc["output of fc1", "fp16 autocast"] == "fp16"
    assert "the parameters inside the context fp32, fc1's output fp16" in page.dtype_words(made_up)
    assert len(page.norm_table(made_up)) == len(mixed_precision.PARTS)
    assert "a variance at σ = 3 and none at 10" in page.range_words(made_up)
    assert page.precision_words(made_up).count("- ") == 2
    for figure in (page.accumulation_figure, page.norm_figure, models.speed_figure):
        assert figure(made_up, "h100-x1").axes[0].has_data()


def test_speedups_of_made_up_rows(made_up):
    table = models.speed_table(made_up)
    assert list(table["size"]) == ["small", "medium", "large", "xl", "2.7B"]
    assert models.speedup(made_up, "h100-x1", "2.7B", "fp32", "forward") == pytest.approx(
        made_up.number(
            "forward_ms_p50", kind="step", size="2.7B", mode="forward_backward", dtype="fp32", repeat=0
        )
        / made_up.number(
            "forward_ms_p50", kind="step", size="2.7B", mode="forward_backward", dtype="bf16", repeat=0
        )
    )
    assert "never falls, beyond what a pair differs by: forward, backward, step." in models.speed_words(
        made_up
    )
    assert "16.0 times as fast in bf16 as in fp32 and 2.00 times" in models.bound_words(made_up)
    share, alone, _ = models.amdahl(made_up, "h100-x1", "2.7B", "fp32")
    assert alone == pytest.approx(1 / (1 - share + share / 16))
    assert "the 85 weights need as many launches, 0.340 ms" in models.cast_words(made_up)
    assert list(models.trend_table(made_up)["size"]) == list(table["size"])


def test_memory_of_made_up_rows(made_up):
    table = models.memory_table(made_up).set_index(["size", "mode"])
    assert table.loc[("2.7B", "`forward`"), "bf16 / fp32"] == "147 %"  # the copies of the weights
    assert len(table) == 15
    assert "`train_step` on `h100-x1`: 92 % (`small`) to 102 % (`2.7B`)" in models.memory_words(made_up)
    prediction = models.memory_prediction_table().set_index("size")
    assert prediction.loc["2.7B", "bf16 / fp32"] == "102 %"


def test_slower_is_said(results_root):
    def slow(case):
        found = make(case)
        factor = 100 if case.dtype == "bf16" else 1
        return found | {"forward_ms_p50": factor * found["forward_ms_p50"]}

    cases = [c for c in mixed_precision.grid("full") if c.kind == "step" and c.size == "small"]
    step_rows.write(mixed_precision, cases, results_root, make=slow)
    chapter = Chapter("mixed_precision", measure="no", machine="h100-x1", preset="full", size="small")
    assert "Slower than fp32: forward of `small`." in models.speed_words(chapter)


def test_ratios_stay_within_a_run(results_root):
    cases = [c for c in mixed_precision.grid("full") if c.kind == "step" and c.size == "small"]
    for part, run in (
        ([c for c in cases if c.dtype == "bf16"], "a"),
        ([c for c in cases if c.dtype != "bf16"], "b"),
    ):
        now = {"run": run, "time_utc": "2026-01-01T00:00:00Z", "env": "e", "code": "c", "status": "ok"}
        rows.write(
            mixed_precision, "h100-x1", [dataclasses.asdict(c) | make(c) | now for c in part], results_root
        )
    chapter = Chapter("mixed_precision", measure="no", machine="h100-x1", preset="full")
    assert models.speedup(chapter, "h100-x1", "small", "fp32", "forward") is None
    assert models.amdahl(chapter, "h100-x1", "small", "fp32") is None


@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_page_without_rows(preset):
    chapter = Chapter("mixed_precision", measure="no", preset=preset)
    for sentence in (
        page.accumulation_words, page.dtype_words, page.range_words, page.precision_words, models.bound_words,
        models.speed_words, models.cast_words, models.memory_words,
    ):  # fmt: skip
        assert "not measured" in sentence(chapter)
    assert set(page.accumulation_table(chapter)["measured"]) == {"–"}
    assert set(page.dtype_table(chapter)["fp16 autocast"]) == {"–"}
    assert set(page.norm_table(chapter)["bf16"]) == {"–"}
    for table in (models.speed_table, models.trend_table, models.memory_table):
        assert len(table(chapter)) > 0
    for figure in (page.accumulation_figure, page.norm_figure, models.speed_figure):
        assert figure(chapter, "").axes


def test_page_of_one_kind(full_root):
    """A parameter that leaves kinds out leaves their tables empty, not broken."""
    chapter = Chapter(
        "mixed_precision", measure="no", machine="h100-x1", preset="full", root=full_root, kind="dtypes"
    )
    assert page.accumulation_table(chapter).empty and models.speed_table(chapter).empty
    assert "not measured" in page.range_words(chapter) and "not measured" in models.memory_words(chapter)
    assert page.norm_figure(chapter, "h100-x1").axes and models.speed_figure(chapter, "h100-x1").axes


def test_predictions_need_no_rows():
    table = page.increment_table()
    assert table.iloc[-1]["fp16 adds"] == "0" and table.iloc[-2]["fp16 adds"] == "1 ulp = 0.01562"
    assert (
        "in fp16 at 32, after" in page.stagnation_words() and "in bf16 at 4, after" in page.stagnation_words()
    )
    assert list(page.format_table()["format"]) == list(FORMATS)


@pytest.mark.parametrize(("factor", "slower"), [(1.1, False), (1.3, True)])
def test_a_loss_no_larger_than_that_of_a_pair_is_none(results_root, factor, slower):
    """Of one case alone bf16 takes as long as fp32 and the factor; its pair of steps differs by a fifth."""

    def change(case):
        found = make(case)
        if case.repeat:
            return found | {"step_ms_p50": 1.2 * found["step_ms_p50"]}
        if (case.mode, case.dtype) == ("forward_backward", "bf16"):
            of_fp32 = make(dataclasses.replace(case, dtype="fp32"))
            return found | {"forward_ms_p50": factor * of_fp32["forward_ms_p50"]}
        return found

    cases = [c for c in mixed_precision.grid("full") if c.kind == "step" and c.size == "small"]
    step_rows.write(mixed_precision, cases, results_root, make=change)
    chapter = Chapter("mixed_precision", measure="no", machine="h100-x1", preset="full", size="small")
    text = models.speed_words(chapter)
    assert ("Slower than fp32: forward of `small`." in text) == slower
    assert ("Slower by no more than a pair differs: forward of `small`." in text) == (not slower)
