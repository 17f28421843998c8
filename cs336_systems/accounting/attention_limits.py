"""What one multiprocessor must do for a pair of query and key, unit by unit, and how long that takes at the least.

Attention that keeps its scores on chip is bound neither by peak FLOP/s nor by memory bandwidth alone. Each pair of a
query and a key that it sees takes work of four units of a multiprocessor, and any of them can be the bottleneck:

    products      tensor cores: 2·d FLOPs for each matmul
    exps          special function units: one exponential in each pass
    instructions  the schedulers issue 128 lanes per clock: scaling, masking, maxima, sums, conversions
    shared        shared memory, from which tensor cores take their operands

All counts are per pair, all rates per clock and multiprocessor. Nothing here needs torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from cs336_systems.accounting.model import check_choice
from cs336_systems.accounting.operations import check_sizes

UNITS = ("products", "exps", "instructions", "shared")
_GROUP = 64  # rows that a warpgroup multiplies at once (wgmma's M)
_HALF_BYTES = 2


@dataclass(frozen=True)
class Multiprocessor:
    """What one streaming multiprocessor does in a clock at the most.

    flops: of dense 16-bit matmuls with fp32 accumulation. exps: exponentials in base two. lanes: fp32 instructions,
    counted by lanes (four schedulers issue a warp of 32 each). shared_bytes: read from shared memory.
    """

    flops: int
    exps: int = 16
    lanes: int = 128
    shared_bytes: int = 128

    @property
    def per_clock(self) -> dict[str, int]:
        return {
            "products": self.flops,
            "exps": self.exps,
            "instructions": self.lanes,
            "shared": self.shared_bytes,
        }


# By compute capability. FLOPs: the architectures' white papers, which give an A100's multiprocessor 1024
# FMAs per clock and an H100's twice as many. The other rates: CUDA C++ Programming Guide, table of the throughput of
# native arithmetic instructions (compute capabilities 8.0 and 9.0), and 32 banks of shared memory, 4 bytes each.
MULTIPROCESSORS = {80: Multiprocessor(2048), 90: Multiprocessor(4096)}

# Instructions per pair, by hand, for scores in fp32 and 16-bit operands: each is issued for every pair.
#   forward: scale and subtract the maximum (1), maximum (1), exponential (1), sum (1), half a conversion of two to
#       16 bits
#   backward: scale and subtract L (1), exponential (1), dP − D (1), its product with P (1), two half conversions; in a
#       pass that does not need P as an operand, one
FORWARD_INSTRUCTIONS = 4.5
BACKWARD_INSTRUCTIONS = 5.0
DQ_INSTRUCTIONS = 4.5
MASK_INSTRUCTIONS = 2.0  # compare and select
UNFOLDED_INSTRUCTIONS = 2.0  # exp instead of exp2: scaling the scores, subtracting, multiplying by log2(e)


@dataclass(frozen=True)
class Work:
    """Work per pair of query and key: matmuls (`products`, each of 2·d FLOPs), exponentials, instructions, bytes from
    shared memory."""

    products: int
    exps: float
    instructions: float
    shared: float

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def clocks(self, head_dim: int, sm: Multiprocessor) -> dict[str, float]:
        """Unit → clocks of one multiprocessor per pair."""
        counts = {
            "products": 2 * head_dim * self.products, "exps": self.exps, "instructions": self.instructions,
            "shared": self.shared,
        }  # fmt: skip
        return {unit: counts[unit] / sm.per_clock[unit] for unit in UNITS}


def product_shared_bytes(m: int, n: int, k: int, a_in_registers: bool = False) -> float:
    """Bytes that 16-bit (m, k) @ (k, n) takes from shared memory: each group of 64 rows reads its rows of the first
    operand (unless it holds them in registers) and all of the second. ValueError for a size that is not positive."""
    check_sizes(m=m, n=n, k=k)
    return _HALF_BYTES * ((0 if a_in_registers else m * k) + m / _GROUP * n * k)


def forward_work(head_dim: int, block_n: int, masked: bool = False, folded: bool = True) -> Work:
    """Forward: Q Kᵀ with both operands in shared memory, P V with P in registers. `masked`: every score goes through
    the mask; `folded`: base-two exponentials with the scale folded in."""
    check_sizes(head_dim=head_dim, block_n=block_n)
    pairs = _GROUP * block_n
    shared = product_shared_bytes(_GROUP, block_n, head_dim) + product_shared_bytes(
        _GROUP, head_dim, block_n, True
    )
    return Work(2, 1, FORWARD_INSTRUCTIONS + _extra(masked, folded), shared / pairs)


def backward_work(
    head_dim: int, block: int, passes: str = "one", masked: bool = False, folded: bool = True
) -> Work:
    """Backward, scores computed for 64 rows and `block` columns at a time.

    passes: `"one"`, five matmuls; `"queries"`, the pass for dQ alone (three); `"keys"`, the one for dK and dV (four).
    ValueError for another.
    """
    check_choice("passes", passes, ("one", "queries", "keys"))
    check_sizes(head_dim=head_dim, block=block)
    pairs = _GROUP * block
    scores = 2 * product_shared_bytes(_GROUP, block, head_dim)  # S and dP: both operands in shared memory
    sums = product_shared_bytes(_GROUP, head_dim, block, True)  # of P or dS in registers, over `block`
    extra = _extra(masked, folded)
    if passes == "queries":
        return Work(3, 1, DQ_INSTRUCTIONS + extra, (scores + sums) / pairs)
    if passes == "keys":
        return Work(4, 1, BACKWARD_INSTRUCTIONS + extra, (scores + 2 * sums) / pairs)
    dq = _HALF_BYTES * pairs + product_shared_bytes(
        block, head_dim, _GROUP
    )  # dS is written, and read as an operand
    return Work(5, 1, BACKWARD_INSTRUCTIONS + extra, (scores + 2 * sums + dq) / pairs)


def _extra(masked: bool, folded: bool) -> float:
    return MASK_INSTRUCTIONS * masked + UNFOLDED_INSTRUCTIONS * (not folded)


def visited_pairs(length: int, block_m: int, block_n: int, skip: bool = True) -> int:
    """Pairs of query and key in the tiles (block_m, block_n) that a causal pass over one head visits: those with a key
    that some query of the tile sees, or all without `skip`. ValueError for sizes that are not positive."""
    check_sizes(length=length, block_m=block_m, block_n=block_n)
    tiles = range(-(-length // block_m))
    ends = (min((i + 1) * block_m, length) if skip else length for i in tiles)
    return sum(-(-end // block_n) * block_n * block_m for end in ends)


def unit_ms(
    work: Work, pairs: float, head_dim: int, sms: int, sm_mhz: float, sm: Multiprocessor
) -> dict[str, float]:
    """Unit → the least time in ms for `pairs` pairs on `sms` multiprocessors, were it the only one at work.

    The largest is a floor for any kernel with this work; the sum is what a kernel takes that never has two units at
    work at once. ValueError for a number that is not positive.
    """
    check_sizes(pairs=pairs, sms=sms, sm_mhz=sm_mhz)
    return {unit: clocks * pairs / (sms * sm_mhz * 1e3) for unit, clocks in work.clocks(head_dim, sm).items()}


def overlapped_ms(times: dict[str, float], overlap: float) -> float:
    """Between the sum of the units' times (`overlap` 0) and the largest of them (1). Shared memory feeds the tensor
    cores while they run, so it never adds: it counts where it takes longer than they do."""
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap={overlap}; it must be between 0 and 1")
    tensor = max(times["products"], times["shared"])
    serial = tensor + times["exps"] + times["instructions"]
    longest = max(tensor, times["exps"], times["instructions"])
    return serial - overlap * (serial - longest)


def idle_factor(costs: Iterable[float], slots: int, fixed: bool = False) -> float:
    """How much longer programs of these costs take than evenly spread work would: 1 is perfect.

    Each starts, in the order given, in the slot that is free first, as the hardware does it; with `fixed`, program i in
    slot i mod `slots`, as persistent programs do that count for themselves. ValueError without programs or slots.
    """
    costs = list(costs)
    if not costs or slots < 1:
        raise ValueError(f"{len(costs)} programs and {slots} slots; at least one of each is needed")
    ends = [sum(costs[slot::slots]) for slot in range(slots)] if fixed else [0.0] * slots
    for cost in () if fixed else costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends) / (sum(costs) / slots)


def harness_bytes(
    heads: int, length: int, head_dim: int, bytes_per_element: int, stacked: bool
) -> dict[str, int]:
    """Operation → the fewest bytes that the leaderboard's harness moves around attention itself.

    The sum reads O. Its gradient, one number, is written out as a matrix, since compiled backward passes take
    gradients in the layout that they were traced with. With q, k and v unpacked from one leaf (`stacked`), autograd
    copies their gradients into one tensor and adds that to the gradient of the call before; three leaves whose
    gradients are dropped cost nothing more.
    """
    check_sizes(heads=heads, length=length, head_dim=head_dim, bytes_per_element=bytes_per_element)
    matrix = heads * length * head_dim * bytes_per_element
    more = {"stacking the gradients": 6 * matrix, "adding to the last call's": 9 * matrix} if stacked else {}
    return {"sum of the output": matrix, "its gradient as a matrix": matrix} | more
