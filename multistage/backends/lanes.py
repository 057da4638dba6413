"""A thread that does what is queued, in order: the lanes of stores and of chains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..support.waiting import Latch

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
