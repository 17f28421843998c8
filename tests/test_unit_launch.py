"""Processes that work together: results, what the error says when a rank fails in each way, and that none is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import distributed
import pytest
from waiting import running, wait_until

from cs336_systems.launch import group, processes
from cs336_systems.launch import start as module
from cs336_systems.launch.group import backend_and_device, process_group
from cs336_systems.launch.outcome import failure, outcome
from cs336_systems.launch.start import LaunchError, launch

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402

from cs336_systems.parallel.agreement import agreement  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CPU = {"backend": "gloo", "device": "cpu"}

# ---- what ranks run: functions of this module, as another process imports it


def total(rank, word):
    x = torch.full((3,), float(rank.rank + 1), device=rank.device)
    dist.all_reduce(x)
    return {
        "rank": vars(rank), "sum": x.tolist(), "word": word, "pid": os.getpid(), "group": dist.get_backend(),
        "threads": os.environ["OMP_NUM_THREADS"], "master": os.environ["MASTER_ADDR"],
    }  # fmt: skip


def total_and_a_thread(rank, word):
    """Nobody waits for a thread that a rank has left."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    return total(rank, word)


def chat(rank, file):
    """Goes on when the caller has read its line."""
    print(f"half a line of {rank.rank}", end="")
    print(", the rest\n0%\r50%\r100%")
    print("a warning", file=sys.stderr)
    while not os.path.exists(file):
        time.sleep(0.01)
    print("no line feed at the end", end="")


def fail(rank, how, folder):
    """Rank 1 fails in some way while the others are in a collective."""
    Path(folder, f"{rank.rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    if rank.rank != 1:
        if how == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        dist.all_reduce(torch.ones(3, device=rank.device))
        if rank.device != "cpu":
            torch.cuda.synchronize()
    elif how in ("raise", "stubborn"):
        raise ValueError("size=7 is odd\nmore")
    elif how == "exit":
        threading.Thread(target=time.sleep, args=(600,)).start()  # an ordinary exit would wait for it
        sys.exit(0)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "tensor":
        dist.all_reduce(torch.ones(3))
        return torch.ones(3)


def wrap(rank):
    """Rank 1 goes without a word; rank 0 tells of its broken collective in words of its own."""
    dist.barrier()
    if rank.rank == 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        raise ValueError("no sum") from error


def sleep(rank, folder):
    # written as a whole, or not there
    Path(folder, "tmp").mkdir(exist_ok=True)
    Path(folder, "tmp", str(rank.rank)).write_text(str(os.getpid()))
    os.replace(Path(folder, "tmp", str(rank.rank)), Path(folder, f"{rank.rank}.pid"))
    print("asleep")
    time.sleep(600)


def hang_on_gpu(rank):
    x = torch.ones(3, device=rank.device)
    dist.all_reduce(x)
    if rank.rank == 0:
        dist.all_reduce(x)
    torch.cuda.synchronize()


# ---- helpers


def here(function):
    return f"{__name__}:{function.__name__}"


def pids(folder):
    return [int(file.read_text()) for file in Path(folder).glob("*.pid")]


def no_lines(line):
    pass


# ---- results


def test_results_in_rank_order(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ), {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    found = launch(here(total_and_a_thread), 3, {"word": "wörd"}, timeout_s=120, log=no_lines, **CPU)
    for rank, result in enumerate(found):
        assert result["rank"] == dict(
            rank=rank, local_rank=rank, world_size=3, local_world_size=3, device="cpu", backend="gloo"
        )
        assert result["group"] == "gloo" and result["sum"] == [6] * 3 and result["word"] == "wörd"
        assert result["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert result["master"] == "127.0.0.1"
    assert len({r["pid"] for r in found} | {os.getpid()}) == 4
    assert not any(running(r["pid"]) for r in found)
    assert before == (dict(os.environ), {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)})
    assert not dist.is_initialized()


def test_in_a_thread_beside_a_taken_port_and_another_torchrun(tmp_path, monkeypatch):
    """Lines come while the ranks work, in the thread that asked; what other launchers left behind does not matter."""
    lines, threads, found = [], set(), []

    def log(line):
        lines.append(line)
        threads.add(threading.current_thread())
        (tmp_path / "read").touch()

    with distributed.forking(), socket.create_server(("127.0.0.1", 0)) as taken:
        outer = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "RANK": "7"}
        for name, value in (outer | {"WORLD_SIZE": "9", "TORCHELASTIC_RUN_ID": "x"}).items():
            monkeypatch.setenv(name, value)
        arguments = {"file": str(tmp_path / "read")}
        thread = threading.Thread(
            target=lambda: found.append(launch(here(chat), 2, arguments, log=log, log_ranks=(0, 1), **CPU))
        )
        thread.start()
        thread.join()
    assert found == [[None, None]] and threads == {thread}
    for rank in (0, 1):
        own = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert "a warning" in own
        printed = [line for line in own if "line" in line or "%" in line]
        assert printed == [f"half a line of {rank}, the rest", "100%", "no line feed at the end"]


def test_under_torchrun():
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "cs336_systems.launch.start", here(total), '{"word": "x"}', "--backend", "gloo", "--device", "cpu",
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(group.__file__).parents[2])])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    assert [(r["rank"]["rank"], r["sum"], r["word"]) for r in json.loads(line)] == [
        (0, [3.0] * 3, "x"),
        (1, [3.0] * 3, "x"),
    ]


def test_a_process_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for error in (None, KeyError("in the block")):
        try:
            with process_group("gloo", "cpu") as rank:
                assert rank == group.Rank(0, 0, 1, 1, "cpu", "gloo") and dist.get_world_size() == 1
                if error:
                    raise error
        except KeyError as caught:
            assert caught is error
        assert not dist.is_initialized()


# ---- failures


FIRST_LINES = {
    "raise": r"rank 1 of 2: ValueError: size=7 is odd",  # on GPUs; here the stubborn one does
    "kill": r"rank 1 of 2: signal SIGKILL \(by the system, for want of memory, if nobody sent it\)",
    "stubborn": r"rank 1 of 2: ValueError: size=7 is odd",
    "exit": r"rank 1 of 2: SystemExit: 0",
    "skip": r"rank 0 of 2: RuntimeError: .*Timed out waiting 4000ms.*",
    "tensor": r"rank 1 of 2: TypeError: Object of type Tensor is not JSON serializable",
}


@pytest.mark.parametrize("how", [how for how in FIRST_LINES if how != "raise"])
def test_the_rank_that_failed_first_and_how(how, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_SAY_S", 0.5)
    timeout = 4 if how == "skip" else 120  # the others end by the launcher, not by their own time
    arguments = {"how": how, "folder": str(tmp_path)}
    with distributed.forking(), pytest.raises(LaunchError) as caught:
        launch(here(fail), 2, arguments, collective_timeout_s=timeout, log=no_lines, **CPU)
    words = str(caught.value)
    assert re.fullmatch(FIRST_LINES[how], words.splitlines()[0]), words
    assert caught.value.rank == int(words.split()[1])
    assert len(pids(tmp_path)) == 2 and not any(map(running, pids(tmp_path)))
    if how == "stubborn":
        assert caught.value.kind == "builtins.ValueError"
        assert "Traceback" in words and 'raise ValueError("size=7' in words and "\nmore" in words
    if how != "skip":  # the other one fell because of this
        assert "rank 0" not in words
    else:
        assert "dist.all_reduce(torch.ones(3," in words  # the traceback names the call
        assert re.search(r"rank 1 of 2 was ended here(.*\n)+.*_wait_for_all_ranks", words), words


def test_the_cause_of_an_error_in_other_words():
    said = r"^rank 1 of 2: exit code 0 and no result"
    with distributed.forking(), pytest.raises(LaunchError, match=said):
        launch(here(wrap), 2, collective_timeout_s=120, log=no_lines, **CPU)


def test_out_of_time(tmp_path, monkeypatch):
    """The clock jumps when both ranks are asleep."""
    asleep = set()

    def log(line):
        if line.endswith("asleep"):
            asleep.add(line)
        if len(asleep) == 2:
            now = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now + 1000)

    with pytest.raises(LaunchError) as caught:
        launch(here(sleep), 2, {"folder": str(tmp_path)}, timeout_s=999, log=log, log_ranks=(0, 1), **CPU)
    words = str(caught.value)
    assert words.startswith(f"{here(sleep)} on 2 ranks took longer than 999 s and was ended\n")
    assert len(re.findall(r"rank . of 2 was ended here.*\n.* in sleep", words)) == 2, words
    assert len(pids(tmp_path)) == 2 and not any(map(running, pids(tmp_path)))


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_nothing_outlives_a_script_without_main_guard(name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(group.__file__).parents[2])]}\n"
        "from cs336_systems.launch.start import launch\n"
        f"launch('{here(sleep)}', 2, {{'folder': {str(tmp_path)!r}}}, backend='gloo', device='cpu')\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed caller leaves its folder
    caller = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        wait_until(lambda: len(pids(tmp_path)) == 2 or caller.poll() is not None, 300)
        assert len(pids(tmp_path)) == 2 and all(map(running, pids(tmp_path)))
        caller.send_signal(getattr(signal, name))
        errors = caller.communicate(timeout=60)[1]
    finally:
        caller.kill()
    if name == "SIGINT":
        assert "KeyboardInterrupt" in errors
    else:  # it could do nothing: the ranks see that it is gone
        wait_until(lambda: not any(map(running, pids(tmp_path))), 30)
    assert not any(map(running, pids(tmp_path)))


def test_what_the_error_says_of_a_watchdog(tmp_path):
    """NCCL's watchdog aborts a rank; its message stands before pages of stacks. (What it writes, on a GPU: below.)"""
    said = (
        "[E1 NCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
    )
    (tmp_path / "stderr.log").write_text(said + "\n" + "frame\n" * 100)
    aborted = outcome(tmp_path, -signal.SIGABRT)
    stopped = {**outcome(tmp_path, -signal.SIGTERM), "stopped": True}
    error = failure([stopped, aborted])
    assert error.rank == 1 and str(error).splitlines()[0] == (
        "rank 1 of 2: signal SIGABRT: Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
    )
    # an error of another rank's own is the cause, although it is later
    raised = {
        "error": "ValueError: x", "traceback": "", "of_communication": False, "exit_code": 1, "stopped": False,
    }  # fmt: skip
    assert failure([aborted, {**raised, "time_ns": aborted["time_ns"] + 1}]).rank == 1


def test_an_error_of_our_own_is_told_in_its_sentence():
    rest = {"of_communication": False, "exit_code": 1, "stopped": False, "time_ns": 1}
    own, other = (
        failure([{"error": f"{kind}: why", "kind": kind, "traceback": "Traceback\n  File ...", **rest}])
        for kind in ("cs336_systems.store.files.StoreError", "json.JSONDecodeError")
    )
    assert str(own) == "rank 0 of 1: StoreError: why" and own.kind == "cs336_systems.store.files.StoreError"
    assert str(other).splitlines() == ["rank 0 of 1: json.JSONDecodeError: why", "Traceback", "  File ..."]


def disagree(rank):
    """What each rank's error says where rank 1 has raised it."""
    try:
        with agreement(dist.group.WORLD):
            if rank.rank == 1:
                raise KeyError("mine")
    except Exception:
        return traceback.format_exc()


def test_what_a_rank_hears_of_anothers_error_is_not_the_cause(tmp_path):
    with distributed.forking():
        said = launch(here(disagree), 2, log=no_lines, **CPU)
    found = []
    for rank, text in enumerate(said):  # the one that has raised writes last
        (folder := tmp_path / str(rank)).mkdir()
        told = {"error": text.splitlines()[-1], "traceback": text, "time_ns": rank}
        (folder / "answer.json").write_text(json.dumps(told))
        found.append(outcome(folder, 1))
    assert str(failure(found)).startswith("rank 1 of 2: KeyError: 'mine'")


def test_a_rank_of_which_nothing_is_heard(monkeypatch):
    heard = [{"result": 1, "exit_code": 0, "stopped": False}, {}]
    monkeypatch.setattr(module, "watch", lambda members, timeout_s: (heard, True))
    with pytest.raises(LaunchError, match="nothing was heard of rank 1") as caught:
        launch(here(total), 2, {"word": ""}, **CPU)
    assert caught.value.rank is None


# ---- what is refused beforehand


@pytest.mark.parametrize(
    ("function", "world_size", "options", "words"),
    [
        ("no_colon", 2, CPU, "module:function"),
        ("__main__:f", 2, CPU, "module:function"),
        ("m:f", 0, CPU, "at least 1"),
        ("m:f", 2, {"backend": "mpi"}, "unknown backend 'mpi'; allowed: auto, nccl, gloo"),
        ("m:f", 2, {"device": "tpu"}, "unknown device 'tpu'; allowed: auto, cuda, cpu"),
        ("m:f", 2, {"backend": "nccl", "device": "cpu"}, "'nccl' works between GPUs only"),
    ],
)
def test_arguments_that_are_refused(function, world_size, options, words):
    with pytest.raises(ValueError, match=words):
        launch(function, world_size, {}, **options)


def test_arguments_of_the_function_that_are_refused():
    with pytest.raises(ValueError, match="argument 'rank'"):
        launch("m:f", 2, {"rank": 1}, **CPU)
    with pytest.raises(TypeError, match="JSON"):
        launch("m:f", 2, {"x": torch.ones(1)}, **CPU)


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def test_backend_and_device_follow_the_machine(monkeypatch):
    with_gpus(monkeypatch, 2)
    assert backend_and_device("auto", "auto", 2) == ("nccl", "cuda")
    assert backend_and_device("auto", "auto", 4) == ("gloo", "cpu")
    assert backend_and_device("gloo", "auto", 2) == ("gloo", "cpu")
    assert backend_and_device("gloo", "cuda", 4) == ("gloo", "cuda")
    assert backend_and_device("auto", "cpu", 2) == ("gloo", "cpu")
    for backend, device in (("nccl", "auto"), ("auto", "cuda"), ("nccl", "cuda")):
        assert backend_and_device(backend, device, 2) == ("nccl", "cuda")
        with pytest.raises(
            ValueError, match=r"4 ranks with backend 'nccl'.*need 4 GPUs, and this machine has 2"
        ):
            launch("m:f", 4, backend=backend, device=device)
    with_gpus(monkeypatch, 0)
    assert backend_and_device("auto", "auto", 1) == ("gloo", "cpu")
    with pytest.raises(ValueError, match="need 1 GPUs"):
        backend_and_device("gloo", "cuda", 2)


def test_nccls_watchdog_ends_a_process_at_once_unless_told_otherwise(monkeypatch):
    """It reads its variables when the group is made."""
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    for name in ("RANK", *names):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(names[0], "1")
    monkeypatch.setenv(names[1], "")  # for monkeypatch to restore
    del os.environ[names[1]]
    made = []

    def init_process_group(backend, **options):
        made.append([backend, *map(os.environ.get, names)])
        raise RuntimeError("as far as this")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(RuntimeError, match="as far"), process_group("gloo", "cpu"):
        pass
    with pytest.raises(RuntimeError, match="as far"), process_group("nccl", "cuda"):
        pass
    assert made == [["gloo", "1", None], ["nccl", "1", "250"]]


def test_half_an_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ValueError, match="RANK is set, but not LOCAL_RANK, WORLD_SIZE"),
        process_group("gloo", "cpu"),
    ):
        pass


def test_without_torch():
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from cs336_systems.launch.start import launch\n"
        "launch('m:f', 2)\n"
    )
    root = Path(group.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=root
    )
    assert done.stderr.splitlines()[-1].startswith("ImportError: processes that work together need torch"), (
        done.stderr
    )


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
class TestNCCL:
    @pytest.mark.parametrize("world_size", sorted({1, 2, GPUS}))
    def test_results(self, world_size):
        found = launch(here(total), world_size, {"word": "x"}, log=no_lines)
        assert [r["rank"]["device"] for r in found] == [f"cuda:{i}" for i in range(world_size)]
        assert all(
            r["group"] == "nccl" and r["sum"] == [world_size * (world_size + 1) / 2] * 3 for r in found
        )

    def test_gloo_on_one_gpu(self):
        found = launch(here(total), 2 * GPUS, {"word": "x"}, backend="gloo", device="cuda", log=no_lines)
        assert all(r["sum"] == [GPUS * (2 * GPUS + 1)] * 3 for r in found)

    @pytest.mark.parametrize("how", ["raise", "kill"])
    def test_the_rank_that_failed_first_and_how(self, how, tmp_path):
        start = time.monotonic()
        with pytest.raises(LaunchError, match=FIRST_LINES[how]):
            launch(here(fail), 2, {"how": how, "folder": str(tmp_path)}, log=no_lines)
        assert time.monotonic() - start < 90  # not the 180 s of the collective
        assert len(pids(tmp_path)) == 2 and not any(map(running, pids(tmp_path)))

    def test_a_collective_that_hangs(self):
        with pytest.raises(LaunchError, match=r"rank 0 of 2: .*timeout.*ALLREDUCE"):
            launch(here(hang_on_gpu), 2, collective_timeout_s=10, log=no_lines)
