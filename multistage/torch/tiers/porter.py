"""A thread that carries rows of bytes to a slow tier and back, while stages compute.

Rows are carried in the order they were asked for, so that writes and reads are each
first in, first out.  The thread alone calls the store, and nothing but a wait for a
row blocks the caller.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...backends.base import Store
from ...backends.lifetimes import Birth, Ending, end, forked
from ...errors import StoreError
from ...states.layout import Layout
from ...support.interrupts import Shield
from ...support.waiting import Latch
from .paging import PAGE_BYTES, Pager

_log = logging.getLogger(__name__)
_CANCELLED = "its write was cancelled"


@dataclass(eq=False, slots=True)
class Row:
    """Lines of bytes that lie in the tier, or are on their way there.

    Attributes
    ----------
    lengths : tuple of int
        Of the lines.
    error : str
        Why it is lost; empty if it is not.
    """

    lengths: tuple[int, ...]
    keys: range = range(0)
    error: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return sum(self.lengths)


@dataclass(eq=False, slots=True)
class Trip:
    """One row on its way, to the tier or back.

    Attributes
    ----------
    seconds : float
        On the way, once it is done.
    awaited : bool
        Whether its lines are for the computing thread to use.
    cancelled : bool
        Whether it is needed no more.
    queued_s, ended_s : float
        When, by `time.perf_counter`.
    pages : int
        Of a write, those begun.
    """

    row: Row
    lines: list[Tensor | None]
    is_write: bool
    ready: torch.Event | None = None  # on CUDA: after what was computed before
    arrived: torch.Event | None = None  # on CUDA: after the last copy
    seconds: float = 0.0
    awaited: bool = False
    cancelled: bool = False
    begun: bool = False
    queued_s: float = 0.0
    ended_s: float = 0.0
    pages: int = 0
    done: Latch = field(default_factory=Latch)

    def wanted_no_more(self) -> bool:
        """Count a page of a write; return whether it is to be left out."""
        self.pages += not self.cancelled
        return self.cancelled


@dataclass(slots=True)
class Carried:
    """Bytes, rows and seconds on the way, in one direction."""

    nbytes: int = 0
    rows: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a row."""
        self.nbytes += nbytes
        self.rows += 1
        self.seconds += seconds

    def since(self, before: Carried) -> Carried:
        """Return what came after."""
        return Carried(
            self.nbytes - before.nbytes, self.rows - before.rows, self.seconds - before.seconds
        )

    def bytes_per_s(self, latency_s: float) -> float | None:
        """Return the rate beside the latency of each row; None if that is not known."""
        seconds = self.seconds - self.rows * latency_s
        return self.nbytes / seconds if self.nbytes and seconds > 0 else None


class Porter:
    """Carries rows to and from a store, in the background.

    Parameters
    ----------
    store : Store
        Opened here, and closed by `close`.
    device : torch.device
        Of the lines.
    page_bytes : int

    Attributes
    ----------
    written, read : Carried
        What was carried so far.

    Raises
    ------
    StoreError
        If the store cannot be used, or is another run's.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> porter = Porter(MemoryStore(), torch.device("cpu"))
    >>> line = torch.arange(5, dtype=torch.uint8)
    >>> trip = porter.send([line])
    >>> porter.wait(trip)
    True
    >>> back = torch.empty_like(line)
    >>> porter.wait(porter.fetch(trip.row, [back])), back.tolist()
    (True, [0, 1, 2, 3, 4])
    >>> porter.close()
    True
    """

    def __init__(self, store: Store, device: torch.device, page_bytes: int = PAGE_BYTES) -> None:
        self._birth = Birth.here()
        with Shield(up=True):  # what is open is also noted to be closed
            self._begin(store, device, page_bytes)

    def _begin(self, store: Store, device: torch.device, page_bytes: int) -> None:
        store.open(Layout.up_to(page_bytes))
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work = _Work(store, page_bytes, stream)
        self._thread = threading.Thread(
            target=self._work.run, name="multistage-porter", daemon=True
        )
        try:
            self._thread.start()
            self._close = _closing(self._work, self._thread, self._birth)
            self._end = Ending(self, partial(end, self._close, self._birth))
        except BaseException as error:
            self._work.tasks.put(None)  # if it runs: a second Ctrl-C may have come after its start
            store.close()
            if not isinstance(error, RuntimeError):
                raise
            raise StoreError(f"tier {store.name!r} cannot be used: {error}") from error

    @property
    def written(self) -> Carried:
        """What was written so far."""
        return self._work.written

    @property
    def read(self) -> Carried:
        """What was read so far."""
        return self._work.read

    @property
    def is_open(self) -> bool:
        """Whether it carries rows; not after `close`, nor in a forked child."""
        return not self._work.pager.stopped and not self._birth.foreign

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return not self._work.ended.is_set() and not self._birth.foreign

    def _check(self) -> None:
        if self._birth.foreign:
            raise forked(f"tier {self._work.store.name!r}")

    def send(self, lines: Sequence[Tensor]) -> Trip:
        """Queue the way of a row to the tier; never blocks.

        Parameters
        ----------
        lines : sequence of Tensor
            Of uint8 and one dimension; unchanged until `wait`.
        """
        self._check()
        trip = Trip(Row(tuple([len(line) for line in lines])), list(lines), is_write=True)
        return self._queue(trip)

    def fetch(self, row: Row, lines: Sequence[Tensor | None]) -> Trip:
        """Queue the way of a row back; never blocks.

        Parameters
        ----------
        lines : sequence of Tensor or None
            Like those it was sent from; None for what is not wanted.
        """
        self._check()
        return self._queue(Trip(row, list(lines), is_write=False))

    def _queue(self, trip: Trip) -> Trip:
        if self._work.stream is not None:
            trip.ready = torch.cuda.Event()
            trip.ready.record(torch.cuda.current_stream(self._work.stream.device))
        trip.queued_s = time.perf_counter()
        if self._work.pager.stopped:
            trip.row.error = "the tier was closed"
            trip.lines.clear()
            trip.done.set()
        else:
            self._work.tasks.put(trip)
        return trip

    def wait(self, trip: Trip) -> bool:
        """Block until a row has left its lines or come back; False if it is lost."""
        if not trip.done.is_set():
            self._check()
            while not trip.done.wait(1.0):
                if self._work.ended.is_set() and not trip.done.is_set():
                    trip.row.error = trip.row.error or "the tier was closed"
                    break
        if trip.arrived is not None:
            torch.cuda.current_stream(self._work.stream.device).wait_event(trip.arrived)
        trip.awaited = not trip.row.error
        return trip.awaited

    def cancel(self, trip: Trip) -> None:
        """Let a transfer end as lost: before it begins, or a write between two of its pages.

        Never blocks.  Where `trip.done` is set the lines are not referred to any more.
        """
        self._work.cancel(trip)

    def drop(self, row: Row) -> None:
        """Free the tier's copy of a row; never blocks, and is called by finalizers."""
        if self.is_open:
            self._work.tasks.put(row)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the thread, close the store; rows are lost.  May be called twice.

        Interrupted, it can be called again and does the rest.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait for what the store is doing.  After that another thread waits,
            and does the rest; the interpreter's exit does not wait for it.

        Returns
        -------
        bool
            Whether it is closed.
        """
        closed = self._close(timeout_s)
        if not closed:
            threading.Thread(target=self._close, name="multistage-closing", daemon=True).start()
        self._end.forget()
        return closed


class _Work:
    """What the thread does; it refers to no `Porter`, so that one that is dropped ends it."""

    def __init__(self, store: Store, page_bytes: int, stream: Any) -> None:
        self.store, self.stream = store, stream
        self.pager = Pager(store, page_bytes)
        self.tasks: queue.SimpleQueue[Trip | Row | None] = queue.SimpleQueue()
        self.written, self.read = Carried(), Carried()
        self.ended = Latch()
        self._beginning = threading.RLock()  # finalizers, which may run anywhere, cancel

    def cancel(self, trip: Trip) -> None:
        with self._beginning:
            trip.cancelled = True
            if not trip.begun and not trip.done.is_set():
                trip.row.error = _CANCELLED
                trip.lines.clear()
                trip.done.set()

    def run(self) -> None:
        """Carry until the tasks end in None."""
        try:
            with torch.cuda.stream(self.stream):
                while (task := self.tasks.get()) is not None:
                    if isinstance(task, Row):
                        self._drop(task)
                    else:
                        self._carry(task)
                    del task
        finally:
            self.ended.set()

    def _carry(self, trip: Trip) -> None:
        with self._beginning:
            if trip.done.is_set():  # it was cancelled
                return
            trip.begun = True
        row, began = trip.row, time.perf_counter()
        try:
            if trip.ready is not None:
                self.stream.wait_event(trip.ready)
            if trip.is_write:
                self._write(trip)
            elif not row.error:
                self.pager.read(row.keys, row.lengths, trip.lines)
                if self.stream is not None:
                    trip.arrived = torch.cuda.Event()
                    trip.arrived.record(self.stream)
        except Exception as error:  # whatever a store raises: the row is computed again
            row.error = row.error or str(error) or type(error).__name__
        finally:
            trip.ended_s = time.perf_counter()
            trip.seconds = trip.ended_s - began
            if not row.error:
                (self.written if trip.is_write else self.read).add(row.nbytes, trip.seconds)
            elif row.error == _CANCELLED and trip.pages:
                nbytes = min(row.nbytes, trip.pages * self.pager.page_bytes)
                self.written.add(nbytes, trip.seconds)
            trip.lines.clear()  # before anybody hears of it: their memory must be gone
            trip.done.set()

    def _write(self, trip: Trip) -> None:
        lines = [line for line in trip.lines if line is not None]
        keys = self.pager.put(lines, trip.wanted_no_more)
        if keys is None:
            trip.row.error = _CANCELLED if trip.cancelled else "the tier took no more"
        else:
            trip.row.keys = keys
            if not self.pager.wait(keys):
                trip.row.error = "a write failed"
                self.pager.drop(keys)

    def _drop(self, row: Row) -> None:
        try:
            self.pager.drop(row.keys)
        except Exception:  # the store is closed or broken: nothing is in it any more
            _log.debug("a row could not be dropped", exc_info=True)


def _closing(work: _Work, thread: threading.Thread, birth: Birth) -> Callable[..., bool]:
    lock = threading.RLock()  # two may wait for the thread
    closed = False

    def close(timeout_s: float | None = None) -> bool:
        nonlocal closed
        work.pager.stopped = True
        work.tasks.put(None)
        if thread is not threading.current_thread():
            # First, since Python before 3.13 takes a thread for ended whose `join` Ctrl-C ended.
            if not birth.foreign and not work.ended.wait(timeout_s):
                return False
            thread.join()
        with lock, Shield(up=True):
            if not closed:  # the store may be open again, for another
                work.store.close()
                closed = True
        while not work.tasks.empty():
            task = work.tasks.get_nowait()
            if isinstance(task, Trip) and not task.done.is_set():
                task.row.error = "the tier was closed"
                task.lines.clear()
                task.done.set()
        return True

    return close
