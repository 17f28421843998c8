"""One gated feed-forward layer over N devices, as the calculations of spring 2026 ask for it: up to how many devices
its communication hides behind its FLOPs.

y = (f(x W₁) ∗ (x W₂)) W₃, x (B, D), W₁ and W₂ (D, F), W₃ (F, D), two bytes a number: 6·D·F of weights, 2·B·D of
activations. However it is split, a device does 6·B·D·F / N FLOPs forward and twice as many backward, at C FLOP/s, and
sends W bytes/s (a `Chip`'s `flops` and `axis_bytes_per_s`). Collectives go around a ring: an all-gather of S bytes, or
a reduce-scatter, takes (N - 1)/N · S/W, an all-reduce both. Communication overlaps compute, so a bound is where their
times are equal. All bounds are exact: N = 1 communicates nothing and is within each. `equations` runs these layers and
counts what they send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs336_systems.accounting.hardware import peaks
from cs336_systems.accounting.model import check_choice
from cs336_systems.accounting.operations import check_sizes
from cs336_systems.chapters.parallelism.accounting import OVERLAPS, TPU_V5P, Chip

BYTES = 2  # of a number
MATRICES = 3  # of a layer
PARTS = {"forward": 1, "backward": 2}
"""Part of a step → FLOPs in units of a forward pass, 6·B·D·F: backward has two matmuls for each of forward's."""


def _gpu(name: str) -> Chip:
    sheet = peaks(name)
    assert sheet is not None and sheet.nvlink_one_way_gb_per_s is not None, name
    return Chip(sheet.tflops["bf16"] * 1e12, sheet.nvlink_one_way_gb_per_s * 1e9, sheet.tb_per_s * 1e12)


DEVICES = {
    "H100": _gpu("NVIDIA H100 80GB HBM3"), "H200": _gpu("NVIDIA H200"), "B200": _gpu("NVIDIA B200"),
    "TPU v5p": TPU_V5P,
}  # fmt: skip
"""GPUs by their data sheets, NVLink one way; the TPU along one axis of its mesh."""


@dataclass(frozen=True)
class Layer:
    """B tokens through one gated feed-forward layer, D → F → D. ValueError for a size that is not positive."""

    tokens: float
    d_model: float
    d_ff: float

    def __post_init__(self) -> None:
        check_sizes(**vars(self))


# ------------------------------------------------------------------------------------------------------ bounds
def data_parallel_limit(layer: Layer, device: Chip) -> float:
    """The most devices of which communication takes no longer than compute: 1 + B/α. Backward of data parallelism, an
    all-reduce of all gradients; and both passes of FSDP: forward gathers the weights, backward gathers them again and
    reduce-scatters their gradients, so FLOPs and bytes double together."""
    return 1 + layer.tokens / device.alpha


def tensor_limit(layer: Layer, device: Chip, part: str) -> float:
    """The same for tensor parallelism, an all-reduce of (B, D) in each pass, of the output or of the input's gradient:
    1 + 3F/(2α) forward and, with twice the FLOPs for the same bytes, 1 + 3F/α backward."""
    check_choice("part", part, tuple(PARTS))
    return 1 + PARTS[part] * MATRICES * layer.d_ff / (2 * device.alpha)


def grid_limit(layer: Layer, device: Chip, overlap: str) -> tuple[float, float, float]:
    """(N, X, Y): the most devices of a grid, and their best split, of which a forward pass is compute-bound. A device
    gathers its F/Y columns of weights over X, and all-reduces its (B/X, D) over Y.

    Together, each axis has its own bound and N = (1 + B/α)·(1 + 3F/(2α)). In turn, 6F(X - 1) + 4B(Y - 1) ≤ 6BF/α: the
    product X·Y is largest where 6FX and 4BY are equal, half of K = 6BF/α + 6F + 4B each, so N = K²/(96·B·F). (If that
    would put less than one device on an axis, all are on the other one.)
    """
    check_choice("overlap", overlap, OVERLAPS)
    most = data_parallel_limit(layer, device), tensor_limit(layer, device, "forward")
    if overlap == "together":
        return math.prod(most), *most
    f, b = 2 * MATRICES * layer.d_ff, 2 * BYTES * layer.tokens
    half = (f * layer.tokens / device.alpha + f + b) / 2
    fsdp, tensor = half / f, half / b
    if min(fsdp, tensor) < 1:
        fsdp, tensor = (most[0], 1.0) if tensor < 1 else (1.0, most[1])
    return fsdp * tensor, fsdp, tensor
