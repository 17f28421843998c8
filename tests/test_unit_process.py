"""Functions in fresh processes: results, errors, endings, and that nothing outlives its time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import running, wait_until

from cs336_systems.store.process import TEAM_VARIABLE, ChildError, call

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A module of functions that a child can import."""
    (tmp_path / "child_functions.py").write_text(
        "import os, signal, subprocess, threading, time\n"
        "def add(a, b): return {'sum': a + b, 'pid': os.getpid(), 'word': os.environ.get('WORD'),\n"
        f"  'team': os.environ.get({TEAM_VARIABLE!r})}}\n"
        "def fail(): raise ValueError('size=7 is odd\\nmore')\n"
        "def die(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def leave(): os._exit(3)\n"
        "def leave_a_thread(): threading.Thread(target=time.sleep, args=(600,)).start(); return 'done'\n"
        "def no_json(): return {1, 2}\n"
        "def sleep(path):\n"
        "    other = subprocess.Popen(['sleep', '600'])\n"
        "    open(path + '.part', 'w').write(f'{os.getpid()} {other.pid}')\n"
        "    os.replace(path + '.part', path)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "child_functions"


def test_result_from_another_process(child, tmp_path, monkeypatch):
    monkeypatch.setenv(
        TEAM_VARIABLE, "2"
    )  # ranks that torchrun started are the parent's: a child leads no team
    log = tmp_path / "log"
    script = (
        "import subprocess, sys; open(sys.argv[1], 'w').write('ran'); sys.exit(subprocess.call(sys.argv[2:]))"
    )
    for prefix in ([], [sys.executable, "-c", script, str(log)]):
        found = call(f"{child}:add", {"a": 1, "b": 2}, timeout_s=60, environment={"WORD": "x"}, prefix=prefix)
        assert (
            found["sum"] == 3
            and found["word"] == "x"
            and found["pid"] != os.getpid()
            and found["team"] is None
        )
    assert log.read_text() == "ran"


def test_an_error_of_the_child_says_what_it_was(child, capfd):
    with pytest.raises(ChildError, match=r"^ValueError: size=7 is odd$"):
        call(f"{child}:fail", {}, timeout_s=60)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("function", "words"),
    [("die", "SIGKILL.*for want of memory"), ("leave", "exit code 3"), ("no_json", "^TypeError: .*set")],
)
def test_an_ending_without_result(child, function, words):
    with pytest.raises(ChildError, match=words):
        call(f"{child}:{function}", {}, timeout_s=60)


def test_nobody_waits_for_a_thread_that_the_function_has_left(child):
    assert call(f"{child}:leave_a_thread", {}, timeout_s=60) == "done"


def test_out_of_time_is_ended(child, tmp_path, monkeypatch):
    """Its time is over when it is asleep, however long it took until then."""
    file, wait = tmp_path / "pids", subprocess.Popen.wait

    def asleep(process, timeout=None):
        if timeout:
            wait_until(file.exists, 60)
        return wait(process, timeout and 0)

    monkeypatch.setattr(subprocess.Popen, "wait", asleep)
    with pytest.raises(ChildError, match="longer than 5 s"):
        call(f"{child}:sleep", {"path": str(file)}, timeout_s=5)
    assert_ended(file)


# a profiler passes on neither standard input nor open files, and may start the program in another session
PREFIX = (
    "import subprocess as s, sys; sys.exit(s.call(sys.argv[1:], stdin=s.DEVNULL, start_new_session=True))"
)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("prefix", [[], [sys.executable, "-c", PREFIX]], ids=["alone", "under a command"])
def test_a_child_and_its_children_end_with_the_caller(name, prefix, child, tmp_path):
    file = tmp_path / "pids"
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "from cs336_systems.store.process import call\n"
        f"call('{child}:sleep', {{'path': {str(file)!r}}}, timeout_s=600, prefix={prefix})"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=ROOT,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_until(lambda: file.exists() or caller.poll() is not None, 60)
        caller.send_signal(getattr(signal, name))
        caller.communicate(timeout=60)
    finally:
        caller.kill()
    assert_ended(file)


def assert_ended(file):
    """The processes that a file names end soon: at most zombies of theirs are left."""
    wait_until(lambda: not any(map(running, map(int, file.read_text().split()))), 60)
