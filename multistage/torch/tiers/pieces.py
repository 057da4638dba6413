"""What autograd saved and `offload` holds: in the tiers, on its way there, or kept.

A tensor moves once nothing but the graph holds its memory.  Nothing can write to it
any more by then, neither an operator that fills in a tensor after saving it nor one of the
writes that no version counter sees (`.data`, `.numpy()`, another module's kernel); and a
tensor that is held elsewhere would not give up its memory by moving.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from ..tensors.geometry import Geometry, Place, whole
from ..tensors.streams import Home

WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)


@dataclass(eq=False, slots=True)
class Piece:
    """Elements of one storage at one version, in the tiers."""

    gone: deque[tuple[range, tuple[Tensor, int] | None]]  # of the shelf
    number: int
    geometry: Geometry
    place: Place
    versions: tuple[Tensor, int] | None  # a tensor that reads them, until they are written
    home: Home  # the stream that they were saved on
    looks: int = 0  # how often its memory was found held elsewhere
    keys: range = range(0)
    kept: Kept | None = None  # where there was no room, or a write failed
    fetched: bool = False
    spoiled: bool = False
    __weakref__: object = field(init=False, repr=False)

    @property
    def waits(self) -> bool:
        """Whether it is still to be put."""
        return self.versions is not None and not self.keys

    def __del__(self) -> None:
        # Wherever it happens to be called: the store may be in the middle of something.
        self.gone.append((self.keys, self.versions))


@dataclass(eq=False, slots=True)
class Moved:
    """One saved tensor whose elements are in the tiers."""

    piece: Piece
    geometry: Geometry


class Kept:
    """One saved tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None = None) -> None:
        # Detached: an output of the operation that saves it would keep its own graph forever.
        self.tensor = tensor.detach()
        self.version = tensor._version if version is None else version

    def checked(self) -> Tensor:
        """Return the tensor.  Raises RuntimeError if it was written to, as autograd does."""
        if self.tensor._version != self.version:
            raise RuntimeError(WRITTEN)
        return self.tensor


class Family:
    """Tensors that count their versions together, on one storage, at one version.

    Tensors on one storage need not count together (`.data`, `from_numpy`): equal
    versions mean equal bytes only within a family.
    """

    __slots__ = ("base", "pieces", "places", "storage")

    def __init__(self, base: Tensor, storage: torch.UntypedStorage) -> None:
        self.base = TensorWeakRef(base)
        self.storage = StorageWeakRef(storage)  # no other storage has its address meanwhile
        self.pieces: weakref.WeakValueDictionary[object, Piece] = weakref.WeakValueDictionary()
        self.places: weakref.WeakValueDictionary[tuple[int, int], Place] = (
            weakref.WeakValueDictionary()
        )

    def is_gone(self) -> bool:
        """Whether nothing holds the storage, or the tensor that counts its versions."""
        return self.storage.expired() or self.base() is None


def number_of(tensor: Tensor) -> int:
    """Return what a tensor's storage is known by."""
    return int(tensor.untyped_storage()._cdata)


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many hold a tensor's storage, and how many the object that stands for it."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _alone() -> tuple[int, int]:
    """Return `_holders` of a storage that a single tensor holds."""
    return _holders(torch.empty(1, device="cpu"))


def is_sole(tensor: Tensor, others: int) -> bool:
    """Whether nothing holds a tensor's memory but itself and so many other tensors."""
    (uses, references), (one_use, few) = _holders(tensor), _alone()
    return uses - others < one_use and references <= few


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether others may write to a storage unseen: NumPy, other processes."""
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


def again(kept: Kept, own: Geometry, geometry: Geometry) -> Tensor:
    """Return a tensor on the storage of one that was kept, which counts its versions too."""
    tensor = kept.checked()
    if own == geometry:
        return tensor.detach()
    root = tensor.detach()
    root.data = whole(tensor.untyped_storage())
    return geometry.on(root, 0)
