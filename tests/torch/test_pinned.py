"""Pinned memory: the stores' contract, a tier below, and every order that events allow."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_streams import HostStreams, pinned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multistage.backends import FileStore, MemoryStore
from multistage.backends.base import CheckpointLost
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import FaultyStore, check_store
from multistage.backends.urls import open_store
from multistage.errors import ArgumentError, BudgetError, CheckpointWarning
from multistage.states.layout import Layout
from multistage.torch.tiers.pinned import PinnedCascade, PinnedStore, growth, open_tiers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) <= before


class AsArrays:
    """A `PinnedStore` for NumPy states, as the contract's tests have them."""

    def __init__(self, store: PinnedStore | PinnedCascade) -> None:
        self._store = store
        self._kinds: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        lines = [a.reshape(-1).view(np.uint8) for a in arrays]
        self._kinds[key] = [(a.dtype, a.shape) for a in arrays]
        return self._store.put(key, lines, block=block)

    def get(self, key: int) -> list[Any]:
        found = []
        lines = self._store.get(key)
        for (dtype, shape), line in zip(self._kinds[key], lines, strict=True):
            array = line.numpy().view(dtype).reshape(shape)
            array.flags.writeable = False
            found.append(array)
        return found


STORES: dict[str, Callable[[Path], PinnedStore | PinnedCascade]] = {
    "alone": lambda folder: pinned(None),
    "bounded": lambda folder: pinned(32 << 20),
    "above memory": lambda folder: PinnedCascade(pinned(21 << 20), MemoryStore()),
    "above a file": lambda folder: PinnedCascade(pinned(21 << 20), FileStore(folder)),
}


@pytest.mark.long(but="bounded")
@pytest.mark.parametrize("name", STORES)
def test_contract(name: str, tmp_path: Path) -> None:
    check_store(lambda: AsArrays(STORES[name](tmp_path)))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_put_again_takes_the_place_of_the_first() -> None:
    store: Any = pinned(None)
    store.open(Layout.of((_line(0, 64),)))
    try:
        assert all(store.put(3, [_line(key, 64)]) for key in (1, 2))
        assert store.stats.stored_bytes == 64
        assert store.get(3)[0].numpy().tobytes() == _line(2, 64).tobytes()
    finally:
        store.close()


def _line(key: int, size: int) -> Any:
    return np.random.default_rng(key).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [1 << 12, 300_000])
@pytest.mark.parametrize("slots", [4, 9])
@pytest.mark.parametrize("where", ["memory:2MiB > memory:", "file:{}"])
def test_overflowing_states_move_to_the_tier_below_and_back(
    where: str, slots: int, size: int, tmp_path: Path
) -> None:
    layout = Layout.of((_line(0, size),))
    below = open_store(where.format(tmp_path))
    store: Any = PinnedCascade(pinned(slots * layout.nbytes), below)
    draw = random.Random(slots)
    for _ in range(2):
        store.open(layout)
        try:
            count = 60
            for key in range(count):
                assert store.put(key, [_line(key, size)], block=True)
            assert below.stats.writes >= count - slots  # all but the latest
            for key in reversed(range(count)):
                for ahead in range(key, max(-1, key - draw.randint(1, 3)), -1):
                    store.prefetch(ahead)
                again = draw.random() < 0.2
                for _ in range(1 + again):
                    (found,) = store.get(key)
                    assert found.numpy().tobytes() == _line(key, size).tobytes()
                if draw.random() < 0.9:
                    store.drop(key)
            assert store.stats.peak_stored_bytes == count * size
        finally:
            store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
def test_faults_below_lose_states_and_nothing_else() -> None:
    size = 1 << 12
    layout = Layout.of((_line(0, size),))
    faulty = FaultyStore(
        MemoryStore(), lose_read=lambda n: n % 3 == 1, lose_write=lambda n: n % 5 == 2
    )
    store = PinnedCascade(pinned(6 * size), faulty)
    store.open(layout)
    try:
        kept = [key for key in range(40) if store.put(key, [_line(key, size)])]
        lost = 0
        for key in reversed(kept):
            store.prefetch(key)
            try:
                (found,) = store.get(key)
            except CheckpointLost:
                lost += 1
            else:
                assert found.numpy().tobytes() == _line(key, size).tobytes()
            store.drop(key)
        assert 0 < lost < len(kept)
    finally:
        store.close()


def test_capacity_is_kept() -> None:
    size = 1 << 12
    layout = Layout.of((_line(0, size),))
    store = pinned(5 * size)
    assert store.capacity_states(layout) == 5
    assert PinnedCascade(pinned(5 * size), MemoryStore(1 << 20)).capacity_states(layout) > 5  # type: ignore[operator]
    store.open(layout)
    try:
        assert [store.put(key, [_line(key, size)]) for key in range(7)] == [True] * 5 + [False] * 2
        store.drop(2)
        assert store.put(9, [_line(9, size)])
        with pytest.raises(CheckpointLost, match="no checkpoint 2"):
            store.get(2)
    finally:
        store.close()
    with pytest.raises(BudgetError, match="for 4 states"):
        PinnedCascade(pinned(3 * size), MemoryStore()).open(layout)
    with pytest.raises(ArgumentError, match="negative"):
        pinned(-1)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 1 << 24).map(lambda n: 64 * n), capacity=st.integers(0, 1 << 36))
def test_memory_allocated_in_powers_of_two_is_counted(size: int, capacity: int) -> None:
    def taken(count: int) -> int:
        return 1 << (count * size - 1).bit_length()

    counts = list(growth(size, capacity, rounded=True))
    assert sum(taken(count) for count in counts) <= capacity
    if capacity >= 2 * size:
        assert counts
    # Nor is much lost, where nothing keeps it from whole blocks.
    for count in itertools.islice(growth(size, None, rounded=True), 5):
        assert 8 * count * size >= 7 * taken(count)
    assert sum(growth(size, capacity, rounded=False)) == capacity // size


class Refusing(MemoryStore):
    """Fails to take a state."""

    def put(self, key: int, arrays: Any, *, block: bool = False) -> bool:
        raise OSError("no")


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
def test_states_that_cannot_go_below_stay() -> None:
    store = PinnedCascade(pinned(4 << 12), Refusing())
    store.open(Layout.of((_line(0, 1 << 12),)))
    try:
        for _ in range(3):
            kept = [store.put(key, [_line(key, 1 << 12)], block=True) for key in range(5)]
            assert kept == [True] * 4 + [False]
            for key in (0, 3, 1, 2):
                assert np.array_equal(store.get(key)[0].numpy(), _line(key, 1 << 12))
                store.drop(key)
    finally:
        store.close()


def test_a_state_is_read_from_below_while_no_slot_is_free() -> None:
    size = 1 << 12
    store = PinnedCascade(pinned(5 * size), MemoryStore(2 * size, buffer_bytes=0))
    store.open(Layout.of((_line(0, size),)))
    try:
        with pytest.warns(CheckpointWarning, match="capacity"):
            kept = [store.put(key, [_line(key, size)], block=True) for key in range(9)]
        assert kept == [True] * 7 + [False] * 2
        for key in (0, 6, 5, 1, 4, 3, 2):
            assert np.array_equal(store.get(key)[0].numpy(), _line(key, size))
        for key in (0, 6, 5, 1, 4, 3, 2):
            store.drop(key)
    finally:
        store.close()


def test_states_that_were_read_ahead_for_nothing_go_below() -> None:
    size = 1 << 12
    store = PinnedCascade(pinned(4 * size), MemoryStore())
    store.open(Layout.of((_line(0, size),)))
    for key in range(20):
        assert store.put(key, [_line(key, size)], block=True)
        store.prefetch(key)
    for key in range(20):
        assert np.array_equal(store.get(key)[0].numpy(), _line(key, size))
    store.close()


def test_a_key_is_put_again_while_its_write_below_goes_on() -> None:
    size, gate = 1 << 12, threading.Event()

    class Slow(Ram):
        def write(self, slot: int, offset: int, data: Any) -> None:
            assert gate.wait(60)
            super().write(slot, offset, data)

    below = StreamedStore("slow", Slow, buffer_bytes=0, queue_depth=4)
    store = PinnedCascade(pinned(4 * size), below)
    store.open(Layout.of((_line(0, size),)))
    try:
        assert all(store.put(key, [_line(key, size)], block=True) for key in range(3))
        assert store.wait_written(0) and not store.waits()  # it is copied, and moves on
        store.drop(0)
        assert store.put(0, [_line(7, size)])
        gate.set()
        assert all(store.put(key, [_line(key, size)], block=True) for key in (3, 4))
        for key, content in ((4, 4), (0, 7), (3, 3), (2, 2), (1, 1)):
            assert np.array_equal(store.get(key)[0].numpy(), _line(content, size))
    finally:
        store.close()


class Scarce(HostStreams):
    """Has memory for one block."""

    def __init__(self) -> None:
        super().__init__()
        self._given = 0

    def host(self, nbytes: int) -> Tensor:
        self._given += 1
        if self._given > 1:
            raise RuntimeError("CUDA error: out of memory")
        return super().host(nbytes)


def test_no_more_memory_is_a_full_tier() -> None:
    store = pinned(None, Scarce)
    store.open(Layout.of((_line(0, 1 << 12),)))
    try:
        kept = [store.put(key, [_line(key, 1 << 12)]) for key in range(200)]
        count = sum(kept)
        assert 0 < count < 200 and kept == [True] * count + [False] * (200 - count)
        for key in reversed(range(count)):
            (found,) = store.get(key)
            assert np.array_equal(found.numpy(), _line(key, 1 << 12))
            store.drop(key)
        assert store.put(3, [_line(3, 1 << 12)])
    finally:
        store.close()


def test_memory_is_released_once_it_is_copied() -> None:
    store = pinned(None)
    store.open(Layout.of((_line(0, 1 << 12),)))
    try:
        sources = [torch.from_numpy(_line(key, 1 << 12)) for key in range(3)]
        watched = [weakref.ref(source) for source in sources]
        for key, source in enumerate(sources):
            store.put(key, [source])
        del source
        sources.clear()
        assert all(reference() is not None for reference in watched)
        store.wait_written(0)
        store.drop(1)
        store.get(2)
        assert [reference() is None for reference in watched] == [True, True, False]
        store.wait_written(2)
        assert watched[2]() is None
    finally:
        store.close()


# ------------------------------------------------- every order that events allow


class FakeEvent:
    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.done = False


class FakeStreams:
    """Streams that run nothing until they must, then in a random order that events allow.

    Parameters
    ----------
    seed : int
    ignore : (lane, lane), optional
        Waits of the first lane for the second are left out: a mistake.
    """

    def __init__(self, seed: int, ignore: tuple[str, str] | None = None) -> None:
        self._draw = random.Random(seed)
        self._ignore = ignore
        self._lanes: dict[str, list[Any]] = {"compute": [], "other": [], "out": [], "in": []}
        self.current = "compute"  # of two compute streams
        self._blocks: list[Tensor] = []

    # What a caching allocator does: memory of the compute stream is handed on at once.
    def empty(self, nbytes: int) -> Tensor:
        for k, block in enumerate(self._blocks):
            if block.numel() == nbytes:
                return self._blocks.pop(k)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def free(self, block: Tensor) -> None:
        self._blocks.append(block)
        self.compute(lambda: block.fill_(0xEE))  # by whoever gets it next

    def host(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    def compute(self, work: Callable[[], object]) -> None:
        self._lanes[self.current].append(work)

    def _lane(self, name: str) -> list[Any]:
        return self._lanes[self.current if name == "compute" else name]

    def record(self, lane: str) -> FakeEvent:
        event = FakeEvent(lane)
        self._lane(lane).append(event)
        return event

    def wait(self, lane: str, event: FakeEvent) -> None:
        if (lane, event.lane) != self._ignore:
            self._lane(lane).append((event,))

    def copy(self, lane: str, target: Tensor, source: Tensor) -> None:
        self._lane(lane).append(lambda: target.copy_(source))

    def used_by(self, lane: str, tensors: Sequence[Tensor]) -> None:
        if lane != "compute":  # whatever is handed on is so by this stream
            self.wait("compute", self.record(lane))

    def synchronize(self, event: FakeEvent) -> None:
        while not event.done:
            self.step()

    def span(self, began: FakeEvent, ended: FakeEvent) -> tuple[float, float] | None:
        return (0.0, 0.0) if ended.done else None

    def step(self) -> bool:
        """Run one thing that may run; return whether there was any."""
        ready = [
            lane
            for lane in self._lanes.values()
            if lane and not (isinstance(lane[0], tuple) and not lane[0][0].done)
        ]
        if not ready:
            assert not any(self._lanes.values()), "the streams wait for each other"
            return False
        # One lane much slower than the others finds more than an even choice.
        weights = [self._draw.random() ** 3 for _ in ready]
        task = self._draw.choices(ready, weights)[0].pop(0)
        if isinstance(task, FakeEvent):
            task.done = True
        elif not isinstance(task, tuple):
            task()
        return True

    def close(self) -> None:
        while self.step():
            pass


def _sweep(seed: int, ignore: tuple[str, str] | None = None) -> int:
    """Run forward and backward over a store; return how many states came back wrong."""
    draw = random.Random(seed)
    streams = FakeStreams(seed, ignore)
    size, count, wrong = 64, 14, []
    store = pinned(6 * size, lambda: streams)
    layout = Layout.of((np.zeros(size, np.uint8),))
    store.open(layout)
    stored: list[int] = []
    sources: dict[int, Tensor] = {}

    def settle(key: int) -> None:
        assert store.wait_written(key)
        streams.free(sources.pop(key))

    def check(key: int, found: Tensor) -> None:
        if not bool((found == key).all()):
            wrong.append(key)

    for key in range(count):
        block = streams.empty(size)
        streams.compute(lambda block=block, key=key: block.fill_(key))
        if len(stored) > 4 and draw.random() < 0.5:  # a plan that thins its checkpoints
            dropped = stored.pop(0)
            if dropped in sources:
                settle(dropped)
            store.drop(dropped)
        if store.put(key, [block]):
            stored.append(key)
            sources[key] = block
        else:
            streams.free(block)
        while len(sources) > 2:
            settle(next(iter(sources)))
    for key in list(sources):
        settle(key)
    later = count
    while stored:
        for ahead in reversed(stored[-draw.randint(1, 3) :]):
            store.prefetch(ahead)
        key = stored.pop()
        if draw.random() < 0.2:
            store.drop(key)  # fetched for nothing
        else:
            (found,) = store.get(key)
            streams.compute(lambda key=key, found=found: check(key, found))
            streams.free(found)
            store.drop(key)
        if draw.random() < 0.6:  # slots that were just read are filled again
            later += 1
            if draw.random() < 0.5:  # from a stream that never waited for those reads
                streams.current = "other"
                aside = torch.full((size,), later, dtype=torch.uint8)
                if store.put(later, [aside]):
                    streams.current = "compute"
                    assert store.wait_written(later)
                    store.drop(later)
                streams.current = "compute"
                continue
            block = streams.empty(size)
            streams.compute(lambda block=block, key=later: block.fill_(key))
            if store.put(later, [block]):
                if draw.random() < 0.5:
                    store.prefetch(later)  # while it is still on its way out
                    (found,) = store.get(later)
                    streams.compute(lambda key=later, found=found: check(key, found))
                    streams.free(found)
                sources[later] = block
                settle(later)
                store.drop(later)
            else:
                streams.free(block)
    store.close()
    return len(wrong)


def test_every_order_that_the_events_allow() -> None:
    assert sum(_sweep(seed) for seed in range(300)) == 0


@pytest.mark.parametrize(
    "ignore",
    [("out", "compute"), ("out", "in"), ("in", "compute"), ("in", "out"), ("compute", "in")],
    ids=" for ".join,
)
def test_a_missing_wait_is_found(ignore: tuple[str, str]) -> None:
    assert any(_sweep(seed, ignore) for seed in range(300))


def test_a_tier_below_that_cannot_be_closed_does_not_keep_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def close(medium: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("the server is gone")

    layout = Layout.of(np.zeros(64, np.uint8))
    store = PinnedCascade(pinned(None), MemoryStore())
    store.open(layout)
    monkeypatch.setattr("multistage.backends.medium.Ram.close", close)
    with pytest.raises(RuntimeError, match="server"):
        store.close()
    store.open(layout)
    assert store.put(1, [torch.zeros(64, dtype=torch.uint8)], block=True)
    store.close()


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["pinned:"], "memory"),
        (["pinned:1MiB", "memory:"], "memory>memory"),
        (["pinned:1MiB > memory:2MiB > memory:"], "memory>memory>memory"),
        (["pinned:", "memory:"], "memory"),
    ],
)
def test_states_on_the_host_lie_in_plain_memory(names: list[str], name: str) -> None:
    store = open_tiers(names, CPU)
    assert store is not None and store.name == name
    store.open(Layout.up_to(100_000))
    for key, length in enumerate((99_000, 3, 40_000)):
        assert store.put(key, [np.full(length, key, np.uint8)], block=True)
    assert [int(store.get(key)[0].sum()) for key in (2, 1)] == [80_000, 3]
    store.close()


def test_a_tier_that_loses_information_has_none_above_it_on_the_host() -> None:
    below = open_store("memory:?compress=zfp&tolerance=1e-3")
    assert open_tiers(["pinned:1MiB", below], CPU) is below
