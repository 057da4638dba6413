"""Where the states of a `PinnedStore` are, and their way to the tier below and back.

When few slots are free the oldest states go down; those that are needed come up, and
while slots are free the latest of those below come up ahead of time.  One mover does
it, and is the only one to call the tier below.

What is moved next: what the computing thread has asked for, then the rest in the order
in which it was queued.  A state comes up when a slot is free for it.  Slots are given
back by the computing thread, in time, unless that waits itself: for this very state,
which then takes the slot of one that is below too, read or not; or for another state,
or a slot, which are looked at first.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ...backends.base import Store
from ...backends.lanes import Mover
from ..tensors.streams import CopyFailed, Streams
from .copies import Entry, PinnedMemory, Slot

SPARE = 3  # slots kept free for the next states, where a tier below takes the oldest


@dataclass(slots=True)
class _Move:
    """`up` for one that is waited for, `ahead` for one that is not yet."""

    task: Literal["down", "up", "ahead", "drop"]
    entry: Entry
    slot: Slot | None = None  # to come up to
    kept: bool = False  # by the tier below


class Shuttle:
    """The states of an open `PinnedStore`.

    Parameters
    ----------
    name : str
        Of the store, for messages.
    memory : PinnedMemory
    streams : Streams
    below : Store or None
        Open.

    Attributes
    ----------
    entries : dict
        By key.
    changes : Monitor
        Notified whenever a state has been moved.
    """

    def __init__(
        self, name: str, memory: PinnedMemory, streams: Streams, below: Store | None
    ) -> None:
        self.entries: dict[int, Entry] = {}
        self._name, self._memory, self._streams, self._below = name, memory, streams, below
        self._order: deque[Entry] = deque()  # in pinned memory, the oldest first
        self._down_there: list[Entry] = []  # in the tier below, the oldest first
        self._urgent: deque[_Move] = deque()  # the computing thread waits for these
        self._tasks: deque[_Move] = deque()
        self._downs = 0  # states on their way down
        self._ups = 0  # promotions in flight that are not waited for yet
        self._below_full = False
        self._awaited: Entry | None = None  # the computing thread waits for it
        self._mover: Mover[_Move] = Mover()
        self.changes, self._lock = self._mover.changes, self._mover.changes.lock

    def start(self, device: torch.device) -> None:
        """Start the mover, if there is a tier below.  Raises RuntimeError."""
        if self._below is not None:
            on_device = device.type == "cuda"
            self._mover.start(
                self._following,
                self._carry,
                self._settle,
                lambda: torch.cuda.device(device) if on_device else contextlib.nullcontext(),
            )

    def stop(self) -> None:
        """Stop the mover.  May be called twice."""
        self._mover.stop()

    # ------------------------------------------------------ the computing thread

    def take(self, block: bool) -> Slot | None:
        """Return a slot for another state, None if there is none."""
        free = self._memory.free
        slot: Slot | None = None

        def settled() -> bool:
            nonlocal slot
            if free or self._memory.grow():
                slot = free.popleft()
            return slot is not None or not (block and self._downs)

        self.changes.wait_for(settled)
        return slot

    def enter(self, entry: Entry) -> None:
        """Take a new state; have the oldest moved down if few slots are left for more."""
        with self._lock:
            self.entries[entry.key] = entry
            self._order.append(entry)

    def make_room(self) -> None:
        """Have the oldest states moved down, so that some slots stay free."""
        if self._below is None or self._memory.left is None:
            return
        with self._lock:
            left = (self._memory.left or 0) + self._downs
            while left < SPARE and self._order and not self._below_full:
                entry = self._order.popleft()
                if entry.slot is None or entry.gone or entry.moving:
                    continue
                entry.moving = True
                self._tasks.append(_Move("down", entry))
                self._downs += 1
                left += 1
            self.changes.notify_all()

    def want(self, entry: Entry) -> bool:
        """Have a state brought up; whether it is in pinned memory now."""
        with self._lock:
            entry.read = False
            if entry.slot is not None and not entry.moving:
                return True
            entry.wanted = True
            if entry.below and entry.slot is None and not entry.moving:
                entry.moving = True
                self._urgent.append(_Move("up", entry))
                self.changes.notify_all()
            return False

    def wait(self, entry: Entry) -> None:
        """Block until a state is in pinned memory, or lost."""

        def settled() -> bool:
            return bool(entry.lost) or (entry.slot is not None and not entry.moving)

        try:
            with self._lock:
                if not settled():
                    self._awaited = entry
                    self.changes.notify_all()
            self.changes.wait_for(settled)
        finally:
            self._awaited = None

    def was_read(self, entry: Entry) -> None:
        """Note that a state has been read: it can do without its slot."""
        with self._lock:
            entry.wanted, entry.read = False, True
            self.changes.notify_all()

    def lose(self, entry: Entry, error: Exception) -> None:
        """Note that a copy of a state has failed."""
        with self._lock:
            entry.lost = entry.lost or f"checkpoint {entry.key} could not be copied: {error}"

    def forget(self, entry: Entry) -> None:
        """Give back what a state holds, now or when the mover is done with it."""
        with self._lock:
            entry.gone = True
            self.entries.pop(entry.key, None)
            if not entry.moving:
                self._release(entry)
            self._bring_back()

    def _release(self, entry: Entry) -> None:
        """Give back what a dropped state holds.  Holds the lock."""
        if entry.slot is not None:
            self._memory.free.append(entry.slot)
            entry.slot = None
        while self._order and self._order[-1].gone:
            self._order.pop()
        if entry.below:
            # First, for the tier below must not be given its key again before.
            self._tasks.appendleft(_Move("drop", entry))
            entry.below = False
        self.changes.notify_all()

    def _bring_back(self) -> None:
        """Have the latest of the states below brought up, while slots are free."""
        there = self._down_there
        while there and (there[-1].gone or there[-1].slot is not None):
            there.pop()
        if there and not there[-1].moving and not self._ups and len(self._memory.free) > SPARE:
            entry = there.pop()
            entry.moving = True
            self._ups += 1
            self._tasks.append(_Move("ahead", entry))
            self.changes.notify_all()

    # --------------------------------------------------------------- the mover

    def _following(self) -> _Move | None:
        """Return the next move, with a slot if it needs one.  Holds the lock."""
        for queue in (self._urgent, self._tasks):
            for place, move in enumerate(queue):
                if move.task in ("up", "ahead"):
                    if not self._can_rise(move.entry):
                        continue
                    if self._memory.free and not move.entry.gone:
                        move.slot = self._memory.free.popleft()
                del queue[place]
                return move
        return None

    def _can_rise(self, entry: Entry) -> bool:
        """Whether a state can be brought up now, or never.  Holds the lock."""
        if entry.gone or self._found_slot(unread=False):
            return True
        if self._awaited is not entry:
            return False
        return self._memory.grow() or self._found_slot(unread=True) or not self._downs

    def _found_slot(self, *, unread: bool) -> bool:
        """Whether a slot is free; if none is, take one whose state is below too and was read.

        Or was not read, which costs its way up once more.
        """
        free = self._memory.free
        if not free:
            for other in self.entries.values():
                if (
                    other.below
                    and other.slot is not None
                    and not other.moving
                    and (other.read or unread)
                ):
                    free.append(other.slot)
                    other.slot = None
                    break
        return bool(free)

    def _carry(self, move: _Move) -> None:
        """Move the bytes of a state; called without the lock."""
        below, entry = self._below, move.entry
        assert below is not None
        match move.task:
            case "down":
                self._carry_down(move, below)
            case "drop":
                below.drop(entry.key)
            case _ if not entry.gone:
                if move.slot is None:
                    raise OSError("no slot is free, and the states in them are nowhere else")
                if move.slot.used is not None:
                    with contextlib.suppress(CopyFailed):  # of the state that had the slot before
                        self._streams.synchronize(move.slot.used)
                lines = entry.lines(move.slot.memory)
                for line, array in zip(lines, below.get(entry.key), strict=True):
                    np.copyto(line.numpy(), array)
                move.slot.used = None

    def _carry_down(self, move: _Move, below: Store) -> None:
        entry = move.entry
        if entry.gone:
            return
        assert entry.slot is not None and entry.written is not None
        self._streams.synchronize(entry.written)
        lines = [line.numpy() for line in entry.lines(entry.slot.memory)]
        move.kept = below.put(entry.key, lines, block=True) and below.wait_written(entry.key)

    def _settle(self, move: _Move, error: Exception | None) -> None:
        """Enter what became of a move.  Holds the lock."""
        entry = move.entry
        self._downs -= move.task == "down"
        self._ups -= move.task == "ahead"
        if move.task == "drop":
            return
        entry.moving = False
        if error is not None:  # the state is lost, not the run
            entry.lost = f"tier {self._name!r} could not move checkpoint {entry.key}: {error}"
            if move.slot is not None:
                self._memory.free.append(move.slot)
        elif move.task == "down":
            entry.below = move.kept
            if not move.kept and not entry.gone:
                self._below_full = True  # this one stays, and all after it
            elif not entry.wanted and not entry.gone:
                assert entry.slot is not None
                self._memory.free.append(entry.slot)
                entry.slot = None
                self._down_there.append(entry)
        elif move.slot is not None:
            entry.slot = move.slot
        if entry.gone:
            self._release(entry)
