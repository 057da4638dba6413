"""The room that a store has on its medium."""

from __future__ import annotations

from .arena import round_up
from .base import StoreStats
from .extents import Extent, Room
from .medium import warn_full


class Space:
    """The room on a medium, counted in a store's statistics; warns once that all is taken.

    Parameters
    ----------
    name : str
        Of the store, for messages.
    capacity_bytes : int or None
    stats : StoreStats
    """

    def __init__(self, name: str, capacity_bytes: int | None, stats: StoreStats) -> None:
        self._name, self._capacity_bytes = name, capacity_bytes
        self._stats = stats
        self._room = Room(capacity_bytes)
        self._warned = False

    def take(self, nbytes: int) -> int | None:
        """Return a number for an extent of whole pages; None if the medium is full."""
        if not self._room.fits(nbytes):
            self._stats.refused_full += 1
            if not self._warned:
                self._warned = True
                warn_full(
                    f"tier {self._name!r}",
                    "no space is left"
                    if self._room.closed
                    else f"its capacity of {self._capacity_bytes} bytes is used",
                )
            return None
        stats = self._stats
        stats.stored_bytes += nbytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        return self._room.take(nbytes)

    def give_back(self, extent: Extent) -> None:
        """Take the room of an extent back, unless the medium had none for it."""
        if extent.homeless:
            self._stats.stored_bytes -= round_up(extent.nbytes)
        else:
            self._stats.stored_bytes -= self._room.give(extent.slot)

    def refused(self, extent: Extent) -> None:
        """Say that the medium had no room for an extent: what it holds now is its capacity."""
        extent.homeless = True
        self._room.close()
