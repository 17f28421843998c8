"""Chapter attention: its grids, what a group's rows hold, the cap and its lifting, its page with and without rows."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import types

import pytest
from notebook_checks import shown_by

from cs336_systems import accounting, experiments, report
from cs336_systems.experiments import attention as experiment
from cs336_systems.measure import rows as store
from cs336_systems.measure.code import code_digest, code_digests
from cs336_systems.report.pages import attention as page
from cs336_systems.report.pages import attention_figures as drawn
from cs336_systems.report.pages import attention_kernel_words as kernels
from cs336_systems.report.pages import attention_time_words as times
from cs336_systems.report.pages import attention_words as words
from cs336_systems.report.roofs import Roofs, roofs

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

GIB = 2**30
HANDOUT = {"head_dim": [16, 32, 64, 128], "seq_len": [256, 1024, 4096, 8192, 16384]}
SETTINGS = [("fp32", 0), ("fp32", 24), ("bf16", 0)]


# --------------------------------------------------------------------------------- grids
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_every_case_is_there_once_and_every_group_has_one_pair(preset):
    cases = experiment.grid(preset)
    assert len(set(cases)) == len(cases)
    assert {c.dtype for c in cases} <= set(experiment.DTYPES)
    assert {c.impl for c in cases} == set(experiment.IMPLEMENTATIONS)
    for group in store.groups(experiment, cases):
        [again] = [c for c in group if c.repeat == 1]
        assert dataclasses.replace(again, repeat=0) in group
        assert 0 < experiment.estimate_s(group) < 120


def test_full_is_the_grid_of_the_handout_and_its_longest_sequences_under_the_cap():
    cases = set(experiment.grid("full"))
    expected = {
        experiment.Case(d, n, dtype, cap, impl, repeat)
        for d, n, (dtype, cap) in itertools.product(*HANDOUT.values(), SETTINGS)
        if cap == 0 or n >= 8192
        for impl, repeat in [(impl, 0) for impl in experiment.IMPLEMENTATIONS] + [("reference", 1)]
    }
    assert cases == expected


# --------------------------------------------------------------------------------- measuring, on a CPU
@pytest.fixture
def quick(monkeypatch):
    """Three passes instead of a hundred, and a compiler that only traces: rows are tested here, not numbers."""
    for name, value in (("WARMUP", 1), ("STEPS", 3), ("ROUNDS", 2)):
        monkeypatch.setattr(experiment, name, value)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(experiment, "cpp_compiler", lambda: "/usr/bin/c++")


def group(dtype="fp32", cap_gib=0, seq_len=32, impls=("reference", "reference_compiled", "flash_triton")):
    return [experiment.Case(16, seq_len, dtype, cap_gib, impl) for impl in impls]


@without_gpu
@pytest.mark.parametrize("dtype", experiment.DTYPES)
def test_a_group_fills_its_columns(quick, dtype):
    cases = [*group(dtype), experiment.Case(16, 32, dtype, 0, "reference", 1)]
    plain, compiled, flash, again = experiment.run_group(cases)
    assert flash["status"] == "skipped: needs a CUDA device"  # its interpreter is never timed
    for metrics in (plain, compiled, again):
        assert "status" not in metrics and "failed_in" not in metrics
        assert set(metrics) <= set(experiment.METRICS)
        assert metrics["matmul_precision"] == "highest"
        assert metrics["workspace_gib"] is None  # memory is only known on a GPU
        for part in experiment.PARTS:
            assert metrics[f"{part}_ms_mean"] > 0 and metrics[f"{part}_ms_p50"] > 0
            assert metrics[f"{part}_ms_std"] >= 0
    assert compiled["graphs"] == 1 and compiled["compile_s"] > 0 and compiled["cache_hits"] >= 0
    assert "graphs" not in plain


@without_gpu
def test_the_kernels_behind_ours_are_named(monkeypatch):
    pytest.importorskip("triton")
    chosen = experiment._function
    monkeypatch.setattr(experiment, "_function", lambda impl, device: chosen("reference", device))
    [found] = experiment.run_group([experiment.Case(16, 64, "fp32", 0, "flash_triton")])
    assert (found["forward_kernels"], found["backward_kernels"]) == ("portable", "portable")


@without_gpu
def test_one_graph_for_each_shape_however_many_there_are(quick):
    """Dynamo gives a function up after eight shapes: with `fullgraph` that is an error."""
    for seq_len in range(16, 28):
        [metrics] = experiment.run_group(group(seq_len=seq_len, impls=("reference_compiled",)))
        assert "status" not in metrics and metrics["graphs"] == 1


@without_gpu
@pytest.mark.slow
def test_the_real_compiler(monkeypatch):
    if experiment.cpp_compiler() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(experiment, "STEPS", 3)
    [metrics] = experiment.run_group(group(impls=("reference_compiled",)))
    assert "status" not in metrics and metrics["graphs"] == 1


def test_recompiling_is_an_error_while_times_are_taken(quick):
    function = experiment._function("reference_compiled", "cpu")
    x = torch.randn(2, 16, 16)
    torch._dynamo.reset()
    function(x, x, x)
    with experiment._no_recompiling():
        function(x, x, x)
        with pytest.raises(RuntimeError, match="recompile"):
            function(*[torch.randn(2, 17, 16)] * 3)


def test_without_a_compiler_the_row_says_so(quick, monkeypatch):
    from cs336_systems.measure.rows import Skip

    monkeypatch.setattr(experiment, "cpp_compiler", lambda: None)
    with pytest.raises(Skip, match=r"^needs a C\+\+ compiler$"):
        experiment._function("reference_compiled", "cpu")
    monkeypatch.setattr(experiment, "has_module", lambda name: False)
    with pytest.raises(Skip, match=r"^needs triton$"):
        experiment._function("reference_compiled", "cuda")


class FailsIn(torch.autograd.Function):
    """Runs out of memory in its forward or its backward pass, after it has saved something."""

    @staticmethod
    def forward(ctx, q, k, v, part):
        if part == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory")
        ctx.save_for_backward(torch.ones(8, 64, 64))
        return q.clone()

    @staticmethod
    def backward(ctx, grad_o):
        raise torch.OutOfMemoryError("CUDA out of memory")


@without_gpu
@pytest.mark.parametrize("part", experiment.PARTS)
def test_one_case_out_of_memory_leaves_the_others_measured(quick, monkeypatch, part):
    chosen = experiment._function

    def function(impl, device):
        failing = lambda q, k, v: FailsIn.apply(q, k, v, part)
        return failing if impl == "reference" else chosen(impl, device)

    monkeypatch.setattr(experiment, "_function", function)
    plain, compiled = experiment.run_group(group(impls=("reference", "reference_compiled")))
    assert plain["status"] == "oom" and plain["failed_in"] == part
    assert "forward_ms_p50" not in plain
    assert "status" not in compiled and compiled["backward_ms_p50"] > 0


def test_inputs_that_do_not_fit_are_rows_too(quick, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randn", full)
    if torch.cuda.is_available():
        monkeypatch.setattr(experiment, "_workspace_gib", lambda: 0.0)
    assert [row["status"] for row in experiment.run_group(group())] == ["oom"] * 3


@without_gpu
def test_another_failure_is_a_row_too(quick, capsys):
    unknown, fine = experiment.run_group(group(impls=("warp", "reference")))
    assert unknown["status"].startswith("error: ValueError: unknown impl 'warp'; allowed: reference, ")
    assert "status" not in fine
    assert "Traceback" in capsys.readouterr().err


def candidate(metrics, impl="reference"):
    shape = (experiment.BATCH, 32, 16)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    found = experiment._Candidate(group(impls=(impl,))[0], metrics, inputs, torch.randn(shape))
    found.apply = experiment._function(impl, "cpu")
    return found


def test_between_steps_nothing_is_kept():
    one = candidate({})
    one.forward()
    output = one.output
    one.backward()
    assert all(x.grad is not None for x in one.inputs)
    with pytest.raises(RuntimeError, match="second time"):  # the graph is freed, and P with it
        output.backward(one.grad_o)
    one.forget()
    assert one.output is None
    assert all(x.grad is None for x in one.inputs)


def test_a_failed_step_keeps_nothing_and_says_where(monkeypatch):
    metrics = {}
    one = candidate(metrics)
    monkeypatch.setattr(
        experiment, "_function", lambda impl, device: lambda q, k, v: FailsIn.apply(q, k, v, "backward")
    )
    one.try_out()
    assert metrics == {"failed_in": "backward", "status": "oom"}
    assert one.output is None


def test_precision_is_left_as_it_was(quick):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        experiment.run_group(group(impls=("reference",)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_unknown_values_are_named():
    with pytest.raises(ValueError, match=r"'fp8'; allowed: fp32, bf16"):
        experiment.run_group(group("fp8"))
    with pytest.raises(ValueError, match=r"'warp'; allowed: reference, reference_compiled, flash_triton"):
        experiment._function("warp", "cpu")
    with pytest.raises(ValueError, match=r"cap_gib=-1; allowed: 0 \(the whole GPU\)"):
        experiment.run_group(group(cap_gib=-1))


# --------------------------------------------------------------------------------- the cap
@pytest.fixture
def eighty_gib(monkeypatch):
    """A make-believe GPU of 80 GiB; the list of the fractions that were set."""
    fractions = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=80 * GIB)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    return fractions


def test_the_cap_is_a_share_of_the_gpu_and_is_lifted(eighty_gib):
    with experiment.capped(24, "cuda"):
        assert eighty_gib == [24 / 80]
    assert eighty_gib == [24 / 80, 1.0]


def test_the_cap_is_lifted_after_a_failure(eighty_gib):
    with pytest.raises(torch.OutOfMemoryError), experiment.capped(24, "cuda"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert eighty_gib[-1] == 1.0


def test_no_cap_sets_nothing(eighty_gib):
    with experiment.capped(0, "cuda"):
        pass
    assert eighty_gib == []


def test_a_gpu_below_the_cap_is_skipped(eighty_gib):
    from cs336_systems.measure.rows import Skip

    with pytest.raises(Skip, match=r"^needs a GPU with more than 80 GiB$"), experiment.capped(80, "cuda"):
        pass
    assert eighty_gib == []


@without_gpu
def test_a_cpu_has_no_cap(quick):
    assert experiment.run_group(group(cap_gib=24)) == [{"status": "skipped: needs a CUDA device"}] * 3


# --------------------------------------------------------------------------------- on a GPU
def form(case, kernels="portable"):
    if kernels in ("hopper", "split"):
        return f"flash_{kernels}"
    return {"reference": "reference", "reference_compiled": "compiled", "flash_triton": "flash"}[case.impl]


def predicted(case, what, kernels="portable"):
    shape = (experiment.BATCH, case.seq_len, case.seq_len, case.head_dim, page.BYTES[case.dtype])
    return getattr(accounting, f"attention_{what}_bytes")(*shape, form(case, kernels)) / GIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", experiment.DTYPES)
def test_memory_on_a_gpu_is_that_of_the_closed_form(monkeypatch, dtype):
    monkeypatch.setattr(experiment, "STEPS", 3)
    gc.collect()  # what earlier tests left would count as workspace, and be gone later
    cases = [experiment.Case(64, 2048, dtype, 0, impl) for impl in experiment.IMPLEMENTATIONS]
    for case, metrics in zip(cases, experiment.run_group(cases), strict=True):
        assert "status" not in metrics
        before, peak = (
            metrics[name] - metrics["workspace_gib"] for name in ("before_backward_gib", "peak_gib")
        )
        assert before == pytest.approx(predicted(case, "before_backward"), rel=0.01)
        if (
            case.impl == "reference_compiled"
        ):  # what a version of the compiler does with its buffers may change
            assert predicted(case, "before_backward") < peak <= predicted(cases[0], "peak")
        else:
            kernels = metrics.get("backward_kernels", "portable")
            assert peak == pytest.approx(predicted(case, "peak", kernels), rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_under_a_cap_plain_attention_runs_out_and_the_next_case_runs(monkeypatch):
    monkeypatch.setattr(experiment, "STEPS", 3)
    torch.cuda.empty_cache()
    cases = [experiment.Case(16, 3072, "fp32", 1, impl) for impl in ("reference", "flash_triton")]
    plain, flash = experiment.run_group(
        cases
    )  # forward holds two matrices of 0.28 GiB, backward would hold four
    assert plain["status"] == "oom" and plain["failed_in"] == "backward"
    assert plain["before_backward_gib"] > 0.28
    assert "status" not in flash and flash["backward_ms_p50"] > 0
    x = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")  # the cap is lifted
    del x
    torch.cuda.empty_cache()


# --------------------------------------------------------------------------------- the page
ROOFS = Roofs(tflops={"fp32": 50.0, "tf32": 400.0, "bf16": 700.0}, tb_per_s=3.0)
WORKSPACE, MEMORY = 0.0625, 79.2


def kernels_of(case, part):
    """Mixed, so that one head dimension has both: the backward pass of short sequences is the portable kernels'."""
    served = case.impl == "flash_triton" and case.dtype == "bf16" and case.head_dim > 32
    return "hopper" if served and (part == "forward" or case.seq_len > 1024) else "portable"


def metrics_of(case):
    """Rows of a made-up GPU: the closed forms' memory, floors and launches in its times."""
    shape = (experiment.BATCH, case.seq_len, case.seq_len, case.head_dim, page.BYTES[case.dtype])
    kernels = kernels_of(case, "backward")
    out = {"workspace_gib": WORKSPACE, "matmul_precision": "highest"}
    if case.impl == "flash_triton":
        out |= {f"{part}_kernels": kernels_of(case, part) for part in page.PARTS}
    out["before_backward_gib"] = WORKSPACE + predicted(case, "before_backward", kernels)
    out["peak_gib"] = WORKSPACE + predicted(case, "peak", kernels)
    if out["peak_gib"] > (case.cap_gib or MEMORY):
        reached = accounting.attention_moments(*shape, form(case, kernels))["dP = dO Vᵀ"]
        return out | {
            "status": "oom",
            "failed_in": "backward",
            "peak_gib": WORKSPACE + sum(reached.values()) / GIB,
        }
    if case.impl == "reference_compiled":
        out |= {"graphs": 1, "compile_s": 3.5, "cache_hits": 3 if case.cap_gib else 0}
    for part in page.PARTS:
        steps = accounting.attention_kernels(*shape, form(case, kernels_of(case, part)), part)
        ms = 0.02 * len(steps) + 1.1 * accounting.kernels_ms(steps, ROOFS.tflops[case.dtype], ROOFS.tb_per_s)
        ms *= 1.01 if case.repeat else 1.0
        out |= {f"{part}_ms_mean": ms, f"{part}_ms_std": 0.01 * ms, f"{part}_ms_p50": ms}
    return out | {"status": "ok"}


def metrics_on_a_cpu(case):
    if case.cap_gib or case.impl == "flash_triton":
        return {"status": "skipped: needs a CUDA device"}
    memory = ("workspace_gib", "before_backward_gib", "peak_gib")
    return metrics_of(case) | dict.fromkeys(memory)


def write_rows(root, machine="h100-x1", keep=lambda case: True, change=lambda case, metrics: metrics):
    """A whole machine of made-up rows, with roofs and a data sheet; `change` makes other metrics of a case's."""
    on_a_cpu = machine.startswith("cpu-")
    preset, metrics = ("smoke", metrics_on_a_cpu) if on_a_cpu else ("full", metrics_of)
    origin, code = {"time_utc": "2025-03-04T05:06:07Z", "env": "abcd"}, code_digests(experiment)
    rows = [
        dataclasses.asdict(c)
        | change(c, metrics(c))
        | {"run": f"{c.cap_gib}-{c.dtype}-{c.head_dim}-{c.seq_len}", "code": code(c)}
        | origin
        for c in experiment.grid(preset)
        if keep(c)
    ]
    store.write(experiment, machine, rows, root)
    hardware = experiments.load("hardware")
    origin["code"] = code_digest(hardware)
    rows = [
        dataclasses.asdict(c)
        | {
            "status": "ok",
            "run": c.kind,
            "tflops": ROOFS.tflops.get(c.dtype, 1.0),
            "tb_per_s": ROOFS.tb_per_s,
            "us_per_launch": 7.5,
            "sm_mhz": 1980.0,
        }
        | origin
        for c in hardware.grid("full")
    ]
    store.write(hardware, machine, rows, root)
    gpu = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1, "sms": 132, "gpu_memory_gib": MEMORY}
    store.write_environment(machine, root, {"abcd": gpu | {"torch": "2.13.0", "triton": "3.7.1"}})
    (root / "reference.json").write_text(json.dumps({"attention": [machine], "hardware": [machine]}))


run_notebook = functools.partial(shown_by, "attention")


def test_the_page_without_rows_says_not_measured(results_root, project_root, monkeypatch):
    text = run_notebook(project_root, monkeypatch)
    assert text.count("not measured") > 8
    assert "nan" not in text
    assert "32.2" in text  # what is predicted needs no rows: four matrices of 8 GiB, and the rest


def test_the_page_with_rows_says_what_they_say(results_root, project_root, monkeypatch):
    write_rows(results_root)
    text = run_notebook(project_root, monkeypatch)
    assert "Measured on `h100-x1`" in text
    assert "OOM in backward" in text
    assert "nan" not in text
    assert "not measured" not in text


def test_the_page_with_few_rows_is_built_as_well(results_root, project_root, monkeypatch):
    write_rows(results_root, keep=lambda c: c.dtype == "bf16" and c.seq_len < 4096 and c.impl == "reference")
    text = run_notebook(project_root, monkeypatch)
    assert "not measured" in text
    assert "nan" not in text


def test_the_page_of_a_cpu_has_times_but_no_memory(results_root, project_root, monkeypatch):
    write_rows(results_root, machine="cpu-2")
    text = run_notebook(project_root, monkeypatch)
    assert "Measured on `cpu-2`" in text
    assert "On the CPU none of" in text
    assert "The exponent of what is saved for backward: not measured." in text
    assert "skipped" in text and "nan" not in text


@pytest.fixture
def chapter(results_root):
    write_rows(results_root)
    return report.Chapter("attention", measure="no")


def test_predictions_stand_beside_what_was_measured(chapter):
    frame = page.with_predictions(
        chapter, roofs("h100-x1"), dtype="fp32", cap_gib=0, seq_len=16384, head_dim=64
    )
    plain, compiled, flash = (frame[frame["impl"] == impl].iloc[0] for impl in experiment.IMPLEMENTATIONS)
    assert plain["matrix_gib"] == 8
    assert plain["predicted_peak_gib"] == pytest.approx(plain["peak_gib"], rel=1e-5)
    assert [r["peak_matrices"] for r in (plain, compiled, flash)] == pytest.approx([4, 2, 0], abs=1e-4)
    assert [r["before_matrices"] for r in (plain, compiled, flash)] == pytest.approx([1, 1, 0], abs=1e-4)
    # 4 products of 2·8·n²·64 FLOPs would be faster than their bytes on tensor cores, but not here
    forward = 2 * (2 * 8 * 16384**2 * 64) / 50e9 + 4 * 8 * GIB / 3e9
    assert plain["forward_floor_ms"] == pytest.approx(forward, rel=1e-6)


def test_our_fp32_floor_knows_the_tensor_cores():
    assert page.product_tflops(ROOFS, "fp32", "flash_triton") == pytest.approx(400 / 3)
    assert page.product_tflops(Roofs(tflops={"bf16": 900.0}), "fp32", "flash_triton") == 150
    assert page.product_tflops(ROOFS, "fp32", "reference") == 50
    assert page.product_tflops(Roofs(), "fp32", "flash_triton") is None


def test_what_fails_and_its_accounting(chapter):
    text = words.what_fails(chapter, "h100-x1")
    assert "On the whole GPU none of 120 cases runs out of memory" in text
    assert "Under the cap of 24 GiB 4 of 24 cases run out: plain PyTorch in fp32 at $n = 16384$" in text
    expected = "under the cap of 24 GiB plain PyTorch in fp32 at $n = 16384$, $d$ = 16, 32, 64, 128."
    assert words.should_fail(chapter, "h100-x1").endswith(f"on the whole GPU (79.2 GiB) nothing; {expected}")
    failed = words.smallest_failure(chapter, "h100-x1")
    assert (failed["head_dim"], failed["cap_gib"]) == (16, 24)
    text = words.accounting_of(chapter, "h100-x1")
    total = 4 * 8 * 16384**2 * 4 + 6 * 8 * 16384 * 16 * 4
    assert f"{total:,}".replace(",", "{,}") in text and "more than the 24" in text
    assert "4 matrices of scores (P, dP, P∘dP, dS) and 6 tensors like $Q$" in text
    assert "16.11 GiB, what “dP = dO Vᵀ” holds. Then the backward pass failed: 7.89 GiB were left" in text
    assert "Under the cap" in words.answer(chapter, "h100-x1", 16384, 64, "fp32")
    table = page.out_of_memory(chapter, "h100-x1")
    assert len(table) == 4 * 3
    fitted = table[table["24 GiB"] != "OOM in backward"]
    assert (fitted["predicted"] == fitted["24 GiB"]).all()  # both with workspaces
    assert set(table[table["implementation"] == "plain PyTorch"]["24 GiB"]) == {"OOM in backward"}


def test_the_longest_that_fits_is_the_longest_that_fits(chapter):
    for impl in experiment.IMPLEMENTATIONS:
        n = page.longest_that_fits(chapter, 24, 64, "fp32", impl)
        peaks = [
            accounting.attention_peak_bytes(
                8, length, length, 64, 4, page.closed_form(chapter, impl, "fp32", length, 64)
            )
            for length in (n, n + 1)
        ]
        assert peaks[0] <= 24 * GIB < peaks[1]


def test_exponents_come_from_the_rows(chapter):
    text = words.exponents(chapter, "h100-x1", 64, "fp32")
    assert "$n^{2.00}$ for plain PyTorch, $n^{2.00}$ for compiled PyTorch" in text
    assert "$n^{1.00}$ for ours, Triton" in text


def test_nothing_is_claimed_below_the_spread(chapter):
    assert page.spread(chapter)["forward"].max() == pytest.approx(0.01, rel=1e-3)
    table = page.speedups(
        chapter, roofs("h100-x1"), "reference_compiled", "backward", dtype="bf16", cap_gib=0
    )
    assert len(table) == 20 and (table["noise"] >= 0.0099).all()
    line = table[(table["seq_len"] == 16384) & (table["head_dim"] == 64)].iloc[0]
    assert line["word"] == "faster"
    assert line["ratio"] == pytest.approx(line["predicted"], rel=0.01)
    assert line["predicted"] == pytest.approx(12 / 7, rel=0.02)  # bytes decide


@pytest.fixture
def changed(results_root):
    """A function: the chapter of a machine whose made-up times are multiplied, by case and pass."""

    def make(factor):
        def change(case, metrics):
            slower = {
                f"{part}_ms_{what}": metrics[f"{part}_ms_{what}"] * factor(case, part)
                for part in page.PARTS
                for what in ("mean", "std", "p50")
                if f"{part}_ms_{what}" in metrics
            }
            return metrics | slower

        write_rows(results_root, change=change)
        return report.Chapter("attention", measure="no"), roofs("h100-x1")

    return make


def test_the_noise_of_a_length_is_that_of_its_worst_pair(changed):
    one = experiment.Case(128, 1024, "bf16", 0, "reference", repeat=1)
    chapter, roof = changed(lambda case, part: 1.6 if (case, part) == (one, "forward") else 1)
    noise = page.noise(chapter, "h100-x1")
    assert noise.loc[1024, "forward"] == pytest.approx(0.616, rel=1e-3)
    assert noise.loc[256, "forward"] == noise.loc[1024, "forward"]  # no quieter than a longer one
    assert noise.loc[4096:, "forward"].max() == pytest.approx(0.01, rel=1e-3)
    assert page.apart(chapter, "h100-x1").loc[256, "forward"] == pytest.approx(0.01, rel=1e-3)
    assert "62 % and 1.0 % at $n = 1024$" in times.spread(chapter, "h100-x1")
    table = page.speedups(chapter, roof, "reference_compiled", "forward", dtype="fp32", cap_gib=0)
    said = table.groupby("seq_len")["word"].unique().map(list)
    assert said[1024] == ["even"] and said[4096] == ["faster"]
    figure = drawn.speedup_figure(
        chapter, roof, "reference_compiled", ("fp32",), machine="h100-x1", cap_gib=0
    )
    assert sum("(" in cell.get_text() for cell in figure.axes[0].texts) == 8


def test_a_gain_that_the_floors_do_not_allow_is_named(changed):
    def softmax_is_slow(case, part):
        slow = case.impl == "reference" and case.dtype == "bf16" and case.seq_len == 8192
        return 1.5 if slow and part == "forward" else 1

    chapter, roof = changed(softmax_is_slow)
    text = times.beyond(chapter, roof, "h100-x1")
    assert "more than predicted: forward in bf16 2.2" in text and "instead of 1.49 to 1.50" in text
    assert "(n = 8k at every d). If the products" in text and "in fp32" not in text
    assert "times its floor at n = 8k, and at least 1.1 times at n = 16k." in text
    # what the compiled one does between its products moves two matrices, what the plain one does four
    table = page.speedups(chapter, roof, page.COMPILED, "forward", machine="h100-x1", dtype="bf16", cap_gib=0)
    row = table[(table["seq_len"] == 8192) & (table["head_dim"] == 16)]
    matrix_ms = 8 * 8192**2 * 2 / 3e9
    expected = (row["ms_base"] - row["ms"] + 2 * matrix_ms) / (4 * matrix_ms)
    assert times._between(chapter, roof, row, "forward") == pytest.approx(list(expected))
    assert 1.8 < expected.iloc[0] < 2.1
    assert "that this is the reason is a guess" in text


def test_a_small_gain_at_the_longest_does_not_hide_what_is_to_be_explained(changed):
    def softmax_is_slow(case, part):
        if case.impl != "reference" or case.dtype != "fp32" or part != "forward":
            return 1
        return {8192: 1.5, 16384: 1.05}.get(case.seq_len, 1)

    text = times.beyond(*changed(softmax_is_slow), "h100-x1")
    assert "(n = 8k, 16k at every d). If the products" in text
    assert "times its floor at n = 8k, and at least" in text and "is a guess" in text


def test_a_gain_is_named_as_soon_as_it_exceeds_the_noise(changed):
    chapter, roof = changed(lambda case, part: 1.05 if case.impl == "reference" and part == "forward" else 1)
    text = times.beyond(chapter, roof, "h100-x1")
    assert "forward in fp32" in text and "forward in bf16" in text and "backward" not in text
    assert "n = 4k, 8k, 16k at every d" in text
    assert "guess" not in text  # the longest sequences gain as much: nothing is to be explained


def test_a_prediction_that_missed_is_called_so(changed, chapter):
    held = times.at_length(chapter, roofs("h100-x1"), page.COMPILED, "h100-x1")
    assert held.endswith("Within the noise or to 1 % all 16 ratios are as predicted.")

    one = (page.COMPILED, "fp32", 32, "forward")
    chapter, roof = changed(
        lambda case, part: 2 if (case.impl, case.dtype, case.head_dim, part) == one else 1
    )
    text = times.at_length(chapter, roof, page.COMPILED, "h100-x1")
    assert "holds, within the noise or to 1 %, for 15 of these 16 ratios (1 smaller, 0 larger)." in text
    assert "It misses by the most forward in fp32 at $d = 32$: 0.7" in text
    assert "plain attention comes nearer to its floor than compiled to its own; the shares" in text
    assert "larger where" not in text


def test_a_ratio_above_its_prediction_is_explained_the_other_way(changed):
    one = (page.OURS, "bf16", 128, "forward")
    chapter, roof = changed(
        lambda case, part: 0.5 if (case.impl, case.dtype, case.head_dim, part) == one else 1
    )
    text = times.at_length(chapter, roof, page.OURS, "h100-x1")
    assert "1 larger)" in text and "larger where ours comes nearer" in text


def test_half_a_percent_over_a_prediction_is_none(changed):
    """However quiet the pairs: the roofs that it was computed from are of another run."""

    def slightly_slower(case, part):
        quiet = 1 / 1.01 if case.repeat else 1
        return quiet * (1.005 if case.impl == "reference" and part == "forward" else 1)

    chapter, roof = changed(slightly_slower)
    assert page.noise(chapter, "h100-x1").max(axis=None) < 1e-6
    assert times.beyond(chapter, roof, "h100-x1") == ""
    assert "1 larger" not in times.at_length(chapter, roof, page.COMPILED, "h100-x1")


def test_a_pair_counts_alike_in_both_directions(changed):
    chapter, _ = changed(lambda case, part: 0.5 if case.repeat and case.seq_len == 4096 else 1)
    assert page.noise(chapter, "h100-x1").loc[4096, "forward"] == pytest.approx(1 / 0.505 - 1, rel=1e-3)


def test_times_under_the_cap_stand_beside_the_pairs(changed):
    chapter, _ = changed(lambda case, part: 1.04 if case.cap_gib else 1)
    text = words.under_the_cap(chapter, "h100-x1")
    assert "of the 20 cases" in text and "at most 4.0 % (in different runs; within a run, A/A" in text
    assert "differ by up to 1.0 %" in text


def test_the_answer_names_the_noise_of_both_halves(changed):
    chapter, roof = changed(lambda case, part: 1.2 if case.repeat and case.seq_len == 256 else 1)
    text = times.answer(chapter, roof, "h100-x1")
    assert "from 4k tokens on (where A/A pairs differ by up to 1.0 %)" in text
    assert text.endswith("below 4k tokens (where A/A pairs differ by up to 21 %).")


def test_means_above_medians_are_slow_steps(results_root):
    def change(case, metrics):
        slow = metrics.get("forward_ms_p50", 0) * (1.3 if case.seq_len == 256 else 1.01)
        return metrics | {"forward_ms_mean": slow} if slow else metrics

    write_rows(results_root, change=change)
    text = times.means(report.Chapter("attention", measure="no"), "h100-x1")
    assert "up to 30 % at $n = 256$, 1.0 % at $n = 1024$" in text and "steps are slow" in text


def test_a_gain_that_the_floors_allow_is_not(chapter):
    assert times.beyond(chapter, roofs("h100-x1"), "h100-x1") == ""


def test_where_ours_loses_it_says_so(changed):
    def slow(case, part):
        return (
            5
            if (case.impl, case.dtype, case.head_dim, part) == ("flash_triton", "fp32", 128, "backward")
            else 1
        )

    chapter, roof = changed(slow)
    text = times.speedup(chapter, roof, page.OURS, "h100-x1")
    assert "backward, fp32: faster in 15 of 20 shapes, even in 0, slower in 5 (every n at d = 128)" in text
    assert "There it saves memory, not time." in kernels.price(chapter, roof, "h100-x1")
    fastest = times.fastest(chapter, roof, "h100-x1")
    assert "- backward, fp32: ours, Triton at $d$ = 16, 32, 64; compiled PyTorch at $d$ = 128." in fastest
    text = kernels.unexplained(chapter, roof, "h100-x1")
    assert "furthest from its floor backward in fp32 at $d = 128$" in text
    assert (
        "backward pass in fp32 at every $d$ and bf16 at $d$ = 16, 32 computes $S$, $P$ and $dP$ twice" in text
    )
    assert "so that 71 % is the most" in text
    assert "In fp32 at every $d$ the two more, at the roof, are less than half of the time" in text


@pytest.mark.parametrize(("factor", "said"), [(1.2, False), (2.4, True)])
def test_two_more_products_are_told_from_what_else_is_missing(changed, factor, said):
    """Above 9/5 of the floor the two products are the smaller part; made-up times are 1.1 floors and launches."""

    def slower(case, part):
        if (case.impl, part) != ("flash_triton", "backward"):
            return 1
        ours, made_up = (page.product_tflops(ROOFS, case.dtype, impl) for impl in (case.impl, "reference"))
        return factor * made_up / ours

    chapter, roof = changed(slower)
    text = kernels.unexplained(chapter, roof, "h100-x1")
    assert "seven products where the floor counts five" in text
    assert ("In each of these the two more, at the roof, are less than half" in text) == said
    assert ("these rows do not take apart" in text) == said


def test_a_backward_pass_that_computes_nothing_twice_is_not_said_to(results_root):
    def hopper(case, metrics):
        return metrics | ({"backward_kernels": "hopper"} if "backward_kernels" in metrics else {})

    write_rows(results_root, change=hopper)
    text = kernels.unexplained(report.Chapter("attention", measure="no"), roofs("h100-x1"), "h100-x1")
    assert "furthest from its floor" in text and "twice" not in text


def test_where_ours_wins_no_price_is_named(chapter):
    assert kernels.price(chapter, roofs("h100-x1"), "h100-x1") == ""


def test_exponentials_are_named_where_they_outweigh_the_floor(chapter):
    text = kernels.unexplained(chapter, roofs("h100-x1"), "h100-x1")
    scores = 8 * 16384**2
    assert f"takes {scores / (132 * 16 * 1980e3):.3f} ms" in text
    assert "forward in bf16 at $d = 16$" in text and "at $d = 64$" not in text


def test_flat_times_are_the_hosts(changed, chapter):
    assert "does not come from the work" not in times.growth(chapter, roofs("h100-x1"), "h100-x1")

    def flat(case, part):
        return 0.3 / metrics_of(case)[f"{part}_ms_p50"] if case.seq_len <= 1024 else 1

    chapter, roof = changed(flat)
    text = times.growth(chapter, roof, "h100-x1")
    assert "by factors of 1.0. So at $n = 256$ most of the time does not come from the work." in text
    assert "0.300 ms at $n = 256$; its 4 launches, at 7.50 µs each, would be 0.0300 ms" in text
    assert "Below 1" not in text
    chapter, roof = changed(lambda case, part: flat(case, part) * (0.8 if case.seq_len == 1024 else 1))
    assert "by factors of 0.80. (Below 1: from run to run" in times.growth(chapter, roof, "h100-x1")


def test_floors_stand_beside_the_times_of_every_shape(chapter):
    table = page.floor_table(chapter, roofs("h100-x1"), "h100-x1", 16384)
    assert list(table["d"]) == [16, 32, 64, 128] * 2
    assert set(table["plain PyTorch F"]) <= {"90 %", "91 %"}
    assert "No median of the grid lies below its floor" in times.floors(chapter, roofs("h100-x1"), "h100-x1")


def test_a_time_below_its_floor_is_not_hidden(changed):
    chapter, roof = changed(lambda case, part: 0.5 if case.seq_len == 1024 else 1)
    assert "medians lie below their floors" in times.floors(chapter, roof, "h100-x1")


def test_the_kernels_that_ran_are_named(chapter):
    assert kernels.served(chapter, "h100-x1").startswith(
        "Our kernels for Hopper ran forward in bf16 (every n at d = 64, 128) and backward in bf16 (n = 4k, 8k, 16k at "
    )


@pytest.mark.parametrize("head_dims", [(16,), (16, 32, 64, 128)])
def test_kernels_that_take_numbers_apart_are_named(results_root, head_dims):
    def change(case, metrics):
        of_ours = case.impl == "flash_triton" and "forward_kernels" in metrics
        if of_ours and case.dtype == "fp32" and case.head_dim in head_dims:
            metrics |= {"forward_kernels": "split", "backward_kernels": "split"}
        return metrics

    write_rows(results_root, change=change)
    text = kernels.served(report.Chapter("attention", measure="no"), "h100-x1")
    where = "every n at d = 16" if head_dims == (16,) else "every n at every d"
    assert (
        f"Those that take fp32 apart into bf16 ran forward in fp32 ({where}) and backward in fp32 ({where})."
        in text
    )
    assert text.startswith("Our kernels for Hopper ran") and text.endswith(
        "All other passes ran our portable ones."
    )


def test_only_compiling_without_a_cache_is_quoted(chapter):
    assert "Compiled cases: 48, each of them exactly one graph" in words.really_compiled(chapter)
    assert "3.50 to 3.50 s" in words.really_compiled(chapter)


@pytest.mark.parametrize(("mib", "said"), [(0, False), (1, True), (3, False)])
def test_memory_beyond_the_closed_form_is_explained_up_to_a_block(results_root, mib, said):
    one = experiment.Case(128, 16384, "bf16", 0, "flash_triton")

    def change(case, metrics):
        return metrics | {"peak_gib": metrics["peak_gib"] + mib / 1024 * (case == one)}

    write_rows(results_root, change=change)
    chapter, roof = report.Chapter("attention", measure="no"), roofs("h100-x1")
    text = words.accuracy(chapter, roof, "h100-x1")
    assert "Rows are rounded to six digits, which alone makes up to 0.00050 %." in text
    where = "by 1.00 MiB at the most (ours, Triton in bf16, $n = 16384$, $d = 128$)"
    assert (f"Of the peaks 1 is higher by more than that, {where}" in text) == said
    assert ("allocator" in text) == said


@pytest.mark.parametrize(
    ("slower", "said"), [(8, ""), (5, " in the 5 of 8 shapes where it is slower"), (4, None)]
)
def test_what_compiled_code_costs_the_host_is_told_where_most_shapes_show_it(changed, slower, said):
    shapes = list(itertools.product(("fp32", "bf16"), HANDOUT["head_dim"]))

    def factor(case, part):
        if (case.impl, case.seq_len, part) != ("reference_compiled", 256, "forward"):
            return 1
        # slower than plain attention, or as fast
        return 2.0 if (case.dtype, case.head_dim) in shapes[:slower] else 4 / 3

    chapter, roof = changed(factor)
    text = times.surplus(chapter, roof, "h100-x1")
    assert (
        (f"longer than a plain one{said}, with one launch fewer" in text) if said is not None else text == ""
    )
