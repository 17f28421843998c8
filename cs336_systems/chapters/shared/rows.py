"""Rows of any table: the case that one is of, and what others say of the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.store.rows import case_fields
from cs336_systems.store.table import Table


def case_of(table: Table, row: Any) -> Any:
    """The case of a row: a mapping, or what `DataFrame.itertuples` gives."""
    values = row if isinstance(row, Mapping) else row._asdict()
    return table.Case(**{field: values[field] for field in case_fields(table)})


def looked_up(known: pd.DataFrame, column: str, rows: pd.DataFrame, keys: list[str]) -> np.ndarray:
    """For each of the rows the column of the one of `known` whose keys are the same; NaN where there is none."""
    found = known.set_index(keys)[column].astype(float)
    return found.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
