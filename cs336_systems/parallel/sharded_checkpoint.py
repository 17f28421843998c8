"""What `torch.distributed.checkpoint` saves of a fully sharded run, and loads, at any number of ranks:

    state = {"run": ShardedState(model, optimizer)}         # on all ranks
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)

Each rank writes and reads its own elements. The checkpoint has the plain model's names and shapes, and what torch's
`get_optimizer_state_dict` makes of the optimizer, so that models that are not sharded, or otherwise, read it too.

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


class ShardedState:
    """A model's weights, and an optimizer's state, with the methods that torch's checkpoints call.

    An optimizer without state, of all parameters or of some, gets one of zeros here, as a first step begins with.
    """

    def __init__(
        self, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._names = {p: name for name, p in model.module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """The tensors as they are, to be read or written: `{"model": …, "optimizer": {"state": …, "param_groups": …}}`,
        parameters by their names."""
        weights = weights_of(self.model)

        def shared(of: Tensor, value: Any) -> Any:
            return Shard(value, weights[of]) if of in weights and is_piece(value, weights[of]) else value

        state: dict[str, Any] = {
            "model": {n: shared(t, t.detach()) for n, t in tensors_of(self.model).items()}
        }
        if self.optimizer is not None:
            _begin(self.optimizer)
            states = {
                self._names[p]: {key: shared(p, value) for key, value in own.items()}
                for p, own in self.optimizer.state.items()
            }
            state["optimizer"] = {"state": states, "param_groups": self._groups()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what is no tensor, when tensors have been loaded in place. ValueError for other groups of parameters."""
        if self.optimizer is None:
            return
        groups, saved = self._groups(), state["optimizer"]["param_groups"]
        if [group["params"] for group in groups] != [group["params"] for group in saved]:
            raise ValueError(
                "the checkpoint's optimizer has other groups of parameters; expected the same, in order"
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
    """This rank's elements, (n,), of a weight's values, or of something else in its shape; read and written in place.

    A checkpoint consists of boxes. A range of a matrix's elements is three at most: the rest of a row, whole rows, and
    a part of the next.
    """

    @staticmethod
    def __new__(cls, piece: Tensor, weight: Weight) -> Shard:
        self = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=piece.dtype, device=piece.device)
        self.boxes, columns, begin = {}, weight.shape[1], 0
        while begin < len(piece):
            row, column = divmod(weight.start + begin, columns)
            left = len(piece) - begin
            rows, width = 1 if column else max(left // columns, 1), min(columns - column, left)
            self.boxes[torch.Size((row, column))] = piece[begin : begin + rows * width].view(rows, width)
            begin += rows * width
        return self

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{operator} of a shard in a state dict; it is for checkpoints alone")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.shape) for offsets, box in self.boxes.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(box), self.shape),
            )
            for chunk, box in zip(self.__create_chunk_list__(), self.boxes.values(), strict=True)
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index.offset]


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Has it make state for the parameters that it has none of, by a step of zeros."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates, grads = [group["lr"] for group in optimizer.param_groups], [p.grad for p in parameters]
    new = {p for p in parameters if p.requires_grad and p not in optimizer.state}
    for p in parameters:
        p.grad = torch.zeros_like(p) if p in new else None
    for group in optimizer.param_groups:
        group["lr"] = 0 * group["lr"]
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    for p in new:
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()
