"""The store of a durable run: states in files that are complete or absent.

Small states (at least four fit in a batch) are copied into the batch that is
filling, which becomes one file.  Large states have a file each and are taken by
reference.  The writer, when it is free, lets the batch that is filling fill for a
moment (`linger_s`) and writes it.  So a state is safe soon, quick steps do not make a
file each, and while one batch is on its way the next one fills.

A checkpoint that is dropped stays on the disk until an adjoint is there that
makes it unneeded (`release`): a run that resumes from the last adjoint on the
disk finds every checkpoint below it.
"""

from __future__ import annotations

import contextlib
import errno
from array import array
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np

from ..backends.arena import LandingPool, landing_bytes, landing_pool, pages
from ..backends.base import BaseStore, CheckpointLost, StoreStats, TransferRecord
from ..backends.extents import Index, TransferState
from ..backends.lanes import Lane
from ..backends.lifetimes import Hold
from ..backends.medium import is_full, warn_full
from ..errors import StoreError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield, whole
from ..support.step_sets import StepSet
from ..support.waiting import Latch, Monitor
from .folder import Folder
from .headers import BadFile, Kind, encode, parse_states, states_table
from .records import OrderedLayout, checksum_of

# A kill costs the steps of this time again, and a day of steps makes half a
# million files at most.
LINGER_S = 0.2
_PLACES = 1 << 20  # more than the states of any batch
_NEVER = 2**62
_SMALL = 4
_BATCH_BYTES = 1 << 20
_BUFFERS = 3  # batches that are filling or on their way


@dataclass(slots=True, eq=False)
class Batch:
    """Some states in one file, or on their way there.

    It belongs to the computing thread while `state` is FILLING, then to the writer until
    it is DONE or FAILED; the change is made under the lock of the store's `_changes`.
    """

    number: int
    name: str
    state: TransferState = TransferState.FILLING
    steps: array[int] = field(default_factory=lambda: array("q"))
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    least: int = _NEVER  # of the steps
    live: int = 0  # states that were not dropped
    buffer: Array | None = None
    arrays: Sequence[Array] | None = None
    offset: int = 0
    file_bytes: int = 0
    error: str = ""
    wanted: bool = False  # now: by a reader, or because it is full

    def add(self, step: int) -> None:
        """Enter a state, at the next place."""
        self.steps.append(step)
        self.least = min(self.least, step)

    @property
    def settled(self) -> bool:
        """Whether its write is over."""
        return self.state in (TransferState.DONE, TransferState.FAILED)


def batch_in(folder: Folder, name: str, run: bytes, record_bytes: int) -> Batch:
    """Return a batch that a run left; its records are not read.  Raises OSError, BadFile."""
    header = folder.header(name)
    if header.run != run:
        raise BadFile("it belongs to another run")
    steps, checksums = parse_states(header, record_bytes)
    if min(steps) < 0 or max(steps) >= 2**48 or len(steps) >= _PLACES:
        raise BadFile("its steps are out of range")
    batch = Batch(0, name, TransferState.DONE, steps, checksums, min(steps))
    batch.offset, batch.file_bytes = header.offset, header.file_bytes
    return batch


@dataclass(slots=True, eq=False)
class _Read:
    """One record on its way back; `record` is None if it was not read, and `error` says why."""

    batch: Batch
    place: int
    step: int
    done: Latch = field(default_factory=Latch)
    record: Array | None = None
    error: str = ""


class DurableStore(BaseStore):
    """Checkpoints that outlive their process; see `multistage.backends.base.Store`.

    Parameters
    ----------
    folder : callable
        Returns the open folder when the store opens.
    prefix : str
        Its files are named `{prefix}-{number}`.
    linger_s : float
        A batch that is not full waits so long for more, unless it is needed.
    lasting : bool
        Whether files stay when the store closes.  Then a dropped state that is
        put again is taken to be what it was: states of one run are.

    Notes
    -----
    For one computing thread.  `put` with `block`, `wait_written`, `get`,
    `flush` and `close` may block; nothing else does.
    """

    name = "durable"
    queue_depth = 2

    def __init__(
        self,
        folder: Callable[[], Folder],
        prefix: str = "states",
        *,
        linger_s: float = LINGER_S,
        lasting: bool = True,
    ) -> None:
        self._folder_of = folder
        self._prefix = prefix
        self._linger_s = linger_s
        self._lasting = lasting
        self.stats = StoreStats()
        self.transfers: deque[TransferRecord] = deque(maxlen=100_000)
        self._writer: Lane[Callable[[], None]] | None = None
        self._reader: Lane[_Read] | None = None
        self._pool: LandingPool | None = None
        self._buffers: list[Array] = []
        self._hold = Hold(self.name)
        self._left: list[Batch] = []  # by a run, to be taken over
        self._adopted = StepSet()  # those of its states that are
        self._next_number = 0
        self._empty()

    def _empty(self) -> None:
        """Know of no state."""
        self._index: Index[Batch] = Index(_PLACES)
        self._dropped = StepSet()  # states in a file still, as far as the index knows them
        self._dead: dict[int, Batch] = {}  # without live states, by number
        # Of states from this step on, no file is needed.
        self._needed_below = self._looked_below = _NEVER if self._lasting else 0

    # ------------------------------------------------------------------- life

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of batches on their way, and of idle buffers for large states."""
        size, count = _ordered(layout).record_bytes, _per_batch(_ordered(layout))
        return _BUFFERS * count * size if count > 1 else landing_bytes(size)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return None: bounded by the disk alone."""
        return None

    def open(self, layout: Layout) -> None:
        """Start the threads.  Raises StoreError."""
        whole(partial(self._take, layout), self.close)

    def _take(self, layout: Layout) -> None:
        self._hold.take()
        try:
            self._begin(layout)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, MemoryError, RuntimeError)):  # no memory, no thread
                raise StoreError(
                    f"tier {self.name!r} cannot be used: {str(error) or 'no memory'}; it needs "
                    f"{self.buffer_bytes(layout)} bytes of buffers and two threads"
                ) from error
            raise
        self._left, self._adopted = [], StepSet()

    def _begin(self, layout: Layout) -> None:
        if layout.varied:
            raise StoreError(f"tier {self.name!r} takes states of equal size alone")
        self._plain = not isinstance(layout, OrderedLayout)
        self._layout = _ordered(layout)
        self._record_bytes = size = self._layout.record_bytes
        self._folder = self._folder_of()
        self._count = _per_batch(self._layout)
        self.stats = StoreStats()
        self.transfers.clear()
        self._empty()
        self._stored(self._take_over())
        self._changes = Monitor()  # notified when a batch is written
        self._filling: Batch | None = None
        self._waiting: deque[Batch] = deque()  # large ones not known to be written
        nbytes = self._count * size
        count = _BUFFERS if self._count > 1 else 0
        self._buffers = [pages(nbytes)[:nbytes] for _ in range(count)]
        self._full = self._full_warned = False  # whether a write has found the disk full
        self._writer = Lane("multistage-durable-writer")
        self._writer.start(_do)
        self._pool = landing_pool(size)
        self._under_way: dict[int, _Read] = {}  # by step
        self._reader = Lane("multistage-durable-reader")
        self._reader.start(self._read)

    def _stored(self, states: int) -> None:
        """Count states that are on the disk, or on their way there."""
        stats = self.stats
        stats.stored_bytes += states * self._record_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)

    def adopt(self, layout: OrderedLayout, folder: Folder, below: int | None) -> list[int]:
        """Take over the states before `below` that a run left; return their steps, ascending.

        All of them, if it is None.

        Files that are not what they should be are removed; those that cannot be read stay.
        Records are read only when they are needed, and verified then.
        """
        self.forget()
        below = _NEVER if below is None else below
        for name in folder.names():
            kind, _, number = name.partition("-")
            if kind != self._prefix:
                continue
            try:
                batch = batch_in(folder, name, folder.run, layout.record_bytes)
                if batch.least >= below:
                    raise BadFile("it is not needed any more")
            except BadFile:
                with contextlib.suppress(OSError):
                    folder.unlink(name)
                    continue
            except OSError:
                # Its states are recomputed.  The file stays: the next resumed run may read it,
                # if there were no descriptors left, for example.
                pass
            else:
                batch.number = int(number)
                self._left.append(batch)
                for step in batch.steps:
                    if step < below:
                        self._adopted.add(step)
            self._next_number = max(self._next_number, int(number) + 1)
        return list(self._adopted)

    def keep(self, steps: Container[int]) -> None:
        """Know only of these of the states taken over: other ranks lack the rest."""
        for step in list(self._adopted):
            if step not in steps:
                self._adopted.discard(step)

    def forget(self) -> None:
        """Know of no files: the next `open` begins with none."""
        self._left, self._adopted, self._next_number = [], StepSet(), 0

    def _take_over(self) -> int:
        """Know of what a run left; return how many states that is, wanted or not."""
        for batch in self._left:
            self._index.extents[batch.number] = batch
            batch.live = 0
            for place, step in enumerate(batch.steps):
                if step in self._adopted and step not in self._index:
                    self._index.enter(step, batch, place)
                    batch.live += 1
            self._note_death(batch)
        return sum(len(batch.steps) for batch in self._left)

    def close(self) -> None:
        """Write what is queued, stop the threads.  May be called twice.

        In a forked child it leaves threads and files to the parent.
        """
        with Shield(up=True):
            if self._hold.taken:
                self._close()

    def _close(self) -> None:
        """End the threads; interrupted, it can be called again."""
        if not self._hold.foreign:
            if self._writer is not None:
                self._writer.end()
                with self._changes.lock:
                    self._changes.notify_all()
                self._writer.join()
            if self._reader is not None:  # after the writer: a read may wait for a write
                self._reader.end()
                self._reader.join()
            if not self._lasting:
                for batch in self._index.extents.values():
                    self._unlink(batch.name)
        self._empty()
        self._buffers, self._under_way = [], {}
        self._writer = self._reader = self._pool = None
        self._hold.give_back()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        if self._revive(key):
            return True
        stats = self.stats
        if self._full:
            stats.refused += 1
            stats.refused_full += 1
            return False
        packed = arrays
        if len(packed) == len(self._layout.leaves):  # from one who knows plain layouts only
            packed = [*packed, self._layout.order(None)]
        place = self._put_large if self._count == 1 else self._put_small
        batch = place(key, packed, block)
        if batch is None:
            stats.refused += 1
            return False
        self._index.enter(key, batch, len(batch.steps) - 1)
        self._dead.pop(batch.number, None)  # its states so far may all have been dropped
        batch.live += 1
        stats.writes += 1
        self._stored(1)
        return True

    def _new_batch(self) -> Batch:
        number = self._next_number
        self._next_number += 1
        batch = Batch(number, f"{self._prefix}-{number}")
        self._index.extents[number] = batch
        return batch

    def _put_small(self, key: int, packed: Sequence[Array], block: bool) -> Batch | None:
        while True:
            with self._changes.lock:
                batch = self._filling or self._begun()
                if batch is not None:
                    self._fill(batch, key, packed)
                    return batch
            if not block:
                return None
            self._changes.wait_for(lambda: bool(self._buffers))

    def _begun(self) -> Batch | None:
        """Begin a batch; None if all buffers are taken.  Holds the lock."""
        if not self._buffers:
            return None
        batch = self._new_batch()
        batch.buffer = self._buffers.pop()
        # In this order: of a batch that Ctrl-C leaves empty the writer gives the buffer back.
        self._queue(partial(self._write, batch))
        self._filling = batch
        return batch

    def _fill(self, batch: Batch, key: int, packed: Sequence[Array]) -> None:
        """Copy a state into a batch.  Holds the lock."""
        place, size = len(batch.steps), self._record_bytes
        assert batch.buffer is not None
        self._layout.fill(batch.buffer[place * size : (place + 1) * size], packed)
        batch.add(key)
        if place + 1 == self._count:
            self._filling = None
            batch.wanted = True
            self._changes.notify_all()

    def _put_large(self, key: int, packed: Sequence[Array], block: bool) -> Batch | None:
        waiting = self._waiting
        while waiting and waiting[0].state is not TransferState.QUEUED:
            waiting.popleft()
        if len(waiting) >= self.queue_depth:
            if not block:
                return None
            self._wait(waiting[0])
        batch = self._new_batch()
        batch.state = TransferState.QUEUED
        batch.arrays = tuple(packed)
        batch.add(key)
        waiting.append(batch)
        self._queue(partial(self._write, batch))
        return batch

    def wait_written(self, key: int) -> bool:
        """Block until the store is done with the arrays of `key`; False if they are lost."""
        self._hold.check()
        entry = self._find(key)
        if entry is None:
            return False
        batch = entry[0]
        if self._count == 1:
            self._wait(batch)
        if batch.state is TransferState.FAILED:
            self._lose(key)
            return False
        return True

    def _wait(self, batch: Batch) -> None:
        """Block until a batch is written, or was not."""
        with self._changes.lock:
            if batch.state is TransferState.FILLING:
                batch.wanted = True
                self._changes.notify_all()
        self._changes.wait_for(lambda: batch.settled)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the writer, after all that was queued before; it must not raise."""
        self._hold.check()
        self._queue(job)

    def _queue(self, job: Callable[[], None]) -> None:
        assert self._writer is not None
        with self._changes.lock:
            self._writer.put(job)
            self._changes.notify_all()  # the writer may be waiting for a batch to fill

    def flush(self) -> None:
        """Block until all that was queued is done."""
        done = Latch()
        self.submit(done.set)
        done.wait()

    def _write(self, batch: Batch) -> None:
        """Write one batch, on the writer; whatever happens, its state says so."""
        assert self._writer is not None
        lane = self._writer
        if batch.state is TransferState.FILLING:
            self._changes.wait_for(lambda: batch.wanted or lane.waiting > 0, self._linger_s)
        with self._changes.lock:
            batch.state = TransferState.QUEUED
            if self._filling is batch:
                self._filling = None  # from here on it grows no more
            if not batch.steps:  # the put that began it raised
                self._give_back(batch, TransferState.FAILED)
                return
        began = perf_counter()
        state, nbytes = TransferState.DONE, len(batch.steps) * self._record_bytes
        try:
            self._publish(batch)
            self.stats.bytes_written += nbytes
        except Exception as error:  # the computing thread must learn of every error
            state = TransferState.FAILED
            batch.error = f"write failed: {error}"
            self._full = self._full or is_full(error)
        self.transfers.append(
            TransferRecord("write", batch.steps[0], began, perf_counter(), nbytes)
        )
        with self._changes.lock:
            self._give_back(batch, state)

    def _publish(self, batch: Batch) -> None:
        """Write the file of a batch, and note in the batch what lies where.  Raises OSError."""
        size, count = self._record_bytes, len(batch.steps)
        if batch.buffer is not None:
            records = [[batch.buffer[k * size : (k + 1) * size]] for k in range(count)]
            pieces = [batch.buffer[: count * size]]
        else:
            assert batch.arrays is not None
            pieces = self._layout.parts(batch.arrays)
            records = [pieces]
        batch.checksums = array("Q", map(checksum_of, records))
        table = states_table(batch.steps, batch.checksums)
        header = encode(Kind.STATES, self._folder.run, table, count * size)
        batch.offset, batch.file_bytes = len(header), len(header) + count * size
        # A power cut before the name is on the disk costs a checkpoint, no more.
        self._folder.publish(batch.name, [header, *pieces], settled=False)

    def _give_back(self, batch: Batch, state: TransferState) -> None:
        """Give the memory of a batch back, whose write is over.  Holds the lock."""
        if batch.buffer is not None:
            self._buffers.append(batch.buffer)
        batch.buffer = batch.arrays = None
        batch.state = state
        self._changes.notify_all()

    # ------------------------------------------------------------------- drops

    def _find(self, step: int) -> tuple[Batch, int] | None:
        """Return the batch of a state that was not dropped, and the place in it."""
        return None if step in self._dropped else self._index.find(step)

    def _revive(self, step: int) -> bool:
        """Take a dropped state back that is on the disk still: states are what they were."""
        if step not in self._dropped:
            return False
        entry = self._index.find(step)
        assert entry is not None
        batch = entry[0]
        self._dropped.discard(step)
        if batch.state is TransferState.FAILED or not self._lasting:
            self._index.pop(step)
            return False
        self._dead.pop(batch.number, None)
        batch.live += 1
        return True

    def drop(self, key: int) -> None:
        """Drop `key`; its file is removed when no resumed run would need it."""
        self._hold.check()
        entry = self._find(key)
        if entry is None:
            return
        self._dropped.add(key)
        self._end_life(key, entry[0])
        self._bury()

    def _lose(self, key: int) -> None:
        """Forget a state that cannot be read; warn once if its write found the disk full."""
        if self._full and not self._full_warned:
            self._full_warned = True
            warn_full("the durable folder", "no space is left")
        self.stats.lost += 1
        batch = self._index.pop(key)
        assert batch is not None
        self._end_life(key, batch)

    def _end_life(self, key: int, batch: Batch) -> None:
        batch.live -= 1
        self._note_death(batch)
        self._under_way.pop(key, None)  # a read that is not needed any more

    def _note_death(self, batch: Batch) -> None:
        if not batch.live:
            self._dead[batch.number] = batch

    def release(self, step: int) -> None:
        """Say that a resumed run would begin at adjoint `step`: later states are not needed.

        May be called from any thread; files go at the next `drop`.
        """
        self._needed_below = step

    def _bury(self) -> None:
        """Forget the batches of dropped states that are not needed and that no thread uses."""
        needed_below = self._needed_below
        newest = self._dead[next(reversed(self._dead))] if self._dead else None
        if needed_below == self._looked_below and (newest is None or newest.least < needed_below):
            return  # many may wait for the next adjoint: they are not looked at each time
        self._looked_below = needed_below
        left = {}
        for batch in self._dead.values():
            if batch.least < needed_below or not batch.settled:
                left[batch.number] = batch
                continue
            for step in batch.steps:
                entry = self._index.find(step)
                if entry is not None and entry[0] is batch:
                    self._index.pop(step)
                    self._dropped.discard(step)
            self._index.forget(batch)
            self.stats.stored_bytes -= len(batch.steps) * self._record_bytes
            self._queue(partial(self._unlink, batch.name))
        self._dead = left

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it stays: some bytes of disk, until the run is over
            self._folder.unlink(name)

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still in flight."""
        self._hold.check()
        entry = self._find(key)
        if entry is not None and key not in self._under_way:
            assert self._reader is not None
            read = _Read(*entry, key)
            self._reader.put(read)  # first: what is noted ends, whenever Ctrl-C comes
            self._under_way[key] = read

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self._hold.check()
        if self._find(key) is None:
            raise CheckpointLost(f"the durable folder has no checkpoint {key}")
        self.prefetch(key)
        read = self._under_way.pop(key)
        read.done.wait()
        if read.record is None:
            self._lose(key)
            raise CheckpointLost(read.error)
        self.stats.reads += 1
        read.record.flags.writeable = False
        arrays = self._layout.split(read.record)
        if arrays is None:
            self._lose(key)
            raise CheckpointLost("read failed: its strides are none of an array")
        return arrays[:-1] if self._plain else arrays

    def _read(self, read: _Read) -> None:
        """Read one state, on the reader; `read` reports the result or the error."""
        self._wait(read.batch)  # read what is still being written
        began = perf_counter()
        try:
            read.record = self._record(read.batch, read.place)
            self.stats.bytes_read += self._record_bytes
        except Exception as error:  # the computing thread must learn of every error
            read.error = f"read failed: {error}"
        self.transfers.append(
            TransferRecord("read", read.step, began, perf_counter(), self._record_bytes)
        )
        read.done.set()

    def _record(self, batch: Batch, place: int) -> Array:
        """Return the bytes of one state, verified.  Raises OSError, BadFile, MemoryError."""
        size = self._record_bytes
        if batch.state is TransferState.FAILED:
            raise OSError(errno.EIO, batch.error)
        # A page for each small state would be more than the state.
        assert self._pool is not None
        landing = np.empty(size, np.uint8) if self._count > 1 else self._pool.take()
        record = landing[:size]
        self._folder.read(batch.name, batch.file_bytes, batch.offset + place * size, record)
        if checksum_of([record]) != batch.checksums[place]:
            raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")
        return record


def _ordered(layout: Layout) -> OrderedLayout:
    """Return a layout whose records hold the strides of arrays."""
    return layout if isinstance(layout, OrderedLayout) else OrderedLayout.like(layout)


def _per_batch(layout: OrderedLayout) -> int:
    """Return how many states share a file, 1 for large ones."""
    count = _BATCH_BYTES // layout.record_bytes
    return min(count, 1 << 14) if count >= _SMALL else 1


def _do(job: Callable[[], None]) -> None:
    job()
