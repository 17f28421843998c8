"""`cs336 book --claims`: what is wrong with a small book's sentences, and with those of this one on changed rows."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from typer.testing import CliRunner

from cs336_systems.chapters.index import show as index
from cs336_systems.cli import main as cli
from cs336_systems.report import claims, coverage


def notebook(path, *sources, tags=()):
    cells = [{"cell_type": "code", "metadata": {"tags": list(tags)}, "source": source} for source in sources]
    path.write_text(json.dumps({"cells": cells}))


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of one chapter that answers all parts but one."""
    (tmp_path / "book").mkdir()
    (tmp_path / "_toc.yml").write_text("chapters:\n  - file: one\n  - file: references\n")
    notebook(tmp_path / "book" / "index.ipynb", "x = 1")
    for place in (claims, coverage):
        monkeypatch.setattr(place, "parts", lambda chapter="": ["a (a)", "a (b)"] * (chapter in ("", "one")))
    monkeypatch.setattr(claims.prose, "made", [])
    return tmp_path


START = "from cs336_systems.report.prose import Number, answer, claim"


def test_sentences_that_fail_and_parts_without_an_answer_are_one_list(book):
    notebook(
        book / "book" / "one.ipynb", START, "n = Number(2.0)", "claim('Two is three.', n == 3)",
        "answer('a (a)', f'It is {n:1}.', n > 1, brief='Yes.')", "claim('Unknown.', None)",
    )  # fmt: skip
    wrong, narrow = claims.check(book)
    assert wrong == ["one: “Two is three.”\n    2.000 == 3", "no answer to a (b)"] and narrow == []


def test_the_first_page_gathers_what_chapters_answer_in_brief(book):
    notebook(
        book / "book" / "one.ipynb", START, "n = Number(2.0)", "_ = 1 / 0  # a figure",
        "answer('a (a)', f'It is {n:1}.', n > 1, brief=f'{n:1}.'); ran = True",
        "answer('a (b)', 'Three.', n == 3, brief='Three.')",
        "answer('a (c)', 'Four.', brief=f'{Number(float(\"nan\"), \"not measured: four\")}')", "1 / 0  # nobody asks",
    )  # fmt: skip
    found = index.briefs(book)
    assert found["a (a)"] == "2." and found["a (b)"].startswith("Three. **[")
    assert found["a (c)"] == "*Not measured: four.*"
    assert claims.prose.made == [] and index.briefs(book) == found


def test_what_a_cell_raises_names_the_notebook_and_the_cell(book):
    notebook(book / "book" / "one.ipynb", START, "1 / 0")
    with pytest.raises(ZeroDivisionError) as caught:
        claims.check(book)
    assert caught.value.__notes__ == [f"in cell 2 of {book / 'book' / 'one.ipynb'}"]


def test_parameters_replace_the_notebooks_own(tmp_path):
    path = tmp_path / "n.ipynb"
    notebook(path, "size = 1", tags=["parameters"])
    parts = json.loads(path.read_text())
    parts["cells"].append(
        {"cell_type": "code", "metadata": {}, "source": f"{START}\nclaim(f'{{size}}', True)"}
    )
    path.write_text(json.dumps(parts))
    assert [s.text for s in claims.execute(path, size=7)[0]] == ["7"]


@pytest.fixture
def results(project_root, tmp_path, monkeypatch):
    """A copy of the reference rows, to be changed."""
    copy = tmp_path / "results"
    shutil.copytree(project_root / "results", copy)
    monkeypatch.setenv("CS336_RESULTS", str(copy))
    monkeypatch.chdir(project_root)
    return copy


def outcomes(project_root, chapter):
    return [s.outcome for s in claims.execute(project_root / "book" / f"{chapter}.ipynb")[0]]


def test_rows_that_contradict_a_sentence_fail_and_missing_ones_do_not(results, project_root):
    path = results / "h200-x1" / "leaderboard.csv"
    rows = pd.read_csv(path)
    peer = (rows["impl"] == "fa4") & (rows["leaves"] == "stacked")
    rows.assign(ms_p50=rows["ms_p50"].where(~peer, rows["ms_p50"] * 0.8)).to_csv(path, index=False)
    assert False in outcomes(project_root, "leaderboard")
    rows[~peer].to_csv(path, index=False)
    found = outcomes(project_root, "leaderboard")
    assert None in found and False not in found


def test_the_command_fails_on_a_sentence_and_names_it(monkeypatch):
    monkeypatch.setattr(claims, "check", lambda root: (["one: “No.”\n    2 == 3"], ["one: “Nearly.”\n    x"]))
    result = CliRunner().invoke(cli.app, ["book", "--claims"])
    assert result.exit_code == 1 and "one: “No.”\n    2 == 3" in result.output
    assert "narrow: one: “Nearly.”" in result.output and "1 sentences or answers to mend" in result.output
    monkeypatch.setattr(claims, "check", lambda root: ([], []))
    assert CliRunner().invoke(cli.app, ["book", "--claims"]).exit_code == 0
