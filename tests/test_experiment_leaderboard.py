"""Chapter leaderboard's tables: their grids, the order of turns, what their rows hold, what is skipped, and what an
error leaves."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from cs336_systems import chapters
from cs336_systems.chapters.leaderboard import counters as leaderboard_counters
from cs336_systems.chapters.leaderboard import first_calls as leaderboard_first_calls
from cs336_systems.chapters.leaderboard import kernels as leaderboard_kernels
from cs336_systems.chapters.leaderboard import ladder as leaderboard_ladder
from cs336_systems.chapters.leaderboard import measure as leaderboard
from cs336_systems.chapters.leaderboard import models as leaderboard_models
from cs336_systems.chapters.leaderboard import shapes as leaderboard_shapes  # fmt: skip
from cs336_systems.chapters.leaderboard import turns as leaderboard_turns
from cs336_systems.chapters.leaderboard.measure import OFFICIAL_MS
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.ladder import steps
from cs336_systems.measure.clocks.turns import Candidate
from cs336_systems.measure.counters import ncu
from cs336_systems.report import build
from cs336_systems.store import measuring, process, selection
from cs336_systems.store import rows as store

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
TABLES = [chapters.load(name) for name in chapters.tables("leaderboard")]
TIMED = (leaderboard.TABLE, leaderboard_kernels.TABLE, leaderboard_ladder.TABLE)
SMALL = {"heads": 2, "seq_len": 128, "head_dim": 32, "is_causal": True, "dtype": "bf16", "part": "forward",
         "leaves": "stacked", "rep_ms": 2, "grad_o": "matrix"}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for table in (leaderboard_kernels, leaderboard_ladder):
        monkeypatch.setattr(table, "KERNEL_MS", 2)


def small(table, *impls, **change):
    fields = {k: v for k, v in (SMALL | change).items() if k in store.case_fields(table)}
    return [table.Case(impl=impl, **fields) for impl in impls]


def measured(table, *impls, **change):
    found = table.run_group(small(table, *impls, **change))
    assert all(set(metrics) <= {*table.metrics, "status"} for metrics in found)
    return found


# ------------------------------------------------------------------------------------------------ grids
@pytest.mark.parametrize("preset", selection.PRESETS)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_short_group_has_one_pair(table, preset):
    for group in store.groups(table, table.grid(preset)):
        if getattr(group[0], "rep_ms", 0) < OFFICIAL_MS:
            [again] = [c for c in group if c.repeat == 1]
            assert dataclasses.replace(again, repeat=0) in group


def test_the_work_is_the_leaderboards():
    cases = leaderboard.grid("full")
    shape = store.case_fields(leaderboard.TABLE)[1:6]
    assert {tuple(getattr(c, f) for f in shape) for c in cases} == {(16, 16384, 64, True, "bf16")}
    official = [c for c in cases if c.rep_ms == 10_000]
    assert {c.impl for c in official} == set(leaderboard.OURS)
    assert all(c.leaves == "stacked" and leaderboard.turns(c) == 1 for c in official)
    others = [c for c in cases if c not in official]
    assert {c.impl for c in others} == {*leaderboard.OURS, *leaderboard.PEERS}
    assert all(leaderboard.turns(c) == 5 for c in others)
    steps_measured = [c for c in leaderboard_ladder.grid("full") if not c.repeat]
    assert [(c.impl, c.part) for c in steps_measured] == [(s.name, s.part) for s in steps.STEPS.values()]
    neighbors = leaderboard_kernels.grid("full")
    shapes = {(c.head_dim, c.is_causal, c.dtype) for c in neighbors}
    beside_fa4 = {(c.head_dim, c.is_causal, c.dtype) for c in neighbors if c.impl == "fa4"}
    alone = {(80, True, "bf16"), (64, True, "fp32"), (128, True, "fp32")}
    assert shapes - beside_fa4 == alone and (64, True, "bf16") in beside_fa4 and len(beside_fa4) == 4
    others = leaderboard_shapes.grid("full")
    assert {leaderboard_shapes.kind_of(c) for c in others} == set(leaderboard_shapes.KINDS)
    assert not any(
        c.is_causal for c in others if c.num_queries != c.num_keys
    )  # whose last query would see what?
    asked = leaderboard_models.grid("full")
    assert {leaderboard_models.kind_of(c) for c in asked} == set(leaderboard_models.KINDS)
    assert {c.impl for c in asked} == set(leaderboard_models.IMPLS)
    assert {leaderboard_models.kind_of(c) for c in asked if c.impl == "flex_compiled"} == set(
        leaderboard_models.KINDS
    )


def test_filters_choose_among_all_tables():
    def chosen(table, **filters):
        return chapters.cases_beyond(table, "full", **filters)

    assert {c.impl for c in chosen(leaderboard.TABLE, impl="fa4,f_hopper")} == {"fa4"}
    assert [c.impl for c in chosen(leaderboard_ladder.TABLE, impl="fa4,f_hopper")] == ["f_hopper"]
    assert chosen(leaderboard_kernels.TABLE, leaves="separate") == leaderboard_kernels.grid("full")
    with pytest.raises(ValueError, match=r"impl=warp is not in the full preset; .*flash_triton.*f_hopper"):
        chosen(leaderboard_counters.TABLE, impl="warp")
    with pytest.raises(ValueError, match=r"unknown parameter 'kind'; the cases have impl.*leaves.*part"):
        chosen(leaderboard.TABLE, kind="ladder")


@pytest.fixture
def measures_nothing(measured_by):
    for table in TABLES:
        found = {"status": "error: bad luck"} if table is leaderboard_kernels.TABLE else {"kernels": "a"}
        measured_by(table, lambda cases, found=found: [found for _ in cases])


def test_a_chapter_measures_all_its_tables(results_root, measures_nothing):
    given = {"machine": "this", "preset": "smoke", "impl": "flash_triton,f_production"}
    chapter = chapters.read("leaderboard", measure="yes", **given)
    with pytest.raises(measuring.MeasurementError, match="leaderboard_kernels ended in an error"):
        chapter.measure()
    counts = {table.experiment.name: len(table.measured()) for table in chapter.tables}
    assert list(counts.values()) == [1, 0, 0, 0, 2, 4, 0]  # the others have other implementations
    assert list(counts) == list(chapters.tables("leaderboard"))
    assert set(chapter.table("ladder").rows()["impl"]) == {"f_production"}
    assert chapter.table("first_calls").rows().empty and chapter.table("first_calls").stale().empty
    assert "1 case." in chapter.provenance() and "4 cases" in chapter.table("counters").provenance()
    assert "7 cases" in chapter.provenance(chapter.table("counters"), chapter.table("ladder"))
    assert chapter.problems() == [] and "ended in an error" in chapter.table("kernels").problems()[0]
    with pytest.raises(ValueError, match="unknown table 'stairs' of leaderboard; allowed: kernels, shapes"):
        chapter.table("stairs")


def test_a_reference_machine_counts_for_all_tables(results_root, tmp_path):
    (results_root / "h200-x1").mkdir()
    (results_root / "reference.json").write_text('{"leaderboard": ["h200-x1"]}')
    chapter = chapters.read("leaderboard")
    assert all(table.machines == ["h200-x1"] for table in chapter.tables)
    assert chapter.on("h100-x1").table("kernels").machines == ["h100-x1"]
    found = build.problems(chapters.tables_of, results_root)
    assert [text.split(":")[0] for text in found] == list(chapters.tables("leaderboard"))


# ------------------------------------------------------------------------------------------------ measuring, on a CPU
@without_gpu
@pytest.mark.parametrize("part", leaderboard_shapes.PARTS)
def test_shapes_on_the_same_tensors(part, monkeypatch):
    for name in ("WARMUP_MS", "REP_MS"):
        monkeypatch.setattr(leaderboard_shapes, name, 1)
    given = (part, 2, 3, 17, 40, 16, False, "fp32")
    impls = ("reference", "flash_torch", "sdpa_flash", "flash_triton")
    *found, ours = leaderboard_shapes.run_group([leaderboard_shapes.Case(impl, *given) for impl in impls])
    flops = {"forward": 2, "backward": 5}[part] * 2 * 6 * 17 * 40 * 16
    for metrics in found:
        assert set(metrics) == set(leaderboard_shapes.TABLE.metrics)
        assert metrics["tflops"] == pytest.approx(flops / metrics["ms_p50"] / 1e9)
        assert metrics["apart"] < 1e-5
    assert ours == {"status": "skipped: needs a CUDA device"}


@without_gpu
def test_a_peer_may_refuse_a_shape_and_ours_may_not(monkeypatch):
    def refuses(q, k, v):
        raise AssertionError("only even lengths")

    monkeypatch.setattr(leaderboard_shapes.peers, "build", lambda *_: peers.Attention(refuses, "eager"))
    given = ("forward", 1, 1, 17, 17, 16, False, "fp32")
    theirs, ours = leaderboard_shapes.run_group(
        [leaderboard_shapes.Case(impl, *given) for impl in ("sdpa_flash", "flash_triton")]
    )
    assert theirs["status"] == "skipped: AssertionError: only even lengths"
    assert ours["status"].startswith("error: ") and "only even lengths" in ours["status"]


@without_gpu
@pytest.mark.parametrize("part", leaderboard_models.PARTS)
def test_what_models_ask_for_is_the_same_of_all(part, monkeypatch):
    for name in ("WARMUP_MS", "REP_MS"):
        monkeypatch.setattr(leaderboard_shapes, name, 1)
    given = (part, 1, 4, 2, 50, 16, True, 7, "5-20", "fp32")
    impls = ("reference", "sdpa", "sdpa_flash", "flash_triton")
    cases = [leaderboard_models.Case(impl, *given) for impl in impls]
    plain, fused, peer, ours = leaderboard_models.run_group(cases)
    lengths = leaderboard_models.document_lengths("5-20", 50)
    pairs = sum(0 <= i - j < 7 for n in lengths for i in range(n) for j in range(n))
    flops = {"forward": 2, "backward": 5}[part] * 2 * 4 * pairs * 16
    for metrics in (plain, fused):
        assert set(metrics) == set(leaderboard_models.TABLE.metrics) and metrics["apart"] < 1e-5
        assert metrics["tflops"] == pytest.approx(flops / metrics["ms_p50"] / 1e9)
    assert peer == {"status": "skipped: does not serve sliding window, packed sequences"}
    assert ours == {"status": "skipped: needs a CUDA device"}


def test_seen_pairs_and_lengths():
    """Against the mask of the specification; no window is one that is long enough."""
    from cs336_systems.attention.reference import causal_mask

    for length, window in ((1, 1), (6, 3), (7, 7), (5, 9), (4, 1)):
        mask = causal_mask(length, length, "cpu", window, None)
        assert leaderboard_models.seen_pairs((length,), window) == mask.sum()
    assert leaderboard_models.seen_pairs((3, 5), 0) == leaderboard_models.seen_pairs((3, 5), 5) == 6 + 15
    lengths = leaderboard_models.document_lengths("100-4000", 32768)
    assert sum(lengths) == 32768 and all(100 <= n <= 4000 for n in lengths[:-1])
    assert lengths == leaderboard_models.document_lengths("100-4000", 32768)
    assert leaderboard_models.document_lengths("none", 32768) == ()


@without_gpu
def test_a_peer_may_refuse_what_models_ask_for(monkeypatch):
    def refuses(q, k, v):
        raise ValueError("no windows")

    monkeypatch.setattr(leaderboard_models.peers, "build", lambda *_: peers.Attention(refuses, "eager"))
    given = ("forward", 1, 2, 2, 17, 16, True, 3, "none", "fp32")
    theirs, ours = leaderboard_models.run_group(
        [leaderboard_models.Case(impl, *given) for impl in ("fa4", "flash_triton")]
    )
    assert theirs["status"] == "skipped: ValueError: no windows"
    assert ours["status"] == "error: ValueError: no windows"


@without_gpu
@pytest.mark.parametrize("part", ["forward", "backward", "end_to_end"])
def test_rows_of_times_hold_their_columns(part):
    table = leaderboard.TABLE if part == "end_to_end" else leaderboard_kernels.TABLE
    found = measured(table, "reference", "flash_torch", "sdpa_flash", "flash_triton", part=part)
    assert [m["status"] for m in found if "status" in m] == ["skipped: needs a CUDA device"]
    flops = {"forward": 2, "backward": 5, "end_to_end": 7}[part] * 2 * 128**2 * 32
    for metrics in found[:3]:
        assert metrics["timed"] == "clock"
        low, middle, high = (metrics[f"ms_{q}"] for q in ("min", "p50", "max"))
        assert 0 < low <= metrics["ms_p20"] <= middle <= metrics["ms_p80"] <= high
        assert low <= metrics["ms_mean"] <= high
        assert metrics["tflops"] == pytest.approx(flops / middle / 1e9)
        assert len(metrics["turns_ms"].split(";")) == leaderboard_turns.TURNS
        assert set(metrics["turns_mhz"]) == {";"}  # nothing to read on a CPU
        assert 0 < metrics["error_out"] < 1e-2 and 0 < metrics["error_grads"] < 1e-2


@without_gpu
@pytest.mark.parametrize("leaves", ["stacked", "separate"])
def test_the_harness_is_the_handouts(leaves, monkeypatch):
    """A sum's gradient, checked against fp64; gradients pile up in one leaf, or are dropped from three."""
    [case] = small(leaderboard.TABLE, "reference", leaves=leaves)
    data = peers.data_of(case, "cpu", "number")
    monkeypatch.setattr(leaderboard, "peak_gib", lambda step, given: sum(x.nbytes for x in given))

    def exact():
        from cs336_systems.attention.reference import exact_attention

        return list(exact_attention(*data[:3], torch.ones_like(data[0]), True))

    candidate = Candidate(case)
    call, grads = leaderboard.prepare(candidate, data, exact)
    kept = {"stacked": 2, "separate": 1}[leaves]  # the inputs, and what a call adds its gradients to
    assert candidate.metrics["peak_gib"] == kept * 3 * data[0].nbytes
    assert candidate.metrics["error_grads"] < 1e-2
    assert len(grads) == (3 if leaves == "separate" else 0)
    for x, y in zip(grads, exact()[1:], strict=False):
        x.grad = None
        call()
        assert (x.grad.double() - y).norm() < 2e-2 * y.norm()


@without_gpu
def test_first_calls_in_processes_of_their_own(monkeypatch):
    calls = []

    def call(function, arguments, *, timeout_s, environment):
        assert function == "cs336_systems.chapters.leaderboard.first_calls:first_call"
        calls.append(environment["TRITON_CACHE_DIR"])
        if arguments["case"]["impl"] == "reference":
            raise process.ChildError("killed")
        return leaderboard_first_calls.first_call(**arguments)

    monkeypatch.setattr(process, "call", call)
    skipped, failed, fine = measured(
        leaderboard_first_calls.TABLE, "flash_triton", "reference", "flash_torch"
    )
    assert skipped == {"status": "skipped: needs a CUDA device"}
    assert failed == {"status": "error: ChildError: killed"}
    assert fine["first_call_s"] > 0 and fine["second_call_ms"] > 0 and "status" not in fine
    assert fine["next_process_s"] > 0  # which finds the caches of the first one
    assert len(set(calls)) == 3 and calls[-1] == calls[-2]


def test_counters_of_what_cannot_run_are_left_out(monkeypatch):
    """The program says which case has no call; the kernels after the marks belong to the others."""
    monkeypatch.setattr(ncu, "find", lambda: None)
    if not torch.cuda.is_available():
        [metrics] = measured(leaderboard_counters.TABLE, "flash_torch")
        assert metrics == {"status": "skipped: needs Nsight Compute: no `ncu` in PATH"}
    kernel = dict.fromkeys(ncu.COUNTERS, 1.0) | {"ns": 10.0, "cycles": 100.0}
    twice = [kernel | {"kernel": "a(int)"}, kernel | {"kernel": "b", "ns": 30.0, "tensor_pct": 5.0}]

    def counted(function, arguments, timeout_s):
        assert function == "cs336_systems.chapters.leaderboard.counters:counted_calls"
        assert [case["impl"] for case in arguments["cases"]] == ["fa4", "flash_triton"]
        return ["skipped: needs FlashAttention-4", ""], [twice]

    monkeypatch.setattr(ncu, "counted", counted)
    fa4, ours = measured(leaderboard_counters.TABLE, "fa4", "flash_triton")
    assert fa4 == {"status": "skipped: needs FlashAttention-4"}
    assert ours["kernels"] == "a b" and ours["instructions"] == 2 and ours["tensor_pct"] == 4
    assert ours["conflict_pct"] == 1


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("part", ["forward", "backward", "end_to_end"])
@pytest.mark.parametrize("table", TIMED, ids=lambda table: table.name)
def test_groups_on_a_gpu(table, part, monkeypatch):
    """Everything that a GPU adds: compiled functions, graphs, clocks, kernels by name, registers."""
    monkeypatch.setattr(sys.modules[table.module], "TURNS", 2)
    if {"leaderboard": part != "end_to_end", "leaderboard_ladder": part == "end_to_end"}.get(
        table.name, False
    ):
        pytest.skip("there is no such group")
    impls = ["flash_triton", "plain_triton", "sdpa_flash", "sdpa_cudnn", "fa4"]
    if table is leaderboard_ladder.TABLE:
        impls = [step.name for step in steps.of_part(part)]
    found = measured(table, *impls, part=part, seq_len=1024, head_dim=64, rep_ms=5)
    for impl, metrics in zip(impls, found, strict=True):
        if metrics.get("status", "").startswith("skipped: needs "):
            continue
        assert "status" not in metrics, (impl, metrics["status"])
        assert metrics["ms_p50"] > 0 and metrics["turns_ms"].count(";") == 1
        assert metrics["timed"] == ("events" if table is leaderboard.TABLE else "graph")
        errors = [metrics[name] for name in ("error", "error_out", "error_grads") if name in metrics]
        assert errors and all(0 < error < 2e-2 for error in errors)
        if table is leaderboard_ladder.TABLE:
            assert 0 < metrics["registers"] <= 255 and metrics["shared_kib"] > 0
        if table is leaderboard_ladder.TABLE or impl in leaderboard.OURS:
            assert "_kernel" in metrics["kernels"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_counters_on_a_gpu(part):
    impls = ("flash_triton", "sdpa_cudnn", "fa4")
    ours, peer, fa4 = measured(leaderboard_counters.TABLE, *impls, part=part, seq_len=2048, head_dim=64)
    if ours.get("status", "").startswith("skipped: needs "):
        pytest.skip(ours["status"])
    assert "status" not in ours and "status" not in peer
    assert fa4.get("status", "skipped").startswith("skipped: needs") or fa4["tensor_pct"] > 0
    assert part in ours["kernels"]
    for metrics in (ours, peer):
        assert 1 < metrics["tensor_pct"] < 100 and 0 <= metrics["conflict_pct"] < 100
        assert metrics["instructions"] > 0


@pytest.mark.gpu
def test_first_calls_on_a_gpu():
    """As many kernels are compiled as are launched, by both kinds of ours. A peer's mask is of one length."""
    *ours, flex = measured(leaderboard_first_calls.TABLE, *leaderboard.OURS, "flex_compiled", seq_len=1024)
    for metrics in ours:
        assert metrics["compiled"] == len(metrics["kernels"].split()) and metrics["compiled_later"] >= 0
    for metrics in (*ours, flex):
        assert "status" not in metrics
        assert 1e3 * metrics["first_call_s"] > metrics["second_call_ms"]
        assert metrics.get("forgetful_us", 1e9) > metrics["host_us"] > 0
