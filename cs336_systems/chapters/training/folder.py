"""Writes what a benchmark found into a folder that can be looked at without this package: CSV, PNG, Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.report import tables
from cs336_systems.store.machine import environment, machine_name

_SHOWN = ("gpu", "gpus", "cpu", "cores", "driver", "cuda", "torch", "triton", "python")


def write(
    out: Path, name: str, title: str, rows: pd.DataFrame, table: pd.DataFrame, pictures: Mapping[str, Figure],
    notes: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """`<name>.csv` (the rows whole), `<picture>.png` of each picture, `report.md` with the table; what was written.

    OSError where the folder cannot be written.
    """
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    made = [out / f"{name}.csv"]
    rows.to_csv(made[0], index=False)
    for picture, figure in pictures.items():
        made.append(out / f"{picture}.png")
        figure.savefig(made[-1], dpi=150)
        plt.close(figure)
    made.append(out / "report.md")
    known = {key: value for key, value in environment().items() if key in _SHOWN and value not in (None, 0)}
    printed = tables.printed(table)
    failed = [f"- {tables.escaped(status)}" for status in dict.fromkeys(rows["status"]) if status != "ok"]
    parts = [
        f"# {title}",
        f"Machine `{machine_name()}`: "
        + ", ".join(f"{key} {tables.escaped(value)}" for key, value in known.items())
        + ".",
        *notes,
        *(f"![{picture}]({picture}.png)" for picture in pictures),
        printed.to_markdown(index=False, disable_numparse=True),
        *(["Cells without numbers:", "\n".join(failed)] if failed else []),
        f"Every column: [{name}.csv]({name}.csv).",
    ]
    made[-1].write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return made
