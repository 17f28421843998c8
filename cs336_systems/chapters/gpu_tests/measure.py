"""What the GPU tests last said, on which machine and of which code: `pytest -m gpu --record-gpu-tests` writes the rows.

Not a chapter: the book's overview reads it, beside the kernels' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.chapters.shared import depends
from cs336_systems.store.table import Table

DEPENDS = (
    *depends.ATTENTION, "attention/__init__.py", "attention/auto.py", "attention/checks/aot.py",
    "attention/checks/tune.py",
)  # fmt: skip
GROUP = ("file",)
METRICS = ("passed", "failed", "skipped", "seconds")


@dataclass(frozen=True)
class Case:
    """The tests of one file, with one version of triton."""

    file: str
    triton: str


def grid(preset: str) -> list[Case]:
    """Nothing is planned here: pytest brings its own cases."""
    return []


TABLE = Table(__name__, Case, METRICS, GROUP, grid, lambda cases: [], DEPENDS)
