"""Which module of a model reads which parameters in its forward pass: who has to wait until they have arrived.

As a rule a module reads the parameters that are registered on it, and calls its children for theirs. Some read their
children's as well: `nn.MultiheadAttention` takes the weight of its output projection and never calls it, a
`ParameterList` has no forward at all. All of these have parameters of their own too, or a child without a forward. So
whatever has, is taken to read all that is beneath it; that is safe, if early.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def readers(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """(part, parameters) for each part of a module that reads parameters when its forward is called.

    Parameters that no forward reads by this rule (of a container that is not called) are in none of the lists.
    """
    if _reads(module):
        if _is_called(module):
            yield module, list(module.parameters())
        return
    for child in module.children():
        yield from readers(child)


def _reads(module: nn.Module) -> bool:
    """Whether it has parameters of its own, or children that hold some without ever being called."""
    own = any(p is not None for p in module._parameters.values())
    return own or any(not _is_called(child) and _reads(child) for child in module.children())


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
