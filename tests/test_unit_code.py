"""The digest of what a row depends on: moves, names and looks don't count, everything that computes does."""

import textwrap
import types

import pytest

from cs336_systems import chapters
from cs336_systems.store import code

FILES = {
    "chapter": """
        from dataclasses import dataclass
        from typing import TYPE_CHECKING
        from pack import helpers, kernels as own
        from pack.kernels import launch as started

        if TYPE_CHECKING:
            import torch

        STEPS = 3

        @dataclass(frozen=True)
        class Case:
            size: int

        def run_group(cases):
            from pack.lazily import late

            for case in cases:
                yield started(case.size, STEPS) + late(case) + call(f"{__name__}:worker") + _launch("ranked")

        def _launch(function):
            return call(f"{__name__}:{function}") + call("pack.elsewhere:other_worker") + helpers.even(4)

        def call(target): ...

        def worker(): return 1

        def ranked(): return 2

        def grid(preset): return [Case(1), Case(2)]
    """,
    "kernels": """
        import triton
        import triton.language as tl
        from pack.helpers import Config

        @triton.jit
        def kernel(x, SIZE: tl.constexpr):
            return x + SIZE

        def launch(size, steps, scale=2, width: int = 4):
            config = Config(size)
            return [kernel(size, steps) for size in range(config.size)], scale

        def unused(): return 5
    """,
    "helpers": """
        from dataclasses import dataclass

        TABLE = {}

        @dataclass
        class Config:
            size: int
            depth: float = 0.5

        def even(n): return n == 0 or odd(n - 1)

        def odd(n): return n != 0 and even(n - 1)

        def filled(): return TABLE

        TABLE[1] = 2
    """,
    "lazily": "def late(case): return 7\n",
    "elsewhere": "def other_worker(): return 8\n\ndef nobody_asks(): return 9\n",
}


class Pack:
    """A package in a folder, and its digest."""

    def __init__(self, folder):
        self.folder = folder / "pack"
        self.folder.mkdir(parents=True)
        for name, text in {"__init__": "", **FILES}.items():
            self.write(name, textwrap.dedent(text))

    def write(self, name, text):
        (self.folder / f"{name}.py").write_text(text)

    def edit(self, name, before, after):
        text = (self.folder / f"{name}.py").read_text()
        assert before in text
        self.write(name, text.replace(before, after))

    def digest(self, case=None, **offered):
        experiment = types.SimpleNamespace(
            __name__="pack.chapter", __file__=str(self.folder / "chapter.py"), **offered
        )
        return code.code_digests(experiment, self.folder)(case)


@pytest.fixture
def pack(tmp_path):
    return Pack(tmp_path)


def test_what_changes_no_number_changes_no_digest(pack):
    before = pack.digest()
    assert len(before) == 8 and int(before, 16) >= 0
    for name, old, new in (
        ("kernels", "def launch(", "# why\n\ndef launch("),
        (
            "kernels",
            "    config = Config(size)",
            "    'What it does.'\n    config = Config(\n        size,\n    )",
        ),
        ("helpers", "    size: int", "    'A title.'\n\n    size: int\n    'Of one side.'\n"),
        ("kernels", "import triton\n", "import os\nimport triton\n"),
        ("kernels", "import triton.language as tl", "from triton import language as tl"),
        ("kernels", "width: int", "width: 'float | None'"),
        ("kernels", "config = Config", "config: Config = Config"),
        ("kernels", "return 5", "return 6"),
        ("chapter", "    import torch\n", "    import torch\n    import numpy\n"),
        ("chapter", "Case(2)", "Case(3)"),
        ("chapter", "(cases)", "(cases: list[Case]) -> list[int]"),
        ("elsewhere", "return 9", "return 10"),
    ):
        pack.edit(name, old, new)
        assert pack.digest() == before, (old, new)


def test_a_definition_may_move_and_get_another_name(pack):
    before = pack.digest()
    pack.edit("chapter", "STEPS", "COUNT")
    pack.edit("chapter", "worker", "servant")
    pack.edit("chapter", "other_servant", "other_worker")
    pack.edit("chapter", "started", "begin")
    pack.edit("chapter", "ranked", "measured")
    pack.edit("helpers", "even", "straight")
    pack.edit("chapter", "helpers.even", "helpers.straight")
    assert pack.digest() == before
    (pack.folder / "deep").mkdir()
    (pack.folder / "kernels.py").rename(pack.folder / "deep" / "tiles.py")
    pack.edit("deep/tiles", "kernel(", "add(")
    pack.edit("deep/tiles", "def launch", "def run")
    pack.edit("chapter", "from pack import helpers, kernels as own\n", "from pack import helpers\n")
    pack.edit(
        "chapter", "from pack.kernels import launch as begin", "from pack.deep.tiles import run as begin"
    )
    assert pack.digest() == before
    pack.edit("helpers", "def odd(n): return n != 0 and straight(n - 1)\n", "")
    pack.edit("helpers", "TABLE = {}", "from pack.odds import odd\nTABLE = {}")
    pack.write(
        "odds", "def odd(n):\n    from pack import helpers\n    return n != 0 and helpers.straight(n - 1)\n"
    )
    assert pack.digest() == before
    pack.write("late", "from pack.later import late\n")  # a name handed on
    (pack.folder / "lazily.py").rename(pack.folder / "later.py")
    pack.edit("chapter", "pack.lazily", "pack.late")
    assert pack.digest() == before
    (pack.folder / "elsewhere.py").rename(pack.folder / "afar.py")
    pack.edit("chapter", "pack.elsewhere:other_worker", "pack.afar:other_worker")
    assert pack.digest() == before
    pack.write("stars", "from pack.deep.tiles import *\n")
    pack.edit("chapter", "from pack.deep.tiles import run as begin", "from pack.stars import *\nbegin = run")
    assert pack.digest() != before  # a definition more
    pack.edit("deep/tiles", "x + SIZE", "x - SIZE")
    starred = pack.digest()
    pack.edit("deep/tiles", "x - SIZE", "x + SIZE")
    assert pack.digest() != starred


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("chapter", "STEPS = 3", "STEPS = 4"),
        ("chapter", "return 1", "return 3"),  # named by f"{__name__}:worker"
        ("chapter", "return 2", "return 3"),  # named by "ranked"
        ("chapter", "size: int", "size: int\n    repeat: int = 0"),
        ("elsewhere", "return 8", "return 3"),  # named by "pack.elsewhere:other_worker"
        ("lazily", "return 7", "return 3"),
        ("kernels", "scale=2", "scale=3"),
        ("kernels", "x + SIZE", "x - SIZE"),
        ("kernels", "@triton.jit", "@triton.jit(noinline=True)"),
        ("kernels", "SIZE: tl.constexpr", "SIZE"),
        ("kernels", "kernel(size, steps)", "kernel(steps, size)"),
        ("kernels", "import triton.language as tl", "import triton.other as tl"),
        ("helpers", "depth: float", "depth: int"),
        ("helpers", "n != 0 and", "n != 1 and"),
        ("helpers", "TABLE[1] = 2", "TABLE[1] = 3"),  # an effect beside definitions that are reached
    ],
)
def test_what_changes_a_number_changes_the_digest(pack, name, old, new):
    before = pack.digest()
    pack.edit(name, old, new)
    assert pack.digest() != before


@pytest.mark.parametrize(
    ("files", "name", "old", "new", "counts"),
    [
        # a local name is no definition, though one has it
        ({"chapter": "def size(): return 1\ndef run_group(cases, size): return [size for size in size]\n"},
         "chapter", "return 1", "return 2", False),
        ({"chapter": "def size(): return 1\ndef run_group(cases): return [size for size in size]\n"},
         "chapter", "return 1", "return 2", True),
        # which of two is called
        ({"chapter": "def run_group(cases): return a() - b()\ndef a(): return 1\ndef b(): return 2\n"},
         "chapter", "a() - b()", "b() - a()", True),
        # an operator counts with its module
        ({"ops": "import torch\n@torch.library.register_fake('a::b')\ndef _fake(x): return x\n"
                 "def call(x): return torch.ops.a.b(x)\n",
          "chapter": "from pack.ops import call\ndef run_group(cases): return call(1)\n"},
         "ops", "return x\n", "return -x\n", True),
    ],
)  # fmt: skip
def test_what_of_other_sources_counts(pack, files, name, old, new, counts):
    for file, text in files.items():
        pack.write(file, text)
    before = pack.digest()
    pack.edit(name, old, new)
    assert (pack.digest() != before) == counts


def test_a_case_depends_on_its_own_implementation(pack):
    pack.write("fast", "SPEED = 1\ndef attention(x): return SPEED")
    pack.write("slow", "def attention(x): return 2\ndef other(): ...")
    pack.write(
        "choice", "from pack import fast, slow\ndef choose(i): return (fast.attention, slow.attention)[i]"
    )
    pack.write("chapter", "from pack.choice import choose\ndef run_group(cases): return choose(cases[0])()")
    named = {"fast": ("pack.fast",), "slow": ("pack.slow:attention",), "any": ("pack.*",)}

    def digests():
        offered = {"PER_CASE": ("pack.fast", "pack.slow"), "also_measures": lambda case: named[case]}
        return {case: pack.digest(case, **offered) for case in named}

    before = digests()
    assert len(set(before.values())) == 3
    pack.edit("fast", "SPEED = 1", "SPEED = 3")
    now = digests()
    assert {case for case in named if now[case] != before[case]} == {"fast", "any"}
    pack.edit("slow", "def other(): ...", "def other(): return 3")
    assert {case for case in named if digests()[case] != now[case]} == {"any"}
    named["fast"] = ("pack.missing",)
    with pytest.raises(ValueError, match=r"no source for module 'pack.missing'"):
        digests()
    named["fast"] = ("pack.slow:missing",)
    with pytest.raises(ValueError, match=r"module 'pack.slow' does not define 'missing'"):
        digests()


def test_a_cuda_source_beside_its_module_counts_without_comments(pack):
    kernel, tile, unread = (pack.folder / name for name in ("kernel.cu", "tile.cuh", "unread.cu"))
    for path in (kernel, tile, unread):
        path.write_text("int x = 1;  // one\n/* two\n lines */ int y;\n")
    pack.write("cpp", 'HEADERS = ("tile.cuh",)\ndef load(file): return open(file), HEADERS\n')
    pack.write(
        "chapter", "from pack.cpp import load\ndef run_group(cases): return load('kernel.cu'), 'none.cu'\n"
    )
    before = pack.digest()
    unread.write_text("int z;")
    kernel.write_text("// three\nint x = 1;\n    int y; // lines")
    assert pack.digest() == before
    for path in (kernel, tile):
        path.write_text("int x = 2; int y;")
        assert pack.digest() != before
        before = pack.digest()


def reached(chapter, case):
    """The definitions of the package that a case's digest is made of, as "module:name"."""
    found = set()

    class Noted(code.Sources):
        def _definition(self, key):
            found.add("{}:{}".format(*key))
            return super()._definition(key)

    experiment = chapters.load(chapter)
    code.sources_digest(experiment, Noted(code.PACKAGE, {}), experiment.also_measures(case))
    return {name.removeprefix("cs336_systems.") for name in found}


def test_rows_of_this_package_depend_on_what_they_measure():
    cases = {case.impl: case for case in chapters.load("attention").grid("full")}
    plain, ours = reached("attention", cases["reference"]), reached("attention", cases["flash_triton"])
    kernels = {"attention.triton.kernels:forward_kernel", "attention.hopper.backward:backward_keys_kernel",
               "attention.flash_triton:_fake_forward", "attention.triton.tiles:TABLE"}  # fmt: skip
    assert kernels <= ours and not kernels & plain
    assert "attention.reference:reference_attention" in plain - ours
    many = {case.impl: case for case in chapters.load("flash_bench").grid("full") if case.heads > 1}
    cpp = reached("flash_bench", many["flash_cuda"])
    assert {"attention.cuda.compile:HEADERS", "attention.cuda.launch:launch_backward"} <= cpp - kernels
    assert not {
        name for name in reached("flash_bench", many["flash_triton"]) if name.startswith("attention.cuda.")
    }
    [case, *_] = chapters.load("ddp").grid("full")
    steps = reached("ddp", case)
    workers = {
        "chapters.ddp.measure:time_on_rank",
        "chapters.ddp.measure:under_nsys",
        "parallel.ddp:BucketedDDP",
    }
    assert workers <= steps and not kernels & steps and "chapters.ddp.measure:grid" not in steps
    [case, *_] = chapters.load("zero").grid("full")
    assert "chapters.zero.ranks:times_on_a_rank" in reached("zero", case)
