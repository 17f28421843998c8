"""Chapter `fsdp`, on a rank: what `chapters.fsdp` launches, on GPUs with NCCL or on a CPU with Gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from cs336_systems.chapters.fsdp.measure import HELD, PHASES, Case
from cs336_systems.chapters.shared.on_ranks import begin_turn
from cs336_systems.launch.group import Rank
from cs336_systems.measure.clocks import ranks
from cs336_systems.measure.clocks.ranks import RankSteps
from cs336_systems.measure.clocks.turns import Phases, take_turns
from cs336_systems.measure.device import give_back
from cs336_systems.measure.trace import overlap, profiler
from cs336_systems.measure.trace.events import Trace
from cs336_systems.measure.trace.overlap import communicates, spans_of, union_of_ns
from cs336_systems.model import build
from cs336_systems.parallel.ddp import InPlaceDDP
from cs336_systems.parallel.fsdp import FullyShardedDataParallel
from cs336_systems.parallel.zero import ShardedOptimizer
from cs336_systems.sizes import size

STEPS, STEPS_ON_CPU, ROUNDS = 8, 2, 2  # measured steps of a case, in so many turns
TRACED_STEPS = 2
BUCKET_MB = 100.0  # of "ddp": the fastest of chapter `ddp`, in place
_LATE_NS = 20_000  # by so much at least, compute has waited for a gather
_AHEAD = {"fsdp2": 1, "fsdp2_two": 2}  # blocks that torch's prefetches


# ------------------------------------------------------------------------------------------------ a step
class Step:
    """A model of the case's size, wrapped, with its optimizer and this rank's batch. Weights are the same on all ranks,
    and for all wrappers; batches are not. `phases` maps PHASES to functions, to be called in this order."""

    def __init__(self, case: Case, rank: Rank) -> None:
        self.loss = None
        config = dataclasses.replace(size(case.size), context_length=case.context_length)
        torch.set_float32_matmul_precision("highest" if case.dtype == "fp32" else "high")
        torch.manual_seed(0)
        model = build(config, "auto" if case.dtype == "bf16" else "reference", device=rank.device)
        random = torch.Generator(rank.device).manual_seed(1 + rank.rank)
        shape = (case.batch, case.context_length + 1)
        ids = torch.randint(0, config.vocab_size, shape, device=rank.device, generator=random)
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        narrow = torch.bfloat16 if case.dtype == "bf16" else None
        self.model = _wrapped(model, case.wrapper, narrow)
        self.optimizer = _optimizer(self.model, case.wrapper)
        whole = narrow is not None and case.wrapper in ("ddp", "sharded")
        self._autocast = functools.partial(
            torch.autocast, rank.device.split(":")[0], torch.bfloat16, enabled=whole
        )

    @property
    def phases(self) -> dict[str, Callable[[], Any]]:
        functions = (self.forward, self.backward, self.synchronize, self.update)
        return dict(zip(PHASES, functions, strict=True))

    def forward(self) -> None:
        """Drops the last step's gradients; this rank's loss."""
        self.optimizer.zero_grad()
        with self._autocast():
            logits = self.model(self.ids)
            self.loss = cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())

    def backward(self) -> None:
        self.loss.backward()
        self.loss = self.loss.detach()

    def synchronize(self) -> None:
        """Finishes averaging the gradients; torch's `fully_shard` has done so in backward."""
        if finish := getattr(self.model, "finish_gradient_synchronization", None):
            finish()

    def update(self) -> None:
        self.optimizer.step()

    def held(self) -> dict[str, int]:
        """Bytes of this rank's parameters, gradients and optimizer state, each storage once."""
        parameters = list(self.model.parameters())
        states = [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        kinds = (parameters, [p.grad for p in parameters if p.grad is not None], states)
        return {f"{name}_bytes": _storages(tensors) for name, tensors in zip(HELD, kinds, strict=True)}


def _storages(tensors: Iterable[torch.Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


def _wrapped(model: nn.Module, wrapper: str, narrow: torch.dtype | None) -> nn.Module:
    if wrapper in ("ddp", "sharded"):
        return InPlaceDDP(model, BUCKET_MB)
    if wrapper in ("fsdp", "fsdp_layers"):
        units = model.layers if wrapper == "fsdp" else None
        return FullyShardedDataParallel(model, compute_dtype=narrow, units=units)
    # a block's inputs are left alone, as ours leaves them: the rotary tables stay in fp32
    policy = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
    blocks, ahead = list(model.layers), _AHEAD[wrapper]
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy)
    for i, unit in enumerate(order := [model, *blocks]):  # each has the next ones gathered when it is called
        unit.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead])
    for i, unit in enumerate(order := [model, *reversed(blocks)]):
        unit.set_modules_to_backward_prefetch(order[i + 1 : i + 1 + ahead])
    return model


def _optimizer(model: nn.Module, wrapper: str) -> torch.optim.Optimizer:
    if wrapper == "sharded":
        return ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@contextlib.contextmanager
def _turn(case: Case, rank: Rank, noted: dict[str, Any]) -> Iterator[Phases]:
    """One turn of a case: built, warmed up, timed, given back; what it holds goes into `noted`."""
    give_back(rank.device)
    begin_turn(rank, case)
    step = Step(case, rank)
    give_back(rank.device)
    seen = {"initialized_bytes": _allocated(rank)}
    for last in (False, True):  # the first makes the optimizer's state
        forward, backward, finish, update = step.phases.values()
        forward()
        backward()
        finish()
        seen |= {"before_bytes": _allocated(rank)}
        update()
        seen |= {"after_bytes": _allocated(rank)}
        if last:
            seen |= step.held()
    if rank.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    yield step.phases
    if rank.device != "cpu":
        seen |= {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    everyones = ranks.gathered({"loss": step.loss.item(), **seen}, rank)
    for name, value in seen.items():
        if value is not None:
            noted[name] = max(noted.get(name, 0), *(one[name] for one in everyones))
    noted["loss"] = fmean(one["loss"] for one in everyones)
    vars(step).clear()  # whoever has timed the phases may still hold them


def _allocated(rank: Rank) -> int | None:
    if rank.device == "cpu":
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# ------------------------------------------------------------------------------------------------ times
def time_on_a_rank(rank: Rank, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the cases, which take turns: the same on all ranks."""
    group = [Case(**case) for case in cases]
    found: dict[Case, dict[str, Any]] = {case: {"backend": rank.backend} for case in group}
    turns = {case: functools.partial(_turn, case, rank, found[case]) for case in group}
    steps = STEPS_ON_CPU if rank.device == "cpu" else STEPS
    clock = RankSteps(rank, warmup=1, steps=steps, num_rounds=ROUNDS)
    for case, samples in take_turns(turns, clock).items():
        step_ms, tokens = samples.p50("step"), case.world_size * case.batch * case.context_length
        for phase in (*PHASES, "step"):
            found[case] |= samples.row(phase)
        found[case] |= samples.clocks() | {"tokens_per_s": tokens / step_ms * 1e3}
        print(f"context {case.context_length}, {case.turn}: {step_ms:.4g} ms", flush=True)
    return ranks.gathered([found[case] for case in group], rank)[0]  # rank 0 reads the clocks


# ------------------------------------------------------------------------------------------------ traces
def trace_on_a_rank(rank: Rank, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the cases as this rank's profiler sees them, and under `timeline` one step of each."""
    found = []
    for case in (Case(**case) for case in cases):
        noted: dict[str, Any] = {}
        with _turn(case, rank, noted) as phases:
            clock = RankSteps(rank, warmup=1, steps=TRACED_STEPS, ranges=profiler.span, watched=False)
            trace = profiler.record_torch(lambda c=case, p=phases, k=clock: take_turns({c: p}, k))
        steps = trace.find("step")
        rows = [exposed(trace, step) for step in steps]
        row = {name: fmean(one[name] for one in rows) for name in rows[0]}
        timelines = overlap.overlap(trace, "step", PHASES)
        tool = {"source": trace.source, "tool_version": torch.__version__.split("+")[0]}
        timeline = dataclasses.asdict(timelines[-1])
        found.append(noted | row | tool | {"backend": rank.backend, "timeline": timeline})
    return found


def exposed(trace: Trace, step: int) -> dict[str, float]:
    """A step, the range of this index: for how long communication ran, and for how long it alone did, in all, and up to
    the last kernel of forward, from there to the last of backward, and after it. In ms; the gathers that forward asks
    for are counted.

    A kernel that communicates spins while it waits for the other ranks; that is part of its time.
    """
    whole = trace.ranges[step]
    sent, computed = _lanes(trace, step)
    ends, phases = [whole.start_ns], [i for i, parent in enumerate(trace.parents) if parent == step]
    for i in (i for i in phases if trace.ranges[i].name in ("forward", "backward")):
        ends.append(max([ends[-1], *(end for _, end in _lanes(trace, i)[1])]))
    end = max([whole.end_ns, *(end for _, end in (*sent, *computed))])
    alone = [_alone_ns(sent, computed, a, b) / 1e6 for a, b in zip(ends, [*ends[1:], end], strict=True)]
    [forward] = (i for i in phases if trace.ranges[i].name == "forward")
    gathers = _lanes(trace, forward, "AllGather")[0]
    late = [_alone_ns([(a, b)], computed, a, b) > _LATE_NS for a, b in gathers]
    return {
        "traced_ms": (end - whole.start_ns) / 1e6,
        "communication_ms": union_of_ns(sent) / 1e6,
        "exposed_ms": sum(alone),
        **{f"{name}_exposed_ms": ms for name, ms in zip(("forward", "backward", "rest"), alone, strict=True)},
        "forward_gathers": len(gathers),
        "forward_gather_ms": union_of_ns(gathers) / 1e6,
        "forward_late": sum(late),
    }


Spans = list[tuple[int, int]]


def _lanes(trace: Trace, index: int, word: str = "") -> tuple[Spans, Spans]:
    """Start and end of what communicates within a range, of names with this word, and of what computes: on a GPU in the
    stream in which most does, since the others only prepare messages."""
    whole = trace.ranges[index]
    kernels = [trace.kernels[i] for i in trace.owned(index)]
    rest = [k for k in kernels if not communicates(k)]
    if trace.source == "torch-cpu":  # Gloo's threads communicate; operators only ask for it
        within = [r for r in trace.ranges if whole.start_ns <= r.start_ns < whole.end_ns]
        named = [r for r in within if r.name.startswith("gloo:") and word.lower() in r.name.replace("_", "")]
        return spans_of(named), spans_of(rest)
    [(main, _)] = Counter(k.stream for k in rest).most_common(1) or [(None, 0)]
    sent = (k for k in kernels if communicates(k) and word in k.name)
    return spans_of(sent), spans_of(k for k in rest if k.stream == main)


def _alone_ns(sent: Spans, computed: Spans, begin: int, end: int) -> int:
    """The time from begin to end in which something is sent and nothing computed: |S ∪ C| - |C|."""
    cut = [
        [(max(a, begin), min(b, end)) for a, b in lane if a < end and b > begin] for lane in (sent, computed)
    ]
    return union_of_ns(cut[0] + cut[1]) - union_of_ns(cut[1])
