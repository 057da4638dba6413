"""What only a medium that waits can show: queues, order, and hand-over."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest

from multistage.backends import CheckpointLost, FileStore, MemoryStore
from multistage.backends.arena import round_up
from multistage.backends.direct import DirectFile
from multistage.backends.files import available_engines
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, CheckpointWarning
from multistage.states.layout import Array, Layout

STATE = np.arange(1000.0)
LAYOUT = Layout.of(STATE)
NEEDS_NATIVE = pytest.mark.skipif("native" not in available_engines(), reason="needs the C core")


class Gate(Ram):
    """Host memory whose writes wait at a gate."""

    threads = 2

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.open = threading.Event()

    def write(self, slot: int, offset: int, data: Array) -> None:
        self.open.wait()
        super().write(slot, offset, data)


class NativeGate(DirectFile):
    """The same of the native engine."""

    threads = 2

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.open = threading.Event()

    def pwrite(self, fd: int, address: int, nbytes: int, position: int) -> int:
        self.open.wait()
        return os.pwrite(fd, (ctypes.c_char * nbytes).from_address(address), position)


class SingleGate(Gate):
    """With one thread each way."""

    threads = 1


class SingleNativeGate(NativeGate):
    """With one thread each way."""

    threads = 1


class Gates:
    """Makes stores whose writes wait; lets them go when a test is over."""

    def __init__(self, kind: type[Gate] | type[NativeGate], folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.made: list[Gate | NativeGate] = []

    def store(self, buffer_bytes: int, queue_depth: int = 2) -> StreamedStore:
        def made() -> Any:
            self.made.append(self._kind(self._folder))
            return self.made[-1]

        store = StreamedStore(
            "gated",
            made,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            bounces=2,
            threads=self._kind.threads,
        )
        if issubclass(self._kind, NativeGate):
            store._hooks = (lambda *of: self.made[-1].pwrite(*of), None)  # type: ignore[union-attr]
        store.open(LAYOUT)
        return store

    def open(self) -> None:
        for gate in self.made:
            gate.open.set()


class PlainGate(Gate):
    """Without the C core."""


@pytest.fixture(params=[Gate, NativeGate, SingleGate, SingleNativeGate, PlainGate])
def gates(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gates]:
    if issubclass(request.param, NativeGate) and "native" not in available_engines():
        pytest.skip("the C core was not built")
    gates = Gates(request.param, tmp_path)
    yield gates
    gates.open()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_large_states_fill_the_queue(gates: Gates, depth: int) -> None:
    store = gates.store(0, depth)
    assert [store.put(key, [STATE]) for key in range(depth + 2)] == [True] * depth + [False] * 2
    assert store.stats.refused == 2
    with pytest.raises(CheckpointLost):
        store.get(depth)
    gates.open()
    assert store.put(depth, [STATE + 1], block=True)
    for key in range(depth + 1):
        assert store.wait_written(key)
        assert store.get(key)[0].tolist() == (STATE + (key == depth)).tolist()
    assert store.put(99, [STATE])
    store.close()


def test_small_states_fill_the_buffers(gates: Gates) -> None:
    store = gates.store(6 * 5 * LAYOUT.nbytes)
    accepted = 0
    while store.put(accepted, [STATE + accepted]):
        accepted += 1
        assert accepted < 100
    assert accepted == 3 * 5  # three buffers of five states
    for key in range(accepted):  # read from the buffers while no write can end
        assert store.get(key)[0].tolist() == (STATE + key).tolist()
    gates.open()
    assert store.put(accepted, [STATE + accepted], block=True)
    for key in reversed(range(accepted + 1)):
        assert store.get(key)[0].tolist() == (STATE + key).tolist()
    store.close()


def test_a_state_dropped_while_it_is_written(gates: Gates) -> None:
    store = gates.store(0)
    assert store.put(1, [STATE])
    store.prefetch(1)
    store.drop(1)
    assert not store.wait_written(1)
    gates.open()
    assert store.put(1, [STATE + 1], block=True)
    assert store.put(2, [STATE + 2], block=True)
    assert store.get(1)[0].tolist() == (STATE + 1).tolist()
    assert store.get(2)[0].tolist() == (STATE + 2).tolist()
    store.close()


def test_a_read_waits_for_its_write(gates: Gates) -> None:
    store = gates.store(0)
    assert store.put(1, [STATE])
    assert store.put(2, [STATE + 2])
    store.prefetch(2)
    store.prefetch(1)
    gates.open()
    assert store.get(2)[0].tolist() == (STATE + 2).tolist()
    assert store.get(1)[0].tolist() == STATE.tolist()
    store.close()
    kinds = [(record.kind, record.key) for record in store.transfers]
    assert sorted(kinds) == [("read", 1), ("read", 2), ("write", 1), ("write", 2)]
    for kind in ("read", "write"):
        records = [record for record in store.transfers if record.kind == kind]
        assert all(a.stop_s <= b.start_s for a, b in pairwise(records))


def test_a_wait_can_be_interrupted(gates: Gates) -> None:
    class Interrupted(Exception):
        pass

    times = iter([True])

    def interrupt(number: int, frame: FrameType | None) -> None:
        if next(times, False):
            raise Interrupted

    store = gates.store(0)
    assert store.put(1, [STATE])
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):  # however late the wait begins
            # Again and again: a signal just before a wait begins is noticed when the wait ends.
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            store.wait_written(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    gates.open()
    assert store.wait_written(1)
    assert store.get(1)[0].tolist() == STATE.tolist()
    store.close()


def test_arguments() -> None:
    for options, message in (
        ({"capacity_bytes": -1}, "capacity_bytes=-1"),
        ({"buffer_bytes": -1}, "buffer_bytes=-1"),
        ({"queue_depth": 0}, "queue_depth=0"),
        ({"threads": 3}, "threads=3 must be 1 or 2"),
        ({"cpus": "1-"}, "cpus='1-' must be numbers and ranges"),
        ({"cpus": "3-1"}, "cpus='3-1' must be numbers and ranges"),
        ({"cpus": ""}, "cpus='' must be numbers and ranges"),
        ({"cpus": []}, "must name a CPU"),
        ({"cpus": [-1]}, "cpus=-1 must not be negative"),
    ):
        with pytest.raises(ArgumentError, match=message):
            StreamedStore("x", Ram, **options)  # type: ignore[arg-type]


def test_the_threads_records(gates: Gates) -> None:
    store = gates.store(0)
    gates.open()
    for key in range(3):
        assert store.put(key, [STATE], block=True)
        assert store.wait_written(key)
    store.get(1)
    store.close()
    records = list(store.transfers)
    assert [(r.kind, r.key, r.nbytes) for r in records] == [
        ("write", 0, LAYOUT.nbytes),
        ("write", 1, LAYOUT.nbytes),
        ("write", 2, LAYOUT.nbytes),
        ("read", 1, LAYOUT.nbytes),
    ]
    assert all(r.start_s <= r.stop_s for r in records)
    stats = store.stats
    assert (stats.writes, stats.reads) == (3, 1)
    assert (stats.bytes_written, stats.bytes_read) == (3 * LAYOUT.nbytes, LAYOUT.nbytes)


@pytest.mark.parametrize("store", [MemoryStore, FileStore], ids=["threads", "native"])
def test_writes_completed_by_close_are_counted(store: Any, tmp_path: Path) -> None:
    made = store(buffer_bytes=0) if store is MemoryStore else store(tmp_path, buffer_bytes=0)
    made.open(LAYOUT)
    assert all(made.put(key, [STATE], block=True) for key in range(2))
    made.close()
    assert made.stats.bytes_written == 2 * LAYOUT.nbytes
    assert len(made.transfers) == 2


@NEEDS_NATIVE
def test_counts_are_those_of_the_moment_they_are_asked_for() -> None:
    store = FaultyStore(MemoryStore(buffer_bytes=0), lose_write={1})
    store.open(LAYOUT)
    assert store.stats.stored_bytes == 0
    for key in range(2):
        assert store.put(key, [STATE], block=True)
        assert store.stats.stored_bytes == (key + 1) * round_up(LAYOUT.nbytes)
    assert store.wait_written(0) and not store.wait_written(1)
    store.drop(0)
    assert (store.stats.stored_bytes, store.stats.lost) == (0, 1)  # the one it lost itself
    store.close()


@NEEDS_NATIVE
def test_a_state_of_another_number_of_arrays_is_refused() -> None:
    store = MemoryStore(buffer_bytes=0)
    store.open(LAYOUT)
    for arrays in ([], [STATE, STATE]):
        with pytest.raises(ArgumentError, match=f"^{len(arrays)} arrays, not the 1 of the layout"):
            store.put(0, arrays)
    assert store.put(0, [STATE]) and np.array_equal(store.get(0)[0], STATE)
    store.close()


def test_transfers_that_nobody_asks_for_are_kept() -> None:
    store = MemoryStore(buffer_bytes=0)
    store.open(LAYOUT)
    for key in range(5_000):  # more than the core keeps
        assert store.put(key, [STATE], block=True)
        store.drop(key)
    store.close()
    assert [record.key for record in store.transfers] == list(range(5_000))


@NEEDS_NATIVE
def test_an_offer_takes_few_calls(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "native", buffer_bytes=0)
    store.open(LAYOUT)
    assert store.put(0, [STATE])
    assert store.wait_written(0)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event))
    try:
        taken = store.put(1, [STATE])
    finally:
        sys.setprofile(None)
    # Each takes several times as long between two steps, whose data is in the caches.
    assert taken
    assert calls.count("call") <= 6
    store.close()


def test_states_are_read_again_and_again_without_being_dropped() -> None:
    store = StreamedStore("ram", Ram, buffer_bytes=6 * 4 * LAYOUT.nbytes)
    store.open(LAYOUT)
    for key in range(100):
        assert store.put(key, [STATE + key], block=True)
    for _ in range(2):
        for key in reversed(range(100)):
            assert store.get(key)[0].tolist() == (STATE + key).tolist()
    for key in range(0, 100, 4):  # more than there is memory to read into
        store.prefetch(key)
    for key in (99, 3, 50, 0, 98):
        assert store.get(key)[0].tolist() == (STATE + key).tolist()
    store.close()


@pytest.mark.parametrize("shape", [(), (2,), (0,)])
def test_small_states_take_the_buffers_they_say(shape: tuple[int, ...]) -> None:
    """By tracemalloc, besides pages: a view for each of 65 535 places took 14 MiB."""
    store, state = MemoryStore(), {"x": np.zeros(shape), "y": np.zeros(1, np.int8)}
    layout = Layout.of(state)
    count = 3 * store.per_extent(layout)
    arrays = layout.arrays(state)
    store.open(layout)
    store.put(0, arrays, block=True)
    tracemalloc.start()
    for key in range(1, count):
        store.put(key, arrays, block=True)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 30_000
    assert held < 3 << 20  # what the index takes of it is some 16 bytes a state
    assert [array.shape for array in store.get(7)] == [shape, (1,)]
    store.close()


@pytest.mark.parametrize("name", ["memory", "file"])
def test_records_with_extents_of_their_own_come_back_from_fewer_buffers(
    name: str, tmp_path: Path
) -> None:
    store = MemoryStore() if name == "memory" else FileStore(tmp_path)
    shared = store.buffer_bytes(Layout.of(np.zeros(1 << 16, np.uint8)))
    layout = Layout.up_to(1 << 16)
    assert store.buffer_bytes(layout) < shared / 8
    store.open(layout)
    pages = [np.full(1 << 16, k, np.uint8) for k in range(5)]
    for key, page in enumerate(pages):
        assert store.put(key, [page], block=True)
        assert store.wait_written(key)
    assert store.stats.bytes_written == 5 << 16  # none waits for others in a shared extent
    for key, page in enumerate(pages):
        assert np.array_equal(store.get(key)[0], page)
    store.close()


def test_a_slot_whose_write_failed_is_used_again_once_the_tier_is_full() -> None:
    class Failing(Ram):
        codes: ClassVar = {1: errno.EIO, 2: errno.ENOSPC}  # once for each slot

        def write(self, slot: int, offset: int, data: Array) -> None:
            if slot in self.codes:
                raise OSError(self.codes.pop(slot), "no")
            super().write(slot, offset, data)

    store = StreamedStore("failing", Failing, buffer_bytes=0, queue_depth=3)
    store.open(LAYOUT)
    assert all(store.put(key, [STATE + key]) for key in range(3))
    assert [store.wait_written(key) for key in (2, 1, 0)] == [False, False, True]
    assert store.put(3, [STATE + 3])
    with pytest.warns(CheckpointWarning, match="no space is left"):
        assert not store.put(4, [STATE + 4])
    for key in (0, 3):
        assert store.get(key)[0].tolist() == (STATE + key).tolist()
    store.close()
