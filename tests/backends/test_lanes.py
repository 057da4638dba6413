"""Threads that work for a store: their order, and their end."""

from __future__ import annotations

import os
import signal

import pytest

from multistage.backends.lanes import Lane
from multistage.support.waiting import Latch


def test_work_is_done_in_order_and_before_the_end() -> None:
    lane, done = Lane[int]("test"), list[int]()
    lane.start(done.append)
    for piece in range(1, 50):
        lane.put(piece)
    lane.end()
    lane.join()
    lane.join()
    assert done == list(range(1, 50))


def test_a_thread_whose_end_was_waited_for_in_vain_is_waited_for_again() -> None:
    """Python 3.11 and 3.12 take a thread for ended whose `join` Ctrl-C ended."""
    lane, gate, done = Lane[int]("test"), Latch(), list[int]()
    times = iter([True])

    def interrupt(number: int, frame: object) -> None:
        if next(times, False):
            raise KeyboardInterrupt

    def work(piece: int) -> None:
        # Not once: a signal just before a wait begins is noticed when the wait ends.
        while not gate.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)
        done.append(piece)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        lane.start(work)
        with pytest.raises(KeyboardInterrupt):
            lane.put(7)
            lane.end()
            lane.join()
        assert not done
        gate.set()
        lane.end()  # had the first been interrupted
        lane.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [7]
