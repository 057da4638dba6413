"""`offload`: what autograd saves, moved to slow tiers and fetched back in reverse.

The counterpart of recomputation: nothing runs twice, but everything travels.
Tensors are cut into pages of equal size, so that any `Store` serves, and its
bounds on memory hold.  Writes are under way while the forward pass goes on;
the backward pass asks for tensors in about the reverse order, and those before
the one asked for are fetched ahead.

What comes back is what kernels saw: the same bytes with the same strides, alignment
and conjugate and negative bits, in memory shared as before (`geometry.py`).

A tensor moves once nothing but the graph holds its memory.  Nothing can write to it
any more by then, neither an operator that fills in a tensor after saving it nor one of the
writes that no version counter sees (`.data`, `.numpy()`, another module's kernel); and a
tensor that is held elsewhere would not give up its memory by moving.

What stays where it is: parameters and their views, small tensors, memory that PyTorch
does not own, whatever is held elsewhere or the tiers have no room for, and tensors that
are more than their bytes: subclasses, sparse, nested, MKL-DNN and quantised ones, wrappers
of `torch.func`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from ..backends.base import CheckpointLost, Store
from ..backends.lifetimes import Birth, end
from ..backends.urls import Tiers, tier_names
from ..errors import ArgumentError, MultistageError
from ..support.units import parse_bytes
from .tensors.geometry import Geometry, Place, extent, is_plain, whole
from .tensors.streams import Home, the_device
from .tiers.by_name import open_tiers
from .tiers.paging import PAGE_BYTES, Pager, page_layout

_IN_FLIGHT = 4  # tensors whose writes may be under way
_FEW_FAMILIES = 64  # before those that are gone are looked for
_LOOKS = 8  # at a tensor that was just saved, one at each save, before it counts as held
_HELD_LOOKS = 2  # at tensors that are held, at each save


@dataclass(slots=True)
class OffloadStats:
    """What an `offload` did.

    Attributes
    ----------
    moved, moved_bytes : int
        Tensors that went to the tiers.
    kept, kept_bytes : int
        That stayed: small, held elsewhere when the context ended, no room.
    shared : int
        Saved again though they were there already.
    """

    moved: int = 0
    moved_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    shared: int = 0


@contextmanager
def offload(
    tiers: Tiers,
    *,
    min_bytes: int | str = "1 MiB",
    ahead: int = 4,
    stays: Sequence[Tensor] = (),
    device: torch.device | str | None = None,
) -> Iterator[OffloadStats]:
    """Move what autograd saves in this context to slow tiers, until the backward asks for it.

    Plain PyTorch code as it stands; the numbers are the same bits.  What is held elsewhere
    (a variable, a module's buffer, a list of outputs) until the context ends is not moved.

    Parameters
    ----------
    tiers : str or Store, or a sequence of them
        As for `multistage.torch.unroll`.
    min_bytes : int or str
        Smaller tensors stay.
    ahead : int
        Tensors to fetch ahead of the one asked for.
    stays : sequence of Tensor
        Not moved, nor views of them, such as inputs that are held anyway.
    device : torch.device or str, optional
        Of the tensors to move; default: CUDA where there is such a device.

    Yields
    ------
    OffloadStats
        Counts, up to date after the context.

    Raises
    ------
    ArgumentError
        For no tier, or negative numbers.
    RuntimeError
        In the backward, if a saved tensor was written to meanwhile, as plain
        autograd has it.

    Notes
    -----
    Backwards may run on several threads.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(4)))
    >>> x = torch.ones(512, 1024, requires_grad=True)
    >>> with mst.offload("memory:") as stats:
    ...     loss = layers(x).sum()
    >>> loss.backward()
    >>> stats.moved
    4
    """
    names = tier_names(tiers)
    if not names:
        raise ArgumentError("offload needs a tier, as in offload('pinned:8GiB')")
    if ahead < 0:
        raise ArgumentError(f"ahead={ahead} must not be negative")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = the_device(torch.device(device))
    least = parse_bytes(min_bytes, "min_bytes")
    store = open_tiers(names, place)
    assert store is not None
    shelf = _Shelf(store, place, least, ahead, stays)
    try:
        with torch.autograd.graph.saved_tensors_hooks(shelf.pack, shelf.unpack):
            yield shelf.stats
    finally:
        shelf.settle()


@dataclass(eq=False, slots=True)
class _Piece:
    """Elements of one storage at one version, in the tiers."""

    shelf: _Shelf
    number: int
    geometry: Geometry
    place: Place
    versions: tuple[Tensor, int] | None  # a tensor that reads them, until they are written
    home: Home  # the stream that they were saved on
    looks: int = 0  # how often its memory was found held elsewhere
    keys: range = range(0)
    kept: _Kept | None = None  # where there was no room, or a write failed
    fetched: bool = False
    spoiled: bool = False
    __weakref__: Any = field(init=False, repr=False)

    @property
    def waits(self) -> bool:
        """Whether it is still to be put."""
        return self.versions is not None and not self.keys

    def __del__(self) -> None:
        # Wherever it happens to be called: the store may be in the middle of something.
        self.shelf.gone.append((self.keys, self.versions))


@dataclass(eq=False, slots=True)
class _Moved:
    """One saved tensor whose elements are in the tiers."""

    piece: _Piece
    geometry: Geometry


class _Kept:
    """One saved tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None = None) -> None:
        # Detached: an output of the operation that saves it would keep its own graph for ever.
        self.tensor = tensor.detach()
        self.version = tensor._version if version is None else version

    def checked(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(_WRITTEN)
        return self.tensor


class _Family:
    """Tensors that count their versions together, on one storage, at one version.

    Tensors on one storage need not count together (`.data`, `from_numpy`): equal
    versions mean equal bytes only within a family.
    """

    __slots__ = ("base", "pieces", "places", "storage")

    def __init__(self, base: Tensor, storage: torch.UntypedStorage) -> None:
        self.base = TensorWeakRef(base)
        self.storage = StorageWeakRef(storage)  # no other storage has its address meanwhile
        self.pieces: weakref.WeakValueDictionary[Any, _Piece] = weakref.WeakValueDictionary()
        self.places: weakref.WeakValueDictionary[Any, Place] = weakref.WeakValueDictionary()

    def is_gone(self) -> bool:
        return self.storage.expired() or self.base() is None


class _Shelf:
    """What one `offload` holds.

    Notes
    -----
    A backward may run on any thread, and on several at a time: a lock makes one
    thread of them for the store.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        least: int,
        ahead: int,
        stays: Sequence[Tensor],
    ) -> None:
        self._device, self._least, self._ahead = device, least, ahead
        self.stats = OffloadStats()
        self._stays = {t.untyped_storage()._cdata: t for t in stays if is_plain(t.detach())}
        store.open(page_layout(PAGE_BYTES))
        self._pager = Pager(store)
        weakref.finalize(self, end, store.close, Birth.here())
        self._lock = threading.RLock()
        self._next_number = 0
        self.gone: deque[tuple[range, Any]] = deque()  # of pieces nobody wants any more
        self._pieces: weakref.WeakValueDictionary[int, _Piece] = weakref.WeakValueDictionary()
        self._families: dict[tuple[int, int], _Family] = {}  # by storage and version
        self._crowd = _FEW_FAMILIES
        self._saved: deque[weakref.ref[_Piece]] = deque()  # of late
        self._held: deque[weakref.ref[_Piece]] = deque()  # longer, and held elsewhere
        self._ours: Counter[int] = Counter()  # tensors of pieces, by the storage they hold
        self._writing: deque[weakref.ref[_Piece]] = deque()

    # ----------------------------------------------------------------- forward

    def pack(self, tensor: Tensor) -> Any:
        """Put a tensor on the shelf; return what stands for it."""
        if not is_plain(tensor) or tensor.device != self._device:
            return _Kept(tensor)
        base = tensor if tensor._base is None else tensor._base
        is_parameter = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        storage = tensor.untyped_storage()
        if is_parameter or storage._cdata in self._stays or _is_foreign(storage):
            return _Kept(tensor)
        geometry = Geometry.of(tensor)
        if not 0 < geometry.nbytes >= self._least:
            self._count_kept(geometry)
            return _Kept(tensor)
        with self._lock:
            self._tidy()
            self._put_ready()
            family = self._family(base, storage)
            piece = family.pieces.get(geometry.elements)
            if piece is not None:
                self.stats.shared += 1
                return _Moved(piece, geometry)
            where = extent(storage, geometry)
            place = family.places.get(where)
            if place is None:
                place = family.places[where] = Place(storage, where)
            versions = tensor.detach(), tensor._version
            home = Home(self._device)
            piece = _Piece(self, self._next_number, geometry, place, versions, home)
            self._next_number += 1
            self._pieces[piece.number] = family.pieces[geometry.elements] = piece
            self._saved.append(weakref.ref(piece))
            self._ours[storage._cdata] += 1
        return _Moved(piece, geometry)

    def _count_kept(self, geometry: Geometry) -> None:
        self.stats.kept += 1
        self.stats.kept_bytes += geometry.nbytes

    def _family(self, base: Tensor, storage: torch.UntypedStorage) -> _Family:
        """Return the family of a tensor with this base."""
        key = storage._cdata, base._version
        family = self._families.get(key)
        if family is None or family.base() is not base:
            if len(self._families) >= self._crowd:
                self._families = {k: f for k, f in self._families.items() if not f.is_gone()}
                self._crowd = max(_FEW_FAMILIES, 2 * len(self._families))
            family = self._families[key] = _Family(base, storage)
        return family

    def _put_ready(self) -> None:
        """Put what nothing else holds any more, of what was saved of late and some of the rest."""
        for _ in range(len(self._saved)):
            piece = self._saved.popleft()()
            if piece is not None and not self._put_if_sole(piece):
                piece.looks += 1
                queue = self._saved if piece.looks < _LOOKS else self._held
                queue.append(weakref.ref(piece))
        for _ in range(min(_HELD_LOOKS, len(self._held))):
            piece = self._held.popleft()()
            if piece is not None and not self._put_if_sole(piece):
                self._held.append(weakref.ref(piece))

    def _put_if_sole(self, piece: _Piece) -> bool:
        """Put a piece if nothing else holds its memory; return whether that was so."""
        assert piece.versions is not None
        tensor, _ = piece.versions
        (uses, references), (one_use, few) = _holders(tensor), _alone()
        if uses - self._ours[_number(tensor)] >= one_use or references > few:
            return False
        self._put(piece)
        return True

    def _put(self, piece: _Piece) -> None:
        assert piece.versions is not None
        tensor, version = piece.versions
        if tensor._version != version:
            piece.spoiled = True
            self._let_go(piece)
            return
        while len(self._writing) >= _IN_FLIGHT:
            self._settle_oldest()
        with piece.home.context():  # whatever the stream of the operation that comes next
            stored = self._stored(piece, tensor)
        if stored:
            self._writing.append(weakref.ref(piece))
            self.stats.moved += 1
            self.stats.moved_bytes += piece.geometry.nbytes
        else:
            self._keep_piece(piece)

    def _keep_piece(self, piece: _Piece) -> None:
        assert piece.versions is not None
        tensor, version = piece.versions
        self._count_kept(piece.geometry)
        piece.kept = _Kept(tensor, version)
        self._let_go(piece)

    def _let_go(self, piece: _Piece) -> None:
        """Let go of what a piece was saved from."""
        assert piece.versions is not None
        self._drop(piece.versions[0])
        piece.versions = None

    def _drop(self, tensor: Tensor) -> None:
        number = _number(tensor)
        self._ours[number] -= 1
        if not self._ours[number]:
            del self._ours[number]

    def _stored(self, piece: _Piece, tensor: Tensor) -> bool:
        """Put the pages of a piece; return whether there was room."""
        keys = self._pager.put([piece.geometry.line(tensor.untyped_storage())])
        if keys is None:
            return False
        piece.keys = keys
        return True

    def _settle_oldest(self) -> None:
        piece = self._writing.popleft()()
        if piece is not None:
            self._written(piece)

    def _written(self, piece: _Piece) -> None:
        """Wait until a piece's pages have left it; let go of it."""
        if piece.versions is None:
            return
        tensor, version = piece.versions
        if not self._pager.wait(piece.keys):
            piece.kept = _Kept(tensor, version)
        self._let_go(piece)

    def settle(self) -> None:
        """Wait for the writes under way: the forward pass is over."""
        with self._lock:
            self._tidy()
            for reference in (*self._saved, *self._held):
                piece = reference()
                if piece is not None and not self._put_if_sole(piece):
                    self._keep_piece(piece)
            self._saved.clear()
            self._held.clear()
            while self._writing:
                self._settle_oldest()
            self._families.clear()

    # ---------------------------------------------------------------- backward

    def unpack(self, saved: _Kept | _Moved) -> Tensor:
        """Return the tensor that stands behind what `pack` returned."""
        if isinstance(saved, _Kept):
            return saved.checked()
        piece, geometry = saved.piece, saved.geometry
        with self._lock:
            self._tidy()
            if piece.waits:
                assert piece.versions is not None
                return _again(_Kept(*piece.versions), piece.geometry, geometry)
            self._written(piece)
            if piece.kept is not None:
                return _again(piece.kept, piece.geometry, geometry)
            if piece.spoiled:
                raise RuntimeError(_WRITTEN)
            root, shift = piece.place.root()
            if not piece.place.has(piece.number, root):
                self._fetch_ahead(piece)
                piece.geometry.fill(root, shift, self._line(piece))
                piece.place.filled(piece.number)
                piece.fetched = False
            return geometry.on(root, shift)

    def _fetch_ahead(self, piece: _Piece) -> None:
        for number in range(piece.number, max(-1, piece.number - self._ahead - 1), -1):
            other = self._pieces.get(number)
            if other is not None and other.keys and not other.fetched:
                other.fetched = True
                self._pager.prefetch(other.keys)

    def _line(self, piece: _Piece) -> Tensor:
        """Return the bytes of a piece."""
        line = torch.empty(piece.geometry.nbytes, dtype=torch.uint8, device=self._device)
        try:
            self._pager.read(piece.keys, [len(line)], [line])
        except CheckpointLost as error:
            raise MultistageError(
                f"a saved tensor is lost, and nothing can compute it again: {error}"
            ) from error
        return line

    def _tidy(self) -> None:
        """Give back the pages of pieces that are gone."""
        while self.gone:
            keys, versions = self.gone.popleft()
            if versions is not None:
                self._pager.wait(keys)
            self._pager.drop(keys)
            if versions is not None:
                self._drop(versions[0])


_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)


def _number(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many hold a tensor's storage, and how many the object that stands for it."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _alone() -> tuple[int, int]:
    """Return `_holders` of a storage that a single tensor holds."""
    return _holders(torch.empty(1, device="cpu"))


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether others may write to a storage unseen: NumPy, other processes."""
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


def _again(kept: _Kept, own: Geometry, geometry: Geometry) -> Tensor:
    """Return a tensor on the storage of one that was kept, which counts its versions too."""
    tensor = kept.checked()
    if own == geometry:
        return tensor.detach()
    root = tensor.detach()
    root.data = whole(tensor.untyped_storage())
    return geometry.on(root, 0)
