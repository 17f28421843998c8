"""Which rank updates which parameter of a sharded optimizer, and when: owners and rounds. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence


def assign(sizes: Sequence[int], loads: list[list[int]]) -> list[tuple[int, int]]:
    """The (rank, round) of each parameter of `sizes` bytes, given what ranks and rounds hold already.

    loads: `loads[rank][round]`, bytes; it grows by what is assigned. The largest parameter comes first (of equal ones
    the earlier), and goes to the rank that holds least (of equal ones the lowest). So no two ranks ever differ by more
    than the largest parameter, and what was assigned before stays where it is.

    A rank cuts what it is given first into rounds in the order of `sizes`: what a forward pass reads first is updated
    and sent first. What comes later goes, the largest first, to the round that holds least. Two rounds of a rank differ
    by less than twice its largest parameter.
    Source: Graham, "Bounds on multiprocessing timing anomalies" (SIAM J. Appl. Math. 17, 1969): given at once, the
    fullest rank holds at most 4/3 of what the best assignment gives its fullest.
    """
    held = [sum(rounds) for rounds in loads]
    shares: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = min(range(len(held)), key=lambda r: held[r])
        held[rank] += sizes[index]
        shares[rank].append(index)
    homes = [(0, 0)] * len(sizes)
    for rank, (share, rounds) in enumerate(zip(shares, loads, strict=True)):
        first, total, before = not any(rounds), sum(sizes[i] for i in share), 0
        for index in sorted(share) if first else share:
            # in order: the round in which the parameter's middle lies
            middle = min(len(rounds) * (2 * before + sizes[index]) // max(2 * total, 1), len(rounds) - 1)
            round_ = middle if first else min(range(len(rounds)), key=lambda k, rounds=rounds: rounds[k])
            rounds[round_] += sizes[index]
            before += sizes[index]
            homes[index] = (rank, round_)
    return homes
