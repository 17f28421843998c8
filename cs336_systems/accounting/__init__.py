"""Closed forms, each evaluated by code: FLOPs, bytes and times that are predicted before they are measured.

`operations` says what an operation must compute and move, `model` what a whole Transformer must compute, `memory` what
it holds, `hardware` what a known GPU could do at best. Nothing here needs torch.
"""

from cs336_systems.accounting.hardware import Peaks, exps_ms, peaks, ridge_flops_per_byte, roofline_ms
from cs336_systems.accounting.memory import (
    MEMORY_MODES,
    autocast_copy_bytes,
    memory_moments,
    peak_bytes,
    saved_activation_bytes,
    saved_layer_bytes,
)
from cs336_systems.accounting.model import (
    MODES,
    forward_matmul_flops,
    mfu,
    model_flops,
    num_parameters,
    parameter_counts,
    residual_bytes,
)
from cs336_systems.accounting.operations import (
    PARTS,
    attention_bytes,
    attention_exps,
    attention_flops,
    matmul_flops,
)

__all__ = [
    "MEMORY_MODES",
    "MODES",
    "PARTS",
    "Peaks",
    "attention_bytes",
    "attention_exps",
    "attention_flops",
    "autocast_copy_bytes",
    "exps_ms",
    "forward_matmul_flops",
    "matmul_flops",
    "memory_moments",
    "mfu",
    "model_flops",
    "num_parameters",
    "parameter_counts",
    "peak_bytes",
    "peaks",
    "residual_bytes",
    "ridge_flops_per_byte",
    "roofline_ms",
    "saved_activation_bytes",
    "saved_layer_bytes",
]
