"""A thread that does what is queued, in order: the lanes of stores and of chains; their CPUs."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from ..errors import ArgumentError, StoreError
from ..support.values import whole
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


def cpus_of(cpus: str | Iterable[int]) -> frozenset[int]:
    """Return CPUs given by number, or as `taskset` and the kernel write them.

    Raises
    ------
    ArgumentError
        If they are written otherwise, or none; where no thread can be bound to CPUs.

    Examples
    --------
    >>> sorted(cpus_of("0,14-15"))
    [0, 14, 15]
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ArgumentError(f"cpus={cpus!r} needs Linux; leave it out")
    if isinstance(cpus, str):
        ranges = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part) for part in cpus.split(",")]
        runs = [range(int(r[1]), int(r[2] or r[1]) + 1) if r else range(0) for r in ranges]
        if not all(runs):
            raise ArgumentError(f"cpus={cpus!r} must be numbers and ranges, as in cpus=0,14-15")
        return frozenset().union(*runs)
    if not (numbers := frozenset(whole(number, "cpus") for number in cpus)):
        raise ArgumentError("cpus=() must name a CPU, as in cpus=[14, 15]; leave it out for any")
    return numbers


def start_on(cpus: frozenset[int], start: Callable[[], None]) -> None:
    """Call what starts threads so that these run on some CPUs alone; the caller stays where it is.

    Raises
    ------
    StoreError
        If the process may not use one of them.
    """

    def started() -> None:  # a thread runs where the one that starts it may
        os.sched_setaffinity(0, range(_MOST_CPUS))  # which the kernel cuts down to what there is
        there = os.sched_getaffinity(0)
        if missing := sorted(cpus - there):
            raise StoreError(
                f"cpus={_listed(cpus)}: there is no CPU {_listed(missing)} for this process; it "
                f"may use {_listed(there)}"
            )
        os.sched_setaffinity(0, cpus)
        start()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(started).result()


_MOST_CPUS = 8192  # of any kernel


def _listed(cpus: Iterable[int]) -> str:
    """Return CPUs as `cpus_of` takes them."""
    runs: list[list[int]] = []
    for number in sorted(cpus):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
