"""What the variables of the environment may be."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cs336_systems.store import rows
from cs336_systems.store.files import naming


def check_environment() -> None:
    """ValueError for what a variable of the environment cannot be: on any machine, before it is first read.
    FileNotFoundError without a current folder."""
    hopper = os.environ.get("CS336_HOPPER", "1")
    if hopper not in ("0", "1"):
        raise ValueError(f"CS336_HOPPER={hopper!r}; allowed: 0, 1")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current folder has been removed; change to another one") from None
    nodes = os.environ.get("CS336_NODES") or "1"
    if not re.fullmatch("[1-9][0-9]{0,5}", nodes):
        raise ValueError(f"CS336_NODES={nodes!r}; allowed: a whole number from 1")
    results = rows.results_root() if os.environ.get("CS336_RESULTS") else Path(".")
    with naming("read CS336_RESULTS,", results):
        there = next((path for path in (results, *results.parents) if path.exists()), results)
        if not there.is_dir():
            raise ValueError(f"CS336_RESULTS={results}: {there} is not a folder")
