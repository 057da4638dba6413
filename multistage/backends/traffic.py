"""What an open `StreamedStore` holds and has in flight, on a carrier.

Everything here is touched by the computing thread alone; what a carrier has finished
it reports when polled.  So a `put` takes no lock.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ..errors import ArgumentError
from ..states.layout import Array, Layout, places
from .arena import LandingPool, landing_pool, pages, round_up, whole_huge
from .base import CheckpointLost, StoreStats, TransferRecord
from .carrier import Carrier
from .extents import Extent, Index, Room, TransferState
from .lifetimes import weakly
from .medium import is_full, warn_full

BUFFERS = 3  # small states are gathered in, each one extent; as many again are read into


class Staging:
    """The staging buffers of an open store; each holds one extent.

    Parameters
    ----------
    layout : Layout
    count : int
        States of an extent.
    extent_bytes : int

    Notes
    -----
    An extent can be read from its buffer until that is reused.
    """

    def __init__(self, layout: Layout, count: int, extent_bytes: int) -> None:
        arena = pages(whole_huge(BUFFERS * extent_bytes))
        self._layout = layout
        self.buffers = list(arena[: BUFFERS * extent_bytes].reshape(BUFFERS, extent_bytes))
        self._lines = [_lines(layout, count, buffer) for buffer in self.buffers]
        self._holders: list[Extent | None] = [None] * BUFFERS

    def free(self) -> int | None:
        """Return a buffer whose extent is written, the oldest first; None if there is none."""
        best, age = None, -1
        for number, holder in enumerate(self._holders):
            if holder is None:
                return number
            if holder.state in (TransferState.DONE, TransferState.FAILED) and (
                best is None or holder.serial < age
            ):
                best, age = number, holder.serial
        return best

    def hold(self, number: int, extent: Extent) -> None:
        """Give a free buffer to an extent: the one before is read from the medium from now on."""
        before = self._holders[number]
        if before is not None:
            before.buffer = None
        extent.buffer = number
        self._holders[number] = extent

    def let_go(self, extent: Extent) -> None:
        """Take the buffer of an extent back, if it has one."""
        if extent.buffer is not None:
            self._holders[extent.buffer] = None
            extent.buffer = None

    def fill(self, extent: Extent, arrays: Sequence[Array]) -> None:
        """Copy a state into the next place of an extent."""
        assert extent.buffer is not None
        at = extent.filled
        for line, array in zip(self._lines[extent.buffer], arrays, strict=True):
            line[at] = array

    def record(self, number: int, place: int) -> Array:
        """Return a copy of one state: a buffer is reused without asking who looks at it."""
        start = place * self._layout.nbytes
        return self.buffers[number][start : start + self._layout.nbytes].copy()


def _lines(layout: Layout, count: int, buffer: Array) -> list[Array]:
    """Return for each leaf one array over its places in all records of a buffer.

    A view for each place would take more memory than small states do.
    """
    lines = []
    for leaf in layout.leaves:
        strides, step = [], leaf.dtype.itemsize
        for length in reversed(leaf.shape):
            strides.append(step)
            step *= length
        lines.append(
            np.ndarray(
                (count, *leaf.shape),
                leaf.dtype,
                buffer=buffer.data,
                offset=leaf.offset,
                strides=(layout.nbytes, *reversed(strides)),
            )
        )
    return lines


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
    capacity_bytes : int or None
        Most bytes of its extents, in whole pages.
    stats, transfers
        Of the store.
    """

    def __init__(
        self,
        name: str,
        carrier: Carrier,
        layout: Layout,
        count: int,
        capacity_bytes: int | None,
        stats: StoreStats,
        transfers: deque[TransferRecord],
    ) -> None:
        self._name, self._carrier = name, carrier
        self._layout = layout
        self._count = count
        self._offsets = [leaf.offset for leaf in layout.leaves]
        self._extent_bytes = extent_bytes = round_up(count * layout.nbytes)
        self._stats = stats
        self._transfers = transfers
        self.index: Index[Extent] = Index(count)
        self._next_number = 0
        self._capacity_bytes, self._room = capacity_bytes, Room(capacity_bytes)
        self._warned = False  # that there is no more room
        self._serial = 0
        self._zombies: list[Extent] = []  # without live states, while a thread is at them
        self._filling: Extent | None = None
        self._latest: Extent | None = None
        self._waiting: deque[Extent] = deque()  # large writes not known to be done
        self._staging: Staging | None = None
        pool = LandingPool(extent_bytes, BUFFERS) if count > 1 else landing_pool(extent_bytes)
        self._landings = pool
        self._last_read: Extent | None = None  # that a state was taken from

    def start(self, bounce_bytes: int) -> None:
        """Allocate buffers and start the threads; large states leave through `bounce_bytes`."""
        bounce = None
        if self._count > 1:
            self._staging = Staging(self._layout, self._count, self._extent_bytes)
        else:
            bounce = pages(whole_huge(bounce_bytes))[:bounce_bytes]
        self._carrier.start(bounce, weakly(self._wrote), weakly(self._landed))

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
            self._filling = None
            extent.nbytes = self._count * self._layout.nbytes
            self._queue_write(extent)
        return True

    def _queue_write(self, extent: Extent) -> None:
        extent.state = TransferState.QUEUED
        number, staging = extent.buffer, self._staging
        data = None if staging is None or number is None else staging.buffers[number]
        self._carrier.queue_write(extent, data)

    def poll(self) -> None:
        """Take note of what the carrier has finished."""
        self._carrier.poll()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        """Block until `ready()`, or until nothing is in flight that could make it so.

        Then Ctrl-C came before a transfer was queued: it has failed.
        """
        if self._carrier.wait_for(ready):
            return
        interrupted = OSError(errno.EINTR, "it was interrupted before it was queued")
        now = time.perf_counter()
        for extent in list(self.index.extents.values()):
            if extent.state is TransferState.FILLING and extent is not self._filling:
                extent.state = TransferState.QUEUED
            self._wrote(extent, now, now, interrupted)
            self._landed(extent, now, now, interrupted)

    def _new_small(self, staging: Staging, key: int, block: bool) -> Extent | None:
        """Return a fresh extent with a staging buffer, or None if there is no room."""
        self.poll()
        number = staging.free()
        if number is None and block:
            self._wait_for(lambda: staging.free() is not None)
            number = staging.free()
        slot = None if number is None else self._take_slot(self._extent_bytes)
        if number is None or slot is None:
            return None
        extent = self._new_extent(slot, key, self._latest)
        staging.hold(number, extent)
        self._filling = self._latest = extent
        return extent

    def _put_large(self, key: int, arrays: Sequence[Array], block: bool, depth: int) -> bool:
        self.poll()
        nbytes, offsets = self._layout.nbytes, self._offsets
        if self._layout.varied:
            nbytes, offsets = self._placed(arrays)
        if self._count_waiting() >= depth:
            if not block:
                return False
            self._wait(self._waiting[0])
        slot = self._take_slot(round_up(nbytes))
        if slot is None:
            return False
        extent = self._new_extent(slot, key, None)
        extent.arrays, extent.offsets = tuple(arrays), offsets
        if self._layout.varied:
            extent.shapes = [(array.shape, array.dtype) for array in arrays]
        extent.live = extent.filled = 1
        extent.nbytes = nbytes
        self._queue_write(extent)
        self.index.enter(key, extent, 0)
        self._stats.writes += 1
        self._waiting.append(extent)
        return True

    def _placed(self, arrays: Sequence[Array]) -> tuple[int, list[int]]:
        """Return the bytes of a record of some arrays, and where in it each lies."""
        offsets, nbytes = places([array.nbytes for array in arrays])
        if sum(array.nbytes for array in arrays) > self._layout.nbytes:
            raise ArgumentError(
                f"put of {nbytes} bytes in tier {self._name!r}, opened for at most "
                f"{self._layout.nbytes}"
            )
        return nbytes, offsets

    def _new_extent(self, slot: int, first: int, previous: Extent | None) -> Extent:
        number = self._next_number
        self._next_number += 1
        extent = self.index.extents[number] = Extent(number, slot, first, previous)
        return extent

    def _take_slot(self, nbytes: int) -> int | None:
        """Return a number for an extent of whole pages; None if the medium is full."""
        if self._zombies:
            self._bury()
        stats, room = self._stats, self._room
        if room.fits(nbytes):
            stats.stored_bytes += nbytes
            stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
            return room.take(nbytes)
        stats.refused_full += 1
        if not self._warned:
            self._warned = True
            used = f"its capacity of {self._capacity_bytes} bytes is used"
            warn_full(f"tier {self._name!r}", "no space is left" if room.closed else used)
        return None

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        self.poll()
        entry = self.index.find(key)
        if entry is None:
            return False
        extent = entry[0]
        if self._count == 1:
            self._wait(extent)
        if extent.state is TransferState.FAILED:
            self._lose(key, extent)
            return False
        return True

    def cancel(self, key: int) -> None:
        """Give up the write of a large state; those of small states share one, which is made."""
        self.poll()
        entry = self.index.find(key)
        if entry is not None and self._count == 1 and entry[0].state is TransferState.QUEUED:
            self._carrier.cancel(entry[0])

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than some seconds; return whether it has ended."""
        self.poll()
        entry = self.index.find(key)
        if entry is None or self._count > 1 or entry[0].state is not TransferState.QUEUED:
            return True
        extent = entry[0]
        waited = self._carrier.wait_for(lambda: extent.state is not TransferState.QUEUED, timeout_s)
        return waited is not None

    def waits(self, depth: int) -> bool:
        """Whether a `put` with `block` would wait now."""
        self.poll()
        if self._staging is not None:
            return self._filling is None and self._staging.free() is None
        return self._count_waiting() >= depth

    def _count_waiting(self) -> int:
        """Return how many writes of large states have not ended."""
        waiting = self._waiting
        while waiting and waiting[0].state is not TransferState.QUEUED:
            waiting.popleft()
        return len(waiting)

    def _wait(self, extent: Extent) -> None:
        if extent.state is TransferState.QUEUED:
            self._wait_for(lambda: extent.state is not TransferState.QUEUED)

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
        """Queue a read of an extent, unless it is in memory, on its way, or of no use."""
        if extent.buffer is not None or extent.read_state is not None or not extent.live:
            return
        if extent.state is TransferState.FAILED:  # as its error says
            extent.read_state = TransferState.FAILED
            return
        extent.read_state = TransferState.QUEUED
        try:
            extent.landing = self._landings.take(extent.nbytes)
        except (OSError, MemoryError) as error:
            extent.read_state, extent.error = TransferState.FAILED, f"read failed: {error}"
            return
        self._carrier.queue_read(extent, extent.landing)

    def _landed(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        """Record the result of a read, which the carrier reports."""
        if extent.read_state is not TransferState.QUEUED:  # see `_wrote`
            return
        if error is not None:
            extent.error = f"read failed: {error}"
        extent.read_state = TransferState.DONE if error is None else TransferState.FAILED
        if error is None:
            self._stats.bytes_read += extent.nbytes
        if error is None or extent.live:  # not of one that was given up: it took no time
            self._note("read", extent, began, ended)

    def _note(
        self, kind: Literal["write", "read"], extent: Extent, began: float, ended: float
    ) -> None:
        self._transfers.append(TransferRecord(kind, extent.first, began, ended, extent.nbytes))

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
        if extent.shapes is None:
            return self._layout.views(record)
        return [
            np.ndarray(shape, dtype, record.data, at)
            for (shape, dtype), at in zip(extent.shapes, extent.offsets, strict=True)
        ]

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than some seconds; return whether it has ended."""
        self.poll()
        entry = self.index.find(key)
        if entry is None or entry[0].buffer is not None:
            return True
        extent = entry[0]
        if extent.read_state is None:
            self.prefetch(key)
        if extent.read_state is not TransferState.QUEUED:
            return True
        ended = self._carrier.wait_for(
            lambda: extent.read_state is not TransferState.QUEUED, timeout_s
        )
        return ended is not None

    def _landed_record(self, key: int, extent: Extent, place: int) -> Array:
        """Return one state of an extent, once that has been read."""
        if extent.read_state is None:
            self.prefetch(key)
        if extent.read_state is TransferState.QUEUED:
            self._wait_for(lambda: extent.read_state is not TransferState.QUEUED)
        if extent.read_state is TransferState.FAILED:
            error = extent.error
            self._lose(key, extent)
            raise CheckpointLost(error)
        assert extent.landing is not None
        last, self._last_read = self._last_read, extent
        if (
            last is not None
            and last is not extent
            and last is not extent.previous  # whose states are needed next
            and last.read_state is TransferState.DONE
        ):
            # Done with, though its keys may live on: else reading without
            # dropping would bring the whole tier back into memory.
            last.landing = last.read_state = None
        nbytes = extent.nbytes if self._count == 1 else self._layout.nbytes
        return extent.landing[place * nbytes : (place + 1) * nbytes]

    def _lose(self, key: int, extent: Extent) -> None:
        given_up = extent.cancelled and extent.state is TransferState.FAILED
        self._stats.lost += not given_up
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
            extent.filled = 0  # every state in it is gone: fill it again
        else:
            if extent.read_state is TransferState.QUEUED:
                # What it lands in stays in use until it has failed, unless it has not begun:
                # no other memory is kept idle beside it.
                self._carrier.cancel_read(extent)
                extent.landing = None  # the carrier's
                self._landings.trim()
            self._zombies.append(extent)
            self._bury()

    def _bury(self) -> None:
        """Give back the slots of extents without live states that no thread is at."""
        self.poll()
        at, zombies = 0, self._zombies
        while at < len(zombies):
            extent = zombies[at]
            if TransferState.QUEUED in (extent.state, extent.read_state):
                at += 1
                continue
            del zombies[at]  # first: Ctrl-C may cost a slot, but none is given back twice
            if extent.homeless:
                self._stats.stored_bytes -= round_up(extent.nbytes)
            else:
                self._stats.stored_bytes -= self._room.give(extent.slot)
                self._carrier.free(extent)
            self.index.forget(extent)
            extent.landing = extent.previous = None
            if self._staging is not None:
                self._staging.let_go(extent)
            if self._latest is extent:
                self._latest = None

    def _wrote(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        """Record the result of a write, which the carrier reports."""
        # Interrupted it is called again, hence the look at the state, which is set before what
        # is only counted.
        if extent.state is not TransferState.QUEUED:
            return
        if error is not None:
            if is_full(error):
                extent.homeless = True
                self._room.close()  # what it holds now is its capacity
            extent.error = f"write failed: {error}"
        self._serial += 1
        extent.arrays = None
        extent.serial = self._serial
        extent.state = TransferState.DONE if error is None else TransferState.FAILED
        if error is None:
            self._stats.bytes_written += extent.nbytes
        if not (error is not None and extent.cancelled):  # it took no time
            self._note("write", extent, began, ended)
