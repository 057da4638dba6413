"""Two levels as one store: order, exact capacity, faults of either."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from multistage.backends import CascadeStore, FileStore, MemoryStore, open_store
from multistage.backends.base import CheckpointLost
from multistage.backends.cascade import State
from multistage.backends.medium import Medium, Ram
from multistage.backends.streamed import StreamedStore, has_streams
from multistage.backends.testing import FaultyStore, check_store
from multistage.errors import ArgumentError, CheckpointWarning, StoreError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Array, Layout

SIZE = 1024
FOUR = 6 * 4 * 8 * SIZE  # bytes of buffers, with which four states share an extent
LAYOUT = Layout.of(np.zeros(SIZE))
EXTENT = 8 * SIZE  # without buffers, each state has an extent of its own


def state(key: int) -> list[Array]:
    return [np.full(SIZE, float(key))]


class Told:
    """A level whose medium does what it is told, and writes down what it did."""

    def __init__(
        self,
        wrong: Callable[[str, int], Exception | None] = lambda name, number: None,
        gate: threading.Event | None = None,
    ) -> None:
        self.calls: list[tuple[str, float]] = []
        self.numbers = {"write": 0, "read": 0}
        self._wrong, self._gate = wrong, gate
        self._lock = threading.Lock()

    def store(self, capacity: int | None = None, buffer_bytes: int = 0) -> StreamedStore:
        return StreamedStore("told", self._open, capacity_bytes=capacity, buffer_bytes=buffer_bytes)

    def _open(self) -> Medium:
        self._ram = Ram()
        self.begin, self.free = self._ram.begin, self._ram.free
        return self

    def _next(self, name: str) -> None:
        if self._gate is not None:
            assert self._gate.wait(60)
        with self._lock:
            number = self.numbers[name]
            self.numbers[name] += 1
        error = self._wrong(name, number)
        if error is not None:
            raise error

    def write(self, slot: int, offset: int, data: Array) -> None:
        self._next("write")
        if offset == 0:
            self.calls.append(("write", float(data[:8].view(np.float64)[0])))
        self._ram.write(slot, offset, data)

    def read(self, slot: int, data: Array) -> None:
        self._next("read")
        self._ram.read(slot, data)
        self.calls.append(("read", float(data[:8].view(np.float64)[0])))

    def close(self) -> None:
        self._ram.close()


def fill(store: CascadeStore, count: int) -> None:
    for key in range(count):
        assert store.put(key, state(key), block=True)
    for key in range(count):
        assert store.wait_written(key)


def settle(store: CascadeStore) -> None:
    """Wait until there is nothing to be moved."""
    store.waits()  # moves go on with each call
    while store._moves:
        store._wait_for_move()
        store.waits()


def test_the_oldest_lie_farthest_away() -> None:
    lower = Told()
    store = CascadeStore(MemoryStore(4 * EXTENT, buffer_bytes=0), lower.store())
    store.open(LAYOUT)
    fill(store, 20)
    settle(store)
    gone_down = [value for name, value in lower.calls if name == "write"]
    assert gone_down == list(range(len(gone_down)))
    assert len(gone_down) >= 16
    for key in reversed(range(20)):
        assert store.get(key)[0].tobytes() == state(key)[0].tobytes()
        store.drop(key)
    come_up = [value for name, value in lower.calls if name == "read"]
    assert come_up == sorted(come_up, reverse=True)
    assert sorted(come_up) == gone_down  # each is read from below once, whoever does
    store.close()


@pytest.mark.skipif(not has_streams(), reason="small states share no extents without the C core")
def test_small_states_move_by_the_extent() -> None:
    """Each took 50 us of the computing thread; now one of an extent does, and takes the others."""
    below = Told()
    upper = MemoryStore(32 * EXTENT, buffer_bytes=FOUR)
    store = CascadeStore(upper, below.store(buffer_bytes=FOUR))
    store.open(LAYOUT)
    assert upper.per_extent(LAYOUT) == 4
    fill(store, 100)
    gone_down = [value for name, value in below.calls if name == "write"]
    assert gone_down == list(range(0, 4 * len(gone_down), 4))  # one write an extent
    for key in reversed(range(100)):
        assert store.get(key)[0].tobytes() == state(key)[0].tobytes()
        store.drop(key)
    assert store._sunk >= 68
    assert 2 * store._ended < store._sunk + store._risen
    assert store.stats.stored_bytes == store.stats.lost == 0
    store.close()


def test_states_come_up_before_they_are_asked_for() -> None:
    came = threading.Event()

    def look(name: str, number: int) -> None:
        if name == "read" and number == 2:
            came.set()

    lower = Told(look)
    store = CascadeStore(MemoryStore(8 * EXTENT, buffer_bytes=0), lower.store())
    store.open(LAYOUT)
    fill(store, 20)
    settle(store)
    for key in range(19, 14, -1):  # all from above
        store.get(key)
        store.drop(key)
    while not came.is_set():  # nobody asked for these
        store.waits()
    found = [value for name, value in lower.calls if name == "read"]
    assert found[:2] == sorted(found[:2], reverse=True)
    assert max(found) <= 13  # six stay above: all but the part kept free
    store.close()


def test_a_promoted_extent_is_the_first_to_be_demoted() -> None:
    lower = Told()
    store = CascadeStore(MemoryStore(8 * EXTENT, buffer_bytes=0), lower.store())
    store.open(LAYOUT)
    fill(store, 20)
    settle(store)
    for key in range(19, 15, -1):
        store.get(key)
        store.drop(key)
    settle(store)  # 14 and 15 are above, 13 to 9 have come, one slot stays free
    before = len([name for name, _ in lower.calls if name == "write"])
    for key in range(100, 110):
        assert store.put(key, state(key), block=True)
    for key in range(100, 110):
        assert store.wait_written(key)
    gone_down = [value for name, value in lower.calls if name == "write"][before:]
    assert gone_down[:7] == [9, 10, 11, 12, 13, 14, 15]
    store.close()


def test_moves_end_in_the_order_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was slow to read the first of two let the second go before it."""
    store = CascadeStore(MemoryStore(8 * EXTENT, buffer_bytes=0), MemoryStore(buffer_bytes=0))
    store.open(LAYOUT)
    ended, end_move = list[int](), store._end_move
    looks: dict[int, int] = {}

    def end(state: State) -> None:
        ended.append(state.key)
        end_move(state)

    def late(ask: Callable[[int, float], bool], key: int, timeout_s: float) -> bool:
        looks[key] = looks.get(key, 0) + 1
        return (timeout_s > 0 or key % 2 == 1 or looks[key] > 3) and ask(key, timeout_s)

    monkeypatch.setattr(store, "_end_move", end)
    for level in store.levels:
        monkeypatch.setattr(level, "arrived", partial(late, level.arrived))
        monkeypatch.setattr(level, "ended", partial(late, level.ended))
    fill(store, 20)
    settle(store)
    assert ended[:14] == list(range(14))
    for key in range(19, 15, -1):
        store.get(key)
        store.drop(key)
    settle(store)
    assert ended[14:18] == [13, 12, 11, 10]
    store.close()


def test_keys_of_any_number_are_kept_apart_from_those_of_states_that_move() -> None:
    """A cascade inside of another is given numbers as keys, and gave such numbers itself."""
    store = CascadeStore(MemoryStore(3 * EXTENT, buffer_bytes=0), MemoryStore(buffer_bytes=0))
    store.open(LAYOUT)
    known = {key: key for key in (-1, -2, *range(6))}
    for key in known:
        assert store.put(key, state(key), block=True)
    moving = [each.key for each in store._moves]
    while not moving:
        key = len(known)
        known[key] = key
        assert store.put(key, state(key), block=True)
        moving = [each.key for each in store._moves]
    for key in moving:
        known[key] = 500 + key
        assert store.put(key, state(500 + key), block=True)
    for key, value in known.items():
        assert store.get(key)[0].tobytes() == state(value)[0].tobytes(), key
    numbers = [each.number for each in store._states.values()]
    assert len({*numbers}) == len(numbers)
    store.close()


def test_capacity_is_the_sum_to_the_extent() -> None:
    lower = Told()
    # Each has half an extent to spare: together they have room for no other.
    store = CascadeStore(
        MemoryStore(4 * EXTENT + EXTENT // 2, buffer_bytes=0), lower.store(7 * EXTENT + EXTENT // 2)
    )
    assert store.capacity_states(LAYOUT) == 11
    store.open(LAYOUT)
    with pytest.warns(CheckpointWarning, match="takes no more checkpoints: its capacity"):
        taken = [key for key in range(20) if store.put(key, state(key), block=True)]
    assert taken == list(range(11))
    assert all(store.wait_written(key) for key in taken)
    assert store.stats.refused == 9
    for key in reversed(taken):
        assert store.get(key)[0].tobytes() == state(key)[0].tobytes()
        store.drop(key)
    fill(store, 11)  # all the room has come back
    store.close()


def test_a_slow_lower_level_makes_the_store_refuse() -> None:
    gate = threading.Event()
    lower = Told(gate=gate)
    store = CascadeStore(MemoryStore(4 * EXTENT, buffer_bytes=0), lower.store())
    store.open(LAYOUT)
    accepted = [key for key in range(50) if store.put(key, state(key))]
    # At most: above, in the queue, and one in the writer's hands.
    assert len(accepted) <= 4 + 2 + 1
    assert store.stats.refused == 50 - len(accepted)
    gate.set()
    for key in accepted:
        assert store.wait_written(key)
        assert store.get(key)[0][0] == key
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["write", "read"])
@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("size", [SIZE // 4, SIZE, 3 * SIZE])
def test_faults_lose_checkpoints_and_no_more(level: str, name: str, code: int, size: int) -> None:
    layout = Layout.of(np.zeros(size))
    for fault in range(24):
        told = {
            each: Told(
                lambda called, number, at=fault, there=each == level: (  # type: ignore[misc]
                    OSError(code, "told to") if there and (called, number) == (name, at) else None
                )
            )
            for each in ("upper", "lower")
        }
        store = CascadeStore(told["upper"].store(5 * 8 * size), told["lower"].store())
        store.open(layout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            accepted = [
                key for key in range(12) if store.put(key, [np.full(size, float(key))], block=True)
            ]
            lost = 12 - len(accepted)
            for key in reversed(accepted):
                try:
                    assert store.get(key)[0].tobytes() == np.full(size, float(key)).tobytes()
                except CheckpointLost:
                    lost += 1
                store.drop(key)
        if code == errno.EIO:
            assert lost <= 1
        assert store.stats.stored_bytes == 0 or code == errno.ENOSPC
        store.close()


def test_a_failing_lower_level_leaves_states_in_the_upper() -> None:
    lower = Told(lambda name, number: OSError(errno.EIO, "no network"))
    store = CascadeStore(MemoryStore(4 * EXTENT, buffer_bytes=0), lower.store())
    store.open(LAYOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        accepted = [key for key in range(20) if store.put(key, state(key), block=True)]
        kept = [key for key in accepted if store.wait_written(key)]
    assert kept == [0, 1, 2, 3]  # what there is room for above
    assert all(store.get(key)[0][0] == key for key in kept)
    assert lower.numbers["write"] == 3  # then it is left alone
    store.close()


class Busy(FaultyStore):
    """A level that refuses some states without waiting, and is not busy any more when asked."""

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        if not block and self.puts < 2:
            self.puts += 1
            return False
        return self._inner.put(key, arrays, block=block)


def test_a_lower_level_that_was_busy_is_not_full() -> None:
    store = CascadeStore(MemoryStore(4 * EXTENT, buffer_bytes=0), Busy(MemoryStore(buffer_bytes=0)))
    store.open(LAYOUT)
    fill(store, 20)
    for key in reversed(range(20)):
        assert store.get(key)[0].tobytes() == state(key)[0].tobytes()
    assert store.stats.refused == 0
    store.close()


def test_a_state_that_waits_for_the_lower_level_does_not_find_it_full() -> None:
    """Where nothing above can move, it goes below at once: a queue of two writes there."""
    gate = threading.Event()
    lower = Told(gate=gate).store()
    upper = FaultyStore(MemoryStore(40 * EXTENT, buffer_bytes=0), refuse=lambda put: put >= 3)
    store = CascadeStore(upper, lower)
    store.open(LAYOUT)
    for key in range(3):
        assert store.put(key, state(key), block=True) and store.wait_written(key)
        store.prefetch(key)
    taken = [store.put(key, state(key)) for key in range(3, 6)]
    assert (taken, store.waits(), store.stats.refused_full) == ([True, True, False], True, 0)
    gate.set()
    assert store.put(5, state(5), block=True)
    for key in reversed(range(6)):
        assert store.get(key)[0].tobytes() == state(key)[0].tobytes()
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM])
def test_an_upper_level_that_fills_before_its_capacity(code: int) -> None:
    """A disk that is full before its capacity is reached, however it says so: the rest sinks."""

    class Full(Ram):
        def write(self, slot: int, offset: int, data: Array) -> None:
            if len(self._extents) - len(self._gone) > 8:
                self.free(slot)
                raise OSError(code, "no room")
            super().write(slot, offset, data)

    above = StreamedStore("full", Full, capacity_bytes=100 * EXTENT, buffer_bytes=0)
    store = CascadeStore(above, MemoryStore(buffer_bytes=0))
    store.open(LAYOUT)
    assert all(store.put(key, state(key), block=True) for key in range(39))
    kept = [key for key in range(39) if store.wait_written(key)]
    assert len(kept) >= 39 - 2  # all but what was in its queue when it was full
    for key in reversed(kept):
        assert store.get(key)[0].tobytes() == state(key)[0].tobytes()
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM])
def test_a_full_tier_warns_once_for_every_error_code(code: int) -> None:
    class Full(Ram):
        def write(self, slot: int, offset: int, data: Array) -> None:
            if slot >= 2:
                raise OSError(code, "no room")
            super().write(slot, offset, data)

    store = StreamedStore("full", Full, buffer_bytes=0)
    store.open(LAYOUT)
    with pytest.warns(CheckpointWarning, match="no space is left") as told:
        taken = [key for key in range(20) if store.put(key, state(key), block=True)]
        kept = [key for key in taken if store.wait_written(key)]
    assert (kept, len(told)) == ([0, 1], 1)
    assert store.stats.refused_full > 10  # not written in vain, one after the other
    store.close()


def test_gradients_through_three_levels(tmp_path: Path) -> None:
    n, size = 300, 500
    tier = (
        f"memory:40KiB?buffers=0 > file:{tmp_path}?capacity=160KiB&buffers=0"
        " > memory:1MiB?buffers=0"
    )
    states = [np.linspace(0, 1, size)]
    for i in range(n):
        states.append(np.sin(states[-1]) + i)
    expected = np.ones(size)
    for x in reversed(states[:-1]):
        expected = np.cos(x) * expected
    costs = Costs(1e-4, 2e-4, state_bytes=8 * size, tiers=(Tier("c", 2e-4, 2e-4),))
    for planner in ("streaming", "interval", "disk-revolve"):
        store = open_store(tier)
        assert isinstance(store, CascadeStore)
        faulty = FaultyStore(store, lose_read=lambda number: number % 7 == 3)
        for each in (store, faulty):
            with (
                warnings.catch_warnings(),
                Reversal(
                    lambda x, i: np.sin(x) + i, lambda x, a, i: np.cos(x) * a, n,
                    memory="6 slots", tiers=each, costs=costs, planner=planner, checked=True,
                ) as run,
            ):  # fmt: skip
                warnings.simplefilter("ignore", CheckpointWarning)
                assert run.forward(states[0]).tobytes() == states[-1].tobytes()
                assert run.reverse(np.ones(size)).tobytes() == expected.tobytes()
    assert list(tmp_path.iterdir()) == []


def test_levels_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="needs a capacity"):
        CascadeStore(MemoryStore(), MemoryStore())
    lossy = MemoryStore()
    lossy.exact = False
    with pytest.raises(ArgumentError, match="lower level 'memory' of a cascade loses information"):
        CascadeStore(MemoryStore(1 << 20), lossy)
    store = CascadeStore(MemoryStore(EXTENT - 1), MemoryStore())
    with pytest.raises(StoreError, match=f"{EXTENT - 1} bytes < {EXTENT} bytes of one state"):
        store.open(LAYOUT)
    store = CascadeStore(
        FileStore(tmp_path, capacity_bytes=1 << 20), FileStore(tmp_path / "missing")
    )
    with pytest.raises(StoreError, match="it does not exist"):
        store.open(LAYOUT)
    assert list(tmp_path.iterdir()) == []
    store = CascadeStore(
        FileStore(tmp_path / "missing", capacity_bytes=1 << 20), FileStore(tmp_path)
    )
    with pytest.raises(StoreError, match="it does not exist"):
        store.open(LAYOUT)


def test_contract_below_a_file_that_is_tiny(tmp_path: Path) -> None:
    check_store(
        lambda: CascadeStore(
            MemoryStore(5_100_000 // 4096 * 4096 + 4096, buffer_bytes=0),
            FileStore(tmp_path, "direct", capacity_bytes=24 << 20),
        )
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("buffers", [0, FOUR], ids=["large", "small"])
def test_random_operations_in_random_order(seed: int, buffers: int) -> None:
    """Puts, prefetches, gets and drops at random, on media of random speed."""
    chance = np.random.default_rng(seed)
    pause, waits = threading.Event(), np.random.default_rng(seed + 100)

    def dawdle(name: str, number: int) -> None:
        if waits.random() < 0.2:
            pause.wait(waits.random() * 2e-3)

    upper_slots, lower_slots = int(chance.integers(1, 7)), int(chance.integers(0, 12))
    if buffers:
        upper_slots, lower_slots = 16 + upper_slots, 16 + lower_slots
    store = CascadeStore(
        Told(dawdle).store(upper_slots * EXTENT, buffers),
        Told(dawdle).store(lower_slots * EXTENT, buffers),
    )
    store.open(LAYOUT)
    there: dict[int, int] = {}
    for version in range(600):
        key = int(chance.integers(0, 50 if buffers else 25))
        do = chance.random()
        if do < 0.5 and key not in there:
            with warnings.catch_warnings():
                # What is dropped while it is moved keeps its room until then,
                # but no write that was accepted finds that there is none.
                warnings.filterwarnings("ignore", "tier .* its capacity", CheckpointWarning)
                if store.put(key, state(version), block=bool(chance.random() < 0.8)):
                    there[key] = version
        elif do < 0.6:
            store.prefetch(key)
        elif do < 0.8 and key in there:
            assert store.get(key)[0].tobytes() == state(there[key])[0].tobytes()
        elif key in there:
            if chance.random() < 0.5:
                assert store.wait_written(key)
            store.drop(key)
            del there[key]
    for key in sorted(there, reverse=True):
        assert store.wait_written(key)
        assert store.get(key)[0].tobytes() == state(there[key])[0].tobytes()
        store.drop(key)
    assert store.stats.lost == 0
    store.close()
