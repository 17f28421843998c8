"""The buffer of the backward pass."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Workspace:
    """What the three kernels share, one behind the other in one fp32 buffer, since allocating three costs the host
    more: two statistics per row, the accumulator of dQ, the backward kernel's counters (int32), and in 16 bits a tile
    of a dO that is an expanded scalar."""

    stats: tuple[int, int]
    dq_sum: tuple[int, int, int]
    counters: int
    tile: tuple[int, int, int, int] | None

    @functools.cached_property
    def _starts(self) -> tuple[int, int, int, int]:
        """Where the second and the others begin, and the end, in fp32 elements; the tile at a multiple of 16 bytes,
        since TMA reads it."""
        dq_sum = math.prod(self.stats)
        counters = dq_sum + math.prod(self.dq_sum)
        tile = counters + triton.cdiv(self.counters, 4) * 4
        return dq_sum, counters, tile, tile + (math.prod(self.tile) // 2 if self.tile else 0)

    @property
    def scratch(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The buffer's shape and dtype, as `triton.again.Pass` takes them."""
        return (((self._starts[-1],), torch.float32),)

    def addresses(self, start: int) -> tuple[int, int, int, int]:
        """The four in a buffer at `start`, in bytes; without a tile the last is where the buffer ends."""
        dq_sum, counters, tile, _ = self._starts
        return start, start + 4 * dq_sum, start + 4 * counters, start + 4 * tile

    def tensors(
        self, buffer: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The four as views of the buffer in their shapes: fp32, fp32, int32, and the tile, if there is one, in
        `dtype`."""
        dq_sum, counters, tile, _ = self._starts
        of_tile = buffer[tile:].view(dtype).view(self.tile) if self.tile else None
        stats, sums = buffer[:dq_sum].view(self.stats), buffer[dq_sum:counters].view(self.dq_sum)
        return stats, sums, buffer[counters:tile].view(torch.int32), of_tile
