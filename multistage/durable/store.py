"""The store of a durable run: states in files that are complete or absent.

Small states (at least four fit in a batch) are copied into the batch that is
filling, which becomes one file.  Large states have a file each and are taken by
reference.

A checkpoint that is dropped stays on the disk until an adjoint is there that
makes it unneeded (`release`): a run that resumes from the last adjoint on the
disk finds every checkpoint below it.

The computing thread owns the `Catalogue` and the counts; the batches that are filling or on
their way are the `Writer`'s, the states on their way back the `Reader`'s.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

from ..backends.arena import landing_bytes
from ..backends.base import BaseStore, CheckpointLost, StoreStats, TransferRecord
from ..backends.extents import TransferState
from ..backends.lifetimes import Hold
from ..errors import StoreError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield, whole
from ..support.waiting import Latch
from .batches import NEVER, Batch, batches_in, ordered, per_batch
from .catalogue import Catalogue, Found
from .folder import Folder
from .reading import Reader
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
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._hold = Hold(self.name)
        self._catalogue = Catalogue(lasting)
        self._found = Found()
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
        self._found.batches = []

    def _begin(self, layout: Layout) -> None:
        self._plain = not isinstance(layout, OrderedLayout)
        self._layout = ordered(layout)
        self._folder = self._folder_of()
        self._count = per_batch(self._layout)
        self.stats = StoreStats()
        self.transfers.clear()
        self._catalogue = Catalogue(self._lasting)
        self._stored(self._catalogue.take_over(self._found))
        self._writer = Writer(
            self._folder, self._layout, self._new_batch, self._linger_s, self.stats, self.transfers
        )
        self._writer.start()
        self._reader = Reader(self._folder, self._layout, self._writer, self.stats, self.transfers)
        self._reader.start()

    def _stored(self, states: int) -> None:
        """Count states that are on the disk, or on their way there."""
        stats = self.stats
        stats.stored_bytes += states * self._layout.record_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)

    def adopt(self, layout: OrderedLayout, folder: Folder, below: int | None) -> list[int]:
        """Take over the states before `below` that a run left; return their steps, ascending.

        All of them, if it is None.

        Files that are not what they should be are removed; those that cannot be read stay.
        Records are read only when they are needed, and verified then.
        """
        below = NEVER if below is None else below
        self._found = Found(*batches_in(folder, self._prefix, layout, below), below)
        self._next_number = self._found.next_number
        return self._found.steps()

    def keep(self, steps: Container[int]) -> None:
        """Know only of these of the states taken over: other ranks lack the rest."""
        self._found.kept = steps

    def forget(self) -> None:
        """Know of no files: the next `open` begins with none."""
        self._found, self._next_number = Found(), 0

    def close(self) -> None:
        """Write what is queued, stop the threads.  May be called twice.

        In a forked child it leaves threads and files to the parent.
        """
        with Shield(up=True):
            if self._hold.taken:
                self._close()

    def _close(self) -> None:
        if not self._hold.foreign:
            if self._writer is not None:
                self._writer.close()
            if self._reader is not None:  # after the writer: a read may wait for a write
                self._reader.close()
            if not self._lasting:
                for batch in self._catalogue.batches:
                    with contextlib.suppress(OSError):  # the next run clears up
                        self._folder.unlink(batch.name)
        self._catalogue = Catalogue(self._lasting)
        self._writer = self._reader = None
        self._hold.give_back()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        if self._catalogue.revive(key):
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
        self._catalogue.enter(key, batch)
        stats.writes += 1
        self._stored(1)
        return True

    def _new_batch(self) -> Batch:
        number = self._next_number
        self._next_number += 1
        batch = Batch(number, f"{self._prefix}-{number}")
        self._catalogue.begin(batch)
        return batch

    def wait_written(self, key: int) -> bool:
        """Block until the store is done with the arrays of `key`; False if they are lost."""
        self._hold.check()
        entry = self._catalogue.find(key)
        if entry is None:
            return False
        batch = entry[0]
        if self._count == 1:
            self._writing().wait(batch)
        if batch.state is TransferState.FAILED:
            self._writing().warn_if_full()
            self._lose(key)
            return False
        return True

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the writer, after all that was queued before; it must not raise."""
        self._hold.check()
        self._writing().submit(job)

    def _writing(self) -> Writer:
        assert self._writer is not None
        return self._writer

    def flush(self) -> None:
        """Block until all that was queued is done."""
        done = Latch()
        self.submit(done.set)
        done.wait()

    # ------------------------------------------------------------------- drops

    def drop(self, key: int) -> None:
        """Drop `key`; its file is removed when no resumed run would need it."""
        self._hold.check()
        if self._catalogue.find(key) is None:
            return
        self._catalogue.drop(key)
        self._reading().forget(key)
        for batch in self._catalogue.bury():
            self.stats.stored_bytes -= len(batch.steps) * self._layout.record_bytes
            self.submit(partial(self._unlink, batch.name))

    def release(self, step: int) -> None:
        """Say that a resumed run would begin at adjoint `step`: later states are not needed.

        May be called from any thread; files go at the next `drop`.
        """
        self._catalogue.needed_below = step

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it stays: some bytes of disk, until the run is over
            self._folder.unlink(name)

    def _lose(self, key: int) -> None:
        self.stats.lost += 1
        self._catalogue.lose(key)
        self._reading().forget(key)

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still in flight."""
        self._hold.check()
        entry = self._catalogue.find(key)
        if entry is not None:
            self._reading().begin(*entry, key)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self._hold.check()
        if self._catalogue.find(key) is None:
            raise CheckpointLost(f"the durable folder has no checkpoint {key}")
        self.prefetch(key)
        read = self._reading().take(key)
        if read.record is None:
            self._writing().warn_if_full()
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

    def _reading(self) -> Reader:
        assert self._reader is not None
        return self._reader
