"""Rows of bytes of any length, in host memory or in a file, moved by the calling thread.

A `Store` keeps records of one layout; rows of any length then travel in pages, each a
record of its own.  Where the tier is host memory or a file, rows need none of that: in
memory a row is one copy each way, in a file it passes through one buffer, piece by piece,
and the interpreter is free to run other threads all the while.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ..states.layout import Array
from .arena import PAGE, pages, round_up
from .base import CheckpointLost, Store
from .direct import DirectFile
from .files import FileStore
from .medium import is_full
from .memory import MemoryStore
from .private import PrivateFolder

_SPARE = 1.25  # of the most bytes that rows took, buffers that are held altogether


class RowStore(Protocol):
    """Holds rows; for one thread."""

    def put(self, lines: Sequence[Array], cancelled: Callable[[], bool]) -> int | None:
        """Write lines of uint8 as a row; return its key, None if there is no room.

        Parameters
        ----------
        lines : sequence of array
        cancelled : callable
            Asked before each piece whether the row is wanted no more; None is returned then.

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


class FileRows:
    """Rows in a file that is gone with the process.

    Parameters
    ----------
    folder : Path
        See `FileStore`.
    capacity_bytes : int or None
        Most bytes of the file; None for all there are.
    piece_bytes : int
        Written and read at a time, through one buffer; each piece has a checksum.

    Raises
    ------
    OSError, MemoryError, StoreError
        If the folder cannot be used.

    Notes
    -----
    A row has whole pages of the file.  Those of one that was dropped are used again by one
    of as many pages, as rows of the next iteration are; all of the file once it is empty.
    """

    def __init__(self, folder: Path, capacity_bytes: int | None, piece_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._buffer = pages(round_up(piece_bytes))
        self._private = PrivateFolder(folder)
        try:
            self._file = DirectFile(
                self._private.path, PAGE, capacity_bytes, dir_fd=self._private.fd
            )
        except BaseException:
            self._private.remove()
            raise
        self._rows: dict[int, tuple[int, int, list[int]]] = {}  # first page, bytes, checksums
        self._free: dict[int, list[int]] = {}  # first pages, by number of pages
        self._next_key = self._next_page = 0

    def put(self, lines: Sequence[Array], cancelled: Callable[[], bool]) -> int | None:
        """Write lines as a row; see `RowStore.put`."""
        nbytes = sum(map(len, lines))
        first = self._take(nbytes)
        if first is None:
            return None
        sums: list[int] = []
        try:
            taken = self._write(lines, first, sums, cancelled)
        except BaseException as error:
            self._give_back(first, nbytes)
            if is_full(error):
                return None
            raise
        if not taken:
            self._give_back(first, nbytes)
            return None
        key = self._next_key
        self._next_key += 1
        self._rows[key] = first, nbytes, sums
        return key

    def _write(
        self, lines: Sequence[Array], page: int, sums: list[int], cancelled: Callable[[], bool]
    ) -> bool:
        """Gather lines in the buffer and write it whenever it is full; False if cancelled."""
        buffer, filled = self._buffer, 0

        def flush() -> int:
            sums.append(xxhash.xxh3_64_intdigest(buffer[:filled].data))
            self._file.write(page, 0, buffer[: round_up(filled)])
            return page + round_up(filled) // PAGE

        for line in lines:
            start = 0
            while start < len(line):
                if not filled and cancelled():
                    return False
                part = line[start : start + len(buffer) - filled]
                np.copyto(buffer[filled : filled + len(part)], part)
                filled += len(part)
                start += len(part)
                if filled == len(buffer):
                    page, filled = flush(), 0
        if filled:
            flush()
        return True

    def read(self, key: int, targets: Sequence[Array | int], stopped: Callable[[], bool]) -> None:
        """Read a row into lines; see `RowStore.read`."""
        if key not in self._rows:
            raise CheckpointLost(f"tier 'file' has no row {key}")
        page, left, sums = self._rows[key]
        parts = iter([(t, t) if isinstance(t, int) else (len(t), t) for t in targets])
        length, target = next(parts, (0, 0))
        at = 0  # in the line
        for checksum in sums:
            if stopped():
                raise CheckpointLost("the tier was closed")
            piece = self._buffer[: min(left, len(self._buffer))]
            self._load(page, piece, checksum)
            page += round_up(len(piece)) // PAGE
            left -= len(piece)
            start = 0
            while start < len(piece):
                if at == length:
                    (length, target), at = next(parts), 0
                    continue
                count = min(length - at, len(piece) - start)
                if not isinstance(target, int):
                    np.copyto(target[at : at + count], piece[start : start + count])
                at, start = at + count, start + count

    def _load(self, page: int, piece: Array, checksum: int) -> None:
        try:
            self._file.read(page, self._buffer[: round_up(len(piece))])
            if xxhash.xxh3_64_intdigest(piece.data) != checksum:
                raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")
        except OSError as error:
            raise CheckpointLost(f"read failed: {error}") from error

    def drop(self, key: int) -> None:
        """Free a row.  Unknown keys are ignored."""
        if key in self._rows:
            first, nbytes, _ = self._rows.pop(key)
            self._give_back(first, nbytes)

    def close(self) -> None:
        """Close the file, which is gone then, and remove its folder.  May be called twice."""
        self._rows.clear()
        self._free.clear()
        try:
            self._file.close()
        finally:
            self._private.remove()

    def _take(self, nbytes: int) -> int | None:
        """Return the first of free pages in a row, None if there is no room."""
        if not self._rows:
            self._free.clear()
            self._next_page = 0
        count = round_up(nbytes) // PAGE
        if free := self._free.get(count):
            return free.pop()
        first = self._next_page
        if self._capacity_bytes is not None and (first + count) * PAGE > self._capacity_bytes:
            return None
        self._next_page += count
        return first

    def _give_back(self, first: int, nbytes: int) -> None:
        self._free.setdefault(round_up(nbytes) // PAGE, []).append(first)
