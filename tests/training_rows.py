"""Rows of chapter `training` made up from its predictions, for tests of its pages: no machine has measured them."""

from __future__ import annotations

import json
import math
import random
import sys

import step_rows

from cs336_systems import chapters
from cs336_systems.chapters.hardware.roofs import Roofs
from cs336_systems.chapters.speedrun import plan as speedrun

TABLES = chapters.TABLES["training"]
H200 = Roofs(tflops={"fp32": 53.0, "tf32": 356.0, "bf16": 712.0, "fp16": 672.0}, tb_per_s=4.3)
LADDER = {  # rung → ms, GiB
    "fp32": (420, 27.0), "tf32": (170, 27.0), "bf16": (130, 25.5), "compiled": (41, 16.0), "flash": (28, 10.0),
    "graphs": (28.2, 10.5), "ddp": (18.5, 6.3), "ddp_whole": (17.9, 6.2),
    "ddp_graphs": (15.9, 6.2), "sharded": (18.0, 5.9),
}  # fmt: skip
ATTENTION_MS = {
    "reference": 60, "reference_compiled": 50, "sdpa": 36, "flash_triton": 35, "flash_torch": 300,
    "flash_compiled_backward": 200,
}  # fmt: skip
EXPOSED_MS = {"none": 0, "naive": 8, "flat": 6, "overlapped": 5, "bucketed": 3.5, "in_place": 2.5, "torch": 3}


def curve(key, steps, floor=0.4):
    draw = random.Random(str(key))
    return [floor + 7.2 * math.exp(-i / 25) + 0.001 * draw.random() for i in range(steps)]


def trial(case, ms, gib, sequences):
    losses = curve((case.repeat, getattr(case, "rung", 0)), case.steps + 3)
    speed = sequences * case.context_length / ms * 1e3
    return {
        "step_ms_p20": 0.99 * ms, "step_ms_p50": ms * (1 + 0.01 * case.repeat), "step_ms_p80": 1.02 * ms,
        "first_step_s": 3.0, "tokens_per_s": speed, "mfu": 0.4, "peak_gib": gib, "epoch_s": 2.4e8 / speed,
        "loss_last": losses[-1], "losses": " ".join(f"{x:.5g}" for x in losses), "vocab_size": 2048, "backend": "nccl",
        "sm_mhz": 1900, "power_w": 600,
    }  # fmt: skip


def metrics(case):
    """A plausible result of a case of any of the chapter's tables."""
    name = sys.modules[type(case).__module__].TABLE.name
    if name == "training_ladder":
        return trial(case, *LADDER[case.rung], case.sequences)
    if name == "training":
        ms = ATTENTION_MS.get(case.attention, 90) + EXPOSED_MS[case.wrapper] + 1.5 * case.sharded
        return trial(case, ms, 8.0 - 0.4 * case.sharded, case.sequences)
    if name == "training_fits":
        peak = speedrun.gib_of(case.size, case.context_length, case.sequences)
        told = {"predicted_gib": peak, "losses": "7.6 7.5"}
        if peak > case.cap_gib:
            return told | {"status": "oom"}
        return told | {
            "step_ms_p50": 100.0, "tokens_per_s": 1e5, "peak_gib": peak * 1.02, "reserved_gib": peak * 1.05,
            "skipped_steps": 1, "loss_scale": 32768.0, "loss_first": 7.6, "loss_last": 7.0,
        }  # fmt: skip
    if name == "training_run":
        points = range(1, 41)
        tokens = [f"{case.minutes * 8e5 * i:.6g}" for i in points]
        losses = [f"{0.42 + 7 * math.exp(-i / 3):.6g}" for i in points]
        seconds = [f"{60 * case.minutes * i / 40:.5g}" for i in points]
        return {
            "steps": 4000, "tokens": 1.3e8, "seconds": 60 * case.minutes, "tokens_per_s": 5.5e5, "mfu": 0.42,
            "peak_gib": 10.0 if case.cap_gib else 30.0, "skipped_steps": 2 if case.dtype == "fp16" else None,
            "vocab_size": 2048, "valid_loss": 0.42, "bits_per_byte": 0.143, "floor": 0.38,
            "floor_bits_per_byte": 0.129, "loss_tokens": " ".join(tokens), "losses": " ".join(losses),
            "valid_tokens": " ".join(tokens), "valid_seconds": " ".join(seconds), "valid_losses": " ".join(losses),
            "prompt": "Once", "before": "Once ??? b", "after": "Once upon a time there was a little bear.",
        }  # fmt: skip
    return attention(case)


def attention(case):
    scores = case.num_queries * case.num_keys
    slow = {"reference": 5, "reference_compiled": 3, "sdpa": 1.05, "flash_torch": 40, "flash_triton": 1}
    ms = (0.01 + scores * 2e-8) * slow[case.attention]
    matrix = case.batch * case.heads * scores * 2 / 2**30
    stored = {"reference": 3, "reference_compiled": 2}.get(case.attention, 0) * matrix
    if case.cap_gib and stored > case.cap_gib:
        return {"status": "oom", "failed_in": "forward"}
    found = {f"forward_ms_{p}": ms for p in ("p20", "p50", "p80")} | {"forward_peak_gib": 0.3 + stored}
    if case.cap_gib and 2 * stored > case.cap_gib:
        return found | {"status": "oom", "failed_in": "backward"}
    return found | {f"both_ms_{p}": 3.5 * ms for p in ("p20", "p50", "p80")} | {"peak_gib": 0.6 + 2 * stored}


def write(root, machine="h200-x2", preset="full"):
    """Writes rows of all tables into `<root>/<machine>/`, and has the book quote them."""
    for name in TABLES:
        experiment = chapters.load(name)
        step_rows.write(experiment, experiment.grid(preset), root, machine, make=metrics)
    (root / "reference.json").write_text(json.dumps({"training": [machine]}))
