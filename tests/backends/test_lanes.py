"""Threads that work for a store: their order, and their end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from multistage.backends import FileStore, open_store
from multistage.backends.lanes import Lane
from multistage.errors import StoreError
from multistage.states.layout import Layout
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


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to CPUs on Linux")
@pytest.mark.parametrize("name", ["file", "direct", "aiofiles", "memory", "compressed", "plain"])
def test_threads_run_on_the_cpus_given(name: str, tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    tier = {
        "file": f"file:{tmp_path}?",
        "direct": f"file:{tmp_path}?engine=direct&",
        "aiofiles": f"file:{tmp_path}?engine=aiofiles&",
        "compressed": "memory:?compress=auto&",
    }.get(name, "memory:?")
    state, mine, others = np.arange(100_000.0), os.sched_getaffinity(0), _tasks()
    store = open_store(f"{tier}cpus={cpu}&threads=1")
    store.open(Layout.of(state))
    assert store.put(0, [state], block=True) and np.array_equal(store.get(0)[0], state)
    made = {os.sched_getaffinity(task) == {cpu} for task in _tasks() - others}
    store.close()
    assert made == {True} and os.sched_getaffinity(0) == mine


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to CPUs on Linux")
def test_cpus_that_are_not_there_are_named(tmp_path: Path) -> None:
    cpu, mine = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    store = FileStore(tmp_path, cpus=f"{cpu},8000-8002,8004")
    with pytest.raises(StoreError, match=r"there is no CPU 8000-8002,8004 for this process; it"):
        store.open(Layout.of(np.zeros(3)))
    assert os.sched_getaffinity(0) == mine
    store.cpus = frozenset({cpu})
    store.open(Layout.of(np.zeros(3)))  # nothing is left open
    store.close()
