"""Which weights of a model are sharded, and at whose calls they are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from cs336_systems.parallel.shards import FlatWeights, Weight

LAYERS = ("Linear", "Embedding")
"""The classes whose 2-D weights are sharded, by name: so that anybody's are."""


class Unit:
    """A module at whose call weights are gathered; `flats`: these weights, mostly one vector. name: in the model.

    compute_dtype: as the wrapper's; `narrowed`: the other parameters of its layers that have to be cast to it, biases.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: Sequence[FlatWeights], compute_dtype: torch.dtype | None
    ) -> None:
        self.name, self.module, self.flats = name, module, list(flats)
        homes = {home for flat in flats for weight in flat.weights for home, _ in weight.homes}
        sharded = {weight.parameter for flat in flats for weight in flat.weights}
        self.narrowed = [
            (home, key, p)
            for home in homes if type(home).__name__ in LAYERS and compute_dtype is not None
            for key, p in home._parameters.items()
            if p is not None and p.is_floating_point() and p not in sharded and p.dtype != compute_dtype
        ]  # fmt: skip


def named(module: Any, units: Iterable[nn.Module] | None) -> dict[str, nn.Module]:
    """The chosen units by name; see the class for the errors."""
    if units is None or not isinstance(module, nn.Module):
        return {}
    names = {part: name for name, part in module.named_modules()}
    chosen = {}
    for unit in units:
        if unit not in names:
            raise ValueError(
                f"units holds {type(unit).__name__}, which is no module of {type(module).__name__}"
            )
        if getattr(unit.forward, "__func__", None) is nn.Module.forward:
            raise ValueError(
                f"units holds {type(unit).__name__} ({names[unit]!r}), which is never called; expected modules with a "
                "forward of their own"
            )
        chosen[names[unit]] = unit
    return chosen


def _sharded_weight(part: nn.Module) -> nn.Parameter | None:
    p = part._parameters.get("weight")
    is_layer = type(part).__name__ in LAYERS and p is not None and p.dim() == 2 and p.is_floating_point()
    return p if is_layer else None


def to_be_sharded(module: nn.Module, trained: list[nn.Parameter]) -> list[Weight]:
    """The weights of all layers, in the order of their definition."""
    numbers = {p: i for i, p in enumerate(trained)}
    weights: dict[nn.Parameter, Weight] = {}
    for name, part in module.named_modules():
        if (p := _sharded_weight(part)) is not None:
            weights.setdefault(p, Weight(f"{name}.weight".removeprefix("."), numbers.get(p), [], p, p.shape))
    if not weights:
        raise ValueError(
            f"module {type(module).__name__} has no weight to shard: no module of a class Linear or Embedding with a "
            "2-D weight"
        )
    if len(devices := {p.device for p in module.parameters()}) > 1:
        raise ValueError(f"parameters on {', '.join(sorted(map(str, devices)))}; expected one device")
    for part in module.modules():
        for name, p in part._parameters.items():
            if p in weights:
                weights[p].homes.append((part, name))
    return list(weights.values())


def readers_of(weight: Weight, chosen: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules at whose calls a weight must be there: the innermost chosen units around its homes, or these."""
    found: dict[nn.Module, None] = {}
    for home, _ in weight.homes:
        around = [unit for unit in chosen.values() if any(part is home for part in unit.modules())]
        inner = [u for u in around if not any(v is not u and v in set(u.modules()) for v in around)]
        found |= dict.fromkeys(inner or [home])
    return list(found)


# ------------------------------------------------------------------------------------------- the meta device
class Fresh:
    """What of a model lies on the meta device: taken from there, then initialized on rank 0, weight by weight.

    Here what is to be replicated gets memory, and weights to be sharded get a shape and a device, but no memory yet.
    Tensors stay the objects they are. For arguments and errors see `FullyShardedDataParallel`.
    """

    def __init__(
        self, module: Any, device: torch.device | str | None, init: Callable[[nn.Module], object] | None
    ) -> None:
        self.parts = {
            part: name
            for name, part in (module.named_modules() if isinstance(module, nn.Module) else ())
            if any(t.is_meta for t in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
        }
        self._init = init or _reset
        for part, name in self.parts.items():
            who = f"{type(part).__name__} ({name!r}) is on the meta device"
            if device is None:
                raise ValueError(f"{who}; expected device=, where to make it")
            # tables that are computed when a module is converted need nothing, parameters do
            computed = type(part)._apply is not nn.Module._apply and not any(
                p.is_meta for p in part.parameters(recurse=False)
            )
            if not (init or hasattr(part, "reset_parameters") or computed):
                raise ValueError(
                    f"{who}, without reset_parameters(); expected param_init_fn=, to initialize it"
                )
        self._made = {p for part in self.parts for p in part.parameters(recurse=False) if p.is_meta}
        sharded = {_sharded_weight(part) for part in self.parts}
        for p in self._made:
            made = torch.empty(() if p in sharded else p.shape, dtype=p.dtype, device=device).expand(p.shape)
            marks = dict(vars(p))  # which are swapped, too
            torch.utils.swap_tensors(p, nn.Parameter(made, p.requires_grad))
            vars(p).update(marks)
        for part in self.parts:  # buffers; some are computed when a module is converted
            part._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t, recurse=False)

    @torch.no_grad()
    def fill(self, weight: Weight, place: Tensor) -> None:
        """Writes a weight to its place, in its shape: its values, or what the modules that have it make of it."""
        if weight.parameter not in self._made:
            place.copy_(weight.parameter)
        fresh = [home for home, _ in weight.homes if home in self.parts]
        if fresh:
            weight.parameter.data = place
        for home in fresh:
            self._init(home)

    @torch.no_grad()
    def fill_rest(self, weights: Iterable[Weight]) -> None:
        """Initializes the modules that have none of the weights."""
        homes = {home for weight in weights for home, _ in weight.homes}
        for part in self.parts:
            if part not in homes:
                self._init(part)


def _reset(part: nn.Module) -> None:
    if hasattr(part, "reset_parameters"):
        part.reset_parameters()


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
    return type(cls.__name__, (before, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def derive(module: nn.Module, before: type) -> None:
    """Has a module's methods be those of `before`, whose `super()` is the module's class; its name stays."""
    # plainly set, a compiled module would pass it on to its original
    object.__setattr__(module, "__class__", _derived(before, type(module)))


def intercept(module: nn.Module, called: Callable[..., Any]) -> None:
    """Has a module's calls go through `called(call, inputs, kwargs)`."""
    module.__dict__["_called"] = called
    derive(module, Intercepted)
