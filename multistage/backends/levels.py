"""The two levels of a cascade as one medium: which extent is where, and who is at it.

The writer thread writes to the upper level only.  The reader reads wherever an
extent is.  The mover takes extents down and up.  The computing thread says which
extents are not needed any more.  Where an extent is, and who is at it, is changed
under the mover's lock; bytes move without it, and each level is written by one
thread at a time and read by one at a time.

* A read of an extent that is being moved waits for the move, and reads it where
  it is then.  What is being read is not moved.
* An extent freed while it is being moved gives its room back when that is over.
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
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ..states.layout import Array
from .arena import pages
from .extents import Room
from .lanes import Mover
from .medium import Medium, is_full

_FAILURES = 3  # in a row, then nothing more is moved that way
_SPARE_PART = 4  # extents go down from when less than this part is free: writes seldom wait


class Where(Enum):
    """The level that an extent is in."""

    ABOVE = 1
    BELOW = 2
    LOST = 3


class Place:
    """Where one extent is."""

    __slots__ = ("above", "below", "gone", "moving", "nbytes", "readers", "stays", "where")

    def __init__(self, above: int, nbytes: int) -> None:
        self.where = Where.ABOVE
        self.above = above  # its numbers in the levels
        self.below = -1
        self.nbytes = nbytes
        self.moving = False
        self.readers = 0
        self.gone = False  # freed while it was moved
        self.stays = False  # not to be brought up: that failed, or it was read from below


@dataclass(slots=True)
class Move:
    """An extent on its way from one level to the other."""

    place: Place
    sinks: bool
    start: int  # its numbers, in the level it leaves and in the other
    stop: int
    was_read: bool = False


class Level:
    """A medium, its room, and the right to write to and read from it.

    Parameters
    ----------
    medium : Medium
    most_bytes : int or None
    largest_bytes : int
        Of an extent.
    """

    def __init__(self, medium: Medium, most_bytes: int | None, largest_bytes: int) -> None:
        self.medium = medium
        self.room = Room(most_bytes)
        self.reading, self.writing = threading.Lock(), threading.Lock()
        self.failures = 0  # of moves to here, in a row
        self._largest_bytes = largest_bytes

    @property
    def spare(self) -> int:
        """How many bytes should be left: those of the largest extents, of one at least."""
        part = (self.room.most_bytes or 0) // self._largest_bytes // _SPARE_PART
        return max(1, part) * self._largest_bytes

    @property
    def works(self) -> bool:
        """Whether extents can still be moved here, as far as the last moves have shown."""
        return self.failures < _FAILURES

    def give(self, number: int) -> None:
        """Take the room of an extent back."""
        self.room.give(number)
        self.medium.free(number)

    def give_after(self, number: int, error: Exception) -> None:
        """Take room back that could not be written to; none if the level is full."""
        if is_full(error):
            self.room.close()
        else:
            self.give(number)


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
        upper_bytes: int,
        lower_bytes: int | None,
        extent_bytes: int,
    ) -> None:
        self.sunk = self.risen = self.failed = 0
        self._upper = Level(upper, upper_bytes, extent_bytes)
        self._lower = Level(lower, lower_bytes, extent_bytes)
        self._extent_bytes = extent_bytes
        self._buffer = pages(extent_bytes)
        self._places: dict[int, Place] = {}
        self._above: OrderedDict[Place, None] = OrderedDict()  # the oldest first
        self._below: OrderedDict[Place, None] = OrderedDict()
        self._latest: Place | None = None  # perhaps still being written
        self._short = 0  # bytes above that the writer waits for
        self._rising = False  # nothing was written since the last read
        self.mover: Mover[Move] = Mover()
        self._changes, self._lock = self.mover.changes, self.mover.changes.lock
        self.mover.start(self._begin_move, self._carry, self._moved)

    def moves(self) -> str:
        """Return a sentence on what was moved."""
        said = f"{self.sunk} extents moved down, {self.risen} brought up again"
        return f"{said}, {self.failed} moves failed" if self.failed else said

    # ------------------------------------------------------ the store's threads

    def begin(self, slot: int, nbytes: int) -> None:
        """Find room above; wait for it as long as extents go down."""
        while True:
            with self._lock:
                self._forget(slot)  # a cascade above gives a number again that it wrote in vain
                self._latest, self._rising = None, False
                self._short = 0 if self._upper.room.fits(nbytes) else nbytes
                self._changes.notify_all()
            self._changes.wait_for(lambda: self._settled(slot, nbytes))
            place = self._places.get(slot)
            if place is None:
                raise OSError(errno.ENOSPC, "the upper level is full, the lower takes no more")
            try:
                with self._upper.writing:
                    self._upper.medium.begin(place.above, nbytes)
            except OSError as error:
                self._filled(slot, error)
            else:
                return

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write a part of an extent above; where that is full, find room once more."""
        while True:
            place = self._places[slot]
            try:
                with self._upper.writing:
                    self._upper.medium.write(place.above, offset, data)
            except OSError as error:
                self._filled(slot, error)
                if offset:
                    # Its first pieces went with its room.  The next extent
                    # finds room where another goes down.
                    raise OSError(errno.EIO, f"the upper level is full: {error}") from error
                self.begin(slot, place.nbytes)
            else:
                return

    def _filled(self, slot: int, error: OSError) -> None:
        """Note that the upper level is full; raise any other error."""
        if not is_full(error):
            raise error
        with self._lock:
            place = self._places.pop(slot)
            self._above.pop(place, None)
            self._upper.give_after(place.above, error)

    def _settled(self, slot: int, nbytes: int) -> bool:
        """Give an extent a place above; False while room may still be made.  Holds the lock."""
        room = self._upper.room
        if not room.fits(nbytes) and self._can_sink():
            return False
        self._short = 0
        if room.fits(nbytes):
            place = self._latest = self._places[slot] = Place(room.take(nbytes), nbytes)
            self._above[place] = None
            self._changes.notify_all()  # so much less may be too little for the mover
        return True

    def read(self, slot: int, data: Array) -> None:
        """Read an extent from the level it is in."""
        place = self._changes.wait_for(lambda: self._claimed(slot))
        assert place is not None
        above = place.where is Where.ABOVE
        level, at = (self._upper, place.above) if above else (self._lower, place.below)
        try:
            with level.reading:
                level.medium.read(at, data)
        finally:
            with self._lock:
                place.readers -= 1
                self._rising = True
                self._changes.notify_all()

    def _claimed(self, slot: int) -> Place | None:
        """Return the place of an extent, which stays there; None while it is moved.

        Holds the lock.
        """
        place = self._places.get(slot)
        if place is None:
            raise OSError(errno.EIO, f"extent {slot} was never written")
        if place.moving:
            return None
        if place.where is Where.LOST:
            raise OSError(errno.EIO, "it could not be read to be moved to the lower level")
        place.readers += 1
        if place.where is Where.BELOW:
            # It was needed before it came up, and is most likely dropped next: to bring
            # it up now would read it a second time.
            place.stays = True
        return place

    def free(self, slot: int) -> None:
        """Forget an extent that no thread of the store is at.  Never blocks for long."""
        with self._lock:
            self._forget(slot)
            self._changes.notify_all()

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

    def _release(self, place: Place) -> None:
        """Give back the room of an extent.  Holds the lock."""
        if place in self._above:
            del self._above[place]
            self._upper.give(place.above)
        if place in self._below:
            del self._below[place]
            self._lower.give(place.below)

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

        What is on its way, up too, takes room in both levels until it has
        arrived: with both full, what it left is the room for another.
        """
        return self.mover.busy or self._sinking(self._above) is not None

    def _sinking(self, places: Iterable[Place]) -> Place | None:
        """Return the first that can go down; None if there is none.  Holds the lock."""
        if not self._lower.works:
            return None
        fits, latest = self._lower.room.fits, self._latest
        return next((each for each in places if each is not latest and fits(each.nbytes)), None)

    def following(self) -> Place | None:
        """Return the extent to move now.  Holds the lock."""
        upper = self._upper
        left = upper.room.left
        if (self._short or not self._rising) and left < max(self._short, upper.spare):
            place = self._sinking(each for each in self._above if not each.readers)
            if place is not None:
                return place
        if self._rising and upper.works:
            for place in reversed(self._below):
                if not place.readers and not place.stays:
                    # Room for another is left, for what is written next.
                    return place if left >= place.nbytes + self._extent_bytes else None
        return None

    def _begin_move(self) -> Move | None:
        """Begin the next move, if there is one.  Holds the lock."""
        place = self.following()
        if place is None:
            return None
        place.moving = True
        if place.where is Where.ABOVE:
            return Move(place, True, place.above, self._lower.room.take(place.nbytes))
        return Move(place, False, place.below, self._upper.room.take(place.nbytes))

    def _carry(self, move: Move) -> None:
        """Read an extent from its level, write it to the other."""
        source, target = self._upper, self._lower
        if not move.sinks:
            source, target = target, source
        nbytes = move.place.nbytes
        if nbytes > len(self._buffer):  # of many small arrays, each at a multiple of 64 bytes
            self._buffer = pages(nbytes)
        data = self._buffer[:nbytes]
        with source.reading:
            source.medium.read(move.start, data)
        move.was_read = True
        with target.writing:
            target.medium.begin(move.stop, nbytes)
            target.medium.write(move.stop, 0, data)

    def _moved(self, move: Move, error: Exception | None) -> None:
        """Enter what became of a move.  Holds the lock."""
        place, sinks = move.place, move.sinks
        target = self._lower if sinks else self._upper
        place.moving = False
        if error is None:
            target.failures = 0
            self._release(place)  # where it came from
            if sinks:
                self.sunk += 1
                place.where, place.below = Where.BELOW, move.stop
                self._below[place] = None
            else:
                self.risen += 1
                place.where, place.above = Where.ABOVE, move.stop
                self._above[place] = None
                self._above.move_to_end(place, last=False)  # older than all that never sank
        else:
            self.failed += 1
            if move.was_read:
                target.failures += 1
                target.give_after(move.stop, error)
            else:
                target.give(move.stop)
                if sinks:
                    self._release(place)
                    place.where = Where.LOST
                else:
                    place.stays = True
        if place.gone:
            self._release(place)
