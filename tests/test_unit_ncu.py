"""Nsight Compute: its table read, kernels told apart by marks, and what is said where it is missing or refuses."""

import os
import stat

import pytest

from cs336_systems.measure.counters import ncu
from cs336_systems.store import process
from cs336_systems.store.status import Skip

HEAD = ["ID", "Process ID", "Kernel Name", "Block Size", *ncu.COUNTERS.values()]
UNITS = ["", "", "", "block", "ns", "%", "%", "%", "%", "%", "inst", "", "cycle"]


COLUMNS = ["55.69", "20.1", "24", "70.6", "50", "1,188,324", "5", "100"]


def table(*kernels, units=UNITS, head=HEAD):
    """What ncu writes to its log file: its own lines, then CSV."""
    rows = [[str(i), "77", name, "(128, 1, 1)", ns, *COLUMNS] for i, (name, ns) in enumerate(kernels)]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in [head, units, *rows])
    return (
        f"==PROF== Connected to process 77\n==PROF== Profiling 1: 0%....100%\n{text}\n==PROF== Disconnected\n"
    )


SPIN = ("spin_kernel(long)", "900")


def test_the_table_is_read():
    [kernel] = ncu.parse(table(("void f<int, 3>(int, float)", "6,400")))
    assert kernel["kernel"] == "void f<int, 3>(int, float)"
    assert kernel["ns"] == 6400 and kernel["tensor_pct"] == 55.69 and kernel["instructions"] == 1188324
    assert set(kernel) == {"kernel", *ncu.COUNTERS}


def test_marks_tell_parts_apart():
    names = [SPIN, ("a", "1"), ("b", "3"), SPIN, SPIN, ("c", "1")]
    parts = ncu.parts(ncu.parse(table(*names)))
    assert [[kernel["kernel"] for kernel in part] for part in parts] == [["a", "b"], [], ["c"]]
    with pytest.raises(ncu.NcuError, match="a ran before the first mark"):
        ncu.parts(ncu.parse(table(("a", "1"), SPIN)))


def test_kernels_together():
    kernels = ncu.parse(table(("void a<2>(int)", "10"), ("b", "30"), ("b", "60")))
    kernels[0]["tensor_pct"], kernels[0]["conflicts"] = 5.69, 35.0
    found = ncu.summed(kernels)
    assert found["kernels"] == "void a<2> b"
    assert found["tensor_pct"] == pytest.approx(0.1 * 5.69 + 0.9 * 55.69)
    assert found["conflict_pct"] == pytest.approx(100 * 45 / 300)
    assert found["instructions"] == 3 * 1188324
    with pytest.raises(ValueError, match="no kernel ran"):
        ncu.summed([])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "wrote no table: nothing at all"),
        ("==ERROR== The application returned 1.", "wrote no table: ==ERROR== The application"),
        (table(head=[name.replace("lts__", "xyz__") for name in HEAD]), "lacks lts__throughput"),
        (table(units=["ms" if u == "ns" else u for u in UNITS]), "times in 'ms', not in ns"),
    ],
)
def test_what_is_not_its_table_is_refused(text, said):
    with pytest.raises(ncu.NcuError, match=said):
        ncu.parse(text)


def test_counters_that_may_not_be_read_are_skipped():
    with pytest.raises(Skip, match="the right to read"):
        ncu.parse("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_without_the_tool(monkeypatch, tmp_path):
    monkeypatch.setattr(ncu, "find", lambda: None)
    with pytest.raises(Skip, match="no `ncu` in PATH"):
        ncu.counted("math:sqrt", {}, timeout_s=5)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """An `ncu` that runs the program and writes what it is told to."""

    def make(log):
        (tmp_path / "log").write_text(log)
        script = tmp_path / "ncu"
        script.write_text(
            "#!/bin/sh\n"
            f'for x in "$@"; do case $x in --log-file=*) cp {tmp_path}/log "${{x#--log-file=}}";; esac; done\n'
            'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_a_program_under_the_tool(stand_in, capfd):
    stand_in(table(SPIN, ("a", "1")))
    result, [[kernel]] = ncu.counted("textwrap:shorten", {"text": "so it is", "width": 8}, timeout_s=60)
    assert result == "so it is" and kernel["kernel"] == "a"
    stand_in("==PROF== Connected to process 77")
    with pytest.raises(process.ChildError, match="TypeError"):
        ncu.counted("textwrap:shorten", {}, timeout_s=60)
    assert "Traceback" in capfd.readouterr().err
    stand_in("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(Skip, match="the right to read the GPU's counters"):
        ncu.counted("textwrap:shorten", {}, timeout_s=60)
