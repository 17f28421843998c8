"""Rows of chapter ddp made up from a simple model of a step, for tests of its page: no machine has measured them."""

import dataclasses
import json
import random

from cs336_systems.accounting import data_parallel as closed
from cs336_systems.experiments import ddp
from cs336_systems.measure import ranks, rows, trace_overlap
from cs336_systems.measure.code import code_digest
from cs336_systems.measure.trace_overlap import Overlap
from cs336_systems.sizes import size

RATE, CALL_MS = 300e9, 0.03  # of an all-reduce
BASE = {
    128: (30.0, 60.0, 25.0),
    512: (55.0, 110.0, 25.0),
    1024: (110.0, 220.0, 25.0),
}  # forward, backward, optimizer in ms
MACHINE = "h200-x2"


def messages(case):
    """Bytes of each all-reduce."""
    config = size(case.size)
    limit = {
        "naive": 0,
        "overlapped": 0,
        "flat": float("inf"),
        "torch": 25 * closed.MB,
        "torch_view": 25 * closed.MB,
    }
    mb = case.bucket_mb * closed.MB
    return closed.bucket_bytes(config, mb or limit.get(case.wrapper, 0))


def step(case):
    """Phase → ms: communication during the backward pass hides all but the last message and a constant."""
    forward, backward, optimizer = BASE[case.context_length]
    sent = 0.0
    if case.wrapper not in ("alone", "none") and case.world_size > 1:
        sizes = messages(case)
        all_ms = closed.all_reduce_ms(sizes, case.world_size, RATE, CALL_MS / 1e3)
        total = sum(sizes)
        hidden = case.wrapper not in ("naive", "flat")
        sent = 4 + 1e3 * total / len(sizes) / RATE + CALL_MS * len(sizes) if hidden else all_ms
        sent += 6 if case.wrapper == "torch" else 0
    if case.dtype == "fp32":
        forward, backward = 3 * forward, 3 * backward
    return {"forward": forward, "backward": backward, "synchronization": sent, "optimizer": optimizer}


def metrics(case, gpus=2):
    """A plausible result of a case; `skipped` where there are not enough GPUs."""
    if case.world_size > gpus:
        return {"status": f"skipped: needs {case.world_size} GPUs; there are {gpus}"}
    if case.kind == "trace":
        [one] = [traced(case)]
        return {
            "traced_ms": one.length_ms, "communication_ms": one.communication_ms, "compute_ms": one.compute_ms,
            "overlap_ms": one.overlap_ms, "backward_overlap_ms": one.backward_overlap_ms,
            "messages": one.collectives, "source": "nsys", "tool_version": "2025.3.1.90",
        }  # fmt: skip
    draw = random.Random(repr(case))
    times = {p: [ms * (1 + 0.01 * draw.random()) for _ in range(8)] for p, ms in step(case).items()}
    times["step"] = [sum(each) for each in zip(*times.values(), strict=True)]
    tokens = case.batch * case.context_length * (1 if case.wrapper == "alone" else case.world_size)
    wrapper = "none" if case.wrapper == "alone" else case.wrapper
    dtype = "bf16" if case.dtype == "bf16" else "fp32"
    peak = closed.peak_bytes(
        size(case.size), case.batch, case.context_length, dtype, wrapper, case.bucket_mb * closed.MB
    )
    counted = wrapper not in ("torch", "torch_view")
    return ranks.metrics(times) | {
        "tokens_per_s": tokens / ranks.median(times) * 1e3,
        "peak_gib": 1.003 * peak / 2**30,
        "collectives": (0 if wrapper == "none" else len(messages(case))) if counted else None,
        "backend": "nccl",
        "matmul_precision": "high",
    }


def traced(case):
    """One step of one rank as its trace would give it."""
    times = step(case)
    ns = {phase: int(ms * 1e6) for phase, ms in times.items()}
    ends, at = {}, 0
    for phase, length in ns.items():
        ends[phase] = (at, length)
        at += length
    late = case.wrapper in ("naive", "flat")
    b, length = ends["backward"]
    sent = [ends["synchronization"]] if late else [(b + i * length // 20, length // 25) for i in range(2, 20)]
    if not late:
        sent.append(ends["synchronization"])
    compute = [(0, ns["forward"] + ns["backward"]), ends["optimizer"]]
    total = sum(n for _, n in sent) / 1e6
    return Overlap(
        source="nsys", length_ms=at / 1e6, communication_ms=total, compute_ms=sum(n for _, n in compute) / 1e6,
        overlap_ms=0.0 if late else total - times["synchronization"],
        backward_overlap_ms=0.0 if late else total - times["synchronization"], collectives=len(sent),
        phases=tuple((p, *ends[p]) for p in ("forward", "backward", "optimizer")), compute=tuple(compute),
        communication=tuple(sent),
    )  # fmt: skip


def write(root, cases=None, machine=MACHINE, gpus=2):
    """Writes made-up rows of these cases (all of the full grid), their traces, and the machine's description."""
    cases = ddp.grid("full") if cases is None else cases
    provenance = {"time_utc": "2026-01-01T00:00:00Z", "env": "0" * 8, "code": code_digest(ddp)}
    found = []
    for case in cases:
        group = "-".join(str(getattr(case, field)) for field in ddp.GROUP)
        found.append(
            dataclasses.asdict(case) | {"status": "ok"} | metrics(case, gpus) | provenance | {"run": group}
        )
        if case.kind == "trace":
            path = ddp.overlap_path(case, machine, root)
            path.parent.mkdir(parents=True, exist_ok=True)
            trace_overlap.to_json([traced(case)] * case.world_size, path)
    rows.write(ddp, machine, found, root)
    about = {"gpu": "NVIDIA H200", "gpus": gpus, "torch": "2.11.0", "triton": "3.6.0", "driver": "580"}
    (root / machine / "machine.json").write_text(json.dumps({"0" * 8: about}))
