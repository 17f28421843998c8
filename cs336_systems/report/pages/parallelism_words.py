"""The sentences of chapter `parallelism`: every number evaluated from the closed forms. See `pages.parallelism`."""

from __future__ import annotations

import math
from dataclasses import replace

from cs336_systems.accounting import parallelism as model
from cs336_systems.accounting.parallelism import GB, GIB, HANDOUT, OVERLAPS, TPU_V5P, WIDE, XXL
from cs336_systems.report.pages.parallelism import H100_GB, Setting, threshold, whole
from cs336_systems.report.tables import fmt, percent


def _state() -> int:
    return sum(model.state_bytes(XXL).values())


def _other(setting: Setting) -> str:
    """A nonlinearity that saves another number of wide tensors than the setting's."""
    return "gelu" if WIDE[setting.nonlinearity] == 1 else "relu"


# ------------------------------------------------------------------------------------------------- (a) one device
def model_words() -> str:
    """The model in numbers."""
    return (
        f"XXL has $D$ = {XXL.d_model:,}, $F$ = {XXL.d_ff:,} and $L$ = {XXL.num_blocks}, so $P = 2LDF$ ="
        f" **{fmt(XXL.num_parameters / 1e9, 4)} billion** parameters, {fmt(XXL.d_model * XXL.d_ff / 1e6)} million in"
        " each matrix."
    )


def saved_words(setting: Setting) -> str:
    """What the setting's tokens leave for backward, and what a large batch leaves."""
    tokens, large = setting.tokens_per_device, 2**22
    return (
        f"With `{setting.nonlinearity}` between the layers, {tokens:,} tokens leave"
        f" {fmt(tokens * setting.saved() / GB)} GB. A batch of {large:,} tokens leaves"
        f" {fmt(large * setting.saved() / 1e12)} TB, {fmt(large * setting.saved() / _state())} times the state,"
        " however many devices share it: with large batches it is activations that fill memory, unless they are"
        " recomputed."
    )


def cast_words() -> str:
    """The bf16 copy of the weights that the products read."""
    return (
        "The products read the weights in bf16. A copy of all of them would be"
        f" {fmt(2 * XXL.num_parameters / GB)} GB more; cast matrix by matrix, just before use and again for backward,"
        f" it is {fmt(2 * XXL.d_model * XXL.d_ff / GB)} GB at a time. Neither is counted below."
    )


def answer_a(setting: Setting) -> str:
    worth = [model.devices_worth(_state(), H100_GB * unit) for unit in (GB, GIB)]
    tokens = setting.tokens_per_device
    more = model.devices_worth(_state() + tokens * setting.saved(), H100_GB * GB)
    return (
        "Master weights, accumulated gradients and AdamW's two moments in fp32 are 16 bytes for each of"
        f" {fmt(XXL.num_parameters / 1e9, 4)} billion parameters: **{fmt(_state() / GB, 4)} GB**"
        f" ({fmt(_state() / GIB, 4)} GiB). Backward needs **{fmt(setting.saved() / 1e6, 4)} MB a token** in bf16"
        f" (the inputs of both layers; {fmt(setting.saved(_other(setting)) / 1e6, 4)} MB with `{_other(setting)}`)."
        f" The state alone fills **{worth[0]} H100** of {H100_GB}·10⁹ bytes ({worth[1]} if {H100_GB} GB means GiB);"
        f" with the activations of {tokens:,} tokens it is {more}."
    )


# ------------------------------------------------------------------------------------------------- (b) N devices
def fewest_words(setting: Setting) -> str:
    """The smallest N without activations and with the setting's, and from which token on there is none."""
    tokens, name, capacity = setting.tokens_per_device, setting.nonlinearity, setting.capacity
    none = model.fewest_devices(XXL, capacity, 0)
    n = model.fewest_devices(XXL, capacity, tokens, name)
    words = f"Without activations, {fmt(setting.capacity_gb)} GB are enough from **N = {none}** on"
    if n is None:
        words += f"; with those of {tokens:,} tokens no N is enough"
    else:
        words += f"; with those of {tokens:,} tokens, from **N = {n}** on"
        if n > 1:
            fewer = sum(model.memory_per_device(XXL, n - 1, tokens, name).values()) / GB
            words += f" (with {n - 1} it would be {fmt(fewer)} GB each)"
    return (
        f"{words}. From {whole(2 * capacity / setting.saved())} tokens on, the half that every device holds whole is"
        f" {fmt(setting.capacity_gb)} GB by itself, and no number of devices helps."
    )


def working_words(setting: Setting) -> str:
    """What FSDP holds beside what is stored: gathered matrices, a gradient before it is scattered; its effect on N."""
    matrix = 2 * XXL.d_model * XXL.d_ff
    words = (
        "A device that runs FSDP holds more for a moment: the gathered matrix that it multiplies with, the next one"
        f" that is on its way, and a gradient that is not yet scattered, {fmt(matrix / GB)} GB each in bf16"
    )
    room, tokens = setting.capacity - 3 * matrix, setting.tokens_per_device
    n = model.fewest_devices(XXL, room, tokens, setting.nonlinearity) if room > 0 else None
    if n is None:
        return f"{words}: with them, no N is enough for {tokens:,} tokens."
    return (
        f"{words}. With them it takes N = {n} for {tokens:,} tokens. Tensor parallelism divides them by $Y$."
    )


def answer_b(setting: Setting) -> str:
    tokens, name = setting.tokens_per_device, setting.nonlinearity
    none = model.fewest_devices(XXL, setting.capacity, 0)
    n = model.fewest_devices(XXL, setting.capacity, tokens, name)
    with_tokens = f"**{n}**" if n else "no number of devices"
    gib = model.fewest_devices(XXL, setting.capacity_gb * GIB, 0)
    return (
        r"$m(N) = \bigl(16P + \tfrac12 a t\bigr)/N + \tfrac12 a t$. Below"
        f" {fmt(setting.capacity_gb)}·10⁹ bytes it takes **{none} devices** without activations ({gib} if GB means"
        f" GiB), and {with_tokens} with those of {tokens:,} tokens."
    )


# ---------------------------------------------------------------------------------------- (c) computing and sending
def alpha_words() -> str:
    """α, and the two bounds that it sets."""
    return (
        f"For the TPU v5p as the handout gives it, $\\alpha = C/W$ = **{fmt(TPU_V5P.alpha, 4)} FLOPs a byte**. With"
        f" $M_X$ = {HANDOUT.fsdp_axes}, gathers of weights are short enough from $B/X$ ="
        f" {fmt(TPU_V5P.alpha / HANDOUT.fsdp_axes, 4)} tokens on; with $M_Y$ = {HANDOUT.tensor_axes}, collectives of"
        f" activations are short enough up to $Y$ = {fmt(model.tensor_limit(XXL, TPU_V5P))}."
    )


def bound_words(setting: Setting) -> str:
    """What the two conditions come to for the setting's X and Y."""
    layout = setting.layout
    limit = model.tensor_limit(XXL, TPU_V5P)
    times = model.block_times(XXL, TPU_V5P, layout, 1)
    where = f"$X$ = {layout.fsdp}, $Y$ = {layout.tensor}"
    share = times.activations / times.compute
    if share >= 1:
        return f"At {where}, $Y$ is beyond its limit of {fmt(limit)}: the pass is communication bound at any batch."
    found = [threshold(setting, overlap) for overlap in OVERLAPS]
    per_device = [fmt(batch / setting.devices, 4) for batch in found]
    return (
        f"At {where}, collectives of activations take {percent(share)} of the products' time, whatever the batch. So"
        f" the gathers of weights decide: **{per_device[0]} tokens per device**, {whole(found[0])} in all. If they"
        f" have only the time that the collectives leave, they need {fmt(found[1] / found[0])} times as many:"
        f" **{per_device[1]} tokens per device**, {whole(found[1])} in all."
    )


def ring_words(setting: Setting) -> str:
    """What the factors (X - 1)/X and (Y - 1)/Y would change."""
    exact = [model.compute_bound_tokens(XXL, TPU_V5P, setting.layout, o, exact=True) for o in OVERLAPS]
    if not all(math.isfinite(batch) for batch in exact):
        return "With the exact factors of a ring it is communication bound at any batch as well."
    together, in_turn = (fmt(batch / setting.devices) for batch in exact)
    return (
        "With the exact factors of a ring, $(X-1)/X$ and $(Y-1)/Y$, the smallest compute-bound batch is"
        f" {together} tokens per device (together) and {in_turn} (in turn): the formulas are on the safe side."
    )


def waiting_words(setting: Setting) -> str:
    """The use of the devices if nothing hides the collectives of activations."""
    times = model.block_times(XXL, TPU_V5P, setting.layout, 1)
    return (
        "If nothing hides the collectives of activations, the products get at most"
        f" {percent(times.compute / (times.compute + times.activations))} of the time at $Y$ = {setting.tensor}, at"
        " any batch."
    )


def window_words(setting: Setting) -> str:
    """The batches that fit into memory and are compute bound on the setting's devices."""
    n = setting.devices
    held = _state() / n / GB
    most = model.most_tokens(XXL, setting.capacity, n, setting.nonlinearity, sharded=1)
    if most is None:
        return (
            f"On {n} devices the state alone takes {fmt(held)} GB each, and there are {fmt(setting.capacity_gb)}:"
            " whether a batch is compute bound is then beside the point."
        )
    words = (
        f"On {n} devices the state takes {fmt(held)} GB of {fmt(setting.capacity_gb)} on each, and activations, of"
        f" which each device keeps its own $1/N$, fill the rest at {most // n:,} tokens per device"
    )
    least = threshold(setting, "in turn")
    if not math.isfinite(least):
        return f"{words}; but with this split no batch is compute bound."
    if least > most:
        return f"{words}: fewer than the network asks for where collectives take turns."
    return (
        f"{words}. So there is room between what the network asks for and what memory allows, a factor of"
        f" {fmt(most / least)} even where collectives take turns."
    )


def answer_c(setting: Setting) -> str:
    layout, found = setting.layout, {o: threshold(setting, o) for o in OVERLAPS}
    if not all(math.isfinite(batch) for batch in found.values()):
        return f"With $Y$ = {layout.tensor} the forward pass is communication bound at any batch."
    parts = {o: (batch / setting.devices, batch) for o, batch in found.items()}
    (b, total), (b_turn, total_turn) = parts["together"], parts["in turn"]
    return (
        f"From $B/N = \\alpha/(M_X Y)$ = **{fmt(b, 4)} tokens per device** on, which is **{whole(total)} tokens"
        f" overall** on $N$ = {setting.devices} devices ({whole(b)} whole tokens on each make"
        f" {math.ceil(b) * setting.devices:,}); each of the $X$ = {layout.fsdp} groups of $Y$ = {layout.tensor} then"
        f" works on {fmt(total / layout.fsdp, 4)} tokens. This lets both kinds of collectives run at the same time,"
        f" each on its own axes. If they run one after the other, it takes {fmt(b_turn, 4)} per device,"
        f" {whole(total_turn)} overall."
    )


# ----------------------------------------------------------------------------------------------- (d) smaller batches
def tensor_words(setting: Setting) -> str:
    """The fewest tokens per device that any split of the devices keeps compute bound."""
    texts = []
    for overlap in OVERLAPS:
        least, split = model.least_tokens_per_device(XXL, TPU_V5P, setting.layout, overlap)
        texts.append(f"**{fmt(least)}** at $Y$ = {fmt(split)} ({overlap})")
    alone = TPU_V5P.alpha / 3
    return (
        f"Evaluated, the fewest tokens per device are {' and '.join(texts)}, against {fmt(alone)} for FSDP alone"
        " over all three axes."
    )


def best_words(setting: Setting) -> str:
    """The best X at the batch of part (c), and with the batch at which it is just compute bound."""
    batch = threshold(setting, "together")
    if not math.isfinite(batch):
        return "This split has no batch to improve on."
    best = model.best_fsdp(XXL, batch, setting.layout)
    if not 1 <= best <= setting.devices:
        return f"The best split of {setting.devices} devices is then none at all: one of the two kinds alone."
    times = model.block_times(
        XXL, TPU_V5P, replace(setting.layout, fsdp=best, tensor=setting.devices / best), batch
    )
    return (
        f"For the batch of part (c), {whole(batch)} tokens on {setting.devices} devices, $X_\\text{{opt}}$ ="
        f" {fmt(best)} and $Y$ = {fmt(setting.devices / best)}: communication would then take"
        f" {percent(times.communication('together') / times.compute)} of the products' time (together) or"
        f" {percent(times.communication('in turn') / times.compute)} (in turn)."
    )


def pipeline_words(setting: Setting, stages: int = 4, chunks: int = 4) -> str:
    """What a pipeline saves, and what it costs: the bubble, the hand-over, the memory of gathered weights."""
    layout = replace(setting.layout, fsdp=setting.layout.fsdp / stages, stages=stages)
    batch = model.compute_bound_tokens(XXL, TPU_V5P, layout)
    if not math.isfinite(batch):
        return (
            "With this split a pipeline does not help: collectives of activations are too long at any batch."
        )
    if layout.fsdp < 2:
        return f"With $Z$ = {stages} stages on {setting.devices} devices nothing is left for FSDP to gather."
    group = batch / layout.fsdp
    most = max(1, int(group // TPU_V5P.memory_tokens))
    link, network = TPU_V5P.axis_bytes_per_s / 2, TPU_V5P.network_bytes_per_s
    sends = [percent(chunks * model.stage_send_share(XXL, TPU_V5P, layout, rate)) for rate in (link, network)]
    uneven = XXL.num_blocks % (stages * chunks)
    return (
        f"With $Z$ = {stages} stages of $v$ = {chunks} chunks on {setting.devices} devices"
        f"{f' (as if {XXL.num_blocks} blocks could be dealt out evenly)' if uneven else ''} it is"
        f" {fmt(batch / layout.devices)} tokens per device, {whole(batch)} in all, and two chunks of gathered weights"
        f" are {fmt(2 / chunks * model.gathered_bytes(XXL, layout) / GB)} GB on each device. Handing over takes"
        f" {sends[0]} of the products' time over a link of the mesh, and {sends[1]} over the data center's network,"
        f" {fmt(network / 1e9)} GB/s a chip: stages need no axis of the mesh, they may even lie in different slices."
        " The price is the bubble. Reading weights from a device's own memory is worth it for"
        f" {fmt(TPU_V5P.memory_tokens)} tokens or more, so the {fmt(group, 4)} tokens of a group make at most $m$ ="
        f" {most} microbatches, and {percent(model.bubble_share(stages, most, chunks))} of a step is spent waiting."
    )


def scale_words(setting: Setting) -> str:
    """The thresholds read the other way round: the devices that a batch can keep busy."""
    batch = 2**22
    layout = setting.layout
    alone = batch / (TPU_V5P.alpha / 3)
    least = [model.least_tokens_per_device(XXL, TPU_V5P, layout, o)[0] for o in OVERLAPS]
    return (
        f"Read the other way round, these are limits on the devices that a given batch can keep busy. {batch:,}"
        f" tokens feed {fmt(alone, 2)} devices with FSDP alone, {fmt(batch / least[1], 2)} with the best split if"
        f" collectives take turns, and {fmt(batch / least[0], 2)} if they run together."
    )


def answer_d(setting: Setting) -> str:
    least, limit = model.least_tokens_per_device(XXL, TPU_V5P, setting.layout, "together")
    in_turn, half = model.least_tokens_per_device(XXL, TPU_V5P, setting.layout, "in turn")
    return (
        "The batch must cover the gathers of weights: $B \\ge (s_w/2)\\,\\alpha X / M_X$. So give devices to"
        f" something other than FSDP. *Tensor parallelism* up to $Y = M_Y F/\\alpha$ = {fmt(limit)} brings"
        f" {fmt(least)} tokens per device, $\\alpha^2/(M_X M_Y F)$, or {fmt(in_turn)} at $Y$ = {fmt(half)} if"
        " collectives take turns; *a pipeline* divides this by its stages, as long as the bubble stays small."
        " *Gathering weights in 8 bits* halves it in the forward pass, *faster links* count once with FSDP and squared"
        " with the best split, and *hiding one kind of collective behind the other* is worth up to a factor of four."
    )
