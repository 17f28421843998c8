"""Time of an all-reduce: a latency for each step of a ring, and the bytes that pass through each rank's link.

Symbols: n ranks, S bytes of the tensor on each of them. A ring splits the tensor into n chunks. In n - 1 steps each
chunk goes around and is summed (reduce-scatter), in n - 1 more the sums go around (all-gather); in each step every rank
sends S/n bytes to its neighbor and receives as many. With α seconds per step and β bytes/s of a link in one direction,

    t = 2(n - 1)·α + 2(n - 1)/n · S/β.

S/t is the *algorithm bandwidth*, 2(n - 1)/n · S/t the *bus bandwidth*: what the link carries, which tends to β for
large tensors whatever n is. At S = n·α·β, latency and bytes take the same time, and half of β is reached.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); the names
of the bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md). Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.accounting.operations import check_sizes


def all_reduce_steps(world_size: int) -> int:
    """2(n - 1): how often each rank of a ring sends to its neighbor. ValueError unless n is positive."""
    check_sizes(world_size=world_size)
    return 2 * (world_size - 1)


def bus_factor(world_size: int) -> float:
    """2(n - 1)/n: bytes that each rank sends, and receives, for each byte of the tensor; 0 for one rank."""
    return all_reduce_steps(world_size) / world_size


@dataclass(frozen=True)
class Line:
    """t(S) = latency_s + S / bytes_per_s, fitted to measured times; `bytes_per_s` may be infinite.

    residuals: for each point, the fitted over the measured time, less 1.
    """

    latency_s: float
    bytes_per_s: float
    residuals: tuple[float, ...] = ()

    def seconds(self, num_bytes: float) -> float:
        """The time that the line gives a tensor of this size."""
        return self.latency_s + num_bytes / self.bytes_per_s

    @property
    def half_bytes(self) -> float:
        """The size at which half of `bytes_per_s` is reached: latency times bandwidth."""
        return self.latency_s * self.bytes_per_s


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds) with the least sum of squared relative residuals.

    Each point counts by how far the line misses it in percent: absolute errors would let the largest tensors, whose
    times are thousands of times those of the smallest, decide about the latency as well. Neither coefficient is let
    below zero. ValueError for fewer than two sizes, and for times or sizes that are not positive.
    """
    if len({num_bytes for num_bytes, _ in points}) < 2:
        raise ValueError(f"{len(points)} points of fewer than two sizes; a line needs two sizes")
    for num_bytes, seconds in points:
        check_sizes(num_bytes=num_bytes, seconds=seconds)
    # a/t + c·S/t should be 1 everywhere: normal equations for a and c
    u = [1 / seconds for _, seconds in points]
    v = [num_bytes / seconds for num_bytes, seconds in points]
    uu, vv = sum(x * x for x in u), sum(y * y for y in v)
    uv = sum(x * y for x, y in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    a = (sum(u) * vv - sum(v) * uv) / determinant
    c = (sum(v) * uu - sum(u) * uv) / determinant
    if a < 0:
        a, c = 0.0, sum(v) / vv
    elif c < 0:
        a, c = sum(u) / uu, 0.0
    residuals = tuple(a * x + c * y - 1 for x, y in zip(u, v, strict=True))
    return Line(a, 1 / c if c > 0 else float("inf"), residuals)
