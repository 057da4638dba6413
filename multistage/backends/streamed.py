"""The store behind every tier: a writer thread, a reader thread, extents of states.

States travel in *extents*, the unit of transfer, checksum and space.

small states (at least four fit in an extent)
    are copied into the current extent by the computing thread, a memcpy of microseconds; only a
    full extent wakes the writer.  They can be read back from the extent's buffer until it is
    reused.  A read brings an extent and the one below it: they are wanted in descending order.
large states
    have an extent each and are taken by reference: the writer copies them
    chunk by chunk through page-aligned buffers.

All that is the C core's record stream (`Stream`, `native/stream.h`), where every call but a wait
answers at once: Ctrl-C finds each made or not made.  Where there is no core, each state travels by
itself (`plain.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import time
from array import array as words_of
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from .. import native
from ..errors import ArgumentError, StoreError
from ..states.layout import Array, Layout, places
from ..support.interrupts import Shield
from .arena import PAGE, landing_bytes, landing_pool, lines_of, pages, round_up, whole_huge
from .base import CheckpointLost, HeldStore, StoreStats, TransferRecord
from .direct import DirectFile
from .lanes import Lane, cpus_of, start_on
from .lifetimes import Birth, Ending
from .medium import Hook, Medium, moves, warn_full, warn_of_memory
from .plain import PlainStream, Setup, has_streams

_SMALL = 4  # states per extent from which on they are coalesced
_EXTENT_BYTES = 2 << 20
_CHUNK_BYTES = 4 << 20
BUFFERS = 3  # small states are gathered in, each one extent; as many again are read into
# How long a wait may be deaf to signals such as Ctrl-C.
_PATIENCE_MS = 50
_NICE = 5
_MANY = 1024  # transfers that are noted before anyone asks for them
_WAIT, _MEMORY, _TELL, _FULL = -1, -3, -4, -5
_SAYS = {
    errno.EBADMSG: "the checksum does not match: the bytes were changed",
    errno.ENODATA: "the file ends before the checkpoint does",
    errno.ECANCELED: "it was cancelled",
}


class StreamedStore(HeldStore):
    """A slow tier on any medium; see `FileStore` and `MemoryStore`.

    Parameters
    ----------
    name : str
    open_medium : callable or None
        `open_medium() -> Medium`; called when the store opens, and by `lend`.  None in a
        subclass that overrides `medium`.
    capacity_bytes : int or None
        Space on the medium, in whole extents; None if unbounded.
    buffer_bytes : int
        Page-aligned buffers for transfers.
    queue_depth : int
        Writes of large states that may be waiting or in flight.
    bounces : int
        Buffers that large states are gathered in on their way out.
    extent_bytes, chunk_bytes : int
        Most bytes of an extent of small states, and of one write of a large
        one: more where each request takes long.
    threads, cpus
        See `FileStore`.

    Notes
    -----
    For one computing thread.  `put` with `block`, `wait_written`, `get` and
    `close` may block; nothing else does.
    """

    def __init__(
        self,
        name: str,
        open_medium: Callable[[], Medium] | None = None,
        *,
        capacity_bytes: int | None = None,
        buffer_bytes: int = 8 << 20,
        queue_depth: int = 2,
        bounces: int = 1,
        extent_bytes: int = _EXTENT_BYTES,
        chunk_bytes: int = _CHUNK_BYTES,
        threads: int = 2,
        cpus: str | Iterable[int] | None = None,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes={capacity_bytes} must not be negative")
        if buffer_bytes < 0:
            raise ArgumentError(f"buffer_bytes={buffer_bytes} must not be negative")
        if queue_depth < 1:
            raise ArgumentError(f"queue_depth={queue_depth} must be at least 1")
        if threads not in (1, 2):
            raise ArgumentError(f"threads={threads} must be 1 or 2: that many each way")
        self._stream: Stream | PlainStream | None = None
        super().__init__(name)
        self.queue_depth = queue_depth
        self.capacity_bytes = capacity_bytes
        self._transfers: deque[TransferRecord] = deque(maxlen=100_000)
        self._open_medium = open_medium
        self._buffer_bytes = buffer_bytes
        self._bounces = bounces
        self._most_extent_bytes = extent_bytes
        self._chunk_bytes = chunk_bytes
        self.threads, self.cpus = threads, None if cpus is None else cpus_of(cpus)
        self._ending: Ending[None] | None = None
        # Of a medium that is a file, whose bytes the C core's own threads move.
        self._hooks: tuple[Hook | None, Hook | None] | None = None

    # ------------------------------------------------------------------- life

    def per_extent(self, layout: Layout) -> int:
        """Return how many states share an extent, 1 for large ones."""
        if layout.varied or not has_streams():
            return 1
        extent = min(self._most_extent_bytes, self._buffer_bytes // (2 * BUFFERS))
        if self.capacity_bytes is not None:
            extent = min(extent, self.capacity_bytes // 4)
        if extent >= 64 * PAGE:  # or huge pages would make the buffers exceed their bytes
            extent -= extent % PAGE
        count = extent // layout.nbytes
        return count if count >= _SMALL else 1

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers held for such states, idle ones included."""
        count = self.per_extent(layout)
        if count > 1:
            return 2 * whole_huge(BUFFERS * round_up(count * layout.nbytes))
        return whole_huge(self._bounce_bytes(layout)) + landing_bytes(round_up(layout.nbytes))

    def _bounce_bytes(self, layout: Layout) -> int:
        """Return the bytes that a large state passes through on its way out."""
        return self._bounces * min(self._chunk_bytes // self._bounces, round_up(layout.nbytes))

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states of `layout` fit on the medium, None if unbounded."""
        if self.capacity_bytes is None:
            return None
        count = self.per_extent(layout)
        return self.capacity_bytes // round_up(count * layout.nbytes) * count

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """Return a fresh medium for extents of states of `layout`; `open` and `lend` call it.

        Parameters
        ----------
        layout : Layout
        extent_bytes : int
            Of the largest.

        Raises
        ------
        OSError, StoreError
            If there can be none.
        """
        assert self._open_medium is not None
        return self._open_medium()

    def _give_back(self) -> None:
        """Give back what `medium` took besides the medium itself."""

    def _new_stream(self, layout: Layout) -> Stream | PlainStream:
        """Return what moves states to and from a fresh medium."""
        count = self.per_extent(layout)
        medium = self.medium(layout, round_up(count * layout.nbytes))
        setup = Setup(
            self.name,
            medium,
            layout,
            count,
            self.capacity_bytes,
            self.queue_depth,
            self.threads,
            self._bounce_bytes(layout),
            self.exact,
            self.warns,
            self.stats,
            self._transfers,
        )
        if has_streams():
            return Stream(setup, self._bounces, self._hooks)
        return PlainStream(setup)

    def lend(self, layout: Layout, extent_bytes: int) -> Medium:
        """Return a fresh medium for a store that is built on this one.

        That store closes the medium, then this one.

        Raises
        ------
        OSError, StoreError
            If there can be none, or the store is open or lent already.
        """
        with Shield(up=True):  # raised after, when the medium is its borrower's to close
            self._hold.take()
            try:
                return self.medium(layout, extent_bytes)
            except BaseException:
                self.close()
                raise

    def _open(self, layout: Layout) -> None:
        self.stats = StoreStats()
        self._transfers.clear()
        try:
            stream = self._stream = self._new_stream(layout)
        except (OSError, MemoryError) as error:
            raise StoreError(
                f"tier {self.name!r} cannot be used: {error}; choose a folder that can be written"
            ) from error
        # From here on `close` gives everything back, and this once the store is dropped.
        self._ending = Ending(self, stream.close)
        try:
            stream.start() if self.cpus is None else start_on(self.cpus, stream.start)
        except (OSError, MemoryError, RuntimeError) as error:  # no memory, no thread
            raise StoreError(
                f"tier {self.name!r} cannot be used: {str(error) or 'no memory'}; it needs "
                f"{self.buffer_bytes(layout)} bytes of buffers and two threads"
            ) from error

    def _close(self) -> Exception | None:
        failure: Exception | None = None
        if self._stream is not None:
            try:
                with contextlib.suppress(OSError):  # what was in it is needed no more
                    self._stream.close()
                if self._ending is not None:
                    self._ending.forget()
            except Exception as error:  # its finalizer tries once more
                failure = error
            self._stream = None
        self._give_back()
        return failure

    # ----------------------------------------------------------------- states

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; see `Store.put`."""
        self._hold.check()
        stream = self._stream  # without a call: a put of a small state takes but a microsecond
        assert stream is not None
        return stream.put(key, arrays, block)

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        return self._opened().wait_written(key)

    def cancel(self, key: int) -> None:
        """Give up the write of a large state, at its next chunk; see `Store.cancel`."""
        self._opened().cancel(key)

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds; see `Store.ended`."""
        return self._opened().ended(key, timeout_s)

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than so many seconds; see `Store.arrived`."""
        return self._opened().arrived(key, timeout_s)

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait now."""
        return self._opened().waits()

    def prefetch(self, key: int, into: Array | None = None) -> None:
        """Queue a read of `key`, behind its write; a large one may land in given whole pages."""
        self._opened().prefetch(key, into)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        return self._opened().get(key)

    def drop(self, key: int) -> None:
        """Free the medium's copy of `key`.  Unknown keys are ignored."""
        self._opened().drop(key)

    def pass_on(self, keys: Sequence[int], to: StreamedStore) -> int:
        """Move the first of some small states to another store, as far as they are in memory."""
        source, target = self._stream, to._stream
        assert isinstance(source, Stream) and isinstance(target, Stream)
        move, numbers = source._library.ms_stream_pass, (ctypes.c_int64 * len(keys))(*keys)
        done, passed = 0, 1
        while passed and done < len(keys) and (target._view.buffer >= 0 or target._placed(False)):
            at, left = ctypes.byref(numbers, 8 * done), len(keys) - done
            passed = move(source._handle, target._handle, at, left)
            done += passed
        source._tell()
        target._tell()
        return done

    @property
    def transfers(self) -> deque[TransferRecord]:
        """The finished transfers; see `Store.transfers`."""
        if self._stream is not None:
            self._stream.note()
        return self._transfers

    @property
    def stats(self) -> StoreStats:
        """What was counted since `open`; see `Store`."""
        if self._stream is not None:
            self._stream.note()
        return self._stats

    @stats.setter
    def stats(self, stats: StoreStats) -> None:
        self._stats = stats

    def _opened(self) -> Stream | PlainStream:
        self._hold.check()
        assert self._stream is not None
        return self._stream


class Stream:
    """The records of an open store, in the C core.

    Here is what C cannot know: arrays are kept alive while threads are at them, and a medium that
    is no file is worked by two threads of the interpreter.  Arrays are noted before the call that
    uses them, by a number of their own, and forgotten when the stream says so.

    Parameters
    ----------
    setup : Setup
    bounces : int
        Parts of the memory that large states leave through.
    hooks : (pwrite, pread) or None
        The medium is a `DirectFile` whose bytes the C core's own threads move: by these, each
        where it is given, to let them fail in tests.
    """

    def __init__(
        self, setup: Setup, bounces: int = 1, hooks: tuple[Hook | None, Hook | None] | None = None
    ) -> None:
        self._name, self._medium, self._count = setup.name, setup.medium, setup.count
        self._layout = layout = setup.layout
        self._stats, self._transfers = setup.stats, setup.transfers
        self._library, self._held = native.library(), (held := native.held_library())
        self._fill, self._find = held.ms_stream_fill, held.ms_stream_get
        self._ahead, self._forget = held.ms_stream_prefetch, held.ms_stream_drop
        self._ready, self._queue = held.ms_stream_ready, held.ms_stream_put
        self._birth = Birth.here()
        self._handle = ctypes.c_void_p()
        self._view, self._record = native.StreamView(), native.StreamRecord()
        self._lanes: list[Lane[int]] = []
        self._warned = not setup.warns  # that there is no more room
        self._next, self._lost_before = 1, 0
        self._kept: dict[int, object] = {}  # arrays of writes by number, until they have ended
        self._landings: dict[int, tuple[int, Array]] = {}  # of large states by key
        self._ending: dict[int, Array] = {}  # of reads that were dropped, until they have ended
        self._shapes: dict[int, list[tuple[Any, Any, int]]] = {}  # by key, where they vary
        self._kinds = [(leaf.shape, leaf.dtype, leaf.offset) for leaf in layout.leaves]
        self._pool = landing_pool(round_up(layout.nbytes))
        self._lay_out([(leaf.offset, leaf.nbytes) for leaf in layout.leaves])
        self._texts: dict[int, str] = {}
        self._bytes = extent_bytes = round_up(setup.count * layout.nbytes)
        outside = self._outside = hooks is None
        hooked = moves(setup.medium, self._texts) if hooks is None else hooks
        # Called from other threads: they must live as long as these.
        self._moves = [native.Transfer(move) if move else native.Transfer() for move in hooked]
        self._options = native.StreamOptions(
            most_bytes=-1 if setup.capacity_bytes is None else setup.capacity_bytes,
            count=setup.count,
            record_bytes=layout.nbytes,
            extent_bytes=extent_bytes,
            depth=setup.depth,
            head=native.HEAD,
            chunk_bytes=setup.bounce_bytes // bounces if setup.count == 1 else extent_bytes,
            n_bounces=bounces,
            unverified=not setup.verify,
            outside=outside,
            single=setup.threads == 1,
            nice=0 if outside else _NICE,  # a thread that waits for the interpreter must not
            pwrite=self._moves[0],
            pread=self._moves[1],
            view=ctypes.pointer(self._view),
        )

    def start(self) -> None:
        """Allocate buffers and start the threads.

        Raises
        ------
        OSError, MemoryError, RuntimeError
            If there is no memory, or no thread.
        """
        options = self._options
        if self._count > 1:
            half = whole_huge(BUFFERS * self._bytes)
            self._arena = pages(2 * half)
            options.arena, options.landing = self._arena.ctypes.data, half
            options.n_buffers = BUFFERS
            self._lines = [
                lines_of(self._layout, self._count, self._arena[at : at + self._bytes])
                for start in (0, half)
                for at in range(start, start + BUFFERS * self._bytes, self._bytes)
            ]
        else:
            self._bounce = pages(whole_huge(options.n_bounces * options.chunk_bytes))
            options.bounce = self._bounce.ctypes.data
        if not options.outside:
            assert isinstance(self._medium, DirectFile)
            options.fd = self._medium.fd
            if self._library.ms_io_in_memory(options.fd):
                warn_of_memory(self._medium.folder)
        failed = self._library.ms_stream_open(ctypes.byref(options), ctypes.byref(self._handle))
        if failed:
            raise OSError(failed, f"threads cannot be started: {os.strerror(failed)}")
        for kind, name in enumerate(("multistage-writer", "multistage-reader")):
            if options.outside:
                lane: Lane[int] = Lane(name)
                lane.start(partial(self._library.ms_stream_work, self._handle))
                self._lanes.append(lane)
                lane.put(kind)
                lane.end()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], block: bool) -> bool:
        """Queue the write of one state; see `Store.put`."""
        if self._count == 1:
            return self._put_large(key, arrays, block)
        view = self._view
        if view.buffer < 0 and not self._placed(block):
            return False
        at = view.at
        for line, array in zip(self._lines[view.buffer], arrays, strict=True):
            line[at] = array
        answer = self._fill(self._handle, key)
        if view.news:
            self._tell()
        if answer < 0:
            return self._refused(answer)
        self._stats.writes += 1
        return True

    def _put_large(self, key: int, arrays: Sequence[Array], block: bool) -> bool:
        # Few calls, of few kinds: between two steps their code and data are in no near cache.
        if not block and not self._ready(self._handle):
            return self._refused(_WAIT)
        if key in self._landings:
            self.drop(key)  # that was not dropped yet
        if self._layout.varied:
            self._lay_out_for(key, arrays)
        words, at = self._words, 0
        if 3 * len(arrays) != len(words):
            raise ArgumentError(f"{len(arrays)} arrays, not the {len(words) // 3} of the layout")
        for array in arrays:
            words[at] = native.whereabouts(array)
            at += 3
        number, self._next = self._next, self._next + 1
        self._kept[number] = tuple(arrays)
        handle, queue = self._handle, self._queue
        while (answer := queue(handle, key, number)) <= 0 and self._again(answer, block):
            pass
        if self._view.news:
            self._tell()
        if answer > 0:
            self._stats.writes += 1
            return True
        del self._kept[number]
        self._shapes.pop(key, None)
        return self._refused(answer)

    def _placed(self, block: bool) -> bool:
        """Find a place for the next small state; whether there is one."""
        room = self._held.ms_stream_room
        while (answer := room(self._handle)) <= 0 and self._again(answer, block):
            pass
        return answer > 0 or self._refused(answer)

    def _again(self, answer: int, block: bool) -> bool:
        """Whether a state may be put after all, once that was waited for which it takes."""
        if answer == _TELL:
            self._tell()
            return True
        if answer == _WAIT and block:
            self._wait()
            return True
        return False

    def _refused(self, answer: int) -> Literal[False]:
        self._stats.refused += 1
        if answer == _FULL:
            self._stats.refused_full += 1
            if not self._warned:
                self._warned = True
                used = f"its capacity of {self._options.most_bytes} bytes is used"
                warn_full(f"tier {self._name!r}", "no space is left" if self._view.full else used)
        return False

    def _lay_out(self, parts: Sequence[tuple[int, int]]) -> None:
        """Say at which bytes of its record each array of a large state will lie: offset, nbytes."""
        self._words = words_of("q", (word for part in parts for word in (0, *part)))
        self._view.pieces = (native.Piece * len(parts)).from_buffer(self._words)
        self._view.n_pieces = len(parts)

    def _lay_out_for(self, key: int, arrays: Sequence[Array]) -> None:
        sizes = [array.nbytes for array in arrays]
        offsets, nbytes = places(sizes)
        if sum(sizes) > (most := self._layout.nbytes):
            at_most = f"opened for at most {most}"
            raise ArgumentError(f"put of {nbytes} bytes in tier {self._name!r}, {at_most}")
        self._lay_out(list(zip(offsets, sizes, strict=True)))
        self._shapes[key] = [
            (array.shape, array.dtype, at) for array, at in zip(arrays, offsets, strict=True)
        ]

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        while (answer := self._held.ms_stream_written(self._handle, key)) == _WAIT:
            self._wait()
        if self._view.news:
            self._tell()
        return bool(answer > 0)

    def cancel(self, key: int) -> None:
        """Give up the write of a large state; those of small states share one, which is made."""
        self._held.ms_stream_cancel(self._handle, key)

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than some seconds; return whether it has ended."""
        return self._until(lambda: self._held.ms_stream_ended(self._handle, key), timeout_s)

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait now."""
        ready = self._ready(self._handle)
        if self._view.news:
            self._tell()
        return not ready

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int, into: Array | None = None) -> None:
        """Queue a read of the extent of `key`, and of the one below it."""
        if self._count > 1:
            self._ahead(self._handle, key)
        elif self._held.ms_stream_arrived(self._handle, key) == _MEMORY:
            self._read(key, into)

    def _read(self, key: int, into: Array | None = None) -> None:
        """Queue the read of a large state, which was not read yet."""
        if key not in self._landings:  # or Ctrl-C came before it was queued
            nbytes = self._layout.nbytes
            if self._layout.varied:
                sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in self._shapes[key]]
                _, nbytes = places(sizes)
            number, self._next = self._next, self._next + 1
            self._landings[key] = number, self._pool.take(max(1, nbytes)) if into is None else into
        number, landing = self._landings[key]
        self._held.ms_stream_read(self._handle, key, number, native.whereabouts(landing))

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than some seconds; return whether it has ended."""

        def has_arrived() -> bool:
            answer = self._held.ms_stream_arrived(self._handle, key)
            if answer == _MEMORY:
                self._read(key)
            return bool(answer > 0)

        return self._until(has_arrived, timeout_s)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        while (at := self._find(self._handle, key)) < 0:
            if at == _WAIT:
                self._wait()
            elif at == _MEMORY:
                self._read(key)
            else:
                raise self._lost(key)
        if self._view.news:
            self._tell()
        self._stats.reads += 1
        if self._count > 1:  # copies: a buffer is used again without asking who looks at it
            place = self._view.place
            found: list[Array] = []
            for line in self._lines[at]:
                array = line[place, ...].copy()
                array.setflags(write=False)
                found.append(array)
            return found
        # Landed for this reader alone: a later get reads again.
        _, record = self._landings.pop(key, (0, None))
        if record is None:  # Ctrl-C came as it was dropped
            return self.get(key)
        record.flags.writeable = False
        kinds = self._shapes[key] if self._layout.varied else self._kinds
        return [np.ndarray(shape, dtype, record, at) for shape, dtype, at in kinds]

    def _lost(self, key: int) -> CheckpointLost:
        self._landings.pop(key, None)
        self._shapes.pop(key, None)
        view = self._view
        code, what = view.error, "write" if view.write_failed else "read"
        if view.news:
            self._tell()
        if not code:
            return CheckpointLost(f"tier {self._name!r} has no checkpoint {key}")
        said = self._texts.get(code) or _SAYS.get(code) or os.strerror(code)
        return CheckpointLost(f"{what} failed: {said}")

    def drop(self, key: int) -> None:
        """Free the medium's copy of `key`.  Unknown keys are ignored."""
        landing = self._landings.get(key)
        if landing is not None:  # noted first: Ctrl-C must not free what is read into
            self._ending[landing[0]] = landing[1]
            del self._landings[key]
        in_use = self._forget(self._handle, key)
        if landing is not None and not in_use:
            del self._ending[landing[0]], landing
            self._pool.trim()  # no other memory is kept idle beside what stays in use
        if self._shapes:
            self._shapes.pop(key, None)
        if self._view.news:
            self._tell()

    # ----------------------------------------------------------------- the stream

    def _wait(self, timeout_ms: int = _PATIENCE_MS) -> None:
        if self._view.news:
            self._tell()
        self._library.ms_stream_wait(self._handle, timeout_ms)

    def _until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        ends_s = time.perf_counter() + timeout_s
        while not ready():
            left_ms = 1e3 * (ends_s - time.perf_counter())
            if left_ms <= 0:
                return False
            self._wait(math.ceil(min(_PATIENCE_MS, left_ms)))
        return True

    def _tell(self) -> None:
        """Note what the stream shows, and let go of what it needs no more."""
        view = self._view
        view.news = 0
        if view.records > _MANY:
            self.note()
        while self._outside and (number := self._held.ms_stream_freed(self._handle)) >= 0:
            self._medium.free(number)
        for kept, ended in ((self._kept, view.written), (self._ending, view.read)):
            while kept and (number := next(iter(kept))) <= ended:
                del kept[number]

    def note(self) -> None:
        """Note the transfers that have ended, and what the stream has counted."""
        view, stats = self._view, self._stats
        stats.bytes_written, stats.bytes_read = view.bytes_written, view.bytes_read
        stats.stored_bytes, stats.peak_stored_bytes = view.stored_bytes, view.peak_stored_bytes
        stats.lost, self._lost_before = stats.lost + view.lost - self._lost_before, view.lost
        one, told = self._record, self._held.ms_stream_record
        while view.records and told(self._handle, one):
            kind: Literal["read", "write"] = "read" if one.is_read else "write"
            times = 1e-9 * one.start_ns, 1e-9 * one.stop_ns
            self._transfers.append(TransferRecord(kind, one.key, *times, one.nbytes))

    def close(self) -> None:
        """Finish what is in flight, stop the threads, note what came of it, close the medium.

        Interrupted, it can be called again and does the rest.  A forked child leaves all to
        its parent.
        """
        if self._birth.foreign:
            return
        if self._handle:
            self._held.ms_stream_end(self._handle)
            for lane in self._lanes:
                lane.join()
            self._library.ms_stream_stop(self._handle)
            self._held.ms_stream_poll(self._handle)
            self._tell()
            self.note()
            self._library.ms_stream_close(ctypes.byref(self._handle))
        self._medium.close()
