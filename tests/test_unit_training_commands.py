"""`cs336 data`, `tokenize`, `train`, `generate`: what is wrong is told in a line, with exit code 2."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import numpy as np
from typer.testing import CliRunner

from cs336_systems.accounting.model import num_parameters
from cs336_systems.cli.main import app
from cs336_systems.launch.group import Rank
from cs336_systems.store.files import StoreError
from cs336_systems.training import config, forecast
from cs336_systems.training.log import RunLog, picture
from cs336_systems.training.loop import Data, Trainer

RESULTS = Path(__file__).parents[1] / "results"
FSDP_ROWS = [
    row
    for row in csv.DictReader((RESULTS / "h200-x2" / "fsdp.csv").open(encoding="utf-8"))
    if (row["kind"], row["repeat"]) == ("time", "0") and row["wrapper"] in ("ddp", "sharded", "fsdp")
]
WRONG = [  # --set, and what the line names
    ("model.sizes=small", "model.sizes"), ("modle.size=small", "modle"), ("size", "expected section.key=value"),
    ("=3", "expected section.key=value"), ("model=small", "it must be a section"),
    ("model.size=huge", "small, medium"), ("model.context_length=0", "1 or more"),
    ("model.context_length=1.5", "a whole number"), ("model.d_model=10", "multiple of num_heads"),
    ("model.num_kv_heads=3", "multiple of num_kv_heads=3"),
    ("model.d_model=-8", "0 or more"), ("model.attention=flash", "flash_triton"), ("text.train_mb=-1", "0 or more"),
    ("text.valid_mb=0", "above 0"), ("text.train_mb=nan", "a number"), ("tokenizer.vocab_size=256", "257 or more"),
    ("tokenizer.vocab_size=99999999999", "at most 4294967296"), ("tokenizer.path=/no/such.json", "/no/such.json"),
    ("tokenizer.separator=</s>", "needs tokenizer.path"), ("optimizer.beta1=1", "at most 0.9999999"),
    ("optimizer.learning_rate=11", "at most 10"), ("optimizer.learning_rate=fast", "a number"),
    ("optimizer.sharded=perhaps", "true or false"), ("schedule.kind=linear", "cosine, constant"),
    ("batch.accumulate=5", "multiple of"), ("run.device=tpu", "auto, cpu, cuda"), ("run.dtype=fp8", "bf16, fp16"),
    ("run.compile=yes", "off, attention, blocks, whole, graphs"), ("parallel.nproc=3", "multiple of 3"),
    ("parallel.wrapper=zero3", "in_place, torch, fsdp"), ("checkpoints.resume=/no/such", "no, auto, the folder"),
    ("generation.top_p=0", "above 0"), ("out=", "it must name a folder"), ("text.source=/no/such", "/no/such"),
    ("checkpoints.init_from=/no/such", "init_from='/no/such': /no/such is missing"),
    ("generation.temperature=1e-300", "1e-6 or more"), ("model.num_layers=100000", "GiB are free"),
    ("model.attention=flash_cuda", "is unavailable"), ("generation.prompt=\ud800", "is not UTF-8"),
    ("parallel.timeout_s=1e9", "at most 100000000"), ("parallel.bucket_mb=1e7", "at most 1000000"),
]  # fmt: skip


def call(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def refused(done, names):
    lines = done.stderr.strip().splitlines()
    assert done.exit_code == 2 and len(lines) == 1 and names in lines[0], done.stderr
    return lines[0]


@pytest.mark.parametrize(("change", "names"), WRONG, ids=ascii)
def test_wrong_values_are_told_in_a_line(tmp_path, change, names):
    told = [] if change.startswith("out=") else ["--out", tmp_path / "run"]
    small = ["--train-mb", 0.01, "--set", "text.valid_mb=0.005"] if "mb" not in change else []
    small += ["--set", "run.device=cpu"] if not change.startswith("run.") else []
    line = refused(call("train", *told, *small, "--set", change), names)
    assert line.startswith("Error: ")
    run = tmp_path / "run"  # none that is empty
    assert not run.exists() or [*run.iterdir()] == [run / "text"]


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("a.toml", "size = ", "a.toml"), ("a.json", "{", "a.json"), ("a.json", "[1]", "not an object"),
        ("a.yaml", "a: 1", ".toml or .json"), ("a.toml", "[model]\nsize = 3\n", "model.size=3"),
        ("a.toml", "[optimizer]\nlr = 1\n", "optimizer.lr"), ("a.toml", "out = 3\n", "out=3"),
        ("a.toml", b"\xff\xfe", "a.toml"), ("a.json", "[" * 100_000, "a.json"),
        ("a.json", '{"out": "x", "out": "y"}', "'out' twice"),
    ],
)  # fmt: skip
def test_wrong_files_are_told_in_a_line(tmp_path, name, content, names):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(call("train", "--config", file), names)
    refused(call("tokenize", "--config", tmp_path / "none.toml"), "none.toml")


def test_flags_are_keys(tmp_path):
    refused(call("train", "--steps", 5, "--minutes", 1), "steps and minutes")
    refused(call("train", "--steps", 5, "--set", "schedule.steps=6"), "schedule.steps is given twice: 5, 6")
    refused(call("train", "--learning-rate", "fast"), "optimizer.learning_rate='fast'; it must be a number")
    refused(call("tokenize", "--vocab-size", 3), "tokenizer.vocab_size=3")
    assert call("data", "--steps", 5).exit_code == 2, "no flag of `data`"


def test_what_cannot_speak_is_told(tmp_path):
    refused(call("generate", "--checkpoint", tmp_path), "neither a checkpoint nor")
    assert call("generate", "--tokens", 0).exit_code == 2
    options = ("device", "temperature", "temperature", "seed", "top-k")
    for option, value in zip(options, ("tpu", "inf", -1, -1, -1), strict=True):
        refused(call("generate", f"--{option}", value), f".{option.replace('-', '_')}=")


def test_a_file_has_the_same_values_in_both_formats(tmp_path):
    toml, text = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('out = "x"\n[model]\nsize = "small"\ncontext_length = 64\n')
    text.write_text('{"out": "x", "model": {"size": "small", "context_length": 64}}')
    first, second = (config.load(file, {"schedule.steps": "7"}) for file in (toml, text))
    assert first == second and first.model.size == "small" and first.schedule.length == ("steps", 7)
    text.write_text(json.dumps(first.to_dict()))
    assert config.load(text) == first  # as it is saved with a run


def test_every_key_is_listed():
    lines = call("train", "--keys").stdout.splitlines()
    keys = {line.split()[0] for line in lines}
    assert {"out", "model.size", "checkpoints.resume", "optimizer.learning_rate"} <= keys
    assert len(keys) == len(lines)


# ------------------------------------------------------------------------------------------------ before the first step
def test_cuda_graphs_on_a_cpu_are_refused_before_there_is_a_folder(tmp_path):
    told = ("train", "--out", tmp_path / "run", "--device", "cpu", "--compile", "graphs")
    for more in ((), ("--nproc", 2), ("--dry-run",)):
        refused(call(*told, *more), "run.compile='graphs' on a CPU; allowed: off, attention, blocks, whole")
    assert not (tmp_path / "run").exists()


def test_several_ranks_need_a_wrapper(tmp_path, monkeypatch):
    told = ("train", "--out", tmp_path / "run", "--nproc", 2, "--wrapper", "none", "--device", "cpu")
    for more in ((), ("--dry-run",)):
        refused(call(*told, *more), "parallel.wrapper='none' on 2 ranks, which would diverge; allowed: naive")
    assert not (tmp_path / "run").exists()
    made = config.load(None, {"parallel.wrapper": "none", "out": str(tmp_path / "run")})
    assert config.for_ranks(made, 1) == 8
    ids = np.zeros(2000, dtype=np.uint16)
    with pytest.raises(ValueError, match="'none' on 2 ranks"):  # as under torchrun, where nproc is 1
        Trainer(made, Data(ids, ids, 300, 2000), Rank(0, 0, 2, 2, "cpu", "gloo"))


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--nproc", 2), ("--nproc", 2, "--sharded")], ids=str)
def test_what_finds_no_room_on_a_cpu_is_refused(tmp_path, monkeypatch, more):
    told = ("train", "--out", tmp_path / "run", "--device", "cpu", "--size", "medium", "--batch")
    monkeypatch.setattr(forecast, "free_memory_bytes", lambda device: 23 * 2**30)
    line = refused(call(*told, 64, *more), "23.0 GiB are free")
    assert "batch.sequences=64" in line and not (tmp_path / "run").exists()


def test_activations_count_as_the_accounting_says(monkeypatch):
    def made(**changes):
        small = {"run.device": "cpu", "model.size": "small", "batch.sequences": 32}
        return config.load(None, small | {name.replace("__", "."): value for name, value in changes.items()})

    needed = forecast.memory_bytes(made(tokenizer__vocab_size=5000), "fp32", "cpu", 1)
    monkeypatch.setattr(forecast, "free_memory_bytes", lambda device: needed)
    forecast.check_fits(made(), 5000)
    forecast.check_fits(made(batch__sequences=64, batch__accumulate=2), 5000)
    for more, vocab in (
        ({}, 5001),
        ({"batch__sequences": 33}, 5000),
        ({"model__attention": "reference"}, 5000),
    ):
        with pytest.raises(ValueError, match="GiB are free"):
            forecast.check_fits(made(**more), vocab)


def test_a_sharded_optimizer_is_told_by_its_fullest_rank():
    made = lambda sharded: config.load(None, {
        "model.size": "small", "tokenizer.vocab_size": 50257, "optimizer.sharded": sharded, "batch.sequences": 8,
    })  # fmt: skip
    whole, shared = (forecast.memory_bytes(made(s), "bf16", "cuda", 8) for s in (False, True))
    moments = 8 * num_parameters(made(False).model.sizes(50257))
    assert 1 - (whole - shared) / moments == pytest.approx(0.203, abs=0.001)


@pytest.mark.parametrize(
    "row", FSDP_ROWS, ids=lambda row: f"{row['size']} {row['context_length']} {row['wrapper']}"
)
def test_the_forecast_of_a_rank_is_what_two_gpus_held(row):
    fp32 = row["dtype"] == "tf32"
    config_ = config.load(None, {
        "model.size": row["size"], "tokenizer.vocab_size": 10_000, "model.context_length": row["context_length"],
        "batch.sequences": 4, "parallel.wrapper": "fsdp" if row["wrapper"] == "fsdp" else "in_place",
        "parallel.nproc": 2, "optimizer.sharded": row["wrapper"] == "sharded",
        "model.attention": "reference" if fp32 else "flash_triton",
    })  # fmt: skip
    expected = forecast.memory_bytes(config_, "fp32" if fp32 else "bf16", "cuda", 2)
    assert expected == pytest.approx(float(row["peak_bytes"]), rel=0.03)


def test_a_dry_run_speaks_before_it_steps_and_makes_few_long_steps(monkeypatch):
    said, steps, step = [], [], Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: steps.append(said[-1]) or step(self))
    monkeypatch.setattr(forecast, "_ENOUGH_S", 1e-9)
    small = {"model.size": "tiny", "model.context_length": 16, "batch.sequences": 1, "run.device": "cpu"}
    for line in forecast.forecast(config.load(None, small)):
        said.append(line)
    assert len(steps) == 2 and all(line.startswith("a step: 16 tokens") for line in steps)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(("train", "valid", "which"), [(0.05, 1e-4, "valid"), (1e-4, 0.05, "train")])
def test_a_text_shorter_than_the_context_is_named(tmp_path, train, valid, which, nproc):
    sizes = ("--train-mb", train, "--set", f"text.valid_mb={valid}", "--context-length", 512)
    done = call("train", "--out", tmp_path, "--device", "cpu", *sizes, "--nproc", nproc)
    line = refused(done, f"a larger text.{which}_mb")
    assert {"train": "the training text has", "valid": "the held-out text has"}[which] in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_not_the_terminals(tmp_path):
    """Errors of writing bring no name; without one they would be taken for those of the output."""
    log = RunLog(config.load(None, {"out": str(tmp_path)}))
    log.row({"step": 1, "tokens": 8, "loss": 1.5})
    (tmp_path / "loss.svg").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"cannot write .*loss\.svg: No space left"):
        picture(tmp_path)
    log.file = Path("/dev/full")
    with pytest.raises(StoreError, match="cannot write /dev/full: No space left"):
        log.row({"step": 2, "tokens": 16, "loss": 1.5})


# ------------------------------------------------------------------------------------------------------------- trackers
@pytest.mark.parametrize("how", [(), ("--dry-run",), ("--nproc", 2)], ids=str)
@pytest.mark.parametrize(("name", "asked"), [("tensorboard", "true"), ("wandb", "stories")])
def test_a_tracker_that_is_not_installed_is_told_first(tmp_path, monkeypatch, name, asked, how):
    monkeypatch.setitem(sys.modules, name, None)
    told = ("train", "--out", tmp_path / "run", "--device", "cpu", "--set", f"logging.{name}={asked}")
    refused(call(*told, *how), f"pip install 'cs336-systems[{name}]'")
    assert not (tmp_path / "run").exists()


class NoKey(Exception):
    pass


def stub_of_wandb(monkeypatch, mode):
    """A module of that name, which keeps what it is told."""
    told = []

    def begun():
        if mode == "no key":
            raise NoKey("api_key not configured (no-tty).\nCall wandb.login")

    def init(**settings):
        begun()
        told.append(settings)
        log = lambda values, step: told.append((step, values))
        return types.SimpleNamespace(log=log, finish=lambda: told.append("finished"))

    stub = types.SimpleNamespace(init=init, login=begun, __spec__="of a module that is installed")
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setenv("WANDB_MODE", mode)
    return told


@pytest.mark.parametrize("how", [(), ("--nproc", 2)], ids=str)
def test_wandb_without_a_login_is_told_in_a_line(tmp_path, monkeypatch, how):
    stub_of_wandb(monkeypatch, "no key")
    told = ("train", "--out", tmp_path / "run", "--device", "cpu", "--set", "logging.wandb=stories", *how)
    line = refused(call(*told), "logging.wandb='stories': NoKey: api_key not configured (no-tty).")
    assert "wandb login" in line and "WANDB_MODE=offline" in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_has_one_run_across_resumes(tmp_path, monkeypatch, mode):
    """Offline the later part tells it all: sent after the first one, it replaces it."""
    told, made = (
        stub_of_wandb(monkeypatch, mode),
        config.load(None, {"out": str(tmp_path), "logging.wandb": "stories"}),
    )
    for step, number in ((0, 3), (3, 6), (0, 3)):
        log = RunLog(made, step)
        log.row({"step": number, "loss": 1.5, "mfu": None})
        log.close()
    told = [part for part in told if part != "finished"]
    ids = [part["id"] for part in told if isinstance(part, dict)]
    assert ids[0] == ids[1] != ids[2]
    same = {"project": "stories", "dir": str(tmp_path), "config": made.to_dict(), "resume": "allow"}
    first, later = (3, {"loss": 1.5}), (6, {"loss": 1.5})
    again = [first] if mode == "offline" else []
    assert told == [
        same | {"id": ids[0]},
        first,
        same | {"id": ids[0]},
        *again,
        later,
        same | {"id": ids[2]},
        first,
    ]


def test_tensorboard_drops_what_is_trained_again(tmp_path, monkeypatch):
    told = []
    board = types.SimpleNamespace(add_scalar=lambda *values: told.append(values), close=lambda: None)
    module = types.SimpleNamespace(SummaryWriter=lambda *place, **how: told.append((*place, how)) or board)
    monkeypatch.setitem(sys.modules, "tensorboard", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    made = config.load(None, {"out": str(tmp_path), "logging.tensorboard": True})
    for step in (0, 5):
        RunLog(made, step).row({"step": 7, "loss": 1.5})
    place = str(tmp_path / "tensorboard")
    line = ("loss", 1.5, 7)
    # at step 0, too: of a run that was killed before its first checkpoint
    assert told == [(place, {"purge_step": 1}), line, (place, {"purge_step": 6}), line]
