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
files, two Python threads for any other medium.  Everything here is touched by
the computing thread alone; what a carrier has finished it tells when polled.
So a `put` takes no lock.
"""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ArgumentError, CheckpointWarning, StoreError
from ..states.layout import Array, Layout
from ..support.step_sets import StepMap
from .arena import PAGE, LandingPool, landing_bytes, landing_pool, pages, round_up, whole_huge
from .base import BaseStore, CheckpointLost, Store, StoreStats, TransferRecord
from .carrier import Carrier, Extent, Finished, State, ThreadCarrier
from .lifetimes import Hold
from .medium import Medium, is_full

_SMALL = 4  # states per extent from which on they are coalesced
_EXTENT_BYTES = 2 << 20
_CHUNK_BYTES = 4 << 20
_STAGING = 3  # extent buffers being filled or written; as many again are read into


class StreamedStore(BaseStore):
    """A slow tier on any medium; see `FileStore` and `MemoryStore`.

    Parameters
    ----------
    name : str
    open_medium : callable or None
        `open_medium(extent_bytes) -> Medium`; called when the store opens, and
        by `lend`.  None in a subclass that overrides `medium`.
    capacity_bytes : int or None
        Space on the medium, in whole extents; None if unbounded.
    buffer_bytes : int
        Page-aligned buffers for transfers.
    queue_depth : int
        Writes of large states that may be waiting or under way.
    bounces : int
        Buffers that large states are gathered in on their way out.
    extent_bytes, chunk_bytes : int
        Most bytes of an extent of small states, and of one write of a large
        one: more where each request takes long.

    Attributes
    ----------
    coalesces : bool
        Whether small states share extents.  Set it to False, before `open`, for
        records that are read in the order they were written: each then has an extent
        of its own, and fewer bytes of buffers are held.

    Notes
    -----
    For one computing thread.  `put` with `block`, `wait_written`, `get` and
    `close` may block; nothing else does.
    """

    def __init__(
        self,
        name: str,
        open_medium: Callable[[int], Medium] | None = None,
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
        self.coalesces = True
        self._open_medium = open_medium
        self._buffer_bytes = buffer_bytes
        self._bounces = bounces
        self._most_extent_bytes = extent_bytes
        self._chunk_bytes = chunk_bytes
        self._carrier: Carrier | None = None
        self._hold = Hold(name)

    # ------------------------------------------------------------------- life

    def _per_extent(self, layout: Layout) -> int:
        """Return how many states share an extent, 1 for large ones."""
        if not self.coalesces:
            return 1
        extent = min(self._most_extent_bytes, self._buffer_bytes // (2 * _STAGING))
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
            return 2 * whole_huge(_STAGING * round_up(count * layout.nbytes))
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

    @property
    def counts_reads(self) -> bool:
        """Whether `buffer_bytes` includes states that are read ahead: each has a buffer then."""
        return not self.coalesces

    def read_in_order(self, depth: int) -> None:
        """Let `depth` writes wait."""
        self.queue_depth = max(self.queue_depth, depth)

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """Return a fresh medium for extents of states of `layout`; `open` and `lend` call it.

        Raises
        ------
        OSError, StoreError
            If there can be none.
        """
        assert self._open_medium is not None
        return self._open_medium(extent_bytes)

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
        self._layout = layout
        self._count = count
        self._extent_bytes = extent_bytes
        self.stats = StoreStats()
        self.transfers.clear()
        self._index = StepMap()  # key -> number of the extent * count + place in it
        self._extents: dict[int, Extent] = {}
        self._next_number = 0
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._zombies: list[Extent] = []  # all keys dropped while a thread was at it
        self._filling: Extent | None = None
        self._latest: Extent | None = None
        self._read_last: Extent | None = None
        self._waiting: deque[Extent] = deque()  # large writes not known to be done
        self._full_warned = self._no_space = False
        self._staging: list[Array] = []
        self._lines: list[list[Array]] = []
        self._holders: list[Extent | None] = [None] * _STAGING
        small = count > 1
        self._pool = LandingPool(extent_bytes, _STAGING) if small else landing_pool(extent_bytes)
        self._serial = 0
        try:
            self._start(carrier, layout)
        except (OSError, MemoryError, RuntimeError) as error:  # no memory, no thread
            raise StoreError(
                f"tier {self.name!r} cannot be used: {error or 'no memory'}; it needs "
                f"{self.buffer_bytes(layout)} bytes of buffers and two threads"
            ) from error

    def _start(self, carrier: Carrier, layout: Layout) -> None:
        """Allocate buffers and start the threads."""
        count, extent_bytes = self._count, self._extent_bytes
        bounce = None
        if count > 1:
            arena = pages(whole_huge(_STAGING * extent_bytes))
            self._staging = list(arena[: _STAGING * extent_bytes].reshape(_STAGING, extent_bytes))
            self._lines = [_lines(layout, count, buffer) for buffer in self._staging]
        else:
            nbytes = self._bounce_bytes(layout)
            bounce = pages(whole_huge(nbytes))[:nbytes]
        carrier.start(layout, bounce, _weak(self._wrote), _weak(self._landed))

    def close(self) -> None:
        """Stop the threads, give back memory and files.  May be called twice.

        Interrupted, it can be called again and does the rest.  In a forked
        child it leaves threads and files to the parent, and the store can be
        opened anew.
        """
        if not self._hold.taken:
            return
        failure: Exception | None = None
        try:
            if self._carrier is not None:
                if not self._hold.foreign:
                    try:
                        with contextlib.suppress(OSError):  # what was in it is wanted no more
                            self._carrier.close()
                    except Exception as error:  # its finalizer tries once more
                        failure = error
                self._carrier = None
                self._forget()
        finally:
            self._give_back()
        self._hold.give_back()
        if failure is not None:
            raise failure

    def _forget(self) -> None:
        """Let go of all that `_open` made."""
        self._index.clear()
        self._extents.clear()
        self._holders.clear()
        self._staging.clear()
        self._waiting.clear()
        self._zombies.clear()
        self._lines = []
        self._filling = self._latest = self._read_last = None
        self._pool = LandingPool(0, 0)

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        if self._count == 1:
            return self._put_large(key, arrays, block)
        extent = self._filling
        if extent is None:
            extent = self._new_small(key, block)
            if extent is None:
                self.stats.refused += 1
                return False
        at, number = extent.filled, extent.buffer
        assert number is not None
        for line, array in zip(self._lines[number], arrays, strict=True):
            line[at] = array
        self._index[key] = extent.number * self._count + at
        extent.filled = at + 1
        extent.live += 1
        self.stats.writes += 1
        if at + 1 == self._count:
            self._flush(extent)
        return True

    def _flush(self, extent: Extent) -> None:
        self._filling = None
        extent.nbytes = extent.filled * self._layout.nbytes
        self._queue_write(extent)

    def _queue_write(self, extent: Extent) -> None:
        assert self._carrier is not None
        extent.state = State.QUEUED
        number = extent.buffer
        self._carrier.queue_write(extent, None if number is None else self._staging[number])

    def _poll(self) -> None:
        if self._carrier is not None:
            self._carrier.poll()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        """Block until `ready()`, or until nothing is under way that could make it so.

        Then Ctrl-C came before a transfer was queued: it has failed.
        """
        assert self._carrier is not None
        if self._carrier.wait_for(ready):
            return
        interrupted = OSError(errno.EINTR, "it was interrupted before it was queued")
        now = time.perf_counter()
        for extent in list(self._extents.values()):
            if extent.state is State.FILLING and extent is not self._filling:
                extent.state = State.QUEUED
            self._wrote(extent, now, now, interrupted)
            self._landed(extent, now, now, interrupted)

    def _new_small(self, key: int, block: bool) -> Extent | None:
        """Return a fresh extent with a staging buffer, or None if there is no room."""
        self._poll()
        number = self._free_buffer()
        if number is None and block:
            self._wait_for(lambda: self._free_buffer() is not None)
            number = self._free_buffer()
        slot = None if number is None else self._take_slot()
        if number is None or slot is None:
            return None
        holder = self._holders[number]
        if holder is not None:
            holder.buffer = None  # from now on it is read from the medium
        extent = self._new_extent(slot, key, self._latest)
        extent.buffer = number
        self._holders[number] = self._filling = self._latest = extent
        return extent

    def _free_buffer(self) -> int | None:
        """Return a staging buffer whose extent is written, the oldest first."""
        best, age = None, -1
        for number, holder in enumerate(self._holders):
            if holder is None:
                return number
            if holder.state in (State.DONE, State.FAILED) and (best is None or holder.serial < age):
                best, age = number, holder.serial
        return best

    def _put_large(self, key: int, arrays: Sequence[Array], block: bool) -> bool:
        self._poll()
        waiting = self._waiting
        while waiting and waiting[0].state is not State.QUEUED:
            waiting.popleft()
        if len(waiting) >= self.queue_depth:
            if not block:
                self.stats.refused += 1
                return False
            self._wait(waiting[0])
        slot = self._take_slot()
        if slot is None:
            self.stats.refused += 1
            return False
        extent = self._new_extent(slot, key, None)
        extent.arrays = tuple(arrays)
        extent.live = extent.filled = 1
        extent.nbytes = self._layout.nbytes
        self._queue_write(extent)
        self._index[key] = extent.number
        self.stats.writes += 1
        waiting.append(extent)
        return True

    def _new_extent(self, slot: int, first: int, previous: Extent | None) -> Extent:
        number = self._next_number
        self._next_number += 1
        extent = self._extents[number] = Extent(number, slot, first, previous)
        return extent

    def _find(self, key: int) -> tuple[Extent, int] | None:
        """Return the extent that holds `key` and the place in it, None if there is none."""
        entry = self._index.get(key)
        if entry is None:
            return None
        return self._extents[entry // self._count], entry % self._count

    def _take_slot(self) -> int | None:
        """Return a free extent of the medium, the one freed last; None if it is full."""
        if self._zombies:
            self._bury()
        if self._free_slots:
            slot = self._free_slots.pop()
        elif (
            self.capacity_bytes is not None
            and (self._next_slot + 1) * self._extent_bytes > self.capacity_bytes
        ):
            self._warn_full(f"its capacity of {self.capacity_bytes} bytes is used")
            return None
        elif self._no_space:
            self._warn_full("no space is left")
            return None
        else:
            slot = self._next_slot
            self._next_slot += 1
        stats = self.stats
        stats.stored_bytes += self._extent_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        return slot

    def _warn_full(self, reason: str) -> None:
        self.stats.refused_full += 1
        if not self._full_warned:
            self._full_warned = True
            warnings.warn(
                f"tier {self.name!r} takes no more checkpoints: {reason}; "
                "more steps will be computed again",
                CheckpointWarning,
                stacklevel=4,
            )

    def wait_written(self, key: int) -> bool:
        """Block until the store is done with the arrays of `key`; False if they are lost."""
        self._hold.check()
        self._poll()
        entry = self._find(key)
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
        """Queue a read of `key`, behind its write if that is still under way."""
        self._hold.check()
        entry = self._find(key)
        if entry is None:
            return
        extent = entry[0]
        self._queue_read(extent)
        if self._count > 1 and extent.previous is not None:
            self._queue_read(extent.previous)

    def _queue_read(self, extent: Extent) -> None:
        if extent.buffer is None and extent.read_state is None and extent.live:
            assert self._carrier is not None
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
        self._hold.check()
        self._poll()
        entry = self._find(key)
        if entry is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        extent, at = entry
        start, stop = at * self._layout.nbytes, (at + 1) * self._layout.nbytes
        if extent.buffer is not None:
            # A copy: the staging buffer is reused without asking who looks at it.
            record = self._staging[extent.buffer][start:stop].copy()
        else:
            if extent.read_state is None:
                self.prefetch(key)
            if extent.read_state is State.QUEUED:
                self._wait_for(lambda: extent.read_state is not State.QUEUED)
            if extent.read_state is State.FAILED:
                error = extent.error
                self._lose(key)
                raise CheckpointLost(error)
            assert extent.landing is not None
            record = extent.landing[start:stop]
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
        record.flags.writeable = False
        if self._count == 1:
            # Landed for this reader alone: a later get reads again.
            extent.landing = extent.read_state = None
        self.stats.reads += 1
        return self._layout.views(record)

    def _lose(self, key: int) -> None:
        self.stats.lost += 1
        self.drop(key)

    def drop(self, key: int) -> None:
        """Free the medium's copy of `key`.  Unknown keys are ignored."""
        self._hold.check()
        entry = self._index.pop(key)
        if entry is None:
            return
        extent = self._extents[entry // self._count]
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
        self._poll()
        left = []
        for extent in self._zombies:
            if State.QUEUED in (extent.state, extent.read_state):
                left.append(extent)
                continue
            if extent.state is not State.FAILED or not self._no_space:
                self._free_slots.append(extent.slot)
                self._freed(extent.slot)
            self.stats.stored_bytes -= self._extent_bytes
            del self._extents[extent.number]
            extent.landing = extent.previous = None
            if extent.buffer is not None:
                self._holders[extent.buffer] = None
                extent.buffer = None
            if self._latest is extent:
                self._latest = None
        self._zombies = left

    def _freed(self, slot: int) -> None:
        """Called when the bytes in an extent of the medium are wanted no more."""

    # -------------------------------------------------- what the carrier tells

    # Interrupted they are called again, hence the look at the state, which is
    # set before what is only counted.

    def _wrote(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        if extent.state is not State.QUEUED:
            return
        if error is not None:
            self._no_space = self._no_space or is_full(error)
            extent.error = f"write failed: {error}"
        self._serial += 1
        extent.arrays = None
        extent.serial = self._serial
        extent.state = State.DONE if error is None else State.FAILED
        if error is None:
            self.stats.bytes_written += extent.nbytes
        self.transfers.append(TransferRecord("write", extent.first, began, ended, extent.nbytes))

    def _landed(self, extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        if extent.read_state is not State.QUEUED:
            return
        if error is not None:
            extent.error = f"read failed: {error}"
        extent.read_state = State.DONE if error is None else State.FAILED
        if error is None:
            self.stats.bytes_read += extent.nbytes
        self.transfers.append(TransferRecord("read", extent.first, began, ended, extent.nbytes))


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


def _weak(told: Finished) -> Finished:
    """Return a method that does not keep its store: one that is dropped goes at once."""
    method = weakref.WeakMethod(told)

    def tell(extent: Extent, began: float, ended: float, error: Exception | None) -> None:
        if (found := method()) is not None:
            found(extent, began, ended, error)

    return tell
