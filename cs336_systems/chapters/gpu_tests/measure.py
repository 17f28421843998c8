"""What the GPU tests last said, on which machine and of which code: `pytest -m gpu --record-gpu-tests` writes the rows.

Not a chapter: the book's overview reads it, beside the kernels' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = ("file",)
METRICS = ("passed", "failed", "skipped", "seconds")


@dataclass(frozen=True)
class Case:
    """The tests of one file."""

    file: str


def also_measures(case: Case) -> tuple[str, ...]:
    """All of attention."""
    return ("cs336_systems.attention.*",)


def grid(preset: str) -> list[Case]:
    """Nothing is planned here: pytest brings its own cases."""
    return []
