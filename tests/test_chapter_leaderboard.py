"""Chapter leaderboard: its grid, what its rows hold, what is skipped and refused, and its page with and without
rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections import Counter

import pytest
from notebook_checks import shown_by

from cs336_systems import accounting, experiments
from cs336_systems.experiments import attention_peers, leaderboard, leaderboard_candidate
from cs336_systems.experiments.leaderboard import OFFICIAL_MS, WORK, Case
from cs336_systems.ladder import steps
from cs336_systems.measure import ncu, process
from cs336_systems.measure import rows as store
from cs336_systems.measure.code import code_digest, code_digests
from cs336_systems.report import Chapter
from cs336_systems.report.pages import leaderboard as page
from cs336_systems.report.pages import leaderboard_fp32 as fp32
from cs336_systems.report.pages import leaderboard_harness_words as harness_words
from cs336_systems.report.pages import leaderboard_ladder as ladder
from cs336_systems.report.pages import leaderboard_ladder_words as ladder_words
from cs336_systems.report.pages import leaderboard_noise as noise_words
from cs336_systems.report.pages import leaderboard_words as words
from cs336_systems.report.roofs import Roofs, roofs
from cs336_systems.report.tables import overlap

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
HARNESS = {"kind": "harness", "leaves": "stacked"}


# ------------------------------------------------------------------------------------------------ grid
@pytest.mark.parametrize("preset", experiments.PRESETS)
def test_every_case_is_there_once_and_every_short_group_has_one_pair(preset):
    cases = leaderboard.grid(preset)
    assert len(set(cases)) == len(cases)
    for group in store.groups(leaderboard, cases):
        assert 0 < leaderboard.estimate_s(group) < 90
        for case in group:
            leaderboard.check(case)
        if group[0].rep_ms < OFFICIAL_MS:
            [again] = [c for c in group if c.repeat == 1]
            assert dataclasses.replace(again, repeat=0) in group


def test_the_budget():
    groups = {p: store.groups(leaderboard, leaderboard.grid(p)) for p in experiments.PRESETS}
    assert sum(map(leaderboard.estimate_s, groups["full"])) < 660
    assert sum(map(leaderboard.estimate_s, groups["smoke"])) < 20


def test_the_work_is_the_leaderboards():
    cases = leaderboard.grid("full")
    harness = [c for c in cases if c.kind == "harness"]
    assert WORK == tuple(steps.WORK.values()) == (16, 16384, 64)
    assert {(c.heads, c.seq_len, c.head_dim, c.is_causal, c.dtype) for c in harness} == {
        (*WORK, True, "bf16")
    }
    official = [c for c in harness if c.rep_ms == 10_000]
    assert {c.impl for c in official} == set(leaderboard.OURS)
    assert all(c.leaves == "stacked" and leaderboard.turns(c) == 1 for c in official)
    short = {c.impl for c in harness if c.leaves == "stacked" and c.rep_ms < 10_000}
    assert short == {*leaderboard.OURS, *leaderboard.PEERS} - {"flash_torch"}
    assert all(leaderboard.turns(c) == 5 for c in cases if c not in official)


@pytest.mark.parametrize("count", range(1, 9))
def test_cases_follow_ever_others(count):
    rounds = [leaderboard.order(count, turn) for turn in range(count)]
    assert all(sorted(one) == list(range(count)) for one in rounds)
    assert all(sorted(place) == list(range(count)) for place in zip(*rounds, strict=True))
    follows = Counter(pair for one in rounds for pair in itertools.pairwise(one))
    assert len(follows) >= (count * (count - 1) if count % 2 == 0 else count * (count - 1) / 2)
    assert all(times <= 1 + count % 2 for times in follows.values())


def test_kernels_are_measured_at_the_neighboring_shapes():
    shapes = {(c.head_dim, c.is_causal, c.dtype) for c in leaderboard.grid("full") if c.kind == "kernel"}
    assert shapes == {
        (64, True, "bf16"), (128, True, "bf16"), (64, False, "bf16"), (64, True, "fp16"), (80, True, "bf16"),
        (64, True, "fp32"), (128, True, "fp32"),
    }  # fmt: skip
    beside_fa4 = {(c.head_dim, c.is_causal, c.dtype) for c in leaderboard.grid("full")
                  if (c.kind, c.impl) == ("kernel", "fa4")}  # fmt: skip
    assert shapes - beside_fa4 == {(80, True, "bf16"), (64, True, "fp32"), (128, True, "fp32")}


def test_every_step_of_the_ladder_has_its_row():
    ladder = [c for c in leaderboard.grid("full") if c.kind == "ladder" and not c.repeat]
    assert [c.impl for c in ladder] == list(steps.STEPS)
    assert all(c.part == steps.STEPS[c.impl].part for c in ladder)


# ------------------------------------------------------------------------------------------------ measuring, on a CPU
def small(kind="kernel", impls=("reference", "flash_torch"), part="forward", **change):
    base = Case(kind, "", part, 2, 128, 32, True, "bf16", "separate", "matrix", 2)
    return [dataclasses.replace(base, impl=impl, **change) for impl in impls]


@without_gpu
@pytest.mark.parametrize("part", leaderboard.PARTS)
def test_kernel_rows_hold_their_columns(part):
    cases = small(impls=("reference", "flash_torch", "sdpa_flash", "flash_triton"), part=part)
    found = leaderboard.run_group(cases)
    assert [m["status"] for m in found if "status" in m] == ["skipped: needs a CUDA device"]
    flops = {"forward": 2, "backward": 5, "end_to_end": 7}[part] * 2 * 128**2 * 32
    for metrics in found[:3]:
        assert set(metrics) <= set(leaderboard.METRICS)
        assert metrics["timed"] == "clock"
        low, middle, high = (metrics[f"ms_{q}"] for q in ("min", "p50", "max"))
        assert 0 < low <= metrics["ms_p20"] <= middle <= metrics["ms_p80"] <= high
        assert low <= metrics["ms_mean"] <= high
        assert metrics["tflops"] == pytest.approx(flops / middle / 1e9)
        assert len(page.numbers(metrics["turns_ms"])) == leaderboard.TURNS
        assert page.numbers(metrics["turns_mhz"]) == []  # nothing to read on a CPU
        assert 0 < metrics["error_out"] < 1e-2 and 0 < metrics["error_grads"] < 1e-2


@without_gpu
@pytest.mark.parametrize("leaves", leaderboard.LEAVES)
def test_the_harness_is_the_handouts(leaves):
    """A sum's gradient, checked against fp64; gradients pile up in one leaf, or are dropped from three."""
    [case] = small("harness", ("reference",), "end_to_end", leaves=leaves, grad_o="number")
    data = list(torch.randn(4, 2, 128, 32, dtype=torch.bfloat16))
    candidate = leaderboard.Candidate(case, data, "cpu")

    def exact():
        from cs336_systems.attention.reference import exact_attention

        return list(exact_attention(*data[:3], torch.ones_like(data[3]), True))

    candidate.prepare(exact)
    assert candidate.ok and candidate.metrics["error_grads"] < 1e-2
    assert len(candidate.grads) == (3 if leaves == "separate" else 0)
    assert all(x.grad is None for x in candidate.grads)
    candidate.call()
    if leaves == "separate":
        assert all(
            (x.grad.double() - y).norm() < 2e-2 * y.norm()
            for x, y in zip(candidate.grads, exact()[1:], strict=True)
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_compiled_functions_get_the_gradient_of_a_sum_as_a_matrix(compiled):
    """What the page says of the harness: a number with strides of zero, unless torch.compile has traced the
    function."""
    strides = []

    @torch.library.custom_op(f"leaderboard_test::doubled_{compiled}", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        strides.append(x.stride())
        return 2 * x

    @doubled.register_fake
    def _(x):
        return torch.empty_like(x)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return doubled(grad)

    x = torch.randn(4, 8, requires_grad=True)
    apply = torch.compile(Doubled.apply, backend="aot_eager") if compiled else Doubled.apply
    apply(x).sum().backward()
    assert strides == [(8, 1) if compiled else (0, 0)]


@without_gpu
def test_what_a_cpu_cannot_run_says_what_it_needs():
    gpu_only = (
        "flash_triton",
        "plain_triton",
        "sdpa_cudnn",
        "sdpa_efficient",
        "flex_compiled",
        "fa4",
    )
    for metrics in leaderboard.run_group(small(impls=gpu_only)):
        assert metrics["status"].startswith("skipped: needs a CUDA device")
    for metrics in leaderboard.run_group(small("ladder", ("f_all_tiles", "f_production", "f_hopper"))):
        assert metrics["status"] == "skipped: needs a CUDA device"
        assert metrics["predicted_ms"] > 0  # what was expected is known without one


@without_gpu
def test_one_failure_leaves_the_others_measured(monkeypatch, capsys):
    chosen = leaderboard_candidate.implementation

    def implementation(case, device):
        if case.impl == "reference":
            raise RuntimeError("broken")
        return chosen(case, device)

    monkeypatch.setattr(leaderboard_candidate, "implementation", implementation)
    broken, fine = leaderboard.run_group(small())
    assert broken["status"] == "error: RuntimeError: broken"
    assert "status" not in fine and fine["ms_p50"] > 0
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("part", leaderboard.PARTS)
@pytest.mark.parametrize("kind", leaderboard.KINDS)
def test_groups_on_a_gpu(kind, part, monkeypatch):
    """Everything that a GPU adds: compiled functions, graphs, clocks, kernels by name, registers."""
    monkeypatch.setattr(leaderboard, "TURNS", 2)
    wrong_part = {"ladder": part == "end_to_end", "harness": part != "end_to_end", "kernel": False}
    if (wrong_part | {"counters": True, "first": True})[kind]:
        pytest.skip("there is no such group")
    impls = ("flash_triton", "plain_triton", "sdpa_flash", "sdpa_cudnn", "fa4")
    if kind == "ladder":
        impls = [step.name for step in steps.of_part(part)]
    change = {"seq_len": 1024, "head_dim": 64, "rep_ms": 5}
    change |= {"grad_o": "number", "leaves": "stacked"} if kind == "harness" else {}
    cases = small(kind, impls, part, **change)
    for case, metrics in zip(cases, leaderboard.run_group(cases), strict=True):
        if metrics.get("status", "").startswith("skipped: needs "):
            continue
        assert "status" not in metrics, (case, metrics["status"])
        assert metrics["ms_p50"] > 0 and len(page.numbers(metrics["turns_ms"])) == 2
        assert (
            metrics["timed"] == ("events" if kind == "harness" else "graph") or case.impl in leaderboard.PEERS
        )
        errors = [metrics[name] for name in ("error_out", "error_grads") if name in metrics]
        assert errors and all(0 < error < 2e-2 for error in errors)
        if kind == "ladder":
            assert 0 < metrics["registers"] <= 255 and metrics["shared_kib"] > 0
        if kind == "ladder" or case.impl in leaderboard.OURS:
            assert "_kernel" in metrics["kernels"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_counters_on_a_gpu(part):
    cases = small("counters", ("flash_triton", "sdpa_cudnn", "fa4"), part, seq_len=2048, head_dim=64)
    ours, peer, fa4 = leaderboard.run_group(cases)
    if ours.get("status", "").startswith("skipped: needs "):
        pytest.skip(ours["status"])
    assert "status" not in ours and "status" not in peer
    assert fa4.get("status", "skipped").startswith("skipped: needs") or fa4["tensor_pct"] > 0
    assert ("forward" if part == "forward" else "backward") in ours["kernels"]
    for metrics in (ours, peer):
        assert 1 < metrics["tensor_pct"] < 100 and 0 <= metrics["conflict_pct"] < 100
        assert (
            page.instructions_a_pair(metrics | dataclasses.asdict(cases[0]))
            > page.work_of_a_pair(part).instructions
        )


@pytest.mark.gpu
def test_first_calls_on_a_gpu():
    """As many kernels are compiled as are launched, by both kinds of ours."""
    for metrics in leaderboard.run_group(small("first", leaderboard.OURS, "end_to_end", seq_len=1024)):
        assert "status" not in metrics
        assert metrics["compiled"] == len(metrics["kernels"].split()) and metrics["compiled_later"] >= 0
        assert 1e3 * metrics["first_call_s"] > metrics["second_call_ms"]


@without_gpu
def test_first_calls_in_processes_of_their_own(monkeypatch):
    calls = []

    def call(function, arguments, *, timeout_s, environment):
        assert function == "cs336_systems.experiments.attention_peers:first_call"
        calls.append(environment["TRITON_CACHE_DIR"])
        if arguments["impl"] == "reference":
            raise process.ChildError("killed")
        return attention_peers.first_call(**arguments)

    monkeypatch.setattr(process, "call", call)
    impls = ("flash_triton", "reference", "flash_torch")
    skipped, failed, fine = leaderboard.run_group(small("first", impls, "end_to_end"))
    assert skipped == {"status": "skipped: needs a CUDA device"}
    assert failed == {"status": "error: ChildError: killed"}
    assert fine["first_call_s"] > 0 and fine["second_call_ms"] > 0 and "status" not in fine
    assert set(fine) <= set(leaderboard.METRICS) and len(set(calls)) == 3


def test_what_is_said_of_first_calls(chapter):
    text = words.first_calls(chapter, "h100-x1")
    assert "ours, Triton takes 6.50 s (and 7.50 s in another process) for its first call and 4.25 ms" in text
    assert "it launches 4 kernels, as many as it compiles: no configuration is tried out" in text
    assert "it launches 4 kernels, of 7 compiled" in text
    table = page.first_table(chapter, "h100-x1").set_index("implementation")
    assert list(table["compiled"]) == ["4", "7", "3", "–", "–"]
    assert list(table["for other lengths"]) == ["9", "8", "–", "–", "–"]


@without_gpu
def test_counters_need_the_tool(monkeypatch):
    monkeypatch.setattr(ncu, "find", lambda: None)
    for metrics in leaderboard.run_group(small("counters")):
        assert metrics == {"status": "skipped: needs Nsight Compute: no `ncu` in PATH"}


def test_counters_of_what_cannot_run_are_left_out(monkeypatch):
    """The program says which case has no call; the kernels after the marks belong to the others."""
    kernel = dict.fromkeys(ncu.COUNTERS, 1.0) | {"ns": 10.0, "cycles": 100.0}
    twice = [kernel | {"kernel": "a(int)"}, kernel | {"kernel": "b", "ns": 30.0, "tensor_pct": 5.0}]

    def counted(function, arguments, timeout_s):
        assert function == "cs336_systems.experiments.leaderboard:counted_calls"
        assert [case["impl"] for case in arguments["cases"]] == ["fa4", "flash_triton"]
        return ["skipped: needs FlashAttention-4", ""], [twice]

    monkeypatch.setattr(ncu, "counted", counted)
    fa4, ours = leaderboard.run_group(small("counters", ("fa4", "flash_triton")))
    assert fa4 == {"status": "skipped: needs FlashAttention-4"}
    assert ours["kernels"] == "a b" and ours["instructions"] == 2 and ours["tensor_pct"] == 4
    assert ours["conflict_pct"] == 1 and set(ours) <= set(leaderboard.METRICS)


def test_the_words_on_counters_name_the_busiest_units(chapter):
    text = words.counters(chapter, "h100-x1")
    assert (
        text.count("the busiest are shared memory and L1 (75 % of the cycles) and tensor cores (63 %)")
        == 2 * 2
    )
    assert "for a pair 9.50 instructions are issued, of which the count by hand knows 4.50" in text
    table = page.counters_table(chapter, "h100-x1")
    assert len(table) == 2 * 2 * len(leaderboard.COUNTED) and set(table["bank conflicts"]) == {"0.50 %"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "race"}, "unknown kind 'race'; allowed: harness, kernel, ladder, counters"),
        ({"part": "sideways"}, "unknown part 'sideways'; allowed: forward, backward, end_to_end"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'; allowed: bf16, fp16"),
        ({"leaves": "four"}, "unknown leaves 'four'; allowed: stacked, separate"),
        ({"impl": "warp"}, "unknown impl 'warp'; allowed: flash_triton, plain_triton"),
        ({"kind": "ladder"}, "unknown impl 'reference'; allowed: f_all_tiles, f_skip"),
    ],
)
def test_unknown_values_are_named(change, said):
    [case] = small(impls=("reference",))
    with pytest.raises(ValueError, match=said):
        leaderboard.run_group([dataclasses.replace(case, **change)])


@without_gpu
def test_a_peer_that_cannot_be_captured_is_timed_with_events(monkeypatch, capsys):
    from cs336_systems.measure import timing

    def refuses(call, calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "captured", refuses)
    data = list(torch.zeros(4, 1, 16, 16))
    fa4, ours = (leaderboard.Candidate(case, data, "cuda") for case in small(impls=("fa4", "flash_triton")))
    fa4.call = ours.call = lambda: None
    fa4._capture()
    assert fa4.metrics["timed"] == "events" and "capturing" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="capturing"):
        ours._capture()


# ------------------------------------------------------------------------------------------------ the page
SPEED = {
    "flash_triton": 480, "plain_triton": 335, "fa4": 550, "sdpa_cudnn": 425, "flex_compiled": 300,
    "sdpa_flash": 280, "sdpa_efficient": 103, "reference": 20,
}  # fmt: skip


def kernels_of(case):
    """Names of kernels as rows hold them: of ours alone."""
    if case.impl not in leaderboard.OURS:
        return None
    plain, wide = case.impl == "plain_triton", case.dtype == "fp32"
    return f"{'triton_kernels' if plain else 'hopper.split' if wide else 'hopper.forward'}.forward_kernel"


def metrics_of(case):
    """Times of a made-up machine: rates by implementation, a ladder that is slower than expected."""
    draw = random.Random(str(case))
    if case.kind == "counters":
        shares = {"tensor_pct": 63.0, "exp_pct": 31.0, "issue_pct": 24.0, "shared_pct": 75.0, "l2_pct": 50.0}
        pairs = accounting.attention_exps(case.heads, case.seq_len, case.seq_len, True, case.part)
        return shares | {"conflict_pct": 0.5, "instructions": 9.5 * pairs / 32, "kernels": "some_kernel"}
    if case.kind == "first":
        ours = case.impl in leaderboard.OURS
        names = "forward_kernel prepare_kernel backward_keys_kernel finish_kernel" if ours else None
        compiled = {"flash_triton": (4, 9), "plain_triton": (7, 8), "flex_compiled": (3, None)}
        counts = dict(zip(("compiled", "compiled_later"), compiled.get(case.impl, (None, None)), strict=True))
        return {"first_call_s": 6.5 + case.repeat, "second_call_ms": 4.25, "kernels": names} | counts
    parts = accounting.attention_flops(
        case.heads, case.seq_len, case.seq_len, case.head_dim, case.is_causal, case.part
    )
    if case.kind == "ladder":
        ms = (
            1.35
            * steps.predicted_ms(steps.STEPS[case.impl])
            * (1 + 0.1 * draw.random() - (0.3 * ("f_t" in case.impl)))
        )
    else:
        ms = parts / SPEED[case.impl] / 1e9 + (0.2 if case.leaves == "stacked" else 0)
    ms *= 1 + 0.002 * case.repeat
    if case.impl == "fa4" and case.grad_o == "number" and case.kind == "kernel":
        return {
            "status": "skipped: needs FlashAttention-4, the package flash-attn-4 (No module named 'flash_attn')"
        }
    turns = [ms * (1 + 0.01 * draw.random()) for _ in range(leaderboard.turns(case))]
    out = {
        "ms_p20": 0.99 * ms, "ms_p50": ms, "ms_p80": 1.01 * ms, "ms_mean": ms, "ms_min": 0.98 * ms, "ms_max": 1.1 * ms,
        "turns_ms": ";".join(f"{x:.6g}" for x in turns),
        "turns_mhz": ";".join(f"{1700 + 50 * draw.random():.0f}" for _ in turns),
        "turns_w": ";".join(f"{600 + 90 * draw.random():.0f}" for _ in turns),
        "tflops": parts / ms / 1e9, "peak_gib": 1.0,
        "error_out": 2e-3, "error_grads": 3e-3, "backend": case.impl,
        "kernels": kernels_of(case), "timed": "graph",
        "sm_mhz": 1725.0, "power_w": 650.0,
    }  # fmt: skip
    if case.kind == "ladder":
        more = {"registers": 168, "spill_bytes": 0, "shared_kib": 64.0, "kernels": "forward_kernel"}
        out |= more | {"predicted_ms": steps.predicted_ms(steps.STEPS[case.impl])}
    return out


def with_quantiles(change):
    """A changed median takes its percentiles with it, unless they are changed as well."""
    ms = change.get("ms_p50")
    return ({} if ms is None else {"ms_p20": 0.999 * ms, "ms_p80": 1.001 * ms}) | change


def write_rows(root, machine="h100-x1", keep=lambda case: True, change=None, name="NVIDIA H100 80GB HBM3"):
    """Rows of a made-up machine with a GPU of this name, with roofs and what others have published. change: (case) →
    what its row has instead."""
    provenance, code = {"time_utc": "2026-01-01T00:00:00Z", "env": "abcd"}, code_digests(leaderboard)
    for number, group in enumerate(store.groups(leaderboard, leaderboard.grid("full"))):
        rows = [
            dataclasses.asdict(case)
            | {"status": "ok"}
            | metrics_of(case)
            | with_quantiles(change(case) if change else {})
            | provenance
            | {"run": f"run-{number}", "code": code(case)}
            for case in group
            if keep(case)
        ]
        store.write(leaderboard, machine, rows, root)
    hardware = experiments.load("hardware")
    provenance |= {"code": code_digest(hardware), "run": "roofs"}
    rows = [
        dataclasses.asdict(c)
        | {"status": "ok", "tflops": 700.0, "tb_per_s": 3.0, "us_per_launch": 5.0}
        | provenance
        for c in hardware.grid("full")
    ]
    store.write(hardware, machine, rows, root)
    gpu = {
        "gpu": name,
        "gpus": 1,
        "sms": 132,
        "torch": "2.11.0",
        "triton": "3.6.0",
        "driver": "580",
    }
    store.write_environment(machine, root, {"abcd": gpu})
    (root / "reference.json").write_text(json.dumps({"leaderboard": [machine], "hardware": [machine]}))
    (root / "published.csv").write_text(
        "chapter,what,hardware,setting,metric,value,source\n"
        "flash_bench,best verified entry of the course's 2025 leaderboard (Triton),1 x H100,s,end_to_end_ms,5.364,"
        "https://example.org\n"
        "leaderboard,fastest unverified time that was listed,1 x H100,s,end_to_end_ms,4.027,https://example.org\n"
    )


run_notebook = functools.partial(shown_by, "leaderboard")


def test_the_page_without_rows_says_not_measured(results_root, project_root, monkeypatch):
    text = run_notebook(project_root, monkeypatch)
    assert text.count("not measured") > 10
    assert "nan" not in text


def test_the_page_with_rows_says_what_they_say(results_root, project_root, monkeypatch):
    write_rows(results_root)
    text = run_notebook(project_root, monkeypatch)
    assert "nan" not in text and "not measured" not in text
    assert "Measured on `h100-x1`" in text and "needs FlashAttention-4" in text


@pytest.mark.parametrize("kind", leaderboard.KINDS)
def test_the_page_with_one_kind_of_rows_is_built_as_well(results_root, project_root, monkeypatch, kind):
    write_rows(results_root, keep=lambda case: case.kind == kind)
    text = run_notebook(project_root, monkeypatch)
    assert "not measured" in text and "nan" not in text


def test_the_page_of_a_smoke_run_is_built(results_root, project_root, monkeypatch):
    provenance = {"run": "r", "time_utc": "2026-01-01T00:00:00Z", "env": "abcd", "code": "00000000"}
    rows = [
        dataclasses.asdict(c)
        | {"status": "ok", "ms_p50": 1.0, "ms_mean": 1.0, "tflops": 0.1, "turns_ms": "1;2"}
        | provenance
        for c in leaderboard.grid("smoke")
    ]
    store.write(leaderboard, "cpu-2", rows, results_root)
    (results_root / "reference.json").write_text(json.dumps({"leaderboard": ["cpu-2"]}))
    text = run_notebook(project_root, monkeypatch)
    assert "not measured" in text and "nan" not in text


@pytest.fixture
def chapter(results_root):
    write_rows(results_root)
    return Chapter("leaderboard", measure="no", preset="full")


def test_the_record_is_held_against_the_official_run(chapter):
    text = words.record(chapter, "h100-x1")
    ours = chapter.number("ms_mean", impl="flash_triton", rep_ms=OFFICIAL_MS, repeat=0, **HARNESS)
    assert f"**{ours:.3f} ms** for ours, Triton" in text
    assert f"{5.364 / ours:.2f} times as fast" in text and "[source](https://example.org)" in text
    table = page.harness_table(chapter, "h100-x1")
    assert list(table["ms"].astype(float)) == sorted(table["ms"].astype(float))
    assert (table["source"] == "[published](https://example.org)").sum() == 2
    assert f"given as 4.027 ms: ours is {ours / 4.027:.2f} times as long" in text
    assert "measured on one NVIDIA H100 80GB HBM3" in text and "published as 5.364 ms on 1 x H100" in text
    assert table.set_index("implementation").loc["ours, Triton", "over ours"] == "1.00 ×"


def test_peers_are_faster_or_slower_beyond_the_spread(chapter):
    text = words.peers(chapter, "h100-x1")
    one_leaf, three_leaves = text.split("With three leaves: ")
    for said in (one_leaf, three_leaves):
        before, after = said.split("; faster: ")
        assert "FlashAttention-4" in after and "slower: " in before and "SDPA (cuDNN)" in before
    assert "FlexAttention" in one_leaf and "plain PyTorch" in one_leaf
    assert "Closest is SDPA (cuDNN): the medians of its turns are" in one_leaf
    assert " and, measured again, 4.2" in one_leaf.split("Closest is")[1]
    said = (
        "the median of ours, Triton is 4.209 ms; in short turns it is 4.209 and, measured again, 4.217. Peers"
    )
    assert f"in a run of its own, {said}" in three_leaves
    assert "in the harness (0.20 %)" in three_leaves
    run = chapter.measured(**HARNESS, repeat=1).iloc[0]["run"]
    assert noise_words.noise(chapter, "h100-x1", run) == pytest.approx(0.002, rel=1e-2)


def test_the_ladder_says_what_gained_and_what_lost(chapter):
    found = ladder.measured(chapter, "h100-x1", "forward")
    assert found.loc["f_skip", "gain"] == pytest.approx(
        found.loc["f_all_tiles", "ms_p50"] / found.loc["f_skip", "ms_p50"]
    )
    assert found.loc["f_production", "base"] == "f_tiles"
    text = ladder_words.ladder(chapter, "h100-x1", "forward")
    assert "persistent programs" in text.split("Steps that lose")[1]
    table = ladder.table(chapter, "h100-x1", "forward")
    assert list(table["#"]) == list(range(1, len(found) + 1))
    assert (table["regs"] == 168).all()
    text = ladder_words.predictions(chapter, "h100-x1")
    assert "steps, from" in text and "issue 9.50 instructions for a pair forward, of which 4.50 were" in text
    assert "backward, of which 9.50 were counted on" in text


def test_the_parts_of_the_gap_add_up(chapter):
    found = page.gap(chapter, roofs("h100-x1"), "h100-x1", "flash_triton")
    whole = chapter.number(
        "ms_p50", impl="flash_triton", repeat=0, rep_ms=page.short_ms(chapter)[0], **HARNESS
    )
    assert sum(found.values()) == pytest.approx(whole)
    assert found["harness: sum of the output, at the best copy"] == pytest.approx(16 * 16384 * 64 * 2 / 3e9)
    floor = page.limits("backward", 132, 1725.0)
    assert found["backward: the slowest unit by the count by hand, at the clock seen"] == pytest.approx(
        max(floor.values())
    )
    assert page.gap(chapter, Roofs(), "h100-x1", "flash_triton") is None


def test_limits_are_those_of_the_accounting():
    found = page.limits("forward", steps.SMS, steps.SM_MHZ)
    assert found["products"] == pytest.approx(found["exps"])  # the chapter's point, at d = 64
    assert found["products"] == pytest.approx(page.work_flops("forward") / 989.4e9, rel=1e-3)
    assert "tensor cores and special function units" in words.limits("forward")
    assert "tensor cores would be busy" in words.limits("backward").replace("the ", "")


# ------------------------------------------------------------------------------------------------ noise and claims
MACHINE = "h100-x1"


def changed(root, change, **options):
    """The chapter with rows of the made-up machine, some of which are changed."""
    write_rows(root, change=change, **options)
    return Chapter("leaderboard", measure="no", preset="full")


@pytest.mark.parametrize(
    ("ratio", "own", "most", "said"),
    [
        (1.01, 0.02, 0.08, "even"), (1 / 1.01, 0.02, 0.08, "even"), (1.05, 0.02, 0.08, "unsettled"),
        (1 / 1.05, 0.02, 0.08, "unsettled"), (1.09, 0.02, 0.08, "slower"), (0.9, 0.02, 0.08, "faster"),
        (1.05, None, 0.08, "even"), (1.05, None, None, "slower"), (1.0, None, None, "even"),
    ],
)  # fmt: skip
def test_a_difference_is_held_against_two_kinds_of_noise(ratio, own, most, said):
    assert noise_words.verdict(ratio, own, most) == said
    settled = said in ("slower", "faster")
    assert noise_words.verdict(ratio, own, most, overlap=True) == ("unsettled" if settled else said)


def test_cases_whose_percentiles_overlap_are_not_told_apart(results_root):
    """FlashAttention-4 in fp16 is faster by its medians, which lie in each other's range."""

    def change(case):
        if (case.kind, case.dtype, case.impl) != ("kernel", "fp16", "fa4"):
            return {}
        ms = metrics_of(case)["ms_p50"]
        return {"ms_p20": 0.8 * ms, "ms_p80": 1.2 * ms}

    text = noise_words.kernels(changed(results_root, change), MACHINE)
    assert "not settled in forward, fp16, d = 64, causal (0.8727 ×) and backward, fp16" in text
    assert "faster in 6 of 8 cases (0.8727 ×)" in text
    left, right = ({"ms_p20": low, "ms_p80": high} for low, high in ((1.0, 2.0), (2.0, 3.0)))
    assert overlap(left, right) and overlap(right, left)
    assert not overlap(left, {"ms_p20": 2.1, "ms_p80": 3.0})
    assert not overlap(left, dict.fromkeys(left, float("nan")))


@pytest.mark.parametrize("wide", [False, True])
def test_a_peer_whose_times_our_repetition_reaches_is_not_told_apart(results_root, wide):
    """FlashAttention-4 is 4 % slower in fp16; ours measured again, by 0.2 % slower, has percentiles up to there."""

    def change(case):
        if case.kind != "kernel" or case.dtype != "fp16":
            return {}
        ms = 1.04 if case.impl == "fa4" else 1.0 + 0.002 * case.repeat
        return {"ms_p50": ms} | ({"ms_p80": 1.045} if wide and case.repeat else {})

    text = noise_words.kernels(changed(results_root, change), MACHINE).split(" **SDPA")[0]
    verdict = "not settled" if wide else "slower"
    assert f"{verdict} in forward, fp16, d = 64, causal (1.040 ×) and backward, fp16" in text
    assert ("not settled" in text) == wide


def test_fp32_is_judged_by_its_own_noise(results_root):
    """16 bits differ by a fifth from their repetition, fp32 by less than a hundredth; SDPA is 2 % slower there."""

    def change(case):
        if case.kind != "kernel":
            return {}
        if case.dtype != "fp32":
            return {"ms_p50": 1.0 + 0.2 * case.repeat + 0.1 * (case.impl == "sdpa_cudnn")}
        speed = {"sdpa_efficient": 1.02, "plain_triton": 1.5}.get(case.impl, 1.0)
        return {"ms_p50": 5.0 * speed * (1 + 0.005 * case.repeat)}

    chapter = changed(results_root, change)
    text = noise_words.kernels(chapter, MACHINE)
    assert "**SDPA (efficient)** over ours, in fp32: slower in 4 of 4 cases (1.020 ×)" in text
    assert "over ours, plain Triton, in fp32: faster in 4 of 4 cases (0.6800 ×)" in text
    assert "**SDPA (cuDNN)** over ours, in bf16 and fp16: even within the spread in 10 of 10" in text
    assert "in kernels alone (20 % in 16 bits, 0.50 % in fp32)" in text
    said = "in kernels alone 20 % in 16 bits, 0.50 % in fp32; in the ladder"
    assert said in noise_words.spread(chapter, MACHINE)
    assert noise_words.largest(chapter, MACHINE, "kernel") == pytest.approx(0.2)


def test_the_parts_of_fp32_products_are_counted(results_root):
    def change(case):
        if case.kind != "kernel" or case.impl not in leaderboard.OURS:
            return {}
        ms = 2.0 if case.dtype == "bf16" else 14.0 if case.impl == "flash_triton" else 20.0
        rate = 70.0 if case.part == "forward" else 40.0
        error = {"error_out": 2e-7, "error_grads": 6e-7} if case.dtype == "fp32" else {}
        return {"ms_p50": ms, "tflops": rate} | error

    chapter = changed(results_root, change)
    table = fp32.table(chapter, roofs(MACHINE), MACHINE)
    shown = table.set_index(["d", "pass", "implementation"])
    forward, backward = (shown.loc[(64, part, "ours, Triton")] for part in ("forward", "backward"))
    assert list(forward[1:]) == ["420", "60 %", "7.00 ×", "2.0e−7"] and forward["a product"] == "6 in bf16"
    assert list(backward[1:]) == ["336", "48 %", "7.00 ×", "6.0e−7"]  # 40 · 6 · 7/5
    plain = shown.loc[(128, "backward", "ours, plain Triton")]
    assert list(plain) == ["3 in TF32", "168", "24 %", "10.0 ×", "6.0e−7"]
    assert (
        (shown.xs("SDPA (efficient)", level=2)[["a product", "of the best", "over bf16"]] == "–").all().all()
    )
    text = fp32.words(chapter, roofs(MACHINE), MACHINE)
    assert "ours, Triton computes its parts at 48 % to 60 % of the rate of the best product in bf16" in text
    assert (
        "ours, plain Triton computes its parts at 24 % to 30 % of the rate of the best product in TF32"
        in text
    )
    assert "In 4 of 8 cases attention's own rate is above 66.9 TFLOP/s" in text
    assert fp32.words(chapter, Roofs(), MACHINE) == "Products of ours in fp32: not measured."


def test_kernels_are_judged_by_the_noise_of_all_kernels(results_root):
    """A repetition at d = 128 that is off by a tenth leaves FlashAttention-4's lead (550 over 480) settled,
    one that is off by a fifth does not; a difference below the repetition of its own run is even."""

    def repeated(share):
        def change(case):
            again = case.kind == "kernel" and case.repeat and case.part == "forward"
            ms = metrics_of(dataclasses.replace(case, repeat=0)).get("ms_p50") if again else None
            return {"ms_p50": ms * (1 + share)} if again and case.head_dim == 128 else {}

        return change

    settled = noise_words.kernels(changed(results_root, repeated(0.1)), MACHINE)
    assert "**FlashAttention-4** over ours, in bf16 and fp16: faster in 8 of 8 cases (0.8727 ×)" in settled
    assert "**SDPA (cuDNN)** over ours, in bf16 and fp16: slower in 10 of 10 cases (1.129 ×)" in settled
    unsettled = noise_words.kernels(changed(results_root, repeated(0.2)), MACHINE)
    assert "(20 % in 16 bits, 20 % in fp32)" in unsettled
    for ratio, left in (("0.8727", "7 of 8"), ("1.129", "9 of 10")):
        here = f"even within the spread in forward, bf16, d = 128, causal ({ratio} ×); not settled in {left}"
        assert here in unsettled

    def even(case):
        return (
            {"ms_p50": 1.0 + 0.02 * case.repeat + 0.01 * (case.impl == "fa4")}
            if case.kind == "kernel"
            else {}
        )

    found = noise_words.kernels(changed(results_root, even), MACHINE)
    said = (
        "**FlashAttention-4** over ours, in bf16 and fp16: even within the spread in 8 of 8 cases (1.010 ×)"
    )
    assert said in found


def test_the_largest_repetitions_are_shown_with_their_clocks(results_root):
    def change(case):
        return {"sm_mhz": 1500.0 + 100 * case.repeat} if case.kind == "ladder" else {}

    text = noise_words.spread(changed(results_root, change), MACHINE)
    assert (
        "in the harness 0.20 %; in kernels alone 0.20 % in 16 bits, 0.20 % in fp32; in the ladder " in text
        and "in the counters 0 %" in text
    )
    assert "in first calls 15 %" in text and "–" not in text
    assert "seen at 1,500 MHz" in text and "seen at 1,600 MHz" in text


def test_clocks_of_a_case_and_its_repetition_say_how_rough_readings_are(results_root):
    def change(case):
        if case.kind != "kernel" or case.dtype != "fp16" or case.part == "forward":
            return {}
        return {"sm_mhz": 1700.0 - 85 * case.repeat}

    chapter = changed(results_root, change)
    assert noise_words.clock_noise(chapter, MACHINE) == pytest.approx(1700 / 1615 - 1)
    said = "was seen at 1,700 MHz and, measured again, at 1,615, 5.3 % apart"
    assert (
        f"ours, Triton (backward, fp16, d = 64, causal) {said}; its times are 0.20 % apart"
        in noise_words.clocks(chapter, MACHINE)
    )
    alike = noise_words.clocks(changed(results_root, None), MACHINE)
    assert "readings are rough" not in alike and "not clocks." in alike


@pytest.mark.parametrize("early", [False, True])
def test_first_turns_that_are_further_away_than_chance_are_told(results_root, early):
    """Every case of kernels has one turn that is off by a tenth: the first one, or one after the other."""
    numbers = iter(range(10**6))

    def change(case):
        if case.kind != "kernel":
            return {}
        index = next(numbers)
        turns, off = [1.0] * 5, 0 if early else index % 5
        turns[off] = 1.1 if index % 3 else 0.9
        return {"ms_p50": 1.0, "turns_ms": ";".join(map(str, turns))}

    text = noise_words.spread(changed(results_root, change), MACHINE)
    cases = sum(c.kind == "kernel" for c in leaderboard.grid("full")) - 1  # FlashAttention-4 with one number
    said = f"is the first in {cases} of {cases} cases, by up to 10 %; chance would make it {round(cases / 5)}"
    assert (said in text) == early and ("furthest" in text) == early
    shorter = -(-cases // 3)
    where = f"It is shorter than the median in {shorter} of them and longer in {cases - shorter}"
    assert (where in text) == early


@pytest.mark.parametrize("other_w", [650.0, 700.0])
def test_all_that_were_seen_at_the_lowest_clock_are_named(results_root, other_w):
    def change(case):
        if case.rep_ms == OFFICIAL_MS:
            return {"sm_mhz": 1500.0, "power_w": 700.0}  # of another length than what the table shows
        low = case.impl in ("fa4", "sdpa_cudnn")
        return {"sm_mhz": 1700.0 if low else 1980.0, "power_w": 700.0 if low else other_w}

    text = noise_words.clocks(changed(results_root, change), MACHINE)
    assert "between 1,700 MHz (FlashAttention-4, 700 W; SDPA (cuDNN), 700 W)" in text
    limited = (
        "At the highest clock cases draw 650 W in the median, all others 700: a GPU at its power limit lowers "
        "its clock."
    )
    assert (limited in text) == (other_w < 700) and ("power limit" in text) == (other_w < 700)


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("NVIDIA H200", "has 1.43 times the bandwidth", "H100 80GB"),
        ("NVIDIA H100 80GB HBM3", "ran on one NVIDIA H100 80GB HBM3.", "bandwidth"),
        ("NVIDIA B200", "ran on one NVIDIA B200.", "bandwidth"),
    ],
)
def test_the_hardware_is_that_of_the_rows(results_root, name, said, unsaid):
    chapter = changed(results_root, None, name=name)
    text = words.hardware(chapter, MACHINE)
    assert said in text and unsaid not in text
    assert f"measured on one {name}." in words.record(chapter, MACHINE)


def test_steps_that_missed_their_expectation_are_named_with_what_is_known(results_root):
    """As fast as expected, but for one step that loses instead of gaining."""

    def change(case):
        if case.kind != "ladder":
            return {}
        ms = steps.predicted_ms(steps.STEPS[case.impl]) * (1 + 0.02 * case.repeat)
        return {"ms_p50": ms * (3 if case.impl == "b_one_pass" else 1)}

    chapter = changed(results_root, change)
    assert ladder_words.missed(chapter, MACHINE, "forward").startswith("No gain of the forward ladder")
    text = ladder_words.missed(chapter, MACHINE, "backward")
    assert (
        "gain of 1 of 14 steps" in text
        and "- *one pass, dQ added up in memory*: 1.48 × expected, 0.494 ×" in text
    )
    assert "no row takes them apart" in text
    assert "- *" not in ladder_words.missed(chapter, MACHINE, "forward")


@pytest.mark.parametrize("wide", [False, True])
def test_steps_whose_percentiles_overlap_are_not_settled(results_root, wide):
    """A step takes 1.09 times as long as expected, where none was; with wide percentiles no row settles it."""

    def change(case):
        if case.kind != "ladder":
            return {}
        ms = steps.predicted_ms(steps.STEPS[case.impl]) * (1.09 if case.impl == "f_tiles" else 1)
        ms *= 1 + 0.03 * case.repeat
        low, high = (0.9, 1.1) if wide and case.impl == "f_stages" else (0.999, 1.001)
        return {"ms_p50": ms, "ms_p20": low * ms, "ms_p80": high * ms}

    chapter = changed(results_root, change)
    text = ladder_words.ladder(chapter, MACHINE, "forward")
    lost, *rest = text.split("Steps that lose: ")[1].split(" Not settled, ")
    title = steps.STEPS["f_tiles"].title
    assert (title in lost) == (not wide) and bool(rest) == wide
    assert not wide or f"overlap: *{title}* (1.10 × the time)." in rest[0]
    assert (f"- *{title}*" in ladder_words.missed(chapter, MACHINE, "forward")) == (not wide)


def test_gains_are_told_in_clocks_where_the_clock_changed(results_root):
    """A step that gains a tenth, all of it by the clock; its base's clock is that of all others."""

    def change(case):
        if case.kind != "ladder":
            return {}
        ms = steps.predicted_ms(steps.STEPS[case.impl])
        if case.impl == "f_tiles":
            return {"ms_p50": ms / 1.1, "sm_mhz": 1.1 * 1725}
        return {"ms_p50": ms * (1 + 0.02 * case.repeat), "sm_mhz": 1725.0 * (1 + 0.01 * case.repeat)}

    chapter = changed(results_root, change)
    text = ladder_words.missed(chapter, MACHINE, "forward")
    title = steps.STEPS["f_tiles"].title
    assert (
        f"- *{title}*: 0.995 × expected, 1.09 × measured, at 1,898 MHz instead of 1,725: in clocks 0.995 ×."
        in text
    )
    assert text.endswith("Where no more is said, no row says why.")
    text = ladder_words.predictions(chapter, MACHINE)
    assert (
        "is for 1,830 MHz; steps were seen at 1,725 MHz" in text
        and f"median of {1725 / 1830:.3f}, from" in text
    )


def test_a_gain_below_the_expectation_has_its_reason(results_root):
    """Heaviest tiles first gain less than expected: settled or not, the guess is the same; more has no reason."""
    said = {}
    for slower in (1.1, 1 / 1.1):

        def change(case, slower=slower):
            if case.kind != "ladder":
                return {}
            ms = steps.predicted_ms(steps.STEPS[case.impl]) * (slower if case.impl == "f_heavy_first" else 1)
            return {"ms_p50": ms * (1 + 0.02 * case.repeat)}

        text = ladder_words.missed(changed(results_root, change), MACHINE, "forward")
        assert f"- *{steps.STEPS['f_heavy_first'].title}*: 1.15 × expected" in text
        said[slower] = "a guess is that the last ones of a grid run faster" in text
    assert said == {1.1: True, 1 / 1.1: False}


def test_kernels_that_are_not_known_are_not_counted_as_none(results_root):
    """What peers launch is not in the rows: an empty cell is no zero."""
    chapter = changed(results_root, lambda case: {"kernels": ""} if case.impl == "sdpa_cudnn" else {})
    launched = page.first_table(chapter, MACHINE).set_index("implementation")["kernels launched"]
    assert launched["ours, Triton"] == "4" and set(launched.drop(["ours, Triton", "ours, plain Triton"])) == {
        "–"
    }


def test_units_that_read_the_same_are_named_together(results_root):
    def change(case):
        return {"exp_pct": 62.8, "tensor_pct": 63.2} if case.kind == "counters" else {}

    text = words.counters(changed(results_root, change), MACHINE)
    assert (
        "shared memory and L1 (75 % of the cycles) and tensor cores and special function units (63 % each)"
        in text
    )


def test_a_rate_at_the_data_sheets_is_not_above_it(results_root):
    def change(case):
        return {"tflops": 67.0} if case.kind == "kernel" and case.dtype == "fp32" else {}

    assert "own rate is above" not in fp32.words(changed(results_root, change), roofs(MACHINE), MACHINE)


def test_a_production_kernel_that_is_not_the_fastest_is_told(results_root):
    def change(case):
        slow = 1.5 if case.impl == "f_production" else 1
        return {"ms_p50": slow * steps.predicted_ms(steps.STEPS[case.impl])} if case.kind == "ladder" else {}

    chapter = changed(results_root, change)
    text = ladder_words.ladder(chapter, MACHINE, "forward")
    assert "own kernels is *three loads in flight*; the production kernels take 1.51 times as long" in text
    as_expected = changed(
        results_root,
        lambda case: change(case) if case.impl != "f_production" else {"ms_p50": 1.0 + 0.02 * case.repeat},
    )
    assert "own kernels is" not in ladder_words.ladder(as_expected, MACHINE, "forward")


@pytest.mark.parametrize("number_ms", [2.0, 2.9])
def test_a_remainder_below_zero_is_explained_as_far_as_rows_go(results_root, number_ms):
    def change(case):
        if case.kind == "harness" and case.impl == "flash_triton":
            return {"ms_p50": 3.8, "ms_mean": 3.8, "sm_mhz": 1750.0 if number_ms == 2.0 else 1650.0}
        if case.kind == "kernel" and case.impl == "flash_triton":
            ms = 1.0 if case.part == "forward" else number_ms if case.grad_o == "number" else 3.0
            return {"ms_p50": ms, "sm_mhz": 1700.0 + 100 * case.repeat}
        return {}

    chapter = changed(results_root, change)
    text = words.gap(chapter, roofs(MACHINE), MACHINE, "flash_triton")
    assert "Less than nothing can remain" in text
    clocks = "The clock seen there is higher, too: 1,750 MHz; here 1,700 forward and 1,700 backward."
    assert (clocks in text) == (number_ms == 2.0) == ("The clock seen there" in text)
    assert ("the backward kernels alone take 1.00 ms less, more than the" in text) == (number_ms == 2.0)
    assert "forward 1,800 MHz instead of 1,700, backward 1,800 MHz instead of 1,700" in text
    assert "Less than nothing" not in words.gap(chapter, roofs(MACHINE), MACHINE, "plain_triton")


def test_one_leaf_and_three_are_held_against_the_noise(results_root):
    def change(case):
        if case.kind != "harness" or case.rep_ms == OFFICIAL_MS:
            return {}
        more = {"flash_triton": 0.01, "fa4": -0.3}.get(case.impl, 0.3)
        return {"ms_p50": 4.0 + more * (case.leaves == "stacked") + 0.1 * case.repeat}

    text = harness_words.stacked_against_separate(changed(results_root, change), roofs(MACHINE), MACHINE)
    assert (
        "ours, Triton 0.010 ms (within the spread), ours, plain Triton 0.30 ms, FlashAttention-4 −0.30 ms"
        in text
    )
    assert "Why FlashAttention-4 should be faster with one leaf, no row says." in text
    assert f"would take {15 * 16 * 16384 * 64 * 2 / 3e9:.3f} ms" in text


@pytest.mark.parametrize("faster_clock", [False, True])
def test_one_number_against_a_matrix_counts_all_implementations(results_root, faster_clock):
    """Three save a tenth; SDPA's own kernel takes as long as before, by less than the noise, and draws less power."""

    def change(case):
        if case.kind != "kernel" or case.part != "backward" or case.impl == "fa4":
            return {}
        number = case.grad_o == "number"
        if case.impl == "sdpa_flash":
            return {"ms_p50": 2.999 if number else 3.0, "power_w": 600.0 if number else 650.0}
        mhz = {"sm_mhz": 1900.0} if number and faster_clock else {}
        return {"ms_p50": 2.7 if number else 3.0 + 0.03 * case.repeat} | mhz

    text = harness_words.number_against_matrix(changed(results_root, change), roofs(MACHINE), MACHINE)
    assert "ours, Triton 2.70 ms instead of 3.00" in text
    said = "Of all 4 implementations measured so, in two runs, 3 take less time by more than kernels"
    assert f"{said} and their repetitions differ in one run (1.0 %): 10 %." in text
    clock = "were seen at clocks higher by 10 %; SDPA (flash), as fast as before, at the same clock, but drawing 600 W"
    assert (clock in text) == faster_clock and ("What else is saved no row says" in text) != faster_clock


def test_a_version_that_says_nothing_is_not_shown(results_root):
    def change(case):
        return (
            {"backend": "flash_attn.cute 0.0.0", "kernels": None}
            if case.impl == "fa4" and case.kind == "harness"
            else {}
        )

    text = words.backends(changed(results_root, change), MACHINE)
    assert "`flash_attn.cute` (it tells no version)" in text and "0.0.0" not in text


def test_the_configuration_in_use_is_that_of_step_13():
    """What the page says below the ladders."""
    launch = pytest.importorskip("cs336_systems.attention.hopper.launch")
    heads, tokens, head_dim = WORK
    forward, backward = (list(steps.of_part(part))[12] for part in steps.PARTS)
    assert launch.Forward(**forward.config[1]) == launch.forward_config(
        heads, tokens, tokens, head_dim, steps.SMS
    )
    assert launch.Backward(**backward.config[1]) == launch.BACKWARD[launch.padded(head_dim)]


def test_the_ratio_to_what_memory_allows_is_that_of_the_page(project_root):
    """295 FLOPs a byte, and sixteen times as many: in the prose by hand."""
    sheet = accounting.peaks(words.H100)
    balance = sheet.tflops["bf16"] / sheet.tb_per_s
    moved = accounting.attention_bytes(*WORK[:2], *WORK[1:], 2, "end_to_end")
    assert round(balance) == 295 and round(page.work_flops("end_to_end") / moved / balance) == 16
    text = (project_root / "book" / "leaderboard.ipynb").read_text(encoding="utf-8")
    assert "computes 295 FLOPs" in text and "sixteen times as many" in text


@pytest.mark.parametrize("part", steps.PARTS)
def test_the_table_of_expectations_says_what_each_step_changes(part):
    found = ladder.expectations(part)
    assert not found["step"].str.contains("`").any()  # code does not break into lines
    assert found["because"].str.len().gt(20).all()
    numbers = found["from"].iloc[1:].astype(int)
    assert (numbers < found["#"].iloc[1:]).all() and numbers.ge(1).all()
