"""Threads that work for a store: a `Lane` does what is queued, in order, a `Mover` what is next.

A cascade moves extents between its levels with a mover, `PinnedStore` states between pinned
memory and the tier below.  What is moved next, and what becomes of it, is decided under
one lock; bytes move without it, one move at a time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..support.waiting import Latch, Monitor

Work = TypeVar("Work")


class Lane(Generic[Work]):
    """A thread that does one piece of work after the other.

    Parameters
    ----------
    name : str
        Of the thread.

    Notes
    -----
    `put` takes no lock, and may be called from any thread.  No reference to a piece is
    kept once it is done, since memory that it refers to may be needed again; nor, by a
    lane that has ended, one to its work.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended = Latch()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[Work], None]) -> None:
        """Start the thread, which calls `work` with each piece; it must not raise.

        Raises
        ------
        RuntimeError
            If there are no more threads.
        """
        arguments = self._queue, work, self._ended
        thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def put(self, piece: Work) -> None:
        """Queue a piece of work."""
        self._queue.put(piece)

    @property
    def waiting(self) -> int:
        """How many pieces are queued and not begun."""
        return self._queue.qsize()

    def end(self) -> None:
        """Have the thread end after what is queued now.  May be called twice."""
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has done all its work."""
        return self._ended.is_set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended, at most so long; return whether it has.

        Interrupted, it can be called again.  The thread itself does not wait.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        # First, since Python before 3.13 takes a thread for ended whose `join` Ctrl-C ended.
        if not self._ended.wait(timeout_s):
            return False
        thread.join()
        self._thread = None
        return True


def _run(
    pieces: queue.SimpleQueue[Work | None], work: Callable[[Work], None], ended: Latch
) -> None:
    try:
        while (piece := pieces.get()) is not None:
            work(piece)
            del piece
    finally:
        ended.set()


Move = TypeVar("Move")


class Mover(Generic[Move]):
    """One background thread, and the lock of what it moves.

    Attributes
    ----------
    changes : Monitor
        Its lock guards what is moved; to be notified of whatever may allow another move.
    busy : bool
        Whether a move is in flight.
    closing : bool
        Whether `stop` was called: no move begins any more.
    """

    def __init__(self) -> None:
        self.changes = Monitor()
        self.busy = self.closing = False
        self._ended = Latch()
        self._thread: threading.Thread | None = None

    def start(
        self,
        following: Callable[[], Move | None],
        carry: Callable[[Move], None],
        settle: Callable[[Move, Exception | None], None],
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Start the thread.  Only the thread refers to the callables, until it ends.

        Parameters
        ----------
        following : callable
            Returns the next move and marks what it concerns, None if there is nothing to
            do now.  Called under the lock, again whenever something has changed.
        carry : callable
            Moves the bytes; called without the lock.
        settle : callable
            `settle(move, error)` enters what became of a move; called under the lock.
            The error is what `carry` raised, None if it did not.
        around : callable, optional
            Returns a context in which the thread runs.

        Raises
        ------
        RuntimeError
            If there are no more threads.
        """
        thread = threading.Thread(
            target=self._run,
            args=(following, carry, settle, around),
            name="multistage-mover",
            daemon=True,
        )
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Let the move in flight end, then the thread.  May be called twice."""
        with self.changes.lock:
            self.closing = True
            self.changes.notify_all()
        if self._thread is not None:
            self._ended.wait()  # see `Lane.join`
            self._thread.join()
            self._thread = None

    def _run(
        self,
        following: Callable[[], Move | None],
        carry: Callable[[Move], None],
        settle: Callable[[Move, Exception | None], None],
        around: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        try:
            with around():
                while (move := self._next(following)) is not None:
                    failure = None
                    try:
                        carry(move)
                    except Exception as error:  # whatever it is: states are lost, not runs
                        failure = error.with_traceback(None)  # whose frames refer to extents
                    with self.changes.lock:
                        self.busy = False
                        settle(move, failure)
                        self.changes.notify_all()
                    del move, failure
        finally:
            self._ended.set()

    def _next(self, following: Callable[[], Move | None]) -> Move | None:
        """Wait for something to move; None once the mover stops."""
        move: Move | None = None

        def begun() -> bool:
            nonlocal move
            if not self.closing and (move := following()) is not None:
                self.busy = True
            return self.closing or move is not None

        self.changes.wait_for(begun)
        return move
