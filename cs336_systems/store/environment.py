"""What the variables of the environment may be."""

from __future__ import annotations

import os
from pathlib import Path


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
