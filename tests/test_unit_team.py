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
from waiting import running, wait_until

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
    return {"rank": rank.rank, "local_world_size": rank.local_world_size, "sum": x[0].item()}


def fail(rank, folder):
    """Rank 1 fails while rank 0 is in a collective."""
    note_pid(rank, folder)
    dist.barrier()
    if rank.rank == 1:
        raise ValueError("size=7 is odd")
    dist.all_reduce(torch.ones(3))


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


def pids(folder):
    return [int(pid) for file in Path(folder).glob("*.pid") for pid in file.read_text().split()]


# ---- tests


def test_tasks_one_after_the_other(tmp_path):
    """Ranks that are not needed, too many, a failed task, one out of time; then one that works, and a leader that
    raises, which ends the run. Rank 0 serves the store, not torchrun's agent as in the other tests."""
    script = (
        SMALL
        + """
    found, lines = {}, []
    def attempt(name, function, size, **options):
        try:
            found[name] = launch(
                m + function, size, {"folder": folder}, log=lines.append, log_ranks=(0, 1), **CPU, **options
            )
        except (LaunchError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    with team.leading():
        attempt("one", "total", 1)
        attempt("three", "total", 3)
        attempt("raise", "fail", 2)
        attempt("late", "sleep", 2, timeout_s=0.5)
        attempt("two", "total", 2)
        json.dump([found, lines], open(folder + "/found.json", "w"))
        raise KeyError("why")
    """
    )
    run = torchrun(script, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    printed = run.communicate(timeout=300)[0]
    assert run.returncode != 0 and "KeyError: 'why'" in printed, printed
    found, lines = json.loads((tmp_path / "found.json").read_text())
    assert found["one"] == [{"rank": 0, "local_world_size": 1, "sum": 1}]
    assert found["two"] == [{"rank": rank, "local_world_size": 2, "sum": 3} for rank in (0, 1)]
    assert found["three"] == "ValueError: world_size=3: torchrun started 2 ranks here; allowed: 1 ... 2"
    assert found["raise"].startswith("LaunchError: rank 1 of 2: ValueError: size=7 is odd\n")
    assert "Traceback" in found["raise"] and 'raise ValueError("size=7' in found["raise"]
    late = "LaunchError: test_unit_team:sleep on 2 ranks took longer than 0.5 s and was ended"
    assert found["late"].startswith(late)
    # rank 0 logs to the caller, rank 1 prints
    assert [line for line in lines if "sum" in line] == ["[rank 0] sum 1", "[rank 0] sum 3"]
    assert printed.count("[rank 1] sum 3") == 1
    assert not any(map(running, pids(tmp_path)))


def test_a_process_of_torchruns_that_is_killed_ends_the_run(tmp_path):
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
        wait_until(lambda: len(pids(tmp_path)) == 4 or run.poll() is not None, 300)
        [file] = tmp_path.glob("1-*.pid")
        os.kill(int(file.read_text().split()[1]), signal.SIGKILL)
        printed = run.communicate(timeout=300)[0]
    finally:
        run.kill()
    assert run.returncode != 0 and "rank      : 1" in printed and "SIGKILL" in printed, printed
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
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x", f"--rdzv-endpoint=127.0.0.1:{port}"]
    runs = [torchrun(script, tmp_path, 1, (*meeting, "--local-addr=127.0.0.1")) for _ in range(2)]
    printed = [run.communicate(timeout=200)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    ranks, name, nodes = json.loads((tmp_path / "found.json").read_text())
    assert ranks == [{"rank": rank, "local_world_size": 1, "sum": 3} for rank in (0, 1)]
    assert name == f"{machine.machine_name()}-n2" and nodes == 2


def test_a_port_that_is_taken(monkeypatch):
    """Where ranks are started without torchrun, which says so itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in (variables | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).items():
            monkeypatch.setenv(name, value)
        words = f"^MASTER_PORT={port} on 127.0.0.1 is taken by another program; allowed: any free port"
        with pytest.raises(ValueError, match=words), group.process_group("gloo", "cpu"):
            pass


def test_a_rank_only_where_torchrun_says_so(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert team.rank_here() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert team.rank_here() == 3
