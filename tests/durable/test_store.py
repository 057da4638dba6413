"""The store of durable runs: the contract, and what it keeps on the disk for whom."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaks import no_leak as no_leak

from multistage.backends import CheckpointLost
from multistage.backends.testing import check_store
from multistage.durable.folder import Folder
from multistage.durable.records import OrderedLayout
from multistage.durable.store import DurableStore
from multistage.errors import CheckpointWarning, StoreError
from multistage.states.layout import Array

SMALL = OrderedLayout.of(np.zeros(100))
LARGE = OrderedLayout.of(np.zeros((300, 400)))
LAYOUTS = [SMALL, LARGE]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "run", create=True)
    yield made
    made.close()


def opened(folder: Folder, layout: OrderedLayout, below: int | None = None) -> DurableStore:
    store = DurableStore(lambda: folder, linger_s=0)
    if below is not None:
        store.adopt(layout, folder, below)
    store.open(layout)
    return store


def packed(layout: OrderedLayout, key: int) -> list[Array]:
    (leaf,) = layout.leaves
    return list(layout.pack([np.full(leaf.shape, key / 3)])[0])


def left(folder: Folder, layout: OrderedLayout, count: int) -> None:
    """Leave so many states to the next process."""
    store = opened(folder, layout)
    for key in range(count):
        assert store.put(key, packed(layout, key), block=True)
    store.close()


def files(folder: Folder) -> list[str]:
    return [name for name in folder.names() if name.startswith("states-")]


def value(store: DurableStore, key: int) -> float:
    return float(store.get(key)[0].ravel()[-1])


def test_a_state_outlives_dropped_ones_in_its_file(folder: Folder) -> None:
    store = DurableStore(lambda: folder, "probe", linger_s=60, lasting=False)
    store.open(SMALL)
    try:
        assert store.put(0, packed(SMALL, 0))
        store.drop(0)  # the file is to be begun still: it may get other states
        assert store.put(1, packed(SMALL, 1))
        store.flush()
        assert store.put(2, packed(SMALL, 2))
        store.drop(2)  # looks for files that are not needed
        assert value(store, 1) == 1 / 3
        store.drop(1)
        store.flush()
        for key in (3, 4):  # in one file, which is removed once
            assert store.put(key, packed(SMALL, key))
            store.drop(key)
        store.flush()
        store.drop(4)
        assert store.put(5, packed(SMALL, 5)) and store.put(5, packed(SMALL, 5))
        store.flush()
        store.drop(5)
        assert store.stats.stored_bytes == 0
    finally:
        store.close()
    assert folder.names() == []


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (mmap, "mmap", OSError(errno.ENOMEM, "no memory")),
        (mmap, "mmap", MemoryError()),
    ],
)
@pytest.mark.parametrize("at", [1, 2])
def test_a_failed_open_raises_and_keeps_adopted_states(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: Exception,
    at: int,
) -> None:
    before = opened(folder, SMALL)
    assert before.put(3, packed(SMALL, 3))
    before.close()
    store = DurableStore(lambda: folder)
    assert store.adopt(SMALL, folder, 9) == [3]
    real, calls = getattr(owner, name), itertools.count(1)

    def scarce(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= at:
            raise error
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, scarce)
        with pytest.raises(StoreError, match="tier 'durable' cannot be used"):
            store.open(SMALL)
    store.open(SMALL)
    assert value(store, 3) == 3 / 3
    store.close()


def test_contract(folder: Folder) -> None:
    check_store(lambda: DurableStore(lambda: folder, "probe", lasting=False))
    assert folder.names() == []


def test_a_file_that_cannot_be_removed_does_not_keep_the_store(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(folder: Folder, name: str) -> bool:
        raise OSError(errno.EIO, "bad block")

    store = DurableStore(lambda: folder, "probe", lasting=False)
    store.open(LARGE)
    assert store.put(0, packed(LARGE, 0))
    assert store.wait_written(0)
    monkeypatch.setattr(Folder, "unlink", unlink)
    store.close()
    store.open(LARGE)
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_process_finds_what_was_written(folder: Folder, layout: OrderedLayout) -> None:
    left(folder, layout, 7)
    heir = DurableStore(lambda: folder)
    assert heir.adopt(layout, folder, 6) == [0, 1, 2, 3, 4, 5]
    heir.keep({0, 3, 5, 6})  # other ranks lack the rest
    heir.open(layout)
    assert [value(heir, key) for key in (5, 0, 3)] == [5 / 3, 0, 1]
    for key in (1, 2, 4, 6):  # 6 is not below 6
        with pytest.raises(CheckpointLost):
            heir.get(key)
    assert heir.put(8, packed(layout, 8), block=True)  # under a new name
    assert value(heir, 8) == 8 / 3
    heir.close()
    assert set(DurableStore(lambda: folder).adopt(layout, folder, 9)) >= {*range(6), 8}


def test_a_file_that_cannot_be_read_now_stays_for_the_next_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(folder, LARGE, 3)
    real = folder.open

    def scarce(name: str, flags: int = os.O_RDONLY) -> tuple[int, int]:
        if name == "states-2":
            monkeypatch.undo()  # there are descriptors again
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, flags)

    monkeypatch.setattr(folder, "open", scarce)
    heir = DurableStore(lambda: folder)
    assert heir.adopt(LARGE, folder, 9) == [0, 1]
    heir.open(LARGE)
    assert heir.put(5, packed(LARGE, 5))
    heir.close()
    assert files(folder) == ["states-0", "states-1", "states-2", "states-3"]
    assert DurableStore(lambda: folder).adopt(LARGE, folder, 9) == [0, 1, 2, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dropped_state_stays_until_an_adjoint_below_it_is_written(
    folder: Folder, layout: OrderedLayout
) -> None:
    store = opened(folder, layout)
    for key in range(4):
        assert store.put(key, packed(layout, key), block=True)
        store.flush()  # a file each
    assert len(files(folder)) == 4
    store.release(4)
    for key in (3, 2):
        store.drop(key)
        with pytest.raises(CheckpointLost):
            store.get(key)
    store.flush()
    assert len(files(folder)) == 4
    store.release(3)  # an adjoint at step 3: state 2 is needed next
    store.drop(1)
    store.flush()
    assert len(files(folder)) == 3
    store.close()
    assert DurableStore(lambda: folder).adopt(layout, folder, 3) == [0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["dropped", "lost", "read ahead and lost"])
def test_a_state_whose_write_failed_is_written_when_it_is_put_again(
    folder: Folder, how: str, layout: OrderedLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = opened(folder, layout)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "publish", fails)
        assert store.put(5, packed(layout, 5), block=True)
        if how.startswith("read"):
            store.prefetch(5)
        store.flush()
    if how == "dropped":
        store.drop(5)
    else:
        assert not store.wait_written(5)
    assert store.put(5, packed(layout, 5), block=True)
    assert store.wait_written(5) and value(store, 5) == 5 / 3
    store.close()


def test_an_idle_writer_writes_at_once_and_a_busy_one_fills_the_batch(folder: Folder) -> None:
    store, gate = opened(folder, SMALL), threading.Event()
    assert store.put(0, packed(SMALL, 0))
    store.flush()
    assert len(files(folder)) == 1
    store.submit(lambda: bool(gate.wait()) and None)
    for key in range(1, 50):
        assert store.put(key, packed(SMALL, key))
    gate.set()
    store.flush()
    assert len(files(folder)) == 2
    store.close()


def test_a_batch_that_fills_is_written_as_one(folder: Folder) -> None:
    store = DurableStore(lambda: folder, linger_s=3600)
    store.open(SMALL)
    for key in range(30):
        assert store.put(key, packed(SMALL, key))
    assert files(folder) == []
    assert value(store, 7) == 7 / 3  # wanted: it goes to the disk now
    assert len(files(folder)) == 1
    for key in range(30, 60):
        assert store.put(key, packed(SMALL, key))
    store.close()
    assert len(files(folder)) == 2


def test_full_buffers_refuse(folder: Folder) -> None:
    layout = OrderedLayout.of(np.zeros(30_000))  # four to a batch
    store, gate = opened(folder, layout), threading.Event()
    store.submit(lambda: bool(gate.wait()) and None)
    taken = [store.put(key, packed(layout, key)) for key in range(14)]
    assert taken == [True] * 12 + [False] * 2
    assert store.stats.refused == 2
    gate.set()
    assert store.put(20, packed(layout, 20), block=True)
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_refuses_and_warns_once(
    folder: Folder, layout: OrderedLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(folder, layout)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "publish", full)
    assert store.put(1, packed(layout, 1), block=True)
    store.flush()
    with pytest.warns(CheckpointWarning, match="no space is left"):
        assert not store.wait_written(1)
    assert not store.put(2, packed(layout, 2), block=True)
    assert store.stats.refused == 1
    with pytest.raises(CheckpointLost):
        store.get(1)
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "gone", "link", "swap"])
def test_a_file_that_was_harmed_is_a_lost_checkpoint(
    folder: Folder, layout: OrderedLayout, harm: str
) -> None:
    store = opened(folder, layout)
    for key in (1, 2):
        assert store.put(key, packed(layout, key), block=True)
        store.flush()
    path, other = (folder.path / name for name in files(folder))
    data = path.read_bytes()
    if harm == "flip":
        path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    elif harm == "cut":
        os.truncate(path, len(data) - 1)
    elif harm == "longer":
        path.write_bytes(data + b"\0")
    elif harm == "swap":
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
        if harm == "link":
            path.symlink_to(other)
    with pytest.raises(CheckpointLost):
        store.get(1)
    assert value(store, 2) == 2 / 3
    store.close()
    # Whoever comes next either finds it bad at once or when it is read.
    heir = DurableStore(lambda: folder)
    found = heir.adopt(layout, folder, 9)
    heir.open(layout)
    if 1 in found:
        with pytest.raises(CheckpointLost):
            heir.get(1)
    assert value(heir, 2) == 2 / 3
    heir.close()
