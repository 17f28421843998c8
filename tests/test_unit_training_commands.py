"""`cs336 data`, `tokenize`, `train`, `generate`: what is wrong is told in a line, with exit code 2."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from typer.testing import CliRunner

from cs336_systems.cli import app
from cs336_systems.training import config

WRONG = [  # --set, and what the line names
    ("model.sizes=small", "model.sizes"), ("modle.size=small", "modle"), ("size", "expected section.key=value"),
    ("=3", "expected section.key=value"), ("model=small", "it must be a section"),
    ("model.size=huge", "small, medium"), ("model.context_length=0", "1 or more"),
    ("model.context_length=x", "a whole number"), ("model.context_length=1.5", "a whole number"),
    ("model.d_model=10", "multiple of num_heads"), ("text.train_mb=0", "above 0"), ("model.d_model=-8", "0 or more"),
    ("model.attention=flash", "flash_triton"), ("text.train_mb=-1", "0 or more"), ("text.valid_mb=0", "above 0"),
    ("text.train_mb=nan", "a number"), ("tokenizer.vocab_size=256", "257 or more"),
    ("tokenizer.vocab_size=1e9", "a whole number"), ("tokenizer.vocab_size=99999999999", "at most"),
    ("tokenizer.path=/no/such.json", "/no/such.json"), ("optimizer.name=sgd", "adamw, own"),
    ("optimizer.learning_rate=-1", "0 or more"), ("optimizer.learning_rate=11", "at most 10"),
    ("optimizer.learning_rate=fast", "a number"), ("optimizer.beta1=1", "at most"), ("optimizer.eps=2", "at most 1"),
    ("optimizer.sharded=perhaps", "true or false"), ("schedule.steps=-5", "0 or more"),
    ("schedule.kind=linear", "cosine, constant"), ("schedule.warmup=2", "at most 1"),
    ("batch.sequences=0", "1 or more"), ("batch.accumulate=0", "1 or more"), ("batch.accumulate=5", "multiple of"),
    ("run.device=tpu", "auto, cpu, cuda"), ("run.dtype=fp8", "bf16, fp16"),
    ("run.compile=yes", "off, attention, blocks, whole, graphs"), ("run.deterministic=2", "true or false"),
    ("parallel.nproc=0", "1 or more"), ("parallel.nproc=3", "multiple of 3"),
    ("parallel.wrapper=fsdp", "in_place, torch"), ("parallel.bucket_mb=0", "above 0"),
    ("checkpoints.keep=0", "1 or more"), ("checkpoints.resume=/no/such", "no, auto, the folder"),
    ("logging.every=0", "1 or more"), ("generation.top_p=0", "above 0"), ("generation.tokens=0", "1 or more"),
    ("out=", "it must name a folder"), ("text.source=/no/such/text", "/no/such/text"),
    ("checkpoints.init_from=/no/such", "/no/such holds no weights"),
    ("generation.temperature=1e-300", "1e-6 or more"), ("model.num_layers=100000000", "GiB are free"),
    ("model.attention=flash_cuda", "is unavailable"), ("generation.prompt=\ud800", "is not UTF-8"),
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
    assert not (tmp_path / "run" / "checkpoints").exists()


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
    for option, value in (
        ("device", "tpu"),
        ("temperature", "inf"),
        ("seed", -1),
        ("seed", 10**20),
        ("top-k", -1),
    ):
        refused(call("generate", f"--{option}", value), f".{option.replace('-', '_')}=")


def test_a_file_has_the_same_values_in_both_formats(tmp_path):
    (tmp_path / "a.toml").write_text('out = "x"\n[model]\nsize = "small"\ncontext_length = 64\n')
    (tmp_path / "a.json").write_text('{"out": "x", "model": {"size": "small", "context_length": 64}}')
    first, second = (
        config.load(tmp_path / f"a.{kind}", {"schedule.steps": "7"}) for kind in ("toml", "json")
    )
    assert first == second and first.model.size == "small" and first.schedule.length == ("steps", 7)
    (tmp_path / "b.json").write_text(json.dumps(first.to_dict()))
    assert config.load(tmp_path / "b.json") == first  # as it is saved with a run


def test_every_key_is_listed():
    lines = call("train", "--keys").stdout.splitlines()
    keys = {line.split()[0] for line in lines}
    assert {"out", "model.size", "checkpoints.resume", "optimizer.learning_rate"} <= keys
    assert len(keys) == len(lines)
