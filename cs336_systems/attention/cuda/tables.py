"""Tiles of the CUDA kernels for each generation of GPUs, frozen. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class Forward:
    """Queries and keys of a tile, warps of a block, and how many blocks are to fit a multiprocessor's registers."""

    block_m: int
    block_n: int
    warps: int = 4
    blocks: int = 2

    def shared_bytes(self, block_d: int) -> int:
        """Q, K and V."""
        return (self.block_m + 2 * self.block_n) * block_d * 2


@dataclass(frozen=True)
class Backward:
    """As `Forward`; step: the queries of a tile whose scores are in registers at a time."""

    block_m: int
    block_n: int
    warps: int
    blocks: int
    step: int

    def shared_bytes(self, block_d: int) -> int:
        """K and V; two of Q, dO and dS, and of the statistics of a tile."""
        inputs = (2 * self.block_n + 4 * self.block_m) * block_d * 2
        return inputs + 4 * self.block_m * self.block_n + 16 * self.block_m


# By the oldest compute capability that they are for, and by padded head dimension: the first that is large enough.
# Shared memory decides: 64 KiB of a multiprocessor on 7.5, 164 on 8.0, 100 on 8.6, 8.9 and 12.0, 228 on 9.0 and 10.0.
FORWARD = {
    75: {64: Forward(128, 64), 128: Forward(128, 32)},
    80: {64: Forward(128, 128), 128: Forward(128, 64)},
    86: {64: Forward(128, 128), 128: Forward(128, 32)},
    90: {64: Forward(128, 128), 128: Forward(128, 64)},
    120: {64: Forward(128, 128), 128: Forward(128, 32)},
}
BACKWARD = {
    75: {64: Backward(32, 64, 4, 1, 32), 128: Backward(16, 64, 4, 1, 16)},
    80: {64: Backward(64, 128, 4, 1, 32), 128: Backward(64, 128, 8, 1, 64)},
    86: {64: Backward(64, 128, 4, 1, 32), 128: Backward(32, 64, 4, 1, 32)},
    90: {64: Backward(64, 128, 4, 2, 32), 128: Backward(64, 128, 8, 1, 64)},
    120: {64: Backward(64, 128, 4, 1, 32), 128: Backward(32, 64, 4, 1, 32)},
}
OLDEST = min(FORWARD)


def padded(capability: int, head_dim: int) -> int:
    """The head dimension that the kernels compute with: a multiple of 32."""
    columns = -(-head_dim // 32) * 32
    # 4 warps cannot share out the 16 x 96 numbers of a tile of dQ
    return 128 if columns == 96 and capability < 80 else columns


def chosen(
    table: dict[int, dict[int, Forward | Backward]], capability: int, block_d: int
) -> Forward | Backward:
    """What FORWARD or BACKWARD has for a GPU and a padded head dimension. ValueError for a GPU that is too old."""
    if capability < OLDEST:
        raise ValueError(
            f"flash_cuda: compute capability {capability / 10}; allowed: {OLDEST / 10} and later"
        )
    row = table[max(oldest for oldest in table if oldest <= capability)]
    return next(config for columns, config in row.items() if block_d <= columns)
