"""Ranks tell each other what they were given, so that none waits for one that was given something else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

_RAISED = "what was raised"


@contextmanager
def agreement(group: dist.ProcessGroup | None) -> Iterator[dict[str, Any]]:
    """Yields a dict to be filled with what must be the same on all ranks of the group, by what it is called.

    All ranks enter and leave it; one rank alone, or None, communicates nothing. Errors: ValueError on all ranks where
    they differ; where some raise inside, the others raise a ValueError that tells it.
    """
    mine: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        yield mine
    except Exception as error:
        failure = error
        mine = {_RAISED: f"{type(error).__name__}: {error}"}
    everyones: list[Any] = [mine]
    if group is not None and group.size() > 1:
        everyones *= group.size()
        dist.all_gather_object(everyones, {what: _comparable(value) for what, value in mine.items()}, group)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(everyones):
        for what in {_RAISED: None} | everyones[0] | theirs:
            if (first := everyones[0].get(what)) != (other := theirs.get(what)):
                raise ValueError(
                    f"all ranks must be given the same, in the same order; {what} is {first} on rank 0 and {other} on "
                    f"rank {rank}"
                )


def _comparable(value: Any) -> Any:
    """The numbers of a tensor, whatever its device; of an object what it prints, without an address."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    if value is None or isinstance(value, int | float | complex | str):
        return value
    return re.sub(r" at 0x\w+", "", repr(value))
