"""Rows of bytes of any length in a file, moved by the calling thread: `FileRows`."""

from __future__ import annotations

import errno
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from ..states.layout import Array
from .arena import PAGE, pages, round_up
from .base import CheckpointLost
from .direct import DirectFile
from .medium import is_full
from .private import PrivateFolder


class PagePool:
    """The pages of a file, taken and given back in runs.

    Parameters
    ----------
    most : int or None
        How many there are; None if unbounded.

    Examples
    --------
    >>> pool = PagePool(6)
    >>> pool.take(2), pool.take(1), pool.take(2), pool.take(2)
    ([(0, 2)], [(2, 1)], [(3, 2)], None)
    >>> pool.give([(0, 2)]); pool.give([(3, 2)])
    >>> pool.take(5)
    [(3, 3), (0, 2)]
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._free: list[tuple[int, int]] = []  # first page, pages; ascending, none adjacent
        self._end = 0  # from here on none is taken

    def take(self, count: int) -> list[tuple[int, int]] | None:
        """Return the first page and the length of each run; None if too few pages are free.

        One run if any is long enough, the shortest such; else the longest first.
        """
        if not count:
            return []
        left = None if self._most is None else self._most - self._end
        fitting = [run for run in self._free if run[1] >= count]
        if fitting:
            return [self._cut(min(fitting, key=lambda run: run[1]), count)]
        if left is None or left >= count:
            return [self._grown(count)]
        if left + sum(length for _, length in self._free) < count:
            return None
        taken = []
        for run in sorted([*self._free, (self._end, left)], key=lambda run: -run[1]):
            length = min(count, run[1])
            if length:
                taken.append(self._grown(length) if run[0] == self._end else self._cut(run, length))
            count -= length
        return taken

    def _cut(self, run: tuple[int, int], count: int) -> tuple[int, int]:
        """Take pages from the beginning of a free run."""
        (first, length), at = run, self._free.index(run)
        self._free[at : at + 1] = [(first + count, length - count)] if length > count else []
        return first, count

    def _grown(self, count: int) -> tuple[int, int]:
        """Take pages from the end."""
        self._end += count
        return self._end - count, count

    def give(self, runs: Sequence[tuple[int, int]]) -> None:
        """Give pages back."""
        free = self._free
        for first, length in runs:
            start, stop = first, first + length
            at = bisect(free, (start, 0))
            if at < len(free) and free[at][0] == stop:
                stop += free.pop(at)[1]
            if at and sum(free[at - 1]) == start:
                at -= 1
                start = free.pop(at)[0]
            if stop == self._end:
                self._end = start
            else:
                free.insert(at, (start, stop - start))


class _Piece(NamedTuple):
    """What was written at once."""

    page: int
    nbytes: int
    checksum: int


class _Row(NamedTuple):
    runs: list[tuple[int, int]]
    pieces: list[_Piece]


class FileRows:
    """Rows in a file that is gone with the process; a `RowStore`.

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
    A row has whole pages of the file, one after the other where so many are free in a row,
    else in several places.  So one is refused only if too few pages are free altogether.
    """

    def __init__(self, folder: Path, capacity_bytes: int | None, piece_bytes: int) -> None:
        self._buffer = pages(round_up(piece_bytes))
        self._private = PrivateFolder(folder)
        try:
            self._file = DirectFile(
                self._private.path, PAGE, capacity_bytes, dir_fd=self._private.fd
            )
        except BaseException:
            self._private.remove()
            raise
        self._pages = PagePool(None if capacity_bytes is None else capacity_bytes // PAGE)
        self._rows: dict[int, _Row] = {}
        self._next_key = 0

    def put(self, lines: Sequence[Array], cancelled: Callable[[], bool]) -> int | None:
        """Write lines as a row; see `RowStore.put`."""
        runs = self._pages.take(round_up(sum(map(len, lines))) // PAGE)
        if runs is None:
            return None
        pieces: list[_Piece] = []
        try:
            taken = self._write(lines, runs, pieces, cancelled)
        except BaseException as error:
            self._pages.give(runs)
            if is_full(error):
                return None
            raise
        if not taken:
            self._pages.give(runs)
            return None
        key = self._next_key
        self._next_key += 1
        self._rows[key] = _Row(runs, pieces)
        return key

    def _places(self, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the first page and the room, in bytes, of each piece."""
        most = len(self._buffer) // PAGE
        for first, length in runs:
            for at in range(0, length, most):
                yield first + at, min(most, length - at) * PAGE

    def _write(
        self,
        lines: Sequence[Array],
        runs: Sequence[tuple[int, int]],
        pieces: list[_Piece],
        cancelled: Callable[[], bool],
    ) -> bool:
        """Gather lines in the buffer and write each piece once it is full; False if cancelled."""
        buffer, places = self._buffer, self._places(runs)
        (page, room), filled = next(places, (0, 0)), 0

        def flush() -> None:
            checksum = xxhash.xxh3_64_intdigest(buffer[:filled].data)
            self._file.write(page, 0, buffer[: round_up(filled)])
            pieces.append(_Piece(page, filled, checksum))

        for line in lines:
            start = 0
            while start < len(line):
                if not filled and cancelled():
                    return False
                part = line[start : start + room - filled]
                np.copyto(buffer[filled : filled + len(part)], part)
                filled += len(part)
                start += len(part)
                if filled == room:
                    flush()
                    (page, room), filled = next(places, (0, 0)), 0
        if filled:
            flush()
        return True

    def read(self, key: int, targets: Sequence[Array | int], stopped: Callable[[], bool]) -> None:
        """Read a row into lines; see `RowStore.read`."""
        if key not in self._rows:
            raise CheckpointLost(f"tier 'file' has no row {key}")
        parts = iter([(t, t) if isinstance(t, int) else (len(t), t) for t in targets])
        length, target = next(parts, (0, 0))
        at = 0  # in the line
        for piece in self._rows[key].pieces:
            if stopped():
                raise CheckpointLost("the tier was closed")
            data, start = self._loaded(piece), 0
            while start < len(data):
                if at == length:
                    (length, target), at = next(parts), 0
                    continue
                count = min(length - at, len(data) - start)
                if not isinstance(target, int):
                    np.copyto(target[at : at + count], data[start : start + count])
                at, start = at + count, start + count

    def _loaded(self, piece: _Piece) -> Array:
        """Return the bytes of a piece, in the buffer."""
        data = self._buffer[: piece.nbytes]
        try:
            self._file.read(piece.page, self._buffer[: round_up(piece.nbytes)])
            if xxhash.xxh3_64_intdigest(data.data) != piece.checksum:
                raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")
        except OSError as error:
            raise CheckpointLost(f"read failed: {error}") from error
        return data

    def drop(self, key: int) -> None:
        """Free a row.  Unknown keys are ignored."""
        if key in self._rows:
            self._pages.give(self._rows.pop(key).runs)

    def close(self) -> None:
        """Close the file, which is gone then, and remove its folder.  May be called twice."""
        self._rows.clear()
        try:
            self._file.close()
        finally:
            self._private.remove()
