"""Texts of numbers, from a command line, a variable or a file: one reading for all of them.

Python's own takes more than what is meant: digits of other scripts, `1_0`, `nan`, and 1e-400 as 0, which often stands
for a default.
"""

from __future__ import annotations

import math
import re

WHOLE = "a whole number, in digits from 0 to 9"
NUMBER = "a number, in digits from 0 to 9, finite and not too small for 64 bits"
_WHOLE = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


def whole(text: str, name: str = "") -> int:
    """The whole number that a text is, blanks around it aside; ValueError that names it, after `name`, for any other
    text."""
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(f"{name}{text!r}; allowed: {WHOLE}")
    return int(text)


def number(text: str, name: str = "") -> float:
    """The same for a number with or without a point and an exponent."""
    if not _NUMBER.fullmatch(text.strip()) or not math.isfinite(found := kept(text, name)):
        raise ValueError(f"{name}{text!r}; allowed: {NUMBER}")
    return found


def kept(text: str, name: str = "") -> float:
    """`float` of a text; ValueError for one that is not 0 and would become it."""
    if not (found := float(text)) and re.search("[1-9]", text.lower().partition("e")[0]):
        raise ValueError(f"{name}{text!r}; allowed: {NUMBER}")
    return found
