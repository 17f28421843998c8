"""The pipeline of `cs336 train`: its stages, what is skipped, what is refused, and the model that speaks in the end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import time
import types
from pathlib import Path

import distributed
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import numpy as np
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from typer.testing import CliRunner

from cs336_systems.cli.main import app
from cs336_systems.launch import start
from cs336_systems.training import batches, checkpoints, config, log, modes, pipeline, resuming
from cs336_systems.training.loop import Trainer

SMALL = {
    "text.train_mb": 0.06, "text.valid_mb": 0.02, "tokenizer.vocab_size": 400, "model.size": "tiny",
    "model.d_model": 16, "model.d_ff": 32, "model.num_heads": 2, "model.context_length": 32, "batch.sequences": 4,
    "schedule.steps": 6, "evaluation.every": 4,
    "generation.tokens": 12, "run.device": "cpu", "logging.every": 2,
}  # fmt: skip


def changed(out, changes):
    return SMALL | {"out": str(out)} | {name.replace("__", "."): value for name, value in changes.items()}


def made(out, **changes):
    return config.load(None, changed(out, changes))


def words(out, **changes):
    """The same as words of a command line."""
    told = [("--set", f"{key}={value}") for key, value in changed(out, changes).items()]
    return ["train", *itertools.chain(*told)]


def cs336(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_from_text_to_samples_and_again(tmp_path, monkeypatch):
    said, asked, device_of = [], [], modes.device_of
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(modes, "device_of", lambda device: asked.append(device) or device_of(device))
    result = pipeline.train(made(tmp_path / "run"), said.append)
    assert set(asked) == {"cpu"}, "at the end, too"
    out = tmp_path / "run"
    assert 0 < result["floor"] < result["valid_loss"] < 6.5 and len(result["samples"]) == 2
    assert all(text.startswith("Once upon a time") for text in result["samples"])
    assert (out / "samples.txt").read_text(encoding="utf-8").count("Once upon a time") == 2
    assert "<svg" in (out / "loss.svg").read_text(encoding="utf-8")
    assert config.load(out / "config.json") == made(out)
    assert [path.name for path in tmp_path.rglob("*") if not path.is_relative_to(out)] == ["elsewhere"]
    weights = (out / "checkpoints" / "step-00000006" / "model.safetensors").stat().st_mtime_ns
    said.clear()
    again = pipeline.train(made(out, logging__every=1, generation__samples=1), said.append)
    assert again["valid_loss"] == result["valid_loss"] and len(again["samples"]) == 1
    assert any("holds it already" in line for line in said)
    assert (out / "checkpoints" / "step-00000006" / "model.safetensors").stat().st_mtime_ns == weights


def test_a_finished_run_is_no_result_of_another_text(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("The dog ran home.\n" * 200)
    own = made(tmp_path / "run", text__source=str(text), generation__samples=0)
    result = pipeline.train(own, lambda line: None)
    assert pipeline.train(own, lambda line: None)["valid_loss"] == result["valid_loss"]
    text.write_text("A cat sat there.\n" * 200)
    with pytest.raises(
        ValueError, match=r"train\.txt would not be what the run's checkpoints have learned from"
    ):
        pipeline.train(own, lambda line: None)


def test_what_is_taken_in_place_of_a_damaged_checkpoint_is_told(tmp_path):
    pipeline.train(made(tmp_path, checkpoints__every=4, generation__samples=0), lambda line: None)
    (tmp_path / "checkpoints" / "step-00000006" / "state.pt").write_bytes(b"")
    for command in (
        ["generate", "--tokens", 2, "--checkpoint", tmp_path],
        ["export", tmp_path, "--hf", tmp_path / "hf"],
    ):
        done = cs336(*command)
        assert done.exit_code == 0 and re.search(r"left out: .*step-00000006.*step-00000004", done.stderr)


def test_another_run_is_not_overwritten(tmp_path):
    pipeline.train(made(tmp_path, generation__samples=0), lambda line: None)
    with pytest.raises(ValueError, match=r"holds a run already.*--resume auto"):
        pipeline.train(made(tmp_path, schedule__steps=8), lambda line: None)
    said = []
    longer = pipeline.train(made(tmp_path, schedule__steps=8, checkpoints__resume="auto"), said.append)
    assert longer["step"] == 8 and any("going on from" in line for line in said)
    assert not any("training: none" in line for line in said)
    passed = pipeline.train(made(tmp_path, schedule__steps=7, checkpoints__resume="auto"), said.append)
    assert passed["step"] == 8 and any("training: none" in line and "7 steps" in line for line in said)


def test_nothing_newer_is_left_behind_or_written_over(tmp_path):
    run = lambda out, **more: pipeline.train(
        made(out, generation__samples=0, checkpoints__every=2, checkpoints__keep=9, **more), lambda line: None
    )
    run(tmp_path / "a")
    run(tmp_path / "b")
    start = str(tmp_path / "a" / "checkpoints" / "step-00000002")
    for out in ("a", "b"):
        with pytest.raises(
            ValueError, match=r"holds step-00000006, which .*step-00000002 leaves behind.*--out"
        ):
            run(tmp_path / out, checkpoints__resume=start, schedule__steps=5)
    assert run(tmp_path / "c", checkpoints__resume=start, schedule__steps=5)["step"] == 5
    last = str(tmp_path / "a" / "checkpoints" / "step-00000006")
    assert run(tmp_path / "a", checkpoints__resume=last, schedule__steps=8)["step"] == 8


def test_a_run_knows_itself_by_its_own_config(tmp_path):
    told = made(tmp_path)
    assert pipeline.digest(config.load(None, told.to_dict())) == pipeline.digest(told)
    told = json.loads(json.dumps(told.to_dict()) + "\n")
    assert pipeline.digest(config.load(None, told)) == pipeline.digest(made(tmp_path))


def test_weights_begun_from_are_not_needed_again(tmp_path):
    plain = pipeline.train(made(tmp_path / "a", generation__samples=0), lambda line: None)
    begun = shutil.copytree(plain["checkpoint"], tmp_path / "begun")
    told = {"checkpoints__init_from": str(begun), "checkpoints__resume": "auto", "generation__samples": 0}
    told |= {"tokenizer__path": str(tmp_path / "a" / "tokens" / "tokenizer.json")}
    pipeline.train(made(tmp_path / "b", **told), lambda line: None)
    known = lambda: pipeline._finished(made(tmp_path / "b", **told))
    moved = begun.rename(tmp_path / "moved")
    assert known()  # though they are gone
    shutil.copytree(tmp_path / "b", begun)  # others of the same name
    assert not known()
    shutil.rmtree(begun)
    file = tmp_path / "b" / "result.json"
    result = json.loads(file.read_text())
    shutil.copytree(moved, begun)
    assert known() and result.pop("begun")
    file.write_text(json.dumps(result))  # as earlier versions wrote it
    assert known()
    shutil.rmtree(begun)
    assert pipeline.train(made(tmp_path / "b", **told, schedule__steps=8), lambda line: None)["step"] == 8


@pytest.mark.parametrize("stops", [False, True])
def test_a_run_began_from_what_was_there_when_it_did(tmp_path, monkeypatch, stops):
    """The weights that its base has are others before it has ended."""
    plain = pipeline.train(made(tmp_path / "a", generation__samples=0), lambda line: None)
    begun = shutil.copytree(plain["checkpoint"], tmp_path / "begun")
    step, others = Trainer.train_step, shutil.copytree(begun, tmp_path / "others")
    weights = checkpoints.weights_of(others)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, others / "model.safetensors")

    def replaced(trainer):
        if trainer.step == 2 and others.exists():
            begun.rename(tmp_path / "first")
            others.rename(begun)
            trainer._asked_to_stop = stops
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", replaced)
    told = {"checkpoints__init_from": str(begun), "checkpoints__resume": "auto", "generation__samples": 0}
    run = made(tmp_path / "b", **told, tokenizer__path=str(tmp_path / "a" / "tokens" / "tokenizer.json"))
    assert pipeline.train(run, lambda line: None)["stopped"] == stops
    if stops:
        assert pipeline.train(run, lambda line: None)["step"] == 6
    assert not pipeline._finished(run)
    shutil.rmtree(begun)
    (tmp_path / "first").rename(begun)
    assert pipeline._finished(run)


def test_a_tokenizer_of_few_letters(tmp_path):
    letters = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, " ": 4}
    Tokenizer(models.BPE(letters, [])).save(str(tmp_path / "letters.json"))
    (tmp_path / "text.txt").write_text("a cab " * 3000)
    own = {"text__source": str(tmp_path / "text.txt"), "tokenizer__path": str(tmp_path / "letters.json")}
    result = pipeline.train(made(tmp_path / "run", **own), lambda line: None)
    assert result["valid_loss"] < np.log(5) + 0.5 and len(result["samples"]) == 2


def tokens_of_stories(out):
    """The folder of a run's tokens, before it has trained."""
    assert cs336("tokenize", *words(out)[1:]).exit_code == 0
    return out / "tokens"


def test_ready_tokens_with_and_without_their_tokenizer(tmp_path):
    folder = tokens_of_stories(tmp_path)
    np.save(tmp_path / "train.npy", np.fromfile(folder / "train.bin", "<u2").astype(np.int64))
    ready = {
        "text__source": str(tmp_path / "train.npy"),
        "text__valid": str(folder / "valid.bin"),
    }
    ready |= {"text__train_mb": 0, "text__valid_mb": 1}
    silent = pipeline.train(made(tmp_path / "a", **ready), lambda line: None)
    assert "samples" not in silent and silent["bits_per_byte"] is silent["floor"] is None
    assert cs336("generate", "--checkpoint", tmp_path / "a").exit_code == 2
    told = pipeline.train(
        made(tmp_path / "b", **ready, tokenizer__path=str(folder / "tokenizer.json")), lambda line: None
    )
    assert len(told["samples"]) == 2 and told["valid_loss"] == silent["valid_loss"]
    text_run = pipeline.train(made(tmp_path / "c"), lambda line: None)
    assert text_run["valid_loss"] == told["valid_loss"]


def test_a_prompt_begins_a_text_as_in_training(tmp_path, monkeypatch):
    """Documents are separated by the token that the tokenizer names; the same stands before a prompt."""
    from cs336_systems.training import generate

    given = Tokenizer.from_file(str(tokens_of_stories(tmp_path) / "tokenizer.json"))
    given.add_special_tokens(["<sep>"])
    given.save(str(tmp_path / "given.json"))
    own = {"tokenizer__path": str(tmp_path / "given.json"), "tokenizer__separator": "<sep>"}
    pipeline.train(made(tmp_path / "run", **own, generation__samples=0), lambda line: None)
    model, tokenizer, end = pipeline.trained(tmp_path / "run", "cpu")
    assert end == tokenizer.token_to_id("<sep>") == np.fromfile(tmp_path / "run/tokens/train.bin", "<u2")[-1]
    seen, prompts = [], ["The dog", ""]
    monkeypatch.setattr(
        generate, "generate", lambda model, ids, *_, stop: seen.append((ids, stop)) or iter(())
    )
    assert pipeline.written(model, tokenizer, end, prompts, config.Generation(tokens=3)) == prompts
    assert seen == [([[end, *tokenizer.encode(one, add_special_tokens=False).ids] for one in prompts], end)]


def test_weights_begin_with_the_tokens_that_they_know(tmp_path):
    silent = {"generation__samples": 0}
    pipeline.train(made(tmp_path / "a", **silent), lambda line: None)
    begun = tmp_path / "a" / "checkpoints" / "step-00000006"
    theirs = str(begun / "tokenizer.json")
    for number, place in enumerate((begun, begun / "model.safetensors", tmp_path / "a")):
        other = {"checkpoints__init_from": str(place), "text__seed": 7, **silent}
        with pytest.raises(ValueError, match=r"init_from=.*tokenizer\.path=.*tokenizer\.json takes it"):
            pipeline.train(made(tmp_path / "b", **other), lambda line: None)
        pipeline.train(made(tmp_path / f"c{number}", tokenizer__path=theirs, **other), lambda line: None)


def test_weights_of_other_heads_begin_nothing(tmp_path):
    """Their tensors have the same shapes."""
    pipeline.train(made(tmp_path / "a", generation__samples=0), lambda line: None)
    with pytest.raises(ValueError, match=r"step-00000006 do not fit .*: model\.num_heads=2, now 4; "):
        pipeline.train(
            made(tmp_path / "b", checkpoints__init_from=str(tmp_path / "a"), model__num_heads=4),
            lambda line: None,
        )


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("source", ["stories", "random"])
def test_one_process_makes_the_data_and_tells_the_others(tmp_path, monkeypatch, nproc, source):
    """Each hashes all of it, and one after the other, as they lock its folder."""
    calls, prepare = [], pipeline.prepare

    def launched(function, world_size, arguments, **how):
        return [pipeline.on_a_rank(None, **json.loads(json.dumps(arguments)))] * world_size

    monkeypatch.setattr(start, "launch", launched)
    monkeypatch.setattr(pipeline, "prepare", lambda *told: calls.append(prepare(*told)) or calls[-1])
    pipeline.train(made(tmp_path, parallel__nproc=nproc, text__source=source), lambda line: None)
    again = batches.Data.of(calls[0].told())
    assert (
        len(calls) == 1
        and (again.train == calls[0].train).all()
        and again.train.dtype == calls[0].train.dtype
    )
    assert dataclasses.replace(again, train=0, valid=0) == dataclasses.replace(calls[0], train=0, valid=0)


def test_what_a_path_leads_to(tmp_path):
    assert checkpoints.of(tmp_path) is None and checkpoints.of(tmp_path / "none") is None
    pipeline.train(made(tmp_path, checkpoints__every=3, generation__samples=0), lambda line: None)
    older, newer = checkpoints.found(folder := tmp_path / "checkpoints")
    for place in (tmp_path, newer, newer / "model.safetensors"):
        assert checkpoints.of(place) == newer
    (folder / "best").write_text(older.name)
    assert checkpoints.of(tmp_path) == older


def test_two_ranks_have_the_loss_of_one(tmp_path):
    alone = pipeline.train(made(tmp_path / "one", generation__samples=0), lambda line: None)
    said = []
    two = made(tmp_path / "two", parallel__nproc=2, optimizer__sharded=True, generation__samples=0)
    with distributed.forking():
        both = pipeline.train(two, said.append)
    assert both["valid_loss"] == pytest.approx(alone["valid_loss"], rel=1e-5)
    assert any("loss" in line and line.startswith("[rank 0]") for line in said)


@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_saves_and_ends(tmp_path, nproc):
    out = tmp_path / "run"
    words_of = words(out, schedule__steps=100_000, parallel__nproc=nproc)
    with open(tmp_path / "said", "w") as said:
        child = distributed.Forked(
            ["-m", "cs336_systems", *words_of], env=os.environ, stdout=said, stderr=said
        )
    deadline, told = time.monotonic() + 120, (tmp_path / "said").read_text
    while not (out / "log.csv").is_file() or len((out / "log.csv").read_text().splitlines()) < 3:
        assert child.poll() is None and time.monotonic() < deadline, told()
        time.sleep(0.05)
    child.terminate()
    assert child.wait(120) == 0 and "--resume auto goes on from" in told(), told()
    result = json.loads((out / "result.json").read_text())
    assert result["stopped"] and os.path.isdir(result["checkpoint"])


# ------------------------------------------------------------------------------------------------------------ going on
MAY = {
    "schedule.steps": 9, "parallel.wrapper": "naive", "parallel.nproc": 2, "run.compile": "blocks", "logging.every": 7,
    "checkpoints.keep": 9, "evaluation.every": 1, "optimizer.sharded": True, "generation.seed": 4, "out": "elsewhere",
    "checkpoints.minutes": 1, "checkpoints.every": -1, "logging.wandb": "stories",
    "model.num_kv_heads": 2,  # as many as there are others
}  # fmt: skip
MUST_NOT = {
    "text.seed": 1, "text.train_mb": 0.07, "text.source": "random", "tokenizer.vocab_size": 300, "batch.seed": 1,
    "batch.sequences": 8, "optimizer.learning_rate": 0.5, "optimizer.clip": 0.5, "optimizer.beta2": 0.9,
    "run.dtype": "bf16", "run.seed": 3, "model.context_length": 16, "schedule.kind": "constant", "schedule.warmup": 0.5,
    "text.valid": "valid.txt", "text.field": "story", "text.documents": "packed", "tokenizer.dtype": "int64",
    "tokenizer.separator": "<|endoftext|>",
}  # fmt: skip
NEVER = {"model.d_model": 32, "model.num_heads": 1, "model.num_layers": 3, "model.size": "mini",
         "model.num_kv_heads": 1}  # fmt: skip


def on(changes, dtype="fp32"):
    before = {"config": made("run").to_dict(), "dtype": "fp32"}
    now = config.load(None, changed("run", {}) | changes)
    resuming.check(Path("there"), before, now, changes.get("run.dtype", dtype))


@pytest.mark.parametrize(("key", "value"), [x for of in (MAY, MUST_NOT, NEVER) for x in of.items()])
def test_what_a_run_that_goes_on_may_change(key, value):
    if (key, value) in MAY.items():
        on({key: value})
        return
    named = "model.num_layers" if key == "model.size" else key
    with pytest.raises(ValueError, match=rf"{named}=.*, now ") as caught:
        on({key: value})
    assert "\n" not in str(caught.value) and "model.d_ff" not in str(caught.value)
    if key in MUST_NOT:
        on({key: value, "checkpoints.resume_changed": True})
    else:
        with pytest.raises(ValueError, match="do not fit"):
            on({key: value, "checkpoints.resume_changed": True})


def test_what_auto_comes_to_counts():
    on({"run.dtype": "fp32"})
    with pytest.raises(ValueError, match=r"run\.dtype='fp32', now 'bf16'"):
        on({}, dtype="bf16")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run's folder, to be copied, and the text of one's own that it has learned from."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text("The cat sat on the mat. A dog ran. " * 900, encoding="utf-8")
    own = {"text__source": str(folder / "book.txt"), "generation__samples": 0, "schedule__steps": 2}
    pipeline.train(made(folder / "run", **own), lambda line: None)
    return folder / "run", own


def kept(out):
    files = [out / "config.json", *out.glob("text/*"), *out.glob("tokens/*"), *out.glob("checkpoints/*/*")]
    return {file: file.read_bytes() for file in files}


def test_what_is_refused_on_resume_leaves_the_run_as_it_was(tmp_path, trained):
    out, own = shutil.copytree(trained[0], tmp_path / "run"), trained[1] | {"checkpoints__resume": "auto"}
    own |= {"schedule__steps": 3}
    book, before = Path(own["text__source"]), kept(out)
    text = book.read_text()
    train = lambda *more, **changes: cs336(*words(out, **own | changes), *more)
    for change, flag, names in (
        ({"batch__seed": 1}, False, "batch.seed=0, now 1; --resume-changed"),
        ({"model__num_layers": 3}, True, "model.num_layers=2, now 3"),
        ({}, False, "train.txt would not be what"),  # of the file, which has changed meanwhile
        ({}, True, "tokenizer.json would not be what"),
    ):
        book.write_text(text + "x" if change else text.replace("cat", "zebra"))
        done = train(*["--resume-changed"] * flag, **change)
        book.write_text(text)
        assert done.exit_code == 2 and names in done.stderr and done.stderr.count("\n") == 1, done.stderr
        kept_now = kept(out)
        if not (flag and not change):  # the flag allows another text, which is made before the tokenizer is
            assert kept_now == before
        assert all(kept_now[file] == before[file] for file in before if file.parent.name != "text")
    assert train("--resume-changed", batch__seed=1).exit_code == 0
    assert json.loads((out / "config.json").read_text())["batch"]["seed"] == 1
    book.write_text(text.replace("cat", "zebra"))  # another text in the same tokens
    tokenizer = {"tokenizer__path": str(out / "tokens" / "tokenizer.json")}
    done = train("--resume-changed", **tokenizer, schedule__steps=4, batch__seed=1)
    book.write_text(text)
    assert done.exit_code == 0 and b"zebra" in (out / "text" / "train.txt").read_bytes(), done.stderr


@pytest.mark.parametrize("command", ["data", "tokenize"])
def test_the_text_and_the_tokenizer_of_a_finished_run_stay(tmp_path, trained, command):
    out, own = shutil.copytree(trained[0], tmp_path / "run"), trained[1]
    before = kept(out)
    again = lambda **changes: cs336(command, *words(out, **own | changes)[1:])
    assert again().exit_code == 0 and kept(out) == before
    done = again(text__train_mb=0.01, tokenizer__vocab_size=300)
    assert done.exit_code == 2 and "checkpoints have learned from" in done.stderr and kept(out) == before
    if command == "tokenize":
        assert again(tokenizer__vocab_size=260).exit_code == 2 and kept(out) == before
    shutil.rmtree(out / "checkpoints")
    assert again(text__train_mb=0.01).exit_code == 0


def test_a_checkpoint_speaks_by_itself(tmp_path, trained):
    [step] = checkpoints.found(trained[0] / "checkpoints")
    alone = shutil.copytree(step, tmp_path / "alone" / step.name)
    words = "--tokens", 9, "The dog", "A cat — ünïcode", "--seed", 3
    done, again = (cs336("generate", "--checkpoint", place, *words) for place in (alone, trained[0]))
    assert done.exit_code == 0 and done.stdout == again.stdout
    assert done.stdout.startswith("The dog") and "\n\nA cat — ünïcode" in done.stdout


def test_a_text_ends_with_all_that_was_written(monkeypatch):
    """Also where the last character was never ended, or the model has written that sign itself."""
    from cs336_systems.training import generate

    class Letters:
        encode_batch_fast = lambda self, texts, **how: [types.SimpleNamespace(ids=[1]) for _ in texts]
        decode = lambda self, ids: bytes(ids).decode(errors="replace")

    told = ["fä".encode()[:-1], "fä".encode(), "f\ufffd".encode(), b"f\xffa\xe2\x82", b""]
    steps = list(itertools.zip_longest(*told))
    monkeypatch.setattr(generate, "generate", lambda *_, **__: iter(steps))
    texts = pipeline.written(None, Letters(), 0, [""] * 5, config.Generation(tokens=9))
    assert texts == [one.decode(errors="replace") for one in told]


def test_a_space_after_the_prompt_is_not_lost(monkeypatch):
    """By itself a piece that begins with SentencePiece's space is decoded without it."""
    from cs336_systems.training import generate

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "\u2581The": 1, "\u2581dog": 2, "s": 3}, "<end>"))
    tokenizer.decoder = decoders.Metaspace()
    monkeypatch.setattr(generate, "generate", lambda *_, **__: iter([[2], [3]]))
    speaks = types.SimpleNamespace(
        encode_batch_fast=lambda texts, **how: [types.SimpleNamespace(ids=[1])], decode=tokenizer.decode
    )
    assert pipeline.written(None, speaks, 0, ["The"], config.Generation(tokens=2)) == ["The dogs"]


def test_what_is_damaged_is_named(tmp_path):
    pipeline.train(made(tmp_path, generation__samples=0), lambda line: None)
    [about] = tmp_path.glob("checkpoints/*/checkpoint.json")
    told = json.loads(about.read_text())
    tokenizer = about.with_name("tokenizer.json")
    other = json.loads(tokenizer.read_text())
    other["model"]["vocab"] |= {f"foreign {i}": 1000 + i for i in range(300)}
    deep, speak = "[" * 100_000, ("generate", "--checkpoint", str(tmp_path))
    again = (*words(tmp_path), "--set", "generation.samples=0")
    for file, content, command in (
        (about, deep, speak),
        (about, json.dumps(told | {"config": {"model": {"d_model": 64}}}), speak),
        (about, json.dumps({name: told[name] for name in ("step", "files")}), speak),
        (tokenizer, json.dumps(other), speak),
        (tmp_path / "checkpoints" / "best", b"\xff", speak),
        (tmp_path / "result.json", deep, again),
        (tmp_path / "log.csv", b"\xff\xfe", again),
        (tmp_path / "log.csv", ",".join(log.COLUMNS) + "\n1,2x" + "," * 11 + "\n", again),
    ):  # fmt: skip
        before = file.read_bytes() if file.is_file() else None
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        done = cs336(*command)
        assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit), (file, done.exception)
        named = file if file != about else about.parent  # "STEP: checkpoint.json ..."
        assert done.stderr.startswith("Error: ") and str(named) in done.stderr, done.stderr
        file.unlink() if before is None else file.write_bytes(before)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_dry_run_writes_nothing_and_tells_memory_and_time(tmp_path, monkeypatch, rank):
    if rank is not None:  # of torchrun's processes one tells
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
    done = cs336(*words(tmp_path / "run"), "--dry-run")
    assert done.exit_code == 0, done.stderr
    if rank != 1:
        assert "GiB of tensors" in done.stdout and "minutes for 6 steps" in done.stdout
    assert bool(done.stdout) == (rank != 1) and not (tmp_path / "run").exists()
