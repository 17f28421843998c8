"""Short stories for children with a known entropy: text to train on without a network, a license or a limit of size.

A grammar with a state (`stories.txt`) tells them: who is where, has what, and what happened, decide what can come next.
Every choice shows in the text before the next one: up to there the texts of its alternatives differ, and none begins
with another. So a text can be read back choice by choice, and -log p(text) is the sum of -log p(choice): a language
model's floor.

    name: a text|3*another; ...     tables; the second alternative is three times as likely
    name = word word/words word~    words, the first the likeliest; / plural or past, ~ she, _ a blank
    name > key: text; key: text     the tables name.key
    <name> <name.x> [this|that]     one alternative; one of the table name.VALUE, or else `name`, for the value of x
    {x:name} {-x:name}              an alternative not yet drawn from `name` in this story, now called x (-: silently)
    {x} {an x} {x.s} {x.He} {he}    that text; its article; plural or past; a person's pronoun, that of a
    {x=y}                           silently: x is what y is, or the word y
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, count
from math import fsum, inf, log
from pathlib import Path
from random import Random
from typing import Any

_FORMS = ("", "an", "An", "s", "Up", "he", "his", "him", "He", "His", "self")
_PIECE = re.compile(r"\{(.*?)\}|<(.*?)>|(\d+)\*|([\[|\]])|([^{<\[|\]\d]+)")
_FIELD = re.compile(r"(-?)(?:([Aa]n) )?(\w*)(?:\.(\w+))?(?::(\w+)\.?(\w*)\.?(\w*))?|(\w+)=(\w+)")
_BLOCK = 512  # stories that a process makes at a time


@dataclass(frozen=True)
class Story:
    text: str  # one line
    nats: float  # -log p(text)


class Table:
    """Alternatives: weights, lists of steps (see `tell`) with the last first, the forms of those that are a word."""

    def __init__(self, weights: list[int], steps: list[list]) -> None:
        self.weights, self.steps = weights, steps
        self.words = [_forms(step[0]) for step in steps if len(step) == 1 and type(step[0]) is str]
        self.cumulative = list(accumulate(weights))
        self.nats = [log(self.cumulative[-1] / weight) if weight else inf for weight in weights]

    def without(self, drawn: list[tuple]) -> Table:
        weights = [0 if word in drawn else w for word, w in zip(self.words, self.weights, strict=True)]
        return Table(weights, self.steps)


@cache
def _forms(text: str) -> tuple[str, ...]:
    """`fox`, `goose/geese`, `Mia~`: a text in all `_FORMS`."""
    one, _, many = text.removesuffix("~").partition("/")
    article = ("an " if one[0] in "aeiou" else "a ") + one
    many = many or re.sub("([^aeiou])y$", r"\1ie", one) + "e" * bool(re.search("(s|x|ch|sh)$", one)) + "s"
    person = "she her her She Her herself" if text[-1] == "~" else "he his him He His himself"
    return (one, article, "A" + article[1:], many, one[0].upper() + one[1:], *person.split())


def _table(pieces: Iterator[tuple[str, ...]]) -> Table:
    """The alternatives before the next closing bracket."""
    weights, steps = [1], [[]]
    for field, name, weight, mark, text in pieces:
        if mark == "]":
            break
        if mark == "|":
            weights.append(1)
            steps.append([])
        elif weight:
            weights[-1] = int(weight)
        elif mark or text:
            steps[-1].append(text or _table(pieces))
        else:
            steps[-1] += _field(field or f"-:{name}")
    return Table(weights, [alternative[::-1] for alternative in steps])


def _field(field: str) -> list[tuple]:
    silent, an, x, form, name, by, by_form, to, source = _FIELD.fullmatch(field).groups("")
    if to:
        return [(to, source)]
    if x in _FORMS[5:]:
        x, form = "a", x
    choice = [(name, by, _FORMS.index(by_form), x)] if name else []
    return choice if silent else [*choice, (x, _FORMS.index(an or form))]


def _tables(grammar: str) -> dict[str, Table]:
    tables = {}
    for family, body in re.findall(r"^(?:(\w+) > )?(\S.*(?:\n .*)*)", grammar, re.MULTILINE):
        for definition in re.split(r";\s+", re.sub(r"\s+", " ", body)):
            name, kind, texts = re.fullmatch(r"(.+?)(:| =) (.*)", definition).groups()
            if kind == ":":
                table = _table(iter(_PIECE.findall(texts)))
            else:
                words = [[word.replace("_", " ")] for word in texts.split()]
                table = Table([2520 // (rank + 8) for rank in range(len(words))], words)
            tables[f"{family}.{name}" if family else name] = table
    return tables


TABLES = _tables(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def tell(choose: Callable[[Table], int], todo: list, bound: dict, drawn: dict, said: list[str]) -> None:
    """Takes the steps `todo`, the last first; `choose` gets a table, its step still in `todo`, and returns a number.

    A step: a text to say; a table to choose from; (x, form) says what x is bound to; (x, y) binds x to what y is, or to
    the word; (name, x, form, to) chooses from the table for the value of x, and, with a name `to`, binds that.
    """
    while todo:
        step = todo[-1]
        if step.__class__ is str:
            said.append(todo.pop())
        elif step.__class__ is tuple and len(step) == 2:
            x, what = todo.pop()
            if what.__class__ is int:
                said.append(bound[x][what])
            else:
                bound[x] = bound.get(what) or _forms(what)
        else:
            table, to = step, ""
            if step.__class__ is tuple:
                name, x, form, to = step
                table = TABLES.get(f"{name}.{bound[x][form]}") or TABLES[name] if x else TABLES[name]
                if to and name in drawn:
                    table = table.without(drawn[name])
            chosen = choose(table) if len(table.steps) > 1 else 0
            todo.pop()
            if to:
                bound[to] = table.words[chosen]
                drawn.setdefault(name, []).append(bound[to])
            else:
                todo += table.steps[chosen]


def story(seed: int, index: int) -> Story:
    """A story, the same on every machine. ValueError unless the seed is at least 0, and the index 0 ... 2**64 - 1."""
    if seed < 0 or not 0 <= index < 2**64:
        raise ValueError(f"story {index} of seed {seed}; allowed: seeds from 0, stories 0 to {2**64 - 1}")
    random, said, nats = Random(seed << 64 | index).random, [], []

    def choose(table: Table) -> int:
        chosen = bisect(table.cumulative, random() * table.cumulative[-1])
        nats.append(table.nats[chosen])
        return chosen

    tell(choose, [TABLES["story"]], {}, {}, said)
    return Story("".join(said), fsum(nats))


def stories(seed: int, start: int = 0, each: Callable[..., Any] = map) -> Iterator[Story]:
    """The stories of a seed from number `start` on, without end. each: `map`, or that of a `store.pool.Pool`, whose
    processes then tell them in blocks."""
    return chain.from_iterable(each(partial(_block, seed), count(start, _BLOCK)))


def _block(seed: int, start: int) -> list[Story]:
    return [story(seed, index) for index in range(start, start + _BLOCK)]
