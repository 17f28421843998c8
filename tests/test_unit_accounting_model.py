"""Closed forms for the whole model, against the model: its parameters, torch's FLOP counter, and the tensors alive."""

import contextlib
import dataclasses

import pytest
import torch
from alive_bytes import AliveBytes, saved_storages
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems import accounting
from cs336_systems.accounting.zero import tensor_sizes
from cs336_systems.attention import availability
from cs336_systems.model import build
from cs336_systems.sizes import SIZES, ModelConfig

CONFIG = ModelConfig(d_model=48, d_ff=80, num_layers=3, num_heads=3, vocab_size=61, context_length=64)
GROUPED = dataclasses.replace(CONFIG, d_model=64, num_heads=4, num_kv_heads=2)
IMPLS = {"reference": "reference", "flash": "flash_triton"}


def draw(config, batch, sequence, device="cpu"):
    """Token ids and targets."""
    return torch.randint(0, config.vocab_size, (2, batch, sequence), device=device).unbind()


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


class CudaAutocast(TorchFunctionMode):
    """Autocast on the CPU leaves the softmax in bf16, and widens the logits before cross entropy; under this mode the
    softmax computes in fp32 and the log-softmax in bf16, as on CUDA.

    A mode, since torch.compile remembers torch's functions when it first looks: one replaced then is lost to it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.softmax and torch.is_autocast_enabled("cpu"):
            kwargs = kwargs | {"dtype": torch.float32}
        if func is torch.nn.functional.cross_entropy and torch.is_autocast_enabled("cpu"):
            logits, targets = args
            with torch.autocast("cpu", enabled=False):
                return torch.nn.functional.nll_loss(torch.log_softmax(logits, 1).float(), targets)
        return func(*args, **kwargs)


@pytest.fixture
def cuda_autocast_rule():
    with CudaAutocast():
        yield


def skip_without(attention):
    if reason := availability()[IMPLS[attention]]:
        pytest.skip(reason)


# ---------------------------------------------------------------------------------------- parameters, FLOPs
@pytest.mark.parametrize("config", [*SIZES.values(), GROUPED], ids=str)
def test_parameters_are_those_of_the_model(config):
    model = build(config, device="meta")
    counted = dict.fromkeys(accounting.parameter_counts(config), 0)
    named = {
        "embedding": "token_embeddings", "attention": ".attn.", "ffn": ".ffn.", "norms": "ln",
        "head": "lm_head",
    }  # fmt: skip
    for parameter_name, parameter in model.named_parameters():
        for component, part in named.items():
            counted[component] += parameter.numel() if part in parameter_name else 0
    assert accounting.parameter_counts(config) == counted
    sizes = [p.numel() for p in model.parameters()]
    assert accounting.num_parameters(config) == sum(sizes) and tensor_sizes(config) == sizes


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["", "grouped"])
def test_flops_are_those_that_torch_counts(config):
    model, (ids, targets) = build(config, "reference"), draw(config, 2, 17)
    expected = accounting.forward_matmul_flops(config, 2, 17)
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model, ids, targets)
    counts = {
        module.removeprefix("TransformerLM."): sum(by_operator.values())
        for module, by_operator in forward.get_flop_counts().items()
    }
    layers = range(CONFIG.num_layers)

    def counted(*parts):
        return sum(counts[f"layers.{n}.{part}"] for n in layers for part in parts)

    assert counts["lm_head"] == expected["head"]
    assert counted("ffn") == expected["ffn"]
    assert counted("attn.q_proj", "attn.k_proj", "attn.v_proj") == expected["qkv"]
    assert counted("attn.output_proj") == expected["output_projection"]
    products = counted("attn") - expected["qkv"] - expected["output_projection"]
    assert products == expected["attention_scores"] + expected["attention_output"]
    assert expected["attention_scores"] == expected["attention_output"]
    assert forward.get_total_flops() == sum(expected.values())
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_model_flops_are_two_a_parameter_and_token_and_half_of_attention():
    batch, sequence, config = 3, 128, SIZES["small"]
    counts = accounting.parameter_counts(config)
    in_products = counts["attention"] + counts["ffn"] + counts["head"]
    pairs = config.num_layers * config.num_heads * batch * sequence**2 // 2
    forward = 2 * batch * sequence * in_products + pairs * 4 * config.d_head
    assert accounting.model_flops(config, batch, sequence, "forward") == forward
    assert accounting.model_flops(config, batch, sequence, "forward_backward") == 3 * forward
    assert accounting.model_flops(config, batch, sequence, "train_step") == 3 * forward


def test_mfu_is_one_at_the_peak():
    ms = accounting.model_flops(CONFIG, 2, 16, "train_step") / 200e12 * 1e3
    assert accounting.mfu(CONFIG, 2, 16, "train_step", ms=ms, tflops=200) == pytest.approx(1)
    assert accounting.mfu(CONFIG, 2, 16, "train_step", ms=4 * ms, tflops=100) == pytest.approx(0.5)


def test_residual_stream_of_the_largest_size():
    x = torch.empty(4, 512, 2560, device="meta")
    assert accounting.residual_bytes(SIZES["2.7B"], 4, 512) == x.nbytes == 20 * 2**20
    assert accounting.residual_bytes(SIZES["2.7B"], 4, 512, 2) == x.bfloat16().nbytes


# ------------------------------------------------------------------------------------- saved for backward
def saved_bytes(model, ids, targets, autocast):
    """Bytes of all storages that autograd saves in a forward pass with its loss, parameters and tables left out."""
    noting, saved = saved_storages([*model.parameters(), *model.buffers()])
    with noting, torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss_of(model, ids, targets)
    return sum(storage.nbytes() for storage in saved.values())


def check_saved(config, batch, sequence, dtype, attention, device, run_on):
    model = build(config, IMPLS[attention], device=run_on)
    ids, targets = (x.clone() for x in draw(config, batch, sequence, run_on))
    counted = saved_bytes(model, ids, targets, autocast=dtype == "bf16")
    expected = sum(
        accounting.saved_activation_bytes(config, batch, sequence, dtype, attention, device).values()
    )
    assert counted == expected + (accounting.autocast_copy_bytes(config) if dtype == "bf16" else 0)


@pytest.mark.parametrize("shape", [(1, 16), (3, 21)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("attention", IMPLS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_tensors_are_counted_to_the_byte(dtype, attention, shape, monkeypatch):
    skip_without(attention)
    if attention == "flash":
        if torch.cuda.is_available():
            pytest.skip("the kernels run on the CPU only where there is no GPU")
        from cs336_systems.attention import flash_triton

        # the interpreter computes bf16 wrongly, which changes nothing of what is saved
        monkeypatch.setattr(flash_triton, "_require_interpreter", lambda dtype: None)
    check_saved(CONFIG, *shape, dtype, attention, "cpu", "cpu")
    check_saved(GROUPED, *shape, dtype, attention, "cpu", "cpu")


def test_saved_tensors_under_autocast_as_on_cuda(cuda_autocast_rule):
    check_saved(CONFIG, 2, 16, "bf16", "reference", "cuda", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("attention", IMPLS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_tensors_on_a_gpu(dtype, attention):
    skip_without(attention)
    check_saved(CONFIG, 3, 21, dtype, attention, "cuda", "cuda")


# ----------------------------------------------------------------------------------------------------- peak
def step(model, optimizer, ids, targets, mode, autocast):
    """One step of a mode, as `memory_moments` describes it."""
    context = torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast)
    if mode in ("forward", "forward_graph"):
        with torch.no_grad() if mode == "forward" else contextlib.nullcontext(), context:
            model(ids)
        return
    model.zero_grad(set_to_none=True)
    with context:
        loss = loss_of(model, ids, targets)
    loss.backward()
    if optimizer:
        optimizer.step()


def alive_peak(config, batch, sequence, mode, dtype, attention, optimizer="foreach"):
    """The peak of a step's tensors, counted on tensors that have shapes but no memory."""
    with FakeTensorMode(), AliveBytes() as alive:
        model = build(config, IMPLS[attention])
        ids, targets = torch.randint(0, config.vocab_size, (2, batch, sequence)).unbind()
        adamw = None
        if mode == "train_step":
            adamw = torch.optim.AdamW(model.parameters(), **{optimizer: True})
            step(model, adamw, ids, targets, mode, dtype == "bf16")  # makes the optimizer's state
        alive.peak = 0
        step(model, adamw, ids, targets, mode, dtype == "bf16")
    tables = 2 * 4 * config.context_length * config.d_head
    # What the graph saves of ids and targets belongs to the closed form; the rest of them is the caller's.
    callers = {"forward": 2, "forward_graph": 1}.get(mode, 0) * ids.nbytes
    return alive.peak - tables - callers


@pytest.fixture
def weights_not_drawn(monkeypatch):
    """Drawing them reads values, which tensors without memory have not."""
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda weight, **kwargs: weight)


# Each moment is the peak of one of these: d_model, d_ff, layers, heads, vocabulary; batch, sequence, dtype, attention
PEAKS = [
    ("softmax, last block", "forward", (256, 1024, 2, 8, 100), 4, 512, "bf16", "reference"),
    ("masking, last block", "forward", (32, 192, 2, 1, 100), 1, 512, "fp32", "reference"),
    ("attention output, last block", "forward", (128, 256, 1, 4, 100), 4, 128, "fp32", "reference"),
    ("attention output, last block", "forward", (64, 64, 1, 1, 10), 4, 256, "fp32", "reference"),  # one head: no copies
    ("swiglu, last block", "forward", (256, 1024, 2, 4, 10), 4, 512, "bf16", "flash"),
    ("logits", "forward", (128, 512, 2, 4, 10_000), 2, 256, "bf16", "reference"),
    ("softmax, last block", "forward_graph", (64, 128, 2, 4, 10), 2, 512, "bf16", "reference"),
    ("attention output, last block", "forward_graph", (64, 128, 1, 4, 10), 4, 256, "fp32", "reference"),
    ("logits", "forward_graph", (64, 128, 2, 4, 10_000), 1, 256, "bf16", "flash"),
    ("loss, backward", "forward_backward", (64, 256, 2, 4, 10_000), 2, 256, "bf16", "reference"),
    ("final norm, backward", "forward_backward", (128, 256, 1, 2, 10), 4, 512, "bf16", "flash"),
    ("swiglu, backward, last block", "forward_backward", (384, 3072, 2, 12, 10), 1, 512, "fp32", "flash"),
    ("attention, backward, last block", "forward_backward", (128, 256, 2, 8, 100), 2, 512, "bf16", "reference"),
    ("swiglu, backward, first block", "forward_backward", (256, 2048, 2, 8, 100), 2, 64, "fp32", "flash"),
    ("attention, backward, first block", "forward_backward", (768, 3072, 2, 12, 100), 1, 256, "fp32", "reference"),
    ("embedding, backward", "forward_backward", (128, 512, 1, 4, 10_000), 1, 16, "bf16", "flash"),
    ("optimizer step", "train_step", (768, 3072, 2, 12, 1000), 1, 16, "bf16", "reference"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "mode", "sizes", "batch", "sequence", "dtype", "attention"),
    PEAKS,
    ids=[f"{mode}: {moment}" for moment, mode, *_ in PEAKS],
)
@pytest.mark.usefixtures("cuda_autocast_rule", "weights_not_drawn")
def test_each_moment_where_it_is_the_peak(moment, mode, sizes, batch, sequence, dtype, attention):
    skip_without(attention)
    *sizes, vocab_size = sizes
    config = ModelConfig(*sizes, vocab_size=vocab_size)
    moments = accounting.memory_moments(config, batch, sequence, mode, dtype, attention)
    total = {name: sum(items.values()) for name, items in moments.items()}
    assert max(total, key=total.get) == moment
    counted = alive_peak(config, batch, sequence, mode, dtype, attention)
    assert total[moment] == pytest.approx(counted, rel=5e-3)


@pytest.mark.usefixtures("cuda_autocast_rule", "weights_not_drawn")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("mode", ["forward", "forward_graph", "forward_backward"])
def test_peak_of_grouped_queries_that_plain_attention_repeats(mode, num_kv_heads, dtype):
    config = ModelConfig(64, 128, 1, 4, 10, num_kv_heads=num_kv_heads)
    sizes = (4, 256, mode, dtype, "reference")
    assert sum(accounting.peak_bytes(config, *sizes).values()) == pytest.approx(
        alive_peak(config, *sizes), rel=5e-3
    )


@pytest.mark.usefixtures("weights_not_drawn")
@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_peak_of_grouped_queries(mode):
    skip_without("flash")
    config, sizes = ModelConfig(512, 1024, 2, 8, 100, num_kv_heads=2), (2, 512, mode, "fp32", "flash")
    expected = sum(accounting.peak_bytes(config, *sizes).values())
    assert expected == pytest.approx(alive_peak(config, *sizes), rel=5e-3)
    assert expected < sum(accounting.peak_bytes(dataclasses.replace(config, num_kv_heads=8), *sizes).values())


@pytest.mark.usefixtures("weights_not_drawn")
def test_fused_adamw_needs_no_temporary():
    config, sizes = SIZES["tiny"], (1, 16, "train_step", "fp32", "reference")
    fused, foreach = (accounting.peak_bytes(config, *sizes, optimizer=name) for name in ("fused", "foreach"))
    assert sum(fused.values()) == pytest.approx(alive_peak(config, *sizes, optimizer="fused"), rel=5e-3)
    assert sum(foreach.values()) == pytest.approx(alive_peak(config, *sizes, optimizer="foreach"), rel=5e-3)
    assert foreach["temporaries"] == 4 * accounting.num_parameters(config)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", accounting.MEMORY_MODES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", IMPLS)
def test_peak_on_a_gpu(attention, dtype, mode):
    """The allocator's own count: blocks are rounded up, and the libraries' workspaces are among them."""
    skip_without(attention)
    config = dataclasses.replace(SIZES["small"], num_layers=4)
    model, (ids, targets) = build(config, IMPLS[attention], device="cuda"), draw(config, 4, 512, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True) if mode == "train_step" else None
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, ids, targets, mode, dtype == "bf16")
    expected = sum(accounting.peak_bytes(config, 4, 512, mode, dtype, attention).values())
    assert 0 <= torch.cuda.max_memory_allocated() - expected < 0.02 * expected + 100 * 2**20


@pytest.mark.parametrize(
    ("count", "arguments", "said"),
    [
        (accounting.model_flops, (1, 8, "backward"), "mode 'backward'; allowed: forward, forward_b"),
        (accounting.peak_bytes, (1, 8, "step"), "mode 'step'; allowed: forward, forward_graph, forward_backward"),
        (accounting.peak_bytes, (1, 8, "train_step", "fp32", "reference", "cuda", "sgd"), "optimizer 'sgd'; allowed: "),
        (accounting.saved_activation_bytes, (1, 8, "fp16"), "dtype 'fp16'; allowed: fp32, bf16"),
        (accounting.saved_layer_bytes, (1, 8, "bf16", "sdpa"), "attention 'sdpa'; allowed: reference, flash"),
        (accounting.saved_layer_bytes, (1, 8, "bf16", "flash", "tpu"), "device 'tpu'; allowed: cuda, cpu"),
        (accounting.forward_matmul_flops, (1, 0), "sequence=0"),
        (accounting.saved_activation_bytes, (0, 8), "batch=0"),
        (accounting.mfu, (1, 8, "forward", 1, 0), "tflops=0"),
    ],
)  # fmt: skip
def test_choices_that_do_not_exist_are_named(count, arguments, said):
    with pytest.raises(ValueError, match=said):
        count(CONFIG, *arguments)
