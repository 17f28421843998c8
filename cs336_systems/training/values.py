"""The values of a configuration's keys, by their type: from text where they are text, ValueError for what is none."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from typing import Any

from cs336_systems.store import numbers


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
    if not isinstance(value, bool):
        raise ValueError
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return numbers.whole(value) if isinstance(value, str) else int(value)


def _float(value: Any) -> float:
    if isinstance(value, str):
        return numbers.number(value)
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


PARSE: Mapping[type, Callable[[Any], Any]] = types.MappingProxyType(
    {bool: _bool, int: _int, float: _float, str: _str}
)
