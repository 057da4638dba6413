"""Things of any size in a store whose records are all of one size: pages.

A `Store` is opened for states of one layout.  Where states differ in size from
step to step, or tapes travel too, each is cut into *pages* of equal size, which are
the records of the store below.  Its arrays lie in the pages one after the other,
each at a multiple of 64 bytes; a page that lies within one array is handed on as
a view, every other one is copied.

A thing is stored when all its pages are, and lost with the first that is lost: a
page that is missing is never made up for.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield, whole
from .base import CheckpointLost, Store, TransferRecord
from .wrapper import WrapperStore

_ALIGN = 64
_COPIED = 8  # pages that are copies may be waiting to be written
_PAGES = 16  # of the largest thing: of a smaller one half a page is lost on average
# From here on a store writes a page by reference, and is asked for no copy of it.
_LARGE_BYTES, _BY_REFERENCE_BYTES = 1 << 20, 512 << 10


def page_bytes_for(largest_bytes: int) -> int:
    """Return the size of pages for things of at most so many bytes.

    Examples
    --------
    >>> page_bytes_for(1 << 16), page_bytes_for(1 << 30) >> 20
    (4096, 64)
    """
    share = -(-largest_bytes // (_PAGES * _ALIGN)) * _ALIGN
    least = _BY_REFERENCE_BYTES if largest_bytes >= _LARGE_BYTES else _ALIGN
    return max(least, share)


def cut(
    lengths: Sequence[int], page_bytes: int, align: int = 1
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what lies in each page: the number of a line, and its bytes from and to.

    Parameters
    ----------
    lengths : sequence of int
        Of lines that lie one after the other.
    align : int
        Each begins at a multiple of this; a page is one too.

    Examples
    --------
    >>> list(cut([3, 6], 4)), list(cut([3, 6], 4, align=2))
    ([[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 6)]], [[(0, 0, 3)], [(1, 0, 4)], [(1, 4, 6)]])
    """
    parts: list[tuple[int, int, int]] = []
    room = page_bytes
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            parts.append((number, start, stop))
            room -= -(-(stop - start) // align) * align
            start = stop
            if not room:
                yield parts
                parts, room = [], page_bytes
    if parts:
        yield parts


@dataclass(slots=True)
class _Thing:
    """What is stored under one key."""

    pages: range
    shapes: list[tuple[tuple[int, ...], np.dtype[Any]]]
    nbytes: int
    # What the store below may still be reading, by page, until it is written.
    sent: dict[int, Array] = field(default_factory=dict)


class PagedStore(WrapperStore):
    """A store of things of any size, on one of records of equal size.

    It is a `Store` but for this: each `put` may have other arrays, and `get`
    returns arrays of those shapes.

    Parameters
    ----------
    store : Store
        Closed; opened and closed with this one, and not to be used meanwhile.
    largest_bytes : int
        The largest thing to be put; larger ones are refused.
    page_bytes : int, optional
        A multiple of 64; by default a sixteenth of the largest thing.
    things : int, optional
        How many of them may be waiting to be written; as many as states without pages if
        not given.

    Notes
    -----
    For one computing thread.  `put` with `block`, `wait_written`, `get` and
    `close` may block; so may a `put` that is refused half way, for the pages that
    were taken, and one that copies while eight copies wait to be written.  While it
    is read, a thing takes its bytes twice: in pages, and put together.  `buffer_bytes`
    counts both.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> store = PagedStore(MemoryStore(), 800)
    >>> store.open()
    >>> store.put(3, [np.arange(5.0), np.array(True)]), store.put(4, [np.arange(70)])
    (True, True)
    >>> store.get(3)
    [array([0., 1., 2., 3., 4.]), array(True)]
    >>> store.close()
    """

    def __init__(
        self,
        store: Store,
        largest_bytes: int,
        page_bytes: int | None = None,
        *,
        things: int | None = None,
    ) -> None:
        if largest_bytes < 1:
            raise ArgumentError(f"largest_bytes={largest_bytes} must be at least 1")
        page = page_bytes_for(largest_bytes) if page_bytes is None else page_bytes
        if page < _ALIGN or page % _ALIGN:
            raise ArgumentError(f"page_bytes={page} must be a multiple of {_ALIGN}, at least that")
        super().__init__(store)
        self.store = store
        self.largest_bytes = largest_bytes
        self.page_bytes = page
        self._most_waiting = self.queue_depth if things is None else max(things, self.queue_depth)
        self.page_layout = Layout.of(np.zeros(page, np.uint8))
        self._transfers: deque[TransferRecord] = deque(maxlen=100_000)
        self._things: dict[int, _Thing] = {}
        self._firsts: list[int] = []  # of the pages of each put, ascending
        self._keys: list[int] = []
        self._next = 0
        self._copied: deque[tuple[int, _Thing]] = deque()  # pages, oldest first
        self._opened = False

    # ------------------------------------------------------------------- life

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Finished transfers of pages, each with the key of its thing."""
        records = self.store.transfers
        while records:
            record = records.popleft()
            at = bisect_right(self._firsts, record.key) - 1
            self._transfers.append(record._replace(key=self._keys[at]) if at >= 0 else record)
        return self._transfers

    @property
    def counts_reads(self) -> bool:
        """Whether `buffer_bytes` includes things that are read ahead: no."""
        return False

    def read_in_order(self, depth: int) -> None:
        """Do nothing: pages are read in the order of the things they make up."""

    def pages_of(self, nbytes: int) -> int:
        """Return how many pages a thing of one array of so many bytes takes."""
        return max(1, -(-nbytes // self.page_bytes))

    def buffer_bytes(self, layout: Layout | None = None) -> int:
        """Return the bytes of buffers: of the store below, of copies, of a thing put together."""
        copied = _COPIED * self.page_bytes
        return self.store.buffer_bytes(self.page_layout) + copied + self.largest_bytes

    def capacity_states(self, layout: Layout | None = None) -> int | None:
        """Return how many of the largest things it can hold, None if unbounded."""
        pages = self.store.capacity_states(self.page_layout)
        return None if pages is None else pages // self.pages_of(self.largest_bytes)

    def open(self, layout: Layout | None = None) -> None:
        """Open the store below for pages.  Raises StoreError."""
        whole(self._open, self.close)

    def _open(self) -> None:
        depth = self._most_waiting * self.pages_of(self.largest_bytes)
        self.store.open(self.page_layout)
        self._opened, self.stats = True, self.store.stats  # writes and reads are those of pages
        self.store.queue_depth = depth
        self._things, self._firsts, self._keys, self._next = {}, [], [], 0
        self._copied.clear()
        self._transfers.clear()

    def close(self) -> None:
        """Close the store below.  May be called twice."""
        with Shield(up=True):
            try:
                self.store.close()
            finally:
                if self._opened:
                    self._opened = False
                    self.store.queue_depth = self.queue_depth
                self._things.clear()
                self._copied.clear()

    # ----------------------------------------------------------------- things

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one thing: C-contiguous arrays of any shapes; see `Store.put`."""
        shapes = [(array.shape, array.dtype) for array in arrays]
        nbytes = sum(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)
        if nbytes > -(-self.largest_bytes // _ALIGN) * _ALIGN + _ALIGN * len(arrays):
            raise ArgumentError(
                f"put of {nbytes} bytes in a store of things of at most {self.largest_bytes}"
            )
        first = self._next
        thing = _Thing(range(first, first), shapes, nbytes)
        for page in self._cut(arrays):
            if not self.store.put(self._next, [page], block=block):
                for number in thing.pages:  # the caller's arrays are his own again after this
                    self.store.wait_written(number)
                    self.store.drop(number)
                return False
            if page.base is None:
                self._copied.append((self._next, thing))
            thing.sent[self._next] = page
            self._next += 1
            thing.pages = range(first, self._next)
            del page  # or it would be there beside the next
        self._firsts.append(first)
        self._keys.append(key)
        self._things[key] = thing
        return True

    def _cut(self, arrays: Sequence[Array]) -> Iterator[Array]:
        """Yield the pages of some arrays, the rest of the last one zeros; at least one."""
        lines = [array.reshape(-1).view(np.uint8) for array in arrays]
        for parts in cut([len(line) for line in lines], self.page_bytes, _ALIGN):
            number, start, stop = parts[0]
            if stop - start == self.page_bytes:
                yield lines[number][start:stop]
                continue
            page, at = self._copy(), 0
            for number, start, stop in parts:
                page[at : at + stop - start] = lines[number][start:stop]
                at += -(-(stop - start) // _ALIGN) * _ALIGN
            yield page
            del page  # or it would be there beside the next
        if not any(map(len, lines)):
            yield self._copy()

    def waits(self, lengths: Sequence[int] = ()) -> bool:
        """Whether a `put` with `block` of arrays of so many bytes would wait for others now.

        Where the store below cannot tell which writes have ended, this waits for copies as
        `put` does.
        """
        parts = cut(lengths, self.page_bytes, _ALIGN)
        copies = sum(each[0][2] - each[0][1] < self.page_bytes for each in parts)
        room = _COPIED - min(copies if any(lengths) else 1, _COPIED)
        copied = self._copied
        while len(copied) > room and self.store.ended(copied[0][0], 0.0):
            self._reap()
        return len(copied) > room or self.store.waits()

    def _copy(self) -> Array:
        """Return a page of zeros, once no more copies than may be are waiting."""
        while len(self._copied) >= _COPIED:
            self._reap()
        return np.zeros(self.page_bytes, np.uint8)

    def _reap(self) -> None:
        """Let the oldest copy go, once the store below is done with it."""
        number, thing = self._copied.popleft()
        if number in thing.sent:
            self.store.wait_written(number)  # `ended` may be true of a store that cannot tell
            del thing.sent[number]

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are its owner's again; False if they are lost."""
        thing = self._things.get(key)
        if thing is None:
            return False
        written = [self.store.wait_written(number) for number in thing.pages]
        thing.sent.clear()
        if not all(written):
            self.drop(key)
            return False
        return True

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for all pages of `key`, no longer than so many seconds; see `Store.ended`."""
        thing = self._things.get(key)
        ends_s = time.perf_counter() + timeout_s
        return thing is None or all(
            self.store.ended(number, max(0.0, ends_s - time.perf_counter()))
            for number in thing.pages
        )

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for all pages of `key`, no longer than so many seconds; see `Store.arrived`."""
        thing = self._things.get(key)
        ends_s = time.perf_counter() + timeout_s
        return thing is None or all(
            self.store.arrived(number, max(0.0, ends_s - time.perf_counter()))
            for number in thing.pages
        )

    def cancel(self, key: int) -> None:
        """Give up the pages of `key` that are not written; see `Store.cancel`."""
        thing = self._things.get(key)
        for number in () if thing is None else reversed(thing.pages):
            self.store.cancel(number)

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still in flight."""
        thing = self._things.get(key)
        for number in () if thing is None else thing.pages:
            self.store.prefetch(number)

    def get(self, key: int) -> list[Array]:
        """Block until `key` is read; return its arrays, read-only.  Raises CheckpointLost."""
        thing = self._things.get(key)
        if thing is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        record = np.empty(thing.nbytes, np.uint8)
        try:
            for k, number in enumerate(thing.pages):
                part = record[k * self.page_bytes : (k + 1) * self.page_bytes]
                part[...] = self.store.get(number)[0][: len(part)]
        except CheckpointLost:
            self.drop(key)
            raise
        record.flags.writeable = False
        arrays, at = [], 0
        for shape, dtype in thing.shapes:
            count = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            arrays.append(record[at : at + count].view(dtype).reshape(shape))
            at += -(-count // _ALIGN) * _ALIGN
        return arrays

    def drop(self, key: int) -> None:
        """Free the copy of `key`.  Unknown keys are ignored."""
        thing = self._things.pop(key, None)
        for number in () if thing is None else thing.pages:
            self.store.drop(number)
