"""`cs336 export --hf`: the same logits by Llama's own formulas, by transformers, and the same tokens."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import safetensors.torch  # noqa: E402
from test_unit_pipeline import cs336, made  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from cs336_systems.training import pipeline  # noqa: E402

TEXTS = ("Once upon a time there was", "A cat — ünïcode 🙂\n\n two  blanks ", "")


@pytest.fixture(scope="module", params=[0, 2], ids=["", "grouped"])
def exported(request, tmp_path_factory):
    """A trained model of four heads, its tokenizer, and the folder that was written of it."""
    folder = tmp_path_factory.mktemp("exported")
    run, out = folder / "run", folder / "hf"
    pipeline.train(
        made(run, model__num_heads=4, model__num_kv_heads=request.param, generation__samples=0),
        lambda line: None,
    )
    done = cs336("export", run, "--hf", out)
    assert done.exit_code == 0 and str(out / "model.safetensors") in done.stdout, done.stderr
    return *pipeline.trained(run, "cpu"), out


def by_llamas_formulas(folder, ids):
    """Logits of a LlamaForCausalLM: rotary positions turn components i and i + d/2 of a head."""
    config = json.loads((folder / "config.json").read_text())
    heads, of_keys, width = (config[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]
    angles = torch.outer(
        torch.arange(len(ids)), config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    ).repeat(1, 2)

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    x = weights["model.embed_tokens.weight"][ids]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        of = lambda y, name, layer=layer: y @ weights[f"{layer}.{name}.weight"].T
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (of(y, f"self_attn.{n}_proj").unflatten(-1, (-1, width)).transpose(0, 1) for n in "qkv")
        assert (len(q), len(k), len(v)) == (heads, of_keys, of_keys)
        k, v = (x.repeat_interleave(heads // of_keys, 0) for x in (k, v))
        scores = turned(q) @ turned(k).mT / width**0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        o = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + of(o.transpose(0, 1).flatten(-2), "self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        x = x + of(F.silu(of(y, "mlp.gate_proj")) * of(y, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def test_the_logits_are_those_of_llamas_formulas(exported):
    model, *_, folder = exported
    ids = torch.randint(model.config.vocab_size, (model.config.context_length,))
    torch.testing.assert_close(by_llamas_formulas(folder, ids), model(ids[None])[0], rtol=1e-5, atol=1e-5)


def test_transformers_loads_it_with_the_same_logits_and_tokens(exported):
    transformers = pytest.importorskip("transformers")
    model, tokenizer, end, folder = exported
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == "LlamaForCausalLM" and not any(told.values())
    ids = torch.randint(model.config.vocab_size, (2, model.config.context_length))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-5, atol=1e-5)
    same = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert same(text)["input_ids"] == [end, *ids]  # a prompt begins as here
        assert same(text, add_special_tokens=False)["input_ids"] == ids
        assert same.decode(same(text)["input_ids"], skip_special_tokens=True) == text
    assert same.bos_token_id == same.eos_token_id == theirs.generation_config.eos_token_id == end
    assert same.is_fast and same.model_max_length == model.config.context_length


@pytest.mark.parametrize("separator", ["<doc:1>", "$A"])
def test_a_separator_may_look_like_a_part_of_a_template(exported, separator, tmp_path):
    run = exported[-1].parent / "run"
    given = Tokenizer.from_file(str(next(run.glob("checkpoints/*/tokenizer.json"))))
    given.add_tokens([separator])
    given.save(str(tmp_path / "given.json"))
    own = {"tokenizer__path": str(tmp_path / "given.json"), "tokenizer__separator": separator}
    pipeline.train(made(tmp_path / "run", generation__samples=0, **own), lambda line: None)
    done = cs336("export", tmp_path / "run", "--hf", tmp_path / "hf")
    assert done.exit_code == 0, done.stderr
    written = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    end, ids = given.token_to_id(separator), given.encode("The dog").ids
    assert written.encode("The dog").ids == [end, *ids]


def test_what_cannot_be_exported_is_told(tmp_path):
    done = cs336("export", tmp_path, "--hf", tmp_path / "out")
    assert done.exit_code == 2 and "neither a checkpoint nor" in done.stderr
    assert cs336("export", tmp_path).exit_code == 2


def test_a_run_and_its_checkpoints_are_not_written_over(exported):
    run = exported[-1].parent / "run"
    [step] = run.glob("checkpoints/*")
    before = {file: file.read_bytes() for place in (run, step) for file in place.iterdir() if file.is_file()}
    for place in (run, step):
        done = cs336("export", run, "--hf", place)
        assert done.exit_code == 2 and f"{place} holds a run or a checkpoint" in done.stderr
    done = cs336("export", run, "--hf", run / "log.csv" / "out")
    assert done.exit_code == 2 and done.stderr.startswith(f"Error: {run}/log.csv/out is not a folder")
    assert {file: file.read_bytes() for file in before} == before
