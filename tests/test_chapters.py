"""What every chapter is held to: its grids, and its notebook on the reference rows, on others, on a laptop's, on none.

A chapter is found by its name in `_toc.yml`. Where its own test file has a function `laptop(case) -> metrics`, the
notebook is run on such rows of its smoke preset, too.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import json
import re
from pathlib import Path

import pytest
import step_rows

from cs336_systems import accounting, chapters
from cs336_systems.accounting.zero import STEP_MOMENTS
from cs336_systems.report.claims import execute
from cs336_systems.report.coverage import chapters_in_toc, parts
from cs336_systems.sizes import HANDOUT_SIZES
from cs336_systems.store import machine, measuring, rows, selection
from cs336_systems.store.machine import machine_name

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = [name for name in chapters_in_toc(ROOT) if (ROOT / "book" / f"{name}.ipynb").is_file()]
LAPTOPS = [
    name for name in chapters.CHAPTERS if hasattr(importlib.import_module(f"test_chapter_{name}"), "laptop")
]
REFERENCE = json.loads((ROOT / "results" / "reference.json").read_text())
WAITING = ("leaderboard", "training", "speedrun")  # have sentences whose rows are yet to be measured
UNPAIRED = (  # tables in which not every group has a repetition, or one has several
    "allreduce", "benchmarking", "ddp", "fsdp", "hardware", "leaderboard", "memory", "mixed_precision", "profiling",
    "training_run", "zero",
)  # fmt: skip
LONG = (128, 256, 512, 1024)
SHARDINGS = {"wrapper": ("ddp", "sharded", "fsdp", "fsdp_layers", "fsdp2", "fsdp2_two")}
ASKED = {  # by the handout, and by the pages: every combination is in the full grid
    "allreduce": [
        {"backend": ("gloo", "nccl"), "world_size": (2, 4, 6), "num_bytes": [n * 2**20 for n in (1, 10, 100, 1024)]},
    ],
    "attention": [
        {"head_dim": (16, 32, 64, 128), "seq_len": (256, 1024, 4096, 8192, 16384), "dtype": ("fp32", "bf16"),
         "impl": ("reference", "reference_compiled", "flash_triton"), "cap_gib": (0,)},
        {"head_dim": (16, 32, 64, 128), "seq_len": (8192, 16384), "dtype": ("fp32",), "cap_gib": (24,)},
    ],
    "benchmarking": [
        {"size": HANDOUT_SIZES, "context_length": LONG, "mode": ("forward", "train_step"), "dtype": ("fp32",)},
        {"size": HANDOUT_SIZES, "mode": ("forward_backward",), "warmup": (0, 1, 2, 5), "steps": (10,)},
    ],
    "ddp": [
        {"size": ("xl",), "context_length": (128, 512), "wrapper": ("none", "naive", "flat", "overlapped")},
        {"size": ("xl",), "context_length": (128, 512), "wrapper": ("bucketed",), "bucket_mb": (1, 10, 100, 1000)},
    ],
    "flash_bench": [
        {"seq_len": [2**n for n in range(7, 17)], "head_dim": (16, 32, 64, 128), "dtype": ("bf16", "fp32"),
         "impl": ("flash_triton", "reference", "reference_compiled")},
        {"heads": (16,), "seq_len": (16384,), "head_dim": (64,),
         "impl": ("flash_triton", "flash_cuda", "sdpa_flash", "sdpa_cudnn", "flex_compiled")},
    ],
    "fsdp": [
        {"size": ("xl",), "context_length": (128, 512)} | SHARDINGS,
        {"size": ("2.7B",), "context_length": (512, 2048)} | SHARDINGS,
    ],
    "hardware": [
        {"kind": ("matmul",), "dtype": ("bf16", "fp16", "tf32", "fp32", "fp64")},
        {"kind": ("matmul", "copy", "launch", "launch_graph"), "repeat": (0, 1)},
    ],
    "memory": [
        {"size": ("2.7B",), "context_length": (128, 256, 512), "dtype": ("fp32", "bf16"),
         "mode": ("forward", "forward_graph", "train_step")},
        {"size": HANDOUT_SIZES, "mode": ("train_step",)},
    ],
    "mixed_precision": [
        {"size": HANDOUT_SIZES, "mode": accounting.MODES, "dtype": ("fp32", "tf32", "bf16"),
         "context_length": (512,), "batch": (4,), "warmup": (5,), "steps": (10,)},
    ],
    "profiling": [
        {"size": HANDOUT_SIZES, "context_length": LONG, "dtype": ("fp32",),
         "range": ("inference", "forward", "backward", "optimizer", "scores", "softmax", "output")},
    ],
    "torch_compile": [
        {"size": HANDOUT_SIZES, "mode": ("forward", "train_step"), "dtype": ("bf16",), "compile": ("off", "default")},
        {"size": ("small", "medium"), "context_length": (1024,), "attention": ("flash_triton", "sdpa"),
         "compile": ("reduce-overhead",), "batch": (4,)},
    ],
    "training": [
        {"attention": ("reference", "sdpa", "flash_triton"), "sharded": (False, True), "world_size": (2,),
         "wrapper": ("naive", "flat", "overlapped", "bucketed", "in_place", "torch")},
    ],
    "zero": [
        {"variant": ("plain", "sharded", "torch", "torch_zero"), "moment": STEP_MOMENTS, "context_length": (128, 512)},
        {"variant": ("alone", "plain", "sharded", "overlapped", "torch", "torch_zero"), "moment": ("timed",),
         "context_length": (128, 512, 1024)},
        {"world_size": (1, 2, 4, 8)},
    ],
}  # fmt: skip
NEEDS_A_GPU = (  # by what a case of the smoke preset becomes one that no CPU measures
    ("attention", "cap_gib", (24,)), ("attention", "impl", ("flash_triton",)), ("benchmarking", "dtype", ("tf32",)),
    ("benchmarking", "attention", ("flash_triton",)), ("ddp", "dtype", ("tf32",)), ("fsdp", "size", ("xl",)),
    ("flash_bench", "impl", ("flash_triton", "flash_cuda", "sdpa_cudnn", "sdpa_efficient", "flex_compiled")),
    ("hardware", "dtype", ("tf32", "fp16")), ("hardware", "size", (16384,)), ("hardware", "kind", ("launch_graph",)),
    ("hardware", "kind", ({"kind": "copy", "dtype": "bytes", "size": 2**32},)),
    ("leaderboard_kernels", "impl", ("flash_triton", "plain_triton", "sdpa_cudnn", "sdpa_efficient", "fa4")),
    ("leaderboard_kernels", "impl", ("flex_compiled",)), ("leaderboard_ladder", "impl", ("f_all_tiles", "f_hopper")),
    ("memory", "size", ("small",)), ("profiling", "dtype", ("tf32",)), ("zero", "size", ("xl",)),
    ("training_sweep", "cap_gib", (24,)),
)  # fmt: skip
DERIVED = {  # answers that rest on no rows
    "benchmarking_script (a)", "memory_profiling (d)", "flash_forward (a)", "flash_forward (c)", "flash_backward",
    "naive_ddp", "ddp_overlap_individual_parameters", "ddp_overlap_bucketed", "ddp_bucketed_benchmarking (b)", "fsdp",
    "gradient_checkpointing (a)",
}  # fmt: skip


def run(chapter, **parameters):
    """The sentences of a chapter's notebook, and what it displayed."""
    return execute(ROOT / "book" / f"{chapter}.ipynb", **parameters)


# ------------------------------------------------------------------------------------------------ grids
@pytest.mark.parametrize("preset", selection.PRESETS)
@pytest.mark.parametrize("table", chapters.tables())
def test_grids(table, preset):
    """Each case once, of allowed values. A case is repeated somewhere, in most tables in each
    group."""
    experiment = chapters.load(table)
    cases = experiment.grid(preset)
    assert len(set(cases)) == len(cases) > 0
    for case in cases:
        assert not getattr(case, "repeat", 0) or dataclasses.replace(case, repeat=0) in cases
        given = {f: v for f, v in dataclasses.asdict(case).items() if f in experiment.choices}
        assert selection.named(experiment, **given) == {field: [value] for field, value in given.items()}
    for asked in ASKED.get(table, ()) if preset == "full" else ():
        there = {tuple(getattr(case, field) for field in asked) for case in cases}
        assert set(itertools.product(*asked.values())) <= there
    repeats = hasattr(cases[0], "repeat") and table != "training_run"  # which takes minutes
    assert not repeats or any(case.repeat for case in cases)
    for group in rows.groups(experiment, cases):
        if table not in UNPAIRED:
            assert any(case.repeat for case in group)
            assert {dataclasses.replace(case, repeat=0) for case in group if case.repeat} <= set(group)


# ------------------------------------------------------------------------------------------------ measuring
@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
@pytest.mark.parametrize(("table", "field", "values"), NEEDS_A_GPU)
def test_what_needs_a_gpu_is_skipped_without_one(table, field, values):
    experiment = chapters.load(table)
    for value in values:
        case = dataclasses.replace(
            experiment.grid("smoke")[0], **(value if isinstance(value, dict) else {field: value})
        )
        [metrics], _ = measuring._run(experiment, [case])
        assert metrics.pop("status").startswith("skipped: needs "), (value, metrics)
        assert not any("ms_" in column for column in metrics)  # no number of what was not run


@pytest.mark.parametrize("table", ["allreduce", "ddp", "fsdp", "training", "zero"])
def test_one_gpu_is_not_taken_for_two(table, monkeypatch):
    """Nothing is launched, and the rest of the grid is not in the way."""
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    experiment = chapters.load(table)
    on_two = [
        c for c in experiment.grid("full") if c.world_size == 2 and getattr(c, "device", "cuda") == "cuda"
    ]
    [group, *_] = rows.groups(experiment, on_two)
    for metrics in measuring._run(experiment, group)[0]:
        assert metrics["status"].startswith("skipped: needs 2 GPUs")


class NothingFits(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there, some look at the GPU's memory before they measure"
)
@pytest.mark.parametrize(
    "table", ["attention", "benchmarking", "hardware", "mixed_precision", "profiling", "training_sweep"]
)
def test_a_group_that_does_not_fit_is_rows_and_leaves_the_precision_as_it_was(table, results_root):
    experiment = chapters.load(table)
    group = rows.groups(experiment, experiment.grid("smoke"))[0]
    torch.set_float32_matmul_precision("medium")
    with NothingFits():
        measuring.measure(experiment, group, log=lambda line: None)
    assert [*rows.read(experiment, machine_name())["status"]] == ["oom"] * len(group)
    assert torch.get_float32_matmul_precision() == "medium"


# ------------------------------------------------------------------------------------------------ notebooks
@pytest.fixture
def published(monkeypatch):
    monkeypatch.setenv("CS336_RESULTS", str(ROOT / "results"))


@pytest.mark.parametrize("chapter", NOTEBOOKS)
def test_the_reference_rows_bear_every_sentence_out_and_every_part_has_its_answer(chapter, published):
    sentences, _ = run(chapter)
    waits = chapter in WAITING or (chapter in chapters.CHAPTERS and chapter not in REFERENCE)
    assert [s.text for s in sentences if not (s.outcome or (waits and s.outcome is None))] == []
    assert sorted(s.part for s in sentences if s.part) == sorted(parts(chapter))


@pytest.mark.parametrize("chapter", NOTEBOOKS)
def test_papermill_knows_every_parameter(chapter, caplog):
    """It reads lines: a second `=`, in a comment too, or a value of several lines hides a parameter from it."""
    inspection = pytest.importorskip("papermill.inspection")
    page = ROOT / "book" / f"{chapter}.ipynb"
    [cell] = [
        "".join(cell["source"])
        for cell in json.loads(page.read_text())["cells"]
        if "parameters" in cell["metadata"].get("tags", [])
    ]
    assert cell.startswith("# Parameters")  # how the chapter tells a parameters cell from others
    told = inspection.inspect_notebook(str(page))
    assert list(told) == [statement.target.id for statement in ast.parse(cell).body]
    assert all(parameter["help"] for parameter in told.values()) and not caplog.records


def filters(chapter):
    """The parameters of a chapter's notebook by which cases are chosen."""
    [names] = [
        [statement.target.id for statement in ast.parse("".join(cell["source"])).body]
        for cell in json.loads((ROOT / "book" / f"{chapter}.ipynb").read_text())["cells"]
        if "parameters" in cell["metadata"].get("tags", [])
    ]
    return names[4:]


def values_of(chapter, field):
    tables = chapters.tables_of(chapter)
    tables = [table for table in tables if field in rows.case_fields(table)]
    return [str(v) for v in dict.fromkeys(v for t in tables for v in selection.values(t, "full", field))]


@pytest.mark.parametrize(
    ("chapter", "field"), [(c, field) for c in chapters.CHAPTERS for field in filters(c)]
)
def test_a_single_restriction_with_nothing_measured(chapter, field, results_root):
    """Whole kinds of cases are missing then, not only their numbers; the last value is the one furthest from all."""
    assert run(chapter, preset="full", **{field: values_of(chapter, field)[-1]})[1]


def a_part_of(chapter):
    """The machines that have rows of the chapter, others than the reference first; one value of its first field."""
    measured = [path.parent.name for path in (ROOT / "results").glob(f"*/{chapter}.csv")]
    reference = REFERENCE.get(chapter, [])
    others_first = sorted(
        measured, key=lambda name: -reference.index(name) if name in reference else -len(reference)
    )
    field = filters(chapter)[0]
    value = values_of(chapter, field)[0]
    return {"machine": ",".join(others_first) or "auto", "preset": "full", field: value}


@pytest.mark.parametrize("chapter", chapters.CHAPTERS)
def test_a_part_of_the_rows_of_several_machines(chapter, published):
    assert run(chapter, **a_part_of(chapter))[0]


@pytest.mark.parametrize("chapter", LAPTOPS)
def test_a_laptops_rows(chapter, results_root):
    """Those of the smoke preset, made up: they are shown, whatever the sentences about larger models make of them."""
    of_case = importlib.import_module(f"test_chapter_{chapter}").laptop
    for experiment in chapters.tables_of(chapter):
        step_rows.write(experiment, experiment.grid("smoke"), results_root, "laptop", of_case)
    sentences, shown = run(chapter, machine="laptop", preset="smoke")
    assert sentences and any("laptop" in str(getattr(thing, "data", thing)) for thing in shown)


@pytest.mark.parametrize("chapter", chapters.CHAPTERS)
def test_texts_of_rows_and_machines_are_no_markup(chapter, results_root):
    """Whatever a merged folder says is shown as it is: in tables, sentences and what names the machine."""
    bad = "<script>a</script> <img src=x onerror=b> [c](javascript:d) `e` $\\f$ {g}`h` | <!--"
    for experiment in chapters.tables_of(chapter):
        failed = lambda case: {"status": f"error: {bad}"}
        step_rows.write(experiment, experiment.grid("smoke"), results_root, "laptop", failed)
    named = dict.fromkeys(("cpu", "gpu", "driver", "torch", "triton"), bad)
    step_rows.spell_out({"00000000": named | {"gpus": bad}}, results_root, "laptop")
    _, shown = run(chapter, machine="laptop", preset="smoke")
    of = {
        kind: [str(thing[kind]) for thing in shown if kind in thing]
        for kind in ("text/markdown", "text/html")
    }
    for text in of["text/markdown"]:
        assert not re.search(r"<script|<img|<!--|\]\(javascript|\$\\f|\{g\}`", text)
    for text in of["text/html"]:
        assert not re.search(r"<script|<img|<!--|href=.javascript", text)
    assert any("&#60;script&#62;" in text for texts in of.values() for text in texts)


@pytest.mark.parametrize("chapter", chapters.CHAPTERS)
def test_without_rows_only_what_is_derived_is_decided(chapter, results_root):
    sentences, shown = run(chapter)
    assert shown and {s.part for s in sentences if s.outcome is not None} <= DERIVED
