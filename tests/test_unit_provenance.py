"""What a row depends on: the files of its table, as syntax, and what is carried over from what they were."""

import ast
import dataclasses
import shutil
import subprocess
import sys

import pytest
from test_unit_imports import PACKAGE, imported

from cs336_systems import chapters
from cs336_systems.store import provenance, rows
from cs336_systems.store.files import StoreError

TABLE = """
from dataclasses import dataclass
from cs336_systems.store.table import Table
DEPENDS = ("part.py",)
GROUP = ("size",)
METRICS = ("ms",)

@dataclass(frozen=True)
class Case:
    size: int
    impl: str = "a"

TABLE = Table(__name__, Case, METRICS, GROUP, lambda preset: [], lambda cases: [], DEPENDS)
"""
PART = "def part(x):\n    return x + 1\n"


# ------------------------------------------------------------------------------------------------ digests
@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table `fake` in a checkout of its own, which depends on part.py."""
    folder = tmp_path / "checkout" / "cs336_systems"
    folder.mkdir(parents=True)
    (folder / "fake.py").write_text(TABLE)
    (folder / "part.py").write_text(PART)
    monkeypatch.setattr(provenance, "PACKAGE", folder)
    monkeypatch.syspath_prepend(folder)
    yield __import__("fake").TABLE
    del sys.modules["fake"]


LOOKS = (
    "# why\ndef part(x):\n    return x + 1",
    'def part(x):\n    """What."""\n    return (x\n            + 1)',
    '"""All."""\ndef part(x): return x + 1',
)
WORKS = (
    "def part(x):\n    return x + 2",
    "def part(y):\n    return y + 1",
    "def part(x: int):\n    return x + 1",
    "import math\ndef part(x):\n    return x + 1",
    'def part(x):\n    return x + 1\nA = "x"',
)


def test_looks_make_no_difference_and_all_that_works_does(table):
    part, before = provenance.PACKAGE / "part.py", provenance.digest(table)
    for text in LOOKS:
        part.write_text(text)
        assert provenance.digest(table) == before, text
    found = {before}
    for text in WORKS:
        part.write_text(text)
        found.add(provenance.digest(table))
    assert len(found) == 1 + len(WORKS)
    part.write_text(PART)
    (provenance.PACKAGE / "fake.py").write_text(TABLE + "X = 1\n")
    assert provenance.digest(table) not in found


def test_strings_that_some_pythons_split_are_alike():
    whole, split = (
        ast.JoinedStr([*(ast.Constant(text) for text in texts), ast.FormattedValue(ast.Name("x"), -1)])
        for texts in (("ab",), ("a", "b"))
    )
    assert provenance.syntax(whole) == provenance.syntax(split) != provenance.syntax(ast.JoinedStr([]))


def test_cuda_counts_without_comments(table):
    kernel = provenance.PACKAGE / "kernel.cu"
    table = dataclasses.replace(table, depends=("kernel.cu",))
    kernel.write_text("int x = 1;  // one\n/* two\n */ int y;\n")
    before = provenance.digest(table)
    kernel.write_text("int x = 1; int y;")
    assert provenance.digest(table) == before
    kernel.write_text("int x = 2; int y;")
    assert provenance.digest(table) != before


# ------------------------------------------------------------------------------------------------ DEPENDS
# They choose what is timed.
CHOOSES = {"attention/registry.py", "chapters/shared/attention_peers.py"}
# Measurements reach them, and no number depends on them.
BESIDE = {
    "attention/auto.py", "chapters/shared/depends.py",
    # what is refused, and how ranks are launched
    "chapters/shared/needs.py", "chapters/shared/on_ranks.py",
    # what is known of a kernel without running it
    "attention/checks/aot.py",
    # where a training run has its text from, and what it writes; which of its sizes are tried
    "training/checkpoints.py", "training/documents.py", "training/log.py", "training/outputs.py",
    "training/defaults.py", "training/resuming.py", "training/text.py", "chapters/speedrun/plan.py",
    # what no table has in its grid: sharded weights
    "parallel/fsdp.py", "parallel/sharded_state.py", "parallel/shards.py", "parallel/units.py",
}  # fmt: skip
AROUND = ("store", "launch", "report")


def reached(file):
    """The modules of the package that one imports, lazily too, and they in turn, short of those that choose."""
    found, left = set(), [file]
    while left:
        if (here := left.pop()) in found:
            continue
        found.add(here)
        name = here.relative_to(PACKAGE).as_posix()
        if name in CHOOSES | BESIDE and here != file:
            continue
        for dotted in imported(ast.parse(here.read_text(encoding="utf-8"))):
            parts = dotted.split(".")
            if parts[0] != PACKAGE.name or parts[1] in AROUND:
                continue
            for end in (len(parts), len(parts) - 1):
                base = PACKAGE.joinpath(*parts[1:end])
                if base.with_suffix(".py").is_file():
                    left.append(base.with_suffix(".py"))
                    break
    return {path.relative_to(PACKAGE).as_posix() for path in found}


@pytest.mark.parametrize("name", chapters.tables())
def test_what_a_measurement_reaches_is_listed(name):
    """By its own table, or it is told here why not."""
    table = chapters.load(name)
    own = table.source
    listed = {own.relative_to(PACKAGE).as_posix(), *table.depends}
    of_all = {file for other in chapters.tables() for file in chapters.load(other).depends}
    assert reached(own) - listed - CHOOSES - BESIDE <= of_all, name
    assert not CHOOSES & listed and not [file for file in listed if file.startswith(AROUND)]
    assert len(set(table.depends)) > 0 and all((PACKAGE / file).is_file() for file in table.depends)


@pytest.mark.parametrize("name", sorted(CHOOSES))
def test_what_can_be_chosen_is_listed(name):
    of_all = {file for table in chapters.tables() for file in chapters.load(table).depends}
    assert reached(PACKAGE / name) - of_all - CHOOSES - BESIDE == set()


# ------------------------------------------------------------------------------------------------ carried over
@pytest.fixture
def checkout(table, tmp_path, monkeypatch):
    """Committed, with rows of the code at that commit; then part.py is edited."""
    root = provenance.PACKAGE.parent
    real = PACKAGE / "store"
    shutil.copytree(real, provenance.PACKAGE / "store", ignore=shutil.ignore_patterns("__pycache__"))
    (provenance.PACKAGE / "chapters.py").write_text(
        "import importlib\ndef load(name): return importlib.import_module(f'cs336_systems.{name}').TABLE\n"
    )
    (provenance.PACKAGE / "__init__.py").write_text("")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", root, *words], check=True)
    results = tmp_path / "results"
    code = provenance.digest(table)
    told = {
        "status": "ok",
        "run": "r",
        "time_utc": "2026-01-01T00:00:00Z",
        "env": "e",
        "code": code,
        "ms": 1.0,
    }
    rows.write(table, "m", [{"size": n, "impl": impl} | told for n in (1, 2) for impl in "ab"], results)
    (provenance.PACKAGE / "part.py").write_text(PART.replace("+ 1", "+ 1 + 0"))
    return results


def fresh(table, root):
    known = rows.load(table, root / "m" / "fake.csv")
    is_current = provenance.current(table, root)
    return [key for key, row in known.items() if is_current(key, row["code"])]


def test_rows_are_read_through_the_chain(table, checkout):
    before = (checkout / "m" / "fake.csv").read_bytes()
    assert fresh(table, checkout) == []
    assert provenance.carry([table], "HEAD", {"impl": "b", "size": "1,2"}, "same", checkout) == [("fake", 2)]
    assert fresh(table, checkout) == [(1, "b"), (2, "b")]
    subprocess.run(["git", "-C", provenance.PACKAGE.parent, "-c", "user.name=a", "-c", "user.email=b",
                    "commit", "-qam", "y"], check=True)  # fmt: skip
    (provenance.PACKAGE / "part.py").write_text(PART.replace("+ 1", "+ 1 - 0"))
    assert fresh(table, checkout) == []
    assert provenance.carry([table], "HEAD", {"size": "2"}, "same again", checkout) == [("fake", 1)]
    assert fresh(table, checkout) == [(2, "b")]
    assert (checkout / "m" / "fake.csv").read_bytes() == before
    line = provenance.Line("fake", "impl=a b,c size=1,2", "", "", "", "")
    assert [line.selects({"impl": x, "size": "2"}) for x in ("a b", "c", "a")] == [True, True, False]
    of_another_version = provenance.Line("fake", "color=red size=2", "", "", "", "")
    assert not of_another_version.selects({"impl": "a", "size": "2"})
    with pytest.raises(ValueError, match="no such row was measured with the code of HEAD"):
        provenance.carry([table], "HEAD", {"impl": "a"}, "no", checkout)


@pytest.mark.parametrize(
    ("commit", "where", "because", "said"),
    [
        ("HEAD", {}, " ", "because is empty"),
        ("nowhere", {}, "x", "commit nowhere: .*nowhere"),
        ("HEAD", {"colour": "red"}, "x", "no field 'colour'; allowed: size, impl"),
        ("HEAD", {"impl": "b,c"}, "x", "impl=c: no row of fake; allowed: a, b"),
    ],
)
def test_what_cannot_be_carried_is_told(table, checkout, commit, where, because, said):
    with pytest.raises(ValueError, match=said):
        provenance.carry([table], commit, where, because, checkout)
    assert not (checkout / "carried.csv").exists()


def test_nothing_to_carry_and_damage(table, checkout):
    (provenance.PACKAGE / "part.py").write_text(PART)
    with pytest.raises(ValueError, match="as they were at HEAD"):
        provenance.carry([table], "HEAD", {}, "x", checkout)
    with pytest.raises(ValueError, match="no field 'color'"):  # a typo is told first
        provenance.carry([table], "HEAD", {"color": "red"}, "x", checkout)
    (checkout / "carried.csv").write_text("table,rows\nfake,\n")
    with pytest.raises(StoreError, match=r"carried\.csv: columns table, rows; expected table, rows, before"):
        provenance.current(table, checkout)
