"""Training on several ranks beside the same model in a single process: how all wrappers are tested, sharded or not.

A batch is (inputs, targets, what its backward pass is told), the same on all ranks, which take their parts of two.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import about, fail, share


def with_each(batches, *what):
    """Batches, and beside each what its backward pass is told."""
    return [(*batch, said) for batch, said in zip(batches, what, strict=True)]


def loss_of(model, x, y=None):
    """y: the targets, for ids by default numbers made of them."""
    return (model(x).double() - (x[..., None] / 11 if y is None else y)).square().mean()


def backward(model, x, y=None, *ignored):
    loss_of(model, x, y).backward()


def spoil(model, group=None):
    """Other weights and buffers on every rank of the group but its first: the wrapper must copy that one's."""
    rank = dist.get_rank(group)
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if rank:
                tensor.copy_(torch.ones_like(tensor) * rank)


def whole_parameters(model):
    return model.full_parameters() if hasattr(model, "full_parameters") else contextlib.nullcontext()


def full_gradients(model):
    """The gradients by name, put together where they are sharded; None where there is none."""
    weights = {weight.parameter: weight for flat in getattr(model, "flats", ()) for weight in flat.weights}
    return {
        name: weights[p].assembled(p.grad, model.process_group)
        if p in weights and p.grad is not None
        else p.grad
        for name, p in model.module.named_parameters()
    }


def assert_like(model, alone, group=None):
    """Gradients and weights of the model that is alone, the same on all ranks; the same gradients are None."""
    narrow = any(p.dtype != torch.float64 for p in alone.parameters())
    bounds = {"rtol": 1e-5, "atol": 1e-6} if narrow else {"rtol": 1e-9, "atol": 1e-11}
    grads = full_gradients(model)
    with whole_parameters(model):
        for (name, p), q in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            assert (grads[name] is None) == (q.grad is None), (
                f"the gradient of {name}: {grads[name]}, not {q.grad}"
            )
            for what, one, other in (("", p, q), ("gradient of ", grads[name], q.grad)):
                if one is not None:
                    message = lambda m, what=what, name=name: f"{what}{name}: {m}"
                    torch.testing.assert_close(one, other, **bounds, msg=message)
        everything = [*model.module.parameters(), *(grads[name] for name in sorted(grads))]
        distributed.assert_same_on_all_ranks(everything, group)


def train_beside(seed, module, wrap, batches, backward=backward, whole=None, part=share, group=None):
    """Trains a wrapped model on this rank's part of each batch beside the same model, alone, on all of it.

    After each step both have the same gradients and weights. `whole` is the backward pass of the model that is alone,
    where it is another than `backward`. Gradients are dropped or zeroed between steps, at random; the optimizer was
    made before the model was wrapped, or after that.
    """
    rng = random.Random(seed)
    alone = copy.deepcopy(module)
    spoil(module, group)
    early = torch.optim.AdamW(module.parameters(), lr=0.01)
    model = wrap(module)
    with whole_parameters(model):
        for mine, other in zip(model.module.state_dict().values(), alone.state_dict().values(), strict=True):
            assert torch.equal(mine, other), "parameters and buffers are those of the group's first rank"
    late = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizers = rng.choice((early, late)), torch.optim.AdamW(alone.parameters(), lr=0.01)
    for batch in batches:
        set_to_none = rng.random() < 0.5
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, *map(part, batch[:2]), *batch[2:])
        model.finish_gradient_synchronization()
        assert not any(flat.gathered_bytes for flat in getattr(model, "flats", ()))
        (whole or backward)(alone, *batch)
        assert_like(model, alone, group)
        for optimizer in optimizers:
            optimizer.step()
    assert_like(model, alone, group)
    return model


def train_in_each(wrappers, seed, make, *how, **more):
    """As `train_beside`, in each of several wrappers, by name."""
    for name, wrap in wrappers.items():
        with about(name):
            train_beside(seed, make(seed), wrap, *how, **more)


# ------------------------------------------------------------------------------------------- several backward passes
PARTS = 3
WAYS = (3, False), (2, False), (1, True), (0, True)
"""How many small batches are inside no_sync(), and whether each of the others is finished by itself."""


def in_parts(model, x, y, way):
    inside, each = way
    small = list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))
    with torch.no_grad():
        model(x)  # for looking only
    with model.no_sync():
        for part in small[:inside]:
            (loss_of(model, *part) / PARTS).backward()
    for part in small[inside:]:
        (loss_of(model, *part) / PARTS).backward()
        if each:
            model.finish_gradient_synchronization()


def once_more(model, x, y, quietly):
    """A second pass is refused where gradients are under way; the step can be finished, and the next one is right."""
    backward(model, x, y)
    words = r"second backward pass .* (\w+\.)+(weight|bias), .*no_sync\(\)"
    with model.no_sync() if quietly else contextlib.nullcontext(), pytest.raises(RuntimeError, match=words):
        backward(model, x, y)
    model.finish_gradient_synchronization()
    model.zero_grad()
    backward(model, x, y)
    model.finish_gradient_synchronization()  # and once more by the caller: the mean of means is the mean


def after_failures(model, x, y, late):
    """What follows a backward pass that has raised, on all ranks, is as if it had not been; in two parts."""
    if late:
        handle = model.module.get_parameter(late).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            backward(model, x, y)
        handle.remove()
        if not hasattr(model, "flats"):  # of weights that are sharded nothing was added to gradients
            model.zero_grad(set_to_none=False)
    with model.no_sync():
        (loss_of(model, x, y) / 2).backward()
    (loss_of(model, x, y) / 2).backward()
