"""The store of a durable run: states in files that are complete or absent.

Small states (at least four fit in a batch) are copied into the batch that is
filling, which becomes one file.  Large states have a file each and are taken by
reference.

A checkpoint that is dropped stays on the disk until an adjoint is there that
makes it unneeded (`release`): whoever resumes from the last adjoint on the
disk finds every checkpoint below it.

The computing thread owns the index and the counts; the batches that are filling or on
their way are the `Writer`'s.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

from ..backends.arena import landing_bytes, landing_pool
from ..backends.base import BaseStore, CheckpointLost, StoreStats, TransferRecord
from ..backends.extents import Index, State
from ..backends.lanes import Lane
from ..backends.lifetimes import Hold
from ..backends.medium import warn_full
from ..errors import StoreError
from ..states.layout import Array, Layout
from ..support.step_sets import StepSet
from .batches import (
    NEVER,
    PLACES,
    Batch,
    Read,
    batches_in,
    ordered,
    per_batch,
    read_record,
)
from .folder import Folder
from .records import OrderedLayout
from .writing import BUFFERS, Writer

# A kill costs the steps of this time again, and a day of steps makes half a
# million files at most.
LINGER_S = 0.2


class DurableStore(BaseStore):
    """Checkpoints that outlive their process; see `multistage.backends.base.Store`.

    Parameters
    ----------
    folder : callable
        Returns the open folder when the store opens.
    prefix : str
        Its files are named `{prefix}-{number}`.
    linger_s : float
        A batch that is not full waits so long for more, unless it is wanted.
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
        self._writer: Writer | None = None
        self._hold = Hold(self.name)
        self._index: Index[Batch] = Index(PLACES)
        self._dead: dict[int, Batch] = {}  # without live states, by number
        self._reading: dict[int, Read] = {}
        self._reads: Lane[Read] = Lane("multistage-durable-reader")
        self._found: list[Batch] = []
        self._below = NEVER
        self._kept: Container[int] | None = None
        self._next_number = 0

    # ------------------------------------------------------------------- life

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of batches on their way, and of idle buffers for large states."""
        size = ordered(layout).record_bytes
        count = per_batch(ordered(layout))
        return BUFFERS * count * size if count > 1 else landing_bytes(size)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return None: bounded by the disk alone."""
        return None

    def open(self, layout: Layout) -> None:
        """Start the threads.  Raises StoreError."""
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
        self._found = []

    def _begin(self, layout: Layout) -> None:
        self._plain = not isinstance(layout, OrderedLayout)
        self._layout = ordered(layout)
        self._folder = self._folder_of()
        self._count = per_batch(self._layout)
        self.stats = StoreStats()
        self.transfers.clear()
        self._dropped = StepSet()  # on the disk still, as far as the index knows them
        self._needed_below = self._buried_below = NEVER if self._lasting else 0
        self._full_warned = False
        self._pool = landing_pool(self._layout.record_bytes)
        for batch in self._found:
            self._enter(batch)
        self._writer = Writer(
            self._folder,
            self._layout,
            self._new_batch,
            self._linger_s,
            self.stats,
            self.transfers,
        )
        self._reads = Lane("multistage-durable-reader")
        self._reads.start(self._read)

    def _enter(self, batch: Batch) -> None:
        """Take up what a run left in a batch, as far as it is needed."""
        self._index.extents[batch.number] = batch
        batch.live = 0
        for place, step in enumerate(batch.steps):
            wanted = step < self._below and (self._kept is None or step in self._kept)
            if wanted and step not in self._index:
                self._index.enter(step, batch, place)
                batch.live += 1
        self.stats.stored_bytes += len(batch.steps) * self._layout.record_bytes
        self.stats.peak_stored_bytes = self.stats.stored_bytes
        if not batch.live:
            self._dead[batch.number] = batch

    def adopt(self, layout: OrderedLayout, folder: Folder, below: int | None) -> list[int]:
        """Take over the states before `below` that a run left; return their steps, ascending.

        All of them, if it is None.

        Files that are not what they should be are removed.  Records are read
        only when they are wanted, and verified then.
        """
        below = NEVER if below is None else below
        self._below, self._kept = below, None
        self._found = batches_in(folder, self._prefix, layout, below)
        self._next_number = 1 + max((batch.number for batch in self._found), default=-1)
        return sorted({step for batch in self._found for step in batch.steps if step < below})

    def keep(self, steps: Container[int]) -> None:
        """Know only of these of the states taken over: other ranks lack the rest."""
        self._kept = steps

    def forget(self) -> None:
        """Know of no files: the next `open` begins with none."""
        self._found, self._below, self._kept = [], NEVER, None
        self._next_number = 0

    def close(self) -> None:
        """Write what is queued, stop the threads.  May be called twice.

        In a forked child it leaves threads and files to the parent.
        """
        if not self._hold.taken:
            return
        if not self._hold.foreign:
            if self._writer is not None:
                self._writer.close()
            self._reads.end()  # after the writer: a read may wait for a write
            self._reads.join()
            if not self._lasting:
                for batch in self._index.extents.values():
                    with contextlib.suppress(OSError):  # the next run clears up
                        self._folder.unlink(batch.name)
        self._index = Index(PLACES)
        self._writer = None
        self._reading.clear()
        self._dead.clear()
        self._pool = landing_pool(0)
        self._hold.give_back()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        if self._revive(key):
            return True
        writer, stats = self._writing(), self.stats
        if writer.full:
            stats.refused += 1
            stats.refused_full += 1
            return False
        packed = arrays
        if len(packed) == len(self._layout.leaves):  # from one who knows plain layouts only
            packed = [*packed, self._layout.order(None)]
        batch = writer.put(key, packed, block=block, depth=self.queue_depth)
        if batch is None:
            stats.refused += 1
            return False
        self._index.enter(key, batch, len(batch.steps) - 1)
        self._dead.pop(batch.number, None)  # its states so far may all have been dropped
        batch.live += 1
        stats.writes += 1
        stats.stored_bytes += self._layout.record_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        return True

    def _revive(self, key: int) -> bool:
        """Take a dropped state back that is on the disk still: states are what they were."""
        if key not in self._dropped:
            return False
        entry = self._index.find(key)
        assert entry is not None
        batch = entry[0]
        self._dropped.discard(key)
        if batch.state is State.FAILED or not self._lasting:
            self._index.pop(key)
            return False
        self._dead.pop(batch.number, None)
        batch.live += 1
        return True

    def _new_batch(self) -> Batch:
        number = self._next_number
        self._next_number += 1
        batch = self._index.extents[number] = Batch(number, f"{self._prefix}-{number}")
        return batch

    def _batch_of(self, key: int) -> tuple[Batch, int] | None:
        """Return the batch of a state that was not dropped, and the place in it."""
        return None if key in self._dropped else self._index.find(key)

    def wait_written(self, key: int) -> bool:
        """Block until the store is done with the arrays of `key`; False if they are lost."""
        self._hold.check()
        entry = self._batch_of(key)
        if entry is None:
            return False
        batch = entry[0]
        if self._count == 1:
            self._writing().wait(batch)
        if batch.state is State.FAILED:
            self._warn_if_full()
            self._lose(key)
            return False
        return True

    def _warn_if_full(self) -> None:
        if self._writing().full and not self._full_warned:
            self._full_warned = True
            warn_full("the durable folder", "no space is left")

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the writer, after all that was queued before; it must not raise."""
        self._hold.check()
        self._writing().submit(job)

    def _writing(self) -> Writer:
        assert self._writer is not None
        return self._writer

    def flush(self) -> None:
        """Block until all that was queued is done."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    # ------------------------------------------------------------------- drops

    def drop(self, key: int) -> None:
        """Do without `key`; its file goes when no resumed run would want it."""
        self._hold.check()
        entry = self._batch_of(key)
        if entry is None:
            return
        batch = entry[0]
        self._dropped.add(key)
        self._reading.pop(key, None)  # nobody will ask for it
        batch.live -= 1
        if not batch.live:
            self._dead[batch.number] = batch
        self._bury()

    def release(self, step: int) -> None:
        """Say that a resumed run would begin at adjoint `step`: later states are not needed.

        May be called from any thread; files go at the next `drop`.
        """
        self._needed_below = step

    def _bury(self) -> None:
        """Remove the files of dropped states that nobody needs and no thread is at."""
        needed_below = self._needed_below
        newest = self._dead[next(reversed(self._dead))] if self._dead else None
        if needed_below == self._buried_below and (newest is None or newest.least < needed_below):
            return  # many may be waiting for the next adjoint: they are not looked at each time
        self._buried_below = needed_below
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
            self.stats.stored_bytes -= len(batch.steps) * self._layout.record_bytes
            self.submit(partial(self._unlink, batch.name))
        self._dead = left

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it stays: some bytes of disk, until the run is over
            self._folder.unlink(name)

    def _lose(self, key: int) -> None:
        self.stats.lost += 1
        batch = self._index.pop(key)
        assert batch is not None
        batch.live -= 1
        if not batch.live:
            self._dead[batch.number] = batch

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still under way."""
        self._hold.check()
        entry = self._batch_of(key)
        if entry is None or key in self._reading:
            return
        read = self._reading[key] = Read(*entry, key)
        self._reads.put(read)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self._hold.check()
        if self._batch_of(key) is None:
            raise CheckpointLost(f"the durable folder has no checkpoint {key}")
        self.prefetch(key)
        read = self._reading.pop(key)
        changed = self._writing().changed
        with changed:
            changed.wait_for(lambda: read.done)
        if read.record is None:
            self._warn_if_full()
            self._lose(key)
            raise CheckpointLost(read.error)
        self.stats.reads += 1
        record = read.record
        record.flags.writeable = False
        arrays = self._layout.split(record)
        if arrays is None:
            self._lose(key)
            raise CheckpointLost("read failed: its strides are none of an array")
        return arrays[:-1] if self._plain else arrays

    def _read(self, read: Read) -> None:
        """Read one state; whatever happens, `read` tells."""
        writer = self._writing()
        writer.wait(read.batch)  # read what is still being written
        nbytes, began = self._layout.record_bytes, time.perf_counter()
        record: Array | None = None
        try:
            record = read_record(read, self._folder, self._layout, self._pool)
            self.stats.bytes_read += nbytes
        except Exception as error:  # whatever it is, the computing thread must be told
            read.error = f"read failed: {error}"
        ended = time.perf_counter()
        self.transfers.append(TransferRecord("read", read.step, began, ended, nbytes))
        with writer.changed:
            read.record = record
            read.done = True
            writer.changed.notify_all()
