"""Building the book, the README's numbers, and what a LaTeX log tells."""

from __future__ import annotations

import json

import pytest

from cs336_systems.report import build, headline, readme, sphinx_ext
from cs336_systems.report.coverage import project_root as find_root


def test_latex_log():
    log = (
        "Overfull \\hbox (3.2pt too wide) in paragraph at lines 1--2\n"
        "Overfull \\hbox (120.5pt too wide) in paragraph at lines 700--700\n"
        "Missing character: There is no ⊤ in font FreeSerif!\n"
    )
    found = build.latex_complaints(log)
    assert len(found) == 2
    assert "120.5 pt" in found[1]
    assert build.latex_complaints("Underfull \\hbox (badness 10000)\n") == []


def test_missing_latex_is_named(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda program: None)
    with pytest.raises(build.BookError, match=r"xelatex and latexmk.*apt-get install .*texlive-xetex"):
        build.missing_latex()


def test_outside_a_checkout_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="inside a checkout"):
        find_root()


def test_injected_cells_are_left_out_of_the_page():
    cell = {"cell_type": "code", "id": "a", "metadata": {"tags": ["injected-parameters"]}, "source": "x = 1"}
    cell |= {"execution_count": None, "outputs": []}
    text = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    assert "remove-cell" in sphinx_ext.read_notebook(text).cells[0].metadata["tags"]


def test_readme_is_rewritten_between_its_markers_only(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "reference.json").write_text("{}")
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    new = readme.rewritten(text, tmp_path)
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert readme.rewritten(new, tmp_path) == new
    with pytest.raises(ValueError, match="once each"):
        readme.rewritten("nothing", tmp_path)


def test_headline_without_rows(results_root):
    assert headline.table().empty
    assert "not been measured" in headline.sentence()
