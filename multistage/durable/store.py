"""The store of a durable run: states in files that are complete or absent.

Small states (at least four fit in a batch) are copied into the batch that is
filling, which becomes one file.  Large states have a file each and are taken by
reference; where steps differ, all are, if the largest is large.  The writer, when it
is free, lets the batch that is filling fill for a moment (`linger_s`) and writes it.
So a state is safe soon, quick steps do not make a file each, and while one batch is on
its way the next one fills.

A checkpoint that is dropped stays on the disk until an adjoint is there that
makes it unneeded (`release`): a run that resumes from the last adjoint on the
disk finds every checkpoint below it.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import cast

import numpy as np

from ..backends.arena import LandingPool, landing_bytes, landing_pool, pages
from ..backends.base import CheckpointLost, HeldStore, StoreStats, TransferRecord
from ..backends.lanes import Lane
from ..backends.medium import is_full, warn_full
from ..errors import StoreError
from ..states.layout import Array, Layout
from ..support.step_sets import StepMap
from ..support.waiting import Latch, Monitor
from .folder import Folder
from .headers import BadFile
from .records import OrderedLayout, Records

# A kill costs the steps of this time again, and a day of steps makes half a
# million files at most.
LINGER_S = 0.2
_PLACES = 1 << 20  # more than the states of any batch
_FILLED = 2  # batches that are full while another fills
_NEVER = 2**62
_SMALL = 4
_BATCH_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Batch:
    """Some states in one file, or on their way there.

    It belongs to the computing thread while the store fills it, then to the writer until
    it is settled; both changes are made under the lock of the store's `_changes`.
    """

    number: int
    file: Records
    buffer: Array | None = None  # of small states
    content: Sequence[Array] = ()  # a large one, in pieces
    apart: bool = False  # a large one, in a file of its own
    least: int = _NEVER  # of the steps
    live: int = 0  # states that were not dropped
    wanted: bool = False  # now: by a reader, or because it is full
    settled: bool = False  # its write is over, or failed as `error` says
    error: str = ""


@dataclass(slots=True, eq=False)
class _Read:
    """One record on its way back; `record` is None if it was not read, and `error` says why."""

    batch: _Batch
    place: int
    step: int
    done: Latch = field(default_factory=Latch)
    record: Array | None = None
    error: str = ""


class DurableStore(HeldStore):
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
        Whether files stay when the store closes.

    Attributes
    ----------
    layout_at : callable or None
        Returns the layout of a state, where steps differ; the store is then opened for the
        largest.
    adopted : dict
        Those of the states that were taken over, by step.
    failure : str
        Why a state could not be written; empty if none.

    Notes
    -----
    For one computing thread.  `put` with `block`, `wait_written`, `get`,
    `flush` and `close` may block; nothing else does.
    """

    queue_depth = 2

    def __init__(
        self,
        folder: Callable[[], Folder],
        prefix: str = "states",
        *,
        linger_s: float = LINGER_S,
        lasting: bool = True,
    ) -> None:
        super().__init__("durable")
        self._folder_of = folder
        self._prefix = prefix
        self._linger_s = linger_s
        self._lasting = lasting
        self.transfers: deque[TransferRecord] = deque(maxlen=100_000)
        self._writer: Lane[Callable[[], None]] | None = None
        self._reader: Lane[_Read] | None = None
        self._pool: LandingPool | None = None
        self._is_open = False
        self._next_number = 0
        self.layout_at: Callable[[int], Layout] | None = None
        self.failure = ""
        self.forget()

    def forget(self) -> None:
        """Know of no files; the store is closed."""
        self._batches: dict[int, _Batch] = {}  # by number
        self._places = StepMap()  # step -> number of its batch * _PLACES + place in it
        self._dead: dict[int, _Batch] = {}  # without live states, by number
        self.adopted: dict[int, OrderedLayout] = {}
        # Of states from this step on, no file is needed.
        self._needed_below = self._looked_below = _NEVER if self._lasting else 0
        # For batches that are filling or on their way: memory, or leave to keep a large state.
        self._rooms: list[Array | None] = []
        self._under_way: dict[int, _Read] = {}  # by step

    # ------------------------------------------------------------------- life

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of batches on their way, and of idle buffers for large states."""
        size, count = _ordered(layout).record_bytes, _per_batch(_ordered(layout))
        return (_FILLED + 1) * count * size if count > 1 else landing_bytes(size)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return None: bounded by the disk alone."""
        return None

    def _open(self, layout: Layout) -> None:
        try:
            self._begin(layout)
        except (OSError, MemoryError, RuntimeError) as error:  # no memory, no thread
            raise StoreError(
                f"tier {self.name!r} cannot be used: {str(error) or 'no memory'}; it needs "
                f"{self.buffer_bytes(layout)} bytes of buffers and two threads"
            ) from error
        self._is_open = True

    def _begin(self, layout: Layout) -> None:
        if layout.varied and self.layout_at is None:
            raise StoreError(f"tier {self.name!r} takes states of equal size alone")
        # From one who knows plain layouts only.
        self._plain = self.layout_at is None and not isinstance(layout, OrderedLayout)
        largest = _ordered(layout)
        self._at = self.layout_at or largest.at
        self._record_bytes = size = largest.record_bytes
        self._folder = self._folder_of()
        self._count = count = _per_batch(largest)
        self.stats = StoreStats()
        self.transfers.clear()
        self.failure = ""
        for batch in self._batches.values():
            self._stored(batch.file.nbytes)
        self._changes = Monitor()  # notified when a batch is wanted, or written
        self._filling: _Batch | None = None
        self._rooms = [None] * self.queue_depth
        if count > 1:
            self._rooms = [pages(count * size)[: count * size] for _ in range(_FILLED + 1)]
        self._most_rooms = len(self._rooms)
        self._full = self._full_warned = False  # whether a write has found the disk full
        self._writer = Lane("multistage-durable-writer")
        self._writer.start(lambda job: job())
        self._pool = landing_pool(size)
        self._reader = Lane("multistage-durable-reader")
        self._reader.start(self._read)

    def _stored(self, nbytes: int) -> None:
        """Count bytes that are on the disk, or on their way there."""
        stats = self.stats
        stats.stored_bytes += nbytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)

    def adopt(self, layout: OrderedLayout, folder: Folder, below: int | None) -> list[int]:
        """Take over the states before `below` that a run left; return their steps, ascending.

        All of them, if it is None.  The store is closed, and opens with them.  `layout` is that
        of all states or, where steps differ, of state 0; `adopted` then has theirs.

        Files that are not what they should be are removed; those that cannot be read stay.
        Records are read only when they are needed, and verified then.
        """
        self.forget()
        below, steps = _NEVER if below is None else below, list[int]()
        unequal = self.layout_at is not None
        for name in folder.names():
            kind, _, number = name.partition("-")
            if kind != self._prefix:
                continue
            self._next_number = max(self._next_number, int(number) + 1)
            try:
                file = Records.found(folder, name, folder.run, layout.record_bytes, unequal=unequal)
                if file.least >= below:
                    raise BadFile("it is not needed any more")
                places = range(len(file.steps)) if unequal else ()
                layouts = [file.layout(place, layout) for place in places]
            except BadFile:
                self._unlink(name, folder)
                continue
            except OSError:
                # Its states are recomputed.  The file stays: the next resumed run may read it,
                # if there were no descriptors left, for example.
                continue
            batch = _Batch(int(number), file, least=file.least, settled=True)
            self._batches[batch.number] = batch
            for place, step in enumerate(file.steps):
                if step < below and self._places.get(step) is None:
                    self._places[step] = batch.number * _PLACES + place
                    batch.live += 1
                    steps.append(step)
                    if unequal:
                        self.adopted[step] = layouts[place]
            self._note_death(batch)
        return sorted(steps)

    def keep(self, steps: Container[int]) -> None:
        """Know only of these of the states taken over: other ranks lack the rest."""
        for batch in list(self._batches.values()):
            for step in batch.file.steps:
                if step not in steps:
                    self._forget(step)

    def _close(self) -> None:
        """Write what is queued, end the threads; interrupted, it can be called again."""
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
                for batch in self._batches.values():
                    self._unlink(batch.file.name, self._folder)
        if self._is_open:  # else what was taken over is for the next `open`
            self.forget()
        self._writer = self._reader = self._pool = None
        self._is_open = False

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        self.drop(key)  # that was not dropped yet
        stats, layout = self.stats, self._at(key)
        assert isinstance(layout, OrderedLayout)
        size = layout.record_bytes
        form = "" if self.layout_at is None else layout.form(cast(OrderedLayout, self._at(0)))
        if block and not self._full:
            self._changes.wait_for(lambda: self._fits(size) or self._rooms)
        with self._changes.lock:
            taken = None if self._full else self._open_batch(size)
            if taken is not None:
                self._fill(taken, key, layout, form, arrays)
        if taken is None:
            stats.refused += 1
            stats.refused_full += self._full
            return False
        stats.writes += 1
        self._stored(size)
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way to the disk."""
        return len(self._rooms) == self._most_rooms

    def _fits(self, nbytes: int) -> bool:
        """Whether a record has room in the batch that is filling."""
        batch = self._filling
        if batch is None or batch.buffer is None:
            return False
        return batch.file.nbytes + nbytes <= len(batch.buffer)

    def _open_batch(self, nbytes: int) -> _Batch | None:
        """Return the batch for a record; None if there is no room for another.  Holds the lock."""
        if self._fits(nbytes):
            return self._filling
        if self._filling is not None:
            self._end_batch(self._filling)
        if not self._rooms:
            return None
        number, self._next_number = self._next_number, self._next_number + 1
        record_bytes = 0 if self.layout_at is not None else self._record_bytes
        file = Records(f"{self._prefix}-{number}", record_bytes)
        batch = self._batches[number] = _Batch(number, file, self._rooms.pop())
        batch.apart = batch.buffer is None or nbytes > len(batch.buffer)
        # In this order: of a batch that Ctrl-C leaves empty the writer gives the room back.
        self._queue(partial(self._write, batch))
        self._filling = batch
        return batch

    def _end_batch(self, batch: _Batch) -> None:
        """Have a batch written, which is full.  Holds the lock."""
        self._filling = None
        batch.wanted = True
        self._changes.notify_all()

    def _fill(
        self, batch: _Batch, key: int, layout: OrderedLayout, form: str, packed: Sequence[Array]
    ) -> None:
        """Put a state into a batch: copied, or a large one by reference.  Holds the lock."""
        if len(packed) == len(layout.leaves):  # from one who knows plain layouts only
            packed = [*packed, layout.order(None)]
        file, place, at = batch.file, len(batch.file.steps), batch.file.nbytes
        if batch.apart:
            batch.content = layout.parts(packed)
        else:
            assert batch.buffer is not None
            layout.fill(batch.buffer[at : at + layout.record_bytes], packed)
        file.add(key, layout.record_bytes, form)
        batch.least = min(batch.least, key)
        self._places[key] = batch.number * _PLACES + place
        self._dead.pop(batch.number, None)  # its states so far may all have been dropped
        batch.live += 1
        if batch.apart or place + 1 == self._count:
            self._end_batch(batch)

    def wait_written(self, key: int) -> bool:
        """Block until the store is done with the arrays of `key`; False if they are lost."""
        self._hold.check()
        entry = self._find(key)
        if entry is None:
            return False
        if entry[0].apart:
            self._wait(entry[0])
        if entry[0].error:
            self._lose(key)
            return False
        return True

    def _wait(self, batch: _Batch) -> None:
        """Block until a batch is written, or was not."""
        if not batch.settled:
            with self._changes.lock:
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

    def _write(self, batch: _Batch) -> None:
        """Write one batch, on the writer; whatever happens, it is settled."""
        assert self._writer is not None
        lane, file, error = self._writer, batch.file, ""
        self._changes.wait_for(lambda: batch.wanted or lane.waiting > 0, self._linger_s)
        with self._changes.lock:
            if self._filling is batch:
                self._filling = None  # from here on it grows no more
        began, nbytes = perf_counter(), file.nbytes
        if nbytes:  # else the put that began it raised
            content = batch.content
            if not batch.apart:
                assert batch.buffer is not None
                content = [batch.buffer[:nbytes]]
            try:
                # A power cut before the name is on the disk costs a checkpoint, no more.
                file.write(self._folder, content, settled=False)
                self.stats.bytes_written += nbytes
            except Exception as failure:  # the computing thread must learn of every error
                error = f"write failed: {failure}"
                self._full = self._full or is_full(failure)
                self.failure = str(failure)
            self.transfers.append(
                TransferRecord("write", file.steps[0], began, perf_counter(), nbytes)
            )
        with self._changes.lock:
            self._rooms.append(batch.buffer)
            batch.buffer, batch.content = None, ()
            batch.error, batch.settled = error, True
            self._changes.notify_all()

    # ------------------------------------------------------------------- drops

    def _find(self, step: int) -> tuple[_Batch, int] | None:
        """Return the batch of a state that was not dropped, and the place in it."""
        entry = self._places.get(step)
        return None if entry is None else (self._batches[entry // _PLACES], entry % _PLACES)

    def drop(self, key: int) -> None:
        """Drop `key`; its file is removed when no resumed run would need it."""
        self._hold.check()
        if self._forget(key):
            self._under_way.pop(key, None)  # a read that is not needed any more
            self._bury()

    def _forget(self, step: int) -> bool:
        """Know of a state no more; return whether it was known."""
        entry = self._places.pop(step)
        if entry is not None:
            batch = self._batches[entry // _PLACES]
            batch.live -= 1
            self._note_death(batch)
        return entry is not None

    def _lose(self, key: int) -> None:
        """Forget a state that cannot be read; warn once if its write found the disk full."""
        if self._full and not self._full_warned:
            self._full_warned = True
            warn_full("the durable folder", "no space is left")
        self.stats.lost += 1
        self.drop(key)

    def _note_death(self, batch: _Batch) -> None:
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
            del self._batches[batch.number]
            self.stats.stored_bytes -= batch.file.nbytes
            self._queue(partial(self._unlink, batch.file.name, self._folder))
        self._dead = left

    @staticmethod
    def _unlink(name: str, folder: Folder) -> None:
        with contextlib.suppress(OSError):  # it stays: some bytes of disk, until the run is over
            folder.unlink(name)

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
        arrays = None
        if read.record is not None:
            read.record.flags.writeable = False
            layout = self._at(key)
            assert isinstance(layout, OrderedLayout)
            arrays = layout.split(read.record)
        if arrays is None:
            self._lose(key)
            raise CheckpointLost(read.error or "read failed: its strides are none of an array")
        self.stats.reads += 1
        return arrays[:-1] if self._plain else arrays

    def _read(self, read: _Read) -> None:
        """Read one state, on the reader; `read` reports the result or the error."""
        batch = read.batch
        begin, end = batch.file.span(read.place)
        size = end - begin
        self._wait(batch)  # read what is still being written
        began = perf_counter()
        try:
            if batch.error:
                raise OSError(errno.EIO, batch.error)
            # A page for each small state would be more than the state.
            assert self._pool is not None
            record = np.empty(size, np.uint8) if self._count > 1 else self._pool.take(size)[:size]
            batch.file.read(self._folder, read.place, record)
            self.stats.bytes_read += size
            read.record = record
        except Exception as error:  # the computing thread must learn of every error
            read.error = f"read failed: {error}"
        self.transfers.append(TransferRecord("read", read.step, began, perf_counter(), size))
        read.done.set()


def _ordered(layout: Layout) -> OrderedLayout:
    """Return a layout whose records hold the strides of arrays."""
    return layout if isinstance(layout, OrderedLayout) else OrderedLayout.like(layout)


def _per_batch(layout: OrderedLayout) -> int:
    """Return how many states share a file, 1 for large ones."""
    count = _BATCH_BYTES // layout.record_bytes
    return min(count, 1 << 14) if count >= _SMALL else 1
