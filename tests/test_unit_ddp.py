"""Data parallel training: the weights of a single process, launches in one order, no hang, memory of the buckets."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import random
import re

import adapters
import distributed
import pytest
import torch
import torch.distributed as dist
from beside import PARTS, WAYS, after_failures, backward, in_parts, once_more, train_in_each, with_each
from distributed import about, fail, new_seed
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from cs336_systems.parallel import ddp as ddp_module
from cs336_systems.parallel.buckets import Bucket, assign
from cs336_systems.parallel.ddp import BucketedDDP, FlatDDP, InPlaceDDP, NaiveDDP, OverlappedDDP
from cs336_systems.parallel.fsdp import FullyShardedDataParallel

BUCKET_SIZES_MB = (0.0001, 0.0016, 0.01, None)
WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    **{f"bucketed {mb}": functools.partial(BucketedDDP, bucket_size_mb=mb) for mb in BUCKET_SIZES_MB},
    **{f"in place {mb}": functools.partial(InPlaceDDP, bucket_size_mb=mb) for mb in (0.0016, None)},
}
ALIKE = ("overlapped", "bucketed 0.01", "in place 0.0016")
"""One of each class that communicates during the backward pass."""
KINDS = ("naive", "flat", *ALIKE)
EVERY = WRAPPERS | {"fsdp": FullyShardedDataParallel}
OVERLAPPING = {name: wrap for name, wrap in WRAPPERS.items() if name not in ("naive", "flat")}


# ---------------------------------------------------------------------------------------------------- models
class Layer(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Plain(nn.Module):
    """Layers in the order in which they are used; inputs (B, 6) → (B, 3)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(6, 40), Layer(40, 12), nn.Linear(12, 3))

    def forward(self, x):
        return self.layers(x)


class Tied(nn.Module):
    """Embedding and output projection are one tensor; a module is used twice; inputs are numbers (B, 6)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        ids = (x.abs() * 4).long() % 9  # (B, 6)
        logits = self.head(torch.tanh(self.twice(torch.tanh(self.twice(self.embedding(ids))))))  # (B, 6, 9)
        return logits.mean(1)[:, :3]


class Odd(nn.Module):
    """Frozen parts, parts nobody uses, buffers, odd shapes and layouts, and definition in another order than use."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(7, 3)
        self.no_grad_fixed_param = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(5, 5)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.first = nn.Linear(6, 6)
        self.first.bias.requires_grad_(False)
        # For a batch of one, autograd gives `positions` the memory that the gradient of `first` is computed from later.
        self.positions = nn.Parameter(torch.randn(6))
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor(2, dtype=torch.uint16))  # dtypes that Gloo lacks
        self.register_buffer("table", torch.ones(3, 2).to(torch.float8_e4m3fn).t())

    def forward(self, x):
        x = self.first(x) + self.positions[None]
        x = torch.tanh(x @ self.transposed + self.shift) * self.scalar + self.empty.sum()
        return self.last(x)


class Mixed(nn.Module):
    """Parameters of two dtypes, one in the middle of the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def double(self):
        super().double()
        self.second.float()
        return self

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x.float())).to(x.dtype))


class Optional(nn.Module):
    """Sums the layers that are asked for; they differ in size."""

    def __init__(self):
        super().__init__()
        layer = lambda width: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
        self.layers = nn.ModuleList(map(layer, range(4, 8)))

    def forward(self, x, used):
        return sum(self.layers[i](x) for i in used)


MODELS = {"plain": Plain, "tied": Tied, "odd": Odd, "mixed": Mixed, "optional": Optional}


def build(name, seed):
    torch.manual_seed(seed)
    return MODELS[name]().double()


# ------------------------------------------------------------------------------------------- what ranks share
def finish(model, *inputs):
    """A backward pass of the sum of the outputs, and gradients that are averaged."""
    model(*inputs).sum().backward()
    model.finish_gradient_synchronization()


def data(steps, batch, seed):
    """steps × (inputs (batch, 6), targets (batch, 3)), fp64, the same on all ranks."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 9, generator=g, dtype=torch.float64).split((6, 3), -1) for _ in range(steps)]


# ------------------------------------------------------------------------- the weights of a single process
def train(seed, model, batches, *how, wrappers=WRAPPERS, **more):
    """As one process does, in each wrapper."""
    with about(model):
        train_in_each(wrappers, seed, functools.partial(build, model), batches, *how, **more)


def train_every_model(seed):
    """Each model in each wrapper; of one and three ranks one model in each, others from run to run. With one to three
    examples a rank: for a batch of one, gradients have memory that is yet to be read."""
    ranks = dist.get_world_size()
    batches = [batch for n in (1, 3, 2, 1) for batch in data(1, n * ranks, seed + n)]
    for (i, model), (j, wrapper) in itertools.product(enumerate(REACHED_LATE), enumerate(WRAPPERS)):
        if ranks == 2 or (i + j + seed) % len(REACHED_LATE) == 0:
            train(seed, model, batches, wrappers={wrapper: WRAPPERS[wrapper]})


def train_with_layers_skipped(seed):
    """No hang; a gradient that some ranks lack counts as zero there, one that all lack stays None."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    plans = [  # for each step, for each rank, the layers that it uses in this order; a rank may use none
        # what rank 0 sees of the first becomes the order
        [rng.sample(range(4), rng.randint(0, 3)) for _ in range(ranks)],
        [[0, 1, 2, 3]] * ranks,
        [[3, 2, 1, 0]] * ranks,
        [[0, 2]] * ranks,
        [[]] * ranks,
        [[0], *[[1, 2, 0]] * (ranks - 1)],
        [[], *[[3]] * (ranks - 1)],
        *([rng.sample(range(4), rng.randint(0, 4)) for _ in range(ranks)] for _ in range(5)),
    ]

    def own(model, x, y, plan):
        if plan[rank]:
            (model(x, plan[rank]) - y).square().mean().backward()

    def whole(alone, x, y, plan):
        parts = zip(x.chunk(ranks), y.chunk(ranks), plan, strict=True)
        if losses := [(alone(x, used) - y).square().mean() / ranks for x, y, used in parts if used]:
            sum(losses).backward()

    each = {kind: WRAPPERS[kind] for kind in KINDS}
    train(seed, "optional", with_each(data(len(plans), 2 * ranks, seed), *plans), own, whole, wrappers=each)


# -------------------------------------------------------------------------------- several backward passes
def train_with_accumulation(seed):
    batches = with_each(data(4, 2 * PARTS * dist.get_world_size(), seed), *WAYS)
    train(seed, "odd", batches, in_parts, backward)


def second_backward_pass_is_refused(seed):
    batches = with_each(data(2, 4 * dist.get_world_size(), seed), False, True)
    train(seed, "plain", batches, once_more, backward, wrappers=OVERLAPPING)


class OnData(torch.optim.SGD):
    """Updates behind autograd's back."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data -= 0.1 * p.grad


def forget_to_finish(seed):
    """Every second step is refused by the name of what was forgotten, and nothing else."""
    fused = functools.partial(torch.optim.AdamW, fused=True)
    for wrapper, make in itertools.product(WRAPPERS, (torch.optim.AdamW, fused, OnData)):
        with about(wrapper, make):
            model = WRAPPERS[wrapper](build("odd", seed))
            optimizer = make(model.parameters())
            for fails in (False, True, False, True):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 6).double()).sum()
                with contextlib.ExitStack() as stack:
                    if fails:
                        error = stack.enter_context(pytest.raises(RuntimeError))
                    loss.backward()
                optimizer.step()
                if fails:
                    assert "finish_gradient_synchronization()" in str(error.value)
                    assert "no_sync" not in str(error.value)


# ---------------------------------------------------------------------------- backward passes that raise
# of a model: parameters that are reached late, the first after the second
REACHED_LATE = {
    "plain": ("layers.0.weight", "layers.1.weight"),
    "tied": ("embedding.weight", "twice.weight"),
    "odd": ("first.weight", "transposed"),
    "mixed": ("first.weight", "second.weight"),
}


def start_afresh_after_failures(seed):
    """In the same place on all ranks, or in two."""
    for (i, model_name), (j, wrapper) in itertools.product(enumerate(REACHED_LATE), enumerate(WRAPPERS)):
        alike = (i + j + seed) % 2
        late = REACHED_LATE[model_name][0 if alike else dist.get_rank() % 2]

        batches = with_each(data(3, 4 * dist.get_world_size(), seed), late, None, late)
        one = {wrapper: WRAPPERS[wrapper]}
        with about(f"alike={alike}"):
            train(seed, model_name, batches, after_failures, backward, wrappers=one)


def fail_on_one_rank(seed):
    """The others finish the step; the one that went on without it is told."""
    for wrapper, wrap in OVERLAPPING.items():
        with about(wrapper):
            model, x = wrap(build("odd", seed)), torch.ones(2, 6).double()
            if dist.get_rank() != 1:
                finish(model, x)
                for name, p in model.named_parameters():
                    assert (p.grad is None) == (not p.requires_grad or "unused" in name), name
                continue
            model.module.first.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model(x).sum().backward()
            model.zero_grad()
            with pytest.raises(RuntimeError, match="others have finished that step"):
                model(x)


def checkpoint_the_wrapper(seed):
    """Its forward pass runs again in the backward pass, which has begun, not failed."""

    def recomputed(model, x, y):
        outputs = [checkpoint(model, x, [layer], use_reentrant=False) for layer in (2, 0, 1)]
        (sum(outputs) - y).square().mean().backward()

    train(seed, "optional", data(2, 2 * dist.get_world_size(), seed), recomputed)


def share_memory_between_gradients(seed):
    """Autograd gives both parameters one memory; each must be averaged once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for wrapper in WRAPPERS:
        with about(wrapper):
            module = nn.ParameterList(nn.Parameter(torch.randn(2, 50)) for _ in range(2))
            a, b = module
            model = WRAPPERS[wrapper](module)
            ((a.view(100) + b.view(100)) * (1 + rank)).sum().backward()
            model.finish_gradient_synchronization()
            for p in (a, b):
                torch.testing.assert_close(p.grad, torch.full((2, 50), (ranks + 1) / 2))


def test_in_place_gradients_stay_where_autograd_put_them(alone):
    model = InPlaceDDP(Plain(), None)
    pointers = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pointers.update({p: p.grad.data_ptr()}))
    for _ in range(2):
        model.zero_grad()
        finish(model, torch.randn(4, 6))
        same = [p.grad.data_ptr() == pointers[p] for p in model.parameters() if p.dim() == 2]
        assert len(same) == 3 and all(same)


def average_by_group_calls(seed):
    """The path that NCCL takes, by way of Gloo's calls of several tensors, which have a sum but no mean."""
    original, launched = ddp_module.coalesced, []

    def coalesced(tensors, group, op):
        assert op == dist.ReduceOp.AVG
        launched.append(len(tensors))
        for tensor in tensors:
            tensor.div_(group.size())
        return original(tensors, group, dist.ReduceOp.SUM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp_module, "coalesced", coalesced)
        patch.setattr(ddp_module, "has_group_calls", lambda group, device: True)
        for wrapper, calls in (("overlapped", [1] * 6), ("in place None", [6])):
            launched.clear()
            one = {wrapper: WRAPPERS[wrapper]}
            batches = data(2, 2 * dist.get_world_size(), seed)
            train(seed, "plain", batches, wrappers=one)
            assert launched == calls * 2


def average_what_is_near_the_largest(seed):
    for dtype, large in ((torch.float16, 60000.0), (torch.bfloat16, 2.0**100), (torch.float64, 1e300)):
        for async_op in (False, True):
            tensor = torch.full((5,), large * (1 + dist.get_rank() % 2) / 2, dtype=dtype)
            work = ddp_module.average(tensor, dist.group.WORLD, async_op)
            if async_op:
                work.wait()
            torch.testing.assert_close(tensor, torch.full_like(tensor, large * 0.75), rtol=1e-2, atol=0)


# ------------------------------------------------------------------------------------------------- launches
def record_launches(permutations, wrapper):
    """The sizes of what was reduced, by step; how many at the call of finish; and what became ready, in its order."""
    model = build("optional", 0)
    ready = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ready.append(p.numel()))
    model = OVERLAPPING[wrapper](model)
    launched, early, original = [], [], ddp_module.average

    def average(tensor, *args, **kwargs):
        launched[-1].append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp_module, "average", average)
        for layers in permutations:
            launched.append([])
            ready.clear()
            model.zero_grad()
            model(torch.ones(2, 6).double(), layers).sum().backward()
            early.append(len(launched[-1]))
            model.finish_gradient_synchronization()
            if len(launched) == 1:
                first = list(ready)
    return launched, early, first


def launch_in_rank_0s_order(seed):
    """And the first bucket goes before the backward pass ends."""
    plans = (
        [[2, 0, 3, 1], [2, 0, 3, 1], [2, 1, 3, 0], [0, 2, 3]],
        [[3, 0, 2, 1], [1, 2, 0, 3], [0, 1], [0, 1, 2, 3]],
    )
    found = record_launches(plans[dist.get_rank()], "overlapped")
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    launched, early, ready = everyones[0]
    sizes = [p.numel() for p in build("optional", 0).parameters()]
    assert everyones[1][0] == launched
    assert launched[0] == sizes[::-1]
    assert launched[1:] == [ready] * 3 and launched[1] != launched[0]
    assert early[1] == len(sizes), "the pass is as it was in the first step: all were launched before finish"
    assert early[3] == 0, "layer 1 goes first and is not used"
    for wrapper in ("bucketed 0.0001", "bucketed 0.0016"):
        launched, early, _ = record_launches([[0, 1, 2, 3]] * 2, wrapper)
        assert early[1] == len(launched[1]) > 1


# ------------------------------------------------------------------------------------------------- buckets
def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def test_assign_fills_in_order_up_to_the_limit():
    a, b, c, d, e = parameters((4,), (8,), (100,), (1,), (3,))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    groups = lambda limit: [bucket.parameters for bucket in assign([a, b, half, c, d, e], limit)]
    same = lambda got, wanted: [[id(p) for p in g] for g in got] == [[id(p) for p in g] for g in wanted]
    assert same(groups(float("inf")), [[a, b, c, d, e], [half]])
    assert same(groups(48), [[a, b], [half], [c], [d, e]])
    assert same(groups(47.9), [[a], [b], [half], [c], [d, e]])
    assert same(groups(0), [[a], [b], [half], [c], [d], [e]])
    assert assign([], 1) == []


def test_bucket_holds_gradients_as_aligned_views_while_there_are_any():
    a, b, c = parameters((3, 5), (), (2, 2))
    bucket = Bucket([a, b, c])
    grads = {p: torch.randn_like(p) for p in (a, b, c)}
    for p in (c, a, b):
        p.grad = grads[p].clone()
    own = [StorageWeakRef(p.grad.untyped_storage()) for p in (a, b, c)]
    buffer = bucket.gathered()
    assert all(storage.expired() for storage in own)
    begins = [(p.grad.data_ptr() - buffer.data_ptr()) // 4 for p in (a, b, c)]
    assert begins == [0, 16, 20] and buffer.numel() == bucket.numel == 24
    assert all(torch.equal(p.grad, grads[p]) and p.grad.is_contiguous() for p in (a, b, c))

    buffer.mul_(2)  # as a reduction does
    (a.sum() + b).backward()  # autograd adds in place
    assert torch.equal(a.grad, 2 * grads[a] + 1) and torch.equal(b.grad, 2 * grads[b] + 1)
    assert bucket.gathered() is buffer

    kept, a.grad = a.grad, None
    (3 * a).sum().backward()
    c.grad = c.grad * 5  # someone's own tensor
    buffer = bucket.gathered()
    assert torch.equal(buffer[:15], torch.full((15,), 3.0)) and torch.equal(kept, 2 * grads[a] + 1)
    assert torch.equal(buffer[16:17], (2 * grads[b] + 1)[None])
    assert torch.equal(buffer[20:], 10 * grads[c].flatten())

    living = StorageWeakRef(buffer.untyped_storage())
    del buffer
    assert not living.expired()
    for p in (a, b, c):
        p.grad = None
    gc.collect()
    assert living.expired(), "no gradients, no memory"
    for p in (a, b, c):
        p.grad = grads[p].clone()
    assert torch.equal(bucket.gathered()[:15], grads[a].flatten())


def test_bucket_spares_gradients_that_somebody_has_kept():
    of_these = a, b, _ = parameters((4,), (4,), (4,))
    bucket = Bucket(of_these)

    def backward(first):
        for i, p in enumerate(of_these):
            p.grad = torch.full((4,), first + i)

    backward(1.0)
    bucket.gathered()
    kept = a.grad
    backward(5.0)  # as after zero_grad
    bucket.gathered()
    assert kept.tolist() == [1.0] * 4 and a.grad.tolist() == [5.0] * 4
    a.grad, b.grad = b.grad, a.grad  # each lies in the other one's place
    assert bucket.gathered().tolist() == [6.0] * 4 + [5.0] * 4 + [7.0] * 4
    assert a.grad.tolist() == [6.0] * 4 and b.grad.tolist() == [5.0] * 4


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("wrapper", KINDS)
def test_gradient_dtype_may_differ_from_the_parameters(wrapper, alone):
    a, b = parameters((4,), (5,), dtype=torch.bfloat16)
    a.grad_dtype = torch.float32
    model = WRAPPERS[wrapper](nn.ParameterList([a, b]))
    (3 * a.float().sum() + b.sum()).backward()
    model.finish_gradient_synchronization()
    assert a.grad.dtype == torch.float32 and b.grad.dtype == torch.bfloat16
    torch.testing.assert_close(a.grad, torch.full((4,), 3.0))


# ------------------------------------------------------------------------------------- compiled, autocast
def compile_around(where, wrap, module):
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    if where == "around":
        return compiled(wrap(module))
    if where == "before":
        return wrap(compiled(module))
    if where == "inside":
        module.layers[0] = compiled(module.layers[0])
        module.layers[1].compile(backend="aot_eager", fullgraph=True)
    model = wrap(module)
    if where == "in place, later":
        module.compile(backend="aot_eager", fullgraph=True)
    return model


def train_compiled(seed):
    """Each place with one of two wrappers, which change places from run to run."""
    for number, where in enumerate(("before", "inside", "in place, later", "around")):
        wrapper = ("overlapped", "bucketed 0.0016")[(number + seed) % 2]
        torch.compiler.reset()
        compiled = {f"{wrapper}, {where}": functools.partial(compile_around, where, WRAPPERS[wrapper])}
        batches = data(3, 4 * dist.get_world_size(), seed)
        train(seed, "plain", batches, wrappers=compiled)


# ---------------------------------------------------------------------------------- groups and wrong arguments
def train_in_two_groups(seed):
    """Ranks 0 and 2 train one model, ranks 1 and 3 another."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    train(
        seed + mine, "tied", data(2, 4, seed + mine), part=lambda batch: batch.chunk(2)[dist.get_rank() // 2],
        wrappers={name: functools.partial(wrap, process_group=groups[mine]) for name, wrap in WRAPPERS.items()},
        group=groups[mine],
    )  # fmt: skip
    words = r"process_group is .* on rank \d; expected a group that this rank is in"
    with pytest.raises(ValueError, match=words):
        NaiveDDP(Plain(), groups[1 - mine])


def refuse_what_differs(seed):
    """A module that differs between ranks is refused on all of them, which say what their own is."""
    rank = dist.get_rank()
    frozen = Plain()
    frozen.layers[0].bias.requires_grad_(rank == 0)
    dtype = (torch.float32, torch.float64)[rank]
    for make, own in (
        (lambda: NaiveDDP(nn.Linear(3, 2 + rank)), f"('weight', ({2 + rank}, 3), 'torch.float32', True)"),
        (lambda: FlatDDP(nn.Linear(3, 2, dtype=dtype)), f"('weight', (2, 3), '{dtype}', True)"),
        (lambda: OverlappedDDP(frozen), f"('layers.0.bias', (40,), 'torch.float32', {rank == 0})"),
        (lambda: BucketedDDP(Plain(), 1 + rank), f"{(1 + rank) * 2.0**20}"),
        *(
            (lambda wrap=pair[rank]: wrap(Plain()), f"rank {rank} has ('")
            for pair in itertools.combinations((NaiveDDP, FlatDDP, *map(WRAPPERS.get, ALIKE)), 2)
        ),
    ):
        with pytest.raises(ValueError, match="differ between the ranks; expected the same") as error:
            make()
        assert f"rank {rank} has" in str(error.value) and own in str(error.value)


# ------------------------------------------------------------------------------------------- all, on their ranks
CHECKS = {  # by the number of ranks
    1: [train_every_model],
    2: [
        train_every_model, train_with_accumulation, second_backward_pass_is_refused, forget_to_finish,
        start_afresh_after_failures, checkpoint_the_wrapper,
        share_memory_between_gradients, average_by_group_calls, average_what_is_near_the_largest,
        launch_in_rank_0s_order, train_compiled, refuse_what_differs, fail_on_one_rank,
    ],
    # two cores do not run three ranks at once, and each waits for the others
    3: [train_every_model, train_with_layers_skipped],
    4: [train_in_two_groups],
}  # fmt: skip


def run_checks(seed):
    for check in CHECKS[dist.get_world_size()]:
        with about(check.__name__):
            check(seed)


@pytest.mark.parametrize("ranks", CHECKS)
def test_on_ranks(ranks):
    distributed.run(run_checks, ranks, new_seed(), timeout=300)


# ------------------------------------------------------------------------------------------------- wrong arguments
class Table(nn.Module):
    """An embedding that only its use makes sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 3)

    def forward(self, ids):
        return self.out(nn.functional.embedding(ids, self.table, sparse=True))


@pytest.mark.parametrize("wrapper", KINDS)
def test_sparse_gradients_are_refused_by_name(wrapper, alone):
    for layer, name in (
        (nn.Embedding(9, 4, sparse=True), "weight"),
        (nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True)), "0.weight"),
        (nn.ParameterList([torch.eye(3).to_sparse()]), "0"),
    ):
        with pytest.raises(ValueError, match=f"sparse gradients: {name};"):
            WRAPPERS[wrapper](layer)
    model = WRAPPERS[wrapper](Table())
    with pytest.raises(ValueError, match="sparse gradients: table;"):
        finish(model, torch.tensor([1, 2]))


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class PassesBy(nn.Module):
    """Hands a parameter to a function that has no gradient for it."""

    def __init__(self):
        super().__init__()
        self.first, self.by = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return WithoutGradient.apply(self.first(x), self.by)


@pytest.mark.parametrize("wrapper", KINDS)
def test_a_gradient_that_is_none_is_one_that_is_missing(wrapper, alone):
    module = PassesBy()
    model = WRAPPERS[wrapper](module)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        model.finish_gradient_synchronization()
    assert module.by.grad is None and module.first.weight.grad.unique().tolist() == [4.0]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_wrapper_is_not_copied(duplicate, alone):
    with pytest.raises(TypeError, match=r"neither copied nor pickled.*state_dict"):
        duplicate(NaiveDDP(nn.Linear(2, 2)))


@pytest.mark.parametrize("wrapper", KINDS)
def test_a_module_that_has_changed_is_refused_by_name(wrapper, alone):
    x = torch.ones(2, 6)
    changes = (
        (lambda layers: layers.append(nn.Linear(3, 3, bias=False)), "3.weight"),
        (lambda layers: layers.__setitem__(2, nn.Linear(12, 3)), "2.weight, layers.2.bias"),
        (lambda layers: setattr(layers[2], "more", nn.Parameter(torch.ones(3))), "2.more"),
    )
    for (change, names), num_before in itertools.product(changes, (0, 1)):
        model = WRAPPERS[wrapper](Plain())
        layers = model.module.layers
        layers[0] = nn.Sequential(layers[0], nn.Linear(40, 40).requires_grad_(False))  # nothing new to train
        for _ in range(num_before):
            finish(model, x)
        change(layers)
        with pytest.raises(RuntimeError, match=f"since it was wrapped: layers.{names};"):
            finish(model, x)


@pytest.mark.parametrize("wrapper", KINDS)
def test_a_module_converted_after_it_was_wrapped(wrapper, alone):
    """Gradients have its new dtype, or it is refused."""
    model, x = WRAPPERS[wrapper](Plain()), torch.ones(2, 6)
    for convert in (model.float, model.double):
        convert()
        model.zero_grad()
        refused = convert == model.double and wrapper.startswith("bucketed")
        with contextlib.ExitStack() as stack:
            if refused:
                words = "gradients of torch.float64 on cpu in a bucket for torch.float32 on cpu"
                stack.enter_context(pytest.raises(ValueError, match=words))
            finish(model, x.to(next(model.parameters()).dtype))
        assert refused or all(p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "10", [1]])
def test_bucket_sizes_are_positive_numbers(bad):
    message = f"bucket_size_mb is {bad!r}; expected a positive number, or None"
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketedDDP(Plain(), bad)


@pytest.mark.parametrize("wrapper", [*KINDS, "fsdp"])
def test_errors_say_what_is_expected(wrapper, alone):
    wrap = EVERY[wrapper]
    with pytest.raises(ValueError, match=r"module is 3; expected a torch.nn.Module"):
        wrap(3)
    with pytest.raises(ValueError, match="module ReLU has no parameter that requires a gradient"):
        wrap(nn.ReLU())
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(nn.Sequential(NaiveDDP(Plain())))
    with pytest.raises(ValueError, match="process_group is 'all' on rank 0; expected a group"):
        wrap(Plain(), process_group="all")
    module = Plain()
    module.layers[0].bias.requires_grad_(False)
    model = wrap(module)
    with pytest.raises(ValueError, match="wrapped already"):
        NaiveDDP(nn.Sequential(module))
    with model.no_sync(), model.no_sync(), pytest.raises(RuntimeError, match="inside no_sync"):
        model.finish_gradient_synchronization()
    model.finish_gradient_synchronization()
    assert all(p.grad is None for p in model.parameters())
    module.layers[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen when the module was wrapped"):
        model.finish_gradient_synchronization()


@pytest.mark.parametrize(
    ("first", "second"), [*itertools.pairwise(["naive", "naive", "flat", *ALIKE, "naive", "fsdp"])]
)
def test_a_parameter_has_one_wrapper_at_a_time(first, second, alone):
    module = Plain()
    holder = nn.Module()
    holder.tied = module.layers[2].weight
    wrapped = [EVERY[first](module)]
    wrapped.append(wrapped)  # deleted, it waits for the garbage collector
    for again in (module, module.layers[2], nn.Sequential(module), nn.Sequential(wrapped[0]), holder):
        with pytest.raises(ValueError, match=r"wrapped already, .* gradients of .*(weight|tied)"):
            EVERY[second](again)
    EVERY[second](copy.deepcopy(module))
    del wrapped, again
    model = EVERY[second](module)
    finish(model, torch.ones(2, 6))


@pytest.mark.parametrize("refused", ["naive", "overlapped"])
def test_a_wrapper_that_was_refused_is_none(refused, alone, monkeypatch):
    """Although its error, which holds it, is alive."""
    module = Plain()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as error:
        patch.setattr(dist, "broadcast", fail)
        WRAPPERS[refused](module)
    assert NaiveDDP(module) and error


@pytest.mark.parametrize("wrapper", ALIKE)
def test_reentrant_checkpoints_of_a_shared_layer(wrapper, alone):
    """Each runs a backward pass of its own; `no_sync()` would not help."""
    model, x = WRAPPERS[wrapper](nn.Linear(6, 6)), torch.ones(2, 6, requires_grad=True)
    once = lambda x, reentrant: checkpoint(model, x, use_reentrant=reentrant)
    twice = lambda reentrant: once(once(x, reentrant), reentrant)
    with pytest.raises(RuntimeError, match=r"reached (weight|bias) twice .* use_reentrant=False") as error:
        twice(True).sum().backward()
    assert "no_sync" not in str(error.value)
    twice(False).sum().backward()
    model.finish_gradient_synchronization()


@pytest.mark.parametrize("wrapper", ["naive", "flat"])
def test_backward_passes_without_an_update_between_them_add_up(wrapper, alone):
    """Though one that no wrapper averages is updated meanwhile."""
    model, other = WRAPPERS[wrapper](Plain()), nn.Parameter(torch.ones(2))
    for _ in range(2):
        (model(torch.ones(2, 6)).sum() + other.sum()).backward()
        torch.optim.SGD([other], lr=0.1, fused=True).step()
    once = [p.grad.clone() for p in model.parameters()]
    model.finish_gradient_synchronization()
    model.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    for p, both in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(2 * p.grad, both)


def test_a_group_is_needed():
    with pytest.raises(RuntimeError, match="init_process_group"):
        NaiveDDP(Plain())


# ------------------------------------------------------------------------------------------------- adapters
def test_the_adapters_of_the_courses_suites_train(alone):
    """A step that `on_after_backward` had not finished would be refused by the next one's backward pass."""
    individual = adapters.get_ddp_individual_parameters, adapters.ddp_individual_parameters_on_after_backward
    bucketed = functools.partial(adapters.get_ddp_bucketed, bucket_size_mb=0.0016)
    for get, after_backward in (
        individual,
        (adapters.get_ddp, adapters.ddp_on_after_backward),
        (bucketed, adapters.ddp_bucketed_on_after_backward),
    ):
        module = Plain()
        ddp_model = get(module)
        assert ddp_model.module is module
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
        for _ in range(2):
            before = [p.detach().clone() for p in module.parameters()]
            adapters.ddp_bucketed_on_train_batch_start(ddp_model, optimizer)
            ddp_model(torch.randn(4, 6)).sum().backward()
            after_backward(ddp_model, optimizer)
            optimizer.step()
            assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
