"""No table: forward and backward of a model by a strategy of checkpointing, what a block saves, and the step's peak.

    x = blockwise(model.layers, x, cos, sin, size=4)      # keeps the input of every fourth block
    x = nested(model.layers, x, cos, sin)                 # keeps log2(N) inputs, runs a block 1 + log2(N) / 2 times

With N equal blocks that save A bytes each between inputs of c bytes:

    strategy                  activations at the peak           blocks computed again
    none                      N·A                               0
    blockwise, size k         (N/k)·c + k·A                     N
    nested                    log2(N)·c + A                     N·log2(N) / 2 + 1
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.chapters.shared.step import Workload
from cs336_systems.measure.clocks.turns import Candidate
from cs336_systems.measure.device import give_back
from cs336_systems.measure.memory.tensors import watching_tensors
from cs336_systems.model import choose_attention
from cs336_systems.training import checkpointing

if TYPE_CHECKING:
    from cs336_systems.chapters.checkpointing.measure import Case

Through = Callable[..., Tensor]
"""Takes x through all blocks: `through(blocks, x, *rest)`."""


def prepare(candidate: Candidate, work: Workload) -> None:
    """Steps before any is timed: without checkpoints one that finds no gradients, so that each block's can be seen; for
    all one that adds to gradients, as the timed ones do, whose peak is read and whose forward passes are counted."""
    case, metrics = candidate.case, candidate.metrics
    choose_attention(work.model, case.attention)
    through, told = _through(case, work)

    def step() -> None:
        choose_attention(work.model, case.attention)
        with _autocast(case, work):
            x = through(work.model.layers, *_inputs(work))
            x = work.model.lm_head(work.model.ln_final(x)).flatten(0, 1)
            loss = cross_entropy(x, work.targets.flatten())
            del x
        loss.backward()

    metrics |= told
    if case.strategy == "none":
        work.drop_gradients()
        metrics["backward_bytes_each"] = _changes(step, work)
        work.drop_gradients()
    if any(p.grad is None for p in work.parameters):
        give_back(work.device)
        # not in pieces of what activations leave, which would be lost for large ones
        for p in work.parameters:
            p.grad = torch.zeros_like(p)
        step()  # the first of a group also loads libraries, which keep some memory
    metrics |= _peak(step, work)
    candidate.phases = {"step": step}


def _autocast(case: Case, work: Workload) -> torch.autocast:
    return torch.autocast(work.device, torch.bfloat16, enabled=case.dtype == "bf16")


def _inputs(work: Workload) -> tuple[Tensor, ...]:
    """What the first block is called with."""
    return work.model.token_embeddings(work.ids), *work.model.positional_encoder(work.ids.shape[1])


def _through(case: Case, work: Workload) -> tuple[Through, dict[str, Any]]:
    """What takes x through all blocks; and `kept`, what is held of each beyond its input, where a block tells."""
    block, inputs = work.model.layers[0], _inputs(work)
    if case.strategy == "blocks":
        return functools.partial(blockwise, size=case.block_size), {}
    if case.strategy in (whole := {"nested": nested, "chained": chained, "halves": halves}):
        return whole[case.strategy], {}
    with _autocast(case, work):
        if case.strategy == "none":
            return plain, {"kept": _told(residuals(block, *inputs))}
        with torch.no_grad():
            plan = checkpointing.choose(checkpointing.operations(block, *inputs))
    kept = [op for op in plan.operations if op.key in plan.kept]
    names = ((op.key[0].split(".")[1].strip("_"), op.num_bytes) for op in kept)  # of "aten.mm.default"
    return functools.partial(selective, plan), {"kept": _told(names)}


def blockwise(blocks: Sequence[nn.Module], x: Tensor, *rest: Any, size: int = 1) -> Tensor:
    """x through all blocks, each called with `rest`; of every `size` blocks only the input is saved for backward.

    ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"size={size}; it must be at least 1")
    for start in range(0, len(blocks), size):
        x = checkpoint(plain, blocks[start : start + size], x, *rest, use_reentrant=False)
    return x


def nested(blocks: Sequence[nn.Module], x: Tensor, *rest: Any) -> Tensor:
    """As `blockwise`, at the least memory that halving gives: the first half is a checkpoint, in which its own first
    half is one when it is computed again, and so on; the second half is treated likewise."""
    if len(blocks) == 1:
        return checkpoint(blocks[0], x, *rest, use_reentrant=False)
    half = len(blocks) // 2
    x = checkpoint(nested, blocks[:half], x, *rest, use_reentrant=False)
    return nested(blocks[half:], x, *rest)


def plain(blocks: Sequence[nn.Module], x: Tensor, *rest: Any) -> Tensor:
    """x through all blocks, without a checkpoint."""
    for block in blocks:
        x = block(x, *rest)
    return x


def selective(plan: checkpointing.Plan, blocks: Sequence[nn.Module], x: Tensor, *rest: Any) -> Tensor:
    """As `blockwise` of size 1, each checkpoint keeping what the plan of one block says."""
    for block in blocks:
        x = checkpoint(block, x, *rest, use_reentrant=False, context_fn=plan.contexts)
    return x


def halves(blocks: Sequence[nn.Module], x: Tensor, *rest: Any) -> Tensor:
    """x through all blocks, the attention and the feed-forward layer of each in a checkpoint of their own."""
    for block in blocks:
        for half in (lambda x, b=block: x + b.attn(b.ln1(x), *rest), lambda x, b=block: x + b.ffn(b.ln2(x))):
            x = checkpoint(half, x, use_reentrant=False)
    return x


def chained(blocks: Sequence[nn.Module], x: Tensor, *rest: Any) -> Tensor:
    """x through all blocks, at the least memory of all: each block's input is computed from the first one again."""
    if len(blocks) > 1:
        x = checkpoint(chained, blocks[:-1], x, *rest, use_reentrant=False)
    return checkpoint(blocks[-1], x, *rest, use_reentrant=False)


# ---------------------------------------------------------------------------------------------- what a block saves
class _Naming(TorchFunctionMode):
    """Knows which operation runs, by its name in torch's Python API."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = func.__name__.strip("_")
        return func(*args, **(kwargs or {}))


def residuals(block: nn.Module, x: Tensor, *rest: Tensor) -> list[tuple[str, int]]:
    """What a block saves for backward: of each storage the operation that saved it first, and its bytes.

    x (B, S, D); rest: the rotary tables, which are not the block's, and neither are parameters.
    """
    held = [t.untyped_storage() for t in (*block.parameters(), *rest)]
    seen, found = {s.data_ptr() for s in held}, []

    def pack(tensor: Tensor) -> None:
        # nothing, as there is no backward pass: an operation that held its own result would never be freed
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(storage)  # so that no other gets its address
            found.append((naming.name, storage.nbytes()))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing), _Naming() as naming:
        block(x.detach().requires_grad_(), *rest)
    return found


def _told(saved: Any) -> str:
    """`(operation, bytes)` as one text: "mul:2x83886080", those of most bytes first."""
    counts = Counter(saved)
    most = sorted(counts, key=lambda key: -key[1] * counts[key])
    return " ".join(f"{name}:{counts[name, size]}x{size}" for name, size in most if size)


# ---------------------------------------------------------------------------------------------- memory of a step
@contextmanager
def _memory(work: Workload) -> Iterator[tuple[Callable[[], int], Callable[[], int]]]:
    """Two functions that tell the bytes that tensors ask for, now and at most since the beginning."""
    if work.device != "cpu":
        give_back(work.device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        told = lambda what: torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]
        yield lambda: told("current"), lambda: told("peak")
        return
    with watching_tensors() as (_, snapshot):
        for p in work.parameters:  # a view makes what was there before known
            _ = p.detach(), p.grad is not None and p.grad.detach()
        yield lambda: int(snapshot().active()[-1]), lambda: int(snapshot().active().max())


@contextmanager
def _before_each(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(hook))
        yield


def _changes(step: Callable[[], None], work: Workload) -> str:
    """By how many bytes memory changes over the backward pass of each block, the last block first, as one text."""
    found: list[int] = []
    with _memory(work) as (now, _):

        def watch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            # when all behind this tensor has its gradients
            given[0].register_hook(lambda grad: found.append(now()))

        with _before_each((*work.model.layers, work.model.ln_final), watch):
            step()
    return " ".join(str(after - before) for before, after in itertools.pairwise(found))


def _peak(step: Callable[[], None], work: Workload) -> dict[str, Any]:
    """What a step holds at its peak, in all and beyond what was there before; and how often each block runs in it."""
    calls: list[None] = []
    count = lambda module, given: calls.append(None)
    with _memory(work) as (now, most), _before_each((layer.ln1 for layer in work.model.layers), count):
        before = now()
        step()
        peak = most()
    return {
        "peak_bytes": peak if work.device == "cpu" else torch.cuda.max_memory_allocated(),
        "activations_bytes": peak - before,
        "forwards": len(calls) / len(work.model.layers),
    }
