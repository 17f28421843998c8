"""Signals at random times, ranks that fail in every way, a book that is killed: how it ends, and that nothing is left.

python -m pytest -m chaos            (minutes; left out otherwise. CS336_TEST_SEED repeats the times)
"""

import csv
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cs336_systems.launch.start import LaunchError, launch

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds processes in /proc"),
]
ROOT = Path(__file__).resolve().parents[1]
SMOKE = ["--preset", "smoke", "--refresh", "all"]
COMMANDS = {
    "a kernel": ["run", "hardware", *SMOKE],
    "fresh processes": ["run", "memory", *SMOKE],
    "ranks": ["run", "allreduce", *SMOKE],
    "itself": ["bench", "hardware", *SMOKE],
}
CS336 = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
)
CS336 += "from cs336_systems.cli.main import app; print('up', flush=True); app(prog_name='cs336')"
MARK = "CS336_CHAOS"  # an environment variable that tells whose a process is


class Tree:
    """A command and all processes that have come of it, by their environment."""

    def __init__(self, arguments, folder, **variables):
        self.results, temporary = folder / "results", folder / "tmp"
        for path in (self.results, temporary):
            path.mkdir(exist_ok=True)
        self.mark = f"{MARK}={folder}"
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        own = {
            "CS336_RESULTS": str(self.results),
            "TMPDIR": str(temporary),
            "PYTHONPATH": path,
            MARK: str(folder),
        }
        self.command = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **own, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.command.communicate()

    def left(self):
        return of_mark(self.mark)

    def end(self, seconds=90):
        """What it prints; then nothing may be left."""
        printed = self.command.communicate(timeout=seconds)[0]
        assert until(lambda: not self.left(), 10), (self.left(), printed)
        return printed

    def rows_are_whole(self):
        for file in self.results.rglob("*.csv"):
            rows = list(csv.reader(file.open()))
            assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}, file
        assert not list(self.results.rglob("*.tmp"))


def of_mark(mark):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            ours = mark in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            if ours and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(pid))
        except OSError:  # it has ended, or is another user's
            pass
    return found


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def dice():
    return random.Random(torch.initial_seed())


# ---- commands


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("what", COMMANDS)
def test_nothing_outlives_a_command(what, name, dice, tmp_path):
    with Tree(["-c", CS336, *COMMANDS[what]], tmp_path) as tree:
        assert tree.command.stdout.readline() == "up\n"
        time.sleep(dice.uniform(1, 10))
        tree.command.send_signal(getattr(signal, name))
        printed = tree.end(30)
        tree.rows_are_whole()
    if name == "SIGINT" and "Interrupted" in printed:  # it may have been too fast
        assert tree.command.returncode == 130 and printed.endswith("Interrupted\n")
        assert "Traceback" not in printed and "rror" not in printed, printed


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGSTOP"])
@pytest.mark.parametrize("what", ["fresh processes", "ranks"])
def test_a_command_ends_when_a_process_of_its_own_is_killed(what, name, dice, tmp_path):
    with Tree(["-c", CS336, *COMMANDS[what]], tmp_path) as tree:
        assert tree.command.stdout.readline() == "up\n"
        time.sleep(dice.uniform(5, 10))
        if others := [pid for pid in tree.left() if pid != tree.command.pid]:
            victim = dice.choice(others)
            os.kill(victim, getattr(signal, name))
            if name == "SIGSTOP":
                time.sleep(2)
                tree.command.kill()  # what is stopped cannot see it
                os.kill(victim, signal.SIGCONT)
        tree.end()
        tree.rows_are_whole()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(closed, tmp_path):
    line = f'"{sys.executable}" -m cs336_systems {" ".join(COMMANDS["fresh processes"])} {closed}'
    with Tree(["-c", "import os, sys; sys.exit(os.system(sys.argv[1]) != 0)", line], tmp_path) as tree:
        tree.end(120)
        assert tree.command.returncode == 0 and list(tree.results.rglob("memory.csv"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_torchrun_ends_at_once(name, dice, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Tree([*torchrun, "-m", "cs336_systems", *COMMANDS["ranks"]], tmp_path) as tree:
        time.sleep(dice.uniform(8, 20))
        tree.command.send_signal(getattr(signal, name))
        printed = tree.end(20)
    assert printed.count("Interrupted") <= 1 and "nbclient" not in printed and "zmq" not in printed, printed


# ---- the book


def test_a_killed_book_leaves_the_one_before_it(tmp_path):
    import nbformat

    cell = f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)"
    (tmp_path / "book").mkdir()
    page = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# A page"), nbformat.v4.new_code_cell(cell)]
    )
    page.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(page, tmp_path / "book" / "index.ipynb")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: index\n")
    (tmp_path / "_config.yml").write_text("title: A book\nexecute:\n  execute_notebooks: force\n")
    good = tmp_path / "_build" / "html" / "index.html"
    good.parent.mkdir(parents=True)
    good.write_text("good")
    root = f"pathlib.Path({str(tmp_path)!r})"
    code = f"import pathlib; from cs336_systems.report.build import build; build(list, root={root})"
    for name in ("SIGKILL", "SIGTERM"):
        (tmp_path / "up").unlink(missing_ok=True)
        with Tree(["-c", code], tmp_path) as tree:
            up = until(lambda tree=tree: (tmp_path / "up").exists() or tree.command.poll() is not None, 90)
            assert up and tree.command.poll() is None
            tree.command.send_signal(getattr(signal, name))
            tree.end(10)
        assert good.read_text() == "good"


# ---- ranks: what rank 1 does while rank 0 is in a collective


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def give_up(rank):
    if rank.rank == 1:
        raise ValueError("before")
    dist.all_reduce(torch.ones(3))


def fail(rank, how):
    subprocess.Popen(["sleep", "600"])  # a child, which ends with the rank
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    if rank.rank == 0:
        if how == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if how == "late":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            time.sleep(600)
        return None if how == "after" else dist.all_reduce(torch.ones(3))
    match how:
        case "after" | "stubborn" | "late":
            raise KeyError("rank 1")
        case "thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
            sys.exit(3)
        case "unprintable":
            raise Unprintable
        case "abort":
            os.abort()
        case "fault":
            ctypes.string_at(0)
        case "C":
            ctypes.PyDLL(None).sleep(600)  # without letting go of the interpreter
        case _:
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(1)


FIRST = {
    "after": "rank 1 of 2: KeyError: 'rank 1'",
    "stubborn": "rank 1 of 2: KeyError: 'rank 1'",
    "late": "rank 1 of 2: KeyError: 'rank 1'",
    "thread": "rank 1 of 2: SystemExit: 3",
    "unprintable": "rank 1 of 2: test_chaos_processes.Unprintable: <exception str() failed>",
    "abort": "rank 1 of 2: signal SIGABRT",
    "fault": "rank 1 of 2: signal SIGSEGV",
    "SIGINT": "rank 1 of 2: KeyboardInterrupt",
    "SIGTERM": "rank 1 of 2: signal SIGTERM",
    "SIGKILL": "rank 1 of 2: signal SIGKILL (by the system, for want of memory, if nobody sent it)",
    "SIGHUP": "rank 1 of 2: signal SIGHUP",
    "C": "rank 0 of 2: RuntimeError",  # nobody has failed: a collective took too long
    "SIGSTOP": "rank 0 of 2: RuntimeError",
}


@pytest.mark.parametrize("how", FIRST)
def test_the_report_names_the_rank_that_went_first(how, tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    hangs = how in ("C", "SIGSTOP")
    start, timeout = time.monotonic(), 4 if hangs else 120
    with pytest.raises(LaunchError) as caught:
        launch(
            f"{__name__}:fail", 2, {"how": how}, backend="gloo", device="cpu", collective_timeout_s=timeout,
            log=lambda line: None,
        )  # fmt: skip
    seconds = time.monotonic() - start
    first, *said = str(caught.value).splitlines()
    assert first.startswith(FIRST[how]), caught.value
    assert hangs or "rank 0" not in "".join(said)
    assert until(lambda: not of_mark(f"{MARK}={tmp_path}"), 5)
    assert seconds < 30  # to start takes seconds; then at most the collective's time and six seconds


def test_a_rank_that_raises_before_the_first_collective():
    with pytest.raises(LaunchError, match=r"^rank 1 of 2: ValueError: before"):
        launch(f"{__name__}:give_up", 2, backend="gloo", device="cpu", log=lambda line: None)
