"""A team: `launch` on processes that a real torchrun started, what it says when they fail, and that none is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cs336_systems.launch import group, team
from cs336_systems.store import machine

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402

CPU = {"backend": "gloo", "device": "cpu"}
SMALL = """
    import json, sys
    from cs336_systems.launch import team
    from cs336_systems.launch.start import LaunchError, launch
    CPU = {"backend": "gloo", "device": "cpu"}
    folder, m = sys.argv[1], "test_unit_team:"
    if team.rank_here() != 0:
        team.follow()
        sys.exit()
"""

# ---- what ranks run: functions of this module, as another process imports it


def total(rank, folder):
    note_pid(rank, folder)
    x = torch.full((3,), float(rank.rank + 1), device=rank.device)
    dist.all_reduce(x)
    print(f"sum {x[0]:g}")
    return {
        "rank": rank.rank,
        "local_world_size": rank.local_world_size,
        "sum": x.tolist(),
        "pid": os.getpid(),
    }


def fail(rank, folder, how):
    """Rank 1 fails while rank 0 is in a collective."""
    note_pid(rank, folder)
    dist.barrier()
    if rank.rank == 0:
        dist.all_reduce(torch.ones(3))
    elif how == "raise":
        raise ValueError("size=7 is odd")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep(rank, folder):
    note_pid(rank, folder)
    time.sleep(600)


def note_pid(rank, folder):
    """Written whole, or not there: its own, and that of the process which torchrun started."""
    file = Path(folder, f"{rank.rank}-{os.getpid()}.pid")
    file.with_suffix(".tmp").write_text(f"{os.getpid()} {os.getppid()}")
    os.replace(file.with_suffix(".tmp"), file)


# ---- helpers


def torchrun(script, folder, size=2, arguments=("--standalone",), **variables):
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(group.__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *arguments]
    return subprocess.Popen(
        [*command, str(file), str(folder)], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(folder):
    return [int(pid) for file in Path(folder).glob("*.pid") for pid in file.read_text().split()]


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


# ---- tests


@pytest.mark.parametrize("agent_store", ["True", "False"])
def test_tasks_one_after_the_other(agent_store, tmp_path):
    """Results, ranks that are not needed, failed tasks, one out of time; then one that works again.

    With either of the stores that torchrun knows: its agent's, or rank 0's.
    """
    script = (
        SMALL
        + """
    found, lines = {}, []
    def attempt(name, function, size, **options):
        arguments = {"folder": folder, **options.pop("more", {})}
        try:
            found[name] = launch(m + function, size, arguments, log=lines.append, log_ranks=(0, 1), **CPU, **options)
        except (LaunchError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    with team.leading():
        attempt("two", "total", 2)
        attempt("one", "total", 1)
        attempt("three", "total", 3)
        attempt("raise", "fail", 2, more={"how": "raise"})
        attempt("kill", "fail", 2, more={"how": "kill"})
        attempt("late", "sleep", 2, timeout_s=0.5)
        attempt("again", "total", 2)
    json.dump([found, lines], open(folder + "/found.json", "w"))
    """
    )
    disable = {"True": "0", "False": "1"}[agent_store]
    run = torchrun(script, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=disable)
    printed = run.communicate(timeout=300)[0]
    assert run.returncode == 0, printed
    found, lines = json.loads((tmp_path / "found.json").read_text())
    for name in ("two", "again"):
        assert [(r["rank"], r["sum"], r["local_world_size"]) for r in found[name]] == [
            (0, [3.0] * 3, 2), (1, [3.0] * 3, 2),
        ]  # fmt: skip
    assert [(r["rank"], r["sum"], r["local_world_size"]) for r in found["one"]] == [(0, [1.0] * 3, 1)]
    assert found["three"] == "ValueError: world_size=3: torchrun started 2 ranks here; allowed: 1 ... 2"
    assert found["raise"].startswith("LaunchError: rank 1 of 2: ValueError: size=7 is odd\n")
    assert "Traceback" in found["raise"] and 'raise ValueError("size=7' in found["raise"]
    assert found["kill"].startswith("LaunchError: rank 1 of 2: signal SIGKILL")
    late = "LaunchError: test_unit_team:sleep on 2 ranks took longer than 0.5 s and was ended"
    assert found["late"].startswith(late)
    # rank 0 logs to the caller, rank 1 prints
    assert [line for line in lines if "sum" in line] == ["[rank 0] sum 3", "[rank 0] sum 1", "[rank 0] sum 3"]
    assert printed.count("[rank 1] sum 3") == 2
    assert not any(map(running, pids(tmp_path)))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_of_torchruns_that_is_killed_ends_the_run(victim, tmp_path):
    """While the ranks are asleep in a task: torchrun ends with an error that says which, and nothing is left."""
    script = (
        SMALL
        + """
    with team.leading():
        launch(m + "sleep", 2, {"folder": folder}, **CPU)
    """
    )
    run = torchrun(script, tmp_path)
    try:
        wait_until(lambda: len(pids(tmp_path)) == 4 or run.poll() is not None, 100)
        [file] = tmp_path.glob(f"{victim}-*.pid")
        os.kill(int(file.read_text().split()[1]), signal.SIGKILL)
        printed = run.communicate(timeout=100)[0]
    finally:
        run.kill()
    assert run.returncode != 0 and f"rank      : {victim}" in printed and "SIGKILL" in printed, printed
    wait_until(lambda: not any(map(running, pids(tmp_path))), 30)


def test_two_nodes(tmp_path):
    """Two torchruns that find each other; the rows of such a run are those of a machine of its own."""
    script = (
        SMALL
        + """
    from cs336_systems.store import machine
    with team.leading():
        ranks = launch(m + "total", 2, {"folder": folder}, **CPU)
        found = [ranks, machine.machine_name(), machine.environment().get("nodes")]
    json.dump(found, open(folder + "/found.json", "w"))
    """
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = (
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "x",
    )
    runs = [torchrun(script, tmp_path, 1, (*meeting, "--local-addr", "127.0.0.1")) for _ in range(2)]
    printed = [run.communicate(timeout=200)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    ranks, name, nodes = json.loads((tmp_path / "found.json").read_text())
    assert [(r["rank"], r["local_world_size"], r["sum"]) for r in ranks] == [
        (0, 1, [3.0] * 3),
        (1, 1, [3.0] * 3),
    ]
    assert name == f"{machine.machine_name()}-n2" and nodes == 2


def test_a_leader_that_raises_ends_the_run(tmp_path):
    script = (
        SMALL
        + """
    with team.leading():
        raise KeyError("why")
    """
    )
    run = torchrun(script, tmp_path)
    printed = run.communicate(timeout=100)[0]
    assert run.returncode != 0 and "KeyError: 'why'" in printed, printed


def test_a_port_that_is_taken(tmp_path):
    """torchrun says so itself; where ranks are started without its store, rank 0 does."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = torchrun(SMALL, tmp_path, arguments=("--master-addr", "127.0.0.1", "--master-port", port))
        printed = run.communicate(timeout=100)[0]
        assert run.returncode != 0 and "address already in use" in printed and port in printed, printed
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
        code = "from cs336_systems.launch.group import process_group\nwith process_group('gloo', 'cpu'): pass"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
            cwd=Path(group.__file__).parents[2],
            env={**os.environ, **variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"ValueError: MASTER_PORT={port} on 127.0.0.1 is taken by another program; allowed: any free port "
        "(torchrun --standalone finds one)"
    )


def test_a_rank_only_where_torchrun_says_so(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert team.rank_here() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert team.rank_here() == 3
