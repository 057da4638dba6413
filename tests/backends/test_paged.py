"""Things of any size in pages: read as they were put, lost whole or not at all."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multistage.backends import CheckpointLost, FileStore, MemoryStore, Store
from multistage.backends.paged import PagedStore, page_bytes_for
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, CheckpointWarning

STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(),
    "memory, no buffers": lambda folder: MemoryStore(buffer_bytes=0, queue_depth=1),
    "file": lambda folder: FileStore(folder, "direct"),
}
DTYPES = (np.float64, np.float32, np.int8, np.complex128, np.bool_, np.uint16)
LARGEST = 40_000


def thing(seed: int) -> list[Any]:
    """Return arrays of random shapes and dtypes, some empty, some 0-d."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(draw.randrange(1, 5)):
        dtype = np.dtype(draw.choice(DTYPES))
        shape = draw.choice([(), (0, 3), (draw.randrange(1, 600),), (draw.randrange(1, 20), 30)])
        raw = rng.integers(0, 2, shape) if dtype == np.bool_ else rng.integers(0, 100, shape)
        arrays.append(np.asarray(raw).astype(dtype))
    return arrays


def same(found: list[Any], wanted: list[Any]) -> bool:
    return [(a.shape, a.dtype, a.tobytes()) for a in found] == [
        (a.shape, a.dtype, a.tobytes()) for a in wanted
    ]


@pytest.mark.parametrize("page", [64, 1024, None, 1 << 16])
@pytest.mark.parametrize("name", STORES)
def test_things_come_back_as_they_were_put(name: str, page: int | None, tmp_path: Path) -> None:
    store = PagedStore(STORES[name](tmp_path), LARGEST, page)
    for _ in range(2):
        store.open()
        things = {key: thing(key) for key in (0, 3, 4, 9, 12, 15, 20)}
        for key, arrays in things.items():
            assert store.put(key, arrays, block=True)
        assert all(store.wait_written(key) for key in things)
        for key in reversed(things):
            store.prefetch(key)
        for key in (*reversed(things), 9):
            found = store.get(key)
            assert same(found, things[key])
            assert not any(array.flags.writeable for array in found if array.size)
        for key in things:
            store.drop(key)
        with pytest.raises(CheckpointLost):
            store.get(9)
        store.close()
    assert {record.key for record in store.transfers} <= set(things)
    assert store.store.queue_depth == store.queue_depth


def test_full_pages_are_not_copied() -> None:
    store = PagedStore(MemoryStore(), 10 << 20)
    array = np.arange((10 << 20) // 8, dtype=np.float64)
    pages = list(store._cut([array]))
    assert len(pages) == store.pages_of(array.nbytes)
    assert sum(np.shares_memory(page, array) for page in pages) >= len(pages) - 1


def test_a_thing_is_written_in_the_background_though_it_is_many_pages() -> None:
    store = PagedStore(MemoryStore(), 20 << 20)
    store.open()
    assert all(store.put(k, [np.zeros((20 << 20) // 8)]) for k in range(2))
    store.close()


@pytest.mark.parametrize("fault", ["refuse", "lose_write", "lose_read"])
def test_a_fault_at_any_page_loses_the_whole_record(fault: str) -> None:
    arrays = [np.arange(900.0), np.arange(50)]
    for number in range(20):
        inner = FaultyStore(MemoryStore(), **{fault: {number}})
        store = PagedStore(inner, 8000, 512)
        store.open()
        put = store.put(1, arrays, block=True)
        assert store.put(2, arrays, block=True) or number >= 15
        written = put and store.wait_written(1)
        found = None
        if written:
            with contextlib.suppress(CheckpointLost):
                found = store.get(1)
        assert found is None or same(found, arrays)
        assert (found is None) == (number < 15)
        if found is None:
            with pytest.raises(CheckpointLost):
                store.get(1)
            assert not store.wait_written(1)
        store.close()


def test_a_refused_put_leaves_no_page_behind() -> None:
    store = PagedStore(MemoryStore(64 << 10, buffer_bytes=0), 30_000, 4096)
    store.open()
    with pytest.warns(CheckpointWarning, match="capacity"):
        taken = [store.put(key, [np.full(3000, float(key))], block=True) for key in range(4)]
    assert taken == [True, True, False, False]
    store.drop(0)
    assert store.put(5, [np.full(3000, 5.0)], block=True)
    assert same(store.get(1), [np.full(3000, 1.0)])
    assert same(store.get(5), [np.full(3000, 5.0)])
    assert store.capacity_states() == 2
    store.close()


def test_invalid_sizes_are_refused() -> None:
    for largest, page in ((0, None), (10, 63), (10, 100), (10, 0)):
        with pytest.raises(ArgumentError):
            PagedStore(MemoryStore(), largest, page)
    store = PagedStore(MemoryStore(), 1000)
    store.open()
    with pytest.raises(ArgumentError, match="at most 1000"):
        store.put(0, [np.zeros(1000)])
    store.close()
    assert page_bytes_for(1) == 64
