"""The Sphinx extension of the book: pages are read afresh from the rows at every build, several notebooks at a
time, and nothing is measured.

Listed under `sphinx.extra_extensions` in `_config.yml`, so `cs336 book` and a bare `jupyter-book build
book` behave alike."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from cs336_systems.report.chapter import BUILD_VARIABLE
from cs336_systems.report.narrow import parted

# set by `cs336 book --pdf`, for its HTML and for the PDF, made of the same pages
PDF_VARIABLE = "CS336_BOOK_PDF"
# Extensions that keep nothing while reading, so that pages may be read in parallel, but do not declare it.
_UNDECLARED = ("sphinx_jupyterbook_latex", "sphinx_multitoc_numbering", "sphinx-mathjax-offline")


def _every_page(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """All pages count as outdated: what they show are rows, and Sphinx does not watch those. Only the PDF beside HTML
    is made of the pages that were read for that."""
    beside = os.environ.get(PDF_VARIABLE) == "1" and app.builder.format == "latex"
    return set() if beside else set(env.found_docs)


def setup(app: Any) -> dict[str, bool | str]:
    """What Sphinx calls. The kernels that run the notebooks inherit the environment variable."""
    os.environ[BUILD_VARIABLE] = "1"
    app.connect("env-get-outdated", _every_page)
    # Twice the cores: Sphinx splits the pages into batches of equal size, of which some take longer.
    app.parallel = 2 * (os.cpu_count() or 1)
    app.connect("env-updated", _no_failed_notebook)
    app.connect("config-inited", _mend_extensions)
    app.connect("config-inited", _link_to_pdf)
    app.connect("doctree-resolved", _boxes)
    app.connect("build-finished", _narrow)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _no_failed_notebook(app: Any, env: Any) -> None:
    """Ends the build where a notebook failed; its traceback is in the log by now. (nb_execution_raise_on_error would
    end it too, but of what is raised while reading in parallel, Sphinx shows no traceback.)"""
    from sphinx.errors import ExtensionError

    runs = {page: data.get("exec_data") for page, data in getattr(env, "nb_metadata", {}).items()}
    if failed := sorted(page for page, run in runs.items() if run and not run["succeeded"]):
        raise ExtensionError(f"notebooks failed: {', '.join(failed)}")


def _mend_extensions(app: Any, config: Any) -> None:
    """Sphinx reads in parallel, that is runs notebooks in parallel, only if every extension says that it may. And the
    script of jupyter-book's extension for live cells is kept from every page: no cell is live here, and Sphinx writes
    the script twice, which is an error in browsers."""
    for name in _UNDECLARED:
        app.extensions[name].parallel_read_safe = True
    for event in ("env-before-read-docs", "doctree-resolved"):
        listeners = app.events.listeners[event]
        listeners[:] = [one for one in listeners if one.handler.__module__ != "sphinx_thebe"]


def _link_to_pdf(app: Any, config: Any) -> None:
    """In each page's footer the PDF, where there will be one."""
    if os.environ.get(PDF_VARIABLE) == "1":
        config["html_theme_options"]["extra_footer"] = (
            '<a href="cs336-systems.pdf">The whole book as a PDF</a>'
        )


def _boxes(app: Any, doctree: Any, page: str) -> None:
    """What links to an answer's box leads there in the PDF, too: Sphinx's LaTeX has no targets for boxes."""
    from docutils import nodes

    if app.builder.format == "latex":
        for box in list(doctree.findall(nodes.admonition)):
            if box["ids"]:
                box.parent.insert(box.parent.index(box), nodes.target("", "", ids=box["ids"]))


def _narrow(app: Any, error: Exception | None) -> None:
    """The second layout that the SVG of a figure carries becomes a file of its own, which pages show on a phone."""
    if error or app.builder.format != "html":
        return
    for file in Path(app.outdir, "_images").glob("*.svg"):
        first, other = parted(file.read_text(encoding="utf-8"))
        if other:
            file.write_text(first, encoding="utf-8")
            file.with_suffix(".narrow.svg").write_text(other, encoding="utf-8")

    def both(image: re.Match[str]) -> str:
        file = f"{image[1]}.narrow.svg"
        source = f'<source media="(max-width: 600px)" srcset="{file}">'
        return f"<picture>{source}{image[0]}</picture>" if Path(app.outdir, file).is_file() else image[0]

    for page in Path(app.outdir).glob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'<img [^>]*src="(_images/\w+)\.svg"[^>]*>', both, text), encoding="utf-8")
