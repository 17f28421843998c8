"""The state of an optimizer, and of its groups, on its way from the ranks that hold it to rank 0."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(local: dict[Any, Any], numbered: dict[int, Tensor], group: dist.ProcessGroup) -> dict[Any, Any]:
    """The state of all parameters on rank 0 of the group, tensors on the CPU; {} on the others. All ranks call it.

    local: this rank's, as in a state dict; numbered: the parameters by the numbers that it has for them.
    """

    def exchange(operation: Callable[..., Any], tensors: Iterable[Tensor], peer: int) -> None:
        mail = [
            dist.P2POp(operation, bytes_of(tensor), group=group, group_peer=peer)
            for tensor in tensors
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(mail) if mail else []:
            work.wait()

    # Tensors where their parameter lies go from device to device. One message before tells the rest (counters,
    # numbers) and announces those tensors, by tensors without memory.
    heavy = {
        index: {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor)
            and value.dim()
            and value.device == numbered[index].device
            and value.layout == torch.strided
        }
        for index, state in local.items()
        if index in numbered
    }
    light = {
        index: local[index] | {k: torch.empty_like(v, device="meta") for k, v in tensors.items()}
        for index, tensors in heavy.items()
    }
    letters: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(_saved(light), letters, group=group, group_dst=0)
    if letters is None:
        for tensors in heavy.values():
            dense = (v if is_dense(v) else v.clone() for v in tensors.values())  # clones leave out the gaps
            exchange(dist.isend, dense, peer=0)
        return {}
    whole = {
        index: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in local[index].items()}
        for index in heavy
    }
    for owner, letter in enumerate(letters[1:], start=1):
        for index, state in torch.load(io.BytesIO(letter), map_location="cpu", weights_only=True).items():
            arriving = {
                name: torch.empty_like(value, device=numbered[index].device)
                for name, value in state.items()
                if isinstance(value, Tensor) and value.is_meta
            }
            exchange(dist.irecv, arriving.values(), peer=owner)
            whole[index] = state | {k: v.cpu() for k, v in arriving.items()}
    return {k: v for k, v in local.items() if k not in numbered} | dict(sorted(whole.items()))


def settings_of_owners(
    groups: list[dict[str, Any]], owned: Collection[int], group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """The param groups of a state dict; on rank 0 with the settings of a rank that has some of their parameters
    (`owned`: this one's, by number). What an optimizer counts in its groups it may not count in those that are empty.
    All ranks call it."""
    mine = [
        {name: value for name, value in saved.items() if name != "params" and not isinstance(value, Tensor)}
        if any(index in owned for index in saved["params"])
        else {}
        for saved in groups
    ]
    everyones: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, everyones, group=group, group_dst=0)
    told = zip(groups, *(everyones or [mine]), strict=True)
    return [saved | next(filter(None, found), {}) for saved, *found in told]


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, in any order of dimensions."""
    if tensor.layout != torch.strided:
        return False
    # torch keeps the strides of such a tensor, and of no other, when it makes one like it
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as one vector of bytes: any dtype, any order of dimensions, no copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
