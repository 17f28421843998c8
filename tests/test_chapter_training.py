"""Chapter training: its grids, trials on the CPU, what fails, the frames and figures, its notebook on any rows."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil

import numpy as np
import pandas as pd
import pytest
import training_rows

from cs336_systems import accounting, chapters
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.speedrun import plan as speedrun
from cs336_systems.chapters.training import fits as training_fits
from cs336_systems.chapters.training import ladder as training_ladder
from cs336_systems.chapters.training import measure as training
from cs336_systems.chapters.training import run as training_run
from cs336_systems.chapters.training import show as page
from cs336_systems.chapters.training import show_matrix as matrix
from cs336_systems.chapters.training import show_sweep as sweep
from cs336_systems.chapters.training import sweep as training_sweep
from cs336_systems.chapters.training import trials
from cs336_systems.report import tables
from cs336_systems.report.claims import execute
from cs336_systems.report.values import Number, Row
from cs336_systems.store.status import Skip
from cs336_systems.training import defaults

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("forked")

TABLES = [chapters.load(name) for name in chapters.TABLES["training"]]


def test_a_rung_is_its_variant():
    for rung, variant in training_ladder.RUNGS.items():
        case = training_ladder.Case(rung)
        assert (case.attention, case.dtype, case.compile, case.wrapper, case.sharded) == variant
        config = trials.configuration(case, "out")
        assert (config.run.dtype, config.run.compile) == (case.dtype, case.compile)
        assert config.batch.sequences == case.sequences
        assert (trials.predicted_gib(case) is None) == (case.compile != "off")


def test_compiled_plain_attention_leaves_the_rest_eager():
    case = training.Case(trials.COMPILED_PLAIN, "none", False)
    config = trials.configuration(case, "out")
    assert (config.model.attention, config.run.compile) == ("reference", "attention")
    whole = trials.configuration(dataclasses.replace(case, compile="blocks"), "out")
    assert whole.run.compile == "blocks"


# ------------------------------------------------------------------------------------------------ trials, on the CPU
def test_many_steps_have_the_time_that_they_take(monkeypatch):
    """A matrix of 32 cells, a thousand steps of 0.2 s each."""
    asked = {}
    monkeypatch.setattr(trials.on_ranks, "measured", lambda *_, **options: asked.update(options) or [])
    trials.measure([training.Case("auto", "none", False, steps=1000)] * 32)
    assert asked["timeout_s"] > 32 * 1000 * 0.2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_all_cells_of_a_group_learn_the_same():
    """Two ranks, with and without sharded state, by every kind of wrapper."""
    fields = {"size": "tiny", "context_length": 16, "dtype": "fp32", "steps": 3}
    wrappers = ("none", "bucketed", "torch")
    cells = training.cells(("sdpa",), wrappers, (False, True), batch=2, world_size=2, **fields)
    found = trials.measure(cells)
    assert not [m["status"] for m in found if "status" in m]
    for case, metrics in zip(cells, found, strict=True):
        without = set() if torch.cuda.is_available() else {"peak_gib"}
        assert set(metrics) == set(trials.METRICS) - without
        assert len(metrics["losses"].split()) == trials.WARMUP + case.steps and metrics["step_ms_p50"] > 0
        rate = case.sequences * 16 / metrics["step_ms_p50"] * 1e3
        assert metrics["tokens_per_s"] == pytest.approx(rate) and metrics["backend"] in ("gloo", "nccl")
    curves = [np.array(m["losses"].split(), float) for m in found]
    for curve in curves[2:]:
        np.testing.assert_allclose(curve, curves[1], rtol=2e-4)
    assert not np.allclose(curves[0], curves[1], rtol=1e-3)  # half of the sequences


def test_what_a_machine_cannot_do_is_skipped(monkeypatch):
    case = training.Case("sdpa", "none", False, "tiny", 16, 2, "fp32")
    monkeypatch.setattr(trials.machine, "gpu_names", list)
    for change, why in (
        ({"attention": "flash_triton"}, "needs"), ({"dtype": "tf32"}, "needs a CUDA device"),
        ({"compile": "graphs"}, "needs a CUDA device"), ({"sharded": True}, "needs several ranks"),
        ({"size": "2.7B", "batch": 512, "context_length": 1024}, "GiB of memory"),
    ):  # fmt: skip
        with pytest.raises(Skip, match=why):
            trials.refuse(dataclasses.replace(case, **change))
    trials.refuse(case)


@pytest.mark.slow
def test_a_real_run_on_its_own():
    case = training_run.Case("tiny", 32, 8, "fp32", "off", minutes=0.005, train_mb=0.1)
    metrics = training_run.on_its_own(dataclasses.asdict(case))
    assert set(metrics) == set(training_run.TABLE.metrics), metrics
    assert metrics["tokens"] == metrics["steps"] * 8 * 32 and metrics["valid_loss"] > metrics["floor"] > 0
    assert metrics["bits_per_byte"] / metrics["valid_loss"] == pytest.approx(
        metrics["floor_bits_per_byte"] / metrics["floor"]
    )
    assert len(metrics["losses"].split()) == len(metrics["loss_tokens"].split())
    for text in (metrics["before"], metrics["after"]):
        assert text.startswith(training_run.PROMPT) and text.isprintable() and text.isascii()


def test_choices_of_a_run_and_of_a_sweep():
    cases = chapters.cases_beyond(training_run.TABLE, "full", minutes="0.5,2", size="mini")
    assert {(c.minutes, c.size) for c in cases} == {(0.5, "mini"), (2.0, "mini")}
    for wrong in ("0", "-1", "x", "nan", "1e9"):
        with pytest.raises(ValueError, match=f"minutes={wrong}; allowed: a number above 0"):
            chapters.cases_beyond(training_run.TABLE, "full", minutes=wrong)
    for wrong in ("128", "128:", ":64", "0:64", "128:-1", "a:b", "128:64:32", "1.5:2", ""):
        with pytest.raises(ValueError, match=r"allowed: queries:keys"):
            training_sweep.tier(wrong)
    assert training_sweep.tier(" 128:64 ") == (128, 64)


# ------------------------------------------------------------------------------------------------ the sweep
def test_a_rectangular_shape_is_measured():
    cases = training_sweep.cases_of([(24, 8)], ("reference", "sdpa"), heads=2, batch=1, dtype="fp32")
    assert [(c.attention, c.repeat) for c in cases] == [("reference", 0), ("sdpa", 0), ("sdpa", 1)]
    for metrics in training_sweep.run_group(cases):
        assert set(metrics) <= set(training_sweep.TABLE.metrics)
        assert metrics["forward_ms_p50"] > 0 and metrics["both_ms_p50"] > 0


def test_a_pass_that_runs_out_is_a_row_and_the_other_one_is_timed(monkeypatch):
    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        @staticmethod
        def backward(ctx, grad):
            raise torch.OutOfMemoryError("CUDA out of memory")

    known, full = training_sweep.peers.build, training_sweep.peers.Attention(Full.apply, "made up")
    build = lambda name, *rest: full if name == "flash_torch" else known(name, *rest)
    monkeypatch.setattr(training_sweep.peers, "build", build)
    cases = training_sweep.cases_of([(16, 8)], ("flash_torch", "sdpa"), heads=2, batch=1, dtype="fp32")
    first, second, again = training_sweep.run_group(cases)
    assert first["status"] == "oom" and first["failed_in"] == "backward"
    assert first["forward_ms_p50"] > 0 and "both_ms_p50" not in first
    assert "status" not in second and "failed_in" not in second and again["both_ms_p50"] > 0


@pytest.mark.parametrize(("part", "failed_in"), [("forward", "forward"), ("both", "backward")])
def test_memory_that_runs_out_in_a_turn_is_one_cases_row(monkeypatch, part, failed_in):
    turn = training_sweep._turn

    @contextlib.contextmanager
    def crowded(case, device, which):
        if (case.attention, which) == ("reference", part):
            raise torch.OutOfMemoryError("CUDA out of memory")
        with turn(case, device, which) as phases:
            yield phases

    monkeypatch.setattr(training_sweep, "_turn", crowded)
    cases = training_sweep.cases_of([(16, 8)], ("reference", "sdpa"), heads=2, batch=1, dtype="fp32")
    full, *others = training_sweep.run_group(cases)
    assert (full["status"], full["failed_in"]) == ("oom", failed_in) and "both_ms_p50" not in full
    assert all("status" not in metrics and metrics["both_ms_p50"] > 0 for metrics in others)


# ------------------------------------------------------------------------------------------------ frames and figures
@pytest.fixture
def made_up(results_root, project_root, monkeypatch):
    shutil.copy(project_root / "results" / "published.csv", results_root)
    training_rows.write(results_root)
    known = page.roofs_of
    monkeypatch.setattr(page, "roofs_of", lambda *where: dict.fromkeys(known(*where), training_rows.H200))
    return results_root


def test_roofs_are_lent_to_the_same_gpu_only(monkeypatch):
    alike = Roofs(sheet=accounting.peaks("NVIDIA H200"))
    full = dataclasses.replace(alike, tflops={"bf16": 700.0})
    known = {"cpu-2": Roofs({"fp32": 1.0}), "unlisted-x2": Roofs(), "h200-x1": full, "h200-x2": alike}
    monkeypatch.setattr(page, "roofs", lambda name, root: known[name])
    assert page.roofs_of(list(known), None) == known | {"h200-x2": full}


def rows_of(table, **where):
    return chapters.read("training", preset="full").table(table).rows(**where)


def test_efficiency_is_against_one_rank_of_the_same_run(made_up):
    rows = matrix.scaled(chapters.read("training", preset="full").rows())
    of = lambda **case: rows[(rows[list(case)] == pd.Series(case)).all(axis=1)].iloc[0]
    cell = {"attention": "sdpa", "world_size": 2, "sharded": False}
    alone, naive = (of(wrapper=w, repeat=0, **cell) for w in ("none", "naive"))
    assert naive["efficiency"] == pytest.approx(naive["tokens_per_s"] / 2 / alone["tokens_per_s"])
    assert math.isnan(alone["efficiency"])
    other = rows.assign(run=[f"run {place}" for place in range(len(rows))])
    assert matrix.scaled(other)["efficiency"].isna().all()


def test_gains_and_predictions_of_the_ladder(made_up):
    rows = rows_of("ladder", sequences=16)
    found = page.climbed(rows, {"h200-x2": training_rows.H200})
    on_one = found[found["world_size"] == 1].set_index("rung")
    assert list(on_one.index) == list(training_ladder.ON_ONE)
    assert on_one["gain"]["tf32"] == pytest.approx(420 / 170) and math.isnan(on_one["gain"]["fp32"])
    assert on_one["predicted"].is_monotonic_increasing  # a rung is never predicted to lose
    assert on_one["predicted"]["graphs"] == on_one["predicted"]["flash"]
    on_two = found[found["world_size"] == 2].set_index("rung")
    assert 1.8 < on_two["predicted"]["ddp"] / on_two["predicted"]["flash"] < 2
    assert page.climbed(rows, {})["predicted"].isna().all()


def test_losses_are_held_against_the_first_rung_and_a_repetition_against_itself():
    curve = np.linspace(7, 1, 20)
    given = [
        ("fp32", 0, curve),
        ("bf16", 0, curve + 0.03),
        ("flash", 0, curve - 0.01),
        ("flash", 1, curve - 0.012),
    ]
    rows = pd.DataFrame(
        {"machine": "x", "world_size": 1, "rung": rung, "repeat": repeat, "losses": " ".join(map(str, losses)),
         "step_ms_p50": 10.0}
        for rung, repeat, losses in given
    )  # fmt: skip
    found = page.apart(rows).set_index(["rung", "repeat"])["largest"]
    assert found.to_list() == pytest.approx([0, 0.03, 0.01, 0.002], abs=1e-6)
    end = float(page.smooth(rows["losses"][1])[-1])
    assert page.reachable(rows[rows["repeat"] == 0]) == math.ceil(10 * end) / 10
    when = page.time_to(rows, 4.0).set_index("rung")
    assert when["steps"]["flash"] <= when["steps"]["fp32"] <= when["steps"]["bf16"]
    assert (when["seconds"] == when["steps"] * 0.01).all()
    assert page.time_to(rows, 0.5)["steps"].isna().all()
    assert math.isnan(page.apart(rows.assign(losses=math.nan))["largest"][0])


def test_time_to_a_loss_between_two_evaluations():
    run = Row({"valid_seconds": "10 20 30", "valid_losses": "3 1 0.5"}, "a run")
    assert page.seconds_to(run, Number(2.0)) == 15 and page.seconds_to(run, Number(0.5)) == 30
    for loss in (Number(0.1), Number(3.5), Number(math.nan, "no floor")):
        assert page.seconds_to(run, loss).missing


def test_the_speed_over_plain_is_of_one_run(made_up):
    rows = sweep.ordered(rows_of("sweep", cap_gib=0))
    assert rows[rows["attention"] == "sdpa"]["plain"].to_list() == pytest.approx([5 / 1.05] * 5, rel=1e-4)
    assert list(dict.fromkeys(rows["tier"])) == ["128:64", "256:128", "512:256", "1024:512", "2048:1024"]
    long = sweep.complete(rows_of("sweep", cap_gib=24))
    assert set(long.attrs["words"]) <= set(long)
    assert tables.printed(long)["both, ms"].value_counts()["OOM"] == 3


def test_figures_are_drawn_with_rows_and_without(made_up, results_root):
    def draw():
        chapter = chapters.read("training", preset="full")
        ladder, run, shapes = (chapter.table(name).rows() for name in ("ladder", "run", "sweep"))
        return [
            page.ladder_figure(ladder, {}), page.losses_figure(ladder), page.run_figure(run),
            matrix.matrix_figure(chapter.rows()), sweep.scaling(shapes), sweep.bars(shapes), sweep.heat(shapes),
        ]  # fmt: skip

    def words(figure):
        return [text.get_text() for ax in figure.axes for text in ax.texts]

    assert not any("not measured" in words(figure) for figure in draw())
    (results_root / "reference.json").write_text("{}")
    assert all("not measured" in words(figure) for figure in draw())


# ------------------------------------------------------------------------------------------------ the notebook
def test_with_all_rows_every_sentence_is_decided(made_up, project_root):
    sentences, _ = execute(project_root / "book" / "training.ipynb", preset="full")
    assert [s.text for s in sentences if s.outcome is None] == []


@pytest.mark.parametrize("parameters", [{"rung": "fp32,flash"}, {"wrapper": "naive"}, {"attention": "sdpa"}])
def test_the_notebook_on_some_rows(made_up, project_root, parameters):
    assert execute(project_root / "book" / "training.ipynb", preset="full", **parameters)[0]


laptop = training_rows.metrics  # for tests/test_chapters.py


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
def test_every_rung_of_one_gpu_learns_the_same():
    cases = [training_ladder.Case(rung, "tiny", 64, 8, steps=4) for rung in training_ladder.ON_ONE]
    found = trials.measure(cases)
    assert [m.get("status", "ok") for m in found] == ["ok"] * len(cases)
    first, *others = (np.array(m["losses"].split(), float) for m in found)
    for curve in others:
        np.testing.assert_allclose(curve, first, atol=0.02)
    assert all(m["peak_gib"] > 0 for m in found)


@pytest.mark.gpu
def test_fp16_under_a_cap_runs_or_runs_out():
    small = training_fits.Case("tiny", 64, 4, cap_gib=1, steps=2)
    large = dataclasses.replace(small, size="small", context_length=1024, sequences=32)
    fits, full = training_fits.run_group([small, large])
    assert "status" not in fits and fits["peak_gib"] <= fits["reserved_gib"] <= 1
    assert full["status"] == "oom" and full["predicted_gib"] > 1


@pytest.mark.gpu
def test_every_implementation_takes_a_rectangular_shape_under_a_cap():
    choices = training_sweep.CHOICES["attention"]
    cases = training_sweep.cases_of([(160, 64)], choices, heads=2, batch=1, cap_gib=1)
    for case, metrics in zip(cases, training_sweep.run_group(cases), strict=True):
        assert "status" not in metrics and metrics["forward_peak_gib"] <= metrics["peak_gib"] < 1, case


# ------------------------------------------------------------------------------------------------ what it rests on
def test_the_forecast_finds_the_most_that_fits():
    for size in ("small", "medium"):
        for context in (256, 1024):
            most = speedrun.largest_batch(size, context, 14.7)
            assert speedrun.gib_of(size, context, most) <= 14.7 * defaults.USABLE
            assert speedrun.gib_of(size, context, 2 * most) > 14.7 * defaults.USABLE
    assert speedrun.largest_batch("2.7B", 128, 14.7) == 0
    most, need = speedrun.what_fits(14.7, "2.7B", 512)
    assert most == 0 and need > 14.7


def test_fits_asks_for_the_forecasts_choices():
    chosen = [c for c in training_fits.grid("full") if not c.repeat]
    for one, two in zip(chosen[::2], chosen[1::2], strict=True):
        assert one.sequences == speedrun.largest_batch(one.size, one.context_length, training_fits.T4_GIB)
        assert dataclasses.replace(one, sequences=2 * one.sequences) == two


@pytest.mark.slow
def test_fp16_steps_with_loss_scaling_on_the_cpu():
    case = training_fits.Case("tiny", 16, 2, cap_gib=0, steps=2)
    first, again = training_fits.on_their_own([dataclasses.asdict(case)] * 2)
    assert "status" not in first and set(first) <= set(training_fits.TABLE.metrics)
    assert first["losses"] == again["losses"] and len(first["losses"].split()) == 3
    assert first["loss_scale"] >= 1 and first["skipped_steps"] >= 0 and first["predicted_gib"] > 0
