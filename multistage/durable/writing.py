"""How the states of a durable store get to the disk: batches that fill, and the thread that writes.

The writer, when it is free, lets the batch that is filling fill for a moment
(`linger_s`) and writes it as one file.  So a state is safe soon, quick steps do not
make a file each, and while one batch is on its way the next one fills.

A batch belongs to the computing thread while its `state` is FILLING, to the writer until
it is DONE or FAILED; the change is made under the lock of `changes`.  The writer also
runs whatever else must reach the disk in order (`submit`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..backends.arena import pages
from ..backends.base import StoreStats, TransferRecord
from ..backends.extents import TransferState
from ..backends.lanes import Lane
from ..backends.medium import is_full, warn_full
from ..states.layout import Array
from ..support.waiting import Monitor
from .batches import Batch, per_batch, write_batch
from .folder import Folder
from .records import OrderedLayout

BUFFERS = 3  # batches that are filling or on their way


class Writer:
    """The thread that writes batches, and the batches it has not written yet.

    Parameters
    ----------
    folder : Folder
    layout : OrderedLayout
    new_batch : callable
        Returns a batch for the next states.
    linger_s : float
        A batch that is not full waits so long for more, unless it is needed.
    stats, transfers
        Of the store.

    Attributes
    ----------
    changes : Monitor
        Notified when a batch is written.
    full : bool
        Whether a write has failed because the disk is full.
    """

    def __init__(
        self,
        folder: Folder,
        layout: OrderedLayout,
        new_batch: Callable[[], Batch],
        linger_s: float,
        stats: StoreStats,
        transfers: deque[TransferRecord],
    ) -> None:
        self.changes = Monitor()
        self.full = False
        self._folder, self._layout = folder, layout
        self._new_batch, self._linger_s = new_batch, linger_s
        self._stats, self._transfers = stats, transfers
        self._count = per_batch(layout)
        self._filling: Batch | None = None
        self._waiting: deque[Batch] = deque()  # large ones not known to be written
        self._buffers: list[Array] = []
        if self._count > 1:
            size = self._count * layout.record_bytes
            self._buffers = [pages(size)[:size] for _ in range(BUFFERS)]
        self._full_warned = False
        self._jobs: Lane[Callable[[], None]] = Lane("multistage-durable-writer")

    def start(self) -> None:
        """Start the thread.  Raises RuntimeError."""
        self._jobs.start(_run)

    def close(self) -> None:
        """Write what is queued, end the thread.  Interrupted, it can be called again."""
        self._jobs.end()
        with self.changes.lock:
            self.changes.notify_all()
        self._jobs.join()

    def warn_if_full(self) -> None:
        """Warn once if a write has failed because the disk is full."""
        if self.full and not self._full_warned:
            self._full_warned = True
            warn_full("the durable folder", "no space is left")

    def put(self, key: int, packed: Sequence[Array], *, block: bool, depth: int) -> Batch | None:
        """Put a state last into a batch and return that; None if there is no room.

        Parameters
        ----------
        depth : int
            Large states that may be waiting.
        """
        if self._count == 1:
            return self._put_large(key, packed, block, depth)
        return self._put_small(key, packed, block)

    def _put_small(self, key: int, packed: Sequence[Array], block: bool) -> Batch | None:
        while True:
            with self.changes.lock:
                batch = self._filling or self._begun()
                if batch is not None:
                    self._fill(batch, key, packed)
                    return batch
            if not block:
                return None
            self.changes.wait_for(lambda: bool(self._buffers))

    def _begun(self) -> Batch | None:
        """Begin a batch; None if all buffers are taken.  Holds the lock."""
        if not self._buffers:
            return None
        batch = self._new_batch()
        batch.buffer = self._buffers.pop()
        # In this order: of a batch that Ctrl-C leaves empty the writer gives the buffer back.
        self.submit(partial(self._write, batch))
        self._filling = batch
        return batch

    def _fill(self, batch: Batch, key: int, packed: Sequence[Array]) -> None:
        """Copy a state into a batch.  Holds the lock."""
        place, size = len(batch.steps), self._layout.record_bytes
        assert batch.buffer is not None
        self._layout.fill(batch.buffer[place * size : (place + 1) * size], packed)
        batch.add(key)
        if place + 1 == self._count:
            self._filling = None
            batch.wanted = True
            self.changes.notify_all()

    def _put_large(
        self, key: int, packed: Sequence[Array], block: bool, depth: int
    ) -> Batch | None:
        waiting = self._waiting
        while waiting and waiting[0].state is not TransferState.QUEUED:
            waiting.popleft()
        if len(waiting) >= depth:
            if not block:
                return None
            self.wait(waiting[0])
        batch = self._new_batch()
        batch.state = TransferState.QUEUED
        batch.arrays = tuple(packed)
        batch.add(key)
        waiting.append(batch)
        self.submit(partial(self._write, batch))
        return batch

    def wait(self, batch: Batch) -> None:
        """Block until a batch is written, or was not."""
        with self.changes.lock:
            if batch.state is TransferState.FILLING:
                batch.wanted = True
                self.changes.notify_all()
        self.changes.wait_for(lambda: batch.settled)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread, after all that was queued before; it must not raise."""
        with self.changes.lock:
            self._jobs.put(job)
            self.changes.notify_all()  # the thread may be waiting for a batch to fill

    def _write(self, batch: Batch) -> None:
        """Write one batch; whatever happens, its state says so."""
        if batch.state is TransferState.FILLING:
            self.changes.wait_for(lambda: batch.wanted or self._jobs.waiting > 0, self._linger_s)
        with self.changes.lock:
            batch.state = TransferState.QUEUED
            if self._filling is batch:
                self._filling = None  # from here on it grows no more
            if not batch.steps:  # the put that began it raised
                self._give_back(batch, TransferState.FAILED)
                return
        began = time.perf_counter()
        state, nbytes = TransferState.DONE, len(batch.steps) * self._layout.record_bytes
        try:
            write_batch(batch, self._folder, self._layout)
            self._stats.bytes_written += nbytes
        except Exception as error:  # the computing thread must learn of every error
            state = TransferState.FAILED
            batch.error = f"write failed: {error}"
            self.full = self.full or is_full(error)
        ended = time.perf_counter()
        self._transfers.append(TransferRecord("write", batch.steps[0], began, ended, nbytes))
        with self.changes.lock:
            self._give_back(batch, state)

    def _give_back(self, batch: Batch, state: TransferState) -> None:
        if batch.buffer is not None:
            self._buffers.append(batch.buffer)
        batch.buffer = batch.arrays = None
        batch.state = state
        self.changes.notify_all()


def _run(job: Callable[[], None]) -> None:
    job()
