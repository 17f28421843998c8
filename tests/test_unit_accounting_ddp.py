"""Closed forms of data parallelism: buckets against the code's, the model of their overhead."""

import dataclasses
import math

import pytest

from cs336_systems.chapters.ddp import accounting as closed
from cs336_systems.sizes import ModelConfig

TOY = ModelConfig(d_model=32, d_ff=64, num_layers=3, num_heads=2, vocab_size=50)


# ------------------------------------------------------------------------------------------------ buckets
@pytest.mark.parametrize("max_bytes", [0, 5_000, 20_000, 1e9, math.inf])
@pytest.mark.parametrize("config", [TOY, dataclasses.replace(TOY, num_kv_heads=1)], ids=["", "grouped"])
def test_buckets_are_those_of_the_code(config, max_bytes):
    pytest.importorskip("torch")
    from cs336_systems.model import build
    from cs336_systems.parallel.buckets import assign

    parameters = list(build(config, device="meta").parameters())
    expected = [sum(4 * p.numel() for p in b.parameters) for b in assign(reversed(parameters), max_bytes)]
    assert closed.bucket_bytes(config, max_bytes) == expected
    with pytest.raises(ValueError, match="max_bytes=-1"):
        closed.bucket_bytes(TOY, -1)


# ------------------------------------------------------------------------------------------------ the model
def simulated_overhead(num_buckets, s, w, o):
    """Buckets computed and sent in turns, each in the time of the other: what sending ends later by, and the calls."""
    each = s / num_buckets / w
    computed = sent = 0.0
    for _ in range(num_buckets):
        computed += each
        sent = max(sent, computed) + each
    return sent - computed + num_buckets * o


@pytest.mark.parametrize("num_buckets", [1, 2, 7, 100])
def test_the_model_is_its_derivation(num_buckets):
    found = closed.overhead_ms(8e9, 3e8, 3e-2, num_buckets)
    assert found == pytest.approx(simulated_overhead(num_buckets, 8e9, 3e8, 3e-2))
