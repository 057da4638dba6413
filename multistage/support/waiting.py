"""Waits between threads that Ctrl-C can end anywhere: `Monitor` and `Latch`.

Python raises KeyboardInterrupt between any two instructions of the main thread, those of
`threading.Condition`, `Event` and `Thread.join` included, which are written in Python:
interrupted there, a lock may stay taken, and the next thread that needs it waits forever.  Here
every wait is one call of `queue.SimpleQueue.get`, which is written in C: it returns or
raises, and no lock is held meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class Monitor:
    """A lock, and waits for what changes under it.

    Attributes
    ----------
    lock : RLock
        Guards what is waited for.

    Examples
    --------
    >>> monitor, found = Monitor(), []
    >>> def give():
    ...     with monitor.lock:
    ...         found.append(7)
    ...         monitor.notify_all()
    >>> thread = threading.Thread(target=give)
    >>> thread.start()
    >>> monitor.wait_for(lambda: found and found.pop())
    7
    >>> thread.join()
    """

    __slots__ = ("_bells", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bells: list[queue.SimpleQueue[None]] = []  # of those who wait

    def notify_all(self) -> None:
        """Let all who wait look again; the caller holds the lock."""
        for bell in self._bells:
            bell.put(None)
        # Interrupted before this, the same ones look once more than they need to.
        self._bells.clear()

    def wait_for(self, ready: Callable[[], Found], timeout_s: float | None = None) -> Found:
        """Block until `ready()` is true; return what it returned.

        Parameters
        ----------
        ready : callable
            Called under the lock, again after each `notify_all`; it may take what it finds.
        timeout_s : float, optional
            After so long return what it returns then.

        Notes
        -----
        The caller must not hold the lock.
        """
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:
                if found := ready():
                    return found
                self._bells.append(bell)
            try:
                bell.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                with self.lock:
                    return ready()


class Latch:
    """Something that happens once, and that any number of threads wait for.

    Examples
    --------
    >>> latch = Latch()
    >>> latch.set()
    >>> latch.wait()
    True
    """

    __slots__ = ("_bells", "_done")

    def __init__(self) -> None:
        self._bells: list[queue.SimpleQueue[None]] = []
        self._done = False

    def set(self) -> None:
        """Say that it has happened.  May be called twice."""
        # No lock: a thread that waits either sees this, or is in the list by now.
        self._done = True
        for bell in self._bells:
            bell.put(None)

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has happened, at most so long; return whether it has."""
        if not self._done:
            bell: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._bells.append(bell)
            if not self._done:
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=timeout_s)
        return self._done
