"""Lines of bytes of any length in a `Store`, in pages: what moves at a time.

A *record* is some lines of bytes one after the other.  Each of its pages is a state of the
store, of parts of the lines, taken by reference.  So little memory is needed on the way, and a
record that is needed no more can be given up between two pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ...backends.base import CheckpointLost, Store
from ...states.layout import ALIGN, Layout

PAGE_BYTES = 1 << 20
_LEAST_PAGE_BYTES = 4096
_AHEAD = 3  # pages of a record that are read ahead
DEPTH = 4  # pages whose writes may be waiting
_SHARE = 12  # of a memory limit, the most that buffers should take


def page_for(store: Store, limit_bytes: int | None) -> tuple[int, int]:
    """Return the size of pages for a memory limit, and the bytes of buffers they take.

    The largest whose buffers are small beside the limit.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> page_for(MemoryStore(), 1 << 30)[0]
    1048576
    """
    page_bytes = PAGE_BYTES
    while True:
        taken = store.buffer_bytes(Layout.up_to(page_bytes))
        if limit_bytes is None or _SHARE * taken <= limit_bytes or page_bytes <= _LEAST_PAGE_BYTES:
            return page_bytes, taken
        page_bytes //= 2


def cut(lengths: Sequence[int], page_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what lies in each page: the number of a line, and its bytes from and to.

    In a page each part takes a multiple of 64 bytes, as a page does.

    Examples
    --------
    >>> list(cut([70, 100], 128))
    [[(0, 0, 70)], [(1, 0, 100)]]
    """
    parts: list[tuple[int, int, int]] = []
    room = page_bytes
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            parts.append((number, start, stop))
            room -= -(-(stop - start) // ALIGN) * ALIGN
            start = stop
            if not room:
                yield parts
                parts, room = [], page_bytes
    if parts:
        yield parts


class Pager:
    """Pages in an open store.

    Parameters
    ----------
    store : Store
        Opened for `Layout.up_to(page_bytes)`.
    page_bytes : int
        A multiple of 64.

    Attributes
    ----------
    stopped : bool
        Once another thread sets it, records in flight end at their next page, as lost.

    Notes
    -----
    For one thread at a time, as the store.  `put`, `wait`, `read` may block.
    """

    def __init__(self, store: Store, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.stopped = False
        self._store = store
        self._next_key = 0

    def put(
        self, lines: Sequence[Tensor], cancelled: Callable[[], bool] = lambda: False
    ) -> range | None:
        """Queue the writes of a record; return the keys of its pages.

        None if there was no room, or if it was cancelled.

        Parameters
        ----------
        lines : sequence of Tensor
            Of uint8 and one dimension; unchanged until `wait`.
        cancelled : callable, optional
            Asked before each page whether the record is needed no more.
        """
        start = stop = self._next_key
        for parts in cut([len(line) for line in lines], self.page_bytes):
            page = [_part(lines[number][first:last]) for number, first, last in parts]
            try:
                taken = not self.stopped and not cancelled()
                taken = taken and self._store.put(stop, page, block=True)
            except BaseException:
                self._take_back(range(start, stop))
                raise
            if not taken:
                self._take_back(range(start, stop))
                return None
            stop += 1
            self._next_key = stop
        return range(start, stop)

    def _take_back(self, keys: range) -> None:
        self.wait(keys)
        self.drop(keys)

    def wait(self, keys: range) -> bool:
        """Block until pages have left their lines; return whether all were written."""
        written = [self._store.wait_written(key) for key in keys]  # for every one
        return all(written)

    def prefetch(self, keys: Sequence[int]) -> None:
        """Queue reads of pages.  Never blocks."""
        for key in keys:
            self._store.prefetch(key)

    def read(self, keys: range, lengths: Sequence[int], targets: Sequence[Tensor | None]) -> None:
        """Read a record, some pages ahead.

        Parameters
        ----------
        keys, lengths
            Of the pages, and of the lines that were put.
        targets : sequence of Tensor or None
            Such lines to fill; None for those that are not wanted.

        Raises
        ------
        CheckpointLost
            If a page cannot be read.
        """
        ahead = deque(keys)
        self.prefetch([ahead.popleft() for _ in range(min(_AHEAD, len(ahead)))])
        for key, parts in zip(keys, cut(lengths, self.page_bytes), strict=True):
            if self.stopped:
                raise CheckpointLost("the tier was closed")
            found = self._store.get(key)
            if ahead:
                self.prefetch([ahead.popleft()])
            for (number, start, stop), part in zip(parts, found, strict=True):
                target = targets[number]
                if target is None:
                    continue
                if isinstance(part, Tensor):
                    target[start:stop].copy_(part)
                else:
                    # NumPy lets the interpreter go meanwhile, whatever the length.
                    target[start:stop].numpy()[:] = part

    def drop(self, keys: range) -> None:
        """Free pages."""
        for key in keys:
            self._store.drop(key)


def _part(part: Tensor) -> Any:
    """Return part of a line as the store takes it."""
    return part.numpy() if part.device.type == "cpu" else part
