"""Rows of bytes of any length, in host memory or in a file, moved by the calling thread.

A `Store` keeps records of one layout; rows of any length then travel in pages, each a
record of its own.  Where the tier is host memory or a file, rows need none of that: in
memory a row is one copy each way, in a file it passes through one buffer, piece by piece,
and the interpreter is free to run other threads all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from ..states.layout import Array
from .arena import pages, round_up
from .base import CheckpointLost, Store
from .file_rows import FileRows
from .files import FileStore
from .memory import MemoryStore

_SPARE = 1.25  # of the most bytes that rows took, buffers that are held altogether


class RowStore(Protocol):
    """Holds rows; for one thread."""

    def put(self, lines: Sequence[Array], cancelled: Callable[[], bool]) -> int | None:
        """Write lines of uint8 as a row; return its key, None if there is no room.

        Parameters
        ----------
        lines : sequence of array
        cancelled : callable
            Asked before each piece whether the row is needed no more; None is returned then.

        Raises
        ------
        OSError, MemoryError
            If it cannot be written.
        """
        ...

    def read(self, key: int, targets: Sequence[Array | int], stopped: Callable[[], bool]) -> None:
        """Read a row into lines like those it was put from; the length of one not wanted.

        Raises
        ------
        CheckpointLost
            If it cannot be read, or once `stopped()`.
        """
        ...

    def drop(self, key: int) -> None:
        """Free a row.  Unknown keys are ignored."""
        ...

    def close(self) -> None:
        """Give everything back.  May be called twice."""
        ...


def buffers_for_rows(store: Store, piece_bytes: int) -> int | None:
    """Return the bytes of buffers that rows in a store need, None if it only takes pages.

    Examples
    --------
    >>> buffers_for_rows(MemoryStore(), 4096), buffers_for_rows(FileStore("."), 4096)
    (0, 4096)
    """
    # Subclasses may do otherwise, and the portable engine has a file for each extent.
    if type(store) is MemoryStore:
        return 0
    if type(store) is FileStore and store.engine != "aiofiles":
        return round_up(piece_bytes)
    return None


def rows_of(store: Store, piece_bytes: int) -> RowStore | None:
    """Return what holds rows in a store's memory or folder, None if it only takes pages.

    Raises
    ------
    OSError, MemoryError, StoreError
        If the tier cannot be used.
    """
    if buffers_for_rows(store, piece_bytes) is None:
        return None
    if isinstance(store, FileStore):
        return FileRows(store.folder, store.capacity_bytes, piece_bytes)
    assert isinstance(store, MemoryStore)
    return MemoryRows(store.capacity_bytes, piece_bytes)


class MemoryRows:
    """Rows in host memory.

    Parameters
    ----------
    capacity_bytes : int or None
        Most bytes of rows; None if unbounded.
    piece_bytes : int
        Copied at a time.

    Notes
    -----
    Buffers are kept for rows of the same length, as those of the next iteration are, up to
    a quarter more than rows have taken at a time, and to the capacity.

    Examples
    --------
    >>> rows, line = MemoryRows(None, 4096), np.arange(5, dtype=np.uint8)
    >>> key = rows.put([line], lambda: False)
    >>> back = np.zeros_like(line)
    >>> rows.read(key, [back], lambda: False)
    >>> back.tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, capacity_bytes: int | None, piece_bytes: int) -> None:
        self._capacity_bytes, self._piece_bytes = capacity_bytes, piece_bytes
        self._rows: dict[int, Array] = {}
        self._free: dict[int, list[Array]] = {}  # by length, those used last at the end
        self._next_key = 0
        self._live_bytes = self._most_bytes = self._free_bytes = 0

    def put(self, lines: Sequence[Array], cancelled: Callable[[], bool]) -> int | None:
        """Copy lines into a row; see `RowStore.put`."""
        nbytes = sum(map(len, lines))
        if self._capacity_bytes is not None and self._live_bytes + nbytes > self._capacity_bytes:
            return None
        row = self._buffer(nbytes)
        at = 0
        for piece in _pieces(lines, self._piece_bytes):
            if cancelled():
                self._give_back(row)
                return None
            np.copyto(row[at : at + len(piece)], piece)
            at += len(piece)
        key = self._next_key
        self._next_key += 1
        self._rows[key] = row
        self._live_bytes += nbytes
        self._most_bytes = max(self._most_bytes, self._live_bytes)
        return key

    def read(self, key: int, targets: Sequence[Array | int], stopped: Callable[[], bool]) -> None:
        """Copy a row into lines; see `RowStore.read`."""
        row = self._rows.get(key)
        if row is None:
            raise CheckpointLost(f"tier 'memory' has no row {key}")
        at = 0
        for target in targets:
            if isinstance(target, int):
                at += target
                continue
            for piece in _pieces([target], self._piece_bytes):
                if stopped():
                    raise CheckpointLost("the tier was closed")
                np.copyto(piece, row[at : at + len(piece)])
                at += len(piece)

    def drop(self, key: int) -> None:
        """Free a row.  Unknown keys are ignored."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._live_bytes -= len(row)
            self._give_back(row)

    def close(self) -> None:
        """Free all rows."""
        self._rows.clear()
        self._free.clear()
        self._live_bytes = self._free_bytes = 0

    def _buffer(self, nbytes: int) -> Array:
        """Return a buffer that was used before, if there is one of this length."""
        if spare := self._free.get(nbytes):
            self._free_bytes -= nbytes
            return spare.pop()
        live_bytes = self._live_bytes + nbytes
        most_bytes = _SPARE * max(self._most_bytes, live_bytes)
        if self._capacity_bytes is not None:
            most_bytes = min(most_bytes, self._capacity_bytes)
        if live_bytes + self._free_bytes > most_bytes:
            self._free.clear()
            self._free_bytes = 0
        return pages(nbytes)[:nbytes]

    def _give_back(self, row: Array) -> None:
        self._free.setdefault(len(row), []).append(row)
        self._free_bytes += len(row)


def _pieces(lines: Sequence[Array], most_bytes: int) -> Iterator[Array]:
    """Yield lines in pieces of at most so many bytes."""
    for line in lines:
        for start in range(0, len(line), most_bytes):
            yield line[start : start + most_bytes]
