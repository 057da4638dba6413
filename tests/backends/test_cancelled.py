"""Writes that are given up: lost whole, or made; nobody else's bytes change."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multistage.backends import CascadeStore, CheckpointLost, FileStore, MemoryStore
from multistage.backends.arena import LandingPool
from multistage.backends.direct import DirectFile
from multistage.backends.files import available_engines
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.states.layout import Array, Layout

STATE = np.arange(1000.0)
LAYOUT = Layout.of(STATE)


class Held:
    """A store whose writes wait for `let_go`; `begun` is set by the first."""

    def __init__(self, engine: str, folder: Path, chunk_bytes: int = 4 << 20) -> None:
        self.begun, self._gate = threading.Event(), threading.Event()
        self.let_go = self._gate.set
        self.writes = 0
        self.store = StreamedStore(
            "held",
            (lambda: DirectFile(folder)) if engine == "native" else self._medium,
            buffer_bytes=0,
            queue_depth=8,
            bounces=2,
            chunk_bytes=chunk_bytes,
        )
        if engine == "native":
            self.store._hooks = (self._pwrite, None)

    def _wait(self) -> None:
        self.writes += 1
        self.begun.set()
        self._gate.wait()

    def _medium(self) -> Ram:
        medium = Ram()
        write = medium.write

        def held(slot: int, offset: int, data: Array) -> None:
            self._wait()
            write(slot, offset, data)

        medium.write = held  # type: ignore[method-assign]
        return medium

    def _pwrite(self, fd: int, address: int, nbytes: int, position: int) -> int:
        self._wait()
        return os.pwrite(fd, (ctypes.c_char * nbytes).from_address(address), position)


@pytest.fixture(params=["threads", "native", "plain"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Held]]:
    if request.param == "native" and "native" not in available_engines():
        pytest.skip("the C core was not built")
    made: list[Held] = []

    def held(**options: Any) -> Held:
        made.append(Held(request.param, tmp_path, **options))
        return made[-1]

    yield held
    for each in made:
        each.let_go()
        each.store.close()


def test_reads_that_are_dropped_before_they_begin_free_what_they_would_land_in(
    make: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, landings = make(), []

    def take(pool: LandingPool, nbytes: int) -> Array:
        landings.append(weakref.ref(memory := taken(pool, nbytes)))
        return memory

    taken = LandingPool.take
    monkeypatch.setattr(LandingPool, "take", take)
    store = held.store
    store.open(LAYOUT)
    for key in range(4):
        assert store.put(key, [STATE + key])
        store.prefetch(key)  # behind its write, which waits
    held.begun.wait()
    for key in range(1, 4):
        store.drop(key)
    assert [landing() is not None for landing in landings] == [True, False, False, False]
    held.let_go()
    assert np.array_equal(store.get(0)[0], STATE)


def test_queued_writes_that_are_cancelled_are_not_made(make: Callable[..., Held]) -> None:
    held = make()
    store = held.store
    store.open(LAYOUT)
    arrays = [STATE + key for key in range(7)]
    for key in range(7):
        assert store.put(key, [arrays[key]])
    assert held.begun.wait(60)
    for key in (6, 5, 4, 2):  # 1 may be in a buffer by now
        store.cancel(key)
    store.drop(5)
    assert not store.ended(6, 0.0)
    assert not store.ended(0, 0.0)
    held.let_go()
    assert [store.wait_written(key) for key in range(7)] == [True, True, False, True, *[False] * 3]
    assert (store.stats.lost, store.stats.bytes_written) == (0, 3 * LAYOUT.nbytes)
    assert sorted(record.key for record in store.transfers) == [0, 1, 3]
    with pytest.raises(CheckpointLost):
        store.get(2)
    assert store.put(2, [STATE + 20], block=True)
    store.cancel(3)  # it is written
    for key, shift in ((3, 3), (2, 20), (1, 1), (0, 0)):
        assert store.ended(key, 60.0)
        assert store.get(key)[0].tolist() == (STATE + shift).tolist()
        store.drop(key)
    assert store.stats.stored_bytes == 0


def test_a_cascade_does_not_count_a_cancelled_write_as_lost(make: Callable[..., Held]) -> None:
    held = make()
    held.store.capacity_bytes = 8 << 20
    store = CascadeStore(held.store, MemoryStore())
    store.open(LAYOUT)
    try:
        assert all(store.put(key, [STATE + key]) for key in range(4))
        assert held.begun.wait(60)
        store.cancel(3)
        held.let_go()
        assert [store.wait_written(key) for key in range(4)] == [True, True, True, False]
        assert store.stats.lost == 0
    finally:
        held.let_go()
        store.close()


def test_a_write_in_flight_ends_at_its_next_chunk(make: Callable[..., Held]) -> None:
    held = make(chunk_bytes=8192)
    state = np.arange(40_000.0)
    store = held.store
    store.open(Layout.of(state))
    assert store.put(1, [state])
    assert held.begun.wait(60)
    store.cancel(1)
    held.let_go()
    assert store.ended(1, 60.0)
    assert not store.wait_written(1)
    assert held.writes <= 3  # of 40 or 80
    assert store.stats.bytes_written == 0
    assert store.put(1, [state + 1])
    assert store.get(1)[0].tolist() == (state + 1).tolist()


def test_a_read_behind_a_cancelled_write_finds_nothing(make: Callable[..., Held]) -> None:
    held = make()
    store = held.store
    store.open(LAYOUT)
    for key in range(5):
        assert store.put(key, [STATE + key])
    for key in range(5):
        store.prefetch(key)
    assert held.begun.wait(60)
    store.cancel(3)
    held.let_go()
    with pytest.raises(CheckpointLost, match="cancelled"):
        store.get(3)
    assert store.stats.lost == 0
    for key in (4, 2, 1, 0):
        assert store.get(key)[0].tolist() == (STATE + key).tolist()


def test_a_store_closes_with_cancelled_writes(make: Callable[..., Held]) -> None:
    held = make()
    store = held.store
    store.open(LAYOUT)
    for key in range(5):
        assert store.put(key, [STATE])
        store.cancel(key)
    held.let_go()
    store.close()
    store.open(LAYOUT)
    assert store.put(0, [STATE])
    assert store.get(0)[0].tolist() == STATE.tolist()


RANDOM: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: MemoryStore(20 * 8192, buffer_bytes=0, queue_depth=6),
    "native": lambda folder: FileStore(folder, "native", buffer_bytes=0, queue_depth=6),
    "small": lambda folder: MemoryStore(buffer_bytes=6 * 5 * LAYOUT.nbytes),
    "plain": lambda folder: MemoryStore(20 * 8192, queue_depth=6),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations_against_a_dict(name: str, tmp_path: Path) -> None:
    if name == "native" and "native" not in available_engines():
        pytest.skip("the C core was not built")
    for seed in range(8):
        draw = random.Random(seed)
        store = RANDOM[name](tmp_path)
        store.open(LAYOUT)
        wanted: dict[int, float] = {}
        cancelled: set[int] = set()
        for turn in range(120):
            key = draw.randrange(10)
            match draw.choice(["put", "put", "cancel", "ended", "wait", "prefetch", "get", "drop"]):
                case "put" if key not in wanted:
                    if store.put(key, [STATE + turn], block=draw.random() < 0.7):
                        wanted[key] = turn
                case "cancel":
                    store.cancel(key)
                    cancelled |= {key} & wanted.keys()
                case "ended":
                    store.ended(key, 0.0)
                    store.waits()
                case "prefetch":
                    store.prefetch(key)
                case "wait":
                    if store.wait_written(key):
                        assert key in wanted
                    else:
                        assert key not in wanted or key in cancelled
                        wanted.pop(key, None)
                        cancelled.discard(key)
                case "get":
                    try:
                        assert store.get(key)[0].tolist() == (STATE + wanted.get(key, -1)).tolist()
                    except CheckpointLost:
                        assert key not in wanted or key in cancelled
                        wanted.pop(key, None)
                        cancelled.discard(key)
                case "drop":
                    store.drop(key)
                    wanted.pop(key, None)
                    cancelled.discard(key)
        assert store.stats.lost == 0
        store.close()


def test_a_state_of_any_size_is_given_up_whole(make: Callable[..., Held]) -> None:
    held = make()
    store = held.store
    store.open(Layout.up_to(8000))
    things = [[STATE[: 900 + key], STATE[:3] + key] for key in range(4)]
    for key in range(4):
        assert store.put(key, things[key])
    assert held.begun.wait(60)
    store.cancel(2)
    assert not store.ended(2, 0.0)
    held.let_go()
    assert store.ended(2, 60.0)
    assert [store.wait_written(key) for key in range(4)] == [True, True, False, True]
    with pytest.raises(CheckpointLost):
        store.get(2)
    for key in (3, 1, 0):
        found = store.get(key)
        assert [a.tolist() for a in found] == [a.tolist() for a in things[key]]
        store.drop(key)
    assert store.stats.stored_bytes == 0
    store.close()
