"""For tests of stores: the contract every store must meet, and a store that fails on demand.

Examples
--------
>>> from multistage.backends import MemoryStore
>>> store = FaultyStore(MemoryStore(), lose_read=lambda number: number % 3 == 2)

In a test of a new store, `check_store(MyStore)` is all there is to write.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache

import numpy as np

from ..errors import CheckpointWarning, StoreError
from ..states.layout import Array, Layout
from ..support.arrays import Bytes
from .base import CheckpointLost, Store
from .wrapper import WrapperStore

Faults = Collection[int] | Callable[[int], bool]


class FaultyStore(WrapperStore):
    """A store that fails on request, and otherwise works like `inner`.

    Parameters
    ----------
    inner : Store
    refuse : collection of int or callable, optional
        0-based numbers of the calls of `put` that are refused, or a function
        of the number that tells.
    lose_write : collection of int or callable, optional
        Numbers of the accepted writes that fail: `wait_written` answers False.
    lose_read : collection of int or callable, optional
        Numbers of the calls of `get` that raise CheckpointLost.

    Attributes
    ----------
    puts, writes, gets : int
        Calls of `put`, accepted writes and calls of `get` since `open`.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.backends import MemoryStore
    >>> store = FaultyStore(MemoryStore(), refuse={0})
    >>> store.open(Layout.of(np.zeros(3)))
    >>> store.put(5, [np.ones(3)]), store.put(6, [np.ones(3)])
    (False, True)
    >>> store.close()
    """

    def __init__(
        self,
        inner: Store,
        *,
        refuse: Faults = (),
        lose_write: Faults = (),
        lose_read: Faults = (),
    ) -> None:
        super().__init__(inner)
        self._refuse, self._lose_write, self._lose_read = refuse, lose_write, lose_read
        self._restart()

    def _restart(self) -> None:
        self.puts = self.writes = self.gets = 0
        self._doomed: set[int] = set()

    def open(self, layout: Layout) -> None:
        """Open the inner store; calls are counted again."""
        self._inner.open(layout)
        self._restart()

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Put, unless this call is to be refused."""
        number, self.puts = self.puts, self.puts + 1
        if _hit(self._refuse, number):
            self.stats.refused += 1
            return False
        if not self._inner.put(key, arrays, block=block):
            return False
        number, self.writes = self.writes, self.writes + 1
        if _hit(self._lose_write, number):
            self._doomed.add(key)
        return True

    def wait_written(self, key: int) -> bool:
        """Wait; False, and the key is gone, if that write is to fail."""
        written = self._inner.wait_written(key)
        if key not in self._doomed:
            return written
        self.stats.lost += 1
        self.drop(key)
        return False

    def prefetch(self, key: int) -> None:
        """Prefetch from the inner store."""
        self._inner.prefetch(key)

    def get(self, key: int) -> list[Array]:
        """Get; CheckpointLost, and the key is gone, if this call is to fail."""
        number, self.gets = self.gets, self.gets + 1
        if _hit(self._lose_read, number):
            self.stats.lost += 1
            self.drop(key)
            raise CheckpointLost(f"read {number} was told to fail")
        return self._inner.get(key)

    def drop(self, key: int) -> None:
        """Drop in the inner store."""
        self._doomed.discard(key)
        self._inner.drop(key)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()


def _hit(faults: Faults, number: int) -> bool:
    return faults(number) if callable(faults) else number in faults


_MIXED = {
    "number": np.zeros(()),
    "nested": (np.zeros((0, 3)), [np.zeros((2, 3), np.complex128), np.zeros(5, np.int8)]),
}
# From coalesced to larger than any buffer of a store.
_STATES: tuple[object, ...] = (
    _MIXED,
    np.zeros(1000, np.float32),
    {"u": np.zeros((50, 400)), "v": np.zeros(20_001, np.int16)},
    (np.zeros(100_003), np.zeros((), np.complex64), np.zeros((300, 200))),
    np.zeros(5_000_001, np.uint8),
)


def check_store(make_store: Callable[[], Store]) -> None:
    """Assert that a store meets the contract of `Store`.

    Parameters
    ----------
    make_store : callable
        Returns a new, closed store, with room for some 32 MiB.

    Raises
    ------
    AssertionError
        With the rule that was broken.
    """
    threads = set(threading.enumerate())
    for state in _STATES:
        layout = Layout.of(state)
        for part in _PARTS:
            store = make_store()
            store.open(layout)
            try:
                part(store, layout)
            finally:
                store.close()
    _check_varied(make_store())
    _check_life(make_store())
    _record.cache_clear()
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    assert not left, f"close() left threads: {left}"


def _arrays(layout: Layout, key: int, *, copied: bool = True) -> list[Array]:
    """Return arrays of bytes that depend on `key`, NaNs of all kinds among them."""
    views = layout.views(_record(layout.nbytes, 7 * key % 256))
    return [array.copy() for array in views] if copied else views  # these to compare with


@cache
def _record(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def _assert_same(found: Sequence[Array], layout: Layout, key: int, when: str) -> None:
    expected = _arrays(layout, key, copied=False)
    assert len(found) == len(expected), f"{when}: {len(found)} arrays, not {len(expected)}"
    for leaf, one, other in zip(layout.leaves, found, expected, strict=True):
        what = f"{when}: key {key}, leaf {leaf.path}"
        assert (one.shape, one.dtype) == (leaf.shape, leaf.dtype), f"{what}: shape or dtype differ"
        assert _same(one, other), f"{what}: bytes differ from those put"


def _same(one: Array, other: Array) -> bool:
    """Whether all bytes are equal, those of NaNs too."""
    return np.array_equal(np.ravel(one).view(np.uint8), np.ravel(other).view(np.uint8))


def _count(store: Store, layout: Layout, most_bytes: int = 16 << 20, most: int = 40) -> int:
    """Return how many states to try: not too many bytes, and no more than there is room for."""
    room = store.capacity_states(layout)
    count = max(3, min(most, most_bytes // layout.nbytes))
    return count if room is None else min(count, room)


def _fill(store: Store, layout: Layout, count: int) -> None:
    arrays = {key: _arrays(layout, key) for key in range(count)}
    for key in range(count):
        assert store.put(key, arrays[key], block=True), f"put({key}, block=True) refused: room left"
    for key in range(count):
        assert store.wait_written(key), f"wait_written({key}) is False, and nothing failed"
        for one, other in zip(arrays[key], _arrays(layout, key, copied=False), strict=True):
            assert _same(one, other), f"put({key}) changed the arrays"
            assert one.flags.writeable, f"put({key}) changed the arrays' flags"


def _check_descending(store: Store, layout: Layout) -> None:
    count = _count(store, layout)
    _fill(store, layout, count)
    for key in reversed(range(count)):
        for ahead in range(max(0, key - 2), key + 1):
            store.prefetch(ahead)
        _assert_same(store.get(key), layout, key, "read in descending order")
        store.drop(key)
        assert not store.wait_written(key), f"wait_written({key}) of a dropped key is True"


def _check_any_order(store: Store, layout: Layout) -> None:
    count = _count(store, layout)
    _fill(store, layout, count)
    order = np.random.default_rng(0).permutation(count)
    for key in (*order, *order[:3]):
        _assert_same(store.get(int(key)), layout, int(key), "read in any order, not prefetched")


def _check_fresh(store: Store, layout: Layout) -> None:
    """Read what was only just put, its write perhaps still to come."""
    for key in range(_count(store, layout)):
        arrays = _arrays(layout, key)
        assert store.put(key, arrays, block=True), f"put({key}, block=True) refused"
        store.prefetch(key)
        _assert_same(store.get(key), layout, key, "read before its write was waited for")
        assert store.wait_written(key), f"wait_written({key}) is False after it was read"


def _check_reuse(store: Store, layout: Layout) -> None:
    """Keys and room come back: the rounds write several times what the store holds."""
    count = _count(store, layout, 4 << 20, 5)
    first = 0
    for turn in range(12):
        _fill(store, layout, count)
        for key in reversed(range(count)):
            _assert_same(store.get(key), layout, key, f"turn {turn} of put and drop")
            store.drop(key)
        first = first or store.stats.peak_stored_bytes
    peak = store.stats.peak_stored_bytes
    most = max(store.stats.bytes_written / 6, 4 << 20, 2 * first)
    assert peak <= most, f"peak_stored_bytes={peak}: dropped keys keep their room"


def _check_capacity(store: Store, layout: Layout) -> None:
    room = store.capacity_states(layout)
    if room is None or room * layout.nbytes > 64 << 20 or room > 10_000:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        arrays = _arrays(layout, 0)
        taken = 0
        while taken <= room and store.put(taken, arrays, block=True):
            taken += 1
    assert taken == room, f"capacity_states is {room}, but {taken} states were taken"
    refused = store.stats.refused, store.stats.refused_full
    assert refused == (1, 1), f"stats.refused, refused_full={refused} after a full store refused"
    for key in range(room):
        assert store.wait_written(key), f"wait_written({key}) is False in a store just filled"
    for key in reversed(range(room)):
        _assert_same(store.get(key), layout, 0, "a full store")
        store.drop(key)
    if room:
        assert store.put(room, arrays, block=True), "put refused after everything was dropped"
        _assert_same(store.get(room), layout, 0, "a store that was full")


def _check_refusal(store: Store, layout: Layout) -> None:
    """Check puts that do not block: an accepted state can be read, a refused one is unknown."""
    count = _count(store, layout)
    arrays = [_arrays(layout, key) for key in range(count)]
    accepted = [key for key in range(count) if store.put(key, arrays[key])]
    assert accepted, "an empty store refused every put"
    for key in range(count):
        if key in accepted:
            assert store.wait_written(key), f"wait_written({key}) is False, and nothing failed"
            _assert_same(store.get(key), layout, key, "accepted without blocking")
        else:
            _assert_lost(store, key, "refused by put")
    refused = store.stats.refused
    assert refused == count - len(accepted), f"stats.refused={refused} is not what was refused"


def _check_unknown(store: Store, layout: Layout) -> None:
    store.prefetch(3)
    store.drop(3)
    assert not store.wait_written(3), "wait_written of a key never put is True"
    _assert_lost(store, 3, "never put")
    assert store.put(3, _arrays(layout, 3), block=True), "an empty store refused a put"
    store.drop(3)
    _assert_lost(store, 3, "dropped")
    assert store.put(3, _arrays(layout, 4), block=True), "a dropped key cannot be put again"
    _assert_same(store.get(3), layout, 4, "put again")


def _assert_lost(store: Store, key: int, why: str) -> None:
    try:
        store.get(key)
    except CheckpointLost:
        return
    raise AssertionError(f"get({key}) of a key {why} did not raise CheckpointLost")


def _check_read_in_vain(store: Store, layout: Layout) -> None:
    """Check that a state can be dropped while it is read, and put again, as in an aborted run."""
    count, room = _count(store, layout, 4 << 20, 12), store.capacity_states(layout)
    if room is not None:
        count = min(count, room // 2)  # what is being read gives its room back only then
    for turn in range(2):
        _fill(store, layout, count)
        for key in reversed(range(count)):
            store.prefetch(key)
        for key in range(count):
            store.drop(key)
        for key in range(count):
            assert not store.wait_written(key), f"turn {turn}: {key}, dropped while read, is there"


def _check_memory(store: Store, layout: Layout) -> None:
    """Arrays from `get` are read-only, and stay as they are while anybody refers to them."""
    count = _count(store, layout)
    _fill(store, layout, count)
    reads = min(400, max(30, (64 << 20) // layout.nbytes))
    kept: list[tuple[int, Array, Array]] = []
    for turn in range(reads):
        key = count - 1 - turn % count
        store.prefetch(max(0, key - 1))
        arrays = store.get(key)
        for array in arrays:
            assert not array.flags.writeable, f"get({key}) returned an array that can be written"
        if turn % max(1, reads // 12) == 0:
            # One leaf, as a slice: the rest of the state is released.
            leaf = turn % len(arrays)
            kept.append((key, arrays[leaf][...], _arrays(layout, key)[leaf]))
        del arrays
    for key in range(count):
        store.drop(key)
    for key in range(min(count, 3)):
        store.put(key, _arrays(layout, key + 1000), block=True)
        store.get(key)
    for key, array, expected in kept:
        assert _same(array, expected), f"an array of get({key}) changed while it was referred to"


def _check_cancel(store: Store, layout: Layout) -> None:
    """Check that a write that is given up is lost or made, and others are made as put."""
    store.cancel(3)
    assert store.ended(3, 0.0), "ended(3, 0.0) of a key never put is False"
    assert not store.wait_written(3), "cancel of a key never put made it known"
    count = _count(store, layout, 2 << 20, 8)
    for turn in range(2):
        first = 1000 * turn
        arrays = {key: _arrays(layout, key) for key in range(count)}
        for key in arrays:
            assert store.put(first + key, arrays[key], block=True), f"put({first + key}) refused"
        for key in reversed(range(0, count, 2)):
            store.cancel(first + key)
        if count > 2:
            store.prefetch(first)
            store.drop(first + 2)  # without a wait
        for key in arrays:
            while not store.ended(first + key, 1.0):
                pass
            made = store.wait_written(first + key)
            if key == 2:
                continue
            assert made or key % 2 == 0, f"cancel lost key {first + key}, which was not cancelled"
            for array in arrays[key]:
                array.reshape(-1).view(np.uint8)[...] = 255  # its owner's again
            if made:
                store.cancel(first + key)  # of what is written: nothing
                _assert_same(store.get(first + key), layout, key, "after writes were cancelled")
                store.drop(first + key)
            else:
                _assert_lost(store, first + key, "whose write was cancelled")
    _fill(store, layout, count)  # all room was given back
    for key in range(count):
        _assert_same(store.get(key), layout, key, "put again after its write was cancelled")


_PARTS: tuple[Callable[[Store, Layout], None], ...] = (
    _check_descending,
    _check_any_order,
    _check_fresh,
    _check_reuse,
    _check_capacity,
    _check_refusal,
    _check_unknown,
    _check_read_in_vain,
    _check_cancel,
    _check_memory,
)


def _check_varied(store: Store) -> None:
    """Check states of other numbers, shapes and dtypes of arrays, from empty ones to the largest.

    A store may take equal states alone: its `open` says so.
    """
    largest = 3 << 20
    try:
        store.open(Layout.up_to(largest))
    except StoreError:
        return
    draw = np.random.default_rng(0)
    there: dict[int, list[Array]] = {}
    for key in range(60):
        kinds = [np.float64, np.uint8, np.complex64, np.int16]
        arrays: list[Array] = [np.zeros((0, 3)), np.zeros((), kinds[key % 4])]
        for shape in ((int(draw.integers(1, 300)), 7), (int(10 ** draw.uniform(0, 5.3)),)):
            raw = draw.integers(0, 100, shape)
            arrays.append(raw.astype(kinds[int(draw.integers(4))])[...])
        if key % 20 == 10:
            arrays = [draw.integers(0, 256, largest, np.uint8)]
        copies = [array.copy() for array in arrays[key % 3 :] or arrays]
        if store.put(key, copies, block=True):
            there[key] = [array.copy() for array in copies]
        if key % 5 == 4:  # the latest, as a rule, and others
            for gone in sorted(there)[-3:] + sorted(there)[:1]:
                assert store.wait_written(gone), f"wait_written({gone}) is False: nothing failed"
                found, wanted = store.get(gone), there.pop(gone)
                assert len(found) == len(wanted), f"state {gone}: another number of arrays"
                for one, other in zip(found, wanted, strict=True):
                    kind = one.shape, one.dtype
                    assert kind == (other.shape, other.dtype), f"state {gone}: {kind} was not put"
                    assert _same(one, other), f"state {gone}, of any size: bytes differ"
                store.drop(gone)
    assert there, "too few states of any size were taken"
    for key, wanted in there.items():
        assert store.wait_written(key), f"wait_written({key}) is False, and nothing failed"
        for one, other in zip(store.get(key), wanted, strict=True):
            assert _same(one, other), f"state {key}, of any size: bytes differ from those put"
    store.close()


def _check_life(store: Store) -> None:
    """Open, close, close, open again, with other states and left full; never open twice."""
    store.close()
    for state in (_STATES[1], _STATES[3], _STATES[0]):
        layout = Layout.of(state)
        store.open(layout)
        _assert_lost(store, 1, "put before the store was closed")
        assert store.put(1, _arrays(layout, 1), block=True), "a reopened store refused a put"
        store.prefetch(1)
        _assert_same(store.get(1), layout, 1, "reopened")
        store.prefetch(1)
        store.close()
        store.close()
    store.open(layout)
    assert store.put(1, _arrays(layout, 1), block=True), "a reopened store refused a put"
    try:
        store.open(layout)
    except StoreError:
        pass
    else:
        raise AssertionError("open() of an open store did not raise StoreError: it is another's")
    _assert_same(store.get(1), layout, 1, "after open() was refused")
    store.close()
