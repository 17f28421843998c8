"""Closed forms, each evaluated by code: FLOPs, bytes and times that are predicted before they are measured.

`operations` says what an operation must compute and move, `attention_limits` what each unit of a multiprocessor does
for attention, `model` what a whole Transformer must compute, `memory` what it holds, `attention_memory` what one
attention holds and moves, `train_step` how long a step takes at the least, `collectives` how long an all-reduce takes,
`hardware` what a known GPU could do at best.
Nothing here needs torch.
"""

from cs336_systems.accounting.attention_limits import (
    MULTIPROCESSORS,
    Multiprocessor,
    Work,
    backward_work,
    forward_work,
    harness_bytes,
    idle_factor,
    overlapped_ms,
    product_shared_bytes,
    unit_ms,
    visited_pairs,
)
from cs336_systems.accounting.attention_memory import (
    ATTENTION_IMPLS,
    BEFORE_BACKWARD,
    Kernel,
    attention_kernels,
    attention_moments,
    attention_peak_bytes,
    kernels_ms,
)
from cs336_systems.accounting.collectives import (
    Line,
    all_reduce_steps,
    bus_factor,
    fit_line,
)
from cs336_systems.accounting.hardware import Peaks, exps_ms, peaks, roofline_ms
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
from cs336_systems.accounting.train_step import train_step_kernels, train_step_ms
from cs336_systems.accounting.zero import (
    shard_imbalance,
    zero_memory,
    zero_optimizer_ms,
    zero_peak_memory,
    zero_step_bytes,
    zero_step_memory,
)

__all__ = [
    "ATTENTION_IMPLS",
    "BEFORE_BACKWARD",
    "MEMORY_MODES",
    "MODES",
    "MULTIPROCESSORS",
    "PARTS",
    "Kernel",
    "Line",
    "Multiprocessor",
    "Peaks",
    "Work",
    "all_reduce_steps",
    "attention_bytes",
    "attention_exps",
    "attention_flops",
    "attention_kernels",
    "attention_moments",
    "attention_peak_bytes",
    "autocast_copy_bytes",
    "backward_work",
    "bus_factor",
    "exps_ms",
    "fit_line",
    "forward_matmul_flops",
    "forward_work",
    "harness_bytes",
    "idle_factor",
    "kernels_ms",
    "matmul_flops",
    "memory_moments",
    "mfu",
    "model_flops",
    "num_parameters",
    "overlapped_ms",
    "parameter_counts",
    "peak_bytes",
    "peaks",
    "product_shared_bytes",
    "residual_bytes",
    "roofline_ms",
    "saved_activation_bytes",
    "saved_layer_bytes",
    "shard_imbalance",
    "train_step_kernels",
    "train_step_ms",
    "unit_ms",
    "visited_pairs",
    "zero_memory",
    "zero_optimizer_ms",
    "zero_peak_memory",
    "zero_step_bytes",
    "zero_step_memory",
]
