"""Builds the book: HTML, and the PDF where XeLaTeX is installed. `cs336 book` calls it.

Notebooks are run while building, in the mode that only reads rows; nothing is measured.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from cs336_systems.report.chapter import Chapter, named_machines, reference
from cs336_systems.report.coverage import project_root
from cs336_systems.report.sphinx_ext import PDF_VARIABLE
from cs336_systems.store import process
from cs336_systems.store.files import StoreError, alone, naming
from cs336_systems.store.machine import package_version
from cs336_systems.store.rows import results_root
from cs336_systems.store.table import Table

TablesOf = Callable[[str], list[Table]]
# where the book is made: until it is complete, the one before it stays in its place
MAKING = Path("_build", "making")
OVERFULL_PT = 20.0  # a box that sticks out further than this is seen on the page


class BookError(RuntimeError):
    """The book could not be built, or is not what it should be; the message says what and what to do."""


def build(
    tables_of: TablesOf, pdf: bool = False, strict: bool = False, root: Path | None = None
) -> list[Path]:
    """Builds the book from a checkout and returns what was made: `index.html`, and the PDF.

    Args:
        tables_of: the tables of a chapter; ValueError for a name that is none.
        pdf: also typeset the PDF. A BookError says what is missing, and what installs it.
        strict: refuse a book that quotes rows measured with earlier code, or has a reference chapter with
            cases that are not measured or ended in an error.

    Raises:
        FileNotFoundError: outside a checkout, or without the folder that `$CS336_RESULTS` names.
        ValueError: `$CS336_MACHINE` names a machine without rows, `reference.json` one that is not there; a place
            that cannot be written; with `strict`, a damaged file of rows.
        BookError: a page or the PDF has warnings or errors, or `strict` finds something.
    """
    root = root or project_root()
    results = results_root(root).absolute()
    for chapter in reference(results):  # says what is wrong with it, while the last build is still there
        try:
            tables_of(chapter)
        except ValueError as error:
            raise StoreError(f"{results / 'reference.json'}: {error}") from error
    named_machines(results)
    if strict and (found := problems(tables_of, results)):
        raise BookError("the book quotes rows that are not final:\n  " + "\n  ".join(found))
    if not (found := package_version("jupyter-book") or "none").startswith("1."):
        raise BookError(
            f"the book needs jupyter-book 1.x, not {found}; `pip install -e .` in the checkout brings it"
        )
    if pdf:
        missing_latex()
    # for notebooks, which run in another folder, and for the extension
    variables = {"CS336_RESULTS": str(results), PDF_VARIABLE: str(int(pdf))}
    with alone(root / "_build", print):
        return _built(root, pdf, variables)


def _built(root: Path, pdf: bool, variables: dict[str, str]) -> list[Path]:
    shutil.rmtree(root / MAKING, ignore_errors=True)
    made = [_published(root, _jupyter_book(root, "html", "html/index.html", variables))]
    if pdf:  # of the pages that were read for HTML: Sphinx runs no notebook again
        output = _jupyter_book(root, "pdflatex", "latex/cs336-systems.pdf", variables)
        if bad := latex_complaints(output.with_suffix(".log").read_text(errors="replace")):
            raise BookError("the PDF has flaws, according to its LaTeX log:\n  " + "\n  ".join(bad))
        made.append(_published(root, output))
        shutil.copy(made[1], made[0].parent)  # the pages link to it
    shutil.rmtree(root / MAKING)
    return made


def problems(tables_of: TablesOf, results: Path) -> list[str]:
    """What is not final about the rows of the chapters in a results folder's `reference.json`."""
    quoted = [Chapter(tables_of(name), measure="no", root=results) for name in reference(results)]
    return [problem for chapter in quoted for table in chapter.tables for problem in table.problems()]


def missing_latex() -> None:
    """Raises a BookError with the command to run if XeLaTeX or latexmk is not installed."""
    lacking = [program for program in ("xelatex", "latexmk") if shutil.which(program) is None]
    if lacking:
        raise BookError(
            f"the PDF needs {' and '.join(lacking)}; tools/latex.sh installs what it needs, or names the packages "
            "(the HTML needs none of it: cs336 book without --pdf)"
        )


def _published(root: Path, output: Path) -> Path:
    """Puts the folder of an output that has been made in its place; returns the output's path there."""
    place = root / "_build" / output.parent.name
    shutil.rmtree(place, ignore_errors=True)
    output.parent.rename(place)
    return place / output.name


def _jupyter_book(root: Path, builder: str, output: str, variables: dict[str, str]) -> Path:
    """Makes an output, and returns its path among what is being made. jupyter-book ends with this process."""
    log, made = root / "_build" / f"{builder}.log", root / MAKING / "_build" / output
    with naming("write into", log.parent):
        (root / MAKING).mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    print(f"building {builder}: {log}", flush=True)
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder, open(log, "w") as out:
        # Warnings are errors but all are shown; a relative path to the table of contents would not be found.
        words = [
            "build", str(root / "book"), "--builder", builder, "-W", "--keep-going", "--toc", str(root / "_toc.yml"),
            "--config", str(root / "_config.yml"), "--path-output", str(root / MAKING),
        ]  # fmt: skip
        with process.started(
            Path(folder), "jupyter_book.cli.main:main", {"args": words, "standalone_mode": False},
            os.environ | variables, cwd=root, stdout=out, stderr=subprocess.STDOUT,
        ) as book:  # fmt: skip
            code = book.process.wait()
        error = process.answer(Path(folder)).get("error", "")
    text = log.read_text(errors="replace") + error
    if code or not made.is_file():
        # the log, which would say it, may have had no room either
        if os.strerror(errno.ENOSPC) in text or shutil.disk_usage(log.parent).free < 2**16:
            raise BookError(f"building {builder} failed (exit {code}): no space left in {log.parent}")
        raise BookError(f"building {builder} failed (exit {code}); the end of {log}:\n{_tail(text)}")
    return made


def _tail(text: str) -> str:
    """What a Sphinx log says about the failure: how cells failed, and of which notebooks, else the warnings and errors,
    else its end.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    failed = r"(\S+): WARNING: Executing notebook failed.*?nbclient\.exceptions\.(.*?)\s*\[mystnb\.exec\]"
    where: dict[str, list[str]] = {}
    for notebook, what in re.findall(failed, plain, flags=re.S):
        # without the cell's source, which nbclient puts first: the traceback shows the line
        what = re.sub(r"CellExecutionError: An error .*?\n(-{18}\n).*?\n\1\s*", "", what, flags=re.S)
        where.setdefault(what, []).append(notebook)
    if where:
        return "\n\n".join(f"{', '.join(notebooks)}: {what}" for what, notebooks in where.items())
    lines = plain.splitlines()
    marked = [line for line in lines if re.search(r"\b(WARNING|ERROR|Error):", line)]
    return "\n".join(marked[:20] or lines[-40:])


def latex_complaints(log: str) -> list[str]:
    """What in a LaTeX log a reader would see: missing characters, and boxes that stick out of the page."""
    log = re.sub(r"(?<=.{79})\n", "", log)  # LaTeX breaks its log at 79 characters
    bad = sorted(set(re.findall(r"Missing character: There is no .{1,60}? in font", log)))
    for width, where in re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide\) ([^\n]{0,80})", log):
        if float(width) > OVERFULL_PT:
            bad.append(f"a line or table is {width} pt too wide: {where}")
    return bad
