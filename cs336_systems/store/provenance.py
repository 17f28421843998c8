"""Which code a row was measured with: a digest of the files that its table depends on, and what carries over.

    digest(table)                      # "1f0c94ab": of the table's module and the files in its DEPENDS, as they are
    current(table)(case, "1f0c94ab")   # whether a row with that digest is of the code as it is

A row is written once, by the run that measured it, and never edited. Where files change and what is measured does not,
`carry` adds a line to `carried.csv`, beside the machines' folders: for these rows, what was measured with the files as
they were counts as measured with the files as they are, and why. Rows are read through the chain of such lines.

Of Python comments, docstrings and formatting make no difference, of CUDA C++ comments and line ends.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.store import rows as store
from cs336_systems.store.files import StoreError, changing, read_table, replace
from cs336_systems.store.table import Table

PACKAGE = Path(__file__).resolve().parents[1]
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)  # of CUDA C++
_SILENT = ("ctx", "kind", "type_comment", "type_ignores")  # fields of syntax that say nothing
# Digests as another checkout's code makes them. Editable installs would lend it the modules that it lacks.
_THERE = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "sys.meta_path[:] = [x for x in sys.meta_path if '__editable__' not in getattr(x, '__module__', '')]; "
    "from cs336_systems import chapters; from cs336_systems.store import provenance; "
    "print(json.dumps({t: provenance.digest(chapters.load(t)) for t in sys.argv[2:]}))"
)


# ------------------------------------------------------------------------------------------------ digests
def digest(table: Table) -> str:
    """Eight hexadecimal digits of the files that a table's numbers depend on."""
    parts = []
    for file in (table.source, *(PACKAGE / name for name in table.depends)):
        stamp = file.stat()
        parts.append(_of_file(file, stamp.st_mtime_ns, stamp.st_size))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:8]


def digest_as_begun(table: Table) -> str:
    """`digest` as this process found it first. A module that has been imported stays what it was, whatever becomes of
    its file: what a notebook's kernel measures is not measured with files that were edited meanwhile."""
    return _begun.setdefault(table.source, digest(table))


_begun: dict[Path, str] = {}  # a table's module → digest


@functools.cache
def _of_file(file: Path, modified: int, size: int) -> bytes:
    text = file.read_text(encoding="utf-8")
    kept = syntax(ast.parse(text)) if file.suffix == ".py" else " ".join(without_comments(text).split())
    return hashlib.sha256(kept.encode()).digest()


def syntax(node: Any) -> str:
    """A syntax tree as text, alike on every Python that reads it: without docstrings, and without empty fields, which
    some Pythons lack."""
    if isinstance(node, list):
        return f"[{','.join(syntax(item) for item in node if not _says_nothing(item))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    if isinstance(node, ast.JoinedStr):  # whose constants some Pythons split
        grouped = itertools.groupby(node.values, key=lambda part: isinstance(part, ast.Constant))
        node = ast.JoinedStr([
            part for constant, parts in grouped
            for part in ([ast.Constant("".join(p.value for p in parts))] if constant else parts)
        ])  # fmt: skip
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _SILENT]
    told = " ".join(f"{name}={syntax(value)}" for name, value in fields if value is not None and value != [])
    return f"({type(node).__name__} {told})"


def _says_nothing(item: Any) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)


def without_comments(source: str) -> str:
    """CUDA C++ without its comments."""
    return _COMMENT.sub(" ", source)


# ------------------------------------------------------------------------------------------------ what is carried
class Line(NamedTuple):
    """A line of `carried.csv`: of a table the rows of a digest that count as measured with another one.

    rows: "field=value,value" of their case, separated by spaces (values may hold some); all where it is empty.
    """

    table: str
    rows: str
    before: str
    after: str
    date: str
    because: str

    def selects(self, case: Mapping[str, str]) -> bool:
        """Whether a case, field → text, is among its rows."""
        wanted = (part.partition("=") for part in re.split(r"\s+(?=\w+=)", self.rows) if part)
        return all(case.get(field) in values.split(",") for field, _, values in wanted)


def carried(root: Path | None = None) -> list[Line]:
    """The lines of a results folder's `carried.csv`; StoreError where it is damaged."""
    path = (root or store.results_root()) / "carried.csv"
    columns, found = read_table(path)
    if found and tuple(columns) != Line._fields:
        raise StoreError(f"{path}: columns {', '.join(columns)}; expected {', '.join(Line._fields)}")
    return [Line(**cells) for _, cells in found]


def _reached(code: str, case: Mapping[str, str], lines: Sequence[Line]) -> set[str]:
    """The digests that a row's counts as: its own, and those that it is carried over to."""
    reached: set[str] = set()
    more = {code}
    while more:
        reached |= more
        more = {line.after for line in lines if line.before in more and line.selects(case)} - reached
    return reached


def current(table: Table, root: Path | None = None) -> Callable[[Sequence[Any], str], bool]:
    """Of a row's case (values in the order of its fields) and its `code`: whether that code is, or is carried over to,
    the code as it is."""
    now, fields, name = digest(table), store.case_fields(table), table.name
    lines = [line for line in carried(root) if line.table == name]
    return lambda case, code: now in _reached(code, dict(zip(fields, map(str, case), strict=True)), lines)


def carry(
    tables: Sequence[Table],
    commit: str,
    where: Mapping[str, str],
    because: str,
    root: Path | None = None,
) -> list[tuple[str, int]]:
    """Carries rows of some tables over from the files as they were at a commit to the files as they are.

    where: field → values, separated by commas, of the rows that are meant; all where it is empty.
    Returns table → how many rows of all machines became current. ValueError where there is no such commit, field, value
    or row, and where nothing has changed; then nothing is written.
    """
    if not because.strip():
        raise ValueError("because is empty: say why what is measured is the same")
    root = root or store.results_root()
    before, today = digests_at(commit, tables), f"{datetime.now(UTC):%Y-%m-%d}"
    chosen = " ".join(f"{field}={values}" for field, values in where.items())
    lines, counts = [], []
    for table in tables:
        name = table.name
        line = Line(name, chosen, before[name], digest(table), today, because)
        of_before = _leading_to(line, table, where, root)
        if line.before == line.after:
            raise ValueError(
                f"{name}: its files are as they were at {commit}; there is nothing to carry over"
            )
        if not of_before:
            raise ValueError(f"{name}: no such row was measured with the code of {commit} ({line.before})")
        lines.append(line)
        counts.append((name, of_before))
    with changing(root):
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([Line._fields, *carried(root), *lines])
        replace({root / "carried.csv": out.getvalue()})
    return counts


def _leading_to(line: Line, table: Table, where: Mapping[str, str], root: Path) -> int:
    """How many rows that the line selects have, or are carried over to, its `before`."""
    fields = store.case_fields(table)
    if unknown := [field for field in where if field not in fields]:
        raise ValueError(f"{line.table} has no field {unknown[0]!r}; allowed: {', '.join(fields)}")
    cases = [
        (dict(zip(fields, map(str, key), strict=True)), row["code"])
        for path in sorted(root.glob(f"*/{line.table}.csv"))
        for key, row in store.load(table, path).items()
    ]
    for field, values in where.items():
        known = sorted({case[field] for case, _ in cases})
        for value in values.split(","):
            if value not in known:
                raise ValueError(f"{field}={value}: no row of {line.table}; allowed: {', '.join(known)}")
    older = [other for other in carried(root) if other.table == line.table]
    return sum(line.selects(case) and line.before in _reached(code, case, older) for case, code in cases)


def digests_at(commit: str, tables: Sequence[Table]) -> dict[str, str]:
    """Table → its digest at a commit of the checkout around this package, by the code of that commit."""
    names = [table.name for table in tables]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(PACKAGE.parent), "archive", commit, PACKAGE.name], capture_output=True
        )
        if archive.returncode:
            raise ValueError(f"commit {commit}: {archive.stderr.decode(errors='replace').strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        done = subprocess.run([sys.executable, "-c", _THERE, folder, *names], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"commit {commit}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)
