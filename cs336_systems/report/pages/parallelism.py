"""What chapter `parallelism` shows: memory and communication of the handout's XXL model, by closed forms. No rows."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.accounting import parallelism as model
from cs336_systems.accounting.parallelism import GB, GIB, HANDOUT, OVERLAPS, TPU_V5P, WIDE, XXL, Layout
from cs336_systems.measure import rows as store
from cs336_systems.report import figures
from cs336_systems.report.chapter import last_parameters
from cs336_systems.report.tables import EMPTY, fmt

H100_GB = 80  # by its name
GRAY, BLUE, RED, GREEN = "#6b6b6b", "#0072B2", "#D55E00", "#009E73"
_COMPONENTS = {  # in the figure, from below
    "optimizer state": (("first moment", "second moment"), BLUE),
    "master weights": (("master weights",), "#56B4E9"),
    "gradients": (("accumulated gradients",), GREEN),
    "activations, sharded half": (("activations, sharded",), "#E69F00"),
    "activations, whole half": (("activations, whole",), RED),
}


# --------------------------------------------------------------------------------------------------- parameters
@dataclass(frozen=True)
class Setting:
    """The notebook's parameters, checked: a ValueError names a bad value and the allowed ones.

    tokens_per_device: tokens that a device's forward pass takes part in, for memory (parts a and b). capacity_gb:
    memory of one device in 10^9 bytes. devices, tensor: N and Y of parts (c) and (d); X = N / Y. nonlinearity: between
    the two layers of a block.
    """

    tokens_per_device: int = 1024
    capacity_gb: float = 95
    devices: int = 64
    tensor: int = 4
    nonlinearity: str = "relu"

    def __post_init__(self) -> None:
        for name, least in (("tokens_per_device", 0), ("devices", 2), ("tensor", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}; allowed: integers from {least} on")
        capacity = self.capacity_gb
        number = isinstance(capacity, int | float) and not isinstance(capacity, bool)
        if not (number and math.isfinite(capacity) and capacity > 0):
            raise ValueError(f"capacity_gb={capacity!r}; allowed: positive numbers")
        if self.devices % self.tensor or self.tensor == self.devices:
            allowed = [str(n) for n in range(1, self.devices) if self.devices % n == 0]
            raise ValueError(f"tensor={self.tensor} of devices={self.devices}; allowed: {', '.join(allowed)}")
        if self.nonlinearity not in WIDE:
            raise ValueError(f"unknown nonlinearity {self.nonlinearity!r}; allowed: {', '.join(WIDE)}")

    @classmethod
    def from_parameters(cls, namespace: Mapping[str, Any]) -> Setting:
        """The setting that a notebook's globals hold. Names in an injected cell that are no parameters are refused."""
        allowed = ["measure", *(field.name for field in fields(cls))]
        if unknown := [n for n in last_parameters(namespace.get("In", [])) if n not in allowed]:
            raise ValueError(f"unknown parameter {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        measure = namespace.get("measure", "no")
        if str(measure).lower() not in ("no", "false"):
            raise ValueError(f"unknown measure {measure!r}; this page only computes: no")
        return cls(**{name: namespace[name] for name in allowed[1:] if name in namespace})

    @property
    def capacity(self) -> float:
        """Bytes of one device."""
        return self.capacity_gb * GB

    @property
    def layout(self) -> Layout:
        """X = N / Y over two axes of the mesh, Y over one."""
        return replace(HANDOUT, fsdp=self.devices // self.tensor, tensor=self.tensor)

    def saved(self, nonlinearity: str = "") -> int:
        """Bytes a token that are saved for backward."""
        return sum(model.saved_bytes_per_token(XXL, nonlinearity or self.nonlinearity).values())


def whole(tokens: float) -> str:
    """Tokens, rounded up to a whole one: `20,445`; `never` where no batch will do."""
    return f"{math.ceil(tokens):,}" if math.isfinite(tokens) else "never"


def threshold(setting: Setting, overlap: str, **changes: Any) -> float:
    """The smallest compute-bound batch of the setting's layout, in tokens, with changes to the layout."""
    return model.compute_bound_tokens(XXL, TPU_V5P, replace(setting.layout, **changes), overlap)


# ------------------------------------------------------------------------------------------------- (a) one device
def h100_gib() -> float | None:
    """What the driver of a measured H100 of 80 GB reports as its memory, GiB; None without such a machine's rows."""
    for path in sorted(store.results_root().glob("*/machine.json")):
        for env in json.loads(path.read_text()).values():
            if f"H100 {H100_GB}GB" in str(env.get("gpu")) and env.get("gpu_memory_gib"):
                return float(env["gpu_memory_gib"])
    return None


def state_table() -> pd.DataFrame:
    """Master weights, gradients, moments: bytes a parameter, and in all."""
    sizes = model.state_bytes(XXL)
    out = [
        {"what": name, "bytes a parameter": model.STATES[name], "GB": fmt(size / GB, 4), "GiB": fmt(size / GIB, 4)}
        for name, size in sizes.items()
    ]  # fmt: skip
    total = sum(sizes.values())
    return pd.DataFrame(
        [
            *out,
            {
                "what": "together",
                "bytes a parameter": sum(model.STATES.values()),
                "GB": fmt(total / GB, 4),
                "GiB": fmt(total / GIB, 4),
            },
        ]
    )


def devices_table(setting: Setting) -> pd.DataFrame:
    """How many H100 the state fills, by each reading of 80 GB, without and with activations."""
    state, tokens = sum(model.state_bytes(XXL).values()), setting.tokens_per_device
    readings = {f"{H100_GB}·10⁹ bytes": H100_GB * GB, f"{H100_GB}·2³⁰ bytes": H100_GB * GIB}
    if found := h100_gib():
        readings[f"{fmt(found)} GiB, as its driver reports"] = found * GIB
    return pd.DataFrame([
        {
            "one H100 holds": name,
            "devices, state": model.devices_worth(state, size),
            f"devices, state and activations of {tokens:,} tokens":
                model.devices_worth(state + tokens * setting.saved(), size),
        }
        for name, size in readings.items()
    ])  # fmt: skip


def saved_table(setting: Setting) -> pd.DataFrame:
    """What is saved for backward, by nonlinearity: a token's elements in a block, its bytes over all blocks."""
    tokens = setting.tokens_per_device
    return pd.DataFrame([
        {
            "between the layers": name,
            "saved in a block": f"D + {'2' * (wide == 2)}F",
            "elements a token": XXL.d_model + wide * XXL.d_ff,
            "MB a token, all blocks": fmt(setting.saved(name) / 1e6, 4),
            f"GB, {tokens:,} tokens": fmt(tokens * setting.saved(name) / GB),
        }
        for name, wide in WIDE.items()
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------- (b) N devices
def fewest_table(setting: Setting) -> pd.DataFrame:
    """The smallest N over the tokens: with half the activations sharded, and with none (FSDP as it is run)."""
    out = []
    for tokens in sorted({0, 128, 512, 1024, 2048, 4096, 8192, setting.tokens_per_device}):

        def n(name: str, sharded: float, capacity: float = setting.capacity, tokens: int = tokens) -> str:
            return fmt(model.fewest_devices(XXL, capacity, tokens, name, sharded))

        wide = "gelu" if WIDE[setting.nonlinearity] == 1 else "relu"
        out.append({
            "tokens": tokens,
            f"half sharded, {setting.nonlinearity}": n(setting.nonlinearity, 0.5),
            f"half sharded, {setting.nonlinearity}, GiB": n(setting.nonlinearity, 0.5, setting.capacity_gb * GIB),
            f"half sharded, {wide}": n(wide, 0.5),
            f"none sharded, {setting.nonlinearity}": n(setting.nonlinearity, 0),
        })  # fmt: skip
    return pd.DataFrame(out)


def memory_figure(setting: Setting) -> Figure:
    """Left: memory of a device by component over N. Right: the smallest N over the tokens."""
    figure, axes = figures.panels(columns=2, height=3.1)
    left, right = axes[0]
    counts = np.unique(np.geomspace(16, 512, 200))
    parts = [model.memory_per_device(XXL, n, setting.tokens_per_device, setting.nonlinearity) for n in counts]
    layers = [[sum(p[k] for k in keys) / GB for p in parts] for keys, _ in _COMPONENTS.values()]
    colors = [color for _, color in _COMPONENTS.values()]
    left.stackplot(counts, layers, labels=list(_COMPONENTS), colors=colors, alpha=0.85, lw=0)
    _binary(left, [16, 32, 64, 128, 256, 512])
    left.set(
        xlim=(16, 512), ylim=(0, 2.5 * setting.capacity_gb), xlabel="devices N", ylabel="GB on each device"
    )
    left.set_title(f"memory of a device, {setting.tokens_per_device:,} tokens")
    left.axhline(setting.capacity_gb, color=figures.ROOF, ls=(0, (5, 3)), lw=1.1)
    text = f"{fmt(setting.capacity_gb)} GB"
    if n := model.fewest_devices(XXL, setting.capacity, setting.tokens_per_device, setting.nonlinearity):
        left.plot(n, setting.capacity_gb, "o", color=figures.ROOF, ms=5, zorder=5)
        text += f", from N = {n}"
    left.annotate(text, (500, 1.04 * setting.capacity_gb), ha="right", fontsize=8.5)
    left.legend(loc="upper right", reverse=True)

    tokens = np.unique(np.geomspace(64, 16_384, 300).astype(int))
    for name, color in (("relu", BLUE), ("gelu", RED)):
        for sharded, style in ((0.5, "-"), (0.0, ":")):
            found = [model.fewest_devices(XXL, setting.capacity, int(t), name, sharded) for t in tokens]
            label = f"{name}, {'half' if sharded else 'none'} sharded"
            right.plot(tokens, [n or np.nan for n in found], style, color=color, label=label)
    _binary(right, [64, 256, 1024, 4096, 16_384])
    right.set_yscale("log", base=2)
    right.set_yticks([32, 64, 128, 256, 512, 1024], ["32", "64", "128", "256", "512", "1024"])
    right.set(ylim=(30, 1100), xlabel="tokens", ylabel="devices N")
    right.set_title(f"fewest devices under {fmt(setting.capacity_gb)} GB")
    right.legend(loc="upper left")
    return figure


def _binary(ax: Axes, ticks: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()


# ---------------------------------------------------------------------------------------- (c) computing and sending
def times_table(setting: Setting) -> pd.DataFrame:
    """Each time of a block at the smallest compute-bound batch, by what may overlap."""
    out = []
    for overlap in OVERLAPS:
        batch = threshold(setting, overlap)
        line = {"collectives": overlap, "B": whole(batch)}
        if math.isfinite(batch):
            times = model.block_times(XXL, TPU_V5P, setting.layout, batch)
            line |= {
                "B/N": fmt(batch / setting.devices, 4),
                "B/X": fmt(batch / setting.layout.fsdp, 4),
                "products, ms": fmt(1e3 * times.compute),
                "gathers of weights, ms": fmt(1e3 * times.weights),
                "collectives of activations, ms": fmt(1e3 * times.activations),
                "forward pass, s": fmt(XXL.num_blocks * times.compute),
            }
        out.append(line)
    return pd.DataFrame(out)


def times_figure(setting: Setting) -> Figure:
    """The times of a block over tokens per device; where products take as long as what must be sent is marked."""
    figure, axes = figures.panels(height=3.4)
    ax = axes[0, 0]
    per_device = np.geomspace(32, 4096, 200)
    times = [model.block_times(XXL, TPU_V5P, setting.layout, float(b) * setting.devices) for b in per_device]
    for label, color, style, values in (
        ("products", figures.ROOF, "-", [t.compute for t in times]),
        ("gathers of weights (FSDP)", BLUE, "-", [t.weights for t in times]),
        ("collectives of activations (TP)", RED, "-", [t.activations for t in times]),
        ("both, in turn", GREEN, "--", [t.communication("in turn") for t in times]),
    ):
        if any(values):
            ax.plot(per_device, 1e3 * np.array(values), style, color=color, label=label)
    for overlap, color, across in zip(OVERLAPS, (BLUE, GREEN), (-8, 8), strict=True):
        batch = threshold(setting, overlap)
        if not math.isfinite(batch):
            continue
        at, ms = batch / setting.devices, 1e3 * model.block_times(XXL, TPU_V5P, setting.layout, batch).compute
        ax.plot(at, ms, "o", color=color, ms=6, zorder=5)
        ax.annotate(
            f"{overlap}: {fmt(at)}", (at, ms), xytext=(across, -across * 1.6), textcoords="offset points",
            ha="right" if across < 0 else "left", va="center", color=color, fontsize=8.5,
        )  # fmt: skip
    _binary(ax, [32, 64, 128, 256, 512, 1024, 2048, 4096])
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(xlim=(32, 4096), xlabel="tokens per device, B/N", ylabel="ms a block, forward")
    ax.legend(loc="upper left")
    return figure


# ----------------------------------------------------------------------------------------------- (d) smaller batches
def region_figure(setting: Setting) -> Figure:
    """What bounds a forward pass, over Y and tokens per device: the same for every N."""
    figure, axes = figures.panels(columns=2, height=3.5, sharey=True)
    tensor, per_device = np.geomspace(1, 64, 241), np.geomspace(16, 4096, 321)
    alpha, axes_of = TPU_V5P.alpha, setting.layout
    y, b = np.meshgrid(tensor, per_device)
    weights = alpha / (axes_of.fsdp_axes * b * y)  # over the time of the products
    activations = alpha * y / (axes_of.tensor_axes * XXL.d_ff)
    for ax, overlap in zip(axes[0], OVERLAPS, strict=True):
        sent = np.maximum(weights, activations) if overlap == "together" else weights + activations
        what = np.where(sent <= 1, 0, np.where(weights >= activations, 1, 2))
        ax.contourf(
            tensor, per_device, what, levels=[-0.5, 0.5, 1.5, 2.5], colors=["#e3f2e6", "#d5e8f7", "#fbe3d3"]
        )
        ax.contour(tensor, per_device, sent, levels=[1], colors=[figures.ROOF], linewidths=1.3)
        ax.plot(tensor, TPU_V5P.memory_tokens / tensor, ls=":", color=GRAY, lw=1.2)
        best, split = model.least_tokens_per_device(XXL, TPU_V5P, setting.layout, overlap)
        ax.plot(split, best, "*", color=figures.ROOF, ms=11, zorder=5)
        ax.annotate(f"{fmt(best)} at Y = {fmt(split)}", (split, best), xytext=(0, -14), textcoords="offset points",
                    ha="center", fontsize=8.5)  # fmt: skip
        batch = threshold(setting, overlap)
        if math.isfinite(batch):
            at = batch / setting.devices
            ax.plot(setting.tensor, at, "o", color=BLUE, ms=6, zorder=5)
            ax.annotate(f"(c): {fmt(at)}", (setting.tensor, at), xytext=(6, 7), textcoords="offset points",
                        color=BLUE, fontsize=8.5)  # fmt: skip
        for x, y_text, text, color in (
            (0.38, 0.85, "compute bound", "#2b6b3a"),
            (0.16, 0.34, "bound by\nweights", "#1f5a8a"),
            (0.76, 0.34, "bound by\nactivations", "#a04a10"),
            (0.03, 0.05, "and by memory", GRAY),
        ):
            ax.text(x, y_text, text, transform=ax.transAxes, color=color, fontsize=8.5)
        _binary(ax, [1, 2, 4, 8, 16, 32, 64])
        ax.set_yscale("log", base=2)
        ticks = [16, 64, 256, 1024, 4096]
        ax.set_yticks(ticks, [str(t) for t in ticks])
        ax.grid(visible=False)
        ax.set(xlim=(1, 64), ylim=(16, 4096), xlabel="tensor parallelism Y", title=f"collectives {overlap}")
    axes[0, 0].set_ylabel("tokens per device, B/N")
    return figure


def levers(setting: Setting) -> dict[str, Layout]:
    """What can be turned to lower the batch → the layout with it turned, on as many devices as the setting has."""
    base, n = setting.layout, setting.devices
    found = {"as in (c)": base, "FSDP alone, over three axes": replace(base, fsdp=n, tensor=1, fsdp_axes=3)}
    for factor in (2, 4):
        if base.fsdp % factor == 0 and base.fsdp > factor:
            found[f"Y = {factor * base.tensor}"] = replace(
                base, fsdp=base.fsdp // factor, tensor=factor * base.tensor
            )
    found["weights gathered in 1 byte"] = replace(base, weight_bytes=1)
    for stages in (4,):
        if base.fsdp % stages == 0 and base.fsdp > stages:
            found[f"pipeline of {stages} stages"] = replace(base, fsdp=base.fsdp // stages, stages=stages)
            found[f"pipeline of {stages} stages, weights in 1 byte"] = replace(
                base, fsdp=base.fsdp // stages, stages=stages, weight_bytes=1
            )
    return found


def lever_table(setting: Setting) -> pd.DataFrame:
    """The smallest compute-bound batch with each lever, per device and over all, by what may overlap."""
    out = []
    for name, layout in levers(setting).items():
        line = {"what": name, "X": layout.fsdp, "Y": layout.tensor, "Z": layout.stages}
        for overlap in OVERLAPS:
            batch = model.compute_bound_tokens(XXL, TPU_V5P, layout, overlap)
            line[f"B/N, {overlap}"] = fmt(batch / layout.devices) if math.isfinite(batch) else EMPTY
            line[f"B, {overlap}"] = whole(batch)
        out.append(line)
    return pd.DataFrame(out)


# --------------------------------------------------------------------------------------------------- answers' boxes
def answer(letter: str, text: str) -> None:
    """Displays a part's short answer in a box: Markdown for the book, HTML for JupyterLab."""
    from IPython.display import display

    display({"text/markdown": box_markdown(letter, text), "text/html": box_html(letter, text)}, raw=True)


def box_markdown(letter: str, text: str) -> str:
    return f":::{{admonition}} Answer ({letter})\n:class: tip\n\n{text}\n:::\n"


def box_html(letter: str, text: str) -> str:
    """The box with its text's bold, italic and code in HTML; formulas stay as they are, for MathJax."""
    text = html.escape(text, quote=False)
    for pattern, tag in ((r"\*\*([^*]+)\*\*", "b"), (r"\*([^*]+)\*", "em"), (r"`([^`]+)`", "code")):
        text = re.sub(pattern, rf"<{tag}>\1</{tag}>", text)
    paragraphs = "".join(f"<p>{part}</p>" for part in text.split("\n\n"))
    style = f"border-left:4px solid {BLUE};padding:0 1em"
    return f'<div style="{style}"><p><b>Answer ({letter})</b></p>{paragraphs}</div>'
