"""Where the extents of a cascade are: in which level, at which slot, and who is at them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from .extents import SlotPool
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

    def __init__(self, above: int) -> None:
        self.where = Where.ABOVE
        self.above = above  # its slots in the levels
        self.below = -1
        self.nbytes = 0
        self.moving = False
        self.readers = 0
        self.gone = False  # freed while it was moved
        self.stays = False  # not to be brought up: that failed, or it was read from below


@dataclass(slots=True)
class Move:
    """An extent on its way from one level to the other."""

    place: Place
    sinks: bool
    start: int  # its slots, in the level it leaves and in the other
    stop: int
    was_read: bool = False


class Level:
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
        """Whether extents can still be moved here, as far as the last moves have shown."""
        return self.failures < _FAILURES

    def give_after(self, slot: int, error: Exception) -> None:
        """Take a slot back that could not be written; none if the level is full."""
        if is_full(error):
            self.slots.close()
        else:
            self.slots.give(slot)
