"""`offload`: what autograd saves, moved to slow tiers and fetched back in reverse.

The counterpart of recomputation: nothing runs twice, but everything travels.
Tensors are cut into pages of equal size, so that any `Store` serves, and its
bounds on memory hold.  Writes are under way while the forward pass goes on;
the backward pass asks for tensors in about the reverse order, and those before
the one asked for are fetched ahead.

What stays where it is: parameters and their views, small tensors, and whatever
the tiers have no room for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends.base import CheckpointLost, Store
from ..backends.urls import Tiers, tier_names
from ..costs import parse_bytes
from ..errors import ArgumentError, MultistageError
from ..layout import Layout
from .streams import Home, the_device
from .tensors import TensorLayout
from .tiers import end, open_tiers, take

PAGE_BYTES = 1 << 20
_IN_FLIGHT = 4  # tensors whose writes may be under way


@dataclass(slots=True)
class OffloadStats:
    """What an `offload` did.

    Attributes
    ----------
    moved, moved_bytes : int
        Tensors that went to the tiers.
    kept, kept_bytes : int
        That stayed because they are small or because there was no room.
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

    Plain PyTorch code as it stands; the numbers are the same bits.

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
    least = parse_bytes(min_bytes)
    give_back = take(names)
    try:
        store = open_tiers(names, place)
        assert store is not None
        shelf = _Shelf(store, place, least, ahead, stays, give_back)
    except BaseException:
        give_back()
        raise
    with torch.autograd.graph.saved_tensors_hooks(shelf.pack, shelf.unpack):
        yield shelf.stats
    shelf.settle()


@dataclass(eq=False, slots=True)
class _Packed:
    """One saved tensor, in the tiers."""

    shelf: _Shelf
    number: int
    keys: range
    layout: TensorLayout
    packing: Any
    nbytes: int
    versions: tuple[Tensor, int] | None  # the tensor and its version, while it is written
    kept: _Kept | None = None  # where a write failed
    fetched: bool = False
    spoiled: bool = False
    back: weakref.ref[Tensor] | None = None
    home: Home | None = None  # where that was made
    __weakref__: Any = field(init=False, repr=False)

    def __del__(self) -> None:
        # Wherever it happens to be called: the store may be in the middle of something.
        self.shelf.gone.append((self.keys, self.versions))


class _Kept:
    """One saved tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None = None) -> None:
        self.tensor = tensor
        self.version = tensor._version if version is None else version


class _Shelf:
    def __init__(
        self,
        store: Store,
        device: torch.device,
        least: int,
        ahead: int,
        stays: Sequence[Tensor],
        give_back: Callable[[], None],
    ) -> None:
        self._store, self._device, self._least, self._ahead = store, device, least, ahead
        self.stats = OffloadStats()
        self._stays = {t.untyped_storage()._cdata: t for t in stays}
        page = Layout.of((np.broadcast_to(np.uint8(0), (PAGE_BYTES,)),))
        store.open(page)
        weakref.finalize(self, end, store.close, give_back)
        self._next_key = self._next_number = 0
        self.gone: deque[tuple[range, Any]] = deque()  # of tensors nobody wants any more
        self._packed: weakref.WeakValueDictionary[int, _Packed] = weakref.WeakValueDictionary()
        self._same: dict[Any, tuple[StorageWeakRef, weakref.ref[_Packed]]] = {}
        self._writing: deque[weakref.ref[_Packed]] = deque()

    # ----------------------------------------------------------------- forward

    def pack(self, tensor: Tensor) -> Any:
        """Put a tensor on the shelf; return what stands for it."""
        self._tidy()
        base = tensor._base if tensor._base is not None else tensor
        is_parameter = base.is_leaf and base.requires_grad
        nbytes = tensor.numel() * tensor.element_size()
        strange = tensor.layout is not torch.strided or tensor.device != self._device
        held = tensor.untyped_storage()._cdata in self._stays
        if is_parameter or strange or held:
            return _Kept(tensor)
        # A view of little, expanded, holds little.
        small = min(nbytes, tensor.untyped_storage().nbytes()) < self._least
        if small:
            return self._keep(tensor, nbytes)
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        known = self._same.get(key)
        if known is not None and not known[0].expired():
            before = known[1]()
            if before is not None:
                self.stats.shared += 1
                return before
        packed = self._put(tensor, nbytes)
        if packed is None:
            return self._keep(tensor, nbytes)
        self._same[key] = StorageWeakRef(tensor.untyped_storage()), weakref.ref(packed)
        self.stats.moved += 1
        self.stats.moved_bytes += nbytes
        return packed

    def _keep(self, tensor: Tensor, nbytes: int) -> _Kept:
        self.stats.kept += 1
        self.stats.kept_bytes += nbytes
        return _Kept(tensor)

    def _put(self, tensor: Tensor, nbytes: int) -> _Packed | None:
        while len(self._writing) >= _IN_FLIGHT:
            self._settle_oldest()
        layout = TensorLayout([tensor], ["a saved tensor"])
        (line,), packing = layout.pack([tensor])
        pages = -(-nbytes // PAGE_BYTES)
        keys = range(self._next_key, self._next_key + pages)
        self._next_key += pages
        for page, key in enumerate(keys):
            piece = line[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            if not self._store.put(key, [_filled(piece)], block=True):
                for other in keys[:page]:
                    self._store.wait_written(other)
                    self._store.drop(other)
                return None
        versions = tensor.detach(), tensor._version
        packed = _Packed(self, self._next_number, keys, layout, packing, nbytes, versions)
        self._next_number += 1
        self._packed[packed.number] = packed
        self._writing.append(weakref.ref(packed))
        return packed

    def _settle_oldest(self) -> None:
        packed = self._writing.popleft()()
        if packed is not None:
            self._written(packed)

    def _written(self, packed: _Packed) -> None:
        """Wait until a tensor's pages have left it; let go of it."""
        if packed.versions is None:
            return
        tensor, version = packed.versions
        written = [self._store.wait_written(key) for key in packed.keys]  # for every one
        if not all(written):
            packed.kept = _Kept(tensor, version)
        packed.spoiled = tensor._version != version
        packed.versions = None

    def settle(self) -> None:
        """Wait for the writes under way: the forward pass is over."""
        while self._writing:
            self._settle_oldest()
        self._same.clear()

    # ---------------------------------------------------------------- backward

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that stands behind what `pack` returned."""
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:
                raise RuntimeError(_WRITTEN)
            return saved.tensor
        packed: _Packed = saved
        self._tidy()
        self._written(packed)
        if packed.kept is not None:
            return self.unpack(packed.kept)
        if packed.spoiled:
            raise RuntimeError(_WRITTEN)
        there = None if packed.back is None else packed.back()
        if there is not None:
            assert packed.home is not None
            packed.home.hand(there)
            return there
        self._fetch_ahead(packed)
        tensor = self._got(packed)
        packed.back, packed.home = weakref.ref(tensor), Home(tensor.device)
        packed.fetched = False
        return tensor

    def _fetch_ahead(self, packed: _Packed) -> None:
        for number in range(packed.number, max(-1, packed.number - self._ahead - 1), -1):
            other = self._packed.get(number)
            if other is not None and not other.fetched:
                other.fetched = True
                for key in other.keys:
                    self._store.prefetch(key)

    def _got(self, packed: _Packed) -> Tensor:
        line: Tensor | None = None
        try:
            for page, key in enumerate(packed.keys):
                (piece,) = self._store.get(key)
                part = piece if isinstance(piece, Tensor) else torch.from_numpy(np.array(piece))
                if line is None:
                    line = torch.empty(packed.nbytes, dtype=torch.uint8, device=part.device)
                here = line[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
                here.copy_(part[: len(here)])
        except CheckpointLost as error:
            raise MultistageError(
                f"a saved tensor is lost, and nothing can compute it again: {error}"
            ) from error
        assert line is not None
        (tensor,) = packed.layout.unpack([line], packed.packing)
        return tensor

    def _tidy(self) -> None:
        """Give back the pages of tensors that are gone."""
        while self.gone:
            keys, versions = self.gone.popleft()
            for key in keys:
                if versions is not None:
                    self._store.wait_written(key)
                self._store.drop(key)


_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)


def _filled(piece: Any) -> Any:
    """Return a page of full length."""
    if len(piece) == PAGE_BYTES:
        return piece
    if isinstance(piece, Tensor):
        return torch.nn.functional.pad(piece, (0, PAGE_BYTES - len(piece)))
    return np.concatenate([piece, np.zeros(PAGE_BYTES - len(piece), np.uint8)])
