"""Activation checkpointing: gradients as without it, what is computed again, what lives at the peak."""

from __future__ import annotations

import copy
import functools
import math

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cs336_systems.chapters.checkpointing import strategies  # noqa: E402
from cs336_systems.measure.memory.tensors import watching_tensors  # noqa: E402
from cs336_systems.model import TransformerLM  # noqa: E402
from cs336_systems.training import checkpointing  # noqa: E402
from cs336_systems.training.checkpointing import Operation, Plan  # noqa: E402


class Block(torch.nn.Module):
    """Saves `wide` numbers for each of its input's, and counts its forward passes."""

    def __init__(self, width=8, wide=64):
        super().__init__()
        self.up = torch.nn.Linear(width, width * wide, bias=False, dtype=torch.float64)
        self.down = torch.nn.Linear(width * wide, width, bias=False, dtype=torch.float64)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(self.up(x).sin()) / 10


def gradients(blocks, x, through):
    x = x.clone().requires_grad_()
    blocks = copy.deepcopy(blocks)
    through(blocks, x).square().sum().backward()
    return blocks, [x.grad, *(p.grad for p in blocks.parameters())]


def plain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


STRATEGIES = {
    "size 1": lambda blocks, x: strategies.blockwise(blocks, x),
    "size 3": lambda blocks, x: strategies.blockwise(blocks, x, size=3),
    "size 99": lambda blocks, x: strategies.blockwise(blocks, x, size=99),
    "nested": strategies.nested,
}


@pytest.mark.parametrize("number", [1, 2, 7, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_without_checkpoints(strategy, number):
    blocks = torch.nn.ModuleList(Block(wide=2) for _ in range(number))
    x = torch.randn(5, 8, dtype=torch.float64)
    _, wanted = gradients(blocks, x, plain)
    again, found = gradients(blocks, x, STRATEGIES[strategy])
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    most = 2 if strategy != "nested" else math.ceil(math.log2(number)) + 2
    assert all(2 <= block.calls <= most for block in again)


def peak(number, through):
    """The most bytes that live at a time in a step, in units of what a block saves."""
    blocks = torch.nn.ModuleList(Block() for _ in range(number))
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    for block in blocks:  # gradients of weights are not activations
        block.requires_grad_(False)
    with watching_tensors() as (_, snapshot):
        through(blocks, x).sum().backward()
        found = snapshot()
    weights = sum(p.nbytes for p in blocks.parameters())  # which were there before
    return (found.active().max() - weights) / (x.nbytes * 64)


def test_peaks_follow_their_formulas():
    """A block saves 64 times what its input takes, so a block's activations are the unit and an input 1/64 of it."""
    few, many = (
        {name: peak(n, through) for name, through in ({"plain": plain} | STRATEGIES).items()} for n in (8, 32)
    )
    assert many["plain"] - few["plain"] == pytest.approx(24, rel=0.1)
    assert many["size 1"] - few["size 1"] == pytest.approx(24 / 64, abs=0.1)
    assert many["size 3"] - few["size 3"] == pytest.approx(8 / 64, abs=0.1)
    assert few["size 3"] - few["size 1"] == pytest.approx(2, abs=0.3)
    assert many["nested"] - few["nested"] == pytest.approx(2 / 64, abs=0.04)
    assert many["nested"] < few["size 3"] < few["plain"]


# ------------------------------------------------------------------------------------------ within a block
class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def small():
    return TransformerLM(64, 32, 32, 3, 4, 88, attention="reference").double()


@pytest.mark.parametrize("how", checkpointing.RECOMPUTE)
def test_a_model_trains_as_without(how):
    model, ids = small(), torch.randint(64, (2, 16))
    other = copy.deepcopy(model)
    checkpointing.recompute(other.layers, how)
    assert list(other.state_dict()) == list(model.state_dict())
    for _ in range(2):
        for net in (model, other):
            net.zero_grad()
            net(ids).logsumexp(-1).sum().backward()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    with torch.no_grad():
        assert torch.equal(model(ids), other(ids))
    checkpointing.recompute(other.layers, "none")
    assert all(type(layer) is type(model.layers[0]) for layer in other.layers)


def test_kept_results_are_not_computed_again():
    block, x = small().layers[0], torch.randn(2, 16, 32, dtype=torch.float64, requires_grad=True)
    rest = torch.ones(16, 8).double(), torch.zeros(16, 8).double()
    operations = checkpointing.operations(block, x.detach(), *rest)
    matmuls = frozenset(op.key for op in operations if op.key[0] in ("aten.mm.default", "aten.bmm.default"))
    assert len(matmuls) == 9  # four projections, two of attention, three of the SwiGLU
    counts = {}
    for name, kept in (("all", frozenset()), ("none", matmuls)):
        context = Plan(tuple(operations), kept).contexts
        out = torch.utils.checkpoint.checkpoint(block, x, *rest, use_reentrant=False, context_fn=context)
        with Count() as count:
            out.sum().backward()
        counts[name] = sum(call in ("aten.mm.default", "aten.bmm.default") for call in count.calls)
    # without a plan the last matmul is computed again as well or not: nothing needs its result
    assert counts["none"] == 18 and counts["all"] - counts["none"] in (8, 9)


class Noisy(torch.nn.Module):
    """Draws random numbers twice, by name or in place, and writes to what it has made."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, x, *, scale):
        x = torch.sin(self.up(x) * torch.rand_like(x)) * scale
        x = torch.nn.functional.dropout(x.sin(), 0.5).sin()
        return torch.relu_(self.down(x * torch.rand_like(x)))


def test_whatever_a_plan_keeps_gradients_are_those_without_it():
    block, x = Noisy(), torch.randn(5, 8, dtype=torch.float64)

    def found(call):
        torch.manual_seed(0)
        x.requires_grad_().grad = None
        block.zero_grad()
        call(x, scale=3.0).square().sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]

    wanted = found(block)
    operations = checkpointing.operations(block, x.detach(), scale=3.0)
    again = functools.partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False)
    for op in operations:
        plan = Plan(tuple(operations), frozenset({op.key} if op.num_bytes else ()))
        pairs = zip(wanted, found(functools.partial(again, context_fn=plan.contexts)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), op.key
    assert sum(op.num_bytes > 0 for op in operations) >= 8


@pytest.mark.parametrize("how", checkpointing.RECOMPUTE)
def test_random_numbers_of_the_first_step_are_those_without(how):
    blocks, x, grads = torch.nn.ModuleList(Noisy() for _ in range(3)), torch.randn(5, 8).double(), []
    for asked in ("none", how):
        checkpointing.recompute(blocks, asked)
        blocks.zero_grad()
        torch.manual_seed(0)
        y = x
        for block in blocks:
            y = block(y, scale=3.0)
        y.square().sum().backward()
        grads.append([p.grad.clone() for p in blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("how", checkpointing.RECOMPUTE)
def test_what_autocast_has_cast_before_is_cast_again(how):
    """Two batches in one block of autocast, which casts weights for the first; backward passes are outside."""
    model, batches = small().float(), torch.randint(64, (2, 2, 16))
    other = copy.deepcopy(model)
    checkpointing.recompute(other.layers, how)
    for net in (model, other):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=net is other):
            losses = [net(ids).float().logsumexp(-1).sum() for ids in batches]
        sum(losses).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0.02, atol=0.02 * p.grad.abs().max().item())


def test_what_is_dear_for_its_bytes_is_kept_first():
    made = [Operation(("mm", 1), 100, 50.0), Operation(("mm", 2), 1000, 40.0),
            Operation(("view", 1), 0, 1.0), Operation(("add", 1), 1000, 9.0)]  # fmt: skip
    kept = lambda share: checkpointing.choose(made, share).kept
    assert kept(0) == set() and kept(0.05) == {("mm", 1)} and kept(0.6) == {("mm", 1), ("mm", 2)}
    assert kept(1) == {("mm", 1), ("mm", 2), ("add", 1)}
    told = str(checkpointing.choose(made, 0.6)).splitlines()
    assert (
        len(told) == 1 + 3 + 2 and told[1].endswith("kept") and "90.000" in told[-2] and "10.000" in told[-1]
    )
    with pytest.raises(ValueError, match=r"share=1\.5; it must lie between 0 and 1"):
        checkpointing.choose(made, 1.5)


def test_a_selective_model_holds_more_than_its_inputs_and_less_than_all():
    """Results of operations, by which a plan counts, are more than what autograd saves: it may keep too many."""
    ids, peaks = torch.randint(64, (4, 32)), {}
    for how in checkpointing.RECOMPUTE:
        model = small()
        checkpointing.recompute(model.layers, how)
        model(ids).logsumexp(-1).sum().backward()  # makes the plan, and gradients
        with watching_tensors() as (_, snapshot):
            model(ids).logsumexp(-1).sum().backward()
            peaks[how] = snapshot().active().max()
    assert peaks["blocks"] < peaks["selective"] < 0.8 * peaks["none"]


def test_wrong_words_are_refused():
    with pytest.raises(ValueError, match="unknown recompute 'some'; allowed: none, blocks, selective"):
        checkpointing.recompute([], "some")
    with pytest.raises(ValueError, match="size=0; it must be at least 1"):
        strategies.blockwise([Block()], torch.ones(1, 8), size=0)
