"""Chapter torch_compile: its grids, that compiled code runs, and its page."""

import dataclasses

import pandas
import pytest
import step_rows

from cs336_systems import experiments
from cs336_systems.experiments import torch_compile
from cs336_systems.experiments.torch_compile import Case
from cs336_systems.measure import rows
from cs336_systems.measure.code import code_digest
from cs336_systems.measure.machine import cpp_compiler
from cs336_systems.report.chapter import Chapter
from cs336_systems.report.pages import torch_compile as page

torch = pytest.importorskip("torch")


@pytest.fixture
def made_up(results_root):
    """A chapter whose rows are made up, on `h100-x1`."""
    step_rows.write(torch_compile, torch_compile.grid("full"), results_root)
    return Chapter("torch_compile", measure="no", machine="h100-x1", preset="full")


@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_grid_is_a_grid(preset):
    cases = torch_compile.grid(preset)
    assert len(set(cases)) == len(cases)
    for c in cases:
        assert c.repeat == 0 or dataclasses.replace(c, repeat=0) in cases
        for field, allowed in torch_compile.CHOICES.items():
            assert getattr(c, field) in allowed
    assert all(torch_compile.estimate_s(group) > 0 for group in rows.groups(torch_compile, cases))


def test_full_grid_has_every_size_and_the_speed_cases():
    cases = torch_compile.grid("full")
    for size in ("small", "medium", "large", "xl", "2.7B"):
        for mode in ("forward", "train_step"):
            for compile in ("off", "default"):
                assert Case(size, 512, mode, "bf16", compile=compile) in cases
    for size in ("small", "medium"):
        of_size = {
            (c.attention, c.compile) for c in cases if (c.size, c.context_length, c.batch) == (size, 1024, 4)
        }
        assert {
            ("flash_triton", "reduce-overhead"),
            ("sdpa", "reduce-overhead"),
            ("reference", "default"),
        } <= of_size
        assert max(c.batch for c in cases if c.size == size) >= 16


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="needs a C++ compiler")
def test_compiled_and_eager_in_turns():
    small = {"batch": 2, "steps": 2}
    cases = [Case("tiny", 16, "train_step", compile=c, **small) for c in ("off", "default")]
    eager, compiled = torch_compile.run_group(cases)
    assert "status" not in eager and "status" not in compiled
    assert compiled["graphs"] == 1 and "graphs" not in eager and compiled["compile_s"] > 0
    assert not torch.compiler.config.force_disable_caches  # as it was


def test_code_that_is_not_compiled_is_an_error(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **kw: fn)
    monkeypatch.setattr("cs336_systems.measure.machine.cpp_compiler", lambda: "c++")
    [found] = torch_compile.run_group([Case("tiny", 16, "forward", compile="default", batch=2, steps=2)])
    assert found["status"].startswith("error: RuntimeError: torch.compile made no graph")


def test_page_of_made_up_rows(made_up):
    table = page.sizes_table(made_up)
    gains = [float(text.split()[0]) for text in table["gain"].dropna()]
    assert (
        len(table) == 10 and len(gains) == 10 and all(1.2 < gain < 1.44 for gain in gains)
    )  # made up: 1 / 0.7
    speed = page.speed_table(made_up)
    plain = speed[(speed["attention"] == "plain") & (speed["as"] == "compiled")]
    assert set(plain["over plain compiled"].dropna()) == {"1.00 ×"}
    assert "OOM" in set(speed[speed["attention"] == "plain"]["step, ms"])
    assert "above the aim of 1.1" in page.target_words(made_up)
    said = page.target_words(made_up)
    assert said.count("ours compiled, CUDA graphs") == 2 and f"; {page.MERE_NOISE}" not in said
    assert page.graph_gain_words(made_up).count("ms with CUDA graphs (1.") == 6
    assert "Dynamo made 1 graph," in page.graphs_words(made_up)
    assert "compiling gains between" in page.sizes_words(made_up)
    for figure in (page.sizes_figure, page.speed_figure):
        assert figure(made_up, "h100-x1").axes[0].has_data()


def with_times(results_root, ms):
    """A chapter whose step takes `ms(case)`, on `h200-x1`."""

    def make(case):
        found = step_rows.metrics(case)
        factor = ms(case) / found["step_ms_p50"] if "step_ms_p50" in found else 1
        return found | {
            "status": "ok",
            "step_ms_p50": ms(case),
            "optimizer_ms_p50": 2.0,
            "peak_gib": 10 * factor,
        }

    step_rows.write(torch_compile, torch_compile.grid("full"), results_root, "h200-x1", make)
    return Chapter("torch_compile", measure="no", machine="h200-x1", preset="full")


def test_words_about_size_and_host(results_root):
    """`small` has 12 layers of 768, `2.7B` 32 of 2,560: 2.7 times the launches, 8.9 times the activations."""
    eager = {"small": 10, "medium": 20, "large": 21, "xl": 22, "2.7B": 30}
    compiled = {"small": 2, "medium": 5, "large": 4, "xl": 8, "2.7B": 16}

    def ms(case):
        longer = 1 if case.mode == "forward" or case.compile == "off" else 0.9 if case.size == "xl" else 1.1
        return longer * (eager if case.compile == "off" else compiled)[case.size]

    chapter = with_times(results_root, ms)
    text = page.sizes_words(chapter)
    assert "forward: compiling gains between 1.88 × (`2.7B`) and 5.25 × (`large`)." in text
    assert "It falls from size to size, but for `large`." in text
    assert "at 4 of 5 sizes" in text
    text = page.host_words(chapter)
    assert "FLOPs grow 27-fold, the activations (layers times width) 8.9-fold" in text
    assert "launches, 2.7-fold. The eager time grows 3.0-fold, the compiled time 8.0-fold" in text
    assert "is that of their launches" in text
    assert page.optimizer_words(chapter).startswith("AdamW, the same code in both, takes 1.00 × as long")


def test_where_arithmetic_sets_the_time_nothing_is_said_of_the_host(results_root):
    ms = {"small": 1, "medium": 3, "large": 7, "xl": 13, "2.7B": 27}
    chapter = with_times(results_root, lambda c: ms[c.size])
    assert "eager time grows 27-fold" in page.host_words(chapter)
    assert "is that of their launches" not in page.host_words(chapter)


def test_aims(results_root):
    """An aim is met with 1.1 × plain and no more than the noise behind SDPA, and missed otherwise."""
    ms = {
        ("small", 4, "default"): (20, 19, 18), ("small", 4, "reduce-overhead"): (20, 15, 15.5),
        ("small", 64, "default"): (20, 15, 15.1), ("medium", 4, "default"): (20, 15, 18.1),
        ("medium", 4, "reduce-overhead"): (20, 17, 18.3), ("medium", 16, "default"): (20, 20, 10),
    }  # fmt: skip

    def of(case):
        if case.repeat:
            return 21 if (case.size, case.batch) == ("small", 4) else 20
        times = ms.get((case.size, case.batch, case.compile), (20, 20, 20))
        return times[("reference", "sdpa", "flash_triton").index(case.attention)]

    text = page.aims_words(with_times(results_root, of))
    met = "`small`, batch 4, compiled; `small`, batch 4, compiled, CUDA graphs; `medium`, batch 16, compiled."
    missed = (
        "`small`, batch 64, compiled; `medium`, batch 4, compiled; `medium`, batch 4, compiled, CUDA graphs."
    )
    assert (
        text == f"- `h200-x1`, met: {met}\n- `h200-x1`, missed: {missed}"
    )  # graphs miss it too: not the host's doing


def test_the_host_is_named_where_graphs_meet_what_launches_miss(results_root):
    def of(case):
        slow = case.compile == "default" and case.batch == 4
        return 20 if case.attention != "flash_triton" or slow else 15

    text = page.aims_words(with_times(results_root, of))
    assert "missed: `small`, batch 4, compiled; `medium`, batch 4, compiled." in text
    assert "The same steps meet it as CUDA graphs. So it is the host" in text


def test_ratios_stay_within_a_run(results_root):
    cases = [c for c in torch_compile.grid("full") if (c.size, c.context_length) == ("small", 512)]
    one, other = [c for c in cases if c.compile == "off"], [c for c in cases if c.compile != "off"]
    for number, part in enumerate((one, other)):
        provenance = {
            "status": "ok", "run": f"run-{number}", "time_utc": "2026-01-01T00:00:00Z", "env": "0",
        }  # fmt: skip
        rows.write(
            torch_compile, "h100-x1",
            [
                dataclasses.asdict(c) | step_rows.metrics(c) | provenance
                | {"code": code_digest(torch_compile, c)} for c in part
            ], results_root,
        )  # fmt: skip
    chapter = Chapter("torch_compile", measure="no", machine="h100-x1", preset="full")
    assert page.sizes_table(chapter)["gain"].isna().all()


def test_page_without_rows():
    chapter = Chapter("torch_compile", measure="no", preset="full")
    for sentence in (page.graphs_words, page.sizes_words, page.target_words, page.graph_gain_words):
        assert "not measured" in sentence(chapter)
    assert set(page.sizes_table(chapter)["eager, ms"]) == {"–"}
    for figure in (page.sizes_figure, page.speed_figure):
        assert figure(chapter, "").axes


@pytest.mark.gpu
def test_on_a_gpu():
    small = {"batch": 2, "steps": 2}
    cases = [
        Case("tiny", 64, "train_step", "bf16", attention, compile, **small)
        for attention in ("reference", "flash_triton", "sdpa")
        for compile in ("off", "default", "reduce-overhead")
    ]
    for case, found in zip(cases, torch_compile.run_group(cases), strict=True):
        assert "status" not in found, case
        if case.compile == "reduce-overhead":
            assert found["cuda_graph_skips"] == 0


def test_what_a_pair_says_of_noise():
    rows = [
        {"attention": a, "compile": "off", "repeat": r, "status": "ok", "run": "1", "step_ms_p50": ms}
        for a, r, ms in (("reference", 0, 100.0), ("sdpa", 0, 50.0), ("reference", 1, 93.0))
    ]
    assert page._apart(pandas.DataFrame(rows)) == pytest.approx(100 / 93 - 1)
    assert page._apart(pandas.DataFrame(rows[:2])) == 0.0
