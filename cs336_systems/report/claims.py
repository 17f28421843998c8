"""Holds the book's sentences against the reference rows: `cs336 book --claims`.

Every notebook is executed in this process, without Jupyter: its claims and answers note what became of them
(`report.prose`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt

from cs336_systems.report import prose
from cs336_systems.report.chapter import BUILD_VARIABLE
from cs336_systems.report.coverage import chapters_in_toc, parts


def execute(notebook: Path, until: str = "", **parameters: Any) -> tuple[list[prose.Sentence], list[Any]]:
    """Runs a notebook's code cells in this process, reading rows only; returns its sentences, and all that it
    displayed.

    `until`: ends with the last cell that holds this text or tag, draws no figure on the way there, and returns what
    such cells displayed. `parameters` replace those of the notebook, as papermill's do. What a cell raises comes
    through, with a note that names the notebook and the cell.
    """
    shown: list[Any] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    before = len(prose.made)
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    tags = [cell["metadata"].get("tags", []) for cell in cells]
    holding = [n for n, source in enumerate(sources) if until in source or until in tags[n]]
    show = lambda *things, **options: shown.extend(things if n in holding else ())
    with (
        mock.patch("IPython.display.display", show),
        mock.patch.dict("os.environ", {BUILD_VARIABLE: "1"}),
        plt.rc_context({"backend": "agg"}),
    ):
        for n, source in enumerate(sources[: max(holding, default=-1) + 1]):
            if cells[n]["cell_type"] != "code" or (until and source.startswith("_ = ")):
                continue
            try:
                exec(compile(source, f"{notebook.name}[{n + 1}]", "exec"), names)
            except Exception as error:
                error.add_note(f"in cell {n + 1} of {notebook}")
                raise
            if "parameters" in tags[n]:
                names.update(parameters)
            plt.close("all")  # as Jupyter does
    return prose.made[before:], shown


def check(root: Path) -> tuple[list[str], list[str]]:
    """What is wrong with the book's sentences, a line each; and the comparisons that hold by a little.

    Wrong are sentences that the rows do not bear out, and parts of problems without an answer. Rows that are missing
    are not: the page says so.
    """
    wrong, narrow, answered = [], [], set()
    pages = [root / "book" / f"{page}.ipynb" for page in ["index", *chapters_in_toc(root)]]
    for notebook in filter(Path.is_file, pages):
        for sentence in execute(notebook)[0]:
            answered.add(sentence.part)
            shown = f"{sentence.part}: {sentence.text}" if sentence.part else sentence.text
            if sentence.outcome is False:
                against = "\n    ".join(sentence.against) or "a condition is False"
                wrong.append(f"{notebook.stem}: “{shown}”\n    {against}")
            narrow += [f"{notebook.stem}: “{shown}”\n    {text}" for text in sentence.narrow]
    unanswered = [part for part in parts() if part not in answered]
    return [*wrong, *(f"no answer to {part}" for part in unanswered)], narrow
