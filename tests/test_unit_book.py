"""The notebooks of the book: no outputs, annotated parameters, names that agree with the package."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from cs336_systems import chapters
from cs336_systems.report.coverage import chapters_in_toc
from cs336_systems.store import selection

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
COMMON = ("measure", "preset", "machine", "refresh")


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def parameters(path):
    tagged = [c for c in cells(path) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1, "exactly one cell is tagged parameters"
    return "".join(tagged[0]["source"])


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


@each_notebook
def test_sources_carry_no_outputs(path):
    for cell in cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert "papermill" not in json.loads(path.read_text())["metadata"]


@each_notebook
def test_figures_have_a_text_for_those_who_do_not_see_them(path):
    for shown in (cell["metadata"]["mystnb"] for cell in cells(path) if "mystnb" in cell["metadata"]):
        assert shown["image"]["alt"] not in ("", shown["figure"]["caption"])


@pytest.mark.parametrize("name", chapters.CHAPTERS)
def test_every_measured_chapter_has_a_notebook_with_its_parameters(name):
    path = ROOT / "book" / f"{name}.ipynb"
    names = [s.target.id for s in ast.parse(parameters(path)).body]
    assert tuple(names[:4]) == COMMON
    assert set(names[4:]) <= set(selection.fields(chapters.tables_of(name)))
    assert name in chapters_in_toc(ROOT)


def test_the_table_of_contents_names_what_there_is():
    for name in ["index", *chapters_in_toc(ROOT)]:
        assert list((ROOT / "book").glob(f"{name}.*")), name
    # a link to it in a checkout, a copy in an archive
    assert (ROOT / "book" / "_toc.yml").read_text() == (ROOT / "_toc.yml").read_text()


def test_every_citation_is_in_the_bibliography_and_every_entry_is_cited():
    keys = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "book" / "references.bib").read_text(), flags=re.M))
    text = "".join("".join(c["source"]) for path in NOTEBOOKS for c in cells(path, "markdown"))
    text = re.sub(r"`\{[^}`]*\}(?=[a-z])", "`", text)  # {cite}`{S.}wang2023overlap`: initials before the name
    cited = {key.strip() for group in re.findall(r"\{cite\}`([^`]+)`", text) for key in group.split(",")}
    assert cited == keys


def test_labels_are_unique():
    text = "".join("".join(c["source"]) for path in NOTEBOOKS for c in cells(path))
    labels = re.findall(r'"(tab-[\w-]+)"', text)
    assert len(labels) == len(set(labels))


# -------------------------------------------------------------------------------------------- three kinds of text
UNITS = r"(?:ms|µs|tokens/s|TFLOP/s|GB/s|×|%)"
TYPED = re.compile(rf"\d[\d,.]*[ \u00a0]?{UNITS}(?!\w)")
SHOWS = {"say", "claim", "answer"}


def literals(tree):
    """The texts that code types: strings, and of f-strings the parts between values."""
    nodes = list(ast.walk(tree))
    specs = [node.format_spec for node in nodes if isinstance(node, ast.FormattedValue) and node.format_spec]
    formats = {id(part) for spec in specs for part in ast.walk(spec)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in formats]
    return [node.value for node in texts if isinstance(node.value, str)]


def of_prose(path):
    """The trees of the cells of prose."""
    for cell in cells(path):
        hidden = cell["metadata"].get("jupyter", {}).get("source_hidden")
        if hidden and "remove-input" in cell["metadata"].get("tags", []):
            yield ast.parse("".join(cell["source"]))


@each_notebook
def test_no_measured_number_is_typed(path):
    """A number with a unit is a value; constants of the handout or a data sheet stand in cells tagged so."""
    for cell in json.loads(path.read_text())["cells"]:
        if "constants" in cell["metadata"].get("tags", []):
            continue
        source = "".join(cell["source"])
        texts = [source] if cell["cell_type"] == "markdown" else literals(ast.parse(source))
        assert [m[0] for text in texts for m in TYPED.finditer(text)] == []


@each_notebook
def test_prose_cells_only_assign_and_show(path):
    """No measured value stands in math, and no line begins with a percent sign, which does not reach the page."""
    for tree in of_prose(path):
        for statement in tree.body:
            shown = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            assert isinstance(statement, ast.Assign) or (shown and ast.unparse(statement.value.func) in SHOWS)
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                assert not any("\0" in part for part in text.split("$")[1::2]), ast.unparse(node)
        assert not any(re.search(r"\n\s*%", text) for text in literals(tree))


def test_what_counts_as_typed():
    for text in ("3.62 ms", "1.2×", "12 %", "1,024 tokens/s", "12\u00a0ms"):
        assert TYPED.search(text), text
    for text in ("fp32", "16 heads", "4 msgs", "2 GiB"):
        assert not TYPED.search(text), text
