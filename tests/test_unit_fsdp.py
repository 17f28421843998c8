"""Fully sharded training: the weights of a single process, few gathered at a time, in one order on all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import os
import random
import signal
import weakref
from datetime import timedelta

import adapters
import distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import (
    PARTS,
    WAYS,
    after_failures,
    assert_like,
    backward,
    full_gradients,
    in_parts,
    loss_of,
    once_more,
    train_beside,
    train_in_each,
    with_each,
)  # fmt: skip
from distributed import about, fail, new_seed, share
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from waiting import wait_until

from cs336_systems.launch.start import LaunchError, launch
from cs336_systems.model import build as build_lm
from cs336_systems.parallel import schedule, shards
from cs336_systems.parallel.ddp import NaiveDDP
from cs336_systems.parallel.fsdp import FullyShardedDataParallel, ShardedGradScaler
from cs336_systems.parallel.sharded_state import ShardedState
from cs336_systems.parallel.zero import ShardedOptimizer
from cs336_systems.sizes import ModelConfig
from cs336_systems.training import checkpointing


# ---------------------------------------------------------------------------------------------------- models
class Norm(nn.Module):
    """Replicated; computed in the weight's dtype, returned in x's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        wide = x.to(self.weight.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3) * self.weight).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.up = Norm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """ids (B, S) → (B, S, 11). Odd sizes; tied: the head has the embedding's weight; per: blocks in a checkpoint."""

    def __init__(self, tied=False, num_blocks=4, width=6, per=0, reentrant=False):
        super().__init__()
        self.per, self.reentrant = per, reentrant
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width, 7 + i) for i in range(num_blocks))
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor([3, 4]))

    def run(self, layers, x):
        for layer in layers:
            x = layer(x)
        return x

    def forward(self, ids):
        x = self.embedding(ids)
        for i in range(0, len(self.layers), self.per or len(self.layers)):
            part = functools.partial(self.run, self.layers[i : i + (self.per or len(self.layers))])
            x = checkpoint(part, x, use_reentrant=self.reentrant) if self.per else part(x)
        return self.head(x) * self.scale


class Odd(nn.Module):
    """Frozen layers between trained ones and within a block, a layer nobody uses, one used twice, a frozen bias, a
    parameter of the model's own, and definition in another order than use."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 11)
        self.unused = nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.randn(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.frozen_twice = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.layers = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.layers[0].up.weight.requires_grad_(False)
        self.layers[1].up.bias.requires_grad_(False)
        self.layers[1].more = nn.Linear(6, 2)  # of a block, and not used
        self.embedding = nn.Embedding(11, 6)

    def forward(self, ids):
        x = self.frozen(self.embedding(ids) + self.shift.to(self.dtype_of(ids)))
        x = self.frozen_twice(torch.tanh(self.frozen_twice(self.twice(torch.tanh(self.twice(x))))))
        return self.head(self.layers[1](self.layers[0](x)))

    def dtype_of(self, ids):
        return torch.float64


class Heads(nn.Module):
    """A trunk and three heads, each of which gives a loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.heads = nn.ModuleList(Block(6, 5 + i) for i in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        return [head(x) for head in self.heads]


class AgainFirst(Heads):
    """Backward comes to a checkpoint before it comes to a layer's output."""

    def forward(self, ids):
        x = self.embedding(ids)
        again = functools.partial(checkpoint, use_reentrant=False)
        # looked up again, too, by the ranks that have a loss
        return [again(lambda x, h=h: (h(x) + self.embedding(ids)).sin(), x) for h in self.heads]


class Reused(nn.Module):
    """Three outputs, of which the first two use weights that other layers have used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 11, bias=False), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.heads[0].weight = self.embedding.weight

    def forward(self, ids):
        x = torch.tanh(self.trunk(self.embedding(ids)))
        return [self.heads[0](x), self.heads[1](torch.tanh(self.trunk(x))), self.heads[2](x)]


EVERY = {"plain": Model, "tied": functools.partial(Model, tied=True), "odd": Odd}
MODELS = EVERY | {"heads": Heads, "again first": AgainFirst, "reused": Reused}


def build(name, seed):
    torch.manual_seed(seed)
    return MODELS[name]().double()


def blocks(model):
    return getattr(model, "layers", None) or model.heads


def sharded(model, units="layer", **options):
    return FullyShardedDataParallel(model, units=blocks(model) if units == "block" else None, **options)


UNITS = {units: functools.partial(sharded, units=units) for units in ("layer", "block")}
KINDS = UNITS | {
    f"{u}, kept": functools.partial(wrap, reshard_after_forward=False) for u, wrap in UNITS.items()
}


# ------------------------------------------------------------------------------------------- what ranks share
def data(steps, per_rank, seed):
    """steps × ids (ranks · per_rank, 3), the same on all ranks."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(11, (per_rank * dist.get_world_size(), 3), generator=g) for _ in range(steps)]


def batches(steps, per_rank, seed):
    return [(ids, ids[..., None] / 11) for ids in data(steps, per_rank, seed)]


# ------------------------------------------------------------------------- the weights of a single process
def train(seed, model, batches, *how, wrappers=KINDS, **more):
    """As one process does, in each kind of sharding."""
    with about(model):
        train_in_each(wrappers, seed, functools.partial(build, model), batches, *how, **more)


def train_every_model(seed):
    """On one and three ranks one kind of sharding for each model, others from run to run."""
    for (i, name), (j, kind) in itertools.product(enumerate(EVERY), enumerate(KINDS)):
        if dist.get_world_size() == 2 or (i + j + seed) % len(KINDS) == 0:
            train(seed, name, batches(3, 2, seed), wrappers={kind: KINDS[kind]})


def narrow_loss(alone, ids, dtype):
    """With the weights of layers, and their biases, rounded."""
    narrow = {
        f"{name}.{key}": p.to(dtype)
        for name, part in alone.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding)
        for key, p in part.named_parameters()
    }
    y = torch.func.functional_call(alone, narrow, (ids,))
    return (y.double() - ids[..., None] / 11).square().mean()


def train_in_narrow_dtypes(seed):
    """Every rank's gradients are those of rounded weights, and their sum is wide."""
    ranks = dist.get_world_size()
    for name, units, dtype in (
        ("plain", "layer", torch.bfloat16), ("plain", "block", torch.bfloat16), ("plain", "layer", torch.float16),
        ("plain", "block", torch.float32),
    ):  # fmt: skip
        with about(name, units, dtype):
            wrap = functools.partial(sharded, units=units, compute_dtype=dtype)

            def whole(alone, ids, y, dtype=dtype):
                for part in ids.chunk(ranks):
                    narrow_loss(alone, part, dtype).backward()
                for p in alone.parameters():  # not the loss, of which narrow gradients are made
                    p.grad /= ranks

            train_beside(seed, build(name, seed), wrap, batches(3, 2, seed), whole=whole)


def reduce_in_narrow_dtypes(seed):
    """Gradients are rounded before they are summed, as told, in fp32 weights; others stay exact."""
    module = build("plain", seed).float()
    alone = copy.deepcopy(module)
    model = sharded(module, reduce_dtype=torch.bfloat16)
    ids = data(1, 2, seed)[0]
    backward(model, share(ids))
    model.finish_gradient_synchronization()
    loss_of(alone, ids).backward()
    grads = full_gradients(model)
    for name, p in alone.named_parameters():
        exact = grads[name].dtype == torch.float32 and torch.allclose(
            grads[name], p.grad, rtol=1e-4, atol=1e-7
        )
        assert torch.allclose(grads[name], p.grad, rtol=0.05, atol=0.02), name
        assert exact == (p.dim() == 1), name


# --------------------------------------------------------------------------- different parts, several passes
def losses_of_different_heads(seed, model="heads"):
    """All ranks call all heads; what their losses depend on differs, and some have no loss at all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    plans = [
        [[0, 1, 2]] * ranks, [[0], *[[1]] * (ranks - 1)], [[], *[[2, 0]] * (ranks - 1)], [[]] * ranks, [[1]] * ranks,
        *([rng.sample(range(3), rng.randint(0, 3)) for _ in range(ranks)] for _ in range(3)),
    ]  # fmt: skip

    def own(model, ids, y, plan):
        outputs = model(ids)
        if plan[rank]:
            sum((i + 1) * outputs[i].square().mean() for i in plan[rank]).backward()

    def whole(alone, ids, y, plan):
        for part, used in zip(ids.chunk(ranks), plan, strict=True):
            if used:
                outputs = alone(part)
                (sum((i + 1) * outputs[i].square().mean() for i in used) / ranks).backward()

    for kind in ("layer", "block", "block, kept"):
        with recorded_collectives() as log:
            steps = with_each(batches(len(plans), 2, seed), *plans)
            train(seed, model, steps, own, whole, wrappers={kind: KINDS[kind]})
            # each of the two kinds in one order, whatever a rank has used
            for what in ("gather", "reduce"):
                assert distributed.ranks_agree([event for event in log if event[0] == what]), (kind, what)


def losses_of_weights_used_again(seed):
    losses_of_different_heads(seed, "reused")


def no_loss_beside_what_is_computed_again_first(seed):
    """Rank 0 has no loss, so the others must gather as planned, although nothing but a checkpoint has told them."""
    ranks = range(dist.get_world_size())

    def own(model, ids, y, rank=None):
        outputs = model(ids)
        if rank or (rank is None and dist.get_rank()):
            (
                sum(output.square().mean() for output in outputs) / (1 if rank is None else len(ranks))
            ).backward()

    def whole(alone, ids, y):
        for part, rank in zip(ids.chunk(len(ranks)), ranks, strict=True):
            own(alone, part, None, rank)

    train(seed, "again first", batches(2, 2, seed), own, whole)


@contextlib.contextmanager
def recorded_collectives():
    """(kind, elements) of each collective of sharded weights, as it is launched."""
    log, gather, reduce = [], shards.FlatWeights.gather, shards.reduce_scatter_mean

    def noted_gather(self):
        if not self.gathered_bytes:
            log.append(("gather", self.numel))
        gather(self)

    def reduce_scatter_mean(output, flat, group):
        log.append(("reduce", flat.numel()))
        return reduce(output, flat, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.FlatWeights, "gather", noted_gather)
        patch.setattr(shards, "reduce_scatter_mean", reduce_scatter_mean)
        yield log


def accumulate(seed):
    for name in ("odd", "tied"):
        train(seed, name, with_each(batches(4, 2 * PARTS, seed), *WAYS), in_parts, backward, wrappers=UNITS)


def second_losses_of_different_parts(seed):
    """What the second of two backward passes gathers is not planned; the sizes are the same, so collectives match."""
    torch.manual_seed(seed)
    module = Heads()
    module.heads = nn.ModuleList(Block(6, 5) for _ in range(2))
    for units in ("layer", "block"):
        model = sharded(copy.deepcopy(module), units)
        first, second = (model(torch.tensor([[1, 2]])) for _ in range(2))
        with model.no_sync():
            sum(y.square().mean() for y in first).backward()
        second[dist.get_rank()].square().mean().backward()
        with pytest.raises(RuntimeError, match="these must come to the same units, too"):
            model.finish_gradient_synchronization()


def both_first_then_backward(seed):
    """Two forward passes, then their backward passes: separately and as one."""

    def together(model, ids, y):
        first, second = (loss_of(model, part) / 2 for part in ids.chunk(2))
        (first + second).backward()

    def one_by_one(model, ids, y):
        first, second = (loss_of(model, part) / 2 for part in ids.chunk(2))
        with model.no_sync():
            first.backward()
        second.backward()

    for own in (together, one_by_one):
        with about(own.__name__):
            train(seed, "odd", batches(2, 2, seed), own, backward)


def recompute(seed):
    """Checkpoints of a block and of two, which are gathered twice in a step all the same."""
    for per, units, reentrant in (
        (1, "layer", False),
        (1, "block", False),
        (2, "layer", False),
        (1, "block", True),
    ):
        torch.manual_seed(seed)
        module = Model(per=per, reentrant=reentrant).double()
        with about(per, units, reentrant), recorded_collectives() as log:
            steps = 3
            model = train_beside(seed, module, UNITS[units], batches(steps, 2, seed))
            if not reentrant:
                gathered = sum(kind == "gather" for kind, _ in log)  # of embedding, layers, head
                assert gathered == steps * (2 * len(model.flats) - 1)


# ------------------------------------------------------------------------------------- order and memory
def gather_ahead(seed):
    """The gather of each unit starts right after the unit before the last is done, forward and backward."""
    for units in ("layer", "block"):
        torch.manual_seed(seed)
        model = sharded(Model(num_blocks=3).double(), units)
        for step in range(2):
            with recorded_schedule(model) as events:
                backward(model, share(data(1, 2, seed + step)[0]))
                model.finish_gradient_synchronization()
            order = [unit.name for unit in model._schedule.order]
            if units == "block":
                assert order == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
            # looking up rows leaves nothing to be read in backward
            with about(units, step):
                there, back = ahead(order), ahead(order[:0:-1])
                assert [e for e in events if e != ("run", "embedding")] == [
                    *(e for e in [*there, *back] if e != ("run", "embedding")), ("done", "embedding"),
                ]  # fmt: skip


class PassesThrough(nn.Module):
    """Gives what it was given as well, whose gradient comes after those of its weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x, residual):
        residual = residual + x
        return torch.tanh(self.linear(residual)), residual


def gather_once_for_late_outputs(seed):
    """Two gathers a unit and step, forward and backward, whatever else a unit returns."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(PassesThrough() for _ in range(6))

    def through(some, x, residual):
        for layer in some:
            x, residual = layer(x, residual)
        return x, residual

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            x, residual = through(self.layers[:1], x, torch.zeros_like(x))
            x, residual = checkpoint(through, self.layers[1:4], x, residual, use_reentrant=False)
            x, residual = through(self.layers[4:], x, residual)
            return x + residual

    model = FullyShardedDataParallel(Model(), units=layers)
    most, count, gather = [0], [0], shards.FlatWeights.gather

    def counted(self):
        count[0] += not self.gathered_bytes
        gather(self)
        most[0] = max(most[0], sum(flat.gathered_bytes > 0 for flat in model.flats))

    for step in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards.FlatWeights, "gather", counted)
            count[0] = 0
            model(torch.randn(4, 6)).sum().backward()
            assert not any(flat.gathered_bytes for flat in model.flats)
            assert count[0] == 2 * len(layers), (step, count)
        model.finish_gradient_synchronization()
    assert most[0] <= 4  # three that are computed again together, and the next one


def free_frozen_weights(seed):
    """Weights without gradients are freed when backward comes to the next unit, in checkpoints of both kinds, too."""
    for per, reentrant in ((0, False), (1, False), (1, True)):
        torch.manual_seed(seed)
        module = Model(num_blocks=6, per=per, reentrant=reentrant)
        for layer in module.layers:
            layer.up.requires_grad_(False)
            layer.down.requires_grad_(False)
        model, together, gather = sharded(module, "block"), [], shards.FlatWeights.gather

        def noted(self, model=model, together=together, gather=gather):
            gather(self)
            together.append(sum(flat.gathered_bytes > 0 for flat in model.flats))

        with about(per, reentrant), pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards.FlatWeights, "gather", noted)
            backward(model, share(data(1, 2, seed)[0]))
            model.finish_gradient_synchronization()
            assert max(together) == 2


@contextlib.contextmanager
def recorded_schedule(model):
    """(what, unit): its gather starts; it runs, its weights being there; it is done, and its weights are free."""
    events = []
    name_of = {flat: unit.name for unit in model._schedule.order for flat in unit.flats}
    start = shards.FlatWeights.gather

    def gather(self):
        if not self.gathered_bytes:
            events.append(("gather", name_of[self]))
        start(self)

    def noted(method, event, name, before):
        def noting(self, what, *more):
            events.extend([(event, name(what))] * before)
            method(self, what, *more)
            events.extend([(event, name(what))] * (not before))

        return noting

    cls, of_unit = schedule.Schedule, lambda unit: unit.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.FlatWeights, "gather", gather)
        patch.setattr(cls, "enter", noted(cls.enter, "run", of_unit, before=False))
        patch.setattr(cls, "reach", noted(cls.reach, "run", of_unit, before=False))
        patch.setattr(cls, "done", noted(cls.done, "done", name_of.get, before=True))
        patch.setattr(cls, "leave", noted(cls.leave, "done", of_unit, before=True))
        yield events


def arrive_meanwhile(seed):
    """While a unit is computed, the next one's gather goes on and ends; so do, in backward, the last one's reduction
    and the next one's gather. Without overlap, the unit would wait here for what would begin after it."""
    for units in ("layer", "block"):
        torch.manual_seed(seed)
        model = sharded(Model(num_blocks=3).double(), units)
        ids = share(data(1, 2, seed)[0])
        step = functools.partial(backward, model, ids)
        step()
        model.finish_gradient_synchronization()  # the order is known now
        called = model._schedule.order
        seen = []

        def arrived(work, seen=seen):
            wait_until(work.is_completed, seconds=20)
            seen.append(work)

        def during_forward(module, args, number, called=called, arrived=arrived):
            if number + 1 < len(called):
                arrived(called[number + 1].flats[0]._work)

        def during_backward(grad, number, called=called, arrived=arrived, model=model):
            if number > 1:  # the embedding's weights are not read in backward
                arrived(called[number - 1].flats[0]._work)
            if number + 1 < len(called):
                arrived(model._schedule.reductions[-1].reduction)

        for number, unit in enumerate(called):
            unit.module.register_forward_pre_hook(functools.partial(during_forward, number=number))
            first = unit.flats[0].weights[-1].full  # whose gradient comes first
            first.register_hook(functools.partial(during_backward, number=number))
        with about(units), pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "reduce_scatter_mean", OneThatTells)
            step()
            assert len(seen) == 3 * len(called) - 4
            model.finish_gradient_synchronization()


class OneThatTells:
    """Gloo's reduce-scatter does not tell that it has been completed; its all-reduce does."""

    def __init__(self, output, flat, group):
        self.output, self.flat, self.rank = output, flat, group.rank()
        flat.div_(group.size())
        self.work = group.allreduce([flat])
        self.is_completed = self.work.is_completed

    def wait(self):
        self.work.wait()
        self.output.copy_(self.flat.view(-1, len(self.output))[self.rank])


def ahead(order):
    """What is to happen: two gathers, then each unit is run, and when it is done the next but one is gathered."""
    events = [("gather", name) for name in order[:2]]
    for i, name in enumerate(order):
        events += [("run", name), ("done", name), *(("gather", later) for later in order[i + 2 : i + 3])]
    return events


def hold_few_bytes(seed):
    """At every moment: two units' weights at most, in the dtype of compute, and the gradients of two or three; between
    steps a share."""
    ranks, width, num_blocks = dist.get_world_size(), 64, 5
    for units, dtype, reshard in itertools.product(("layer", "block"), (None, torch.bfloat16), (True, False)):
        torch.manual_seed(seed)
        model = sharded(
            Model(num_blocks=num_blocks, width=width),
            units,
            compute_dtype=dtype,
            reshard_after_forward=reshard,
        )
        whole = [sum(w.shape.numel() for w in flat.weights) for flat in model.flats]
        itemsize = (dtype or torch.float32).itemsize
        weights, gradients = [0], [0]
        gather, take = shards.FlatWeights.gather, shards.FlatWeights.take_gradient

        def counted_gather(self, model=model, gather=gather, weights=weights):
            gather(self)
            weights.append(sum(flat.gathered_bytes for flat in model.flats))

        def counted_take(self, *given, model=model, take=take, gradients=gradients):
            take(self, *given)
            gradients.append(sum(f.gradient.numel() * 4 for f in model.flats if f.gradient is not None))

        with about(units, dtype, reshard), pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards.FlatWeights, "gather", counted_gather)
            patch.setattr(shards.FlatWeights, "take_gradient", counted_take)
            for step in range(2):
                ids = share(data(1, 2, seed + step)[0])
                backward(model, ids)
                model.finish_gradient_synchronization()
                with torch.no_grad():
                    model(ids)
                assert not any(flat.gathered_bytes for flat in model.flats)
            padding = 16 * ranks
            two_largest = sum(sorted(n + padding for n in whole)[-2:])
            if reshard:
                assert max(weights) <= two_largest * itemsize
            else:  # those of all units, once forward is done
                assert sum(whole) * itemsize <= max(weights) <= (sum(whole) + padding * len(whole)) * itemsize
            assert max(gradients) <= two_largest * 4
            replicated = sum(p.nbytes for i, p in enumerate(model._trained) if i not in model._flat_of)
            slices = {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }
            assert sum(slices.values()) <= (sum(whole) / ranks + padding * len(whole)) * 4 + replicated


# ----------------------------------------------------------------------------------------------- meta device
def build_on_meta(name):
    with torch.device("meta"):
        return MODELS[name]().double()


def initialize(part, seed):
    """Another value in each element of a module's own tensors."""
    for i, tensor in enumerate([*part.parameters(recurse=False), *part.buffers(recurse=False)]):
        g = torch.Generator().manual_seed(seed + i)
        with torch.no_grad():
            tensor.copy_(torch.randint(1, 100, tensor.shape, generator=g) / 50 - 1)


def begin_on_meta(seed):
    """Rank 0's weights, by a function for each module or from a state dict, and an optimizer made before."""

    def init(part):
        assert dist.get_rank() == 0
        initialize(part, seed)

    for name, units, loaded in itertools.product(EVERY, UNITS, (False, True)):
        alone, module = build(name, seed), build_on_meta(name)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, alone)]
        with about(name, units, loaded):
            model = sharded(module, units, device="cpu", param_init_fn=fail_not if loaded else init)
            if loaded:
                ShardedState(model).load_full_state_dict(alone.state_dict())
            else:
                for part in alone.modules():
                    initialize(part, seed)
            assert all(torch.equal(a, b) for a, b in zip(module.buffers(), alone.buffers(), strict=True))
            [ids] = data(1, 2, seed)
            step_of(model, optimizers[0], share(ids))
            step_of(alone, optimizers[1], ids)
            assert_like(model, alone)


def fail_not(part):
    """Leaves a module as it is."""


def begin_by_modules(seed):
    """Without a function modules initialize themselves: as if rank 0 had built the model."""
    config = ModelConfig(16, 24, 2, 2, vocab_size=11, context_length=8)
    torch.manual_seed(seed)
    alone = build_lm(config, "reference", device="cpu")
    torch.manual_seed(seed + dist.get_rank())
    model = sharded(build_lm(config, "reference", device="meta"), "block", device="cpu")
    ids = data(1, 1, seed)[0]
    with torch.no_grad():
        assert torch.equal(model(share(ids)), alone(share(ids)))


class Bytes(TorchDispatchMode):
    """`peak`: the most bytes that tensors made inside, those that live, have had; but not as views of those before."""

    def __init__(self, before):
        super().__init__()
        self.peak, self.live = 0, weakref.WeakSet()
        self.before = {tensor.untyped_storage() for tensor in before}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        storages = {tensor.untyped_storage() for tensor in tensors if not tensor.is_meta}
        self.live.update(storages - self.before)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.live))
        return made


def hold_few_bytes_from_the_beginning(seed):
    """Shards, what is replicated and a unit: a rank never has more, from a model of meta tensors on."""

    def in_place(part):
        for tensor in part.parameters(recurse=False):
            tensor.uniform_()

    for units, loaded in itertools.product(("layer", "block"), (False, True)):
        with torch.device("meta"):
            module = Model(width=256, num_blocks=6)
        state = {name: torch.rand(t.shape).to(t.dtype) for name, t in module.state_dict().items()}
        with Bytes(state.values()) as bytes_, about(units, loaded):
            model = sharded(module, units, device="cpu", param_init_fn=in_place)
            if loaded:
                ShardedState(model).load_full_state_dict(state)
        kept = {p.untyped_storage() for p in model.parameters()}
        largest = max(flat.numel for flat in model.flats) * 4
        bound = sum(storage.nbytes() for storage in kept) + largest
        assert bound - largest < bytes_.peak < bound + 0.1 * largest, (units, loaded, bytes_.peak, bound)
        with Bytes(module.state_dict().values()) as bytes_:
            ShardedState(model).full_state_dict()
        if dist.get_rank():
            assert 0 < bytes_.peak <= 2 * largest, (units, bytes_.peak, largest)


# ---------------------------------------------------------------------------------------------- norms, states
def clip(seed):
    for norm_type, largest in itertools.product((2.0, 1.0, 3.0, math.inf), (1e-3, 1e3)):
        module = build("odd", seed)
        alone = copy.deepcopy(module)
        model = sharded(module, "block")
        ids = data(1, 2, seed)[0]
        backward(model, share(ids))
        model.finish_gradient_synchronization()
        backward(alone, ids)
        norm = model.clip_grad_norm_(largest, norm_type)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), largest, norm_type))
        assert_like(model, alone)


def skip_steps_together(seed):
    """One element of one rank's shard that is not finite stops all ranks, also those that hold nothing."""
    for units, fused, unscale in itertools.product(("layer", "block"), (False, True), (False, True)):
        model = sharded(build("plain", seed).float(), units)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1)
        with about(units, fused, unscale):
            for bad in (False, True, False):
                optimizer.zero_grad()
                before = [p.detach().clone() for p in model.parameters()]
                scaler.scale(loss_of(model, share(data(1, 2, seed)[0]))).backward()
                model.finish_gradient_synchronization()
                if bad and dist.get_rank() == dist.get_world_size() - 1:
                    next(p for p in model.parameters() if p.numel() and p.grad is not None).grad[0] = math.inf
                if unscale:
                    scaler.unscale_(optimizer)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == (scale / 2 if bad else scale * 2)
                for p, old in zip(model.parameters(), before, strict=True):
                    assert not p.numel() or torch.equal(p, old) == bad


def save_after_training(seed, folder):
    """Trains, saves whole and sharded states, and trains on: what the model that goes on from them must come to."""
    model = sharded(build("tied", seed), "block")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    alone = build("tied", seed)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for ids in data_of_six(seed)[:3]:
        step_of(model, optimizer, share(ids))
        step_of(alone, plain, ids)
    dcp.save({"run": ShardedState(model, optimizer)}, checkpoint_id=f"{folder}/sharded")
    weights, moments = ShardedState(model, optimizer).full_state_dict()
    assert (dist.get_rank() == 0) == bool(weights) == bool(moments)
    if dist.get_rank() == 0:
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)
        assert weights["head.weight"] is weights["embedding.weight"]
        expected = plain.state_dict()
        assert moments["param_groups"] == expected["param_groups"]
        for number, state in expected["state"].items():
            torch.testing.assert_close(moments["state"][number], state, rtol=1e-9, atol=1e-11)
        torch.save({"weights": weights, "moments": moments}, f"{folder}/whole")
        for ids in data_of_six(seed)[3:]:
            step_of(alone, plain, ids)
        torch.save(alone.state_dict(), f"{folder}/expected")


def data_of_six(seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(11, (6, 3), generator=g) for _ in range(6)]


def step_of(model, optimizer, ids):
    optimizer.zero_grad()
    backward(model, ids)
    if isinstance(model, FullyShardedDataParallel):
        model.finish_gradient_synchronization()
    optimizer.step()


def go_on_from_saved(seed, folder):
    expected = torch.load(f"{folder}/expected", weights_only=True)
    saved = torch.load(f"{folder}/whole", weights_only=True)
    for units, whole in itertools.product(("layer", "block"), (True, False)):
        model = sharded(build("tied", seed + 1), units)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        with about(units, whole):
            if whole:
                ShardedState(model, optimizer).load_full_state_dict(**copy.deepcopy(saved))
            else:
                dcp.load({"run": ShardedState(model, optimizer)}, checkpoint_id=f"{folder}/sharded")
            for ids in data_of_six(seed)[3:]:
                step_of(model, optimizer, share(ids))
            for name, tensor in ShardedState(model).full_state_dict()[0].items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)
    plain = build("tied", seed).state_dict()  # reads it as well
    dcp.load({"run": {"model": plain}}, checkpoint_id=f"{folder}/sharded")
    for name, tensor in saved["weights"].items():
        assert torch.equal(plain[name], tensor), name
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        ShardedState(model).load_full_state_dict(
            {k: v for k, v in saved["weights"].items() if k != "head.weight"}
        )
    for name, error in (("scale", RuntimeError), ("head.weight", ValueError)):
        with pytest.raises(error, match=name):
            ShardedState(model).load_full_state_dict(saved["weights"] | {name: torch.ones(2)})


def test_states_go_on_at_another_world_size(tmp_path):
    seed = new_seed()
    distributed.run(save_after_training, 2, seed, str(tmp_path))
    for ranks in (1, 3):
        distributed.run(go_on_from_saved, ranks, seed, str(tmp_path))


def go_on_from_shards(seed, folder):
    """Frozen and unused parameters, buffers, settings, an optimizer whose state goes on from nothing where it had none,
    and a block that is compiled in one of the models."""
    folder = f"{folder}/{dist.get_world_size()}"
    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=torch.tensor(0.01)),
    ):
        modules = [build("odd", seed + i) for i in range(2)]
        modules[1].layers[0] = torch.compile(modules[1].layers[0], backend="eager")
        first, second = map(sharded, modules, ("layer", "block"))
        optimizers = [make([p for p in model.parameters() if p.requires_grad]) for model in (first, second)]
        batches = data(4, 2, seed)
        for ids in batches[:2]:
            step_of(first, optimizers[0], share(ids))
        optimizers[0].param_groups[0]["lr"] *= 2
        before = [p.detach().clone() for p in first.parameters()]
        dcp.save({"run": ShardedState(first, optimizers[0])}, checkpoint_id=folder)
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), before, strict=True))
        dcp.load({"run": ShardedState(second)}, checkpoint_id=folder)
        for one, other in zip(
            ShardedState(first).full_state_dict()[0].items(),
            ShardedState(second).full_state_dict()[0].items(),
            strict=True,
        ):
            assert one[0] == other[0].replace("_orig_mod.", "") and torch.equal(one[1], other[1]), one[0]
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"run": ShardedState(second, optimizers[1])}, checkpoint_id=folder, planner=planner)
        for ids in batches[2:]:
            for model, optimizer in zip((first, second), optimizers, strict=True):
                step_of(model, optimizer, share(ids))
        with first.full_parameters(), second.full_parameters():
            for p, q in zip(first.module.parameters(), second.module.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_saved_in_shards_goes_on(ranks, tmp_path):
    distributed.run(go_on_from_shards, ranks, new_seed(), str(tmp_path))


def look_at_whole_parameters(seed):
    """Under full_parameters() the module is the plain one; what is written stays."""
    module = build("tied", seed)
    alone = copy.deepcopy(module)
    model = sharded(module, "block", compute_dtype=torch.bfloat16)
    ids = data(1, 1, seed)[0]
    with model.full_parameters(), torch.no_grad():
        assert module.head.weight is module.embedding.weight
        torch.testing.assert_close(model(ids), alone(ids))
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, q)
            p.mul_(2)
        with pytest.raises(RuntimeError, match="inside itself"), model.full_parameters():
            pass
    with model.full_parameters():
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, 2 * q)


# ------------------------------------------------------------------------------------------- peers, compilers
def exchange_checkpoints_with_fsdp2(seed, folder):
    """A run of torch's own goes on as one of ours, optimizer and all; and torch's model reads what ours has saved."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ours, theirs = build("plain", seed + 1), build("plain", seed)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model = sharded(ours, "block")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in ((model, 0.5), (theirs, 0.01))]
    batches = data(4, 2, seed)
    for ids in batches[:2]:
        step_of(theirs, optimizers[1], share(ids))
    weights, moments = get_state_dict(theirs, optimizers[1])
    dcp.save({"run": {"model": weights, "optimizer": moments}}, checkpoint_id=f"{folder}/theirs")
    dcp.load({"run": ShardedState(model, optimizers[0])}, checkpoint_id=f"{folder}/theirs")
    for ids in batches[2:]:
        step_of(model, optimizers[0], share(ids))
        step_of(theirs, optimizers[1], share(ids))
    with model.full_parameters():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q.full_tensor(), rtol=1e-8, atol=1e-10)
    step_of(model, optimizers[0], share(batches[0]))
    dcp.save({"run": ShardedState(model, optimizers[0])}, checkpoint_id=f"{folder}/ours")
    dcp.load({"run": {"model": theirs.state_dict()}}, checkpoint_id=f"{folder}/ours")
    with model.full_parameters():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q.full_tensor())


def test_checkpoints_are_exchanged_with_fsdp2(tmp_path):
    distributed.run(exchange_checkpoints_with_fsdp2, 2, new_seed(), str(tmp_path))


def train_compiled(seed):
    """Blocks are compiled whole, in place before or after, or replaced; gathers stay outside of their graphs."""
    compiled = {"backend": "aot_eager", "fullgraph": True}

    def before(module):
        for layer in module.layers:
            layer.compile(**compiled)
        return sharded(module, "block")

    def replaced(module):
        for i, layer in enumerate(module.layers):
            module.layers[i] = torch.compile(layer, **compiled)
        return sharded(module, "block")

    def after(module):
        model = sharded(module, "block")
        for layer in module.layers:
            layer.compile(**compiled)
        return model

    for wrap in (before, replaced, after):
        torch.compiler.reset()
        torch.manual_seed(seed)
        with about(wrap.__name__):
            train_beside(seed, Model(num_blocks=2).double(), wrap, batches(2, 2, seed))
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="compile the units of a sharded model, not what holds them"):
        torch.compile(sharded(build("plain", seed), "block"), backend="aot_eager")(data(1, 2, seed)[0])


def compile_blocks_once(seed):
    """Blocks of one class and shape share what was compiled, as they do without sharding."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counts = []
    for shard in (False, True):
        torch.compiler.reset()
        module = nn.Sequential(nn.Embedding(11, 6), *(Block(6, 7) for _ in range(5)))
        counter = CompileCounterWithBackend("aot_eager")
        for block in module[1:]:
            block.compile(backend=counter, fullgraph=True)
        model = FullyShardedDataParallel(module, units=module[1:]) if shard else module
        for _ in range(2):
            model(torch.tensor([[1, 2]])).sum().backward()
            with torch.no_grad():
                model(torch.tensor([[1, 2]]))
            if shard:
                model.finish_gradient_synchronization()
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] > 0


class StaffLinear(nn.Module):
    """As the course's: recognized by its name alone."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class StaffEmbedding(nn.Module):
    def __init__(self, num, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, width))

    def forward(self, ids):
        return self.weight[ids]


StaffLinear.__name__, StaffEmbedding.__name__ = "Linear", "Embedding"


def train_by_the_adapters(seed):
    """As the course's suite does: shards and their gradients alike, replicas the same on all ranks, and three steps
    give the parameters of one process."""
    ranks = dist.get_world_size()
    for dtype in (None, torch.float16):
        torch.manual_seed(seed)
        module = nn.Sequential(
            StaffEmbedding(11, 8), Norm(8), StaffLinear(8, 16), Norm(16), StaffLinear(16, 5)
        )
        alone = copy.deepcopy(module)
        model = adapters.get_fsdp(module, compute_dtype=dtype)
        assert model.module is module
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
        for ids in data(3, 4, seed):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(share(ids)).float().square().mean().backward()
            adapters.fsdp_on_after_backward(model, optimizers[0])
            names = dict(alone.named_parameters())
            narrow = {n: p.to(dtype) for n, p in names.items() if dtype and p.dim() == 2}
            for part in ids.chunk(ranks):
                (
                    torch.func.functional_call(alone, narrow, (part,)).float().square().mean() / ranks
                ).backward()
            replicas = []
            for part in module.modules():
                for p in part._parameters.values():
                    assert p.grad.shape == p.shape and p.grad.dtype == p.dtype == torch.float32
                    if not isinstance(part, StaffLinear | StaffEmbedding):
                        replicas += [p, p.grad]
            distributed.assert_same_on_all_ranks(replicas)
            for optimizer in optimizers:
                optimizer.step()
            whole = adapters.fsdp_gather_full_params(model)
            assert whole.keys() == names.keys()
            for name, p in names.items():
                torch.testing.assert_close(whole[name], p, rtol=1e-4, atol=1e-4 if dtype else 1e-6)


# -------------------------------------------------------------------------------------------------- wrong use
def start_afresh_after_failures(seed):
    """In the same place on all ranks, or in two."""
    for alike in (True, False):
        late = f"layers.{0 if alike else dist.get_rank() % 2}.norm.weight"
        steps = with_each(batches(3, 2, seed), late, None, late)
        with about(alike):
            train(seed, "plain", steps, after_failures, backward, wrappers=UNITS)


def second_backward_pass_is_refused(seed):
    steps = with_each(batches(2, 2, seed), False, True)
    train(seed, "plain", steps, once_more, backward, wrappers=UNITS)


def forget_to_finish(seed):
    for fused in (False, True):
        model = sharded(build("plain", seed), "block")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        ids = share(data(1, 2, seed)[0])
        step_of(model, optimizer, ids)
        optimizer.zero_grad()
        backward(model, ids)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"without finish_gradient_synchronization\(\)"):
            backward(model, ids)


def refuse_what_differs(seed):
    rank = dist.get_rank()
    module = build("plain", seed)
    dtypes = (torch.float32, torch.float16)
    for make in (
        lambda: sharded(build("plain", seed), ("layer", "block")[rank]),
        lambda: sharded(build("plain", seed), compute_dtype=(None, torch.bfloat16)[rank]),
        lambda: sharded(build("plain", seed), reduce_dtype=dtypes[rank]),
        lambda: (sharded, NaiveDDP)[rank](build("plain", seed)),
        lambda: sharded(Model(num_blocks=3 + rank)),
        lambda: ShardedOptimizer(sharded(build("plain", seed)).parameters(), torch.optim.AdamW),
    ):
        with pytest.raises(ValueError, match=r"differ between the ranks; expected the same|shard 0 of 2"):
            make()
    model = sharded(Model(num_blocks=2), units="layer")
    with torch.no_grad():  # their sizes are the same, so that the collectives match
        model(torch.tensor([[1]]))
        model.finish_gradient_synchronization()
        model.module.layers[0].down(torch.ones(7)) if rank else model.module.layers[0].up(torch.ones(6))
    with pytest.raises(RuntimeError, match="ranks have called different units, or in another order"):
        model.finish_gradient_synchronization()
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = sharded(module, "block", process_group=group)
    if rank:
        with pytest.raises(
            RuntimeError, match=r"gathering of embedding\.weight .* all ranks must call the same"
        ):
            model(torch.tensor([[1]]))


def train_in_two_groups(seed):
    """Ranks 0 and 2 train one model, ranks 1 and 3 another."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    train(
        seed + mine, "tied", batches(2, 2, seed + mine), part=lambda batch: batch.chunk(2)[dist.get_rank() // 2],
        wrappers={"block": functools.partial(sharded, units="block", process_group=groups[mine])}, group=groups[mine],
    )  # fmt: skip


def a_weight_read_by_its_block(seed):
    """An embedding's weight that the block also multiplies with, frozen."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
            self.embedding.weight.requires_grad_(False)

        def forward(self, ids):
            return nn.functional.linear(self.norm(self.embedding(ids)), self.embedding.weight)

    torch.manual_seed(seed)
    module = Block()
    alone = copy.deepcopy(module)
    model = FullyShardedDataParallel(module, units=[module])
    ids = torch.arange(8).view(2, 4)
    for one in (model, alone):
        one(ids).square().mean().backward()
    model.finish_gradient_synchronization()
    for ours, true in zip(model.parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (true.grad is None)
        if true.grad is not None:
            torch.testing.assert_close(ours.grad, true.grad)


CHECKS = {  # by the number of ranks
    1: [
        train_every_model, recompute, gather_ahead, gather_once_for_late_outputs, free_frozen_weights, hold_few_bytes,
    ],
    2: [
        train_every_model, reduce_in_narrow_dtypes, losses_of_different_heads, accumulate,
        losses_of_weights_used_again, no_loss_beside_what_is_computed_again_first,
        both_first_then_backward, second_losses_of_different_parts, recompute, gather_ahead, arrive_meanwhile,
        hold_few_bytes, skip_steps_together,
        look_at_whole_parameters, train_compiled, compile_blocks_once, train_by_the_adapters,
        start_afresh_after_failures, second_backward_pass_is_refused, forget_to_finish, refuse_what_differs,
        gather_once_for_late_outputs, free_frozen_weights, begin_by_modules,
        hold_few_bytes_from_the_beginning, a_weight_read_by_its_block,
    ],
    # shares that differ, empty ones too, and a mean that rounds; two cores do not run three ranks at once
    3: [train_every_model, train_in_narrow_dtypes, begin_on_meta, clip],
    4: [train_in_two_groups],
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks])
def test_on_ranks(ranks, check):
    distributed.run(check, ranks, new_seed(), timeout=300)


# -------------------------------------------------------------------------------------------------- wrong arguments
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"compute_dtype": torch.int8},
            r"compute_dtype is torch.int8; expected a floating-point",
        ),
        ({"compute_dtype": "bf16"}, r"compute_dtype is 'bf16'; expected a floating-point"),
        ({"reduce_dtype": None}, r"reduce_dtype is None; expected a floating-point torch.dtype$"),
        ({"units": [nn.ReLU()]}, r"units holds ReLU \(not in the model\); expected modules of the model"),
        ({"units": "layers"}, r"units holds str \(not in the model\)"),
    ],
)
def test_wrong_options_are_refused_by_name(options, words, alone):
    with pytest.raises(ValueError, match=words):
        FullyShardedDataParallel(Model(), **options)


def test_units_inside_one_another_are_refused(alone):
    model = Model()
    with pytest.raises(
        ValueError, match=r"units holds 'Model' and, inside it, layers\.0, .*; expected none inside"
    ):
        FullyShardedDataParallel(model, units=[model, *model.layers])


def test_plans_of_sharded_blocks_are_refused(alone):
    for units in ("block", "layer"):
        module = Model()
        model = sharded(module, units)
        with pytest.raises(
            ValueError, match="recompute 'selective' of sharded weights; allowed: none, blocks"
        ):
            checkpointing.recompute(module.layers, "selective")
        del model


def test_blocks_that_are_checkpoints_already_are_refused(alone):
    for units in ("block", "layer"):
        module = Model()
        checkpointing.recompute(module.layers, "blocks")
        with pytest.raises(
            ValueError, match=r"layers\.0 is to be computed again: shard the model before that"
        ):
            sharded(module, units)
        checkpointing.recompute(module.layers, "none")
        sharded(module, units)


def test_hooks_that_would_not_be_called_are_refused(alone):
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        module = Model()
        handles = [
            getattr(p, name)(lambda _: None) for p in (module.head.weight, module.layers[0].norm.weight)
        ]
        with pytest.raises(ValueError, match=r"head\.weight has hooks for its gradient"):
            sharded(module)
        handles[0].remove()
        backward(sharded(module), data(1, 2, new_seed())[0])


def test_an_embedding_that_changes_its_weight_is_refused(alone):
    model = nn.Sequential(nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 11))
    with pytest.raises(ValueError, match=r"^0 has max_norm=1\.0"):
        FullyShardedDataParallel(model)


def test_a_block_casts_inputs_of_its_layers(alone):
    """A norm between them is replicated, in fp32, and so is what it returns."""
    block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    model = FullyShardedDataParallel(nn.Sequential(block), compute_dtype=torch.bfloat16, units=[block])
    output = model(torch.randn(2, 6))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    model.finish_gradient_synchronization()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_norm_of_weights_in_several_dtypes(alone):
    module = nn.Sequential(nn.Linear(6, 6, bias=False, dtype=torch.bfloat16), nn.LayerNorm(6))
    model = FullyShardedDataParallel(module)
    model(torch.randn(2, 6, dtype=torch.bfloat16)).float().square().sum().backward()
    model.finish_gradient_synchronization()
    whole = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float32 and torch.isclose(norm.double(), whole, rtol=1e-2)


def test_wrong_models_are_refused_by_name(alone):
    model = Model()
    for module, units, words in (
        (Norm(3), None, "module Norm has no weight to shard"),
        (model, [model.layers], r"units holds ModuleList \(layers\); expected .* which are called"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            None,
            r"Linear \('1'\) is on the meta device; expected device=",
        ),
        (nn.Embedding(9, 4, sparse=True), None, "sparse gradients: weight;"),
    ):
        with pytest.raises(ValueError, match=words):
            FullyShardedDataParallel(module, units=units)


class Gain(nn.Module):
    """Its table is computed when it is converted, its parameter is not."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def _apply(self, fn, recurse=True):
        return super()._apply(fn, recurse)


@pytest.mark.parametrize("make", [lambda: Norm(3), Gain])
def test_who_initializes_must_be_known(make, alone):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), make())
    words = rf"{type(module[1]).__name__} \('1'\) is .* expected .* reset_parameters\(\) .* param_init_fn="
    with pytest.raises(ValueError, match=words):
        FullyShardedDataParallel(module, device="cpu")


def test_what_has_values_keeps_them(alone):
    """Of a module that lies on the meta device in part; and marks of parameters stay."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta"))
    nn.init.ones_(module[0].weight)
    module[0].register_buffer("scale", torch.empty(1, device="meta"))
    for layer in module:
        layer.weight.decays = False

    def init(part):
        (part.scale if part is module[0] else part.weight).fill_(2)

    model = FullyShardedDataParallel(module, device="cpu", param_init_fn=init)
    with model.full_parameters():
        assert module[0].weight.sum() == 16 and module[0].scale == 2 and module[1].weight.sum() == 32
    assert not any(p.decays for p in module.parameters())


@pytest.mark.parametrize("units", ["layer", "block"])
def test_nothing_outlives_the_model(units, alone):
    """Neither weights nor, for each model, a group."""
    groups = []
    for seed in range(2):
        model = sharded(build("plain", seed), units)
        step_of(model, torch.optim.AdamW(model.parameters()), torch.tensor([[1, 2, 3]]))
        tensors = [t for flat in model.flats for t in (flat._flat, flat._shard, flat.weights[0].full)]
        living = [weakref.ref(thing) for thing in (model, model.module, *tensors)]
        groups.append(len(dist.distributed_c10d._world.pg_map))
        del model, tensors
        gc.collect()
        assert not [type(thing()).__name__ for thing in living if thing() is not None]
    assert groups[0] == groups[1]


def test_a_model_that_has_changed_is_refused(alone):
    ids = torch.tensor([[1, 2]])
    for change, words in (
        (lambda module: module.double(), "has been converted, moved or replaced"),
        (
            lambda module: setattr(module.head, "weight", nn.Parameter(torch.ones(11, 6))),
            "has been converted, moved or replaced",
        ),
        (
            lambda module: module.layers[0].down.weight.requires_grad_(True),
            "frozen when the module was wrapped",
        ),
    ):
        module = Model()
        module.layers[0].down.weight.requires_grad_(False)
        model = FullyShardedDataParallel(module)
        backward(model, ids)
        model.finish_gradient_synchronization()
        change(module)
        with pytest.raises(RuntimeError, match=words):
            backward(model, ids)
            model.finish_gradient_synchronization()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_are_refused(alone):
    """The next pass is as if nothing had been."""
    model, other = (FullyShardedDataParallel(build("plain", 3)) for _ in range(2))
    ids = torch.arange(6).view(2, 3)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss_of(model, ids).backward(create_graph=True)
    for one in (model, other):
        one.zero_grad()
        backward(one, ids)
        one.finish_gradient_synchronization()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_forward_pass_that_raises_leaves_shards(alone):
    model = FullyShardedDataParallel(Model(), units=None)
    before = dict(model.module.named_parameters())
    with pytest.raises(IndexError):
        model(torch.tensor([[12]]))
    assert all(p is before[name] and p.dim() == 1 for name, p in model.module.named_parameters())
    backward(model, torch.tensor([[1]]))
    model.finish_gradient_synchronization()


@pytest.mark.parametrize("penalty", [0, 1])
def test_what_is__is_dropped_with_the_gradients(penalty, alone):
    """penalty: the losses depend on the shards themselves, too, to whose gradients autograd adds."""
    ids = torch.tensor([[1, 2]])
    single, model = Model().double(), FullyShardedDataParallel(Model().double())
    with model.full_parameters():
        model.module.load_state_dict(single.state_dict())
    loss = lambda model: loss_of(model, ids) + penalty * sum(p.square().sum() for p in model.parameters())
    with model.no_sync():
        loss(model).backward()
        torch.optim.SGD(model.parameters()).zero_grad()
        for _ in range(2):
            loss(model).backward()
    model.finish_gradient_synchronization()
    (2 * loss(single)).backward()
    assert_like(model, single)

    model.zero_grad()
    with model.no_sync():
        loss(model).backward()
    model.zero_grad()
    model.finish_gradient_synchronization()
    assert all(p.grad is None for p in model.parameters())

    with model.no_sync():
        loss(model).backward()
    model.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"has been changed while no_sync.*set_to_none=True"):
        loss(model).backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_backward_does_not_pass_through_other_weights_than_forward(fused, reshard, alone):
    """As for weights that are not sharded, whose versions autograd compares."""
    model = FullyShardedDataParallel(Model(), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD([weight.parameter for weight in model.weights], lr=0.1, fused=fused)
    early, late = (loss_of(model, torch.tensor([[1, 2]])) for _ in range(2))
    late.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize("fused", [False, True])
def test_weights_gathered_ahead_are_gathered_again_after_a_change(fused, alone):
    model = FullyShardedDataParallel(Model())
    layers = model.module.layers
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0, fused=fused)
    for p in layers.parameters():
        p.grad = p.detach().clone()
    layers[0].up(torch.ones(1, 6))  # and `down`, ahead
    optimizer.step()
    assert layers[0].down(torch.ones(1, 7)).count_nonzero() == 0


def test_weights_may_be_changed_on_the_way(alone):
    """By a module that clips those of the next one, say, which have been gathered ahead."""
    model, seen = FullyShardedDataParallel(Model()), []
    up = model.module.layers[1].up

    def clip(*_):
        nn.init.zeros_(up.weight)

    model.module.layers[1].norm.register_forward_pre_hook(clip)
    up.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    model(torch.tensor([[1]]))
    assert torch.equal(seen[0].flatten(), up.bias)


def test_frozen_later_means_no_gradient(alone):
    model = FullyShardedDataParallel(Model())
    model.module.layers[1].up.weight.requires_grad_(False)
    backward(model, torch.tensor([[1]]))
    model.finish_gradient_synchronization()
    missing = [name for name, p in model.module.named_parameters() if p.grad is None]
    assert missing == ["layers.1.up.weight"]


def fall(rank, how):
    """Rank 1 ends in the first block, while rank 0 waits for what the others have of the next ones; or rank 0, which
    alone initializes, while rank 1 waits for its weights."""
    if how == "initialize":
        sharded(build_on_meta("tied"), "block", device="cpu", param_init_fn=fail)
    model = sharded(build("plain", 0), "block")
    if rank.rank == 1:
        end = {"raise": fail, "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL)}[how]
        model.module.layers[0].down.register_forward_pre_hook(end)
    backward(model, torch.randint(11, (2, 3)))


@pytest.mark.parametrize(
    ("how", "number", "said"),
    [
        ("raise", 1, "ZeroDivisionError: in"),
        ("kill", 1, "signal SIGKILL"),
        ("initialize", 0, "ZeroDivisionError: in"),
    ],
)
def test_a_rank_that_falls_ends_the_run(how, number, said):
    with distributed.forking(), pytest.raises(LaunchError) as caught:
        # the other rank would wait for an hour, longer than any test may take
        launch(f"{__name__}:fall", 2, {"how": how}, device="cpu", collective_timeout_s=3600)
    words = str(caught.value)
    assert words.startswith(f"rank {number} of 2: {said}"), words
    assert ("fsdp.py" in words) == (how != "kill"), words  # its traceback
