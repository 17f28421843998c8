"""What a run takes where nobody says: by the device; and what always wins."""

from __future__ import annotations

import itertools
import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from typer.testing import CliRunner

from cs336_systems.cli.main import app
from cs336_systems.training import config, defaults, forecast
from cs336_systems.training.defaults import Machine

H200, T4 = Machine(139.8, "bf16", 989.0, 8), Machine(14.7, "fp16", 65.0, 2)


def made(machine, **told):
    told = {name.replace("__", "."): value for name, value in told.items()}
    return config.load(None, defaults.chosen(machine, told))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("machine", [H200, T4, Machine(8.0, "fp16", 20.0, 1)], ids=str)
def test_a_gpu_gets_what_fits_it(monkeypatch, machine, ranks):
    if ranks == 8:  # torchrun says how many
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "8")
    chosen = made(machine, **({} if ranks == 8 else {"parallel__nproc": ranks}))
    assert chosen.model.size == "small" and chosen.schedule.length == ("minutes", defaults.MINUTES)
    assert config.for_ranks(chosen, ranks) in defaults.BATCHES  # and the sequences go round
    assert chosen.batch.sequences * chosen.model.context_length == defaults.STEP_TOKENS
    needed = forecast.memory_bytes(chosen, machine.dtype, "cuda", ranks)
    assert needed <= defaults.USABLE * machine.gib * 2**30
    assert chosen.run.compile == (
        "blocks" if machine.dtype == "fp16" else "whole" if ranks == 1 else "graphs"
    )
    assert not chosen.optimizer.sharded
    assert chosen.model.context_length == (2048 if machine is H200 else 1024)


def test_graphs_are_left_where_parts_or_memory_do_not_let_them():
    """Of several GPUs; elsewhere the model is compiled whole."""
    chosen = made(H200, parallel__nproc=2)
    assert chosen.run.compile == "graphs"
    needed = forecast.memory_bytes(chosen, "bf16", "cuda", 2) / defaults.USABLE / 2**30
    nearly_full = Machine(1.1 * needed, "bf16", 989.0, 2)
    for machine, told in (
        (H200, {"batch__accumulate": 2}), (H200, {"batch__sequences": 64}), (nearly_full, {}),
        (H200, {"run__compile": "whole"}),
    ):  # fmt: skip
        assert made(machine, parallel__nproc=2, **told).run.compile == "whole", (machine, told)


def test_what_is_chosen_goes_with_what_is_told():
    """One flag alone never makes the others contradict each other."""
    small = Machine(5.0, "bf16", 65.0, 2)  # a step comes in parts
    for machine, ranks in itertools.product((H200, T4, small), (1, 2)):
        for again, how in (("blocks", "blocks"), ("selective", "off")):
            assert made(machine, run__recompute=again, parallel__nproc=ranks).run.compile == how
        graphs = made(machine, run__compile="graphs", parallel__nproc=ranks)
        assert graphs.run.compile == "graphs" and graphs.batch.accumulate == 1
        needed = forecast.memory_bytes(graphs, machine.dtype, "cuda", ranks)
        assert needed <= defaults.USABLE * machine.gib * 2**30
    assert made(small).batch.accumulate > 1


def test_a_batch_that_is_told_gets_the_longest_context_at_which_it_fits():
    assert made(H200, batch__sequences=16).model.context_length == 2048
    many = made(H200, batch__sequences=128)
    context, longer = many.model.context_length, 2 * many.model.context_length
    assert 256 < context < 2048, "memory decides"
    fits = lambda n: defaults.most_sequences(
        {"model.size": "small", "model.context_length": n}, H200.gib, "bf16"
    )
    assert fits(longer) < 128 <= fits(context)
    assert made(H200, batch__sequences=128, batch__accumulate=8).model.context_length == 2048  # 16 at a time
    assert made(T4, batch__sequences=2**12).model.context_length == 256, (
        "the configuration's, where none is known to fit"
    )


def test_there_is_text_for_one_epoch():
    """At the throughput that an H100 has reached with this model, and on twice as many GPUs."""
    for ranks in (1, 2):
        chosen = made(H200, schedule__minutes=2, parallel__nproc=ranks)
        tokens = 120 * ranks * 592_524  # MFU 0.43
        assert tokens * 4.2e-6 <= chosen.text.train_mb <= 2 * tokens * 4.2e-6
    assert made(H200, schedule__steps=5).text.train_mb == defaults.LEAST_MB
    for machine in (H200, Machine()):  # epochs are of all that is there
        assert made(machine, schedule__epochs=2).text.train_mb == config.Text().train_mb
        assert made(machine, schedule__epochs=2, text__source="a.txt").text.train_mb == 0
    assert made(H200, schedule__tokens=2 * 10**7).text.train_mb == 85
    assert made(H200, schedule__minutes=1000).text.train_mb == defaults.MOST_MB
    assert made(Machine(tflops=0.24)).text.train_mb < made(Machine(tflops=2.4)).text.train_mb


def test_a_cpu_has_the_configurations_own_defaults():
    chosen, own = made(Machine()).to_dict(), config.load().to_dict()
    chosen["text"].pop("train_mb"), own["text"].pop("train_mb")
    assert chosen == own


@pytest.mark.parametrize(
    "told",
    [
        {"model.size": "medium"}, {"model.context_length": "256"}, {"batch.sequences": "24"},
        {"batch.accumulate": "2"}, {"schedule.steps": "7"}, {"text.train_mb": "3"}, {"run.compile": "off"},
        {"run.dtype": "fp32"}, {"optimizer.learning_rate": "0.01"}, {"optimizer.sharded": "true"},
        {"model.d_model": "384", "model.num_heads": "6"}, {"model.size": "tiny", "batch.sequences": "3"},
        {"parallel.nproc": "2", "parallel.wrapper": "fsdp"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("machine", [H200, T4, Machine()], ids=["H200", "T4", "CPU"])
def test_what_is_told_wins(machine, told):
    chosen, asked = (config.load(None, x).to_dict() for x in (defaults.chosen(machine, told), told))
    for section, key in (name.split(".") for name in told):
        assert chosen[section][key] == asked[section][key]
    assert config.for_ranks(config.load(None, chosen), chosen["parallel"]["nproc"])


def test_a_model_that_does_not_fit_is_named_with_those_that_do():
    with pytest.raises(
        ValueError, match=r"size='2.7B' does not fit 14.7 GiB; allowed: mini, tiny, small, medium"
    ):
        made(T4, model__size="2.7B")
    assert made(T4, model__size="large", parallel__nproc=2).optimizer.sharded  # over two it fits
    with pytest.raises(ValueError, match="size='large'"):
        made(T4, model__size="large", optimizer__sharded=False, parallel__nproc=2)


def test_the_choice_is_told_in_three_lines_and_a_file_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(defaults, "here", lambda device, ranks: Machine() if device == "cpu" else T4)
    said = []
    assert defaults.settled({}, said.append).model.size == "small" and len(said) == 3
    assert defaults.settled({"run.device": "cpu"}, said.append) == made(Machine(), run__device="cpu")
    (tmp_path / "a.toml").write_text("[schedule]\nsteps = 3\n")
    done = CliRunner().invoke(
        app, ["train", "--config", str(tmp_path / "a.toml"), "--device", "cpu", "--dry-run"]
    )
    assert done.exit_code == 0 and said[-1] not in done.stdout and '"size": "mini"' in done.stdout


def test_ranks_without_a_gpu_each_get_what_fits_a_cpu(monkeypatch):
    """There they train, unless a GPU is asked for."""
    monkeypatch.setattr(defaults, "gpu_names", lambda: ["one"])
    said = []
    for told in ({"parallel.nproc": 2}, {"run.device": "cpu"}):
        assert defaults.settled(told, said.append).model.size == "mini"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert defaults.settled({}, said.append).model.size == "mini"
    assert all("the CPU" in line for line in said[::3])


def test_a_run_that_goes_on_keeps_its_own(tmp_path, monkeypatch):
    own = {
        "text.train_mb": 0.06, "text.valid_mb": 0.02, "tokenizer.vocab_size": 400, "model.size": "tiny",
        "model.d_model": 16, "model.d_ff": 32, "model.num_heads": 2, "model.context_length": 32,
        "batch.sequences": 4, "run.device": "cpu", "generation.tokens": 4, "optimizer.learning_rate": 0.02,
    }  # fmt: skip
    flags = [*itertools.chain(*(("--set", f"{key}={value}") for key, value in own.items())), "--steps", "2"]
    train = lambda out, *words: CliRunner().invoke(app, ["train", "--out", str(out), *map(str, words)])
    assert train(tmp_path / "a", *flags).exit_code == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(defaults, "here", lambda device, ranks: T4)  # would choose another model
    on = train(tmp_path / "a", "--resume", "auto", "--steps", 4)
    assert on.exit_code == 0 and "going on from" in on.stdout, on.output
    made = config.load(tmp_path / "a" / "config.json")
    assert made.schedule.length == ("steps", 4) and made.optimizer.learning_rate == 0.02
    on = train(tmp_path / "a", "--resume", "auto", "--steps", 6, "--resume-changed", "--learning-rate", 0.01)
    assert on.exit_code == 0, on.output
    last = tmp_path / "a" / "checkpoints" / "step-00000006"
    for words in (
        ["a", "--resume", "auto"],
        ["e", "--resume", last],
    ):  # what was allowed once is not for good
        refused = train(tmp_path / words[0], *words[1:], "--steps", 8, "--set", "batch.seed=1")
        assert refused.exit_code == 2 and "batch.seed=0, now 1" in refused.stderr, refused.output
    [first] = (tmp_path / "b" / "checkpoints").glob("step-*")
    assert train(tmp_path / "c", "--resume", first, "--tokens", 3 * 4 * 32).exit_code == 0
    assert config.load(tmp_path / "c" / "config.json").schedule.length == ("tokens", 384)
    assert [path.name for path in (tmp_path / "c" / "checkpoints").iterdir()] == ["step-00000003"]
    (first / "checkpoint.json").write_text("{")
    refused = train(tmp_path / "d", "--resume", first)
    assert refused.exit_code == 2 and "checkpoint.json" in refused.stderr and refused.stderr.count("\n") == 1


def test_the_learning_rate_falls_with_the_width():
    rate = lambda **told: made(H200, **told).optimizer.learning_rate
    assert [rate(model__size=size) for size in ("tiny", "mini", "small", "medium")] == [
        6e-3,
        6e-3,
        1e-3,
        7.5e-4,
    ]
    assert rate(model__size="medium", optimizer__learning_rate=2e-3) == 2e-3
