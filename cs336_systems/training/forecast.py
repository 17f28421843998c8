"""What a run will take, before it begins: `cs336 train --dry-run`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace

from cs336_systems.accounting import fsdp, model_flops, num_parameters
from cs336_systems.attention.registry import availability
from cs336_systems.store.machine import free_memory_bytes
from cs336_systems.training.config import TrainingConfig, for_ranks, load
from cs336_systems.training.log import check_trackers

_PLAIN = ("reference", "flash_torch")  # attention that keeps whole matrices of scores, or may
_STEPS, _ENOUGH_S = 3, 5.0


def ranks_of(config: TrainingConfig) -> tuple[int, int]:
    """Processes that will train, torchrun's or those that the configuration starts; how many of them are here."""
    told = os.environ if "RANK" in os.environ else {}
    ranks = int(told.get("WORLD_SIZE", config.parallel.nproc))
    return ranks, int(told.get("LOCAL_WORLD_SIZE", ranks))


def memory_bytes(config: TrainingConfig, dtype: str, device: str, world_size: int) -> int:
    """Tensors alive at the peak of a step on one rank (`accounting.memory`), for the model run eagerly.

    fp16 holds what bf16 does. Of a sharded optimizer's state, AdamW's two moments, it is the rank that keeps most. A
    sharded model has its share of weights, gradients and moments, two gathered units, and all gradients of one. Blocks
    that are computed again hold their input, or already gradients, but for one; a selective plan is counted as none.
    """
    sizes, asked = config.model.sizes(config.tokenizer.vocab_size), config.model.attention
    narrow, again = dtype in ("bf16", "fp16"), config.run.recompute == "blocks"
    rows, length, masks = for_ranks(config, world_size), sizes.context_length, 0
    if config.text.documents == "packed":
        if asked == "sdpa" or (asked == "auto" and device == "cpu"):  # see `Trainer`
            # each block keeps its mask of all pairs of tokens, as numbers, made of one of bools
            blocks = 1 if again else sizes.num_layers
            masks = (blocks * (2 if narrow else 4) + 1) * (rows * length) ** 2
        elif asked in _PLAIN:  # they lie in one row, of all whose pairs the scores are kept
            rows, length = 1, rows * length
    kind, lent = "sharded" if config.optimizer.sharded else "ddp", 0
    if config.parallel.wrapper == "fsdp" and world_size > 1:
        kind, lent = "fsdp", fsdp.lent_bytes(sizes, 2 if narrow else 4)
    alive = fsdp.step_peak_bytes(
        sizes, rows, length, kind, world_size, "bf16" if narrow else "fp32",
        "reference" if asked in _PLAIN else "flash", device.split(":")[0], again,
    )  # fmt: skip
    return sum(alive.values()) + masks + lent


def check_fits(config: TrainingConfig, vocab_size: int = 257) -> tuple[str, str, int]:
    """Device, dtype and `memory_bytes` of a rank, with so many tokens in the vocabulary. Refuses, as a ValueError, what
    `for_ranks`, `check_trackers`, `modes.device_of` and `modes.check_compile` do, attention that is not there, and what
    finds no room on a CPU with all ranks that are here. (A GPU says so itself.)"""
    from cs336_systems.training import modes

    ranks, ranks_here = ranks_of(config)
    for_ranks(config, ranks)
    check_trackers(config.logging)
    device = modes.device_of(config.run.device)
    modes.check_compile(config.run.compile, device)
    if (name := config.model.attention) != "auto" and (reason := availability()[name]):
        raise ValueError(f"model.attention={name!r} is unavailable: {reason}")
    # not by `load`: a tokenizer that was given may have fewer tokens than one that is trained
    config = replace(config, tokenizer=replace(config.tokenizer, vocab_size=vocab_size))
    dtype = modes.dtype_of(config.run.dtype, device)
    needed, free = memory_bytes(config, dtype, device, ranks), free_memory_bytes("cpu")
    if device == "cpu" and free is not None and ranks_here * needed > free:
        raise ValueError(
            f"model.size={config.model.size!r} and batch.sequences={config.batch.sequences} need "
            f"{ranks_here * needed / 2**30:,.1f} GiB of memory; {free / 2**30:.1f} GiB are free: fewer sequences, or "
            "more batch.accumulate, need less"
        )
    return device, dtype, needed


def forecast(config: TrainingConfig) -> Iterator[str]:
    """Lines: the resolved configuration, the model, its memory, and the time by a few real steps on random tokens.

    ValueError as `check_fits`. Where a GPU's memory is not enough, the line says so and nothing is tried.
    """
    import torch

    device, dtype, needed = check_fits(config, config.tokenizer.vocab_size)
    (ranks, _), sizes = ranks_of(config), config.model.sizes(config.tokenizer.vocab_size)
    yield json.dumps(config.to_dict(), indent=1)
    yield f"model: {num_parameters(sizes) / 1e6:.1f} M parameters, on {device} in {dtype}"
    line = f"memory at the peak of a step, per rank: {needed / 2**30:.2f} GiB of tensors"
    if device == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory
        line += f", of {there / 2**30:.1f} GiB"
        if needed > there:
            yield line + ": not enough; a smaller batch.sequences, or more batch.accumulate, needs less"
            return
    yield line
    tokens = config.batch.sequences * sizes.context_length
    flops = model_flops(sizes, config.batch.sequences, sizes.context_length, "train_step")
    yield f"a step: {tokens} tokens, {flops:.3g} FLOPs; now some on random tokens, which take as long as the run's"
    ms = _step_ms(config, ranks)
    kind, length = config.schedule.length
    if kind == "epochs":
        yield f"length: {length:g} epochs; how long they are the tokens will tell, {tokens / ms * 1e3:,.0f} a second"
        return
    steps = {"steps": length, "tokens": math.ceil(length / tokens), "minutes": 60e3 * length / ms}[kind]
    beside = "communication, " * (ranks > 1) + "text, evaluation and checkpoints"
    yield f"time: {steps * ms / 60e3:.1f} minutes for {steps:,.0f} steps of {ms:.0f} ms, beside {beside}"


def _step_ms(config: TrainingConfig, ranks: int) -> float:
    """Milliseconds of one rank's part of a step, without communication; the mean of some, by the run's own clock."""
    import numpy as np

    from cs336_systems.training.batches import Data
    from cs336_systems.training.loop import Trainer

    sequences, vocab = config.batch.sequences // ranks, config.tokenizer.vocab_size
    alone = load(None, {
        **config.to_dict(), "batch.sequences": sequences, "checkpoints.init_from": "", "optimizer.sharded": False,
    })  # fmt: skip
    count = sequences * config.model.context_length + 1
    ids = np.random.default_rng(0).integers(0, vocab, count)
    trainer = Trainer(alone, Data(ids, ids, vocab, count, end_of_text=0))
    while trainer.clock.timed < _STEPS and trainer.clock.seconds < _ENOUGH_S:  # the first is not timed
        trainer.train_step()
        trainer.clock.stepped()
    return 1e3 * trainer.clock.seconds / trainer.clock.timed
