"""What all tests share: rows go to a temporary folder, tests that need a GPU are skipped without one."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cs336_systems.store.table import Table

gc.disable()  # until the first test: imports leave next to no garbage, and are looked through again and again

ROOT = Path(__file__).resolve().parents[1]
RESULTS = os.environ.get("CS336_RESULTS", str(ROOT / "results"))


@functools.cache
def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Two threads of each of two workers on two cores wait for one another, in models of a few numbers most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU the kernels run in triton's interpreter, which is chosen when they are imported.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("torch") is not None:
    from distributed import alone, forked  # noqa: F401


# nohup and shells in the background ignore these, and so would every process that a test starts and then signals; one
# that is handled here has its default again in a new process.
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", lambda *_: None)):
    if (_signal := getattr(signal, _name, None)) and signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-gpu-tests",
        action="store_true",
        help="write what the GPU tests said to results/<machine>/gpu_tests.csv",
    )


_OUTCOMES: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
_SECONDS: collections.Counter = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.split("::")[0].rsplit("/", 1)[-1]
    _SECONDS[file] += report.duration
    if report.when == "call" or report.outcome != "passed":
        _OUTCOMES[file][report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    worker = hasattr(session.config, "workerinput")  # one of pytest-xdist: its reports reach the main process
    whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)  # no file was left in its middle
    if worker or not whole or not session.config.getoption("--record-gpu-tests") or not _has_cuda():
        return
    import triton

    from cs336_systems.chapters.gpu_tests import measure as gpu_tests
    from cs336_systems.store import machine, rows
    from cs336_systems.store.provenance import digest

    provenance = {
        "status": "ok",
        "run": f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-test",
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "env": machine.environment_digest(),
        "code": digest(gpu_tests.TABLE),
    }
    found = [
        {"file": file, "triton": triton.__version__, "seconds": _SECONDS[file]}
        | {k: n[k] for k in ("passed", "failed", "skipped")}
        | provenance
        for file, n in _OUTCOMES.items()
    ]
    rows.write(gpu_tests.TABLE, machine.machine_name(), found, Path(RESULTS))
    rows.write_environment(machine.machine_name(), Path(RESULTS))


# Files that start processes, run notebooks or compile kernels, and take most of the time: not in `make test-fast`.
_SLOW = (
    "test_chapter_allreduce", "test_chapter_attention", "test_chapter_benchmarking", "test_chapter_flash_bench",
    "test_chapter_hardware", "test_chapter_training", "test_chapter_zero", "test_chapters", "test_unit_attention",
    "test_unit_ddp", "test_unit_fsdp", "test_unit_hopper", "test_unit_imports", "test_unit_ladder", "test_unit_launch",
    "test_unit_pipeline", "test_unit_split", "test_unit_step", "test_unit_team", "test_unit_tiles",
    "test_unit_training",
)  # fmt: skip


_known_modules = 0


def pytest_runtest_setup() -> None:
    """What was imported stays: to look at its half a million objects is most of the time that a collection of garbage
    takes, and measurements and wrappers ask for one."""
    global _known_modules
    if len(sys.modules) > _known_modules + 50:
        gc.enable()
        gc.collect()
        gc.freeze()
        _known_modules = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in _SLOW:
            item.add_marker("slow")
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_cuda():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Half of the tests, in their order, for each worker, and what is left of one's for the other: a file's fixtures
    are made once, and no worker waits."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@functools.cache
def _seed(test: str) -> int:
    return int(os.environ.get("CS336_TEST_SEED") or secrets.randbits(31))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Of Python's own, for tests that need no torch; seeded as `fresh_numbers` is."""
    return random.Random(_seed(request.node.nodeid))


@pytest.fixture(autouse=True)
def fresh_numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test draws other random inputs in each run; CS336_TEST_SEED=<the seed shown on failure> repeats them. The
    precision of fp32 matmuls is left as it was."""
    seed = _seed(request.node.nodeid)
    request.node.add_report_section("setup", "seed", f"CS336_TEST_SEED={seed}")
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    torch.manual_seed(seed)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def results_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder of the test's own, without rows: no test reads or writes the checkout's."""
    root = tmp_path_factory.mktemp("results")
    (root / "reference.json").write_text(json.dumps({}))
    monkeypatch.setenv("CS336_RESULTS", str(root))
    for variable in ("CS336_BOOK_BUILD", "CS336_MACHINE"):
        monkeypatch.delenv(variable, raising=False)
    return root


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Table, Callable[..., Any]], None]:
    """`measured_by(table, run_group)`: this function measures the table's groups."""

    def replace(table: Table, run_group: Callable[..., Any]) -> None:
        monkeypatch.setattr(
            sys.modules[table.module], "TABLE", dataclasses.replace(table, run_group=run_group)
        )

    return replace


@pytest.fixture(scope="module")
def smoke(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The smoke preset of a test file's chapter, measured once: its rows, and the results folder that they lie in."""
    from cs336_systems import chapters
    from cs336_systems.store import machine, measuring, rows

    table = chapters.load(request.module.__name__.removeprefix("test_chapter_"))
    root = tmp_path_factory.mktemp("smoke") / "results"
    root.mkdir()
    (root / "reference.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CS336_RESULTS", str(root))
        measuring.measure(table, table.grid("smoke"), root=root)
    return rows.read(table, machine.machine_name(), root), root


@pytest.fixture
def project_root() -> Path:
    """The checkout."""
    return ROOT
