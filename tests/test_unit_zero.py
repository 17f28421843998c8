"""The sharded optimizer against the plain one, bit by bit, on several processes; its closed forms against both.

Starting processes takes seconds, so all checks for one number of ranks (functions named `one_…`, `two_…`, `four_…`) run
in one run; those named `nccl_…` on two GPUs only. On each rank the plain optimizer trains a copy of the model beside
the sharded one.
"""

import contextlib
import copy
import functools
import inspect
import pickle
import warnings
from pathlib import Path

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from torch import nn
from torch.nn import functional as F

from cs336_systems.accounting import zero as accounting
from cs336_systems.launch.start import launch
from cs336_systems.measure.counters.collectives import Collectives
from cs336_systems.model import build
from cs336_systems.parallel.ddp import BucketedDDP
from cs336_systems.parallel.readers import readers
from cs336_systems.parallel.shares import assign
from cs336_systems.parallel.zero import ShardedOptimizer
from cs336_systems.sizes import size

ADAMW = functools.partial(dict, lr=0.1, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8)


class Toy(nn.Module):
    """Tied weights, a frozen parameter, a frozen bias, and a parameter that the loss never reaches."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(10, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 48)
        self.down = nn.Linear(48, 10, bias=False)
        self.again = nn.Linear(10, 48, bias=False)
        self.again.weight = self.up.weight
        self.head = nn.Linear(48, 5)
        self.head.bias.requires_grad_(False)
        self.frozen = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(7))
        self.to(dtype)

    def forward(self, x):
        x = self.norm(F.relu(self.first(x)))
        return self.head(F.relu(self.again(self.down(F.relu(self.up(x))))))


class Matrices(nn.Sequential):
    """Matrices only, as Muon wants them."""

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(1)
        super().__init__(nn.Linear(10, 24, bias=False), nn.ReLU(), nn.Linear(24, 5, bias=False))
        self.to(dtype)


class Counting(torch.optim.SGD):
    """Keeps a number of its own in its groups, and lets it decide the update."""

    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= factor * group["lr"] / group["taken"] * p.grad


class Odd(torch.optim.SGD):
    """Keeps numbers, nothing, tensors with gaps and empty ones."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gaps = (torch.arange(12.0).reshape(3, 4) + p.grad.sum())[:, 1::2]
                    self.state[p] |= {"gaps": gaps, "count": 3, "nothing": None, "empty": torch.zeros(0, 2)}
                    p -= group["lr"] * p.grad


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, ADAMW(), Toy),
    "AdamW foreach": (torch.optim.AdamW, ADAMW(foreach=True), Toy),
    "AdamW fused": (torch.optim.AdamW, ADAMW(fused=True), Toy),
    "AdamW amsgrad, tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True}, Toy),
    "SGD": (torch.optim.SGD, {"lr": 0.01}, Toy),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}, Toy),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}, Toy),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}, Toy),
    "ASGD": (torch.optim.ASGD, {}, Toy),
    "Muon": (torch.optim.Muon, {"lr": 0.01}, Matrices),
    "Odd": (Odd, {"lr": 0.01}, Toy),
}


class Passing(Counting):
    """Passes over groups without parameters, as fused optimizers of other packages do."""

    def step(self, closure=None, *, factor=1.0):
        groups, self.param_groups = self.param_groups, [g for g in self.param_groups if g["params"]]
        super().step(closure, factor=factor)
        self.param_groups = groups


def _scaled(part, inputs):
    return (inputs[0] * part.weight.norm(),)


class Adapted(nn.Module):
    """Reads what belongs to parts that it never calls; a hook reads its part's weight, as weight_norm's does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.base, self.low, self.high = nn.Linear(30, 30), nn.Linear(30, 2), nn.Linear(2, 30)
        self.last = nn.Linear(30, 5)
        self.last.register_forward_pre_hook(_scaled)
        self.double()

    def forward(self, x):
        weight = self.base.weight + self.high.weight @ self.low.weight
        return self.last(F.relu(F.linear(x.repeat(1, 3), weight)))


class Hidden(torch.optim.SGD):
    """Keeps a setting where its groups do not tell it."""

    def __init__(self, params, factor):
        super().__init__(params, lr=0.1)
        self.factor = factor


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(8, n, generator=generator, device="cpu") for n in (10, 5))
    return x.to(torch.get_default_device(), dtype), y.to(torch.get_default_device(), dtype)


def loss_of(model, step):
    x, y = batch(step, next(model.parameters()).dtype)
    return F.mse_loss(model(x), y)


def backward(model, step):
    loss_of(model, step).backward()


def random_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu").to(p.device)


def train(model, optimizer, steps, backward=backward):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


class Both:
    """The plain optimizer beside the sharded one, each on a copy of a model."""

    def __init__(
        self, cls=torch.optim.AdamW, make=Toy, chosen=nn.Module.parameters, num_rounds=None, **settings
    ):
        settings = settings or (ADAMW() if cls is torch.optim.AdamW else {})
        rounds = {} if num_rounds is None else {"num_rounds": num_rounds}
        self.one = make()
        self.other = copy.deepcopy(self.one)
        self.plain = cls(chosen(self.one), **settings)
        self.sharded = ShardedOptimizer(chosen(self.other), cls, **rounds, **settings)
        self.sides = (self.one, self.plain), (self.other, self.sharded)

    def train(self, steps, backward=backward):
        for model, optimizer in self.sides:
            train(model, optimizer, steps, backward)

    def assert_same(self):
        assert_same(self.one.parameters(), self.other.parameters())
        if dist.is_initialized():
            assert_same_on_all_ranks(self.other.parameters())

    def assert_same_state(self):
        whole = self.sharded.state_dict()
        if not dist.is_initialized() or dist.get_rank() == 0:
            assert_same_state(self.plain.state_dict(), whole)


def bytes_of_ranks(optimizer, parameters, world_size):
    found = [0] * world_size
    for p in parameters:
        found[optimizer.owner(p)] += p.nbytes
    return found


def assert_same(parameters, others):
    for i, (one, other) in enumerate(zip(parameters, others, strict=True)):
        assert torch.equal(one, other), f"parameter {i}"


def assert_same_state(state, other):
    """Of two state dicts: what they say of each parameter, in its order, and of each group."""
    assert state.keys() == other.keys() == {"state", "param_groups"}
    assert list(state["state"]) == list(other["state"])
    for one, theirs in zip(state["state"].values(), other["state"].values(), strict=True):
        assert list(one) == list(theirs)
    torch.testing.assert_close(state["state"], other["state"], rtol=0, atol=0, check_device=False)
    assert state["param_groups"] == other["param_groups"]


def raised(error, *words):
    return pytest.raises(error, match=".*".join(words))


# ---------------------------------------------------------------------------------------------------- on 2 ranks
def two_equal_the_plain_optimizer():
    for name, (cls, kwargs, make) in OPTIMIZERS.items():
        for rounds in (1, 4) if cls is torch.optim.AdamW else (3,):
            both = Both(cls, make, num_rounds=rounds, **kwargs)
            both.train(range(6))
            try:
                both.assert_same()
                both.assert_same_state()
            except AssertionError as error:
                raise AssertionError(f"{name}, {rounds} rounds") from error


def two_behind_a_container():
    """Buckets whose memory is the gradients', averaged during backward: as the plain optimizer behind the same."""
    both = Both()
    containers = BucketedDDP(both.one, 0.002), BucketedDDP(both.other, 0.002)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for step in range(6):
        x, y = batch(step)
        for container, (_, optimizer) in zip(containers, both.sides, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            F.mse_loss(container(x[mine]), y[mine]).backward()
            container.finish_gradient_synchronization()
            optimizer.step()
    both.assert_same()


class Awkward(nn.Module):
    """Parameters that are read by others than the modules they are registered on."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gated = Gated()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 5, bias=False)
        self.double()

    def forward(self, x):
        x = self.embed(x)[:, None]
        x = self.gated(self.attention(x, x, x, need_weights=False)[0])[:, 0]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x * self.gains[0]) * self.gains[1]


def two_overlap_with_the_next_forward():
    """The same results; a step returns with broadcasts on their way, and each part waits for its own."""
    for make in (Toy, Awkward):
        both = Both(make=make, num_rounds=6)
        other, sharded = both.other, both.sharded
        with sharded.overlap_with(other):
            both.train(range(8))
            assert sharded._pending
            with raised(RuntimeError, "overlap_with"), sharded.overlap_with(other):
                pass
            loss_of(other, 8)
            assert not sharded._pending  # all parts have been called
            both.train([8])
        assert not sharded._pending  # the block has ended
        both.assert_same()
        both.train([9])
        assert not sharded._pending
        both.assert_same()
        assert not any(module._forward_pre_hooks for module in other.modules())


def two_parts_wait_for_their_own():
    """In the order of the forward pass; rounds follow the order of parameters."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, num_rounds=4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    left, x = [], torch.ones(1, 16)
    with optimizer.overlap_with(model):
        optimizer.step()
        assert not optimizer._pending  # parts that are not called may be read by others
        model(x)
        optimizer.step()
        for layer in model:
            left.append(len(optimizer._pending))
            x = layer(x)
        assert left == [4, 3, 3, 2, 2, 1, 1, 0]
        optimizer.step()
        model.state_dict()
        assert not optimizer._pending
        optimizer.step()
        optimizer.wait()
        assert not optimizer._pending


def two_overlap_waits_in_step_for_what_no_forward_reads():
    model, beside = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([*model.parameters(), beside], torch.optim.SGD, lr=0.5, num_rounds=1)
    with optimizer.overlap_with(model):
        model.weight.grad, beside.grad = torch.ones(4, 4), torch.ones(4)
        optimizer.step()
        assert not optimizer._pending  # they share a round
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, num_rounds=2)
    later = nn.Parameter(torch.ones(4))
    with optimizer.overlap_with(model):
        optimizer.add_param_group({"params": later})
        model.weight.grad, later.grad = torch.ones(4, 4), torch.ones(4)
        optimizer.step()
        assert torch.equal(later, torch.full((4,), 0.5))
    assert_same_on_all_ranks([*model.parameters(), beside, later])


def groups_of(model):
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [
        {"params": iter(decayed), "weight_decay": 0.3},
        {"params": rest, "lr": 0.02, "weight_decay": 0.0},
    ]


def two_groups_and_schedulers():
    both = Both(chosen=groups_of)
    assert both.sharded.defaults == both.plain.defaults
    settings = {"max_lr": [0.1, 0.03], "total_steps": 12}  # it changes lr and betas
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, **settings) for o in (both.plain, both.sharded)]
    for step in range(10):
        both.train([step])
        for scheduler in schedulers:
            scheduler.step()
        both.assert_same()
        both.assert_same_state()
    for _, optimizer in both.sides:
        optimizer.param_groups[1]["weight_decay"] = 0.5
    both.train([10])
    both.assert_same()


def two_named_parameters():
    both = Both(chosen=nn.Module.named_parameters)
    both.train(range(2))
    whole = both.sharded.state_dict()
    assert whole["param_groups"] == both.plain.state_dict()["param_groups"]
    assert whole["param_groups"][0]["param_names"][0] == "frozen"
    both.sharded.load_state_dict(whole)
    both.train([2])
    both.assert_same()


def two_groups_added_while_training():
    both = Both(chosen=lambda model: [model.up.weight, model.head.weight])
    sharded, other = both.sharded, both.other
    both.train(range(3))
    before = [sharded.owner(p) for p in (other.up.weight, other.head.weight)]
    for model, optimizer in both.sides:
        optimizer.add_param_group({"params": model.down.weight, "lr": 0.01})
        optimizer.add_param_group({"params": [*model.norm.parameters()], "weight_decay": 0.0})
    assert before == [sharded.owner(p) for p in (other.up.weight, other.head.weight)]
    both.train(range(3, 8))
    both.assert_same()
    for wrong in ({"params": [other.norm.weight]}, {"params": torch.zeros(6, 6)[:, :2].requires_grad_()}):
        with pytest.raises(ValueError):
            sharded.add_param_group(wrong)
    assert len(sharded.param_groups) == 3
    both.train([8])
    for model, optimizer in both.sides:  # parameters that were frozen before
        model.head.bias.requires_grad_(True)
        optimizer.add_param_group({"params": model.head.bias})
    both.train([9])
    both.assert_same()


def two_closures():
    both, calls = Both(), []

    def closure(model, optimizer):
        calls.append(model)
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(3):
        expected = both.plain.step(lambda: closure(both.one, both.plain))
        assert torch.equal(both.sharded.step(closure=lambda: closure(both.other, both.sharded)), expected)
        assert both.sharded.step() is None and both.plain.step() is None
    assert calls == [both.one, both.other] * 3
    both.assert_same()


def two_dtypes_and_layouts():
    """Every dtype and order of dimensions travels: complex, bf16, channels last, transposed, scalar, empty."""
    torch.manual_seed(2)
    tensors = [
        torch.randn(3, 4),
        torch.randn(5, 3, dtype=torch.bfloat16).t(),
        torch.randn(4, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last),
        torch.randn(6, dtype=torch.complex64),
        torch.randn((), dtype=torch.float16),
        torch.randn(0, 3),
        torch.randn(4, 4)[1:3],
    ]
    both = Both(make=lambda: nn.ParameterList(t.clone() for t in tensors), lr=0.1)
    assert not both.other[1].is_contiguous() and not both.other[2].is_contiguous()
    both.train(range(4), random_gradients)
    both.assert_same()
    both.assert_same_state()


def two_frozen_parameters_stay_at_home():
    model = Toy()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    frozen = {id(model.frozen), id(model.head.bias)}

    def sent_in_a_step():
        with Collectives() as sent:
            optimizer.step()
        assert sent.kinds == ["broadcast"]
        return sent.calls("broadcast"), {identity for identity, _ in sent.living_storages()}

    train(model, optimizer, [0])
    trainable = {p.untyped_storage()._cdata for p in model.parameters() if id(p) not in frozen}
    assert sent_in_a_step() == (len(trainable), trainable)  # once each, from and into its own memory
    # a gradient from before it was frozen still counts, as it does for the plain optimizer
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    model.norm.weight.requires_grad_(False)
    assert sent_in_a_step() == (len(trainable), trainable)
    model.norm.weight.grad = None
    assert sent_in_a_step()[1] == trainable - {model.norm.weight.untyped_storage()._cdata}
    assert_same_on_all_ranks(model.parameters())
    # trainable and frozen bytes are balanced each for itself
    owners = [optimizer.owner(p) for p in (model.frozen, model.head.bias)]
    assert sorted(owners) == [0, 1]


def two_sparse_gradients_and_scaled_ones():
    def look_up(model, step):
        model(torch.tensor([step, 3, 7])).square().sum().backward()

    torch.manual_seed(4)
    both = Both(torch.optim.SparseAdam, lambda: nn.Embedding(30, 8, sparse=True), lr=0.1)
    both.train(range(3), look_up)
    both.assert_same()

    both = Both()
    for model, optimizer in both.sides:
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=64.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    both.assert_same()


def two_settings_that_an_optimizer_changes():
    both = Both(Counting, chosen=groups_of, num_rounds=3, lr=0.1)
    for step in range(4):
        for model, optimizer in both.sides:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            with torch.no_grad():
                optimizer.step(factor=0.5)
    both.assert_same()
    assert [group["taken"] for group in both.sharded.param_groups] == [4, 4]

    for num_rounds in (1, 4):
        both = Both(Passing, Matrices, num_rounds=num_rounds, lr=0.1)
        for step in range(4):
            for model, optimizer in both.sides:
                random_gradients(model, step)
                with torch.no_grad():
                    optimizer.step()
        both.assert_same()
        assert [group["taken"] for group in both.sharded.param_groups] == [4]

    both = Both(Passing, Matrices, lambda model: [{"params": [p]} for p in model.parameters()], lr=0.1)
    for model, optimizer in both.sides:
        random_gradients(model, 0)
        with torch.no_grad():
            optimizer.step()
    both.assert_same_state()  # also of groups that lie on the other rank as a whole


def two_overlap_with_parts_that_are_read_by_others():
    both = Both(make=Adapted, num_rounds=6)
    with both.sharded.overlap_with(both.other):
        for step in range(6):
            losses = [loss_of(model, step) for model, _ in both.sides]
            assert torch.equal(*losses)
            for loss, (_, optimizer) in zip(losses, both.sides, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    both.assert_same()


def two_whoever_looks_at_state_leaves_nothing_of_it():
    both = Both()
    both.train(range(2))
    for p in both.other.parameters():
        if p.grad is not None:
            both.sharded.state[p].get(
                "exp_avg"
            )  # a defaultdict: of other ranks' parameters it makes an empty one
    both.assert_same_state()
    both.sharded.state = type(both.sharded.state)(dict)  # begins anew
    for model, optimizer in both.sides:
        later = nn.Parameter(torch.ones(3))
        model.register_parameter("later", later)
        optimizer.add_param_group({"params": later})
    assert not both.sharded.state


def two_sparse_state_travels():
    def look_up(model, step):
        model(torch.tensor([step, 3, 7])).square().sum().backward()

    both = Both(torch.optim.SGD, lambda: nn.Embedding(30, 8, sparse=True), lr=0.1, momentum=0.9)
    both.train(range(3), look_up)
    whole = both.sharded.state_dict()["state"]
    if dist.get_rank() == 0:
        kept = both.plain.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(whole[0]["momentum_buffer"].to_dense(), kept.to_dense())


def two_autograd_hears_of_updates():
    """Backward through weights that a step has changed since is refused, also on the rank that only received them."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.1)
    loss = (weight**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with raised(RuntimeError, "modified by an inplace operation"):
        loss.backward()


def two_bytes():
    """What the closed forms say is what the optimizer holds."""
    config = size("tiny")
    for num_rounds in (1, 4):
        model = build(config)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, num_rounds=num_rounds, fused=True)
        assert optimizer.state_bytes == 0
        random_gradients(model, 0)
        optimizer.step()
        shares = accounting.shards(config, 2)
        assert bytes_of_ranks(optimizer, model.parameters(), 2) == [4 * sum(share) for share in shares]
        expected = accounting.zero_memory(config, 2, rank=dist.get_rank())["after_step"]
        assert optimizer.state_bytes == expected["optimizer_state"]
    # as the model's class counts them, so do the closed forms
    assert sorted(p.numel() for p in model.parameters()) == sorted(accounting.tensor_sizes(config))


def two_errors():
    """Raised on all ranks alike, so none waits for another."""
    rank, model = dist.get_rank(), Toy()
    parameters = list(model.parameters())
    zeros = lambda *sizes: {"params": [torch.zeros(n, requires_grad=True) for n in sizes]}
    groups = lambda *cuts: {"params": [{"params": parameters[cut]} for cut in cuts]}
    good = {"params": parameters, "optimizer_cls": torch.optim.AdamW}
    for first, second, words in (
        (zeros(2, 3), zeros(2, 4), [r"parameter 1 is \(\(3,\).* on rank 0 and \(\(4,\).* on rank 1"]),
        (zeros(2, 2), zeros(2), ["parameter 1", "None on rank 1"]),
        (groups(slice(2)), groups(slice(3)), ["number of parameters of group 0 is 2 on rank 0 and 3"]),
        (groups(slice(2)), {"params": []}, ["empty parameter list"]),  # noticed by one rank alone
        ({}, {"optimizer_cls": torch.optim.Adam}, ["optimizer_cls", "AdamW.* on rank 0", "Adam.* on rank 1"]),
        ({}, {"optimizer_cls": torch.optim.LBFGS}, ["optimizer_cls=LBFGS"]),
        ({}, {"lr": torch.tensor(0.01)}, ["lr of group 0 is 0.001 on rank 0 and 0.00999.* on rank 1"]),
        ({"lr": -1}, {}, ["Invalid learning rate: -1"]),
        ({"lr": -1}, {"lr": -1}, ["Invalid learning rate: -1"]),
        ({"num_rounds": 2}, {"num_rounds": 3}, ["num_rounds is 2 on rank 0 and 3"]),
        (
            {"optimizer_cls": Hidden, "factor": 2},
            {"optimizer_cls": Hidden, "factor": 3},
            ["factor is 2 .* 3"],
        ),
    ):
        with raised(ValueError, *words):
            ShardedOptimizer(**good | (first, second)[rank])
    # the same settings, said otherwise
    alike = ({"lr": 1, "betas": [0.9, 0.999]}, {"lr": torch.tensor(1.0)})[rank]
    optimizer = ShardedOptimizer(parameters[:2], torch.optim.AdamW, **alike)
    later = {"params": parameters[2:4], "lr": 0.5 + rank}
    for wrong in (later, {"params": parameters[1 + rank : 2 + rank]}):
        with raised(ValueError, "(lr of group 0 is 0.5 on rank 0|more than one parameter group)"):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(later | {"lr": 0.5})
    # also on a rank that owns nothing
    with raised(ValueError, "Muon only supports 2D"):
        ShardedOptimizer(parameters, torch.optim.Muon)
    with raised(TypeError, "no_such_setting"):
        ShardedOptimizer(**good, no_such_setting=1)


# ---------------------------------------------------------------------------------------------------- on 4 ranks
def four_with_few_parameters():
    """More ranks than parameters; and shares that are balanced in bytes, not in elements."""
    for dtypes, expected in (
        (2 * [torch.float32], [12, 12, 0, 0]),
        ([torch.float64, *5 * [torch.float32]], [24, 24, 24, 12]),
    ):
        make = lambda dtypes=dtypes: nn.ParameterList(torch.arange(3, dtype=dtype) for dtype in dtypes)
        both = Both(make=make, lr=0.1)
        both.train(range(3), random_gradients)
        both.assert_same()
        assert bytes_of_ranks(both.sharded, both.other.parameters(), 4) == expected
        both.assert_same_state()


def four_save_load_reshard(folder):
    """Train on 4 ranks, go on with 2, then with 1, then plain, then on 4: the same as plain all the time."""
    rank, both = dist.get_rank(), Both(chosen=groups_of)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    with raised(ValueError, "process_group=", "None, or a process group that this rank is in"):
        ShardedOptimizer(Toy().parameters(), torch.optim.AdamW, halves[1 - rank // 2])
    both.train(range(3))
    optimizer, world_size = both.sharded, 4
    for step, group in enumerate((halves[rank // 2], alone[rank], "plain", None), 3):
        saved, file = optimizer.state_dict(), folder / f"{step}-{rank // world_size}.pt"
        if rank % world_size == 0:
            torch.save(saved, file)
        dist.barrier()
        loaded = torch.load(file, weights_only=True)
        assert_same_state(both.plain.state_dict(), loaded)
        parameters = groups_of(both.other)
        # other settings than the saved ones, which the loaded ones replace
        if group == "plain":
            optimizer, world_size = torch.optim.AdamW(parameters, lr=5.0), 1
        else:
            optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, group, lr=5.0, num_rounds=2)
            world_size = dist.get_world_size(group)
        optimizer.load_state_dict(loaded)
        both.sides = both.sides[0], (both.other, optimizer)
        both.train([step])
        both.assert_same()
    assert optimizer.state_bytes < sum(v.nbytes for s in both.plain.state.values() for v in s.values()) / 2
    # each rank's own dict is good for itself, and for no other
    own = optimizer.state_dict()
    optimizer.load_state_dict(own)
    both.train([7])
    both.assert_same()
    theirs = [None] * 4
    dist.all_gather_object(theirs, own)
    with raised(ValueError, "shard=", "without parameters", "rank 0"):
        optimizer.load_state_dict(theirs[3 if rank != 3 else 2])
    optimizer.load_state_dict(theirs[0])


# -------------------------------------------------------------------------------------------------- on one, on GPUs
def one_rank_communicates_nothing(monkeypatch):
    """In a process group of one: the plain optimizer, step by step and in what it saves."""
    both = Both(chosen=groups_of)
    assert (both.sharded.world_size, both.sharded.rank) == (1, 0)
    with monkeypatch.context() as patch:
        for name in ("broadcast", "all_gather_object", "gather_object", "batch_isend_irecv"):
            patch.setattr(dist, name, lambda *a, **k: pytest.fail("communicated"))
        for step in range(4):
            both.train([step])
            both.sharded.load_state_dict(copy.deepcopy(both.sharded.state_dict()))
    both.assert_same()
    both.assert_same_state()


def nccl_few_launches_and_no_copy(monkeypatch):
    """A round's broadcasts are one group call; a step needs no memory beside what there is."""
    sizes = [(512, 1024)] * 30 + [(1024,)] * 10
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    for p in parameters:
        dist.broadcast(p.detach(), 0)
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1, num_rounds=3, fused=True)
    plain_ones = [nn.Parameter(p.detach().clone()) for p in parameters]
    plain = torch.optim.AdamW(plain_ones, lr=0.1, fused=True)
    calls = []
    together = dist._coalescing_manager
    monkeypatch.setattr(dist, "_coalescing_manager", lambda *a, **k: calls.append(1) or together(*a, **k))
    for step in range(4):
        for p, q in zip(parameters, plain_ones, strict=True):
            p.grad = torch.full_like(p, step + 1.0)
            q.grad = p.grad.clone()
        plain.step()
        if step:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        if step:
            assert torch.cuda.max_memory_allocated() - before < 2**20  # all parameters: 60 MiB
        assert len(calls) == 3 * (step + 1)
    assert_same(plain_ones, parameters)
    assert_same_on_all_ranks(parameters)


def nccl_the_next_kernel_waits(monkeypatch):
    """What is enqueued after a step sees all updates, with no synchronization by the host."""
    parameters = [nn.Parameter(torch.zeros(2**22)) for _ in range(8)]
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0)
    for step in range(5):
        for p in parameters:
            p.grad = torch.full_like(p, -1.0)
        optimizer.step()
        sums = torch.stack([p.detach().sum() for p in parameters])
        assert (sums == (step + 1) * 2**22).all()


def nccl_forward_passes_wait(monkeypatch):
    """Overlapped with the next forward pass, which is enqueued at once: the same losses, bit by bit."""
    torch.manual_seed(0)
    one = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
    for p in one.parameters():
        dist.broadcast(p.detach(), 0)
    other, x = copy.deepcopy(one), torch.ones(64, 2048)
    losses = []
    for model, cls in ((one, torch.optim.AdamW), (other, ShardedOptimizer)):
        more = (torch.optim.AdamW,) if cls is ShardedOptimizer else ()
        optimizer = cls(model.parameters(), *more, lr=1e-3, fused=True)
        with optimizer.overlap_with(model) if more else contextlib.nullcontext():
            for _ in range(6):
                optimizer.zero_grad()
                losses.append(model(x).square().mean())
                losses[-1].backward()
                optimizer.step()
    assert torch.equal(torch.stack(losses[:6]), torch.stack(losses[6:]))
    assert_same(one.parameters(), other.parameters())
    assert_same_on_all_ranks(other.parameters())


# ------------------------------------------------------------------------------------------------------- running
def checks(word):
    return [name for name in globals() if name.startswith(f"{word}_")]


def run_checks(names, folder):
    given = {"folder": Path(folder)}
    for name in names:
        with pytest.MonkeyPatch.context() as given["monkeypatch"]:
            check = globals()[name]
            check(**{argument: given[argument] for argument in inspect.signature(check).parameters})
    return names


def run_checks_without_warnings(names, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run_checks(names, folder)


def run_checks_where_rank_is(rank, names, folder):
    with torch.device(rank.device):
        return run_checks(names, folder)


@pytest.mark.parametrize("word, num_ranks", [("one", 1), ("two", 2), ("four", 4)])
def test_on_several_ranks(word, num_ranks, tmp_path):
    names = checks(word)
    assert names
    done = distributed.run(run_checks_without_warnings, num_ranks, names, tmp_path)
    assert done == num_ranks * [names]


@pytest.mark.gpu
@pytest.mark.parametrize("word, num_ranks", [("one", 1), ("two", 2), ("nccl", 2), ("four", 4)])
def test_on_several_gpus(word, num_ranks, tmp_path):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, {torch.cuda.device_count()} are here")
    arguments = {"names": checks(word), "folder": str(tmp_path)}
    done = launch(f"{__name__}:run_checks_where_rank_is", num_ranks, arguments, backend="nccl", timeout_s=300)
    assert done == num_ranks * [checks(word)]


# -------------------------------------------------------------------------------------------------------- alone
def test_alone_it_is_the_plain_optimizer():
    assert not dist.is_initialized()
    for cls, kwargs, make in OPTIMIZERS.values():
        both = Both(cls, make, **kwargs)
        both.train(range(3))
        both.assert_same()
        both.assert_same_state()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"optimizer_cls": None}, ["optimizer_cls=None", "subclasses of torch.optim.Optimizer"]),
        ({"optimizer_cls": nn.Linear}, ["optimizer_cls=", "Linear", "subclasses"]),
        ({"optimizer_cls": torch.optim.LBFGS}, ["optimizer_cls=LBFGS", "each parameter by itself"]),
        ({"optimizer_cls": ShardedOptimizer}, ["optimizer_cls=ShardedOptimizer", "each parameter by itself"]),
        ({"num_rounds": 0}, ["num_rounds=0", "positive integer"]),
        ({"num_rounds": 2.0}, ["num_rounds=2.0", "positive integer"]),
        ({"process_group": "world"}, ["process_group='world'", "None"]),
        ({"params": []}, ["empty parameter list"]),
        ({"params": [torch.zeros(4, 4)[:, :2].requires_grad_()]}, [r"\(4, 2\)", r"\(4, 1\)", "without gaps"]),
    ],
)
def test_wrong_arguments(arguments, words):
    good = {"params": Matrices().parameters(), "optimizer_cls": torch.optim.AdamW}
    with raised(ValueError, *words):
        ShardedOptimizer(**good | arguments)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: None,
        lambda saved: {"state": saved["state"]},
        lambda saved: saved | {"state": None},
        lambda saved: saved | {"param_groups": {}},
        lambda saved: saved | {"param_groups": [{"lr": 0.1}]},
        lambda saved: saved | {"param_groups": 2 * saved["param_groups"]},
        lambda saved: saved | {"param_groups": [{"params": [0]}]},  # of another size
        lambda saved: saved | {"param_groups": [{"params": [0, 1]}]},  # without settings
    ],
)
def test_malformed_states_are_refused_and_change_nothing(change):
    model = Matrices()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    train(model, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"state_dict|state dict|parameter group"):
        optimizer.load_state_dict(change(copy.deepcopy(before)))
    assert_same_state(before, optimizer.state_dict())
    train(model, optimizer, [1])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(duplicate):
    with raised(TypeError, "neither copied nor pickled", "state_dict"):
        duplicate(ShardedOptimizer(Matrices().parameters(), torch.optim.AdamW))


def test_parameters_are_not_slipped_into_groups():
    model = Matrices()
    optimizer = ShardedOptimizer([{"params": [p]} for p in model.parameters()], torch.optim.SGD, lr=0.1)
    random_gradients(model, 0)
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(2)))
    before = [p.detach().clone() for p in model.parameters()]
    with raised(ValueError, r"\[1, 2\]", "add_param_group"):
        optimizer.step()
    optimizer.param_groups[1]["params"][:] = [nn.Parameter(torch.ones(2))]  # as many, but another
    with raised(ValueError, r"\[1, 1\]", "not those given"):
        optimizer.step()
    assert_same(before, model.parameters())


def test_adapter():
    from adapters import get_sharded_optimizer

    optimizer = get_sharded_optimizer(Matrices().parameters(), torch.optim.AdamW, lr=0.5, weight_decay=0.1)
    assert isinstance(optimizer, ShardedOptimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.1)


def test_who_reads_what():
    model = Awkward()
    found = {part: parameters for part, parameters in readers(model)}
    leaves = [model.embed[0], model.embed[2], *model.blocks, model.head]
    # these read what is beneath them; the others read their own
    assert list(found) == [*leaves[:2], model.attention, model.gated, *leaves[2:]]
    for part, parameters in found.items():
        assert_same(parameters, part.parameters())
    assert {id(p) for ps in found.values() for p in ps} == {id(p) for p in model.parameters()}
    assert isinstance(next(part for part, _ in readers(Toy())), Toy)  # it has parameters of its own
    assert not list(readers(nn.ParameterList([torch.ones(2)])))  # nobody calls it
    assert not list(readers(nn.ReLU()))


# ------------------------------------------------------------------------------------------------ whose is what
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("rounds", [1, 4])
def test_assignment_is_balanced(num_ranks, rounds):
    sizes = [*torch.randint(0, 1000, (60,)).tolist(), 5000]
    later = torch.randint(0, 3000, (17,)).tolist()
    loads, expected = ([[0] * rounds for _ in range(num_ranks)] for _ in range(2))
    homes = assign(sizes, loads)
    # Graham's bound, against what no assignment can beat
    least = max(sum(sizes) / num_ranks, max(sizes))
    assert max(map(sum, loads)) <= 4 / 3 * least + max(sorted(sizes)[:-1])
    homes += assign(later, loads)
    for number, (rank, round_) in zip(sizes + later, homes, strict=True):
        expected[rank][round_] += number
    assert loads == expected
    by_rank = [sum(of_rank) for of_rank in loads]
    assert max(by_rank) - min(by_rank) <= max(sizes + later)
    assert all(max(of_rank) - min(of_rank) < 2 * max(sizes + later) for of_rank in loads)


def test_assignment_by_hand():
    loads = [[0, 0], [0, 0]]
    # 9 → rank 0; 7 → rank 1; 5 → rank 1 (12); 5 → rank 0 (14); 1 → rank 1 (13); each cut in two, in the order given
    assert assign([1, 9, 5, 7, 5], loads) == [(1, 0), (0, 0), (1, 0), (1, 1), (0, 1)]
    assert loads == [[9, 5], [6, 7]]
    # later: 4 → rank 1 (17), to the round with 6; 2 → rank 0 (16), to the round with 5; an empty one to the least
    assert assign([2, 4, 0], loads) == [(0, 1), (1, 0), (0, 1)]
    assert loads == [[9, 7], [10, 7]]
    assert assign([0, 0], [[0, 0]]) == [(0, 0), (0, 0)]
    assert assign([5, 0], [[0, 0, 0]]) == [(0, 1), (0, 2)]


# ------------------------------------------------------------------------------------------------ closed forms


def test_memory_of_xl_on_two_ranks():
    config = size("xl")
    weights = 4 * (48 * (4 * 1600**2 + 3 * 1600 * 6400 + 2 * 1600) + 1600 + 2 * 10_000 * 1600)
    tensors = 48 * 9 + 3
    both = {"parameters": weights, "gradients": weights}
    expected = {
        "initialized": {"parameters": weights, "gradients": 0, "optimizer_state": 0},
        "before_step": both | {"optimizer_state": 0},
        "after_step": both | {"optimizer_state": 2 * weights + 4 * tensors},
    }
    assert accounting.zero_memory(config, 1) == expected
    # all matrices come in even numbers; one of the 97 gains is left over
    fuller, other = (weights + 4 * 1600) + 4 * 218, (weights - 4 * 1600) + 4 * 217
    expected["after_step"]["optimizer_state"] = fuller
    assert accounting.zero_memory(config, 2) == expected
    later = accounting.zero_memory(config, 2, rank=1, first_step=False)
    assert later["before_step"] == later["after_step"] == both | {"optimizer_state": other}
    assert accounting.shard_imbalance(config, 2) == pytest.approx(4 * 1600 / weights)


def test_times_of_an_optimizer_step():
    whole = {"num_parameters": 10**9, "tb_per_s": 2.8, "link_gb_per_s": 400.0}
    # 28 bytes at 2.8 TB/s; half of it; half of 4 bytes at 400 GB/s
    expected = {"plain": 10.0, "update": 5.0, "broadcast": 5.0, "sharded": 10.0}
    assert accounting.zero_optimizer_ms(num_ranks=2, **whole) == pytest.approx(expected)
    four = accounting.zero_optimizer_ms(num_ranks=2, rounds=4, **whole)
    assert four["sharded"] == pytest.approx(5.0 + 5.0 / 4)  # of equal parts all is hidden but one round
    sixteen = accounting.zero_optimizer_ms(num_ranks=16, **whole)
    assert sixteen["sharded"] == pytest.approx(sixteen["plain"])  # w = β / 7, whatever the number of ranks
    many = accounting.zero_optimizer_ms(num_ranks=16, rounds=1000, **whole)
    assert many["sharded"] == pytest.approx(max(many["update"], many["broadcast"]), rel=2e-3)
    alone = accounting.zero_optimizer_ms(num_ranks=1, **whole)
    assert alone["sharded"] == alone["plain"] == alone["update"] and alone["broadcast"] == 0


def test_communication_of_a_step():
    megabytes = {"parameter_bytes": 1200.0, "gradient_bytes": 1200.0}
    at_four = {scheme: accounting.zero_step_bytes(scheme, 4, **megabytes) for scheme in accounting.SCHEMES}
    assert at_four == {
        "ddp": {"gradients": 1800.0, "parameters": 0.0},
        "sharded": {"gradients": 1800.0, "parameters": 900.0},
        "zero1": {"gradients": 900.0, "parameters": 900.0},
    }
    for scheme in accounting.SCHEMES:
        assert sum(accounting.zero_step_bytes(scheme, 1, **megabytes).values()) == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: accounting.zero_step_bytes("fsdp", 2, 1, 1), ["scheme 'fsdp'", "ddp, sharded, zero1"]),
        (lambda: accounting.zero_step_bytes("ddp", 0, 1, 1), ["num_ranks=0", "positive"]),
        (lambda: accounting.zero_memory(size("tiny"), 2, rank=2), ["rank=2", "0 ... 1"]),
        (lambda: accounting.zero_memory(size("tiny"), 0), ["num_ranks=0", "positive"]),
        (lambda: accounting.zero_optimizer_ms(10, 2, 1.0, 0.0), ["link_gb_per_s=0.0", "positive"]),
    ],
)
def test_wrong_arguments_of_closed_forms(call, words):
    with raised(ValueError, *words):
        call()
