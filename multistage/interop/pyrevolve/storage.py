"""The storages of pyrevolve: levels of a hierarchy, usable by themselves too.

Given to a `MultiLevelRevolver` a storage says what a level is: how many
checkpoints it holds, what a write and a read cost, and where they go
(`tier()`).  By itself it saves and loads lists of arrays, by key or as a stack.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...backends import FileStore, MemoryStore, Store
from ...errors import ArgumentError, StateError, StoreError
from ...states.layout import Array, Layout
from ...support.interrupts import Shield
from .bridge import StorageStore
from .compression import CompressedObject
from .operators import Compression
from .profiling import Profiler

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
    profiler : Profiler, optional
    wd, rd : float
        Cost of writing and reading one checkpoint, in forward steps.
    name : str

    Notes
    -----
    A storage of your own defines `save` and `load`; a `MultiLevelRevolver`
    then calls them where the schedule has its level, without overlap.
    """

    def __init__(
        self,
        size_ckp: int,
        n_ckp: int,
        dtype: DTypeLike,
        profiler: Profiler | None = None,
        wd: float = 0,
        rd: float = 0,
        name: str = "storage",
    ) -> None:
        if n_ckp < 1:
            raise ArgumentError(f"n_ckp={n_ckp} of {name} must be at least 1")
        self.size_ckp, self.n_ckp, self.dtype = size_ckp, n_ckp, dtype
        self.profiler = Profiler() if profiler is None else profiler
        self.wd, self.rd, self.name = wd, rd, name
        self._top = -1

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        """Keep a copy of the arrays under `key`, 0 <= key < n_ckp."""
        raise NotImplementedError(f"{type(self).__name__} must define save(key, data_pointers)")

    def load(self, key: int, locations: Sequence[Array]) -> None:
        """Copy what is kept under `key` into the arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define load(key, locations)")

    def tier(self) -> Store:
        """Return the store this storage stands for."""
        return StorageStore(self)

    def push(self, data_pointers: Sequence[Array]) -> None:
        """Save on top of the stack.  Raises StoreError when it is full."""
        if self.isFull():
            raise StoreError(f"{self.name} is full: {self.n_ckp} checkpoints")
        self.save(self._top + 1, data_pointers)
        self._top += 1

    def peek(self, locations: Sequence[Array]) -> None:
        """Load the top of the stack.  Raises StoreError when it is empty."""
        if self.isEmpty():
            raise StoreError(f"{self.name} is empty")
        self.load(self._top, locations)

    def pop(self, locations: Sequence[Array] | None = None) -> None:
        """Drop the top of the stack, which is not read.  Raises StoreError when it is empty."""
        if self.isEmpty():
            raise StoreError(f"{self.name} is empty")
        self._top -= 1

    def isFull(self) -> bool:
        """Whether the stack holds `n_ckp` checkpoints."""
        return self._top >= self.n_ckp - 1

    def isEmpty(self) -> bool:
        """Whether the stack holds nothing."""
        return self._top < 0

    @property
    def maxsize(self) -> int:
        """Numbers it holds at most."""
        return self.size_ckp * self.n_ckp

    @property
    def maxsize_in_bytes(self) -> int:
        """Bytes it holds at most."""
        return self.maxsize * int(np.dtype(self.dtype).itemsize)

    @property
    def size(self) -> int:
        """Numbers on its stack now."""
        return self.size_ckp * (self._top + 1)

    @property
    def nckp(self) -> int:
        """Checkpoints it holds at most."""
        return self.n_ckp

    def _require(self, held: bool, key: int) -> None:
        if not held:
            raise StoreError(f"{self.name} holds nothing under key {key}")

    def _key(self, key: int) -> int:
        if not 0 <= key < self.n_ckp:
            raise ArgumentError(f"key {key} of {self.name} must lie in 0..{self.n_ckp - 1}")
        return key


class NumpyStorage(Storage):
    """Checkpoints in memory; as the first level, the fast slots.

    Examples
    --------
    >>> storage, back = NumpyStorage(3, 2, np.float64), np.zeros(3)
    >>> storage.push([np.arange(3.0)])
    >>> storage.peek([back])
    >>> back
    array([0., 1., 2.])
    """

    def __init__(
        self,
        size_ckp: int,
        n_ckp: int,
        dtype: DTypeLike,
        profiler: Profiler | None = None,
        wd: float = 0,
        rd: float = 0,
        name: str = "MemoryStorage",
    ) -> None:
        super().__init__(size_ckp, n_ckp, dtype, profiler, wd, rd, name)
        self._held: dict[int, list[Array]] = {}

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        with self.profiler.get_timer("storage", "copy_save"):
            self._held[self._key(key)] = [array.copy() for array in data_pointers]

    def load(self, key: int, locations: Sequence[Array]) -> None:
        self._require(key in self._held, key)
        with self.profiler.get_timer("storage", "copy_load"):
            _copy_into(locations, self._held[key])

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
        profiler: Profiler | None = None,
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
        self._store: FileStore | None = None  # opened when the storage is used by itself
        self._layout: Layout | None = None
        self._keys: set[int] = set()

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        arrays = [np.ascontiguousarray(array).view(np.ndarray) for array in data_pointers]
        layout = Layout.of(arrays)
        if self._layout is None or not layout.same_as(self._layout):
            if self._keys:
                raise StateError(f"{self.name} holds checkpoints of other shapes; use another")
            self.close()
            store = open_folder(self.filedir)
            with Shield(up=True):
                store.open(layout)
                self._store, self._layout = store, layout
        assert self._store is not None
        with self.profiler.get_timer("storage", "copy_save"):
            self._store.drop(self._key(key))
            self._keys.discard(key)
            accepted = self._store.put(key, arrays, block=True)
            if not accepted or not self._store.wait_written(key):
                raise StoreError(f"{self.name} could not write checkpoint {key}")
            self._keys.add(key)

    def load(self, key: int, locations: Sequence[Array]) -> None:
        self._require(key in self._keys, key)
        assert self._store is not None
        with self.profiler.get_timer("storage", "copy_load"):
            _copy_into(locations, self._store.get(key))

    def tier(self) -> Store:
        return open_folder(self.filedir)

    def checkFilesDir(self) -> None:
        """Make the folder if it is not there."""
        open_folder(self.filedir).close()

    def removeDatdir(self) -> None:
        """Give the disk space back; no folder is made for it."""
        self.close()

    def close(self) -> None:
        """Give the disk space back."""
        with Shield(up=True):
            store, self._store, self._layout = self._store, None, None
            self._keys = set()
            if store is not None:
                store.close()

    def __del__(self) -> None:
        if getattr(self, "_store", None) is not None:
            self.close()


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
        profiler: Profiler | None = None,
        wd: float = 0,
        rd: float = 0,
        name: str = "ByteStorage",
    ) -> None:
        super().__init__(size_ckp, n_ckp, dtype, profiler, wd, rd, name)
        self.compression = compression
        self._held: dict[int, list[CompressedObject]] = {}

    def save(self, key: int, data_pointers: Sequence[Array]) -> None:
        compress = self.compression[0]
        with self.profiler.get_timer("storage", "copy_save"):
            self._held[self._key(key)] = [compress(array) for array in data_pointers]

    def load(self, key: int, locations: Sequence[Array]) -> None:
        self._require(key in self._held, key)
        decompress = self.compression[1]
        with self.profiler.get_timer("storage", "copy_load"):
            _copy_into(locations, [np.asarray(decompress(each)) for each in self._held[key]])


def _copy_into(locations: Sequence[Array], arrays: Sequence[Array]) -> None:
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
