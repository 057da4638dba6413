"""The two levels of a cascade as one medium: which extent is where, and who is at it.

The writer thread writes to the upper level only.  The reader reads wherever an
extent is.  The mover takes extents down and up.  The computing thread says which
extents are not needed any more.  Where an extent is, and who is at it, is changed
under the mover's lock; bytes move without it, and each level is written by one
thread at a time and read by one at a time.

* A read of an extent that is being moved waits for the move, and reads it where
  it is then.  What is being read is not moved.
* An extent freed while it is being moved gives its slots back when that is over.
  Its number may mean another extent by then: the mover knows it as an object.
* A large extent comes in pieces.  The last one begun may not be whole yet, so
  it is not moved until the next is begun.
* The writer waits for room above if the mover can still make some.  Meanwhile
  the store's queue fills and it refuses, as any slow tier does.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from ..states.layout import Array
from .arena import pages
from .extents import SlotPool
from .medium import Medium, is_full
from .mover import Mover

_FAILURES = 3  # in a row, then nothing more is moved that way
_SPARE_PART = 4  # extents go down from when less than this part is free: writes seldom wait


class _Where(Enum):
    ABOVE = 1
    BELOW = 2
    LOST = 3


class _Place:
    """Where one extent is."""

    __slots__ = ("above", "below", "gone", "moving", "nbytes", "readers", "stays", "where")

    def __init__(self, above: int) -> None:
        self.where = _Where.ABOVE
        self.above = above  # its slots in the levels
        self.below = -1
        self.nbytes = 0
        self.moving = False
        self.readers = 0
        self.gone = False  # freed while it was moved
        self.stays = False  # not to be brought up: that failed, or it was read from below


@dataclass(slots=True)
class _Move:
    """An extent on its way from one level to the other."""

    place: _Place
    sinks: bool
    start: int  # its slots, in the level it leaves and in the other
    stop: int
    was_read: bool = False


class _Level:
    """A medium, its slots, and the right to write to and read from it."""

    def __init__(self, medium: Medium, most: int | None) -> None:
        self.medium = medium
        self.slots = SlotPool(most)
        self.reading, self.writing = threading.Lock(), threading.Lock()
        self.failures = 0  # of moves to here, in a row

    @property
    def left(self) -> int:
        """How many slots can be taken."""
        return self.slots.left

    @property
    def spare(self) -> int:
        """How many slots should be left."""
        return max(1, (self.slots.most or 0) // _SPARE_PART)

    @property
    def works(self) -> bool:
        return self.failures < _FAILURES

    def give_after(self, slot: int, error: Exception) -> None:
        """Take a slot back that could not be written; none if the level is full."""
        if is_full(error):
            self.slots.close()
        else:
            self.slots.give(slot)


class Levels:
    """The two levels as one medium.

    Attributes
    ----------
    sunk, risen, failed : int
        Extents taken down, brought up, and moves that failed.
    """

    def __init__(
        self,
        upper: Medium,
        lower: Medium,
        upper_slots: int,
        lower_slots: int | None,
        extent_bytes: int,
    ) -> None:
        self.sunk = self.risen = self.failed = 0
        self._upper, self._lower = _Level(upper, upper_slots), _Level(lower, lower_slots)
        self._nested = lower if isinstance(lower, Levels) else None
        self._buffer = pages(extent_bytes)
        self._places: dict[int, _Place] = {}
        self._above: OrderedDict[_Place, None] = OrderedDict()  # the oldest first
        self._below: OrderedDict[_Place, None] = OrderedDict()
        self._latest: _Place | None = None  # perhaps still being written
        self._short = False  # the writer waits for room above
        self._rising = False  # nothing was written since the last read
        self.mover: Mover[_Move] = Mover()
        self._lock, self._changed = self.mover.lock, self.mover.changed
        self.mover.start(self._begin_move, self._carry, self._moved)

    def moves(self) -> str:
        """Return a sentence on what was moved."""
        said = f"{self.sunk} extents moved down, {self.risen} brought up again"
        return f"{said}, {self.failed} moves failed" if self.failed else said

    # ------------------------------------------------------ the store's threads

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write a part of an extent, above while there is room, else below."""
        if offset == 0:
            self._begin(slot)
        upper = self._upper
        while True:
            place = self._places[slot]
            try:
                with upper.writing:
                    upper.medium.write(place.above, offset, data)
            except OSError as error:
                if not is_full(error):
                    raise
                with self._changed:
                    del self._places[slot]
                    self._above.pop(place, None)
                    upper.give_after(place.above, error)
                if offset:
                    # Its first pieces went with the slot.  The next extent
                    # finds room where another goes down.
                    raise OSError(errno.EIO, f"the upper level is full: {error}") from error
                self._begin(slot)
            else:
                place.nbytes = offset + len(data)
                return

    def _begin(self, slot: int) -> None:
        """Find room above; wait for it as long as extents go down."""
        upper = self._upper
        with self._changed:
            self._forget(slot)  # a cascade above gives a number again that it wrote in vain
            self._latest, self._rising, self._short = None, False, upper.left <= 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: upper.left > 0 or not self._can_sink())
            self._short = False
            if upper.left <= 0:
                raise OSError(errno.ENOSPC, "the upper level is full, the lower takes no more")
            place = self._latest = self._places[slot] = _Place(upper.slots.take())
            self._above[place] = None
            self._changed.notify_all()  # one slot fewer may be too few for the mover

    def read(self, slot: int, data: Array) -> None:
        """Read an extent from the level it is in."""
        with self._changed:
            place = self._places.get(slot)
            if place is None:
                raise OSError(errno.EIO, f"extent {slot} was never written")
            self._changed.wait_for(lambda: not place.moving)
            if place.where is _Where.LOST:
                raise OSError(errno.EIO, "it could not be read to be moved to the lower level")
            place.readers += 1
            if place.where is _Where.ABOVE:
                level, at = self._upper, place.above
            else:
                level, at = self._lower, place.below
                # It was wanted before it came up, and is most likely dropped next: to bring
                # it up now would read it a second time.
                place.stays = True
        try:
            with level.reading:
                level.medium.read(at, data)
        finally:
            with self._changed:
                place.readers -= 1
                self._rising = True
                self._changed.notify_all()

    def free(self, slot: int) -> None:
        """Forget an extent that no thread of the store is at.  Never blocks for long."""
        with self._lock:
            self._forget(slot)
            self._changed.notify_all()

    def _forget(self, slot: int) -> None:
        """Free an extent, now or when it is no longer moved.  Holds the lock."""
        place = self._places.pop(slot, None)
        if place is None:
            return
        if place is self._latest:
            self._latest = None
        if place.moving:
            place.gone = True
        else:
            self._release(place)

    def _release(self, place: _Place) -> None:
        """Give back the slots of an extent.  Holds the lock."""
        if place in self._above:
            del self._above[place]
            self._upper.slots.give(place.above)
        if place in self._below:
            del self._below[place]
            self._lower.slots.give(place.below)
            if self._nested is not None:
                self._nested.free(place.below)

    def close(self) -> None:
        """Stop the mover and close both levels."""
        self.mover.stop()
        try:
            self._upper.medium.close()
        finally:
            self._lower.medium.close()

    # --------------------------------------------------------------- the mover

    def _can_sink(self) -> bool:
        """Whether room above may still be made.  Holds the lock.

        What is on its way, up too, takes a slot of both levels until it has
        arrived: with both full, the one it left is the room for another.
        """
        lower = self._lower
        movable = len(self._above) - (self._latest in self._above)
        return self.mover.busy or (movable > 0 and lower.works and lower.left > 0)

    def following(self) -> _Place | None:
        """Return the extent to move now.  Holds the lock."""
        upper, lower = self._upper, self._lower
        wanted = self._short or not self._rising
        if wanted and upper.left < upper.spare and lower.works and lower.left > 0:
            for place in self._above:
                if place is not self._latest and not place.readers:
                    return place
        if self._rising and upper.works and upper.left > 1:
            for place in reversed(self._below):
                if not place.readers and not place.stays:
                    return place
        return None

    def _begin_move(self) -> _Move | None:
        """Begin the next move, if there is one.  Holds the lock."""
        place = self.following()
        if place is None:
            return None
        place.moving = True
        if place.where is _Where.ABOVE:
            return _Move(place, True, place.above, self._lower.slots.take())
        return _Move(place, False, place.below, self._upper.slots.take())

    def _carry(self, move: _Move) -> None:
        """Read an extent from its level, write it to the other."""
        source, target = self._upper, self._lower
        if not move.sinks:
            source, target = target, source
        data = self._buffer[: move.place.nbytes]
        with source.reading:
            source.medium.read(move.start, data)
        move.was_read = True
        with target.writing:
            target.medium.write(move.stop, 0, data)

    def _moved(self, move: _Move, error: Exception | None) -> None:
        """Enter what became of a move.  Holds the lock."""
        place, sinks = move.place, move.sinks
        target = self._lower if sinks else self._upper
        place.moving = False
        if error is None:
            target.failures = 0
            self._release(place)  # where it came from
            if sinks:
                self.sunk += 1
                place.where, place.below = _Where.BELOW, move.stop
                self._below[place] = None
            else:
                self.risen += 1
                place.where, place.above = _Where.ABOVE, move.stop
                self._above[place] = None
                self._above.move_to_end(place, last=False)  # older than all that never sank
        else:
            self.failed += 1
            if move.was_read:
                target.failures += 1
                target.give_after(move.stop, error)
            else:
                target.slots.give(move.stop)
                if sinks:
                    self._release(place)
                    place.where = _Where.LOST
                else:
                    place.stays = True
        if place.gone:
            self._release(place)
