"""Extents: the pieces in which states travel, which of them holds each state, and where they lie.

`DurableStore`, `StreamedStore` and what is built on them share these; an extent of a
durable store is a file.  All of it belongs to the computing thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Generic, Protocol, TypeVar

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
        "previous",
        "read_state",
        "serial",
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


class SlotPool:
    """The numbers of a medium's extents: the one given back last is taken first.

    Parameters
    ----------
    most : int or None
        How many there are; None if unbounded.

    Attributes
    ----------
    closed : bool
        Whether the medium was found to be full: no number that was never written is
        taken any more.

    Examples
    --------
    >>> pool = SlotPool(3)
    >>> pool.take(), pool.take(), pool.left
    (0, 1, 1)
    >>> pool.give(0); pool.close(); pool.take(), pool.left
    (0, 0)
    """

    __slots__ = ("_free", "_most", "_next", "closed")

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._free: list[int] = []
        self._next = 0
        self.closed = False

    @property
    def most(self) -> int | None:
        """How many numbers there are, None if unbounded."""
        return self._most

    @property
    def left(self) -> int:
        """How many numbers can be taken; many if unbounded."""
        fresh = 1 << 62 if self._most is None else self._most - self._next
        return len(self._free) + fresh

    def take(self) -> int:
        """Return a number; there must be one left."""
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def give(self, slot: int) -> None:
        """Give a number back."""
        self._free.append(slot)

    def close(self) -> None:
        """Say that the medium is full: what it holds now is its capacity."""
        self._most = self._next
        self.closed = True
