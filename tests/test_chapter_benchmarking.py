"""Chapter benchmarking: its grid, how steps are measured, its frames and notebook, and `cs336 bench model`."""

import dataclasses
import json
import math
import pickle

import pandas as pd
import pytest
import step_rows
from typer.testing import CliRunner

from cs336_systems import accounting, chapters
from cs336_systems.chapters.benchmarking import measure as benchmarking
from cs336_systems.chapters.benchmarking import show as page
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.shared import steps
from cs336_systems.chapters.shared.steps import Case
from cs336_systems.cli import main as cli
from cs336_systems.measure.clocks import steps as clocked
from cs336_systems.measure.clocks import turns
from cs336_systems.measure.clocks.turns import each
from cs336_systems.measure.memory.memory import _marked
from cs336_systems.report.prose import one
from cs336_systems.report.tables import printed
from cs336_systems.sizes import HANDOUT_SIZES, SIZES
from cs336_systems.store import machine

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
pytestmark = pytest.mark.usefixtures("forked")
TINY = Case("tiny", 16, "forward", batch=2, steps=3)


def case(**changes):
    return dataclasses.replace(TINY, **changes)


# ------------------------------------------------------------------------------------------------ measuring
def test_every_mode_fills_its_own_columns():
    cases = [case(mode=mode, dtype=d) for mode in steps.accounting.MODES for d in ("fp32", "bf16")]
    for c, found in zip(cases, steps.run_group(cases), strict=True):
        assert set(found) <= set(steps.METRICS) and "status" not in found
        phases = {p for p in steps.PHASES if f"{p}_ms_mean" in found}
        assert phases == set(steps.PHASES[: steps.accounting.MODES.index(c.mode) + 1])
        assert len(each(found["step_ms_each"])) == c.steps
        assert found["tokens_per_s"] == pytest.approx(2 * 16 / found["step_ms_p50"] * 1e3)
        assert found["matmul_precision"] == ("highest" if c.dtype == "fp32" else "high")


@without_gpu
def test_what_a_cpu_cannot_run_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 8 * 2**30)
    skipped, found = steps.run_group([case(dtype="tf32"), case()])
    assert "status" in skipped and "status" not in found
    [large] = steps.run_group([case(size="2.7B", mode="train_step")])
    assert large["status"].startswith("skipped: needs about 5") and "8.0 GiB are free" in large["status"]
    monkeypatch.setattr(machine, "cpp_compiler", lambda: None)
    [compiled] = steps.run_group([case(compile="default")])
    assert compiled["status"] == "skipped: needs a C++ compiler"


def test_out_of_memory_is_a_row_and_the_others_run(monkeypatch):
    from cs336_systems.chapters.shared.step import Step

    backward = Step.backward

    def full(self):
        if self.dtype == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(self)

    monkeypatch.setattr(Step, "backward", full)
    cases = [case(mode=m, dtype=d) for m in ("forward_backward", "train_step") for d in ("bf16", "fp32")]
    found = list(steps.run_group(cases))
    assert [f.get("status") for f in found] == ["oom", None, "oom", None]


def test_a_step_whose_first_one_is_long_is_timed_as_a_whole_like_its_twin(monkeypatch):
    from cs336_systems.chapters.shared.step import Step

    now, forward, slow, ran = [0.0], Step.forward, [2.0], []  # seconds: of loading libraries, once

    def counted(self):
        now[0] += slow.pop() if slow else 0.001
        forward(self)
        ran.append(self)

    monkeypatch.setattr(Step, "forward", counted)
    monkeypatch.setattr(clocked.time, "perf_counter", lambda: now[0])
    runs = [case(mode="forward_backward", repeat=n) for n in (0, 1)]
    first, again = steps.run_group(runs)
    assert (first["first_step_ms"], again["first_step_ms"]) == pytest.approx((2000, 1))
    by_case = [ran.count(step) for step in dict.fromkeys(ran)]
    assert by_case[0] == by_case[1] + 1  # by phases and as a whole, both of them


def test_memory_that_runs_out_only_in_turns_sends_each_alone(monkeypatch):
    calls, timed = [], turns.take_turns

    def crowded(candidates, clock):
        calls.append(len(candidates))
        if len(candidates) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(candidates, clock)

    monkeypatch.setattr(turns, "take_turns", crowded)
    found = list(steps.run_group([case(), case(repeat=1)]))
    assert all("status" not in f and f["step_ms_p50"] > 0 for f in found)
    assert calls == [2, 1, 1]


def test_few_warm_up_steps_mean_a_fresh_process(monkeypatch):
    asked = []

    def call(function, arguments, timeout_s):
        asked.append((function, arguments))
        return {"step_ms_p50": 1.0}

    monkeypatch.setattr(steps, "call", call)
    found = list(steps.run_group([case(warmup=0), case(warmup=0, repeat=1)]))
    assert found == [{"step_ms_p50": 1.0}] * 2 and len(asked) == 2
    assert asked[0][0] == "cs336_systems.chapters.shared.steps:_alone"
    assert asked[0][1]["case"] == dataclasses.asdict(case(warmup=0))
    list(steps.run_group([case()]))
    assert len(asked) == 2  # warm cases stay in this process


def test_a_fresh_process_measures():
    [found] = steps.run_group([case(warmup=0, mode="forward_backward")])
    assert "status" not in found and len(each(found["forward_ms_each"])) == 3
    assert "first_step_ms" not in found  # no trial step came before the measured ones


def test_another_class_is_measured_without_claims_about_it(tmp_path, monkeypatch):
    [found] = steps.run_group([case(model="test_unit_step:Bigram", attention="auto", mode="train_step")])
    assert "status" not in found and found["mfu"] is None
    assert steps.predicted_bytes(case(model="test_unit_step:Bigram")) is None


def test_forecast_says_what_will_not_fit(monkeypatch):
    monkeypatch.setattr(machine, "gpu_names", lambda: [])
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**33)
    lines = list(steps.forecast([case(), case(size="2.7B", mode="train_step"), case(compile="default")]))
    assert len(lines) == 2
    assert lines[0].endswith("8.0 GiB are free") and lines[1].endswith("8.0 GiB are free: it will not fit")


def test_snapshot_files_have_the_case_in_their_name_where_there_are_several(tmp_path):
    path = tmp_path / "s.pickle"
    assert steps.snapshot_path(path, TINY, 1) == path
    assert steps.snapshot_path(path, TINY, 2).name == "s_tiny_16_forward_fp32_reference_off_2.pickle"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    cases = [case(mode="train_step", dtype=d) for d in ("fp32", "tf32", "bf16")]
    for c, found in zip(
        cases, steps.run_group(cases, nvtx=True, snapshot=tmp_path / "s.pickle"), strict=True
    ):
        assert "status" not in found and found["peak_gib"] > 0
        history = pickle.loads(steps.snapshot_path(tmp_path / "s.pickle", c, 3).read_bytes())
        marks = filter(None, map(_marked, history["device_traces"][torch.cuda.current_device()]))
        assert list(marks) == ["model", *["forward", "backward", "optimizer"] * 2]


# ------------------------------------------------------------------------------------------------ page
laptop = step_rows.metrics  # for tests/test_chapters.py


@pytest.fixture
def made_up(results_root):
    """The rows of a chapter that are made up, on `h100-x1`."""
    step_rows.write(benchmarking.TABLE, benchmarking.grid("full"), results_root)
    return chapters.read("benchmarking", machine="h100-x1", preset="full").rows()


def test_times_are_those_of_training_steps_at_one_context(made_up):
    full = made_up["size"].eq("xl") & made_up["context_length"].eq(512) & made_up["mode"].eq("train_step")
    found = page.times(
        made_up.assign(
            status=made_up["status"].mask(full, "oom"), forward_ms_mean=made_up["forward_ms_mean"].mask(full)
        )
    )
    assert list(found["size"]) == list(HANDOUT_SIZES)
    row = steps_of(made_up, "large", "train_step").iloc[0]
    large = found.set_index("size").loc["large"]
    assert large["F, ms"] == row["forward_ms_mean"] and large["step std, ms"] == row["step_ms_std"]
    assert large["B / F"] == row["backward_ms_mean"] / row["forward_ms_mean"]
    assert printed(found).set_index("size").loc["xl", "F, ms"] == "OOM"


def steps_of(rows, size, mode, **where):
    rows = page.steps(rows, mode, **where)
    return rows[rows["size"].eq(size) & rows["context_length"].eq(512)]


def test_predictions_are_flops_and_bytes_at_the_roofs():
    found = page.models({"x": Roofs(tflops={"fp32": 50.0}, tb_per_s=4.0), "y": Roofs()})
    assert list(found["size"]) == list(HANDOUT_SIZES) * 2
    row = found[found["machine"] == "x"].set_index("size").loc["small"]
    config, tokens = SIZES["small"], 4 * 512
    weights = 12 * (4 * 768**2 + 3 * 768 * 3072) + 768 * config.vocab_size
    flops = 3 * (
        2 * tokens * weights + 2 * tokens * 512 * 768 * 12
    )  # the chapter's formula, and backward twice
    assert row["TFLOP a step"] == pytest.approx(flops / 1e12)
    assert row["forward + backward, ms"] == pytest.approx(flops / 50e9)
    assert row["AdamW, ms"] == pytest.approx(28 * row["N, million"] * 1e6 / 4e9)
    assert found[found["machine"] == "y"][["forward + backward, ms", "AdamW, ms"]].isna().all(axis=None)


def test_time_is_split_into_gemms_other_kernels_and_the_rest(made_up):
    profile = pd.DataFrame([
        {"machine": "h100-x1", "size": "large", "context_length": 512, "dtype": "fp32", "batch": 4, "status": "ok",
         "range": name, "matrix_product_ms": gemms, "kernel_ms": 100.0}
        for name, gemms in (("forward", 80.0), ("backward", 90.0), ("optimizer", 0.0))
    ])  # fmt: skip
    roofs = {"h100-x1": Roofs(tflops={"fp32": 50.0})}
    found = page.split(made_up, profile, roofs).set_index("size")
    large, row = found.loc["large"], steps_of(made_up, "large", "train_step").iloc[0]
    assert large["gemm_ms"] == 170 and large["other_ms"] == 30
    assert large["no_kernel_ms"] == pytest.approx(row["forward_ms_mean"] + row["backward_ms_mean"] - 200)
    # plain attention computes all pairs, those that the mask hides, too
    flops = 3 * sum(accounting.forward_matmul_flops(SIZES["large"], 4, 512).values())
    assert large["rate_pct"] == pytest.approx(100 * flops / 50e9 / 170)
    assert large["rate_pct"] > 100 * large["predicted_ms"] / 170
    assert math.isnan(found.loc["xl", "gemm_ms"]) and found.loc["xl", "wall_ms"] > 0
    rates = page.rates(profile, roofs).set_index("range")["rate_pct"]
    assert rates["forward"] == pytest.approx(100 * flops / 3 / 50e9 / 80)
    assert rates["backward"] / rates["forward"] == pytest.approx(2 * 80 / 90) and "optimizer" not in rates


def test_cold_starts_are_passes_added_up_step_by_step(made_up):
    found = page.passes(made_up)
    assert len(found) == 5 * 4
    row = steps_of(made_up, "small", "forward_backward", warmup=0).iloc[0]
    cold = found[found["size"].eq("small") & found["warmup"].eq(0)].iloc[0]
    both = [f + b for f, b in zip(each(row["forward_ms_each"]), each(row["backward_ms_each"]), strict=True)]
    assert cold["first_ms"] == both[0] and cold["second_ms"] == both[1] and cold["std_ms"] > cold["mean_ms"]
    table = page.warmups(found[~(found["size"].eq("xl") & found["warmup"].eq(1))])
    heads = [f"{what} {count}, ms" for what in ("mean", "std") for count in (0, 1, 2, 5)]
    assert list(table.columns) == ["machine", "size", *heads] and list(table["size"]) == list(HANDOUT_SIZES)
    assert table.set_index("size").loc["small", "mean 0, ms"] == cold["mean_ms"]
    assert math.isnan(table.set_index("size").loc["xl", "mean 1, ms"])


def test_steps_by_length():
    row = one(pd.DataFrame({"machine": ["x"], "step_ms_each": ["3 1 2"], "status": ["ok"]}))
    assert page.ranked(row, "step", -1) == 3 and page.ranked(row, "step", 0) == 1
    assert page.ranked(one(pd.DataFrame({"machine": [], "step_ms_each": []})), "step", 0).missing


@pytest.mark.parametrize("figure", [lambda rows: page.contexts_figure(rows, {}), page.cold_figure])
def test_figures_have_a_line_for_each_size(made_up, figure):
    [ax] = figure(made_up).axes
    assert [line.get_label() for line in ax.get_lines() if line.get_marker() != "None"] == list(HANDOUT_SIZES)


# ------------------------------------------------------------------------------------------------ command line
def bench(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "model", *arguments])


@without_gpu
def test_sweep_of_lists(results_root, tmp_path):
    out = tmp_path / "rows.json"
    result = bench(
        "--size", "tiny", "--context-length", "16", "32", "--mode", "forward", "train_step", "--dtype", "fp32,bf16",
        "--steps", "2", "--batch", "2", "--json", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert len(found) == 8 and {f["status"] for f in found} == {"ok"}
    assert {(f["context_length"], f["mode"], f["dtype"]) for f in found} == {
        (c, m, d) for c in (16, 32) for m in ("forward", "train_step") for d in ("fp32", "bf16")
    }
    assert "needs about" in result.output and "tokens_per_s" in result.output
    again = bench(
        "--size", "tiny", "--context-length", "16", "--mode", "forward", "--steps", "2", "--batch", "2"
    )
    assert "all 1 groups are measured" in again.output


def test_options_reach_the_measurement(monkeypatch, measured_by, tmp_path):
    asked = {}
    # for the command line, which refuses a snapshot without a GPU
    monkeypatch.setattr(machine, "machine_name", lambda: "h100-x1")
    monkeypatch.setattr("cs336_systems.store.measuring.machine_name", machine.machine_name)

    def run_group(cases, **options):
        asked.update(options, cases=cases)
        return [{"step_ms_p50": 1.0} for _ in cases]

    measured_by(benchmarking.TABLE, run_group)
    file = tmp_path / "m.pickle"
    result = bench(
        "--size", "tiny", "--context-length", "16", "--mode", "forward", "--compile", "--nvtx", "--memory-snapshot",
        str(file), "--attention", "sdpa",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked["nvtx"] is True and asked["snapshot"] == file
    assert asked["cases"] == [Case("tiny", 16, "forward", attention="sdpa", compile="default")]
