"""Made-up rows of chapter `zero`: a little more than the closed forms say, and times that are easy to tell apart."""

from __future__ import annotations

import dataclasses

from cs336_systems import accounting
from cs336_systems.accounting.zero import zero_step_bytes
from cs336_systems.experiments import zero
from cs336_systems.measure import ranks, rows
from cs336_systems.measure.code import code_digest
from cs336_systems.sizes import size

STEP_MS = {
    "alone": 150.0,
    "plain": 160.0,
    "sharded": 170.0,
    "overlapped": 156.0,
    "torch": 172.0,
    "torch_zero": 188.0,
}
UPDATE_MS = {
    "alone": 14.0,
    "plain": 14.0,
    "sharded": 22.0,
    "overlapped": 7.0,
    "torch": 14.0,
    "torch_zero": 32.0,
}


def memory(case):
    """As a GPU would have it: one percent above the closed form."""
    parts = zero.predicted(case)
    alive = sum(parts.values())
    peak = sum(zero.predicted_peak(case).values())
    columns = {zero.COMPONENT_COLUMNS[name]: num_bytes for name, num_bytes in parts.items()}
    return columns | {
        "source": "allocator", "live_bytes": int(1.01 * alive), "requested_bytes": int(1.005 * alive),
        "other_bytes": int(1.01 * alive) - alive,
        "peak_bytes": int(1.01 * (peak if case.moment == "later_before" else alive)),
        "reserved_bytes": int(1.2 * alive), "outside_bytes": 1 << 30, "rank_spread_bytes": 0,
    }  # fmt: skip


def times(case):
    """Steps that take as long as the tables above say, and a second of A/A one percent longer."""
    step = STEP_MS[case.variant] * (1 + 0.01 * case.repeat) * (1.0 if case.context_length == 128 else 1.25)
    phases = {
        "forward": [step * 0.3] * 3,
        "backward": [step * 0.5] * 3,
        "optimizer": [UPDATE_MS[case.variant]] * 3,
    }
    found = ranks.metrics(phases | {"step": [step * 0.99, step, step * 1.02]})
    found["tokens_per_s"] = case.world_size * case.batch * case.context_length / step * 1e3
    if case.context_length == 128 and not case.repeat and case.variant != "overlapped":
        whole = 4 * accounting.num_parameters(size(case.size))
        alone, sharded = case.variant == "alone", case.variant in ("sharded", "torch_zero")
        sent = zero_step_bytes("sharded" if sharded else "ddp", case.world_size, whole, whole)
        found |= {
            "all_reduce_calls": 0 if alone else 101, "all_reduce_bytes": 0 if alone else whole + 435,
            "other_calls": 0, "broadcast_calls": 435 * sharded, "broadcast_bytes": whole * sharded,
            "link_sent_bytes": 0 if alone else 1.01 * sum(sent.values()), "link_received_bytes": 0 if alone else 1e9,
            "optimizer_launches": 8 * sharded, "communication_ms": 18.0 * sharded,
            "update_ms": 7.0 if sharded else 14.0, "both_ms": 5.0 * (case.variant == "sharded"),
            "whole_ms": 20.0 if sharded else 14.0,
        }  # fmt: skip
    return found | {"sm_mhz": 1900.0, "power_w": 600.0}


def write(cases, root, machine="h200-x2", gpus=2):
    """Writes made-up rows into `<root>/<machine>/`; each group is a run, and what needs more GPUs is skipped."""
    for number, group in enumerate(rows.groups(zero, cases)):
        provenance = {
            "run": f"run-{number}", "time_utc": "2026-01-01T00:00:00Z", "env": "00000000",
            "code": code_digest(zero),
        }  # fmt: skip
        found = []
        for case in group:
            metrics = {"status": "ok"} | (times(case) if case.moment == zero.TIMED else memory(case))
            if case.world_size > gpus:
                metrics = {"status": f"skipped: needs {case.world_size} GPUs"}
            found.append(dataclasses.asdict(case) | metrics | provenance)
        rows.write(zero, machine, found, root)
