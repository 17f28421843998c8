"""Chapter flash_bench: its grids, what a group's rows hold, and its page with and without rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math

import pytest
from notebook_checks import shown_by

from cs336_systems import experiments, report
from cs336_systems.experiments import flash_bench
from cs336_systems.measure import rows as store
from cs336_systems.measure.code import code_digest, code_digests
from cs336_systems.report import headline
from cs336_systems.report.pages import flash_bench as page
from cs336_systems.report.pages import flash_bench_words as words
from cs336_systems.report.roofs import roofs

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

HANDOUT = {
    "seq_len": [2**n for n in range(7, 17)],
    "head_dim": [16, 32, 64, 128],
    "dtype": ["bf16", "fp32"],
    "impl": ["flash_triton", "reference", "reference_compiled"],
}
CPU_IMPLS = ("flash_triton", "flash_torch", "reference", "sdpa")


# --------------------------------------------------------------------------------- grids
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_every_case_is_there_once_and_every_group_has_one_pair(preset):
    cases = flash_bench.grid(preset)
    assert len(set(cases)) == len(cases)
    assert {c.dtype for c in cases} <= set(flash_bench.DTYPES)
    assert {c.impl for c in cases} <= set(flash_bench.IMPLEMENTATIONS)
    for group in store.groups(flash_bench, cases):
        [again] = [c for c in group if c.repeat == 1]
        assert dataclasses.replace(again, repeat=0) in group
        assert 0 < flash_bench.estimate_s(group) < 60


def test_full_covers_the_whole_grid_of_the_handout():
    cases = set(flash_bench.grid("full"))
    for seq_len, head_dim, dtype, impl in itertools.product(*HANDOUT.values()):
        assert flash_bench.Case(1, seq_len, head_dim, dtype, impl) in cases


def test_how_many_cases_there_are():
    groups = {p: store.groups(flash_bench, flash_bench.grid(p)) for p in experiments.PRESETS}
    # one head: 10 lengths × (4 + 4 + 2 dims of bf16, fp32, TF32); 16 heads: 6 lengths × 2 dims. Five cases each.
    assert len(groups["full"]) == 10 * (4 + 4 + 2) + 6 * 2
    assert len(groups["smoke"]) == 3 * 2 * 2
    assert {len(group) for group in groups["full"] + groups["smoke"]} == {5}


def test_the_leaderboard_shape_is_measured_against_the_library_kernels():
    found = {
        c.impl for c in flash_bench.grid("full") if headline.CASE.items() <= dataclasses.asdict(c).items()
    }
    assert found == {"flash_triton", "sdpa_flash", "sdpa_cudnn", "flex_compiled"}


# --------------------------------------------------------------------------------- measuring, on a CPU
@pytest.fixture(scope="module")
def quick():
    """`interleaved` with next to no repetitions: what is tested here are the rows, not their numbers."""
    with pytest.MonkeyPatch.context() as patch:
        from cs336_systems.measure import timing

        slow = timing.interleaved
        patch.setattr(
            timing,
            "interleaved",
            lambda *a, **k: slow(*a, **(k | {"rounds": 1, "warmup_ms": 1, "rep_ms": 2})),
        )
        yield


def group(dtype="bf16", seq_len=128, head_dim=32, impls=CPU_IMPLS):
    return [flash_bench.Case(1, seq_len, head_dim, dtype, impl) for impl in impls]


@without_gpu
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 1e-2), ("fp32", 1e-5)])
def test_a_group_fills_its_columns_and_is_right(quick, dtype, bound):
    cases = [*group(dtype), flash_bench.Case(1, 128, 32, dtype, "reference", 1)]
    found = flash_bench.run_group(cases)
    assert len(found) == len(cases)
    assert all(set(metrics) <= {*flash_bench.METRICS, "status"} for metrics in found)
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
def test_the_kernels_behind_ours_are_named(monkeypatch):
    pytest.importorskip("triton")
    chosen = flash_bench._forward
    monkeypatch.setattr(
        flash_bench, "_forward", lambda impl, case, device: chosen("flash_torch", case, device)
    )
    [found] = flash_bench.run_group([flash_bench.Case(1, 128, 32, "fp32", "flash_triton")])
    assert found["backend"] == "portable kernels"


@without_gpu
def test_what_a_cpu_cannot_run_says_what_it_needs():
    impls = ("flash_triton", "sdpa_cudnn", "sdpa_efficient", "flex_compiled")
    for metrics in flash_bench.run_group(group(impls=impls)):
        assert metrics["status"].startswith("skipped: needs a CUDA device")


def test_one_case_out_of_memory_leaves_the_others_measured(quick, monkeypatch):
    chosen = flash_bench._forward

    def forward(impl, case, device):
        if impl == "reference":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return chosen(impl, case, device)

    monkeypatch.setattr(flash_bench, "_forward", forward)
    plain, torch_tiles = flash_bench.run_group(group(impls=("reference", "flash_torch")))
    assert plain["status"] == "oom"
    assert "forward_ms_p50" not in plain
    assert "status" not in torch_tiles
    assert torch_tiles["end_to_end_ms_p50"] > 0
    assert torch_tiles["error_out"] > 0


def test_another_failure_is_a_row_too(quick, monkeypatch, capsys):
    monkeypatch.setattr(flash_bench, "IMPLEMENTATIONS", ("flash_torch",))
    unknown, fine = flash_bench.run_group(group(impls=("warp", "flash_torch")))
    assert unknown["status"] == "error: ValueError: unknown impl 'warp'; allowed: flash_torch"
    assert "status" not in fine
    assert "Traceback" in capsys.readouterr().err


def test_unknown_values_are_named():
    with pytest.raises(ValueError, match=r"'fp8'; allowed: bf16, fp16, fp32, tf32"):
        flash_bench.run_group(group("fp8"))
    with pytest.raises(ValueError, match=r"'warp'; allowed: flash_triton, .*flex_compiled"):
        flash_bench._forward("warp", group()[0], "cpu")


def test_precision_is_left_as_it_was(quick):
    before = torch.get_float32_matmul_precision()
    [metrics] = flash_bench.run_group(group("tf32", impls=("reference",)))
    assert metrics["matmul_precision"] == "high"
    assert torch.get_float32_matmul_precision() == before


# --------------------------------------------------------------------------------- the page
def seconds(case, part):
    """Times of a made-up machine, in ms: compute that grows with n², over a fixed cost of the host."""
    slower = {"flash_triton": 1.0, "reference": 8.0, "reference_compiled": 4.0, "sdpa_cudnn": 0.7}
    work = {"forward": 2, "backward": 5, "end_to_end": 7}[part]
    flops = work * case.heads * case.seq_len**2 * case.head_dim
    return 0.02 * work + slower.get(case.impl, 1.5) * flops / 3e11


def metrics_of(case):
    if case.impl == "reference" and case.seq_len == 65536 and case.dtype == "fp32":
        return {"status": "oom"}
    out = {"error_out": 2e-3, "error_grads": 3e-3, "backend": case.impl, "matmul_precision": "highest"}
    out |= {"peak_gib": 0.0625 + case.seq_len**2 / 1e9, "sm_mhz": 1980.0, "power_w": 500.0, "status": "ok"}
    for part in flash_bench.PARTS:
        ms = seconds(case, part) * (1.01 if case.repeat else 1.0)
        out |= {f"{part}_ms_p20": ms * 0.99, f"{part}_ms_p50": ms, f"{part}_ms_p80": ms * 1.01}
        out[f"{part}_tflops"] = 1 / ms
        if part != "end_to_end" and ms <= 10:
            host_ms = seconds(dataclasses.replace(case, heads=0), part)
            out |= {f"{part}_gpu_ms": ms - host_ms, f"{part}_host_us": 2e3 * host_ms}
    return out


def write_rows(root, machine="h100-x1", keep=lambda case: True):
    """A whole machine of made-up rows, with roofs and a data sheet."""
    provenance = {"time_utc": "2025-03-04T05:06:07Z", "env": "abcd"}
    code = code_digests(flash_bench)
    rows = [
        dataclasses.asdict(c)
        | metrics_of(c)
        | {"run": f"{c.heads}-{c.seq_len}-{c.head_dim}-{c.dtype}"}
        | provenance
        | {"code": code(c)}
        for c in flash_bench.grid("full")
        if keep(c)
    ]
    store.write(flash_bench, machine, rows, root)
    hardware = experiments.load("hardware")
    digest = {"code": code_digest(hardware)}
    rows = [
        dataclasses.asdict(c)
        | {
            "status": "ok",
            "run": c.kind,
            "tflops": 600.0,
            "tb_per_s": 3.0,
            "us_per_launch": 5.0,
            "ms_p50": 1.0,
        }
        | provenance
        | digest
        for c in hardware.grid("full")
    ]
    store.write(hardware, machine, rows, root)
    gpu = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1, "sms": 132, "torch": "2.13.0", "triton": "3.7.1"}
    store.write_environment(machine, root, {"abcd": gpu})
    (root / "reference.json").write_text(json.dumps({"flash_bench": [machine], "hardware": [machine]}))


run_notebook = functools.partial(shown_by, "flash_bench")


def test_the_page_without_rows_says_not_measured(results_root, project_root, monkeypatch):
    text = run_notebook(project_root, monkeypatch)
    assert text.count("not measured") > 5
    assert "nan" not in text.replace("nanochat", "")


def test_the_page_with_rows_says_what_they_say(results_root, project_root, monkeypatch):
    write_rows(results_root)
    text = run_notebook(project_root, monkeypatch)
    assert "Measured on `h100-x1`" in text
    assert "OOM" in text
    assert "nan" not in text.replace("nanochat", "")
    assert "not measured" not in text.replace("not measured here", "").replace("– is not measured", "")


def test_the_page_with_few_rows_is_built_as_well(results_root, project_root, monkeypatch):
    write_rows(results_root, keep=lambda c: c.heads == 1 and c.dtype == "bf16" and c.seq_len < 1024)
    assert "not measured" in run_notebook(project_root, monkeypatch)


def test_nothing_is_claimed_below_the_spread(results_root):
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    assert page.spread(chapter)["forward"].max() == pytest.approx(0.01, rel=1e-3)
    table = page.ratios(chapter, "sdpa_flash", "forward", heads=16)
    assert (table["noise"] >= 0.0099).all()
    assert page.verdict(1.005, 0.01) == "even"
    assert page.verdict(1 / 1.005, 0.01) == "even"
    assert page.verdict(1.02, 0.01) == "faster"
    assert page.verdict(1 / 1.02, 0.01) == "slower"


def test_floors_are_the_accounting_over_the_roofs(results_root):
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    found = roofs("h100-x1")
    table = page.floors(chapter, found, "forward", heads=16, head_dim=64, dtype="bf16")
    line = table[table["n"] == 16384].iloc[0]
    flops = 2 * 16 * 16384**2 * 64
    assert line["GFLOP"] == pytest.approx(flops / 1e9)
    assert line["products, µs"] == pytest.approx(flops / 600e12 * 1e6)
    assert line["exps, µs"] == pytest.approx(16 * 16384**2 / 2 / (132 * 16 * 1980e6) * 1e6)
    assert math.isfinite(line["MB"])


def test_what_loses_is_named_with_its_lengths(results_root):
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    text = words.losses(chapter, "h100-x1", heads=16, dtypes=("bf16",))
    assert "SDPA (cuDNN) at" in text  # 0.7 of our time where the host's share is small
    assert "FlexAttention" not in text  # 1.5 times ours
    assert words.losses(chapter, "h100-x1", dtypes=("fp32",)) == "Ours is slower nowhere."
    table = page.courses(chapter, heads=16, dtype="bf16")
    cudnn = table[(table["peer"] == "SDPA (cuDNN)") & (table["d"] == 128)].iloc[0]
    assert cudnn["forward + backward"] == "slower at 1k–32k"


def test_the_leaderboard_table_holds_what_others_published(results_root):
    write_rows(results_root)
    (results_root / "published.csv").write_text(
        "chapter,what,hardware,setting,metric,value,source\n"
        "flash_bench,best entry of the board,1 x H100,some,end_to_end_ms,5.0,https://example.org\n"
    )
    chapter = report.Chapter("flash_bench", measure="no")
    table = page.leaderboard(chapter, roofs("h100-x1"), "h100-x1")
    assert list(table["source"]) == ["measured here"] * 4 + ["[published](https://example.org)"]
    flops = 7 * 16 * 16384**2 * 64
    assert float(table.iloc[-1]["TFLOP/s"]) == pytest.approx(flops / 5e9, rel=1e-2)
    assert table.iloc[0]["over ours"] == "1.00 ×"
    assert "[source](https://example.org)" in words.leaderboard(chapter, "h100-x1")


def test_gpu_time_and_host_time_are_told_apart(results_root, monkeypatch):
    of_case = metrics_of
    slow_host = flash_bench.Case(16, 1024, 64, "bf16", "flash_triton")

    def with_a_slow_host(case):
        return of_case(case) | (
            {"backward_ms_p50": 0.7, "backward_host_us": 800.0} if case == slow_host else {}
        )

    monkeypatch.setitem(globals(), "metrics_of", with_a_slow_host)
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    many = {"machine": "h100-x1", "heads": 16, "dtype": "bf16"}
    text = words.without_host(chapter, **many)
    assert "forward 0.67 to 0.67" in text  # the peer's kernels take 1.5 times ours
    assert "backward at 1024 tokens, $d = 64$" in text and "800" in text and "700" in text
    assert text.count("tokens") == 1
    table = page.gpu_and_host(chapter, 2048, **many)
    assert len(table) == 2 * 2 * 4
    assert table.iloc[0]["B: host µs"] == "800"
