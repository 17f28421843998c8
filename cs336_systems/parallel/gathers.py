"""When which weights are gathered: ahead of their use, in the same order on all ranks, few at a time.

**Forward.** Units are expected in the order in which the last forward pass has called them (in the first one, that in
which they are defined). The gather of unit i starts when unit i - 2 is done: then it travels while unit i - 1 is
computed, and never more than two units are gathered. A unit that is called out of turn is gathered when it is called.

**Backward.** The weights are needed in the reverse order, and that is when they are gathered again, whatever this
rank's backward pass reaches: on the way to a unit, those before it are gathered too, and at the end those that are
left. So ranks whose losses depend on different parts of the model wait for one another nowhere. Weights that are used
twice are gathered once, for the later use, and stay until the gradient of the earlier one is there. A checkpoint that
is computed again calls its units in the middle of the backward pass; they stay gathered until they are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from cs336_systems.parallel.shards import FlatWeights


class Unit:
    """A module at whose call weights are gathered; `flats`: these weights, mostly one vector. name: in the model."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[FlatWeights]) -> None:
        self.name, self.module, self.flats = name, module, list(flats)


class Gathers:
    """The gathers of a model. units: in the order of their definition; reshard: whether forward frees what it used."""

    def __init__(self, units: Iterable[Unit], reshard: bool) -> None:
        self.order = list(units)
        self._reshard = reshard
        self._flats = list(dict.fromkeys(flat for unit in self.order for flat in unit.flats))
        self._next = 0  # the position in `order` that is expected next
        self._called: list[Unit] | None = None  # in this forward pass, if it is one of the whole model
        # with gradients, since the last backward pass has ended; by their first use, and by their last
        self._first_used: dict[Unit, None] = {}
        self._last_used: dict[Unit, None] = {}
        self._plan()

    def _free(self, flats: Iterable[FlatWeights]) -> None:
        for flat in flats:
            if not flat.users:
                flat.free()

    # ------------------------------------------------------------------------------------------- forward
    def begin_forward(self) -> None:
        """Nothing is left from before: weights that were kept may have been updated since."""
        self._called = []
        self._start_over()

    def _start_over(self) -> None:
        self._next = 0
        self._free(self._flats)

    def end_forward(self) -> None:
        """The order of this pass is expected of the next one; what was gathered for nothing goes."""
        if self._called:
            self.order = self._called
        self._called = None
        if self._reshard:
            self._free(self._flats)

    def enter(self, unit: Unit) -> None:
        """A module is called: its weights are there for what is queued from now on."""
        position = self._position(unit)
        if position is None:
            self._gather(unit.flats)
        else:
            self._free(flat for skipped in self.order[self._next : position] for flat in skipped.flats)
            for expected in self.order[position : position + 2]:
                self._gather(expected.flats)
            self._next = position + 1
        if self._called is not None:
            self._called.append(unit)
        self._lend(unit)

    def _position(self, unit: Unit) -> int | None:
        """Where in the expected order it is: from the next one on, or, in another pass, from the first."""
        for begin in (self._next, 0):
            if unit in self.order[begin:]:
                if not begin and self._next:
                    self._start_over()
                return self.order.index(unit, begin)
        return None

    def leave(self, unit: Unit, differentiable: bool) -> None:
        """Its call has ended; differentiable: a backward pass may follow."""
        self._take_back(unit)
        if differentiable:
            self._first_used[unit] = None
            self._last_used.pop(unit, None)
            self._last_used[unit] = None
        if self._reshard or not differentiable:
            self._free(unit.flats)
        # but not behind the back of the units that it has called
        if self._next and self.order[self._next - 1] is unit:
            for expected in self.order[self._next + 1 : self._next + 2]:
                self._gather(expected.flats)

    def _gather(self, flats: Iterable[FlatWeights]) -> None:
        for flat in flats:
            flat.gather()

    def _lend(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.wait()
            flat.users += 1
            if flat.users == 1:
                flat.show_full(True)

    def _take_back(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.users -= 1
            if not flat.users:
                flat.show_full(False)

    # ------------------------------------------------------------------------------------------ backward
    def begin_backward(self) -> list[FlatWeights]:
        """Plans the gathers of a backward pass; the order in which its gradients are expected to be complete."""
        self._plan()
        first_uses = dict.fromkeys(flat for unit in self._first_used for flat in unit.flats)
        return list(reversed(first_uses))

    def _plan(self) -> None:
        self._stages: list[list[FlatWeights]] = []
        self._stage_of: dict[FlatWeights, int] = {}
        for unit in reversed(self._last_used):
            stage = [flat for flat in unit.flats if flat.read_in_backward and flat not in self._stage_of]
            if stage:
                self._stage_of |= dict.fromkeys(stage, len(self._stages))
                self._stages.append(stage)
        self._issued = 0
        self._held: set[FlatWeights] = set()  # gathered for backward, and not done

    def _issue(self, last: int) -> None:
        """Starts the gathers of all stages up to this one that have not been started."""
        for stage in self._stages[self._issued : last + 1]:
            self._gather(stage)
            self._held.update(stage)
        self._issued = max(self._issued, min(last + 1, len(self._stages)))

    def _need(self, flats: Sequence[FlatWeights], ahead: int) -> None:
        stages = [self._stage_of[flat] for flat in flats if flat in self._stage_of]
        if stages:
            self._issue(max(stages) + ahead)
        self._gather(flats)

    def reach(self, unit: Unit) -> None:
        """Backward is about to go through a unit: its weights are there for what is queued from now on."""
        flats = [flat for flat in unit.flats if flat.read_in_backward]
        self._need(flats, ahead=1)
        self._held.update(flats)
        for flat in flats:
            flat.wait()

    def enter_again(self, unit: Unit) -> None:
        """Backward calls a module, whose forward pass a checkpoint has not kept."""
        self._need(unit.flats, ahead=0)
        self._lend(unit)

    def leave_again(self, unit: Unit) -> None:
        """That call has ended."""
        self._take_back(unit)
        self._free(flat for flat in unit.flats if flat not in self._held)

    def done(self, flat: FlatWeights) -> None:
        """Backward needs these weights no more: they are freed, and the next but one are gathered."""
        self._held.discard(flat)
        self._free([flat])
        stage = self._stage_of.get(flat)
        if stage is not None and not any(other in self._held for other in self._stages[stage]):
            self._issue(stage + 2)

    def end_backward(self) -> None:
        """Backward has ended, or there was none: gathers what other ranks may have gathered, and frees everything."""
        if not self._stages:
            self.begin_backward()
        for stage in self._stages[self._issued :]:
            self._gather(stage)
            self._free(stage)
        self._first_used.clear()
        self._last_used.clear()
        self._plan()
        self._free(self._flats)
        for flat in self._flats:
            flat.pending = 0
            flat.missing = set(flat.weights)
