"""When which weights are gathered and which gradients reduced: ahead of need, few at a time, alike on all ranks.

**Forward.** Units are expected in the order in which the last forward pass has called them (in the first one, that in
which they are defined). The gather of unit i starts when unit i - 2 is done: then it travels while unit i - 1 is
computed, and never more than two units are gathered. A unit that is called out of turn is gathered when it is called.

**Backward** goes through the calls in reverse order, as autograd does. When a call is done, its weights are freed,
those of the next call but one are gathered, and its gradients are reduced, in this order on every rank, so that ranks
may differ in what their losses depend on: when backward comes to a call, it will not come to those made after it any
more, and what is left of them, all of it perhaps, is sent then, or when backward ends. Weights that are used twice are
gathered once, for the later call, and reduced after the earlier. A checkpoint that is computed again calls its units
before their turn; they stay gathered until they are done. Frozen weights, whose gradients do not tell it, are done when
backward comes to the next call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch._C._autograd import _top_saved_tensors_default_hooks

from cs336_systems.parallel.shards import FlatWeights
from cs336_systems.parallel.units import Unit


class Schedule:
    """The gathers and reductions of a model.

    units: in the order of their definition; flats: what they gather; reshard: whether forward frees what it has used.
    """

    def __init__(self, units: list[Unit], flats: list[FlatWeights], reshard: bool) -> None:
        self.order, self._flats, self._reshard = units, flats, reshard
        self._number = {what: i for i, what in enumerate([*units, *flats])}
        # of all calls and gathers up to now: equal where ranks have made the same ones in one order
        self.trace = 0
        self._next = 0  # the position in `order` that is expected next
        self._called: list[Unit] = []  # in this forward pass
        # that a backward pass may come to, in order, and what it needs of each
        self._calls: list[tuple[Unit, list[FlatWeights]]] = []
        self.reductions: deque[FlatWeights] = deque()  # whose reductions are under way
        self.begin_backward(reduces=False)

    def _gather(self, flats: Iterable[FlatWeights]) -> None:
        for flat in flats:
            if flat.outdated:  # gathered ahead, and written to since
                self._free([flat])
            if not flat.gathered_bytes:
                self._note(flat)
                flat.gather()

    def _note(self, what: Unit | FlatWeights) -> None:
        self.trace = hash((self.trace, self._number[what])) % 2**62

    def _free(self, flats: Iterable[FlatWeights]) -> None:
        for flat in flats:
            if not flat.users:
                flat.free()

    # ------------------------------------------------------------------------------------------- forward
    def begin_forward(self) -> None:
        """Nothing is left from before: weights that were kept may have been updated since."""
        self._called, self._next = [], 0
        self._free(self._flats)

    def end_forward(self) -> None:
        """The order of this pass is expected of the next one; what was gathered for nothing goes."""
        self.order, self._called = self._called or self.order, []
        if self._reshard:
            self._free(self._flats)

    def _expected(self, begin: int, end: int) -> list[FlatWeights]:
        """Those of the units at these positions of the order."""
        return [flat for unit in self.order[begin:end] for flat in unit.flats]

    def enter(self, unit: Unit, again: bool) -> None:
        """A module is called: its weights are there for what is queued from now on. again: by backward, since a
        checkpoint has not kept what it needs of this call."""
        if again and unit in self._first_call:
            self._gather_until(self._first_call[unit])
        elif again:
            self._done.difference_update(unit.flats)
        else:
            self._note(unit)
            self._called.append(unit)
            if unit in self.order:
                if unit not in self.order[self._next :]:  # another pass has begun
                    self._next = 0
                    self._free(self._flats)
                position = self.order.index(unit, self._next)
                self._free(self._expected(self._next, position))  # those that it has left out
                self._gather(self._expected(position, position + 2))
                self._next = position + 1
        self._gather(unit.flats)
        for flat in unit.flats:
            flat.wait()
            flat.lend()

    def leave(self, unit: Unit, again: bool, differentiable: bool) -> None:
        """Its call has ended; differentiable: a backward pass may follow."""
        for flat in unit.flats:
            flat.take_back()
        if again:
            coming = unit in self._first_call  # backward is about to come to it
            self._free(f for f in unit.flats if f in self._done or not (coming or f in self._reached))
            return
        if differentiable:
            # by a checkpoint, which has hooks for what is saved, it may be called again
            again = _top_saved_tensors_default_hooks(True) is not None
            self._calls.append((unit, [flat for flat in unit.flats if flat.read_in_backward or again]))
        if self._reshard or not differentiable:
            self._free(unit.flats)
        # but not behind the back of the units that it has called
        if self._next and self.order[self._next - 1] is unit:
            self._gather(self._expected(self._next + 1, self._next + 2))

    # ------------------------------------------------------------------------------------------ backward
    def begin_backward(self, reduces: bool) -> None:
        """Plans a backward pass through all calls since the last; reduces: whether gradients are reduced on the way."""
        self._reduces = reduces
        self._gathers: list[list[FlatWeights]] = []  # for each of these calls, the last one first
        self._ends: list[list[FlatWeights]] = [[] for _ in self._calls]  # whose last call each of them is
        self._first_call: dict[Unit, int] = {}  # that backward comes to
        last_call: dict[FlatWeights, int] = {}
        planned: set[FlatWeights] = set()
        for number, (unit, needed) in enumerate(reversed(self._calls)):
            self._gathers.append([flat for flat in needed if flat not in planned])
            planned.update(needed)
            self._first_call.setdefault(unit, number)
            last_call |= dict.fromkeys(unit.flats, number)
        for flat, number in last_call.items():
            self._ends[number].append(flat)
        self._num_gathered = self._num_closed = 0  # of these calls
        self._done: set[FlatWeights] = set()
        self._reached: list[FlatWeights] = []  # those of the call that backward has come to last

    def _gather_until(self, last: int) -> None:
        for flats in self._gathers[self._num_gathered : last + 1]:
            self._gather(flats)
        self._num_gathered = max(self._num_gathered, last + 1)

    def _close(self, until: int) -> None:
        """Ends the calls before this one, and those after them that are done."""
        while (number := self._num_closed) < len(self._gathers):
            ends = self._ends[number]
            reduces = [flat for flat in ends if flat.trained]
            if number >= until and not self._done.issuperset(self._gathers[number] + reduces):
                break
            self._gather_until(number)
            if number < until:
                self._done.update(ends)
            # not before: ranks that come to one of its calls, and not to another, gather it alike
            self._free(flat for flat in ends if flat in self._done)
            self._gather_until(number + 2)
            self._num_closed += 1
            for flat in reduces if self._reduces else ():
                self.reduce(flat)

    def reach(self, unit: Unit) -> None:
        """Backward has come to a call: its weights are there for what is queued from now on."""
        # an output whose gradient comes after those of the weights needs them no more
        flats = [flat for flat in unit.flats if flat.read_in_backward and flat not in self._done]
        if (number := self._first_call.get(unit)) is not None:
            self._close(number)
            self._gather_until(number + 1)
        else:  # not a planned call, so frozen weights are not known to be done otherwise
            self._free(flat for flat in self._reached if not flat.trained and flat not in flats)
        self._reached = flats
        self._gather(flats)
        for flat in flats:
            flat.wait()

    def done(self, flat: FlatWeights) -> None:
        """Backward needs these weights no more, and their gradients are complete."""
        self._done.add(flat)
        self._free([flat])
        self._close(self._num_closed)

    def reduce(self, flat: FlatWeights) -> None:
        """Starts the reduction of what there is of their gradients."""
        if flat.gradient is not None:  # a rank that has skipped it must not wait for those that have not
            self.settle()
        flat.reduce()
        self.reductions.append(flat)

    def settle(self, left: int = 1) -> None:
        """Waits for the oldest reductions until so many are under way, one while the gradients of the next unit are
        collected, since each holds those of a unit; on a GPU the host does not wait."""
        while len(self.reductions) > left:
            self.reductions.popleft().settle()

    def end_backward(self) -> None:
        """Backward has ended: what it has not come to is sent all the same, and everything is freed."""
        self._close(len(self._gathers))
        self._calls = []
        self.begin_backward(reduces=False)
        self._free(self._flats)
        for flat in self._flats:
            flat.missing = set(flat.weights)
