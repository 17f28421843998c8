"""A pool: its work in order, what goes wrong said in a line, and no process left however its `with` ends."""

import ast
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cs336_systems
from cs336_systems.store.pool import Pool, PoolError, undisturbed

PACKAGE = Path(cs336_systems.__file__).resolve().parent


def double(item):
    time.sleep(0.01 * (item % 3))
    return 2 * item


def odd_fails(item):
    if item % 2:
        raise ValueError(f"no {item}")
    return item


def end(item):
    os._exit(3)


def large(item):
    return bytes(10**6 + item)  # more than a pipe takes without a reader


def gone(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return True


def pids(pool):
    return [process.pid for process in pool._processes.values()]


def test_results_come_in_order_of_items_without_end():
    with Pool(3) as pool:
        assert list(pool.map(double, range(20))) == [2 * n for n in range(20)]
        assert list(pool.map(double, [])) == []
        first = list(itertools.islice(pool.map(large, itertools.count()), 5))
        assert [len(one) for one in first] == [10**6 + n for n in range(5)]
        started = pids(pool)
    assert gone(started)


def test_what_goes_wrong_in_a_process_is_said():
    with Pool(2) as pool, pytest.raises(ValueError, match=r"^no 1\n"):
        list(pool.map(odd_fails, range(4)))
    with Pool(2) as pool, pytest.raises(PoolError, match=r"exit code 3 and no result$"):
        list(pool.map(end, range(4)))


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError, None])
def test_no_process_is_left_however_a_loop_ends(how):
    with pytest.raises(how) if how else undisturbed(), Pool(2) as pool:
        started = pids(pool)
        for _ in pool.map(large, itertools.count()):
            if how:
                raise how
            break
    assert gone(started)


def interrupt():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("when", ["start", "end"])
def test_an_interrupt_waits_until_all_processes_are_known_or_gone(monkeypatch, when, thread):
    """Also where another thread is the one that the signal reaches."""
    started = []

    def interrupted():
        if thread:
            other = threading.Thread(target=interrupt)
            other.start()
            other.join()
        else:
            interrupt()

    class Process(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)
            if when == "start":
                interrupted()

        def wait(self, timeout=None):
            if when == "end":
                interrupted()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt), Pool(2):
        pass
    assert len(started) == 2 and gone(started)


def test_processes_end_with_a_caller_that_is_killed():
    script = (
        "import sys, time; from cs336_systems.store.pool import Pool\n"
        "with Pool(2) as pool:\n"
        "    list(pool.map(len, ['a', 'b', 'c']))\n"  # they are up
        "    print(*(p.pid for p in pool._processes.values()), flush=True)\n"
        "    next(pool.map(time.sleep, [600, 600]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        started = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
        assert process.stdout.read() == ""  # ends when the last that holds it has ended
    assert len(started) == 2


def test_there_is_no_other_pool():
    """And none is held by a generator, which garbage collection would close: there an interrupt is lost."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        others = {"ProcessPoolExecutor", "ThreadPoolExecutor", "ThreadPool", "get_context", "imap"}
        assert not names & others, path
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and "contextmanager" not in str(
                [ast.unparse(decorator) for decorator in function.decorator_list]
            ):
                inside = list(ast.walk(function))
                holds = any(isinstance(n, ast.Call) and ast.unparse(n.func) == "Pool" for n in inside)
                assert not (holds and any(isinstance(n, ast.Yield | ast.YieldFrom) for n in inside)), path
