"""Chapter speedrun: its choices, its requirements, its page, its notebook: read, and run on a CPU."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import training_rows
from typer.testing import CliRunner

from cs336_systems import chapters
from cs336_systems.chapters.speedrun import notebook
from cs336_systems.chapters.speedrun import plan as speedrun
from cs336_systems.chapters.speedrun import show as page
from cs336_systems.cli.main import app
from cs336_systems.launch.start import LaunchError
from cs336_systems.report.claims import execute
from cs336_systems.training import config, defaults, forecast, pipeline

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from cs336_systems.training.loop import TrainingError

T4 = {"gib": speedrun.T4_GIB, "dtype": "fp16"}


# ------------------------------------------------------------------------------------------------ choosing
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", ["auto", "mini", "medium"])
def test_a_choice_fits_and_goes_round(size, ranks):
    plan = speedrun.choose(20, "out", size, ranks=ranks, **T4)
    made = plan.config
    at_once = config.for_ranks(made, ranks)  # raises where the sequences do not go round
    assert at_once in defaults.BATCHES and made.model.size == ("small" if size == "auto" else size)
    needed = forecast.memory_bytes(made, "fp16", "cuda", ranks) / 2**30
    assert needed <= defaults.USABLE * speedrun.T4_GIB
    assert made.batch.sequences * made.model.context_length == defaults.STEP_TOKENS
    assert (
        size != "auto" or 200 * ranks < made.text.train_mb < 250 * ranks
    )  # what a T4 could read in 20 minutes
    assert made.parallel.nproc == ranks and made.run.dtype == "fp16"
    assert not made.optimizer.sharded  # these fit without, and it costs time


def test_what_does_not_fit_is_named_with_what_does():
    with pytest.raises(ValueError, match=r"'2.7B' does not fit 14.7 GiB; allowed: mini, tiny, small, medium"):
        speedrun.choose(20, "out", "2.7B", ranks=1, **T4)
    assert speedrun.choose(20, "out", "large", ranks=2, **T4).config.optimizer.sharded  # over two it fits
    with pytest.raises(ValueError, match="allowed: no size"):
        speedrun.choose(20, "out", "small", gib=0.001, ranks=1, dtype="fp16")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"minutes": 0}, "minutes=0"), ({"minutes": -1}, "minutes=-1"), ({"minutes": float("nan")}, "minutes=nan"),
        ({"gib": -1}, "gib=-1"), ({"ranks": -2}, "ranks=-2"), ({"size": "huge"}, "allowed: auto, mini"),
        ({"dtype": "fp8"}, "fp16"), ({"out": ""}, "out=''"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(values, names):
    with pytest.raises(ValueError, match=names):
        speedrun.choose(**{"minutes": 1, "out": "x", "gib": 14.7, "ranks": 1, "dtype": "fp16"} | values)


def test_it_tells_what_fits_and_leaves_what_its_command_needs(tmp_path):
    out = tmp_path / "a run"
    plan, most = (
        speedrun.choose(20, str(out), ranks=2, **T4),
        speedrun.largest_batch("medium", 1024, speedrun.T4_GIB),
    )
    words = f"speedrun --dry-run --gib {speedrun.T4_GIB} --ranks 2 --dtype fp16 --out".split()
    done = CliRunner().invoke(app, [*words, str(out)])
    assert done.exit_code == 0 and [path.name for path in out.iterdir()] == ["speedrun.json"]
    assert f"{most} ({speedrun.gib_of('medium', 1024, most):.1f})" in done.stdout
    assert "2 of 2 GPUs of 15 GiB: small" in done.stdout and plan.command in done.stdout
    start, file = shlex.split(plan.command)[:4], shlex.split(plan.command)[-1]
    assert start == ["torchrun", "--standalone", "--nproc-per-node", "2"] and config.load(file) == plan.config


def small_plan(tmp_path):
    small = {
        "out": str(tmp_path), "text.train_mb": 0.06, "text.valid_mb": 0.02, "tokenizer.vocab_size": 400,
        "model.size": "tiny", "model.context_length": 32, "batch.sequences": 4, "schedule.minutes": 0.02,
        "run.device": "cpu", "generation.tokens": 4, "checkpoints.resume": "auto", "optimizer.learning_rate": 0.003,
    }  # fmt: skip
    return speedrun.Plan(config.load(None, small), defaults.Machine())


@pytest.mark.parametrize("raised", [
    TrainingError("the loss is not finite"), LaunchError("the loss", 0, "cs336_systems.training.loop.TrainingError"),
    LaunchError("rank 0 of 2: signal SIGKILL; it said TrainingError: the loss"),
], ids=str)  # fmt: skip
def test_a_rate_that_diverges_loses_the_sweep(tmp_path, monkeypatch, raised):
    def train(short, say):
        if short.optimizer.learning_rate == 0.003:
            raise raised
        return {"valid_loss": 2 + short.optimizer.learning_rate, "stopped": False}

    monkeypatch.setattr(pipeline, "train", train)
    said = []
    if "SIGKILL" in str(raised):
        with pytest.raises(LaunchError, match="SIGKILL"):
            speedrun.swept(small_plan(tmp_path), said.append)
        return
    assert speedrun.swept(small_plan(tmp_path), said.append).config.optimizer.learning_rate == 0.0015
    assert any(line.startswith("learning rate 0.003: the loss") for line in said)


def test_a_sweep_takes_the_rate_with_the_lowest_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "RATES", (0.001, 1.0, 1000.0))
    # minutes would be as many steps as a busy machine makes
    monkeypatch.setattr(speedrun, "_short", lambda config: {"kind": config.schedule.kind, "steps": 20})
    plan, said = small_plan(tmp_path), []
    result = speedrun.run(plan, said.append, sweep=True)
    found = {
        float(path.parent.name): json.loads(path.read_text())["valid_loss"]
        for path in tmp_path.glob("sweep/*/result.json")
    }
    assert sorted(found) == [3e-6, 0.003, 3.0] and min(found, key=found.get) == 0.003
    assert config.load(tmp_path / "config.json").optimizer.learning_rate == 0.003
    assert config.load(tmp_path / "speedrun.json") == config.load(tmp_path / "config.json")
    logs = [path.read_bytes() for path in tmp_path.glob("**/log.csv")]
    again = speedrun.run(plan, said.append, sweep=True)  # all is there
    assert again["valid_loss"] == result["valid_loss"]
    assert logs == [path.read_bytes() for path in tmp_path.glob("**/log.csv")] and len(logs) == 4


def test_another_gpu_is_not_taken_for_this_cpu(tmp_path, monkeypatch):
    """Not for its precision, and not for none."""
    monkeypatch.setattr(defaults, "gpu_names", lambda: [])
    plan = speedrun.choose(20, str(tmp_path), gib=speedrun.T4_GIB)
    told = "\n".join(speedrun.told(plan))
    assert plan.config.run.dtype == "fp16" and "in fp16: the most" in told and "1 of 1 GPUs of 15 GiB" in told
    assert speedrun.choose(20, str(tmp_path), gib=speedrun.T4_GIB, dtype="bf16").config.run.dtype == "bf16"
    assert speedrun.choose(20, str(tmp_path)).config.run.dtype == "fp32"
    with pytest.raises(ValueError, match=r"gib=14.7: this machine has no GPU"):  # nor trained for on it
        speedrun.run(plan)
    assert not [*tmp_path.iterdir()]


def test_a_full_run_reads_all_of_a_text_once():
    told = {"minutes": 20, "out": "out", "ranks": 1, **T4}
    hub = speedrun.choose(**told, source="tinystories", full=True).config
    assert (
        hub.schedule.length == ("epochs", 1) and hub.text.train_mb == 0 and hub.text.source == "tinystories"
    )
    assert speedrun.choose(**told, full=True).config.text.train_mb == defaults.MOST_MB
    assert speedrun.choose(**told).config.schedule.length == ("minutes", 20)


def test_a_run_goes_where_one_may_write(tmp_path, monkeypatch):
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert notebook.writable("run") == tmp_path / "checkout" / "run"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)
    assert notebook.writable("run") == tmp_path / "run" and notebook.writable("/away") == Path("/away")


def test_requirements_that_are_not_met(tmp_path, project_root):
    declared = ["numpy>=1", "pandas>=999", "tokenizers", "nosuch>=1", "torch>=1.0; sys_platform == 'linux'"]
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(declared)}\n")
    assert notebook.missing(tmp_path) == ["pandas>=999"]  # nosuch is not needed here
    assert notebook.missing(project_root) == []


def test_whether_to_train(monkeypatch):
    assert notebook.asked("yes") and not notebook.asked("no") and notebook.asked("auto")
    monkeypatch.setenv("CS336_BOOK_BUILD", "1")
    assert notebook.asked("yes") and not notebook.asked("auto")
    with pytest.raises(ValueError, match="allowed: auto, yes, no"):
        notebook.asked("maybe")


# ------------------------------------------------------------------------------------------------ its page
def test_frames_of_the_forecast(results_root):
    table = page.fits(speedrun.T4_GIB).set_index("size")
    assert table.loc["small", "512 tokens"] == speedrun.largest_batch("small", 512, speedrun.T4_GIB)
    assert table.loc["2.7B", "512 tokens"] == 0 and table.loc["2.7B", "GiB at 512"] > speedrun.T4_GIB
    training_rows.write(results_root)
    rows = chapters.read("training", preset="full").table("fits").rows()
    tried = page.foreseen(rows)
    assert len(tried) == 6 and (tried["chosen"] == 1).all() and (tried["twice"] == 0).all()
    held = page.held_against(rows)
    assert "OOM" in held.attrs["words"]["peak, GiB"].values()
    assert page.foreseen(rows.assign(status="not measured"))["chosen"].isna().all()


# ------------------------------------------------------------------------------------------------ the notebook
def test_the_notebook_on_made_up_rows(results_root, project_root):
    shutil.copy(project_root / "results" / "published.csv", results_root)
    training_rows.write(results_root)
    sentences, _ = execute(project_root / "book" / "speedrun.ipynb")
    assert sentences and [(s.text, s.against) for s in sentences if s.outcome is not True] == []


def test_the_notebook_without_rows(results_root, project_root):
    sentences, shown = execute(project_root / "book" / "speedrun.ipynb")
    assert {s.outcome for s in sentences} == {None} and shown


@pytest.mark.slow
def test_the_notebook_trains_here_and_writes_into_one_folder(
    tmp_path, results_root, project_root, monkeypatch, capfd
):
    monkeypatch.setattr(defaults, "here", lambda device="auto": defaults.Machine())
    monkeypatch.setattr(defaults, "LEAST_MB", 0.2)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    parameters = {
        "train": "yes",
        "minutes": 0.001,
        "size": "tiny",
        "checkout": str(project_root),
        "out": "run",
    }
    _, shown = execute(project_root / "book" / "speedrun.ipynb", **parameters)
    os.environ.clear()
    os.environ.update(before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"speedrun.json", "log.csv", "loss.svg", "samples.txt", "result.json"} <= there
    assert any("<svg" in str(getattr(thing, "data", "")) for thing in shown)
    said = capfd.readouterr().out
    assert all(
        words in said for words in ("chosen for the CPU: tiny", "torchrun --standalone", "Once upon a time")
    )
