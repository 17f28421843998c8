"""Rows that no machine has measured, for tests of pages: steps made up from the closed forms, and frames by hand."""

import dataclasses
import json
import math
import random

import pandas as pd

from cs336_systems import accounting
from cs336_systems.chapters.shared import steps
from cs336_systems.measure.clocks.turns import Samples
from cs336_systems.sizes import size
from cs336_systems.store import rows
from cs336_systems.store.provenance import digest

SPEED = {"fp32": 40.0, "tf32": 250.0, "bf16": 500.0}  # TFLOP/s
GAIN = {"off": 1.0, "default": 0.7, "reduce-overhead": 0.5, "max-autotune": 0.5}
MEMORY_GIB = 79.0


def metrics(case, seed=0):
    """A plausible result of a case: `oom` where the closed form asks for more than 79 GiB."""
    config, draw = size(case.size), random.Random(f"{case}{seed}")
    plain = dataclasses.replace(case, compile="off")
    peak = steps.predicted_bytes(plain) / 2**30
    if peak > MEMORY_GIB:
        return {"status": "oom"}
    forward = accounting.model_flops(config, case.batch, case.context_length, "forward")
    base = (forward / SPEED[case.dtype] / 1e9 + 0.4 * config.num_layers) * GAIN[case.compile]
    base *= {"reference": 1.3}.get(case.attention, 1.0)
    spent = {"forward": base, "backward": 2 * base, "optimizer": accounting.num_parameters(config) * 1.1e-8}
    count = {"forward": 1, "forward_backward": 2, "train_step": 3}[case.mode]
    found = {"matmul_precision": "highest" if case.dtype == "fp32" else "high"}
    turn = {}
    for phase in steps.PHASES[:count]:
        times = [spent[phase] * (1 + 0.01 * draw.random()) for _ in range(case.steps)]
        if case.warmup == 0:
            times[:2] = [times[0] * 20, times[1] * 1.5]
        turn[phase] = times
        found |= Samples([turn]).row(phase, steps.STATISTICS)
    step = Samples([turn]).summed("step")
    step_ms = step.p50("step")
    found |= step.row("step", steps.STATISTICS) | {"peak_gib": peak * 1.003, "first_step_ms": step_ms * 3}
    if case.compile != "off":
        found |= {"graphs": 1, "compile_s": 2.0 * config.num_layers, "first_step_ms": 2e3 * config.num_layers}
    tokens = case.batch * case.context_length
    peak_tflops = accounting.peaks("NVIDIA H100 80GB HBM3").tflops[case.dtype]
    found["mfu"] = accounting.mfu(config, case.batch, case.context_length, case.mode, step_ms, peak_tflops)
    return found | {"tokens_per_s": tokens / step_ms * 1e3, "sm_mhz": 1900.0, "power_w": 600.0}


def write(experiment, cases, root, machine="h100-x1", make=metrics):
    """Writes made-up rows of the cases into `<root>/<machine>/`; each group is a run."""
    code = digest(experiment)
    for number, group in enumerate(rows.groups(experiment, cases)):
        provenance = {
            "run": f"run-{number}",
            "time_utc": "2026-01-01T00:00:00Z",
            "env": "00000000",
            "status": "ok",
        }
        rows.write(
            experiment, machine,
            [dataclasses.asdict(case) | provenance | {"code": code} | make(case) for case in group], root,
        )  # fmt: skip


def spell_out(environments, root, machine):
    """Writes what digests of environments stand for into `<root>/<machine>/machine.json`."""
    path = root / machine / "machine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(environments, indent=1))


def frame(experiment, *given, **common):
    """Rows of one run of machine `x`: what all have in common, what each is given, and no other number."""
    lacking = dict.fromkeys(experiment.metrics, math.nan)
    lacking |= {"machine": "x", "run": "r", "status": "ok", "repeat": 0}
    found = pd.DataFrame([lacking | common | row for row in given])
    first = [column for column in ("machine", *rows.case_fields(experiment)) if column in found]
    return found[[*first, *found.columns.difference(first, sort=False)]]
