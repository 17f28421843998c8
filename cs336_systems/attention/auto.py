"""Which implementation of attention "auto" means, and which can run here. torch.compile takes these answers without
tracing the questions."""

from __future__ import annotations

import torch

from cs336_systems.attention import registry
from cs336_systems.attention.inputs import DTYPES, MAX_HEAD_DIM, MIN_HEAD_DIM
from cs336_systems.attention.registry import IMPLEMENTATIONS

_before_ampere: dict[int, bool] = {}


@torch.compiler.assume_constant_result
def usable(name: str) -> bool:
    """Whether an implementation of attention can run on this machine; asked once."""
    return registry.usable(name)


@torch.compiler.assume_constant_result
def before_ampere(device_index: int) -> bool:
    """Whether a GPU is of a compute capability below 8.0; asked once."""
    if device_index not in _before_ampere:
        _before_ampere[device_index] = torch.cuda.get_device_capability(device_index) < (8, 0)
    return _before_ampere[device_index]


def chosen(q: torch.Tensor, asked: tuple[str, ...] = ()) -> str:
    """The implementation for queries like q (..., n, d) that serves what is asked of `registry.FEATURES`: on a GPU
    `flash_triton` where it can run, else `flash_cuda` where that can and takes them; the other way round before Ampere,
    whose tensor cores Triton leaves idle. Otherwise, and on a CPU, `reference`."""
    if not q.is_cuda:
        return "reference"
    order = ("flash_triton", "flash_cuda")
    for name in reversed(order) if before_ampere(q.get_device()) else order:
        if usable(name) and set(asked) <= set(IMPLEMENTATIONS[name].features) and _serves(name, q):
            return name
    return "reference"


def _serves(name: str, q: torch.Tensor) -> bool:
    if name == "flash_triton":
        if not (q.dtype in DTYPES and MIN_HEAD_DIM <= q.shape[-1] <= MAX_HEAD_DIM):
            return False
        # of fp32 before Ampere no tiles of the backward kernel for keys fit the GPU's shared memory
        fp32 = q.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return not (fp32 and q.shape[-1] > 128 and before_ampere(q.get_device()))
    from cs336_systems.attention import flash_cuda

    return flash_cuda.serves(q)
