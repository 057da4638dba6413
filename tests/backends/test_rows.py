"""Rows of any length in memory and in files: what comes back, what is refused, what is lost."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multistage.backends import FileStore, MemoryStore
from multistage.backends.base import CheckpointLost
from multistage.backends.file_rows import FileRows, PagePool
from multistage.backends.rows import MemoryRows, RowStore, buffers_for_rows, rows_of

PAGE = PIECE = 4096


def never() -> bool:
    return False


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., RowStore]]:
    """Return what makes rows of a capacity; they are closed at the end."""
    made: list[RowStore] = []

    def rows(capacity_bytes: int | None = None) -> RowStore:
        kind: Any = MemoryRows if request.param == "memory" else lambda *a: FileRows(tmp_path, *a)
        made.append(kind(capacity_bytes, PIECE))
        return made[-1]

    yield rows
    for each in made:
        each.close()
    assert not list(tmp_path.iterdir())


def drawn(rng: random.Random) -> list[Any]:
    lengths = [rng.choice([0, 1, 7, PIECE - 1, PIECE, 3 * PIECE + 5]) for _ in range(4)]
    return [np.frombuffer(rng.randbytes(n), np.uint8) for n in lengths]


def test_rows_come_back_as_they_were(make: Callable[..., RowStore]) -> None:
    rows, rng = make(), random.Random(0)
    there: dict[int, list[Any]] = {}
    for _ in range(60):
        lines = drawn(rng)
        key = rows.put(lines, never)
        assert key is not None and key not in there
        there[key] = lines
        for gone in rng.sample(sorted(there), len(there) // 3):
            rows.drop(gone)
            del there[gone]
        for key, lines in there.items():
            wanted = [rng.random() < 0.7 for _ in lines]
            back = [np.zeros_like(a) if w else len(a) for a, w in zip(lines, wanted, strict=True)]
            rows.read(key, back, never)
            for a, b in zip(lines, back, strict=True):
                assert isinstance(b, int) or np.array_equal(a, b)


def test_a_row_that_does_not_fit_is_refused_until_another_is_dropped(
    make: Callable[..., RowStore],
) -> None:
    rows, line = make(3 * PIECE), np.ones(2 * PIECE, np.uint8)
    key = rows.put([line], never)
    assert key is not None
    assert rows.put([line], never) is None
    rows.drop(key)
    assert rows.put([line], never) is not None


def test_a_row_that_is_cancelled_takes_no_room(make: Callable[..., RowStore]) -> None:
    rows, line = make(4 * PIECE), np.ones(4 * PIECE, np.uint8)
    asked = iter([False, False, True])
    assert rows.put([line], lambda: next(asked)) is None
    assert rows.put([line], never) is not None


def test_dropped_and_stopped_rows_are_lost(make: Callable[..., RowStore]) -> None:
    rows, line = make(), np.ones(8, np.uint8)
    key = rows.put([line], never)
    assert key is not None
    with pytest.raises(CheckpointLost, match="closed"):
        rows.read(key, [line.copy()], lambda: True)
    rows.drop(key)
    rows.drop(key)
    with pytest.raises(CheckpointLost, match="no row"):
        rows.read(key, [line.copy()], never)


def test_memory_is_used_again_and_bounded() -> None:
    rows, held = MemoryRows(None, PIECE), []
    for length in (5 * PIECE, 5 * PIECE, 3 * PIECE, 2 * PIECE, PIECE):
        key = rows.put([np.ones(length, np.uint8)], never)
        assert key is not None
        held.append(rows._rows[key])
        rows.drop(key)
    assert held[0] is held[1]
    assert rows._free_bytes <= 1.25 * 5 * PIECE


def test_memory_that_is_used_again_is_within_the_capacity() -> None:
    rows = MemoryRows(8 * PIECE, PIECE)
    for length in (8 * PIECE, 2 * PIECE):
        key = rows.put([np.ones(length, np.uint8)], never)
        assert key is not None
        assert rows._live_bytes + rows._free_bytes <= 8 * PIECE
        rows.drop(key)


def test_bytes_that_changed_in_the_file_are_lost(tmp_path: Path) -> None:
    rows = FileRows(tmp_path, None, PIECE)
    key = rows.put([np.arange(3 * PIECE, dtype=np.uint8)], never)
    assert key is not None
    page = np.zeros(2 * PIECE, np.uint8)
    start = -page.ctypes.data % PIECE
    rows._file.write(1, 0, page[start : start + PIECE])
    with pytest.raises(CheckpointLost, match="checksum"):
        rows.read(key, [3 * PIECE], never)
    rows.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_refuses_and_a_broken_one_raises(tmp_path: Path, code: int) -> None:
    rows = FileRows(tmp_path, None, PIECE)
    write, line = rows._file.write, np.ones(2 * PIECE, np.uint8)

    def failing(slot: int, offset: int, data: Any) -> None:
        if slot:
            raise OSError(code, "no")
        write(slot, offset, data)

    rows._file.write = failing  # type: ignore[method-assign]
    if code == errno.ENOSPC:
        assert rows.put([line], never) is None
    else:
        with pytest.raises(OSError, match="no"):
            rows.put([line], never)
    rows._file.write = write  # type: ignore[method-assign]
    assert rows.put([line], never) is not None
    rows.close()


def test_stores_that_are_more_than_memory_or_a_file_take_pages(tmp_path: Path) -> None:
    class Other(MemoryStore):
        pass

    for store in (Other(), FileStore(tmp_path, "aiofiles")):
        assert buffers_for_rows(store, PIECE) is None
        assert rows_of(store, PIECE) is None


def test_a_row_is_refused_only_if_too_few_pages_are_free(tmp_path: Path) -> None:
    """Whatever their lengths, and in whatever order others were dropped."""
    most, rng = 24, random.Random(0)
    rows, there = FileRows(tmp_path, most * PAGE + 100, 2 * PAGE), dict[int, Any]()
    accepted = refused = 0
    for _ in range(600):
        line = np.frombuffer(rng.randbytes(rng.randrange(8 * PAGE)), np.uint8)
        taken = sum(-(-len(each) // PAGE) for each in there.values())
        key = rows.put([line], never)
        assert (key is not None) == (taken - (-len(line) // PAGE) <= most)
        if key is not None:
            there[key] = line
            accepted += 1
            continue
        refused += 1
        for gone in rng.sample(sorted(there), len(there) // 2):
            rows.drop(gone)
            del there[gone]
        for key, line in there.items():
            rows.read(key, [back := np.zeros_like(line)], never)
            assert np.array_equal(back, line)
    assert accepted > 100 and refused > 50
    for key in there:
        rows.drop(key)
    assert rows.put([np.ones(most * PAGE, np.uint8)], never) is not None
    assert rows._pages.take(1) is None
    rows.close()


def test_free_pages_that_lie_side_by_side_are_one_run() -> None:
    pool = PagePool(None)
    runs = [pool.take(2) for _ in range(6)]
    for number in (1, 3, 2):
        pool.give(runs[number] or [])
    assert pool.take(6) == [(2, 6)]  # before the file grows
    assert pool.take(0) == []
    for number in (4, 5, 0):
        pool.give(runs[number] or [])
    assert pool.take(3) == [(8, 3)]
    assert pool.take(1) == [(0, 1)]
