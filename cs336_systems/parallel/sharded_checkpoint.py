"""What `torch.distributed.checkpoint` saves of a fully sharded run, and loads, at any number of ranks:

    state = {"run": ShardedState(model, optimizer)}         # on all ranks
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)

Each rank writes and reads its own elements. The checkpoint has the plain model's names and shapes, and of the optimizer
what torch's `get_optimizer_state_dict` gives: models that are not sharded, or otherwise, read it too.

Our shards are ranges of a weight's elements, row by row, which no `DTensor` can tell: torch cuts between rows alone. So
they go as tensors of a class of their own, by torch's protocol for such (`torch.distributed._checkpointable`).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from cs336_systems.parallel.fsdp import FullyShardedDataParallel
from cs336_systems.parallel.sharded_state import is_piece, tensors_of, weights_of
from cs336_systems.parallel.shards import Weight

_NOT_FROM_ZEROS = (torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD)


class ShardedState:
    """A model's weights and an optimizer's state, by the two methods that torch's checkpoints call.

    optimizer: None for the weights alone. One that has no state of some parameters gets zeros for them here, as it
    begins with; ValueError for those that do not.
    """

    def __init__(
        self, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._names = {p: name for name, p in model.module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """`{"model": …, "optimizer": {"state": …, "param_groups": …}}`, by names; the tensors themselves, no copies."""
        weights = weights_of(self.model)

        def shared(of: Tensor, value: Any) -> Any:
            return Shard(value, weights[of]) if is_piece(value, weights.get(of)) else value

        own = tensors_of(self.model).items()
        state: dict[str, Any] = {"model": {name: shared(t, t.detach()) for name, t in own}}
        if self.optimizer is not None:
            _begin(self.optimizer)
            states = {
                self._names[p]: {key: shared(p, value) for key, value in own.items()}
                for p, own in self.optimizer.state.items()
            }
            state["optimizer"] = {"state": states, "param_groups": self._groups()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's settings; tensors have been loaded in place. ValueError for other groups."""
        if self.optimizer is None:
            return
        groups, saved = self._groups(), state["optimizer"]["param_groups"]
        if [group["params"] for group in groups] != [group["params"] for group in saved]:
            raise ValueError(
                "the checkpoint's optimizer has other groups of parameters; expected the model's, in order"
            )
        for group, settings in zip(self.optimizer.param_groups, saved, strict=True):
            group |= settings | {"params": group["params"]}
        for p, own in self.optimizer.state.items():
            loaded = state["optimizer"]["state"][self._names[p]]
            own |= {key: value for key, value in loaded.items() if not isinstance(value, Tensor)}

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{**group, "params": [self._names[p] for p in group["params"]]} for group in groups]


class Shard(Tensor):
    """This rank's elements, (n,), of something in a weight's shape, read and written in place: a checkpoint has boxes.

    A range of a matrix's elements is three at most: the rest of a row, whole rows, and a part of the next.
    """

    @staticmethod
    def __new__(cls, piece: Tensor, weight: Weight) -> Shard:
        self = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=piece.dtype, device=piece.device)
        self.boxes, columns, begin = {}, weight.shape[1], 0
        while left := len(piece) - begin:
            row, column = divmod(weight.start + begin, columns)
            rows, width = 1 if column else max(left // columns, 1), min(columns - column, left)
            self.boxes[torch.Size((row, column))] = piece[begin : begin + rows * width].view(rows, width)
            begin += rows * width
        return self

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{operator} of a shard in a state dict; it is for checkpoints alone")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.shape) for offsets, box in self.boxes.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        def item(chunk: ChunkStorageMetadata) -> WriteItem:
            properties = TensorProperties.create_from_tensor(self.boxes[chunk.offsets])
            data = TensorWriteData(chunk, properties, self.shape)
            return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

        return list(map(item, self.__create_chunk_list__()))

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index.offset]


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Has it make state for the parameters that it has none of, by a step of zeros."""
    groups = optimizer.param_groups
    new = {
        p: p.grad for group in groups for p in group["params"] if p.requires_grad and p not in optimizer.state
    }
    if new and (isinstance(optimizer, _NOT_FROM_ZEROS) or any(group.get("dampening") for group in groups)):
        raise ValueError(
            f"{type(optimizer).__name__} has no state yet, and does not begin with zeros; make a step before saving"
        )
    for p in new:
        p.grad = torch.zeros_like(p)
    optimizer.param_groups = [
        group | {"lr": 0 * group["lr"], "params": [p for p in group["params"] if p in new]}
        for group in groups
    ]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        for p, grad in new.items():
            p.grad = grad
    for p in new:
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()
