"""Whole state dicts of a fully sharded model and of its optimizer, on rank 0.

    weights, moments = full_state_dict(model), full_optimizer_state_dict(model, optimizer)     # on all ranks
    if rank == 0:
        torch.save({"weights": weights, "moments": moments}, path)

They are what the plain model's and optimizer's `state_dict` would be, so either loads the other's, and any number of
ranks loads what any other has saved. Sharded ones: `sharded_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cs336_systems.parallel.agreement import agreement
from cs336_systems.parallel.fsdp import FullyShardedDataParallel
from cs336_systems.parallel.shards import Weight


def tensors_of(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """The model's parameters and buffers by the names that state dicts have for them."""
    return model.module.state_dict(keep_vars=True)


def weights_of(model: FullyShardedDataParallel) -> dict[Tensor, Weight]:
    """The sharded weights by their parameters."""
    return {weight.parameter: weight for flat in model.flats for weight in flat.weights}


def is_piece(value: Any, weight: Weight | None) -> bool:
    """Whether something, of an optimizer's state say, has an element for each that this rank has of a weight."""
    return weight is not None and isinstance(value, Tensor) and value.shape == weight.parameter.shape


# ----------------------------------------------------------------------------------------------------- model
def full_state_dict(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """On rank 0 of the group the model's whole state by name, on the CPU; {} on the others. All ranks call it.

    On the device it takes one unit's weights at a time.
    """
    first = model.process_group.rank() == 0
    whole: dict[Tensor, Tensor] = {}
    for flat in model.flats:
        there = flat.assembled()
        whole |= {weight.parameter: tensor.cpu() for weight, tensor in there.items() if first}
    named = tensors_of(model).items() if first else ()
    return {name: whole[t] if t in whole else t.detach().cpu().clone() for name, t in named}


@torch.no_grad()
def load_full_state_dict(model: FullyShardedDataParallel, state: Mapping[str, Tensor]) -> None:
    """Gives each rank its shards, and what is replicated, of the whole state dict that rank 0 has; others may give {}.

    On the device it takes one unit's weights at a time. All ranks call it. ValueError on all, before anything is taken,
    where names or shapes differ from the model's.
    """
    first, weights, own = model.process_group.rank() == 0, weights_of(model), tensors_of(model)
    with agreement(model.process_group):
        if first and (wrong := sorted(own.keys() ^ state.keys())):
            raise ValueError(
                f"the state dict has other names than the model: {', '.join(wrong)} in one of them only"
            )
        for name, tensor in own.items() if first else ():
            shape = weights[tensor].shape if tensor in weights else tensor.shape
            if shape != state[name].shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}; expected {tuple(shape)}")
    names = {tensor: name for name, tensor in own.items()}
    for flat in model.flats:
        flat.scatter(lambda weight, place: place.copy_(state[names[weight.parameter]]))
    for tensor in names.keys() - weights.keys() if first else ():
        tensor.copy_(state[names[tensor]])
    model._copy_from_rank_0()


# ------------------------------------------------------------------------------------------------- optimizer
def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """By the numbers that a state dict has for them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def full_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """On rank 0 what the plain optimizer's `state_dict` would be, tensors on the CPU; {} on the others.

    Of a sharded weight, state with an element for each of the shard's is put together; the rest (counters) is taken as
    it is. All ranks call it; on the device it takes one state tensor of a unit at a time.
    """
    packed = optimizer.state_dict()
    numbers = {p: number for number, p in enumerate(_parameters(optimizer))}
    first = model.process_group.rank() == 0
    whole = {
        number: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
        for number, state in packed["state"].items()
    }
    for flat in model.flats:
        states = {weight: optimizer.state.get(weight.parameter, {}) for weight in flat.weights}
        pieces = {
            (key, w): value for w, own in states.items() for key, value in own.items() if is_piece(value, w)
        }
        for key in sorted({key for key, _ in pieces}):
            there = flat.assembled({w: value for (name, w), value in pieces.items() if name == key})
            for weight, tensor in there.items() if first else ():
                whole[numbers[weight.parameter]][key] = tensor.cpu()
    return {**packed, "state": whole} if first else {}


def load_full_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Takes the settings, and of the state this rank's share, from what `full_optimizer_state_dict` or a plain
    optimizer over the same parameters has returned, which each rank has (`mmap=True` reads no more than is taken).
    ValueError where groups differ."""
    both = state_dict["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in groups] for groups in both]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state dict has groups of {sizes[0]} parameters; expected {sizes[1]}")
    weights, parameters = weights_of(model), _parameters(optimizer)

    def share(value: Any, weight: Weight | None) -> Any:
        whole = weight is not None and isinstance(value, Tensor) and value.shape == weight.shape
        return value.reshape(-1)[weight.start : weight.stop].clone() if whole else value

    mine = {
        number: {key: share(value, weights.get(parameters[number])) for key, value in state.items()}
        for number, state in state_dict["state"].items()
    }
    optimizer.load_state_dict({**state_dict, "state": mine})
