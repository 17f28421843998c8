"""Chapter `zero`, on a rank: what `chapters.zero` launches, on GPUs with NCCL or on a CPU with Gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cs336_systems.chapters.shared.on_ranks import begin_turn
from cs336_systems.chapters.shared.parallel_step import ParallelStep, ParallelWorkload
from cs336_systems.chapters.zero.measure import (
    COMPONENT_COLUMNS,
    PHASES,
    SETTLING,
    STEPS,
    STEPS_ON_CPU,
    TURNS,
    VARIANTS,
    Case,
)
from cs336_systems.launch.group import Rank
from cs336_systems.measure.clocks import ranks
from cs336_systems.measure.clocks.ranks import RankSteps
from cs336_systems.measure.clocks.turns import Phases, take_turns
from cs336_systems.measure.counters.collectives import Collectives, beside, link_bytes
from cs336_systems.measure.memory.tensors import watching_tensors
from cs336_systems.measure.trace.profiler import record_torch
from cs336_systems.sizes import size

LINK_STEPS = 3  # over which the bytes on the wire are averaged
_STEPS_WITH_STATE = 4  # torch's DDP rebuilds its buckets in the second, and may hold old ones in the third


def _dtype(rank: Rank) -> str:
    return "fp32" if rank.device == "cpu" else "tf32"


@contextlib.contextmanager
def _step(work: ParallelWorkload, case: Case) -> Iterator[ParallelStep]:
    wrapper, name = VARIANTS[case.variant]
    bucket_mb = None if wrapper == "none" else case.bucket_mb
    with work.step(wrapper, bucket_mb=bucket_mb, dtype=_dtype(work.rank), optimizer=name) as step:
        overlapped = case.variant == "overlapped"
        with work.optimizer(name).overlap_with(work.model) if overlapped else contextlib.nullcontext():
            yield step


def _workload(case: Case, rank: Rank) -> ParallelWorkload:
    return ParallelWorkload(size(case.size), case.batch, case.context_length, rank)


# ------------------------------------------------------------------------------------------------ memory, on a rank
def memory_on_a_rank(rank: Rank, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of one variant's moments, as this rank has them; each context with a model of its own."""
    wanted = [Case(**case) for case in cases]
    found = {}
    for context in dict.fromkeys(case.context_length for case in wanted):
        one = next(case for case in wanted if case.context_length == context)
        begin_turn(rank, one)
        with _allocator(rank) if rank.device != "cpu" else _tensors() as look:
            moments = _moments(one, rank, look)
        found |= {dataclasses.replace(one, moment=moment): metrics for moment, metrics in moments.items()}
    return [found[case] for case in wanted]


Look = Callable[[], dict[str, Any]]


@contextlib.contextmanager
def _allocator(rank: Rank) -> Iterator[Look]:
    """What the CUDA allocator and the device say, at each call; the peak is that since the call before."""

    def look() -> dict[str, Any]:
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        seen = {
            "source": "allocator",
            "live_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "requested_bytes": int(statistics.get("requested_bytes.all.current", 0)),
            "reserved_bytes": reserved,
            "outside_bytes": total - free - reserved,
        }
        torch.cuda.reset_peak_memory_stats()
        return seen

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield look


@contextlib.contextmanager
def _tensors() -> Iterator[Look]:
    """The same of the tensors that the dispatcher sees, for a CPU."""
    with watching_tensors() as (_, snapshot):
        before = 0

        def look() -> dict[str, Any]:
            nonlocal before
            active = snapshot().active()
            live, peak = int(active[-1]), int(active[before:].max())
            before = len(active) - 1
            return {"source": "tensors", "live_bytes": live, "peak_bytes": peak, "requested_bytes": live}

        yield look


def _moments(case: Case, rank: Rank, look: Look) -> dict[str, dict[str, Any]]:
    """Moment → metrics of the case's variant: a model is built, and makes steps until one is like all later ones."""
    found: dict[str, dict[str, Any]] = {}
    work = _workload(case, rank)
    sent, name = Collectives(), VARIANTS[case.variant][1]
    work.optimizer(name)

    def note(moment: str, added: str = "", since: int = 0) -> None:
        """The moment's metrics; the component `added` is all that has come since `since` bytes were alive."""
        seen, parts = look(), {"activations": 0} | _components(work, name, sent)
        if added:
            parts[added] = seen["live_bytes"] - since
        parts["other"] = seen["live_bytes"] - sum(parts.values())
        found[moment] = seen | {COMPONENT_COLUMNS[part]: num_bytes for part, num_bytes in parts.items()}

    _settle(rank)
    built = look()
    with _step(work, case) as step:
        _settle(rank)
        note("initialized", added="buckets", since=built["live_bytes"])  # nobody has sent a bucket yet
        found["initialized"]["peak_bytes"] = max(built["peak_bytes"], found["initialized"]["peak_bytes"])
        for number in range(1, _STEPS_WITH_STATE + 1):
            last = number == _STEPS_WITH_STATE
            when = "first" if number == 1 else "later"
            if last:  # what is still held of sent gradients would be missed in the forward pass
                _settle(rank)
            with contextlib.nullcontext() if last else sent:
                before = look()["live_bytes"]
                step.forward()
                if last:
                    note("later_forward", added="activations", since=before)
                step.backward()
                step.synchronize()
                if number == 1 or last:
                    note(f"{when}_before")
                work.optimizer(name).step()
                if number == 1 or last:
                    note(f"{when}_after")
                work.drop_gradients()
    return found


def _settle(rank: Rank) -> None:
    """Returns when what communicated before (optimizers agreeing, weights being copied) has released its buffers."""
    ranks.meet(rank)
    # Gloo's threads do so a moment after they have said that they are done; NCCL's watchdog looks ten times a second
    time.sleep(0.05 if rank.device == "cpu" else 0.3)


def _components(work: ParallelWorkload, optimizer_name: str, sent: Collectives) -> dict[str, int]:
    """Component → bytes by storage, each counted once: under the first component that has it.

    Buckets are what collectives were given that is neither a parameter nor memory of gradients.
    """
    optimizer = work.optimizer(optimizer_name)
    optimizer = getattr(optimizer, "optim", optimizer)  # torch's sharded one keeps the plain optimizer inside
    tensors = {
        "parameters": list(work.parameters),
        "gradients": [p.grad for p in work.parameters if p.grad is not None],
        "optimizer_state": [
            v for state in optimizer.state.values() for v in state.values() if hasattr(v, "untyped_storage")
        ],
    }
    seen: set[int] = set()
    counted = {}
    for component, members in tensors.items():
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in members
            if t.device.type == work.parameters[0].device.type
        }
        counted[component] = sum(n for identity, n in storages.items() if identity not in seen)
        seen |= storages.keys()
    counted["buckets"] = sum(n for identity, n in sent.living_storages() if identity not in seen)
    return counted


# ------------------------------------------------------------------------------------------------ times, on a rank
def times_on_a_rank(rank: Rank, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of all timed cases: the same on all ranks. A line is printed for each."""
    wanted = [Case(**case) for case in cases]
    contexts = sorted({case.context_length for case in wanted}, reverse=True)
    found: dict[Case, dict[str, Any]] = {}
    for context in contexts:
        in_turns = [case for case in wanted if case.context_length == context]
        work = _workload(in_turns[0], rank)
        found |= _times_in_turns(work, in_turns)
        if context == contexts[-1]:  # all has been timed
            for case, counts in _all_counted(work, in_turns).items():
                found[case] |= counts
        del work
    return [found[case] for case in wanted]


def _times_in_turns(work: ParallelWorkload, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    rank, found = work.rank, {}
    clock = RankSteps(
        rank, warmup=SETTLING, steps=STEPS_ON_CPU if rank.device == "cpu" else STEPS, num_rounds=TURNS
    )
    for case, samples in take_turns({c: functools.partial(_turn, work, c) for c in cases}, clock).items():
        step_ms, tokens = samples.p50("step"), case.world_size * case.batch * case.context_length
        row = {column: value for phase in (*PHASES, "step") for column, value in samples.row(phase).items()}
        found[case] = row | {"tokens_per_s": tokens / step_ms * 1e3} | samples.clocks()
        if rank.rank == 0:
            print(f"{case.turn}: {step_ms:.4g} ms", flush=True)
    return ranks.gathered(found, rank)[0]  # rank 0 reads the clocks


@contextlib.contextmanager
def _turn(work: ParallelWorkload, case: Case) -> Iterator[Phases]:
    begin_turn(work.rank, case)
    with _step(work, case) as step:
        phases = {"optimizer": step.optimizer_step, "forward": step.forward, "backward": _backward(step)}
        phases["forward"]()
        phases["backward"]()  # the first step begins with its gradients
        yield phases


def _backward(step: ParallelStep) -> Callable[[], None]:
    """Backward and what is left of averaging the gradients, as one phase: torch's DDP does both in one."""

    def backward() -> None:
        step.backward()
        step.synchronize()

    return backward


def _all_counted(work: ParallelWorkload, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """What each variant sends. A profiler may leave the host slower: afterwards nothing is timed."""
    found = {}
    for case in cases:
        if not case.repeat and case.variant != "overlapped":
            begin_turn(work.rank, case)
            with _step(work, case) as step:
                for _ in range(_STEPS_WITH_STATE - 1):
                    step.run()
                found[case] = _counted(step, work.rank)
    return found


def _counted(step: ParallelStep, rank: Rank) -> dict[str, Any]:
    """What a step sends, and how the optimizer's step spends its time; steps that are not timed."""
    with Collectives() as sent:
        step.run()
    counts: dict[str, Any] = {}
    for kind in ("all_reduce", "broadcast"):
        counts |= {f"{kind}_calls": sent.calls(kind), f"{kind}_bytes": sent.num_bytes(kind)}
    counts["other_calls"] = sum(sent.calls(kind) for kind in sent.kinds) - sum(
        counts[f"{kind}_calls"] for kind in ("all_reduce", "broadcast")
    )
    if rank.device == "cpu":
        return counts
    ranks.meet(rank)
    before = link_bytes(rank.local_rank)
    for _ in range(LINK_STEPS):
        step.run()
    ranks.meet(rank)
    after = link_bytes(rank.local_rank)
    everyones = ranks.gathered((before, after), rank)
    if all(b is not None and a is not None for b, a in everyones):
        for place, name in enumerate(("sent", "received")):
            counts[f"link_{name}_bytes"] = max(a[place] - b[place] for b, a in everyones) / LINK_STEPS
    step.forward()
    _backward(step)()
    ranks.meet(rank)
    found = beside(record_torch(step.optimizer_step))
    both = {"communication_ms": found.communication_ms, "update_ms": found.update_ms}
    both |= {"both_ms": found.both_ms, "whole_ms": found.whole_ms, "optimizer_launches": found.launches}
    return counts | ranks.gathered(both, rank)[0]
