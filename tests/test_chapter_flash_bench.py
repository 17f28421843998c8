"""Chapter flash_bench: its grid, what a group's rows hold, the frames of its page, and its notebook on whatever rows
there are."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from cs336_systems import accounting
from cs336_systems.chapters.flash_bench import measure as flash_bench
from cs336_systems.chapters.flash_bench import show as page
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.measure.clocks.calls import Calls
from cs336_systems.report.tables import printed

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

CPU_IMPLS = ("flash_triton", "flash_torch", "reference", "sdpa")


# --------------------------------------------------------------------------------- measuring, on a CPU
@pytest.fixture(scope="module")
def quick():
    """Next to no repetitions: what is tested here are the rows, not their numbers."""
    with pytest.MonkeyPatch.context() as patch:
        little = {"num_rounds": 1, "warmup_ms": 1, "rep_ms": 2}
        patch.setattr(flash_bench, "Calls", lambda device, **told: Calls(device, **told | little))
        yield


def group(dtype="bf16", seq_len=128, head_dim=32, impls=CPU_IMPLS):
    return [flash_bench.Case(1, seq_len, head_dim, dtype, impl) for impl in impls]


@without_gpu
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 1e-2), ("fp32", 1e-5)])
def test_a_group_fills_its_columns_and_is_right(quick, dtype, bound):
    cases = [*group(dtype), flash_bench.Case(1, 128, 32, dtype, "reference", 1)]
    found = flash_bench.run_group(cases)
    assert len(found) == len(cases)
    assert all(set(metrics) <= {*flash_bench.TABLE.metrics, "status"} for metrics in found)
    assert found[0]["status"] == "skipped: needs a CUDA device"  # its interpreter is never timed
    for case, metrics in zip(cases[1:], found[1:], strict=True):
        assert "status" not in metrics
        assert 0 < metrics["error_out"] < bound
        assert 0 < metrics["error_grads"] < bound
        assert metrics["matmul_precision"] == "highest"
        assert metrics["peak_gib"] is None  # only known on a GPU
        for part in flash_bench.PARTS:
            low, middle, high = (metrics[f"{part}_ms_{q}"] for q in ("p20", "p50", "p80"))
            assert 0 < low <= middle <= high
            products = {"forward": 2, "backward": 5, "end_to_end": 7}[part]
            flops = products * case.seq_len**2 * case.head_dim  # 2mnk, halved by the causal mask
            assert metrics[f"{part}_tflops"] == pytest.approx(flops / middle / 1e9, rel=1e-6)
    assert found[3]["backend"] != "auto"  # which of its kernels SDPA chose is looked up


@without_gpu
def test_a_peak_is_of_the_inputs_and_a_call_alone(quick, monkeypatch):
    monkeypatch.setattr(flash_bench, "peak_gib", lambda call, given: sum(x.nbytes for x in given))
    [metrics] = flash_bench.run_group(group(impls=("reference",)))
    assert metrics["peak_gib"] == 4 * 128 * 32 * 2  # q, k, v, dO


@without_gpu
def test_the_kernels_behind_ours_are_named(monkeypatch):
    pytest.importorskip("triton")
    build = peers.build
    monkeypatch.setattr(peers, "build", lambda impl, *rest: build("flash_torch", *rest))
    [found] = flash_bench.run_group([flash_bench.Case(1, 128, 32, "fp32", "flash_triton")])
    assert found["backend"] == "portable kernels"


def test_a_case_that_fails_or_does_not_fit_leaves_the_others_measured(quick, monkeypatch, capsys):
    build = peers.build

    def failing(impl, *rest):
        if impl == "reference":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(impl, *rest)

    monkeypatch.setattr(peers, "build", failing)
    plain, unknown, torch_tiles = flash_bench.run_group(group(impls=("reference", "warp", "flash_torch")))
    assert plain["status"] == "oom" and "forward_ms_p50" not in plain
    assert unknown["status"] == "error: ValueError: unknown impl 'warp'; allowed: " + ", ".join(peers.MAKERS)
    assert "Traceback" in capsys.readouterr().err
    assert (
        "status" not in torch_tiles and torch_tiles["end_to_end_ms_p50"] > 0 and torch_tiles["error_out"] > 0
    )


def test_precision_is_left_as_it_was(quick):
    before = torch.get_float32_matmul_precision()
    [metrics] = flash_bench.run_group(group("tf32", impls=("reference",)))
    assert metrics["matmul_precision"] == "high"
    assert torch.get_float32_matmul_precision() == before


# --------------------------------------------------------------------------------- frames
LACKING = dict.fromkeys(flash_bench.TABLE.metrics, math.nan)
SHAPE = {"machine": "x", "heads": 1, "seq_len": 1024, "head_dim": 64, "dtype": "bf16", "repeat": 0}


def row(impl, ms=1.0, gpu_ms=0.5, **more):
    """A made-up row: each pass takes `ms` of wall time, both `3 · ms`; kernel times are `gpu_ms` each."""
    out = LACKING | SHAPE | {"impl": impl, "status": "ok", "run": "r", "sm_mhz": 1000.0}
    out |= {"forward_ms_p50": ms, "backward_ms_p50": ms, "end_to_end_ms_p50": 3 * ms}
    return out | {"forward_gpu_ms": gpu_ms, "backward_gpu_ms": gpu_ms} | more


def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    if case.impl == "flash_triton":
        return {"status": "skipped: needs a CUDA device"}
    return {f"{part}_ms_p50": 1.0 for part in flash_bench.PARTS}


def test_times_are_pivoted_and_show_what_ran_out_of_memory():
    lost = {f"{part}_ms_p50": math.nan for part in ("backward", "end_to_end")}
    found = page.times(pd.DataFrame([
        row("flash_triton", 1.0), row("flash_triton", 9.0, repeat=1), row("sdpa", 7.0),
        row("reference", 2.0, status="oom", **lost), row("flash_triton", 4.0, seq_len=2048),
    ]), ("flash_triton", "reference"), ("machine", "seq_len"))  # fmt: skip
    assert list(found) == ["machine", "n", "F ours", "F plain", "B ours", "B plain", "F+B ours", "F+B plain"]
    assert found["n"].tolist() == [1024, 2048] and found["F+B ours"].tolist() == [3.0, 12.0]
    shown = printed(found)
    assert shown.loc[0, ["F plain", "B plain", "F+B plain"]].tolist() == ["2.00", "OOM", "OOM"]
    assert shown.loc[1, "F+B plain"] == "–"


def test_floors_are_the_accounting_over_the_roofs():
    roof = Roofs(tflops={"bf16": 500.0}, tb_per_s=4.0, sms=100)
    rows = pd.DataFrame([row("flash_triton", gpu_ms=0.01), row("flash_triton", heads=16), row("sdpa")])
    found = page.floors(rows, roof)
    assert found["pass"].tolist() == ["forward", "forward", "backward", "backward"]
    one = found.iloc[0]
    pairs = 1024**2 / 2
    assert one["GEMMs, µs"] == pytest.approx(4 * pairs * 64 / 500e6)
    assert one["exponentials, µs"] == pytest.approx(pairs / (100 * 16 * 1000))
    assert one["memory, µs"] == pytest.approx(
        accounting.attention_bytes(1, 1024, 1024, 64, 2, "forward") / 4e6
    )
    assert one["floor, %"] == pytest.approx(100 * one["exponentials, µs"] / one["kernel time, µs"])
    unknown = page.floors(rows, Roofs())
    assert unknown["kernel time, µs"].notna().all() and unknown["floor, %"].isna().all()
    no_clock = page.floors(pd.DataFrame([row("flash_triton", sm_mhz=math.nan)]), roof)
    assert no_clock["GEMMs, µs"].notna().all() and no_clock["floor, %"].isna().all()
    assert list(page.floors(rows[:0], roof)) == list(found)


def test_speedups_are_of_kernels_for_short_sequences_and_of_wall_time_for_long_ones():
    long = {"seq_len": 2 * page.KERNEL_TOKENS, "gpu_ms": math.nan}
    found = page.speedups(pd.DataFrame([
        row("flash_triton", 1.0, 0.5), row("sdpa", 8.0, 1.0), row("reference", 9.0, 5.0, run="another"),
        row("flash_triton", 1.0, **long), row("sdpa", 8.0, **long), row("reference", math.nan, status="oom", **long),
    ])).set_index(["impl", "seq_len"])["speedup"]  # fmt: skip
    assert found["sdpa"].tolist() == [2.0, 8.0]
    assert found["reference"].isna().all()  # of another run; out of memory


def test_errors_are_the_worst_of_all_shapes():
    found = page.errors(pd.DataFrame([
        row("flash_triton", error_out=1e-3, error_grads=3e-3), row("sdpa", error_out=5e-3, dtype="tf32"),
        row("flash_triton", error_out=2e-3, error_grads=1e-3, seq_len=2048), row("sdpa", error_out=9.0, status="oom"),
    ])).set_index("dtype")  # fmt: skip
    assert found.loc["bf16", ["O ours", "grads ours"]].tolist() == [2e-3, 3e-3]
    assert found.loc["TF32", "O SDPA"] == 5e-3 and math.isnan(found.loc["bf16", "O SDPA"])


def test_figures_show_the_first_machine_and_its_gaps():
    rows = pd.DataFrame([
        row("flash_triton"), row("sdpa", gpu_ms=1.0), row("flash_triton", seq_len=2048),
        row("sdpa", math.nan, math.nan, seq_len=2048, status="oom"), row("sdpa", gpu_ms=99.0, machine="y"),
    ])  # fmt: skip
    drawn = page.speedup_figure(rows, ("sdpa", "reference"), ("bf16", "fp32"))
    assert [text.get_text() for text in drawn.axes[0].texts] == ["2.0", "OOM"]
    assert all(ax.texts[0].get_text() == "not measured" for ax in drawn.axes[1:])
    wall = page.kernel_figure(rows, ("bf16",)).axes[0].lines[-1]
    assert wall.get_ydata().tolist() == [3.0, 3.0]
    rates = page.rate_figure(rows, Roofs()).axes[0].lines[0].get_ydata()
    assert rates[0] == pytest.approx(7 * 1024**2 * 64 / 1e9)


def test_lines_of_code_leave_out_what_is_said(tmp_path):
    for name, text in (
        (
            "a.py",
            '"""One\ntwo."""\n\n# three\nx = """four\nfive"""\n\ndef f():\n    "six"\n    return x  # seven\n',
        ),
        ("a.cuh", "// one\n#pragma once\n\n/* two\nthree */\nint x;  // four\n"),
    ):
        (tmp_path / name).write_text(text)
    assert [page.code_lines(tmp_path / name) for name in ("a.py", "a.cuh")] == [4, 2]


def test_languages_have_their_lines_and_times():
    at = {"heads": 16, "seq_len": flash_bench.LANGUAGES_TOKENS}
    rows = [
        row("flash_cuda", 2.0, head_dim=64, **at),
        row("flash_cuda", 9.0, head_dim=64, **at | {"seq_len": 1024}),
    ]
    found = page.languages(pd.DataFrame([*rows, row("sdpa_flash", **at)])).set_index("language")
    assert list(found.index) == list(page.LANGUAGES)
    assert found.loc["CUDA C++", "F d = 64, ms"] == 2.0 and found["F d = 128, ms"].isna().all()
    assert (found["lines: kernels"] > 50).all() and (found["launching"].iloc[1:] > 50).all()
    assert [impl for impl, *_ in page.LANGUAGES.values()] == list(flash_bench.LANGUAGES)


def test_the_least_time_of_a_t4_is_that_of_its_tensor_cores():
    assert page.least_ms("Tesla T4", 16, 4096, 64, "forward") == pytest.approx(2 * 16 * 4096**2 * 64 / 65e9)
