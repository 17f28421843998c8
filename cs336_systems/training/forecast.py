"""What a run will take, before it begins: `cs336 train --dry-run`; and what fits a small GPU: `cs336 speedrun`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cs336_systems.accounting import model_flops, num_parameters
from cs336_systems.accounting.memory import peak_bytes
from cs336_systems.training.config import TrainingConfig, for_ranks, load

_PLAIN = (
    "reference",
    "flash_torch",
)  # implementations of attention that keep whole matrices of scores, or may
_STEPS = 3
USABLE = 0.88  # of a GPU's memory: the rest is for its context, libraries' workspaces and what an allocator rounds up
BATCHES = tuple(2**n for n in range(9))


def memory_bytes(config: TrainingConfig, dtype: str, device: str, world_size: int) -> int:
    """Tensors alive at the peak of a step on one rank (`accounting.memory`), for the model run eagerly.

    fp16 holds what bf16 does. A sharded optimizer keeps 1/world_size of AdamW's two moments.
    """
    sizes = config.model.sizes(config.tokenizer.vocab_size)
    held = peak_bytes(
        sizes, for_ranks(config, world_size), sizes.context_length, "train_step",
        "bf16" if dtype in ("bf16", "fp16") else "fp32",
        "reference" if config.model.attention in _PLAIN or device == "cpu" else "flash",
        device.split(":")[0], "fused" if config.optimizer.name == "adamw" else "foreach",
    )  # fmt: skip
    moments = 8 * num_parameters(sizes)
    return sum(held.values()) - (moments - moments // world_size if config.optimizer.sharded else 0)


def largest_batch(
    size: str,
    context_length: int,
    gib: float,
    dtype: str = "fp16",
    vocab_size: int = 2048,
    world_size: int = 1,
) -> int:
    """The most sequences of BATCHES that a step of one rank can hold in USABLE of `gib` GiB; 0 where not one fits.

    Attention keeps no scores; with several ranks the optimizer's state is spread over them."""
    fitting = [
        n for n in BATCHES if gib_of(size, context_length, n, dtype, vocab_size, world_size) <= USABLE * gib
    ]
    return max(fitting, default=0)


def gib_of(
    size: str,
    context_length: int,
    sequences: int,
    dtype: str = "fp16",
    vocab_size: int = 2048,
    world_size: int = 1,
) -> float:
    """What `memory_bytes` says of so many sequences on a GPU, in GiB."""
    config = load(None, {
        "model.size": size, "model.context_length": context_length, "batch.sequences": sequences * world_size,
        "tokenizer.vocab_size": vocab_size, "optimizer.sharded": world_size > 1,
    })  # fmt: skip
    return memory_bytes(config, dtype, "cuda", world_size) / 2**30


def what_fits(
    gib: float, sizes: Sequence[str], contexts: Sequence[int], dtype: str = "fp16"
) -> list[dict[str, Any]]:
    """By size and context length: the most sequences of a step on one GPU of so much memory, and the GiB that they, and
    twice as many, need."""
    lines = []
    for size in sizes:
        for context in contexts:
            most = largest_batch(size, context, gib, dtype)
            need, twice = (gib_of(size, context, n, dtype) if n else math.nan for n in (most, 2 * most))
            alone = math.nan if most else gib_of(size, context, 1, dtype)
            lines.append({
                "size": size, "context_length": context, "sequences": most, "gib": need if most else alone,
                "twice_gib": twice,
            })  # fmt: skip
    return lines


def forecast(config: TrainingConfig) -> Iterator[str]:
    """Lines: the resolved configuration, the model, its memory, and the time by a few real steps on random tokens.

    ValueError as `modes.device_of`. Where the memory is not enough, the line says so and nothing is tried.
    """
    import torch

    from cs336_systems.training import modes

    device = modes.device_of(config.run.device)
    dtype, ranks = modes.dtype_of(config.run.dtype, device), config.parallel.nproc
    sizes = config.model.sizes(config.tokenizer.vocab_size)
    yield json.dumps(config.to_dict(), indent=1)
    yield f"model: {num_parameters(sizes) / 1e6:.1f} M parameters, on {device} in {dtype}"
    needed = memory_bytes(config, dtype, device, ranks)
    line = f"memory at the peak of a step, per rank: {needed / 2**30:.2f} GiB of tensors"
    if device == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory
        line += f", of {there / 2**30:.1f} GiB"
        if needed > there:
            yield line + ": not enough; a smaller batch.sequences, or more batch.accumulate, needs less"
            return
    yield line
    tokens = config.batch.sequences * sizes.context_length
    ms = _step_ms(config, device, ranks)
    kind, length = config.schedule.length
    yield (
        f"a step: {tokens} tokens, {model_flops(sizes, config.batch.sequences, sizes.context_length, 'train_step'):.3g}"
        f" FLOPs; {ms:.0f} ms by {_STEPS} steps on random tokens"
        + (", its share of one rank" if ranks > 1 else "")
    )
    if kind == "epochs":
        yield f"length: {length:g} epochs; how long they are the tokens will tell, {tokens / ms * 1e3:,.0f} a second"
        return
    seconds = {
        "steps": length * ms / 1e3, "tokens": math.ceil(length / tokens) * ms / 1e3, "minutes": 60 * length,
    }[kind]  # fmt: skip
    steps = seconds / ms * 1e3
    yield f"time: {seconds / 60:.1f} minutes for {steps:,.0f} steps, beside text, evaluation and checkpoints"


def _step_ms(config: TrainingConfig, device: str, ranks: int) -> float:
    """Milliseconds of one rank's part of a step, without communication; the least of a few."""
    import dataclasses
    import tempfile

    import numpy as np
    import torch

    from cs336_systems.training.loop import Data, Trainer

    replace = dataclasses.replace
    with tempfile.TemporaryDirectory() as folder:
        alone = replace(
            config, out=folder, parallel=replace(config.parallel, nproc=1),
            batch=replace(config.batch, sequences=config.batch.sequences // ranks),
            checkpoints=replace(config.checkpoints, init_from=""),
            optimizer=replace(config.optimizer, sharded=False),
        )  # fmt: skip
        vocab = config.tokenizer.vocab_size
        count = alone.batch.sequences * config.model.context_length * (_STEPS + 2) + 1
        ids = np.random.default_rng(0).integers(0, vocab, count, dtype=np.int64)
        trainer = Trainer(alone, Data(ids, ids, vocab, count))
        times = []
        for _ in range(_STEPS + 1):  # the first one warms up
            start = time.perf_counter()
            trainer.train_step()
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])
