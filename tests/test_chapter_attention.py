"""Chapter attention: its grids, what a group's rows hold, the cap and its lifting, its frames, its notebook on whatever
rows there are."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import types
import weakref
from contextlib import nullcontext

import pytest
import step_rows

from cs336_systems import accounting
from cs336_systems.chapters.attention import measure as experiment
from cs336_systems.chapters.attention import show as page
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.measure.clocks.turns import Candidate
from cs336_systems.report.tables import printed
from cs336_systems.store.status import Skip

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

GIB = 2**30


# --------------------------------------------------------------------------------- measuring, on a CPU
@pytest.fixture
def quick(monkeypatch):
    """Three passes instead of a hundred, and a compiler that only traces: rows are tested here, not numbers."""
    for name, value in (("WARMUP", 1), ("STEPS", 3), ("ROUNDS", 2)):
        monkeypatch.setattr(experiment, name, value)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(peers, "cpp_compiler", lambda: "/usr/bin/c++")
    peers.build.cache_clear()


def group(dtype="fp32", cap_gib=0, seq_len=32, impls=("reference", "reference_compiled", "flash_triton")):
    return [experiment.Case(16, seq_len, dtype, cap_gib, impl) for impl in impls]


@without_gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_group_fills_its_columns(quick, dtype):
    cases = [*group(dtype), experiment.Case(16, 32, dtype, 0, "reference", 1)]
    plain, compiled, flash, again = experiment.run_group(cases)
    assert flash["status"] == "skipped: needs a CUDA device"  # its interpreter is never timed
    for metrics in (plain, compiled, again):
        assert "status" not in metrics and "failed_in" not in metrics
        assert set(metrics) <= set(experiment.TABLE.metrics)
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
    build = peers.build
    monkeypatch.setattr(peers, "build", lambda impl, *rest: build("reference", *rest))
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
    if peers.cpp_compiler() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(experiment, "STEPS", 3)
    [metrics] = experiment.run_group(group(impls=("reference_compiled",)))
    assert "status" not in metrics and metrics["graphs"] == 1


def test_recompiling_is_an_error_while_times_are_taken(quick):
    function = peers.build("reference_compiled", False, "cpu", 16).apply
    x = torch.randn(2, 16, 16)
    torch._dynamo.reset()
    function(x, x, x)
    with experiment._no_recompiling():
        function(x, x, x)
        with pytest.raises(RuntimeError, match="recompile"):
            function(*[torch.randn(2, 17, 16)] * 3)


def test_without_a_compiler_the_row_says_so(quick, monkeypatch):
    peers.build.cache_clear()
    monkeypatch.setattr(peers, "cpp_compiler", lambda: None)
    with pytest.raises(Skip, match=r"^needs a C\+\+ compiler$"):
        peers.build("reference_compiled", False, "cpu", 16)
    monkeypatch.setattr(peers, "has_module", lambda name: False)
    with pytest.raises(Skip, match=r"^needs triton$"):
        peers.build("reference_compiled", False, "cuda", 16)


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
def test_a_case_that_fails_or_does_not_fit_leaves_the_others_measured(quick, monkeypatch, capsys, part):
    build = peers.build

    def failing(impl, *rest):
        fails = peers.Attention(lambda q, k, v: FailsIn.apply(q, k, v, part), "eager")
        return fails if impl == "reference" else build(impl, *rest)

    monkeypatch.setattr(peers, "build", failing)
    plain, unknown, fine = experiment.run_group(group(impls=("reference", "warp", "reference_compiled")))
    assert plain["status"] == "oom" and plain["failed_in"] == part and "forward_ms_p50" not in plain
    assert unknown["status"].startswith("error: ValueError: unknown impl 'warp'; allowed: ")
    assert "Traceback" in capsys.readouterr().err
    assert "status" not in fine and fine["backward_ms_p50"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_between_steps_nothing_is_kept(monkeypatch, fails):
    inputs = [torch.randn(experiment.BATCH, 32, 16, requires_grad=True) for _ in range(3)]
    outputs, build = [], peers.build("reference", False, "cpu", 32).apply

    def kept(q, k, v):
        o = FailsIn.apply(q, k, v, "backward") if fails else build(q, k, v)
        outputs.append(weakref.ref(o))
        return o

    monkeypatch.setattr(peers, "build", lambda *rest: peers.Attention(kept, "eager"))
    one = Candidate(group(impls=("reference",))[0])
    with contextlib.suppress(torch.OutOfMemoryError):
        experiment._try_out(one, inputs, torch.randn(experiment.BATCH, 32, 16), "cpu")
    gc.collect()
    assert one.metrics == ({"failed_in": "backward"} if fails else {})
    assert len(outputs) == (1 if fails else 2) and (
        fails or not any(output() is not None for output in outputs)
    )
    assert all(x.grad is None for x in inputs)


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


def test_the_cap_is_a_share_of_the_gpu_and_is_lifted_also_after_a_failure(eighty_gib):
    with experiment.capped(0, "cuda"):
        assert eighty_gib == []
    for error in (None, torch.OutOfMemoryError("CUDA out of memory")):
        eighty_gib.clear()
        with pytest.raises(type(error)) if error else nullcontext(), experiment.capped(24, "cuda"):
            assert eighty_gib == [24 / 80]
            if error:
                raise error
        assert eighty_gib == [24 / 80, 1.0]
    eighty_gib.clear()
    with pytest.raises(Skip, match=r"^needs a GPU with more than 80 GiB$"), experiment.capped(80, "cuda"):
        pass
    assert eighty_gib == []


# --------------------------------------------------------------------------------- on a GPU
def form(case, kernels="portable"):
    if kernels in ("hopper", "split"):
        return f"flash_{kernels}"
    return {"reference": "reference", "reference_compiled": "compiled", "flash_triton": "flash"}[case.impl]


def predicted(case, kernels="portable"):
    """GiB before the backward pass, and at the peak."""
    shape = (experiment.BATCH, case.seq_len, case.seq_len, case.head_dim, page.BYTES[case.dtype])
    moments = accounting.attention_moments(*shape, form(case, kernels))
    alive = {moment: sum(tensors.values()) / GIB for moment, tensors in moments.items()}
    return alive[accounting.BEFORE_BACKWARD], max(alive.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_on_a_gpu_is_that_of_the_closed_form(monkeypatch, dtype):
    monkeypatch.setattr(experiment, "STEPS", 3)
    gc.collect()  # what earlier tests left would count as workspace, and be gone later
    cases = [experiment.Case(64, 2048, dtype, 0, impl) for impl in experiment.IMPLEMENTATIONS]
    for case, metrics in zip(cases, experiment.run_group(cases), strict=True):
        assert "status" not in metrics
        before, peak = (
            metrics[name] - metrics["workspace_gib"] for name in ("before_backward_gib", "peak_gib")
        )
        least, most = predicted(case, metrics.get("backward_kernels", "portable"))
        assert before == pytest.approx(least, rel=0.01)
        if case.impl == "reference_compiled":  # what the compiler does with its buffers may change
            assert least < peak <= predicted(cases[0])[1]
        else:
            assert peak == pytest.approx(most, rel=0.01)


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


# --------------------------------------------------------------------------------- the frames
ROOFS = {"x": Roofs(tflops={"fp32": 50.0, "tf32": 400.0, "bf16": 600.0}, tb_per_s=4.0)}


rows = functools.partial(
    step_rows.frame, experiment.TABLE, head_dim=16, seq_len=16384, dtype="fp32", cap_gib=0, impl="reference",
    workspace_gib=0.0625,
)  # fmt: skip


def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    if case.cap_gib or case.impl == "flash_triton":
        return {"status": "skipped: needs a CUDA device"}
    return {"forward_ms_p50": 7.0, "backward_ms_p50": 8.0}


def test_times_have_a_line_for_each_pass_and_leave_out_what_is_not_plain():
    found = page.times(rows(
        {"forward_ms_p50": 2.0, "backward_ms_p50": 4.0}, {"seq_len": 256, "forward_ms_p50": 1.0},
        {"cap_gib": 24, "status": "oom"}, {"repeat": 1}, {"impl": "flash_triton"},
        {"dtype": "bf16", "status": "error: x"},
    ))  # fmt: skip
    assert found[["dtype", "pass"]].to_numpy().tolist() == list(
        map(list, itertools.product(("fp32", "bf16"), ("forward", "backward")))
    )
    assert found.loc[0, [256, 16384]].tolist() == [1.0, 2.0] and found.loc[1, 16384] == 4.0
    assert printed(found)[16384].tolist() == ["2.00", "4.00", "error", "error"]


def test_memory_before_backward_says_what_ran_out_whatever_it_held():
    found = page.before_backward(rows(
        {"before_backward_gib": 8.1}, {"cap_gib": 24, "before_backward_gib": 8.1, "status": "oom"},
        {"cap_gib": 24, "seq_len": 8192, "before_backward_gib": 2.0},
    ))  # fmt: skip
    assert found["cap, GiB"].tolist() == ["none", 24] and list(found.columns[-2:]) == [16384, 8192]
    assert printed(found)[16384].tolist() == ["8.10", "OOM"] and found.loc[1, 8192] == 2.0


def test_moments_add_up_to_the_closed_forms():
    found = page.moments(16, 16384, "fp32").set_index("when")
    assert found["matrices"].max() == 4 and found.loc["before backward", "matrices"] == 1
    assert found["all tensors, GiB"].max() * GIB == accounting.attention_peak_bytes(8, 16384, 16384, 16, 4)
    assert page.matrix_gib(16384, "fp32") == 8


def test_the_longest_sequence_fits_and_the_next_one_does_not():
    n = page.longest(24, 16, "fp32")
    peaks = [accounting.attention_peak_bytes(8, m, m, 16, 4) / GIB for m in (n, n + 1)]
    assert peaks[0] <= 24 < peaks[1]
    assert page.longest(24, 16, "fp32", "reference_compiled") / n == pytest.approx(2**0.5, rel=1e-3)


def test_peaks_stand_beside_their_predictions_and_the_cap():
    given = rows(
        {"before_backward_gib": 8.1, "peak_gib": 32.1}, {"cap_gib": 24, "peak_gib": 16.1, "status": "oom"},
        {"impl": "flash_triton", "peak_gib": 0.1, "backward_kernels": "split"},
    )  # fmt: skip
    found = page.peaks(given, 16, 16384, "fp32", 24)
    assert found.loc[0, "peak, predicted"] == pytest.approx(32.109, rel=1e-4) and found.loc[0, "peak"] == 32.1
    assert found.loc[0, "before, predicted"] == pytest.approx(8.1016, rel=1e-4)
    assert printed(found)["peak, cap 24 GiB"].iloc[0] == "OOM" and math.isnan(
        found.loc[1, "peak, cap 24 GiB"]
    )
    assert page.misses(given).max() == pytest.approx(1 - 0.1 / found.loc[1, "peak, predicted"])
    assert page.misses(given[:0]).empty


def test_floors_are_sums_over_kernels_at_the_machines_roofs():
    found = page.floors(rows(
        {"forward_ms_p50": 24.0, "head_dim": 64},
        {"impl": "flash_triton", "head_dim": 64, "forward_kernels": "portable"},
        {"machine": "unknown", "forward_ms_p50": 1.0}, {"cap_gib": 24},
    ), ROOFS)  # fmt: skip
    assert len(found) == 6 and found.loc[found["machine"] == "unknown", "predicted, ms"].isna().all()
    gemms, between = 2 * 2 * 8 * 16384**2 * 64 / 50e9, 4 * 8 * GIB / 4e9
    assert found.loc[0, "GEMMs, ms"] == pytest.approx(gemms) and found.loc[
        0, "softmax and scaling, ms"
    ] == pytest.approx(between)
    assert found.loc[0, "ratio"] == pytest.approx(24 / (gemms + between))
    # ours multiplies in fp32 on tensor cores: three products in TF32 for one
    assert found.loc[2, "predicted, ms"] == pytest.approx(gemms * 50 / (400 / 3), rel=1e-3)


def test_ours_stands_beside_plain_attention():
    found = page.without_scores(rows(
        {"forward_ms_p50": 6.0, "backward_ms_p50": 8.0}, {"impl": "flash_triton", "forward_ms_p50": 2.0},
        {"dtype": "bf16", "forward_ms_p50": 1.0}, {"seq_len": 256, "forward_ms_p50": 9.0},
    ), 16384)  # fmt: skip
    assert found["dtype"].tolist() == ["fp32", "bf16"] and found.loc[0, "F, ×"] == 3.0
    assert found.loc[0, "plain B, ms"] == 8.0 and found[["B, ×"]].isna().all(axis=None)
    two_runs = page.without_scores(rows(
        {"forward_ms_p50": 6.0}, {"impl": "flash_triton", "forward_ms_p50": 2.0, "run": "s"}
    ), 16384)  # fmt: skip
    assert two_runs["ours F, ms"].tolist() == [2.0] and two_runs["F, ×"].isna().all()
