"""The roofs of a machine, from the rows of chapter `hardware`: what later chapters hold their numbers
against.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems import accounting, experiments
from cs336_systems.measure import rows as store


@dataclass(frozen=True)
class Roofs:
    """The most that was measured on a machine.

    Attributes:
        tflops: dtype → TFLOP/s of the best square matrix product.
        tb_per_s: TB/s of the best copy, bytes read and written; None if not measured.
        launch_us: the host's time for one launch among many, in µs; None if not measured.
        graph_us: the same inside a CUDA graph.
        sms: multiprocessors of the GPU; None on a CPU.
        sheet: what the data sheet promises; None where it is not known.
    """

    tflops: dict[str, float] = field(default_factory=dict)
    tb_per_s: float | None = None
    launch_us: float | None = None
    graph_us: float | None = None
    sms: int | None = None
    sheet: accounting.Peaks | None = None


def machine_environment(machine: str, root: Path | None = None) -> dict[str, Any]:
    """The newest environment that `machine.json` spells out; empty where there is none."""
    path = (root or store.results_root()) / machine / "machine.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    return list(known.values())[-1] if known else {}


def roofs(machine: str, root: Path | None = None) -> Roofs:
    """The roofs of a machine. What has no row is left out, or None; an empty name has no roofs at all."""
    if not machine:
        return Roofs()
    environment = machine_environment(machine, root)
    frame = store.read(experiments.load("hardware"), machine, root)
    frame = frame[frame["status"] == "ok"]

    def best(kind: str, metric: str, smallest: bool = False) -> float | None:
        numbers = pd.to_numeric(frame[frame["kind"] == kind][metric], errors="coerce").dropna()
        if numbers.empty:
            return None
        return float(numbers.min() if smallest else numbers.max())

    products = frame[frame["kind"] == "matmul"].dropna(subset="tflops")
    return Roofs(
        tflops={str(k): float(v) for k, v in products.groupby("dtype")["tflops"].max().items()},
        tb_per_s=best("copy", "tb_per_s"),
        launch_us=best("launch", "us_per_launch", smallest=True),
        graph_us=best("launch_graph", "us_per_launch", smallest=True),
        sms=environment.get("sms"),
        sheet=accounting.peaks(environment.get("gpu", "")),
    )
