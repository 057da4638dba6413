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
from typing import Any, TypeAlias

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
from ..single.binomial import reverse_actions
from .reserve import Reservation

# Actions up to where the reverse sweep starts, which is returned.
Forward: TypeAlias = Generator[Action, Answer, int]
# Most reads in flight or landed ahead of their use.
DEPTH = 4


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
    queue_depth : int
        The tier's q; an accepted offer proves all but the last q writes done.
    drain_steps : int
        Adjoint steps after which writes left in flight are surely done.
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
        memory = SweepMemory(self)
        return reverse_sweep(memory, _forward(memory, n_steps, is_last))


class SweepMemory:
    """The states of one sweep: what is held where.

    Its generators yield actions, and note what became of them.

    Parameters
    ----------
    sweep : Sweep

    Attributes
    ----------
    used, staged : int
        Slots taken, and those of them that only feed a write.
    ended : bool
        Whether the forward sweep has ended.
    depth : int
        Most reads in flight or landed ahead of their use, now.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.used = 0
        self.staged = 0
        self.held: list[int] = []  # steps in fast slots, ascending
        self.written: deque[int] = deque()  # held, and known to be in the tier
        self.writing: deque[tuple[int, int, bool]] = deque()  # token, step, staged
        self.pinned: set[int] = set()  # held steps whose write was not awaited
        self.queued: deque[int] = deque()  # in slots until the tier takes them, ascending
        self.parked: set[int] = set()  # queued ones it took: staged in the slots they had
        self.readable = array("q")  # steps in the tier and in no slot, ascending
        self.pending: deque[tuple[int, Any]] = deque()  # step, token of reads, descending
        self.unwritten: set[int] = set()  # steps that are read, though their write was lost
        self.leftover: deque[tuple[int, int]] = deque()  # used up but pinned: step, adjoint then
        self.ended = False
        self.depth = DEPTH

    # ------------------------------------------------------------------ writes

    def offer(self, step: int, held: bool) -> Generator[Action, Answer, bool]:
        """Offer live state `step`, record the write if it is taken; return whether it is."""
        token = yield Offer(step)
        if token is None:
            return False
        self.writing.append((int(token), step, not held))
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
            yield from self.settle()
        return True

    def settle(self) -> Schedule:
        """Await the oldest write."""
        token, step, staged = self.writing.popleft()
        if (yield Await(token)) is False:
            if staged and step in self.readable:
                self.readable.remove(step)
            elif staged:
                self.unwritten.add(step)
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

    def send_queued(self) -> Schedule:
        """Offer what is queued, the oldest first, until the tier refuses."""
        while self.queued and (yield from self.offer(self.queued[0], held=False)):
            pass

    def hold(self, step: int) -> None:
        """Keep a parked state where it is: what needs it comes before its write is over."""
        self.parked.remove(step)
        self.readable.remove(step)
        self.staged -= 1
        insort(self.held, step)  # the next anchor may be held already, and this one not
        self.pinned.add(step)
        self.writing = deque(
            (token, each, staged and each != step) for token, each, staged in self.writing
        )

    def queue(self, step: int) -> Generator[Action, Answer, bool]:
        """Keep live state `step` until the tier takes it; return whether slots allow that."""
        if len(self.queued) >= self.sweep.backlog or self.used >= self.sweep.slots:
            return False
        yield Save(step)
        self.used += 1
        self.queued.append(step)
        return True

    def oldest_unwritten(self) -> Generator[Action, Answer, int]:
        """Choose the oldest state without a write; where all are being written, await one."""
        while len(self.pinned) == len(self.held):
            yield from self.settle()
        if self.written:
            gone = self.written.popleft()
            self.readable.append(gone)
            return gone
        return next(step for step in self.held if step not in self.pinned)

    # ------------------------------------------------------------------- reads

    def prefetch(self) -> Schedule:
        """Begin to read the highest state that no slot has."""
        self.pending.append((self.readable[-1], (yield Get(self.readable.pop()))))
        self.used += 1

    def prefetch_last(self, step: int) -> Generator[Action, Answer, bool]:
        """Read a state that is needed now; False if its write is awaited for room, and lost."""
        yield from self.room()
        if not self.readable or self.readable[-1] != step:
            return False
        yield from self.prefetch()
        return True

    def release(self, anchor: int, end: int) -> Schedule:
        """Give back the slot, and the stored copy if any, of a held anchor that is done with."""
        if anchor in self.pinned:
            self.leftover.append((anchor, end))
            return
        yield Free(anchor)
        self.used -= 1
        if self.forget(anchor):
            yield Drop(anchor)

    def forget(self, step: int) -> bool:
        """Return whether a state that is held no more is in the tier too."""
        written = self.written
        k = len(written) - 1
        while k >= 0 and written[k] > step:  # of leftover ones
            k -= 1
        if k < 0 or written[k] != step:
            return False
        del written[k]
        return True

    # ------------------------------------------------------------------- slots

    def room(self) -> Schedule:
        """Free a slot if none is, waiting for a write if need be."""
        yield from self.send_queued()
        while self.used >= self.sweep.slots:
            if self.leftover:
                yield from self.clear_leftover()
            elif self.queued and not self.writing:  # the tier is full
                yield Free(self.queued.popleft())
                self.used -= 1
            else:
                yield from self.settle()
                yield from self.send_queued()

    def clear_leftover(self) -> Schedule:
        """Give back the slot of a used-up state whose write may still be in flight."""
        step, _ = self.leftover.popleft()
        while step in self.pinned:
            yield from self.settle()
        yield Free(step)
        self.used -= 1
        if self.forget(step):
            yield Drop(step)

    def reclaimable(self) -> int:
        """Slots that are free, or become so by waiting for writes."""
        return self.sweep.slots - self.used + self.staged + len(self.leftover) + len(self.queued)

    def clear_all(self) -> Schedule:
        """Give back all that a finished sweep has left behind."""
        while self.leftover:
            yield from self.clear_leftover()
        while self.writing:
            yield from self.settle()
        yield from map(Drop, self.readable)


# ---------------------------------------------------------------- intervals


def segment(memory: SweepMemory, start: int, end: int) -> Schedule:
    """Reverse start..end-1, state `start` live and loadable, queueing reads on the way."""
    sweep, need = memory.sweep, end - start - 1
    if memory.ended:
        while (
            memory.readable
            and sweep.slots - memory.used > need
            and len(memory.pending) < memory.depth
        ):
            yield from memory.prefetch()
    if not (memory.pending or memory.held) and memory.readable:
        if sweep.reservation is not None:
            end = yield from _down_the_spine(memory, start, end, sweep.reservation)
        if memory.ended and memory.reclaimable() > 0:
            yield from memory.room()
            if memory.readable and memory.readable[-1] in memory.parked:
                memory.hold(memory.readable[-1])
            elif memory.readable:  # unless the write just awaited was lost
                yield from memory.prefetch()
    yield from revolve(memory, start, end, memory.reclaimable())


def _down_the_spine(
    memory: SweepMemory, start: int, end: int, reservation: Reservation
) -> Generator[Action, Answer, int]:
    """Reverse the upper parts of the segment with every slot; return where to read ahead."""
    while advance := reservation.advance(end - start, memory.reclaimable()):
        middle = start + advance
        yield Advance(start, middle)
        yield from revolve(memory, middle, end, memory.reclaimable(), keep_first=False)
        yield Load(start)
        end = middle
    return end


def revolve(
    memory: SweepMemory, start: int, end: int, free: int, keep_first: bool = True
) -> Schedule:
    """Reverse start..end-1 by Revolve in `free` slots; `keep_first` as for `reverse_actions`."""
    actions = reverse_actions(start, end, free, keep_first=keep_first)
    if memory.ended and memory.sweep.slots - memory.used >= min(free, end - start - 1):
        yield from actions
        return
    for action in actions:
        kind = type(action)
        if kind is Save:
            yield from memory.room()
            memory.used += 1
        elif kind is Free:
            memory.used -= 1
        elif kind is Reverse and not memory.ended:
            assert isinstance(action, Reverse)
            yield from first_reverse(memory, action.step)
            continue
        yield action


def first_reverse(memory: SweepMemory, step: int) -> Schedule:
    """End the forward sweep with the last step, and reverse it."""
    yield Tape(step)
    yield EndForward()
    memory.ended = True
    yield Reverse(step)


# ----------------------------------------------------------- forward sweeps


def ring_forward(
    memory: SweepMemory,
    n: int | None,
    is_last: Callable[[int], bool] | None = None,
    start: int = 0,
    first: float = 0.0,
) -> Forward:
    """Run forward as a ring; return the step at which the reverse sweep starts.

    Parameters
    ----------
    memory : SweepMemory
    n : int or None
        Steps; None asks `is_last(i)` when state i is live whether it is the last.
    is_last : callable, optional
    start : int
        The live state.
    first : float
        The nominal position of the first offer.
    """
    sweep = memory.sweep
    extra, skip, spacing, slots = sweep.extra, sweep.skip, sweep.spacing, sweep.slots
    held = memory.held
    i, at = yield from _offer_until(memory, min(sweep.keep_from, (n or 1) - 1), start, first)
    end_start = n if sweep.end_start is None else sweep.end_start
    while n is None or i < n - 1:
        if i == end_start:
            spacing = sweep.end_spacing
        while memory.used >= slots:
            # A written state goes first, the oldest.
            if memory.written:
                gone = memory.written.popleft()
                memory.readable.append(gone)
            elif memory.staged and not held:
                yield from memory.settle()
                continue
            else:
                gone = yield from memory.oldest_unwritten()
            held.remove(gone)
            memory.used -= 1
            yield Free(gone)
        yield Save(i)
        memory.used += 1
        held.append(i)
        if (i >= int(at) or i in extra) and (i in skip or (yield from memory.offer(i, held=True))):
            at = max(at + spacing, i + spacing - 1)
        yield Advance(i, i + 1)
        i += 1
        if is_last is not None and is_last(i):
            yield EndForward()
            memory.ended = True
            return i
    yield from first_reverse(memory, i)
    return i


def tail_forward(memory: SweepMemory, n: int, tail_start: int) -> Schedule:
    """Run forward to `tail_start`, and reverse the `n` - `tail_start` steps from there on."""
    yield from _offer_until(memory, tail_start)
    yield from _tail(memory, tail_start, n)
    # What the tail left no time to write stays in its slot.
    for _, step, _ in tuple(memory.writing):
        if step in memory.parked:
            memory.hold(step)
    memory.held.extend(memory.queued)
    memory.queued.clear()


def _offer_until(
    memory: SweepMemory, stop: int, start: int = 0, first: float = 0.0
) -> Generator[Action, Answer, tuple[int, float]]:
    """Advance from state `start` to `stop`, offering states from `first` on, keeping none.

    Returns `stop` and the next nominal position.
    """
    sweep, queued = memory.sweep, memory.queued
    slots, skip, end_start = sweep.slots, sweep.skip, math.inf
    if sweep.backlog and sweep.end_start is not None:
        end_start = sweep.end_start
    extras = sorted(sweep.extra)
    live, at = start, first
    position = max(live, int(at))
    while position < stop:
        if position > live:
            yield Advance(live, position)
            live = position
        taken = position in skip
        if not taken:
            if queued:
                yield from memory.send_queued()
            if not queued:
                if memory.used >= slots:
                    yield from memory.room()
                taken = yield from memory.offer(position, held=False)
            if not taken:
                taken = yield from memory.queue(position)
        if taken and position >= int(at):
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


def _tail(memory: SweepMemory, start: int, n: int) -> Schedule:
    """Reverse the tail by Revolve; its first descent is the end of the forward sweep."""
    if start == n - 1:
        yield from first_reverse(memory, start)
        return
    yield from memory.room()
    yield Save(start)
    memory.used += 1
    yield from segment(memory, start, n)
    yield Free(start)
    memory.used -= 1


# -------------------------------------------------------- the reverse sweep


def reverse_sweep(memory: SweepMemory, forward: Forward) -> Schedule:
    """Follow a forward sweep, reverse all steps before what it returns, give back what is left.

    Where every checkpoint is lost the rest is reversed from the caller's state 0.
    """
    end = yield from forward
    held, pending, readable, sweep = memory.held, memory.pending, memory.readable, memory.sweep
    slots, leftover, writing = sweep.slots, memory.leftover, memory.writing
    while end > 0:
        while leftover and leftover[0][1] - end >= sweep.drain_steps:
            yield from memory.clear_leftover()
        top = held[-1] if held else -1
        coming = pending[0][0] if pending else (readable[-1] if readable else -1)
        anchor, was_read = max(top, coming), coming > top
        if anchor < 0:  # every checkpoint is lost: Revolve from the caller's state 0
            yield Load(0)
            yield from revolve(memory, 0, end, memory.reclaimable())
            break
        if was_read:
            if not pending and not (yield from memory.prefetch_last(anchor)):
                continue
            if (yield Await(pending.popleft()[1])) is False:
                memory.used -= 1
                memory.unwritten.discard(anchor)
                continue
            while writing and writing[0][1] <= anchor:
                yield from memory.settle()  # done: the read came behind them
        yield Load(anchor)
        if was_read and (part := _again(memory, anchor, end)):
            end = yield from _upper_part(memory, anchor, anchor + part, end)
            continue
        beside = end - anchor - 1  # states that need slots of their own, if none is to run twice
        while readable and slots - memory.used > beside and len(pending) < memory.depth:
            pending.append((readable[-1], (yield Get(readable.pop()))))
            memory.used += 1
        if not beside or (slots - memory.used >= beside and (pending or held or not readable)):
            yield from reverse_actions(anchor, end, beside, keep_first=True)
        else:
            yield from segment(memory, anchor, end)
        memory.depth = DEPTH
        if was_read:
            yield Free(anchor)
            memory.used -= 1
            if anchor not in memory.unwritten:
                yield Drop(anchor)
        else:
            held.pop()
            yield from memory.release(anchor, end)
        end = anchor
    yield from memory.clear_all()


def _again(memory: SweepMemory, anchor: int, end: int) -> int:
    """Return after how many steps the anchor, just read, leaves its slot; 0 to keep it."""
    reservation = memory.sweep.reservation
    if reservation is None or memory.pending or memory.held or anchor in memory.unwritten:
        return 0
    return reservation.again(end - anchor, memory.reclaimable())


def _upper_part(
    memory: SweepMemory, anchor: int, start: int, end: int
) -> Generator[Action, Answer, int]:
    """Reverse start..end-1 with the slot of the live anchor too, and have it read again.

    Intervals that are divided so want every slot: until this one is
    reversed, however short its last parts, only the next state is read.
    """
    memory.depth = 1
    yield Free(anchor)
    memory.used -= 1
    memory.readable.append(anchor)
    yield Advance(anchor, start)
    yield from memory.room()
    yield Save(start)
    memory.used += 1
    yield from segment(memory, start, end)
    yield Free(start)
    memory.used -= 1
    return start


def _forward(memory: SweepMemory, n: int | None, is_last: Callable[[int], bool] | None) -> Forward:
    end = memory.sweep.tail_start
    if n == 1:
        yield Tape(0)
        yield EndForward()
        yield Reverse(0)
        return 0
    if end is None:
        return (yield from ring_forward(memory, n, is_last))
    assert n is not None
    yield from tail_forward(memory, n, end)
    return end
