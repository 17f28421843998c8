"""The portable Triton kernels' frozen tile configurations: by GPU generation, kernel, head dimension and precision; on
Hopper others for few programs, and where the machine code is not to be trusted. (Those of the kernels for Hopper are in
`hopper.configs` and `hopper.split_launch`.)

Nothing is tuned at run time: autotuning costs minutes at the first call and makes runs differ from each other.
`cs336 bench flash --tune` measures the candidates on the machine at hand and prints the row to add to
TABLE, which is for many programs; FEW and WITHOUT_WGMMA have the exceptions.

The rows of `sm_90` were chosen by measurement: TABLE's on an H100, FEW's on an H200. The other generations hold shapes
that their shared memory and registers take without spilling, which the compile tests check against the limits below; on
such a GPU, tune.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KERNELS = ("forward", "backward_queries", "backward_keys")
HEAD_DIMS = (16, 32, 64, 128, 256)  # the powers of two that a head dimension is rounded up to

# Shared memory that one block may use, KiB (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_MEMORY_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


@dataclass(frozen=True)
class Tiles:
    """BLOCK_M query rows, BLOCK_N keys, warps of a program, and loads in flight (stages of the software pipeline)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Few(Tiles):
    """Tiles of fewer rows, for where the table's make fewer programs for each multiprocessor than `below`: then the
    time is that of the longest program."""

    below: float = 1 / 2


# 16-bit tiles; fp32 tiles with TF32 matmuls; fp32 tiles with fp32 accuracy
PRECISIONS = ("half", "tf32", "fp32")

# generation → kernel → precision → rows for d up to 16, 32, 64, 128, 256; None: not even the smallest tiles fit
_T = Tiles
# fmt: off
_SMALL_FP32 = {
    "forward": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 16, 4, 1), _T(16, 16, 4, 1), _T(16, 16, 8, 1)),
    "backward_queries": (_T(32, 16, 4, 1), _T(32, 16, 4, 1), _T(16, 16, 4, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
    "backward_keys": (_T(16, 32, 4, 1), _T(16, 32, 4, 1), _T(16, 16, 4, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
}
TABLE: dict[int, dict[str, dict[str, tuple[Tiles | None, ...]]]] = {
    75: {  # triton uses no tensor cores here, so these are for completeness
        "forward": {
            "half": (_T(64, 32, 8, 1), _T(64, 32, 8, 1), _T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(32, 16, 8, 1)),
            "tf32": _SMALL_FP32["forward"],
            "fp32": _SMALL_FP32["forward"],
        },
        "backward_queries": {
            "half": (_T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
            "tf32": _SMALL_FP32["backward_queries"],
            "fp32": _SMALL_FP32["backward_queries"],
        },
        "backward_keys": {
            "half": (_T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
            "tf32": (*_SMALL_FP32["backward_keys"][:4], None),
            "fp32": (*_SMALL_FP32["backward_keys"][:4], None),
        },
    },
    80: {
        "forward": {
            "half": (_T(128, 64, 4, 3), _T(128, 64, 4, 3), _T(128, 64, 4, 3), _T(128, 64, 8, 2), _T(64, 32, 8, 2)),
            "tf32": (_T(64, 32, 4, 2), _T(64, 32, 4, 2), _T(64, 32, 4, 2), _T(64, 32, 8, 2), _T(32, 16, 8, 1)),
            "fp32": (_T(64, 32, 4, 2), _T(64, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
        },
        "backward_queries": {
            "half": (_T(64, 64, 4, 2), _T(64, 64, 4, 2), _T(64, 64, 4, 2), _T(64, 32, 8, 2), _T(32, 32, 8, 1)),
            "tf32": (_T(64, 32, 4, 2), _T(64, 32, 4, 2), _T(32, 32, 4, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
            "fp32": (_T(32, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
        },
        "backward_keys": {
            "half": (_T(64, 64, 4, 2), _T(64, 64, 4, 2), _T(32, 64, 4, 2), _T(32, 64, 8, 2), _T(32, 32, 8, 1)),
            "tf32": (_T(32, 64, 4, 2), _T(32, 64, 4, 2), _T(32, 32, 4, 1), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
            "fp32": (_T(32, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
        },
    },
    90: {
        "forward": {
            "half": (_T(64, 128, 4, 3), _T(64, 128, 4, 3), _T(128, 64, 8, 3), _T(128, 128, 8, 3), _T(128, 64, 8, 2)),
            "tf32": (_T(128, 64, 8, 3), _T(128, 64, 8, 3), _T(128, 64, 8, 3), _T(128, 64, 8, 2), _T(32, 16, 8, 1)),
            "fp32": (_T(128, 64, 8, 1), _T(128, 64, 8, 1), _T(128, 64, 8, 1), _T(32, 32, 4, 1), _T(16, 16, 8, 1)),
        },
        "backward_queries": {
            "half": (_T(64, 64, 4, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3), _T(128, 64, 8, 3), _T(128, 32, 8, 3)),
            "tf32": (_T(128, 64, 8, 2), _T(128, 64, 8, 2), _T(128, 64, 8, 2), _T(128, 32, 8, 2), _T(16, 16, 8, 1)),
            "fp32": (_T(128, 64, 8, 2), _T(128, 64, 8, 2), _T(128, 64, 8, 2), _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
        },
        "backward_keys": {
            "half": (_T(128, 64, 4, 3), _T(128, 64, 4, 3), _T(128, 128, 8, 3), _T(64, 128, 8, 3), _T(64, 32, 8, 3)),
            "tf32": (_T(64, 128, 8, 2), _T(64, 128, 8, 2), _T(32, 128, 8, 2), _T(32, 128, 8, 1), _T(16, 16, 8, 1)),
            "fp32": (_T(32, 32, 4, 2), _T(32, 32, 4, 2), _T(64, 32, 8, 2), _T(64, 16, 8, 1), _T(16, 16, 8, 1)),
        },
    },
}
TABLE[86] = TABLE[80] | {
    "forward": TABLE[80]["forward"]
    | {"half": (_T(128, 64, 4, 2), _T(128, 64, 4, 2), _T(128, 64, 4, 2), _T(64, 64, 4, 1), _T(32, 32, 4, 1))},
}
TABLE[100] = TABLE[80]
TABLE[120] = TABLE[86]


_F = Few
# generation → kernel → precision → by d. `below` was read off few measurements, of one to sixteen heads.
FEW: dict[int, dict[str, dict[str, dict[int, Few]]]] = {
    90: {
        "forward": {
            "half": {64: _F(16, 64, 4, 3, 1 / 4), 128: _F(16, 64, 4, 3, 1 / 4)},
            "tf32": {16: _F(32, 64, 4, 2), 32: _F(16, 64, 4, 2), 64: _F(16, 64, 4, 2), 128: _F(16, 64, 4, 2, 1)},
            "fp32": {16: _F(64, 64, 4, 2), 32: _F(16, 64, 4, 2), 64: _F(16, 64, 4, 2), 128: _F(16, 32, 4, 2, 1)},
        },
        "backward_queries": {
            "half": {32: _F(16, 64, 4, 3), 64: _F(16, 64, 4, 3), 128: _F(16, 64, 4, 3, 1 / 4)},
            "tf32": {32: _F(16, 64, 4, 2), 64: _F(16, 64, 4, 2), 128: _F(16, 64, 4, 2, 1)},
            "fp32": {16: _F(32, 64, 4, 2), 32: _F(16, 64, 4, 2), 64: _F(16, 64, 4, 2), 128: _F(16, 32, 4, 2, 1)},
        },
        "backward_keys": {
            "half": {
                16: _F(128, 32, 4, 3),
                32: _F(64, 16, 4, 3, 1 / 4),
                64: _F(64, 16, 4, 3, 1 / 4),
                128: _F(64, 16, 4, 3, 1 / 4),
            },
            "tf32": {16: _F(64, 32, 4, 2), 32: _F(64, 16, 4, 2), 64: _F(64, 16, 4, 2), 128: _F(64, 16, 4, 2, 1)},
            "fp32": {32: _F(64, 16, 4, 2, 1), 64: _F(64, 16, 8, 1, 1)},
        },
    },
}
# fmt: on

# by precision, for d up to 16, 32, 64, 128, 256: so few rows that matmuls do not use Hopper's wgmma instructions
WITHOUT_WGMMA = {
    "half": (*[_T(32, 32, 4, 2)] * 4, _T(32, 32, 8, 1)),
    "tf32": (*[_T(32, 32, 4, 1)] * 3, _T(32, 32, 8, 1), _T(16, 16, 8, 1)),
    "fp32": (*[_T(32, 32, 4, 1)] * 3, *[_T(16, 16, 8, 1)] * 2),
}

# where heads of queries share one of keys: the loop over them needs registers, and the table's tiles would spill
_NARROW, _WIDE = _T(64, 64, 4, 3), _T(64, 128, 8, 3)
GROUPED = {(90, "backward_keys", "half", d): _WIDE if d == 64 else _NARROW for d in (16, 32, 64)}

# where a program that sums both dK and dV of enough keys for wgmma would spill: the tiles of a launch for each, from a
# program to a multiprocessor on
APART: dict[tuple[int, str, int], tuple[Tiles, Tiles]] = {
    (90, "half", 256): (_T(32, 128, 8, 2), _T(32, 128, 8, 2))
}

# The forward kernel's tiles where keys are at least CROSS times as many as queries: few of their rows are empty.
# generation, precision, d → queries of a program → tiles
CROSS = 4
FEW_QUERIES = {(90, "half", d): {16: _T(16, 64, 4, 3), 64: _T(64, 64, 4, 3)} for d in (64, 128)}

# For splitting its keys among programs: most queries of a program, programs that a multiprocessor should hold, fewest
# keys of a program, most splits
SPLIT_ROWS, PROGRAMS, SPLIT_KEYS, MAX_SPLITS = 128, 2, 512, 32

OLDEST = min(TABLE)
FEW_ROWS = 16  # of most programs of FEW's
_INTERPRETER = Tiles(32, 16, 4, 1)  # on the CPU: small enough that a small test meets every branch


def generation(capability: int) -> int:
    """The generation whose rows a GPU of this compute capability (10 · major + minor) uses: the nearest older one."""
    if capability < OLDEST:
        raise ValueError(
            f"compute capability {capability / 10} is too old for the Triton kernels; oldest: {OLDEST / 10}"
        )
    return max(g for g in TABLE if g <= capability)


def rows_of(kernel: str, tiles: Tiles) -> int:
    """The rows that a program of a kernel writes: queries, or keys."""
    return tiles.block_n if kernel == "backward_keys" else tiles.block_m


def _column(head_dim: int) -> int:
    """The place of a head dimension in the rows of a table."""
    return next(i for i, d in enumerate(HEAD_DIMS) if head_dim <= d)


def tiles(
    kernel: str, capability: int, head_dim: int, precision: str, programs_per_multiprocessor: float = math.inf
) -> Tiles:
    """The frozen configuration of one of KERNELS for a head dimension of 16 to 256 and one of PRECISIONS, where the
    table's makes so many programs for each multiprocessor of the GPU (left out: many).

    ValueError where the GPU is too old, or where no configuration fits its shared memory.
    """
    column = _column(head_dim)
    few = FEW.get(generation(capability), {}).get(kernel, {}).get(precision, {}).get(HEAD_DIMS[column])
    if few is not None and programs_per_multiprocessor < few.below:
        return few
    found = TABLE[generation(capability)][kernel][precision][column]
    if found is None:
        raise ValueError(
            f"head dimension {head_dim} in fp32 does not fit a GPU of compute capability {capability / 10}; "
            f"allowed there: up to {HEAD_DIMS[column - 1]}, or 16-bit inputs"
        )
    return found


def tiles_without_wgmma(head_dim: int, precision: str) -> Tiles:
    """The configuration with which any of KERNELS computes its matmuls without wgmma instructions, for a head dimension
    of 16 to 256 and one of PRECISIONS."""
    return WITHOUT_WGMMA[precision][_column(head_dim)]


@functools.cache
def capability_of(device_index: int) -> int:
    """The compute capability of a GPU, 10 · major + minor."""
    import torch

    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@functools.cache
def multiprocessors_of(device_index: int) -> int:
    """How many multiprocessors a GPU has."""
    import torch

    return torch.cuda.get_device_properties(device_index).multi_processor_count


def few_programs_of(batch_heads: int, length: int) -> int:
    """How many programs of FEW_ROWS a kernel has for so many heads and rows of each."""
    return batch_heads * -(-length // FEW_ROWS)


def splits_for(q: torch.Tensor, k: torch.Tensor) -> int:
    """Among how many programs the forward kernel, without a mask, splits the keys of tensors q, k (batch, heads, n, d):
    a power of two; 1 where the queries alone make enough programs for their GPU, or the keys are few."""
    if q.device.type != "cuda":
        return 1
    batch, heads, num_queries, _ = q.shape
    programs = batch * heads * -(-num_queries // SPLIT_ROWS)
    room = PROGRAMS * multiprocessors_of(q.device.index) // programs
    most = min(room, k.shape[2] // SPLIT_KEYS, MAX_SPLITS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def tiles_for(kernel: str, q: torch.Tensor, k: torch.Tensor, precision: str) -> Tiles:
    """The configuration of a kernel for tensors q, k (batch, heads, n, d) on their device."""
    if q.device.type != "cuda":
        return _INTERPRETER
    batch, _, num_queries, head_dim = q.shape
    capability = capability_of(q.device.index)
    if kernel == "forward" and k.shape[2] >= max(CROSS * num_queries, SPLIT_KEYS):
        found = FEW_QUERIES.get((generation(capability), precision, HEAD_DIMS[_column(head_dim)]), {})
        rows = next((rows for rows in found if num_queries <= rows), max(found, default=None))
        if rows and (num_queries <= rows or splits_for(q, k) > 1):
            return found[rows]
    chosen = tiles(kernel, capability, head_dim, precision)
    heads, length = (k if kernel == "backward_keys" else q).shape[1:3]
    programs = batch * heads * -(-length // rows_of(kernel, chosen))
    found = tiles(kernel, capability, head_dim, precision, programs / multiprocessors_of(q.device.index))
    of_group = generation(capability), kernel, precision, HEAD_DIMS[_column(head_dim)]
    return GROUPED.get(of_group, found) if found == chosen and k.shape[1] < q.shape[1] else found


def apart_for(q: torch.Tensor, k: torch.Tensor, precision: str) -> tuple[Tiles, Tiles] | None:
    """The configurations of the backward kernel for keys where dK and dV of tensors q, k (batch, heads, n, d) have a
    launch each; None where they share one."""
    if q.device.type != "cuda":
        return None
    of_gpu = generation(capability_of(q.device.index)), precision, HEAD_DIMS[_column(q.shape[3])]
    found, (batch, heads, num_keys, _) = APART.get(of_gpu), k.shape
    if found is None or batch * heads * -(-num_keys // found[0].block_n) < multiprocessors_of(q.device.index):
        return None
    return found
