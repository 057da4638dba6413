"""Chains of a few stages with a slow tier: a search over every schedule of a simple kind.

The joint planner knows plans that read a thing once, in the reverse sweep, and write in the
forward sweep.  Where the chain is short, other plans may be a tenth faster: a state that was
made again is written, or is evicted after the turn and read between two operations.

Here every schedule is searched, nested or not, whose transfers and evictions begin between
two operations, with at most one transfer in flight in each direction; what executors do not
do is left out: a tape made in the reverse sweep, and the state it starts from, stay until
its adjoint.  A* over what is held
where; the estimate counts the adjoints and the forward runs of stages without a tape.  The
number of states is bounded: a search that needs more finds nothing.  Plans are judged by the
simulator, as all are.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from ...actions import Action
from ...model.tier import Tier
from .short_actions import actions_of_path
from .short_held import Held, Move, Thing, with_thing
from .sizes import Sizes

MAX_STAGES = 4  # the loss not counted
MOST_STATES = 10_000
# Of the seconds of all forward steps: times that differ by less are the same.
_SAME = 1e-9


def search_short(
    true: Sizes, limit: int, rates: Tier, upper_s: float, *, most: int = MOST_STATES
) -> tuple[Action, ...] | None:
    """Return the actions of the fastest schedule, None if none below `upper_s` is found.

    Parameters
    ----------
    true : Sizes
        In bytes, with the loss.
    limit : int
        Bytes, the chain's input not counted.
    most : int
        States of the search.
    """
    search = _Search(true, limit, rates)
    start = Held(len(true))
    best = {start: 0.0}
    came: dict[Held, tuple[Held, Move]] = {}
    count = itertools.count()
    heap = [(search.needed(start), 0.0, next(count), start)]
    while heap and most:
        _, minus, _, held = heapq.heappop(heap)
        if -minus > best[held]:
            continue
        if not held.adjoint and held.writing is None:
            return tuple(actions_of_path(search.n, start, held, came))
        most -= 1
        for took, move, after in search.moves(held):
            seconds = took - minus
            if seconds >= best.get(after, math.inf) - search.same_s:
                continue
            estimate = seconds + search.needed(after)
            if estimate >= upper_s - search.same_s:
                continue
            best[after], came[after] = seconds, (held, move)
            heapq.heappush(heap, (estimate, -seconds, next(count), after))
    return None


class _Search:
    def __init__(self, true: Sizes, limit: int, rates: Tier) -> None:
        self.n, self.limit, self.rates = len(true), limit, rates
        self.state, self.gradient, self.tape = (
            [int(x) for x in sizes] for sizes in (true.state, true.gradient, true.tape)
        )
        self.state[0] = 0  # the caller's
        self.advance, self.taping, self.reverse = (
            [int(x) for x in sizes] for sizes in (true.advance, true.taping, true.reverse)
        )
        self.forward_s, self.reverse_s, self.spared_s = (
            [float(x) for x in times] for times in (true.forward_s, true.reverse_s, true.spared_s)
        )
        self.same_s = _SAME * sum(self.forward_s)

    def bytes_of(self, thing: Thing) -> int:
        tape, step = thing
        return (self.tape if tape else self.state)[step]

    def resident(self, held: Held) -> int:
        total = self.gradient[held.adjoint]
        for i in range(self.n):
            total += self.tape[i] if held.tapes >> i & 1 else 0
            total += self.state[i] if (held.states | held.pins) >> i & 1 else 0
        return total + (self.bytes_of(held.reading) if held.reading else 0)

    def needed(self, held: Held) -> float:
        """Return seconds that are needed at least."""
        tapes = held.tapes | held.far_tapes
        for thing in (held.writing, held.reading):
            if thing is not None and thing[0]:
                tapes |= 1 << thing[1]
        seconds = sum(self.reverse_s[: held.adjoint])
        for i in range(held.adjoint):
            if not tapes >> i & 1:
                seconds += max(0.0, self.forward_s[i] - self.spared_s[i])
        return seconds

    def moves(self, held: Held) -> Iterator[tuple[float, Move, Held]]:
        """Yield seconds, a move and what is held after it."""
        free = self.limit - self.resident(held)
        yield from self._operations(held, free)
        for seconds, move, after in self._transfers(held, free):
            yield seconds, move, self._tidy(after)
        for move, after in self._evictions(held):
            yield 0.0, move, self._tidy(after)
        left = [
            s for thing, s in ((held.writing, held.write_s), (held.reading, held.read_s)) if thing
        ]
        if left:
            yield min(left), ("wait", 0, False), self._later(held, min(left))

    def _operations(self, held: Held, free: int) -> Iterator[tuple[float, Move, Held]]:
        last, ended = held.adjoint - 1, held.front == self.n
        front = held.front + (not ended)
        for i in range(held.adjoint) if ended else (held.front,):
            made_on = (held.tapes | held.far_tapes) >> (i + 1) & 1
            if made_on or held.tapes >> i & 1 or not held.at_hand(i):
                continue  # a state that a tape starts from is not made again
            out = 1 << (i + 1)
            wanted = i < last and not held.at_hand(i + 1) and held.reading != (False, i + 1)
            if wanted and self.state[i + 1] + self.advance[i] <= free:
                after = held._replace(states=held.states | out, front=front)
                yield self._done(after, self.forward_s[i], ("run", i, False))
            if held.reading != (True, i) and self.tape[i] + self.taping[i] <= free:
                apart = i and not held.tapes >> (i - 1) & 1
                after = held._replace(
                    tapes=held.tapes | 1 << i,
                    pins=held.pins | (1 << i if apart else 0),
                    late=held.late | (1 << i if ended else 0),
                    front=front,
                )
                seconds = self.forward_s[i] - (self.spared_s[i] if i == last else 0.0)
                yield self._done(after, seconds, ("tape", i, False))
        if ended and last >= 0 and held.tapes >> last & 1 and held.at_hand(last):
            more = self.gradient[last] + self.reverse[last]
            if held.writing != (True, last) and more <= free:
                after = held._replace(adjoint=last, tapes=held.tapes & ~(1 << last))
                yield self._done(after, self.reverse_s[last], ("reverse", last, False))

    def _done(self, held: Held, seconds: float, move: Move) -> tuple[float, Move, Held]:
        return seconds, move, self._later(held, seconds)

    def _later(self, held: Held, seconds: float) -> Held:
        """Return what is held when so much time has passed."""
        writing, reading = held.writing, held.reading
        if writing is not None:
            held = held._replace(write_s=held.write_s - seconds)
            if held.write_s <= self.same_s:
                held = with_thing(held, writing, "far_")._replace(writing=None, write_s=0.0)
        if reading is not None:
            held = held._replace(read_s=held.read_s - seconds)
            if held.read_s <= self.same_s:
                held = with_thing(held, reading, "")._replace(reading=None, read_s=0.0)
        return self._tidy(held)

    def _tidy(self, held: Held) -> Held:
        """Return what is held without what nothing will need."""
        states = (1 << held.adjoint) - 2 if held.adjoint else 0  # state i is of use to stage i
        tapes = (1 << held.adjoint) - 1
        written = 0
        if held.writing is not None and not held.writing[0]:
            written = 1 << held.writing[1]
        pins = held.pins & held.tapes
        inside = held.tapes << 1 & ~pins
        return held._replace(
            states=held.states & (states & ~inside | written),
            pins=pins,
            own_states=held.own_states & (states & ~inside | written),
            own_tapes=held.own_tapes & held.tapes,
            late=held.late & held.tapes,
            far_states=held.far_states & states,
            far_tapes=held.far_tapes & tapes,
        )

    def _transfers(self, held: Held, free: int) -> Iterator[tuple[float, Move, Held]]:
        rates = self.rates
        write_s, read_s = rates.write_overhead_s, rates.read_overhead_s  # of the computing thread
        capacity = math.inf if rates.capacity_bytes is None else rates.capacity_bytes
        alone = not rates.shared
        for i, tape in itertools.product(range(held.adjoint), (False, True)):
            thing, size = (tape, i), self.bytes_of((tape, i))
            here = (held.tapes if tape else held.states) >> i & 1
            far = (held.far_tapes if tape else held.far_states) >> i & 1
            if here and not far and not held.writing and (alone or not held.reading):
                if tape:
                    may = rates.tapes and i < self.n - 1 and not held.late >> i & 1
                else:
                    may = i > 0
                if may and self._in_tier(held) + size <= capacity:
                    seconds = max(self.same_s / 2, rates.writing_s(size))
                    after = with_thing(self._later(held, write_s), thing, "own_")
                    after = after._replace(writing=thing, write_s=seconds)
                    yield write_s, ("put", i, tape), after
            if not tape and held.at_hand(i):
                continue
            idle = not held.reading and (alone or not held.writing)
            if far and not here and idle and size <= free:
                seconds = max(self.same_s / 2, rates.reading_s(size))
                after = self._later(held, read_s)._replace(reading=thing, read_s=seconds)
                yield read_s, ("get", i, tape), after

    def _in_tier(self, held: Held) -> int:
        far = range(self.n)
        tapes = sum(self.tape[i] for i in far if held.far_tapes >> i & 1)
        return tapes + sum(self.state[i] for i in far if held.far_states >> i & 1)

    def _evictions(self, held: Held) -> Iterator[tuple[Move, Held]]:
        # The live state stays for the next stage of the forward sweep.
        live = held.front if held.front < self.n else -1
        for i in range(self.n):
            bit = 1 << i
            if held.own_tapes & held.far_tapes & bit and not held.late & bit << 1:
                after = held._replace(
                    tapes=held.tapes & ~bit,
                    own_tapes=held.own_tapes & ~bit,
                    pins=held.pins & ~bit,
                )
                yield ("keep", i, True), after._replace(states=after.states | bit << 1)
                if i + 1 != live and self._of_use(after, i + 1):
                    yield ("evict", i, True), after
            if not held.states & bit or held.writing == (False, i) or i == live:
                continue
            after = held._replace(states=held.states & ~bit, own_states=held.own_states & ~bit)
            if held.own_states & bit and not held.pins & held.late & bit:
                yield ("evict", i, False), after._replace(pins=held.pins & ~bit)
            elif not held.pins & bit and self._of_use(after, i):
                yield ("free", i, False), after

    @staticmethod
    def _of_use(held: Held, state: int) -> bool:
        """Whether a tape that starts from a state still finds it somewhere."""
        tapes = held.tapes | held.far_tapes
        return not tapes >> state & 1 or held.anywhere(state)
