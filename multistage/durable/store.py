"""The store of a durable run: states in files that are complete or absent.

Small states (at least four fit in a batch) are copied into the batch that is
filling; the writer, when it is free, lets it fill for a moment (`linger_s`) and
writes it as one file.  So a state is safe soon, quick steps do not make a file
each, and while one batch is on its way to the disk the next one fills.  Large
states have a file each and are taken by reference.

A checkpoint that is dropped stays on the disk until an adjoint is there that
makes it unneeded (`release`): whoever resumes from the last adjoint on the
disk finds every checkpoint below it.

Threads and who touches what: the computing thread owns the index and the
counts.  A batch belongs to it while `state` is FILLING, to the writer until it
is DONE or FAILED; the change is made under the condition `_changed`.  The
writer also runs whatever else must reach the disk in order (`submit`).
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Container, Sequence
from enum import Enum
from functools import partial

import numpy as np

from ..backends.arena import landing_bytes, landing_pool, pages
from ..backends.base import BaseStore, CheckpointLost, StoreStats, TransferRecord
from ..backends.lifetimes import Hold
from ..backends.medium import is_full
from ..errors import CheckpointWarning
from ..states.layout import Array, Layout
from ..support.step_sets import StepMap, StepSet
from .folder import Folder
from .headers import BadFile, Kind, encode, parse_states, states_table
from .records import OrderedLayout, checksum_of

_SMALL = 4
_BATCH_BYTES = 1 << 20
_BUFFERS = 3
_PLACE_BITS = 20
# A kill costs the steps of this time again, and a day of steps makes half a
# million files at most.
LINGER_S = 0.2
NEVER = 2**62


class _State(Enum):
    FILLING = 1
    QUEUED = 2
    DONE = 3
    FAILED = 4


class _Batch:
    """Some states in one file, or on their way there."""

    __slots__ = (
        "arrays",
        "buffer",
        "checksums",
        "error",
        "file_bytes",
        "least",
        "live",
        "name",
        "number",
        "offset",
        "state",
        "steps",
        "wanted",
    )

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.state = _State.FILLING
        self.steps = array("q")
        self.checksums = array("Q")
        self.live = 0
        self.least = NEVER
        self.buffer: Array | None = None
        self.arrays: Sequence[Array] | None = None
        self.offset = self.file_bytes = 0
        self.error = ""
        self.wanted = False  # now: by a reader, or because it is full


class _Read:
    """One record on its way back."""

    __slots__ = ("batch", "done", "error", "place", "record", "step")

    def __init__(self, batch: _Batch, place: int, step: int) -> None:
        self.batch = batch
        self.place = place
        self.step = step
        self.record: Array | None = None
        self.error = ""
        self.done = False


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
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._hold = Hold(self.name)
        self._index = StepMap()  # step -> number of the batch << 20 | place in it
        self._batches: dict[int, _Batch] = {}
        self._dead: list[_Batch] = []
        self._filling: _Batch | None = None
        self._waiting: deque[_Batch] = deque()
        self._reading: dict[int, _Read] = {}
        self._buffers: list[Array] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._found: list[_Batch] = []
        self._below = NEVER
        self._kept: Container[int] | None = None
        self._next_number = 0

    # ------------------------------------------------------------------- life

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of batches on their way, and of idle buffers for large states."""
        size = _ordered(layout).record_bytes
        count = _per_batch(_ordered(layout))
        return _BUFFERS * count * size if count > 1 else landing_bytes(size)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return None: bounded by the disk alone."""
        return None

    def open(self, layout: Layout) -> None:
        """Start the threads.  Raises StoreError."""
        self._hold.take()
        try:
            self._begin(layout)
        except BaseException:
            self.close()
            raise

    def _begin(self, layout: Layout) -> None:
        self._changed = threading.Condition()  # a fork may have left the old one locked
        self._plain = not isinstance(layout, OrderedLayout)
        self._layout = ordered = _ordered(layout)
        self._folder = self._folder_of()
        self._count = _per_batch(ordered)
        self.stats = StoreStats()
        self.transfers.clear()
        self._dropped = StepSet()  # on the disk still, as far as the index knows them
        self._needed_below = self._buried_below = NEVER if self._lasting else 0
        self._full_warned = self._no_space = False
        if self._count > 1:
            size = self._count * ordered.record_bytes
            self._buffers = [pages(size)[:size] for _ in range(_BUFFERS)]
        self._pool = landing_pool(ordered.record_bytes)
        for batch in self._found:
            self._enter(batch)
        self._found = []
        self._jobs, self._reads = queue.SimpleQueue(), queue.SimpleQueue()
        for what, target in (("writer", self._writer), ("reader", self._reader)):
            thread = threading.Thread(target=target, name=f"multistage-durable-{what}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _enter(self, batch: _Batch) -> None:
        self._batches[batch.number] = batch
        batch.live = 0
        for place, step in enumerate(batch.steps):
            wanted = step < self._below and (self._kept is None or step in self._kept)
            if wanted and self._index.get(step) is None:
                self._index[step] = batch.number << _PLACE_BITS | place
                batch.live += 1
        self.stats.stored_bytes += len(batch.steps) * self._layout.record_bytes
        self.stats.peak_stored_bytes = self.stats.stored_bytes
        if not batch.live:
            self._dead.append(batch)

    def adopt(self, layout: OrderedLayout, folder: Folder, below: int | None) -> list[int]:
        """Take over the states before `below` that a run left; return their steps, ascending.

        All of them, if it is None.

        Files that are not what they should be are removed.  Records are read
        only when they are wanted, and verified then.
        """
        steps: set[int] = set()
        below = NEVER if below is None else below
        self._found, self._below, self._kept = [], below, None
        for name in folder.names():
            kind, _, number = name.partition("-")
            if kind != self._prefix:
                continue
            try:
                header, table = folder.header(name)
                if header.run != folder.run:
                    raise BadFile("it belongs to another run")
                found, checksums = parse_states(header, table, layout.record_bytes)
                if min(found) < 0 or max(found) >= 2**48 or len(found) >= 1 << _PLACE_BITS:
                    raise BadFile("its steps are out of range")
                if min(found) >= below:
                    raise BadFile("it is needed no longer")
            except (OSError, BadFile):
                with contextlib.suppress(OSError):
                    folder.unlink(name)
                continue
            batch = _Batch(int(number), name)
            batch.state = _State.DONE
            batch.steps, batch.checksums = found, checksums
            batch.least = min(found)
            batch.offset = len(header.prelude) + len(table)
            batch.file_bytes = batch.offset + header.payload_bytes
            self._found.append(batch)
            steps.update(step for step in found if step < below)
        self._next_number = 1 + max((batch.number for batch in self._found), default=-1)
        return sorted(steps)

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
            with self._changed:
                self._jobs.put(None)
                self._changed.notify_all()
            self._reads.put(None)
            for thread in self._threads:
                thread.join()
            if not self._lasting:
                for batch in self._batches.values():
                    with contextlib.suppress(OSError):  # the next run clears up
                        self._folder.unlink(batch.name)
        self._threads = []
        self._batches.clear()
        self._reading.clear()
        self._waiting.clear()
        self._buffers.clear()
        self._dead.clear()
        self._index.clear()
        self._filling = None
        self._pool = landing_pool(0)
        self._hold.give_back()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        if self._revive(key):
            return True
        if self._no_space:
            self.stats.refused += 1
            return False
        packed = arrays
        if len(packed) == len(self._layout.leaves):  # from one who knows plain layouts only
            packed = [*packed, self._layout.order(None)]
        taken = (self._put_large if self._count == 1 else self._put_small)(key, packed, block)
        if taken:
            self.stats.writes += 1
        else:
            self.stats.refused += 1
        return taken

    def _revive(self, key: int) -> bool:
        """Take a dropped state back that is on the disk still: states are what they were."""
        if key not in self._dropped:
            return False
        batch, _ = self._place(key)
        self._dropped.discard(key)
        if batch.state is _State.FAILED or not self._lasting:
            self._index.pop(key)
            return False
        batch.live += 1
        if batch in self._dead:
            self._dead.remove(batch)
        return True

    def _put_small(self, key: int, packed: Sequence[Array], block: bool) -> bool:
        with self._changed:
            batch = self._filling
            if batch is None:
                while not self._buffers:
                    if not block:
                        return False
                    self._changed.wait()
                batch = self._filling = self._new_batch()
                batch.buffer = self._buffers.pop()
                self.submit(partial(self._write, batch))
            place, size = len(batch.steps), self._layout.record_bytes
            assert batch.buffer is not None
            self._layout.fill(batch.buffer[place * size : (place + 1) * size], packed)
            self._add(batch, key)
            if place + 1 == self._count:
                self._filling = None
                batch.wanted = True
                self._changed.notify_all()
        return True

    def _put_large(self, key: int, packed: Sequence[Array], block: bool) -> bool:
        waiting = self._waiting
        while waiting and waiting[0].state is not _State.QUEUED:
            waiting.popleft()
        if len(waiting) >= self.queue_depth:
            if not block:
                return False
            self._wait(waiting[0])
        batch = self._new_batch()
        batch.state = _State.QUEUED
        batch.arrays = tuple(packed)
        self._add(batch, key)
        waiting.append(batch)
        self.submit(partial(self._write, batch))
        return True

    def _new_batch(self) -> _Batch:
        number = self._next_number
        self._next_number += 1
        batch = self._batches[number] = _Batch(number, f"{self._prefix}-{number}")
        return batch

    def _add(self, batch: _Batch, key: int) -> None:
        self._index[key] = batch.number << _PLACE_BITS | len(batch.steps)
        batch.steps.append(key)
        batch.live += 1
        batch.least = min(batch.least, key)
        stats = self.stats
        stats.stored_bytes += self._layout.record_bytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)

    def _place(self, key: int) -> tuple[_Batch, int]:
        entry = self._index.get(key)
        assert entry is not None
        return self._batches[entry >> _PLACE_BITS], entry & (1 << _PLACE_BITS) - 1

    def _known(self, key: int) -> bool:
        return self._index.get(key) is not None and key not in self._dropped

    def wait_written(self, key: int) -> bool:
        """Block until the store is done with the arrays of `key`; False if they are lost."""
        self._hold.check()
        if not self._known(key):
            return False
        batch, _ = self._place(key)
        if self._count == 1:
            self._wait(batch)
        if batch.state is _State.FAILED:
            self._warn_if_full()
            self._lose(key)
            return False
        return True

    def _wait(self, batch: _Batch) -> None:
        with self._changed:
            if batch.state is _State.FILLING:
                batch.wanted = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: batch.state in (_State.DONE, _State.FAILED))

    def _warn_if_full(self) -> None:
        if self._no_space and not self._full_warned:
            self._full_warned = True
            warnings.warn(
                "the durable folder takes no more checkpoints: no space is left; more steps "
                "will be computed again",
                CheckpointWarning,
                stacklevel=4,
            )

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the writer, after all that was queued before; it must not raise."""
        self._hold.check()
        with self._changed:
            self._jobs.put(job)
            self._changed.notify_all()  # the writer may be waiting for a batch to fill

    def flush(self) -> None:
        """Block until all that was queued is done."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    # ------------------------------------------------------------------- drops

    def drop(self, key: int) -> None:
        """Do without `key`; its file goes when no resumed run would want it."""
        self._hold.check()
        if not self._known(key):
            return
        batch, _ = self._place(key)
        self._dropped.add(key)
        self._reading.pop(key, None)  # nobody will ask for it
        batch.live -= 1
        if not batch.live:
            self._dead.append(batch)
        self._bury()

    def release(self, step: int) -> None:
        """Say that a resumed run would begin at adjoint `step`: later states are not needed.

        May be called from any thread; files go at the next `drop`.
        """
        self._needed_below = step

    def _bury(self) -> None:
        """Remove the files of dropped states that nobody needs and no thread is at."""
        needed_below = self._needed_below
        newest = self._dead[-1] if self._dead else None
        if needed_below == self._buried_below and (newest is None or newest.least < needed_below):
            return  # many may be waiting for the next adjoint: they are not looked at each time
        self._buried_below = needed_below
        left = []
        for batch in self._dead:
            if batch.least < needed_below or batch.state not in (_State.DONE, _State.FAILED):
                left.append(batch)
                continue
            for step in batch.steps:
                entry = self._index.get(step)
                if entry is not None and entry >> _PLACE_BITS == batch.number:
                    self._index.pop(step)
                    self._dropped.discard(step)
            del self._batches[batch.number]
            self.stats.stored_bytes -= len(batch.steps) * self._layout.record_bytes
            self.submit(partial(self._unlink, batch.name))
        self._dead = left

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it stays: some bytes of disk, until the run is over
            self._folder.unlink(name)

    def _lose(self, key: int) -> None:
        self.stats.lost += 1
        batch, _ = self._place(key)
        self._index.pop(key)
        batch.live -= 1
        if not batch.live:
            self._dead.append(batch)

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still under way."""
        self._hold.check()
        if not self._known(key) or key in self._reading:
            return
        batch, place = self._place(key)
        read = self._reading[key] = _Read(batch, place, key)
        self._reads.put(read)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self._hold.check()
        if not self._known(key):
            raise CheckpointLost(f"the durable folder has no checkpoint {key}")
        self.prefetch(key)
        read = self._reading.pop(key)
        with self._changed:
            self._changed.wait_for(lambda: read.done)
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

    # ----------------------------------------------------------------- threads

    def _writer(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, batch: _Batch) -> None:
        """Write one batch; whatever happens, its state tells."""
        with self._changed:
            if batch.state is _State.FILLING:
                self._changed.wait_for(
                    lambda: batch.wanted or self._jobs.qsize() > 0, self._linger_s
                )
            batch.state = _State.QUEUED
            if self._filling is batch:
                self._filling = None  # from here on it grows no more
            if not batch.steps:  # the put that began it raised
                self._give_back(batch, _State.FAILED)
                return
        began = time.perf_counter()
        state, layout, count = _State.DONE, self._layout, len(batch.steps)
        size = layout.record_bytes
        try:
            if batch.buffer is not None:
                records = [[batch.buffer[k * size : (k + 1) * size]] for k in range(count)]
                pieces = [batch.buffer[: count * size]]
            else:
                assert batch.arrays is not None
                pieces = layout.parts(batch.arrays)
                records = [pieces]
            batch.checksums = array("Q", map(checksum_of, records))
            table = states_table(batch.steps, batch.checksums)
            header = encode(Kind.STATES, self._folder.run, table, count * size)
            batch.offset = len(header)
            batch.file_bytes = len(header) + count * size
            # A power cut before the name is on the disk costs a checkpoint, no more.
            self._folder.publish(batch.name, [header, *pieces], settled=False)
        except Exception as error:  # whatever it is, the computing thread must be told
            state = _State.FAILED
            batch.error = f"write failed: {error}"
            self._no_space = self._no_space or is_full(error)
        ended = time.perf_counter()
        if state is _State.DONE:
            self.stats.bytes_written += count * size
        first = batch.steps[0]
        self.transfers.append(TransferRecord("write", first, began, ended, count * size))
        with self._changed:
            self._give_back(batch, state)

    def _give_back(self, batch: _Batch, state: _State) -> None:
        if batch.buffer is not None:
            self._buffers.append(batch.buffer)
        batch.buffer = batch.arrays = None
        batch.state = state
        self._changed.notify_all()

    def _reader(self) -> None:
        size = self._layout.record_bytes
        while (read := self._reads.get()) is not None:
            batch = read.batch
            self._wait(batch)  # read what is still being written
            began = time.perf_counter()
            record: Array | None = None
            try:
                if batch.state is _State.FAILED:
                    raise OSError(errno.EIO, batch.error)
                # A page for each small state would be more than the state.
                landing = np.empty(size, np.uint8) if self._count > 1 else self._pool.take()
                record = landing[:size]
                del landing  # or its memory would not come back while this thread waits
                place = batch.offset + read.place * size
                self._folder.read(batch.name, batch.file_bytes, place, record)
                if checksum_of([record]) != batch.checksums[read.place]:
                    raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")
                self.stats.bytes_read += size
            except Exception as error:  # whatever it is, the computing thread must be told
                record = None
                read.error = f"read failed: {error}"
            ended = time.perf_counter()
            self.transfers.append(TransferRecord("read", read.step, began, ended, size))
            with self._changed:
                read.record = record
                read.done = True
                self._changed.notify_all()
            del record, read


def _ordered(layout: Layout) -> OrderedLayout:
    return layout if isinstance(layout, OrderedLayout) else OrderedLayout.like(layout)


def _per_batch(layout: OrderedLayout) -> int:
    count = _BATCH_BYTES // layout.record_bytes
    return min(count, 1 << 14) if count >= _SMALL else 1
