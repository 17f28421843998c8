"""The hand-in: what is packed, and what has to hold before anything is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import PurePath

import pytest
from typer.testing import CliRunner

from cs336_systems.cli import main as cli
from cs336_systems.cli import submit
from cs336_systems.report import build


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small checkout, and what lies about in one."""
    root = tmp_path / "checkout"
    for name in (
        "_toc.yml", "README.md", "tests/test_it.py", "cs336_systems/__init__.py", "book/index.ipynb",
        "results/h200-x1/hardware.csv", "tools/setup.sh",
        ".ci/run", ".venv/pyvenv.cfg", "book/_build/index.html", "cs336_systems/__pycache__/x.pyc", "out.ipynb",
        "_build/html/index.html", "tests/.ipynb_checkpoints/a.ipynb",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / "tools" / "setup.sh").chmod(0o755)
    monkeypatch.chdir(root)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))  # no repository around this one
    return root


BELONG = [
    "README.md", "_toc.yml", "book/index.ipynb", "cs336_systems/__init__.py", "results/h200-x1/hardware.csv",
    "tests/test_it.py", "tools/setup.sh",
]  # fmt: skip


@pytest.fixture
def built(project, monkeypatch):
    """A stand-in for the minutes of building: the PDF that it makes."""
    product = project / "_build" / "cs336-systems.pdf"

    def make(tables_of, pdf, root):
        product.write_bytes(b"%PDF")
        return [root / "_build" / "html" / "index.html", product]

    monkeypatch.setattr(build, "build", make)
    monkeypatch.setattr(build, "missing_latex", lambda: None)
    return product


def call(*arguments):
    return CliRunner().invoke(cli.app, ["submit", *arguments])


def test_the_same_files_are_the_same_bytes(project, tmp_path):
    submit.pack(project, tmp_path / "a.zip")
    for name in BELONG:
        os.utime(project / name, (1e9, 1e9))
    [line] = submit.pack(project, tmp_path / "b.zip")
    assert f"{len(BELONG)} files, 0.0 MB" in line
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    entries = zipfile.ZipFile(tmp_path / "a.zip").infolist()
    assert [entry.filename for entry in entries] == BELONG
    modes = {entry.filename: entry.external_attr >> 16 for entry in entries}
    assert (modes["README.md"], modes["tools/setup.sh"]) == (0o644, 0o755)


def test_with_git_what_it_tracks_and_a_word_about_the_rest(project, tmp_path):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    git = ["git", "-C", str(project)]
    subprocess.run([*git, "init", "-q"], check=True)
    (project / ".gitignore").write_text("_build/\n__pycache__/\n.ipynb_checkpoints/\n")
    subprocess.run([*git, "add", "."], check=True)
    (project / "tests" / "test_new.py").touch()
    (project / "notes.txt").touch()  # belongs to no hand-in, tracked or not
    (project / "tools" / "setup.sh").unlink()
    lines = submit.pack(project, tmp_path / "code.zip")
    assert zipfile.ZipFile(tmp_path / "code.zip").namelist() == BELONG[:-1]
    assert len(lines) == 2 and lines[1].endswith(": tests/test_new.py")


def test_a_large_archive_is_told_with_its_largest_file(project, tmp_path, monkeypatch):
    monkeypatch.setattr(submit, "LIMIT_MB", 0.1)
    (project / "results" / "checkpoint.pt").write_bytes(os.urandom(200_000))
    _, warning = submit.pack(project, tmp_path / "code.zip")
    assert "warning: code.zip" in warning and "results/checkpoint.pt, 0.2 MB" in warning


def test_the_project_hands_in_what_it_needs(project_root):
    names, _ = submit.files(project_root)
    needed = {"tests/adapters.py", "tests/conftest.py", "results/reference.json", "book/index.ipynb"}
    assert needed <= set(names)
    assert {name.split("/")[0] for name in names} == submit.BELONGS
    assert not [name for name in names if name.startswith((".", "_build/")) or "__pycache__" in name]


def test_a_failing_test_ends_it(project, built):
    (project / "tests" / "test_it.py").write_text("def test_it():\n    assert 0\n")
    done = call("--out", "README.md")
    assert done.exit_code == 2 and "README.md" in done.stderr and "Traceback" not in done.output
    done = call()
    assert done.exit_code == 1 and "tests failed" in done.stderr and "Traceback" not in done.output
    assert not built.exists() and not list(project.glob("submission/*"))


def test_tests_that_pass_and_tests_that_are_skipped(project, built):
    (project / "tests" / "test_it.py").write_text("def test_it():\n    pass\n")
    done = call("--out", "elsewhere")
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (project / "elsewhere").iterdir()) == ["code.zip", "writeup.pdf"]
    assert "skipped" not in done.stdout
    (project / "tests" / "test_it.py").write_text("def test_it():\n    assert 0\n")
    done = call("--skip-tests")
    assert done.exit_code == 0 and "the tests were skipped" in done.stdout
    assert (project / "submission" / "writeup.pdf").read_bytes() == b"%PDF"


@pytest.mark.parametrize("out", ["", "  "])
def test_a_folder_without_a_name_is_refused(project, built, out):
    done = call("--skip-tests", "--out", out)
    assert done.exit_code == 2 and f"{out!r} is not the name of a folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (project / "code.zip").exists()


def test_no_link_of_a_page_leads_out_of_the_archive(project_root):
    names = {
        name for path in submit.files(project_root)[0] for name in (path, *map(str, PurePath(path).parents))
    }
    for page in (name for name in names if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)\s#:]+)[^)]*\)", (project_root / page).read_text()):
            target = os.path.normpath(PurePath(page).parent / link)
            assert target in names or not (project_root / target).exists(), f"{page}: {link}"


def test_without_latex_no_test_runs(project, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda program: None)
    monkeypatch.setattr(submit.subprocess, "run", lambda *a, **k: pytest.fail("something ran"))
    done = call()
    assert done.exit_code == 1 and "xelatex and latexmk" in done.stderr
    assert len(done.stderr.splitlines()) == 1
