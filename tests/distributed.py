"""Runs a function in several processes that form a group: `run(function, world_size, *args)`; and Python programs as
processes that need not import torch first: `forked`.

Both fork from one process that has imported what takes seconds, and done nothing else: a start costs little.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cs336_systems.store import lifeline

COLLECTIVE_TIMEOUT_S = 30  # a collective that waits longer for a rank raises on the others

multiprocessing.set_forkserver_preload([
    "pytest", "pandas", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo",
    "torch._inductor.compile_fx",
])  # fmt: skip


def run(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(*args)` in `world_size` processes with a Gloo group of all; returns their results by rank.

    The function belongs to a module, and args and results can be pickled. The first rank that raises ends all, with its
    traceback in the error here (`torch.multiprocessing.ProcessRaisedException`); so does the timeout, in seconds, with
    a TimeoutError.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _rank, (world_size, folder, function, args), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        try:
            while not processes.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=0.5):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} on {world_size} ranks took over {timeout} s")
        except mp.ProcessRaisedException as error:
            rank, trace = (Path(folder) / "first").read_text(encoding="utf-8").split("\n", 1)
            message = f"rank {rank} of {world_size}:\n{trace}"
            raise mp.ProcessRaisedException(message, int(rank), error.error_pid) from None
        finally:
            for process in processes.processes:
                process.kill()
        return [pickle.loads((Path(folder) / f"rank{rank}").read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what the process was forked with is no garbage
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        result = function(*args)
        dist.barrier()  # no rank goes while another may still be talking to it
        dist.destroy_process_group()
        (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(result))
    except Exception:
        # connections to this process break when it ends: what others raise then is not what has happened
        with contextlib.suppress(FileExistsError), open(f"{folder}/first", "x", encoding="utf-8") as file:
            file.write(f"{rank}\n{traceback.format_exc()}")
        raise


@contextlib.contextmanager
def about(*what):
    """Says in the error which of many cases has failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {what}, rank {dist.get_rank()} of {dist.get_world_size()}")
        raise


def share(batch):
    """This rank's part of a batch whose length is a multiple of the number of ranks."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def new_seed():
    """Another one in each run, repeated by CS336_TEST_SEED (conftest.py)."""
    return torch.randint(2**31, ()).item()


@pytest.fixture
def alone():
    """A group of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fail(*ignored, **named):
    raise ZeroDivisionError("in the backward pass")


def ranks_agree(value: Any) -> bool:
    """Whether all ranks of the group, which all call this, have the same value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return len(set(map(str, found))) == 1


def assert_same_on_all_ranks(
    tensors: Iterable[torch.Tensor | None], group: dist.ProcessGroup | None = None
) -> None:
    """The same on all ranks of the group, bit for bit; None where there is none."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    mine = [None if tensor is None else tensor.detach().cpu() for tensor in tensors]
    dist.all_gather_object(everyones, mine, group=group)
    for theirs in everyones:
        for number, (one, other) in enumerate(zip(everyones[0], theirs, strict=True)):
            assert one is other is None or torch.equal(one, other), f"tensor {number}"


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """What the package starts with this interpreter (ranks, fresh processes) is forked, unless there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            names = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=_started)
            patch.setattr(lifeline, "subprocess", names)
        yield


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """`forking` for a file's tests: `pytestmark = pytest.mark.usefixtures("forked")`."""
    with forking():
        yield


def _started(command: Sequence[str], **options: Any) -> Any:
    own = command[0] == sys.executable and "pass_fds" not in options  # which the forking server does not have
    return Forked(command[1:], **options) if own else subprocess.Popen(command, **options)


class Forked:
    """As a `subprocess.Popen` of a Python program in a session of its own."""

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str], stdout: IO | None = None,
        stderr: IO | None = None, **ignored: Any,
    ) -> None:  # fmt: skip
        files = {number: file.name for number, file in ((1, stdout), (2, stderr)) if file}
        process = multiprocessing.get_context("forkserver").Process(
            target=_program, args=(list(arguments), dict(env), files)
        )
        process.start()
        self._process, self.pid = process, process.pid
        self.terminate, self.kill = process.terminate, process.kill
        with contextlib.suppress(ProcessLookupError):  # it has ended by now
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return self._process.exitcode


def _program(arguments: list[str], environment: dict[str, str], files: dict[int, str]) -> None:
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, file in files.items():
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    how, what, *sys.argv[1:] = [word for word in arguments if word != "-u"]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})
