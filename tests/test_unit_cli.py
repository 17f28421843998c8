"""The command line: right answers on stdout, wrong input refused with what is allowed, and no traceback."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wrong_values

import cs336_systems
from cs336_systems import chapters
from cs336_systems.attention import registry
from cs336_systems.cli import doctor, notebooks
from cs336_systems.cli import main as cli
from cs336_systems.store import rows

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("typer")
import typer.testing  # noqa: E402

runner = typer.testing.CliRunner()


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """The command line, which takes longer to make than most calls of it."""
    with pytest.MonkeyPatch.context() as patch:
        command = typer.main.get_command(cli.app)
        patch.setattr(typer.testing, "_get_command", lambda app: command)
        yield


def call(*arguments):
    return runner.invoke(cli.app, list(arguments))


def refused(*arguments, saying):
    """The call ends with exit code 2, says so on stderr, and shows no traceback."""
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert saying in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.output and not done.stdout


# ------------------------------------------------------------------------------------ wrong values
@pytest.mark.parametrize("case", wrong_values.COMMANDS, ids=lambda case: case.id)
def test_a_wrong_value_is_refused_before_anything_starts(case, tmp_path, monkeypatch, project_root):
    """With exit code 2, and a line that names the value and what is allowed."""
    wrong_values.furnish(tmp_path)
    before = set(tmp_path.rglob("*"))
    monkeypatch.setenv("CS336_RESULTS", str(tmp_path / "results"))
    monkeypatch.chdir(project_root)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value.replace("{place}", str(tmp_path)))
    for place in ("store.machine", "report.chapter"):  # without a GPU, wherever this is tested
        monkeypatch.setattr(f"cs336_systems.{place}.machine_name", lambda: "cpu-2")
    for start in ("store.measuring.measure", "cli.notebooks.own_kernel", "report.build._jupyter_book"):
        monkeypatch.setattr(f"cs336_systems.{start}", lambda *args, **options: pytest.fail("has started"))
    done = call(*(argument.replace("{place}", str(tmp_path)) for argument in case.arguments))
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert all(part in said for part in case.says), said
    assert "Traceback" not in done.output and not done.stdout
    assert set(tmp_path.rglob("*")) == before


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def test_folders_that_variables_name_are_those_of_the_caller(tmp_path, monkeypatch):
    """Notebooks run in the checkout, wherever `cs336 run` was called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CS336_RESULTS", "mine")
    before = dict(os.environ)
    with notebooks.own_kernel():
        assert os.environ["CS336_RESULTS"] == str(tmp_path / "mine")
    assert dict(os.environ) == before


def test_what_a_notebook_s_processes_print_is_shown_once(tmp_path, capfd, monkeypatch):
    """A cell prints its own lines, and starts a process that prints its own."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # by which ipykernel captures less
    nbformat = pytest.importorskip("nbformat")
    cell = "import subprocess, sys\nprint('of-the-cell', flush=True)\n"
    cell += "subprocess.run([sys.executable, '-c', \"print('of-the-process')\"])"
    (tmp_path / "book").mkdir()
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbformat.write(book, tmp_path / "book" / "x.ipynb")
    assert notebooks.run(tmp_path, ["x"], {}, log=lambda line: None) == []
    shown = capfd.readouterr().out
    assert [shown.count(line) for line in ("of-the-cell", "of-the-process")] == [1, 1]


# ------------------------------------------------------------------------------------ doctor
def test_doctor_says_why():
    done = call("doctor")
    assert done.exit_code == 0 and done.stdout.startswith("machine: ")
    names = "python torch triton NVRTC flash_triton flash_cuda sdpa nsys xelatex jupyter-book nccl"
    assert all(name in done.stdout for name in names.split())
    told = json.loads(call("doctor", "--json", "-").stdout)
    assert set(told) == {"machine", "checks", "attention", "kernels"}
    assert told["attention"] == registry.features()
    assert re.search(r"flash_torch +yes +no +no\n", done.stdout)
    assert all(set(c) == {"section", "name", "available", "detail"} and c["detail"] for c in told["checks"])


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("no attribute 'async_load'", "triton 9.9: tried; RuntimeError: no attribute 'async_load'"),
        (None, "triton 9.9: tried; it compiles them: CS336_HOPPER=1 has them used"),
    ],
)
def test_doctor_says_what_an_untried_triton_breaks(broken, told, monkeypatch):
    pytest.importorskip("torch")
    aot = pytest.importorskip("cs336_systems.attention.checks.aot")

    def compile_hopper_kernel(*arguments, **options):
        if broken:
            raise ValueError("at 31:4:\n    tma.load(k_desc)\n    ^") from RuntimeError(f"{broken}\n")
        return aot.Compiled(128, 0, 0, 128, "")

    monkeypatch.setattr(aot, "compile_hopper_kernel", compile_hopper_kernel)
    for name in ("hopper_reason", "untried_triton"):
        monkeypatch.setattr(doctor, name, lambda: "triton 9.9: tried")
    checks = {c["name"]: c for c in json.loads(call("doctor", "--json", "-").stdout)["checks"]}
    assert checks["flash_triton on Hopper"]["detail"] == told


def test_doctor_names_no_tool_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    tools = {c["name"]: c for c in json.loads(call("doctor", "--json", "-").stdout)["checks"]}
    assert not tools["nsys"]["available"] and "no nsys on the PATH" in tools["nsys"]["detail"]


# ------------------------------------------------------------------------------------ bench
ONE = ("bench", "hardware", "--preset", "smoke", "--kind", "launch", "--size", "1")


def test_bench_measures_once_and_shows_a_table(root):
    first, second = call(*ONE), call(*ONE)
    assert first.exit_code == second.exit_code == 0
    assert "1 of 1 groups to measure" in first.stderr and "all 1 groups are measured" in second.stderr
    head, line = first.stdout.splitlines()
    assert head.split() == [
        "kind", "dtype", "size", "repeat", "ms_p20", "ms_p50", "ms_p80", "us_per_launch", "status",
    ]  # fmt: skip
    assert line.split()[0] == "launch" and line.split()[-1] == "ok"
    assert first.stdout == second.stdout
    assert len(list(root.glob("*/hardware.csv"))) == 1


def test_bench_as_json(root, tmp_path):
    [row] = json.loads(call(*ONE, "--no-save", "--json", "-").stdout)
    assert (row["kind"], row["size"], row["status"], row["tflops"]) == ("launch", 1, "ok", None)
    call(*ONE, "--no-save", "--json", str(tmp_path / "rows.json"))
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["us_per_launch"] > 0
    assert not root.exists()


def test_bench_ends_with_1_where_a_case_failed_and_still_shows_the_rows(root, measured_by):
    def broken(cases):
        raise KeyError("broken")

    measured_by(chapters.load("hardware"), broken)
    done = call(*ONE)
    assert done.exit_code == 1
    assert "error: KeyError" in done.stdout and "1 cases of hardware ended in an error" in done.stderr


def test_cases_beyond_the_grid():
    flash = chapters.load("flash_bench")
    given = {"seq_len": "300, 512,300", "head_dim": 64, "dtype": "fp32", "impl": ["sdpa", "reference"]}
    cases = chapters.cases_beyond(flash, "smoke", **given)
    # where the grid has cases its own, the A/A pair with them
    own = [(512, "sdpa", 1, 0), (512, "reference", 1, 0), (512, "reference", 1, 1)]
    assert [(c.seq_len, c.impl, c.heads, c.repeat) for c in cases] == [
        *((300, impl, 1, 0) for impl in ("sdpa", "reference")), *own
    ]  # fmt: skip
    # each of these values is in the grid, these two together are not
    some = chapters.cases_beyond(
        flash, "full", seq_len="128,1024", heads=16, dtype="bf16", impl="flash_triton"
    )
    assert {(c.seq_len, c.repeat) for c in some} == {(128, 0), (1024, 0), (1024, 1)}
    every_field = chapters.cases_beyond(flash, "smoke", **given, heads="1", repeat="1")
    assert len(every_field) == 4 and {c.repeat for c in every_field} == {1}
    hardware = chapters.load("hardware")  # has no cases beyond its grid
    assert {case.kind for case in chapters.cases_beyond(hardware, "smoke", kind="launch")} == {"launch"}
    with pytest.raises(ValueError, match="size=300 is not in the smoke preset; allowed: all, 256"):
        chapters.cases_beyond(hardware, "smoke", size="300")
    kernels = chapters.load("leaderboard_kernels")
    with pytest.raises(ValueError, match="the full preset has no case with impl=fa4, dtype=fp32"):
        chapters.cases_beyond(kernels, "full", impl="fa4", dtype="fp32")


def test_flash_off_the_grid(root):
    shape = ("--seq-len", "40", "--head-dim", "16", "--dtype", "fp32", "--heads", "2", "--impl", "sdpa")
    done = call("bench", "flash", "--preset", "smoke", *shape)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split()[:6] == ["2", "40", "16", "fp32", "sdpa", "0"]


def test_tune_without_a_gpu_says_so():
    pytest.importorskip("triton")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is a GPU to tune on")
    shape = ("--dtype", "fp32", "--seq-len", "256", "--head-dim", "64", "--heads", "1")
    done = call("bench", "flash", "--tune", *shape)
    assert done.exit_code == 1 and "Error: tuning needs a CUDA device" in done.stderr
    assert "Traceback" not in done.output


def test_tune_is_called_with_the_shape(monkeypatch):
    seen = {}
    fake = SimpleNamespace(tune=lambda **shape: seen.update(shape) or "the row to add")
    monkeypatch.setitem(sys.modules, "cs336_systems.attention.checks.tune", fake)
    done = call("bench", "flash", "--tune", "--dtype", "bf16", "--head-dim", "80", "--seq-len", "4096")
    assert done.stdout == "the row to add\n"
    assert seen.pop("each")
    assert seen == {"head_dim": 80, "dtype": "bf16", "seq_len": 4096, "heads": 16}


# ------------------------------------------------------------------------------------ results, book
def test_results_merge(root, tmp_path, monkeypatch):
    hardware = chapters.load("hardware")
    monkeypatch.setattr(chapters, "CHAPTERS", ("hardware",))
    row = {"kind": "launch", "dtype": "fp32", "size": 1, "repeat": 0, "status": "ok", "run": "r", "env": "e"}
    row |= {"time_utc": "2026-01-01T00:00:00Z", "code": "c", "us_per_launch": 3.0}
    rows.write(hardware, "h100-x1", [row], tmp_path / "other")
    done = call("results", "merge", str(tmp_path / "other"))
    assert done.stdout == "h100-x1: 1 of 1 rows of hardware\n"
    assert list(rows.read(hardware, "h100-x1", root)["us_per_launch"]) == [3.0]


def test_book_prints_what_it_built(monkeypatch, tmp_path):
    build = pytest.importorskip("cs336_systems.report.build")
    asked = {}
    built = lambda tables_of, **options: asked.update(options) or [tmp_path / "index.html"]
    monkeypatch.setattr(build, "build", built)
    assert call("book", "--strict").stdout == f"{tmp_path / 'index.html'}\n"
    assert asked == {"pdf": False, "strict": True}

    def failing(*arguments, **options):
        raise build.BookError("needs XeLaTeX")

    monkeypatch.setattr(build, "build", failing)
    done = call("book", "--pdf")
    assert done.exit_code == 1 and "Error: needs XeLaTeX" in done.stderr and "Traceback" not in done.output


# ------------------------------------------------------------------------------------ run
PARAMETERS = """\
measure: str = "auto"  # when to measure
preset: str = "auto"
machine: str = "auto"
refresh: str = "missing"
impl: str = "all"
"""


def write_notebook(path, code):
    cell = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_code_cell(code)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like the project, with two chapters: one that fails, one that doesn't."""
    (tmp_path / "_toc.yml").write_text("")
    write_notebook(tmp_path / "book" / "sour.ipynb", "raise KeyError('sour grapes')")
    write_notebook(
        tmp_path / "book" / "sweet.ipynb",
        "import sys, pathlib\n"
        "print('hello from the notebook')\n"
        "seen = [sys.executable, preset, refresh, impl]\n"
        "pathlib.Path('seen.txt').write_text(repr(seen))",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chapters, "CHAPTERS", ("sour", "sweet"))
    monkeypatch.setattr(chapters, "tables", lambda *names: ())
    monkeypatch.setattr(
        "cs336_systems.report.chapter.Chapter.from_parameters", lambda name, given, root: None
    )
    return tmp_path


def test_run_goes_on_after_a_failure_with_this_interpreter(checkout, monkeypatch):
    # a kernel of the same name in the user's folder, which must not be taken
    kernel = checkout / "home" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text('{"argv": ["/no/such/python"], "display_name": "other", "language": "python"}')
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(checkout / "home"))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    done = call("run", "--preset", "smoke", "-p", "impl=a,b")
    assert done.exit_code == 1
    assert "sour grapes" in done.stderr and "1 of 2 chapters failed: sour" in done.stderr
    seen = (checkout / "seen.txt").read_text()
    assert seen == repr([sys.executable, "smoke", "missing", "a,b"])
    names = sorted(p.name for p in (checkout / "_build" / "notebooks").iterdir())
    assert names == ["sour.ipynb", "sweet.ipynb"]  # both keep their outputs, the traceback among them
    assert "sour grapes" in (checkout / "_build" / "notebooks" / "sour.ipynb").read_text()
    assert "JUPYTER_PATH" not in os.environ


def test_run_refuses_before_anything_runs(checkout):
    (checkout / "book" / "sour.ipynb").unlink()
    refused("run", saying="sour.ipynb")
    assert not (checkout / "_build").exists()


@pytest.mark.parametrize(
    ("gone", "saying"), [(False, "inside a checkout"), (True, "the current folder has been removed")]
)
def test_run_outside_a_checkout(tmp_path, monkeypatch, gone, saying):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.delenv("CS336_RESULTS", raising=False)
    monkeypatch.chdir(folder)
    if gone:
        folder.rmdir()
    refused("run", "hardware", saying=saying)


# ------------------------------------------------------------------------------------ the surface
def test_help_of_every_command():
    for command in ("", "run", "book", "submit", "doctor", "bench", "bench hardware", "bench flash"):
        done = call(*command.split(), "--help")
        assert done.exit_code == 0 and "Usage" in done.stdout
    done = call("--version")
    assert (done.exit_code, done.stdout) == (0, f"cs336_systems {cs336_systems.__version__}\n")


def test_module_is_the_command_and_helps_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "cs336_systems", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Usage: cs336 " in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "cs336_systems.cli.main" in imported
    assert not imported & {"torch", "triton", "pandas", "matplotlib"}


@pytest.mark.parametrize("arguments", [("run", "hardware"), ("book",), ("submit",)], ids=" ".join)
def test_a_backend_that_matplotlib_does_not_know_is_refused_in_a_line(arguments):
    command = [sys.executable, "-m", "cs336_systems", *arguments]
    wrong = os.environ | {"MPLBACKEND": "nosuch"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=wrong)
    assert done.returncode == 2 and "'nosuch' is not a valid value for backend" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command", ["--help", "data --train-mb 0.001 --set text.valid_mb=0.001 --out {place}"]
)
def test_a_full_output_ends_in_a_line(command, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        words = command.replace("{place}", str(tmp_path)).split()
        command = [sys.executable, "-m", "cs336_systems", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write the output: No space left on device\n"


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delattr("cs336_systems.cli.bench", raising=False)
    monkeypatch.delitem(sys.modules, "cs336_systems.cli.bench", raising=False)
    monkeypatch.setattr("cs336_systems.cli.terminal.has_module", lambda name: name != "tqdm")
    done = call("bench", "hardware", "--preset", "smoke", "--kind", "launch", "--no-save")
    assert done.exit_code == 1 and done.stderr.startswith("Error: tqdm is not installed")


def test_a_package_that_pandas_lacks_is_named(monkeypatch):
    def lacking():
        raise ImportError("Unable to import") from ModuleNotFoundError("No module", name="numpy.core")

    monkeypatch.setattr(doctor, "checks", lacking)
    monkeypatch.setattr("cs336_systems.cli.terminal.has_module", lambda name: name != "numpy")
    done = call("doctor")
    assert done.exit_code == 1 and done.stderr.startswith("Error: numpy is not installed")


def test_an_interrupted_command_says_so_in_a_line(monkeypatch):
    def run(*arguments, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(notebooks, "run", run)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # restored afterwards
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = call("run", "hardware")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Interrupted\n")


@pytest.mark.parametrize(
    ("told", "attention"),
    [
        ((), "reference"),
        (("--model", "some:Model"), "auto"),
        (("--model", "some:Model", "--attention", "sdpa"), "sdpa"),
    ],
)
def test_another_model_has_its_own_attention(told, attention, monkeypatch):
    asked = []
    bench = lambda chapter, given, *more, **options: asked.append(given["attention"])
    monkeypatch.setattr(cli, "_bench", bench)
    assert call("bench", "model", *told).exit_code == 0
    assert asked == [attention]
