"""What a streaming schedule has in fast slots and in the tier, and its transfers in flight."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

from ...actions import Action, Answer, Await, Drop, Free, Get, Offer, Save, Schedule
from ...support.step_sets import StepSet

if TYPE_CHECKING:
    from .sweep import Sweep


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
        self.stored = StepSet()  # steps in the tier
        self.readable = array("q")  # steps in the tier and in no slot, ascending
        self.pending: deque[tuple[int, int]] = deque()  # step, token of reads, descending
        self.leftover: deque[tuple[int, int]] = deque()  # used up but pinned: step, adjoint then
        self.ended = False
        self.depth = sweep.depth

    # ------------------------------------------------------------------ writes

    def offer(self, step: int, held: bool) -> Schedule:
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
            yield from self.settle()

    def settle(self) -> Schedule:
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

    def send_queued(self) -> Schedule:
        """Offer what is queued, the oldest first, until the tier refuses."""
        left = -1
        while self.queued and len(self.queued) != left:
            left = len(self.queued)
            yield from self.offer(self.queued[0], held=False)

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

    def queue(self, step: int) -> Schedule:
        """Keep live state `step` until the tier takes it, if slots allow."""
        if len(self.queued) < self.sweep.backlog and self.used < self.sweep.slots:
            yield Save(step)
            self.used += 1
            self.queued.append(step)

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
        step = self.readable.pop()
        token = yield Get(step)
        assert token is not None
        self.used += 1
        self.pending.append((step, int(token)))

    def release(self, anchor: int, end: int) -> Schedule:
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
        if step in self.written:
            self.written.remove(step)
        yield Free(step)
        self.used -= 1
        if step in self.stored:
            self.stored.discard(step)
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
        for step in self.stored:
            yield Drop(step)
