"""The ladder: every step computes attention, its kernels compile for Hopper, its prediction follows from its traits."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from attention_checks import FLOOR, compiler, fresh, more_spills, relative, run

from cs336_systems import accounting
from cs336_systems.attention.triton.tiles import SHARED_MEMORY_KIB, Tiles
from cs336_systems.ladder import steps

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

OWN = [step for step in steps.STEPS.values() if step.own]
FORWARD = [step for step in OWN if step.part == "forward"]
BACKWARD = [step for step in OWN if step.part == "backward"]
# kernels for Hopper, those in use and those before them, in configurations that the step says
HOPPER = [
    s for s in steps.STEPS.values() if s.launcher.startswith((steps.HOPPER, steps.EARLIER)) and s.config
]
EARLIER = [step for step in HOPPER if step.launcher.startswith(steps.EARLIER)]
DTYPES = [torch.float16, torch.float32]


def shrunk(step):
    """With tiles for the interpreter, in the same order of sizes, so that a short sequence has several."""

    def small(tiles):
        return tiles and Tiles(tiles.block_m // 4, tiles.block_n // 4, 4, tiles.num_stages)

    tiles, key_tiles = small(step.config.tiles), small(step.config.key_tiles)
    return dataclasses.replace(
        step, config=dataclasses.replace(step.config, tiles=tiles, key_tiles=key_tiles)
    )


def inputs(n, d, dtype, device):
    heads = (2, 3) if device == "cuda" else (1, 2)
    return [torch.randn(*heads, n, d, device=device).to(dtype) for _ in range(4)]


def check(step, n, d, dtype, device):
    """The step's output or gradients against fp64, held to twice the error of plain PyTorch in the same dtype."""
    from cs336_systems.attention.reference import exact_attention
    from cs336_systems.ladder.launch import launcher

    q, k, v, do = inputs(n, d, dtype, device)
    exact = exact_attention(q, k, v, do, True)
    plain = run("reference", *(x.clone().requires_grad_() for x in (q, k, v)), do, True)
    scores = (q.double() @ k.double().mT) * d**-0.5
    expected = scores.masked_fill(torch.ones(n, n, device=device).triu(1).bool(), float("-inf")).logsumexp(-1)
    if step.part == "forward":
        o, logsumexp = launcher(step)(q, k, v, True)
        found, names, part = [o], ["O"], slice(1)
        near = {"atol": 2e-3 if dtype != torch.float32 else 2e-4, "rtol": 1e-3}
        torch.testing.assert_close(logsumexp.double(), expected, **near)
    else:
        found = launcher(step)(q, k, v, plain[0].detach(), expected.float(), do, True)
        names, part = ["dQ", "dK", "dV"], slice(1, None)
    size = max(x.norm().item() for x in exact[part])
    for name, x, y, z in zip(names, found, plain[part], exact[part], strict=True):
        assert x.dtype == dtype and x.shape == z.shape
        error, allowed = relative(x, z, size), 2 * relative(y, z, size) + FLOOR[dtype]
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


# ------------------------------------------------------------------------------------------------ correctness
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in triton's interpreter")


@on_cpu
@pytest.mark.parametrize("place", range(len(OWN)), ids=[step.name for step in OWN])
def test_every_step_computes_attention(place):
    check(shrunk(OWN[place]), 64, 16, DTYPES[place % 2], "cpu")


@on_cpu
@pytest.mark.parametrize("name", ["f_persistent", "b_fuse_d", "b_one_pass"])
def test_wide_heads_and_tiles_of_different_shapes(name):
    step = steps.STEPS[name]
    config = dataclasses.replace(
        step.config, tiles=Tiles(32, 16, 4, 1), key_tiles=step.config.key_tiles and Tiles(16, 64, 4, 1)
    )
    check(dataclasses.replace(step, config=config), 128, 32, torch.float16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", list(steps.STEPS.values()), ids=lambda step: step.name)
def test_every_step_on_a_gpu(step, dtype, d):
    from cs336_systems.ladder.launch import missing

    if reason := missing(step):
        pytest.skip(f"needs {reason}")
    if step.config is not None and d == 128:
        pytest.skip("the step's configuration is one for d = 64")
    check(step, 1024, d, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("step", EARLIER, ids=lambda step: step.name)
def test_earlier_kernels_take_any_lengths_and_strides(step, is_causal):
    """The error against fp64 is at most two and a half times that of the portable kernels."""
    from cs336_systems.attention.reference import exact_attention
    from cs336_systems.ladder.launch import launcher, missing

    if reason := missing(step):
        pytest.skip(f"needs {reason}")
    gpu = functools.partial(fresh, dtype=torch.float16, device="cuda", requires_grad=False)
    for num_queries, num_keys, d in ((333, 517, 64), (517, 333, 64), (1, 70, 64), (100, 300, 40)):
        # k and v as they lie in a projection of all three
        _, k, v = gpu(2, num_keys, 3, 2, d).transpose(1, 3).unbind(2)
        q, do = (gpu(2, 2, num_queries, d) for _ in range(2))
        o, logsumexp = launcher(steps.STEPS["f_production"])(q, k, v, is_causal)
        poison = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        del poison  # the allocator hands these blocks out again: what a kernel leaves unwritten is NaN
        found, portable = (
            launcher(each)(q, k, v, o, logsumexp, do, is_causal)
            for each in (step, steps.STEPS["b_production"])
        )
        for x, y, exact in zip(found, portable, exact_attention(q, k, v, do, is_causal)[1:], strict=True):
            assert x.stride() == y.stride() and torch.isfinite(x).all()
            assert relative(x, exact, 1) <= 2.5 * relative(y, exact, 1) + 1e-4
            assert relative(y, exact, 1) < 0.02


@pytest.mark.gpu
def test_resources_of_what_has_run():
    from cs336_systems.ladder.launch import launcher
    from cs336_systems.ladder.resources import of_call

    q, k, v, do = inputs(1024, 64, torch.bfloat16, "cuda")
    o, logsumexp = launcher(steps.STEPS["f_tiles"])(q, k, v, True)
    for name, kernels in (("f_tiles", 1), ("f_production", 1), ("b_one_pass", 3), ("b_production", 2)):
        call = launcher(steps.STEPS[name])
        tensors = (q, k, v) if name.startswith("f_") else (q, k, v, o, logsumexp, do)
        found = of_call(lambda call=call, tensors=tensors: call(*tensors, True))
        assert len(found) == kernels
        assert all(0 < r.registers <= 255 and r.spill_bytes == 0 for r in found)
        assert max(r.shared_bytes for r in found) > 0


def test_what_a_step_does_not_take_is_named():
    from cs336_systems.ladder.launch import launch_backward, launch_forward

    x = torch.zeros(1, 1, 128, 16)
    config = steps.Switches(Tiles(64, 64, 4, 1))
    for given, is_causal, said in (
        (x, False, "is_causal=False"),
        (torch.zeros(1, 1, 100, 16), True, "length 100; it must be a multiple of 64"),
        (torch.zeros(1, 1, 128, 80), True, "head dimension 80; allowed: powers of two"),
        (torch.zeros(1, 128, 2, 16).transpose(1, 2), True, "expected contiguous tensors"),
    ):
        with pytest.raises(ValueError, match=said):
            launch_forward(given, given, given, is_causal, config)
    for other in (x.mT.contiguous().mT, x[:, :, :64], x.expand(1, 2, 128, 16)):  # keys or values alone
        for k, v in ((other, x), (x, other)):
            with pytest.raises(ValueError, match=r"expected contiguous tensors .* \(1, 1, 128, 16\)"):
                launch_forward(x, k, v, True, config)
    with pytest.raises(ValueError, match="key_tiles=None"):
        launch_backward(x, x, x, x, x[..., 0], x, True, config)


def test_what_earlier_kernels_do_not_take_is_named():
    from cs336_systems.ladder.hopper_launch import Backward, launch_backward

    for wrong, said in (
        ((64, 2), "block_m=64 with dq_group=False; allowed: 128"),
        ((128, 2, True), "block_m=128 with dq_group=True; allowed: 64"),
        ((128, 2, False, True), "ahead is allowed with dq_group=True only"),
        ((64, 1, True, True), "ahead=True with stages=1; allowed: 2 and more"),
    ):
        with pytest.raises(ValueError, match=said):
            Backward(*wrong)
    x, wide = (torch.zeros(1, 1, 128, d, dtype=torch.bfloat16) for d in (64, 128))
    for given, do, said in (
        (wide, wide, "head dimension 128; allowed: up to 64"),
        (x.float(), x, "torch.float32: they compute in 16 bits"),
        (x.mT.contiguous().mT, x, "q: TMA cannot read strides"),
        (x, x[:, :, :1].expand(x.shape), "do: TMA cannot read strides .*; expected a contiguous tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            launch_backward(given, given, given, given, x[..., 0].float(), do, True, Backward(128, 2))


@on_cpu
def test_a_step_that_cannot_run_says_why():
    from cs336_systems.ladder.launch import launcher, missing

    for name in ("f_hopper_2", "b_hopper_2"):
        assert missing(steps.STEPS[name]) == "an NVIDIA GPU"
        with pytest.raises(RuntimeError, match=f"'{name}' needs an NVIDIA GPU"):
            launcher(steps.STEPS[name])


@on_cpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_steps_are_a_differentiable_attention(compiled):
    from cs336_systems.attention.reference import exact_attention
    from cs336_systems.ladder.function import LadderAttention

    q, k, v = (torch.randn(2, 128, 32, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return LadderAttention.apply(q, k, v, True, "f_heavy_first", "b_heavy_first")

    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    o = attend(q, k, v)
    found = [o, *torch.autograd.grad(o.sum(), (q, k, v))]
    for x, y in zip(found, exact_attention(q, k, v, torch.ones_like(q), True), strict=True):
        assert relative(x, y, y.norm().item()) < 1e-5


# ------------------------------------------------------------------------------------------------ compiled ahead of
def _compile(name, dtype):
    from cs336_systems.ladder.resources import compile_step

    return compile_step(steps.STEPS[name], dtype)


@pytest.mark.versions
@pytest.mark.table
@pytest.mark.parametrize("step", OWN, ids=lambda step: step.name)
def test_every_step_compiles_for_hopper_without_spilling(step):
    found = compiler().submit(_compile, step.name, "bf16").result()
    assert found
    for kernel in found:
        assert kernel.spill_bytes == 0 or step.may_spill, f"spills {kernel.spill_bytes} bytes"
        assert kernel.registers <= 255 and kernel.registers * kernel.num_threads <= 65536
        assert kernel.shared_bytes <= SHARED_MEMORY_KIB[90] * 1024
        assert "wgmma.mma_async" in kernel.ptx
        assert ("cp.async.bulk.tensor" in kernel.ptx) == step.config.tma
    owners = [step.traits.resident, step.traits.key_resident or step.traits.resident][-len(found) :]
    for kernel, resident in zip(found, owners, strict=True):  # what predictions go by
        fits = min(
            65536 // (kernel.registers * kernel.num_threads),
            SHARED_MEMORY_KIB[90] * 1024 // (kernel.shared_bytes + 1024),
        )
        # a few registers more or less from one version of the compiler to the next may change it by one
        assert abs(fits - resident) <= 1, f"{fits} fit a multiprocessor, the step says {resident}"


@pytest.mark.versions
@pytest.mark.table
@pytest.mark.parametrize("step", HOPPER, ids=lambda step: step.name)
def test_steps_for_hopper_are_not_serialized(step):
    [compiled] = compiler().submit(_compile, step.name, "bf16").result()
    assert not compiled.serialized and not compiled.faults and compiled.register_operands
    assert compiled.spill_bytes <= 128 + more_spills()


@pytest.mark.versions
def test_what_has_run_is_found_by_its_function():
    """The hook that triton calls at each launch, called by hand: the compiled kernel is found by its handle."""
    from types import SimpleNamespace

    import triton
    from triton.compiler import CompiledKernel
    from triton.compiler.compiler import LazyDict

    from cs336_systems.ladder.resources import of_call

    kernels = []
    for handle, registers in ((-11, 128), (-12, 168)):
        kernel = CompiledKernel.__new__(CompiledKernel)
        source = SimpleNamespace(fn=SimpleNamespace(__module__="package.kernels"))
        metadata = SimpleNamespace(shared=2048, num_warps=4)
        vars(kernel).update(
            name=f"kernel_{registers}", function=handle, n_regs=registers, n_spills=2, metadata=metadata, src=source,
            module=None,  # nothing to unload
        )  # fmt: skip
        kernels.append(kernel)
    hook = triton.knobs.runtime.launch_enter_hook

    def call():
        for handle in (-12, -11, -12, -13):  # one twice, one that nobody knows
            hook(LazyDict({"name": "", "function": handle, "stream": 0}))

    found = of_call(call)
    assert [(r.kernel, r.registers, r.spill_bytes) for r in found] == [
        ("kernels.kernel_168", 168, 8),
        ("kernels.kernel_128", 128, 8),
    ]
    assert found[0].shared_bytes == 2048 and found[0].num_threads == 128
    assert hook.calls == []


# ------------------------------------------------------------------------------------------------ data and predictions
def test_steps_are_named_once_and_hang_together():
    from cs336_systems.ladder.resources import compile_step

    for name in ("f_production", "f_hopper"):
        with pytest.raises(ValueError, match=f"'{name}' configures no kernel"):
            compile_step(steps.STEPS[name])
    for part in steps.PARTS:
        names = [step.name for step in steps.of_part(part)]
        for place, step in enumerate(steps.of_part(part)):
            assert step.part == part and step.title and step.why.endswith(".")
            assert (step.base in names[:place]) if place else step.base == ""
    with pytest.raises(ValueError, match="'sideways'; allowed: forward, backward"):
        steps.of_part("sideways")


@pytest.mark.parametrize("part", steps.PARTS)
def test_each_own_step_changes_one_switch(part):
    for step in (s for s in steps.of_part(part)[1:] if s.own):
        old, new = vars(steps.STEPS[step.base].config), vars(step.config)
        changed = {name for name in new if new[name] != old[name]}
        assert len(changed) == 1 or changed <= {"tiles", "key_tiles", "one_pass", "fuse_d"}, (
            step.name,
            changed,
        )


def test_predictions_follow_the_work():
    ms = {name: steps.predicted_ms(step) for name, step in steps.STEPS.items()}
    # half of the pairs, a less even end
    assert ms["f_skip"] / ms["f_all_tiles"] == pytest.approx(0.5, abs=0.1)
    assert ms["b_skip"] / ms["b_all_tiles"] == pytest.approx(0.5, abs=0.1)
    for part in steps.PARTS:
        floor = accounting.attention_flops(16, 16384, 16384, 64, True, part) / 989.4e9
        for step in steps.of_part(part):
            assert ms[step.name] > floor
    assert ms["b_one_pass"] < ms["b_fuse_d"]  # five products against seven
    assert ms["f_hopper"] < ms["f_production"]
    half = steps.predicted_ms(steps.STEPS["f_tiles"], sms=66)
    assert half == pytest.approx(2 * ms["f_tiles"], rel=0.02)
