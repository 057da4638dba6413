"""The room that a store has on its medium."""

from __future__ import annotations

from collections.abc import Callable

from .base import StoreStats
from .extents import Extent, SlotPool
from .medium import warn_full


class Space:
    """The slots of a medium, counted in a store's statistics; warns once that all are taken.

    Parameters
    ----------
    name : str
        Of the store, for messages.
    extent_bytes : int
        Of a slot; also an attribute.
    capacity_bytes : int or None
    stats : StoreStats
    freed : callable, optional
        Told of each slot whose bytes are not needed any more.
    """

    def __init__(
        self,
        name: str,
        extent_bytes: int,
        capacity_bytes: int | None,
        stats: StoreStats,
        freed: Callable[[int], None] | None,
    ) -> None:
        self.extent_bytes = extent_bytes
        self._name, self._capacity_bytes = name, capacity_bytes
        self._stats = stats
        self._freed = freed
        self._slots = SlotPool(None if capacity_bytes is None else capacity_bytes // extent_bytes)
        self._warned = False

    def take(self) -> int | None:
        """Return a slot; None if the medium is full."""
        if self._slots.left <= 0:
            self._stats.refused_full += 1
            if not self._warned:
                self._warned = True
                warn_full(
                    f"tier {self._name!r}",
                    "no space is left"
                    if self._slots.closed
                    else f"its capacity of {self._capacity_bytes} bytes is used",
                )
            return None
        slot = self._slots.take()
        stats = self._stats
        stats.stored_bytes += self.extent_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        return slot

    def give_back(self, extent: Extent) -> None:
        """Take the slot of an extent back, unless the medium had no room for it."""
        if not extent.homeless:
            self._slots.give(extent.slot)
            if self._freed is not None:
                self._freed(extent.slot)
        self._stats.stored_bytes -= self.extent_bytes

    def refused(self, extent: Extent) -> None:
        """Say that the medium had no room for an extent: what it holds now is its capacity."""
        extent.homeless = True
        self._slots.close()
