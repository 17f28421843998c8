"""Memory and communication of a stack of feed-forward blocks that is spread over a mesh of devices.

The stack is the handout's simplification of a Transformer: L blocks of two linear layers, D → F → D, without
attention, norms, embedding, head or biases. Memory counts what must be stored from one pass to the next; time counts
the forward pass of one block, since all blocks are alike.

Symbols: D d_model, F d_ff, L num_blocks, P = 2·L·D·F parameters. B tokens of the whole batch, on N devices. X devices
share the weights by FSDP, over M_X axes of the mesh; Y devices split F by tensor parallelism, over M_Y axes; Z stages
of a pipeline split L; N = X·Y·Z. C FLOP/s of a device; W bytes/s at which it sends and receives along one axis, both
directions added; α = C / W, the FLOPs that it does while one byte passes. s_w and s_a: bytes of one gathered weight
and of one activation on the wire, 2 each in bf16.

Source of the communication model: Austin et al., "How to Scale Your Model" (2025), chapters "Sharded matrices" and
"Training"; https://jax-ml.github.io/scaling-book. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from cs336_systems.accounting.model import check_choice
from cs336_systems.accounting.operations import check_sizes, matmul_flops

GB = 10**9
GIB = 2**30

STATES = {"master weights": 4, "accumulated gradients": 4, "first moment": 4, "second moment": 4}
"""Bytes per parameter of what training keeps in fp32. The moments are AdamW's (Loshchilov and Hutter, 2019)."""

WIDE = {"none": 1, "relu": 1, "gelu": 2, "silu": 2}
"""Nonlinearity → tensors of width F that a block saves for backward; see `saved_bytes_per_token`."""

OVERLAPS = ("together", "in turn")
"""Both kinds of collectives overlap compute: at the same time as each other, or one after the other."""


@dataclass(frozen=True)
class Stack:
    """L blocks of two linear layers. ValueError for a size that is not positive."""

    d_model: int
    d_ff: int
    num_blocks: int

    def __post_init__(self) -> None:
        check_sizes(**vars(self))

    @property
    def num_parameters(self) -> int:
        """P = 2·L·D·F: each block has a D × F and an F × D matrix."""
        return 2 * self.num_blocks * self.d_model * self.d_ff


XXL = Stack(d_model=16_384, d_ff=53_248, num_blocks=126)  # the handout's, in communication_accounting


# ------------------------------------------------------------------------------------------------------ memory
def state_bytes(stack: Stack) -> dict[str, int]:
    """Component → bytes of master weights, accumulated gradients and AdamW's moments, all fp32: 16·P together."""
    return {name: size * stack.num_parameters for name, size in STATES.items()}


def saved_bytes_per_token(stack: Stack, nonlinearity: str = "relu") -> dict[str, int]:
    """Tensor → bytes per token in bf16, over all blocks, that the forward pass saves for the backward pass.

    A linear layer y = W x needs dW = dy xᵀ and dx = Wᵀ dy: it saves its input x (and refers to W, which exists
    anyway). So a block saves the input of its first layer, D wide, and that of its second, F wide. Between them:
    ReLU's gradient needs the sign of its output only, which is the second layer's input and saved already, and no
    nonlinearity needs nothing; GELU and SiLU need their own input, F wide, once more. A residual sum saves nothing.
    Hence L·(D + k·F) elements, k = 1 ("none", "relu") or 2 ("gelu", "silu"). Checkpointing would save less.
    ValueError for an unknown nonlinearity.
    """
    check_choice("nonlinearity", nonlinearity, tuple(WIDE))
    d, f = (2 * stack.num_blocks * width for width in (stack.d_model, stack.d_ff))
    saved = {"input of the first layer": d, "input of the second layer": f}
    return saved | ({"input of the nonlinearity": f} if WIDE[nonlinearity] == 2 else {})


def devices_worth(num_bytes: int, capacity: float) -> int:
    """How many devices with `capacity` bytes each hold `num_bytes` together."""
    check_sizes(capacity=capacity)
    return math.ceil(Fraction(num_bytes) / Fraction(capacity))


def fewest_devices(
    stack: Stack, capacity: float, tokens: int, nonlinearity: str = "relu", sharded: float = 0.5
) -> int | None:
    """The smallest N of devices that share the fp32 state and a part of the activations, and need less than `capacity`
    bytes each; None if there is none.

    m(N) = (16·P + s·a·t) / N + (1 - s)·a·t, with a the bytes saved for a token, t = `tokens` the tokens that a
    device's forward pass takes part in, and s = `sharded` the share of the activations that is spread over the N.
    m(N) < c holds for N > (16·P + s·a·t) / (c - (1 - s)·a·t), if what every device holds whole leaves room at all.

    s = 1/2 is the handout's part (b). s = 0 is FSDP as it is usually run, t tokens of its own for each device;
    s = 1 is a batch of t tokens that is spread evenly over all. ValueError for a share outside [0, 1], negative tokens,
    or a capacity that is not positive.
    """
    check_sizes(capacity=capacity)
    if tokens < 0:
        raise ValueError(f"tokens={tokens}; it must not be negative")
    _check_share(sharded)
    activations = tokens * sum(saved_bytes_per_token(stack, nonlinearity).values())
    share = Fraction(sharded)
    room = Fraction(capacity) - (1 - share) * activations
    if room <= 0:
        return None
    return math.floor((sum(state_bytes(stack).values()) + share * activations) / room) + 1


def most_tokens(
    stack: Stack, capacity: float, devices: int, nonlinearity: str = "relu", sharded: float = 0.5
) -> int | None:
    """The largest t with m(N) of `fewest_devices` below `capacity` bytes; None if the fp32 state alone does not fit."""
    check_sizes(capacity=capacity, devices=devices)
    _check_share(sharded)
    share = Fraction(sharded)
    room = Fraction(capacity) - Fraction(sum(state_bytes(stack).values()), devices)
    if room <= 0:
        return None
    for_token = (share / devices + 1 - share) * sum(saved_bytes_per_token(stack, nonlinearity).values())
    return math.ceil(room / for_token) - 1


# ----------------------------------------------------------------------------------- compute and communication
@dataclass(frozen=True)
class Chip:
    """flops: FLOP/s in bf16 (C). axis_bytes_per_s: W. memory_bytes_per_s: of its own memory."""

    flops: float
    axis_bytes_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        check_sizes(**vars(self))

    @property
    def alpha(self) -> float:
        """α = C / W: FLOPs in the time of one byte along one axis."""
        return self.flops / self.axis_bytes_per_s

    @property
    def memory_tokens(self) -> float:
        """Tokens for which a matmul with bf16 weights takes as long as reading them: 2·t·n FLOPs, 2·n bytes."""
        return self.flops / self.memory_bytes_per_s


# C and W as the handout gives them, after Austin et al. (a link carries 9e10 bytes/s each way). The bandwidth of
# memory from Google Cloud's documentation, "TPU v5p": 2765 GB/s.
TPU_V5P = Chip(4.6e14, axis_bytes_per_s=2 * 9e10, memory_bytes_per_s=2.765e12)


@dataclass(frozen=True)
class Layout:
    """How N = X·Y·Z devices share the work; X, Y and Z may be fractions where an optimum is looked for."""

    fsdp: float
    tensor: float
    fsdp_axes: int = 2
    tensor_axes: int = 1
    weight_bytes: float = 2
    activation_bytes: float = 2
    stages: float = 1

    def __post_init__(self) -> None:
        check_sizes(**vars(self))


HANDOUT = Layout(fsdp=16, tensor=4, fsdp_axes=2, tensor_axes=1)


def gather_seconds(
    num_bytes: float, devices: float, axis_bytes_per_s: float, axes: int = 1, exact: bool = False
) -> float:
    """The time of an all-gather that leaves `num_bytes` on each device, or of a reduce-scatter that starts from them.

    In a ring each device receives all shards but its own, num_bytes·(n - 1)/n, from both sides at once, and with
    several axes along each of them. `exact` keeps the factor (n - 1)/n; the book's formulas take it as 1. Nothing is
    sent where there is one device. Latency is left out. Source: Austin et al., "Sharded matrices".
    """
    check_sizes(devices=devices, axis_bytes_per_s=axis_bytes_per_s, axes=axes)
    if devices == 1:
        return 0.0
    return num_bytes / (axis_bytes_per_s * axes) * ((devices - 1) / devices if exact else 1)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block's forward pass: matmuls, gathers of weights (FSDP), collectives of activations (TP)."""

    compute: float
    weights: float
    activations: float


def block_times(stack: Stack, chip: Chip, layout: Layout, tokens: float, exact: bool = False) -> BlockTimes:
    """The times of one block for a batch of B = `tokens`, of which B/X reach each group of Y devices.

    Forward: In[B/X, D/Y] is gathered over Y; W_in[D/X, F/Y] over X; their product; W_out[F/Y, D/X] over X; their
    product, a sum that is spread over Y; and its reduce-scatter to Out[B/X, D/Y].

        compute      2 matmuls of 2·(B/X)·D·(F/Y) FLOPs      4·B·D·F / (X·Y·C)
        weights      2 gathers of s_w·D·F/Y bytes            2·s_w·D·F / (Y·M_X·W)
        activations  a gather and a reduce-scatter, s_a·(B/X)·D bytes     2·s_a·B·D / (X·M_Y·W)

    A pipeline changes nothing here: a device has fewer blocks, and B tokens pass through each.
    """
    check_sizes(tokens=tokens)
    d, f, width = stack.d_model, stack.d_ff, chip.axis_bytes_per_s
    flops = 2 * matmul_flops(tokens / layout.fsdp, f / layout.tensor, d)
    weights = layout.weight_bytes * d * f / layout.tensor
    activations = layout.activation_bytes * d * tokens / layout.fsdp
    return BlockTimes(
        compute=flops / chip.flops,
        weights=2 * gather_seconds(weights, layout.fsdp, width, layout.fsdp_axes, exact),
        activations=2 * gather_seconds(activations, layout.tensor, width, layout.tensor_axes, exact),
    )


def compute_bound_tokens(
    stack: Stack, chip: Chip, layout: Layout, overlap: str = "together", exact: bool = False
) -> float:
    """The smallest batch B, in tokens, that is compute-bound; infinite where no batch is.

    Compute and the activations' collectives grow with B, the gathers of weights do not. Together: the gathers decide,
    B ≥ (s_w/2)·α·X/M_X, if the collectives are short enough, Y ≤ (2/s_a)·M_Y·F/α (`tensor_limit`). In turn: the
    gathers must fit into what the collectives leave, B = T_weights / (T_compute - T_activations per token).
    """
    check_choice("overlap", overlap, OVERLAPS)
    one = block_times(stack, chip, layout, 1, exact)  # of one token: those that grow with B are for each
    left = one.compute - one.activations
    if overlap == "together":
        return one.weights / one.compute if left >= 0 else math.inf
    return one.weights / left if left > 0 else math.inf


def tensor_limit(stack: Stack, chip: Chip, tensor_axes: int = 1, activation_bytes: float = 2) -> float:
    """The largest Y whose collectives take no longer than computing, at any batch: (2/s_a)·M_Y·F/α.

    Both times are proportional to B/X, and their ratio is (s_a/2)·α·Y/(M_Y·F).
    """
    check_sizes(tensor_axes=tensor_axes, activation_bytes=activation_bytes)
    return 2 / activation_bytes * tensor_axes * stack.d_ff / chip.alpha


def least_tokens_per_device(
    stack: Stack, chip: Chip, layout: Layout, overlap: str = "together"
) -> tuple[float, float]:
    """(B/N, Y): the fewest tokens per device that the best split into X and Y keeps compute-bound, and its Y.

    With Y = N/(Z·X), gathers of weights take a·X and collectives of activations b/X: the larger of the two, and their
    sum, are both least where they are equal, X² = (s_a·M_X / (s_w·M_Y))·B·N / (F·Z). Put into the times,
    T_compute / T_weights = sqrt(B/N · 4·M_X·M_Y·F / (s_w·s_a)) / α. Together, this must be 1:
    B/N = (s_w·s_a/4)·α² / (M_X·M_Y·F), at Y = `tensor_limit`. In turn it must be 2, as two times of equal length add
    up: four times as many tokens, at half the Y. Of the layout only axes, bytes and stages are read: Z stages divide
    the tokens by Z.
    """
    check_choice("overlap", overlap, OVERLAPS)
    least = (
        layout.weight_bytes * layout.activation_bytes / 4 * chip.alpha**2
        / (layout.fsdp_axes * layout.tensor_axes * stack.d_ff * layout.stages)
    )  # fmt: skip
    limit = tensor_limit(stack, chip, layout.tensor_axes, layout.activation_bytes)
    return (least, limit) if overlap == "together" else (4 * least, limit / 2)


# ---------------------------------------------------------------------------------------------------- pipeline
def bubble_share(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The share of a step in which a stage of a pipeline waits: (Z - 1) / (v·m + Z - 1).

    m microbatches; v `chunks` of blocks on each device in turn (an interleaved schedule). The first microbatch reaches
    the last stage after Z - 1 steps of a chunk, in which that stage has nothing to do, and it has v·m such steps of
    work. Source: Huang et al., "GPipe" (2019); Narayanan et al. (arXiv 2104.04473), section 2.2.
    """
    check_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    return (stages - 1) / (chunks * microbatches + stages - 1)


def stage_send_share(stack: Stack, chip: Chip, layout: Layout, bytes_per_s: float) -> float:
    """The time of sending activations to the next stage at `bytes_per_s`, over that of a stage's matmuls (forward).

    A device sends s_a·(B/X)·D/Y bytes after L/Z blocks of matmuls. One link of the mesh carries W/2 in one direction.
    """
    check_sizes(bytes_per_s=bytes_per_s)
    sent = layout.activation_bytes * stack.d_model / (layout.fsdp * layout.tensor)
    compute = block_times(stack, chip, layout, 1).compute * stack.num_blocks / layout.stages
    return sent / bytes_per_s / compute


def _check_share(sharded: float) -> None:
    if not 0 <= sharded <= 1:
        raise ValueError(f"sharded={sharded}; it must lie between 0 and 1")
