"""The notebooks of the book: no outputs, annotated parameters, names that agree with the package."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from cs336_systems import experiments
from cs336_systems.report.coverage import chapters_in_toc

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
COMMON = ("measure", "preset", "machine", "refresh")


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def parameters(path):
    tagged = [c for c in cells(path) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1, "exactly one cell is tagged parameters"
    return "".join(tagged[0]["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_sources_carry_no_outputs(path):
    for cell in cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert "papermill" not in json.loads(path.read_text())["metadata"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_parameters_are_annotated_and_explained(path):
    source = parameters(path)
    assert source.startswith("# Parameters")  # how the chapter tells a parameters cell from others
    statements = ast.parse(source).body
    assert statements
    for statement, line in zip(statements, source.splitlines()[1:], strict=True):
        assert isinstance(statement, ast.AnnAssign), line
        assert re.search(r"  # \w", line), f"no comment: {line}"


@pytest.mark.parametrize("name", experiments.CHAPTERS)
def test_every_measured_chapter_has_a_notebook_with_its_parameters(name):
    path = ROOT / "book" / f"{name}.ipynb"
    names = [s.target.id for s in ast.parse(parameters(path)).body]
    assert tuple(names[:4]) == COMMON
    assert set(names[4:]) <= set(experiments.fields(experiments.load(name)))
    assert name in chapters_in_toc(ROOT)


def test_the_table_of_contents_names_what_there_is():
    for name in ["index", *chapters_in_toc(ROOT)]:
        assert list((ROOT / "book").glob(f"{name}.*")), name
    assert (ROOT / "book" / "_toc.yml").resolve() == ROOT / "_toc.yml"


def test_every_citation_is_in_the_bibliography_and_every_entry_is_cited():
    keys = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "book" / "references.bib").read_text(), flags=re.M))
    text = "".join("".join(c["source"]) for path in NOTEBOOKS for c in cells(path, "markdown"))
    cited = {key.strip() for group in re.findall(r"\{cite\}`([^`]+)`", text) for key in group.split(",")}
    assert cited == keys


def test_labels_are_unique():
    text = "".join("".join(c["source"]) for path in NOTEBOOKS for c in cells(path))
    labels = re.findall(r'"(tab-[\w-]+)"', text)
    assert len(labels) == len(set(labels))
