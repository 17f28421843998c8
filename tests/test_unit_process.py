"""Functions in fresh processes: results, errors, endings, and that nothing outlives its time."""

import os
import sys
import time

import pytest

from cs336_systems.launch.group import TEAM_VARIABLE
from cs336_systems.store.process import ChildError, call


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A module of functions that a child can import."""
    (tmp_path / "child_functions.py").write_text(
        "import os, signal, time\n"
        "def add(a, b): return {'sum': a + b, 'pid': os.getpid(), 'word': os.environ.get('WORD')}\n"
        "def variable(name): return os.environ.get(name)\n"
        "def fail(): raise ValueError('size=7 is odd\\nmore')\n"
        "def die(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def leave(): os._exit(3)\n"
        "def sleep(path):\n"
        "    open(path, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "child_functions"


def test_result_from_another_process(child):
    found = call(f"{child}:add", {"a": 1, "b": 2}, timeout_s=60, environment={"WORD": "x"})
    assert found["sum"] == 3 and found["word"] == "x" and found["pid"] != os.getpid()


def test_a_child_leads_no_team(child, monkeypatch):
    """Ranks that torchrun started are the parent's: those that a child launches are its own."""
    monkeypatch.setenv(TEAM_VARIABLE, "2")
    assert call(f"{child}:variable", {"name": TEAM_VARIABLE}, timeout_s=60) is None


def test_runs_under_a_command(child, tmp_path):
    log = tmp_path / "log"
    script = (
        "import subprocess, sys; open(sys.argv[1], 'w').write('ran'); sys.exit(subprocess.call(sys.argv[2:]))"
    )
    found = call(
        f"{child}:add", {"a": 1, "b": 2}, timeout_s=60, prefix=[sys.executable, "-c", script, str(log)]
    )
    assert found["sum"] == 3 and log.read_text() == "ran"


def test_an_error_of_the_child_says_what_it_was(child, capfd):
    with pytest.raises(ChildError, match=r"^ValueError: size=7 is odd$"):
        call(f"{child}:fail", {}, timeout_s=60)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("function", "words"), [("die", "SIGKILL.*for want of memory"), ("leave", "exit code 3")]
)
def test_an_ending_without_result(child, function, words):
    with pytest.raises(ChildError, match=words):
        call(f"{child}:{function}", {}, timeout_s=60)


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_out_of_time_is_ended(child, tmp_path):
    file = tmp_path / "pid"
    with pytest.raises(ChildError, match="longer than 5 s"):
        call(f"{child}:sleep", {"path": str(file)}, timeout_s=5)
    pid = int(file.read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")
