"""What an open `StreamedStore` holds and has under way, on a carrier.

Everything here is touched by the computing thread alone; what a carrier has finished
it tells when polled.  So a `put` takes no lock.
"""

from __future__ import annotations

import errno
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ..states.layout import Array, Layout
from .arena import LandingPool, landing_pool, pages, whole_huge
from .base import CheckpointLost, StoreStats, TransferRecord
from .carrier import Carrier, Finished
from .extents import Extent, Index, SlotPool, State
from .medium import is_full, warn_full
from .staging import BUFFERS, Staging


class Traffic:
    """The extents of an open store.

    Parameters
    ----------
    name : str
        Of the store, for messages.
    carrier : Carrier
        Closed by the store.
    layout : Layout
    count : int
        States that share an extent; 1 for large ones.
    extent_bytes : int
        On the medium, whole pages.
    capacity_bytes : int or None
    stats, transfers
        Of the store.
    freed : callable, optional
        Told of each slot of the medium whose bytes are not needed any more.  It must not
        refer to the store, which would then not go at once when it is dropped.
    """

    def __init__(
        self,
        name: str,
        carrier: Carrier,
        layout: Layout,
        count: int,
        extent_bytes: int,
        capacity_bytes: int | None,
        stats: StoreStats,
        transfers: deque[TransferRecord],
        freed: Callable[[int], None] | None = None,
    ) -> None:
        self._name = name
        self._carrier = carrier
        self._layout = layout
        self._count = count
        self._extent_bytes = extent_bytes
        self._capacity_bytes = capacity_bytes
        self._stats = stats
        self._transfers = transfers
        self._freed = freed
        self.index: Index[Extent] = Index(count)
        self._next_number = 0
        self._slots = SlotPool(None if capacity_bytes is None else capacity_bytes // extent_bytes)
        self._full_warned = False
        self._serial = 0
        self._zombies: list[Extent] = []  # without live states, while a thread is at them
        self._filling: Extent | None = None
        self._latest: Extent | None = None
        self._read_last: Extent | None = None
        self._waiting: deque[Extent] = deque()  # large writes not known to be done
        self._staging: Staging | None = None
        small = count > 1
        self._pool = LandingPool(extent_bytes, BUFFERS) if small else landing_pool(extent_bytes)

    def start(self, bounce_bytes: int) -> None:
        """Allocate buffers and start the threads; large states leave through `bounce_bytes`."""
        bounce = None
        if self._count > 1:
            self._staging = Staging(self._layout, self._count, self._extent_bytes)
        else:
            bounce = pages(whole_huge(bounce_bytes))[:bounce_bytes]
        self._carrier.start(self._layout, bounce, _weak(self._wrote), _weak(self._landed))

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], block: bool, depth: int) -> bool:
        """Queue the write of one state unless `depth` large ones are waiting."""
        staging = self._staging
        if staging is None:
            taken = self._put_large(key, arrays, block, depth)
            self._stats.refused += not taken
            return taken
        extent = self._filling
        if extent is None:
            extent = self._new_small(staging, key, block)
            if extent is None:
                self._stats.refused += 1
                return False
        place = extent.filled
        staging.fill(extent, arrays)
        self.index.enter(key, extent, place)
        extent.filled = place + 1
        extent.live += 1
        self._stats.writes += 1
        if place + 1 == self._count:
            self._flush(extent)
        return True

    def _flush(self, extent: Extent) -> None:
        self._filling = None
        extent.nbytes = extent.filled * self._layout.nbytes
        self._queue_write(extent)

    def _queue_write(self, extent: Extent) -> None:
        extent.state = State.QUEUED
        number, staging = extent.buffer, self._staging
        data = None if staging is None or number is None else staging.buffers[number]
        self._carrier.queue_write(extent, data)

    def poll(self) -> None:
        """Take note of what the carrier has finished."""
        self._carrier.poll()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        """Block until `ready()`, or until nothing is under way that could make it so.

        Then Ctrl-C came before a transfer was queued: it has failed.
        """
        if self._carrier.wait_for(ready):
            return
        interrupted = OSError(errno.EINTR, "it was interrupted before it was queued")
        now = time.perf_counter()
        for extent in list(self.index.extents.values()):
            if extent.state is State.FILLING and extent is not self._filling:
                extent.state = State.QUEUED
            self._wrote(extent, now, now, interrupted)
            self._landed(extent, now, now, interrupted)

    def _new_small(self, staging: Staging, key: int, block: bool) -> Extent | None:
        """Return a fresh extent with a staging buffer, or None if there is no room."""
        self.poll()
        number = staging.free()
        if number is None and block:
            self._wait_for(lambda: staging.free() is not None)
            number = staging.free()
        slot = None if number is None else self._take_slot()
        if number is None or slot is None:
            return None
        extent = self._new_extent(slot, key, self._latest)
        staging.hold(number, extent)
        self._filling = self._latest = extent
        return extent

    def _put_large(self, key: int, arrays: Sequence[Array], block: bool, depth: int) -> bool:
        self.poll()
        waiting = self._waiting
        while waiting and waiting[0].state is not State.QUEUED:
            waiting.popleft()
        if len(waiting) >= depth:
            if not block:
                return False
            self._wait(waiting[0])
        slot = self._take_slot()
        if slot is None:
            return False
        extent = self._new_extent(slot, key, None)
        extent.arrays = tuple(arrays)
        extent.live = extent.filled = 1
        extent.nbytes = self._layout.nbytes
        self._queue_write(extent)
        self.index.enter(key, extent, 0)
        self._stats.writes += 1
        waiting.append(extent)
        return True

    def _new_extent(self, slot: int, first: int, previous: Extent | None) -> Extent:
        number = self._next_number
        self._next_number += 1
        extent = self.index.extents[number] = Extent(number, slot, first, previous)
        return extent

    def _take_slot(self) -> int | None:
        """Return a slot of the medium; None if it is full."""
        if self._zombies:
            self._bury()
        if self._slots.left <= 0:
            self._refuse()
            return None
        slot = self._slots.take()
        stats = self._stats
        stats.stored_bytes += self._extent_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        return slot

    def _refuse(self) -> None:
        self._stats.refused_full += 1
        if not self._full_warned:
            self._full_warned = True
            warn_full(
                f"tier {self._name!r}",
                "no space is left"
                if self._slots.closed
                else f"its capacity of {self._capacity_bytes} bytes is used",
            )

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        self.poll()
        entry = self.index.find(key)
        if entry is None:
            return False
        extent = entry[0]
        if self._count == 1:
            self._wait(extent)
        if extent.state is State.FAILED:
            self._lose(key)
            return False
        return True

    def _wait(self, extent: Extent) -> None:
        if extent.state is State.QUEUED:
            self._wait_for(lambda: extent.state is not State.QUEUED)

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue a read of the extent of `key`, and of the one below it."""
        entry = self.index.find(key)
        if entry is None:
            return
        extent = entry[0]
        self._queue_read(extent)
        if self._count > 1 and extent.previous is not None:
            self._queue_read(extent.previous)

    def _queue_read(self, extent: Extent) -> None:
        if extent.buffer is None and extent.read_state is None and extent.live:
            if extent.state is State.FAILED:  # as its error says
                extent.read_state = State.FAILED
                return
            extent.read_state = State.QUEUED
            try:
                extent.landing = self._pool.take()
            except (OSError, MemoryError) as error:
                extent.read_state, extent.error = State.FAILED, f"read failed: {error}"
                return
            self._carrier.queue_read(extent, extent.landing)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self.poll()
        entry = self.index.find(key)
        if entry is None:
            raise CheckpointLost(f"tier {self._name!r} has no checkpoint {key}")
        extent, place = entry
        if extent.buffer is not None:
            assert self._staging is not None
            record = self._staging.record(extent.buffer, place)
        else:
            record = self._landed_record(key, extent, place)
        record.flags.writeable = False
        if self._count == 1:
            # Landed for this reader alone: a later get reads again.
            extent.landing = extent.read_state = None
        self._stats.reads += 1
        return self._layout.views(record)

    def _landed_record(self, key: int, extent: Extent, place: int) -> Array:
        """Return one state of an extent, once that has been read."""
        if extent.read_state is None:
            self.prefetch(key)
        if extent.read_state is State.QUEUED:
            self._wait_for(lambda: extent.read_state is not State.QUEUED)
        if extent.read_state is State.FAILED:
            error = extent.error
            self._lose(key)
            raise CheckpointLost(error)
        assert extent.landing is not None
        last, self._read_last = self._read_last, extent
        if (
            last is not None
            and last is not extent
            and last is not extent.previous
            and last.read_state is State.DONE
        ):
            # Done with, though its keys may live on: else reading without
            # dropping would bring the whole tier back into memory.
            last.landing = last.read_state = None
        start = place * self._layout.nbytes
        return extent.landing[start : start + self._layout.nbytes]

    def _lose(self, key: int) -> None:
        self._stats.lost += 1
        self.drop(key)

    def drop(self, key: int) -> None:
        """Free the medium's copy of `key`.  Unknown keys are ignored."""
        extent = self.index.pop(key)
        if extent is None:
            return
        extent.live -= 1
        if extent.live:
            return
        if extent is self._filling:
            extent.filled = 0  # every state in it is gone: fill it anew
        else:
            self._zombies.append(extent)
            self._bury()

    def _bury(self) -> None:
        """Give back the slots of extents without live states that no thread is at."""
        self.poll()
        left = []
        for extent in self._zombies:
            if State.QUEUED in (extent.state, extent.read_state):
                left.append(extent)
                continue
            if extent.state is not State.FAILED or not self._slots.closed:
                self._slots.give(extent.slot)
                if self._freed is not None:
                    self._freed(extent.slot)
            self._stats.stored_bytes -= self._extent_bytes
            self.index.forget(extent)
            extent.landing = extent.previous = None
            if self._staging is not None:
                self._staging.let_go(extent)
            if self._latest is extent:
                self._latest = None
        self._zombies = left

    # -------------------------------------------------- what the carrier tells

    # Interrupted they are called again, hence the look at the state, which is
    # set before what is only counted.

    def _wrote(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        if extent.state is not State.QUEUED:
            return
        if error is not None:
            if is_full(error):
                self._slots.close()
            extent.error = f"write failed: {error}"
        self._serial += 1
        extent.arrays = None
        extent.serial = self._serial
        extent.state = State.DONE if error is None else State.FAILED
        if error is None:
            self._stats.bytes_written += extent.nbytes
        self._transfers.append(TransferRecord("write", extent.first, began, ended, extent.nbytes))

    def _landed(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        if extent.read_state is not State.QUEUED:
            return
        if error is not None:
            extent.error = f"read failed: {error}"
        extent.read_state = State.DONE if error is None else State.FAILED
        if error is None:
            self._stats.bytes_read += extent.nbytes
        self._transfers.append(TransferRecord("read", extent.first, began, ended, extent.nbytes))


def _weak(told: Finished) -> Finished:
    """Return a method that does not keep its store: one that is dropped goes at once."""
    method = weakref.WeakMethod(told)

    def tell(extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        if (found := method()) is not None:
            found(extent, began, ended, error)

    return tell
