"""Pinned host memory in slots of one state each, taken from the system block by block."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ...errors import BudgetError
from ...states.layout import Layout
from ..tensors.streams import Event, Streams

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 20  # most pinned memory that is taken at once
_FIRST_SLOTS = 64


def growth(size: int, capacity: int | None, *, rounded: bool) -> Iterator[int]:
    """Yield how many slots each block of memory has, within a capacity.

    Parameters
    ----------
    size : int
        Bytes of a slot.
    capacity : int or None
        Most bytes of all blocks; None if unbounded.
    rounded : bool
        Whether memory comes in powers of two, as PyTorch hands out what is
        pinned: then a block takes what it is rounded up to, and of that at
        least seven eighths are slots, while the capacity allows.

    Examples
    --------
    >>> list(growth(40, 400, rounded=False))
    [10]
    >>> list(growth(40, 400, rounded=True))
    [6, 3]
    """
    slots = 0
    left = capacity
    while True:
        # Twice as many each time: few allocations, and none for nothing.
        count = max(1, min(_BLOCK_BYTES // size, max(_FIRST_SLOTS, slots)))
        nbytes = count * size
        if rounded:
            nbytes = _power_of_two(nbytes)
            while 8 * (nbytes // size) * size < 7 * nbytes:
                nbytes *= 2
            while left is not None and nbytes > left:
                nbytes //= 2
            count = nbytes // size
        elif left is not None:
            count = min(count, left // size)
            nbytes = count * size
        if count < 1:
            return
        if left is not None:
            left -= nbytes
        slots += count
        yield count


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (number - 1).bit_length()


@dataclass(slots=True)
class Slot:
    """Pinned memory for one state."""

    memory: Tensor
    used: Event | None = None  # of the last copy that touched it


def slots_in(capacity_bytes: int | None, nbytes: int, *, rounded: bool) -> int | None:
    """Return how many slots of so many bytes fit, None if unbounded."""
    if capacity_bytes is None:
        return None
    return sum(growth(nbytes, capacity_bytes, rounded=rounded))


class PinnedMemory:
    """The slots of an open store.

    Parameters
    ----------
    name : str
        Of the store, for messages.
    layout : Layout
    streams : Streams
        Whose `host` memory it takes.
    capacity_bytes : int or None
    rounded : bool
        As for `growth`.

    Attributes
    ----------
    free : deque of Slot
    most : int or None
        How many slots there can be, None if unbounded; fewer once memory has run out.

    Raises
    ------
    RuntimeError, MemoryError
        If there is no memory for a first block.

    Notes
    -----
    Guarded by the lock of the store.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        streams: Streams,
        capacity_bytes: int | None,
        *,
        rounded: bool,
    ) -> None:
        self.free: deque[Slot] = deque()
        self.most = slots_in(capacity_bytes, layout.nbytes, rounded=rounded)
        self._name, self._layout, self._streams = name, layout, streams
        self._taken = 0  # slots so far
        self._growing = growth(layout.nbytes, capacity_bytes, rounded=rounded)
        self.grow()

    @property
    def left(self) -> int | None:
        """How many slots are free or not taken from the system yet; None if unbounded."""
        return None if self.most is None else len(self.free) + self.most - self._taken

    def grow(self) -> bool:
        """Take another block of memory; return whether there was any to take."""
        size, count = self._layout.nbytes, next(self._growing, 0)
        if count < 1:
            return False
        try:
            memory = self._streams.host(count * size)
        except (RuntimeError, MemoryError) as error:
            if not self._taken:
                raise
            logger.warning("tier %r takes no more memory: %s", self._name, error)
            self.most, self._growing = self._taken, iter(())
            return False
        for k in range(count):
            self.free.append(Slot(memory[k * size : (k + 1) * size]))
        self._taken += count
        return True


def require_slots(
    name: str, capacity_bytes: int | None, nbytes: int, least: int, *, rounded: bool
) -> None:
    """Raise BudgetError if a capacity holds fewer than `least` states of so many bytes."""
    slots = slots_in(capacity_bytes, nbytes, rounded=rounded)
    if slots is None or slots >= least:
        return
    enough = (nbytes * k for k in itertools.count(1))
    needed = next(n for n in enough if (slots_in(n, nbytes, rounded=rounded) or 0) >= least)
    raise BudgetError(
        f"tier {name!r}: its capacity of {capacity_bytes} bytes < "
        f"{needed} bytes needed for {least} states; raise it"
    )
