"""Writes the README's numbers and its figure from the reference rows:

    python -m cs336_systems.chapters.index.readme [--check]

Only what stands between the two markers is written, and `book/_static/results.svg`. With `--check` nothing is
written, and the exit status is 1 when the README or its figure is not what the rows say. The figure carries a
digest of the rows it was drawn from: that is what is compared, since its bytes depend on matplotlib's version."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt

from cs336_systems.chapters.index import show as headline
from cs336_systems.report.claims import execute
from cs336_systems.report.coverage import project_root
from cs336_systems.report.figures import STYLE

BEGIN, END = "<!-- rows:begin -->", "<!-- rows:end -->"
FIGURE = Path("book") / "_static" / "results.svg"
TAG = "readme"  # of the cells of the first page whose sentences stand in the README too


def block(root: Path) -> str:
    """The Markdown that belongs between the markers: the first page's results, below their figure."""
    with mock.patch.dict("os.environ", {"CS336_RESULTS": str(root / "results")}):
        _, shown = execute(root / "book" / "index.ipynb", until=TAG)
    parts = [re.sub(r"\]\((\w+\.ipynb)", r"](book/\1", thing["text/markdown"]) for thing in shown]
    picture = f"![Three results: attention, training, data parallelism.]({FIGURE.as_posix()})"
    return "\n\n".join([picture, *parts])


def rewritten(text: str, root: Path) -> str:
    """The README's text with the block of today; ValueError where the markers are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md needs {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block(root)}\n{END}{rest.split(END)[1]}"


def figure_is_current(root: Path) -> bool:
    """Whether the figure was drawn from the rows as they are."""
    path, said = root / FIGURE, f"drawn from rows {headline.digest(root / 'results')}"
    return path.is_file() and said in path.read_text(encoding="utf-8")


def draw(root: Path) -> None:
    """Writes the figure; a current one is left as it is."""
    path, digest = root / FIGURE, headline.digest(root / "results")
    if figure_is_current(root):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE | {"svg.hashsalt": digest}):  # the same rows give the same file
        figure = headline.figure(root / "results")
        metadata = {"Date": None, "Description": f"drawn from rows {digest}"}
        figure.savefig(path, metadata=metadata)
    plt.close(figure)


def main(arguments: list[str]) -> int:
    """Writes or checks the README of the checkout; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cs336_systems.chapters.index.readme", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    root = project_root()
    path = root / "README.md"
    old = path.read_text(encoding="utf-8")
    new = rewritten(old, root)
    if not check:
        path.write_text(new, encoding="utf-8")
        draw(root)
        return 0
    wrong = [path.name] * (new != old) + [FIGURE.as_posix()] * (not figure_is_current(root))
    if wrong:
        command = "python -m cs336_systems.chapters.index.readme"
        print(f"not what the rows say: {', '.join(wrong)}; run: {command}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
