"""Extents: the pieces in which states travel, which of them holds each state, and where they lie.

`DurableStore`, `StreamedStore` and what is built on them share these; an extent of a
durable store is a file.  All of it belongs to the computing thread.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ..states.layout import Array
from ..support.step_sets import StepMap


class TransferState(Enum):
    """Where a transfer, of an extent or of a batch of a durable store, stands."""

    FILLING = 1
    QUEUED = 2
    DONE = 3
    FAILED = 4


class Extent:
    """Some states on their way to, in, or back from the medium."""

    __slots__ = (
        "arrays",
        "buffer",
        "cancelled",
        "carried",
        "checksum",
        "error",
        "filled",
        "first",
        "homeless",
        "landing",
        "live",
        "nbytes",
        "number",
        "offsets",
        "previous",
        "read_state",
        "serial",
        "shapes",
        "slot",
        "state",
    )

    def __init__(self, number: int, slot: int, first: int, previous: Extent | None) -> None:
        self.number = number
        self.slot = slot
        self.first = first  # key it began with
        self.previous = previous
        self.state = TransferState.FILLING
        self.read_state: TransferState | None = None
        self.buffer: int | None = None  # number of the staging buffer that still holds it
        self.landing: Array | None = None
        self.arrays: Sequence[Array] | None = None
        self.offsets: Sequence[int] = ()  # of the arrays
        self.shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]] | None = None  # if they vary
        self.checksum = 0
        self.filled = 0
        self.live = 0
        self.serial = 0  # the order in which writes were done
        self.nbytes = 0
        self.error = ""
        self.carried: object = None  # what its carrier knows its write by
        self.cancelled = False  # its write need not be made; the carrier's threads look at it
        self.homeless = False  # its write found no room: there is nothing at its slot


class Numbered(Protocol):
    """What an index holds."""

    number: int


Held = TypeVar("Held", bound=Numbered)


class Index(Generic[Held]):
    """Which extent holds each key, and at which place in it.

    Parameters
    ----------
    places : int
        More than the last place of any extent.

    Attributes
    ----------
    extents : dict
        By number; those without a key stay until `forget`.

    Examples
    --------
    >>> index = Index(4)
    >>> index.enter(70, Extent(0, 0, 70, None), 3)
    >>> extent, place = index.find(70)
    >>> extent.number, place, index.find(71), len(index)
    (0, 3, None, 1)
    """

    __slots__ = ("_keys", "_places", "extents")

    def __init__(self, places: int) -> None:
        self.extents: dict[int, Held] = {}
        self._keys = StepMap()  # key -> number of the extent * places + place in it
        self._places = places

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return self._keys.get(key) is not None

    def enter(self, key: int, extent: Held, place: int) -> None:
        """Say that an extent holds `key`, from now on instead of any other."""
        self.extents[extent.number] = extent
        self._keys[key] = extent.number * self._places + place

    def find(self, key: int) -> tuple[Held, int] | None:
        """Return the extent that holds `key` and the place in it, None if there is none."""
        entry = self._keys.get(key)
        if entry is None:
            return None
        return self.extents[entry // self._places], entry % self._places

    def pop(self, key: int) -> Held | None:
        """Forget `key`; return the extent that held it, None if there was none."""
        entry = self._keys.pop(key)
        return None if entry is None else self.extents[entry // self._places]

    def forget(self, extent: Held) -> None:
        """Forget an extent, whose keys are gone."""
        del self.extents[extent.number]


class Room:
    """The bytes that may lie in a place, and numbers for what lies there.

    The number given back last is taken first.

    Parameters
    ----------
    most_bytes : int or None
        How many there are; None if unbounded.

    Attributes
    ----------
    closed : bool
        Whether the place was found to be full: the most that it held is all it takes.

    Examples
    --------
    >>> room = Room(300)
    >>> room.take(100), room.take(150), room.left, room.fits(100)
    (0, 1, 50, False)
    >>> room.give(0), room.take(60), room.left
    (100, 0, 90)
    """

    __slots__ = ("_free", "_held", "_next", "_peak", "_taken", "closed", "most_bytes")

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes
        self._held: dict[int, int] = {}  # the bytes of each number
        self._free: list[int] = []
        self._next = self._taken = self._peak = 0
        self.closed = False

    @property
    def left(self) -> int:
        """How many bytes can be taken; many if unbounded."""
        return (1 << 62 if self.most_bytes is None else self.most_bytes) - self._taken

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes can be taken."""
        return self.most_bytes is None or self._taken + nbytes <= self.most_bytes

    def take(self, nbytes: int) -> int:
        """Return a number for so many bytes, which must fit."""
        if self._free:
            number = self._free.pop()
        else:
            number, self._next = self._next, self._next + 1
        self._held[number] = nbytes
        self._taken += nbytes
        self._peak = max(self._peak, self._taken)
        return number

    def give(self, number: int) -> int:
        """Give a number back; return how many bytes it had."""
        nbytes = self._held.pop(number)
        self._taken -= nbytes
        self._free.append(number)
        return nbytes

    def close(self) -> None:
        """Say that the place is full."""
        self.most_bytes = self._peak
        self.closed = True


class PagePool:
    """The pages of a file, taken and given back in runs.

    Parameters
    ----------
    most : int or None
        How many there are; None if unbounded.

    Examples
    --------
    >>> pool = PagePool(6)
    >>> pool.take(2), pool.take(1), pool.take(2), pool.take(2)
    ([(0, 2)], [(2, 1)], [(3, 2)], None)
    >>> pool.give([(0, 2)]); pool.give([(3, 2)])
    >>> pool.take(5)
    [(3, 3), (0, 2)]
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._free: list[tuple[int, int]] = []  # first page, pages; ascending, none adjacent
        self._end = self._written = 0  # from here on none is taken, and none ever was

    def close(self) -> None:
        """Say that the file is full: no page is taken any more that never was."""
        self._most = self._written

    def take(self, count: int) -> list[tuple[int, int]] | None:
        """Return the first page and the length of each run; None if too few pages are free.

        One run if any is long enough, the shortest such; else the longest first.
        """
        if not count:
            return []
        left = None if self._most is None else self._most - self._end
        fitting = [run for run in self._free if run[1] >= count]
        if fitting:
            return [self._cut(min(fitting, key=lambda run: run[1]), count)]
        if left is None or left >= count:
            return [self._grown(count)]
        if left + sum(length for _, length in self._free) < count:
            return None
        taken = []
        for run in sorted([*self._free, (self._end, left)], key=lambda run: -run[1]):
            length = min(count, run[1])
            if length:
                taken.append(self._grown(length) if run[0] == self._end else self._cut(run, length))
            count -= length
        return taken

    def _cut(self, run: tuple[int, int], count: int) -> tuple[int, int]:
        """Take pages from the beginning of a free run."""
        (first, length), at = run, self._free.index(run)
        self._free[at : at + 1] = [(first + count, length - count)] if length > count else []
        return first, count

    def _grown(self, count: int) -> tuple[int, int]:
        """Take pages from the end."""
        self._end += count
        self._written = max(self._written, self._end)
        return self._end - count, count

    def give(self, runs: Sequence[tuple[int, int]]) -> None:
        """Give pages back."""
        free = self._free
        for first, length in runs:
            start, stop = first, first + length
            at = bisect(free, (start, 0))
            if at < len(free) and free[at][0] == stop:
                stop += free.pop(at)[1]
            if at and sum(free[at - 1]) == start:
                at -= 1
                start = free.pop(at)[0]
            if stop == self._end:
                self._end = start
            else:
                free.insert(at, (start, stop - start))
