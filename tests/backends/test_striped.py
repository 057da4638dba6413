"""One tier of several paths: parts by rate, exact capacity, faults of one path."""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from benchmarks.late_tier import Clock, VirtualStore
from multistage.backends import CascadeStore, CheckpointLost, FileStore, MemoryStore, open_store
from multistage.backends import striped as module
from multistage.backends.compressed import compressions
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.backends.striped import StripedStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, CheckpointWarning, StoreError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Array, Layout

LARGE = 1 << 20  # bytes of a state that is cut


def state(key: int, nbytes: int = LARGE) -> Array:
    return np.random.default_rng(key).integers(0, 256, nbytes, np.uint8)


class Faulty(Ram):
    """A medium whose transfers fail as they are told."""

    def __init__(self, wrong: Callable[[str, int], Exception | None]) -> None:
        super().__init__()
        self._wrong, self.numbers = wrong, {"write": 0, "read": 0}

    def _next(self, name: str) -> None:
        number = self.numbers[name]
        self.numbers[name] += 1
        if (error := self._wrong(name, number)) is not None:
            raise error

    def write(self, slot: int, offset: int, data: Array) -> None:
        self._next("write")
        super().write(slot, offset, data)

    def read(self, slot: int, data: Array) -> None:
        self._next("read")
        super().read(slot, data)


def faulty(wrong: Callable[[str, int], Exception | None], capacity: int | None = None) -> Faulty:
    return StreamedStore("faulty", lambda: Faulty(wrong), capacity_bytes=capacity)  # type: ignore[return-value]


def filled(store: StripedStore, count: int) -> list[int]:
    """Put states and wait for each; return the keys that are there."""
    return [
        key
        for key in range(count)
        if store.put(key, [state(key)], block=True) and store.wait_written(key)
    ]


def read_back(store: StripedStore, keys: list[int]) -> None:
    for key in reversed(keys):
        assert np.array_equal(store.get(key)[0], state(key))
        store.drop(key)


@pytest.mark.parametrize("faster", [1.0, 3.0, 20.0])
def test_bandwidths_add_up(faster: float) -> None:
    """One transfer at a time, as a schedule has it: parts end together once rates are seen."""
    clock = Clock()
    paths = [VirtualStore(clock), VirtualStore(clock)]
    paths[0].rate, paths[1].rate = 1e6, faster * 1e6
    store, layout = StripedStore(*paths), Layout.of(state(0))
    for turn in range(2):
        store.open(layout)
        for path in paths:
            path._free = {"write": clock.now, "read": clock.now}
        began = clock.now
        assert filled(store, 30) == list(range(30))
        wrote_s, began = clock.now - began, clock.now
        read_back(store, list(range(30)))
        ideal_s = 30 * LARGE / sum(path.rate for path in paths)
        for seconds in (wrote_s, clock.now - began):
            # The first run begins with halves.
            assert ideal_s <= seconds * (1 + 1e-9) <= ideal_s * (1.02 if turn else 1.6)
        spans = [record for record in store.transfers if record.kind == "read"]
        told_s = sum(record.stop_s - record.start_s for record in spans)
        assert sum(record.nbytes for record in spans) == 30 * LARGE
        assert told_s == pytest.approx(ideal_s, rel=0.1)  # costs that are seen are the tier's
        store.close()
    share = faster / (1 + faster)
    assert store.notes()[0] == f"bytes striped: {100 - round(100 * share)} % to virtual, " + (
        f"{round(100 * share)} % to virtual"
    )


def test_rates_there_and_back_count_together() -> None:
    shown = [
        {"write": (10.0, 1.0), "read": (10.0, 4.0)},
        {"write": (10.0, 2.0), "read": (10.0, 0.5)},
    ]
    assert module._shares(shown) == [1 / 3, 2 / 3]
    shown[0]["read"] = (0.0, 0.0)
    assert module._shares(shown) == [2 / 3, 1 / 3]
    shown[1]["write"] = (0.0, 0.0)
    assert module._shares(shown) == [0.5, 0.5]


def test_what_is_read_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Array] = []
    store = StripedStore(MemoryStore(), MemoryStore())
    store.open(Layout.of(state(0)))
    take = store._pool.take

    def noted(nbytes: int) -> Array:
        taken.append(take(nbytes))
        return taken[-1]

    monkeypatch.setattr(store._pool, "take", noted)
    assert filled(store, 2) == [0, 1]
    assert all(len(each.parts) == 2 for each in store._states.values())
    for key in (1, 0):
        found = store.get(key)[0]
        assert np.shares_memory(found, taken[-1])
        assert not found.flags.writeable
        assert np.array_equal(found, state(key))
    for path in store._stores:
        assert not path._stream._pool._lent  # type: ignore[attr-defined]
    store.close()


def test_small_states_take_turns() -> None:
    store = StripedStore(MemoryStore(), MemoryStore())
    small = [np.full(100, float(key)) for key in range(1000)]
    store.open(Layout.of(small[0]))
    for key, each in enumerate(small):
        assert store.put(key, [each], block=True)
    writes = [path.stats.writes for path in store._stores]
    assert sum(writes) == 1000
    assert min(writes) > 300
    for key, each in reversed(list(enumerate(small))):
        assert np.array_equal(store.get(key)[0], each)
        store.drop(key)
    store.close()


def test_capacities_add_up_to_the_page() -> None:
    paths = MemoryStore((5 << 20) + 4096), MemoryStore(2 << 20)
    store = StripedStore(*paths)
    layout = Layout.of(state(0))
    assert store.capacity_bytes == (7 << 20) + 4096
    assert store.capacity_states(layout) == 7
    store.open(layout)
    with pytest.warns(CheckpointWarning, match=r"tier 'memory\+memory' takes no more"):
        assert filled(store, 9) == list(range(7))
    assert (store.stats.refused, store.stats.refused_full) == (2, 2)
    read_back(store, list(range(7)))
    store.close()
    assert StripedStore(MemoryStore(1 << 20), MemoryStore()).capacity_states(layout) is None


def test_a_path_that_fills_leaves_states_to_the_other() -> None:
    def full_from_the_fourth(name: str, number: int) -> Exception | None:
        late = name == "write" and number >= 4
        return OSError(errno.ENOSPC, "no space") if late else None

    # Room for all six by itself: measured rates decide how much of a state goes where.
    store = StripedStore(faulty(full_from_the_fourth), MemoryStore(6 << 20))
    store.open(Layout.of(state(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = filled(store, 6)
    assert len(there) == 5  # the one that was being written is lost
    assert store.stats.lost == 1
    assert [part.path for part in store._states[5].parts] == [1]
    with pytest.warns(CheckpointWarning, match="all of its paths are full"):
        while store.put(len(there) + 1, [state(len(there) + 1)], block=True):
            there.append(len(there) + 1)
    read_back(store, there)
    assert store.stats.stored_bytes == 0
    store.close()


def test_a_path_is_full_no_longer_than_it_has_no_room() -> None:
    """What was dropped while it was written takes room until then, and nothing tells of its end."""
    go = threading.Event()

    def waiting(name: str, number: int) -> Exception | None:
        go.wait(60)
        return None

    store = StripedStore(faulty(waiting, LARGE // 2), faulty(waiting, LARGE // 2))
    store.open(Layout.of(state(0)))
    assert store.put(0, [state(0)])
    store.drop(0)
    with pytest.warns(CheckpointWarning, match="all of its paths are full"):
        assert not store.put(1, [state(1)])
    go.set()
    until = time.monotonic() + 60
    while not store.put(2, [state(2)], block=True):
        assert time.monotonic() < until
    read_back(store, [2])
    store.close()


def test_a_path_that_fails_leaves_states_to_the_other() -> None:
    def failing(name: str, number: int) -> Exception | None:
        return OSError(errno.EIO, "broken") if name == "write" else None

    store = StripedStore(faulty(failing), MemoryStore())
    store.open(Layout.of(state(0)))
    assert filled(store, 10) == list(range(3, 10))
    assert store.stats.lost == 3
    read_back(store, list(range(3, 10)))
    store.close()


@pytest.mark.parametrize("name", ["write", "read"])
@pytest.mark.parametrize("both", [False, True])
def test_gradients_with_faults_are_exact(name: str, both: bool) -> None:
    def now_and_then(kind: str, number: int) -> Exception | None:
        return OSError(errno.EIO, "broken") if kind == name and number % 3 == 1 else None

    def step(x: Array, i: int) -> Array:
        return np.sin(x) + 0.1 * i

    def adjoint_step(x: Array, a: Array, i: int) -> Array:
        return np.cos(x) * a

    costs = Costs(1e-3, 2e-3, tiers=(Tier("faulty", 1e-3, 1e-3),))
    x = np.linspace(0.0, 1.0, LARGE // 8)
    gradients = []
    for tiers in (
        None,
        StripedStore(faulty(now_and_then), faulty(now_and_then) if both else MemoryStore()),
    ):
        with Reversal(
            *(step, adjoint_step, 40),
            memory="5 slots",
            tiers=tiers,
            costs=costs if tiers else None,
            planner="streaming" if tiers else "revolve",
        ) as run:
            with pytest.warns(CheckpointWarning) if tiers else nullcontext():
                run.forward(x)
                gradients.append(run.reverse(np.ones_like(x)))
            lost = run.report().tiers[0].lost if tiers else 1
    assert np.array_equal(*gradients)
    assert lost


def test_a_state_that_was_written_counts_as_lost_though_it_was_cancelled() -> None:
    lossy = FaultyStore(MemoryStore(), lose_read=lambda k: True)
    store = StripedStore(lossy, MemoryStore())
    store.open(Layout.of(state(0)))
    for key in range(2):
        assert store.put(key, [state(key)], block=True) and store.wait_written(key)
        if key:
            store.cancel(key)
        with pytest.raises(CheckpointLost):
            store.get(key)
        assert store.stats.lost == key + 1
    store.close()


@pytest.mark.parametrize("kind", [StripedStore, CascadeStore])
def test_a_write_that_is_cancelled_twice_is_not_lost(kind: type[StripedStore]) -> None:
    gate = threading.Event()

    def held(name: str, number: int) -> None:
        gate.wait()

    store = kind(faulty(held, 16 * LARGE), MemoryStore())
    store.open(Layout.of(state(0)))
    for key in range(2):  # the second one waits for the first, and so is not made
        assert store.put(key, [state(key)], block=True)
    store.cancel(1)
    gate.set()
    while not store.ended(1, 60.0):
        pass
    store.cancel(1)
    assert not store.wait_written(1) and store.wait_written(0)
    assert store.stats.lost == 0
    store.close()


def test_bytes_that_were_changed_are_lost() -> None:
    class Flipped(Ram):
        def read(self, slot: int, data: Array) -> None:
            super().read(slot, data)
            data[5] ^= 1

    store = StripedStore(MemoryStore(), StreamedStore("flipped", Flipped))
    store.open(Layout.of(state(0)))
    assert filled(store, 1) == [0]
    with pytest.raises(CheckpointLost, match="checksum does not match"):
        store.get(0)
    assert store.stats.lost == 1
    assert all(path.stats.stored_bytes == 0 for path in store._stores)
    store.close()


def test_a_part_that_is_refused_takes_the_others_back() -> None:
    one, other = MemoryStore(), FaultyStore(MemoryStore(), refuse={0})
    store = StripedStore(one, other)
    store.open(Layout.of(state(0)))
    assert not store.put(0, [state(0)])
    assert (store.stats.refused, store.stats.refused_full) == (1, 0)
    assert not one.wait_written(0)
    assert filled(store, 2) == [0, 1]
    read_back(store, [0, 1])
    store.close()


@pytest.mark.parametrize("lower", ["memory:", "memory: + memory:1GiB", "memory:8MiB > memory:"])
def test_a_full_level_of_a_cascade_is_no_full_tier(lower: str) -> None:
    """Warnings are errors here."""
    store = open_store(f"memory:4MiB + memory:2MiB > {lower}")
    store.open(Layout.of(state(0)))
    for key in range(20):
        assert store.put(key, [state(key)], block=True)
    for key in reversed(range(20)):
        assert np.array_equal(store.get(key)[0], state(key))
    store.close()


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    there = FileStore(tmp_path)
    store = StripedStore(there, FileStore(tmp_path / "missing"))
    for used in (store.check, lambda: store.open(Layout.of(state(0)))):
        with pytest.raises(StoreError, match="missing' cannot hold checkpoints: it does not exist"):
            used()
    there.open(Layout.of(state(0)))  # it was closed again
    there.close()


def test_names(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    (tmp_path / "c").mkdir()
    store = open_store(f"file:{tmp_path}/a+b?capacity=1MiB&share=8 + file:{tmp_path}/c?share=8")
    assert isinstance(store, StripedStore)
    assert [path.folder.name for path in store._stores] == ["a+b", "c"]  # type: ignore[attr-defined]
    assert (store.name, store.share, store.capacity_bytes) == ("file+file", 8, None)
    cascade = open_store("memory:1MiB + memory:2MiB > memory: + memory:1GiB + memory:2GiB")
    assert isinstance(cascade, CascadeStore)
    assert cascade.name == "memory+memory>memory+memory+memory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory: + ", "must name a tier on both sides of '\\+'"),
        ("+ memory:", "must name a tier on both sides of '\\+'"),
        ("memory: + + memory:1GiB", "must name a tier on both sides of '\\+'"),
        ("file:/x + file:/x", "names 'file:/x' twice; name two devices"),
        ("memory: + memory:1GiB > memory:", r"'memory\+memory' of a cascade needs a capacity"),
        ("file:/x?share=8 + file:/y", r"differ in share=8, 1; give all of them the same"),
        ("memory: + ftp://x", "is not known; write"),
        ("memory:?share=0", "share=0 must be at least 1"),
        ("memory:?share=node", "share='node' must be a whole number"),
    ],
)
def test_names_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_store(text)


def test_stores_that_are_refused() -> None:
    lossy, one = MemoryStore(), MemoryStore()
    lossy.exact = False
    with pytest.raises(ArgumentError, match="needs at least two paths, not 1"):
        StripedStore(one)
    with pytest.raises(ArgumentError, match="name the store 'memory' twice"):
        StripedStore(one, FaultyStore(one))
    with pytest.raises(ArgumentError, match="'memory' of a striped tier loses information"):
        StripedStore(one, lossy)


def test_paths_may_be_compressed() -> None:
    pytest.importorskip("blosc2")
    store = open_store("memory:1GiB?compress=blosc + memory:2GiB?compress=auto")
    assert isinstance(store, StripedStore)
    assert [each.scheme for each in compressions(store)] == ["blosc", "auto"]
    smooth = np.linspace(0.0, 1.0, LARGE // 4)
    store.open(Layout.of(smooth))
    assert store.put(0, [smooth], block=True)
    assert np.array_equal(store.get(0)[0], smooth)
    (_, said, *_) = store.notes()
    store.close()
    assert float(said.rpartition("ratio ")[2]) > 1.2  # by the bytes of its own numbers


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_in_random_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts, prefetches, cancels, gets and drops of states of any size, with faults on the way."""
    monkeypatch.setattr(module, "_LEAST", 2 * 4096)
    chance = np.random.default_rng(seed)
    pause = threading.Event()

    def wrong(name: str, number: int) -> Exception | None:
        waits, share, breaks = np.random.default_rng((seed, name == "read", number)).random(3)
        if waits < 0.1:
            pause.wait(share * 2e-3)
        return OSError(errno.EIO, "broken") if breaks < 0.06 else None

    paths = faulty(wrong, 60 * 4096), faulty(wrong), FaultyStore(MemoryStore(40 * 4096))
    store = StripedStore(*paths[: 2 + seed % 2])
    store.open(Layout.up_to(5 * 4096))
    there: dict[int, Array] = {}
    kept: list[tuple[Array, Array]] = []
    lost = 0
    for version in range(800):
        key, do = int(chance.integers(0, 25)), chance.random()
        if do < 0.5 and key not in there:
            there[key] = state(version, int(chance.integers(1, 5 * 4096)))
            if not store.put(key, [there[key]], block=bool(chance.random() < 0.8)):
                del there[key]
        elif do < 0.6:
            store.prefetch(key)
        elif key in there and do < 0.8:
            try:
                (found,) = store.get(key)
                assert np.array_equal(found, there[key])
                kept.append((found, there[key]))  # and stays so, whatever is read later
            except CheckpointLost:
                lost += 1
                del there[key]
        elif key in there:
            if do < 0.83:
                store.cancel(key)
            if chance.random() < 0.5:
                store.wait_written(key)
            store.drop(key)
            del there[key]
    for found, expected in kept:
        assert np.array_equal(found, expected)
    assert lost and len(kept) > 50
    for key in there:
        store.drop(key)
    assert store.stats.stored_bytes == sum(store._used) == 0
    store.close()
