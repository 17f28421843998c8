"""What a run that goes on from a checkpoint may change, and what the files of its folder must stay. Needs no torch.

check(path, about, config, dtype)      # ValueError that names the keys that differ, with both values
expected(config)                       # SHA-256 by name of the files that the run has learned from
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cs336_systems.store.files import StoreError
from cs336_systems.training.config import TrainingConfig

# what changes nothing about the weights that come out
BESIDE = ("out", "logging", "generation", "parallel.timeout_s", "parallel.nproc", "run.profile", "checkpoints",
          "text.cache")  # fmt: skip
# nor, to rounding, about the step after a checkpoint; and how long a run is, which may be changed on the way
_MAY_CHANGE = (*BESIDE, "schedule.steps", "schedule.tokens", "schedule.epochs", "schedule.minutes", "parallel",
               "run.compile", "run.recompute", "run.device", "run.deterministic", "model.attention", "batch.accumulate",
               "optimizer.sharded", "evaluation")  # fmt: skip
# what the saved tensors are of: no flag lets another one take them
_SHAPE = ("model.d_model", "model.d_ff", "model.num_layers", "model.num_heads", "model.num_kv_heads")


def settings(config: TrainingConfig, beside: Iterable[str]) -> dict[str, Any]:
    """The values by "section.key", without those of `beside`, which has sections and keys."""
    return {
        f"{section}.{key}": value
        for section, keys in config.to_dict().items() if section not in beside
        for key, value in keys.items() if f"{section}.{key}" not in beside
    }  # fmt: skip


def check(path: Path, about: Mapping[str, Any], now: TrainingConfig, dtype: str | None) -> None:
    """Whether a run may go on from the checkpoint `path`, of which checkpoint.json says `about`.

    dtype: what `run.dtype` comes to here; None for a run that takes the weights alone. ValueError where the settings
    differ in what changes the run, unless `checkpoints.resume_changed` allows it; in the model's shape in any case (the
    number of its heads no tensor tells). StoreError where it tells of no run.
    """
    from cs336_systems.training import checkpoints

    old, new = (_compared(config) for config in (checkpoints.config_of(path, about), now))
    old["run.dtype"], new["run.dtype"] = about["dtype"], dtype  # what `auto` came to
    differ = {key: f"{key}={old[key]!r}, now {new[key]!r}" for key in old if old[key] != new[key]}
    if never := [text for key, text in differ.items() if key in _SHAPE]:
        raise ValueError(f"the weights of {path} do not fit other settings: {'; '.join(never)}")
    if differ and dtype and not now.checkpoints.resume_changed:
        raise ValueError(
            f"{path} was trained with other settings: {'; '.join(differ.values())}; --resume-changed goes on all the "
            "same, another --out begins anew"
        )


def _compared(config: TrainingConfig) -> dict[str, Any]:
    model = config.model.sizes(config.tokenizer.vocab_size)  # whatever names them
    sizes = dataclasses.asdict(model) | {"num_kv_heads": model.kv_heads}
    told = settings(config, (*_MAY_CHANGE, "model.size"))
    return told | {key: sizes[key.removeprefix("model.")] for key in _SHAPE}


def expected(config: TrainingConfig) -> dict[str, str]:
    """SHA-256 by name of the files that a run's checkpoints have learned from, as far as they must not change: text,
    tokens and tokenizer; with `checkpoints.resume_changed` the tokenizer alone. Empty where there is no checkpoint."""
    folder, asked = Path(config.out) / "checkpoints", config.checkpoints.resume
    if asked in ("no", "auto") and not folder.is_dir():
        return {}
    from cs336_systems.training import checkpoints

    for path in [Path(asked)] if asked not in ("no", "auto") else reversed(checkpoints.found(folder)):
        with contextlib.suppress(StoreError):  # the one before it is gone on from
            data = checkpoints.told(path)["data"]
            kept = (checkpoints.TOKENIZER,) if config.checkpoints.resume_changed else data
            return {name: data[name] for name in kept if name in data}
    return {}
