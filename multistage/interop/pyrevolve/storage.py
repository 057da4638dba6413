"""The storages of pyrevolve: levels of a hierarchy.

Given to a `MultiLevelRevolver` a storage says what a level is: how many checkpoints it holds, what
a write and a read cost, and where they go (`tier()`).
"""

from __future__ import annotations

import itertools
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ...backends import FileStore, MemoryStore, Store
from ...backends.base import BaseStore, CheckpointLost, StoreStats, TransferRecord
from ...errors import ArgumentError, StateError, StoreError
from ...states.layout import Array, Layout
from .compression import CompressedObject, Compression

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


class Storage:
    """Holds up to `n_ckp` checkpoints of `size_ckp` numbers.

    Parameters
    ----------
    size_ckp : int
        Numbers in one checkpoint.
    n_ckp : int
    dtype : dtype
    profiler : object
        Not used: that of the revolver counts.
    wd, rd : float
        Cost of writing and reading one checkpoint, in forward steps.
    name : str

    Notes
    -----
    A storage of your own defines `save` and `load`; a `MultiLevelRevolver`
    then calls them where the schedule has its level, without overlap.
    Revolvers that are given one storage share its keys.
    """

    def __init__(
        self,
        size_ckp: int,
        n_ckp: int,
        dtype: DTypeLike,
        profiler: object = None,
        wd: float = 0,
        rd: float = 0,
        name: str = "storage",
    ) -> None:
        self.size_ckp, self.n_ckp, self.dtype = size_ckp, n_ckp, dtype
        self.wd, self.rd, self.name = wd, rd, str(name)
        # Keys that were given back by a revolver, and those that none was given yet.
        self._free, self._fresh = list[int](), itertools.count()

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        """Keep a copy of the arrays under `key`, 0 <= key < n_ckp."""
        raise NotImplementedError(f"{type(self).__name__} must define save(key, data_pointers)")

    def load(self, key: int, locations: Sequence[Array]) -> None:
        """Copy what is kept under `key` into the arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define load(key, locations)")

    def tier(self) -> Store:
        """Return the store that a `MultiLevelRevolver` uses for this storage, one for each."""
        return StorageStore(self)


class StorageStore(BaseStore):
    """One revolver's checkpoints in a storage of the user's; nothing runs in the background."""

    queue_depth = 1

    def __init__(self, storage: Storage) -> None:
        self.name = storage.name
        self.stats = StoreStats()
        self.transfers: deque[TransferRecord] = deque(maxlen=4096)
        self._storage = storage
        self._layout: Layout  # since `open`
        self._keys: dict[int, int] = {}  # of a checkpoint -> of the storage

    def buffer_bytes(self, layout: Layout) -> int:
        """None: the storage's own memory is its own affair."""
        return 0

    def capacity_states(self, layout: Layout) -> int | None:
        """Return the storage's `n_ckp`."""
        return int(self._storage.n_ckp)

    def open(self, layout: Layout) -> None:
        """Begin with no checkpoint."""
        self.close()
        self._layout, self.stats = layout, StoreStats()

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Save; False when all keys are taken.  What `save` raises reaches the caller."""
        storage = self._storage
        try:  # taken at once: revolvers of other threads may save meanwhile
            place = storage._free.pop()
        except IndexError:
            place = next(storage._fresh)
        if place >= storage.n_ckp:
            self.stats.refused += 1
            return False
        began = perf_counter()
        try:
            storage.save(place, list(arrays))
        except BaseException:
            storage._free.append(place)
            raise
        self._keys[key] = place
        nbytes, stats = self._layout.nbytes, self.stats
        self.transfers.append(TransferRecord("write", key, began, perf_counter(), nbytes))
        stats.writes += 1
        stats.bytes_written += nbytes
        stats.stored_bytes += nbytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        return True

    def wait_written(self, key: int) -> bool:
        """Return whether it is there: `put` has waited."""
        return key in self._keys

    def prefetch(self, key: int) -> None:
        """Nothing: `get` reads."""

    def get(self, key: int) -> list[Array]:
        """Load into new arrays."""
        if key not in self._keys:
            raise CheckpointLost(f"storage {self.name!r} holds no checkpoint {key}")
        began = perf_counter()
        arrays = [np.empty(leaf.shape, leaf.dtype) for leaf in self._layout.leaves]
        self._storage.load(self._keys[key], arrays)
        nbytes = self._layout.nbytes
        self.transfers.append(TransferRecord("read", key, began, perf_counter(), nbytes))
        self.stats.reads += 1
        self.stats.bytes_read += nbytes
        return arrays

    def drop(self, key: int) -> None:
        """Give the key back."""
        if key in self._keys:
            self._storage._free.append(self._keys.pop(key))
            self.stats.stored_bytes -= self._layout.nbytes

    def close(self) -> None:
        """Give all keys back."""
        self._storage._free += self._keys.values()
        self._keys.clear()


class NumpyStorage(Storage):
    """Checkpoints in memory; as the first level, the fast slots."""

    def tier(self) -> Store:
        return MemoryStore()


class DiskStorage(Storage):
    """Checkpoints in one unnamed file, checked by a checksum on every read.

    Parameters
    ----------
    filedir : path or None
        A folder, made if it is not there; the working folder if None.
    singlefile : bool
        Accepted; there is always one file.
    keepfiles : bool
        Must be false: the file has no name and is gone with the process.
    """

    def __init__(
        self,
        size_ckp: int,
        n_ckp: int,
        dtype: DTypeLike,
        profiler: object = None,
        filedir: str | None = "./",
        singlefile: bool = True,
        wd: float = 0,
        rd: float = 0,
        name: str = "DiskStorage",
        keepfiles: bool = False,
    ) -> None:
        super().__init__(size_ckp, n_ckp, dtype, profiler, wd, rd, name)
        if keepfiles:
            raise ArgumentError("keepfiles=True is not supported: checkpoints lie in unnamed files")
        self.filedir = filedir
        self.singlefile = singlefile

    def tier(self) -> Store:
        return open_folder(self.filedir)


class BytesStorage(Storage):
    """Compressed checkpoints in memory.

    Parameters
    ----------
    size_ckp : int
        Bytes of one checkpoint; what a compressed one takes is up to the scheme.
    compression : (compress, decompress)
        From `init_compression`.
    auto_pickle : bool
        Must be false or unused: nothing is pickled.
    """

    def __init__(
        self,
        size_ckp: int,
        n_ckp: int,
        dtype: DTypeLike,
        compression: Compression,
        auto_pickle: bool = False,
        profiler: object = None,
        wd: float = 0,
        rd: float = 0,
        name: str = "ByteStorage",
    ) -> None:
        super().__init__(size_ckp, n_ckp, dtype, profiler, wd, rd, name)
        self.compression = compression
        self._held: dict[int, list[CompressedObject]] = {}

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        if not 0 <= key < self.n_ckp:
            raise ArgumentError(f"key {key} of {self.name} must lie in 0..{self.n_ckp - 1}")
        self._held[key] = [self.compression[0](array) for array in data_pointers]

    def load(self, key: int, locations: Sequence[Array]) -> None:
        if key not in self._held:
            raise StoreError(f"{self.name} holds nothing under key {key}")
        arrays = [np.asarray(self.compression[1](each)) for each in self._held[key]]
        for k, (target, array) in enumerate(zip(locations, arrays, strict=True)):
            if (target.size, target.dtype) != (array.size, array.dtype):
                raise StateError(
                    f"array {k} is {target.shape} {target.dtype}, its checkpoint was "
                    f"{array.shape} {array.dtype}"
                )
            np.copyto(target, array.reshape(target.shape))


def open_folder(folder: str | None) -> FileStore:
    """Return a file store in a folder, which is made if it is not there.

    Raises
    ------
    StoreError
        If it cannot be made or used.
    """
    path = Path(folder or ".")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"folder {str(path)!r} cannot be made ({error.strerror}); "
            f"give another, such as {tempfile.gettempdir()!r}"
        ) from error
    return FileStore(path)
