"""The roofs of a machine, from the rows of chapter `hardware`: what later chapters hold their numbers against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from cs336_systems import accounting, chapters
from cs336_systems.store import rows as store


@dataclass(frozen=True)
class Roofs:
    """The most that was measured on a machine.

    Attributes:
        tflops: dtype → TFLOP/s of the best square matmul.
        tb_per_s: TB/s of the best copy, bytes read and written; None if not measured.
        sms: multiprocessors of the GPU; None on a CPU.
        sheet: what the data sheet promises; None where it is not known.
    """

    tflops: dict[str, float] = field(default_factory=dict)
    tb_per_s: float | None = None
    sms: int | None = None
    sheet: accounting.Peaks | None = None

    def gemm_ms(self, flops: float, dtype: str) -> float:
        """What FLOPs of GEMMs take at the best rate measured; NaN where that is not known."""
        return flops / (self.tflops.get(dtype, math.nan) * 1e9)

    def copy_ms(self, num_bytes: float) -> float:
        """What bytes, read and written, take at the best copy measured; NaN where that is not known."""
        return num_bytes / ((self.tb_per_s or math.nan) * 1e9)


def roofs(machine: str, root: Path | None = None) -> Roofs:
    """The roofs of a machine. What has no row is left out, or None; an empty name has no roofs at all."""
    if not machine:
        return Roofs()
    known = store.environments(machine, root)
    frame = store.read(chapters.load("hardware"), machine, root)
    frame = frame[frame["status"] == "ok"]
    measured = [known[env] for env in frame.sort_values("time_utc")["env"] if env in known]
    newest = (measured or list(known.values()) or [{}])[-1]
    matmuls = frame[frame["kind"] == "matmul"].dropna(subset="tflops")
    copies = pd.to_numeric(frame[frame["kind"] == "copy"]["tb_per_s"], errors="coerce").dropna()
    return Roofs(
        tflops={str(k): float(v) for k, v in matmuls.groupby("dtype")["tflops"].max().items()},
        tb_per_s=float(copies.max()) if len(copies) else None,
        sms=newest.get("sms"),
        sheet=accounting.peaks(newest.get("gpu", "")),
    )
