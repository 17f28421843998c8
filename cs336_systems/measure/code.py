"""The digest of the code that a row was measured with: of sources, so that it can be checked where there is no git."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_WRAPPERS = {"dataclass", "contextmanager", "cache"}  # decorators that do nothing but wrap
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def bare_source(text: str) -> str:
    """Python source without comments, docstrings, blank lines, trailing blanks; alike on every Python."""
    lines = text.split("\n")  # splitlines would also split at form feeds, where tokenize and ast don't
    drop: list[tuple[int, int, int, int]] = []  # first line, first byte, last line, byte after the last
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:  # tokenize counts columns in characters, ast in bytes
            row, left = token.start[0], len(lines[token.start[0] - 1][: token.start[1]].encode())
            drop.append((row, left, row, left + len(token.string.encode())))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _DOCUMENTED):
            continue
        for doc in node.body[:1]:
            value = doc.value if isinstance(doc, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                drop.append((doc.lineno, doc.col_offset, doc.end_lineno, doc.end_col_offset))
    encoded = [line.encode() for line in lines]
    for top, left, bottom, right in sorted(drop, reverse=True):
        encoded[top - 1] = encoded[top - 1][:left] + encoded[bottom - 1][right:]
        for i in range(top, bottom):
            encoded[i] = b""
    return "\n".join(line.decode().rstrip() for line in encoded if line.strip())


def module_files(module: str) -> list[Path]:
    """The source files of a module or package of this project, found without importing it."""
    path = _PACKAGE.parent / Path(*module.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if not files or not all(f.is_file() for f in files):
        raise FileNotFoundError(f"no source for module {module!r} under {_PACKAGE.parent}")
    return files


def reached(text: str, roots: tuple[str, ...]) -> str:
    """The top-level statements of Python source that definitions named in `roots` need, in their order.

    A definition or an import is needed where its name stands in a needed statement, in a string too (of a function that
    another process calls); other statements always are. Two things are not seen: an import for its effect alone, and
    names that are put together while running.
    """
    lines, needs, statements = text.split("\n"), set(roots), []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        statements.append((node, "\n".join(lines[first - 1 : node.end_lineno])))
    left, kept = list(range(len(statements))), set()
    while found := [i for i in left if (names := _bound(statements[i][0])) is None or names & needs]:
        for i in found:
            needs |= _mentioned(statements[i][0])
        kept.update(found)
        left = [i for i in left if i not in kept]
    return "\n".join(statements[i][1] for i in sorted(kept))


def _bound(node: ast.stmt) -> set[str] | None:
    """The names that a statement defines; None for one that may do more than that."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        wrapped = {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
        return {node.name} if {name.split(".")[-1] for name in wrapped} <= _WRAPPERS else None
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        return None if "*" in names else names
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(
            isinstance(x, ast.Name | ast.Tuple | ast.Load | ast.Store) for t in targets for x in ast.walk(t)
        ):
            return {x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)} - {"_"} or None
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse:
        return set()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # the module's docstring
        return set()
    return None


def _mentioned(node: ast.stmt) -> set[str]:
    """Every name that stands in a statement: variables, attributes, words of strings that are no docstrings."""
    docstrings = {
        x.body[0].value
        for x in ast.walk(node)
        if isinstance(x, _DOCUMENTED)
        and isinstance(x.body[0], ast.Expr)
        and isinstance(x.body[0].value, ast.Constant)
    }
    found: set[str] = set()
    for x in ast.walk(node):
        if x in docstrings:
            continue
        if isinstance(x, ast.Name):
            found.add(x.id)
        elif isinstance(x, ast.Attribute):
            found.add(x.attr)
        elif isinstance(x, ast.Constant) and isinstance(x.value, str):
            found.update(re.findall(r"\w+", x.value))
    return found


def _taken(text: str, module: str) -> set[str]:
    """What Python source imports from a module."""
    froms = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == module
    ]
    return {alias.name for node in froms for alias in node.names}


def code_digest(experiment: ModuleType, case: Any = None) -> str:
    """Eight hexadecimal digits of the sources that the numbers of a case depend on: the modules that the experiment
    names for it, and of its own what `run_group` needs. Which cases there are makes no difference; which one it is does
    where the experiment has `also_measures`."""
    return code_digests(experiment)(case)


def code_digests(experiment: ModuleType) -> Callable[[Any], str]:
    """`code_digest` of an experiment's cases, its sources read once."""
    own = Path(experiment.__file__).read_text(encoding="utf-8")

    @functools.cache
    def of_modules(modules: tuple[str, ...]) -> str:
        files = sorted({file for module in modules for file in module_files(module)})
        texts = [file.read_text(encoding="utf-8") for file in files]
        taken = {name for text in texts for name in _taken(text, experiment.__name__)}
        digest = hashlib.sha256(bare_source(reached(own, ("run_group", "GROUP", *taken))).encode())
        for text in texts:
            digest.update(bare_source(text).encode())
        return digest.hexdigest()[:8]

    more = getattr(experiment, "also_measures", lambda case: ())
    return lambda case: of_modules((*experiment.MEASURES, *more(case)))
