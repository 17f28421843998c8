"""The Transformer: against a second implementation in fp64, and what it promises about names, dtypes and errors."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from cs336_systems.attention import IMPLEMENTATIONS, availability, registry
from cs336_systems.attention.available import torch_reason
from cs336_systems.model import (
    RMSNorm,
    RotaryTables,
    TransformerLM,
    build,
    load_class,
    staff_state_dict,
)
from cs336_systems.sizes import HANDOUT_SIZES, SIZES, ModelConfig, size

CONFIG = ModelConfig(d_model=48, d_ff=80, num_layers=2, num_heads=3, vocab_size=61, context_length=40)
GROUPED = dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=2)


def draw_ids(config=CONFIG, batch=2, sequence=23):
    return torch.randint(0, config.vocab_size, (batch, sequence))


def perturbed(model):
    """Weights of the norms start at 1, where a missing or misplaced one would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln" in name or name.startswith("ln"):
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return model


def expected_logits(weights, ids, config):
    """The same model once more, head by head, with rotary positions as products of complex numbers."""

    def norm(x, weight):
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / config.d_model + 1e-5) * weight

    def turn(x):  # (B, S, d)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], config.d_head // 2, 2))
        i = torch.arange(config.d_head // 2, dtype=torch.float64)
        position = torch.arange(x.shape[-2], dtype=torch.float64)
        angle = position[:, None] * config.rope_theta ** (-2 * i / config.d_head)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).reshape(x.shape)

    x = weights["token_embeddings.weight"][ids]
    hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for n in range(config.num_layers):
        w = {name.removeprefix(f"layers.{n}."): tensor for name, tensor in weights.items()}
        h = norm(x, w["ln1.weight"])
        outputs = []
        for head in range(config.num_heads):
            of_keys = head // (config.num_heads // config.kv_heads)
            rows = (slice(n * config.d_head, (n + 1) * config.d_head) for n in (head, of_keys, of_keys))
            q, k, v = (h @ w[f"attn.{name}_proj.weight"][r].T for name, r in zip("qkv", rows, strict=True))
            scores = turn(q) @ turn(k).mT / math.sqrt(config.d_head)
            outputs.append(torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v)
        x = x + torch.cat(outputs, -1) @ w["attn.output_proj.weight"].T
        h = norm(x, w["ln2.weight"])
        gate = h @ w["ffn.w1.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["ffn.w3.weight"].T)) @ w["ffn.w2.weight"].T
    return norm(x, weights["ln_final.weight"]) @ weights["lm_head.weight"].T


# ------------------------------------------------------------------------------------------- what it computes
@pytest.mark.parametrize("config", [CONFIG, GROUPED, dataclasses.replace(CONFIG, num_kv_heads=1)], ids=str)
def test_logits_and_gradients_are_those_of_the_second_implementation_in_fp64(config):
    model, ids = perturbed(build(config, "reference", dtype=torch.float64)), draw_ids()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = expected_logits(weights, ids, config)
    logits = model(ids)
    assert logits.shape == (2, 23, CONFIG.vocab_size)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    out_grad = torch.randn_like(logits)
    logits.backward(out_grad)
    expected.backward(out_grad)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=["fp32", "bf16"]
)
def test_logits_in_lower_precision_stay_near_fp64(dtype, error):
    model, ids = perturbed(build(CONFIG, dtype=dtype)), draw_ids()
    expected = expected_logits({n: p.detach().double() for n, p in model.named_parameters()}, ids, CONFIG)
    logits = model(ids)
    assert logits.dtype == dtype
    assert (logits.double() - expected).norm() < error * expected.norm()


@pytest.mark.parametrize(
    "impl", ["flash_triton", *(i for i, found in IMPLEMENTATIONS.items() if found.reason is torch_reason)]
)
@pytest.mark.parametrize("num_kv_heads", [None, 1])
def test_all_implementations_of_attention_agree(impl, num_kv_heads):
    if reason := availability()[impl]:
        pytest.skip(reason)
    if num_kv_heads and impl not in registry.serving("enable_gqa"):
        pytest.skip("serves no grouped queries")
    # where there is a GPU, the kernels run on it and not in triton's interpreter
    device = "cuda" if impl == "flash_triton" and torch.cuda.is_available() else "cpu"
    ids, out_grad = draw_ids().to(device), torch.randn(2, 23, CONFIG.vocab_size, device=device)
    config = dataclasses.replace(CONFIG, num_kv_heads=num_kv_heads)
    plain = build(config, "reference", device=device)
    other = build(config, impl, device=device)
    other.load_state_dict(plain.state_dict())
    logits = other(ids)
    torch.testing.assert_close(logits, plain(ids), rtol=1e-4, atol=1e-5)
    assert logits.grad_fn is not None
    if impl != "flash_compiled_backward":  # its backward pass needs a C++ compiler, and a minute
        logits.backward(out_grad)
        plain(ids).backward(out_grad)
        for (name, p), expected in zip(other.named_parameters(), plain.parameters(), strict=True):
            said = lambda m, name=name: f"{name}: {m}"
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=said)


def test_the_implementation_is_the_one_that_was_named(monkeypatch):
    asked = []
    attend = lambda q, k, v, is_causal, impl, **seen: asked.append((is_causal, impl)) or q
    monkeypatch.setattr("cs336_systems.model.attention", attend)
    build(CONFIG, "sdpa")(draw_ids())
    build(CONFIG)(draw_ids())
    assert asked == [(True, "sdpa")] * 2 + [(True, "auto")] * 2


# ---------------------------------------------------------------------------------------------- rotary, norm


def test_far_positions_are_exact():
    """At position 100,000 an angle computed in fp32 is off by thousandths."""
    cos, _ = RotaryTables(4, 100_001, 10_000.0)(100_001)
    assert cos[-1].tolist() == pytest.approx([math.cos(1e5)] * 2 + [math.cos(1e3)] * 2, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tables_stay_exact_whatever_is_done_to_the_model(dtype):
    expected = RotaryTables(CONFIG.d_head, CONFIG.context_length, CONFIG.rope_theta)
    tables = [
        build(CONFIG).to(dtype).positional_encoder,
        build(CONFIG).to(dtype).float().positional_encoder,
        build(CONFIG, device="meta").to(dtype).to_empty(device="cpu").positional_encoder,
    ]
    for table in tables:
        assert table.cos.dtype == torch.float32
        assert torch.equal(table.cos, expected.cos) and torch.equal(table.sin, expected.sin)
    assert build(CONFIG).double().positional_encoder.sin.dtype == torch.float64
    assert build(CONFIG, device="meta").positional_encoder.cos.is_meta


def test_norm_computes_in_fp32_and_keeps_the_dtype():
    x = 1000 * torch.randn(5, 32)  # squares beyond fp16's range
    norm = RMSNorm(32)
    y = norm(x.half())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), norm(x), rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(5), rtol=1e-5, atol=0)
    tiny = torch.full((1, 32), 1e-4)
    torch.testing.assert_close(norm(tiny), tiny / math.sqrt(1e-8 + 1e-5))


# --------------------------------------------------------------------------------------- autocast, compilation
def test_autocast_keeps_weights_gradients_and_residual_stream_in_fp32():
    model, ids = build(CONFIG), draw_ids()
    residual = []
    model.ln_final.register_forward_pre_hook(lambda module, args: residual.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    assert logits.dtype == torch.bfloat16 and residual == [torch.float32]
    assert torch.isfinite(loss) and loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    exact = model(ids)
    assert 0 < (logits.float() - exact).norm() < 0.05 * exact.norm()


# ------------------------------------------------------------------------------------------- names and weights
@pytest.mark.parametrize(("config", "d_kv"), [(CONFIG, 48), (GROUPED, 16)])
def test_parameters_have_the_staff_names_and_shapes(config, d_kv):
    d, f, v = CONFIG.d_model, CONFIG.d_ff, CONFIG.vocab_size
    expected = {"token_embeddings.weight": (v, d), "ln_final.weight": (d,), "lm_head.weight": (v, d)}
    for n in range(CONFIG.num_layers):
        expected |= {f"layers.{n}.attn.{name}_proj.weight": (d, d) for name in ("q", "output")}
        expected |= {f"layers.{n}.attn.{name}_proj.weight": (d_kv, d) for name in ("k", "v")}
        expected |= {f"layers.{n}.{name}.weight": (d,) for name in ("ln1", "ln2")}
        expected |= {f"layers.{n}.ffn.{name}.weight": (f, d) for name in ("w1", "w3")}
        expected[f"layers.{n}.ffn.w2.weight"] = (d, f)
    model = build(config)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == expected
    assert {name for name, _ in model.named_parameters()} == expected.keys()
    assert model.lm_head.weight is not model.token_embeddings.weight


def test_weights_start_truncated_normal():
    model = build(dataclasses.replace(SIZES["tiny"], d_model=256, d_ff=512))
    kept = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))
    for weight, std in (
        (model.token_embeddings.weight, 1.0),
        (model.lm_head.weight, math.sqrt(2 / (256 + 10_000))),
        (model.layers[1].ffn.w2.weight, math.sqrt(2 / (512 + 256))),
        (model.layers[0].attn.k_proj.weight, math.sqrt(2 / (256 + 256))),
    ):
        assert 2.9 * std < weight.abs().max() <= 3 * std * (1 + 1e-6)
        assert weight.std().item() == pytest.approx(kept * std, rel=0.02)
        assert abs(weight.mean().item()) < 0.02 * std
    assert torch.equal(model.ln_final.weight, torch.ones(256))


def test_a_checkpoint_comes_back_whatever_was_compiled():
    model, ids = perturbed(build(CONFIG)), draw_ids()
    logits = model(ids)
    whole = torch.compile(model, backend="eager").state_dict()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    part = model.state_dict()
    assert all(name.startswith("_orig_mod.") for name in whole)
    assert "layers.1._orig_mod.ln1.weight" in part
    tables = {"positional_encoder._freq_cis_cache": torch.zeros(2, 40, 8)}
    for state in (whole, part, whole | tables):
        other = build(CONFIG)
        assert not torch.equal(other(ids), logits)
        other.load_state_dict(staff_state_dict(state), strict=True)
        assert torch.equal(other(ids), logits)
    with pytest.raises(RuntimeError, match="unexpected"):
        build(CONFIG).load_state_dict(staff_state_dict(whole | {"unexpected": torch.zeros(1)}))


# ------------------------------------------------------------------------------------------- errors, choosing
def test_what_does_not_fit_is_named():
    model = build(CONFIG)
    with pytest.raises(ValueError, match=r"41 tokens; context_length=40"):
        model(draw_ids(sequence=41))
    assert model(draw_ids(sequence=40)).shape == (2, 40, CONFIG.vocab_size)
    with pytest.raises(ValueError, match=r"shape \(5,\); expected \(batch, sequence\)"):
        model(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'fast'; allowed: auto, flash_triton"):
        build(CONFIG, "fast")
    with pytest.raises(ValueError, match="d_model=48 must be a multiple of num_heads=5"):
        TransformerLM(61, 40, 48, 2, 5, 80)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0; it must be a positive integer"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_heads": 16}, "head dimension 3; it must be even"),
        ({"num_kv_heads": 2}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0; it must be a positive integer"),
        ({"rope_theta": 0.0}, "rope_theta=0.0; it must be positive and finite"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
    ],
)
def test_configurations_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_sizes_are_those_of_the_handout():
    handout = {name: SIZES[name] for name in HANDOUT_SIZES}
    assert {n: (c.d_model, c.d_ff, c.num_layers, c.num_heads) for n, c in handout.items()} == {
        "small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25), "2.7B": (2560, 10240, 32, 32),
    }  # fmt: skip
    assert {config.vocab_size for config in handout.values()} == {10_000}
    assert size("xl").d_head == 64 and size("xl") is SIZES["xl"]
    with pytest.raises(ValueError, match=r"'gpt5'; allowed: tiny, small, medium, large, xl, 2\.7B"):
        size("gpt5")


OTHER = """
import torch

class Bare(torch.nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(d_model, d_ff))

class Open(torch.nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.sizes = sizes
"""


def test_another_class_takes_the_place(tmp_path, monkeypatch):
    """What cannot: tests/wrong_values.py, by way of `cs336 bench model --model`."""
    (tmp_path / "other_model.py").write_text(OTHER)
    (tmp_path / "broken_model.py").write_text("import nonexistent_module")
    monkeypatch.syspath_prepend(tmp_path)
    bare = build(CONFIG, model="other_model:Bare", device="meta", dtype=torch.bfloat16)
    assert bare.weight.shape == (48, 80) and bare.weight.is_meta and bare.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"Bare' has no parameter attention; 'sdpa' cannot be chosen"):
        build(CONFIG, "sdpa", model="other_model:Bare")
    with pytest.raises(ValueError, match=r"Bare' has no parameter num_kv_heads; it cannot be 2"):
        build(GROUPED, model="other_model:Bare")
    sizes = build(GROUPED, "sdpa", model="other_model:Open").sizes
    assert sizes == {"attention": "sdpa", **dataclasses.asdict(GROUPED)}
    assert "num_kv_heads" not in build(CONFIG, model="other_model:Open").sizes
    assert load_class("cs336_systems.model:TransformerLM") is TransformerLM
    with pytest.raises(ModuleNotFoundError, match="nonexistent_module"):
        load_class("broken_model:Bare")
    with torch.device("meta"):  # torch's default device holds without a device of its own
        assert build(CONFIG).lm_head.weight.is_meta
