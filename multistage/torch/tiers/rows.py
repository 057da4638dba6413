"""Rows of bytes in a store: as a row each where the store allows that, else in pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ...backends.base import Store
from ...backends.rows import RowStore, buffers_for_rows, rows_of
from ...errors import StoreError
from .paging import PAGE_BYTES, Pager, buffers_of, page_for, page_layout

_LEAST_BYTES = 4096
_SHARE = 12  # of a memory limit, the most that the buffer of rows takes


class Rows(Protocol):
    """Rows of bytes in an open store; see `Pager`."""

    page_bytes: int
    stopped: bool

    def put(self, lines: Sequence[Tensor], cancelled: Callable[[], bool]) -> range | None:
        """Queue the writes of a row; return its keys, None if it is refused or cancelled."""

    def wait(self, keys: range) -> bool:
        """Block until a row has left its lines; return whether it was written."""

    def read(self, keys: range, lengths: Sequence[int], targets: Sequence[Tensor | None]) -> None:
        """Read a row."""

    def drop(self, keys: range) -> None:
        """Free a row."""

    def close(self) -> None:
        """Give back what was opened beside the store.  May be called twice."""


def page_and_buffers(store: Store, limit_bytes: int | None) -> tuple[int, int]:
    """Return what is moved at a time within a memory limit, and the bytes of buffers it takes.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> page_and_buffers(MemoryStore(buffer_bytes=0), 1 << 30)[0]
    1048576
    """
    page_bytes = PAGE_BYTES
    while page_bytes > _LEAST_BYTES and limit_bytes is not None:
        if _SHARE * page_bytes <= limit_bytes:
            break
        page_bytes //= 2
    buffers = buffers_for_rows(store, page_bytes)
    if buffers is not None:
        return page_bytes, buffers + store.buffer_bytes(page_layout(_LEAST_BYTES))
    page_bytes = page_for(store, limit_bytes)
    return page_bytes, buffers_of(store, page_bytes)


def open_rows(store: Store, page_bytes: int) -> Rows:
    """Open a store and return what moves rows to it.

    Raises
    ------
    StoreError
        If the store cannot be used, or is another run's.
    """
    if buffers_for_rows(store, page_bytes) is None:
        store.open(page_layout(page_bytes))
        return _Paged(store, page_bytes)
    # The store is opened to be this run's; nothing passes through its own buffers.
    store.open(page_layout(_LEAST_BYTES))
    try:
        found = rows_of(store, page_bytes)
    except (OSError, MemoryError) as error:
        store.close()
        raise StoreError(f"tier {store.name!r} cannot be used: {error}") from error
    except BaseException:
        store.close()
        raise
    assert found is not None
    return _Whole(found, page_bytes)


class _Paged(Pager):
    """Rows in pages."""

    def close(self) -> None:
        """Nothing: pages are the store's."""


class _Whole:
    """Rows that the calling thread moves as they are."""

    def __init__(self, rows: RowStore, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.stopped = False
        self._rows = rows

    def put(
        self, lines: Sequence[Tensor], cancelled: Callable[[], bool] = lambda: False
    ) -> range | None:
        """Write a row; return its key, None if there is no room or it is cancelled."""
        key = self._rows.put([line.numpy() for line in lines], lambda: self.stopped or cancelled())
        return None if key is None else range(key, key + 1)

    def wait(self, keys: range) -> bool:
        """Return True: a row was written when `put` returned."""
        return True

    def read(self, keys: range, lengths: Sequence[int], targets: Sequence[Tensor | None]) -> None:
        """Read a row.  Raises CheckpointLost."""
        lines = [
            length if target is None else target.numpy()
            for length, target in zip(lengths, targets, strict=True)
        ]
        self._rows.read(keys.start, lines, lambda: self.stopped)

    def drop(self, keys: range) -> None:
        """Free a row."""
        for key in keys:
            self._rows.drop(key)

    def close(self) -> None:
        """Free all rows."""
        self._rows.close()
