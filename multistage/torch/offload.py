"""`offload`: what autograd saves, moved to slow tiers and fetched back in reverse.

The counterpart of recomputation: nothing runs twice, but everything travels.
Tensors are cut into pages of equal size, so that any `Store` serves, and its
bounds on memory hold.  Writes are in flight while the forward pass continues;
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
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from ..backends.base import CheckpointLost, Store
from ..backends.lifetimes import Ending
from ..backends.urls import Tiers, tier_names
from ..errors import ArgumentError, MultistageError
from ..states.layout import Layout
from ..support.interrupts import Shield
from ..support.units import parse_bytes
from .tensors.geometry import Geometry, Place, extent, is_plain, whole
from .tensors.streams import Home, the_device
from .tiers.paging import PAGE_BYTES, Pager
from .tiers.pinned import open_tiers

_IN_FLIGHT = 4  # tensors whose writes may be in flight
_FEW_FAMILIES = 64  # before those that are gone are looked for
_LOOKS = 8  # at a tensor that was just saved, one at each save, before it counts as held
_HELD_LOOKS = 2  # at tensors that are held, at each save
WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)


@dataclass(eq=False, slots=True)
class Part:
    """Elements of one storage at one version, in the tiers."""

    gone: deque[tuple[range, tuple[Tensor, int] | None]]  # of `SavedTensors`
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

    def __del__(self) -> None:
        # Wherever it happens to be called: the store may be in the middle of something.
        self.gone.append((self.keys, self.versions))


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


# A tensor that stays, or what reads the elements of a part.
Saved: TypeAlias = Kept | tuple[Part, Geometry]


class Family:
    """Tensors that count their versions together, on one storage, at one version.

    Tensors on one storage need not count together (`.data`, `from_numpy`): equal
    versions mean equal bytes only within a family.
    """

    __slots__ = ("base", "parts", "places", "storage")

    def __init__(self, base: Tensor, storage: torch.UntypedStorage) -> None:
        self.base = TensorWeakRef(base)
        self.storage = StorageWeakRef(storage)  # no other storage has its address meanwhile
        self.parts: weakref.WeakValueDictionary[object, Part] = weakref.WeakValueDictionary()
        self.places: weakref.WeakValueDictionary[tuple[int, int], Place] = (
            weakref.WeakValueDictionary()
        )

    def is_gone(self) -> bool:
        """Whether nothing holds the storage, or the tensor that counts its versions."""
        return self.storage.expired() or self.base() is None


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


class SavedTensors:
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
            Ending(self, store.close)
        self._pager = Pager(store)
        self._lock = threading.RLock()
        self._next_number = 0
        # Of parts that are not needed any more.
        self.gone: deque[tuple[range, tuple[Tensor, int] | None]] = deque()
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._families: dict[tuple[int, int], Family] = {}  # by storage and version
        self._crowd = _FEW_FAMILIES
        self._saved: deque[weakref.ref[Part]] = deque()  # of late
        self._held: deque[weakref.ref[Part]] = deque()  # longer, and held elsewhere
        self._ours: Counter[int] = Counter()  # tensors of parts, by the storage they hold
        self._writing: deque[weakref.ref[Part]] = deque()

    # ----------------------------------------------------------------- forward

    def pack(self, tensor: Tensor) -> Saved:
        """Note that a tensor is to be moved; return what stands for it."""
        if not is_plain(tensor) or tensor.device != self._device:
            return Kept(tensor)
        base = tensor if tensor._base is None else tensor._base
        is_parameter = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        storage = tensor.untyped_storage()
        if is_parameter or storage._cdata in self._stays or is_foreign(storage):
            return Kept(tensor)
        geometry = Geometry.of(tensor)
        if not 0 < geometry.nbytes >= self._least:
            self.stats.kept += 1
            self.stats.kept_bytes += geometry.nbytes
            return Kept(tensor)
        with self._lock:
            self._tidy()
            self._put_ready()
            family = self._family(base, storage)
            part = family.parts.get(geometry.elements)
            if part is not None:
                self.stats.shared += 1
                return part, geometry
            where = extent(storage, geometry)
            place = family.places.get(where)
            if place is None:
                place = family.places[where] = Place(storage, where)
            versions = tensor.detach(), tensor._version
            home = Home(self._device)
            part = Part(self.gone, self._next_number, geometry, place, versions, home)
            self._next_number += 1
            self._parts[part.number] = family.parts[geometry.elements] = part
            self._saved.append(weakref.ref(part))
            self._ours[storage._cdata] += 1
        return part, geometry

    def _family(self, base: Tensor, storage: torch.UntypedStorage) -> Family:
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
            part = self._saved.popleft()()
            if part is not None and not self._put_if_sole(part):
                part.looks += 1
                queue = self._saved if part.looks < _LOOKS else self._held
                queue.append(weakref.ref(part))
        for _ in range(min(_HELD_LOOKS, len(self._held))):
            part = self._held.popleft()()
            if part is not None and not self._put_if_sole(part):
                self._held.append(weakref.ref(part))

    def _put_if_sole(self, part: Part) -> bool:
        """Put a part if nothing else holds its memory; return whether that was so."""
        assert part.versions is not None
        tensor, _ = part.versions
        if not is_sole(tensor, self._ours[tensor.untyped_storage()._cdata]):
            return False
        self._put(part)
        return True

    def _put(self, part: Part) -> None:
        assert part.versions is not None
        tensor, version = part.versions
        if tensor._version != version:
            part.spoiled = True
            self._let_go(part)
            return
        self._settle(_IN_FLIGHT - 1)
        with part.home.context():  # whatever the stream of the operation that comes next
            keys = self._pager.put([part.geometry.line(tensor.untyped_storage())])
        if keys is not None:
            part.keys = keys
            self._writing.append(weakref.ref(part))
            self.stats.moved += 1
            self.stats.moved_bytes += part.geometry.nbytes
        else:
            self._keep_part(part)

    def _keep_part(self, part: Part) -> None:
        assert part.versions is not None
        tensor, version = part.versions
        self.stats.kept += 1
        self.stats.kept_bytes += part.geometry.nbytes
        part.kept = Kept(tensor, version)
        self._let_go(part)

    def _let_go(self, part: Part) -> None:
        """Release what a part was saved from."""
        assert part.versions is not None
        self._drop(part.versions[0])
        part.versions = None

    def _drop(self, tensor: Tensor) -> None:
        number = tensor.untyped_storage()._cdata
        self._ours[number] -= 1
        if not self._ours[number]:
            del self._ours[number]

    def _settle(self, most: int) -> None:
        """Wait for the oldest writes in flight, until so many are left."""
        while len(self._writing) > most:
            part = self._writing.popleft()()
            if part is not None:
                self._written(part)

    def _written(self, part: Part) -> None:
        """Wait until a part's pages have left it; release it."""
        if part.versions is None:
            return
        tensor, version = part.versions
        if not self._pager.wait(part.keys):
            part.kept = Kept(tensor, version)
        self._let_go(part)

    def settle(self) -> None:
        """Wait for the writes in flight: the forward pass is over."""
        with self._lock:
            self._tidy()
            for reference in (*self._saved, *self._held):
                part = reference()
                if part is not None and not self._put_if_sole(part):
                    self._keep_part(part)
            self._saved.clear()
            self._held.clear()
            self._settle(0)
            self._families.clear()

    # ---------------------------------------------------------------- backward

    def unpack(self, saved: Saved) -> Tensor:
        """Return the tensor that stands behind what `pack` returned."""
        if isinstance(saved, Kept):
            return saved.checked()
        part, geometry = saved
        with self._lock:
            self._tidy()
            if part.versions is not None and not part.keys:  # it is still to be put
                return again(Kept(*part.versions), part.geometry, geometry)
            self._written(part)
            if part.kept is not None:
                return again(part.kept, part.geometry, geometry)
            if part.spoiled:
                raise RuntimeError(WRITTEN)
            root, shift = part.place.root()
            if not part.place.has(part.number, root):
                self._fetch_ahead(part)
                part.geometry.fill(root, shift, self._line(part))
                part.place.filled(part.number)
                part.fetched = False
            return geometry.on(root, shift)

    def _fetch_ahead(self, part: Part) -> None:
        for number in range(part.number, max(-1, part.number - self._ahead - 1), -1):
            other = self._parts.get(number)
            if other is not None and other.keys and not other.fetched:
                other.fetched = True
                self._pager.prefetch(other.keys)

    def _line(self, part: Part) -> Tensor:
        """Return the bytes of a part."""
        line = torch.empty(part.geometry.nbytes, dtype=torch.uint8, device=self._device)
        try:
            self._pager.read(part.keys, [len(line)], [line])
        except CheckpointLost as error:
            raise MultistageError(
                f"a saved tensor is lost, and nothing can compute it again: {error}"
            ) from error
        return line

    def _tidy(self) -> None:
        """Give back the pages of parts that are gone."""
        while self.gone:
            keys, versions = self.gone.popleft()
            if versions is not None:
                self._pager.wait(keys)
            self._pager.drop(keys)
            if versions is not None:
                self._drop(versions[0])


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
    saved = SavedTensors(store, place, least, ahead, stays)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved.stats
    finally:
        saved.settle()
