"""The digest of the code that a row was measured with: of sources, so that it can be checked where there is no git."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parents[1]


def bare_source(text: str) -> str:
    """Python source without comments, docstrings, blank lines, trailing blanks; alike on every Python."""
    lines = text.split("\n")  # splitlines would also split at form feeds, where tokenize and ast don't
    drop: list[tuple[int, int, int, int]] = []  # first line, first byte, last line, byte after the last
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:  # tokenize counts columns in characters, ast in bytes
            row, left = token.start[0], len(lines[token.start[0] - 1][: token.start[1]].encode())
            drop.append((row, left, row, left + len(token.string.encode())))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
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


def code_digest(experiment: ModuleType) -> str:
    """Eight hexadecimal digits of the sources that the experiment's numbers depend on, itself included."""
    files = {file for module in experiment.MEASURES for file in module_files(module)}
    digest = hashlib.sha256()
    for file in sorted(files | {Path(experiment.__file__).resolve()}):
        digest.update(bare_source(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:8]
