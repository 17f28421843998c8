"""`cs336 bench matrix`, `sweep` and `run`: the folder that they write, and which cases they make."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import training_rows

from cs336_systems import chapters
from cs336_systems.chapters.attention import measure as attention
from cs336_systems.chapters.training import measure as training
from cs336_systems.chapters.training import run as training_run
from cs336_systems.chapters.training import sweep as training_sweep
from cs336_systems.chapters.training import trials
from cs336_systems.cli import bench_folders
from cs336_systems.cli import main as cli
from cs336_systems.measure.clocks.steps import Steps

pytest.importorskip("torch")
runner = pytest.importorskip("typer.testing").CliRunner()


@pytest.fixture
def made_up(measured_by):
    """Nothing is measured: the numbers are made up."""
    seen = []
    for table in (training, training_sweep, training_run):
        run = lambda cases: (seen.extend(cases), [training_rows.metrics(case) for case in cases])[1]
        measured_by(table.TABLE, run)
    return seen


def call(*words):
    done = runner.invoke(cli.app, ["bench", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done


def test_a_matrix_is_a_folder(made_up, tmp_path):
    out = tmp_path / "new" / "matrix"
    done = call(
        "matrix", "--attention", "sdpa", "reference", "--wrapper", "none", "naive", "--steps", 5, "--ranks", 2,
        "--size", "tiny", "--out", out,
    )  # fmt: skip
    names = {"matrix.csv", "throughput.png", "memory.png", "scaling.png", "epoch.png", "report.md"}
    assert {path.name for path in out.iterdir()} == names
    assert set(done.stdout.split()) == {str(out / name) for name in names}
    # one rank alone, and both kinds of optimizer's state behind the wrapper, of each attention; the last cell twice
    assert len(made_up) == 2 * 3 + 1 and {case.steps for case in made_up} == {5}
    with open(out / "matrix.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 and {row["status"] for row in rows} == {"ok"}
    report = (out / "report.md").read_text()
    assert "![throughput](throughput.png)" in report and report.count("\n| 2 ") == 7
    call("matrix", "--attention", "sdpa", "--wrapper", "none", "--steps", 5, "--size", "tiny", "--out", out)


def test_a_matrix_of_a_shape_of_ones_own_as_json(made_up, tmp_path):
    tmp_path /= "new"
    call(
        "matrix", "--attention", "sdpa", "--wrapper", "none", "--steps", 5, "--size", "tiny", "--d-model", 96,
        "--num-layers", 3, "--num-heads", 6, "--vocab-size", 777, "--out", tmp_path, "--json", tmp_path / "rows.json",
    )  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["size"] for row in rows} == {"96x192x3x6x777"} and len(rows) == len(made_up) == 2
    config = trials.configuration(made_up[0], "unused")
    sizes = config.model.sizes(config.tokenizer.vocab_size)
    found = (sizes.d_model, sizes.d_ff, sizes.num_layers, sizes.num_heads, sizes.vocab_size)
    assert found == (96, 192, 3, 6, 777)
    assert trials.model("96x192x3x6x777") == dataclasses.replace(sizes, context_length=512)
    for name in ("tiny", "small"):  # names mean what they meant
        named = trials.configuration(
            dataclasses.replace(made_up[0], size=trials.shape(name, d_model=0)), "unused"
        )
        assert named.model.sizes(9) == dataclasses.replace(
            named.model, d_model=0, d_ff=0, num_layers=0, num_heads=0
        ).sizes(9)
    out, none = str(tmp_path / "other" / "folder"), str(tmp_path / "none" / "rows.json")
    for words in (["--d-model", "97"], ["--num-heads", "-1"], ["--d-ff", "wide"], ["--json", none]):
        done = runner.invoke(cli.app, ["bench", "matrix", "--size", "tiny", *words, "--out", out])
        assert done.exit_code == 2 and done.stderr.startswith("Error: "), done.output
        assert not (tmp_path / "other").exists()


def test_json_on_stdout_is_alone_there(measured_by, tmp_path):
    def measured(cases):
        print("    [rank 0] as ranks tell of what they measure")
        return [training_rows.metrics(case) for case in cases]

    measured_by(training.TABLE, measured)
    done = call("matrix", "--wrapper", "none", "--size", "tiny", "--out", tmp_path, "--json", "-")
    assert json.loads(done.stdout) and "[rank 0]" in done.stderr


def test_naive_attention_is_a_command_with_json(measured_by):
    seen = []
    measured_by(attention.TABLE, lambda cases: (seen.extend(cases), [{"peak_gib": 1.0} for _ in cases])[1])
    words = "attention --impl reference --seq-len 256 1024 --dtype fp32 --preset full --json -"
    done = call(*words.split())
    rows = json.loads(done.stdout)
    assert {(row["seq_len"], row["head_dim"]) for row in rows} == {
        (n, d) for n in (256, 1024) for d in (16, 32, 64, 128)
    }
    assert {(case.impl, case.cap_gib) for case in seen} == {("reference", 0)}


def test_a_sweep_is_a_folder(made_up, tmp_path):
    words = "sweep --tiers 48:24,96:48 32:8 --attention reference sdpa --no-save --out"
    call(*words.split(), tmp_path / "s")
    assert {path.name for path in (tmp_path / "s").iterdir()} == {
        "sweep.csv", "bars.png", "heatmap.png", "scaling.png", "report.md",
    }  # fmt: skip
    shapes = [(case.num_queries, case.num_keys) for case in made_up]
    assert sorted(set(shapes)) == [(32, 8), (48, 24), (96, 48)] and len(shapes) == 9


def test_a_sweep_by_count_times_so_many_calls_and_keeps_no_row(tmp_path, monkeypatch):
    made = []
    clock = lambda device, **how: (made.append(how), Steps(device, **how))[1]
    monkeypatch.setattr(training_sweep, "Steps", clock)
    monkeypatch.setenv("CS336_RESULTS", str(tmp_path / "results"))
    words = ["--tiers", "16:8", "--attention", "sdpa", "--heads", 1, "--batch", 1, "--dtype", "fp32"]
    call("sweep", *words, "--warmup", 2, "--iters", 4, "--out", tmp_path / "s")
    assert [(how["warmup"], how["steps"]) for how in made] == [(2, 4)] * 2  # forward, and both passes
    assert not list((tmp_path / "results").rglob("*.csv")) and (tmp_path / "s" / "sweep.csv").is_file()
    done = runner.invoke(cli.app, ["bench", "sweep", "--iters", "-1", "--out", str(tmp_path / "s")])
    assert done.exit_code == 2 and "iters=-1" in done.stderr


def test_a_picture_without_numbers_is_left_out(made_up, tmp_path, measured_by):
    measured_by(training.TABLE, lambda cases: [{"status": "skipped: needs a dream"} for _ in cases])
    call(
        "matrix", "--ranks", 2, "--size", "tiny", "--attention", "sdpa", "--steps", 5, "--out", tmp_path / "m"
    )
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"matrix.csv", "report.md"}
    assert "needs a dream" in (tmp_path / "m" / "report.md").read_text()


def test_a_run_of_any_length_is_a_row(made_up, tmp_path):
    done = call("run", "--minutes", 0.25, "--size", "mini", "--dtype", "fp32", "--compile", "off")
    assert "0.25" in done.stdout and [case.minutes for case in made_up] == [0.25]


def test_all_and_auto_are_what_they_say():
    best = {"wrapper": "none", "dtype": lambda: "fp32"}
    chosen = bench_folders._chosen(
        training.TABLE, {"wrapper": "auto", "dtype": "auto", "sharded": "all"}, best
    )
    assert chosen == {"wrapper": ["none"], "dtype": ["fp32"], "sharded": [False, True]}
    chosen = bench_folders._chosen(training.TABLE, {"wrapper": "all", "steps": "3,4"}, best)
    assert chosen == {"wrapper": list(training.WRAPPERS), "steps": [3, 4]}
    with pytest.raises(ValueError, match=r"steps=all; allowed: whole numbers from 2"):
        bench_folders._chosen(training.TABLE, {"steps": "all"}, best)
    assert chapters.load("training_sweep") is training_sweep.TABLE
