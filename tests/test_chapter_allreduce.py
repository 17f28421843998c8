"""Chapter allreduce: its grid, what its rows hold, what is refused and skipped, its page; alone and under torchrun."""

import functools
import itertools
import math
import os
import subprocess
import sys

import pandas as pd
import pytest
import step_rows

from cs336_systems import accounting, chapters
from cs336_systems.chapters.allreduce import measure as allreduce
from cs336_systems.chapters.allreduce import ranks
from cs336_systems.chapters.allreduce import show as page
from cs336_systems.chapters.allreduce.measure import MB, Case
from cs336_systems.launch.group import process_group
from cs336_systems.launch.start import LaunchError
from cs336_systems.report.tables import printed
from cs336_systems.store import machine, measuring, rows, selection

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
pytestmark = pytest.mark.usefixtures("forked")


# ------------------------------------------------------------------------------------------------ grid
def test_a_group_has_one_number_of_processes_and_begins_with_small_messages():
    cases = allreduce.grid("full")
    groups = rows.groups(allreduce.TABLE, cases)
    assert all(len({c.world_size for c in g}) == 1 for g in groups)
    for group in groups:  # a size's cases are next to each other, small ones first
        assert [c.num_bytes for c in group] == sorted(c.num_bytes for c in group)


# ------------------------------------------------------------------------------------------------ measuring
@without_gpu
def test_every_row_of_the_smoke_preset_is_ok(tmp_path):
    """Up to 1 MB: longer than the pattern that is summed."""
    cases = [case for case in allreduce.grid("smoke") if case.num_bytes <= MB]
    measuring.measure(allreduce.TABLE, cases, root=tmp_path, log=lambda line: None)
    smoke = rows.read(allreduce.TABLE, machine.machine_name(), tmp_path)
    assert len(smoke) == len(cases) and set(smoke["status"]) == {"ok"}
    assert set(smoke["world_size"]) == {2, 4} and set(smoke["library"]) == {"gloo"}
    assert (smoke["ms_p20"] <= smoke["ms_p50"]).all() and (smoke["ms_p50"] <= smoke["ms_p80"]).all()
    assert (smoke["warmups"] >= 5).all() and (smoke["calls"] >= 3).all() and (smoke["host_ms"] > 0).all()
    for row in smoke.to_dict("records"):
        rate = row["num_bytes"] / row["ms_p50"] / 1e6
        assert row["algorithm_gb_per_s"] == pytest.approx(rate, rel=1e-4)
        factor = 2 * (row["world_size"] - 1) / row["world_size"]
        assert row["bus_gb_per_s"] == pytest.approx(rate * factor, rel=1e-4)
    assert set(smoke[smoke["how"] == "all_reduce"]["error"]) == {0.0}  # integers: no rounding
    three = smoke[smoke["num_bytes"] == MB].groupby("world_size")["run"].agg(["size", "nunique"])
    assert set(three["size"]) == {3} and set(three["nunique"]) == {1}


@without_gpu
def test_three_processes_average_with_rounding_only():
    """Three does not divide: the sum is exact, the mean rounded. 128 bytes: fewer elements than the pattern has."""
    cases = [Case("gloo", "cpu", 3, s, how) for s in (128, 300 * 2**10) for how in allreduce.HOWS]
    found = allreduce.run_group(cases)
    assert [f["error"] for f in found[::2]] == [0, 0]
    assert max(f["error"] for f in found[1::2]) < 1e-6 and not any("status" in f for f in found)


def test_a_wrong_sum_is_an_error_row(monkeypatch):
    """Measured in this process alone, whose all-reduce loses an element."""
    from torch import distributed as dist

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    real = dist.all_reduce

    def loses_one(tensor, *args, **options):
        real(tensor, *args, **options)
        if tensor.numel() > 1000:
            tensor[123] = 0

    with process_group("gloo", "cpu") as rank:
        monkeypatch.setattr(dist, "all_reduce", loses_one)
        found = ranks._measure_size(rank, [Case("gloo", "cpu", 1, MB)])
        monkeypatch.undo()
        fine = ranks._measure_size(rank, [Case("gloo", "cpu", 1, 4096)])
    assert found[0]["status"].startswith("error: all_reduce is off by 0."), found
    assert "status" not in fine[0] and fine[0]["error"] == 0
    assert fine[0]["algorithm_gb_per_s"] > 0 and fine[0]["bus_gb_per_s"] is None


def test_what_does_not_fit_is_a_row_on_all_ranks(monkeypatch):
    def full(*args, **options):
        raise MemoryError

    with process_group("gloo", "cpu") as rank:
        monkeypatch.setattr(ranks, "_Operation", full)
        found = ranks._measure_size(rank, [Case("gloo", "cpu", 1, MB)] * 2)
    assert found == [{"status": "oom"}] * 2


def test_a_machine_with_too_little_memory_skips(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**30)
    [found] = allreduce.run_group([Case("gloo", "cpu", 6, 2**30)])
    assert found["status"] == "skipped: needs about 12.0 GiB of memory; 1.0 GiB are free"


def test_a_process_that_fails_makes_error_rows_and_the_next_group_runs(results_root, monkeypatch):
    from cs336_systems.chapters.shared import on_ranks

    def launch(function, world_size, *args, **options):
        if world_size == 2:
            raise LaunchError("rank 1 of 2: signal SIGKILL\nand more", 1)
        return [[{"ms_p50": 1.0}] * 7] * world_size

    monkeypatch.setattr(on_ranks, "launch", launch)
    with pytest.raises(measuring.MeasurementError, match="7 cases of allreduce ended in an error"):
        measuring.measure(allreduce.TABLE, allreduce.grid("smoke"), log=lambda line: None)
    found = rows.read(allreduce.TABLE, machine.machine_name())
    assert set(found[found["world_size"] == 2]["status"]) == {
        "error: LaunchError: rank 1 of 2: signal SIGKILL"
    }
    assert set(found[found["world_size"] == 4]["status"]) == {"ok"}


# ------------------------------------------------------------------------------------------------ under torchrun
def test_a_team_measures_the_groups_of_its_size_only():
    cases = allreduce.grid("full")
    assert selection.of_team(allreduce.TABLE, cases, None) == cases
    said = []
    here = selection.of_team(allreduce.TABLE, cases, 4, said.append)
    assert {(c.backend, c.world_size) for c in here} == {("gloo", 4), ("nccl", 4)}
    assert said == [
        "allreduce: 5 of 7 groups are left out: they need another number of processes than the 4 that torchrun has "
        "started"
    ]
    other = chapters.load("hardware")
    assert selection.of_team(other, other.grid("full"), 4, said.append) == other.grid("full")
    assert len(said) == 1


@without_gpu
@pytest.mark.slow
def test_under_torchrun(results_root, project_root, tmp_path):
    """The notebook on two processes of torchrun's: rows for two of them, none for four, and the page is drawn."""
    path = os.pathsep.join([str(project_root), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "cs336_systems", "run", "allreduce", "--preset", "smoke", "-p", "num_bytes=65536,1048576",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=project_root,
        env={**os.environ, "PYTHONPATH": path, "CS336_RESULTS": str(results_root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "allreduce: 1 of 2 groups are left out" in done.stdout
    assert "[rank 0] gloo 2 x 1 MB, bucket: " in done.stdout
    found = rows.read(allreduce.TABLE, machine.machine_name(), results_root)
    assert set(found["world_size"]) == {2} and len(found) == 4 and set(found["status"]) == {"ok"}


# ------------------------------------------------------------------------------------------------ page
LATENCY_S = {"gloo": 100e-6, "nccl": 6e-6}  # a step
LINK = {"gloo": 2e9, "nccl": 350e9}


def ring_s(num_bytes, n, link, latency):
    """By the formula of `accounting.collectives`."""
    return 2 * (n - 1) * latency + 2 * (n - 1) / n * num_bytes / link


def metrics(case, gpus=2):
    """A ring's time; two GPUs."""
    if case.backend == "nccl" and case.world_size > gpus:
        return {"status": f"skipped: needs {case.world_size} GPUs"}
    latency, link = LATENCY_S[case.backend], LINK[case.backend]
    ms = 1e3 * ring_s(case.num_bytes, case.world_size, link, latency)
    ms *= {("bucket", 0): 1.02, ("all_reduce", 1): 0.99}.get((case.how, case.repeat), 1)
    rate = case.num_bytes / ms / 1e6
    return {
        "ms_p20": 0.9 * ms, "ms_p50": ms, "ms_p80": 1.1 * ms, "host_ms": max(ms, 0.03), "algorithm_gb_per_s": rate,
        "bus_gb_per_s": rate * accounting.bus_factor(case.world_size), "error": 0.0, "warmups": 5, "calls": 100,
        "library": case.backend,
    }  # fmt: skip


laptop = metrics  # for tests/test_chapters.py


@pytest.fixture
def made_up(results_root):
    """Rows of `h200-x2`, all of its grid, and of `h200-x4`, NCCL between four; neither is a reference machine."""
    four = [c for c in allreduce.grid("full") if (c.backend, c.world_size) == ("nccl", 4)]
    for gpus, cases in ((2, allreduce.grid("full")), (4, four)):
        step_rows.write(
            allreduce.TABLE, cases, results_root, f"h200-x{gpus}", functools.partial(metrics, gpus=gpus)
        )
        step_rows.spell_out({"00000000": {"gpu": "NVIDIA H200", "gpus": gpus}}, results_root, f"h200-x{gpus}")
    return chapters.read("allreduce", preset="full", machine="h200-x2,h200-x4").rows()


def test_the_handouts_table(made_up):
    table = page.handout(made_up, "ms_p50", "ms").set_index(["machine", "backend", "processes"])
    assert list(table.columns) == ["1 MB, ms", "10 MB, ms", "100 MB, ms", "1 GB, ms"] and len(table) == 6
    expected = 1e3 * ring_s(2**30, 4, 350e9, 6e-6)
    assert table.loc[("h200-x4", "NCCL", 4), "1 GB, ms"] == pytest.approx(expected, rel=1e-4)
    assert table.loc[("h200-x2", "NCCL", 6)].isna().all()
    assert list(printed(page.handout(made_up, "ms_p50", "ms")).iloc[-1, 3:]) == ["skipped"] * 4
    smoke = page.handout(made_up[made_up["num_bytes"].isin((4096, MB, 16 * MB))], "bus_gb_per_s", "GB/s")
    assert list(smoke.columns[3:]) == ["1 MB, GB/s", "16 MB, GB/s"]


def test_fits_and_growth_of_rows_that_lie_on_their_line(made_up):
    fits = page.fits(made_up).set_index(["backend", "processes"])
    assert list(fits.index) == [("Gloo", 2), ("Gloo", 4), ("Gloo", 6), ("NCCL", 2), ("NCCL", 4)]
    assert list(fits["α, µs"]) == pytest.approx([100, 100, 100, 6, 6], rel=1e-3)
    assert list(fits["β, GB/s"]) == pytest.approx([2, 2, 2, 350, 350], rel=1e-3)
    assert fits.loc[("NCCL", 2), "half at, MB"] == pytest.approx(2 * 6e-6 * 350e9 / MB, rel=1e-3)  # n·α·β
    assert fits["miss, %"].max() < 0.1
    growth = page.growth(made_up).set_index(["backend", "processes"])
    assert growth.loc[("Gloo", 6), "1 GB, ×"] == pytest.approx(5 / 3, rel=1e-2)
    assert growth.loc[("NCCL", 4), "4 KB, ×"] == pytest.approx(3, rel=1e-2)  # over another machine's two
    nccl = made_up["backend"] == "nccl"
    two = made_up[nccl & (made_up["world_size"] == 2)]
    both = pd.concat([made_up, two.assign(machine="h200-x4", ms_p50=2 * two["ms_p50"])])
    assert page.growth(both)["4 KB, ×"].iloc[-1] == pytest.approx(3 / 2, rel=1e-2)  # over its own
    other = made_up.replace({"machine": {"h200-x2": "h100-x2"}})
    assert page.growth(other)["4 KB, ×"].isna().tolist() == [False, False, True]  # over another GPU's
    assert list(growth["steps, ×"]) == [3, 5, 3] and list(growth["bytes, ×"])[::2] == [1.5, 1.5]


def test_a_bucket_over_the_plain_call_of_its_run(made_up):
    table = page.buckets(made_up).set_index(["backend", "processes"])
    assert table.loc[("NCCL", 4), "1 GB, ×"] == pytest.approx(1.02, rel=1e-4)
    assert math.isnan(table.loc[("Gloo", 2), "1 GB, ×"])  # not in the grid
    other = made_up.assign(run=made_up["run"].where(made_up["how"] == "bucket", "another"))
    assert page.buckets(other).empty


def test_frames_and_figures_without_a_number(made_up, results_root):
    nothing = made_up.assign(ms_p50=math.nan, bus_gb_per_s=math.nan, status="oom")
    assert page.fits(nothing).empty and page.growth(nothing).empty and page.buckets(nothing).empty
    assert set(printed(page.handout(nothing, "ms_p50", "ms"))["1 MB, ms"]) == {"OOM"}
    few = made_up[made_up["num_bytes"] == MB]  # one size: no line
    assert page.fits(few).empty and len(page.growth(few)) == 3
    for given, labels in ((nothing, 0), (few, 5), (made_up, 5)):
        figure = page.time_figure(given)
        assert len(figure.axes[0].get_legend_handles_labels()[1]) == labels
    two = made_up[(made_up["machine"] == "h200-x2") & (made_up["world_size"] == 2)]
    both = pd.concat([made_up, two.assign(machine="h100-x2")])
    labels = page.time_figure(both).axes[0].get_legend_handles_labels()[1]
    twice = [f"{name}, 2 ({machine})" for name in ("Gloo", "NCCL") for machine in ("h100-x2", "h200-x2")]
    assert sorted(labels) == sorted(["Gloo, 4", "Gloo, 6", "NCCL, 4", *twice])
    assert (
        math.isnan(page.link_gb_per_s(made_up.assign(machine="cpu"))) and page.link_gb_per_s(made_up) == 450
    )


def test_every_number_of_processes_has_a_look_of_its_own(made_up):
    for backend, sizes in allreduce._WORLD_SIZES.items():
        one = made_up[(made_up["backend"] == backend) & (made_up["machine"] == "h200-x2")]
        one = one[one["world_size"] == 2]
        rows_of_all = pd.concat([one.assign(world_size=n) for n in sizes], ignore_index=True)
        points = [line for line in page.time_figure(rows_of_all).axes[0].lines if line.get_marker() != "None"]
        assert len({(line.get_color(), line.get_marker()) for line in points}) == len(points) == len(sizes)


def test_the_ring_of_the_figure_adds_everything_up():
    for n in (2, 3, 4, 6):
        states = page.ring(n)
        assert len(states) - 1 == accounting.all_reduce_steps(n)
        assert (states[-1] == n).all() and (states[n - 1] == n).sum() == n  # each rank then has one sum
        for before, after in itertools.pairwise(states):
            assert ((before != after).sum(axis=1) == 1).all()  # every rank receives one piece
    assert len(page.ring_figure(4).axes) == 8


# ------------------------------------------------------------------------------------------------ closed forms
def test_the_line_is_found_and_misses_what_is_not_on_it():
    points = [(s, 1e-5 + s / 3e11) for s in (2.0**k for k in range(10, 31, 2))]
    line = accounting.fit_line(points)
    assert line.latency_s == pytest.approx(1e-5) and line.bytes_per_s == pytest.approx(3e11)
    assert max(map(abs, line.residuals)) < 1e-9 and line.half_bytes == pytest.approx(3e6)
    assert line.seconds(3e6) == pytest.approx(2e-5)
    # no better line nearby, by the sum that is said to be least
    noisy = [
        (s, t * f) for (s, t), f in zip(points, (1.2, 0.9, 1, 1.3, 0.8, 1, 1, 1.1, 0.9, 1, 1), strict=True)
    ]
    line = accounting.fit_line(noisy)

    def loss(a, c):
        return sum(((a + c * s) / t - 1) ** 2 for s, t in noisy)

    best = loss(line.latency_s, 1 / line.bytes_per_s)
    assert best == pytest.approx(sum(r * r for r in line.residuals))
    for da, dc in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert loss(line.latency_s * da, dc / line.bytes_per_s) > best


def test_a_line_without_latency_or_without_slope():
    falling = accounting.fit_line([(1.0, 1.0), (2.0, 3.0)])
    assert falling.latency_s == 0 and falling.bytes_per_s > 0
    flat = accounting.fit_line([(1.0, 2.0), (2.0, 1.0)])
    assert flat.bytes_per_s == math.inf and flat.latency_s > 0
    for points, said in (([(1.0, 1.0)] * 3, "two sizes"), ([(1.0, 0.0), (2.0, 1.0)], "seconds=0.0")):
        with pytest.raises(ValueError, match=said):
            accounting.fit_line(points)
    with pytest.raises(ValueError, match="world_size=0"):
        accounting.bus_factor(0)


def test_links_of_known_gpus_one_way():
    gpus = {"NVIDIA H200": 450, "NVIDIA A100-SXM4-80GB": 300, "NVIDIA L4": None}
    assert {gpu: accounting.peaks(gpu).nvlink_one_way_gb_per_s for gpu in gpus} == gpus


# ------------------------------------------------------------------------------------------------ on GPUs
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus():
    cases = [c for c in allreduce.grid("full") if (c.backend, c.world_size) == ("nccl", 2)]
    cases = [c for c in cases if c.num_bytes in (4096, MB, 100 * MB)]
    for case, found in zip(cases, allreduce.run_group(cases), strict=True):
        assert "status" not in found and found["library"].startswith("nccl 2."), (case, found)
        assert found["bus_gb_per_s"] == pytest.approx(found["algorithm_gb_per_s"])


@pytest.mark.gpu
def test_one_gpu():
    [found] = allreduce.run_group([Case("nccl", "cuda", 1, MB)])
    assert "status" not in found and found["error"] == 0
