"""A chapter's notebook executed in the test's own process."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt


def shown_by(chapter, project_root, monkeypatch):
    """Executes every code cell of the chapter; returns all that it displayed, as Markdown."""
    shown = []

    def keep(*things, **options):
        shown.extend(str(t.get("text/markdown", t)) if isinstance(t, dict) else str(t.data) for t in things)

    monkeypatch.setattr("IPython.display.display", keep)
    monkeypatch.setenv("CS336_BOOK_BUILD", "1")
    notebook = project_root / "book" / f"{chapter}.ipynb"
    names: dict = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    plt.close("all")
    return "\n".join(shown)
