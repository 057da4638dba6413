"""Where the extents of a cascade are: in which level, at which slot, and who is at them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from .extents import Room
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
