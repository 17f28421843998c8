"""Rows of any table: the case that one is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cs336_systems.store.rows import case_fields
from cs336_systems.store.table import Table


def case_of(table: Table, row: Any) -> Any:
    """The case of a row: a mapping, or what `DataFrame.itertuples` gives."""
    values = row if isinstance(row, Mapping) else row._asdict()
    return table.Case(**{field: values[field] for field in case_fields(table)})
