"""Chapter torch_compile: its grids, that compiled code runs, its frames, its notebook on whatever rows there are."""

from __future__ import annotations

import functools
import math

import pytest
import step_rows

from cs336_systems.chapters.attention import measure as attention_experiment
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.torch_compile import measure as torch_compile
from cs336_systems.chapters.torch_compile import show as page
from cs336_systems.chapters.torch_compile.measure import Case
from cs336_systems.report.tables import printed
from cs336_systems.store.machine import cpp_compiler

torch = pytest.importorskip("torch")


# ------------------------------------------------------------------------------------------ the experiment


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="needs a C++ compiler")
def test_compiled_and_eager_in_turns(monkeypatch):
    """By a compiler that only traces: what Inductor makes of a block has its test in test_unit_training.py."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, mode=None, **kw: real(fn, backend="aot_eager", **kw))
    cases = [Case("tiny", 16, "forward", compile=c, batch=2, steps=2) for c in ("off", "default")]
    eager, compiled = torch_compile.run_group(cases)
    assert "status" not in eager and "status" not in compiled
    assert compiled["graphs"] == 1 and "graphs" not in eager and compiled["compile_s"] > 0
    assert not torch.compiler.config.force_disable_caches  # as it was


def test_code_that_is_not_compiled_is_an_error(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **kw: fn)
    monkeypatch.setattr("cs336_systems.store.machine.cpp_compiler", lambda: "c++")
    [found] = torch_compile.run_group([Case("tiny", 16, "forward", compile="default", batch=2, steps=2)])
    assert found["status"].startswith("error: RuntimeError: torch.compile made no graph")


@pytest.mark.gpu
def test_on_a_gpu():
    cases = [
        Case("tiny", 64, "train_step", "bf16", attention, compile, batch=2, steps=2)
        for attention in ("reference", "flash_triton", "sdpa")
        for compile in ("off", "default", "reduce-overhead")
    ]
    for case, found in zip(cases, torch_compile.run_group(cases), strict=True):
        assert "status" not in found, case
        if case.compile == "reduce-overhead":
            assert found["cuda_graph_skips"] == 0


# ---------------------------------------------------------------------------------------------- the frames
attention = functools.partial(
    step_rows.frame, attention_experiment.TABLE, head_dim=16, seq_len=16384, dtype="fp32", cap_gib=0
)


def ms(impl, forward, backward=1.0, **more):
    return {"impl": impl, "forward_ms_p50": forward, "backward_ms_p50": backward} | more


def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    return {"step_ms_p50": 7.0}


def test_eager_and_compiled_attention_stand_side_by_side():
    rows = attention(
        ms("reference", 3.0, 6.0), ms("reference", 9.0, repeat=1), ms("reference_compiled", 2.0, 4.0),
        ms("reference", 9.0, cap_gib=24), ms("reference_compiled", 9.0, dtype="bf16"),
        ms("reference", 1.0, head_dim=64),
    )  # fmt: skip
    [line] = page.attention_times(rows).to_dict("records")
    assert list(line.values()) == ["x", "fp32", 16, 16384, 3.0, 2.0, 6.0, 4.0]
    assert list(page.attention_times(rows[:0])) == list(line)
    found = page.attention_speedups(rows, {"x": Roofs(tflops={"fp32": 1e6}, tb_per_s=1.0)}).set_index("pass")
    assert list(found["measured, ×"]) == [1.5, 1.5]
    # where nothing but matrices of scores counts
    assert list(found["predicted, ×"]) == pytest.approx([6 / 4, 12 / 7], rel=0.01)
    assert page.attention_speedups(rows, {})["predicted, ×"].isna().all()
    two_runs = rows.assign(run=rows["impl"])
    assert page.attention_speedups(two_runs, {})["measured, ×"].isna().all()


def test_only_what_lies_within_its_runs_noise_stands_in_parentheses():
    compiled = ((16, 1 / 0.59), (32, 1.05), (64, 0.8))
    given = [ms("reference_compiled", t, head_dim=d) for d, t in compiled]
    given += [ms("reference", 1.0 + 0.1 * r, head_dim=d, repeat=r) for d, _ in compiled for r in (0, 1)]
    rows = attention(*given)
    forward, backward = page.speedup_figure(rows).axes
    assert [text.get_text() for text in forward.texts] == ["0.59", "(0.95)", "1.2"]
    assert [text.get_text() for text in backward.texts] == ["(1.0)"] * 3
    assert [t.get_text() for t in page.speedup_figure(rows[:0]).axes[0].texts] == ["not measured"]


steps = functools.partial(
    step_rows.frame, torch_compile.TABLE, context_length=512, mode="train_step", dtype="bf16", attention="reference",
    compile="off", batch=4,
)  # fmt: skip


def test_sizes_are_in_order_and_speedups_are_of_one_run():
    found = page.sizes(steps(
        {"size": "xl", "step_ms_p50": 90.0}, {"size": "xl", "step_ms_p50": 30.0, "compile": "default", "run": "other"},
        {"size": "small", "step_ms_p50": 50.0}, {"size": "small", "step_ms_p50": 20.0, "compile": "default"},
        {"size": "small", "step_ms_p50": 51.0, "repeat": 1}, {"size": "small", "step_ms_p50": 4.0, "mode": "forward"},
        {"size": "small", "step_ms_p50": 8.0, "context_length": 1024}, {"size": "2.7B", "status": "oom"},
        {"size": "small", "step_ms_p50": 2.0, "context_length": 1024, "compile": "default"},
        {"size": "small", "step_ms_p50": 1.0, "context_length": 1024, "compile": "reduce-overhead"},
        {"size": "small", "step_ms_p50": 1.0, "context_length": 1024, "batch": 64},
    ))  # fmt: skip
    assert found[["size", "context"]].to_numpy().tolist() == [
        ["small", 512], ["xl", 512], ["2.7B", 512], ["small", 1024],
    ]  # fmt: skip
    assert found["step, ×"].iloc[-1] == 4.0
    found = found[found["context"] == 512].set_index("size").drop(columns="context")
    assert found.loc["small", "step, ×"] == 2.5 and found.loc["small", "again, ms"] == 51.0
    assert found.loc["small", "F eager, ms"] == 4.0 and math.isnan(found.loc["small", "F, ×"])
    assert found.loc["xl", "step compiled, ms"] == 30.0 and math.isnan(found.loc["xl", "step, ×"])
    assert found.loc["2.7B"].drop(["machine", "dtype"]).isna().all()


def test_tokens_of_a_step_are_pivoted_and_what_ran_out_says_so():
    at = {"context_length": 1024, "size": "small"}
    found = page.speed(steps(
        at | {"batch": 64, "status": "oom"}, at | {"compile": "reduce-overhead", "tokens_per_s": 3e5},
        at | {"tokens_per_s": 1e5}, at | {"tokens_per_s": 9e5, "repeat": 1}, {"size": "small", "tokens_per_s": 9e5},
        at | {"tokens_per_s": 2e5, "attention": "flash_triton"},
    ))  # fmt: skip
    assert found[["mode", "attention"]].to_numpy().tolist() == [
        ["eager", "plain PyTorch"], ["eager", "ours"], ["CUDA graphs", "plain PyTorch"],
    ]  # fmt: skip
    assert list(found["small, batch 4"]) == [100, 200, 300]
    assert printed(found)["small, batch 64"].iloc[0] == "OOM"
