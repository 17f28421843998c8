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
from cs336_systems.parallel.shards import FlatWeights, Weight


def tensors_of(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """The model's parameters and buffers by the names that state dicts have for them."""
    return model.module.state_dict(keep_vars=True)


def weights_of(model: FullyShardedDataParallel) -> dict[Tensor, Weight]:
    """The sharded weights by their parameters."""
    return {weight.parameter: weight for flat in model.flats for weight in flat.weights}


def is_piece(value: Any, weight: Weight) -> bool:
    """Whether something, of an optimizer's state say, has an element for each that this rank has of the weight."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == weight.parameter.shape


# ----------------------------------------------------------------------------------------------------- whole
def full_state_dict(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """On rank 0 of the group the model's whole state by name, on the CPU; {} on the others. All ranks call it.

    On the device it takes one unit's weights at a time.
    """
    first = model.process_group.rank() == 0
    whole: dict[Tensor, Tensor] = {}
    for flat in model.flats:
        there = flat.assembled()
        whole |= {weight.parameter: tensor.cpu() for weight, tensor in there.items() if first}
    if not first:
        return {}
    return {
        name: whole[t] if t in whole else t.detach().cpu().clone() for name, t in tensors_of(model).items()
    }


@torch.no_grad()
def load_full_state_dict(model: FullyShardedDataParallel, state: Mapping[str, Tensor]) -> None:
    """Gives each rank its shards, and what is replicated, of the whole state dict that rank 0 has; others may give {}.

    On the device it takes one unit's weights at a time. All ranks call it. ValueError on all, before anything is taken,
    where names or shapes differ from the model's.
    """
    weights, own = weights_of(model), tensors_of(model)
    with agreement(model.process_group):
        if model.process_group.rank() == 0:
            _check_fits(
                state, {name: weights[t].shape if t in weights else t.shape for name, t in own.items()}
            )
    names = {tensor: name for name, tensor in own.items()}
    for flat in model.flats:
        flat.scatter(lambda weight, place: place.copy_(state[names[weight.parameter]]))
    if model.process_group.rank() == 0:
        for tensor, name in names.items():
            if tensor not in weights:
                tensor.copy_(state[name])
    model._copy_from_rank_0()


def _check_fits(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    if wrong := sorted(shapes.keys() ^ state.keys()):
        raise ValueError(
            f"the state dict has other names than the model: {', '.join(wrong)} in one of them only"
        )
    for name, shape in shapes.items():
        if shape != state[name].shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}; expected {tuple(shape)}")


def _share(whole: Tensor, weight: Weight) -> Tensor:
    return whole.reshape(-1)[weight.start : weight.stop]


# ------------------------------------------------------------------------------------------------- optimizer
def _parameters(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> dict[int, Tensor]:
    """The optimizer's parameters by the numbers that a state dict's groups have for them."""
    return {
        number: parameter
        for own, packed in zip(optimizer.param_groups, groups, strict=True)
        for number, parameter in zip(packed["params"], own["params"], strict=True)
    }


def full_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """On rank 0 what the plain optimizer's `state_dict` would be, tensors on the CPU; {} on the others.

    Of a sharded weight, state with an element for each of the shard's is put together; the rest (counters) is taken as
    it is. All ranks call it; on the device it takes one state tensor of a unit at a time.
    """
    packed = optimizer.state_dict()
    numbers = {p: number for number, p in _parameters(optimizer, packed["param_groups"]).items()}
    first = model.process_group.rank() == 0
    whole = {
        number: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
        for number, state in packed["state"].items()
    }
    for flat in model.flats:
        for key in _elementwise(flat, optimizer):
            states = {weight: optimizer.state.get(weight.parameter, {}).get(key) for weight in flat.weights}
            there = flat.assembled({weight: state for weight, state in states.items() if state is not None})
            for weight, tensor in there.items():
                if first:
                    whole[numbers[weight.parameter]][key] = tensor.cpu()
    return {**packed, "state": whole} if first else {}


def _elementwise(flat: FlatWeights, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the state of these weights that has an element for each of theirs; the same on all ranks."""
    return sorted({
        key
        for weight in flat.weights
        for key, value in optimizer.state.get(weight.parameter, {}).items()
        if is_piece(value, weight)
    })  # fmt: skip


def load_full_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Takes the settings, and of the state this rank's share, from what `full_optimizer_state_dict` or a plain
    optimizer over the same parameters has returned, which each rank has. ValueError where groups differ."""
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state dict has groups of {sizes[0]} parameters; expected {sizes[1]}")
    weights = weights_of(model)
    parameters = _parameters(optimizer, state_dict["param_groups"])
    mine = {}
    for number, state in state_dict["state"].items():
        weight = weights.get(parameters[number])
        mine[number] = {
            key: _share(value, weight).clone()
            if weight is not None and isinstance(value, Tensor) and value.shape == weight.shape
            else value
            for key, value in state.items()
        }
    optimizer.load_state_dict({**state_dict, "state": mine})
