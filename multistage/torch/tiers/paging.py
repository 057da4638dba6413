"""Rows of bytes of any length in a `Store`, cut into pages of equal size.

A store moves records of one layout; tensors of tapes and states have all sizes.  A
*row* is some lines of bytes one after the other.  Its pages are written by reference
where a page lies within one line, and gathered where it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends.base import CheckpointLost, Store
from ...backends.paged import cut
from ...states.layout import Layout

PAGE_BYTES = 1 << 20
_LEAST_PAGE_BYTES = 4096
_AHEAD = 4  # pages of a row that are read ahead
DEPTH = 4  # pages whose writes may be waiting
_SHARE = 12  # of a memory limit, the most that buffers should take


def page_layout(page_bytes: int) -> Layout:
    """Return the layout of a page."""
    return Layout.of((np.broadcast_to(np.uint8(0), (page_bytes,)),))


def buffers_of(store: Store, page_bytes: int) -> int:
    """Return the bytes of host memory that a store of pages takes on the way.

    Its own buffers, pages that are gathered or read ahead included.
    """
    ahead = 1 if store.counts_reads else _AHEAD
    return store.buffer_bytes(page_layout(page_bytes)) + (ahead + DEPTH + 1) * page_bytes


def page_for(store: Store, limit_bytes: int | None) -> int:
    """Return the size of pages for a memory limit: the largest whose buffers are small beside it.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> page_for(MemoryStore(buffer_bytes=0), 1 << 30)
    1048576
    """
    sizes = []
    page_bytes = PAGE_BYTES
    while page_bytes >= _LEAST_PAGE_BYTES:
        taken = buffers_of(store, page_bytes)
        if limit_bytes is None or _SHARE * taken <= limit_bytes:
            return page_bytes
        sizes.append((taken, page_bytes))
        page_bytes //= 2
    return min(sizes)[1]


class Pager:
    """Pages in an open store.

    Parameters
    ----------
    store : Store
        Opened for `page_layout(page_bytes)`.
    page_bytes : int

    Attributes
    ----------
    stopped : bool
        Once another thread sets it, rows in flight end at their next page, as lost.

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
        """Queue the writes of a row; return the keys of its pages.

        None if there was no room, or if it was cancelled.

        Parameters
        ----------
        lines : sequence of Tensor
            Of uint8 and one dimension; unchanged until `wait`.
        cancelled : callable, optional
            Asked before each page whether the row is needed no more.
        """
        start = stop = self._next_key
        for parts in cut([len(line) for line in lines], self.page_bytes):
            page = [lines[number][first:last] for number, first, last in parts]
            try:
                taken = not self.stopped and not cancelled()
                taken = taken and self._store.put(stop, [self._record(page)], block=True)
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

    def _record(self, parts: Sequence[Tensor]) -> Any:
        """Return a page of full length, as the store takes it."""
        first = parts[0]
        if len(parts) == 1 and len(first) == self.page_bytes:
            return first.numpy() if first.device.type == "cpu" else first
        page = torch.empty(self.page_bytes, dtype=torch.uint8, device=first.device)
        at = 0
        for part in parts:
            page[at : at + len(part)].copy_(part)
            at += len(part)
        page[at:].zero_()  # not what lay there before
        return page.numpy() if page.device.type == "cpu" else page

    def wait(self, keys: range) -> bool:
        """Block until pages have left their lines; return whether all were written."""
        written = [self._store.wait_written(key) for key in keys]  # for every one
        return all(written)

    def prefetch(self, keys: Sequence[int]) -> None:
        """Queue reads of pages.  Never blocks."""
        for key in keys:
            self._store.prefetch(key)

    def read(self, keys: range, lengths: Sequence[int], targets: Sequence[Tensor | None]) -> None:
        """Read a row, some pages ahead.

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
            (found,) = self._store.get(key)
            if ahead:
                self.prefetch([ahead.popleft()])
            at = 0
            for number, start, stop in parts:
                target, part = targets[number], found[at : at + stop - start]
                at += stop - start
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
