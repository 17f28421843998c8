"""What a run takes where nobody says: by the device, its memory and the time there is. One choice, for `cs336 train`
without a configuration and for `cs336 speedrun`.

    config = settled({"model.size": "medium"}, print)           # what is told always wins

A CPU takes the configuration's own defaults. A GPU trains `small` for MINUTES, at the longest context of CONTEXTS of
which its memory holds a sequence, on STEP_TOKENS a step, compiled; several GPUs replay CUDA graphs. Either learns from
as much text as its time can read once.

Why a long context: the text is cut into windows anywhere, and what came before its window no model can know. That
costs some nats a window, so fewer a token the longer it is. At 2,048 tokens the default ends within a hundredth of a
nat of the text's entropy (chapter `training`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.accounting import model_flops, num_parameters, peaks
from cs336_systems.store.machine import cpu_cores, gpu_names
from cs336_systems.training.config import LENGTHS, MODEL_SIZES, TrainingConfig, load
from cs336_systems.training.forecast import memory_bytes, ranks_of
from cs336_systems.training.outputs import Say

CONTEXTS = (2048, 1024, 512, 256, 128)  # the first one with bf16 alone: slower GPUs were not tried there
STEP_TOKENS = 2**15  # of all GPUs together
MINUTES = 8.0
USABLE = 0.88  # of a GPU's memory: the rest is for its context, libraries' workspaces and what an allocator rounds up
BATCHES = tuple(2**n for n in range(9))
_BYTES_PER_TOKEN = 4.25  # of the stories, in the default vocabulary
_MFU = 0.5  # more than is reached: text that is not read costs less than text that is read twice
_CORE_TFLOPS = 0.12  # of a CPU, in fp32
UNKNOWN_TFLOPS = 65.0  # of a GPU that is not known: a T4's, in fp16
LEAST_MB, MOST_MB = 1.0, 2000.0


@dataclass(frozen=True)
class Machine:
    """What trains. gib: memory of the smallest of its GPUs, 0 on a CPU; dtype: what "auto" means there; tflops: by the
    data sheet in that dtype; gpus: how many there are."""

    gib: float = 0.0
    dtype: str = "fp32"
    tflops: float = _CORE_TFLOPS
    gpus: int = 0


def here(device: str = "auto", ranks: int = 1) -> Machine:
    """This machine, or its CPU: where so many ranks train, as `launch.group.backend_and_device` has it."""
    names = gpu_names() if device != "cpu" else []
    if not names or (device == "auto" and ranks > len(names)):
        return Machine(tflops=_CORE_TFLOPS * cpu_cores())
    import torch

    from cs336_systems.training import modes

    gib = min(torch.cuda.get_device_properties(i).total_memory for i in range(len(names))) / 2**30
    dtype, known = modes.dtype_of("auto", "cuda"), peaks(names[0])
    tflops = known.tflops.get(dtype, UNKNOWN_TFLOPS) if known else UNKNOWN_TFLOPS
    return Machine(gib, dtype, tflops, len(names))


def settled(told: Mapping[str, Any], say: Say) -> TrainingConfig:
    """The configuration of a command line alone, told by "section.key": that of a run to go on with, else what `chosen`
    adds; `say` gets a line, or the three of `about`. ValueError as `load` and `chosen`."""
    asked = load(None, told)
    if own := _own(asked):
        say("settings: those of the run that goes on; flags change them")
        if any(f"schedule.{name}" in told for name in LENGTHS):  # another length takes its place
            own["schedule"] = {key: value for key, value in own["schedule"].items() if key not in LENGTHS}
        return load(None, {**own, **told})
    machine = here(asked.run.device, ranks_of(asked)[1])
    config = load(None, chosen(machine, told))
    for line in about(config, machine):
        say(line)
    return config


def _own(asked: TrainingConfig) -> dict[str, Any]:
    """The settings of the run that is to go on; none where it is to begin. Not its `checkpoints.resume_changed`: that
    allows one command to change a run, not all that follow."""
    how = asked.checkpoints.resume
    place, name = (Path(asked.out), "config.json") if how == "auto" else (Path(how), "checkpoint.json")
    if how == "no" or not (place / name).is_file():
        return {}
    if how == "auto":
        own = load(place / name).to_dict()
    else:
        from cs336_systems.training import checkpoints

        own = checkpoints.config_of(place, checkpoints.told(place)).to_dict()
    del own["checkpoints"]["resume_changed"]
    return own


def chosen(machine: Machine, told: Mapping[str, Any]) -> dict[str, Any]:
    """What is told, by "section.key", and what fits the machine for all that it leaves open.

    ValueError for values that make no sense, and where not one sequence fits; it names what does.
    """
    asked = load(None, told)
    choice = _on_gpus(asked, machine, told) if machine.gib else {}
    config = load(None, {**choice, **told})
    return {**choice, "text.train_mb": _megabytes(config, machine), **told}


def _on_gpus(asked: TrainingConfig, machine: Machine, told: Mapping[str, Any]) -> dict[str, Any]:
    ranks, _ = ranks_of(asked)
    shards = ranks > 1 and asked.parallel.wrapper == "fsdp"  # weights, and the optimizer's state with them
    dtype = machine.dtype if asked.run.dtype == "auto" else asked.run.dtype
    # weights are gathered outside of compiled code; of GPUs without bf16, blocks alone were tried long enough
    most = "whole" if dtype == "bf16" and not shards else "blocks"
    # what is computed again is at most compiled by blocks, and a plan measures plain operations
    compiled = {"none": most, "blocks": "blocks", "selective": "off"}[asked.run.recompute]
    choice: dict[str, Any] = {"model.size": "small", "optimizer.sharded": False, "run.compile": compiled}
    if ranks > 1 and not shards:  # it costs time: where otherwise not one short sequence fits
        short = {**choice, "model.context_length": CONTEXTS[-1], **told}
        choice["optimizer.sharded"] = not most_sequences(short, machine.gib, dtype, ranks)
    if not any(f"schedule.{name}" in told for name in LENGTHS):
        choice["schedule.minutes"] = MINUTES
    if "batch.sequences" not in told:
        context, fits = _longest(machine, dtype, ranks, {**choice, **told})
        at_once = min(fits, max(1, STEP_TOKENS // (ranks * context)))
        parts = max(1, STEP_TOKENS // (at_once * ranks * context))
        if "batch.accumulate" in told or asked.run.compile == "graphs":  # of graphs a step replays one part
            parts = asked.batch.accumulate
        choice |= {"model.context_length": context, "batch.accumulate": parts}
        choice["batch.sequences"] = at_once * ranks * parts
        # a rank's kernels take less time than the host to launch them; graphs keep their memory to themselves
        if choice["run.compile"] == "whole" and ranks > 1 == parts and 2 * at_once <= fits:
            choice["run.compile"] = "graphs"
    elif "model.context_length" not in told:  # the longest at which so many fit
        of_rank, known = asked.batch.sequences / (ranks * asked.batch.accumulate), {**choice, **told}
        fits = lambda n: most_sequences({**known, "model.context_length": n}, machine.gib, dtype, ranks)
        able = (n for n in CONTEXTS[dtype != "bf16" :] if fits(n) >= of_rank)
        choice["model.context_length"] = next(able, asked.model.context_length)
    return choice


def _longest(machine: Machine, dtype: str, ranks: int, told: dict[str, Any]) -> tuple[int, int]:
    """The longest context of which a GPU holds a sequence, or the one told, and the most sequences of BATCHES there."""
    contexts = [told[key] for key in ("model.context_length",) if key in told] or CONTEXTS[dtype != "bf16" :]
    for context in contexts:
        if most := most_sequences({**told, "model.context_length": context}, machine.gib, dtype, ranks):
            return int(context), most
    least = {key: value for key, value in told.items() if not key.startswith("model.")}
    least |= {"model.context_length": contexts[-1]}
    able = [n for n in MODEL_SIZES if most_sequences({**least, "model.size": n}, machine.gib, dtype, ranks)]
    raise ValueError(
        f"size={told['model.size']!r} does not fit {machine.gib:.3g} GiB; allowed: {', '.join(able) or 'no size'}"
    )


def most_sequences(told: Mapping[str, Any], gib: float, dtype: str, ranks: int = 1) -> int:
    """The most sequences of BATCHES that a step of one of some ranks can hold in USABLE of `gib` GiB; 0: not one."""
    for number in reversed(BATCHES):
        config = load(None, {**told, "batch.sequences": number * ranks, "batch.accumulate": 1})
        if memory_bytes(config, dtype, "cuda", ranks) <= USABLE * gib * 2**30:
            return number
    return 0


def _megabytes(config: TrainingConfig, machine: Machine) -> float:
    """Text that the run's length reads once, or less: from LEAST_MB to MOST_MB. Of a CPU the ranks share the cores."""
    kind, length = config.schedule.length
    if kind == "epochs":  # of all that is there
        return config.text.train_mb if config.text.source in ("stories", "random") else 0.0
    sizes = config.model.sizes(config.tokenizer.vocab_size)
    step_tokens = config.batch.sequences * sizes.context_length
    flops = model_flops(sizes, 1, sizes.context_length, "train_step") / sizes.context_length
    per_minute = 60 * _MFU * machine.tflops * 1e12 * (ranks_of(config)[0] if machine.gib else 1) / flops
    tokens = length * {"minutes": per_minute, "tokens": 1, "steps": step_tokens}[kind]
    return float(f"{min(max(_BYTES_PER_TOKEN * tokens / 1e6, LEAST_MB), MOST_MB):.3g}")


def about(config: TrainingConfig, machine: Machine) -> Iterator[str]:
    """Three lines: what was chosen, and how to choose otherwise."""
    (ranks, _), batch, sizes = ranks_of(config), config.batch, config.model.sizes(config.tokenizer.vocab_size)
    where = f"{ranks} of {machine.gpus} GPUs of {machine.gib:.0f} GiB" if machine.gib else "the CPU"
    parts = f" in {batch.accumulate} parts" * (batch.accumulate > 1)
    yield (
        f"chosen for {where}: {config.model.size}, {num_parameters(sizes) / 1e6:.1f} M parameters, "
        f"{batch.sequences} sequences of {sizes.context_length} tokens a step{parts}"
    )
    kind, length = config.schedule.length
    most = "" if config.text.source in ("stories", "random") else "at most "  # these are as long as is asked
    text = f"{most}{config.text.train_mb:g} MB of " * (config.text.train_mb > 0) + config.text.source
    rate, compiled = config.optimizer.learning_rate, config.run.compile
    yield f"for {length:g} {kind} on {text}, learning rate {rate:g}, compiled: {compiled}"
    yield "otherwise: flags, such as --size and --minutes, or --config FILE; `cs336 train --keys` lists all settings"
