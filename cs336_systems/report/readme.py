"""Writes the README's numbers from the reference rows: `python -m cs336_systems.report.readme [--check]`.

Only what stands between the two markers is written. With `--check` nothing is written, and the exit status
is 1 when the README is not what the rows say."""

from __future__ import annotations

import sys
from pathlib import Path

from cs336_systems.report import headline
from cs336_systems.report.coverage import project_root

BEGIN, END = "<!-- rows:begin -->", "<!-- rows:end -->"


def block(root: Path) -> str:
    """The Markdown that belongs between the markers."""
    frame = headline.table(root / "results")
    if frame.empty:
        return f"*{headline.sentence(root / 'results')}*"
    return f"{headline.CAPTION}:\n\n{frame.to_markdown(index=False)}\n\n{headline.sentence(root / 'results')}"


def rewritten(text: str, root: Path) -> str:
    """The README's text with the block of today; ValueError where the markers are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md needs {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block(root)}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    """Writes or checks the README of the checkout; the exit status."""
    if arguments not in ([], ["--check"]):
        raise ValueError(f"unknown arguments {arguments}; allowed: --check, or none")
    root = project_root()
    path = root / "README.md"
    old = path.read_text()
    new = rewritten(old, root)
    if arguments and new != old:
        print(
            "README.md is not what the rows say; run: python -m cs336_systems.report.readme", file=sys.stderr
        )
        return 1
    if not arguments:
        path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
