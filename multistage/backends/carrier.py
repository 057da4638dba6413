"""How extents get to a medium and back, in the background: `Carrier`, and one by Python's threads.

A carrier has two lanes, one each way, and finishes what is queued on a lane in
order.  Threads of its own move the bytes; the result of a transfer is reported on
the computing thread, when that polls or waits.  So an extent is changed by the
computing thread alone, and nothing of the store needs a lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import xxhash

from ..states.layout import Array
from .arena import round_up
from .extents import Extent
from .lanes import Lane
from .lifetimes import Birth, Ending, end
from .medium import Medium

# An extent was moved, from when to when (`perf_counter`), and what went wrong.
# Interrupted, it is called again for the same transfer.
Finished = Callable[[Extent, float, float, Exception | None], None]


class Carrier(Protocol):
    """Moves whole extents; see `ThreadCarrier` and `NativeFile`."""

    def start(self, bounce: Array | None, wrote: Finished, landed: Finished) -> None:
        """Start the threads.

        Parameters
        ----------
        bounce : array of uint8 or None
            Page-aligned memory to gather states in; None if `queue_write`
            always gets pages.
        wrote, landed : callable
            Told of each finished write and read by `poll`.

        Raises
        ------
        OSError, MemoryError, RuntimeError
            If they cannot be started.
        """
        ...

    def queue_write(self, extent: Extent, data: Array | None) -> None:
        """Queue a write of pages, or of the extent's arrays."""
        ...

    def queue_read(self, extent: Extent, landing: Array) -> None:
        """Queue a read, behind the extent's write if that is in flight."""
        ...

    def free(self, extent: Extent) -> None:
        """Free the room of an extent, which is at rest.  Never blocks."""
        ...

    def poll(self) -> None:
        """Report finished transfers.  Never blocks."""
        ...

    def cancel(self, extent: Extent) -> None:
        """Have the write of an extent fail (ECANCELED) at its next chunk, if there is one."""
        ...

    def cancel_read(self, extent: Extent) -> None:
        """Have the read of an extent, whose bytes are not needed, fail where it can.

        One that has not begun refers to what it would land in no more.
        """
        ...

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool | None:
        """Block until `ready()`, which is asked again after every transfer.

        Returns None if that takes longer than a timeout.  Returns False if it is not ready
        and nothing is in flight that could make it so: a transfer was interrupted before
        it was queued.
        """
        ...

    def close(self) -> None:
        """Finish the transfers in flight, report them, release everything.

        Interrupted, it can be called again and does the rest.
        """
        ...


class _Flight:
    """One transfer that was queued."""

    __slots__ = ("began", "behind", "checksum", "data", "done", "ended", "error", "extent")

    def __init__(self, extent: Extent, data: Array | None, behind: _Flight | None = None) -> None:
        self.extent = extent
        self.data = data  # None of a read: it was cancelled
        self.behind = behind  # the write of what is read, if it was in flight
        self.checksum = extent.checksum
        self.began = self.ended = 0.0
        self.error: Exception | None = None
        self.done = False


class _Threads:
    """What the two threads of a `ThreadCarrier` share: they refer to this, and never to it.

    So a carrier that is dropped can be collected, and its finalizer ends them.
    """

    def __init__(self, medium: Medium, verify: bool) -> None:
        self.medium = medium
        self.writes: Lane[_Flight] = Lane("multistage-writer")
        self.reads: Lane[_Flight] = Lane("multistage-reader")
        # Rung once for each flight that ends, after `done` is set.
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._verify = verify
        self._written = threading.Condition()  # for the reader, which waits for writes

    def start(self, bounce: Array | None) -> None:
        self._bounce = bounce
        self.writes.start(self._carry_out)
        self.reads.start(self._bring_back)

    def stop(self) -> None:
        """Finish what is queued, end the threads, close the medium.

        Interrupted, it can be called again and does the rest.
        """
        self.writes.end()
        self.reads.end()
        self.writes.join()
        self.reads.join()
        self.medium.close()

    def _carry_out(self, flight: _Flight) -> None:
        self._move(flight, self._write)

    def _bring_back(self, flight: _Flight) -> None:
        self._move(flight, self._read)

    def _move(self, flight: _Flight, work: Callable[[_Flight], None]) -> None:
        failure = None
        if flight.behind is not None:
            self._await(flight.behind)
        flight.began = time.perf_counter()
        try:
            work(flight)
        except Exception as error:  # the computing thread must learn of every error
            failure = error.with_traceback(None)  # whose frames refer to what landed
        flight.ended = time.perf_counter()
        flight.error = failure
        # What landed is referred to by its extent alone from here on, or
        # the pool would take it to be in use.
        flight.data = flight.behind = failure = None
        with self._written:
            flight.done = True
            self._written.notify_all()
        self.bell.put(None)

    def _await(self, flight: _Flight) -> None:
        with self._written:
            self._written.wait_for(lambda: flight.done)

    def _write(self, flight: _Flight) -> None:
        extent, data = flight.extent, flight.data
        self.medium.begin(extent.slot, round_up(extent.nbytes))
        if data is None:
            flight.checksum = self._write_gathered(extent)
            return
        flight.checksum = xxhash.xxh3_64_intdigest(data[: extent.nbytes].data)
        self.medium.write(extent.slot, 0, data[: round_up(extent.nbytes)])

    def _write_gathered(self, extent: Extent) -> int:
        """Write one state chunk by chunk through the bounce buffer; return its checksum."""
        bounce, digest = self._bounce, xxhash.xxh3_64()
        assert bounce is not None
        assert extent.arrays is not None
        room, filled, offset = len(bounce), 0, 0

        def flush(last: bool) -> None:
            nonlocal filled, offset
            if extent.cancelled:
                raise OSError(errno.ECANCELED, "it was cancelled")
            digest.update(bounce[: min(filled, extent.nbytes - offset)].data)
            end = round_up(filled) if last else filled
            self.medium.write(extent.slot, offset, bounce[:end])
            offset += filled
            filled = 0

        for place, array in zip(extent.offsets, extent.arrays, strict=True):
            # The gap up to the array's place keeps what was there: part of the
            # record, never looked at.
            filled = place - offset
            if filled >= room:
                flush(last=False)
            source = array.reshape(-1).view(np.uint8)
            while len(source):
                part = source[: room - filled]
                bounce[filled : filled + len(part)] = part
                filled += len(part)
                source = source[len(part) :]
                if filled == room:
                    flush(last=False)
        filled = extent.nbytes - offset
        if filled:
            flush(last=True)
        return int(digest.intdigest())

    def _read(self, flight: _Flight) -> None:
        extent, landing, behind = flight.extent, flight.data, flight.behind
        if landing is None:  # looked at once: it may be cancelled at any time
            raise OSError(errno.ECANCELED, "it was cancelled")
        if behind is not None:
            if behind.error is not None:
                raise OSError(f"write failed: {behind.error}")
            flight.checksum = behind.checksum
        self.medium.read(extent.slot, landing[: round_up(extent.nbytes)])
        found = xxhash.xxh3_64_intdigest(landing[: extent.nbytes].data)
        if self._verify and found != flight.checksum:
            raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")


class ThreadCarrier:
    """Carries extents to and from a medium on two threads of the interpreter.

    Parameters
    ----------
    medium : Medium
        Closed with the carrier.
    verify : bool
        Whether what is read must have the checksum of what was written.

    Notes
    -----
    The threads work on flights, whose `done` they set, and look at nothing of
    an extent that may change meanwhile but whether its write was cancelled; of a flight,
    whether its read was.

    Ctrl-C may come between any two instructions of the computing thread.  It
    takes no lock, which an interrupt could make it keep; it reports a flight before
    it forgets it, and reports again what it was interrupted in; and a flight is
    noted only when it is queued, so that whatever is noted ends.
    """

    def __init__(self, medium: Medium, *, verify: bool = True) -> None:
        self._threads = _Threads(medium, verify)
        self._writing: deque[_Flight] = deque()  # in order, until told of
        self._reading: deque[_Flight] = deque()
        self._dropped = Ending(self, functools.partial(end, self._threads.stop, Birth.here()))

    @property
    def medium(self) -> Medium:
        """Where the extents lie."""
        return self._threads.medium

    def start(self, bounce: Array | None, wrote: Finished, landed: Finished) -> None:
        """Start the threads; see `Carrier`."""
        self._wrote, self._landed = wrote, landed
        self._threads.start(bounce)

    def queue_write(self, extent: Extent, data: Array | None) -> None:
        """Queue the write of an extent's pages `data`, or of its arrays."""
        flight = _Flight(extent, data)
        self._threads.writes.put(flight)
        self._writing.append(flight)

    def queue_read(self, extent: Extent, landing: Array) -> None:
        """Queue a read into `landing`, behind the extent's write if that is in flight."""
        behind = next((flight for flight in self._writing if flight.extent is extent), None)
        flight = _Flight(extent, landing, behind)
        self._threads.reads.put(flight)
        self._reading.append(flight)

    def free(self, extent: Extent) -> None:
        """Free the room of an extent; see `Carrier`."""
        self.medium.free(extent.slot)

    def poll(self) -> None:
        """Report every finished transfer.  Never blocks."""
        for flights, tell in ((self._writing, self._wrote), (self._reading, self._landed)):
            while flights and flights[0].done:
                flight = flights[0]
                if flight.error is None:
                    flight.extent.checksum = flight.checksum
                tell(flight.extent, flight.began, flight.ended, flight.error)
                flights.popleft()
        bell = self._threads.bell
        while bell.qsize() > len(self._writing) + len(self._reading):
            bell.get_nowait()  # nothing waits for these: they must not pile up

    def cancel(self, extent: Extent) -> None:
        """Have the write of an extent fail at its next chunk; see `Carrier`."""
        extent.cancelled = True

    def cancel_read(self, extent: Extent) -> None:
        """Have the read of an extent fail unless it has begun; see `Carrier`."""
        for flight in self._reading:
            if flight.extent is extent:
                flight.data = None  # the reading thread refers to it itself once it has begun

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool | None:
        """Block until `ready()`; see `Carrier`."""
        ends_s = None if timeout_s is None else time.perf_counter() + timeout_s
        while True:
            self.poll()
            if ready():
                return True
            if not self._writing and not self._reading:
                return False
            left_s = None if ends_s is None else ends_s - time.perf_counter()
            if left_s is not None and left_s <= 0:
                return None
            with contextlib.suppress(queue.Empty):
                self._threads.bell.get(timeout=left_s)

    def close(self) -> None:
        """Finish what is in flight, stop the threads, close the medium."""
        self._threads.stop()
        self._dropped.forget()
        if self._writing or self._reading:  # or it may never have started
            self.poll()
