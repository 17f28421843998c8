"""What a run will take, before it begins: `cs336 train --dry-run`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator

from cs336_systems.accounting import model_flops, num_parameters
from cs336_systems.accounting.memory import peak_bytes
from cs336_systems.training.config import TrainingConfig, for_ranks

_PLAIN = (
    "reference",
    "flash_torch",
)  # implementations of attention that keep whole matrices of scores, or may
_STEPS = 3


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
