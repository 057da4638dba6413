"""What one `offload` holds, and when it moves.

Tensors move in pages.  Writes are in flight while the forward pass continues; the backward pass
asks for tensors in about the reverse order, and those before the one asked for are fetched ahead.

A tensor moves once nothing but the graph holds its memory.  Nothing can write to it
any more by then, neither an operator that fills in a tensor after saving it nor one of the
writes that no version counter sees (`.data`, `.numpy()`, another module's kernel); and a
tensor that is held elsewhere would not give up its memory by moving.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from ...backends.base import CheckpointLost, Store
from ...backends.lifetimes import Birth, Ending, end
from ...errors import MultistageError
from ...states.layout import Layout
from ...support.interrupts import Shield
from ..tensors.geometry import Geometry, Place, extent, is_plain, whole
from ..tensors.streams import Home
from .paging import PAGE_BYTES, Pager

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


_IN_FLIGHT = 4  # tensors whose writes may be in flight
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


class Shelf:
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
        with Shield(up=True):  # what is open is also noted to be closed
            store.open(Layout.up_to(PAGE_BYTES))
            Ending(self, partial(end, store.close, Birth.here()))
        self._pager = Pager(store)
        self._lock = threading.RLock()
        self._next_number = 0
        # Of pieces that are not needed any more.
        self.gone: deque[tuple[range, tuple[Tensor, int] | None]] = deque()
        self._pieces: weakref.WeakValueDictionary[int, Piece] = weakref.WeakValueDictionary()
        self._families: dict[tuple[int, int], Family] = {}  # by storage and version
        self._crowd = _FEW_FAMILIES
        self._saved: deque[weakref.ref[Piece]] = deque()  # of late
        self._held: deque[weakref.ref[Piece]] = deque()  # longer, and held elsewhere
        self._ours: Counter[int] = Counter()  # tensors of pieces, by the storage they hold
        self._writing: deque[weakref.ref[Piece]] = deque()

    # ----------------------------------------------------------------- forward

    def pack(self, tensor: Tensor) -> Kept | Moved:
        """Put a tensor on the shelf; return what stands for it."""
        if not is_plain(tensor) or tensor.device != self._device:
            return Kept(tensor)
        base = tensor if tensor._base is None else tensor._base
        is_parameter = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        storage = tensor.untyped_storage()
        if is_parameter or storage._cdata in self._stays or is_foreign(storage):
            return Kept(tensor)
        geometry = Geometry.of(tensor)
        if not 0 < geometry.nbytes >= self._least:
            self._count_kept(geometry)
            return Kept(tensor)
        with self._lock:
            self._tidy()
            self._put_ready()
            family = self._family(base, storage)
            piece = family.pieces.get(geometry.elements)
            if piece is not None:
                self.stats.shared += 1
                return Moved(piece, geometry)
            where = extent(storage, geometry)
            place = family.places.get(where)
            if place is None:
                place = family.places[where] = Place(storage, where)
            versions = tensor.detach(), tensor._version
            home = Home(self._device)
            piece = Piece(self.gone, self._next_number, geometry, place, versions, home)
            self._next_number += 1
            self._pieces[piece.number] = family.pieces[geometry.elements] = piece
            self._saved.append(weakref.ref(piece))
            self._ours[storage._cdata] += 1
        return Moved(piece, geometry)

    def _count_kept(self, geometry: Geometry) -> None:
        self.stats.kept += 1
        self.stats.kept_bytes += geometry.nbytes

    def _family(self, base: Tensor, storage: torch.UntypedStorage) -> Family:
        """Return the family of a tensor with this base."""
        key = storage._cdata, base._version
        family = self._families.get(key)
        if family is None or family.base() is not base:
            if len(self._families) >= self._crowd:
                self._families = {k: f for k, f in self._families.items() if not f.is_gone()}
                self._crowd = max(_FEW_FAMILIES, 2 * len(self._families))
            family = self._families[key] = Family(base, storage)
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

    def _put_if_sole(self, piece: Piece) -> bool:
        """Put a piece if nothing else holds its memory; return whether that was so."""
        assert piece.versions is not None
        tensor, _ = piece.versions
        if not is_sole(tensor, self._ours[number_of(tensor)]):
            return False
        self._put(piece)
        return True

    def _put(self, piece: Piece) -> None:
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

    def _keep_piece(self, piece: Piece) -> None:
        assert piece.versions is not None
        tensor, version = piece.versions
        self._count_kept(piece.geometry)
        piece.kept = Kept(tensor, version)
        self._let_go(piece)

    def _let_go(self, piece: Piece) -> None:
        """Release what a piece was saved from."""
        assert piece.versions is not None
        self._drop(piece.versions[0])
        piece.versions = None

    def _drop(self, tensor: Tensor) -> None:
        number = number_of(tensor)
        self._ours[number] -= 1
        if not self._ours[number]:
            del self._ours[number]

    def _stored(self, piece: Piece, tensor: Tensor) -> bool:
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

    def _written(self, piece: Piece) -> None:
        """Wait until a piece's pages have left it; release it."""
        if piece.versions is None:
            return
        tensor, version = piece.versions
        if not self._pager.wait(piece.keys):
            piece.kept = Kept(tensor, version)
        self._let_go(piece)

    def settle(self) -> None:
        """Wait for the writes in flight: the forward pass is over."""
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

    def unpack(self, saved: Kept | Moved) -> Tensor:
        """Return the tensor that stands behind what `pack` returned."""
        if isinstance(saved, Kept):
            return saved.checked()
        piece, geometry = saved.piece, saved.geometry
        with self._lock:
            self._tidy()
            if piece.waits:
                assert piece.versions is not None
                return again(Kept(*piece.versions), piece.geometry, geometry)
            self._written(piece)
            if piece.kept is not None:
                return again(piece.kept, piece.geometry, geometry)
            if piece.spoiled:
                raise RuntimeError(WRITTEN)
            root, shift = piece.place.root()
            if not piece.place.has(piece.number, root):
                self._fetch_ahead(piece)
                piece.geometry.fill(root, shift, self._line(piece))
                piece.place.filled(piece.number)
                piece.fetched = False
            return geometry.on(root, shift)

    def _fetch_ahead(self, piece: Piece) -> None:
        for number in range(piece.number, max(-1, piece.number - self._ahead - 1), -1):
            other = self._pieces.get(number)
            if other is not None and other.keys and not other.fetched:
                other.fetched = True
                self._pager.prefetch(other.keys)

    def _line(self, piece: Piece) -> Tensor:
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
