"""The training loop: exact resumption, the same losses in every mode, what stops a run, checkpoints that are whole."""

from __future__ import annotations

import csv
import errno
import json
import os
import pickle
import shutil
import signal
import time
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import distributed  # noqa: E402
import safetensors.torch  # noqa: E402
from alive_bytes import AliveBytes  # noqa: E402

from cs336_systems.launch.group import Rank  # noqa: E402
from cs336_systems.launch.start import launch  # noqa: E402
from cs336_systems.measure.memory.tensors import watching_tensors  # noqa: E402
from cs336_systems.store.files import StoreError  # noqa: E402
from cs336_systems.training import (  # noqa: E402
    checkpoints,
    clock,
    config,
    forecast,
    loop,
    optimizer,
    outputs,
)
from cs336_systems.training.batches import Batches  # noqa: E402
from cs336_systems.training.loop import Data, Trainer, TrainingError  # noqa: E402

VOCAB = 97
EXACT = ("step", "loss", "valid_loss", "learning_rate", "grad_norm")


def data(seed=0):
    walk = np.cumsum(np.random.default_rng(seed).integers(0, 4, 6000)) % VOCAB
    return Data(walk[:5000].astype(np.uint16), walk[5000:].astype(np.uint16), VOCAB, 2000, floor=np.log(4))


def made(out, **changes):
    told = {
        "out": str(out), "tokenizer.vocab_size": 300, "schedule.steps": 12, "batch.sequences": 8,
        "model.size": "tiny", "model.d_model": 16,
        "model.d_ff": 32, "model.num_heads": 2, "model.context_length": 16, "evaluation.every": 5,
        "logging.every": 3, "run.device": "cpu", "checkpoints.keep": 99, "optimizer.learning_rate": 0.01,
    }  # fmt: skip
    return config.load(None, told | {name.replace("__", "."): value for name, value in changes.items()})


def before_step(trainer, number, act):
    """Has the trainer call something before this step, which is counted from 1."""
    step = trainer.train_step

    def after_it():
        if trainer.step == number - 1:
            act()
        return step()

    trainer.train_step = after_it


def log(out):
    with open(Path(out) / "log.csv", newline="") as file:
        return [tuple(row[name] for name in EXACT) for row in csv.DictReader(file)]


# ---------------------------------------------------------------------------------------------------------- learning
def test_it_learns_down_to_the_entropy_of_the_text(tmp_path):
    changes = {"schedule__steps": 150, "evaluation__every": 0, "checkpoints__every": -3}
    result = Trainer(made(tmp_path, **changes), data()).run()
    assert [p.name for p in checkpoints.found(tmp_path / "checkpoints")] == ["step-00000150"]
    assert np.log(4) < result["valid_loss"] < np.log(4) + 0.5 < np.log(VOCAB)
    assert result["bits_per_byte"] == pytest.approx(result["valid_loss"] / np.log(2) / 2)
    assert result["tokens"] == 150 * 8 * 16 and not result["stopped"]


STEADY = {"schedule__kind": "constant", "schedule__warmup": 0, "optimizer__clip": 0}


@pytest.mark.parametrize("fixed", [{}, STEADY], ids=["cosine", "constant"])
def test_variants_of_a_step_agree(tmp_path, fixed):
    """Each is another computation of the same: the loss after some steps stays close to the plain one's."""
    loss = lambda **changes: Trainer(made(tmp_path, **fixed, **changes), data()).run()["valid_loss"]
    plain = loss()
    for changes in ({"batch__accumulate": 4}, {"model__attention": "sdpa"}):
        assert loss(**changes) == pytest.approx(plain, rel=1e-4), changes
    assert loss(run__dtype="bf16") == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    ("how", "compiled"),
    [
        ("attention", 2 * ["CausalSelfAttention"]),
        ("blocks", 2 * ["TransformerBlock"]),
        ("whole", ["WithLoss"]),
    ],
)
def test_what_is_compiled(monkeypatch, how, compiled):
    found = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: found.append(type(self).__name__))
    Trainer(made("unused", run__compile=how), data())
    assert found == compiled


def test_cuda_graphs_are_refused_where_there_can_be_none():
    with pytest.raises(ValueError, match=r"on a CPU; allowed: off, attention, blocks, whole$"):
        Trainer(made("unused", run__compile="graphs"), data())
    with pytest.raises(ValueError, match=r"batch\.accumulate=2 with run\.compile='graphs'; allowed: 1"):
        made("unused", run__compile="graphs", batch__accumulate=2)


def test_attention_that_has_no_grouped_queries_is_refused():
    grouped = {"model__num_kv_heads": 1, "model__attention": "flash_cuda"}
    with pytest.raises(
        ValueError, match=r"attention='flash_cuda' with model\.num_kv_heads=1; allowed: auto, flash_tri"
    ):
        made("unused", **grouped)
    assert made("unused", **grouped | {"model__num_kv_heads": 2}).model.sizes(300).d_kv == 16  # of two heads


@pytest.mark.parametrize("compiled", ["blocks", "whole", "graphs"])
def test_what_is_compiled_is_not_recomputed_in_part(compiled):
    with pytest.raises(
        ValueError, match=f"run.compile='{compiled}' with run.recompute='selective'; allowed: off, "
    ):
        made("unused", run__compile=compiled, run__recompute="selective")


@pytest.mark.parametrize(
    "changes", [{"optimizer__sharded": True}, {"run__compile": "whole"}, {"run__recompute": "selective"}]
)
def test_what_a_sharded_model_cannot_be_is_refused(changes):
    ((key, _),) = changes.items()
    with pytest.raises(
        ValueError, match=f"{key.replace('__', '.')}=.* with parallel.wrapper='fsdp'.*; allowed:"
    ):
        config.for_ranks(made("unused", parallel__wrapper="fsdp", **changes), 2)


def losses_on_a_gpu(rank, variants):
    """Of variants of a run: the losses of eight steps."""
    settings = {"run__device": "cuda", "run__dtype": "fp32", "model__attention": "reference"}
    found = []
    for changes in variants:
        trainer = Trainer(made("unused", **settings, **changes), data(), rank)
        found.append([(trainer.train_step(), trainer.loss.item())[1] for _ in range(8)])
        torch._dynamo.reset()  # gives back the memory of graphs
    return found


@pytest.mark.parametrize("how", config.COMPILE)
def test_buckets_too_small_for_torchs_compiler_are_refused(how):
    asked = made("unused", parallel__wrapper="torch", run__compile=how, parallel__bucket_mb=0.5)
    config.for_ranks(asked, 1)
    if how == "off":
        assert config.for_ranks(asked, 2) == 4
        return
    with pytest.raises(
        ValueError, match=rf"bucket_mb=0\.5 with .*'torch' and run\.compile='{how}'; it must be 1"
    ):
        config.for_ranks(asked, 2)


@pytest.mark.gpu
def test_steps_replayed_as_cuda_graphs_learn_the_same():
    off, whole, graphs = losses_on_a_gpu(None, [{"run__compile": how} for how in ("off", "whole", "graphs")])
    assert whole == pytest.approx(off, rel=1e-3) and graphs == pytest.approx(whole, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_that_replay_cuda_graphs_learn_the_same():
    kinds = [
        {"parallel__wrapper": w, "parallel__bucket_mb": 1 if w == "torch" else 0.002} for w in WRAPPERS[:-1]
    ]
    kinds.append({"optimizer__sharded": True})
    variants = [{}] + [kind | {"run__compile": "graphs"} for kind in kinds]
    for off, *graphs in launch(f"{__name__}:losses_on_a_gpu", 2, {"variants": variants}):
        for kind, losses in zip(kinds, graphs, strict=True):
            assert losses == pytest.approx(off, rel=1e-3), kind


def test_norms_and_embeddings_do_not_decay():
    trainer = Trainer(made("unused"), data())
    decay, rest = trainer.optimizer.param_groups
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    assert decay["weight_decay"] == 0.1 and rest["weight_decay"] == 0
    without = {names[id(p)].split(".")[-2] for p in rest["params"]}
    assert without == {"token_embeddings", "ln1", "ln2", "ln_final"}
    assert len(decay["params"]) + len(rest["params"]) == len(names)


def test_schedule():
    schedule = made("unused", schedule__warmup=0.1, schedule__floor=0.2).schedule
    rate = lambda progress: optimizer.learning_rate(schedule, 2.0, progress)
    assert [rate(0.05), rate(0.1), rate(1.0)] == pytest.approx([1.0, 2.0, 0.4])
    assert rate(0.55) == pytest.approx(0.4 + 1.6 / 2) and rate(7) == pytest.approx(0.4)


# ------------------------------------------------------------------------------------------------------------ batches
def test_an_epoch_visits_every_window_once_whoever_takes_them():
    tokens = np.arange(101, dtype=np.uint16)
    batches = Batches(tokens, context_length=5, sequences=4, seed=3)
    assert batches.windows == 20 and batches.steps_per_epoch == 5
    for epoch in range(3):
        firsts = []
        for step in range(5 * epoch, 5 * epoch + 5):
            whole, targets = batches.at(step)
            assert (targets == whole + 1).all() and whole.dtype == np.int64
            parts = np.concatenate([batches.at(step, part, 4)[0] for part in range(4)])
            assert (parts == whole).all()
            firsts += whole[:, 0].tolist()
        assert sorted(firsts) == list(range(0, 100, 5)) and firsts != sorted(firsts)
    again, other = Batches(tokens, 5, 4, seed=3), Batches(tokens, 5, 4, seed=4)
    assert (again.at(9)[0] == batches.at(9)[0]).all() and (other.at(9)[0] != batches.at(9)[0]).any()
    with pytest.raises(ValueError, match="needs 6 or more"):
        Batches(tokens[:5], 5, 4, 0)


# ------------------------------------------------------------------------------------------------------ resuming
def assert_same_weights(*paths):
    one, other = map(checkpoints.weights_of, paths)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_repeats_the_undisturbed_one_from_every_step(tmp_path, accumulate):
    whole = made(tmp_path / "whole", checkpoints__every=1, batch__accumulate=accumulate)
    expected = Trainer(whole, data()).run()
    there = checkpoints.found(tmp_path / "whole" / "checkpoints")
    assert [int(path.name[5:]) for path in there] == list(range(1, 13))
    for path in there[:-1]:
        out = tmp_path / path.name
        out.mkdir()
        shutil.copy(tmp_path / "whole" / "log.csv", out)  # its later lines are dropped
        trainer = Trainer(made(out, batch__accumulate=accumulate), data())
        trainer.resume(path)
        assert trainer.run()["valid_loss"] == expected["valid_loss"]
        assert log(out) == log(tmp_path / "whole")
        assert_same_weights(there[-1], out / "checkpoints" / "step-00000012")


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    """kill -9 at some step: nothing that was saved is lost, and the losses are those of a run that was left alone."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\nimport test_unit_training as t\nfrom pathlib import Path\n"
        "c = t.made(sys.argv[1], checkpoints__every=2, schedule__steps=40)\nr = t.Trainer(c, t.data())\n"
        "p = t.checkpoints.newest_sound(r.folder)\nif p: r.resume(p)\nr.run()"
    )
    start = lambda: distributed.Forked(
        ["-c", code, str(tmp_path / "run"), str(Path(__file__).parent)], env=os.environ
    )
    expected = Trainer(made(tmp_path / "alone", schedule__steps=40), data()).run()
    kills, folder = 0, tmp_path / "run" / "checkpoints"
    for _ in range(2):
        child, before = start(), len(checkpoints.found(folder))
        while child.poll() is None and len(checkpoints.found(folder)) < before + 3:
            time.sleep(0.005)
        kills += child.poll() is None
        child.kill()
        child.wait()
    assert kills
    assert start().wait() == 0
    path = checkpoints.newest_sound(folder)
    assert path.name == "step-00000040" and log(tmp_path / "run") == log(tmp_path / "alone")
    assert_same_weights(path, Path(expected["checkpoint"]))


@pytest.mark.parametrize("how", ["signal", "file"])
def test_asked_to_stop_it_saves_and_goes_on_later(tmp_path, how):
    out = tmp_path / "run"
    trainer = Trainer(made(out, schedule__steps=60), data())
    ask = (out / "stop").touch if how == "file" else lambda: os.kill(os.getpid(), signal.SIGTERM)
    before_step(trainer, 8, ask)
    result = trainer.run()
    assert result["stopped"] and 8 <= result["step"] <= 9 and result["valid_loss"] is None
    again = Trainer(made(out, schedule__steps=60), data())
    again.resume(Path(result["checkpoint"]))
    finished = again.run()
    alone = Trainer(made(tmp_path / "alone", schedule__steps=60), data()).run()
    assert finished["valid_loss"] == alone["valid_loss"] and log(out) == log(tmp_path / "alone")


def test_asked_to_stop_in_its_last_step_it_is_finished(tmp_path):
    trainer = Trainer(made(tmp_path / "run", schedule__steps=2), data())
    before_step(trainer, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = trainer.run()
    assert result["step"] == 2 and not result["stopped"] and result["valid_loss"] is not None


# ------------------------------------------------------------------------------------------------------------ modes
def on_two_ranks(out, changes, start=""):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    trainer = Trainer(made(out, **changes), data(), Rank(rank, rank, world, world, "cpu", "gloo"))
    if start:
        trainer.resume(Path(start))
    result = trainer.run()
    saved = checkpoints.weights_of(
        Path(result["checkpoint"])
    )  # no rank has them whole where they are sharded
    return result["valid_loss"], saved if trainer.sharded else trainer.model.state_dict()


WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "in_place", "torch", "fsdp")
CHANGES = {"batch__accumulate": 2, "schedule__steps": 8, "parallel__bucket_mb": 0.002}


MODES = {
    **{wrapper: {"parallel__wrapper": wrapper} for wrapper in WRAPPERS},
    **{f"{w}+sharded": {"parallel__wrapper": w, "optimizer__sharded": True} for w in ("flat", "in_place", "torch")},
    **{f"{w}+blocks": {"parallel__wrapper": w, "run__recompute": "blocks"} for w in ("in_place", "torch", "fsdp")},
    "naive+selective": {"parallel__wrapper": "naive", "run__recompute": "selective"},
}  # fmt: skip


def modes_on_two_ranks(folder):
    few = CHANGES | {"schedule__steps": 4}
    return {mode: on_two_ranks(f"{folder}/{mode}", few | changes) for mode, changes in MODES.items()}


def test_every_mode_has_the_losses_of_one_device(tmp_path):
    loss = Trainer(made(tmp_path / "one", **CHANGES | {"schedule__steps": 4}), data()).run()["valid_loss"]
    expected = checkpoints.weights_of(tmp_path / "one" / "checkpoints" / "step-00000004")
    first, second = distributed.run(modes_on_two_ranks, 2, str(tmp_path))
    for mode, (found, weights) in first.items():
        assert found == pytest.approx(loss, rel=1e-5) and found == second[mode][0], mode
        for name, tensor in weights.items():
            assert torch.equal(tensor, second[mode][1][name]), (mode, name)
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-4, msg=f"{mode} {name}")


def resumed_on_two_ranks(folder, start, changes):
    return on_two_ranks(folder, CHANGES | changes | {"schedule__steps": 12}, start)[0]


SHARDED = {"optimizer__sharded": True}, {"parallel__wrapper": "fsdp"}


@pytest.mark.parametrize("sharded", [{}, *SHARDED])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, sharded):
    whole = CHANGES | {"schedule__steps": 12, "checkpoints__every": 4}
    alone = Trainer(made(tmp_path / "alone", **whole), data()).run()["valid_loss"]
    start = tmp_path / "alone" / "checkpoints" / "step-00000004"
    first, second = distributed.run(resumed_on_two_ranks, 2, str(tmp_path / "two"), str(start), sharded)
    assert first == second == pytest.approx(alone, rel=1e-5)
    back = Trainer(made(tmp_path / "back", **whole), data())
    # what two ranks have saved, sharded or not
    back.resume(tmp_path / "two" / "checkpoints" / "step-00000012")
    assert back.evaluate(everything=True) == pytest.approx(alone, rel=1e-5)
    assert back.step == 12 and back.train_step() is not None


def sharded_and_resumed(folder, changes):
    changes = CHANGES | {"parallel__wrapper": "fsdp", "checkpoints__every": 4} | changes
    through = on_two_ranks(f"{folder}/through", changes)
    resumed = on_two_ranks(f"{folder}/resumed", changes, f"{folder}/through/checkpoints/step-00000004")
    return through, resumed


@pytest.mark.parametrize(
    "changes",
    [{}, {"run__dtype": "bf16", "run__compile": "blocks"}, {"run__dtype": "fp16"}],
)
def test_a_sharded_run_goes_on_bit_for_bit(tmp_path, changes):
    """Near one device's that is not compiled, in fp32."""
    alone = Trainer(made(tmp_path / "alone", **CHANGES), data()).run()["valid_loss"]
    for through, resumed in distributed.run(sharded_and_resumed, 2, str(tmp_path), changes):
        assert through[0] == resumed[0] == pytest.approx(alone, rel=2e-3 if changes else 1e-5)
        for name, tensor in through[1].items():
            assert torch.equal(tensor, resumed[1][name]), name
    # its first line has the mean of steps before and after
    assert log(tmp_path / "resumed") == log(tmp_path / "through")[1:]


@pytest.mark.parametrize("steps", [9, 11, 12, 15])
def test_a_trace_is_there_or_missed(tmp_path, capsys, steps):
    Trainer(made(tmp_path, run__profile=3, schedule__steps=steps), data()).run()
    assert (tmp_path / "trace.json.gz").is_file() or steps < 12
    assert (f"run.profile=3: no trace of {steps} steps" in capsys.readouterr().out) == (steps < 12)


# -------------------------------------------------------------------------------------------------- what goes wrong
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(tmp_path):
    trainer = Trainer(made(tmp_path, checkpoints__every=3, logging__every=2), data())
    before_step(trainer, 9, lambda: next(trainer.model.parameters()).data.fill_(float("nan")))
    words = r"not finite in step.* 9; the last good checkpoint is .*step-00000006"
    with pytest.raises(TrainingError, match=words):
        trainer.run()
    assert checkpoints.found(tmp_path / "checkpoints")[-1].name == "step-00000006"


@pytest.mark.parametrize("last", [6, 12])
def test_weights_that_a_step_has_spoiled_are_no_checkpoint(tmp_path, last):
    """The loss of that step is still finite: its gradient is not."""
    trainer = Trainer(made(tmp_path, checkpoints__every=1, checkpoints__keep=2, schedule__steps=last), data())
    spoil = lambda: trainer.model.lm_head.weight.register_hook(lambda gradient: gradient / 0)
    before_step(trainer, 6, spoil)
    with pytest.raises(TrainingError, match=r"not finite in step.* 6; the last good .*step-00000005$"):
        trainer.run()
    weights = checkpoints.weights_of(checkpoints.newest_sound(tmp_path / "checkpoints"))
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_held_out_loss_that_is_not_finite_is_no_result(tmp_path):
    trainer = Trainer(made(tmp_path), data())
    trainer.evaluate = lambda everything=False: float("inf") if everything else 1.0
    with pytest.raises(TrainingError, match="not finite in step 12; no checkpoint was saved"):
        trainer.run()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A finished run's folder with two checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("run")
    Trainer(made(folder, checkpoints__every=4, schedule__steps=8), data()).run()
    return folder


class Evil:
    def __reduce__(self):
        return open, ("executed", "w")


SPOILED = {
    "truncated": lambda path: os.truncate(path / "optimizer.pt", 1000),
    "altered": lambda path: (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-1] + b"!"),
    "missing": lambda path: (path / "optimizer.pt").unlink(),
    "no json": lambda path: (path / "checkpoint.json").write_text("{"),
    "foreign": lambda path: (path / "checkpoint.json").write_text('{"epoch": 3}'),
}
WRONG = {  # although the SHA-256s fit
    "step of another": lambda path: (path / "checkpoint.json").write_text(
        json.dumps(json.loads((path / "checkpoint.json").read_text()) | {"step": 9999})
    ),
    "garbage weights": lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 99),
    "garbage state": lambda path: (path / "state.pt").write_bytes(b"PK\x03\x04" + b"\xff" * 99),
    "malicious": lambda path: (path / "optimizer.pt").write_bytes(pickle.dumps(Evil(), 2)),
    "malicious archive": lambda path: torch.save(Evil(), path / "optimizer.pt"),
}


@pytest.mark.parametrize("how", [*SPOILED, *WRONG])
def test_a_damaged_checkpoint_is_refused_in_a_line_and_the_one_before_offered(
    tmp_path, two_checkpoints, monkeypatch, how
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    before, last = checkpoints.found(tmp_path / "checkpoints")
    (SPOILED | WRONG)[how](last)
    about = last / "checkpoint.json"
    if how in WRONG:
        told = json.loads(about.read_text())
        about.unlink()
        outputs.recorded(about, {name: value for name, value in told.items() if name != "files"})
    words = rf"{last.name}.*newest sound checkpoint is .*{before.name}$"
    with pytest.raises(StoreError, match=words) as caught:
        Trainer(made(tmp_path), data()).resume(last)
    assert "\n" not in str(caught.value) and not (tmp_path / "executed").exists()
    if how in SPOILED:
        why = []
        newest = checkpoints.newest_sound(tmp_path / "checkpoints", say=why.append)
        assert newest == before and len(why) == 1 and last.name in why[0]


FILES = {  # what people's files hold, of a plain state dict
    "safetensors": lambda state: state,
    "pt": lambda state: state,
    "staff.pt": lambda state: {
        "model": state,
        "optimizer": {"state": {}, "param_groups": []},
        "iteration": 7,
    },
    "notebook.pth": lambda state: {"epoch": 3, "model_state_dict": state, "loss": 1.5},
    "lightning.ckpt": lambda state: {"state_dict": {f"model.{name}": x for name, x in state.items()}},
    "engine.pt": lambda state: {"module": state},
}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", FILES)
def test_weights_begin_as_files_of_others_hold_them(tmp_path, two_checkpoints, name, prefix, monkeypatch):
    weights = checkpoints.weights_of(checkpoints.found(two_checkpoints / "checkpoints")[-1])
    file = tmp_path / f"weights.{name}"
    held = {prefix + name: tensor for name, tensor in weights.items()}
    held[f"{prefix}positional_encoder.cos"] = torch.ones(3)  # computed, not learned
    (safetensors.torch.save_file if name == "safetensors" else torch.save)(FILES[name](held), file)
    monkeypatch.setenv("HOME", str(tmp_path))
    begun = Trainer(made(tmp_path, checkpoints__init_from=f"~/{file.name}"), data()).model.state_dict()
    assert all(torch.equal(begun[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("held", "names"), [
    (lambda state: Evil(), "has .*; only tensors are unpickled"), (lambda state: [1, 2], "holds no state dict.*: list"),
    (lambda state: {"epoch": 3, "loss": 0.5}, "holds no state dict, nor one under model, .*: epoch, loss"),
], ids=["code", "list", "no weights"])  # fmt: skip
def test_a_file_without_weights_is_refused_and_runs_nothing(tmp_path, monkeypatch, held, names):
    monkeypatch.chdir(tmp_path)
    torch.save(held({}), "weights.pt")
    with pytest.raises(StoreError, match=f"weights.pt {names}") as caught:
        checkpoints.weights_of(Path("weights.pt"))
    assert "\n" not in str(caught.value) and not Path("executed").exists()


def test_weights_that_do_not_fit_are_named(tmp_path, two_checkpoints):
    weights = checkpoints.weights_of(checkpoints.found(two_checkpoints / "checkpoints")[-1])
    weights["lm_head.bias"] = torch.zeros(VOCAB)
    weights["ln_final.weight"] = torch.ones(17)
    for number in (0, 1):
        del weights[f"layers.{number}.ln1.weight"], weights[f"layers.{number}.ln2.weight"]
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"do not fit model\.size='tiny'") as caught:
        Trainer(made(tmp_path, checkpoints__init_from=str(tmp_path / "weights.pt")), data())
    for words in (
        '"layers.0.ln1.weight", "layers.0.ln2.weight", "layers.1.ln1.weight"', '"lm_head.bias"',
        "size mismatch for ln_final.weight", "[17]", "[16]",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_a_resumed_run_has_its_own_settings_not_those_saved(tmp_path, two_checkpoints):
    last = checkpoints.found(two_checkpoints / "checkpoints")[-1]
    changes = {"optimizer__beta1": 0.5, "optimizer__weight_decay": 0.3}
    with pytest.raises(ValueError, match=r"beta1=0\.9, now 0\.5; optimizer\.weight_decay=0\.1, now 0\.3;"):
        Trainer(made(tmp_path, **changes), data()).resume(last)
    trainer = Trainer(made(tmp_path, checkpoints__resume_changed=True, **changes), data())
    trainer.resume(last)
    group = trainer.optimizer.param_groups[0]
    assert group["betas"] == (0.5, 0.95) and group["weight_decay"] == 0.3


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    trainer = Trainer(
        made(tmp_path, checkpoints__every=2, checkpoints__keep=2, checkpoints__best=True, evaluation__every=3,
             schedule__steps=14), data(),
    )  # fmt: skip
    losses = iter(
        [3.0, 1.0, 2.0, 2.5, 0.5, 4.0]
    )  # at last of all the text, then of the part that the others are of
    trainer.evaluate = lambda everything=False: next(losses)
    trainer.run()
    names = [int(path.name[5:]) for path in checkpoints.found(tmp_path / "checkpoints")]
    assert names == [6, 12, 14] and checkpoints.best_of(tmp_path / "checkpoints").name == "step-00000006"


def best_after_more(out, *losses, **changes):
    """Of a run whose best checkpoint is step 4, and that goes on with these held-out losses."""
    run = {"checkpoints__best": True, "evaluation__every": 4, "schedule__steps": 4}
    trainer = Trainer(made(out, **run), data())
    trainer.evaluate = lambda everything=False: 2.0
    trainer.run()
    trainer = Trainer(made(out, **run | {"schedule__steps": 8} | changes), data())
    trainer.resume(out / "checkpoints" / "step-00000004")
    told = iter(losses)
    trainer.evaluate = lambda everything=False: next(told)
    trainer.run()
    return (best := checkpoints.best_of(out / "checkpoints")) and best.name


def test_the_best_checkpoint_is_the_best_of_the_whole_run(tmp_path):
    """Also of what is evaluated while none is kept, or by another part of the held-out text."""
    assert best_after_more(tmp_path / "a", 1.5, 1.5) == "step-00000008"
    assert best_after_more(tmp_path / "b", 2.5, 2.5) == "step-00000004"
    assert best_after_more(tmp_path / "c", 2.5, 2.5, checkpoints__best=False) == "step-00000004"
    assert best_after_more(tmp_path / "d", 1.5, 1.5, checkpoints__best=False) is None
    assert best_after_more(tmp_path / "e", 2.5, 2.5, evaluation__tokens=64) == "step-00000008"


def steps_of(folder):
    return [int(path.name[5:]) for path in checkpoints.found(Path(folder) / "checkpoints")]


def three_minutes_a_step(trainer, patched):
    """By the clock that tells when a checkpoint is due."""
    now, step = [0.0], trainer.train_step
    patched.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    trainer._saved_s = 0.0
    trainer.train_step = lambda: [step(), now.append(now.pop() + 180)][0]


@pytest.mark.parametrize(("often", "saved"), [
    ({}, [4, 8, 12]), ({"minutes": 7}, [4, 8, 12]), ({"minutes": 0}, [12]), ({"minutes": 13}, [6, 12]),
    ({"every": 5}, [4, 5, 10, 12]), ({"every": -1}, [12]), ({"minutes": 100}, [12]),
], ids=str)  # fmt: skip
def test_checkpoints_come_by_time_beside_steps(tmp_path, monkeypatch, often, saved):
    changes = {f"checkpoints__{key}": value for key, value in often.items()}
    trainer = Trainer(made(tmp_path, logging__every=2, **changes), data())
    three_minutes_a_step(trainer, monkeypatch)
    trainer.run()
    assert steps_of(tmp_path) == saved


def timed_on_two_ranks(folder):
    rank = torch.distributed.get_rank()
    trainer = Trainer(made(folder, logging__every=2), data(), Rank(rank, rank, 2, 2, "cpu", "gloo"))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            three_minutes_a_step(trainer, patched)
        trainer.run()


def test_rank_0s_clock_decides_for_all(tmp_path):
    distributed.run(timed_on_two_ranks, 2, str(tmp_path))
    assert steps_of(tmp_path) == [4, 8, 12]


def test_all_files_are_for_the_same_readers(two_checkpoints):
    modes_of = {file.stat().st_mode for file in (two_checkpoints / "checkpoints").glob("*/*")}
    assert len(modes_of) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_saving_holds_at_most_four_bytes_a_parameter_more(tmp_path, device):
    trainer = Trainer(made(tmp_path, model__d_model=256, model__d_ff=1024, run__device=device), data())
    trainer.train_step()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    trainer.save()  # what is imported by then is no part of it
    held = [
        *trainer.model.parameters(),
        *(x for state in trainer.optimizer.state.values() for x in state.values()),
    ]
    tensors = AliveBytes()
    tensors.known = {tensor.untyped_storage()._cdata for tensor in held}
    tracemalloc.start()
    with tensors:
        trainer.save()
    _, objects = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parameters > 2e6 and tensors.peak + objects <= 4 * parameters + 2**20


def test_what_cannot_be_written_loses_nothing(tmp_path, monkeypatch):
    trainer = Trainer(made(tmp_path, checkpoints__every=4), data())
    sync = outputs.sync

    def full(path):
        if trainer.step == 8 and path.name != "model.safetensors":
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(outputs, "sync", full)
    with pytest.raises(StoreError, match=r"step-00000008: No space.*sound.*step-00000004"):
        trainer.run()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004"]


def test_what_torch_makes_of_a_full_disk_is_told_as_one(tmp_path, monkeypatch):
    trainer = Trainer(made(tmp_path), data())

    def full(value, file):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos") from None

    def full_of_weights(tensors, path):
        raise safetensors.SafetensorError("Error while serializing: I/O error: full (os error 28)")

    for module, name, fails in ((torch, "save", full), (safetensors.torch, "save_file", full_of_weights)):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, fails)
            with pytest.raises(StoreError, match=r"cannot write .*step-00000000: No space left") as caught:
                trainer.save()
        assert caught.value.__cause__.errno == errno.ENOSPC
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("of something else")))
    with pytest.raises(RuntimeError, match="of something else"):
        trainer.save()


def test_a_damaged_newer_checkpoint_takes_the_place_of_none(tmp_path):
    trainer = Trainer(made(tmp_path, checkpoints__every=2, schedule__steps=6), data())
    trainer.run()
    (tmp_path / "checkpoints" / "step-00000006" / "state.pt").write_bytes(b"")
    again = Trainer(made(tmp_path, checkpoints__keep=1, schedule__steps=5), data())
    again.resume(tmp_path / "checkpoints" / "step-00000004")
    again.run()
    assert steps_of(tmp_path) == [5, 6]


def test_a_stop_that_comes_while_a_line_is_made_is_not_lost(tmp_path):
    trainer = Trainer(made(tmp_path, logging__every=1), data())
    check = trainer._check_losses
    trainer._check_losses = lambda: [check(), trainer._ask_to_stop()][0]
    assert trainer.run()["stopped"] and trainer.step == 1


# ------------------------------------------------------------------------------------------------ lengths in minutes
def by_a_fake_clock(monkeypatch, trainer, length_of):
    """Step n of this start takes length_of(n) seconds, by a clock of our own; all else takes a second. Returns, of all
    steps, learning rates, and seconds when they ended."""
    now, rates, ends = [100.0], [], []
    step, line = trainer.train_step, trainer._check_losses
    monkeypatch.setattr(clock, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def timed():
        norm = step()
        now[0] += length_of(len(rates) + 1)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        ends.append(sum(length_of(n) for n in range(2, len(rates) + 1)))
        return norm

    def pausing():
        now[0] += 1.0
        return line()

    trainer.train_step, trainer._check_losses = timed, pausing
    return rates, ends


MINUTE = {"schedule__steps": 0, "schedule__minutes": 1, "logging__every": 20, "schedule__warmup": 0.2}
LENGTHS = {
    "alike": lambda n: 1.5,
    "compiled": lambda n: 1000.0 if n == 1 else 1.5,
    "slower": lambda n: 0.5 if n < 20 else 4.0,
    "faster": lambda n: 4.0 if n < 9 else 0.25,
    "at random": lambda n: (n * 7919) % 13 / 4 + 0.1,
    "too long": lambda n: 70.0,
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_progress_belongs_to_every_step(tmp_path, monkeypatch, kind):
    length, whole = LENGTHS[kind], made(tmp_path, **MINUTE, checkpoints__every=7)
    trainer = Trainer(whole, data())
    rates, ends = by_a_fake_clock(monkeypatch, trainer, length)
    result = trainer.run()
    assert ends[-2] < 60 <= ends[-1] == pytest.approx(result["seconds"])
    # a step that was not timed, and one before which none was
    assert all(0 < rate < 0.0011 for rate in rates[:2])
    for n, rate in enumerate(rates[2:], 3):  # a step is taken to be as long as the one before
        done = (ends[n - 2] + length(n - 1)) / 60
        assert rate == pytest.approx(optimizer.learning_rate(whole.schedule, 0.01, min(done, 1)))
    with open(tmp_path / "log.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [float(row["seconds"]) for row in rows] == pytest.approx([ends[int(r["step"]) - 1] for r in rows])


def test_a_length_in_minutes_goes_on(tmp_path, monkeypatch):
    whole = made(tmp_path, **MINUTE, checkpoints__every=13)
    trainer = Trainer(whole, data())
    by_a_fake_clock(monkeypatch, trainer, lambda n: 1.0)
    assert trainer.run()["step"] == 61
    later = Trainer(whole, data())
    later.resume(tmp_path / "checkpoints" / "step-00000026")
    rates, _ = by_a_fake_clock(monkeypatch, later, lambda n: 500.0 if n == 1 else 1.0)
    result = later.run()
    assert result["step"] == 26 + 1 + 35 and result["seconds"] == pytest.approx(60)
    first = optimizer.learning_rate(whole.schedule, 0.01, 26 / 60)
    assert rates[:2] == pytest.approx([first, first], rel=0.01)


def minutes_on_two_ranks(folder, change, before, after):
    """A step takes `before` seconds, and `after` as many from step `change`."""
    pace = lambda n: before if n < change else after
    rank, asked = torch.distributed.get_rank(), []
    told = made(folder, **MINUTE | {"logging__every": 10**6, "evaluation__every": 0})
    trainer = Trainer(told, data(), Rank(rank, rank, 2, 2, "cpu", "gloo"))
    trainer.wrapped = lambda *batch: (
        trainer.model.token_embeddings.weight.sum()
    )  # hundreds of steps that learn nothing
    trainer.finish = lambda: None
    with pytest.MonkeyPatch.context() as patched:
        rates, ends = by_a_fake_clock(patched, trainer, pace if rank == 0 else lambda n: 9.0)

        def broadcast(tensor, src):
            asked.append(len(rates))
            torch.distributed.broadcast(tensor, src)

        patched.setattr(clock, "dist", types.SimpleNamespace(broadcast=broadcast))
        return trainer.run()["seconds"], rates, ends, asked


@pytest.mark.parametrize("paces", [(1, 0.3, 0.3), (100, 0.2, 0.8), (30, 0.8, 0.3)], ids=str)
def test_several_ranks_agree_on_rank_0s_time_and_seldom_ask(tmp_path, paces):
    (seconds, rates, ends, asked), other = distributed.run(minutes_on_two_ranks, 2, str(tmp_path), *paces)
    assert other[0] == seconds == pytest.approx(ends[-1]) == pytest.approx(60, rel=0.02)
    assert other[1] == rates and all(a > 0 for a in rates) and len(set(rates)) > 0.9 * len(rates)
    assert asked[:3] == [1, 2, 4] and len(asked) < len(rates) / 6


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_the_forecast_of_memory_is_what_a_step_holds(recompute, dtype, tmp_path):
    config_ = made(
        tmp_path, run__recompute=recompute, run__dtype=dtype, model__d_model=64, model__d_ff=192, model__num_layers=6,
        model__context_length=128, model__attention="reference",
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 300, 5000).astype(np.uint16)
    trainer = Trainer(config_, Data(ids, ids, 300, 5000))
    trainer.train_step()
    with watching_tensors() as (_, snapshot):
        trainer.train_step()
        peak = int(snapshot().active().max())
    assert forecast.memory_bytes(config_, dtype, "cpu", 1) == pytest.approx(peak, rel=0.01)
