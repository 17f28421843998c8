"""Nsight Compute on the command line: what the units of a GPU did while each kernel of a function ran.

    kernels = counted("cs336_systems.chapters.leaderboard.counters:counted_calls", {...}, timeout_s=300)

The function warms up, and runs what is to be counted inside `nsys.capture()`, with a `mark()` before each part. Each
kernel is replayed several times, alone, with its memory restored in between: read the shares, not the times.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.store import process
from cs336_systems.store.status import Skip

# what is counted, by Nsight Compute's names (its documentation, "Metrics Reference"); shares in percent of the cycles
# that the kernel took
COUNTERS = {
    "ns": "gpu__time_duration.sum",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared_pct": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    # of one multiprocessor, on average: cycles lost to bank conflicts of shared memory, and all cycles
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.avg",
    "cycles": "l1tex__cycles_elapsed.avg",
}
OPTIONS = (
    "--csv", "--page=raw", "--print-units=base", "--profile-from-start=off",
    "--clock-control=none",  # as everything else in this book is measured
)  # fmt: skip
_MARK = "spin_kernel"  # what torch.cuda._sleep launches, and nothing else does


class NcuError(RuntimeError):
    """Nsight Compute failed, or wrote what is not understood; says what it wrote."""


def find() -> str | None:
    """Where `ncu` is: in PATH, or in the CUDA toolkit's usual place; None if it is not installed."""
    return shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")


def mark() -> None:
    """Ends one part of what is counted and begins the next."""
    import torch

    torch.cuda._sleep(1)


def counted(
    function: str, arguments: Mapping[str, Any], *, timeout_s: float
) -> tuple[Any, list[list[dict[str, Any]]]]:
    """Runs `module:function(**arguments)` in a fresh process under Nsight Compute.

    Returns its result, and for each `mark()` a list of the kernels that ran after it: `kernel`, its name, and COUNTERS.

    Raises `Skip` where there is no ncu or it may not read the counters, `process.ChildError` if the program
    fails, NcuError if ncu does.
    """
    ncu = find()
    if ncu is None:
        raise Skip("needs Nsight Compute: no `ncu` in PATH")
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        log = Path(folder) / "ncu.csv"
        metrics = ",".join(COUNTERS.values())
        prefix = [ncu, *OPTIONS, f"--metrics={metrics}", f"--log-file={log}"]
        try:
            result = process.call(function, arguments, timeout_s=timeout_s, prefix=prefix)
        except process.ChildError:
            _refuse(log.read_text() if log.is_file() else "")
            raise
        return result, parts(parse(log.read_text()))


def parse(text: str) -> list[dict[str, Any]]:
    """The kernels in ncu's CSV, in the order of their launches: `kernel`, its name, and COUNTERS.

    Raises `Skip` where it says that the counters may not be read, NcuError for anything else than its CSV.
    """
    _refuse(text)
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise NcuError(f"ncu wrote no table: {' | '.join(lines[-3:]) or 'nothing at all'}")
    table = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    head, units, rows = table[0], table[1], table[2:]
    if missing := [name for name in ("Kernel Name", *COUNTERS.values()) if name not in head]:
        raise NcuError(f"ncu's table lacks {', '.join(missing)}")
    if units[head.index(COUNTERS["ns"])] not in ("ns", "nsecond"):
        raise NcuError(f"ncu gives times in {units[head.index(COUNTERS['ns'])]!r}, not in ns")
    at = {name: head.index(metric) for name, metric in COUNTERS.items()}
    return [
        {"kernel": row[head.index("Kernel Name")], **{name: _number(row[i]) for name, i in at.items()}}
        for row in rows
    ]


def parts(kernels: Iterable[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The kernels after each mark. NcuError for one before the first."""
    out: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if _MARK in kernel["kernel"]:
            out.append([])
        elif not out:
            raise NcuError(f"{kernel['kernel']} ran before the first mark")
        else:
            out[-1].append(dict(kernel))
    return out


def summed(kernels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several kernels together: `kernels`, their names; shares by their time, `conflict_pct` among them; and the
    number of instructions. ValueError if there is none."""
    if not kernels:
        raise ValueError("no kernel ran")
    time, cycles = (sum(kernel[name] for kernel in kernels) for name in ("ns", "cycles"))
    shares = [name for name in COUNTERS if name.endswith("_pct")]
    return {
        "kernels": " ".join(dict.fromkeys(kernel["kernel"].split("(")[0] for kernel in kernels)),
        "instructions": sum(kernel["instructions"] for kernel in kernels),
        "conflict_pct": 100 * sum(kernel["conflicts"] for kernel in kernels) / cycles,
        **{name: sum(kernel[name] * kernel["ns"] for kernel in kernels) / time for name in shares},
    }


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _refuse(text: str) -> None:
    if "ERR_NVGPUCTRPERM" in text:
        raise Skip("needs the right to read the GPU's counters (ncu says ERR_NVGPUCTRPERM)")
