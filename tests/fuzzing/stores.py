"""A store that does everything as late, and as badly, as its contract lets it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from multistage.backends import MemoryStore, StoreStats
from multistage.backends.base import CheckpointLost


class LateStore:
    """Copies what it was given at the last moment; with `lossy`, refuses and loses some of it.

    Arrays must stay unchanged until `wait_written`: not before is one looked at.
    """

    name = "late"
    queue_depth = 2

    def __init__(self, source: random.Random, lossy: bool) -> None:
        self._source, self._lossy = source, lossy
        self._store = MemoryStore(buffer_bytes=0)
        self._late: dict[int, Sequence[Any]] = {}
        self.stats = StoreStats()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, layout: Any) -> None:
        self._store.open(layout)
        self.stats = self._store.stats

    def _unlucky(self) -> bool:
        return self._lossy and self._source.random() < 0.25

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        if self._unlucky() or (len(self._late) >= self.queue_depth and not block):
            return False
        if len(self._late) >= self.queue_depth:
            self._write(next(iter(self._late)))
        self._late[key] = arrays
        return True

    def _write(self, key: int) -> None:
        arrays = self._late.pop(key, None)
        if arrays is not None:
            assert self._store.put(key, arrays, block=True)

    def wait_written(self, key: int) -> bool:
        self._write(key)
        if self._unlucky():
            self._store.wait_written(key)
            self._store.drop(key)
            return False
        return self._store.wait_written(key)

    def prefetch(self, key: int) -> None:
        if key not in self._late:
            self._store.prefetch(key)

    def get(self, key: int) -> list[Any]:
        self._write(key)
        if self._unlucky():
            self._store.drop(key)
            raise CheckpointLost(f"checkpoint {key} is lost on purpose")
        return self._store.get(key)

    def drop(self, key: int) -> None:
        if self._late.pop(key, None) is None:
            self._store.drop(key)

    def close(self) -> None:
        self._late.clear()
        self._store.close()
