"""A store that fails on demand; imported from `backends.testing`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..states.layout import Array, Layout
from .base import CheckpointLost, Store
from .wrapper import WrapperStore

Faults = Collection[int] | Callable[[int], bool]


class FaultyStore(WrapperStore):
    """A store that fails on request, and otherwise works like `inner`.

    Parameters
    ----------
    inner : Store
    refuse : collection of int or callable, optional
        0-based numbers of the calls of `put` that are refused, or a function
        of the number that tells.
    lose_write : collection of int or callable, optional
        Numbers of the accepted writes that fail: `wait_written` answers False.
    lose_read : collection of int or callable, optional
        Numbers of the calls of `get` that raise CheckpointLost.

    Attributes
    ----------
    puts, writes, gets : int
        Calls of `put`, accepted writes and calls of `get` since `open`.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.backends import MemoryStore
    >>> store = FaultyStore(MemoryStore(), refuse={0})
    >>> store.open(Layout.of(np.zeros(3)))
    >>> store.put(5, [np.ones(3)]), store.put(6, [np.ones(3)])
    (False, True)
    >>> store.close()
    """

    def __init__(
        self,
        inner: Store,
        *,
        refuse: Faults = (),
        lose_write: Faults = (),
        lose_read: Faults = (),
    ) -> None:
        super().__init__(inner)
        self._refuse, self._lose_write, self._lose_read = refuse, lose_write, lose_read
        self._restart()

    def _restart(self) -> None:
        self.stats, self.transfers = self._inner.stats, self._inner.transfers
        self.puts = self.writes = self.gets = 0
        self._doomed: set[int] = set()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return what the inner store says."""
        return self._inner.buffer_bytes(layout)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return what the inner store says."""
        return self._inner.capacity_states(layout)

    def open(self, layout: Layout) -> None:
        """Open the inner store; calls are counted again."""
        self._inner.open(layout)
        self._restart()

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Put, unless this call is to be refused."""
        number, self.puts = self.puts, self.puts + 1
        if _hit(self._refuse, number):
            self.stats.refused += 1
            return False
        if not self._inner.put(key, arrays, block=block):
            return False
        number, self.writes = self.writes, self.writes + 1
        if _hit(self._lose_write, number):
            self._doomed.add(key)
        return True

    def wait_written(self, key: int) -> bool:
        """Wait; False, and the key is gone, if that write is to fail."""
        written = self._inner.wait_written(key)
        if key not in self._doomed:
            return written
        self.stats.lost += 1
        self.drop(key)
        return False

    def prefetch(self, key: int) -> None:
        """Prefetch from the inner store."""
        self._inner.prefetch(key)

    def get(self, key: int) -> list[Array]:
        """Get; CheckpointLost, and the key is gone, if this call is to fail."""
        number, self.gets = self.gets, self.gets + 1
        if _hit(self._lose_read, number):
            self.stats.lost += 1
            self.drop(key)
            raise CheckpointLost(f"read {number} was told to fail")
        return self._inner.get(key)

    def drop(self, key: int) -> None:
        """Drop in the inner store."""
        self._doomed.discard(key)
        self._inner.drop(key)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()


def _hit(faults: Faults, number: int) -> bool:
    return faults(number) if callable(faults) else number in faults
