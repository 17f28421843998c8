"""Imports run one way (which room may use which), and most rooms import neither torch nor triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cs336_systems

PACKAGE = Path(cs336_systems.__file__).resolve().parent

# Floor by floor, from the ground: a room may import those of the floors below. A room is a module or a folder.
FLOORS = (
    ("sizes",),
    ("attention", "parallel", "store"),
    ("accounting", "launch", "model"),
    ("ladder", "measure", "report", "training"),
    ("chapters",),
    ("cli",),
    ("__main__",),
)
# These use less than they might.
ONLY = {
    "accounting": {"sizes"}, "attention": set(), "launch": {"store"}, "ladder": {"accounting", "attention"},
    "measure": {"launch", "store"}, "parallel": set(), "report": {"launch", "store"}, "store": set(),
}  # fmt: skip
MAY = {
    room: ONLY.get(room, {below for floor in FLOORS[:number] for below in floor})
    for number, floor in enumerate(FLOORS)
    for room in floor
}
# A folder of a room → the others in this room that it may import.
WITHIN = {
    "attention.triton": set(), "attention.hopper": {"triton"}, "attention.checks": {"triton", "hopper"},
    "measure.clocks": set(), "measure.memory": set(), "measure.trace": set(), "measure.counters": {"trace"},
    "chapters.shared": set(),
}  # fmt: skip
NO_TORCH = ("accounting", "chapters", "cli", "measure", "report", "sizes", "store")
OF_TORCH = (
    "step.py",
    "equations.py",
    "parallel_step.py",
    "ranks.py",
    "strategies.py",
)  # in `chapters`: what a case's processes import, and nothing else


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def of_torch(path):
    return room(path) == "chapters" and path.name in OF_TORCH


def module_name(path):
    parts = ["cs336_systems", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_LAZY = ast.FunctionDef | ast.AsyncFunctionDef


def imported(tree, lazily=True):
    """The dotted names that a source imports, for type checkers too; without `lazily` only what importing it runs."""
    todo = list(ast.iter_child_nodes(tree))
    while todo:
        node = todo.pop()
        if not lazily and (
            isinstance(node, _LAZY) or "TYPE_CHECKING" in ast.unparse(getattr(node, "test", []))
        ):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def turned_round(source, name):
    """The imports of one source that its room may not make."""
    own = {
        dotted.split(".")[1] for dotted in imported(ast.parse(source)) if dotted.startswith("cs336_systems.")
    }
    return sorted(own - ({"__version__", name} | MAY.get(name, set())))


def test_imports_run_one_way():
    for path in sources():
        assert room(path) in MAY.keys() | {"__init__"}, f"{path}: a new room needs its place here"
        assert turned_round(path.read_text(encoding="utf-8"), room(path)) == [], path


@pytest.mark.parametrize("folder", WITHIN)
def test_folders_of_a_room_build_on_each_other(folder):
    room, _, own = folder.partition(".")
    for path in (PACKAGE / room / own).glob("*.py"):
        names = [dotted.split(".") for dotted in imported(ast.parse(path.read_text("utf-8")))]
        used = {parts[2] for parts in names if parts[:2] == ["cs336_systems", room]}
        folders = {part for part in used if (PACKAGE / room / part).is_dir()}
        assert folders <= WITHIN[folder] | {own}, path


def test_an_arrow_that_turns_round_is_seen():
    for source, of, seen in (
        ("def f():\n    from cs336_systems.chapters import hardware", "measure", ["chapters"]),
        ("if TYPE_CHECKING:\n    from cs336_systems.report import Chapter", "store", ["report"]),
        ("import cs336_systems.cli.main as c", "report", ["cli"]),
        ("from cs336_systems.store import rows", "attention", ["store"]),
        ("from cs336_systems import chapters", "cli", []),
    ):
        assert turned_round(source, of) == seen


def test_rooms_that_do_not_import_torch():
    for path in sources():
        if room(path) in NO_TORCH and not of_torch(path):
            names = imported(ast.parse(path.read_text("utf-8")), lazily=False)
            assert not {name.split(".")[0] for name in names} & {"torch", "triton", "pynvml", "papermill"}, (
                path
            )


def run(script):
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_everything_imports_without_torch_and_triton():
    """In a process where neither can be imported: all rooms but those whose modules are made of torch."""
    chosen = [p for p in sources() if room(p) in NO_TORCH and not of_torch(p) and p.name != "sphinx_ext.py"]
    run(
        "import sys, importlib\n"
        "sys.modules |= {'torch': None, 'triton': None, 'pynvml': None}\n"
        f"for name in {['cs336_systems', 'cs336_systems.attention', *map(module_name, chosen)]}:\n"
        "    importlib.import_module(name)\n"
        "from cs336_systems import attention, chapters\n"
        "from cs336_systems.cli import doctor\n"
        "from cs336_systems.store import machine, provenance\n"
        "assert machine.machine_name().startswith('cpu-')\n"
        "assert all(reason for reason in attention.availability().values())\n"
        "assert not any(c.available for c in doctor.checks() if c.section in ('attention', 'parallel'))\n"
        "for table in chapters.tables():\n"
        "    experiment = chapters.load(table)\n"
        "    assert len(provenance.digest(experiment)) == 8 and experiment.grid('full')\n"
    )


@pytest.mark.parametrize("blocked", ["torch", "triton"])
def test_the_rest_does_not_hang_on_the_other(blocked):
    """`doctor` tells what is missing when only one of the two is there."""
    run(
        f"import sys\nsys.modules[{blocked!r}] = None\nfrom cs336_systems.cli import doctor\n"
        f"[check] = [c for c in doctor.checks() if c.name == {blocked!r}]\n"
        "assert not check.available and 'not installed' in check.detail, check\n"
    )
