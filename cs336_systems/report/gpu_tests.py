"""What the GPU tests last said: sentences from `results/<machine>/gpu_tests.csv` for the book's overview."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from cs336_systems import experiments
from cs336_systems.measure import rows as store
from cs336_systems.measure.code import code_digest
from cs336_systems.report.chapter import NOT_MEASURED, reference_machines


def machines(root: Path | None = None) -> list[str]:
    """The machines whose GPU tests the book quotes: those of its chapters that have such a record."""
    quoted = [m for chapter in experiments.CHAPTERS for m in reference_machines(chapter, root)]
    return [m for m in dict.fromkeys(quoted) if store.csv_path("gpu_tests", m, root).is_file()]


def sentence(root: Path | None = None) -> str:
    """On each machine how many tests of the kernels passed, and of which code, as Markdown."""
    experiment = experiments.load("gpu_tests")
    code = code_digest(experiment)
    found = [_of_machine(m, store.read(experiment, m, root), code) for m in machines(root)]
    said = "; ".join(filter(None, found))
    return (
        f"Tests run on GPUs as well: {said}." if said else f"Tests of the kernels on a GPU: {NOT_MEASURED}."
    )


def _of_machine(machine: str, frame: pd.DataFrame, code: str) -> str:
    said = []
    for now, part in ((True, frame[frame["code"] == code]), (False, frame[frame["code"] != code])):
        if part.empty:
            continue
        count = {k: int(part[k].fillna(0).sum()) for k in ("passed", "failed", "skipped")}
        failed = f", **{count['failed']} failed**" if count["failed"] else ", none failed"
        skipped = f", {count['skipped']} were skipped" if count["skipped"] else ""
        day = max(part["time_utc"])[:10]
        of = "of the code as it stands" if now else "**of earlier code**"
        said.append(f"{count['passed']} tests passed{failed}{skipped} ({day}, {of})")
    return f"on `{machine}` {', '.join(said)}" if said else ""
