"""Base of stores around another store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

from ..states.layout import Layout
from .base import Store, StoreStats, TransferRecord


class WrapperStore:
    """Base of a store around another one, for which it answers.

    It implements the descriptive part of `Store` by that of the inner store; a class
    that derives from it implements the transfers.

    Parameters
    ----------
    inner : Store

    Examples
    --------
    A store that counts the puts of another one; it forwards all other transfers.

    >>> class Counting(WrapperStore):
    ...     puts = 0
    ...     def put(self, key, arrays, *, block=False):
    ...         self.puts += 1
    ...         return self._inner.put(key, arrays, block=block)
    ...     def __getattr__(self, name):
    ...         return getattr(self._inner, name)
    >>> import numpy as np
    >>> from multistage.backends import MemoryStore
    >>> from multistage.states.layout import Layout
    >>> store = Counting(MemoryStore())
    >>> store.open(Layout.of(np.ones(4)))
    >>> store.put(0, [np.ones(4)]), store.puts, store.name
    (True, 1, 'memory')
    >>> store.close()
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.name = inner.name

    @property
    def queue_depth(self) -> int:
        """The writes that may be waiting in the inner store."""
        return self._inner.queue_depth

    @queue_depth.setter
    def queue_depth(self, depth: int) -> None:
        self._inner.queue_depth = depth

    @property
    def stats(self) -> StoreStats:
        """The inner store's counts, which it may make only as it is asked for them."""
        return self._inner.stats

    @property
    def transfers(self) -> deque[TransferRecord]:
        """The inner store's finished transfers, which it may note only as it is asked for them."""
        return self._inner.transfers

    @property
    def capacity_bytes(self) -> int | None:
        """The most bytes the inner store takes, None if unbounded or unknown."""
        return self._inner.capacity_bytes

    @property
    def exact(self) -> bool:
        """Whether the inner store returns every bit that was put."""
        return self._inner.exact

    @property
    def engine(self) -> str:
        """The engine of the inner store."""
        return self._inner.engine

    @property
    def share(self) -> int:
        """How many divide the inner store's bandwidth."""
        return self._inner.share

    @property
    def levels(self) -> Sequence[Store]:
        """None: a level by itself lacks what the wrapper does."""
        return ()

    def parts(self) -> Sequence[Store]:
        """Return this store, the inner one, and what that is built on."""
        return [cast(Store, self), *self._inner.parts()]

    def check(self) -> None:
        """Raise StoreError if the inner store cannot be used."""
        self._inner.check()

    def notes(self) -> list[str]:
        """Return what a report should say of the inner store."""
        return self._inner.notes()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return what the inner store says."""
        return self._inner.buffer_bytes(layout)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return what the inner store says."""
        return self._inner.capacity_states(layout)

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for the inner store's write, no longer than so many seconds."""
        return self._inner.ended(key, timeout_s)

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for the inner store's read, no longer than so many seconds."""
        return self._inner.arrived(key, timeout_s)

    def cancel(self, key: int) -> None:
        """Ask the inner store to give up a write."""
        self._inner.cancel(key)

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait in the inner store now."""
        return self._inner.waits()
