"""A table of chapter `leaderboard`: kernels alone, ours beside the best peers, with what models ask of attention now.

    cs336 run leaderboard -p window=1024,4096

Grouped queries, a sliding window, documents packed into one sequence, head dimensions of 192 and 256; forward and
backward, timed as in `leaderboard_shapes`. Each peer is asked for the feature in its own words: none gets repeated keys
or a stored mask. What an implementation does beforehand (FlexAttention's map of blocks, where documents begin) is not
timed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.accounting import attention_flops
from cs336_systems.chapters.leaderboard import shapes
from cs336_systems.chapters.leaderboard.shapes import METRICS, PARTS
from cs336_systems.chapters.shared import attention_peers as peers
from cs336_systems.chapters.shared import depends
from cs336_systems.measure.device import default_device
from cs336_systems.store.table import Table

DEPENDS = (
    *depends.TRITON, *depends.CALL_CLOCK, "accounting/operations.py", "chapters/leaderboard/shapes.py",
)  # fmt: skip
GROUP = (
    "part", "batch", "heads", "kv_heads", "num_tokens", "head_dim", "is_causal", "window", "documents", "dtype",
)  # fmt: skip
NO_DOCUMENTS, DOCUMENTS = "none", "100-4000"
PEERS = {  # by kind of shape; FlexAttention, which compiles for each, also at the first shape of the other kinds
    "grouped queries": ("flash_triton", "fa4", "fa3", "sdpa_cudnn"),
    "window": ("flash_triton", "fa4", "fa3", "flex_compiled"),
    "packed": ("flash_triton", "fa4", "fa3", "flex_compiled", "varlen"),
    "d 192 and 256": ("flash_triton", "fa4", "fa3", "sdpa_cudnn"),
}
KINDS = tuple(PEERS)
IMPLS = tuple(dict.fromkeys(impl for impls in PEERS.values() for impl in impls))
_SHAPES = (  # batch, heads, heads of K and V, tokens, head dimension, causal, window, documents
    (4, 32, 4, 4096, 128, True, 0, NO_DOCUMENTS),
    (16, 32, 4, 1024, 128, True, 0, NO_DOCUMENTS),
    (1, 32, 4, 32768, 128, True, 0, NO_DOCUMENTS),
    (4, 32, 8, 4096, 128, True, 0, NO_DOCUMENTS),
    (16, 32, 8, 1024, 128, True, 0, NO_DOCUMENTS),
    (1, 32, 8, 32768, 128, True, 0, NO_DOCUMENTS),
    (4, 16, 1, 2048, 64, True, 0, NO_DOCUMENTS),
    (1, 16, 16, 32768, 64, True, 1024, NO_DOCUMENTS),
    (1, 16, 16, 32768, 128, True, 1024, NO_DOCUMENTS),
    (1, 32, 8, 32768, 128, True, 4096, NO_DOCUMENTS),
    (1, 16, 16, 32768, 64, True, 0, DOCUMENTS),
    (1, 16, 16, 32768, 128, True, 0, DOCUMENTS),
    (4, 16, 16, 4096, 192, True, 0, NO_DOCUMENTS),
    (4, 16, 16, 4096, 192, False, 0, NO_DOCUMENTS),
    (32, 8, 8, 1024, 192, True, 0, NO_DOCUMENTS),
    (4, 16, 16, 4096, 256, True, 0, NO_DOCUMENTS),
    (4, 16, 16, 4096, 256, False, 0, NO_DOCUMENTS),
    (32, 8, 8, 1024, 256, True, 0, NO_DOCUMENTS),
)


@dataclass(frozen=True)
class Case:
    """One pass of `impl` (`attention_peers.MAKERS`) on `batch` × `heads` matrices (num_tokens, head_dim) of queries and
    `batch` × `kv_heads` of keys. `window`: keys that a query sees, 0 for all up to its own. `documents`: "none", or the
    shortest and the longest that are packed into one sequence ("100-4000"). `repeat` 1 measures the same thing again.
    """

    impl: str
    part: str
    batch: int
    heads: int
    kv_heads: int
    num_tokens: int
    head_dim: int
    is_causal: bool
    window: int
    documents: str
    dtype: str
    repeat: int = 0


def kind_of(case: Any) -> str:
    """What of KINDS a case's shape is."""
    grouped, window, packed, wide = KINDS
    if case.documents != NO_DOCUMENTS:
        return packed
    if case.window:
        return window
    return grouped if case.kv_heads < case.heads else wide


def grid(preset: str) -> list[Case]:
    """Every shape, or for a CPU a small one that asks for all at once."""
    if preset == "smoke":
        few, shape = ("reference", "sdpa"), (1, 4, 2, 70, 16, True, 9, "5-20", "fp32")
        return [
            case for part in PARTS for case in peers.with_pair(Case, few, part, *shape, again="reference")
        ]
    out, met = [], set()
    for shape in _SHAPES:
        kind = kind_of(Case("", "", *shape, "bf16"))
        impls = PEERS[kind] if kind in met else tuple(dict.fromkeys((*PEERS[kind], "flex_compiled")))
        met.add(kind)
        for part in PARTS:
            served = [i for i in impls if part == "forward" or i not in peers.FORWARD_ONLY]
            out += peers.with_pair(Case, served, part, *shape, "bf16")
    return out


# ------------------------------------------------------------------------------------------------ what is seen
def document_lengths(documents: str, total: int) -> tuple[int, ...]:
    """The lengths of documents that fill `total` tokens, drawn between the two of "100-4000", always alike; the last
    one is what is left. None for "none"."""
    if documents == NO_DOCUMENTS:
        return ()
    shortest, longest = (int(number) for number in documents.split("-"))
    draw, out = random.Random(total), []
    while total:
        out.append(min(draw.randint(shortest, longest), total))
        total -= out[-1]
    return tuple(out)


def seen_pairs(lengths: Sequence[int], window: int) -> int:
    """Pairs of a query and a key that it sees, in documents of these lengths: with `window` 0 keys up to its own, else
    the last `window` of them. Of n tokens the first w see all up to their own, the others w."""
    reach = ((n, min(window or n, n)) for n in lengths)
    return sum(w * (w + 1) // 2 + (n - w) * w for n, w in reach)


def flops(case: Case) -> float:
    """FLOPs of a case's matmuls, counted from the pairs that are seen. Fewer heads of keys make them no fewer."""
    lengths = document_lengths(case.documents, case.num_tokens) or (case.num_tokens,)
    pairs = seen_pairs(lengths, case.window) if case.is_causal else case.num_tokens**2
    return attention_flops(case.batch * case.heads, pairs, 1, case.head_dim, False, case.part)


# ------------------------------------------------------------------------------------------------ measuring
def run_group(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measures the cases of one pass and shape in turns."""
    case, device = cases[0], default_device()
    queries, keys = (case.heads, case.num_tokens), (case.kv_heads, case.num_tokens)
    seed = case.num_tokens + case.head_dim + case.kv_heads
    data = shapes.data_of(case, seed, (queries, keys, keys, queries), device)
    grouped, lengths = case.kv_heads < case.heads, document_lengths(case.documents, case.num_tokens)
    build = lambda impl: peers.build(
        impl, case.is_causal, device, case.num_tokens, grouped, case.window, lengths
    )
    return shapes.in_turns(cases, data, build, flops(case), device)


TABLE = Table(__name__, Case, METRICS, GROUP, grid, run_group, DEPENDS)
