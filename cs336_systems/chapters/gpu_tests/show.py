"""What the GPU tests last said: numbers from `results/<machine>/gpu_tests.csv` for the book's first page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from cs336_systems import chapters
from cs336_systems.report.tables import escaped
from cs336_systems.store import rows as store
from cs336_systems.store.provenance import current


def totals(machine: str, root: Path | None = None) -> pd.DataFrame:
    """A row for each version of triton that was tried on a machine: how many tests of the kernels passed, failed and
    were skipped, the last day (`day`), and of how many `files`, how many were of another code than this (`earlier`)."""
    experiment = chapters.load("gpu_tests")
    frame = store.read(experiment, machine, root)
    is_current, found = current(experiment, root), []
    for triton, part in frame.groupby("triton"):
        counts = {name: int(part[name].fillna(0).sum()) for name in ("passed", "failed", "skipped")}
        earlier = sum(not is_current((row.file, triton), row.code) for row in part.itertuples())
        about = {"machine": machine, "triton": triton, "day": escaped(max(part["time_utc"])[:10])}
        found.append(about | counts | {"files": len(part), "earlier": earlier})
    columns = ["machine", "triton", "passed", "failed", "skipped", "day", "files", "earlier"]
    return pd.DataFrame(found, columns=columns)
