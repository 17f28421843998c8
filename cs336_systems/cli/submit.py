"""Makes the course's hand-in: `writeup.pdf` and `code.zip`. `cs336 submit` calls it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from cs336_systems.chapters import tables_of
from cs336_systems.report import build
from cs336_systems.report.coverage import project_root
from cs336_systems.store.files import alone, make_folder

# What of the checkout is handed in: folders, and files beside them.
BELONGS = {
    "cs336_systems", "tests", "book", "results", "tools", "README.md", "TRAINING.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "CITATION.cff", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", "_config.yml", "_toc.yml",
}  # fmt: skip
LIMIT_MB = 50  # code.zip is for code; what is larger holds something else


class SubmitError(RuntimeError):
    """There is nothing to hand in; the message says why."""


def submit(out: str | Path | None = None, skip_tests: bool = False) -> list[str]:
    """Runs the tests, builds the PDF, packs the code, and returns what to tell about it, in lines.

    Args:
        out: the folder for both files; `submission/` in the checkout by default.
        skip_tests: hand in code whose tests have not run; the lines say so.

    Raises:
        FileNotFoundError: outside a checkout.
        ValueError: `out` cannot be a folder; or as `build`.
        SubmitError: a test failed.
        BookError: LaTeX is not installed, or as `build`.
    """
    root = project_root()
    build.missing_latex()  # known before the minutes that the tests take
    out = make_folder(root / "submission" if out is None else out)
    if not skip_tests:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests"]
        if code := subprocess.run(command, cwd=root).returncode:
            raise SubmitError(f"the tests failed (pytest's exit code {code}): nothing is packed")
    lines = ["the tests were skipped"] if skip_tests else []
    *_, pdf = build.build(tables_of, pdf=True, root=root)
    with alone(out, print):
        shutil.copyfile(pdf, out / "writeup.pdf")
        packed = pack(root, out / "code.zip")
    return [*lines, f"{out / 'writeup.pdf'}: {_mb(out / 'writeup.pdf'):.1f} MB", *packed]


def pack(root: Path, target: Path) -> list[str]:
    """Packs the checkout's code into `target`, the same bytes for the same files, and returns what to tell about it."""
    names, left_out = files(root)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            path = root / name
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Unix, wherever it is packed: the modes below count
            entry.external_attr = (0o755 if path.stat().st_mode & 0o100 else 0o644) << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    lines = [f"{target}: {len(names)} files, {_mb(target):.1f} MB"]
    if left_out:
        lines.append(f"warning: git does not track, so left out: {', '.join(left_out)}")
    if _mb(target) > LIMIT_MB:
        largest = max(names, key=lambda name: (root / name).stat().st_size)
        size = _mb(root / largest)
        lines.append(
            f"warning: {target.name} is larger than {LIMIT_MB} MB; the largest file is {largest}, {size:.1f} MB"
        )
    return lines


def files(root: Path) -> tuple[list[str], list[str]]:
    """The paths to pack, relative to `root`, and those that would be packed if git tracked them.

    Where git knows nothing of the folder, all that belongs is packed but hidden files, caches and what was built.
    """
    names = _git(root, "--cached")
    left_out = _git(root, "--others", "--exclude-standard") if names else []
    if not names:
        found = [path for top in BELONGS for path in (root / top, *(root / top).rglob("*"))]
        names = [path.relative_to(root).as_posix() for path in found]
        made = ("/.", "/__pycache__/", "/_build/")
        names = [name for name in names if not any(part in f"/{name}" for part in made)]
    return sorted({name for name in names if (root / name).is_file()}), sorted(left_out)


def _git(root: Path, *options: str) -> list[str]:
    """What git lists of the files that belong; nothing without git, or outside its repositories."""
    command = ["git", "-C", str(root), "ls-files", "-z", *options]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        return []
    return [name for name in done.stdout.split("\0") if name.split("/")[0] in BELONGS]


def _mb(path: Path) -> float:
    return path.stat().st_size / 1e6
