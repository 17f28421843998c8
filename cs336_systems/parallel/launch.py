"""Functions in several processes that work together: started, watched and ended from a notebook, a test or a script.

    def mean_over_ranks(rank, size):                                   # in a module, say chapter.py
        x = torch.full((size,), float(rank.rank), device=rank.device)
        dist.all_reduce(x)
        return x.mean().item() / rank.world_size

    launch("chapter:mean_over_ranks", 4, {"size": 1000})               # [1.5, 1.5, 1.5, 1.5]

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m cs336_systems.parallel.launch chapter:mean_over_ranks '{"size": 1000}'

A *rank* is one of the processes. It calls the function with the keyword `rank` (a `parallel.Rank`) and the arguments,
inside an initialized process group. Arguments and results are JSON.

torchrun's engine (`elastic_launch`) runs in a process of its own, the *agent*: it takes over the signal handlers and
the environment of the process it runs in, which a notebook's kernel cannot give away, and it knows no time limit. The
agent and the ranks hold one end of a socket, the *lifeline*, and the caller the other: ranks end when the caller
lets go or dies, however it dies, and the caller knows that all are gone when nobody holds the other end.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cs336_systems.parallel import BACKENDS, DEVICES, backend_and_device, process_group


class LaunchError(RuntimeError):
    """A run ended without results. The first line says which rank failed and how; what it and the others said follows.

    rank: the one that failed first; None if the run as a whole did (out of time, no launcher).
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def launch(
    function: str, world_size: int, arguments: Mapping[str, Any] | None = None, *, backend: str = "auto",
    device: str = "auto", timeout_s: float = 1800.0, collective_timeout_s: float = 180.0,
    log: Callable[[str], None] = print, log_ranks: Collection[int] = (0,),
) -> list[Any]:  # fmt: skip
    """`module:function(rank=..., **arguments)` in `world_size` fresh processes of this machine; results in rank order.

    timeout_s:             after this time the run is ended, whatever it is doing.
    collective_timeout_s:  a collective that takes longer fails; as `process_group`'s timeout.
    log:                   is called, in this thread, with each line that the ranks in `log_ranks` print.

    Ranks import what the caller could import. OMP_NUM_THREADS shares the cores among them, unless it is set.

    LaunchError if a rank raises, is killed or ends without a result, and after `timeout_s`; ValueError as
    `backend_and_device`. However it ends, also by KeyboardInterrupt, no process is left.
    """
    if not re.fullmatch(r"[\w.]+:\w+", function) or function.startswith("__main__:"):
        raise ValueError(f"function {function!r}: expected 'module:function', a module that ranks can import")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected at least 1")
    if "rank" in (arguments or {}):
        raise ValueError("argument 'rank' is what launch itself gives to the function")
    backend, device = backend_and_device(backend, device, world_size)
    task = {
        "function": function, "arguments": dict(arguments or {}), "world_size": world_size, "backend": backend,
        "device": device, "collective_timeout_s": collective_timeout_s,
        "path": [entry or os.getcwd() for entry in sys.path],
    }  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // world_size)), **os.environ}
    with tempfile.TemporaryDirectory(prefix="cs336-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        code = _watch(folder, environment, timeout_s, log, log_ranks)
        answers = [_read(_answer(folder, rank)) for rank in range(world_size)]
        if code is None:
            said = _others(folder, answers, None)
            first_line = f"{function} on {world_size} ranks took longer than {timeout_s:g} s and was ended"
            raise LaunchError("\n".join([first_line, *said]))
        if code == 0 and all("result" in answer for answer in answers):
            return [answer["result"] for answer in answers]
        raise _failure(folder, answers, code)


def _watch(
    folder: Path, environment: Mapping[str, str], timeout_s: float, log: Callable[[str], None], ranks: Collection[int]
) -> int | None:  # fmt: skip
    """Runs the agent to its end and logs what ranks print; its exit code, or None if the time was over."""
    deadline = time.monotonic() + timeout_s
    read: dict[Path, int] = {}
    lifeline, other_end = socket.socketpair()
    with lifeline, open(folder / "agent.log", "wb") as output:
        with other_end:
            agent = subprocess.Popen(
                [sys.executable, *_command(_agent, folder / "task.json")], env=environment, stdin=other_end,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            while time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(0.1)
                _log_new_lines(folder, ranks, read, log, last=agent.returncode is not None)
                if agent.returncode is not None:
                    return agent.returncode
            return None
        finally:
            _end(agent, lifeline)


def _end(agent: subprocess.Popen, lifeline: socket.socket) -> None:
    """Ends the agent, which ends its ranks, and those that it left behind; returns when all are gone."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(10)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
    with suppress(OSError):  # macOS: nobody is there any more
        lifeline.shutdown(socket.SHUT_WR)
    lifeline.settimeout(30)
    try:
        lifeline.recv(1)  # nothing comes; it returns when nobody holds the other end
    except TimeoutError:
        raise LaunchError("a process of this run has not ended within 30 s of its end") from None


def _log_new_lines(
    folder: Path, ranks: Collection[int], read: dict[Path, int], log: Callable[[str], None], *, last: bool
) -> None:  # fmt: skip
    """Logs the lines that ranks have completed since the last call; `read` keeps how far each file is read."""
    for rank in ranks:
        for file in sorted(folder.glob(f"ranks/*/attempt_0/{rank}/std*.log")):
            with file.open("rb") as f:
                f.seek(read.get(file, 0))
                text = f.read()
            if not last:
                text = text[: text.rfind(b"\n") + 1]
            read[file] = read.get(file, 0) + len(text)
            for line in text.decode(errors="replace").removesuffix("\n").split("\n") if text else ():
                if not line.startswith("[Gloo] Rank "):  # it tells of its connections
                    log(
                        f"[rank {rank}] {line.rstrip().rpartition(chr(13))[2]}"
                    )  # a progress bar's last state


def _command(function: Callable[[str], None], task_file: Path | str) -> list[str]:
    """Arguments of a Python that calls a function of this module and finds the modules that the caller finds."""
    code = (
        "import json, sys; sys.path[:] = json.load(open(sys.argv[1]))['path']; "
        f"from cs336_systems.parallel.launch import {function.__name__} as call; call(sys.argv[1])"
    )
    return ["-c", code, str(task_file)]


# ---- in the agent


def _agent(task_file: str) -> None:
    """torchrun without its command line: starts the ranks, and ends them all when one fails."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = Path(task_file).parent
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=_read(Path(task_file))["world_size"], max_restarts=0,
        run_id=folder.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0", rdzv_configs={"is_host": True},
        local_addr="127.0.0.1", logs_specs=DefaultLogsSpecs(log_dir=str(folder / "ranks"), redirects=Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-u", *_command(_rank, task_file))
    except ChildFailedError as error:
        _write(folder / "exit_codes.json", json.dumps({r: f.exitcode for r, f in error.failures.items()}))
        sys.exit(1)


# ---- in a rank


def _rank(task_file: str) -> None:
    """What a rank does; its answer is its result, or its error."""
    _hold_to_lifeline()
    task = _read(Path(task_file))
    answer = _answer(Path(task_file).parent, int(os.environ["RANK"]))
    faulthandler.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stack = open(answer.with_suffix(".stack"), "w")  # noqa: SIM115  # to be written to when the agent ends this rank
    faulthandler.register(signal.SIGTERM, stack, chain=True)
    try:
        function = _found(task["function"])
        with process_group(task["backend"], task["device"], task["collective_timeout_s"]) as rank:
            result = _as_json(function(rank=rank, **task["arguments"]))
    except Exception as error:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # the agent may have seen another rank fail: this one has its say
        said = {
            "error": f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}",
            "traceback": traceback.format_exc(),
            "time_ns": time.time_ns(),
            "of_communication": _of_communication(error),
        }
        _write(answer, json.dumps(said))
        _end_at_once()
    _write(answer, f'{{"result": {result}}}')


def _hold_to_lifeline() -> None:
    """Has this rank and what it started killed when the caller lets go of the lifeline, which is standard input."""
    assert stat.S_ISSOCK(os.fstat(0).st_mode), "the agent passes its standard input on"
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        try:
            os.read(lifeline, 1)
        finally:
            os.killpg(0, signal.SIGKILL)  # the agent gives each rank a process group of its own

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _found(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _as_json(result: Any) -> str:
    try:
        return json.dumps(result)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the result of a rank is not JSON: {error}") from error


def _of_communication(error: Exception) -> bool:
    """Whether it may be the consequence of another rank's failure."""
    from torch import distributed as dist

    words = re.search(r"gloo/|NCCL|by peer", str(error))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and words is not None)


def _end_at_once() -> None:
    """Ends a rank that failed: an ordinary exit would wait for collectives that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """A rank that torchrun started, on one node or several: rank 0 prints the results of all as a line of JSON."""
    from torch import distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    parser = argparse.ArgumentParser(prog="torchrun ... -m cs336_systems.parallel.launch")
    parser.add_argument("function", help="module:function")
    parser.add_argument("arguments", nargs="?", default={}, type=json.loads, help="its arguments, as JSON")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--collective-timeout-s", default=180.0, type=float)
    given = parser.parse_args()

    @record  # so that torchrun reports the traceback
    def work() -> None:
        function = _found(given.function)
        with process_group(given.backend, given.device, given.collective_timeout_s) as rank:
            results = [""] * rank.world_size
            dist.all_gather_object(results, _as_json(function(rank=rank, **given.arguments)))
        if rank.rank == 0:
            print(f"[{', '.join(results)}]", flush=True)

    try:
        work()
    except Exception:
        traceback.print_exc()
        _end_at_once()


# ---- what went wrong

# What NCCL's watchdog writes before it aborts the process.
_NCCL_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: .*")


def _failure(folder: Path, answers: list[dict[str, Any]], code: int) -> LaunchError:
    """The error of the rank that failed first, and what became of the others."""
    codes: dict[int, int] = {}  # rank → exit code, negative for a signal; empty if the agent could not tell
    if code == 0 or (folder / "exit_codes.json").is_file():
        codes = {int(rank): c for rank, c in _read(folder / "exit_codes.json").items()}
        codes = dict.fromkeys(range(len(answers)), 0) | codes
    failed = [
        r
        for r, answer in enumerate(answers)
        if "error" in answer or codes.get(r) or (r in codes and not answer)
    ]
    if not failed:
        said = _last_lines(folder / "agent.log")
        return LaunchError("\n".join([f"torch's launcher ended with {_ending(code)}", *said]))

    def order(rank: int) -> tuple[int, int]:
        """A cause comes before what it may have caused: a broken collective, an end by the agent."""
        if "error" in answers[rank]:
            return int(answers[rank]["of_communication"]), answers[rank]["time_ns"]
        return {-signal.SIGABRT: 1, -signal.SIGTERM: 2}.get(codes[rank], 0), 0

    first = min(failed, key=order)
    if "error" in answers[first]:
        how, said = answers[first]["error"], answers[first]["traceback"].splitlines()[-40:]
    else:
        stderr = next(folder.glob(f"ranks/*/attempt_0/{first}/stderr.log"))
        timeout = _NCCL_TIMEOUT.search(stderr.read_text("utf-8", "replace"))
        how = _ending(codes[first]) + (f": {timeout[0]}" if timeout else "")
        said = _last_lines(stderr)
    lines = [f"rank {first} of {len(answers)}: {how}", *said, *_others(folder, answers, first)]
    return LaunchError("\n".join(lines), first)


def _others(folder: Path, answers: list[dict[str, Any]], first: int | None) -> list[str]:
    """The errors of the other ranks, or where they were when the agent ended them."""
    lines = []
    for rank, answer in enumerate(answers):
        stack = _main_stack(_answer(folder, rank).with_suffix(".stack"))
        if rank != first and "error" in answer:
            lines.append(f"rank {rank} of {len(answers)} then: {answer['error']}")
        elif rank != first and stack:
            lines += [f"rank {rank} of {len(answers)} was ended here, the innermost call first:", *stack[:4]]
    return lines


def _main_stack(file: Path) -> list[str]:
    """The calls of the main thread, which comes last in what faulthandler writes."""
    lines = _last_lines(file, 10_000)
    headers = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    return lines[headers[-1] + 1 :] if headers else []


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code} and no result"
    killed = " (by the system, for want of memory, if nobody sent it)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{killed}"


# ---- files of a run


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def _last_lines(file: Path, count: int = 20) -> list[str]:
    return file.read_text("utf-8", "replace").strip().splitlines()[-count:] if file.is_file() else []


if __name__ == "__main__":
    # The functions import this module under its name: there should be one of it.
    from cs336_systems.parallel.launch import main as run

    run()
