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
from cs336_systems.report.pages import flash_bench_errors as error_words
from cs336_systems.report.pages import flash_bench_host as host
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
    nowhere = words.losses(chapter, "h100-x1", dtypes=("fp32",))
    assert nowhere == "In fp32, ours is slower nowhere beyond the noise."
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
    p20 = 0.69

    def with_a_slow_host(case):
        return of_case(case) | (
            {"backward_ms_p20": p20, "backward_ms_p50": 0.7, "backward_host_us": 800.0}
            if case == slow_host
            else {}
        )

    monkeypatch.setitem(globals(), "metrics_of", with_a_slow_host)
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    many = {"machine": "h100-x1", "heads": 16, "dtype": "bf16"}
    text = host.without_host(chapter, **many)
    assert "forward 0.67 to 0.67" in text  # the peer's kernels take 1.5 times ours
    assert "backward at 1024 tokens, $d = 64$" in text and "800" in text and "700" in text
    assert text.count("tokens") == 1
    flash, cudnn = text.split("Over ")[1:]
    assert flash.startswith("SDPA (flash)") and "other way round" in flash and "within" not in flash
    ours = (chapter._frame["impl"] == "flash_triton") & (chapter._frame["seq_len"] == 1024)
    overlapping = report.Chapter("flash_bench", measure="no")
    overlapping.rows()  # read now, so that they can be changed
    overlapping._frame.loc[ours, "backward_ms_p20"] = 0.01
    assert "within their spread" in host.without_host(overlapping, **many)
    assert cudnn.startswith("SDPA (cuDNN)") and "has ours ahead, too" in cudnn
    assert "a guess" not in text
    flex = chapter._frame["impl"] == "flex_compiled"
    chapter._frame.loc[flex & (chapter._frame["seq_len"] == 4096), "forward_gpu_ms"] = (
        chapter._frame["forward_ms_p50"] * 1.05
    )
    text = host.without_host(chapter, **many)
    assert "In 2 passes" in text and "by up to 5.0 %" in text
    nothing = many | {"dtype": "fp32"}
    assert host.without_host(chapter, **nothing) == "GPU time without the host: not measured."
    table = page.gpu_and_host(chapter, 2048, **many)
    assert len(table) == 2 * 2 * 4
    assert table.iloc[0]["B: host µs"] == "800"


def test_times_whose_bands_overlap_are_even(results_root, monkeypatch):
    of_case = metrics_of

    def with_a_wide_band(case):
        wide = {"end_to_end_ms_p80": 100.0} if case.heads == 16 and case.seq_len == 1024 else {}
        return of_case(case) | wide

    monkeypatch.setitem(globals(), "metrics_of", with_a_wide_band)
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    table = page.ratios(chapter, "flex_compiled", "end_to_end", heads=16, head_dim=128).set_index("seq_len")
    assert page.verdict(*table.loc[1024, ["ratio", "noise"]]) == "even"
    assert page.verdict(*table.loc[2048, ["ratio", "noise"]]) == "faster"
    figure = page.ratio_figure(chapter, ["flex_compiled"], heads=16)
    colours = figure.axes[0].images[0].get_array()
    assert (colours[:, 0, :3] == pytest.approx(0.93)).all()  # even: the number stays, the colour goes
    assert (colours[:, 1, 2] > colours[:, 1, 0]).all()  # blue
    assert len({text.get_text() for text in figure.axes[0].texts} & {"–", ""}) == 0


def test_a_note_about_earlier_code_stands_only_under_rows_of_such(results_root, monkeypatch):
    write_rows(results_root)
    path = results_root / "h100-x1" / "flash_bench.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    code, head = rows[0].index("code"), rows[0].index("heads")
    for row in rows[1:]:
        row[code] = "00000000" if row[head] == "1" else row[code]
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")
    chapter = report.Chapter("flash_bench", measure="no")
    notes = []
    monkeypatch.setattr(report.chapter, "show", lambda table, caption, name, note: notes.append(note))
    for heads in (1, 16):
        chapter.show(page.errors(chapter, heads), "Errors.", "errors", {"heads": heads})
    assert notes == ["measured with earlier code", ""]


ONE_HEAD = {"machine": "h100-x1", "heads": 1, "head_dim": 64, "dtype": "bf16"}


def chapter_of(results_root, monkeypatch, change):
    """The made-up machine with some metrics changed: `change` has them for a case."""
    of_case = metrics_of
    monkeypatch.setitem(globals(), "metrics_of", lambda case: of_case(case) | change(case))
    write_rows(results_root)
    return report.Chapter("flash_bench", measure="no"), roofs("h100-x1")


def test_growth_tells_linear_from_quadratic(results_root, monkeypatch):
    chapter, _ = chapter_of(
        results_root, monkeypatch, lambda c: {"forward_gpu_ms": max(c.seq_len, c.seq_len**2 / 8192)}
    )
    text = words.growth(chapter, **ONE_HEAD)
    assert (
        "(in a CUDA graph) by 4.00 at the last one, to 64k; $n^2$" in text
    )  # twice as long is not less than that
    chapter._frame["forward_gpu_ms"] = [
        max(n**0.9, n**2 / 8192**1.1) for n in chapter._frame["seq_len"].astype(float)
    ]
    text = words.growth(chapter, **ONE_HEAD)
    assert "by 1.87 up to 8k tokens and by 4.00 at the last one, to 64k" in text


def test_the_host_is_blamed_only_where_the_gpu_works_less(results_root, monkeypatch):
    def hosts(case):
        ours = case.impl == "flash_triton"
        gpu = case.seq_len / 1e5 * (0.5 if ours else 1.0)
        out = {f"{part}_gpu_ms": gpu for part in ("forward", "backward")}
        if case.seq_len > 4096:
            return out | {"end_to_end_ms_p50": 2 * gpu, "forward_ms_p50": gpu + 0.004}
        low, middle, high = (0.4, 0.41, 0.42) if ours else (0.2, 0.21, 0.22)
        out |= {
            f"end_to_end_ms_{q}": v for q, v in zip(("p20", "p50", "p80"), (low, middle, high), strict=True)
        }
        out |= {
            "backward_host_us": 200.0 if ours else 100.0,
            "forward_host_us": 40.0,
            "forward_ms_p50": gpu + 0.004,
        }
        return out | (
            {"forward_host_us": 120.0, "forward_ms_p50": gpu + 0.05} if case.seq_len == 2048 else {}
        )

    chapter, found = chapter_of(results_root, monkeypatch, hosts)
    text = host.short(chapter, found, **ONE_HEAD)
    assert "Up to 4k tokens both passes of ours together take 0.410 ms" in text
    assert "ours takes 0.50 of SDPA's" in text
    assert "no faster kernel" in text and "200 µs with ours and 100 µs" in text
    assert "reads 4.0 µs more" in text and "at 2k tokens, where the host needed more, 50 µs more" in text
    assert "although the host" not in text
    assert "guess" not in text
    slow_gpu = chapter._frame["impl"] == "flash_triton"
    late = slow_gpu & (chapter._frame["seq_len"] == 1024) & (chapter._frame["head_dim"] == 128)
    late &= chapter._frame["dtype"] == "fp32"
    chapter._frame.loc[late, "forward_ms_p50"] += 0.03
    text = host.short(chapter, found, **ONE_HEAD)
    assert "although the host" not in text  # another dtype's than what the sentence is of
    assert (
        "it reads 34 µs more, the most at n = 1k, d = 128, heads: 1, in fp32." in text and "a guess" in text
    )
    spoken_of = slow_gpu & (chapter._frame["seq_len"] == 1024)
    for column, value in ONE_HEAD.items():
        spoken_of &= chapter._frame[column] == value
    chapter._frame.loc[spoken_of, "forward_ms_p50"] += 0.03
    text = host.short(chapter, found, **ONE_HEAD)
    assert (
        "reads 4.0 µs more" in text
        and "; at 1k tokens, although the host needs less there too, 34 µs more; at 2k tokens, where" in text
    )
    chapter._frame.loc[slow_gpu, "forward_gpu_ms"] *= 4  # now the GPU works longer for ours as well
    assert "no faster kernel" not in host.short(chapter, found, **ONE_HEAD)


def test_a_loss_is_the_hosts_where_the_gpu_needs_less(results_root, monkeypatch):
    shape = {"heads": 1, "head_dim": 64, "dtype": "fp32"}

    def lose(case):
        """SDPA's calls take half of ours at two lengths; the GPU needs more for ours at one of them only."""
        if not shape.items() <= dataclasses.asdict(case).items() or case.seq_len not in (1024, 2048):
            return {}
        ours = case.impl == "flash_triton"
        gpu = 0.01 if ours and case.seq_len == 1024 else 0.04 if ours else 0.02
        ms = {"flash_triton": 0.4, "sdpa": 0.2}.get(case.impl, 0.9)
        out = {f"end_to_end_ms_{q}": ms * x for q, x in (("p20", 0.99), ("p50", 1.0), ("p80", 1.01))}
        return out | {f"{part}_gpu_ms": gpu for part in ("forward", "backward")}

    chapter, _ = chapter_of(results_root, monkeypatch, lose)
    assert "PyTorch SDPA at 1k–2k (at most 2.00 ×)" in words.losses(chapter, "h100-x1")
    text = host.losses(chapter, "h100-x1")
    assert "In 1 of these 2 cases ours needs less of the GPU's time" in text and "0.50 of it" in text
    assert "In the other it is the GPU's: fp32 at $d = 64$." in text
    assert "launch one kernel more" not in text
    rows = chapter._frame
    where = (rows["impl"] == "flash_triton") & (rows["dtype"] == "fp32")
    rows.loc[rows["impl"] == "flash_triton", "backend"] = "portable kernels"
    rows.loc[where & (rows["seq_len"] >= 512), "backend"] = "split kernels"
    assert "launch one kernel more" in host.losses(chapter, "h100-x1")
    rows.loc[where & (rows["seq_len"] == 1024), "forward_gpu_ms"] = 1.0
    assert "In all 2 cases the loss is the GPU's: fp32 at $d = 64$." in host.losses(chapter, "h100-x1")
    rows.loc[where, [f"end_to_end_ms_{q}" for q in ("p20", "p50", "p80")]] = 1e-4
    assert host.losses(chapter, "h100-x1") == ""


def test_what_do_bench_hides_of_the_gpus_time_is_listed(results_root, monkeypatch):
    def quick(case):
        """Compiled PyTorch takes the host long and the GPU half as long as ours, at two lengths of one shape."""
        theirs = (1, 64, "bf16", "reference_compiled")
        quicker = (case.heads, case.head_dim, case.dtype, case.impl) == theirs and case.seq_len in (512, 1024)
        out = {f"{part}_gpu_ms": 0.05 if quicker else 0.1 for part in ("forward", "backward")}
        return out | (
            {"end_to_end_ms_p20": 4.9, "end_to_end_ms_p50": 5.0, "end_to_end_ms_p80": 5.1} if quicker else {}
        )

    chapter, _ = chapter_of(results_root, monkeypatch, quick)
    text = host.by_gpu(chapter, "h100-x1")
    assert "- bf16, $d = 64$: compiled PyTorch at 512–1k (at most 2.00 ×)" in text
    assert text.count("- ") == 1
    assert "In 2 of these 2 cases `do_bench` has ours ahead" in text
    rows = chapter._frame
    of_compiled = rows["impl"] == "reference_compiled"
    rows.loc[of_compiled, [f"end_to_end_ms_{q}" for q in ("p20", "p50", "p80")]] = 1e-4
    assert "has ours ahead" not in host.by_gpu(chapter, "h100-x1")
    rows.loc[of_compiled, ["forward_gpu_ms", "backward_gpu_ms"]] *= 4
    assert "ours is slower nowhere beyond the noise" in host.by_gpu(chapter, "h100-x1")


def test_where_tf32_costs_ours_time_it_is_said(results_root, monkeypatch):
    def change(case):
        if case.impl != "flash_triton" or case.dtype == "bf16":
            return {}
        split = case.dtype == "fp32" and case.seq_len >= 512
        slower = case.dtype == "tf32" and 512 <= case.seq_len < 4096
        gpu = None if case.seq_len == 65536 else 1.5 if slower else 0.5 if case.dtype == "tf32" else 1.0
        out = {f"{part}_gpu_ms": gpu for part in ("forward", "backward")}
        out["end_to_end_ms_p50"] = 30.0 if case.dtype == "tf32" else 40.0
        return out | {"backend": "split kernels" if split else "portable kernels"}

    chapter, _ = chapter_of(results_root, monkeypatch, change)
    text = words.tf32_gain(chapter, "h100-x1")
    assert "at $d = 64$ faster at 128–256, slower at 512–2k, faster at 4k–64k; at $d = 128$ faster" in text
    assert "takes 0.50 to 1.5 times as long" in text and "costs time and accuracy" in text
    assert "one launch" in text
    ours = chapter._frame["impl"] == "flash_triton"
    chapter._frame.loc[ours & (chapter._frame["dtype"] == "tf32"), ["forward_gpu_ms", "backward_gpu_ms"]] = (
        0.5
    )
    assert "costs time" not in words.tf32_gain(chapter, "h100-x1")
    chapter._frame.loc[ours, "backend"] = "portable kernels"
    assert "at $d = 64$ faster at 128–64k; " in words.tf32_gain(chapter, "h100-x1")


def test_a_host_of_changing_speed_is_told(results_root, monkeypatch):
    slow = {"flash_triton": {16: 90.0}}
    chapter, _ = chapter_of(
        results_root, monkeypatch, lambda c: {"forward_host_us": slow.get(c.impl, {}).get(c.head_dim, 40.0)}
    )
    assert "(`flash_triton`, bf16), kept it for 40 to 90 µs" in words.spread(chapter)
    chapter._frame["forward_host_us"] = 40.0
    assert "kept it" not in words.spread(chapter)


def test_what_was_predicted_of_plain_attention_is_held_against_rows(results_root, monkeypatch):
    def slow(case):
        if case.impl != "reference":
            return {}
        ms = 1.0 if case.seq_len < 4096 else 5 * 4 * 2 * case.seq_len**2 / 3e9
        return {"forward_gpu_ms": 0.1 if case.seq_len < 4096 else ms, "forward_ms_p50": ms} | {
            f"{part}_tflops": 60.0 for part in flash_bench.PARTS
        }

    chapter, found = chapter_of(results_root, monkeypatch, slow)
    text = words.plain(chapter, found, **ONE_HEAD)
    assert "far below the roof, as predicted: 10 %" in text  # 60 of 600 TFLOP/s
    assert "takes 5.0 times as long" in text
    assert "up to 2k tokens the GPU works for less than half" in text
    plain = chapter._frame["impl"] == "reference"
    chapter._frame.loc[plain, "forward_tflops"] = 300.0
    chapter._frame.loc[plain, "forward_gpu_ms"] = chapter._frame["forward_ms_p50"]
    text = words.plain(chapter, found, **ONE_HEAD)
    assert "predicted" not in text and "wrong" not in text


def test_exponentials_are_the_floor_of_small_heads(results_root):
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    flops = 600e12 / (132 * 16 * 1980e6)  # in the time of one exponential
    text = words.exponentials(chapter, roofs("h100-x1"), "h100-x1")
    assert f"$d$ = {flops / 4:.0f} forward and below $d$ = {flops / 10:.0f} backward" in text
    assert "not measured" in words.exponentials(chapter, roofs(""), "h100-x1")


def test_extremes_are_quoted_from_steady_runs_only(results_root, monkeypatch):
    def shaken(case):
        shape = (case.heads, case.seq_len, case.head_dim, case.dtype) == (1, 128, 16, "bf16")
        if shape and case.impl == "sdpa":
            return {
                f"end_to_end_ms_{q}": 1e-3 for q in ("p20", "p50", "p80")
            }  # as if ours took 100 times as long
        return {"end_to_end_ms_p50": 0.2} if shape and case.repeat else {}

    chapter, _ = chapter_of(results_root, monkeypatch, shaken)
    [line] = [x for x in words.findings(chapter, "h100-x1").splitlines() if "SDPA, bf16" in x]
    assert "of 40 shapes" in line and "slower in 1;" in line
    assert "n = 128, d = 16" not in line
    lost = words.losses(chapter, "h100-x1", dtypes=("bf16",))
    assert "PyTorch SDPA at 128" in lost and "×" not in lost  # a loss all the same, but no factor
    assert "In 1 runs" not in (text := words.spread(chapter)) and "In one run" in text


def test_extremes_are_not_quoted_from_even_shapes(results_root, monkeypatch):
    def wide(case):
        if (case.heads, case.seq_len, case.head_dim, case.dtype, case.impl) != (1, 512, 16, "bf16", "sdpa"):
            return {}
        return {"end_to_end_ms_p20": 1e-4, "end_to_end_ms_p50": 1e-3, "end_to_end_ms_p80": 1e3}

    chapter, _ = chapter_of(results_root, monkeypatch, wide)
    [line] = [x for x in words.findings(chapter, "h100-x1").splitlines() if "SDPA, bf16" in x]
    assert "even in " in line and "slower in 0;" in line
    assert "n = 512, d = 16" not in line


def test_only_lengths_where_ours_is_slower_give_the_worst(results_root, monkeypatch):
    def shaken(case):
        if (case.heads, case.head_dim, case.impl) != (16, 128, "sdpa_cudnn") or case.seq_len != 1024:
            return {}
        return {"end_to_end_ms_p20": 1e-3, "end_to_end_ms_p50": 1e-2, "end_to_end_ms_p80": 1e3}

    chapter, _ = chapter_of(results_root, monkeypatch, shaken)
    text = words.losses(chapter, "h100-x1", heads=16, dtypes=("bf16",))
    assert "$d = 128$: SDPA (cuDNN) at 2k–32k (at most 1.43 ×)" in text  # 1 / 0.7, not what 1k reads


def test_the_kernels_that_served_are_counted(results_root, monkeypatch):
    mixed = "split forward, portable backward"
    chapter, _ = chapter_of(
        results_root, monkeypatch,
        lambda c: {"backend": mixed if c.dtype == "fp32" and c.seq_len > 256 else "portable kernels"},
    )  # fmt: skip
    assert f"in fp32 `{mixed}` in 32 and `portable kernels` in 8 of 40 shapes" in words.backends(chapter)


def test_errors_beyond_what_was_predicted_are_called_so(results_root, monkeypatch):
    def errors(case):
        if case.impl not in ("flash_triton", "reference", "sdpa"):
            return {}
        error = {"bf16": 2e-3, "fp32": 1e-6, "tf32": 3e-3 if case.impl == "flash_triton" else 1e-4}[
            case.dtype
        ]
        worse = 1.25 if case.impl == "flash_triton" and case.dtype == "bf16" else 1.0
        return {"error_out": error, "error_grads": error * worse}

    chapter, _ = chapter_of(results_root, monkeypatch, errors)
    text = error_words.accuracy(chapter)
    assert (
        "3,000 times for ours (more than predicted) and 100 times for plain PyTorch (less than predicted)"
        in text
    )
    assert "ours is worse than PyTorch" in text
    assert (
        "holds for fp32" in text
        and "does not for bf16: there the error of ours is the larger for the gradients in 40" in text
    )
    chapter._frame["error_grads"] = 2e-3
    assert "ours is worse than PyTorch" not in error_words.accuracy(chapter)


def test_errors_are_told_apart_by_the_kernels_that_served(results_root, monkeypatch):
    def errors(case):
        if case.dtype != "fp32" or case.impl != "flash_triton":
            return {"error_out": 1e-6, "error_grads": 1e-6}
        split = case.seq_len >= 512
        error = {"error_out": 5e-7 if split else 2e-6, "error_grads": 1e-6}
        return error | {"backend": "split kernels" if split else "portable kernels"}

    chapter, _ = chapter_of(results_root, monkeypatch, errors)
    text = error_words.accuracy(chapter)
    assert (
        "in fp32 (`portable kernels`): output 2.0" in text
        and "in fp32 (`split kernels`): output 0.50" in text
    )
    assert "holds for bf16 and does not for fp32" in text
    assert (
        "the larger for the output in 8 of 36 shapes, at 256 tokens or fewer" in text
    )  # plain's OOM has no error


def test_errors_under_tf32_are_held_against_those_of_fp32(results_root, monkeypatch):
    def errors(case):
        if case.dtype == "bf16" or case.impl not in ("flash_triton", "reference", "sdpa"):
            return {}
        error = 2e-3 if case.dtype == "tf32" and case.impl != "sdpa" else 5e-7
        return {"error_out": error, "error_grads": error}

    chapter, _ = chapter_of(results_root, monkeypatch, errors)
    text = error_words.accuracy(chapter)
    assert "Triton hands them to the tensor cores as they are" in text
    assert (
        "5.0e−7 at most, so in the TF32 rows ours is compared with products that are more accurate." in text
    )
    assert "4,000 times for ours (more than predicted) and 4,000 times for plain" in text


def test_lengths_that_are_no_neighbours_are_not_put_together():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"seq_len": [128, 256, 2048, 4096], "ratio": 2.0, "noise": 0.01})
    assert page.stretches(table) == [("faster", "128–256"), ("faster", "2k–4k")]


def test_peaks_are_counted_in_matrices_above_the_least(results_root, monkeypatch):
    n = 65536
    chapter, _ = chapter_of(
        results_root, monkeypatch,
        lambda c: {"peak_gib": 1.5 + (3 * 2 * c.seq_len**2 / 2**30 if c.impl == "reference" else 0.0)},
    )  # fmt: skip
    text = words.memory(chapter, **ONE_HEAD)
    assert f"At {n} tokens ours peaks at 1.50 GiB" in text
    assert "Above the least of all peaks, 1.50 GiB, plain PyTorch's" in text
    assert "3.0 matrices" in text


def test_the_longest_shapes_are_those_of_one_machine(results_root):
    write_rows(results_root)
    chapter = report.Chapter("flash_bench", measure="no")
    text = words.longest(chapter, machine="h100-x1", heads=16, dtype="bf16")
    assert "ours takes 1.43 times as long as SDPA (cuDNN)" in text
    assert text.count("32k tokens, $d = 128$") == 3
    assert "not measured" in words.longest(chapter, machine="h200-x1", heads=16, dtype="bf16")


def test_a_pair_lies_as_far_apart_whichever_time_is_the_longer(results_root, monkeypatch):
    def halved(case):
        return {"forward_ms_p50": {0: 2.0, 1: 1.0}[case.repeat]} if case.impl == "flash_triton" else {}

    chapter, _ = chapter_of(results_root, monkeypatch, halved)
    assert (page.spread(chapter)["forward"] == 1.0).all()
