"""Values of the prose: numbers that format themselves and know why they are missing, and the rows they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.report.tables import chosen, escaped, fmt
from cs336_systems.store import rows as store
from cs336_systems.store.files import StoreError, read_table

MARK = "\x00"  # encloses, in a formatted text, the reason why a number is missing
consulted: list[tuple[str, bool, bool]] = []  # comparisons since the last claim: repr, result, narrow


class Number(float):
    """A float that knows why it is missing, and formats itself.

    `f"{x}"` has three significant digits, `f"{x:4}"` four, `f"{x:2%}"` is a percentage with two; any other format is a
    float's. Comparisons with a missing number are None.
    """

    missing: str  # why there is no number; empty where there is one
    __array_priority__ = -1.0  # more than numpy's numbers have: they leave operations to this class

    def __new__(cls, value: Any, missing: str = "") -> Number:
        number = super().__new__(cls, math.nan if missing else value)
        number.missing = missing or ("no number" if math.isnan(number) else "")
        return number

    def __format__(self, spec: str) -> str:
        if self.missing:
            return f"{MARK}{self.missing}{MARK}"
        digits = spec.removesuffix("%") or "3"
        if not digits.isdigit():
            return format(float(self), spec)
        if spec.endswith("%"):
            return f"{fmt(100 * float(self), int(digits))}\u00a0%"
        return fmt(float(self), int(digits))

    __str__ = lambda self: format(self)
    __repr__ = lambda self: f"missing ({self.missing})" if self.missing else fmt(float(self), 4)


def missing_of(*numbers: Any) -> str:
    return next((x.missing for x in numbers if isinstance(x, Number) and x.missing), "")


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def operate(*operands: Any) -> Any:
        if missing := missing_of(*operands):
            return Number(math.nan, missing)
        try:
            return Number(plain(*map(float, operands)))
        except ZeroDivisionError:
            return Number(math.nan, "divided by zero")

    return operate


def _comparison(name: str, sign: str) -> Callable[[Number, Any], bool | None]:
    plain = getattr(float, name)

    def compared(a: Number, b: Any) -> bool | None:
        if missing_of(a, b):
            return None
        if not isinstance(b, int | float | np.number):
            return NotImplemented
        result = plain(a, float(b))
        consulted.append((f"{a!r} {sign} {b!r}", result, False))
        return result

    return compared


_BINARY = ("add", "sub", "mul", "truediv", "pow")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(Number, f"__{_name}__", _comparison(f"__{_name}__", _sign))


# --------------------------------------------------------------------------------------------------- rows
class Row:
    """One row, its columns as attributes: numbers as `Number`, texts as they are, missing ones as a missing Number.

    `oom`, `ok`, `skipped` and `error` (where no column is named so) are True, False, or None where there is no row.
    """

    def __init__(self, values: dict[str, Any], where: str, absent: str = "") -> None:
        self._values, self._where, self._absent = values, where, absent

    def __getattr__(self, column: str) -> Any:
        if column.startswith("_"):
            raise AttributeError(column)
        if column in ("oom", "ok", "skipped", "error") and column not in self._values:
            return None if self._absent else str(self._values["status"]).partition(":")[0] == column
        if column not in self._values:
            raise AttributeError(f"unknown column {column!r}; allowed: {', '.join(self._values)}")
        value = self._values[column]
        if isinstance(value, str) and value and not self._absent:
            return value
        if isinstance(value, bool | np.bool_):
            return bool(value)
        if self._absent or not isinstance(value, int | float | np.number) or math.isnan(value):
            status = str(self._values.get("status", "ok"))
            why = {"ok": f"no {column}", "oom": "out of memory"}.get(status, status)
            return Number(math.nan, self._absent or f"{self._where}: {why}")
        return Number(value)

    def __repr__(self) -> str:
        return self._where


def one(rows: pd.DataFrame, **case: Any) -> Row:
    """The row with these values; of several machines, the first one that has it.

    A row that is absent or not measured is a Row whose numbers are all missing.

    Raises:
        ValueError: an unknown column, or several rows of one machine (the message says where they differ).
    """
    found = chosen(rows, **case)
    words = (v if isinstance(v, str) else f"{column}={v}" for column, v in case.items() if column != "repeat")
    where = " ".join(words) or "the row"
    machines = list(found["machine"].unique()) if "machine" in found else []
    if "status" in found:
        found = found[found["status"] != "not measured"]
    if len(found) > 1 and "machine" in found:
        found = found[found["machine"] == found["machine"].iloc[0]]
    if len(found) > 1:
        differ = [c for c in found if found[c].astype(str).nunique() > 1]
        raise ValueError(
            f"{where}: {len(found)} rows, which differ in {', '.join(differ)}; name more columns"
        )
    if found.empty:
        place = f" on {', '.join(machines)}" if any(machines) else ""
        return Row(dict.fromkeys(rows.columns), where, f"{where}: not measured{place}")
    return Row(found.iloc[0].to_dict(), where)


def published(what: str) -> Row:
    """The figure of `results/published.csv` whose description begins with these words: `value`, `hardware`, `source`.

    Raises ValueError where there is none, or more than one; StoreError where the file is damaged. In a results folder
    without that file its numbers are missing.
    """
    path = store.results_root() / "published.csv"
    header, figures = read_table(path)
    if not header:
        return Row({"value": math.nan, "hardware": "", "source": ""}, what, f"{path.name}: no such file")
    if lacking := [column for column in ("what", "value", "hardware", "source") if column not in header]:
        raise StoreError(f"{path} lacks the columns {', '.join(lacking)}")
    found = [(line, figure) for line, figure in figures if figure["what"].startswith(what)]
    if len(found) != 1:
        known = "; ".join(figure["what"] for _, figure in figures)
        raise ValueError(f"{what!r} begins {len(found)} published figures; there are: {known}")
    [(line, figure)] = found
    value = pd.to_numeric(figure["value"], errors="coerce")
    if not 0 < value < math.inf:
        raise StoreError(f"{path}, line {line}: value={figure['value']}: expected a number above 0")
    figure = {column: escaped(text) for column, text in figure.items()}
    return Row(figure | {"value": float(value), "status": "ok"}, what)


@dataclass(frozen=True)
class Span:
    """The least and the greatest of some numbers: `f"{span:2}"` → `"1.1 to 1.9"`; missing if one of them is."""

    low: Number
    high: Number

    def __format__(self, spec: str) -> str:
        low, high = format(self.low, spec), format(self.high, spec)
        return low if low == high else f"{low} to {high}"

    __str__ = lambda self: format(self)


def span(numbers: pd.DataFrame | Iterable[Any], metric: str = "") -> Span:
    """The range of a metric of rows, or of some numbers."""
    if isinstance(numbers, pd.DataFrame):
        found = [Number(x, "" if pd.notna(x) else f"{metric}: not measured") for x in numbers[metric]]
    else:
        found = [x if isinstance(x, Number) else Number(x) for x in numbers]
    missing = missing_of(*found) if found else f"{metric or 'a range'}: not measured"
    low, high = (math.nan, math.nan) if missing else (min(map(float, found)), max(map(float, found)))
    return Span(Number(low, missing), Number(high, missing))
