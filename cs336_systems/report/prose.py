"""The words of the book that rest on rows: values, comparisons, claims and answers.

An author writes a sentence for the reference rows, as an f-string, and names the comparisons it rests on; here it is
held against the rows at hand. Text never switches to its own opposite:

    ours, cudnn = (one(rows, impl=i) for i in ("flash_triton", "sdpa_cudnn"))
    say(f"Ours takes **{ours.ms_p50:4} ms**.")
    claim(f"cuDNN takes {cudnn.ms_p50 / ours.ms_p50} times as long.", compare("ms_p50", cudnn, ours, rows).more)

A number that is missing (no row, another machine, out of memory) stays missing through arithmetic and comparisons; a
sentence with one in it is replaced by a line that says what is not measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.report import coverage
from cs336_systems.report.values import MARK, Number, Row, Span, consulted, missing_of, one, published, span

__all__ = [
    "Number", "Row", "Span", "answer", "claim", "compare", "every", "one", "published", "say", "span",
]  # fmt: skip

LEAST_NOISE = 0.03  # two measurements that differ by less are never distinguished
UNKNOWN_NOISE = 0.25  # without a case measured twice in the same run
WIDE = 1.5  # within the noise up to here; beyond, one may say slower or faster
_WITHOUT_NUMBER = {"tab": "the table", "fig": "the figure"}
NOT_BORNE_OUT = "These rows do not bear this out."


# -------------------------------------------------------------------------------------------- comparisons
@dataclass(frozen=True)
class Compared:
    """A metric of two rows. `ratio` is the first over the second; `less`, `more` and `even` are None where a number is
    missing, and `even` also where the noise is not known."""

    text: str
    ratio: Number
    noise: float
    known: bool  # whether the noise is that of a case measured twice in this run

    def __repr__(self) -> str:
        return (
            f"{self.text}: ratio {self.ratio!r}, noise {self.noise:.1%}{'' if self.known else ' (assumed)'}"
        )

    def _judged(self, name: str, result: bool) -> bool | None:
        if self.ratio.missing:
            return None
        narrow = self.noise < self._apart <= WIDE * self.noise
        consulted.append((f"({self!r}).{name}", result, narrow))
        return result

    @property
    def _apart(self) -> float:
        """How far apart the two are, whichever is larger."""
        ratio = float(self.ratio)
        return max(ratio, 1 / ratio) - 1 if ratio > 0 else math.inf

    @property
    def less(self) -> bool | None:
        return self._judged("less", float(self.ratio) < 1 and self._apart > self.noise)

    @property
    def more(self) -> bool | None:
        return self._judged("more", float(self.ratio) > 1 and self._apart > self.noise)

    @property
    def even(self) -> bool | None:
        if not self.known:
            return None
        return self._judged("even", self._apart <= self.noise)


def compare(metric: str, a: Row, b: Row, rows: pd.DataFrame) -> Compared:
    """Holds a metric of two rows against each other, and against the noise.

    The noise is how far apart the same case measured twice in this run lies for this metric (`rows` holds these pairs:
    all but `repeat` equal; the farthest pair counts), but at least LEAST_NOISE. Without a pair, or where the two rows
    come from two runs, it is UNKNOWN_NOISE.
    """
    first, second = getattr(a, metric), getattr(b, metric)
    apart = None
    if not missing_of(first, second) and "run" in rows and a.run == b.run:
        apart = _repetition(metric, rows[(rows["run"] == a.run) & (rows["status"] == "ok")])
    noise = UNKNOWN_NOISE if apart is None else max(apart, LEAST_NOISE)
    text = f"{metric} of {a!r} {first!r} and {b!r} {second!r}"
    return Compared(text, first / second, noise, apart is not None)


def _repetition(metric: str, run: pd.DataFrame) -> float | None:
    """How far apart the same case measured twice lies, at most; None without such a pair."""
    if "repeat" not in run or not (run["repeat"] > 0).any():
        return None
    fields = list(run.columns[: list(run.columns).index("repeat")])
    same = run[metric].astype(float).groupby([run[field] for field in fields], dropna=False)
    pairs = same.agg(["count", "min", "max"])
    pairs = pairs[(pairs["count"] > 1) & (pairs["min"] > 0)]
    return None if pairs.empty else (pairs["max"] / pairs["min"]).max() - 1


def every(*conditions: Any) -> bool | None:
    """All of the conditions, or of those in one iterable: None if any is None or there are none."""
    several = len(conditions) == 1 and isinstance(conditions[0], Iterable)
    found = list(conditions[0] if several else conditions)
    if not found or any(c is None for c in found):
        return None
    return all(_checked(found))


# ---------------------------------------------------------------------------------------------- sentences
@dataclass(frozen=True)
class Sentence:
    """What was shown: `outcome` is True, False (the rows do not bear it out) or None (something is not measured)."""

    part: str  # of a problem, for an answer
    text: str
    outcome: bool | None
    brief: str = ""  # of an answer, for the first page's table
    against: tuple[str, ...] = ()  # the comparisons that failed
    narrow: tuple[str, ...] = ()  # those that hold by a little


made: list[Sentence] = []  # claims and answers of this process, in their order


def say(text: str) -> None:
    """Shows Markdown with values in it, or which of them is missing."""
    _show(_missing(text) or text)


def claim(text: str, *conditions: bool | None) -> None:
    """Shows a sentence that rests on conditions, at least one.

    Where one is None, or a number in the text is missing, a line says what is not measured; where one is False, the
    sentence carries a mark.

    Raises TypeError for a condition that is not True, False or None, or without any.
    """
    if not conditions:
        raise TypeError("a claim needs a condition; use say() for a value alone")
    _show(_held("", text, conditions))


def answer(part: str, text: str, *conditions: bool | None, brief: str) -> None:
    """Shows a claim in a box under its question: the answer to `"nsys_profile (a)"`. One that rests on no rows needs no
    conditions.

    brief: the same in one line, which the first page gathers.
    """
    text = _held(part, text, conditions, brief)
    asked = f"*{coverage.QUESTIONS[part]}*\n\n" if part in coverage.QUESTIONS else ""
    box = '<div style="border-left:4px solid #3b82f6;padding:0.1em 1em">'
    html = f"{box}{_html(f'**{part}**')}{_html(asked + text)}</div>"
    name = coverage.anchor(part)
    _show(text, f":::{{admonition}} {part}\n:class: tip\n:name: {name}\n\n{asked}{text}\n:::\n", html)


def _checked(conditions: Iterable[Any]) -> list[bool | None]:
    found = list(conditions)
    for condition in found:
        if condition is not None and not isinstance(condition, bool | np.bool_):
            raise TypeError(f"{condition!r} is not a condition; allowed: True, False, None")
    return found


def _held(part: str, text: str, conditions: Iterable[Any], brief: str = "") -> str:
    """Notes the sentence, and returns what is to be shown of it."""
    found = _checked(conditions)
    seen, consulted[:] = list(consulted), []
    outcome = None if _missing(text) or _missing(brief) or None in found else all(found)
    shown, short = (_shown(words, outcome) for words in (text, brief))
    against = tuple(dict.fromkeys(t for t, result, _ in seen if not result)) if outcome is False else ()
    narrow = tuple(dict.fromkeys(t for t, result, close in seen if result and close)) if outcome else ()
    made.append(Sentence(part, " ".join(text.replace(MARK, "").split()), outcome, short, against, narrow))
    return shown


def _shown(text: str, outcome: bool | None) -> str:
    if outcome is None:
        return _missing(text) or "*Not measured.*"
    return text if outcome else f"{text} **[{NOT_BORNE_OUT}]**"


def _missing(text: str) -> str:
    """What to show in place of a text with a missing number in it, with the reasons; empty where none is missing."""
    reasons = "; ".join(dict.fromkeys(text.split(MARK)[1::2]))
    if reasons:
        return f"*Not measured: {reasons}.*".replace(": not measured", "")
    return "*Not measured.*" if re.search(r"\bnan\b", text) else ""  # of numbers that are not `Number`s


def _html(text: str) -> str:
    """Markdown as HTML, for JupyterLab: it typesets math itself, but knows no numbers of tables and figures."""
    text = re.sub(r"\{numref\}`(tab|fig)-[\w-]+`", lambda role: _WITHOUT_NUMBER[role[1]], text)
    try:  # both come with jupyter-book, which a machine that only measures may lack
        from markdown_it import MarkdownIt
        from mdit_py_plugins.dollarmath import dollarmath_plugin
    except ImportError:
        return f"<p>{escape(text)}</p>"
    as_it_is = {"renderer": lambda tex, _: f"${escape(tex)}$"}
    return MarkdownIt().enable("table").use(dollarmath_plugin, **as_it_is).render(text)


def _show(text: str, markdown: str = "", html: str = "") -> None:
    """Shows Markdown, which is what the book takes; in JupyterLab the HTML comes first."""
    from IPython.display import display

    display(
        {"text/markdown": markdown or text, "text/html": html or _html(text), "text/plain": text}, raw=True
    )
