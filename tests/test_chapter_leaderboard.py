"""What chapter `leaderboard` shows: frames from known rows, and its notebook on whatever rows there are."""

from __future__ import annotations

import functools
import math

import pandas as pd
import pytest
import step_rows

from cs336_systems import accounting
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.leaderboard import counters as leaderboard_counters
from cs336_systems.chapters.leaderboard import kernels as leaderboard_kernels
from cs336_systems.chapters.leaderboard import ladder as leaderboard_ladder
from cs336_systems.chapters.leaderboard import measure as leaderboard
from cs336_systems.chapters.leaderboard import models as leaderboard_models
from cs336_systems.chapters.leaderboard import shapes as leaderboard_shapes
from cs336_systems.chapters.leaderboard import show as page
from cs336_systems.ladder import steps

WORK = dict(zip(("heads", "seq_len", "head_dim"), steps.WORK.values(), strict=True))
rows = functools.partial(step_rows.frame, is_causal=True, dtype="bf16", **WORK)


def harness(impl, ms, **more):
    return {"impl": impl, "ms_p50": ms, "ms_mean": ms, "leaves": "stacked", "rep_ms": 200} | more


@pytest.fixture
def published(monkeypatch, project_root):
    monkeypatch.setenv("CS336_RESULTS", str(project_root / "results"))


def test_harness_is_sorted_and_holds_others_against_ours(published):
    given = rows(
        leaderboard.TABLE, harness("fa4", 3.0), harness("flash_triton", 2.0), harness("flash_triton", 9.0, repeat=1),
        harness("flash_triton", 2.5, rep_ms=leaderboard.OFFICIAL_MS), harness("sdpa_cudnn", math.nan, status="oom"),
    )  # fmt: skip
    found = page.harness(given)
    assert page.harness(given.assign(run=given["impl"]))["× ours"].isna().tolist()[:2] == [False, True]
    assert list(found["implementation"][:2]) == ["ours", "FlashAttention-4"]
    assert list(found["× ours"][:2]) == [1.0, 1.5] and found["official mean, ms"][0] == 2.5
    best = found[found["implementation"].str.startswith("[best verified")].iloc[0]
    assert (
        best["official mean, ms"] == 5.364 and math.isnan(best["× ours"]) and math.isnan(best["median, ms"])
    )
    assert found.iloc[-1]["implementation"] == "SDPA (cuDNN)" and math.isnan(found.iloc[-1]["median, ms"])


def test_published_entries_stand_beside_their_own_work_only(published):
    assert len(page.harness(rows(leaderboard.TABLE, harness("flash_triton", 2.0, seq_len=256)))) == 1


def test_limits_are_those_of_the_units():
    forward, backward = page.limits("forward"), page.limits("backward")
    pairs = 16 * 16384 * 16385 / 2
    clocks = 132 * steps.SM_MHZ * 1e3  # of all multiprocessors in a millisecond
    assert forward["exps"] == pytest.approx(pairs / 16 / clocks, rel=1e-2) == forward["products"]
    assert backward["products"] == pytest.approx(2.5 * forward["products"])
    kernels = rows(
        leaderboard_kernels.TABLE,
        {"impl": "flash_triton", "part": "forward", "grad_o": "matrix", "ms_p50": 1.5},
    )
    found = page.limits_table(kernels, Roofs(tflops={"bf16": 500.0})).set_index("limit")
    assert found.loc["ours, measured", "forward, ms"] == 1.5 and math.isnan(
        found.loc["ours, measured", "backward, ms"]
    )
    assert found.loc["GEMMs, at the best rate measured", "forward, ms"] == pytest.approx(
        accounting.attention_flops(16, 16384, 16384, 64, True, "forward") / 500e9
    )
    assert math.isnan(found.loc["memory, at the best copy measured", "forward, ms"])
    assert page.in_turn("forward") == pytest.approx(
        forward["products"] + forward["exps"] + forward["instructions"]
    )


def test_a_steps_gain_is_over_its_base_and_of_one_run():
    step = {"part": "forward", "predicted_ms": 1.0}
    found = page.ladder(rows(
        leaderboard_ladder.TABLE,
        step | {"impl": "f_all_tiles", "ms_p50": 4.0}, step | {"impl": "f_skip", "ms_p50": 2.0},
        step | {"impl": "f_split", "ms_p50": 1.0, "run": "another"},
    ), "forward").set_index("#")  # fmt: skip
    assert found.loc[2, "gain"] == 2.0 and found.loc[2, "from"] == 1
    assert (
        math.isnan(found.loc[1, "gain"])
        and math.isnan(found.loc[3, "gain"])
        and math.isnan(found.loc[4, "ms"])
    )
    assert len(found) == len(list(steps.of_part("forward")))


def test_kernels_stand_by_shape():
    given = {"impl": "flash_triton", "grad_o": "matrix"}
    found = page.kernels_table(rows(
        leaderboard_kernels.TABLE,
        given | {"part": "backward", "ms_p50": 2.0}, given | {"part": "forward", "ms_p50": 1.0},
        given | {"part": "backward", "ms_p50": 9.0, "grad_o": "number"}, given | {"part": "forward", "dtype": "fp32"},
    ), ("flash_triton", "fa4"))  # fmt: skip
    assert found[["pass", "dtype", "d", "mask"]].values.tolist() == [
        [part, "bf16", 64, "causal"] for part in ("forward", "backward")
    ]
    assert found["ours, ms"].tolist() == [1.0, 2.0] and found["FlashAttention-4, ms"].isna().all()


def test_counters_are_of_the_implementations_shown():
    given = {"part": "forward", "instructions": 1e8}
    found = page.counters_table(rows(
        leaderboard_counters.TABLE,
        given | {"impl": "flash_triton", "part": "backward"}, given | {"impl": "flash_triton"},
        given | {"impl": "plain_triton", "head_dim": 128}, given | {"impl": "sdpa_flash"},
        given | {"impl": "flash_triton", "repeat": 1},
    ))  # fmt: skip
    assert found["pass"].tolist() == ["forward", "backward"]
    assert found["instructions per pair"][1] == pytest.approx(32e8 / (16 * 16384 * 16385 / 2), rel=1e-2)


def test_shapes_are_held_against_their_best_peer():
    at = {"part": "forward", "batch": 8, "heads": 12, "num_queries": 1024, "num_keys": 1024, "head_dim": 64}
    ragged, short = at | {"num_queries": 1000, "num_keys": 1000}, at | {"batch": 1}
    shapes = (
        (at, (3.0, 2.0, 4.0)), (ragged, (1.0, math.nan, 2.0)), (short, (0.004, 0.001, 0.002)),
        (at | {"part": "backward"}, (1.0, math.nan, math.nan)),
    )  # fmt: skip
    impls = ("flash_triton", "fa4", "sdpa_cudnn")
    given = [
        s | {"impl": impl, "ms_p50": ms} for s, times in shapes for impl, ms in zip(impls, times, strict=True)
    ]
    found = rows(leaderboard_shapes.TABLE, *given, at | {"impl": "flash_triton", "ms_p50": 5.0, "repeat": 1})
    met = page.shapes_summary(found).set_index(["pass", "shapes"])
    assert met.loc[("forward", "training"), ["number", "mean", "worst"]].to_list() == [1, 2.0, 2.0]
    assert met.loc[("forward", "all"), "mean"] == pytest.approx(math.sqrt(2.0 * 0.5))
    assert met.loc[("forward", "all"), "number"] == 2 and "backward" not in met.index.get_level_values("pass")
    # what is counted is the base of both, and of one machine
    assert len(page.counted(found)) == 2 < len(page.against_peers(found))
    both = pd.concat([found, found.assign(machine="other", ms_p50=found["ms_p50"] ** 2)], ignore_index=True)
    assert page.shapes_summary(both).equals(page.shapes_summary(found))
    table = page.shapes_table(found).set_index("shape")
    assert table["best peer, F"].to_list() == ["FlashAttention-4", "FlashAttention-4", "SDPA (cuDNN)"]
    assert table.loc["8 × 12 × 1,024, d 64", "× best, F"] == 2.0
    assert math.isnan(table.loc["8 × 12 × 1,024, d 64", "× best, B"])
    assert page.against_peers(found.assign(run=found["impl"]))["over_best"].isna().all()
    drawn = {line.get_label(): list(line.get_xdata()) for line in page.shapes_figure(found).axes[0].lines}
    assert drawn["forward"] == [2.0, 0.5]
    nothing = page.shapes_figure(found.iloc[:0]).axes[0]
    assert [text.get_text() for text in nothing.texts] == ["not measured"]


def test_what_models_ask_for_stands_beside_each_peer():
    plain = {"part": "forward", "batch": 4, "heads": 16, "kv_heads": 16, "num_tokens": 4096, "head_dim": 256,
             "window": 0, "documents": "none", "apart": 0.0}  # fmt: skip
    window = plain | {"batch": 1, "kv_heads": 4, "window": 1024}
    given = [
        plain | {"impl": "flash_triton", "ms_p50": 3.0, "tflops": 400.0}, plain | {"impl": "fa4", "ms_p50": 2.0},
        plain | {"impl": "sdpa_cudnn", "ms_p50": 1.0, "apart": 0.5},
        plain | {"impl": "flash_triton", "ms_p50": 5.0, "tflops": 400.0, "repeat": 1},
        window | {"impl": "flash_triton", "ms_p50": 1.0}, window | {"impl": "flex_compiled", "ms_p50": 4.0},
        plain | {"impl": "fa4", "ms_p50": 2.0, "part": "backward"},
    ]  # fmt: skip
    found = step_rows.frame(leaderboard_models.TABLE, *given, is_causal=True, dtype="bf16")
    table = page.models_table(found)
    assert table["shape"].to_list() == ["1 × 16:4 × 4,096, d 256, window 1,024", "4 × 16 × 4,096, d 256"]
    assert (
        table["× FlashAttention-4"].isna().to_list() == [True, False]
        and table["× FlashAttention-4"][1] == 2.0
    )
    assert table["× FlexAttention"][0] == 0.25 and table["TFLOP/s"][1] == 400
    assert table["× SDPA (cuDNN)"].isna().all()  # whose results are wrong there
    forward, backward = ([text.get_text() for text in ax.texts] for ax in page.models_figure(found).axes)
    assert forward == ["1.00", "–", "–", "0.250", "4.00", "400", "2.00", "–"] and set(backward) == {"–"}
    nothing = page.models_figure(found.iloc[:0]).axes[0]
    assert [text.get_text() for text in nothing.texts] == ["not measured"]
