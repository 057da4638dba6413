"""The file store's fast engine: extents moved by threads of the C core.

Two Python threads that write and read need the interpreter lock several
times per transfer; beside a chain of short Python steps each time costs both
sides.  The threads of `native/io.c` never need it.  The computing thread
queues a job with one call, and looks at it again when it calls the store
anyway: only `poll` updates extents.

Checksums are XXH3, as everywhere: the C core takes it from xxhash's own header, Python from
the package xxhash.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .. import native
from ..states.layout import Array
from .arena import PAGE, pages, round_up
from .direct import DirectFile
from .lifetimes import Ending
from .medium import is_full

if TYPE_CHECKING:
    from .carrier import Finished
    from .extents import Extent

logger = logging.getLogger(__name__)

_CHUNK = 2 << 20
_NICE = 5
# How long a wait may be deaf to signals such as Ctrl-C.
_PATIENCE_MS = 50
_WRITE, _READ = 0, 1
_FAILED = 2


class _Flight(NamedTuple):
    """A job in flight, and what its addresses point into."""

    extent: Extent
    job: native.Job
    kept: object
    gathered: tuple[native.Job, ctypes.Array[native.Piece]] | None = None


class NativeFile:
    """Extents in an anonymous file, moved by two lanes of the C core; a `Carrier`.

    Parameters
    ----------
    folder : Path
    most_bytes : int or None
        Of the file; None for all there are.
    pwrite, pread : native.Transfer, optional
        In place of the system's, to let them fail in tests.

    Notes
    -----
    For one computing thread.  `wait_for` and `close` may block.  A job is noted
    before it is submitted, since the C core works on its memory; Ctrl-C between
    the two leaves a job that counts as failed.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int | None = None,
        *,
        pwrite: Callable[[int, int, int, int], int] | None = None,
        pread: Callable[[int, int, int, int], int] | None = None,
    ) -> None:
        self._library, self._held = native.library(), native.held_library()
        self._most_bytes = most_bytes
        # Called from the C core's threads: they must live as long as these.
        self._hooks = (
            native.Transfer(pwrite) if pwrite else native.Transfer(),
            native.Transfer(pread) if pread else native.Transfer(),
        )
        self._flights: tuple[deque[_Flight], deque[_Flight]] = (deque(), deque())
        self._owner = os.getpid()
        # Made before the threads are, and done only once they have stopped: until then it
        # holds all that they work on, whenever Ctrl-C comes and whatever else is dropped.
        engine = pages(self._library.ms_io_len())
        self._engine: int = engine.ctypes.data
        self._kept: list[object] = [engine, self._hooks, self._flights]
        self._file = DirectFile(folder, most_bytes)
        self._stop = Ending(
            self, functools.partial(_stop, self._owner, self._engine, self._file, self._kept)
        )
        self.direct = self._file.direct
        if self._library.ms_io_in_memory(self._file.fd):
            _warn_of_memory(str(folder))

    def start(self, bounce: Array | None, wrote: Finished, landed: Finished) -> None:
        """Start the threads.

        Parameters
        ----------
        bounce : array of uint8 or None
            Page-aligned memory for gathering states; halved, one half filled
            while the other is written.  None if `queue_write` always gets pages.
        wrote, landed : callable
            Told of each finished write and read by `poll`.
        """
        self._wrote, self._landed = wrote, landed
        self._spare: list[tuple[native.Job, ctypes.Array[native.Piece]]] = []
        options = native.IoOptions(
            fd=self._file.fd,
            most_bytes=-1 if self._most_bytes is None else self._most_bytes,
            bounce=None if bounce is None else bounce.ctypes.data,
            chunk_bytes=_CHUNK if bounce is None else len(bounce) // 2,
            n_bounces=2,
            nice=_NICE,
            pwrite=self._hooks[0],
            pread=self._hooks[1],
        )
        self._kept.append(bounce)
        failed = self._library.ms_io_start(self._engine, ctypes.byref(options))
        if failed:
            raise OSError(failed, f"threads cannot be started: {os.strerror(failed)}")

    def queue_write(self, extent: Extent, data: Array | None) -> None:
        """Queue the write of an extent's pages `data`, or of its arrays."""
        if data is not None:
            job, gathered = native.Job(data=data.ctypes.data), None
        else:
            gathered = job, _ = self._gathering(extent)
        job.nbytes = extent.nbytes
        job.state, job.error = _FAILED, errno.EINTR  # until it is submitted, if it ever is
        job.cancelled, extent.carried = 0, job
        try:
            runs = self._placed(job, extent, round_up(extent.nbytes))
        except OSError as error:  # too few pages are free
            job.error, runs = error.errno or errno.EIO, None
        self._flights[_WRITE].append(_Flight(extent, job, (extent.arrays, runs), gathered))
        if runs is not None:
            self._held.ms_io_submit(self._engine, job, _WRITE)

    def _gathering(self, extent: Extent) -> tuple[native.Job, ctypes.Array[native.Piece]]:
        """Return a job that gathers the arrays of an extent, and the table of their places."""
        assert extent.arrays is not None
        gathered = self._spare.pop() if self._spare else (native.Job(), (native.Piece * 0)())
        job, pieces = gathered
        if len(pieces) != len(extent.arrays):
            pieces = (native.Piece * len(extent.arrays))()
            job.pieces, job.n_pieces = pieces, len(pieces)
            gathered = job, pieces
        for piece, array, offset in zip(pieces, extent.arrays, extent.offsets, strict=True):
            piece.data, piece.offset, piece.nbytes = array.ctypes.data, offset, array.nbytes
        return gathered

    def _placed(self, job: native.Job, extent: Extent, nbytes: int = 0) -> object:
        """Tell a job where its extent lies; give that so many bytes first, if any."""
        if nbytes:
            self._file.begin(extent.slot, nbytes)
        runs = self._file.runs[extent.slot]
        parts = [native.Span(PAGE * first, PAGE * count) for first, count in runs]
        spans = (native.Span * len(parts))(*parts)
        job.spans, job.n_spans = spans, len(spans)
        return spans

    def free(self, extent: Extent) -> None:
        """Free the room of an extent; see `Carrier`."""
        self._file.free(extent.slot)

    def queue_read(self, extent: Extent, landing: Array) -> None:
        """Queue a read into `landing`, behind the extent's write if that is in flight."""
        job = native.Job(
            data=landing.ctypes.data,
            nbytes=extent.nbytes,
            sum=extent.checksum,
            state=_FAILED,
            error=errno.EINTR,
        )
        written = next((f.job for f in self._flights[_WRITE] if f.extent is extent), None)
        if written is not None:
            job.written = ctypes.addressof(written)
        runs = self._placed(job, extent)
        self._flights[_READ].append(_Flight(extent, job, (landing, written, runs)))
        self._held.ms_io_submit(self._engine, job, _READ)

    def poll(self) -> None:
        """Report every finished transfer.  Never blocks."""
        writes, reads = self._flights
        # A lane finishes its jobs in order.  Each is reported, then forgotten:
        # if it is interrupted between the two, it is reported again.
        while writes and writes[0].job.state:
            self._tell(writes[0], self._wrote)
            flight = writes.popleft()
            flight.extent.carried = None
            # A read that was queued behind this write may still look at its job.
            if flight.gathered is not None and not reads:
                self._spare.append(flight.gathered)
        while reads and reads[0].job.state:
            self._tell(reads[0], self._landed)
            reads.popleft()

    def _tell(self, flight: _Flight, tell: Finished) -> None:
        extent, job = flight.extent, flight.job
        error = _error(job.error) if self._held.ms_io_state(job) == _FAILED else None
        if error is None:
            extent.checksum = job.sum
        elif is_full(error):
            self._file.filled()
        tell(extent, 1e-9 * job.start_ns, 1e-9 * job.stop_ns, error)

    def cancel(self, extent: Extent) -> None:
        """Have the write of an extent fail at its next chunk; see `Carrier`."""
        extent.cancelled = True
        if isinstance(extent.carried, native.Job):  # or Ctrl-C came before it was queued
            self._held.ms_io_cancel(extent.carried)

    def cancel_read(self, extent: Extent) -> None:
        """Have the read of an extent fail at its next chunk; see `Carrier`."""
        reads = self._flights[_READ]
        for at, flight in enumerate(reads):
            if flight.extent is extent and self._held.ms_io_cancel(flight.job):
                assert isinstance(flight.kept, tuple)
                reads[at] = flight._replace(kept=flight.kept[1:])  # without its landing

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool | None:
        """Block until `ready()`; see `Carrier`."""
        wait, engine = self._library.ms_io_wait, self._engine
        ends_s = math.inf if timeout_s is None else time.perf_counter() + timeout_s
        while True:
            seen = wait(engine, 0, 0)
            self.poll()
            if ready():
                return True
            if not any(self._flights):
                return False
            left_ms = 1e3 * (ends_s - time.perf_counter())
            if left_ms <= 0:
                return None
            wait(engine, seen, math.ceil(min(_PATIENCE_MS, left_ms)))

    def close(self) -> None:
        """Finish what is in flight, stop the threads, close the file."""
        self._stop()
        if os.getpid() == self._owner:
            self.poll()


def _stop(owner: int, engine: int, file: DirectFile, kept: object) -> None:
    if os.getpid() == owner:
        native.library().ms_io_stop(engine)
    file.close()


@functools.cache  # once in a process: a tier that is measured opens several times
def _warn_of_memory(folder: str) -> None:
    logger.warning("folder %r lies in memory (tmpfs): checkpoints there take as much of it", folder)


def _error(code: int) -> OSError:
    if code == errno.EBADMSG:
        return OSError(errno.EIO, "the checksum does not match: the bytes were changed")
    if code == errno.ENODATA:
        return OSError(errno.EIO, "the file ends before the checkpoint does")
    if code == errno.ECANCELED:
        return OSError(code, "it was cancelled")
    if code == errno.EINTR:
        return OSError(code, "it was interrupted before it was queued")
    return OSError(code, os.strerror(code))
