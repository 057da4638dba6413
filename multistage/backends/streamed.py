"""The store behind every tier: a writer thread, a reader thread, extents of states.

States travel in *extents*, the unit of transfer, checksum and space.

small states (at least four fit in an extent)
    are copied into the current extent by the computing thread, a memcpy of
    microseconds; only a full extent wakes the writer.  They can be read back
    from the extent's buffer until it is reused.  A read brings a whole extent
    and the one below it, since checkpoints come back in descending order.
large states
    have an extent each and are taken by reference: the writer copies them
    chunk by chunk through one page-aligned buffer.

A `Carrier` moves the extents in the background: threads of the C core for
files, two Python threads for any other medium.  What an open store holds and has
in flight is its `Traffic`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ArgumentError, StoreError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield, whole
from .arena import PAGE, landing_bytes, round_up, whole_huge
from .base import BaseStore, StoreStats, TransferRecord
from .carrier import Carrier, ThreadCarrier
from .lifetimes import Hold
from .medium import Medium
from .traffic import BUFFERS, Traffic

_SMALL = 4  # states per extent from which on they are coalesced
_EXTENT_BYTES = 2 << 20
_CHUNK_BYTES = 4 << 20


class StreamedStore(BaseStore):
    """A slow tier on any medium; see `FileStore` and `MemoryStore`.

    Parameters
    ----------
    name : str
    open_medium : callable or None
        `open_medium() -> Medium`; called when the store opens, and by `lend`.  None in a
        subclass that overrides `medium`.
    capacity_bytes : int or None
        Space on the medium, in whole extents; None if unbounded.
    buffer_bytes : int
        Page-aligned buffers for transfers.
    queue_depth : int
        Writes of large states that may be waiting or in flight.
    bounces : int
        Buffers that large states are gathered in on their way out.
    extent_bytes, chunk_bytes : int
        Most bytes of an extent of small states, and of one write of a large
        one: more where each request takes long.

    Notes
    -----
    For one computing thread.  `put` with `block`, `wait_written`, `get` and
    `close` may block; nothing else does.
    """

    def __init__(
        self,
        name: str,
        open_medium: Callable[[], Medium] | None = None,
        *,
        capacity_bytes: int | None = None,
        buffer_bytes: int = 8 << 20,
        queue_depth: int = 2,
        bounces: int = 1,
        extent_bytes: int = _EXTENT_BYTES,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes={capacity_bytes} must not be negative")
        if buffer_bytes < 0:
            raise ArgumentError(f"buffer_bytes={buffer_bytes} must not be negative")
        if queue_depth < 1:
            raise ArgumentError(f"queue_depth={queue_depth} must be at least 1")
        self.name = name
        self.queue_depth = queue_depth
        self.capacity_bytes = capacity_bytes
        self.stats = StoreStats()
        self.transfers: deque[TransferRecord] = deque(maxlen=100_000)
        self._open_medium = open_medium
        self._buffer_bytes = buffer_bytes
        self._bounces = bounces
        self._most_extent_bytes = extent_bytes
        self._chunk_bytes = chunk_bytes
        self._carrier: Carrier | None = None
        self._traffic: Traffic | None = None
        self._hold = Hold(name)

    # ------------------------------------------------------------------- life

    def _per_extent(self, layout: Layout) -> int:
        """Return how many states share an extent, 1 for large ones."""
        if layout.varied:
            return 1
        extent = min(self._most_extent_bytes, self._buffer_bytes // (2 * BUFFERS))
        if self.capacity_bytes is not None:
            extent = min(extent, self.capacity_bytes // 4)
        if extent >= 64 * PAGE:  # or huge pages would make the buffers exceed their bytes
            extent -= extent % PAGE
        count = extent // layout.nbytes
        return count if count >= _SMALL else 1

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers held for such states, idle ones included."""
        count = self._per_extent(layout)
        if count > 1:
            return 2 * whole_huge(BUFFERS * round_up(count * layout.nbytes))
        return whole_huge(self._bounce_bytes(layout)) + landing_bytes(round_up(layout.nbytes))

    def _bounce_bytes(self, layout: Layout) -> int:
        """Return the bytes that a large state passes through on its way out."""
        return self._bounces * min(self._chunk_bytes // self._bounces, round_up(layout.nbytes))

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states of `layout` fit on the medium, None if unbounded."""
        if self.capacity_bytes is None:
            return None
        count = self._per_extent(layout)
        return self.capacity_bytes // round_up(count * layout.nbytes) * count

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """Return a fresh medium for extents of states of `layout`; `open` and `lend` call it.

        Parameters
        ----------
        layout : Layout
        extent_bytes : int
            Of the largest.

        Raises
        ------
        OSError, StoreError
            If there can be none.
        """
        assert self._open_medium is not None
        return self._open_medium()

    def _give_back(self) -> None:
        """Give back what `medium` took besides the medium itself."""

    def _new_carrier(self, layout: Layout, extent_bytes: int) -> Carrier:
        """Return what moves this store's extents."""
        return ThreadCarrier(self.medium(layout, extent_bytes), verify=self.exact)

    def lend(self, layout: Layout, extent_bytes: int) -> Medium:
        """Return a fresh medium for a store that is built on this one.

        That store closes the medium, then this one.

        Raises
        ------
        OSError, StoreError
            If there can be none, or the store is open or lent already.
        """
        with Shield(up=True):  # raised after, when the medium is its borrower's to close
            self._hold.take()
            try:
                return self.medium(layout, extent_bytes)
            except BaseException:
                self.close()
                raise

    def open(self, layout: Layout) -> None:
        """Allocate buffers and start the threads.

        Raises
        ------
        StoreError
            If the tier cannot be used, or is open.
        """
        whole(partial(self._take, layout), self.close)

    def _take(self, layout: Layout) -> None:
        self._hold.take()
        try:
            self._open(layout)
        except BaseException:
            self.close()
            raise

    def _open(self, layout: Layout) -> None:
        count = self._per_extent(layout)
        extent_bytes = round_up(count * layout.nbytes)
        try:
            carrier = self._new_carrier(layout, extent_bytes)
        except (OSError, MemoryError) as error:
            raise StoreError(
                f"tier {self.name!r} cannot be used: {error}; choose a folder that can be written"
            ) from error
        self._carrier = carrier  # from here on `close` gives everything back
        self.stats = StoreStats()
        self.transfers.clear()
        self._traffic = Traffic(
            self.name,
            carrier,
            layout,
            count,
            self.capacity_bytes,
            self.stats,
            self.transfers,
        )
        try:
            self._traffic.start(self._bounce_bytes(layout))
        except (OSError, MemoryError, RuntimeError) as error:  # no memory, no thread
            raise StoreError(
                f"tier {self.name!r} cannot be used: {str(error) or 'no memory'}; it needs "
                f"{self.buffer_bytes(layout)} bytes of buffers and two threads"
            ) from error

    def close(self) -> None:
        """Stop the threads, give back memory and files.  May be called twice.

        Interrupted, it can be called again and does the rest.  In a forked
        child it leaves threads and files to the parent, and the store can be
        opened again.
        """
        with Shield(up=True):
            if self._hold.taken:
                self._close()

    def _close(self) -> None:
        failure: Exception | None = None
        if self._carrier is not None:
            if not self._hold.foreign:
                try:
                    with contextlib.suppress(OSError):  # what was in it is needed no more
                        self._carrier.close()
                except Exception as error:  # its finalizer tries once more
                    failure = error
            self._carrier = self._traffic = None
        # Not if it was interrupted above: its threads may still write there.
        self._give_back()
        self._hold.give_back()
        if failure is not None:
            raise failure

    # ----------------------------------------------------------------- states

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        traffic = self._traffic  # without a call: a put of a small state takes but a microsecond
        assert traffic is not None
        return traffic.put(key, arrays, block, self.queue_depth)

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        return self._opened().wait_written(key)

    def cancel(self, key: int) -> None:
        """Give up the write of a large state, at its next chunk; see `Store.cancel`."""
        self._opened().cancel(key)

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds; see `Store.ended`."""
        return self._opened().ended(key, timeout_s)

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than so many seconds; see `Store.arrived`."""
        return self._opened().arrived(key, timeout_s)

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait now."""
        return self._opened().waits(self.queue_depth)

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still in flight."""
        self._opened().prefetch(key)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        return self._opened().get(key)

    def drop(self, key: int) -> None:
        """Free the medium's copy of `key`.  Unknown keys are ignored."""
        self._opened().drop(key)

    def _opened(self) -> Traffic:
        self._hold.check()
        assert self._traffic is not None
        return self._traffic
