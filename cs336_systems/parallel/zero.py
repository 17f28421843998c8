"""Optimizer state sharding (ZeRO stage 1): every rank updates its share of the parameters, and holds its state only.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)

After a data-parallel backward pass all N ranks hold all gradients. A step then has three parts:

1. `assign` has given each whole parameter an owner, so that bytes are balanced, and one of the owner's rounds.
2. Each rank runs the optimizer over its own parameters, round by round: 1/N of the work, 1/N of the state.
3. The owners broadcast what they have updated. A round's broadcasts travel while the next round is computed; inside
   `overlap_with(model)` the last ones also while the next forward pass has begun, each part of which waits for its own.

Owning whole parameters serves every optimizer that treats parameters one by one, also those that look at a matrix as a
matrix (Adafactor, Muon), and an update is made of the very operations of the plain optimizer: results are equal bit by
bit. The price is that shares differ, by one parameter at most; slices of equal length would be perfectly balanced, but
serve elementwise optimizers only.

**What travels.** The broadcasts read and write the parameters' own memory: no flat copy of the model or of a round.
With NCCL those of a round, from all owners, are one group call: one launch in which every rank sends while it receives,
as in an all-gather of shares of unequal size. Against flattening into a buffer and one all-gather this saves the buffer
and a pass through memory on each side, and costs the host one call for each parameter. Gloo has no group calls: there
a round's broadcasts are started one after the other and waited for together. On average a rank sends (N - 1)/N of the
parameters' bytes in a step, beside the 2 (N - 1)/N of the gradients' that their all-reduce takes
(`accounting.zero_step_bytes`).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054),
section 5.1; there gradients are reduced to their owners alone, which costs less.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cs336_systems.parallel.agreement import agreement
from cs336_systems.parallel.readers import readers
from cs336_systems.parallel.shares import assign
from cs336_systems.parallel.state import bytes_of, gathered, is_dense, settings_of_owners


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)`, spread over the ranks of a process group.

    params: parameters or param groups, the same on all ranks in the same order. optimizer_cls: any subclass of
    `torch.optim.Optimizer` that updates each parameter from its own gradient and state (so not LBFGS). process_group:
    the ranks among which state is spread; None: all, or this process alone if there is no default group. num_rounds:
    in how many parts a rank computes and sends its share; 1 overlaps nothing. kwargs: the optimizer's.

    It is used as the plain optimizer is: `param_groups` holds all parameters and their settings, which schedulers and
    callers may change between steps, and `zero_grad` and gradient clipping see all gradients. `state` holds what this
    rank owns. Constructor, `add_param_group`, `step` and `state_dict` communicate: all ranks call them alike. Gradients
    must be equal on all ranks, which is the data-parallel container's work. Frozen parameters without a gradient stay
    at home. With one rank nothing is communicated.

    Errors: ValueError for an optimizer_cls, process_group or num_rounds that cannot be, for parameters whose memory has
    gaps, and on all ranks where their classes, settings or parameters differ, or one of them raises; whatever
    optimizer_cls raises. ValueError in `step` if `param_groups` has got or lost parameters by other means than
    `add_param_group`; TypeError for `copy` and `pickle`.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_cls: type[Optimizer], process_group: dist.ProcessGroup | None = None,
        *, num_rounds: int = 4, **kwargs: Any,
    ) -> None:  # fmt: skip
        if not isinstance(num_rounds, int) or isinstance(num_rounds, bool) or num_rounds < 1:
            raise ValueError(f"num_rounds={num_rounds!r}; it must be a positive integer")
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        if not (process_group is None or isinstance(process_group, dist.ProcessGroup)):
            raise ValueError(
                f"process_group={process_group!r}; allowed: None, or a process group that this rank is in"
            )
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if process_group else 0
        self.world_size = dist.get_world_size(process_group) if process_group else 1
        self._class, self._kwargs = optimizer_cls, kwargs
        rounds = num_rounds if self.world_size > 1 else 1
        # Bytes by rank and round. Frozen parameters have no state, but may be thawed: they have a ledger of their own.
        self._loads = {kind: [[0] * rounds for _ in range(self.world_size)] for kind in (True, False)}
        # by round: parameter → owner, and the optimizer over what this rank owns
        self._owners: list[dict[Tensor, int]] = [{} for _ in range(rounds)]
        self._inner: list[Optimizer] = []
        self._pending: dict[int, list[Any]] = {}  # by round: what is still on its way
        # inside overlap_with: the rounds that step waits for, since no forward pass waits for all of them
        self._awaited_in_step: Callable[[], set[int]] | None = None
        # Ranks with different parameters would wait for each other's broadcasts, or take one parameter for another;
        # with different settings an update would depend on who makes it.
        with agreement(process_group):
            super().__init__(params, defaults={})  # torch's own checks of the groups, by add_param_group
        self._share_out(self.param_groups)

    # --------------------------------------------------------------------------------------- parameters and owners
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's does, and shares out its parameters; those added before keep their owners."""
        if not self._inner:  # the base class constructs: those groups are shared out together
            super().add_param_group(param_group)
            return
        known = len(self.param_groups)
        try:
            with agreement(self.process_group):
                super().add_param_group(param_group)
            self._share_out(self.param_groups[known:])
        except Exception:
            del self.param_groups[known:]
            raise

    def _share_out(self, groups: list[dict[str, Any]]) -> None:
        parameters = list(dict.fromkeys(p for group in groups for p in group["params"]))
        with agreement(self.process_group) as given:
            pattern = self._pattern(parameters, groups)
            given |= {"optimizer_cls": self._class, "num_rounds": len(self._owners)}
            given |= {k: value for k, value in self._kwargs.items() if k not in pattern.defaults}
            for number, p in enumerate(parameters):
                layout = tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad, getattr(p, "shard", "")
                given[f"the shape, strides, dtype, requires_grad and shard of parameter {number}"] = layout
            for number, group in enumerate(pattern.param_groups):
                settings = _settings(group) | {"the number of parameters": len(group["params"])}
                given |= {f"{name} of group {number}": value for name, value in settings.items()}
        self.defaults = pattern.defaults
        for group, told in zip(groups, pattern.param_groups, strict=True):
            group.update(_settings(told))

        homes = {}
        for trainable, loads in self._loads.items():
            alike = [p for p in parameters if p.requires_grad == trainable]
            homes |= dict(zip(alike, assign([p.nbytes for p in alike], loads), strict=True))
        for parameter in parameters:
            owner, round_ = homes[parameter]
            self._owners[round_][parameter] = owner
        # Every rank has an optimizer for each round with all groups, some of them empty perhaps: groups then go through
        # the same on all ranks, whatever an optimizer keeps in them.
        for round_ in range(len(self._owners)):
            here = (self.rank, round_)
            shares = [
                _settings(group) | {"params": [p for p in group["params"] if homes[p] == here]}
                for group in groups
            ]
            if len(self._inner) == round_:
                self._inner.append(self._new(shares))
            else:
                self._inner[round_].state = self.state  # which may be another by now
                for share in shares:
                    self._inner[round_].add_param_group(share)
            self.state.update(self._inner[round_].state)  # some optimizers make it in the constructor
        self._given = self._ids()

    def _pattern(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> Optimizer:
        """The optimizer over stand-ins without elements: it holds no memory, tells the settings of all groups, and
        raises the class's own errors on all ranks, also on those that own nothing."""
        if not (isinstance(self._class, type) and issubclass(self._class, Optimizer)):
            raise ValueError(f"optimizer_cls={self._class!r}; allowed: subclasses of torch.optim.Optimizer")
        if issubclass(self._class, torch.optim.LBFGS | ShardedOptimizer):
            raise ValueError(
                f"optimizer_cls={self._class.__name__}; allowed: optimizers that update each parameter by itself"
            )
        for parameter in parameters:
            if not is_dense(parameter):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()} and layout "
                    f"{parameter.layout}; allowed: strided memory without gaps or overlaps"
                )
        return self._new([_settings(group) | {"params": map(_stand_in, group["params"])} for group in groups])

    def _new(self, groups: list[dict[str, Any]]) -> Optimizer:
        return self._class(groups, **self._kwargs)

    def owner(self, parameter: Tensor) -> int:
        """The rank (in the process group) that updates this parameter. KeyError for one that is not optimized here."""
        return collections.ChainMap(*self._owners)[parameter]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state that this rank holds, step counters included."""
        values = (value for state in self.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    # ---------------------------------------------------------------------------------------------------- a step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates all parameters on all ranks; the loss that `closure` returns, or None.

        closure: evaluated once, with gradients enabled, before anything is updated; the inner optimizers do not see it
        (they would call it once each). kwargs: handed to each inner optimizer's step. With NCCL the step has been
        enqueued, not finished, when this returns, like any other work of the current stream.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()  # what is still on its way since the last step must have arrived before it is updated again
        self._lend()
        for round_, (inner, owners) in enumerate(zip(self._inner, self._owners, strict=True)):
            inner.step(**kwargs)
            if self.world_size > 1 and (works := self._broadcast(owners)):
                self._pending[round_] = works
        self._wait_for(range(len(self._inner)) if self._awaited_in_step is None else self._awaited_in_step())
        self._collect_settings()
        return loss

    def wait(self) -> None:
        """Waits for all parameters of the last step: the current stream does, on a GPU; the host, on a CPU.

        `step` has done so itself, but inside `overlap_with`.
        """
        self._wait_for(range(len(self._inner)))

    def _wait_for(self, rounds: Iterable[int]) -> None:
        for round_ in rounds:
            for work in self._pending.pop(round_, ()):
                work.wait()

    @contextmanager
    def overlap_with(self, module: torch.nn.Module) -> Iterator[None]:
        """Inside, `step` returns while broadcasts are on their way, and each part of `module` waits for the parameters
        that it reads when its forward pass begins (see `readers`): communication runs beside the next forward pass.

            with optimizer.overlap_with(model):
                for batch in batches: ...

        Results are the same. But nobody else may read parameters after a step before `wait()`: it is called at the end
        of the block, before the next step, and by `module.state_dict()`. Parameters that are not in the module, that no
        forward of it reads, or whose part has not been called since the last step (another may read them), are waited
        for in `step`. It must be eager: a part that torch.compile has swallowed does not wait. RuntimeError inside
        another such block.
        """
        if self._awaited_in_step is not None:
            raise RuntimeError("overlap_with() inside overlap_with(): one module at a time")
        round_of = {p: round_ for round_, owners in enumerate(self._owners) for p in owners}
        parts = list(readers(module))
        called: set[int] = set()  # since the last step

        def enter(number: int, rounds: list[int], *_: Any) -> None:
            called.add(number)
            self._wait_for(rounds)

        def awaited() -> set[int]:
            waits = {p for number in called for p in parts[number][1]}
            called.clear()
            return {r for r, owners in enumerate(self._owners) if any(p not in waits for p in owners)}

        handles = [module.register_state_dict_pre_hook(lambda *_: self.wait())]
        for number, (part, parameters) in enumerate(parts):
            # known beforehand: the hook runs while the GPU may be waiting for the host
            rounds = sorted({round_of[p] for p in parameters if p in round_of})
            # before the part's own hooks: weight_norm's, for one, reads parameters
            hook = functools.partial(enter, number, rounds)
            handles.append(part.register_forward_pre_hook(hook, prepend=True))
        self._awaited_in_step = awaited
        try:
            yield
        finally:
            self._awaited_in_step = None
            for handle in handles:
                handle.remove()
            self.wait()

    def _lend(self) -> None:
        """What `state` and `param_groups` hold now is what the inner optimizers work with."""
        if (held := self._ids()) != self._given:
            raise ValueError(
                f"param_groups hold {[*map(len, held)]} parameters, not those given; allowed: add_param_group()"
            )
        for inner in self._inner:
            inner.state = self.state
            for group, own in zip(self.param_groups, inner.param_groups, strict=True):
                own.update(_settings(group))

    def _ids(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self.param_groups]

    def _collect_settings(self) -> None:
        """Settings that the inner optimizers changed, alike in all rounds, come back; some pass over empty groups."""
        for group, *owns in zip(self.param_groups, *(i.param_groups for i in self._inner), strict=True):
            for own in sorted(owns, key=lambda own: bool(own["params"])):
                group.update(_settings(own))

    def _broadcast(self, owners: dict[Tensor, int]) -> list[Any]:
        """Starts the broadcasts of one round; what to wait for."""
        moving = [(p, o) for p, o in owners.items() if p.numel() and (p.requires_grad or p.grad is not None)]
        # c10d does not tell autograd what it writes
        torch.autograd.graph.increment_version([p for p, owner in moving if owner != self.rank])
        by_device: dict[torch.device, list[tuple[Tensor, int]]] = {}
        for parameter, owner in moving:
            by_device.setdefault(parameter.device, []).append((bytes_of(parameter), owner))
        works: list[Any] = []
        for device, sent in by_device.items():
            if self.process_group._get_backend(device).supports_coalescing:
                with dist._coalescing_manager(self.process_group, device, async_ops=True) as together:
                    for memory, owner in sent:
                        self._send(memory, owner)
                works.append(together)
            else:
                works += [self._send(memory, owner) for memory, owner in sent]
        return works

    def _send(self, memory: Tensor, owner: int) -> Any:
        """Starts one broadcast: what `dist.broadcast` ends in, whose own work costs the host a microsecond or two."""
        options = dist.BroadcastOptions()
        options.rootRank = owner  # in the group; asynchronous by default
        return self.process_group.broadcast([memory], options)

    # -------------------------------------------------------------------------------------------- saving, loading
    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ShardedOptimizer belongs to its process group and can be neither copied nor pickled; construct another "
            "one, and give it this one's state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 what the plain optimizer's `state_dict` would be: all state, numbered as there.

        All ranks call it. Rank 0 takes the others' state tensor by tensor, (N - 1)/N of all state over one link, into
        its main memory, where it holds all of it in the end; on the device the cost is one parameter's state. It can be
        saved and loaded by `torch.load(..., weights_only=True)`, by the plain optimizer, and by a ShardedOptimizer of
        any number of ranks. Other ranks get their own state, where it lies, with an entry "shard" that says whose it
        is: good for `load_state_dict` on the same rank. With one rank it is the plain optimizer's own.
        """
        local = super().state_dict()
        if self.world_size == 1:
            return local
        numbered = {
            index: parameter
            for group, packed in zip(self.param_groups, local["param_groups"], strict=True)
            for parameter, index in zip(group["params"], packed["params"], strict=True)
        }
        owned = {i: p for i, p in numbered.items() if self.owner(p) == self.rank}
        # not what a look at another one's state has left: an empty one
        mine = {i: state for i, state in local["state"].items() if i in owned or i not in numbered}
        whole = gathered(mine, numbered, self.process_group)
        groups = settings_of_owners(local["param_groups"], owned, self.process_group)
        if self.rank == 0:
            return {**local, "state": whole, "param_groups": groups}
        return {**local, "state": mine, "shard": [*owned]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the settings, and of the state this rank's share, from what the plain or any sharded one has saved.

        No communication; each rank reads the whole dict (`torch.load(..., mmap=True)` reads no more than is taken).
        Errors: ValueError where groups differ in number or size, where the dict is another rank's share, or none that
        an optimizer has saved; what was there stays then.
        """
        _check_saved(state_dict)
        numbers = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        # where the two differ in length, torch's own check says so below
        mine = {i for i, p in zip(numbers, parameters, strict=False) if self.owner(p) == self.rank}
        if missing := mine - set(state_dict.get("shard", mine)):
            raise ValueError(
                f"shard={state_dict['shard']}: this is the share of another rank or world size, without parameters "
                f"{sorted(missing)}; allowed: what rank 0 or a plain optimizer returned"
            )
        others = set(numbers) - mine
        state = {index: value for index, value in state_dict["state"].items() if index not in others}
        before = self.state, self.param_groups
        super().load_state_dict({**state_dict, "state": state})
        # as torch does it for the plain optimizer: the class fills in what its older versions did not save
        for inner in self._inner:
            own = [
                _settings(group) | {"params": share["params"]}
                for group, share in zip(self.param_groups, inner.param_groups, strict=True)
            ]
            inner.__setstate__({"state": self.state, "param_groups": own})
        self._collect_settings()
        for old, new in zip(before[1], self.param_groups, strict=True):
            if lacking := sorted(_settings(old).keys() - new.keys()):
                self.state, self.param_groups = before
                raise ValueError(
                    f"a group of the state_dict lacks {', '.join(lacking)}; it has {', '.join(new)}"
                )


# ---------------------------------------------------------------------------------------------------------- helpers
def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_saved(state_dict: Any) -> None:
    """ValueError for what has not the form of an optimizer's state dict."""
    groups, state = (
        state_dict.get(key) if isinstance(state_dict, dict) else None for key in ("param_groups", "state")
    )
    whole = isinstance(groups, list) and isinstance(state, dict)
    if not whole or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        has = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(
            f"state_dict holds {has or 'nothing'}; expected 'state', a dict, and 'param_groups', a list of dicts with "
            "'params', a list of numbers"
        )


def _stand_in(parameter: Tensor) -> Tensor:
    """A parameter alike, without elements (a scalar has one)."""
    return parameter.detach().new_empty((0,) * parameter.dim()).requires_grad_(parameter.requires_grad)
