"""One tier made of two: what the upper has no room for moves on to the lower.

Whole extents move, not states: a lower level that takes long per request gets
few large ones, and the checksum made when an extent was first written is the
one its last read is verified with, whatever way it went meanwhile.

The oldest extents go down, since they are needed last; when the reverse sweep
frees room above, the youngest of those below come up again, so that the lower
level works all the time and is waited for little.

The two levels are one medium (`Levels`): the store writes to the upper one and
reads wherever an extent is, and a mover takes extents down and up in the background.

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

from collections.abc import Sequence
from typing import TypeGuard

from ..errors import ArgumentError, StoreError
from ..states.layout import Layout
from .arena import PAGE, round_up
from .base import Store, require_distinct
from .levels import Levels
from .medium import Medium
from .streamed import StreamedStore


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
