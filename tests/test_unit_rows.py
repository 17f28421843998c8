"""Rows: written whole, resumed after a kill, refused where damaged, merged all or none, never just missing."""

import dataclasses
import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import step_rows

from cs336_systems.cli import bench
from cs336_systems.store import files, measuring, provenance, rows
from cs336_systems.store.process import ChildError
from cs336_systems.store.status import Skip, loses_context

FAKE = """
from dataclasses import dataclass
from cs336_systems.store.status import Skip, oom_is_a_row
from cs336_systems.store.table import Table

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

class Fake(Table):
    CALLS, RAISES = CALLS, RAISES

TABLE = Fake(__name__, Case, METRICS, GROUP, grid, run_group, beside=("impl", "size"))
"""


def load_experiment(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and type hints look their module up
    spec.loader.exec_module(module)
    return module.TABLE


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


def names(folder):
    """What lies in a folder, beside locks."""
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def row(fake, **changes):
    base = {
        "size": 1, "impl": "a", "causal": True, "rate": 0.1, "ms_p50": 1.0, "source": "clock",
        "status": "ok",
    }  # fmt: skip
    return base | {"run": "r", "time_utc": "2026-01-01T00:00:00Z", "env": "e", "code": "c"} | changes


EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


@pytest.fixture
def write(fake, root):
    """Writes rows, by what is different in them, to the table of a machine; returns the file."""
    return lambda *changes, m="m", to=root: rows.write(
        fake, m, [row(fake, **change) for change in changes], to
    )


@pytest.fixture
def read(fake, root):
    """A column of a machine's table."""
    return lambda column, m="m": list(rows.read(fake, m, root)[column])


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
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CS336_RESULTS", "~/mine")
    assert rows.results_root() == tmp_path / "mine"


# ------------------------------------------------------------------------------------ reading and writing
def test_a_row_comes_back_in_its_types(fake, root, write):
    write(
        {"ms_p50": 1 / 3, "rate": 1 / 3},
        {"impl": "b", "causal": False, "ms_p50": None, "source": ""},
        {"impl": "c", "ms_p50": float("inf")},
    )
    frame = rows.read(fake, "m", root)
    assert list(frame.columns) == rows.columns(fake)
    first, second, third = frame.to_dict("records")
    assert (first["size"], first["impl"], first["causal"], first["rate"]) == (1, "a", True, 0.333333)
    assert first["ms_p50"] == 0.333333  # six digits
    assert second["causal"] is False and pd.isna(second["ms_p50"]) and second["source"] == ""
    assert pd.isna(third["ms_p50"])
    assert frame["size"].dtype.kind == "i" and frame["causal"].dtype.kind == "b"
    nothing = rows.read(fake, "nowhere", root)
    assert nothing.empty and list(nothing.columns) == rows.columns(fake)


def test_a_case_stands_once_and_sorted_by_numbers(write, read):
    for _ in range(2):
        path = write(*({"size": size, "rate": 1 / 3} for size in (30, 4, 100)))
    assert read("size") == [4, 30, 100] and names(path.parent) == ["fake_chapter.csv"]  # nothing temporary


def test_what_was_just_measured_wins_whatever_the_times_say(write, read):
    for number, time in enumerate(("2099-01-01T00:00:00Z", EARLY, LATE)):
        write({"ms_p50": number, "time_utc": time})
        assert read("ms_p50") == [number]
    for status in ("error: KeyError", "skipped: x", "error: KeyError"):
        write({"impl": "b", "status": status})
        assert read("status") == ["ok", status]


def test_odd_texts_come_back_and_leave_the_other_rows_alone(write, read):
    write({"source": 'a "quoted", text\nof\rlines \udcff'}, {"impl": "b"})
    write({"size": 2})
    assert read("source") == ['a "quoted", text of lines  ', "clock", "clock"]
    cells = ["1.5 of 2", "nan and 3", ""]  # texts are left as they are
    write(*({"size": size, "source": cell} for size, cell in enumerate(cells)), m="lists")
    assert read("source", "lists") == cells


GOOD = "1,a,True,0.1,1,clock,ok,r,2026-01-01T00:00:00Z,e,c"


@pytest.fixture
def csv(write):
    """The file of one row, to be damaged."""
    path = write({})
    assert path.read_text().splitlines()[1] == GOOD
    return path


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["{}", GOOD, "2" + GOOD[1:] + ",more"], "line 3: 12 cells for 11 columns"),
        (["{}", GOOD, GOOD], "line 3: the same case"),
        (["{}", "9x" + GOOD[1:]], "line 2: size=9x: expected"),
        (["{}", "9" * 20 + GOOD[1:]], "line 2: size=9{20}: expected"),
        (["{}", GOOD.replace("True", "Tru")], "line 2: causal=Tru: expected"),
        (["{}", GOOD.replace("0.1", "nan")], "line 2: rate=nan: expected"),
        (["{}", GOOD.replace("ok", "fine")], "line 2: unknown status 'fine'; allowed: ok, oom"),
        (["{}", GOOD.replace("2026-01", "2026-13")], "line 2: .*'2026-13-01T00:00:00Z' does not match"),
        (
            ["{}", GOOD, "2" + GOOD[1:].replace(",1,", ",-inf,")],
            "line 3: ms_p50=-inf: expected a finite number",
        ),
        (["{}", GOOD, "2" + GOOD[1:].replace(",1,", ",word,")], "line 3: ms_p50=word: expected"),
        (["{}", GOOD.replace("clock", '"clock')], "line 2: unexpected end of data"),
        (["{}", GOOD, "2" + GOOD[1:].replace(",1,", ",1_0,")], "line 3: ms_p50=1_0: expected"),
        (["{}", GOOD, "\0\0"], "line 3: 1 cells for 11 columns"),
        (["{},tflops", GOOD + ",1"], "columns that this version does not know: tflops"),
        (["{},source", GOOD + ",1"], "columns twice: source"),
        (["size,causal", "1,True"], "lacks the columns impl"),
        ([], "is empty"),
    ],
)
def test_a_damaged_file_is_named_with_the_place(fake, root, csv, lines, named):
    header = csv.read_text().splitlines()[0]
    csv.write_text("".join(line.format(header) + "\n" for line in lines))
    with pytest.raises(files.StoreError, match=rf"fake_chapter\.csv.*{named}") as error:
        rows.read(fake, "m", root)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_an_editor_saved_is_read(fake, root, csv):
    before = rows.read(fake, "m", root)
    csv.write_bytes(b"\xef\xbb\xbf" + csv.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    pd.testing.assert_frame_equal(rows.read(fake, "m", root), before)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda csv: csv.write_bytes(csv.read_bytes()[:-2]), ", line 2: cut off"),
        (lambda csv: csv.write_bytes(csv.read_bytes() + b"\xff\xfe"), ", line 3: no text in UTF-8"),
        (lambda csv: (csv.unlink(), csv.symlink_to("nowhere")), ": No such file"),
        (lambda csv: (csv.unlink(), csv.mkdir()), ": "),
    ],
    ids=["cut off", "no text", "a link to nothing", "a folder"],
)
def test_a_file_that_cannot_be_read_is_named(fake, root, csv, damage, named):
    damage(csv)
    with pytest.raises(files.StoreError, match=rf"fake_chapter\.csv{named}"):
        rows.read(fake, "m", root)


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", "line 1 column 2"), ("[]", "list"), ('{"a": 1}', "a is 1"), ('{"a": {}, "a": {}}', "'a' twice")],
)
def test_a_damaged_machine_json_is_named(root, text, named):
    (root / "m").mkdir(parents=True)
    (root / "m" / "machine.json").write_text(text)
    for use in (lambda: rows.environments("m", root), lambda: rows.write_environment("m", root)):
        with pytest.raises(files.StoreError, match=rf"machine\.json.*{named}"):
            use()
    assert (root / "m" / "machine.json").read_text() == text


def test_a_link_stays_a_link(write, csv, tmp_path):
    csv.symlink_to(csv.rename(tmp_path / "elsewhere.csv"))
    write({"size": 2})
    assert csv.is_symlink() and len((tmp_path / "elsewhere.csv").read_text().splitlines()) == 3


# ------------------------------------------------------------------------------------ places that fail
def failing_fsync(monkeypatch, error, at):
    """Lets the `at`-th file that is written fail."""
    real, calls = os.fsync, []

    def fsync(file):
        calls.append(file)
        if len(calls) == at:
            raise OSError(error, os.strerror(error))
        real(file)

    monkeypatch.setattr(files.os, "fsync", fsync)


def test_places_that_fail_are_told_in_a_line_and_keep_what_is_there(write, csv, tmp_path, monkeypatch):
    before = csv.read_bytes()
    failing_fsync(monkeypatch, errno.ENOSPC, 1)
    with pytest.raises(files.StoreError, match=rf"^cannot write into {csv.parent}: No space left on device$"):
        write({"size": 2})
    assert csv.read_bytes() == before and names(csv.parent) == ["fake_chapter.csv"]
    (tmp_path / "file").touch()
    with pytest.raises(files.StoreError, match=r"^cannot open .*file/m/.*: Not a directory$"):
        write({}, to=tmp_path / "file")


def test_several_files_are_replaced_all_or_none(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_text("old")
    failing_fsync(monkeypatch, errno.EIO, 2)
    with pytest.raises(files.StoreError, match="Input/output error"):
        files.replace(dict.fromkeys(paths, "new"))
    assert [path.read_text() for path in paths] == ["old", "old"] and names(tmp_path) == ["a", "b"]
    files.replace(dict.fromkeys(paths, "new"))
    assert [path.read_text() for path in paths] == ["new", "new"]


def test_what_a_killed_writer_left_is_swept(write, csv):
    beside = csv.parent / "fake_chapter"
    beside.mkdir()
    for leftover in (csv.with_name(".fake_chapter.csv.77.tmp"), beside / ".a.json.77.tmp"):
        leftover.write_text("half")
    write({})
    assert names(csv.parent) == ["fake_chapter", "fake_chapter.csv"] and names(beside) == []


# ------------------------------------------------------------------------------------ measuring
def test_without_torch_nothing_is_measured_and_no_row_is_an_error(fake, root, monkeypatch):
    monkeypatch.setattr(measuring, "has_module", lambda name: name != "torch")
    with pytest.raises(ModuleNotFoundError, match="fake_chapter needs torch, which is not installed"):
        measure(fake, root)
    assert not root.exists()


def test_second_run_measures_nothing(fake, root, monkeypatch):
    count, log = measure(fake, root)
    assert count == 3 and len(fake.CALLS) == 6
    assert "3 of 3 groups" in log[0] and log[2].startswith("  [1/3] size=1: ok in")
    frame = rows.read(fake, "cpu-test", root)
    assert set(frame["status"]) == {"ok"} and frame["run"].nunique() == 3
    assert frame.groupby("size")["run"].nunique().eq(1).all()
    assert rows.environments("cpu-test", root) == {"env00001": {"cores": 2}}

    for module, name in ((measuring, "lock"), (rows, "write"), (rows, "write_environment")):
        monkeypatch.delattr(module, name)  # nothing is written either
    assert measure(fake, root) == (0, ["fake_chapter on cpu-test: all 3 groups are measured"])
    assert len(fake.CALLS) == 6


def test_only_the_groups_with_missing_rows_are_measured(fake, root):
    some = [fake.Case(2, "a", True), fake.Case(1, "a", True), fake.Case(2, "b", True)]
    measuring.measure(fake, some, root=root)
    assert fake.CALLS == [(2, "a"), (2, "b"), (1, "a")]  # by groups, in their order
    fake.CALLS.clear()
    assert measure(fake, root)[0] == 2
    assert fake.CALLS == [(1, "a"), (1, "b"), (30, "a"), (30, "b")]


def test_refresh(fake, root, monkeypatch):
    measure(fake, root)
    assert measure(fake, root, refresh="stale")[0] == 0
    assert measure(fake, root, refresh="all")[0] == 3
    begun = rows.read(fake, "cpu-test", root)["code"].unique()
    monkeypatch.setattr(provenance, "digest", lambda table: "newcode0")
    count, log = measure(fake, root)
    assert count == 0 and "3 of 3 groups have rows of earlier code" in log[0]
    # what this process measures, it measures with what it has imported before
    assert measure(fake, root, refresh="stale")[0] == measure(fake, root, refresh="stale")[0] == 3
    assert rows.read(fake, "cpu-test", root)["code"].unique() == begun
    monkeypatch.setattr(provenance, "_begun", {})  # a new one
    assert measure(fake, root, refresh="stale")[0] == 3
    assert measure(fake, root, refresh="stale")[0] == 0
    of_environment(monkeypatch, "env00002")
    count, log = measure(fake, root)
    assert count == 0 and "3 of 3 groups have rows of earlier code or of another environment" in log[0]
    assert measure(fake, root, refresh="stale")[0] == 3
    with pytest.raises(ValueError, match="unknown refresh 'some'; allowed: missing, stale, all"):
        measure(fake, root, refresh="some")


OOM = [
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
]


def test_bench_shows_a_case_of_more_digits_than_the_file_keeps(fake, root, monkeypatch):
    monkeypatch.setattr(bench.machine, "machine_name", lambda: "cpu-test")
    frame, failure = bench.measure(fake, [fake.Case(1, "a", True, 1 / 3)], "missing", root, {})
    assert frame["status"].tolist() == ["ok"] and failure is None


@pytest.mark.parametrize("error", OOM)
def test_out_of_memory_is_a_row_and_stays_one_unless_others_held_it(fake, root, error, monkeypatch):
    fake.RAISES[2, "b"] = error
    held = iter([23.4, 0.0])
    monkeypatch.setattr(measuring, "memory_of_others_gib", lambda: next(held))
    measure(fake, root)
    assert status_of(fake, root) == {(2, "b"): "oom: other processes held 23 GiB"}
    assert measure(fake, root)[0] == 1
    assert status_of(fake, root) == {(2, "b"): "oom"}
    assert measure(fake, root)[0] == 0


@pytest.mark.parametrize(
    ("field", "value"), [("size", 10**20), ("size", -(2**63) - 1), ("size", 1.5), ("rate", float("nan"))]
)
def test_a_case_that_no_file_keeps_is_refused_before_anything_is_measured(fake, root, field, value):
    case = dataclasses.replace(fake.Case(1, "a", True), **{field: value})
    with pytest.raises(ValueError, match=f"{field}={value}: expected"):
        measuring.measure(fake, [fake.Case(1, "b", True), case], root=root)
    with pytest.raises(ValueError, match=f"{field}={value}: expected"):
        rows.write(fake, "m", [row(fake, **{field: value})], root)
    assert not fake.CALLS and not list(root.rglob("*.csv"))


@pytest.mark.parametrize(("value", "kept"), [(True, 1), (1e7, 10**7), (2.0, 2)])
def test_a_whole_number_is_kept_as_one_whatever_its_type(write, read, value, kept):
    write({"size": value, "causal": 1})
    write({"size": kept, "ms_p50": 2.0})
    assert read("size") == [kept] and read("ms_p50") == [2.0]


def test_columns_of_a_newer_version_are_kept_by_measuring_nothing(fake, root):
    measure(fake, root)
    fake.CALLS.clear()
    path = rows.csv_path("fake_chapter", "cpu-test", root)
    path.write_text(newer := re.sub("\n", ",1\n", path.read_text()).replace("code,1", "code,tflops"))
    with pytest.raises(files.StoreError, match=r"fake_chapter\.csv.*does not know: tflops"):
        measure(fake, root, refresh="all")
    assert not fake.CALLS and path.read_text() == newer


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


def test_what_a_group_raises_is_the_status_of_the_cases_that_have_none(fake, root):
    def run_group(cases):
        yield {"ms_p50": 1.0}
        raise Skip("needs a CUDA device")

    measure(dataclasses.replace(fake, run_group=run_group), root)
    assert status_of(fake, root) == {(size, "b"): "skipped: needs a CUDA device" for size in (1, 2, 30)}


def test_an_error_is_a_row_and_the_others_still_run(fake, root, capsys):
    fake.RAISES[1, "b"] = KeyError("what")
    with pytest.raises(measuring.MeasurementError, match=r"1 cases of .* an error.*KeyError: 'what'"):
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
    # one lost by another process is an error like others; torch adds to each how its assertions are switched on
    fake.RAISES[1, "a"] = ChildError("Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions")
    with pytest.raises(measuring.MeasurementError, match="ended in an error"):
        measure(fake, root)
    assert len(rows.read(fake, "cpu-test", root)) == 6


def test_what_no_graph_captures_leaves_the_context():
    error = type("AcceleratorError", (RuntimeError,), {})
    assert loses_context(error("CUDA error: unspecified launch failure"))
    assert not loses_context(error("CUDA error: operation not permitted when stream is capturing"))


def test_an_interrupt_is_no_row(fake, root):
    fake.RAISES[2, "a"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        measure(fake, root)
    assert set(rows.read(fake, "cpu-test", root)["size"]) == {1}


@pytest.fixture
def script(tmp_path):
    """Starts a process that runs code with the experiment above, and returns it."""
    (tmp_path / "fake_chapter.py").write_text(FAKE)
    path = os.pathsep.join([str(tmp_path), str(Path(rows.__file__).parents[2])])
    env = os.environ | {"CS336_RESULTS": str(tmp_path / "results"), "PYTHONPATH": path}

    def start(code, *arguments):
        command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    return start


def test_killed_in_the_middle_the_next_run_goes_on(script, tmp_path):
    """Killed in its second group, a run leaves the first one's rows; another one, which has waited, measures the
    others."""
    code = """
        import dataclasses, sys, time
        from fake_chapter import TABLE as fake_chapter
        from cs336_systems.store import measuring
        quick = fake_chapter.run_group
        def slow(cases):
            if "slow" in sys.argv and cases[0].size == 2:
                print("in group 2", flush=True)
                time.sleep(60)
            return quick(cases)
        table = dataclasses.replace(fake_chapter, run_group=slow)
        measuring.measure(table, fake_chapter.grid("full"))
    """
    with script(code, "slow") as process:
        lines = []
        while not lines or "in group 2" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "the process ended early"
        with script(code) as second:
            assert "another process is measuring it" in second.stdout.readline()
            process.kill()
            again, _ = second.communicate(timeout=60)
        assert second.returncode == 0
    assert any("[1/3] size=1: ok" in line for line in lines)  # told before the kill, though stdout is a pipe
    [path] = (tmp_path / "results").glob("*/fake_chapter.csv")
    assert "2 of 3 groups to measure" in again
    assert list(pd.read_csv(path)["size"]) == [1, 1, 2, 2, 30, 30]
    assert names(path.parent) == ["fake_chapter.csv", "machine.json"]


# ------------------------------------------------------------------------------------ merging
def test_merge_takes_newer_rows_and_environments(fake, root, tmp_path, write, read):
    other = tmp_path / "other"
    write({}, {"impl": "b"}, m="gpu-x1")
    new = {"ms_p50": 2.0, "time_utc": "2026-02-01T00:00:00Z"}
    old = {"impl": "b", "ms_p50": 2.0, "time_utc": "2025-01-01T00:00:00Z"}
    write(new, old, {"size": 2}, m="gpu-x1", to=other)
    step_rows.spell_out({"a": {"cores": 1}}, root, "gpu-x1")
    step_rows.spell_out({"b": {"cores": 2}}, other, "gpu-x1")
    assert rows.merge([fake], other, root) == [("gpu-x1", "fake_chapter", 2, 3)]
    assert read("ms_p50", "gpu-x1") == [2.0, 1.0, 1.0]
    assert set(json.loads((root / "gpu-x1" / "machine.json").read_text())) == {"a", "b"}


def test_a_file_of_which_nothing_is_merged_stays_as_it_is(fake, root, write):
    """One, too, that an earlier version wrote, with fewer columns."""
    path = write({}, m="gpu-x1")
    pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns="source").to_csv(path, index=False)
    before = path.read_text()
    assert "source" not in before
    assert rows.merge([fake], root, root) == [("gpu-x1", "fake_chapter", 0, 1)]
    assert path.read_text() == before


def test_nothing_that_is_merged_moves_a_terminal_s_cursor(fake, root, tmp_path, write, read):
    path = write({"status": "error: RuntimeError: MARK"}, m="gpu-x1", to=tmp_path / "other")
    path.write_text(
        path.read_text().replace("error: RuntimeError: MARK", '"error: RuntimeError: \x1b[31m\tred\n"')
    )
    rows.merge([fake], tmp_path / "other", root)
    assert read("status", "gpu-x1") == ["error: RuntimeError:  [31m red "]


@pytest.mark.parametrize("name", ["a b", "../x", ".x", "a\n"])
def test_a_machine_whose_name_is_none_is_refused(fake, root, name):
    with pytest.raises(ValueError, match="allowed are letters"):
        rows.read(fake, name, root)


@pytest.mark.parametrize("measured", ["ok", "oom"])
@pytest.mark.parametrize("hindered", ["skipped: needs a package", "oom: other processes held 7 GiB"])
def test_a_case_that_could_not_be_run_does_not_take_the_place_of_a_measured_one(
    fake, root, tmp_path, write, read, measured, hindered
):
    """Neither where both are written here, nor where they are merged."""
    pair = {"status": measured, "time_utc": EARLY}, {"status": hindered, "time_utc": LATE}
    for machine, (first, second) in (("one", pair), ("two", pair[::-1])):
        write(first, m=machine)
        write(second, m=machine)
        write(first, m=f"{machine}-merged")
        write(second, m=f"{machine}-merged", to=tmp_path / machine)
        rows.merge([fake], tmp_path / machine, root)
        assert read("status", machine) == read("status", f"{machine}-merged") == [measured]


CSV_THERE, JSON_THERE = "there/b/fake_chapter.csv", "there/b/machine.json"


@pytest.mark.parametrize(
    ("file", "damage", "named"),
    [
        (CSV_THERE, lambda text: text.replace("\n1,", "\n1x,"), "line 2: size=1x"),
        (CSV_THERE, lambda text: text.replace("2026-01", "2026-13"), "line 2: .*'2026-13-"),
        ("there/b/fake_chapter/c.json", lambda text: text[1:], "line 1"),
        (JSON_THERE, lambda text: text[:-3], "line 4"),
        ("here/b/machine.json", lambda text: text[:-3], "line 4"),
        ("here/b/fake_chapter.csv", lambda text: text.replace("a,True", "a,Tru"), "line 2: causal=Tru"),
    ],
)
def test_merge_takes_all_or_nothing(fake, tmp_path, write, file, damage, named):
    for folder, count in (("here", 1.0), ("there", 2.0)):
        for machine in ("a", "b"):
            path = write({"ms_p50": count}, m=machine, to=tmp_path / folder)
            step_rows.spell_out({folder: {"cores": count}}, tmp_path / folder, machine)
            (path.parent / "fake_chapter").mkdir()
            (path.parent / "fake_chapter" / "c.json").write_text(f'{{"from": "{folder}"}}')
    path = tmp_path / file
    path.write_text(damage(path.read_text()))
    contents = lambda: {p: p.read_text() for p in (tmp_path / "here").rglob("*") if p.is_file()}
    before = contents()
    with pytest.raises(files.StoreError, match=f"{file}.*{named}"):
        rows.merge([fake], tmp_path / "there", tmp_path / "here")
    assert contents() == before


def test_merge_takes_what_lies_beside_with_its_row(fake, root, tmp_path, write):
    """Also where rows of other cases are newer there: a timeline is that of its row."""
    other = tmp_path / "other"
    for folder in (root, other):
        (folder / "m" / "fake_chapter").mkdir(parents=True)
        for size in (1, 2, 3)[folder == root :]:
            (folder / "m" / "fake_chapter" / f"a_{size}.json").write_text(f'{{"from": "{folder.name}"}}')
    for size, time, to in ((3, LATE, root), (3, EARLY, other), (2, EARLY, root), (2, LATE, other)):
        write({"size": size, "time_utc": time}, to=to)
    rows.merge([fake], other, root)
    there = {p.stem: json.loads(p.read_text())["from"] for p in (root / "m" / "fake_chapter").iterdir()}
    assert there == {"a_1": "other", "a_2": "other", "a_3": "results"}


def test_merge_takes_rows_from_before_a_number_was_measured(fake, root, tmp_path, write, read):
    path = write({}, to=tmp_path / "other")
    pd.read_csv(path).drop(columns="ms_p50").to_csv(path, index=False)
    assert rows.merge([fake], tmp_path / "other", root) == [("m", "fake_chapter", 1, 1)]
    assert pd.isna(read("ms_p50")).all()


@pytest.mark.parametrize(("name", "end"), [("cpu-2", "measure"), ("h100-x1", "measure, about 6 s")])
def test_a_group_is_told_before_it_takes_its_time(fake, root, monkeypatch, name, end):
    """And how long it took on another machine of the kind, by when its run began and ended there."""
    lines, told = [], []
    there = {"size": 1, "impl": "a", "causal": True, "rate": 0.1, "status": "ok", "ms_p50": 1.0}
    there |= {"run": "20261127T163954-d1f5", "time_utc": "2026-11-27T16:40:00Z", "env": "", "code": ""}
    rows.write(fake, "h200-x1", [there], root)
    rows.write(
        fake, "h200-x2", [there | {"status": "skipped: needs time", "time_utc": "2026-11-28T16:40:00Z"}], root
    )
    monkeypatch.setattr(measuring, "machine_name", lambda: name)

    def run_group(cases):
        told.extend(lines)
        return [{"ms_p50": 1.0} for _ in cases]

    fake = dataclasses.replace(fake, run_group=run_group)
    measuring.measure(fake, fake.grid("smoke")[:1], root=root, log=lines.append)
    assert told[0].endswith(f"1 groups to {end}") and told[1:] == ["  [1/1] size=1"]
