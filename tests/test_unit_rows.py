"""Rows: written whole, resumed after a kill, newest wins, merged only when they fit, never just missing."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

from cs336_systems.store import code, measuring, rows
from cs336_systems.store.process import ChildError
from cs336_systems.store.status import Skip

FAKE = """
from dataclasses import dataclass
from cs336_systems.store.status import Skip, oom_is_a_row

METRICS = ("ms_p50", "source")
GROUP = ("size",)
CALLS = []
RAISES = {}

@dataclass(frozen=True)
class Case:
    size: int
    impl: str
    causal: bool
    rate: float = 0.1

def grid(preset):
    return [Case(size, impl, True) for size in (1, 2, 30) for impl in ("a", "b")]

def run_group(cases):
    for case in cases:
        CALLS.append((case.size, case.impl))
        metrics = {"source": "clock"}
        with oom_is_a_row(metrics):
            if (case.size, case.impl) in RAISES:
                raise RAISES[case.size, case.impl]
            metrics["ms_p50"] = case.size / 3
        yield metrics
"""


def load_experiment(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and type hints look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake(tmp_path):
    path = tmp_path / "fake_chapter.py"
    path.write_text(FAKE)
    yield load_experiment(path)
    del sys.modules["fake_chapter"]


def of_environment(monkeypatch, digest):
    for module in (measuring, rows):
        monkeypatch.setattr(module, "environment_digest", lambda: digest)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "machine_name", lambda: "cpu-test")
    of_environment(monkeypatch, "env00001")
    monkeypatch.setattr(rows, "environment", lambda: {"cores": 2})
    return tmp_path / "results"


def measure(fake, root, **options):
    log = []
    count = measuring.measure(fake, fake.grid("full"), root=root, log=log.append, **options)
    return count, log


def row(fake, **changes):
    base = {
        "size": 1,
        "impl": "a",
        "causal": True,
        "rate": 0.1,
        "ms_p50": 1.0,
        "source": "clock",
        "status": "ok",
    }
    return base | {"run": "r", "time_utc": "2026-01-01T00:00:00Z", "env": "e", "code": "c"} | changes


# ------------------------------------------------------------------------------------ where rows live
def test_root_is_found_from_below(tmp_path, monkeypatch):
    monkeypatch.delenv("CS336_RESULTS", raising=False)
    (tmp_path / "results").mkdir()
    (tmp_path / "book").mkdir()
    with pytest.raises(FileNotFoundError, match="set CS336_RESULTS"):
        rows.results_root(tmp_path / "book")
    (tmp_path / "results" / "reference.json").write_text("{}")
    assert rows.results_root(tmp_path / "book") == tmp_path / "results"
    monkeypatch.setenv("CS336_RESULTS", str(tmp_path / "elsewhere"))
    assert rows.results_root(tmp_path / "book") == tmp_path / "elsewhere"


# ------------------------------------------------------------------------------------ reading and writing
def test_a_row_comes_back_in_its_types(fake, root):
    rows.write(
        fake, "m", [row(fake, ms_p50=1 / 3, rate=1 / 3), row(fake, impl="b", causal=False, ms_p50=None)], root
    )
    frame = rows.read(fake, "m", root)
    assert list(frame.columns) == rows.columns(fake)
    first, second = frame.to_dict("records")
    assert (first["size"], first["impl"], first["causal"], first["rate"]) == (1, "a", True, 0.333333)
    assert first["ms_p50"] == 0.333333  # six digits
    assert second["causal"] is False and pd.isna(second["ms_p50"])
    assert frame["size"].dtype.kind == "i" and frame["causal"].dtype.kind == "b"


def test_reading_what_is_not_there_gives_the_columns(fake, root):
    frame = rows.read(fake, "nowhere", root)
    assert frame.empty and list(frame.columns) == rows.columns(fake)


def test_a_metric_of_words_stays_words(fake, root):
    rows.write(fake, "m", [row(fake), row(fake, impl="b", source="")], root)
    assert list(rows.read(fake, "m", root)["source"]) == ["clock", ""]


def test_sorted_by_case_as_numbers(fake, root):
    path = rows.write(fake, "m", [row(fake, size=30), row(fake, size=4), row(fake, size=100)], root)
    assert list(rows.read(fake, "m", root)["size"]) == [4, 30, 100]
    assert path.read_text().splitlines()[0] == ",".join(rows.columns(fake))
    assert sorted(p.name for p in path.parent.iterdir()) == ["fake_chapter.csv"]  # no lock, nothing temporary


def test_newest_row_wins_in_any_order(fake, root):
    old, new = row(fake, ms_p50=1.0), row(fake, ms_p50=2.0, time_utc="2026-01-02T00:00:00Z")
    for order in ([old, new], [new, old]):
        rows.write(fake, "m", order, root)
        rows.write(fake, "m", [old], root)
        assert list(rows.read(fake, "m", root)["ms_p50"]) == [2.0]


@pytest.mark.parametrize("status", ["ok", "oom"])
def test_a_skipped_case_does_not_take_the_place_of_a_measured_one(fake, root, status):
    measured = row(fake, status=status)
    skipped = row(fake, status="skipped: needs a package", time_utc="2026-01-02T00:00:00Z")
    for order in ([measured, skipped], [skipped, measured]):
        rows.csv_path("fake_chapter", "m", root).unlink(missing_ok=True)
        for one in order:
            rows.write(fake, "m", [one], root)
        assert list(rows.read(fake, "m", root)["status"]) == [status]


def test_the_newer_one_of_an_error_and_a_skipped_case_wins(fake, root):
    error = row(fake, status="error: KeyError")
    rows.write(
        fake, "m", [error, skipped := row(fake, status="skipped: x", time_utc="2026-01-02T00:00:00Z")], root
    )
    assert list(rows.read(fake, "m", root)["status"]) == ["skipped: x"]
    rows.write(fake, "m", [error | {"time_utc": "2026-01-03T00:00:00Z"}, skipped], root)
    assert list(rows.read(fake, "m", root)["status"]) == ["error: KeyError"]


def test_a_float_case_is_the_same_case_after_reading(fake, root):
    for _ in range(2):
        rows.write(fake, "m", [row(fake, rate=1 / 3)], root)
    assert len(rows.read(fake, "m", root)) == 1


def test_a_csv_without_a_case_field_is_refused(fake, root):
    path = rows.write(fake, "m", [row(fake)], root)
    pd.read_csv(path).drop(columns="impl").to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"fake_chapter.csv lacks the columns impl"):
        rows.read(fake, "m", root)


# ------------------------------------------------------------------------------------ measuring
def test_second_run_measures_nothing(fake, root):
    count, log = measure(fake, root)
    assert count == 3 and len(fake.CALLS) == 6
    assert "3 of 3 groups" in log[0] and log[1].startswith("  [1/3] size=1: ok in")
    count, log = measure(fake, root)
    assert count == 0 and len(fake.CALLS) == 6
    assert log == ["fake_chapter on cpu-test: all 3 groups are measured"]
    frame = rows.read(fake, "cpu-test", root)
    assert set(frame["status"]) == {"ok"} and frame.groupby("size")["run"].nunique().eq(1).all()
    assert frame["run"].nunique() == 3
    assert json.loads((root / "cpu-test" / "machine.json").read_text()) == {"env00001": {"cores": 2}}


def test_only_the_groups_with_missing_rows_are_measured(fake, root):
    measuring.measure(
        fake, [fake.Case(1, "a", True), fake.Case(2, "a", True), fake.Case(2, "b", True)], root=root
    )
    fake.CALLS.clear()
    assert measure(fake, root)[0] == 2
    assert fake.CALLS == [(1, "a"), (1, "b"), (30, "a"), (30, "b")]


def test_refresh(fake, root, monkeypatch):
    measure(fake, root)
    assert measure(fake, root, refresh="stale")[0] == 0
    assert measure(fake, root, refresh="all")[0] == 3
    monkeypatch.setattr(measuring, "code_digests", lambda experiment: lambda case: "newcode0")
    assert measure(fake, root)[0] == 0
    assert measure(fake, root, refresh="stale")[0] == 3
    of_environment(monkeypatch, "env00002")
    assert measure(fake, root)[0] == 0
    assert measure(fake, root, refresh="stale")[0] == 3
    with pytest.raises(ValueError, match="unknown refresh 'some'; allowed: missing, stale, all"):
        measure(fake, root, refresh="some")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
)
def test_out_of_memory_is_a_row(fake, root, error):
    fake.RAISES[2, "b"] = error
    measure(fake, root)
    assert status_of(fake, root) == {(2, "b"): "oom"}
    assert measure(fake, root)[0] == 0  # and stays one


def status_of(fake, root):
    frame = rows.read(fake, "cpu-test", root)
    return {(r["size"], r["impl"]): r["status"] for r in frame.to_dict("records") if r["status"] != "ok"}


def test_a_skipped_case_is_measured_again_elsewhere(fake, root, monkeypatch):
    fake.RAISES[30, "a"] = Skip("needs a CUDA device")
    measure(fake, root)
    assert status_of(fake, root) == {(30, "a"): "skipped: needs a CUDA device"}
    assert measure(fake, root)[0] == 0
    of_environment(monkeypatch, "withtool")
    fake.RAISES.clear()
    assert measure(fake, root)[0] == 1
    assert status_of(fake, root) == {}


def test_an_error_is_a_row_and_the_others_still_run(fake, root, capsys):
    fake.RAISES[1, "b"] = KeyError("what")
    with pytest.raises(
        measuring.MeasurementError, match=r"1 cases of fake_chapter ended in an error.*KeyError: 'what'"
    ):
        measure(fake, root)
    assert status_of(fake, root) == {(1, "b"): "error: KeyError: 'what'"}
    assert len(rows.read(fake, "cpu-test", root)) == 6
    assert "Traceback" in capsys.readouterr().err
    fake.RAISES.clear()
    assert measure(fake, root)[0] == 1  # an error is due again
    assert status_of(fake, root) == {}


def test_a_lost_context_ends_the_run_and_comes_last_in_the_next(fake, root):
    fake.RAISES[1, "a"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(measuring.MeasurementError, match=r"lost its CUDA context at size=1"):
        measure(fake, root)
    assert len(rows.read(fake, "cpu-test", root)) == 2  # the group has its rows, the others are missing
    fake.CALLS.clear()
    with pytest.raises(measuring.MeasurementError):
        measure(fake, root)
    assert [size for size, _ in fake.CALLS] == [2, 2, 30, 30, 1]


def test_a_context_lost_by_another_process_is_an_error_row(fake, root):
    """torch adds to each CUDA error how device-side assertions are switched on."""
    fake.RAISES[1, "a"] = ChildError("Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions")
    with pytest.raises(measuring.MeasurementError, match="ended in an error"):
        measure(fake, root)
    assert len(rows.read(fake, "cpu-test", root)) == 6


def test_an_interrupt_is_no_row(fake, root):
    fake.RAISES[2, "a"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        measure(fake, root)
    assert set(rows.read(fake, "cpu-test", root)["size"]) == {1}


def test_a_metric_without_a_column_is_a_mistake(fake, root, monkeypatch):
    monkeypatch.setattr(fake, "run_group", lambda cases: [{"tflops": 1.0} for _ in cases])
    with pytest.raises(AssertionError, match="tflops, which METRICS does not name"):
        measure(fake, root)


def test_killed_in_the_middle_the_next_run_goes_on(tmp_path):
    """Killed in its second group, a run leaves the first one's rows, and the next run measures the others."""
    (tmp_path / "fake_chapter.py").write_text(FAKE)
    script = textwrap.dedent("""
        import sys, time
        import fake_chapter
        from cs336_systems.store import measuring
        quick = fake_chapter.run_group
        def slow(cases):
            if "slow" in sys.argv and cases[0].size == 2:
                print("in group 2", flush=True)
                time.sleep(60)
            return quick(cases)
        fake_chapter.run_group = slow
        measuring.measure(fake_chapter, fake_chapter.grid("full"))
    """)
    here = str(Path(rows.__file__).parents[2])
    env = os.environ | {
        "CS336_RESULTS": str(tmp_path / "results"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), here]),
    }
    command = [sys.executable, "-c", script]
    with subprocess.Popen([*command, "slow"], env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        while not lines or "in group 2" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "the process ended early"
        process.kill()
    assert any("[1/3] size=1: ok" in line for line in lines)  # told before the kill, though stdout is a pipe
    [path] = (tmp_path / "results").glob("*/fake_chapter.csv")
    assert list(pd.read_csv(path)["size"]) == [1, 1]
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert "2 of 3 groups to measure" in again.stdout
    assert list(pd.read_csv(path)["size"]) == [1, 1, 2, 2, 30, 30]
    assert sorted(p.name for p in path.parent.iterdir()) == ["fake_chapter.csv", "machine.json"]


def test_two_writers_lose_nothing(tmp_path):
    """Several processes write rows of one chapter at the same time."""
    (tmp_path / "fake_chapter.py").write_text(FAKE)
    script = textwrap.dedent("""
        import sys
        import fake_chapter
        from cs336_systems.store import rows
        base = {"impl": "a", "causal": True, "rate": 0.1, "status": "ok", "run": "r", "env": "e", "code": "c"}
        for i in range(10):
            size = 10 * int(sys.argv[1]) + i
            rows.write(fake_chapter, "m", [base | {"size": size, "time_utc": "2026-01-01T00:00:00Z"}])
    """)
    env = os.environ | {
        "CS336_RESULTS": str(tmp_path / "results"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(rows.__file__).parents[2])]),
    }
    writers = [subprocess.Popen([sys.executable, "-c", script, str(i)], env=env) for i in range(2)]
    assert [w.wait(timeout=60) for w in writers] == [0, 0]
    assert list(pd.read_csv(tmp_path / "results" / "m" / "fake_chapter.csv")["size"]) == list(range(20))


# ------------------------------------------------------------------------------------ merging
def test_merge_takes_newer_rows_and_environments(fake, root, tmp_path):
    other = tmp_path / "other"
    rows.write(fake, "gpu-x1", [row(fake, ms_p50=1.0), row(fake, impl="b", ms_p50=1.0)], root)
    new = row(fake, ms_p50=2.0, time_utc="2026-02-01T00:00:00Z")
    old = row(fake, impl="b", ms_p50=2.0, time_utc="2025-01-01T00:00:00Z")
    rows.write(fake, "gpu-x1", [new, old, row(fake, size=2)], other)
    rows.write_environment("gpu-x1", root, {"a": {"cores": 1}})
    rows.write_environment("gpu-x1", other, {"b": {"cores": 2}})
    assert rows.merge([fake], other, root) == [("gpu-x1", "fake_chapter", 3)]
    assert list(rows.read(fake, "gpu-x1", root)["ms_p50"]) == [2.0, 1.0, 1.0]
    assert set(json.loads((root / "gpu-x1" / "machine.json").read_text())) == {"a", "b"}


def test_merge_takes_what_lies_beside_a_csv_unless_rows_here_are_newer(fake, root, tmp_path):
    other = tmp_path / "other"
    for folder, text in ((root, "here"), (other, "there")):
        beside = folder / "gpu-x1" / "fake_chapter"
        beside.mkdir(parents=True)
        (beside / "a.json").write_text(text)
    (other / "gpu-x1" / "fake_chapter" / "b.json").write_text("new")
    rows.write(fake, "gpu-x1", [row(fake, time_utc="2026-02-01T00:00:00Z")], root)
    rows.write(fake, "gpu-x1", [row(fake, size=2, time_utc="2026-01-01T00:00:00Z")], other)
    rows.merge([fake], other, root)
    mine = root / "gpu-x1" / "fake_chapter"
    assert (mine / "a.json").read_text() == "here" and (mine / "b.json").read_text() == "new"
    rows.write(fake, "gpu-x1", [row(fake, size=2, time_utc="2026-03-01T00:00:00Z")], other)
    rows.merge([fake], other, root)
    assert (mine / "a.json").read_text() == "there"


def test_merge_refuses_odd_columns_and_takes_nothing(fake, root, tmp_path):
    other = tmp_path / "other"
    rows.write(fake, "a-machine", [row(fake)], other)
    path = rows.write(fake, "b-machine", [row(fake)], other)
    pd.read_csv(path).rename(columns={"ms_p50": "ms_mean"}).to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"b-machine.*columns that this version does not know: ms_mean"):
        rows.merge([fake], other, root)
    assert not root.exists()


def test_merge_takes_rows_from_before_a_number_was_measured(fake, root, tmp_path):
    other = tmp_path / "other"
    path = rows.write(fake, "a-machine", [row(fake)], other)
    pd.read_csv(path).drop(columns="ms_p50").to_csv(path, index=False)
    assert rows.merge([fake], other, root) == [("a-machine", "fake_chapter", 1)]
    assert rows.read(fake, "a-machine", root)["ms_p50"].isna().all()


def test_merge_refuses_what_it_does_not_know(fake, root, tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        rows.merge([fake], tmp_path / "nowhere", root)
    (tmp_path / "other" / "m").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds no <machine>/<table>.csv"):
        rows.merge([fake], tmp_path / "other", root)
    (tmp_path / "other" / "m" / "poetry.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"poetry.csv is no table.*fake_chapter"):
        rows.merge([fake], tmp_path / "other", root)


def test_groups_keep_their_order(fake):
    cases = [fake.Case(2, "a", True), fake.Case(1, "a", True), fake.Case(2, "b", True)]
    assert [[(c.size, c.impl) for c in g] for g in rows.groups(fake, cases)] == [
        [(2, "a"), (2, "b")],
        [(1, "a")],
    ]


def test_codes_are_of_the_sources_at_the_start(fake, root, monkeypatch):
    before = code.code_digest(fake)

    def edits(cases):
        Path(fake.__file__).write_text(FAKE.replace("size / 3", "size / 4"))
        return [{"ms_p50": 1.0} for _ in cases]

    monkeypatch.setattr(fake, "run_group", edits)
    measure(fake, root)
    assert set(rows.read(fake, "cpu-test", root)["code"]) == {before} != {code.code_digest(fake)}
