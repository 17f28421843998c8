"""Chapter allreduce: its grid, what its rows hold, what is refused and skipped, its page; alone and under torchrun."""

import functools
import json
import math
import os
import subprocess
import sys

import pytest
import step_rows

from cs336_systems import accounting, experiments, parallel
from cs336_systems.experiments import allreduce
from cs336_systems.experiments.allreduce import HANDOUT, MB, Case
from cs336_systems.measure import machine, rows
from cs336_systems.report import Chapter
from cs336_systems.report.pages import allreduce as page
from cs336_systems.report.pages import allreduce_words as words
from cs336_systems.report.pages import hardware as hardware_page

torch = pytest.importorskip("torch")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")

SENTENCES = (
    words.size_words, words.backend_words, words.sheet_words, words.process_words, words.fit_words, words.noise_words,
    words.host_words, words.ddp_words, words.bucket_words, words.correct_words,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ grid
def test_full_grid_is_the_handouts_and_more():
    cases = allreduce.grid("full")
    assert len(set(cases)) == len(cases)
    plain = {(c.backend, c.world_size, c.num_bytes) for c in cases if c.how == "all_reduce" and not c.repeat}
    asked = {
        (b, n, s) for b in ("gloo", "nccl") for n in (2, 4, 6) for s in (2**20, 10 * MB, 100 * MB, 2**30)
    }
    assert asked <= plain and {s for _, _, s in plain} >= {4096, 2**16, 2**28}
    for case in cases:
        allreduce.check(case)
        assert (case.backend, case.device) in (("gloo", "cpu"), ("nccl", "cuda"))
        if case.how == "bucket" or case.repeat:  # beside what it is compared with
            assert Case(case.backend, case.device, case.world_size, case.num_bytes) in cases
    groups = rows.groups(allreduce, cases)
    assert len(groups) == 7 and all(len({c.world_size for c in g}) == 1 for g in groups)
    for group in groups:  # a size's cases are next to each other, small ones first
        assert [c.num_bytes for c in group] == sorted(c.num_bytes for c in group)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("mpi", "cpu", 2, MB), "unknown backend 'mpi'; allowed: gloo, nccl"),
        (Case("nccl", "cpu", 2, MB), "device 'cpu' with backend 'nccl'; allowed: cuda"),
        (Case("gloo", "cpu", 0, MB), "world_size=0; it must be at least 1"),
        (Case("gloo", "cpu", 2, 1000), "num_bytes=1000; it must be a positive multiple of 128"),
        (Case("gloo", "cpu", 2, MB, "ring"), "unknown how 'ring'; allowed: all_reduce, bucket"),
    ],
)
def test_unknown_values_are_named(case, said):
    with pytest.raises(ValueError, match=said):
        allreduce.run_group([case])


def test_values_that_the_grid_does_not_have_are_named():
    for filters, said in (
        ({"backend": "mpi"}, "backend=mpi is not in the full preset; allowed: all, gloo, nccl"),
        ({"world_size": "3"}, "world_size=3 is not in the full preset; allowed: all, 2, 4, 6, 8"),
    ):
        with pytest.raises(ValueError, match=said):
            Chapter("allreduce", measure="no", preset="full", **filters)


# ------------------------------------------------------------------------------------------------ measuring
@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The rows of the smoke preset, measured once."""
    root = tmp_path_factory.mktemp("results")
    rows.measure(allreduce, allreduce.grid("smoke"), root=root, log=lambda line: None)
    [name] = [p.name for p in root.iterdir()]
    return rows.read(allreduce, name, root)


@without_gpu
def test_every_row_of_the_smoke_preset_is_ok(smoke):
    assert len(smoke) == len(allreduce.grid("smoke")) and set(smoke["status"]) == {"ok"}
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
def test_one_process():
    cases = [Case("gloo", "cpu", 1, 4096, how, repeat) for how, repeat in (("all_reduce", 0), ("bucket", 0))]
    for found in allreduce.run_group(cases):
        assert "status" not in found and found["error"] == 0
        assert found["algorithm_gb_per_s"] > 0 and found["bus_gb_per_s"] is None


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

    with parallel.process_group("gloo", "cpu") as rank:
        monkeypatch.setattr(dist, "all_reduce", loses_one)
        found = allreduce._measure_size(rank, [Case("gloo", "cpu", 1, MB)])
        monkeypatch.undo()
        fine = allreduce._measure_size(rank, [Case("gloo", "cpu", 1, 4096)])
    assert found[0]["status"].startswith("error: all_reduce is off by 0."), found
    assert "status" not in fine[0]


def test_what_does_not_fit_is_a_row_on_all_ranks(monkeypatch):
    def full(*args, **options):
        raise MemoryError

    with parallel.process_group("gloo", "cpu") as rank:
        monkeypatch.setattr(allreduce, "_Operation", full)
        found = allreduce._measure_size(rank, [Case("gloo", "cpu", 1, MB)] * 2)
    assert found == [{"status": "oom"}] * 2


def test_a_machine_with_too_few_gpus_skips(monkeypatch):
    """Nothing is launched, and the rest of the grid is not in the way."""
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    case = Case("nccl", "cuda", 4, MB)
    assert allreduce.run_group([case, case]) == [{"status": "skipped: needs 4 GPUs"}] * 2
    assert allreduce.estimate_s([case]) == 0
    monkeypatch.setattr(machine, "gpu_names", lambda: [])
    assert allreduce.run_group([Case("nccl", "cuda", 1, MB)]) == [{"status": "skipped: needs 1 GPU"}]


def test_a_machine_with_too_little_memory_skips(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**30)
    [found] = allreduce.run_group([Case("gloo", "cpu", 6, 2**30)])
    assert found["status"] == "skipped: needs about 12.0 GiB of memory; 1.0 GiB are free"


def test_a_process_that_fails_makes_error_rows_and_the_next_group_runs(results_root, monkeypatch):
    from cs336_systems.parallel import launch as module

    def launch(function, world_size, *args, **options):
        if world_size == 2:
            raise module.LaunchError("rank 1 of 2: signal SIGKILL\nand more", 1)
        return [[{"ms_p50": 1.0}] * 7] * world_size

    monkeypatch.setattr(module, "launch", launch)
    with pytest.raises(rows.MeasurementError, match="7 cases of allreduce ended in an error"):
        rows.measure(allreduce, allreduce.grid("smoke"), log=lambda line: None)
    found = rows.read(allreduce, machine.machine_name())
    assert set(found[found["world_size"] == 2]["status"]) == {
        "error: LaunchError: rank 1 of 2: signal SIGKILL"
    }
    assert set(found[found["world_size"] == 4]["status"]) == {"ok"}


# ------------------------------------------------------------------------------------------------ under torchrun
def test_a_team_measures_the_groups_of_its_size_only(monkeypatch):
    cases = allreduce.grid("full")
    assert experiments.of_this_team(allreduce, cases) == cases
    monkeypatch.setenv(parallel.TEAM_VARIABLE, "4")
    said = []
    here = experiments.of_this_team(allreduce, cases, said.append)
    assert {(c.backend, c.world_size) for c in here} == {("gloo", 4), ("nccl", 4)}
    assert said == [
        "allreduce: 5 of 7 groups are left out: they need another number of processes than the 4 that torchrun has "
        "started"
    ]
    other = experiments.load("hardware")
    assert experiments.of_this_team(other, other.grid("full"), said.append) == other.grid("full")
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
    found = rows.read(allreduce, machine.machine_name(), results_root)
    assert set(found["world_size"]) == {2} and len(found) == 4 and set(found["status"]) == {"ok"}


# ------------------------------------------------------------------------------------------------ page
LATENCY_S = {"gloo": 100e-6, "nccl": 6e-6}  # a step
LINK = {"gloo": 2e9, "nccl": 350e9}


def metrics(case, gpus=2):
    """A ring's time; two GPUs."""
    if case.backend == "nccl" and case.world_size > gpus:
        return {"status": f"skipped: needs {case.world_size} GPUs"}
    latency, link = LATENCY_S[case.backend], LINK[case.backend]
    ms = 1e3 * accounting.ring_all_reduce_s(case.num_bytes, case.world_size, link, latency)
    ms *= {("bucket", 0): 1.02, ("all_reduce", 1): 0.99}.get((case.how, case.repeat), 1)
    rate = case.num_bytes / ms / 1e6
    return {
        "ms_p20": 0.9 * ms, "ms_p50": ms, "ms_p80": 1.1 * ms, "host_ms": max(ms, 0.03), "algorithm_gb_per_s": rate,
        "bus_gb_per_s": rate * accounting.bus_factor(case.world_size), "error": 1e-8 if case.how == "bucket" else 0.0,
        "warmups": 5, "calls": 100, "library": case.backend,
    }  # fmt: skip


@pytest.fixture
def made_up(results_root, monkeypatch):
    (results_root / "reference.json").write_text(json.dumps({"allreduce": ["h200-x2"]}))
    step_rows.write(allreduce, allreduce.grid("full"), results_root, "h200-x2", metrics)
    rows.write_environment("h200-x2", results_root, {"00000000": {"gpu": "NVIDIA H200", "gpus": 2}})
    return Chapter("allreduce", measure="no", preset="full")


def test_page_of_made_up_rows(made_up):
    table = page.time_table(made_up)
    assert len(table) == 4 * 3 + 4 + 3  # four sizes where there are numbers, one line where all is skipped
    assert list(table[table["backend"] == "NCCL"]["ms"])[4:] == [f"needs {n} GPUs" for n in (4, 6, 8)]
    row = table[(table["backend"] == "NCCL") & (table["size"] == "1 GB")].iloc[0]
    assert row["sheet, ms"] == "2.39" and row["over it"] == "1.29 ×" and row["bus"] == "349"
    fits = page.fit_table(made_up).set_index(["backend", "ranks"])
    assert list(fits["α, µs"]) == ["100", "100", "100", "6.00"]
    assert list(fits["β, GB/s"]) == ["2.00", "2.00", "2.00", "350"]
    assert fits.loc[("NCCL", 2), "half at"] == "4.01 MB"  # n·α·β
    own = page.bucket_table(made_up)
    assert set(own["bucket, over it"]) == {"+2.0 %"} and set(own["again, over it"]) == {"−1.0 %"}
    assert len(own) == 3 * 2 + 4 and own.iloc[-1]["more, µs"] == "61.6"  # 2 % of 1 GB in 3.08 ms
    sizes = page.bucket_size_table(made_up).set_index("bucket")
    assert list(sizes.index) == ["1 MB", "10 MB", "25 MB", "100 MB", "256 MB", "1 GB"]
    assert list(sizes["by the line, ms"]) == list(sizes["measured, ms"])  # these rows lie on their line
    assert list(sizes.loc["1 GB", ["buckets", "of the best"]]) == [8, "100 %"]
    hosts = page.host_table(made_up)
    assert set(hosts["ranks"]) == {2} and hosts.iloc[0]["host, µs"] == "30.0"
    for figure in (page.time_figure, page.residual_figure):
        assert figure(made_up, "h200-x2").axes[0].has_data()
    for sentence in SENTENCES:
        assert "not measured" not in sentence(made_up) and "nan" not in sentence(made_up)
    assert "in 4 of 4 pairs" in words.bucket_words(made_up) and "in 6 of 6 pairs" in words.bucket_words(
        made_up
    )
    assert "the bytes through each link grow 1.67 times" in words.process_words(made_up)
    assert "steps of the ring grow 5.00 times" in words.process_words(made_up)
    assert "is 100 % and 100 % of that with 2: they hardly take" in words.process_words(made_up)
    assert "would take for 1 GB 4.62 ms with 4, " in words.process_words(made_up)  # 3/2 of two GPUs' time
    assert "leaves the quantiles of the calls at 0 of 13 sizes" in words.noise_words(made_up)
    assert "no limit" not in words.fit_words(made_up)
    assert words.correct_words(made_up).endswith(
        "The sums are exact, the means deviate by at most 1.0e−8 of the largest element."
    )


def test_machines_with_the_same_gpu_are_one_series(made_up, results_root):
    four = [c for c in allreduce.grid("full") if (c.backend, c.world_size) == ("nccl", 4)]
    step_rows.write(allreduce, four, results_root, "h200-x4", functools.partial(metrics, gpus=4))
    rows.write_environment("h200-x4", results_root, {"00000000": {"gpu": "NVIDIA H200", "gpus": 4}})
    both = Chapter("allreduce", measure="no", preset="full", machine="h200-x2,h200-x4")
    said = words.process_words(both)
    assert "- `h200-x2` and `h200-x4`, NCCL: the time grows from 2 to 4 processes, 1.51 times at 1 GB" in said
    assert said.count("NCCL") == 1 and "rises" not in said and "belong to none" not in said
    for figure in (page.time_figure, page.residual_figure):
        labels = [text.get_text() for text in figure(both, "h200-x2").legends[0].get_texts()]
        assert labels[3:] == ["NCCL, 2 processes", "NCCL, 4 processes (h200-x4)"]

    def faster(case):  # a step of 1 µs and a start of 10 µs; more of the link is used
        found = metrics(case, gpus=4)
        ms = 0.016 + 1e3 * accounting.ring_all_reduce_s(case.num_bytes, 4, 400e9)
        return found | {"ms_p20": ms, "ms_p50": ms, "ms_p80": ms}

    step_rows.write(allreduce, four, results_root, "h200-x4", faster)
    said = words.process_words(Chapter("allreduce", measure="no", preset="full", machine="h200-x2,h200-x4"))
    assert "is 114 % of that with 2: it should not depend on their number, and rises" in said
    assert "less than the steps: were these rings, a step would take 1.00 µs, and 10.0 µs of a call" in said


def test_words_of_rows_that_are_not_as_predicted(results_root):
    """Buckets cost what does not grow with the bytes, processes share a link, and the bandwidth keeps growing."""

    def other(case):
        found = metrics(case)
        if "status" in found:
            return found
        factor = case.world_size / 2 if case.backend == "gloo" else 1 + 1 / (1 + case.num_bytes / 2**28)
        ms = found["ms_p50"] * factor + 5 * (case.how == "bucket") * (case.backend == "gloo")
        rate = case.num_bytes / ms / 1e6
        return found | {
            "ms_p20": ms, "ms_p50": ms, "ms_p80": ms, "error": 0.0, "algorithm_gb_per_s": rate,
            "bus_gb_per_s": rate * accounting.bus_factor(case.world_size),
        }  # fmt: skip

    (results_root / "reference.json").write_text(json.dumps({"allreduce": ["h200-x2"]}))
    step_rows.write(allreduce, allreduce.grid("full"), results_root, "h200-x2", other)
    rows.write_environment("h200-x2", results_root, {"00000000": {"gpu": "NVIDIA H200", "gpus": 2}})
    chapter = Chapter("allreduce", measure="no", preset="full")
    gloo, nccl = words.bucket_words(chapter).splitlines()
    assert "in 0 of 6 pairs; it is furthest off at 1 MB with 2 processes, +69" in gloo
    assert "so it is not the pass through memory" in gloo and "in 4 of 4 pairs. The same" in nccl
    assert "33 % of that with 2: they take bandwidth" in words.process_words(chapter)
    assert "So β is no limit here" in words.fit_words(chapter)
    assert "the bandwidth rises" in words.size_words(chapter).splitlines()[-1]
    assert words.correct_words(chapter).endswith("All sums and means are exact.")


def test_page_without_rows(results_root):
    chapter = Chapter("allreduce", measure="no", preset="full")
    for sentence in SENTENCES:
        assert "not measured" in sentence(chapter)
    assert set(page.time_table(chapter)["ms"]) == {"–"}
    assert all(table(chapter).empty for table in (
        page.fit_table, page.bucket_table, page.host_table, page.bucket_size_table
    ))  # fmt: skip
    for figure in (page.time_figure, page.residual_figure):
        assert figure(chapter, "").axes
    assert hardware_page.collective_table(Chapter("hardware", measure="no")).empty


def test_a_page_of_a_few_cases(made_up):
    """Filters leave one size, one backend, or one set of processes: nothing to fit or to compare, and no error."""
    for filters in ({"num_bytes": str(MB)}, {"backend": "gloo", "world_size": 2}, {"how": "bucket"}):
        chapter = Chapter("allreduce", measure="no", preset="full", **filters)
        for sentence in SENTENCES:
            assert sentence(chapter)
        assert page.time_figure(chapter, "h200-x2").axes and page.residual_figure(chapter, "h200-x2").axes
        for table in (page.time_table, page.fit_table, page.bucket_table, page.bucket_size_table):
            table(chapter)


def test_the_roof_on_the_page_of_the_hardware(made_up):
    table = hardware_page.collective_table(Chapter("hardware", measure="no"))
    row = table[table["all-reduce"] == "NCCL, 2 processes"].iloc[0]
    assert row["best bus bandwidth, GB/s"] == "349" and row["at size"] == "1 GB"
    assert row["data sheet, GB/s"] == "450" and row["share"] == "77 %"
    assert set(table[table["all-reduce"] != "NCCL, 2 processes"]["share"]) == {"–"}


def test_sizes_are_named_as_in_the_handout():
    assert [page.bytes_words(s) for s in (*HANDOUT, 4096, 64, 4.5 * MB)] == [
        "1 MB", "10 MB", "100 MB", "1 GB", "4 KB", "64 bytes", "4.50 MB",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ closed forms
def test_the_ring_by_counting():
    """Pieces sent around a real ring, counted."""
    for n in (1, 2, 3, 6):
        sent = [0] * n
        steps = 0
        for _ in range(2):  # reduce-scatter, all-gather
            for _ in range(n - 1):
                steps += 1
                for rank in range(n):
                    sent[rank] += 1
        assert accounting.all_reduce_steps(n) == steps
        assert all(accounting.bus_factor(n) == pytest.approx(pieces / n) for pieces in sent)
        seconds = accounting.ring_all_reduce_s(60.0, n, 10.0, 0.5)
        assert seconds == pytest.approx(steps * 0.5 + sent[0] * (60.0 / n) / 10.0)


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
    for options, said in (({"world_size": 0}, "world_size=0"), ({"step_s": -1}, "step_s=-1")):
        with pytest.raises(ValueError, match=said):
            accounting.ring_all_reduce_s(
                **{"num_bytes": 1, "world_size": 2, "link_bytes_per_s": 1, **options}
            )


def test_links_of_known_gpus_one_way():
    assert accounting.peaks("NVIDIA H200").nvlink_one_way_gb_per_s == 450
    assert accounting.peaks("NVIDIA A100-SXM4-80GB").nvlink_one_way_gb_per_s == 300
    assert accounting.peaks("NVIDIA L4").nvlink_one_way_gb_per_s is None


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
