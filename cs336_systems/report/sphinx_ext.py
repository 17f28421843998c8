"""The Sphinx extension of the book: pages are read afresh from the rows at every build, several notebooks at a
time, and nothing is measured.

Listed under `sphinx.extra_extensions` in `_config.yml`, so `cs336 book` and a bare `jupyter-book build
book` behave alike."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

from cs336_systems.report.chapter import BUILD_VARIABLE

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
    app.connect("config-inited", _links)
    app.connect("doctree-resolved", _code_links)
    app.connect("doctree-resolved", _boxes)
    app.connect("build-finished", _panels)
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


def _links(app: Any, config: Any) -> None:
    """In each page's footer the PDF, where there will be one. Where `repository: url:` of `_config.yml` names one: its
    button, and one that opens a notebook in Colab."""
    options = config["html_theme_options"]
    if os.environ.get(PDF_VARIABLE) == "1":
        options["extra_footer"] = '<a href="cs336-systems.pdf">The whole book as a PDF</a>'
    if options.get("repository_url"):
        options |= {"use_repository_button": True, "path_to_docs": "book"}
        options["launch_buttons"] = {
            "notebook_interface": "jupyterlab",
            "colab_url": "https://colab.research.google.com",
        }


def _boxes(app: Any, doctree: Any, page: str) -> None:
    """What links to an answer's box leads there in the PDF, too: Sphinx's LaTeX has no targets for boxes."""
    from docutils import nodes

    if app.builder.format == "latex":
        for box in list(doctree.findall(nodes.admonition)):
            if box["ids"]:
                box.parent.insert(box.parent.index(box), nodes.target("", "", ids=box["ids"]))


def _code_links(app: Any, doctree: Any, page: str) -> None:
    """Names of files in the text (of the package, of tests/, of the project) become links into the repository."""
    from docutils import nodes

    options = app.config["html_theme_options"]
    if app.builder.format != "html" or not (url := options.get("repository_url")):
        return
    project = Path(app.srcdir).parent
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext()
        paths = (f"cs336_systems/{name}", f"tests/{name}", name)
        known = Path.is_dir if name.endswith("/") else Path.is_file
        found = next((path for path in paths if known(project / path)), None)
        if found and not isinstance(literal.parent, nodes.reference):
            branch = options.get("repository_branch") or "main"
            link = nodes.reference("", "", refuri=f"{url}/tree/{branch}/{found}")
            literal.replace_self(link)
            link += literal


def _panels(app: Any, error: Exception | None) -> None:
    """Says of each figure with panels side by side where they are, for `book.js`, which stacks them on a phone."""
    if error or app.builder.format != "html":
        return

    def told(image: re.Match[str]) -> str:
        parts = panels_of((Path(app.outdir) / image[1]).read_text(encoding="utf-8"))
        found = " ".join(",".join(f"{number:.4f}" for number in part) for part in parts)
        return f'{image[0]} data-panels="{found}"' if found else image[0]

    for page in Path(app.outdir).glob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'src="(_images/\w+\.svg)"(?! data-panels)', told, text), encoding="utf-8")


def panels_of(svg: str) -> list[tuple[float, float, float, float]]:
    """(left, top, width, height), as shares of the figure's, of each column of panels of an SVG by matplotlib, and last
    of a legend below all of them; nothing where there is one column."""
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if size is None:
        return []
    width, height = float(size[1]), float(size[2])
    frames = re.findall(r'^  <g id="axes_\d+">\s*<g id="patch_\d+">\s*<path d="([^"]+)"', svg, re.M)
    spans = ([float(x) for x in re.findall(r"[ML] ([\d.]+)", frame)] for frame in frames)
    columns: list[list[float]] = []
    for left, right in sorted((min(xs), max(xs)) for xs in spans):
        # the same column, or one too narrow to stand alone, as a bar of colors is
        if columns and (
            left < columns[-1][1] or width > 12 * min(right - left, columns[-1][1] - columns[-1][0])
        ):
            columns[-1][1] = max(columns[-1][1], right)
        else:
            columns.append([left, right])
    gaps = [(right / width, (left - right) / width) for (_, right), (left, _) in itertools.pairwise(columns)]
    # numbers at the ends of bars reach into a wide gap, a label of the next panel into a narrow one
    cuts = [0.0, *(right + (0.02 if gap > 0.1 else 0.01) for right, gap in gaps), 1.0]
    widths = [b - a for a, b in itertools.pairwise(cuts)]
    vertical = re.findall(r'^   <g id="matplotlib\.axis_\d*[02468]">.*?^   </g>', svg, re.M | re.S)
    # all panels have labels at their left, or none has
    own = len({'id="text_' in axis for axis in vertical}) < 2
    shared = not own and max(widths) > 1.4 * min(widths)  # the widest has labels that all need
    if len(columns) < 2 or shared:
        return []
    legend = re.search(r'^  <g id="legend_\d+">.*?^  </g>', svg, re.M | re.S)
    texts = re.findall(r'<g transform="translate\(([\d.]+) ([\d.]+)\)', legend[0]) if legend else []
    end = min([height, *(float(y) - 10 for _, y in texts)]) / height  # of letters, from their baseline
    found = [(left, 0.0, wide, end) for left, wide in zip(cuts[:-1], widths, strict=True)]
    if texts:
        margin = min(float(x) - 30 for x, _ in texts) / width  # left of what a text is about; it is centered
        found.append((margin, end, 1 - 2 * margin, 1 - end))
    return found
