"""One tier made of two: what the upper has no room for moves on to the lower.

Whole extents move, not states: a lower level that takes long per request gets
few large ones, and the checksum made when an extent was first written is the
one its last read is verified with, whatever way it went meanwhile.

The oldest extents go down, since they are needed last; when the reverse sweep
frees room above, the youngest of those below come up again, so that the lower
level works all the time and is waited for little.

The two levels are one medium (`Levels`): the store writes to the upper one and
reads wherever an extent is, and a lane moves extents down and up, one at a time.

What a fault does:

============================  ================================================
the upper level fills up      what it holds then is its capacity from now on
a move down fails             the extent stays above; after some in a row
                              nothing more is taken down, and the store is full
                              when the upper level is
a move up fails               the extent stays below and is read from there;
                              after some in a row none comes up ahead of time
reading it to move it fails   the checkpoints in that extent are lost
============================  ================================================

The writer thread writes to the upper level only.  The reader reads wherever an
extent is.  The computing thread says which extents are not needed any more.  Where an
extent is, and who is at it, is changed under one lock; bytes move without it, and each level
is written by one thread at a time and read by one at a time.

* A read of an extent that is being moved waits for the move, and reads it where
  it is then.  What is being read is not moved.
* An extent freed while it is being moved gives its room back when that is over.
  Its number may mean another extent by then: a move knows it as an object.
* A large extent comes in pieces.  The last one begun may not be whole yet, so
  it is not moved until the next is begun.
* The writer waits for room above if a move can still make some.  Meanwhile
  the store's queue fills and it refuses, as any slow tier does.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeGuard

from ..errors import ArgumentError, StoreError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield
from ..support.waiting import Monitor
from .arena import PAGE, pages, round_up
from .base import Store, require_distinct
from .lanes import Lane
from .medium import Medium, Room, is_full
from .streamed import StreamedStore

_FAILURES = 3  # in a row, then nothing more is moved that way
_SPARE_PART = 4  # extents go down from when less than this part is free: writes seldom wait


class Place:
    """Where one extent is: its numbers in the levels, -1 in one that it is not in.

    It is lost if it is in neither.
    """

    __slots__ = ("above", "below", "gone", "moving", "nbytes", "readers", "stays")

    def __init__(self, above: int, nbytes: int) -> None:
        self.above, self.below = above, -1
        self.nbytes = nbytes
        self.moving = False
        self.readers = 0
        self.gone = False  # freed while it was moved
        self.stays = False  # not to be brought up: that failed, or it was read from below


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
        self._moving = self._closing = False
        self._changes = Monitor()
        self._lock = self._changes.lock
        self._lane: Lane[Callable[[], None]] = Lane("multistage-mover")
        self._lane.start(lambda move: move())

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
                self._changed()
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
            self._changed()  # so much less may be too little
        return True

    def read(self, slot: int, data: Array) -> None:
        """Read an extent from the level it is in."""
        place = self._changes.wait_for(lambda: self._claimed(slot))
        assert place is not None
        above = place.above >= 0
        level, at = (self._upper, place.above) if above else (self._lower, place.below)
        try:
            with level.reading:
                level.medium.read(at, data)
        finally:
            with self._lock:
                place.readers -= 1
                self._rising = True
                self._changed()

    def _claimed(self, slot: int) -> Place | None:
        """Return the place of an extent, which stays there; None while it is moved.

        Holds the lock.
        """
        place = self._places.get(slot)
        if place is None:
            raise OSError(errno.EIO, f"extent {slot} was never written")
        if place.moving:
            return None
        if place.above < 0 and place.below < 0:
            raise OSError(errno.EIO, "it could not be read to be moved to the lower level")
        place.readers += 1
        if place.above < 0:
            # It was needed before it came up, and is most likely dropped next: to bring
            # it up now would read it a second time.
            place.stays = True
        return place

    def free(self, slot: int) -> None:
        """Forget an extent that no thread of the store is at.  Never blocks for long."""
        with Shield(up=True), self._lock:  # a move that is noted is queued
            self._forget(slot)
            self._changed()

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
        if self._above.pop(place, place) is None:
            self._upper.give(place.above)
        if self._below.pop(place, place) is None:
            self._lower.give(place.below)
        place.above = place.below = -1

    def close(self) -> None:
        """Let the move in flight end, and close both levels."""
        with self._lock:
            self._closing = True
        self._lane.end()
        self._lane.join()
        try:
            self._upper.medium.close()
        finally:
            self._lower.medium.close()

    # --------------------------------------------------------------- moves

    def _can_sink(self) -> bool:
        """Whether room above may still be made.  Holds the lock.

        What is on its way, up too, takes room in both levels until it has
        arrived: with both full, what it left is the room for another.
        """
        return self._moving or self._sinking(self._above) is not None

    def _sinking(self, places: Iterable[Place]) -> Place | None:
        """Return the first that can go down; None if there is none.  Holds the lock."""
        if not self._lower.works:
            return None
        fits, latest = self._lower.room.fits, self._latest
        return next((each for each in places if each is not latest and fits(each.nbytes)), None)

    def _following(self) -> Place | None:
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

    def _changed(self) -> None:
        """Let all who wait look again, and begin a move if there is one.  Holds the lock."""
        self._changes.notify_all()
        place = None if self._moving or self._closing else self._following()
        if place is not None:
            self._moving = place.moving = True
            target = self._lower if place.above >= 0 else self._upper
            self._lane.put(partial(self._move, place, target.room.take(place.nbytes)))

    def settled(self, timeout_s: float) -> bool:
        """Wait until there is nothing to be moved, at most so long; return whether that is so."""
        return self._changes.wait_for(
            lambda: not self._moving and self._following() is None, timeout_s
        )

    def _move(self, place: Place, number: int) -> None:
        """Read an extent from its level, write it to the other by a number taken there."""
        sinks = place.above >= 0
        source, target = (self._upper, self._lower) if sinks else (self._lower, self._upper)
        was_read, failure = False, None
        try:
            if place.nbytes > len(self._buffer):  # of many small arrays, each at 64 bytes
                self._buffer = pages(place.nbytes)
            data = self._buffer[: place.nbytes]
            with source.reading:
                source.medium.read(max(place.above, place.below), data)
            was_read = True
            with target.writing:
                target.medium.begin(number, place.nbytes)
                target.medium.write(number, 0, data)
        except Exception as error:  # whatever it is: states are lost, not runs
            failure = error.with_traceback(None)  # whose frames refer to extents
        with self._lock:
            self._moving = place.moving = False
            if failure is None:
                self._arrived(place, number, sinks)
            else:
                self.failed += 1
                if was_read:
                    target.failures += 1
                    target.give_after(number, failure)
                else:
                    target.give(number)
                    place.stays = True
                    if sinks:
                        self._release(place)  # it is lost
            if place.gone:
                self._release(place)
            self._changed()

    def _arrived(self, place: Place, number: int, sinks: bool) -> None:
        """Enter where an extent is that was moved.  Holds the lock."""
        self._release(place)  # where it came from
        if sinks:
            self.sunk, self._lower.failures = self.sunk + 1, 0
            place.below = number
            self._below[place] = None
        else:
            self.risen, self._upper.failures = self.risen + 1, 0
            place.above = number
            self._above[place] = None
            self._above.move_to_end(place, last=False)  # older than all that never sank


def is_level(store: object) -> TypeGuard[StreamedStore]:
    """Whether a store can be a level of a cascade: one of memory, files or objects."""
    return isinstance(store, StreamedStore)


class CascadeStore(StreamedStore):
    """Checkpoints in one store, and beyond its capacity in a second one below it.

    Parameters
    ----------
    upper : StreamedStore
        Takes every state first: memory, a NUMA node, files.  Its capacity must
        be given.  Closed, and not used elsewhere.
    lower : StreamedStore
        Takes the oldest states when the upper fills: files, a remote store,
        or another cascade.

    Raises
    ------
    ArgumentError
        If the upper has no capacity, or a level is no such store.
    StoreError
        From `open`, if a level cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.backends import MemoryStore
    >>> from multistage.states.layout import Layout
    >>> store = CascadeStore(MemoryStore(32 << 10), MemoryStore())
    >>> layout = Layout.of(np.zeros(512))
    >>> store.open(layout)
    >>> all(store.put(key, [np.full(512, float(key))], block=True) for key in range(100))
    True
    >>> float(store.get(0)[0][0]), float(store.get(99)[0][0])
    (0.0, 99.0)
    >>> store.close()
    """

    def __init__(self, upper: StreamedStore, lower: StreamedStore) -> None:
        for what, level in (("upper", upper), ("lower", lower)):
            if not is_level(level):
                raise ArgumentError(
                    f"the {what} level of a cascade is a {type(level).__name__}; it must be a "
                    "store of memory, files or objects"
                )
            if not level.exact:
                raise ArgumentError(
                    f"the {what} level {level.name!r} of a cascade loses information, and the "
                    "states stored there would not be known; compress it by blosc"
                )
        if upper.capacity_bytes is None:
            raise ArgumentError(
                f"the upper level {upper.name!r} of a cascade needs a capacity, as in "
                "file:///scratch?capacity=10GiB; what is beyond it moves on to the lower"
            )
        require_distinct([upper, lower], "the levels of a cascade")
        below = lower.capacity_bytes
        super().__init__(
            f"{upper.name}>{lower.name}",
            capacity_bytes=None if below is None else upper.capacity_bytes + below,
            buffer_bytes=max(upper._buffer_bytes, lower._buffer_bytes),
            queue_depth=upper.queue_depth,
            extent_bytes=max(upper._most_extent_bytes, lower._most_extent_bytes),
            chunk_bytes=max(upper._chunk_bytes, lower._chunk_bytes),
        )
        self._levels = (upper, lower)
        self._cascade: Levels | None = None
        self._lent: list[StreamedStore] = []  # levels that are ours now

    @property
    def levels(self) -> tuple[StreamedStore, StreamedStore]:
        """The upper store and the lower."""
        return self._levels

    def parts(self) -> Sequence[Store]:
        """Return this store, its levels, and what those are built on."""
        return [self, *(part for level in self._levels for part in level.parts())]

    def _per_extent(self, layout: Layout) -> int:
        count = super()._per_extent(layout)
        for level in self._levels:
            if level.capacity_bytes is not None:  # room for some extents in each
                count = min(count, level.capacity_bytes // 4 // layout.nbytes)
        return count if count >= 4 else 1

    def _extent_bytes_for(self, layout: Layout) -> int:
        return round_up(self._per_extent(layout) * layout.nbytes)

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers, those of the levels and of the mover counted."""
        below = max(level.buffer_bytes(layout) for level in self._levels)
        return max(super().buffer_bytes(layout), below) + self._extent_bytes_for(layout)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states both levels hold together, None if unbounded."""
        extent_bytes = self._extent_bytes_for(layout)
        nbytes = _room(self, extent_bytes)
        return None if nbytes is None else nbytes // extent_bytes * self._per_extent(layout)

    def check(self) -> None:
        """Raise StoreError if a level cannot be used."""
        for level in self._levels:
            level.check()

    def notes(self) -> list[str]:
        """Return what moved between the levels, and what the levels say."""
        found = [note for level in self._levels for note in level.notes()]
        if self._cascade is not None:
            found.insert(0, self._cascade.moves())
        return found

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """Open both levels as one medium."""
        unit = PAGE if layout.varied else extent_bytes
        upper, lower = (_room(level, unit) for level in self._levels)
        assert upper is not None
        if upper < extent_bytes:
            raise StoreError(
                f"tier {self.name!r}: the capacity of its upper level, "
                f"{self._levels[0].capacity_bytes} bytes < {extent_bytes} bytes of one state; "
                "raise it, or name the lower level alone"
            )
        if lower is not None:  # in whole extents of each, or pages
            self.capacity_bytes = upper + lower
        opened: list[Medium] = []
        try:
            for level in self._levels:
                opened.append(level.lend(layout, extent_bytes))
                self._lent.append(level)
            self._cascade = Levels(opened[0], opened[1], upper, lower, extent_bytes)
        except BaseException as error:
            for medium in opened:
                medium.close()
            self._give_back()
            if isinstance(error, RuntimeError):  # no thread
                raise StoreError(
                    f"tier {self.name!r} cannot be used: {error}; it needs a thread between its "
                    "levels, and two more"
                ) from error
            raise
        return self._cascade

    def _give_back(self) -> None:
        self._cascade = None
        while self._lent:
            self._lent[-1].close()  # not open itself, but a folder may be made for its medium
            self._lent.pop()


def _room(store: StreamedStore, extent_bytes: int) -> int | None:
    """Return how many bytes a store holds in whole extents, None if unbounded."""
    if isinstance(store, CascadeStore):
        upper, lower = (_room(level, extent_bytes) for level in store._levels)
        return None if upper is None or lower is None else upper + lower
    capacity = store.capacity_bytes
    return None if capacity is None else capacity // extent_bytes * extent_bytes
