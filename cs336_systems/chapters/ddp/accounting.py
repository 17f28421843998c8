"""Data-parallel training: what is sent in a step, what fills a bucket, and what buckets of a size should cost.

Symbols, as in the handout's problem `ddp_bucketed_benchmarking`: s bytes of gradients, of which w are all-reduced in a
millisecond; o ms of overhead for each call of a collective; n buckets. Nothing here needs torch.
"""

from __future__ import annotations

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
def overhead_ms(total_bytes: float, bytes_per_ms: float, call_ms: float, num_buckets: float) -> float:
    """The handout's model of what overlapping buckets cost beyond the backward pass.

    s bytes in n equal buckets; computing a bucket's gradients takes as long as sending them, s / (n·w). Then each
    bucket is sent while the next is computed, and what stays exposed is the last one, which nothing overlaps, and n
    times the overhead of a call:

        overhead(n) = s / (n·w) + n·o          least at n = sqrt(s / (w·o)), a bucket of sqrt(s·o·w), where both
                                               terms are sqrt(s·o / w)
    """
    return total_bytes / (num_buckets * bytes_per_ms) + num_buckets * call_ms
