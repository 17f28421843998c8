"""Tables that read well in JupyterLab, in the HTML book (light and dark) and in the PDF.

A table is displayed with two renderings: `text/html`, which JupyterLab shows, and `text/markdown`, a MyST
`table` directive with caption and label, which the book turns into a numbered table of its own style."""

from __future__ import annotations

import html
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.store.files import visible

EMPTY = "–"
# what means something in Markdown (math, roles and substitutions included), HTML or matplotlib's texts, and what cannot
# be seen
_MARKUP = {ord(c): f"&#{ord(c)};" for c in "&<>\"'`*[]|$\\{}~"}
_LONG, _LONG_TEXT = 24, 1500  # rows, characters that wrap: more are set as a table of several pages
_WIDE = 8  # columns: more are set smaller


def fmt(value: Any, digits: int = 3) -> str:
    """A value as a cell shows it: numbers with `digits` significant digits (thousands apart), other values
    as text.

    Integers are shown whole, missing values as a dash.
    """
    if value is None or value is pd.NA:
        return EMPTY
    if isinstance(value, bool | str) or not isinstance(value, numbers.Real):
        return str(value)
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    value = float(value)
    if not math.isfinite(value):
        return EMPTY if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    exponent = int(power)
    if exponent < -4:
        return f"{mantissa}e{exponent}".replace("-", "−")
    decimals = max(0, digits - 1 - exponent)
    return f"{round(value, digits - 1 - exponent):,.{decimals}f}".replace("-", "−")


def escaped(value: Any) -> Any:
    """A text of a row, a `machine.json` or an exception as one that Markdown and HTML show as it is: with entities for
    what has a meaning there, and without control characters. Other values as they are."""
    if not isinstance(value, str):
        return value
    return visible(value).translate(_MARKUP)


def chosen(rows: pd.DataFrame, /, **where: Any) -> pd.DataFrame:
    """The rows whose columns equal a value, or one of several; ValueError for an unknown column, and for a text where a
    column holds numbers, which no row could equal."""
    keep = np.ones(len(rows), dtype=bool)
    for column, value in where.items():
        if column not in rows:
            raise ValueError(f"unknown column {column!r}; allowed: {', '.join(rows.columns)}")
        several = isinstance(value, Iterable) and not isinstance(value, str)
        values, there = list(value) if several else [value], rows[column].dropna()
        texts = [x for x in values if isinstance(x, str)]
        if texts and len(there) and pd.api.types.is_numeric_dtype(there):
            raise ValueError(f"{column}={texts[0]!r}; the column holds numbers, such as {there.iloc[0]}")
        keep &= rows[column].isin(values).to_numpy()
    return rows[keep]  # once: taking rows out of a wide frame costs far more than looking at a column


def pivot(rows: pd.DataFrame, index: Sequence[str], columns: str, value: str) -> pd.DataFrame:
    """Rows as a numeric table: a line for each combination of `index`, a column for each value of `columns`, in the
    order of their first appearance. A cell without a number is NaN; `show` prints what its row's status says, such as
    `OOM` (kept in `attrs["words"]`).

    Raises ValueError where a cell has several rows.
    """
    keys = [*index, columns]
    if rows.duplicated(keys).any():
        raise ValueError(f"several rows for one cell of {', '.join(keys)}; choose among them first")
    told = rows.assign(_word=rows["status"].map(word))
    wide, words = (told.pivot(index=list(index), columns=columns, values=x) for x in (value, "_word"))
    order, heads = rows.set_index(list(index)).index.unique(), rows[columns].unique()
    out = wide.reindex(index=order, columns=heads).astype(float).rename_axis(columns=None).reset_index()
    words = words.reindex(index=order, columns=heads).fillna(EMPTY)
    out.attrs["words"] = words.reset_index(drop=True).to_dict()  # plain values: pandas compares attrs
    return out


def spread(rows: pd.DataFrame, index: Sequence[str], heads: Mapping[str, Any]) -> pd.DataFrame:
    """`pivot` of several metrics side by side: column → the head of its numbers, one for all rows or one for each."""
    sides = [rows.assign(_head=head, _value=rows[column].astype(float)) for column, head in heads.items()]
    wide = pivot(pd.concat(sides, ignore_index=True), index, "_head", "_value")
    known = [*index, *filter(pd.api.types.is_scalar, heads.values())]
    return wide if len(rows) else wide.reindex(columns=known)


def looked_up(known: pd.DataFrame, column: str, rows: pd.DataFrame, keys: list[str]) -> np.ndarray:
    """For each of the rows the column of the one of `known` whose keys are the same; NaN where there is none."""
    found = known.set_index(keys)[column].astype(float)
    return found.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()


def first_machine(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first machine among them: what a figure shows of several."""
    return rows[rows["machine"].isin(rows["machine"].head(1))]


def in_order(rows: pd.DataFrame, by: Sequence[str], *orders: Iterable[str]) -> pd.DataFrame:
    """The rows sorted by these columns, numbered anew; values that one of the orders names stand as there."""
    place = {name: number for names in orders for number, name in enumerate(names)}
    key = lambda column: column.map(place) if column.isin(place).any() else column
    return rows.sort_values(list(by), key=key, kind="stable", ignore_index=True)


def word(status: str) -> str:
    """What a cell says in place of a number: `OOM`, `skipped`, `error`, or a dash."""
    kind = status.partition(":")[0]
    return {"oom": "OOM", "ok": EMPTY, "not measured": EMPTY}.get(kind, kind)


def printed(frame: pd.DataFrame, digits: Mapping[str, int] | None = None) -> pd.DataFrame:
    """The frame as texts: numbers with three significant digits, or as many as `digits` says for their column."""
    words = frame.attrs.get("words", {})
    out = frame.astype(object)
    out.attrs = {}
    for column in frame:
        texts = [fmt(value, (digits or {}).get(column, 3)) for value in frame[column]]
        known = dict.fromkeys(frame.index, EMPTY) | words.get(column, {})
        out[column] = [known[line] if t == EMPTY else t for line, t in zip(frame.index, texts, strict=True)]
    return out


def _numeric(texts: Iterable[str]) -> bool:
    """Whether a column holds numbers: it is set flush right."""
    looks = [
        re.fullmatch(r"[−+\-]?[\d,]*\.?\d+(e[−\-]?\d+)?( ?[×%])?", t) is not None
        for t in texts
        if t not in ("", EMPTY)
    ]
    return bool(looks) and sum(looks) * 2 >= len(looks)


def _plain(text: str) -> str:
    """Markdown without the targets of its links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def _wraps(texts: Sequence[str]) -> bool:
    """Whether a column of the PDF is to break into lines: long texts, made of words that fit a narrow column (in the
    PDF a word may break after an underscore)."""
    plain = [_plain(text) for text in texts]
    longest_word = max((len(word) for text in plain for word in re.split(r"[\s_]+", text)), default=0)
    return max(map(len, plain), default=0) > 24 and longest_word <= 20


def _html_text(text: str) -> str:
    text = re.sub(r"&amp;(#\d+;)", r"&\1", html.escape(text, quote=False))  # what `escaped` has made stays
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def to_html(frame: pd.DataFrame, caption: str, folded: bool = False) -> str:
    """A table of texts as HTML, in the colors of the page around it. One that is `folded` opens by a click on its
    caption, and scrolls where it is wider than the page."""
    align = ["right" if _numeric(frame[column]) else "left" for column in frame]

    def line(tag: str, texts: Iterable[Any]) -> str:
        cells = zip(texts, align, strict=True)
        marked = (f'<{tag} style="text-align:{a}">{_html_text(str(t))}</{tag}>' for t, a in cells)
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(line("td", row) for row in frame.itertuples(index=False, name=None))
    inner = f"<thead>{line('th', frame)}</thead><tbody>{body}</tbody></table>"
    said = _html_text(caption)
    if not folded:
        return f'<table><caption style="caption-side:top;text-align:left">{said}</caption>{inner}'
    kind = "table measured wide" if len(align) > _WIDE else "table measured"
    return (
        f'<details class="folded"><summary>{said}</summary>'
        f'<div style="overflow-x:auto"><table class="{kind}">{inner}</div></details>'
    )


def to_markdown(frame: pd.DataFrame, caption: str, name: str, wrap: bool = False) -> str:
    """A table of texts as a MyST directive: numbered, with a label for `{numref}`, and column kinds for LaTeX.

    A table wider than the PDF's page is made smaller there, and in HTML it scrolls, unless its cells may `wrap`.
    """
    heads = [str(head) for head in frame]
    rows = list(frame.itertuples(index=False, name=None))
    kinds = ["r" if _numeric(c) else "L" if wrap and _wraps(c) else "l" for _, c in frame.items()]

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(t.replace("|", r"\|").replace("\n", " ") or " " for t in texts) + " |"

    rule = line("---:" if kind == "r" else ":---" for kind in kinds)
    grid = "\n".join([line(heads), rule, *map(line, rows)])
    long = len(rows) > _LONG or (wrap and sum(len(_plain(text)) for row in rows for text in row) > _LONG_TEXT)
    if wrap and long:  # a table of several pages knows no L: paragraphs, wider for longer texts
        longest = [4 + max(len(_plain(t)) for t in texts) for texts in zip(heads, *rows, strict=True)]
        # what columns of numbers take, some 0.6 % of a line a character, is not to be shared
        numbers = sum(length for length, k in zip(longest, kinds, strict=True) if k == "r")
        lengths = [length**0.75 * (k != "r") for length, k in zip(longest, kinds, strict=True)]
        free = 1 - 0.0135 * len(heads) - 0.006 * numbers  # between columns, numbers
        shares = [free * length / sum(lengths) for length in lengths]
        paragraph = r">{\raggedright\arraybackslash}p{%.2f\linewidth}"
        kinds = [k if k == "r" else paragraph % share for k, share in zip(kinds, shares, strict=True)]
    latex = f"```{{tabularcolumns}} {''.join(kinds)}\n```\n\n"
    kind = "measured" + " wide" * (len(heads) > _WIDE) + " text" * wrap + " longtable" * long
    return f"{latex}:::{{table}} {caption}\n:name: {name}\n:class: {kind}\n:align: center\n\n{grid}\n:::\n"


def show(
    frame: pd.DataFrame, caption: str, name: str, wrap: bool = False, folded: bool = False,
    digits: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Displays a frame as a captioned table, without its index.

    Args:
        frame: cells are numbers (shown with three significant digits) or texts, which may hold Markdown.
        caption: one sentence, without the table's number.
        name: the label, such as `tab-flash-forward`, unique in the book.
        wrap: whether long cells may break into lines in HTML.
        folded: closed until the reader clicks on the caption, without a number or label, and not in the PDF.
        digits: column → significant digits, where they are not three.

    A frame without rows (nothing of it was measured or chosen) is shown as a table that says so.
    """
    from IPython.display import display

    if frame.empty:  # the label stays, for those who refer to it
        frame = pd.DataFrame({"rows": ["not measured"]})
    frame = printed(frame, digits)
    as_html = to_html(frame, caption, folded)
    only_html = f"```{{raw}} html\n{as_html}\n```"  # which LaTeX leaves out
    as_markdown = only_html if folded else to_markdown(frame, caption, name, wrap)
    as_text = f"{caption}\n{frame.to_string()}"
    display({"text/html": as_html, "text/markdown": as_markdown, "text/plain": as_text}, raw=True)
