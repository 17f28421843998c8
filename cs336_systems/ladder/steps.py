"""The steps of the ladder as data: what each changes, how it is launched, what it was expected to cost, and why.

A step names a launcher (`module:function`) and its configuration, so a kernel of any other module becomes a step by one
more line here; where the module is missing, the step is skipped and says so. Steps that lose stay in the list. Their
`base` is the step that they change, which need not be the one above.

What a step was expected to cost is computed by `predicted_ms` from the traits that the step states: a model of four
units (`accounting.attention_limits`), not a fit. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cs336_systems import accounting
from cs336_systems.attention.triton.tiles import Tiles

PARTS = ("forward", "backward")
OVERLAP = {"none": 0.0, "chance": 0.5, "design": 0.75}  # shares of what could overlap that does: assumptions
LOAD_CLOCKS = 600  # latency of a tile load that was not prefetched: an assumption
ATOMIC_TB_PER_S = 2.75  # fp32 atomic additions in the L2 cache: an assumption, half of what it copies
WORK = {"heads": 16, "seq_len": 16384, "head_dim": 64}  # the leaderboard's
# The machine that predictions are made for: an H100 SXM by its data sheet, at the clock that its peak implies
SMS, SM_MHZ, TB_PER_S, CAPABILITY = 132, 1830, 3.35, 90


@dataclass(frozen=True)
class Switches:
    """What `kernels` are compiled with; see there. `persistent`: programs per SM; 0: one per tile."""

    tiles: Tiles  # forward, or the backward pass that owns queries
    key_tiles: Tiles | None = None  # the backward pass that owns keys
    skip: bool = False
    split: bool = False
    exp2: bool = False
    heavy_first: bool = False
    tma: bool = False
    persistent: int = 0
    fuse_d: bool = False
    one_pass: bool = False


@dataclass(frozen=True)
class Traits:
    """What a prediction is based on, known before anything has run. resident: programs resident on a multiprocessor,
    by their registers and shared memory; key_resident: those of the pass that owns keys. overlap: a key of OVERLAP."""

    resident: int
    overlap: str = "chance"
    key_resident: int = 0


@dataclass(frozen=True)
class Step:
    """One step. `config` is handed to the launcher: `Switches` for the ladder's `kernels`; for other kernels the name
    of a dataclass beside the launcher with its arguments, or None for the launcher's choice. `model`: the switches
    that the prediction assumes. `may_spill`: registers are not expected to suffice."""

    name: str
    part: str
    base: str
    title: str
    why: str
    launcher: str
    config: Switches | tuple[str, dict[str, Any]] | None
    model: Switches
    traits: Traits
    may_spill: bool = False

    @property
    def own(self) -> bool:
        """Whether it runs the ladder's `kernels`."""
        return isinstance(self.config, Switches)


OWN = "cs336_systems.ladder.launch:"
PRODUCTION = "cs336_systems.attention.triton.launch:"
HOPPER = "cs336_systems.attention.hopper.launch:"
EARLIER = "cs336_systems.ladder.hopper_launch:"  # kernels for Hopper that came before those in use


def _chain(
    part: str, first: Switches, rows: list[tuple[str, dict[str, Any], Traits, str, str]]
) -> list[Step]:
    """Steps that each change something of the one before."""
    out: list[Step] = []
    switches = first
    for name, change, traits, title, why in rows:
        switches = dataclasses.replace(switches, **change)
        base = out[-1].name if out else ""
        out.append(Step(name, part, base, title, why, f"{OWN}launch_{part}", switches, switches, traits))
    return out


_T = Tiles
_SMALL = _T(64, 64, 4, 1)
_FORWARD = _chain("forward", Switches(_SMALL), [
    ("f_all_tiles", {}, Traits(4), "every tile visited and masked",
     "All pairs are computed, half of them for nothing, and each goes through a comparison and a selection."),
    ("f_skip", {"skip": True}, Traits(4), "tiles after the diagonal skipped",
     "Half of the pairs disappear, but for those of the tiles on the diagonal."),
    ("f_split", {"split": True}, Traits(4), "a loop without a mask before the diagonal",
     "Two instructions fewer for nearly every pair, of eight and a half."),
    ("f_exp2", {"exp2": True}, Traits(4), "exp2, scale and log2(e) folded",
     "The SFU computes powers of two. Scaling, subtracting and multiplying by log2(e) become one instruction: two "
     "fewer for each pair."),
    ("f_heavy_first", {"heavy_first": True}, Traits(4), "heaviest tiles first",
     "If heads start one after another, the last programs are the longest of the last head, and most "
     "multiprocessors wait. If the longest start first, short ones fill the end."),
    ("f_stages", {"tiles": _T(64, 64, 4, 3)}, Traits(3), "three loads in flight",
     "With one load, a program waits for each tile; with three, asynchronous copies bring the next two while it "
     "computes. By the model four programs on an SM already fill the wait, so it expects no gain."),
    ("f_tiles", {"tiles": _T(128, 64, 8, 3)}, Traits(2), "tiles of 128 queries, 8 warps",
     "Each tile of keys serves twice as many queries: half of the traffic from L2, which the model does not "
     "count, and a few more pairs on the diagonal, which it does. Its two groups overlap by chance, "
     "as two programs on an SM did before."),
    ("f_tma", {"tma": True}, Traits(2), "tensor descriptors (TMA)",
     "TMA computes a tile's addresses, not the threads. That spares a thread four copies of 16 bytes for every "
     "32 scores, which the model does not count."),
    ("f_persistent", {"persistent": 2}, Traits(2), "persistent programs",
     "Starting a program costs little beside its work, and a fixed assignment balances worse than the "
     "hardware's, which gives the next tile to whoever is free. No gain is expected."),
])  # fmt: skip
_BEST_FORWARD = next(s for s in _FORWARD if s.name == "f_tiles").model

_FORWARD += [
    Step("f_production", "forward", "f_tiles", "the production kernel (`attention.triton`)",
         "Step 7's tiles and loop. Masks for ragged lengths drop out of it at compile time; strides are arguments, a "
         "few instructions for each tile, which the model does not count.",
         f"{PRODUCTION}launch_forward", None, _BEST_FORWARD, Traits(2)),
    Step("f_hopper_2", "forward", "f_production", "Gluon: a producer warp, two groups of 64 queries, 128 keys",
         "Warps with different jobs: loads cost the computing warps nothing, and one group's softmax runs "
         "beside the other group's matmuls by design. A group also starts a tile's scores before it is done with the "
         "tile before: overlap inside a group.",
         f"{HOPPER}launch_forward", ("Forward", {"groups": 2, "block_n": 128, "stages": 2, "overlap": True}),
         dataclasses.replace(_BEST_FORWARD, tiles=_T(128, 128, 12, 2)), Traits(1, "design")),
    Step("f_hopper_1", "forward", "f_hopper_2", "Gluon: programs of one group, two on a multiprocessor",
         "Each group is now a program with its own keys and values, so a tile read serves half as many queries. But "
         "programs begin and end independently, and small ones fill a GPU sooner. They share the SM's registers: 128 a "
         "thread, too few for two tiles at once.",
         f"{HOPPER}launch_forward", ("Forward", {"groups": 1, "block_n": 128, "stages": 2, "overlap": False}),
         dataclasses.replace(_BEST_FORWARD, tiles=_T(64, 128, 8, 2)), Traits(2, "design")),
    Step("f_hopper_3", "forward", "f_hopper_2", "Gluon: three groups, no overlap inside a group",
         "A third group fills the units while two wait. Each thread then has only 160 registers, too few for two "
         "tiles of scores, so a group can no longer work on two tiles at once.",
         f"{HOPPER}launch_forward", ("Forward", {"groups": 3, "block_n": 128, "stages": 2, "overlap": False}),
         dataclasses.replace(_BEST_FORWARD, tiles=_T(192, 128, 16, 2)), Traits(1, "design")),
    Step("f_hopper", "forward", "f_hopper_3", "Gluon: the configuration in use",
         "What the module itself chooses for this head dimension and this many programs.",
         f"{HOPPER}launch_forward", None,
         dataclasses.replace(_BEST_FORWARD, tiles=_T(192, 128, 16, 2)), Traits(1, "design")),
]  # fmt: skip

_BACKWARD = _chain("backward", Switches(_SMALL, _SMALL), [
    ("b_all_tiles", {}, Traits(4, key_resident=2), "two passes, every tile visited and masked",
     "Seven matmuls, three in the pass for dQ and four in that for dK and dV, over all pairs."),
    ("b_skip", {"skip": True}, Traits(4, key_resident=2), "tiles without a visible pair skipped",
     "Half of the pairs, as in the forward pass."),
    ("b_split", {"split": True}, Traits(4, key_resident=2), "a loop without a mask off the diagonal",
     "Two instructions fewer for nearly every pair and pass."),
    ("b_exp2", {"exp2": True}, Traits(4, key_resident=2), "exp2, scale and log2(e) folded",
     "Two instructions fewer for each pair and pass."),
    ("b_heavy_first", {"heavy_first": True}, Traits(4, key_resident=2), "heaviest tiles first",
     "The pass for dQ left multiprocessors idle at its end, as forward did. That for dK and dV starts with the "
     "heaviest keys of each head anyway, but head by head."),
    ("b_stages", {"tiles": _T(64, 64, 4, 3), "key_tiles": _T(64, 64, 4, 3)}, Traits(3, key_resident=2),
     "three loads in flight",
     "In the pass that owns keys there are only two programs on a multiprocessor to fill the time while one waits."),
    ("b_tiles", {"key_tiles": _T(128, 128, 8, 3)}, Traits(3, key_resident=1), "keys: tiles of 128 × 128, 8 warps",
     "Half of the traffic from L2 in the larger pass, which the model does not count. Registers hold one program of "
     "eight warps, not two of four, and programs end less evenly."),
    ("b_fuse_d", {"fuse_d": True}, Traits(3, key_resident=1), "D computed where dQ is",
     "One kernel fewer, which read O and dO; dO is in registers there anyway."),
    ("b_one_pass", {"fuse_d": False, "one_pass": True, "key_tiles": _T(64, 128, 8, 2)}, Traits(1),
     "one pass, dQ added up in memory",
     "Five matmuls instead of seven, one exponential instead of two. In exchange each tile of dS K is added "
     "to memory in fp32, and sums have to be zeroed, scaled and rounded by kernels of their own."),
])  # fmt: skip
# tiles of 128 × 128 take all of a thread's registers: one version of the compiler spills a few, another none
_BACKWARD = [
    dataclasses.replace(step, may_spill=step.model.key_tiles == _T(128, 128, 8, 3)) for step in _BACKWARD
]
_BEST_BACKWARD = next(s for s in _BACKWARD if s.name == "b_fuse_d").model
_HOPPER_BACKWARD = dataclasses.replace(
    _BEST_BACKWARD, tiles=_T(64, 128, 16, 2), key_tiles=_T(64, 128, 16, 2), fuse_d=False, one_pass=True
)

_BACKWARD += [
    Step("b_production", "backward", "b_fuse_d", "the production kernels (`attention.triton`)",
         "The options of step 8, plus code for boundaries and strides of any kind.",
         f"{PRODUCTION}launch_backward", None, _BEST_BACKWARD, Traits(3, key_resident=1)),
    Step("b_hopper_2", "backward", "b_production", "Gluon: one pass, two groups of 64 keys, dQ added by TMA",
         "Wgmma and a producer warp as in the forward ladder. Five matmuls; TMA adds dQ's parts to memory, and no warp "
         "waits for that.",
         f"{EARLIER}launch_backward", ("Backward", {"block_m": 128, "stages": 2, "dq_group": False}),
         dataclasses.replace(_HOPPER_BACKWARD, tiles=_T(128, 128, 8, 2), key_tiles=_T(128, 128, 8, 2)),
         Traits(1, "design")),
    Step("b_hopper_3", "backward", "b_hopper_2", "Gluon: a third group for dQ, tiles of 64 queries",
         "dQ's matmul needs dS of both groups, so they wait for each other. A third group takes over that matmul and "
         "the waiting. Three groups have registers for half as many queries.",
         f"{EARLIER}launch_backward", ("Backward", {"block_m": 64, "stages": 2, "dq_group": True}),
         _HOPPER_BACKWARD, Traits(1, "design")),
    Step("b_hopper_ahead", "backward", "b_hopper_3", "Gluon: a tile's P beside the last matmuls of the tile before",
         "The exponentials of the next tile are independent of this tile's matmuls for dK and dQ. Issued "
         "beside them, they use a unit that would wait.",
         f"{EARLIER}launch_backward", ("Backward", {"block_m": 64, "stages": 3, "dq_group": True, "ahead": True}),
         _HOPPER_BACKWARD, Traits(1, "design")),
    Step("b_hopper_registers", "backward", "b_hopper_ahead", "Gluon: K from registers in the matmul for S",
         "Shared memory is read for five matmuls, and K is the same for all tiles of queries: kept in registers, it "
         "is read once. Registers may run short.",
         f"{EARLIER}launch_backward",
         ("Backward", {"block_m": 64, "stages": 3, "dq_group": True, "ahead": True, "k_registers": True}),
         _HOPPER_BACKWARD, Traits(1, "design")),
    Step("b_hopper", "backward", "b_hopper_ahead", "Gluon: persistent programs, which draw tiles of keys: in use",
         "A tile of keys begins while the last one ends. With 128 tiles of queries to a tile of keys on average, "
         "beginnings and ends are a small part of the time here; of short sequences they are a large one.",
         f"{HOPPER}launch_backward", None, _HOPPER_BACKWARD, Traits(1, "design")),
]  # fmt: skip

STEPS: dict[str, Step] = {step.name: step for step in (*_FORWARD, *_BACKWARD)}


def of_part(part: str) -> list[Step]:
    """The steps of one pass in their order; ValueError for an unknown part."""
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; allowed: {', '.join(PARTS)}")
    return [step for step in STEPS.values() if step.part == part]


# ------------------------------------------------------------------------------------------------ predictions
def predicted_ms(step: Step, sms: int = SMS, sm_mhz: float = SM_MHZ, tb_per_s: float = TB_PER_S) -> float:
    """What the leaderboard's work should take by the step's traits, in ms: units that overlap in part, latency of
    loads that are not prefetched, the tail of the launch, and the traffic of small kernels."""
    m, heads, n, d = step.model, *WORK.values()
    matrix = heads * n * d * 2  # bytes of Q, K, ...
    if step.part == "forward":
        work = accounting.forward_work(d, m.tiles.block_n, masked=not m.split, folded=m.exp2)
        return _kernel_ms(step, work, m.tiles, m.tiles.block_m, True, sms, sm_mhz)
    times = []
    moved = 0 if m.fuse_d else 2 * matrix  # the kernel for D reads O and dO
    for passes in ("one",) if m.one_pass else ("queries", "keys"):
        tiles, own = (m.tiles, m.tiles.block_m) if passes == "queries" else (m.key_tiles, m.key_tiles.block_n)
        block = tiles.block_n if passes == "queries" else tiles.block_m
        work = accounting.backward_work(d, block, passes, masked=not m.split, folded=m.exp2)
        times.append(_kernel_ms(step, work, tiles, own, passes == "queries", sms, sm_mhz))
    if m.one_pass:
        adds = (
            heads
            * accounting.visited_pairs(n, m.key_tiles.block_m, m.key_tiles.block_n)
            / m.key_tiles.block_n
        )
        times = [max(times[0], 4 * d * adds / (ATOMIC_TB_PER_S * 1e9))]
        moved += 2 * matrix + 2 * matrix + matrix  # fp32 sums: zeroed, read, and dQ written
    return sum(times) + moved / (tb_per_s * 1e9)


def _kernel_ms(
    step: Step, work: accounting.Work, tiles: Tiles, own: int, last_is_heavy: bool, sms: int, sm_mhz: float
) -> float:
    """One kernel, whose programs own `own` rows each and walk over the others."""
    m, heads, n, d = step.model, *WORK.values()
    resident = step.traits.resident if last_is_heavy else step.traits.key_resident or step.traits.resident
    sm = accounting.MULTIPROCESSORS[CAPABILITY]
    pairs = heads * accounting.visited_pairs(n, tiles.block_m, tiles.block_n, m.skip)
    spent = accounting.overlapped_ms(
        accounting.unit_ms(work, pairs, d, sms, sm_mhz, sm), OVERLAP[step.traits.overlap]
    )
    # an iteration of a program: two loads, then its compute; other resident programs fill the gap
    if tiles.num_stages == 1:
        steps = pairs / (tiles.block_m * tiles.block_n)
        waits = 2 * LOAD_CLOCKS * steps / (sms * sm_mhz * 1e3)
        spent = max(spent, (spent + waits) / resident)
    by_tile = [float(i + 1 if m.skip else n // own) for i in range(n // own)]  # in the order of the tiles
    if not last_is_heavy:
        by_tile.reverse()
    heavy_first = [cost for cost in sorted(by_tile, reverse=True) for _ in range(heads)]
    costs = heavy_first if m.heavy_first else by_tile * heads
    return spent * accounting.idle_factor(costs, sms * resident, fixed=m.persistent > 0)
