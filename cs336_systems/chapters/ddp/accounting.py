"""Data-parallel training: what is sent in a step, what fills a bucket, and what buckets of a size should cost.

Symbols, as in the handout's problem `ddp_bucketed_benchmarking`: s bytes of gradients, of which w are all-reduced in a
second; o seconds of overhead for each call of a collective; n buckets. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.accounting.operations import check_sizes
from cs336_systems.accounting.zero import tensor_sizes
from cs336_systems.sizes import ModelConfig

FP32 = 4
MB = 2**20


# ------------------------------------------------------------------------------------------------------ what is sent
def bucket_bytes(config: ModelConfig, max_bytes: float) -> list[int]:
    """Bytes of fp32 gradients in each bucket, in the order in which they are filled: the last parameters first.

    The rule of `parallel.buckets.assign`: the parameter that would take a bucket over `max_bytes` begins the next. 0
    gives each parameter a bucket of its own. ValueError for a negative limit.
    """
    if not max_bytes >= 0:
        raise ValueError(f"max_bytes={max_bytes}; it must not be negative")
    buckets: list[int] = []
    for size in reversed(tensor_sizes(config)):
        num_bytes = FP32 * size
        if buckets and buckets[-1] + num_bytes <= max_bytes:
            buckets[-1] += num_bytes
        else:
            buckets.append(num_bytes)
    return buckets


# ------------------------------------------------------------------------------------------------- the bucket model
@dataclass(frozen=True)
class Buckets:
    """The handout's model of what overlapping buckets cost beyond the backward pass.

    s bytes in n equal buckets; computing a bucket's gradients takes as long as sending them, s / (n·w). Then each
    bucket is sent while the next is computed, and what stays exposed is the last one, which nothing overlaps, and n
    times the overhead of a call:

        overhead(n) = s / (n·w) + n·o          least at n = sqrt(s / (w·o)), a bucket of sqrt(s·o·w), where both
                                               terms are sqrt(s·o / w)

    total_bytes: s. bytes_per_s: w, bytes of gradients all-reduced in a second. call_s: o. ValueError unless all are
    positive.
    """

    total_bytes: float
    bytes_per_s: float
    call_s: float

    def __post_init__(self) -> None:
        check_sizes(**vars(self))

    def overhead_s(self, num_buckets: float) -> float:
        """overhead(n); ValueError unless n is positive."""
        check_sizes(num_buckets=num_buckets)
        return self.total_bytes / (num_buckets * self.bytes_per_s) + num_buckets * self.call_s
