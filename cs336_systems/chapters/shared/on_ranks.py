"""No table: cases that ranks measure together in one launch, and what becomes of them where that fails.

    measured("chapter.ranks:measure", cases, refuse)      # the chapter's `run_group`

    def measure(rank, cases):                             # on each rank; rank 0's metrics are the rows'
        for case in (Case(**case) for case in cases):
            begin_turn(rank, case)
            ...

`turn` of a case names what has its turn together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cs336_systems.launch.start import LaunchError, launch
from cs336_systems.measure.clocks.ranks import meet
from cs336_systems.store.status import failure_is_a_row

if TYPE_CHECKING:
    from cs336_systems.launch.group import Rank

_TURN = "turn of "  # what rank 0 prints at the beginning of each


def begin_turn(rank: Rank, case: Any) -> None:
    """Says that the case's turn begins, by its `turn`, once all ranks are there: so nobody is in another one."""
    meet(rank)
    print(f"{_TURN}{case.turn}", flush=True)


def measured(
    function: str, cases: Sequence[Any], refuse: Callable[[Any], None], *,
    read: Callable[[Sequence[Any], list[Any]], list[dict[str, Any]]] = lambda cases, by_rank: by_rank[0],
    arguments: Mapping[str, Any] | None = None, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The metrics of cases with one `world_size`: what `function` returns of them, as `launch` calls it.

    Cases for which `refuse` raises `Skip` are left out. Where a launch fails, the cases whose `turn` it was have
    failed, and the rest is launched again; where nobody's had begun, or no rank failed, all have.

    read:     makes the metrics of what each rank returned.
    options:  of `launch`.
    """
    found: list[dict[str, Any]] = [{} for _ in cases]
    for case, metrics in zip(cases, found, strict=True):
        with failure_is_a_row(metrics):
            refuse(case)
    while left := [place for place, metrics in enumerate(found) if not metrics]:
        together, turns = [cases[place] for place in left], [""]

        def log(line: str, turns: list[str] = turns) -> None:
            if _TURN in line:  # after which rank says so
                turns.append(line.partition(_TURN)[2])
            else:
                print(f"    {line}", flush=True)

        failed: dict[str, Any] = {}
        with failure_is_a_row(failed):
            told = {"cases": [dataclasses.asdict(case) for case in together], **(arguments or {})}
            try:
                by_rank = launch(function, together[0].world_size, told, log=log, **options)
            except LaunchError as error:
                if error.rank is None:  # the run as a whole has failed: it took too long
                    turns.append("")
                raise
            turns.append("")  # what fails from here on is nobody's
            for place, metrics in zip(left, read(together, by_rank), strict=True):
                found[place] = metrics
            break
        culprits = [place for place in left if getattr(cases[place], "turn", "") == turns[-1]]
        for place in culprits or left:
            found[place] = dict(failed)
    return found
