"""The slow tier of a chain: a thread that moves records of bytes, while stages compute.

A *record* is some lines of bytes.  A `Transfer` is one record on its way to the tier, or back.
Transfers are made in the order in which they were asked for, so that writes and reads are each
first in, first out.  The thread of a `TierLane` alone calls the store, and nothing but a wait
for a transfer blocks the caller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...backends.base import Store
from ...backends.lanes import Lane
from ...backends.lifetimes import Birth, Ending, forked
from ...errors import StoreError
from ...states.layout import Layout
from ...support.interrupts import Shield
from ...support.waiting import Latch
from .paging import PAGE_BYTES, Pager

_log = logging.getLogger(__name__)
_CANCELLED, _CLOSED = "its write was cancelled", "the tier was closed"
# How long a run waits for a tier that it is done with, which may have stopped forever.
PATIENCE_S = 5.0


@dataclass(eq=False, slots=True)
class Transfer:
    """One record on its way, to the tier or back.

    Attributes
    ----------
    source : Transfer or None
        The write that this one reads back; None for a write.
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

    lines: list[Tensor | None]
    source: Transfer | None = None
    lengths: tuple[int, ...] = ()  # of the lines; this and the next two of a write alone
    keys: range = range(0)  # of its pages in the store
    lost: str = ""  # why
    ready: torch.Event | None = None  # on CUDA: after what was computed before
    seconds: float = 0.0
    awaited: bool = False
    cancelled: bool = False
    begun: bool = False
    queued_s: float = 0.0
    ended_s: float = 0.0
    pages: int = 0
    done: Latch = field(default_factory=Latch)

    @property
    def is_write(self) -> bool:
        """Whether it goes to the tier."""
        return self.source is None

    @property
    def record(self) -> Transfer:
        """The write that made the record."""
        return self if self.source is None else self.source

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return sum(self.record.lengths)

    @property
    def error(self) -> str:
        """Why the record is lost; empty if it is not."""
        return self.record.lost

    def lose(self, error: str) -> None:
        """Say that the record is lost; the first reason stays."""
        self.record.lost = self.error or error

    def end(self) -> None:
        """Say that it is over."""
        self.lines.clear()  # before `done` is set: their memory must be gone
        self.done.set()

    def wanted_no_more(self) -> bool:
        """Count a page of a write; return whether it is to be left out."""
        self.pages += not self.cancelled
        return self.cancelled


@dataclass(slots=True)
class Carried:
    """Bytes, transfers and seconds on the way, in one direction."""

    nbytes: int = 0
    transfers: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a transfer."""
        self.nbytes += nbytes
        self.transfers += 1
        self.seconds += seconds

    def since(self, before: Carried) -> Carried:
        """Return what came after."""
        return Carried(
            self.nbytes - before.nbytes,
            self.transfers - before.transfers,
            self.seconds - before.seconds,
        )

    def bytes_per_s(self, latency_s: float) -> float | None:
        """Return the rate beside the latency of each transfer; None if that is not known."""
        seconds = self.seconds - self.transfers * latency_s
        return self.nbytes / seconds if self.nbytes and seconds > 0 else None


class TierLane:
    """An open store, and the thread that alone calls it.

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

    Notes
    -----
    The thread refers to it: what is dropped without `close` goes on.  See `ChainTier`.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> lane = TierLane(MemoryStore(), torch.device("cpu"))
    >>> line = torch.arange(5, dtype=torch.uint8)
    >>> sent = lane.write([line])
    >>> lane.wait(sent)
    True
    >>> back = torch.empty_like(line)
    >>> lane.wait(lane.fetch(sent, [back])), back.tolist()
    (True, [0, 1, 2, 3, 4])
    >>> lane.close()
    True
    """

    def __init__(self, store: Store, device: torch.device, page_bytes: int = PAGE_BYTES) -> None:
        self.written, self.read = Carried(), Carried()
        self._store, self._birth = store, Birth.here()
        self._closing = threading.RLock()  # two may wait for the thread
        self._closed = False
        self._current: Transfer | None = None  # that the thread is at
        # Finalizers, which may run anywhere, cancel.
        self._beginning = threading.RLock()
        with Shield(up=True):  # what is open is also known to be
            store.open(Layout.up_to(page_bytes))
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._pager = Pager(store, page_bytes)
            self._lane: Lane[Transfer | partial[None]] = Lane("multistage-tier")
            try:
                self._lane.start(self._do)
            except BaseException as error:
                self._lane.end()  # if it runs: a second Ctrl-C may have come after its start
                store.close()
                if not isinstance(error, RuntimeError):
                    raise
                raise StoreError(f"tier {store.name!r} cannot be used: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether it carries records; not after `close`, nor in a forked child."""
        return not self._pager.stopped and not self._birth.foreign

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return not self._lane.has_ended and not self._birth.foreign

    @property
    def stuck_bytes(self) -> int:
        """Bytes of fast memory that a cancelled transfer holds, as the store is still at it."""
        current = self._current
        return 0 if current is None or not current.cancelled else current.nbytes

    # ------------------------------------------------------- the computing thread

    def write(self, lines: Sequence[Tensor]) -> Transfer:
        """Queue the way of a record to the tier; never blocks.

        Parameters
        ----------
        lines : sequence of Tensor
            Of uint8 and one dimension; unchanged until `wait`.
        """
        return self._queue(Transfer(list(lines), lengths=tuple([len(line) for line in lines])))

    def fetch(self, sent: Transfer, lines: Sequence[Tensor | None]) -> Transfer:
        """Queue the way of a record back; never blocks.

        Parameters
        ----------
        sent : Transfer
            Its write, or a read of it.
        lines : sequence of Tensor or None
            Like those it was written from; None for what is not wanted.
        """
        return self._queue(Transfer(list(lines), source=sent.record))

    def _queue(self, transfer: Transfer) -> Transfer:
        if self._birth.foreign:
            raise forked(f"tier {self._store.name!r}")
        if self._stream is not None:
            transfer.ready = torch.cuda.Event(blocking=True)
            transfer.ready.record(torch.cuda.current_stream(self._stream.device))
        transfer.queued_s = time.perf_counter()
        with self._beginning:  # nothing is queued behind the end
            if self.is_open:
                self._lane.put(transfer)
                return transfer
        transfer.lose(_CLOSED)
        transfer.end()
        return transfer

    def wait(self, transfer: Transfer) -> bool:
        """Block until a record has left its lines or come back; False if it is lost."""
        if not transfer.done.is_set():
            if self._birth.foreign:
                raise forked(f"tier {self._store.name!r}")
            while not transfer.done.wait(1.0):
                if not self.is_alive and not transfer.done.is_set():
                    transfer.lose(_CLOSED)
                    break
        transfer.awaited = not transfer.error
        return transfer.awaited

    def cancel(self, transfer: Transfer) -> None:
        """Let a transfer end as lost: before it begins, or a write between two of its pages.

        Never blocks.  Where `Transfer.done` is set the lines are not referred to any more.
        """
        with self._beginning:
            transfer.cancelled = True
            if not transfer.begun and not transfer.done.is_set():
                transfer.record.lost = _CANCELLED
                transfer.end()

    def drop(self, sent: Transfer) -> None:
        """Free the tier's copy of a record; never blocks, and is called by finalizers."""
        if not sent.done.is_set():
            self.cancel(sent)
        if self.is_open:
            self._lane.put(partial(self._drop, sent.record))

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the thread, close the store; records are lost.  May be called twice.

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
        foreign = self._birth.foreign
        if foreign:
            self._pager.stopped = True
        else:
            with self._beginning:
                self._pager.stopped = True
                self._lane.end()
        if not foreign and not self._lane.join(timeout_s):
            threading.Thread(target=self.close, name="multistage-closing", daemon=True).start()
            return False
        with self._closing, Shield(up=True):
            if not self._closed:  # the store may be open again, for another
                self._store.close()
                self._closed = True
        return True

    # ----------------------------------------------------------------- the thread

    def _do(self, task: Transfer | partial[None]) -> None:
        with torch.cuda.stream(self._stream):
            if isinstance(task, Transfer):
                self._carry(task)
            else:
                task()

    def _carry(self, transfer: Transfer) -> None:
        with self._beginning:
            if transfer.done.is_set():  # it was cancelled
                return
            transfer.begun = True
            self._current = transfer
        began = time.perf_counter()
        try:
            if transfer.ready is not None:
                transfer.ready.synchronize()
                began = time.perf_counter()
            if transfer.is_write:
                self._write(transfer)
            elif not transfer.error:
                self._read(transfer)
        except Exception as error:  # whatever a store raises: the record is computed again
            transfer.lose(str(error) or type(error).__name__)
        finally:
            transfer.ended_s = time.perf_counter()
            transfer.seconds = transfer.ended_s - began
            if not transfer.error:
                way = self.written if transfer.is_write else self.read
                way.add(transfer.nbytes, transfer.seconds)
            elif transfer.error == _CANCELLED and transfer.pages:
                nbytes = min(transfer.nbytes, transfer.pages * self._pager.page_bytes)
                self.written.add(nbytes, transfer.seconds)
            transfer.end()
            self._current = None

    def _read(self, transfer: Transfer) -> None:
        record = transfer.record
        try:
            self._pager.read(record.keys, record.lengths, transfer.lines)
        finally:
            # The lines may be freed once it has ended, awaited or not, and the allocator knows of
            # no stream at them but the computing one.
            if self._stream is not None:
                filled = torch.cuda.Event(blocking=True)
                filled.record(self._stream)
                filled.synchronize()

    def _write(self, transfer: Transfer) -> None:
        lines = [line for line in transfer.lines if line is not None]
        keys = self._pager.put(lines, transfer.wanted_no_more)
        if keys is None:
            transfer.lose(_CANCELLED if transfer.cancelled else "the tier took no more")
            return
        transfer.keys = keys
        if not self._pager.wait(keys):
            transfer.lose("a write failed")
            self._pager.drop(keys)

    def _drop(self, record: Transfer) -> None:
        try:
            self._pager.drop(record.keys)
        except Exception:  # the store is closed or broken: nothing is in it any more
            _log.debug("a record could not be dropped", exc_info=True)


class ChainTier:
    """A slow tier for the tapes and states of a chain.

    It lives as long as the chain, is opened by the first run that sends something there, and
    stays open between iterations, as opening costs more than a transfer.

    Parameters
    ----------
    store : Store
        Opened by the first run that needs it.
    device : torch.device
        Of the tensors.
    page_bytes : int

    Notes
    -----
    Several runs share it, as of two forward passes before one backward pass.
    """

    def __init__(self, store: Store, device: torch.device, page_bytes: int = PAGE_BYTES) -> None:
        self.store, self.device, self.page_bytes = store, device, page_bytes
        self.runs = 0  # that have something in it
        self.busier = 1.0  # how much longer the last sweep took than its thread computed
        self._lane: TierLane | None = None
        self._ending: Ending[bool] | None = None
        self._lock = threading.RLock()  # a collection of garbage may close it meanwhile
        self._birth = Birth.here()

    def open(self) -> TierLane:
        """Return what carries records there; opens the store if it is not open.

        Raises
        ------
        StoreError
            If the store cannot be used, is another run's, or this is a forked child.
        """
        with self._lock:
            lane = self._lane
            if lane is None or not lane.is_open:
                if lane is not None and not self._birth.foreign:
                    self._close(None)
                with Shield(up=True):  # one that is open is known to be
                    lane = self._lane = TierLane(self.store, self.device, self.page_bytes)
                    self._ending = Ending(self, lane.close)
            return lane

    @property
    def opened(self) -> TierLane | None:
        """The lane, if the store is open."""
        return self._lane if self._lane is not None and self._lane.is_open else None

    @property
    def stuck_bytes(self) -> int:
        """Bytes of fast memory that cancelled transfers hold."""
        return 0 if self._lane is None else self._lane.stuck_bytes

    @property
    def is_closing(self) -> bool:
        """Whether the store is still at work for a lane that is closed."""
        lane = self._lane
        return lane is not None and not lane.is_open and lane.is_alive

    def close(self) -> None:
        """Stop the thread and close the store: what lies there is lost.  May be called twice."""
        with self._lock:
            self._close(None)

    def leave(self) -> None:
        """Close it, but wait for the store no longer than some seconds."""
        with self._lock:
            if not self.is_closing:
                self._close(PATIENCE_S)

    def _close(self, timeout_s: float | None) -> None:
        if self._lane is None:
            return
        closed = self._lane.close(timeout_s)
        if self._ending is not None:
            self._ending.forget()  # another thread closes it, if it is not closed
        if closed:
            self._lane = self._ending = None
