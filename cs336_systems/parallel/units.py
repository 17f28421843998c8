"""Which weights of a model are sharded, and at whose calls they are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from cs336_systems.parallel.shards import LAYERS, FlatWeights, Weight


@dataclass(eq=False)
class Unit:
    """A module at whose call weights are gathered; `flats`: these weights, mostly one vector. name: in the model."""

    name: str
    module: nn.Module
    flats: list[FlatWeights]


def _sharded_weight(part: nn.Module) -> nn.Parameter | None:
    p = part._parameters.get("weight") if type(part).__name__ in LAYERS else None
    return p if p is not None and p.dim() == 2 and p.is_floating_point() and p.numel() else None


def to_be_sharded(
    module: nn.Module, trained: list[nn.Parameter], chosen: Collection[nn.Module]
) -> list[Weight]:
    """The weights of all layers, in the order of their definition. chosen: the units that are not layers."""
    numbers = {p: i for i, p in enumerate(trained)}
    weights: dict[nn.Parameter, Weight] = {}
    for name, part in module.named_modules():
        if "_derived" in vars(type(part)):
            raise ValueError(
                f"{name or type(part).__name__} is to be computed again: shard the model before that"
            )
        if (p := _sharded_weight(part)) is not None:
            if getattr(part, "max_norm", None) is not None:
                raise ValueError(
                    f"{name or type(part).__name__} has max_norm={part.max_norm}; expected None, since it would change "
                    "a gathered copy of its weight"
                )
            # one is the wrapper's
            if p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > p.requires_grad:
                raise ValueError(
                    f"{name}.weight has hooks for its gradient; expected none, since a gathered copy would get it"
                )
            weights.setdefault(p, Weight(f"{name}.weight".removeprefix("."), numbers.get(p), p, p.shape))
    if not weights:
        raise ValueError(
            f"module {type(module).__name__} has no weight to shard: no module of a class Linear or Embedding with a "
            "2-D weight"
        )
    if len(devices := {p.device for p in module.parameters()}) > 1:
        raise ValueError(f"parameters on {', '.join(sorted(map(str, devices)))}; expected one device")

    def visit(part: nn.Module, unit: nn.Module | None) -> None:
        unit = part if part in chosen else unit
        for name, p in part._parameters.items():
            if p in weights:
                weights[p].homes.append((part, name))
                weights[p].readers.add(part if unit is None else unit)
        for child in part.children():
            visit(child, unit)

    visit(module, None)
    return list(weights.values())


# ------------------------------------------------------------------------------------------- the meta device
class Fresh:
    """What of a model lies on the meta device: taken from there, then initialized on rank 0, weight by weight.

    Here what is to be replicated gets memory, and weights to be sharded get a shape and a device, but no memory yet.
    Tensors stay the objects they are. For arguments and errors see `FullyShardedDataParallel`.
    """

    def __init__(
        self, parts: Mapping[nn.Module, str], device: torch.device | str | None,
        init: Callable[[nn.Module], object] | None,
    ) -> None:  # fmt: skip
        self._init = init or (lambda part: part.reset_parameters())
        self._made = {p for part in parts for p in part.parameters(recurse=False) if p.is_meta}
        self._parts: dict[nn.Module, str] = {}  # to be initialized
        sharded = {_sharded_weight(part) for part in parts}
        for part, name in parts.items():
            parameters = [p for p in part.parameters(recurse=False) if p in self._made]
            if not (parameters or any(t.is_meta for t in part.buffers(recurse=False))):
                continue
            initialized = init is not None or hasattr(part, "reset_parameters")
            # tables that are computed when a module is converted need nothing, parameters do
            computed = type(part)._apply is not nn.Module._apply and not parameters
            if device is None or not (initialized or computed):
                raise ValueError(
                    f"{type(part).__name__} ({name!r}) is on the meta device; expected device=, where to make it, and "
                    "a reset_parameters() of its own or param_init_fn=, to initialize it"
                )
            for p in parameters:
                if p.is_meta:
                    made = torch.empty(() if p in sharded else p.shape, dtype=p.dtype, device=device)
                    marks = dict(vars(p))  # which are swapped, too
                    torch.utils.swap_tensors(p, nn.Parameter(made.expand(p.shape), p.requires_grad))
                    vars(p).update(marks)
            part._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t, recurse=False)
            if initialized:
                self._parts[part] = name

    def fill(self, weight: Weight, place: Tensor) -> None:
        """Writes a weight to its place, in its shape: its values, or what the modules that have it make of it."""
        if weight.parameter not in self._made:
            place.copy_(weight.parameter)
        weight.parameter.data = place
        for home, _ in weight.homes:
            if self._parts.pop(home, None) is not None:
                self._init(home)

    @torch.no_grad()
    def fill_rest(self) -> None:
        """Initializes the modules that have none of the weights."""
        for part in self._parts:
            self._init(part)


# ------------------------------------------------------------------------------------------------------- calls
class Intercepted:
    """What the class of a unit's module is derived from: its calls go through the wrapper, outside of what is compiled
    in place. (A forward hook would be compiled with it.)"""

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
            raise RuntimeError("compile the units of a sharded model, not what holds them")
        return self.__dict__["_called"](super().__call__, inputs, kwargs)


@functools.cache  # compiled blocks of one class are to be of one class still
def _derived(before: type, cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_derived": True}
    return type(cls.__name__, (before, cls), names)


def derive(module: nn.Module, before: type) -> None:
    """Has a module's methods be those of `before`, whose `super()` is the module's class; its name stays."""
    # plainly set, a compiled module would pass it on to its original
    object.__setattr__(module, "__class__", _derived(before, type(module)))
