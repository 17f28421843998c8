"""Chapter zero: its grid, what is measured on several processes against the closed forms, and what its page shows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import step_rows

from cs336_systems.accounting import Peaks
from cs336_systems.accounting.zero import STEP_MOMENTS, tensor_sizes
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.zero import measure as zero
from cs336_systems.chapters.zero import show as page
from cs336_systems.chapters.zero.measure import Case
from cs336_systems.report.claims import execute
from cs336_systems.sizes import size
from cs336_systems.store import rows, selection

torch = pytest.importorskip("torch")
not_with_one_gpu = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

pytestmark = pytest.mark.usefixtures("forked")

TINY = {"size": "tiny", "bucket_mb": 0.25}


# --------------------------------------------------------------------------------------------- grids
@pytest.mark.parametrize("preset", selection.PRESETS)
def test_what_has_a_launch_to_itself_has_it_for_one_variant_and_what_takes_turns_is_timed(preset):
    for group in rows.groups(zero.TABLE, zero.grid(preset)):
        assert len({c.variant for c in group}) == 1 or {c.moment for c in group} == {zero.TIMED}


# --------------------------------------------------------------------------------------------- measured
def case_of(row):
    return Case(**{f: type(default)(row[f]) for f, default in dataclasses.asdict(Case("", 0, "")).items()})


@pytest.mark.slow
@not_with_one_gpu
def test_smoke_agrees_with_the_closed_forms(smoke):
    found = smoke[0].to_dict("records")
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    assert {row["status"] for row in found} == {"ok"} and len(found) == len(zero.grid("smoke"))
    peaks = {}
    for row in found:
        if row["moment"] == zero.TIMED:
            continue
        case = case_of(row)
        expected = zero.predicted(case, device)
        for part, num_bytes in expected.items():
            # what the graph has saved contains the ids, which are there already
            assert row[f"{part}_bytes"] == pytest.approx(num_bytes, rel=1e-3, abs=100), (case, part)
        assert sum(row[column] for column in zero.COMPONENT_COLUMNS.values()) == row["live_bytes"]
        if device == "cpu":
            assert row["live_bytes"] == pytest.approx(sum(expected.values()), rel=0.02)
            peak = sum(zero.predicted_peak(case, device).values())
            peaks.setdefault(case.variant, [peak]).append(row["peak_bytes"])
    for peak, *measured in peaks.values():
        assert max(measured) == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@not_with_one_gpu
def test_smoke_counts_what_is_sent(smoke):
    found = smoke[0].to_dict("records")
    counted = {r["variant"]: r for r in found if r["moment"] == zero.TIMED and r["repeat"] == 0}
    sizes = tensor_sizes(size("tiny"))
    whole = 4 * sum(sizes)
    assert set(counted) == set(zero.VARIANTS)
    assert counted["overlapped"]["broadcast_calls"] != counted["overlapped"]["broadcast_calls"]  # empty
    assert counted["alone"]["all_reduce_calls"] == counted["alone"]["broadcast_calls"] == 0
    for variant in ("sharded", "torch_zero"):
        assert counted[variant]["broadcast_calls"] == len(sizes)
        assert counted[variant]["broadcast_bytes"] == whole
    for variant in ("plain", "sharded"):  # a byte a parameter tells which gradients there are
        assert counted[variant]["all_reduce_bytes"] == whole + len(sizes)
    for variant in ("torch", "torch_zero"):
        assert counted[variant]["all_reduce_bytes"] == whole
    assert {counted[variant]["other_calls"] for variant in counted if variant != "overlapped"} == {0}
    for row in found:
        if row["moment"] == zero.TIMED:
            assert row["step_ms_p20"] <= row["step_ms_p50"] <= row["step_ms_p80"]
            assert row["tokens_per_s"] == pytest.approx(2 * 2 * 64 / row["step_ms_p50"] * 1e3, rel=1e-3)
    assert len({r["run"] for r in found if r["moment"] == zero.TIMED}) == 1


@pytest.mark.slow
@not_with_one_gpu
def test_the_notebook_on_smoke_rows(smoke, project_root, monkeypatch):
    monkeypatch.setenv("CS336_RESULTS", str(smoke[1]))
    sentences, _ = execute(project_root / "book" / "zero.ipynb", machine="this", preset="smoke")
    sharded = next(s for s in sentences if s.part == "optimizer_state_sharding")
    assert sharded.outcome is True  # on any model and machine a half is a half


@without_gpu
@pytest.mark.slow
def test_torchs_container_keeps_buckets_and_one_rank_has_none():
    """The variants that the smoke preset leaves out."""
    for variant, world_size in (("torch_zero", 2), ("alone", 1)):
        cases = [Case(variant, 64, moment, world_size=world_size, **TINY) for moment in STEP_MOMENTS]
        for case, row in zip(cases, zero.run_group(cases), strict=True):
            assert "status" not in row, row
            for part, num_bytes in zero.predicted(case, "cpu").items():
                assert row[f"{part}_bytes"] == pytest.approx(num_bytes, rel=1e-3, abs=100), (case, part)


def test_what_fails_as_it_is_counted_is_the_case_whose_turn_it_is(monkeypatch):
    """After all have been timed, which ends with another one's turn."""
    from cs336_systems.chapters.zero import ranks

    said = []

    @contextlib.contextmanager
    def step(work, case):
        said.append(f"step of {case.variant}")
        yield SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(ranks, "begin_turn", lambda rank, case: said.append(f"turn of {case.variant}"))
    monkeypatch.setattr(ranks, "_step", step)
    monkeypatch.setattr(ranks, "_counted", lambda step, rank: {})
    ranks._all_counted(SimpleNamespace(rank=None), [Case(v, 64, zero.TIMED) for v in ("plain", "sharded")])
    assert said == ["turn of plain", "step of plain", "turn of sharded", "step of sharded"]


def test_a_moment_is_that_of_the_rank_that_holds_most_in_the_end():
    cases = [Case("plain", c, m) for c in (128, 512) for m in STEP_MOMENTS]
    by_rank = [[{"live_bytes": case.context_length + rank} for case in cases] for rank in range(2)]
    found = zero._of_fullest(cases, by_rank)
    # and how far the other is from it
    assert [row["live_bytes"] for row in found] == [case.context_length + 1 for case in cases]
    assert {row["rank_spread_bytes"] for row in found} == {1}


# --------------------------------------------------------------------------------------------- page
GIB = 2**30
WHOLE = 4 * sum(tensor_sizes(size("xl")))
SHEET = Roofs(sheet=Peaks(4.8, 900, {}))


frame = functools.partial(
    step_rows.frame, zero.TABLE, **dataclasses.asdict(Case("", 512, zero.TIMED))
)  # XL on two GPUs


def held(variant, moment, gib, **more):
    return {"variant": variant, "moment": moment, "live_bytes": gib * GIB, "peak_bytes": gib * GIB} | more


def test_memory_stands_beside_its_closed_form():
    found = page.memory(frame(
        held("sharded", "first_after", 23.0, gradients_bytes=WHOLE),
        held("plain", "first_after", 30.0),
        held("plain", "initialized", 7.5),
        held("plain", "initialized", 9.9, repeat=1),
        held("plain", "later_before", math.nan, status="oom"),
    ))  # fmt: skip
    assert found["allocated, GiB"][:3].tolist() == [7.5, 30.0, 23.0] and math.isnan(
        found["allocated, GiB"][3]
    )
    assert list(found.attrs["words"]["peak, GiB"].values())[-1] == "OOM"
    psi = WHOLE / 4 / GIB
    assert found["closed form, GiB"].tolist() == pytest.approx(
        [4 * psi, 16 * psi, 12 * psi, 16 * psi], rel=1e-5
    )
    assert found["gradients, GiB"][2] == 4 * psi
    assert "buckets, GiB" not in found and "context" not in found


def test_the_peak_of_a_later_step_is_that_of_all_its_moments():
    three = ("later_forward", "later_before", "later_after")
    found = page.peaks(frame(
        *(held("plain", m, x) for m, x in zip(three, (33.0, 31.0, 30.0), strict=True)),
        *(held("sharded", m, x) for m, x in zip(three, (25.0, math.nan, 22.0), strict=True)),
    ))  # fmt: skip
    assert found["peak, GiB"][0] == 33.0 and math.isnan(found["peak, GiB"][1])
    assert found["closed form, GiB"][0] == pytest.approx(32.52, abs=0.01)


def timed(variant, optimizer_ms, context=1024, **more):
    return {
        "variant": variant, "context_length": context, "optimizer_ms_p50": optimizer_ms, "step_ms_p50": 250.0,
    } | more  # fmt: skip


PROFILED = [
    timed(
        "plain", 20.0, 128, update_ms=16.0, communication_ms=0.0, link_sent_bytes=1.0 * GIB, all_reduce_calls=99,
    ),
    timed(
        "sharded", 24.0, 128, update_ms=9.0, communication_ms=18.0, link_sent_bytes=2.0 * GIB,
        all_reduce_calls=99,
    ),
    timed("torch_zero", 38.0, 128, update_ms=8.0, communication_ms=26.0),
]  # fmt: skip


def test_times_have_the_data_sheets_beside_them():
    # 28 bytes a parameter at 4.8 TB/s take 11.66 ms; 4 bytes of half of them at 450 GB/s 8.88
    found = page.times(
        frame(timed("overlapped", 11.0), timed("plain", 19.0), timed("torch_zero", 38.0)), {"x": SHEET}
    )
    assert found["optimizer, ms"].tolist() == [19.0, 11.0, 38.0]
    assert found["expected, ms"].tolist() == pytest.approx([11.66, 5.83, 5.83 + 8.88], abs=0.01)
    assert page.times(frame(timed("plain", 19.0)), {"y": SHEET})["expected, ms"].isna().all()


def test_kernels_make_a_schedule():
    rows = frame(
        *PROFILED,
        *(timed(v, 20.0) for v in ("alone", "plain", "sharded", "overlapped", "torch", "torch_zero")),
    )
    found = page.kernels(rows).set_index("variant")
    assert list(found.index) == ["plain", "sharded", "overlapped", "torch_zero"]
    # an update of 16 ms; in 4 rounds a quarter of 8 and all of 18; half of 16; one after the other
    assert found["schedule_ms"].tolist() == pytest.approx([16, 20, 8, 34])
    assert found.loc["sharded", "link_gb_per_s"] == pytest.approx(WHOLE / 2 / 18e6)
    ax = page.schedule_figure(rows).axes[0]
    ends = [
        max(b.get_x() + b.get_width() for b in ax.patches if abs(b.get_y() + 0.17 - y) < 0.3)
        for y in range(4)
    ]
    assert ends == pytest.approx(
        [16, 20, 20, 34]
    )  # the broadcasts of `overlapped` end beside the forward pass
    assert (
        page.kernels(frame(timed("plain", 20.0))).empty
        and page.schedule_figure(frame(timed("plain", 20.0))).axes
    )


def test_panels_that_share_their_names_have_bars_beside_them():
    """On four GPUs `sharded` was not profiled: its place stays empty, and the others keep theirs."""
    variants, four = ("plain", "sharded", "torch_zero"), {"world_size": 4, "machine": "y"}
    lines = [*PROFILED, *(timed(v, 20.0) for v in variants)]
    lines += [line | four for line in PROFILED if line["variant"] != "sharded"]
    lines += [timed(v, 20.0, **four) for v in variants]
    two, other = page.schedule_figure(frame(*lines)).axes
    assert [text.get_text() for text in two.get_yticklabels()] == [page.VARIANTS[v] for v in variants]
    places = lambda ax: sorted({round(bar.get_y() + 0.35) for bar in ax.patches if bar.get_width()})
    assert places(two) == [0, 1, 2] and places(other) == [0, 2]


def test_traffic_is_counted_and_predicted():
    found = page.traffic(frame(*PROFILED))
    assert found["together, GiB"].tolist() == pytest.approx([WHOLE / GIB, 1.5 * WHOLE / GIB, WHOLE / GIB])
    assert found["measured, GiB"].tolist()[:2] == [1.0, 2.0] and math.isnan(found["measured, GiB"][2])


# --------------------------------------------------------------------------------------------- GPUs
@pytest.mark.gpu
def test_on_gpus():
    """Every variant by NCCL, against the closed forms; each component to the block that the allocator rounds up to."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} are here")
    config = {"size": "tiny", "bucket_mb": 0.25}
    for variant in ("sharded", "torch_zero"):
        cases = [Case(variant, 64, moment, **config) for moment in STEP_MOMENTS]
        for case, row in zip(cases, zero.run_group(cases), strict=True):
            assert "status" not in row, row
            assert row["source"] == "allocator" and row["outside_bytes"] > 0
            for part in ("parameters", "gradients", "optimizer_state", "buckets"):
                slack = 32 * 512 if part != "buckets" else 1 << 20
                assert row[f"{part}_bytes"] == pytest.approx(zero.predicted(case)[part], abs=slack), (
                    case,
                    part,
                )
    cases = [Case(variant, 64, zero.TIMED, **config) for variant in zero.VARIANTS]
    found = dict(zip(zero.VARIANTS, zero.run_group(cases), strict=True))
    tensors = len(tensor_sizes(size("tiny")))
    for row in found.values():
        assert "status" not in row and row["step_ms_p50"] > 0, row
    assert found["sharded"]["broadcast_calls"] == tensors
    assert 0 < found["sharded"]["optimizer_launches"] < tensors / 2  # group calls
    assert found["plain"]["optimizer_launches"] == found["alone"]["optimizer_launches"] == 0
    assert found["sharded"]["update_ms"] > 0
