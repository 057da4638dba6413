"""How the states of a durable store come back: the thread that reads, and the reads in flight."""

from __future__ import annotations

import time
from collections import deque

from ..backends.arena import landing_pool
from ..backends.base import StoreStats, TransferRecord
from ..backends.lanes import Lane
from ..states.layout import Array
from ..support.waiting import Latch
from .batches import Batch, read_record
from .folder import Folder
from .records import OrderedLayout
from .writing import Writer


class Read:
    """One record on its way back.

    Attributes
    ----------
    done : Latch
        Set when the thread is done with it.
    record : array of uint8 or None
        None unless it was read.
    error : str
        Why not.
    """

    __slots__ = ("batch", "done", "error", "place", "record", "step")

    def __init__(self, batch: Batch, place: int, step: int) -> None:
        self.batch, self.place, self.step = batch, place, step
        self.done = Latch()
        self.record: Array | None = None
        self.error = ""


class Reader:
    """The thread that reads states, each behind its write if that is in flight.

    Parameters
    ----------
    folder : Folder
    layout : OrderedLayout
    writer : Writer
        Closed before this.
    stats, transfers
        Of the store.
    """

    def __init__(
        self,
        folder: Folder,
        layout: OrderedLayout,
        writer: Writer,
        stats: StoreStats,
        transfers: deque[TransferRecord],
    ) -> None:
        self._folder, self._layout, self._writer = folder, layout, writer
        self._stats, self._transfers = stats, transfers
        self._pool = landing_pool(layout.record_bytes)
        self._under_way: dict[int, Read] = {}  # by step
        self._reads: Lane[Read] = Lane("multistage-durable-reader")

    def start(self) -> None:
        """Start the thread.  Raises RuntimeError."""
        self._reads.start(self._read)

    def close(self) -> None:
        """Finish what is queued, end the thread.  Interrupted, it can be called again."""
        self._reads.end()
        self._reads.join()

    def begin(self, batch: Batch, place: int, step: int) -> None:
        """Queue a read of a state, unless there is one."""
        if step not in self._under_way:
            read = Read(batch, place, step)
            self._reads.put(read)  # first: what is noted ends, whenever Ctrl-C comes
            self._under_way[step] = read

    def forget(self, step: int) -> None:
        """Release a read that is not needed any more."""
        self._under_way.pop(step, None)

    def take(self, step: int) -> Read:
        """Block until a read that was begun is done; return it, and forget it."""
        read = self._under_way.pop(step)
        read.done.wait()
        return read

    def _read(self, read: Read) -> None:
        """Read one state; `read` reports the result or the error."""
        self._writer.wait(read.batch)  # read what is still being written
        nbytes, began = self._layout.record_bytes, time.perf_counter()
        try:
            read.record = read_record(
                read.batch, read.place, self._folder, self._layout, self._pool
            )
            self._stats.bytes_read += nbytes
        except Exception as error:  # the computing thread must learn of every error
            read.error = f"read failed: {error}"
        ended = time.perf_counter()
        self._transfers.append(TransferRecord("read", read.step, began, ended, nbytes))
        read.done.set()
