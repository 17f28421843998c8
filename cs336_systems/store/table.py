"""What a table is: the rows that one experiment measures, and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class Table:
    """A table of a chapter: what its rows are, and how they are measured.

    module:     the `__name__` of the module that makes it, which gives the table its name: of
                `chapters.leaderboard.shapes` "leaderboard_shapes", of `chapters.hardware.measure` "hardware".
    Case:       a frozen dataclass of plain values (str, int, float, bool): the key of a row.
    metrics:    the columns that a measurement adds, units in their names (`forward_ms_p50`, `peak_gib`, `tflops`).
    group:      the fields of `Case` that are equal within a group: what is measured, resumed and refreshed together.
    grid:       `grid(preset)`: every case of "full" (the handout's grid) or "smoke" (two CPU cores, at most 20 s).
    run_group:  measures the cases of one group in one process, in turns; one dict of metrics for each, in order. A dict
                may carry `status` (see `store.status`); what is raised is the status of the cases that have none yet.
    depends:    the files of the package, beside the module's own, that the numbers depend on: changing one makes rows
                "measured with earlier code" (`store.provenance`).
    choices:    field → what may be asked for, in the grid or not: words, a range, or a function that makes the value of
                a text (ValueError where it is none). Those of all fields make cases beyond the grid.
    beside:     the fields that name the file of a row that has one, a recording, beside the CSV (`rows.file_beside`).
    forecast:   a line for each of some cases, said before they are measured.

    Nothing of it needs torch before `run_group` is called.
    """

    module: str
    Case: type
    metrics: tuple[str, ...]
    group: tuple[str, ...]
    grid: Callable[[str], list[Any]]
    run_group: Callable[..., Iterable[dict[str, Any]]]
    depends: tuple[str, ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    forecast: Callable[[Sequence[Any]], Iterator[str]] | None = None

    @property
    def name(self) -> str:
        """Of the table's file, and of the command line."""
        *_, folder, name = ("", *self.module.split("."))
        return folder if name == "measure" else f"{folder}_{name}" if folder else name

    def case_of(self, row: Any) -> Any:
        """The case of a row: a mapping, or what `DataFrame.itertuples` gives."""
        values = row if isinstance(row, Mapping) else row._asdict()
        return self.Case(**{each.name: values[each.name] for each in fields(self.Case)})

    @property
    def source(self) -> Path:
        """The file of its module."""
        return Path(str(sys.modules[self.module].__file__))
