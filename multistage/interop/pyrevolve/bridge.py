"""A storage of the user's own as a tier: its `save` and `load`, called where they stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Literal, Protocol

import numpy as np

from ...backends.base import BaseStore, CheckpointLost, StoreStats, TransferRecord
from ...states.layout import Array, Layout


class KeyedStorage(Protocol):
    """What is used of a storage; `Storage` has it."""

    name: str

    @property
    def nckp(self) -> int: ...

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        """Keep a copy of the arrays under `key`, 0 <= key < nckp."""
        ...

    def load(self, key: int, locations: Sequence[Array]) -> None:
        """Copy what is kept under `key` into the arrays."""
        ...


class StorageStore(BaseStore):
    """The Store protocol on a pyrevolve storage; nothing runs in the background.

    Parameters
    ----------
    storage : Storage
        Its keys are given out here, `n_ckp` of them.
    """

    queue_depth = 1

    def __init__(self, storage: KeyedStorage) -> None:
        self._storage = storage
        self.name = str(storage.name)
        self.stats = StoreStats()
        self.transfers: deque[TransferRecord] = deque(maxlen=4096)
        self._layout: Layout | None = None
        self._free: list[int] = []
        self._keys: dict[int, int] = {}

    def buffer_bytes(self, layout: Layout) -> int:
        """None: the storage's own memory is its own affair."""
        return 0

    def capacity_states(self, layout: Layout) -> int | None:
        """Return the storage's `n_ckp`."""
        return int(self._storage.nckp)

    def open(self, layout: Layout) -> None:
        """Begin with all keys free."""
        self._layout = layout
        self._free = list(reversed(range(self._storage.nckp)))
        self._keys.clear()
        self.stats = StoreStats()

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Save; False when all keys are taken.  What the storage raises reaches the caller."""
        if not self._free:
            self.stats.refused += 1
            return False
        began, place = perf_counter(), self._free.pop()
        self._keys[key] = place
        self._storage.save(place, list(arrays))
        self._count("write", key, began)
        return True

    def wait_written(self, key: int) -> bool:
        """Return whether it is there: `put` has waited."""
        return key in self._keys

    def prefetch(self, key: int) -> None:
        """Nothing: `get` reads."""

    def get(self, key: int) -> list[Array]:
        """Load into new arrays."""
        if key not in self._keys or self._layout is None:
            raise CheckpointLost(f"storage {self.name!r} holds no checkpoint {key}")
        began = perf_counter()
        arrays = [np.empty(leaf.shape, leaf.dtype) for leaf in self._layout.leaves]
        self._storage.load(self._keys[key], arrays)
        self._count("read", key, began)
        return arrays

    def drop(self, key: int) -> None:
        """Give the key back."""
        place = self._keys.pop(key, None)
        if place is not None:
            self._free.append(place)
            assert self._layout is not None
            self.stats.stored_bytes -= self._layout.nbytes

    def close(self) -> None:
        """Give all keys back."""
        self._keys.clear()
        self._free.clear()

    def _count(self, kind: Literal["write", "read"], key: int, began: float) -> None:
        assert self._layout is not None
        nbytes, stats = self._layout.nbytes, self.stats
        self.transfers.append(TransferRecord(kind, key, began, perf_counter(), nbytes))
        if kind == "read":
            stats.reads += 1
            stats.bytes_read += nbytes
            return
        stats.writes += 1
        stats.bytes_written += nbytes
        stats.stored_bytes += nbytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
