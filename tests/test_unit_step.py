"""The training step: what its phases do to weights and gradients, in every mode, precision and compiled or not."""

import pytest

torch = pytest.importorskip("torch")

from cs336_systems.accounting import MODES  # noqa: E402
from cs336_systems.chapters.shared.step import DTYPES, Workload  # noqa: E402
from cs336_systems.sizes import SIZES, ModelConfig  # noqa: E402

CONFIG = ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=50)


@pytest.fixture
def workload():
    before = torch.get_float32_matmul_precision()
    yield Workload(CONFIG, 2, 16, "cpu")
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_goes_as_far_as_it_says(workload, mode):
    step = workload.step(mode, attention="reference")
    step.prepare()
    weights = {name: p.detach().clone() for name, p in workload.model.named_parameters()}
    assert list(step.phases) == ["forward", "backward", "optimizer"][: MODES.index(mode) + 1]
    step.run()
    grads = [p.grad for p in workload.model.parameters()]
    assert all((g is not None) == (mode == "forward_backward") for g in grads)
    moved = [not torch.equal(p, weights[name]) for name, p in workload.model.named_parameters()]
    assert all(moved) if mode == "train_step" else not any(moved)
    assert bool(workload.optimizer.state) == (mode == "train_step")
    assert step.loss is None


def test_gradients_are_those_of_the_mean_loss_and_are_not_added_up(workload):
    step = workload.step("forward_backward", attention="reference")
    step.prepare()
    logits = workload.model(workload.ids)
    loss = -logits.log_softmax(-1).gather(-1, workload.targets[..., None]).mean()
    expected = torch.autograd.grad(loss, list(workload.model.parameters()))
    for _ in range(2):
        step.run()
    for p, grad in zip(workload.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_is_what_was_asked_for(workload, dtype):
    step = workload.step("forward_backward", dtype, attention="reference")
    seen = {}
    workload.model.layers[0].ffn.w1.register_forward_hook(lambda m, args, out: seen.update(out=out.dtype))
    step.prepare()
    step.forward()
    assert seen["out"] == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert step.loss.dtype == torch.float32
    assert torch.get_float32_matmul_precision() == ("highest" if dtype == "fp32" else "high")
    step.backward()
    assert all(p.grad.dtype == torch.float32 for p in workload.model.parameters())


def test_prepare_chooses_the_attention(workload):
    for name in ("reference", "sdpa", "flash_torch"):
        workload.step("forward", attention=name).prepare()
        assert {layer.attn.impl for layer in workload.model.layers} == {name}


def test_compiled_steps_of_one_workload_keep_apart(workload, monkeypatch):
    """Each has code of its own, so that many of them recompile nothing. By a compiler that only traces: what Inductor
    makes of a block has its test in test_unit_training.py."""
    real = torch.compile
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)  # of one function
    monkeypatch.setattr(torch, "compile", lambda fn, mode=None, **kw: real(fn, backend="aot_eager", **kw))
    torch._dynamo.reset()
    eager = workload.step("forward_backward", attention="reference")
    variants = [
        eager,
        *(workload.step("forward_backward", d, "reference", "default") for d in ("fp32", "bf16")),
    ]
    results = []
    for step in variants:
        step.prepare()
        step.run()
        results.append([p.grad.clone() for p in workload.model.parameters()])
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in reversed(variants):
            step.prepare()
            step.run()
    for plain, same, coarse in zip(*results, strict=True):
        torch.testing.assert_close(same, plain, rtol=1e-3, atol=1e-5)
        assert 0 < (coarse - plain).norm() < 0.1 * plain.norm()


def test_forget_drops_gradients_and_state(workload):
    workload.step("train_step", attention="reference").run()
    workload.step("forward_backward", attention="reference").run()
    workload.forget()
    assert all(p.grad is None for p in workload.model.parameters()) and workload.optimizer.state
    workload.forget(optimizer=True)
    assert not workload.optimizer.state


def test_wrong_choices_are_named(workload):
    with pytest.raises(ValueError, match=r"mode 'back'; allowed: forward, forward_backward, train_step"):
        workload.step("back")
    with pytest.raises(ValueError, match=r"dtype 'fp8'; allowed: fp32, tf32, bf16"):
        workload.step("forward", "fp8")
    with pytest.raises(ValueError, match=r"compile 'on'; allowed: off, default"):
        workload.step("forward", compile="on")
    with pytest.raises(ValueError, match=r"optimizer 'sgd'; allowed: fused, foreach"):
        Workload(CONFIG, 2, 16, "cpu", optimizer="sgd")
    with pytest.raises(ValueError, match=r"unknown attention implementation 'x'"):
        workload.step("forward", attention="x").prepare()
    with pytest.raises(RuntimeError, match="needs the loss"):
        workload.step("forward_backward").backward()


def test_another_class_is_run_but_its_attention_is_its_own():
    work = Workload(SIZES["tiny"], 2, 16, "cpu", model=f"{__name__}:Bigram")
    step = work.step("train_step")
    step.prepare()
    step.run()
    with pytest.raises(ValueError, match="attention=sdpa can be chosen for TransformerLM only"):
        work.step("train_step", attention="sdpa")


class Bigram(torch.nn.Sequential):
    """A model with the constructor of `TransformerLM`: logits of the next token by the last one."""

    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__(torch.nn.Embedding(vocab_size, d_model), torch.nn.Linear(d_model, vocab_size))


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["off", "default", "reduce-overhead"])
@pytest.mark.parametrize("attention", ["reference", "sdpa", "flash_triton"])
def test_on_a_gpu(attention, compile):
    torch._dynamo.reset()
    work = Workload(SIZES["tiny"], 2, 128, "cuda")
    plain = work.step("forward_backward", "fp32", "reference")
    plain.prepare()
    plain.run()
    expected = [p.grad.clone() for p in work.model.parameters()]
    work.forget()
    step = work.step("train_step", "bf16", attention, compile)
    step.prepare()
    for number in range(4):  # CUDA graphs are recorded in the second or third
        before = [p.detach().clone() for p in work.model.parameters()]
        step.forward()
        step.backward()
        grads = [p.grad.clone() for p in work.model.parameters()]
        step.optimizer_step()
        assert all(torch.isfinite(g).all() for g in grads)
        assert not all(torch.equal(p, b) for p, b in zip(work.model.parameters(), before, strict=True))
        if number == 0:
            for g, e in zip(grads, expected, strict=True):
                assert (g - e).norm() < 0.1 * e.norm()
