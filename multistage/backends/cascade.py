"""One tier made of two: what the upper has no room for moves on to the lower.

Whole extents move, not states: a lower level that takes long per request gets
few large ones, and the checksum made when an extent was first written is the
one its last read is verified with, whatever way it went meanwhile.

The oldest extents go down, since they are wanted last; when the reverse sweep
frees room above, the youngest of those below come up again, so that the lower
level works all the time and is waited for little.

Who does what.  The writer thread writes to the upper level only.  The reader
reads wherever an extent is.  The *mover* takes extents down and up.  The
computing thread says which extents are wanted no more.  Where an extent is,
and who is at it, is changed under the condition `_changed`; bytes move without
it, and each level is written by one thread at a time and read by one at a time.

* A read of an extent that is being moved waits for the move, and reads it where
  it is then.  What is being read is not moved.
* An extent freed while it is being moved gives its slots back when that is over.
  Its number may mean another extent by then: the mover knows it as an object.
* A large extent comes in pieces.  The last one begun may not be whole yet, so
  it is not moved until the next is begun.
* The writer waits for room above if the mover can still make some.  Meanwhile
  the store's queue fills and it refuses, as any slow tier does.

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
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from ..errors import ArgumentError, StoreError
from ..states.layout import Array, Layout
from .arena import pages, round_up
from .base import Store, require_distinct
from .medium import Medium, is_full
from .streamed import StreamedStore

_FAILURES = 3  # in a row, then nothing more is moved that way
_SPARE_PART = 4  # extents go down from when less than this part is free: writes seldom wait


class CascadeStore(StreamedStore):
    """Checkpoints in one store, and beyond its capacity in a second one below it.

    Parameters
    ----------
    upper : StreamedStore
        Takes every state first: memory, a NUMA node, files.  Its capacity must
        be given.  Closed, and used by nobody else.
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
            if not isinstance(level, StreamedStore):
                raise ArgumentError(
                    f"the {what} level of a cascade is a {type(level).__name__}; it must be a "
                    "store of memory, files or objects"
                )
            if not level.exact:
                raise ArgumentError(
                    f"the {what} level {level.name!r} of a cascade loses information, and which "
                    "states went there nobody could tell; compress it by blosc"
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
        self._cascade: _Cascade | None = None
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
        slots = _slots(self, self._extent_bytes_for(layout))
        return None if slots is None else slots * self._per_extent(layout)

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
        upper, lower = (_slots(level, extent_bytes) for level in self._levels)
        assert upper is not None
        if upper < 1:
            raise StoreError(
                f"tier {self.name!r}: the capacity of its upper level, "
                f"{self._levels[0].capacity_bytes} bytes < {extent_bytes} bytes of one state; "
                "raise it, or name the lower level alone"
            )
        if lower is not None:  # in whole extents of each
            self.capacity_bytes = (upper + lower) * extent_bytes
        opened: list[Medium] = []
        try:
            for level in self._levels:
                opened.append(level.lend(layout, extent_bytes))
                self._lent.append(level)
            self._cascade = _Cascade(opened[0], opened[1], upper, lower, extent_bytes)
        except BaseException:
            for medium in opened:
                medium.close()
            self._give_back()
            raise
        return self._cascade

    def _freed(self, slot: int) -> None:
        if self._cascade is not None:
            self._cascade.free(slot)

    def _give_back(self) -> None:
        self._cascade = None
        while self._lent:
            self._lent[-1].close()  # not open itself, but a folder may be made for its medium
            self._lent.pop()


def _slots(store: StreamedStore, extent_bytes: int) -> int | None:
    """Return how many extents a store holds, None if unbounded."""
    if isinstance(store, CascadeStore):
        upper, lower = (_slots(level, extent_bytes) for level in store._levels)
        return None if upper is None or lower is None else upper + lower
    return None if store.capacity_bytes is None else store.capacity_bytes // extent_bytes


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


class _Level:
    """A medium, its slots, and the right to write to and read from it."""

    def __init__(self, medium: Medium, most: int | None) -> None:
        self.medium = medium
        self.reading, self.writing = threading.Lock(), threading.Lock()
        self.failures = 0  # of moves to here, in a row
        self._most = most
        self._free: list[int] = []
        self._next = 0

    @property
    def left(self) -> int:
        """How many slots can be taken; many if it is unbounded."""
        fresh = 1 << 62 if self._most is None else self._most - self._next
        return len(self._free) + fresh

    @property
    def spare(self) -> int:
        """How many slots should be left."""
        return max(1, (self._most or 0) // _SPARE_PART)

    @property
    def works(self) -> bool:
        return self.failures < _FAILURES

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def give_after(self, slot: int, error: Exception) -> None:
        """Take a slot back that could not be written; none if the level is full."""
        if is_full(error):
            self._most = self._next
        else:
            self._free.append(slot)


class _Cascade:
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
        self._nested = lower if isinstance(lower, _Cascade) else None
        self._buffer = pages(extent_bytes)
        # The computing thread takes the lock itself: entering a Condition, which
        # is Python code, it could be interrupted when it has the lock already.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._places: dict[int, _Place] = {}
        self._above: OrderedDict[_Place, None] = OrderedDict()  # the oldest first
        self._below: OrderedDict[_Place, None] = OrderedDict()
        self._latest: _Place | None = None  # perhaps still being written
        self._short = False  # the writer waits for room above
        self._rising = False  # nothing was written since the last read
        self._busy = False  # the mover is at an extent
        self._closing = False
        self._mover = threading.Thread(target=self._move, name="multistage-mover", daemon=True)
        self._mover.start()

    def moves(self) -> str:
        """Return a sentence on what was moved."""
        said = f"{self.sunk} extents moved down, {self.risen} brought up again"
        return f"{said}, {self.failed} moves failed" if self.failed else said

    # ------------------------------------------------------ the store's threads

    def write(self, slot: int, offset: int, data: Array) -> None:
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
            place = self._latest = self._places[slot] = _Place(upper.take())
            self._above[place] = None
            self._changed.notify_all()  # one slot fewer may be too few for the mover

    def read(self, slot: int, data: Array) -> None:
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
            self._upper.give(place.above)
        if place in self._below:
            del self._below[place]
            self._lower.give(place.below)
            if self._nested is not None:
                self._nested.free(place.below)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._mover.join()
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
        return self._busy or (movable > 0 and lower.works and lower.left > 0)

    def _next(self) -> _Place | None:
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

    def _move(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                if self._closing:
                    return
                place = self._next()
                assert place is not None
                place.moving = True
                self._busy, sinks = True, place.where is _Where.ABOVE
                source, target = (self._upper, self._lower) if sinks else (self._lower, self._upper)
                start, stop = place.above if sinks else place.below, target.take()
            data = self._buffer[: place.nbytes]
            failed_read = failed_write = None
            try:
                with source.reading:
                    source.medium.read(start, data)
            except Exception as error:  # whatever a medium raises: checkpoints are lost, not runs
                failed_read = error
            if failed_read is None:
                try:
                    with target.writing:
                        target.medium.write(stop, 0, data)
                except Exception as error:
                    failed_write = error
            with self._changed:
                self._moved(place, sinks, stop, failed_read, failed_write)
                self._changed.notify_all()

    def _moved(
        self,
        place: _Place,
        sinks: bool,
        stop: int,
        failed_read: Exception | None,
        failed_write: Exception | None,
    ) -> None:
        """Enter what became of a move.  Holds the lock."""
        target = self._lower if sinks else self._upper
        place.moving = self._busy = False
        if failed_read is not None:
            self.failed += 1
            target.give(stop)
            if sinks:
                self._release(place)
                place.where = _Where.LOST
            else:
                place.stays = True
        elif failed_write is not None:
            self.failed += 1
            target.failures += 1
            target.give_after(stop, failed_write)
        else:
            target.failures = 0
            self._release(place)  # where it came from
            if sinks:
                self.sunk += 1
                place.where, place.below = _Where.BELOW, stop
                self._below[place] = None
            else:
                self.risen += 1
                place.where, place.above = _Where.ABOVE, stop
                self._above[place] = None
                self._above.move_to_end(place, last=False)  # older than all that never sank
        if place.gone:
            self._release(place)
