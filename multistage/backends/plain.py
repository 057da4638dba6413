"""`streamed.Stream` where there is no C core: each state a transfer of its own, two threads.

Simple, for machines without a compiler: no extents, so small states take long.
"""

from __future__ import annotations

import errno
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash

from .. import native
from ..errors import ArgumentError
from ..states.layout import Array, Layout, places
from ..support.waiting import Latch
from .arena import landing_pool, pages, round_up
from .base import CheckpointLost, StoreStats, TransferRecord
from .lanes import Lane
from .lifetimes import Birth
from .medium import Medium, Room, is_full, warn_full


@dataclass(frozen=True, slots=True)
class Setup:
    """What the streams of a store are set up with.

    Attributes
    ----------
    name : str
        Of the store, for messages.
    medium : Medium
        Closed with the stream.
    layout : Layout
    count : int
        States that share an extent; 1 for large ones.
    capacity_bytes : int or None
        Most bytes of extents, in whole pages.
    depth : int
        Writes of large states in flight.
    threads : int
        Each way, at most.
    bounce_bytes : int
        Memory that large states leave through.
    verify : bool
        Whether what is read must have the checksum of what was written.
    warns : bool
        Whether to warn once it is full.
    stats, transfers
        Of the store.
    """

    name: str
    medium: Medium
    layout: Layout
    count: int
    capacity_bytes: int | None
    depth: int
    threads: int
    bounce_bytes: int
    verify: bool
    warns: bool
    stats: StoreStats
    transfers: deque[TransferRecord]


def has_streams() -> bool:
    """Whether the C core's record streams are there."""
    return sys.platform == "linux" and native.LIBRARY is not None


class _Record:
    """One state and its write."""

    __slots__ = (
        *("arrays", "cancelled", "checksum", "ended", "error", "full", "key", "kinds"),
        *("nbytes", "read", "slot", "times"),
    )

    def __init__(self, key: int, arrays: Sequence[Array], kinds: list[Any], nbytes: int) -> None:
        self.key, self.kinds, self.nbytes = key, kinds, nbytes
        self.arrays: Sequence[Array] | None = arrays
        self.slot = self.checksum = 0
        self.cancelled = self.full = False
        self.error = ""  # why the write failed
        self.ended = Latch()  # then its owner may look at what the thread has set
        self.times = (0.0, 0.0)
        self.read: _Read | None = None  # the last that was queued


class _Read:
    """The read of a state."""

    __slots__ = ("cancelled", "ended", "error", "landing", "record", "times")

    def __init__(self, record: _Record, landing: Array) -> None:
        self.record = record
        self.landing: Array | None = landing  # None: it was cancelled
        self.error, self.cancelled = "", False
        self.ended = Latch()
        self.times = (0.0, 0.0)


class PlainStream:
    """The records of an open store; see `streamed.Stream`, whose methods it has."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._medium = setup, setup.medium
        self._layout, self._stats, self._transfers = setup.layout, setup.stats, setup.transfers
        self._birth = Birth.here()
        self._room = Room(setup.capacity_bytes)
        self._records: dict[int, _Record] = {}
        self._writing: deque[_Record] = deque()  # in order, until noted
        self._reading: deque[_Read] = deque()
        self._zombies: list[_Record] = []  # dropped, while a thread is at them
        self._writes: Lane[_Record] = Lane("multistage-writer")
        self._reads: Lane[_Read] = Lane("multistage-reader")
        self._pool = landing_pool(round_up(setup.layout.nbytes))
        self._warned = not setup.warns

    def start(self) -> None:
        """Allocate buffers and start the threads."""
        self._bounce = pages(self._setup.bounce_bytes)
        self._writes.start(self._write)
        self._reads.start(self._read)

    # ------------------------------------------------------------ the two threads

    def _write(self, record: _Record) -> None:
        began, error = time.perf_counter(), ""
        try:
            self._gather(record)
        except Exception as failure:  # whatever it is: states are lost, not runs
            error, record.full = f"write failed: {failure}", is_full(failure)
        record.error, record.arrays = error, None
        record.times = began, time.perf_counter()
        record.ended.set()

    def _gather(self, record: _Record) -> None:
        """Write a state chunk by chunk."""
        assert record.arrays is not None
        total, digest = round_up(record.nbytes), xxhash.xxh3_64()
        self._medium.begin(record.slot, total)
        sources = [array.reshape(-1).view(np.uint8) for array in record.arrays]
        for start in range(0, total, len(self._bounce)):
            if record.cancelled:
                raise OSError(errno.ECANCELED, "it was cancelled")
            part = self._bounce[: total - start]
            for source, (_, _, at) in zip(sources, record.kinds, strict=True):
                first, stop = max(at, start), min(at + len(source), start + len(part))
                if first < stop:
                    part[first - start : stop - start] = source[first - at : stop - at]
            digest.update(part[: record.nbytes - start].data)
            self._medium.write(record.slot, start, part)
        record.checksum = digest.intdigest()

    def _read(self, read: _Read) -> None:
        record, landing = read.record, read.landing
        record.ended.wait()
        began = time.perf_counter()
        try:
            if read.cancelled or landing is None:
                raise OSError(errno.ECANCELED, "it was cancelled")
            if record.error:
                raise OSError(record.error)
            self._medium.read(record.slot, landing[: round_up(record.nbytes)])
            found = xxhash.xxh3_64_intdigest(landing[: record.nbytes].data)
            if self._setup.verify and found != record.checksum:
                raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")
        except Exception as failure:
            read.error = f"read failed: {failure}"
        del landing  # the pool would take it to be in use
        read.times = began, time.perf_counter()
        read.ended.set()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], block: bool) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self.note()
        offsets, nbytes = places([array.nbytes for array in arrays])
        kinds = [(a.shape, a.dtype, at) for a, at in zip(arrays, offsets, strict=True)]
        if sum(array.nbytes for array in arrays) > self._layout.nbytes:
            raise ArgumentError(
                f"put of {nbytes} bytes in tier {self._setup.name!r}, opened for at most "
                f"{self._layout.nbytes}"
            )
        while len(self._writing) >= self._setup.depth:
            if not block:
                return self._refused()
            self._writing[0].ended.wait()
            self.note()
        record = _Record(key, tuple(arrays), kinds, nbytes)
        if not self._room.fits(round_up(record.nbytes)):
            self._stats.refused_full += 1
            if not self._warned:
                self._warned = True
                used = f"its capacity of {self._setup.capacity_bytes} bytes is used"
                why = "no space is left" if self._room.closed else used
                warn_full(f"tier {self._setup.name!r}", why)
            return self._refused()
        self.drop(key)
        record.slot = self._room.take(round_up(record.nbytes))
        stats = self._stats
        stats.stored_bytes += round_up(record.nbytes)
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        stats.writes += 1
        self._writes.put(record)  # first: whatever is noted ends
        self._writing.append(record)
        self._records[key] = record
        return True

    def _refused(self) -> Literal[False]:
        self._stats.refused += 1
        return False

    def note(self) -> None:
        """Take note of what the threads have ended, and free what was dropped."""
        while self._writing and self._writing[0].ended.is_set():
            record = self._writing.popleft()
            if record.full:
                self._room.close()  # what it holds now is its capacity
            self._count("write", record, record)
        while self._reading and self._reading[0].ended.is_set():
            read = self._reading.popleft()
            self._count("read", read.record, read)
        for record in list(self._zombies):
            if record.ended.is_set() and (record.read is None or record.read.ended.is_set()):
                self._zombies.remove(record)  # first: none is given back twice
                self._stats.stored_bytes -= round_up(record.nbytes)
                if not record.full:
                    self._room.give(record.slot)
                    self._medium.free(record.slot)

    def _count(
        self, kind: Literal["write", "read"], record: _Record, transfer: _Record | _Read
    ) -> None:
        if not transfer.error:
            if kind == "write":
                self._stats.bytes_written += record.nbytes
            else:
                self._stats.bytes_read += record.nbytes
        if not (transfer.error and transfer.cancelled):  # it took no time
            self._transfers.append(TransferRecord(kind, record.key, *transfer.times, record.nbytes))

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        record = self._records.get(key)
        if record is None:
            return False
        record.ended.wait()
        self.note()
        if record.error:
            self._lose(record)
        return not record.error

    def cancel(self, key: int) -> None:
        """Give up a write, at its next chunk."""
        record = self._records.get(key)
        if record is not None and not record.ended.is_set():
            record.cancelled = True

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than some seconds; return whether it has ended."""
        record = self._records.get(key)
        return record is None or record.ended.wait(timeout_s)

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait now."""
        self.note()
        return len(self._writing) >= self._setup.depth

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int, into: Array | None = None) -> None:
        """Queue a read of `key`, behind its write."""
        record = self._records.get(key)
        if record is None or record.read is not None:
            return
        read = _Read(record, self._pool.take(record.nbytes) if into is None else into)
        self._reads.put(read)  # first: whatever is noted ends
        self._reading.append(read)
        record.read = read

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than some seconds; return whether it has ended."""
        self.prefetch(key)
        record = self._records.get(key)
        return record is None or record.read is None or record.read.ended.wait(timeout_s)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self.prefetch(key)
        record = self._records.get(key)
        if record is None:
            raise CheckpointLost(f"tier {self._setup.name!r} has no checkpoint {key}")
        read = record.read
        assert read is not None
        read.ended.wait()
        self.note()
        record.read = None  # landed for this reader alone: a later get reads again
        if read.error:
            self._lose(record)
            raise CheckpointLost(read.error)
        landing, read.landing = read.landing, None
        assert landing is not None
        landing.flags.writeable = False
        self._stats.reads += 1
        return [np.ndarray(shape, dtype, landing, at) for shape, dtype, at in record.kinds]

    def _lose(self, record: _Record) -> None:
        self._stats.lost += not (record.cancelled and record.error)
        self.drop(record.key)

    def drop(self, key: int) -> None:
        """Free the medium's copy of `key`.  Unknown keys are ignored."""
        record = self._records.pop(key, None)
        if record is None:
            return
        if record.read is not None:
            # The reading thread refers to what it reads into itself once it has begun.
            record.read.landing, record.read.cancelled = None, True
            self._pool.trim()
        self._zombies.append(record)
        self.note()

    # -------------------------------------------------------------------- life

    def close(self) -> None:
        """Finish what is queued, end the threads, close the medium; see `Stream.close`."""
        if self._birth.foreign:
            return
        for lane in (self._writes, self._reads):
            lane.end()
        for lane in (self._writes, self._reads):
            lane.join()
        self.note()
        self._medium.close()
