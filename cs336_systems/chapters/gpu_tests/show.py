"""What the GPU tests last said: numbers from `results/<machine>/gpu_tests.csv` for the book's first page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from cs336_systems import chapters
from cs336_systems.report.tables import escaped
from cs336_systems.store import rows as store
from cs336_systems.store.provenance import current


def totals(machine: str, root: Path | None = None) -> pd.DataFrame:
    """One row (none without a record): how many tests of the kernels passed, failed and were skipped on a machine, the
    last day (`day`), and how many files of them are of another code than this (`earlier`)."""
    experiment = chapters.load("gpu_tests")
    frame = store.read(experiment, machine, root)
    if frame.empty:
        return pd.DataFrame(columns=["machine", "passed", "failed", "skipped", "day", "earlier"])
    counts = {name: int(frame[name].fillna(0).sum()) for name in ("passed", "failed", "skipped")}
    is_current, cases = current(experiment, root), frame[store.case_fields(experiment)].values
    earlier = sum(not is_current(case, code) for case, code in zip(cases, frame["code"], strict=True))
    return pd.DataFrame(
        [{"machine": machine} | counts | {"day": escaped(max(frame["time_utc"])[:10]), "earlier": earlier}]
    )
