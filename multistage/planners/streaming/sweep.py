"""The streaming schedule: one forward sweep that offers states, one reverse sweep that reads them.

Two forward sweeps share one reverse sweep:

ring
    Every state goes into a fast slot and states are offered to the tier as
    its channel idles.  When a slot is needed, a state already written goes
    first, then the oldest unwritten one.  The last s*rho/(rho-1) states so
    survive in one place or the other.  Needs no knowledge of n.
tail
    States are offered at the positions floor(k g) before `tail_start`; the
    steps from there on are reversed by Revolve from the fast slots.  With a
    backlog the last of them lie closer than the tier writes: idle slots hold
    what it has not taken yet, and it catches up while the tail runs forward.

The reverse sweep walks down from state n-1.  Its next anchor is the highest
state at hand, in a slot or in the tier; the interval above the anchor is
reversed by Revolve with the slots that are left, and reads of the anchors
below are queued as early as slots allow.  Where an interval needs all slots
for itself (g > s), one slot is given up for the next read at the moment that
costs least, and where that pays, the anchor leaves its own slot to the upper
part and is read again for the lower one (`reserve`).

Nothing here looks at a clock.  What a transfer's fate decides comes back as
an answer: a refused offer is tried again one step later, a lost checkpoint
drops out of the list, so that its interval merges with the one before.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from ...actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from ...support.step_sets import StepSet
from ..single.binomial import reverse_actions
from .reserve import Reservation


@dataclass(frozen=True, slots=True)
class Sweep:
    """What fixes a streaming schedule.

    Attributes
    ----------
    slots : int
        Fast slots, staging and landing slots included.
    spacing : float
        g: steps between two offers, at least.
    end_start : int or None
        From here on states are offered at `end_spacing` instead.  In a ring
        they are those kept to the end: no recomputation hides the reads of
        those among them that the ring gives up.  Before a tail they are those
        that may be written while it runs.
    end_spacing : float
    backlog : int
        Tail only: most states kept in slots of their own until the tier takes them.
    tail_start : int or None
        Steps from here on are reversed from fast slots; None for the ring.
    keep_from : int
        Ring only: states before this one are offered but never kept, being
        evicted before the end anyway.  0 where n is unknown.
    depth : int
        Most reads under way or landed ahead of their use.
    queue_depth : int
        The tier's q; an accepted offer proves all but the last q writes done.
    drain_steps : int
        Adjoint steps after which writes left under way are surely done.
    reservation : Reservation or None
        When to give up a slot for the next read; None gives it up at once.
    extra : frozenset of int
        Positions offered besides the regular ones.
    skip : frozenset of int
        Regular positions not offered.
    """

    slots: int
    spacing: float
    tail_start: int | None
    depth: int = 4
    queue_depth: int = 2
    drain_steps: int = 0
    reservation: Reservation | None = None
    keep_from: int = 0
    end_start: int | None = None
    end_spacing: float = 1.0
    backlog: int = 0
    extra: frozenset[int] = frozenset()
    skip: frozenset[int] = frozenset()

    def schedule(
        self, n_steps: int | None, is_last: Callable[[int], bool] | None = None
    ) -> Schedule:
        """Return a fresh schedule of `n_steps` steps.

        With `n_steps` None (ring only), `is_last(i)` is asked when state i is
        live whether it is the last.
        """
        return SweepRun(self, n_steps, is_last).schedule()


class SweepRun:
    """One schedule being made: what is held where."""

    def __init__(self, sweep: Sweep, n_steps: int | None, is_last: Callable[[int], bool] | None):
        self.sweep = sweep
        self.n = n_steps
        self.is_last = is_last
        self.start, self.first = 0, 0.0  # where the forward sweep starts, and the offers
        self.end = 0  # where the reverse sweep starts
        self.used = 0
        self.staged = 0  # of the used slots, those that only feed a write
        self.held: list[int] = []  # steps in fast slots, ascending
        self.written: deque[int] = deque()  # held, and known to be in the tier
        self.writing: deque[tuple[int, int, bool]] = deque()  # token, step, staged
        self.pinned: set[int] = set()  # held steps whose write was not awaited
        self.queued: deque[int] = deque()  # in slots until the tier takes them, ascending
        self.parked: set[int] = set()  # queued ones it took: staged in the slots they had
        self.stored = StepSet()  # steps in the tier
        self.readable = array("q")  # steps in the tier and in no slot, ascending
        self.pending: deque[tuple[int, int]] = deque()  # step, token of reads, descending
        self.leftover: deque[tuple[int, int]] = deque()  # used up but pinned: step, adjoint then
        self.ended = False
        self.depth = sweep.depth

    def schedule(self) -> Schedule:
        """Yield the actions of the sweep."""
        if self.n == 1:
            yield Tape(0)
            yield EndForward()
            yield Reverse(0)
            return
        if self.sweep.tail_start is None:
            yield from self._ring_forward()
        else:
            yield from self._tail_forward(self.sweep.tail_start)
            self.end = self.sweep.tail_start
        yield from self._reverse_all()

    def _reverse_all(self) -> Schedule:
        yield from self._reverse_sweep()
        while self.leftover:
            yield from self._clear_leftover()
        while self.writing:
            yield from self._settle()
        for step in self.stored:
            yield Drop(step)

    # ---------------------------------------------------------- forward sweeps

    def _offer(self, step: int, held: bool) -> Schedule:
        """Offer live state `step`; record the write if it is taken."""
        token = yield Offer(step)
        if token is None:
            return
        self.writing.append((int(token), step, not held))
        self.stored.add(step)
        if held:
            self.pinned.add(step)
        else:
            if self.queued and self.queued[0] == step:
                self.parked.add(self.queued.popleft())
            else:
                self.used += 1
            self.staged += 1
            self.readable.append(step)
        # Transfers are first in, first out, and this one was accepted because
        # fewer than q were waiting: all but the last q are done.
        while len(self.writing) > self.sweep.queue_depth:
            yield from self._settle()

    def _settle(self) -> Schedule:
        """Await the oldest write."""
        token, step, staged = self.writing.popleft()
        if (yield Await(token)) is False:
            self.stored.discard(step)
            if staged and step in self.readable:
                self.readable.remove(step)
        elif not staged:
            self.written.append(step)
        if staged:
            if step in self.parked:
                self.parked.remove(step)
                yield Free(step)
            self.used -= 1
            self.staged -= 1
        else:
            self.pinned.remove(step)

    def _send_queued(self) -> Schedule:
        """Offer what is queued, the oldest first, until the tier refuses."""
        left = -1
        while self.queued and len(self.queued) != left:
            left = len(self.queued)
            yield from self._offer(self.queued[0], held=False)

    def _hold(self, step: int) -> None:
        """Keep a parked state where it is: what needs it comes before its write is over."""
        self.parked.remove(step)
        self.readable.remove(step)
        self.staged -= 1
        insort(self.held, step)  # the next anchor may be held already, and this one not
        self.pinned.add(step)
        self.writing = deque(
            (token, each, staged and each != step) for token, each, staged in self.writing
        )

    def _queue(self, step: int) -> Schedule:
        """Keep live state `step` until the tier takes it, if slots allow."""
        if len(self.queued) < self.sweep.backlog and self.used < self.sweep.slots:
            yield Save(step)
            self.used += 1
            self.queued.append(step)

    def _ring_forward(self) -> Schedule:
        sweep, n, is_last = self.sweep, self.n, self.is_last
        extra, skip, spacing, slots = sweep.extra, sweep.skip, sweep.spacing, sweep.slots
        held, stored = self.held, self.stored
        i, at = yield from self._offer_until(min(sweep.keep_from, (n or 1) - 1))
        end_start = n if sweep.end_start is None else sweep.end_start
        while n is None or i < n - 1:
            if i == end_start:
                spacing = sweep.end_spacing
            while self.used >= slots:
                # A written state goes first, the oldest.
                if self.written:
                    gone = self.written.popleft()
                    self.readable.append(gone)
                elif self.staged and not held:
                    yield from self._settle()
                    continue
                else:
                    gone = yield from self._oldest_unwritten()
                held.remove(gone)
                self.used -= 1
                yield Free(gone)
            yield Save(i)
            self.used += 1
            held.append(i)
            if i >= int(at) or i in extra:
                if i not in skip:
                    yield from self._offer(i, held=True)
                if i in skip or i in stored:
                    at = max(at + spacing, i + spacing - 1)
            yield Advance(i, i + 1)
            i += 1
            if is_last is not None and is_last(i):
                yield EndForward()
                self.ended = True
                self.end = i
                return
        yield from self._first_reverse(i)
        self.end = i

    def _oldest_unwritten(self) -> Generator[Action, Answer, int]:
        """Choose the oldest state without a write; where all are being written, await one."""
        while len(self.pinned) == len(self.held):
            yield from self._settle()
        if self.written:
            gone = self.written.popleft()
            self.readable.append(gone)
            return gone
        return next(step for step in self.held if step not in self.pinned)

    def _tail_forward(self, tail_start: int) -> Schedule:
        yield from self._offer_until(tail_start)
        yield from self._tail(tail_start)
        # What the tail left no time to write stays in its slot.
        for _, step, _ in tuple(self.writing):
            if step in self.parked:
                self._hold(step)
        self.held.extend(self.queued)
        self.queued.clear()

    def _offer_until(self, stop: int) -> Generator[Action, Answer, tuple[int, float]]:
        """Advance to state `stop`, offering states on the way, keeping none.

        Returns `stop` and the next nominal position.
        """
        sweep = self.sweep
        end_start = math.inf
        if sweep.backlog and sweep.end_start is not None:
            end_start = sweep.end_start
        extras = sorted(sweep.extra)
        live, at = self.start, self.first
        position = max(live, int(at))
        while position < stop:
            if position > live:
                yield Advance(live, position)
                live = position
            if position not in sweep.skip:
                yield from self._send_queued()
                if not self.queued:
                    yield from self._room()
                    yield from self._offer(position, held=False)
                if position not in self.stored:
                    yield from self._queue(position)
            taken = position in self.stored or position in sweep.skip or position in self.queued
            if position >= int(at) and taken:
                before, at = at, max(at + sweep.spacing, position + sweep.spacing - 1)
                if at > end_start:
                    spacing = sweep.end_spacing
                    at = max(end_start, before + spacing, position + spacing - 1)
            while extras and extras[0] <= position:
                extras.pop(0)
            position = max(position + 1, min(int(at), extras[0] if extras else int(at)))
        if stop > live:
            yield Advance(live, stop)
        return max(stop, live), at

    def _tail(self, start: int) -> Schedule:
        """Reverse the tail by Revolve; its first descent is the end of the forward sweep."""
        assert self.n is not None
        if start == self.n - 1:
            yield from self._first_reverse(start)
            return
        yield from self._room()
        yield Save(start)
        self.used += 1
        yield from self._segment(start, self.n)
        yield Free(start)
        self.used -= 1

    # ----------------------------------------------------------- reverse sweep

    def _reverse_sweep(self) -> Schedule:
        held, pending, readable, end = self.held, self.pending, self.readable, self.end
        slots = self.sweep.slots
        while end > 0:
            while self.leftover and self.leftover[0][1] - end >= self.sweep.drain_steps:
                yield from self._clear_leftover()
            top = held[-1] if held else -1
            coming = pending[0][0] if pending else (readable[-1] if readable else -1)
            anchor = max(top, coming)
            if anchor < 0:  # every checkpoint is lost: Revolve from the caller's state 0
                yield Load(0)
                yield from self._revolve(0, end, self._reclaimable())
                return
            if coming > top:
                if not pending:
                    yield from self._room()
                    if not readable or readable[-1] != anchor:
                        continue  # its write was awaited to make room, and was lost
                    yield from self._prefetch()
                if (yield Await(pending.popleft()[1])) is False:
                    self.used -= 1
                    self.stored.discard(anchor)
                    continue
                while self.writing and self.writing[0][1] <= anchor:
                    yield from self._settle()  # done: the read came behind them
            yield Load(anchor)
            if coming > top and (part := self._again(end - anchor)):
                yield from self._upper_part(anchor, anchor + part, end)
                end = anchor + part
                continue
            if end - anchor > 1:
                yield from self._segment(anchor, end)
            else:
                while readable and self.used < slots and len(pending) < self.depth:
                    yield from self._prefetch()
                yield Reverse(anchor)
            self.depth = self.sweep.depth
            if coming > top:
                yield Free(anchor)
                self.used -= 1
                if anchor in self.stored:
                    self.stored.discard(anchor)
                    yield Drop(anchor)
            else:
                held.pop()
                yield from self._release(anchor, end)
            end = anchor

    def _again(self, length: int) -> int:
        """Return after how many steps the anchor, just read, leaves its slot; 0 to keep it."""
        reservation = self.sweep.reservation
        if reservation is None or self.pending or self.held:
            return 0
        return reservation.again(length, self._reclaimable())

    def _upper_part(self, anchor: int, start: int, end: int) -> Schedule:
        """Reverse start..end-1 with the slot of the live anchor too, and have it read again.

        Intervals that are divided so want every slot: until this one is
        reversed, however short its last parts, only the next state is read.
        """
        self.depth = 1
        yield Free(anchor)
        self.used -= 1
        self.readable.append(anchor)
        yield Advance(anchor, start)
        yield from self._room()
        yield Save(start)
        self.used += 1
        yield from self._segment(start, end)
        yield Free(start)
        self.used -= 1

    def _prefetch(self) -> Schedule:
        step = self.readable.pop()
        token = yield Get(step)
        assert token is not None
        self.used += 1
        self.pending.append((step, int(token)))

    def _release(self, anchor: int, end: int) -> Schedule:
        """Give back the slot, and the stored copy if any, of a held anchor that is done with."""
        if anchor in self.pinned:
            self.leftover.append((anchor, end))
            return
        yield Free(anchor)
        self.used -= 1
        if anchor in self.stored:
            if self.written and self.written[-1] == anchor:
                self.written.pop()
            self.stored.discard(anchor)
            yield Drop(anchor)

    def _room(self) -> Schedule:
        """See that a slot is free, waiting for a write if need be."""
        yield from self._send_queued()
        while self.used >= self.sweep.slots:
            if self.leftover:
                yield from self._clear_leftover()
            elif self.queued and not self.writing:  # the tier is full
                yield Free(self.queued.popleft())
                self.used -= 1
            else:
                yield from self._settle()
                yield from self._send_queued()

    def _clear_leftover(self) -> Schedule:
        """Give back the slot of a used-up state whose write may still be under way."""
        step, _ = self.leftover.popleft()
        while step in self.pinned:
            yield from self._settle()
        if step in self.written:
            self.written.remove(step)
        yield Free(step)
        self.used -= 1
        if step in self.stored:
            self.stored.discard(step)
            yield Drop(step)

    def _reclaimable(self) -> int:
        """Slots that are free, or become so by waiting for writes."""
        return self.sweep.slots - self.used + self.staged + len(self.leftover) + len(self.queued)

    # ---------------------------------------------------------------- segments

    def _segment(self, start: int, end: int) -> Schedule:
        """Reverse start..end-1, state `start` live and loadable, queueing reads on the way."""
        sweep, need = self.sweep, end - start - 1
        if self.ended:
            while (
                self.readable and sweep.slots - self.used > need and len(self.pending) < self.depth
            ):
                yield from self._prefetch()
        if not (self.pending or self.held) and self.readable:
            if sweep.reservation is not None:
                end = yield from self._down_the_spine(start, end, sweep.reservation)
            if self.ended and self._reclaimable() > 0:
                yield from self._room()
                if self.readable and self.readable[-1] in self.parked:
                    self._hold(self.readable[-1])
                elif self.readable:  # unless the write just awaited was lost
                    yield from self._prefetch()
        yield from self._revolve(start, end, self._reclaimable())

    def _down_the_spine(
        self, start: int, end: int, reservation: Reservation
    ) -> Generator[Action, Answer, int]:
        """Reverse the upper parts of the segment with every slot; return where to read ahead."""
        while advance := reservation.advance(end - start, self._reclaimable()):
            middle = start + advance
            yield Advance(start, middle)
            yield from self._revolve(middle, end, self._reclaimable(), keep_first=False)
            yield Load(start)
            end = middle
        return end

    def _revolve(self, start: int, end: int, free: int, keep_first: bool = True) -> Schedule:
        for action in reverse_actions(start, end, free, keep_first=keep_first):
            kind = type(action)
            if kind is Save:
                yield from self._room()
                self.used += 1
            elif kind is Free:
                self.used -= 1
            elif kind is Reverse and not self.ended:
                assert isinstance(action, Reverse)
                yield from self._first_reverse(action.step)
                continue
            yield action

    def _first_reverse(self, step: int) -> Schedule:
        yield Tape(step)
        yield EndForward()
        self.ended = True
        yield Reverse(step)
