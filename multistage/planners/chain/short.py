"""Chains of a few stages with a slow tier: a search over every schedule of a simple kind.

The joint planner knows plans that read a thing once, in the reverse sweep, and write in the
forward sweep.  Where the chain is short, other plans may be a tenth faster: a state that was
made again is written, or is evicted after the turn and read between two operations.

Here every schedule is searched, nested or not, whose transfers and evictions begin between
two operations, with at most one transfer under way in each direction; what executors do not
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
from typing import NamedTuple

from ...actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)
from ...model.tier import Tier
from .sizes import Sizes

MAX_STAGES = 4  # the loss not counted
MOST_STATES = 10_000
# Of the seconds of all forward steps: times that differ by less are the same.
_SAME = 1e-9

_Thing = tuple[bool, int]  # whether it is a tape, and its step
_Move = tuple[str, int, bool]


class _Held(NamedTuple):
    """What is held where; sets have bit i for state i, or for the tape of stage i."""

    adjoint: int  # the next adjoint is of stage adjoint - 1
    states: int = 0
    tapes: int = 0
    pins: int = 0  # states outside of a tape that a tape starts from
    far_states: int = 0
    far_tapes: int = 0
    own_states: int = 0  # whose write is from the copy in fast memory, and not awaited
    own_tapes: int = 0
    late: int = 0  # tapes made after the turn: they and the states they start from stay
    front: int = 0  # the next stage of the forward sweep
    writing: _Thing | None = None
    write_s: float = 0.0
    reading: _Thing | None = None
    read_s: float = 0.0

    def at_hand(self, state: int) -> bool:
        return not state or bool((self.states | self.pins | self.tapes << 1) >> state & 1)

    def anywhere(self, state: int) -> bool:
        far = self.far_states | self.far_tapes << 1
        return self.at_hand(state) or bool(far >> state & 1)


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
    start = _Held(len(true))
    best = {start: 0.0}
    came: dict[_Held, tuple[_Held, _Move]] = {}
    count = itertools.count()
    heap = [(search.needed(start), 0.0, next(count), start)]
    while heap and most:
        _, minus, _, held = heapq.heappop(heap)
        if -minus > best[held]:
            continue
        if not held.adjoint and held.writing is None:
            return tuple(_actions(search, start, held, came))
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

    def bytes_of(self, thing: _Thing) -> int:
        tape, step = thing
        return (self.tape if tape else self.state)[step]

    def resident(self, held: _Held) -> int:
        total = self.gradient[held.adjoint]
        for i in range(self.n):
            total += self.tape[i] if held.tapes >> i & 1 else 0
            total += self.state[i] if (held.states | held.pins) >> i & 1 else 0
        return total + (self.bytes_of(held.reading) if held.reading else 0)

    def needed(self, held: _Held) -> float:
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

    def moves(self, held: _Held) -> Iterator[tuple[float, _Move, _Held]]:
        """Yield seconds, a move and what is held after it."""
        free = self.limit - self.resident(held)
        yield from self._operations(held, free)
        for move, after in itertools.chain(self._transfers(held, free), self._evictions(held)):
            yield 0.0, move, self._tidy(after)
        left = [
            s for thing, s in ((held.writing, held.write_s), (held.reading, held.read_s)) if thing
        ]
        if left:
            yield min(left), ("wait", 0, False), self._later(held, min(left))

    def _operations(self, held: _Held, free: int) -> Iterator[tuple[float, _Move, _Held]]:
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

    def _done(self, held: _Held, seconds: float, move: _Move) -> tuple[float, _Move, _Held]:
        return seconds, move, self._later(held, seconds)

    def _later(self, held: _Held, seconds: float) -> _Held:
        """Return what is held when so much time has passed."""
        writing, reading = held.writing, held.reading
        if writing is not None:
            held = held._replace(write_s=held.write_s - seconds)
            if held.write_s <= self.same_s:
                held = _with(held, writing, "far_")._replace(writing=None, write_s=0.0)
        if reading is not None:
            held = held._replace(read_s=held.read_s - seconds)
            if held.read_s <= self.same_s:
                held = _with(held, reading, "")._replace(reading=None, read_s=0.0)
        return self._tidy(held)

    def _tidy(self, held: _Held) -> _Held:
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

    def _transfers(self, held: _Held, free: int) -> Iterator[tuple[_Move, _Held]]:
        rates = self.rates
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
                    after = _with(held, thing, "own_")
                    yield ("put", i, tape), after._replace(writing=thing, write_s=seconds)
            if not tape and held.at_hand(i):
                continue
            idle = not held.reading and (alone or not held.writing)
            if far and not here and idle and size <= free:
                seconds = max(self.same_s / 2, rates.reading_s(size))
                yield ("get", i, tape), held._replace(reading=thing, read_s=seconds)

    def _in_tier(self, held: _Held) -> int:
        far = range(self.n)
        tapes = sum(self.tape[i] for i in far if held.far_tapes >> i & 1)
        return tapes + sum(self.state[i] for i in far if held.far_states >> i & 1)

    def _evictions(self, held: _Held) -> Iterator[tuple[_Move, _Held]]:
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
    def _of_use(held: _Held, state: int) -> bool:
        """Whether a tape that starts from a state still finds it somewhere."""
        tapes = held.tapes | held.far_tapes
        return not tapes >> state & 1 or held.anywhere(state)


def _with(held: _Held, thing: _Thing, where: str) -> _Held:
    tape, i = thing
    if tape:
        name = f"{where}tapes"
    else:
        name = f"{where}states"
    return held._replace(**{name: getattr(held, name) | 1 << i})


class _Writer:
    """Writes down the actions of a path of the search."""

    def __init__(self, n: int) -> None:
        self.n, self.actions, self.live, self.ended = n, list[Action](), 0, False
        self.tokens = 0
        self.own: dict[_Thing, int] = {}  # tokens of writes not awaited
        self.tier: set[_Thing] = set()
        self.read: int | None = None

    def _load(self, state: int) -> None:
        if self.live != state:
            self.actions.append(Load(state))
            self.live = state

    def _token(self) -> int:
        self.tokens += 1
        return self.tokens - 1

    def _leave(self, state: int) -> None:
        """Let the live state be another than this."""
        if self.live == state:
            self._load(0)

    def _drop_state(self, state: int) -> None:
        self._leave(state)
        own = self.own.pop((False, state), None)
        self.actions.append(Free(state) if own is None else Evict(state))

    def write(self, move: _Move, held: _Held, after: _Held) -> None:
        """Write down a move from what is held to what is held then."""
        what, i, tape = move
        gone = held.states & ~after.states
        match what:
            case "run":
                self._load(i)
                self.actions += [Advance(i, i + 1), Save(i + 1)]
                self.live = i + 1
            case "tape":
                self._load(i)
                self.actions.append(Tape(i))
                self.live = i + 1
                if i == self.n - 1 and not self.ended:
                    self.actions.append(EndForward())
                    self.ended = True
            case "reverse":
                self._reverse(i)
            case "put":
                self.actions.append(Put(i, tape=tape))
                self.own[tape, i] = self._token()
                self.tier.add((tape, i))
            case "get":
                self.actions.append(Get(i, tape=tape))
                self.read = self._token()
            case "keep" | "evict" if tape:
                if what == "keep":
                    self._save_from(i)
                else:
                    self._leave(i + 1)
                self.actions.append(Evict(i, tape=True))
                del self.own[True, i]
        if held.reading is not None and after.reading is None:
            assert self.read is not None
            self.actions.append(Await(self.read))
        for state in range(self.n):
            if gone >> state & 1:
                self._drop_state(state)
        self._drop_copies(after)

    def _save_from(self, i: int) -> None:
        """Save the state in the tape of stage i: in the forward sweep, where it was made."""
        if self.ended:
            self._load(i + 1)
            self.actions.append(Save(i + 1))
            return
        self.actions.insert(self.actions.index(Tape(i)) + 1, Save(i + 1))

    def _reverse(self, i: int) -> None:
        if (own := self.own.pop((True, i), None)) is not None:
            self.actions.append(Await(own))
        self.actions.append(Reverse(i))
        if self.live == i + 1:
            self.live = -1

    def _drop_copies(self, after: _Held) -> None:
        """Drop from the tier what nothing will need."""
        for tape, i in sorted(self.tier):
            far = after.far_tapes if tape else after.far_states
            if far >> i & 1 or (tape, i) in (after.writing, after.reading):
                continue
            if (own := self.own.pop((tape, i), None)) is not None:
                self.actions.append(Await(own))
            self.actions.append(Drop(i, tape=tape))
            self.tier.remove((tape, i))


def _actions(
    search: _Search, start: _Held, goal: _Held, came: dict[_Held, tuple[_Held, _Move]]
) -> list[Action]:
    path: list[tuple[_Held, _Move, _Held]] = []
    at = goal
    while at != start:
        before, move = came[at]
        path.append((before, move, at))
        at = before
    writer = _Writer(search.n)
    for before, move, after in reversed(path):
        writer.write(move, before, after)
    return writer.actions
