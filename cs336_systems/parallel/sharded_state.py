"""State dicts of a fully sharded model and of its optimizer: whole ones, on rank 0, and sharded ones.

    states = ShardedState(model, optimizer)                 # on all ranks
    weights, moments = states.full_state_dict()
    if rank == 0:
        torch.save({"weights": weights, "moments": moments}, path)

They are what the plain model's and optimizer's `state_dict` would be, so either loads the other's, and any number of
ranks loads what any other has saved. The same is so of what `torch.distributed.checkpoint` saves, and loads:

    dcp.save({"run": states}, checkpoint_id=folder)
    dcp.load({"run": states}, checkpoint_id=folder)

Each rank writes and reads its own elements. The checkpoint has the plain model's names and shapes, and of the optimizer
what torch's `get_optimizer_state_dict` gives: models that are not sharded, or otherwise, read it too. Parameters that
had no gradient yet have no state in it; `DefaultLoadPlanner(allow_partial_load=True)` has it begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from cs336_systems.parallel.fsdp import FullyShardedDataParallel
from cs336_systems.parallel.shards import Weight


class ShardedState:
    """A model's weights and an optimizer's state; optimizer: None for the weights alone. All ranks make all calls."""

    def __init__(
        self, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._weights = {weight.parameter: weight for weight in model.weights}

    def _tensors(self) -> dict[str, Tensor]:
        return self.model.module.state_dict(keep_vars=True)

    def _parameters(self) -> list[Tensor]:
        """Of the optimizer, by the numbers that a state dict has for them."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _is_piece(self, value: Any, of: Tensor) -> bool:
        """Whether something, of an optimizer's state say, has an element for each that this rank has of a weight."""
        return of in self._weights and isinstance(value, Tensor) and value.shape == of.shape

    # ------------------------------------------------------------------------------------------------- whole
    def full_state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """On rank 0 of the group the model's whole state by name, and what the plain optimizer's `state_dict` would be,
        tensors on the CPU; {} on the others, and without an optimizer.

        Of a sharded weight, state with an element for each of the shard's is put together; the rest (counters) is taken
        as it is. On the device it takes one tensor of a weight at a time.
        """
        group = self.model.process_group

        def whole(value: Any, of: Tensor) -> Any:
            if self._is_piece(value, of):
                value = self._weights[of].assembled(value, group)
            if group.rank():
                return None
            return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

        own = self._tensors()
        tensors = {t: whole(t, t) for t in own.values()}
        moments = self.optimizer.state_dict() if self.optimizer is not None else {}
        if moments:
            of = self._parameters()
            moments["state"] = {
                number: {key: whole(value, of[number]) for key, value in state.items()}
                for number, state in moments["state"].items()
            }
        return ({}, {}) if group.rank() else ({name: tensors[t] for name, t in own.items()}, moments)

    def load_full_state_dict(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Any] | None = None
    ) -> None:
        """Takes this rank's shards, and what is replicated, from such states, or from those of a plain model and its
        optimizer, which each rank has (`mmap=True` reads no more than is taken). Errors: torch's where names, groups or
        shapes differ; ValueError for another shape of a weight that is sharded."""
        own, mine = self._tensors(), dict(weights)
        for name, value in weights.items():
            if (weight := self._weights.get(own.get(name))) is not None:
                if value.shape != weight.shape:
                    raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(weight.shape)}")
                mine[name] = weight.share_of(value)
        self.model.module.load_state_dict(mine)
        if moments is None:
            return
        of = dict(enumerate(map(self._weights.get, self._parameters())))

        def share(value: Any, weight: Weight | None) -> Any:
            whole = weight is not None and isinstance(value, Tensor) and value.shape == weight.shape
            return weight.share_of(value).clone() if whole else value

        state = {
            number: {key: share(value, of.get(number)) for key, value in values.items()}
            for number, values in moments["state"].items()
        }
        self.optimizer.load_state_dict({**moments, "state": state})

    # ----------------------------------------------------------------------------------------------- sharded
    def state_dict(self) -> dict[str, Any]:
        """`{"model": …, "optimizer": {"state": …, "param_groups": …}}`, by names; the tensors themselves, no copies. An
        optimizer without any state is given what it has after a step of zeros, as torch does."""

        def shared(value: Any, of: Tensor) -> Any:
            return Shard(value, self._weights[of]) if self._is_piece(value, of) else value

        own = {name.replace("_orig_mod.", ""): t for name, t in self._tensors().items()}  # as if not compiled
        state: dict[str, Any] = {"model": {name: shared(t.detach(), t) for name, t in own.items()}}
        if self.optimizer is not None:
            moments = get_optimizer_state_dict(self.model.module, self.optimizer)
            for name, values in moments["state"].items():
                moments["state"][name] = {key: shared(value, own[name]) for key, value in values.items()}
            state["optimizer"] = moments
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's settings, and of its state what is no tensor: these have been loaded in place."""
        if self.optimizer is not None:
            moments, loaded = get_optimizer_state_dict(self.model.module, self.optimizer), state["optimizer"]
            for name, own in moments["state"].items():
                own |= {k: v for k, v in loaded["state"][name].items() if not isinstance(v, Tensor)}
            moments["param_groups"] = loaded["param_groups"]
            set_optimizer_state_dict(self.model.module, self.optimizer, moments)


class Shard(LocalShardsWrapper):
    """This rank's elements, (n,), of something in a weight's shape, read and written in place: a checkpoint has boxes.

    A range of a matrix's elements, row by row, is three at most: the rest of a row, whole rows, and a part of the next.
    (A `DTensor` cannot tell it: torch cuts between rows alone.)
    """

    device: torch.device = torch.device("cpu")

    @staticmethod
    def __new__(cls, piece: Tensor, weight: Weight) -> Shard:
        boxes, columns, begin = {}, weight.shape[1], 0
        while left := len(piece) - begin:
            row, column = divmod(weight.start + begin, columns)
            rows, width = 1 if column else max(left // columns, 1), min(columns - column, left)
            boxes[row, column] = piece[begin : begin + rows * width].view(rows, width)
            begin += rows * width
        self = LocalShardsWrapper.__new__(cls, list(boxes.values()), list(boxes))
        # of the whole, to which the boxes belong, if there are any
        self.size, self.device = lambda: weight.shape, piece.device
        return self
