"""Extents on their way back from the medium, and the memory that they are read into."""

from __future__ import annotations

from collections import deque

from .arena import LandingPool
from .base import StoreStats, TransferRecord
from .carrier import Carrier
from .extents import Extent, TransferState


class Landings:
    """The reads of an open store.

    Parameters
    ----------
    carrier : Carrier
    pool : LandingPool
    stats, transfers
        Of the store.
    """

    def __init__(
        self,
        carrier: Carrier,
        pool: LandingPool,
        stats: StoreStats,
        transfers: deque[TransferRecord],
    ) -> None:
        self._carrier, self._pool = carrier, pool
        self._stats, self._transfers = stats, transfers
        self._last: Extent | None = None  # that a state was taken from

    def queue(self, extent: Extent) -> None:
        """Queue a read of an extent, unless it is in memory, on its way, or of no use."""
        if extent.buffer is not None or extent.read_state is not None or not extent.live:
            return
        if extent.state is TransferState.FAILED:  # as its error says
            extent.read_state = TransferState.FAILED
            return
        extent.read_state = TransferState.QUEUED
        try:
            extent.landing = self._pool.take(extent.nbytes)
        except (OSError, MemoryError) as error:
            extent.read_state, extent.error = TransferState.FAILED, f"read failed: {error}"
            return
        self._carrier.queue_read(extent, extent.landing)

    def landed(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        """Record the result of a read, which the carrier reports."""
        # Interrupted it is called again: see `Traffic`.
        if extent.read_state is not TransferState.QUEUED:
            return
        if error is not None:
            extent.error = f"read failed: {error}"
        extent.read_state = TransferState.DONE if error is None else TransferState.FAILED
        if error is None:
            self._stats.bytes_read += extent.nbytes
        if error is None or extent.live:  # not of one that was given up: it took no time
            self._note(extent, began, ended)

    def _note(self, extent: Extent, began: float, ended: float) -> None:
        self._transfers.append(TransferRecord("read", extent.first, began, ended, extent.nbytes))

    def cancel(self, extent: Extent) -> None:
        """Have a read that is not needed any more fail where it can.

        What it lands in stays in use until then, unless the read has not begun: no other
        memory is kept idle beside it.
        """
        self._carrier.cancel_read(extent)
        extent.landing = None  # the carrier's
        self._pool.trim()

    def took(self, extent: Extent) -> None:
        """Note that a state is taken from an extent: others that were read may go.

        The one before stays, as its states are needed next.
        """
        last, self._last = self._last, extent
        if (
            last is not None
            and last is not extent
            and last is not extent.previous
            and last.read_state is TransferState.DONE
        ):
            # Done with, though its keys may live on: else reading without
            # dropping would bring the whole tier back into memory.
            last.landing = last.read_state = None
