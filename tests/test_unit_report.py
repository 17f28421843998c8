"""The report room: parameters checked, rows joined with the grid, numbers as words, tables and figures."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import step_rows

from cs336_systems import chapters, report
from cs336_systems.chapters.hardware.roofs import Roofs, roofs
from cs336_systems.chapters.index import show as index
from cs336_systems.report import coverage, figures, tables
from cs336_systems.report.values import published
from cs336_systems.store import rows as store
from cs336_systems.store.machine import machine_name
from cs336_systems.store.provenance import digest

EXPERIMENT = chapters.load("hardware")


def write_rows(root, machine="cpu-9", code=None, keep=lambda case: True, metrics=None):
    """Rows of the smoke preset: 0.5 TFLOP/s, 0.02 TB/s, 2 µs a launch."""
    code = digest(EXPERIMENT) if code is None else code
    numbers = {"tflops": 0.5, "tb_per_s": 0.02, "us_per_launch": 2.0, "ms_p50": 4.0}
    rows = [
        dataclasses.asdict(case)
        | {"status": "ok", "run": f"{case.kind}-{case.size}", "time_utc": "2025-03-04T05:06:07Z"}
        | {"env": "abcd", "code": code}
        | numbers
        | (metrics(case) if metrics else {})
        for case in EXPERIMENT.grid("smoke")
        if keep(case)
    ]
    store.write(EXPERIMENT, machine, rows, root)
    env = {"abcd": {"cpu": "a CPU", "cores": 9, "torch": "2.13.0", "triton": "3.7.1"}}
    step_rows.spell_out(env, root, machine)
    (root / "reference.json").write_text(json.dumps({"hardware": [machine]}))


def chapter(**options):
    return chapters.read("hardware", **{"measure": "no", **options})


# --------------------------------------------------------------------------------- parameters
def test_when_it_measures(results_root, monkeypatch):
    write_rows(results_root)
    for value in ("false", "False", False, "no"):  # what papermill makes of it
        assert not chapters.read("hardware", measure=value).measuring
    assert not chapters.read("hardware", machine="cpu-9").measuring
    monkeypatch.setenv("CS336_BOOK_BUILD", "1")  # while the book is built nothing does
    found = chapters.read("hardware", measure="auto")
    assert found.machines == ["cpu-9"] and not found.measuring


def test_a_folder_that_is_not_there_is_not_read(results_root, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        chapter(root=results_root / "nowhere")
    monkeypatch.setenv("CS336_RESULTS", str(results_root / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        chapter()


def test_a_misspelled_injected_parameter_is_refused(results_root):
    names = {"measure": "no", "dtype": "all", "datatype": "bf16"}
    names["In"] = ["", "# Parameters\nx: int = 1", "# Parameters\ndatatype = 'bf16'\n"]
    with pytest.raises(ValueError, match=r"datatype; allowed: .*dtype"):
        chapters.opened("hardware", names)
    good = {"measure": "no", "dtype": "bf16", "scratch": 3}
    good["In"] = ["# Parameters\ndtype: str = 'bf16'", "scratch = 3"]
    assert chapters.opened("hardware", good).filters == {"dtype": "bf16"}


def test_what_is_wrong_with_a_notebook_is_shown_as_one_line(results_root, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    said = []
    shell = InteractiveShell()
    monkeypatch.setattr(shell, "_showtraceback", lambda kind, error, lines: said.append(lines))
    shell.push({"chapters": chapters, "report": report})
    opened = "chapters.opened('hardware', {'measure': 'no', 'dtype': 'fp7'})"
    for cell in (opened, "report.given_parameters({'In': ['# Parameters\\nmachines = 1']}, ['machine'])"):
        assert not shell.run_cell(cell).success
    [one, other] = said
    assert len(one) == 1 and "dtype=fp7" in one[0] and "bf16" in one[0]
    assert len(other) == 1 and "machines; allowed: machine" in other[0]


def test_the_machine_variable_replaces_the_reference_machines(results_root, monkeypatch):
    write_rows(results_root)
    (results_root / "cpu-7").mkdir()
    (results_root / "reference.json").write_text('{"hardware": ["cpu-9", "cpu-9"]}')
    assert chapter().machines == ["cpu-9"]  # each once
    monkeypatch.setenv("CS336_MACHINE", "cpu-9, cpu-7,cpu-9")
    assert chapter().machines == ["cpu-9", "cpu-7"]
    monkeypatch.setenv("CS336_MACHINE", "this")
    assert chapter().machines == [machine_name()]
    monkeypatch.setenv("CS336_MACHINE", "cpu-9, cpu-70")
    for options in ({}, {"machine": "cpu-9"}, {"measure": "auto"}):
        with pytest.raises(ValueError, match="CS336_MACHINE: unknown machine 'cpu-70'; allowed: this, cpu-7"):
            chapter(**options)


# --------------------------------------------------------------------------------- rows
def test_cases_without_rows_read_not_measured(results_root):
    write_rows(results_root, keep=lambda case: case.kind == "copy")
    frame = chapter().rows()
    assert len(frame) == len(EXPERIMENT.grid("smoke"))
    assert set(frame[frame["kind"] == "copy"]["status"]) == {"ok"}
    assert set(frame[frame["kind"] != "copy"]["status"]) == {report.NOT_MEASURED}
    (results_root / "reference.json").write_text("{}")  # without any machine it has the full grid
    found = chapter()
    assert len(found.rows()) == len(EXPERIMENT.grid("full")) and report.NOT_MEASURED in found.provenance()


def test_filters_choose_rows_and_unknown_fields_are_refused(results_root):
    write_rows(results_root)
    assert set(chapter(kind="copy").rows()["kind"]) == {"copy"}
    assert len(chapter().rows(kind=["copy", "matmul"])) == len(chapter(kind="copy,matmul").rows())
    with pytest.raises(ValueError, match="machine, kind"):
        chapter().rows(sort="copy")
    rows = chapter(kind="matmul").rows()
    [first, *_] = sizes = list(rows["size"].unique())
    for several in (set(sizes), np.array(sizes), range(max(sizes) + 1), pd.Series(sizes)):
        assert len(tables.chosen(rows, size=several)) == len(rows)
    for text in (str(first), [first, str(first)]):
        with pytest.raises(ValueError, match=f"size='{first}'; the column holds numbers, such as {first}"):
            tables.chosen(rows, size=text)
    # of a column without a value nobody knows what it holds
    assert tables.chosen(rows.assign(size=math.nan), size="large").empty


def test_skipped_cases_do_not_count_as_measured(results_root):
    skipped = {"status": "skipped: needs a GPU", "tb_per_s": None}
    write_rows(results_root, metrics=lambda case: skipped if case.kind == "copy" else {})
    frame = chapter().rows()
    measured = int((frame["kind"] != "copy").sum())
    assert measured < len(frame) and f": {measured} cases. Rows: " in chapter().provenance()


def test_rows_of_earlier_code_are_said_and_are_a_problem(results_root):
    for code in (None, "00000000"):
        write_rows(results_root, code=code)
        for found in (" ".join(chapter().problems()), chapter().provenance()):
            assert ("earlier code" in found) == (code is not None)
    assert f"{len(chapter().rows())} of `hardware`" in chapter().provenance()


ODD = {
    "without a number": {"tflops": None, "tb_per_s": None, "us_per_launch": None, "ms_p50": None},
    "with a negative number": {"ms_p50": -0.1},
    "memory that other processes held": {"status": "oom: other processes held 7 GiB"},
    "in an error": {"status": "error: KeyError"},
}


@pytest.mark.parametrize("what", ODD)
def test_odd_rows_are_a_problem(results_root, what):
    write_rows(results_root, metrics=lambda case: ODD[what] if case.kind == "launch" else {})
    count = len(chapter().rows(kind="launch"))
    [found] = chapter().problems()
    assert f": {count} of " in found and what in found
    write_rows(results_root, metrics=lambda case: {"error": -1.0})  # a difference
    assert not chapter().problems()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"hardware": ["h9000"]}', "unknown machine 'h9000'; allowed: cpu-9"),
        ('{"hardware": "cpu-9"}', "hardware: 'cpu-9'; expected a list"),
        ('{"hardware": [], "hardware": ["cpu-9"]}', "'hardware' twice"),
        ("[" * 10**5, "recursion"),
        ('{"hardware": [', "line 1"),
    ],
)
def test_what_is_wrong_with_reference_json_is_said(results_root, text, named):
    write_rows(results_root)
    (results_root / "reference.json").write_text(text)
    with pytest.raises(ValueError, match=rf"reference\.json.*{named}"):
        chapter()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("what;value\n", "lacks the columns what"),
        ("what,value,hardware,source\na,fast,,\n", "line 2: value=fast: expected a number"),
        ("what,value,hardware,source\na,-1,,\n", "line 2: value=-1: expected a number above 0"),
        ("what,value,hardware,source\na,1\n", "line 2: 2 cells"),
    ],
)
def test_what_is_wrong_with_published_figures_is_said(results_root, text, named):
    (results_root / "published.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"published\.csv.*{named}"):
        published("a")


# --------------------------------------------------------------------------------- words and tables
def test_fmt():
    for value, text in [
        (1.0468, "1.05"), (9.996, "10.0"), (41.53, "41.5"), (712.4, "712"), (4096, "4,096"), (123456.7, "123,000"),
        (0.000123, "0.000123"), (2.41e-7, "2.41e−7"), (-0.5, "−0.500"), (0.0, "0"), (math.nan, "–"), (None, "–"),
        (np.float32("nan"), "–"), (pd.NA, "–"), (-math.inf, "−∞"),
        ("oom", "oom"), (True, "True"),
    ]:  # fmt: skip
        assert tables.fmt(value) == text


def test_tables_have_both_renderings():
    frame = tables.printed(pd.DataFrame({"impl": ["a|b", "`c`"], "ms": [1.0468, None]}))
    text = tables.to_markdown(frame, "Times.", "tab-x")
    parts = (":::{table} Times.", ":name: tab-x", "tabularcolumns} lr", r"| a\|b | 1.05 |")
    assert all(part in text for part in parts)
    page = tables.to_html(frame, "Times & <more>")
    assert "Times &amp; &lt;more&gt;" in page and "<code>c</code>" in page
    assert "color" not in page  # the page's own colours, light or dark
    # only long texts of short words break in the PDF
    long = pd.DataFrame({"a": ["anidentifier" * 4], "b": ["several words " * 3], "c": "d"})
    assert "tabularcolumns} lLl" in tables.to_markdown(long, "Steps.", "tab-x", wrap=True)
    assert "tabularcolumns} lll" in tables.to_markdown(long, "Steps.", "tab-x")
    # of several pages: its columns are paragraphs
    pages = tables.to_markdown(pd.concat([long] * 20), "Steps.", "tab-x", wrap=True)
    assert "longtable" in pages and "p{" in pages and "L" not in pages.split("\n")[0]
    assert "longtable" not in tables.to_markdown(long, "Steps.", "tab-x", wrap=True)


@pytest.mark.parametrize(
    ("machines", "of", "left", "said"),
    [
        ("cpu-9", "cpu-9", ["d"], "Times."), ("cpu-9,cpu-7", "cpu-7", ["d"], "Times. Machine: `cpu-7`."),
        ("cpu-9,cpu-7", ["cpu-9", "cpu-7"], ["machine", "d"], "Times."),
    ],
)  # fmt: skip
def test_a_table_of_one_machine_says_its_name_where_there_are_several(
    results_root, monkeypatch, machines, of, left, said
):
    for machine in ("cpu-9", "cpu-7"):
        write_rows(results_root, machine)
    shown = []
    monkeypatch.setattr(
        "cs336_systems.report.chapter.show", lambda frame, **told: shown.append((frame, told))
    )
    chapter(machine=machines).show(pd.DataFrame({"machine": of, "d": [1, 2]}), "Times.", "tab-x")
    [(frame, told)] = shown
    assert list(frame) == left and told == {"caption": said, "name": "tab-x"}


# --------------------------------------------------------------------------------- figures and pages
def test_roofs_of_a_machine(results_root):
    write_rows(results_root)
    found = roofs("cpu-9")
    assert found.tflops == {"bf16": 0.5, "fp32": 0.5}
    assert (found.tb_per_s, found.sheet) == (0.02, None)
    assert roofs("") == Roofs()
    known = {
        "abcd": {"gpu": "NVIDIA H100 PCIe"},
        "ffff": {"gpu": "NVIDIA H200"},
    }  # in the file by their digests
    step_rows.spell_out(known, results_root, "cpu-9")
    assert roofs("cpu-9").sheet.tb_per_s == 2.0  # that of its rows


def test_figures_say_what_is_not_there_and_sizes_in_short():
    _, axes = figures.panels(columns=2)
    empty = pd.DataFrame({"x": [1, 2], "y": [None, None], "s": ["a", "b"]})
    figures.lines(axes[0, 0], empty, "x", "y", "s")
    assert axes[0, 0].texts[0].get_text() == "not measured"
    assert [figures.short(n) for n in (128, 1024, 16384, 2**26, 2**30)] == ["128", "1k", "16k", "64M", "1G"]


# --------------------------------------------------------------------------------- coverage
def test_coverage_lists_every_part_once(project_root):
    parts = coverage.parts()
    assert len(set(parts)) == len(parts) and {"leaderboard", "nsys_profile (e)"} <= set(parts)
    table = index.problems({"leaderboard": "3 ms"})
    assert len(table) == len(parts)
    answers = dict(zip(table["problem"], table["answer"], strict=True))
    assert answers["[leaderboard](#answer-leaderboard)"] == "3 ms"
    assert answers["[nsys_profile (e)](#answer-nsys-profile-e)"] == tables.EMPTY
    graded = [sum(p.points[year] or 0 for p in coverage.PROBLEMS) for year in range(2)]
    assert [table[year].map(lambda x: int(x) if x.isdigit() else 0).sum() for year in index.YEARS] == graded
    assert set(table["chapter"]) == {f"[{p.chapter}]({p.chapter}.ipynb)" for p in coverage.PROBLEMS}
    assert {p.chapter for p in coverage.PROBLEMS} <= set(coverage.chapters_in_toc(project_root))


def test_rows_stand_in_the_order_of_names():
    cells = {"machine": ["y", "x", "x"], "size": ["xl", "xl", "small"], "n": [1, 2, 3]}
    rows = pd.DataFrame(cells, [7, 8, 9])
    for frame in (rows, rows[::-1]):
        found = tables.in_order(frame, ["machine", "size"], ("small", "xl"))
        assert list(found["n"]) == [3, 2, 1] and list(found.index) == [0, 1, 2]
    assert tables.in_order(rows[:0], ["machine", "size"], ("small", "xl")).empty


def test_pivot_keeps_numbers_and_says_what_is_not_there():
    rows = pd.DataFrame({"d": [64, 64, 16], "impl": ["b", "a", "b"], "ms": [1.5, None, 2.0],
                         "status": ["ok", "oom", "ok"]})  # fmt: skip
    table = tables.pivot(rows, ["d"], "impl", "ms")
    assert list(table.columns) == ["d", "b", "a"] and list(table["d"]) == [64, 16]
    assert table["b"].tolist() == [1.5, 2.0] and table["a"].isna().all()
    assert tables.printed(table, {"b": 2}).to_numpy().tolist() == [["64", "1.5", "OOM"], ["16", "2.0", "–"]]
    with pytest.raises(ValueError, match="several rows for one cell of d, impl"):
        tables.pivot(pd.concat([rows, rows]), ["d"], "impl", "ms")
