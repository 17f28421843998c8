"""What chapter `parallelism` shows: memory and communication of the handout's XXL model, by closed forms. No rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.chapters.parallelism import accounting as model
from cs336_systems.chapters.parallelism import layer
from cs336_systems.chapters.parallelism.accounting import (
    GB,
    GIB,
    HANDOUT,
    OVERLAPS,
    TPU_V5P,
    WIDE,
    XXL,
    Layout,
)
from cs336_systems.report import figures
from cs336_systems.report.chapter import given_parameters, in_one_line
from cs336_systems.report.prose import Number
from cs336_systems.report.tables import fmt

H100_GB = 80  # by its name
STAGES, CHUNKS = 4, 4  # of the pipeline among the levers
NEVER, NONE = "communication-bound at any batch", "no number of devices is enough"  # why a number is missing
BLUE = "#0072B2"


# --------------------------------------------------------------------------------------------------- parameters
@dataclass(frozen=True)
class Setting:
    """The notebook's parameters, explained there; a ValueError names a bad value and the allowed ones."""

    tokens_per_device: int = 1024
    capacity_gb: float = 95
    devices: int = 64
    tensor: int = 4
    nonlinearity: str = "relu"

    def __post_init__(self) -> None:
        for name, least, most in (
            ("tokens_per_device", 0, 10**9),
            ("devices", 2, 10**6),
            ("tensor", 1, 10**6),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name}={value!r}; allowed: integers from {least} to {most}")
        capacity = self.capacity_gb
        if not isinstance(capacity, int | float) or isinstance(capacity, bool) or not 0 < capacity < math.inf:
            raise ValueError(f"capacity_gb={capacity!r}; allowed: positive numbers")
        if self.devices % self.tensor or self.tensor == self.devices:
            allowed = [str(n) for n in range(1, self.devices) if self.devices % n == 0]
            raise ValueError(f"tensor={self.tensor} of devices={self.devices}; allowed: {', '.join(allowed)}")
        if str(self.nonlinearity) not in WIDE:
            raise ValueError(f"unknown nonlinearity {self.nonlinearity!r}; allowed: {', '.join(WIDE)}")

    @classmethod
    @in_one_line()
    def from_parameters(cls, namespace: Mapping[str, Any]) -> Setting:
        """The setting that a notebook's globals hold. Names in an injected cell that are no parameters are refused."""
        return cls(**given_parameters(namespace, [field.name for field in fields(cls)]))

    @property
    def layout(self) -> Layout:
        """X = N / Y over two axes of the mesh, Y over one."""
        return replace(HANDOUT, fsdp=self.devices // self.tensor, tensor=self.tensor)


# ---------------------------------------------------------------------------------------------- numbers of the prose
def state_bytes() -> Number:
    """Master weights, accumulated gradients and both moments."""
    return Number(sum(model.state_bytes(XXL).values()))


def saved_bytes(nonlinearity: str) -> Number:
    """Bytes per token that are saved for backward."""
    return Number(sum(model.saved_bytes_per_token(XXL, nonlinearity).values()))


def h100s(num_bytes: float, unit: int = GB) -> Number:
    """How many H100 of 80 GB (or GiB) hold as much together."""
    return Number(model.devices_worth(int(num_bytes), H100_GB * unit))


def fewest(setting: Setting, tokens: int, busy: float = 0, unit: int = GB, sharded: float = 0.5) -> Number:
    """The fewest devices below the setting's capacity, less `busy` bytes; missing where there are none."""
    room = setting.capacity_gb * unit - busy
    found = model.fewest_devices(XXL, room, tokens, setting.nonlinearity, sharded) if room > 0 else None
    return Number(math.nan, NONE) if found is None else Number(found)


def batch(setting: Setting, overlap: str = "together", exact: bool = False, **changes: Any) -> Number:
    """The smallest compute-bound batch in tokens, with changes to the setting's layout; missing where there is none."""
    layout = replace(setting.layout, **changes)
    found = model.compute_bound_tokens(XXL, TPU_V5P, layout, overlap, exact)
    return Number(found) if math.isfinite(found) else Number(math.nan, NEVER)


def up(number: Number) -> Number:
    """Rounded up to a whole one."""
    return number if number.missing else Number(math.ceil(number))


def pipeline(setting: Setting) -> list[Number]:
    """Of the pipeline among the levers: microbatches, the bubble's share of a pass, and the time of sending to the next
    stage along a link of the mesh, over that of the GEMMs."""
    layout = levers(setting).get("pipeline")
    if layout is None or (tokens := batch(setting, **vars(layout))).missing:
        return [Number(math.nan, "no such pipeline")] * 3
    microbatches = max(1, int(float(tokens) / layout.fsdp / TPU_V5P.memory_tokens))
    sent = CHUNKS * model.stage_send_share(XXL, TPU_V5P, layout, TPU_V5P.axis_bytes_per_s / 2)
    return [Number(x) for x in (microbatches, model.bubble_share(STAGES, microbatches, CHUNKS), sent)]


# ------------------------------------------------------------------------------------------------------------- tables
def memory_table(setting: Setting) -> pd.DataFrame:
    """What training XXL holds, in GB and in H100 by both readings of 80 GB."""
    tokens, state = setting.tokens_per_device, int(state_bytes())
    held = {"master weights, gradients and moments": state}
    for name, one_of in (("none or ReLU", "relu"), ("GELU or SiLU", "gelu")):
        saved = tokens * int(saved_bytes(one_of))
        held |= {f"activations, {name}": saved, f"together, {name}": state + saved}
    gb, gib = ([model.devices_worth(size, H100_GB * unit) for size in held.values()] for unit in (GB, GIB))
    sizes = [size / GB for size in held.values()]
    return pd.DataFrame({"what": list(held), "GB": sizes, "H100 of 80 GB": gb, "of 80 GiB": gib})


def fewest_table(setting: Setting) -> pd.DataFrame:
    """The fewest devices over the tokens: with half the activations sharded, and with none."""
    tokens = sorted({0, 512, 1024, 2048, 4096, 8192, setting.tokens_per_device})
    relu, gelu = (replace(setting, nonlinearity=name) for name in ("relu", "gelu"))
    found = {
        "ReLU": [fewest(relu, t) for t in tokens],
        "ReLU, GiB": [fewest(relu, t, unit=GIB) for t in tokens],
        "GELU": [fewest(gelu, t) for t in tokens],
        "ReLU, none sharded": [fewest(relu, t, sharded=0) for t in tokens],
    }
    return pd.DataFrame({"tokens": tokens} | {head: _integers(column) for head, column in found.items()})


def times_table(setting: Setting) -> pd.DataFrame:
    """Each time of a block at the smallest compute-bound batch, by what may overlap; no line where there is none."""
    found = {o: batch(setting, o) for o in OVERLAPS}
    least = {o: float(b) for o, b in found.items() if not b.missing}
    times = [model.block_times(XXL, TPU_V5P, setting.layout, b) for b in least.values()]
    return pd.DataFrame({
        "collectives": list(least), "B": [math.ceil(b) for b in least.values()],
        "B/N": [b / setting.devices for b in least.values()], "B/X": [b / setting.layout.fsdp for b in least.values()],
        "GEMMs, ms": [1e3 * t.compute for t in times], "weights, ms": [1e3 * t.weights for t in times],
        "activations, ms": [1e3 * t.activations for t in times],
    })  # fmt: skip


def levers(setting: Setting) -> dict[str, Layout]:
    """What lowers the batch → the layout with it changed, on as many devices as the setting has."""
    base, n = setting.layout, setting.devices
    found = {"as in (c)": base, "FSDP alone, three axes": replace(base, fsdp=n, tensor=1, fsdp_axes=3)}
    for factor in (f for f in (2, 4) if base.fsdp % f == 0 and base.fsdp > f):
        split = replace(base, fsdp=base.fsdp // factor, tensor=factor * base.tensor)
        found[f"tensor parallelism, Y = {split.tensor}"] = split
    found["weights gathered in 8 bits"] = replace(base, weight_bytes=1)
    if base.fsdp % STAGES == 0 and base.fsdp > STAGES:
        piped = replace(base, fsdp=base.fsdp // STAGES, stages=STAGES)
        found |= {"pipeline": piped, "pipeline, weights in 8 bits": replace(piped, weight_bytes=1)}
    return found


def lever_table(setting: Setting) -> pd.DataFrame:
    """The smallest compute-bound batch with each lever, per device and over all, by what may overlap."""
    found = levers(setting)
    table = pd.DataFrame([
        {"change": name, "X": int(at.fsdp), "Y": int(at.tensor), "Z": int(at.stages)} for name, at in found.items()
    ])  # fmt: skip
    for overlap in OVERLAPS:
        least = [batch(setting, overlap, **vars(layout)) for layout in found.values()]
        table[f"B/N {overlap}"] = [float(b) / setting.devices for b in least]
        table[f"B {overlap}"] = _integers(map(up, least))
    return table


def _integers(numbers: Any) -> pd.Series:
    return pd.Series([pd.NA if n.missing else int(n) for n in numbers], dtype="Int64")


# ------------------------------------------------------------------------------------------------------------- figure
def region_figure(setting: Setting) -> Figure:
    """What bounds a forward pass, over Y and tokens per device: the same for every N."""
    figure, axes = figures.panels(columns=2, height=3.0, sharey=True)
    tensor, per_device = np.geomspace(1, 64, 241), np.geomspace(16, 4096, 321)
    y, b = np.meshgrid(tensor, per_device)
    weights = TPU_V5P.alpha / (setting.layout.fsdp_axes * b * y)  # over the time of the GEMMs
    activations = TPU_V5P.alpha * y / (setting.layout.tensor_axes * XXL.d_ff)
    regions = ((0.36, 0.85, "compute-bound", "#2b6b3a"), (0.13, 0.3, "bound by\nweights", "#1f5a8a"),
               (0.76, 0.3, "bound by\nactivations", "#a04a10"))  # fmt: skip
    for ax, overlap in zip(axes[0], OVERLAPS, strict=True):
        sent = np.maximum(weights, activations) if overlap == "together" else weights + activations
        what = np.where(sent <= 1, 0, np.where(weights >= activations, 1, 2))
        ax.contourf(tensor, per_device, what, [-0.5, 0.5, 1.5, 2.5], colors=["#e3f2e6", "#d5e8f7", "#fbe3d3"])
        ax.contour(tensor, per_device, sent, levels=[1], colors=[figures.ROOF], linewidths=1.3)
        best, split = model.least_tokens_per_device(XXL, TPU_V5P, setting.layout, overlap)
        ax.plot(split, best, "*", color=figures.ROOF, ms=11, zorder=5)
        ax.annotate(f"{fmt(best)} at Y = {fmt(split)}", (split, best), xytext=(0, -14), textcoords="offset points",
                    ha="center", fontsize=8.5)  # fmt: skip
        least = float(batch(setting, overlap)) / setting.devices
        ax.plot(setting.tensor, least, "o", color=BLUE, ms=6, zorder=5)
        ax.annotate("(c)", (setting.tensor, least), xytext=(6, 6), textcoords="offset points", color=BLUE)
        for across, height, text, color in regions:
            ax.text(across, height, text, transform=ax.transAxes, color=color, fontsize=8.5)
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
        ax.set_yscale("log", base=2)
        ax.set_yticks([16, 64, 256, 1024, 4096], ["16", "64", "256", "1024", "4096"])
        ax.minorticks_off()
        ax.grid(visible=False)
        ax.set(xlim=(1, 64), ylim=(16, 4096), xlabel="tensor parallelism Y", title=f"collectives {overlap}")
    axes[0, 0].set_ylabel("tokens per device, B/N")
    return figure


# ------------------------------------------------------------------------------------------- one gated layer
# of the 8B model whose step 2026's leaderboard times
LAYER = layer.Layer(tokens=2 * 32_768, d_model=4096, d_ff=11_008)


def limits_table() -> pd.DataFrame:
    """Up to how many devices LAYER's communication hides behind its FLOPs, on each of DEVICES."""
    out = []
    for name, device in layer.DEVICES.items():
        together, in_turn = (layer.grid_limit(LAYER, device, overlap) for overlap in model.OVERLAPS)
        out.append({
            "device": name, "C / W": device.alpha, "data parallel, FSDP": layer.data_parallel_limit(LAYER, device),
            "tensor, forward": layer.tensor_limit(LAYER, device, "forward"),
            "backward": layer.tensor_limit(LAYER, device, "backward"),
            "grid": together[0], "X": together[1], "Y": together[2],
            "grid, shared": in_turn[0], "X, shared": in_turn[1], "Y, shared": in_turn[2],
        })  # fmt: skip
    return pd.DataFrame(out)
