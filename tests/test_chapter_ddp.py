"""Chapter ddp: its grid, how its groups are measured and recorded, what its page shows of known rows."""

from __future__ import annotations

import dataclasses
import json
import math

import pandas as pd
import pytest

from cs336_systems import chapters
from cs336_systems.chapters.ddp import measure as ddp
from cs336_systems.chapters.ddp import show as page
from cs336_systems.chapters.ddp.measure import Case
from cs336_systems.chapters.zero import measure as zero
from cs336_systems.measure.trace import nsys
from cs336_systems.measure.trace import overlap as trace_overlap
from cs336_systems.measure.trace.events import Range, Trace
from cs336_systems.report import tables
from cs336_systems.store import machine, rows
from cs336_systems.store.process import ChildError

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
pytestmark = pytest.mark.usefixtures("forked")
TINY = Case("tiny", 16, "naive", dtype="fp32")
TRACED = trace_overlap.Overlap(
    source="nsys", length_ms=10.0, communication_ms=3.0, compute_ms=8.0, overlap_ms=1.0, backward_overlap_ms=1.0,
    collectives=2, phases=(("forward", 0, 3_000_000), ("backward", 3_000_000, 4_000_000)),
    compute=((0, 5_000_000), (6_000_000, 2_000_000)), communication=((6_000_000, 3_000_000),),
)  # fmt: skip


def case(**changes):
    return dataclasses.replace(TINY, **changes)


# ------------------------------------------------------------------------------------------------ measuring
@without_gpu
def test_a_group_on_two_ranks():
    group = [
        case(wrapper="alone"), case(wrapper="none"), case(), case(wrapper="bucketed", bucket_mb=0.5),
        case(wrapper="bucketed", bucket_mb=0.5, repeat=1), case(wrapper="none", context_length=32),
    ]  # fmt: skip
    found = list(ddp.run_group(group))
    for c, row in zip(group, found, strict=True):
        assert set(row) <= set(ddp.TABLE.metrics) and "status" not in row
        assert row["backend"] == "gloo" and row["matmul_precision"] == "highest"
        assert row["step_ms_p20"] <= row["step_ms_p50"] <= row["step_ms_p80"]
        tokens = c.batch * c.context_length * (1 if c.wrapper == "alone" else 2)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_ms_p50"] * 1e3)
    assert [row["collectives"] for row in found] == [0, 0, 21, 3, 3, 0]


@without_gpu
def test_a_recorded_group(results_root):
    group = [case(kind="trace"), case(kind="trace", wrapper="bucketed", bucket_mb=0.1)]
    found = list(ddp.run_group(group))
    for c, row in zip(group, found, strict=True):
        assert set(row) <= set(ddp.TABLE.metrics) and "status" not in row
        assert row["source"] == "torch-cpu" and row["tool_version"]
        assert 0 < row["communication_ms"] < row["traced_ms"] and 0 < row["compute_ms"] < row["traced_ms"]
        assert 0 <= row["backward_overlap_ms"] <= row["overlap_ms"] <= row["communication_ms"]
        steps = trace_overlap.from_json(rows.file_beside(ddp.TABLE, c, machine.machine_name(), results_root))
        assert len(steps) == 2 and [name for name, *_ in steps[0].phases][:2] == ["forward", "backward"]
    assert found[0]["messages"] == 22 and found[0]["backward_overlap_ms"] == 0
    assert found[1]["messages"] == 8  # seven buckets, and which gradients there are


@without_gpu
def test_what_does_not_fit_is_not_begun(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 8 * 2**30)
    large = list(ddp.run_group([case(size="xl"), case(size="xl", wrapper="none")]))
    assert len(large) == 2 and all("8.0 GiB are free" in row["status"] for row in large)


@without_gpu
def test_nsight_systems_records_all_ranks_in_one_report(monkeypatch, results_root):
    """What is asked of it, and how its trace is read; the recording itself needs GPUs."""
    group = [case(kind="trace"), case(kind="trace", wrapper="torch")]
    asked = {}

    seen = ["rank 0", "rank 1"]

    def record_nsys(function, arguments, timeout_s, keep):
        asked.update(function=function, arguments=json.loads(json.dumps(arguments)))
        return None, Trace("nsys", (), tuple(Range(name, 0, 1, n, n) for n, name in enumerate(seen)))

    def overlap(trace, name, phases):
        asked.setdefault("ranges", []).append(name)
        return [TRACED]

    monkeypatch.setattr(ddp.nsys, "record_nsys", record_nsys)
    monkeypatch.setattr(ddp.nsys, "find", lambda: "/usr/bin/nsys")
    monkeypatch.setattr(ddp.nsys, "version", lambda: "2025.3")
    monkeypatch.setattr(ddp.overlap, "overlap", overlap)
    monkeypatch.setattr(ddp.machine, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    found = list(ddp.run_group(group))
    assert all(row["source"] == "nsys" and row["tool_version"] == "2025.3" for row in found)
    assert asked["function"] == "cs336_systems.chapters.ddp.measure:under_nsys"
    assert [Case(**c) for c in asked["arguments"]["cases"]] == group
    assert asked["ranges"] == [f"rank {r}/{name}/step" for name in ("naive", "torch") for r in (0, 1)]

    seen.remove("rank 1")  # then each rank is recorded by torch's profiler
    step = dataclasses.asdict(TRACED) | {"source": "torch"}
    monkeypatch.setattr(ddp, "_launch", lambda function, cases, keep: [[[step]] * 2] * 2)
    assert [row["source"] for row in ddp.run_group(group)] == ["torch"] * 2

    # as where it is installed, and cannot write a report
    for error in (nsys.NsysError("there is no report"), ChildError("longer than 9 s"), ValueError("damaged")):

        def fails(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(ddp.nsys, "record_nsys", fails)
        assert [row["source"] for row in ddp.run_group(group)] == ["torch"] * 2


@without_gpu
def test_ranks_on_several_nodes_are_recorded_each_in_itself(monkeypatch, results_root):
    """Under Nsight Systems all ranks would run on this node, which has one GPU: on its CPU."""

    def record_nsys(*arguments, **options):
        pytest.fail("was asked for ranks of another node")

    step = dataclasses.asdict(TRACED) | {"source": "torch"}
    monkeypatch.setattr(ddp.nsys, "record_nsys", record_nsys)
    monkeypatch.setattr(ddp.nsys, "find", lambda: "/usr/bin/nsys")
    monkeypatch.setattr(ddp.nsys, "version", lambda: "2025.3")
    monkeypatch.setattr(ddp, "_launch", lambda function, cases, keep: [[[step]]] * 2)
    monkeypatch.setattr(ddp.machine, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setenv("CS336_NODES", "2")
    assert [row["source"] for row in ddp.run_group([case(kind="trace")])] == ["torch"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(results_root):
    ways = (
        ("alone", 0.0), ("none", 0.0), ("naive", 0.0), ("bucketed", 1.0), ("in_place", 1.0), ("torch", 0.0),
    )  # fmt: skip
    group = [case(wrapper=w, bucket_mb=mb, dtype="tf32") for w, mb in ways]
    for row in ddp.run_group(group):
        assert "status" not in row and row["backend"] == "nccl" and row["peak_gib"] > 0
    traced = [dataclasses.replace(c, kind="trace") for c in group[2:]]
    for c, row in zip(traced, ddp.run_group(traced), strict=True):
        assert "status" not in row and row["communication_ms"] > 0
        assert (
            len(trace_overlap.from_json(rows.file_beside(ddp.TABLE, c, machine.machine_name(), results_root)))
            == 2
        )


# ------------------------------------------------------------------------------------------------ page
def timed(wrapper, step, backward=100.0, wait=0.0, **more):
    """A row of a timed step, on two GPUs at context 1,024 unless `more` says otherwise."""
    fields = dataclasses.asdict(Case("xl", 1024, wrapper, kind="time"))
    lacking = dict.fromkeys(ddp.TABLE.metrics, math.nan)
    found = {"step_ms_p20": step, "step_ms_p50": step, "step_ms_p80": step, "backward_ms_p50": backward,
             "synchronization_ms_p50": wait, "backend": "nccl", "status": "ok", "run": "r", "machine": "x",
             "time_utc": "2026-01-01T00:00:00Z", "env": "0" * 8, "code": "0" * 8}  # fmt: skip
    return fields | lacking | found | more


def laptop(case):
    """A made-up result of a case on a CPU, for tests/test_chapters.py."""
    return {"step_ms_p50": 10.0, "backward_ms_p50": 8.0, "synchronization_ms_p50": 1.0, "backend": "gloo"}


def reduces(*points):
    fixed = {
        "machine": "x", "backend": "nccl", "how": "all_reduce", "world_size": 2, "repeat": 0, "status": "ok",
    }  # fmt: skip
    return pd.DataFrame([fixed | {"num_bytes": n, "ms_p50": ms} for n, ms in points])


def steps(*given, points=()):
    known = reduces(*points) if points else reduces((1, 1.0)).iloc[:0]
    return page.steps(pd.DataFrame(given), known)


def test_exposed_time_is_over_the_same_run_without_communication():
    found = steps(
        timed("alone", 180.0), timed("none", 200.0), timed("naive", 250.0, 101.0, 48.0),
        timed("torch", 240.0, 140.0, 1.0),
        timed("naive", 270.0, run="another"), timed("bucketed", math.nan, bucket_mb=25.0, status="oom"),
        timed("none", 190.0, repeat=1),
    ).set_index(["variant", "run", "repeat"])  # fmt: skip
    naive = found.loc["naive", "r", 0]
    assert (naive.exposed_ms, naive.longer_ms, naive.wait_ms, naive.scaling) == (50.0, 1.0, 48.0, 0.72)
    assert found.loc["torch DDP", "r", 0].exposed_ms == 40.0
    assert math.isnan(found.loc["torch DDP", "r", 0].wait_ms), "it waits inside its backward pass"
    assert math.isnan(found.loc["naive", "another", 0].exposed_ms)
    assert math.isnan(found.loc["bucketed, 25 MB", "r", 0].exposed_ms)
    assert math.isnan(found.loc["no communication", "r", 0].exposed_ms)


def test_the_predicted_wait_is_that_of_the_messages_left():
    sent = page.messages("xl", "overlapped")
    assert len(sent) == 435 and page.messages("xl", "flat") == [sum(sent)]
    assert (
        page.messages("xl", "bucketed", 1000.0)[-1] > page.messages("xl", "bucketed", 100.0)[-1] == sent[-1]
    )
    points = [(2**10, 0.01), (2**20, 0.01), (2**30, 10.24)]  # flat below 1 MB, then in proportion
    assert page.all_reduces_ms(reduces(*points), [2**10, 2**18]) == pytest.approx(0.02)
    assert page.all_reduces_ms(reduces(*points), [2**25]) == pytest.approx(0.32)
    assert page.all_reduces_ms(reduces(*points), [2**32]) == pytest.approx(40.96)
    found = steps(
        timed("none", 1.0), timed("naive", 1.0), timed("flat", 1.0), timed("overlapped", 1.0), timed("torch", 1.0),
        timed("naive", 1.0, backend="gloo"), points=points,
    )["predicted_ms"]  # fmt: skip
    per_byte = 10.24 / 2**30
    assert found[2] == pytest.approx(per_byte * sum(sent)) and found[3] == pytest.approx(per_byte * sent[-1])
    assert found[1] > found[2] and found[[0, 4, 5]].isna().all()


def test_the_main_rows_are_of_the_fewest_gpus_and_the_longest_context():
    found = steps(
        timed("none", 1.0, world_size=1), timed("none", 2.0), timed("none", 3.0, context_length=512),
        timed("none", 4.0, world_size=4), timed("none", 5.0, dtype="fp32"), timed("none", 6.0, repeat=1),
    )  # fmt: skip
    assert list(page.main(found)["step_ms_p50"]) == [2.0]
    assert page.main(found[found["world_size"] == 1]).empty


def test_pace_holds_a_step_against_itself_and_against_another_chapter():
    alone = dict.fromkeys(zero.TABLE.metrics, math.nan) | {
        "variant": "alone", "moment": "timed", "repeat": 0, "machine": "x",
    }  # fmt: skip
    other = pd.DataFrame(
        [alone | {"context_length": 1024, "world_size": n, "step_ms_p50": 100.0 * n} for n in (2, 4)]
    )
    found = page.pace(steps(
        timed("none", 200.0, step_ms_p20=190.0, step_ms_p80=210.0), timed("flat", 300.0),
        timed("flat", 240.0, repeat=1),        timed("none", 100.0, context_length=512),
    ), other).set_index("context")  # fmt: skip
    assert list(found.loc[1024])[1:] == pytest.approx([200.0, 200.0, 10.0, 25.0])
    assert list(found.loc[512])[1:] == pytest.approx([100.0, math.nan, 0.0, math.nan], nan_ok=True)


def test_variants_stand_in_their_order_and_a_failure_says_its_name():
    found = page.variants(steps(
        timed("torch", 240.0), timed("flat", math.nan, status="oom"), timed("none", 200.0, collectives=0),
        timed("alone", 190.0),
        timed("bucketed", 220.0, 110.0, 2.0, bucket_mb=100.0, collectives=98), timed("bucketed", 230.0, bucket_mb=25.0),
    ))  # fmt: skip
    assert list(found["variant"]) == ["no communication", "flat", "bucketed, 100 MB", "torch DDP"]
    assert (
        found["all-reduces"].isna().tolist() == [False, True, False, True] and found["all-reduces"][2] == 98
    )
    assert found.iloc[2, 3:7].tolist() == [220.0, 20.0, 10.0, 2.0]
    assert list(tables.printed(found)["step, ms"]) == ["200", "OOM", "220", "240"]


def test_buckets_stand_by_their_limit():
    found = page.sweep(steps(
        timed("none", 1.0), timed("bucketed", 30.0, bucket_mb=1000.0), timed("bucketed", 20.0, bucket_mb=250.0),
        timed("in_place", 10.0, bucket_mb=250.0),
    ))  # fmt: skip
    assert found["limit, MB"].tolist() == [250, 1000] and found["all-reduces"].tolist() == [33, 8]
    assert found["bucketed: step, ms"].tolist() == [20.0, 30.0]
    assert found["in place: step, ms"][0] == 10.0 and math.isnan(found["in place: step, ms"][1])
    assert found["last message, MB"].tolist() == pytest.approx([139.2, 705.6], abs=0.1)


def test_scaling_shows_what_every_number_of_gpus_has():
    given = [
        timed(w, ms * n, world_size=n)
        for n in (2, 4)
        for w, ms in (("alone", 40.0), ("none", 50.0), ("naive", 80.0))
    ]
    found = page.scaling(steps(*given, timed("flat", 1.0), timed("none", 1.0, world_size=1))).set_index(
        "variant"
    )
    assert list(found.index) == ["no communication", "naive"]
    assert found.loc["naive", "exposed, 4 GPUs"] == 120.0 and found.loc["naive", "scaling, 2 GPUs"] == 50.0
    twice = page.scaling(steps(*given, *(row | {"machine": "y"} for row in given)))
    assert "step, 2 GPUs of y" in twice and page.scaling(steps(timed("none", math.nan, status="oom"))).empty


def test_figures(results_root):
    found = [
        timed("none", 200.0),
        timed("naive", 260.0, kind="trace"),
        timed("overlapped", 250.0, kind="trace"),
    ]
    found += [timed("bucketed", 200.0 + mb, bucket_mb=mb, collectives=100 / mb) for mb in (1.0, 10.0, 100.0)]
    left, right = page.sweep_figure(steps(*found, points=[(1, 1.0)]), 1e9, 1e8, 1e-2).axes
    exposed, model = (line.get_ydata() for line in left.lines)
    assert list(exposed) == [1.0, 10.0, 100.0] and model == pytest.approx([1.1, 1.1, 10.01])
    assert len(right.lines) == 2

    rows.write(ddp.TABLE, "x", [row | {"context_length": 1024} for row in found], results_root)
    chapter = chapters.read("ddp", machine="x", preset="full")
    assert len(page.trace_figure(chapter, ("naive", "overlapped")).axes) == 1, "no traces were kept"
    for wrapper in ("naive", "overlapped"):
        path = rows.file_beside(ddp.TABLE, Case("xl", 1024, wrapper, kind="trace"), "x", results_root)
        path.parent.mkdir(exist_ok=True)
        trace_overlap.to_json([TRACED] * 2, path)
    drawn = page.trace_figure(chapter, ("naive", "overlapped")).axes
    assert [ax.get_title() or ax.get_title(loc="left") for ax in drawn] == ["naive", "overlapped"]
    assert drawn[1].get_xlim() == (0, 10)
    assert len(drawn[0].collections) == 2 * 3, "two phases and the communication of each rank"
    assert len(page.schematic().axes) == 1
