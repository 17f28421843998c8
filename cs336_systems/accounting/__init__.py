"""Closed forms, each evaluated by code: FLOPs, bytes and times that are predicted before they are measured.

`operations` says what an operation must compute and move, `hardware` what a known GPU could do at best. Nothing here
needs torch.
"""

from cs336_systems.accounting.hardware import Peaks, exps_ms, peaks, ridge_flops_per_byte, roofline_ms
from cs336_systems.accounting.operations import (
    PARTS,
    attention_bytes,
    attention_exps,
    attention_flops,
    matmul_flops,
)

__all__ = [
    "PARTS",
    "Peaks",
    "attention_bytes",
    "attention_exps",
    "attention_flops",
    "exps_ms",
    "matmul_flops",
    "peaks",
    "ridge_flops_per_byte",
    "roofline_ms",
]
