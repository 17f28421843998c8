"""Activation checkpointing: what a block saves for backward is computed again there instead (Chen et al., 1604.06174).

    recompute(model.layers, "blocks")         # each block keeps its input alone
    recompute(model.layers, "selective")      # each block keeps what is dear to compute again

On torch's non-reentrant checkpoint. A selective block keeps the results of some operations. A plan measures each
operation of a block once: how long it takes, and what its result holds. It keeps those that take longest for their
bytes, matmuls before elementwise ones, up to a share of all bytes. (Strategies over several blocks: chapter
`checkpointing`.)
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336_systems.parallel.units import Intercepted, derive
from cs336_systems.training.config import RECOMPUTE

KEPT = 0.25  # of the bytes of all results, at most, that a selective block keeps: about what its matmuls make
Key = tuple[str, int]  # an operation's name, and its how-manieth call in a block


# ------------------------------------------------------------------------------------------ parts of a block
@dataclass(frozen=True)
class Operation:
    """One call of an operation in a block's forward pass. num_bytes: of new memory that its results hold; 0 for what
    cannot be kept, since it is written to later, or since random numbers drawn after it would be others without it."""

    key: Key
    num_bytes: int
    ms: float


@dataclass(frozen=True)
class Plan:
    """The operations of a block, and whose results are kept; the others are computed again."""

    operations: tuple[Operation, ...]
    kept: frozenset[Key]

    def contexts(self) -> tuple[Any, Any]:
        """For `checkpoint(context_fn=...)`: in forward the kept results are stored, in backward they are taken."""
        calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            counter = calls[context.is_recompute]
            counter[str(operation)] += 1
            keep = (str(operation), counter[str(operation)]) in self.kept
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def __str__(self) -> str:
        """A line for each operation whose result is new memory, and the sums of what is kept and what is not."""
        line = "{:<42} {:>10.2f} MiB {:>8.3f} ms  {}".format
        out = ["What a block keeps of its operations, and what it computes again:"]
        sums = {"kept": [0.0, 0.0], "again": [0.0, 0.0]}
        for op in self.operations:
            word = "kept" if op.key in self.kept else "again"
            sums[word][0] += op.num_bytes / 2**20
            sums[word][1] += op.ms
            if op.num_bytes:
                out.append(line(op.key[0], op.num_bytes / 2**20, op.ms, word))
        return "\n".join(out + [line("together", *both, word) for word, both in sums.items()])


def choose(operations: Sequence[Operation], share: float = KEPT) -> Plan:
    """Keeps the operations that take the most ms a byte, as many as hold at most `share` of the bytes of all.

    What allocates nothing (views) is never kept. ValueError for a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}; it must lie between 0 and 1")
    left, kept = share * sum(op.num_bytes for op in operations), set()
    for op in sorted(operations, key=lambda op: op.ms / max(op.num_bytes, 1), reverse=True):
        if 0 < op.num_bytes <= left:
            kept.add(op.key)
            left -= op.num_bytes
    return Plan(tuple(operations), frozenset(kept))


class _Recorder(TorchDispatchMode):
    """Notes each operation below autograd, and when it began and ended on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.on_gpu = device.type == "cuda"
        self.random_state = torch.cuda.get_rng_state if self.on_gpu else torch.get_rng_state
        self.calls: Counter[str] = Counter()
        self.noted: list[list[Any]] = []  # key, bytes, start, end
        self.made: dict[int, list[Any]] = {}  # by addresses of memory: what has made it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _memory((args, kwargs)).keys()
        for about, value in zip(func._schema.arguments, args, strict=False):
            if about.is_write:
                for pointer in _memory(value).keys() & self.made.keys():
                    self.made[pointer][1] = 0
        random = self.random_state()
        start = self._now()
        out = func(*args, **kwargs)
        end = self._now()
        self.calls[str(func)] += 1
        new = {pointer: size for pointer, size in _memory(out).items() if pointer not in before}
        size = sum(new.values()) if torch.equal(random, self.random_state()) else 0
        self.noted.append([(str(func), self.calls[str(func)]), size, start, end])
        self.made |= dict.fromkeys(new, self.noted[-1])
        return out

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def operations(self) -> list[Operation]:
        if self.on_gpu:
            torch.cuda.synchronize()
        took = (lambda a, b: a.elapsed_time(b)) if self.on_gpu else (lambda a, b: 1e3 * (b - a))
        return [Operation(key, size, took(a, b)) for key, size, a, b in self.noted]


def _memory(values: Any) -> dict[int, int]:
    """The bytes of the memory of the tensors among some values, by their addresses."""
    storages = (x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def operations(forward: Callable[..., Any], *inputs: Any, **named: Any) -> list[Operation]:
    """The operations of one forward pass, in order, each with its least time of three passes (the first may compile).

    inputs, named: what `forward` is called with, a tensor among them at least. Random numbers are as without it.
    """
    device, passes = _device((inputs, named)), []
    for _ in range(3):
        # while it sleeps the host runs ahead: events then time operations, not launches
        if device.type == "cuda":
            torch.cuda._sleep(40_000_000)  # clock cycles: twenty milliseconds
        unchanged = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with unchanged, _casting_anew(device), _Recorder(device) as recorder:
            forward(*inputs, **named)
        passes.append(recorder.operations())
    return [min(calls, key=lambda op: op.ms) for calls in zip(*passes, strict=True)]


def _device(values: Any) -> torch.device:
    return next(x.device for x in tree_leaves(values) if isinstance(x, Tensor))


def _casting_anew(device: torch.device) -> torch.autocast:
    """Autocast as it is, without its cache: what a pass without gradients casts has no graph for those that come after,
    and a pass that finds casts has fewer operations than when it is computed again."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype, enabled, cache_enabled=False)


# ------------------------------------------------------------------------------------------ a model's blocks
def recompute(blocks: Iterable[nn.Module], how: str) -> None:
    """Makes each block compute its activations again in backward, all ("blocks") or those that are cheap ("selective").

    Blocks keep their names, hooks and parameters; what wraps or compiles them comes before. Selective blocks share a
    plan, which the first call with gradients makes, and go through one backward pass a call. What forward changes, as
    running statistics, changes again in backward, and in the three passes of a plan. ValueError for an unknown `how`,
    and for selective blocks of sharded weights, whose gathers would be among the operations.
    """
    if how not in RECOMPUTE:
        raise ValueError(f"unknown recompute {how!r}; allowed: {', '.join(RECOMPUTE)}")
    plans: list[Plan] = []
    for block in blocks:
        if how == "selective" and any(isinstance(part, Intercepted) for part in block.modules()):
            raise ValueError(f"recompute {how!r} of sharded weights; allowed: {', '.join(RECOMPUTE[:2])}")
        if isinstance(block, _Again):
            object.__setattr__(block, "__class__", type(block).__bases__[1])
        if how != "none":
            block.__dict__["_again"] = (how == "selective", plans)
            derive(block, _Again)


class _Again:
    """What the class of a block is derived from: its calls are checkpoints."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        call = super().__call__
        if not torch.is_grad_enabled():
            return call(*inputs, **named)
        chooses, plans = self.__dict__["_again"]
        if not chooses:
            return checkpoint(call, *inputs, use_reentrant=False, **named)
        if not plans:
            with torch.no_grad():
                plans.append(choose(operations(call, *inputs, **named)))
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(plans[0], file=sys.stderr, flush=True)
        with _casting_anew(_device((inputs, named))):
            return checkpoint(call, *inputs, use_reentrant=False, context_fn=plans[0].contexts, **named)
